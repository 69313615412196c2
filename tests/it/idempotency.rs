//! The Idempotency-Key profile: the errors of the IETF's draft and the faults of the field, over HTTP
//! and on each store.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header, request::Parts},
};
use http_body_util::BodyExt;
use tokio::sync::Semaphore;
use tower::{Layer, service_fn};
use tower_dedupe::{
    ClaimStore, ConfigError, DedupeBody, DedupeLayer, Duplicate, Fingerprint, InProgress,
    MemoryStore, PgStore,
};

use crate::support::{
    http::{Answer, post, post_and_hang_up, serve, try_request},
    postgres,
};

/// Runs each of these on a store in memory, one in Postgres, and one that also remembers in this
/// process what is done.
macro_rules! on_each_store {
    ($($case:ident)*) => {
        mod in_memory {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() {
                super::$case(tower_dedupe::MemoryStore::new()).await;
            })*
        }

        mod in_postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() {
                super::$case(crate::support::postgres::schema().await.store().await).await;
            })*
        }

        mod in_postgres_with_a_cache {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() {
                super::$case(super::cached().await).await;
            })*
        }
    };
}

on_each_store! {
    each_error_of_the_draft_has_its_answer
    what_the_handler_fails_with_is_not_a_result
    chosen_refusals_are_results
    a_key_of_one_tenant_does_not_meet_that_of_another
    a_replay_keeps_status_location_and_header_lines_and_gives_no_cookie
    a_key_has_512_bytes_at_most_and_is_told_so
    the_payload_is_compared_before_anything_is_given_away
    a_delivery_that_waits_is_given_the_answer_unless_its_payload_differs
    a_client_that_hung_up_finds_its_answer
    other_methods_pass_through
    a_warning_lets_another_payload_through
}

async fn cached() -> PgStore {
    let db = postgres::schema().await;
    let builder = db.builder().done_cache(100, Duration::from_secs(60));
    let store = builder.connect(db.bare_url()).await.unwrap();
    store.migrate().await.unwrap();
    store
}

/// An API behind the layer, on a server.
struct Api {
    address: SocketAddr,
    runs: Arc<AtomicUsize>,
    /// What requests that ask for it wait for.
    gate: Arc<Semaphore>,
}

impl Api {
    /// Answers 201 and a body of its own each time, or as the header `x-demo` says.
    async fn behind<St: ClaimStore>(layer: DedupeLayer<St>) -> Self {
        let (runs, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let handler = service_fn({
            let (runs, gate) = (runs.clone(), gate.clone());
            move |request: Request<DedupeBody<Body>>| {
                let (run, gate) = (runs.fetch_add(1, Ordering::SeqCst) + 1, gate.clone());
                async move {
                    let (head, body) = request.into_parts();
                    body.collect().await.unwrap();
                    Ok(answer(run, &head, &gate).await)
                }
            }
        });
        let address = serve(Router::new().fallback_service(layer.layer(handler))).await;
        Self { address, runs, gate }
    }

    async fn send(&self, headers: &[(&str, &str)], body: &'static str) -> Answer {
        post(self.address, "/payments", headers, body).await
    }

    /// Sends a request with this key.
    async fn keyed(&self, key: &str, body: &'static str) -> Answer {
        self.send(&[(KEY, key)], body).await
    }

    /// Sends these bodies with one key at once.
    async fn at_once(
        &self,
        key: &'static str,
        bodies: impl IntoIterator<Item = &'static str>,
    ) -> Vec<Answer> {
        let address = self.address;
        let send = |body| {
            tokio::spawn(async move { post(address, "/payments", &[(KEY, key)], body).await })
        };
        let sending: Vec<_> = bodies.into_iter().map(send).collect();
        let mut answers = Vec::new();
        for sending in sending {
            answers.push(sending.await.unwrap());
        }
        answers
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    /// Waits until this many have begun.
    async fn begun(&self, runs: usize) {
        let all = async {
            while self.runs() < runs {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), all).await.expect("they did not begin");
    }
}

async fn answer(run: usize, head: &Parts, gate: &Semaphore) -> Response<Body> {
    let wish = head.headers.get("x-demo").map_or("", |wish| wish.to_str().unwrap());
    if wish == "wait" {
        gate.acquire().await.unwrap().forget();
    }
    let mut response = Response::builder().header(header::CONTENT_TYPE, "text/plain");
    response = match wish.parse::<u16>() {
        Ok(status) => response.status(status),
        Err(_) => response.status(201).header(header::LOCATION, format!("/payments/{run}")),
    };
    if wish == "headers" {
        for (name, value) in HEADERS {
            response = response.header(*name, *value);
        }
    }
    response.body(Body::from(format!("run {run}"))).unwrap()
}

const KEY: &str = "idempotency-key";

/// What the field's replays lost, split or gave away.
const HEADERS: &[(&str, &str)] = &[
    ("set-cookie", "session=secret; Path=/, with=comma"),
    ("set-cookie", "other=1"),
    ("www-authenticate", "Bearer realm=\"a\""),
    ("date", "Thu, 01 Jan 1970 00:00:00 GMT"),
    ("connection", "x-hop"),
    ("x-hop", "1"),
    ("keep-alive", "timeout=5"),
    ("vary", "accept-encoding, origin"),
    ("vary", "cookie"),
    ("x-expires", "Thu, 01 Jan 2037 00:00:00 GMT"),
    ("x-empty", ""),
    ("link", "</a>; rel=\"a\", </b>; rel=\"b\""),
    ("link", "</c>; rel=\"c\""),
];

impl Answer {
    fn is_run(&self, run: usize) {
        assert_eq!(
            (self.status, &self.body[..]),
            (StatusCode::CREATED, format!("run {run}").as_bytes())
        );
        assert_eq!(self.header("location").unwrap(), format!("/payments/{run}"));
        assert_eq!(self.header("idempotency-replayed"), None);
        assert_eq!(self.header("dedupe-status"), None);
    }

    fn is_replay_of(&self, first: &Answer) {
        assert_eq!((self.status, &self.body), (first.status, &first.body), "{self:?}");
        assert_eq!(self.header("idempotency-replayed"), Some("true"));
        assert_eq!(self.header("dedupe-status"), Some("duplicate"));
        assert_eq!(self.header("location"), first.header("location"));
    }

    /// A problem of this kind, which names the documentation.
    fn is_problem(&self, status: u16, reason: &str, documentation: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("dedupe-status"), Some(reason));
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        assert_eq!(self.header("link").unwrap(), format!("<{documentation}>; rel=\"describedby\""));
        let problem: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(problem["type"], documentation);
        assert_eq!(problem["status"], status);
        assert_eq!(problem["dedupe_status"], reason);
        assert!(!problem["title"].as_str().unwrap().is_empty());
        assert!(!problem["detail"].as_str().unwrap().is_empty());
        assert_eq!(self.header("retry-after").is_some(), status == 409);
    }
}

const DRAFT: &str = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/";

/// The draft's section on errors, row by row: no key, another payload, under way; and then what it
/// says of requests that are done.
async fn each_error_of_the_draft_has_its_answer<St: ClaimStore>(store: St) {
    let api = Api::behind(DedupeLayer::idempotency_key(store)).await;

    // No key: 400, with a link.
    for headers in [&[][..], &[(KEY, "")], &[(KEY, "\"\"")], &[("x-idempotency-key", "1")]] {
        api.send(headers, "a").await.is_problem(400, "missing-key", DRAFT);
    }
    // None that can be read.
    for key in ["\"a", "a, b", "\"a\" \"b\"", "a\"", "b\\c", "\u{e9}"] {
        api.keyed(key, "a").await.is_problem(400, "invalid-key", DRAFT);
    }
    let two = [(KEY, "a"), (KEY, "b")];
    api.send(&two, "a").await.is_problem(400, "invalid-key", DRAFT);
    assert_eq!(api.runs(), 0);

    // Done: the result again, however the key is written.
    let first = api.keyed("\"k-1\"", "a").await;
    first.is_run(1);
    for key in ["\"k-1\"", "k-1", "\"k-1\"; v=1"] {
        api.keyed(key, "a").await.is_replay_of(&first);
    }
    // Another payload: 422, with a link. The query is part of what is asked, and so is the length.
    for body in ["b", "", "aa"] {
        api.keyed("k-1", body).await.is_problem(422, "key-conflict", DRAFT);
    }
    let query = post(api.address, "/payments?a", &[(KEY, "k-1")], "a").await;
    query.is_problem(422, "key-conflict", DRAFT);
    assert_eq!(api.runs(), 1);

    // Method and path have keys of their own.
    post(api.address, "/refunds", &[(KEY, "k-1")], "a").await.is_run(2);
    let patch = [(KEY, "k-1")];
    try_request(api.address, "PATCH", "/payments", &patch, "a").await.unwrap().is_run(3);

    // Under way: 409, with a link, unless the payload differs.
    let waits = [(KEY, "k-2"), ("x-demo", "wait")];
    let (first, ()) = tokio::join!(api.send(&waits, "a"), async {
        api.begun(4).await;
        for _ in 0..3 {
            api.keyed("k-2", "a").await.is_problem(409, "in-progress", DRAFT);
            api.keyed("k-2", "b").await.is_problem(422, "key-conflict", DRAFT);
        }
        api.gate.add_permits(1);
    });
    first.is_run(4);
    api.keyed("k-2", "a").await.is_replay_of(&first);
    assert_eq!(api.runs(), 4);
}

/// Other errors are the handler's own, and the next request runs, with its fault corrected too.
async fn what_the_handler_fails_with_is_not_a_result<St: ClaimStore>(store: St) {
    let ours = "https://api.example.com/docs#keys";
    let api = Api::behind(DedupeLayer::idempotency_key(store).documentation(ours)).await;
    for (run, status) in ["500", "503", "400", "402", "422", "409", "302"].iter().enumerate() {
        let answer = api.send(&[(KEY, "k"), ("x-demo", status)], "a").await;
        assert_eq!(answer.status.as_str(), *status);
        assert_eq!(answer.body, format!("run {}", run + 1));
        assert_eq!(answer.header("idempotency-replayed"), None);
    }
    let first = api.keyed("k", "corrected").await;
    first.is_run(8);
    api.keyed("k", "corrected").await.is_replay_of(&first);
    api.keyed("k", "a").await.is_problem(422, "key-conflict", ours);
}

async fn chosen_refusals_are_results<St: ClaimStore>(store: St) {
    let declined = StatusCode::PAYMENT_REQUIRED;
    let api = Api::behind(DedupeLayer::idempotency_key(store).remember([declined])).await;
    let refused = [(KEY, "k"), ("x-demo", "402")];
    let first = api.send(&refused, "a").await;
    assert_eq!((first.status, &first.body[..]), (declined, &b"run 1"[..]));
    api.send(&refused, "a").await.is_replay_of(&first);
    api.keyed("k", "b").await.is_problem(422, "key-conflict", DRAFT);
    for _ in 0..2 {
        assert_eq!(api.send(&[(KEY, "other"), ("x-demo", "403")], "a").await.status, 403);
    }
    assert_eq!(api.runs(), 3);
}

/// Field: one tenant's key hit another's record.
async fn a_key_of_one_tenant_does_not_meet_that_of_another<St: ClaimStore>(store: St) {
    let tenant = |head: &Parts| match head.headers.get("x-tenant") {
        Some(tenant) => tenant.to_str().unwrap().to_owned(),
        None => "nobody".to_owned(),
    };
    let api = Api::behind(DedupeLayer::idempotency_key(store).scope_with(tenant)).await;
    let mut firsts = Vec::new();
    for (n, tenant) in ["a", "b", "a b", "nobody"].into_iter().enumerate() {
        let headers = [(KEY, "k"), ("x-tenant", tenant)];
        let first = api.send(&headers, "same").await;
        first.is_run(n + 1);
        firsts.push((headers, first));
    }
    for (headers, first) in &firsts {
        api.send(headers, "same").await.is_replay_of(first);
        // Nor does a tenant learn by another payload that a key is another's.
        api.send(headers, "other").await.is_problem(422, "key-conflict", DRAFT);
    }
    api.keyed("k", "same").await.is_replay_of(&firsts[3].1);
    // What cannot be a scope is refused, and never cut.
    let long = "x".repeat(300);
    let refused = api.send(&[(KEY, "k"), ("x-tenant", &long)], "same").await;
    refused.is_problem(400, "invalid-key", DRAFT);
}

/// Field: replays leaked cookies, split headers at commas, lost `Location`, made 201 a 200, broke on
/// answers without a body and on such that are no JSON.
async fn a_replay_keeps_status_location_and_header_lines_and_gives_no_cookie<St: ClaimStore>(
    store: St,
) {
    let layer = DedupeLayer::idempotency_key(store)
        .success(|head| head.status.is_success() || head.status == StatusCode::NOT_MODIFIED);
    let api = Api::behind(layer).await;
    let lines = |headers: &HeaderMap, name: &str| -> Vec<HeaderValue> {
        headers.get_all(name).iter().cloned().collect()
    };

    let wish = [(KEY, "headers"), ("x-demo", "headers")];
    let (first, replay) = (api.send(&wish, "a").await, api.send(&wish, "a").await);
    replay.is_replay_of(&first);
    for name in ["set-cookie", "www-authenticate", "x-hop", "keep-alive"] {
        assert!(first.headers.contains_key(name), "{name} was to be seen the first time");
        assert!(!replay.headers.contains_key(name), "{name} was given again");
    }
    assert_ne!(replay.header("date"), first.header("date"));
    for name in ["vary", "x-expires", "x-empty", "link", "content-type", "content-length"] {
        let first = lines(&first.headers, name);
        assert!(!first.is_empty(), "{name}");
        assert_eq!(lines(&replay.headers, name), first, "{name}");
    }

    // Their length and framing are the server's, and the same the second time.
    for status in ["200", "202", "204", "205", "206", "304"] {
        let wish = [(KEY, status), ("x-demo", status)];
        let (first, replay) = (api.send(&wish, "a").await, api.send(&wish, "a").await);
        replay.is_replay_of(&first);
        for name in ["content-length", "transfer-encoding", "content-type"] {
            assert_eq!(
                lines(&replay.headers, name),
                lines(&first.headers, name),
                "{status} {name}"
            );
        }
    }
}

/// Field: long keys broke the index, but only such that do not compress; lengths were counted in
/// characters; NUL bytes.
async fn a_key_has_512_bytes_at_most_and_is_told_so<St: ClaimStore>(store: St) {
    let api = Api::behind(DedupeLayer::idempotency_key(store)).await;
    // No two bytes of it repeat soon.
    let random: String = std::iter::successors(Some(1_u32), |n| {
        Some(n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223))
    })
    .map(|n| char::from(b'0' + (n >> 24) as u8 % 10))
    .take(512)
    .collect();
    for longest in ["a".repeat(512), random] {
        let first = api.keyed(&longest, "a").await;
        assert_eq!(first.status, 201);
        api.keyed(&longest, "a").await.is_replay_of(&first);
        // The quotes do not count, another byte does.
        api.keyed(&format!("\"{longest}\""), "a").await.is_replay_of(&first);
        api.keyed(&format!("{longest}a"), "a").await.is_problem(400, "invalid-key", DRAFT);
    }
    // 256 characters, 512 bytes: only printable ASCII is a key here.
    api.keyed(&"é".repeat(256), "a").await.is_problem(400, "invalid-key", DRAFT);
    assert_eq!(api.runs(), 2);
}

/// Field: a record was used before its payload was compared, where it came from a cache.
async fn the_payload_is_compared_before_anything_is_given_away<St: ClaimStore + Clone>(store: St) {
    // Also where duplicates are answered with a status alone.
    for (n, duplicate) in [Duplicate::Replay, Duplicate::SameStatus].into_iter().enumerate() {
        let layer = DedupeLayer::idempotency_key(store.clone()).duplicate(duplicate);
        let api = Api::behind(layer.scope(format!("layer {n}"))).await;
        let first = api.keyed("k", "a").await;
        first.is_run(1);
        for _ in 0..3 {
            // Each of these may put it into a cache.
            assert_eq!(api.keyed("k", "a").await.status, 201);
            let refused = api.keyed("k", "b").await;
            refused.is_problem(422, "key-conflict", DRAFT);
            assert_eq!(refused.header("location"), None);
            assert!(!String::from_utf8_lossy(&refused.body).contains("run 1"));
        }
        // Many at once, which may share a statement.
        let many = (0..64).map(|n| if n % 2 == 0 { "a" } else { "b" });
        for (n, answer) in api.at_once("k", many).await.into_iter().enumerate() {
            assert_eq!(answer.status, if n % 2 == 0 { 201 } else { 422 });
        }
        assert_eq!(api.runs(), 1);
    }
}

async fn a_delivery_that_waits_is_given_the_answer_unless_its_payload_differs<St: ClaimStore>(
    store: St,
) {
    let wait = InProgress::Wait(Duration::from_secs(20));
    let api = Api::behind(DedupeLayer::idempotency_key(store).in_progress(wait)).await;
    let waits = [(KEY, "k"), ("x-demo", "wait")];
    let (first, replays, ()) = tokio::join!(
        api.send(&waits, "a"),
        async {
            api.begun(1).await;
            api.at_once("k", ["a"; 8]).await
        },
        async {
            api.begun(1).await;
            api.keyed("k", "b").await.is_problem(422, "key-conflict", DRAFT);
            api.gate.add_permits(1);
        }
    );
    first.is_run(1);
    replays.iter().for_each(|replay| replay.is_replay_of(&first));
    assert_eq!(api.runs(), 1);
}

async fn a_client_that_hung_up_finds_its_answer<St: ClaimStore>(store: St) {
    let api = Api::behind(DedupeLayer::idempotency_key(store)).await;
    let waits = [(KEY, "k"), ("x-demo", "wait")];
    let soon = Duration::from_millis(200);
    let gone = post_and_hang_up(api.address, "/payments", &waits, "a", soon).await;
    assert!(gone.is_none());
    api.begun(1).await;
    api.gate.add_permits(1);
    let replay = loop {
        let answer = api.keyed("k", "a").await;
        if answer.status != 409 {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!((replay.status, &replay.body[..]), (StatusCode::CREATED, &b"run 1"[..]));
    assert_eq!(replay.header("idempotency-replayed"), Some("true"));
    assert_eq!(replay.header("location"), Some("/payments/1"));
    assert_eq!(api.runs(), 1);
}

async fn other_methods_pass_through<St: ClaimStore>(store: St) {
    let api = Api::behind(DedupeLayer::idempotency_key(store)).await;
    let mut run = 0;
    for method in ["PUT", "DELETE", "GET", "HEAD", "OPTIONS", "QUERY"] {
        for headers in [&[][..], &[(KEY, "k")], &[(KEY, "k")], &[(KEY, "\"")]] {
            run += 1;
            let answer = try_request(api.address, method, "/payments", headers, "").await.unwrap();
            assert_eq!(answer.header("location").unwrap(), format!("/payments/{run}"));
            assert_eq!(answer.header("idempotency-replayed"), None);
        }
    }
}

async fn a_warning_lets_another_payload_through<St: ClaimStore>(store: St) {
    let layer = DedupeLayer::idempotency_key(store).fingerprint(Fingerprint::Body.warn());
    let api = Api::behind(layer).await;
    let first = api.keyed("k", "a").await;
    api.keyed("k", "b").await.is_replay_of(&first);
    let waits = [(KEY, "k-2"), ("x-demo", "wait")];
    let (first, ()) = tokio::join!(api.send(&waits, "a"), async {
        api.begun(2).await;
        api.keyed("k-2", "b").await.is_problem(409, "in-progress", DRAFT);
        api.gate.add_permits(1);
    });
    first.is_run(2);
    assert_eq!(api.runs(), 2);
}

#[test]
fn what_cannot_be_is_refused_when_the_layer_is_built() {
    let layer = || DedupeLayer::idempotency_key(MemoryStore::new());
    assert!(layer().check().is_ok());
    for status in [200, 302, 408, 425, 429, 500, 503] {
        let error = layer().remember([StatusCode::from_u16(status).unwrap()]).check().unwrap_err();
        assert_eq!(error, ConfigError::Remember { given: status });
        assert!(error.to_string().contains("only 4xx"), "{error}");
    }
    assert!(layer().remember([StatusCode::NOT_FOUND, StatusCode::CONFLICT]).check().is_ok());
    for address in
        ["", "docs", "/docs", "ftp://a/b", "https://", "https://a b", "https://a/>", "http://a/\n"]
    {
        let error = layer().documentation(address).check().unwrap_err();
        assert_eq!(error, ConfigError::Documentation { given: address.to_owned() });
        assert!(error.to_string().contains("whole URL"), "{error}");
    }
    for address in ["https://a", "http://localhost:8080/docs?a=b#keys"] {
        assert!(layer().documentation(address).check().is_ok(), "{address}");
    }
}

/// A body that is compared is read first, within its bounds.
#[tokio::test(flavor = "multi_thread")]
async fn a_payload_longer_than_max_body_is_refused() {
    let api = Api::behind(DedupeLayer::idempotency_key(MemoryStore::new()).max_body(10)).await;
    api.keyed("k", "0123456789").await.is_run(1);
    let refused = api.keyed("l", "0123456789a").await;
    assert_eq!(
        (refused.status, refused.header("dedupe-status")),
        (StatusCode::PAYLOAD_TOO_LARGE, Some("body-too-large"))
    );
    assert_eq!(api.runs(), 1);
}

/// A compressed body is compared as it was sent, or as a function sees it: decoded.
#[tokio::test(flavor = "multi_thread")]
async fn headers_and_functions_say_what_the_payload_is() {
    let currency = axum::http::HeaderName::from_static("x-currency");
    let layer = DedupeLayer::idempotency_key(MemoryStore::new());
    let api = Api::behind(layer.clone().fingerprint(Fingerprint::BodyAnd(vec![currency]))).await;
    let first = api.send(&[(KEY, "k"), ("x-currency", "EUR")], "1").await;
    api.send(&[("x-currency", "EUR"), ("x-other", "1"), (KEY, "k")], "1")
        .await
        .is_replay_of(&first);
    for headers in [&[(KEY, "k"), ("x-currency", "USD")][..], &[(KEY, "k")]] {
        api.send(headers, "1").await.is_problem(422, "key-conflict", DRAFT);
    }

    let amount = Fingerprint::with(|_, body| {
        body.iter().filter(|b| **b != b' ').copied().collect::<Vec<_>>()
    });
    let api = Api::behind(layer.scope("amounts").fingerprint(amount)).await;
    let first = api.keyed("k", "1 0").await;
    api.keyed("k", "10").await.is_replay_of(&first);
    api.keyed("k", "11").await.is_problem(422, "key-conflict", DRAFT);
    let refused = api.send(&[(KEY, "l"), ("content-encoding", "rot13")], "11").await;
    assert_eq!(refused.header("dedupe-status"), Some("unsupported-encoding"));
}
