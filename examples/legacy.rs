//! Handlers that were there before, in one router: each route gets a layer of its own, and none of
//! the handlers is changed.
//!
//!     cargo run --example legacy
//!     curl -i http://127.0.0.1:3002/payments --json '{"event": {"id": 17}}'
//!     curl -i http://127.0.0.1:3002/parcels  --json '{"shipment": "S-1", "step": 4}'
//!     curl -i http://127.0.0.1:3002/chat     --json '{"type": "url_verification", "challenge": "x"}'
//!     curl -i http://127.0.0.1:3002/healthz
//!
//! `DATABASE_URL` names the database; without it claims are kept in memory, until this ends.

#![allow(clippy::print_stdout, reason = "it talks to the person who runs it")]

use std::{env, error::Error, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    http::StatusCode,
    routing::{get, post},
};
use serde_json::Value;
use tokio::net::TcpListener;
use tower_dedupe::{
    ClaimStore, DedupeLayer, InProgress, KeySource, MemoryStore, MissingKey, PgStore,
};

/// As it was before: it knows nothing of deduplication.
async fn on_payment(Json(payment): Json<Value>) -> StatusCode {
    println!("payment {payment}");
    StatusCode::OK
}

async fn on_parcel(Json(parcel): Json<Value>) -> StatusCode {
    println!("parcel {parcel}");
    StatusCode::NO_CONTENT
}

async fn on_chat(Json(message): Json<Value>) -> Json<Value> {
    println!("chat {message}");
    Json(message.get("challenge").cloned().unwrap_or_default())
}

/// The router as it was, but for the layers.
fn app(store: Arc<dyn ClaimStore>) -> Result<Router, Box<dyn Error>> {
    // This sender puts an id on everything it sends, and takes a 409 for "later".
    let payments = DedupeLayer::new(store.clone(), KeySource::json("$.event.id")?)
        .scope("payments")
        .missing_key(MissingKey::Reject)
        .in_progress(InProgress::Conflict)
        .lease(Duration::from_secs(30));

    // This one has no event id: what happened to which parcel is the event.
    let parcels = KeySource::json("$.shipment")?.and(KeySource::json("$.step")?);
    let parcels = DedupeLayer::new(store.clone(), parcels)
        .scope("parcels")
        .in_progress(InProgress::Wait(Duration::from_secs(2)));

    // This one sends a handshake that is no event.
    let chat =
        DedupeLayer::new(store, "json:$.event_id".parse()?).scope("chat").bypass_if(|_, body| {
            serde_json::from_slice::<Value>(body)
                .is_ok_and(|message| message.get("type").is_some_and(|is| is == "url_verification"))
        });

    Ok(Router::new()
        .route("/payments", post(on_payment).layer(payments))
        .route("/parcels", post(on_parcel).layer(parcels))
        .route("/chat", post(on_chat).layer(chat))
        .route("/healthz", get(|| async { "ok\n" })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .init();
    let store: Arc<dyn ClaimStore> = match env::var("DATABASE_URL") {
        Ok(url) => {
            let store = PgStore::connect(&url).await?;
            store.migrate().await?;
            Arc::new(store)
        }
        Err(_) => Arc::new(MemoryStore::new()),
    };
    let port = env::var("PORT").map_or(Ok(3002), |port| port.parse::<u16>())?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app(store)?).await?;
    Ok(())
}
