//! Making the table, and adopting one that was there.

use std::time::Duration;

use tokio::task::JoinSet;
use tower_dedupe::{
    ClaimStore, EventKey, PgStore, Scope,
    claim::{Claim, ClaimOutcome, Held, PayloadHash, State},
    store::{Completion, StoreErrorKind},
};

use crate::support::{
    claims::whole,
    postgres::{self, Schema},
};

fn event(scope: &str, key: &str) -> EventKey {
    EventKey::new(Scope::new(scope).unwrap(), key).unwrap()
}

fn claim(key: EventKey) -> Claim {
    Claim::new(key, Duration::from_secs(60), Duration::from_secs(60))
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_replicas_that_start_together_make_one_table() {
    let db = postgres::schema().await;
    let mut stores = Vec::new();
    for _ in 0..20 {
        // Connected, so that they are at the table together.
        stores.push(db.builder().connect(db.url()).await.unwrap());
    }
    let mut replicas = JoinSet::new();
    for store in stores {
        replicas.spawn(async move { store.migrate().await.map(|()| store) });
    }
    let migrated = replicas.join_all().await;
    let stores: Vec<_> = migrated.into_iter().map(Result::unwrap).collect();
    let store = &stores[0];
    store.migrate().await.unwrap();
    let versions = "SELECT array_agg(version ORDER BY version) FROM processed_events_migrations";
    let row = db.client().await.query_one(versions, &[]).await.unwrap();
    assert_eq!(row.get::<_, Vec<i32>>(0), [1, 2]);
    assert!(store.claim(&claim(event("s", "1"))).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_printed_sql_makes_the_same_table() {
    let (by_hand, by_us) = (postgres::schema().await, postgres::schema().await);
    let store = by_hand.builder().connect(by_hand.url()).await.unwrap();
    let client = by_hand.client().await;
    client.batch_execute(&store.migration_sql()).await.unwrap();
    client.batch_execute(&store.migration_sql()).await.unwrap();
    by_us.store().await;
    assert_eq!(columns(&by_hand).await, columns(&by_us).await);
    store.migrate().await.unwrap();
    assert!(store.claim(&claim(event("s", "1"))).await.is_ok());
}

async fn columns(db: &Schema) -> Vec<(String, String, String)> {
    let sql = "SELECT column_name::text, data_type::text,
                      is_nullable || coalesce(collation_name::text, '')
               FROM information_schema.columns
               WHERE table_schema = current_schema() AND table_name = 'processed_events'
               ORDER BY ordinal_position";
    let rows = db.client().await.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_need_quoting_are_quoted() {
    let db = postgres::schema().await;
    let schema = format!("{}'s \"own\" \\ schema", db.name());
    let store = db.builder().schema(&schema).table("SELECT").connect(db.url()).await.unwrap();
    store.migrate().await.unwrap();
    store.migrate().await.unwrap();
    let first = claim(event("s", "1"));
    assert_eq!(store.claim(&first).await.unwrap(), ClaimOutcome::Claimed { attempt: 1 });

    for table in ["", "a\nb", "a\0b", &"x".repeat(53), "a$tower_dedupe$b"] {
        let refused = db.builder().table(table).connect_lazy(db.url()).unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Config, "{table:?}");
        assert!(whole(&refused).contains("the table name "), "{}", whole(&refused));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_copied_patterns_table_is_adopted_with_every_row() {
    let db = postgres::schema().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE TABLE processed_events (
                 event_key  varchar(200) PRIMARY KEY,
                 status     varchar(20) NOT NULL DEFAULT 'in_progress'
                            CHECK (status IN ('in_progress', 'done', 'PROCESSED', 'failed')),
                 claimed_at timestamp NOT NULL DEFAULT now(),
                 note       text
             );
             CREATE UNIQUE INDEX ON processed_events (lower(event_key));
             INSERT INTO processed_events VALUES
                 ('done', 'done', now() - interval '90 days', 'a note'),
                 ('processed', 'PROCESSED', now(), NULL),
                 ('running', 'in_progress', now(), NULL),
                 ('abandoned', 'in_progress', now() - interval '1 hour', NULL),
                 ('failed', 'failed', now(), NULL)",
        )
        .await
        .unwrap();
    let scope = Scope::new("stripe").unwrap();
    let store = db.builder().adopt_scope(scope).connect(db.url()).await.unwrap();
    store.migrate().await.unwrap();
    store.migrate().await.unwrap();

    let ask = async |key: &str| store.claim(&claim(event("stripe", key))).await.unwrap();
    assert_eq!(ask("done").await, ClaimOutcome::done(None));
    assert_eq!(ask("processed").await, ClaimOutcome::done(None));
    assert!(matches!(ask("running").await, ClaimOutcome::InProgress { .. }));
    assert_eq!(ask("abandoned").await, ClaimOutcome::Claimed { attempt: 2 });
    assert_eq!(ask("failed").await, ClaimOutcome::Claimed { attempt: 2 });
    // The key is unique in its scope now, and no longer by itself.
    assert_eq!(
        store.claim(&claim(event("other", "done"))).await.unwrap(),
        ClaimOutcome::Claimed { attempt: 1 }
    );
    let record = store.show(&event("stripe", "done")).await.unwrap().unwrap();
    assert_eq!(record.state, State::Done);
    assert!(record.retention_left > Duration::from_secs(29 * 24 * 60 * 60), "{record:?}");
    let note = "SELECT note FROM processed_events WHERE event_key = 'done' AND scope = 'stripe'";
    let note: String = client.query_one(note, &[]).await.unwrap().get(0);
    assert_eq!(note, "a note");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_cannot_be_adopted_is_left_as_it_is() {
    let cases = [
        ("(event_key text, status text)", "", "has no column claimed_at"),
        ("(id int)", "", "has no column event_key, status, claimed_at"),
        (
            "(event_key text, status text, claimed_at timestamptz, token text)",
            "",
            "cannot be adopted with its columns token",
        ),
        (
            "(event_key text, status text, claimed_at timestamptz, tenant int NOT NULL)",
            "",
            "cannot be adopted with its columns tenant",
        ),
        ("(event_key bytea, status text, claimed_at timestamptz)", "", "of type bytea"),
        (
            "(event_key text, status text, claimed_at timestamptz)",
            "('a', 'done', now()), ('b', 'maybe', now()), ('c', NULL, now())",
            "status 'maybe', null, which",
        ),
        (
            "(event_key text, status text, claimed_at timestamptz)",
            "(NULL, 'done', now())",
            "event_key is null",
        ),
    ];
    for (columns_of_table, rows, fault) in cases {
        let db = postgres::schema().await;
        let client = db.client().await;
        client
            .batch_execute(&format!("CREATE TABLE processed_events {columns_of_table}"))
            .await
            .unwrap();
        if !rows.is_empty() {
            let insert = format!("INSERT INTO processed_events VALUES {rows}");
            client.batch_execute(&insert).await.unwrap();
        }
        let contents = "SELECT array_agg(t::text ORDER BY t::text) FROM processed_events AS t";
        let before: Option<Vec<String>> = client.query_one(contents, &[]).await.unwrap().get(0);
        let columns_before = columns(&db).await;

        let store = db.builder().connect(db.url()).await.unwrap();
        let refused = store.migrate().await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Schema);
        assert!(whole(&refused).contains(fault), "{fault:?} is not in {:?}", whole(&refused));
        assert_eq!(columns(&db).await, columns_before);
        let after: Option<Vec<String>> = client.query_one(contents, &[]).await.unwrap().get(0);
        assert_eq!(after, before);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_a_newer_version_is_refused() {
    let db = postgres::schema().await;
    let store = db.store().await;
    let newer = "INSERT INTO processed_events_migrations (version) VALUES (99)";
    db.client().await.batch_execute(newer).await.unwrap();
    let refused = store.migrate().await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Schema);
    assert!(whole(&refused).contains("is of version 99"), "{}", whole(&refused));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_store_every_key_is_refused() {
    let db = postgres::schema().await;
    let name = format!("latin_{}", db.name());
    let create = format!("CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0");
    db.client().await.batch_execute(&create).await.unwrap();
    let (server, _) = db.bare_url().rsplit_once('/').unwrap();
    let store = PgStore::connect(&format!("{server}/{name}")).await.unwrap();
    let refused = store.migrate().await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Schema);
    assert!(whole(&refused).contains("is encoded in LATIN1"), "{}", whole(&refused));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_without_the_right_to_create_can_migrate_what_is_there() {
    let db = postgres::schema().await;
    db.store().await;
    let role = format!("app_{}", db.name());
    db.client()
        .await
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD '{role}';
             GRANT USAGE ON SCHEMA {schema} TO {role};
             GRANT SELECT, INSERT, UPDATE, DELETE ON processed_events TO {role};
             GRANT SELECT ON processed_events_migrations TO {role}",
            schema = db.name(),
        ))
        .await
        .unwrap();
    let url = db.url_as(&role);
    let store: PgStore = db.builder().connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    assert!(store.claim(&claim(event("s", "1"))).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_table_is_said_to_be_missing_and_requests_never_make_it() {
    let db = postgres::schema().await;
    let store = db.builder().connect(db.url()).await.unwrap();
    let error = store.claim(&claim(event("s", "1"))).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(error.to_string().contains("run migrate()"), "{error}");
    assert_eq!(columns(&db).await, []);
}

/// The table as version 1 made it, and statements of a process of that version.
const VERSION_1: &str = "
    CREATE TABLE processed_events_migrations (
        version int4 PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());
    INSERT INTO processed_events_migrations (version) VALUES (1);
    CREATE TABLE processed_events (
        scope text COLLATE \"C\" NOT NULL, event_key text COLLATE \"C\" NOT NULL,
        status text NOT NULL CHECK (status IN ('in_progress', 'done', 'failed')),
        token bytea, attempt int4 NOT NULL, claimed_at timestamptz NOT NULL,
        lease_until timestamptz NOT NULL, done_at timestamptz, expires_at timestamptz NOT NULL,
        response_status int2, PRIMARY KEY (scope, event_key)
    ) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.02);";
const INSERT_1: &str = "
    INSERT INTO processed_events (scope, event_key, status, token, attempt, claimed_at, lease_until,
                                  expires_at, response_status)
    VALUES ('s', $1, $2, '\\x01', 1, now(), now() + interval '1 minute',
            now() + interval '1 day', 204)";

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_version_1_is_brought_to_version_2_with_every_row() {
    let db = postgres::schema().await;
    let client = db.client().await;
    client.batch_execute(VERSION_1).await.unwrap();
    let insert = async |key: &str, status: &str| {
        assert_eq!(client.execute(INSERT_1, &[&key, &status]).await.unwrap(), 1);
    };
    for status in ["in_progress", "done", "failed"] {
        insert(status, status).await;
    }
    let store = db.store().await;
    // A process of the older version, which still runs, writes as before.
    insert("later", "done").await;

    let payload = |n: u8| Some(PayloadHash::from([n; 32]));
    let ask = async |key: &str, n: u8| {
        let claim = claim(event("s", key)).with_fingerprint(payload(n)).with_replay(true);
        (store.claim(&claim).await.unwrap(), claim)
    };
    for key in ["done", "later"] {
        assert_eq!(ask(key, 1).await.0, ClaimOutcome::done(Some(204)));
    }
    assert!(matches!(ask("in_progress", 1).await.0, ClaimOutcome::InProgress { .. }));
    let (outcome, taken) = ask("failed", 1).await;
    assert_eq!(outcome, ClaimOutcome::Claimed { attempt: 2 });
    let completion = Completion::new(Some(201), Duration::from_secs(60));
    let completion = completion.with_response(Some("again".into()));
    assert_eq!(store.complete(&taken.key, taken.token, completion).await.unwrap(), Held::Yes);
    assert_eq!(
        ask("failed", 1).await.0,
        ClaimOutcome::Done { status: Some(201), response: Some("again".into()) }
    );
    assert_eq!(ask("failed", 2).await.0, ClaimOutcome::OtherPayload);

    // By both ways the table is the same.
    let fresh = postgres::schema().await;
    fresh.store().await;
    assert_eq!(columns(&db).await, columns(&fresh).await);
}

/// A store that keeps no responses and payloads writes neither column. What a done row has more than
/// in version 1 is the bitmap that says so: 8 bytes, which a row in progress had before.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_without_response_and_payload_has_a_bitmap_more_than_in_version_1() {
    let (old, new) = (postgres::schema().await, postgres::schema().await);
    old.client().await.batch_execute(VERSION_1).await.unwrap();
    let store = new.store().await;
    let claim = claim(event("s", "a key of some length"));
    store.claim(&claim).await.unwrap();
    let completion = Completion::new(Some(204), Duration::from_secs(60));
    store.complete(&claim.key, claim.token, completion).await.unwrap();

    // The same values in the old table.
    let copy = format!(
        "INSERT INTO {}.processed_events SELECT scope, event_key, status, token, attempt, claimed_at,
             lease_until, done_at, expires_at, response_status FROM {}.processed_events",
        old.name(),
        new.name(),
    );
    new.client().await.batch_execute(&copy).await.unwrap();
    let length = "SELECT pg_column_size(row.*) FROM processed_events AS row";
    let (old, new) = (old.client().await, new.client().await);
    let old = old.query_one(length, &[]).await.unwrap().get::<_, i32>(0);
    let row = new.query_one(length, &[]).await.unwrap().get::<_, i32>(0);
    assert!(row <= old + 8, "{row} bytes, {old} in version 1");
    let nulls = "SELECT count(*) FROM processed_events WHERE num_nulls(response, fingerprint) = 2";
    assert_eq!(new.query_one(nulls, &[]).await.unwrap().get::<_, i64>(0), 1);
}
