//! The words of the protocol, as most tests need them.

use std::{error::Error, time::Duration};

use tower_dedupe::{
    EventKey, Scope,
    claim::{Claim, ClaimOutcome},
    store::Completion,
};

/// A key in the scope `s`.
pub fn event(key: &str) -> EventKey {
    EventKey::new(Scope::new("s").unwrap(), key).unwrap()
}

/// A new claim of it for a minute.
pub fn claim(key: &str) -> Claim {
    Claim::new(event(key), MINUTE, MINUTE)
}

/// A done mark with status 200.
pub fn done() -> Completion {
    Completion::new(Some(200), MINUTE)
}

pub fn in_progress(outcome: &ClaimOutcome) -> bool {
    matches!(outcome, ClaimOutcome::InProgress { .. })
}

/// All that an error says, down its chain of sources.
pub fn whole(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

pub const MINUTE: Duration = Duration::from_secs(60);
