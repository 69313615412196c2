//! Claims and done marks per second in Postgres, against what people write by hand, in one run on
//! one machine:
//!
//!     cargo bench --bench throughput                        # a table
//!     cargo bench --bench throughput -- --json              # one JSON document
//!     cargo bench --bench throughput -- fresh 256           # what is named: events, in flight
//!     cargo bench --bench throughput -- --plot plot.svg     # the fresh events as a picture
//!     cargo bench --bench throughput -- growth              # a table of ten million rows
//!     cargo bench --bench throughput -- memory              # a million events
//!
//! It starts a durable Postgres of its own (fsync and synchronous_commit on), or uses the one at
//! `DATABASE_URL`; `SECONDS` is how long each figure is measured for (3). Keys are random. The
//! contenders take turns, and the figures are good as ratios of one run.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![allow(unreachable_pub, missing_docs)]

mod contenders;
mod load;
mod plot;
mod scale;
#[path = "../../examples/support/throwaway.rs"]
#[allow(dead_code)]
mod throwaway;

use std::{
    env, num::NonZero, path::PathBuf, process, sync::Arc, thread::available_parallelism,
    time::Duration,
};

use serde_json::json;
use tower_dedupe::{PgStore, store::PgStoreBuilder};

use self::{
    contenders::{Contender, Copied, HandWritten, Ours, Select, pool},
    load::{Counted, Events},
    plot::{Line, Point},
    throwaway::{Durability, Throwaway},
};

/// Who takes part, under which name.
type Named = (String, Arc<dyn Contender>);

struct Bench {
    url: String,
    time: Duration,
    hand_written: Named,
    copied: Named,
}

struct Measured {
    name: String,
    events: Events,
    in_flight: usize,
    counted: Counted,
}

#[tokio::main]
async fn main() {
    let asked = Asked::read(env::args().skip(1)).unwrap_or_else(|why| {
        eprintln!("{why}");
        process::exit(2)
    });
    let seconds = env::var("SECONDS").map_or(3.0, |seconds| seconds.parse().unwrap());

    let (url, _server) = match env::var("DATABASE_URL") {
        Ok(url) => (url, None),
        Err(_) => {
            let server =
                Throwaway::start(Durability::Durable).unwrap_or_else(|why| panic!("{why}"));
            (server.url(), Some(server))
        }
    };
    let machine = machine(&url).await;
    if asked.names("growth") {
        println!("{machine}");
        return scale::growth(&url).await;
    }
    if asked.names("memory") {
        println!("{machine}");
        return scale::memory(&url).await;
    }

    let bench = Bench::new(url, Duration::from_secs_f64(seconds)).await;
    let mut all = Vec::new();
    for events in EVENTS.into_iter().filter(|events| asked.wants(&EVENTS, events)) {
        for in_flight in IN_FLIGHT.into_iter().filter(|number| asked.wants(&IN_FLIGHT, number)) {
            all.extend(bench.measure(events, in_flight).await);
        }
    }
    if let Some(path) = &asked.plot {
        plot::draw(path, &machine, &lines(&all)).unwrap();
    }
    if asked.json {
        println!("{:#}", document(&machine, &all));
    } else {
        print(&machine, &all);
    }
}

/// What is asked for on the command line.
struct Asked {
    words: Vec<String>,
    json: bool,
    plot: Option<PathBuf>,
}

impl Asked {
    fn read(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let (mut words, mut json, mut plot) = (Vec::new(), false, None);
        let all = || EVENTS.iter().map(Events::to_string).chain(IN_FLIGHT.map(|n| n.to_string()));
        let known: Vec<_> = all().chain(["growth", "memory"].map(str::to_owned)).collect();
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            match &*argument {
                // Cargo itself says so.
                "--bench" => {}
                "--json" => json = true,
                "--plot" => plot = Some(arguments.next().ok_or("--plot needs a file")?.into()),
                word if known.iter().any(|one| one == word) => words.push(argument),
                other => {
                    let known = known.join(", ");
                    return Err(format!("{other:?} is none of --json, --plot FILE, {known}"));
                }
            }
        }
        Ok(Self { words, json, plot })
    }

    fn names(&self, word: &str) -> bool {
        self.words.iter().any(|one| one == word)
    }

    /// Whether it is named, or none of its kind is.
    fn wants<T: ToString>(&self, kind: &[T], one: &T) -> bool {
        self.names(&one.to_string()) || !kind.iter().any(|other| self.names(&other.to_string()))
    }
}

const EVENTS: [Events; 4] = [Events::Fresh, Events::Duplicates, Events::Storm, Events::Failures];
const IN_FLIGHT: [usize; 4] = [1, 16, 64, 256];

impl Bench {
    /// The baselines get the pools with which they are fastest here.
    async fn new(url: String, time: Duration) -> Self {
        let setup = pool(&url, 1).get().await.unwrap();
        setup.batch_execute("DROP TABLE IF EXISTS hand_written, copied").await.unwrap();
        setup.batch_execute(HandWritten::TABLE).await.unwrap();
        setup.batch_execute(Copied::TABLE).await.unwrap();
        store(&url, |builder| builder).await.migrate().await.unwrap();
        Self {
            hand_written: fastest("hand-written", |size| HandWritten(pool(&url, size))).await,
            copied: fastest("copied insert", |size| Copied(pool(&url, size))).await,
            url,
            time,
        }
    }

    /// The contenders of these events, with new connections.
    async fn contenders(&self, events: Events) -> Vec<Named> {
        let ours = async |name: &str, set: fn(PgStoreBuilder) -> PgStoreBuilder| {
            let ours: Arc<dyn Contender> = Arc::new(Ours::new(store(&self.url, set).await));
            (format!("tower-dedupe{name}"), ours)
        };
        let mut contenders = vec![self.hand_written.clone()];
        if events != Events::Failures {
            contenders.push(self.copied.clone());
        }
        if events == Events::Storm {
            contenders.push((
                "one-row SELECT, 4 connections".into(),
                Arc::new(Select(pool(&self.url, 4))),
            ));
            contenders.push(ours("", |builder| builder).await);
        }
        // Without the cache, which would answer what was handled before.
        contenders.push(ours(", unnamed", |builder| builder.done_cache(0, Duration::ZERO)).await);
        let named =
            |builder: PgStoreBuilder| builder.done_cache(0, Duration::ZERO).named_statements(true);
        contenders.push(ours(", named", named).await);
        contenders
    }

    /// Lets all contenders take turns.
    async fn measure(&self, events: Events, in_flight: usize) -> Vec<Measured> {
        const TURNS: u32 = 3;
        let setup = pool(&self.url, 1).get().await.unwrap();
        setup.batch_execute("TRUNCATE hand_written, copied, bench_events").await.unwrap();
        setup.batch_execute("CHECKPOINT").await.unwrap();
        let contenders = self.contenders(events).await;
        for (_, contender) in &contenders {
            load::prepare(&**contender, events).await;
            load::run(contender, events, in_flight, self.time / 10).await;
        }
        let mut measured: Vec<_> = contenders
            .iter()
            .map(|(name, _)| Measured {
                name: name.clone(),
                events,
                in_flight,
                counted: Counted::default(),
            })
            .collect();
        for _ in 0..TURNS {
            for ((_, contender), measured) in contenders.iter().zip(&mut measured) {
                let turn = load::run(contender, events, in_flight, self.time / TURNS).await;
                measured.counted.add(turn);
            }
        }
        measured
    }
}

/// The contender with the pool size that handles most at 256 in flight.
async fn fastest<C: Contender + 'static>(name: &str, with: impl Fn(usize) -> C) -> Named {
    let mut best: Option<(f64, Named)> = None;
    for size in [4, 8, 16, 32] {
        let contender: Arc<dyn Contender> = Arc::new(with(size));
        let time = Duration::from_millis(500);
        let rate = load::run(&contender, Events::Fresh, 256, time).await.per_second();
        if best.as_ref().is_none_or(|(most, _)| rate > *most) {
            best = Some((rate, (format!("{name}, {size} connections"), contender)));
        }
    }
    best.unwrap().1
}

/// A store with four connections, as it comes.
async fn store(url: &str, set: impl FnOnce(PgStoreBuilder) -> PgStoreBuilder) -> PgStore {
    set(PgStore::builder().table("bench_events")).connect(url).await.unwrap()
}

async fn machine(url: &str) -> String {
    let client = pool(url, 1).get().await.unwrap();
    let row = client
        .query_one(
            "SELECT current_setting('server_version'), current_setting('fsync'),
                    current_setting('synchronous_commit'), current_setting('shared_buffers')",
            &[],
        )
        .await
        .unwrap();
    let [version, fsync, commit, buffers]: [String; 4] = [0, 1, 2, 3].map(|n| row.get(n));
    let cores = available_parallelism().map_or(0, NonZero::get);
    let version = version.split(' ').next().unwrap_or_default();
    format!(
        "{cores} cores, Postgres {version} on the same machine, fsync {fsync}, synchronous_commit \
         {commit}, shared_buffers {buffers}"
    )
}

/// The same measurement of another contender.
fn beside<'a>(all: &'a [Measured], one: &Measured, name: &str) -> Option<&'a Counted> {
    let same = |other: &&Measured| {
        (other.events, other.in_flight) == (one.events, one.in_flight)
            && other.name.starts_with(name)
    };
    all.iter().find(same).map(|other| &other.counted)
}

fn print(machine: &str, all: &[Measured]) {
    println!("{machine}\n");
    println!(
        "{:<11}{:>9}  {:<31}{:>9}{:>11}{:>11}{:>9}{:>9}",
        "events", "in flight", "", "per s", "p50", "p99", "x hand", "x copied"
    );
    for one in all {
        let ratio = |name| {
            let other = beside(all, one, name)?;
            Some(format!("{:.2}", one.counted.per_second() / other.per_second()))
        };
        println!(
            "{:<11}{:>9}  {:<31}{:>9.0}{:>11.1?}{:>11.1?}{:>9}{:>9}",
            one.events.to_string(),
            one.in_flight,
            one.name,
            one.counted.per_second(),
            one.counted.at(0.5),
            one.counted.at(0.99),
            ratio("hand-written").unwrap_or_default(),
            ratio("copied").unwrap_or_default(),
        );
    }
}

fn document(machine: &str, all: &[Measured]) -> serde_json::Value {
    let figures: Vec<_> = all
        .iter()
        .map(|one| {
            json!({
                "contender": one.name,
                "events": one.events.to_string(),
                "in_flight": one.in_flight,
                "per_second": one.counted.per_second(),
                "p50_us": one.counted.at(0.5).as_secs_f64() * 1e6,
                "p99_us": one.counted.at(0.99).as_secs_f64() * 1e6,
            })
        })
        .collect();
    json!({ "machine": machine, "figures": figures })
}

fn lines(all: &[Measured]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for one in all.iter().filter(|one| one.events == Events::Fresh) {
        let point = Point {
            in_flight: one.in_flight as f64,
            per_second: one.counted.per_second(),
            median: one.counted.at(0.5),
        };
        match lines.iter_mut().find(|line| line.name == one.name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line { name: one.name.clone(), points: vec![point] }),
        }
    }
    lines
}
