//! The file: tables, statements, and what SQLite's errors mean here.
//!
//! The writer (`writer.rs`) is the only one who calls this, on the only connection. Nothing in here knows the index.
//!
//! # Tables
//!
//! | table | a row is |
//! |---|---|
//! | `queues` | a queue and its number |
//! | `messages` | a message that is not settled, by its sequence. No index beside the primary key: the rows are found by sequence, always |
//! | `settled` | a note: the sequences of messages that are done and whose rows are still to be removed (`sweep.rs`) |
//! | `kept` | a dead letter, or a message in quarantine, under the sequence that it had |
//! | `deduplication` | a deduplication id that was seen, with the sequence of the message that had it, until it expires; or an idempotency key, with a digest of the call that had it |
//! | `parked` | a group that is parked: nothing of it goes to its target until it is resumed, whatever happens to the process |
//! | `store` | one row: the next sequence, and the epoch, which counts how often the file was opened |
//!
//! Sequences come from the `store` row and not from `max(sequence)`, so that one is never given twice, even when the newest message has
//! been settled. The file is opened in SQLite's exclusive locking mode: whoever else opens it is told that it is taken.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};

use super::index::{Millis, Sequence};
use super::publication::name_of;
use super::{Durability, OpenError, sweep};
use crate::parks::Parked;
use crate::source::{Kept, PAGE_BYTES, SourceError};

/// Tells our files from other people's: "Lane" in ASCII.
const APPLICATION_ID: i32 = 0x4c61_6e65;
/// Raised when the tables change.
const VERSION: i32 = 3;
/// Files of this version lack the notes and the parked groups, and nothing else.
const VERSION_WITHOUT_NOTES: i32 = 1;
/// Files of this version lack the parked groups, and nothing else.
const VERSION_WITHOUT_PARKED: i32 = 2;
/// The write-ahead log is carried over into the file when it has so many pages (16 MiB of 4 KiB each): often enough to stay small, and
/// seldom enough that most messages of a busy queue have been settled by then and their pages are written once.
const CHECKPOINT_PAGES: i32 = 4_096;
/// Pages that SQLite keeps: those of as many messages as a large pool has under way, so that what is settled is not read once more.
const CACHE_KIB: i64 = 16 * 1024;
/// The log is cut back to this size after a burst.
const LOG_BYTES_KEPT: i64 = 64 * 1024 * 1024;

/// One step of a search looks at so many rows, or bytes of them: the writer has other work, and each step is a millisecond or two of its time.
const SEARCH_ROWS: usize = 2_048;
/// See [`SEARCH_ROWS`].
const SEARCH_BYTES: usize = 1024 * 1024;
/// One step remembers so many messages and groups, at most.
const SEARCH_FOUND: usize = 64;

const TABLES: &str = "
    CREATE TABLE queues (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
    CREATE TABLE messages (
        sequence INTEGER PRIMARY KEY, queue INTEGER NOT NULL, due INTEGER NOT NULL, attempts INTEGER NOT NULL,
        published INTEGER NOT NULL, grouping TEXT, text BLOB NOT NULL);
    CREATE TABLE kept (
        sequence INTEGER PRIMARY KEY, queue INTEGER NOT NULL, kind INTEGER NOT NULL, attempts INTEGER NOT NULL,
        published INTEGER NOT NULL, kept INTEGER NOT NULL, reason TEXT NOT NULL, grouping TEXT, text BLOB);
    CREATE INDEX kept_by_queue ON kept (queue, kind, sequence);
    CREATE TABLE deduplication (
        queue INTEGER NOT NULL, id TEXT NOT NULL, sequence INTEGER NOT NULL, expires INTEGER NOT NULL, UNIQUE (queue, id));
    CREATE INDEX deduplication_by_expiry ON deduplication (expires);
    CREATE TABLE store (only INTEGER PRIMARY KEY CHECK (only = 1), next_sequence INTEGER NOT NULL, epoch INTEGER NOT NULL);
    INSERT INTO store VALUES (1, 1, 0);
";

const NOTES: &str = "CREATE TABLE settled (id INTEGER PRIMARY KEY, sequences BLOB NOT NULL);";

const PARKED: &str = "
    CREATE TABLE parked (
        pool TEXT NOT NULL, grouping TEXT NOT NULL, since INTEGER NOT NULL, why TEXT NOT NULL,
        PRIMARY KEY (pool, grouping)) WITHOUT ROWID;
";

/// That a group of a pool is parked, or that it is not any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParkNote {
    /// The code of the pool.
    pub pool: Arc<str>,
    /// The group.
    pub group: Arc<str>,
    /// Since when and why; nothing if it goes on.
    pub parked: Option<Parked>,
}

/// What a kept message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Dead = 0,
    Quarantined = 1,
}

/// A row of `messages`, as the index needs it.
pub(super) struct Scanned {
    pub(super) sequence: Sequence,
    pub(super) queue: u32,
    pub(super) due: Millis,
    pub(super) attempts: u16,
    pub(super) group: Option<Vec<u8>>,
}

/// What is delivered of a message.
#[derive(Clone)]
pub(super) struct Body {
    pub(super) group: Option<Arc<str>>,
    pub(super) text: Arc<[u8]>,
}

/// Without the text, which may hold secrets.
impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Body").field("group", &self.group).finish_non_exhaustive()
    }
}

/// What became of reading a row.
#[derive(Debug)]
pub(super) enum Loaded {
    Body(Body),
    /// The row is not there.
    Missing,
    /// The row is there and is not a message.
    Unreadable(String),
    /// The file could not be read there.
    Failed(SourceError),
}

/// Where a search looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shelf {
    Messages,
    DeadLetters,
}

/// A row that was looked for.
pub(super) struct Row {
    pub(super) sequence: Sequence,
    pub(super) due: Millis,
    pub(super) attempts: u32,
    pub(super) group: Option<Arc<str>>,
    pub(super) id: String,
    pub(super) pool: String,
}

/// What one step of a search has found.
#[derive(Default)]
pub(super) struct Slice {
    pub(super) rows: Vec<Row>,
    /// Groups whose names contain the text.
    pub(super) groups: BTreeSet<Arc<str>>,
    /// Rows of the queue that were looked at.
    pub(super) looked: usize,
    /// Where to go on; nothing when that was all.
    pub(super) next: Option<Sequence>,
}

/// What a search reads of a message.
#[derive(Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Names {
    id: String,
    pool_code: String,
}

/// The connection.
pub(super) struct File {
    connection: Connection,
}

/// What the file knows when it is opened.
pub(super) struct Opened {
    pub(super) file: File,
    pub(super) next_sequence: Sequence,
    pub(super) epoch: u64,
    pub(super) queues: Vec<(u32, String)>,
}

impl File {
    /// Opens or makes the file and takes it for this process alone.
    pub(super) fn open(
        path: Option<&Path>,
        durability: Durability,
        bytes_max: Option<u64>,
    ) -> Result<Opened, OpenError> {
        let connection = match path {
            Some(path) => {
                make(path);
                Connection::open(path)
            }
            None => Connection::open_in_memory(),
        };
        let file = File { connection: connection.map_err(open_error)? };
        file.prepare(durability, bytes_max).map_err(open_error)?;
        file.make_tables()?;
        file.check().map_err(open_error)?;
        let (next_sequence, epoch) = file.begin_epoch().map_err(open_error)?;
        let queues = file.queues().map_err(open_error)?;
        Ok(Opened { file, next_sequence, epoch, queues })
    }

    fn prepare(&self, durability: Durability, bytes_max: Option<u64>) -> rusqlite::Result<()> {
        let connection = &self.connection;
        connection.set_prepared_statement_cache_capacity(64);
        connection.busy_timeout(std::time::Duration::ZERO)?;
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        let synchronous = match durability {
            Durability::PowerLoss => "FULL",
            Durability::Crash => "NORMAL",
        };
        connection.pragma_update(None, "synchronous", synchronous)?;
        connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
        connection.pragma_update(None, "journal_size_limit", LOG_BYTES_KEPT)?;
        connection.pragma_update(None, "temp_store", "MEMORY")?;
        // A negative number is in kibibytes.
        connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
        if let Some(bytes) = bytes_max {
            let page: u32 = connection.pragma_query_value(None, "page_size", |row| row.get(0))?;
            let pages = (bytes / u64::from(page)).clamp(1, u64::from(u32::MAX) - 2) as u32;
            connection.pragma_update(None, "max_page_count", pages)?;
        }
        Ok(())
    }

    fn make_tables(&self) -> Result<(), OpenError> {
        // This writes, or fails: from here on the file is ours.
        self.connection.execute_batch("BEGIN EXCLUSIVE").map_err(open_error)?;
        let made = self.make_tables_inside();
        let end = if made.is_ok() { "COMMIT" } else { "ROLLBACK" };
        self.connection.execute_batch(end).map_err(open_error)?;
        made
    }

    fn make_tables_inside(&self) -> Result<(), OpenError> {
        let pragma = |name| self.connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
        let application = pragma("application_id").map_err(open_error)?;
        let version = pragma("user_version").map_err(open_error)?;
        let tables: i64 = self
            .connection
            .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
            .map_err(open_error)?;
        match (application, version, tables) {
            (0, 0, 0) => {
                self.connection.execute_batch(TABLES).map_err(open_error)?;
                self.connection.pragma_update(None, "application_id", APPLICATION_ID).map_err(open_error)?;
                self.add_tables(&[NOTES, PARKED]).map_err(open_error)
            }
            (APPLICATION_ID, VERSION_WITHOUT_NOTES, _) => {
                self.add_tables(&[NOTES, PARKED]).map_err(open_error)
            }
            (APPLICATION_ID, VERSION_WITHOUT_PARKED, _) => self.add_tables(&[PARKED]).map_err(open_error),
            (APPLICATION_ID, VERSION, _) => Ok(()),
            (APPLICATION_ID, found, _) => Err(OpenError::Version { found, known: VERSION }),
            _ => Err(OpenError::NotOurs("the file is a database of another program".to_owned())),
        }
    }

    fn add_tables(&self, tables: &[&str]) -> rusqlite::Result<()> {
        tables.iter().try_for_each(|table| self.connection.execute_batch(table))?;
        self.connection.pragma_update(None, "user_version", VERSION)
    }

    /// Whether the small tables can be read. The messages are read by the scan.
    fn check(&self) -> rusqlite::Result<()> {
        self.connection.query_row("SELECT count(*) FROM deduplication", [], |_| Ok(()))
    }

    fn begin_epoch(&self) -> rusqlite::Result<(Sequence, u64)> {
        self.connection.query_row(
            "UPDATE store SET epoch = epoch + 1 RETURNING
                 max(next_sequence, 1 + coalesce((SELECT max(sequence) FROM messages), 0)), epoch",
            [],
            |row| Ok((row.get::<_, i64>(0)? as u64, row.get::<_, i64>(1)? as u64)),
        )
    }

    fn queues(&self) -> rusqlite::Result<Vec<(u32, String)>> {
        let mut statement = self.connection.prepare("SELECT id, name FROM queues ORDER BY id")?;
        statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
    }

    /// The groups that are parked.
    pub(super) fn parked(&self) -> rusqlite::Result<Vec<ParkNote>> {
        let mut statement =
            self.connection.prepare_cached("SELECT pool, grouping, since, why FROM parked")?;
        let rows = statement.query_map([], |row| {
            let since = UNIX_EPOCH + Duration::from_millis(integer(row.get_ref(2)));
            let parked = Parked { since, why: row.get::<_, String>(3)?.into() };
            let (pool, group) = (row.get::<_, String>(0)?.into(), row.get::<_, String>(1)?.into());
            Ok(ParkNote { pool, group, parked: Some(parked) })
        })?;
        rows.collect()
    }

    /// Writes down that a group is parked, or is not any more.
    pub(super) fn note_parked(&self, note: &ParkNote) -> rusqlite::Result<()> {
        let (pool, group) = (&*note.pool, &*note.group);
        let Some(parked) = &note.parked else {
            let mut statement =
                self.connection.prepare_cached("DELETE FROM parked WHERE pool = ?1 AND grouping = ?2")?;
            return statement.execute(params![pool, group]).map(|_| ());
        };
        let since = parked.since.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as i64;
        let sql = "INSERT OR REPLACE INTO parked (pool, grouping, since, why) VALUES (?1, ?2, ?3, ?4)";
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.execute(params![pool, group, since, &*parked.why]).map(|_| ())
    }

    /// The messages that are done and whose rows are still there, in ascending order.
    pub(super) fn noted(&self) -> Result<Vec<Sequence>, OpenError> {
        let mut noted = Vec::new();
        let mut statement = self.connection.prepare("SELECT sequences FROM settled").map_err(open_error)?;
        let mut rows = statement.query([]).map_err(open_error)?;
        while let Some(row) = rows.next().map_err(open_error)? {
            let note = bytes(row.get_ref(0).map_err(open_error)?);
            let read = note.and_then(|note| sweep::decode(note, &mut noted));
            read.ok_or_else(|| OpenError::Damaged("a note of settled messages cannot be read".to_owned()))?;
        }
        noted.sort_unstable();
        Ok(noted)
    }

    /// Shows every message, oldest first.
    pub(super) fn scan(
        &self,
        mut show: impl FnMut(Scanned) -> Result<(), OpenError>,
    ) -> Result<(), OpenError> {
        let sql = "SELECT sequence, queue, due, attempts, grouping FROM messages ORDER BY sequence";
        let mut statement = self.connection.prepare(sql).map_err(open_error)?;
        let mut rows = statement.query([]).map_err(open_error)?;
        while let Some(row) = rows.next().map_err(open_error)? {
            let scanned = Scanned {
                sequence: integer(row.get_ref(0)),
                queue: integer(row.get_ref(1)) as u32,
                due: integer(row.get_ref(2)),
                attempts: integer(row.get_ref(3)).min(u64::from(u16::MAX)) as u16,
                group: match row.get_ref(4).map_err(open_error)? {
                    ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(bytes.to_vec()),
                    ValueRef::Null => None,
                    // Not ours to understand: in a lane of its own until it is claimed and put into quarantine.
                    other => Some(format!("{other:?}").into_bytes()),
                },
            };
            show(scanned)?;
        }
        Ok(())
    }

    /// How many messages are kept, by queue.
    pub(super) fn kept_counts(&self) -> rusqlite::Result<Vec<(u32, Kind, u64)>> {
        let sql = "SELECT queue, kind, count(*) FROM kept GROUP BY queue, kind";
        let mut statement = self.connection.prepare(sql)?;
        let rows = statement.query_map([], |row| {
            let kind = if row.get::<_, i64>(1)? == 0 { Kind::Dead } else { Kind::Quarantined };
            Ok((row.get(0)?, kind, row.get::<_, i64>(2)? as u64))
        })?;
        rows.collect()
    }

    /// Runs what is done inside one transaction. After an error nothing of it has happened.
    pub(super) fn transaction<T>(
        &self,
        inside: impl FnOnce(&Self) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        self.run("BEGIN IMMEDIATE")?;
        let result = inside(self).and_then(|value| self.run("COMMIT").map(|()| value));
        // After some errors SQLite has rolled back by itself.
        if result.is_err() && !self.connection.is_autocommit() {
            self.run("ROLLBACK")?;
        }
        result
    }

    fn run(&self, sql: &str) -> rusqlite::Result<()> {
        self.connection.prepare_cached(sql)?.execute([]).map(|_| ())
    }

    pub(super) fn add_queue(&self, id: u32, name: &str) -> rusqlite::Result<()> {
        let sql = "INSERT OR IGNORE INTO queues (id, name) VALUES (?1, ?2)";
        self.connection.prepare_cached(sql)?.execute(params![id, name]).map(|_| ())
    }

    pub(super) fn add_message(
        &self,
        sequence: Sequence,
        queue: u32,
        due: Millis,
        published: Millis,
        body: &Body,
    ) -> rusqlite::Result<()> {
        let sql = "INSERT INTO messages (sequence, queue, due, attempts, published, grouping, text)
                   VALUES (?1, ?2, ?3, 0, ?4, ?5, ?6)";
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.raw_bind_parameter(1, sequence as i64)?;
        statement.raw_bind_parameter(2, queue)?;
        statement.raw_bind_parameter(3, due as i64)?;
        statement.raw_bind_parameter(4, published as i64)?;
        statement.raw_bind_parameter(5, body.group.as_deref())?;
        statement.raw_bind_parameter(6, &*body.text)?;
        statement.raw_execute().map(|_| ())
    }

    /// The message that has had this deduplication id, or the digest of the call that has had this idempotency key, if the window is still open.
    pub(super) fn seen(&self, queue: u32, id: &str, now: Millis) -> rusqlite::Result<Option<Sequence>> {
        let sql = "SELECT sequence FROM deduplication WHERE queue = ?1 AND id = ?2 AND expires > ?3";
        let mut statement = self.connection.prepare_cached(sql)?;
        let found = statement.query_row(params![queue, id, now as i64], |row| row.get::<_, i64>(0));
        Ok(found.optional()?.map(|sequence| sequence as u64))
    }

    pub(super) fn remember(
        &self,
        queue: u32,
        id: &str,
        sequence: Sequence,
        expires: Millis,
    ) -> rusqlite::Result<()> {
        let sql =
            "INSERT OR REPLACE INTO deduplication (queue, id, sequence, expires) VALUES (?1, ?2, ?3, ?4)";
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.execute(params![queue, id, sequence as i64, expires as i64]).map(|_| ())
    }

    /// Forgets some of the deduplication ids whose window is over.
    pub(super) fn forget_expired(&self, now: Millis, most: usize) -> rusqlite::Result<()> {
        let sql = "DELETE FROM deduplication WHERE rowid IN
                   (SELECT rowid FROM deduplication WHERE expires <= ?1 ORDER BY expires LIMIT ?2)";
        self.connection.prepare_cached(sql)?.execute(params![now as i64, most as i64]).map(|_| ())
    }

    pub(super) fn set_next_sequence(&self, next: Sequence) -> rusqlite::Result<()> {
        let sql = "UPDATE store SET next_sequence = ?1";
        self.connection.prepare_cached(sql)?.execute([next as i64]).map(|_| ())
    }

    /// Removes messages. Neighbours go in one step.
    pub(super) fn remove(&self, sequences: &mut [Sequence]) -> rusqlite::Result<()> {
        sequences.sort_unstable();
        let mut statement =
            self.connection.prepare_cached("DELETE FROM messages WHERE sequence BETWEEN ?1 AND ?2")?;
        for run in sequences.chunk_by(|a, b| *b == a + 1) {
            let (first, last) = (run[0], run[run.len() - 1]);
            statement.execute([first as i64, last as i64])?;
        }
        Ok(())
    }

    /// Notes that these messages are done. Their rows stay until they are swept.
    pub(super) fn note_settled(&self, sequences: &mut [Sequence]) -> rusqlite::Result<()> {
        let mut statement = self.connection.prepare_cached("INSERT INTO settled (sequences) VALUES (?1)")?;
        statement.execute([sweep::encode(sequences)]).map(|_| ())
    }

    /// Removes the rows of messages that were noted, and writes down anew which are left.
    pub(super) fn sweep(&self, gone: &mut [Sequence], rest: &mut [Sequence]) -> rusqlite::Result<()> {
        self.remove(gone)?;
        self.run("DELETE FROM settled")?;
        if rest.is_empty() { Ok(()) } else { self.note_settled(rest) }
    }

    pub(super) fn postpone(&self, sequence: Sequence, due: Millis, attempts: u16) -> rusqlite::Result<()> {
        let sql = "UPDATE messages SET due = ?2, attempts = ?3 WHERE sequence = ?1";
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.execute(params![sequence as i64, due as i64, attempts]).map(|_| ())
    }

    pub(super) fn note_attempts(&self, sequence: Sequence, attempts: u16) -> rusqlite::Result<()> {
        let sql = "UPDATE messages SET attempts = ?2 WHERE sequence = ?1";
        self.connection.prepare_cached(sql)?.execute(params![sequence as i64, attempts]).map(|_| ())
    }

    /// Moves a message to the kept ones.
    pub(super) fn keep(
        &self,
        sequence: Sequence,
        kind: Kind,
        attempts: u16,
        now: Millis,
        reason: &str,
    ) -> rusqlite::Result<()> {
        let sql = "INSERT INTO kept (sequence, queue, kind, attempts, published, kept, reason, grouping, text)
                   SELECT sequence, queue, ?2, ?3, published, ?4, ?5, grouping, text FROM messages WHERE sequence = ?1";
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.execute(params![sequence as i64, kind as i64, attempts, now as i64, reason])?;
        self.remove(&mut [sequence])
    }

    /// The sequences of dead letters, oldest first.
    pub(super) fn dead_sequences(&self, queue: u32, most: usize) -> rusqlite::Result<Vec<Sequence>> {
        let sql = "SELECT sequence FROM kept WHERE queue = ?1 AND kind = 0 ORDER BY sequence LIMIT ?2";
        let mut statement = self.connection.prepare_cached(sql)?;
        let rows = statement.query_map(params![queue, most as i64], |row| row.get::<_, i64>(0))?;
        rows.map(|row| row.map(|sequence| sequence as u64)).collect()
    }

    /// Makes a dead letter a message again, under a new sequence. Gives its group; nothing if there is no such letter.
    #[allow(clippy::option_option, reason = "no letter, a letter without a group, a letter with one")]
    pub(super) fn redrive(
        &self,
        queue: u32,
        old: Sequence,
        new: Sequence,
    ) -> rusqlite::Result<Option<Option<String>>> {
        let sql = "INSERT INTO messages (sequence, queue, due, attempts, published, grouping, text)
                   SELECT ?3, queue, 0, 0, published, grouping, text FROM kept
                   WHERE sequence = ?2 AND queue = ?1 AND kind = 0 RETURNING grouping";
        let mut statement = self.connection.prepare_cached(sql)?;
        let group = statement
            .query_row(params![queue, old as i64, new as i64], |row| row.get::<_, Option<String>>(0))
            .optional()?;
        if group.is_some() {
            self.connection.prepare_cached("DELETE FROM kept WHERE sequence = ?1")?.execute([old as i64])?;
        }
        Ok(group)
    }

    /// Forgets all that is kept of a kind. Says how many there were.
    pub(super) fn purge_kept(&self, queue: u32, kind: Kind) -> rusqlite::Result<usize> {
        let sql = "DELETE FROM kept WHERE queue = ?1 AND kind = ?2";
        self.connection.prepare_cached(sql)?.execute(params![queue, kind as i64])
    }

    /// What is kept of a kind, oldest first, behind a sequence: as many as wanted, or as fit into a page, and one in any case.
    pub(super) fn kept(
        &self,
        queue: u32,
        kind: Kind,
        after: Sequence,
        most: usize,
    ) -> rusqlite::Result<Vec<Kept>> {
        let sql = "SELECT sequence, grouping, attempts, published, kept, reason, text FROM kept
                   WHERE queue = ?1 AND kind = ?2 AND sequence > ?3 ORDER BY sequence LIMIT ?4";
        let mut statement = self.connection.prepare_cached(sql)?;
        let mut rows = statement.query(params![queue, kind as i64, after as i64, most as i64])?;
        let (mut page, mut read) = (Vec::new(), 0);
        while let Some(row) = rows.next()? {
            let one = kept(row)?;
            read += one.reason.len() + one.text.len();
            if read > PAGE_BYTES && !page.is_empty() {
                break;
            }
            page.push(one);
        }
        Ok(page)
    }

    /// Reads a message.
    pub(super) fn load(&self, sequence: Sequence) -> Loaded {
        self.try_load(sequence).unwrap_or_else(|error| Loaded::Failed(source_error(&error)))
    }

    fn try_load(&self, sequence: Sequence) -> rusqlite::Result<Loaded> {
        let mut statement =
            self.connection.prepare_cached("SELECT grouping, text FROM messages WHERE sequence = ?1")?;
        let mut rows = statement.query([sequence as i64])?;
        let Some(row) = rows.next()? else { return Ok(Loaded::Missing) };
        let group = match row.get_ref(0)? {
            ValueRef::Null => None,
            ValueRef::Text(written) if name_of(written).is_none() => None,
            ValueRef::Text(name) => match std::str::from_utf8(name) {
                Ok(name) => Some(name.into()),
                Err(_) => return Ok(Loaded::Unreadable("the name of its group is not UTF-8".to_owned())),
            },
            _ => return Ok(Loaded::Unreadable("the name of its group is not a text".to_owned())),
        };
        match bytes(row.get_ref(1)?) {
            Some(text) => Ok(Loaded::Body(Body { group, text: text.into() })),
            None => Ok(Loaded::Unreadable("its text is not one".to_owned())),
        }
    }

    /// Looks through the rows behind a sequence, a few thousand at a time, for a message with this id (or, among the dead letters, of this
    /// group), and for groups whose names contain the text. There is no index for it: it would cost every publication, for the sake of few searches.
    pub(super) fn search(
        &self,
        shelf: Shelf,
        queue: u32,
        after: Sequence,
        text: &str,
        is_there: impl Fn(&Sequence) -> bool,
    ) -> rusqlite::Result<Slice> {
        let sql = match shelf {
            Shelf::Messages => {
                "SELECT sequence, queue, due, attempts, grouping, text FROM messages WHERE sequence > ?1 ORDER BY sequence"
            }
            Shelf::DeadLetters => {
                "SELECT sequence, queue, 0, attempts, grouping, text FROM kept
                 WHERE sequence > ?1 AND queue = ?2 AND kind = 0 ORDER BY sequence"
            }
        };
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.raw_bind_parameter(1, after as i64)?;
        if shelf == Shelf::DeadLetters {
            statement.raw_bind_parameter(2, queue)?;
        }
        let mut rows = statement.raw_query();
        let mut slice = Slice::default();
        let (mut passed, mut read) = (0, 0);
        while let Some(row) = rows.next()? {
            let sequence = integer(row.get_ref(0));
            passed += 1;
            if integer(row.get_ref(1)) == u64::from(queue) && is_there(&sequence) {
                slice.looked += 1;
                let (group, body) = (name(row.get_ref(4)?), bytes(row.get_ref(5)?).unwrap_or_default());
                read += body.len();
                let group = group.and_then(|name| std::str::from_utf8(name).ok());
                if let Some(group) = group.filter(|group| group.contains(text))
                    && slice.groups.len() < SEARCH_FOUND
                    && !slice.groups.contains(group)
                {
                    slice.groups.insert(group.into());
                }
                // What is no message has no id.
                let names: Names = serde_json::from_slice(body).unwrap_or_default();
                let is_of_group = shelf == Shelf::DeadLetters && group == Some(text);
                if (names.id == text || is_of_group) && slice.rows.len() < SEARCH_FOUND {
                    let (due, attempts) = (integer(row.get_ref(2)), integer(row.get_ref(3)) as u32);
                    let (group, id, pool) = (group.map(Arc::from), names.id, names.pool_code);
                    slice.rows.push(Row { sequence, due, attempts, group, id, pool });
                }
            }
            if passed == SEARCH_ROWS || read >= SEARCH_BYTES {
                slice.next = Some(sequence);
                break;
            }
        }
        Ok(slice)
    }

    /// The group of a message, whatever it looks like.
    pub(super) fn group_of(&self, sequence: Sequence) -> rusqlite::Result<Option<Arc<str>>> {
        let mut statement =
            self.connection.prepare_cached("SELECT grouping FROM messages WHERE sequence = ?1")?;
        let mut rows = statement.query([sequence as i64])?;
        let Some(row) = rows.next()? else { return Ok(None) };
        Ok(name(row.get_ref(0)?).map(|name| String::from_utf8_lossy(name).into()))
    }

    /// Carries the log over into the file and lets go of it.
    pub(super) fn close(self) -> rusqlite::Result<()> {
        self.connection.flush_prepared_statement_cache();
        self.connection.close().map_err(|(_, error)| error)
    }
}

/// A file that is not there yet is made for its owner alone: it will hold the tokens of targets. Its log takes after it. One that is there is not even opened, since to
/// close it again would void the lock of a store that this process has on it.
fn make(path: &Path) {
    let mut options = std::fs::OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    // If it cannot be made, SQLite says why.
    let _ = options.write(true).create_new(true).open(path);
}

fn kept(row: &rusqlite::Row<'_>) -> rusqlite::Result<Kept> {
    Ok(Kept {
        sequence: integer(row.get_ref(0)),
        group: name(row.get_ref(1)?).map(|group| String::from_utf8_lossy(group).into()),
        attempts: Some(integer(row.get_ref(2)) as u32),
        published_millis: Some(integer(row.get_ref(3))),
        kept_millis: integer(row.get_ref(4)),
        reason: row.get(5)?,
        text: bytes(row.get_ref(6)?).unwrap_or_default().into(),
    })
}

fn integer(value: rusqlite::Result<ValueRef<'_>>) -> u64 {
    match value {
        Ok(ValueRef::Integer(value)) => value as u64,
        _ => 0,
    }
}

fn bytes(value: ValueRef<'_>) -> Option<&[u8]> {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(bytes),
        _ => None,
    }
}

/// The name of a group, if there is one.
fn name(value: ValueRef<'_>) -> Option<&[u8]> {
    bytes(value).and_then(name_of)
}

/// Whether the disk, or the limit of the file, is full.
pub(super) fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DiskFull)
}

/// What an error of SQLite means for those who use a queue.
pub(super) fn source_error(error: &rusqlite::Error) -> SourceError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => {
            SourceError::Unavailable("the disk, or the size limit of the queue's file, is full".to_owned())
        }
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            SourceError::Broken(format!("the queue's file is damaged: {error}"))
        }
        Some(
            ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied,
        ) => SourceError::Broken(format!("the queue's file cannot be written: {error}")),
        Some(
            ErrorCode::DatabaseBusy
            | ErrorCode::DatabaseLocked
            | ErrorCode::SystemIoFailure
            | ErrorCode::OutOfMemory
            | ErrorCode::CannotOpen
            | ErrorCode::OperationInterrupted
            | ErrorCode::FileLockingProtocolFailed,
        ) => SourceError::Unavailable(format!("the queue's file: {error}")),
        _ => SourceError::Broken(format!("the queue's file: {error}")),
    }
}

/// What an error of SQLite means for those who open a store.
pub(super) fn open_error(error: rusqlite::Error) -> OpenError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => OpenError::InUse,
        Some(ErrorCode::NotADatabase) => OpenError::NotOurs(error.to_string()),
        Some(ErrorCode::DatabaseCorrupt) => OpenError::Damaged(error.to_string()),
        _ => OpenError::Failed(error.to_string()),
    }
}
