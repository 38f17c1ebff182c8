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
mod stream;
mod waiting;

pub(crate) use hand::{Ending, Hand, Turn, Wants};
pub(crate) use moving::{Arrived, Parcel};
pub(crate) use stream::Heat;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    hash::{BuildHasherDefault, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::{
    explain::{Holder, Standing},
    message::Item,
};
use ready::Ready;
use waiting::{NONE, Queue, Waiting};

/// Below this many places the slabs are not given back when they fall empty: 1,024 small messages are a few dozen
/// kilobytes, and a dispatcher that idles between bursts should not pay for growing again.
const KEEP_WHEN_EMPTY: usize = 1_024;

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

/// One key's lane.
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
    /// Failed attempts at the head.
    attempts: u32,
    /// While more than zero, the lane stands in a higher tier for the sake of the message that many places from the front.
    urgent_left: u32,
    /// When its last turn began, by the clock of rounds (`ready.rs`).
    served: u32,
    tier: u8,
    /// In which of the lists of its tier it is, while it is in one.
    list: u8,
    extra: Option<Box<Extra<K>>>,
}

/// What few lanes need.
#[derive(Debug)]
struct Extra<K> {
    /// Why it waits, as the handler or the operator said.
    note: Option<String>,
    /// Messages that were parked alone.
    aside: Queue,
    /// The key, while a slow turn is in flight, so that `explain` can name who holds a worker.
    holder: Option<K>,
    /// Asked to park while running.
    park_after: bool,
    /// Where the lane moves when its turn has settled.
    handover: Option<usize>,
}

impl<K> Default for Extra<K> {
    fn default() -> Self {
        Extra { note: None, aside: Queue::default(), holder: None, park_after: false, handover: None }
    }
}

impl<K> Extra<K> {
    /// Whether there is nothing in it but the key of a turn that has ended.
    fn is_spent(&self) -> bool {
        self.note.is_none() && self.aside.is_empty() && !self.park_after && self.handover.is_none()
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
}

impl Pace {
    pub(crate) fn new(interval: u64) -> Self {
        Pace { interval, next_at: 0 }
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
    table: ByFingerprint<u32>,
    lanes: Vec<Lane<K>>,
    free: u32,
    waiting: Waiting<Item<K, M>>,
    ready: Ready,
    timers: BinaryHeap<Reverse<(u64, u32, u32)>>,
    /// Boxes to be used again: where every turn needs one, none is allocated for it.
    #[allow(clippy::vec_box, reason = "the boxes are what is used again")]
    spare: Vec<Box<Extra<K>>>,
    stamp: u32,
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
            table: ByFingerprint::default(),
            lanes: Vec::new(),
            free: NONE,
            waiting: Waiting::new(by_age),
            ready: Ready::new(),
            timers: BinaryHeap::new(),
            spare: Vec::new(),
            stamp: 0,
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
        let (fingerprint, priority) = (item.fingerprint, item.message.priority);
        let evictable = !item.message.kind.is_control();
        let id = match self.table.get(&fingerprint) {
            Some(&id) => id,
            None => self.create(fingerprint, State::Ready, priority.tier()),
        };
        let lane = &mut self.lanes[id as usize];
        if matches!(lane.state, State::Running { .. }) {
            self.enqueued_due_to_busy += 1;
        }
        let tier = priority.tier();
        let was_empty = lane.waiting.is_empty();
        self.waiting.push_back(&mut lane.waiting, id, item, evictable);
        self.max_pending_depth = self.max_pending_depth.max(lane.waiting.len() + lane.taken);
        match lane.state {
            State::Aside => self.make_ready(id),
            State::Ready if was_empty => self.ready.push(&mut self.lanes, id),
            State::Ready if tier < lane.tier => {
                self.ready.remove(&mut self.lanes, id);
                self.urge(id, tier);
                self.ready.push(&mut self.lanes, id);
            }
            _ => self.urge(id, tier),
        }
    }

    /// Lifts a lane to the tier of the message that was just appended, if that is higher than the lane's own.
    fn urge(&mut self, id: u32, tier: u8) {
        let lane = &mut self.lanes[id as usize];
        if tier <= lane.tier {
            lane.tier = tier;
            lane.urgent_left = lane.waiting.len();
        }
    }

    /// Puts a message in front of all that wait. A lane stands in the tier of its most urgent message, also of those that come back.
    fn put_back(&mut self, id: u32, item: Item<K, M>, evictable: bool) {
        let tier = item.message.priority.tier();
        let lane = &mut self.lanes[id as usize];
        let (lifted, left) = match lane.urgent_left > 0 && tier >= lane.tier {
            true => (lane.tier, lane.urgent_left + 1),
            false => (tier, 1),
        };
        let relisted = lane.state == State::Ready && !lane.waiting.is_empty() && lifted != lane.tier;
        if relisted {
            self.ready.remove(&mut self.lanes, id);
        }
        let lane = &mut self.lanes[id as usize];
        (lane.tier, lane.urgent_left) = (lifted, left);
        self.waiting.push_front(&mut lane.waiting, id, item, evictable);
        if relisted {
            self.ready.push(&mut self.lanes, id);
        }
    }

    /// Makes a lane, outside the ready list.
    fn create(&mut self, fingerprint: u64, state: State, tier: u8) -> u32 {
        let lane = Lane {
            fingerprint,
            state,
            waiting: Queue::default(),
            taken: 0,
            previous: NONE,
            next: NONE,
            attempts: 0,
            urgent_left: 0,
            served: self.ready.clock(),
            tier,
            list: 0,
            extra: None,
        };
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
        self.table.insert(fingerprint, id);
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
        self.table.remove(&fingerprint);
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
        let lane = &mut self.lanes[id as usize];
        while turn.items.len() < limit
            && let Some(item) = self.waiting.pop_front(&mut lane.waiting)
        {
            turn.items.push_back(item);
        }
        lane.taken = turn.items.len() as u32;
        lane.urgent_left = lane.urgent_left.saturating_sub(lane.taken);
        lane.state = State::Running { since: now, worker };
        (turn.lane, turn.fingerprint, turn.attempts) = (id, lane.fingerprint, lane.attempts);
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
                    // A timer may ring a little late; the next message must not be late for that as well.
                    pace.next_at = pace.next_at.max(now.saturating_sub(LATE)).saturating_add(pace.interval);
                }
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
        lane.state = State::Ready;
        if lane.urgent_left == 0 {
            let head = self.waiting.front(&lane.waiting).expect("a lane that becomes ready has a message");
            lane.tier = head.message.priority.tier();
        }
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
        turn.lane != NONE && (is_left || !self.lanes[turn.lane as usize].waiting.is_empty())
    }

    /// Ends a turn. What the worker handled has left `turn.items`; what is still in there goes back to the front, and what the handler was not done with to
    /// the back.
    pub(crate) fn settle(&mut self, turn: &mut Turn<K, M>, now: u64) -> Settled<K, M> {
        if turn.lane == NONE {
            return self.settle_stream(turn, now);
        }
        let id = turn.lane;
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
            if let Some(extra) = lane.extra.take()
                && self.spare.len() < SPARE_MAX
            {
                self.spare.push(extra);
            }
            self.remove(id);
            return Settled { parcel: None, earlier_timer: false, holder };
        }
        for item in turn.again.drain(..) {
            let tier = item.message.priority.tier();
            self.waiting.push_back(&mut self.lanes[id as usize].waiting, id, item, false);
            self.urge(id, tier);
        }
        let lane = &mut self.lanes[id as usize];
        let ending = std::mem::replace(&mut turn.ending, Ending::Handled);
        lane.attempts = 0;
        if matches!(ending, Ending::Handled) {
            lane.attempts = turn.attempts;
        }
        let mut parked_alone = None;
        if let Ending::ParkMessage { .. } = ending {
            parked_alone = turn.items.pop_front();
        }
        while let Some(item) = turn.items.pop_back() {
            self.put_back(id, item, false);
        }
        let lane = &mut self.lanes[id as usize];
        if let Some(item) = parked_alone {
            let extra = lane.extra.get_or_insert_default();
            self.waiting.push_back(&mut extra.aside, id, item, false);
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
        let asked_to_park = lane.extra.as_mut().is_some_and(|extra| std::mem::take(&mut extra.park_after));
        match ending {
            Ending::Defer { until, attempts, was_begun, note } => {
                if let Some(pace) = self.pace.as_mut().filter(|_| !was_begun) {
                    // Its place in the pace is free for another.
                    pace.next_at = pace.next_at.saturating_sub(pace.interval);
                }
                lane.attempts = attempts;
                if note.is_some() {
                    lane.extra.get_or_insert_default().note = note;
                }
                if !asked_to_park {
                    return self.defer(id, until);
                }
            }
            Ending::ParkLane { attempts, note } => {
                lane.attempts = attempts;
                lane.extra.get_or_insert_default().note = note;
                self.park_now(id, now);
                return false;
            }
            Ending::ParkMessage { note } => lane.extra.get_or_insert_default().note = note,
            Ending::Handled => {
                // Whatever was said about a message that has left does not concern the next.
                if let Some(extra) =
                    lane.extra.as_mut().filter(|extra| extra.aside.is_empty() && !asked_to_park)
                {
                    extra.note = None;
                }
            }
        }
        self.rest_or_park(id, asked_to_park, now);
        false
    }

    /// Parks a lane that was asked to, if it has anything to stop in front of.
    fn rest_or_park(&mut self, id: u32, asked_to_park: bool, now: u64) {
        if asked_to_park && !self.lanes[id as usize].waiting.is_empty() {
            self.park_now(id, now);
        } else {
            self.rest(id);
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
        if self.timers.len() <= 2 * self.deferred + TIMERS_KEPT {
            return;
        }
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
            .map(|item| &item.message.key)
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
        let lane = &self.lanes[*self.table.get(&fingerprint)? as usize];
        let aside = lane.extra.as_ref().map_or(0, |extra| extra.aside.len());
        Some((lane.waiting.len() + lane.taken + aside) as usize)
    }

    /// How a lane stands, for `explain`.
    pub(crate) fn standing(&self, fingerprint: u64) -> Option<Standing> {
        let lane = &self.lanes[*self.table.get(&fingerprint)? as usize];
        let extra = lane.extra.as_ref();
        Some(Standing {
            state: lane.state,
            waiting: lane.waiting.len() as usize,
            in_flight: lane.taken as usize,
            aside: extra.map_or(0, |extra| extra.aside.len() as usize),
            attempts: lane.attempts,
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
        let running = self.table.values().filter_map(|&id| {
            let lane = &self.lanes[id as usize];
            let State::Running { since, worker } = lane.state else { return None };
            let key = lane.extra.as_ref().and_then(|extra| extra.holder.clone());
            Some(Holder { worker: worker as usize, since, key })
        });
        running.chain(streamer).collect()
    }

    /// Calls `visit` with the depth of each lane that has somebody to tell its key.
    pub(crate) fn each_depth(&self, mut visit: impl FnMut(usize, &K)) {
        for &id in self.table.values() {
            let lane = &self.lanes[id as usize];
            if let Some(key) = self.key(id) {
                let aside = lane.extra.as_ref().map_or(0, |extra| extra.aside.len());
                visit((lane.waiting.len() + lane.taken + aside) as usize, key);
            }
        }
    }

    /// What waits in a lane, messages that were parked alone first, each part oldest first.
    pub(crate) fn waiting_in(&self, fingerprint: u64) -> impl Iterator<Item = &Item<K, M>> {
        let lane = self.table.get(&fingerprint).map(|id| &self.lanes[*id as usize]);
        let aside = lane.and_then(|lane| lane.extra.as_ref()).map(|extra| &extra.aside);
        let queues = aside.into_iter().chain(lane.map(|lane| &lane.waiting));
        queues.flat_map(|queue| self.waiting.each_in(queue))
    }

    /// Everything that waits, in no order.
    pub(crate) fn all_waiting(&self) -> impl Iterator<Item = &Item<K, M>> {
        self.waiting.each()
    }

    /// Empties every lane that is not in flight, per key in order, and what waits behind those that are.
    pub(crate) fn give_back(&mut self, into: &mut Vec<Item<K, M>>) {
        let ids: Vec<u32> = self.table.values().copied().collect();
        for id in ids {
            self.take_back_aside(id);
            let state = self.lanes[id as usize].state;
            if state == State::Ready {
                self.ready.remove(&mut self.lanes, id);
            }
            let lane = &mut self.lanes[id as usize];
            while let Some(item) = self.waiting.pop_front(&mut lane.waiting) {
                into.push(item);
            }
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

    /// Whether there is memory to be given back when there is nothing here.
    pub(crate) fn is_large(&self) -> bool {
        self.lanes.capacity().max(self.waiting.capacity()) > KEEP_WHEN_EMPTY
    }

    /// Gives memory back when there is nothing here.
    pub(crate) fn shrink(&mut self) {
        if self.table.is_empty() && self.lanes.capacity() > KEEP_WHEN_EMPTY {
            self.lanes = Vec::new();
            self.free = NONE;
            self.table = ByFingerprint::default();
            self.timers = BinaryHeap::new();
        }
        self.waiting.shrink(KEEP_WHEN_EMPTY);
    }
}
