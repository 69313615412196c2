//! The promises, I1 to I5, on Postgres and over real HTTP.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, extract::State, http::StatusCode, routing::post};
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_dedupe::{
    ClaimInfo, ClaimStore, DedupeLayer, EventKey, InProgress, KeySource, PgStore, Scope,
    claim::{Claim, ClaimOutcome, Held, State as RowState},
    store::Completion,
};

use crate::support::{
    http::{self, Answer},
    postgres::{self, Schema},
};

/// A key in the scope of [`layer`].
fn event(key: &str) -> EventKey {
    EventKey::new(Scope::new("hook").unwrap(), key).unwrap()
}

fn layer(store: &PgStore) -> DedupeLayer {
    DedupeLayer::new(store.clone(), KeySource::header("x-id").unwrap())
        .scope("hook")
        .lease(Duration::from_secs(60))
}

/// A handler under a test's control, behind a layer on a real server.
#[derive(Clone)]
struct Handler {
    begun: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
    attempts: Arc<std::sync::Mutex<Vec<u32>>>,
    /// A run ends when it gets a permit.
    gate: Arc<Semaphore>,
}

impl Handler {
    /// Runs end at once.
    fn free() -> Self {
        Self::behind(Semaphore::MAX_PERMITS)
    }

    /// So many runs end.
    fn behind(permits: usize) -> Self {
        Self {
            begun: Arc::default(),
            ended: Arc::default(),
            attempts: Arc::default(),
            gate: Arc::new(Semaphore::new(permits)),
        }
    }

    async fn run(State(this): State<Self>, info: ClaimInfo) {
        this.begun.fetch_add(1, Ordering::SeqCst);
        this.attempts.lock().unwrap().push(info.attempt());
        this.gate.acquire().await.unwrap().forget();
        this.ended.fetch_add(1, Ordering::SeqCst);
    }

    async fn has_begun(&self, times: usize) {
        until("the handler has begun", || async { self.begun.load(Ordering::SeqCst) >= times })
            .await;
    }

    fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    async fn serve(&self, layer: DedupeLayer) -> Server {
        let app = Router::new().route("/", post(Self::run).layer(layer)).with_state(self.clone());
        Server(http::serve(app).await)
    }
}

#[derive(Clone, Copy)]
struct Server(std::net::SocketAddr);

impl Server {
    async fn deliver(self, key: &str) -> Answer {
        http::post(self.0, "/", &[("x-id", key)], "{}").await
    }

    /// Delivers until the answer is a success, as a sender does.
    async fn deliver_until_success(self, key: &str) -> Answer {
        let started = Instant::now();
        loop {
            let answer = self.deliver(key).await;
            if answer.status.is_success() {
                return answer;
            }
            assert!(started.elapsed() < BOUND, "no success in time, but {answer:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Waits for a condition, within a bound.
async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let waiting = async {
        while !condition().await {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(BOUND, waiting)
        .await
        .unwrap_or_else(|_| panic!("in {BOUND:?} it never was so: {what}"));
}

async fn state(store: &PgStore, key: &str) -> Option<RowState> {
    store.show(&event(key)).await.unwrap().map(|record| record.state)
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_sender_that_retries_until_success_has_had_its_event_handled() {
    let db = postgres::schema().await;
    let store = db.store().await;
    // Every way in which an attempt fails, one after another.
    let runs = Arc::new(AtomicUsize::new(0));
    let completed = Arc::new(AtomicUsize::new(0));
    let (counted, done) = (runs.clone(), completed.clone());
    let app = Router::new().route(
        "/",
        post(move || async move {
            let answer = match counted.fetch_add(1, Ordering::SeqCst) {
                0 => return StatusCode::INTERNAL_SERVER_ERROR,
                1 => panic!("the second run panics"),
                2 => return StatusCode::FOUND,
                3 => return StatusCode::BAD_REQUEST,
                _ => StatusCode::ACCEPTED,
            };
            done.fetch_add(1, Ordering::SeqCst);
            answer
        })
        .layer(layer(&store)),
    );
    let server = Server(http::serve(app).await);
    let mut failures = 0;
    let answer = loop {
        match http::try_post(server.0, "/", &[("x-id", "1")], "{}").await {
            Ok(answer) if answer.status.is_success() => break answer,
            // A panic closes the connection, other failures are answered.
            _ => failures += 1,
        }
        assert!(failures < 100);
    };
    assert_eq!((failures, answer.status), (4, StatusCode::ACCEPTED));
    assert_eq!((runs.load(Ordering::SeqCst), completed.load(Ordering::SeqCst)), (5, 1));
    assert_eq!(state(&store, "1").await, Some(RowState::Done));

    let duplicate = server.deliver("1").await;
    assert_eq!(duplicate.status, StatusCode::ACCEPTED);
    assert_eq!(duplicate.header("dedupe-status"), Some("duplicate"));
    assert_eq!(runs.load(Ordering::SeqCst), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_done_is_final_until_its_retention_ends() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let handler = Handler::free();
    let server = handler.serve(layer(&store)).await;
    server.deliver("1").await;
    // Long after the lease, in front of another replica, and many at once.
    db.elapse(Duration::from_secs(29 * 24 * 60 * 60)).await;
    let replica = handler.serve(layer(&db.store().await)).await;
    let mut deliveries = JoinSet::new();
    for n in 0..50 {
        let server = if n % 2 == 0 { server } else { replica };
        deliveries.spawn(async move { server.deliver("1").await });
    }
    for answer in deliveries.join_all().await {
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.header("dedupe-status"), Some("duplicate"));
    }
    assert_eq!(handler.ended(), 1);

    db.elapse(Duration::from_secs(2 * 24 * 60 * 60)).await;
    assert_eq!(server.deliver("1").await.header("dedupe-status"), None);
    assert_eq!(*handler.attempts.lock().unwrap(), [1, 1], "past its retention it is a new event");
}

#[tokio::test(flavor = "multi_thread")]
async fn i3_of_many_holders_one_token_marks_it_done() {
    let db = postgres::schema().await;
    // Eight processes, all after the same keys, with leases so short that they overtake each other:
    // twenty keys, and more until somebody was overtaken.
    let overtaken = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for worker in 0..8u64 {
        let (store, overtaken) = (db.store().await, overtaken.clone());
        workers.spawn(async move {
            let mut marked = Vec::new();
            for n in 0..1_000 {
                if n >= 20 && overtaken.load(Ordering::SeqCst) > 0 {
                    break;
                }
                let key = event(&n.to_string());
                loop {
                    let lease = Duration::from_millis(4);
                    let claim = Claim::new(key.clone(), lease, Duration::from_secs(60));
                    let attempt = match store.claim(&claim).await.unwrap() {
                        ClaimOutcome::Claimed { attempt } => attempt,
                        ClaimOutcome::InProgress { .. } => continue,
                        other => {
                            assert_eq!(other, ClaimOutcome::done(Some(200)));
                            break;
                        }
                    };
                    // Most stand still for longer than their lease; if all did, none would end.
                    if attempt % 3 != 0 {
                        sleep(Duration::from_millis((n * 5 + worker * 3) % 32)).await;
                    }
                    let completion = Completion::new(Some(200), Duration::from_secs(60));
                    match store.complete(&key, claim.token, completion).await.unwrap() {
                        Held::Yes => marked.push(n),
                        Held::Lost => drop(overtaken.fetch_add(1, Ordering::SeqCst)),
                    }
                }
            }
            marked
        });
    }
    let mut times = BTreeMap::new();
    for n in workers.join_all().await.into_iter().flatten() {
        *times.entry(n).or_insert(0) += 1;
    }
    assert!(overtaken.load(Ordering::SeqCst) > 0, "the test has tested nothing");
    assert!(times.len() >= 20 && times.values().all(|marks| *marks == 1), "{times:?}");
}

/// The ways in which a holder can lose its key.
#[derive(Clone, Copy, Debug)]
enum Superseded {
    TakenOver,
    FailedAndClaimedAnew,
    ForgottenAndClaimedAnew,
    PurgedAndClaimedAnew,
    Forgotten,
    DoneByAnother,
}

#[tokio::test(flavor = "multi_thread")]
async fn i4_a_superseded_holder_that_wakes_up_changes_nothing() {
    use Superseded::*;
    let db = postgres::schema().await;
    let store = db.store().await;
    let day = Duration::from_secs(24 * 60 * 60);
    for how in [
        TakenOver,
        FailedAndClaimedAnew,
        ForgottenAndClaimedAnew,
        PurgedAndClaimedAnew,
        Forgotten,
        DoneByAnother,
    ] {
        let key = event(&format!("{how:?}"));
        let zombie = Claim::new(key.clone(), Duration::from_secs(60), day);
        let heir = Claim::new(key.clone(), Duration::from_secs(60), day);
        assert_eq!(store.claim(&zombie).await.unwrap(), ClaimOutcome::Claimed { attempt: 1 });
        match how {
            TakenOver | DoneByAnother => db.elapse(Duration::from_secs(61)).await,
            FailedAndClaimedAnew => {
                assert!(store.fail(&key, zombie.token, day).await.unwrap());
            }
            ForgottenAndClaimedAnew | Forgotten => assert!(store.forget(&key).await.unwrap()),
            PurgedAndClaimedAnew => {
                db.elapse(3 * day).await;
                assert!(store.purge(1000).await.unwrap() > 0);
            }
        }
        if !matches!(how, Forgotten) {
            let claimed = store.claim(&heir).await.unwrap();
            assert!(matches!(claimed, ClaimOutcome::Claimed { .. }), "{how:?}: {claimed:?}");
        }
        if let DoneByAnother = how {
            let done = Completion::new(Some(201), day);
            assert_eq!(store.complete(&key, heir.token, done).await.unwrap(), Held::Yes);
        }

        let before = row(&db, &key).await;
        let completion = Completion::new(Some(299), day);
        let completed = store.complete(&key, zombie.token, completion).await.unwrap();
        assert_eq!(completed, Held::Lost, "{how:?}");
        assert!(!store.fail(&key, zombie.token, day).await.unwrap(), "{how:?}");
        assert_eq!(store.renew(&[zombie]).await.unwrap(), [Held::Lost], "{how:?}");
        assert_eq!(row(&db, &key).await, before, "{how:?}");
    }
}

/// Everything that the database has on a key.
async fn row(db: &Schema, key: &EventKey) -> Option<String> {
    let client = db.client().await;
    let rows = client
        .query("SELECT t::text FROM processed_events AS t WHERE event_key = $1", &[&key.as_str()])
        .await
        .unwrap();
    rows.first().map(|row| row.get(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn i5_after_a_holder_dies_the_first_delivery_after_its_lease_is_claimed() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let handler = Handler::free();
    let server = handler.serve(layer(&store)).await;
    // A process claims and is gone.
    let lease = Duration::from_millis(800);
    let claim = Claim::new(event("1"), lease, Duration::from_secs(60));
    let claimed_at = Instant::now();
    store.claim(&claim).await.unwrap();

    let while_it_lives = server.deliver("1").await;
    assert_eq!(while_it_lives.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(while_it_lives.header("dedupe-status"), Some("in-progress"));
    assert_eq!(while_it_lives.header("retry-after"), Some("1"));

    server.deliver_until_success("1").await;
    assert!(claimed_at.elapsed() >= lease, "the lease was not respected");
    assert_eq!(*handler.attempts.lock().unwrap(), [2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn i5_a_failed_attempt_frees_the_key_at_once() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let handler = Handler::behind(0);
    // Dropped in mid-run, inline, with a lease that no test would wait for.
    let server = handler.serve(layer(&store).detached(false)).await;
    http::post_and_hang_up(server.0, "/", &[("x-id", "1")], "{}", Duration::from_millis(50)).await;
    handler.has_begun(1).await;
    until("the key is free", || async { state(&store, "1").await == Some(RowState::Failed) }).await;
    handler.gate.add_permits(1);
    let again = server.deliver_until_success("1").await;
    assert_eq!(again.header("dedupe-status"), None);
    assert_eq!((handler.ended(), &handler.attempts.lock().unwrap()[..]), (1, &[1, 2][..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sender_that_hangs_up_does_not_cut_the_handler_in_two() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let handler = Handler::behind(0);
    let server = handler.serve(layer(&store)).await;
    http::post_and_hang_up(server.0, "/", &[("x-id", "1")], "{}", Duration::from_millis(50)).await;
    handler.has_begun(1).await;
    handler.gate.add_permits(1);
    until("done", || async { state(&store, "1").await == Some(RowState::Done) }).await;
    let retry = server.deliver("1").await;
    assert_eq!((retry.status, retry.header("dedupe-status")), (StatusCode::OK, Some("duplicate")));
    assert_eq!(handler.ended(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_deliveries_at_once_run_the_handler_once() {
    let db = postgres::schema().await;
    let store = db.store().await;
    for (policy, in_progress) in [
        (InProgress::Unavailable, StatusCode::SERVICE_UNAVAILABLE),
        (InProgress::Conflict, StatusCode::CONFLICT),
    ] {
        let handler = Handler::behind(0);
        let layer = layer(&store).scope(format!("{policy:?}")).in_progress(policy);
        let server = handler.serve(layer).await;
        let mut deliveries = JoinSet::new();
        for _ in 0..200 {
            deliveries.spawn(async move { server.deliver("1").await });
        }
        // The handler is at work until all others have their answer.
        let mut answers = BTreeMap::<_, usize>::new();
        for _ in 0..199 {
            let answer = deliveries.join_next().await.unwrap().unwrap();
            *answers.entry(answer.status).or_default() += 1;
        }
        assert_eq!(answers, BTreeMap::from([(in_progress, 199)]));
        handler.gate.add_permits(1);
        assert_eq!(deliveries.join_next().await.unwrap().unwrap().status, StatusCode::OK);
        assert_eq!((handler.begun.load(Ordering::SeqCst), handler.ended()), (1, 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_deliveries_that_wait_all_hear_of_the_one_success() {
    let db = postgres::schema().await;
    let handler = Handler::behind(1);
    let layer = layer(&db.store().await).in_progress(InProgress::Wait(BOUND));
    let server = handler.serve(layer).await;
    let mut deliveries = JoinSet::new();
    for _ in 0..200 {
        deliveries.spawn(async move { server.deliver("1").await });
    }
    for answer in deliveries.join_all().await {
        assert_eq!(answer.status, StatusCode::OK);
    }
    assert_eq!(handler.begun.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_events_at_once_pass_a_pool_of_four() {
    let db = postgres::schema().await;
    db.store().await;
    let store = db.builder().pool_size(4).connect(db.url()).await.unwrap();
    let handler = Handler::free();
    let server = handler.serve(layer(&store)).await;
    let mut deliveries = JoinSet::new();
    for n in 0..500 {
        deliveries.spawn(async move { server.deliver(&n.to_string()).await });
    }
    for answer in deliveries.join_all().await {
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    }
    assert_eq!(handler.ended(), 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_slower_than_its_lease_is_not_overtaken() {
    let db = postgres::schema().await;
    let lease = Duration::from_millis(600);
    let handler = Handler::behind(0);
    let layer = layer(&db.store().await).lease(lease);
    let server = handler.serve(layer.clone()).await;
    let replica = handler.serve(layer).await;
    let slow = tokio::spawn(async move { server.deliver("1").await });
    handler.has_begun(1).await;
    let begun = Instant::now();
    while begun.elapsed() < 3 * lease {
        let answer = replica.deliver("1").await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
        sleep(Duration::from_millis(50)).await;
    }
    handler.gate.add_permits(1);
    assert_eq!(slow.await.unwrap().status, StatusCode::OK);
    assert_eq!(replica.deliver("1").await.header("dedupe-status"), Some("duplicate"));
    assert_eq!((handler.begun.load(Ordering::SeqCst), handler.ended()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_cannot_be_renewed_does_not_cost_its_neighbours_their_leases() {
    let db = postgres::schema().await;
    let lease = Duration::from_millis(900);
    let handler = Handler::behind(0);
    let layer = layer(&db.store().await).lease(lease);
    let server = handler.serve(layer.clone()).await;
    let replica = handler.serve(layer).await;
    let mut slow = JoinSet::new();
    for n in 0..20 {
        slow.spawn(async move { server.deliver(&n.to_string()).await.status });
    }
    handler.has_begun(20).await;
    // Somebody locks one of the rows and keeps it for a while.
    let mut client = db.client().await;
    let open = client.transaction().await.unwrap();
    open.batch_execute("SELECT FROM processed_events WHERE event_key = '7' FOR UPDATE")
        .await
        .unwrap();
    let begun = Instant::now();
    while begun.elapsed() < 3 * lease {
        for n in (0..20).filter(|n| *n != 7) {
            let answer = replica.deliver(&n.to_string()).await;
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{n}: {answer:?}");
        }
    }
    open.rollback().await.unwrap();
    handler.gate.add_permits(20);
    assert!(slow.join_all().await.iter().all(|status| *status == StatusCode::OK));
    assert_eq!(handler.ended(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_handler_is_overtaken_after_max_hold_and_then_changes_nothing() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let (lease, max_hold) = (Duration::from_millis(300), Duration::from_millis(900));
    let layer = layer(&store).lease(lease).max_hold(max_hold);
    let (hung, healthy) = (Handler::behind(0), Handler::free());
    let (hanging, server) = (hung.serve(layer.clone()).await, healthy.serve(layer).await);
    let first = tokio::spawn(async move { hanging.deliver("1").await });
    hung.has_begun(1).await;
    let begun = Instant::now();
    server.deliver_until_success("1").await;
    assert!(begun.elapsed() >= max_hold - lease, "it was renewed until max_hold");
    assert_eq!(*healthy.attempts.lock().unwrap(), [2]);

    let before = row(&db, &event("1")).await;
    hung.gate.add_permits(1);
    first.await.unwrap();
    assert_eq!(row(&db, &event("1")).await, before);
    assert_eq!(server.deliver("1").await.header("dedupe-status"), Some("duplicate"));
}

const BOUND: Duration = Duration::from_secs(20);
