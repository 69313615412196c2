//! What the tests stand on.

pub mod scripted;
