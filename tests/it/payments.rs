//! The API with an Idempotency-Key, as a process that can be killed.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::support::{
    http::{Answer, get, post, post_and_hang_up, try_post},
    process::{Example, LEASE, OnDatabase},
};

async fn pay(to: &Example, headers: &[(&str, &str)], body: &'static str) -> Answer {
    post(to.address, "/payments", headers, body).await
}

async fn payments(of: &Example) -> Vec<Value> {
    serde_json::from_slice(&get(of.address, "/payments").await.body).unwrap()
}

fn id(answer: &Answer) -> String {
    assert_eq!(answer.status, 201, "{answer:?}");
    let paid: Value = serde_json::from_slice(&answer.body).unwrap();
    let id = paid["id"].as_str().unwrap().to_owned();
    assert_eq!(answer.header("location").unwrap(), format!("/payments/{id}"));
    id
}

fn is_replay(again: &Answer, first: &Answer) -> bool {
    assert_eq!(id(again), id(first));
    assert_eq!(again.header("content-type"), first.header("content-type"));
    again.body == first.body && again.header("idempotency-replayed") == Some("true")
}

const ORDER: &str = r#"{"amount": 1000}"#;
const K1: (&str, &str) = ("idempotency-key", "\"k-1\"");

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_sent_again_pays_once_and_hears_the_same() {
    let (payments_api, headers) = (OnDatabase::of("payments").await, [K1]);
    let api = payments_api.start().await;
    let first = pay(&api, &headers, ORDER).await;
    assert_eq!(first.header("idempotency-replayed"), None);
    assert!(is_replay(&pay(&api, &headers, ORDER).await, &first));
    let shown = get(api.address, first.header("location").unwrap()).await;
    assert_eq!(serde_json::from_slice::<Value>(&shown.body).unwrap()["id"], id(&first));

    let conflict = pay(&api, &headers, r#"{"amount": 9999}"#).await;
    assert_eq!(
        (conflict.status.as_u16(), conflict.header("dedupe-status")),
        (422, Some("key-conflict"))
    );
    let keyless = pay(&api, &[], ORDER).await;
    assert_eq!(keyless.status, 400);
    assert!(keyless.header("link").unwrap().contains("describedby"));
    let other = pay(&api, &[K1, ("x-account", "bob")], ORDER).await;
    assert_ne!(id(&other), id(&first));

    // What the client can mend frees the key; so does what the server may mend.
    let key = ("idempotency-key", "k-2");
    assert_eq!(pay(&api, &[key], "{").await.status, 400);
    assert_eq!(pay(&api, &[key, ("x-demo", "fail")], ORDER).await.status, 500);
    let panic = [key, ("x-demo", "panic")];
    assert!(try_post(api.address, "/payments", &panic, ORDER).await.is_err());
    let mended = pay(&api, &[key], ORDER).await;
    assert!(is_replay(&pay(&api, &[key], ORDER).await, &mended));
    assert_eq!(payments(&api).await.len(), 3);

    // The answers outlive the process.
    api.kill().await;
    let api = payments_api.start().await;
    assert!(is_replay(&pay(&api, &headers, ORDER).await, &first));
    assert!(is_replay(&pay(&api, &[key], ORDER).await, &mended));
    assert_eq!(pay(&api, &headers, "{}").await.status, 422);
    assert_eq!(payments(&api).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_at_once_one_pays_and_the_other_hears_of_it() {
    let api = OnDatabase::of("payments").await;
    let api = api.start().await;
    // Slower than the lease: it is renewed.
    let slow = [K1, ("x-demo", "slow:2.5")];
    let (one, other) = tokio::join!(pay(&api, &slow, ORDER), pay(&api, &slow, ORDER));
    let (first, second) = if one.status == 201 { (one, other) } else { (other, one) };
    assert_eq!(
        (second.status.as_u16(), second.header("dedupe-status")),
        (409, Some("in-progress"))
    );
    assert!(second.header("retry-after").is_some());
    assert!(is_replay(&pay(&api, &[K1], ORDER).await, &first));

    // A client that hangs up finds its answer.
    let slow = [("idempotency-key", "k-2"), ("x-demo", "slow:1")];
    let soon = Duration::from_millis(300);
    assert!(post_and_hang_up(api.address, "/payments", &slow, ORDER, soon).await.is_none());
    let found = until_201(&api, &slow[..1]).await;
    assert_eq!(found.header("idempotency-replayed"), Some("true"));
    assert_eq!(payments(&api).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_frees_the_key_after_its_lease() {
    let api = OnDatabase::of("payments").await;
    let process = api.start().await;
    let crash = [K1, ("x-demo", "crash")];
    assert!(try_post(process.address, "/payments", &crash, ORDER).await.is_err());
    drop(process);
    let process = api.start().await;
    // The key is still the first payload's.
    assert_eq!(pay(&process, &[K1], "{}").await.status, 422);
    let first = until_201(&process, &[K1]).await;
    assert_eq!(first.header("idempotency-replayed"), None);
    assert!(is_replay(&pay(&process, &[K1], ORDER).await, &first));
    assert_eq!(payments(&process).await.len(), 1);
}

/// Sends until it is paid; every other answer says that the first request is under way.
async fn until_201(to: &Example, headers: &[(&str, &str)]) -> Answer {
    let started = Instant::now();
    loop {
        let answer = pay(to, headers, ORDER).await;
        if answer.status == 201 {
            return answer;
        }
        assert_eq!(
            (answer.status.as_u16(), answer.header("dedupe-status")),
            (409, Some("in-progress"))
        );
        assert!(started.elapsed() < 5 * LEASE, "the key is stuck");
        sleep(Duration::from_millis(50)).await;
    }
}
