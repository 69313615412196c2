//! Where the layer can be stacked: Axum, hyper, plain Tower, and services that insist on being made
//! ready first.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use ::http::{Request, Response, StatusCode};
use axum::{Router, body::Body as AxumBody, extract::State, routing::post};
use bytes::Bytes;
use http_body::Body;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_dedupe::{ClaimInfo, Dedupe, DedupeBody, DedupeLayer, KeySource, MemoryStore};
use tower_http::catch_panic::CatchPanicLayer;

use crate::support::http;

fn layer() -> DedupeLayer<MemoryStore> {
    DedupeLayer::new(MemoryStore::new(), KeySource::header("x-id").unwrap())
}

fn request(path: &str, id: &str) -> Request<AxumBody> {
    Request::post(path).header("x-id", id).body(AxumBody::empty()).unwrap()
}

async fn count(State(runs): State<Arc<AtomicUsize>>, info: Option<ClaimInfo>) -> String {
    runs.fetch_add(1, Ordering::SeqCst);
    info.map(|info| info.scope().to_owned()).unwrap_or_default()
}

#[tokio::test]
async fn on_a_whole_axum_router_each_route_has_its_own_scope() {
    let runs = Arc::new(AtomicUsize::new(0));
    let nested = Router::new().route("/hook", post(count)).layer(layer());
    let app = Router::new()
        .route("/a", post(count))
        .route("/b", post(count))
        .layer(layer())
        .nest("/first", nested.clone())
        .nest("/second", nested)
        .with_state(runs.clone());
    for (n, path) in ["/a", "/b", "/first/hook", "/second/hook"].into_iter().enumerate() {
        for status in ["", "duplicate"] {
            let response = app.clone().oneshot(request(path, "1")).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            let marked = response.headers().get("dedupe-status");
            assert_eq!(marked.map_or("", |value| value.to_str().unwrap()), status, "{path}");
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body, if status.is_empty() { path } else { "" });
        }
        assert_eq!(runs.load(Ordering::SeqCst), n + 1, "{path}");
    }
}

#[tokio::test]
async fn on_one_method_router_the_others_are_left_alone() {
    let runs = Arc::new(AtomicUsize::new(0));
    let app = Router::new()
        .route("/hook", post(count).get(count).layer(layer()))
        .route("/healthz", post(count))
        .with_state(runs.clone());
    for path in ["/hook", "/hook", "/healthz", "/healthz"] {
        let response = app.clone().oneshot(request(path, "1")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    let get = Request::get("/hook").header("x-id", "1").body(AxumBody::empty()).unwrap();
    app.oneshot(get).await.unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_layer_stacked_on_itself_handles_each_event_once() {
    let runs = Arc::new(AtomicUsize::new(0));
    let layer = layer();
    let app = Router::new()
        .route("/hook", post(count).layer(layer.clone()))
        .layer(layer)
        .with_state(runs.clone());
    for status in [None, Some("duplicate")] {
        let response = app.clone().oneshot(request("/hook", "1")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let marked = response.headers().get("dedupe-status");
        assert_eq!(marked.map(|value| value.to_str().unwrap()), status);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn the_extractor_says_what_is_missing() {
    async fn needs(info: ClaimInfo) -> String {
        info.key().to_owned()
    }
    let app = Router::new().route("/", post(needs));
    let response = app.oneshot(request("/", "1")).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.starts_with(b"no claim: add a DedupeLayer"));
}

#[tokio::test]
async fn a_panic_reaches_an_outer_catch_panic_and_the_key_is_free() {
    for detached in [true, false] {
        let layer = layer().detached(detached);
        let inner = Arc::new(AtomicUsize::new(0));
        let runs = inner.clone();
        let service = service_fn(move |_: Request<DedupeBody<AxumBody>>| {
            let run = runs.fetch_add(1, Ordering::SeqCst);
            async move {
                assert!(run > 0, "the first run panics");
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        });
        let outside = ServiceBuilder::new()
            .layer(CatchPanicLayer::new())
            .layer(layer.clone())
            .service(service.clone());
        let response = outside.oneshot(request("/", "1")).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let again = layer.layer(service).oneshot(request("/", "1")).await.unwrap();
        assert_eq!(again.headers().get("dedupe-status"), None);
        assert_eq!((again.status(), inner.load(Ordering::SeqCst)), (StatusCode::OK, 2));
    }
}

#[tokio::test]
async fn a_catch_panic_inside_is_a_failure_like_any_other() {
    let runs = Arc::new(AtomicUsize::new(0));
    let app = Router::new()
        .route(
            "/",
            post(|State(runs): State<Arc<AtomicUsize>>| async move {
                assert!(runs.fetch_add(1, Ordering::SeqCst) > 0, "the first run panics");
            }),
        )
        .layer(ServiceBuilder::new().layer(layer()).layer(CatchPanicLayer::new()))
        .with_state(runs.clone());
    for status in [500, 200, 200] {
        let response = app.clone().oneshot(request("/", "1")).await.unwrap();
        assert_eq!(response.status().as_u16(), status);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn the_service_that_was_made_ready_is_the_one_that_is_called() {
    let (mock, mut handle) =
        tower_test::mock::pair::<Request<DedupeBody<Empty<Bytes>>>, Response<Full<Bytes>>>();
    let mut service = layer().layer(mock);
    let request = |id: &str| Request::post("/").header("x-id", id).body(Empty::new()).unwrap();

    handle.allow(0);
    assert!(tokio_test_pending(&mut service).await, "not ready while the inner service is not");
    for id in ["1", "2"] {
        handle.allow(1);
        // The mock panics if a clone is called that was not made ready.
        let answered = service.ready().await.unwrap().call(request(id));
        let serve = async {
            let (request, respond) = handle.next_request().await.expect("the mock is called");
            assert_eq!(request.extensions().get::<ClaimInfo>().unwrap().key(), id);
            respond.send_response(Response::new(Full::from("served")));
        };
        let (response, ()) = tokio::join!(answered, serve);
        assert_eq!(response.unwrap().status(), StatusCode::OK);
    }

    // A duplicate uses up the readiness and calls nobody.
    handle.allow(1);
    let response = service.ready().await.unwrap().call(request("1")).await.unwrap();
    assert_eq!(response.headers()["dedupe-status"], "duplicate");
}

async fn tokio_test_pending<S: Service<Request<Empty<Bytes>>>>(service: &mut S) -> bool {
    let ready = tokio::time::timeout(Duration::from_millis(10), service.ready());
    ready.await.is_err()
}

#[tokio::test]
async fn an_inner_limit_is_waited_for_before_the_claim() {
    let service = ServiceBuilder::new()
        .layer(layer())
        .layer(tower::limit::ConcurrencyLimitLayer::new(1))
        .service(service_fn(|_: Request<DedupeBody<Empty<Bytes>>>| async {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }));
    let request = |id: usize| {
        Request::post("/").header("x-id", id.to_string()).body(Empty::<Bytes>::new()).unwrap()
    };
    let calls = (0..20).map(|id| tokio::spawn(service.clone().oneshot(request(id))));
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap().unwrap().status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_shed_request_frees_its_key() {
    let service = ServiceBuilder::new()
        .layer(layer())
        .layer(tower::load_shed::LoadShedLayer::new())
        .layer(tower::limit::ConcurrencyLimitLayer::new(1))
        .service(service_fn(|_: Request<DedupeBody<Empty<Bytes>>>| async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }));
    let request =
        |id: &str| Request::post("/").header("x-id", id).body(Empty::<Bytes>::new()).unwrap();
    let mut first = service.clone();
    let first = first.ready().await.unwrap().call(request("1"));
    let shed = service.clone().oneshot(request("2")).await;
    assert!(shed.unwrap_err().is::<tower::load_shed::error::Overloaded>());
    first.await.unwrap();
    let again = service.oneshot(request("2")).await.unwrap();
    assert_eq!(again.headers().get("dedupe-status"), None, "it runs");
}

#[test]
fn the_types_are_what_the_hosts_ask_for() {
    fn host<T: Clone + Send + Sync + 'static>() {}
    fn future<T: Send + 'static>(_: &T) {}
    fn unpin<T: Unpin>() {}
    host::<DedupeLayer>();
    host::<Dedupe<tower::util::BoxCloneSyncService<(), (), ()>>>();
    unpin::<DedupeBody<Full<Bytes>>>();
    let mut service = layer().layer(service_fn(|_: Request<DedupeBody<Empty<Bytes>>>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    }));
    future(&service.call(Request::new(Empty::new())));
    assert!(format!("{:?}", DedupeBody::<Full<Bytes>>::default()).contains("0 bytes"));
}

/// Serves a service on bare hyper, as often as there are connections.
async fn serve_on_hyper<S, R>(service: S) -> SocketAddr
where
    S: Service<Request<Incoming>, Response = Response<R>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    R: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(service.clone());
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service);
            tokio::spawn(connection);
        }
    });
    address
}

#[tokio::test]
async fn on_a_bare_hyper_server_a_header_key_leaves_an_endless_body_alone() {
    // The handler answers when it has seen the first piece of the body.
    let handler = service_fn(|request: Request<DedupeBody<Incoming>>| async move {
        let info = request.extensions().get::<ClaimInfo>().unwrap().key().to_owned();
        let piece = request.into_body().frame().await.unwrap().unwrap().into_data().unwrap();
        Ok::<_, Infallible>(Response::new(Full::from(format!("{info}: {}", piece.len()))))
    });
    let address = serve_on_hyper(layer().layer(handler)).await;

    let (mut from, mut to) = TcpStream::connect(address).await.unwrap().into_split();
    let head = "POST / HTTP/1.1\r\nhost: h\r\nx-id: 1\r\ntransfer-encoding: chunked\r\n\r\n";
    to.write_all(head.as_bytes()).await.unwrap();
    let endless = tokio::spawn(async move {
        // It ends when the server has had enough.
        while to.write_all(b"5\r\nhello\r\n").await.is_ok() {
            tokio::task::yield_now().await;
        }
    });
    let mut answer = Vec::new();
    while !answer.windows(3).any(|piece| piece == b"1: ") {
        assert!(from.read_buf(&mut answer).await.unwrap() > 0, "no answer before the body's end");
    }
    assert!(answer.starts_with(b"HTTP/1.1 200 OK"));
    drop(from);
    endless.await.unwrap();
}

#[tokio::test]
async fn on_a_bare_hyper_server_events_are_handled_once() {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let handler = service_fn(move |_: Request<DedupeBody<Incoming>>| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("handled"))) }
    });
    let address = serve_on_hyper(layer().layer(handler)).await;
    for status in [None, Some("duplicate")] {
        let answer = http::post(address, "/", &[("x-id", "1")], "{}").await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.header("dedupe-status"), status);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}
