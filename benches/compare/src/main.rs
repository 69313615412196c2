//! What a request costs with this crate's layer, and with axum-idempotent, each with a store in
//! memory:
//!
//!     cargo run --release --manifest-path benches/compare/Cargo.toml
//!
//! They do not do the same. axum-idempotent replays the response of a client with a session, which is
//! here in the request; it claims nothing, so two equal requests at once both run. The figures are
//! good within one run.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{
    Router,
    body::Body,
    http::{Request, Response, header},
    routing::post,
};
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use divan::{AllocProfiler, Bencher};
use ruts::{CookieOptions, Session, SessionLayer, store::Ttl, store::moka::MokaStore};
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;
use tower_cookies::CookieManagerLayer;
use tower_dedupe::{DedupeLayer, KeySource, MemoryStore};

#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::Divan::from_args().run_benches();
}

#[divan::bench]
fn bare(bencher: Bencher<'_, '_>) {
    let app = Router::new().route("/", post(handle));
    calls(bencher, &runtime(), &app, || request(&next_id(), ""));
}

#[divan::bench]
fn tower_dedupe_fresh(bencher: Bencher<'_, '_>) {
    calls(bencher, &runtime(), &deduplicated(), || request(&next_id(), ""));
}

#[divan::bench]
fn tower_dedupe_duplicate(bencher: Bencher<'_, '_>) {
    calls(bencher, &runtime(), &deduplicated(), || request("the-same", ""));
}

/// What sessions cost, on which axum-idempotent stands.
#[divan::bench]
fn sessions_alone(bencher: Bencher<'_, '_>) {
    let runtime = runtime();
    let (app, cookie) = with_session(&runtime, |router| router);
    calls(bencher, &runtime, &app, || request(&next_id(), &cookie));
}

#[divan::bench]
fn axum_idempotent_fresh(bencher: Bencher<'_, '_>) {
    let runtime = runtime();
    let (app, cookie) = with_session(&runtime, idempotent);
    calls(bencher, &runtime, &app, || request(&next_id(), &cookie));
}

#[divan::bench]
fn axum_idempotent_duplicate(bencher: Bencher<'_, '_>) {
    let runtime = runtime();
    let (app, cookie) = with_session(&runtime, idempotent);
    calls(bencher, &runtime, &app, || request("the-same", &cookie));
}

async fn handle() -> &'static str {
    "handled"
}

fn deduplicated() -> Router {
    let key = KeySource::header("idempotency-key").unwrap();
    let layer = DedupeLayer::new(MemoryStore::new(), key).scope("bench");
    Router::new().route("/", post(handle).layer(layer))
}

fn idempotent(router: Router) -> Router {
    let options = IdempotentOptions::default()
        .use_idempotency_key_header(Some("idempotency-key"), true)
        .expire_after(3600);
    router.layer(IdempotentLayer::<MokaStore>::new(options))
}

/// A router with sessions, and the cookie of one.
fn with_session(runtime: &Runtime, layer: impl Fn(Router) -> Router) -> (Router, String) {
    async fn sign_in(session: Session<MokaStore>) {
        let name = String::from("somebody");
        session.set("user", &name, Ttl::new(3600).unwrap(), None).await.unwrap();
    }
    let store = Arc::new(MokaStore::builder().build());
    let cookie = CookieOptions::build().name("session").max_age(3600).path("/");
    let app = layer(Router::new().route("/", post(handle)))
        .route("/sign-in", post(sign_in))
        .layer(SessionLayer::new(store).with_cookie_options(cookie))
        .layer(CookieManagerLayer::new());
    let sign_in = Request::post("/sign-in").body(Body::empty()).unwrap();
    let response: Response<Body> =
        runtime.block_on(app.clone().oneshot(sign_in)).unwrap_or_else(|never| match never {});
    let cookie = response.headers()[header::SET_COOKIE].to_str().unwrap();
    let cookie = cookie.split(';').next().unwrap().to_owned();
    (app, cookie)
}

fn request(id: &str, cookie: &str) -> Request<Body> {
    let request = Request::post("/").header("idempotency-key", id);
    let request = if cookie.is_empty() { request } else { request.header(header::COOKIE, cookie) };
    request.body(Body::from("{}")).unwrap()
}

fn next_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{:036x}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().build().unwrap()
}

fn calls(
    bencher: Bencher<'_, '_>,
    runtime: &Runtime,
    app: &Router,
    request: impl FnMut() -> Request<Body>,
) {
    let answer = |request| {
        let answer: Response<Body> =
            runtime.block_on(app.clone().oneshot(request)).unwrap_or_else(|never| match never {});
        answer
    };
    let mut request = request;
    assert_eq!(answer(request()).status(), 200);
    bencher.with_inputs(request).bench_local_values(answer);
}
