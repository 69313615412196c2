//! The Tower layer: reads the key of a request, runs the inner service at most once for it, and
//! answers what must not run.

mod answer;
mod body;
mod classify;
mod count;
mod decode;
mod fingerprint;
mod future;
mod layer;
mod policy;
mod read;
mod replay;
mod service;

#[cfg(feature = "axum")]
mod extract;

pub use self::{
    answer::DedupeStatus,
    body::DedupeBody,
    fingerprint::{Fingerprint, FingerprintFn},
    future::ResponseFuture,
    layer::DedupeLayer,
    policy::{Duplicate, InProgress, MissingKey, StoreDown},
    service::Dedupe,
};
