//! A server whose orders exist exactly once: the claim of an event and the order that it makes are
//! one transaction.
//!
//!     cargo run --example transactional
//!
//! It prints curl lines to paste.
//!
//! | environment | default | |
//! |---|---|---|
//! | `DATABASE_URL` | a throwaway Postgres | where claims and orders are kept |
//! | `PORT` | 3000 | where to listen on 127.0.0.1; 0 picks a free port |
//! | `LEASE` | 5s | how long a handler may be silent between two statements |
//! | `POOL` | 8 | how many connections, which is how many orders can be taken at once |
//! | `MODE` | transaction | `lease` takes orders without a transaction, to see the difference |

#![allow(clippy::print_stdout, reason = "it talks to the person who runs it")]
#![allow(unreachable_pub, reason = "its modules are its own")]

#[path = "support/server.rs"]
mod server;
#[path = "support/supervisor.rs"]
#[allow(dead_code, reason = "the quickstart uses more of it")]
mod supervisor;
#[path = "support/throwaway.rs"]
#[allow(dead_code, reason = "tests use more of it")]
mod throwaway;

use std::{env, process::ExitCode, time::Duration};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::post,
};
use serde_json::Value;
use tower_dedupe::{ClaimInfo, DedupeLayer, KeySource, PgStore, Transaction, TransactionError};

use self::{
    server::{Fault, lease, port, with_sources},
    throwaway::{Durability, Throwaway},
};

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .init();
    match run().await {
        Ok(code) => code,
        Err(fault) => {
            eprintln!("{}", with_sources(&*fault));
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<ExitCode, Fault> {
    let port = port()?;
    if let Ok(url) = env::var("DATABASE_URL") {
        return serve(&url, port).await;
    }
    let database = tokio::task::spawn_blocking(|| Throwaway::start(Durability::Durable)).await??;
    println!("DATABASE_URL is not set: started a throwaway Postgres, removed at the end");
    // In a process of its own, since a crash of it is part of the show.
    supervisor::serve(&database.url(), port).await
}

async fn serve(url: &str, port: u16) -> Result<ExitCode, Fault> {
    // One connection for each order that is taken, and one for the list.
    let pool = env::var("POOL").ok().map_or(Ok(8), |size| size.parse())?;
    let store = PgStore::builder().pool_size(pool).connect(url).await?;
    store.migrate().await?;
    let table = "CREATE TABLE IF NOT EXISTS orders (
        event_key text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp())";
    store.pool().get().await?.batch_execute(table).await?;

    let layer =
        DedupeLayer::new(store.clone(), KeySource::json("$.id")?).scope("orders").lease(lease()?);
    let (take, layer) = match env::var("MODE").as_deref() {
        Err(_) | Ok("transaction") => (post(take_order), layer.transactional()),
        Ok("lease") => (post(take_order_in_lease_mode), layer),
        Ok(other) => return Err(format!("MODE={other:?}: it is transaction or lease").into()),
    };
    let dedupe = layer.check()?;
    let app = Router::new().route("/orders", take.layer(layer).get(list)).with_state(store);
    server::serve(app, dedupe, port, print_curl_lines).await
}

/// The handler: one order for each event. The header `x-demo` makes it go wrong once it has written.
async fn take_order(
    info: ClaimInfo,
    order: Transaction,
    headers: HeaderMap,
) -> Result<String, Failure> {
    order.execute(INSERT, &[&info.key()]).await?;
    match demo(&headers).split_once(':').unwrap_or((demo(&headers), "")) {
        // An error that is ignored, and success all the same: the layer does not commit it.
        ("swallow", _) => drop(order.execute("INSERT INTO no_such_table VALUES (1)", &[]).await),
        // What is forbidden: the layer notices, but the order stays.
        ("commit", _) => {
            order.batch_execute("COMMIT").await?;
            return Err(Failure::Answer(StatusCode::INTERNAL_SERVER_ERROR));
        }
        _ => go_wrong(&headers).await?,
    }
    Ok(format!("order for {}, attempt {}\n", info.key(), info.attempt()))
}

/// The same without a transaction: a process that dies after the order and before the done mark
/// takes a second order when the event is delivered again.
async fn take_order_in_lease_mode(
    State(store): State<PgStore>,
    info: ClaimInfo,
    headers: HeaderMap,
) -> Result<String, Failure> {
    let connection = store.pool().get().await.map_err(|error| Failure::Other(error.into()))?;
    connection.execute(INSERT, &[&info.key()]).await.map_err(TransactionError::Postgres)?;
    drop(connection);
    go_wrong(&headers).await?;
    Ok(format!("order for {}, attempt {}\n", info.key(), info.attempt()))
}

async fn go_wrong(headers: &HeaderMap) -> Result<(), Failure> {
    match demo(headers).split_once(':').unwrap_or((demo(headers), "")) {
        ("fail", _) => return Err(Failure::Answer(StatusCode::INTERNAL_SERVER_ERROR)),
        ("panic", _) => panic!("x-demo: panic"),
        ("crash", _) => std::process::abort(),
        ("slow", seconds) => {
            let seconds = seconds.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
            let seconds = seconds.ok_or(Failure::Answer(StatusCode::BAD_REQUEST))?;
            tokio::time::sleep(seconds).await;
        }
        ("", _) => {}
        _ => return Err(Failure::Answer(StatusCode::BAD_REQUEST)),
    }
    Ok(())
}

fn demo(headers: &HeaderMap) -> &str {
    headers.get("x-demo").and_then(|value| value.to_str().ok()).unwrap_or_default()
}

async fn list(State(store): State<PgStore>) -> Result<Json<Value>, Failure> {
    let select = "SELECT coalesce(json_agg(o ORDER BY o.at), '[]')::text FROM (
        SELECT event_key, at FROM orders) AS o";
    let connection = store.pool().get().await.map_err(|error| Failure::Other(error.into()))?;
    let row = connection.query_one(select, &[]).await.map_err(TransactionError::Postgres)?;
    let rows: String = row.try_get(0).map_err(TransactionError::Postgres)?;
    Ok(Json(serde_json::from_str(&rows).map_err(|error| Failure::Other(error.into()))?))
}

/// Why there is no answer of success.
enum Failure {
    Answer(StatusCode),
    Transaction(TransactionError),
    Other(Fault),
}

impl From<TransactionError> for Failure {
    fn from(error: TransactionError) -> Self {
        Self::Transaction(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        match self {
            Self::Answer(status) => status.into_response(),
            Self::Transaction(error) => error.into_response(),
            Self::Other(fault) => {
                eprintln!("{}", with_sources(&*fault));
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}

fn print_curl_lines(address: &str) {
    println!(
        "
# an event, and the same once more: one order
curl -i {address}/orders -d '{{\"id\": \"evt_1\"}}'
curl -i {address}/orders -d '{{\"id\": \"evt_1\"}}'

# a handler that fails after it has written leaves no order; the second attempt takes it
curl -i {address}/orders -H 'x-demo: fail' -d '{{\"id\": \"evt_2\"}}'
curl -i {address}/orders -d '{{\"id\": \"evt_2\"}}'

# nor does a process that dies before its commit, and no lease is to be waited for
curl -i {address}/orders -H 'x-demo: crash' -d '{{\"id\": \"evt_3\"}}'
sleep 1; curl -i {address}/orders -d '{{\"id\": \"evt_3\"}}'

# an SQL error that the handler ignores: 500 whatever it says, and no order
curl -i {address}/orders -H 'x-demo: swallow' -d '{{\"id\": \"evt_4\"}}'

# a delivery that meets one at work is told at once to come back
curl -i {address}/orders -H 'x-demo: slow:3' -d '{{\"id\": \"evt_5\"}}' &
sleep 1; curl -i {address}/orders -d '{{\"id\": \"evt_5\"}}'; wait

# the orders
curl {address}/orders
"
    );
}

const INSERT: &str = "INSERT INTO orders (event_key) VALUES ($1)";
