//! A processor: its mailbox is its mail and a lane of the engine, its key is its number, and its handlers live in its [`Cell`].
//!
//! An event's way: `ProcessorRef::post` → the mailbox (`mail.rs`), with a place at the dispatcher (`load.rs`), and, if there was nothing in it before, a token into the
//! engine's lane → a thread of the dispatcher → [`Cell::run`] → the topmost handler. The lane sees to exclusion, so a handler is in the hands of one thread at a
//! time, and no lock is held while it runs: the thread takes the stack of handlers out of its cell and puts it back afterwards.
//!
//! Events stay where their type is known, so that none is boxed, and in one queue with what else has a place in their order: changes of the handlers, the start.
//!
//! A processor without events keeps no memory for them, but not at once: a thread remembers the last few whose mailboxes it has emptied ([`Idle`]), and lets their memory go when others
//! take their places. So one that has an event now and then does not ask for memory each time.

use std::{
    any::{Any, TypeId, type_name},
    cell::RefCell,
    collections::VecDeque,
    fmt,
    hash::{Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use laneway::Messages;

use crate::{
    AskError, Become, Context, Handle, Handled, Handler, LookupError, Refusal, Refused, Report,
    ask::{self, Reply},
    events::{Shared, StopReport},
    handler::{Change, Closure, Stack},
    load::Load,
    mail::{Gate, Mailbox, Shut, drop_long},
    sync::{Condvar, Mutex, lock, wait_until},
};

/// What travels through the engine: there is mail for the processor in this slot. It has the slot on it, although the key says it, too: two processors whose
/// fingerprints are the same share a lane, and so a turn may hold tokens of both.
#[derive(Clone, Copy)]
pub(crate) struct Token(pub(crate) u32);

/// What a turn of a processor came to.
#[derive(Default)]
pub(crate) struct Ran {
    /// Events that were handled, whatever came of them.
    pub(crate) taken: u32,
    /// Those of them that failed, and those that panicked.
    pub(crate) failed: u32,
    pub(crate) panics: u32,
    /// Whether there is more: the token has to come again.
    pub(crate) has_more: bool,
}

/// So many events are handled in a turn at most: the others that are ready have theirs.
const TURN: u32 = 128;

/// So many are taken out of the mailbox at once, where events are quick. Taken whole, a mailbox is exchanged for an empty one and nothing is copied.
const HAND: usize = 2 * TURN as usize;

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

/// The turn of a lane in the hands of a thread.
pub(crate) type Turn<'a, 'b, 'c> = &'a mut Messages<'b, 'c, Address, Token>;

/// What is known of a processor without the type of its events.
pub(crate) struct Cell {
    pub(crate) id: Arc<str>,
    /// Its own for ever: an id may be used again, a number is not.
    pub(crate) number: u64,
    pub(crate) address: Address,
    pub(crate) dispatcher: Arc<str>,
    pub(crate) queue_size: u32,
    /// Until it is finished off: a row of processors that each came from the one before it shall not hold on to all of them.
    parent: Mutex<Option<Arc<Cell>>>,
    /// Set when the time to drain is over: events go back instead of into the handler.
    pub(crate) discarding: AtomicBool,
    returned: Mutex<Vec<Box<dyn Any + Send>>>,
    /// Whether it has been finished off, and who waits for that.
    finished: (Mutex<bool>, Condvar),
    behaviour: Arc<dyn Behave>,
}

impl Cell {
    pub(crate) fn takes<E: 'static>(&self) -> bool {
        self.behaviour.event_type() == TypeId::of::<E>()
    }

    pub(crate) fn wrong_type<E>(&self) -> LookupError {
        let (id, takes) = (self.id.to_string(), self.behaviour.event_type_name());
        LookupError::WrongType { id, takes, given: type_name::<E>() }
    }

    /// Handles a turn of what is in the mail, and counts in `ran` what came of it. The token is in the hands of `turn`.
    pub(crate) fn run(
        self: &Arc<Self>,
        events: &Handle,
        thread: usize,
        turn: Turn<'_, '_, '_>,
        ran: &mut Ran,
    ) {
        self.behaviour.run(self, events, thread, turn, ran);
    }

    /// Puts an event into the mailbox. No user code runs.
    pub(crate) fn post<E: Send + 'static>(&self, shared: &Shared, event: E) -> Result<(), Refused<E>> {
        self.typed::<E>().post(self, shared, event)
    }

    /// Puts the start into its mailbox.
    pub(crate) fn put_start<E: Send + 'static>(&self, shared: &Shared) -> Result<(), Refusal> {
        Ok(self.typed::<E>().mailbox.put_beside(Letter::Start, (shared, self))?)
    }

    /// Puts a change of the handlers into its mailbox, in which it has a place as an event has.
    fn put_change<E: Send + 'static>(&self, shared: &Shared, change: Change<E>) -> Result<(), Refusal> {
        let seal = |change, _| Letter::Change(Box::new(change));
        self.typed().mailbox.put(change, 0, seal, (shared, self)).map_err(|(_, shut)| shut.into())
    }

    /// How many are in its mailbox, and whether it takes more.
    pub(crate) fn gate(&self) -> &dyn Gate {
        self.behaviour.gate()
    }

    /// Empties the mail: its events, oldest first.
    pub(crate) fn give_back(&self, load: &Load) -> Vec<Box<dyn Any + Send>> {
        self.behaviour.give_back(load)
    }

    /// The part that knows the type of its events.
    fn typed<E: Send + 'static>(&self) -> &Typed<E> {
        let behaviour: &dyn Any = &*self.behaviour;
        behaviour.downcast_ref().expect("posted by its type")
    }

    /// The same, to be kept by who posts.
    fn share<E: Send + 'static>(&self) -> Arc<Typed<E>> {
        let behaviour: Arc<dyn Any + Send + Sync> = self.behaviour.clone();
        behaviour.downcast().expect("known by its type")
    }

    pub(crate) fn parent(&self) -> Option<Arc<Cell>> {
        lock(&self.parent).clone()
    }

    pub(crate) fn take_returned(&self) -> Vec<Box<dyn Any + Send>> {
        std::mem::take(&mut *lock(&self.returned))
    }

    /// Lets the handlers go and tells who waits. Done once, by whoever emptied the mailbox after it was closed, or by the shutdown.
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
    pub(crate) queue_size: u32,
    /// The first event that is timed.
    pub(crate) until_timed: u32,
    pub(crate) parent: Option<Arc<Cell>>,
}

impl Plan {
    pub(crate) fn cell<E: Send + 'static>(self, slot: u32, handler: Box<dyn Handler<E>>) -> Arc<Cell> {
        let Plan { id, number, place, dispatcher, queue_size, until_timed, parent } = self;
        let address = Address { number, slot, place: place as u32 };
        let home = Mutex::new(Home::Here(Stack(vec![handler]), Spare::default()));
        let behaviour = Arc::new(Typed { home, mailbox: Mailbox::new(queue_size, until_timed) });
        Arc::new(Cell {
            id,
            number,
            address,
            dispatcher,
            queue_size,
            parent: Mutex::new(parent),
            discarding: AtomicBool::new(false),
            returned: Mutex::new(Vec::new()),
            finished: (Mutex::new(false), Condvar::new()),
            behaviour,
        })
    }
}

/// The part of a processor that knows the type of its events.
trait Behave: Any + Send + Sync {
    fn run(&self, cell: &Arc<Cell>, events: &Handle, thread: usize, turn: Turn<'_, '_, '_>, ran: &mut Ran);
    /// No handler will be called any more, except to be told so.
    fn retire(&self);
    /// Lets go of the memory for events, if there are none. False if a thread has just begun with some, or has left some for its next turn.
    fn shrink(&self) -> bool;
    fn give_back(&self, load: &Load) -> Vec<Box<dyn Any + Send>>;
    fn gate(&self) -> &dyn Gate;
    fn event_type(&self) -> TypeId;
    fn event_type_name(&self) -> &'static str;
}

struct Typed<E> {
    home: Mutex<Home<E>>,
    mailbox: Mailbox<Letter<E>>,
}

/// Processors whose mailboxes a thread has emptied and that still have their memory for events, the oldest first.
#[derive(Default)]
struct Idle(RefCell<VecDeque<Weak<Cell>>>);

/// A thread remembers so many.
const IDLE_MAX: usize = 64;

thread_local! {
    static IDLE: Idle = Idle::default();
}

impl Idle {
    fn remember(cell: &Arc<Cell>) {
        IDLE.with(|Idle(idle)| {
            idle.borrow_mut().push_back(Arc::downgrade(cell));
            // Two for the one that came: those that are busy stay, and the list becomes short again all the same.
            for _ in 0..2 {
                // Nothing is borrowed while a processor is looked at: it may be gone afterwards, and what becomes of what it had is its users' business.
                let Some(oldest) = Self::too_many(idle) else { break };
                let shrink = || oldest.upgrade().is_some_and(|cell| !cell.behaviour.shrink());
                if catch_unwind(AssertUnwindSafe(shrink)).unwrap_or_default() {
                    idle.borrow_mut().push_back(oldest);
                }
            }
        });
    }

    fn too_many(idle: &RefCell<VecDeque<Weak<Cell>>>) -> Option<Weak<Cell>> {
        let mut idle = idle.borrow_mut();
        if idle.len() > IDLE_MAX { idle.pop_front() } else { None }
    }
}

/// What is in the mail. As large as an event, if that is not tiny: what few need is behind a pointer.
pub(crate) enum Letter<E> {
    Event(E),
    /// An event that is timed, and when it was posted.
    Timed(Box<(E, Instant)>),
    Change(Box<Change<E>>),
    Start,
}

impl<E> Letter<E> {
    #[inline]
    fn seal(event: E, timed: bool) -> Self {
        if timed { Letter::Timed(Box::new((event, Instant::now()))) } else { Letter::Event(event) }
    }

    fn event(self) -> Option<E> {
        match self {
            Letter::Event(event) => Some(event),
            Letter::Timed(timed) => Some(timed.0),
            Letter::Change(_) | Letter::Start => None,
        }
    }
}

/// Where the handlers are.
enum Home<E> {
    Here(Stack<E>, Spare<E>),
    /// With the thread that runs one of them.
    Out,
    /// Gone, or, if they are out, to go when they come back.
    Retired,
}

/// The buffer to take letters out in, with those that the last turn has left in it: they are older than what is in the mailbox.
struct Spare<E> {
    letters: VecDeque<Letter<E>>,
    /// Whether a thread remembers to let go of it, and of that of the mailbox.
    remembered: bool,
}

impl<E> Default for Spare<E> {
    fn default() -> Self {
        Spare { letters: VecDeque::new(), remembered: false }
    }
}

/// Handlers, and the letters of a turn, in the hands of a thread. They go back when it lets go of them, panic or not.
struct InHand<'a, E: 'static> {
    cell: &'a Arc<Cell>,
    typed: &'a Typed<E>,
    stack: Option<Stack<E>>,
    letters: VecDeque<Letter<E>>,
    /// It has found nothing in the mailbox.
    idle: bool,
    /// What is left of the letters goes back into the mailbox, where a shutdown finds it whatever the handler does in its next turn.
    goes_back: bool,
    remembered: bool,
}

impl<'a, E: 'static> InHand<'a, E> {
    fn take(cell: &'a Arc<Cell>, typed: &'a Typed<E>) -> Option<Self> {
        let mut at_home = lock(&typed.home);
        match std::mem::replace(&mut *at_home, Home::Out) {
            Home::Here(stack, Spare { letters, remembered }) => {
                let stack = Some(stack);
                Some(InHand { cell, typed, stack, letters, idle: false, goes_back: false, remembered })
            }
            Home::Out => unreachable!("a lane has one token in flight"),
            Home::Retired => {
                *at_home = Home::Retired;
                None
            }
        }
    }

    fn stack(&mut self) -> &mut Stack<E> {
        self.stack.as_mut().expect("taken out in `drop` only")
    }

    /// Whether there is one more, in its hands or in the mailbox; up to `most` are taken out of that. If there is none, this thread must not look any more.
    #[inline]
    fn has_next(&mut self, most: impl FnOnce() -> usize, load: &Load) -> bool {
        self.idle = self.letters.is_empty() && !self.typed.mailbox.take(&mut self.letters, most(), load);
        !self.idle
    }
}

impl<E: 'static> Drop for InHand<'_, E> {
    fn drop(&mut self) {
        let Some(stack) = self.stack.take() else { return };
        let mut at_home = lock(&self.typed.home);
        if matches!(*at_home, Home::Out) {
            if self.goes_back {
                self.typed.mailbox.put_back(&mut self.letters);
            }
            drop_long(&mut self.letters);
            let letters = std::mem::take(&mut self.letters);
            let is_new = self.idle && !std::mem::replace(&mut self.remembered, true);
            *at_home = Home::Here(stack, Spare { letters, remembered: self.remembered });
            drop(at_home);
            if is_new {
                Idle::remember(self.cell);
            }
            return;
        }
        drop(at_home);
        // The shutdown did not wait for this thread any longer: what it still has goes with it.
        dismiss(stack);
    }
}

/// Whether a whole turn is done in no time, as far as is known.
fn is_quick(turn: &Messages<'_, '_, Address, Token>) -> bool {
    turn.pieces(TURN as usize) == TURN as usize
}

/// What a panic said.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("(not a text)"))
}

/// Tells the handlers that it is over, the topmost first. What they throw stops here.
fn dismiss<E: 'static>(mut stack: Stack<E>) {
    while let Some(mut handler) = stack.0.pop() {
        let _ = catch_unwind(AssertUnwindSafe(move || handler.stopped()));
    }
}

/// What is due to a handler.
enum Opened<E> {
    Event(E),
    Change(Change<E>),
    Start,
}

impl<E: Send + 'static> InHand<'_, E> {
    /// Opens the next letter, of which there is one.
    fn open(&mut self, turn: Turn<'_, '_, '_>) -> Opened<E> {
        match self.letters.pop_front().expect("just seen") {
            Letter::Event(event) => Opened::Event(event),
            Letter::Timed(timed) => {
                turn.waited(timed.1.elapsed());
                Opened::Event(timed.0)
            }
            Letter::Change(change) => Opened::Change(*change),
            Letter::Start => Opened::Start,
        }
    }
}

impl<E: Send + 'static> Stack<E> {
    /// Lets the topmost handler do what is due, and makes the changes that it wants.
    #[inline]
    fn handle(&mut self, context: &mut Context<'_, E>, due: Opened<E>) -> Handled<E> {
        context.depth = self.0.len();
        let top = self.0.last_mut().expect("there is always one");
        let handled = match due {
            Opened::Event(event) => top.handle(context, event),
            Opened::Change(change) => {
                context.changes.push(change);
                Handled::Done
            }
            Opened::Start => {
                top.started(context);
                Handled::Done
            }
        };
        if !context.changes.is_empty() {
            match handled {
                Handled::Failed(_) => context.changes.clear(),
                Handled::Done | Handled::Unmatched(_) => {
                    context.changes.drain(..).for_each(|change| self.apply(change));
                }
            }
        }
        handled
    }
}

impl<E: Send + 'static> Typed<E> {
    /// Puts an event into the mailbox. No user code runs.
    #[inline]
    fn post(&self, cell: &Cell, shared: &Shared, event: E) -> Result<(), Refused<E>> {
        let put = self.mailbox.put(event, shared.latency_sampling, Letter::seal, (shared, cell));
        put.map_err(|(event, shut)| Refused { event, reason: shut.into() })
    }

    /// Handles letters until the turn is over or a handler panics. Says whether there is more.
    fn run_until_panic(
        &self,
        hand: &mut InHand<'_, E>,
        around: (&Arc<Cell>, &Handle, usize),
        turn: Turn<'_, '_, '_>,
        ran: &mut Ran,
    ) -> bool {
        let (cell, events, thread) = around;
        let load = events.shared.load(cell);
        let mut context = Context { events, cell, thread, depth: 0, changes: Vec::new() };
        loop {
            let left = (TURN - ran.taken) as usize;
            // What is in its hands cannot be given back as long as a handler is stuck: few, unless they are quick.
            let most = || if is_quick(turn) { HAND } else { turn.pieces(left.max(1)).min(left) };
            if !hand.has_next(most, load) {
                return false;
            }
            // The token itself began the first.
            if left == 0 || ran.taken > 0 && !turn.next_piece() {
                return true;
            }
            ran.taken += 1;
            let due = hand.open(turn);
            if cell.discarding.load(Ordering::Acquire) {
                // The time to drain is over: the event is put where the stop finds it.
                if let Opened::Event(event) = due {
                    lock(&cell.returned).push(Box::new(event));
                }
                continue;
            }
            match hand.stack().handle(&mut context, due) {
                Handled::Done => {}
                Handled::Failed(error) => {
                    ran.failed += 1;
                    events.shared.report(Report::Failed { processor: cell.id.clone(), error });
                }
                Handled::Unmatched(event) => {
                    let (processor, event_type) = (cell.id.clone(), type_name::<E>());
                    events.shared.report(Report::Unmatched { processor, event: Box::new(event), event_type });
                }
            }
        }
    }
}

impl<E: Send + 'static> Behave for Typed<E> {
    fn run(&self, cell: &Arc<Cell>, events: &Handle, thread: usize, turn: Turn<'_, '_, '_>, ran: &mut Ran) {
        // Without handlers: the shutdown did not wait for this thread any longer. What is in the mail goes with the processor.
        let Some(mut hand) = InHand::take(cell, self) else { return };
        loop {
            let around = (cell, events, thread);
            let run = || self.run_until_panic(&mut hand, around, turn, ran);
            match catch_unwind(AssertUnwindSafe(run)) {
                Ok(has_more) => {
                    ran.has_more = has_more;
                    hand.goes_back = has_more && !is_quick(turn);
                    return;
                }
                Err(panic) => {
                    (ran.failed, ran.panics) = (ran.failed + 1, ran.panics + 1);
                    let error = panic_text(&*panic);
                    events.shared.report(Report::Failed { processor: cell.id.clone(), error });
                }
            }
        }
    }

    fn retire(&self) {
        let mut at_home = lock(&self.home);
        let before = std::mem::replace(&mut *at_home, Home::Retired);
        let Home::Here(stack, mut spare) = before else { return self.mailbox.shrink() };
        // To be given back with the rest.
        self.mailbox.put_back(&mut spare.letters);
        self.mailbox.shrink();
        drop(at_home);
        dismiss(stack);
    }

    fn shrink(&self) -> bool {
        let mut at_home = lock(&self.home);
        match &mut *at_home {
            Home::Here(_, spare) if spare.letters.is_empty() => {
                *spare = Spare::default();
                self.mailbox.shrink();
                true
            }
            Home::Here(..) | Home::Out => false,
            Home::Retired => true,
        }
    }

    fn give_back(&self, load: &Load) -> Vec<Box<dyn Any + Send>> {
        let events = self.mailbox.empty(load).into_iter().filter_map(Letter::event);
        events.map(|event| Box::new(event) as Box<dyn Any + Send>).collect()
    }

    fn gate(&self) -> &dyn Gate {
        &self.mailbox
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
    /// The part of it that has the mailbox.
    typed: Arc<Typed<E>>,
    pub(crate) events: Handle,
}

impl<E> Clone for ProcessorRef<E> {
    fn clone(&self) -> Self {
        ProcessorRef { cell: self.cell.clone(), typed: self.typed.clone(), events: self.events.clone() }
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
        let typed = cell.share();
        ProcessorRef { cell, typed, events }
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
        self.cell.gate().inside() as usize
    }

    /// At most this many events are in its mailbox.
    pub fn queue_size(&self) -> usize {
        self.cell.queue_size as usize
    }

    /// Whether it takes no more events.
    pub fn is_stopped(&self) -> bool {
        self.cell.gate().is_closed()
    }

    /// The same without the type, to be a parent.
    pub fn untyped(&self) -> AnyProcessor {
        AnyProcessor::new(self.cell.clone(), self.events.clone())
    }

    /// Posts an event. Never blocks; what is not accepted is given back.
    pub fn post(&self, event: E) -> Result<(), Refused<E>> {
        self.typed.post(&self.cell, &self.events.shared, event)
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
        self.cell.put_change(&self.events.shared, change)
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
        self.cell.gate().is_closed()
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
            Shut::DispatcherFull => Refusal::DispatcherFull,
            Shut::Closed => Refusal::Stopped,
            Shut::Over => Refusal::ShutDown,
        }
    }
}
