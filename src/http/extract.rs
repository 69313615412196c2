//! `ClaimInfo` and `Transaction` as Axum extractors.

use std::convert::Infallible;

use axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{StatusCode, request::Parts};

use crate::{
    claim::ClaimInfo,
    transaction::{Transaction, TransactionError},
};

/// Rejects with 500 where no layer has put it: the route is not deduplicated, or the request passed
/// through without a key. Extract `Option<ClaimInfo>` where that may be.
impl<S: Sync> FromRequestParts<S> for ClaimInfo {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts.extensions.get().cloned().ok_or((
            StatusCode::INTERNAL_SERVER_ERROR,
            "no claim: add a DedupeLayer to this route, or extract Option<ClaimInfo>",
        ))
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for ClaimInfo {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned())
    }
}

/// Rejects with 500 where no layer has put it: the layer is not transactional, or the request passed
/// through without a key. Extract `Option<Transaction>` where that may be.
impl<S: Sync> FromRequestParts<S> for Transaction {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts.extensions.get().cloned().ok_or((
            StatusCode::INTERNAL_SERVER_ERROR,
            "no transaction: the layer of this route is not transactional, or the request has no \
             event key",
        ))
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Transaction {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned())
    }
}

impl IntoResponse for TransactionError {
    fn into_response(self) -> Response {
        // Without its source, whose text may quote rows.
        tracing::error!(error = %self, "a handler's statement failed");
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}
