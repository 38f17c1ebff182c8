//! The engine: wires the rooms together, takes submissions, and answers its operators.
//!
//! A submission goes through `Shared::submit`: hash the key, take a place in the engine's bound, place it (`placement.rs`, `flows.rs`), offer it to
//! its dispatcher (`dispatcher/`), and, where that is full, do what the bound's policy says (`admission.rs`).

use std::{
    hash::{BuildHasher, Hash},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Waker,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use foldhash::quality::SeedableRandomState;

use crate::{
    Builder,
    admission::{
        Admission, Appetite, BatchReport, Bound, Cancel, Dropped, Drops, EngineBound, Entered, Evicted, For,
        Offer, Overflow, Refusals, Room, Wish,
    },
    batch::SpareBins,
    clock::Clock,
    dispatcher::Dispatcher,
    error::{Refusal, Refused},
    explain::Explanation,
    flows::{Mappings, Placed, Placing},
    handler::{Failure, OnFail, report_failure},
    lane::Parcel,
    message::{Item, Kind, Message, fingerprint_of},
    outcome::RetryPolicy,
    placement::{Among, ByHash, LooksAt, Placement},
    shutdown::ShutdownReport,
    stats::{Account, DispatcherStats, Snapshot},
    sync::{AtomicU64, Mutex, lock, yield_now},
    topology::pace_interval,
    worker::{Backoff, Inside, Seat, WaitStrategy},
};

/// What is called with a message that was dropped.
pub(crate) type OnDrop<K, M> = Box<dyn Fn(Message<K, M>, Dropped) + Send + Sync>;

/// What each worker thread calls first, with its number.
pub(crate) type OnWorkerStart = Box<dyn Fn(usize) + Send + Sync>;

/// What does not change while the engine runs.
pub(crate) struct Settings<K, M> {
    pub(crate) batch_max: usize,
    pub(crate) retry: RetryPolicy,
    pub(crate) wait: WaitStrategy,
    pub(crate) backoff: Backoff,
    pub(crate) shutdown_grace: Duration,
    pub(crate) on_drop: Option<OnDrop<K, M>>,
    pub(crate) on_fail: Option<OnFail<K, M>>,
    pub(crate) on_worker_start: Option<OnWorkerStart>,
    pub(crate) engine_overflow: Overflow,
}

/// The topology as it is now. Replaced as a whole.
pub(crate) struct Layout<K, M> {
    pub(crate) epoch: u64,
    pub(crate) dispatchers: Vec<Arc<Dispatcher<K, M>>>,
    pub(crate) seats: Vec<Arc<Seat<K, M>>>,
    /// Workers that were dismissed and have not gone.
    pub(crate) leaving: Vec<Arc<Seat<K, M>>>,
    /// The number of the next seat. None is given twice: a worker that was dismissed may still be on its way out.
    pub(crate) next_seat: usize,
    /// Removed dispatchers whose last turns have not settled.
    pub(crate) retired: Vec<Arc<Dispatcher<K, M>>>,
    /// What those before them have counted.
    pub(crate) past: Past,
}

/// What dispatchers counted that are no more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Past {
    pub(crate) account: Account,
    drops: Drops,
    refusals: Refusals,
}

impl Past {
    pub(crate) fn add(&mut self, stats: &DispatcherStats) {
        self.account += stats.account;
        self.drops.add(&stats.drops);
        self.refusals.add(&stats.refusals);
    }
}

impl<K, M> Layout<K, M> {
    /// The sum over all dispatchers that are or were.
    fn total(&self, dispatchers: &[DispatcherStats]) -> Past {
        let mut total = self.past.clone();
        dispatchers.iter().for_each(|stats| total.add(stats));
        self.retired.iter().for_each(|dispatcher| total.add(&dispatcher.stats()));
        total
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.dispatchers.iter().position(|dispatcher| dispatcher.name == name)
    }
}

/// Moves of lanes between dispatchers. Who looks at one dispatcher after the other has seen every message once if all moves that have begun by the end had ended before the beginning.
pub(crate) struct Moves {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Moves {
    pub(crate) fn new() -> Self {
        Moves { begun: AtomicU64::new(0), ended: AtomicU64::new(0) }
    }

    /// Called under the lock of the dispatcher that a lane leaves, so whoever finds it gone sees this, too.
    pub(crate) fn begin(&self) {
        self.begun.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end(&self) {
        self.ended.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }
}

/// The dispatchers of the first layout, as a placement sees them.
struct Dispatchers<K, M>(Vec<Arc<Dispatcher<K, M>>>);

impl<K, M> Among for Dispatchers<K, M> {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn outstanding(&self, dispatcher: usize) -> u64 {
        self.0[dispatcher].load()
    }
    fn mappings(&self, dispatcher: usize) -> usize {
        self.0[dispatcher].mappings.load(Ordering::Relaxed)
    }
    fn named(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|dispatcher| dispatcher.name == name)
    }
}

impl<K, M> Among for Layout<K, M> {
    fn len(&self) -> usize {
        self.dispatchers.len()
    }
    fn outstanding(&self, dispatcher: usize) -> u64 {
        self.dispatchers[dispatcher].load()
    }
    fn mappings(&self, dispatcher: usize) -> usize {
        self.dispatchers[dispatcher].mappings.load(Ordering::Relaxed)
    }
    fn named(&self, name: &str) -> Option<usize> {
        self.position(name)
    }
}

/// What the engine, its handles and its workers share.
pub(crate) struct Shared<K, M> {
    pub(crate) clock: Clock,
    hasher: SeedableRandomState,
    pub(crate) settings: Settings<K, M>,
    pub(crate) layout: ArcSwap<Layout<K, M>>,
    /// The dispatchers of the first layout, which most engines keep for life.
    first: Dispatchers<K, M>,
    pub(crate) placement: Box<dyn Placement<K>>,
    /// What the placement looks at, asked once.
    pub(crate) looks_at: LooksAt,
    /// Whether that is plain hash placement.
    pub(crate) by_hash: bool,
    /// Whether nothing has to be remembered of a key or looked up of its lane, and the engine's own bound is not counted in the first layout: then a submission is a push.
    pub(crate) direct: bool,
    /// If so, and the placement is by hash over a power of two: the bits of the hash that it goes by.
    direct_bits: Option<usize>,
    /// Where batches are sorted.
    pub(crate) spare_bins: SpareBins<K, M>,
    pub(crate) mappings: Option<Mappings>,
    pub(crate) engine_bound: EngineBound,
    appetite: Appetite,
    /// Whether a lane in flight must know its key, so that it can be placed again.
    pub(crate) needs_keys: bool,
    /// Loom's under `--cfg loom`: who has looked at it and who has not is part of the protocol of the end.
    pub(crate) closed: crate::sync::AtomicBool,
    /// The first layout is not the current one any more, or the engine is closed (raised before `closed` is): to try the short way in would be in vain.
    pub(crate) detour: crate::sync::AtomicBool,
    /// Turns shall end after the message that they are handling.
    pub(crate) give_way: AtomicBool,
    /// Workers that have settled messages and not yet told the mappings. The engine is not quiet before they have.
    pub(crate) unmapping: AtomicUsize,
    /// How often lanes have moved to another dispatcher: with a change, or behind it when a turn had ended.
    pub(crate) moves: Moves,
    /// Where those wait who want to know that the engine is quiet, or that workers have gone.
    pub(crate) quiet: Arc<Room>,
    /// Held by a change of the topology from its beginning to its end: there is one at a time. No handler asks for it, because a change may wait for handlers.
    pub(crate) changes: Mutex<()>,
    /// Held while the layout is replaced, or the engine closed, and by operators who act on a lane. Never while somebody waits for a handler.
    pub(crate) changing: Mutex<()>,
    /// Starts a worker for a seat.
    pub(crate) spawn: crate::builder::Spawn<K, M>,
    /// How a dispatcher that is added later is bounded.
    pub(crate) limits: crate::dispatcher::Limits,
}

/// How long a submitter is ready to wait.
#[derive(Clone, Copy)]
pub(crate) enum Patience<'a> {
    /// Not at all.
    None,
    /// As the bound's policy says.
    Policy,
    /// As the policy says, unless cancelled.
    Cancellable(&'a Cancel),
    /// As the policy says, but as a task does, which is woken by this.
    #[cfg_attr(
        not(any(feature = "tokio", loom)),
        expect(dead_code, reason = "there are no tasks without it")
    )]
    Task(&'a Waker),
}

impl Patience<'_> {
    fn is_over(&self) -> bool {
        matches!(self, Patience::Cancellable(cancel) if cancel.is_cancelled())
    }

    fn task(&self) -> Option<&Waker> {
        match self {
            Patience::Task(waker) => Some(waker),
            _ => None,
        }
    }
}

/// What a submission keeps while it waits, by whatever clock it goes.
pub(crate) struct Waiting<I> {
    /// Since it first found no room.
    since: Option<I>,
    /// Where it waits.
    place: Option<Entered>,
    /// How many places it has asked for there.
    asked: u64,
}

impl<I> Waiting<I> {
    pub(crate) fn new() -> Self {
        Waiting { since: None, place: None, asked: 0 }
    }
}

/// What came of looking for room until there is nothing to do but to wait.
pub(crate) enum Step<K, M> {
    Ended(Result<Admission, Refused<K, M>>),
    Blocked(Blocked<K, M>),
}

/// A message for which there is no room. Its submitter has entered where there will be, and has looked again behind that.
pub(crate) struct Blocked<K, M> {
    pub(crate) arrival: Item<K, M>,
    dispatcher: Arc<Dispatcher<K, M>>,
    /// How long it may wait in all, by the policy of the bound that it has met.
    #[cfg_attr(not(feature = "tokio"), expect(dead_code, reason = "only tasks have to know it"))]
    limit: Option<Duration>,
    /// What is left of that.
    left: Option<Duration>,
}

/// What one attempt to submit came to.
pub(crate) enum Attempt<K, M> {
    Ended(Result<Admission, Refused<K, M>>),
    /// No room: the message, the bound, and the dispatcher it would go to.
    Full(Item<K, M>, Bound, Arc<Dispatcher<K, M>>),
}

impl<K, M> Shared<K, M> {
    #[expect(clippy::too_many_arguments, reason = "called once, by the builder")]
    pub(crate) fn new(
        clock: Clock,
        settings: Settings<K, M>,
        layout: Layout<K, M>,
        placement: Box<dyn Placement<K>>,
        by_hash: bool,
        mappings: Option<Mappings>,
        engine_bound: EngineBound,
        limits: crate::dispatcher::Limits,
        spawn: crate::builder::Spawn<K, M>,
        hasher: SeedableRandomState,
    ) -> Self {
        let looks_at = placement.looks_at();
        let looks = limits.look_at_key() || limits.load_counts;
        let direct = mappings.is_none() && !looks && !engine_bound.is_counting();
        let count = layout.dispatchers.len();
        Shared {
            clock,
            hasher,
            settings,
            first: Dispatchers(layout.dispatchers.clone()),
            layout: ArcSwap::from_pointee(layout),
            placement,
            looks_at,
            by_hash,
            direct,
            direct_bits: (direct && by_hash && count.is_power_of_two()).then_some(count - 1),
            needs_keys: !by_hash && looks_at != LooksAt::Load,
            spare_bins: SpareBins::default(),
            mappings,
            engine_bound,
            appetite: Appetite::new(),
            closed: crate::sync::AtomicBool::new(false),
            detour: crate::sync::AtomicBool::new(false),
            give_way: AtomicBool::new(false),
            unmapping: AtomicUsize::new(0),
            moves: Moves::new(),
            quiet: Arc::new(Room::new()),
            changes: Mutex::new(()),
            changing: Mutex::new(()),
            spawn,
            limits,
        }
    }

    /// What tells this engine from others.
    pub(crate) fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// These many messages of a key have left: for its mapping.
    pub(crate) fn unmap(&self, fingerprint: u64, messages: u64) {
        if let Some(mappings) = &self.mappings
            && messages > 0
        {
            mappings.release(fingerprint, messages as u32, |dispatcher| self.unmapped(dispatcher));
        }
    }

    fn unmapped(&self, dispatcher: usize) {
        if let Some(dispatcher) = self.layout.load().dispatchers.get(dispatcher) {
            dispatcher.mappings.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// What the dispatchers of the layout have counted, and the sum with those that were. They are looked at one after the other; if a lane moves meanwhile, its
    /// messages might be seen at both ends, so all are looked at again. Lanes move only when an operator changes the topology, so that is seldom and ends.
    fn counted(&self) -> (Arc<Layout<K, M>>, Vec<DispatcherStats>, Past) {
        loop {
            let moves = self.moves.ended();
            let layout = self.layout.load_full();
            let dispatchers: Vec<_> =
                layout.dispatchers.iter().map(|dispatcher| dispatcher.stats()).collect();
            let total = layout.total(&dispatchers);
            if self.moves.begun() == moves && Arc::ptr_eq(&layout, &self.layout.load()) {
                return (layout, dispatchers, total);
            }
            yield_now();
        }
    }

    /// Brings a lane whose turn has ended to the dispatcher that it was moved to: a move that began when the turn was settled.
    pub(crate) fn deliver(&self, parcel: Parcel<K, M>) {
        self.layout.load().dispatchers[parcel.to].receive(parcel);
        self.moves.end();
        self.quiet.stir();
    }

    /// A worker has found a dispatcher quiet, and perhaps all of those who serve it asleep.
    pub(crate) fn found_quiet(&self, deserted: bool) {
        if deserted && self.engine_bound.is_counting() {
            self.engine_bound.room.rouse(self.engine_bound.capacity);
        }
        self.quiet.stir();
    }
}

impl<K: Hash, M> Shared<K, M> {
    #[inline]
    pub(crate) fn fingerprint(&self, key: &K) -> u64 {
        fingerprint_of(self.hasher.hash_one(key))
    }

    /// The dispatcher of a key, for an operator: where it is mapped, or would be placed.
    fn home(&self, layout: &Layout<K, M>, key: &K, fingerprint: u64) -> Option<usize> {
        let mapped = self.mappings.as_ref().and_then(|mappings| mappings.find(fingerprint));
        mapped.or_else(|| self.placement.place(key, fingerprint, layout))
    }

    // ── submission ─────────────────────────────────────────────────────────────────────────────────────────────────

    /// The way of most messages is short, and inlined into the submitter's own code. Whatever else may happen to one gets it in parts: then it is never in memory
    /// before it is in ingress, as far as its type allows. (A processor waits for a small value that was written in parts and is read as a whole, and it
    /// would wait for longer than it takes to hand one over.)
    #[inline(always)]
    pub(crate) fn submit(
        &self,
        message: Message<K, M>,
        patience: Patience<'_>,
    ) -> Result<Admission, Refused<K, M>> {
        let Message { key, body, kind, priority } = message;
        let cancelled = patience.is_over();
        let Some(bits) = self.direct_bits.filter(|_| !cancelled && !self.detour.load(Ordering::Acquire))
        else {
            return self.submit_placed(Message { key, body, kind, priority }, patience);
        };
        let fingerprint = self.fingerprint(&key);
        // The first layout, as long as it is the current one: the epoch in ingress knows. It saves the two writes of a guarded load.
        let dispatcher = &self.first.0[ByHash::bits(fingerprint) & bits];
        let message = Message { key, body, kind, priority };
        match dispatcher.push_direct(Item { fingerprint, accepted_at: 0, message }, 0, &self.clock) {
            Ok(None) => Ok(Admission::Accepted),
            Ok(Some(sleeper)) => {
                sleeper.wake();
                Ok(Admission::Accepted)
            }
            Err(Item { message: Message { key, body, kind, priority }, .. }) => {
                let message = Message { key, body, kind, priority };
                self.submit_arrival(Item { fingerprint, accepted_at: 0, message }, patience)
            }
        }
    }

    /// The same for whatever else: a placement that is asked about the key, an engine that is closed or has a bound of its own, a submitter who has given up.
    #[inline(never)]
    fn submit_placed(
        &self,
        message: Message<K, M>,
        patience: Patience<'_>,
    ) -> Result<Admission, Refused<K, M>> {
        let mut arrival = self.arrive(message);
        let cancelled = patience.is_over();
        if self.direct
            && !cancelled
            && !self.detour.load(Ordering::Acquire)
            && let Some(dispatcher) = self.first_home(&arrival)
        {
            match dispatcher.push_direct(arrival, 0, &self.clock) {
                Ok(None) => return Ok(Admission::Accepted),
                Ok(Some(sleeper)) => {
                    sleeper.wake();
                    return Ok(Admission::Accepted);
                }
                Err(back) => arrival = back,
            }
        }
        self.submit_arrival(arrival, patience)
    }

    /// The dispatcher of a message in the first layout, by a placement that looks at the key alone.
    fn first_home(&self, arrival: &Item<K, M>) -> Option<&Dispatcher<K, M>> {
        let place = self.placement.place(&arrival.message.key, arrival.fingerprint, &self.first)?;
        self.first.0.get(place).map(|dispatcher| &**dispatcher)
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn submit_arrival(
        &self,
        mut arrival: Item<K, M>,
        patience: Patience<'_>,
    ) -> Result<Admission, Refused<K, M>> {
        let mut waiting = Waiting::new();
        loop {
            match self.look_for_room(arrival, &mut waiting, &patience, Instant::now) {
                Step::Ended(result) => return result,
                Step::Blocked(blocked) => arrival = self.sleep_until_told(blocked, &waiting),
            }
        }
    }

    /// Until its submitter should look again.
    fn sleep_until_told(&self, blocked: Blocked<K, M>, waiting: &Waiting<Instant>) -> Item<K, M> {
        let Blocked { arrival, dispatcher, left, .. } = blocked;
        let began = Instant::now();
        let place = waiting.place.as_ref().expect("who is blocked has entered");
        place.wait(Appetite::patience(waiting.asked, left));
        self.appetite.learn(began.elapsed(), dispatcher.limits.capacity / 8);
        arrival
    }

    /// Attempts until the message is in, or refused, or has to wait as the policy and the submitter's patience allow. The one decision of how a submission waits: threads and tasks differ only in how they sleep.
    ///
    /// The policy is that of the bound that is full now, and the time of [`Overflow::BlockFor`] runs from the first look that found no room, whichever bound that met.
    pub(crate) fn look_for_room<I>(
        &self,
        mut arrival: Item<K, M>,
        waiting: &mut Waiting<I>,
        patience: &Patience<'_>,
        now: impl Fn() -> I,
    ) -> Step<K, M>
    where
        I: Copy + std::ops::Sub<Output = Duration>,
    {
        let mut has_entered = false;
        loop {
            if patience.is_over() {
                waiting.place = None;
                return Step::Ended(self.refuse(arrival, Refusal::Cancelled, None));
            }
            let (full, bound, dispatcher) = match self.attempt(arrival, &mut waiting.place) {
                Attempt::Ended(result) => {
                    waiting.place = None;
                    return Step::Ended(result);
                }
                Attempt::Full(arrival, bound, dispatcher) => (arrival, bound, dispatcher),
            };
            let limit = match self.policy(bound, &dispatcher) {
                Overflow::BlockFor(limit) => Some(limit),
                _ => None,
            };
            let left = limit.map(|limit| {
                let since = *waiting.since.get_or_insert_with(&now);
                limit.saturating_sub(now() - since)
            });
            let impatient = match patience {
                Patience::None => Some(Refusal::Full(bound)),
                _ if Inside::is(self.address()) => Some(Refusal::FromHandler(bound)),
                _ => (left == Some(Duration::ZERO)).then_some(Refusal::TimedOut(bound)),
            };
            if let Some(reason) = impatient {
                waiting.place = None;
                return Step::Ended(self.refuse(full, reason, Some(&dispatcher)));
            }
            // The look behind the entry, unless that was where another bound is: what was released before it would not be told.
            if has_entered && waiting.place.is_some() {
                return Step::Blocked(Blocked { arrival: full, dispatcher, limit, left });
            }
            waiting.since.get_or_insert_with(&now);
            if !self.has_room_soon(bound, &dispatcher, patience) {
                self.enter(waiting, bound, full.message.kind, &dispatcher, patience);
                has_entered = true;
            }
            arrival = full;
        }
    }

    /// Whether it is worth looking again before anything else is done.
    fn has_room_soon(&self, bound: Bound, dispatcher: &Dispatcher<K, M>, patience: &Patience<'_>) -> bool {
        let is_thread = patience.task().is_none();
        is_thread && bound == Bound::Dispatcher && self.appetite.is_keen() && dispatcher.has_room_soon()
    }

    /// Takes a place where there will be room, or goes back to the one that it has there.
    fn enter<I>(
        &self,
        waiting: &mut Waiting<I>,
        bound: Bound,
        kind: Kind,
        dispatcher: &Dispatcher<K, M>,
        patience: &Patience<'_>,
    ) {
        let room = self.room(bound, dispatcher);
        if let Patience::Cancellable(cancel) = patience {
            cancel.subscribe(&Waker::from(room.clone()));
        }
        let (released, places) = match bound {
            Bound::Engine => (self.engine_bound.released(), 1),
            Bound::Dispatcher if patience.task().is_none() => (dispatcher.released(), self.appetite.places()),
            _ => (dispatcher.released(), 1),
        };
        let wish = Wish { what: waits_for(bound, kind), released, places };
        waiting.asked = places;
        match &waiting.place {
            Some(place) => place.again(wish, patience.task()),
            None => waiting.place = Some(room.enter(wish, patience.task())),
        }
    }

    #[inline(always)]
    pub(crate) fn arrive(&self, message: Message<K, M>) -> Item<K, M> {
        let fingerprint = self.fingerprint(&message.key);
        Item { fingerprint, accepted_at: 0, message }
    }

    /// One attempt, without waiting. All policies but blocking are dealt with here. `place` is where the submitter waits; it is left as soon as it is known that this is not
    /// where there will be room, before any code of the user's runs.
    fn attempt(&self, mut arrival: Item<K, M>, place: &mut Option<Entered>) -> Attempt<K, M> {
        loop {
            let layout = self.layout.load();
            if self.closed.load(Ordering::Acquire) {
                return Attempt::Ended(self.refuse(arrival, Refusal::Closed, None));
            }
            let (home, placed) = match self.place(&layout, &arrival) {
                Placing::At(home, placed) => (home, placed),
                Placing::Stale => continue,
                Placing::Nowhere => {
                    return Attempt::Ended(self.refuse(arrival, Refusal::NoSuchDispatcher, None));
                }
            };
            let dispatcher = &layout.dispatchers[home];
            let fingerprint = arrival.fingerprint;
            let refused = match self.offer(&layout, dispatcher, arrival) {
                Offer::Accepted { wake, evicted } => {
                    self.leave(place, dispatcher, evicted.is_none());
                    if let Some(sleeper) = wake {
                        sleeper.wake();
                    }
                    if let Some(evicted) = evicted {
                        self.evicted(evicted);
                    }
                    return Attempt::Ended(Ok(Admission::Accepted));
                }
                refused => refused,
            };
            self.undo(fingerprint, placed);
            match refused {
                Offer::Accepted { .. } => unreachable!("dealt with above"),
                Offer::Moved(moved) => arrival = moved,
                Offer::Closed(arrival) => {
                    return Attempt::Ended(self.refuse(arrival, Refusal::Closed, Some(dispatcher)));
                }
                Offer::Full(arrival, bound) => {
                    let what = waits_for(bound, arrival.message.kind);
                    let is_there = |place: &mut Entered| place.is_for(self.room(bound, dispatcher), what);
                    drop(place.take_if(|place| !is_there(place)));
                    return self.full(arrival, bound, dispatcher);
                }
            }
        }
    }

    /// The message is in, at this dispatcher: leaves the place where it waited. What it was woken for is used if that was here; one for which another had to go used none.
    fn leave(&self, place: &mut Option<Entered>, dispatcher: &Dispatcher<K, M>, takes_place: bool) {
        let Some(place) = place.take() else { return };
        if takes_place && (place.is_in(&dispatcher.room) || place.is_in(&self.engine_bound.room)) {
            place.used();
        }
    }

    /// Chooses the dispatcher, and counts the message against its mapping where there are mappings.
    fn place(&self, layout: &Layout<K, M>, arrival: &Item<K, M>) -> Placing {
        let fingerprint = arrival.fingerprint;
        let message = &arrival.message;
        let choose =
            || self.placement.place(&message.key, fingerprint, layout).filter(|place| *place < layout.len());
        let Some(mappings) = &self.mappings else {
            return choose().map_or(Placing::Nowhere, |place| Placing::At(place, None));
        };
        let now = self.clock.now();
        mappings.expire_some(fingerprint, now, |dispatcher| self.unmapped(dispatcher));
        let mapped = |dispatcher: usize| {
            layout.dispatchers[dispatcher].mappings.fetch_add(1, Ordering::Relaxed);
        };
        mappings.place(fingerprint, message.kind, layout.epoch, now, choose, mapped)
    }

    fn undo(&self, fingerprint: u64, placed: Option<Placed>) {
        if let (Some(mappings), Some(placed)) = (&self.mappings, placed) {
            mappings.undo(fingerprint, placed, |dispatcher| self.unmapped(dispatcher));
        }
    }

    /// Offers a message within the engine's bound, where there is one.
    fn offer(
        &self,
        layout: &Layout<K, M>,
        dispatcher: &Dispatcher<K, M>,
        arrival: Item<K, M>,
    ) -> Offer<K, M> {
        let bound = &self.engine_bound;
        if !bound.is_counting() {
            return dispatcher.offer(arrival, layout.epoch, &self.clock);
        }
        if !bound.reserve(arrival.message.kind) {
            if self.settings.engine_overflow != Overflow::DropOldest {
                return Offer::Full(arrival, Bound::Engine);
            }
            return dispatcher.offer_looking(arrival, layout.epoch, Some(bound), &self.clock);
        }
        let offer = dispatcher.offer(arrival, layout.epoch, &self.clock);
        match &offer {
            Offer::Accepted { evicted: None, .. } => {}
            _ => bound.release(1).tell(bound),
        }
        offer
    }

    /// A full bound: what its policy says, as far as that does not mean to wait.
    pub(crate) fn full(
        &self,
        arrival: Item<K, M>,
        bound: Bound,
        dispatcher: &Arc<Dispatcher<K, M>>,
    ) -> Attempt<K, M> {
        let kind = arrival.message.kind;
        match self.policy(bound, dispatcher) {
            Overflow::Block | Overflow::BlockFor(_) => Attempt::Full(arrival, bound, dispatcher.clone()),
            Overflow::DropNewest if !kind.is_control() => {
                let dropped = Dropped { bound, policy: Overflow::DropNewest, kind };
                self.count_at(Some(dispatcher), |dispatcher| dispatcher.count_dropped(dropped));
                self.drop_message(arrival.message, dropped);
                Attempt::Ended(Ok(Admission::Dropped))
            }
            _ => Attempt::Ended(self.refuse(arrival, Refusal::Full(bound), Some(dispatcher))),
        }
    }

    fn policy(&self, bound: Bound, dispatcher: &Dispatcher<K, M>) -> Overflow {
        match bound {
            Bound::Engine => self.settings.engine_overflow,
            bound => dispatcher.limits.at(bound),
        }
    }

    fn room<'a>(&'a self, bound: Bound, dispatcher: &'a Dispatcher<K, M>) -> &'a Arc<Room> {
        match bound {
            Bound::Engine => &self.engine_bound.room,
            _ => &dispatcher.room,
        }
    }

    pub(crate) fn refuse(
        &self,
        arrival: Item<K, M>,
        reason: Refusal,
        dispatcher: Option<&Dispatcher<K, M>>,
    ) -> Result<Admission, Refused<K, M>> {
        self.count_at(dispatcher, |dispatcher| dispatcher.count_refused(reason));
        Err(Refused { message: arrival.message, reason })
    }

    /// Counts at this dispatcher or, if there is none or it was removed since it was found, at one that is there.
    fn count_at(&self, dispatcher: Option<&Dispatcher<K, M>>, count: impl Fn(&Dispatcher<K, M>) -> bool) {
        let mut counted = dispatcher.is_some_and(&count);
        while !counted {
            // A layout has a dispatcher. All of it may have been replaced since it was loaded, and then there is another one.
            counted = self.layout.load().dispatchers.iter().any(|dispatcher| count(dispatcher));
        }
    }

    /// A message that made room for another.
    fn evicted(&self, evicted: Evicted<K, M>) {
        let Evicted { fingerprint, message, bound } = evicted;
        if let Some(mappings) = &self.mappings {
            mappings.release(fingerprint, 1, |dispatcher| self.unmapped(dispatcher));
        }
        let kind = message.kind;
        self.drop_message(message, Dropped { bound, policy: Overflow::DropOldest, kind });
    }

    fn drop_message(&self, message: Message<K, M>, dropped: Dropped) {
        match &self.settings.on_drop {
            Some(on_drop) => on_drop(message, dropped),
            None => drop(message),
        }
    }

    /// Submits as a task does.
    #[cfg(feature = "tokio")]
    pub(crate) async fn submit_async(&self, arrival: Item<K, M>) -> Result<Admission, Refused<K, M>> {
        let mut submission = Submission::new(arrival);
        std::future::poll_fn(|context| self.poll_submit(&mut submission, context)).await
    }

    /// One poll of an async submission. The message stays in `submission` until it is accepted or refused.
    #[cfg(feature = "tokio")]
    fn poll_submit(
        &self,
        submission: &mut Submission<K, M>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<Admission, Refused<K, M>>> {
        use std::task::Poll;
        loop {
            let arrival = submission.arrival.take().expect("polled after it was ready");
            let patience = Patience::Task(context.waker());
            match self.look_for_room(arrival, &mut submission.waiting, &patience, tokio::time::Instant::now) {
                Step::Ended(result) => return Poll::Ready(result),
                Step::Blocked(Blocked { arrival, limit, left, .. }) => {
                    submission.arrival = Some(arrival);
                    if !submission.is_over(limit.zip(left), context) {
                        return Poll::Pending;
                    }
                }
            }
        }
    }
}

/// What somebody waits for at a bound. Any message that leaves may be the one that makes room in a lane, or of a lane.
fn waits_for(bound: Bound, kind: Kind) -> For {
    match bound {
        Bound::Lane | Bound::Lanes => For::Anything,
        _ if kind.is_control() => For::Reserve,
        _ => For::Place,
    }
}

/// An async submission on its way.
#[cfg(feature = "tokio")]
struct Submission<K, M> {
    arrival: Option<Item<K, M>>,
    waiting: Waiting<tokio::time::Instant>,
    /// When its time is up, by the policy that gave it so much.
    deadline: Option<(Duration, std::pin::Pin<Box<tokio::time::Sleep>>)>,
}

#[cfg(feature = "tokio")]
impl<K, M> Submission<K, M> {
    fn new(arrival: Item<K, M>) -> Self {
        Submission { arrival: Some(arrival), waiting: Waiting::new(), deadline: None }
    }

    /// Whether its time is up, which is this long in all, and so much of it is left. If not it will be woken then.
    fn is_over(&mut self, time: Option<(Duration, Duration)>, context: &mut std::task::Context<'_>) -> bool {
        let Some((limit, left)) = time else {
            self.deadline = None;
            return false;
        };
        // The bound that it meets may have changed since, and the policy with it.
        self.deadline = self.deadline.take().filter(|(of, _)| *of == limit);
        let (_, deadline) = self.deadline.get_or_insert_with(|| (limit, Box::pin(tokio::time::sleep(left))));
        std::future::Future::poll(deadline.as_mut(), context).is_ready()
    }
}

/// Submits to an engine and operates it. Cheap to clone.
pub struct Handle<K, M> {
    pub(crate) shared: Arc<Shared<K, M>>,
}

impl<K, M> Clone for Handle<K, M> {
    fn clone(&self) -> Self {
        Handle { shared: self.shared.clone() }
    }
}

impl<K, M> std::fmt::Debug for Handle<K, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let layout = self.shared.layout.load();
        f.debug_struct("Handle")
            .field("dispatchers", &layout.dispatchers.len())
            .field("workers", &layout.seats.len())
            .finish()
    }
}

impl<K: Hash, M> Handle<K, M> {
    /// Submits a message: by the overflow policy of whatever bound it meets, this may wait.
    #[inline]
    pub fn submit(&self, message: impl Into<Message<K, M>>) -> Result<Admission, Refused<K, M>> {
        self.shared.submit(message.into(), Patience::Policy)
    }

    /// The same without ever waiting for room: a full bound that would block refuses.
    pub fn try_submit(&self, message: impl Into<Message<K, M>>) -> Result<Admission, Refused<K, M>> {
        self.shared.submit(message.into(), Patience::None)
    }

    /// The same as [`submit`](Handle::submit), unless it is cancelled while it waits.
    pub fn submit_unless(
        &self,
        message: impl Into<Message<K, M>>,
        cancel: &Cancel,
    ) -> Result<Admission, Refused<K, M>> {
        self.shared.submit(message.into(), Patience::Cancellable(cancel))
    }

    /// Submits many messages in order: sorted by dispatcher, and handed over in pieces, under one lock each, where neither placement nor bounds have to look at a message by itself.
    /// Workers may begin before the batch has ended, and the iterator is never asked under a lock.
    ///
    /// Refusal keeps order: once a message of a key is refused, so are all later ones of that key in the batch. If the iterator or the hash of a key panics, what was
    /// handed over before stays submitted, and the rest is dropped.
    ///
    /// At a full bound whose policy says so it blocks its thread, like [`submit`](Handle::submit). Where that thread is the only one of the runtime on which handlers would make room, that is for
    /// ever: there, [`try_submit_batch`](Handle::try_submit_batch) refuses what does not fit, and `submit_batch_async` waits.
    pub fn submit_batch<T: Into<Message<K, M>>>(
        &self,
        messages: impl IntoIterator<Item = T>,
    ) -> BatchReport<K, M> {
        self.shared.submit_batch(messages.into_iter().map(Into::into), Patience::Policy)
    }

    /// The same without ever waiting for room: what meets a full bound that would block is refused, and with it all later messages of its key in the batch.
    pub fn try_submit_batch<T: Into<Message<K, M>>>(
        &self,
        messages: impl IntoIterator<Item = T>,
    ) -> BatchReport<K, M> {
        self.shared.submit_batch(messages.into_iter().map(Into::into), Patience::None)
    }

    /// The same as [`submit_batch`](Handle::submit_batch) from async code: where that would block the thread, this waits. The messages are submitted one by one.
    ///
    /// Dropping the future gives up waiting: what the iterator has yielded before the message that waits stays submitted, as far as it was not refused; that message and what comes behind it are dropped, and so is the report.
    #[cfg(feature = "tokio")]
    pub async fn submit_batch_async<T: Into<Message<K, M>>>(
        &self,
        messages: impl IntoIterator<Item = T>,
    ) -> BatchReport<K, M> {
        self.shared.submit_batch_async(messages.into_iter().map(Into::into)).await
    }

    /// Submits from async code: where [`submit`](Handle::submit) would block the thread, this waits. Dropping the future gives up waiting.
    ///
    /// Where the policy is [`Overflow::BlockFor`](crate::Overflow::BlockFor), on a runtime of tokio with timers.
    #[cfg(feature = "tokio")]
    pub async fn submit_async(&self, message: impl Into<Message<K, M>>) -> Result<Admission, Refused<K, M>> {
        self.shared.submit_async(self.shared.arrive(message.into())).await
    }

    /// Parks the lane of a key in front of its next message. False if it has no lane: nothing of it is outstanding, or what is runs in a stream
    /// ([`PerhapsRunning`](crate::Reason::PerhapsRunning)). A park is of a lane, not of a key: if all that is outstanding is in flight, and nothing else has come when that has ended, the
    /// lane goes, and the park with it.
    pub fn park(&self, key: &K, why: &str) -> bool {
        let now = self.shared.clock.now();
        let parked = self.operate(key, |dispatcher, fingerprint| {
            dispatcher.operate(|lanes, _, _| lanes.park(fingerprint, why, now))
        });
        self.shared.quiet.stir();
        parked.unwrap_or(false)
    }

    /// Lets a parked lane go on from its head, messages that were parked alone first; a lane in retry goes on at once. False if there was nothing to resume.
    pub fn resume(&self, key: &K) -> bool {
        let resume = |dispatcher: &Dispatcher<K, M>, fingerprint| {
            dispatcher.operate(|lanes, _, _| lanes.resume(fingerprint))
        };
        self.operate(key, resume).unwrap_or(false)
    }

    /// Gives up the next message of a lane that is not in flight. It counts as failed and goes to `on_fail`. False if there is none, or it is in flight.
    pub fn skip_head(&self, key: &K) -> bool {
        let skipped = self.operate(key, |dispatcher, fingerprint| {
            dispatcher.operate(|lanes, counted, released| {
                let attempts = lanes.standing(fingerprint).map_or(0, |standing| standing.attempts);
                let item = lanes.skip_head(fingerprint)?;
                counted.failed += 1;
                *released += 1;
                Some((fingerprint, item, attempts, self.shared.engine_bound.release(1)))
            })
        });
        let Some((fingerprint, item, attempts, freed)) = skipped.flatten() else { return false };
        freed.tell(&self.shared.engine_bound);
        self.shared.unmap(fingerprint, 1);
        let failure = Failure { attempts, note: Some("skipped by an operator".to_owned()) };
        report_failure(self.shared.settings.on_fail.as_ref(), item.message, failure);
        self.shared.quiet.stir();
        true
    }

    /// Takes everything back that waits in the lane of a key, oldest first, messages that were parked alone included. `None` if the lane is in
    /// flight: then its head would stay behind. In the account they count as dropped.
    pub fn withdraw(&self, key: &K) -> Option<Vec<Message<K, M>>> {
        let taken = self.operate(key, |dispatcher, fingerprint| {
            dispatcher.operate(|lanes, counted, released| {
                let items = lanes.withdraw(fingerprint)?;
                counted.evicted.withdraw(items.len() as u64);
                *released += items.len() as u64;
                let freed = self.shared.engine_bound.release(items.len() as u64);
                Some((fingerprint, items, freed))
            })
        });
        let (fingerprint, items, freed) = taken??;
        freed.tell(&self.shared.engine_bound);
        self.shared.unmap(fingerprint, items.len() as u64);
        self.shared.quiet.stir();
        Some(items.into_iter().map(|item| item.message).collect())
    }

    fn operate<R>(&self, key: &K, act: impl FnOnce(&Dispatcher<K, M>, u64) -> R) -> Option<R> {
        let fingerprint = self.shared.fingerprint(key);
        // No change of the topology between finding the lane and acting on it.
        let _changes = lock(&self.shared.changing);
        let layout = self.shared.layout.load();
        let dispatcher = match self.shared.home(&layout, key, fingerprint) {
            Some(home) => layout.dispatchers.get(home),
            // Its dispatcher was removed, and the placement names no other: what was there then is somewhere.
            None => layout.dispatchers.iter().find(|dispatcher| dispatcher.has_lane(fingerprint)),
        };
        dispatcher.map(|dispatcher| act(dispatcher, fingerprint))
    }
}

impl<K: Hash, M> Handle<K, M> {
    /// Shows what waits in the lane of a key to `look`, oldest first and at most so many: its head, unless that is in flight, and what is behind it. The lane
    /// cannot move meanwhile, so `look` should only take what it needs.
    pub fn look<R>(&self, key: &K, most: usize, mut look: impl FnMut(&Message<K, M>) -> R) -> Vec<R> {
        let seen = self.operate(key, |dispatcher, fingerprint| {
            dispatcher
                .operate(|lanes, _, _| lanes.waiting_in(fingerprint).take(most).map(&mut look).collect())
        });
        seen.unwrap_or_default()
    }
}

impl<K: Hash + Clone, M> Handle<K, M> {
    /// Why the next message of a key is not running, or that it is. `None` if the placement knows no dispatcher for it, and it has no lane that an earlier one has left.
    pub fn explain(&self, key: &K) -> Option<Explanation<K>> {
        self.operate(key, |dispatcher, fingerprint| dispatcher.explain(fingerprint, &self.shared.clock))
    }
}

impl<K: Clone, M> Handle<K, M> {
    /// The deepest lanes, deepest first: at most `most` of them, found in memory for that many. Messages in flight count, except those in a stream, which are in no lane.
    pub fn lanes_by_depth(&self, most: usize) -> Vec<(K, usize)> {
        let mut top: Vec<(usize, K)> = Vec::with_capacity(most.min(1_024) + 1);
        for dispatcher in &self.shared.layout.load().dispatchers {
            dispatcher.operate(|lanes, _, _| {
                lanes.each_depth(|depth, key| {
                    if top.len() < most || top.last().is_some_and(|last| depth > last.0) {
                        let place = top.partition_point(|other| other.0 >= depth);
                        top.insert(place, (depth, key.clone()));
                        top.truncate(most);
                    }
                });
            });
        }
        top.into_iter().map(|(depth, key)| (key, depth)).collect()
    }
}

impl<K, M> Handle<K, M> {
    /// Looks for waiting messages in all lanes, in no order, until `most` are found. Looks at everything that waits, under the lock of one dispatcher after the
    /// other: for a person who searches, not for a loop.
    pub fn find<R>(&self, most: usize, mut is_it: impl FnMut(&Message<K, M>) -> Option<R>) -> Vec<R> {
        let mut found = Vec::new();
        for dispatcher in &self.shared.layout.load().dispatchers {
            let left = most.saturating_sub(found.len());
            dispatcher.operate(|lanes, _, _| {
                found.extend(lanes.all_waiting().filter_map(&mut is_it).take(left));
            });
        }
        found
    }

    /// Stops a dispatcher from starting turns. What is in flight ends; what comes is accepted and waits. False if there is none of that name.
    pub fn pause(&self, dispatcher: &str) -> bool {
        self.set_paused(dispatcher, true)
    }

    /// Lets a paused dispatcher go on. False if there is none of that name.
    pub fn unpause(&self, dispatcher: &str) -> bool {
        self.set_paused(dispatcher, false)
    }

    fn set_paused(&self, name: &str, paused: bool) -> bool {
        let layout = self.shared.layout.load();
        let place = layout.position(name);
        let found = place.map(|place| layout.dispatchers[place].set_paused(paused)).is_some();
        // What is ready there does not count any more.
        self.shared.quiet.stir();
        found
    }

    /// Lets a dispatcher start at most so many messages per second from now on, evenly spaced, or as many as it can. False if there is none of
    /// that name, or the pace is not above zero.
    pub fn set_pace(&self, dispatcher: &str, per_second: Option<f64>) -> bool {
        let interval = per_second.map(pace_interval);
        let layout = self.shared.layout.load();
        match layout.position(dispatcher) {
            Some(place) if interval != Some(0) => {
                layout.dispatchers[place].operate(|lanes, _, _| lanes.set_pace(interval));
                layout.dispatchers[place].wake_all();
                true
            }
            _ => false,
        }
    }

    /// Everything that is counted, and where everything is.
    pub fn snapshot(&self) -> Snapshot {
        let shared = &self.shared;
        let now = shared.clock.now();
        let expire = |mappings: &Mappings| mappings.expire_all(now, |dispatcher| shared.unmapped(dispatcher));
        let active_mappings = shared.mappings.as_ref().map_or(0, expire);
        let (layout, dispatchers, total) = shared.counted();
        Snapshot {
            at: Duration::from_nanos(now),
            account: total.account,
            drops: total.drops,
            refusals: total.refusals,
            active_mappings,
            late: shared.mappings.as_ref().map_or(0, Mappings::late),
            expired_flows: shared.mappings.as_ref().map_or(0, Mappings::expired),
            dispatchers,
            workers: layout.seats.iter().map(|seat| seat.counters.read(&seat.name)).collect(),
        }
    }

    /// Waits until nothing is outstanding except what is parked, or paused dispatchers hold. False if that has not come within `limit`.
    pub fn wait_quiet(&self, limit: Duration) -> bool {
        self.shared.wait_quiet(Instant::now() + limit.min(Duration::from_secs(86_400 * 365)))
    }

    /// Whether nothing is outstanding except what is parked, or paused dispatchers hold: what [`wait_quiet`](Handle::wait_quiet) waits for.
    pub fn is_quiet(&self) -> bool {
        self.shared.is_quiet()
    }

    /// Refuses all further messages; those that were accepted are still handled.
    pub fn close(&self) {
        self.shared.close();
    }
}

/// A running engine: it owns its workers. [`Handle`]s made from it submit and operate from anywhere.
///
/// Dropping it is a [`shutdown`](Engine::shutdown) with no time to drain. Async handlers are not waited for: the thread that drops the engine may be the one that they need.
///
/// ```
/// use laneway::Engine;
/// use std::time::Duration;
///
/// let engine = Engine::builder()
///     .handle(|context, body: &mut &str| println!("{}: {body}", context.key()))
///     .build()?;
/// engine.submit(("order-7", "created"))?;
/// engine.submit(("order-7", "paid"))?; // after "created", whatever happens
/// engine.submit(("order-8", "created"))?; // beside them
/// let report = engine.shutdown(Duration::from_secs(5));
/// assert_eq!(report.account.done, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine<K, M> {
    pub(crate) handle: Handle<K, M>,
    pub(crate) shut_down: bool,
}

impl<K, M> Engine<K, M>
where
    K: Hash + Clone + Send + Sync + 'static,
    M: Send + 'static,
{
    /// Sets an engine up.
    pub fn builder() -> Builder<K, M> {
        Builder::new()
    }
}

impl<K, M> Engine<K, M> {
    /// A handle, to be cloned and sent wherever it is needed.
    pub fn handle(&self) -> Handle<K, M> {
        self.handle.clone()
    }

    /// Closes, drains for at most `drain`, waits for what is in flight, and gives back what was not started.
    ///
    /// It blocks its thread. Where handlers are async, that may be the one that they need: use `shutdown_async` there.
    pub fn shutdown(mut self, drain: Duration) -> ShutdownReport<K, M> {
        self.shut_down = true;
        self.handle.shared.shut_down(drain)
    }

    /// The same for async code, on a runtime of tokio with timers. Dropping the future gives up waiting, as dropping the engine does.
    ///
    /// ```
    /// use laneway::{Delivery, Engine, Topology};
    /// use std::time::Duration;
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// let engine = Engine::builder()
    ///     .topology(Topology::pool(100))
    ///     .handle_async(|delivery: Delivery<u64, &str>| async move {
    ///         tokio::time::sleep(Duration::from_millis(1)).await;
    ///         println!("{}: {}", delivery.key(), *delivery);
    ///     })
    ///     .build()?;
    /// engine.submit_async((7, "created")).await?;
    /// let report = engine.shutdown_async(Duration::from_secs(5)).await;
    /// assert_eq!(report.account.done, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    #[cfg(feature = "tokio")]
    pub async fn shutdown_async(mut self, drain: Duration) -> ShutdownReport<K, M> {
        let report = self.handle.shared.shut_down_async(drain).await;
        self.shut_down = true;
        report
    }
}

impl<K, M> Drop for Engine<K, M> {
    fn drop(&mut self) {
        if !self.shut_down {
            self.handle.shared.let_go();
        }
    }
}

impl<K, M> std::ops::Deref for Engine<K, M> {
    type Target = Handle<K, M>;
    fn deref(&self) -> &Handle<K, M> {
        &self.handle
    }
}

impl<K, M> std::fmt::Debug for Engine<K, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("handle", &self.handle).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;
    use crate::Topology;

    const DEADLINE: Duration = Duration::from_secs(20);

    fn eventually(reached: impl Fn() -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !reached() {
            assert!(Instant::now() < deadline, "it did not come");
            thread::yield_now();
        }
    }

    /// In fast times a thread asks for many places at once before it wants to be woken. A worker that makes some of them and then hangs tells nobody.
    #[test]
    fn a_blocked_submitter_gets_in_when_a_handler_hangs_before_as_much_is_free_as_it_asked_for() {
        let ((arrive, arrived), (open, gate)) = (mpsc::channel(), mpsc::channel::<()>());
        let gate = Mutex::new(gate);
        let engine = Engine::builder()
            .topology(Topology::pool(1))
            .worker_queue_capacity(8_192)
            .handle(move |_, hangs: &mut bool| {
                if *hangs {
                    arrive.send(()).unwrap();
                    // Until the test has ended, however it does.
                    let _ = lock(&gate).recv();
                }
            })
            .build()
            .unwrap();
        // Until the worker knows that messages are quick, and takes hundreds of them at a time.
        for _ in 0..10 {
            engine.submit_batch((0..1_000).map(|key| (key, false)));
            assert!(engine.wait_quiet(DEADLINE));
        }
        assert!(engine.pause("pool-0"));
        // Lanes so deep that it goes on at once when it has settled the first of them.
        let mut numbers = 0_u64..;
        while numbers.next().is_some_and(|n| engine.try_submit((n / 64, n == 600)).is_ok()) {}
        let layout = engine.shared.layout.load();
        let dispatcher = &layout.dispatchers[0];
        // When it lies down it tells of whatever there is.
        eventually(|| dispatcher.sleepers() == 1);
        (0..20).for_each(|_| engine.shared.appetite.learn(Duration::ZERO, 1_024));
        let (handle, (tell, answer)) = (engine.handle(), mpsc::channel());
        let submitter = thread::spawn(move || tell.send(handle.submit((0, false)).is_ok()));
        eventually(|| dispatcher.room.has_waiters());
        assert!(engine.unpause("pool-0"));
        arrived.recv_timeout(DEADLINE).unwrap();
        let answer = answer.recv_timeout(DEADLINE / 4);
        drop(open);
        assert_eq!(answer, Ok(true), "hundreds of places are free, the next may never be, and it sleeps");
        submitter.join().unwrap().unwrap();
    }
}
