//! What users test their own parts with. Feature `testing`.
//!
//! [`conformance`] checks a [`ClaimStore`](crate::ClaimStore): one list of cases, the same for
//! every store.

pub mod conformance;
