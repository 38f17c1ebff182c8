//! A dispatcher: a named, bounded set of lanes, its two locks, and the protocol of sleeping and waking around them.
//!
//! Submitters come in through [`offer`](Dispatcher::offer); workers through [`claim`](Dispatcher::claim),
//! [`settle`](Dispatcher::settle) and [`fall_asleep`](Dispatcher::fall_asleep). What decides is `lane/`; what is here is who may
//! look when, and who has to be woken. `operate.rs` has what operators and the end ask for, `change.rs` what a change of the topology does.
//!
//! # The rules
//!
//! 1. The lanes lock is taken before the ingress lock. No handler, callback or drop of the user's runs under either.
//! 2. A worker registers as a sleeper while it holds both locks and has seen neither a lane that could run nor a message in ingress.
//! 3. Whoever pushes into ingress takes a sleeper off the list, if there is one, under the same lock, and wakes it afterwards; not while
//!    enough others are rising and messages are quick (`worker/sleeper.rs`).
//! 4. Whoever takes a lane and leaves work behind, ingress included, wakes a sleeper by the same rule. `sleepers_hint` is raised under the lanes
//!    lock and lowered only by somebody who has looked, so it never says "none" when there is one.
//! 5. While there are timers and sleepers, one of the sleepers keeps the time: it sleeps until the earliest is due. Whoever takes that office
//!    away (by claiming work as the timekeeper, or by setting an earlier timer) wakes a sleeper to see to it.
//!
//! Rule 2 with 3 and 4 means that nobody sleeps beside work; `tests/loom_dispatcher.rs` checks it under every interleaving.

mod change;
mod operate;
#[cfg(test)]
mod tests;

pub(crate) use change::Locked;
pub(crate) use operate::Audited;

use std::{collections::VecDeque, sync::Arc, sync::atomic::Ordering};

use crate::{
    admission::{Bound, Dropped, EngineBound, Evicted, Ingress, Offer, Overflow, Room},
    batch::Bin,
    clock::Clock,
    engine::Moves,
    error::Refusal,
    lane::{Ending, Hand, Heat, Keeps, Lanes, Outgrown, Pace, Parcel, Wants},
    message::{Chunk, Inbox, Item, Kind, Message, Priority},
    stats::{Counted, Tally},
    sync::{
        AtomicU64, AtomicUsize, Mutex, MutexGuard, Padded, ShortGuard, ShortLock, lock, lock_short, try_lock,
        try_lock_short,
    },
    worker::{Backoff, Sleeper},
};

/// How many messages a worker admits before it takes the next lane. Few enough that they are still in the cache when their turn
/// comes, many enough that the ingress lock is taken rarely and that a lane among few has a long turn. Measured: with thousands of keys 64 to 1,024
/// are alike, 16 and 65,536 are slower; with 32 lanes and two workers 1,024 are 6 % faster than 256.
const ADMIT_AT_ONCE: usize = 1_024;

/// How often a submitter that finds the dispatcher full, and had to wait for no more than a moment the last time, offers its core to others before it sleeps. Where there are
/// more threads than cores, that is when a worker goes on; otherwise it costs some 20 µs. Measured: a tenth more messages than without, and 300 are no better.
const OFFERS_BEFORE_WAIT: u32 = 64;

/// Submitters that meet at the ingress lock more often than once in so many messages are a crowd. Picked, not tuned: what was measured (see `push_in_a_crowd`) is the whole,
/// with this number.
const CROWD: u64 = 128;

/// Whether submitters are a crowd, judged by one that has found the lock taken, and has it now: by how many were accepted until now, and when the last one found it taken.
/// Where nothing is in the buffer it met the worker that has just emptied it, and nobody else.
fn is_crowd(accepted: u64, met_at: u64, found_any: bool) -> bool {
    // Lanes that have moved to another dispatcher are not counted here any more, so it may have become less.
    found_any && accepted.abs_diff(met_at) < CROWD
}

/// The bounds of one dispatcher and what happens at each.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) capacity: u64,
    /// On top of the capacity, for control messages only.
    pub(crate) reserve: u64,
    pub(crate) lane: Option<usize>,
    pub(crate) lanes: Option<usize>,
    pub(crate) overflow: [Overflow; 4],
    /// Whether the placement looks at how much is here.
    pub(crate) load_counts: bool,
    /// How workers back off from it, if not as the engine's setting says.
    pub(crate) backoff: Option<Backoff>,
    /// One message in this many is timed; 0 for none.
    pub(crate) sampling: u64,
    /// What is kept of the memory of a burst.
    pub(crate) keeps: Keeps,
}

impl Limits {
    /// What happens at this bound.
    pub(crate) fn at(&self, bound: Bound) -> Overflow {
        self.overflow[bound as usize]
    }

    /// How many messages may be here for one of this kind to come in.
    #[inline]
    fn capacity_for(&self, kind: Kind) -> u64 {
        self.capacity + if kind.is_control() { self.reserve } else { 0 }
    }

    /// Whether a submission has to look at the lane of its key.
    pub(crate) fn look_at_key(&self) -> bool {
        self.lane.is_some() || self.lanes.is_some()
    }

    /// Whether the oldest may have to make room for the newest.
    fn evicts(&self) -> bool {
        self.overflow.contains(&Overflow::DropOldest)
    }
}

/// What can be read without a lock. Written under the ingress lock.
#[derive(Debug, Default)]
struct Hints {
    /// Whether there are messages in the ingress buffer. Written only when that changes: workers look at it.
    waiting: AtomicUsize,
    /// Ever accepted. Kept up to date for every message only where the placement looks at the load.
    accepted: AtomicU64,
    /// Not zero if the next submitter that finds the ingress lock taken shall let others go on first. Relaxed: who reads an old one yields once too often, or not.
    crowded: AtomicUsize,
}

/// Memory that is given up, to be dropped without a lock.
struct GivenUp<K, M> {
    _chunks: Option<[VecDeque<Chunk<K, M>>; 2]>,
    _slabs: Option<Outgrown<K, M>>,
}

/// What a look for memory that nobody needs came to.
enum Memory {
    /// It is in use, or little.
    InUse,
    /// A burst has left it; it is given up then, if nothing comes until then.
    IdleUntil(u64),
    /// It has been idle for so long.
    Outgrown,
}

/// Guarded by the lanes lock.
#[derive(Debug)]
struct Inner<K, M> {
    lanes: Lanes<K, M>,
    /// Taken from ingress, not yet admitted; all of it is older than what is in ingress now.
    inbox: Inbox<K, M>,
    /// How many were taken with it.
    came: usize,
    /// At least as many as there are sleepers (rule 4).
    sleepers_hint: usize,
    /// Who sleeps with a timeout, and until when.
    timekeeper: Option<(Sleeper, u64)>,
    counted: Counted,
    /// Which keys have had their share of a stream.
    heat: Heat,
    /// Whether it is the lanes' turn, where a worker streams.
    lanes_turn: bool,
    /// No more turns.
    stopped: bool,
    /// Messages that have left, whichever way.
    released: u64,
    /// For how many messages there was room in empty chunks of ingress when that was last emptied.
    places_in_ingress: usize,
    /// Since when there has been little in the memory that is here.
    little_since: Option<u64>,
}

impl<K, M> Inner<K, M> {
    /// Whether something will be due before anybody wakes for it.
    fn is_unattended(&self) -> bool {
        let kept_until = self.timekeeper.as_ref().map(|(_, until)| *until);
        self.lanes.next_due().is_some_and(|due| kept_until.is_none_or(|until| until > due))
    }

    fn admit_inbox(&mut self) {
        while let Some(arrival) = self.inbox.pop() {
            self.lanes.admit(arrival);
        }
    }

    /// Takes over what is in ingress into the inbox, which is empty. No message is moved.
    fn refill(&mut self, ingress: &mut Ingress<K, M>) {
        self.inbox.refill(&mut ingress.buffer);
        self.places_in_ingress = ingress.buffer.places_to_spare();
    }

    /// Whether there has been little in the memory that is here, for so long.
    fn memory(&mut self, keeps: &Keeps, linger: u64, now: impl FnOnce() -> u64) -> Memory {
        if !(self.has_sparse_chunks(keeps) || self.lanes.is_sparse(keeps)) {
            self.little_since = None;
            return Memory::InUse;
        }
        let now = now();
        let due = self.little_since.get_or_insert(now).saturating_add(linger);
        if due > now { Memory::IdleUntil(due) } else { Memory::Outgrown }
    }

    fn has_sparse_chunks(&self, keeps: &Keeps) -> bool {
        keeps.is_sparse(self.places_in_ingress + self.inbox.places_to_spare(), self.inbox.len())
    }

    /// Gives up what a burst has left: emptied chunks, or slabs with little in them, or both. What is here moves into slabs of its size, which is a walk over it; so that is done only where it is
    /// little, and ingress is not held meanwhile.
    fn give_up(&mut self, keeps: &Keeps, mut ingress: ShortGuard<'_, Ingress<K, M>>) -> GivenUp<K, M> {
        self.little_since = None;
        let _chunks = self.has_sparse_chunks(keeps).then(|| {
            self.places_in_ingress = 0;
            [self.inbox.give_up(), ingress.buffer.give_up()]
        });
        drop(ingress);
        GivenUp { _chunks, _slabs: self.lanes.is_sparse(keeps).then(|| self.lanes.repack()) }
    }
}

/// A dispatcher.
#[derive(Debug)]
pub(crate) struct Dispatcher<K, M> {
    pub(crate) name: String,
    pub(crate) limits: Limits,
    ingress: Padded<(ShortLock<Ingress<K, M>>, Hints)>,
    inner: Padded<Mutex<Inner<K, M>>>,
    /// A copy of `Inner::released` for submitters.
    released: Padded<AtomicU64>,
    /// Whether there is a message in ingress whose priority is not the normal one. On a line of its own: workers look at it for every
    /// hand, and submitters hardly ever write it.
    urgent: Padded<AtomicUsize>,
    /// Not zero: no streams, the topology is about to change. Written under the lanes lock.
    streams_barred: AtomicUsize,
    /// How many workers serve it.
    pub(crate) servers: AtomicUsize,
    pub(crate) room: Arc<Room>,
    /// Mappings that point here; for least-loaded placement.
    pub(crate) mappings: AtomicUsize,
    /// Looks that found somebody else at it. Written by those who failed, so it costs nobody who works.
    lock_failures: std::sync::atomic::AtomicU64,
}

/// What a worker found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A lane; its messages are in the turn.
    Turn,
    /// Nothing to do here now.
    Nothing,
    /// Nothing to do here now, but later, and nobody keeps the time: whoever goes elsewhere has to tell somebody.
    NothingYet,
    /// Somebody else has the dispatcher at this moment.
    Taken,
    /// There will be no more turns here.
    Stopped,
}

/// What came of lying down.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Asleep {
    /// There is work, or there will be no more: do not sleep.
    Not,
    /// Registered. The timekeeper sleeps until then at the longest.
    Until(Option<u64>),
}

/// What is left to do once the locks are released.
struct Afterwards<K, M> {
    /// Whom to wake.
    wakes: [Option<Sleeper>; 3],
    /// What to drop.
    given_up: Option<GivenUp<K, M>>,
}

impl<K, M> Afterwards<K, M> {
    fn new() -> Self {
        Afterwards { wakes: [None, None, None], given_up: None }
    }

    fn wake(&mut self, sleeper: Option<Sleeper>) {
        if sleeper.is_some() {
            let place = self.wakes.iter_mut().find(|place| place.is_none());
            *place.expect("one for an earlier timer, one for more work, one to keep the time") = sleeper;
        }
    }

    fn see_to(self) {
        self.wakes.into_iter().flatten().for_each(|sleeper| sleeper.wake());
    }
}

impl<K, M> Dispatcher<K, M> {
    pub(crate) fn new(name: String, limits: Limits, pace: Option<u64>, batch_max: usize, epoch: u64) -> Self {
        let mut lanes = Lanes::new(limits.evicts());
        lanes.pace = pace.map(Pace::new);
        let inner = Inner {
            lanes,
            inbox: Inbox::new(),
            came: 0,
            sleepers_hint: 0,
            timekeeper: None,
            counted: Counted::new(),
            heat: Heat::new(batch_max),
            lanes_turn: false,
            stopped: false,
            released: 0,
            places_in_ingress: 0,
            little_since: None,
        };
        Dispatcher {
            name,
            limits,
            ingress: Padded((ShortLock::new(Ingress::new(epoch)), Hints::default())),
            inner: Padded(Mutex::new(inner)),
            released: Padded(AtomicU64::new(0)),
            urgent: Padded(AtomicUsize::new(0)),
            streams_barred: AtomicUsize::new(0),
            servers: AtomicUsize::new(0),
            room: Arc::new(Room::new()),
            mappings: AtomicUsize::new(0),
            lock_failures: std::sync::atomic::AtomicU64::new(0),
        }
    }

    #[inline(always)]
    fn ingress(&self) -> ShortGuard<'_, Ingress<K, M>> {
        lock_short(&self.ingress.0.0)
    }

    fn hints(&self) -> &Hints {
        &self.ingress.0.1
    }

    // ── submitters ─────────────────────────────────────────────────────────────────────────────────────────────────

    /// Offers a message. A full bound of ours whose policy is `DropOldest` makes room at once; the other policies are the caller's.
    pub(crate) fn offer(&self, arrival: Item<K, M>, epoch: u64, clock: &Clock) -> Offer<K, M> {
        if self.limits.look_at_key() {
            return self.offer_looking(arrival, epoch, None, clock);
        }
        let mut ingress = self.ingress();
        if ingress.closed {
            return Offer::Closed(arrival);
        }
        if ingress.epoch != epoch {
            return Offer::Moved(arrival);
        }
        if !self.has_room(&mut ingress, arrival.message.kind) {
            drop(ingress);
            return match self.limits.at(Bound::Dispatcher) {
                Overflow::DropOldest => self.offer_looking(arrival, epoch, None, clock),
                _ => Offer::Full(arrival, Bound::Dispatcher),
            };
        }
        self.push(&mut ingress, arrival, clock);
        self.note_accepted(&ingress);
        let wake = ingress.sleepers.take();
        Offer::Accepted { wake, evicted: None }
    }

    /// The short way in, where neither the bounds nor the placement look at anything but how many messages there are: gives the message back if something is out of the ordinary.
    #[inline(always)]
    pub(crate) fn push_direct(
        &self,
        arrival: Item<K, M>,
        epoch: u64,
        clock: &Clock,
    ) -> Result<Option<Sleeper>, Item<K, M>> {
        debug_assert!(!self.limits.look_at_key() && !self.limits.load_counts, "the short way is for others");
        match try_lock_short(&self.ingress.0.0) {
            Some(mut ingress) => self.push_locked(&mut ingress, arrival, epoch, clock),
            None => {
                // In parts, so that it is nowhere in memory on the way of most.
                let Item { fingerprint, accepted_at, message: Message { key, body, kind, priority } } =
                    arrival;
                let message = Message { key, body, kind, priority };
                self.push_in_a_crowd(Item { fingerprint, accepted_at, message }, epoch, clock)
            }
        }
    }

    /// The same for a submitter that found the lock taken. Where that happens again and again, the lock, with all that it guards, travels between the cores of submitters for every
    /// message. Who lets the others go on for a while finds it free later, and they have it to themselves meanwhile; where there are more threads than cores that is also when a worker goes
    /// on. Measured with four submitters and two workers on two near cores: 75 to 100 million messages per second instead of 50. (With cores that are far from each other
    /// the lock changes hands so slowly that everybody keeps it for a while anyway, and this costs a fifth.)
    #[cold]
    #[inline(never)]
    fn push_in_a_crowd(
        &self,
        arrival: Item<K, M>,
        epoch: u64,
        clock: &Clock,
    ) -> Result<Option<Sleeper>, Item<K, M>> {
        let crowded = self.hints().crowded.load(Ordering::Relaxed) > 0;
        if crowded {
            std::thread::yield_now();
        }
        let mut ingress = self.ingress();
        // Who has yielded cannot tell how often one is in the way: many have come meanwhile. The next one can.
        let is_crowded = !crowded && is_crowd(ingress.accepted, ingress.met_at, !ingress.buffer.is_empty());
        if is_crowded != crowded {
            self.hints().crowded.store(usize::from(is_crowded), Ordering::Relaxed);
        }
        ingress.met_at = ingress.accepted;
        self.push_locked(&mut ingress, arrival, epoch, clock)
    }

    #[inline(always)]
    fn push_locked(
        &self,
        ingress: &mut Ingress<K, M>,
        arrival: Item<K, M>,
        epoch: u64,
        clock: &Clock,
    ) -> Result<Option<Sleeper>, Item<K, M>> {
        let ordinary = !ingress.closed && ingress.epoch == epoch;
        if !ordinary || !self.has_room(ingress, arrival.message.kind) {
            return Err(arrival);
        }
        self.push(ingress, arrival, clock);
        Ok(ingress.sleepers.take())
    }

    /// Offers the messages of a bin, in order, as far as there is room; gives back how many were taken. They are removed from the bin. Nothing if it is closed, or was
    /// chosen by another layout, or each message has to take a place in the engine's bound.
    pub(crate) fn offer_batch(
        &self,
        bin: &mut Bin<K, M>,
        epoch: u64,
        bound: &EngineBound,
        clock: &Clock,
    ) -> Option<(usize, Option<Sleeper>)> {
        let mut ingress = self.ingress();
        debug_assert!(!self.limits.look_at_key() && !self.limits.load_counts, "batches are for others");
        // Looked at last: a change that makes the engine's own bound count does so before it lets anybody see its epoch here.
        if ingress.closed || ingress.epoch != epoch || bound.is_counting() {
            return None;
        }
        let count = self.fitting(&mut ingress, bin);
        if count == 0 {
            return Some((0, None));
        }
        self.push_many(&mut ingress, bin, count, clock);
        Some((count, ingress.sleepers.take()))
    }

    #[inline(always)]
    fn has_room(&self, ingress: &mut Ingress<K, M>, kind: Kind) -> bool {
        let limit = self.limits.capacity_for(kind);
        if ingress.accepted - ingress.released_seen < limit {
            return true;
        }
        ingress.released_seen = self.released.load(Ordering::Acquire);
        ingress.accepted - ingress.released_seen < limit
    }

    /// How many of a bin there is room for.
    fn fitting(&self, ingress: &mut Ingress<K, M>, bin: &Bin<K, M>) -> usize {
        let all = bin.packed.len();
        if ingress.accepted - ingress.released_seen + all as u64 <= self.limits.capacity {
            return all;
        }
        ingress.released_seen = self.released.load(Ordering::Acquire);
        let here = ingress.accepted - ingress.released_seen;
        let fits = |(place, kind): (u64, Kind)| here + place < self.limits.capacity_for(kind);
        (0..).zip(bin.kinds()).take_while(|&next| fits(next)).count()
    }

    #[inline(always)]
    fn accept(&self, ingress: &mut Ingress<K, M>, item: &mut Item<K, M>, clock: &Clock) {
        ingress.accepted += 1;
        if ingress.until_timed > 0 {
            ingress.until_timed -= 1;
        } else if self.limits.sampling > 0 {
            ingress.until_timed = self.limits.sampling - 1;
            item.accepted_at = clock.now().max(1);
        }
    }

    #[inline(always)]
    fn push(&self, ingress: &mut Ingress<K, M>, mut arrival: Item<K, M>, clock: &Clock) {
        self.accept(ingress, &mut arrival, clock);
        if arrival.message.priority != Priority::Normal {
            self.urgent.store(1, Ordering::Relaxed);
        }
        if ingress.buffer.is_empty() {
            self.hints().waiting.store(1, Ordering::Relaxed);
        }
        ingress.buffer.push(arrival);
    }

    /// For placement by load.
    fn note_accepted(&self, ingress: &Ingress<K, M>) {
        if self.limits.load_counts {
            self.hints().accepted.store(ingress.accepted, Ordering::Relaxed);
        }
    }

    /// Pushes the first of a bin, for which there is room.
    fn push_many(&self, ingress: &mut Ingress<K, M>, bin: &mut Bin<K, M>, count: usize, clock: &Clock) {
        if bin.urgent {
            self.urgent.store(1, Ordering::Relaxed);
        }
        // The first stands for all that would be timed: they are accepted at the same time.
        let mut accepted_at = 0;
        if ingress.until_timed >= count as u64 {
            ingress.until_timed -= count as u64;
        } else if self.limits.sampling > 0 {
            ingress.until_timed = self.limits.sampling - 1;
            accepted_at = clock.now().max(1);
        }
        ingress.accepted += count as u64;
        if ingress.buffer.is_empty() {
            self.hints().waiting.store(1, Ordering::Relaxed);
        }
        ingress.buffer.append(bin, count, accepted_at);
    }

    /// The slow way in: everything that came before is admitted, so that the bounds that look at a lane, and the eviction of the
    /// oldest, see the truth. `for_engine` is the engine's bound, if that seemed full: room is made for it, too, unless some has come meanwhile.
    pub(crate) fn offer_looking(
        &self,
        mut arrival: Item<K, M>,
        epoch: u64,
        for_engine: Option<&EngineBound>,
        clock: &Clock,
    ) -> Offer<K, M> {
        let mut guard = lock(&self.inner);
        let mut ingress = self.ingress();
        if ingress.closed {
            return Offer::Closed(arrival);
        }
        if ingress.epoch != epoch {
            return Offer::Moved(arrival);
        }
        let inner = &mut *guard;
        admit_everything(inner, &mut ingress, self.hints());
        // Last, because a place that is had here is kept. With an eviction none is needed: that of the evicted message is the new one's.
        let full = self.full_bound(inner, &mut ingress, &arrival).or_else(|| {
            for_engine.filter(|bound| !bound.reserve(arrival.message.kind)).map(|_| Bound::Engine)
        });
        let mut evicted = None;
        if let Some(bound) = full {
            evicted = self.evict(inner, bound, arrival.fingerprint);
            if evicted.is_none() {
                return Offer::Full(arrival, bound);
            }
        }
        self.accept(&mut ingress, &mut arrival, clock);
        self.note_accepted(&ingress);
        inner.lanes.admit(arrival);
        let wake = ingress.sleepers.take();
        drop(ingress);
        drop(guard);
        if evicted.is_some() && self.limits.look_at_key() {
            // Its place here is taken already, but not that in its lane, or the lane's own.
            self.room.stir();
        }
        Offer::Accepted { wake, evicted }
    }

    /// The first bound that this message would break.
    fn full_bound(
        &self,
        inner: &Inner<K, M>,
        ingress: &mut Ingress<K, M>,
        arrival: &Item<K, M>,
    ) -> Option<Bound> {
        let depth = inner.lanes.depth(arrival.fingerprint);
        let reserve = if arrival.message.kind.is_control() { self.limits.reserve as usize } else { 0 };
        if self.limits.lane.is_some_and(|limit| depth.unwrap_or(0) >= limit.saturating_add(reserve)) {
            return Some(Bound::Lane);
        }
        let lanes = inner.lanes.lane_count();
        if depth.is_none() && self.limits.lanes.is_some_and(|limit| lanes >= limit.saturating_add(reserve)) {
            return Some(Bound::Lanes);
        }
        (!self.has_room(ingress, arrival.message.kind)).then_some(Bound::Dispatcher)
    }

    /// Makes room at a bound whose policy says so.
    fn evict(&self, inner: &mut Inner<K, M>, bound: Bound, fingerprint: u64) -> Option<Evicted<K, M>> {
        if self.limits.at(bound) != Overflow::DropOldest {
            return None;
        }
        let (fingerprint, item) = match bound {
            Bound::Lane => (fingerprint, inner.lanes.evict_oldest_of(fingerprint)?),
            _ => inner.lanes.evict_oldest()?,
        };
        let kind = item.message.kind;
        inner.counted.evicted.record(Dropped { bound, policy: Overflow::DropOldest, kind });
        inner.released += 1;
        self.released.store(inner.released, Ordering::Release);
        Some(Evicted { fingerprint, message: item.message, bound })
    }

    /// Counts a message that was dropped before it got in: accepted and released at once, so that the account balances. False if the dispatcher
    /// has been removed: what it has counted may have been counted for good.
    pub(crate) fn count_dropped(&self, dropped: Dropped) -> bool {
        let mut inner = lock(&self.inner);
        let mut ingress = self.ingress();
        if ingress.is_retired() {
            return false;
        }
        ingress.accepted += 1;
        self.note_accepted(&ingress);
        ingress.drops.record(dropped);
        inner.released += 1;
        self.released.store(inner.released, Ordering::Release);
        true
    }

    /// The same for one that was refused.
    pub(crate) fn count_refused(&self, reason: Refusal) -> bool {
        let mut ingress = self.ingress();
        let is_here = !ingress.is_retired();
        if is_here {
            ingress.refusals.record(reason);
        }
        is_here
    }

    /// What has left so far, for a submitter that is about to wait for more.
    pub(crate) fn released(&self) -> u64 {
        self.released.load(Ordering::Acquire)
    }

    /// Offers the core to others, for a submitter that found it full, until an eighth of it has come free. Says whether that has.
    pub(crate) fn has_room_soon(&self) -> bool {
        let enough = self.released() + self.limits.capacity.div_ceil(8);
        // For loom it would be one more way to the same place.
        !cfg!(loom)
            && (0..OFFERS_BEFORE_WAIT).any(|_| {
                std::thread::yield_now();
                self.released() >= enough
            })
    }

    /// Messages that are here, about.
    pub(crate) fn load(&self) -> u64 {
        let accepted = self.hints().accepted.load(Ordering::Relaxed);
        accepted.saturating_sub(self.released.load(Ordering::Relaxed))
    }

    /// Whether a look would probably find something. For workers that spin; the truth is under the locks.
    pub(crate) fn looks_busy(&self) -> bool {
        self.hints().waiting.load(Ordering::Relaxed) > 0
    }

    // ── workers ────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Looks for a lane, unless somebody else has the lock.
    pub(crate) fn claim(&self, wants: &Wants<K>, hand: &mut Hand<K, M>, clock: &Clock) -> Found {
        let Some(mut inner) = try_lock(&self.inner) else {
            self.lock_failures.fetch_add(1, Ordering::Relaxed);
            return Found::Taken;
        };
        inner.counted.looks += 1;
        let mut after = Afterwards::new();
        let found = self.claim_locked(&mut inner, wants, hand, clock, &mut after);
        drop(inner);
        after.see_to();
        found
    }

    /// Settles all turns of a hand and, if asked to, fills it again under the same lock. Lanes that have to move on are given
    /// back, to be delivered before any code of the user's runs, and whether it had to wait for the lock.
    pub(crate) fn settle(
        &self,
        hand: &mut Hand<K, M>,
        tally: &Tally,
        next: Option<&Wants<K>>,
        bound: &EngineBound,
        moves: &Moves,
        clock: &Clock,
    ) -> (Vec<Parcel<K, M>>, Found, bool) {
        let mut after = Afterwards::new();
        let (mut inner, waited) = self.lock_to_settle();
        let streams = next.is_some_and(|wants| wants.stream) && self.may_stream(&inner);
        let (parcels, earlier_timer) = self.settle_locked(&mut inner, hand, streams, moves, clock);
        inner.counted.add(tally);
        inner.released += tally.released();
        let released = inner.released;
        self.released.store(released, Ordering::Release);
        let freed = bound.release(tally.released());
        if earlier_timer {
            let keeper = inner.timekeeper.take().map(|(keeper, _)| keeper);
            let keeper = keeper.or_else(|| self.take_sleeper(&mut inner));
            after.wake(keeper);
        }
        let found = match next {
            Some(wants) => self.claim_locked(&mut inner, wants, hand, clock, &mut after),
            None => {
                // This worker looks elsewhere first.
                if inner.lanes.has_ready() || inner.is_unattended() {
                    after.wake(self.take_sleeper(&mut inner));
                }
                Found::Nothing
            }
        };
        drop(inner);
        after.see_to();
        freed.tell(bound);
        match tally.released() {
            0 => {}
            // Each place is worth a wake-up where whoever waits for it has asked for no more.
            _ => self.room.made(released),
        }
        if !parcels.is_empty() {
            // What has gone with them was not released.
            self.room.announce();
        }
        (parcels, found, waited)
    }

    /// Takes the lanes lock for a worker that has to have it; says whether it had to wait. Counts as a look does.
    fn lock_to_settle(&self) -> (MutexGuard<'_, Inner<K, M>>, bool) {
        // For loom a failed attempt is one more turning that leads to the same place.
        let free = if cfg!(loom) { None } else { try_lock(&self.inner) };
        let waited = free.is_none();
        let mut inner = free.unwrap_or_else(|| lock(&self.inner));
        if waited {
            self.lock_failures.fetch_add(1, Ordering::Relaxed);
        }
        inner.counted.looks += u64::from(!waited);
        (inner, waited)
    }

    fn settle_locked(
        &self,
        inner: &mut Inner<K, M>,
        hand: &mut Hand<K, M>,
        streams: bool,
        moves: &Moves,
        clock: &Clock,
    ) -> (Vec<Parcel<K, M>>, bool) {
        let (mut parcels, mut earlier_timer) = (Vec::new(), false);
        let (turns, spent) = hand.turns_and_spent();
        for turn in turns {
            let timed = inner.lanes.keeps_time() || !matches!(turn.ending, Ending::Handled);
            let now = if timed { clock.now() } else { 0 };
            if !streams && inner.lanes.gives_way(turn) {
                // The lane goes to the back of the list: whatever has come meanwhile must be in that list before it. (Who streams
                // gives the inbox its turn first.)
                self.admit_all(inner);
            }
            let settled = inner.lanes.settle(turn, now);
            earlier_timer |= settled.earlier_timer;
            if std::mem::needs_drop::<K>() {
                spent.extend(settled.holder);
            }
            if let Some(parcel) = settled.parcel {
                // Under the lock, so whoever finds it gone here knows that it is on its way.
                moves.begin();
                self.ingress().accepted -= parcel.messages();
                parcels.push(parcel);
            }
        }
        hand.clear();
        (parcels, earlier_timer)
    }

    fn claim_locked(
        &self,
        inner: &mut Inner<K, M>,
        wants: &Wants<K>,
        hand: &mut Hand<K, M>,
        clock: &Clock,
        after: &mut Afterwards<K, M>,
    ) -> Found {
        if inner.stopped {
            return Found::Stopped;
        }
        let timed = inner.lanes.keeps_time();
        let unsure = wants.slow || (wants.rested && self.has_more(inner));
        let now = if timed || unsure { clock.now() } else { wants.now };
        if timed {
            // Before a stream begins: it passes by whatever is not ready, and while messages keep coming there is always another one.
            inner.lanes.wake_due(now);
        }
        let streams = wants.stream && self.may_stream(inner);
        let streaming = streams && self.begin_stream(inner, wants, hand, now);
        if !(streaming || streams && inner.lanes.has_ready()) {
            self.admit_some(inner, wants.lanes);
        }
        let claimed = !streaming && hand.fill(&mut inner.lanes, wants, now);
        self.tidy_up(inner, after, || if streaming || claimed { now } else { clock.now() });
        if streaming {
            return Found::Turn;
        }
        if claimed && inner.sleepers_hint > 0 && self.has_more(inner) {
            after.wake(self.take_next_sleeper(inner, !wants.slow));
        }
        let unattended = inner.is_unattended();
        if !claimed {
            // Not a reason to wake anybody yet: this worker may lie down here itself.
            return if unattended { Found::NothingYet } else { Found::Nothing };
        }
        if unattended {
            after.wake(self.take_sleeper(inner));
        }
        Found::Turn
    }

    /// Whether a worker that would take a stream may. If not, messages get from the inbox into the ready list like anybody's.
    fn may_stream(&self, inner: &Inner<K, M>) -> bool {
        let ordinary = !self.bars_streams() && self.urgent.load(Ordering::Relaxed) == 0;
        ordinary && inner.lanes.may_stream()
    }

    /// Takes messages straight from the inbox (`lane/stream.rs`), unless it is the lanes' turn.
    fn begin_stream(
        &self,
        inner: &mut Inner<K, M>,
        wants: &Wants<K>,
        hand: &mut Hand<K, M>,
        now: u64,
    ) -> bool {
        // The lanes that are ready have a turn after each stream.
        inner.lanes_turn = !inner.lanes_turn && inner.lanes.has_ready();
        if inner.lanes_turn || (inner.inbox.is_empty() && !self.refill(inner)) {
            return false;
        }
        hand.fill_from(&mut inner.inbox, &mut inner.lanes, &mut inner.heat, wants, inner.came, now)
    }

    /// Bars streams while the topology changes, or lets them again.
    pub(crate) fn bar_streams(&self, barred: bool) {
        let _inner = lock(&self.inner);
        self.streams_barred.store(usize::from(barred), Ordering::Relaxed);
    }

    /// Whether somebody may be waiting for the end of a stream.
    pub(crate) fn bars_streams(&self) -> bool {
        self.streams_barred.load(Ordering::Relaxed) > 0
    }

    /// Whether a stream is out.
    pub(crate) fn is_streaming(&self) -> bool {
        lock(&self.inner).lanes.is_streaming()
    }

    /// Admits what has come, a portion at a time, unless there are lanes enough to go on with. All of it where messages have other priorities than the normal one: whatever
    /// has come may be more urgent than what is ready.
    fn admit_some(&self, inner: &mut Inner<K, M>, enough: usize) {
        if self.urgent.load(Ordering::Relaxed) > 0 {
            self.urgent.store(0, Ordering::Relaxed);
            return self.admit_all(inner);
        }
        if !inner.lanes.is_ordinary() {
            return self.admit_all(inner);
        }
        while inner.lanes.ready_lanes() * 2 < enough.max(2) {
            if inner.inbox.is_empty() && !self.refill(inner) {
                return;
            }
            for _ in 0..ADMIT_AT_ONCE {
                let Some(arrival) = inner.inbox.pop() else { break };
                inner.lanes.admit(arrival);
            }
        }
    }

    /// Admits all that has been accepted, in order. Ingress is held only to take over what is in it.
    fn admit_all(&self, inner: &mut Inner<K, M>) {
        inner.admit_inbox();
        if self.refill(inner) {
            inner.admit_inbox();
        }
    }

    /// Fills the empty inbox from the ingress buffer. False if there is nothing in that either.
    fn refill(&self, inner: &mut Inner<K, M>) -> bool {
        let mut ingress = self.ingress();
        if ingress.buffer.is_empty() {
            return false;
        }
        inner.refill(&mut ingress);
        inner.came = inner.inbox.len();
        self.hints().waiting.store(0, Ordering::Relaxed);
        true
    }

    /// Whether there is work for one more worker, as far as the one that asks can know: what was pushed while it was rising may have woken nobody.
    fn has_more(&self, inner: &Inner<K, M>) -> bool {
        inner.lanes.has_ready() || !inner.inbox.is_empty() || self.looks_busy()
    }

    /// Takes a sleeper off the list, if there is one that should be woken.
    fn take_sleeper(&self, inner: &mut Inner<K, M>) -> Option<Sleeper> {
        if inner.sleepers_hint == 0 {
            return None;
        }
        take_sleeper_of(inner, &mut self.ingress())
    }

    /// The same, for a worker that knows whether messages are quick.
    fn take_next_sleeper(&self, inner: &mut Inner<K, M>, quick: bool) -> Option<Sleeper> {
        let mut ingress = self.ingress();
        ingress.sleepers.wake_few_at_a_time(quick);
        take_sleeper_of(inner, &mut ingress)
    }

    /// Registers a worker that found nothing, after one more look under both locks (rule 2); `quick` is what it knows of messages. `quiet` is called if nothing will
    /// happen here any more without somebody's doing, and told whether all who serve it sleep.
    pub(crate) fn fall_asleep(
        &self,
        sleeper: &Sleeper,
        quick: bool,
        clock: &Clock,
        quiet: &dyn Fn(bool),
    ) -> Asleep {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let mut ingress = self.ingress();
        admit_everything(inner, &mut ingress, self.hints());
        let due = inner.lanes.next_due();
        // A paced dispatcher has something to do when its next place is due, and that is among what is due.
        let claimable = inner.lanes.has_ready() && inner.lanes.pace.is_none();
        if inner.stopped || claimable || due.is_some_and(|due| due <= clock.now()) {
            return Asleep::Not;
        }
        ingress.sleepers.lie_down(sleeper.clone());
        ingress.sleepers.wake_few_at_a_time(quick);
        inner.counted.parks += 1;
        inner.sleepers_hint = ingress.sleepers.len();
        let mut until = None;
        if let Some(due) = due
            && inner.is_unattended()
        {
            inner.timekeeper = Some((sleeper.clone(), due));
            until = Some(due);
        }
        let is_quiet = inner.lanes.is_quiet();
        let deserted = is_quiet && ingress.sleepers.len() >= self.servers.load(Ordering::Relaxed);
        let mut given_up = None;
        // Where others go on, one of them sees to it.
        let linger = if is_quiet && !sleeper.can_come_back() { 0 } else { self.limits.keeps.linger };
        match inner.memory(&self.limits.keeps, linger, || clock.now()) {
            Memory::IdleUntil(due) if is_quiet => until = until.into_iter().chain([due]).min(),
            Memory::Outgrown => given_up = Some(inner.give_up(&self.limits.keeps, ingress)),
            Memory::IdleUntil(_) | Memory::InUse => drop(ingress),
        }
        drop(guard);
        drop(given_up);
        self.room.made_last(self.released());
        if deserted {
            self.room.rouse(self.limits.capacity);
        }
        if is_quiet {
            quiet(deserted);
        }
        Asleep::Until(until)
    }

    /// Gives up what a burst has left, while a worker that looks here keeps the lock. What comes may be little and never end, so this does not wait until nothing is here.
    fn tidy_up(&self, inner: &mut Inner<K, M>, after: &mut Afterwards<K, M>, now: impl FnOnce() -> u64) {
        let keeps = &self.limits.keeps;
        if let Memory::Outgrown = inner.memory(keeps, keeps.linger, now) {
            after.given_up = Some(inner.give_up(keeps, self.ingress()));
        }
    }

    /// Takes a worker off the list when it is up again. True if it leaves something to be seen to: it kept the time here, or somebody
    /// had taken it off the list to wake it for work here.
    pub(crate) fn rise(&self, sleeper: &Sleeper, lay_here: bool) -> bool {
        let mut inner = lock(&self.inner);
        let kept_time = inner.timekeeper.as_ref().is_some_and(|(keeper, _)| keeper.is(sleeper));
        if kept_time {
            inner.timekeeper = None;
        }
        inner.counted.wake_ups += u64::from(lay_here);
        let mut ingress = self.ingress();
        let was_woken = !ingress.sleepers.rise(sleeper);
        inner.sleepers_hint = ingress.sleepers.len();
        was_woken || kept_time
    }

    /// Hands on what a worker left to be seen to here, because it found work elsewhere first.
    pub(crate) fn pass_on(&self) {
        let mut inner = lock(&self.inner);
        let sleeper = self.take_sleeper(&mut inner);
        drop(inner);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }

    /// Wakes everyone who sleeps here: something has changed that all must see.
    pub(crate) fn wake_all(&self) {
        let sleepers = self.ingress().sleepers.take_all();
        sleepers.into_iter().for_each(|sleeper| sleeper.wake());
    }
}

fn take_sleeper_of<K, M>(inner: &mut Inner<K, M>, ingress: &mut Ingress<K, M>) -> Option<Sleeper> {
    let sleeper = ingress.sleepers.take();
    inner.sleepers_hint = ingress.sleepers.len();
    sleeper
}

/// The same for whoever needs ingress to stay as it is afterwards.
fn admit_everything<K, M>(inner: &mut Inner<K, M>, ingress: &mut Ingress<K, M>, hints: &Hints) {
    inner.admit_inbox();
    inner.refill(ingress);
    inner.admit_inbox();
    hints.waiting.store(0, Ordering::Relaxed);
}
