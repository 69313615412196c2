//! The future of [`Dedupe`](super::Dedupe).

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::Response;
use pin_project_lite::pin_project;

use super::body::DedupeBody;

pin_project! {
    /// The future of [`Dedupe`](super::Dedupe).
    pub struct ResponseFuture<F, R, E> {
        #[pin]
        kind: Kind<F, R, E>,
    }
}

pin_project! {
    #[project = KindProj]
    enum Kind<F, R, E> {
        Untouched { #[pin] future: F },
        Deduplicated { future: Deduplicated<R, E> },
    }
}

/// The way of a request that is deduplicated. On a heap of its own: the handler runs on a task of
/// its own anyway, and requests that pass through untouched do not pay for its size.
pub(super) type Deduplicated<R, E> =
    Pin<Box<dyn Future<Output = Result<Response<DedupeBody<R>>, E>> + Send>>;

impl<F, R, E> ResponseFuture<F, R, E> {
    pub(super) fn untouched(future: F) -> Self {
        Self { kind: Kind::Untouched { future } }
    }

    pub(super) fn deduplicated(future: Deduplicated<R, E>) -> Self {
        Self { kind: Kind::Deduplicated { future } }
    }
}

impl<F, R, E> Future for ResponseFuture<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    type Output = Result<Response<DedupeBody<R>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProj::Untouched { future } => {
                Poll::Ready(ready!(future.poll(cx)).map(|response| response.map(DedupeBody::inner)))
            }
            KindProj::Deduplicated { future } => future.as_mut().poll(cx),
        }
    }
}

impl<F, R, E> fmt::Debug for ResponseFuture<F, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
