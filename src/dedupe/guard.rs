//! The guard of one claim: whatever happens to its holder, the claim is settled.

use std::{error::Error, future::pending, mem, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    runtime::Handle,
    select,
    time::{Instant, sleep, timeout_at},
};

use super::{Event, NotRun, Shared, config::LeaseLost, drain::Permit, keeper::Tending};
use crate::{
    claim::{Claim, ClaimInfo, ClaimOutcome, Held},
    store::{Completion, StoreErrorKind},
};

/// Holds a claim from before it is sent until it is settled.
///
/// Dropped earlier, it settles the claim in the background, for which it remembers how far things
/// had come: a claim that was asked for or held is failed, one whose work has succeeded is
/// completed. If the runtime is gone by then, the key is free when its lease ends.
pub(super) struct Guard {
    shared: Arc<Shared>,
    claim: Claim,
    stage: Stage,
    attempt: u32,
    permit: Option<Permit>,
    runtime: Handle,
}

enum Stage {
    /// The claim may be on its way.
    Asked,
    /// The claim is held, and renewed.
    Held(Tending),
    /// The work has succeeded; the key is to be marked done, and is renewed until it is.
    Succeeded(Completion, Option<Tending>),
    /// There is nothing left to do.
    Settled,
}

/// The answer to a claim.
#[expect(clippy::large_enum_variant, reason = "a box would cost each delivery an allocation")]
pub(super) enum Granted {
    Claimed(Guard),
    No(NotRun),
}

impl Guard {
    /// Asks the store for the key.
    ///
    /// The guard is armed before anything is sent, since dropping a query's future does not stop
    /// the query.
    pub(super) async fn claim(shared: Arc<Shared>, permit: Permit, event: Event) -> Granted {
        let claim = event.claim(&shared.settings);
        let mut guard = Self {
            shared,
            claim,
            stage: Stage::Asked,
            attempt: 0,
            permit: Some(permit),
            runtime: Handle::current(),
        };
        let answer = guard.shared.store.claim(&guard.claim).await;

        let why = match answer {
            Ok(ClaimOutcome::Claimed { attempt }) => {
                let keeper = guard.shared.keeper();
                let tending = keeper.tend(guard.claim.clone(), &guard.shared.settings);
                guard.stage = Stage::Held(tending);
                guard.attempt = attempt;
                return Granted::Claimed(guard);
            }
            // The guard stays armed and fails the claim in the background.
            Err(error) if error.kind() == StoreErrorKind::Unknown => {
                return Granted::No(NotRun::Store(error));
            }
            Err(error) => NotRun::Store(error),
            Ok(ClaimOutcome::InProgress { lease_left }) => NotRun::InProgress { lease_left },
            Ok(ClaimOutcome::Done { status, response }) => NotRun::Done { status, response },
            Ok(ClaimOutcome::OtherPayload) => NotRun::OtherPayload,
        };
        guard.stage = Stage::Settled;
        Granted::No(why)
    }

    /// What the handler is told.
    pub(super) fn info(&self) -> ClaimInfo {
        ClaimInfo::new(self.claim.key.clone(), self.attempt)
    }

    /// Ends when the work must be dropped before its end. Otherwise it goes on for ever.
    pub(super) async fn cut_short(&mut self) {
        let Self { shared, claim, stage, attempt, permit, .. } = self;
        let lost = async {
            let Stage::Held(tending) = stage else { return pending().await };
            tending.lost().await;
            tracing::error!(
                event_key = %shared.settings.shown(&claim.key),
                attempt,
                "the lease is lost: this process stood still for longer than the lease, or the \
                 store was away, and another holder may run the event now",
            );
            if shared.settings.lease_lost == LeaseLost::Continue {
                pending().await
            }
        };
        let drained = async {
            match permit {
                Some(permit) => permit.cut().await,
                None => pending().await,
            }
        };
        select! {
            () = lost => {}
            () = drained => {}
        }
    }

    /// Marks the key done, and waits for it as long as `settle_timeout` allows.
    pub(super) async fn complete(&mut self, status: Option<u16>, response: Option<Bytes>) {
        let settings = &self.shared.settings;
        let patience = settings.settle_timeout;
        let completion = Completion::new(status, settings.retention).with_response(response);
        // From here on a drop must not free the key: the event is handled.
        let tending = match mem::replace(&mut self.stage, Stage::Settled) {
            Stage::Held(tending) => Some(tending),
            _ => None,
        };
        self.stage = Stage::Succeeded(completion.clone(), tending);

        if complete_within(&self.shared, &self.claim, completion, patience).await {
            self.stage = Stage::Settled;
        } else {
            tracing::error!(
                event_key = %self.shared.settings.shown(&self.claim.key),
                attempt = self.attempt,
                "the handler succeeded but the key could not be marked done within the settle \
                 timeout; answering all the same, and trying on while the lease lives",
            );
        }
    }

    /// Frees the key for the next delivery. What cannot be done at once goes on in the background.
    pub(super) async fn fail(&mut self) {
        let Self { shared, claim, .. } = &*self;
        let retention = shared.settings.abandoned_retention;
        let deadline = Instant::now() + shared.settings.settle_timeout;
        let freed = timeout_at(deadline, shared.store.fail(&claim.key, claim.token, retention));
        if let Ok(Ok(_)) = freed.await {
            self.stage = Stage::Settled;
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let stage = mem::replace(&mut self.stage, Stage::Settled);
        if let Stage::Settled = stage {
            return;
        }
        let shared = self.shared.clone();
        let claim = self.claim.clone();
        let permit = self.permit.take();
        self.runtime.spawn(async move {
            match stage {
                Stage::Asked => free(&shared, &claim, MayArriveLater::Yes).await,
                Stage::Held(tending) => {
                    drop(tending);
                    free(&shared, &claim, MayArriveLater::No).await;
                }
                Stage::Succeeded(completion, tending) => {
                    drop(tending);
                    let patience = shared.settings.lease;
                    if !complete_within(&shared, &claim, completion, patience).await {
                        tracing::error!(
                            event_key = %shared.settings.shown(&claim.key),
                            "a handled event could not be marked done while its lease lived: \
                             another delivery will run it again",
                        );
                    }
                }
                Stage::Settled => {}
            }
            drop(permit);
        });
    }
}

/// Tries to mark a key done until the store has said yes or no. Says whether it has.
async fn complete_within(
    shared: &Shared,
    claim: &Claim,
    completion: Completion,
    patience: Duration,
) -> bool {
    let deadline = Instant::now() + patience;
    let mut pauses = Pauses::until(deadline);
    loop {
        let asked = shared.store.complete(&claim.key, claim.token, completion.clone());
        match timeout_at(deadline, asked).await {
            Ok(Ok(Held::Yes)) => return true,
            Ok(Ok(Held::Lost)) => {
                tracing::error!(
                    event_key = %shared.settings.shown(&claim.key),
                    "the handler succeeded after its claim was taken over: nothing was marked, and \
                     the event may have been handled twice",
                );
                return true;
            }
            Ok(Err(error)) => tracing::warn!(
                event_key = %shared.settings.shown(&claim.key),
                error = &error as &dyn Error,
                "could not mark the key done, will try again",
            ),
            Err(_) => return false,
        }
        if !pauses.pause().await {
            return false;
        }
    }
}

/// Whether a claim that was not found may still reach the store.
#[derive(Clone, Copy, PartialEq)]
enum MayArriveLater {
    Yes,
    No,
}

/// Tries to free a key, for as long as settling may take. The lease does the rest.
async fn free(shared: &Shared, claim: &Claim, may_arrive_later: MayArriveLater) {
    let deadline = Instant::now() + shared.settings.settle_timeout;
    let mut pauses = Pauses::until(deadline);
    loop {
        let retention = shared.settings.abandoned_retention;
        let asked = shared.store.fail(&claim.key, claim.token, retention);
        match timeout_at(deadline, asked).await {
            Ok(Ok(true)) => return,
            Ok(Ok(false)) if may_arrive_later == MayArriveLater::No => return,
            Ok(Ok(false)) => {}
            Ok(Err(error)) => tracing::warn!(
                event_key = %shared.settings.shown(&claim.key),
                error = &error as &dyn Error,
                "could not free the key, will try again",
            ),
            Err(_) => return,
        }
        if !pauses.pause().await {
            return;
        }
    }
}

/// Growing pauses between tries, up to a deadline.
struct Pauses {
    next: Duration,
    deadline: Instant,
}

impl Pauses {
    fn until(deadline: Instant) -> Self {
        Self { next: FIRST_PAUSE, deadline }
    }

    /// Waits, unless the deadline comes first.
    async fn pause(&mut self) -> bool {
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST_PAUSE);
        if Instant::now() + pause >= self.deadline {
            return false;
        }
        sleep(pause).await;
        true
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
