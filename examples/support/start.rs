//! How an example starts that cannot do without Postgres.

use std::{env, process::ExitCode};

use super::{
    server::{Fault, port, with_sources},
    supervisor,
    throwaway::{Durability, Throwaway},
};

/// Serves on the database at `DATABASE_URL`, or on a throwaway one, until it is told to stop.
pub async fn on_postgres(
    serve: impl AsyncFnOnce(&str, u16) -> Result<ExitCode, Fault>,
) -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .init();
    match run(serve).await {
        Ok(code) => code,
        Err(fault) => {
            eprintln!("{}", with_sources(&*fault));
            ExitCode::FAILURE
        }
    }
}

async fn run(
    serve: impl AsyncFnOnce(&str, u16) -> Result<ExitCode, Fault>,
) -> Result<ExitCode, Fault> {
    let port = port()?;
    if let Ok(url) = env::var("DATABASE_URL") {
        return serve(&url, port).await;
    }
    let database = tokio::task::spawn_blocking(|| Throwaway::start(Durability::Durable)).await??;
    println!("DATABASE_URL is not set: started a throwaway Postgres, removed at the end");
    // In a process of its own, since a crash of it is part of the show.
    supervisor::serve(&database.url(), port).await
}
