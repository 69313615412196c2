//! What counts as success.

use std::{fmt, sync::Arc};

use http::response::Parts;

/// Judges a response by its head: whether the event is handled.
#[derive(Clone)]
pub(super) struct Success(Arc<dyn Fn(&Parts) -> bool + Send + Sync>);

impl Success {
    pub(super) fn by(judge: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(judge))
    }

    /// An interim answer or a switch of protocols is no success, whoever says so: nothing was
    /// answered that a duplicate could be answered with.
    pub(super) fn is(&self, response: &Parts) -> bool {
        !response.status.is_informational() && (self.0)(response)
    }
}

impl Default for Success {
    fn default() -> Self {
        Self::by(|response| response.status.is_success())
    }
}

impl fmt::Debug for Success {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Success(fn)")
    }
}
