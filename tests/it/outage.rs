//! The database is away, in each way in which it can be: the answer is 503, the handler is not
//! called, and service resumes by itself.

use std::{
    slice::from_ref,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, extract::State, http::StatusCode, routing::post};
use tokio::{
    sync::Semaphore,
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep},
};
use tower_dedupe::{
    ClaimInfo, ClaimStore, DedupeLayer, EventKey, KeySource, PgStore, Scope,
    claim::{Claim, ClaimOutcome, Held, State as RowState},
    store::Completion,
};

use crate::support::{
    cut::{Moment, Proxy, Traffic},
    http::{self, Answer},
    postgres::{self, Schema},
    throwaway::{NoServer, Throwaway},
};

fn event(key: &str) -> EventKey {
    EventKey::new(Scope::new("hook").unwrap(), key).unwrap()
}

/// A service on a server of its own, and what its handler has done.
struct Service {
    address: std::net::SocketAddr,
    handler: Handler,
    store: PgStore,
}

#[derive(Clone, Default)]
struct Handler {
    runs: Arc<AtomicUsize>,
    attempts: Arc<std::sync::Mutex<Vec<u32>>>,
    gate: Option<Arc<Semaphore>>,
}

impl Service {
    async fn on(store: PgStore, handler: Handler) -> Self {
        let layer = DedupeLayer::new(store.clone(), KeySource::header("x-id").unwrap())
            .scope("hook")
            .lease(Duration::from_secs(10));
        let run = |State(this): State<Handler>, info: ClaimInfo| async move {
            this.runs.fetch_add(1, Ordering::SeqCst);
            this.attempts.lock().unwrap().push(info.attempt());
            if let Some(gate) = &this.gate {
                gate.acquire().await.unwrap().forget();
            }
        };
        let app = Router::new().route("/", post(run).layer(layer)).with_state(handler.clone());
        Self { address: http::serve(app).await, handler, store }
    }

    async fn deliver(&self, key: &str) -> Answer {
        http::post(self.address, "/", &[("x-id", key)], "{}").await
    }

    fn runs(&self) -> usize {
        self.handler.runs.load(Ordering::SeqCst)
    }

    /// A delivery while the database is away.
    async fn is_away(&self) {
        let before = self.runs();
        let asked = Instant::now();
        let answer = self.deliver("while it is away").await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.header("dedupe-status"), Some("store-unavailable"));
        assert_eq!(answer.header("retry-after"), Some("5"));
        assert_eq!(self.runs(), before, "the handler was called without a claim");
        assert!(asked.elapsed() < Duration::from_secs(4), "a wait without a bound");
    }

    /// Deliveries succeed again, soon after the database is back.
    async fn resumes(&self) {
        let back = Instant::now();
        let before = self.runs();
        while self.deliver("while it is away").await.status != StatusCode::OK {
            assert!(back.elapsed() < Duration::from_secs(2), "not resumed within 2 s");
            sleep(Duration::from_millis(20)).await;
        }
        assert!(back.elapsed() < Duration::from_secs(2), "not resumed within 2 s");
        assert_eq!(self.runs(), before + 1);
    }

    /// Every one of these keys is done, and known to be.
    async fn knows(&self, keys: &[String]) {
        let before = self.runs();
        for key in keys {
            let answer = self.deliver(key).await;
            assert_eq!(answer.status, StatusCode::OK);
            assert_eq!(answer.header("dedupe-status"), Some("duplicate"));
        }
        assert_eq!(self.runs(), before);
    }
}

/// A server that a test may stop and kill.
#[derive(Clone)]
struct Server(Arc<Throwaway>);

impl Server {
    async fn start() -> Self {
        Self(Arc::new(spawn_blocking(postgres::own).await.unwrap()))
    }

    async fn make<T: Send + 'static>(
        &self,
        it: impl FnOnce(&Throwaway) -> Result<T, NoServer> + Send + 'static,
    ) -> T {
        let server = self.0.clone();
        spawn_blocking(move || it(&server)).await.unwrap().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_killed_and_started_again_it_resumes_and_done_keys_survive() {
    let server = Server::start().await;
    let db = Schema::on(&server.0.url()).await;
    let service = Service::on(db.store().await, Handler::default()).await;
    let mut done = Vec::new();
    for round in 0..2 {
        for n in 0..10 {
            let key = format!("{round} {n}");
            assert_eq!(service.deliver(&key).await.status, StatusCode::OK);
            done.push(key);
        }
        if round == 0 {
            server.make(Throwaway::stop).await;
        } else {
            server.make(Throwaway::kill).await;
        }
        for _ in 0..3 {
            service.is_away().await;
        }
        server.make(Throwaway::start_again).await;
        service.resumes().await;
        service.knows(&done).await;
        service.store.forget(&event("while it is away")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_under_load_no_event_is_lost_and_none_runs_twice_after_its_success() {
    let server = Server::start().await;
    let db = Schema::on(&server.0.url()).await;
    let service = Arc::new(Service::on(db.store().await, Handler::default()).await);
    let mut senders = JoinSet::new();
    for n in 0..60 {
        let service = service.clone();
        senders.spawn(async move {
            let key = n.to_string();
            sleep(Duration::from_millis(n * 4)).await;
            let began = Instant::now();
            while service.deliver(&key).await.status != StatusCode::OK {
                assert!(began.elapsed() < Duration::from_secs(40));
                sleep(Duration::from_millis(50)).await;
            }
            key
        });
    }
    sleep(Duration::from_millis(120)).await;
    server.make(Throwaway::kill).await;
    server.make(Throwaway::start_again).await;
    let keys = senders.join_all().await;
    assert!(service.runs() >= 60);
    for key in &keys {
        let record = service.store.show(&event(key)).await.unwrap().unwrap();
        assert_eq!(record.state, RowState::Done, "{key} was acknowledged");
    }
    service.knows(&keys).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn done_is_on_disk_before_the_answer_whatever_the_database_defaults_to() {
    let server = Server::start().await;
    let db = Schema::on(&server.0.url()).await;
    db.store().await;
    let url = format!("{}?options=-c%20synchronous_commit%3Doff", db.bare_url());
    for named in [false, true] {
        let store = db.builder().named_statements(named).connect(&url).await.unwrap();
        let service = Service::on(store, Handler::default()).await;
        let mut done = Vec::new();
        for n in 0..50 {
            let key = format!("{named} {n}");
            assert_eq!(service.deliver(&key).await.status, StatusCode::OK);
            done.push(key);
        }
        server.make(Throwaway::kill).await;
        server.make(Throwaway::start_again).await;
        service.knows(&done).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_it_is_answered_in_time_and_thawed_it_resumes() {
    let server = Server::start().await;
    let db = Schema::on(&server.0.url()).await;
    db.store().await;
    let timeout = Duration::from_millis(700);
    let store = db.builder().timeout(timeout).connect(db.bare_url()).await.unwrap();
    let service = Service::on(store, Handler::default()).await;
    assert_eq!(service.deliver("1").await.status, StatusCode::OK);
    let frozen = server.make(Throwaway::freeze).await;
    for _ in 0..2 {
        service.is_away().await;
    }
    spawn_blocking(|| drop(frozen)).await.unwrap();
    service.resumes().await;
    service.knows(&["1".into()]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_back_before_the_settle_timeout_still_gets_its_done_mark() {
    let server = Server::start().await;
    let db = Schema::on(&server.0.url()).await;
    let gate = Arc::new(Semaphore::new(0));
    let handler = Handler { gate: Some(gate.clone()), ..Handler::default() };
    let service = Arc::new(Service::on(db.store().await, handler).await);
    let delivered = tokio::spawn({
        let service = service.clone();
        async move { service.deliver("1").await }
    });
    while service.runs() == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    // The handler ends while the database is away, and its answer waits for the mark.
    server.make(Throwaway::kill).await;
    gate.add_permits(1);
    server.make(Throwaway::start_again).await;
    assert_eq!(delivered.await.unwrap().status, StatusCode::OK);
    let record = service.store.show(&event("1")).await.unwrap().unwrap();
    assert_eq!(record.state, RowState::Done);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_swallows_everything_is_answered_in_time() {
    let db = postgres::schema().await;
    db.store().await;
    let proxy = Proxy::before(postgres::shared().port()).await;
    let store = db
        .builder()
        .timeout(Duration::from_millis(700))
        .connect_timeout(Duration::from_millis(300))
        .connect(&proxy.instead_of_host(db.bare_url()))
        .await
        .unwrap();
    let service = Service::on(store, Handler::default()).await;
    assert_eq!(service.deliver("1").await.status, StatusCode::OK);
    for traffic in [Traffic::Vanishes, Traffic::IsClosed] {
        proxy.traffic(traffic);
        for _ in 0..3 {
            service.is_away().await;
        }
        proxy.traffic(Traffic::Flows);
        service.resumes().await;
        service.knows(&["1".into()]).await;
        service.store.forget(&event("while it is away")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_went_silent_is_thrown_away_with_its_idle_sisters() {
    for connections in [1, 4] {
        let db = postgres::schema().await;
        db.store().await;
        let proxy = Proxy::before(postgres::shared().port()).await;
        let store = db
            .builder()
            .pool_size(connections)
            .timeout(Duration::from_millis(700))
            .connect(&proxy.instead_of_host(db.bare_url()))
            .await
            .unwrap();
        let service = Service::on(store, Handler::default()).await;
        let mut deliveries = JoinSet::new();
        for n in 0..40 {
            let to = service.address;
            deliveries.spawn(async move {
                http::post(to, "/", &[("x-id", &n.to_string())], "{}").await.status
            });
        }
        assert!(deliveries.join_all().await.iter().all(|status| *status == StatusCode::OK));
        proxy.traffic(Traffic::OldVanishes);
        service.is_away().await;
        service.resumes().await;
        service.knows(&["1".into()]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_off_at_any_point_an_event_runs_once_and_is_done() {
    let db = postgres::schema().await;
    db.store().await;
    for moment in [Moment::BeforeTheServer, Moment::BeforeTheAnswer] {
        let mut write = 1;
        loop {
            let proxy = Proxy::before(postgres::shared().port()).await;
            let url = proxy.instead_of_host(db.bare_url());
            let store = db.builder().pool_size(1).connect_lazy(&url).unwrap();
            let service = Service::on(store, Handler::default()).await;
            // One event, to have a connection; the cut comes somewhere in the second one's way.
            assert_eq!(service.deliver(&format!("{moment:?} {write} first")).await.status, 200);
            let key = format!("{moment:?} {write}");
            proxy.cut_at(write, moment);
            let answer = service.deliver(&key).await;
            assert_eq!(answer.status, StatusCode::OK, "{key}: {answer:?}");
            let (ended, again) = (proxy.cuts_no_more(), service.deliver(&key).await);
            if !ended {
                break;
            }
            assert_eq!(again.header("dedupe-status"), Some("duplicate"), "{key}");
            assert_eq!(*service.handler.attempts.lock().unwrap(), [1, 1], "{key}");
            write += 1;
        }
        assert!(write > 2, "a claim and a done mark are two writes, and {write} were cut");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_that_was_cut_off_is_asked_again_with_the_same_answer() {
    let db = postgres::schema().await;
    db.store().await;
    let proxy = Proxy::before(postgres::shared().port()).await;
    let store = db.builder().pool_size(1).connect(&proxy.instead_of_host(db.bare_url())).await;
    let store = store.unwrap();
    let minute = Duration::from_secs(60);
    let claim = Claim::new(event("1"), minute, minute);
    let other = Claim::new(event("1"), minute, minute);
    let cut = |moment| {
        assert!(proxy.cuts_no_more(), "the last operation was not cut");
        proxy.cut_at(1, moment);
    };
    for moment in [Moment::BeforeTheAnswer, Moment::BeforeTheServer] {
        store.forget(&claim.key).await.unwrap();
        cut(moment);
        assert_eq!(store.claim(&claim).await.unwrap(), ClaimOutcome::Claimed { attempt: 1 });
        cut(moment);
        let outcome = store.claim(&other).await.unwrap();
        assert!(matches!(outcome, ClaimOutcome::InProgress { .. }));
        cut(moment);
        assert_eq!(store.renew(from_ref(&claim)).await.unwrap(), [Held::Yes]);
        cut(moment);
        let completion = Completion::new(Some(201), minute);
        let completed = store.complete(&claim.key, claim.token, completion).await.unwrap();
        assert_eq!(completed, Held::Yes);
        cut(moment);
        let done = ClaimOutcome::done(Some(201));
        assert_eq!(store.claim(&other).await.unwrap(), done);
        cut(moment);
        let record = store.show(&claim.key).await.unwrap().unwrap();
        assert_eq!((record.state, record.attempt), (RowState::Done, 1));
    }
}

#[tokio::test]
async fn a_claim_is_one_round_trip_and_a_takeover_two() {
    let db = postgres::schema().await;
    db.store().await;
    let proxy = Proxy::before(postgres::shared().port()).await;
    let store = db.builder().pool_size(1).connect(&proxy.instead_of_host(db.bare_url())).await;
    let store = store.unwrap();
    let minute = Duration::from_secs(60);
    let claim = || Claim::new(event("1"), minute, minute);
    let first = claim();
    let mut before = proxy.round_trips();
    let mut round_trips = || {
        let now = proxy.round_trips();
        now - std::mem::replace(&mut before, now)
    };

    store.claim(&first).await.unwrap();
    assert_eq!(round_trips(), 1, "a new key");
    store.claim(&claim()).await.unwrap();
    assert_eq!(round_trips(), 1, "one in progress");
    store.renew(from_ref(&first)).await.unwrap();
    assert_eq!(round_trips(), 1, "a renewal");
    store.fail(&first.key, first.token, minute).await.unwrap();
    assert_eq!(round_trips(), 1, "a failure");
    let second = claim();
    store.claim(&second).await.unwrap();
    assert_eq!(round_trips(), 2, "a takeover");
    store.complete(&second.key, second.token, Completion::new(None, minute)).await.unwrap();
    assert_eq!(round_trips(), 1, "a completion");
    store.claim(&claim()).await.unwrap();
    assert_eq!(round_trips(), 1, "a duplicate");
}
