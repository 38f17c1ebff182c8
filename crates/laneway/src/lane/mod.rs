//! A lane per key: what decides. No threads, no clock, no locks; time is passed in.
//!
//! [`Lanes`] is the state of one dispatcher: the table of its lanes, their waiting messages, the ready lists and the
//! timers. It gets messages from `dispatcher/` (which holds the lock) and gives turns to workers. The simulator
//! drives the very same code.
//!
//! # The states of a lane
//!
//! | state | in the ready list | messages in a worker's hands | leaves it by |
//! |---|---|---|---|
//! | `Ready` | yes, once | none | `claim`, `park`, or an eviction of its last message |
//! | `Running` | no | its oldest, one turn of them | `settle`, by the one worker that claimed it |
//! | `Deferred` | no | none | its timer, `resume`, `park`, `skip_head` |
//! | `Parked` | no | none | `resume`, `skip_head` of its last message |
//! | `Aside` | no | none; it only keeps messages that were parked alone | `admit`, `resume`, `skip_head` of its last message |
//! | `Arriving` | no | at the dispatcher it moves from | `arrive` |
//!
//! A lane is in the table exactly while it has a message: waiting, in flight, or put aside. It is made by `admit` (or
//! `arrive`) and removed by the step that takes its last message, so whoever finds a lane in the table may rely on it, and
//! a key without work leaves no trace.
//!
//! # Why the order holds
//!
//! The order of a lane is the order of its queue. Three operations put messages there: `admit` appends; `settle` puts what
//! a turn leaves over back to the front, in its old order; `arrive` does the same for a lane that moves. Only `claim`
//! takes from it, at the front, and only from a lane that is not `Running`. So at every moment *(in flight) + (queue)* is
//! the order of acceptance, and there is one in flight at most.
//!
//! See `docs/design/ordering.md` for the locks around this and for why nobody sleeps while a lane is ready.

mod audit;
mod hand;
mod moving;
mod operate;
mod ready;
mod repack;
mod stream;
mod table;
mod tiers;
mod waiting;

pub(crate) use hand::{Ending, Hand, Turn, Wants};
pub(crate) use moving::{Arrived, Parcel};
pub(crate) use repack::{Keeps, Outgrown};
pub(crate) use stream::Heat;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    hash::{BuildHasherDefault, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::{
    explain::{Holder, Standing},
    message::{Item, Message},
};
use ready::Ready;
use table::Table;
use tiers::ByTier;
use waiting::{NONE, Queue, Waiting};

/// So many timers that nothing waits for any more are not worth a look at all of them.
const TIMERS_KEPT: usize = 64;

/// As many spare boxes are kept: more than most dispatchers have workers.
const SPARE_MAX: usize = 64;

/// What a lane is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Could run now; in the ready list.
    Ready,
    /// In the hands of a worker since then.
    Running { since: u64, worker: u32 },
    /// Its head failed, or was told to wait, until then. The stamp tells a timer from one that was overtaken by events.
    Deferred { until: u64, stamp: u32 },
    /// Stopped in front of its head since then.
    Parked { since: u64 },
    /// Has nothing but messages that were parked alone.
    Aside,
    /// Moved here while its turn still runs elsewhere.
    Arriving,
}

/// One key's lane: a cache line.
#[derive(Debug)]
struct Lane<K> {
    fingerprint: u64,
    state: State,
    waiting: Queue,
    /// Messages of the turn in flight.
    taken: u32,
    /// Neighbours in the ready list; `next` also links the free lanes.
    previous: u32,
    next: u32,
    /// When its last turn began, by the clock of rounds (`ready.rs`).
    served: u32,
    /// That of the most urgent message that waits (`tiers.rs`); of no meaning while none does.
    tier: u8,
    /// In which of the lists of its tier it is, while it is in one.
    list: u8,
    extra: Option<Box<Extra<K>>>,
}

impl<K> Lane<K> {
    /// One without a message, in no list.
    fn new(fingerprint: u64, state: State, served: u32) -> Self {
        Lane {
            fingerprint,
            state,
            waiting: Queue::default(),
            taken: 0,
            previous: NONE,
            next: NONE,
            served,
            tier: 0,
            list: 0,
            extra: None,
        }
    }

    fn extra_mut(&mut self) -> &mut Extra<K> {
        self.extra.get_or_insert_default()
    }

    /// Failed attempts at the head.
    fn attempts(&self) -> u32 {
        self.extra.as_ref().map_or(0, |extra| extra.attempts)
    }

    fn set_attempts(&mut self, attempts: u32) {
        match &mut self.extra {
            Some(extra) => extra.attempts = attempts,
            None if attempts > 0 => self.extra_mut().attempts = attempts,
            None => {}
        }
    }

    /// Whether messages of different tiers wait in it.
    fn is_mixed(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.mixed.is_some())
    }
}

/// What few lanes need.
#[derive(Debug)]
struct Extra<K> {
    /// Failed attempts at the head.
    attempts: u32,
    /// How many of each tier wait, where they are not all of one.
    mixed: Option<ByTier>,
    /// Why it waits, as the handler or the operator said.
    note: Option<String>,
    /// Messages that were parked alone.
    aside: Queue,
    /// The key, while a slow turn is in flight, so that `explain` can name who holds a worker.
    holder: Option<K>,
    /// When it was asked to park, if that was while it was running.
    park_after: Option<u64>,
    /// Where the lane moves when its turn has settled.
    handover: Option<usize>,
}

impl<K> Default for Extra<K> {
    fn default() -> Self {
        let aside = Queue::default();
        Extra { attempts: 0, mixed: None, note: None, aside, holder: None, park_after: None, handover: None }
    }
}

impl<K> Extra<K> {
    /// Whether there is nothing in it but the key of a turn that has ended, and how often that was tried.
    fn is_spent(&self) -> bool {
        self.note.is_none() && self.aside.is_empty() && self.park_after.is_none() && self.handover.is_none()
    }
}

/// What `settle` leaves to its caller.
#[derive(Debug)]
pub(crate) struct Settled<K, M> {
    /// The lane, if it has to move on.
    pub(crate) parcel: Option<Parcel<K, M>>,
    /// Whether an earlier timer than any before was set.
    pub(crate) earlier_timer: bool,
    /// The copy of the key that the lane had while its turn was in flight: to be dropped without a lock.
    pub(crate) holder: Option<K>,
}

/// How late a timer may ring without changing the pace: a few milliseconds are usual.
const LATE: u64 = 3_000_000;

/// Fixed pace at which messages of a dispatcher may start, without bursts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) interval: u64,
    next_at: u64,
    /// Whether a lane that was ready has had to wait for that: only then what is late is the timer.
    awaited: bool,
}

impl Pace {
    pub(crate) fn new(interval: u64) -> Self {
        Pace { interval, next_at: 0, awaited: false }
    }
}

/// Fingerprints are hashes already.
#[derive(Default)]
pub(crate) struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("only fingerprints are hashed")
    }
    fn write_u64(&mut self, fingerprint: u64) {
        self.0 = fingerprint;
    }
}

/// A table by fingerprint.
pub(crate) type ByFingerprint<V> = HashMap<u64, V, BuildHasherDefault<Identity>>;

/// The lanes of one dispatcher.
#[derive(Debug)]
pub(crate) struct Lanes<K, M> {
    table: Table,
    lanes: Vec<Lane<K>>,
    free: u32,
    waiting: Waiting<Message<K, M>>,
    ready: Ready,
    timers: BinaryHeap<Reverse<(u64, u32, u32)>>,
    /// Boxes to be used again: where every turn needs one, none is allocated for it.
    #[allow(clippy::vec_box, reason = "the boxes are what is used again")]
    spare: Vec<Box<Extra<K>>>,
    stamp: u32,
    /// How often everything has been moved into smaller slabs (`repack.rs`).
    packing: u32,
    pub(crate) paused: bool,
    pub(crate) pace: Option<Pace>,
    /// Lanes by state.
    running: usize,
    deferred: usize,
    parked: usize,
    arriving: usize,
    /// Messages in the hands of the one worker that runs a stream, and, while there are some, their keys.
    streaming: usize,
    stream_keys: Vec<u64>,
    /// Who that is, and since when.
    streamer: (u32, u64),
    /// Messages in flight, and put aside.
    taken: usize,
    aside: usize,
    /// What has ever come here from other dispatchers, beyond the bounds if need be.
    pub(crate) arrived: Arrived,
    /// Messages that found their lane in flight.
    pub(crate) enqueued_due_to_busy: u64,
    /// The deepest that any lane has been.
    pub(crate) max_pending_depth: u32,
}

impl<K, M> Lanes<K, M> {
    /// No lanes yet. `by_age` keeps what eviction of the oldest needs.
    pub(crate) fn new(by_age: bool) -> Self {
        Lanes {
            table: Table::new(),
            lanes: Vec::new(),
            free: NONE,
            waiting: Waiting::new(by_age),
            ready: Ready::new(),
            timers: BinaryHeap::new(),
            spare: Vec::new(),
            stamp: 0,
            packing: 0,
            paused: false,
            pace: None,
            running: 0,
            deferred: 0,
            parked: 0,
            arriving: 0,
            streaming: 0,
            stream_keys: Vec::new(),
            streamer: (0, 0),
            taken: 0,
            aside: 0,
            arrived: Arrived::default(),
            enqueued_due_to_busy: 0,
            max_pending_depth: 0,
        }
    }

    // ── admit ──────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Appends a message to the lane of its key.
    pub(crate) fn admit(&mut self, item: Item<K, M>) {
        let fingerprint = item.fingerprint;
        let evictable = !item.message.kind.is_control();
        let known = self.place_of(fingerprint);
        let id = known.unwrap_or_else(|| self.create(fingerprint, State::Ready));
        let lane = &self.lanes[id as usize];
        if matches!(lane.state, State::Running { .. }) {
            self.enqueued_due_to_busy += 1;
        }
        let is_new = lane.state == State::Ready && lane.waiting.is_empty();
        self.max_pending_depth = self.max_pending_depth.max(lane.waiting.len() + lane.taken + 1);
        let was_aside = lane.state == State::Aside;
        self.append(id, item, evictable);
        if was_aside || is_new {
            self.make_ready(id);
        }
    }

    /// Where the lane with this fingerprint is, if there is one.
    #[inline]
    fn place_of(&self, fingerprint: u64) -> Option<u32> {
        self.table.find(fingerprint, &self.lanes)
    }

    /// Makes a lane, outside the ready list.
    fn create(&mut self, fingerprint: u64, state: State) -> u32 {
        let lane = Lane::new(fingerprint, state, self.ready.clock());
        let id = match self.free {
            NONE => {
                self.lanes.push(lane);
                (self.lanes.len() - 1) as u32
            }
            id => {
                self.free = self.lanes[id as usize].next;
                self.lanes[id as usize] = lane;
                id
            }
        };
        self.table.insert(id, &self.lanes);
        id
    }

    /// Removes a lane that has no message left and is in no list.
    fn remove(&mut self, id: u32) {
        let lane = &mut self.lanes[id as usize];
        debug_assert!(lane.waiting.is_empty() && lane.taken == 0);
        lane.extra = None;
        // A timer that is still set for this place must not find what it was set for.
        lane.state = State::Aside;
        lane.next = self.free;
        let fingerprint = lane.fingerprint;
        self.free = id;
        self.table.remove(fingerprint, id);
    }

    // ── claim ──────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Gives the next ready lane to a worker: up to `limit` of its oldest messages. `holder` makes the copy of the key that
    /// `explain` shows; it is called only for turns that are expected to be slow.
    pub(crate) fn claim(
        &mut self,
        now: u64,
        limit: usize,
        worker: u32,
        turn: &mut Turn<K, M>,
        holder: Option<fn(&K) -> K>,
    ) -> bool {
        debug_assert!(turn.len() == 0 && turn.again.is_empty());
        if self.paused || !self.take_pace(now) {
            return false;
        }
        let Some(id) = self.pop_ready() else { return false };
        // One message at a time where the oldest may be evicted, so that whatever has not started can be; and where a
        // pace is set, so that each takes its own place in it.
        let limit = if self.evicts() || self.pace.is_some() { 1 } else { limit };
        self.lanes[id as usize].state = State::Running { since: now, worker };
        while turn.items.len() < limit
            && let Some(item) = self.take_first(id)
        {
            turn.items.push_back(item);
        }
        let lane = &mut self.lanes[id as usize];
        lane.taken = turn.items.len() as u32;
        (turn.lane, turn.packing) = (id, self.packing);
        (turn.fingerprint, turn.attempts) = (lane.fingerprint, lane.attempts());
        self.running += 1;
        self.taken += turn.items.len();
        if let Some(copy) = holder {
            // User code under the lock. Should it panic, the lane has no name to show, and that is all.
            let key = catch_unwind(AssertUnwindSafe(|| copy(&turn.items[0].message.key)));
            let spare = &mut self.spare;
            lane.extra.get_or_insert_with(|| spare.pop().unwrap_or_default()).holder = key.ok();
        }
        true
    }

    fn take_pace(&mut self, now: u64) -> bool {
        match &mut self.pace {
            Some(pace) if self.ready.len() > 0 => {
                let due = pace.next_at <= now;
                if due {
                    // A timer may ring a little late; the next message must not be late for that as well. Who was not waited for has missed nothing.
                    let late = if pace.awaited { LATE } else { 0 };
                    pace.next_at = pace.next_at.max(now.saturating_sub(late)).saturating_add(pace.interval);
                }
                pace.awaited = !due;
                due
            }
            _ => true,
        }
    }

    /// Makes the lanes ready whose time has come. Before lanes are claimed, or passed by.
    pub(crate) fn wake_due(&mut self, now: u64) {
        while let Some(&Reverse((until, id, stamp))) = self.timers.peek() {
            let lane = self.lanes.get(id as usize);
            let current = lane.is_some_and(|lane| lane.state == State::Deferred { until, stamp });
            if current && until > now {
                return;
            }
            self.timers.pop();
            if current {
                self.deferred -= 1;
                self.make_ready(id);
            }
        }
    }

    /// Puts a lane that has waiting messages, and is in no list, into the ready list.
    fn make_ready(&mut self, id: u32) {
        let lane = &mut self.lanes[id as usize];
        debug_assert!(!lane.waiting.is_empty(), "a lane that becomes ready has a message");
        lane.state = State::Ready;
        self.ready.push(&mut self.lanes, id);
    }

    /// Changes the pace. The next message may start at once: it is not known how long ago the last one did.
    pub(crate) fn set_pace(&mut self, interval: Option<u64>) {
        self.pace = interval.map(Pace::new);
    }

    // ── settle ─────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Whether the lane of this turn has more waiting, so that it will go to the back of the ready list.
    pub(crate) fn gives_way(&self, turn: &Turn<K, M>) -> bool {
        let is_left = !turn.items.is_empty() || !turn.again.is_empty();
        let id = self.lane_of(turn);
        id != NONE && (is_left || !self.lanes[id as usize].waiting.is_empty())
    }

    /// Ends a turn. What the worker handled has left `turn.items`; what is still in there goes back to the front, and what the handler was not done with to
    /// the back.
    pub(crate) fn settle(&mut self, turn: &mut Turn<K, M>, now: u64) -> Settled<K, M> {
        let id = self.lane_of(turn);
        if id == NONE {
            return self.settle_stream(turn, now);
        }
        let lane = &mut self.lanes[id as usize];
        debug_assert!(
            matches!(lane.state, State::Running { .. }),
            "settled by the worker that claimed it, once"
        );
        self.taken -= lane.taken as usize;
        self.running -= 1;
        lane.taken = 0;
        let holder = lane.extra.as_mut().and_then(|extra| extra.holder.take());
        let spent = lane.extra.as_ref().is_none_or(|extra| extra.is_spent());
        if turn.items.is_empty() && turn.again.is_empty() && lane.waiting.is_empty() && spent {
            // Most lanes end so: everything handled, nothing behind it, nothing to remember.
            if let Some(mut extra) = lane.extra.take()
                && self.spare.len() < SPARE_MAX
            {
                extra.attempts = 0;
                self.spare.push(extra);
            }
            self.remove(id);
            return Settled { parcel: None, earlier_timer: false, holder };
        }
        for item in turn.again.drain(..) {
            self.append(id, item, false);
        }
        let lane = &mut self.lanes[id as usize];
        let ending = std::mem::replace(&mut turn.ending, Ending::Handled);
        lane.set_attempts(if matches!(ending, Ending::Handled) { turn.attempts } else { 0 });
        let mut parked_alone = None;
        if let Ending::ParkMessage { .. } = ending {
            parked_alone = turn.items.pop_front();
        }
        while let Some(item) = turn.items.pop_back() {
            self.put_back(id, item, false);
        }
        let lane = &mut self.lanes[id as usize];
        if let Some(item) = parked_alone {
            let aside = &mut lane.extra_mut().aside;
            self.waiting.push_back(aside, id, (item.message, item.accepted_at), false);
            self.aside += 1;
        }
        let handover = lane.extra.as_mut().and_then(|extra| extra.handover.take());
        if let Some(to) = handover {
            let parcel = self.hand_over(id, to, ending, now);
            return Settled { parcel: Some(parcel), earlier_timer: false, holder };
        }
        Settled { parcel: None, earlier_timer: self.enter(id, ending, now), holder }
    }

    /// Gives a lane whose turn has ended its next state.
    fn enter(&mut self, id: u32, ending: Ending, now: u64) -> bool {
        let lane = &mut self.lanes[id as usize];
        let asked_to_park = lane.extra.as_mut().and_then(|extra| extra.park_after.take());
        match ending {
            Ending::Defer { until, attempts, was_begun, note } => {
                if let Some(pace) = self.pace.as_mut().filter(|_| !was_begun) {
                    // Its place in the pace is free for another.
                    pace.next_at = pace.next_at.saturating_sub(pace.interval);
                }
                lane.set_attempts(attempts);
                if note.is_some() {
                    lane.extra_mut().note = note;
                }
                if asked_to_park.is_none() {
                    return self.defer(id, until);
                }
            }
            Ending::ParkLane { attempts, note } => {
                lane.set_attempts(attempts);
                lane.extra_mut().note = note;
                self.park_now(id, now);
                return false;
            }
            Ending::ParkMessage { note } => lane.extra_mut().note = note,
            Ending::Handled => {
                // Whatever was said about a message that has left does not concern the next.
                if let Some(extra) =
                    lane.extra.as_mut().filter(|extra| extra.aside.is_empty() && asked_to_park.is_none())
                {
                    extra.note = None;
                }
            }
        }
        self.rest_or_park(id, asked_to_park);
        false
    }

    /// Parks a lane that was asked to at some time, if it has anything to stop in front of.
    fn rest_or_park(&mut self, id: u32, asked_to_park: Option<u64>) {
        match asked_to_park {
            Some(since) if !self.lanes[id as usize].waiting.is_empty() => self.park_now(id, since),
            _ => self.rest(id),
        }
    }

    /// Ready if there is more to do, else gone, unless something was put aside.
    fn rest(&mut self, id: u32) {
        let lane = &mut self.lanes[id as usize];
        if !lane.waiting.is_empty() {
            return self.make_ready(id);
        }
        lane.state = State::Aside;
        if lane.extra.as_ref().is_none_or(|extra| extra.aside.is_empty()) {
            self.remove(id);
        }
    }

    fn defer(&mut self, id: u32, until: u64) -> bool {
        self.forget_stale_timers();
        self.stamp = self.stamp.wrapping_add(1);
        let earlier = self.timers.peek().is_none_or(|Reverse((first, ..))| until < *first);
        self.timers.push(Reverse((until, id, self.stamp)));
        self.lanes[id as usize].state = State::Deferred { until, stamp: self.stamp };
        self.deferred += 1;
        earlier
    }

    /// Lanes that were resumed or skipped leave their timers behind, until they are due. Not more of them than there are lanes that wait.
    fn forget_stale_timers(&mut self) {
        if self.timers.len() > 2 * self.deferred + TIMERS_KEPT {
            self.forget_timers();
        }
    }

    /// Keeps only the timers that a lane waits for.
    fn forget_timers(&mut self) {
        let lanes = &self.lanes;
        self.timers.retain(|Reverse((until, id, stamp))| {
            let state = State::Deferred { until: *until, stamp: *stamp };
            lanes.get(*id as usize).is_some_and(|lane| lane.state == state)
        });
    }

    fn park_now(&mut self, id: u32, now: u64) {
        self.lanes[id as usize].state = State::Parked { since: now };
        self.parked += 1;
    }

    // ── looking ────────────────────────────────────────────────────────────────────────────────────────────────────

    /// The key of a lane, from a message of it that is here, or from the copy of it that was made when it was claimed.
    fn key(&self, id: u32) -> Option<&K> {
        let lane = &self.lanes[id as usize];
        let extra = lane.extra.as_ref();
        let waiting = self.waiting.front(&lane.waiting);
        let aside = extra.and_then(|extra| self.waiting.front(&extra.aside));
        waiting
            .or(aside)
            .map(|message| &message.key)
            .or_else(|| extra.and_then(|extra| extra.holder.as_ref()))
    }

    /// Whether a worker would find something to do now.
    pub(crate) fn has_ready(&self) -> bool {
        match self.streaming {
            0 => self.ready_lanes() > 0,
            _ => !self.paused && self.ready_beside_stream().is_some(),
        }
    }

    /// Whether the oldest may have to make room.
    pub(crate) fn evicts(&self) -> bool {
        self.waiting.by_age()
    }

    /// How many lanes could run now.
    pub(crate) fn ready_lanes(&self) -> usize {
        if self.paused { 0 } else { self.ready.len() }
    }

    /// When something will be ready that is not now: the earliest timer, or the next place in the pace.
    pub(crate) fn next_due(&self) -> Option<u64> {
        if self.paused {
            return None;
        }
        let timer = self.timers.peek().map(|Reverse((until, ..))| *until);
        let pace = self.pace.filter(|_| self.ready.len() > 0).map(|pace| pace.next_at);
        timer.into_iter().chain(pace).min()
    }

    /// Whether time matters here at all.
    pub(crate) fn keeps_time(&self) -> bool {
        !self.timers.is_empty() || self.pace.is_some()
    }

    /// Whether nothing will happen any more without somebody's doing.
    pub(crate) fn is_quiet(&self) -> bool {
        let idle = self.running == 0 && self.streaming == 0 && self.arriving == 0;
        // What a paused dispatcher holds does not move either, whether it is ready or will be.
        idle && (self.paused || (self.ready.len() == 0 && self.deferred == 0))
    }

    pub(crate) fn lane_count(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn running_lanes(&self) -> usize {
        self.running
    }

    pub(crate) fn deferred_lanes(&self) -> usize {
        self.deferred
    }

    pub(crate) fn parked_lanes(&self) -> usize {
        self.parked
    }

    pub(crate) fn waiting_messages(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn taken_messages(&self) -> usize {
        self.taken
    }

    pub(crate) fn messages_aside(&self) -> usize {
        self.aside
    }

    /// Messages of a key here, in flight included; `None` without a lane.
    pub(crate) fn depth(&self, fingerprint: u64) -> Option<usize> {
        let lane = &self.lanes[self.place_of(fingerprint)? as usize];
        let aside = lane.extra.as_ref().map_or(0, |extra| extra.aside.len());
        Some((lane.waiting.len() + lane.taken + aside) as usize)
    }

    /// How a lane stands, for `explain`.
    pub(crate) fn standing(&self, fingerprint: u64) -> Option<Standing> {
        let lane = &self.lanes[self.place_of(fingerprint)? as usize];
        let extra = lane.extra.as_ref();
        Some(Standing {
            state: lane.state,
            waiting: lane.waiting.len() as usize,
            in_flight: lane.taken as usize,
            aside: extra.map_or(0, |extra| extra.aside.len() as usize),
            attempts: lane.attempts(),
            note: extra.and_then(|extra| extra.note.clone()),
            paced_until: self.pace.map(|pace| pace.next_at),
        })
    }

    /// Who has the workers.
    pub(crate) fn holders(&self) -> Vec<Holder<K>>
    where
        K: Clone,
    {
        let (worker, since) = self.streamer;
        let streamer = (self.streaming > 0).then_some(Holder { worker: worker as usize, since, key: None });
        let running = self.table.ids().filter_map(|id| {
            let lane = &self.lanes[id as usize];
            let State::Running { since, worker } = lane.state else { return None };
            let key = lane.extra.as_ref().and_then(|extra| extra.holder.clone());
            Some(Holder { worker: worker as usize, since, key })
        });
        running.chain(streamer).collect()
    }

    /// Calls `visit` with the depth of each lane that has somebody to tell its key.
    pub(crate) fn each_depth(&self, mut visit: impl FnMut(usize, &K)) {
        for id in self.table.ids() {
            let lane = &self.lanes[id as usize];
            if let Some(key) = self.key(id) {
                let aside = lane.extra.as_ref().map_or(0, |extra| extra.aside.len());
                visit((lane.waiting.len() + lane.taken + aside) as usize, key);
            }
        }
    }

    /// What waits in a lane, messages that were parked alone first, each part oldest first.
    pub(crate) fn waiting_in(&self, fingerprint: u64) -> impl Iterator<Item = &Message<K, M>> {
        let lane = self.place_of(fingerprint).map(|id| &self.lanes[id as usize]);
        let aside = lane.and_then(|lane| lane.extra.as_ref()).map(|extra| &extra.aside);
        let queues = aside.into_iter().chain(lane.map(|lane| &lane.waiting));
        queues.flat_map(|queue| self.waiting.each_in(queue))
    }

    /// Everything that waits, in no order.
    pub(crate) fn all_waiting(&self) -> impl Iterator<Item = &Message<K, M>> {
        self.waiting.each()
    }

    /// Empties every lane that is not in flight, per key in order, and what waits behind those that are.
    pub(crate) fn give_back(&mut self, into: &mut Vec<Item<K, M>>) {
        let ids: Vec<u32> = self.table.ids().collect();
        for id in ids {
            self.take_back_aside(id);
            let state = self.lanes[id as usize].state;
            if state == State::Ready {
                self.ready.remove(&mut self.lanes, id);
            }
            into.extend(self.take_all(id));
            match state {
                State::Running { .. } => continue,
                State::Deferred { .. } => self.deferred -= 1,
                State::Parked { .. } => self.parked -= 1,
                State::Arriving => self.arriving -= 1,
                State::Ready | State::Aside => {}
            }
            self.remove(id);
        }
    }
}
