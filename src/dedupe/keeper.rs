//! Renewal: one keeper per store moves the leases of all claims in flight on, in one statement.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
};

use tokio::{
    runtime,
    sync::{Notify, oneshot},
    time::{Instant, sleep_until},
};

use super::{
    caught,
    config::{Settings, Shown},
};
use crate::{
    claim::{Claim, ClaimToken, Held},
    store::{ClaimStore, StoreError, StoreErrorKind, StoreId},
};

/// Renews the claims of one store while their handlers run.
///
/// A claim is renewed when a third of its lease has passed, and claims that are not due yet but
/// will be soon go along in the same statement. What fails is tried again after a twelfth of the
/// lease, so a lease survives several failures in a row.
#[derive(Debug)]
pub(super) struct Keeper {
    store: Arc<dyn ClaimStore>,
    claims: Mutex<Claims>,
    changed: Arc<Notify>,
}

/// The claims in flight, and when the keeper will wake next.
#[derive(Debug, Default)]
struct Claims {
    tended: HashMap<ClaimToken, Tended>,
    wakes_at: Option<Instant>,
}

#[derive(Debug)]
struct Tended {
    claim: Claim,
    due: Instant,
    hold_until: Instant,
    redacted: bool,
    lost: oneshot::Sender<()>,
}

impl Keeper {
    /// The keeper of a store on the runtime of the caller: the one there is, or a new one.
    ///
    /// A task ends with its runtime, so each runtime has its own keeper.
    pub(super) fn of(store: &Arc<dyn ClaimStore>) -> Arc<Self> {
        type Keepers = HashMap<(StoreId, runtime::Id), Weak<Keeper>>;
        static KEEPERS: LazyLock<Mutex<Keepers>> = LazyLock::new(Mutex::default);

        let runtime = runtime::Handle::current();
        let mut keepers = lock(&KEEPERS);
        if let Some(keeper) = keepers.get(&(store.id(), runtime.id())).and_then(Weak::upgrade) {
            return keeper;
        }
        keepers.retain(|_, keeper| keeper.strong_count() > 0);
        let keeper = Arc::new(Self {
            store: store.clone(),
            claims: Mutex::default(),
            changed: Arc::default(),
        });
        keepers.insert((store.id(), runtime.id()), Arc::downgrade(&keeper));
        runtime.spawn(tend_all(Arc::downgrade(&keeper), keeper.changed.clone()));
        keeper
    }

    /// Renews a claim that was just granted, until the returned guard is dropped, at most for
    /// `max_hold`.
    pub(super) fn tend(self: &Arc<Self>, claim: Claim, settings: &Settings) -> Tending {
        let now = Instant::now();
        let due = now + claim.lease / 3;
        let token = claim.token;
        let (lost, learns_of_loss) = oneshot::channel();
        let mut claims = lock(&self.claims);
        let hold_until = now + settings.max_hold;
        let redacted = settings.redacts_keys();
        claims.tended.insert(token, Tended { claim, due, hold_until, redacted, lost });
        let sooner = claims.wakes_at.is_none_or(|at| due < at);
        if sooner {
            claims.wakes_at = Some(due);
        }
        drop(claims);
        if sooner {
            self.changed.notify_one();
        }
        Tending { keeper: self.clone(), token, lost: Some(learns_of_loss) }
    }

    /// When the next claim is due, or has been held for as long as it may.
    fn next_wake(&self) -> Option<Instant> {
        let mut claims = lock(&self.claims);
        claims.wakes_at = claims.tended.values().map(|one| one.due.min(one.hold_until)).min();
        claims.wakes_at
    }

    async fn renew_due(&self) {
        let due = self.due(Instant::now());
        if due.is_empty() {
            return;
        }
        let mut parts = vec![due];
        while let Some(mut part) = parts.pop() {
            // The lease is counted from before the statement was sent: never later than it really
            // begins.
            let sent = Instant::now();
            let renewed = caught(self.store.renew(&part).as_mut()).await;
            match renewed {
                Ok(Ok(fates)) => self.renewed(&part, fates, sent),
                // One of them stands in the way: found by halving, it does not cost the others
                // their leases.
                Ok(Err(error)) if part.len() > 1 && may_be_of_one(&error) => {
                    let half = part.split_off(part.len() / 2);
                    parts.push(half);
                    parts.push(part);
                }
                Ok(Err(error)) => {
                    tracing::warn!(
                        claims = part.len(),
                        error = &error as &dyn std::error::Error,
                        "could not renew claims, will try again",
                    );
                    self.try_again(&part);
                }
                Err(_) => {
                    tracing::error!(
                        claims = part.len(),
                        "the store panicked while renewing claims"
                    );
                    self.try_again(&part);
                }
            }
        }
    }

    fn renewed(&self, batch: &[Claim], fates: Vec<Held>, sent: Instant) {
        let mut claims = lock(&self.claims);
        for (claim, fate) in batch.iter().zip(fates) {
            match fate {
                Held::Yes => {
                    if let Some(one) = claims.tended.get_mut(&claim.token) {
                        one.due = sent + claim.lease / 3;
                    }
                }
                Held::Lost => {
                    if let Some(one) = claims.tended.remove(&claim.token) {
                        // The receiver is gone if the work has just ended.
                        let _ = one.lost.send(());
                    }
                }
            }
        }
    }

    /// Takes out what has been held for too long; then all that should be renewed now, nothing if
    /// nothing is due.
    fn due(&self, now: Instant) -> Vec<Claim> {
        let mut claims = lock(&self.claims);
        claims.tended.retain(|token, one| {
            let may_go_on = now < one.hold_until;
            if !may_go_on {
                tracing::error!(
                    event_key = %Shown { key: &one.claim.key, redacted: one.redacted },
                    ?token,
                    "a handler is still running after max_hold: its claim is no longer renewed, \
                     and the event can be taken over when the lease ends",
                );
            }
            may_go_on
        });
        if !claims.tended.values().any(|one| one.due <= now) {
            return Vec::new();
        }
        let soon = |one: &&Tended| one.due <= now + one.claim.lease / 6;
        claims.tended.values().filter(soon).map(|one| one.claim.clone()).collect()
    }

    fn try_again(&self, batch: &[Claim]) {
        let now = Instant::now();
        let mut claims = lock(&self.claims);
        for claim in batch {
            if let Some(one) = claims.tended.get_mut(&claim.token) {
                one.due = now + claim.lease / 12;
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Its task waits for this, and ends.
        self.changed.notify_one();
    }
}

/// A claim that is being renewed; dropping it ends the renewal.
#[derive(Debug)]
pub(super) struct Tending {
    keeper: Arc<Keeper>,
    token: ClaimToken,
    lost: Option<oneshot::Receiver<()>>,
}

impl Tending {
    /// Ends when a renewal found the claim lost; never if that does not happen, or was told before.
    pub(super) async fn lost(&mut self) {
        if let Some(lost) = &mut self.lost {
            let told = lost.await;
            self.lost = None;
            if told.is_ok() {
                return;
            }
        }
        std::future::pending().await
    }
}

impl Drop for Tending {
    fn drop(&mut self) {
        lock(&self.keeper.claims).tended.remove(&self.token);
    }
}

/// The keeper's task. It ends when nobody holds the keeper any more.
async fn tend_all(keeper: Weak<Keeper>, changed: Arc<Notify>) {
    loop {
        let Some(next_wake) = keeper.upgrade().map(|keeper| keeper.next_wake()) else { return };
        match next_wake {
            Some(at) => tokio::select! {
                () = sleep_until(at) => {}
                () = changed.notified() => {}
            },
            None => changed.notified().await,
        }
        let Some(keeper) = keeper.upgrade() else { return };
        keeper.renew_due().await;
    }
}

/// Whether one claim of several may be the cause of an error.
fn may_be_of_one(error: &StoreError) -> bool {
    matches!(error.kind(), StoreErrorKind::Conflict | StoreErrorKind::Other)
}

/// No code panics while it holds one of these locks, so a poisoned one is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
