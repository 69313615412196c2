//! What the examples that are servers have in common.

#![allow(dead_code, reason = "not every example needs everything")]

pub mod failure;
pub mod server;
pub mod start;
pub mod supervisor;
pub mod throwaway;
pub mod wish;
