//! Where claims live: the trait every store implements, and the two stores that come with it.

mod memory;
mod not_committed;
mod postgres;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;

use crate::claim::{Claim, ClaimOutcome, ClaimToken, EventKey, Held, State};

pub(crate) use self::postgres::{OpenClaim, Opening, passing, release, save, told, undo};
pub use self::{
    memory::MemoryStore,
    not_committed::{NotCommitted, NotCommittedKind},
    postgres::{PgStore, PgStoreBuilder},
};

/// The future that a store returns.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Keeps the claims of all processes that share it.
///
/// Each method must be atomic on its key, as [the protocol](crate::claim) demands; that is why none
/// has a default body. All time is the store's own clock. The future of any method may be dropped
/// at any point, also after the store has begun to act on it; the caller then treats the outcome as
/// unknown.
///
/// `tower_dedupe::testing::conformance` (feature `testing`) checks an implementation.
pub trait ClaimStore: fmt::Debug + Send + Sync + 'static {
    /// Which store this is. Clones that share their claims return the same id, so that one keeper
    /// renews the claims of them all.
    fn id(&self) -> StoreId;

    /// Claims a key, or says why not. Asked again with the same token, it gives the same answer.
    fn claim<'a>(&'a self, claim: &'a Claim) -> StoreFuture<'a, ClaimOutcome>;

    /// Marks a claim done, durably, together with the response that is to be stored, and keeps the
    /// row for `retention` from now.
    fn complete<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        completion: Completion,
    ) -> StoreFuture<'a, Held>;

    /// Frees a claim at once and keeps the row for `retention` from now. Says whether the token
    /// held the key in progress; if not, nothing was changed.
    fn fail<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        retention: Duration,
    ) -> StoreFuture<'a, bool>;

    /// Moves the leases of claims in progress on to `lease` from now, in one statement. Answers in
    /// the order of `claims`.
    fn renew<'a>(&'a self, claims: &'a [Claim]) -> StoreFuture<'a, Vec<Held>>;

    /// Deletes a key's row whatever its state, so that the next delivery runs again. Says whether
    /// there was one.
    fn forget<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, bool>;

    /// Reads a key's row, whatever its state, if there is one within its retention.
    fn show<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, Option<Record>>;

    /// Deletes at most `limit` rows past their retention and says how many. Never deletes a row
    /// whose lease is alive.
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64>;
}

/// A shared store is a store.
impl<T: ClaimStore + ?Sized> ClaimStore for Arc<T> {
    fn id(&self) -> StoreId {
        (**self).id()
    }

    fn claim<'a>(&'a self, claim: &'a Claim) -> StoreFuture<'a, ClaimOutcome> {
        (**self).claim(claim)
    }

    fn complete<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        completion: Completion,
    ) -> StoreFuture<'a, Held> {
        (**self).complete(key, token, completion)
    }

    fn fail<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        retention: Duration,
    ) -> StoreFuture<'a, bool> {
        (**self).fail(key, token, retention)
    }

    fn renew<'a>(&'a self, claims: &'a [Claim]) -> StoreFuture<'a, Vec<Held>> {
        (**self).renew(claims)
    }

    fn forget<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, bool> {
        (**self).forget(key)
    }

    fn show<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, Option<Record>> {
        (**self).show(key)
    }

    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        (**self).purge(limit)
    }
}

/// What is written with the done mark.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completion {
    /// The status that the success was answered with, for duplicates to repeat.
    pub status: Option<u16>,
    /// The response to be stored, for [claims that ask for it](Claim::replay). To a store it is
    /// bytes and nothing more. It is gone when the row is.
    pub response: Option<Bytes>,
    /// How long the row is kept from now.
    pub retention: Duration,
}

impl Completion {
    /// A completion without a response.
    pub fn new(status: Option<u16>, retention: Duration) -> Self {
        Self { status, response: None, retention }
    }

    /// The same with a response to be stored.
    #[must_use]
    pub fn with_response(mut self, response: Option<Bytes>) -> Self {
        self.response = response;
        self
    }
}

/// A key's row, for people to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The state.
    pub state: State,
    /// The claims of this key so far.
    pub attempt: u32,
    /// What is left of the lease; zero if it is over or the claim has ended.
    pub lease_left: Duration,
    /// What is left of the retention.
    pub retention_left: Duration,
    /// The status of the first success.
    pub response_status: Option<u16>,
}

impl Record {
    /// A record of a state and attempt, with everything else zero.
    pub fn new(state: State, attempt: u32) -> Self {
        Self {
            state,
            attempt,
            lease_left: Duration::ZERO,
            retention_left: Duration::ZERO,
            response_status: None,
        }
    }
}

/// Identifies a store within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoreId(u64);

impl StoreId {
    /// An id that no other store of this process has.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A store failed. It says nothing about the key: neither that it is new nor that it is done.
#[derive(Clone, Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    attempted: &'static str,
    /// Shared, since one failure may be that of many operations.
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// The kinds of [`StoreError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store cannot be reached, refuses connections, or is read-only. The operation was not
    /// carried out.
    Unavailable,
    /// The store gave no answer in time, or the connection was lost on the way: the operation may
    /// or may not have been carried out.
    Unknown,
    /// The table is missing, or is not of this version, or may not be used by this database user:
    /// run the migration.
    Schema,
    /// A setting or the database's URL cannot be used.
    Config,
    /// Other transactions got in the way more often than was tried. The operation was not carried
    /// out.
    Conflict,
    /// Anything else. The operation was not carried out.
    Other,
}

impl StoreError {
    /// An error of a kind, with what was attempted ("claim the key", "mark the key done").
    pub fn new(kind: StoreErrorKind, attempted: &'static str) -> Self {
        Self { kind, attempted, source: None }
    }

    /// The same error, with its cause.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// What kind of error it is.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            StoreErrorKind::Unavailable => "the store is not available",
            StoreErrorKind::Unknown => "the store gave no answer, the outcome is unknown",
            StoreErrorKind::Schema => "the table is missing or of another version, run migrate()",
            StoreErrorKind::Config => "a setting cannot be used",
            StoreErrorKind::Conflict => "other transactions got in the way too often",
            StoreErrorKind::Other => "the store failed",
        };
        write!(f, "could not {}: {what}", self.attempted)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}
