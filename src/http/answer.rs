//! The layer's own answers.

use std::{fmt, time::Duration};

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Response, StatusCode, Uri,
    header::{CONTENT_TYPE, LINK, RETRY_AFTER},
};

use super::{
    body::DedupeBody,
    policy::Duplicate,
    replay::{REPLAYED, Stored},
};
use crate::{
    dedupe::ConfigError,
    store::{NotCommitted, NotCommittedKind},
};

/// Why the layer answered instead of the handler, or ran the handler without deduplication.
///
/// It stands in the response's `dedupe-status` header and in its extensions, for outer layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DedupeStatus {
    /// The event is done; the handler did not run.
    Duplicate,
    /// Another delivery of the event is at work.
    InProgress,
    /// The request carries no key.
    MissingKey,
    /// What stands where the key should be cannot be one.
    InvalidKey,
    /// The key belongs to a request with another payload.
    KeyConflict,
    /// The body is longer than `max_body`.
    BodyTooLarge,
    /// The body did not arrive within `body_timeout`.
    BodyTimeout,
    /// The body could not be read to its end.
    BodyUnreadable,
    /// The body has a `content-encoding` that the layer cannot look into.
    UnsupportedEncoding,
    /// The store failed.
    StoreUnavailable,
    /// The handler's transaction was not committed because of another one, and may be the next time.
    TransactionConflict,
    /// The handler's transaction was not committed, through a fault of the handler.
    NotCommitted,
    /// As much is in flight as `max_in_flight` allows, or the layer is drained.
    TooManyInFlight,
    /// The handler succeeded, and the body of its response, which was to be stored, broke off.
    ResponseUnreadable,
}

impl DedupeStatus {
    /// The name of the response header.
    pub const HEADER: HeaderName = HeaderName::from_static("dedupe-status");

    /// The header's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Duplicate => "duplicate",
            Self::InProgress => "in-progress",
            Self::MissingKey => "missing-key",
            Self::InvalidKey => "invalid-key",
            Self::KeyConflict => "key-conflict",
            Self::BodyTooLarge => "body-too-large",
            Self::BodyTimeout => "body-timeout",
            Self::BodyUnreadable => "body-unreadable",
            Self::UnsupportedEncoding => "unsupported-encoding",
            Self::StoreUnavailable => "store-unavailable",
            Self::TransactionConflict => "transaction-conflict",
            Self::NotCommitted => "not-committed",
            Self::TooManyInFlight => "too-many-in-flight",
            Self::ResponseUnreadable => "response-unreadable",
        }
    }

    /// What a problem is called that the documentation of an API describes.
    fn title(self) -> Option<&'static str> {
        match self {
            Self::MissingKey => Some("The idempotency key is missing"),
            Self::InvalidKey => Some("The idempotency key cannot be read"),
            Self::InProgress => Some("A request with this idempotency key is under way"),
            Self::KeyConflict => Some("The idempotency key belongs to another request"),
            _ => None,
        }
    }

    /// Marks a response, in its headers and its extensions.
    pub(super) fn mark<R>(self, response: &mut Response<R>) {
        response.headers_mut().insert(Self::HEADER, HeaderValue::from_static(self.as_str()));
        response.extensions_mut().insert(self);
    }
}

impl fmt::Display for DedupeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a request is turned away, with what its sender is told.
#[derive(Debug)]
pub(super) enum Refusal {
    InProgress { status: StatusCode, lease_left: Duration },
    MissingKey(String),
    InvalidKey(String),
    OtherPayload,
    BodyTooLarge { limit: usize },
    OuterBodyLimit,
    BodyTimeout { patience: Duration },
    BodyUnreadable,
    Encoding(String),
    StoreUnavailable,
    TooManyInFlight,
    Cut,
    NotCommitted(NotCommitted),
    ResponseUnreadable,
}

impl Refusal {
    /// The answer as `application/problem+json` (RFC 9457).
    pub(super) fn response<R>(
        self,
        documentation: Option<&Documentation>,
    ) -> Response<DedupeBody<R>> {
        let (status, reason, retry_after, detail) = self.told();
        let described = documentation.zip(reason.title());
        let (kind, title) = match described {
            Some((documentation, title)) => (&*documentation.0, title),
            None => ("about:blank", status.canonical_reason().unwrap_or_default()),
        };
        let problem = serde_json::json!({
            "type": kind,
            "title": title,
            "status": status.as_u16(),
            "detail": detail,
            "dedupe_status": reason.as_str(),
        });
        let mut response = Response::new(DedupeBody::held(problem.to_string().into(), None));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(link) = described.and_then(|(documentation, _)| documentation.link()) {
            headers.insert(LINK, link);
        }
        if let Some(after) = retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(after));
        }
        reason.mark(&mut response);
        response
    }

    fn told(self) -> (StatusCode, DedupeStatus, Option<u64>, String) {
        use DedupeStatus as Is;
        match self {
            Self::InProgress { status, lease_left } => (
                status,
                Is::InProgress,
                Some(whole_seconds(lease_left)),
                "another delivery of this event is being handled; send it again later".into(),
            ),
            Self::MissingKey(fault) => {
                (StatusCode::BAD_REQUEST, Is::MissingKey, None, format!("no event key: {fault}"))
            }
            Self::InvalidKey(fault) => (
                StatusCode::BAD_REQUEST,
                Is::InvalidKey,
                None,
                format!("no usable event key: {fault}"),
            ),
            Self::OtherPayload => (
                StatusCode::UNPROCESSABLE_ENTITY,
                Is::KeyConflict,
                None,
                "this key was used with another payload; send the same request again, or this one \
                 with a key of its own"
                    .into(),
            ),
            Self::BodyTooLarge { limit } => (
                StatusCode::PAYLOAD_TOO_LARGE,
                Is::BodyTooLarge,
                None,
                format!("the body is longer than {limit} bytes"),
            ),
            Self::OuterBodyLimit => (
                StatusCode::PAYLOAD_TOO_LARGE,
                Is::BodyTooLarge,
                None,
                "the body is longer than an outer layer allows".into(),
            ),
            Self::BodyTimeout { patience } => (
                StatusCode::REQUEST_TIMEOUT,
                Is::BodyTimeout,
                None,
                format!("the body did not arrive within {patience:?}"),
            ),
            Self::BodyUnreadable => (
                StatusCode::BAD_REQUEST,
                Is::BodyUnreadable,
                None,
                "the body could not be read to its end".into(),
            ),
            Self::Encoding(detail) => {
                (StatusCode::UNSUPPORTED_MEDIA_TYPE, Is::UnsupportedEncoding, None, detail)
            }
            Self::StoreUnavailable => (
                StatusCode::SERVICE_UNAVAILABLE,
                Is::StoreUnavailable,
                Some(STORE_RETRY_SECONDS),
                "the event could not be claimed; send it again later".into(),
            ),
            Self::TooManyInFlight => (
                StatusCode::SERVICE_UNAVAILABLE,
                Is::TooManyInFlight,
                Some(BUSY_RETRY_SECONDS),
                "too many deliveries are in flight; send it again later".into(),
            ),
            Self::Cut => (
                StatusCode::SERVICE_UNAVAILABLE,
                Is::InProgress,
                Some(BUSY_RETRY_SECONDS),
                "the handling of this event was cut short; send it again later".into(),
            ),
            Self::NotCommitted(why) => {
                let (status, reason, retry_after) = match why.kind() {
                    NotCommittedKind::Conflict => (
                        StatusCode::SERVICE_UNAVAILABLE,
                        Is::TransactionConflict,
                        Some(BUSY_RETRY_SECONDS),
                    ),
                    NotCommittedKind::Lost | NotCommittedKind::Unknown => (
                        StatusCode::SERVICE_UNAVAILABLE,
                        Is::StoreUnavailable,
                        Some(STORE_RETRY_SECONDS),
                    ),
                    NotCommittedKind::Aborted
                    | NotCommittedKind::Refused
                    | NotCommittedKind::InUse
                    | NotCommittedKind::EndedByHandler => {
                        (StatusCode::INTERNAL_SERVER_ERROR, Is::NotCommitted, None)
                    }
                };
                (status, reason, retry_after, why.to_string())
            }
            Self::ResponseUnreadable => (
                StatusCode::INTERNAL_SERVER_ERROR,
                Is::ResponseUnreadable,
                None,
                "the request was carried out, but the body of its response broke off".into(),
            ),
        }
    }
}

/// The answer to a delivery whose event is done: the first response where that is to be given again,
/// else a status and nothing else.
pub(super) fn duplicate<R>(
    policy: Duplicate,
    first: Option<u16>,
    stored: Option<Bytes>,
) -> Response<DedupeBody<R>> {
    // Rows that were adopted from another table have no status, which means 200.
    let first = first.and_then(|code| StatusCode::from_u16(code).ok()).unwrap_or(StatusCode::OK);
    let mut response = Response::new(DedupeBody::empty());
    *response.status_mut() = match policy {
        Duplicate::Status(status) => status,
        Duplicate::SameStatus | Duplicate::Replay => first,
    };
    if policy == Duplicate::Replay {
        let stored = stored.and_then(|bytes| {
            let stored = Stored::read(bytes);
            if stored.is_none() {
                tracing::error!(
                    "a stored response cannot be read: its status alone is given again"
                );
            }
            stored
        });
        let replayed = if stored.is_some() { "true" } else { "false" };
        if let Some(Stored { headers, data, trailers }) = stored {
            *response.headers_mut() = headers;
            *response.body_mut() = DedupeBody::held(data, trailers);
        }
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static(replayed));
    }
    DedupeStatus::Duplicate.mark(&mut response);
    response
}

/// The address of the text that tells the clients of an API how keys are used.
#[derive(Clone, Debug)]
pub(super) struct Documentation(String);

impl Documentation {
    pub(super) fn new(address: &str) -> Result<Self, ConfigError> {
        let is_visible = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'<' | b'>' | b'"');
        let is_whole = |uri: Uri| {
            uri.host().is_some_and(|host| !host.is_empty())
                && matches!(uri.scheme_str(), Some("http" | "https"))
        };
        if address.bytes().all(is_visible) && address.parse().is_ok_and(is_whole) {
            Ok(Self(address.to_owned()))
        } else {
            Err(ConfigError::Documentation { given: address.to_owned() })
        }
    }

    fn link(&self) -> Option<HeaderValue> {
        format!("<{}>; rel=\"describedby\"", self.0).try_into().ok()
    }
}

/// Rounded up, since a sender that comes back a moment too early comes in vain; at least 1.
fn whole_seconds(time: Duration) -> u64 {
    (time.as_secs() + u64::from(time.subsec_nanos() > 0)).max(1)
}

const STORE_RETRY_SECONDS: u64 = 5;
const BUSY_RETRY_SECONDS: u64 = 1;
