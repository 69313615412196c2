//! Webhook deduplication that does not lose events.

pub mod claim;
pub mod key;
pub mod store;

pub use crate::{
    claim::{EventKey, Scope, TextError},
    key::KeySource,
    store::{ClaimStore, StoreError},
};
