//! The engine in virtual time: the real code, nobody's threads, one seed for one interleaving.
//!
//! A [`Sim`] holds an engine whose workers are not threads but state machines. Each [step](Sim::step) picks one that could move (a worker, a
//! producer, an operation whose time has come), by a seeded choice, and lets it do one thing: submit a message, look for a turn, run it, settle
//! it, lie down. When nobody can move, time jumps to the next thing that is due. After each step everything that must be true
//! is checked: the account of each dispatcher, its bounds, the structure of its lanes, that no key is in two hands, and that nobody sleeps beside
//! work. (All lanes are counted for that; with very many of them, look [less often](Sim::audit_every).) What is wrong comes back as a [`Violation`], with the
//! seed that shows it again.
//!
//! It is how the engine itself is tested (`tests/simulation.rs`), and it is for testing your handlers: give it your
//! builder, faults, and a seed.
//!
//! ```
//! use laneway::{Engine, Topology, sim::{Faults, Sim}};
//! use std::sync::{Arc, Mutex};
//! use std::time::Duration;
//!
//! let seen = Arc::new(Mutex::new(Vec::new()));
//! let witness = seen.clone();
//! let builder = Engine::builder()
//!     .topology(Topology::pool(4))
//!     .handle(move |_, body: &mut u32| witness.lock().unwrap().push(*body));
//!
//! let mut sim = Sim::new(7, builder)?;
//! sim.faults(Faults { fail: 0.3, ..Faults::none() });
//! sim.service(|_, _, random| Duration::from_millis(random.u64(10..20)));
//! sim.produce((0..100).map(|n| ("order", n)));
//! sim.run()?;
//!
//! let seen = seen.lock().unwrap();
//! assert!(seen.is_sorted(), "in order, whatever fails");
//! assert!(sim.now() >= Duration::from_secs(1), "and it took no time at all");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod time;

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    hash::Hash,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use foldhash::{SharedSeed, quality::SeedableRandomState};

pub use fastrand::Rng;
pub use time::Time;

use crate::{
    Builder, Handle, Message, Outcome, Overflow, Refusal, ShutdownReport,
    builder::{HandlerKind, Spawn},
    clock::{Clock, nanos},
    dispatcher::{Audited, Dispatcher},
    engine::{Layout, Patience, Shared},
    error::BuildError,
    lane::Ending,
    topology::check,
    worker::{Inside, Look, Seat, Sleeper, Worker},
};

/// What goes wrong by itself, each with a probability from 0 to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Faults {
    /// A message fails before the handler gets it, as if the handler had panicked.
    pub fail: f64,
    /// A worker dies with a turn in its hands, before it has run it, and is replaced.
    pub crash: f64,
    /// A turn of a sync handler takes a hundred times as long as [`service`](Sim::service) says. Async handlers take the time that they sleep, whatever is said here.
    pub stall: f64,
}

impl Faults {
    /// Nothing.
    pub fn none() -> Self {
        Faults { fail: 0.0, crash: 0.0, stall: 0.0 }
    }
}

/// Something that must never be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which interleaving shows it: `Sim::new` with this seed, and the same program.
    pub seed: u64,
    /// After how many steps.
    pub step: u64,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, step {}: {}", self.seed, self.step, self.what)
    }
}

impl std::error::Error for Violation {}

/// Where a simulated worker is.
enum Phase<K, M> {
    /// About to look for work.
    Up,
    /// Asleep, until woken or until then.
    Asleep { until: Option<u64> },
    /// Has a turn, and has not run it.
    Claimed,
    /// Has run its turn, which takes until then.
    Busy { until: u64, ending: Ending },
    /// Waits for the future of one message.
    #[cfg_attr(not(feature = "tokio"), expect(dead_code, reason = "there are no async handlers without it"))]
    Async(Flight<K, M>),
    /// Has left.
    Gone,
}

/// An async handler on its way.
#[cfg(feature = "tokio")]
struct Flight<K, M> {
    future: crate::worker::slot::BoxFuture,
    hand: crate::worker::slot::HandOver<K, M>,
    waker: Arc<time::Flag>,
}

/// Without tokio there are no async handlers.
#[cfg(not(feature = "tokio"))]
struct Flight<K, M>(std::convert::Infallible, std::marker::PhantomData<(K, M)>);

#[cfg(not(feature = "tokio"))]
impl<K, M> Flight<K, M> {
    fn can_be_polled(&self) -> bool {
        match self.0 {}
    }
}

#[cfg(feature = "tokio")]
impl<K, M> Flight<K, M> {
    fn can_be_polled(&self) -> bool {
        self.waker.is_raised()
    }
}

struct Actor<K, M> {
    seat: Arc<Seat<K, M>>,
    /// `None` between the death of one and the birth of the next.
    worker: Option<Worker<K, M>>,
    woken: Arc<AtomicBool>,
    phase: Phase<K, M>,
}

struct Producer<K, M> {
    messages: Box<dyn Iterator<Item = Message<K, M>>>,
    /// One that found no room, and waits as [`Overflow::Block`] says.
    held: Option<Message<K, M>>,
    /// What had been released when it was turned away: before that changes there is no use in trying again.
    tried_at: (u64, u64),
}

type Operation<K, M> = Box<dyn FnOnce(&Handle<K, M>)>;
type Service<K, M> = Box<dyn FnMut(&K, &M, &mut Rng) -> Duration>;

/// An engine in virtual time. See the [module](self).
pub struct Sim<K, M> {
    seed: u64,
    steps: u64,
    random: Rng,
    time: Time,
    handle: Handle<K, M>,
    handler: HandlerKind<K, M>,
    actors: Vec<Actor<K, M>>,
    producers: Vec<Producer<K, M>>,
    operations: VecDeque<(u64, Operation<K, M>)>,
    service: Service<K, M>,
    faults: Faults,
    /// How many steps there are between two audits.
    audit_every: u64,
    /// What the last one saw of each dispatcher, and how many messages were outstanding in an engine that counts them.
    audited: Vec<(Arc<Dispatcher<K, M>>, Audited)>,
    outstanding: Option<u64>,
    /// Which keys are in whose hands.
    in_flight: HashMap<u64, usize>,
    refused: Vec<Message<K, M>>,
}

impl<K, M> fmt::Debug for Sim<K, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim").field("seed", &self.seed).field("steps", &self.steps).finish_non_exhaustive()
    }
}

/// So many messages to a turn are quick ones: a worker then takes several lanes at once, or a stream.
const QUICK_MESSAGES: usize = 1_000;

/// What could move now.
enum Mover {
    Actor(usize),
    Producer(usize),
    Operation,
}

impl<K, M> Sim<K, M>
where
    K: Hash + Clone + Send + Sync + 'static,
    M: Send + 'static,
{
    /// A simulation of the engine that this builder describes.
    pub fn new(seed: u64, builder: Builder<K, M>) -> Result<Self, BuildError> {
        Sim::with_time(seed, Time::new(), builder)
    }

    /// The same, in a time that handlers know already: async handlers sleep in it.
    pub fn with_time(seed: u64, time: Time, mut builder: Builder<K, M>) -> Result<Self, BuildError> {
        let mut problems = builder.problems();
        let handler = builder.handler.take();
        if handler.is_none() {
            problems.push(crate::Problem::NoHandler);
        }
        check(problems)?;
        let clock = Clock::Virtual(time.nanos());
        let hasher = SeedableRandomState::with_seed(seed, SharedSeed::global_fixed());
        let shared = builder.assemble(clock, Spawn::Simulated, hasher);
        let mut sim = Sim {
            seed,
            steps: 0,
            random: Rng::with_seed(seed),
            time,
            handle: Handle { shared },
            handler: handler.expect("checked above"),
            actors: Vec::new(),
            producers: Vec::new(),
            operations: VecDeque::new(),
            service: Box::new(|_, _, _| Duration::ZERO),
            faults: Faults::none(),
            audit_every: 1,
            audited: Vec::new(),
            outstanding: None,
            in_flight: HashMap::new(),
            refused: Vec::new(),
        };
        sim.seat_workers();
        Ok(sim)
    }

    /// What goes wrong by itself. Default: nothing.
    pub fn faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Checks what must be true after every so many steps, and at the end of a run in any case. Default: after each (and 0 says the same).
    ///
    /// A check looks at every lane, so with ten thousand of them it takes a thousand times as long as the step before it. What is wrong is then found up to this
    /// many steps late; run the seed again with 1 to see where it began. That no key is in two hands is checked whenever one is claimed, whatever is said here.
    pub fn audit_every(&mut self, steps: u64) {
        self.audit_every = steps.max(1);
    }

    /// How long a message takes in the hands of a sync handler. Default: no time.
    pub fn service(&mut self, service: impl FnMut(&K, &M, &mut Rng) -> Duration + 'static) {
        self.service = Box::new(service);
    }

    /// A producer that submits these messages in order, one a step, whenever it is chosen. Where [`Overflow::Block`] would block, it waits.
    pub fn produce<T: Into<Message<K, M>> + 'static>(
        &mut self,
        messages: impl IntoIterator<Item = T> + 'static,
    ) {
        let messages = Box::new(messages.into_iter().map(Into::into));
        self.producers.push(Producer { messages, held: None, tried_at: (0, 0) });
    }

    /// Does something with the engine at a given time. A submission that would block is refused there as in a handler, with [`Refusal::FromHandler`].
    pub fn at(&mut self, when: Duration, operation: impl FnOnce(&Handle<K, M>) + 'static) {
        let when = nanos(when);
        let place = self.operations.partition_point(|(other, _)| *other <= when);
        self.operations.insert(place, (when, Box::new(operation)));
    }

    /// The engine, to submit to and to operate at once. A submission that blocks would do so for ever: [`try_submit`](Handle::try_submit) does not.
    pub fn handle(&self) -> &Handle<K, M> {
        &self.handle
    }

    /// What time it is.
    pub fn now(&self) -> Duration {
        self.time.now()
    }

    /// How many steps were taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// What producers could not get in, per producer in order.
    pub fn refused(&self) -> &[Message<K, M>] {
        &self.refused
    }

    /// What producers wait to get in.
    pub fn held(&self) -> impl Iterator<Item = &Message<K, M>> {
        self.producers.iter().filter_map(|producer| producer.held.as_ref())
    }

    /// Runs until nothing moves any more.
    pub fn run(&mut self) -> Result<(), Violation> {
        while self.step()? {}
        Ok(())
    }

    /// The engine's shutdown, step by step as `Engine::shutdown` has it, in virtual time.
    pub fn shutdown(mut self, drain: Duration) -> Result<ShutdownReport<K, M>, Violation> {
        self.shared().close();
        let deadline = self.time.now() + drain;
        while self.time.now() < deadline && !self.is_quiet() && self.step()? {}
        self.shared().stop();
        while self.actors.iter().any(|actor| !matches!(actor.phase, Phase::Gone)) {
            if !self.step()? {
                return Err(self.violation("a worker does not leave".to_owned()));
            }
        }
        self.audit()?;
        Ok(self.shared().give_back())
    }

    /// Lets one thing happen. False if nothing can, now or later.
    pub fn step(&mut self) -> Result<bool, Violation> {
        self.seat_workers();
        let Some(mover) = self.choose() else {
            self.audit()?;
            return Ok(false);
        };
        self.steps += 1;
        match mover {
            Mover::Actor(actor) => self.act(actor)?,
            Mover::Producer(producer) => self.submit_next(producer),
            Mover::Operation => {
                if let Some((_, operation)) = self.operations.pop_front() {
                    // Nobody else would take a step while it waited for room.
                    let _inside = Inside::enter_simulated(self.shared().address());
                    operation(&self.handle);
                }
            }
        }
        if self.steps.is_multiple_of(self.audit_every) {
            self.audit()?;
        }
        Ok(true)
    }

    fn shared(&self) -> &Arc<Shared<K, M>> {
        &self.handle.shared
    }

    fn violation(&self, what: String) -> Violation {
        Violation { seed: self.seed, step: self.steps, what }
    }

    fn is_quiet(&self) -> bool {
        let produced = self.producers.iter().all(|producer| producer.held.is_none());
        produced && self.shared().layout.load().dispatchers.iter().all(|dispatcher| dispatcher.is_quiet())
    }

    // ── whose turn it is ───────────────────────────────────────────────────────────────────────────────────────────

    /// Somebody who can move now; time passes until there is one.
    fn choose(&mut self) -> Option<Mover> {
        loop {
            let movers = self.movers();
            if !movers.is_empty() {
                let place = self.random.usize(..movers.len());
                return movers.into_iter().nth(place);
            }
            let next = self.next_event()?;
            self.time.advance_to(next);
        }
    }

    fn movers(&self) -> Vec<Mover> {
        let now = self.time.in_nanos();
        let actors = self.actors.iter().enumerate().filter(|(_, actor)| actor.can_move(now));
        let mut movers: Vec<Mover> = actors.map(|(place, _)| Mover::Actor(place)).collect();
        movers
            .extend((0..self.producers.len()).filter(|&place| self.can_produce(place)).map(Mover::Producer));
        if self.operations.front().is_some_and(|(when, _)| *when <= now) {
            movers.push(Mover::Operation);
        }
        movers
    }

    /// A producer that was turned away moves again when something has been released, or the topology has changed.
    fn can_produce(&self, place: usize) -> bool {
        let producer = &self.producers[place];
        producer.held.is_none() || self.shared().closed.load(SeqCst) || producer.tried_at != self.room()
    }

    /// What a producer that waits for room looks at. What ends where a dispatcher was removed in the middle of it makes room in the engine, too.
    fn room(&self) -> (u64, u64) {
        let layout = self.shared().layout.load();
        let dispatchers = layout.dispatchers.iter().chain(&layout.retired);
        (layout.epoch, dispatchers.map(|dispatcher| dispatcher.released()).sum())
    }

    fn next_event(&self) -> Option<u64> {
        let actors = self.actors.iter().filter_map(Actor::due);
        let operations = self.operations.front().map(|(when, _)| *when);
        actors.chain(operations).chain(self.time.next_due()).min()
    }

    // ── producers ──────────────────────────────────────────────────────────────────────────────────────────────────

    fn submit_next(&mut self, place: usize) {
        let producer = &mut self.producers[place];
        let Some(message) = producer.held.take().or_else(|| producer.messages.next()) else {
            self.producers.remove(place);
            return;
        };
        let shared = &self.handle.shared;
        if let Err(refused) = shared.submit(message, Patience::None) {
            let waits = match refused.reason {
                Refusal::Full(bound) => {
                    let policy = match bound {
                        crate::Bound::Engine => shared.settings.engine_overflow,
                        bound => shared.limits.at(bound),
                    };
                    policy == Overflow::Block
                }
                _ => false,
            };
            match waits {
                true => {
                    let tried_at = self.room();
                    let producer = &mut self.producers[place];
                    (producer.held, producer.tried_at) = (Some(refused.message), tried_at);
                }
                false => self.refused.push(refused.message),
            }
        }
    }

    // ── workers ────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Gives every seat of the topology that has nobody on it a worker.
    fn seat_workers(&mut self) {
        for seat in &self.handle.shared.layout.load().seats {
            if !self.actors.iter().any(|actor| Arc::ptr_eq(&actor.seat, seat)) {
                let woken = Arc::new(AtomicBool::new(false));
                let worker = Some(hire(&self.handle.shared, seat, &woken, &self.handler));
                self.actors.push(Actor { seat: seat.clone(), worker, woken, phase: Phase::Up });
            }
        }
    }

    fn act(&mut self, place: usize) -> Result<(), Violation> {
        match std::mem::replace(&mut self.actors[place].phase, Phase::Up) {
            Phase::Up => self.look(place),
            Phase::Asleep { .. } => {
                let actor = &mut self.actors[place];
                actor.woken.store(false, SeqCst);
                actor.worker().get_up();
                Ok(())
            }
            Phase::Claimed => self.run_turn(place),
            Phase::Busy { ending, .. } => self.settle(place, ending),
            Phase::Async(flight) => self.poll(place, flight),
            Phase::Gone => unreachable!("who has gone does not move"),
        }
    }

    fn look(&mut self, place: usize) -> Result<(), Violation> {
        let batch_max = self.shared().settings.batch_max;
        let length = self.random.usize(1..=batch_max);
        let quick = self.random.bool();
        let actor = &mut self.actors[place];
        // Long turns and short ones, hands and streams, whatever the messages really take.
        actor.worker().tempo.expect(if quick { QUICK_MESSAGES } else { length });
        match actor.worker().look() {
            Look::Turn => {
                actor.phase = Phase::Claimed;
                return self.note_claim(place);
            }
            Look::Nothing => {
                if let Some(until) = actor.worker().lie_down() {
                    actor.phase = Phase::Asleep { until };
                }
            }
            Look::Contended => unreachable!("nobody else is running"),
            Look::Leave => {
                actor.worker = None;
                actor.phase = Phase::Gone;
            }
        }
        Ok(())
    }

    /// Exclusion: a key is in one pair of hands at most.
    fn note_claim(&mut self, place: usize) -> Result<(), Violation> {
        let turn = self.actors[place].worker().turn();
        let keys: Vec<u64> = turn.fingerprints().collect();
        for key in keys {
            if let Some(other) = self.in_flight.insert(key, place).filter(|other| *other != place) {
                return Err(self.violation(format!("one key in the hands of workers {other} and {place}")));
            }
        }
        Ok(())
    }

    fn run_turn(&mut self, place: usize) -> Result<(), Violation> {
        if self.random.f64() < self.faults.crash {
            self.crash(place);
            return Ok(());
        }
        let fails = self.random.f64() < self.faults.fail;
        let mut takes = self.turn_time(place);
        if self.random.f64() < self.faults.stall {
            takes = takes.saturating_mul(100);
        }
        let until = self.time.in_nanos().saturating_add(nanos(takes));
        let actor = &mut self.actors[place];
        if fails {
            let ending = fail_first(actor.worker());
            actor.phase = Phase::Busy { until, ending };
            return Ok(());
        }
        match &self.handler {
            HandlerKind::Sync(handler) => {
                let ending = actor.worker().run(&**handler);
                actor.phase = Phase::Busy { until, ending };
            }
            #[cfg(feature = "tokio")]
            HandlerKind::Async(handler) => {
                let mut hand = crate::worker::slot::HandOver::new();
                let future = handler.start(&mut hand, actor.worker());
                let waker = Arc::new(time::Flag::raised());
                actor.phase = Phase::Async(Flight { future, hand, waker });
            }
        }
        Ok(())
    }

    fn turn_time(&mut self, place: usize) -> Duration {
        let turn = self.actors[place].worker.as_mut().expect("a worker with a turn").turn();
        turn.each().map(|(key, body)| (self.service)(key, body, &mut self.random)).sum()
    }

    /// The worker dies with its turn in its hands; its drop puts that back. Somebody else takes the seat.
    fn crash(&mut self, place: usize) {
        let shared = self.handle.shared.clone();
        let actor = &mut self.actors[place];
        actor.worker = None;
        actor.seat.gone.store(false, SeqCst);
        actor.worker = Some(hire(&shared, &actor.seat, &actor.woken, &self.handler));
        self.in_flight.retain(|_, holder| *holder != place);
    }

    fn settle(&mut self, place: usize, ending: Ending) -> Result<(), Violation> {
        self.in_flight.retain(|_, holder| *holder != place);
        let actor = &mut self.actors[place];
        // A worker with one dispatcher gets the next turn under the same lock.
        if actor.worker().settle(ending) {
            actor.phase = Phase::Claimed;
            return self.note_claim(place);
        }
        Ok(())
    }

    #[cfg(not(feature = "tokio"))]
    fn poll(&mut self, _: usize, flight: Flight<K, M>) -> Result<(), Violation> {
        match flight.0 {}
    }

    #[cfg(feature = "tokio")]
    fn poll(&mut self, place: usize, mut flight: Flight<K, M>) -> Result<(), Violation> {
        use std::{
            panic::{AssertUnwindSafe, catch_unwind},
            task::{Context, Poll, Waker},
        };
        flight.waker.lower();
        let inside = Inside::enter(self.shared().address());
        let waker = Waker::from(flight.waker.clone());
        let polled =
            catch_unwind(AssertUnwindSafe(|| flight.future.as_mut().poll(&mut Context::from_waker(&waker))));
        if matches!(polled, Ok(Poll::Pending)) {
            self.actors[place].phase = Phase::Async(flight);
            return Ok(());
        }
        // What it still holds is the user's, too: a panic of its drop is one of the handler.
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(flight.future)));
        let outcome = match (polled, dropped) {
            (Ok(Poll::Ready(outcome)), Ok(())) => Ok(outcome),
            (Err(panic), _) | (_, Err(panic)) => Err(crate::handler::panic_text(&*panic)),
            (Ok(Poll::Pending), Ok(())) => unreachable!("looked at above"),
        };
        // What follows sees to that itself, as it has to in a slot.
        drop(inside);
        let worker = self.actors[place].worker();
        flight.hand.take_back(worker);
        let ending = flight.hand.end(worker, outcome);
        // One message a turn, so that everything else may come between two of them.
        self.settle(place, ending.unwrap_or(Ending::Handled))
    }

    // ── what must be true ──────────────────────────────────────────────────────────────────────────────────────────

    fn audit(&mut self) -> Result<(), Violation> {
        let now = self.time.in_nanos();
        let layout = self.shared().layout.load_full();
        let mut audited = Vec::with_capacity(layout.dispatchers.len());
        for dispatcher in &layout.dispatchers {
            let before = self.audited.iter().find(|(known, _)| Arc::ptr_eq(known, dispatcher));
            let before = before.map(|(_, seen)| *seen).unwrap_or_default();
            let seen = dispatcher.audit(now, &before);
            let seen =
                seen.map_err(|what| self.violation(format!("dispatcher {:?}: {what}", dispatcher.name)))?;
            audited.push((dispatcher.clone(), seen));
            let mut serving = self
                .actors
                .iter()
                .filter(|actor| actor.seat.serves().iter().any(|served| Arc::ptr_eq(served, dispatcher)));
            if seen.has_work && serving.clone().count() > 0 && serving.all(|actor| actor.sleeps_on(now)) {
                return Err(self
                    .violation(format!("work at {:?}, and everyone who serves it sleeps", dispatcher.name)));
            }
            self.audit_timekeeper(dispatcher)?;
        }
        self.audited = audited;
        self.audit_engine_bound(&layout)
    }

    /// The engine counts what is outstanding, and no more than it may have. It begins to count when there are enough dispatchers, perhaps with more than that.
    fn audit_engine_bound(&mut self, layout: &Layout<K, M>) -> Result<(), Violation> {
        let bound = &self.handle.shared.engine_bound;
        if !bound.is_counting() {
            return Ok(());
        }
        let all = layout.dispatchers.iter().chain(&layout.retired);
        let (outstanding, counted) =
            (all.map(|dispatcher| dispatcher.outstanding()).sum(), bound.outstanding());
        let limit = bound.capacity.saturating_add(bound.reserve);
        let before = self.outstanding.replace(outstanding).unwrap_or(u64::MAX);
        if counted != outstanding {
            return Err(self.violation(format!("{outstanding} outstanding, but the engine counts {counted}")));
        }
        match outstanding <= limit.max(before) {
            true => Ok(()),
            false => Err(self.violation(format!("{outstanding} outstanding in the engine, beyond {limit}"))),
        }
    }

    /// Somebody will be up when the next timer is due.
    fn audit_timekeeper(&self, dispatcher: &Arc<Dispatcher<K, M>>) -> Result<(), Violation> {
        let Some(due) = dispatcher.next_due() else { return Ok(()) };
        let serves =
            |actor: &&Actor<K, M>| actor.seat.serves().iter().any(|served| Arc::ptr_eq(served, dispatcher));
        let mut serving = self.actors.iter().filter(serves);
        if !serving.clone().any(|actor| actor.is_asleep()) {
            return Ok(());
        }
        // Who is up will look, and then keep the time or pass it on.
        let kept = serving.any(|actor| matches!(actor.phase, Phase::Up) || actor.wakes_by(due));
        let what = || format!("a timer at {:?}, and nobody who sleeps there keeps the time", dispatcher.name);
        if kept { Ok(()) } else { Err(self.violation(what())) }
    }
}

impl<K, M> Actor<K, M> {
    fn worker(&mut self) -> &mut Worker<K, M> {
        self.worker.as_mut().expect("who acts has not gone")
    }

    fn is_asleep(&self) -> bool {
        matches!(self.phase, Phase::Asleep { .. })
    }

    /// Asleep, and nobody has woken it.
    fn sleeps_on(&self, now: u64) -> bool {
        matches!(self.phase, Phase::Asleep { until } if until.is_none_or(|until| until > now))
            && !self.woken.load(SeqCst)
    }

    fn wakes_by(&self, due: u64) -> bool {
        let timed = matches!(self.phase, Phase::Asleep { until: Some(until) } if until <= due);
        timed || (self.is_asleep() && self.woken.load(SeqCst))
    }

    fn can_move(&self, now: u64) -> bool {
        match &self.phase {
            Phase::Up | Phase::Claimed => true,
            Phase::Asleep { until } => self.woken.load(SeqCst) || until.is_some_and(|until| until <= now),
            Phase::Busy { until, .. } => *until <= now,
            Phase::Async(flight) => flight.can_be_polled(),
            Phase::Gone => false,
        }
    }

    fn due(&self) -> Option<u64> {
        match &self.phase {
            Phase::Asleep { until } => *until,
            Phase::Busy { until, .. } => Some(*until),
            _ => None,
        }
    }
}

/// A worker for a seat.
fn hire<K: Clone, M>(
    shared: &Arc<Shared<K, M>>,
    seat: &Arc<Seat<K, M>>,
    woken: &Arc<AtomicBool>,
    handler: &HandlerKind<K, M>,
) -> Worker<K, M> {
    let turns = match handler {
        HandlerKind::Sync(handler) => handler.turns(),
        #[cfg(feature = "tokio")]
        HandlerKind::Async(_) => crate::handler::Turns::OneLane,
    };
    Worker::new(shared.clone(), seat.clone(), Sleeper::simulated(seat.number, woken.clone()), turns)
}

/// The first message of a turn fails as if its handler had panicked.
fn fail_first<K: Clone, M>(worker: &mut Worker<K, M>) -> Ending {
    let mut run = worker.hand();
    run.turn.next().expect("a turn has a message");
    run.tally.started += 1;
    run.tally.panics += 1;
    run.trouble(Outcome::Failed("an injected fault".to_owned()), None).unwrap_or(Ending::Handled)
}
