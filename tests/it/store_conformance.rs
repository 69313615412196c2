//! Both stores pass the same suite.

use std::time::Duration;

use tower_dedupe::{MemoryStore, PgStore, conformance_tests, testing::conformance::Subject};

use crate::support::postgres::{self, Schema};

struct InMemory(MemoryStore);

impl Subject for InMemory {
    type Store = MemoryStore;

    fn store(&self) -> MemoryStore {
        self.0.clone()
    }

    async fn elapse(&self, by: Duration) {
        tokio::time::advance(by).await;
    }
}

mod in_memory {
    use super::*;

    conformance_tests! {
        #[tokio::test(start_paused = true)]
        InMemory(MemoryStore::new())
    }
}

struct InPostgres {
    schema: Schema,
    store: PgStore,
    /// How long the store may answer from its cache.
    cached: Duration,
}

impl InPostgres {
    async fn new(named: bool, settings: &str, cached: Duration) -> Self {
        let schema = postgres::schema().await;
        let url = format!("{}{settings}", schema.bare_url());
        let builder = schema.builder().named_statements(named).done_cache(100, cached);
        let store = builder.connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        Self { schema, store, cached }
    }
}

impl Subject for InPostgres {
    type Store = PgStore;

    fn store(&self) -> PgStore {
        self.store.clone()
    }

    async fn elapse(&self, by: Duration) {
        self.schema.elapse(by).await;
        tokio::time::sleep(self.cached).await;
    }
}

mod in_postgres {
    use super::*;

    conformance_tests! {
        #[tokio::test]
        InPostgres::new(false, "", Duration::ZERO).await
    }
}

mod in_postgres_with_named_statements {
    use super::*;

    conformance_tests! {
        #[tokio::test]
        InPostgres::new(true, "", Duration::ZERO).await
    }
}

mod in_postgres_that_defaults_to_serializable {
    use super::*;

    conformance_tests! {
        #[tokio::test]
        InPostgres::new(
            false,
            "?options=-c%20default_transaction_isolation%3Dserializable",
            Duration::ZERO,
        ).await
    }
}

mod in_postgres_with_a_cache {
    use super::*;

    conformance_tests! {
        #[tokio::test]
        InPostgres::new(false, "", Duration::from_millis(100)).await
    }
}
