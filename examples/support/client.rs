//! A small HTTP client: one request on a connection of its own.

use std::{io, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

/// What a server answered.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// Sends a request on a connection of its own and reads the answer.
pub async fn post(
    to: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Answer {
    try_post(to, path, headers, body).await.expect("the server did not answer")
}

/// The same, where the server may not answer at all.
pub async fn try_post(
    to: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> io::Result<Answer> {
    try_request(to, "POST", path, headers, body).await
}

/// The same with another method. An answer that does not come is an error, so that nobody waits for
/// ever.
pub async fn try_request(
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> io::Result<Answer> {
    let mut request = Request::builder().method(method).uri(path).header("host", to.to_string());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body.into())).unwrap();
    let sent = timeout(PATIENCE, send(to, request)).await;
    sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Reads a resource.
pub async fn get(from: SocketAddr, path: &str) -> Answer {
    try_request(from, "GET", path, &[], "").await.expect("the server did not answer")
}

/// Sends a request and closes the connection after a while without having read an answer. Gives
/// the answer if it came sooner.
pub async fn post_and_hang_up(
    to: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
    after: Duration,
) -> Option<Answer> {
    timeout(after, post(to, path, headers, body)).await.ok()
}

async fn send(to: SocketAddr, request: Request<Full<Bytes>>) -> io::Result<Answer> {
    let stream = TcpStream::connect(to).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    // Both on this task: dropped together, they close the connection.
    let exchange = async {
        let (parts, body) = sender.send_request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok::<_, hyper::Error>(Answer { status: parts.status, headers: parts.headers, body })
    };
    tokio::pin!(connection);
    tokio::pin!(exchange);
    tokio::select! {
        answer = &mut exchange => answer.map_err(io::Error::other),
        closed = &mut connection => match closed {
            Ok(()) => exchange.await.map_err(io::Error::other),
            Err(error) => Err(io::Error::other(error)),
        },
    }
}

const PATIENCE: Duration = Duration::from_secs(30);
