//! Webhook deduplication that does not lose events.
//!
//! Senders of webhooks and events deliver at least once. [`DedupeLayer`] wraps any Tower service,
//! reads the event's key from a header or the body, claims it in Postgres before it calls the
//! service, and marks it done only when the service has succeeded:
//!
//! ```text
//! at-least-once delivery  +  DedupeLayer  =  each event's handler completes once, and none is lost
//! ```
//!
//! ```no_run
//! use axum::{Router, routing::post};
//! use tower_dedupe::{ClaimInfo, DedupeLayer, KeySource, PgStore};
//!
//! async fn on_payment(info: ClaimInfo, body: String) {
//!     // … `info.attempt()` above 1 says that an earlier attempt failed or died.
//! }
//!
//! # async fn example() -> Result<Router, Box<dyn std::error::Error>> {
//! let store = PgStore::connect("postgres://app@localhost/app").await?;
//! store.migrate().await?;
//!
//! let layer = DedupeLayer::new(store, KeySource::json("$.id")?).scope("stripe");
//! let app = Router::new().route("/stripe", post(on_payment).layer(layer));
//! # Ok(app)
//! # }
//! ```
//!
//! # Which part for what
//!
//! | you want | look at |
//! |---|---|
//! | to put it in front of handlers | [`DedupeLayer`]: all settings and their defaults |
//! | to write to the same database, exactly once | [`transaction`] |
//! | to give API clients their first answer again | [`DedupeLayer::idempotency_key`], [`Duplicate::Replay`] |
//! | to see whether a key is well chosen | [`KeyAudit`] |
//! | to say where the key is, and avoid the wrong one | [`key`] |
//! | to run events that are no HTTP requests, or many in one | [`Deduplicator`] |
//! | to connect, migrate, share a pool | [`PgStore`] and its [builder](store::PgStoreBuilder) |
//! | to try it without a database | [`MemoryStore`] |
//! | to keep claims elsewhere | [`ClaimStore`], and `testing::conformance` (feature `testing`) |
//! | to know what a claim is and what may happen to it | [`claim`] |
//!
//! # What is promised
//!
//! - A sender that retries until it sees 2xx has had its event handled to the end.
//! - Once an event is done, its handler is not called again until the
//!   [retention](DeduplicatorBuilder::retention) ends.
//! - At any instant at most one claim of a key can mark it done; a holder whose claim was taken over
//!   changes nothing.
//! - A failed attempt (not 2xx, an error, a panic, dropped) frees the key at once; that of a process
//!   that died is free when its [lease](DeduplicatorBuilder::lease) ends.
//! - In transaction mode ([`transaction`]), what a handler writes through its transaction exists if
//!   and only if its event is done: exactly once.
//!
//! What is not, in lease mode: a process that dies after an outside effect and before the key is marked done runs
//! the handler again. Hand [`ClaimInfo::key`] on as the idempotency key of whatever the handler
//! calls.
//!
//! # Features
//!
//! | feature | default | what |
//! |---|---|---|
//! | `axum` | yes | [`ClaimInfo`] and [`Transaction`] are extractors; the default scope is the whole path in nested routers |
//! | `decode` | yes | keys in bodies with gzip, deflate, br and zstd |
//! | `tls` | yes | TLS to Postgres |
//! | `metrics` | no | counters through the [`metrics`](https://docs.rs/metrics) facade |
//! | `testing` | no | the conformance suite for stores |

pub mod claim;
pub mod dedupe;
mod http;
pub mod key;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transaction;

pub use crate::{
    claim::{ClaimInfo, EventKey, Scope, TextError},
    dedupe::{ConfigError, Deduplicator, DeduplicatorBuilder, LeaseLost, Outcome, RunError},
    http::{
        Dedupe, DedupeBody, DedupeLayer, DedupeStatus, Duplicate, Fingerprint, FingerprintFn,
        InProgress, MissingKey, ResponseFuture, StoreDown,
    },
    key::{KeyAudit, KeyFinding, KeyMistake, KeySource, KeySourceError},
    store::{ClaimStore, MemoryStore, PgStore, StoreError},
    transaction::{Transaction, TransactionError},
};

/// The README's examples are compiled.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../README.md")]
struct Readme;
