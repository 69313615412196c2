//! A store without a database.

use std::{
    collections::{HashMap, hash_map::Entry},
    future::ready,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{ClaimStore, Completion, Record, StoreFuture, StoreId};
use crate::claim::{
    Claim, ClaimOutcome, ClaimToken, EventKey, Held, OnClaim, PayloadHash, Row, State, may_change,
    may_complete, on_claim,
};

/// Keeps claims in this process's memory: for tests, demos, and programs that run once.
///
/// It answers as [`PgStore`](crate::PgStore) does and passes the same conformance suite, and it
/// shares nothing: a restart forgets every event, and a second replica knows none. Rows past their
/// retention are swept out as new ones come in, so memory is bounded by what arrives within one
/// retention.
///
/// Clones share their claims. Time is tokio's, so tests with a paused clock can move it.
///
/// # Examples
///
/// ```
/// use tower_dedupe::{DedupeLayer, KeySource, MemoryStore};
///
/// let layer = DedupeLayer::new(MemoryStore::new(), KeySource::header("x-github-delivery")?);
/// # Ok::<(), tower_dedupe::KeySourceError>(())
/// ```
#[derive(Clone, Debug)]
pub struct MemoryStore {
    id: StoreId,
    table: Arc<Mutex<Table>>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self { id: StoreId::unique(), table: Arc::default() }
    }

    /// No code panics while it holds the lock, so a poisoned table is a whole one.
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl ClaimStore for MemoryStore {
    fn id(&self) -> StoreId {
        self.id
    }

    fn claim<'a>(&'a self, claim: &'a Claim) -> StoreFuture<'a, ClaimOutcome> {
        Box::pin(async move { Ok(self.table().claim(claim)) })
    }

    fn complete<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        completion: Completion,
    ) -> StoreFuture<'a, Held> {
        Box::pin(async move { Ok(self.table().complete(key, token, completion)) })
    }

    fn fail<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        retention: Duration,
    ) -> StoreFuture<'a, bool> {
        Box::pin(async move { Ok(self.table().fail(key, token, retention)) })
    }

    fn renew<'a>(&'a self, claims: &'a [Claim]) -> StoreFuture<'a, Vec<Held>> {
        Box::pin(async move {
            let mut table = self.table();
            Ok(claims.iter().map(|claim| table.renew(claim)).collect())
        })
    }

    fn forget<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            let now = Instant::now();
            let row = self.table().rows.remove(key);
            Ok(row.is_some_and(|kept| kept.expires_at > now))
        })
    }

    fn show<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, Option<Record>> {
        Box::pin(async move { Ok(self.table().show(key)) })
    }

    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        let purged = self.table().purge(limit);
        Box::pin(ready(Ok(purged)))
    }
}

#[derive(Debug, Default)]
struct Table {
    rows: HashMap<EventKey, Kept>,
    /// Sweep when there are this many rows.
    sweep_at: usize,
}

/// One row.
#[derive(Debug)]
struct Kept {
    state: State,
    token: ClaimToken,
    attempt: u32,
    lease_until: Instant,
    expires_at: Instant,
    fingerprint: Option<PayloadHash>,
    response_status: Option<u16>,
    response: Option<Bytes>,
}

impl Kept {
    fn seen_by(&self, token: ClaimToken, now: Instant) -> Row {
        Row {
            state: self.state,
            mine: self.token == token,
            other_payload: false,
            attempt: self.attempt,
            lease_left: self.lease_until.saturating_duration_since(now),
            expired: self.expires_at <= now,
            response_status: self.response_status,
            response: None,
        }
    }

    fn claimed_by(&self, claim: &Claim, now: Instant) -> Row {
        Row {
            other_payload: claim.is_other_payload(self.fingerprint),
            response: self.response.clone().filter(|_| claim.replay),
            ..self.seen_by(claim.token, now)
        }
    }
}

impl Table {
    fn claim(&mut self, claim: &Claim) -> ClaimOutcome {
        let now = Instant::now();
        self.sweep(now);
        let place = self.rows.entry(claim.key.clone());
        let found = match &place {
            Entry::Occupied(kept) => Some(kept.get().claimed_by(claim, now)),
            Entry::Vacant(_) => None,
        };
        let attempt = match on_claim(found.as_ref()) {
            OnClaim::Answer(answer) => return answer,
            OnClaim::Take { attempt } => attempt,
        };
        let lease_until = after(now, claim.lease);
        let kept = Kept {
            state: State::InProgress,
            token: claim.token,
            attempt,
            lease_until,
            expires_at: after(lease_until, claim.retention),
            fingerprint: claim.fingerprint,
            response_status: None,
            response: None,
        };
        place.insert_entry(kept);
        ClaimOutcome::Claimed { attempt }
    }

    fn complete(&mut self, key: &EventKey, token: ClaimToken, completion: Completion) -> Held {
        let now = Instant::now();
        match self.rows.get_mut(key) {
            Some(kept) if may_complete(&kept.seen_by(token, now)) => {
                // Done is final: asked twice, the first answer stands.
                if kept.state != State::Done {
                    kept.state = State::Done;
                    kept.response_status = completion.status;
                    kept.response = completion.response;
                    kept.expires_at = after(now, completion.retention);
                }
                Held::Yes
            }
            _ => Held::Lost,
        }
    }

    fn fail(&mut self, key: &EventKey, token: ClaimToken, retention: Duration) -> bool {
        let now = Instant::now();
        let Some(kept) = self.changeable(key, token, now) else { return false };
        kept.state = State::Failed;
        kept.expires_at = after(now, retention);
        true
    }

    fn renew(&mut self, claim: &Claim) -> Held {
        let now = Instant::now();
        let Some(kept) = self.changeable(&claim.key, claim.token, now) else { return Held::Lost };
        kept.lease_until = after(now, claim.lease);
        kept.expires_at = after(kept.lease_until, claim.retention);
        Held::Yes
    }

    fn changeable(&mut self, key: &EventKey, token: ClaimToken, now: Instant) -> Option<&mut Kept> {
        self.rows.get_mut(key).filter(|kept| may_change(&kept.seen_by(token, now)))
    }

    fn show(&self, key: &EventKey) -> Option<Record> {
        let now = Instant::now();
        let kept = self.rows.get(key).filter(|kept| kept.expires_at > now)?;
        let lease_left = match kept.state {
            State::InProgress => kept.lease_until.saturating_duration_since(now),
            State::Done | State::Failed => Duration::ZERO,
        };
        Some(Record {
            lease_left,
            retention_left: kept.expires_at.saturating_duration_since(now),
            response_status: kept.response_status,
            ..Record::new(kept.state, kept.attempt)
        })
    }

    fn purge(&mut self, limit: u32) -> u64 {
        let now = Instant::now();
        let mut left = limit;
        let before = self.rows.len();
        self.rows.retain(|_, kept| {
            let purged = left > 0 && kept.expires_at <= now;
            left -= u32::from(purged);
            !purged
        });
        (before - self.rows.len()) as u64
    }

    /// Drops rows past their retention, once for each doubling of the table, so that a claim costs
    /// the same however many rows there are.
    fn sweep(&mut self, now: Instant) {
        if self.rows.len() < self.sweep_at {
            return;
        }
        self.rows.retain(|_, kept| kept.expires_at > now);
        self.sweep_at = SMALLEST_SWEEP.max(self.rows.len().saturating_mul(2));
    }
}

/// A moment so far off that it cannot be told is as good as never.
fn after(now: Instant, wait: Duration) -> Instant {
    now.checked_add(wait).unwrap_or_else(|| now + NEVER)
}

const SMALLEST_SWEEP: usize = 1024;
const NEVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::claim::Scope;

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_by_what_arrives_within_one_retention() {
        let store = MemoryStore::new();
        for event in 0..20_000 {
            let key = EventKey::new(Scope::new("s").unwrap(), event.to_string()).unwrap();
            let claim = Claim::new(key, Duration::from_secs(1), Duration::from_secs(1));
            store.claim(&claim).await.unwrap();
            tokio::time::advance(Duration::from_millis(10)).await;
        }
        // 200 claims are within their second of lease and second of retention.
        assert!(store.table().rows.len() <= SMALLEST_SWEEP, "{}", store.table().rows.len());
    }
}
