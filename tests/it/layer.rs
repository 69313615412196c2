//! What the layer answers, row by row: keys, policies, bodies. No server, no database: the inner
//! service is a function, the store fails as it is told, time is paused.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io::Write,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_dedupe::{
    ClaimInfo, ClaimStore, DedupeBody, DedupeLayer, DedupeStatus, Duplicate, EventKey, InProgress,
    KeySource, MissingKey, Scope, StoreDown, claim::State, store::StoreErrorKind,
};

use crate::support::scripted::{Call, Fault, Scripted};

/// What an inner service saw, and what it answers.
#[derive(Clone, Default)]
struct Handler {
    seen: Arc<Mutex<Vec<Seen>>>,
    answer: Arc<Mutex<StatusCode>>,
    gate: Option<Arc<Semaphore>>,
}

#[derive(Clone, Debug)]
struct Seen {
    info: Option<ClaimInfo>,
    headers: HeaderMap,
    body: Bytes,
    trailers: Option<HeaderMap>,
    end_at_once: bool,
    exact_size: Option<u64>,
}

impl Handler {
    fn behind(gate: &Arc<Semaphore>) -> Self {
        Self { gate: Some(gate.clone()), ..Self::default() }
    }

    fn answer(&self, status: StatusCode) {
        *self.answer.lock().unwrap() = status;
    }

    fn runs(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    fn last(&self) -> Seen {
        self.seen.lock().unwrap().last().expect("the handler has not run").clone()
    }

    async fn handle<B>(
        self,
        request: Request<DedupeBody<B>>,
    ) -> Result<Response<Full<Bytes>>, Infallible>
    where
        B: Body<Data = Bytes, Error = Infallible>,
    {
        let (parts, body) = request.into_parts();
        let end_at_once = body.is_end_stream();
        let exact_size = body.size_hint().exact();
        let body = body.collect().await.unwrap();
        self.seen.lock().unwrap().push(Seen {
            info: parts.extensions.get().cloned(),
            headers: parts.headers,
            trailers: body.trailers().cloned(),
            body: body.to_bytes(),
            end_at_once,
            exact_size,
        });
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        let mut response = Response::new(Full::from("handled"));
        *response.status_mut() = *self.answer.lock().unwrap();
        Ok(response)
    }

    /// Sends one request through the layer.
    async fn send<B>(&self, layer: &DedupeLayer<Scripted>, request: Request<B>) -> Answer
    where
        B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
    {
        let handler = self.clone();
        let service = layer.layer(service_fn(move |request| handler.clone().handle(request)));
        // Time is paused, and goes by at once when everybody waits.
        let answered = timeout(Duration::from_secs(24 * 60 * 60), service.oneshot(request)).await;
        let response = answered.expect("no answer within a day").unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer {
            status: parts.status,
            headers: parts.headers,
            extension: parts.extensions.get().copied(),
            body,
        }
    }
}

#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    extension: Option<DedupeStatus>,
    body: Bytes,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The answer is the layer's own, a problem of this kind; gives its detail.
    fn problem(&self, status: StatusCode, reason: &str) -> String {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("dedupe-status"), Some(reason));
        assert_eq!(self.extension.unwrap().as_str(), reason);
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        let problem: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(problem["status"], status.as_u16());
        assert_eq!(problem["title"], status.canonical_reason().unwrap());
        problem["detail"].as_str().unwrap().to_owned()
    }
}

fn post(body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post("/hook").body(Full::new(body.into())).unwrap()
}

fn post_with(name: &str, value: &str) -> Request<Full<Bytes>> {
    let mut request = post("");
    request
        .headers_mut()
        .insert(header::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
    request
}

fn by_id(store: &Scripted) -> DedupeLayer<Scripted> {
    DedupeLayer::new(store.clone(), KeySource::json("$.id").unwrap())
}

fn by_header(store: &Scripted) -> DedupeLayer<Scripted> {
    DedupeLayer::new(store.clone(), KeySource::header("x-id").unwrap())
}

#[tokio::test(start_paused = true)]
async fn the_first_delivery_gets_the_handlers_own_answer_the_second_its_status() {
    for status in [200, 201, 202, 204] {
        let (store, handler) = (Scripted::new(), Handler::default());
        handler.answer(StatusCode::from_u16(status).unwrap());
        let layer = by_id(&store);
        let first = handler.send(&layer, post(r#"{"id":"evt_1"}"#)).await;
        assert_eq!((first.status.as_u16(), &first.body[..]), (status, &b"handled"[..]));
        assert_eq!(first.header("dedupe-status"), None);
        let info = handler.last().info.unwrap();
        assert_eq!((info.key(), info.scope(), info.attempt()), ("evt_1", "/hook", 1));

        let second = handler.send(&layer, post(r#"{"id":"evt_1"}"#)).await;
        assert_eq!((second.status.as_u16(), second.body.len()), (status, 0));
        assert_eq!(second.header("dedupe-status"), Some("duplicate"));
        assert_eq!(second.extension, Some(DedupeStatus::Duplicate));
        assert_eq!(handler.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn duplicates_are_answered_with_the_status_of_choice() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_id(&store).duplicate(Duplicate::Status(StatusCode::ACCEPTED));
    handler.send(&layer, post(r#"{"id":1}"#)).await;
    assert_eq!(handler.send(&layer, post(r#"{"id":1}"#)).await.status, StatusCode::ACCEPTED);
}

#[tokio::test(start_paused = true)]
async fn i1_nothing_lost_every_status_but_2xx_frees_the_key() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_id(&store);
    let mut attempt = 0;
    for status in [101, 300, 302, 304, 400, 404, 409, 410, 429, 499, 500, 502, 503, 599, 999] {
        handler.answer(StatusCode::from_u16(status).unwrap());
        let answer = handler.send(&layer, post(r#"{"id":"evt_1"}"#)).await;
        attempt += 1;
        assert_eq!(answer.status.as_u16(), status, "the handler's own answer");
        assert_eq!(handler.last().info.unwrap().attempt(), attempt);
    }
    handler.answer(StatusCode::OK);
    handler.send(&layer, post(r#"{"id":"evt_1"}"#)).await;
    assert_eq!(handler.runs(), attempt as usize + 1);
}

#[tokio::test(start_paused = true)]
async fn what_counts_as_success_can_be_chosen() {
    let (store, handler) = (Scripted::new(), Handler::default());
    handler.answer(StatusCode::FOUND);
    let layer = by_id(&store).success(|head| head.status.is_redirection());
    handler.send(&layer, post(r#"{"id":1}"#)).await;
    let second = handler.send(&layer, post(r#"{"id":1}"#)).await;
    assert_eq!((second.status, handler.runs()), (StatusCode::FOUND, 1));
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_inner_service_is_the_layers_error_and_frees_the_key() {
    let store = Scripted::new();
    let service = by_id(&store)
        .layer(service_fn(|_: Request<_>| async { Err::<Response<Full<Bytes>>, _>("broken") }));
    assert_eq!(service.oneshot(post(r#"{"id":"a"}"#)).await.unwrap_err(), "broken");
    let key = EventKey::new(Scope::new("/hook").unwrap(), "a").unwrap();
    assert_eq!(store.show(&key).await.unwrap().unwrap().state, State::Failed);
}

/// While a first delivery is at work, a second gets this.
async fn second_of_two(policy: InProgress) -> (Answer, Duration) {
    let store = Scripted::new();
    let gate = Arc::new(Semaphore::new(0));
    let handler = Handler::behind(&gate);
    let layer = by_id(&store).in_progress(policy);
    let first = tokio::spawn({
        let (handler, layer) = (handler.clone(), layer.clone());
        async move { handler.send(&layer, post(r#"{"id":1}"#)).await }
    });
    store.has_been_called(Call::Claim, 1).await;
    sleep(Duration::from_millis(500)).await;
    let began = Instant::now();
    let second = handler.send(&layer, post(r#"{"id":1}"#)).await;
    let took = began.elapsed();
    gate.add_permits(1);
    assert_eq!(first.await.unwrap().status, StatusCode::OK);
    assert_eq!(handler.runs(), 1);
    (second, took)
}

#[tokio::test(start_paused = true)]
async fn a_delivery_that_meets_a_live_claim_is_told_to_come_back() {
    let (answer, took) = second_of_two(InProgress::Unavailable).await;
    answer.problem(StatusCode::SERVICE_UNAVAILABLE, "in-progress");
    assert_eq!(answer.header("retry-after"), Some("60"), "59.5 s are left of the lease");
    assert_eq!(took, Duration::ZERO);

    let (answer, _) = second_of_two(InProgress::Conflict).await;
    answer.problem(StatusCode::CONFLICT, "in-progress");
    assert_eq!(answer.header("retry-after"), Some("60"));

    let patience = Duration::from_secs(2);
    let (answer, took) = second_of_two(InProgress::Wait(patience)).await;
    answer.problem(StatusCode::SERVICE_UNAVAILABLE, "in-progress");
    assert!(took >= patience && took < 2 * patience, "waited {took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_delivery_that_waits_gets_the_answer_of_the_first() {
    for (first_status, second_status, runs) in [(204, 204, 1), (500, 500, 2)] {
        let store = Scripted::new();
        let gate = Arc::new(Semaphore::new(0));
        let handler = Handler::behind(&gate);
        handler.answer(StatusCode::from_u16(first_status).unwrap());
        let layer = by_id(&store).in_progress(InProgress::Wait(Duration::from_secs(5)));
        let deliver = || {
            let (handler, layer) = (handler.clone(), layer.clone());
            tokio::spawn(async move { handler.send(&layer, post(r#"{"id":1}"#)).await })
        };
        let first = deliver();
        store.has_been_called(Call::Claim, 1).await;
        let second = deliver();
        store.has_been_called(Call::Claim, 3).await;
        gate.add_permits(2);
        assert_eq!(first.await.unwrap().status.as_u16(), first_status);
        assert_eq!(second.await.unwrap().status.as_u16(), second_status);
        assert_eq!(handler.runs(), runs);
    }
}

#[tokio::test(start_paused = true)]
async fn a_delivery_that_waits_holds_no_place_in_flight() {
    let store = Scripted::new();
    let gate = Arc::new(Semaphore::new(0));
    let handler = Handler::behind(&gate);
    let layer =
        by_id(&store).max_in_flight(2).in_progress(InProgress::Wait(Duration::from_secs(60)));
    let deliver = |body: &'static str| {
        let (handler, layer) = (handler.clone(), layer.clone());
        tokio::spawn(async move { handler.send(&layer, post(body)).await })
    };
    let first = deliver(r#"{"id":1}"#);
    store.has_been_called(Call::Claim, 1).await;
    let waiting = deliver(r#"{"id":1}"#);
    store.has_been_called(Call::Claim, 3).await;
    let other = deliver(r#"{"id":2}"#);
    // Both places are taken now, and the one that waits goes on waiting.
    store.has_been_called(Call::Claim, 4).await;
    sleep(Duration::from_secs(10)).await;
    gate.add_permits(2);
    for delivery in [first, waiting, other] {
        assert_eq!(delivery.await.unwrap().status, StatusCode::OK);
    }
    assert_eq!(handler.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn without_a_key_the_handler_runs_and_the_answer_says_so() {
    let bodies: [&[u8]; 9] = [
        b"",
        b"no json",
        br#"{"id":"a"} and more"#,
        br#"{"other":1}"#,
        br#"{"id":null}"#,
        br#"{"id":""}"#,
        b"[]",
        br#"{"id":"#,
        b"\xff\xfe",
    ];
    for body in bodies {
        let (store, handler) = (Scripted::new(), Handler::default());
        let layer = by_id(&store);
        for run in 1..=2 {
            let answer = handler.send(&layer, post(body)).await;
            assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"handled"[..]));
            assert_eq!(answer.header("dedupe-status"), Some("missing-key"));
            assert_eq!(answer.extension, Some(DedupeStatus::MissingKey));
            assert_eq!(handler.runs(), run);
            assert_eq!(handler.last().info, None);
            assert_eq!(handler.last().body, body);
        }
        let layer = layer.missing_key(MissingKey::Reject);
        let detail =
            handler.send(&layer, post(body)).await.problem(StatusCode::BAD_REQUEST, "missing-key");
        assert!(detail.contains("$.id"), "{detail}");
        assert_eq!((handler.runs(), store.calls(Call::Claim)), (2, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalid_key_is_400_before_the_store_is_asked_or_the_handler_called() {
    let long = format!(r#"{{"id":"{}"}}"#, "k".repeat(513));
    let bodies: [(&str, &str); 12] = [
        (r#"{"id":true}"#, "boolean"),
        (r#"{"id":false}"#, "boolean"),
        (r#"{"id":1.5}"#, "fraction"),
        (r#"{"id":1e3}"#, "fraction"),
        (r#"{"id":{}}"#, "object"),
        (r#"{"id":["a"]}"#, "array"),
        (&long, "512"),
        (r#"{"id":"a\u0000b"}"#, "control character"),
        (r#"{"id":"a\nb"}"#, "control character"),
        (r#"{"id":"a","id":"a"}"#, "twice"),
        (r#"{"id":"a","\u0069d":"b"}"#, "twice"),
        (r#"{"id":"a","id":null}"#, "twice"),
    ];
    for (body, fault) in bodies {
        for policy in [MissingKey::PassThrough, MissingKey::Reject] {
            let (store, handler) = (Scripted::new(), Handler::default());
            let layer = by_id(&store).missing_key(policy);
            let answer = handler.send(&layer, post(body.to_owned())).await;
            let detail = answer.problem(StatusCode::BAD_REQUEST, "invalid-key");
            assert!(detail.contains("json:$.id"), "{body}: {detail}");
            assert!(detail.contains(fault), "{body}: {detail}");
            assert_eq!((handler.runs(), store.calls(Call::Claim)), (0, 0), "{body}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalid_header_is_400_and_names_the_header() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_header(&store);
    let mut twice = post_with("x-id", "a");
    twice.headers_mut().append("x-id", "b".parse().unwrap());
    let mut latin = post("");
    latin.headers_mut().insert("x-id", header::HeaderValue::from_bytes(b"caf\xe9").unwrap());
    let mut with_tab = post("");
    with_tab.headers_mut().insert("x-id", header::HeaderValue::from_bytes(b"a\tb").unwrap());
    for request in [twice, latin, with_tab, post_with("x-id", &"k".repeat(513))] {
        let answer = handler.send(&layer, request).await;
        let detail = answer.problem(StatusCode::BAD_REQUEST, "invalid-key");
        assert!(detail.contains("header:x-id"), "{detail}");
    }
    assert_eq!((handler.runs(), store.calls(Call::Claim)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_same_key_in_another_spelling_is_the_same_event() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_id(&store);
    for body in [r#"{"id":"17"}"#, r#"{"id":17}"#, "\u{feff}{\"id\": \"\\u0031\\u0037\"}"] {
        handler.send(&layer, post(body)).await;
    }
    assert_eq!(handler.runs(), 1);
    // Two that a float would make one.
    for body in [r#"{"id":12345678901234567890123}"#, r#"{"id":12345678901234567890124}"#] {
        handler.send(&layer, post(body)).await;
    }
    assert_eq!(handler.runs(), 3);
    assert_eq!(handler.last().info.unwrap().key(), "12345678901234567890124");
}

#[tokio::test(start_paused = true)]
async fn keys_in_two_scopes_are_two_events() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let path = by_id(&store);
    let named = by_id(&store).scope("stripe");
    let tenant = by_id(&store).scope_with(|head| {
        format!("tenant/{}", head.headers["x-tenant"].to_str().unwrap_or_default())
    });
    let on = |uri: &str, tenant: &str| {
        let request = Request::post(uri).header("x-tenant", tenant);
        request.body(Full::<Bytes>::from(r#"{"id":1}"#)).unwrap()
    };
    for (layer, uri, name) in [
        (&path, "/a", "x"),
        (&path, "/b?c=1", "x"),
        (&named, "/a", "x"),
        (&tenant, "/a", "x"),
        (&tenant, "/a", "y"),
    ] {
        let runs = handler.runs();
        handler.send(layer, on(uri, name)).await;
        assert_eq!(handler.runs(), runs + 1, "{uri} {name}");
        handler.send(layer, on(uri, name)).await;
        assert_eq!(handler.runs(), runs + 1, "{uri} {name}");
    }
    assert_eq!(handler.last().info.unwrap().scope(), "tenant/y");

    let empty = by_id(&store).scope_with(|_| String::new());
    let answer = handler.send(&empty, on("/a", "x")).await;
    assert!(answer.problem(StatusCode::BAD_REQUEST, "invalid-key").contains("scope is empty"));
    let long = handler.send(&path, on(&format!("/{}", "p".repeat(255)), "x")).await;
    assert!(long.problem(StatusCode::BAD_REQUEST, "invalid-key").contains("the limit is 255"));
}

#[tokio::test(start_paused = true)]
async fn a_body_of_the_limit_passes_byte_for_byte_and_one_byte_more_is_413() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_id(&store).max_body(1_000);
    let body = |length: usize| {
        let mut body = br#"{"id":1,"pad":"#.to_vec();
        body.resize(length - 2, b' ');
        body.extend(b"0}");
        Bytes::from(body)
    };
    let chunked = |body: Bytes, pieces: usize| {
        let size = body.len().div_ceil(pieces);
        let chunks: Vec<_> = body.chunks(size).map(Bytes::copy_from_slice).collect();
        Request::post("/hook").body(Frames::data(chunks)).unwrap()
    };
    for pieces in [1, 2, 7, 1_000] {
        let fits = body(1_000);
        let layer = layer.clone().scope(pieces.to_string());
        assert_eq!(
            handler.send(&layer, chunked(fits.clone(), pieces)).await.status,
            StatusCode::OK
        );
        let seen = handler.last();
        assert_eq!(seen.body, fits);
        assert_eq!((seen.exact_size, seen.end_at_once), (Some(1_000), false));

        let runs = handler.runs();
        let answer = handler.send(&layer, chunked(body(1_001), pieces)).await;
        let detail = answer.problem(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large");
        assert!(detail.contains("1000 bytes"), "{detail}");
        assert_eq!(handler.runs(), runs);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_in_one_piece_is_not_copied() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let body = Bytes::from(format!(r#"{{"pad":"{}","id":1}}"#, "x".repeat(1_000_000)));
    handler.send(&by_id(&store), post(body.clone())).await;
    let seen = handler.last().body;
    assert_eq!((seen.as_ptr(), seen.len()), (body.as_ptr(), body.len()));
    // Nor one that comes with frames that say nothing.
    let frames = Frames::data(vec![Bytes::new(), body.clone(), Bytes::new()]);
    let layer = by_id(&store).scope("frames");
    handler.send(&layer, Request::post("/hook").body(frames).unwrap()).await;
    assert_eq!(handler.last().body.as_ptr(), body.as_ptr());
}

#[tokio::test(start_paused = true)]
async fn a_buffered_body_keeps_its_trailers_and_its_head() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let mut trailers = HeaderMap::new();
    trailers.insert("x-checksum", "1".parse().unwrap());
    let frames = Frames(VecDeque::from([
        Frame::data(Bytes::new()),
        Frame::data(Bytes::from(r#"{"id":"#)),
        Frame::data(Bytes::new()),
        Frame::data(Bytes::from("1}")),
        Frame::trailers(trailers.clone()),
    ]));
    let request = Request::post("/hook")
        .header("transfer-encoding", "chunked")
        .header("x-two", "a")
        .header("x-two", "b")
        .body(frames)
        .unwrap();
    let head = request.headers().clone();
    handler.send(&by_id(&store), request).await;
    let seen = handler.last();
    assert_eq!((seen.headers, seen.trailers), (head, Some(trailers)));
    // As it came: to a body of known length HTTP/1 gives no trailers, should the handler pass it on.
    assert_eq!((&seen.body[..], seen.exact_size), (&br#"{"id":1}"#[..], None));
}

#[tokio::test(start_paused = true)]
async fn an_empty_buffered_body_is_at_its_end_at_once() {
    let (store, handler) = (Scripted::new(), Handler::default());
    handler.send(&by_id(&store), post("")).await;
    assert!(handler.last().end_at_once);
    assert_eq!(handler.last().exact_size, Some(0));
}

#[tokio::test(start_paused = true)]
async fn with_a_header_key_the_body_streams_through_untouched() {
    let store = Scripted::new();
    // The handler answers without reading: nobody may have read before it.
    let polled = Arc::new(AtomicUsize::new(0));
    let body = Endless { polled: polled.clone(), pause: None };
    let service = by_header(&store).layer(service_fn(|request: Request<DedupeBody<Endless>>| {
        assert_eq!(request.body().size_hint().exact(), None);
        async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("at once"))) }
    }));
    let request = Request::post("/hook").header("x-id", "a").body(body).unwrap();
    let response = service.oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(polled.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn before_an_answer_of_its_own_the_layer_reads_the_body_away_up_to_the_limit() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_header(&store).max_body(10_000).body_timeout(Duration::from_secs(3));
    handler.send(&layer, post_with("x-id", "a")).await;

    let endless = |pause: Option<Duration>| {
        let polled = Arc::new(AtomicUsize::new(0));
        let body = Endless { polled: polled.clone(), pause: pause.map(|p| (p, None)) };
        (polled, Request::post("/hook").header("x-id", "a").body(body).unwrap())
    };
    let (polled, request) = endless(None);
    assert_eq!(handler.send(&layer, request).await.header("dedupe-status"), Some("duplicate"));
    assert_eq!(polled.load(Ordering::SeqCst), 11, "in pieces of 1,000 bytes");

    // A sender that trickles does not hold the answer up for ever.
    let (_, request) = endless(Some(Duration::from_secs(1)));
    let began = Instant::now();
    assert_eq!(handler.send(&layer, request).await.header("dedupe-status"), Some("duplicate"));
    assert_eq!(began.elapsed(), Duration::from_secs(3));

    // One that waits for leave to send has sent nothing.
    let (polled, mut request) = endless(None);
    request.headers_mut().insert(header::EXPECT, "100-continue".parse().unwrap());
    assert_eq!(handler.send(&layer, request).await.header("dedupe-status"), Some("duplicate"));
    assert_eq!((polled.load(Ordering::SeqCst), handler.runs()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_arrive_in_time_is_408_and_nothing_is_claimed() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let body = Endless { polled: Arc::default(), pause: Some((Duration::from_secs(1), None)) };
    let request = Request::post("/hook").body(body).unwrap();
    let layer = by_id(&store).body_timeout(Duration::from_secs(5));
    let began = Instant::now();
    handler.send(&layer, request).await.problem(StatusCode::REQUEST_TIMEOUT, "body-timeout");
    assert_eq!(began.elapsed(), Duration::from_secs(5));
    assert_eq!((handler.runs(), store.calls(Call::Claim)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_breaks_off_is_400_and_nothing_is_claimed() {
    let store = Scripted::new();
    let service = by_id(&store).layer(service_fn(|_: Request<DedupeBody<Broken>>| async {
        panic!("the handler must not be called");
        #[expect(unreachable_code, reason = "gives the future its type")]
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    }));
    let response = service.oneshot(Request::post("/").body(Broken).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(response.headers()["dedupe-status"], "body-unreadable");
    assert_eq!(store.calls(Call::Claim), 0);
}

#[tokio::test(start_paused = true)]
async fn a_header_that_says_upgrade_and_means_nothing_does_not_switch_deduplication_off() {
    let none: &[&str] = &[];
    let cases: [(&str, &[&str], http::Version); 7] = [
        ("websocket", none, http::Version::HTTP_11),
        ("websocket", &["keep-alive"], http::Version::HTTP_11),
        ("", &["upgrade"], http::Version::HTTP_11),
        ("h2c", &["Upgrade, HTTP2-Settings"], http::Version::HTTP_11),
        (" H2C ,", &["upgrade"], http::Version::HTTP_11),
        ("websocket", &["upgrade"], http::Version::HTTP_10),
        ("websocket", &["upgrade"], http::Version::HTTP_2),
    ];
    for (upgrade, connection, version) in cases {
        let (store, handler) = (Scripted::new(), Handler::default());
        for status in [None, Some("duplicate")] {
            let mut request = post_with("x-id", "a");
            *request.version_mut() = version;
            request.headers_mut().insert(header::UPGRADE, upgrade.parse().unwrap());
            for option in connection {
                request.headers_mut().append(header::CONNECTION, option.parse().unwrap());
            }
            let answer = handler.send(&by_header(&store), request).await;
            assert_eq!(answer.header("dedupe-status"), status, "{upgrade} {connection:?}");
        }
        assert_eq!(handler.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_an_outer_layer_limits_is_413() {
    let store = Scripted::new();
    type Limited = http_body_util::Limited<Full<Bytes>>;
    let service = by_id(&store).layer(service_fn(|_: Request<DedupeBody<Limited>>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("the handler was called")))
    }));
    let body = http_body_util::Limited::new(Full::from(vec![b' '; 200]), 100);
    let response = service.oneshot(Request::post("/").body(body).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(response.headers()["dedupe-status"], "body-too-large");
    assert_eq!(store.calls(Call::Claim), 0);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_has_no_say_is_not_looked_at() {
    // The header has the key, and the body, which would have it otherwise, is of no use.
    let either = |store: &Scripted| {
        DedupeLayer::new(store.clone(), "header:x-id | json:$.id".parse().unwrap()).max_body(10)
    };
    let (store, handler) = (Scripted::new(), Handler::default());
    for body in ["a body that is longer than the limit", "short"] {
        let mut request = post_with("x-id", body);
        request.headers_mut().insert(header::CONTENT_ENCODING, "compress".parse().unwrap());
        *request.body_mut() = Full::from(body);
        let answer = handler.send(&either(&store), request).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(handler.last().info.unwrap().key(), body);
    }
    let answer =
        handler.send(&either(&store), post(r#"{"id": 1, "more": "than ten bytes"}"#)).await;
    answer.problem(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large");
    let answer = handler.send(&either(&store), post(r#"{"id": 7}"#)).await;
    assert_eq!((answer.status, handler.last().info.unwrap().key()), (StatusCode::OK, "7"));
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_that_is_slow_to_send_does_not_keep_a_place_in_an_inner_limit() {
    type Answered = Result<Response<Full<Bytes>>, Infallible>;
    let store = Scripted::new();
    let service = tower::ServiceBuilder::new()
        .layer(by_header(&store))
        .layer(tower::limit::ConcurrencyLimitLayer::new(1))
        .service(service_fn(|_: Request<DedupeBody<Endless>>| async {
            Answered::Ok(Response::default())
        }));
    let deliver = |id: &str| {
        let pause = Some((Duration::from_secs(1), None));
        let body = Endless { polled: Arc::default(), pause };
        let request = Request::post("/").header("x-id", id).body(body).unwrap();
        tokio::spawn(service.clone().oneshot(request))
    };
    deliver("1").await.unwrap().unwrap();
    let duplicate = deliver("1");
    store.has_been_called(Call::Claim, 2).await;
    let began = Instant::now();
    deliver("2").await.unwrap().unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert!(!duplicate.is_finished(), "it was answered before it was read away");
    let answer = duplicate.await.unwrap().unwrap();
    assert_eq!(answer.headers()["dedupe-status"], "duplicate");
}

#[tokio::test(start_paused = true)]
async fn a_switch_of_protocols_is_no_success_whoever_says_so() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_id(&store).success(|_| true);
    handler.answer(StatusCode::SWITCHING_PROTOCOLS);
    for run in 1..=2 {
        handler.send(&layer, post(r#"{"id":1}"#)).await;
        assert_eq!(handler.runs(), run);
    }
    handler.answer(StatusCode::NOT_FOUND);
    for status in [None, Some("duplicate")] {
        let answer = handler.send(&layer, post(r#"{"id":1}"#)).await;
        assert_eq!(
            (answer.status, answer.header("dedupe-status")),
            (StatusCode::NOT_FOUND, status)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_path_too_long_for_a_scope_is_told_so() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let mut request = post_with("x-id", "1");
    *request.uri_mut() = format!("/{}", "x".repeat(255)).parse().unwrap();
    let detail = handler
        .send(&by_header(&store), request)
        .await
        .problem(StatusCode::BAD_REQUEST, "invalid-key");
    assert!(detail.contains("the path, which is the scope where the layer is given none"));
}

fn encoded(coding: &str, data: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    let mut raw = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    match coding {
        "gzip" => {
            gzip.write_all(data).unwrap();
            gzip.finish().unwrap()
        }
        "zlib" => {
            zlib.write_all(data).unwrap();
            zlib.finish().unwrap()
        }
        "raw deflate" => {
            raw.write_all(data).unwrap();
            raw.finish().unwrap()
        }
        "zstd" => {
            ruzstd::encoding::compress_to_vec(data, ruzstd::encoding::CompressionLevel::Fastest)
        }
        _ => panic!("{coding}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_compressed_body_is_looked_into_and_handed_on_as_it_was_sent() {
    let plain = br#"{"id":"evt_1"}"#;
    // An uncompressed meta-block, written by hand from RFC 7932: window bits, then
    // ISLAST 0, MNIBBLES 0, MLEN - 1, ISUNCOMPRESSED 1, the bytes, then ISLAST 1, ISEMPTY 1.
    // A zstd frame with one raw block, by hand from RFC 8878, between two that are to be skipped.
    let skipped = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
    let zstd = zstd_of_a_window(0x68, plain);
    let mut padded = encoded("gzip", br#"{"id":"#);
    padded.extend(encoded("gzip", br#""evt_1"}"#));
    padded.extend([0; 100]);
    let mut brotli = vec![(plain.len() as u8 - 1) << 4, 0x00, 0b0001_0000];
    brotli.extend(plain);
    brotli.push(0b11);
    let bodies: [(&str, Vec<u8>); 11] = [
        ("gzip", encoded("gzip", plain)),
        ("x-gzip", encoded("gzip", plain)),
        ("GZIP", encoded("gzip", plain)),
        ("deflate", encoded("zlib", plain)),
        ("deflate", encoded("raw deflate", plain)),
        ("zstd", encoded("zstd", plain)),
        ("br", brotli),
        ("zstd", [&skipped[..], &zstd, &skipped].concat()),
        ("gzip", padded),
        ("identity", plain.to_vec()),
        ("zstd, identity, gzip", encoded("gzip", &encoded("zstd", plain))),
    ];
    for (coding, body) in bodies {
        let (store, handler) = (Scripted::new(), Handler::default());
        let layer = by_id(&store);
        for _ in 0..2 {
            let mut request = post(body.clone());
            request.headers_mut().insert(header::CONTENT_ENCODING, coding.parse().unwrap());
            let answer = handler.send(&layer, request).await;
            assert_eq!(answer.status, StatusCode::OK, "{coding}: {:?}", answer.body);
        }
        assert_eq!(handler.runs(), 1, "{coding}");
        let seen = handler.last();
        assert_eq!((seen.info.unwrap().key(), &seen.body[..]), ("evt_1", &body[..]));
        assert_eq!(seen.headers[header::CONTENT_ENCODING], coding);
    }
}

/// A zstd frame that asks for this window (exponent and mantissa) and has one raw block.
fn zstd_of_a_window(window: u8, plain: &[u8]) -> Vec<u8> {
    let block = (plain.len() as u32) << 3 | 1;
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, window];
    frame.extend(&block.to_le_bytes()[..3]);
    frame.extend(plain);
    frame
}

/// The "large window" form of brotli: `0x11`, 6 bits of the window's size, then an uncompressed
/// meta-block as above.
fn brotli_of_a_large_window(bits: u8, plain: &[u8]) -> Vec<u8> {
    let mut body = vec![0x11, bits, (plain.len() as u8 - 1) << 1, 0x00, 0b10];
    body.extend(plain);
    body.push(0b11);
    body
}

#[tokio::test(start_paused = true)]
async fn a_window_larger_than_content_codings_may_have_is_refused() {
    let plain = br#"{"id":"evt_1"}"#;
    for (coding, body) in [
        ("br", brotli_of_a_large_window(24, plain)),
        ("br", brotli_of_a_large_window(30, plain)),
        ("zstd", zstd_of_a_window(0x69, plain)),
        ("zstd", zstd_of_a_window(0x84, plain)),
    ] {
        let (store, handler) = (Scripted::new(), Handler::default());
        let mut request = post(body);
        request.headers_mut().insert(header::CONTENT_ENCODING, coding.parse().unwrap());
        let answer = handler.send(&by_id(&store), request).await;
        answer.problem(StatusCode::BAD_REQUEST, "invalid-key");
        assert_eq!((handler.runs(), store.calls(Call::Claim)), (0, 0), "{coding}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_cannot_be_looked_into_is_refused_and_never_passed_through() {
    let bomb = encoded("gzip", &vec![b' '; 10_000_000]);
    assert!(bomb.len() < 20_000);
    let (unsupported, too_large) =
        (StatusCode::UNSUPPORTED_MEDIA_TYPE, StatusCode::PAYLOAD_TOO_LARGE);
    let gzip = encoded("gzip", br#"{"id":1}"#);
    let bodies = [
        ("compress", gzip.clone(), unsupported, "unsupported-encoding"),
        ("gzip, gzip, gzip, gzip", gzip.clone(), unsupported, "unsupported-encoding"),
        ("gzip", br#"{"id":1}"#.to_vec(), StatusCode::BAD_REQUEST, "invalid-key"),
        ("gzip", gzip[..gzip.len() - 9].to_vec(), StatusCode::BAD_REQUEST, "invalid-key"),
        ("br", gzip.clone(), StatusCode::BAD_REQUEST, "invalid-key"),
        ("zstd", gzip.clone(), StatusCode::BAD_REQUEST, "invalid-key"),
        ("gzip", bomb, too_large, "body-too-large"),
        (
            "gzip, gzip",
            encoded("gzip", &encoded("gzip", &[b' '; 3_000_000])),
            too_large,
            "body-too-large",
        ),
    ];
    for (coding, body, status, reason) in bodies {
        let (store, handler) = (Scripted::new(), Handler::default());
        let mut request = post(body);
        request.headers_mut().insert(header::CONTENT_ENCODING, coding.parse().unwrap());
        handler.send(&by_id(&store), request).await.problem(status, reason);
        assert_eq!((handler.runs(), store.calls(Call::Claim)), (0, 0), "{coding}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_carries_no_event_passes_through_untouched() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_header(&store).missing_key(MissingKey::Reject);
    let mut requests = Vec::new();
    for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE, Method::CONNECT] {
        let mut request = post_with("x-id", "a");
        *request.method_mut() = method;
        requests.push(request);
    }
    for protocols in ["websocket", "h2c, TLS/1.2"] {
        let mut upgrade = post_with("x-id", "a");
        upgrade.headers_mut().insert(header::UPGRADE, protocols.parse().unwrap());
        let connection = "keep-alive, Upgrade".parse().unwrap();
        upgrade.headers_mut().insert(header::CONNECTION, connection);
        requests.push(upgrade);
    }
    for request in requests {
        let runs = handler.runs();
        let answer = handler.send(&layer, request).await;
        assert_eq!((answer.status, handler.runs()), (StatusCode::OK, runs + 1));
        assert_eq!((answer.header("dedupe-status"), handler.last().info), (None, None));
    }
    assert_eq!(store.calls(Call::Claim), 0);
}

#[tokio::test(start_paused = true)]
async fn every_other_method_is_deduplicated_also_with_an_offer_of_h2c() {
    for method in ["POST", "PUT", "PATCH", "DELETE", "PURGE"] {
        let (store, handler) = (Scripted::new(), Handler::default());
        let layer = by_header(&store);
        for _ in 0..2 {
            let mut request = post_with("x-id", "a");
            *request.method_mut() = method.parse().unwrap();
            request.headers_mut().insert(header::UPGRADE, "h2c".parse().unwrap());
            handler.send(&layer, request).await;
        }
        assert_eq!(handler.runs(), 1, "{method}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_handshake_can_be_let_through_by_its_head_and_body() {
    let (store, handler) = (Scripted::new(), Handler::default());
    let layer = by_id(&store).missing_key(MissingKey::Reject).bypass_if(|head, body| {
        head.uri.path() == "/hook" && body.starts_with(br#"{"type":"url_verification""#)
    });
    let handshake = r#"{"type":"url_verification","id":"x"}"#;
    for _ in 0..2 {
        let answer = handler.send(&layer, post(handshake)).await;
        assert_eq!((answer.status, answer.header("dedupe-status")), (StatusCode::OK, None));
    }
    assert_eq!((handler.runs(), store.calls(Call::Claim)), (2, 0));
    assert_eq!(handler.last().body, handshake);
    handler.send(&layer, post(r#"{"id":"x"}"#)).await;
    assert_eq!(handler.last().info.unwrap().attempt(), 1);
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_down_the_handler_is_not_called() {
    let kinds = [
        StoreErrorKind::Unavailable,
        StoreErrorKind::Unknown,
        StoreErrorKind::Schema,
        StoreErrorKind::Conflict,
        StoreErrorKind::Other,
    ];
    for kind in kinds {
        let (store, handler) = (Scripted::new(), Handler::default());
        store.next(Call::Claim, [Fault::Refuse(kind)]);
        let layer = by_id(&store);
        let answer = handler.send(&layer, post(r#"{"id":1}"#)).await;
        answer.problem(StatusCode::SERVICE_UNAVAILABLE, "store-unavailable");
        assert_eq!((answer.header("retry-after"), handler.runs()), (Some("5"), 0));
        assert_eq!(handler.send(&layer, post(r#"{"id":1}"#)).await.status, StatusCode::OK);
        assert_eq!(handler.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_down_the_handler_can_run_loudly_without_dedupe() {
    let (store, handler) = (Scripted::new(), Handler::default());
    store.always(Call::Claim, Fault::Refuse(StoreErrorKind::Unavailable));
    let layer = by_id(&store).store_down(StoreDown::PassThrough);
    for _ in 0..2 {
        let answer = handler.send(&layer, post(r#"{"id":1}"#)).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.header("dedupe-status"), Some("store-unavailable"));
    }
    assert_eq!(handler.runs(), 2);
    assert_eq!(handler.last().body, r#"{"id":1}"#);
}

#[tokio::test(start_paused = true)]
async fn beyond_the_bound_in_flight_deliveries_are_turned_away() {
    let store = Scripted::new();
    let gate = Arc::new(Semaphore::new(0));
    let handler = Handler::behind(&gate);
    let layer = by_id(&store).max_in_flight(1);
    let first = tokio::spawn({
        let (handler, layer) = (handler.clone(), layer.clone());
        async move { handler.send(&layer, post(r#"{"id":1}"#)).await }
    });
    store.has_been_called(Call::Claim, 1).await;
    let answer = handler.send(&layer, post(r#"{"id":2}"#)).await;
    answer.problem(StatusCode::SERVICE_UNAVAILABLE, "too-many-in-flight");
    assert_eq!(answer.header("retry-after"), Some("1"));
    gate.add_permits(1);
    assert_eq!(first.await.unwrap().status, StatusCode::OK);
    assert_eq!(store.calls(Call::Claim), 1);
}

#[test]
fn a_layer_that_cannot_work_is_refused_when_it_is_built() {
    let store = Scripted::new();
    let refused = [
        (by_id(&store).scope(""), "the scope is empty"),
        (by_id(&store).scope("a\u{7f}b"), "the scope has a control character"),
        (by_id(&store).lease(Duration::ZERO), "lease is 0ns"),
        (by_id(&store).body_timeout(Duration::ZERO), "body_timeout is 0ns"),
        (by_id(&store).duplicate(Duplicate::Status(StatusCode::CONFLICT)), "duplicates would be"),
        (
            DedupeLayer::new(store.clone(), KeySource::header("X-Request-Id").unwrap()),
            "allow_volatile()",
        ),
    ];
    for (layer, message) in refused {
        let error = layer.check().unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        let built = std::panic::catch_unwind(AssertUnwindSafe(|| layer.layer(())));
        let panic = *built.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(panic, format!("DedupeLayer: {error}"));
    }
    let volatile = KeySource::header("x-request-id").unwrap();
    DedupeLayer::new(store, volatile).allow_volatile().check().unwrap();
}

/// A body of frames that are there already.
struct Frames(VecDeque<Frame<Bytes>>);

impl Frames {
    fn data(chunks: impl IntoIterator<Item = Bytes>) -> Self {
        Self(chunks.into_iter().map(Frame::data).collect())
    }
}

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(Ok))
    }
}

/// A body without end, in pieces of 1,000 bytes, at once or with pauses.
struct Endless {
    polled: Arc<AtomicUsize>,
    pause: Option<(Duration, Option<Pin<Box<tokio::time::Sleep>>>)>,
}

impl Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some((pause, sleeping)) = &mut self.pause {
            let sleeping = sleeping.get_or_insert_with(|| Box::pin(sleep(*pause)));
            std::task::ready!(sleeping.as_mut().poll(cx));
        }
        if let Some((_, sleeping)) = &mut self.pause {
            *sleeping = None;
        }
        self.polled.fetch_add(1, Ordering::SeqCst);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 1_000])))))
    }
}

/// A body whose connection breaks.
struct Broken;

impl Body for Broken {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(Some(Err(std::io::ErrorKind::ConnectionReset.into())))
    }
}
