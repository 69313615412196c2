//! Tests for users.
