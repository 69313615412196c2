//! Why a handler that writes to Postgres does not answer with success.

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use deadpool_postgres::PoolError;
use tower_dedupe::{TransactionError, transaction::tokio_postgres};

use super::server::{Fault, with_sources};

pub enum Failure {
    Answer(StatusCode),
    Transaction(TransactionError),
    Other(Fault),
}

impl From<StatusCode> for Failure {
    fn from(status: StatusCode) -> Self {
        Self::Answer(status)
    }
}

impl From<TransactionError> for Failure {
    fn from(error: TransactionError) -> Self {
        Self::Transaction(error)
    }
}

impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Transaction(TransactionError::Postgres(error))
    }
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        Self::Other(error.into())
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::Other(error.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        match self {
            Self::Answer(status) => status.into_response(),
            Self::Transaction(error) => error.into_response(),
            Self::Other(fault) => {
                eprintln!("{}", with_sources(&*fault));
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}
