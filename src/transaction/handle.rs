//! The handle: what a handler does in its transaction, and nothing that would end it.

use std::{
    error::Error,
    fmt,
    future::poll_fn,
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use bytes::Bytes;
use futures_util::{SinkExt, Stream};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio_postgres::{
    CopyInSink, CopyOutStream, Row, Statement, ToStatement,
    error::SqlState,
    types::{ToSql, Type},
};

use crate::store::{NotCommittedKind, OpenClaim, passing, release, save, told, undo};

/// The transaction in which a handler's event is claimed. What the handler writes through it is
/// committed together with the event's done mark if the handler succeeds, and rolled back otherwise.
///
/// The layer puts it into the request's extensions, `request.extensions().get::<Transaction>()`;
/// with feature `axum` it is an extractor. Clones are the same transaction. Statements that are
/// awaited together (`tokio::join!`) go to the server together.
///
/// There is no way to commit: the layer does, when the handler has answered. **Do not send `COMMIT`
/// or `ROLLBACK` as a statement**, what follows would not be in the transaction; the layer notices
/// and answers 500, but what was committed stays.
///
/// A statement that fails aborts the transaction, as always in Postgres: everything after it fails,
/// and so does the commit, whatever the handler answers. Run what may fail in a
/// [`savepoint`](Self::savepoint).
///
/// # Errors
///
/// All methods give [`TransactionError`]: the server's refusal, or [`Settled`](TransactionError::Settled)
/// once the handler has answered. A clone that is moved into a task must not outlive that: if it is
/// in the middle of a statement then, nothing is committed, and the answer is 500.
///
/// # Cancellation
///
/// Dropping a method's future does not stop its statement: the server carries it out, before the
/// next one.
#[derive(Clone)]
pub struct Transaction {
    slot: Arc<Slot>,
}

struct Slot {
    /// Taken out when the handler has answered. Statements share it, so that they may be under way
    /// together.
    open: Arc<RwLock<Option<OpenClaim>>>,
    savepoints: AtomicU32,
    /// What savepoints that were dropped leave to be sent before all else.
    undo: Mutex<String>,
    /// Why the transaction cannot be committed though the handler has done nothing wrong.
    passing: OnceLock<NotCommittedKind>,
}

type InUse = OwnedRwLockReadGuard<Option<OpenClaim>, OpenClaim>;
type Params<'a> = &'a [&'a (dyn ToSql + Sync)];
type TypedParams<'a> = &'a [(&'a (dyn ToSql + Sync), Type)];
type Answer<T> = Result<T, TransactionError>;

impl Transaction {
    /// The handle for the handler, and the one that takes the transaction back.
    pub(super) fn of(open: OpenClaim) -> (Self, Ours) {
        let slot = Arc::new(Slot {
            open: Arc::new(RwLock::new(Some(open))),
            savepoints: AtomicU32::new(0),
            undo: Mutex::default(),
            passing: OnceLock::new(),
        });
        (Self { slot: slot.clone() }, Ours(slot))
    }

    /// Runs a statement and gives its rows.
    ///
    /// A text is prepared first, which takes a round trip of its own;
    /// [`query_typed`](Self::query_typed) does without, and [`prepare`](Self::prepare) once for all.
    pub async fn query<T>(&self, statement: &T, params: Params<'_>) -> Answer<Vec<Row>>
    where
        T: ?Sized + ToStatement + Sync,
    {
        let open = self.in_use().await?;
        self.told(open.client().query(statement, params).await)
    }

    /// Runs a statement that gives exactly one row; other numbers are an error.
    pub async fn query_one<T>(&self, statement: &T, params: Params<'_>) -> Answer<Row>
    where
        T: ?Sized + ToStatement + Sync,
    {
        let open = self.in_use().await?;
        self.told(open.client().query_one(statement, params).await)
    }

    /// Runs a statement that gives one row or none; more are an error.
    pub async fn query_opt<T>(&self, statement: &T, params: Params<'_>) -> Answer<Option<Row>>
    where
        T: ?Sized + ToStatement + Sync,
    {
        let open = self.in_use().await?;
        self.told(open.client().query_opt(statement, params).await)
    }

    /// Runs a statement and says how many rows it has changed.
    pub async fn execute<T>(&self, statement: &T, params: Params<'_>) -> Answer<u64>
    where
        T: ?Sized + ToStatement + Sync,
    {
        let open = self.in_use().await?;
        self.told(open.client().execute(statement, params).await)
    }

    /// As [`query`](Self::query), with the types of the parameters said: one round trip, and nothing
    /// is prepared under a name, as poolers in transaction mode like it.
    pub async fn query_typed(&self, sql: &str, params: TypedParams<'_>) -> Answer<Vec<Row>> {
        let open = self.in_use().await?;
        self.told(open.client().query_typed(sql, params).await)
    }

    /// As [`execute`](Self::execute), in the manner of [`query_typed`](Self::query_typed).
    pub async fn execute_typed(&self, sql: &str, params: TypedParams<'_>) -> Answer<u64> {
        let open = self.in_use().await?;
        self.told(open.client().execute_typed(sql, params).await)
    }

    /// Runs several statements, separated by semicolons, without parameters.
    pub async fn batch_execute(&self, sql: &str) -> Answer<()> {
        let open = self.in_use().await?;
        self.told(open.client().batch_execute(sql).await)
    }

    /// Prepares a statement for this transaction. With
    /// [`named_statements`](crate::store::PgStoreBuilder::named_statements) it stays prepared, for
    /// those that come after it on the same connection.
    pub async fn prepare(&self, sql: &str) -> Answer<Statement> {
        let open = self.in_use().await?;
        let prepared = match open.prepares_by_name() {
            true => open.client().prepare_cached(sql).await,
            false => open.client().prepare(sql).await,
        };
        self.told(prepared)
    }

    /// Begins a `COPY … FROM STDIN`.
    pub async fn copy_in<T>(&self, statement: &T) -> Answer<CopyIn>
    where
        T: ?Sized + ToStatement + Sync,
    {
        let open = self.in_use().await?;
        let sink = self.told(open.client().copy_in(statement).await)?;
        Ok(CopyIn { transaction: self.clone(), _open: open, sink: Box::pin(sink) })
    }

    /// Begins a `COPY … TO STDOUT`.
    pub async fn copy_out<T>(&self, statement: &T) -> Answer<CopyOut>
    where
        T: ?Sized + ToStatement + Sync,
    {
        let open = self.in_use().await?;
        let stream = self.told(open.client().copy_out(statement).await)?;
        Ok(CopyOut { transaction: self.clone(), _open: open, stream: Box::pin(stream) })
    }

    /// Marks a place to which the transaction can go back, so that a statement that fails does not
    /// spoil all of it.
    ///
    /// ```no_run
    /// # async fn example(order: tower_dedupe::Transaction) -> Result<(), tower_dedupe::TransactionError> {
    /// let savepoint = order.savepoint().await?;
    /// match order.execute("INSERT INTO customers VALUES (17)", &[]).await {
    ///     Ok(_) => savepoint.release().await?,
    ///     // It is there already: go on without.
    ///     Err(_) => savepoint.roll_back().await?,
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn savepoint(&self) -> Answer<Savepoint> {
        let number = self.slot.savepoints.fetch_add(1, Ordering::Relaxed);
        self.batch_execute(&save(number)).await?;
        Ok(Savepoint { transaction: self.clone(), number, ended: false })
    }

    /// The open transaction, with what dropped savepoints have left undone.
    async fn in_use(&self) -> Answer<InUse> {
        let guard = self.slot.open.clone().read_owned().await;
        let open = OwnedRwLockReadGuard::try_map(guard, Option::as_ref)
            .map_err(|_| TransactionError::Settled)?;
        let undo = self.slot.take_undo();
        if !undo.is_empty() {
            self.told(open.client().batch_execute(&undo).await)?;
        }
        Ok(open)
    }

    fn told<T>(&self, answer: Result<T, tokio_postgres::Error>) -> Answer<T> {
        answer.map_err(|error| {
            if let Some(kind) = passing(&error) {
                // The first is the cause of the others.
                let _ = self.slot.passing.set(kind);
            }
            TransactionError::Postgres(error)
        })
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").finish_non_exhaustive()
    }
}

impl Slot {
    fn take_undo(&self) -> String {
        mem::take(&mut *self.undo())
    }

    /// No code panics while it holds the lock, so a poisoned text is a right one.
    fn undo(&self) -> MutexGuard<'_, String> {
        self.undo.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The owner's end of a handle. Dropped, the transaction is given up, whoever has clones.
pub(super) struct Ours(Arc<Slot>);

impl Ours {
    /// Whether a statement failed for a reason that is none of the handler's.
    pub(super) fn passing(&self) -> Option<NotCommittedKind> {
        self.0.passing.get().copied()
    }

    /// Takes the transaction away from all clones, with what dropped savepoints have left undone.
    /// Nothing, if one of them is in the middle of a statement: then it is given up.
    pub(super) async fn take_back(self) -> Option<OpenClaim> {
        let open = self.0.open.try_write().ok()?.take()?;
        let undo = self.0.take_undo();
        if !undo.is_empty() {
            // If it fails the transaction is aborted, which the done mark finds out.
            let _ = open.client().batch_execute(&undo).await;
        }
        Some(open)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        if let Ok(mut open) = self.0.open.try_write() {
            drop(open.take());
            return;
        }
        // Somebody is in the middle of a statement. It is called off, and what it was in is closed.
        let slot = self.0.clone();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Some(open) = &*slot.open.read().await {
                open.cancel();
            }
            drop(slot.open.write().await.take());
        });
    }
}

/// A place in a [`Transaction`] to which it can go back. Dropped, it does so before the next
/// statement, or before the commit: savepoints within it first, as they are dropped by themselves.
#[derive(Debug)]
#[must_use = "dropped, it undoes what comes after it"]
pub struct Savepoint {
    transaction: Transaction,
    number: u32,
    ended: bool,
}

impl Savepoint {
    /// Keeps what was done since.
    ///
    /// # Errors
    ///
    /// As all methods of [`Transaction`].
    pub async fn release(mut self) -> Result<(), TransactionError> {
        self.ended = true;
        self.transaction.batch_execute(&release(self.number)).await
    }

    /// Undoes what was done since.
    ///
    /// # Errors
    ///
    /// As all methods of [`Transaction`].
    pub async fn roll_back(mut self) -> Result<(), TransactionError> {
        self.ended = true;
        self.transaction.batch_execute(&undo(self.number)).await
    }
}

impl Drop for Savepoint {
    fn drop(&mut self) {
        if !self.ended {
            let mut undone = self.transaction.slot.undo();
            undone.push_str(&undo(self.number));
            undone.push(';');
        }
    }
}

/// A `COPY … FROM STDIN` under way. Until it is finished or dropped, the transaction is in use.
/// Dropped unfinished, it fails, and the transaction with it.
pub struct CopyIn {
    transaction: Transaction,
    _open: InUse,
    sink: Pin<Box<CopyInSink<Bytes>>>,
}

impl CopyIn {
    /// Sends data, in the format that the statement names; it need not end at the end of a row.
    ///
    /// # Errors
    ///
    /// As all methods of [`Transaction`].
    pub async fn send(&mut self, data: impl Into<Bytes>) -> Result<(), TransactionError> {
        let sent = self.sink.send(data.into()).await;
        self.transaction.told(sent)
    }

    /// Ends the copy and says how many rows it has written.
    ///
    /// # Errors
    ///
    /// As all methods of [`Transaction`].
    pub async fn finish(mut self) -> Result<u64, TransactionError> {
        let finished = self.sink.as_mut().finish().await;
        self.transaction.told(finished)
    }
}

impl fmt::Debug for CopyIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyIn").finish_non_exhaustive()
    }
}

/// A `COPY … TO STDOUT` under way. Until it is dropped, the transaction is in use.
pub struct CopyOut {
    transaction: Transaction,
    _open: InUse,
    stream: Pin<Box<CopyOutStream>>,
}

impl CopyOut {
    /// The next piece of data; nothing at the end.
    ///
    /// # Errors
    ///
    /// As all methods of [`Transaction`].
    pub async fn next(&mut self) -> Result<Option<Bytes>, TransactionError> {
        let next = poll_fn(|cx| self.stream.as_mut().poll_next(cx)).await;
        self.transaction.told(next.transpose())
    }
}

impl fmt::Debug for CopyOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyOut").finish_non_exhaustive()
    }
}

/// Why a statement of a [`Transaction`] failed.
///
/// With feature `axum` it is a response, 500 without the details, which are logged. (The layer answers
/// 503 instead if it [is passing](Self::is_passing).)
#[derive(Debug)]
#[non_exhaustive]
pub enum TransactionError {
    /// The handler has answered: the transaction is committed or rolled back.
    Settled,
    /// The server refused, or was lost.
    Postgres(tokio_postgres::Error),
}

impl TransactionError {
    /// The SQLSTATE, if the server has given one.
    pub fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Settled => None,
            Self::Postgres(error) => error.code(),
        }
    }

    /// Whether the same again may do: another transaction got in the way (40001, 40P01), or the
    /// connection was lost.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Postgres(error) if passing(error).is_some())
    }
}

impl fmt::Display for TransactionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Settled => f.write_str(
                "the transaction has ended with its handler: use it before the handler answers",
            ),
            Self::Postgres(error) => write!(f, "the statement failed: {}", told(error)),
        }
    }
}

impl Error for TransactionError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Settled => None,
            Self::Postgres(error) => Some(error),
        }
    }
}
