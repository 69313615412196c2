//! The copied pattern, in the same situation as the layer: so that the test is seen to be able to
//! fail.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use deadpool_postgres::Pool;
use tokio::{
    runtime::{self, Runtime},
    time::{Instant, sleep},
};
use tower_dedupe::{DedupeLayer, KeySource, PgStore};

use crate::support::{
    http::{self, try_post},
    postgres,
};

/// What the handlers of one process do, and have done.
#[derive(Clone)]
struct Work {
    effects: Arc<AtomicUsize>,
    /// The process dies before the work is done.
    dies: bool,
    begun: Arc<AtomicUsize>,
}

impl Work {
    async fn work(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        if self.dies {
            std::future::pending::<()>().await;
        }
        self.effects.fetch_add(1, Ordering::SeqCst);
    }
}

/// `INSERT … ON CONFLICT DO NOTHING`, and 200 for what was there.
fn the_copied_pattern(store: &PgStore, work: Work) -> Router {
    async fn handle(State((pool, work)): State<(Pool, Work)>, headers: HeaderMap) -> StatusCode {
        let key = headers["x-id"].to_str().unwrap();
        let insert = "INSERT INTO seen (event_key) VALUES ($1) ON CONFLICT DO NOTHING";
        let inserted = pool.get().await.unwrap().execute(insert, &[&key]).await.unwrap();
        if inserted == 0 {
            return StatusCode::OK;
        }
        work.work().await;
        StatusCode::OK
    }
    Router::new().route("/", post(handle)).with_state((store.pool().clone(), work))
}

fn the_layer(store: &PgStore, work: Work) -> Router {
    let layer = DedupeLayer::new(store.clone(), KeySource::header("x-id").unwrap())
        .lease(Duration::from_millis(500));
    let handle = |State(work): State<Work>| async move { work.work().await };
    Router::new().route("/", post(handle).layer(layer)).with_state(work)
}

/// Delivers an event to a process that dies between claim and work, then to its successor until
/// that says it was handled. Gives the effects the event has had.
fn effects_of_an_event_whose_process_dies(app: fn(&PgStore, Work) -> Router) -> usize {
    let test = runtime();
    let db = test.block_on(postgres::schema());
    test.block_on(async {
        db.store().await;
        let table = "CREATE TABLE seen (event_key text PRIMARY KEY)";
        db.client().await.batch_execute(table).await.unwrap();
    });
    let effects = Arc::new(AtomicUsize::new(0));
    let process = |dies| {
        let work = Work { effects: effects.clone(), dies, begun: Arc::default() };
        // A runtime of its own: dropped, its tasks are gone at once, and no destructor gets to
        // speak to the database.
        let process = runtime();
        let address = process.block_on(async {
            let store = db.builder().connect(db.url()).await.unwrap();
            http::serve(app(&store, work.clone())).await
        });
        (process, address, work)
    };

    let (process_one, address, work) = process(true);
    let delivery = test.spawn(deliver(address));
    test.block_on(async {
        let waiting = Instant::now();
        while work.begun.load(Ordering::SeqCst) == 0 {
            assert!(waiting.elapsed() < Duration::from_secs(20));
            sleep(Duration::from_millis(5)).await;
        }
    });
    process_one.shutdown_background();
    assert!(test.block_on(delivery).unwrap().is_err(), "the dead have answered");

    let (_process_two, address, _) = process(false);
    test.block_on(async {
        let waiting = Instant::now();
        while deliver(address).await.unwrap() != StatusCode::OK {
            assert!(waiting.elapsed() < Duration::from_secs(20));
            sleep(Duration::from_millis(20)).await;
        }
    });
    effects.load(Ordering::SeqCst)
}

async fn deliver(to: SocketAddr) -> std::io::Result<StatusCode> {
    Ok(try_post(to, "/", &[("x-id", "1")], "{}").await?.status)
}

fn runtime() -> Runtime {
    runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn the_copied_pattern_loses_the_event() {
    assert_eq!(effects_of_an_event_whose_process_dies(the_copied_pattern), 0);
}

#[test]
fn the_layer_does_not_lose_it() {
    assert_eq!(effects_of_an_event_whose_process_dies(the_layer), 1);
}
