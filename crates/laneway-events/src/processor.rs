//! A processor: its mailbox is a lane of the engine, its key is its number, and its handlers live in its [`Cell`].
//!
//! An event's way: `ProcessorRef::post` → the gate (`gate.rs`) → the processor's mail, and a token for it into the engine's lane → a thread of the
//! dispatcher → [`Cell::run`] → the topmost handler. The lane sees to order and exclusion, so a handler is in the hands of one thread at a time, and no lock is
//! held while it runs: the thread takes the stack of handlers out of its cell and puts it back afterwards.
//!
//! # Events and their tokens
//!
//! Events stay where their type is known, so that none is boxed; the lane has a token for each. An event is put into the mail and its token into the lane
//! under the lock of the mail: both have the same order, and whoever has so many tokens in his hands finds at least as many events. A
//! thread takes the events of its turn out of the mail at once. What the turn did not come to goes back to the front, as the lane does with the tokens. A processor
//! without events keeps no memory for them.

use std::{
    any::{Any, TypeId, type_name},
    collections::VecDeque,
    fmt,
    hash::{Hash, Hasher},
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use laneway::{Messages, Outcome};

use crate::{
    AskError, Become, Context, Handle, Handled, Handler, LookupError, Refusal, Refused, Report,
    ask::{self, Reply},
    events::{Due, Shared, StopReport},
    gate::{Gate, Shut},
    handler::{Change, Closure, Stack},
    sync::{Condvar, Mutex, lock, wait_until},
};

/// What travels through the engine: the token of an event, or a request about the handlers, without its type. Each has the slot of its processor
/// on it: two processors whose fingerprints are the same share a lane, and so a turn may hold events of both.
pub(crate) enum Envelope {
    /// The next event in the mail.
    Event(u32),
    /// A `Change<E>`.
    Change(u32, Box<dyn Any + Send>),
    Start(u32),
}

impl Envelope {
    /// The slot of the processor that it is for.
    pub(crate) fn slot(&self) -> u32 {
        match self {
            Envelope::Event(slot) | Envelope::Change(slot, _) | Envelope::Start(slot) => *slot,
        }
    }
}

/// How a processor's part of a turn ended.
pub(crate) enum Ran {
    /// The turn is over.
    Over(Outcome),
    /// The turn goes on with this, which is for another processor.
    Strayed(Envelope),
}

/// The key of a lane: a processor, by its numbers.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    /// Its own for ever.
    number: u64,
    /// Where it is found while it lives.
    pub(crate) slot: u32,
    /// The index of its dispatcher.
    pub(crate) place: u32,
}

/// So many processors have the same fingerprint. In unit tests they are two, so that sharing a lane is seen at all.
const SHARING: u64 = if cfg!(test) { 2 } else { 1 };

impl Hash for Address {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.number / SHARING);
    }
}

/// The turn of a processor in the hands of a thread.
pub(crate) type Turn<'a, 'b, 'c> = &'a mut Messages<'b, 'c, Address, Option<Envelope>>;

/// What is known of a processor without the type of its events.
pub(crate) struct Cell {
    pub(crate) id: Arc<str>,
    /// Its own for ever: an id may be used again, a number is not.
    pub(crate) number: u64,
    pub(crate) address: Address,
    pub(crate) dispatcher: Arc<str>,
    pub(crate) queue_size: u64,
    /// Until it is finished off: a row of processors that each came from the one before it shall not hold on to all of them.
    parent: Mutex<Option<Arc<Cell>>>,
    pub(crate) gate: Gate,
    /// Set when the time to drain is over: events go back instead of into the handler.
    pub(crate) discarding: AtomicBool,
    returned: Mutex<Vec<Box<dyn Any + Send>>>,
    /// Whether it has been finished off, and who waits for that.
    finished: (Mutex<bool>, Condvar),
    behaviour: Box<dyn Behave>,
}

impl Cell {
    pub(crate) fn takes<E: 'static>(&self) -> bool {
        self.behaviour.event_type() == TypeId::of::<E>()
    }

    pub(crate) fn wrong_type<E>(&self) -> LookupError {
        let (id, takes) = (self.id.to_string(), self.behaviour.event_type_name());
        LookupError::WrongType { id, takes, given: type_name::<E>() }
    }

    /// Handles `first`, if there is one, and the rest of a turn, and counts in `taken` what it has taken. A panic of the handler goes
    /// through, after everything is in its place again.
    pub(crate) fn run(
        self: &Arc<Self>,
        events: &Handle,
        thread: usize,
        first: Option<Envelope>,
        turn: Turn<'_, '_, '_>,
        taken: &mut u64,
    ) -> Ran {
        self.behaviour.run(self, events, thread, first, turn, taken)
    }

    /// Puts an event into the mailbox.
    pub(crate) fn post<E: Send + 'static>(
        self: &Arc<Self>,
        shared: &Shared,
        event: E,
    ) -> Result<(), Refused<E>> {
        self.try_post(shared, event).map_err(|(refused, due)| {
            if let Some(due) = due {
                shared.settle(self, due);
            }
            refused
        })
    }

    /// The same for whoever holds a lock: no user code runs. If something is due afterwards, the caller has to settle it once it holds none.
    pub(crate) fn try_post<E: Send + 'static>(
        self: &Arc<Self>,
        shared: &Shared,
        event: E,
    ) -> Result<(), (Refused<E>, Option<Due>)> {
        if let Err(reason) = shared.enter(self) {
            return Err((Refused { event, reason }, None));
        }
        let mut mail = lock(&self.typed::<E>().mail.0);
        mail.push_back(event);
        let posted = shared.try_submit(self, Envelope::Event(self.address.slot));
        posted.map_err(|(_, reason, due)| {
            let event = mail.pop_back().expect("just put in, and nobody else was at it");
            (Refused { event, reason }, Some(due))
        })
    }

    /// The newest event of the mail, for whoever gives back what will not be handled.
    pub(crate) fn give_back(&self) -> Option<Box<dyn Any + Send>> {
        self.behaviour.give_back()
    }

    /// Lets go of whatever is still in the mail.
    pub(crate) fn clear_mail(&self) {
        self.behaviour.clear_mail();
    }

    /// The part that knows the type of its events.
    fn typed<E: Send + 'static>(&self) -> &Typed<E> {
        let behaviour: &dyn Any = &*self.behaviour;
        behaviour.downcast_ref().expect("posted by its type")
    }

    pub(crate) fn parent(&self) -> Option<Arc<Cell>> {
        lock(&self.parent).clone()
    }

    pub(crate) fn take_returned(&self) -> Vec<Box<dyn Any + Send>> {
        std::mem::take(&mut *lock(&self.returned))
    }

    /// Lets the handlers go and tells who waits. Done once, by whoever emptied the gate after it was closed, or by the shutdown.
    pub(crate) fn finish(&self) {
        self.behaviour.retire();
        let parent = lock(&self.parent).take();
        drop(parent);
        *lock(&self.finished.0) = true;
        self.finished.1.notify_all();
    }

    /// Waits until it has been finished off. False if that has not come by then.
    pub(crate) fn wait_finished(&self, deadline: Instant) -> bool {
        let mut finished = lock(&self.finished.0);
        while !*finished {
            if Instant::now() >= deadline {
                return false;
            }
            finished = wait_until(&self.finished.1, finished, Some(deadline));
        }
        true
    }
}

/// What a processor is made of.
pub(crate) struct Plan {
    pub(crate) id: Arc<str>,
    pub(crate) number: u64,
    pub(crate) place: usize,
    pub(crate) dispatcher: Arc<str>,
    pub(crate) queue_size: u64,
    pub(crate) parent: Option<Arc<Cell>>,
}

impl Plan {
    pub(crate) fn cell<E: Send + 'static>(self, slot: u32, handler: Box<dyn Handler<E>>) -> Arc<Cell> {
        let Plan { id, number, place, dispatcher, queue_size, parent } = self;
        let address = Address { number, slot, place: place as u32 };
        let home = Mutex::new(Home::Here(Stack(vec![handler]), VecDeque::new()));
        let behaviour = Box::new(Typed { home, mail: Mail(Mutex::new(VecDeque::new())) });
        Arc::new(Cell {
            id,
            number,
            address,
            dispatcher,
            queue_size,
            parent: Mutex::new(parent),
            gate: Gate::default(),
            discarding: AtomicBool::new(false),
            returned: Mutex::new(Vec::new()),
            finished: (Mutex::new(false), Condvar::new()),
            behaviour,
        })
    }
}

/// The part of a processor that knows the type of its events.
trait Behave: Any + Send + Sync {
    fn run(
        &self,
        cell: &Arc<Cell>,
        events: &Handle,
        thread: usize,
        first: Option<Envelope>,
        turn: Turn<'_, '_, '_>,
        taken: &mut u64,
    ) -> Ran;
    /// No handler will be called any more, except to be told so.
    fn retire(&self);
    fn give_back(&self) -> Option<Box<dyn Any + Send>>;
    fn clear_mail(&self);
    fn event_type(&self) -> TypeId;
    fn event_type_name(&self) -> &'static str;
}

struct Typed<E> {
    home: Mutex<Home<E>>,
    mail: Mail<E>,
}

/// Events that were accepted, oldest first: one for each token in the lane that is in nobody's hands. On a cache line of its own: whoever posts writes it, and
/// what stands beside it belongs to the thread that handles.
#[repr(align(64))]
struct Mail<E>(Mutex<VecDeque<E>>);

/// Where the handlers are.
enum Home<E> {
    /// Here, with an empty buffer to take events out in.
    Here(Stack<E>, VecDeque<E>),
    /// With the thread that runs one of them.
    Out,
    /// Gone, or, if they are out, to go when they come back.
    Retired,
}

/// Handlers, and the events of a turn, in the hands of a thread. They go back when it lets go of them, panic or not.
struct InHand<'a, E: 'static> {
    typed: &'a Typed<E>,
    stack: Option<Stack<E>>,
    events: VecDeque<E>,
}

impl<'a, E: 'static> InHand<'a, E> {
    fn take(typed: &'a Typed<E>) -> Option<Self> {
        let mut at_home = lock(&typed.home);
        match std::mem::replace(&mut *at_home, Home::Out) {
            Home::Here(stack, events) => Some(InHand { typed, stack: Some(stack), events }),
            Home::Out => unreachable!("a lane has one event in flight"),
            Home::Retired => {
                *at_home = Home::Retired;
                None
            }
        }
    }

    fn stack(&mut self) -> &mut Stack<E> {
        self.stack.as_mut().expect("taken out in `drop` only")
    }

    /// The next event, for a token. With it come those of the tokens behind it in this turn.
    fn next(&mut self, tokens: impl FnOnce() -> usize) -> E {
        if self.events.is_empty() {
            let tokens = tokens();
            let mut mail = lock(&self.typed.mail.0);
            match tokens == mail.len() {
                true => std::mem::swap(&mut self.events, &mut *mail),
                false => self.events.extend(mail.drain(..tokens)),
            }
        }
        self.events.pop_front().expect("an event for every token")
    }

    /// Puts back what the turn did not come to. True if the mail is empty, and then without memory.
    fn return_events(&mut self) -> bool {
        let mut mail = lock(&self.typed.mail.0);
        while let Some(event) = self.events.pop_back() {
            mail.push_front(event);
        }
        if mail.is_empty() {
            *mail = VecDeque::new();
        }
        mail.is_empty()
    }
}

impl<E: 'static> Drop for InHand<'_, E> {
    fn drop(&mut self) {
        let Some(stack) = self.stack.take() else { return };
        let mut at_home = lock(&self.typed.home);
        if matches!(*at_home, Home::Out) {
            let idle = self.return_events();
            let buffer = if idle { VecDeque::new() } else { std::mem::take(&mut self.events) };
            *at_home = Home::Here(stack, buffer);
            return;
        }
        drop(at_home);
        // The shutdown did not wait for this thread any longer: what it still has goes with it.
        dismiss(stack);
    }
}

/// Tells the handlers that it is over, the topmost first. What they throw stops here.
fn dismiss<E: 'static>(mut stack: Stack<E>) {
    while let Some(mut handler) = stack.0.pop() {
        let _ = catch_unwind(AssertUnwindSafe(move || handler.stopped()));
    }
}

/// An envelope, opened.
enum Opened<E> {
    Event(E),
    Change(Change<E>),
    Start,
}

impl<E: Send + 'static> InHand<'_, E> {
    /// Opens an envelope of this processor.
    fn open(&mut self, envelope: Envelope, turn: &Messages<'_, '_, Address, Option<Envelope>>) -> Opened<E> {
        match envelope {
            Envelope::Event(slot) => Opened::Event(self.next(|| {
                let is_ours =
                    |body: &&Option<Envelope>| matches!(body, Some(Envelope::Event(other)) if *other == slot);
                1 + turn.rest().take_while(is_ours).count()
            })),
            Envelope::Change(_, change) => Opened::Change(*change.downcast().expect("requested by its type")),
            Envelope::Start(_) => Opened::Start,
        }
    }
}

impl<E: Send + 'static> Stack<E> {
    /// Lets the topmost handler do what is due, and makes the changes that it wants.
    fn handle(&mut self, cell: &Arc<Cell>, events: &Handle, thread: usize, due: Opened<E>) -> Handled<E> {
        let mut context = Context { events, cell, thread, depth: self.0.len(), changes: Vec::new() };
        let top = self.0.last_mut().expect("there is always one");
        let handled = match due {
            Opened::Event(event) => top.handle(&mut context, event),
            Opened::Change(change) => {
                context.changes.push(change);
                Handled::Done
            }
            Opened::Start => {
                top.started(&mut context);
                Handled::Done
            }
        };
        if !matches!(handled, Handled::Failed(_)) {
            context.changes.into_iter().for_each(|change| self.apply(change));
        }
        handled
    }
}

impl<E: Send + 'static> Behave for Typed<E> {
    fn run(
        &self,
        cell: &Arc<Cell>,
        events: &Handle,
        thread: usize,
        mut first: Option<Envelope>,
        turn: Turn<'_, '_, '_>,
        taken: &mut u64,
    ) -> Ran {
        let mut hand = InHand::take(self);
        loop {
            let next = match first.take() {
                Some(first) => Some(first),
                None => match turn.next() {
                    Some(body) => body.take(),
                    None => return Ran::Over(Outcome::Done),
                },
            };
            let next = match next {
                Some(other) if other.slot() != cell.address.slot => return Ran::Strayed(other),
                next => next,
            };
            *taken += 1;
            // Without handlers: the shutdown did not wait for this thread any longer. The event goes with the processor.
            let (Some(hand), Some(envelope)) = (&mut hand, next) else { return Ran::Over(Outcome::Skip) };
            let due = hand.open(envelope, turn);
            if cell.discarding.load(Ordering::Acquire) {
                // The time to drain is over: the event is put where the stop finds it.
                if let Opened::Event(event) = due {
                    lock(&cell.returned).push(Box::new(event));
                }
                continue;
            }
            match hand.stack().handle(cell, events, thread, due) {
                Handled::Done => {}
                Handled::Failed(error) => {
                    let report = Report::Failed { processor: cell.id.clone(), error: error.clone() };
                    events.shared.report(report);
                    return Ran::Over(Outcome::Failed(error));
                }
                Handled::Unmatched(event) => {
                    let (processor, event_type) = (cell.id.clone(), type_name::<E>());
                    events.shared.report(Report::Unmatched { processor, event: Box::new(event), event_type });
                }
            }
        }
    }

    fn retire(&self) {
        let before = std::mem::replace(&mut *lock(&self.home), Home::Retired);
        if let Home::Here(stack, _) = before {
            dismiss(stack);
        }
    }

    fn give_back(&self) -> Option<Box<dyn Any + Send>> {
        lock(&self.mail.0).pop_back().map(|event| Box::new(event) as Box<dyn Any + Send>)
    }

    fn clear_mail(&self) {
        // Events are dropped when the lock is let go of.
        let left = std::mem::take(&mut *lock(&self.mail.0));
        drop(left);
    }

    fn event_type(&self) -> TypeId {
        TypeId::of::<E>()
    }

    fn event_type_name(&self) -> &'static str {
        type_name::<E>()
    }
}

/// A processor that takes events of type `E`: what others know it by. Cheap to clone, valid for ever; once the processor has stopped, it refuses.
pub struct ProcessorRef<E> {
    pub(crate) cell: Arc<Cell>,
    pub(crate) events: Handle,
    takes: PhantomData<fn(E)>,
}

impl<E> Clone for ProcessorRef<E> {
    fn clone(&self) -> Self {
        ProcessorRef { cell: self.cell.clone(), events: self.events.clone(), takes: PhantomData }
    }
}

impl<E> fmt::Debug for ProcessorRef<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessorRef({:?})", self.cell.id)
    }
}

impl<E> PartialEq for ProcessorRef<E> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.cell, &other.cell)
    }
}

impl<E> Eq for ProcessorRef<E> {}

impl<E: Send + 'static> ProcessorRef<E> {
    pub(crate) fn new(cell: Arc<Cell>, events: Handle) -> Self {
        debug_assert!(cell.takes::<E>());
        ProcessorRef { cell, events, takes: PhantomData }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.cell.id
    }

    /// The name of its dispatcher.
    pub fn dispatcher(&self) -> &str {
        &self.cell.dispatcher
    }

    /// Events in its mailbox: waiting, and in the handler.
    pub fn depth(&self) -> usize {
        self.cell.gate.inside() as usize
    }

    /// At most this many events are in its mailbox.
    pub fn queue_size(&self) -> usize {
        self.cell.queue_size as usize
    }

    /// Whether it takes no more events.
    pub fn is_stopped(&self) -> bool {
        self.cell.gate.is_closed()
    }

    /// The same without the type, to be a parent.
    pub fn untyped(&self) -> AnyProcessor {
        AnyProcessor::new(self.cell.clone(), self.events.clone())
    }

    /// Posts an event. Never blocks; what is not accepted is given back.
    pub fn post(&self, event: E) -> Result<(), Refused<E>> {
        self.cell.post(&self.events.shared, event)
    }

    /// The same for whoever holds a lock: no user code runs. If something is due afterwards, the caller has to [settle](Self::settle) it
    /// once it holds none.
    pub(crate) fn try_post(&self, event: E) -> Result<(), (Refused<E>, Option<Due>)> {
        self.cell.try_post(&self.events.shared, event)
    }

    /// Does what is due after something was refused.
    pub(crate) fn settle(&self, due: Option<Due>) {
        if let Some(due) = due {
            self.events.shared.settle(&self.cell, due);
        }
    }

    /// Posts an event that carries a [`Reply`], and waits for what comes back, at most so long.
    ///
    /// A handler that asks keeps its thread while it waits. Where that does not do, give the question a [`Reply::to`] and go on.
    ///
    /// ```
    /// use laneway_events::{Events, EventsConfig, Reply};
    /// use std::time::Duration;
    ///
    /// enum Account { Deposit(u64), Balance(Reply<u64>) }
    ///
    /// let events = Events::start(EventsConfig::default())?;
    /// let mut balance = 0;
    /// let account = events.processor("account").handle(move |_, event: Account| match event {
    ///     Account::Deposit(amount) => balance += amount,
    ///     Account::Balance(reply) => { reply.send(balance); }
    /// })?;
    /// account.post(Account::Deposit(5))?;
    /// assert_eq!(account.ask(Duration::from_secs(5), Account::Balance)?, 5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ask<R: Send + 'static>(
        &self,
        limit: Duration,
        question: impl FnOnce(Reply<R>) -> E,
    ) -> Result<R, AskError<E>> {
        if self.events.shared.is_inside(Some(&self.cell)) {
            return Err(AskError::Itself);
        }
        let (reply, pending) = ask::pair();
        self.post(question(reply)).map_err(AskError::Refused)?;
        pending.wait(limit).map_err(|error| match error {
            ask::NoAnswer::Unanswered => AskError::Unanswered,
            ask::NoAnswer::TimedOut => AskError::TimedOut(limit),
        })
    }

    /// Asks the processor to handle events by this closure, from behind all events that it has accepted so far. Takes a place in its mailbox as an event does.
    pub fn request_become<F, R>(&self, handler: F, how: Become) -> Result<(), Refusal>
    where
        F: FnMut(&mut Context<'_, E>, E) -> R + Send + 'static,
        R: Into<Handled<E>> + 'static,
    {
        self.request_become_handler(Closure(handler), how)
    }

    /// The same for a [`Handler`].
    pub fn request_become_handler(&self, handler: impl Handler<E>, how: Become) -> Result<(), Refusal> {
        self.request(Change::Become(Box::new(handler), how))
    }

    /// Asks the processor to take its topmost handler off the stack. The last one stays.
    pub fn request_unbecome(&self) -> Result<(), Refusal> {
        self.request(Change::Unbecome)
    }

    fn request(&self, change: Change<E>) -> Result<(), Refusal> {
        self.events.shared.enter(&self.cell)?;
        let submitted =
            self.events.shared.submit(&self.cell, Envelope::Change(self.cell.address.slot, Box::new(change)));
        submitted.map_err(|(_, reason)| reason)
    }

    /// Stops it: no more events, those in the mailbox are handled for at most `drain`, the one in the handler is waited for, and the
    /// rest is given back. Called inside a handler of this system it does not wait ([`Stopping::Draining`](crate::Stopping::Draining)).
    pub fn stop(&self, drain: Duration) -> StopReport<E> {
        let (stopping, returned) = self.events.stop_cell(&self.cell, drain);
        let typed = |event: Box<dyn Any + Send>| *event.downcast::<E>().expect("posted by its type");
        StopReport { stopping, returned: returned.into_iter().map(typed).collect() }
    }
}

/// A processor whose events are of some type or other: a parent, for one.
#[derive(Clone)]
pub struct AnyProcessor {
    pub(crate) cell: Arc<Cell>,
    events: Handle,
}

impl fmt::Debug for AnyProcessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnyProcessor({:?})", self.cell.id)
    }
}

impl AnyProcessor {
    pub(crate) fn new(cell: Arc<Cell>, events: Handle) -> Self {
        AnyProcessor { cell, events }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.cell.id
    }

    /// Whether it takes no more events.
    pub fn is_stopped(&self) -> bool {
        self.cell.gate.is_closed()
    }

    /// It, if its events are of this type.
    pub fn typed<E: Send + 'static>(&self) -> Option<ProcessorRef<E>> {
        self.cell.takes::<E>().then(|| ProcessorRef::new(self.cell.clone(), self.events.clone()))
    }
}

impl<E: Send + 'static> From<&ProcessorRef<E>> for AnyProcessor {
    fn from(processor: &ProcessorRef<E>) -> Self {
        processor.untyped()
    }
}

impl From<&AnyProcessor> for AnyProcessor {
    fn from(processor: &AnyProcessor) -> Self {
        processor.clone()
    }
}

impl From<Shut> for Refusal {
    fn from(shut: Shut) -> Self {
        match shut {
            Shut::Full => Refusal::QueueFull,
            Shut::Closed => Refusal::Stopped,
        }
    }
}
