//! What an error of the driver means. Decided by SQLSTATE, never by a message.

use std::{error::Error, io};

use tokio_postgres::error::{Severity, SqlState};

use crate::store::StoreErrorKind;

/// What to do about an error, and what it says about the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The connection is gone: the operation may or may not have been carried out.
    Lost,
    /// Another transaction has a lock for longer than the lock timeout. Nothing was done.
    Locked,
    /// Serialization failure or deadlock: the same again will do. Nothing was done.
    Again,
    /// The connection's named statement is of another schema, or not there. Nothing was done.
    Stale,
    /// The server does not write: it is a standby, or was demoted to one. Nothing was done.
    ReadOnly,
    /// Nothing was done, and nothing can be done about it.
    Refused(StoreErrorKind),
}

impl Meaning {
    pub(super) fn of(error: &tokio_postgres::Error) -> Self {
        let Some(refusal) = error.as_db_error() else {
            let io = error.source().is_some_and(|source| source.is::<io::Error>());
            return match error.is_closed() || io {
                true => Self::Lost,
                false => Self::Refused(StoreErrorKind::Other),
            };
        };
        if matches!(refusal.parsed_severity(), Some(Severity::Fatal | Severity::Panic)) {
            return Self::Lost;
        }
        let code = refusal.code();
        if *code == SqlState::LOCK_NOT_AVAILABLE {
            Self::Locked
        } else if *code == SqlState::T_R_SERIALIZATION_FAILURE
            || *code == SqlState::T_R_DEADLOCK_DETECTED
        {
            Self::Again
        } else if *code == SqlState::READ_ONLY_SQL_TRANSACTION {
            Self::ReadOnly
        } else if *code == SqlState::FEATURE_NOT_SUPPORTED
            || *code == SqlState::INVALID_SQL_STATEMENT_NAME
            || *code == SqlState::DUPLICATE_PSTATEMENT
        {
            Self::Stale
        } else {
            Self::by_class(code)
        }
    }

    fn by_class(code: &SqlState) -> Self {
        let code = code.code();
        // Connection exceptions, and a transaction whose fate is not known.
        if code.starts_with("08") || code == "40003" {
            return Self::Lost;
        }
        Self::Refused(match code.get(..2) {
            // A missing or different table, a missing right, a missing schema.
            Some("42" | "3F") => StoreErrorKind::Schema,
            // Out of resources, cancelled or timed out, shutting down or starting up.
            Some("53" | "57") => StoreErrorKind::Unavailable,
            _ => StoreErrorKind::Other,
        })
    }

    /// Whether the connection may serve the next operation.
    pub(super) fn leaves_the_connection_clean(self) -> bool {
        match self {
            Self::Locked | Self::Again | Self::Refused(_) => true,
            Self::Lost | Self::Stale | Self::ReadOnly => false,
        }
    }

    /// What the caller is told in the end.
    pub(super) fn kind(self) -> StoreErrorKind {
        match self {
            Self::Lost => StoreErrorKind::Unknown,
            Self::Locked | Self::Again => StoreErrorKind::Conflict,
            Self::Stale => StoreErrorKind::Schema,
            Self::ReadOnly => StoreErrorKind::Unavailable,
            Self::Refused(kind) => kind,
        }
    }
}
