//! A delivery in transaction mode: open, run, commit.

use std::{error::Error, future::Future, panic::resume_unwind, pin::pin};

use tokio::{select, time::sleep};

use super::handle::Transaction;
use crate::{
    claim::{ClaimInfo, ClaimOutcome, EventKey},
    dedupe::{
        Deduplicator, Delivery, Event, Fallible, NotRun, Outcome, Permit, RunError, Settings,
        Verdict, Work, caught,
    },
    store::{ClaimStore, Completion, NotCommitted, NotCommittedKind, Opening, PgStore},
};

impl Deduplicator<PgStore> {
    /// Claims the key in a new transaction, runs the work with it, and if the work returns `Ok`,
    /// marks the key done and commits: exactly once, for what the work writes through the handle. An
    /// `Err`, a panic or a cancellation rolls back and frees the key.
    ///
    /// See [`transaction`](crate::transaction) for what the handle does and what may go wrong.
    ///
    /// # Errors
    ///
    /// [`RunError`]: the work's own error, why it could not be run, or
    /// [`NotCommitted`](RunError::NotCommitted). In every case the event is not done and may be
    /// offered again.
    ///
    /// # Panics
    ///
    /// If the work panics: rolled back, then the panic goes on into the caller.
    ///
    /// # Cancellation
    ///
    /// As [`run`](Self::run): by default the work goes on without this future; with
    /// [`detached(false)`](crate::DeduplicatorBuilder::detached) it is dropped with it, and rolled
    /// back.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_dedupe::{Deduplicator, EventKey, Outcome, PgStore, Scope, TransactionError};
    ///
    /// # async fn example(store: PgStore) -> Result<(), Box<dyn std::error::Error>> {
    /// let dedupe = Deduplicator::new(store);
    /// let key = EventKey::new(Scope::new("orders")?, "order-17")?;
    /// let outcome = dedupe
    ///     .run_in_transaction(key, |info, order| async move {
    ///         order.execute("INSERT INTO orders (event_key) VALUES ($1)", &[&info.key()]).await?;
    ///         Ok::<_, TransactionError>(())
    ///     })
    ///     .await?;
    /// if !matches!(outcome, Outcome::InProgress { .. }) {
    ///     // … acknowledge the message
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn run_in_transaction<F, Fut, T, E>(
        &self,
        key: EventKey,
        work: F,
    ) -> Result<Outcome<T>, RunError<E>>
    where
        F: FnOnce(ClaimInfo, Transaction) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Send + 'static,
        E: Send + 'static,
    {
        let work = Fallible(|(info, transaction)| work(info, transaction));
        match deliver(self, self.store(), Event::of(key), work).await {
            Delivery::Ran(Settled { output: Ok(_), not_committed: Some(why) }) => {
                Err(RunError::NotCommitted(why))
            }
            Delivery::Ran(Settled { output, .. }) => Delivery::<(), _>::Ran(output).told(),
            Delivery::NotRun(why, _) => Delivery::<(), _>::NotRun(why, ()).told(),
            Delivery::Cut => Err(RunError::Cancelled),
        }
    }
}

/// What work has come to, and its transaction.
pub(crate) struct Settled<T> {
    pub(crate) output: T,
    /// Why the transaction was not committed, if that is not just because the work has failed.
    pub(crate) not_committed: Option<NotCommitted>,
}

/// Open, run, commit; gives the work back if it was not run.
pub(crate) async fn deliver<W, St>(
    dedupe: &Deduplicator<St>,
    store: &PgStore,
    event: Event,
    work: W,
) -> Delivery<W, Settled<W::Output>>
where
    W: Work<(ClaimInfo, Transaction)>,
    St: ClaimStore + ?Sized,
{
    let (store, settings) = (store.clone(), *dedupe.settings());
    dedupe
        .conduct(work, move |permit, work| open_run_commit(store, settings, permit, event, work))
        .await
}

/// The whole life of a delivery. Dropped anywhere, its connection is closed, and the server rolls
/// back.
async fn open_run_commit<W: Work<(ClaimInfo, Transaction)>>(
    store: PgStore,
    settings: Settings,
    permit: Permit,
    event: Event,
    work: W,
) -> Delivery<W, Settled<W::Output>> {
    let claim = event.claim(&settings);
    let open = match store.open(&claim, settings.max_hold).await {
        Ok(Opening::Open(open)) => open,
        Ok(Opening::No(answer)) => {
            let why = match answer {
                ClaimOutcome::Done { status, response } => NotRun::Done { status, response },
                ClaimOutcome::OtherPayload => NotRun::OtherPayload,
                ClaimOutcome::InProgress { lease_left } => NotRun::InProgress { lease_left },
                // It would have been opened.
                ClaimOutcome::Claimed { .. } => NotRun::Busy,
            };
            return Delivery::NotRun(why, work);
        }
        Err(error) => return Delivery::NotRun(NotRun::Store(error), work),
    };
    let info = ClaimInfo::new(open.key().clone(), open.attempt());
    let (transaction, ours) = Transaction::of(open);

    let end = {
        let work = pin!(work.start((info, transaction)));
        select! {
            // The work first: if it has ended, what else happened does not matter.
            biased;
            end = caught(work) => Some(end),
            () = permit.cut() => None,
            () = sleep(settings.max_hold) => {
                tracing::error!(
                    event_key = %settings.shown(&claim.key),
                    max_hold = ?settings.max_hold,
                    "the handler held its transaction for longer than max_hold: it is dropped, and \
                     rolled back",
                );
                None
            }
        }
    };

    let passing = ours.passing();
    let (end, verdict) = match end {
        Some(Ok((output, verdict))) => (Some(Ok(output)), verdict),
        Some(Err(panic)) => (Some(Err(panic)), Verdict::Failed),
        None => (None, Verdict::Failed),
    };
    let succeeded = matches!(verdict, Verdict::Done { .. });
    let not_committed = match (verdict, ours.take_back().await) {
        (Verdict::Done { status, response }, Some(open)) => {
            let completion = Completion::new(status, settings.retention).with_response(response);
            open.commit(completion, settings.settle_timeout).await.err()
        }
        (Verdict::Done { .. }, None) => Some(NotCommittedKind::InUse.into()),
        (Verdict::Failed, open) => {
            let ended_by_handler = match open {
                Some(open) => open.roll_back(settings.abandoned_retention).await,
                None => false,
            };
            if ended_by_handler {
                log(&settings, &claim.key, &NotCommittedKind::EndedByHandler.into());
            }
            passing.map(NotCommitted::from)
        }
    };
    if let Some(why) = not_committed.as_ref().filter(|_| succeeded) {
        log(&settings, &claim.key, why);
    }
    drop(permit);
    match end {
        Some(Ok(output)) => Delivery::Ran(Settled { output, not_committed }),
        Some(Err(panic)) => resume_unwind(panic),
        None => Delivery::Cut,
    }
}

fn log(settings: &Settings, key: &EventKey, why: &NotCommitted) {
    let event_key = settings.shown(key);
    if why.kind() == NotCommittedKind::Conflict {
        tracing::warn!(%event_key, error = why as &dyn Error, "a transaction was not committed");
    } else {
        tracing::error!(%event_key, error = why as &dyn Error, "a transaction was not committed");
    }
}
