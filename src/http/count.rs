//! What is counted, where the feature `metrics` is on.

use crate::key::{KeyFinding, KeySource};

/// A key came with another payload.
pub(super) fn payload_conflict(source: &KeySource) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedupe_payload_conflicts_total", "source" => source.to_string())
        .increment(1);
    #[cfg(not(feature = "metrics"))]
    let _ = source;
}

/// The key source looks like a mistake, and so many deliveries have shown it by now.
pub(super) fn key_finding(finding: &KeyFinding) {
    #[cfg(feature = "metrics")]
    metrics::counter!(
        "tower_dedupe_key_findings_total",
        "source" => finding.source().to_owned(),
        "scope" => finding.scope().to_owned(),
        "mistake" => finding.mistake().as_str(),
    )
    .absolute(finding.times());
    #[cfg(not(feature = "metrics"))]
    let _ = finding;
}
