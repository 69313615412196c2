//! Where an event's key is in a request: a [`KeySource`], as code or as text.
//!
//! Deduplication is only as good as the key. A key that changes between two deliveries of one
//! event lets the event run twice; a key that two events share swallows the second one. So a
//! source says exactly where the key is, [`KeySource::find`] never guesses, and
//! [`KeySource::volatile`] knows the sources that are known to change. A [`KeyAudit`] finds those
//! that only deliveries show to be wrong.
//!
//! | text | code | takes |
//! |---|---|---|
//! | `header:x-github-delivery` | [`KeySource::header`] | the header's value, trimmed |
//! | `json:$.data.id` | [`KeySource::json`] | one string or integer in the body |
//! | `query:event` | [`KeySource::query`] | a parameter of the request's query, decoded |
//! | `idempotency-key` | [`KeySource::idempotency_key`] | the string in that header, quoted or bare |
//! | `header:ce-source + header:ce-id` | [`KeySource::and`] | both, joined unambiguously |
//! | `header:webhook-id \| json:$.id` | [`KeySource::or`] | the first that is there |
//! | – | [`KeySource::from_fn`] | what a function makes of the request's head |
//! | – | [`KeySource::from_body_fn`] | what a function makes of head and body |
//!
//! ```
//! use tower_dedupe::KeySource;
//!
//! let source: KeySource = "header:webhook-id | json:$.id".parse()?;
//! let (parts, ()) = http::Request::post("/hook").body(())?.into_parts();
//! assert_eq!(source.find(&parts, br#"{"id": 9007199254740993}"#)?, "9007199254740993");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The text form
//!
//! `+` binds tighter than `|`, and parentheses group. Both operators are legal characters of a
//! header name, so they stand between white space (spaces, tabs, line breaks). Names of query
//! parameters are percent-encoded: `query:event%20id` (a plus stands for itself). `idempotency-key` is
//! one word, in small letters.
//!
//! # JSON paths
//!
//! The singular queries of [RFC 9535]: `$`, then names (`.id`, `['odd key']`) and indexes (`[0]`,
//! `[-1]` from the end). They find one value or none. Whatever may find many (`[*]`, `..`, slices,
//! filters) is refused, because one request needs one key.
//!
//! # What is found
//!
//! | the source finds | answer |
//! |---|---|
//! | no header, no parameter; an empty one; a body that is empty or no JSON; nothing at the path, `null` or `""`; half of a composite | [`NoKey::Missing`] |
//! | a boolean, a fraction (`1.0` and `1e3` too), an object, an array | [`NoKey::Invalid`] |
//! | a name twice in one object on the way of the path; a header or parameter twice with different values | [`NoKey::Invalid`] |
//! | a text that is no UTF-8 (or half a surrogate pair), has a control character, or is longer than [`MAX_KEY_BYTES`] | [`NoKey::Invalid`] |
//! | an `idempotency-key` that is neither a string of RFC 8941 nor bare | [`NoKey::Invalid`] |
//! | anything else | the key |
//!
//! [RFC 9535]: https://www.rfc-editor.org/rfc/rfc9535

mod audit;
mod fault;
mod head;
mod idempotency;
mod json;
mod path;
mod text;
mod volatile;

use std::{fmt, sync::Arc};

use http::{HeaderName, request::Parts};

use self::{fault::Problem, path::Path};
use crate::claim::{MAX_KEY_BYTES, check_text};

pub use self::{
    audit::{KeyAudit, KeyFinding, KeyMistake},
    fault::{Fault, KeySourceError, NoKey},
    volatile::Volatile,
};

/// Says where the key of an event is in its request.
///
/// A source is checked when it is made, so that a misspelt path is an error at start-up and not a
/// stream of requests without a key. Clones are cheap and share everything.
///
/// # Examples
///
/// ```
/// use tower_dedupe::KeySource;
///
/// let stripe = KeySource::json("$.id")?;
/// let cloud_events = KeySource::header("ce-source")?.and(KeySource::header("ce-id")?);
/// assert_eq!(cloud_events.to_string(), "header:ce-source + header:ce-id");
///
/// // From a flag or a configuration file:
/// let same: KeySource = "header:ce-source + header:ce-id".parse()?;
/// # Ok::<(), tower_dedupe::key::KeySourceError>(())
/// ```
#[derive(Clone)]
pub struct KeySource(Arc<Node>);

type HeadFn = dyn Fn(&Parts) -> Result<Option<String>, String> + Send + Sync;
type BodyFn = dyn Fn(&Parts, &[u8]) -> Result<Option<String>, String> + Send + Sync;

/// What a source is made of. `All` and `Any` have two members or more, none of their own kind.
enum Node {
    Header(HeaderName),
    Json(Path),
    Query(String),
    IdempotencyKey,
    Head(Box<HeadFn>),
    Body(Box<BodyFn>),
    All(Vec<KeySource>),
    Any(Vec<KeySource>),
}

impl KeySource {
    /// The key is the value of a header.
    ///
    /// Spaces and tabs around the value are cut. A header that comes twice with one value is fine;
    /// with two values the key is invalid, since nobody can say which one was meant. The body is
    /// not needed.
    ///
    /// # Errors
    ///
    /// [`KeySourceError::Header`] if no header can have that name.
    pub fn header(name: impl AsRef<str>) -> Result<Self, KeySourceError> {
        let name = name.as_ref();
        HeaderName::from_bytes(name.as_bytes())
            .map(|name| Self::of(Node::Header(name)))
            .map_err(|_| KeySourceError::Header { name: name.to_owned() })
    }

    /// The key is one value in a JSON body: a path such as `$.data.id` or `$['odd key'][0].id`.
    ///
    /// A string is taken as its decoded text, an integer as its digits exactly as they were sent:
    /// there is no rounding at any size, and `-0` stays `-0`. The string `"1"` and the number `1`
    /// are one key. The content type is not looked at, since many senders have it wrong; a byte
    /// order mark in front is skipped. The whole body must be one JSON document.
    ///
    /// Reading takes one pass over the body (the element that a negative index picks is read a
    /// second time) and builds nothing. Nesting costs no stack, whatever its depth.
    ///
    /// # Errors
    ///
    /// [`KeySourceError::Path`] if the path is none, may find more than one value, or has more
    /// than 32 steps.
    pub fn json(path: impl AsRef<str>) -> Result<Self, KeySourceError> {
        let path = path.as_ref();
        Path::parse(path).map(|path| Self::of(Node::Json(path))).map_err(|flaw| flaw.in_path(path))
    }

    /// The key is a parameter of the query in the request's URI.
    ///
    /// Names and values are decoded as forms are: `+` is a space, `%2B` a plus, and a percent sign
    /// that begins no escape stands for itself, as it does to the usual parsers. An escape that is
    /// no UTF-8 makes the key invalid; it is never replaced, which would make two keys one. The
    /// body is not needed.
    ///
    /// # Errors
    ///
    /// [`KeySourceError::EmptyQueryName`] if the name is empty.
    pub fn query(name: impl AsRef<str>) -> Result<Self, KeySourceError> {
        match name.as_ref() {
            "" => Err(KeySourceError::EmptyQueryName),
            name => Ok(Self::of(Node::Query(name.to_owned()))),
        }
    }

    /// The key is the string in the header `Idempotency-Key`, quoted or bare.
    ///
    /// The [draft] of the IETF has it as a string of RFC 8941: `"8e03978e"`, of printable ASCII
    /// characters, where `\"` and `\\` are the only escapes. Many clients send it bare: `8e03978e`,
    /// of visible ASCII characters without `"`, `,`, `;` and `\`. Both are one key. In contrast,
    /// `header:idempotency-key` would keep the quotes, and make two of them.
    ///
    /// Spaces and tabs around the value are cut; those inside the quotes are kept. Parameters after
    /// a quoted string (`;a=1`) are read over, and their names and values are checked only as far
    /// as it takes to see where they end. An empty string is a missing key. A header that comes
    /// twice with one key is fine; two keys, and lists, are invalid. The body is not needed.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_dedupe::KeySource;
    ///
    /// let source = KeySource::idempotency_key();
    /// for value in [r#""8e03978e""#, "8e03978e"] {
    ///     let request = http::Request::post("/").header("idempotency-key", value);
    ///     let (parts, ()) = request.body(())?.into_parts();
    ///     assert_eq!(source.find(&parts, b"")?, "8e03978e");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [draft]: https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header
    pub fn idempotency_key() -> Self {
        Self::of(Node::IdempotencyKey)
    }

    /// The key is what a function makes of the request's head. The body is not needed.
    ///
    /// `Ok(None)` and an empty text are a missing key; `Err` is an invalid one, and its text is
    /// shown to the sender and in logs, so it should not repeat what was sent. A panic goes on
    /// into the caller of [`find`](Self::find).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_dedupe::KeySource;
    ///
    /// // The last part of the path: POST /hooks/{event}
    /// let source = KeySource::from_fn(|head| {
    ///     Ok(head.uri.path().strip_prefix("/hooks/").map(str::to_owned))
    /// });
    /// assert!(!source.needs_body());
    /// ```
    pub fn from_fn(
        f: impl Fn(&Parts) -> Result<Option<String>, String> + Send + Sync + 'static,
    ) -> Self {
        Self::of(Node::Head(Box::new(f)))
    }

    /// The key is what a function makes of the request's head and its decoded body, which is
    /// therefore buffered.
    ///
    /// The function's answers mean what they mean in [`from_fn`](Self::from_fn).
    pub fn from_body_fn(
        f: impl Fn(&Parts, &[u8]) -> Result<Option<String>, String> + Send + Sync + 'static,
    ) -> Self {
        Self::of(Node::Body(Box::new(f)))
    }

    /// Both: the key is the two keys, joined by `+`.
    ///
    /// For ids that are unique only together, as `source` and `id` are in CloudEvents. A `+` or a
    /// `\` inside either key gets a `\` in front, so that two pairs never make one key. Half a
    /// composite is a missing key, and an invalid half makes the whole invalid.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_dedupe::KeySource;
    ///
    /// let source = KeySource::query("a")?.and(KeySource::query("b")?);
    /// let (parts, ()) = http::Request::post("/?a=1%2B2&b=3").body(())?.into_parts();
    /// assert_eq!(source.find(&parts, b"")?, r"1\+2+3");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let mut all = Vec::new();
        for source in [self, other] {
            match &*source.0 {
                Node::All(sources) => all.extend_from_slice(sources),
                _ => all.push(source),
            }
        }
        Self::of(Node::All(all))
    }

    /// Either: the key is this one, or the other where this one is missing.
    ///
    /// If this one is *invalid* the other is not asked. Falling through would let one event have
    /// two keys, one while the sender's header is intact and one while something on the way
    /// mangles it, and the event would run twice.
    ///
    /// The alternatives share one space of keys: an id found by one is the same event as the same
    /// id found by another.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let mut any = Vec::new();
        for source in [self, other] {
            match &*source.0 {
                Node::Any(sources) => any.extend_from_slice(sources),
                _ => any.push(source),
            }
        }
        Self::of(Node::Any(any))
    }

    /// Whether the key, or a part of it, may be in the body, so that the body must be read first.
    pub fn needs_body(&self) -> bool {
        match &*self.0 {
            Node::Header(_) | Node::Query(_) | Node::IdempotencyKey | Node::Head(_) => false,
            Node::Json(_) | Node::Body(_) => true,
            Node::All(sources) | Node::Any(sources) => sources.iter().any(Self::needs_body),
        }
    }

    /// The first source in it that is known to change from one delivery of an event to the next.
    ///
    /// Such a source makes every delivery a new event, so that nothing is ever a duplicate. Only
    /// what the sender's documentation or the header's meaning shows to change is known here;
    /// `None` is no proof that a source is stable.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_dedupe::KeySource;
    ///
    /// let volatile = KeySource::header("Stripe-Signature")?.volatile().expect("is on the list");
    /// assert_eq!(volatile.instead(), "`json:$.id`");
    /// assert!(KeySource::header("webhook-id")?.volatile().is_none());
    /// # Ok::<(), tower_dedupe::key::KeySourceError>(())
    /// ```
    pub fn volatile(&self) -> Option<Volatile> {
        match &*self.0 {
            Node::Header(name) => Volatile::of_header(self, name.as_str()),
            Node::Json(path) => Volatile::of_path(self, path),
            Node::Query(_) | Node::IdempotencyKey | Node::Head(_) | Node::Body(_) => None,
            Node::All(sources) | Node::Any(sources) => sources.iter().find_map(Self::volatile),
        }
    }

    /// Finds the key of one request.
    ///
    /// `body` is the whole body, decoded; it may be empty if [`needs_body`](Self::needs_body) says
    /// no. What is returned is a key that [`EventKey::new`](crate::EventKey::new) accepts.
    ///
    /// # Errors
    ///
    /// [`NoKey::Missing`] if the request has no key, [`NoKey::Invalid`] if it has something that
    /// cannot be one; the [table](crate::key#what-is-found) says which is which.
    ///
    /// # Panics
    ///
    /// Only if a function given to [`from_fn`](Self::from_fn) or
    /// [`from_body_fn`](Self::from_body_fn) does.
    pub fn find(&self, parts: &Parts, body: &[u8]) -> Result<String, NoKey> {
        let found = match &*self.0 {
            Node::Header(name) => head::header(name, &parts.headers),
            Node::Json(path) => json::find(path, body),
            Node::Query(name) => head::query(name, parts.uri.query()),
            Node::IdempotencyKey => idempotency::find(&parts.headers),
            Node::Head(f) => given(f(parts)),
            Node::Body(f) => given(f(parts, body)),
            Node::All(sources) => find_all(sources, parts, body)?,
            Node::Any(sources) => return find_any(sources, parts, body),
        };
        found.and_then(checked).map_err(|problem| NoKey::new(self, problem))
    }

    /// Finds the key if the head alone tells it, or tells that there is none; `None` if the body has
    /// a say.
    pub(crate) fn find_in_head(&self, parts: &Parts) -> Option<Result<String, NoKey>> {
        if let Node::Any(sources) = &*self.0 {
            for source in sources {
                match source.find_in_head(parts)? {
                    Err(NoKey::Missing(_)) => {}
                    found_or_invalid => return Some(found_or_invalid),
                }
            }
        }
        if self.needs_body() { None } else { Some(self.find(parts, &[])) }
    }

    fn of(node: Node) -> Self {
        Self(Arc::new(node))
    }
}

impl fmt::Debug for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeySource({self})")
    }
}

/// What a user's function gave.
fn given(found: Result<Option<String>, String>) -> Result<String, Problem> {
    match found {
        Ok(Some(key)) => Ok(key),
        Ok(None) => Err(Problem::NoneGiven),
        Err(message) => Err(Problem::Refused(message)),
    }
}

/// Whatever a source is, its key ends here.
fn checked(key: String) -> Result<String, Problem> {
    if key.is_empty() {
        return Err(Problem::Empty);
    }
    match check_text(&key, MAX_KEY_BYTES) {
        Ok(()) => Ok(key),
        Err(error) => Err(Problem::Text(error)),
    }
}

fn find_all(
    sources: &[KeySource],
    parts: &Parts,
    body: &[u8],
) -> Result<Result<String, Problem>, NoKey> {
    let mut joined = String::new();
    let mut missing = None;
    for (at, source) in sources.iter().enumerate() {
        match source.find(parts, body) {
            Ok(key) => {
                if at > 0 {
                    joined.push('+');
                }
                join(&mut joined, &key);
            }
            // All halves are asked: one that is invalid later outweighs one that is missing.
            Err(NoKey::Missing(fault)) => {
                missing.get_or_insert(NoKey::Missing(fault));
            }
            Err(invalid) => return Err(invalid),
        }
    }
    match missing {
        Some(missing) => Err(missing),
        None => Ok(Ok(joined)),
    }
}

/// Adds one part of a composite. Escaping makes the join injective: the first `+` without an odd
/// number of `\` before it is where a part ends.
fn join(joined: &mut String, key: &str) {
    for c in key.chars() {
        if matches!(c, '\\' | '+') {
            joined.push('\\');
        }
        joined.push(c);
    }
}

fn find_any(sources: &[KeySource], parts: &Parts, body: &[u8]) -> Result<String, NoKey> {
    let mut missing = Fault::none();
    for source in sources {
        match source.find(parts, body) {
            Err(NoKey::Missing(fault)) => missing.extend(fault),
            found_or_invalid => return found_or_invalid,
        }
    }
    Err(NoKey::Missing(missing))
}

#[cfg(test)]
mod tests;
