//! The ways to deduplicate that are compared.

use std::{future::Future, pin::Pin, time::Duration};

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use tokio_postgres::NoTls;
use tower_dedupe::{
    ClaimStore, EventKey, PgStore, Scope,
    claim::{Claim, ClaimOutcome, Held},
    store::Completion,
};

pub type Handled<'a> = Pin<Box<dyn Future<Output = bool> + Send + 'a>>;

/// What happens to an event, from its arrival to its end.
pub trait Contender: Send + Sync {
    /// Claims the event and marks it done if it was new, which is what it says.
    fn handle(&self, key: String) -> Handled<'_>;

    /// The same for one whose handler fails at first: it is freed, claimed again, and marked done.
    fn handle_at_the_second_attempt(&self, key: String) -> Handled<'_>;
}

/// What careful people write: claim by insert, mark done by update, delete on failure; statements
/// cached.
pub struct HandWritten(pub Pool);

impl HandWritten {
    pub const TABLE: &str = "CREATE TABLE hand_written (event_key text PRIMARY KEY,
                                 status text NOT NULL, claimed_at timestamptz NOT NULL)";
    const CLAIM: &str = "INSERT INTO hand_written (event_key, status, claimed_at)
                         VALUES ($1, 'in_progress', now()) ON CONFLICT DO NOTHING";
    const DONE: &str = "UPDATE hand_written SET status = 'done' WHERE event_key = $1";
    const FREE: &str = "DELETE FROM hand_written WHERE event_key = $1";
}

impl Contender for HandWritten {
    fn handle(&self, key: String) -> Handled<'_> {
        Box::pin(async move {
            execute(&self.0, Self::CLAIM, &key).await == 1
                && execute(&self.0, Self::DONE, &key).await == 1
        })
    }

    fn handle_at_the_second_attempt(&self, key: String) -> Handled<'_> {
        Box::pin(async move {
            assert_eq!(execute(&self.0, Self::CLAIM, &key).await, 1);
            assert_eq!(execute(&self.0, Self::FREE, &key).await, 1);
            self.handle(key).await
        })
    }
}

/// What is copied: one insert, and no done mark.
pub struct Copied(pub Pool);

impl Copied {
    pub const TABLE: &str = "CREATE TABLE copied (event_key text PRIMARY KEY)";
    const CLAIM: &str = "INSERT INTO copied (event_key) VALUES ($1) ON CONFLICT DO NOTHING";
}

impl Contender for Copied {
    fn handle(&self, key: String) -> Handled<'_> {
        Box::pin(async move { execute(&self.0, Self::CLAIM, &key).await == 1 })
    }

    /// It has lost the event by then.
    fn handle_at_the_second_attempt(&self, key: String) -> Handled<'_> {
        self.handle(key)
    }
}

/// The least that a duplicate can cost who asks the database.
pub struct Select(pub Pool);

impl Contender for Select {
    fn handle(&self, key: String) -> Handled<'_> {
        const SELECT: &str = "SELECT status FROM hand_written WHERE event_key = $1";
        Box::pin(async move {
            let client = self.0.get().await.unwrap();
            let select = client.prepare_cached(SELECT).await.unwrap();
            client.query_opt(&select, &[&key]).await.unwrap().is_none()
        })
    }

    fn handle_at_the_second_attempt(&self, key: String) -> Handled<'_> {
        self.handle(key)
    }
}

async fn execute(pool: &Pool, sql: &str, key: &str) -> u64 {
    let client = pool.get().await.unwrap();
    let statement = client.prepare_cached(sql).await.unwrap();
    client.execute(&statement, &[&key]).await.unwrap()
}

/// This crate's store.
pub struct Ours {
    pub store: PgStore,
    scope: Scope,
}

impl Ours {
    pub fn new(store: PgStore) -> Self {
        Self { store, scope: Scope::new("webhooks").unwrap() }
    }

    pub fn claim(&self, key: String) -> Claim {
        let key = EventKey::new(self.scope.clone(), key).unwrap();
        Claim::new(key, Duration::from_secs(60), Duration::from_secs(86_400))
    }

    pub async fn complete(&self, claim: &Claim) -> bool {
        let completion = Completion::new(Some(200), Duration::from_secs(30 * 86_400));
        self.store.complete(&claim.key, claim.token, completion).await.unwrap() == Held::Yes
    }
}

impl Contender for Ours {
    fn handle(&self, key: String) -> Handled<'_> {
        Box::pin(async move {
            let claim = self.claim(key);
            match self.store.claim(&claim).await.unwrap() {
                ClaimOutcome::Claimed { .. } => self.complete(&claim).await,
                _ => false,
            }
        })
    }

    fn handle_at_the_second_attempt(&self, key: String) -> Handled<'_> {
        Box::pin(async move {
            let claim = self.claim(key.clone());
            assert_eq!(
                self.store.claim(&claim).await.unwrap(),
                ClaimOutcome::Claimed { attempt: 1 }
            );
            let retention = Duration::from_secs(86_400);
            assert!(self.store.fail(&claim.key, claim.token, retention).await.unwrap());
            self.handle(key).await
        })
    }
}

pub fn pool(url: &str, size: usize) -> Pool {
    let config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(url.parse().unwrap(), NoTls, config);
    Pool::builder(manager).max_size(size).build().unwrap()
}
