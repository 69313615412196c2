//! Transaction mode: the handler's rows exist if and only if their event is done, whatever goes
//! wrong in between.

use std::{
    convert::Infallible,
    future::pending,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use ::http::Request;
use axum::{
    Router,
    extract::State as Shared,
    handler::Handler,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use http_body_util::Full;
use tokio::{
    sync::{Mutex, Semaphore, mpsc, oneshot},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_postgres::types::Type;
use tower::{Layer, ServiceExt};
use tower_dedupe::{
    ClaimInfo, ClaimStore, ConfigError, DedupeBody, DedupeLayer, Deduplicator, Duplicate,
    Fingerprint, InProgress, KeySource, Outcome, PgStore, RunError, StoreDown, Transaction,
    TransactionError,
    claim::{Claim, ClaimOutcome, State},
    store::{Completion, NotCommittedKind, PgStoreBuilder},
};

use crate::support::{
    claims::{MINUTE, claim_of, event},
    cut::{Moment, Proxy, Traffic},
    http::{self, Answer},
    postgres::{self, Schema},
};

/// A schema with a table of orders, and a store on it.
struct Shop {
    schema: Schema,
    store: PgStore,
}

impl Shop {
    async fn open() -> Self {
        Self::with(|builder| builder).await
    }

    async fn with(settings: impl Fn(PgStoreBuilder) -> PgStoreBuilder) -> Self {
        Self::at(postgres::schema().await, settings, |url| url).await
    }

    /// Connected by a URL of its own, such as one that leads through a proxy.
    async fn at(
        schema: Schema,
        settings: impl Fn(PgStoreBuilder) -> PgStoreBuilder,
        url: impl Fn(String) -> String,
    ) -> Self {
        // So that its connections can be told from others.
        let named = format!("?application_name={}&", schema.name());
        let named = schema.url().replacen('?', &named, 1);
        let store = settings(schema.builder()).connect(&url(named)).await.unwrap();
        store.migrate().await.unwrap();
        let tables = "CREATE TABLE orders (event_key text NOT NULL);
                      CREATE TABLE stock (item text PRIMARY KEY, left_over int4 NOT NULL);
                      CREATE TABLE receipts (event_key text UNIQUE DEFERRABLE INITIALLY DEFERRED);
                      INSERT INTO stock VALUES ('a', 100), ('b', 100)";
        schema.client().await.batch_execute(tables).await.unwrap();
        Self { schema, store }
    }

    fn layer(&self) -> DedupeLayer {
        DedupeLayer::new(self.store.clone(), KeySource::header("x-id").unwrap())
            .scope("s")
            .transactional()
    }

    /// Serves the usual handler.
    async fn serve(&self) -> Address {
        serve(self.layer(), take_order).await
    }

    async fn orders(&self, key: &str) -> i64 {
        let count = "SELECT count(*) FROM orders WHERE event_key = $1";
        self.schema.client().await.query_one(count, &[&key]).await.unwrap().get(0)
    }

    async fn state(&self, key: &str) -> Option<State> {
        self.store.show(&event(key)).await.unwrap().map(|record| record.state)
    }

    /// No order, and nothing that would keep the event from running.
    async fn has_nothing_of(&self, key: &str) {
        assert_eq!(self.orders(key).await, 0, "{key}");
        let state = self.state(key).await;
        assert!(matches!(state, None | Some(State::Failed)), "{key}: {state:?}");
    }

    /// The event runs at the next delivery, and then is done.
    async fn takes(&self, address: Address, key: &str) {
        let answer = address.deliver(key, "").await;
        assert_eq!(answer.status, StatusCode::CREATED, "{key}: {:?}", answer.body);
        assert_eq!((self.orders(key).await, self.state(key).await), (1, Some(State::Done)));
    }

    /// Every connection is back in the pool, and none is in a transaction.
    async fn is_whole(&self) {
        let client = self.schema.client().await;
        let sessions = "SELECT count(*), count(*) FILTER (WHERE state <> 'idle')
                        FROM pg_stat_activity WHERE application_name = $1";
        eventually(async || {
            let sessions = client.query_one(sessions, &[&self.schema.name()]).await.unwrap();
            let pool = self.store.pool().status();
            pool.available == pool.size
                && (sessions.get::<_, i64>(0), sessions.get::<_, i64>(1)) == (pool.size as i64, 0)
        })
        .await;
    }
}

#[derive(Clone, Copy)]
struct Address(SocketAddr);

impl Address {
    async fn deliver(self, key: &str, wish: &str) -> Answer {
        http::post(self.0, "/", &[("x-id", key), ("x-demo", wish)], "{}").await
    }
}

async fn serve<T: 'static>(layer: DedupeLayer, handler: impl Handler<T, ()>) -> Address {
    Address(http::serve(Router::new().route("/", post(handler).layer(layer))).await)
}

async fn eventually(holds: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds().await {
        assert!(Instant::now() < deadline, "it does not come true");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Writes an order and goes wrong as it is told.
async fn take_order(info: ClaimInfo, order: Transaction, headers: HeaderMap) -> Response {
    match write_order(&info, &order, headers["x-demo"].to_str().unwrap()).await {
        Ok(status) => status.into_response(),
        Err(error) => error.into_response(),
    }
}

async fn write_order(
    info: &ClaimInfo,
    order: &Transaction,
    wish: &str,
) -> Result<StatusCode, TransactionError> {
    assert_eq!(order.execute(INSERT, &[&info.key()]).await?, 1);
    match wish {
        "" => Ok(StatusCode::CREATED),
        "fail" => Ok(StatusCode::INTERNAL_SERVER_ERROR),
        "redirect" => Ok(StatusCode::SEE_OTHER),
        "panic" => panic!("as told"),
        "error" => order.execute("SELECT 1/0", &[]).await.map(|_| StatusCode::CREATED),
        "swallow" => {
            order.execute("INSERT INTO no_such_table VALUES (1)", &[]).await.unwrap_err();
            Ok(StatusCode::CREATED)
        }
        "commit" => order.batch_execute("COMMIT").await.map(|()| StatusCode::CREATED),
        "commit and fail" => order.batch_execute("COMMIT").await.map(|()| StatusCode::IM_A_TEAPOT),
        "commit and begin" => {
            order.batch_execute("COMMIT; BEGIN; SELECT pg_current_xact_id()").await?;
            Ok(StatusCode::CREATED)
        }
        "roll back" => order.batch_execute("ROLLBACK").await.map(|()| StatusCode::CREATED),
        "receipt" => {
            order.execute("INSERT INTO receipts VALUES ('the same')", &[]).await?;
            Ok(StatusCode::CREATED)
        }
        "hang" => pending().await,
        "sleep" => {
            sleep(Duration::from_millis(3)).await;
            Ok(StatusCode::CREATED)
        }
        other => unreachable!("{other}"),
    }
}

const INSERT: &str = "INSERT INTO orders VALUES ($1)";

#[tokio::test]
async fn an_order_and_its_done_mark_are_one() {
    for named in [false, true] {
        let shop = Shop::with(|builder| builder.named_statements(named)).await;
        let address = shop.serve().await;
        for n in 0..5 {
            shop.takes(address, &n.to_string()).await;
            // What the first was answered with, and no second order.
            let again = address.deliver(&n.to_string(), "").await;
            assert_eq!(again.status, StatusCode::CREATED);
            assert_eq!(again.header("dedupe-status"), Some("duplicate"));
            assert_eq!(shop.orders(&n.to_string()).await, 1);
        }
        shop.is_whole().await;
    }
}

#[tokio::test]
async fn what_fails_leaves_nothing_and_the_next_delivery_succeeds() {
    let shop = Shop::open().await;
    let address = shop.serve().await;
    let failures = [
        ("fail", 500, None),
        ("redirect", 303, None),
        ("error", 500, None),
        ("swallow", 500, Some("not-committed")),
        ("roll back", 500, Some("not-committed")),
    ];
    for (wish, status, why) in failures {
        let answer = address.deliver(wish, wish).await;
        assert_eq!((answer.status.as_u16(), answer.header("dedupe-status")), (status, why));
        shop.has_nothing_of(wish).await;
        shop.takes(address, wish).await;
    }
    shop.is_whole().await;
    assert_eq!(shop.store.pool().status().size, 1, "connections were thrown away");
}

#[tokio::test]
async fn a_panic_is_rolled_back_and_goes_on() {
    let shop = Shop::open().await;
    let address = shop.serve().await;
    // Without a layer that catches it the connection is closed.
    let headers = [("x-id", "1"), ("x-demo", "panic")];
    assert!(http::try_post(address.0, "/", &headers, "{}").await.is_err());
    shop.has_nothing_of("1").await;
    shop.takes(address, "1").await;
    shop.is_whole().await;
}

#[tokio::test]
async fn a_sender_that_hangs_up_cuts_nothing_unless_it_is_told_to() {
    let shop = Shop::open().await;
    let (started, mut starts) = mpsc::unbounded_channel();
    let gate = Arc::new(Semaphore::new(0));
    let waiting = async |layer: DedupeLayer| {
        let (started, gate) = (started.clone(), gate.clone());
        serve(layer, async move |info: ClaimInfo, order: Transaction| {
            order.execute(INSERT, &[&info.key()]).await.unwrap();
            started.send(()).unwrap();
            gate.acquire().await.unwrap().forget();
        })
        .await
    };
    let headers = [("x-id", "1"), ("x-demo", "")];

    let inline = waiting(shop.layer().detached(false)).await;
    let sending = tokio::spawn(async move { http::try_post(inline.0, "/", &headers, "{}").await });
    starts.recv().await.unwrap();
    sending.abort();
    let address = shop.serve().await;
    eventually(async || address.deliver("1", "").await.status == StatusCode::CREATED).await;
    assert_eq!(shop.orders("1").await, 1);

    let detached = waiting(shop.layer()).await;
    let headers = [("x-id", "2"), ("x-demo", "")];
    let sending =
        tokio::spawn(async move { http::try_post(detached.0, "/", &headers, "{}").await });
    starts.recv().await.unwrap();
    sending.abort();
    gate.add_permits(1);
    eventually(async || shop.state("2").await == Some(State::Done)).await;
    assert_eq!(shop.orders("2").await, 1);
    shop.is_whole().await;
}

/// The server would go on with the statement, and with the key's lock, for a minute.
#[tokio::test]
async fn a_statement_that_nobody_waits_for_any_more_is_called_off() {
    let shop = Shop::open().await;
    let (started, mut starts) = mpsc::unbounded_channel();
    let sleeper = async move |order: Transaction| {
        started.send(()).unwrap();
        order.execute("SELECT pg_sleep(60)", &[]).await.unwrap();
    };
    let sleeping = serve(shop.layer().detached(false), sleeper).await;
    let headers = [("x-id", "1"), ("x-demo", "")];
    let sending =
        tokio::spawn(async move { http::try_post(sleeping.0, "/", &headers, "{}").await });
    starts.recv().await.unwrap();
    let asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
    let client = shop.schema.client().await;
    eventually(async || client.query_one(asleep, &[]).await.unwrap().get::<_, i64>(0) > 0).await;
    sending.abort();
    let address = shop.serve().await;
    eventually(async || address.deliver("1", "").await.status == StatusCode::CREATED).await;
}

/// The key does not wait for whoever keeps the handle of a delivery that was cut.
#[tokio::test]
async fn a_handle_that_outlives_its_cut_delivery_holds_nothing() {
    let shop = Shop::open().await;
    let (hand_out, mut handed_out) = mpsc::unbounded_channel();
    let handler = async move |order: Transaction| {
        order.execute(INSERT, &[&"1"]).await.unwrap();
        hand_out.send(order).unwrap();
        pending::<()>().await
    };
    let keeping = serve(shop.layer().detached(false), handler).await;
    let headers = [("x-id", "1"), ("x-demo", "")];
    let sending = tokio::spawn(async move { http::try_post(keeping.0, "/", &headers, "{}").await });
    let kept = handed_out.recv().await.unwrap();
    sending.abort();
    let address = shop.serve().await;
    eventually(async || address.deliver("1", "").await.status == StatusCode::CREATED).await;
    assert_eq!(shop.orders("1").await, 1);
    let late = kept.execute(INSERT, &[&"late"]).await.unwrap_err();
    assert!(matches!(late, TransactionError::Settled), "{late}");
    shop.is_whole().await;
}

#[tokio::test]
async fn a_commit_by_hand_is_noticed_and_the_key_is_free() {
    let shop = Shop::open().await;
    let address = shop.serve().await;
    for (wish, status, why) in [
        ("commit", 500, Some("not-committed")),
        ("commit and begin", 500, Some("not-committed")),
        // A failure by itself: the handler's own.
        ("commit and fail", 418, None),
    ] {
        let answer = address.deliver(wish, wish).await;
        assert_eq!((answer.status.as_u16(), answer.header("dedupe-status")), (status, why));
        // Documented: what was committed by hand stays, and is not done.
        assert_eq!((shop.orders(wish).await, shop.state(wish).await), (1, Some(State::Failed)));
        let again = address.deliver(wish, "").await;
        assert_eq!(again.status, StatusCode::CREATED);
        assert_eq!((shop.orders(wish).await, shop.state(wish).await), (2, Some(State::Done)));
    }
    shop.is_whole().await;
}

#[tokio::test]
async fn a_hundred_deliveries_at_once_make_one_order_and_none_waits() {
    // Through one store, and through stores that know nothing of each other.
    for stores in [1, 4] {
        let shop = Shop::with(|builder| builder.pool_size(8)).await;
        let gate = Arc::new(Semaphore::new(0));
        let mut addresses = Vec::new();
        for _ in 0..stores {
            let store = shop.schema.builder().connect(shop.schema.url()).await.unwrap();
            let layer = DedupeLayer::new(store, KeySource::header("x-id").unwrap());
            let gate = gate.clone();
            let wait = async move |info: ClaimInfo, order: Transaction| {
                order.execute(INSERT, &[&info.key()]).await.unwrap();
                gate.acquire().await.unwrap().forget();
            };
            addresses.push(serve(layer.scope("s").transactional(), wait).await);
        }
        let mut deliveries = JoinSet::new();
        for n in 0..100 {
            let address = addresses[n % stores];
            deliveries.spawn(async move {
                let started = Instant::now();
                (address.deliver("1", "").await, started.elapsed())
            });
        }
        // The first waits for the gate, which opens when all others have their answers.
        for _ in 0..99 {
            let (answer, took) = deliveries.join_next().await.unwrap().unwrap();
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(answer.header("dedupe-status"), Some("in-progress"));
            assert!(answer.header("retry-after").is_some());
            println!("{took:?}");
        }
        gate.add_permits(1);
        let (answer, _) = deliveries.join_next().await.unwrap().unwrap();
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!((shop.orders("1").await, shop.state("1").await), (1, Some(State::Done)));
    }
}

#[tokio::test]
async fn a_kept_handle_gives_an_error_and_never_another_requests_connection() {
    let shop = Shop::with(|builder| builder.pool_size(1)).await;
    let kept = Arc::new(Mutex::new(None));
    let keeper = kept.clone();
    let keep = async move |order: Transaction| {
        order.execute(INSERT, &[&"1"]).await.unwrap();
        *keeper.lock().await = Some(order);
    };
    let keeping = serve(shop.layer(), keep).await;
    assert_eq!(keeping.deliver("1", "").await.status, StatusCode::OK);
    let kept = kept.lock().await.take().unwrap();
    // While the one connection is idle, and while another request has it.
    let late = kept.execute(INSERT, &[&"late"]).await.unwrap_err();
    assert!(matches!(late, TransactionError::Settled), "{late}");
    let (order_of_other, other) = oneshot::channel();
    let (go_on, told) = oneshot::channel::<()>();
    let once = Arc::new(Mutex::new(Some((order_of_other, told))));
    let busy = serve(shop.layer(), async move |order: Transaction| {
        let (started, told) = once.lock().await.take().unwrap();
        started.send(order).unwrap();
        told.await.unwrap();
    })
    .await;
    let second = tokio::spawn(busy.deliver_static("2"));
    let theirs = other.await.unwrap();
    for error in [
        kept.query(INSERT, &[&"late"]).await.unwrap_err(),
        kept.batch_execute("SELECT 1").await.unwrap_err(),
        kept.copy_in("COPY orders FROM STDIN").await.map(drop).unwrap_err(),
        kept.savepoint().await.map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, TransactionError::Settled), "{error}");
    }
    drop(theirs);
    go_on.send(()).unwrap();
    assert_eq!(second.await.unwrap().status, StatusCode::OK);
    assert_eq!(shop.orders("late").await, 0);
    shop.is_whole().await;
}

impl Address {
    async fn deliver_static(self, key: &'static str) -> Answer {
        self.deliver(key, "").await
    }
}

#[tokio::test]
async fn a_task_in_the_middle_of_a_statement_means_no_commit() {
    let shop = Shop::with(|builder| builder.pool_size(1)).await;
    let (ended, mut ends) = mpsc::unbounded_channel();
    let spawn = async move |info: ClaimInfo, order: Transaction| {
        order.execute(INSERT, &[&info.key()]).await.unwrap();
        let ended = ended.clone();
        let (polled, was_polled) = oneshot::channel();
        tokio::spawn(async move {
            let mut sleeping = Box::pin(order.execute("SELECT pg_sleep(60)", &[]));
            let first = timeout(Duration::from_millis(50), &mut sleeping).await;
            assert!(first.is_err());
            polled.send(()).unwrap();
            ended.send(sleeping.await.map_err(|error| error.to_string())).unwrap();
        });
        was_polled.await.unwrap();
    };
    let address = serve(shop.layer(), spawn).await;
    let answer = address.deliver("1", "").await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer.header("dedupe-status"), Some("not-committed"));
    // The statement is called off, so that the connection is soon there for others.
    assert!(ends.recv().await.unwrap().unwrap_err().contains("57014"));
    shop.has_nothing_of("1").await;
    let address = shop.serve().await;
    eventually(async || address.deliver("1", "").await.status == StatusCode::CREATED).await;
    assert_eq!(shop.orders("1").await, 1);
    shop.is_whole().await;
}

#[tokio::test]
async fn savepoints_undo_their_part_and_no_more() {
    let shop = Shop::open().await;
    let write = async |info: ClaimInfo, order: Transaction| {
        let fail = "INSERT INTO no_such_table VALUES (1)";
        order.execute(INSERT, &[&info.key()]).await?;
        // Released, rolled back, dropped: by hand and by an error, and one within another.
        let kept = order.savepoint().await?;
        order.execute(INSERT, &[&"kept"]).await?;
        kept.release().await?;
        let undone = order.savepoint().await?;
        order.execute(INSERT, &[&"undone"]).await?;
        order.execute(fail, &[]).await.unwrap_err();
        undone.roll_back().await?;
        let in_parts = async {
            let _outer = order.savepoint().await?;
            order.execute(INSERT, &[&"undone"]).await?;
            let _inner = order.savepoint().await?;
            order.execute(fail, &[]).await?;
            Ok::<_, TransactionError>(())
        };
        in_parts.await.unwrap_err();
        order.execute(INSERT, &[&"kept"]).await?;
        // Dropped last of all.
        let _last = order.savepoint().await?;
        order.execute(INSERT, &[&"undone"]).await?;
        Ok::<_, TransactionError>(())
    };
    let address = serve(shop.layer(), write).await;
    assert_eq!(address.deliver("1", "").await.status, StatusCode::OK);
    assert_eq!(shop.orders("1").await, 1);
    assert_eq!((shop.orders("kept").await, shop.orders("undone").await), (2, 0));
    shop.is_whole().await;
}

#[tokio::test]
async fn rows_are_copied_in_and_out() {
    let shop = Shop::with(|builder| builder.named_statements(true)).await;
    let copy = async |info: ClaimInfo, order: Transaction| {
        let mut copy = order.copy_in("COPY orders FROM STDIN").await?;
        copy.send(format!("{}\ncop", info.key())).await?;
        copy.send("ied\n").await?;
        assert_eq!(copy.finish().await?, 2);
        let mut copy = order.copy_out("COPY orders TO STDOUT").await?;
        let mut told = Vec::new();
        while let Some(data) = copy.next().await? {
            told.extend_from_slice(&data);
        }
        drop(copy);
        let insert = order.prepare(INSERT).await?;
        let (first, second) =
            tokio::join!(order.execute(&insert, &[&"a"]), order.execute(&insert, &[&"b"]));
        assert_eq!((first?, second?), (1, 1));
        let typed = [(&"c" as &(dyn tokio_postgres::types::ToSql + Sync), Type::TEXT)];
        assert_eq!(order.execute_typed(INSERT, &typed).await?, 1);
        let count = "SELECT count(*) FROM orders";
        assert_eq!(order.query_one(count, &[]).await?.get::<_, i64>(0), 5);
        assert_eq!(order.query_typed(count, &[]).await?.len(), 1);
        assert!(order.query_opt("SELECT 1 WHERE false", &[]).await?.is_none());
        Ok::<_, TransactionError>(String::from_utf8(told).unwrap())
    };
    let address = serve(shop.layer(), copy).await;
    let answer = address.deliver("1", "").await;
    assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"1\ncopied\n"[..]));
    shop.is_whole().await;
}

#[tokio::test]
async fn a_copy_that_is_left_open_means_no_commit() {
    let shop = Shop::open().await;
    let (kept, mut keeps) = mpsc::unbounded_channel();
    let leave = async move |order: Transaction| {
        order.execute(INSERT, &[&"1"]).await.unwrap();
        kept.send(order.copy_in("COPY orders FROM STDIN").await.unwrap()).unwrap();
    };
    let address = serve(shop.layer(), leave).await;
    assert_eq!(address.deliver("1", "").await.header("dedupe-status"), Some("not-committed"));
    drop(keeps.recv().await);
    shop.has_nothing_of("1").await;
    shop.is_whole().await;
}

#[tokio::test]
async fn what_the_database_refuses_at_the_commit_is_no_success() {
    let shop = Shop::open().await;
    let address = shop.serve().await;
    assert_eq!(address.deliver("1", "receipt").await.status, StatusCode::CREATED);
    let answer = address.deliver("2", "receipt").await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer.header("dedupe-status"), Some("not-committed"));
    assert!(!String::from_utf8_lossy(&answer.body).contains("the same"), "it quotes the row");
    shop.has_nothing_of("2").await;
    shop.takes(address, "2").await;
    shop.is_whole().await;
}

/// Two handlers read both items and take from one each: write skew, which only a serializable
/// transaction refuses.
#[tokio::test]
async fn serialization_conflicts_are_503_and_a_retry_succeeds() {
    for named in [false, true] {
        let serializable =
            |url| format!("{url}%20-c%20default_transaction_isolation%3Dserializable");
        let settings = |builder: PgStoreBuilder| builder.named_statements(named);
        let shop = Shop::at(postgres::schema().await, settings, serializable).await;
        let both = Arc::new(tokio::sync::Barrier::new(2));
        let skew = async move |info: ClaimInfo, order: Transaction| {
            order.execute(INSERT, &[&info.key()]).await?;
            let sum = "SELECT sum(left_over) FROM stock";
            let sum: i64 = order.query_one(sum, &[]).await?.get(0);
            if info.attempt() == 1 && sum == 200 {
                // The second time there may be nobody to wait for.
                let _ = timeout(Duration::from_secs(2), both.wait()).await;
            }
            let take = "UPDATE stock SET left_over = 0 WHERE item = $1";
            order.execute(take, &[&info.key()]).await?;
            // Not what the server said: a failure that some senders take as final.
            Ok::<_, TransactionError>(StatusCode::OK)
        };
        let final_for_some = async move |info: ClaimInfo, order: Transaction| {
            skew(info, order).await.unwrap_or(StatusCode::BAD_REQUEST)
        };
        let address = serve(shop.layer(), final_for_some).await;
        let (a, b) = tokio::join!(address.deliver("a", ""), address.deliver("b", ""));
        let (lost, key) = match (a.status, b.status) {
            (StatusCode::OK, _) => (b, "b"),
            (_, StatusCode::OK) => (a, "a"),
            both => panic!("{both:?}"),
        };
        assert_eq!(lost.status, StatusCode::SERVICE_UNAVAILABLE, "{:?}", lost.body);
        assert_eq!(lost.header("dedupe-status"), Some("transaction-conflict"));
        assert!(lost.header("retry-after").is_some());
        shop.has_nothing_of(key).await;
        assert_eq!(address.deliver(key, "").await.status, StatusCode::OK);
        assert_eq!((shop.orders("a").await, shop.orders("b").await), (1, 1));
        shop.is_whole().await;
    }
}

#[tokio::test]
async fn claims_of_different_events_are_no_conflict_at_serializable() {
    let serializable = |url| format!("{url}%20-c%20default_transaction_isolation%3Dserializable");
    let settings = |builder: PgStoreBuilder| builder.pool_size(8);
    let shop = Shop::at(postgres::schema().await, settings, serializable).await;
    let address = shop.serve().await;
    let mut deliveries = JoinSet::new();
    for n in 0..400 {
        deliveries.spawn(async move { address.deliver(&format!("{n}"), "").await.status });
    }
    let answers = deliveries.join_all().await;
    let conflicts = answers.iter().filter(|status| **status != StatusCode::CREATED).count();
    println!("{conflicts} of 400");
    assert!(conflicts <= 40, "{conflicts} of 400 events got in each other's way");
}

#[tokio::test]
async fn deadlocks_are_503_and_a_retry_succeeds() {
    let shop = Shop::open().await;
    let both = Arc::new(tokio::sync::Barrier::new(2));
    let cross = async move |info: ClaimInfo, order: Transaction| {
        let take = "UPDATE stock SET left_over = left_over - 1 WHERE item = $1";
        let (first, second) = if info.key() == "a" { ("a", "b") } else { ("b", "a") };
        order.execute(take, &[&first]).await?;
        let _ = timeout(Duration::from_secs(2), both.wait()).await;
        order.execute(take, &[&second]).await?;
        Ok::<_, TransactionError>(())
    };
    let address = serve(shop.layer(), cross).await;
    let (a, b) = tokio::join!(address.deliver("a", ""), address.deliver("b", ""));
    let mut statuses = [a.status.as_u16(), b.status.as_u16()];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 503]);
    for key in ["a", "b"] {
        assert_eq!(address.deliver(key, "").await.status, StatusCode::OK);
    }
    let left = "SELECT sum(left_over) FROM stock";
    let client = shop.schema.client().await;
    assert_eq!(client.query_one(left, &[]).await.unwrap().get::<_, i64>(0), 196);
}

#[tokio::test]
async fn a_connection_lost_before_the_commit_is_503_and_nothing_is_left() {
    let shop = Shop::open().await;
    let schema = shop.schema.url().to_owned();
    let end = async move |info: ClaimInfo, order: Transaction| {
        order.execute(INSERT, &[&info.key()]).await.unwrap();
        let pid = order.query_one("SELECT pg_backend_pid()", &[]).await.unwrap();
        let pid: i32 = pid.get(0);
        let (client, connection) =
            tokio_postgres::connect(&schema, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let end = "SELECT pg_terminate_backend($1, 10000)";
        client.execute(end, &[&pid]).await.unwrap();
        // Whether the handler learns of it, and whatever it makes of that.
        match info.key() {
            "1" => StatusCode::OK,
            _ => match order.execute(INSERT, &[&info.key()]).await {
                Ok(_) => StatusCode::OK,
                Err(_) => StatusCode::BAD_REQUEST,
            },
        }
    };
    let address = serve(shop.layer(), end).await;
    for key in ["1", "2"] {
        let answer = address.deliver(key, "").await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{:?}", answer.body);
        assert_eq!(answer.header("dedupe-status"), Some("store-unavailable"));
        shop.has_nothing_of(key).await;
    }
    let address = shop.serve().await;
    shop.takes(address, "1").await;
    shop.is_whole().await;
}

/// Every write of a delivery is cut, before the server and before its answer: no answer of success
/// without an order, no order without done, and never two.
#[tokio::test]
async fn a_connection_cut_anywhere_keeps_order_and_done_together() {
    for moment in [Moment::BeforeTheServer, Moment::BeforeTheAnswer] {
        for write in 1.. {
            let proxy = Proxy::before(postgres::shared().port()).await;
            let settings = |b: PgStoreBuilder| b.pool_size(2).timeout(Duration::from_secs(2));
            let shop =
                Shop::at(postgres::schema().await, settings, |url| proxy.instead_of_host(&url))
                    .await;
            let address = shop.serve().await;
            // So that connecting is not what is cut.
            shop.takes(address, "before").await;
            proxy.cut_at(write, moment);
            let answer = address.deliver("1", "").await;
            if !proxy.cuts_no_more() {
                assert!(write > 4, "only {write} writes");
                break;
            }
            let direct = shop.schema.builder().connect(shop.schema.url()).await.unwrap();
            let done = direct.show(&event("1")).await.unwrap();
            let done = done.is_some_and(|record| record.state == State::Done);
            let orders = shop.orders("1").await;
            assert_eq!(orders, i64::from(done), "{moment:?} {write}");
            assert_eq!(answer.status.is_success(), done, "{moment:?} {write}: {answer:?}");
            eventually(async || address.deliver("1", "").await.status == StatusCode::CREATED).await;
            assert_eq!(shop.orders("1").await, 1);
        }
    }
}

/// The COMMIT has reached the server and its answer is lost: the layer looks what became of it.
#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_looked_up() {
    let proxy = Proxy::before(postgres::shared().port()).await;
    let settings = |b: PgStoreBuilder| b.pool_size(1).timeout(Duration::from_millis(500));
    let shop =
        Shop::at(postgres::schema().await, settings, |url| proxy.instead_of_host(&url)).await;
    let address = shop.serve().await;
    shop.takes(address, "before").await;
    let at_commit = {
        let proxy = Arc::new(proxy);
        let cut = proxy.clone();
        let handler = async move |info: ClaimInfo, order: Transaction| {
            order.execute(INSERT, &[&info.key()]).await.unwrap();
            // The done mark is the first write from here on, the COMMIT the second.
            cut.cut_at(2, Moment::BeforeTheAnswer);
            StatusCode::CREATED
        };
        (serve(shop.layer(), handler).await, proxy)
    };
    let answer = at_commit.0.deliver("1", "").await;
    assert!(at_commit.1.cuts_no_more());
    assert_eq!(answer.status, StatusCode::CREATED, "{:?}", answer.body);
    assert_eq!((shop.orders("1").await, shop.state("1").await), (1, Some(State::Done)));
    // And if the database cannot be asked either, the sender is told to come back.
    let proxy = at_commit.1;
    let vanish = proxy.clone();
    let handler = async move |info: ClaimInfo, order: Transaction| {
        order.execute(INSERT, &[&info.key()]).await.unwrap();
        vanish.traffic(Traffic::Vanishes);
        StatusCode::CREATED
    };
    let layer = shop.layer().settle_timeout(Duration::from_millis(100));
    let answer = serve(layer, handler).await.deliver("2", "").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.header("dedupe-status"), Some("store-unavailable"));
    proxy.traffic(Traffic::Flows);
}

#[tokio::test]
async fn a_fresh_claim_costs_one_round_trip_and_its_commit_two() {
    for named in [false, true] {
        let proxy = Proxy::before(postgres::shared().port()).await;
        let settings = |b: PgStoreBuilder| b.pool_size(1).named_statements(named);
        let shop =
            Shop::at(postgres::schema().await, settings, |url| proxy.instead_of_host(&url)).await;
        let nothing = async |_: Transaction| {};
        let address = serve(shop.layer(), nothing).await;
        // Statements are prepared when they are first used.
        for warm_up in ["a", "b", "c", "d"] {
            address.deliver(warm_up, "").await;
        }
        let before = proxy.round_trips();
        assert_eq!(address.deliver("1", "").await.status, StatusCode::OK);
        assert_eq!(proxy.round_trips() - before, 3, "named: {named}");
    }
}

#[tokio::test]
async fn what_is_committed_and_nothing_else_is_a_duplicate_without_the_database() {
    let proxy = Proxy::before(postgres::shared().port()).await;
    let settings = |b: PgStoreBuilder| b.done_cache(100, MINUTE);
    let shop =
        Shop::at(postgres::schema().await, settings, |url| proxy.instead_of_host(&url)).await;
    let address = shop.serve().await;
    let client = shop.schema.client().await;
    client.execute("INSERT INTO receipts VALUES ('the same')", &[]).await.unwrap();
    for wish in ["fail", "swallow", "receipt", "commit"] {
        assert!(address.deliver(wish, wish).await.status.is_server_error());
        let before = proxy.round_trips();
        assert_eq!(address.deliver(wish, "").await.status, StatusCode::CREATED);
        assert_ne!(proxy.round_trips(), before);
    }
    let before = proxy.round_trips();
    let duplicate = address.deliver("fail", "").await;
    assert_eq!(duplicate.header("dedupe-status"), Some("duplicate"));
    assert_eq!(proxy.round_trips(), before);
}

#[tokio::test]
async fn without_a_free_connection_the_answer_is_503_in_time() {
    let settings = |b: PgStoreBuilder| b.pool_size(2).timeout(Duration::from_millis(300));
    let shop = Shop::with(settings).await;
    let gate = Arc::new(Semaphore::new(0));
    let (started, mut starts) = mpsc::unbounded_channel();
    let waiting = gate.clone();
    let wait = async move |_: Transaction| {
        started.send(()).unwrap();
        waiting.acquire().await.unwrap().forget();
    };
    let address = serve(shop.layer(), wait).await;
    let first = tokio::spawn(address.deliver_static("1"));
    let second = tokio::spawn(address.deliver_static("2"));
    starts.recv().await.unwrap();
    starts.recv().await.unwrap();
    let third = address.deliver("3", "").await;
    assert_eq!(third.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(third.header("dedupe-status"), Some("store-unavailable"));
    // What is at work here is known without a connection.
    assert_eq!(address.deliver("1", "").await.header("dedupe-status"), Some("in-progress"));
    gate.add_permits(10);
    for done in [first, second] {
        assert_eq!(done.await.unwrap().status, StatusCode::OK);
    }
    shop.is_whole().await;
}

#[tokio::test]
async fn a_second_connection_of_the_same_pool_is_waited_for_in_vain_and_within_bounds() {
    let settings = |b: PgStoreBuilder| b.pool_size(2).timeout(Duration::from_millis(300));
    let shop = Shop::with(settings).await;
    let pool = shop.store.pool().clone();
    let both = Arc::new(tokio::sync::Barrier::new(2));
    let greedy = async move |_: Transaction| {
        both.wait().await;
        drop(pool.get().await.unwrap());
    };
    let layer = shop.layer().lease(Duration::from_millis(200)).max_hold(Duration::from_millis(500));
    let address = serve(layer, greedy).await;
    let (a, b) = tokio::join!(address.deliver("1", ""), address.deliver("2", ""));
    assert!(a.status.is_server_error() || b.status.is_server_error());
    shop.is_whole().await;
}

#[tokio::test]
async fn a_handler_that_hangs_is_dropped_after_max_hold() {
    let shop = Shop::open().await;
    let layer = shop.layer().lease(Duration::from_millis(300)).max_hold(Duration::from_millis(300));
    let address = serve(layer, take_order).await;
    let answer = address.deliver("1", "hang").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.header("retry-after").is_some());
    shop.has_nothing_of("1").await;
    shop.takes(address, "1").await;
    shop.is_whole().await;
}

/// As a process that stands still, or a host that is gone: the server does not wait for it for
/// longer than the lease.
#[tokio::test]
async fn a_silent_holder_is_overtaken_after_its_lease() {
    let shop = Shop::open().await;
    let gate = Arc::new(Semaphore::new(0));
    let waiting = gate.clone();
    let (started, mut starts) = mpsc::unbounded_channel();
    let wait = async move |info: ClaimInfo, order: Transaction| {
        order.execute(INSERT, &[&info.key()]).await.unwrap();
        started.send(()).unwrap();
        waiting.acquire().await.unwrap().forget();
    };
    let silent = serve(shop.layer().lease(Duration::from_millis(500)), wait).await;
    let first = tokio::spawn(silent.deliver_static("1"));
    starts.recv().await.unwrap();
    // Another process.
    let store = shop.schema.builder().connect(shop.schema.url()).await.unwrap();
    let layer = DedupeLayer::new(store, KeySource::header("x-id").unwrap());
    let other = serve(layer.scope("s").transactional(), take_order).await;
    assert_eq!(other.deliver("1", "").await.header("dedupe-status"), Some("in-progress"));
    eventually(async || other.deliver("1", "").await.status == StatusCode::CREATED).await;
    gate.add_permits(1);
    let answer = first.await.unwrap();
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.header("dedupe-status"), Some("store-unavailable"));
    assert_eq!((shop.orders("1").await, shop.state("1").await), (1, Some(State::Done)));
}

#[tokio::test]
async fn both_modes_respect_each_other() {
    let shop = Shop::open().await;
    let address = shop.serve().await;
    let lease = Claim::new(event("1"), MINUTE, MINUTE);
    shop.store.claim(&lease).await.unwrap();
    let answer = address.deliver("1", "").await;
    assert_eq!(answer.header("dedupe-status"), Some("in-progress"));
    assert_eq!(answer.header("retry-after"), Some("60"));
    // Failed, then with its lease over: taken over, and counted.
    shop.store.fail(&lease.key, lease.token, MINUTE).await.unwrap();
    shop.takes(address, "1").await;
    assert_eq!(shop.store.show(&lease.key).await.unwrap().unwrap().attempt, 2);
    let died = Claim::new(event("2"), MINUTE, MINUTE);
    shop.store.claim(&died).await.unwrap();
    shop.schema.elapse(MINUTE).await;
    shop.takes(address, "2").await;
    let late = shop.store.complete(&died.key, died.token, Completion::new(None, MINUTE)).await;
    assert_eq!(late.unwrap(), tower_dedupe::claim::Held::Lost);
    // Done in lease mode.
    let done = Claim::new(event("3"), MINUTE, MINUTE);
    shop.store.claim(&done).await.unwrap();
    let status = Completion::new(Some(204), MINUTE);
    shop.store.complete(&done.key, done.token, status).await.unwrap();
    assert_eq!(address.deliver("3", "").await.status, StatusCode::NO_CONTENT);
    assert_eq!(shop.orders("3").await, 0);

    // While a transaction is open, a claim of lease mode is told so, and is not held up.
    for (key, there) in [("4", false), ("5", true)] {
        if there {
            let failed = Claim::new(event(key), MINUTE, MINUTE);
            shop.store.claim(&failed).await.unwrap();
            shop.store.fail(&failed.key, failed.token, MINUTE).await.unwrap();
        }
        let dedupe = Deduplicator::new(shop.store.clone());
        let store = shop.store.clone();
        let within = dedupe.run_in_transaction(event(key), async move |_, _: Transaction| {
            store.claim(&Claim::new(event(key), MINUTE, MINUTE)).await
        });
        let Ok(Outcome::Ran(claimed)) = within.await else { panic!("it did not run") };
        assert!(matches!(claimed, ClaimOutcome::InProgress { .. }), "{claimed:?}");
        assert_eq!(shop.state(key).await, Some(State::Done));
    }
}

#[tokio::test]
async fn a_session_is_given_back_as_it_was() {
    let setting = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout'),
                          current_setting('default_transaction_isolation'),
                          current_setting('transaction_isolation'),
                          current_setting('idle_in_transaction_session_timeout'),
                          current_setting('synchronous_commit')";
    let read = |row: &tokio_postgres::Row| (0..6).map(|n| row.get(n)).collect::<Vec<String>>();
    for named in [false, true] {
        let url = |url| {
            format!(
                "{url}%20-c%20lock_timeout%3D7s%20-c%20default_transaction_isolation%3Drepeatable\
                 \\%20read%20-c%20synchronous_commit%3Doff"
            )
        };
        let settings =
            |b: PgStoreBuilder| b.pool_size(1).named_statements(named).synchronous_commit(false);
        let shop = Shop::at(postgres::schema().await, settings, url).await;
        let before = shop.store.pool().get().await.unwrap().query_one(setting, &[]).await.unwrap();
        let dedupe = Deduplicator::builder(shop.store.clone())
            .lease(Duration::from_secs(9))
            .max_hold(MINUTE)
            .build()
            .unwrap();
        let within = dedupe.run_in_transaction(event("1"), async move |_, order: Transaction| {
            order.query_one(setting, &[]).await
        });
        let Ok(Outcome::Ran(within)) = within.await else { panic!("it did not run") };
        // The database's own; bounds where it has none; and durable, whatever was chosen.
        let own = ["7s", "1min", "repeatable read", "repeatable read", "9s", "on"];
        assert_eq!(read(&within), own, "named: {named}");
        for _ in 0..2 {
            let pool = shop.store.pool();
            let after = pool.get().await.unwrap().query_one(setting, &[]).await.unwrap();
            assert_eq!(read(&after), read(&before), "named: {named}");
            // Rolled back, the same.
            let failing =
                dedupe.run_in_transaction(event("2"), async |_, _: Transaction| Err::<(), _>(1));
            assert!(matches!(failing.await, Err(RunError::Work(1))));
        }
    }
}

#[tokio::test]
async fn work_without_http_runs_in_a_transaction_too() {
    let shop = Shop::open().await;
    let dedupe = Deduplicator::new(shop.store.clone());
    let write = async |info: ClaimInfo, order: Transaction| {
        order.execute(INSERT, &[&info.key()]).await?;
        Ok::<_, TransactionError>(info.attempt())
    };
    assert_eq!(dedupe.run_in_transaction(event("1"), write).await.unwrap(), Outcome::Ran(1));
    assert_eq!(dedupe.run_in_transaction(event("1"), write).await.unwrap(), Outcome::Duplicate);
    assert_eq!(shop.orders("1").await, 1);

    let swallow = async |_: ClaimInfo, order: Transaction| {
        let _ = order.execute("SELECT 1/0", &[]).await;
        Ok::<_, TransactionError>(())
    };
    match dedupe.run_in_transaction(event("2"), swallow).await {
        Err(RunError::NotCommitted(why)) => {
            assert_eq!(why.kind(), NotCommittedKind::Aborted);
            assert!(why.to_string().contains("savepoint"));
        }
        other => panic!("{other:?}"),
    }
    shop.has_nothing_of("2").await;

    let (nested, outer) = (dedupe.clone(), dedupe.clone());
    let again = outer.run_in_transaction(event("3"), async move |_, _: Transaction| {
        nested.run_in_transaction(event("3"), write).await
    });
    assert!(matches!(again.await, Ok(Outcome::Ran(Outcome::InProgress { .. }))));
}

#[tokio::test]
async fn any_tower_service_finds_the_handle_in_its_extensions() {
    let shop = Shop::open().await;
    let service = tower::service_fn(async |request: Request<DedupeBody<Full<Bytes>>>| {
        let order = request.extensions().get::<Transaction>().unwrap().clone();
        order.execute(INSERT, &[&"1"]).await.unwrap();
        Ok::<_, Infallible>(::http::Response::new(Full::<Bytes>::default()))
    });
    let request = Request::post("/").header("x-id", "1").body(Full::default()).unwrap();
    let answer = shop.layer().layer(service).oneshot(request).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!((shop.orders("1").await, shop.state("1").await), (1, Some(State::Done)));
}

#[tokio::test]
async fn a_request_without_a_key_has_no_transaction_and_is_told_so() {
    let shop = Shop::open().await;
    let address = serve(shop.layer(), async |_: Transaction| {}).await;
    let answer = http::post(address.0, "/", &[], "{}").await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(String::from_utf8_lossy(&answer.body).contains("no transaction"));
    let optional = serve(shop.layer(), async |order: Option<Transaction>| {
        assert!(order.is_none());
    });
    let answer = http::post(optional.await.0, "/", &[("x-demo", "")], "{}").await;
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test]
async fn a_transaction_cannot_do_without_the_database() {
    let shop = Shop::open().await;
    let layer = shop.layer().store_down(StoreDown::PassThrough);
    assert_eq!(layer.check().unwrap_err(), ConfigError::PassThroughInTransaction);
}

#[tokio::test]
async fn a_delivery_may_wait_for_the_first_and_holds_no_connection() {
    let shop = Shop::with(|builder| builder.pool_size(1)).await;
    let layer = shop.layer().in_progress(InProgress::Wait(Duration::from_secs(20)));
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let slow = async move |Shared(runs): Shared<Arc<AtomicUsize>>, order: Transaction| {
        runs.fetch_add(1, Ordering::SeqCst);
        order.query_typed("SELECT pg_sleep(0.3)", &[]).await.unwrap();
    };
    let app = Router::new().route("/", post(slow).layer(layer)).with_state(counted);
    let address = Address(http::serve(app).await);
    let all = (0..8).map(|_| address.deliver_static("1")).collect::<JoinSet<_>>().join_all().await;
    assert!(all.iter().all(|answer| answer.status == StatusCode::OK));
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_drained_layer_rolls_back_what_does_not_end() {
    let shop = Shop::open().await;
    let dedupe = Deduplicator::new(shop.store.clone());
    let (started, starts) = oneshot::channel();
    let hang = dedupe.clone();
    let running = tokio::spawn(async move {
        let work = async move |info: ClaimInfo, order: Transaction| {
            order.execute(INSERT, &[&info.key()]).await.unwrap();
            started.send(()).unwrap();
            pending::<Result<(), Infallible>>().await
        };
        hang.run_in_transaction(event("1"), work).await
    });
    starts.await.unwrap();
    assert_eq!(dedupe.drain(Duration::from_millis(50)).await, 1);
    assert!(matches!(running.await.unwrap(), Err(RunError::Cancelled)));
    shop.has_nothing_of("1").await;
    shop.is_whole().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_thousand_mixed_deliveries_leave_the_pool_whole() {
    let shop = Shop::with(|builder| builder.pool_size(6)).await;
    let detached = shop.serve().await;
    let inline = serve(shop.layer().detached(false), take_order).await;
    let wishes = ["", "fail", "", "swallow", "sleep", "error", "", "panic", "roll back", ""];
    let mut deliveries = JoinSet::new();
    for n in 0_usize..5000 {
        if deliveries.len() >= 40 {
            deliveries.join_next().await.unwrap().unwrap();
        }
        let key = format!("{}", n % 1700);
        let wish = wishes[n % 7 + n % 4];
        let address = if n % 3 == 0 { inline } else { detached };
        deliveries.spawn(async move {
            let headers = [("x-id", &*key), ("x-demo", wish)];
            let hang_up = Duration::from_micros(u64::try_from(n % 50).unwrap() * 200);
            let send = http::try_post(address.0, "/", &headers, "{}");
            let _ = match n % 5 {
                0 => timeout(hang_up, send).await.ok(),
                _ => Some(send.await),
            };
        });
    }
    while let Some(sent) = deliveries.join_next().await {
        sent.unwrap();
    }
    shop.is_whole().await;
    let client = shop.schema.client().await;
    // Each order has its done key, each done key its one order, and nothing is stuck.
    let differ = "SELECT count(*) FROM
                      (SELECT event_key::text, count(*) FROM orders GROUP BY event_key) AS o
                      FULL JOIN (SELECT event_key::text FROM processed_events
                                 WHERE status = 'done') AS d USING (event_key)
                  WHERE o.count IS DISTINCT FROM 1 OR d.event_key IS NULL";
    assert_eq!(client.query_one(differ, &[]).await.unwrap().get::<_, i64>(0), 0);
    let stuck = "SELECT count(*) FROM processed_events WHERE status = 'in_progress'";
    assert_eq!(client.query_one(stuck, &[]).await.unwrap().get::<_, i64>(0), 0);
    let done = "SELECT count(*) FROM processed_events WHERE status = 'done'";
    let done: i64 = client.query_one(done, &[]).await.unwrap().get(0);
    assert!(done > 1000, "only {done} have succeeded");
}

/// The lock's number is part of the contract: other clients take the same.
#[tokio::test]
async fn the_lock_of_a_key_is_tried_and_not_waited_for() {
    let shop = Shop::open().await;
    let address = shop.serve().await;
    let client = shop.schema.client().await;
    let locked = |what: &str| {
        format!(
            "SELECT {what}(hashtextextended('s' || chr(10) || '1',
                                            'processed_events'::regclass::oid::int8))"
        )
    };
    client.batch_execute(&locked("pg_advisory_lock")).await.unwrap();
    let answer = address.deliver("1", "").await;
    assert_eq!(answer.header("dedupe-status"), Some("in-progress"));
    assert_eq!(shop.state("1").await, None);
    shop.takes(address, "2").await;
    client.batch_execute(&locked("pg_advisory_unlock")).await.unwrap();
    shop.takes(address, "1").await;
}

impl Shop {
    /// The layer that compares payloads and gives the first response again.
    fn strict_layer(&self) -> DedupeLayer {
        self.layer().duplicate(Duplicate::Replay).fingerprint(Fingerprint::Body)
    }

    /// Whether a key's row has a payload, and its response.
    async fn kept(&self, key: &str) -> Option<(Option<Vec<u8>>, Option<Vec<u8>>)> {
        let kept = "SELECT fingerprint, response FROM processed_events WHERE event_key = $1";
        let rows = self.schema.client().await.query(kept, &[&key]).await.unwrap();
        rows.first().map(|row| (row.get(0), row.get(1)))
    }
}

impl Address {
    async fn deliver_body(self, key: &str, wish: &str, body: &str) -> Answer {
        http::post(self.0, "/", &[("x-id", key), ("x-demo", wish)], body.to_owned()).await
    }

    /// The order's response again, and no other order.
    async fn gives_again(self, key: &str, body: &str, first: &Answer) {
        let again = self.deliver_body(key, "", body).await;
        assert_eq!((again.status, &again.body), (first.status, &first.body), "{key}");
        assert_eq!(again.header("x-order"), first.header("x-order"), "{key}");
        assert_eq!(again.header("idempotency-replayed"), Some("true"), "{key}");
    }

    async fn refuses(self, key: &str, body: &str) {
        let answer = self.deliver_body(key, "", body).await;
        let told = (answer.status, answer.header("dedupe-status"));
        assert_eq!(told, (StatusCode::UNPROCESSABLE_ENTITY, Some("key-conflict")), "{key}");
    }
}

/// Takes an order, with a response of its own.
async fn confirm_order(info: ClaimInfo, order: Transaction, headers: HeaderMap) -> Response {
    let (key, attempt) = (info.key().to_owned(), info.attempt());
    let answer = take_order(info, order, headers).await;
    let (status, body) = (answer.status(), format!("{key}\0{}", "order ".repeat(2000)));
    (status, [("x-order", attempt.to_string())], body).into_response()
}

#[tokio::test]
async fn payload_and_response_are_committed_with_the_order() {
    for named in [false, true] {
        let shop = Shop::with(|builder| builder.named_statements(named)).await;
        let address = serve(shop.strict_layer(), confirm_order).await;
        let first = address.deliver_body("1", "", "a").await;
        assert_eq!((first.status, first.header("x-order")), (StatusCode::CREATED, Some("1")));
        let (payload, response) = shop.kept("1").await.unwrap();
        assert_eq!(payload.map(|hash| hash.len()), Some(32));
        assert!(response.unwrap().ends_with(&first.body));
        // Here, in another process, and in the other mode.
        let elsewhere = Shop {
            store: shop.schema.builder().connect(shop.schema.url()).await.unwrap(),
            schema: shop.schema,
        };
        let in_lease_mode = DedupeLayer::new(shop.store, KeySource::header("x-id").unwrap())
            .scope("s")
            .duplicate(Duplicate::Replay)
            .fingerprint(Fingerprint::Body);
        let unused = async || StatusCode::IM_A_TEAPOT;
        for address in [
            address,
            serve(elsewhere.strict_layer(), confirm_order).await,
            serve(in_lease_mode, unused).await,
        ] {
            address.gives_again("1", "a", &first).await;
            address.refuses("1", "b").await;
        }
        assert_eq!(elsewhere.orders("1").await, 1);
        // Who does not ask is given no response.
        let plain = serve(elsewhere.layer(), confirm_order).await.deliver("1", "").await;
        assert_eq!((plain.status, plain.body.len()), (StatusCode::CREATED, 0));
    }
}

#[tokio::test]
async fn payload_and_response_are_rolled_back_with_the_order() {
    let shop = Shop::open().await;
    let receipt = "INSERT INTO receipts VALUES ('the same')";
    shop.schema.client().await.batch_execute(receipt).await.unwrap();
    let address = serve(shop.strict_layer(), confirm_order).await;
    for wish in ["fail", "error", "swallow", "roll back", "commit", "receipt"] {
        let failed = address.deliver_body(wish, wish, "a").await;
        assert!(failed.status.is_server_error(), "{wish}");
        // What the work has committed itself is undone as far as the key goes.
        let kept = shop.kept(wish).await;
        let claim_stays = wish == "commit";
        assert_eq!(kept.is_some(), claim_stays, "{wish}");
        assert!(kept.is_none_or(|(_, response)| response.is_none()), "{wish}");
        let corrected = address.deliver_body(wish, "", "b").await;
        assert_eq!(corrected.status, StatusCode::CREATED, "{wish}");
        address.gives_again(wish, "b", &corrected).await;
        address.refuses(wish, "a").await;
    }
    // What was there before stays as it was.
    let before = claim_of("before", 1);
    shop.store.claim(&before).await.unwrap();
    shop.store.fail(&before.key, before.token, MINUTE).await.unwrap();
    let was = shop.kept("before").await.unwrap();
    assert_eq!(was, (Some(vec![1; 32]), None));
    assert!(address.deliver_body("before", "fail", "a").await.status.is_server_error());
    assert_eq!(shop.kept("before").await.unwrap(), was);
    let taken = address.deliver_body("before", "", "a").await;
    assert_eq!(taken.header("x-order"), Some("2"));
    address.refuses("before", "b").await;
    shop.is_whole().await;
}

#[tokio::test]
async fn another_payload_of_a_key_at_work_here_is_told_so_without_a_connection() {
    // The work has the only one.
    let settings = |b: PgStoreBuilder| b.pool_size(1).timeout(Duration::from_millis(500));
    let shop = Shop::with(settings).await;
    let (started, mut starts) = mpsc::unbounded_channel();
    let (ends, gate) = mpsc::unbounded_channel();
    let gate = Arc::new(Mutex::new(gate));
    let wait = async move |info: ClaimInfo, order: Transaction| {
        order.execute(INSERT, &[&info.key()]).await.unwrap();
        started.send(()).unwrap();
        gate.lock().await.recv().await.unwrap()
    };
    let address = serve(shop.strict_layer(), wait).await;
    let elsewhere = shop.schema.builder().connect(shop.schema.url()).await.unwrap();
    let elsewhere = DedupeLayer::new(elsewhere, KeySource::header("x-id").unwrap())
        .scope("s")
        .transactional()
        .fingerprint(Fingerprint::Body);
    let elsewhere = serve(elsewhere, confirm_order).await;
    let is_in_progress = |answer: &Answer| {
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.header("dedupe-status"), Some("in-progress"));
    };
    let key = "1";
    for end in [StatusCode::BAD_GATEWAY, StatusCode::CREATED] {
        let working = tokio::spawn(async move { address.deliver_body(key, "", "a").await });
        starts.recv().await.unwrap();
        for _ in 0..3 {
            address.refuses(key, "b").await;
            is_in_progress(&address.deliver_body(key, "", "a").await);
        }
        // What is not committed is not known elsewhere: whichever it is, it comes back.
        for body in ["a", "b"] {
            is_in_progress(&elsewhere.deliver_body(key, "", body).await);
        }
        ends.send(end).unwrap();
        assert_eq!(working.await.unwrap().status, end);
    }
    for address in [address, elsewhere] {
        address.refuses(key, "b").await;
    }
    assert_eq!(shop.orders(key).await, 1);
}

#[tokio::test]
async fn a_committed_response_is_given_without_the_database() {
    let proxy = Arc::new(Proxy::before(postgres::shared().port()).await);
    let settings = |b: PgStoreBuilder| b.pool_size(1).done_cache(1000, MINUTE);
    let shop =
        Shop::at(postgres::schema().await, settings, |url| proxy.instead_of_host(&url)).await;
    let cut = proxy.clone();
    let confirm = async move |info: ClaimInfo, order: Transaction, headers: HeaderMap| {
        if info.key() == "cut" {
            // The done mark is the first write from here on, the COMMIT the second.
            order.execute(INSERT, &[&info.key()]).await.unwrap();
            cut.cut_at(2, Moment::BeforeTheAnswer);
            return (StatusCode::CREATED, [("x-order", "1")], "cut").into_response();
        }
        confirm_order(info, order, headers).await
    };
    let address = serve(shop.strict_layer(), confirm).await;
    for key in ["answered", "cut"] {
        let first = address.deliver_body(key, "", "a").await;
        assert_eq!(first.status, StatusCode::CREATED);
        assert_eq!(shop.orders(key).await, 1);
        let (_, response) = shop.kept(key).await.unwrap();
        assert!(response.unwrap().ends_with(&first.body));
        let before = proxy.round_trips();
        for _ in 0..3 {
            address.gives_again(key, "a", &first).await;
            address.refuses(key, "b").await;
        }
        assert_eq!(proxy.round_trips(), before, "{key}");
    }
    assert!(proxy.cuts_no_more());
}
