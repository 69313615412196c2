//! Operations that wait are sent together, and none of them suffers from its neighbours.

use std::{collections::BTreeMap, time::Duration};

use tokio::{
    runtime,
    task::JoinSet,
    time::{Instant, timeout},
};
use tower_dedupe::{
    ClaimStore, EventKey, PgStore, StoreError,
    claim::{Claim, ClaimOutcome, Held, State},
    store::{Completion, StoreErrorKind},
};

use crate::support::{
    claims::{MINUTE, claim, done, event, whole},
    cut::{Moment, Proxy, Traffic},
    postgres::{self, Schema},
};

/// A store with one connection, so that whatever comes second waits.
async fn narrow(db: &Schema) -> PgStore {
    db.store().await;
    db.builder().pool_size(1).connect(db.bare_url()).await.unwrap()
}

/// Sends these claims at once.
async fn at_once(
    store: &PgStore,
    claims: impl IntoIterator<Item = Claim>,
) -> Vec<(Claim, Result<ClaimOutcome, StoreError>)> {
    let mut asking = JoinSet::new();
    for claim in claims {
        let store = store.clone();
        asking.spawn(async move {
            let outcome = store.claim(&claim).await;
            (claim, outcome)
        });
    }
    asking.join_all().await
}

const CLAIMED: ClaimOutcome = ClaimOutcome::Claimed { attempt: 1 };

#[tokio::test]
async fn what_waits_for_a_connection_is_sent_in_one_statement() {
    let db = postgres::schema().await;
    db.store().await;
    let proxy = Proxy::before(postgres::shared().port()).await;
    let url = proxy.instead_of_host(db.bare_url());
    let store = db.builder().pool_size(1).connect(&url).await.unwrap();
    let before = proxy.round_trips();
    let claimed = at_once(&store, (0..200).map(|n| claim(&n.to_string()))).await;
    let round_trips = proxy.round_trips() - before;
    assert!(claimed.iter().all(|(_, outcome)| outcome.as_ref().unwrap() == &CLAIMED));
    assert!(round_trips <= 8, "{round_trips} round trips for 200 claims");

    let before = proxy.round_trips();
    let mut ending = JoinSet::new();
    let number = |claim: &Claim| claim.key.as_str().parse::<usize>().unwrap();
    for (claim, _) in claimed {
        let store = store.clone();
        ending.spawn(async move {
            if number(&claim) % 4 == 0 {
                assert!(store.fail(&claim.key, claim.token, done().retention).await.unwrap());
            } else {
                let completed = store.complete(&claim.key, claim.token, done()).await;
                assert_eq!(completed.unwrap(), Held::Yes);
            }
        });
    }
    ending.join_all().await;
    let round_trips = proxy.round_trips() - before;
    assert!(round_trips <= 12, "{round_trips} round trips for 200 ends");

    let before = proxy.round_trips();
    let duplicates = (0..200).filter(|n| n % 4 != 0);
    for (_, outcome) in at_once(&store, duplicates.map(|n| claim(&n.to_string()))).await {
        assert_eq!(outcome.unwrap(), ClaimOutcome::done(Some(200)));
    }
    let round_trips = proxy.round_trips() - before;
    assert!(round_trips <= 8, "{round_trips} round trips for 150 duplicates");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_claims_of_a_key_that_wait_together_are_not_both_granted() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    for round in 0..5 {
        let key = |n: usize| format!("{round} {}", n % 20);
        let mut granted = BTreeMap::<EventKey, usize>::new();
        for (claim, outcome) in at_once(&store, (0..100).map(|n| claim(&key(n)))).await {
            match outcome.unwrap() {
                ClaimOutcome::Claimed { .. } => *granted.entry(claim.key).or_default() += 1,
                other => assert!(matches!(other, ClaimOutcome::InProgress { .. }), "{other:?}"),
            }
        }
        assert_eq!(granted.len(), 20);
        assert!(granted.values().all(|times| *times == 1), "I3: {granted:?}");
    }
}

#[tokio::test]
async fn a_storm_on_one_key_is_answered_together() {
    let db = postgres::schema().await;
    db.store().await;
    let proxy = Proxy::before(postgres::shared().port()).await;
    let url = proxy.instead_of_host(db.bare_url());
    let store = db.builder().pool_size(1).connect(&url).await.unwrap();
    let storm = async || {
        let before = proxy.round_trips();
        let outcomes = at_once(&store, (0..200).map(|_| claim("one"))).await;
        let round_trips = proxy.round_trips() - before;
        let outcomes: Vec<_> = outcomes.into_iter().map(|(_, outcome)| outcome.unwrap()).collect();
        (outcomes, round_trips)
    };
    let granted = |outcomes: &[ClaimOutcome], attempt: u32| {
        let claimed = ClaimOutcome::Claimed { attempt };
        let others = outcomes.iter().filter(|one| matches!(one, ClaimOutcome::InProgress { .. }));
        assert_eq!(others.count(), 199);
        assert_eq!(outcomes.iter().filter(|one| **one == claimed).count(), 1);
    };
    // New, in progress, and free again: taken by one.
    let first = claim("one");
    let (outcomes, round_trips) = storm().await;
    granted(&outcomes, 1);
    assert!(round_trips <= 4, "{round_trips}");
    let (outcomes, round_trips) = storm().await;
    assert!(outcomes.iter().all(|one| matches!(one, ClaimOutcome::InProgress { .. })));
    assert!(round_trips <= 4, "{round_trips}");
    assert!(store.forget(&first.key).await.unwrap());
    store.claim(&first).await.unwrap();
    assert!(store.fail(&first.key, first.token, done().retention).await.unwrap());
    let (outcomes, round_trips) = storm().await;
    granted(&outcomes, 2);
    assert!(round_trips <= 20, "{round_trips}");

    // Done.
    assert!(store.forget(&first.key).await.unwrap());
    store.claim(&first).await.unwrap();
    store.complete(&first.key, first.token, done()).await.unwrap();
    let (outcomes, round_trips) = storm().await;
    assert!(outcomes.iter().all(|one| *one == ClaimOutcome::done(Some(200))));
    assert!(round_trips <= 4, "{round_trips}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_asks_again_in_a_storm_finds_its_claim() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    for round in 0..5 {
        let held = claim(&round.to_string());
        assert_eq!(store.claim(&held).await.unwrap(), CLAIMED);
        let asked = (0..60).map(|n| match n % 3 {
            0 => held.clone(),
            _ => claim(&round.to_string()),
        });
        for (claim, outcome) in at_once(&store, asked).await {
            match outcome.unwrap() {
                CLAIMED => assert_eq!(claim.token, held.token),
                ClaimOutcome::InProgress { .. } => assert_ne!(claim.token, held.token),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn done_marks_of_one_claim_that_wait_together_are_all_told_yes() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    for round in 0..5 {
        let held = claim(&round.to_string());
        store.claim(&held).await.unwrap();
        let mut ending = JoinSet::new();
        for _ in 0..20 {
            let (store, held) = (store.clone(), held.clone());
            ending.spawn(async move { store.complete(&held.key, held.token, done()).await });
        }
        assert!(ending.join_all().await.into_iter().all(|ended| ended.unwrap() == Held::Yes));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_answer_goes_to_its_own_caller() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    // Keys in every state, asked for at once.
    for n in 0..40_u16 {
        let first = claim(&n.to_string());
        let retention = done().retention;
        match n % 4 {
            0 => continue,
            1 => drop(store.claim(&first).await.unwrap()),
            2 => {
                store.claim(&first).await.unwrap();
                let completion = Completion::new(Some(200 + n), retention);
                store.complete(&first.key, first.token, completion).await.unwrap();
            }
            _ => {
                store.claim(&first).await.unwrap();
                assert!(store.fail(&first.key, first.token, retention).await.unwrap());
            }
        }
    }
    for (claim, outcome) in at_once(&store, (0..40).map(|n| claim(&n.to_string()))).await {
        let n: u16 = claim.key.as_str().parse().unwrap();
        match (n % 4, outcome.unwrap()) {
            (0, ClaimOutcome::Claimed { attempt: 1 })
            | (1, ClaimOutcome::InProgress { .. })
            | (3, ClaimOutcome::Claimed { attempt: 2 }) => {}
            (2, ClaimOutcome::Done { status: Some(status), .. }) if status == 200 + n => {}
            (_, other) => panic!("{n}: {other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_several_keys_may_share_a_token() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    let (token, other) = (claim("0").token, claim("0").token);
    let claims = |token| {
        (0..60).map(move |n| {
            let mut claim = claim(&n.to_string());
            claim.token = token;
            claim
        })
    };
    for one in claims(other).step_by(2) {
        assert_eq!(store.claim(&one).await.unwrap(), CLAIMED);
    }
    let is_held = |claim: &Claim| claim.key.as_str().parse::<usize>().unwrap() % 2 == 0;
    for (claim, outcome) in at_once(&store, claims(token)).await {
        match outcome.unwrap() {
            CLAIMED => assert!(!is_held(&claim)),
            ClaimOutcome::InProgress { .. } => assert!(is_held(&claim)),
            outcome => panic!("{outcome:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_waits_for_another_transaction_does_not_stall_its_neighbours() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    let mut client = db.client().await;
    let open = client.transaction().await.unwrap();
    open.batch_execute(
        "INSERT INTO processed_events
             (scope, event_key, status, attempt, claimed_at, lease_until, expires_at)
         VALUES ('s', '50', 'in_progress', 1, now(), now(), now())",
    )
    .await
    .unwrap();
    let asked = Instant::now();
    let mut claims = Vec::new();
    for (claim, outcome) in at_once(&store, (0..100).map(|n| claim(&n.to_string()))).await {
        match (claim.key.as_str(), outcome.unwrap()) {
            ("50", ClaimOutcome::InProgress { .. }) => {}
            ("50", other) => panic!("{other:?}"),
            (_, outcome) => {
                assert_eq!(outcome, CLAIMED);
                claims.push(claim);
            }
        }
    }
    assert!(asked.elapsed() < Duration::from_secs(3), "no operation has failed for want of time");
    open.rollback().await.unwrap();

    // A done mark whose row is locked by somebody else.
    let open = client.transaction().await.unwrap();
    open.batch_execute("SELECT FROM processed_events WHERE event_key = '7' FOR UPDATE")
        .await
        .unwrap();
    let mut ending = JoinSet::new();
    for claim in claims {
        let store = store.clone();
        ending.spawn(async move {
            let completed = store.complete(&claim.key, claim.token, done()).await;
            (claim.key.as_str().to_owned(), completed)
        });
    }
    for (key, completed) in ending.join_all().await {
        match completed {
            Ok(held) => assert!(held == Held::Yes && key != "7", "{key}"),
            Err(error) => assert!(key == "7", "{key} failed: {error:?}"),
        }
    }
    open.rollback().await.unwrap();
    assert_eq!(store.show(&event("8")).await.unwrap().unwrap().state, State::Done);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_refused_does_not_fail_its_neighbours() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    db.client()
        .await
        .batch_execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF NEW.event_key IN ('13', '77') THEN RAISE 'not this one'; END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON processed_events
             FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .await
        .unwrap();
    for (claim, outcome) in at_once(&store, (0..100).map(|n| claim(&n.to_string()))).await {
        if ["13", "77"].contains(&claim.key.as_str()) {
            assert_eq!(outcome.unwrap_err().kind(), StoreErrorKind::Other);
        } else {
            assert_eq!(outcome.unwrap(), CLAIMED, "{:?}", claim.key);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_for_many_that_was_cut_off_is_asked_again_with_the_same_tokens() {
    let db = postgres::schema().await;
    db.store().await;
    for moment in [Moment::BeforeTheServer, Moment::BeforeTheAnswer] {
        // The first one alone, then the others together, and whatever else is written.
        for write in 1.. {
            let proxy = Proxy::before(postgres::shared().port()).await;
            let url = proxy.instead_of_host(db.bare_url());
            let store = db.builder().pool_size(1).connect(&url).await.unwrap();
            let key = |n: usize| format!("{moment:?} {write} {n}");
            proxy.cut_at(write, moment);
            for (claim, outcome) in at_once(&store, (0..100).map(|n| claim(&key(n)))).await {
                assert_eq!(outcome.unwrap(), CLAIMED, "{:?}", claim.key);
            }
            if !proxy.cuts_no_more() {
                assert!(write > 2, "write {write} never came");
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_is_late_does_not_keep_the_others() {
    let db = postgres::schema().await;
    let store = db.store().await;
    db.client()
        .await
        .batch_execute(
            "CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF NEW.event_key = 'late' THEN PERFORM pg_sleep(2.5); END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER sleep BEFORE INSERT OR UPDATE ON processed_events
             FOR EACH ROW EXECUTE FUNCTION sleep()",
        )
        .await
        .unwrap();
    let late = claim("late");
    let asking = tokio::spawn({
        let (store, late) = (store.clone(), late.clone());
        async move { store.claim(&late).await }
    });
    // It is under way, and those that come now wait for it no longer than they must.
    while store.pool().status().available == store.pool().status().size {
        tokio::task::yield_now().await;
    }
    let (first, rest) = (claim("first"), (0..50).map(|n| claim(&n.to_string())));
    assert_eq!(store.claim(&first).await.unwrap(), CLAIMED);
    for (_, outcome) in at_once(&store, rest).await {
        assert_eq!(outcome.unwrap(), CLAIMED);
    }
    assert!(!asking.is_finished(), "they have waited for the late one");
    assert_eq!(asking.await.unwrap().unwrap(), CLAIMED);

    let asking = tokio::spawn({
        let store = store.clone();
        async move { store.complete(&late.key, late.token, done()).await }
    });
    while store.pool().status().available == store.pool().status().size {
        tokio::task::yield_now().await;
    }
    assert_eq!(store.complete(&first.key, first.token, done()).await.unwrap(), Held::Yes);
    assert!(!asking.is_finished(), "it has waited for the late one");
    assert_eq!(asking.await.unwrap().unwrap(), Held::Yes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_done_mark_whose_row_is_locked_for_a_while_is_asked_for_again() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    let held = claim("held");
    store.claim(&held).await.unwrap();
    let mut client = db.client().await;
    let open = client.transaction().await.unwrap();
    open.batch_execute("SELECT FROM processed_events FOR UPDATE").await.unwrap();
    let asking = tokio::spawn({
        let store = store.clone();
        async move { store.complete(&held.key, held.token, done()).await }
    });
    // Longer than a statement waits for a lock, shorter than an operation may take.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!asking.is_finished());
    open.rollback().await.unwrap();
    assert_eq!(asking.await.unwrap().unwrap(), Held::Yes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_on_rows_that_others_have_locked_does_not_stall_the_lane() {
    let db = postgres::schema().await;
    let store = narrow(&db).await;
    let mut client = db.client().await;
    let open = client.transaction().await.unwrap();
    open.batch_execute(
        "INSERT INTO processed_events
             (scope, event_key, status, attempt, claimed_at, lease_until, expires_at)
         SELECT 's', 'locked ' || n, 'in_progress', 1, now(), now(), now()
         FROM generate_series(0, 2) AS n",
    )
    .await
    .unwrap();
    // On and on, three keys that cannot be claimed; the store has but one connection.
    let storm: Vec<_> = (0..12)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move {
                loop {
                    let outcome = store.claim(&claim(&format!("locked {}", n % 3))).await.unwrap();
                    assert!(matches!(outcome, ClaimOutcome::InProgress { .. }), "{outcome:?}");
                }
            })
        })
        .collect();
    for n in 0..20 {
        let asked = Instant::now();
        assert_eq!(store.claim(&claim(&n.to_string())).await.unwrap(), CLAIMED);
        assert!(asked.elapsed() < Duration::from_secs(3), "it was nearly given up");
    }
    for one in storm {
        assert!(!one.is_finished());
        one.abort();
    }
    open.rollback().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_can_wait_are_turned_away_at_once() {
    let db = postgres::schema().await;
    db.store().await;
    let proxy = Proxy::before(postgres::shared().port()).await;
    let url = proxy.instead_of_host(db.bare_url());
    let store = db.builder().pool_size(1).timeout(MINUTE).connect(&url).await.unwrap();
    proxy.traffic(Traffic::Vanishes);
    let mut asking = JoinSet::new();
    for n in 0..17_500 {
        let (store, claim) = (store.clone(), claim(&n.to_string()));
        asking.spawn(async move { store.claim(&claim).await });
    }
    // While nothing goes through, whoever hears anything is turned away.
    for _ in 0..500 {
        let refused = asking.join_next().await.unwrap().unwrap().unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
        assert!(whole(&refused).contains("16384 operations are waiting"), "{}", whole(&refused));
    }
    proxy.traffic(Traffic::Flows);
    let mut claimed = 0;
    while let Some(outcome) = asking.join_next().await {
        match outcome.unwrap() {
            Ok(outcome) => claimed += usize::from(outcome == CLAIMED),
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable),
        }
    }
    assert!(claimed >= 16_384, "{claimed} were claimed");
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_leave_do_not_leave_the_others_waiting() {
    let db = postgres::schema().await;
    db.store().await;
    let proxy = Proxy::before(postgres::shared().port()).await;
    let url = proxy.instead_of_host(db.bare_url());
    let store = db.builder().pool_size(1).connect(&url).await.unwrap();
    for leaving in 0..30 {
        // Those that leave are the ones under way as well as the ones that wait.
        proxy.traffic(Traffic::Vanishes);
        let mut asking = JoinSet::new();
        let mut staying = JoinSet::new();
        for n in 0..30 {
            let (store, claim) = (store.clone(), claim(&format!("{leaving} {n}")));
            let ask = async move { store.claim(&claim).await };
            if n <= leaving {
                asking.spawn(ask)
            } else {
                staying.spawn(ask)
            };
        }
        tokio::task::yield_now().await;
        asking.shutdown().await;
        proxy.traffic(Traffic::Flows);
        let answered = timeout(Duration::from_secs(20), staying.join_all()).await;
        for outcome in answered.expect("they wait for ever") {
            assert_eq!(outcome.unwrap(), CLAIMED);
        }
    }
}

#[test]
fn a_runtime_that_ends_does_not_take_the_lane_along() {
    let build = || runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let (first, second) = (build().unwrap(), build().unwrap());
    let db = second.block_on(postgres::schema());
    let (store, proxy) = second.block_on(async {
        db.store().await;
        let proxy = Proxy::before(postgres::shared().port()).await;
        let url = proxy.instead_of_host(db.bare_url());
        let builder = db.builder().pool_size(1).timeout(Duration::from_secs(1));
        (builder.connect_lazy(&url).unwrap(), proxy)
    });
    // On the first runtime everything is under way or waits, when it ends.
    proxy.traffic(Traffic::Vanishes);
    first.block_on(async {
        for n in 0..50 {
            let (store, claim) = (store.clone(), claim(&n.to_string()));
            tokio::spawn(async move { store.claim(&claim).await });
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    });
    first.shutdown_background();
    proxy.traffic(Traffic::Flows);
    second.block_on(async {
        let began = Instant::now();
        // The connection of the dead runtime may be met once.
        while store.claim(&claim("after")).await.is_err() {
            assert!(began.elapsed() < Duration::from_secs(20), "the lane is stuck");
        }
        let claimed = at_once(&store, (100..150).map(|n| claim(&n.to_string()))).await;
        assert!(claimed.iter().all(|(_, outcome)| outcome.as_ref().unwrap() == &CLAIMED));
    });
}
