//! The integration tests, one module per behaviour.

#![allow(unreachable_pub, reason = "modules of one binary")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a test that fails says so by panicking"
)]

mod cache;
mod deduplicator;
mod hosts;
mod idempotency;
mod killer;
mod lanes;
mod layer;
mod logs;
mod migrate;
mod naive;
mod outage;
mod payloads;
mod payments;
mod plans;
mod postgres_store;
mod promises;
mod quickstart;
mod replay;
mod store_conformance;
mod support;
mod tidy;
mod tls;
mod transaction;
