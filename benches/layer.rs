//! What the layer itself costs a request, in time and allocations:
//!
//!     cargo bench --bench layer
//!
//! The store is in memory, so that nothing but the layer is measured. The figures are good as
//! differences of one run: what is counted for `fresh` less what is counted for `bare`.

#![allow(clippy::unwrap_used, unreachable_pub, missing_docs)]

use std::{
    convert::Infallible,
    sync::atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use divan::{AllocProfiler, Bencher, black_box};
use http::{Request, Response};
use http_body_util::Full;
use tokio::runtime::Builder;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_dedupe::{DedupeLayer, KeySource, MemoryStore};

#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

type Body = Full<Bytes>;

/// The handler without the layer.
#[divan::bench]
fn bare(bencher: Bencher<'_, '_>) {
    calls(bencher, service_fn(handle::<Body>), || delivery(&next_id()));
}

/// An event that is new: claimed, run, marked done.
#[divan::bench]
fn fresh(bencher: Bencher<'_, '_>) {
    calls(bencher, layer().layer(service_fn(handle)), || delivery(&next_id()));
}

/// An event that is done.
#[divan::bench]
fn duplicate(bencher: Bencher<'_, '_>) {
    calls(bencher, layer().layer(service_fn(handle)), || delivery("the same"));
}

/// A request that the layer has nothing to do with.
#[divan::bench]
fn passed_through(bencher: Bencher<'_, '_>) {
    let get = || Request::get("/").body(Body::default()).unwrap();
    calls(bencher, layer().layer(service_fn(handle)), get);
}

async fn handle<B>(request: Request<B>) -> Result<Response<Body>, Infallible> {
    black_box(request);
    Ok(Response::new(Body::default()))
}

fn layer() -> DedupeLayer<MemoryStore> {
    let key = KeySource::header("x-github-delivery").unwrap();
    DedupeLayer::new(MemoryStore::new(), key).scope("bench")
}

fn delivery(id: &str) -> Request<Body> {
    Request::post("/").header("x-github-delivery", id).body(Body::from("{}")).unwrap()
}

fn next_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{:036x}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Measures calls one after the other on one thread, without the making of requests.
fn calls<S>(bencher: Bencher<'_, '_>, service: S, request: impl FnMut() -> Request<Body>)
where
    S: Service<Request<Body>, Error = Infallible> + Clone,
{
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    bencher.with_inputs(request).bench_local_values(|request| {
        runtime.block_on(service.clone().oneshot(request)).unwrap_or_else(|never| match never {})
    });
}
