//! Load: so many events in flight, for so long.

use std::{
    fmt,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use tokio::task::JoinSet;

use super::contenders::Contender;

/// The events of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Events {
    /// Every event is new.
    Fresh,
    /// Every event was handled before; there are a thousand.
    Duplicates,
    /// The same, and there is but one.
    Storm,
    /// Every event is new, and the handler of each tenth fails at first.
    Failures,
}

impl fmt::Display for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{self:?}").to_lowercase())
    }
}

impl Events {
    pub fn all_known(self) -> bool {
        matches!(self, Self::Duplicates | Self::Storm)
    }

    /// How many keys were handled before.
    fn known(self) -> u64 {
        match self {
            Self::Fresh | Self::Failures => 0,
            Self::Duplicates => 1000,
            Self::Storm => 1,
        }
    }
}

/// What was counted.
#[derive(Default)]
pub struct Counted {
    pub latencies: Vec<Duration>,
    pub took: Duration,
}

impl Counted {
    pub fn add(&mut self, other: Self) {
        self.latencies.extend(other.latencies);
        self.latencies.sort_unstable();
        self.took += other.took;
    }

    pub fn per_second(&self) -> f64 {
        self.latencies.len() as f64 / self.took.as_secs_f64()
    }

    /// The latency that this share of the events did not exceed.
    pub fn at(&self, share: f64) -> Duration {
        self.latencies[((self.latencies.len() - 1) as f64 * share) as usize]
    }
}

/// Handles the known keys, so that they are known.
pub async fn prepare(contender: &dyn Contender, events: Events) {
    for n in 0..events.known() {
        contender.handle(key(KNOWN, n)).await;
    }
}

pub async fn run(
    contender: &Arc<dyn Contender>,
    events: Events,
    in_flight: usize,
    time: Duration,
) -> Counted {
    static RUN: AtomicU64 = AtomicU64::new(KNOWN + 1);
    let run = RUN.fetch_add(1, Ordering::Relaxed);
    let next = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..in_flight {
        let (contender, next) = (contender.clone(), next.clone());
        workers.spawn(async move {
            let mut latencies = Vec::new();
            let mut asked = Instant::now();
            while asked - began < time {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let new = match events {
                    Events::Fresh => contender.handle(key(run, n)).await,
                    Events::Failures if n % 10 == 0 => {
                        contender.handle_at_the_second_attempt(key(run, n)).await
                    }
                    Events::Failures => contender.handle(key(run, n)).await,
                    Events::Duplicates | Events::Storm => {
                        contender.handle(key(KNOWN, n % events.known())).await
                    }
                };
                assert_eq!(new, !events.all_known());
                let answered = Instant::now();
                latencies.push(answered - asked);
                asked = answered;
            }
            latencies
        });
    }
    let mut counted = Counted::default();
    let latencies = workers.join_all().await.into_iter().flatten().collect();
    counted.add(Counted { latencies, took: began.elapsed() });
    counted
}

/// A key that no other run has, with 64 bits that look random, so that it falls anywhere in the
/// index.
pub fn key(run: u64, n: u64) -> String {
    static SALT: LazyLock<u64> =
        LazyLock::new(|| SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64);
    let mut mixed = (*SALT ^ run << 40 ^ n).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    format!("evt_{mixed:016x}{n:x}")
}

/// The run of the known keys.
const KNOWN: u64 = 0;
