//! What grows: the table, and time.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use deadpool_postgres::Client;
use tokio::task::JoinSet;
use tower_dedupe::{PgStore, store::PgStoreBuilder};

use super::{
    contenders::{Contender, Ours, pool},
    load::{self, Counted, Events},
    store,
};

/// Claims in a table of ten thousand rows, and of ten million.
pub async fn growth(url: &str) {
    let client = pool(url, 1).get().await.unwrap();
    let mut few: Vec<Counted> = Vec::new();
    println!("{:>10}  {:<9}{:>9}{:>10}{:>12}", "rows", "", "in flight", "per s", "p50");
    for rows in [10_000, 10_000_000] {
        drop_table(&client).await;
        store(url, |builder| builder).await.migrate().await.unwrap();
        fill(&client, rows).await;
        let mut place = 0;
        for (name, named) in [("unnamed", false), ("named", true)] {
            let set = |builder: PgStoreBuilder| {
                builder.named_statements(named).done_cache(0, Duration::ZERO)
            };
            let ours: Arc<dyn Contender> = Arc::new(Ours::new(store(url, set).await));
            for in_flight in [1, 64] {
                load::run(&ours, Events::Fresh, in_flight, Duration::from_secs(2)).await;
                let time = Duration::from_secs(6);
                let counted = load::run(&ours, Events::Fresh, in_flight, time).await;
                let (rate, p50) = (counted.per_second(), counted.at(0.5));
                print!("{rows:>10}  {name:<9}{in_flight:>9}{rate:>10.0}{p50:>12.1?}");
                match few.get(place) {
                    Some(few) => {
                        let times = p50.as_secs_f64() / few.at(0.5).as_secs_f64();
                        println!("  {times:.2} x the latency with few rows");
                    }
                    None => {
                        println!();
                        few.push(counted);
                    }
                }
                place += 1;
            }
        }
    }
    drop_table(&client).await;
}

async fn drop_table(client: &Client) {
    let drop = "DROP TABLE IF EXISTS bench_events, bench_events_migrations";
    client.batch_execute(drop).await.unwrap();
}

async fn fill(client: &Client, rows: u64) {
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
    drop_table(&client).await;
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
    drop_table(&client).await;
}

/// Megabytes.
fn resident() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kilobytes: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kilobytes / 1024.0)
}
