//! Real servers and real clients, on loopback.

use std::net::SocketAddr;

use axum::Router;
use tokio::net::TcpListener;

pub use super::client::{Answer, get, post, post_and_hang_up, try_post, try_request};

/// Serves on a free port until the test ends.
pub async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}
