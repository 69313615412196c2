//! `DATABASE_URL=postgres://… cargo run` in this directory, then
//! `curl -i localhost:3000/orders -d '{"id": "evt_1"}'`.

use std::{env, error::Error};

use sqlx::PgPool;
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "DATABASE_URL is not set")?;
    let pool = PgPool::connect(&url).await?;
    orders_with_sqlx::migrate(&url, &pool).await?;
    let port = env::var("PORT").ok().map_or(Ok(3000), |port| port.parse())?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, orders_with_sqlx::app(pool)).await?;
    Ok(())
}
