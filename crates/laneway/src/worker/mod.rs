//! Workers: look for a lane, run its turn, settle it, and sleep when there is none.
//!
//! [`Worker`] is that loop cut into steps without any waiting in them. The flavours beside this file do the waiting: a thread
//! (`thread.rs`), a slot on tokio (`slot.rs`), and the simulator (`sim/`), which takes one step at a time.
//!
//! # How a worker that serves several dispatchers sleeps
//!
//! It lies down at one after the other. If it finds work at the third, it gets up from the first two again. Somebody may have taken
//! it off their lists meanwhile to wake it, or it may have kept the time there; whichever it was, it is handed on when the worker takes work elsewhere.

mod sleeper;
#[cfg(feature = "tokio")]
pub(crate) mod slot;
mod supply;
pub(crate) mod thread;

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use self::supply::Gauge;
pub(crate) use self::{
    sleeper::{Sleeper, Sleepers},
    supply::Supply,
};
use crate::{
    dispatcher::{Asleep, Dispatcher, Found},
    engine::Shared,
    handler::{Run, RunTurn, Surroundings, Turns},
    lane::{Ending, Hand, Turn, Wants},
    stats::{Tally, WorkerCounters},
    sync::{Mutex, lock},
};

/// What an idle worker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitStrategy {
    /// Sleeps, after having offered its core to others a few times. Costs nothing while idle; a wake-up takes some 25 µs.
    #[default]
    Park,
    /// Looks again and again for 100 µs, then sleeps. For loads whose pauses are short.
    SpinThenPark,
    /// Never sleeps, but offers its core to others between two looks.
    Yield,
    /// Never sleeps and never gives way: the least latency, for a core of its own.
    BusySpin,
}

/// How long a worker sleeps when all of its dispatchers are taken by others, again and again: document 001's backoff.
///
/// An acquired lock resets it. Before the first sleep a worker pauses for a few hundred cycles a few times, which is
/// as long as the lock is usually held.
#[derive(Clone, Debug, PartialEq)]
pub struct Backoff {
    /// The first sleep.
    pub base: Duration,
    /// What each further one is multiplied by, above 1.
    pub multiplier: f64,
    /// The longest.
    pub max: Duration,
}

impl Default for Backoff {
    /// 10 µs, × 1.5, at most 10 ms.
    fn default() -> Self {
        Backoff { base: Duration::from_micros(10), multiplier: 1.5, max: Duration::from_millis(10) }
    }
}

impl Backoff {
    /// The sleep after this many failed cycles in a row, from 1.
    ///
    /// ```
    /// use laneway::Backoff;
    /// let backoff = Backoff::default();
    /// assert_eq!(backoff.sleep_after(1).as_micros(), 10);
    /// assert_eq!(backoff.sleep_after(10).as_micros(), 384);
    /// assert_eq!(backoff.sleep_after(20).as_micros(), 10_000);
    /// ```
    pub fn sleep_after(&self, failures: u32) -> Duration {
        let exponent = failures.saturating_sub(1).min(1_000) as i32;
        let seconds = self.base.as_secs_f64() * self.multiplier.powi(exponent);
        if seconds.is_finite() && seconds < self.max.as_secs_f64() {
            Duration::from_secs_f64(seconds)
        } else {
            self.max
        }
    }
}

/// How long turns should be, learnt from the messages that were timed.
///
/// A turn holds its worker. While handlers take nanoseconds, long turns are cheap and spare locks; when they take milliseconds, a turn of
/// `batch_max` would keep every other lane of the dispatcher waiting for its whole length. So turns start at one message and grow as far as they fit
/// into [`SLICE`]; and a turn that turns out to be slow ends at the next message.
#[derive(Debug)]
pub(crate) struct Tempo {
    /// Average time of a message, in nanoseconds. Slow until known better.
    average: u64,
    /// Messages until the next one that is timed: none where they are slow.
    countdown: u32,
    /// Time spent in this turn, as far as it was measured.
    spent: u64,
    /// When the clock was last read.
    pub(crate) now: u64,
    /// Whether it has had nothing to do since, so that it may be any time now.
    pub(crate) rested: bool,
}

/// A turn should not take longer than this: a small multiple of what a wake-up costs, and not noticed by a person.
const SLICE: u64 = 1_000_000;

/// From here on messages are slow: every one of them is timed, and `explain` is told whose turn it is.
const SLOW: u64 = 50_000;

/// How many lanes a worker that has a dispatcher to itself claims at once, and how many messages. Enough that the lock does not
/// count, few enough that they stay in the cache. Measured: 64 to 512 lanes are alike.
const HAND_LANES: usize = 128;
const HAND_MESSAGES: usize = 512;

/// While messages are quick, one in this many is timed.
const TIMED_ONE_IN: u32 = 64;

impl Tempo {
    pub(crate) fn new() -> Self {
        Tempo { average: SLICE, countdown: 0, spent: 0, now: 0, rested: true }
    }

    pub(crate) fn is_slow(&self) -> bool {
        self.average >= SLOW
    }

    /// How many messages the next turn may have.
    pub(crate) fn limit(&self, most: usize) -> usize {
        ((SLICE / self.average.max(1)) as usize).clamp(1, most)
    }

    /// Expects this many messages to fit into a turn; for the simulator.
    pub(crate) fn expect(&mut self, messages: usize) {
        self.average = SLICE / messages.max(1) as u64;
        self.countdown = 0;
    }

    pub(crate) fn begin(&mut self) {
        self.spent = 0;
    }

    #[inline]
    pub(crate) fn wants_time(&mut self) -> bool {
        let wants = self.countdown == 0;
        self.countdown -= u32::from(!wants);
        wants
    }

    pub(crate) fn learn(&mut self, started: u64, ended: u64) {
        let took = ended - started;
        self.average = if took > self.average { took } else { (self.average * 3 + took) / 4 };
        self.spent += took;
        (self.now, self.rested) = (ended, false);
        self.countdown = if self.is_slow() { 0 } else { TIMED_ONE_IN };
    }

    /// It is so late by now.
    fn look_up(&mut self, now: u64) {
        (self.now, self.rested) = (self.now.max(now), false);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.spent >= SLICE
    }
}

thread_local! {
    /// The engine for which this thread must not wait, by the address of its shared state, 0 for none; and whether that is because it runs a handler of it.
    static INSIDE: Cell<(usize, bool)> = const { Cell::new((0, false)) };
}

/// Marks this thread as one that must not wait for an engine: what it waits for could not come.
pub(crate) struct Inside((usize, bool));

impl Inside {
    /// A handler, or what is called in its place.
    pub(crate) fn enter(engine: usize) -> Self {
        Inside(INSIDE.replace((engine, true)))
    }

    /// Whoever operates an engine in a simulation: nobody else takes a step meanwhile. It may change the topology, which does not wait there.
    pub(crate) fn enter_simulated(engine: usize) -> Self {
        Inside(INSIDE.replace((engine, false)))
    }

    /// Whether to wait for this engine would be to wait for ever.
    pub(crate) fn is(engine: usize) -> bool {
        INSIDE.get().0 == engine
    }

    /// Whether a handler of this engine is running.
    pub(crate) fn is_handler(engine: usize) -> bool {
        INSIDE.get() == (engine, true)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

/// A worker's place in the topology: what others may change while it works.
pub(crate) struct Seat<K, M> {
    pub(crate) number: usize,
    pub(crate) name: String,
    pub(crate) counters: WorkerCounters,
    /// Told to go.
    pub(crate) dismissed: AtomicBool,
    /// Has gone.
    pub(crate) gone: AtomicBool,
    row: Mutex<Vec<Arc<Dispatcher<K, M>>>>,
    /// Raised whenever the row is changed.
    version: AtomicU64,
}

impl<K, M> Seat<K, M> {
    pub(crate) fn new(number: usize, name: String, row: Vec<Arc<Dispatcher<K, M>>>) -> Self {
        Seat {
            number,
            name,
            counters: WorkerCounters::default(),
            dismissed: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            row: Mutex::new(row),
            version: AtomicU64::new(1),
        }
    }

    pub(crate) fn serves(&self) -> Vec<Arc<Dispatcher<K, M>>> {
        lock(&self.row).clone()
    }

    pub(crate) fn assign(&self, row: Vec<Arc<Dispatcher<K, M>>>) {
        *lock(&self.row) = row;
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// What a worker found when it looked at its dispatchers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// A turn, now in its hands.
    Turn,
    /// Nothing anywhere.
    Nothing,
    /// All that it looked at were taken by others.
    Contended,
    /// It is not needed any more.
    Leave,
}

/// A worker.
pub(crate) struct Worker<K, M> {
    pub(crate) shared: Arc<Shared<K, M>>,
    pub(crate) seat: Arc<Seat<K, M>>,
    pub(crate) sleeper: Sleeper,
    row: Vec<Arc<Dispatcher<K, M>>>,
    version: u64,
    /// Where the next look begins.
    cursor: usize,
    /// Whose turn it has in its hands, if any.
    serving: Option<usize>,
    /// Where it left something to be seen to when it got up, and has not looked since.
    owed: Vec<usize>,
    hand: Hand<K, M>,
    pub(crate) tally: Tally,
    pub(crate) tempo: Tempo,
    /// Failed cycles in a row.
    pub(crate) failures: u32,
    turns: Turns,
    gauge: Gauge,
    /// What it says about the next look.
    pub(crate) supply: Supply,
    /// Messages that had been released when the current turn began.
    released_before: u64,
    /// What to tell the mappings once a hand is settled.
    released_turns: Vec<(u64, u64)>,
}

impl<K, M> Worker<K, M>
where
    K: Clone,
{
    pub(crate) fn new(
        shared: Arc<Shared<K, M>>,
        seat: Arc<Seat<K, M>>,
        sleeper: Sleeper,
        turns: Turns,
    ) -> Self {
        Worker {
            shared,
            seat,
            sleeper,
            row: Vec::new(),
            version: 0,
            cursor: 0,
            serving: None,
            owed: Vec::new(),
            hand: Hand::new(),
            tally: Tally::default(),
            tempo: Tempo::new(),
            failures: 0,
            turns,
            gauge: Gauge::new(),
            supply: Supply::Plenty,
            released_before: 0,
            released_turns: Vec::new(),
        }
    }

    /// What it wants of a dispatcher. Several lanes at once only where nobody else could have run them meanwhile, and
    /// as much as fits into a slice of time.
    fn wants(&self, dispatcher: &Dispatcher<K, M>) -> Wants<K> {
        let most = self.shared.settings.batch_max;
        let is_full = self.turns == Turns::Full;
        let alone =
            !is_full && self.turns != Turns::OneLane && dispatcher.servers.load(Ordering::Relaxed) == 1;
        let quick = alone && !self.tempo.is_slow();
        let lanes = if quick { HAND_LANES } else { 1 };
        Wants {
            worker: self.seat.number as u32,
            now: self.tempo.now,
            rested: self.tempo.rested,
            turn: if is_full { most } else { self.tempo.limit(most) },
            lanes: lanes.min(self.tempo.limit(HAND_LANES)),
            messages: self.tempo.limit(HAND_MESSAGES),
            stream: quick
                && self.turns == Turns::OfAnyKeys
                && self.shared.mappings.is_none()
                && !self.shared.needs_keys,
            slow: self.tempo.is_slow(),
            holder: (self.tempo.is_slow() || self.shared.needs_keys).then_some(K::clone as fn(&K) -> K),
        }
    }

    /// The turn in its hands.
    pub(crate) fn turn(&mut self) -> &mut Turn<K, M> {
        self.hand.turn()
    }

    /// Looks at its dispatchers, round-robin, for a turn.
    pub(crate) fn look(&mut self) -> Look {
        if self.seat.dismissed.load(Ordering::Acquire) {
            return Look::Leave;
        }
        self.refresh();
        let counters = &self.seat.counters;
        WorkerCounters::add(&counters.polls, 1);
        let all = self.row.len();
        let (mut taken, mut stopped) = (0, 0);
        for step in 0..all {
            let place = (self.cursor + step) % all;
            WorkerCounters::add(&counters.lock_attempts, 1);
            let wants = self.wants(&self.row[place]);
            match self.row[place].claim(&wants, &mut self.hand, &self.shared.clock) {
                Found::Turn => {
                    self.took(place);
                    return Look::Turn;
                }
                Found::Nothing => self.failures = 0,
                Found::NothingYet => {
                    self.failures = 0;
                    self.owed.push(place);
                }
                Found::Stopped => stopped += 1,
                Found::Taken => {
                    WorkerCounters::add(&counters.lock_failures, 1);
                    taken += 1;
                }
            }
        }
        match (stopped == all, taken) {
            (true, _) => Look::Leave,
            (false, 0) => {
                self.owed.clear();
                self.tempo.rested = true;
                Look::Nothing
            }
            (false, _) => Look::Contended,
        }
    }

    fn took(&mut self, place: usize) {
        self.cursor = (place + 1) % self.row.len();
        self.serving = Some(place);
        self.failures = 0;
        self.tempo.look_up(self.hand.filled_at());
        for owed in self.owed.drain(..) {
            if owed != place {
                self.row[owed].pass_on();
            }
        }
    }

    /// Learns of changes to its row. Only between turns and while up.
    fn refresh(&mut self) {
        let version = self.seat.version.load(Ordering::Acquire);
        if version != self.version {
            // What it left to be seen to is somebody else's now: the row may not have those dispatchers any more.
            for owed in self.owed.drain(..) {
                self.row[owed].pass_on();
            }
            self.row = self.seat.serves();
            self.version = version;
            self.cursor = 0;
        }
    }

    /// Runs the turn in its hands.
    pub(crate) fn run(&mut self, handler: &dyn RunTurn<K, M>) -> Ending {
        let _inside = Inside::enter(self.shared.address());
        self.tempo.begin();
        handler.run(&mut self.hand())
    }

    /// The turn in its hands, with what is needed to run it.
    pub(crate) fn hand(&mut self) -> Run<'_, K, M> {
        let place = self.serving.expect("a turn in hand");
        Run {
            turn: self.hand.turn(),
            tally: &mut self.tally,
            tempo: &mut self.tempo,
            around: Surroundings {
                clock: &self.shared.clock,
                retry: &self.shared.settings.retry,
                on_fail: self.shared.settings.on_fail.as_ref(),
                give_way: &self.shared.give_way,
                dispatcher: &self.row[place].name,
                worker: self.seat.number,
            },
        }
    }

    /// Ends the turn in its hands. True if there is another one: in the same hand, or, for a worker with one dispatcher, claimed under the
    /// lock under which this hand was settled.
    pub(crate) fn settle(&mut self, ending: Ending) -> bool {
        self.tally.turns += 1;
        let released = self.tally.released();
        let of_this_turn = released - std::mem::replace(&mut self.released_before, released);
        // Once messages turn out to be slow, what is left in the hand goes back: other lanes may be more urgent by now.
        if self.hand.end(ending, of_this_turn) && !self.tempo.is_slow() {
            return true;
        }
        let place = self.serving.take().expect("a turn in hand");
        self.supply = match self.hand.drained() {
            _ if self.tempo.is_slow() => Supply::Plenty,
            Some(came) => self.gauge.streamed(came),
            // Others of its row would wait with it.
            None if self.row.len() > 1 => Supply::Plenty,
            None => self.gauge.ran(self.tally.turns, self.tally.started),
        };
        let stays = self.row.len() == 1
            && self.supply == Supply::Plenty
            && !self.seat.dismissed.load(Ordering::Acquire)
            && self.seat.version.load(Ordering::Acquire) == self.version;
        let wants = stays.then(|| self.wants(&self.row[place]));
        let found = self.settle_hand(place, wants.as_ref());
        if found == Found::Turn {
            self.took(place);
        }
        found == Found::Turn
    }

    /// Registers as a sleeper everywhere. `None` if it should look again instead; else until when it may sleep.
    pub(crate) fn lie_down(&mut self) -> Option<Option<u64>> {
        let mut until: Option<u64> = None;
        for place in 0..self.row.len() {
            let (quick, quiet) = (!self.tempo.is_slow(), |deserted| self.shared.found_quiet(deserted));
            match self.row[place].fall_asleep(&self.sleeper, quick, &self.shared.clock, &quiet) {
                Asleep::Until(due) => until = until.into_iter().chain(due).min(),
                Asleep::Not => {
                    self.get_up_from(place);
                    return None;
                }
            }
        }
        let changed = self.seat.version.load(Ordering::Acquire) != self.version;
        if changed || self.seat.dismissed.load(Ordering::Acquire) {
            self.get_up_from(self.row.len());
            return None;
        }
        WorkerCounters::add(&self.seat.counters.parks, 1);
        self.gauge.rested();
        Some(until)
    }

    /// Is up again.
    pub(crate) fn get_up(&mut self) {
        WorkerCounters::add(&self.seat.counters.wake_ups, 1);
        self.get_up_from(self.row.len());
    }

    fn get_up_from(&mut self, places: usize) {
        for place in 0..places {
            if self.row[place].rise(&self.sleeper, true) {
                self.owed.push(place);
            }
        }
    }

    /// Is idle and will look again at once: tells those who wait for that, as lying down does.
    pub(crate) fn stay_up(&self) {
        self.row.iter().for_each(|dispatcher| dispatcher.room.made_last(dispatcher.released()));
        self.shared.quiet.stir();
    }

    /// How long it sleeps after so many failed cycles: the shortest time of any of its dispatchers.
    pub(crate) fn backoff_after(&self, failures: u32) -> Duration {
        let engine = &self.shared.settings.backoff;
        let of = |dispatcher: &Arc<Dispatcher<K, M>>| {
            dispatcher.limits.backoff.as_ref().unwrap_or(engine).sleep_after(failures)
        };
        self.row.iter().map(of).min().unwrap_or(engine.max)
    }

    /// Whether a look would probably find something.
    pub(crate) fn looks_busy(&self) -> bool {
        self.row.iter().any(|dispatcher| dispatcher.looks_busy())
    }
}

impl<K, M> Worker<K, M> {
    /// Settles all that is in its hands, and claims more if it wants.
    fn settle_hand(&mut self, place: usize, wants: Option<&Wants<K>>) -> Found {
        // Before the lanes know: who finds the engine quiet afterwards finds this counted, too.
        WorkerCounters::add(&self.seat.counters.handled, self.tally.started);
        WorkerCounters::add(&self.seat.counters.turns, self.tally.turns);
        // To settle is to take the dispatcher, too, and perhaps to look for more.
        WorkerCounters::add(&self.seat.counters.polls, u64::from(wants.is_some()));
        WorkerCounters::add(&self.seat.counters.lock_attempts, 1);
        if self.shared.mappings.is_some() {
            self.shared.unmapping.fetch_add(1, Ordering::AcqRel);
            self.released_turns
                .extend(self.hand.turns().iter().map(|turn| (turn.fingerprint, turn.released)));
        }
        let Shared { engine_bound: bound, moves, clock, .. } = &*self.shared;
        let (parcels, found, waited) =
            self.row[place].settle(&mut self.hand, &self.tally, wants, bound, moves, clock);
        WorkerCounters::add(&self.seat.counters.lock_failures, u64::from(waited));
        for (fingerprint, released) in self.released_turns.drain(..) {
            self.shared.unmap(fingerprint, released);
        }
        if self.shared.mappings.is_some() {
            self.shared.unmapping.fetch_sub(1, Ordering::AcqRel);
            self.shared.quiet.stir();
        }
        self.tally.clear();
        self.released_before = 0;
        for parcel in parcels {
            self.shared.deliver(parcel);
        }
        self.hand.drop_spent();
        if self.row[place].bars_streams() {
            self.shared.quiet.stir();
        }
        found
    }
}

/// A worker that goes, for whatever reason, gives back what it has in its hands and hands its wake-ups on.
impl<K, M> Drop for Worker<K, M> {
    fn drop(&mut self) {
        if let Some(place) = self.serving.take() {
            let released = self.tally.released() - self.released_before;
            self.hand.end(Ending::Handled, released);
            self.settle_hand(place, None);
        }
        for dispatcher in &self.row {
            dispatcher.rise(&self.sleeper, false);
            dispatcher.pass_on();
        }
        self.seat.gone.store(true, Ordering::Release);
        #[cfg(feature = "tokio")]
        self.shared.close_if_abandoned();
        self.shared.quiet.stir();
    }
}

#[cfg(test)]
mod tests {
    use foldhash::{SharedSeed, quality::SeedableRandomState};

    use super::*;
    use crate::{Engine, Topology, builder::Spawn, clock::Clock};

    #[test]
    fn pitfall_001_4_a_dispatcher_that_could_be_looked_at_ends_the_backoff() {
        let topology = Topology::builder().dispatcher("a").dispatcher("b").worker("w", ["a", "b"]).build();
        let builder = Engine::<u8, u8>::builder().topology(topology);
        let hasher = SeedableRandomState::with_seed(1, SharedSeed::global_fixed());
        let shared = builder.assemble(Clock::real(), Spawn::Simulated, hasher);
        let layout = shared.layout.load_full();
        let sleeper = Sleeper::simulated(0, Arc::new(AtomicBool::new(false)));
        let mut worker = Worker::new(shared.clone(), layout.seats[0].clone(), sleeper, Turns::OfAnyKeys);
        let [a, b] = &layout.dispatchers[..] else { panic!("two dispatchers") };
        let (a, b) = (a.lock_for_change(), b.lock_for_change());
        worker.failures = 20;
        assert_eq!(worker.look(), Look::Contended);
        assert_eq!(worker.failures, 20, "a full failed cycle: the caller counts it");
        drop(a);
        assert_eq!(worker.look(), Look::Contended);
        assert_eq!(worker.failures, 0, "one of them was empty, but not taken");
        drop(b);
        assert_eq!(worker.look(), Look::Nothing);
        worker.failures = 20;
        shared.submit((1, 1).into(), crate::engine::Patience::None).unwrap();
        assert_eq!((worker.look(), worker.failures), (Look::Turn, 0));
    }

    /// A worker that serves "a" and "b", of which "b" has a backoff of its own, and nobody else.
    fn worker() -> Worker<u8, u8> {
        let base = Duration::from_micros(3);
        let own = Backoff { base, ..Backoff::default() };
        let topology = Topology::assigned([["a", "b"]], |_: &u8| "a").backoff_of("b", own);
        let builder = Engine::builder().topology(topology).handle(|_, _: &mut u8| ());
        let shared = builder.assemble(Clock::real(), Spawn::Simulated, SeedableRandomState::random());
        let seat = shared.layout.load().seats[0].clone();
        let mut worker = Worker::new(
            shared,
            seat,
            Sleeper::simulated(0, Arc::new(AtomicBool::new(false))),
            Turns::OfAnyKeys,
        );
        worker.refresh();
        worker
    }

    /// It once did, which cost every event of a processor a clock, a lock and two look-ups.
    #[test]
    fn a_placement_that_looks_at_the_key_alone_remembers_nothing() {
        assert!(worker().shared.mappings.is_none());
    }

    #[test]
    fn the_backoff_is_the_shortest_of_its_dispatchers() {
        let worker = worker();
        assert_eq!(worker.backoff_after(1), Duration::from_micros(3));
        assert_eq!(worker.backoff_after(1_000), Duration::from_millis(10));
    }

    /// Pitfall 001.4: only a full failed cycle is a failure, and a lock that was had, work or not, forgives all of them.
    #[test]
    fn pitfall_001_4_a_lock_that_was_had_resets_the_backoff_and_half_a_cycle_is_no_failure() {
        let mut worker = worker();
        let row = worker.row.clone();
        let (a, b) = (row[0].lock_for_change(), row[1].lock_for_change());
        for failures in 1..=20 {
            assert_eq!(worker.look(), Look::Contended);
            thread::back_off(&mut worker);
            assert_eq!(worker.failures, failures);
        }
        let sleeps = worker.seat.counters.read("").backoff_sleeps;
        assert!(sleeps > 0, "a worker that fails again and again sleeps");
        drop(a);
        assert_eq!(worker.look(), Look::Contended, "one of two was taken: it looks again");
        assert_eq!(worker.failures, 0, "the lock of the other was had");
        drop(b);
        assert_eq!(worker.look(), Look::Nothing);
        let stats = worker.seat.counters.read("");
        assert_eq!((stats.polls, stats.lock_attempts, stats.lock_failures), (22, 44, 41));
        assert_eq!(stats.backoff_sleeps, sleeps);
    }
}
