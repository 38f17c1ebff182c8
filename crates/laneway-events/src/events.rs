//! The system: wires configuration, engine, processors, channels and scheduler together, and takes them apart again.
//!
//! # Stopping a processor
//!
//! 1. The mailbox closes: no more events.
//! 2. It leaves all channels.
//! 3. What is in its mailbox is handled, until the time to drain is over; then what is left goes back instead of into the handler.
//! 4. Whoever is the last to leave the closed mailbox (or closes an empty one) finishes it off: the handlers are told, the id is free,
//!    and who waits goes on. So a stop waits for the event in the handler, and nothing of a processor runs after its stop.
//!
//! Inside a handler nobody waits: a thread that waited for a mailbox which only it could empty would wait for itself.
//!
//! # Shutting down
//!
//! 1. No more registrations.
//! 2. The scheduler ends; what was scheduled is cancelled.
//! 3. The engine shuts down: it drains, waits for what is in flight, gives back the rest.
//! 4. All processors are finished off.

use std::{
    any::Any,
    cell::{Cell as ThreadCell, OnceCell},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, channel},
    },
    time::{Duration, Instant},
};

use laneway::{
    Account, Among, Engine, LooksAt, Messages, Outcome, Overflow, Placement, RetryPolicy, Topology,
    TurnHandler,
};

use crate::{
    Context, EventsConfig, Handled, Handler, LookupError, NotPosted, ProcessorRef, Refusal, RegisterError,
    Report, Snapshot, StartError,
    channel::Channels,
    config::listed,
    handler::Closure,
    load::Load,
    mail::Around,
    pinning,
    processor::{Address, AnyProcessor, Cell, Plan, Ran, Token},
    registry::{NotInserted, Registry},
    schedule::{FAR, Timer},
    slots::Slots,
};

/// The engine below: a lane per processor.
type Lanes = laneway::Handle<Address, Token>;

/// Is told what would be lost in silence.
type OnReport = Box<dyn Fn(Report) + Send + Sync>;

/// What the system, its handles and its threads share.
pub(crate) struct Shared {
    lanes: OnceLock<Lanes>,
    registry: Registry<Cell>,
    slots: Slots<Cell>,
    pub(crate) channels: Channels,
    pub(crate) timer: Arc<Timer>,
    /// Their names; a processor knows its own by the index.
    dispatchers: Vec<Arc<str>>,
    /// What each has to do.
    pub(crate) loads: Vec<Load>,
    /// One event in so many is timed; 0 for none.
    pub(crate) latency_sampling: u32,
    default_queue_size: usize,
    stop_grace: Duration,
    next_number: AtomicU64,
    /// The shutdown has come to the engine.
    closing: AtomicBool,
    unmatched: AtomicU64,
    on_report: OnReport,
}

thread_local! {
    /// On a thread of a system: that system. Taken once, so that an event costs no counting of references, and let go of with the thread.
    static HERE: OnceCell<Handle> = const { OnceCell::new() };
    /// The system and the processor whose handler this thread runs; zeros for none.
    static INSIDE: ThreadCell<(usize, u64)> = const { ThreadCell::new((0, 0)) };
}

/// Marks this thread as being inside a handler.
struct Inside((usize, u64));

impl Inside {
    fn enter(shared: &Shared, cell: &Cell) -> Self {
        Inside(INSIDE.replace((shared.address(), cell.number)))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

impl Shared {
    fn lanes(&self) -> &Lanes {
        self.lanes.get().expect("set before anybody has a handle")
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Whether this thread is inside a handler of this system, or of this very processor.
    pub(crate) fn is_inside(&self, cell: Option<&Cell>) -> bool {
        let (system, number) = INSIDE.get();
        system == self.address() && cell.is_none_or(|cell| cell.number == number)
    }

    pub(crate) fn load(&self, cell: &Cell) -> &Load {
        &self.loads[cell.address.place as usize]
    }

    /// Whether no more events are accepted.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// A turn of a processor has ended.
    fn leave(&self, cell: &Arc<Cell>, ran: &Ran) {
        if ran.taken > 0 {
            self.load(cell).leave(ran);
            if cell.gate().leave(ran.taken) {
                self.finish(cell);
            }
        }
    }

    /// Finishes a processor off whose mailbox is closed, with nobody inside.
    fn finish(&self, cell: &Arc<Cell>) {
        self.channels.forget(cell);
        self.registry.remove(&cell.id, cell);
        self.slots.remove(cell.address.slot);
        self.dismiss(cell);
    }

    /// Lets the handlers of a processor go. What they do when they are told so counts as inside a handler, whichever thread this is:
    /// if they stopped somebody and waited, whoever waits for this processor would wait with them.
    fn dismiss(&self, cell: &Cell) {
        let _inside = Inside::enter(self, cell);
        cell.finish();
    }

    /// The sum over all dispatchers.
    fn account(&self) -> Account {
        self.loads.iter().fold(Account::default(), |mut sum, load| {
            sum += load.account();
            sum
        })
    }

    /// Counts it and tells whoever wants to know. What the callback throws stops here.
    pub(crate) fn report(&self, report: Report) {
        if matches!(report, Report::Unmatched { .. }) {
            self.unmatched.fetch_add(1, Ordering::Relaxed);
        }
        let _ = catch_unwind(AssertUnwindSafe(|| (self.on_report)(report)));
    }
}

/// A system and a processor in it.
impl<'a> Around<'a> for (&'a Shared, &'a Cell) {
    fn load(self) -> &'a Load {
        self.0.load(self.1)
    }

    /// Called under the lock of the mailbox. There is always room for a token, so it is refused only when there will be no more turns.
    #[inline]
    fn announce(self, has_one: bool) -> bool {
        let (shared, cell) = self;
        match has_one {
            // Somebody will look, but not for ever.
            true => !shared.is_closing(),
            false => shared.lanes().try_submit((cell.address, Token(cell.address.slot))).is_ok(),
        }
    }
}

/// What a thread of the engine does with a turn.
struct Run {
    /// Not counted: the engine belongs to the system, and not the other way round.
    system: Weak<Shared>,
}

impl TurnHandler<Address, Token> for Run {
    fn handle(
        &self,
        context: &laneway::Context<'_, Address>,
        turn: &mut Messages<'_, '_, Address, Token>,
    ) -> Outcome {
        HERE.with(|here| {
            if here.get().is_none()
                && let Some(shared) = self.system.upgrade()
            {
                let _ = here.set(Handle { shared });
            }
            while let Some(&mut Token(slot)) = turn.next() {
                let events = here.get();
                // Neither is there if the system has been taken apart while this thread was away.
                if let Some(events) = events
                    && let Some(cell) = events.shared.slots.get(slot)
                    && run(events, &cell, context.worker(), turn)
                {
                    turn.again();
                }
            }
            Outcome::Done
        })
    }
}

/// Runs a processor for a turn. True if it has more to do.
fn run(
    events: &Handle,
    cell: &Arc<Cell>,
    thread: usize,
    turn: &mut Messages<'_, '_, Address, Token>,
) -> bool {
    let _inside = Inside::enter(&events.shared, cell);
    let mut ran = Ran::default();
    cell.run(events, thread, turn, &mut ran);
    events.shared.leave(cell, &ran);
    ran.has_more
}

/// A processor says itself where it belongs.
struct ByPlace;

impl Placement<Address> for ByPlace {
    fn looks_at(&self) -> LooksAt {
        LooksAt::Key
    }

    fn place(&self, key: &Address, _: u64, _: &dyn Among) -> Option<usize> {
        Some(key.place as usize)
    }
}

/// Sets an event system up.
#[must_use]
pub struct Builder {
    config: EventsConfig,
    on_report: OnReport,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Builder {
    /// Is told of unmatched events and failed handlers, on the thread where it happened. Default: a line on standard error.
    pub fn on_report(mut self, callback: impl Fn(Report) + Send + Sync + 'static) -> Self {
        self.on_report = Box::new(callback);
        self
    }

    /// Checks the configuration, and starts the threads.
    pub fn start(self) -> Result<Events, StartError> {
        let Builder { config, on_report } = self;
        let problems = config.problems();
        if !problems.is_empty() {
            return Err(StartError::Config(problems));
        }
        if let Some(cpus) = &config.thread_cpus {
            pinning::check(cpus).map_err(StartError::Pinning)?;
        }
        let timer = Arc::new(Timer::new(config.max_schedules));
        let shared = Arc::new(Shared {
            lanes: OnceLock::new(),
            registry: Registry::default(),
            slots: Slots::default(),
            channels: Channels::default(),
            timer: timer.clone(),
            loads: config.dispatchers().iter().map(|_| Load::new(config.dispatcher_capacity)).collect(),
            dispatchers: config.dispatchers().into_iter().map(Arc::from).collect(),
            latency_sampling: config.latency_sampling.try_into().unwrap_or(u32::MAX),
            default_queue_size: config.default_queue_size,
            stop_grace: config.stop_grace,
            next_number: AtomicU64::new(1),
            closing: AtomicBool::new(false),
            unmatched: AtomicU64::new(0),
            on_report,
        });
        let engine = engine(&config, &shared)?;
        let _ = shared.lanes.set(engine.handle());
        let (alive, scheduler) = channel();
        let (engine, scheduler) = (Some(engine), Mutex::new(scheduler));
        let events = Events { handle: Handle { shared }, engine, scheduler };
        let start = |number| {
            let (timer, alive) = (timer.clone(), alive.clone());
            let life = move || {
                timer.run();
                drop(alive);
            };
            std::thread::Builder::new().name(format!("scheduler-{number}")).spawn(life).map(drop)
        };
        let started = (0..config.scheduler_pool_size).try_for_each(start);
        // If one fails, those that run are ended by the drop of the system, which waits until nobody has one of these.
        drop(alive);
        started.map_err(|error| StartError::Thread(error.to_string()))?;
        Ok(events)
    }
}

/// More tokens than a thread of the engine takes at once.
const HANDFUL_MAX: usize = 1_024;

fn engine(config: &EventsConfig, shared: &Arc<Shared>) -> Result<Engine<Address, Token>, StartError> {
    let mut topology =
        // Where a processor belongs is known by its index, which no name is needed for.
        Topology::assigned(config.assignment.clone(), |_: &Address| "").placed(ByPlace);
    for (dispatcher, backoff) in &config.dispatcher_backoffs {
        topology = topology.backoff_of(dispatcher, backoff.clone());
    }
    let (system, cpus) = (Arc::downgrade(shared), config.thread_cpus.clone());
    // There is a token for each mailbox with something in it, and a thread may have a handful of those that it has just emptied. The load is the bound, not this: a token is
    // never refused for want of room.
    let handful = config.assignment.len().saturating_mul(HANDFUL_MAX);
    let tokens = config.dispatcher_capacity.saturating_add(handful);
    let builder = Engine::builder()
        .topology(topology)
        .ingress_capacity(tokens.saturating_mul(shared.dispatchers.len()))
        .worker_queue_capacity(tokens)
        .overflow(Overflow::Reject)
        .retry(RetryPolicy::never())
        .backoff(config.backoff.clone())
        // Events are timed, not tokens.
        .latency_sampling(0)
        .shutdown_grace(config.stop_grace)
        .on_worker_start(move |number| {
            if let Some(cpus) = &cpus {
                pinning::tie_to(cpus[number]);
            }
        })
        .turn_handler(Run { system });
    Ok(builder.build()?)
}

/// A running event system: it owns its threads. [`Handle`]s made from it register, post and look from anywhere.
///
/// Dropping it is a [`shutdown`](Events::shutdown) with no time to drain. Handlers have a [`Handle`], not this, so none can shut down
/// the system that runs it.
#[derive(Debug)]
pub struct Events {
    handle: Handle,
    /// `None` once it has been shut down.
    engine: Option<Engine<Address, Token>>,
    /// Hangs up when the last thread of the scheduler has ended.
    scheduler: Mutex<Receiver<()>>,
}

impl Events {
    /// Starts a system with this configuration.
    pub fn start(config: EventsConfig) -> Result<Events, StartError> {
        Events::builder(config).start()
    }

    /// Sets one up.
    pub fn builder(config: EventsConfig) -> Builder {
        Builder { config, on_report: Box::new(|report| eprintln!("laneway-events: {report}")) }
    }

    /// A handle, to be cloned and sent wherever it is needed.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Refuses registrations and events, cancels what is scheduled, handles what is in the mailboxes for at most `drain`, waits for the handlers that run, and
    /// gives back the rest.
    pub fn shutdown(mut self, drain: Duration) -> ShutdownReport {
        self.take_apart(drain)
    }

    fn take_apart(&mut self, drain: Duration) -> ShutdownReport {
        let shared = &self.handle.shared;
        shared.registry.close();
        shared.timer.close();
        // Nothing is ever sent. A maker of events that does not return would keep us for ever; its thread is left behind.
        let scheduler = self.scheduler.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = scheduler.recv_timeout(shared.stop_grace);
        let engine = self.engine.take().expect("taken apart once");
        shared.closing.store(true, Ordering::Release);
        let report = engine.shutdown(drain);
        let cells = shared.registry.take_all();
        for cell in &cells {
            let _ = cell.gate().close();
            shared.dismiss(cell);
        }
        shared.channels.clear();
        let of_cell = |cell: &Arc<Cell>| {
            let processor = cell.id.clone();
            cell.give_back(shared.load(cell))
                .into_iter()
                .map(move |event| Returned { processor: processor.clone(), event })
        };
        let returned = cells.iter().flat_map(of_cell).collect();
        shared.slots.clear();
        let account = shared.account();
        ShutdownReport { account, returned, still_running: report.still_running }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if self.engine.is_some() {
            drop(self.take_apart(Duration::ZERO));
        }
    }
}

impl std::ops::Deref for Events {
    type Target = Handle;
    fn deref(&self) -> &Handle {
        &self.handle
    }
}

/// An event that was not handled, and whose it was.
pub struct Returned {
    /// The id of the processor.
    pub processor: Arc<str>,
    /// The event, of the processor's type.
    pub event: Box<dyn Any + Send>,
}

impl fmt::Debug for Returned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Returned({:?})", self.processor)
    }
}

/// What a shutdown leaves.
#[derive(Debug)]
#[must_use = "it holds the events that were not handled"]
pub struct ShutdownReport {
    /// The final account. What was given back here or still runs is outstanding; what stops of processors gave back counts as done.
    pub account: Account,
    /// The events that were not handled, per processor in their order.
    pub returned: Vec<Returned>,
    /// Handlers that had not come back when the grace was over. Their threads are left behind.
    pub still_running: usize,
}

/// How far a stop has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopping {
    /// Nothing of it runs any more, and its id is free.
    Stopped,
    /// The stop was asked for inside a handler, which does not wait: what is in the mailbox will be handled, then the processor goes.
    Draining,
    /// A handler had not come back when the grace was over. When it does, the processor goes. What is left in its mailbox is not handled:
    /// another stop of the same [`ProcessorRef`] gives it back, or it is dropped with the last of these.
    StillRunning,
}

/// What a stop leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "it holds the events that were not handled"]
pub struct StopReport<E> {
    /// How far it has come.
    pub stopping: Stopping,
    /// The events that were not handled, in their order.
    pub returned: Vec<E>,
}

/// Registers, looks up, posts, subscribes, broadcasts, schedules and stops. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    pub(crate) shared: Arc<Shared>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("processors", &self.shared.registry.count()).finish_non_exhaustive()
    }
}

impl Handle {
    /// Begins to register a processor under this id. It exists once [`handle`](Registration::handle) has been called on what this gives back.
    pub fn processor(&self, id: impl Into<String>) -> Registration<'_> {
        self.registration(Some(id.into()))
    }

    /// The same with an id that nobody has.
    pub fn anonymous(&self) -> Registration<'_> {
        self.registration(None)
    }

    fn registration(&self, id: Option<String>) -> Registration<'_> {
        let (dispatcher, channels) = (String::new(), Vec::new());
        Registration { events: self, id, dispatcher, queue_size: None, parent: None, channels }
    }

    /// The processor of this id, if its events are of this type.
    pub fn get<E: Send + 'static>(&self, id: &str) -> Result<ProcessorRef<E>, LookupError> {
        let cell = self.shared.registry.get(id).ok_or_else(|| LookupError::Unknown(id.to_owned()))?;
        match cell.takes::<E>() {
            true => Ok(ProcessorRef::new(cell, self.clone())),
            false => Err(cell.wrong_type::<E>()),
        }
    }

    /// Posts an event to the processor of this id. Never blocks; what is not accepted is given back.
    pub fn post_to<E: Send + 'static>(&self, id: &str, event: E) -> Result<(), NotPosted<E>> {
        let processor = match self.get::<E>(id) {
            Ok(processor) => processor,
            Err(error) => return Err(NotPosted { event, reason: error.into() }),
        };
        processor
            .post(event)
            .map_err(|refused| NotPosted { event: refused.event, reason: refused.reason.into() })
    }

    /// The ids of all processors, in no particular order.
    pub fn ids(&self) -> Vec<Arc<str>> {
        self.shared.registry.ids()
    }

    /// The names of all dispatchers.
    pub fn dispatchers(&self) -> &[Arc<str>] {
        &self.shared.dispatchers
    }

    /// Stops the processor of this id; see [`ProcessorRef::stop`].
    pub fn stop(&self, id: &str, drain: Duration) -> Result<StopReport<Box<dyn Any + Send>>, LookupError> {
        let cell = self.shared.registry.get(id).ok_or_else(|| LookupError::Unknown(id.to_owned()))?;
        let (stopping, returned) = self.stop_cell(&cell, drain);
        Ok(StopReport { stopping, returned })
    }

    /// Everything that is counted.
    pub fn snapshot(&self) -> Snapshot {
        let shared = &self.shared;
        let engine = shared.lanes().snapshot();
        let dispatchers = shared.loads.iter().zip(engine.dispatchers);
        Snapshot {
            account: shared.account(),
            processors: shared.registry.count(),
            channels: shared.channels.len(),
            schedules: shared.timer.live(),
            unmatched: shared.unmatched.load(Ordering::Relaxed),
            dispatchers: dispatchers.map(|(load, stats)| load.stats(stats)).collect(),
            threads: engine.workers,
        }
    }

    /// Waits until no mailbox has an event in it. False if that has not come within `limit`.
    pub fn wait_quiet(&self, limit: Duration) -> bool {
        self.shared.lanes().wait_quiet(limit)
    }

    /// Closes the mailbox of a processor and takes it off all channels. Nobody waits.
    pub(crate) fn begin_stop(&self, cell: &Arc<Cell>) {
        let empty = cell.gate().close();
        self.shared.channels.forget(cell);
        if empty {
            self.shared.finish(cell);
        }
    }

    pub(crate) fn stop_cell(
        &self,
        cell: &Arc<Cell>,
        drain: Duration,
    ) -> (Stopping, Vec<Box<dyn Any + Send>>) {
        self.begin_stop(cell);
        if self.shared.is_inside(None) {
            return (Stopping::Draining, Vec::new());
        }
        let drained = cell.wait_finished(Instant::now() + drain.min(FAR));
        if !drained {
            cell.discarding.store(true, Ordering::Release);
            if !cell.wait_finished(Instant::now() + self.shared.stop_grace.min(FAR)) {
                return (Stopping::StillRunning, Vec::new());
            }
        }
        (Stopping::Stopped, cell.take_returned())
    }
}

/// A processor to be.
#[derive(Debug)]
#[must_use = "nothing is registered before `handle` or `handler` is called"]
pub struct Registration<'a> {
    events: &'a Handle,
    id: Option<String>,
    dispatcher: String,
    queue_size: Option<usize>,
    parent: Option<AnyProcessor>,
    channels: Vec<String>,
}

impl Registration<'_> {
    /// The dispatcher whose threads run it. Default: `""`.
    pub fn dispatcher(mut self, name: impl Into<String>) -> Self {
        self.dispatcher = name.into();
        self
    }

    /// At most this many events in its mailbox. Default: the configuration's `default-queue-size`.
    pub fn queue_size(mut self, events: usize) -> Self {
        self.queue_size = Some(events);
        self
    }

    /// The processor that this one belongs to. A reference and nothing more: it is not stopped with it.
    pub fn parent(mut self, parent: impl Into<AnyProcessor>) -> Self {
        self.parent = Some(parent.into());
        self
    }

    /// Subscribes it to these channels.
    pub fn subscribe(mut self, channels: &[&str]) -> Self {
        self.channels.extend(channels.iter().map(|channel| (*channel).to_owned()));
        self
    }

    /// Registers it with a closure that handles its events; it may return `()`, a [`Handled`] or a `Result`.
    ///
    /// ```
    /// use laneway_events::{Events, EventsConfig, Handled};
    /// let events = Events::start(EventsConfig::default())?;
    /// let mut seen = 0;
    /// events.processor("counter").queue_size(100).handle(move |context, event: u32| match event {
    ///     0 => Handled::Unmatched(event),
    ///     n => {
    ///         seen += n;
    ///         println!("{}: {seen} on thread {}", context.id(), context.thread());
    ///         Handled::Done
    ///     }
    /// })?;
    /// events.post_to("counter", 7_u32)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn handle<E, F, R>(self, handler: F) -> Result<ProcessorRef<E>, RegisterError>
    where
        E: Send + 'static,
        F: FnMut(&mut Context<'_, E>, E) -> R + Send + 'static,
        R: Into<Handled<E>> + 'static,
    {
        self.register(Box::new(Closure(handler)), false)
    }

    /// Registers it with a [`Handler`], whose `started` is called before the first event.
    pub fn handler<E: Send + 'static>(
        self,
        handler: impl Handler<E>,
    ) -> Result<ProcessorRef<E>, RegisterError> {
        self.register(Box::new(handler), true)
    }

    fn register<E: Send + 'static>(
        self,
        handler: Box<dyn Handler<E>>,
        start: bool,
    ) -> Result<ProcessorRef<E>, RegisterError> {
        let shared = &self.events.shared;
        let place = shared.dispatchers.iter().position(|known| **known == *self.dispatcher);
        let place = place.ok_or_else(|| RegisterError::NoSuchDispatcher {
            name: self.dispatcher.clone(),
            known: listed(&shared.dispatchers.iter().map(|name| name.to_string()).collect::<Vec<_>>()),
        })?;
        let queue_size = self.queue_size.unwrap_or(shared.default_queue_size);
        if queue_size == 0 || queue_size > 1_000_000 {
            return Err(RegisterError::QueueSize(queue_size));
        }
        let number = shared.next_number.fetch_add(1, Ordering::Relaxed);
        let id: Arc<str> = self.id.map_or_else(|| format!("processor-{number}").into(), Arc::from);
        let plan = Plan {
            id: id.clone(),
            number,
            place,
            dispatcher: shared.dispatchers[place].clone(),
            queue_size: queue_size.try_into().unwrap_or(u32::MAX),
            // By its number, so that not the first event of every one is timed.
            until_timed: number.checked_rem(shared.latency_sampling.into()).unwrap_or(0) as u32,
            parent: self.parent.map(|parent| parent.cell),
        };
        let cell = shared.slots.insert(|slot| plan.cell(slot, handler));
        // Under the registry's lock, so that nobody can post before it; a submission never blocks.
        let first = || match start {
            true => shared.put_start::<E>(&cell),
            false => Ok(()),
        };
        shared.registry.insert(&id, &cell, first).map_err(|error: RegisterError| {
            shared.slots.remove(cell.address.slot);
            match error {
                RegisterError::DuplicateId(_) => RegisterError::DuplicateId(id.to_string()),
                other => other,
            }
        })?;
        let channels: Vec<&str> = self.channels.iter().map(String::as_str).collect();
        if !channels.is_empty() {
            shared.channels.subscribe(&cell, &channels);
        }
        Ok(ProcessorRef::new(cell, self.events.clone()))
    }
}

impl Shared {
    fn put_start<E: Send + 'static>(&self, cell: &Arc<Cell>) -> Result<(), RegisterError> {
        // Beside the queue size, which is for events.
        cell.put_start::<E>(self).map_err(|reason| match reason {
            Refusal::ShutDown => RegisterError::ShutDown,
            _ => RegisterError::DispatcherFull,
        })
    }
}

impl From<NotInserted> for RegisterError {
    fn from(reason: NotInserted) -> Self {
        match reason {
            NotInserted::Closed => RegisterError::ShutDown,
            NotInserted::Taken => RegisterError::DuplicateId(String::new()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    /// In unit tests two processors each have the same fingerprint (`processor.rs`): every turn here may hold tokens of both.
    #[test]
    fn processors_that_share_a_lane_get_their_own_events_in_order() {
        let (report, reports) = channel();
        let report = Mutex::new(report);
        let on_report = move |it: Report| report.lock().unwrap().send(it.to_string()).unwrap();
        let events = Events::builder(EventsConfig::default()).on_report(on_report).start().unwrap();
        let (open, opened) = channel::<()>();
        let (tell, told) = channel();
        let numbers = (tell.clone(), tell.clone());
        let _one = events.processor("one").handle(|_, (): ()| ()).unwrap();
        let first = events.processor("first").handle(move |_, number: u32| {
            if number == 0 {
                opened.recv_timeout(DEADLINE).unwrap();
            }
            numbers.0.send(("first", number)).unwrap();
            if number == 5 { Err("five") } else { Ok(()) }
        });
        let second = events.processor("second").handle(move |_, text: String| {
            numbers.1.send(("second", text.parse().unwrap())).unwrap();
            if text == "7" {
                panic!("seven")
            }
        });
        drop(tell);
        let (first, second) = (first.unwrap(), second.unwrap());
        for number in 0..100 {
            first.post(number).unwrap();
            second.post(number.to_string()).unwrap();
        }
        open.send(()).unwrap();
        assert_eq!(first.stop(DEADLINE).stopping, Stopping::Stopped);
        assert_eq!(second.stop(DEADLINE).stopping, Stopping::Stopped);
        let seen: Vec<_> = told.iter().collect();
        for name in ["first", "second"] {
            let of_it: Vec<u32> =
                seen.iter().filter(|(of, _)| *of == name).map(|(_, number)| *number).collect();
            assert_eq!(of_it, (0..100).collect::<Vec<_>>(), "{name}");
        }
        let account = events.shutdown(DEADLINE).account;
        assert!(account.balances() && account.outstanding == 0);
        let reports: Vec<_> = reports.try_iter().collect();
        assert_eq!(reports.len(), 2, "{reports:?}");
        assert!(reports[0].contains("five") && reports[0].contains("first"), "{reports:?}");
        assert!(reports[1].contains("seven") && reports[1].contains("second"), "{reports:?}");
    }

    #[test]
    fn processors_that_have_stopped_do_not_hold_on_to_their_parents() {
        let events = Events::start(EventsConfig::default()).unwrap();
        let mut last = events.anonymous().handle(|_, (): ()| ()).unwrap();
        let mut known = vec![Arc::downgrade(&last.cell)];
        for _ in 0..10 {
            let next = events.anonymous().parent(&last).handle(|_, (): ()| ()).unwrap();
            known.push(Arc::downgrade(&next.cell));
            let _ = last.stop(DEADLINE);
            last = next;
        }
        assert!(last.cell.parent().is_some(), "the parent of one that lives is known, stopped or not");
        let there: Vec<_> = known.iter().map(|cell| cell.upgrade().is_some()).collect();
        assert_eq!(there, [vec![false; 9], vec![true; 2]].concat());
    }
}
