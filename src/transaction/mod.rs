//! Transaction mode: the claim and the handler's own SQL commit together, or not at all.
//!
//! A handler whose work is SQL in the database that also keeps the claims needs no lease: with
//! [`DedupeLayer::transactional`](crate::DedupeLayer::transactional) it is given a [`Transaction`],
//! in which its event is claimed already. The done mark is the last statement in it. So **the
//! handler's rows exist if and only if its event is done**, wherever a process or the database dies:
//! exactly once, for what is written through the handle and for nothing else.
//!
//! ```no_run
//! use axum::{Router, routing::post};
//! use tower_dedupe::{ClaimInfo, DedupeLayer, KeySource, PgStore, Transaction, TransactionError};
//!
//! async fn on_order(info: ClaimInfo, order: Transaction) -> Result<(), TransactionError> {
//!     order.execute("INSERT INTO orders (event_key) VALUES ($1)", &[&info.key()]).await?;
//!     Ok(())
//! }
//!
//! # async fn example() -> Result<Router, Box<dyn std::error::Error>> {
//! // One connection for each request in flight.
//! let store = PgStore::builder().pool_size(16).connect("postgres://app@localhost/app").await?;
//! store.migrate().await?;
//!
//! let layer = DedupeLayer::new(store, KeySource::json("$.id")?).scope("orders").transactional();
//! let app = Router::new().route("/orders", post(on_order).layer(layer));
//! # Ok(app)
//! # }
//! ```
//!
//! # Which mode
//!
//! | the handler | mode |
//! |---|---|
//! | writes to this database and does nothing else | transaction |
//! | calls other services, sends mail, writes to another database | lease, the default, and hand [`ClaimInfo::key`](crate::ClaimInfo::key) on as their idempotency key |
//! | does both | transaction for a row that says what is to be sent (an outbox), which another process sends |
//!
//! # What it costs
//!
//! - **One connection for each request in flight**, from the claim to the commit. Set
//!   [`pool_size`](crate::store::PgStoreBuilder::pool_size) to what is to run at once, and give
//!   the layer a store of its own if other layers use lease mode, which would wait for connections
//!   behind it. A request that finds none within the store's
//!   [`timeout`](crate::store::PgStoreBuilder::timeout) is answered 503. A handler must not take a
//!   second connection of the same pool: when all do, none gets one.
//! - The transaction is open for as long as the handler runs, with its locks. Keep it short: SQL, and
//!   no calls elsewhere.
//! - Two round trips more than the handler's own: the claim, which comes with `BEGIN`, and the done
//!   mark; then the `COMMIT` that the handler would send anyway.
//!
//! # Why the response waits
//!
//! The response leaves after the `COMMIT`, since only that says whether there is a success: deferred
//! constraints and serialization failures show at the commit, and a server can die before it. A
//! sender that has seen 2xx never comes again. So a handler that streams its response's body cannot
//! use the transaction in it: by then it has ended.
//!
//! # What is answered
//!
//! | what happens | answer | `dedupe-status` |
//! |---|---|---|
//! | success, committed | the handler's own | |
//! | failure, error | the handler's own; rolled back, the key is free | |
//! | another delivery is at work | at once, as the layer's `in_progress` says | `in-progress` |
//! | a serialization failure or a deadlock (40001, 40P01), in the handler or at the commit | 503 + `Retry-After`, also if the handler has answered with a failure of its own | `transaction-conflict` |
//! | the connection or the database is lost, in the handler or at the commit | the same | `store-unavailable` |
//! | a statement failed and the handler said success all the same | 500 | `not-committed` |
//! | the database refuses at the commit, such as for a deferred constraint | 500 | `not-committed` |
//! | a task that the handler has spawned is in the middle of a statement | 500 | `not-committed` |
//! | the handler has sent `COMMIT` or `ROLLBACK` itself and said success | 500 | `not-committed` |
//! | the handler runs for longer than `max_hold` | 503 + `Retry-After`; it is dropped | `in-progress` |
//!
//! In all rows but the first nothing is committed and the key is free. With one exception: **what
//! a handler has committed by its own `COMMIT` stays**, and its event runs again. The layer notices
//! (the done mark finds another transaction), marks nothing done, frees the key and logs an error.
//! Its answer is 500, or the handler's own if that is a failure already.
//!
//! # What is set
//!
//! The transaction has the isolation level that the session has by default: the database's, the
//! role's, or what the URL's `options` say (`-c default_transaction_isolation=serializable`). So are
//! `lock_timeout` and `statement_timeout` the session's own; where there is no `statement_timeout`,
//! it is [`max_hold`](crate::DeduplicatorBuilder::max_hold). `idle_in_transaction_session_timeout`
//! is the [`lease`](crate::DeduplicatorBuilder::lease): the server rolls back for a holder that is
//! silent for longer between two statements, frozen or cut off.
//! `synchronous_commit` is on at least, whatever
//! [`synchronous_commit`](crate::store::PgStoreBuilder::synchronous_commit) says.
//!
//! # Other clients
//!
//! The handle speaks [`tokio_postgres`], which is re-exported here. For sqlx and diesel, whose
//! connections are their own, `examples/sqlx` claims inside *their* transaction by the same rules.
//!
//! Behind PgBouncer in transaction pooling, use [`Transaction::query_typed`] and
//! [`Transaction::execute_typed`]: a text given to the other methods is prepared under a name, which
//! needs a PgBouncer that keeps track of those (`max_prepared_statements`).
//!
//! What was rolled back has left nothing, so [`ClaimInfo::attempt`](crate::ClaimInfo::attempt) counts
//! the attempts of lease mode only, and is mostly 1 here.

mod delivery;
mod handle;

pub use tokio_postgres;

pub(crate) use self::delivery::{Settled, deliver};
pub use self::handle::{CopyIn, CopyOut, Savepoint, Transaction, TransactionError};
