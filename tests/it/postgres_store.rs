//! What is particular to the store in Postgres: one round trip, no trace of the session, bounded
//! waits, connections that come back clean.

use std::{
    collections::BTreeSet,
    future::{Future, poll_fn},
    pin::pin,
    slice::from_ref,
    task::Poll,
    time::Duration,
};

use deadpool_postgres::{Manager, Pool};
use tokio::{net::TcpListener, task::JoinSet, time::Instant};
use tokio_postgres::NoTls;
use tower_dedupe::{
    ClaimStore, PgStore,
    claim::{ClaimOutcome, Held},
    store::StoreErrorKind,
};

use crate::support::{
    claims::{claim, done, event, in_progress, whole},
    postgres::{self, Schema},
};

fn pool(url: &str, size: usize) -> Pool {
    let manager = Manager::new(url.parse().unwrap(), NoTls);
    Pool::builder(manager).max_size(size).build().unwrap()
}

/// A pool of the application's own, and a store on it.
async fn on_own_pool(db: &Schema, size: usize) -> (Pool, PgStore) {
    db.store().await;
    let pool = pool(db.url(), size);
    let store = db.builder().timeout(Duration::from_millis(500)).from_pool(pool.clone()).unwrap();
    (pool, store)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_keeps_no_trace_of_an_operation() {
    let db = postgres::schema().await;
    let (pool, store) = on_own_pool(&db, 1).await;
    let first = claim("1");
    store.claim(&first).await.unwrap();
    store.claim(&claim("1")).await.unwrap();
    store.renew(from_ref(&first)).await.unwrap();
    store.complete(&first.key, first.token, done()).await.unwrap();
    store.show(&first.key).await.unwrap();

    let session = pool.get().await.unwrap();
    let trace = "SELECT (SELECT count(*) FROM pg_prepared_statements),
                        current_setting('lock_timeout'), current_setting('statement_timeout'),
                        pg_current_xact_id_if_assigned() IS NULL,
                        (SELECT count(*) FROM pg_locks
                         WHERE pid = pg_backend_pid() AND locktype IN ('advisory', 'tuple'))";
    let row = &session.query_typed(trace, &[]).await.unwrap()[0];
    assert_eq!(row.get::<_, i64>(0), 0, "prepared statements");
    assert_eq!((row.get::<_, &str>(1), row.get::<_, &str>(2)), ("0", "0"), "settings");
    assert!(row.get::<_, bool>(3), "an open transaction");
    assert_eq!(row.get::<_, i64>(4), 0, "locks");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_a_later_version_has_changed_serves_this_one_without_a_new_connection() {
    for named in [false, true] {
        let db = postgres::schema().await;
        db.store().await;
        let store = db.builder().named_statements(named).pool_size(1).connect(db.url()).await;
        let store = store.unwrap();
        let client = db.client().await;
        for change in [
            "ADD COLUMN note text",
            "ADD COLUMN other int NOT NULL DEFAULT 1",
            "ALTER COLUMN attempt TYPE int8",
            "ALTER COLUMN response_status TYPE int4",
            "ALTER COLUMN status TYPE varchar(20)",
            "DROP COLUMN note",
        ] {
            let first = claim(change);
            assert_eq!(store.claim(&first).await.unwrap(), ClaimOutcome::Claimed { attempt: 1 });
            let sql = format!("ALTER TABLE processed_events {change}");
            client.batch_execute(&sql).await.unwrap();
            assert!(in_progress(&store.claim(&claim(change)).await.unwrap()), "{change}");
            assert_eq!(store.renew(from_ref(&first)).await.unwrap(), [Held::Yes]);
            assert!(store.fail(&first.key, first.token, done().retention).await.unwrap());
            let second = claim(change);
            assert_eq!(store.claim(&second).await.unwrap(), ClaimOutcome::Claimed { attempt: 2 });
            let completed = store.complete(&second.key, second.token, done()).await.unwrap();
            assert_eq!(completed, Held::Yes);
            let record = store.show(&first.key).await.unwrap().unwrap();
            assert_eq!((record.attempt, record.response_status), (2, Some(200)));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn named_statements_are_prepared_once_for_a_connection() {
    let db = postgres::schema().await;
    db.store().await;
    let manager = Manager::new(db.url().parse().unwrap(), NoTls);
    let pool = Pool::builder(manager).max_size(1).build().unwrap();
    let store = db.builder().named_statements(true).from_pool(pool.clone()).unwrap();
    for n in 0..10 {
        store.claim(&claim(&n.to_string())).await.unwrap();
    }
    let prepared = "SELECT count(*) FROM pg_prepared_statements";
    let row = pool.get().await.unwrap().query_typed_one(prepared, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_and_a_claim_in_progress_write_nothing() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let client = db.client().await;
    let (held, finished) = (claim("held"), claim("finished"));
    store.claim(&held).await.unwrap();
    store.claim(&finished).await.unwrap();
    store.complete(&finished.key, finished.token, done()).await.unwrap();

    let physical = "SELECT array_agg(concat_ws(' ', ctid, xmin, xmax) ORDER BY event_key)
                    FROM processed_events";
    let before: Vec<String> = client.query_one(physical, &[]).await.unwrap().get(0);
    for _ in 0..20 {
        assert!(in_progress(&store.claim(&claim("held")).await.unwrap()));
        let duplicate = store.claim(&claim("finished")).await.unwrap();
        assert_eq!(duplicate, ClaimOutcome::done(Some(200)));
    }
    let after: Vec<String> = client.query_one(physical, &[]).await.unwrap().get(0);
    assert_eq!(after, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_duplicates_writes_no_wal() {
    let server = tokio::task::spawn_blocking(postgres::own).await.unwrap();
    let db = Schema::on(&server.url()).await;
    let store = db.store().await;
    let finished = || (0..40).map(|n| claim(&n.to_string()));
    for one in finished() {
        store.claim(&one).await.unwrap();
        store.complete(&one.key, one.token, done()).await.unwrap();
    }
    let client = db.client().await;
    let written = async || {
        let row = client.query_typed_one("SELECT pg_current_wal_insert_lsn()::text", &[]);
        row.await.unwrap().get::<_, String>(0)
    };
    // The server now and then writes of itself; a duplicate that wrote would do so each time.
    let began = Instant::now();
    loop {
        let before = written().await;
        let mut asking = JoinSet::new();
        for one in finished().chain(finished()) {
            let store = store.clone();
            asking.spawn(async move { store.claim(&one).await.unwrap() });
        }
        for outcome in asking.join_all().await {
            assert_eq!(outcome, ClaimOutcome::done(Some(200)));
        }
        if written().await == before {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "every storm has written");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_commit_waits_for_is_the_choice_of_the_store() {
    let db = postgres::schema().await;
    db.store().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE TABLE seen (setting text);
             CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 EXECUTE format('INSERT INTO %I.seen VALUES ($1)', TG_TABLE_SCHEMA)
                     USING current_setting('synchronous_commit');
                 RETURN NEW;
             END $$;
             CREATE TRIGGER look BEFORE INSERT OR UPDATE ON processed_events
             FOR EACH ROW EXECUTE FUNCTION look()",
        )
        .await
        .unwrap();
    for named in [false, true] {
        for (default, synchronous, seen) in [
            ("off", true, "on"),
            ("on", true, "on"),
            ("remote_apply", true, "remote_apply"),
            ("local", true, "local"),
            ("on", false, "off"),
            ("remote_apply", false, "off"),
        ] {
            client.batch_execute("TRUNCATE seen").await.unwrap();
            let url = format!("{}?options=-c%20synchronous_commit%3D{default}", db.bare_url());
            let builder = db.builder().named_statements(named).synchronous_commit(synchronous);
            let store = builder.connect(&url).await.unwrap();
            let key = |n: usize| format!("{named} {default} {synchronous} {n}");
            let mut asking = JoinSet::new();
            for n in 0..20 {
                let (store, claim) = (store.clone(), claim(&key(n)));
                asking.spawn(async move {
                    store.claim(&claim).await.unwrap();
                    store.complete(&claim.key, claim.token, done()).await.unwrap();
                });
            }
            asking.join_all().await;
            let (first, second) = (claim(&key(20)), claim(&key(20)));
            store.claim(&first).await.unwrap();
            store.fail(&first.key, first.token, done().retention).await.unwrap();
            store.claim(&second).await.unwrap();
            let settings = "SELECT array_agg(DISTINCT setting), count(*) FROM seen";
            let row = client.query_one(settings, &[]).await.unwrap();
            let (settings, writes): (Vec<String>, i64) = (row.get(0), row.get(1));
            // Of the last claim the insert that is in vain, and the takeover.
            assert_eq!((&*settings, writes), (&[seen.to_owned()][..], 44), "default {default}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_somebody_keeps_for_ever_is_read_like_any_other() {
    let db = postgres::schema().await;
    let store = db.store().await;
    for (key, status, expected) in [
        ("1", "done", ClaimOutcome::done(None)),
        ("2", "in_progress", ClaimOutcome::InProgress { lease_left: Duration::ZERO }),
    ] {
        let insert = format!(
            "INSERT INTO processed_events
                 (scope, event_key, status, attempt, claimed_at, lease_until, expires_at)
             VALUES ('s', '{key}', '{status}', 1, '-infinity', 'infinity', 'infinity')"
        );
        db.client().await.batch_execute(&insert).await.unwrap();
        let outcome = store.claim(&claim(key)).await.unwrap();
        assert_eq!(std::mem::discriminant(&outcome), std::mem::discriminant(&expected));
        let years = Duration::from_secs(900 * 365 * 24 * 60 * 60);
        assert!(store.show(&event(key)).await.unwrap().unwrap().retention_left > years);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_done_mark_is_a_hot_update() {
    let db = postgres::schema().await;
    let store = db.store().await;
    for n in 0..500 {
        let claim = claim(&n.to_string());
        store.claim(&claim).await.unwrap();
        store.complete(&claim.key, claim.token, done()).await.unwrap();
    }
    // A backend reports its counts when it ends, or after a while.
    drop(store);
    let client = db.client().await;
    let counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables
                  WHERE schemaname = current_schema() AND relname = 'processed_events'";
    let started = Instant::now();
    loop {
        let row = client.query_one(counts, &[]).await.unwrap();
        let (updates, hot) = (row.get::<_, i64>(0), row.get::<_, i64>(1));
        if updates == 500 {
            assert_eq!(hot, 500);
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{updates} updates were counted");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_database_defaults_to_changes_nothing() {
    let db = postgres::schema().await;
    db.store().await;
    // The level is pinned where a statement relies on it, and not left to luck and trying again.
    db.client()
        .await
        .batch_execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF current_setting('transaction_isolation') <> 'read committed' THEN
                     RAISE 'it is %', current_setting('transaction_isolation');
                 END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON processed_events
             FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .await
        .unwrap();
    for isolation in ["repeatable%20read", "serializable"] {
        let url = format!(
            "{}?options=-c%20default_transaction_isolation%3D{}",
            db.bare_url(),
            isolation.replace("%20", "\\%20"),
        );
        // Claims and takeovers of the same keys at once, which at these levels fail with 40001.
        let mut workers = JoinSet::new();
        for n in 0..8 {
            let builder = db.builder().named_statements(n % 3 > 0);
            let store = match n % 3 {
                2 => builder.from_pool(pool(&url, 2)).unwrap(),
                _ => builder.connect(&url).await.unwrap(),
            };
            let isolation = isolation.to_owned();
            workers.spawn(async move {
                let mut claimed = 0;
                for n in 0..25 {
                    let claim = claim(&format!("{isolation} {n}"));
                    match store.claim(&claim).await.unwrap() {
                        ClaimOutcome::Claimed { .. } => claimed += 1,
                        other => assert!(in_progress(&other), "{other:?}"),
                    }
                }
                claimed
            });
        }
        assert_eq!(workers.join_all().await.into_iter().sum::<u32>(), 25);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_forgets_a_key_waits_for_those_that_have_its_row() {
    let db = postgres::schema().await;
    db.store().await;
    for named in [false, true] {
        let store = db.builder().named_statements(named).connect(db.bare_url()).await.unwrap();
        let held = claim("1");
        store.claim(&held).await.unwrap();
        let mut client = db.client().await;
        let open = client.transaction().await.unwrap();
        open.batch_execute("SELECT FROM processed_events FOR UPDATE").await.unwrap();
        let asking = tokio::spawn(async move { store.forget(&held.key).await });
        // Longer than claims wait.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!asking.is_finished(), "named: {named}");
        open.rollback().await.unwrap();
        assert!(asking.await.unwrap().unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_that_succeed_cost_a_pool_no_connection() {
    let db = postgres::schema().await;
    db.store().await;
    for isolation in ["serializable", "read\\%20committed"] {
        let url =
            format!("{}?options=-c%20default_transaction_isolation%3D{isolation}", db.bare_url(),);
        for named in [false, true] {
            let pool = pool(&url, 1);
            let store = db.builder().named_statements(named).from_pool(pool.clone()).unwrap();
            let backend = async || {
                let session = pool.get().await.unwrap();
                let pid = session.query_typed_one("SELECT pg_backend_pid()", &[]).await.unwrap();
                pid.get::<_, i32>(0)
            };
            let before = backend().await;
            for n in 0..40 {
                let claim = claim(&format!("{isolation} {named} {n}"));
                store.claim(&claim).await.unwrap();
                store.complete(&claim.key, claim.token, done()).await.unwrap();
            }
            assert_eq!(backend().await, before, "{isolation}, named: {named}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_another_transaction_has_not_committed_is_in_progress() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let mut client = db.client().await;
    let open = client.transaction().await.unwrap();
    open.batch_execute(
        "INSERT INTO processed_events
             (scope, event_key, status, attempt, claimed_at, lease_until, expires_at)
         VALUES ('s', '1', 'in_progress', 1, now(), now(), now())",
    )
    .await
    .unwrap();
    let mut claim = claim("1");
    claim.lease = Duration::from_secs(1);
    let outcome = store.claim(&claim).await.unwrap();
    assert!(in_progress(&outcome), "{outcome:?}");
    // It did not wait for more than its tenth of the lease, and left no claim behind.
    open.rollback().await.unwrap();
    assert_eq!(store.show(&claim.key).await.unwrap(), None);
    assert_eq!(store.claim(&claim).await.unwrap(), ClaimOutcome::Claimed { attempt: 1 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_asked_again_late_has_a_lease_worth_having() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let claim = claim("1");
    store.claim(&claim).await.unwrap();
    for late in [59, 61] {
        db.elapse(Duration::from_secs(late)).await;
        assert_eq!(store.claim(&claim).await.unwrap(), ClaimOutcome::Claimed { attempt: 1 });
        let record = store.show(&claim.key).await.unwrap().unwrap();
        assert!(record.lease_left > Duration::from_secs(30), "{record:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_come_and_go_are_looked_at_again() {
    let db = postgres::schema().await;
    let mut workers = JoinSet::new();
    for _ in 0..6 {
        let store = db.store().await;
        workers.spawn(async move {
            let mut claimed = 0;
            for _ in 0..150 {
                let claim = claim("1");
                match store.claim(&claim).await.unwrap() {
                    ClaimOutcome::Claimed { .. } => {
                        claimed += 1;
                        assert!(store.forget(&claim.key).await.unwrap());
                    }
                    other => assert!(in_progress(&other), "{other:?}"),
                }
            }
            claimed
        });
    }
    assert!(workers.join_all().await.into_iter().all(|claimed| claimed > 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_comes_back_clean_wherever_the_claim_was_dropped() {
    let db = postgres::schema().await;
    let (pool, store) = on_own_pool(&db, 1).await;
    let watcher = db.client().await;
    let mut polls = 0;
    loop {
        let claim = claim(&format!("dropped at poll {polls}"));
        let ended = {
            let mut asking = pin!(store.claim(&claim));
            let mut left = polls;
            poll_fn(|cx| match asking.as_mut().poll(cx) {
                Poll::Ready(_) => Poll::Ready(true),
                Poll::Pending if left == 0 => Poll::Ready(false),
                Poll::Pending => {
                    left -= 1;
                    Poll::Pending
                }
            })
            .await
        };
        let session = pool.get().await.unwrap();
        let pid = session.query_typed_one("SELECT pg_backend_pid()", &[]).await.unwrap();
        let state = "SELECT state FROM pg_stat_activity WHERE pid = $1 AND state <> 'active'";
        let pid: i32 = pid.get(0);
        let state = loop {
            let rows = watcher.query(state, &[&pid]).await.unwrap();
            if let Some(row) = rows.first() {
                break row.get::<_, String>(0);
            }
        };
        assert_eq!(state, "idle", "after {polls} polls");
        drop(session);
        if ended {
            break;
        }
        polls += 1;
    }
    assert!(polls > 0, "the claim ended at its first poll");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_used_up_is_named_and_the_wait_for_it_ends() {
    let db = postgres::schema().await;
    let (pool, store) = on_own_pool(&db, 2).await;
    let taken = (pool.get().await.unwrap(), pool.get().await.unwrap());
    let error = store.claim(&claim("1")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(whole(&error).contains("all 2 connections of the pool are busy"), "{}", whole(&error));
    drop(taken);
    assert!(store.claim(&claim("1")).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_accepts_and_says_nothing_does_not_hide_the_next_one() {
    let db = postgres::schema().await;
    db.store().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_at = silent.local_addr().unwrap();
    let builder = || db.builder().connect_timeout(Duration::from_millis(300));

    let alone = format!("postgres://u@{silent_at}/postgres");
    let error = builder().connect(&alone).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(whole(&error).contains("no connection to"), "{}", whole(&error));

    let both = db.bare_url().replacen('@', &format!("@{silent_at},"), 1);
    let store = builder().connect(&both).await.unwrap();
    // The one that answered is asked first from then on.
    let started = Instant::now();
    let mut claims = JoinSet::new();
    for n in 0..4 {
        let store = store.clone();
        claims.spawn(async move { store.claim(&claim(&n.to_string())).await });
    }
    assert!(claims.join_all().await.iter().all(Result::is_ok));
    assert!(started.elapsed() < Duration::from_millis(300));
}

#[tokio::test(flavor = "multi_thread")]
async fn more_silent_hosts_than_there_is_time_for_do_not_hide_the_last_one_for_ever() {
    let db = postgres::schema().await;
    db.store().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = silent.local_addr().unwrap();
    let hosts = format!("@{at},{at},{at},");
    let store = db
        .builder()
        .connect_timeout(Duration::from_millis(300))
        .timeout(Duration::from_millis(500))
        .connect_lazy(&db.bare_url().replacen('@', &hosts, 1))
        .unwrap();
    let mut tries = 0;
    while store.show(&event("1")).await.is_err() {
        tries += 1;
        assert!(tries < 40, "it never got to the last host");
    }
    assert!(tries > 0, "there was time for all");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_write_is_no_store() {
    let db = postgres::schema().await;
    db.store().await;
    let url = format!("{}?options=-c%20default_transaction_read_only%3Don", db.bare_url());
    let store = db.builder().connect(&url).await.unwrap();
    let error = store.claim(&claim("1")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{}", whole(&error));

    for wanted in ["read-write", "primary"] {
        let wanting = format!("{url}&target_session_attrs={wanted}");
        let error = db.builder().connect(&wanting).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{}", whole(&error));
    }
}

#[tokio::test]
async fn a_url_that_cannot_be_used_is_refused_with_the_reason_and_without_its_password() {
    let cases = [
        ("postgres://u:hunter2@h/db?sslmode=sometimes", "sslmode=\"sometimes\" is none of"),
        (
            "postgres://u:hunter2@h/db?sslmode=verify-full&sslrootcert=/no/such/file",
            "/no/such/file",
        ),
        ("postgres://u:hunter2@h/db?sslcert=c.pem", "client certificates"),
        ("postgres://u:hunter2@h/db?target_session_attrs=read-only", "claims are writes"),
        ("postgres://u:hunter2@h/db?no_such_setting=1", "no_such_setting"),
        ("postgres://u:hunter2@h1,h2,h3:1,h4:2x/db", ""),
        ("postgres://u:hunter2@/db", "names no host"),
        ("mysql://u:hunter2@h/db", ""),
        ("", "names no host"),
    ];
    for (url, reason) in cases {
        let error = PgStore::connect_lazy(url).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Config, "{url}");
        let (told, shown) = (whole(&error), format!("{error:?}"));
        assert!(told.contains(reason), "{url}: {told}");
        assert!(!told.contains("hunter2") && !shown.contains("hunter2"), "{told} {shown}");
    }
    let store = PgStore::connect_lazy("postgres://u:hunter2@localhost/db").unwrap();
    assert!(!format!("{store:?}").contains("hunter2"));
    for (builder, reason) in [
        (PgStore::builder().pool_size(0), "the pool size is 0"),
        (PgStore::builder().timeout(Duration::ZERO), "the timeout must be"),
        (PgStore::builder().connect_timeout(Duration::ZERO), "the connect_timeout must be"),
        (PgStore::builder().timeout(Duration::MAX), "the timeout must be"),
    ] {
        let error = builder.connect_lazy("postgres://localhost/db").unwrap_err();
        assert!(whole(&error).contains(reason), "{}", whole(&error));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_server_does_not_quote_the_row() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let check = "ALTER TABLE processed_events ADD CHECK (event_key NOT LIKE 'secret%')";
    db.client().await.batch_execute(check).await.unwrap();
    let error = store.claim(&claim("secret-alice@example.com")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
    let (told, shown) = (whole(&error), format!("{error:?}"));
    assert!(told.contains("violates check constraint"), "{told}");
    assert!(!told.contains("alice") && !shown.contains("alice"), "{told} {shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_that_purge_at_once_delete_each_row_once() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let mut old = BTreeSet::new();
    for n in 0..300 {
        let key = n.to_string();
        store.claim(&claim(&key)).await.unwrap();
        old.insert(key);
    }
    db.elapse(Duration::from_secs(121)).await;
    store.claim(&claim("live")).await.unwrap();
    let mut purges = JoinSet::new();
    for _ in 0..4 {
        let store = db.store().await;
        purges.spawn(async move {
            let mut purged = 0;
            loop {
                match store.purge(50).await.unwrap() {
                    0 => return purged,
                    some => purged += some,
                }
            }
        });
    }
    assert_eq!(purges.join_all().await.into_iter().sum::<u64>(), 300);
    assert!(store.show(&event("live")).await.unwrap().is_some());
}
