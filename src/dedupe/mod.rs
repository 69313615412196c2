//! The protocol without HTTP: claim, run, settle.
//!
//! [`Deduplicator::run`] is what [`DedupeLayer`](crate::DedupeLayer) stands on. Use it by itself
//! for what does not arrive as one HTTP request per event: queue consumers, or handlers that find
//! many events in one request.

mod config;
mod drain;
mod guard;
mod keeper;

use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::{Pin, pin},
    sync::{Arc, OnceLock},
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use tokio::{runtime, select};
use tracing::Instrument;

use self::{
    drain::Flight,
    guard::{Granted, Guard},
    keeper::Keeper,
};
use crate::{
    claim::{Claim, ClaimInfo, EventKey, PayloadHash},
    store::{ClaimStore, NotCommitted, PgStore, StoreError, StoreErrorKind},
};

pub use self::config::{ConfigError, DeduplicatorBuilder, LeaseLost};
pub(crate) use self::{
    config::{Settings, within},
    drain::Permit,
};

/// Runs work at most once at a time for each event key, and never again once it succeeded.
///
/// Cloning is cheap; clones share their bound of deliveries in flight and are drained together.
/// Where a type names no store, [`PgStore`] is meant.
///
/// # Examples
///
/// A queue consumer acknowledges a message only when its event is handled:
///
/// ```
/// use tower_dedupe::{Deduplicator, EventKey, MemoryStore, Outcome, Scope};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dedupe = Deduplicator::new(MemoryStore::new());
/// let key = EventKey::new(Scope::new("orders")?, "order-17")?;
///
/// let work = |info: tower_dedupe::ClaimInfo| async move {
///     // … the work; `info.attempt()` says whether somebody tried before.
///     Ok::<_, std::io::Error>(info.attempt())
/// };
/// assert!(matches!(dedupe.run(key.clone(), work).await?, Outcome::Ran(1)));
/// assert!(matches!(dedupe.run(key, work).await?, Outcome::Duplicate));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Deduplicator<St: ?Sized = PgStore> {
    store: Arc<St>,
    shared: Arc<Shared>,
}

impl<St: ?Sized> Clone for Deduplicator<St> {
    fn clone(&self) -> Self {
        Self { store: self.store.clone(), shared: self.shared.clone() }
    }
}

impl<St: ClaimStore> Deduplicator<St> {
    /// A deduplicator with the defaults that [`DeduplicatorBuilder`] documents.
    pub fn new(store: St) -> Self {
        DeduplicatorBuilder::new(store).into_checked()
    }

    /// A deduplicator with other settings.
    pub fn builder(store: St) -> DeduplicatorBuilder<St> {
        DeduplicatorBuilder::new(store)
    }

    /// The same, for those to whom it is all one which store it is.
    pub(crate) fn of_any_store(&self) -> Deduplicator<dyn ClaimStore> {
        Deduplicator { store: self.shared.store.clone(), shared: self.shared.clone() }
    }
}

impl<St: ClaimStore + ?Sized> Deduplicator<St> {
    /// The store that holds the claims.
    pub fn store(&self) -> &St {
        &self.store
    }

    /// Claims the key, runs the work, and marks the key done if the work returns `Ok`. An `Err`, a
    /// panic or a cancellation frees the key at once.
    ///
    /// # Errors
    ///
    /// [`RunError`]: the work's own error, or why it could not be run. In every case the event is
    /// not done and may be offered again.
    ///
    /// # Panics
    ///
    /// If the work panics: the key is freed, then the panic goes on into the caller.
    ///
    /// # Cancellation
    ///
    /// By default the work runs on a task of its own: dropping this future does not stop it, it
    /// ends and is marked done. With
    /// [`detached(false)`](DeduplicatorBuilder::detached) it is dropped with this future and its
    /// key is freed in the background.
    pub async fn run<F, Fut, T, E>(&self, key: EventKey, work: F) -> Result<Outcome<T>, RunError<E>>
    where
        F: FnOnce(ClaimInfo) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Send + 'static,
        E: Send + 'static,
    {
        self.deliver(Event::of(key), Fallible(work)).await.told()
    }

    /// Takes no new deliveries, waits for those in flight, and cuts those that have not ended
    /// within `patience`: their work is dropped and their keys are freed. Says how many were cut.
    ///
    /// Call it after the server has stopped accepting and before the runtime and the store go:
    /// work that runs detached is not known to the server's own graceful shutdown.
    ///
    /// It ends at the latest one [`settle_timeout`](DeduplicatorBuilder::settle_timeout) after
    /// `patience`; what could not be freed by then is free when its lease ends.
    pub async fn drain(&self, patience: Duration) -> usize {
        self.shared.flight.drain(patience, self.shared.settings.settle_timeout).await
    }

    /// Claim, run, settle; gives the work back if it was not run.
    pub(crate) async fn deliver<W: Work<ClaimInfo>>(
        &self,
        event: Event,
        work: W,
    ) -> Delivery<W, W::Output> {
        let shared = self.shared.clone();
        self.conduct(work, |permit, work| claim_run_settle(shared, permit, event, work)).await
    }

    /// Carries a delivery out, if there is a place in flight for it: on a task of its own, if it is
    /// to be detached.
    pub(crate) async fn conduct<W, T, D>(
        &self,
        work: W,
        delivery: impl FnOnce(Permit, W) -> D,
    ) -> Delivery<W, T>
    where
        W: Send + 'static,
        T: Send + 'static,
        D: Future<Output = Delivery<W, T>> + Send + 'static,
    {
        let Some(permit) = self.shared.flight.enter() else {
            return Delivery::NotRun(NotRun::Busy, work);
        };
        // On the heap once, rather than moved there and back, at its whole size, by each that holds it.
        let delivery = Box::pin(delivery(permit, work));
        if !self.shared.settings.detached {
            return delivery.await;
        }
        match tokio::spawn(delivery.in_current_span()).await {
            Ok(delivery) => delivery,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                // The runtime is shutting down.
                Err(_) => Delivery::Cut,
            },
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// Whether nothing of a key may be shown.
    pub(crate) fn redacts_keys(&self) -> bool {
        self.shared.settings.redacts_keys()
    }

    /// How a key is shown in logs: shortened, or hashed.
    pub(crate) fn shown<'a>(&self, key: &'a EventKey) -> config::Shown<'a> {
        self.shared.settings.shown(key)
    }
}

/// What became of an event that was offered to [`Deduplicator::run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome<T> {
    /// The work ran and succeeded, and the key is done: acknowledge the event.
    Ran(T),
    /// The event was handled before: acknowledge it.
    Duplicate,
    /// Another holder is at work: offer the event again later, never acknowledge it now.
    InProgress {
        /// What is left of the other's lease. It may be renewed, or end sooner with the work.
        lease_left: Duration,
    },
}

/// Why [`Deduplicator::run`] did not bring an event to its end.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The work ran and returned this error. The key is free.
    Work(E),
    /// The store failed while the key was claimed. The work was not run.
    Store(StoreError),
    /// As much is in flight as [`max_in_flight`](DeduplicatorBuilder::max_in_flight) allows, or the
    /// deduplicator is drained. The work was not run.
    TooManyInFlight,
    /// The work was dropped before its end: the drain's patience was over, the runtime shut down,
    /// or the lease was lost under [`LeaseLost::Cancel`].
    Cancelled,
    /// The work succeeded and its transaction was not committed. Only from
    /// [`run_in_transaction`](Deduplicator::run_in_transaction).
    NotCommitted(NotCommitted),
}

impl<E: fmt::Display> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(error) => error.fmt(f),
            Self::Store(error) => error.fmt(f),
            Self::TooManyInFlight => f.write_str("too many events in flight, try again later"),
            Self::Cancelled => f.write_str("the work was dropped before its end"),
            Self::NotCommitted(why) => why.fmt(f),
        }
    }
}

impl<E: std::error::Error> std::error::Error for RunError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Work(error) => error.source(),
            Self::Store(error) => std::error::Error::source(error),
            Self::NotCommitted(why) => std::error::Error::source(why),
            Self::TooManyInFlight | Self::Cancelled => None,
        }
    }
}

/// What is delivered.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) key: EventKey,
    /// What its payload is, if that is to be compared.
    pub(crate) fingerprint: Option<PayloadHash>,
    /// Whether the response is stored and given again.
    pub(crate) replay: bool,
}

impl Event {
    /// An event that is known by its key alone.
    pub(crate) fn of(key: EventKey) -> Self {
        Self { key, fingerprint: None, replay: false }
    }

    pub(crate) fn claim(self, settings: &Settings) -> Claim {
        Claim::new(self.key, settings.lease, settings.abandoned_retention)
            .with_fingerprint(self.fingerprint)
            .with_replay(self.replay)
    }
}

/// What a claim is for: started once the key is claimed, with what it is granted, and judged when it
/// ends.
pub(crate) trait Work<G>: Send + 'static {
    /// What the caller gets.
    type Output: Send + 'static;

    /// Does the work and says whether it succeeded.
    fn start(self, granted: G) -> impl Future<Output = (Self::Output, Verdict)> + Send;
}

/// Whether a piece of work succeeded.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// The event is handled; duplicates are answered with this status, or this response.
    Done { status: Option<u16>, response: Option<Bytes> },
    /// The event is not handled; the next delivery runs again.
    Failed,
}

/// How a delivery ended.
pub(crate) enum Delivery<W, T> {
    /// The work ran to its end, and its claim is settled.
    Ran(T),
    /// The work was not started, and nothing is claimed.
    NotRun(NotRun, W),
    /// The work was started and dropped before its end; the key is freed.
    Cut,
}

impl<W, T, E> Delivery<W, Result<T, E>> {
    /// What the caller of the public interface is told.
    pub(crate) fn told(self) -> Result<Outcome<T>, RunError<E>> {
        match self {
            Self::Ran(Ok(value)) => Ok(Outcome::Ran(value)),
            Self::Ran(Err(error)) => Err(RunError::Work(error)),
            Self::Cut => Err(RunError::Cancelled),
            Self::NotRun(NotRun::Done { .. }, _) => Ok(Outcome::Duplicate),
            Self::NotRun(NotRun::InProgress { lease_left }, _) => {
                Ok(Outcome::InProgress { lease_left })
            }
            Self::NotRun(NotRun::Busy, _) => Err(RunError::TooManyInFlight),
            Self::NotRun(NotRun::Store(error), _) => Err(RunError::Store(error)),
            Self::NotRun(NotRun::OtherPayload, _) => Err(RunError::Store(
                StoreError::new(StoreErrorKind::Other, "claim the key")
                    .with_source("the store compared a payload that it was not given"),
            )),
        }
    }
}

/// Why work was not started.
pub(crate) enum NotRun {
    Done { status: Option<u16>, response: Option<Bytes> },
    InProgress { lease_left: Duration },
    OtherPayload,
    Busy,
    Store(StoreError),
}

/// What all clones of a deduplicator share.
#[derive(Debug)]
struct Shared {
    store: Arc<dyn ClaimStore>,
    settings: Settings,
    flight: Arc<Flight>,
    keeper: OnceLock<(runtime::Id, Arc<Keeper>)>,
}

impl Shared {
    /// The one keeper of this store on this runtime.
    fn keeper(&self) -> Arc<Keeper> {
        let here = runtime::Handle::current().id();
        let (home, keeper) = self.keeper.get_or_init(|| (here, Keeper::of(&self.store)));
        if *home == here { keeper.clone() } else { Keeper::of(&self.store) }
    }
}

/// The whole life of a delivery. May be dropped anywhere: the guard then does what is left to do.
#[expect(clippy::manual_async_fn, reason = "it would keep a second place for each argument")]
fn claim_run_settle<W: Work<ClaimInfo>>(
    shared: Arc<Shared>,
    permit: Permit,
    event: Event,
    work: W,
) -> impl Future<Output = Delivery<W, W::Output>> + Send {
    async move {
        let mut guard = match Guard::claim(shared, permit, event).await {
            Granted::Claimed(guard) => guard,
            Granted::No(why) => return Delivery::NotRun(why, work),
        };

        let info = guard.info();
        let end = {
            let work = pin!(work.start(info));
            select! {
                // The work first: if it has ended, what else happened does not matter.
                biased;
                end = caught(work) => End::Of(end),
                () = guard.cut_short() => End::Cut,
            }
        };

        match end {
            End::Of(Ok((output, Verdict::Done { status, response }))) => {
                guard.complete(status, response).await;
                Delivery::Ran(output)
            }
            End::Of(Ok((output, Verdict::Failed))) => {
                guard.fail().await;
                Delivery::Ran(output)
            }
            End::Of(Err(panic)) => {
                guard.fail().await;
                resume_unwind(panic)
            }
            End::Cut => {
                guard.fail().await;
                Delivery::Cut
            }
        }
    }
}

/// How the running of a piece of work ended.
enum End<T> {
    /// By itself: with a result, or with a panic.
    Of(Result<T, Box<dyn Any + Send>>),
    /// The work was dropped.
    Cut,
}

/// Catches a panic of the future, so that its claim can be freed before the panic goes on.
///
/// Unwind safety is the caller's: the future is not polled again, and the panic goes on.
pub(crate) async fn caught<F>(mut future: Pin<&mut F>) -> Result<F::Output, Box<dyn Any + Send>>
where
    F: Future + ?Sized,
{
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// Work that succeeds by returning `Ok`.
pub(crate) struct Fallible<F>(pub(crate) F);

impl<G, F, Fut, T, E> Work<G> for Fallible<F>
where
    G: Send,
    F: FnOnce(G) -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, E>> + Send + 'static,
    T: Send + 'static,
    E: Send + 'static,
{
    type Output = Result<T, E>;

    async fn start(self, granted: G) -> (Self::Output, Verdict) {
        let output = (self.0)(granted).await;
        let verdict = match &output {
            Ok(_) => Verdict::Done { status: None, response: None },
            Err(_) => Verdict::Failed,
        };
        (output, verdict)
    }
}
