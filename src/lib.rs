//! Webhook deduplication that does not lose events.

pub mod claim;
pub mod dedupe;
mod http;
pub mod key;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;

pub use crate::{
    claim::{ClaimInfo, EventKey, Scope, TextError},
    dedupe::{ConfigError, Deduplicator, DeduplicatorBuilder, LeaseLost, Outcome, RunError},
    http::{
        Dedupe, DedupeBody, DedupeLayer, DedupeStatus, Duplicate, InProgress, MissingKey,
        ResponseFuture, StoreDown,
    },
    key::{KeySource, KeySourceError},
    store::{ClaimStore, MemoryStore, PgStore, StoreError},
};
