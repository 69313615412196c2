//! The protocol by statements: what each operation asks, and how its rows are read.

use std::{collections::BTreeSet, slice::from_ref, time::Duration};

use tokio::time::{Instant, sleep};
use tokio_postgres::{Row, types::Type};

use super::{
    Shared,
    session::{Ask, Failure, Param, jitter},
    statements::Bounds,
};
use crate::{
    claim::{self, Claim, ClaimOutcome, ClaimToken, EventKey, Held, OnClaim, State},
    store::{Completion, Record, StoreError, StoreErrorKind},
};

impl Shared {
    /// One round trip tells what there is; a second one takes what is free.
    pub(super) async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StoreError> {
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
                let held = self.renew(from_ref(claim), deadline).await?;
                if held.first() != Some(&Held::Yes) {
                    continue;
                }
            }
            return Ok(ClaimOutcome::Claimed { attempt });
        }
        Err(StoreError::new(StoreErrorKind::Conflict, "claim the key")
            .with_source("the row came and went each time it was looked at"))
    }

    pub(super) async fn complete(
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

    pub(super) async fn fail(
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

    pub(super) async fn renew(
        &self,
        claims: &[Claim],
        deadline: Instant,
    ) -> Result<Vec<Held>, StoreError> {
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

    pub(super) async fn forget(&self, key: &EventKey) -> Result<bool, StoreError> {
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

    pub(super) async fn show(&self, key: &EventKey) -> Result<Option<Record>, StoreError> {
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

    pub(super) async fn purge(&self, limit: u32) -> Result<u64, StoreError> {
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

    pub(super) fn deadline(&self) -> Instant {
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

/// Whole milliseconds, rounded up, within what Postgres can add to a date.
fn millis(time: Duration) -> i64 {
    let millis = time.as_nanos().div_ceil(1_000_000);
    i64::try_from(millis).unwrap_or(i64::MAX).min(LONGEST_MILLIS)
}

/// A transaction that has the row's lock does not say how long it will keep it.
const HELD_BY_A_TRANSACTION: ClaimOutcome =
    ClaimOutcome::InProgress { lease_left: Duration::from_secs(1) };

const MAX_LOOKS: u32 = 12;
const LOOKS_WITHOUT_A_PAUSE: u32 = 2;
/// A thousand years.
const LONGEST_MILLIS: i64 = 1000 * 366 * 24 * 60 * 60 * 1000;
