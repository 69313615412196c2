//! The service: find the key, claim it, call the inner service, settle.

use std::{
    error::Error,
    mem,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderName, Method, Request, Response, StatusCode, Version,
    header::{CONNECTION, UPGRADE},
};
use http_body::Body;
use tokio::time::{Instant, sleep};
use tower_service::Service;

use super::{
    answer::{DedupeStatus, Refusal, duplicate},
    body::DedupeBody,
    count,
    future::ResponseFuture,
    layer::{Config, Found},
    policy::{Duplicate, InProgress, MissingKey, StoreDown},
    read,
    replay::Taken,
};
use crate::{
    claim::{ClaimInfo, EventKey},
    dedupe::{Deduplicator, Delivery, Event, NotRun, Verdict, Work},
    store::{ClaimStore, PgStore},
    transaction::{self, Settled, Transaction},
};

/// Deduplicates the requests of a service. Made by [`DedupeLayer`](super::DedupeLayer).
///
/// It is ready when the inner service is, and its errors are the inner service's: what fails here
/// is answered. The claim is made after readiness, so no lease runs while a request waits for an
/// inner limit; in turn a place in an inner limit is taken while the claim is made.
#[derive(Clone, Debug)]
pub struct Dedupe<S> {
    inner: S,
    ready: Arc<Ready>,
}

/// What the services of one layer share.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) dedupe: Deduplicator<dyn ClaimStore>,
    pub(super) config: Config,
    /// Where handlers are given a transaction, in transaction mode.
    pub(super) transactions: Option<PgStore>,
}

impl<S> Dedupe<S> {
    pub(super) fn new(inner: S, ready: Ready) -> Self {
        Self { inner, ready: Arc::new(ready) }
    }
}

impl<S, B, R> Service<Request<B>> for Dedupe<S>
where
    S: Service<Request<DedupeBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
    R: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<DedupeBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, R, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let not_ready_inner = self.inner.clone();
        let mut ready_inner = mem::replace(&mut self.inner, not_ready_inner);

        if carries_no_event(&request) || !self.ready.config.takes(request.method()) {
            return ResponseFuture::untouched(ready_inner.call(request.map(DedupeBody::inner)));
        }
        let ready = self.ready.clone();
        ResponseFuture::deduplicated(Box::pin(deduplicate(ready, ready_inner, request)))
    }
}

/// Safe methods, tunnels and upgrades pass through untouched.
fn carries_no_event<B>(request: &Request<B>) -> bool {
    matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::CONNECT
    ) || asks_for_an_upgrade(request)
}

/// Whether the connection may become something else. Anybody can send the header `Upgrade`; it says
/// something only in HTTP/1.1 and if `Connection` names it (RFC 9110, section 7.8).
///
/// An offer of h2c is no upgrade: Java's HTTP client makes it with every request, and servers
/// that do not take it up answer as if it were not there.
fn asks_for_an_upgrade<B>(request: &Request<B>) -> bool {
    let listed = |name: HeaderName| {
        let values = request.headers().get_all(name).iter();
        let values = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
        values.map(|one| one.trim_ascii()).filter(|one| !one.is_empty())
    };
    request.version() == Version::HTTP_11
        && listed(CONNECTION).any(|option| option.eq_ignore_ascii_case(b"upgrade"))
        && listed(UPGRADE).any(|protocol| !protocol.eq_ignore_ascii_case(b"h2c"))
}

async fn deduplicate<S, B, R>(
    ready: Arc<Ready>,
    inner: S,
    request: Request<B>,
) -> Result<Response<DedupeBody<R>>, S::Error>
where
    S: Service<Request<DedupeBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
    R: Body<Data = Bytes> + Send + 'static,
{
    let config = &ready.config;
    let (parts, body) = request.into_parts();

    // The body first, so that nobody who sends slowly holds a claim.
    let (found, body) = match config.find_in_head(&parts) {
        Some(found) if config.is_enough(&found) => (found, DedupeBody::inner(body)),
        in_head => match read::whole(&parts, body, config.max_body, config.body_timeout).await {
            Ok(whole) => {
                let found = in_head.unwrap_or_else(|| config.find(&parts, &whole.data));
                config.audit(&ready.dedupe, &parts, &whole.data, &found);
                let found = config.with_payload(&parts, &whole.data, found);
                (found, DedupeBody::held(whole.data, whole.trailers))
            }
            Err(refusal) => return Ok(config.refused(refusal)),
        },
    };

    let request = Request::from_parts(parts, body);
    let call = Call { inner, request, ready: ready.clone() };
    match found {
        Found::Event(event) if call.is_claimed_outside(&event.key) => {
            tracing::warn!(
                event_key = %ready.dedupe.shown(&event.key),
                "two layers of the same scope are stacked: the inner one stands aside",
            );
            call.without_dedupe().await
        }
        Found::Event(event) => claim_and_call(&ready, event, call).await,
        Found::Bypass => Ok(call.without_dedupe().await?),
        Found::Missing(fault) if config.missing_key == MissingKey::PassThrough => {
            tracing::warn!(
                source = %config.source,
                path = if ready.dedupe.redacts_keys() { "" } else { call.request.uri().path() },
                %fault,
                "no event key: the handler runs without deduplication; if this is not a handshake, \
                 check the key source",
            );
            let mut response = call.without_dedupe().await?;
            DedupeStatus::MissingKey.mark(&mut response);
            Ok(response)
        }
        Found::Missing(fault) => Ok(call.refuse(config, Refusal::MissingKey(fault)).await),
        Found::Refused(refusal) => {
            tracing::warn!(source = %config.source, ?refusal, "turned a request away");
            Ok(call.refuse(config, refusal).await)
        }
    }
}

/// The request's way once its key is known.
async fn claim_and_call<S, B, R>(
    ready: &Ready,
    mut event: Event,
    mut call: Call<S, B>,
) -> Result<Response<DedupeBody<R>>, S::Error>
where
    S: Service<Request<DedupeBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
    R: Body<Data = Bytes> + Send + 'static,
{
    let Ready { dedupe, config, transactions } = ready;
    let mut patience = Patience::of(config.in_progress);
    loop {
        let delivery = match transactions {
            None => dedupe.deliver(event.clone(), call).await,
            Some(store) => match transaction::deliver(dedupe, store, event.clone(), call).await {
                // Whatever the handler has answered, it does not hold.
                Delivery::Ran(Settled { not_committed: Some(why), .. }) => {
                    return Ok(config.refused(Refusal::NotCommitted(why)));
                }
                Delivery::Ran(Settled { output, .. }) => Delivery::Ran(output),
                Delivery::NotRun(why, call) => Delivery::NotRun(why, call),
                Delivery::Cut => Delivery::Cut,
            },
        };
        let (why, unused) = match delivery {
            Delivery::Ran(result) => return result,
            Delivery::Cut => return Ok(config.refused(Refusal::Cut)),
            Delivery::NotRun(why, call) => (why, call),
        };
        call = unused;

        match why {
            NotRun::Done { status, response } => {
                call.drain(config).await;
                return Ok(duplicate(config.duplicate, status, response));
            }
            NotRun::OtherPayload => {
                let event_key = dedupe.shown(&event.key);
                let only_warns = config.only_warns();
                tracing::warn!(
                    %event_key,
                    source = %config.source,
                    "the event key was used with another payload: {}",
                    if only_warns { "it goes on as if it were the same" } else { "turned away" },
                );
                count::payload_conflict(&config.source);
                if !only_warns {
                    return Ok(call.refuse(config, Refusal::OtherPayload).await);
                }
                event.fingerprint = None;
            }
            NotRun::InProgress { lease_left } => {
                if patience.wait().await {
                    continue;
                }
                let status = match config.in_progress {
                    InProgress::Conflict => StatusCode::CONFLICT,
                    _ => StatusCode::SERVICE_UNAVAILABLE,
                };
                return Ok(call.refuse(config, Refusal::InProgress { status, lease_left }).await);
            }
            NotRun::Busy => {
                if patience.begun && patience.wait().await {
                    continue;
                }
                return Ok(call.refuse(config, Refusal::TooManyInFlight).await);
            }
            NotRun::Store(error) => {
                let passes = config.store_down == StoreDown::PassThrough;
                tracing::error!(
                    event_key = %dedupe.shown(&event.key),
                    error = &error as &dyn Error,
                    "could not claim the event key: {}",
                    if passes { "the handler runs without deduplication" } else { "turned away" },
                );
                if !passes {
                    return Ok(call.refuse(config, Refusal::StoreUnavailable).await);
                }
                let mut response = call.without_dedupe().await?;
                DedupeStatus::StoreUnavailable.mark(&mut response);
                return Ok(response);
            }
        }
    }
}

/// A request and the service that was made ready for it.
struct Call<S, B> {
    inner: S,
    request: Request<DedupeBody<B>>,
    ready: Arc<Ready>,
}

impl<S, B, R> Work<ClaimInfo> for Call<S, B>
where
    S: Service<Request<DedupeBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    type Output = Result<Response<DedupeBody<R>>, S::Error>;

    fn start(mut self, info: ClaimInfo) -> impl Future<Output = (Self::Output, Verdict)> + Send {
        self.request.extensions_mut().insert(info);
        self.judged()
    }
}

impl<S, B, R> Work<(ClaimInfo, Transaction)> for Call<S, B>
where
    S: Service<Request<DedupeBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    type Output = Result<Response<DedupeBody<R>>, S::Error>;

    fn start(
        mut self,
        (info, transaction): (ClaimInfo, Transaction),
    ) -> impl Future<Output = (Self::Output, Verdict)> + Send {
        let extensions = self.request.extensions_mut();
        extensions.insert(info);
        extensions.insert(transaction);
        self.judged()
    }
}

impl<S, B, R> Call<S, B>
where
    S: Service<Request<DedupeBody<B>>, Response = Response<R>>,
    R: Body<Data = Bytes>,
{
    /// Calls the inner service and says whether it has succeeded, and with what.
    fn judged(self) -> impl Future<Output = (Result<Response<DedupeBody<R>>, S::Error>, Verdict)> {
        let Self { mut inner, request, ready } = self;
        async move {
            let (head, body) = match inner.call(request).await {
                Ok(response) => response.into_parts(),
                Err(error) => return (Err(error), Verdict::Failed),
            };
            let config = &ready.config;
            let status = Some(head.status.as_u16());
            let done = |response| Verdict::Done { status, response };
            let (body, verdict) = if !config.success.is(&head) {
                (DedupeBody::inner(body), Verdict::Failed)
            } else if config.duplicate != Duplicate::Replay {
                (DedupeBody::inner(body), done(None))
            } else {
                match config.replay.take_down(&head, body).await {
                    Taken::Down(body, stored) => (body, done(Some(stored))),
                    Taken::Not(body) => (body, done(None)),
                    Taken::Broken => {
                        tracing::error!(
                            source = %config.source,
                            "the handler succeeded, but its response's body broke off and is not \
                             stored",
                        );
                        return (Ok(config.refused(Refusal::ResponseUnreadable)), done(None));
                    }
                }
            };
            (Ok(Response::from_parts(head, body)), verdict)
        }
    }
}

impl<S, B, R> Call<S, B>
where
    S: Service<Request<DedupeBody<B>>, Response = Response<R>>,
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    /// Calls the inner service as if there were no layer.
    fn without_dedupe(self) -> impl Future<Output = Result<Response<DedupeBody<R>>, S::Error>> {
        let Self { mut inner, request, .. } = self;
        let calling = inner.call(request);
        async move { Ok(calling.await?.map(DedupeBody::inner)) }
    }

    fn refuse(
        self,
        config: &Config,
        refusal: Refusal,
    ) -> impl Future<Output = Response<DedupeBody<R>>> {
        let refused = config.refused(refusal);
        let drained = self.drain(config);
        async move {
            drained.await;
            refused
        }
    }

    /// Whether an outer layer has claimed this very event for this request.
    fn is_claimed_outside(&self, key: &EventKey) -> bool {
        let outside = self.request.extensions().get::<ClaimInfo>();
        outside.is_some_and(|info| info.event_key() == key)
    }

    /// Reads away what the sender is still sending. Its place in an inner limit is free by then.
    fn drain(self, config: &Config) -> impl Future<Output = ()> + use<S, B, R> {
        let Self { inner, request, .. } = self;
        drop(inner);
        let (parts, body) = request.into_parts();
        read::drain(&parts, body.into_unread(), config.max_body, config.body_timeout)
    }
}

/// How long a delivery waits for another one of the same event.
struct Patience {
    until: Option<Instant>,
    begun: bool,
    pause: Duration,
}

impl Patience {
    fn of(policy: InProgress) -> Self {
        let until = match policy {
            InProgress::Wait(patience) => Some(Instant::now() + patience),
            InProgress::Unavailable | InProgress::Conflict => None,
        };
        Self { until, begun: false, pause: FIRST_PAUSE }
    }

    /// Waits a moment, unless the patience is over.
    async fn wait(&mut self) -> bool {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        let Some(left) = left.filter(|left| !left.is_zero()) else { return false };
        self.begun = true;
        sleep(self.pause.min(left)).await;
        self.pause = (self.pause * 3 / 2).min(LONGEST_PAUSE);
        true
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
