//! Claims in Postgres.
//!
//! [`statements`] has all SQL of requests, [`schema`] that of migrations, [`session`] carries one
//! statement out, [`connect`] and [`tls`] make connections, [`error`] knows SQLSTATEs.

mod connect;
mod error;
mod schema;
mod session;
mod statements;
#[cfg(feature = "tls")]
mod tls;

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_postgres::{Row, types::Type};

use self::{
    connect::Target,
    schema::{ADOPTED, DEFAULT_NAME, Table},
    session::{Ask, Failure, Param, Session, Trouble, jitter},
    statements::{Bounds, Statements},
};
use super::{ClaimStore, Completion, Record, StoreError, StoreErrorKind, StoreFuture, StoreId};
use crate::claim::{self, Claim, ClaimOutcome, ClaimToken, EventKey, Held, OnClaim, Scope, State};

/// Keeps claims in a Postgres table, 13 or later.
///
/// Cloning is cheap; clones share their connections. Each operation takes a connection for one
/// round trip; none is held, and no transaction is open, while a handler runs. Every wait is
/// bounded, and an operation whose connection is lost is asked again with the same token, on
/// another connection.
///
/// Statements are unnamed and use no session state, so they work behind PgBouncer in transaction
/// mode. The table must be made by [`migrate`](Self::migrate) or by hand with
/// [`migration_sql`](Self::migration_sql); requests never change it.
///
/// # Examples
///
/// ```no_run
/// use tower_dedupe::PgStore;
///
/// # async fn example() -> Result<(), tower_dedupe::StoreError> {
/// let store = PgStore::connect("postgres://app@localhost/app").await?;
/// store.migrate().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PgStore {
    shared: Arc<Shared>,
}

struct Shared {
    id: StoreId,
    session: Session,
    statements: Statements,
    table: Table,
    timeout: Duration,
    adopt_scope: Option<Scope>,
}

impl PgStore {
    /// Connects to the database at the URL, with the defaults of [`PgStoreBuilder`].
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`] if the URL cannot be used, [`StoreErrorKind::Unavailable`] if no
    /// connection can be made.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder().connect(url).await
    }

    /// The same without connecting: the first operation does.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`] if the URL cannot be used.
    pub fn connect_lazy(url: &str) -> Result<Self, StoreError> {
        Self::builder().connect_lazy(url)
    }

    /// A store on the application's own pool, with the defaults of [`PgStoreBuilder`].
    ///
    /// Operations are bounded whatever the pool's own timeouts are. Requests need a connection only
    /// for moments, but if handlers take all of them, claims wait in line.
    pub fn from_pool(pool: Pool) -> Self {
        let table = Table::with_default_name();
        Self::new(&PgStoreBuilder::default(), table, pool, false)
    }

    /// A store with other settings.
    pub fn builder() -> PgStoreBuilder {
        PgStoreBuilder::default()
    }

    /// The connections of the store, for statements of the application's own.
    ///
    /// What handlers take of them, claims wait for: enlarge
    /// [`pool_size`](PgStoreBuilder::pool_size), and never hold one while waiting for something
    /// else.
    pub fn pool(&self) -> &Pool {
        &self.shared.session.pool
    }

    fn new(builder: &PgStoreBuilder, table: Table, pool: Pool, own: bool) -> Self {
        let shared = Shared {
            id: StoreId::unique(),
            session: Session { pool, own, named: builder.named_statements },
            statements: Statements::on(&table),
            table,
            timeout: builder.timeout,
            adopt_scope: builder.adopt_scope.clone(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Makes the table, or brings it to this version. Safe to repeat, and when many processes start
    /// together; once the table is there it needs no right to change it.
    ///
    /// A table `processed_events(event_key, status, claimed_at)` of the copied pattern is adopted
    /// with every row: the rows get the scope of
    /// [`adopt_scope`](PgStoreBuilder::adopt_scope), done ones are kept for 30 days from now, and
    /// those in progress are free a quarter of an hour after they were claimed. It is locked
    /// meanwhile, and the old program's inserts fail from then on, so that no event is taken by
    /// both.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Schema`] if the table is of a newer version, cannot be adopted (the source
    /// says which column or status stands in the way) or the database user may not make it; the
    /// kinds of a lost database as everywhere. Nothing is changed then. It waits at most 30 seconds
    /// for locks and ten minutes in all.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        const ATTEMPTED: &str = "migrate the table";
        let Shared { session, table, adopt_scope, .. } = &*self.shared;
        let deadline = Instant::now() + MIGRATION_TIMEOUT;
        let failed = |kind| StoreError::new(kind, ATTEMPTED);

        let connecting = session.connection(Instant::now() + self.shared.timeout).await;
        let lent = connecting.map_err(|trouble| match trouble {
            Trouble::NotSent(cause) | Trouble::NoAnswer(cause) => {
                failed(StoreErrorKind::Unavailable).with_source(cause)
            }
            Trouble::Answered(meaning, error) => failed(meaning.kind()).with_source(error),
        })?;
        let migrating = async {
            let client = lent.client();
            let adopts = client.query_typed_one(&schema::would_adopt(table), &[]).await?;
            let bounds = Bounds {
                lock: MIGRATION_LOCK_TIMEOUT,
                statement: MIGRATION_TIMEOUT,
                durable: true,
            };
            // One message: an error anywhere ends it, and closing the connection rolls it back.
            client
                .batch_execute(&format!(
                    "{}; {} {}",
                    statements::opening(&bounds),
                    self.migration_sql(),
                    statements::CLOSING,
                ))
                .await?;
            adopts.try_get::<_, bool>(0)
        };
        let migrated = timeout_at(deadline, migrating).await;
        let adopted = match migrated {
            Err(_) => return Err(failed(StoreErrorKind::Unknown).with_source("no answer in time")),
            Ok(Ok(adopted)) => adopted,
            Ok(Err(error)) => {
                let kind = match error::Meaning::of(&error) {
                    // Mostly the migration's own words about the table.
                    error::Meaning::Refused(StoreErrorKind::Other) => StoreErrorKind::Schema,
                    meaning => meaning.kind(),
                };
                return Err(failed(kind).with_source(error));
            }
        };
        lent.give_back();
        if adopted && adopt_scope.is_none() {
            tracing::warn!(
                table = %table.quoted(),
                "adopted the rows of the copied pattern in scope {ADOPTED:?}: unless a layer uses \
                 that scope, their events run once more when they are delivered again",
            );
        }
        Ok(())
    }

    /// The SQL that [`migrate`](Self::migrate) runs, for those who run their own migrations. One
    /// statement, safe to repeat; run it at READ COMMITTED, the default.
    pub fn migration_sql(&self) -> String {
        schema::migration(&self.shared.table, self.shared.adopt_scope.as_ref())
    }
}

impl fmt::Debug for PgStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.shared.session.pool.status();
        f.debug_struct("PgStore")
            .field("table", &self.shared.table.quoted())
            .field("connections", &status.size)
            .field("max_connections", &status.max_size)
            .finish_non_exhaustive()
    }
}

/// Settings of a [`PgStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PgStoreBuilder {
    schema: Option<String>,
    table: String,
    pool_size: usize,
    connect_timeout: Option<Duration>,
    timeout: Duration,
    named_statements: bool,
    adopt_scope: Option<Scope>,
}

impl Default for PgStoreBuilder {
    fn default() -> Self {
        Self {
            schema: None,
            table: DEFAULT_NAME.to_owned(),
            pool_size: 4,
            connect_timeout: None,
            timeout: Duration::from_secs(3),
            named_statements: false,
            adopt_scope: None,
        }
    }
}

impl PgStoreBuilder {
    /// The schema of the table. Default: what the connection's `search_path` finds.
    /// [`migrate`](PgStore::migrate) makes it if it is missing.
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// The name of the table, at most 52 bytes. Default: `processed_events`. A table of the same
    /// name with the ending `_migrations` records its version.
    pub fn table(mut self, table: impl Into<String>) -> Self {
        self.table = table.into();
        self
    }

    /// How many connections there are at most, at least 1. Default: 4. Not for
    /// [`from_pool`](Self::from_pool).
    pub fn pool_size(mut self, connections: usize) -> Self {
        self.pool_size = connections;
        self
    }

    /// How long connecting to one host may take, with TLS and authentication. Default: the URL's
    /// `connect_timeout`, else 2 seconds. Not for [`from_pool`](Self::from_pool).
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// How long an operation may take in all: the wait for a connection, the statement, and asking
    /// again. At least 10 milliseconds; default: 3 seconds. What takes longer is answered as a
    /// failure of the store.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Prepares each statement once for each connection, under a name: faster on direct
    /// connections. Default: no.
    ///
    /// Never behind a pooler in transaction mode, where a name may belong to another client's
    /// statement.
    pub fn named_statements(mut self, named: bool) -> Self {
        self.named_statements = named;
        self
    }

    /// The scope of rows that [`migrate`](PgStore::migrate) adopts: the one that the layer in front
    /// of their events is given. Default: `adopted`, with a warning, since a layer of another scope
    /// does not know them.
    pub fn adopt_scope(mut self, scope: Scope) -> Self {
        self.adopt_scope = Some(scope);
        self
    }

    /// Connects to the database at the URL, or says why that cannot be done.
    ///
    /// The URL is what libpq takes, `postgres://user:password@host:port/database?setting=value`:
    ///
    /// - several hosts, `host1:5432,host2:5432`: the first that accepts writes is used, and another
    ///   when it no longer does;
    /// - `sslmode`: `disable`, `prefer` (the default) and `require` (encrypted, the certificate not
    ///   checked unless `sslrootcert` is given), `verify-ca`, `verify-full`;
    /// - `sslrootcert`: a PEM file, or `system`, the default;
    /// - `target_session_attrs`: `any`, `read-write`, `primary`;
    /// - `connect_timeout`, `application_name`, `keepalives…`, `tcp_user_timeout`, `options` and
    ///   what else tokio-postgres knows.
    ///
    /// # Errors
    ///
    /// As [`PgStore::connect`].
    pub async fn connect(self, url: &str) -> Result<PgStore, StoreError> {
        let store = self.connect_lazy(url)?;
        let deadline = Instant::now() + store.shared.timeout;
        match store.shared.session.connection(deadline).await {
            Ok(lent) => lent.give_back(),
            Err(Trouble::NotSent(cause) | Trouble::NoAnswer(cause)) => {
                return Err(StoreError::new(StoreErrorKind::Unavailable, "connect to Postgres")
                    .with_source(cause));
            }
            Err(Trouble::Answered(meaning, error)) => {
                return Err(
                    StoreError::new(meaning.kind(), "connect to Postgres").with_source(error)
                );
            }
        }
        Ok(store)
    }

    /// The same without connecting: the first operation does.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`] if the URL or a setting cannot be used.
    pub fn connect_lazy(self, url: &str) -> Result<PgStore, StoreError> {
        let table = self.checked()?;
        let target = Target::parse(url, self.connect_timeout).map_err(refused)?;
        let manager = Manager::from_connect(
            target.config(),
            target,
            ManagerConfig { recycling_method: RecyclingMethod::Fast },
        );
        let pool = Pool::builder(manager).max_size(self.pool_size).build().map_err(refused)?;
        Ok(PgStore::new(&self, table, pool, true))
    }

    /// A store on the application's own pool.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`] if a setting cannot be used.
    pub fn from_pool(self, pool: Pool) -> Result<PgStore, StoreError> {
        let table = self.checked()?;
        Ok(PgStore::new(&self, table, pool, false))
    }

    fn checked(&self) -> Result<Table, StoreError> {
        if self.pool_size == 0 {
            return Err(refused("the pool size is 0, it must be at least 1"));
        }
        for (what, time) in
            [("timeout", Some(self.timeout)), ("connect_timeout", self.connect_timeout)]
        {
            if time.is_some_and(|time| !(SHORTEST_TIMEOUT..=LONGEST_TIMEOUT).contains(&time)) {
                return Err(refused(format!(
                    "the {what} must be {SHORTEST_TIMEOUT:?} to {LONGEST_TIMEOUT:?}"
                )));
            }
        }
        Table::new(self.schema.as_deref(), &self.table).map_err(refused)
    }
}

impl ClaimStore for PgStore {
    fn id(&self) -> StoreId {
        self.shared.id
    }

    fn claim<'a>(&'a self, claim: &'a Claim) -> StoreFuture<'a, ClaimOutcome> {
        Box::pin(self.shared.claim(claim))
    }

    fn complete<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        completion: Completion,
    ) -> StoreFuture<'a, Held> {
        Box::pin(self.shared.complete(key, token, completion))
    }

    fn fail<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        retention: Duration,
    ) -> StoreFuture<'a, bool> {
        Box::pin(self.shared.fail(key, token, retention))
    }

    fn renew<'a>(&'a self, claims: &'a [Claim]) -> StoreFuture<'a, Vec<Held>> {
        Box::pin(self.shared.renew(claims, self.shared.deadline()))
    }

    fn forget<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, bool> {
        Box::pin(self.shared.forget(key))
    }

    fn show<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, Option<Record>> {
        Box::pin(self.shared.show(key))
    }

    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        Box::pin(self.shared.purge(limit))
    }
}

impl Shared {
    /// One round trip tells what there is; a second one takes what is free.
    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StoreError> {
        let deadline = self.deadline();
        let (lease, retention) = (millis(claim.lease), millis(claim.retention));
        let token = &claim.token.as_bytes()[..];
        let params: [Param<'_>; 5] = [
            (&claim.key.scope().as_str(), Type::TEXT),
            (&claim.key.as_str(), Type::TEXT),
            (&token, Type::BYTEA),
            (&lease, Type::INT8),
            (&retention, Type::INT8),
        ];
        let ask = |sql| Ask {
            attempted: "claim the key",
            sql,
            bounds: Bounds { durable: true, ..self.bounds_within(claim.lease) },
            params: &params,
        };
        for look in 0..MAX_LOOKS {
            if look >= LOOKS_WITHOUT_A_PAUSE {
                sleep(jitter()).await;
            }
            let looked = self.session.ask(&ask(&self.statements.claim), deadline).await;
            let row = match looked {
                Ok(rows) => rows.first().map(found).transpose()?,
                // A transaction that is not committed has the row: another claim, mid-way.
                Err(Failure::Locked(_)) => return Ok(HELD_BY_A_TRANSACTION),
                Err(failure) => return Err(failure.into()),
            };
            // The row that was in the way was committed after the statement began.
            let Some(row) = row else { continue };
            let (attempt, lease_left) = match claim::on_claim(Some(&row)) {
                OnClaim::Answer(ClaimOutcome::Claimed { attempt }) => (attempt, row.lease_left),
                OnClaim::Answer(answer) => return Ok(answer),
                OnClaim::Take { .. } => {
                    let taken = self.session.ask(&ask(&self.statements.take), deadline).await;
                    match taken {
                        Ok(rows) => match rows.first() {
                            Some(row) => (attempt(row)?, time(row, "lease_left")?),
                            // Somebody else was quicker.
                            None => continue,
                        },
                        Err(Failure::Locked(_)) => return Ok(HELD_BY_A_TRANSACTION),
                        Err(failure) => return Err(failure.into()),
                    }
                }
            };
            // A lease that was half used up while the statement waited is renewed before it counts.
            if lease_left < claim.lease / 2 {
                let held = self.renew(std::slice::from_ref(claim), deadline).await?;
                if held.first() != Some(&Held::Yes) {
                    continue;
                }
            }
            return Ok(ClaimOutcome::Claimed { attempt });
        }
        Err(StoreError::new(StoreErrorKind::Conflict, "claim the key")
            .with_source("the row came and went each time it was looked at"))
    }

    async fn complete(
        &self,
        key: &EventKey,
        token: ClaimToken,
        completion: Completion,
    ) -> Result<Held, StoreError> {
        let status = completion.status.and_then(|status| i16::try_from(status).ok());
        let retention = millis(completion.retention);
        let params: [Param<'_>; 5] = [
            (&key.scope().as_str(), Type::TEXT),
            (&key.as_str(), Type::TEXT),
            (&&token.as_bytes()[..], Type::BYTEA),
            (&status, Type::INT2),
            (&retention, Type::INT8),
        ];
        let ask = Ask {
            attempted: "mark the key done",
            sql: &self.statements.complete,
            bounds: Bounds { durable: true, ..self.bounds() },
            params: &params,
        };
        let rows = self.session.ask(&ask, self.deadline()).await?;
        Ok(if rows.is_empty() { Held::Lost } else { Held::Yes })
    }

    async fn fail(
        &self,
        key: &EventKey,
        token: ClaimToken,
        retention: Duration,
    ) -> Result<bool, StoreError> {
        let retention = millis(retention);
        let params: [Param<'_>; 4] = [
            (&key.scope().as_str(), Type::TEXT),
            (&key.as_str(), Type::TEXT),
            (&&token.as_bytes()[..], Type::BYTEA),
            (&retention, Type::INT8),
        ];
        let ask = Ask {
            attempted: "free the key",
            sql: &self.statements.fail,
            bounds: self.bounds(),
            params: &params,
        };
        Ok(!self.session.ask(&ask, self.deadline()).await?.is_empty())
    }

    async fn renew(&self, claims: &[Claim], deadline: Instant) -> Result<Vec<Held>, StoreError> {
        let Some(shortest) = claims.iter().map(|claim| claim.lease).min() else {
            return Ok(Vec::new());
        };
        // Sorted, so that two renewals lock in the same order, and each claim once.
        let mut each: Vec<_> = claims.iter().collect();
        let id = |claim: &&Claim| (claim.key.clone(), *claim.token.as_bytes());
        each.sort_by_cached_key(id);
        each.dedup_by_key(|claim| id(claim));

        let scopes: Vec<_> = each.iter().map(|claim| claim.key.scope().as_str()).collect();
        let keys: Vec<_> = each.iter().map(|claim| claim.key.as_str()).collect();
        let tokens: Vec<_> = each.iter().map(|claim| &claim.token.as_bytes()[..]).collect();
        let leases: Vec<_> = each.iter().map(|claim| millis(claim.lease)).collect();
        let retentions: Vec<_> = each.iter().map(|claim| millis(claim.retention)).collect();
        let params: [Param<'_>; 5] = [
            (&scopes, Type::TEXT_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&tokens, Type::BYTEA_ARRAY),
            (&leases, Type::INT8_ARRAY),
            (&retentions, Type::INT8_ARRAY),
        ];
        let ask = Ask {
            attempted: "renew the leases",
            sql: &self.statements.renew,
            bounds: self.bounds_within(shortest),
            params: &params,
        };
        let mut held = BTreeSet::new();
        for row in self.session.ask(&ask, deadline).await? {
            let place: i64 = row.try_get("place").map_err(unreadable)?;
            let claim = usize::try_from(place - 1).ok().and_then(|place| each.get(place));
            held.extend(claim.map(id));
        }
        Ok(claims
            .iter()
            .map(|claim| if held.contains(&id(&claim)) { Held::Yes } else { Held::Lost })
            .collect())
    }

    async fn forget(&self, key: &EventKey) -> Result<bool, StoreError> {
        let params: [Param<'_>; 2] =
            [(&key.scope().as_str(), Type::TEXT), (&key.as_str(), Type::TEXT)];
        let ask = Ask {
            attempted: "forget the key",
            sql: &self.statements.forget,
            bounds: Bounds { durable: true, ..self.bounds() },
            params: &params,
        };
        let rows = self.session.ask(&ask, self.deadline()).await?;
        rows.first().map_or(Ok(false), |row| row.try_get(0).map_err(unreadable))
    }

    async fn show(&self, key: &EventKey) -> Result<Option<Record>, StoreError> {
        let params: [Param<'_>; 2] =
            [(&key.scope().as_str(), Type::TEXT), (&key.as_str(), Type::TEXT)];
        let ask = Ask {
            attempted: "read the key",
            sql: &self.statements.show,
            bounds: self.bounds(),
            params: &params,
        };
        let rows = self.session.ask(&ask, self.deadline()).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let state = state(row)?;
        Ok(Some(Record {
            lease_left: match state {
                State::InProgress => time(row, "lease_left")?,
                State::Done | State::Failed => Duration::ZERO,
            },
            retention_left: time(row, "retention_left")?,
            response_status: response_status(row)?,
            ..Record::new(state, attempt(row)?)
        }))
    }

    async fn purge(&self, limit: u32) -> Result<u64, StoreError> {
        let limit = i64::from(limit);
        let ask = Ask {
            attempted: "purge old keys",
            sql: &self.statements.purge,
            bounds: self.bounds(),
            params: &[(&limit, Type::INT8)],
        };
        let rows = self.session.ask(&ask, self.deadline()).await?;
        let purged: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0)).map_err(unreadable)?;
        Ok(purged.unsigned_abs())
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// The same for a statement that writes a lease: the lease is counted from the statement's
    /// beginning, and no wait may use it up.
    fn bounds_within(&self, lease: Duration) -> Bounds {
        let bounds = self.bounds();
        Bounds { lock: bounds.lock.min(lease / 10), ..bounds }
    }

    /// The server gives up before we do, so that its answer is heard: lock, then statement, then
    /// our own deadline.
    fn bounds(&self) -> Bounds {
        Bounds { lock: self.timeout / 2, statement: self.timeout / 10 * 9, durable: false }
    }
}

/// The row as a claim finds it, or has made it.
fn found(row: &Row) -> Result<claim::Row, StoreError> {
    Ok(claim::Row {
        state: state(row)?,
        mine: row.try_get("mine").map_err(unreadable)?,
        attempt: attempt(row)?,
        lease_left: time(row, "lease_left")?,
        expired: row.try_get("expired").map_err(unreadable)?,
        response_status: response_status(row)?,
    })
}

fn state(row: &Row) -> Result<State, StoreError> {
    let status: &str = row.try_get("status").map_err(unreadable)?;
    status.parse().map_err(unreadable)
}

fn attempt(row: &Row) -> Result<u32, StoreError> {
    let attempt: i32 = row.try_get("attempt").map_err(unreadable)?;
    u32::try_from(attempt).map_err(unreadable)
}

fn time(row: &Row, column: &str) -> Result<Duration, StoreError> {
    let millis: i64 = row.try_get(column).map_err(unreadable)?;
    u64::try_from(millis).map(Duration::from_millis).map_err(unreadable)
}

fn response_status(row: &Row) -> Result<Option<u16>, StoreError> {
    let status: Option<i16> = row.try_get("response_status").map_err(unreadable)?;
    Ok(status.and_then(|status| u16::try_from(status).ok()))
}

/// The table has something in it that this version does not write.
fn unreadable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Schema, "read the row").with_source(error)
}

fn refused(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Config, "use the settings of the Postgres store")
        .with_source(error)
}

/// Whole milliseconds, rounded up, within what Postgres can add to a date.
fn millis(time: Duration) -> i64 {
    let millis = time.as_nanos().div_ceil(1_000_000);
    i64::try_from(millis).unwrap_or(i64::MAX).min(LONGEST_MILLIS)
}

/// A transaction that has the row's lock does not say how long it will keep it.
const HELD_BY_A_TRANSACTION: ClaimOutcome =
    ClaimOutcome::InProgress { lease_left: Duration::from_secs(1) };

const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(600);
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(600);
const MIGRATION_LOCK_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_LOOKS: u32 = 12;
const LOOKS_WITHOUT_A_PAUSE: u32 = 2;
/// A thousand years.
const LONGEST_MILLIS: i64 = 1000 * 366 * 24 * 60 * 60 * 1000;
