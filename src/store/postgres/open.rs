//! A claim and its holder's work in one transaction: opened, and committed or rolled back.

use std::{collections::hash_map::Entry, error::Error, fmt, sync::Arc, time::Duration};

use deadpool_postgres::ClientWrapper;
use tokio::{
    join,
    runtime::Handle,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_postgres::{Row, error::SqlState, types::Type};

use super::{
    PgStore, Shared,
    cache::Done,
    error::Meaning,
    operations::{
        ClaimParams, HELD_BY_A_TRANSACTION, attempt, found, millis, response_code, unreadable,
    },
    session::{Answers, Ask, Cause, Lent, Param, jitter},
    statements::{
        Bounds, CLOSING, Commit, GIVING_UP, UNDOING_STANDING, bounding, handing_over,
        opening_for_work, releasing, saving, standing, undoing,
    },
};
use crate::{
    claim::{self, Claim, ClaimOutcome, EventKey, OnClaim},
    store::{Completion, NotCommitted, NotCommittedKind, StoreError, StoreErrorKind},
};

/// The answer to a claim that opens a transaction.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "looked at once, and never kept")]
pub(crate) enum Opening {
    /// The key is claimed in this transaction.
    Open(OpenClaim),
    /// Why not; nothing is open.
    No(ClaimOutcome),
}

/// A key's claim in a transaction that is not committed. Dropped, it is gone: the connection is
/// closed, and the server rolls back.
pub(crate) struct OpenClaim {
    lent: Option<Lent>,
    claim: Claim,
    attempt: u32,
    transaction_id: String,
    runtime: Handle,
    place: Place,
}

impl PgStore {
    /// Begins a transaction and claims the key in it. One round trip, two if the key is taken over.
    pub(crate) async fn open(
        &self,
        claim: &Claim,
        max_hold: Duration,
    ) -> Result<Opening, StoreError> {
        let shared = &self.shared;
        if let Some(answer) = shared.done.answer(claim) {
            return Ok(Opening::No(answer));
        }
        // What is at work in this process need not take a connection from others to be found so.
        let place = match Place::take(shared, claim) {
            Ok(place) => place,
            Err(answer) => return Ok(Opening::No(answer)),
        };
        let deadline = shared.deadline();
        let failed = |kind, cause: Cause| StoreError::new(kind, ATTEMPTED).with_source(cause);
        let mut tries = 1;
        loop {
            let connecting = shared.session.connection(deadline).await;
            let lent = connecting.map_err(|cause| failed(StoreErrorKind::Unavailable, cause))?;
            let asking = shared.claim_on(&lent, claim, max_hold);
            let Ok(asked) = timeout_at(deadline, asking).await else {
                shared.session.drop_idle();
                // Nothing is committed, whatever the server still does about it.
                return Err(failed(StoreErrorKind::Unavailable, Cause::Silence));
            };
            let fault = match asked {
                Ok(Step::Claimed { attempt, transaction_id }) => {
                    return Ok(Opening::Open(OpenClaim {
                        lent: Some(lent),
                        claim: claim.clone(),
                        attempt,
                        transaction_id,
                        runtime: Handle::current(),
                        place,
                    }));
                }
                Ok(Step::No(answer)) => {
                    shared.give_up(lent, deadline).await;
                    return Ok(Opening::No(answer));
                }
                Err(fault) => fault,
            };
            let error = match fault {
                Fault::Store(error) => {
                    shared.give_up(lent, deadline).await;
                    return Err(error);
                }
                Fault::Driver(error) => error,
            };
            let meaning = Meaning::of(&error);
            if meaning.leaves_the_connection_clean() {
                shared.give_up(lent, deadline).await;
            } else {
                drop(lent);
                shared.session.drop_idle();
            }
            match meaning {
                // Another transaction has the row, and not the key's lock: a claim of lease mode.
                Meaning::Locked => return Ok(Opening::No(HELD_BY_A_TRANSACTION)),
                Meaning::Refused(kind) => return Err(failed(kind, Cause::told_by(&error))),
                Meaning::Again | Meaning::Lost | Meaning::Stale | Meaning::ReadOnly
                    if tries < MAX_TRIES =>
                {
                    tries += 1;
                    sleep(jitter()).await;
                }
                Meaning::Lost => {
                    return Err(failed(StoreErrorKind::Unavailable, Cause::told_by(&error)));
                }
                other => return Err(failed(other.kind(), Cause::told_by(&error))),
            }
        }
    }
}

/// What a claim on a connection has come to.
enum Step {
    Claimed { attempt: u32, transaction_id: String },
    No(ClaimOutcome),
}

enum Fault {
    Driver(tokio_postgres::Error),
    Store(StoreError),
}

impl From<tokio_postgres::Error> for Fault {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Driver(error)
    }
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Shared {
    /// Begins, claims, and hands the transaction over to the work.
    async fn claim_on(
        &self,
        lent: &Lent,
        claim: &Claim,
        max_hold: Duration,
    ) -> Result<Step, Fault> {
        let bounds = Bounds {
            // The work's own rows are committed with the mark: to lose them is to lose the event.
            commit: Commit::Durable,
            ..self.bounds_within(claim.lease)
        };
        let params = ClaimParams::of(claim);
        let as_of = self.done.as_of();
        let hand_over = handing_over(max_hold);
        let mut undo_standing = self.session.standing.map(|_| UNDOING_STANDING);
        let mut send = async |before, sql, params: &[Param<'_>]| {
            let first = undo_standing.take().unwrap_or_default();
            let together = self.session.together(lent, before, sql, params, &hand_over);
            let first = async {
                match first {
                    "" => Ok(()),
                    first => lent.client().batch_execute(first).await,
                }
            };
            let (ready, (begun, rows, handed_over)) = join!(biased; first, together);
            ready?;
            // The first error is the cause of the others.
            begun?;
            let rows = rows?;
            handed_over?;
            Ok::<Vec<Row>, tokio_postgres::Error>(rows)
        };
        let mut before = opening_for_work(&bounds, claim.lease);
        for _ in 0..MAX_LOOKS {
            let rows = send(before, &self.statements.open, &params.to_look()).await?;
            before = bounding(&bounds);
            let Some(row) = rows.first() else { continue };
            let had: bool = row.try_get("had").map_err(unreadable)?;
            let status: Option<&str> = row.try_get("status").map_err(unreadable)?;
            let seen = status.map(|_| found(row)).transpose()?;
            if let Some(seen) = &seen {
                self.keep_if_done(claim, seen, as_of);
            }
            let answer = seen.map(|seen| claim::on_claim(Some(&seen.seen_by(claim))));
            match (had, answer) {
                (true, Some(OnClaim::Answer(ClaimOutcome::Claimed { attempt }))) => {
                    return Ok(Step::Claimed { attempt, transaction_id: transaction_id(row)? });
                }
                (
                    false,
                    None
                    | Some(OnClaim::Take { .. } | OnClaim::Answer(ClaimOutcome::Claimed { .. })),
                ) => {
                    return Ok(Step::No(HELD_BY_A_TRANSACTION));
                }
                (_, Some(OnClaim::Answer(answer))) => return Ok(Step::No(answer)),
                // Committed by a claim of lease mode after the statement had begun.
                (true, None) => {}
                (true, Some(OnClaim::Take { .. })) => {
                    let take = &self.statements.take_open;
                    let rows = send(before.clone(), take, &params.to_take()).await?;
                    if let Some(row) = rows.first() {
                        return Ok(Step::Claimed {
                            attempt: attempt(row)?,
                            transaction_id: transaction_id(row)?,
                        });
                    }
                }
            }
        }
        Err(Fault::Store(
            StoreError::new(StoreErrorKind::Conflict, ATTEMPTED)
                .with_source("the row came and went each time it was looked at"),
        ))
    }

    /// Rolls a transaction back in which nothing was done.
    async fn give_up(&self, lent: Lent, deadline: Instant) {
        let ended = timeout_at(deadline, self.end_transaction(&lent, GIVING_UP)).await;
        if let Ok((Ok(()), Ok(()))) = ended {
            lent.give_back();
        }
    }

    /// Ends a transaction, and restores the session as it was before.
    async fn end_transaction(&self, lent: &Lent, sql: &str) -> (Answers<()>, Answers<()>) {
        let client = lent.client();
        let restoring = self.restoring();
        join!(biased; client.batch_execute(sql), client.batch_execute(&restoring))
    }

    /// The settings of a session outside of transactions that are open for work; nothing where it
    /// has none.
    fn restoring(&self) -> String {
        self.session.standing.as_ref().map(standing).unwrap_or_default()
    }
}

fn transaction_id(row: &Row) -> Result<String, StoreError> {
    row.try_get("transaction_id").map_err(unreadable)
}

impl OpenClaim {
    pub(crate) fn key(&self) -> &EventKey {
        &self.claim.key
    }

    pub(crate) fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The connection that the transaction is open on.
    #[expect(clippy::expect_used, reason = "only what consumes the claim takes the connection")]
    pub(crate) fn client(&self) -> &ClientWrapper {
        self.lent.as_ref().expect("an open claim has its connection").client()
    }

    /// Whether statements are to be prepared under a name.
    pub(crate) fn prepares_by_name(&self) -> bool {
        self.place.shared.session.named
    }

    /// Ends the statement that is under way on the server, if one is.
    pub(crate) fn cancel(&self) {
        let Some(lent) = &self.lent else { return };
        let running = lent.client().cancel_token();
        let cancelling = self.place.shared.session.tls.clone().cancel(running);
        // Should it not arrive, the statement's own timeout ends it.
        self.runtime.spawn(timeout(CANCEL_TIMEOUT, cancelling));
    }

    /// Marks the key done and commits, or says why not; then nothing of the transaction is left, and
    /// the key is free.
    ///
    /// Waits at most for `patience`, or the store's timeout if that is longer, and as long again to
    /// learn whether a COMMIT took place that was not answered.
    pub(crate) async fn commit(
        mut self,
        completion: Completion,
        patience: Duration,
    ) -> Result<(), NotCommitted> {
        let shared = self.place.shared.clone();
        let patience = patience.max(shared.timeout);
        let deadline = Instant::now() + patience;
        let as_of = shared.done.as_of();

        match timeout_at(deadline, self.mark(&completion)).await {
            Err(_) => return Err(NotCommitted::new(NotCommittedKind::Lost, Cause::Silence)),
            Ok(Ok(rows)) if !rows.is_empty() => {}
            Ok(Ok(_)) => {
                self.roll_back(completion.retention).await;
                return Err(NotCommittedKind::EndedByHandler.into());
            }
            Ok(Err(error)) => {
                let failure = not_committed(&error);
                self.roll_back(completion.retention).await;
                return Err(failure);
            }
        }

        let Some(lent) = self.lent.take() else { return Err(NotCommittedKind::Lost.into()) };
        match timeout_at(deadline, shared.end_transaction(&lent, CLOSING)).await {
            Ok((Ok(()), Ok(()))) => lent.give_back(),
            Ok((Ok(()), Err(_))) => {}
            // The server has rolled back.
            Ok((Err(error), restored)) if Meaning::of(&error) != Meaning::Lost => {
                if restored.is_ok() {
                    lent.give_back();
                }
                return Err(not_committed(&error));
            }
            unanswered => {
                drop(lent);
                let cause = match unanswered {
                    Ok((Err(error), _)) => Cause::told_by(&error),
                    _ => Cause::Silence,
                };
                self.look_up(cause, Instant::now() + patience).await?;
            }
        }
        let Completion { status, response, retention } = completion;
        let done = Done { status, fingerprint: self.claim.fingerprint, response: Some(response) };
        shared.done.keep(&self.claim.key, done, retention, as_of);
        Ok(())
    }

    /// Marks the key done, not committed yet. One row, or the claim's transaction is no more.
    async fn mark(&self, completion: &Completion) -> Answers<Vec<Row>> {
        let shared = &self.place.shared;
        let Some(lent) = &self.lent else { return Ok(Vec::new()) };
        let params: [Param<'_>; 7] = [
            (&self.claim.key.scope().as_str(), Type::TEXT),
            (&self.claim.key.as_str(), Type::TEXT),
            (&&self.claim.token.as_bytes()[..], Type::BYTEA),
            (&response_code(completion.status), Type::INT2),
            (&millis(completion.retention), Type::INT8),
            (&completion.response.as_deref(), Type::BYTEA),
            (&self.transaction_id, Type::TEXT),
        ];
        let finish = &shared.statements.finish;
        shared.session.together(lent, String::new(), finish, &params, "").await.1
    }

    /// Finds out, on another connection, whether a COMMIT took place that was not answered.
    async fn look_up(&self, cause: Cause, deadline: Instant) -> Result<(), NotCommitted> {
        let shared = &self.place.shared;
        let params: [Param<'_>; 4] = [
            (&self.claim.key.scope().as_str(), Type::TEXT),
            (&self.claim.key.as_str(), Type::TEXT),
            (&&self.claim.token.as_bytes()[..], Type::BYTEA),
            (&self.transaction_id, Type::TEXT),
        ];
        let ask = Ask {
            attempted: "look whether the transaction was committed",
            sql: &shared.statements.fate,
            bounds: shared.bounds,
            params: &params,
        };
        while Instant::now() < deadline {
            if let Ok(rows) = shared.session.ask(&ask, deadline).await {
                let told = rows.first().map(|row| {
                    let committed = row.try_get("committed").unwrap_or(false);
                    (committed, row.try_get::<_, Option<bool>>("under_way").unwrap_or(None))
                });
                match told {
                    Some((true, _)) => return Ok(()),
                    Some((false, Some(false))) => {
                        return Err(NotCommitted::new(NotCommittedKind::Lost, cause));
                    }
                    _ => {}
                }
            }
            sleep(jitter()).await;
        }
        Err(NotCommitted::new(NotCommittedKind::Unknown, cause))
    }

    /// Rolls back; then nothing of the transaction is left, and the key is free. Says whether the
    /// work had committed it, which is undone as far as the key goes: what it has written stays.
    pub(crate) async fn roll_back(mut self, abandoned_retention: Duration) -> bool {
        let shared = self.place.shared.clone();
        let Some(lent) = self.lent.take() else { return false };
        let deadline = shared.deadline();
        let params: [Param<'_>; 7] = [
            (&self.claim.key.scope().as_str(), Type::TEXT),
            (&self.claim.key.as_str(), Type::TEXT),
            (&&self.claim.token.as_bytes()[..], Type::BYTEA),
            (&claim::State::Failed.as_str(), Type::TEXT),
            (&None::<i16>, Type::INT2),
            (&millis(abandoned_retention), Type::INT8),
            (&None::<&[u8]>, Type::BYTEA),
        ];
        let end = &shared.statements.end;
        let restoring = shared.restoring();
        let ending = shared.session.together(&lent, GIVING_UP.to_owned(), end, &params, &restoring);
        match timeout_at(deadline, ending).await {
            Ok((Ok(()), Ok(rows), Ok(()))) => {
                lent.give_back();
                !rows.is_empty()
            }
            Ok(_) => false,
            Err(_) => {
                self.lent = Some(lent);
                false
            }
        }
    }
}

impl Drop for OpenClaim {
    fn drop(&mut self) {
        if self.lent.is_some() {
            // A closed connection's statement runs on, and its locks with it.
            self.cancel();
        }
    }
}

impl fmt::Debug for OpenClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenClaim")
            .field("key", &self.claim.key)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// Undoing by parts, for the work.
pub(crate) fn save(savepoint: u32) -> String {
    saving(savepoint)
}

/// See [`save`].
pub(crate) fn undo(savepoint: u32) -> String {
    undoing(savepoint)
}

/// See [`save`].
pub(crate) fn release(savepoint: u32) -> String {
    releasing(savepoint)
}

/// A key that is at work in this process.
struct Place {
    shared: Arc<Shared>,
    key: EventKey,
}

impl Place {
    /// Or what the claim is answered.
    fn take(shared: &Arc<Shared>, claim: &Claim) -> Result<Self, ClaimOutcome> {
        match shared.at_work().entry(claim.key.clone()) {
            Entry::Occupied(other) if claim.is_other_payload(*other.get()) => {
                Err(ClaimOutcome::OtherPayload)
            }
            Entry::Occupied(_) => Err(HELD_BY_A_TRANSACTION),
            Entry::Vacant(place) => {
                place.insert(claim.fingerprint);
                Ok(Self { shared: shared.clone(), key: claim.key.clone() })
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.at_work().remove(&self.key);
    }
}

/// What an error at the done mark or the commit means.
fn not_committed(error: &tokio_postgres::Error) -> NotCommitted {
    let kind = match Meaning::of(error) {
        Meaning::Lost => NotCommittedKind::Lost,
        Meaning::Again => NotCommittedKind::Conflict,
        _ if error.code() == Some(&SqlState::IN_FAILED_SQL_TRANSACTION) => {
            NotCommittedKind::Aborted
        }
        _ => NotCommittedKind::Refused,
    };
    NotCommitted::new(kind, Cause::told_by(error))
}

/// Whether a statement of the work failed for a reason that is none of the work's: the same again
/// may do.
pub(crate) fn passing(error: &tokio_postgres::Error) -> Option<NotCommittedKind> {
    match Meaning::of(error) {
        Meaning::Again => Some(NotCommittedKind::Conflict),
        Meaning::Lost => Some(NotCommittedKind::Lost),
        _ => None,
    }
}

/// What an error of the driver says, without the rows that the server quotes.
pub(crate) fn told(error: &tokio_postgres::Error) -> impl Error + Send + Sync + use<> {
    Cause::told_by(error)
}

const ATTEMPTED: &str = "claim the key in a transaction";
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_TRIES: u32 = 3;
const MAX_LOOKS: u32 = 3;
