//! Why a handler's transaction was not committed.

use std::{error::Error, fmt, sync::Arc};

/// Why work that had succeeded was not committed. Nothing of it is left, the event is not done, and
/// it may be delivered again.
#[derive(Clone, Debug)]
pub struct NotCommitted {
    kind: NotCommittedKind,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// The kinds of [`NotCommitted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotCommittedKind {
    /// Another transaction got in the way: a serialization failure or a deadlock (SQLSTATE 40001,
    /// 40P01). The same again will do.
    Conflict,
    /// The connection was lost before the commit, or the database was: nothing was committed.
    Lost,
    /// The connection was lost during the commit, and the database did not say within the settle
    /// timeout what became of it. The next delivery finds out: it is a duplicate, or runs.
    Unknown,
    /// A statement had failed, which aborts a transaction, and the handler said success all the
    /// same. A statement that may fail belongs into a savepoint.
    Aborted,
    /// The database refused at the end, such as for a deferred constraint.
    Refused,
    /// A clone of the transaction was still at work, in a task that the handler had spawned.
    InUse,
    /// The handler has ended the transaction itself. **What it committed stays**, though the event
    /// is not done.
    EndedByHandler,
}

impl NotCommitted {
    pub(super) fn new(kind: NotCommittedKind, source: impl Error + Send + Sync + 'static) -> Self {
        Self { kind, source: Some(Arc::new(source)) }
    }

    /// What kind of reason it is.
    pub fn kind(&self) -> NotCommittedKind {
        self.kind
    }
}

impl From<NotCommittedKind> for NotCommitted {
    fn from(kind: NotCommittedKind) -> Self {
        Self { kind, source: None }
    }
}

impl fmt::Display for NotCommitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            NotCommittedKind::Conflict => {
                "another transaction got in the way: nothing was committed, try again"
            }
            NotCommittedKind::Lost => "the connection was lost: nothing was committed, try again",
            NotCommittedKind::Unknown => {
                "the connection was lost during the commit: try again to learn what became of it"
            }
            NotCommittedKind::Aborted => {
                "a statement had failed and the handler said success: nothing was committed; \
                 return the error, or run what may fail in a savepoint"
            }
            NotCommittedKind::Refused => "the database refused: nothing was committed",
            NotCommittedKind::InUse => {
                "the transaction was still in use when the handler had ended: nothing was \
                 committed; wait for the tasks that use it"
            }
            NotCommittedKind::EndedByHandler => {
                "the handler has ended the transaction itself: the event is not done, and what \
                 was committed by hand stays; leave its end to the layer"
            }
        })
    }
}

impl Error for NotCommitted {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}
