//! The first response again: what is stored of it, what is not, and how long.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use proptest::{prelude::*, test_runner::TestRunner};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    sync::mpsc,
    time::{Instant, timeout},
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_dedupe::{
    ClaimStore, Dedupe, DedupeBody, DedupeLayer, Duplicate, Fingerprint, KeySource, MemoryStore,
    Transaction,
};

use crate::support::{
    claims::{event, noise},
    postgres::{self, Schema},
};

type Bodied = Response<Given>;

/// What a handler answers with: frames, with the hints that they allow or with none.
struct Given {
    frames: VecDeque<Result<Frame<Bytes>, io::Error>>,
    /// More of them, as they come.
    later: Option<mpsc::Receiver<Frame<Bytes>>>,
    has_known_length: bool,
}

impl Given {
    fn whole(data: impl Into<Bytes>) -> Self {
        let data = data.into();
        let frames = if data.is_empty() { vec![] } else { vec![Frame::data(data)] };
        Self { has_known_length: true, ..Self::chunked(frames) }
    }

    fn chunked(frames: impl IntoIterator<Item = Frame<Bytes>>) -> Self {
        let frames = frames.into_iter().map(Ok).collect();
        Self { frames, later: None, has_known_length: false }
    }
}

impl Body for Given {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if let Some(frame) = self.frames.pop_front() {
            return Poll::Ready(Some(frame));
        }
        match &mut self.later {
            Some(later) => later.poll_recv(cx).map(|frame| frame.map(Ok)),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.has_known_length && self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        if !self.has_known_length {
            return SizeHint::default();
        }
        let frames = self.frames.iter().flatten().filter_map(Frame::data_ref);
        SizeHint::with_exact(frames.map(Bytes::len).sum::<usize>() as u64)
    }
}

/// An API whose answers are made by a function, told the number of the run.
#[derive(Clone)]
struct Handler {
    runs: Arc<AtomicUsize>,
    answers: Arc<dyn Fn(usize) -> Bodied + Send + Sync>,
}

impl Handler {
    fn of(answers: impl Fn(usize) -> Bodied + Send + Sync + 'static) -> Self {
        Self { runs: Arc::default(), answers: Arc::new(answers) }
    }

    /// The handler behind the layer.
    fn behind<St: ClaimStore>(
        &self,
        layer: &DedupeLayer<St>,
    ) -> impl Service<
        Request<Full<Bytes>>,
        Response = Response<DedupeBody<Given>>,
        Error = Infallible,
        Future: Send,
    > + Clone
    + Send
    + use<St> {
        let handler = self.clone();
        let answer = move |_: Request<DedupeBody<Full<Bytes>>>| {
            let run = handler.runs.fetch_add(1, Ordering::SeqCst);
            let answer = (handler.answers)(run);
            async move { Ok(answer) }
        };
        let service: Dedupe<_> = layer.layer(service_fn(answer));
        service
    }

    async fn send<St: ClaimStore>(&self, layer: &DedupeLayer<St>, key: &str) -> Seen {
        let response = self.head(layer, key).await;
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap();
        let trailers = body.trailers().cloned();
        Seen { status: head.status, headers: head.headers, body: body.to_bytes(), trailers }
    }

    /// The response, whose body is still to be read.
    async fn head<St: ClaimStore>(
        &self,
        layer: &DedupeLayer<St>,
        key: &str,
    ) -> Response<DedupeBody<Given>> {
        self.behind(layer).oneshot(request(key)).await.unwrap()
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

fn request(key: &str) -> Request<Full<Bytes>> {
    let request = Request::post("/a").header("x-id", key);
    request.body(Full::new(Bytes::from_static(b"request"))).unwrap()
}

/// A layer that gives the first response again.
fn replaying<St: ClaimStore>(store: St) -> DedupeLayer<St> {
    let layer = DedupeLayer::new(store, KeySource::header("x-id").unwrap()).scope("s");
    layer.duplicate(Duplicate::Replay)
}

/// What a client has seen.
#[derive(Debug)]
struct Seen {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    trailers: Option<HeaderMap>,
}

impl Seen {
    /// The first response, or what is left of it if it was not stored.
    fn is_replayed(&self, replayed: bool) -> bool {
        assert_eq!(self.headers["dedupe-status"], "duplicate", "{self:?}");
        assert_eq!(self.headers["idempotency-replayed"], if replayed { "true" } else { "false" });
        replayed || (self.body.is_empty() && self.headers.len() == 2)
    }
}

/// The documented list.
const NEVER: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "transfer-encoding",
    "upgrade",
    "date",
    "set-cookie",
    "www-authenticate",
    "content-length",
    "dedupe-status",
    "idempotency-replayed",
];

/// A response as proptest makes it.
#[derive(Clone, Debug)]
struct Made {
    status: u16,
    headers: Vec<(HeaderName, HeaderValue)>,
    /// What `Connection` names besides.
    connection: Vec<HeaderName>,
    chunks: Vec<Vec<u8>>,
    trailers: Vec<(HeaderName, HeaderValue)>,
    has_known_length: bool,
}

impl Made {
    fn any() -> impl Strategy<Value = Self> {
        let ours = prop::sample::select(NEVER).prop_map(HeaderName::from_static);
        let names = || {
            prop_oneof![
                "[a-c]".prop_map(|name| HeaderName::try_from(name).unwrap()),
                "[a-z!#$%&'*+.^_`|~0-9-]{1,30}"
                    .prop_map(|name| HeaderName::try_from(name).unwrap()),
                Just(http::header::LOCATION),
                Just(http::header::VARY),
                Just(http::header::CONTENT_ENCODING),
            ]
        };
        let value = || {
            let byte =
                prop_oneof![Just(b'\t'), Just(b':'), Just(b','), 0x20..=0x7e_u8, 0x80..=0xff_u8];
            prop::collection::vec(byte, 0..30)
                .prop_map(|value| HeaderValue::from_bytes(&value).unwrap())
        };
        let headers = prop::collection::vec((prop_oneof![3 => names(), 2 => ours], value()), 0..12);
        let trailers = prop::collection::vec((names(), value()), 0..4);
        let chunks = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..5);
        (
            200..300_u16,
            headers,
            prop::collection::vec(names(), 0..3),
            chunks,
            trailers,
            any::<bool>(),
        )
            .prop_map(
                |(status, headers, connection, chunks, trailers, has_known_length)| Self {
                    status,
                    headers,
                    connection,
                    chunks,
                    trailers,
                    has_known_length,
                },
            )
    }

    fn response(&self) -> Bodied {
        let data = self.chunks.iter().cloned().map(|chunk| Frame::data(chunk.into()));
        let trailers: HeaderMap = self.trailers.iter().cloned().collect_lines();
        let trailers = Some(trailers).filter(|lines| !lines.is_empty()).map(Frame::trailers);
        let mut body = Given::chunked(data.chain(trailers));
        body.has_known_length = self.has_known_length;
        let mut response = Response::new(body);
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap();
        *response.headers_mut() = self.headers.iter().cloned().collect_lines();
        for name in &self.connection {
            let listed = format!("close, {name}").try_into().unwrap();
            response.headers_mut().append("connection", listed);
        }
        response
    }
}

trait CollectLines {
    fn collect_lines(self) -> HeaderMap;
}

impl<I: Iterator<Item = (HeaderName, HeaderValue)>> CollectLines for I {
    /// Several of one name are kept, in their order.
    fn collect_lines(self) -> HeaderMap {
        let mut lines = HeaderMap::new();
        for (name, value) in self {
            lines.append(name, value);
        }
        lines
    }
}

/// For arbitrary responses, the replay is the first response minus the documented list.
fn a_replay_is_the_first_response_minus_the_documented_list<St: ClaimStore>(
    runtime: &Runtime,
    store: St,
    cases: u32,
) {
    let user = HeaderName::from_static("b");
    let layer = replaying(store).never_replay([user.clone()]);
    let case = AtomicUsize::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(cases));
    let outcome = runner.run(&Made::any(), |made| {
        let handler = Handler::of({
            let made = made.clone();
            move |_| made.response()
        });
        let key = case.fetch_add(1, Ordering::SeqCst).to_string();
        let (first, replay) = runtime.block_on(async {
            (handler.send(&layer, &key).await, handler.send(&layer, &key).await)
        });
        prop_assert_eq!(handler.runs(), 1);

        // The first has everything.
        let whole = made.response();
        prop_assert_eq!(&first.headers, whole.headers());
        prop_assert_eq!(&first.body[..], made.chunks.concat());
        prop_assert!(replay.is_replayed(true));
        prop_assert_eq!(replay.status, first.status);
        prop_assert_eq!(&replay.body, &first.body);
        prop_assert_eq!(&replay.trailers, &first.trailers);
        let is_listed = |name: &HeaderName| {
            NEVER.contains(&name.as_str())
                || *name == user
                || made.connection.contains(name)
                // A value of its own may name something, too.
                || first.headers.get_all("connection").iter().any(|value| {
                    let mut names = value.as_bytes().split(|byte| *byte == b',');
                    names.any(|one| one.trim_ascii().eq_ignore_ascii_case(name.as_str().as_bytes()))
                })
        };
        let expected = first.headers.iter().filter(|(name, _)| !is_listed(name));
        let expected = expected.map(|(name, value)| (name.clone(), value.clone())).collect_lines();
        let mut given = replay.headers;
        given.remove("dedupe-status");
        given.remove("idempotency-replayed");
        prop_assert_eq!(given, expected);
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn a_replay_from_memory_is_the_first_response_minus_the_documented_list() {
    let runtime = Runtime::new().unwrap();
    a_replay_is_the_first_response_minus_the_documented_list(&runtime, MemoryStore::new(), 1_000);
}

#[test]
fn a_replay_from_postgres_is_the_first_response_minus_the_documented_list() {
    let runtime = Runtime::new().unwrap();
    let store = runtime.block_on(async { postgres::schema().await.store().await });
    a_replay_is_the_first_response_minus_the_documented_list(&runtime, store, 200);
}

/// Bodies up to the limit, whole and in pieces, from memory and from the database.
async fn bodies_up_to_the_limit_are_stored_and_none_beyond<St: ClaimStore>(store: St) {
    const LIMIT: usize = 256 * 1024;
    let layer = replaying(store);
    // Of no pattern, so that no compression makes it short.
    let noise = noise(2 * LIMIT, 0);
    let lengths = [0, 1, LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT];
    for (n, length) in lengths.into_iter().enumerate() {
        for pieces in [1, 7] {
            let body = noise.slice(..length);
            let handler = Handler::of({
                let body = body.clone();
                move |_| {
                    let piece = body.len().div_ceil(pieces).max(1);
                    let chunks =
                        body.chunks(piece).map(|one| Frame::data(Bytes::copy_from_slice(one)));
                    let given = if pieces == 1 {
                        Given::whole(body.clone())
                    } else {
                        Given::chunked(chunks)
                    };
                    Response::builder().status(201).header("location", "/b").body(given).unwrap()
                }
            });
            let key = format!("{n} {pieces}");
            let first = handler.send(&layer, &key).await;
            assert_eq!((first.status.as_u16(), first.body), (201, body.clone()), "{length}");
            for _ in 0..2 {
                let again = handler.send(&layer, &key).await;
                assert_eq!(again.status, 201);
                assert!(again.is_replayed(length <= LIMIT), "{length}: {again:?}");
                if length <= LIMIT {
                    assert_eq!(
                        (again.body, &again.headers["location"]),
                        (body.clone(), &first.headers["location"])
                    );
                }
            }
            assert_eq!(handler.runs(), 1, "{length}");
        }
    }
}

#[tokio::test]
async fn in_memory_bodies_up_to_the_limit_are_stored_and_none_beyond() {
    bodies_up_to_the_limit_are_stored_and_none_beyond(MemoryStore::new()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_postgres_bodies_up_to_the_limit_are_stored_and_none_beyond() {
    bodies_up_to_the_limit_are_stored_and_none_beyond(postgres::schema().await.store().await).await;
}

/// Streams leave as they come: the first client has each frame before the next one exists.
#[tokio::test]
async fn what_is_not_stored_is_not_held_up() {
    let known_to_be_long = || {
        let mut given = Given::whole(vec![b'x'; 300 * 1024]);
        given.frames.push_back(Ok(Frame::data(Bytes::from_static(b"end"))));
        given
    };
    let frame = |data: &'static str| Frame::data(Bytes::from_static(data.as_bytes()));
    let message = |n: u8| Frame::data(Bytes::copy_from_slice(&[0, 0, 0, 0, 1, n]));
    let cases: Vec<(&str, Given)> = vec![
        ("text/plain", known_to_be_long()),
        ("text/event-stream; charset=utf-8", Given::chunked([frame("data: 1\n\n")])),
        ("Text/Event-Stream", Given::chunked([frame("data: 1\n\n")])),
        ("application/grpc", Given::chunked([message(1), message(2)])),
        ("application/grpc+proto", Given::chunked([message(1), message(2)])),
        ("text/plain", Given::chunked([Frame::data(vec![b'x'; 300 * 1024].into())])),
    ];
    for (n, (kind, mut given)) in cases.into_iter().enumerate() {
        let (more, later) = mpsc::channel(1);
        if !given.has_known_length {
            given.later = Some(later);
        }
        let given = Mutex::new(Some(given));
        let handler = Handler::of(move |_| {
            let given = given.lock().unwrap().take().unwrap();
            Response::builder().header("content-type", kind).body(given).unwrap()
        });
        let layer = replaying(MemoryStore::new());
        let soon = timeout(Duration::from_secs(1), handler.head(&layer, "k"));
        let mut body = soon.await.expect("the head is held up").into_body();
        let soon = timeout(Duration::from_secs(1), body.frame());
        let begun = soon.await.expect("the beginning is held up").unwrap().unwrap();
        assert!(begun.data_ref().is_some_and(|data| !data.is_empty()), "case {n}");
        // It is done by now, whatever becomes of the stream.
        assert!(handler.send(&layer, "k").await.is_replayed(false), "case {n}");
        let _ = more.send(frame("last")).await;
        drop(more);
        let rest = body.collect().await.unwrap().to_bytes();
        assert!(rest.ends_with(b"last") || rest.ends_with(b"end"), "case {n}: {rest:?}");
        assert_eq!(handler.runs(), 1);
    }
}

/// What is short and slow is waited for up to 2 s, and no longer; nothing of it is lost.
#[tokio::test(start_paused = true)]
async fn a_slow_body_is_a_stream_after_two_seconds() {
    for (pause, stored) in
        [(Duration::from_millis(1_900), true), (Duration::from_millis(2_100), false)]
    {
        let handler = Handler::of(move |_| {
            let (more, later) = mpsc::channel(1);
            tokio::spawn(async move {
                more.send(Frame::data(Bytes::from_static(b"first "))).await.unwrap();
                tokio::time::sleep(pause).await;
                more.send(Frame::data(Bytes::from_static(b"last"))).await.unwrap();
            });
            let mut given = Given::chunked([]);
            given.later = Some(later);
            Response::new(given)
        });
        let layer = replaying(MemoryStore::new());
        let begun = Instant::now();
        let head = handler.head(&layer, "k").await;
        let held_up = begun.elapsed();
        assert_eq!(head.into_body().collect().await.unwrap().to_bytes(), "first last");
        assert!(held_up <= Duration::from_millis(2_001), "{held_up:?}");
        assert!(handler.send(&layer, "k").await.is_replayed(stored));
        assert_eq!(handler.runs(), 1);
    }
}

/// A body that breaks off after a success: nothing of it is given to anybody, and the work is done.
#[tokio::test]
async fn a_body_that_breaks_off_is_not_stored() {
    let handler = Handler::of(|_| {
        let mut given = Given::chunked([Frame::data(Bytes::from_static(b"half"))]);
        given.frames.push_back(Err(io::ErrorKind::BrokenPipe.into()));
        Response::new(given)
    });
    let layer = replaying(MemoryStore::new());
    let first = handler.send(&layer, "k").await;
    assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(first.headers["dedupe-status"], "response-unreadable");
    let again = handler.send(&layer, "k").await;
    assert_eq!(again.status, StatusCode::OK);
    assert!(again.is_replayed(false));
    assert_eq!(handler.runs(), 1);
}

#[tokio::test]
async fn a_head_that_is_too_long_is_not_stored() {
    for (length, stored) in [(60 * 1024, true), (64 * 1024, false)] {
        let handler = Handler::of(move |_| {
            let value = HeaderValue::try_from("x".repeat(length)).unwrap();
            Response::builder().header("x-long", value).body(Given::whole("body")).unwrap()
        });
        let layer = replaying(MemoryStore::new());
        assert_eq!(handler.send(&layer, "k").await.headers["x-long"].len(), length);
        assert!(handler.send(&layer, "k").await.is_replayed(stored));
    }
}

/// Over HTTP/2, where gRPC lives: the message and the trailers come again.
#[tokio::test(flavor = "multi_thread")]
async fn a_unary_grpc_answer_comes_again_with_its_trailers() {
    let message = Bytes::from_static(&[0, 0, 0, 0, 3, b'a', b'b', b'c']);
    let handler = Handler::of(move |run| {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        trailers.append("x-run", run.to_string().parse().unwrap());
        let (prefix, rest) = (message.slice(..3), message.slice(3..));
        let frames = [Frame::data(prefix), Frame::data(rest), Frame::trailers(trailers)];
        Response::builder()
            .header("content-type", "application/grpc")
            .body(Given::chunked(frames))
            .unwrap()
    });
    let layer = replaying(postgres::schema().await.store().await);
    let service = handler.behind(&layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        // The layer takes any body, this service that of the other tests.
        let service = tower::service_fn(move |request: Request<hyper::body::Incoming>| {
            let service = service.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = Full::new(body.collect().await.unwrap().to_bytes());
                service.oneshot(Request::from_parts(head, body)).await
            }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        connection.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await
    });

    let stream = TcpStream::connect(address).await.unwrap();
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    tokio::spawn(connection);
    let mut seen = Vec::new();
    for _ in 0..3 {
        let (head, body) = client.send_request(request("k")).await.unwrap().into_parts();
        let body = body.collect().await.unwrap();
        let trailers = body.trailers().cloned().expect("the trailers are lost");
        assert_eq!(head.headers["content-type"], "application/grpc");
        seen.push((body.to_bytes(), trailers, head.headers.contains_key("idempotency-replayed")));
    }
    assert_eq!(seen[0].0, Bytes::from_static(&[0, 0, 0, 0, 3, b'a', b'b', b'c']));
    assert_eq!(seen[0].1["x-run"], "0");
    assert!(!seen[0].2 && seen[1].2 && seen[2].2);
    assert_eq!((&seen[1].0, &seen[1].1), (&seen[0].0, &seen[0].1));
    assert_eq!((&seen[2].0, &seen[2].1), (&seen[0].0, &seen[0].1));
    assert_eq!(handler.runs(), 1);
}

fn numbered() -> Handler {
    Handler::of(|run| {
        let response = Response::builder().status(201).header("location", format!("/{run}"));
        response.body(Given::whole(format!("run {run}"))).unwrap()
    })
}

#[tokio::test(start_paused = true)]
async fn in_memory_a_response_is_dropped_with_its_key() {
    let (handler, store) = (numbered(), MemoryStore::new());
    let layer = replaying(store).retention(Duration::from_secs(3600));
    assert_eq!(handler.send(&layer, "k").await.body, "run 0");
    tokio::time::sleep(Duration::from_secs(3599)).await;
    assert_eq!(handler.send(&layer, "k").await.body, "run 0");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(handler.send(&layer, "k").await.body, "run 1");
    assert_eq!(handler.send(&layer, "k").await.body, "run 1");
}

async fn rows(db: &Schema, condition: &str) -> i64 {
    let count = format!("SELECT count(*) FROM processed_events WHERE {condition}");
    db.client().await.query_one(&count, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn in_postgres_a_response_is_dropped_with_its_key() {
    let db = postgres::schema().await;
    let (handler, store) = (numbered(), db.store().await);
    let layer = replaying(store.clone()).retention(Duration::from_secs(3600));
    assert_eq!(handler.send(&layer, "k").await.body, "run 0");
    assert_eq!(handler.send(&layer, "l").await.body, "run 1");
    db.elapse(Duration::from_secs(3599)).await;
    assert_eq!(handler.send(&layer, "k").await.body, "run 0");
    assert_eq!(rows(&db, "response IS NOT NULL").await, 2);
    db.elapse(Duration::from_secs(2)).await;
    // Taken anew: nothing of the old one is given, not even while the new one fails.
    assert_eq!(handler.send(&layer, "k").await.body, "run 2");
    assert_eq!(handler.send(&layer, "k").await.body, "run 2");
    assert_eq!(store.purge(10).await.unwrap(), 1);
    assert_eq!((rows(&db, "true").await, rows(&db, "response IS NOT NULL").await), (1, 1));
    assert!(store.forget(&event("k")).await.unwrap());
    assert_eq!(rows(&db, "true").await, 0);
}

/// A layer without replay and fingerprint writes nothing that it did not write before.
#[tokio::test(flavor = "multi_thread")]
async fn without_replay_nothing_is_stored() {
    let db = postgres::schema().await;
    let handler = numbered();
    let plain = replaying(db.store().await).duplicate(Duplicate::SameStatus);
    for _ in 0..2 {
        assert_eq!(handler.send(&plain, "k").await.status, 201);
    }
    assert_eq!(rows(&db, "response IS NULL AND fingerprint IS NULL AND status = 'done'").await, 1);
    // What was done without is answered with what there is.
    let later = replaying(db.store().await).fingerprint(Fingerprint::Body);
    let again = handler.send(&later, "k").await;
    assert_eq!(again.status, 201);
    assert!(again.is_replayed(false));
    assert_eq!(handler.runs(), 1);
}

/// Bytes that this version did not write, by a later one or by hand.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_not_given() {
    let db = postgres::schema().await;
    let (handler, layer) = (numbered(), replaying(db.store().await));
    handler.send(&layer, "k").await;
    for bytes in [
        "''",
        "'\\x02'",
        "'\\x01'",
        "'\\x01ffffffff'",
        "'\\x0100000003613a'",
        "'\\x0100000003ff3a0a00000000'",
    ] {
        let update = format!("UPDATE processed_events SET response = {bytes}::bytea");
        db.client().await.batch_execute(&update).await.unwrap();
        let again = handler.send(&layer, "k").await;
        assert_eq!(again.status, 201);
        assert!(again.is_replayed(false), "{bytes}");
    }
    assert_eq!(handler.runs(), 1);
}

/// The response is committed with the work, and rolled back with it.
#[tokio::test(flavor = "multi_thread")]
async fn in_transaction_mode_the_response_is_part_of_the_transaction() {
    let db = postgres::schema().await;
    let store = db.builder().connect(db.url()).await.unwrap();
    store.migrate().await.unwrap();
    db.client().await.batch_execute("CREATE TABLE orders (id text)").await.unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let work = {
        let runs = runs.clone();
        move |request: Request<DedupeBody<Full<Bytes>>>| {
            let run = runs.fetch_add(1, Ordering::SeqCst);
            async move {
                let order = request.extensions().get::<Transaction>().unwrap().clone();
                order.execute("INSERT INTO orders VALUES ('a')", &[]).await.unwrap();
                // The first run fails after it has written, the second is not committed.
                if run == 1 {
                    order.execute("INSERT INTO nowhere VALUES (1)", &[]).await.unwrap_err();
                }
                let status = if run == 0 { 500 } else { 201 };
                let body = Given::whole(format!("run {run}"));
                Ok::<_, Infallible>(Response::builder().status(status).body(body).unwrap())
            }
        }
    };
    let layer = replaying(store).fingerprint(Fingerprint::Body).transactional();
    let service = layer.layer(service_fn(work));
    let send = async || {
        let response = service.clone().oneshot(request("k")).await.unwrap();
        let replayed = response.headers().get("idempotency-replayed").cloned();
        let status = response.status().as_u16();
        (status, response.into_body().collect().await.unwrap().to_bytes(), replayed)
    };
    assert_eq!(send().await.0, 500);
    assert_eq!(send().await.0, 500);
    assert_eq!(rows(&db, "response IS NOT NULL").await, 0);
    assert_eq!(send().await, (201, "run 2".into(), None));
    let replayed = Some(HeaderValue::from_static("true"));
    assert_eq!(send().await, (201, "run 2".into(), replayed.clone()));
    let mut other = request("k");
    *other.body_mut() = Full::from("other");
    assert_eq!(service.clone().oneshot(other).await.unwrap().status(), 422);
    let orders = "SELECT count(*) FROM orders";
    assert_eq!(db.client().await.query_one(orders, &[]).await.unwrap().get::<_, i64>(0), 1);
    assert_eq!(runs.load(Ordering::SeqCst), 3);
}
