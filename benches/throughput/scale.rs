//! What grows: the table, and time.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::task::JoinSet;
use tower_dedupe::PgStore;

use super::{
    contenders::{Contender, Ours, pool},
    load::{self, Events},
    store,
};

/// Claims in a table of ten thousand rows, and of ten million.
pub async fn growth(url: &str) {
    let client = pool(url, 1).get().await.unwrap();
    println!("{:>10} rows {:>10} in flight {:>10} per s {:>10}", "", "", "", "p50");
    for named in [false, true] {
        let mut small = Vec::new();
        for rows in [10_000, 10_000_000] {
            // Filled as it fills in use, keys anywhere in the index; what is in memory is the
            // server's to decide.
            client
                .batch_execute("DROP TABLE IF EXISTS bench_events, bench_events_migrations")
                .await
                .unwrap();
            let store =
                store(url, |builder| builder.named_statements(named).done_cache(0, Duration::ZERO))
                    .await;
            store.migrate().await.unwrap();
            fill(url, rows).await;
            let ours: Arc<dyn Contender> = Arc::new(Ours::new(store));
            for (place, in_flight) in [1, 64].into_iter().enumerate() {
                load::run(&ours, Events::Fresh, in_flight, Duration::from_secs(2)).await;
                let time = Duration::from_secs(8);
                let counted = load::run(&ours, Events::Fresh, in_flight, time).await;
                println!(
                    "{rows:>15} {in_flight:>20} {:>16.0} {:>10.0?}{}",
                    counted.per_second(),
                    counted.at(0.5),
                    if named { "  named" } else { "" },
                );
                match small.get(place) {
                    None => small.push(counted),
                    Some(small) => println!(
                        "{:>46} {:>10.2} x",
                        "latency, of that with few rows:",
                        counted.at(0.5).as_secs_f64() / small.at(0.5).as_secs_f64(),
                    ),
                }
            }
        }
    }
    client
        .batch_execute("DROP TABLE IF EXISTS bench_events, bench_events_migrations")
        .await
        .unwrap();
}

async fn fill(url: &str, rows: u64) {
    let client = pool(url, 1).get().await.unwrap();
    let insert = format!(
        "INSERT INTO bench_events
             (scope, event_key, status, token, attempt, claimed_at, lease_until, done_at,
              expires_at, response_status)
         SELECT 'webhooks', 'evt_' || md5(n::text), 'done', decode(md5(n::text), 'hex'), 1, now(),
                now(), now(), now() + interval '30 days', 200
         FROM generate_series(1, {rows}) AS n"
    );
    client.batch_execute(&insert).await.unwrap();
    client.batch_execute("VACUUM ANALYZE bench_events").await.unwrap();
    client.batch_execute("CHECKPOINT").await.unwrap();
}

/// The memory of this process while a million events are handled, some twice, some at the second
/// attempt.
pub async fn memory(url: &str) {
    let Some(_) = resident() else { return println!("memory is measured on Linux only") };
    let client = pool(url, 1).get().await.unwrap();
    client
        .batch_execute("DROP TABLE IF EXISTS bench_events, bench_events_migrations")
        .await
        .unwrap();
    let store: PgStore = store(url, |builder| builder.named_statements(true)).await;
    store.migrate().await.unwrap();
    let ours = Arc::new(Ours::new(store));
    let began = Instant::now();
    println!("{:>10} events {:>10} MB resident", "", "");
    for hundred_thousand in 1..=10_u64 {
        let mut workers = JoinSet::new();
        for worker in 0..256_u64 {
            let ours = ours.clone();
            workers.spawn(async move {
                for n in (worker..100_000).step_by(256) {
                    let key = load::key(hundred_thousand, n);
                    let new = match n % 10 {
                        0 => ours.handle_at_the_second_attempt(key.clone()).await,
                        _ => ours.handle(key.clone()).await,
                    };
                    assert!(new);
                    if n % 7 == 0 {
                        assert!(!ours.handle(key).await);
                    }
                }
            });
        }
        workers.join_all().await;
        println!(
            "{:>17} {:>22.1}   after {:.0?}",
            hundred_thousand * 100_000,
            resident().unwrap_or_default(),
            began.elapsed(),
        );
    }
    client
        .batch_execute("DROP TABLE IF EXISTS bench_events, bench_events_migrations")
        .await
        .unwrap();
}

/// Megabytes.
fn resident() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kilobytes: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kilobytes / 1024.0)
}
