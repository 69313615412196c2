//! What is answered when the handler is not to run: the choices.

use std::time::Duration;

use http::StatusCode;

/// The answer to a delivery of an event that is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Duplicate {
    /// The status that the first success was answered with, and an empty body. Some senders take
    /// exactly 200 for success, others 204: what satisfied the sender once does so again.
    #[default]
    SameStatus,
    /// This status, and an empty body. It must be a success (200 to 299), or senders retry for
    /// ever.
    Status(StatusCode),
    /// The first response again: status, headers, body and trailers, stored with the done mark. For
    /// API clients, which need the answer and not only that there was one.
    ///
    /// It carries `idempotency-replayed: true`. Bytes are the same, and so are header values and the
    /// order of those of one name, but for what is never stored:
    ///
    /// - hop-by-hop headers (`connection` and what it names, `keep-alive`, `proxy-connection`,
    ///   `proxy-authenticate`, `proxy-authorization`, `te`, `transfer-encoding`, `upgrade`);
    /// - `date`, `set-cookie` and `www-authenticate`, which are for one moment or one client;
    /// - `content-length`, which is told anew;
    /// - `dedupe-status` and `idempotency-replayed`, which are the layer's;
    /// - what [`never_replay`](crate::DedupeLayer::never_replay) names.
    ///
    /// A response is read to its end before it leaves, since it is stored with the done mark, and
    /// that is committed first. Some are **not stored**: those longer than
    /// [`max_replay_body`](crate::DedupeLayer::max_replay_body), or with more than 64 KiB of headers;
    /// those that take more than 2 s from their head to their end, `text/event-stream`, and gRPC
    /// answers of more than one message. They go on to the first client as they come. Their
    /// duplicates, and those of events that were done before this was asked for, are answered with
    /// the first status, an empty body and `idempotency-replayed: false`. **The handler does not run
    /// again.**
    ///
    /// Put compression outside the layer, or it is stored as the first client could read it.
    Replay,
}

/// The answer to a delivery of an event that another holder is working on. Never a success, since
/// that holder may yet fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum InProgress {
    /// 503 with `Retry-After`, which every sender retries.
    #[default]
    Unavailable,
    /// 409 with `Retry-After`, for clients that know what to do with it.
    ///
    /// **Many webhook senders take a 4xx as final**, and the event is lost if the first delivery
    /// fails: AWS SNS, Okta, Sanity and Zapier among them. Others disable the endpoint.
    Conflict,
    /// Waits up to this long for the first delivery to end, then answers as it does: duplicate if
    /// it succeeded; if it failed, this delivery runs. If it has not ended, 503 as above.
    ///
    /// Keep it well inside the sender's own deadline (Shopify waits 5 s, Slack 3 s). No connection
    /// to the database is held while waiting, but a place in a limit of the inner service is: put
    /// such a limit outside of the layer.
    Wait(Duration),
}

/// What is done with a request that carries no key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// The handler runs without deduplication, a warning is logged, and the response carries
    /// `dedupe-status: missing-key`. Handshakes and some event types have no key, and turning them
    /// away for ever would lose them.
    #[default]
    PassThrough,
    /// 400. For senders that put a key on everything they send.
    Reject,
}

/// What is done with a delivery whose key cannot be claimed because the store fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreDown {
    /// 503 with `Retry-After`; the handler is not called.
    #[default]
    Reject,
    /// The handler runs without deduplication.
    ///
    /// **Duplicates then run again**, and two deliveries may run at once, for as long as the store
    /// is away. A warning is logged and the response carries `dedupe-status: store-unavailable`.
    PassThrough,
}
