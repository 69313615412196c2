//! The body type on both sides of the inner service.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf, Bytes};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

pin_project! {
    /// The body of requests that the layer hands on and of responses that it gives.
    ///
    /// It is either the body `B` as it came, frame by frame, or bytes that the layer holds: a
    /// request that was read to find its key (byte for byte, with its trailers), an answer of
    /// the layer's own, or a response that was read to be stored. Where that was given up, it is
    /// what was read, and then the body as it comes.
    pub struct DedupeBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProj]
    enum Kind<B> {
        Inner { #[pin] body: B },
        Held { data: Option<Bytes>, trailers: Option<HeaderMap> },
        Resumed { read: Option<Bytes>, rest: Pin<Box<B>> },
    }
}

impl<B> DedupeBody<B> {
    /// The body as it came.
    pub(super) fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    /// Bytes, then trailers.
    pub(super) fn held(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        let data = Some(data).filter(Buf::has_remaining);
        Self { kind: Kind::Held { data, trailers } }
    }

    /// Bytes that were read of a body, then the rest of it.
    pub(super) fn resumed(read: Bytes, rest: Pin<Box<B>>) -> Self {
        let read = Some(read).filter(Buf::has_remaining);
        Self { kind: Kind::Resumed { read, rest } }
    }

    pub(super) fn empty() -> Self {
        Self::held(Bytes::new(), None)
    }

    /// The body as it came, if the layer has not read it.
    pub(super) fn into_unread(self) -> Option<B> {
        match self.kind {
            Kind::Inner { body } => Some(body),
            Kind::Held { .. } | Kind::Resumed { .. } => None,
        }
    }
}

impl<B: Body<Data = Bytes>> Body for DedupeBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            KindProj::Inner { body } => body.poll_frame(cx),
            KindProj::Held { data, trailers } => {
                let frame = data.take().map(Frame::data);
                let frame = frame.or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(frame.map(Ok))
            }
            KindProj::Resumed { read, rest } => match read.take() {
                Some(read) => Poll::Ready(Some(Ok(Frame::data(read)))),
                None => rest.as_mut().poll_frame(cx),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Held { data, trailers } => data.is_none() && trailers.is_none(),
            Kind::Resumed { read, rest } => read.is_none() && rest.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Held { data, trailers } => longer(
                data,
                match trailers {
                    None => SizeHint::with_exact(0),
                    // To a body whose length is known HTTP/1 gives no trailers.
                    Some(_) => SizeHint::new(),
                },
            ),
            Kind::Resumed { read, rest } => longer(read, rest.size_hint()),
        }
    }
}

/// The hint of what comes first and then as the other says.
fn longer(first: &Option<Bytes>, then: SizeHint) -> SizeHint {
    let first = first.as_ref().map_or(0, Bytes::len) as u64;
    let mut hint = SizeHint::new();
    hint.set_lower(then.lower().saturating_add(first));
    if let Some(upper) = then.upper().and_then(|upper| upper.checked_add(first)) {
        hint.set_upper(upper);
    }
    hint
}

/// An empty body, so that outer middleware can make responses of its own.
impl<B: Default> Default for DedupeBody<B> {
    fn default() -> Self {
        Self::empty()
    }
}

impl<B> fmt::Debug for DedupeBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Inner { .. } => f.write_str("DedupeBody::Inner"),
            Kind::Resumed { read, .. } => {
                write!(f, "DedupeBody::Resumed({} bytes, …)", read.as_ref().map_or(0, Bytes::len))
            }
            Kind::Held { data, .. } => {
                write!(f, "DedupeBody::Held({} bytes)", data.as_ref().map_or(0, Bytes::len))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::{convert::Infallible, pin::pin, task::Waker};

    use http_body_util::{Empty, Full};

    use super::*;

    fn next<B: Body<Data = Bytes, Error = Infallible>>(
        body: &mut Pin<&mut DedupeBody<B>>,
    ) -> Option<Frame<Bytes>> {
        let mut cx = Context::from_waker(Waker::noop());
        match body.as_mut().poll_frame(&mut cx) {
            Poll::Ready(frame) => frame.map(Result::unwrap),
            Poll::Pending => panic!("a held body is never pending"),
        }
    }

    #[test]
    fn a_held_body_gives_data_then_trailers_then_the_end() {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", "1".parse().unwrap());
        let held = DedupeBody::<Empty<Bytes>>::held("abc".into(), Some(trailers.clone()));
        let mut body = pin!(held);
        // An exact length would cost the trailers in HTTP/1, where they need chunks.
        assert_eq!((body.size_hint().lower(), body.size_hint().upper()), (3, None));

        assert_eq!(next(&mut body).unwrap().into_data().unwrap(), "abc");
        assert!(!body.is_end_stream(), "the trailers are still to come");
        assert_eq!((body.size_hint().lower(), body.size_hint().upper()), (0, None));
        assert_eq!(next(&mut body).unwrap().into_trailers().unwrap(), trailers);
        assert!(body.is_end_stream());
        assert!(next(&mut body).is_none());
        assert!(next(&mut body).is_none(), "polling on is harmless");
        assert_eq!(body.size_hint().exact(), Some(0));
    }

    #[test]
    fn a_resumed_body_gives_what_was_read_and_then_the_rest() {
        let rest = Box::pin(Full::new(Bytes::from("cde")));
        let mut body = pin!(DedupeBody::resumed("ab".into(), rest));
        assert_eq!(body.size_hint().exact(), Some(5));
        assert_eq!(next(&mut body).unwrap().into_data().unwrap(), "ab");
        assert_eq!(body.size_hint().exact(), Some(3));
        assert!(!body.is_end_stream());
        assert_eq!(next(&mut body).unwrap().into_data().unwrap(), "cde");
        assert!(body.is_end_stream());
    }

    #[test]
    fn an_empty_held_body_is_at_its_end_at_once() {
        let mut body = pin!(DedupeBody::<Empty<Bytes>>::held(Bytes::new(), None));
        assert!(body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(0));
        assert!(next(&mut body).is_none());
    }

    #[test]
    fn an_inner_body_is_forwarded_with_its_hints() {
        let mut body = pin!(DedupeBody::inner(Full::new(Bytes::from("abc"))));
        assert_eq!(body.size_hint().exact(), Some(3));
        assert!(!body.is_end_stream());
        assert_eq!(next(&mut body).unwrap().into_data().unwrap(), "abc");
        assert!(body.is_end_stream());
    }
}
