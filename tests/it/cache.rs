//! A storm of duplicates is answered without the database, and never wrongly.

use std::time::Duration;

use tokio::time::Instant;
use tower_dedupe::{
    ClaimStore, PgStore,
    claim::{Claim, ClaimOutcome, Held},
    store::{Completion, PgStoreBuilder, StoreErrorKind},
};

use crate::support::{
    claims::{MINUTE, claim, done, event, in_progress},
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
        let before = self.proxy.round_trips();
        let outcome = self.store.claim(&claim(key)).await.unwrap();
        (outcome, self.proxy.round_trips() > before)
    }
}

async fn finish(store: &PgStore, key: &str) -> Claim {
    let claim = claim(key);
    assert!(matches!(store.claim(&claim).await.unwrap(), ClaimOutcome::Claimed { .. }));
    assert_eq!(store.complete(&claim.key, claim.token, done()).await.unwrap(), Held::Yes);
    claim
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_of_a_key_that_is_done_do_not_reach_the_database() {
    let cached = Cached::by_default().await;
    finish(&cached.store, "1").await;
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
    finish(&elsewhere, "1").await;
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
    let first = finish(&cached.store, "1").await;
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
        finish(&cached.store, &key).await;
        assert_eq!(cached.claim(&key).await, (DONE, false));
        assert!(cached.store.clone().forget(&event(&key)).await.unwrap());
        assert_eq!(cached.claim(&key).await, (CLAIMED, true));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_was_forgotten_elsewhere_is_new_when_the_age_is_over() {
    let age = Duration::from_millis(200);
    let cached = Cached::with(|builder| builder.done_cache(100, age)).await;
    finish(&cached.store, "1").await;
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
    finish(&cached.store, "1").await;
    for _ in 0..2 {
        assert_eq!(cached.claim("1").await, (DONE, true));
    }
    let hour = PgStore::builder().done_cache(1, MINUTE * 60);
    let refused = hour.connect_lazy("postgres://localhost/app").unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Config);
}
