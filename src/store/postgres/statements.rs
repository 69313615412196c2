//! Every statement that a request or a holder sends. Migrations are in [`schema`](super::schema).
//!
//! Each is sent between [`opening`] and [`CLOSING`], all three in one round trip, or alone on a
//! connection that has had [`standing`]: the isolation is pinned, whatever the database defaults to,
//! and no wait is without a bound. Values go as parameters of builtin types, columns by name and cast
//! to what is read, so that a later version may add or widen some; only the table's quoted name is
//! put into the text.
//!
//! Durations are parameters in milliseconds, and results in seconds. All time is `now()`, the beginning of the
//! transaction, but what is left of a lease is told by `clock_timestamp()`, so that a lease
//! written after a wait is seen to be short.

use std::{fmt::Write, time::Duration};

use super::schema::{Table, literal};

/// The texts, with the table's name in place.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) claim: String,
    pub(super) claim_many: String,
    pub(super) take: String,
    pub(super) end: String,
    pub(super) end_many: String,
    pub(super) renew: String,
    pub(super) forget: String,
    pub(super) show: String,
    pub(super) purge: String,
    pub(super) open: String,
    pub(super) take_open: String,
    pub(super) finish: String,
    pub(super) fate: String,
}

impl Statements {
    pub(super) fn on(table: &Table) -> Self {
        let table = table.quoted();
        Self {
            // Inserts a row for the key, or reads the one that is there.
            //
            // Parameters: scope, key, token, lease, retention, fingerprint or NULL, whether the
            // response that is stored is wanted. Rows: the row; none if the one that stood in the
            // way was not committed when the statement began (its snapshot is older): look again.
            // Locks: the new row's. A key that is there is read without a lock and without WAL, but
            // one that an open transaction has inserted is waited for, up to the lock timeout.
            // Index: the primary key.
            claim: format!(
                "WITH inserted AS (
                     INSERT INTO {table} ({CLAIMED})
                     VALUES ($1, $2, 'in_progress', $3, 1, now(), now() + $4 * {MILLISECOND},
                             now() + ($4 + $5) * {MILLISECOND}, $6)
                     ON CONFLICT (scope, event_key) DO NOTHING
                     RETURNING lease_until
                 )
                 SELECT {new} FROM inserted
                 UNION ALL
                 SELECT {there} FROM {table} AS there WHERE scope = $1 AND event_key = $2",
                new = new("$3", "$6"),
                there = there("$7"),
            ),
            // The same for several keys.
            //
            // Parameters: arrays of the same; sorted by key, each key once. Rows: as `claim`, with
            // the scope and key; those of inserted rows come first and count, should one of them be
            // there twice. The locks are taken in the order of the keys. What is there is read only
            // if something was not inserted.
            claim_many: format!(
                "WITH inserted AS (
                     INSERT INTO {table} ({CLAIMED})
                     SELECT scope, event_key, 'in_progress', token, 1, now(),
                            now() + lease * {MILLISECOND},
                            now() + (lease + retention) * {MILLISECOND}, fingerprint
                     FROM unnest($1, $2, $3, $4, $5, $6)
                         AS asked(scope, event_key, token, lease, retention, fingerprint)
                     ON CONFLICT (scope, event_key) DO NOTHING
                     RETURNING scope, event_key, token, lease_until, fingerprint
                 )
                 SELECT scope::text AS scope, event_key::text AS event_key, {new} FROM inserted
                 UNION ALL
                 SELECT there.scope::text, there.event_key::text, {there}
                 FROM unnest($1, $2, $7) AS asked(scope, event_key, replay)
                      JOIN {table} AS there USING (scope, event_key)
                 WHERE (SELECT count(*) FROM inserted) < cardinality($1)",
                new = new("token", "fingerprint"),
                there = there("asked.replay"),
            ),
            // Takes a key that is free; see the function.
            take: take(&table, ""),
            // Ends a claim: marks it done, or frees it. A done mark that is asked for again finds
            // itself and stays as it is.
            //
            // Parameters: scope, key, token, state, response status, retention, response or NULL.
            // Rows: the response status and the fingerprint that are in the row now, or none if the
            // token holds the key no longer. Locks: the row's. Index: the primary key; no index has
            // a column that changes, so the update is HOT, where the page has room for the response.
            end: format!(
                "UPDATE {table} AS held
                 SET {ended}
                 WHERE held.scope = $1 AND held.event_key = $2 AND {holds}
                 RETURNING {KEPT_IN_MIND}",
                ended = ended("$4", "$5", "$6", "$7"),
                holds = holds_or_is_done("$3", "$4"),
            ),
            // The same for several keys.
            //
            // Parameters: arrays of the same; sorted by key, each key once. Rows: the places (from
            // 1) of those that are held, and the same.
            end_many: format!(
                "UPDATE {table} AS held
                 SET {ended}
                 FROM unnest($1, $2, $3, $4, $5, $6, $7) WITH ORDINALITY
                     AS ended(scope, event_key, token, state, response_status, retention, response,
                              place)
                 WHERE held.scope = ended.scope AND held.event_key = ended.event_key AND {holds}
                 RETURNING ended.place, {KEPT_IN_MIND}",
                ended = ended(
                    "ended.state",
                    "ended.response_status",
                    "ended.retention",
                    "ended.response",
                ),
                holds = holds_or_is_done("ended.token", "ended.state"),
            ),
            // Moves leases on.
            //
            // Parameters: arrays of scope, key, token, lease, retention; sorted by key and each
            // claim once. Rows: the places (from 1) of those that are held. Locks: the rows'.
            // Index: the primary key.
            renew: format!(
                "UPDATE {table} AS held
                 SET lease_until = now() + claims.lease * {MILLISECOND},
                     expires_at = now() + (claims.lease + claims.retention) * {MILLISECOND}
                 FROM unnest($1, $2, $3, $4, $5) WITH ORDINALITY
                     AS claims(scope, event_key, token, lease, retention, place)
                 WHERE held.scope = claims.scope AND held.event_key = claims.event_key
                   AND held.token = claims.token AND held.status = 'in_progress'
                 RETURNING claims.place"
            ),
            // Deletes a key.
            //
            // Parameters: scope, key. Rows: one if there was a row, whether it was within its
            // retention. Locks: the row's. Index: the primary key.
            forget: format!(
                "DELETE FROM {table} WHERE scope = $1 AND event_key = $2
                 RETURNING expires_at > now()"
            ),
            // Reads a key.
            //
            // Parameters: scope, key. Rows: one or none. Locks: none. Index: the primary key.
            show: format!(
                "SELECT status::text AS status, attempt::int4 AS attempt,
                        {lease_left} AS lease_left, {retention_left} AS retention_left,
                        response_status::int2 AS response_status
                 FROM {table} WHERE scope = $1 AND event_key = $2 AND expires_at > now()",
                lease_left = left("lease_until"),
                retention_left = left("expires_at"),
            ),
            // Deletes rows past their retention.
            //
            // Parameters: how many at most. Rows: one, their number. Locks: the deleted rows'; rows
            // that somebody else has locked are skipped. Index: none, it reads the table until it
            // has found enough; an index on `expires_at` would cost every completion its HOT update.
            purge: format!(
                "WITH purged AS (
                     DELETE FROM {table}
                     WHERE ctid = ANY (ARRAY(
                         SELECT ctid FROM {table} WHERE {over} LIMIT $1 FOR UPDATE SKIP LOCKED))
                       AND {over}
                     RETURNING true
                 )
                 SELECT count(*) FROM purged",
                over = "expires_at <= now() AND (status <> 'in_progress' OR lease_until <= now())",
            ),
            // Claims a key for the transaction that it stands in, unless another one is at it.
            //
            // Parameters: as `claim`. Rows: one. Whether the key's lock is had, the row or NULLs if
            // none is seen (look again, if the lock is had), and the transaction's id if the row is
            // new. Locks: the key's advisory lock, tried and not waited for, until the transaction
            // ends; without it nothing is inserted. Its number is made of the table and the key, so
            // should two keys ever share one, the second is told to come back. A key that is there
            // is read without a lock on its row, and only if nothing was inserted: a serializable
            // transaction remembers each page that it read. Index: the primary key.
            open: format!(
                "WITH key_lock AS MATERIALIZED (
                     SELECT pg_try_advisory_xact_lock(hashtextextended(
                         $1 || chr(10) || $2, {table_text}::regclass::oid::int8)) AS had
                 ), inserted AS (
                     INSERT INTO {table} ({CLAIMED})
                     SELECT $1, $2, 'in_progress', $3, 1, now(), now() + $4 * {MILLISECOND},
                            now() + ($4 + $5) * {MILLISECOND}, $6
                     FROM key_lock WHERE had
                     ON CONFLICT (scope, event_key) DO NOTHING
                     RETURNING lease_until
                 ), seen AS (
                     SELECT {new} FROM inserted
                     UNION ALL
                     SELECT {there} FROM {table} AS there
                     WHERE scope = $1 AND event_key = $2 AND NOT EXISTS (SELECT FROM inserted)
                 )
                 SELECT key_lock.had, seen.*, pg_current_xact_id_if_assigned()::text AS transaction_id
                 FROM key_lock LEFT JOIN seen ON true",
                table_text = literal(&table),
                new = new("$3", "$6"),
                there = there("$7"),
            ),
            // `take`, in the transaction that has the key's lock, with its id.
            take_open: take(&table, ", pg_current_xact_id_if_assigned()::text AS transaction_id"),
            // Marks a key done in the very transaction that has claimed it.
            //
            // Parameters: scope, key, token, response status, retention, response or NULL, the
            // transaction's id. Rows: one, or none if this is another transaction: the work has
            // ended the claim's own.
            // Locks: the row's, which is held already. Index: the primary key; HOT, as `end`.
            finish: format!(
                "UPDATE {table} AS held
                 SET {ended}
                 WHERE held.scope = $1 AND held.event_key = $2 AND held.token = $3
                   AND held.status = 'in_progress'
                   AND pg_current_xact_id_if_assigned()::text = $7
                 RETURNING true",
                ended = ended("'done'", "$4", "$5", "$6"),
            ),
            // Looks whether a transaction was committed whose COMMIT was not answered.
            //
            // Parameters: scope, key, token, the transaction's id. Rows: one, whether the token's
            // done mark is there, and whether the transaction may still be under way: one that was
            // committed a moment ago has a mark that shows at the next look. Locks: none. Index: the
            // primary key.
            fate: format!(
                "SELECT EXISTS (SELECT FROM {table} WHERE scope = $1 AND event_key = $2
                                    AND token = $3 AND status = 'done') AS committed,
                        pg_xact_status($4::xid8) IN ('in progress', 'committed') AS under_way"
            ),
        }
    }
}

/// Begins the transaction of one statement: isolation and bounds of its own, whatever the session
/// or the database has set.
pub(super) fn opening(bounds: &Bounds) -> String {
    let begin = "BEGIN ISOLATION LEVEL READ COMMITTED";
    begin.to_owned() + &bounds.settings("SET LOCAL", true)
}

/// The same for a whole session, after which a statement may go alone. Only for connections that
/// nobody else has: a pooler would refuse it, or hand it on.
pub(super) fn standing(bounds: &Bounds) -> String {
    let isolate = "SET default_transaction_isolation = 'read committed'";
    isolate.to_owned() + &bounds.settings("SET", false)
}

/// Ends the transaction of one statement.
pub(super) const CLOSING: &str = "COMMIT";

/// How long a statement may wait, and what its commit waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) lock: Duration,
    pub(super) statement: Duration,
    pub(super) commit: Commit,
}

/// What a commit waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Commit {
    /// For the disk, and for standbys if the database says so.
    Durable,
    /// For nothing: the server writes it within a moment.
    Soon,
}

impl Bounds {
    fn settings(&self, set: &str, local: bool) -> String {
        let mut settings = String::new();
        for (setting, bound) in [("lock_timeout", self.lock), ("statement_timeout", self.statement)]
        {
            // Writing to a string does not fail.
            let _ = write!(settings, "; {set} {setting} = {}", milliseconds(bound));
        }
        let _ = match self.commit {
            // `remote_apply`, say, is kept.
            Commit::Durable => write!(
                settings,
                "; SELECT set_config('synchronous_commit', 'on', {local}) \
                 WHERE current_setting('synchronous_commit') = 'off'",
            ),
            Commit::Soon => write!(settings, "; {set} synchronous_commit = off"),
        };
        settings
    }
}

/// Begins the transaction of a claim and its work, at the isolation that the session has: what the
/// work relies on must not be weakened. The claim has bounds of its own; those of the session are
/// kept for the work. A holder that is silent for longer than its lease has its session ended by the
/// server.
pub(super) fn opening_for_work(bounds: &Bounds, lease: Duration) -> String {
    format!(
        "BEGIN; SELECT set_config('{KEPT}.lock_timeout', current_setting('lock_timeout'), true), \
         set_config('{KEPT}.statement_timeout', current_setting('statement_timeout'), true){}; \
         SET LOCAL idle_in_transaction_session_timeout = {}",
        bounds.settings("SET LOCAL", true),
        milliseconds(lease),
    )
}

/// Bounds the claim once more, for its next statement in the same transaction.
pub(super) fn bounding(bounds: &Bounds) -> String {
    bounds.settings("SET LOCAL", true).trim_start_matches("; ").to_owned()
}

/// Gives the session's own bounds back, for the work. If it has none, a statement may take as long
/// as the work may.
pub(super) fn handing_over(max_hold: Duration) -> String {
    format!(
        "SELECT set_config('lock_timeout', current_setting('{KEPT}.lock_timeout'), true), \
         set_config('statement_timeout', coalesce(nullif(\
         current_setting('{KEPT}.statement_timeout'), '0'), '{}'), true)",
        milliseconds(max_hold),
    )
}

/// Takes [`standing`] back: a transaction of the application's has the database's own settings.
pub(super) const UNDOING_STANDING: &str = "RESET default_transaction_isolation; \
     RESET lock_timeout; RESET statement_timeout; RESET synchronous_commit";

/// Ends a transaction as if it had not been.
pub(super) const GIVING_UP: &str = "ROLLBACK";

/// Begins a part of a transaction that can be undone by itself.
pub(super) fn saving(savepoint: u32) -> String {
    format!("SAVEPOINT tower_dedupe_{savepoint}")
}

/// Undoes what came after the savepoint, which is gone then.
pub(super) fn undoing(savepoint: u32) -> String {
    let release = releasing(savepoint);
    format!("ROLLBACK TO SAVEPOINT tower_dedupe_{savepoint}; {release}")
}

/// Keeps what came after the savepoint, which is gone then.
pub(super) fn releasing(savepoint: u32) -> String {
    format!("RELEASE SAVEPOINT tower_dedupe_{savepoint}")
}

/// Takes a key that is free: failed, its lease over and its payload no other, or its retention over.
///
/// Parameters: as `claim`, without the last. Rows: attempt and what is left of the lease; none if the
/// key is not free (any more): look again. Locks: the row's, waited for up to the lock timeout; after
/// the wait the condition is looked at again. Index: the primary key.
///
/// A fingerprint that is not as long as ours is none that could be compared.
fn take(table: &str, and: &str) -> String {
    format!(
        "UPDATE {table}
                 SET status = 'in_progress', token = $3,
                     attempt = CASE WHEN expires_at <= now() THEN 1 ELSE attempt + 1 END,
                     claimed_at = now(), lease_until = now() + $4 * {MILLISECOND}, done_at = NULL,
                     expires_at = now() + ($4 + $5) * {MILLISECOND}, response_status = NULL,
                     fingerprint = $6, response = NULL
                 WHERE scope = $1 AND event_key = $2
                   AND (expires_at <= now() OR status = 'failed'
                        OR (status = 'in_progress' AND lease_until <= now()
                            AND coalesce(fingerprint = $6 OR octet_length(fingerprint) <> 32, true)))
                 RETURNING attempt::int4 AS attempt, {lease_left} AS lease_left{and}",
        lease_left = left("lease_until"),
    )
}

/// A row that a claim has inserted, as it is read.
fn new(token: &str, fingerprint: &str) -> String {
    format!(
        "'in_progress' AS status, {token} AS token, 1 AS attempt, {lease_left} AS lease_left,
                        false AS expired, 0::float8 AS retention_left, NULL::int2 AS response_status,
                        {fingerprint} AS fingerprint, NULL::bytea AS response",
        lease_left = left("lease_until"),
    )
}

/// A row that a claim has found, the same columns. A response that is not wanted is not read: it may
/// be long, and stand elsewhere.
fn there(wants_response: &str) -> String {
    format!(
        "there.status::text, there.token::bytea, there.attempt::int4, {lease_left},
                        there.expires_at <= now(), {retention_left}, there.response_status::int2,
                        there.fingerprint::bytea,
                        CASE WHEN {wants_response} THEN there.response::bytea END",
        lease_left = left("there.lease_until"),
        retention_left = left("there.expires_at"),
    )
}

/// What becomes of a row that ends; nothing, if it is done already.
fn ended(state: &str, response_status: &str, retention: &str, response: &str) -> String {
    format!(
        "status = {state},
                     done_at = CASE WHEN held.status = 'done' THEN held.done_at
                                    WHEN {state} = 'done' THEN now() END,
                     response_status = CASE held.status WHEN 'done' THEN held.response_status
                                       ELSE {response_status} END,
                     response = CASE held.status WHEN 'done' THEN held.response
                                ELSE {response} END,
                     expires_at = CASE held.status WHEN 'done' THEN held.expires_at
                                  ELSE now() + {retention} * {MILLISECOND} END"
    )
}

/// The holder's rows, and those that it has marked done if it marks them again.
fn holds_or_is_done(token: &str, state: &str) -> String {
    format!(
        "held.token = {token}
                   AND (held.status = 'in_progress' OR held.status = 'done' AND {state} = 'done')"
    )
}

/// What is left until a time, in seconds; negative if it is over. Each part by itself, since
/// `infinity` can be read and not be subtracted.
fn left(until: &str) -> String {
    format!("date_part('epoch', {until}) - date_part('epoch', clock_timestamp())")
}

/// A bound as a setting has it. Zero would mean no bound.
fn milliseconds(bound: Duration) -> u128 {
    bound.as_millis().clamp(1, i32::MAX as u128)
}

/// The columns that a claim fills.
const CLAIMED: &str = "scope, event_key, status, token, attempt, claimed_at, lease_until, expires_at, \
                       fingerprint";
/// What of a row that has ended this process keeps in mind.
const KEPT_IN_MIND: &str =
    "held.response_status::int2 AS response_status, held.fingerprint::bytea AS fingerprint";
/// What the session's own bounds are kept under while the claim has others.
const KEPT: &str = "tower_dedupe";
const MILLISECOND: &str = "interval '1 millisecond'";
