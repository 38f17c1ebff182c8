//! The embedded queue: a source in a file of its own, with nothing to install.
//!
//! An [`EmbeddedStore`] owns a SQLite file with any number of named queues. [`EmbeddedStore::queue`] gives an [`EmbeddedQueue`], which publishers
//! publish to and which the router claims from as from any other [`Source`].
//!
//! ```
//! use std::time::Duration;
//! use laneway_router::source::{Disposal, Source, Wants};
//! use laneway_router::source::embedded::{EmbeddedStore, Options, Publication};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let store = EmbeddedStore::in_memory(Options::default())?;
//! let queue = store.queue("orders")?;
//! queue.publish(Publication::new("paid").group("order-7")).await?;
//! queue.publish(Publication::new("sent").group("order-7")).await?;
//!
//! let wants = Wants { most: 10, wait: Duration::from_secs(1), lease: Duration::from_secs(30) };
//! let deliveries = queue.claim(wants).await?;
//! assert_eq!(deliveries.iter().map(|delivery| &*delivery.text).collect::<Vec<_>>(), [b"paid", b"sent"]);
//! let done = deliveries.into_iter().map(|delivery| (delivery.receipt, Disposal::Done)).collect();
//! queue.settle(done).await?;
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! # The parts
//!
//! | file | part | knows |
//! |---|---|---|
//! | `mod.rs` | handles: publish, claim, settle | callers and time |
//! | `publication.rs` | what is published, and why not | callers |
//! | `sighting.rs` | what those are told who look | callers |
//! | `index.rs` | which message may go to whom | sequences and leases, in memory only |
//! | `bodies.rs` | bodies that need not be read | bytes |
//! | `sweep.rs` | rows that are to be removed | sequences |
//! | `writer.rs` | one transaction for all that has come | the order of disk, index and answer |
//! | `file.rs` | tables and statements | SQLite |
//!
//! A claim writes nothing: leases are in memory, and after a restart all of them are void. A receipt names the epoch of the store, which grows
//! with every opening of the file, so a receipt from before a restart is stale and can never settle what was handed out after it.
//! What exactly is durable when, and what each kind of crash costs, is in `docs/design/durability.md`.
//!
//! # Consumers
//!
//! Each call of [`EmbeddedStore::queue`] makes a new consumer; clones of a handle are the same one. It matters for order: one consumer may hold
//! several messages of a group, two consumers never do (the rule is in `index.rs`). Claims of one consumer go one after
//! another, so that what it gets is in order across claims. A consumer that gives a message back has to let go of the later ones of that
//! group as well, those included that reach it with a claim that was under way.

mod bodies;
mod file;
pub(in crate::source) mod index;
mod publication;
mod sighting;
mod sweep;
mod writer;

pub use file::ParkNote;
pub use index::GroupState;
pub use publication::{Publication, PublishError, Published, Refusal};
pub use sighting::{GroupView, Place, SearchLimits, Sighting, Sought, Stranded};

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::message::{MESSAGE_BYTES_MAX, Message, NAME_BYTES_MAX};
use crate::source::{Delivery, Depth, Disposal, Keeps, Receipt, Rest, Settled, Source, SourceError, Wants};
pub use crate::source::{Kept, Redriven};
use file::{Body, File, Kind, Loaded, Opened, Row, Shelf};
use index::{Claimed, ConsumerId, Intent, Millis, Sequence};
use writer::{Begun, Fate, Once, Op, Read, Registry, Reservation, Shared, Writer};

/// No store has more queues than this: each costs a little memory for ever.
pub const QUEUES_MAX: usize = 1_000;
/// No more messages than this in one publication, claim, redrive or list: one caller must not hold up the others for long.
pub const BATCH_MAX: usize = 10_000;
/// Reasons are cut to this length.
const REASON_BYTES_MAX: usize = 1_024;
/// Operations that wait for the writer; further callers wait for room.
const OPS_WAITING_MAX: usize = 1_024;
/// Kibibytes of messages that wait for the writer; further publishers wait for room.
const KIB_WAITING_MAX: u32 = 64 * 1024;
/// A message that could not be read keeps its group waiting for so many milliseconds: long enough for a disk to come to itself, and no loop.
const UNREAD_WAIT: Millis = 1_000;
/// Longer waits than this are as good as endless, and fit every clock.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// What an acknowledged publication or settlement survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The end of the machine's power: every commit waits for the disk.
    #[default]
    PowerLoss,
    /// The end of the process, at any point, but the last moments before a power loss may be forgotten. Many times faster with one
    /// publisher, little faster with many.
    Crash,
}

/// Who does the writing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Commit {
    /// A thread of the store's own: callers share commits.
    #[default]
    Thread,
    /// Each caller, at once, on its own thread, which waits for the disk. The same sequence of calls has the same result every time,
    /// and virtual time does not run on while a commit is under way: for simulations and tests.
    Inline,
}

/// What happens to messages without a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ungrouped {
    /// They are in no order and never wait for each other.
    #[default]
    Unordered,
    /// They are one group.
    Serial,
}

/// How a store works.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What acknowledgements survive.
    pub durability: Durability,
    /// Who writes.
    pub commit: Commit,
    /// The file grows no larger than this, its log aside; publications are refused then.
    pub bytes_max: Option<u64>,
    /// How its queues work.
    pub queue: QueueOptions,
}

/// How a queue works.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    /// So many messages at most, leased ones included.
    pub capacity: usize,
    /// What happens to messages without a group.
    pub ungrouped: Ungrouped,
    /// How long a deduplication id, or an idempotency key, is remembered.
    pub deduplication_window: Duration,
    /// Bodies of waiting messages kept in memory.
    pub cache_bytes: usize,
}

impl Default for QueueOptions {
    /// Ten million messages; unordered without a group; five minutes of deduplication, as SQS has it; 64 MiB of bodies.
    fn default() -> Self {
        QueueOptions {
            capacity: 10_000_000,
            ungrouped: Ungrouped::default(),
            deduplication_window: Duration::from_secs(300),
            cache_bytes: 64 * 1024 * 1024,
        }
    }
}

/// Why a store could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Another store has it, in this process or in another.
    #[error("the queue's file is in use; one process at a time can have it")]
    InUse,
    /// Not a file of ours.
    #[error("not a queue's file: {0}")]
    NotOurs(String),
    /// Written by another version.
    #[error("the queue's file has version {found}, and this program knows {known}")]
    Version {
        /// Of the file.
        found: i32,
        /// Of this program.
        known: i32,
    },
    /// Damaged. Nothing was changed.
    #[error("the queue's file is damaged: {0}")]
    Damaged(String),
    /// Anything else: no permission, no such folder, no room.
    #[error("the queue's file cannot be opened: {0}")]
    Failed(String),
}

/// Why there is no such queue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The name is empty, too long, or has control characters.
    #[error("{0:?} is not a name for a queue: 1 to {NAME_BYTES_MAX} bytes without control characters")]
    BadName(String),
    /// There are too many.
    #[error("a store has at most {QUEUES_MAX} queues")]
    TooMany,
}

/// A file with queues. Clones are the same store; see [`close`](Self::close) for its end.
#[derive(Clone, Debug)]
pub struct EmbeddedStore {
    inner: Arc<Inner>,
}

struct Inner {
    shell: Shell,
    registry: Arc<Registry>,
    options: Options,
    epoch: u64,
    clock: Clock,
    hashing: foldhash::quality::RandomState,
    consumers: AtomicU32,
    /// Bytes on their way to the writer, in kibibytes.
    budget: Arc<Semaphore>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddedStore").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// How operations get to the writer.
enum Shell {
    Thread(mpsc::Sender<Op>),
    Inline(Mutex<Writer>),
}

/// A place in front of the writer.
enum Slot<'a> {
    Thread(mpsc::Permit<'a, Op>),
    Inline(&'a Mutex<Writer>),
}

impl Slot<'_> {
    fn send(self, op: Op) {
        match self {
            Slot::Thread(permit) => permit.send(op),
            Slot::Inline(writer) => {
                writer.lock().unwrap_or_else(PoisonError::into_inner).perform(vec![op]);
            }
        }
    }
}

/// The time of day when the store was opened, and from then on a clock that only runs forward. Leases do not care when somebody sets the
/// computer's clock; delays that outlive a restart do.
#[derive(Debug)]
struct Clock {
    opened: Millis,
    since: Instant,
}

impl Clock {
    fn new() -> Self {
        let opened = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock { opened: opened.as_millis() as u64, since: Instant::now() }
    }

    fn now(&self) -> Millis {
        self.opened + self.since.elapsed().as_millis() as u64
    }

    /// The first instant at which `now` is at least this.
    fn instant(&self, at: Millis) -> Instant {
        self.since + Duration::from_millis(at.saturating_sub(self.opened)).min(WAIT_MAX * 100)
    }
}

impl EmbeddedStore {
    /// Opens the file, or makes it. Reads the sequence, group and delay of every message that is there.
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<Self, OpenError> {
        Self::open_at(Some(path.as_ref()), options)
    }

    /// A store without a file, gone with its last handle: for tests and simulations.
    pub fn in_memory(options: Options) -> Result<Self, OpenError> {
        Self::open_at(None, options)
    }

    fn open_at(path: Option<&Path>, options: Options) -> Result<Self, OpenError> {
        let Opened { file, next_sequence, epoch, queues } =
            File::open(path, options.durability, options.bytes_max)?;
        let hashing = foldhash::quality::RandomState::default();
        let noted = file.noted()?;
        let queues = rebuild(&file, queues, &noted, &options, &hashing)?;
        let registry = Registry { queues: Mutex::new(queues), closed: AtomicBool::new(false) };
        let registry = Arc::new(registry);
        let writer = Writer::new(file, next_sequence, noted, Arc::clone(&registry));
        let shell = match options.commit {
            Commit::Inline => Shell::Inline(Mutex::new(writer)),
            Commit::Thread => {
                let (sender, receiver) = mpsc::channel(OPS_WAITING_MAX);
                let thread = std::thread::Builder::new().name("laneway-queue".to_owned());
                let spawned = thread.spawn(move || writer.run(receiver));
                spawned.map_err(|error| OpenError::Failed(error.to_string()))?;
                Shell::Thread(sender)
            }
        };
        let inner = Inner {
            shell,
            registry,
            options,
            epoch,
            clock: Clock::new(),
            hashing,
            consumers: AtomicU32::new(0),
            budget: Arc::new(Semaphore::new(KIB_WAITING_MAX as usize)),
        };
        Ok(EmbeddedStore { inner: Arc::new(inner) })
    }

    /// A new consumer of a queue. The queue is made with its first message.
    pub fn queue(&self, name: &str) -> Result<EmbeddedQueue, QueueError> {
        let good = (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control);
        if !good {
            return Err(QueueError::BadName(name.chars().take(NAME_BYTES_MAX).collect()));
        }
        let queue = self.shared(name)?;
        let consumer = Consumer {
            id: self.inner.consumers.fetch_add(1, Ordering::Relaxed),
            turn: tokio::sync::Mutex::new(()),
        };
        Ok(EmbeddedQueue { inner: Arc::clone(&self.inner), queue, consumer: Arc::new(consumer) })
    }

    /// The queues that have messages, dead letters or anything in quarantine, and of which nobody is known to read: they would be forgotten. Sorted by name.
    pub fn stranded(&self, is_read: impl Fn(&str) -> bool) -> Vec<Stranded> {
        let now = self.inner.clock.now();
        let queues = self.inner.registry.all().into_iter().filter(|queue| !is_read(&queue.name));
        let stranded = queues.map(|queue| Stranded { queue: queue.name.clone(), depth: queue.depth(now) });
        let mut stranded: Vec<_> = stranded.filter(|stranded| stranded.depth != Depth::default()).collect();
        stranded.sort_unstable_by(|one, other| one.queue.cmp(&other.queue));
        stranded
    }

    /// The groups that are parked, whatever their source.
    pub async fn parked(&self) -> Result<Vec<ParkNote>, SourceError> {
        self.inner.ask(|answer| Op::Read(Read::Parked { answer })).await
    }

    /// Writes down that groups are parked, or are not any more. It is durable when this comes back. The store itself hands their messages out as before: to
    /// let them wait is the router's.
    pub async fn note_parked(&self, notes: Vec<ParkNote>) -> Result<(), SourceError> {
        self.inner.ask(|answer| Op::Park { notes, answer }).await
    }

    /// Does what has been asked for until now, lets go of the file, and answers everything later with [`SourceError::Closed`].
    /// Without it the same happens, a little later, when the last handle is dropped.
    pub async fn close(&self) {
        let (answer, closed) = oneshot::channel();
        if let Ok(slot) = self.inner.slot().await {
            slot.send(Op::Close { answer });
            // The answer fails only if the writer is gone, and the file with it.
            let _ = closed.await;
        }
    }

    fn shared(&self, name: &str) -> Result<Arc<Shared>, QueueError> {
        let registry = &self.inner.registry;
        let mut queues = registry.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(name) {
            return Ok(Arc::clone(queue));
        }
        if queues.len() >= QUEUES_MAX {
            return Err(QueueError::TooMany);
        }
        let id = 1 + queues.values().map(|queue| queue.id).max().unwrap_or(0);
        let options = self.inner.options.queue.clone();
        let queue = Shared::new(id, name.to_owned(), options, false, self.inner.hashing.clone());
        let queue = Arc::new(queue);
        queues.insert(name.to_owned(), Arc::clone(&queue));
        Ok(queue)
    }
}

/// All queues of the file, with an index of what is in them: all rows but those of messages that are noted as done.
fn rebuild(
    file: &File,
    queues: Vec<(u32, String)>,
    noted: &[Sequence],
    options: &Options,
    hashing: &foldhash::quality::RandomState,
) -> Result<HashMap<String, Arc<Shared>>, OpenError> {
    let mut by_id = HashMap::new();
    for (id, name) in queues {
        let shared = Shared::new(id, name.clone(), options.queue.clone(), true, hashing.clone());
        by_id.insert(id, Arc::new(shared));
    }
    file.scan(|row| {
        if noted.binary_search(&row.sequence).is_ok() {
            return Ok(());
        }
        let orphan = || OpenError::Damaged(format!("message {} belongs to no queue", row.sequence));
        let queue = by_id.get(&row.queue).ok_or_else(orphan)?;
        let fingerprint = queue.fingerprint(row.group.as_deref());
        queue.lock().index.append(row.sequence, fingerprint, row.due, row.attempts);
        Ok(())
    })?;
    for (queue, kind, count) in file.kept_counts().map_err(file::open_error)? {
        if let Some(queue) = by_id.get(&queue) {
            let mut state = queue.lock();
            match kind {
                Kind::Dead => state.dead = count,
                Kind::Quarantined => state.quarantined = count,
            }
        }
    }
    Ok(by_id.into_values().map(|queue| (queue.name.clone(), queue)).collect())
}

impl Inner {
    /// Waits for a place in front of the writer.
    async fn slot(&self) -> Result<Slot<'_>, SourceError> {
        match &self.shell {
            Shell::Thread(sender) => {
                sender.reserve().await.map(Slot::Thread).map_err(|_| SourceError::Closed)
            }
            Shell::Inline(writer) => Ok(Slot::Inline(writer)),
        }
    }

    /// Sends an operation and waits for its answer.
    async fn ask<T>(
        &self,
        op: impl FnOnce(oneshot::Sender<Result<T, SourceError>>) -> Op,
    ) -> Result<T, SourceError> {
        let (answer, answered) = oneshot::channel();
        self.slot().await?.send(op(answer));
        answered.await.unwrap_or_else(|_| Err(writer_died()))
    }

    async fn load(&self, sequences: Vec<Sequence>) -> Result<Vec<Loaded>, SourceError> {
        let (answer, answered) = oneshot::channel();
        self.slot().await?.send(Op::Read(Read::Load { sequences, answer }));
        answered.await.map_err(|_| writer_died())
    }

    async fn budget(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let kib = u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX).min(KIB_WAITING_MAX);
        Arc::clone(&self.budget).acquire_many_owned(kib).await.ok()
    }

    fn is_closed(&self) -> bool {
        self.registry.closed.load(Ordering::Acquire)
    }
}

fn writer_died() -> SourceError {
    SourceError::Broken("the queue's writer has died".to_owned())
}

#[derive(Debug)]
struct Consumer {
    id: ConsumerId,
    /// Held by the claim that is under way.
    turn: tokio::sync::Mutex<()>,
}

/// A queue of a store, and a consumer of it. Clones are the same consumer.
#[derive(Clone, Debug)]
pub struct EmbeddedQueue {
    inner: Arc<Inner>,
    queue: Arc<Shared>,
    consumer: Arc<Consumer>,
}

/// For publishers.
impl EmbeddedQueue {
    /// Publishes a message. It is durable when this comes back.
    pub async fn publish(&self, publication: Publication) -> Result<Published, PublishError> {
        let published = self.publish_many(vec![publication], None).await?;
        Ok(published[0])
    }

    /// Publishes all of these, in this order, or none. They are durable when this comes back.
    ///
    /// With an idempotency key, a second call with the same key within the queue's window publishes nothing again: each message is
    /// compared with the one at its place in the first call. Other messages under the same key are refused; [`publish_once`](Self::publish_once)
    /// tells that from other errors.
    pub async fn publish_many(
        &self,
        publications: Vec<Publication>,
        idempotency_key: Option<&str>,
    ) -> Result<Vec<Published>, PublishError> {
        let published = self.publish_all(publications, idempotency_key).await?;
        published.map_err(|publications| {
            let why = "the idempotency key was used before, for other messages";
            PublishError { refusal: SourceError::Broken(why.to_owned()).into(), publications }
        })
    }

    /// As [`publish_many`](Self::publish_many) with an idempotency key; nothing is published, and nothing is the answer, if the key was used for other messages within the
    /// queue's window.
    pub async fn publish_once(
        &self,
        publications: Vec<Publication>,
        idempotency_key: &str,
    ) -> Result<Option<Vec<Published>>, PublishError> {
        self.publish_all(publications, Some(idempotency_key)).await.map(Result::ok)
    }

    async fn publish_all(
        &self,
        publications: Vec<Publication>,
        idempotency_key: Option<&str>,
    ) -> Result<Result<Vec<Published>, Vec<Publication>>, PublishError> {
        if publications.is_empty() {
            return Ok(Ok(Vec::new()));
        }
        let refuse = |refusal, publications| Err(PublishError { refusal, publications });
        if let Err(refusal) = check(&publications, idempotency_key) {
            return refuse(refusal, publications);
        }
        let bytes = publications.iter().map(|publication| publication.text.len()).sum();
        let permit = self.inner.budget(bytes).await;
        let slot = match self.inner.slot().await {
            Ok(slot) => slot,
            Err(error) => return refuse(error.into(), publications),
        };
        let reservation = match Reservation::new(&self.queue, publications.len()) {
            Ok(reservation) => reservation,
            Err(refusal) => return refuse(refusal, publications),
        };
        let publications: Vec<_> = publications.into_iter().map(without_blank_group).collect();
        let (answer, answered) = oneshot::channel();
        slot.send(Op::Publish {
            queue: Arc::clone(&self.queue),
            once: idempotency_key.map(|key| Once { key: key.into(), digest: digest(&publications) }),
            publications,
            now: self.inner.clock.now(),
            reservation,
            permit,
            answer,
        });
        answered.await.unwrap_or_else(|_| refuse(writer_died().into(), Vec::new()))
    }
}

/// What tells the messages of one call from those of another: 64 bits of a cryptographic hash, because it is written down and others choose what goes in.
fn digest(publications: &[Publication]) -> u64 {
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    // The line is one that the text says.
    for Publication { text, group, delay, deduplication_id, .. } in publications {
        let texts = [
            Some(&**text),
            group.as_deref().map(str::as_bytes),
            deduplication_id.as_deref().map(str::as_bytes),
        ];
        for text in texts {
            // None is no length that a text can have.
            context.update(&text.map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
            context.update(text.unwrap_or_default());
        }
        context.update(&delay.as_nanos().to_le_bytes());
    }
    let hash = context.finish();
    u64::from_le_bytes(std::array::from_fn(|place| hash.as_ref()[place]))
}

/// Whether publications are within the limits of every queue.
pub(super) fn check(publications: &[Publication], key: Option<&str>) -> Result<(), Refusal> {
    if publications.len() > BATCH_MAX {
        return Err(Refusal::TooMany { count: publications.len() });
    }
    for (place, publication) in publications.iter().enumerate() {
        let bytes = publication.text.len();
        if bytes > MESSAGE_BYTES_MAX {
            return Err(Refusal::TooLong { place, bytes });
        }
        let names = [
            ("group", publication.group.as_deref()),
            ("deduplication id", publication.deduplication_id.as_deref()),
            ("idempotency key", key),
        ];
        let long = names.iter().find(|(_, name)| name.is_some_and(|name| name.len() > NAME_BYTES_MAX));
        if let Some((what, name)) = long {
            return Err(Refusal::LongName { place, what, bytes: name.map_or(0, str::len) });
        }
        let has_control = |name: &str| name.chars().any(char::is_control);
        if let Some((what, _)) = names.iter().find(|(_, name)| name.is_some_and(has_control)) {
            return Err(Refusal::ControlCharacters { place, what });
        }
    }
    Ok(())
}

fn without_blank_group(mut publication: Publication) -> Publication {
    publication.group = publication.group.filter(|group| !group.trim().is_empty());
    publication
}

/// For operators.
impl EmbeddedQueue {
    /// Makes dead letters messages again, at the end of their groups and under new sequences: these, or the oldest. No more than
    /// there is room for, and no more than [`BATCH_MAX`].
    pub async fn redrive(&self, which: Option<Vec<u64>>, most: usize) -> Result<Redriven, SourceError> {
        let (queue, most) = (Arc::clone(&self.queue), most.min(BATCH_MAX));
        self.inner.ask(|answer| Op::Redrive { queue, which, most, answer }).await
    }

    /// Dead letters, oldest first, behind a sequence (0 for the oldest); no more than [`BATCH_MAX`], and beyond the first no more than 4 MiB. There may be
    /// more behind the last, however many were wanted.
    pub async fn dead_letters(&self, after: u64, most: usize) -> Result<Vec<Kept>, SourceError> {
        self.kept(Kind::Dead, after, most).await
    }

    /// What could not be read as a message, oldest first, behind a sequence (0 for the oldest); no more than [`BATCH_MAX`], and beyond the first no more than 4 MiB. There may be
    /// more behind the last, however many were wanted.
    pub async fn quarantined(&self, after: u64, most: usize) -> Result<Vec<Kept>, SourceError> {
        self.kept(Kind::Quarantined, after, most).await
    }

    /// Forgets all dead letters. Says how many.
    pub async fn purge_dead_letters(&self) -> Result<usize, SourceError> {
        self.purge_kept(Kind::Dead).await
    }

    /// Forgets all that is in quarantine. Says how many.
    pub async fn purge_quarantine(&self) -> Result<usize, SourceError> {
        self.purge_kept(Kind::Quarantined).await
    }

    /// What a group does, if it has messages.
    pub fn group(&self, name: &str) -> Option<GroupView> {
        let fingerprint = self.queue.fingerprint(Some(name.as_bytes()))?;
        let mut state = self.queue.lock();
        state.index.tick(self.inner.clock.now());
        let standing = state.index.standing(fingerprint)?;
        Some(view(standing, Some(name.into())))
    }

    /// The deepest of so many groups from a position on, deepest first, and the position to go on from; none when that was all. Only the names of those that are
    /// given are read. Positions shift when groups have gone, so who goes on may pass one by or see it twice.
    pub async fn deepest(
        &self,
        from: u32,
        budget: usize,
        most: usize,
    ) -> Result<(Vec<GroupView>, Option<u32>), SourceError> {
        let (standings, next) = {
            let mut state = self.queue.lock();
            state.index.tick(self.inner.clock.now());
            state.index.deepest(from, budget, most.min(BATCH_MAX))
        };
        if standings.is_empty() {
            return Ok((Vec::new(), next));
        }
        let heads = standings.iter().map(|standing| standing.head).collect();
        let names = self.inner.ask(|answer| Op::Read(Read::Groups { heads, answer })).await?;
        Ok((standings.into_iter().zip(names).map(|(standing, name)| view(standing, name)).collect(), next))
    }

    /// Looks for messages by their id and for groups by a part of their name, oldest first: what waits, what is delayed, what is handed out, and the
    /// dead letters. It reads the file in small steps, so that publishers and consumers hardly notice.
    pub async fn search(&self, text: &str, limits: SearchLimits) -> Result<Sought, SourceError> {
        let text: Arc<str> = text.into();
        let deadline = Instant::now() + limits.time;
        let mut sought = Sought::default();
        // Of a name that is known as a whole the index knows everything.
        let mut names: Vec<Arc<str>> = self.group(&text).and_then(|group| group.name).into_iter().collect();
        for shelf in [Shelf::Messages, Shelf::DeadLetters] {
            let (mut after, mut looked) = (0, 0);
            loop {
                let (queue, text) = (Arc::clone(&self.queue), Arc::clone(&text));
                let op = |answer| Op::Read(Read::Search { queue, shelf, after, text, answer });
                let slice = self.inner.ask(op).await?;
                looked += slice.looked;
                if shelf == Shelf::Messages {
                    let more = slice.groups.into_iter().filter(|name| !names.contains(name));
                    names.extend(more.collect::<Vec<_>>());
                    names.truncate(limits.found);
                }
                sought.messages.extend(slice.rows.into_iter().map(|row| self.sighting(row, shelf)));
                sought.messages.truncate(limits.found);
                let Some(next) = slice.next else { break };
                if looked >= limits.messages || Instant::now() >= deadline {
                    sought.is_cut_short = true;
                    break;
                }
                after = next;
            }
            sought.looked += looked;
        }
        sought.groups = self.with_pools(&names).await?;
        Ok(sought)
    }

    fn sighting(&self, row: Row, shelf: Shelf) -> Sighting {
        let now = self.inner.clock.now();
        let place = match shelf {
            Shelf::DeadLetters => Place::DeadLetter,
            Shelf::Messages if self.queue.lock().index.is_out(row.sequence) => Place::Leased,
            Shelf::Messages if row.due > now => Place::Delayed { for_millis: row.due - now },
            Shelf::Messages => Place::Waiting,
        };
        let Row { sequence, attempts, group, id, pool, .. } = row;
        Sighting { sequence, id, pool, group, attempts, place }
    }

    /// Groups that have messages, and the pool that the oldest of each asks for.
    async fn with_pools(&self, names: &[Arc<str>]) -> Result<Vec<(GroupView, Option<String>)>, SourceError> {
        let views: Vec<GroupView> = names.iter().filter_map(|name| self.group(name)).collect();
        let heads = self.inner.load(views.iter().map(|view| view.head).collect()).await?;
        let pool = |loaded: Loaded| match loaded {
            Loaded::Body(body) => Message::of_delivery(&body.text).ok().map(|message| message.pool_code),
            _ => None,
        };
        Ok(views.into_iter().zip(heads.into_iter().map(pool)).collect())
    }

    /// How many messages were not in the file any more when they were to be handed out, since the store was opened.
    pub fn vanished(&self) -> u64 {
        self.queue.lock().vanished
    }

    /// How many groups have messages.
    pub fn group_count(&self) -> usize {
        self.queue.lock().index.group_count()
    }

    async fn kept(&self, kind: Kind, after: u64, most: usize) -> Result<Vec<Kept>, SourceError> {
        let (queue, most) = (Arc::clone(&self.queue), most.min(BATCH_MAX));
        self.inner.ask(|answer| Op::Read(Read::Kept { queue, kind, after, most, answer })).await
    }

    async fn purge_kept(&self, kind: Kind) -> Result<usize, SourceError> {
        let queue = Arc::clone(&self.queue);
        self.inner.ask(|answer| Op::PurgeKept { queue, kind, answer }).await
    }
}

impl Keeps for EmbeddedQueue {
    fn kept(&self, rest: Rest, after: u64, most: usize) -> BoxFuture<'_, Result<Vec<Kept>, SourceError>> {
        EmbeddedQueue::kept(self, kind_of(rest), after, most).boxed()
    }

    fn redrive(&self, which: Option<Vec<u64>>, most: usize) -> BoxFuture<'_, Result<Redriven, SourceError>> {
        EmbeddedQueue::redrive(self, which, most).boxed()
    }

    fn purge(&self, rest: Rest) -> BoxFuture<'_, Result<usize, SourceError>> {
        self.purge_kept(kind_of(rest)).boxed()
    }
}

fn kind_of(rest: Rest) -> Kind {
    match rest {
        Rest::DeadLetters => Kind::Dead,
        Rest::Quarantine => Kind::Quarantined,
    }
}

fn view(standing: index::Standing, name: Option<Arc<str>>) -> GroupView {
    let (depth, leased) = (standing.depth as usize, standing.out as usize);
    GroupView { name, depth, leased, head: standing.head, state: standing.state }
}

/// For consumers.
impl Source for EmbeddedQueue {
    fn kind(&self) -> &'static str {
        "embedded"
    }

    fn keeps(&self) -> Result<Option<Arc<dyn Keeps>>, SourceError> {
        Ok(Some(Arc::new(self.clone())))
    }

    fn name(&self) -> &str {
        &self.queue.name
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        self.claim_when_there_is_something(wants).boxed()
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        self.settle_all(disposals).boxed()
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        let extended = self.extend_now(&receipts, millis(lease));
        // A lease may have become shorter, and who waits for its end has to look again.
        self.queue.changed.notify_waiters();
        futures_util::future::ready(extended).boxed()
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        futures_util::future::ready(Ok(self.queue.depth(self.inner.clock.now()))).boxed()
    }
}

impl EmbeddedQueue {
    async fn claim_when_there_is_something(&self, wants: Wants) -> Result<Vec<Delivery>, SourceError> {
        let deadline = Instant::now() + wants.wait.min(WAIT_MAX);
        let Ok(_turn) = timeout_at(deadline, self.consumer.turn.lock()).await else { return Ok(Vec::new()) };
        loop {
            // Whatever changes after this line wakes us, so nothing that we do not see below can be missed.
            let mut changed = std::pin::pin!(self.queue.changed.notified());
            changed.as_mut().enable();
            if self.inner.is_closed() {
                return Err(SourceError::Closed);
            }
            let (picked, next_event) = self.pick(wants);
            if !picked.claims.is_empty() {
                let deliveries = self.complete(picked).await?;
                if !deliveries.is_empty() {
                    return Ok(deliveries);
                }
                continue;
            }
            if Instant::now() >= deadline || wants.most == 0 {
                return Ok(Vec::new());
            }
            let wake = next_event.map_or(deadline, |at| self.inner.clock.instant(at).min(deadline));
            tokio::select! {
                () = &mut changed => {}
                () = sleep_until(wake) => {}
            }
        }
    }

    /// Takes messages out of the index, with the bodies that are in memory.
    fn pick(&self, wants: Wants) -> (Picked, Option<Millis>) {
        let now = self.inner.clock.now();
        let mut state = self.queue.lock();
        let most = wants.most.min(BATCH_MAX);
        let claims = state.index.claim(self.consumer.id, most, millis(wants.lease), now);
        let bodies = claims.iter().map(|claim| state.bodies.take(claim.sequence)).collect();
        let next_event = state.index.next_event();
        (Picked { queue: Arc::clone(&self.queue), claims, bodies }, next_event)
    }

    /// Reads the bodies that were not in memory. Dropped before its end, it has claimed nothing. What cannot be read stops nobody else: it goes back, and
    /// what is behind it in its group with it, so that nothing overtakes it. A moment later it is tried again.
    async fn complete(&self, mut picked: Picked) -> Result<Vec<Delivery>, SourceError> {
        let missing: Vec<usize> =
            (0..picked.bodies.len()).filter(|at| picked.bodies[*at].is_none()).collect();
        let (mut unread, mut failure) = (Vec::new(), None);
        if !missing.is_empty() {
            let sequences = missing.iter().map(|at| picked.claims[*at].sequence).collect();
            let loaded = self.inner.load(sequences).await?;
            for (at, loaded) in missing.into_iter().zip(loaded) {
                let claim = picked.claims[at];
                let trouble = match loaded {
                    Loaded::Body(body) => {
                        picked.bodies[at] = Some(body);
                        None
                    }
                    Loaded::Missing => {
                        self.vanish(claim);
                        None
                    }
                    Loaded::Unreadable(reason) => self.quarantine(claim, reason).await.err(),
                    Loaded::Failed(error) => Some(error),
                };
                if let Some(error) = trouble {
                    let queue = &*self.queue.name;
                    tracing::warn!(queue, sequence = claim.sequence, "a message could not be read: {error}");
                    unread.push(claim.sequence);
                    failure = Some(error);
                }
            }
        }
        if !unread.is_empty() {
            picked.put_back(&unread, self.inner.clock.now() + UNREAD_WAIT);
        }
        let (claims, bodies) = picked.keep();
        let deliveries: Vec<_> = claims
            .into_iter()
            .zip(bodies)
            .filter_map(|(claim, body)| body.map(|body| self.delivery(claim, body)))
            .collect();
        match failure {
            Some(error) if deliveries.is_empty() => Err(error),
            _ => Ok(deliveries),
        }
    }

    /// A message that the index knows and the file does not: somebody has changed the file, or the disk has. Nobody can bring it back; its group goes on.
    fn vanish(&self, claim: Claimed) {
        let mut state = self.queue.lock();
        state.index.vanish(claim);
        state.vanished += 1;
        drop(state);
        let queue = &*self.queue.name;
        tracing::error!(
            queue,
            sequence = claim.sequence,
            "a message is not in the queue's file any more; it is lost"
        );
    }

    fn delivery(&self, claim: Claimed, body: Body) -> Delivery {
        let Claimed { sequence, generation, attempt } = claim;
        let receipt = receipt(self.inner.epoch, sequence, generation);
        Delivery { id: sequence, receipt, group: body.group, text: body.text, attempt, sequence }
    }

    async fn quarantine(&self, claim: Claimed, reason: String) -> Result<(), SourceError> {
        let receipt = receipt(self.inner.epoch, claim.sequence, claim.generation);
        self.settle_all(vec![(receipt, Disposal::Quarantine { reason })]).await.map(|_| ())
    }

    async fn settle_all(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        if self.inner.is_closed() {
            return Err(SourceError::Closed);
        }
        let slot = self.inner.slot().await?;
        let (begun, settled) = self.begin(disposals);
        if !begun.fates.is_empty() {
            let (answer, answered) = oneshot::channel();
            slot.send(Op::Settle { begun, answer });
            answered.await.unwrap_or_else(|_| Err(writer_died()))?;
        }
        Ok(settled)
    }

    /// Marks what is about to be settled. From here on its lease cannot run out and nobody else can settle it.
    fn begin(&self, disposals: Vec<(Receipt, Disposal)>) -> (Begun, Vec<Settled>) {
        let now = self.inner.clock.now();
        let mut begun = Begun { queue: Arc::clone(&self.queue), fates: Vec::with_capacity(disposals.len()) };
        let mut settled = Vec::with_capacity(disposals.len());
        let mut state = self.queue.lock();
        for (receipt, disposal) in disposals {
            let intent = match disposal {
                Disposal::GiveBack { .. } => Intent::Return,
                _ => Intent::End,
            };
            let good = self
                .sequence_of(&receipt)
                .filter(|(sequence, generation)| state.index.begin(*sequence, *generation, intent, now));
            settled.push(if good.is_some() { Settled::Settled } else { Settled::Stale });
            if let Some((sequence, _)) = good {
                let attempts = state.index.attempts(sequence);
                begun.fates.push((sequence, fate(disposal, attempts, now)));
            }
        }
        drop(state);
        (begun, settled)
    }

    fn extend_now(&self, receipts: &[Receipt], lease: Millis) -> Result<Vec<Settled>, SourceError> {
        if self.inner.is_closed() {
            return Err(SourceError::Closed);
        }
        let now = self.inner.clock.now();
        let mut state = self.queue.lock();
        let extended = receipts.iter().map(|receipt| {
            let good = self
                .sequence_of(receipt)
                .is_some_and(|(sequence, generation)| state.index.extend(sequence, generation, lease, now));
            if good { Settled::Settled } else { Settled::Stale }
        });
        Ok(extended.collect())
    }

    /// What a receipt of this epoch names. Sequences are those of the store, so a receipt of another queue names nothing in this one.
    fn sequence_of(&self, receipt: &Receipt) -> Option<(Sequence, u64)> {
        let Receipt::Numbers([epoch, sequence, generation, 0]) = *receipt else { return None };
        (epoch == self.inner.epoch).then_some((sequence, generation))
    }
}

fn receipt(epoch: u64, sequence: Sequence, generation: u64) -> Receipt {
    Receipt::Numbers([epoch, sequence, generation, 0])
}

fn fate(disposal: Disposal, attempts: u16, now: Millis) -> Fate {
    let keep = |kind, reason: String| Fate::Keep { kind, attempts, now, reason: cut(reason) };
    match disposal {
        Disposal::Done => Fate::Done,
        Disposal::GiveBack { delay } => {
            Fate::GiveBack { due: now.saturating_add(millis(delay)).min(i64::MAX as u64), attempts }
        }
        Disposal::DeadLetter { reason } => keep(Kind::Dead, reason),
        Disposal::Quarantine { reason } => keep(Kind::Quarantined, reason),
    }
}

fn cut(mut reason: String) -> String {
    reason.truncate(super::cut(&reason, REASON_BYTES_MAX).len());
    reason
}

fn millis(duration: Duration) -> Millis {
    duration.min(WAIT_MAX * 100).as_millis() as u64
}

/// Messages that were taken out of the index for a claim. Dropped before they are kept, they go back as if they had never been taken.
struct Picked {
    queue: Arc<Shared>,
    claims: Vec<Claimed>,
    bodies: Vec<Option<Body>>,
}

impl Picked {
    fn keep(mut self) -> (Vec<Claimed>, Vec<Option<Body>>) {
        (std::mem::take(&mut self.claims), std::mem::take(&mut self.bodies))
    }

    /// Gives back what could not be read, and what is behind it in its groups; nothing of them is handed out before then.
    fn put_back(&mut self, unread: &[Sequence], until: Millis) {
        let mut state = self.queue.lock();
        let back = state.index.put_back(&self.claims, unread, until);
        let claims = std::mem::take(&mut self.claims).into_iter();
        let bodies = std::mem::take(&mut self.bodies).into_iter();
        for (claim, body) in claims.zip(bodies) {
            if !back.contains(&claim.sequence) {
                self.claims.push(claim);
                self.bodies.push(body);
            } else if let Some(body) = body {
                state.bodies.offer(claim.sequence, body);
            }
        }
        drop(state);
        self.queue.changed.notify_waiters();
    }
}

impl Drop for Picked {
    fn drop(&mut self) {
        if self.claims.is_empty() {
            return;
        }
        let mut state = self.queue.lock();
        state.index.unclaim(&self.claims);
        for (claim, body) in self.claims.iter().zip(self.bodies.drain(..)) {
            if let Some(body) = body {
                state.bodies.offer(claim.sequence, body);
            }
        }
        drop(state);
        self.queue.changed.notify_waiters();
    }
}
