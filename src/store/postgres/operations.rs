//! The protocol by statements: what each operation asks, and how its rows are read.

use std::{collections::BTreeSet, slice::from_ref, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::{Instant, sleep};
use tokio_postgres::{Row, types::Type};

use super::{
    Shared,
    cache::{AsOf, Done},
    lanes::{self, Lane, Operation},
    session::{Ask, Failure, Param, jitter},
    statements::{Bounds, Commit},
};
use crate::{
    claim::{self, Claim, ClaimOutcome, ClaimToken, EventKey, Held, OnClaim, PayloadHash, State},
    store::{Completion, Record, StoreError, StoreErrorKind},
};

impl Shared {
    /// One round trip tells what there is; a second one takes what is free.
    pub(super) async fn claim(self: &Arc<Self>, claim: &Claim) -> Result<ClaimOutcome, StoreError> {
        if let Some(answer) = self.done.answer(claim) {
            return Ok(answer);
        }
        let as_of = self.done.as_of();
        let deadline = self.deadline();
        for look in 0..MAX_LOOKS {
            if look >= LOOKS_WITHOUT_A_PAUSE {
                sleep(jitter()).await;
            }
            let found = match lanes::ask(self, Look(claim.clone()), deadline).await {
                Ok(found) => found,
                // A transaction that is not committed has the row: another claim, mid-way.
                Err(Failure::Locked(_)) => return Ok(HELD_BY_A_TRANSACTION),
                Err(failure) => return Err(failure.into()),
            };
            // The row that was in the way was committed after the statement began.
            let Some(found) = found else { continue };
            let row = found.seen_by(claim);
            let (attempt, lease_left) = match claim::on_claim(Some(&row)) {
                OnClaim::Answer(ClaimOutcome::Claimed { attempt }) => (attempt, row.lease_left),
                OnClaim::Answer(answer) => {
                    self.keep_if_done(claim, &found, as_of);
                    return Ok(answer);
                }
                OnClaim::Take { .. } => {
                    let taken = self.take(claim, deadline).await;
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
                let held = self.renew(from_ref(claim), deadline).await?;
                if held.first() != Some(&Held::Yes) {
                    continue;
                }
            }
            return Ok(ClaimOutcome::Claimed { attempt });
        }
        Err(StoreError::new(StoreErrorKind::Conflict, Look::ATTEMPTED)
            .with_source("the row came and went each time it was looked at"))
    }

    /// Keeps in mind what a claim has read of a key that is done: with its response, if it asked for
    /// that.
    pub(super) fn keep_if_done(&self, claim: &Claim, found: &Found, as_of: AsOf) {
        if found.row.state == State::Done && !found.row.expired {
            let done = Done {
                status: found.row.response_status,
                fingerprint: found.fingerprint,
                response: claim.replay.then(|| found.row.response.clone()),
            };
            self.done.keep(&claim.key, done, found.retention_left, as_of);
        }
    }

    /// Inserts or reads a key.
    async fn look(&self, claim: &Claim, deadline: Instant) -> Result<Vec<Row>, Failure> {
        let params = ClaimParams::of(claim);
        let ask = Ask {
            attempted: Look::ATTEMPTED,
            sql: &self.statements.claim,
            bounds: self.bounds_within(claim.lease),
            params: &params.to_look(),
        };
        self.session.ask(&ask, deadline).await
    }

    /// Takes a key, if it is free.
    async fn take(&self, claim: &Claim, deadline: Instant) -> Result<Vec<Row>, Failure> {
        let params = ClaimParams::of(claim);
        let ask = Ask {
            attempted: Look::ATTEMPTED,
            sql: &self.statements.take,
            bounds: self.bounds_within(claim.lease),
            params: &params.to_take(),
        };
        self.session.ask(&ask, deadline).await
    }

    pub(super) async fn complete(
        self: &Arc<Self>,
        key: &EventKey,
        token: ClaimToken,
        completion: Completion,
    ) -> Result<Held, StoreError> {
        let as_of = self.done.as_of();
        let retention = completion.retention;
        let end = End { key: key.clone(), token, state: State::Done, completion };
        let Some(Ended { done }) = self.end(end).await? else { return Ok(Held::Lost) };
        self.done.keep(key, done, retention, as_of);
        Ok(Held::Yes)
    }

    pub(super) async fn fail(
        self: &Arc<Self>,
        key: &EventKey,
        token: ClaimToken,
        retention: Duration,
    ) -> Result<bool, StoreError> {
        let completion = Completion::new(None, retention);
        let end = End { key: key.clone(), token, state: State::Failed, completion };
        Ok(self.end(end).await?.is_some())
    }

    async fn end(self: &Arc<Self>, end: End) -> Result<Option<Ended>, StoreError> {
        let deadline = self.deadline();
        loop {
            match lanes::ask(self, end.clone(), deadline).await {
                // A renewal that is not committed, say. It is waited for here, not in the lane.
                Err(Failure::Locked(_)) if Instant::now() + LOCK_TIMEOUT < deadline => {
                    sleep(jitter()).await;
                }
                answer => return Ok(answer?),
            }
        }
    }

    pub(super) async fn renew(
        &self,
        claims: &[Claim],
        deadline: Instant,
    ) -> Result<Vec<Held>, StoreError> {
        let Some(shortest) = claims.iter().map(|claim| claim.lease).min() else {
            return Ok(Vec::new());
        };
        // Sorted, so that two renewals lock in the same order, and each claim once.
        let mut distinct: Vec<_> = claims.iter().collect();
        let id = |claim: &&Claim| (claim.key.clone(), *claim.token.as_bytes());
        distinct.sort_by_cached_key(id);
        distinct.dedup_by_key(|claim| id(claim));

        let params: [Param<'_>; 5] = [
            (&each(&distinct, |claim| claim.key.scope().as_str()), Type::TEXT_ARRAY),
            (&each(&distinct, |claim| claim.key.as_str()), Type::TEXT_ARRAY),
            (&each(&distinct, |claim| &claim.token.as_bytes()[..]), Type::BYTEA_ARRAY),
            (&each(&distinct, |claim| millis(claim.lease)), Type::INT8_ARRAY),
            (&each(&distinct, |claim| millis(claim.retention)), Type::INT8_ARRAY),
        ];
        let ask = Ask {
            attempted: "renew the leases",
            sql: &self.statements.renew,
            bounds: self.bounds_within(shortest),
            params: &params,
        };
        let mut held = BTreeSet::new();
        for row in self.session.ask(&ask, deadline).await? {
            held.extend(distinct.get(place(&row)?).map(id));
        }
        Ok(claims
            .iter()
            .map(|claim| if held.contains(&id(&claim)) { Held::Yes } else { Held::Lost })
            .collect())
    }

    pub(super) async fn forget(&self, key: &EventKey) -> Result<bool, StoreError> {
        let params: [Param<'_>; 2] =
            [(&key.scope().as_str(), Type::TEXT), (&key.as_str(), Type::TEXT)];
        let ask = Ask {
            attempted: "forget the key",
            sql: &self.statements.forget,
            bounds: Bounds { lock: self.timeout / 2, commit: Commit::Durable, ..self.bounds },
            params: &params,
        };
        let asked = self.session.ask(&ask, self.deadline()).await;
        // Also if it failed: it may have been carried out.
        self.done.forget(key);
        asked?.first().map_or(Ok(false), |row| row.try_get(0).map_err(unreadable))
    }

    pub(super) async fn show(&self, key: &EventKey) -> Result<Option<Record>, StoreError> {
        let params: [Param<'_>; 2] =
            [(&key.scope().as_str(), Type::TEXT), (&key.as_str(), Type::TEXT)];
        let ask = Ask {
            attempted: "read the key",
            sql: &self.statements.show,
            bounds: self.bounds,
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

    pub(super) async fn purge(&self, limit: u32) -> Result<u64, StoreError> {
        let limit = i64::from(limit);
        let ask = Ask {
            attempted: "purge old keys",
            sql: &self.statements.purge,
            bounds: self.bounds,
            params: &[(&limit, Type::INT8)],
        };
        let rows = self.session.ask(&ask, self.deadline()).await?;
        let purged: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0)).map_err(unreadable)?;
        Ok(purged.unsigned_abs())
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// The bounds of a statement that writes a lease: it is counted from the statement's beginning,
    /// and no wait may use it up.
    pub(super) fn bounds_within(&self, lease: Duration) -> Bounds {
        Bounds { lock: self.bounds.lock.min(lease / 10), ..self.bounds }
    }
}

/// The bounds of a statement. The server gives up before we do, so that its answer is heard: lock,
/// then statement, then our own deadline.
pub(super) fn bounds(timeout: Duration, commit: Commit) -> Bounds {
    Bounds { lock: LOCK_TIMEOUT.min(timeout / 2), statement: timeout / 10 * 9, commit }
}

/// What a claim says of itself, as parameters.
pub(super) struct ClaimParams<'a> {
    scope: &'a str,
    key: &'a str,
    token: &'a [u8],
    lease: i64,
    retention: i64,
    fingerprint: Option<&'a [u8]>,
    replay: bool,
}

impl<'a> ClaimParams<'a> {
    pub(super) fn of(claim: &'a Claim) -> Self {
        Self {
            scope: claim.key.scope().as_str(),
            key: claim.key.as_str(),
            token: claim.token.as_bytes(),
            lease: millis(claim.lease),
            retention: millis(claim.retention),
            fingerprint: fingerprint_of(claim),
            replay: claim.replay,
        }
    }

    /// Those of the statements that read what is there.
    pub(super) fn to_look(&self) -> [Param<'_>; 7] {
        let [scope, key, token, lease, retention, fingerprint] = self.to_take();
        [scope, key, token, lease, retention, fingerprint, (&self.replay, Type::BOOL)]
    }

    /// Those of the statements that take a key.
    pub(super) fn to_take(&self) -> [Param<'_>; 6] {
        [
            (&self.scope, Type::TEXT),
            (&self.key, Type::TEXT),
            (&self.token, Type::BYTEA),
            (&self.lease, Type::INT8),
            (&self.retention, Type::INT8),
            (&self.fingerprint, Type::BYTEA),
        ]
    }
}

fn fingerprint_of(claim: &Claim) -> Option<&[u8]> {
    claim.fingerprint.as_ref().map(|hash| &hash.as_bytes()[..])
}

/// A row as a claim finds it, or has made it.
#[derive(Clone, Debug)]
pub(super) struct Found {
    token: Option<ClaimToken>,
    fingerprint: Option<PayloadHash>,
    row: claim::Row,
    /// Zero for one that it has made.
    retention_left: Duration,
}

impl Found {
    pub(super) fn seen_by(&self, claim: &Claim) -> claim::Row {
        claim::Row {
            mine: self.token == Some(claim.token),
            other_payload: claim.is_other_payload(self.fingerprint),
            response: self.row.response.clone().filter(|_| claim.replay),
            ..self.row.clone()
        }
    }
}

/// A claim's first statement: inserts the key or reads what there is; nothing says look again.
#[derive(Clone, Debug)]
pub(super) struct Look(Claim);

impl Operation for Look {
    type Answer = Option<Found>;

    const ATTEMPTED: &'static str = "claim the key";

    fn lane(shared: &Shared) -> &Lane<Self> {
        &shared.lanes.looks
    }

    fn key(&self) -> &EventKey {
        &self.0.key
    }

    /// In progress or done it is for all who ask; taken by one at a time. The response may not have
    /// been read.
    fn following(&self, first: &Self, found: &Self::Answer) -> Option<Self::Answer> {
        let row = found.as_ref()?.seen_by(&self.0);
        if row.state == State::Done && self.0.replay && !first.0.replay {
            return None;
        }
        matches!(claim::on_claim(Some(&row)), OnClaim::Answer(_)).then(|| found.clone())
    }

    async fn alone(&self, shared: &Shared, deadline: Instant) -> Result<Self::Answer, Failure> {
        let rows = shared.look(&self.0, deadline).await?;
        Ok(rows.first().map(found).transpose()?)
    }

    async fn together(
        many: &[Self],
        shared: &Shared,
        deadline: Instant,
    ) -> Result<Vec<Result<Self::Answer, Failure>>, Failure> {
        let shortest = many.iter().map(|look| look.0.lease).min().unwrap_or_default();
        let ask = Ask {
            attempted: Self::ATTEMPTED,
            sql: &shared.statements.claim_many,
            bounds: shared.bounds_within(shortest),
            params: &[
                (&each(many, |look| look.0.key.scope().as_str()), Type::TEXT_ARRAY),
                (&each(many, |look| look.0.key.as_str()), Type::TEXT_ARRAY),
                (&each(many, |look| &look.0.token.as_bytes()[..]), Type::BYTEA_ARRAY),
                (&each(many, |look| millis(look.0.lease)), Type::INT8_ARRAY),
                (&each(many, |look| millis(look.0.retention)), Type::INT8_ARRAY),
                (&each(many, |look| fingerprint_of(&look.0)), Type::BYTEA_ARRAY),
                (&each(many, |look| look.0.replay), Type::BOOL_ARRAY),
            ],
        };
        let mut answers: Vec<_> = many.iter().map(|_| Ok(None)).collect();
        for row in shared.session.ask(&ask, deadline).await? {
            let scope: &str = row.try_get("scope").map_err(unreadable)?;
            let event_key: &str = row.try_get("event_key").map_err(unreadable)?;
            let place = many.binary_search_by(|look| {
                let key = &look.0.key;
                (key.scope().as_str(), key.as_str()).cmp(&(scope, event_key))
            });
            let answer = place.ok().and_then(|place| answers.get_mut(place));
            let Some(answer) = answer else { continue };
            // Inserted rows come first, and count.
            if matches!(answer, Ok(None)) {
                *answer = found(&row).map(Some).map_err(Failure::Failed);
            }
        }
        Ok(answers)
    }
}

/// A claim that has ended, with what its row has now.
#[derive(Debug)]
pub(super) struct Ended {
    done: Done,
}

/// A claim's end: marks it done, or frees it; nothing, if it is not held.
#[derive(Clone, Debug)]
pub(super) struct End {
    key: EventKey,
    token: ClaimToken,
    state: State,
    completion: Completion,
}

impl End {
    fn status(&self) -> Option<i16> {
        response_code(self.completion.status)
    }

    fn response(&self) -> Option<&[u8]> {
        self.completion.response.as_deref()
    }
}

impl Operation for End {
    type Answer = Option<Ended>;

    const ATTEMPTED: &'static str = "mark the key done or free it";

    fn lane(shared: &Shared) -> &Lane<Self> {
        &shared.lanes.ends
    }

    fn key(&self) -> &EventKey {
        &self.key
    }

    /// Another token is another claim, and the same one finds itself.
    fn following(&self, _: &Self, _: &Self::Answer) -> Option<Self::Answer> {
        None
    }

    fn weight(&self) -> usize {
        self.response().map_or(0, <[u8]>::len)
    }

    async fn alone(&self, shared: &Shared, deadline: Instant) -> Result<Self::Answer, Failure> {
        let ask = Ask {
            attempted: Self::ATTEMPTED,
            sql: &shared.statements.end,
            bounds: shared.bounds,
            params: &[
                (&self.key.scope().as_str(), Type::TEXT),
                (&self.key.as_str(), Type::TEXT),
                (&&self.token.as_bytes()[..], Type::BYTEA),
                (&self.state.as_str(), Type::TEXT),
                (&self.status(), Type::INT2),
                (&millis(self.completion.retention), Type::INT8),
                (&self.response(), Type::BYTEA),
            ],
        };
        Ok(shared.session.ask(&ask, deadline).await?.first().map(ended).transpose()?)
    }

    async fn together(
        many: &[Self],
        shared: &Shared,
        deadline: Instant,
    ) -> Result<Vec<Result<Self::Answer, Failure>>, Failure> {
        let ask = Ask {
            attempted: Self::ATTEMPTED,
            sql: &shared.statements.end_many,
            bounds: shared.bounds,
            params: &[
                (&each(many, |end| end.key.scope().as_str()), Type::TEXT_ARRAY),
                (&each(many, |end| end.key.as_str()), Type::TEXT_ARRAY),
                (&each(many, |end| &end.token.as_bytes()[..]), Type::BYTEA_ARRAY),
                (&each(many, |end| end.state.as_str()), Type::TEXT_ARRAY),
                (&each(many, |end| end.status()), Type::INT2_ARRAY),
                (&each(many, |end| millis(end.completion.retention)), Type::INT8_ARRAY),
                (&each(many, |end| end.response()), Type::BYTEA_ARRAY),
            ],
        };
        let mut answers: Vec<_> = many.iter().map(|_| Ok(None)).collect();
        for row in shared.session.ask(&ask, deadline).await? {
            if let Some(answer) = answers.get_mut(place(&row)?) {
                *answer = ended(&row).map(Some).map_err(Failure::Failed);
            }
        }
        Ok(answers)
    }
}

/// One column of a statement for several.
fn each<'a, O, T>(many: &'a [O], value: impl Fn(&'a O) -> T) -> Vec<T> {
    many.iter().map(value).collect()
}

/// The place of a row's operation among several, from 0.
fn place(row: &Row) -> Result<usize, StoreError> {
    let place: i64 = row.try_get("place").map_err(unreadable)?;
    usize::try_from(place - 1).map_err(unreadable)
}

pub(super) fn found(row: &Row) -> Result<Found, StoreError> {
    let token: Option<&[u8]> = row.try_get("token").map_err(unreadable)?;
    Ok(Found {
        // Rows of the copied pattern have none.
        token: token.and_then(|token| <[u8; 16]>::try_from(token).ok()).map(ClaimToken::from),
        fingerprint: fingerprint(row)?,
        row: claim::Row {
            state: state(row)?,
            mine: false,
            other_payload: false,
            attempt: attempt(row)?,
            lease_left: time(row, "lease_left")?,
            expired: row.try_get("expired").map_err(unreadable)?,
            response_status: response_status(row)?,
            response: response(row)?,
        },
        retention_left: time(row, "retention_left")?,
    })
}

fn ended(row: &Row) -> Result<Ended, StoreError> {
    let (status, fingerprint) = (response_status(row)?, fingerprint(row)?);
    // Marked done twice, the first response stands, and it may be another one.
    Ok(Ended { done: Done { status, fingerprint, response: None } })
}

fn state(row: &Row) -> Result<State, StoreError> {
    let status: &str = row.try_get("status").map_err(unreadable)?;
    status.parse().map_err(unreadable)
}

pub(super) fn attempt(row: &Row) -> Result<u32, StoreError> {
    let attempt: i32 = row.try_get("attempt").map_err(unreadable)?;
    u32::try_from(attempt).map_err(unreadable)
}

fn time(row: &Row, column: &str) -> Result<Duration, StoreError> {
    let seconds: f64 = row.try_get(column).map_err(unreadable)?;
    // Of a time that is over, and of `infinity`.
    Ok(Duration::from_secs_f64(seconds.clamp(0.0, LONGEST.as_secs_f64())))
}

fn response_status(row: &Row) -> Result<Option<u16>, StoreError> {
    let status: Option<i16> = row.try_get("response_status").map_err(unreadable)?;
    Ok(status.and_then(|status| u16::try_from(status).ok()))
}

/// One that is not as long as ours is none that could be compared.
fn fingerprint(row: &Row) -> Result<Option<PayloadHash>, StoreError> {
    let hash: Option<&[u8]> = row.try_get("fingerprint").map_err(unreadable)?;
    Ok(hash.and_then(|hash| <[u8; 32]>::try_from(hash).ok()).map(PayloadHash::from))
}

fn response(row: &Row) -> Result<Option<Bytes>, StoreError> {
    let response: Option<&[u8]> = row.try_get("response").map_err(unreadable)?;
    Ok(response.map(Bytes::copy_from_slice))
}

/// A status as the table keeps it.
pub(super) fn response_code(status: Option<u16>) -> Option<i16> {
    status.and_then(|status| i16::try_from(status).ok())
}

/// The table has something in it that this version does not write.
pub(super) fn unreadable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Schema, "read the row").with_source(error)
}

/// Whole milliseconds, rounded up, within what Postgres can add to a date.
pub(super) fn millis(time: Duration) -> i64 {
    let millis = time.min(LONGEST).as_nanos().div_ceil(1_000_000);
    i64::try_from(millis).unwrap_or(i64::MAX)
}

/// A transaction that has the row's lock does not say how long it will keep it.
pub(super) const HELD_BY_A_TRANSACTION: ClaimOutcome =
    ClaimOutcome::InProgress { lease_left: Duration::from_secs(1) };

/// How long a statement waits for a row that another transaction has locked. In a lane it keeps
/// others waiting meanwhile, and the answer is known: such a key is in progress.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_millis(20);
const MAX_LOOKS: u32 = 12;
const LOOKS_WITHOUT_A_PAUSE: u32 = 2;
/// A thousand years.
const LONGEST: Duration = Duration::from_secs(1000 * 366 * 24 * 60 * 60);
