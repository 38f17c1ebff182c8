//! The writer: the only one who touches the file, one transaction for all that has come.
//!
//! Handles (`mod.rs`) send it [`Op`]s through a bounded channel. It takes all that are there, does them inside one transaction, and
//! answers after the commit. While one commit is on its way to the disk the next operations gather, so the more callers there are, the
//! more of them share a commit: group commit, without a timer and without waiting for anybody.
//!
//! # The order of things
//!
//! 1. A caller changes the index in a way that can be taken back: a publisher reserves room, a consumer's settlement is *begun*. Each holds a
//!    guard that takes it back when it is dropped, so every way to fail (no room in the channel, a caller that went away, an error of
//!    the disk, a writer that died) ends the same way.
//! 2. The writer writes and commits.
//! 3. Only then the index changes for good: messages appear in the order of their sequences, settled ones disappear. A message that is being
//!    settled is not handed out in between, and its lease does not run out.
//! 4. The callers get their answers, and consumers that wait are woken.
//!
//! Whoever has an answer may rely on the disk having it. Who has none does not know, as always.
//!
//! # When a transaction fails
//!
//! Nothing of it has happened. If the disk is full, the settlements are tried again without the publications, since they free room, and the
//! publications are refused. For other errors each operation is tried alone, so that a damaged page stops
//! those that need it and nobody else. Sequences that were given in a failed transaction are not given again.
//!
//! # Rows that go later
//!
//! Where many messages are settled at once their rows stay for a while, and a note says that they are gone: `sweep.rs`. When there is no room,
//! all that are left are removed at once, and what failed is tried again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, oneshot};

use super::bodies::Bodies;
use super::file::{Body, File, Kind, Loaded, ParkNote, Shelf, Slice, is_full, source_error};
use super::index::{Fingerprint, Index, Millis, Sequence};
use super::publication::name_of;
use super::sweep::{MANY, Sweep};
use super::{Publication, PublishError, Published, QueueOptions, Redriven, Refusal, Ungrouped};
use crate::source::{Depth, Kept, SourceError};

/// A queue, as all of its handles and the writer share it.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) id: u32,
    pub(super) name: String,
    pub(super) options: QueueOptions,
    pub(super) state: Mutex<State>,
    /// Told whenever something may have become claimable.
    pub(super) changed: Notify,
    /// Whether the file knows the queue's name.
    in_file: AtomicBool,
    hashing: foldhash::quality::RandomState,
}

/// What changes of a queue.
#[derive(Debug)]
pub(super) struct State {
    pub(super) index: Index,
    pub(super) bodies: Bodies,
    /// Room that publishers have been promised.
    pub(super) reserved: usize,
    pub(super) dead: u64,
    pub(super) quarantined: u64,
    /// Messages that were not in the file any more when they were to be handed out.
    pub(super) vanished: u64,
}

impl Shared {
    pub(super) fn new(
        id: u32,
        name: String,
        options: QueueOptions,
        in_file: bool,
        hashing: foldhash::quality::RandomState,
    ) -> Self {
        let bodies = Bodies::new(options.cache_bytes);
        let state = State { index: Index::new(), bodies, reserved: 0, dead: 0, quarantined: 0, vanished: 0 };
        let in_file = AtomicBool::new(in_file);
        Shared { id, name, options, state: Mutex::new(state), changed: Notify::new(), in_file, hashing }
    }

    /// A panic elsewhere leaves the index whole: nothing in it calls foreign code.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it holds.
    pub(super) fn depth(&self, now: Millis) -> Depth {
        let mut state = self.lock();
        state.index.tick(now);
        let leased = state.index.out() as u64;
        let waiting = state.index.len() as u64 - leased;
        Depth { waiting, leased, dead: state.dead, quarantined: state.quarantined }
    }

    /// The lane of what is [written](Publication::written) in the place of a group; none for a message that is loose.
    pub(super) fn fingerprint(&self, written: Option<&[u8]>) -> Option<Fingerprint> {
        use std::hash::BuildHasher;
        let written = written.unwrap_or_default();
        let is_named = !written.is_empty() && name_of(written).is_some();
        // A mark with nothing behind it is in no line.
        let is_in_line = self.options.ungrouped == Ungrouped::Serial && written.len() != 1;
        (is_named || is_in_line).then(|| self.hashing.hash_one(written))
    }
}

/// Room for messages in a queue, promised to a publisher.
#[derive(Debug)]
pub(super) struct Reservation {
    queue: Arc<Shared>,
    count: usize,
}

impl Reservation {
    pub(super) fn new(queue: &Arc<Shared>, count: usize) -> Result<Self, Refusal> {
        let capacity = queue.options.capacity;
        let mut state = queue.lock();
        if state.index.len() + state.reserved + count > capacity {
            return Err(Refusal::Full { capacity });
        }
        state.reserved += count;
        drop(state);
        Ok(Reservation { queue: Arc::clone(queue), count })
    }

    /// As much as there is room for.
    fn up_to(queue: &Arc<Shared>, most: usize) -> Self {
        let mut state = queue.lock();
        let room = queue.options.capacity.saturating_sub(state.index.len() + state.reserved);
        let count = most.min(room);
        state.reserved += count;
        drop(state);
        Reservation { queue: Arc::clone(queue), count }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.queue.lock().reserved -= self.count;
    }
}

/// Settlements that are on their way to the disk. Dropped without having been kept, they were never begun.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) queue: Arc<Shared>,
    pub(super) fates: Vec<(Sequence, Fate)>,
}

impl Drop for Begun {
    fn drop(&mut self) {
        if self.fates.is_empty() {
            return;
        }
        let mut state = self.queue.lock();
        for (sequence, _) in self.fates.drain(..) {
            state.index.abandon(sequence);
        }
        drop(state);
        self.queue.changed.notify_waiters();
    }
}

/// What is to be written about a message that is out.
#[derive(Debug)]
pub(super) enum Fate {
    Done,
    GiveBack { due: Millis, attempts: u16 },
    Keep { kind: Kind, attempts: u16, now: Millis, reason: String },
}

/// An idempotency key, and a digest of the call that came with it.
pub(super) struct Once {
    pub(super) key: Arc<str>,
    pub(super) digest: u64,
}

/// What became of the messages of a call; or they come back, because another call had its idempotency key.
type PublishedOnce = Result<Vec<Published>, Vec<Publication>>;

pub(super) type Answer<T> = oneshot::Sender<Result<T, SourceError>>;

/// What is asked of the writer.
pub(super) enum Op {
    Publish {
        queue: Arc<Shared>,
        publications: Vec<Publication>,
        /// Goes before the deduplication ids of the messages.
        once: Option<Once>,
        now: Millis,
        reservation: Reservation,
        /// Of the bytes that may be on their way.
        permit: Option<OwnedSemaphorePermit>,
        answer: oneshot::Sender<Result<PublishedOnce, PublishError>>,
    },
    Settle {
        begun: Begun,
        answer: Answer<()>,
    },
    Redrive {
        queue: Arc<Shared>,
        which: Option<Vec<Sequence>>,
        most: usize,
        answer: Answer<Redriven>,
    },
    PurgeKept {
        queue: Arc<Shared>,
        kind: Kind,
        answer: Answer<usize>,
    },
    Park {
        notes: Vec<ParkNote>,
        answer: Answer<()>,
    },
    Read(Read),
    Close {
        answer: oneshot::Sender<()>,
    },
}

/// Questions that need no transaction.
pub(super) enum Read {
    Load { sequences: Vec<Sequence>, answer: oneshot::Sender<Vec<Loaded>> },
    Parked { answer: Answer<Vec<ParkNote>> },
    Groups { heads: Vec<Sequence>, answer: Answer<Vec<Option<Arc<str>>>> },
    Kept { queue: Arc<Shared>, kind: Kind, after: Sequence, most: usize, answer: Answer<Vec<Kept>> },
    Search { queue: Arc<Shared>, shelf: Shelf, after: Sequence, text: Arc<str>, answer: Answer<Slice> },
}

/// What an operation did inside the transaction, to be told to the index and the caller after the commit.
enum Effect {
    Published(Vec<Published>),
    /// Another call had the idempotency key.
    KeyTaken,
    Settled,
    /// The new messages, what was not there, and the room for them.
    Redriven(Again, Vec<Sequence>, Reservation),
    KeptPurged(usize),
    Parked,
}

/// All queues of a store.
#[derive(Debug)]
pub(super) struct Registry {
    pub(super) queues: Mutex<HashMap<String, Arc<Shared>>>,
    pub(super) closed: AtomicBool,
}

impl Registry {
    pub(super) fn all(&self) -> Vec<Arc<Shared>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}

/// What the writer works with. Driven by a thread, or by the callers themselves.
pub(super) struct Writer {
    /// Nothing once it is closed.
    file: Option<File>,
    next_sequence: Sequence,
    sweep: Sweep,
    registry: Arc<Registry>,
}

/// When the rows of settled messages go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Removal {
    /// With the commit.
    Now,
    /// Many of them later.
    Later,
}

/// No more operations than this share a commit; it bounds how long the first of them waits.
const OPS_PER_COMMIT: usize = 1_024;

impl Writer {
    /// `noted` are the messages that the file notes as done.
    pub(super) fn new(
        file: File,
        next_sequence: Sequence,
        noted: Vec<Sequence>,
        registry: Arc<Registry>,
    ) -> Self {
        Writer { file: Some(file), next_sequence, sweep: Sweep::new(noted), registry }
    }

    /// The life of the writer's thread: until it is told to close, or nobody is left who could tell it anything.
    pub(super) fn run(mut self, mut ops: mpsc::Receiver<Op>) {
        let mut batch = Vec::new();
        while ops.blocking_recv_many(&mut batch, OPS_PER_COMMIT) > 0 {
            self.perform(std::mem::take(&mut batch));
        }
    }

    /// Does all of these and answers them.
    pub(super) fn perform(&mut self, ops: Vec<Op>) {
        let mut writes = Vec::with_capacity(ops.len());
        let mut closing = Vec::new();
        for op in ops {
            match op {
                Op::Read(read) => self.read(read),
                Op::Close { answer } => closing.push(answer),
                write => writes.push(write),
            }
        }
        if !writes.is_empty() {
            self.write(writes);
            self.sweep(false);
        }
        if !closing.is_empty() {
            self.close();
            for answer in closing {
                let _ = answer.send(());
            }
        }
    }

    fn read(&self, read: Read) {
        // Whoever does not wait any more does not need the answer.
        match (read, &self.file) {
            (Read::Load { sequences, answer }, Some(file)) => {
                let _ = answer.send(sequences.into_iter().map(|sequence| file.load(sequence)).collect());
            }
            (Read::Groups { heads, answer }, Some(file)) => {
                let groups = heads.into_iter().map(|head| file.group_of(head)).collect::<Result<_, _>>();
                let _ = answer.send(groups.map_err(|error| source_error(&error)));
            }
            (Read::Kept { queue, kind, after, most, answer }, Some(file)) => {
                let kept = file.kept(queue.id, kind, after, most);
                let _ = answer.send(kept.map_err(|error| source_error(&error)));
            }
            (Read::Search { queue, shelf, after, text, answer }, Some(file)) => {
                let done = self.sweep.done();
                let is_there = |sequence: &Sequence| shelf != Shelf::Messages || !done.contains(sequence);
                let slice = file.search(shelf, queue.id, after, &text, is_there);
                let _ = answer.send(slice.map_err(|error| source_error(&error)));
            }
            (Read::Parked { answer }, Some(file)) => {
                let _ = answer.send(file.parked().map_err(|error| source_error(&error)));
            }
            (Read::Parked { answer }, None) => drop(answer.send(Err(SourceError::Closed))),
            (Read::Search { answer, .. }, None) => drop(answer.send(Err(SourceError::Closed))),
            (Read::Load { sequences, answer }, None) => {
                let closed = sequences.iter().map(|_| Loaded::Failed(SourceError::Closed));
                let _ = answer.send(closed.collect());
            }
            (Read::Groups { answer, .. }, None) => drop(answer.send(Err(SourceError::Closed))),
            (Read::Kept { answer, .. }, None) => drop(answer.send(Err(SourceError::Closed))),
        }
    }

    fn write(&mut self, ops: Vec<Op>) {
        let error = match self.commit(&ops, Removal::Later).or_else(|error| self.make_room(&ops, error)) {
            Ok(effects) => return ops.into_iter().zip(effects).for_each(|(op, effect)| keep(op, effect)),
            Err(error) => error,
        };
        if ops.len() == 1 || self.file.is_none() {
            return ops.into_iter().for_each(|op| refuse(op, error.source()));
        }
        if !error.is_full() {
            return ops.into_iter().for_each(|op| self.write(vec![op]));
        }
        let (publications, others): (Vec<_>, Vec<_>) =
            ops.into_iter().partition(|op| matches!(op, Op::Publish { .. } | Op::Redrive { .. }));
        for op in publications {
            refuse(op, error.source());
        }
        if !others.is_empty() {
            match self.commit(&others, Removal::Now) {
                Ok(effects) => others.into_iter().zip(effects).for_each(|(op, effect)| keep(op, effect)),
                Err(error) => others.into_iter().for_each(|op| refuse(op, error.source())),
            }
        }
    }

    /// Tries again what failed for want of room, after removing the rows of all that is settled.
    fn make_room(&mut self, ops: &[Op], error: WriteError) -> Result<Vec<Effect>, WriteError> {
        if !error.is_full() {
            return Err(error);
        }
        self.sweep(true);
        self.commit(ops, Removal::Now)
    }

    fn commit(&mut self, ops: &[Op], removal: Removal) -> Result<Vec<Effect>, WriteError> {
        let file = self.file.as_ref().ok_or(WriteError::Closed)?;
        let mut next_sequence = self.next_sequence;
        let result = file.transaction(|file| {
            let mut batch =
                Batch { file, next_sequence: &mut next_sequence, done: Vec::new(), forget: 0, now: 0 };
            let effects = ops.iter().map(|op| batch.apply(op)).collect::<Result<Vec<_>, _>>()?;
            Ok((effects, batch.finish(ops, removal)?))
        });
        self.next_sequence = next_sequence;
        let (effects, noted) = result.map_err(WriteError::File)?;
        self.sweep.add(noted);
        for op in ops {
            if let Op::Publish { publications, .. } = op {
                publications.iter().for_each(|publication| self.sweep.published(publication.text.len()));
            }
        }
        Ok(effects)
    }

    /// Removes rows of settled messages, if enough of them have come together, or all that are left.
    fn sweep(&mut self, all: bool) {
        let Some(file) = &self.file else { return };
        let Some(mut part) = self.sweep.next(all) else { return };
        let mut rest = self.sweep.rest();
        match file.transaction(|file| file.sweep(&mut part, &mut rest)) {
            Ok(()) => {}
            // Removing takes room as well. It is tried again when there is some.
            Err(error) if is_full(&error) => self.sweep.add(part),
            // They are settled all the same; a damaged page must not be met at every commit from now on.
            Err(_) => self.sweep.failed(part),
        }
    }

    /// Writes down what only the memory knows and lets go of the file.
    fn close(&mut self) {
        self.registry.closed.store(true, Ordering::Release);
        self.sweep(true);
        let Some(file) = self.file.take() else { return };
        let queues = self.registry.all();
        // Counts of attempts are worth a try and not worth an error.
        let _ = file.transaction(|file| {
            for queue in &queues {
                let mut state = queue.lock();
                state.index.note_all();
                let notes = state.index.take_notes();
                drop(state);
                for (sequence, attempts) in notes {
                    file.note_attempts(sequence, attempts)?;
                }
            }
            Ok(())
        });
        // All that was answered is in the log already; a file that cannot be closed is let go all the same.
        let _ = file.close();
        for queue in queues {
            queue.changed.notify_waiters();
        }
    }
}

/// However the writer ends, those who wait learn of it.
impl Drop for Writer {
    fn drop(&mut self) {
        self.close();
    }
}

enum WriteError {
    Closed,
    File(rusqlite::Error),
}

impl WriteError {
    fn is_full(&self) -> bool {
        matches!(self, WriteError::File(error) if is_full(error))
    }

    fn source(&self) -> SourceError {
        match self {
            WriteError::Closed => SourceError::Closed,
            WriteError::File(error) => source_error(error),
        }
    }
}

/// Dead letters that are messages again: their new sequences, and their groups.
type Again = Vec<(Sequence, Option<String>)>;

/// One transaction at work.
struct Batch<'a> {
    file: &'a File,
    next_sequence: &'a mut Sequence,
    /// Messages to remove, gathered so that neighbours go together.
    done: Vec<Sequence>,
    /// Deduplication ids written: so many, twice over, of those that are over may be forgotten in return.
    forget: usize,
    now: Millis,
}

impl Batch<'_> {
    fn apply(&mut self, op: &Op) -> rusqlite::Result<Effect> {
        match op {
            Op::Publish { queue, publications, once, now, .. } => {
                self.add_queue(queue)?;
                self.now = self.now.max(*now);
                if let Some(once) = once
                    && !self.is_the_call(queue, once, *now)?
                {
                    return Ok(Effect::KeyTaken);
                }
                let key = once.as_ref().map(|once| &*once.key);
                let numbered = publications.iter().enumerate();
                let published =
                    numbered.map(|(place, publication)| self.publish(queue, publication, key, place, *now));
                published.collect::<Result<_, _>>().map(Effect::Published)
            }
            Op::Settle { begun, .. } => {
                for (sequence, fate) in &begun.fates {
                    self.settle(*sequence, fate)?;
                }
                Ok(Effect::Settled)
            }
            Op::Redrive { queue, which, most, .. } => {
                let reservation = Reservation::up_to(queue, *most);
                let (redriven, missing) = self.redrive(queue, which.as_deref(), reservation.count)?;
                Ok(Effect::Redriven(redriven, missing, reservation))
            }
            Op::PurgeKept { queue, kind, .. } => {
                self.file.purge_kept(queue.id, *kind).map(Effect::KeptPurged)
            }
            Op::Park { notes, .. } => {
                notes.iter().try_for_each(|note| self.file.note_parked(note)).map(|()| Effect::Parked)
            }
            Op::Read(_) | Op::Close { .. } => unreachable!("these need no transaction"),
        }
    }

    fn add_queue(&self, queue: &Shared) -> rusqlite::Result<()> {
        if queue.in_file.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.file.add_queue(queue.id, &queue.name)
    }

    fn sequence(&mut self) -> Sequence {
        *self.next_sequence += 1;
        *self.next_sequence - 1
    }

    /// Whether a call is the one that has its idempotency key. The first one gets it.
    fn is_the_call(&mut self, queue: &Shared, once: &Once, now: Millis) -> rusqlite::Result<bool> {
        let id = format!("c:{}", once.key);
        if let Some(digest) = self.file.seen(queue.id, &id, now)? {
            return Ok(digest == once.digest);
        }
        self.remember(queue, &id, once.digest, now)?;
        Ok(true)
    }

    fn remember(&mut self, queue: &Shared, id: &str, what: u64, now: Millis) -> rusqlite::Result<()> {
        let window = queue.options.deduplication_window.as_millis() as u64;
        self.forget += 2;
        self.file.remember(queue.id, id, what, now.saturating_add(window))
    }

    fn publish(
        &mut self,
        queue: &Shared,
        publication: &Publication,
        key: Option<&str>,
        place: usize,
        now: Millis,
    ) -> rusqlite::Result<Published> {
        // The kinds of ids live in one table under different letters.
        let ids = [
            key.map(|key| format!("k{place}:{key}")),
            publication.deduplication_id.as_deref().map(|id| format!("d:{id}")),
        ];
        for (at, id) in ids.iter().flatten().enumerate() {
            if let Some(sequence) = self.file.seen(queue.id, id, now)? {
                // The key has its own time, and the id may be forgotten before it.
                for unseen in ids.iter().flatten().take(at) {
                    self.remember(queue, unseen, sequence, now)?;
                }
                return Ok(Published { sequence, duplicate: true });
            }
        }
        let sequence = self.sequence();
        let due = due(publication.delay, now);
        let body = Body { group: publication.written().cloned(), text: Arc::clone(&publication.text) };
        self.file.add_message(sequence, queue.id, due, now, &body)?;
        for id in ids.iter().flatten() {
            self.remember(queue, id, sequence, now)?;
        }
        Ok(Published { sequence, duplicate: false })
    }

    fn settle(&mut self, sequence: Sequence, fate: &Fate) -> rusqlite::Result<()> {
        match fate {
            Fate::Done => {
                self.done.push(sequence);
                Ok(())
            }
            Fate::GiveBack { due, attempts } => self.file.postpone(sequence, *due, *attempts),
            Fate::Keep { kind, attempts, now, reason } => {
                self.file.keep(sequence, *kind, *attempts, *now, reason)
            }
        }
    }

    /// The new sequences and groups of those that were there, and the old sequences of those that were not.
    fn redrive(
        &mut self,
        queue: &Shared,
        which: Option<&[Sequence]>,
        most: usize,
    ) -> rusqlite::Result<(Again, Vec<Sequence>)> {
        let letters = match which {
            Some(letters) => letters.to_vec(),
            None => self.file.dead_sequences(queue.id, most)?,
        };
        let (mut redriven, mut missing) = (Vec::new(), Vec::new());
        for letter in letters.into_iter().take(most) {
            let sequence = self.sequence();
            match self.file.redrive(queue.id, letter, sequence)? {
                Some(group) => redriven.push((sequence, group)),
                None => missing.push(letter),
            }
        }
        Ok((redriven, missing))
    }

    /// What is written once for all operations. The answer is what was only noted.
    fn finish(mut self, ops: &[Op], removal: Removal) -> rusqlite::Result<Vec<Sequence>> {
        let mut noted = Vec::new();
        if removal == Removal::Later && self.done.len() >= MANY {
            noted = std::mem::take(&mut self.done);
            self.file.note_settled(&mut noted)?;
        }
        self.file.remove(&mut self.done)?;
        if self.forget > 0 {
            self.file.forget_expired(self.now, self.forget)?;
        }
        for op in ops {
            if let Op::Settle { begun, .. } = op {
                let notes = begun.queue.lock().index.take_notes();
                for (sequence, attempts) in notes {
                    self.file.note_attempts(sequence, attempts)?;
                }
            }
        }
        self.file.set_next_sequence(*self.next_sequence)?;
        Ok(noted)
    }
}

/// After the commit: the index learns of it, and the caller.
fn keep(op: Op, effect: Effect) {
    match (op, effect) {
        (
            Op::Publish { queue, publications, now, reservation, permit, answer, .. },
            Effect::Published(published),
        ) => {
            appear(&queue, publications, &published, now);
            drop((reservation, permit));
            let _ = answer.send(Ok(Ok(published)));
        }
        (Op::Publish { publications, reservation, permit, answer, .. }, Effect::KeyTaken) => {
            drop((reservation, permit));
            let _ = answer.send(Ok(Err(publications)));
        }
        (Op::Settle { mut begun, answer }, Effect::Settled) => {
            disappear(&begun.queue, std::mem::take(&mut begun.fates));
            let _ = answer.send(Ok(()));
        }
        (Op::Redrive { queue, answer, .. }, Effect::Redriven(redriven, missing, reservation)) => {
            let mut state = queue.lock();
            state.dead -= redriven.len() as u64;
            for (sequence, group) in &redriven {
                let fingerprint = queue.fingerprint(group.as_deref().map(str::as_bytes));
                state.index.append(*sequence, fingerprint, 0, 0);
            }
            drop(state);
            drop(reservation);
            queue.changed.notify_waiters();
            let _ = answer.send(Ok(Redriven { count: redriven.len(), missing }));
        }
        (Op::PurgeKept { queue, kind, answer }, Effect::KeptPurged(count)) => {
            let mut state = queue.lock();
            match kind {
                Kind::Dead => state.dead -= count as u64,
                Kind::Quarantined => state.quarantined -= count as u64,
            }
            drop(state);
            let _ = answer.send(Ok(count));
        }
        (Op::Park { answer, .. }, Effect::Parked) => drop(answer.send(Ok(()))),
        _ => unreachable!("each operation has its own effect"),
    }
}

/// When a message may go; one without a delay, at any time.
fn due(delay: Duration, now: Millis) -> Millis {
    if delay.is_zero() { 0 } else { now.saturating_add(delay.as_millis() as u64) }
}

/// New messages, in the order of their sequences, since the one writer gives both.
fn appear(queue: &Shared, publications: Vec<Publication>, published: &[Published], now: Millis) {
    queue.in_file.store(true, Ordering::Relaxed);
    let mut state = queue.lock();
    for (publication, published) in publications.into_iter().zip(published) {
        if published.duplicate {
            continue;
        }
        let fingerprint = queue.fingerprint(publication.written().map(|written| written.as_bytes()));
        let Publication { text, group, delay, .. } = publication;
        state.index.append(published.sequence, fingerprint, due(delay, now), 0);
        state.bodies.offer(published.sequence, Body { group, text });
    }
    drop(state);
    queue.changed.notify_waiters();
}

fn disappear(queue: &Shared, fates: Vec<(Sequence, Fate)>) {
    let mut state = queue.lock();
    for (sequence, fate) in fates {
        match fate {
            Fate::Done => state.index.end(sequence),
            Fate::GiveBack { due, .. } => state.index.give_back(sequence, due),
            Fate::Keep { kind, .. } => {
                state.index.end(sequence);
                match kind {
                    Kind::Dead => state.dead += 1,
                    Kind::Quarantined => state.quarantined += 1,
                }
            }
        }
    }
    drop(state);
    queue.changed.notify_waiters();
}

/// Nothing was written: the guards inside the operation take back what was promised, then the caller learns why.
fn refuse(op: Op, error: SourceError) {
    match op {
        Op::Publish { publications, reservation, permit, answer, .. } => {
            drop((reservation, permit));
            let _ = answer.send(Err(PublishError { refusal: Refusal::Failed(error), publications }));
        }
        Op::Settle { begun, answer } => {
            drop(begun);
            let _ = answer.send(Err(error));
        }
        Op::Park { answer, .. } => drop(answer.send(Err(error))),
        Op::Redrive { answer, .. } => drop(answer.send(Err(error))),
        Op::PurgeKept { answer, .. } => {
            let _ = answer.send(Err(error));
        }
        Op::Read(_) | Op::Close { .. } => unreachable!("these need no transaction"),
    }
}
