//! Lanes: what waits for a connection anyway is sent together.
//!
//! An operation that comes to an idle lane is sent at once, by its own plain statement. Those that
//! come while it is under way queue up, and the next statement carries all of them: no timer, and
//! no latency that was not there. The busier it gets, the more one round trip and one commit carry.
//! A second statement goes along when it would carry many, or when the first is late.

use std::{
    collections::{BTreeMap, VecDeque, btree_map::Entry},
    fmt::Debug,
    future::Future,
    marker::PhantomData,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::oneshot,
    time::{Instant, timeout_at},
};

use super::{
    Shared,
    operations::{End, LOCK_TIMEOUT, Look},
    session::{Cause, Failure},
};
use crate::{
    claim::EventKey,
    store::{StoreError, StoreErrorKind},
};

/// The lanes of a store.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    pub(super) looks: Lane<Look>,
    pub(super) ends: Lane<End>,
}

/// An operation that can be carried out alone or together with others of its kind.
pub(super) trait Operation: Clone + Debug + Send + Sync + 'static {
    /// What the caller gets.
    type Answer: Debug + Send + 'static;

    /// What the caller wants, for errors.
    const ATTEMPTED: &'static str;

    /// The lane that carries it.
    fn lane(shared: &Shared) -> &Lane<Self>;

    /// The key, of which a statement holds each at most once.
    fn key(&self) -> &EventKey;

    fn alone(
        &self,
        shared: &Shared,
        deadline: Instant,
    ) -> impl Future<Output = Result<Self::Answer, Failure>> + Send;

    /// What the answer is if it was this to the first of the same key; nothing if it must be asked
    /// for.
    fn following(&self, first: &Self, answer: &Self::Answer) -> Option<Self::Answer>;

    /// The bytes that it carries on top of a few hundred.
    fn weight(&self) -> usize {
        0
    }

    /// Answers in the order of `many`, which is sorted by key.
    fn together(
        many: &[Self],
        shared: &Shared,
        deadline: Instant,
    ) -> impl Future<Output = Result<Vec<Result<Self::Answer, Failure>>, Failure>> + Send;
}

/// The queue of one kind of operation.
#[derive(Debug)]
pub(super) struct Lane<O: Operation> {
    queue: Mutex<Queue<O>>,
}

#[derive(Debug)]
struct Queue<O: Operation> {
    waiting: VecDeque<Waiting<O>>,
    /// When each of the statements under way was sent.
    under_way: Vec<Instant>,
}

#[derive(Debug)]
struct Waiting<O: Operation> {
    operation: O,
    answer: oneshot::Sender<Result<O::Answer, Failure>>,
    /// Whether it may have been sent.
    sent: Arc<AtomicBool>,
    /// Those of the same key that wait for its fate.
    followers: Vec<Waiting<O>>,
}

impl<O: Operation> Default for Lane<O> {
    fn default() -> Self {
        Self { queue: Mutex::new(Queue { waiting: VecDeque::new(), under_way: Vec::new() }) }
    }
}

impl<O: Operation> Lane<O> {
    /// No code panics while it holds the lock, so a poisoned queue is a whole one.
    fn queue(&self) -> MutexGuard<'_, Queue<O>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<O: Operation> Queue<O> {
    /// Whether what comes now has to wait.
    fn is_busy(&self) -> bool {
        let in_time = self.under_way.iter().any(|sent| sent.elapsed() < PATIENCE);
        self.under_way.len() >= MAX_UNDER_WAY || in_time && self.waiting.len() < WORTH_A_SECOND
    }

    fn has_turn(&self) -> bool {
        !self.waiting.is_empty() && !self.is_busy()
    }

    fn begin(&mut self) -> Instant {
        let now = Instant::now();
        self.under_way.push(now);
        now
    }

    fn end(&mut self, sent: Instant) {
        if let Some(place) = self.under_way.iter().position(|one| *one == sent) {
            self.under_way.swap_remove(place);
        }
    }
}

/// Carries an operation out, alone or together with what else is waiting.
pub(super) async fn ask<O: Operation>(
    shared: &Arc<Shared>,
    operation: O,
    deadline: Instant,
) -> Result<O::Answer, Failure> {
    let failed = |kind, cause: Cause| {
        Failure::Failed(StoreError::new(kind, O::ATTEMPTED).with_source(cause))
    };
    match enter(shared, operation) {
        Entered::Alone(operation, _turn) => operation.alone(shared, deadline).await,
        Entered::Waits { sent, mut answered } => {
            let answered = loop {
                let late = Instant::now() + PATIENCE;
                match timeout_at(late.min(deadline), &mut answered).await {
                    Err(_) if late < deadline => {
                        if O::lane(shared).queue().has_turn() {
                            tokio::spawn(carry::<O>(shared.clone()));
                        }
                    }
                    answered => break answered,
                }
            };
            match answered {
                Ok(Ok(answer)) => answer,
                // Its time is over, or the runtime that carried it has shut down.
                _ if sent.load(Ordering::Acquire) => {
                    Err(failed(StoreErrorKind::Unknown, Cause::Silence))
                }
                _ => Err(failed(StoreErrorKind::Unavailable, Cause::NoConnection)),
            }
        }
        Entered::Full => Err(failed(StoreErrorKind::Unavailable, Cause::QueueFull(MAX_WAITING))),
    }
}

/// How an operation has entered its lane.
enum Entered<O: Operation> {
    /// Nothing was in its way.
    Alone(O, Turn<O>),
    Waits {
        sent: Arc<AtomicBool>,
        answered: oneshot::Receiver<Result<O::Answer, Failure>>,
    },
    Full,
}

fn enter<O: Operation>(shared: &Arc<Shared>, operation: O) -> Entered<O> {
    let mut queue = O::lane(shared).queue();
    if queue.waiting.len() >= MAX_WAITING {
        return Entered::Full;
    }
    if queue.waiting.is_empty() && !queue.is_busy() {
        let sent = Some(queue.begin());
        return Entered::Alone(operation, Turn { shared: shared.clone(), sent, of: PhantomData });
    }
    let (answer, answered) = oneshot::channel();
    let sent = Arc::new(AtomicBool::new(false));
    queue.waiting.push_back(Waiting {
        operation,
        answer,
        sent: sent.clone(),
        followers: Vec::new(),
    });
    let has_turn = queue.has_turn();
    drop(queue);
    if has_turn {
        tokio::spawn(carry::<O>(shared.clone()));
    }
    Entered::Waits { sent, answered }
}

/// The right to have one statement under way. When it ends, whatever way, those that wait have
/// their turn.
struct Turn<O: Operation> {
    shared: Arc<Shared>,
    /// When its statement was sent, while there is one.
    sent: Option<Instant>,
    of: PhantomData<fn(O)>,
}

impl<O: Operation> Turn<O> {
    /// Ends the statement before, and takes what the next one carries, if it is its turn.
    fn next_batch(&mut self) -> Option<Vec<Waiting<O>>> {
        let mut queue = O::lane(&self.shared).queue();
        if let Some(sent) = self.sent.take() {
            queue.end(sent);
        }
        if !queue.has_turn() {
            return None;
        }
        let batch = take_batch(&mut queue);
        if batch.is_empty() {
            // Their callers have all gone.
            return None;
        }
        self.sent = Some(queue.begin());
        Some(batch)
    }
}

impl<O: Operation> Drop for Turn<O> {
    fn drop(&mut self) {
        let Some(sent) = self.sent.take() else { return };
        let mut queue = O::lane(&self.shared).queue();
        queue.end(sent);
        let has_turn = queue.has_turn();
        drop(queue);
        if !has_turn {
            return;
        }
        // Without a runtime, or on one that shuts down, the next that enters carries them.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(carry::<O>(self.shared.clone()));
        }
    }
}

/// Sends what is waiting until nothing is. It takes its turn only now, since a runtime that shuts
/// down takes tasks and never runs them.
async fn carry<O: Operation>(shared: Arc<Shared>) {
    let mut turn = Turn::<O> { shared, sent: None, of: PhantomData };
    while let Some(batch) = turn.next_batch() {
        carry_out(&turn.shared, batch).await;
    }
}

/// Takes as many as fit into a statement, each key once: the second of a key waits for the fate of
/// the first. Sorted, so that two statements take their locks in the same order.
fn take_batch<O: Operation>(queue: &mut Queue<O>) -> Vec<Waiting<O>> {
    let mut batch = BTreeMap::<_, Waiting<O>>::new();
    let mut weight = 0;
    while batch.len() < MAX_TOGETHER && weight < HEAVY {
        let Some(waiting) = queue.waiting.pop_front() else { break };
        if waiting.answer.is_closed() {
            // Its caller has gone, and nothing was sent.
            continue;
        }
        match batch.entry(waiting.operation.key().clone()) {
            Entry::Occupied(mut first) => first.get_mut().followers.push(waiting),
            Entry::Vacant(place) => {
                weight += waiting.operation.weight();
                waiting.sent.store(true, Ordering::Release);
                place.insert(waiting);
            }
        }
    }
    batch.into_values().collect()
}

/// Sends a batch; in parts if one of it stands in the way of the others.
async fn carry_out<O: Operation>(shared: &Arc<Shared>, batch: Vec<Waiting<O>>) {
    let mut parts = vec![batch];
    while let Some(mut part) = parts.pop() {
        let deadline = shared.deadline();
        if part.len() == 1 {
            for one in part {
                let answer = one.operation.alone(shared, deadline).await;
                one.answer(shared, answer);
            }
            continue;
        }
        let operations: Vec<_> = part.iter().map(|one| one.operation.clone()).collect();
        match O::together(&operations, shared, deadline).await {
            Ok(answers) => {
                for (one, answer) in part.into_iter().zip(answers) {
                    one.answer(shared, answer);
                }
            }
            // One that waits for another transaction, or is refused, is found by halving, and
            // does not keep the others.
            Err(failure) if failure.may_be_of_one() => {
                let half = part.split_off(part.len() / 2);
                parts.push(half);
                parts.push(part);
            }
            Err(failure) => {
                for one in part {
                    one.answer(shared, Err(failure.clone()));
                }
            }
        }
    }
}

impl<O: Operation> Waiting<O> {
    /// Gives its caller the answer, and its followers theirs. Those for whom it says nothing are
    /// next.
    fn answer(self, shared: &Shared, answer: Result<O::Answer, Failure>) {
        for follower in self.followers.into_iter().rev() {
            let following = match &answer {
                Ok(answer) => follower.operation.following(&self.operation, answer).map(Ok),
                Err(failure) => Some(Err(failure.clone())),
            };
            match following {
                Some(answer) => drop(follower.answer.send(answer)),
                None => O::lane(shared).queue().waiting.push_front(follower),
            }
        }
        // Its caller may have gone.
        let _ = self.answer.send(answer);
    }
}

/// Statements of one kind under way at once.
const MAX_UNDER_WAY: usize = 2;
/// So many that wait are worth a second statement while the first is under way: measured at 64 and
/// 256 in flight on two cores, fewer cost more planning than they save waiting, and more leave the
/// server idle while the first is flushed.
const WORTH_A_SECOND: usize = 48;
/// When a statement is late, and does not keep others waiting any longer. No lock lasts longer.
const PATIENCE: Duration = LOCK_TIMEOUT;
/// Operations in one statement.
const MAX_TOGETHER: usize = 256;
/// Bytes after which a statement carries no more: with the last of them it stays below two megabytes
/// at the limits that the layer has by default.
const HEAVY: usize = 1024 * 1024;
/// Operations in the queue.
const MAX_WAITING: usize = 16_384;
