//! The layer: what it is configured with, and how it looks at a request.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderName, Method, Response, StatusCode, request, response};
use tower_layer::Layer;

use super::{
    answer::{Documentation, Refusal},
    body::DedupeBody,
    classify::Success,
    count, decode,
    fingerprint::Fingerprint,
    policy::{Duplicate, InProgress, MissingKey, StoreDown},
    replay::Replay,
    service::{Dedupe, Ready},
};
use crate::{
    claim::{EventKey, Scope, TextError},
    dedupe::{ConfigError, Deduplicator, DeduplicatorBuilder, Event, LeaseLost, within},
    key::{KeyAudit, KeySource, NoKey},
    store::{ClaimStore, PgStore},
};

/// Wraps services so that each event's handler completes once, and no event is lost.
///
/// A request's key is read and claimed in the store before the inner service is called, and marked
/// done only when the inner service has answered 2xx. Whatever else happens, the key is free again:
/// at once after a failure, when the lease ends after a crash.
///
/// Put it inside whatever verifies signatures, so that forged requests never claim a key, and
/// outside whatever the handler needs. Where a type names no store, [`PgStore`] is meant.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use axum::{Router, routing::post};
/// use tower_dedupe::{ClaimInfo, DedupeLayer, InProgress, KeySource, MemoryStore};
///
/// async fn on_push(info: ClaimInfo) -> String {
///     format!("attempt {}", info.attempt())
/// }
///
/// let layer = DedupeLayer::new(MemoryStore::new(), KeySource::header("x-github-delivery")?)
///     .scope("github")
///     .lease(Duration::from_secs(30))
///     .in_progress(InProgress::Wait(Duration::from_secs(2)));
/// let app: Router = Router::new().route("/github", post(on_push).layer(layer));
/// # Ok::<(), tower_dedupe::KeySourceError>(())
/// ```
///
/// # Panics
///
/// [`layer`](Layer::layer) panics if a setting is out of its bounds, with the message of the
/// [`ConfigError`] that [`check`](Self::check) returns: call that first where the settings come
/// from outside.
#[derive(Debug)]
pub struct DedupeLayer<St: ?Sized = PgStore> {
    dedupe: DeduplicatorBuilder<St>,
    config: Config,
    transactions: Option<PgStore>,
}

impl<St: ?Sized> Clone for DedupeLayer<St> {
    fn clone(&self) -> Self {
        let Self { dedupe, config, transactions } = self;
        Self { dedupe: dedupe.clone(), config: config.clone(), transactions: transactions.clone() }
    }
}

impl DedupeLayer {
    /// Gives each handler a [`Transaction`](crate::Transaction) in which its event is claimed, and
    /// commits it, with the done mark, when the handler succeeds: exactly once, for what the handler
    /// writes through it. Needs one connection for each request in flight.
    ///
    /// [`transaction`](crate::transaction) says when to use it and what changes. Of the settings,
    /// [`max_hold`](Self::max_hold) is when a handler is dropped and rolled back,
    /// [`lease`](Self::lease) how long it may be silent between two statements,
    /// [`settle_timeout`](Self::settle_timeout) how long its commit may take;
    /// [`lease_lost`](Self::lease_lost) means nothing. A request without a key passes through
    /// without a transaction, unless [`missing_key`](Self::missing_key) is
    /// [`Reject`](MissingKey::Reject).
    #[must_use]
    pub fn transactional(mut self) -> Self {
        self.transactions = Some(self.dedupe.store().clone());
        self
    }
}

impl<St: ClaimStore> DedupeLayer<St> {
    /// A layer with the defaults that the setters document.
    pub fn new(store: St, source: KeySource) -> Self {
        Self::from_builder(Deduplicator::builder(store), source)
    }

    /// A layer on a deduplicator that is set up already. Layers on clones of one builder share its
    /// bound of deliveries in flight, and are drained together.
    pub fn from_builder(dedupe: DeduplicatorBuilder<St>, source: KeySource) -> Self {
        Self { dedupe, config: Config::new(source), transactions: None }
    }

    /// A layer for APIs whose clients send an `Idempotency-Key`, as the IETF draft
    /// [`draft-ietf-httpapi-idempotency-key-header`] has it. A client that has heard nothing sends its
    /// request again with the same key, and gets the first answer.
    ///
    /// What it sets, each to be changed by its setter:
    ///
    /// | | |
    /// |---|---|
    /// | key | [`KeySource::idempotency_key`]: a string in quotes, or bare |
    /// | methods | POST and PATCH; the others pass through untouched ([`methods`](Self::methods)) |
    /// | scope | method and path, always; [`scope`](Self::scope) and [`scope_with`](Self::scope_with) add to them |
    /// | no key, or none that can be read | 400 ([`missing_key`](Self::missing_key)) |
    /// | the first request is under way | 409 + `Retry-After` ([`in_progress`](Self::in_progress)) |
    /// | the same key with another payload | 422; the payload is the body ([`fingerprint`](Self::fingerprint)) |
    /// | the first request is done | its response again ([`Duplicate::Replay`]) |
    /// | what is done | 2xx; other answers free the key, and the next request runs ([`remember`](Self::remember), [`success`](Self::success)) |
    ///
    /// Put it around the handler of a route, as below. Around a whole router it answers before the router
    /// does: a POST without a key to a path that does not exist gets 400, not 404.
    ///
    /// Method, path and what is added share the 255 bytes of a scope; a longer one is answered 400.
    ///
    /// Its errors name the draft as their documentation, in `Link` and as the problem's type;
    /// [`documentation`](Self::documentation) takes the address of your own.
    ///
    /// **Say who the client is**, by [`scope_with`](Self::scope_with) and from what was verified: keys
    /// are chosen by clients, and whoever sends the key and the payload of another client is given that
    /// client's response. **Choose a [`retention`](Self::retention)** and tell your clients: after it a
    /// key is new. The default of 30 days also keeps the responses as long.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use axum::{Router, routing::post};
    /// use tower_dedupe::{DedupeLayer, MemoryStore};
    ///
    /// let layer = DedupeLayer::idempotency_key(MemoryStore::new())
    ///     .scope_with(|request| match request.extensions.get::<AccountId>() {
    ///         Some(AccountId(id)) => id.to_string(),
    ///         None => "nobody".to_owned(),
    ///     })
    ///     .retention(Duration::from_secs(24 * 60 * 60));
    /// let app: Router = Router::new().route("/payments", post(|| async { "paid" }).layer(layer));
    ///
    /// /// Put into the request's extensions by what verifies the caller.
    /// #[derive(Clone)]
    /// struct AccountId(u64);
    /// ```
    ///
    /// [`draft-ietf-httpapi-idempotency-key-header`]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
    pub fn idempotency_key(store: St) -> Self {
        let mut layer = Self::new(store, KeySource::idempotency_key())
            .methods([Method::POST, Method::PATCH])
            .missing_key(MissingKey::Reject)
            .in_progress(InProgress::Conflict)
            .duplicate(Duplicate::Replay)
            .fingerprint(Fingerprint::Body)
            .documentation(DRAFT);
        layer.config.by_route = true;
        layer
    }

    /// The scope of this layer's keys, 1 to 255 bytes without control characters. Default: the path
    /// of the request.
    ///
    /// Name it: with the default, an event that was handled runs again when its URL changes. Give
    /// two layers the same scope only if the same key means the same event in both: **otherwise the
    /// one swallows the other's events.**
    ///
    /// In Axum the path is the whole one, also in nested routers (feature `axum`). Other routers
    /// that cut the path hide the rest: name the scope there.
    #[must_use]
    pub fn scope(mut self, scope: impl AsRef<str>) -> Self {
        self.config.scope = ScopeSource::Fixed(Scope::new(scope));
        self
    }

    /// The scope by request, for tenants. A text that cannot be a scope is answered with 400.
    ///
    /// **Take it from what the sender cannot choose freely**, such as a verified account, or one
    /// tenant can burn the keys of another.
    #[must_use]
    pub fn scope_with(
        mut self,
        scope: impl Fn(&request::Parts) -> String + Send + Sync + 'static,
    ) -> Self {
        self.config.scope = ScopeSource::With(Arc::new(scope));
        self
    }

    /// Takes a key source that is known to change with each attempt, such as `x-request-id`.
    /// Without this it is refused, **since nothing would ever be a duplicate**.
    #[must_use]
    pub fn allow_volatile(mut self) -> Self {
        self.config.allow_volatile = true;
        self
    }

    /// The methods whose requests are deduplicated; the others pass through untouched. Default: all
    /// but the safe ones (GET, HEAD, OPTIONS, TRACE) and CONNECT, which always pass.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = Some(methods.into_iter().collect());
        self
    }

    /// What counts as success, judged by the response's head. Default: 200 to 299.
    ///
    /// **What counts as success is never delivered again.**
    #[must_use]
    pub fn success(
        mut self,
        judge: impl Fn(&response::Parts) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.config.success.set_judge(judge);
        self
    }

    /// Refusals that are as final as a success: their events are done, and duplicates are answered as
    /// they were. Default: none. Any 4xx but 408, 425 and 429, which say to come back.
    ///
    /// For API clients, who learn from the first 402 or 422 and send a corrected request with a new
    /// key. With [`transactional`](DedupeLayer::transactional), what the handler wrote is committed.
    /// **Not for webhooks**: a handler that is mended would never see the event again.
    #[must_use]
    pub fn remember(mut self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        self.config.success.remember(statuses);
        self
    }

    /// The answer to an event that is done. Default [`Duplicate::SameStatus`].
    #[must_use]
    pub fn duplicate(mut self, duplicate: Duplicate) -> Self {
        self.config.duplicate = duplicate;
        self
    }

    /// What must be the same when the key is: a request whose key belongs to another payload is
    /// answered 422. Default: nothing is compared.
    ///
    /// The body is read before the key is claimed, within [`max_body`](Self::max_body) and
    /// [`body_timeout`](Self::body_timeout). In transaction mode, what another process has under way is
    /// compared once it is committed; until then the answer is that of
    /// [`in_progress`](Self::in_progress).
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        self.config.fingerprint = Some(fingerprint);
        self
    }

    /// The longest response body that [`Duplicate::Replay`] stores, in bytes. Default 256 KiB. A longer
    /// one leaves as it comes, and its duplicates are answered without it.
    ///
    /// It is kept in the row of its key until the [`retention`](Self::retention) ends, and in memory
    /// until it is stored: beyond some MiB, keep it elsewhere and answer with where.
    #[must_use]
    pub fn max_replay_body(mut self, bytes: usize) -> Self {
        self.config.replay.max_body = bytes;
        self
    }

    /// Headers that [`Duplicate::Replay`] does not store, besides those that it never does. Replaces
    /// those that were named before.
    #[must_use]
    pub fn never_replay(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.config.replay.never = names.into_iter().collect();
        self
    }

    /// Watches for the two silent mistakes in choosing a key: one that changes with each retry, and
    /// one that events share. Default: nothing is watched.
    ///
    /// A finding is logged as a warning, at most once a minute for each, and kept for
    /// [`KeyAudit::findings`]. Bodies are read for it as for a [`fingerprint`](Self::fingerprint).
    #[must_use]
    pub fn key_audit(mut self, audit: KeyAudit) -> Self {
        self.config.audit = Some(audit);
        self
    }

    /// The address of the text that tells clients how keys are used, `http` or `https`. Answers of a
    /// missing or unreadable key, of one that is in progress and of another payload name it: in `Link`
    /// (`rel="describedby"`) and as the problem's `type`. Default: none, but for
    /// [`idempotency_key`](Self::idempotency_key).
    #[must_use]
    pub fn documentation(mut self, address: impl AsRef<str>) -> Self {
        self.config.documentation = Some(Documentation::new(address.as_ref()));
        self
    }

    /// The answer to an event that is being handled. Default [`InProgress::Unavailable`].
    #[must_use]
    pub fn in_progress(mut self, in_progress: InProgress) -> Self {
        self.config.in_progress = in_progress;
        self
    }

    /// What is done without a key. Default [`MissingKey::PassThrough`].
    #[must_use]
    pub fn missing_key(mut self, missing_key: MissingKey) -> Self {
        self.config.missing_key = missing_key;
        self
    }

    /// What is done while the store is away. Default [`StoreDown::Reject`].
    #[must_use]
    pub fn store_down(mut self, store_down: StoreDown) -> Self {
        self.config.store_down = store_down;
        self
    }

    /// The longest body that is read to find a key, in bytes, as sent and as decoded. Default
    /// 2 MiB; a longer one is answered with 413. Bodies that need not be read have no limit here:
    /// those of requests whose head tells the key, where there is no [`fingerprint`](Self::fingerprint)
    /// and no [`key_audit`](Self::key_audit).
    #[must_use]
    pub fn max_body(mut self, bytes: usize) -> Self {
        self.config.max_body = bytes;
        self
    }

    /// How long a body that is read to find a key may take to arrive. Default 30 s; up to 1 h.
    /// After that the answer is 408, and nothing was claimed.
    #[must_use]
    pub fn body_timeout(mut self, body_timeout: Duration) -> Self {
        self.config.body_timeout = body_timeout;
        self
    }

    /// Lets requests that carry no event pass through untouched, such as a handshake: the head and
    /// the body (decoded) tell. The body is read for it, whatever the key source.
    ///
    /// **What passes through is not deduplicated.**
    #[must_use]
    pub fn bypass_if(
        mut self,
        bypass: impl Fn(&request::Parts, &[u8]) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.config.bypass = Some(Bypass(Arc::new(bypass)));
        self
    }

    /// See [`DeduplicatorBuilder::lease`]. Default 60 s.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.dedupe = self.dedupe.lease(lease);
        self
    }

    /// See [`DeduplicatorBuilder::max_hold`]. Default 15 min.
    #[must_use]
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.dedupe = self.dedupe.max_hold(max_hold);
        self
    }

    /// See [`DeduplicatorBuilder::retention`]. Default 30 days.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.dedupe = self.dedupe.retention(retention);
        self
    }

    /// See [`DeduplicatorBuilder::abandoned_retention`]. Default 1 day.
    #[must_use]
    pub fn abandoned_retention(mut self, retention: Duration) -> Self {
        self.dedupe = self.dedupe.abandoned_retention(retention);
        self
    }

    /// See [`DeduplicatorBuilder::settle_timeout`]. Default 5 s.
    #[must_use]
    pub fn settle_timeout(mut self, settle_timeout: Duration) -> Self {
        self.dedupe = self.dedupe.settle_timeout(settle_timeout);
        self
    }

    /// See [`DeduplicatorBuilder::detached`]. Default true.
    #[must_use]
    pub fn detached(mut self, detached: bool) -> Self {
        self.dedupe = self.dedupe.detached(detached);
        self
    }

    /// See [`DeduplicatorBuilder::max_in_flight`]. Default 1,024.
    #[must_use]
    pub fn max_in_flight(mut self, max_in_flight: u32) -> Self {
        self.dedupe = self.dedupe.max_in_flight(max_in_flight);
        self
    }

    /// See [`DeduplicatorBuilder::lease_lost`]. Default [`LeaseLost::Continue`].
    #[must_use]
    pub fn lease_lost(mut self, lease_lost: LeaseLost) -> Self {
        self.dedupe = self.dedupe.lease_lost(lease_lost);
        self
    }

    /// See [`DeduplicatorBuilder::redact_keys`].
    #[must_use]
    pub fn redact_keys(mut self) -> Self {
        self.dedupe = self.dedupe.redact_keys();
        self
    }

    /// Checks the settings, and gives the deduplicator that the layer's services run on: to
    /// [`drain`](Deduplicator::drain) it at shutdown, or to run events that arrive another way.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the setting that is out of its bounds.
    pub fn check(&self) -> Result<Deduplicator<St>, ConfigError> {
        self.config.check()?;
        if self.transactions.is_some() && self.config.store_down == StoreDown::PassThrough {
            return Err(ConfigError::PassThroughInTransaction);
        }
        self.dedupe.build()
    }
}

impl<S, St: ClaimStore> Layer<S> for DedupeLayer<St> {
    type Service = Dedupe<S>;

    #[expect(clippy::panic, reason = "documented: the trait leaves no way to return an error")]
    fn layer(&self, inner: S) -> Dedupe<S> {
        match self.check() {
            Ok(dedupe) => {
                let dedupe = dedupe.of_any_store();
                let Self { config, transactions, .. } = self.clone();
                Dedupe::new(inner, Ready { dedupe, config, transactions })
            }
            Err(error) => panic!("DedupeLayer: {error}"),
        }
    }
}

/// What the layer knows of HTTP.
#[derive(Clone, Debug)]
pub(super) struct Config {
    pub(super) source: KeySource,
    scope: ScopeSource,
    allow_volatile: bool,
    bypass: Option<Bypass>,
    /// Whether method and path are part of every scope.
    by_route: bool,
    methods: Option<Arc<[Method]>>,
    fingerprint: Option<Fingerprint>,
    audit: Option<KeyAudit>,
    documentation: Option<Result<Documentation, ConfigError>>,
    pub(super) success: Success,
    pub(super) duplicate: Duplicate,
    pub(super) replay: Replay,
    pub(super) in_progress: InProgress,
    pub(super) missing_key: MissingKey,
    pub(super) store_down: StoreDown,
    pub(super) max_body: usize,
    pub(super) body_timeout: Duration,
}

/// What a request is found to be.
pub(super) enum Found {
    Event(Event),
    Missing(String),
    Refused(Refusal),
    Bypass,
}

impl Config {
    fn new(source: KeySource) -> Self {
        Self {
            source,
            scope: ScopeSource::Path,
            allow_volatile: false,
            bypass: None,
            by_route: false,
            methods: None,
            fingerprint: None,
            audit: None,
            documentation: None,
            success: Success::default(),
            duplicate: Duplicate::default(),
            replay: Replay::default(),
            in_progress: InProgress::default(),
            missing_key: MissingKey::default(),
            store_down: StoreDown::default(),
            max_body: DEFAULT_MAX_BODY,
            body_timeout: DEFAULT_BODY_TIMEOUT,
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        if let ScopeSource::Fixed(Err(error)) = self.scope {
            return Err(ConfigError::Scope(error));
        }
        if let Some(volatile) = self.source.volatile().filter(|_| !self.allow_volatile) {
            return Err(ConfigError::Volatile(volatile));
        }
        if let Duplicate::Status(status) = self.duplicate {
            if !status.is_success() {
                return Err(ConfigError::DuplicateStatus { given: status.as_u16() });
            }
        }
        if let Some(Err(error)) = &self.documentation {
            return Err(error.clone());
        }
        self.success.check()?;
        if let InProgress::Wait(wait) = self.in_progress {
            within("in_progress wait", wait, Duration::ZERO, MAX_WAIT)?;
        }
        within("body_timeout", self.body_timeout, Duration::from_millis(1), MAX_WAIT)
    }

    /// Whether requests of this method are deduplicated.
    pub(super) fn takes(&self, method: &Method) -> bool {
        self.methods.as_ref().is_none_or(|methods| methods.contains(method))
    }

    /// Whether the fingerprint warns and does not refuse.
    pub(super) fn only_warns(&self) -> bool {
        self.fingerprint.as_ref().is_some_and(Fingerprint::only_warns)
    }

    pub(super) fn refused<R>(&self, refusal: Refusal) -> Response<DedupeBody<R>> {
        refusal.response(self.documentation.as_ref().and_then(|address| address.as_ref().ok()))
    }

    /// Whether what was found in the head is all that is to be known.
    pub(super) fn is_enough(&self, found: &Found) -> bool {
        let looks_at_payloads = self.fingerprint.is_some() || self.audit.is_some();
        !looks_at_payloads || !matches!(found, Found::Event(_))
    }

    /// Looks at a request's head, if that is enough; `None` if the body must be read first.
    pub(super) fn find_in_head(&self, parts: &request::Parts) -> Option<Found> {
        if self.bypass.is_some() {
            return None;
        }
        self.source.find_in_head(parts).map(|found| self.with_scope(parts, found))
    }

    /// Shows an event to the audit, and tells what that finds.
    pub(super) fn audit(
        &self,
        dedupe: &Deduplicator<dyn ClaimStore>,
        parts: &request::Parts,
        data: &[u8],
        found: &Found,
    ) {
        let (Some(audit), Found::Event(event)) = (&self.audit, found) else { return };
        let decoded = decode::for_looking(&parts.headers, data, self.max_body);
        let payload = decoded.as_deref().unwrap_or(data);
        let Some(finding) = audit.observe(&self.source, &event.key, payload) else { return };
        count::key_finding(&finding);
        tracing::warn!(
            event_key = %dedupe.shown(&event.key),
            source = finding.source(),
            mistake = finding.mistake().as_str(),
            times = finding.times(),
            "the key source looks like a mistake: {}",
            finding.hint(),
        );
    }

    /// Looks at a request's payload, once it is known to be an event.
    pub(super) fn with_payload(&self, parts: &request::Parts, data: &[u8], found: Found) -> Found {
        let (event, fingerprint) = match (found, &self.fingerprint) {
            (Found::Event(event), Some(fingerprint)) => (event, fingerprint),
            (found, _) => return found,
        };
        match fingerprint.of(parts, whole_path(parts), data, self.max_body) {
            Ok(hash) => Found::Event(Event { fingerprint: Some(hash), ..event }),
            Err(refusal) => Found::Refused(refusal),
        }
    }

    /// Looks at a request's head and its body.
    pub(super) fn find(&self, parts: &request::Parts, data: &[u8]) -> Found {
        let body = match decode::for_looking(&parts.headers, data, self.max_body) {
            Ok(body) => body,
            Err(refusal) => return Found::Refused(refusal),
        };
        if let Some(Bypass(bypass)) = &self.bypass {
            if bypass(parts, &body) {
                return Found::Bypass;
            }
        }
        self.with_scope(parts, self.source.find(parts, &body))
    }

    fn with_scope(&self, parts: &request::Parts, found: Result<String, NoKey>) -> Found {
        let key = match found {
            Ok(key) => key,
            Err(NoKey::Missing(fault)) => return Found::Missing(fault.to_string()),
            Err(NoKey::Invalid(fault)) => {
                return Found::Refused(Refusal::InvalidKey(fault.to_string()));
            }
        };
        let invalid = |what: &str, error: TextError| {
            Found::Refused(Refusal::InvalidKey(format!("{what} {error}")))
        };
        match self.scope_of(parts) {
            Err(error) => invalid(self.scope.described(), error),
            Ok(scope) => match EventKey::new(scope, key) {
                Err(error) => invalid("the key", error),
                Ok(key) => {
                    let replay = self.duplicate == Duplicate::Replay;
                    Found::Event(Event { replay, ..Event::of(key) })
                }
            },
        }
    }

    fn scope_of(&self, parts: &request::Parts) -> Result<Scope, TextError> {
        if !self.by_route {
            return self.scope.of(parts);
        }
        // Neither a method nor a path has a space in it, so no two are one text.
        let (method, path) = (&parts.method, whole_path(parts));
        match self.scope {
            ScopeSource::Path => Scope::new(format!("{method} {path}")),
            _ => Scope::new(format!("{method} {path} {}", self.scope.of(parts)?)),
        }
    }
}

#[derive(Clone)]
enum ScopeSource {
    Path,
    Fixed(Result<Scope, TextError>),
    With(Arc<dyn Fn(&request::Parts) -> String + Send + Sync>),
}

impl ScopeSource {
    fn of(&self, parts: &request::Parts) -> Result<Scope, TextError> {
        match self {
            Self::Path => Scope::new(whole_path(parts)),
            Self::Fixed(scope) => scope.clone(),
            Self::With(scope) => Scope::new(scope(parts)),
        }
    }

    fn described(&self) -> &'static str {
        match self {
            Self::Path => "the path, which is the scope where the layer is given none,",
            Self::Fixed(_) | Self::With(_) => "the scope",
        }
    }
}

impl fmt::Debug for ScopeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path => f.write_str("Path"),
            Self::Fixed(scope) => scope.fmt(f),
            Self::With(_) => f.write_str("With(fn)"),
        }
    }
}

#[derive(Clone)]
struct Bypass(Arc<LooksAtRequest>);

type LooksAtRequest = dyn Fn(&request::Parts, &[u8]) -> bool + Send + Sync;

impl fmt::Debug for Bypass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bypass(fn)")
    }
}

/// The path as it was sent: nested Axum routers cut what they matched off the URI.
fn whole_path(parts: &request::Parts) -> &str {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return original.path();
    }
    parts.uri.path()
}

const DRAFT: &str = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/";
const DEFAULT_MAX_BODY: usize = 2 * 1024 * 1024;
const DEFAULT_BODY_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_WAIT: Duration = Duration::from_secs(60 * 60);
