//! A server that takes webhooks from three senders, each with its own key, and handles each event
//! once:
//!
//!     cargo run --example quickstart
//!
//! It prints curl lines to paste. With `--demo` it drives itself through every situation instead.
//!
//! | environment | default | |
//! |---|---|---|
//! | `DATABASE_URL` | a throwaway Postgres, else memory | where claims and fulfilments are kept |
//! | `PORT` | 3000 | where to listen on 127.0.0.1; 0 picks a free port |
//! | `LEASE` | 5s | how long a crashed handler keeps its event |

#![allow(clippy::print_stdout, reason = "it talks to the person who runs it")]
#![allow(unreachable_pub, reason = "its modules are its own")]

#[path = "support/client.rs"]
#[allow(dead_code, clippy::expect_used, clippy::unwrap_used, reason = "tests use more of it")]
mod client;
#[path = "support/demo.rs"]
mod demo;
mod support;

use std::{
    env,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::{get, post},
};
use serde_json::{Value, json};
use tower_dedupe::{
    ClaimInfo, ClaimStore, DedupeLayer, Deduplicator, KeySource, MemoryStore, PgStore,
};

use self::support::{
    server::{self, Fault, lease, port, with_sources},
    supervisor,
    throwaway::{Durability, Throwaway},
    wish,
};

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .init();
    let demo = match env::args().nth(1).as_deref() {
        None => false,
        Some("--demo") => true,
        Some(other) => {
            eprintln!("unknown argument {other:?}; there is only --demo");
            return ExitCode::from(2);
        }
    };
    let (port, lease) = match (port(), lease()) {
        (Ok(port), Ok(lease)) => (port, lease),
        (Err(fault), _) | (_, Err(fault)) => {
            eprintln!("{fault}");
            return ExitCode::from(2);
        }
    };
    match run(demo, port, lease).await {
        Ok(code) => code,
        Err(fault) => {
            eprintln!("{}", with_sources(&*fault));
            ExitCode::FAILURE
        }
    }
}

async fn run(demo: bool, port: u16, lease: Duration) -> Result<ExitCode, Fault> {
    if let Ok(url) = env::var("DATABASE_URL") {
        return match demo {
            true => demo::run(Some(&url)).await,
            false => serve(Fulfilments::in_postgres(&url).await?, port, lease).await,
        };
    }
    match tokio::task::spawn_blocking(|| Throwaway::start(Durability::Durable)).await? {
        Ok(database) => {
            println!("DATABASE_URL is not set: started a throwaway Postgres, removed at the end");
            let url = database.url();
            match demo {
                true => demo::run(Some(&url)).await,
                false => supervisor::serve(&url, port).await,
            }
        }
        Err(no_server) => {
            println!("DATABASE_URL is not set, and {no_server}");
            println!("keeping claims and fulfilments in memory: a restart forgets them");
            match demo {
                true => demo::run(None).await,
                false => serve(Fulfilments::in_memory(), port, lease).await,
            }
        }
    }
}

/// The three senders' routes.
fn app(
    fulfilments: Fulfilments,
    dedupe: &tower_dedupe::DeduplicatorBuilder<Arc<dyn ClaimStore>>,
) -> Result<Router, Fault> {
    let layer = |source: &str, scope| {
        Ok::<_, Fault>(
            DedupeLayer::from_builder(dedupe.clone(), source.parse::<KeySource>()?).scope(scope),
        )
    };
    Ok(Router::new()
        .route("/stripe", post(fulfil).layer(layer("json:$.id", "stripe")?))
        .route("/github", post(fulfil).layer(layer("header:x-github-delivery", "github")?))
        .route("/events", post(fulfil).layer(layer("header:ce-source + header:ce-id", "events")?))
        .route("/fulfilments", get(list))
        .with_state(fulfilments))
}

/// The handler: one row for each event it handles. The header `x-demo` makes it go wrong.
async fn fulfil(
    State(fulfilments): State<Fulfilments>,
    info: Option<ClaimInfo>,
    headers: HeaderMap,
) -> Result<String, StatusCode> {
    // After the claim and before the work: the moment at which the copied pattern loses it.
    wish::grant(&headers).await?;
    fulfilments.insert(info.as_ref()).await.map_err(|fault| {
        eprintln!("could not insert the fulfilment: {}", with_sources(&*fault));
        StatusCode::INTERNAL_SERVER_ERROR
    })?;
    Ok(match info {
        Some(info) => format!("fulfilled {}, attempt {}\n", info.key(), info.attempt()),
        None => "fulfilled, but nothing told which event it was\n".into(),
    })
}

async fn list(State(fulfilments): State<Fulfilments>) -> Result<Json<Value>, StatusCode> {
    fulfilments.list().await.map(Json).map_err(|fault| {
        eprintln!("could not read the fulfilments: {}", with_sources(&*fault));
        StatusCode::INTERNAL_SERVER_ERROR
    })
}

async fn serve(fulfilments: Fulfilments, port: u16, lease: Duration) -> Result<ExitCode, Fault> {
    let builder = Deduplicator::builder(fulfilments.store()).lease(lease);
    let app = app(fulfilments, &builder)?;
    let announce = |address: &str| print_curl_lines(address, lease);
    server::serve(app, builder.build()?, port, announce).await
}

fn print_curl_lines(address: &str, lease: Duration) {
    println!(
        "
# an event of Stripe's, and the same once more: it is fulfilled once
curl -i {address}/stripe -d '{{\"id\": \"evt_1\"}}'
curl -i {address}/stripe -d '{{\"id\": \"evt_1\"}}'

# a handler that fails frees the event at once: the second attempt fulfils it
curl -i {address}/github -H 'x-github-delivery: 72d3162e' -H 'x-demo: fail' -d '{{}}'
curl -i {address}/github -H 'x-github-delivery: 72d3162e' -d '{{}}'

# a delivery that meets one at work is told to come back
curl -i {address}/events -H 'ce-source: /shop' -H 'ce-id: 1' -H 'x-demo: slow:3' -d '{{}}' &
sleep 1; curl -i {address}/events -H 'ce-source: /shop' -H 'ce-id: 1' -d '{{}}'; wait

# the process dies between claim and work; once the lease is over, the event is fulfilled
curl -i {address}/stripe -H 'x-demo: crash' -d '{{\"id\": \"evt_2\"}}'
sleep 1; curl -i {address}/stripe -d '{{\"id\": \"evt_2\"}}'
sleep {wait}; curl -i {address}/stripe -d '{{\"id\": \"evt_2\"}}'

# what was fulfilled
curl {address}/fulfilments
",
        wait = lease.as_secs() + 1,
    );
}

/// The work of the handlers: rows of scope, event key, attempt and time.
#[derive(Clone)]
enum Fulfilments {
    InPostgres(PgStore),
    InMemory(MemoryStore, Arc<Mutex<Vec<Value>>>),
}

impl Fulfilments {
    async fn in_postgres(url: &str) -> Result<Self, Fault> {
        let store = PgStore::builder().pool_size(8).connect(url).await?;
        store.migrate().await?;
        let table = "CREATE TABLE IF NOT EXISTS fulfilments (
            scope text, event_key text, attempt int4, at timestamptz NOT NULL DEFAULT now())";
        store.pool().get().await?.batch_execute(table).await?;
        Ok(Self::InPostgres(store))
    }

    fn in_memory() -> Self {
        Self::InMemory(MemoryStore::new(), Arc::default())
    }

    fn store(&self) -> Arc<dyn ClaimStore> {
        match self {
            Self::InPostgres(store) => Arc::new(store.clone()),
            Self::InMemory(store, _) => Arc::new(store.clone()),
        }
    }

    async fn insert(&self, info: Option<&ClaimInfo>) -> Result<(), Fault> {
        let (scope, key) = (info.map(ClaimInfo::scope), info.map(ClaimInfo::key));
        let attempt = info.map(ClaimInfo::attempt);
        match self {
            Self::InPostgres(store) => {
                let insert =
                    "INSERT INTO fulfilments (scope, event_key, attempt) VALUES ($1, $2, $3)";
                let attempt = attempt.map(i32::try_from).transpose()?;
                store.pool().get().await?.execute(insert, &[&scope, &key, &attempt]).await?;
            }
            Self::InMemory(_, rows) => {
                let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
                let row = json!({"scope": scope, "event_key": key, "attempt": attempt, "at": at});
                rows.lock().map_err(|_| "a thread panicked")?.push(row);
            }
        }
        Ok(())
    }

    async fn list(&self) -> Result<Value, Fault> {
        match self {
            Self::InPostgres(store) => {
                let select = "SELECT coalesce(json_agg(f ORDER BY f.at), '[]')::text FROM (
                    SELECT scope, event_key, attempt, at FROM fulfilments) AS f";
                let row = store.pool().get().await?.query_one(select, &[]).await?;
                Ok(serde_json::from_str(row.try_get(0)?)?)
            }
            Self::InMemory(_, rows) => {
                Ok(Value::Array(rows.lock().map_err(|_| "a thread panicked")?.clone()))
            }
        }
    }
}
