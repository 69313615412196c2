//! The integration tests, one module per behaviour.

#![allow(unreachable_pub, reason = "modules of one binary")]

mod deduplicator;
mod hosts;
mod layer;
mod support;
