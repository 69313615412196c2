//! Claim, run, settle, without HTTP, on a store that fails as it is told. Time is paused: it moves
//! only when nothing else can happen, so none of these tests waits or depends on the machine.

use std::{
    convert::Infallible,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Semaphore, oneshot},
    task::yield_now,
    time::{Instant, advance, sleep, timeout},
};
use tower_dedupe::{
    ClaimInfo, ClaimStore, Deduplicator, EventKey, LeaseLost, Outcome, RunError, Scope,
    claim::{Claim, ClaimOutcome, Held, State},
    store::{Completion, StoreErrorKind},
};

use crate::support::scripted::{Call, Fault, Scripted};

const LEASE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn key(key: &str) -> EventKey {
    EventKey::new(Scope::new("test").unwrap(), key).unwrap()
}

async fn succeed(info: ClaimInfo) -> Result<u32, Infallible> {
    Ok(info.attempt())
}

async fn state(store: &Scripted, key: &EventKey) -> Option<State> {
    store.show(key).await.unwrap().map(|record| record.state)
}

/// Waits, in paused time, until a key is free to be claimed or the time is over.
async fn free_within(store: &Scripted, key: &EventKey, patience: Duration) -> bool {
    let freed = async {
        while state(store, key).await == Some(State::InProgress) {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(patience, freed).await.is_ok()
}

/// Another process takes the key over, as if the lease had ended.
async fn take_over(store: &Scripted, key: &EventKey) -> Claim {
    assert!(store.forget(key).await.unwrap());
    let claim = Claim::new(key.clone(), LEASE, DAY);
    assert!(matches!(store.claim(&claim).await.unwrap(), ClaimOutcome::Claimed { .. }));
    claim
}

#[tokio::test(start_paused = true)]
async fn work_runs_once_and_then_is_a_duplicate() {
    let dedupe = Deduplicator::new(Scripted::new());
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Ran(1));
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Duplicate);
    assert_eq!(dedupe.run(key("b"), succeed).await.unwrap(), Outcome::Ran(1));
}

#[tokio::test(start_paused = true)]
async fn i1_nothing_lost_an_error_frees_the_key_before_it_is_returned() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    let error = dedupe.run(key("a"), |_| async { Err::<(), _>("no") }).await.unwrap_err();
    assert!(matches!(error, RunError::Work("no")));
    assert_eq!(state(&store, &key("a")).await, Some(State::Failed));
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Ran(2));
}

#[tokio::test(start_paused = true)]
async fn i1_nothing_lost_done_is_committed_before_the_caller_hears_of_success() {
    let store = Scripted::new();
    let gate = Arc::new(Semaphore::new(0));
    store.next(Call::Complete, [Fault::Behind(gate.clone())]);
    let dedupe = Deduplicator::new(store.clone());
    let running = tokio::spawn(async move { dedupe.run(key("a"), succeed).await });

    store.has_been_called(Call::Complete, 1).await;
    for _ in 0..100 {
        yield_now().await;
    }
    assert!(!running.is_finished(), "answered before done was committed");
    gate.add_permits(1);
    assert_eq!(running.await.unwrap().unwrap(), Outcome::Ran(1));
    assert_eq!(state(&store, &key("a")).await, Some(State::Done));
}

#[tokio::test(start_paused = true)]
async fn i5_no_stuck_key_a_panic_frees_the_key_and_goes_on() {
    for detached in [true, false] {
        let store = Scripted::new();
        let dedupe = Deduplicator::builder(store.clone()).detached(detached).build().unwrap();
        let work = |_| async {
            yield_now().await;
            std::panic::resume_unwind(Box::new("the handler's own words"));
            #[expect(unreachable_code, reason = "gives the future its type")]
            Ok::<(), Infallible>(())
        };
        let panic = tokio::spawn(async move { dedupe.run(key("a"), work).await }).await;
        let panic = panic.unwrap_err();
        let words = panic.into_panic().downcast::<&str>().unwrap();
        assert_eq!(*words, "the handler's own words");
        assert_eq!(state(&store, &key("a")).await, Some(State::Failed), "detached: {detached}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_before_the_first_await_frees_the_key_too() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    let work = |info: ClaimInfo| -> std::future::Ready<Result<(), Infallible>> {
        panic!("attempt {} panics while its future is made", info.attempt())
    };
    tokio::spawn(async move { dedupe.run(key("a"), work).await }).await.unwrap_err();
    assert_eq!(state(&store, &key("a")).await, Some(State::Failed));
}

#[tokio::test(start_paused = true)]
async fn detached_work_ends_and_is_marked_done_though_its_caller_has_left() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    let (go, gone) = oneshot::channel::<()>();
    let work = |_| async {
        gone.await.unwrap();
        Ok::<(), Infallible>(())
    };
    let left = timeout(Duration::from_millis(50), dedupe.run(key("a"), work)).await;
    assert!(left.is_err(), "the caller has given up");
    assert_eq!(state(&store, &key("a")).await, Some(State::InProgress));

    go.send(()).unwrap();
    assert!(free_within(&store, &key("a"), Duration::from_secs(1)).await);
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Duplicate);
}

#[tokio::test(start_paused = true)]
async fn i5_no_stuck_key_inline_work_is_dropped_with_its_caller_and_its_key_is_freed() {
    let store = Scripted::new();
    let dedupe = Deduplicator::builder(store.clone()).detached(false).build().unwrap();
    let work = |_| pending::<Result<(), Infallible>>();
    let left = timeout(Duration::from_millis(50), dedupe.run(key("a"), work)).await;
    assert!(left.is_err());
    assert!(free_within(&store, &key("a"), Duration::from_millis(10)).await);
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Ran(2));
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_while_the_claim_is_on_its_way_leaves_no_claim_behind() {
    for detached in [true, false] {
        let store = Scripted::new();
        let gate = Arc::new(Semaphore::new(0));
        store.next(Call::Claim, [Fault::AnswerBehind(gate.clone())]);
        let dedupe = Deduplicator::builder(store.clone()).detached(detached).build().unwrap();
        let left = timeout(Duration::from_millis(50), dedupe.run(key("a"), succeed)).await;
        assert!(left.is_err());
        assert_eq!(store.inner().show(&key("a")).await.unwrap().unwrap().attempt, 1);

        gate.add_permits(1);
        assert!(free_within(&store, &key("a"), Duration::from_secs(1)).await);
        let expected = if detached { State::Done } else { State::Failed };
        assert_eq!(state(&store, &key("a")).await, Some(expected));
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_arrives_after_it_was_given_up_is_freed_all_the_same() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    store.next(Call::Claim, [Fault::Refuse(StoreErrorKind::Unknown)]);
    let error = dedupe.run(key("a"), succeed).await.unwrap_err();
    assert!(matches!(error, RunError::Store(_)));

    // The guard asks again and again, since "not found" does not mean "will not come".
    store.has_been_called(Call::Fail, 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_reply_is_lost_is_freed_and_its_work_not_run() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    store.next(Call::Claim, [Fault::LoseReply]);
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let work = move |_| async move {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok::<(), Infallible>(())
    };
    assert!(matches!(dedupe.run(key("a"), work).await, Err(RunError::Store(_))));
    assert!(free_within(&store, &key("a"), Duration::from_secs(1)).await);
    assert_eq!(state(&store, &key("a")).await, Some(State::Failed));
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_store_error_runs_nothing_and_claims_nothing() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Schema, StoreErrorKind::Conflict] {
        store.next(Call::Claim, [Fault::Refuse(kind)]);
        match dedupe.run(key("a"), succeed).await {
            Err(RunError::Store(error)) => assert_eq!(error.kind(), kind),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(store.calls(Call::Fail), 0, "what was not carried out need not be undone");
    assert_eq!(state(&store, &key("a")).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_handler_slower_than_its_lease_is_not_overtaken() {
    let store = Scripted::new();
    let dedupe = Deduplicator::builder(store.clone()).lease(LEASE).build().unwrap();
    let work = |_| async {
        sleep(10 * LEASE).await;
        Ok::<(), Infallible>(())
    };
    let running = tokio::spawn({
        let dedupe = dedupe.clone();
        async move { dedupe.run(key("a"), work).await }
    });
    for _ in 0..19 {
        sleep(LEASE / 2).await;
        let outcome = dedupe.run(key("a"), succeed).await.unwrap();
        assert!(matches!(outcome, Outcome::InProgress { .. }), "{outcome:?}");
    }
    assert_eq!(running.await.unwrap().unwrap(), Outcome::Ran(()));
}

#[tokio::test(start_paused = true)]
async fn i5_no_stuck_key_a_hung_handler_is_overtaken_after_max_hold_and_changes_nothing() {
    let store = Scripted::new();
    let max_hold = 5 * LEASE;
    let dedupe =
        Deduplicator::builder(store.clone()).lease(LEASE).max_hold(max_hold).build().unwrap();
    let began = Instant::now();
    let (go, gone) = oneshot::channel::<()>();
    let hung = tokio::spawn({
        let dedupe = dedupe.clone();
        async move { dedupe.run(key("a"), |_| gone).await }
    });

    let took_over = loop {
        sleep(LEASE / 10).await;
        match dedupe.run(key("a"), |_| async { Err::<(), _>("fails") }).await {
            Ok(Outcome::InProgress { .. }) => {}
            Err(RunError::Work("fails")) => break began.elapsed(),
            other => panic!("{other:?}"),
        }
    };
    assert!(took_over >= max_hold, "overtaken after {took_over:?}");
    assert!(took_over <= max_hold + LEASE + LEASE / 5, "stuck for {took_over:?}");

    // I4: the hung one wakes up and succeeds, too late.
    go.send(()).unwrap();
    assert_eq!(hung.await.unwrap().unwrap(), Outcome::Ran(()));
    assert_eq!(state(&store, &key("a")).await, Some(State::Failed));
}

#[tokio::test(start_paused = true)]
async fn i5_no_stuck_key_a_dead_holder_is_overtaken_when_its_lease_ends_and_not_before() {
    let store = Scripted::new();
    let dead = Claim::new(key("a"), LEASE, DAY);
    assert_eq!(store.claim(&dead).await.unwrap(), ClaimOutcome::Claimed { attempt: 1 });
    let dedupe = Deduplicator::new(store.clone());

    advance(LEASE - Duration::from_millis(10)).await;
    let outcome = dedupe.run(key("a"), succeed).await.unwrap();
    assert!(matches!(outcome, Outcome::InProgress { .. }), "{outcome:?}");
    advance(Duration::from_millis(10)).await;
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Ran(2));

    // I4, for the dead holder that was only asleep.
    let late = Completion::new(None, DAY);
    assert_eq!(store.complete(&key("a"), dead.token, late).await.unwrap(), Held::Lost);
    assert!(!store.fail(&key("a"), dead.token, DAY).await.unwrap());
    assert_eq!(store.renew(&[dead]).await.unwrap(), [Held::Lost]);
    assert_eq!(state(&store, &key("a")).await, Some(State::Done));
}

#[tokio::test(start_paused = true)]
async fn all_claims_of_a_store_are_renewed_in_one_statement() {
    let store = Scripted::new();
    // Two deduplicators on clones of one store: still one keeper.
    let dedupes = [Deduplicator::new(store.clone()), Deduplicator::new(store.clone())];
    let stop = Arc::new(Semaphore::new(0));
    let mut running = Vec::new();
    for n in 0..50 {
        let dedupe = dedupes[n % 2].clone();
        let stop = stop.clone();
        running.push(tokio::spawn(async move {
            let work = |_| async move {
                stop.acquire().await.unwrap().forget();
                Ok::<(), Infallible>(())
            };
            dedupe.run(key(&n.to_string()), work).await
        }));
    }
    store.has_been_called(Call::Claim, 50).await;
    sleep(LEASE + LEASE / 6).await;
    stop.add_permits(50);
    for one in running {
        assert_eq!(one.await.unwrap().unwrap(), Outcome::Ran(()));
    }
    assert_eq!(store.renewals(), [50, 50, 50]);
}

#[tokio::test(start_paused = true)]
async fn renewal_outlives_failures_of_the_store() {
    let store = Scripted::new();
    store.next(
        Call::Renew,
        [
            Fault::Refuse(StoreErrorKind::Unavailable),
            Fault::Panic,
            Fault::LoseReply,
            Fault::Refuse(StoreErrorKind::Unknown),
        ],
    );
    let dedupe = Deduplicator::builder(store.clone()).lease(LEASE).build().unwrap();
    let work = |_| async {
        sleep(3 * LEASE).await;
        Ok::<(), Infallible>(())
    };
    let running = tokio::spawn({
        let dedupe = dedupe.clone();
        async move { dedupe.run(key("a"), work).await }
    });
    for _ in 0..11 {
        sleep(LEASE / 4).await;
        let outcome = dedupe.run(key("a"), succeed).await.unwrap();
        assert!(matches!(outcome, Outcome::InProgress { .. }), "{outcome:?}");
    }
    assert_eq!(running.await.unwrap().unwrap(), Outcome::Ran(()));
    assert!(store.calls(Call::Renew) > 4);
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_not_renewed_once_its_work_has_ended() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Ran(1));
    sleep(10 * LEASE).await;
    assert_eq!(store.calls(Call::Renew), 0);
}

#[tokio::test(start_paused = true)]
async fn i4_no_zombie_writes_a_superseded_holder_that_succeeds_changes_nothing() {
    for lease_lost in [LeaseLost::Continue, LeaseLost::Cancel] {
        let store = Scripted::new();
        let dedupe = Deduplicator::builder(store.clone()).lease_lost(lease_lost).build().unwrap();
        let running = tokio::spawn({
            let dedupe = dedupe.clone();
            let work = |_| async {
                sleep(2 * LEASE).await;
                Ok::<(), Infallible>(())
            };
            async move { dedupe.run(key("a"), work).await }
        });
        store.has_been_called(Call::Claim, 1).await;
        yield_now().await;
        let other = take_over(&store, &key("a")).await;

        let began = Instant::now();
        match (lease_lost, running.await.unwrap()) {
            (LeaseLost::Continue, Ok(Outcome::Ran(()))) => {
                assert_eq!(began.elapsed(), 2 * LEASE, "it goes on to its end");
            }
            (LeaseLost::Cancel, Err(RunError::Cancelled)) => {
                assert!(began.elapsed() <= LEASE / 2, "dropped at the next renewal");
            }
            (_, other) => panic!("{lease_lost:?}: {other:?}"),
        }
        assert_ne!(state(&store, &key("a")).await, Some(State::Done));
        let done = Completion::new(None, DAY);
        assert_eq!(store.complete(&key("a"), other.token, done).await.unwrap(), Held::Yes);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_while_settling_is_waited_for() {
    let store = Scripted::new();
    store.next(
        Call::Complete,
        [
            Fault::Refuse(StoreErrorKind::Unavailable),
            Fault::LoseReply,
            Fault::Refuse(StoreErrorKind::Unknown),
        ],
    );
    let dedupe = Deduplicator::new(store.clone());
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Ran(1));
    assert_eq!(state(&store, &key("a")).await, Some(State::Done));
}

#[tokio::test(start_paused = true)]
async fn after_the_settle_timeout_the_result_is_returned_and_the_mark_tried_on() {
    let store = Scripted::new();
    store.always(Call::Complete, Fault::Refuse(StoreErrorKind::Unavailable));
    let settle_timeout = Duration::from_secs(5);
    let dedupe = Deduplicator::builder(store.clone()).settle_timeout(settle_timeout).build();
    let dedupe = dedupe.unwrap();
    let began = Instant::now();
    assert_eq!(dedupe.run(key("a"), succeed).await.unwrap(), Outcome::Ran(1));
    let held = began.elapsed();
    assert!(held <= settle_timeout && held >= settle_timeout / 2, "held for {held:?}");
    assert_eq!(state(&store, &key("a")).await, Some(State::InProgress), "never freed");

    sleep(LEASE / 2).await;
    store.always(Call::Complete, None);
    assert!(free_within(&store, &key("a"), Duration::from_secs(1)).await);
    assert_eq!(state(&store, &key("a")).await, Some(State::Done));
}

#[tokio::test(start_paused = true)]
async fn inline_work_that_succeeded_is_marked_done_though_its_caller_leaves_meanwhile() {
    let store = Scripted::new();
    let gate = Arc::new(Semaphore::new(0));
    store.next(Call::Complete, [Fault::Behind(gate.clone())]);
    let dedupe = Deduplicator::builder(store.clone()).detached(false).build().unwrap();
    let left = timeout(Duration::from_millis(50), dedupe.run(key("a"), succeed)).await;
    assert!(left.is_err());
    assert!(free_within(&store, &key("a"), Duration::from_secs(1)).await);
    assert_eq!(state(&store, &key("a")).await, Some(State::Done));
}

#[tokio::test(start_paused = true)]
async fn no_more_is_in_flight_than_allowed_even_if_callers_leave() {
    let store = Scripted::new();
    let dedupe = Deduplicator::builder(store.clone()).max_in_flight(3).build().unwrap();
    let stop = Arc::new(Semaphore::new(0));
    let work = |stop: Arc<Semaphore>| {
        move |_: ClaimInfo| async move {
            stop.acquire().await.unwrap().forget();
            Ok::<(), Infallible>(())
        }
    };
    for n in 0..3 {
        let run = dedupe.run(key(&n.to_string()), work(stop.clone()));
        timeout(Duration::from_millis(5), run).await.unwrap_err();
    }
    let turned_away = dedupe.run(key("4"), succeed).await;
    assert!(matches!(turned_away, Err(RunError::TooManyInFlight)), "{turned_away:?}");
    assert_eq!(store.calls(Call::Claim), 3, "turned away before any claim");

    stop.add_permits(1);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(dedupe.run(key("4"), succeed).await.unwrap(), Outcome::Ran(1));
}

#[tokio::test(start_paused = true)]
async fn drain_waits_for_what_is_in_flight_and_lets_nothing_in() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    let run = dedupe.run(key("a"), |_| async {
        sleep(Duration::from_secs(3)).await;
        Ok::<(), Infallible>(())
    });
    timeout(Duration::from_millis(5), run).await.unwrap_err();

    let draining = tokio::spawn({
        let dedupe = dedupe.clone();
        async move { dedupe.drain(Duration::from_secs(10)).await }
    });
    yield_now().await;
    let late = dedupe.run(key("b"), succeed).await;
    assert!(matches!(late, Err(RunError::TooManyInFlight)), "{late:?}");
    assert_eq!(draining.await.unwrap(), 0);
    assert_eq!(state(&store, &key("a")).await, Some(State::Done));
}

#[tokio::test(start_paused = true)]
async fn drain_cuts_what_does_not_end_and_frees_its_key() {
    let store = Scripted::new();
    let dedupe = Deduplicator::new(store.clone());
    for n in 0..3 {
        let run = dedupe.run(key(&n.to_string()), |_| pending::<Result<(), Infallible>>());
        timeout(Duration::from_millis(5), run).await.unwrap_err();
    }
    let began = Instant::now();
    assert_eq!(dedupe.drain(Duration::from_secs(2)).await, 3);
    assert!(began.elapsed() < Duration::from_secs(3));
    for n in 0..3 {
        assert_eq!(state(&store, &key(&n.to_string())).await, Some(State::Failed));
    }
}

#[test]
fn a_guard_that_is_dropped_without_its_runtime_does_no_harm() {
    let store = Scripted::new();
    let dedupe = Deduplicator::builder(store.clone()).detached(false).build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut run =
        Box::pin(
            async move { dedupe.run(key("a"), |_| pending::<Result<(), Infallible>>()).await },
        );
    runtime.block_on(async {
        tokio::select! {
            _ = &mut run => panic!("it is pending"),
            () = sleep(Duration::from_millis(5)) => {}
        }
    });
    drop(runtime);
    std::thread::spawn(move || drop(run)).join().unwrap();
}

#[test]
fn claims_are_renewed_on_a_second_runtime_after_the_first_has_ended() {
    let store = Scripted::new();
    let dedupe =
        Deduplicator::builder(store.clone()).lease(Duration::from_millis(300)).build().unwrap();
    for n in 0..2 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let before = store.calls(Call::Renew);
        runtime.block_on(async {
            let store = store.clone();
            let work = move |_| async move {
                store.has_been_called(Call::Renew, before + 1).await;
                Ok::<(), Infallible>(())
            };
            let run = dedupe.run(key(&n.to_string()), work);
            let ran = timeout(Duration::from_secs(20), run).await.expect("no renewal").unwrap();
            assert_eq!(ran, Outcome::Ran(()));
        });
    }
}

#[test]
fn settings_out_of_their_bounds_are_refused_by_name() {
    let builder = || Deduplicator::builder(Scripted::new());
    let zero = Duration::ZERO;
    let refused = [
        (builder().lease(zero), "lease is 0ns, it must be 100ms to 86400s"),
        (builder().lease(2 * DAY), "lease is 172800s"),
        (builder().max_hold(Duration::from_secs(1)), "max_hold is 1s, it must be 60s to"),
        (builder().retention(Duration::from_secs(1)), "retention is 1s, it must be 60s to"),
        (builder().retention(Duration::MAX), "retention is"),
        (builder().settle_timeout(Duration::MAX), "settle_timeout is"),
        (builder().max_in_flight(0), "max_in_flight is 0, it must be 1 to 1000000"),
        (builder().max_in_flight(u32::MAX), "max_in_flight is 4294967295"),
    ];
    for (builder, message) in refused {
        let error = builder.build().unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
    assert!(builder().build().is_ok());
}
