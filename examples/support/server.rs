//! What the servers of the examples have in common: their environment, and how they listen and stop.

use std::{env, error::Error, process::ExitCode, time::Duration};

use axum::Router;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tower_dedupe::{ClaimStore, Deduplicator};

use super::supervisor;

pub type Fault = Box<dyn Error + Send + Sync>;

/// Listens until it is told to stop, then waits for the handlers that are at work.
pub async fn serve<St: ClaimStore>(
    app: Router,
    dedupe: Deduplicator<St>,
    port: u16,
    announce: impl FnOnce(&str),
) -> Result<ExitCode, Fault> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await.map_err(|error| {
        format!("could not listen on port {port}: {error}; choose another with PORT, 0 picks one")
    })?;
    let address = format!("http://{}", listener.local_addr()?);
    println!("listening on {address}");
    if !supervisor::is_quiet() {
        announce(&address);
    }
    axum::serve(listener, app).with_graceful_shutdown(told_to_stop()).await?;
    // Handlers whose senders have hung up are not known to the server.
    dedupe.drain(Duration::from_secs(10)).await;
    Ok(ExitCode::SUCCESS)
}

async fn told_to_stop() {
    let terminated = async {
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => drop(terminate.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        () = terminated => {}
        () = supervisor::is_gone() => {}
    }
}

/// Where to listen.
pub fn port() -> Result<u16, Fault> {
    let Ok(port) = env::var("PORT") else { return Ok(3000) };
    port.parse()
        .map_err(|_| format!("PORT={port:?} is no port: 0 to 65535, 0 picks a free one").into())
}

/// How long a crashed handler keeps its event.
pub fn lease() -> Result<Duration, Fault> {
    let lease = env::var("LEASE").unwrap_or_else(|_| "5s".into());
    match humantime::parse_duration(&lease) {
        Ok(lease) if lease >= Duration::from_millis(100) => Ok(lease),
        _ => {
            Err(format!("LEASE={lease:?} is no lease: 100ms or more, such as 500ms, 5s, 2m").into())
        }
    }
}

pub fn with_sources(error: &dyn Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", with_sources(source)),
        None => error.to_string(),
    }
}
