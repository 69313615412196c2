//! The bound on deliveries in flight, and the way to wait for their end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::timeout,
};

/// Everything that is in flight: each delivery holds one permit from before its claim is sent until
/// its claim is settled, in the background too.
#[derive(Debug)]
pub(super) struct Flight {
    permits: Arc<Semaphore>,
    max: u32,
    closed: AtomicBool,
    cut: watch::Sender<bool>,
}

impl Flight {
    pub(super) fn new(max: u32) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(max as usize)),
            max,
            closed: AtomicBool::new(false),
            cut: watch::Sender::new(false),
        }
    }

    pub(super) fn max(&self) -> u32 {
        self.max
    }

    /// A place in flight, unless all are taken or the drain has begun.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Permit> {
        if self.closed.load(Ordering::Relaxed) {
            return None;
        }
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        Some(Permit { _permit: permit, flight: self.clone() })
    }

    /// See [`Deduplicator::drain`](super::Deduplicator::drain).
    pub(super) async fn drain(&self, patience: Duration, settle_timeout: Duration) -> usize {
        self.closed.store(true, Ordering::Relaxed);
        if self.all_ended(patience).await {
            return 0;
        }
        let running = self.max as usize - self.permits.available_permits();
        self.cut.send_replace(true);
        self.all_ended(settle_timeout).await;
        running
    }

    /// Nothing is in flight when all permits can be had.
    async fn all_ended(&self, patience: Duration) -> bool {
        timeout(patience, self.permits.acquire_many(self.max)).await.is_ok()
    }
}

/// One delivery's place in flight.
#[derive(Debug)]
pub(crate) struct Permit {
    _permit: OwnedSemaphorePermit,
    flight: Arc<Flight>,
}

impl Permit {
    /// Ends when the drain has lost its patience.
    pub(crate) async fn cut(&self) {
        // The sender is there for as long as this is.
        let _ = self.flight.cut.subscribe().wait_for(|cut| *cut).await;
    }
}
