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

mod support;

use std::{env, process::ExitCode};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use serde_json::Value;
use tower_dedupe::{ClaimInfo, DedupeLayer, KeySource, PgStore, Transaction};

use self::support::{
    failure::Failure,
    server::{self, Fault, lease},
    start, wish,
};

#[tokio::main]
async fn main() -> ExitCode {
    start::on_postgres(serve).await
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
    match wish::of(&headers) {
        // An error that is ignored, and success all the same: the layer does not commit it.
        ("swallow", _) => drop(order.execute("INSERT INTO no_such_table VALUES (1)", &[]).await),
        // What is forbidden: the layer notices, but the order stays.
        ("commit", _) => {
            order.batch_execute("COMMIT").await?;
            return Err(StatusCode::INTERNAL_SERVER_ERROR.into());
        }
        _ => wish::grant(&headers).await?,
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
    let connection = store.pool().get().await?;
    connection.execute(INSERT, &[&info.key()]).await?;
    drop(connection);
    wish::grant(&headers).await?;
    Ok(format!("order for {}, attempt {}\n", info.key(), info.attempt()))
}

async fn list(State(store): State<PgStore>) -> Result<Json<Value>, Failure> {
    let select = "SELECT coalesce(json_agg(o ORDER BY o.at), '[]')::text FROM (
        SELECT event_key, at FROM orders) AS o";
    let row = store.pool().get().await?.query_one(select, &[]).await?;
    Ok(Json(serde_json::from_str(row.try_get(0)?)?))
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
