//! The settings of a deduplicator, their defaults and their bounds.

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{Arc, LazyLock, OnceLock},
    time::Duration,
};

use super::{Deduplicator, Shared, drain::Flight};
use crate::{
    claim::{EventKey, TextError},
    key::Volatile,
    store::{ClaimStore, PgStore},
};

/// Sets a [`Deduplicator`] up.
///
/// ```
/// use std::time::Duration;
/// use tower_dedupe::{Deduplicator, MemoryStore};
///
/// let dedupe = Deduplicator::builder(MemoryStore::new())
///     .lease(Duration::from_secs(30))
///     .max_hold(Duration::from_secs(300))
///     .build()?;
/// # Ok::<(), tower_dedupe::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct DeduplicatorBuilder<St: ?Sized = PgStore> {
    store: Arc<St>,
    settings: Settings,
    flight: Arc<Flight>,
}

impl<St: ?Sized> Clone for DeduplicatorBuilder<St> {
    fn clone(&self) -> Self {
        Self { store: self.store.clone(), settings: self.settings, flight: self.flight.clone() }
    }
}

impl<St: ?Sized> DeduplicatorBuilder<St> {
    pub(crate) fn store(&self) -> &St {
        &self.store
    }
}

impl<St: ClaimStore> DeduplicatorBuilder<St> {
    pub(crate) fn new(store: St) -> Self {
        Self {
            store: Arc::new(store),
            settings: Settings::default(),
            flight: Arc::new(Flight::new(DEFAULT_MAX_IN_FLIGHT)),
        }
    }

    /// How long a claim outlives a holder that died: until then deliveries of the event are told to
    /// come back, after that the next one takes over. Default 60 s; 100 ms to 24 h.
    ///
    /// It need not cover the handler, whose claim is renewed every third of a lease. It should
    /// cover the longest time for which the process may stand still (a paused container, a blocked
    /// runtime): a holder that stands still for longer may be overtaken.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// How long a handler may hold a claim by renewal. Default 15 min; at least a lease, at most
    /// 30 days.
    ///
    /// After that the claim is no longer renewed, so that a hung handler cannot hold its key for
    /// ever: one lease later the next delivery takes over. The handler itself is not stopped.
    #[must_use]
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.settings.max_hold = max_hold;
        self
    }

    /// How long a done key is remembered. Default 30 days; at least a lease, at most 100 years.
    ///
    /// A delivery that comes later runs again, so it must outlast the sender's retries (7 days for
    /// most, 30 for some) and the redeliveries that people ask for by hand.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.settings.retention = retention;
        self
    }

    /// How long the row of a failed or abandoned claim is kept, which is how long its attempts are
    /// counted. Default 1 day; at most 100 years.
    #[must_use]
    pub fn abandoned_retention(mut self, retention: Duration) -> Self {
        self.settings.abandoned_retention = retention;
        self
    }

    /// How long an answer may wait for its key to be marked done while the store is in trouble.
    /// Default 5 s; at most 1 h.
    ///
    /// After that the handler's own answer is given all the same, an error event is logged, and the
    /// mark is tried on in the background for the length of a lease.
    #[must_use]
    pub fn settle_timeout(mut self, settle_timeout: Duration) -> Self {
        self.settings.settle_timeout = settle_timeout;
        self
    }

    /// Whether the work runs on a task of its own. Default true.
    ///
    /// Detached, a sender that hangs up does not cut the handler in two: it ends and is marked
    /// done, and the retry is a duplicate. Task-local values do not carry over; the current
    /// [`tracing::Span`] does.
    ///
    /// With `false` the work runs inside the caller's future: dropping that frees the key at once,
    /// **and the retry runs the handler again, after what its first run had already done**.
    #[must_use]
    pub fn detached(mut self, detached: bool) -> Self {
        self.settings.detached = detached;
        self
    }

    /// How many deliveries may be in flight. Default 1,024; 1 to 1,000,000.
    ///
    /// One is in flight from before its claim until its claim is settled, whether or not its sender
    /// still waits. What comes on top is turned away before any claim.
    #[must_use]
    pub fn max_in_flight(mut self, max_in_flight: u32) -> Self {
        self.flight = Arc::new(Flight::new(max_in_flight));
        self
    }

    /// What a holder does that learns that its lease was lost. Default [`LeaseLost::Continue`].
    #[must_use]
    pub fn lease_lost(mut self, lease_lost: LeaseLost) -> Self {
        self.settings.lease_lost = lease_lost;
        self
    }

    /// Shows event keys in logs as a hash, for keys that are personal data. Without it, logs show
    /// the first 12 characters.
    #[must_use]
    pub fn redact_keys(mut self) -> Self {
        self.settings.redact_keys = true;
        self
    }

    /// Checks the settings and makes the deduplicator.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the setting that is out of its bounds.
    pub fn build(&self) -> Result<Deduplicator<St>, ConfigError> {
        let Settings { lease, max_hold, retention, abandoned_retention, settle_timeout, .. } =
            self.settings;
        within("lease", lease, MIN_LEASE, MAX_LEASE)?;
        within("max_hold", max_hold, lease, MAX_MAX_HOLD)?;
        within("retention", retention, lease, MAX_RETENTION)?;
        within("abandoned_retention", abandoned_retention, Duration::ZERO, MAX_RETENTION)?;
        within("settle_timeout", settle_timeout, Duration::ZERO, MAX_SETTLE_TIMEOUT)?;
        if !(1..=MAX_MAX_IN_FLIGHT).contains(&self.flight.max()) {
            return Err(ConfigError::MaxInFlight { given: self.flight.max() });
        }
        Ok(self.clone().into_checked())
    }

    /// The deduplicator of settings that are known to be within their bounds.
    pub(super) fn into_checked(self) -> Deduplicator<St> {
        let Self { store, settings, flight } = self;
        let keeper = OnceLock::new();
        let shared = Shared { store: store.clone(), settings, flight, keeper };
        Deduplicator { store, shared: Arc::new(shared) }
    }
}

/// What a holder does that learns, by a renewal, that its claim was taken over. Either way it is
/// logged, and its completion changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseLost {
    /// The handler goes on: stopped in the middle, it may leave more harm behind than two full
    /// runs.
    #[default]
    Continue,
    /// The handler is dropped at its next `.await`.
    Cancel,
}

/// A setting that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A time is out of its bounds.
    Time {
        /// The setting.
        setting: &'static str,
        /// What was given.
        given: Duration,
        /// The least it can be.
        min: Duration,
        /// The most it can be.
        max: Duration,
    },
    /// `max_in_flight` is 0 or above 1,000,000.
    MaxInFlight {
        /// What was given.
        given: u32,
    },
    /// The scope is empty, too long, or has a control character.
    Scope(TextError),
    /// The key source changes with each attempt, so that nothing would ever be a duplicate.
    Volatile(Volatile),
    /// A status for duplicates that is no success would make senders retry for ever.
    DuplicateStatus {
        /// What was given.
        given: u16,
    },
    /// A status that cannot be remembered: no 4xx, or one that says to come back.
    Remember {
        /// What was given.
        given: u16,
    },
    /// What was given as the documentation's address is no `http` or `https` URL.
    Documentation {
        /// What was given.
        given: String,
    },
    /// A handler that is given a transaction cannot run while the database is away.
    PassThroughInTransaction,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time { setting, given, min, max } => {
                write!(f, "{setting} is {given:?}, it must be {min:?} to {max:?}")
            }
            Self::MaxInFlight { given } => {
                write!(f, "max_in_flight is {given}, it must be 1 to {MAX_MAX_IN_FLIGHT}")
            }
            Self::Scope(error) => write!(f, "the scope {error}"),
            Self::Volatile(volatile) => {
                write!(f, "{volatile}; if it is right here, say allow_volatile()")
            }
            Self::DuplicateStatus { given } => write!(
                f,
                "duplicates would be answered with {given}, which is no success: senders would \
                 retry for ever",
            ),
            Self::Remember { given } => write!(
                f,
                "answers of {given} cannot be remembered: only 4xx can, but for 408, 425 and 429, \
                 which say to come back",
            ),
            Self::Documentation { given } => write!(
                f,
                "{given:?} is no address of documentation: it must be a whole URL, such as \
                 https://api.example.com/docs/idempotency",
            ),
            Self::PassThroughInTransaction => f.write_str(
                "store_down is PassThrough and the layer is transactional: without the database \
                 the handler has no transaction; leave it at Reject",
            ),
        }
    }
}

impl std::error::Error for ConfigError {}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) lease: Duration,
    pub(crate) max_hold: Duration,
    pub(crate) retention: Duration,
    pub(crate) abandoned_retention: Duration,
    pub(crate) settle_timeout: Duration,
    pub(super) detached: bool,
    pub(super) lease_lost: LeaseLost,
    redact_keys: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(60),
            max_hold: Duration::from_secs(15 * 60),
            retention: 30 * DAY,
            abandoned_retention: DAY,
            settle_timeout: Duration::from_secs(5),
            detached: true,
            lease_lost: LeaseLost::Continue,
            redact_keys: false,
        }
    }
}

impl Settings {
    pub(crate) fn shown<'a>(&self, key: &'a EventKey) -> Shown<'a> {
        Shown { key, redacted: self.redact_keys }
    }

    pub(super) fn redacts_keys(&self) -> bool {
        self.redact_keys
    }
}

/// A key as logs show it: key and scope shortened, since a scope may be a path with anything in
/// it; or hashed together.
pub(crate) struct Shown<'a> {
    pub(super) key: &'a EventKey,
    pub(super) redacted: bool,
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.redacted {
            // The secret is this process's own: nobody can find a key by hashing guesses.
            static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::new);
            write!(f, "#{:016x}", SECRET.hash_one(self.key))
        } else {
            fmt::Debug::fmt(self.key, f)
        }
    }
}

pub(crate) fn within(
    setting: &'static str,
    given: Duration,
    min: Duration,
    max: Duration,
) -> Result<(), ConfigError> {
    if (min..=max).contains(&given) {
        Ok(())
    } else {
        Err(ConfigError::Time { setting, given, min, max })
    }
}

const DEFAULT_MAX_IN_FLIGHT: u32 = 1_024;
const MAX_MAX_IN_FLIGHT: u32 = 1_000_000;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const MIN_LEASE: Duration = Duration::from_millis(100);
const MAX_LEASE: Duration = DAY;
const MAX_MAX_HOLD: Duration = Duration::from_secs(30 * 24 * 60 * 60);
const MAX_RETENTION: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
const MAX_SETTLE_TIMEOUT: Duration = Duration::from_secs(60 * 60);
