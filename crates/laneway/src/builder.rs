//! Sets an engine up: settings with their defaults, all problems at once, then dispatchers, workers and the first look for work.

use std::{
    fmt,
    hash::Hash,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use foldhash::quality::SeedableRandomState;

use crate::{
    admission::{Bound, Dropped, EngineBound, Overflow},
    clock::Clock,
    dispatcher::{Dispatcher, Limits},
    engine::{Engine, Handle, Layout, Past, Settings, Shared},
    error::{BuildError, Problem},
    flows::{Flows, Mappings},
    handler::{
        Batch, BatchHandler, Batched, Closure, Context, Failure, Handler, RunTurn, Single, TurnHandler,
        Turned,
    },
    lane::Keeps,
    message::Message,
    outcome::{Outcome, RetryPolicy},
    placement::LooksAt,
    topology::{Topology, backoff_problems, check},
    worker::{Backoff, Seat, Sleeper, WaitStrategy, Worker, thread},
};

/// What runs the workers.
pub(crate) enum Spawn<K, M> {
    /// A thread each.
    Threads(Arc<dyn RunTurn<K, M>>),
    /// A task each.
    #[cfg(feature = "tokio")]
    Slots(Arc<dyn crate::worker::slot::RunSlot<K, M>>, tokio::runtime::Handle),
    /// Nobody: the simulator takes their steps.
    Simulated,
}

/// The handler, as it was given.
pub(crate) enum HandlerKind<K, M> {
    Sync(Arc<dyn RunTurn<K, M>>),
    #[cfg(feature = "tokio")]
    Async(Arc<dyn crate::worker::slot::RunSlot<K, M>>),
}

/// Sets an [`Engine`] up. Everything but the handler has a default.
///
/// ```
/// use laneway::{Bound, Engine, Overflow, RetryPolicy, Topology};
/// let engine = Engine::builder()
///     .topology(Topology::pool(8))
///     .worker_queue_capacity(1_000)
///     .overflow_at(Bound::Dispatcher, Overflow::Reject)
///     .retry(RetryPolicy::never())
///     .handle(|_context, _body: &mut u64| ())
///     .build()?;
/// engine.submit(("key", 1))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub struct Builder<K, M> {
    topology: Option<Topology<K>>,
    ingress_capacity: usize,
    worker_queue_capacity: Option<usize>,
    control_reserve: usize,
    lane_capacity: Option<usize>,
    lanes_max: Option<usize>,
    overflow: [Overflow; 4],
    flows: Option<Flows>,
    latency_sampling: u64,
    settings: Settings<K, M>,
    pub(crate) handler: Option<HandlerKind<K, M>>,
    #[cfg(feature = "tokio")]
    runtime: Option<tokio::runtime::Handle>,
}

impl<K, M> fmt::Debug for Builder<K, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("topology", &self.topology).finish_non_exhaustive()
    }
}

/// Document 000's `workerQueueCapacity`.
const WORKER_QUEUE_CAPACITY: usize = 8_192;

impl<K, M> Builder<K, M>
where
    K: Hash + Clone + Send + Sync + 'static,
    M: Send + 'static,
{
    pub(crate) fn new() -> Self {
        let settings = Settings {
            batch_max: 128,
            retry: RetryPolicy::default(),
            wait: WaitStrategy::default(),
            backoff: Backoff::default(),
            shutdown_grace: Duration::from_secs(30),
            on_drop: None,
            on_fail: None,
            on_worker_start: None,
            engine_overflow: Overflow::default(),
        };
        Builder {
            topology: None,
            ingress_capacity: 65_536,
            worker_queue_capacity: None,
            control_reserve: 1_024,
            lane_capacity: None,
            lanes_max: None,
            overflow: [Overflow::default(); 4],
            flows: None,
            latency_sampling: 64,
            settings,
            handler: None,
            #[cfg(feature = "tokio")]
            runtime: None,
        }
    }

    /// Dispatchers, workers and placement. Default: partitions by hash, one for each core (rounded up to a power of two), one worker each.
    pub fn topology(mut self, topology: Topology<K>) -> Self {
        self.topology = Some(topology);
        self
    }

    /// At most this many messages outstanding in the engine. Default 65,536.
    ///
    /// Counted only where the dispatchers together may hold more than this. Where they may not, as with up to eight dispatchers and no setting changed, their own bounds keep it; what
    /// comes on top is then the [reserve](Builder::control_reserve) of each of them, and not one for all.
    pub fn ingress_capacity(mut self, messages: usize) -> Self {
        self.ingress_capacity = messages;
        self
    }

    /// At most this many messages outstanding on one dispatcher. Default 8,192, or twice the number of its workers if that is more.
    pub fn worker_queue_capacity(mut self, messages: usize) -> Self {
        self.worker_queue_capacity = Some(messages);
        self
    }

    /// At most this many messages outstanding in one lane. Default: as many as its dispatcher takes. A submission then looks at its lane.
    pub fn lane_capacity(mut self, messages: usize) -> Self {
        self.lane_capacity = Some(messages);
        self
    }

    /// At most this many lanes on one dispatcher. Default: as many as it has messages. A submission then looks at its lane.
    pub fn lanes_max(mut self, lanes: usize) -> Self {
        self.lanes_max = Some(lanes);
        self
    }

    /// On top of each bound, room for this many control messages (start and finish), which no policy drops. Default 1,024. On top of the engine's, too, if
    /// [that is counted](Builder::ingress_capacity); else as many for each dispatcher.
    pub fn control_reserve(mut self, messages: usize) -> Self {
        self.control_reserve = messages;
        self
    }

    /// What happens at every full bound. Default [`Overflow::Block`]. Of [`Overflow::DropOldest`] the bound on the number of lanes makes [`Overflow::Reject`]: it is no
    /// message that would have to make room there.
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.overflow = [overflow; 4];
        // The oldest message makes room for a message, not for a lane.
        if overflow == Overflow::DropOldest {
            self.overflow[Bound::Lanes as usize] = Overflow::Reject;
        }
        self
    }

    /// What happens at this bound when it is full.
    pub fn overflow_at(mut self, bound: Bound, overflow: Overflow) -> Self {
        self.overflow[bound as usize] = overflow;
        self
    }

    /// At most this many messages of one lane in a turn, or in a call of a batch handler; then other lanes have theirs. Default 128.
    pub fn batch_max(mut self, messages: usize) -> Self {
        self.settings.batch_max = messages;
        self
    }

    /// What happens to a message that fails. Default: three attempts, then it is skipped.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.settings.retry = policy;
        self
    }

    /// Tracks flows: the first message of a key opens one, a finish ends it. Default: not.
    pub fn flows(mut self, flows: Flows) -> Self {
        self.flows = Some(flows);
        self
    }

    /// What idle workers do. Default [`WaitStrategy::Park`]. Slots on tokio always wait as tasks do.
    pub fn wait(mut self, strategy: WaitStrategy) -> Self {
        self.settings.wait = strategy;
        self
    }

    /// How a worker waits when all of its dispatchers are taken by others.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = backoff;
        self
    }

    /// Times one message in `n` for the latency histograms; 0 for none. Default 64: reading the clock for every message would cost more than a small handler.
    pub fn latency_sampling(mut self, one_in: u64) -> Self {
        self.latency_sampling = one_in;
        self
    }

    /// How long a shutdown waits for handlers that run. Default 30 s.
    pub fn shutdown_grace(mut self, grace: Duration) -> Self {
        self.settings.shutdown_grace = grace;
        self
    }

    /// Is given each message that an overflow policy drops, on the thread of the submission that made it necessary.
    pub fn on_drop(mut self, callback: impl Fn(Message<K, M>, Dropped) + Send + Sync + 'static) -> Self {
        self.settings.on_drop = Some(Box::new(callback));
        self
    }

    /// Is given each message that failed for good, on the worker that gave it up.
    pub fn on_fail(mut self, callback: impl Fn(Message<K, M>, Failure) + Send + Sync + 'static) -> Self {
        self.settings.on_fail = Some(Box::new(callback));
        self
    }

    /// Is called by each worker thread with its number before its first look for work: to pin it to a processor, to name it to a profiler. A panic there
    /// stops there. Slots on tokio are no threads of ours, so for them it is not called.
    pub fn on_worker_start(mut self, callback: impl Fn(usize) + Send + Sync + 'static) -> Self {
        self.settings.on_worker_start = Some(Box::new(callback));
        self
    }

    /// Handles each message by calling a closure, which may return `()`, an [`Outcome`] or a `Result`.
    pub fn handle<F, R>(self, handler: F) -> Self
    where
        F: Fn(&Context<'_, K>, &mut M) -> R + Send + Sync + 'static,
        R: Into<Outcome> + 'static,
    {
        self.handler(Closure(handler))
    }

    /// Handles each message by a [`Handler`].
    pub fn handler(mut self, handler: impl Handler<K, M>) -> Self {
        self.handler = Some(HandlerKind::Sync(Arc::new(Single(handler))));
        self
    }

    /// Handles a turn at a time by a [`TurnHandler`]: messages of one key, one after the other.
    pub fn turn_handler(mut self, handler: impl TurnHandler<K, M>) -> Self {
        self.handler = Some(HandlerKind::Sync(Arc::new(Turned(handler))));
        self
    }

    /// Handles up to `batch_max` consecutive messages of one key by one call of a closure. One at a time where [`Overflow::DropOldest`] is the policy of a bound or the dispatcher has a
    /// pace: what has not started must be there to make room, and each message takes its own place in the pace.
    pub fn handle_batch<F, R>(self, handler: F) -> Self
    where
        F: Fn(&Context<'_, K>, &mut Batch<'_, K, M>) -> R + Send + Sync + 'static,
        R: Into<Outcome> + 'static,
    {
        self.batch_handler(Closure(handler))
    }

    /// Handles up to `batch_max` consecutive messages of one key by one call of a [`BatchHandler`]; see [`handle_batch`](Builder::handle_batch).
    pub fn batch_handler(mut self, handler: impl BatchHandler<K, M>) -> Self {
        self.handler = Some(HandlerKind::Sync(Arc::new(Batched(handler))));
        self
    }

    /// Handles each message by a future on tokio. The topology's workers are then slots: tasks, not threads.
    ///
    /// ```
    /// use laneway::{Delivery, Engine, Topology};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let engine = Engine::builder()
    ///     .topology(Topology::pool(5_000))
    ///     .handle_async(|delivery: Delivery<u64, String>| async move {
    ///         tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    ///         println!("{}: {}", delivery.key(), *delivery);
    ///     })
    ///     .build()?;
    /// engine.submit_async((7, "created".to_owned())).await?;
    /// engine.shutdown_async(std::time::Duration::from_secs(5)).await;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    #[cfg(feature = "tokio")]
    pub fn handle_async<F, R>(mut self, handler: F) -> Self
    where
        F: Fn(crate::Delivery<K, M>) -> R + Send + Sync + 'static,
        R: Future + Send + 'static,
        R::Output: Into<Outcome>,
    {
        self.handler =
            Some(HandlerKind::Async(Arc::new(crate::worker::slot::AsyncClosure(Arc::new(handler)))));
        self
    }

    /// The runtime for async handlers. Default: the one in which the engine is built.
    #[cfg(feature = "tokio")]
    pub fn runtime(mut self, runtime: tokio::runtime::Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Builds the engine and starts its workers. All that is wrong is said at once.
    pub fn build(mut self) -> Result<Engine<K, M>, BuildError> {
        let mut problems = self.problems();
        let spawn = match self.handler.take() {
            None => {
                problems.push(Problem::NoHandler);
                Spawn::Simulated
            }
            Some(HandlerKind::Sync(handler)) => Spawn::Threads(handler),
            #[cfg(feature = "tokio")]
            Some(HandlerKind::Async(handler)) => {
                match self.runtime.take().or_else(|| tokio::runtime::Handle::try_current().ok()) {
                    Some(runtime) => {
                        if !keeps_time(&runtime) {
                            problems.push(Problem::RuntimeWithoutTimers);
                        }
                        Spawn::Slots(handler, runtime)
                    }
                    None => {
                        problems.push(Problem::NoRuntime);
                        Spawn::Simulated
                    }
                }
            }
        };
        check(problems)?;
        let clock = match &spawn {
            #[cfg(feature = "tokio")]
            Spawn::Slots(_, runtime) => {
                let _entered = runtime.enter();
                Clock::Tokio(tokio::time::Instant::now())
            }
            _ => Clock::real(),
        };
        let shared = self.assemble(clock, spawn, SeedableRandomState::random());
        let hired = Hired::hire(&shared, &shared.layout.load().seats);
        hired.map_err(|problem| BuildError { problems: vec![problem] })?.begin();
        Ok(Engine { handle: Handle { shared }, shut_down: false })
    }

    /// What is wrong with the settings and the topology.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        let mut problems = self.topology.as_ref().map_or(Vec::new(), Topology::problems);
        let mut zero = |what, value: Option<usize>| {
            if value == Some(0) {
                problems.push(Problem::ZeroCapacity { what });
            }
        };
        zero("ingress_capacity", Some(self.ingress_capacity));
        zero("worker_queue_capacity", self.worker_queue_capacity);
        zero("lane_capacity", self.lane_capacity);
        zero("lanes_max", self.lanes_max);
        zero("batch_max", Some(self.settings.batch_max));
        let mut range = |fine: bool, what, value: String, right| {
            if !fine {
                problems.push(Problem::OutOfRange { what, value, right });
            }
        };
        let retry = &self.settings.retry;
        range(retry.max_attempts > 0, "max_attempts of the retry policy", "0".into(), "at least 1");
        let multiplier = retry.multiplier;
        range(multiplier >= 1.0, "multiplier of the retry policy", multiplier.to_string(), "at least 1");
        range(
            self.overflow[Bound::Lanes as usize] != Overflow::DropOldest,
            "overflow at the number of lanes",
            "DropOldest".into(),
            "another policy: dropping a message does not free a lane",
        );
        problems.extend(backoff_problems(&self.settings.backoff));
        problems
    }

    /// Puts the parts together, without starting anybody.
    pub(crate) fn assemble(
        self,
        clock: Clock,
        spawn: Spawn<K, M>,
        hasher: SeedableRandomState,
    ) -> Arc<Shared<K, M>> {
        let topology = self.topology.unwrap_or_else(default_topology);
        let widest = topology.dispatchers.iter().map(|dispatcher| {
            topology.workers.iter().filter(|worker| worker.serves.contains(&dispatcher.name)).count()
        });
        let widest = widest.max().unwrap_or(1);
        let capacity = self.worker_queue_capacity.unwrap_or(WORKER_QUEUE_CAPACITY.max(2 * widest));
        let limits = Limits {
            capacity: capacity as u64,
            // Some write "without a bound" as the greatest number there is.
            reserve: (self.control_reserve as u64).min(u64::MAX - capacity as u64),
            lane: self.lane_capacity,
            lanes: self.lanes_max,
            overflow: self.overflow,
            load_counts: topology.placement.looks_at() == LooksAt::Load,
            backoff: None,
            sampling: self.latency_sampling,
            keeps: if matches!(clock, Clock::Virtual(_)) { Keeps::NOTHING } else { Keeps::USUAL },
        };
        let batch_max = self.settings.batch_max;
        let dispatchers: Vec<_> = topology
            .dispatchers
            .iter()
            .map(|spec| {
                let limits = Limits { backoff: spec.backoff.clone(), ..limits.clone() };
                Arc::new(Dispatcher::new(spec.name.clone(), limits, spec.pace, batch_max, 0))
            })
            .collect();
        let find = |name: &String| dispatchers.iter().find(|dispatcher| dispatcher.name == *name).cloned();
        let seats = topology.workers.iter().enumerate().map(|(number, spec)| {
            let row = spec.serves.iter().filter_map(find).collect();
            Arc::new(Seat::new(number, spec.name.clone(), row))
        });
        let seats: Vec<_> = seats.collect();
        // A bound that the dispatchers' own cannot reach need not be counted. (Their reserves may, but to count for these would cost every message of most engines two writes to one line.)
        let reachable = capacity.saturating_mul(dispatchers.len()) > self.ingress_capacity;
        let engine_bound = EngineBound::new(self.ingress_capacity, self.control_reserve);
        if reachable {
            engine_bound.count_from(0);
        }
        let remembers = self.flows.is_some() || topology.placement.looks_at() == LooksAt::Load;
        let mappings = remembers.then(|| Mappings::new(self.flows));
        let mut settings = self.settings;
        settings.engine_overflow = self.overflow[Bound::Engine as usize];
        let (retired, past) = (Vec::new(), Past::default());
        let next_seat = seats.len();
        count_servers(&dispatchers, &seats);
        let leaving = Vec::new();
        let layout = Layout { epoch: 0, dispatchers, seats, leaving, next_seat, retired, past };
        Arc::new(Shared::new(
            clock,
            settings,
            layout,
            topology.placement,
            topology.by_hash,
            mappings,
            engine_bound,
            limits,
            spawn,
            hasher,
        ))
    }
}

/// Tells each dispatcher how many workers serve it.
pub(crate) fn count_servers<K, M>(dispatchers: &[Arc<Dispatcher<K, M>>], seats: &[Arc<Seat<K, M>>]) {
    for dispatcher in dispatchers {
        let serves =
            |seat: &&Arc<Seat<K, M>>| seat.serves().iter().any(|served| Arc::ptr_eq(served, dispatcher));
        let servers = seats.iter().filter(serves).count();
        dispatcher.servers.store(servers, std::sync::atomic::Ordering::Relaxed);
    }
}

/// One partition per core, rounded up to a power of two, one worker each.
fn default_topology<K>() -> Topology<K> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    Topology::partitioned(cores.next_power_of_two(), 1)
}

/// Workers that are there and have not begun. If one cannot be had there are none: what was hired is let go without having looked at anything.
pub(crate) struct Hired(Vec<Box<dyn FnOnce()>>);

impl Hired {
    /// Finds a worker for each of these seats.
    pub(crate) fn hire<K, M>(shared: &Arc<Shared<K, M>>, seats: &[Arc<Seat<K, M>>]) -> Result<Self, Problem>
    where
        K: Clone + Send + Sync + 'static,
        M: Send + 'static,
    {
        seats.iter().map(|seat| hire(shared, seat)).collect::<Result<_, _>>().map(Hired)
    }

    pub(crate) fn begin(self) {
        self.0.into_iter().for_each(|begin| begin());
    }
}

/// Finds a worker for a seat. It begins when what comes back is called, and goes if that is dropped.
fn hire<K, M>(shared: &Arc<Shared<K, M>>, seat: &Arc<Seat<K, M>>) -> Result<Box<dyn FnOnce()>, Problem>
where
    K: Clone + Send + Sync + 'static,
    M: Send + 'static,
{
    match &shared.spawn {
        Spawn::Simulated => Ok(Box::new(|| ())),
        #[cfg(feature = "tokio")]
        Spawn::Slots(handler, runtime) => {
            let (handler, runtime) = (handler.clone(), runtime.clone());
            let (shared, seat) = (shared.clone(), seat.clone());
            Ok(Box::new(move || handler.spawn(&runtime, shared, seat)))
        }
        Spawn::Threads(handler) => {
            let (shared, seat, handler) = (shared.clone(), seat.clone(), handler.clone());
            // Systems end a name at a zero, and std refuses one.
            let name = seat.name.replace('\0', " ");
            let (begin, told) = std::sync::mpsc::channel::<()>();
            let life = move || {
                if told.recv().is_ok() {
                    live(shared, seat, handler);
                }
            };
            let started = std::thread::Builder::new().name(name).spawn(life);
            started.map_err(|error| Problem::Thread { error: error.to_string() })?;
            Ok(Box::new(move || {
                // It waits for nothing else.
                let _ = begin.send(());
            }))
        }
    }
}

/// The life of a worker's thread.
fn live<K: Clone, M>(shared: Arc<Shared<K, M>>, seat: Arc<Seat<K, M>>, handler: Arc<dyn RunTurn<K, M>>) {
    if let Some(callback) = &shared.settings.on_worker_start {
        let _ = catch_unwind(AssertUnwindSafe(|| callback(seat.number)));
    }
    let sleeper = Sleeper::thread(seat.number, crate::sync::current());
    let turns = handler.turns();
    thread::work(Worker::new(shared, seat, sleeper, turns), handler);
}

/// Whether tasks of this runtime may wait for a time. Nothing but the attempt says so, and it panics where they may not.
#[cfg(feature = "tokio")]
fn keeps_time(runtime: &tokio::runtime::Handle) -> bool {
    let _entered = runtime.enter();
    catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).is_ok()
}
