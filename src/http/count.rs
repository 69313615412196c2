//! What is counted, where the feature `metrics` is on.

use crate::key::KeySource;

/// A key came with another payload.
pub(super) fn payload_conflict(source: &KeySource) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedupe_payload_conflicts_total", "source" => source.to_string())
        .increment(1);
    #[cfg(not(feature = "metrics"))]
    let _ = source;
}
