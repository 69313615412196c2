//! The keys that this process has lately seen done, so that a storm of duplicates costs the
//! database nothing.
//!
//! Only done is kept: of all states it alone stays as it is, until its retention ends or somebody
//! forgets the key. It is kept only if a committed statement has said so.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use quick_cache::sync::Cache;
use tokio::time::Instant;

use crate::claim::EventKey;

/// A bounded cache; without capacity it keeps nothing.
#[derive(Debug)]
pub(super) struct DoneKeys {
    entries: Option<Cache<EventKey, Entry>>,
    age: Duration,
    /// Counts what was forgotten.
    forgotten: Mutex<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    status: Option<u16>,
    until: Instant,
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
        let entries = (keys > 0 && !age.is_zero()).then(|| Cache::new(keys));
        Self { entries, age, forgotten: Mutex::default() }
    }

    /// The status of the first success, if the key is known to be done.
    pub(super) fn get(&self, key: &EventKey) -> Option<Option<u16>> {
        let entries = self.entries.as_ref()?;
        let entry = entries.get(key)?;
        if Instant::now() < entry.until {
            return Some(entry.status);
        }
        entries.remove_if(key, |entry| entry.until <= Instant::now());
        None
    }

    pub(super) fn as_of(&self) -> AsOf {
        AsOf { at: Instant::now(), forgotten: *self.forgotten() }
    }

    /// Keeps a key that is done, with what is left of its retention.
    pub(super) fn keep(
        &self,
        key: &EventKey,
        status: Option<u16>,
        retention_left: Duration,
        as_of: AsOf,
    ) {
        let Some(entries) = &self.entries else { return };
        let until = as_of.at + retention_left.min(self.age);
        // Held until the key is in, so that no forget falls in between.
        let forgotten = self.forgotten();
        if *forgotten == as_of.forgotten {
            entries.insert(key.clone(), Entry { status, until });
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says so by panicking")]
mod tests {
    use super::*;
    use crate::claim::Scope;

    fn key(name: &str) -> EventKey {
        EventKey::new(Scope::new("s").unwrap(), name).unwrap()
    }

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn what_was_asked_before_a_forget_is_not_kept_after_it() {
        let done = DoneKeys::new(10, MINUTE);
        let before = done.as_of();
        done.forget(&key("1"));
        done.keep(&key("1"), Some(200), MINUTE, before);
        assert_eq!(done.get(&key("1")), None);
        done.keep(&key("1"), Some(200), MINUTE, done.as_of());
        assert_eq!(done.get(&key("1")), Some(Some(200)));
        done.forget(&key("1"));
        assert_eq!(done.get(&key("1")), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_is_kept_for_its_age_and_never_longer_than_its_retention() {
        let done = DoneKeys::new(10, MINUTE);
        let asked = done.as_of();
        // The answer takes a while.
        tokio::time::advance(MINUTE / 4).await;
        done.keep(&key("long"), None, MINUTE * 60, asked);
        done.keep(&key("short"), None, MINUTE / 2, asked);
        tokio::time::advance(MINUTE / 4 - Duration::from_millis(1)).await;
        assert_eq!((done.get(&key("long")), done.get(&key("short"))), (Some(None), Some(None)));
        tokio::time::advance(Duration::from_millis(2)).await;
        assert_eq!((done.get(&key("long")), done.get(&key("short"))), (Some(None), None));
        tokio::time::advance(MINUTE / 2).await;
        assert_eq!(done.get(&key("long")), None);
    }

    #[test]
    fn it_keeps_no_more_than_its_capacity() {
        let done = DoneKeys::new(100, MINUTE);
        for n in 0..10_000 {
            done.keep(&key(&n.to_string()), None, MINUTE, done.as_of());
        }
        let kept = (0..10_000).filter(|n| done.get(&key(&n.to_string())).is_some()).count();
        // The bound is split among shards, and each rounds.
        assert!((1..=200).contains(&kept), "{kept} keys");
    }

    #[test]
    fn without_capacity_or_age_it_keeps_nothing() {
        for done in [DoneKeys::new(0, MINUTE), DoneKeys::new(10, Duration::ZERO)] {
            done.keep(&key("1"), None, MINUTE, done.as_of());
            assert_eq!(done.get(&key("1")), None);
        }
    }
}
