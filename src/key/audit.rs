//! Finds at run time the two mistakes with keys that nothing else shows.

use std::{
    borrow::Cow,
    collections::{HashMap, VecDeque},
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{KeySource, Node};
use crate::claim::{EventKey, Scope};

/// Watches keys and payloads for the two mistakes that no error shows: a key that changes with each
/// retry, and a key that many events share.
///
/// A mistake shows when, within the [window](Self::window), one payload comes with three keys or
/// more, or one key with three payloads or more. Each source is watched on its own in each scope.
/// Clones share one memory.
///
/// # Examples
///
/// ```
/// use tower_dedupe::{EventKey, KeyAudit, KeySource, Scope, key::KeyMistake};
///
/// let audit = KeyAudit::new();
/// let source = KeySource::header("x-attempt-id")?;
/// let mut found = None;
/// for attempt in ["a1", "b2", "c3"] {
///     let key = EventKey::new(Scope::new("shop")?, attempt)?;
///     found = audit.observe(&source, &key, br#"{"order":1,"paid":true}"#);
/// }
/// assert_eq!(found.map(|finding| finding.mistake()), Some(KeyMistake::KeyChanges));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What is guaranteed and what is not
///
/// A finding is a suspicion. Events that are alike to the byte look like one event whose key
/// changes, and a sender that writes the attempt into the payload looks like events that share a
/// key; [`hint`](KeyFinding::hint) says so. And no finding is no proof: it takes three deliveries
/// within the window and the [capacity](Self::capacity).
///
/// A key that stands in the payload is cut out before payloads are compared, or each key would make
/// a payload of its own. That needs a key (of a composite: a part) of 4 bytes or more and a payload
/// of UTF-8, where the key stands as it is, without escapes. What is left must still tell events
/// apart: without 10 digits (an id or a time) it is not asked whether the key changes. Nor is it
/// for an empty payload. Payloads of more than 256 KiB are not looked at.
///
/// Keys and payloads are kept as hashes only, with a secret of this audit, so that no sender can
/// aim at a finding.
#[derive(Clone)]
pub struct KeyAudit(Arc<Shared>);

struct Shared {
    limits: Limits,
    hasher: RandomState,
    memory: Mutex<Memory>,
}

#[derive(Clone, Copy)]
struct Limits {
    window: Duration,
    capacity: usize,
}

impl KeyAudit {
    /// An audit with a window of 10 minutes and a capacity of 4,096.
    pub fn new() -> Self {
        Self::with(Limits { window: WINDOW, capacity: CAPACITY })
    }

    /// How long the three deliveries may be apart that show a mistake. Default: 10 minutes.
    ///
    /// A window begins with the first delivery of a key or payload; when it is over, the next one
    /// begins another. Any length will do; with zero nothing is found. The audit begins anew, apart
    /// from its clones.
    #[must_use]
    pub fn window(self, window: Duration) -> Self {
        Self::with(Limits { window, ..self.0.limits })
    }

    /// How many keys are remembered, and as many payloads. Default: 4,096; at most 65,536.
    ///
    /// The default takes 1.2 MB at most. If more come within the window, the oldest are forgotten
    /// before it is over, and fewer mistakes are found; with zero none. The audit begins anew,
    /// apart from its clones.
    #[must_use]
    pub fn capacity(self, capacity: usize) -> Self {
        Self::with(Limits { capacity: capacity.min(MAX_CAPACITY), ..self.0.limits })
    }

    /// Takes note of one delivery, and gives the finding that is to be reported now.
    ///
    /// That is one when a mistake is first seen for its scope and source, and then once a minute at
    /// most while deliveries go on to show it. If a delivery shows both mistakes, the worse one is
    /// given: a shared key, which loses events. `payload` is the decoded body, `key` what `source`
    /// found.
    ///
    /// It locks for a few look-ups in hash tables; what takes longer is done before.
    pub fn observe(
        &self,
        source: &KeySource,
        key: &EventKey,
        payload: &[u8],
    ) -> Option<KeyFinding> {
        self.observe_at(Instant::now(), source, key, payload)
    }

    /// All that was found so far, the oldest first: one for each scope, source and mistake.
    ///
    /// The first 64 are kept; what is found beyond them is neither kept nor reported.
    pub fn findings(&self) -> Vec<KeyFinding> {
        self.memory().found.iter().map(|found| found.finding.clone()).collect()
    }

    fn with(limits: Limits) -> Self {
        let (hasher, memory) = (RandomState::new(), Mutex::default());
        Self(Arc::new(Shared { limits, hasher, memory }))
    }

    fn observe_at(
        &self,
        now: Instant,
        source: &KeySource,
        key: &EventKey,
        payload: &[u8],
    ) -> Option<KeyFinding> {
        let limits = self.0.limits;
        if payload.len() > MAX_PAYLOAD_BYTES || limits.capacity == 0 {
            return None;
        }
        let rest = without_key(payload, source, key.as_str());
        let tells_apart = tells_events_apart(&rest, matches!(rest, Cow::Owned(_)));
        let (source, scope) = (source.to_string(), key.scope());
        let key = self.0.hasher.hash_one((&source, scope, key.as_str()));
        let payload = self.0.hasher.hash_one((&source, scope, &rest));

        let memory = &mut *self.memory();
        let mut report = None;
        if memory.keys.add(key, payload, now, limits) {
            report = memory.count(KeyMistake::KeyShared, &source, scope, now, true);
        }
        if tells_apart && memory.payloads.add(payload, key, now, limits) {
            let may_report = report.is_none();
            let changes = memory.count(KeyMistake::KeyChanges, &source, scope, now, may_report);
            report = report.or(changes);
        }
        report
    }

    /// No code panics while it holds the lock, so a poisoned memory is a right one.
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for KeyAudit {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for KeyAudit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyAudit")
            .field("window", &self.0.limits.window)
            .field("capacity", &self.0.limits.capacity)
            .finish_non_exhaustive()
    }
}

/// A mistake that deliveries showed for one source in one scope.
///
/// `Display` names both and says what to do. Neither a key nor a payload is in it, so it may go to
/// logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFinding {
    mistake: KeyMistake,
    source: String,
    scope: Scope,
    times: u64,
}

impl KeyFinding {
    /// The source, in its text form.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The scope as text.
    pub fn scope(&self) -> &str {
        self.scope.as_str()
    }

    /// Which mistake it is.
    pub fn mistake(&self) -> KeyMistake {
        self.mistake
    }

    /// The deliveries that showed it so far: of each payload that with the third key and those with
    /// one more, or of each key that with the third payload and those with one more.
    pub fn times(&self) -> u64 {
        self.times
    }

    /// What it does to events, what to do, and what else it may be.
    pub fn hint(&self) -> &'static str {
        match self.mistake {
            KeyMistake::KeyChanges => {
                "each retry then runs the event again: take an id that the sender keeps over \
                 retries, such as `json:$.id`; all is well if these are events with equal payloads"
            }
            KeyMistake::KeyShared => {
                "all but the first event are then taken for duplicates and lost: take the id of \
                 the event, not of the object it is about; all is well if the sender only writes \
                 the attempt or the time into each payload"
            }
        }
    }
}

impl fmt::Display for KeyFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shows = match self.mistake {
            KeyMistake::KeyChanges => {
                "seems to change from one delivery of an event to the next: one payload came with \
                 three keys or more"
            }
            KeyMistake::KeyShared => {
                "seems to be shared by many events: one key came with three payloads or more"
            }
        };
        let Self { source, scope, times, .. } = self;
        write!(
            f,
            "`{source}` in scope `{scope}` {shows} (deliveries that showed it: {times}); {}",
            self.hint()
        )
    }
}

/// A mistake with keys that no error shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyMistake {
    /// The key changes from one delivery of an event to the next: nothing is ever a duplicate.
    KeyChanges,
    /// Many events have one key: all but the first are taken for duplicates.
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
}

impl fmt::Display for KeyMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Default)]
struct Memory {
    /// Of each key the payloads that came with it.
    keys: Recent,
    /// Of each payload the keys that came with it.
    payloads: Recent,
    found: Vec<Found>,
}

impl Memory {
    /// Counts a delivery that showed a mistake; gives the finding if it is time to report it.
    fn count(
        &mut self,
        mistake: KeyMistake,
        source: &str,
        scope: &Scope,
        now: Instant,
        may_report: bool,
    ) -> Option<KeyFinding> {
        let is_it = |KeyFinding { mistake: m, source: s, scope: c, .. }: &KeyFinding| {
            *m == mistake && s == source && c == scope
        };
        let at = match self.found.iter().position(|found| is_it(&found.finding)) {
            Some(at) => at,
            None if self.found.len() >= MAX_FINDINGS => return None,
            None => {
                let (source, scope) = (source.to_owned(), scope.clone());
                let finding = KeyFinding { mistake, source, scope, times: 0 };
                self.found.push(Found { finding, reported: None });
                self.found.len() - 1
            }
        };
        let found = self.found.get_mut(at)?;
        found.finding.times = found.finding.times.saturating_add(1);
        let is_due = |last| now.saturating_duration_since(last) >= REPORT_EVERY;
        if !may_report || !found.reported.is_none_or(is_due) {
            return None;
        }
        found.reported = Some(now);
        Some(found.finding.clone())
    }
}

struct Found {
    finding: KeyFinding,
    reported: Option<Instant>,
}

/// The keys or payloads of late, each with what came with it. A queue and not a cache: a cache that
/// keeps what is used often has little room left for what is new.
#[derive(Default)]
struct Recent {
    partners: HashMap<u64, Partners>,
    /// The oldest is in front.
    order: VecDeque<(Instant, u64)>,
}

impl Recent {
    /// Notes that two came together, and says whether that shows a mistake.
    fn add(&mut self, one: u64, partner: u64, now: Instant, limits: Limits) -> bool {
        let is_over = |since| now.saturating_duration_since(since) >= limits.window;
        while self.order.front().is_some_and(|(since, _)| is_over(*since)) {
            self.drop_oldest();
        }
        if !self.partners.contains_key(&one) {
            if self.order.len() >= limits.capacity {
                self.drop_oldest();
            }
            self.order.push_back((now, one));
        }
        self.partners.entry(one).or_default().add(partner)
    }

    fn drop_oldest(&mut self) {
        if let Some((_, oldest)) = self.order.pop_front() {
            self.partners.remove(&oldest);
        }
    }
}

/// The first three payloads of a key, or keys of a payload.
#[derive(Default)]
struct Partners([Option<u64>; 3]);

impl Partners {
    /// Whether this is the third one, or one more that is none of the first three.
    fn add(&mut self, partner: u64) -> bool {
        if self.0.contains(&Some(partner)) {
            return false;
        }
        if let Some(free) = self.0.iter_mut().find(|place| place.is_none()) {
            *free = Some(partner);
        }
        self.0.iter().all(Option::is_some)
    }
}

/// What is left of a payload when its key is cut out; borrowed if it is not in there.
fn without_key<'a>(payload: &'a [u8], source: &KeySource, key: &str) -> Cow<'a, [u8]> {
    let Ok(text) = std::str::from_utf8(payload) else { return Cow::Borrowed(payload) };
    // A part with a `+` of its own is not found, and stays.
    let parts = if matches!(&*source.0, Node::All(_)) { usize::MAX } else { 1 };
    let mut rest = Cow::Borrowed(text);
    for part in key.splitn(parts, '+').filter(|part| part.len() >= MIN_CUT_BYTES) {
        if rest.contains(part) {
            rest = Cow::Owned(rest.replace(part, ""));
        }
    }
    match rest {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// Whether equal payloads are most likely one event. Notices that hold little but the event's id
/// (`{"event":"paid","id":"…"}`) are all equal without it.
fn tells_events_apart(rest: &[u8], is_cut: bool) -> bool {
    let digits = || rest.iter().filter(|byte| byte.is_ascii_digit()).count();
    if is_cut { digits() >= MIN_DIGITS } else { !rest.is_empty() }
}

const WINDOW: Duration = Duration::from_secs(10 * 60);
const CAPACITY: usize = 4096;
const MAX_CAPACITY: usize = 65_536;
const REPORT_EVERY: Duration = Duration::from_secs(60);
const MAX_FINDINGS: usize = 64;
/// Bounds how long a look at a payload takes, since other requests wait for it.
const MAX_PAYLOAD_BYTES: usize = 256 * 1024;
/// A shorter key is found in most payloads by chance.
const MIN_CUT_BYTES: usize = 4;
/// A time of Unix in seconds has ten, a date with a time of day more, a date alone fewer.
const MIN_DIGITS: usize = 10;

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use std::thread;

    use super::{KeyMistake::*, *};

    const SECOND: Duration = Duration::from_secs(1);

    impl Recent {
        fn size(&self) -> (usize, usize) {
            (self.partners.len(), self.order.len())
        }
    }

    fn source(text: &str) -> KeySource {
        text.parse().unwrap()
    }

    fn in_scope(scope: &str, key: &str) -> EventKey {
        EventKey::new(Scope::new(scope).unwrap(), key).unwrap()
    }

    fn key(key: &str) -> EventKey {
        in_scope("s", key)
    }

    /// What is reported for deliveries of these keys and payloads, all at once.
    fn reports(source_text: &str, deliveries: &[(&str, &str)]) -> Vec<Option<KeyMistake>> {
        let (audit, source, now) = (KeyAudit::new(), source(source_text), Instant::now());
        let report = |(name, payload): &(&str, &str)| {
            audit.observe_at(now, &source, &key(name), payload.as_bytes())
        };
        deliveries.iter().map(report).map(|found| found.map(|found| found.mistake())).collect()
    }

    #[test]
    fn a_header_that_changes_with_each_retry_is_found_at_the_third() {
        let found = reports("header:a", &[("k1", "{}"), ("k2", "{}"), ("k1", "{}"), ("k3", "{}")]);
        assert_eq!(found, [None, None, None, Some(KeyChanges)]);
    }

    #[test]
    fn a_key_in_the_body_that_changes_with_each_retry_is_found_at_the_third() {
        let payload = |id| {
            format!(r#"{{"id":"{id}","at":1714550400,"self":"/events/{id}","order":{{"id":9}}}}"#)
        };
        let [a, b, c] = ["evt_1", "evt_22", "evt_333"].map(|id| (id, payload(id)));
        let found = reports("json:$.id", &[(a.0, &a.1), (b.0, &b.1), (c.0, &c.1)]);
        assert_eq!(found, [None, None, Some(KeyChanges)]);
    }

    #[test]
    fn the_parts_of_a_composite_are_cut_out_too() {
        let payload = |id| format!(r#"{{"source":"//shop","id":"{id}","at":1714550400}}"#);
        let [a, b, c] = ["1111", "2222", "3333"].map(|id| (format!("//shop+{id}"), payload(id)));
        let found =
            reports("json:$.source + json:$.id", &[(&a.0, &a.1), (&b.0, &b.1), (&c.0, &c.1)]);
        assert_eq!(found, [None, None, Some(KeyChanges)]);
        // Without parts it is one key, which does not stand there.
        let found = reports("header:a", &[(&a.0, &a.1), (&b.0, &b.1), (&c.0, &c.1)]);
        assert_eq!(found, [None; 3]);
    }

    #[test]
    fn the_id_of_an_object_as_the_key_is_found_at_the_third_payload() {
        let found = reports(
            "json:$.order",
            &[
                ("order_1", r#"{"order":"order_1","is":"new"}"#),
                ("order_1", r#"{"order":"order_1","is":"paid"}"#),
                ("order_1", r#"{"order":"order_1","is":"paid"}"#),
                ("order_1", r#"{"order":"order_1","is":"sent"}"#),
            ],
        );
        assert_eq!(found, [None, None, None, Some(KeyShared)]);
        // An empty payload is one, too.
        assert_eq!(
            reports("header:a", &[("k", ""), ("k", "a"), ("k", "b")]),
            [None, None, Some(KeyShared)]
        );
    }

    #[test]
    fn what_is_no_mistake_is_not_found() {
        for deliveries in [
            // Retries of one event.
            &[("evt_1", "{}"); 9][..],
            // Two of each are too few.
            &[("k1", "a"), ("k2", "a"), ("k1", "b"), ("k2", "b"), ("k1", "a"), ("k2", "a")],
            &[("k1", "a"), ("k2", "b"), ("k3", "c"), ("k4", "d")],
            // Events without a payload.
            &[("k1", ""), ("k2", ""), ("k3", ""), ("k4", "")],
            // Notices that hold little but the id.
            &[
                ("evt_1", r#"{"event":"paid","id":"evt_1"}"#),
                ("evt_2", r#"{"event":"paid","id":"evt_2"}"#),
                ("evt_3", r#"{"event":"paid","id":"evt_3"}"#),
            ],
            &[("evt_1", "evt_1"), ("evt_2", "evt_2"), ("evt_3", "evt_3")],
        ] {
            let found = reports("header:a", deliveries);
            assert!(found.iter().all(Option::is_none), "{deliveries:?}: {found:?}");
        }
    }

    #[test]
    fn payloads_that_are_no_text_are_compared_as_they_are() {
        let audit = KeyAudit::new();
        let observe =
            |name: &str, payload: &[u8]| audit.observe(&source("header:a"), &key(name), payload);
        assert_eq!(observe("k1", b"\xff\0"), None);
        assert_eq!(observe("k2", b"\xff\0"), None);
        assert_eq!(observe("k3", b"\xff\0").unwrap().mistake(), KeyChanges);
    }

    #[test]
    fn very_long_payloads_are_not_looked_at() {
        let mut payload = vec![b'a'; MAX_PAYLOAD_BYTES + 1];
        let audit = KeyAudit::new();
        let third = |payload: &[u8]| {
            let observe = |name| audit.observe(&source("header:a"), &key(name), payload);
            ["k1", "k2", "k3"].map(observe).into_iter().next_back().flatten()
        };
        assert_eq!(third(&payload), None);
        payload.pop();
        assert!(third(&payload).is_some());
    }

    #[test]
    fn the_window_forgets() {
        let audit = KeyAudit::new().window(10 * SECOND);
        let (source, start) = (source("header:a"), Instant::now());
        let at = |seconds: u32, name: &str| {
            audit.observe_at(start + seconds * SECOND, &source, &key(name), b"{}")
        };
        assert_eq!(at(0, "k1"), None);
        assert_eq!(at(9, "k2"), None);
        // A window begins with its first delivery.
        assert_eq!(at(10, "k3"), None);
        assert_eq!(at(11, "k4"), None);
        assert!(at(19, "k5").is_some());
        let none = KeyAudit::new().window(Duration::ZERO);
        for name in ["k1", "k2", "k3", "k4"] {
            assert_eq!(none.observe_at(start, &source, &key(name), b"{}"), None);
        }
    }

    #[test]
    fn scopes_and_sources_are_apart() {
        let (audit, now) = (KeyAudit::new(), Instant::now());
        let observe = |scope, from, name: &str| {
            audit.observe_at(now, &source(from), &in_scope(scope, name), b"{}")
        };
        for (name, scope) in [("k1", "a"), ("k2", "a"), ("k3", "b"), ("k4", "b")] {
            assert_eq!(observe(scope, "header:a", name), None);
            assert_eq!(observe(scope, "header:b", &format!("{name}b")), None);
        }
        for (scope, from) in [("a", "header:b"), ("b", "header:a")] {
            let found = observe(scope, from, "k9").unwrap();
            assert_eq!((found.scope(), found.source(), found.times()), (scope, from, 1));
        }
        assert_eq!(audit.findings().len(), 2);
    }

    #[test]
    fn a_finding_is_reported_once_a_minute_and_counted_each_time() {
        let audit = KeyAudit::new();
        let (source, start) = (source("header:a"), Instant::now());
        let mut reported = Vec::new();
        for n in 0..180_u32 {
            let now = start + n * SECOND;
            let found = audit.observe_at(now, &source, &key(&n.to_string()), b"{}");
            reported.extend(found.map(|found| (n, found.times())));
            // Retries of a key that was seen show nothing new.
            assert_eq!(audit.observe_at(now, &source, &key("0"), b"{}"), None);
        }
        assert_eq!(reported, [(2, 1), (62, 61), (122, 121)]);
        let found = audit.findings();
        assert_eq!(found.iter().map(KeyFinding::times).collect::<Vec<_>>(), [178]);
    }

    #[test]
    fn a_delivery_that_shows_both_reports_the_shared_key_first() {
        let (audit, source, now) = (KeyAudit::new(), source("header:a"), Instant::now());
        let observe = |name: &str, payload: &str| {
            audit.observe_at(now, &source, &key(name), payload.as_bytes())
        };
        for (name, payload) in [("k1", "x"), ("k2", "x"), ("k3", "y"), ("k3", "z")] {
            assert_eq!(observe(name, payload), None);
        }
        assert_eq!(observe("k3", "x").unwrap().mistake(), KeyShared);
        let counted = |found: &KeyFinding| (found.mistake(), found.times());
        let found = audit.findings();
        assert_eq!(
            found.iter().map(counted).collect::<Vec<_>>(),
            [(KeyShared, 1), (KeyChanges, 1)]
        );
        // The other is still to be reported.
        assert_eq!(observe("k4", "x").unwrap().mistake(), KeyChanges);
    }

    #[test]
    fn the_memory_is_bounded() {
        let (audit, now) = (KeyAudit::new().capacity(1000), Instant::now());
        let source = source("header:a");
        for n in 0..100_000 {
            let name = n.to_string();
            assert_eq!(audit.observe_at(now, &source, &key(&name), name.as_bytes()), None);
        }
        let memory = audit.memory();
        for kept in [memory.keys.size(), memory.payloads.size()] {
            assert_eq!(kept, (1000, 1000));
        }
        drop(memory);
        // What comes anew is noted nevertheless, and lasts while as many others come.
        let others = (0..990).map(|n| (format!("other{n}"), n.to_string()));
        let retries = ["k1", "k2"].map(|name| (name.to_owned(), "{}".to_owned()));
        for (name, payload) in retries.into_iter().chain(others) {
            assert_eq!(audit.observe_at(now, &source, &key(&name), payload.as_bytes()), None);
        }
        assert!(audit.observe_at(now, &source, &key("k3"), b"{}").is_some());
        // When the window is over, nothing is left.
        audit.observe_at(now + WINDOW, &source, &key("k4"), b"{}");
        let memory = audit.memory();
        assert_eq!((memory.keys.size(), memory.payloads.size()), ((1, 1), (1, 1)));
    }

    #[test]
    fn the_findings_are_bounded() {
        let (audit, now) = (KeyAudit::new(), Instant::now());
        let source = source("header:a");
        let mut reports = 0;
        for scope in 0..100 {
            for name in ["k1", "k2", "k3"] {
                let key = in_scope(&scope.to_string(), name);
                reports += u32::from(audit.observe_at(now, &source, &key, b"{}").is_some());
            }
        }
        assert_eq!((audit.findings().len(), reports), (64, 64));
    }

    #[test]
    fn without_capacity_nothing_is_found() {
        let audit = KeyAudit::new().capacity(0);
        for name in ["k1", "k2", "k3", "k4"] {
            assert_eq!(audit.observe(&source("header:a"), &key(name), b"{}"), None);
        }
    }

    #[test]
    fn clones_share_one_memory_also_between_threads() {
        let audit = KeyAudit::default();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let audit = audit.clone();
                thread::spawn(move || {
                    let name = |n| key(&format!("{thread}.{n}"));
                    (0..250)
                        .filter(|n| audit.observe(&source("header:a"), &name(*n), b"{}").is_some())
                        .count()
                })
            })
            .collect();
        let reports: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(reports, 1);
        assert_eq!(audit.findings().first().unwrap().times(), 998);
    }

    #[test]
    fn a_finding_says_what_to_do_and_not_what_was_sent() {
        let audit = KeyAudit::new();
        for n in 0..3 {
            let (key, source) = (in_scope("shop", &format!("hunter{n}")), source("header:x-id"));
            audit.observe(&source, &key, b"hunter");
            audit.observe(&source, &in_scope("shop", "hunter"), format!("hunter {n}").as_bytes());
        }
        let found = audit.findings();
        let texts: Vec<_> = found.iter().map(KeyFinding::to_string).collect();
        assert_eq!(
            texts,
            [
                "`header:x-id` in scope `shop` seems to change from one delivery of an event to \
                 the next: one payload came with three keys or more (deliveries that \
                 showed it: 1); each retry then runs the event again: take an id that the sender keeps over retries, such as \
                 `json:$.id`; all is well if these are events with equal payloads",
                "`header:x-id` in scope `shop` seems to be shared by many events: one key came \
                 with three payloads or more (deliveries that showed it: 1); all but the \
                 first event are then taken for duplicates and lost: take the id of the event, not of the object it is \
                 about; all is well if the sender only writes the attempt or the time into each \
                 payload",
            ]
        );
        assert!(!format!("{audit:?} {found:?}").contains("hunter"));
        assert_eq!(KeyChanges.to_string(), "key-changes");
        assert_eq!(KeyShared.to_string(), "key-shared");
    }
}
