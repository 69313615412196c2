//! What the tests stand on.

#![allow(dead_code, reason = "not every test needs everything")]

pub mod claims;
#[path = "../../../examples/support/client.rs"]
pub mod client;
pub mod cut;
pub mod http;
pub mod postgres;
pub mod process;
pub mod scripted;
#[path = "../../../examples/support/throwaway.rs"]
pub mod throwaway;
