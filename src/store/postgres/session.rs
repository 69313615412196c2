//! One operation on one connection: bounded, in one round trip, and asked again where that is safe.

use std::{error::Error, fmt, iter, time::Duration};

use deadpool_postgres::{ClientWrapper, Object, Pool, PoolError};
use tokio::{
    join,
    time::{Instant, sleep, timeout_at},
};
use tokio_postgres::{
    Row,
    types::{ToSql, Type},
};

use super::{
    connect::Tls,
    error::Meaning,
    statements::{Bounds, CLOSING, opening},
};
use crate::store::{StoreError, StoreErrorKind};

/// Carries operations out on the connections of a pool.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) pool: Pool,
    /// Whether the pool is ours, so that its idle connections may be dropped.
    pub(super) own: bool,
    /// For requests that call a statement off, which come on connections of their own.
    pub(super) tls: Tls,
    /// Whether statements are prepared under a name.
    pub(super) named: bool,
    /// The bounds that its connections have from the start.
    pub(super) standing: Option<Bounds>,
}

/// One statement in a transaction of its own.
///
/// It must be safe to ask twice, since a lost connection leaves open whether it was carried out.
pub(super) struct Ask<'a> {
    /// What the caller wants ("claim the key").
    pub(super) attempted: &'static str,
    pub(super) sql: &'a str,
    pub(super) bounds: Bounds,
    pub(super) params: &'a [Param<'a>],
}

/// A value and its builtin type.
pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// Why an operation failed.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// Another transaction has a lock on the row; nothing was done.
    Locked(StoreError),
    /// Anything else.
    Failed(StoreError),
}

impl Failure {
    /// Whether one operation of several may be the cause, and the others would succeed without it.
    pub(super) fn may_be_of_one(&self) -> bool {
        match self {
            Self::Locked(_) => true,
            Self::Failed(error) => error.kind() == StoreErrorKind::Other,
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Locked(error) | Failure::Failed(error) => error,
        }
    }
}

impl Session {
    /// Sends the statement and gives its rows once it is committed.
    pub(super) async fn ask(&self, ask: &Ask<'_>, deadline: Instant) -> Result<Vec<Row>, Failure> {
        let failed = |kind, cause: Cause| {
            Failure::Failed(StoreError::new(kind, ask.attempted).with_source(cause))
        };
        // Whether an earlier try may have been carried out.
        let mut unknown = false;
        let mut tries = 1;
        loop {
            let (meaning, error) = match self.once(ask, deadline).await {
                Ok(rows) => return Ok(rows),
                Err(Trouble::NotSent(cause)) => {
                    let kind = match unknown {
                        true => StoreErrorKind::Unknown,
                        false => StoreErrorKind::Unavailable,
                    };
                    return Err(failed(kind, cause));
                }
                Err(Trouble::NoAnswer(cause)) => {
                    return Err(failed(StoreErrorKind::Unknown, cause));
                }
                Err(Trouble::Answered(meaning, error)) => (meaning, error),
            };
            unknown |= meaning == Meaning::Lost;
            let safe_again = match meaning {
                Meaning::Lost | Meaning::Again | Meaning::Stale | Meaning::ReadOnly => true,
                Meaning::Locked | Meaning::Refused(_) => false,
            };
            if safe_again && tries < MAX_TRIES {
                tries += 1;
                if meaning == Meaning::Again {
                    sleep(jitter()).await;
                }
                continue;
            }
            if meaning == Meaning::Locked && !unknown {
                let cause = Cause::told_by(&error);
                let error = StoreError::new(meaning.kind(), ask.attempted).with_source(cause);
                return Err(Failure::Locked(error));
            }
            let kind = if unknown { StoreErrorKind::Unknown } else { meaning.kind() };
            return Err(failed(kind, Cause::told_by(&error)));
        }
    }

    /// One try. The connection goes back to the pool only if nothing on it is left open.
    async fn once(&self, ask: &Ask<'_>, deadline: Instant) -> Result<Vec<Row>, Trouble> {
        let lent = self.connection(deadline).await.map_err(Trouble::NotSent)?;
        let exchange = self.exchange(&lent, ask);
        let Ok((begun, rows, committed)) = timeout_at(deadline, exchange).await else {
            // The other idle connections lead to the same silence.
            self.drop_idle();
            return Err(Trouble::NoAnswer(Cause::Silence));
        };
        // The first error is the cause of the others. Rows count only once they are committed, and
        // a refusal only if it came from within the transaction.
        let (meaning, error) = match (begun, rows, committed) {
            (Ok(()), Ok(rows), Ok(())) => {
                lent.give_back();
                return Ok(rows);
            }
            (Ok(()), Err(error), Ok(())) => (Meaning::of(&error), error),
            (Err(error), _, _) | (_, Err(error), _) | (_, _, Err(error)) => (Meaning::Lost, error),
        };
        if meaning.leaves_the_connection_clean() {
            lent.give_back();
        }
        if matches!(meaning, Meaning::Lost | Meaning::ReadOnly) {
            self.drop_idle();
        }
        Err(Trouble::Answered(meaning, error))
    }

    /// A connection, or which wait for it was in vain.
    pub(super) async fn connection(&self, deadline: Instant) -> Result<Lent, Cause> {
        match timeout_at(deadline, self.pool.get()).await {
            Ok(Ok(connection)) => Ok(Lent(Some(connection))),
            Ok(Err(error)) => Err(Cause::of_pool(&error)),
            Err(_) => {
                let pool = self.pool.status();
                let full = pool.available == 0 && pool.size >= pool.max_size;
                Err(if full { Cause::PoolBusy(pool.max_size) } else { Cause::NoConnection })
            }
        }
    }

    /// Begin, statement, commit: sent together, in this order. The statement alone, if the session
    /// has the same bounds.
    async fn exchange(
        &self,
        lent: &Lent,
        ask: &Ask<'_>,
    ) -> (Answers<()>, Answers<Vec<Row>>, Answers<()>) {
        let alone = self.standing == Some(ask.bounds);
        let before = if alone { String::new() } else { opening(&ask.bounds) };
        let after = if alone { "" } else { CLOSING };
        self.together(lent, before, ask.sql, ask.params, after).await
    }

    /// Sends what comes before a statement, the statement, and what comes after it, in one round
    /// trip. Nothing, where there is nothing to come.
    pub(super) async fn together(
        &self,
        lent: &Lent,
        mut before: String,
        sql: &str,
        params: &[Param<'_>],
        after: &str,
    ) -> (Answers<()>, Answers<Vec<Row>>, Answers<()>) {
        let client = lent.client();
        // Before all else, since preparing takes a round trip when it is the first time.
        let statement = if self.named {
            let types: Vec<_> = params.iter().map(|(_, kind)| kind.clone()).collect();
            match client.prepare_typed_cached(sql, &types).await {
                Ok(statement) => Some(statement),
                Err(error) => return (Ok(()), Err(error), Ok(())),
            }
        } else {
            None
        };
        let rows = async {
            match &statement {
                None => client.query_typed(sql, params).await,
                Some(statement) => {
                    let values: Vec<_> = params.iter().map(|(value, _)| *value).collect();
                    client.query(statement, &values).await
                }
            }
        };
        if self.named && replans_at(lent.uses()) {
            // Last, since an isolation level must come before everything else.
            let separator = if before.is_empty() { "" } else { "; " };
            before = format!("{before}{separator}{REPLAN}");
        }
        let batch = async |sql: &str| match sql {
            "" => Ok(()),
            sql => client.batch_execute(sql).await,
        };
        // Each is put on the wire when it is first polled.
        join!(biased; batch(&before), rows, batch(after))
    }

    pub(super) fn drop_idle(&self) {
        if self.own {
            self.pool.retain(|_, _| false);
        }
    }
}

pub(super) type Answers<T> = Result<T, tokio_postgres::Error>;

/// What stood in the way of one try.
enum Trouble {
    /// There was no connection: nothing was sent.
    NotSent(Cause),
    /// There was no answer in time.
    NoAnswer(Cause),
    /// The driver reported an error.
    Answered(Meaning, tokio_postgres::Error),
}

/// The source of a [`StoreError`]: which wait it was, or what the driver said.
#[derive(Debug)]
pub(super) enum Cause {
    QueueFull(usize),
    PoolBusy(usize),
    NoConnection,
    Silence,
    Pool(String),
    /// What the driver or the server said.
    Told(String),
}

impl Cause {
    /// What an error of the driver says, without the server's DETAIL: that quotes whole rows.
    pub(super) fn told_by(error: &tokio_postgres::Error) -> Self {
        Self::Told(match error.as_db_error() {
            Some(refusal) => {
                let hint = refusal.hint().map(|hint| format!("; hint: {hint}"));
                format!(
                    "{}: {} (SQLSTATE {}){}",
                    refusal.severity(),
                    refusal.message(),
                    refusal.code().code(),
                    hint.unwrap_or_default(),
                )
            }
            None => {
                let causes = iter::successors(error.source(), |error| (*error).source());
                causes.fold(error.to_string(), |told, cause| format!("{told}: {cause}"))
            }
        })
    }

    fn of_pool(error: &PoolError) -> Self {
        match error {
            PoolError::Backend(error) => Self::told_by(error),
            other => Self::Pool(other.to_string()),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueueFull(size) => write!(f, "{size} operations are waiting already"),
            Self::PoolBusy(size) => {
                write!(f, "all {size} connections of the pool are busy; enlarge it, or the timeout")
            }
            Self::NoConnection => f.write_str("there was no connection to the server in time"),
            Self::Silence => f.write_str("the server did not answer the statement in time"),
            Self::Pool(said) | Self::Told(said) => f.write_str(said),
        }
    }
}

impl Error for Cause {}

/// A connection of the pool. Dropped, it is closed: what was under way on it is not known, and the
/// next borrower must not meet it. The server then rolls back what is not committed.
pub(super) struct Lent(Option<Object>);

impl Lent {
    #[expect(
        clippy::expect_used,
        reason = "only `give_back` and `drop`, which consume it, empty it"
    )]
    pub(super) fn client(&self) -> &ClientWrapper {
        self.0.as_ref().expect("a lent connection is there until it is given back")
    }

    /// How often it has been lent.
    fn uses(&self) -> usize {
        self.0.as_ref().map_or(0, |connection| Object::metrics(connection).recycle_count)
    }

    /// Returns the connection to the pool: it has answered everything and has nothing open.
    pub(super) fn give_back(mut self) {
        self.0.take();
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(Object::take(connection));
        }
    }
}

/// Keeps two transactions that got in each other's way from doing it again.
pub(super) fn jitter() -> Duration {
    let random = getrandom::u32().unwrap_or_default();
    Duration::from_millis(u64::from(5 + random % 45))
}

const MAX_TRIES: u32 = 3;
/// A prepared statement that was planned while the table was small reads all of it, and goes on so
/// while it grows.
const REPLAN: &str = "DISCARD PLANS";

/// So plans are made anew when a connection has been used as often again, and every so often.
fn replans_at(uses: usize) -> bool {
    uses > 0 && (uses.is_power_of_two() || uses % 256 == 0)
}
