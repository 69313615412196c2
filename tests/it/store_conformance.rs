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
}

impl InPostgres {
    async fn new(named: bool, settings: &str) -> Self {
        let schema = postgres::schema().await;
        let url = format!("{}{settings}", schema.bare_url());
        let store = schema.builder().named_statements(named).connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        Self { schema, store }
    }
}

impl Subject for InPostgres {
    type Store = PgStore;

    fn store(&self) -> PgStore {
        self.store.clone()
    }

    async fn elapse(&self, by: Duration) {
        self.schema.elapse(by).await;
    }
}

mod in_postgres {
    use super::*;

    conformance_tests! {
        #[tokio::test]
        InPostgres::new(false, "").await
    }
}

mod in_postgres_with_named_statements {
    use super::*;

    conformance_tests! {
        #[tokio::test]
        InPostgres::new(true, "").await
    }
}

mod in_postgres_that_defaults_to_serializable {
    use super::*;

    conformance_tests! {
        #[tokio::test]
        InPostgres::new(false, "?options=-c%20default_transaction_isolation%3Dserializable").await
    }
}
