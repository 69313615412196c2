//! The first response again: taken down as it leaves, stored with the done mark, and restored.
//!
//! A store is given bytes: a version, the head's lines, the trailers' lines, and the body as it is.

use std::{sync::Arc, time::Duration};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{
        CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, DATE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
        SET_COOKIE, TE, TRANSFER_ENCODING, UPGRADE, WWW_AUTHENTICATE,
    },
    response::Parts,
};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout_at};

use super::{
    answer::DedupeStatus,
    body::DedupeBody,
    read::{Pieces, Whole},
};

/// What of a response is stored.
#[derive(Clone, Debug)]
pub(super) struct Replay {
    /// The longest body, in bytes.
    pub(super) max_body: usize,
    /// Headers that the user does not want to be stored.
    pub(super) never: Arc<[HeaderName]>,
}

impl Default for Replay {
    fn default() -> Self {
        Self { max_body: DEFAULT_MAX_BODY, never: Arc::default() }
    }
}

/// A response's body after it was to be taken down.
pub(super) enum Taken<R> {
    /// It goes on as it came, and this is to be stored.
    Down(DedupeBody<R>, Bytes),
    /// It goes on as it came, and cannot be stored: too long, too slow, or a stream.
    Not(DedupeBody<R>),
    /// It failed before its end, so nothing of it can be given to anybody.
    Broken,
}

impl Replay {
    /// Takes a response down, if its body ends soon enough. What cannot be stored is not waited for.
    pub(super) async fn take_down<R: Body<Data = Bytes>>(&self, head: &Parts, body: R) -> Taken<R> {
        if body.size_hint().lower() > self.max_body as u64 || is_endless(&head.headers) {
            return Taken::Not(DedupeBody::inner(body));
        }
        let deadline = Instant::now() + PATIENCE;
        let mut messages = is_grpc(&head.headers).then(Messages::default);
        let mut pieces = Pieces::default();
        let mut trailers = None;
        // It may have to go on after all, and cannot be moved once it was polled.
        let mut body = Box::pin(body);
        while !body.is_end_stream() {
            let Ok(frame) = timeout_at(deadline, body.frame()).await else {
                return Taken::Not(DedupeBody::resumed(pieces.join(), body));
            };
            match frame.map(|frame| frame.map(http_body::Frame::into_data)) {
                None => break,
                Some(Err(_)) => return Taken::Broken,
                Some(Ok(Err(frame))) => trailers = frame.into_trailers().ok().or(trailers),
                Some(Ok(Ok(data))) => {
                    let is_stream = messages.as_mut().is_some_and(|all| all.come(&data) > 1);
                    pieces.push(data);
                    if is_stream || pieces.len() > self.max_body {
                        return Taken::Not(DedupeBody::resumed(pieces.join(), body));
                    }
                }
            }
        }
        let whole = Whole { data: pieces.join(), trailers };
        let stored = self.stored(&head.headers, &whole);
        let body = DedupeBody::held(whole.data, whole.trailers);
        match stored {
            Some(stored) => Taken::Down(body, stored),
            None => Taken::Not(body),
        }
    }

    /// The bytes to be stored, unless the head is too long for that.
    fn stored(&self, headers: &HeaderMap, whole: &Whole) -> Option<Bytes> {
        let mut head = BytesMut::new();
        let listed = listed_in_connection(headers);
        for (name, value) in headers {
            if !(NEVER.contains(name) || self.never.contains(name) || listed.contains(name)) {
                put_line(&mut head, name, value);
            }
        }
        let mut trailers = BytesMut::new();
        for (name, value) in whole.trailers.iter().flatten() {
            put_line(&mut trailers, name, value);
        }
        if head.len() + trailers.len() > MAX_HEAD {
            return None;
        }
        let mut stored =
            BytesMut::with_capacity(9 + head.len() + trailers.len() + whole.data.len());
        stored.put_u8(VERSION);
        for lines in [head, trailers] {
            stored.put_u32(u32::try_from(lines.len()).ok()?);
            stored.put(lines);
        }
        stored.put(&whole.data[..]);
        Some(stored.freeze())
    }
}

/// What was stored of a response; its status has a column of its own.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) headers: HeaderMap,
    pub(super) data: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

impl Stored {
    /// Reads what [`Replay::take_down`] has made; nothing, if somebody else has.
    pub(super) fn read(mut stored: Bytes) -> Option<Self> {
        if stored.try_get_u8().ok()? != VERSION {
            return None;
        }
        let mut lines = || {
            let length = usize::try_from(stored.try_get_u32().ok()?).ok()?;
            (length <= stored.len()).then(|| stored.split_to(length))
        };
        let (head, trailers) = (headers(&lines()?)?, headers(&lines()?)?);
        let trailers = Some(trailers).filter(|trailers| !trailers.is_empty());
        Some(Self { headers: head, data: stored, trailers })
    }
}

/// A header's value has no line break in it, and its name no colon.
fn put_line(lines: &mut BytesMut, name: &HeaderName, value: &HeaderValue) {
    for part in [name.as_str().as_bytes(), b":", value.as_bytes(), b"\n"] {
        lines.put(part);
    }
}

fn headers(lines: &[u8]) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        let mut halves = line.strip_suffix(b"\n")?.splitn(2, |byte| *byte == b':');
        let name = HeaderName::from_bytes(halves.next()?).ok()?;
        headers.append(name, HeaderValue::from_bytes(halves.next()?).ok()?);
    }
    Some(headers)
}

/// What `Connection` names is for one connection, as it is itself (RFC 9110, section 7.6.1).
fn listed_in_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(CONNECTION).iter();
    let names = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    names.filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok()).collect()
}

/// Streams that live on being read while they grow.
fn is_endless(headers: &HeaderMap) -> bool {
    has_type(headers, "text/event-stream")
}

fn is_grpc(headers: &HeaderMap) -> bool {
    has_type(headers, "application/grpc")
}

fn has_type(headers: &HeaderMap, begins_with: &str) -> bool {
    let value = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    value
        .get(..begins_with.len())
        .is_some_and(|begin| begin.eq_ignore_ascii_case(begins_with.as_bytes()))
}

/// Counts the messages of a gRPC body, each with a byte of flags and four of length before it.
#[derive(Default)]
struct Messages {
    begun: usize,
    prefix: Vec<u8>,
    /// What is to come of the message that has begun.
    left: usize,
}

impl Messages {
    /// How many have begun, with this piece.
    fn come(&mut self, mut piece: &[u8]) -> usize {
        while !piece.is_empty() {
            if self.left > 0 {
                let (_, rest) = piece.split_at(self.left.min(piece.len()));
                self.left -= piece.len() - rest.len();
                piece = rest;
                continue;
            }
            let (prefix, rest) = piece.split_at(piece.len().min(PREFIX - self.prefix.len()));
            self.prefix.extend_from_slice(prefix);
            piece = rest;
            if let [flags, a, b, c, d] = self.prefix[..] {
                // The trailers of grpc-web look like a message, and are none.
                self.begun += usize::from(flags & 0x80 == 0);
                self.left = u32::from_be_bytes([a, b, c, d]) as usize;
                self.prefix.clear();
            }
        }
        self.begun
    }
}

/// Never stored. Those that speak of one connection, of one moment or of one client; the length, which
/// is told anew; and the layer's own.
const NEVER: [HeaderName; 14] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
    DATE,
    SET_COOKIE,
    WWW_AUTHENTICATE,
    CONTENT_LENGTH,
    DedupeStatus::HEADER,
    REPLAYED,
];

/// Whether a duplicate is answered with the first response.
pub(super) const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

const VERSION: u8 = 1;
const PREFIX: usize = 5;
const DEFAULT_MAX_BODY: usize = 256 * 1024;
/// The longest head and trailers, in bytes.
const MAX_HEAD: usize = 64 * 1024;
/// How long a body may take to its end, counted from its head. What takes longer is a stream, whose
/// reader is not to be kept waiting.
const PATIENCE: Duration = Duration::from_secs(2);
