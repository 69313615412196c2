//! The words of the protocol: what a claim is, who holds it, and what may happen to it next.
//!
//! Nothing here does I/O. The one table of transitions, [`on_claim`] and its sisters, is what
//! [`MemoryStore`](crate::MemoryStore) runs and what [`PgStore`](crate::PgStore) repeats in SQL.
//!
//! ```text
//!            claim                complete
//!   (none) ───────▶ in_progress ───────────▶ done
//!                    ▲   │  ▲
//!       claim        │   │  │ claim, when the lease is over
//!                    │   ▼  │ (new token, attempt + 1)
//!                   failed ─┘
//! ```
//!
//! A claim may say what its payload is. A key that is done, or claimed and not known to have failed,
//! then belongs to that payload: who claims it with another one is told so.

use std::{cell::RefCell, fmt, sync::Arc, time::Duration};

use bytes::Bytes;

/// The longest event key, in bytes of UTF-8.
///
/// Postgres refuses a btree row of more than about 2,700 bytes, sooner or later depending on how
/// well the value compresses. The limit is checked before the store is asked, so it never is.
pub const MAX_KEY_BYTES: usize = 512;

/// The longest scope, in bytes of UTF-8.
pub const MAX_SCOPE_BYTES: usize = 255;

/// Separates routes, providers or tenants: the same key in two scopes is two events.
///
/// 1 to [`MAX_SCOPE_BYTES`] bytes of UTF-8 without control characters; case matters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(Arc<str>);

impl Scope {
    /// Checks and takes a scope.
    ///
    /// # Errors
    ///
    /// [`TextError`] if it is empty, longer than [`MAX_SCOPE_BYTES`] bytes or has a control
    /// character.
    pub fn new(scope: impl AsRef<str>) -> Result<Self, TextError> {
        let scope = scope.as_ref();
        check_text(scope, MAX_SCOPE_BYTES)?;
        Ok(Self(Arc::from(scope)))
    }

    /// The scope as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<&str> for Scope {
    type Error = TextError;

    fn try_from(scope: &str) -> Result<Self, TextError> {
        Self::new(scope)
    }
}

impl TryFrom<String> for Scope {
    type Error = TextError;

    fn try_from(scope: String) -> Result<Self, TextError> {
        Self::new(scope)
    }
}

/// The identity of one event: a key, always with its [`Scope`].
///
/// The key is 1 to [`MAX_KEY_BYTES`] bytes of UTF-8 without control characters; case matters.
/// No key is ever cut or hashed to fit.
///
/// `Debug` shows the key shortened, since logs are not the place for what senders sent;
/// [`as_str`](Self::as_str) is the whole key.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventKey {
    scope: Scope,
    key: Arc<str>,
}

impl EventKey {
    /// Checks and takes a key.
    ///
    /// # Errors
    ///
    /// [`TextError`] if the key is empty, longer than [`MAX_KEY_BYTES`] bytes or has a control
    /// character.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_dedupe::{EventKey, Scope};
    ///
    /// let key = EventKey::new(Scope::new("stripe")?, "evt_1P8aZ2")?;
    /// assert_eq!(key.as_str(), "evt_1P8aZ2");
    /// assert!(EventKey::new(Scope::new("stripe")?, "line\nbreak").is_err());
    /// # Ok::<(), tower_dedupe::TextError>(())
    /// ```
    pub fn new(scope: Scope, key: impl AsRef<str>) -> Result<Self, TextError> {
        let key = key.as_ref();
        check_text(key, MAX_KEY_BYTES)?;
        Ok(Self { scope, key: Arc::from(key) })
    }

    /// The key as text, without its scope.
    pub fn as_str(&self) -> &str {
        &self.key
    }

    /// The scope of the key.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }
}

impl fmt::Debug for EventKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope = Shortened { text: self.scope.as_str(), to: SHOWN_OF_SCOPE };
        write!(f, "{scope}/{}", Shortened { text: &self.key, to: SHOWN_OF_KEY })
    }
}

/// Why a text cannot be an event key or a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TextError {
    /// The text is empty.
    Empty,
    /// The text is longer than the limit, in bytes.
    TooLong {
        /// How long it is.
        bytes: usize,
        /// How long it may be.
        limit: usize,
    },
    /// The text has a control character, such as NUL or a line break.
    ControlCharacter {
        /// The byte at which it stands.
        at: usize,
    },
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("is empty"),
            Self::TooLong { bytes, limit } => {
                write!(f, "is {bytes} bytes long, the limit is {limit}")
            }
            Self::ControlCharacter { at } => write!(f, "has a control character at byte {at}"),
        }
    }
}

impl std::error::Error for TextError {}

/// Names one holder of a claim: 128 random bits, made by the client before the claim is sent.
///
/// Since the client makes it, a claim whose reply was lost can be asked again and gets the same
/// answer. Since it is random, it never repeats for a key, not even after a release or a purge, so
/// a holder that was superseded can change nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClaimToken([u8; 16]);

impl ClaimToken {
    /// A new token from the operating system's random generator.
    ///
    /// # Panics
    ///
    /// If the operating system has no randomness to give, which on the platforms that run tokio
    /// happens only before the kernel has booted.
    pub fn random() -> Self {
        thread_local! {
            static DRAWN: RefCell<Drawn> = const { RefCell::new(Drawn::NOTHING) };
        }
        DRAWN.with_borrow_mut(|drawn| Self(drawn.next()))
    }

    /// The token's bytes, as a store keeps them.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// Tokens drawn in advance: to ask the operating system for each costs as much as claiming in memory.
struct Drawn {
    tokens: Vec<[u8; 16]>,
    /// A forked process has the same ones, and must not use them.
    process: u32,
}

impl Drawn {
    const NOTHING: Self = Self { tokens: Vec::new(), process: 0 };

    #[expect(clippy::expect_used, reason = "a token that might repeat would break the promise")]
    fn next(&mut self) -> [u8; 16] {
        let process = std::process::id();
        if self.process != process {
            self.tokens.clear();
            self.process = process;
        }
        self.tokens.pop().unwrap_or_else(|| {
            let mut tokens = [[0; 16]; 32];
            getrandom::fill(tokens.as_flattened_mut())
                .expect("the operating system gave no random bytes");
            let [token, later @ ..] = tokens;
            self.tokens.extend(later);
            token
        })
    }
}

impl From<[u8; 16]> for ClaimToken {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for ClaimToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_some(&self.0, f)
    }
}

/// What an event's payload is, as a SHA-256 hash: two events are told apart by it that share a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PayloadHash([u8; 32]);

impl PayloadHash {
    /// The hash's bytes, as a store keeps them.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<[u8; 32]> for PayloadHash {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for PayloadHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_some(&self.0, f)
    }
}

/// Enough of random bytes to tell two of them apart in a log.
fn show_some(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for byte in bytes.iter().take(4) {
        write!(f, "{byte:02x}")?;
    }
    f.write_str("…")
}

/// A wish to hold a key, as a store receives it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Claim {
    /// The event.
    pub key: EventKey,
    /// Who asks.
    pub token: ClaimToken,
    /// How long the claim holds without renewal. More than zero.
    pub lease: Duration,
    /// How long the row of a failed or abandoned claim is kept after its lease.
    pub retention: Duration,
    /// What the event's payload is, if it is to be compared; kept with the key.
    pub fingerprint: Option<PayloadHash>,
    /// Whether a done key's answer is to bring the response that is stored with it. If not, a store
    /// need not read it.
    pub replay: bool,
}

impl Claim {
    /// A claim with a new random token, which compares no payload and asks for no response.
    pub fn new(key: EventKey, lease: Duration, retention: Duration) -> Self {
        let token = ClaimToken::random();
        Self { key, token, lease, retention, fingerprint: None, replay: false }
    }

    /// The same claim of this payload.
    #[must_use]
    pub fn with_fingerprint(mut self, fingerprint: Option<PayloadHash>) -> Self {
        self.fingerprint = fingerprint;
        self
    }

    /// The same claim, which asks for the stored response or does not.
    #[must_use]
    pub fn with_replay(mut self, replay: bool) -> Self {
        self.replay = replay;
        self
    }

    /// Whether a row that has this fingerprint is another payload's. Where one of the two is not
    /// known, they are not told apart.
    pub fn is_other_payload(&self, stored: Option<PayloadHash>) -> bool {
        matches!((self.fingerprint, stored), (Some(mine), Some(stored)) if mine != stored)
    }
}

/// What a handler is told about the delivery it handles: the event's key and which attempt this is.
///
/// The layer puts it into the request's extensions. With feature `axum` it is an extractor.
/// Pass the key on as the idempotency key of whatever the handler calls; an `attempt` above 1 says
/// that an earlier attempt failed or died, perhaps after part of the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimInfo {
    key: EventKey,
    attempt: u32,
}

impl ClaimInfo {
    /// The information as the layer hands it on; public so that handlers can be tested alone.
    pub fn new(key: EventKey, attempt: u32) -> Self {
        Self { key, attempt }
    }

    /// The event key as text.
    pub fn key(&self) -> &str {
        self.key.as_str()
    }

    /// The scope as text.
    pub fn scope(&self) -> &str {
        self.key.scope().as_str()
    }

    /// Key and scope together.
    pub fn event_key(&self) -> &EventKey {
        &self.key
    }

    /// 1 for the first claim of the key, one more for each later one.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }
}

/// What a store says to a [`Claim`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The caller holds the key now, with the token it sent.
    Claimed {
        /// 1 for the first claim of a key, one more for each later one.
        attempt: u32,
    },
    /// Somebody else holds it, and the lease is alive.
    InProgress {
        /// What is left of the lease.
        lease_left: Duration,
    },
    /// The event was handled.
    Done {
        /// The status that the first success was answered with; `None` if it had none.
        status: Option<u16>,
        /// The response that was stored with the done mark, if the claim asks for it.
        response: Option<Bytes>,
    },
    /// The key belongs to another payload: it is done with that, or was claimed with it and is not
    /// known to have failed.
    OtherPayload,
}

impl ClaimOutcome {
    /// Done, and no response is stored or asked for.
    pub const fn done(status: Option<u16>) -> Self {
        Self::Done { status, response: None }
    }
}

/// What a store says to a holder that completes or renews its claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// The token still held the key: the change was made.
    Yes,
    /// The token holds the key no longer: nothing was changed.
    Lost,
}

/// The state of a key's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Claimed: a holder is at work, or died at it.
    InProgress,
    /// Handled. Final until its retention ends.
    Done,
    /// The last attempt failed; the key is free.
    Failed,
}

impl State {
    /// The state as the `status` column has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

impl std::str::FromStr for State {
    type Err = UnknownState;

    fn from_str(text: &str) -> Result<Self, UnknownState> {
        match text {
            "in_progress" => Ok(Self::InProgress),
            "done" => Ok(Self::Done),
            "failed" => Ok(Self::Failed),
            _ => Err(UnknownState),
        }
    }
}

/// The error of a `status` that this version does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownState;

impl fmt::Display for UnknownState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("is none of in_progress, done, failed")
    }
}

impl std::error::Error for UnknownState {}

/// A key's row as a store sees it at one instant of its own clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The state.
    pub state: State,
    /// Whether the row's token is the caller's.
    pub mine: bool,
    /// Whether the row's payload is known not to be the caller's.
    pub other_payload: bool,
    /// The claims of this key so far.
    pub attempt: u32,
    /// What is left of the lease; zero if it is over.
    pub lease_left: Duration,
    /// Whether the row's retention is over, so that it counts as absent.
    pub expired: bool,
    /// The status of the first success.
    pub response_status: Option<u16>,
    /// The response that is stored, if it was read.
    pub response: Option<Bytes>,
}

/// What a claim does to the row it found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnClaim {
    /// Nothing is written; this is the answer.
    Answer(ClaimOutcome),
    /// The row becomes the caller's, in progress, as this attempt.
    Take {
        /// The attempt to write.
        attempt: u32,
    },
}

/// The claim's line of the protocol: what a claim does to the row that the store found.
pub fn on_claim(row: Option<&Row>) -> OnClaim {
    let Some(row) = row else { return OnClaim::Take { attempt: 1 } };
    if row.expired {
        return OnClaim::Take { attempt: 1 };
    }
    let next = OnClaim::Take { attempt: row.attempt.saturating_add(1) };
    match row.state {
        // Whatever failed is over: what is corrected after it may be another payload.
        State::Failed => next,
        _ if row.other_payload => OnClaim::Answer(ClaimOutcome::OtherPayload),
        State::Done => OnClaim::Answer(ClaimOutcome::Done {
            status: row.response_status,
            response: row.response.clone(),
        }),
        State::InProgress if row.mine => {
            OnClaim::Answer(ClaimOutcome::Claimed { attempt: row.attempt })
        }
        State::InProgress if row.lease_left.is_zero() => next,
        State::InProgress => {
            OnClaim::Answer(ClaimOutcome::InProgress { lease_left: row.lease_left })
        }
    }
}

/// Whether a completion finds its claim: in progress and mine (even if the lease is over), or done
/// by me already.
pub fn may_complete(row: &Row) -> bool {
    row.mine && matches!(row.state, State::InProgress | State::Done)
}

/// Whether a failure or a renewal finds its claim: in progress and mine.
pub fn may_change(row: &Row) -> bool {
    row.mine && row.state == State::InProgress
}

/// Shows the first characters of a text and how much more there is.
struct Shortened<'a> {
    text: &'a str,
    to: usize,
}

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chars = self.text.char_indices();
        match chars.nth(self.to).map(|(at, _)| self.text.split_at(at)) {
            Some((shown, rest)) => write!(f, "{}…(+{} bytes)", shown.escape_debug(), rest.len()),
            None => write!(f, "{}", self.text.escape_debug()),
        }
    }
}

pub(crate) fn check_text(text: &str, limit: usize) -> Result<(), TextError> {
    if text.is_empty() {
        return Err(TextError::Empty);
    }
    if text.len() > limit {
        return Err(TextError::TooLong { bytes: text.len(), limit });
    }
    match text.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, _)) => Err(TextError::ControlCharacter { at }),
        None => Ok(()),
    }
}

const SHOWN_OF_KEY: usize = 12;
const SHOWN_OF_SCOPE: usize = 32;

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, process, thread};

    use super::*;

    #[test]
    fn no_two_tokens_are_the_same() {
        let draw = || (0..1000).map(|_| ClaimToken::random()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| thread::spawn(draw)).collect();
        let tokens: HashSet<_> = threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .flatten()
            .map(|token| *token.as_bytes())
            .collect();
        assert_eq!(tokens.len(), 4000);
        assert!(!tokens.contains(&[0; 16]));
    }

    #[test]
    fn what_another_process_has_drawn_is_not_used() {
        let mut drawn = Drawn { tokens: vec![[1; 16]; 3], process: process::id() };
        assert_eq!(drawn.next(), [1; 16]);
        drawn.process += 1;
        assert_ne!(drawn.next(), [1; 16]);
        assert!(!drawn.tokens.contains(&[1; 16]));
    }
}
