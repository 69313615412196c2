//! The settings of the store.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};

use super::{
    PgStore, Shared,
    cache::DoneKeys,
    connect::{Target, Tls},
    lanes::Lanes,
    operations::bounds,
    schema::{DEFAULT_NAME, Table},
    session::Session,
    statements::{Bounds, Commit, Statements, standing},
};
use crate::{
    claim::Scope,
    store::{StoreError, StoreErrorKind, StoreId},
};

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
    synchronous_commit: bool,
    done_cache: (usize, Duration),
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
            synchronous_commit: true,
            done_cache: (10_000, Duration::from_secs(10)),
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

    /// How many connections there are at most, at least 1. Default: 4, which is plenty, since
    /// operations share them; but in [transaction mode](crate::transaction) each request in flight
    /// has one to itself. Not for [`from_pool`](Self::from_pool).
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

    /// Says that the connections lead to the server itself, with no pooler in between, and makes
    /// use of it: each statement is prepared once for each connection, under a name, and the
    /// store's own connections are given isolation and timeouts once instead of with each
    /// statement. A claim then takes hardly longer than an insert by hand. Default: no.
    ///
    /// Never behind a pooler in transaction mode: a name may belong to another client's statement
    /// there, and settings of a session reach other clients.
    ///
    /// What the application does on [`pool`](PgStore::pool) then runs under the store's settings,
    /// of which `lock_timeout` is short (20 milliseconds): begin with `SET LOCAL lock_timeout TO
    /// DEFAULT` there, and the same for `statement_timeout`. Not so with
    /// [`from_pool`](Self::from_pool), whose connections are left as they are, nor in
    /// [transaction mode](crate::transaction), where a handler has the database's own settings.
    pub fn named_statements(mut self, named: bool) -> Self {
        self.named_statements = named;
        self
    }

    /// Whether a claim and a done mark wait until the server has them on disk. Default: yes, as
    /// durable as the database's own setting, and on where that is off.
    ///
    /// With no the server answers before it has written, and is faster where disks are slow. A
    /// crash of the database (not of this process) may then forget the claims and done marks of
    /// its last moment, three times `wal_writer_delay`, 0.6 seconds by default. Their events are
    /// not lost: an event that was answered 2xx and is delivered again runs again, and one that is
    /// running may be started a second time. So only for handlers to which that does no harm. In
    /// [transaction mode](crate::transaction) commits wait all the same: the handler's rows are in
    /// them.
    pub fn synchronous_commit(mut self, synchronous: bool) -> Self {
        self.synchronous_commit = synchronous;
        self
    }

    /// How many keys that are done are kept in this process, and for how long, so that a storm of
    /// duplicates is answered without the database. Default: 10,000 keys (about two megabytes if
    /// they are short) for 10 seconds; 0 keys turn it off. At most 10 minutes. A stored response
    /// ([`Duplicate::Replay`](crate::Duplicate::Replay)) is kept too, and counts as one more key for
    /// each KiB.
    ///
    /// A key is kept only once its done mark is committed, and never longer than its retention.
    /// [`forget`](crate::ClaimStore::forget) drops it from this store and its clones at once. Who
    /// forgets it elsewhere, in another process or by SQL, waits for as long before the event is
    /// delivered again: until then it may be answered as a duplicate here.
    pub fn done_cache(mut self, keys: usize, age: Duration) -> Self {
        self.done_cache = (keys, age);
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
        let connecting = store.shared.session.connection(store.shared.deadline()).await;
        let lent = connecting.map_err(|cause| {
            StoreError::new(StoreErrorKind::Unavailable, "connect to Postgres").with_source(cause)
        })?;
        lent.give_back();
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
        let target = match self.named_statements {
            true => target.with_settings(standing(&self.bounds())),
            false => target,
        };
        let tls = target.tls();
        let manager = Manager::from_connect(
            target.config(),
            target,
            ManagerConfig { recycling_method: RecyclingMethod::Fast },
        );
        let pool = Pool::builder(manager).max_size(self.pool_size).build().map_err(refused)?;
        Ok(self.build(table, pool, Some(tls)))
    }

    /// A store on the application's own pool.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`] if a setting cannot be used.
    pub fn from_pool(self, pool: Pool) -> Result<PgStore, StoreError> {
        let table = self.checked()?;
        Ok(self.build(table, pool, None))
    }

    /// A store on a pool; on its own one, whose TLS it knows, or the application's.
    pub(super) fn build(self, table: Table, pool: Pool, own: Option<Tls>) -> PgStore {
        let bounds = self.bounds();
        let is_own = own.is_some();
        let (keys, age) = self.done_cache;
        let shared = Shared {
            id: StoreId::unique(),
            session: Session {
                pool,
                own: is_own,
                tls: own.unwrap_or(Tls::Off),
                named: self.named_statements,
                standing: (is_own && self.named_statements).then_some(bounds),
            },
            lanes: Lanes::default(),
            done: DoneKeys::new(keys, age),
            at_work: Mutex::default(),
            statements: Statements::on(&table),
            table,
            timeout: self.timeout,
            bounds,
            adopt_scope: self.adopt_scope,
        };
        PgStore { shared: Arc::new(shared) }
    }

    fn bounds(&self) -> Bounds {
        let commit = if self.synchronous_commit { Commit::Durable } else { Commit::Soon };
        bounds(self.timeout, commit)
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
        if self.done_cache.1 > LONGEST_CACHE_AGE {
            return Err(refused(format!(
                "the age of the done cache must be at most {LONGEST_CACHE_AGE:?}"
            )));
        }
        Table::new(self.schema.as_deref(), &self.table).map_err(refused)
    }
}

fn refused(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Config, "use the settings of the Postgres store")
        .with_source(error)
}

const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);
const LONGEST_CACHE_AGE: Duration = Duration::from_secs(600);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(600);
