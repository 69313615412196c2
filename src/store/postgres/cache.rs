//! The keys that this process has lately seen done, so that a storm of duplicates costs the
//! database nothing.
//!
//! Only done is kept: of all states it alone stays as it is, until its retention ends or somebody
//! forgets the key. It is kept only if a committed statement has said so.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use quick_cache::{Weighter, sync::Cache};
use tokio::time::Instant;

use crate::claim::{Claim, ClaimOutcome, EventKey, PayloadHash};

/// A bounded cache; without capacity it keeps nothing.
#[derive(Debug)]
pub(super) struct DoneKeys {
    entries: Option<Cache<EventKey, Entry, ByLength>>,
    age: Duration,
    /// Counts what was forgotten.
    forgotten: Mutex<u64>,
}

#[derive(Clone, Debug)]
struct Entry {
    done: Done,
    until: Instant,
}

/// What is known of a key that is done.
#[derive(Clone, Debug)]
pub(super) struct Done {
    /// The status of the first success.
    pub(super) status: Option<u16>,
    pub(super) fingerprint: Option<PayloadHash>,
    /// The response that is stored, if there is one; nothing if that was not looked at.
    pub(super) response: Option<Option<Bytes>>,
}

impl Done {
    /// What the claim is answered; nothing if the database must be asked.
    fn answer(self, claim: &Claim) -> Option<ClaimOutcome> {
        if claim.is_other_payload(self.fingerprint) {
            return Some(ClaimOutcome::OtherPayload);
        }
        let response = if claim.replay { self.response? } else { None };
        Some(ClaimOutcome::Done { status: self.status, response })
    }
}

/// A key counts as one; a response that is kept with it as one more for each kibibyte.
#[derive(Clone, Debug)]
struct ByLength;

impl Weighter<EventKey, Entry> for ByLength {
    fn weight(&self, _: &EventKey, entry: &Entry) -> u64 {
        let response = entry.done.response.iter().flatten().next();
        1 + response.map_or(0, |bytes| bytes.len().div_ceil(1024)) as u64
    }
}

/// The moment at which the database is asked. What it answers is as old as that.
#[derive(Clone, Copy, Debug)]
pub(super) struct AsOf {
    at: Instant,
    forgotten: u64,
}

impl DoneKeys {
    /// At most so many keys, each for so long.
    pub(super) fn new(keys: usize, age: Duration) -> Self {
        // The cache is split for as many as it is told will come, and a response that is longer than
        // its part is not kept at all: tell it fewer, so that no part is short on a large machine.
        let entries = (keys > 0 && !age.is_zero())
            .then(|| Cache::with_weighter(keys.div_ceil(EACH), keys as u64, ByLength));
        Self { entries, age, forgotten: Mutex::default() }
    }

    /// What a claim is answered, if its key is known to be done.
    pub(super) fn answer(&self, claim: &Claim) -> Option<ClaimOutcome> {
        let entries = self.entries.as_ref()?;
        let entry = entries.get(&claim.key)?;
        if Instant::now() < entry.until {
            return entry.done.answer(claim);
        }
        entries.remove_if(&claim.key, |entry| entry.until <= Instant::now());
        None
    }

    pub(super) fn as_of(&self) -> AsOf {
        AsOf { at: Instant::now(), forgotten: *self.forgotten() }
    }

    /// Keeps a key that is done, with what is left of its retention.
    pub(super) fn keep(&self, key: &EventKey, done: Done, retention_left: Duration, as_of: AsOf) {
        let Some(entries) = &self.entries else { return };
        let until = as_of.at + retention_left.min(self.age);
        // Held until the key is in, so that no forget falls in between.
        let forgotten = self.forgotten();
        if *forgotten == as_of.forgotten {
            entries.insert(key.clone(), Entry { done, until });
        }
    }

    /// Drops a key whose row is deleted, and what was read before and is still on its way here.
    pub(super) fn forget(&self, key: &EventKey) {
        let Some(entries) = &self.entries else { return };
        *self.forgotten() += 1;
        entries.remove(key);
    }

    /// No code panics while it holds the lock, so a poisoned count is a right one.
    fn forgotten(&self) -> MutexGuard<'_, u64> {
        self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The cache is laid out for one entry in so many keys: some are responses, which count as many.
const EACH: usize = 32;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says so by panicking")]
mod tests {
    use super::*;
    use crate::claim::Scope;

    fn claim(key: &str) -> Claim {
        let key = EventKey::new(Scope::new("s").unwrap(), key).unwrap();
        Claim::new(key, MINUTE, MINUTE)
    }

    fn key(name: &str) -> EventKey {
        claim(name).key
    }

    fn done(status: Option<u16>) -> Done {
        Done { status, fingerprint: None, response: None }
    }

    const MINUTE: Duration = Duration::from_secs(60);
    const DONE: Option<ClaimOutcome> = Some(ClaimOutcome::done(None));

    #[test]
    fn what_was_asked_before_a_forget_is_not_kept_after_it() {
        let keys = DoneKeys::new(10, MINUTE);
        let before = keys.as_of();
        keys.forget(&key("1"));
        keys.keep(&key("1"), done(Some(200)), MINUTE, before);
        assert_eq!(keys.answer(&claim("1")), None);
        keys.keep(&key("1"), done(Some(200)), MINUTE, keys.as_of());
        assert_eq!(keys.answer(&claim("1")), Some(ClaimOutcome::done(Some(200))));
        keys.forget(&key("1"));
        assert_eq!(keys.answer(&claim("1")), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_is_kept_for_its_age_and_never_longer_than_its_retention() {
        let keys = DoneKeys::new(10, MINUTE);
        let asked = keys.as_of();
        // The answer takes a while.
        tokio::time::advance(MINUTE / 4).await;
        keys.keep(&key("long"), done(None), MINUTE * 60, asked);
        keys.keep(&key("short"), done(None), MINUTE / 2, asked);
        let both = || (keys.answer(&claim("long")), keys.answer(&claim("short")));
        tokio::time::advance(MINUTE / 4 - Duration::from_millis(1)).await;
        assert_eq!(both(), (DONE, DONE));
        tokio::time::advance(Duration::from_millis(2)).await;
        assert_eq!(both(), (DONE, None));
        tokio::time::advance(MINUTE / 2).await;
        assert_eq!(both(), (None, None));
    }

    #[test]
    fn it_keeps_no_more_than_its_capacity() {
        let keys = DoneKeys::new(100, MINUTE);
        let kept = |done: Done| {
            for n in 0..10_000 {
                keys.keep(&key(&n.to_string()), done.clone(), MINUTE, keys.as_of());
            }
            (0..10_000).filter(|n| keys.answer(&claim(&n.to_string())).is_some()).count()
        };
        // The bound is split among shards, and each rounds.
        let short = kept(done(None));
        assert!((1..=200).contains(&short), "{short} keys");
        let response = Some(Some(Bytes::from_static(&[0; 9 * 1024])));
        let long = kept(Done { response, ..done(None) });
        assert!((1..=20).contains(&long), "{long} keys of ten kibibytes");
    }

    #[test]
    fn a_response_as_long_as_the_layer_stores_is_kept_on_any_machine() {
        for capacity in [1000, 10_000] {
            let keys = DoneKeys::new(capacity, MINUTE);
            let response = Bytes::from(vec![0; (256 + 64) * 1024]);
            let known = Done { response: Some(Some(response.clone())), ..done(None) };
            keys.keep(&key("1"), known, MINUTE, keys.as_of());
            let answer = ClaimOutcome::Done { status: None, response: Some(response) };
            let told = keys.answer(&claim("1").with_replay(true));
            assert!(told == Some(answer), "{capacity} keys");
            // What the machine has cores for.
            let parts = keys.entries.as_ref().unwrap().num_shards();
            assert!(capacity / parts >= 1000, "{parts} parts");
        }
    }

    #[test]
    fn without_capacity_or_age_it_keeps_nothing() {
        for keys in [DoneKeys::new(0, MINUTE), DoneKeys::new(10, Duration::ZERO)] {
            keys.keep(&key("1"), done(None), MINUTE, keys.as_of());
            assert_eq!(keys.answer(&claim("1")), None);
        }
    }

    #[test]
    fn the_payload_is_compared_before_anything_is_answered() {
        let keys = DoneKeys::new(10, MINUTE);
        let [mine, other] = [[1; 32], [2; 32]].map(PayloadHash::from);
        let of = |hash| claim("1").with_fingerprint(Some(hash));
        let known = Done { fingerprint: Some(mine), ..done(None) };
        keys.keep(&key("1"), known, MINUTE, keys.as_of());
        assert_eq!(keys.answer(&of(mine)), DONE);
        assert_eq!(keys.answer(&of(other)), Some(ClaimOutcome::OtherPayload));
        assert_eq!(keys.answer(&of(other).with_replay(true)), Some(ClaimOutcome::OtherPayload));
        // Who does not compare is told of none.
        assert_eq!(keys.answer(&claim("1")), DONE);
    }

    #[test]
    fn a_response_that_was_not_looked_at_is_asked_for() {
        let keys = DoneKeys::new(10, MINUTE);
        keys.keep(&key("1"), done(None), MINUTE, keys.as_of());
        assert_eq!(keys.answer(&claim("1")), DONE);
        assert_eq!(keys.answer(&claim("1").with_replay(true)), None);

        for stored in [None, Some(Bytes::from_static(b"first"))] {
            let known = Done { response: Some(stored.clone()), ..done(None) };
            keys.keep(&key("1"), known, MINUTE, keys.as_of());
            let answer = Some(ClaimOutcome::Done { status: None, response: stored });
            assert_eq!(keys.answer(&claim("1").with_replay(true)), answer);
            assert_eq!(keys.answer(&claim("1")), DONE, "it is not wanted");
        }
    }
}
