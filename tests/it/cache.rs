//! A storm of duplicates is answered without the database, and never wrongly.

use std::time::Duration;

use tokio::time::Instant;
use tower_dedupe::{
    ClaimStore, PgStore,
    claim::{Claim, ClaimOutcome, Held},
    store::{Completion, PgStoreBuilder, StoreErrorKind},
};

use crate::support::{
    claims::{MINUTE, claim, claim_of, done, done_with, event, finish, in_progress, noise},
    cut::{Proxy, Traffic},
    postgres::{self, Schema},
};

const DONE: ClaimOutcome = ClaimOutcome::done(Some(200));
const CLAIMED: ClaimOutcome = ClaimOutcome::Claimed { attempt: 1 };

/// A store with a cache, behind a proxy that counts what it asks.
struct Cached {
    db: Schema,
    proxy: Proxy,
    store: PgStore,
}

impl Cached {
    async fn with(settings: impl FnOnce(PgStoreBuilder) -> PgStoreBuilder) -> Self {
        let db = postgres::schema().await;
        db.store().await;
        let proxy = Proxy::before(postgres::shared().port()).await;
        let url = proxy.instead_of_host(db.bare_url());
        let builder = PgStore::builder().schema(db.name()).timeout(Duration::from_secs(1));
        let store = settings(builder).connect(&url).await.unwrap();
        Self { db, proxy, store }
    }

    async fn by_default() -> Self {
        Self::with(|builder| builder).await
    }

    /// Claims a key and says whether the database was asked.
    async fn claim(&self, key: &str) -> (ClaimOutcome, bool) {
        self.ask(claim(key)).await
    }

    /// Sends a claim and says whether the database was asked.
    async fn ask(&self, claim: Claim) -> (ClaimOutcome, bool) {
        let before = self.proxy.round_trips();
        let outcome = self.store.claim(&claim).await.unwrap();
        (outcome, self.proxy.round_trips() > before)
    }
}

fn replay(key: &str) -> Claim {
    claim(key).with_replay(true)
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_of_a_key_that_is_done_do_not_reach_the_database() {
    let cached = Cached::by_default().await;
    finish(&cached.store, claim("1"), None).await;
    for _ in 0..100 {
        assert_eq!(cached.claim("1").await, (DONE, false));
    }
    // Not even one that is away.
    cached.proxy.traffic(Traffic::IsClosed);
    assert_eq!(cached.claim("1").await, (DONE, false));
    let other = cached.store.clone().claim(&claim("2")).await;
    assert_ne!(other.unwrap_err().kind(), StoreErrorKind::Other);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_process_has_done_is_kept_once_it_was_seen() {
    let cached = Cached::by_default().await;
    let elsewhere = cached.db.store().await;
    finish(&elsewhere, claim("1"), None).await;
    assert_eq!(cached.claim("1").await, (DONE, true));
    assert_eq!(cached.claim("1").await, (DONE, false));
    // The status is the row's.
    let other = claim("2");
    elsewhere.claim(&other).await.unwrap();
    let teapot = Completion::new(Some(418), MINUTE);
    elsewhere.complete(&other.key, other.token, teapot).await.unwrap();
    for asked in [true, false] {
        assert_eq!(cached.claim("2").await, (ClaimOutcome::done(Some(418)), asked));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_but_a_committed_done_is_kept() {
    let cached = Cached::by_default().await;
    let elsewhere = cached.db.store().await;
    // In progress, failed, and taken over meanwhile.
    let first = claim("1");
    elsewhere.claim(&first).await.unwrap();
    for _ in 0..2 {
        let (outcome, asked) = cached.claim("1").await;
        assert!(in_progress(&outcome) && asked);
    }
    elsewhere.fail(&first.key, first.token, MINUTE).await.unwrap();
    let second = claim("1");
    let taken = cached.store.claim(&second).await.unwrap();
    assert_eq!(taken, ClaimOutcome::Claimed { attempt: 2 });
    assert!(cached.store.fail(&second.key, second.token, MINUTE).await.unwrap());
    let third = claim("1");
    assert_eq!(elsewhere.claim(&third).await.unwrap(), ClaimOutcome::Claimed { attempt: 3 });

    // A done mark that comes too late.
    let late = cached.store.complete(&second.key, second.token, done()).await.unwrap();
    assert_eq!(late, Held::Lost);
    let (outcome, asked) = cached.claim("1").await;
    assert!(in_progress(&outcome) && asked);

    // One whose answer was not heard: it is known once somebody has asked.
    cached.proxy.traffic(Traffic::Vanishes);
    let fourth = claim("4");
    elsewhere.claim(&fourth).await.unwrap();
    assert!(cached.store.complete(&fourth.key, fourth.token, done()).await.is_err());
    assert!(cached.store.claim(&claim("4")).await.is_err());
    // What was swallowed does not arrive late.
    cached.proxy.traffic(Traffic::OldVanishes);
    assert!(elsewhere.fail(&fourth.key, fourth.token, MINUTE).await.unwrap());
    assert_eq!(cached.claim("4").await, (ClaimOutcome::Claimed { attempt: 2 }, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_status_stands() {
    let cached = Cached::by_default().await;
    let first = finish(&cached.store, claim("1"), None).await;
    let again = Completion::new(Some(500), MINUTE);
    let held = cached.store.complete(&first.key, first.token, again).await.unwrap();
    assert_eq!(held, Held::Yes);
    assert_eq!(cached.claim("1").await, (DONE, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn forgetting_a_key_drops_it_at_once() {
    let cached = Cached::by_default().await;
    for round in 0..20 {
        let key = round.to_string();
        finish(&cached.store, claim(&key), None).await;
        assert_eq!(cached.claim(&key).await, (DONE, false));
        assert!(cached.store.clone().forget(&event(&key)).await.unwrap());
        assert_eq!(cached.claim(&key).await, (CLAIMED, true));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_was_forgotten_elsewhere_is_new_when_the_age_is_over() {
    let age = Duration::from_millis(200);
    let cached = Cached::with(|builder| builder.done_cache(100, age)).await;
    finish(&cached.store, claim("1"), None).await;
    assert!(cached.db.store().await.forget(&event("1")).await.unwrap());
    let forgotten = Instant::now();
    while cached.claim("1").await.0 == DONE {
        assert!(forgotten.elapsed() < Duration::from_secs(5), "it is kept for ever");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_key_is_kept_for_longer_than_its_retention() {
    let retention = Duration::from_millis(200);
    let cached = Cached::with(|builder| builder.done_cache(100, MINUTE)).await;
    let elsewhere = cached.db.store().await;
    for store in [&cached.store, &elsewhere] {
        let first = claim("1");
        assert!(matches!(store.claim(&first).await.unwrap(), ClaimOutcome::Claimed { .. }));
        let completion = Completion::new(Some(200), retention);
        store.complete(&first.key, first.token, completion).await.unwrap();
        let completed = Instant::now();
        let again = claim("1");
        while cached.store.claim(&again).await.unwrap() == DONE {
            assert!(completed.elapsed() < Duration::from_secs(5), "it is kept for ever");
        }
        assert!(cached.store.forget(&again.key).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_can_be_turned_off_and_is_never_old() {
    let cached = Cached::with(|builder| builder.done_cache(0, MINUTE)).await;
    finish(&cached.store, claim("1"), None).await;
    for _ in 0..2 {
        assert_eq!(cached.claim("1").await, (DONE, true));
    }
    let hour = PgStore::builder().done_cache(1, MINUTE * 60);
    let refused = hour.connect_lazy("postgres://localhost/app").unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Config);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_payload_is_told_so_without_the_database() {
    let cached = Cached::by_default().await;
    let elsewhere = cached.db.store().await;
    finish(&cached.store, claim_of("here", 1), None).await;
    finish(&elsewhere, claim_of("elsewhere", 1), None).await;
    // The first that is told so is enough.
    assert_eq!(cached.ask(claim_of("elsewhere", 2)).await, (ClaimOutcome::OtherPayload, true));
    finish(&cached.store, claim("unknown"), None).await;
    cached.proxy.traffic(Traffic::IsClosed);
    for key in ["here", "elsewhere"] {
        for other in [claim_of(key, 2), claim_of(key, 3).with_replay(true)] {
            assert_eq!(cached.ask(other).await, (ClaimOutcome::OtherPayload, false), "{key}");
        }
        for same in [claim_of(key, 1), claim(key)] {
            assert_eq!(cached.ask(same).await, (DONE, false), "{key}");
        }
    }
    // Where it is not known, none is another.
    assert_eq!(cached.ask(claim_of("unknown", 1)).await, (DONE, false));
    assert_eq!(cached.ask(claim_of("unknown", 2)).await, (DONE, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_was_read_once_is_given_without_the_database() {
    let cached = Cached::by_default().await;
    for (n, length) in [0, 1, 5000, 300 * 1024].into_iter().enumerate() {
        let key = n.to_string();
        let response = Some(noise(length, n));
        finish(&cached.store, claim(&key), response.clone()).await;
        // That it is done is known, the response is not.
        assert_eq!(cached.claim(&key).await, (DONE, false));
        for asked in [true, false, false] {
            let told = cached.ask(replay(&key)).await;
            assert!(told == (done_with(response.clone()), asked), "{length} bytes, {asked}");
        }
        assert_eq!(cached.claim(&key).await, (DONE, false), "nobody asked for it");
        let other = claim_of(&key, 1).with_replay(true);
        assert!(cached.ask(other).await == (done_with(response), false));
    }
    // That there is none is known, too.
    finish(&cached.store, claim("none"), None).await;
    for asked in [true, false] {
        assert_eq!(cached.ask(replay("none")).await, (DONE, asked));
    }
    cached.proxy.traffic(Traffic::IsClosed);
    assert_eq!(cached.ask(replay("2")).await, (done_with(Some(noise(5000, 2))), false));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_response_stands() {
    let cached = Cached::by_default().await;
    for (key, stands) in [("some", Some(noise(100, 1))), ("none", None)] {
        let first = finish(&cached.store, claim(key), stands.clone()).await;
        for _ in 0..2 {
            let again = done().with_response(Some(noise(100, 2)));
            let held = cached.store.complete(&first.key, first.token, again).await.unwrap();
            assert_eq!(held, Held::Yes);
            for asked in [true, false] {
                assert_eq!(cached.ask(replay(key)).await, (done_with(stands.clone()), asked));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forgetting_a_key_drops_its_payload_and_response_at_once() {
    let cached = Cached::by_default().await;
    let of = |payload| claim_of("1", payload).with_replay(true);
    for round in 0..10 {
        let response = Some(noise(1000, round));
        finish(&cached.store, of(round), response.clone()).await;
        for asked in [true, false] {
            assert_eq!(cached.ask(of(round)).await, (done_with(response.clone()), asked));
        }
        assert!(cached.store.clone().forget(&event("1")).await.unwrap());
        let anew = of(round + 1);
        assert_eq!(cached.ask(anew.clone()).await, (CLAIMED, true));
        cached.store.complete(&anew.key, anew.token, done()).await.unwrap();
        assert_eq!(cached.ask(of(round + 1)).await, (DONE, true));
        assert!(cached.store.forget(&anew.key).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_response_is_kept_for_longer_than_its_retention() {
    let retention = Duration::from_millis(200);
    let cached = Cached::with(|builder| builder.done_cache(1000, MINUTE)).await;
    let first = claim_of("1", 1);
    cached.store.claim(&first).await.unwrap();
    let completion = Completion::new(Some(200), retention).with_response(Some(noise(10, 1)));
    cached.store.complete(&first.key, first.token, completion).await.unwrap();
    let completed = Instant::now();
    let again = claim_of("1", 1).with_replay(true);
    while cached.store.claim(&again).await.unwrap() == done_with(Some(noise(10, 1))) {
        assert!(completed.elapsed() < Duration::from_secs(5), "it is kept for ever");
    }
    cached.store.complete(&again.key, again.token, done()).await.unwrap();
    assert_eq!(cached.ask(replay("1")).await, (DONE, true));
}
