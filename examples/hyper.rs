//! The layer in front of a plain function, served by hyper alone:
//!
//!     cargo run --example hyper
//!     curl -i http://127.0.0.1:3000/ -H 'ce-source: /shop' -H 'ce-id: 1' -d '{}'
//!
//! `DATABASE_URL` says where claims are kept (default: in memory), `PORT` where to listen (default
//! 3000, 0 picks a free one).

#![allow(clippy::print_stdout, reason = "it talks to the person who runs it")]

use std::{convert::Infallible, env, error::Error, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    net::{TcpListener, TcpStream},
    select, signal,
    sync::watch,
    task::JoinSet,
};
use tower::{Layer, service_fn};
use tower_dedupe::{
    ClaimInfo, ClaimStore, Dedupe, DedupeBody, DedupeLayer, KeySource, MemoryStore, PgStore,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();

    // CloudEvents: an id is unique within its source, so the key is both.
    let key = KeySource::header("ce-source")?.and(KeySource::header("ce-id")?);
    let layer = DedupeLayer::new(store().await?, key).scope("events");
    let dedupe = layer.check()?;

    let port: u16 = env::var("PORT").as_deref().unwrap_or("3000").parse()?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);

    let service = layer.layer(service_fn(handle));
    let (stop, stopped) = watch::channel(());
    let mut connections = JoinSet::new();
    loop {
        select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted?;
                connections.spawn(converse(stream, service.clone(), stopped.clone()));
            }
            // Connections that have ended, so that they do not pile up.
            Some(_) = connections.join_next() => {}
            _ = signal::ctrl_c() => break,
        }
    }
    drop((listener, stop));
    connections.join_all().await;
    // Handlers whose senders have hung up belong to no connection.
    dedupe.drain(Duration::from_secs(10)).await;
    Ok(())
}

/// The handler. It sees a request once per event, with its body as it was sent.
async fn handle(
    request: Request<DedupeBody<Incoming>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let who = match request.extensions().get::<ClaimInfo>() {
        Some(info) => format!("{}, attempt {}", info.key(), info.attempt()),
        None => "an event without a key".to_owned(),
    };
    let mut response = Response::new(Full::default());
    match request.into_body().collect().await {
        Ok(body) => {
            let length = body.to_bytes().len();
            *response.body_mut() = format!("handled {who}: {length} bytes\n").into();
        }
        // No success: the event stays free for the next delivery.
        Err(_) => *response.status_mut() = StatusCode::BAD_REQUEST,
    }
    Ok(response)
}

/// Serves one connection until its client or this server has had enough.
async fn converse<F>(stream: TcpStream, service: Dedupe<F>, mut stopped: watch::Receiver<()>)
where
    F: tower::Service<
            Request<DedupeBody<Incoming>>,
            Response = Response<Full<Bytes>>,
            Error = Infallible,
            Future: Send,
        > + Clone
        + Send
        + 'static,
{
    let service = TowerToHyperService::new(service);
    let mut connection =
        pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    let ended = select! {
        ended = connection.as_mut() => ended,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
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
