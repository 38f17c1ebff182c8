//! A worker as a slot on tokio: a task that runs one turn after the other and is used again.
//!
//! There are as many slots as the topology has workers, not as many as there are lanes or messages: what waits is plain data.
//! The user's future lives inside the slot's own, so a message costs no allocation of ours and no spawn.

use std::{
    cell::Cell,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    task::Poll,
    time::Duration,
};

use tokio::sync::Notify;

use super::{Inside, Look, SLICE, Sleeper, Worker};
use crate::{
    engine::Shared,
    handler::{Turns, panic_text},
    lane::Ending,
    message::{Item, Kind},
    outcome::Outcome,
    worker::Seat,
};

/// A message in the hands of an async handler: its key, its body, and what else is known about it.
///
/// It derefs to the body. When it is dropped the message goes back to the engine, which settles it by the outcome; so a handler that wants a retry
/// need not clone it, and one that panics or is cancelled loses nothing.
pub struct Delivery<K, M> {
    item: Option<Item<K, M>>,
    attempt: u32,
    worker: usize,
    note: Cell<Option<String>>,
    home: Returned<K, M>,
}

/// Where a delivery puts its message when it is dropped. One per slot.
type Returned<K, M> = Arc<Mutex<Option<(Item<K, M>, Option<String>)>>>;

impl<K, M> Delivery<K, M> {
    fn item(&self) -> &Item<K, M> {
        self.item.as_ref().expect("there until it is dropped")
    }

    /// What orders it.
    pub fn key(&self) -> &K {
        &self.item().message.key
    }

    /// Event, start or finish.
    pub fn kind(&self) -> Kind {
        self.item().message.kind
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The number of the slot.
    pub fn worker(&self) -> usize {
        self.worker
    }

    /// Says why, for whoever asks [`explain`](crate::Handle::explain) or gets the message in `on_fail`.
    pub fn note(&self, why: impl Into<String>) {
        self.note.set(Some(why.into()));
    }
}

impl<K, M> std::ops::Deref for Delivery<K, M> {
    type Target = M;
    fn deref(&self) -> &M {
        &self.item().message.body
    }
}

impl<K, M> std::ops::DerefMut for Delivery<K, M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.item.as_mut().expect("there until it is dropped").message.body
    }
}

impl<K: fmt::Debug, M: fmt::Debug> fmt::Debug for Delivery<K, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery").field("key", self.key()).field("body", &**self).finish_non_exhaustive()
    }
}

impl<K, M> Drop for Delivery<K, M> {
    fn drop(&mut self) {
        let item = self.item.take().expect("dropped once");
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = Some((item, self.note.take()));
    }
}

/// An async handler, as the engine keeps it.
pub(crate) trait RunSlot<K, M>: Send + Sync {
    /// Starts a slot for this seat.
    fn spawn(&self, runtime: &tokio::runtime::Handle, shared: Arc<Shared<K, M>>, seat: Arc<Seat<K, M>>);

    /// Starts handling one message, for the simulator.
    fn start(&self, hand: &mut HandOver<K, M>, worker: &mut Worker<K, M>) -> BoxFuture;
}

/// The simulator polls handlers one by one and may allocate.
pub(crate) type BoxFuture = std::pin::Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// A closure as an async handler.
pub(crate) struct AsyncClosure<F>(pub(crate) Arc<F>);

impl<K, M, F, R> RunSlot<K, M> for AsyncClosure<F>
where
    K: Clone + Send + Sync + 'static,
    M: Send + 'static,
    F: Fn(Delivery<K, M>) -> R + Send + Sync + 'static,
    R: Future + Send + 'static,
    R::Output: Into<Outcome>,
{
    fn spawn(&self, runtime: &tokio::runtime::Handle, shared: Arc<Shared<K, M>>, seat: Arc<Seat<K, M>>) {
        let (handler, alarm) = (self.0.clone(), Arc::new(Notify::new()));
        let sleeper = Sleeper::slot(seat.number, alarm.clone(), runtime.metrics().num_workers());
        // Made here, not in the task: a runtime that goes before the task's first step drops it, and its seat is known to be empty.
        let worker = Worker::new(shared, seat, sleeper, Turns::OneLane);
        runtime.spawn(async move { work(worker, &*handler, &alarm).await });
    }

    fn start(&self, hand: &mut HandOver<K, M>, worker: &mut Worker<K, M>) -> BoxFuture {
        let (handler, delivery) = (self.0.clone(), hand.deliver(worker));
        Box::pin(async move { handler(delivery).await.into() })
    }
}

/// How many messages a slot may run one after the other before it gives way to the other tasks of its thread, if no handler waits for anything: as many steps as tokio gives a task. Fewer
/// where those that were timed have taken a slice of time together.
const MESSAGES_PER_POLL: usize = 128;

/// The whole life of a slot.
async fn work<K, M, F, R>(mut worker: Worker<K, M>, handler: &F, alarm: &Notify)
where
    K: Clone,
    F: Fn(Delivery<K, M>) -> R,
    R: Future,
    R::Output: Into<Outcome>,
{
    let mut hand = HandOver::new();
    loop {
        match worker.look() {
            Look::Turn => run_turns(&mut worker, &mut hand, handler).await,
            Look::Nothing => sleep(&mut worker, alarm).await,
            // The lock is held for nanoseconds: let the others on this thread go on, and look again.
            Look::Contended => tokio::task::yield_now().await,
            Look::Leave => return,
        }
    }
}

async fn run_turns<K, M, F, R>(worker: &mut Worker<K, M>, hand: &mut HandOver<K, M>, handler: &F)
where
    K: Clone,
    F: Fn(Delivery<K, M>) -> R,
    R: Future,
    R::Output: Into<Outcome>,
{
    loop {
        let ending = run(worker, hand, handler).await;
        let has_more = worker.settle(ending);
        if hand.unbroken.is_long() {
            hand.unbroken = Unbroken::default();
            tokio::task::yield_now().await;
        }
        if !has_more {
            return;
        }
    }
}

/// Runs the turn in the worker's hands.
async fn run<K, M, F, R>(worker: &mut Worker<K, M>, hand: &mut HandOver<K, M>, handler: &F) -> Ending
where
    K: Clone,
    F: Fn(Delivery<K, M>) -> R,
    R: Future,
    R::Output: Into<Outcome>,
{
    worker.tempo.begin();
    while worker.turn().next().is_some() && !worker.hand().gives_way() {
        let outcome = {
            // If this task is dropped while it waits, `carried` puts the message back into the turn, and the worker's own drop the
            // turn into its lane.
            let mut carried = Carried { worker: &mut *worker, hand: &mut *hand };
            let delivery = carried.hand.deliver(carried.worker);
            let engine = carried.worker.shared.address();
            let outcome = handle(handler, delivery, engine, &mut carried.hand.unbroken).await;
            carried.take_back();
            outcome
        };
        if let Some(ending) = hand.end(worker, outcome) {
            return ending;
        }
    }
    Ending::Handled
}

/// Calls the handler and drives its future, catching what either throws. What threw is dropped here.
async fn handle<K, M, F, R>(
    handler: &F,
    delivery: Delivery<K, M>,
    engine: usize,
    unbroken: &mut Unbroken,
) -> Result<Outcome, String>
where
    F: Fn(Delivery<K, M>) -> R,
    R: Future,
    R::Output: Into<Outcome>,
{
    let future = {
        let _inside = Inside::enter(engine);
        catch_unwind(AssertUnwindSafe(|| handler(delivery))).map_err(|panic| panic_text(&*panic))?
    };
    let mut future = pin!(Some(future));
    poll_fn(|context| {
        let _inside = Inside::enter(engine);
        let polled = catch_unwind(AssertUnwindSafe(|| {
            let running = future.as_mut().as_pin_mut().expect("not polled after it was ready");
            let polled = running.poll(context).map(Into::into);
            if polled.is_ready() {
                // To drop what it still holds is the user's code, too, and may submit.
                future.set(None);
            }
            polled
        }));
        match polled {
            Ok(Poll::Pending) => {
                *unbroken = Unbroken::default();
                Poll::Pending
            }
            Ok(Poll::Ready(outcome)) => Poll::Ready(Ok(outcome)),
            Err(panic) => {
                let _ = catch_unwind(AssertUnwindSafe(|| future.set(None)));
                Poll::Ready(Err(panic_text(&*panic)))
            }
        }
    })
    .await
}

/// A worker one of whose messages is with the user.
struct Carried<'a, K: Clone, M> {
    worker: &'a mut Worker<K, M>,
    hand: &'a mut HandOver<K, M>,
}

impl<K: Clone, M> Carried<'_, K, M> {
    fn take_back(&mut self) {
        self.hand.take_back(self.worker);
    }
}

impl<K: Clone, M> Drop for Carried<'_, K, M> {
    fn drop(&mut self) {
        self.take_back();
    }
}

/// How messages get from a turn to the user and back. One per slot, used again.
pub(crate) struct HandOver<K, M> {
    returned: Returned<K, M>,
    accepted: u64,
    started: u64,
    note: Option<String>,
    /// Whether the message came back. If not, the user has kept the delivery, and nobody can try it again.
    came_back: bool,
    unbroken: Unbroken,
}

/// What a slot has handled since it last left its thread to others.
#[derive(Default)]
struct Unbroken {
    messages: usize,
    /// As far as it was measured: that of all of them where they are slow.
    nanos: u64,
}

impl Unbroken {
    fn is_long(&self) -> bool {
        self.messages >= MESSAGES_PER_POLL || self.nanos >= SLICE
    }
}

impl<K: Clone, M> HandOver<K, M> {
    pub(crate) fn new() -> Self {
        HandOver {
            returned: Arc::new(Mutex::new(None)),
            accepted: 0,
            started: 0,
            note: None,
            came_back: false,
            unbroken: Unbroken::default(),
        }
    }

    /// Takes the first message out of the turn.
    pub(crate) fn deliver(&mut self, worker: &mut Worker<K, M>) -> Delivery<K, M> {
        let number = worker.seat.number;
        let mut run = worker.hand();
        run.turn.next();
        let item = run.turn.items.pop_front().expect("a message in the turn");
        self.accepted = item.accepted_at;
        self.started = run.start_time(self.accepted);
        run.tally.started += 1;
        let attempt = run.turn.attempts + 1;
        let home = self.returned.clone();
        Delivery { item: Some(item), attempt, worker: number, note: Cell::new(None), home }
    }

    /// Puts it back, if the user has let go of it.
    pub(crate) fn take_back(&mut self, worker: &mut Worker<K, M>) {
        let returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((item, note)) = returned {
            worker.turn().items.push_front(item);
            self.note = note;
            self.came_back = true;
        }
    }

    /// Settles the message by its outcome. `None` if the turn goes on.
    pub(crate) fn end(
        &mut self,
        worker: &mut Worker<K, M>,
        outcome: Result<Outcome, String>,
    ) -> Option<Ending> {
        // `on_fail` and the drop of a body are the user's, too, and the place of the message is still taken: who waited for it here would wait for itself.
        let _inside = Inside::enter(worker.shared.address());
        let mut run = worker.hand();
        let before = run.tempo.spent;
        run.time(self.accepted, self.started);
        self.unbroken.messages += 1;
        self.unbroken.nanos += run.tempo.spent - before;
        let (came_back, note) = (std::mem::take(&mut self.came_back), self.note.take());
        run.tally.panics += u64::from(outcome.is_err());
        if !came_back {
            // Done or not, it is the user's now.
            let done = outcome == Ok(Outcome::Done);
            run.tally.done += u64::from(done);
            run.tally.failed += u64::from(!done);
            run.turn.attempts = 0;
            // Whatever the user still holds must not come back into a later message's place.
            self.returned = Arc::new(Mutex::new(None));
            return None;
        }
        match outcome.unwrap_or_else(Outcome::Failed) {
            Outcome::Done => {
                let dropped = catch_unwind(AssertUnwindSafe(|| run.complete_first()));
                run.tally.panics += u64::from(dropped.is_err());
                None
            }
            outcome => run.trouble(outcome, note),
        }
    }
}

async fn sleep<K: Clone, M>(worker: &mut Worker<K, M>, alarm: &Notify) {
    let Some(until) = worker.lie_down() else { return };
    match until {
        None => alarm.notified().await,
        Some(until) => {
            let limit = Duration::from_nanos(until.saturating_sub(worker.shared.clock.now()));
            let _ = tokio::time::timeout(limit, alarm.notified()).await;
        }
    }
    worker.get_up();
}
