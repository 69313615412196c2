//! What the header `x-demo` wishes: that the handler goes wrong.

use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};

/// The wish and what stands behind its colon; both empty if there is none.
pub fn of(headers: &HeaderMap) -> (&str, &str) {
    let wish = headers.get("x-demo").and_then(|value| value.to_str().ok()).unwrap_or_default();
    wish.split_once(':').unwrap_or((wish, ""))
}

/// Does `fail`, `panic`, `crash` or `slow:SECONDS`. The error is what the handler is to answer.
pub async fn grant(headers: &HeaderMap) -> Result<(), StatusCode> {
    match of(headers) {
        ("fail", _) => return Err(StatusCode::INTERNAL_SERVER_ERROR),
        ("panic", _) => panic!("x-demo: panic"),
        ("crash", _) => std::process::abort(),
        ("slow", seconds) => {
            let seconds = seconds.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
            tokio::time::sleep(seconds.ok_or(StatusCode::BAD_REQUEST)?).await;
        }
        ("", _) => {}
        _ => return Err(StatusCode::BAD_REQUEST),
    }
    Ok(())
}
