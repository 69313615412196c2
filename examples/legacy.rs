//! Handlers that were there before, deduplicated without touching them: one router, and for each
//! route the layer that fits its senders.
//!
//!     cargo run --example legacy
//!     curl -i http://127.0.0.1:3000/payments -H 'content-type: application/json' -d '{"id": "evt_1"}'
//!
//! `DATABASE_URL` says where claims are kept (default: in memory), `PORT` where to listen (default
//! 3000, 0 picks a free one).

#![allow(clippy::print_stdout, reason = "it talks to the person who runs it")]

use std::{env, error::Error, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::Path,
    http::{StatusCode, request::Parts},
    routing::{get, post},
};
use serde_json::Value;
use tokio::{net::TcpListener, signal};
use tower_dedupe::{
    ClaimStore, DedupeLayer, Deduplicator, DeduplicatorBuilder, InProgress, KeySource, MemoryStore,
    MissingKey, PgStore,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();

    // What all routes share: the store, and the bound of deliveries in flight.
    let shared = Deduplicator::builder(store().await?);
    let app = app(&shared)?;

    let port: u16 = env::var("PORT").as_deref().unwrap_or("3000").parse()?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let stop = async { drop(signal::ctrl_c().await) };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    // One drain for all routes, since their layers share one builder.
    shared.build()?.drain(Duration::from_secs(10)).await;
    Ok(())
}

fn app(shared: &DeduplicatorBuilder) -> Result<Router, Box<dyn Error>> {
    // Payments: the id is in the body. Handlers talk to a slow bank, so they may take long, and a
    // second delivery waits a moment for the answer of the first.
    let payments = DedupeLayer::from_builder(shared.clone(), KeySource::json("$.id")?)
        .scope("payments")
        .max_hold(Duration::from_secs(60 * 60))
        .in_progress(InProgress::Wait(Duration::from_secs(2)));

    // Pushes: the id is in a header, so the body streams through unread, whatever its size.
    let pushes = DedupeLayer::from_builder(shared.clone(), KeySource::header("x-github-delivery")?)
        .scope("pushes");

    // Orders: clients of an API, which take 409 for what it is, and must send a key.
    let orders = DedupeLayer::from_builder(shared.clone(), KeySource::header("idempotency-key")?)
        .scope("orders")
        .in_progress(InProgress::Conflict)
        .missing_key(MissingKey::Reject);

    // Chat: the handshake that opens the subscription is no event.
    let chat = DedupeLayer::from_builder(shared.clone(), KeySource::json("$.event_id")?)
        .scope("chat")
        .bypass_if(|_, body| is_handshake(body));

    // Tenants choose their own ids, so each has a scope of its own. In earnest, take the tenant
    // from what your authentication has verified, not from the path.
    let tenants = DedupeLayer::from_builder(shared.clone(), KeySource::query("event")?)
        .scope_with(|parts: &Parts| format!("tenant {}", parts.uri.path()));

    Ok(Router::new()
        .route("/payments", post(on_payment).layer(payments))
        .route("/pushes", post(on_push).layer(pushes))
        .route("/orders", post(on_order).layer(orders))
        .route("/chat", post(on_chat).layer(chat))
        .route("/tenants/{tenant}", post(on_tenant).layer(tenants))
        // No layer, nothing changes.
        .route("/healthz", get(|| async { "well\n" }).post(|| async { "well\n" })))
}

// The handlers as they were: none of them knows of keys or claims.

async fn on_payment(Json(event): Json<Value>) -> Result<String, StatusCode> {
    // Anything but 2xx leaves the event free for the next delivery.
    let amount = event.get("amount").and_then(Value::as_i64).unwrap_or(0);
    if amount < 0 {
        Err(StatusCode::UNPROCESSABLE_ENTITY)
    } else {
        Ok(format!("booked {amount}\n"))
    }
}

async fn on_push(body: axum::body::Bytes) -> String {
    format!("pushed {} bytes\n", body.len())
}

async fn on_order() -> (StatusCode, &'static str) {
    (StatusCode::CREATED, "ordered\n")
}

async fn on_chat(Json(message): Json<Value>) -> Json<Value> {
    Json(message.get("challenge").cloned().unwrap_or(Value::Null))
}

async fn on_tenant(Path(tenant): Path<String>) -> String {
    format!("noted for {tenant}\n")
}

fn is_handshake(body: &[u8]) -> bool {
    let message: Result<Value, _> = serde_json::from_slice(body);
    message.is_ok_and(|message| message.get("type") == Some(&"url_verification".into()))
}

/// Claims in Postgres where there is one, else in memory, for as long as the process lives.
async fn store() -> Result<Arc<dyn ClaimStore>, Box<dyn Error>> {
    let Ok(url) = env::var("DATABASE_URL") else {
        println!("DATABASE_URL is not set: keeping claims in memory, a restart forgets them");
        return Ok(Arc::new(MemoryStore::new()));
    };
    let store = PgStore::connect(&url).await?;
    store.migrate().await?;
    Ok(Arc::new(store))
}
