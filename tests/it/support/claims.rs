//! The words of the protocol, as most tests need them.

use std::{error::Error, time::Duration};

use bytes::Bytes;
use tower_dedupe::{
    ClaimStore, EventKey, Scope,
    claim::{Claim, ClaimOutcome, Held, PayloadHash},
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

/// The same of the payload with this number.
pub fn claim_of(key: &str, payload: usize) -> Claim {
    claim(key).with_fingerprint(Some(PayloadHash::from([payload as u8; 32])))
}

/// Bytes of any value, zero among them, which do not compress.
pub fn noise(length: usize, seed: usize) -> Bytes {
    let mut state = 88_172_645_463_325_252 ^ (seed as u64) << 32;
    let bytes = std::iter::from_fn(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state as u8)
    });
    bytes.take(length).collect()
}

/// What a claim hears of a key that is done with status 200.
pub fn done_with(response: Option<Bytes>) -> ClaimOutcome {
    ClaimOutcome::Done { status: Some(200), response }
}

/// Claims a key and marks it done.
pub async fn finish(store: &impl ClaimStore, first: Claim, response: Option<Bytes>) -> Claim {
    assert!(matches!(store.claim(&first).await.unwrap(), ClaimOutcome::Claimed { .. }));
    let completion = done().with_response(response);
    assert_eq!(store.complete(&first.key, first.token, completion).await.unwrap(), Held::Yes);
    first
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
