//! Webhook deduplication that does not lose events.

pub mod claim;
pub mod store;

pub use crate::{
    claim::{EventKey, Scope, TextError},
    store::{ClaimStore, StoreError},
};
