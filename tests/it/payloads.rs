//! What the table keeps of payloads and responses, and for how long.

use std::{convert::Infallible, time::Duration};

use ::http::{Request, Response, StatusCode};
use bytes::Bytes;
use http_body_util::Full;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_dedupe::{
    ClaimStore, DedupeBody, DedupeLayer, Fingerprint, KeySource, claim::ClaimOutcome,
};

use crate::support::{
    claims::{MINUTE, claim, claim_of, done_with, event, finish, in_progress, noise},
    postgres::{self, Schema},
};

/// The rows of the table, and the pieces of long responses beside it.
async fn rows_and_pieces(db: &Schema) -> (i64, i64) {
    let client = db.client().await;
    let beside = "SELECT reltoastrelid::regclass::text FROM pg_class
                  WHERE oid = 'processed_events'::regclass";
    let beside: String = client.query_one(beside, &[]).await.unwrap().get(0);
    let count =
        format!("SELECT (SELECT count(*) FROM processed_events), (SELECT count(*) FROM {beside})");
    let row = client.query_one(&count, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_response_is_left_when_its_key_is_gone() {
    let db = postgres::schema().await;
    let store = db.store().await;
    for n in 0..6 {
        finish(&store, claim(&n.to_string()), Some(noise(300 * 1024, n))).await;
    }
    let (rows, pieces) = rows_and_pieces(&db).await;
    assert!(rows == 6 && pieces > 6 * 100, "{pieces} pieces");

    assert!(store.forget(&event("0")).await.unwrap());
    assert_eq!(rows_and_pieces(&db).await, (5, pieces / 6 * 5));
    // Claimed anew, and failed then.
    db.elapse(MINUTE * 2).await;
    let anew = claim("1");
    assert_eq!(store.claim(&anew).await.unwrap(), ClaimOutcome::Claimed { attempt: 1 });
    assert_eq!(rows_and_pieces(&db).await, (5, pieces / 6 * 4));
    assert!(store.fail(&anew.key, anew.token, MINUTE).await.unwrap());
    assert_eq!(store.purge(10).await.unwrap(), 4);
    assert_eq!(rows_and_pieces(&db).await, (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_compares_and_replays_nothing_keeps_nothing_for_it() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let [held, failed, told] = ["held", "failed", "told"].map(claim);
    for one in [&held, &failed] {
        store.claim(one).await.unwrap();
    }
    store.fail(&failed.key, failed.token, MINUTE).await.unwrap();
    finish(&store, told.clone(), None).await;
    // In a lane, and taken over.
    let mut all = JoinSet::new();
    for n in 0..40 {
        let store = store.clone();
        all.spawn(async move {
            let (first, second) = (claim(&n.to_string()), claim(&n.to_string()));
            store.claim(&first).await.unwrap();
            store.fail(&first.key, first.token, MINUTE).await.unwrap();
            finish(&store, second, None).await;
        });
    }
    all.join_all().await;
    let client = db.client().await;
    let known = "SELECT count(*) FROM processed_events
                 WHERE fingerprint IS NOT NULL OR response IS NOT NULL";
    assert_eq!(client.query_one(known, &[]).await.unwrap().get::<_, i64>(0), 0);

    let sizes = "CREATE TABLE before AS
                     SELECT scope, event_key, status, token, attempt, claimed_at, lease_until,
                            done_at, expires_at, response_status
                     FROM processed_events;
                 CREATE TABLE now AS SELECT * FROM processed_events";
    client.batch_execute(sizes).await.unwrap();
    let sizes = "SELECT event_key, pg_column_size(now.*) - pg_column_size(before.*)
                 FROM now JOIN before USING (scope, event_key)";
    for row in client.query(sizes, &[]).await.unwrap() {
        let (key, longer): (String, i32) = (row.get(0), row.get(1));
        // A row without any NULL had no map of them.
        let map = if ["held", "failed"].contains(&&*key) { 0 } else { 8 };
        assert_eq!(longer, map, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_replica_compares_with_what_the_first_has_stored() {
    let db = postgres::schema().await;
    db.store().await;
    let cached = || db.builder().done_cache(100, MINUTE);
    let one = cached().connect(db.bare_url()).await.unwrap();
    let other = cached().named_statements(true).connect(db.bare_url()).await.unwrap();
    let response = Some(noise(10_000, 1));
    for state in ["works", "died", "failed", "done"] {
        let first = claim_of(state, 1);
        match state {
            "done" => drop(finish(&one, first.clone(), response.clone()).await),
            _ => drop(one.claim(&first).await.unwrap()),
        }
        if state == "failed" {
            one.fail(&first.key, first.token, MINUTE).await.unwrap();
        }
    }
    let shift = "UPDATE processed_events SET lease_until = now() WHERE event_key = 'died'";
    db.client().await.batch_execute(shift).await.unwrap();
    for _ in 0..3 {
        for state in ["works", "died", "done"] {
            for replay in [false, true] {
                let outcome = other.claim(&claim_of(state, 2).with_replay(replay)).await.unwrap();
                assert_eq!(outcome, ClaimOutcome::OtherPayload, "{state}");
            }
        }
        assert!(in_progress(&other.claim(&claim_of("works", 1)).await.unwrap()));
        let outcome = other.claim(&claim_of("done", 1).with_replay(true)).await.unwrap();
        assert_eq!(outcome, done_with(response.clone()));
        assert_eq!(other.claim(&claim("done")).await.unwrap(), done_with(None));
    }
    let taken = ClaimOutcome::Claimed { attempt: 2 };
    assert_eq!(other.claim(&claim_of("died", 1)).await.unwrap(), taken);
    assert_eq!(other.claim(&claim_of("failed", 2)).await.unwrap(), taken);
    for (key, payload) in [("died", 2), ("failed", 1)] {
        let outcome = one.claim(&claim_of(key, payload)).await.unwrap();
        assert_eq!(outcome, ClaimOutcome::OtherPayload, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn long_responses_go_through_the_lanes_many_at_once() {
    let db = postgres::schema().await;
    db.store().await;
    for named in [false, true] {
        let builder = db.builder().pool_size(1).named_statements(named);
        let store = builder.timeout(Duration::from_secs(30)).connect(db.bare_url()).await.unwrap();
        let key = |n: usize| format!("{named} {n}");
        let mut all = JoinSet::new();
        for n in 0..64 {
            let (store, first) = (store.clone(), claim_of(&key(n), n));
            all.spawn(async move { finish(&store, first, Some(noise(300 * 1024, n))).await });
        }
        all.join_all().await;
        // Each is asked for twice, looked at without being asked for, and by another payload.
        let mut asking = JoinSet::new();
        for ask in 0..64 * 4 {
            let (n, way) = (ask / 4, ask % 4);
            let payload = if way == 3 { n + 1 } else { n };
            let claim = claim_of(&key(n), payload).with_replay(way != 0);
            let store = store.clone();
            asking.spawn(async move {
                let outcome = store.claim(&claim).await.unwrap();
                let expected = match way {
                    0 => done_with(None),
                    3 => ClaimOutcome::OtherPayload,
                    _ => done_with(Some(noise(300 * 1024, n))),
                };
                assert!(outcome == expected, "{way}: another's answer for {:?}", claim.key);
            });
        }
        asking.join_all().await;
    }
}

/// Between a claim's look and its taking of the key, another payload takes the key and dies at it.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_another_payload_has_taken_meanwhile_is_not_taken_from_it() {
    for transactional in [false, true] {
        let db = postgres::schema().await;
        let store = db.store().await;
        let client = db.client().await;
        // A statement that takes the key waits before it reads the row, and its snapshot is older.
        client
            .batch_execute(
                "CREATE TABLE gate ();
                 CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
                 DECLARE
                     is_open boolean := false;
                 BEGIN
                     WHILE NOT is_open LOOP
                         PERFORM pg_sleep(0.005);
                         EXECUTE format('SELECT EXISTS (SELECT FROM %I.gate)', TG_TABLE_SCHEMA)
                             INTO is_open;
                     END LOOP;
                     RETURN NULL;
                 END $$",
            )
            .await
            .unwrap();
        let failed = claim_of("1", 1);
        store.claim(&failed).await.unwrap();
        store.fail(&failed.key, failed.token, MINUTE).await.unwrap();
        let wait = "CREATE TRIGGER wait BEFORE UPDATE ON processed_events
                    FOR EACH STATEMENT EXECUTE FUNCTION wait();
                    SET session_replication_role = replica";
        client.batch_execute(wait).await.unwrap();

        let layer = DedupeLayer::new(store, KeySource::header("x-id").unwrap())
            .scope("s")
            .fingerprint(Fingerprint::Body);
        let layer = if transactional { layer.transactional() } else { layer };
        let service = layer.layer(service_fn(async |_: Request<DedupeBody<Full<Bytes>>>| {
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
        }));
        let request = Request::post("/").header("x-id", "1").body(Full::from("corrected")).unwrap();
        let asking = tokio::spawn(service.oneshot(request));
        let waits = format!(
            "SELECT count(*) FROM pg_stat_activity
             WHERE wait_event = 'PgSleep' AND strpos(query, '\"{}\"') > 0",
            db.name(),
        );
        let began = Instant::now();
        while client.query_one(&waits, &[]).await.unwrap().get::<_, i64>(0) == 0 {
            assert!(began.elapsed() < Duration::from_secs(20), "nobody takes the key");
            sleep(Duration::from_millis(5)).await;
        }
        let taken = "UPDATE processed_events
                     SET status = 'in_progress', attempt = 2,
                         lease_until = now() - interval '1 minute', expires_at = now() + interval '1 day';
                     INSERT INTO gate DEFAULT VALUES";
        client.batch_execute(taken).await.unwrap();
        let answer = asking.await.unwrap().unwrap();
        let refused = StatusCode::UNPROCESSABLE_ENTITY;
        assert_eq!(answer.status(), refused, "transactional: {transactional}");
    }
}
