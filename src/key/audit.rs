//! Finds the two silent mistakes in choosing a key, by what arrives.

use std::{
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use quick_cache::unsync::Cache;

use super::KeySource;
use crate::claim::EventKey;

/// Watches which keys come with which payloads, and says where the key source looks like a mistake.
///
/// Neither mistake shows by itself. A key that changes with each retry makes every delivery an event
/// of its own, which runs again; a key that several events share (the id of an object, say) lets all
/// but the first be swallowed. Within a scope, each shows when **three** keys come with one payload,
/// or three payloads with one key, in one window. It is a hint and no proof: payloads that are alike
/// by right, such as heartbeats, and senders that change the body of one event each time (a time, a
/// count of attempts) look the same.
///
/// A key is looked for in its payload and left out where it stands as a whole word, so that a changing
/// key in a body does not make a new payload of it. Empty payloads tell nothing of changing keys.
///
/// Clones are cheap and share one memory, which is bounded: 64-bit hashes of so many keys and so many
/// payloads, three for each, made with a secret of this audit; and the first 64 findings. Nothing of a
/// key or a payload is kept or shown.
///
/// # Examples
///
/// ```
/// use tower_dedupe::{DedupeLayer, KeySource, MemoryStore, key::KeyAudit};
///
/// let audit = KeyAudit::new();
/// let layer = DedupeLayer::new(MemoryStore::new(), KeySource::header("x-delivery")?)
///     .key_audit(audit.clone());
/// // Later, on a page for those who run it:
/// for finding in audit.findings() {
///     println!("{finding}");
/// }
/// # Ok::<(), tower_dedupe::KeySourceError>(())
/// ```
#[derive(Clone)]
pub struct KeyAudit {
    window: Duration,
    hasher: RandomState,
    memory: Arc<Mutex<Memory>>,
}

struct Memory {
    /// The keys that came with a payload.
    keys: Cache<u64, Seen>,
    /// The payloads that came with a key.
    payloads: Cache<u64, Seen>,
    findings: Vec<(KeyFinding, Instant)>,
}

impl KeyAudit {
    /// Windows of 10 minutes, and 4,096 keys and payloads.
    pub fn new() -> Self {
        Self::with(Duration::from_secs(10 * 60), 4_096)
    }

    /// Other bounds: how long three of a kind may take to come, and how many keys and how many
    /// payloads are remembered, of which each takes some 60 bytes; at least 1.
    ///
    /// A window should see a few retries, and a capacity hold what arrives in one.
    pub fn with(window: Duration, capacity: usize) -> Self {
        let cache = || Cache::new(capacity.max(1));
        let memory = Memory { keys: cache(), payloads: cache(), findings: Vec::new() };
        Self { window, hasher: RandomState::new(), memory: Arc::new(Mutex::new(memory)) }
    }

    /// Takes note of a delivery. Gives a finding if it shows a mistake.
    ///
    /// The layer does this by itself; it is for those who find keys without one.
    pub fn observe(
        &self,
        source: &KeySource,
        key: &EventKey,
        payload: &[u8],
    ) -> Option<KeyFinding> {
        self.observe_at(Instant::now(), source, key, payload)
    }

    /// What was found so far, in the order in which it was.
    pub fn findings(&self) -> Vec<KeyFinding> {
        self.memory().findings.iter().map(|(finding, _)| finding.clone()).collect()
    }

    fn observe_at(
        &self,
        now: Instant,
        source: &KeySource,
        key: &EventKey,
        payload: &[u8],
    ) -> Option<KeyFinding> {
        let key_hash = self.hasher.hash_one(key);
        let whole = self.hash(key, |hash| hash(payload));
        let without_key = self.hash(key, |hash| without(key.as_str(), payload, hash));

        let mut memory = self.memory();
        let keys = (!payload.is_empty())
            .then(|| met(&mut memory.keys, without_key, key_hash, now, self.window));
        let payloads = met(&mut memory.payloads, key_hash, whole, now, self.window);
        let mistake = match (keys, payloads) {
            (Some(true), _) => KeyMistake::KeyChanges,
            (_, true) => KeyMistake::KeyShared,
            _ => return None,
        };
        memory.found(now, source.to_string(), key.scope().as_str(), mistake)
    }

    /// A hash within the scope of a key.
    fn hash(&self, key: &EventKey, payload: impl FnOnce(&mut dyn FnMut(&[u8]))) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        std::hash::Hash::hash(key.scope(), &mut hasher);
        payload(&mut |part| hasher.write(part));
        hasher.finish()
    }

    /// No code panics while it holds the lock.
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for KeyAudit {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for KeyAudit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("KeyAudit");
        shown.field("window", &self.window).field("findings", &self.findings());
        shown.finish_non_exhaustive()
    }
}

impl Memory {
    /// Counts a mistake; nothing, if there are too many of them already.
    fn found(
        &mut self,
        now: Instant,
        source: String,
        scope: &str,
        mistake: KeyMistake,
    ) -> Option<KeyFinding> {
        let known = self.findings.iter_mut().find(|(finding, _)| {
            finding.mistake == mistake && finding.scope == scope && finding.source == source
        });
        if let Some((finding, told)) = known {
            finding.times += 1;
            finding.is_news = now.saturating_duration_since(*told) >= TOLD_AGAIN_AFTER;
            if finding.is_news {
                *told = now;
            }
            return Some(finding.clone());
        }
        if self.findings.len() >= MAX_FINDINGS {
            return None;
        }
        let scope = scope.to_owned();
        let finding = KeyFinding { source, scope, mistake, times: 1, is_news: true };
        self.findings.push((finding.clone(), now));
        Some(finding)
    }
}

/// The first three that came with something, in one window.
struct Seen {
    since: Instant,
    hashes: [Option<u64>; 3],
}

/// Whether something comes with one more, and with three by now.
fn met(seen: &mut Cache<u64, Seen>, of: u64, with: u64, now: Instant, window: Duration) -> bool {
    if let Some(mut seen) = seen.get_mut(&of) {
        if now.saturating_duration_since(seen.since) < window {
            return seen.meets(with);
        }
    }
    seen.insert(of, Seen { since: now, hashes: [Some(with), None, None] });
    false
}

impl Seen {
    fn meets(&mut self, with: u64) -> bool {
        for place in &mut self.hashes {
            match place {
                Some(hash) if *hash == with => return false,
                Some(_) => {}
                None => {
                    *place = Some(with);
                    break;
                }
            }
        }
        self.hashes.iter().all(Option::is_some)
    }
}

/// Gives a payload in parts, without the key's own where they stand as whole words.
fn without(key: &str, payload: &[u8], take: &mut dyn FnMut(&[u8])) {
    // A composite is joined by `+`.
    let words: Vec<&[u8]> =
        key.split('+').map(str::as_bytes).filter(|word| !word.is_empty()).collect();
    let is_end = |byte: Option<&u8>| byte.is_none_or(|byte| !byte.is_ascii_alphanumeric());
    let (mut rest, mut at, mut before) = (payload, 0, None);
    while let Some(here) = rest.get(at..).filter(|here| !here.is_empty()) {
        let word = words.iter().find_map(|word| {
            let after = here.strip_prefix(*word)?;
            (is_end(before) && is_end(after.first())).then_some(after)
        });
        match word {
            Some(after) => {
                take(rest.get(..at).unwrap_or_default());
                (rest, at, before) = (after, 0, None);
            }
            None => (at, before) = (at + 1, here.first()),
        }
    }
    take(rest);
}

/// What looks like a mistake in choosing a key source. Its `Display` is a whole sentence, with the
/// hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFinding {
    source: String,
    scope: String,
    mistake: KeyMistake,
    times: u64,
    is_news: bool,
}

impl KeyFinding {
    /// The key source, as text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The scope whose keys they are.
    pub fn scope(&self) -> &str {
        &self.scope
    }

    /// Which mistake it looks like.
    pub fn mistake(&self) -> KeyMistake {
        self.mistake
    }

    /// How many deliveries have shown it.
    pub fn times(&self) -> u64 {
        self.times
    }

    /// Whether the last of them was the first, or the first for a minute: it is to be logged.
    pub fn is_news(&self) -> bool {
        self.is_news
    }
}

impl fmt::Display for KeyFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, scope, mistake, times, .. } = self;
        let what = match mistake {
            KeyMistake::KeyChanges => "one payload came under several keys",
            KeyMistake::KeyShared => "one key came with several payloads",
        };
        write!(f, "`{source}` in scope {scope:?}: {what} ({times}×); {}", mistake.hint())
    }
}

/// A mistake in choosing a key source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyMistake {
    /// The key changes from one delivery of an event to the next, so that nothing is a duplicate.
    KeyChanges,
    /// Events share a key, so that all but the first are swallowed.
    KeyShared,
}

impl KeyMistake {
    /// `key-changes` or `key-shared`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::KeyChanges => "key-changes",
            Self::KeyShared => "key-shared",
        }
    }

    /// What to do.
    pub fn hint(self) -> &'static str {
        match self {
            Self::KeyChanges => {
                "if the sender makes a new one for each attempt, events run again: take the id of the \
                 event; if it sends the same content by right, all is well"
            }
            Self::KeyShared => {
                "if it is the id of an object, its later events are lost: take the id of the event; \
                 if the sender changes the body at each attempt, all is well"
            }
        }
    }
}

impl fmt::Display for KeyMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

const MAX_FINDINGS: usize = 64;
const TOLD_AGAIN_AFTER: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::claim::Scope;

    /// An audit and a clock of its own.
    struct Watch {
        audit: KeyAudit,
        now: Instant,
        source: KeySource,
    }

    impl Watch {
        fn new(source: &str) -> Self {
            let (audit, source) = (KeyAudit::new(), source.parse().unwrap());
            Self { audit, now: Instant::now(), source }
        }

        fn see(&self, scope: &str, key: &str, payload: &str) -> Option<KeyMistake> {
            self.find(scope, key, payload).map(|found| found.mistake())
        }

        fn find(&self, scope: &str, key: &str, payload: &str) -> Option<KeyFinding> {
            let key = EventKey::new(Scope::new(scope).unwrap(), key).unwrap();
            let found = self.audit.observe_at(self.now, &self.source, &key, payload.as_bytes())?;
            assert_eq!((found.source(), found.scope()), (&*self.source.to_string(), scope));
            Some(found)
        }
    }

    const CHANGES: Option<KeyMistake> = Some(KeyMistake::KeyChanges);
    const SHARED: Option<KeyMistake> = Some(KeyMistake::KeyShared);

    #[test]
    fn a_key_that_changes_with_each_retry_is_found_at_the_third() {
        let watch = Watch::new("header:x-attempt-id");
        assert_eq!(watch.see("s", "a", "paid"), None);
        assert_eq!(watch.see("s", "b", "paid"), None);
        assert_eq!(watch.see("s", "a", "paid"), None);
        assert_eq!(watch.see("s", "c", "paid"), CHANGES);
        // An event of its own each time, with an empty body.
        for key in ["d", "e", "f", "g"] {
            assert_eq!(watch.see("s", key, ""), None);
        }
    }

    #[test]
    fn a_changing_key_inside_the_payload_is_found_too() {
        for (keys, source) in [
            (["evt_17", "evt_18", "evt_19"], "json:$.id"),
            (["1", "2", "3"], "json:$.id"),
            (["a+1", "a+2", "a+3"], "json:$.source + json:$.id"),
        ] {
            let watch = Watch::new(source);
            let found = keys.map(|key| {
                let id = key.rsplit('+').next().unwrap();
                let body =
                    format!(r#"{{"id": "{id}", "again": ["{id}"], "for": 1234, "by": "a1a"}}"#);
                watch.see("s", key, &body)
            });
            assert_eq!(found, [None, None, CHANGES], "{source}");
        }
    }

    #[test]
    fn a_key_that_is_shared_is_found_at_the_third_payload() {
        let watch = Watch::new("json:$.data.object.id");
        let body =
            |kind: &str| format!(r#"{{"type": "{kind}", "data": {{"object": {{"id": "in_1"}}}}}}"#);
        assert_eq!(watch.see("s", "in_1", &body("created")), None);
        assert_eq!(watch.see("s", "in_1", &body("sent")), None);
        assert_eq!(watch.see("s", "in_1", &body("sent")), None);
        assert_eq!(watch.see("s", "in_1", &body("paid")), SHARED);
    }

    #[test]
    fn what_is_as_it_should_be_finds_nothing() {
        let watch = Watch::new("json:$.id");
        for n in 0..1_000 {
            let (key, body) = (format!("evt_{n}"), format!(r#"{{"id": "evt_{n}", "n": "x{n}"}}"#));
            for _ in 0..5 {
                assert_eq!(watch.see("s", &key, &body), None);
            }
        }
        assert!(watch.audit.findings().is_empty());
    }

    #[test]
    fn scopes_and_windows_are_apart() {
        let mut watch = Watch::new("header:x-id");
        for scope in ["a", "b", "c"] {
            assert_eq!(watch.see(scope, scope, "same"), None);
            assert_eq!(watch.see(scope, "1", "same"), None);
        }
        watch.now += Duration::from_secs(10 * 60);
        assert_eq!(watch.see("a", "2", "same"), None);
        assert_eq!(watch.see("a", "3", "same"), None);
        watch.now += Duration::from_secs(10 * 60 - 1);
        assert_eq!(watch.see("a", "4", "same"), CHANGES);
    }

    #[test]
    fn it_is_news_once_a_minute_and_counted_each_time() {
        let mut watch = Watch::new("header:x-id");
        let found = (0..100).filter_map(|n| watch.find("s", &n.to_string(), "same"));
        let news: Vec<_> = found.map(|finding| finding.is_news()).collect();
        assert_eq!((news.len(), news.iter().filter(|is_news| **is_news).count()), (98, 1));
        watch.now += Duration::from_secs(60);
        assert!(watch.find("s", "more", "same").unwrap().is_news());
        let findings = watch.audit.findings();
        assert_eq!(findings.iter().map(KeyFinding::times).collect::<Vec<_>>(), [99]);
        let text = findings.first().unwrap().to_string();
        assert!(text.starts_with("`header:x-id` in scope \"s\": one payload came"), "{text}");
        assert!(text.contains("99×") && text.contains("take the id of the event"), "{text}");
    }

    #[test]
    fn memory_is_bounded() {
        let watch = Watch::new("header:x-id");
        for n in 0..100_000 {
            // Each scope has its finding; each key and payload is another.
            let (scope, key) = (format!("s{}", n / 3), format!("k{n}"));
            watch.see(&scope, &key, &scope);
        }
        let memory = watch.audit.memory();
        assert!(memory.keys.len() <= 4_096 && memory.payloads.len() <= 4_096);
        assert_eq!(memory.findings.len(), MAX_FINDINGS);
    }
}
