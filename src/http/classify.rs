//! What counts as success.

use std::{fmt, sync::Arc};

use http::{StatusCode, response::Parts};

use crate::dedupe::ConfigError;

/// Judges a response by its head: whether the event is handled.
#[derive(Clone)]
pub(super) struct Success {
    judge: Arc<dyn Fn(&Parts) -> bool + Send + Sync>,
    /// Refusals that are as final as a success.
    remembered: Arc<[StatusCode]>,
}

impl Success {
    pub(super) fn set_judge(&mut self, judge: impl Fn(&Parts) -> bool + Send + Sync + 'static) {
        self.judge = Arc::new(judge);
    }

    pub(super) fn remember(&mut self, statuses: impl IntoIterator<Item = StatusCode>) {
        self.remembered = statuses.into_iter().collect();
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let comes_back =
            [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS];
        let never = |status: &&StatusCode| !status.is_client_error() || comes_back.contains(status);
        match self.remembered.iter().find(never) {
            Some(status) => Err(ConfigError::Remember { given: status.as_u16() }),
            None => Ok(()),
        }
    }

    /// An interim answer or a switch of protocols is no success, whoever says so: nothing was
    /// answered that a duplicate could be answered with.
    pub(super) fn is(&self, response: &Parts) -> bool {
        !response.status.is_informational()
            && ((self.judge)(response) || self.remembered.contains(&response.status))
    }
}

impl Default for Success {
    fn default() -> Self {
        Self {
            judge: Arc::new(|response| response.status.is_success()),
            remembered: Arc::default(),
        }
    }
}

impl fmt::Debug for Success {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Success(fn)")
    }
}
