//! Claims in Postgres.
//!
//! [`operations`] is the protocol by statements, [`lanes`] sends those that wait together,
//! [`session`] carries one statement out, [`cache`] knows what was done lately, [`open`] is a claim in
//! a transaction that is left open for its work. [`statements`] has all SQL of requests, [`schema`]
//! that of migrations. [`connect`] and [`tls`] make connections, [`error`] knows SQLSTATEs.

mod builder;
mod cache;
mod connect;
mod error;
mod lanes;
mod open;
mod operations;
mod schema;
mod session;
mod statements;
#[cfg(feature = "tls")]
mod tls;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use deadpool_postgres::Pool;
use tokio::time::{Instant, timeout_at};

pub use self::builder::PgStoreBuilder;
pub(crate) use self::open::{OpenClaim, Opening, passing, release, save, told, undo};
use self::{
    cache::DoneKeys,
    lanes::Lanes,
    schema::{ADOPTED, Table},
    session::{Cause, Session},
    statements::{Bounds, Commit, Statements},
};
use super::{ClaimStore, Completion, Record, StoreError, StoreErrorKind, StoreFuture, StoreId};
use crate::claim::{Claim, ClaimOutcome, ClaimToken, EventKey, Held, PayloadHash, Scope};

/// Keeps claims in a Postgres table, 13 or later.
///
/// Cloning is cheap; clones share their connections. Each operation takes a connection for one
/// round trip; none is held, and no transaction is open, while a handler runs, unless it is given one
/// ([`transaction`](crate::transaction)). Operations that
/// would wait for each other are sent together, so a busy store needs few connections. Every wait
/// is bounded, and an operation whose connection is lost is asked again with the same token, on
/// another connection. Keys that it has lately seen done it answers without the database
/// ([`done_cache`](PgStoreBuilder::done_cache)).
///
/// Statements are unnamed and use no session state, so they work behind PgBouncer in transaction
/// mode; on direct connections [`named_statements`](PgStoreBuilder::named_statements) are faster.
/// The table must be made by [`migrate`](Self::migrate) or by hand with
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
    lanes: Lanes,
    done: DoneKeys,
    /// The keys whose work is under way here in a transaction, and their payloads.
    at_work: Mutex<HashMap<EventKey, Option<PayloadHash>>>,
    statements: Statements,
    table: Table,
    timeout: Duration,
    bounds: Bounds,
    adopt_scope: Option<Scope>,
}

impl Shared {
    /// No code panics while it holds the lock, so a poisoned map is a right one.
    fn at_work(&self) -> MutexGuard<'_, HashMap<EventKey, Option<PayloadHash>>> {
        self.at_work.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        PgStoreBuilder::default().build(Table::with_default_name(), pool, None)
    }

    /// A store with other settings.
    pub fn builder() -> PgStoreBuilder {
        PgStoreBuilder::default()
    }

    /// The connections of the store, for statements of the application's own.
    ///
    /// What handlers take of them, claims wait for: enlarge
    /// [`pool_size`](PgStoreBuilder::pool_size), and never hold one while waiting for something
    /// else. With [`named_statements`](PgStoreBuilder::named_statements) they have the store's
    /// timeouts.
    pub fn pool(&self) -> &Pool {
        &self.shared.session.pool
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

        let connecting = session.connection(self.shared.deadline()).await;
        let lent =
            connecting.map_err(|cause| failed(StoreErrorKind::Unavailable).with_source(cause))?;
        let migrating = async {
            let client = lent.client();
            let adopts = client.query_typed_one(&schema::would_adopt(table), &[]).await?;
            let bounds = Bounds {
                lock: MIGRATION_LOCK_TIMEOUT,
                statement: MIGRATION_TIMEOUT,
                commit: Commit::Durable,
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
                return Err(failed(kind).with_source(Cause::told_by(&error)));
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

const MIGRATION_TIMEOUT: Duration = Duration::from_secs(600);
const MIGRATION_LOCK_TIMEOUT: Duration = Duration::from_secs(30);
