//! The recipe keeps the rules of transaction mode.

#[path = "../../support/throwaway.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod throwaway;

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use sqlx::{PgPool, query_scalar};
use throwaway::{Durability, Throwaway};
use tower::ServiceExt;

struct Shop {
    pool: PgPool,
    _database: Throwaway,
}

impl Shop {
    async fn deliver(&self, key: &str, wish: &str) -> StatusCode {
        let request = Request::post("/orders").header("x-demo", wish);
        let request = request.body(Body::from(format!("{{\"id\": \"{key}\"}}"))).unwrap();
        orders_with_sqlx::app(self.pool.clone()).oneshot(request).await.unwrap().status()
    }

    async fn orders(&self, key: &str) -> i64 {
        let count = "SELECT count(*) FROM orders WHERE event_key = $1";
        query_scalar(count).bind(key).fetch_one(&self.pool).await.unwrap()
    }
}

#[tokio::test]
async fn an_order_exists_exactly_once_whatever_goes_wrong() {
    let database = tokio::task::spawn_blocking(|| Throwaway::start(Durability::Fast).unwrap());
    let database = database.await.unwrap();
    let pool = PgPool::connect(&database.url()).await.unwrap();
    orders_with_sqlx::migrate(&database.url(), &pool).await.unwrap();
    let shop = Shop { pool, _database: database };

    assert_eq!(shop.deliver("1", "").await, StatusCode::OK);
    assert_eq!(shop.deliver("1", "").await, StatusCode::OK);
    assert_eq!(shop.orders("1").await, 1);

    let failures =
        [("fail", StatusCode::INTERNAL_SERVER_ERROR), ("swallow", StatusCode::SERVICE_UNAVAILABLE)];
    for (wish, status) in failures {
        assert_eq!(shop.deliver(wish, wish).await, status);
        assert_eq!(shop.orders(wish).await, 0);
        assert_eq!(shop.deliver(wish, "").await, StatusCode::OK);
        assert_eq!(shop.orders(wish).await, 1);
    }

    // A commit of the work's own is noticed, and the event is not done.
    assert_eq!(shop.deliver("2", "commit").await, StatusCode::SERVICE_UNAVAILABLE);
    let status = "SELECT status::text FROM processed_events WHERE event_key = '2'";
    let status: String = query_scalar(status).fetch_one(&shop.pool).await.unwrap();
    assert_eq!(status, "in_progress");

    // Two at once: one order, and the other is told to come back.
    let (a, b) = tokio::join!(shop.deliver("3", "slow"), shop.deliver("3", "slow"));
    assert!([(200, 503), (503, 200)].contains(&(a.as_u16(), b.as_u16())), "{a} {b}");
    assert_eq!((shop.deliver("3", "").await, shop.orders("3").await), (StatusCode::OK, 1));
}
