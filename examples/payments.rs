//! An API whose clients may send a request again: with the same `Idempotency-Key` they get the first
//! answer, and there is one payment.
//!
//!     cargo run --example payments
//!
//! It prints curl lines to paste.
//!
//! | environment | default | |
//! |---|---|---|
//! | `DATABASE_URL` | a throwaway Postgres | where keys and payments are kept |
//! | `PORT` | 3000 | where to listen on 127.0.0.1; 0 picks a free port |
//! | `LEASE` | 5s | how long a crashed handler keeps its key |

#![allow(clippy::print_stdout, reason = "it talks to the person who runs it")]
#![allow(unreachable_pub, reason = "its modules are its own")]

mod support;

use std::{process::ExitCode, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header::LOCATION, request::Parts},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::Bytes;
use serde_json::{Value, json};
use tower_dedupe::{ClaimInfo, DedupeLayer, PgStore};

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
    let store = PgStore::connect(url).await?;
    store.migrate().await?;
    store.pool().get().await?.batch_execute(TABLE).await?;

    let layer = DedupeLayer::idempotency_key(store.clone())
        .scope_with(account)
        .retention(Duration::from_secs(24 * 60 * 60))
        .lease(lease()?);
    let dedupe = layer.check()?;
    let app = Router::new()
        .route("/payments", post(pay).layer(layer).get(list))
        .route("/payments/{id}", get(show))
        .with_state(store);
    server::serve(app, dedupe, port, print_curl_lines).await
}

/// Whose keys they are: one client's key never meets another's. Here a header says so; yours is what
/// your authentication has verified.
fn account(request: &Parts) -> String {
    let account = request.headers.get("x-account").and_then(|account| account.to_str().ok());
    account.unwrap_or("nobody").to_owned()
}

/// The handler. The header `x-demo` makes it go wrong before it pays.
async fn pay(
    State(store): State<PgStore>,
    info: ClaimInfo,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Failure> {
    // What the client can mend is no result: the key stays free for the request that is right.
    let order: Value = serde_json::from_slice(&body).map_err(|_| StatusCode::BAD_REQUEST)?;
    wish::grant(&headers).await?;
    let row = store.pool().get().await?;
    let row = row.query_one(PAY, &[&info.scope(), &info.key(), &order.to_string()]).await?;
    let id: &str = row.try_get("id")?;
    let location = [(LOCATION, format!("/payments/{id}"))];
    let paid = Json(json!({"id": id, "order": order, "attempt": info.attempt()}));
    Ok((StatusCode::CREATED, location, paid).into_response())
}

async fn list(State(store): State<PgStore>) -> Result<Json<Value>, Failure> {
    let row = store.pool().get().await?.query_one(LIST, &[]).await?;
    Ok(Json(serde_json::from_str(row.try_get(0)?)?))
}

async fn show(
    State(store): State<PgStore>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    let row = store.pool().get().await?.query_opt(SHOW, &[&id]).await?;
    let row = row.ok_or(StatusCode::NOT_FOUND)?;
    Ok(Json(serde_json::from_str(row.try_get(0)?)?))
}

fn print_curl_lines(address: &str) {
    println!(
        "
# a payment; the same request again is given the same answer, to the byte
curl -i {address}/payments -H 'Idempotency-Key: \"k-1\"' -d '{{\"amount\": 1000}}'
curl -i {address}/payments -H 'Idempotency-Key: \"k-1\"' -d '{{\"amount\": 1000}}'

# the key with another payload: 422; without a key: 400
curl -i {address}/payments -H 'Idempotency-Key: \"k-1\"' -d '{{\"amount\": 9999}}'
curl -i {address}/payments -d '{{\"amount\": 1000}}'

# the same key of another client is another key
curl -i {address}/payments -H 'x-account: bob' -H 'Idempotency-Key: \"k-1\"' -d '{{\"amount\": 1000}}'

# while the first request is under way: 409
curl -i {address}/payments -H 'Idempotency-Key: k-2' -H 'x-demo: slow:3' -d '{{\"amount\": 1}}' &
sleep 1; curl -i {address}/payments -H 'Idempotency-Key: k-2' -d '{{\"amount\": 1}}'; wait

# a handler that fails frees the key
curl -i {address}/payments -H 'Idempotency-Key: k-3' -H 'x-demo: fail' -d '{{\"amount\": 2}}'
curl -i {address}/payments -H 'Idempotency-Key: k-3' -d '{{\"amount\": 2}}'

# the payments
curl {address}/payments
"
    );
}

/// One payment for each key, whatever happens: a process that dies after it has paid and before the key
/// is marked done runs again after the lease, and finds the payment that it made. The processor of a
/// real one does the same, if it is handed `info.key()` on.
const TABLE: &str = "CREATE TABLE IF NOT EXISTS payments (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), scope text NOT NULL, idempotency_key text NOT NULL,
    order_json text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (scope, idempotency_key))";
const PAY: &str = "INSERT INTO payments (scope, idempotency_key, order_json) VALUES ($1, $2, $3)
    ON CONFLICT (scope, idempotency_key) DO UPDATE SET order_json = excluded.order_json
    RETURNING id::text AS id";
const LIST: &str = "SELECT coalesce(json_agg(p ORDER BY p.at), '[]')::text FROM (
    SELECT id, scope, idempotency_key, order_json::json AS \"order\", at FROM payments) AS p";
const SHOW: &str = "SELECT json_build_object('id', id, 'order', order_json::json, 'at', at)::text
    FROM payments WHERE id::text = $1";
