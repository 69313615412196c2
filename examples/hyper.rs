//! The layer without a framework: on a function that hyper serves.
//!
//!     cargo run --example hyper
//!     curl -i http://127.0.0.1:3001 -H 'webhook-id: msg_1' -d 'hello'
//!
//! `DATABASE_URL` names the database; without it claims are kept in memory, until this ends.

#![allow(clippy::print_stdout, reason = "it talks to the person who runs it")]

use std::{env, error::Error, sync::Arc};

use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{
    body::{Bytes, Incoming},
    server::conn::http1,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tower::{Layer, service_fn};
use tower_dedupe::{
    ClaimInfo, ClaimStore, DedupeBody, DedupeLayer, KeySource, MemoryStore, PgStore,
};

type Fault = Box<dyn Error + Send + Sync>;

/// The handler. Its error is its own: the layer adds none.
async fn handle(request: Request<DedupeBody<Incoming>>) -> Result<Response<Full<Bytes>>, Fault> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let mut response = Response::default();
    match parts.extensions.get::<ClaimInfo>() {
        Some(info) => {
            println!("{}, attempt {}: {} bytes", info.key(), info.attempt(), body.len());
            *response.body_mut() = Full::from(format!("handled {}\n", info.key()));
        }
        None => *response.status_mut() = StatusCode::NOT_FOUND,
    }
    Ok(response)
}

#[tokio::main]
async fn main() -> Result<(), Fault> {
    let store: Arc<dyn ClaimStore> = match env::var("DATABASE_URL") {
        Ok(url) => {
            let store = PgStore::connect(&url).await?;
            store.migrate().await?;
            Arc::new(store)
        }
        Err(_) => Arc::new(MemoryStore::new()),
    };
    let layer = DedupeLayer::new(store, KeySource::header("webhook-id")?).scope("standard");
    let service = TowerToHyperService::new(layer.layer(service_fn(handle)));

    let port = env::var("PORT").map_or(Ok(3001), |port| port.parse::<u16>())?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        let mut server = http1::Builder::new();
        // With a timer, hyper ends connections that send no head.
        server.timer(TokioTimer::new());
        let connection = server.serve_connection(TokioIo::new(stream), service.clone());
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                eprintln!("a connection ended: {error}");
            }
        });
    }
}
