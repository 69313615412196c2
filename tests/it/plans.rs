//! Every statement finds its rows by the primary key, however large the table is.

use std::{env, fs, time::Duration};

use tokio::task::JoinSet;
use tower_dedupe::{
    ClaimStore, PgStore,
    claim::{ClaimOutcome, Held},
};

use crate::support::{
    claims::{claim, done},
    postgres::{Schema, own_fast},
    throwaway::Throwaway,
};

/// Rows in the table. The plans at ten million are looked at by `PLAN_ROWS=10000000`.
fn rows() -> u64 {
    env::var("PLAN_ROWS").map_or(200_000, |rows| rows.parse().unwrap())
}

/// The server, writing the plan of each statement to its log.
fn explaining(server: &Throwaway) -> String {
    let settings = "-c%20session_preload_libraries%3Dauto_explain\
                    %20-c%20auto_explain.log_min_duration%3D0";
    format!("{}?options={settings}", server.url())
}

/// Every plan that the server has written to its log: its statement, and its nodes.
fn plans(server: &Throwaway) -> Vec<String> {
    let log = fs::read_to_string(server.data().with_file_name("log")).unwrap();
    let mut plans = Vec::new();
    for line in log.lines() {
        if line.contains("plan:") {
            plans.push(String::new());
        } else if line.starts_with('\t') {
            if let Some(plan) = plans.last_mut() {
                *plan += line;
                plan.push('\n');
            }
        } else if !plans.last().is_none_or(String::is_empty) {
            // Whatever else the server says ends a plan.
            plans.push(String::new());
        }
    }
    plans.retain(|plan| plan.contains("processed_events"));
    plans
}

/// Claims, duplicates, renewals, ends, alone and in lanes, often enough for the server to make up
/// its mind about prepared statements.
async fn use_all(store: &PgStore, round: u64) {
    let key = |n: u64| format!("{round} {n}");
    let fresh: Vec<_> = (0..150).map(|n| claim(&key(n))).collect();
    let known: Vec<_> = (0..50).map(|n| claim(&format!("known {}", n * 37))).collect();
    let mut asking = JoinSet::new();
    for one in fresh.iter().cloned().chain(known) {
        let store = store.clone();
        asking.spawn(async move { store.claim(&one).await.unwrap() });
    }
    let outcomes = asking.join_all().await;
    let claimed = outcomes.iter().filter(|one| **one == ClaimOutcome::Claimed { attempt: 1 });
    assert_eq!(claimed.count(), fresh.len());

    assert!(store.renew(&fresh).await.unwrap().iter().all(|held| *held == Held::Yes));
    let mut ending = JoinSet::new();
    for one in fresh {
        let store = store.clone();
        ending.spawn(async move { store.complete(&one.key, one.token, done()).await.unwrap() });
    }
    assert!(ending.join_all().await.iter().all(|held| *held == Held::Yes));

    // Each alone: freed, taken over, forgotten.
    let (first, second) = (claim(&key(999)), claim(&key(999)));
    store.claim(&first).await.unwrap();
    assert!(store.fail(&first.key, first.token, Duration::from_secs(60)).await.unwrap());
    assert_eq!(store.claim(&second).await.unwrap(), ClaimOutcome::Claimed { attempt: 2 });
    assert!(store.show(&second.key).await.unwrap().is_some());
    assert!(store.forget(&second.key).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_statement_goes_by_the_primary_key() {
    let server = tokio::task::spawn_blocking(own_fast).await.unwrap();
    let db = Schema::on(&server.url()).await;
    db.store().await;
    let fill = format!(
        "INSERT INTO processed_events
             (scope, event_key, status, attempt, claimed_at, lease_until, done_at, expires_at)
         SELECT 's', 'known ' || n, 'done', 1, now(), now(), now(), now() + interval '30 days'
         FROM generate_series(0, {}) AS n",
        rows(),
    );
    let client = db.client().await;
    client.batch_execute(&fill).await.unwrap();

    // With statistics that were never gathered, and with fresh ones.
    let mut round = 0;
    for gathered in [false, true] {
        if gathered {
            client.batch_execute("VACUUM ANALYZE processed_events").await.unwrap();
        }
        for named in [false, true] {
            let url = explaining(&server);
            let store = db.builder().named_statements(named).connect(&url).await.unwrap();
            for _ in 0..12 {
                use_all(&store, round).await;
                round += 1;
            }
        }
    }
    let plans = plans(&server);
    let of = |node: &str| plans.iter().filter(|plan| plan.contains(node)).count();
    assert!(of("Insert on processed_events") > 48 && of("Update on processed_events") > 96);
    assert!(of("processed_events_pkey") > 192, "of {} plans", plans.len());
    assert!(of("unnest") > 96, "the lanes were used");
    for plan in &plans {
        assert!(!plan.contains("Seq Scan on processed_events"), "{plan}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_was_made_for_a_small_table_is_made_anew_when_it_has_grown() {
    let server = tokio::task::spawn_blocking(own_fast).await.unwrap();
    let db = Schema::on(&server.url()).await;
    db.store().await;
    let url = explaining(&server);
    // A pool of the application's own is looked at with each statement wrapped.
    let manager = deadpool_postgres::Manager::new(url.parse().unwrap(), tokio_postgres::NoTls);
    let pool = deadpool_postgres::Pool::builder(manager).max_size(1).build().unwrap();
    let builder = || db.builder().named_statements(true);
    let one_connection = builder().pool_size(1).connect(&url).await.unwrap();
    let of_the_application = builder().from_pool(pool).unwrap();
    // Soon after the connection was made, and when it has long been in use.
    for (store, before, after) in
        [(&one_connection, 10, 100), (&one_connection, 550, 250), (&of_the_application, 10, 100)]
    {
        let client = db.client().await;
        client
            .batch_execute(
                "TRUNCATE processed_events;
                 ALTER TABLE processed_events SET (autovacuum_enabled = off)",
            )
            .await
            .unwrap();
        let first = claim("first");
        store.claim(&first).await.unwrap();
        client.batch_execute("ANALYZE processed_events").await.unwrap();
        let seen = plans(&server).len();
        for _ in 0..before {
            store.claim(&claim("first")).await.unwrap();
            store.complete(&first.key, first.token, done()).await.unwrap();
        }
        let reads_all = |plan: &String| plan.contains("Seq Scan on processed_events");
        assert!(plans(&server)[seen..].iter().any(reads_all));

        let fill = "INSERT INTO processed_events
                        (scope, event_key, status, attempt, claimed_at, lease_until, expires_at)
                    SELECT 's', 'grown ' || n, 'done', 1, now(), now(), now() + interval '1 day'
                    FROM generate_series(0, 20000) AS n";
        client.batch_execute(fill).await.unwrap();
        for n in 0..after {
            let one = claim(&n.to_string());
            store.claim(&one).await.unwrap();
            store.complete(&one.key, one.token, done()).await.unwrap();
        }
        let all = plans(&server);
        assert!(!all[all.len() - 50..].iter().any(reads_all));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unnamed_statements_are_planned_each_time_and_leave_the_session_alone() {
    let server = tokio::task::spawn_blocking(own_fast).await.unwrap();
    let db = Schema::on(&server.url()).await;
    db.store().await;
    let said = async |named: bool| {
        let url = format!("{}?options=-c%20log_statement%3Dall", server.url());
        let builder = db.builder().named_statements(named).pool_size(1);
        let store = builder.connect(&url).await.unwrap();
        for n in 0..300 {
            store.claim(&claim(&format!("{named} {n}"))).await.unwrap();
        }
        let log = fs::read_to_string(server.data().with_file_name("log")).unwrap();
        log.matches("DISCARD PLANS").count()
    };
    assert_eq!(said(false).await, 0);
    // At 1, 2, 4, … 256 uses.
    assert_eq!(said(true).await, 9);
}
