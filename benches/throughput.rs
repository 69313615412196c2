//! Claims and done marks per second, against what people write by hand, in one run on one machine:
//!
//!     cargo bench --bench throughput            # a table
//!     cargo bench --bench throughput -- --json  # one JSON document on stdout
//!
//! It starts a durable Postgres of its own (fsync and synchronous_commit on), or uses the one at
//! `DATABASE_URL`. An event is claimed and marked done, as a request does it; keys are random. The
//! figures are good as ratios of one run.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![allow(unreachable_pub, missing_docs)]

#[path = "../examples/support/throwaway.rs"]
#[allow(dead_code)]
mod throwaway;

use std::{
    env,
    future::Future,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_postgres::NoTls;
use tower_dedupe::{
    ClaimStore, EventKey, PgStore, Scope,
    claim::{Claim, ClaimOutcome, Held},
    store::Completion,
};

use self::throwaway::{Durability, Throwaway};

/// One way to deduplicate: what happens to an event, from its arrival to its end.
trait Contender: Clone + Send + Sync + 'static {
    /// Claims the event, and marks it done if it was new.
    fn handle(&self, key: String) -> impl Future<Output = bool> + Send;
}

/// What careful people write: claim by insert, mark done by update, statements cached.
#[derive(Clone)]
struct HandWritten(Pool);

impl Contender for HandWritten {
    async fn handle(&self, key: String) -> bool {
        let inserted = {
            let client = self.0.get().await.unwrap();
            let claim = client
                .prepare_cached(
                    "INSERT INTO hand_written (event_key, status, claimed_at)
                     VALUES ($1, 'in_progress', now()) ON CONFLICT DO NOTHING",
                )
                .await
                .unwrap();
            client.execute(&claim, &[&key]).await.unwrap()
        };
        if inserted == 0 {
            return false;
        }
        let client = self.0.get().await.unwrap();
        let done = client
            .prepare_cached("UPDATE hand_written SET status = 'done' WHERE event_key = $1")
            .await
            .unwrap();
        client.execute(&done, &[&key]).await.unwrap() == 1
    }
}

/// What is copied: one insert, and no done mark.
#[derive(Clone)]
struct Copied(Pool);

impl Contender for Copied {
    async fn handle(&self, key: String) -> bool {
        let client = self.0.get().await.unwrap();
        let claim = client
            .prepare_cached("INSERT INTO copied (event_key) VALUES ($1) ON CONFLICT DO NOTHING")
            .await
            .unwrap();
        client.execute(&claim, &[&key]).await.unwrap() == 1
    }
}

/// This crate's store.
#[derive(Clone)]
struct Ours(PgStore, Scope);

impl Contender for Ours {
    async fn handle(&self, key: String) -> bool {
        let key = EventKey::new(self.1.clone(), key).unwrap();
        let claim = Claim::new(key, Duration::from_secs(60), Duration::from_secs(86_400));
        match self.0.claim(&claim).await.unwrap() {
            ClaimOutcome::Claimed { .. } => {}
            _ => return false,
        }
        let completion = Completion::new(Some(200), Duration::from_secs(30 * 86_400));
        self.0.complete(&claim.key, claim.token, completion).await.unwrap() == Held::Yes
    }
}

/// The keys of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Workload {
    /// Every event is new.
    Fresh,
    /// Every event was handled before.
    Duplicates,
}

struct Measured {
    name: &'static str,
    workload: Workload,
    in_flight: usize,
    per_second: f64,
    p50: Duration,
    p99: Duration,
}

async fn measure<C: Contender>(
    name: &'static str,
    contender: &C,
    workload: Workload,
    in_flight: usize,
    time: Duration,
) -> Measured {
    static RUN: AtomicU64 = AtomicU64::new(0);
    let run = RUN.fetch_add(1, Ordering::Relaxed);
    let known: Arc<Vec<String>> = Arc::new((0..1000).map(|n| random_key(run, n)).collect());
    if workload == Workload::Duplicates {
        for key in known.iter() {
            contender.handle(key.clone()).await;
        }
    }
    let until = Instant::now() + time;
    let next = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..in_flight {
        let (contender, known, next) = (contender.clone(), known.clone(), next.clone());
        workers.spawn(async move {
            let mut latencies = Vec::new();
            while Instant::now() < until {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let key = match workload {
                    Workload::Fresh => random_key(run + 1_000_000, n),
                    Workload::Duplicates => known[n as usize % known.len()].clone(),
                };
                let asked = Instant::now();
                let new = contender.handle(key).await;
                latencies.push(asked.elapsed());
                assert_eq!(new, workload == Workload::Fresh);
            }
            latencies
        });
    }
    let mut latencies: Vec<_> = workers.join_all().await.into_iter().flatten().collect();
    let took = began.elapsed();
    latencies.sort_unstable();
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
    Measured {
        name,
        workload,
        in_flight,
        per_second: latencies.len() as f64 / took.as_secs_f64(),
        p50: at(0.5),
        p99: at(0.99),
    }
}

/// A key that no other run has, with 64 bits that look random, so that it falls anywhere in the
/// index.
fn random_key(run: u64, n: u64) -> String {
    static SALT: LazyLock<u64> =
        LazyLock::new(|| SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64);
    let mut mixed = (*SALT ^ run << 40 ^ n).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    format!("evt_{mixed:016x}{n:x}")
}

fn pool(url: &str, size: usize) -> Pool {
    let config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(url.parse().unwrap(), NoTls, config);
    Pool::builder(manager).max_size(size).build().unwrap()
}

#[tokio::main]
async fn main() {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let as_json = arguments.iter().any(|argument| argument == "--json");
    let time = match env::var("SECONDS") {
        Ok(seconds) => Duration::from_secs_f64(seconds.parse().unwrap()),
        Err(_) => Duration::from_secs(3),
    };
    let (url, _server) = match env::var("DATABASE_URL") {
        Ok(url) => (url, None),
        Err(_) => {
            let server = Throwaway::start(Durability::Durable).unwrap();
            (server.url(), Some(server))
        }
    };
    let setup = pool(&url, 1).get().await.unwrap();
    setup
        .batch_execute(
            "DROP TABLE IF EXISTS hand_written, copied;
             CREATE TABLE hand_written (event_key text PRIMARY KEY, status text NOT NULL,
                 claimed_at timestamptz NOT NULL);
             CREATE TABLE copied (event_key text PRIMARY KEY)",
        )
        .await
        .unwrap();
    drop(setup);

    let hand_written = HandWritten(pool(&url, 16));
    let copied = Copied(pool(&url, 16));
    let store = PgStore::builder().table("bench_events").connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let ours = Ours(store, Scope::new("bench").unwrap());

    let mut all = Vec::new();
    for workload in [Workload::Fresh, Workload::Duplicates] {
        for in_flight in [1, 16, 64, 256] {
            let warm_up = Duration::from_millis(300);
            measure("warm up", &hand_written, workload, in_flight, warm_up).await;
            all.push(measure("hand-written", &hand_written, workload, in_flight, time).await);
            measure("warm up", &copied, workload, in_flight, warm_up).await;
            all.push(measure("copied insert", &copied, workload, in_flight, time).await);
            measure("warm up", &ours, workload, in_flight, warm_up).await;
            all.push(measure("tower-dedupe", &ours, workload, in_flight, time).await);
        }
    }
    if as_json {
        println!("{}", serde_json::to_string_pretty(&document(&all)).unwrap());
    } else {
        println!(
            "{:<12} {:>9} {:<16} {:>10} {:>10} {:>10}",
            "events", "in flight", "", "per s", "p50", "p99"
        );
        for one in &all {
            println!(
                "{:<12} {:>9} {:<16} {:>10.0} {:>10.2?} {:>10.2?}",
                format!("{:?}", one.workload).to_lowercase(),
                one.in_flight,
                one.name,
                one.per_second,
                one.p50,
                one.p99,
            );
        }
    }
}

fn document(all: &[Measured]) -> Value {
    let rows: Vec<_> = all
        .iter()
        .map(|one| {
            json!({
                "contender": one.name,
                "events": format!("{:?}", one.workload).to_lowercase(),
                "in_flight": one.in_flight,
                "per_second": one.per_second,
                "p50_us": one.p50.as_micros() as u64,
                "p99_us": one.p99.as_micros() as u64,
            })
        })
        .collect();
    json!({ "rows": rows })
}
