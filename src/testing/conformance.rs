//! The protocol as a list of cases that every [`ClaimStore`] passes.
//!
//! A store is brought in as a [`Subject`], and [`conformance_tests!`](crate::conformance_tests)
//! makes a test of each case:
//!
//! ```
//! # fn main() {}
//! mod my_store_conforms {
//!     use std::time::Duration;
//!     use tower_dedupe::{MemoryStore, testing::conformance::Subject};
//!
//!     struct InMemory(MemoryStore);
//!
//!     impl Subject for InMemory {
//!         type Store = MemoryStore;
//!
//!         fn store(&self) -> MemoryStore {
//!             self.0.clone()
//!         }
//!
//!         async fn elapse(&self, by: Duration) {
//!             tokio::time::advance(by).await;
//!         }
//!     }
//!
//!     tower_dedupe::conformance_tests! {
//!         #[tokio::test(start_paused = true)]
//!         InMemory(MemoryStore::new())
//!     }
//! }
//! ```

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a case that fails says so by panicking"
)]

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

use bytes::Bytes;

use crate::{
    claim::{Claim, ClaimOutcome, ClaimToken, EventKey, Held, PayloadHash, Scope, State},
    store::{ClaimStore, Completion, Record},
};

/// A store under test, with a clock that the test moves.
pub trait Subject: Send + Sync {
    /// The store. Clones share their claims.
    type Store: ClaimStore + Clone;

    /// The store, which had no keys when the subject was made.
    fn store(&self) -> Self::Store;

    /// Lets the store's time go by. Up to a second may go by of itself between two calls of the
    /// store; the cases allow for it.
    fn elapse(&self, by: Duration) -> impl Future<Output = ()> + Send;
}

/// Makes a test of each case of [`conformance`](crate::testing::conformance): an attribute that
/// makes a test of an `async fn`, then an expression that makes a new
/// [`Subject`], which may `.await`.
#[macro_export]
macro_rules! conformance_tests {
    ($(#[$attribute:meta])+ $subject:expr) => {
        $crate::conformance_tests! {
            @each [$(#[$attribute])+] ($subject)
            a_new_key_is_claimed_as_the_first_attempt
            asked_again_with_the_same_token_the_answer_is_the_same
            another_token_is_in_progress_while_the_lease_lives
            after_the_lease_the_claim_is_taken_over
            a_failed_key_is_free_at_once
            a_done_key_is_done_for_everybody
            a_status_that_was_not_given_is_not_made_up
            done_twice_the_first_answer_stands
            done_counts_after_the_lease_until_somebody_took_over
            a_stranger_changes_nothing
            a_holder_that_was_taken_over_changes_nothing
            a_holder_that_failed_changes_nothing
            a_holder_that_was_forgotten_changes_nothing
            a_holder_that_was_purged_changes_nothing
            a_done_key_cannot_fail
            a_renewal_moves_the_lease_on_from_now
            a_renewal_moves_the_retention_on
            a_renewal_answers_each_claim_in_its_place
            a_renewal_gives_each_claim_its_own_lease
            a_done_key_is_new_when_its_retention_ends
            an_abandoned_key_is_new_when_its_retention_ends
            a_failed_key_is_new_when_its_retention_ends
            a_forgotten_key_is_new
            a_record_shows_each_state
            a_purge_deletes_what_is_past_its_retention_and_no_more_than_its_limit
            the_same_key_in_two_scopes_is_two_keys
            keys_are_told_apart_byte_by_byte
            the_longest_keys_fit
            long_times_and_short_ones_are_kept
            of_many_claims_at_once_one_is_claimed
            of_many_takeovers_at_once_one_is_claimed
            a_claim_dropped_at_any_point_is_free_after_its_lease
            clones_are_one_store
            a_key_belongs_to_one_payload_unless_it_has_failed
            what_says_nothing_of_its_payload_is_not_compared
            a_key_is_new_for_any_payload_when_its_retention_ends
            a_response_is_given_byte_for_byte_to_those_who_ask_for_it
            a_response_of_an_earlier_life_is_not_given
            many_at_once_each_hear_of_their_own_payload_and_response
        }
    };
    (@each $attributes:tt $subject:tt $($case:ident)+) => {
        $($crate::conformance_tests! { @one $attributes $subject $case })+
    };
    (@one [$($attribute:tt)+] ($subject:expr) $case:ident) => {
        $($attribute)+
        async fn $case() {
            let subject = $subject;
            $crate::testing::conformance::$case(&subject).await;
        }
    };
}

const LEASE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const MONTH: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// What may go by of itself.
const SLACK: Duration = Duration::from_secs(5);

fn event(key: &str) -> EventKey {
    EventKey::new(Scope::new("conformance").unwrap(), key).unwrap()
}

fn claim(key: &str) -> Claim {
    Claim::new(event(key), LEASE, DAY)
}

fn ok() -> Completion {
    Completion::new(Some(200), MONTH)
}

fn claimed(attempt: u32) -> ClaimOutcome {
    ClaimOutcome::Claimed { attempt }
}

fn is_in_progress(outcome: ClaimOutcome) -> bool {
    matches!(outcome, ClaimOutcome::InProgress { .. })
}

/// `left` is `whole`, less what may have gone by of itself.
fn about(left: Duration, whole: Duration) -> bool {
    left <= whole && left + SLACK >= whole
}

/// A record without its times, which go by.
fn still(record: Option<Record>) -> Option<(State, u32, Option<u16>)> {
    record.map(|record| (record.state, record.attempt, record.response_status))
}

/// Asserts that neither complete, fail nor renew does anything with this claim.
async fn is_powerless(store: &impl ClaimStore, of: &Claim) {
    let before = store.show(&of.key).await.unwrap();
    let completed = store.complete(&of.key, of.token, Completion::new(Some(299), DAY)).await;
    assert_eq!(completed.unwrap(), Held::Lost, "I4: completed with a superseded token");
    let failed = store.fail(&of.key, of.token, DAY).await;
    assert!(!failed.unwrap(), "I4: failed with a superseded token");
    let renewed = store.renew(std::slice::from_ref(of)).await;
    assert_eq!(renewed.unwrap(), [Held::Lost], "I4: renewed with a superseded token");
    let after = store.show(&of.key).await.unwrap();
    assert_eq!(still(after.clone()), still(before.clone()), "I4: a superseded token wrote");
    if let (Some(before), Some(after)) = (before, after) {
        assert!(about(after.lease_left, before.lease_left), "I4: the lease was moved");
        assert!(about(after.retention_left, before.retention_left), "I4: the retention was moved");
    }
}

/// No row: attempt 1.
pub async fn a_new_key_is_claimed_as_the_first_attempt<S: Subject>(subject: &S) {
    let store = subject.store();
    assert_eq!(store.claim(&claim("1")).await.unwrap(), claimed(1));
    assert_eq!(store.claim(&claim("2")).await.unwrap(), claimed(1));
}

/// A claim whose reply was lost is asked again, also after its lease.
pub async fn asked_again_with_the_same_token_the_answer_is_the_same<S: Subject>(subject: &S) {
    let store = subject.store();
    let (first, second) = (claim("1"), claim("1"));
    for _ in 0..3 {
        assert_eq!(store.claim(&first).await.unwrap(), claimed(1));
    }
    subject.elapse(LEASE + SLACK).await;
    for _ in 0..3 {
        assert_eq!(store.claim(&second).await.unwrap(), claimed(2));
    }
    subject.elapse(LEASE + SLACK).await;
    assert_eq!(store.claim(&second).await.unwrap(), claimed(2));
}

/// The answer tells what is left.
pub async fn another_token_is_in_progress_while_the_lease_lives<S: Subject>(subject: &S) {
    let store = subject.store();
    store.claim(&claim("1")).await.unwrap();
    let mut left = LEASE;
    for wait in [0, 30, 20] {
        let wait = Duration::from_secs(wait);
        subject.elapse(wait).await;
        left -= wait;
        let outcome = store.claim(&claim("1")).await.unwrap();
        let ClaimOutcome::InProgress { lease_left } = outcome else {
            panic!("I3: a live claim was answered with {outcome:?}");
        };
        assert!(about(lease_left, left), "{lease_left:?} of {left:?}");
    }
}

/// With a new token and the next attempt.
pub async fn after_the_lease_the_claim_is_taken_over<S: Subject>(subject: &S) {
    let store = subject.store();
    store.claim(&claim("1")).await.unwrap();
    for attempt in 2..5 {
        assert!(is_in_progress(store.claim(&claim("1")).await.unwrap()));
        subject.elapse(LEASE + SLACK).await;
        assert_eq!(store.claim(&claim("1")).await.unwrap(), claimed(attempt), "I5: a stuck key");
    }
    assert!(is_in_progress(store.claim(&claim("1")).await.unwrap()));
}

/// Without waiting for the lease.
pub async fn a_failed_key_is_free_at_once<S: Subject>(subject: &S) {
    let store = subject.store();
    for attempt in 1..4 {
        let next = claim("1");
        assert_eq!(store.claim(&next).await.unwrap(), claimed(attempt), "I5: a stuck key");
        assert!(store.fail(&next.key, next.token, DAY).await.unwrap());
        assert!(!store.fail(&next.key, next.token, DAY).await.unwrap(), "failed twice");
    }
}

/// Also for the token that made it so.
pub async fn a_done_key_is_done_for_everybody<S: Subject>(subject: &S) {
    let store = subject.store();
    let first = claim("1");
    store.claim(&first).await.unwrap();
    let done = Completion::new(Some(204), MONTH);
    assert_eq!(store.complete(&first.key, first.token, done).await.unwrap(), Held::Yes);
    for _ in 0..3 {
        for asking in [&claim("1"), &first] {
            let outcome = store.claim(asking).await.unwrap();
            assert_eq!(outcome, ClaimOutcome::done(Some(204)), "I2: done is final");
        }
        subject.elapse(LEASE + SLACK).await;
    }
}

/// None stays none.
pub async fn a_status_that_was_not_given_is_not_made_up<S: Subject>(subject: &S) {
    let store = subject.store();
    let first = claim("1");
    store.claim(&first).await.unwrap();
    store.complete(&first.key, first.token, Completion::new(None, MONTH)).await.unwrap();
    let outcome = store.claim(&claim("1")).await.unwrap();
    assert_eq!(outcome, ClaimOutcome::done(None));
}

/// A completion whose reply was lost is asked again.
pub async fn done_twice_the_first_answer_stands<S: Subject>(subject: &S) {
    let store = subject.store();
    let first = claim("1");
    store.claim(&first).await.unwrap();
    store.complete(&first.key, first.token, ok()).await.unwrap();
    let again = Completion::new(Some(299), DAY);
    assert_eq!(store.complete(&first.key, first.token, again).await.unwrap(), Held::Yes);
    let record = store.show(&first.key).await.unwrap().unwrap();
    assert_eq!(record.response_status, Some(200));
    assert!(about(record.retention_left, MONTH), "{record:?}");
}

/// The work was done, whoever was late.
pub async fn done_counts_after_the_lease_until_somebody_took_over<S: Subject>(subject: &S) {
    let store = subject.store();
    let late = claim("late");
    store.claim(&late).await.unwrap();
    subject.elapse(LEASE + SLACK).await;
    assert_eq!(store.complete(&late.key, late.token, ok()).await.unwrap(), Held::Yes);
    let outcome = store.claim(&claim("late")).await.unwrap();
    assert_eq!(outcome, ClaimOutcome::done(Some(200)));
}

/// A token that never held the key.
pub async fn a_stranger_changes_nothing<S: Subject>(subject: &S) {
    let store = subject.store();
    let (holder, stranger) = (claim("1"), claim("1"));
    is_powerless(&store, &stranger).await;
    assert_eq!(store.show(&holder.key).await.unwrap(), None);
    store.claim(&holder).await.unwrap();
    is_powerless(&store, &stranger).await;
    store.fail(&holder.key, holder.token, DAY).await.unwrap();
    is_powerless(&store, &stranger).await;
    let again = claim("1");
    store.claim(&again).await.unwrap();
    store.complete(&again.key, again.token, ok()).await.unwrap();
    is_powerless(&store, &stranger).await;
}

/// While its heir works, and after it is done, and after it failed.
pub async fn a_holder_that_was_taken_over_changes_nothing<S: Subject>(subject: &S) {
    let store = subject.store();
    for end in ["works", "done", "failed"] {
        let (zombie, heir) = (claim(end), claim(end));
        store.claim(&zombie).await.unwrap();
        subject.elapse(LEASE + SLACK).await;
        assert_eq!(store.claim(&heir).await.unwrap(), claimed(2));
        match end {
            "done" => drop(store.complete(&heir.key, heir.token, ok()).await.unwrap()),
            "failed" => drop(store.fail(&heir.key, heir.token, DAY).await.unwrap()),
            _ => {}
        }
        is_powerless(&store, &zombie).await;
        if end == "works" {
            assert_eq!(store.complete(&heir.key, heir.token, ok()).await.unwrap(), Held::Yes);
        }
    }
}

/// Whether or not the key was claimed anew.
pub async fn a_holder_that_failed_changes_nothing<S: Subject>(subject: &S) {
    let store = subject.store();
    let (zombie, heir) = (claim("1"), claim("1"));
    store.claim(&zombie).await.unwrap();
    store.fail(&zombie.key, zombie.token, DAY).await.unwrap();
    is_powerless(&store, &zombie).await;
    assert_eq!(store.claim(&heir).await.unwrap(), claimed(2));
    is_powerless(&store, &zombie).await;
    assert_eq!(store.complete(&heir.key, heir.token, ok()).await.unwrap(), Held::Yes);
}

/// Whether or not the key was claimed anew.
pub async fn a_holder_that_was_forgotten_changes_nothing<S: Subject>(subject: &S) {
    let store = subject.store();
    let (zombie, heir) = (claim("1"), claim("1"));
    store.claim(&zombie).await.unwrap();
    assert!(store.forget(&zombie.key).await.unwrap());
    is_powerless(&store, &zombie).await;
    assert_eq!(store.claim(&heir).await.unwrap(), claimed(1));
    is_powerless(&store, &zombie).await;
    assert_eq!(store.complete(&heir.key, heir.token, ok()).await.unwrap(), Held::Yes);
}

/// Whether or not the key was claimed anew.
pub async fn a_holder_that_was_purged_changes_nothing<S: Subject>(subject: &S) {
    let store = subject.store();
    let (zombie, heir) = (claim("1"), claim("1"));
    store.claim(&zombie).await.unwrap();
    subject.elapse(LEASE + DAY + SLACK).await;
    assert_eq!(store.purge(10).await.unwrap(), 1);
    is_powerless(&store, &zombie).await;
    assert_eq!(store.claim(&heir).await.unwrap(), claimed(1));
    is_powerless(&store, &zombie).await;
    assert_eq!(store.complete(&heir.key, heir.token, ok()).await.unwrap(), Held::Yes);
}

/// Not even by the token that marked it done.
pub async fn a_done_key_cannot_fail<S: Subject>(subject: &S) {
    let store = subject.store();
    let first = claim("1");
    store.claim(&first).await.unwrap();
    store.complete(&first.key, first.token, ok()).await.unwrap();
    assert!(!store.fail(&first.key, first.token, DAY).await.unwrap(), "I2: done was undone");
    assert_eq!(store.renew(&[first]).await.unwrap(), [Held::Lost], "I2: done was renewed");
    let outcome = store.claim(&claim("1")).await.unwrap();
    assert_eq!(outcome, ClaimOutcome::done(Some(200)), "I2: done is final");
}

/// Also when it comes late, unless somebody took over.
pub async fn a_renewal_moves_the_lease_on_from_now<S: Subject>(subject: &S) {
    let store = subject.store();
    let first = claim("1");
    store.claim(&first).await.unwrap();
    for gone in [20, 20, 40, 59, 90] {
        subject.elapse(Duration::from_secs(gone)).await;
        assert_eq!(store.renew(std::slice::from_ref(&first)).await.unwrap(), [Held::Yes]);
        let record = store.show(&first.key).await.unwrap().unwrap();
        assert!(about(record.lease_left, LEASE), "{record:?}");
        assert_eq!(record.attempt, 1);
    }
    subject.elapse(LEASE - SLACK).await;
    assert!(is_in_progress(store.claim(&claim("1")).await.unwrap()), "I3: a live claim was lost");
    subject.elapse(2 * SLACK).await;
    assert_eq!(store.claim(&claim("1")).await.unwrap(), claimed(2));
}

/// A claim that is renewed for longer than its retention is still there.
pub async fn a_renewal_moves_the_retention_on<S: Subject>(subject: &S) {
    let store = subject.store();
    let first = claim("1");
    store.claim(&first).await.unwrap();
    for _ in 0..5 {
        subject.elapse(DAY / 2).await;
        assert_eq!(store.renew(std::slice::from_ref(&first)).await.unwrap(), [Held::Yes]);
    }
    let record = store.show(&first.key).await.unwrap().unwrap();
    assert!(about(record.retention_left, LEASE + DAY), "{record:?}");
    assert_eq!(store.purge(10).await.unwrap(), 0);
    assert!(is_in_progress(store.claim(&claim("1")).await.unwrap()));
}

/// Held, lost, unknown and repeated ones, in any order; none at all is fine.
pub async fn a_renewal_answers_each_claim_in_its_place<S: Subject>(subject: &S) {
    let store = subject.store();
    assert_eq!(store.renew(&[]).await.unwrap(), []);
    let (a, b, failed, done) = (claim("a"), claim("b"), claim("failed"), claim("done"));
    for each in [&a, &b, &failed, &done] {
        store.claim(each).await.unwrap();
    }
    store.fail(&failed.key, failed.token, DAY).await.unwrap();
    store.complete(&done.key, done.token, ok()).await.unwrap();
    let all = [b.clone(), claim("a"), done, a.clone(), claim("unknown"), failed, b, a];
    let (held, lost) = (Held::Yes, Held::Lost);
    let expected = [held, lost, lost, held, lost, lost, held, held];
    assert_eq!(store.renew(&all).await.unwrap(), expected);
}

/// Layers with different leases share a keeper.
pub async fn a_renewal_gives_each_claim_its_own_lease<S: Subject>(subject: &S) {
    let store = subject.store();
    let (mut short, mut long) = (claim("short"), claim("long"));
    short.lease = Duration::from_secs(30);
    long.lease = Duration::from_secs(300);
    let both = [long, short];
    for each in &both {
        store.claim(each).await.unwrap();
    }
    subject.elapse(Duration::from_secs(20)).await;
    store.renew(&both).await.unwrap();
    for each in &both {
        let record = store.show(&each.key).await.unwrap().unwrap();
        assert!(about(record.lease_left, each.lease), "{each:?}: {record:?}");
    }
}

/// And not before.
pub async fn a_done_key_is_new_when_its_retention_ends<S: Subject>(subject: &S) {
    let store = subject.store();
    let first = claim("1");
    store.claim(&first).await.unwrap();
    store.complete(&first.key, first.token, ok()).await.unwrap();
    subject.elapse(MONTH - SLACK).await;
    let outcome = store.claim(&claim("1")).await.unwrap();
    assert_eq!(outcome, ClaimOutcome::done(Some(200)), "I2: done is final");
    subject.elapse(2 * SLACK).await;
    assert_eq!(store.claim(&claim("1")).await.unwrap(), claimed(1));
    let record = store.show(&first.key).await.unwrap().unwrap();
    assert_eq!((record.state, record.response_status), (State::InProgress, None));
}

/// Its attempts are forgotten then.
pub async fn an_abandoned_key_is_new_when_its_retention_ends<S: Subject>(subject: &S) {
    let store = subject.store();
    store.claim(&claim("1")).await.unwrap();
    subject.elapse(LEASE + DAY - SLACK).await;
    assert_eq!(store.claim(&claim("1")).await.unwrap(), claimed(2));
    subject.elapse(LEASE + DAY + SLACK).await;
    assert_eq!(store.claim(&claim("1")).await.unwrap(), claimed(1));
}

/// Its attempts are forgotten then.
pub async fn a_failed_key_is_new_when_its_retention_ends<S: Subject>(subject: &S) {
    let store = subject.store();
    for (gone, attempt) in [(DAY - SLACK, 2), (DAY + SLACK, 1)] {
        let first = claim(&attempt.to_string());
        store.claim(&first).await.unwrap();
        store.fail(&first.key, first.token, DAY).await.unwrap();
        subject.elapse(gone).await;
        let outcome = store.claim(&claim(&attempt.to_string())).await.unwrap();
        assert_eq!(outcome, claimed(attempt));
    }
}

/// Whatever its state; and it is said whether there was one.
pub async fn a_forgotten_key_is_new<S: Subject>(subject: &S) {
    let store = subject.store();
    assert!(!store.forget(&event("1")).await.unwrap());
    for end in ["in progress", "failed", "done"] {
        let first = claim("1");
        assert_eq!(store.claim(&first).await.unwrap(), claimed(1));
        match end {
            "failed" => drop(store.fail(&first.key, first.token, DAY).await.unwrap()),
            "done" => drop(store.complete(&first.key, first.token, ok()).await.unwrap()),
            _ => {}
        }
        assert!(store.forget(&first.key).await.unwrap(), "{end}");
        assert!(!store.forget(&first.key).await.unwrap(), "{end}");
        assert_eq!(store.show(&first.key).await.unwrap(), None);
    }
    store.claim(&claim("1")).await.unwrap();
    subject.elapse(LEASE + DAY + SLACK).await;
    assert!(!store.forget(&event("1")).await.unwrap(), "past its retention there is none");
}

/// With what is left of its times.
pub async fn a_record_shows_each_state<S: Subject>(subject: &S) {
    let store = subject.store();
    let key = event("1");
    assert_eq!(store.show(&key).await.unwrap(), None);
    let first = claim("1");
    store.claim(&first).await.unwrap();
    let record = store.show(&key).await.unwrap().unwrap();
    assert_eq!(still(Some(record.clone())), Some((State::InProgress, 1, None)));
    assert!(about(record.lease_left, LEASE), "{record:?}");
    assert!(about(record.retention_left, LEASE + DAY), "{record:?}");
    subject.elapse(LEASE + SLACK).await;
    let record = store.show(&key).await.unwrap().unwrap();
    assert_eq!(record.lease_left, Duration::ZERO, "{record:?}");

    store.fail(&key, first.token, DAY).await.unwrap();
    let record = store.show(&key).await.unwrap().unwrap();
    assert_eq!(still(Some(record.clone())), Some((State::Failed, 1, None)));
    assert!(record.lease_left.is_zero() && about(record.retention_left, DAY), "{record:?}");

    let second = claim("1");
    store.claim(&second).await.unwrap();
    store.complete(&key, second.token, ok()).await.unwrap();
    let record = store.show(&key).await.unwrap().unwrap();
    assert_eq!(still(Some(record.clone())), Some((State::Done, 2, Some(200))));
    assert!(record.lease_left.is_zero() && about(record.retention_left, MONTH), "{record:?}");
    subject.elapse(MONTH + SLACK).await;
    assert_eq!(store.show(&key).await.unwrap(), None);
}

/// Live claims, fresh failures and done keys stay.
pub async fn a_purge_deletes_what_is_past_its_retention_and_no_more_than_its_limit<S: Subject>(
    subject: &S,
) {
    let store = subject.store();
    assert_eq!(store.purge(10).await.unwrap(), 0);
    for n in 0..5 {
        store.claim(&claim(&format!("old {n}"))).await.unwrap();
    }
    subject.elapse(LEASE + DAY + SLACK).await;
    let (done, failed) = (claim("done"), claim("failed"));
    for live in [&done, &failed, &claim("live")] {
        store.claim(live).await.unwrap();
    }
    store.complete(&done.key, done.token, ok()).await.unwrap();
    store.fail(&failed.key, failed.token, DAY).await.unwrap();

    assert_eq!(store.purge(0).await.unwrap(), 0);
    assert_eq!(store.purge(2).await.unwrap(), 2);
    assert_eq!(store.purge(2).await.unwrap(), 2);
    assert_eq!(store.purge(2).await.unwrap(), 1);
    assert_eq!(store.purge(2).await.unwrap(), 0);
    for kept in ["done", "failed", "live"] {
        assert!(store.show(&event(kept)).await.unwrap().is_some(), "{kept}");
    }
}

/// Whatever is done with the one.
pub async fn the_same_key_in_two_scopes_is_two_keys<S: Subject>(subject: &S) {
    let store = subject.store();
    let of = |scope: &str| {
        Claim::new(EventKey::new(Scope::new(scope).unwrap(), "1").unwrap(), LEASE, DAY)
    };
    let (a, b) = (of("a"), of("b"));
    assert_eq!(store.claim(&a).await.unwrap(), claimed(1));
    assert_eq!(store.claim(&b).await.unwrap(), claimed(1));
    store.complete(&a.key, a.token, ok()).await.unwrap();
    assert!(is_in_progress(store.claim(&of("b")).await.unwrap()));
    let stranger = Claim { token: a.token, ..b.clone() };
    is_powerless(&store, &stranger).await;
    assert!(store.forget(&a.key).await.unwrap());
    assert_eq!(store.complete(&b.key, b.token, ok()).await.unwrap(), Held::Yes);
}

/// No folding of case, no trimming, no normal forms, and nothing is taken for a command.
pub async fn keys_are_told_apart_byte_by_byte<S: Subject>(subject: &S) {
    let store = subject.store();
    let keys = [
        "a",
        "A",
        "a ",
        " a",
        "ä",
        "a\u{308}",
        "\u{212B}",
        "Å",
        "ß",
        "ss",
        "ﬁ",
        "fi",
        "1",
        "01",
        "1.0",
        "'",
        "\"",
        "\\",
        "%",
        "_",
        "$1",
        "';--",
        "'; DROP TABLE processed_events; --",
        "null",
        "NULL",
        "🦀",
        "\u{200B}",
        "{}",
        "a,b",
        "(a)",
        "\u{FEFF}a",
    ];
    for key in keys {
        assert_eq!(store.claim(&claim(key)).await.unwrap(), claimed(1), "{key:?}");
    }
    let mut all: Vec<_> = keys.iter().map(|key| claim(key)).collect();
    for each in &all {
        assert!(is_in_progress(store.claim(each).await.unwrap()), "{:?}", each.key);
    }
    all.push(claim("a  "));
    assert!(store.renew(&all).await.unwrap().iter().all(|held| *held == Held::Lost));
    for key in keys {
        assert!(store.forget(&event(key)).await.unwrap(), "{key:?}");
    }
}

/// 512 bytes in a scope of 255, of any characters.
pub async fn the_longest_keys_fit<S: Subject>(subject: &S) {
    let store = subject.store();
    // Bytes that do not compress, since an index may fit what compresses.
    let mut state = 88_172_645_463_325_252_u64;
    let noise: String = std::iter::from_fn(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        char::from_u32(0x4E00 + (state % 0x5000) as u32)
    })
    .take(170)
    .collect();
    let (scope, key) = (&noise[..255], format!("{noise}ab"));
    assert_eq!((scope.len(), key.len()), (255, 512));
    let longest = EventKey::new(Scope::new(scope).unwrap(), &key).unwrap();
    let first = Claim::new(longest.clone(), LEASE, DAY);
    assert_eq!(store.claim(&first).await.unwrap(), claimed(1));
    assert_eq!(store.renew(std::slice::from_ref(&first)).await.unwrap(), [Held::Yes]);
    assert_eq!(store.complete(&longest, first.token, ok()).await.unwrap(), Held::Yes);
    assert!(store.show(&longest).await.unwrap().is_some());
}

/// From a tenth of a second to ten years.
pub async fn long_times_and_short_ones_are_kept<S: Subject>(subject: &S) {
    let store = subject.store();
    let (short, long) = (Duration::from_millis(100), Duration::from_secs(24 * 60 * 60));
    let years = Duration::from_secs(3650 * 24 * 60 * 60);
    let brief = Claim::new(event("brief"), short, short);
    store.claim(&brief).await.unwrap();
    if let ClaimOutcome::InProgress { lease_left } = store.claim(&claim("brief")).await.unwrap() {
        assert!(lease_left <= short, "{lease_left:?}");
    }
    let lasting = Claim::new(event("lasting"), long, years);
    store.claim(&lasting).await.unwrap();
    let record = store.show(&lasting.key).await.unwrap().unwrap();
    assert!(about(record.lease_left, long), "{record:?}");
    assert!(about(record.retention_left, long + years), "{record:?}");
    store.complete(&lasting.key, lasting.token, Completion::new(None, years)).await.unwrap();
    let record = store.show(&lasting.key).await.unwrap().unwrap();
    assert!(about(record.retention_left, years), "{record:?}");
    // What no calendar has is as long as there is.
    let forever = Claim::new(event("forever"), Duration::MAX, Duration::MAX);
    assert_eq!(store.claim(&forever).await.unwrap(), claimed(1));
    assert!(is_in_progress(store.claim(&claim("forever")).await.unwrap()));
    let completion = Completion::new(None, Duration::MAX);
    let completed = store.complete(&forever.key, forever.token, completion).await.unwrap();
    assert_eq!(completed, Held::Yes);
}

/// A new key.
pub async fn of_many_claims_at_once_one_is_claimed<S: Subject>(subject: &S) {
    let store = subject.store();
    for key in ["1", "2", "3"] {
        assert_eq!(claimed_of_many(&store, key).await, [claimed(1)]);
    }
}

/// A key whose lease is over, and one that failed.
pub async fn of_many_takeovers_at_once_one_is_claimed<S: Subject>(subject: &S) {
    let store = subject.store();
    store.claim(&claim("over")).await.unwrap();
    subject.elapse(LEASE + SLACK).await;
    assert_eq!(claimed_of_many(&store, "over").await, [claimed(2)]);
    let failed = claim("failed");
    store.claim(&failed).await.unwrap();
    store.fail(&failed.key, failed.token, DAY).await.unwrap();
    assert_eq!(claimed_of_many(&store, "failed").await, [claimed(2)]);
}

/// Claims a key 32 times at once; gives the answers that are not "in progress".
async fn claimed_of_many(store: &impl ClaimStore, key: &str) -> Vec<ClaimOutcome> {
    let claims: Vec<_> = (0..32).map(|_| claim(key)).collect();
    let outcomes = at_once(claims.iter().map(|claim| store.claim(claim))).await;
    let outcomes = outcomes.into_iter().map(Result::unwrap);
    outcomes.filter(|outcome| !is_in_progress(outcome.clone())).collect()
}

/// Dropping a future does not undo it, and does not break the key either.
pub async fn a_claim_dropped_at_any_point_is_free_after_its_lease<S: Subject>(subject: &S) {
    let store = subject.store();
    for polls in 0..64 {
        let key = format!("dropped after {polls}");
        let dropped = claim(&key);
        let ended = {
            let mut asking = pin!(store.claim(&dropped));
            let mut left = polls;
            poll_fn(|cx| {
                if left == 0 {
                    return Poll::Ready(false);
                }
                left -= 1;
                asking.as_mut().poll(cx).map(|outcome| {
                    outcome.unwrap();
                    true
                })
            })
            .await
        };
        subject.elapse(LEASE + SLACK).await;
        let outcome = store.claim(&claim(&key)).await.unwrap();
        // What was sent may arrive a moment after the time has been moved.
        let free = matches!(outcome, ClaimOutcome::Claimed { attempt: 1 | 2 });
        if !free {
            subject.elapse(LEASE + SLACK).await;
            let outcome = store.claim(&claim(&key)).await.unwrap();
            assert!(matches!(outcome, ClaimOutcome::Claimed { .. }), "I5: {key}: {outcome:?}");
        }
        if ended {
            return;
        }
    }
}

/// They have one id and the same claims.
pub async fn clones_are_one_store<S: Subject>(subject: &S) {
    let store = subject.store();
    let clone = store.clone();
    assert_eq!(store.id(), clone.id());
    assert_eq!(store.id(), subject.store().id());
    let first = claim("1");
    store.claim(&first).await.unwrap();
    assert!(is_in_progress(clone.claim(&claim("1")).await.unwrap()));
    assert_eq!(clone.complete(&first.key, first.token, ok()).await.unwrap(), Held::Yes);
    assert_ne!(ClaimToken::random(), first.token);
}

/// A claim whose payload is known.
fn of(payload: u8, key: &str) -> Claim {
    claim(key).with_fingerprint(Some(PayloadHash::from([payload; 32])))
}

/// The key's holder, with this payload.
async fn held(store: &impl ClaimStore, payload: u8, key: &str) -> Claim {
    let holder = of(payload, key);
    assert!(matches!(store.claim(&holder).await.unwrap(), ClaimOutcome::Claimed { .. }));
    holder
}

/// Under way, abandoned and done, a key is its payload's; after a failure it is anybody's.
pub async fn a_key_belongs_to_one_payload_unless_it_has_failed<S: Subject>(subject: &S) {
    let store = subject.store();
    let refuses = async |key: &str| {
        for _ in 0..2 {
            let outcome = store.claim(&of(2, key)).await.unwrap();
            assert_eq!(outcome, ClaimOutcome::OtherPayload, "{key}");
        }
    };
    let alive = held(&store, 1, "alive").await;
    refuses("alive").await;
    assert!(is_in_progress(store.claim(&of(1, "alive")).await.unwrap()));
    // Asked again by its holder.
    assert_eq!(store.claim(&alive).await.unwrap(), claimed(1));

    let done = held(&store, 1, "done").await;
    assert_eq!(store.complete(&done.key, done.token, ok()).await.unwrap(), Held::Yes);
    refuses("done").await;
    assert_eq!(store.claim(&of(1, "done")).await.unwrap(), ClaimOutcome::done(Some(200)));
    refuses("done").await;

    let failed = held(&store, 1, "failed").await;
    assert!(store.fail(&failed.key, failed.token, DAY).await.unwrap());
    assert_eq!(store.claim(&of(2, "failed")).await.unwrap(), claimed(2));
    // It is the second payload's now.
    assert_eq!(store.claim(&of(1, "failed")).await.unwrap(), ClaimOutcome::OtherPayload);

    held(&store, 1, "abandoned").await;
    subject.elapse(LEASE + SLACK).await;
    refuses("abandoned").await;
    assert_eq!(store.claim(&of(1, "abandoned")).await.unwrap(), claimed(2));
}

/// Neither a claim nor a row without a payload is refused for it.
pub async fn what_says_nothing_of_its_payload_is_not_compared<S: Subject>(subject: &S) {
    let store = subject.store();
    let known = held(&store, 1, "known").await;
    assert!(is_in_progress(store.claim(&claim("known")).await.unwrap()));
    store.complete(&known.key, known.token, ok()).await.unwrap();
    assert_eq!(store.claim(&claim("known")).await.unwrap(), ClaimOutcome::done(Some(200)));

    let unknown = claim("unknown");
    store.claim(&unknown).await.unwrap();
    assert!(is_in_progress(store.claim(&of(1, "unknown")).await.unwrap()));
    store.complete(&unknown.key, unknown.token, ok()).await.unwrap();
    for payload in [1, 2] {
        let outcome = store.claim(&of(payload, "unknown")).await.unwrap();
        assert_eq!(outcome, ClaimOutcome::done(Some(200)));
    }
}

/// The payload is forgotten with the key.
pub async fn a_key_is_new_for_any_payload_when_its_retention_ends<S: Subject>(subject: &S) {
    let store = subject.store();
    let done = held(&store, 1, "1").await;
    store.complete(&done.key, done.token, ok()).await.unwrap();
    subject.elapse(MONTH + SLACK).await;
    assert_eq!(store.claim(&of(2, "1")).await.unwrap(), claimed(1));
    assert_eq!(store.claim(&of(1, "1")).await.unwrap(), ClaimOutcome::OtherPayload);
}

fn with_response(bytes: impl Into<Bytes>) -> Completion {
    ok().with_response(Some(bytes.into()))
}

fn done_with(bytes: impl Into<Bytes>) -> ClaimOutcome {
    ClaimOutcome::Done { status: Some(200), response: Some(bytes.into()) }
}

/// Of any length, and to nobody else.
pub async fn a_response_is_given_byte_for_byte_to_those_who_ask_for_it<S: Subject>(subject: &S) {
    let store = subject.store();
    let noise = |length: u32| (0..length).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8);
    for length in [0, 1, 255, 300 * 1024] {
        let (key, response) = (length.to_string(), noise(length).collect::<Bytes>());
        let holder = held(&store, 1, &key).await;
        let completion = with_response(response.clone());
        assert_eq!(store.complete(&holder.key, holder.token, completion).await.unwrap(), Held::Yes);
        // Asked again, as one whose reply was lost: the first stands.
        let other = with_response("other");
        assert_eq!(store.complete(&holder.key, holder.token, other).await.unwrap(), Held::Yes);
        for _ in 0..2 {
            let plain = store.claim(&claim(&key)).await.unwrap();
            assert_eq!(plain, ClaimOutcome::done(Some(200)), "{length}");
            let replay = store.claim(&of(1, &key).with_replay(true)).await.unwrap();
            assert_eq!(replay, done_with(response.clone()), "{length}");
            let stranger = store.claim(&of(2, &key).with_replay(true)).await.unwrap();
            assert_eq!(stranger, ClaimOutcome::OtherPayload, "{length}");
        }
    }
    let holder = held(&store, 1, "none").await;
    store.complete(&holder.key, holder.token, ok()).await.unwrap();
    let replay = store.claim(&claim("none").with_replay(true)).await.unwrap();
    assert_eq!(replay, ClaimOutcome::done(Some(200)));
}

/// Not once its retention is over, and not once its key was forgotten.
pub async fn a_response_of_an_earlier_life_is_not_given<S: Subject>(subject: &S) {
    let store = subject.store();
    for key in ["over", "forgotten"] {
        let holder = held(&store, 1, key).await;
        store.complete(&holder.key, holder.token, with_response("old")).await.unwrap();
    }
    let replaying = |key: &str| claim(key).with_replay(true);
    assert_eq!(store.claim(&replaying("over")).await.unwrap(), done_with("old"));
    assert_eq!(store.claim(&replaying("forgotten")).await.unwrap(), done_with("old"));
    assert!(store.forget(&event("forgotten")).await.unwrap());
    subject.elapse(MONTH + SLACK).await;
    for key in ["over", "forgotten"] {
        let holder = replaying(key);
        assert_eq!(store.claim(&holder).await.unwrap(), claimed(1));
        store.complete(&holder.key, holder.token, ok()).await.unwrap();
        let again = store.claim(&replaying(key)).await.unwrap();
        assert_eq!(again, ClaimOutcome::done(Some(200)), "{key}");
    }
}

/// Claims and done marks that are asked at once may go together; what they say stays apart.
pub async fn many_at_once_each_hear_of_their_own_payload_and_response<S: Subject>(subject: &S) {
    let store = subject.store();
    let key = |n: u8| format!("many {n}");
    let response = |n: u8| Bytes::from(vec![n; usize::from(n) * 50]);
    let holders: Vec<_> = (0..64).map(|n| of(n, &key(n))).collect();
    let outcomes = at_once(holders.iter().map(|holder| store.claim(holder))).await;
    assert!(outcomes.into_iter().all(|outcome| outcome.unwrap() == claimed(1)));
    let completions = holders.iter().zip(0..).map(|(holder, n)| {
        let completion = Completion::new(Some(200 + u16::from(n)), MONTH);
        let completion = completion.with_response((n % 3 > 0).then(|| response(n)));
        store.complete(&holder.key, holder.token, completion)
    });
    let marks = at_once(completions).await;
    assert!(marks.into_iter().all(|held| held.unwrap() == Held::Yes));

    // Each key four times: as itself and not, with its response and without.
    let asked: Vec<_> = (0..64)
        .flat_map(|n| {
            let both = [of(n, &key(n)), of(n + 1, &key(n))];
            both.into_iter().flat_map(|one| [one.clone().with_replay(true), one.with_replay(false)])
        })
        .collect();
    let outcomes = at_once(asked.iter().map(|claim| store.claim(claim))).await;
    for (at, outcome) in outcomes.into_iter().enumerate() {
        let n = (at / 4) as u8;
        let status = Some(200 + u16::from(n));
        let expected = match at % 4 {
            0 => ClaimOutcome::Done { status, response: (n % 3 > 0).then(|| response(n)) },
            1 => ClaimOutcome::done(status),
            _ => ClaimOutcome::OtherPayload,
        };
        assert_eq!(outcome.unwrap(), expected, "{at}");
    }

    // Of two payloads with one new key, one has it.
    let rivals: Vec<_> = (0..32).map(|n| of(n % 2, "one")).collect();
    let outcomes = at_once(rivals.iter().map(|claim| store.claim(claim))).await;
    let outcomes: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
    let winner = outcomes.iter().position(|outcome| *outcome == claimed(1)).unwrap();
    for (at, outcome) in outcomes.into_iter().enumerate() {
        if at % 2 != winner % 2 {
            // Where the first one's row is not committed yet, nobody can know what its payload is.
            let unknown = is_in_progress(outcome.clone());
            assert!(outcome == ClaimOutcome::OtherPayload || unknown, "{at}: {outcome:?}");
        } else if at != winner {
            assert!(is_in_progress(outcome), "{at}");
        }
    }
}

/// Polls all of these together; gives what they come to, in their order.
async fn at_once<F: Future>(all: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = all.map(|one| (Box::pin(one), None)).collect();
    poll_fn(|cx| {
        let mut pending = false;
        for (one, output) in all.iter_mut().filter(|(_, output)| output.is_none()) {
            match one.as_mut().poll(cx) {
                Poll::Ready(ready) => *output = Some(ready),
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    all.into_iter().filter_map(|(_, output)| output).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_case_is_left_out_of_the_list() {
        let source = include_str!("conformance.rs");
        let (_, after) = source.split_once("@each [$(#[$attribute])+] ($subject)").unwrap();
        let (list, _) = after.split_once('}').unwrap();
        let listed: Vec<_> = list.split_whitespace().collect();
        let written: Vec<_> = source
            .lines()
            .filter_map(|line| line.strip_prefix("pub async fn "))
            .filter_map(|line| line.split_once('<'))
            .map(|(name, _)| name)
            .collect();
        assert!(written.len() > 30);
        assert_eq!(listed, written);
    }
}
