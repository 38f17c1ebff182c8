//! A queue in Postgres, on the tables of pgmq: one source for any number of routers, and the order of a group is kept by the database.
//!
//! A [`PostgresQueue`] is opened by the service for its router and by whoever publishes. What it needs it installs itself, if it is told to: pgmq's
//! SQL from the crate of that name, and beside it the schema `laneway_queue` (`schema.sql`). `statements.rs` has the statements that it lives on,
//! `lease.rs` the lease by which routers agree on which of them works, where only one may.
//!
//! # How order is kept across routers
//!
//! 1. Only the first row of a group is ever handed out, and while it is leased, delayed or locked nobody gets the one behind it. The row itself
//!    is the lock: claiming moves its time of visibility in the same statement that looks for it.
//! 2. Publishers of one group take turns: a trigger on the queue's table makes a row's number grow in the order in which rows become visible,
//!    whoever inserts them. Without it, a row could appear in front of one that is being delivered.
//! 3. A receipt is the number of the row, how often it was handed out, and when. Settling and extending compare all three with the row in the
//!    statement that changes it, so a receipt that is out of date does nothing.
//!
//! # How it waits
//!
//! A claim that finds nothing looks again after a pause that doubles up to a second, when the next hidden row is due, when this process has
//! settled something, and when Postgres says that something was inserted. That signal is sent by one publisher at a time, so that they need not wait
//! for each other; a message that comes beside a signal is found by the pauses, which are short then. (pgmq has a signal of its own, whose
//! publishers wait for each other's transactions to end.)
//!
//! # When the server is away
//!
//! Nothing is connected until it is needed, and every question has a deadline. A connection that does not answer is thrown away. Whatever fails is
//! asked again by the router; a queue that has been dropped meanwhile is made again, if this is allowed to.

mod broker;
mod lease;
mod statements;

pub(super) use broker::{from_url, read};
pub use lease::PostgresLease;

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPool, PgPoolOptions, PgRow};
use sqlx::{PgConnection, Row};
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::statements::{Statements, UNGROUPED, kinds};
use crate::message::{MESSAGE_BYTES_MAX, Secret};
use crate::pool::Ungrouped;
use crate::source::embedded::{Publication, PublishError, Published, Refusal};
use crate::source::{
    Delivery, Depth, Disposal, Keeps, Kept, PAGE_BYTES, Receipt, Redriven, Rest, Settled, Source,
    SourceError, Wants,
};

/// The schema, as it is installed.
const SCHEMA: &str = include_str!("schema.sql");

/// The version that `schema.sql` writes.
const SCHEMA_VERSION: i32 = 1;

/// Those who set something up take turns by this lock.
const SET_UP_LOCK: i64 = 0x6c61_6e65_7761_7900;

/// No name of a queue is longer: what pgmq allows.
pub const QUEUE_NAME_MAX: usize = 47;

/// So many messages are published, claimed, listed or redriven at once, at most.
pub const BATCH_MAX: usize = 10_000;

/// How long a claim that finds nothing pauses, at first and at the longest.
const POLL: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// How long getting a connection, and then an answer, may take.
const CONNECT: Duration = Duration::from_secs(5);
/// See [`CONNECT`].
const ANSWER: Duration = Duration::from_secs(20);

/// How long the set-up may take: the index of a queue that has millions of messages already is among it.
const SET_UP: Duration = Duration::from_secs(600);

/// Two statements that lock rows in different orders are told so by Postgres, and tried again so many times.
const CONFLICTS_MAX: usize = 5;

/// Rows are counted one by one up to this number.
const COUNTED_MAX: i64 = 100_000;

/// Reasons are cut to this length.
const REASON_BYTES_MAX: usize = 1_024;

/// Longer leases and delays than this are as good as endless.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// How a queue in Postgres is reached and what it is like.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// What the source is called; the queue's name, mostly.
    pub name: String,
    /// `postgres://user:password@host:port/database`, with any parameter that libpq knows.
    pub url: Secret,
    /// The queue, as pgmq knows it.
    pub queue: String,
    /// Whether to install what is missing: pgmq, the schema, the queue.
    pub create: bool,
    /// What messages without a group are to each other.
    pub ungrouped: Ungrouped,
    /// How many connections, one more aside that listens.
    pub connections: u32,
    /// How long a deduplication id is remembered.
    pub deduplication_window: Duration,
}

impl Settings {
    /// The queue at this address, made if it is not there.
    pub fn new(url: impl Into<String>, queue: &str) -> Self {
        Settings {
            name: queue.to_owned(),
            url: Secret::new(url),
            queue: queue.to_owned(),
            create: true,
            ungrouped: Ungrouped::Unordered,
            connections: 8,
            deduplication_window: Duration::from_secs(300),
        }
    }
}

/// Why there can be no such queue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The address cannot be read. It is not repeated here: it may have a password in it.
    #[error("not an address of Postgres, such as postgres://user@host/database: {0}")]
    BadUrl(String),
    /// The name would need quotes.
    #[error(
        "{0:?} is not a name for a queue in Postgres: 1 to {QUEUE_NAME_MAX} of a-z, 0-9 and _, and no digit first"
    )]
    BadName(String),
}

/// Whether pgmq takes this name, and nothing in it needs quotes.
pub fn is_queue_name(name: &str) -> bool {
    let is_fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (1..=QUEUE_NAME_MAX).contains(&name.len())
        && name.bytes().all(is_fine)
        && !name.as_bytes()[0].is_ascii_digit()
}

/// A queue, and a consumer of it. Clones are the same one.
#[derive(Clone)]
pub struct PostgresQueue {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    pool: PgPool,
    statements: Statements,
    /// How publishers have to take turns. Nothing for a sink, which leaves that as the source has made it.
    turns: Option<Ungrouped>,
    /// Where the server is, for error texts: without name and password.
    place: String,
    /// Whether everything was there when it was last looked for. Held while it is being looked for.
    is_set_up: tokio::sync::Mutex<bool>,
    /// Whether it ever was.
    was_set_up: AtomicBool,
    /// Behind which group the next claim begins, and whether it begins with messages that have none.
    cursor: tokio::sync::Mutex<Cursor>,
    /// Told when there may be something to claim.
    wake: Arc<Notify>,
    listener: Mutex<Option<AbortHandle>>,
}

#[derive(Default)]
struct Cursor {
    behind: String,
    loose_first: bool,
}

impl fmt::Debug for PostgresQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.inner;
        f.debug_struct("PostgresQueue")
            .field("place", &inner.place)
            .field("queue", &inner.settings.queue)
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            listener.abort();
        }
    }
}

impl PostgresQueue {
    /// A queue. Nothing is connected before it is needed, so this succeeds while the server is away.
    pub fn open(settings: Settings) -> Result<Self, OpenError> {
        let turns = Some(settings.ungrouped);
        Self::open_with(settings, turns)
    }

    /// A queue to publish to.
    fn open_sink(settings: Settings) -> Result<Self, OpenError> {
        Self::open_with(settings, None)
    }

    fn open_with(settings: Settings, turns: Option<Ungrouped>) -> Result<Self, OpenError> {
        let options = Self::check(&settings)?;
        let place = place(&options);
        let pool = PgPoolOptions::new()
            .max_connections(settings.connections.max(1))
            .acquire_timeout(CONNECT)
            .connect_lazy_with(options);
        let statements = Statements::of(&settings.queue, MESSAGE_BYTES_MAX + 1);
        Ok(PostgresQueue {
            inner: Arc::new(Inner {
                settings,
                pool,
                statements,
                turns,
                place,
                is_set_up: tokio::sync::Mutex::new(false),
                was_set_up: AtomicBool::new(false),
                cursor: tokio::sync::Mutex::default(),
                wake: Arc::default(),
                listener: Mutex::default(),
            }),
        })
    }

    /// Whether there can be such a queue.
    fn check(settings: &Settings) -> Result<PgConnectOptions, OpenError> {
        if !is_queue_name(&settings.queue) {
            return Err(OpenError::BadName(settings.queue.chars().take(2 * QUEUE_NAME_MAX).collect()));
        }
        connect_options(&settings.url, &settings.name)
    }

    /// Where it is, without the password.
    pub fn place(&self) -> &str {
        &self.inner.place
    }

    /// Sees to it that all is there, installing what is missing if that is allowed. Everything else does this by itself.
    pub async fn set_up(&self) -> Result<(), SourceError> {
        self.inner.set_up().await
    }
}

/// The address as options. The planner is told to stay with the indexes: a plan that was made while the queue was empty must not be a scan of
/// the whole queue when it is full.
fn connect_options(url: &Secret, name: &str) -> Result<PgConnectOptions, OpenError> {
    let bad = |error: sqlx::Error| OpenError::BadUrl(error.to_string());
    let options = PgConnectOptions::from_str(url.expose()).map_err(bad)?;
    let name: String = name.chars().filter(char::is_ascii).take(40).collect();
    Ok(options.application_name(&format!("laneway {name}")).options([
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
        ("jit", "off"),
        ("default_transaction_isolation", "read\\ committed"),
    ]))
}

/// Where the server is, without name and password.
fn place(options: &PgConnectOptions) -> String {
    let host = options.get_socket().map_or_else(
        || format!("{}:{}", options.get_host(), options.get_port()),
        |socket| socket.display().to_string(),
    );
    format!("{host}/{}", options.get_database().unwrap_or("(the user's own database)"))
}

// ── asking ────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A question to the server.
type Question<T> =
    Box<dyn for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send>;

/// Why there was no answer.
enum Failure {
    Sql(sqlx::Error),
    Late(Duration),
}

impl Inner {
    /// Asks on a connection, with a deadline. A connection that has not answered in time is closed: nobody knows what it would say next.
    async fn ask_once<T>(&self, limit: Duration, question: Question<T>) -> Result<T, Failure> {
        let mut connection = self.pool.acquire().await.map_err(Failure::Sql)?;
        match timeout(limit, question(&mut connection)).await {
            Ok(answer) => answer.map_err(Failure::Sql),
            Err(_) => {
                drop(connection.detach());
                Err(Failure::Late(limit))
            }
        }
    }

    /// Asks, whether or not the queue is there.
    async fn ask_within<T>(&self, limit: Duration, question: Question<T>) -> Result<T, SourceError> {
        self.ask_once(limit, question).await.map_err(|failure| self.explained(failure))
    }

    /// Asks about the queue, when that is there. What fails because it is not is set up again the next time.
    async fn ask<T>(&self, question: Question<T>) -> Result<T, SourceError> {
        self.set_up().await?;
        let answer = self.ask_within(ANSWER, question).await;
        self.note(answer).await
    }

    /// Asks again when the statement met another one that locked the same rows in another order, which Postgres ends by telling one of them.
    async fn ask_despite_conflicts<T>(&self, question: impl Fn() -> Question<T>) -> Result<T, SourceError> {
        self.set_up().await?;
        let mut left = CONFLICTS_MAX;
        let answer = loop {
            left -= 1;
            match self.ask_once(ANSWER, question()).await {
                Err(Failure::Sql(error)) if left > 0 && is_conflict(&error) => {}
                answer => break answer,
            }
        };
        self.note(answer.map_err(|failure| self.explained(failure))).await
    }

    async fn note<T>(&self, answer: Result<T, SourceError>) -> Result<T, SourceError> {
        if matches!(answer, Err(SourceError::Broken(_))) {
            *self.is_set_up.lock().await = false;
        }
        answer
    }

    fn explained(&self, failure: Failure) -> SourceError {
        match failure {
            Failure::Sql(error) => self.trouble(&error),
            Failure::Late(limit) => {
                SourceError::Unavailable(format!("{} did not answer within {limit:?}", self.place))
            }
        }
    }

    fn trouble(&self, error: &sqlx::Error) -> SourceError {
        let place = &self.place;
        match error {
            sqlx::Error::PoolClosed => SourceError::Closed,
            sqlx::Error::PoolTimedOut => {
                SourceError::Unavailable(format!("no connection to {place} within {CONNECT:?}"))
            }
            sqlx::Error::Database(database) => {
                let code = database.code().unwrap_or_default();
                explain(place, &self.settings.queue, &code, database.message())
            }
            other => SourceError::Unavailable(format!("{place}: {other}")),
        }
    }
}

/// What an error of the server means, by its code (an appendix of the manual of Postgres lists them).
fn explain(place: &str, queue: &str, code: &str, message: &str) -> SourceError {
    match code {
        "28P01" | "28000" => {
            SourceError::Broken(format!("{place} refuses the user or the password: {message}"))
        }
        "3D000" => SourceError::Broken(format!("{place}: {message}")),
        "42501" => SourceError::Broken(format!(
            "{place}: {message}; the user needs the schemas pgmq and laneway_queue, their tables and sequences"
        )),
        "42P01" | "42883" | "42703" | "3F000" => {
            SourceError::Broken(format!("{place}: the queue {queue} is not, or not all, there: {message}"))
        }
        _ => SourceError::Unavailable(format!("{place}: {message} ({code})")),
    }
}

/// Whether Postgres asks to try again: a deadlock, or a conflict of transactions.
fn is_conflict(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| code == "40P01" || code == "40001")
}

fn seconds(time: Duration) -> f64 {
    time.min(WAIT_MAX).as_secs_f64()
}

// ── the set-up ────────────────────────────────────────────────────────────────────────────────────────────────────────

/// What is there of what a queue needs.
struct Inventory {
    pgmq: bool,
    version: Option<i32>,
    queue: bool,
    index: bool,
    /// How messages without a group take turns, if any do.
    turns: Option<Ungrouped>,
    signal: bool,
}

impl Inner {
    async fn set_up(&self) -> Result<(), SourceError> {
        let mut is_set_up = self.is_set_up.lock().await;
        if *is_set_up {
            return Ok(());
        }
        let found = self.look().await?;
        if found.missing(self.turns).is_some() {
            self.install(found).await?;
        }
        *is_set_up = true;
        self.was_set_up.store(true, Relaxed);
        Ok(())
    }

    async fn look(&self) -> Result<Inventory, SourceError> {
        let queue = self.settings.queue.clone();
        let found = self.ask_within(ANSWER, Box::new(move |connection| look(connection, queue).boxed()));
        found.await
    }

    /// Installs what is missing, if that is allowed. Others may be at it, too: they take turns, and look again when theirs has come.
    async fn install(&self, found: Inventory) -> Result<(), SourceError> {
        if !self.settings.create {
            let missing = match found.missing(self.turns) {
                Some(missing) if found.pgmq && !found.queue => {
                    format!("there is no queue {} ({missing})", self.settings.queue)
                }
                missing => missing.unwrap_or_default().to_owned(),
            };
            return Err(SourceError::Broken(format!(
                "{}: {missing}; a source or a sink with `create = true` sets it up, for a user who may",
                self.place
            )));
        }
        if !found.pgmq {
            let installed = timeout(SET_UP, install_pgmq(self.pool.clone())).await;
            let problem = match installed {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("took longer than {SET_UP:?}")),
            };
            if let Some(problem) = problem {
                let text = format!("{}: pgmq cannot be installed: {problem}", self.place);
                return Err(SourceError::Broken(text));
            }
        }
        let (queue, ungrouped) = (self.settings.queue.clone(), self.settings.ungrouped);
        let installing = install(self.pool.clone(), queue, self.turns, ungrouped);
        let installed = timeout(SET_UP, installing).await;
        let installed =
            installed.map_err(|_| Failure::Late(SET_UP)).and_then(|done| done.map_err(Failure::Sql));
        installed.map_err(|failure| self.explained(failure))
    }
}

impl Inventory {
    /// What is not as it should be, the first thing of it.
    fn missing(&self, turns: Option<Ungrouped>) -> Option<&'static str> {
        let needs = [
            (self.pgmq, "pgmq is not installed"),
            (
                self.version == Some(SCHEMA_VERSION),
                "the schema laneway_queue is missing, or of another version",
            ),
            (self.queue, "the queue is missing"),
            (self.index, "the queue has no index of its groups"),
            (self.has(turns), "publishers do not take turns as they should (a trigger is missing)"),
            (self.signal, "insertions are not signalled (a trigger is missing)"),
        ];
        needs.into_iter().find(|(is_there, _)| !is_there).map(|(_, what)| what)
    }

    /// Whether publishers take turns, as they should if that is said.
    fn has(&self, turns: Option<Ungrouped>) -> bool {
        self.turns.is_some() && turns.is_none_or(|turns| self.turns == Some(turns))
    }
}

async fn look(connection: &mut PgConnection, queue: String) -> Result<Inventory, sqlx::Error> {
    let table = statements::table(&queue);
    let row = sqlx::query(
        "SELECT to_regprocedure('pgmq.create(text)') IS NOT NULL, to_regclass('laneway_queue.version') IS NOT NULL,
             to_regclass($1) IS NOT NULL, to_regclass($2) IS NOT NULL,
             (SELECT pg_get_triggerdef(oid) FROM pg_trigger
              WHERE tgrelid = to_regclass($1) AND tgname = 'laneway_take_turn'),
             EXISTS (SELECT FROM pg_trigger
              WHERE tgrelid = to_regclass($1) AND tgname = 'laneway_signal')",
    )
    .bind(&table)
    .bind(format!("pgmq.q_{queue}_laneway"))
    .fetch_one(&mut *connection)
    .await?;
    let turns: Option<String> = row.get(4);
    let turns = turns.map(|definition| match definition.contains("'serial'") {
        true => Ungrouped::Serial,
        false => Ungrouped::Unordered,
    });
    let mut found = Inventory {
        pgmq: row.get(0),
        version: None,
        queue: row.get(2),
        index: row.get(3),
        turns,
        signal: row.get(5),
    };
    if row.get(1) {
        let version = sqlx::query_scalar("SELECT version FROM laneway_queue.version");
        found.version = version.fetch_optional(&mut *connection).await?;
    }
    Ok(found)
}

fn install_pgmq(pool: PgPool) -> BoxFuture<'static, Result<(), pgmq::PgmqError>> {
    async move { pgmq::PGMQueueExt::new_with_pool(pool).await.install_sql_from_embedded().await }.boxed()
}

/// Brings everything but pgmq itself into the state that is wanted, in one transaction. Where it does not matter how publishers take turns, and they do not yet, they begin as
/// `ungrouped` says.
fn install(
    pool: PgPool,
    queue: String,
    turns: Option<Ungrouped>,
    ungrouped: Ungrouped,
) -> BoxFuture<'static, Result<(), sqlx::Error>> {
    async move { install_in(pool.begin().await?, queue, turns, ungrouped).await }.boxed()
}

async fn install_in(
    mut transaction: sqlx::Transaction<'static, sqlx::Postgres>,
    queue: String,
    turns: Option<Ungrouped>,
    ungrouped: Ungrouped,
) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(SET_UP_LOCK).execute(&mut *transaction).await?;
    let found = look(&mut transaction, queue.clone()).await?;
    if found.version != Some(SCHEMA_VERSION) {
        sqlx::Executor::execute(&mut *transaction, SCHEMA).await?;
    }
    let table = statements::table(&queue);
    if !found.queue {
        sqlx::query("SELECT pgmq.create($1)").bind(&queue).execute(&mut *transaction).await?;
        // Rows live for seconds: they have to be swept out by their number, not by their share of the table.
        let sweep = format!(
            "ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
                 autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 2000, autovacuum_vacuum_cost_delay = 0)"
        );
        sqlx::query(&sweep).execute(&mut *transaction).await?;
    }
    if !found.index {
        sqlx::query(&statements::index(&queue)).execute(&mut *transaction).await?;
    }
    if !found.has(turns) {
        let mode = if ungrouped == Ungrouped::Serial { "serial" } else { "unordered" };
        let trigger = format!(
            "DROP TRIGGER IF EXISTS laneway_take_turn ON {table};
             CREATE TRIGGER laneway_take_turn BEFORE INSERT ON {table} FOR EACH ROW
                 EXECUTE FUNCTION laneway_queue.take_turn('{table}_msg_id_seq', '{mode}')"
        );
        sqlx::Executor::execute(&mut *transaction, trigger.as_str()).await?;
    }
    if !found.signal {
        let trigger = format!(
            "CREATE TRIGGER laneway_signal AFTER INSERT ON {table} FOR EACH STATEMENT
                 EXECUTE FUNCTION laneway_queue.signal()"
        );
        sqlx::query(&trigger).execute(&mut *transaction).await?;
    }
    transaction.commit().await
}

// ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────

/// For publishers.
impl PostgresQueue {
    /// Publishes all of these, in this order, or none. They are committed when this comes back.
    pub async fn publish_many(&self, publications: Vec<Publication>) -> Result<Vec<Published>, PublishError> {
        let refused = |refusal, publications| Err(PublishError { refusal, publications });
        if publications.is_empty() {
            return Ok(Vec::new());
        }
        if let Err(refusal) = crate::source::embedded::check(&publications, None) {
            return refused(refusal, publications);
        }
        let (queue, asked) = (self.inner.settings.queue.clone(), publications.clone());
        let window = seconds(self.inner.settings.deduplication_window);
        let asked = Arc::new(asked);
        let question = || -> Question<Vec<Published>> {
            let (queue, asked) = (queue.clone(), Arc::clone(&asked));
            Box::new(move |connection| publish(connection, queue, asked, window).boxed())
        };
        let published = self.inner.ask_despite_conflicts(question).await;
        self.inner.wake.notify_waiters();
        published.or_else(|error| refused(Refusal::Failed(error), publications))
    }
}

async fn publish(
    connection: &mut PgConnection,
    queue: String,
    publications: Arc<Vec<Publication>>,
    window: f64,
) -> Result<Vec<Published>, sqlx::Error> {
    let (mut texts, mut forms) = (Vec::new(), Vec::new());
    for publication in publications.iter() {
        // What Postgres cannot keep as text: other bytes than UTF-8, and the zero.
        let text = std::str::from_utf8(&publication.text).ok().filter(|text| !text.contains('\0'));
        forms.push(if text.is_some() { "plain" } else { "base64" });
        texts.push(text.map_or_else(|| BASE64.encode(&publication.text), str::to_owned));
    }
    let name =
        |name: &Option<Arc<str>>| name.as_deref().filter(|name| !name.trim().is_empty()).map(str::to_owned);
    let groups: Vec<_> = publications.iter().map(|publication| name(&publication.group)).collect();
    let ids: Vec<_> = publications.iter().map(|publication| name(&publication.deduplication_id)).collect();
    let delays: Vec<f64> = publications.iter().map(|publication| seconds(publication.delay)).collect();
    let rows = sqlx::query("SELECT * FROM laneway_queue.publish($1, $2, $3, $4, $5, $6, $7)")
        .bind(queue)
        .bind(texts)
        .bind(groups)
        .bind(ids.iter().any(Option::is_some).then_some(ids))
        .bind(delays)
        .bind(forms)
        .bind(window)
        .fetch_all(connection)
        .await?;
    let published =
        |row: &PgRow| Published { sequence: row.get::<i64, _>(1) as u64, duplicate: row.get::<bool, _>(2) };
    Ok(rows.iter().map(published).collect())
}

// ── claiming ──────────────────────────────────────────────────────────────────────────────────────────────────────────

/// Deliveries on their way to whoever asked for them. If nobody takes them, they go back.
struct OnTheWay {
    inner: Arc<Inner>,
    deliveries: Vec<Delivery>,
}

impl Drop for OnTheWay {
    fn drop(&mut self) {
        let deliveries = std::mem::take(&mut self.deliveries);
        if deliveries.is_empty() {
            return;
        }
        // Without a runtime nobody can tell the server, and the leases run out.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let inner = Arc::clone(&self.inner);
            runtime.spawn(async move {
                let back = Disposal::GiveBack { delay: Duration::ZERO };
                let back = deliveries.into_iter().map(|delivery| (delivery.receipt, back.clone())).collect();
                let _ = inner.settle(back).await;
            });
        }
    }
}

impl Inner {
    async fn claim(self: &Arc<Self>, wants: Wants) -> Result<Vec<Delivery>, SourceError> {
        let deadline = Instant::now() + wants.wait.min(WAIT_MAX);
        let mut pause = POLL.0;
        self.listen();
        loop {
            let woken = self.wake.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            let claimed = self.claim_now(wants).await?;
            if !claimed.is_empty() || Instant::now() >= deadline {
                return Ok(claimed);
            }
            let due = self.next_due().await?;
            let until = deadline.min(Instant::now() + pause.min(due));
            pause = tokio::select! {
                () = woken => POLL.0,
                () = sleep_until(until) => (pause * 2).min(POLL.1),
            };
        }
    }

    /// Claims in a task of its own: a caller that goes away must not leave a statement half read, nor take with it what it would have got.
    async fn claim_now(self: &Arc<Self>, wants: Wants) -> Result<Vec<Delivery>, SourceError> {
        let (answer, answered) = oneshot::channel();
        let (inner, asked) = (Arc::clone(self), Instant::now());
        tokio::spawn(async move {
            let claimed = inner.take(wants.most.min(BATCH_MAX), seconds(wants.lease)).await;
            let _ = answer.send(claimed.map(|deliveries| OnTheWay { inner, deliveries }));
        });
        let mut claimed = answered.await.unwrap_or(Err(SourceError::Closed))?;
        // Leases begin at the server. Of an answer that was so long on its way, to a process that was stopped from running for example, they may be over, and others may have done the work.
        if asked.elapsed() > wants.lease / 2 {
            return Ok(Vec::new());
        }
        Ok(std::mem::take(&mut claimed.deliveries))
    }

    /// Takes what is free: the first of each group, beginning behind where the last claim ended, and those without a group. What was taken
    /// before something failed is handed out all the same.
    async fn take(&self, most: usize, lease: f64) -> Result<Vec<Delivery>, SourceError> {
        let mut cursor = self.cursor.lock().await;
        let mut taken = Vec::new();
        let result = self.take_into(&mut taken, &mut cursor, most, lease).await;
        taken.sort_unstable_by_key(|delivery: &Delivery| delivery.id);
        match result {
            Err(error) if taken.is_empty() => Err(error),
            _ => Ok(taken),
        }
    }

    async fn take_into(
        &self,
        taken: &mut Vec<Delivery>,
        cursor: &mut Cursor,
        most: usize,
        lease: f64,
    ) -> Result<(), SourceError> {
        let is_loose = self.settings.ungrouped == Ungrouped::Unordered;
        let loose_first = cursor.loose_first;
        cursor.loose_first = !loose_first;
        if is_loose && loose_first {
            self.take_loose(taken, most, lease).await?;
        }
        // From where the last claim ended, and once round.
        let behind = cursor.behind.clone();
        let rounds = if behind.is_empty() { vec![behind] } else { vec![behind, String::new()] };
        for from in rounds {
            let wanted = most - taken.len();
            if wanted == 0 {
                return Ok(());
            }
            let (count, last) = self.take_heads(taken, from, wanted, lease).await?;
            cursor.behind = last.filter(|_| count == wanted).unwrap_or_default();
        }
        if is_loose && !loose_first && taken.len() < most {
            self.take_loose(taken, most - taken.len(), lease).await?;
        }
        Ok(())
    }

    /// Takes the first of each group behind one. Says how many there were, and the last of the groups.
    async fn take_heads(
        &self,
        taken: &mut Vec<Delivery>,
        behind: String,
        most: usize,
        lease: f64,
    ) -> Result<(usize, Option<String>), SourceError> {
        let statement = self.statements.claim_heads.clone();
        let except = if self.settings.ungrouped == Ungrouped::Unordered { UNGROUPED } else { "" };
        let question: Question<Vec<PgRow>> = Box::new(move |connection| {
            async move {
                let query = sqlx::query(&statement).bind(behind).bind(most as i64).bind(lease).bind(except);
                query.fetch_all(connection).await
            }
            .boxed()
        });
        let rows = self.ask(question).await?;
        let last = rows.iter().map(|row| row.get::<String, _>(3)).max();
        taken.extend(rows.iter().map(delivery));
        Ok((rows.len(), last))
    }

    async fn take_loose(
        &self,
        taken: &mut Vec<Delivery>,
        most: usize,
        lease: f64,
    ) -> Result<(), SourceError> {
        let statement = self.statements.claim_loose.clone();
        let question: Question<Vec<PgRow>> = Box::new(move |connection| {
            async move { sqlx::query(&statement).bind(most as i64).bind(lease).fetch_all(connection).await }
                .boxed()
        });
        taken.extend(self.ask(question).await?.iter().map(delivery));
        Ok(())
    }

    /// How long until a row that is hidden now may be seen.
    async fn next_due(&self) -> Result<Duration, SourceError> {
        let statement = self.statements.next_due.clone();
        let question: Question<Option<f64>> = Box::new(move |connection| {
            async move { sqlx::query_scalar(&statement).fetch_one(connection).await }.boxed()
        });
        let due = self.ask(question).await?;
        // A little later than that, or it is looked for a moment too early.
        Ok(due
            .map_or(WAIT_MAX, |due| Duration::from_secs_f64(due.clamp(0.0, WAIT_MAX.as_secs_f64()) + 0.001)))
    }

    /// Begins to listen for the server's signals, unless somebody does already.
    fn listen(self: &Arc<Self>) {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if listener.as_ref().is_none_or(AbortHandle::is_finished) {
            let task = tokio::spawn(hear(Arc::downgrade(self), self.pool.clone()));
            *listener = Some(task.abort_handle());
        }
    }
}

/// Wakes claims when the server signals an insertion. Without it they look by themselves, so whatever goes wrong here costs a moment, no more.
async fn hear(inner: Weak<Inner>, pool: PgPool) {
    let mut pause = POLL.1;
    while !pool.is_closed() {
        let Some(channel) = inner.upgrade().map(|inner| format!("laneway_queue.q_{}", inner.settings.queue))
        else {
            return;
        };
        let listening = async {
            // A connection of its own: those of the pool are for questions.
            let own = PgPoolOptions::new().max_connections(1).acquire_timeout(CONNECT);
            let own = own.connect_with((*pool.connect_options()).clone()).await?;
            let mut listener = PgListener::connect_with(&own).await?;
            listener.listen(&channel).await?;
            Ok::<_, sqlx::Error>(listener)
        };
        if let Ok(mut listener) = listening.await {
            pause = POLL.1;
            // Whatever came before it listened was not heard.
            if let Some(inner) = inner.upgrade() {
                inner.wake.notify_waiters();
            }
            while let Ok(Some(_)) = listener.try_recv().await {
                let Some(inner) = inner.upgrade() else { return };
                inner.wake.notify_waiters();
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(POLL.1 * 10);
    }
}

/// A claimed row as a delivery.
fn delivery(row: &PgRow) -> Delivery {
    let (number, count, at): (i64, i32, i64) = (row.get(0), row.get(1), row.get(2));
    let group: String = row.get(3);
    let (form, text): (Option<String>, Option<String>) = (row.get(4), row.get(5));
    Delivery {
        id: number as u64,
        receipt: Receipt::Numbers([number as u64, count as u64, at as u64, 0]),
        group: (group != UNGROUPED).then(|| group.into()),
        text: decoded(form.as_deref(), text),
        attempt: count.max(0) as u32,
        sequence: number as u64,
    }
}

/// The bytes of a text. What claims to be base64 and is not stays as it is, and will be found not to be a message.
fn decoded(form: Option<&str>, text: Option<String>) -> Arc<[u8]> {
    let text = text.unwrap_or_default().into_bytes();
    match form {
        Some("base64") => BASE64.decode(&text).unwrap_or(text).into(),
        _ => text.into(),
    }
}

/// The parts of a receipt: number, count, time.
fn parsed(receipt: &Receipt) -> Option<(i64, i32, i64)> {
    let Receipt::Numbers([number, count, at, 0]) = *receipt else { return None };
    Some((i64::try_from(number).ok()?, i32::try_from(count).ok()?, i64::try_from(at).ok()?))
}

// ── settling ──────────────────────────────────────────────────────────────────────────────────────────────────────────

/// Receipts as Postgres wants them, each once.
#[derive(Clone, Default)]
struct Asked {
    numbers: Vec<i64>,
    counts: Vec<i32>,
    times: Vec<i64>,
}

impl Asked {
    fn push(&mut self, (number, count, time): (i64, i32, i64)) {
        self.numbers.push(number);
        self.counts.push(count);
        self.times.push(time);
    }
}

/// Which of the receipts were good: each of them once, in the order of the question.
fn answers(receipts: Vec<Option<(i64, i32, i64)>>, good: &[PgRow]) -> Vec<Settled> {
    let mut good: HashSet<(i64, i32)> = good.iter().map(|row| (row.get(0), row.get(1))).collect();
    // Of receipts that differ in their time only, one is good: the first that is asked about would take the other's answer. Times differ only
    // between a queue and another of the same name, so whoever holds both has one that is long stale.
    let answer = |receipt: Option<(i64, i32, i64)>| {
        let is_good = receipt.is_some_and(|(number, count, _)| good.remove(&(number, count)));
        if is_good { Settled::Settled } else { Settled::Stale }
    };
    receipts.into_iter().map(answer).collect()
}

impl Inner {
    async fn settle(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        let mut asked = Asked::default();
        let (mut kinds, mut delays, mut reasons) = (Vec::new(), Vec::new(), Vec::new());
        let mut seen = HashSet::new();
        let mut receipts = Vec::with_capacity(disposals.len());
        for (receipt, disposal) in disposals {
            let receipt = parsed(&receipt).filter(|receipt| seen.insert(*receipt));
            receipts.push(receipt);
            let Some(receipt) = receipt else { continue };
            asked.push(receipt);
            let (kind, delay, reason) = told(disposal);
            kinds.push(kind);
            delays.push(delay);
            reasons.push(reason);
        }
        if asked.numbers.is_empty() {
            return Ok(answers(receipts, &[]));
        }
        let (statement, queue) = (self.statements.settle.clone(), self.settings.queue.clone());
        let question = || -> Question<Vec<PgRow>> {
            let (statement, queue, asked) = (statement.clone(), queue.clone(), asked.clone());
            let (kinds, delays, reasons) = (kinds.clone(), delays.clone(), reasons.clone());
            Box::new(move |connection| {
                async move {
                    let query =
                        sqlx::query(&statement).bind(asked.numbers).bind(asked.counts).bind(asked.times);
                    query.bind(kinds).bind(delays).bind(reasons).bind(queue).fetch_all(connection).await
                }
                .boxed()
            })
        };
        let good = self.ask_despite_conflicts(question).await?;
        if !good.is_empty() {
            self.wake.notify_waiters();
        }
        Ok(answers(receipts, &good))
    }

    async fn extend(&self, receipts: &[Receipt], lease: Duration) -> Result<Vec<Settled>, SourceError> {
        let receipts: Vec<_> = receipts.iter().map(parsed).collect();
        let mut asked = Asked::default();
        receipts.iter().flatten().for_each(|receipt| asked.push(*receipt));
        if asked.numbers.is_empty() {
            return Ok(answers(receipts, &[]));
        }
        let statement = self.statements.extend.clone();
        let question = || -> Question<Vec<PgRow>> {
            let (statement, asked) = (statement.clone(), asked.clone());
            Box::new(move |connection| {
                async move {
                    let query =
                        sqlx::query(&statement).bind(asked.numbers).bind(asked.counts).bind(asked.times);
                    query.bind(seconds(lease)).fetch_all(connection).await
                }
                .boxed()
            })
        };
        let good = self.ask_despite_conflicts(question).await?;
        Ok(answers(receipts, &good))
    }
}

/// A disposal as the statement wants it: kind, delay in seconds, reason.
fn told(disposal: Disposal) -> (i16, f64, String) {
    match disposal {
        Disposal::Done => (kinds::DONE, 0.0, String::new()),
        Disposal::GiveBack { delay } => (kinds::GIVE_BACK, seconds(delay), String::new()),
        Disposal::DeadLetter { reason } => (kinds::DEAD, 0.0, shortened(reason)),
        Disposal::Quarantine { reason } => (kinds::QUARANTINE, 0.0, shortened(reason)),
    }
}

fn shortened(reason: String) -> String {
    // Postgres keeps no zeros in a text.
    crate::source::cut(&reason, REASON_BYTES_MAX).replace('\0', " ")
}

impl Source for PostgresQueue {
    fn name(&self) -> &str {
        &self.inner.settings.name
    }

    fn keeps(&self) -> Result<Option<Arc<dyn Keeps>>, SourceError> {
        Ok(Some(Arc::new(self.clone())))
    }

    fn kind(&self) -> &'static str {
        "postgres"
    }

    fn is_open(&self) -> bool {
        self.inner.was_set_up.load(Relaxed)
    }

    /// Lets go of all connections. Everything later is answered with [`SourceError::Closed`].
    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            self.inner.pool.close().await;
            self.inner.wake.notify_waiters();
        }
        .boxed()
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        self.inner.claim(wants).boxed()
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        self.inner.settle(disposals).boxed()
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        async move { self.inner.extend(&receipts, lease).await }.boxed()
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        async {
            let (statement, queue) = (self.inner.statements.depth.clone(), self.inner.settings.queue.clone());
            let question: Question<PgRow> = Box::new(move |connection| {
                async move {
                    sqlx::query(&statement).bind(queue).bind(COUNTED_MAX).fetch_one(connection).await
                }
                .boxed()
            });
            let row = self.inner.ask(question).await?;
            let [all, leased, dead, quarantined] = [0, 1, 2, 3].map(|at| row.get::<i64, _>(at).max(0) as u64);
            Ok(Depth { waiting: all.saturating_sub(leased), leased, dead, quarantined })
        }
        .boxed()
    }
}

// ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────

/// How a kind of rest is called in the table.
fn word(rest: Rest) -> &'static str {
    match rest {
        Rest::DeadLetters => "dead",
        Rest::Quarantine => "quarantine",
    }
}

impl Keeps for PostgresQueue {
    fn kept(&self, rest: Rest, after: u64, most: usize) -> BoxFuture<'_, Result<Vec<Kept>, SourceError>> {
        async move {
            let queue = self.inner.settings.queue.clone();
            let (after, most) = (after.min(i64::MAX as u64) as i64, most.min(BATCH_MAX) as i64);
            let question: Question<Vec<PgRow>> = Box::new(move |connection| {
                async move {
                    sqlx::query(
                        "SELECT place, of_group, reason, attempts, published, kept, form, text FROM (
                             SELECT *, sum(octet_length(text)) OVER (ORDER BY place) - octet_length(text) AS before FROM (
                                 SELECT place, nullif(headers ->> 'x-pgmq-group', '') AS of_group, reason, read_ct AS attempts,
                                     (extract(epoch FROM enqueued_at) * 1000)::bigint AS published,
                                     (extract(epoch FROM kept_at) * 1000)::bigint AS kept, headers ->> 'x-laneway-text' AS form,
                                     coalesce(CASE WHEN headers ? 'x-laneway-text' THEN message #>> '{}' ELSE message::text END, '') AS text
                                 FROM laneway_queue.kept WHERE queue = $1 AND kind = $2 AND place > $3 ORDER BY place LIMIT $4) AS those
                             ) AS page WHERE before < $5 ORDER BY place",
                    )
                    .bind(queue)
                    .bind(word(rest))
                    .bind(after)
                    .bind(most)
                    .bind(PAGE_BYTES as i64)
                    .fetch_all(connection)
                    .await
                }
                .boxed()
            });
            Ok(self.inner.ask(question).await?.iter().map(kept).collect())
        }
        .boxed()
    }

    fn redrive(&self, which: Option<Vec<u64>>, most: usize) -> BoxFuture<'_, Result<Redriven, SourceError>> {
        self.redrive_places(which, most).boxed()
    }

    fn purge(&self, rest: Rest) -> BoxFuture<'_, Result<usize, SourceError>> {
        async move {
            let queue = self.inner.settings.queue.clone();
            let question: Question<usize> = Box::new(move |connection| {
                async move {
                    let query = sqlx::query("DELETE FROM laneway_queue.kept WHERE queue = $1 AND kind = $2");
                    let query = query.bind(queue).bind(word(rest));
                    Ok(query.execute(connection).await?.rows_affected() as usize)
                }
                .boxed()
            });
            self.inner.ask(question).await
        }
        .boxed()
    }
}

impl PostgresQueue {
    /// Those at these places, or so many of the oldest, under new numbers.
    async fn redrive_places(&self, which: Option<Vec<u64>>, most: usize) -> Result<Redriven, SourceError> {
        let places = which.map(|all| all.into_iter().map(|place| place as i64).collect::<Vec<_>>());
        // Of those that are named none is too many.
        let most = if places.is_some() { BATCH_MAX } else { most.min(BATCH_MAX) } as i64;
        let queue = self.inner.settings.queue.clone();
        let statement = format!(
            "WITH back AS (
                 DELETE FROM laneway_queue.kept WHERE place IN (
                     SELECT place FROM laneway_queue.kept
                     WHERE queue = $1 AND kind = 'dead' AND ($2::bigint[] IS NULL OR place = ANY($2))
                     ORDER BY place LIMIT $3 FOR UPDATE)
                 RETURNING place, message, headers),
             again AS (
                 INSERT INTO {} (vt, message, headers) SELECT clock_timestamp(), message, headers FROM back ORDER BY place)
             SELECT place FROM back",
            statements::table(&queue)
        );
        let asked = places.clone().unwrap_or_default();
        let question = || -> Question<Vec<i64>> {
            let (statement, queue, places) = (statement.clone(), queue.clone(), places.clone());
            Box::new(move |connection| {
                let query = async move {
                    let query = sqlx::query_scalar(&statement).bind(queue).bind(places).bind(most);
                    query.fetch_all(connection).await
                };
                query.boxed()
            })
        };
        let redriven = self.inner.ask_despite_conflicts(question).await;
        self.inner.wake.notify_waiters();
        let redriven: HashSet<i64> = redriven?.into_iter().collect();
        let missing = asked.into_iter().filter(|place| !redriven.contains(place)).map(|place| place as u64);
        Ok(Redriven { count: redriven.len(), missing: missing.collect() })
    }
}

fn kept(row: &PgRow) -> Kept {
    let number = |at: usize| u64::try_from(row.get::<i64, _>(at)).unwrap_or(0);
    let group: Option<String> = row.get(1);
    let (form, text): (Option<String>, Option<String>) = (row.get(6), row.get(7));
    Kept {
        sequence: number(0),
        group: group.map(Arc::from),
        attempts: Some(row.get::<i32, _>(3).max(0) as u32),
        published_millis: Some(number(4)),
        kept_millis: number(5),
        reason: row.get(2),
        text: decoded(form.as_deref(), text),
    }
}
