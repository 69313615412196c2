//! Orders that exist exactly once, for those whose handlers speak sqlx.

pub mod claim;

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use serde_json::Value;
use sqlx::PgPool;
use tower_dedupe::PgStore;

use crate::claim::{Claim, claim, finish};

/// Makes the tables: that of the claims by tower-dedupe, which takes no more part.
pub async fn migrate(url: &str, pool: &PgPool) -> Result<(), Box<dyn std::error::Error>> {
    PgStore::connect(url).await?.migrate().await?;
    let orders = "CREATE TABLE IF NOT EXISTS orders (event_key text NOT NULL)";
    sqlx::query(orders).execute(pool).await?;
    Ok(())
}

/// `POST /orders`, with the event's key at `$.id`.
pub fn app(pool: PgPool) -> Router {
    Router::new().route("/orders", post(take_order)).with_state(pool)
}

async fn take_order(
    State(pool): State<PgPool>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<StatusCode, StatusCode> {
    // `DedupeLayer` reads keys from anywhere and checks them; here the handler does.
    let event: Value = serde_json::from_slice(&body).map_err(|_| StatusCode::BAD_REQUEST)?;
    let key = event["id"].as_str().ok_or(StatusCode::BAD_REQUEST)?;
    if key.is_empty() || key.len() > 512 || key.chars().any(char::is_control) {
        return Err(StatusCode::BAD_REQUEST);
    }
    let come_back = |error: sqlx::Error| {
        eprintln!("{error}");
        StatusCode::SERVICE_UNAVAILABLE
    };

    let mut order = pool.begin().await.map_err(come_back)?;
    let claimed = match claim(&mut order, "orders", key).await.map_err(come_back)? {
        Claim::Ours(claimed) => claimed,
        Claim::Done => return Ok(StatusCode::OK),
        Claim::InProgress => return Err(StatusCode::SERVICE_UNAVAILABLE),
    };
    let insert = "INSERT INTO orders (event_key) VALUES ($1)";
    sqlx::query(insert).bind(key).execute(&mut *order).await.map_err(come_back)?;
    match headers.get("x-demo").map(|wish| wish.as_bytes()) {
        Some(b"fail") => return Err(StatusCode::INTERNAL_SERVER_ERROR),
        Some(b"swallow") => drop(sqlx::query("SELECT 1/0").execute(&mut *order).await),
        Some(b"commit") => drop(sqlx::query("COMMIT").execute(&mut *order).await),
        Some(b"slow") => tokio::time::sleep(std::time::Duration::from_secs(1)).await,
        _ => {}
    }
    finish(order, claimed, 200).await.map_err(come_back)?;
    Ok(StatusCode::OK)
}
