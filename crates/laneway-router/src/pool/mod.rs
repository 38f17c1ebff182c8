//! A pool: an engine of its own whose lanes are message groups and whose slots call targets.
//!
//! The intake (`router.rs`) hands `Job`s in; the pool's handler hands each to the mediator, turns the verdict into an outcome of the lane, and
//! settles the delivery when its fate is known. What waits here is plain data in the engine's lanes: there are as many tasks as slots.
//!
//! # What a verdict becomes
//!
//! | verdict | the lane | the delivery |
//! |---|---|---|
//! | done | goes on | done |
//! | wait | waits so long; costs no attempt | held |
//! | again, attempts left | waits as told, or by the backoff | held |
//! | again, none left; final | as [`Exhausted`] says, or as the message's `dispatchMode` does | dead letter, held, or given back |
//!
//! A message without a group is never parked: it holds nobody up, and nobody could name it to resume it. It goes to the dead letters, or back.
//!
//! A group that goes back goes whole, so that no successor comes before the head:
//!
//! 1. The attempt that failed bars the group, so that nothing more of it is taken in, and parks its lane.
//! 2. Whoever was in the middle of taking a message in has finished: the intake holds `routing` to read, and this step takes it to write.
//! 3. What is in the lane is withdrawn and given back, in its order and all for the same time. From here on the ledgers know.
//! 4. The bar goes, again while no message is being taken in: each of them meets the bar, or the ledger's memory.
//!
//! The same happens to a group whose head has lost its lease: somebody else may be at it, and its successors must not run before it. And to groups that are
//! parked, or wait for long, where a pool is to be empty soon: one that drains, or one that stands in for a pool that has come.
//!
//! # What is parked
//!
//! That a group is parked is remembered beside its lane (`groups.rs`), and noted for the store (`parks.rs`): it stays parked when its last message has left, and when
//! the process starts again. An attempt that finds its group parked parks the lane instead, before anybody is called.
//!
//! Messages of parked groups do not count against the pool's capacity, since nobody knows when they will leave, and the other groups must not wait for
//! that. They are held beside it, as many again as the capacity; a group that stops when there are more goes back whole, and what comes of a parked group then
//! goes back, too, and comes again every now and then. So the memory of a pool is bounded by twice its capacity.
//!
//! # What waits for its target
//!
//! counts against the capacity, and waits without an end: a wait costs no attempt. So one target that asks for a day of patience, or whose breaker is open, could fill
//! the pool with its messages, and no other target would be called for a day. Where a pool is full while slots are idle, those groups go back whole, for as long as they have to wait,
//! whose head waits for its target, has used no attempt, and is not due before the next [look](LOOK_FOR_STUCK). One whose head has failed before stays, or its attempts would
//! be forgotten. Whoever finds no room has the pool looked through ([`Pool::make_room`]), so one that has room, or is busy, pays nothing.

mod attempt;
mod groups;
mod settings;

pub use groups::{GroupNotes, InFlight};
pub use settings::{BadSetting, CAPACITY_MAX, CONCURRENCY_MAX, Exhausted, PoolSettings, RATES, Ungrouped};
pub(crate) use settings::{RIGHT_RATE, wrong_code};

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use laneway::{Engine, Explanation, Handle, Overflow, Reason, RetryPolicy, Snapshot, Topology};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::mediator::{Mediator, Metrics, MetricsSnapshot};
use crate::message::Message;
use crate::parks::{Parked, Parks};
use crate::record::Record;
use crate::settle::{Held, Ledger};
use crate::source::Disposal;
use crate::trace::Traced;
use groups::{Groups, Parking, Stop};

/// What messages without a group are called where they are one.
pub const DEFAULT_GROUP: &str = "__DEFAULT__";

/// What orders messages in a pool.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum GroupKey {
    /// A group.
    Named(Arc<str>),
    /// A message that is ordered with nothing, by its number.
    Alone(u64),
}

impl GroupKey {
    /// Its name; nothing for a message alone.
    pub fn name(&self) -> &str {
        match self {
            GroupKey::Named(name) => name,
            GroupKey::Alone(_) => "",
        }
    }
}

impl std::fmt::Debug for GroupKey {
    /// As operators read it in explanations.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            GroupKey::Named(name) => write!(f, "{name:?}"),
            GroupKey::Alone(number) => write!(f, "a message without a group (number {number})"),
        }
    }
}

/// A message in a pool.
pub(crate) struct Job {
    pub(crate) message: Arc<Message>,
    /// Its place in the source.
    pub(crate) sequence: u64,
    /// Gone once it is settled.
    pub(crate) held: Option<Held>,
    /// It waits for its target, which has asked for patience or whose breaker is open, and for nothing of its own.
    waits: bool,
    /// Its place in a trace, if it has one.
    trace: Option<Box<Traced>>,
    /// Dropped with the job, which makes room.
    place: Place,
}

impl Job {
    /// Whether it asked for this pool, and another one stands in.
    fn is_for(&self, code: &str) -> bool {
        self.place.foreign.as_deref() == Some(code)
    }
}

/// A place in a pool.
struct Place {
    pool: Arc<Core>,
    key: GroupKey,
    /// The code that the message asked for, if this pool only stands in.
    foreign: Option<Arc<str>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.pool.leave(&self.key, self.foreign.as_deref());
    }
}

/// Whether a pool takes messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolState {
    /// Takes them and runs them.
    Open,
    /// Takes them and lets them wait.
    Paused,
    /// Was added while another pool still has messages that asked for it: takes none until those are gone.
    Waiting,
    /// Is about to go: takes none, and runs what it has.
    Draining,
}

impl PoolState {
    const ALL: [PoolState; 4] = [PoolState::Open, PoolState::Paused, PoolState::Waiting, PoolState::Draining];

    fn number(self) -> u8 {
        PoolState::ALL.iter().position(|other| *other == self).expect("all states are listed") as u8
    }
}

/// What a pool has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Taken in.
    pub submitted: u64,
    /// Delivered.
    pub succeeded: u64,
    /// Dead letters.
    pub failed: u64,
    /// Attempts that are to be repeated.
    pub transient: u64,
    /// Attempts that were put off, by a target or a rate.
    pub held_back: u64,
    /// Given back to the source because there was no room: the sum of the next three.
    pub refused: u64,
    /// The pool was full.
    pub refused_pool_full: u64,
    /// The group had its share.
    pub refused_group_full: u64,
    /// The pool was waiting or draining.
    pub refused_not_open: u64,
    /// Given back to the source after failing.
    pub given_back: u64,
}

#[derive(Debug, Default)]
struct Counters {
    submitted: AtomicU64,
    succeeded: AtomicU64,
    failed: AtomicU64,
    transient: AtomicU64,
    held_back: AtomicU64,
    refused_pool_full: AtomicU64,
    refused_group_full: AtomicU64,
    refused_not_open: AtomicU64,
    given_back: AtomicU64,
}

/// What the pool, its jobs and its handler share.
struct Core {
    code: Arc<str>,
    /// What is written down for those who look, by all pools together.
    record: Arc<Record>,
    settings: ArcSwap<PoolSettings>,
    /// Replaced when the secrets change.
    mediator: ArcSwap<Arc<dyn Mediator>>,
    state: AtomicU8,
    /// Messages here.
    held: AtomicUsize,
    /// Messages here that asked for another pool, by its code.
    foreign: Mutex<std::collections::HashMap<Arc<str>, usize>>,
    groups: Groups,
    /// Where it is noted which are parked.
    parks: Arc<Parks>,
    counters: Counters,
    /// Attempts by verdict, and how long they took.
    attempts: Metrics,
    /// For how long slots were busy, in nanoseconds, up to the last look of the history for what is under way.
    busy: AtomicU64,
    /// Told when there is room for messages, and whenever one leaves while somebody watches.
    room: Arc<Notify>,
    /// So many wait for messages to leave.
    watchers: AtomicUsize,
    /// Groups that are to go back.
    returns: mpsc::UnboundedSender<Return>,
    /// Held to read while a message is taken in, to write while it must not be.
    routing: Arc<RwLock<()>>,
    /// When the last messages left, to tell how long one has to wait for room.
    tempo: Mutex<Tempo>,
}

/// Whose messages go back, as whole groups, where they would stay for long.
#[derive(Clone, Copy)]
enum Leaving<'a> {
    /// All: the pool drains.
    All,
    /// Those that are for a pool that has come.
    To(&'a Arc<Pool>),
    /// Those that were taken from a source that stops.
    From(&'a Arc<Ledger>),
    /// Those that only wait for their targets: others have no room.
    Patient,
}

impl<'a> Leaving<'a> {
    fn includes(self, job: &Job) -> bool {
        match self {
            Leaving::All => true,
            Leaving::To(heir) => job.is_for(heir.code()),
            Leaving::From(ledger) => job.held.as_ref().is_some_and(|held| held.is_of(ledger)),
            Leaving::Patient => job.waits,
        }
    }

    /// For how long a group goes whose head is where it is for this reason. Nothing if it stays.
    fn delay(self, reason: Reason<GroupKey>, is_paused: bool) -> Option<Duration> {
        match (self, reason) {
            (Leaving::Patient, Reason::Retry { after, attempts: 0, .. }) if after > LOOK_FOR_STUCK => {
                Some(after)
            }
            (Leaving::Patient, _) | (Leaving::All, Reason::RateLimited { .. }) => None,
            (_, Reason::Parked { .. } | Reason::DispatcherPaused) => Some(Duration::ZERO),
            (_, Reason::RateLimited { after }) if after > LOOK_FOR_STUCK => Some(Duration::ZERO),
            (_, Reason::Retry { after, .. }) if after > LOOK_FOR_STUCK || is_paused => Some(after),
            _ => None,
        }
    }

    /// Who takes over what is parked.
    fn heir(self) -> Option<&'a Arc<Pool>> {
        match self {
            Leaving::To(heir) => Some(heir),
            Leaving::All | Leaving::From(_) | Leaving::Patient => None,
        }
    }
}

/// A group that is to go back whole. It is barred.
struct Return {
    key: GroupKey,
    /// For how long.
    delay: Duration,
    /// Only if no attempt of it is under way; else its lane parks in a moment, and is waited for.
    if_idle: bool,
    /// The pool that its messages are for, if this one only stood in: it takes over what is parked.
    heir: Option<Arc<Pool>>,
}

/// How fast messages leave.
#[derive(Debug)]
struct Tempo {
    /// So many have left since then.
    since: Instant,
    left: u32,
    /// In the time before that; nothing if there was none.
    per_second: Option<f64>,
    /// When the last one left, or the first one came.
    moved: Instant,
}

/// How long attempts that are under way when a pool ends may take to come back. Whoever ends it has been patient before.
const GRACE: Duration = Duration::from_secs(2);

/// How often a pool that is about to end is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// How often a pool that is to be empty of something, or has no room, is looked through for what does not go by itself.
pub(crate) const LOOK_FOR_STUCK: Duration = Duration::from_secs(1);

/// How much room is worth a claim.
fn worth_a_claim(capacity: usize) -> usize {
    (capacity / 8).clamp(1, 256)
}

/// Counted among those who wait for messages to leave, while it lives.
struct Watcher<'a>(&'a AtomicUsize);

impl<'a> Watcher<'a> {
    fn new(watchers: &'a AtomicUsize) -> Self {
        watchers.fetch_add(1, SeqCst);
        Watcher(watchers)
    }
}

impl Drop for Watcher<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// How long a message for which there is no room stays away.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

/// How often, a millisecond apart, somebody looks whether an attempt that was told to park its lane has done so.
const LOOKS: usize = 1_000;

impl Core {
    fn leave(&self, key: &GroupKey, foreign: Option<&str>) {
        self.groups.leave(key);
        let left = self.held.fetch_sub(1, SeqCst) - 1;
        if let Some(code) = foreign {
            let mut codes = self.foreign.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(count) = codes.get_mut(code) {
                *count -= 1;
                if *count == 0 {
                    codes.remove(code);
                }
            }
        }
        self.tempo.lock().unwrap_or_else(PoisonError::into_inner).one_left();
        let left = left.saturating_sub(self.groups.parked_messages());
        // To wake the intake for each message would cost more than most of what is done for it. It sleeps while there is no room, looks up now and then
        // while there is less than a claim is worth, and messages leave one by one: one of them comes to exactly as much.
        let capacity = self.settings.load().capacity;
        let makes_room =
            capacity.checked_sub(left).is_some_and(|free| free == 1 || free == worth_a_claim(capacity));
        if makes_room || foreign.is_some() || self.watchers.load(SeqCst) > 0 {
            self.room.notify_waiters();
        }
    }

    /// A group goes to another pool, as parked as it is. Where all of it goes it is not parked here any more, and what it was parked by is given back.
    fn bequeath(&self, key: &GroupKey, heir: &Pool, all: bool) -> Option<Stop> {
        let (Some(parked), GroupKey::Named(group)) = (self.groups.parked(key), key) else { return None };
        // Only the default pool, which stands in, inherits from one that goes.
        let foreign = (*heir.code == *crate::router::DEFAULT_POOL).then(|| Arc::clone(&self.code));
        let noted_by_heir = Arc::clone(foreign.as_ref().unwrap_or(&heir.code));
        let parking = heir.inherit(group, Stop { foreign, ..Stop::new(parked) });
        let stop = if all && parking != Parking::TooMany { self.groups.unpark(key) } else { None };
        if let Some(stop) = &stop
            && !(parking == Parking::New && *noted_by_heir == **self.noted_under(stop))
        {
            self.note(group, stop, None);
        }
        stop
    }

    /// The pool under which it is noted that a group is parked: the one that it was parked for.
    fn noted_under<'a>(&'a self, stop: &'a Stop) -> &'a Arc<str> {
        stop.foreign.as_ref().unwrap_or(&self.code)
    }

    /// Notes that a group is parked, or goes on that was.
    fn note(&self, group: &Arc<str>, stop: &Stop, parked: Option<Parked>) {
        self.parks.note(self.noted_under(stop), group, parked);
    }

    /// Messages that count against the capacity.
    fn counted(&self) -> usize {
        self.held.load(SeqCst).saturating_sub(self.groups.parked_messages())
    }

    fn state(&self) -> PoolState {
        PoolState::ALL[usize::from(self.state.load(SeqCst))]
    }
}

impl Tempo {
    fn new() -> Self {
        let now = Instant::now();
        Tempo { since: now, left: 0, per_second: None, moved: now }
    }

    /// The pool was empty until now: that time tells nothing.
    fn first_came(&mut self) {
        let now = Instant::now();
        (self.since, self.left, self.moved) = (now, 0, now);
    }

    fn one_left(&mut self) {
        self.left += 1;
        self.moved = Instant::now();
        let passed = (self.moved - self.since).as_secs_f64();
        if passed >= 1.0 {
            self.per_second = Some(f64::from(self.left) / passed);
            (self.since, self.left) = (self.moved, 0);
        }
    }

    /// How long until there may be room, with so many here: until half of them have left, or, where nothing moves, half as long again as nothing has.
    fn patience(&self, held: usize) -> Duration {
        let recent = f64::from(self.left) / self.since.elapsed().as_secs_f64().max(0.001);
        let per_second = self.per_second.unwrap_or(recent);
        let half = if per_second > 0.0 { held as f64 / 2.0 / per_second } else { 0.0 };
        let half = Duration::from_secs_f64(half.min(PATIENCE.1.as_secs_f64()));
        half.max(self.moved.elapsed() / 2).clamp(PATIENCE.0, PATIENCE.1)
    }
}

/// A pool.
pub(crate) struct Pool {
    code: Arc<str>,
    core: Arc<Core>,
    handle: Handle<GroupKey, Job>,
    /// Taken when the pool goes.
    engine: Mutex<Option<Engine<GroupKey, Job>>>,
    /// How many slots each part has, and the number of the next one.
    slots: Mutex<Vec<Vec<String>>>,
    next_slot: AtomicUsize,
    /// Held while the settings change.
    changing: Mutex<()>,
    /// Somebody paused it while it waited.
    opens_paused: AtomicBool,
    /// Not before is it looked through again for what only waits.
    next_look: Mutex<Instant>,
    /// Gives groups back until the pool ends.
    returning: tokio::task::JoinHandle<()>,
}

/// What all pools of a router have in common.
#[derive(Clone)]
pub(crate) struct Shared {
    /// Told whenever a message leaves a pool.
    pub(crate) room: Arc<Notify>,
    /// Held to read while a message is taken in, to write while it must not be.
    pub(crate) routing: Arc<RwLock<()>>,
    /// Written by pools, read by those who look.
    pub(crate) record: Arc<Record>,
    /// Which groups were parked when the process started, and which are.
    pub(crate) parks: Arc<Parks>,
}

/// What is waiting in a group, for those who look.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The message.
    pub message: Arc<Message>,
    /// Its place in the source.
    pub sequence: u64,
}

/// How a pool ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ended {
    /// Messages that went back to their sources.
    pub(crate) given_back: usize,
    /// Messages whose attempts had not come back.
    pub(crate) still_running: usize,
}

/// Why a message was not taken in.
pub(crate) struct NoRoom {
    pub(crate) held: Held,
    /// How long until there may be.
    pub(crate) patience: Duration,
}

/// A message that has a place in a pool, on its way into it.
pub(crate) type Placed = laneway::Message<GroupKey, Job>;

/// A message that is to have one.
pub(crate) struct Entry {
    pub(crate) message: Arc<Message>,
    pub(crate) sequence: u64,
    pub(crate) held: Held,
    pub(crate) key: GroupKey,
    /// The code that it asked for, if the pool only stands in.
    pub(crate) foreign: Option<Arc<str>>,
}

impl Pool {
    /// Starts a pool. `room` is told whenever a message leaves it.
    pub(crate) fn start(
        code: Arc<str>,
        settings: PoolSettings,
        mediator: Arc<dyn Mediator>,
        state: PoolState,
        shared: Shared,
    ) -> Arc<Pool> {
        let Shared { room, routing, record, parks } = shared;
        let (returns, returned) = mpsc::unbounded_channel();
        let affinity = settings.affinity;
        let rate = settings.rate_per_second;
        let core = Arc::new(Core {
            code: Arc::clone(&code),
            record,
            settings: ArcSwap::from_pointee(settings.clone()),
            mediator: ArcSwap::from_pointee(mediator),
            state: AtomicU8::new(state.number()),
            held: AtomicUsize::new(0),
            foreign: Mutex::default(),
            groups: Groups::new(),
            parks,
            counters: Counters::default(),
            attempts: Metrics::default(),
            busy: AtomicU64::new(0),
            room,
            watchers: AtomicUsize::new(0),
            returns,
            routing,
            tempo: Mutex::new(Tempo::new()),
        });
        for (group, parked) in core.parks.of_pool(&code) {
            core.groups.park(&GroupKey::Named(group), Stop::new(parked));
        }
        let slots: Vec<Vec<String>> = (0..affinity)
            .map(|part| {
                (0..share(settings.concurrency, affinity, part))
                    .map(|slot| format!("{}/{slot}", part_name(part)))
                    .collect()
            })
            .collect();
        let engine = build(&core, &slots);
        let handle = engine.handle();
        let returning = tokio::spawn(give_back_all(handle.clone(), Arc::clone(&core), returned));
        let pool = Arc::new(Pool {
            code,
            handle,
            engine: Mutex::new(Some(engine)),
            changing: Mutex::default(),
            opens_paused: AtomicBool::new(false),
            next_look: Mutex::new(Instant::now()),
            returning,
            core,
            next_slot: AtomicUsize::new(settings.concurrency),
            slots: Mutex::new(slots),
        });
        pool.set_rate(rate);
        pool
    }

    pub(crate) fn code(&self) -> &Arc<str> {
        &self.code
    }

    pub(crate) fn settings(&self) -> Arc<PoolSettings> {
        self.core.settings.load_full()
    }

    pub(crate) fn state(&self) -> PoolState {
        self.core.state()
    }

    /// Goes to another state: open, paused or draining. A pool that waits goes there once it need not wait any more. False if it is
    /// draining, which is for good. When this comes back, nobody is taking a message in by the state that was.
    pub(crate) fn turn(self: &Arc<Self>, to: PoolState) -> bool {
        let quiet = self.core.routing.write().unwrap_or_else(PoisonError::into_inner);
        match (self.state(), to) {
            (PoolState::Draining, _) => return false,
            (PoolState::Waiting, PoolState::Open | PoolState::Paused) => {
                self.opens_paused.store(to == PoolState::Paused, SeqCst);
            }
            _ => self.enter_state(to),
        }
        drop(quiet);
        self.core.room.notify_waiters();
        if to == PoolState::Draining {
            tokio::spawn(let_go(Arc::clone(self)));
        }
        true
    }

    /// It need not wait any more.
    pub(crate) fn open(&self) {
        let quiet = self.core.routing.write().unwrap_or_else(PoisonError::into_inner);
        if self.state() == PoolState::Waiting {
            let paused = self.opens_paused.load(SeqCst);
            self.enter_state(if paused { PoolState::Paused } else { PoolState::Open });
        }
        drop(quiet);
        self.core.room.notify_waiters();
    }

    fn enter_state(&self, state: PoolState) {
        self.core.state.store(state.number(), SeqCst);
        for part in self.parts() {
            if state == PoolState::Paused {
                self.handle.pause(&part);
            } else {
                self.handle.unpause(&part);
            }
        }
    }

    fn parts(&self) -> Vec<String> {
        (0..self.slots.lock().unwrap_or_else(PoisonError::into_inner).len()).map(part_name).collect()
    }

    pub(crate) fn record(&self) -> &Record {
        &self.core.record
    }

    /// What came of its attempts, and how long they took.
    pub(crate) fn attempts(&self) -> MetricsSnapshot {
        self.core.attempts.snapshot()
    }

    /// The attempts that are under way and began first, oldest first.
    pub(crate) fn in_flight(&self, most: usize) -> Vec<InFlight> {
        self.core.groups.in_flight(most)
    }

    /// How many more messages it asks for. None while little is free: a claim for each message that leaves would cost more than the
    /// message, and what is here keeps the slots busy meanwhile. Where it does not, because it waits for long, whatever is free is asked for by whoever
    /// `looks_closer`.
    pub(crate) fn appetite(&self, looks_closer: bool) -> usize {
        let free = self.free();
        let settings = self.settings();
        let is_asked_for = free >= worth_a_claim(settings.capacity)
            || (looks_closer && free > 0 && self.core.groups.running() < settings.concurrency);
        if is_asked_for { free } else { 0 }
    }

    /// How many more messages there is room for.
    pub(crate) fn free(&self) -> usize {
        match self.state() {
            PoolState::Open | PoolState::Paused => {
                self.settings().capacity.saturating_sub(self.core.counted())
            }
            PoolState::Waiting | PoolState::Draining => 0,
        }
    }

    /// Messages here.
    pub(crate) fn held(&self) -> usize {
        self.core.held.load(SeqCst)
    }

    /// How many messages here asked for another pool.
    pub(crate) fn stands_in_for(&self, code: &str) -> usize {
        let codes = self.core.foreign.lock().unwrap_or_else(PoisonError::into_inner);
        codes.get(code).copied().unwrap_or(0)
    }

    /// Makes room for a message, if there is any. Whoever gets a place [submits](Self::submit_all) it before long.
    pub(crate) fn place(&self, entry: Entry) -> Result<Placed, NoRoom> {
        let settings = self.core.settings.load();
        let Entry { message, sequence, held, key, foreign } = entry;
        // The place is taken before the state is read, and whoever removes a pool writes the state before it counts: one of the two sees the
        // other. So a message cannot slip into a pool that was found empty.
        let before = self.core.held.fetch_add(1, SeqCst);
        let counters = &self.core.counters;
        let obstacle = match self.state() {
            PoolState::Waiting | PoolState::Draining => Some(&counters.refused_not_open),
            PoolState::Open | PoolState::Paused
                if before.saturating_sub(self.core.groups.parked_messages()) >= settings.capacity
                    && self.core.groups.parked(&key).is_none() =>
            {
                Some(&counters.refused_pool_full)
            }
            PoolState::Open | PoolState::Paused if !self.core.groups.enter(&key, &settings) => {
                Some(&counters.refused_group_full)
            }
            PoolState::Open | PoolState::Paused => None,
        };
        if let Some(counter) = obstacle {
            self.core.held.fetch_sub(1, SeqCst);
            self.core.room.notify_waiters();
            if std::ptr::eq(counter, &counters.refused_pool_full) {
                self.make_room();
            }
            let mut refused = self.refuse(held, counter);
            // A pool that is not open yet, or not any more, is not waited for as long as somebody who may resume the group.
            if !std::ptr::eq(counter, &counters.refused_not_open) && self.core.groups.parked(&key).is_some() {
                refused.patience = PATIENCE.1;
            }
            return Err(refused);
        }
        if before == 0 {
            self.core.tempo.lock().unwrap_or_else(PoisonError::into_inner).first_came();
        }
        if let Some(code) = &foreign {
            let mut codes = self.core.foreign.lock().unwrap_or_else(PoisonError::into_inner);
            *codes.entry(Arc::clone(code)).or_default() += 1;
        }
        let priority = message.priority.into();
        let place = Place { pool: Arc::clone(&self.core), key: key.clone(), foreign };
        let trace = self.core.record.spans().arrived(&message, &self.code, key.name());
        let job = Job { message, sequence, held: Some(held), waits: false, trace, place };
        Ok(laneway::Message::new(key, job).priority(priority))
    }

    /// Takes messages in that have their places, in order: together, so that slots are woken for all of them and not for each. Those come back that were refused.
    pub(crate) fn submit_all(&self, placed: Vec<Placed>) -> Vec<NoRoom> {
        let report = self.handle.submit_batch(placed);
        self.core.counters.submitted.fetch_add(report.accepted as u64, Relaxed);
        let refused = report.refused.into_iter().map(|mut refused| {
            let held = refused.message.body.held.take().expect("nobody has settled it yet");
            // The engine's own bounds stand behind the pool's, so that it can only be closed.
            self.refuse(held, &self.core.counters.refused_not_open)
        });
        refused.collect()
    }

    fn refuse(&self, held: Held, counter: &AtomicU64) -> NoRoom {
        counter.fetch_add(1, Relaxed);
        let tempo = self.core.tempo.lock().unwrap_or_else(PoisonError::into_inner);
        NoRoom { held, patience: tempo.patience(self.held()) }
    }

    /// Runs by other settings from now on. The number of parts cannot be changed while messages are here; the answer is then what is wrong.
    pub(crate) fn change(
        &self,
        settings: PoolSettings,
        mediator: Arc<dyn Mediator>,
    ) -> Result<(), BadSetting> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.settings();
        if settings.affinity != now.affinity {
            return Err(BadSetting {
                setting: "affinity",
                value: settings.affinity.to_string(),
                right: format!(
                    "it stays {} while the pool lives; remove the pool and add it again",
                    now.affinity
                ),
            });
        }
        if let Err(error) = self.resize(settings.concurrency) {
            let value = settings.concurrency.to_string();
            return Err(BadSetting { setting: "concurrency", value, right: error.to_string() });
        }
        // Setting the rate lets the next message start at once, so it is set only if it is another one.
        if settings.rate_per_second != now.rate_per_second {
            self.set_rate(settings.rate_per_second);
        }
        self.core.mediator.store(Arc::new(mediator));
        self.core.settings.store(Arc::new(settings));
        self.core.room.notify_waiters();
        Ok(())
    }

    /// Adds or dismisses slots, all at once. A dismissed one ends what it has in its hands first.
    fn resize(&self, concurrency: usize) -> Result<(), laneway::ChangeError> {
        let mut parts = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut wanted, mut added, mut removed) = (parts.clone(), Vec::new(), Vec::new());
        let count = parts.len();
        for (part, slots) in wanted.iter_mut().enumerate() {
            let size = share(concurrency, count, part);
            while slots.len() < size {
                let name = format!("{}/{}", part_name(part), self.next_slot.fetch_add(1, Relaxed));
                added.push((name.clone(), part_name(part)));
                slots.push(name);
            }
            removed.extend(slots.drain(size..));
        }
        if !added.is_empty() || !removed.is_empty() {
            self.handle.change_workers(&added, &removed)?;
        }
        *parts = wanted;
        Ok(())
    }

    fn set_rate(&self, per_second: Option<f64>) {
        let parts = self.parts();
        let share = per_second.map(|rate| rate / parts.len() as f64);
        for part in parts {
            self.handle.set_pace(&part, share);
        }
    }

    /// What is known of a group beyond its lane.
    pub(crate) fn notes(&self, key: &GroupKey) -> GroupNotes {
        self.core.groups.notes(key)
    }

    /// What waits in a group, oldest first; its head is among it unless it is with its target.
    pub(crate) fn waiting(&self, key: &GroupKey, most: usize) -> Vec<Waiting> {
        self.handle.look(key, most, |message| Waiting {
            message: Arc::clone(&message.body.message),
            sequence: message.body.sequence,
        })
    }

    /// Lets those groups try at once whose next message waits for its target, if that is meant. One that is told to wait at this very moment may not have come to rest in its
    /// lane yet, and is not found.
    pub(crate) fn let_try(&self, is_meant: impl Fn(&str) -> bool) {
        let waiting = self.handle.find(usize::MAX, |message| {
            let job = &message.body;
            job.waits.then(|| (message.key.clone(), Arc::clone(&job.message)))
        });
        for (key, _) in waiting.into_iter().filter(|(_, message)| is_meant(&message.mediation_target)) {
            // Not one that is parked besides: that is for who parked it.
            let reason = self.handle.explain(&key).map(|explanation| explanation.reason);
            if let Some(Reason::Retry { .. }) = reason {
                self.handle.resume(&key);
            }
        }
    }

    /// Waiting messages with this id, and their groups.
    pub(crate) fn find_message(&self, id: &str, most: usize) -> Vec<(GroupKey, Waiting)> {
        self.handle.find(most, |message| {
            let job = &message.body;
            (job.message.id == id).then(|| {
                let waiting = Waiting { message: Arc::clone(&job.message), sequence: job.sequence };
                (message.key.clone(), waiting)
            })
        })
    }

    /// Groups whose names contain a text.
    pub(crate) fn find_groups(&self, part: &str, most: usize) -> Vec<(GroupKey, usize)> {
        self.core.groups.find(part, most)
    }

    /// Parks a group in front of its next message, until it is resumed. False if nothing of it is here and it is not parked.
    pub(crate) fn park(&self, key: &GroupKey, why: &str) -> bool {
        let parked = Parked::now(why);
        let parking = self.core.groups.park(key, Stop::new(parked.clone()));
        if !self.handle.park(key, why) {
            match parking {
                // One that has come meanwhile may have been stopped by it.
                Parking::New => {
                    self.go_on(key);
                }
                Parking::WasParked => return true,
                Parking::TooMany => {}
            }
            return false;
        }
        if let (GroupKey::Named(group), Parking::New) = (key, parking) {
            self.core.parks.note(&self.code, group, Some(parked));
        }
        self.core.room.notify_waiters();
        true
    }

    /// Lets a parked group go on, and one that waits for another attempt try at once. False if there was nothing to resume.
    pub(crate) fn resume(&self, key: &GroupKey) -> bool {
        let (stop, resumed) = self.go_on(key);
        if let (GroupKey::Named(group), Some(stop)) = (key, &stop) {
            self.core.note(group, stop, None);
        }
        stop.is_some() || resumed
    }

    /// What was remembered of its being parked, and whether its lane goes on.
    fn go_on(&self, key: &GroupKey) -> (Option<Stop>, bool) {
        let stop = self.core.groups.unpark(key);
        let resumed = self.let_go_on(key, stop.as_ref());
        (stop, resumed)
    }

    /// The lane of a group that is not parked any more goes on: now, or as soon as an attempt has parked it that was told to. Whether it was now.
    fn let_go_on(&self, key: &GroupKey, stop: Option<&Stop>) -> bool {
        let resumed = self.handle.resume(key);
        if stop.is_some_and(|stop| stop.by_attempt) && !resumed {
            tokio::spawn(see_it_go_on(self.handle.clone(), Arc::clone(&self.core), key.clone()));
        }
        resumed
    }

    /// Since when a group is parked, and why.
    pub(crate) fn parked(&self, key: &GroupKey) -> Option<Parked> {
        self.core.groups.parked(key)
    }

    /// Groups that are parked, the last ones first; so many at most.
    pub(crate) fn all_parked(&self, most: usize) -> Vec<(Arc<str>, Parked)> {
        let all = self.core.groups.all_parked(most).into_iter();
        let mut all: Vec<_> = all.map(|(key, parked)| (Arc::from(key.name()), parked)).collect();
        all.sort_by_key(|(_, parked): &(Arc<str>, Parked)| std::cmp::Reverse(parked.since));
        all
    }

    /// How many groups are parked, and how many messages they have here.
    pub(crate) fn parked_counts(&self) -> (usize, usize) {
        (self.core.groups.parked_groups(), self.core.groups.parked_messages())
    }

    /// A group is parked that was so in another pool.
    fn inherit(&self, group: &Arc<str>, stop: Stop) -> Parking {
        let parking = self.core.groups.park(&GroupKey::Named(Arc::clone(group)), stop.clone());
        if parking == Parking::New {
            self.core.note(group, &stop, Some(stop.parked.clone()));
        }
        parking
    }

    /// A group is parked that was so in a pool for which this one has stood in since the process was started.
    pub(crate) fn adopt(&self, code: Arc<str>, group: &Arc<str>, parked: Parked) {
        let stop = Stop { foreign: Some(code), ..Stop::new(parked) };
        if self.inherit(group, stop.clone()) == Parking::WasParked {
            self.core.note(group, &stop, None);
        }
    }

    /// A pool that has come gets what is parked for it here, also where no message of that is here.
    pub(crate) fn bequeath_foreign(&self, heir: &Pool) {
        for key in self.core.groups.parked_for(heir.code()) {
            let stop = self.core.bequeath(&key, heir, true);
            // With messages for it the lane goes back soon; those of others were stopped with them, and go on.
            if !self.handle.look(&key, usize::MAX, |message| message.body.is_for(&heir.code)).contains(&true)
            {
                self.let_go_on(&key, stop.as_ref());
            }
        }
    }

    /// A pool that goes leaves what is parked to the one that stands in for it.
    pub(crate) fn bequeath_parked(&self, heir: &Pool) {
        for (group, _) in self.all_parked(usize::MAX) {
            self.core.bequeath(&GroupKey::Named(group), heir, true);
        }
    }

    /// Gives back what would keep the default pool from being empty of another's messages for long.
    pub(crate) fn give_back_for(&self, heir: &Arc<Pool>) {
        self.give_back_stuck(Leaving::To(heir));
    }

    /// Gives back what would keep a source that stops from being done for long.
    pub(crate) fn give_back_to(&self, ledger: &Arc<Ledger>) {
        self.give_back_stuck(Leaving::From(ledger));
    }

    /// Where the pool is full while slots are idle, gives back what only waits for its target. To be called by whoever finds no room.
    pub(crate) fn make_room(&self) {
        if self.state() != PoolState::Open || self.free() > 0 {
            return;
        }
        let now = Instant::now();
        let mut next_look = self.next_look.lock().unwrap_or_else(PoisonError::into_inner);
        if now < *next_look {
            return;
        }
        *next_look = now + LOOK_FOR_STUCK;
        drop(next_look);
        let is_idle = self.core.groups.running() < self.settings().concurrency;
        if is_idle && self.give_back_stuck(Leaving::Patient) {
            // However slow it was until now, there is room in a moment.
            *self.core.tempo.lock().unwrap_or_else(PoisonError::into_inner) = Tempo::new();
        }
    }

    /// Gives groups back that would stay for long: those that are parked, and those whose next attempt is not due before the next [look](LOOK_FOR_STUCK).
    /// Whether there are any.
    fn give_back_stuck(&self, who: Leaving<'_>) -> bool {
        let keys =
            self.handle.find(usize::MAX, |message| who.includes(&message.body).then(|| message.key.clone()));
        let keys: std::collections::HashSet<GroupKey> = keys.into_iter().collect();
        let is_paused = self.state() == PoolState::Paused;
        let mut any = false;
        for key in keys {
            let reason = self.handle.explain(&key).map(|explanation| explanation.reason);
            let Some(delay) = reason.and_then(|reason| who.delay(reason, is_paused)) else { continue };
            if self.core.groups.bar_first(&key) {
                let heir = who.heir().cloned();
                any |= self.core.returns.send(Return { key, delay, if_idle: true, heir }).is_ok();
            }
        }
        any
    }

    /// How many messages a group has here.
    pub(crate) fn depth(&self, group: &str) -> usize {
        self.core.groups.depth(&self.key(group))
    }

    /// See [`Groups::key`].
    pub(crate) fn key(&self, group: &str) -> GroupKey {
        self.core.groups.key(group)
    }

    /// See [`Groups::survey`].
    pub(crate) fn survey(&self, from: usize, budget: usize, visit: impl FnMut(&GroupKey, usize)) -> usize {
        self.core.groups.survey(from, budget, visit)
    }

    /// See [`Groups::each_in_flight`].
    pub(crate) fn each_in_flight(&self, visit: impl FnMut(&GroupKey, Instant)) {
        self.core.groups.each_in_flight(visit);
    }

    /// For how long slots were busy since the pool was started; `more` is what those under way have added until now.
    pub(crate) fn busy(&self, more: u64) -> u64 {
        self.core.busy.fetch_add(more, Relaxed) + more
    }

    pub(crate) fn handle(&self) -> &Handle<GroupKey, Job> {
        &self.handle
    }

    pub(crate) fn explain(&self, key: &GroupKey) -> Option<Explanation<GroupKey>> {
        self.handle.explain(key)
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.handle.snapshot()
    }

    pub(crate) fn group_count(&self) -> usize {
        self.core.groups.count()
    }

    pub(crate) fn counts(&self) -> PoolCounts {
        let counters = &self.core.counters;
        let refused_pool_full = counters.refused_pool_full.load(Relaxed);
        let refused_group_full = counters.refused_group_full.load(Relaxed);
        let refused_not_open = counters.refused_not_open.load(Relaxed);
        PoolCounts {
            submitted: counters.submitted.load(Relaxed),
            succeeded: counters.succeeded.load(Relaxed),
            failed: counters.failed.load(Relaxed),
            transient: counters.transient.load(Relaxed),
            held_back: counters.held_back.load(Relaxed),
            refused: refused_pool_full + refused_group_full + refused_not_open,
            refused_pool_full,
            refused_group_full,
            refused_not_open,
            given_back: counters.given_back.load(Relaxed),
        }
    }

    /// Waits until nothing is here any more, or the time is up.
    pub(crate) async fn wait_empty(&self, deadline: Instant) -> bool {
        let _watcher = Watcher::new(&self.core.watchers);
        loop {
            let left = self.core.room.notified();
            if self.held() == 0 {
                return true;
            }
            if tokio::time::timeout_at(deadline, left).await.is_err() {
                return self.held() == 0;
            }
        }
    }

    /// Waits until nothing will happen here without somebody's doing, or the time is up: what is parked or paused can only go back.
    pub(crate) async fn wait_quiet(&self, deadline: Instant) {
        let _watcher = Watcher::new(&self.core.watchers);
        while self.held() > 0 && !self.handle.is_quiet() && Instant::now() < deadline {
            // A group that is parked tells nobody, so this looks again now and then.
            let next = deadline.min(Instant::now() + LOOK);
            let _ = tokio::time::timeout_at(next, self.core.room.notified()).await;
        }
    }

    /// Waits until no attempt is under way, or the time is up.
    async fn wait_for_attempts(&self, deadline: Instant) {
        let _watcher = Watcher::new(&self.core.watchers);
        let is_busy = || self.handle.snapshot().dispatchers.iter().any(|part| part.in_flight > 0);
        while is_busy() && Instant::now() < deadline {
            // An attempt that failed ends without a message leaving, so this looks again now and then.
            let next = deadline.min(Instant::now() + LOOK);
            let _ = tokio::time::timeout_at(next, self.core.room.notified()).await;
        }
    }

    /// Ends the pool: no more attempts begin, those under way have [`GRACE`], and the rest goes back to its source.
    pub(crate) async fn end(&self) -> Ended {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(engine) = engine else { return Ended::default() };
        self.handle.close();
        for part in self.parts() {
            self.handle.pause(&part);
        }
        self.wait_for_attempts(Instant::now() + GRACE).await;
        let ended = tokio::task::spawn_blocking(move || engine.shutdown(Duration::ZERO)).await;
        // It keeps the engine alive, and has nothing to give back any more.
        self.returning.abort();
        let Ok(report) = ended else { return Ended::default() };
        let ended = Ended { given_back: report.returned.len(), still_running: report.still_running };
        for mut message in report.returned {
            if let Some(held) = message.body.held.take() {
                held.settle(Disposal::GiveBack { delay: Duration::ZERO });
            }
        }
        ended
    }
}

fn part_name(part: usize) -> String {
    format!("part-{part}")
}

/// How many of so many slots a part gets; at least one.
fn share(slots: usize, parts: usize, part: usize) -> usize {
    (slots / parts + usize::from(part < slots % parts)).max(1)
}

fn build(core: &Arc<Core>, slots: &[Vec<String>]) -> Engine<GroupKey, Job> {
    let mut topology = Topology::builder();
    for (part, slots) in slots.iter().enumerate() {
        topology = topology.dispatcher(part_name(part));
        for slot in slots {
            topology = topology.worker(slot, [part_name(part)]);
        }
    }
    let (handler, failed) = (Arc::clone(core), Arc::clone(core));
    Engine::builder()
        .topology(topology.build())
        // The pool's own bounds can be changed while it runs; the engine's stand behind them.
        .ingress_capacity(CAPACITY_MAX)
        .worker_queue_capacity(CAPACITY_MAX)
        .overflow(Overflow::Reject)
        // A group gives way after every message: its next one may be a minute's work.
        .batch_max(1)
        // It was waited for before: here a thread would have to.
        .shutdown_grace(LOOK)
        // A call of a target takes a thousand times as long as timing it.
        .latency_sampling(1)
        // The pool counts attempts itself, by settings that may change; the engine must not stop before it.
        .retry(RetryPolicy { max_attempts: u32::MAX, ..RetryPolicy::default() })
        .on_fail(move |message, failure| failed.fail(message.body, failure))
        .handle_async(move |delivery| {
            let core = Arc::clone(&handler);
            async move { core.attempt(delivery).await }
        })
        .build()
        .expect("settings were checked, and the names are ours")
}

/// Resumes a lane that an attempt was about to park when its group was resumed.
async fn see_it_go_on(handle: Handle<GroupKey, Job>, core: Arc<Core>, key: GroupKey) {
    for _ in 0..LOOKS {
        if core.groups.parked(&key).is_some() || core.groups.is_running(&key) {
            return;
        }
        match handle.explain(&key).map(|explanation| explanation.reason) {
            Some(Reason::Parked { .. }) => {
                handle.resume(&key);
                return;
            }
            Some(Reason::Running { .. } | Reason::PerhapsRunning) => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            _ => return,
        }
    }
}

/// Gives back what keeps a draining pool from being empty, until it is, or ends.
async fn let_go(pool: Arc<Pool>) {
    while pool.held() > 0 && !pool.core.returns.is_closed() {
        pool.give_back_stuck(Leaving::All);
        tokio::time::sleep(LOOK_FOR_STUCK).await;
    }
}

/// Gives whole groups back, one after the other. The steps are numbered at the head of this file.
async fn give_back_all(
    handle: Handle<GroupKey, Job>,
    core: Arc<Core>,
    mut returned: mpsc::UnboundedReceiver<Return>,
) {
    while let Some(Return { key, delay, if_idle, heir }) = returned.recv().await {
        drop(core.routing.write().unwrap_or_else(PoisonError::into_inner));
        let messages = loop {
            match handle.withdraw(&key) {
                Some(messages) => break messages,
                // It goes on, so nobody waits for it any more.
                None if if_idle => break Vec::new(),
                // The attempt that sent it here has not quite ended.
                None => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        };
        if let Some(heir) = heir.filter(|_| !messages.is_empty()) {
            let is_for_heir = |message: &Placed| message.body.is_for(heir.code());
            // While nobody ends it, and before it may open.
            let _quiet = core.routing.read().unwrap_or_else(PoisonError::into_inner);
            if heir.state() != PoolState::Draining {
                core.bequeath(&key, &heir, messages.iter().all(is_for_heir));
            }
        }
        core.counters.given_back.fetch_add(messages.len() as u64, Relaxed);
        for mut message in messages {
            if let Some(held) = message.body.held.take() {
                held.settle(Disposal::GiveBack { delay });
            }
        }
        let _quiet = core.routing.write().unwrap_or_else(PoisonError::into_inner);
        core.groups.unbar(&key);
    }
}
