//! Reading request bodies: whole, within a limit and a time; or away, before an answer.

use std::{
    error::Error,
    pin::{Pin, pin},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header, request::Parts};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, LengthLimitError};
use tokio::time::timeout;

use super::answer::Refusal;

/// A body in memory.
pub(super) struct Whole {
    pub(super) data: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

/// Reads a body of at most `limit` bytes. A body that comes in one piece is not copied.
///
/// Of a longer one, up to as much again is read away, so that its sender sees the answer and not a
/// reset.
pub(super) async fn whole<B>(
    parts: &Parts,
    body: B,
    limit: usize,
    patience: Duration,
) -> Result<Whole, Refusal>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    if body.size_hint().lower() > limit as u64 && waits_for_continue(parts) {
        return Err(Refusal::BodyTooLarge { limit });
    }
    let reading = async {
        let mut body = pin!(body);
        let mut pieces = Pieces::default();
        let mut trailers = None;
        while let Some(frame) = next_frame(body.as_mut()).await {
            match frame?.into_data() {
                Ok(data) => pieces.push(data),
                Err(frame) => trailers = frame.into_trailers().ok().or(trailers),
            }
            if pieces.len() > limit {
                away(body, limit).await;
                return Err(Refusal::BodyTooLarge { limit });
            }
        }
        Ok(Whole { data: pieces.join(), trailers })
    };
    timeout(patience, reading).await.unwrap_or(Err(Refusal::BodyTimeout { patience }))
}

/// Reads an unread body away, up to a limit and a time, before the request is answered without it.
///
/// Servers close a connection whose request was not read, and its sender may see a reset instead of
/// the answer. A sender that waits for `100 Continue` has sent nothing yet and is answered at once.
pub(super) fn drain<B>(
    parts: &Parts,
    body: Option<B>,
    limit: usize,
    patience: Duration,
) -> impl Future<Output = ()> + use<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let comes = |body: &B| !body.is_end_stream() && !waits_for_continue(parts);
    let body = body.filter(comes);
    async move {
        let Some(body) = body else { return };
        // What could not be read away in time is the server's to deal with.
        let _ = timeout(patience, away(pin!(body), limit)).await;
    }
}

async fn away<B>(mut body: Pin<&mut B>, limit: usize)
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let mut read = 0_usize;
    while let Some(Ok(frame)) = next_frame(body.as_mut()).await {
        read = read.saturating_add(frame.data_ref().map_or(0, Bytes::len));
        if read > limit {
            return;
        }
    }
}

/// The next frame, or what its failure means.
async fn next_frame<B>(mut body: Pin<&mut B>) -> Option<Result<Frame<B::Data>, Refusal>>
where
    B: Body,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    body.frame().await.map(|frame| frame.map_err(|error| why_unreadable(error.into())))
}

/// An outer layer may have a limit of its own, which the body reports when it is met.
fn why_unreadable(error: Box<dyn Error + Send + Sync>) -> Refusal {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&*error);
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return Refusal::OuterBodyLimit;
        }
        cause = error.source();
    }
    Refusal::BodyUnreadable
}

fn waits_for_continue(parts: &Parts) -> bool {
    parts
        .headers
        .get(header::EXPECT)
        .is_some_and(|expect| expect.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// The pieces of a body: one is kept as it is, several are joined as they come.
#[derive(Default)]
pub(super) struct Pieces {
    first: Option<Bytes>,
    joined: BytesMut,
}

impl Pieces {
    pub(super) fn len(&self) -> usize {
        self.first.as_ref().map_or(0, Bytes::len) + self.joined.len()
    }

    pub(super) fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        if self.joined.is_empty() {
            match self.first.take() {
                None => return self.first = Some(piece),
                Some(first) => self.joined.extend_from_slice(&first),
            }
        }
        self.joined.extend_from_slice(&piece);
    }

    pub(super) fn join(self) -> Bytes {
        self.first.unwrap_or_else(|| self.joined.freeze())
    }
}
