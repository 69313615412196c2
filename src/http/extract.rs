//! `ClaimInfo` as an Axum extractor.

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use http::{StatusCode, request::Parts};

use crate::claim::ClaimInfo;

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
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned())
    }
}
