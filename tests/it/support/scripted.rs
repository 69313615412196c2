//! A store that does what a test tells it to: fail, lose a reply, wait, and count.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::sync::{Semaphore, watch};
use tower_dedupe::{
    ClaimStore, EventKey, MemoryStore, StoreError,
    claim::{Claim, ClaimOutcome, ClaimToken, Held},
    store::{Completion, Record, StoreErrorKind, StoreFuture, StoreId},
};

/// The calls that can be scripted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    Claim,
    Complete,
    Fail,
    Renew,
}

/// What happens to one call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It is not carried out.
    Refuse(StoreErrorKind),
    /// It is carried out, and its reply is lost.
    LoseReply,
    /// It is carried out once the gate has a permit.
    Behind(Arc<Semaphore>),
    /// It is carried out, and answered once the gate has a permit.
    AnswerBehind(Arc<Semaphore>),
    /// It panics.
    Panic,
}

/// A [`MemoryStore`] under a script.
#[derive(Clone, Debug)]
pub struct Scripted {
    inner: MemoryStore,
    script: Arc<Script>,
}

#[derive(Debug)]
struct Script {
    faults: Mutex<HashMap<Call, VecDeque<Fault>>>,
    always: Mutex<HashMap<Call, Fault>>,
    renewals: Mutex<Vec<usize>>,
    calls: watch::Sender<HashMap<Call, usize>>,
}

impl Scripted {
    pub fn new() -> Self {
        let script = Script {
            faults: Mutex::default(),
            always: Mutex::default(),
            renewals: Mutex::default(),
            calls: watch::Sender::default(),
        };
        Self { inner: MemoryStore::new(), script: Arc::new(script) }
    }

    /// The store underneath.
    pub fn inner(&self) -> &MemoryStore {
        &self.inner
    }

    /// Lets the next calls of a kind meet these faults, in order.
    pub fn next(&self, call: Call, faults: impl IntoIterator<Item = Fault>) {
        self.script.faults.lock().unwrap().entry(call).or_default().extend(faults);
    }

    /// Lets every call of a kind meet this fault from now on.
    pub fn always(&self, call: Call, fault: impl Into<Option<Fault>>) {
        let mut always = self.script.always.lock().unwrap();
        match fault.into() {
            Some(fault) => always.insert(call, fault),
            None => always.remove(&call),
        };
    }

    /// How many calls of a kind have begun.
    pub fn calls(&self, call: Call) -> usize {
        self.script.calls.borrow().get(&call).copied().unwrap_or(0)
    }

    /// Waits until that many calls of a kind have begun.
    pub async fn has_been_called(&self, call: Call, times: usize) {
        let mut calls = self.script.calls.subscribe();
        let enough = |calls: &HashMap<Call, usize>| calls.get(&call).is_some_and(|n| *n >= times);
        calls.wait_for(enough).await.expect("the store outlives its users");
    }

    /// How many claims each renewal carried.
    pub fn renewals(&self) -> Vec<usize> {
        self.script.renewals.lock().unwrap().clone()
    }

    fn begin(&self, call: Call) -> Option<Fault> {
        self.script.calls.send_modify(|calls| *calls.entry(call).or_default() += 1);
        let next = self.script.faults.lock().unwrap().get_mut(&call).and_then(VecDeque::pop_front);
        next.or_else(|| self.script.always.lock().unwrap().get(&call).cloned())
    }

    async fn meet<T>(
        &self,
        call: Call,
        carry_out: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        match self.begin(call) {
            None => carry_out.await,
            Some(Fault::Refuse(kind)) => Err(StoreError::new(kind, "do as the test says")),
            Some(Fault::LoseReply) => {
                carry_out.await?;
                Err(StoreError::new(StoreErrorKind::Unknown, "hear the reply"))
            }
            Some(Fault::Behind(gate)) => {
                let _pass = gate.acquire().await.expect("gates stay open");
                carry_out.await
            }
            Some(Fault::AnswerBehind(gate)) => {
                let answer = carry_out.await;
                let _pass = gate.acquire().await.expect("gates stay open");
                answer
            }
            Some(Fault::Panic) => panic!("the store panics, as the test says"),
        }
    }
}

impl ClaimStore for Scripted {
    fn id(&self) -> StoreId {
        self.inner.id()
    }

    fn claim<'a>(&'a self, claim: &'a Claim) -> StoreFuture<'a, ClaimOutcome> {
        Box::pin(self.meet(Call::Claim, self.inner.claim(claim)))
    }

    fn complete<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        completion: Completion,
    ) -> StoreFuture<'a, Held> {
        Box::pin(self.meet(Call::Complete, self.inner.complete(key, token, completion)))
    }

    fn fail<'a>(
        &'a self,
        key: &'a EventKey,
        token: ClaimToken,
        retention: Duration,
    ) -> StoreFuture<'a, bool> {
        Box::pin(self.meet(Call::Fail, self.inner.fail(key, token, retention)))
    }

    fn renew<'a>(&'a self, claims: &'a [Claim]) -> StoreFuture<'a, Vec<Held>> {
        self.script.renewals.lock().unwrap().push(claims.len());
        Box::pin(self.meet(Call::Renew, self.inner.renew(claims)))
    }

    fn forget<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, bool> {
        self.inner.forget(key)
    }

    fn show<'a>(&'a self, key: &'a EventKey) -> StoreFuture<'a, Option<Record>> {
        self.inner.show(key)
    }

    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        self.inner.purge(limit)
    }
}
