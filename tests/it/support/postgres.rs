//! A Postgres server for the tests, and a schema of its own for each of them.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio_postgres::{Client, NoTls};
use tower_dedupe::{PgStore, store::PgStoreBuilder};

use super::throwaway::{Durability, Throwaway};

/// The server of all tests that need none of their own. It ends with this process.
pub fn shared() -> &'static Throwaway {
    static SHARED: OnceLock<Throwaway> = OnceLock::new();
    SHARED.get_or_init(|| start(Durability::Fast))
}

/// A server of the test's own, for tests that stop or kill it.
pub fn own() -> Throwaway {
    start(Durability::Durable)
}

/// The same for tests that look at nothing but its log.
pub fn own_fast() -> Throwaway {
    start(Durability::Fast)
}

fn start(durability: Durability) -> Throwaway {
    Throwaway::start(durability).unwrap_or_else(|error| panic!("{error}"))
}

/// A new schema on the shared server.
pub async fn schema() -> Schema {
    let url = tokio::task::spawn_blocking(|| shared().url()).await.unwrap();
    Schema::on(&url).await
}

/// A schema that no other test has.
#[derive(Debug)]
pub struct Schema {
    server: String,
    name: String,
    url: String,
}

impl Schema {
    /// A new schema on the server at the URL.
    pub async fn on(server: &str) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let schema = Self {
            server: server.to_owned(),
            url: format!("{server}?options=-c%20search_path%3D{name}"),
            name,
        };
        let create = format!("CREATE SCHEMA {}", schema.name);
        schema.client().await.batch_execute(&create).await.unwrap();
        schema
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server, with this schema first in the search path.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The server, with nothing said about schemas.
    pub fn bare_url(&self) -> &str {
        &self.server
    }

    /// The server as another user, whose password is its name.
    pub fn url_as(&self, user: &str) -> String {
        let (_, host) = self.server.rsplit_once('@').unwrap();
        format!("postgres://{user}:{user}@{host}")
    }

    /// Settings of a store in this schema, which asks the database each time: what tests do to the
    /// table shows at once.
    pub fn builder(&self) -> PgStoreBuilder {
        PgStore::builder().schema(&self.name).done_cache(0, Duration::ZERO)
    }

    /// A new store on a migrated table, with connections of its own.
    pub async fn store(&self) -> PgStore {
        let store = self.builder().connect(&self.server).await.unwrap();
        store.migrate().await.unwrap();
        store
    }

    /// A session that finds the tables without a schema's name.
    pub async fn client(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    /// Lets time go by for every row.
    pub async fn elapse(&self, by: Duration) {
        let by = by.as_millis() as i64;
        let shift = "UPDATE processed_events
                     SET claimed_at = claimed_at - $1 * interval '1 millisecond',
                         lease_until = lease_until - $1 * interval '1 millisecond',
                         done_at = done_at - $1 * interval '1 millisecond',
                         expires_at = expires_at - $1 * interval '1 millisecond'";
        let kind = tokio_postgres::types::Type::INT8;
        self.client().await.execute_typed(shift, &[(&by, kind)]).await.unwrap();
    }
}
