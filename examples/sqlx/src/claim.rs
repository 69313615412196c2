//! The claim of an event inside a transaction of sqlx's: copy this file.
//!
//! For users of diesel and others: the SQL is the recipe, the rest passes it on. The rules are those
//! of the layer's transaction mode, and both may be used on one table:
//!
//! 1. [`claim`] is the first thing in the transaction. It tries the key's advisory lock and does not
//!    wait for it: another delivery at work is answered at once.
//! 2. The work uses the same transaction and never ends it.
//! 3. [`finish`] marks the event done in the very transaction that has claimed it, and only if that
//!    has changed one row commits. Whatever else happens, drop the transaction: it is rolled back, and
//!    the key is free.
//! 4. Answer the sender after the commit, and with a success only if there was one. Answer 503 to
//!    [`Claim::InProgress`] and to any error, 2xx to [`Claim::Done`].

use sqlx::{PgConnection, Postgres, Transaction, query_as, query_scalar};

/// What a claim has found.
#[derive(Debug)]
pub enum Claim {
    /// The event is this transaction's.
    Ours(Claimed),
    /// Another delivery of it is at work.
    InProgress,
    /// It was handled.
    Done,
}

/// An event that is claimed in a transaction.
#[derive(Debug)]
pub struct Claimed {
    scope: String,
    event_key: String,
    transaction_id: String,
    /// Above 1 if an earlier attempt failed.
    pub attempt: i32,
}

/// Claims an event in a transaction in which nothing was done yet.
pub async fn claim(
    transaction: &mut PgConnection,
    scope: &str,
    event_key: &str,
) -> sqlx::Result<Claim> {
    // A claim of lease mode that is under way on the same key is not waited for either.
    query_scalar::<_, String>("SELECT set_config('lock_timeout', '20ms', true)")
        .fetch_one(&mut *transaction)
        .await?;
    // The number that the layer locks, made of the table and the key.
    let locked: bool = query_scalar(
        "SELECT pg_try_advisory_xact_lock(
             hashtextextended($1 || chr(10) || $2, 'processed_events'::regclass::oid::int8))",
    )
    .bind(scope)
    .bind(event_key)
    .fetch_one(&mut *transaction)
    .await?;
    if !locked {
        return Ok(Claim::InProgress);
    }

    // A new key, or one that is free: failed, its lease over, or its retention over. Should this
    // transaction be committed without `finish`, the key is free again after the lease.
    let claimed: Option<(i32, String)> = query_as(
        "INSERT INTO processed_events AS held
             (scope, event_key, status, token, attempt, claimed_at, lease_until, expires_at)
         VALUES ($1, $2, 'in_progress', uuid_send(gen_random_uuid()), 1, now(),
                 now() + interval '1 minute', now() + interval '1 day')
         ON CONFLICT (scope, event_key) DO UPDATE
         SET status = 'in_progress', token = excluded.token,
             attempt = CASE WHEN held.expires_at <= excluded.claimed_at THEN 1
                            ELSE held.attempt + 1 END,
             claimed_at = excluded.claimed_at, lease_until = excluded.lease_until,
             expires_at = excluded.expires_at, done_at = NULL, response_status = NULL,
             fingerprint = NULL, response = NULL
         WHERE held.expires_at <= excluded.claimed_at OR held.status = 'failed'
            OR (held.status = 'in_progress' AND held.lease_until <= excluded.claimed_at)
         RETURNING attempt::int4, pg_current_xact_id()::text",
    )
    .bind(scope)
    .bind(event_key)
    .fetch_optional(&mut *transaction)
    .await?;
    let Some((attempt, transaction_id)) = claimed else {
        let done: bool = query_scalar(
            "SELECT status = 'done' FROM processed_events WHERE scope = $1 AND event_key = $2",
        )
        .bind(scope)
        .bind(event_key)
        .fetch_one(transaction)
        .await?;
        return Ok(if done { Claim::Done } else { Claim::InProgress });
    };

    // For the work: as long as the session waits by default; and not for ever for its next statement.
    query_scalar::<_, String>(
        "SELECT set_config('lock_timeout', (SELECT reset_val FROM pg_settings
                                            WHERE name = 'lock_timeout'), true)
             || set_config('idle_in_transaction_session_timeout', '60s', true)",
    )
    .fetch_one(transaction)
    .await?;
    let (scope, event_key) = (scope.to_owned(), event_key.to_owned());
    Ok(Claim::Ours(Claimed { scope, event_key, transaction_id, attempt }))
}

/// Marks the event done and commits; otherwise nothing of the transaction is left.
pub async fn finish(
    mut transaction: Transaction<'_, Postgres>,
    claimed: Claimed,
    response_status: i16,
) -> sqlx::Result<()> {
    // If a statement had failed, this fails. If the work has ended the transaction itself, this is
    // another one, and finds nothing.
    let marked = sqlx::query(
        "UPDATE processed_events
         SET status = 'done', done_at = now(), response_status = $3,
             expires_at = now() + interval '30 days'
         WHERE scope = $1 AND event_key = $2 AND status = 'in_progress'
           AND pg_current_xact_id_if_assigned()::text = $4",
    )
    .bind(&claimed.scope)
    .bind(&claimed.event_key)
    .bind(response_status)
    .bind(&claimed.transaction_id)
    .execute(&mut *transaction)
    .await?;
    if marked.rows_affected() != 1 {
        return Err(sqlx::Error::Protocol("the work has ended the claim's transaction".into()));
    }
    transaction.commit().await
}
