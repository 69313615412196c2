//! Whether two requests with one key are the same request: a hash of what they ask.

use std::{fmt, sync::Arc};

use http::{HeaderName, request::Parts};
use sha2::{Digest, Sha256};

use super::{answer::Refusal, decode};
use crate::claim::PayloadHash;

/// What of a request must be the same when its key is.
///
/// A SHA-256 hash of it is kept with the key. The method, the path and the query are always in it. A
/// request whose key belongs to another payload is answered 422 (`key-conflict`), whether that one is
/// done or under way, and before anything of its response is given away. It is compared with what the
/// key is done with, or was claimed with and is not known to have failed: after a failure, a client may
/// send the request again with its fault corrected.
///
/// In transaction mode, what another process has under way is compared once it is committed.
///
/// For APIs, whose clients make the keys. Webhook senders often change a body between two deliveries
/// of one event (a time, a count of attempts) and would be answered 422: begin there with
/// [`warn`](Self::warn).
///
/// What is in a fingerprint is not to be changed lightly: keys that were done before belong to another
/// payload then, until their retention ends.
///
/// # Examples
///
/// ```
/// use tower_dedupe::{DedupeLayer, Fingerprint, KeySource, MemoryStore};
///
/// let layer = DedupeLayer::new(MemoryStore::new(), KeySource::header("x-order")?)
///     .fingerprint(Fingerprint::Body);
/// # Ok::<(), tower_dedupe::KeySourceError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fingerprint {
    /// The body, byte for byte as it was sent. JSON with other spaces is another payload.
    Body,
    /// The same, and all values of these headers.
    BodyAnd(Vec<HeaderName>),
    /// What a function makes of it; see [`with`](Self::with).
    With(FingerprintFn),
    /// The same as another one, which logs a warning instead of refusing; see [`warn`](Self::warn).
    Warn(Box<Fingerprint>),
}

type MakesBytes = dyn Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync;

/// A function that says what a request's payload is.
#[derive(Clone)]
pub struct FingerprintFn(Arc<MakesBytes>);

impl fmt::Debug for FingerprintFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("fn")
    }
}

impl Fingerprint {
    /// What a function makes of the head and the decoded body: an amount and an account, say, or JSON
    /// with its names sorted. It is hashed, so it may be long.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_dedupe::Fingerprint;
    ///
    /// // Spaces and the order of names do not matter.
    /// let canonical = Fingerprint::with(|_, body| {
    ///     match serde_json::from_slice::<serde_json::Value>(body) {
    ///         Ok(value) => value.to_string().into_bytes(),
    ///         Err(_) => body.to_vec(),
    ///     }
    /// });
    /// ```
    pub fn with<T: Into<Vec<u8>>>(
        payload: impl Fn(&Parts, &[u8]) -> T + Send + Sync + 'static,
    ) -> Self {
        Self::With(FingerprintFn(Arc::new(move |parts, body| payload(parts, body).into())))
    }

    /// The same, but another payload is logged as a warning and counted, and the request goes on as
    /// if it were the same. To learn what senders do before they are refused.
    #[must_use]
    pub fn warn(self) -> Self {
        match self {
            Self::Warn(_) => self,
            refuses => Self::Warn(Box::new(refuses)),
        }
    }

    pub(super) fn only_warns(&self) -> bool {
        matches!(self, Self::Warn(_))
    }

    /// The hash of a request. Each part has its length in front, so that no two requests are one text.
    pub(super) fn of(
        &self,
        parts: &Parts,
        path: &str,
        body: &[u8],
        max_body: usize,
    ) -> Result<PayloadHash, Refusal> {
        let mut hash = Sha256::new();
        let mut take = |part: &[u8]| {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        };
        take(parts.method.as_str().as_bytes());
        take(path.as_bytes());
        take(parts.uri.query().unwrap_or_default().as_bytes());
        match self.refusing() {
            Self::With(payload) => {
                let decoded = decode::for_looking(&parts.headers, body, max_body)?;
                take(&(payload.0)(parts, &decoded));
            }
            Self::BodyAnd(names) => {
                take(body);
                for name in names {
                    let values = parts.headers.get_all(name);
                    take(&(values.iter().count() as u64).to_be_bytes());
                    values.iter().for_each(|value| take(value.as_bytes()));
                }
            }
            Self::Body | Self::Warn(_) => take(body),
        }
        Ok(PayloadHash::from(<[u8; 32]>::from(hash.finalize())))
    }

    /// What it would be without warnings.
    fn refusing(&self) -> &Self {
        match self {
            Self::Warn(of) => of.refusing(),
            refuses => refuses,
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use http::{Request, request::Builder};

    use super::*;

    fn of(fingerprint: &Fingerprint, request: Builder, body: &str) -> PayloadHash {
        let (parts, ()) = request.body(()).unwrap().into_parts();
        fingerprint.of(&parts, parts.uri.path(), body.as_bytes(), 1024).unwrap()
    }

    fn all_differ(hashes: &[PayloadHash]) -> bool {
        hashes.iter().enumerate().all(|(at, hash)| hashes.iter().take(at).all(|one| one != hash))
    }

    #[test]
    fn method_path_and_query_are_always_in_it() {
        let empty = Fingerprint::with(|_, _| "");
        for fingerprint in [Fingerprint::Body, Fingerprint::BodyAnd(vec![]), empty] {
            let requests = [
                Request::post("/a"),
                Request::patch("/a"),
                Request::post("/b"),
                Request::post("/a?b"),
                Request::post("/a?c"),
            ];
            let hashes = requests.map(|request| of(&fingerprint, request, "x"));
            assert!(all_differ(&hashes), "{fingerprint:?}");
            assert_eq!(hashes[0], of(&fingerprint, Request::post("/a"), "x"));
        }
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        let names = ["x-a", "x-b"].map(HeaderName::from_static).to_vec();
        let both = Fingerprint::BodyAnd(names);
        let request = || Request::post("/");
        let all = [
            of(&both, request(), "1"),
            of(&both, request().header("x-a", "1"), ""),
            of(&both, request().header("x-b", "1"), ""),
            of(&both, request().header("x-a", ""), "1"),
            of(&both, request().header("x-a", "1").header("x-a", "1"), ""),
            of(&both, request().header("x-a", "1").header("x-b", "1"), ""),
            of(&both, request().header("x-a", "11"), ""),
        ];
        assert!(all_differ(&all));
        // Others are not in it.
        assert_eq!(all[0], of(&both, request().header("x-c", "1"), "1"));
    }

    #[test]
    fn a_function_says_what_counts() {
        let amount =
            Fingerprint::with(|_, body| body.iter().filter(|b| **b != b' ').count().to_string());
        let (two, spaced) =
            (of(&amount, Request::post("/"), "ab"), of(&amount, Request::post("/"), "a b"));
        assert_eq!(two, spaced);
        assert_ne!(two, of(&amount, Request::post("/"), "abc"));
        // A warning compares the same.
        assert_eq!(two, of(&amount.clone().warn().warn(), Request::post("/"), "ab"));
        assert!(amount.warn().only_warns());
    }
}
