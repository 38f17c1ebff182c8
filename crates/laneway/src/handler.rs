//! What users implement, and how a worker calls it.
//!
//! A worker hands a whole turn to [`RunTurn::run`], which calls the user's handler for one message after the other (or once for all
//! of them), catches what it throws, and comes back with how the turn ended. One dynamic call per turn; inside, everything is
//! the user's own type.

use std::{
    cell::Cell,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use crate::{
    clock::{Clock, nanos},
    lane::{Ending, Turn},
    message::{Item, Kind, Message},
    outcome::{Cost, Decision, Outcome, RetryPolicy},
    stats::{Sample, Tally},
    worker::Tempo,
};

/// What a handler is told about the message beside its body.
pub struct Context<'a, K> {
    key: &'a K,
    kind: Kind,
    attempt: u32,
    /// What need not be said anew for each message.
    whereabouts: &'a Whereabouts<'a>,
}

/// Where messages are run one after the other, and what was noted about the one in hand.
struct Whereabouts<'a> {
    dispatcher: &'a str,
    worker: usize,
    note: Note,
}

impl<K> Context<'_, K> {
    /// What orders it.
    pub fn key(&self) -> &K {
        self.key
    }

    /// Event, start or finish. Of a batch, that of its first message.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The name of the dispatcher.
    pub fn dispatcher(&self) -> &str {
        self.whereabouts.dispatcher
    }

    /// The number of the worker.
    pub fn worker(&self) -> usize {
        self.whereabouts.worker
    }

    /// Says why, for whoever asks [`explain`](crate::Handle::explain) or gets the message in `on_fail`.
    pub fn note(&self, why: impl Into<String>) {
        self.whereabouts.note.say(why.into());
    }
}

impl<K: fmt::Debug> fmt::Debug for Context<'_, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Context { key, kind, attempt, whereabouts: Whereabouts { dispatcher, worker, .. } } = self;
        f.debug_struct("Context")
            .field("key", key)
            .field("kind", kind)
            .field("attempt", attempt)
            .field("dispatcher", dispatcher)
            .field("worker", worker)
            .finish()
    }
}

/// What a handler says about the message in its hands.
#[derive(Default)]
struct Note {
    text: Cell<Option<String>>,
    /// Whether there is a text: looked at after every message.
    said: Cell<bool>,
}

impl Note {
    fn say(&self, why: String) {
        self.text.set(Some(why));
        self.said.set(true);
    }

    fn take(&self) -> Option<String> {
        self.said.set(false);
        self.text.take()
    }

    /// The message is done: what was said about it is not for the next one.
    #[inline]
    fn forget(&self) {
        if self.said.get() {
            self.take();
        }
    }
}

/// Handles one message at a time. Closures need not implement this: see [`Builder::handle`](crate::Builder::handle).
///
/// The body belongs to the engine until the message is settled, so a handler that wants a retry need not clone it.
pub trait Handler<K, M>: Send + Sync + 'static {
    /// Handles a message. A panic is a failure of this message and of nothing else.
    fn handle(&self, context: &Context<'_, K>, body: &mut M) -> Outcome;
}

/// Handles up to `batch_max` consecutive messages of one key in one call.
pub trait BatchHandler<K, M>: Send + Sync + 'static {
    /// Handles a batch. The outcome is that of all messages that were not [completed](Batch::complete) before.
    fn handle(&self, context: &Context<'_, K>, batch: &mut Batch<'_, K, M>) -> Outcome;
}

/// Consecutive messages of one key, oldest first.
#[derive(Debug)]
pub struct Batch<'a, K, M> {
    items: &'a mut [Item<K, M>],
    completed: usize,
}

impl<K, M> Batch<'_, K, M> {
    /// How many there are; at least one.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The bodies, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &M> {
        self.items.iter().map(|item| &item.message.body)
    }

    /// The bodies, oldest first, to change or take from.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut M> {
        self.items.iter_mut().map(|item| &mut item.message.body)
    }

    /// The first `n` are done, whatever becomes of the others. Survives a panic.
    pub fn complete(&mut self, n: usize) {
        self.completed = n.min(self.items.len());
    }
}

/// Handles a turn: consecutive messages of one key, one after the other, as many as fit into a worker's slice of time. For handlers to which it costs
/// something to begin with a key, such as finding its state.
pub trait TurnHandler<K, M>: Send + Sync + 'static {
    /// Takes messages from `turn` until there is none, at least one. The outcome is that of the last one that it took; all before are done. After any
    /// other outcome than `Done`, and after a panic, it is called again for the rest of the turn. What becomes of a call that has asked for none becomes of the first: it
    /// failed, also if the outcome is `Done`.
    fn handle(&self, context: &Context<'_, K>, turn: &mut Messages<'_, '_, K, M>) -> Outcome;
}

/// The messages of a turn.
pub struct Messages<'a, 'b, K, M> {
    run: &'a mut Run<'b, K, M>,
    taken: &'a mut Taken,
    note: &'a Note,
}

/// The message that a turn handler has in its hands.
#[derive(Default)]
struct Taken {
    /// It has asked for one, in this call.
    was_asked: bool,
    is_open: bool,
    accepted: u64,
    started: u64,
}

impl<K, M> fmt::Debug for Messages<'_, '_, K, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messages").field("left", &self.run.turn.len()).finish()
    }
}

impl<K, M> Messages<'_, '_, K, M> {
    /// The next body. The one before it is done. `None` if there is no more, or the turn has to give way.
    #[expect(clippy::should_implement_trait, reason = "an iterator cannot lend")]
    #[inline]
    pub fn next(&mut self) -> Option<&mut M> {
        self.taken.was_asked = true;
        self.complete();
        let accepted = self.run.turn.next()?.accepted_at;
        if self.run.gives_way() {
            return None;
        }
        let started = self.run.start_time(accepted);
        self.run.tally.started += 1;
        *self.taken = Taken { was_asked: true, is_open: true, accepted, started };
        self.run.turn.items.front_mut().map(|item| &mut item.message.body)
    }

    /// Begins one more piece of work for the message in hand. For handlers whose messages stand for more than themselves, such as "there is mail": each piece is
    /// counted as handled and timed as a message is. False if the turn has to give way; while there is more to do, the message should then come [again](Messages::again).
    #[inline]
    pub fn next_piece(&mut self) -> bool {
        self.run.time(self.taken.accepted, self.taken.started);
        (self.taken.accepted, self.taken.started) = (0, 0);
        let goes_on = self.taken.is_open && !self.run.gives_way();
        if goes_on {
            self.taken.started = self.run.start_time(0);
            self.run.tally.started += 1;
        }
        goes_on
    }

    /// How many pieces, at most `most`, fit into the turn as far as is known: one while they are slow, or have not been timed. What a handler takes beyond that
    /// would be held up by one that takes long.
    pub fn pieces(&self, most: usize) -> usize {
        self.run.tempo.limit(most)
    }

    /// The piece in hand has waited so long, which nobody but the handler knows. It is taken into the latencies.
    pub fn waited(&mut self, waited: Duration) {
        if self.taken.started == 0 {
            self.taken.started = self.run.around.clock.now().max(1);
        }
        self.taken.accepted = self.taken.started.saturating_sub(nanos(waited)).max(1);
    }

    /// The message in hand is not done: it goes to the back of its lane, as if it had just been submitted, and the lane waits for its next turn as after any other.
    pub fn again(&mut self) {
        if std::mem::take(&mut self.taken.is_open) {
            self.run.time(self.taken.accepted, self.taken.started);
            let mut item = self.run.turn.items.pop_front().expect("the message in hand");
            // What it has waited so far has been told.
            item.accepted_at = 0;
            self.run.turn.attempts = 0;
            self.run.turn.again.push(item);
        }
    }

    /// The one in hand, if there is one, is done.
    #[inline]
    fn complete(&mut self) {
        if std::mem::take(&mut self.taken.is_open) {
            self.run.time(self.taken.accepted, self.taken.started);
            self.note.forget();
            self.run.complete_first();
        }
    }
}

/// Why a message failed for good, as `on_fail` is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// How many attempts were made; 0 if an operator skipped it before the first.
    pub attempts: u32,
    /// What the handler said, or the panic.
    pub note: Option<String>,
}

/// What is called with a message that failed for good.
pub(crate) type OnFail<K, M> = Box<dyn Fn(Message<K, M>, Failure) + Send + Sync>;

/// What a turn needs to know about the engine around it.
pub(crate) struct Surroundings<'a, K, M> {
    pub(crate) clock: &'a Clock,
    pub(crate) retry: &'a RetryPolicy,
    pub(crate) on_fail: Option<&'a OnFail<K, M>>,
    /// Raised when turns shall give way after the message they are handling.
    pub(crate) give_way: &'a AtomicBool,
    pub(crate) dispatcher: &'a str,
    pub(crate) worker: usize,
}

/// A turn in the hands of a worker.
pub(crate) struct Run<'a, K, M> {
    pub(crate) turn: &'a mut Turn<K, M>,
    pub(crate) tally: &'a mut Tally,
    pub(crate) tempo: &'a mut Tempo,
    pub(crate) around: Surroundings<'a, K, M>,
}

impl<'a, K, M> Run<'a, K, M> {
    /// What contexts say beside their message, with nothing noted yet.
    fn whereabouts(&self) -> Whereabouts<'a> {
        let Surroundings { dispatcher, worker, .. } = self.around;
        Whereabouts { dispatcher, worker, note: Note::default() }
    }

    /// Whether the rest of the turn shall wait.
    #[inline]
    pub(crate) fn gives_way(&self) -> bool {
        self.tempo.is_over() || self.around.give_way.load(Relaxed)
    }

    /// Takes note of the time of a message, if it is one of those that are timed.
    #[inline]
    pub(crate) fn time(&mut self, accepted: u64, started: u64) {
        if started > 0 {
            time(self.tempo, self.tally, self.around.clock, accepted, started);
        }
    }

    /// When the next message starts, if it is to be timed; else 0.
    #[inline]
    pub(crate) fn start_time(&mut self, accepted: u64) -> u64 {
        if accepted > 0 || self.tempo.wants_time() { self.around.clock.now().max(1) } else { 0 }
    }

    /// The first message of the turn is done.
    #[inline]
    pub(crate) fn complete_first(&mut self) {
        self.tally.done += 1;
        self.turn.attempts = 0;
        // Whatever its drop does, it is no longer in the turn.
        drop(self.turn.items.pop_front());
    }

    /// The first message of the turn failed, or has to wait. `None` if the turn goes on with the next.
    pub(crate) fn trouble(&mut self, outcome: Outcome, note: Option<String>) -> Option<Ending> {
        let attempt = self.turn.attempts + 1;
        let decision = self.around.retry.after_failure(&outcome, attempt);
        let note = match outcome {
            Outcome::Failed(error) => note.or(Some(error)),
            _ => note,
        };
        match decision {
            Decision::Defer { delay, cost } => {
                // Who only has to wait has not failed.
                let failed = u32::from(cost == Cost::Attempt);
                self.tally.retries += u64::from(failed);
                let until = self.around.clock.now().saturating_add(nanos(delay));
                let attempts = self.turn.attempts + failed;
                Some(Ending::Defer { until, attempts, was_begun: cost != Cost::Nothing, note })
            }
            Decision::ParkMessage => Some(Ending::ParkMessage { note }),
            Decision::ParkLane => Some(Ending::ParkLane { attempts: attempt, note }),
            Decision::Skip => {
                self.skip_first(Failure { attempts: attempt, note });
                None
            }
        }
    }

    fn skip_first(&mut self, failure: Failure) {
        self.tally.failed += 1;
        self.turn.attempts = 0;
        let item = self.turn.items.pop_front().expect("the message that failed");
        report_failure(self.around.on_fail, item.message, failure);
    }
}

/// A message that is timed, or whose turn's tempo is taken, has ended.
fn time(tempo: &mut Tempo, tally: &mut Tally, clock: &Clock, accepted: u64, started: u64) {
    let ended = clock.now().max(started);
    tempo.learn(started, ended);
    if accepted > 0 {
        tally.samples.push(Sample { accepted: accepted.min(started), started, ended });
    }
}

/// Gives a message that failed for good to the user. A panic of the callback, or of the message's drop, stops here.
pub(crate) fn report_failure<K, M>(on_fail: Option<&OnFail<K, M>>, message: Message<K, M>, failure: Failure) {
    let _ = catch_unwind(AssertUnwindSafe(|| match on_fail {
        Some(on_fail) => on_fail(message, failure),
        None => drop(message),
    }));
}

/// What turns a handler can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turns {
    /// Any: it is told the key of each message.
    OfAnyKeys,
    /// Those of one key: it is told that once for all of them. So no streams.
    OfOneKey,
    /// Those of one key, and as long as they may be: a batch handler wants all it can get.
    Full,
    /// Those of one key, and no other lane beside it: its handler may wait at any message, however quick those before it were, and whatever else was in the hand would wait with it.
    OneLane,
}

/// How a worker thread runs a turn.
pub(crate) trait RunTurn<K, M>: Send + Sync {
    fn run(&self, run: &mut Run<'_, K, M>) -> Ending;

    /// What kind of turns it can run.
    fn turns(&self) -> Turns {
        Turns::OfAnyKeys
    }
}

/// One message at a time.
pub(crate) struct Single<H>(pub(crate) H);

impl<K, M, H: Handler<K, M>> RunTurn<K, M> for Single<H> {
    fn run(&self, run: &mut Run<'_, K, M>) -> Ending {
        let here = run.whereabouts();
        // What has nothing to be dropped can stay where it came until all of it is handled, and need not be moved at all.
        let in_place = !std::mem::needs_drop::<(K, M)>();
        loop {
            let trouble = match in_place && run.turn.items.is_empty() {
                true => self.run_in_place(run, &here),
                false => self.run_one_by_one(run, &here),
            };
            let Some(outcome) = trouble else { return Ending::Handled };
            if let Some(ending) = run.trouble(outcome, here.note.take()) {
                return ending;
            }
        }
    }
}

/// How far a stream has come that is run in its place.
#[derive(Default)]
struct Progress {
    done: Cell<usize>,
    /// As many of those are timed.
    timed: Cell<usize>,
}

impl<H> Single<H> {
    /// Runs a stream until it ends, gives way, or a message fails, which then is the first of the turn.
    fn run_in_place<K, M>(&self, run: &mut Run<'_, K, M>, here: &Whereabouts<'_>) -> Option<Outcome>
    where
        H: Handler<K, M>,
    {
        let progress = Progress::default();
        // One landing mat for the whole turn: what happened before a panic is noted already.
        let result = catch_unwind(AssertUnwindSafe(|| self.run_places(run, here, &progress)));
        let done = progress.done.get();
        run.tally.started += done as u64;
        run.tally.done += done as u64;
        run.turn.stream.remove(done, progress.timed.get());
        let outcome = match result {
            Ok(None) => return None,
            Ok(Some(outcome)) => outcome,
            Err(panic) => {
                run.tally.panics += 1;
                Outcome::Failed(panic_text(&*panic))
            }
        };
        run.tally.started += 1;
        run.turn.next().expect("the message that failed");
        Some(outcome)
    }

    fn run_places<K, M>(
        &self,
        run: &mut Run<'_, K, M>,
        here: &Whereabouts<'_>,
        progress: &Progress,
    ) -> Option<Outcome>
    where
        H: Handler<K, M>,
    {
        let Run { turn, tally, tempo, around } = run;
        let (places, times) = turn.stream.places();
        let mut is_over = tempo.is_over();
        for (place, packed) in places.iter_mut().enumerate() {
            if is_over || around.give_way.load(Relaxed) {
                return None;
            }
            let is_timed = packed.is_timed();
            let started = if is_timed || tempo.wants_time() { around.clock.now().max(1) } else { 0 };
            let context = Context { key: &packed.key, kind: packed.kind(), attempt: 1, whereabouts: here };
            let outcome = self.0.handle(&context, &mut packed.body);
            if started > 0 {
                let timed = progress.timed.get();
                let accepted = if is_timed { times.get(timed).copied().unwrap_or(0) } else { 0 };
                progress.timed.set(timed + usize::from(is_timed && matches!(outcome, Outcome::Done)));
                time(tempo, tally, around.clock, accepted, started);
                is_over = tempo.is_over();
            }
            if !matches!(outcome, Outcome::Done) {
                return Some(outcome);
            }
            here.note.forget();
            progress.done.set(place + 1);
        }
        None
    }

    /// Runs a turn until it ends, gives way, or a message fails, which then is its first.
    fn run_one_by_one<K, M>(&self, run: &mut Run<'_, K, M>, here: &Whereabouts<'_>) -> Option<Outcome>
    where
        H: Handler<K, M>,
    {
        loop {
            let (in_handler, before) = (Cell::new(false), run.turn.len());
            let result = catch_unwind(AssertUnwindSafe(|| self.run_until_trouble(run, here, &in_handler)));
            match result {
                Ok(trouble) => return trouble,
                Err(panic) => {
                    run.tally.panics += 1;
                    // If not, it was the drop of a body that was done. Its successor is not to blame.
                    if in_handler.get() || run.turn.len() == before {
                        return Some(Outcome::Failed(panic_text(&*panic)));
                    }
                }
            }
        }
    }

    fn run_until_trouble<K, M>(
        &self,
        run: &mut Run<'_, K, M>,
        here: &Whereabouts<'_>,
        in_handler: &Cell<bool>,
    ) -> Option<Outcome>
    where
        H: Handler<K, M>,
    {
        while let Some(accepted) = run.turn.next().map(|item| item.accepted_at) {
            if run.gives_way() {
                return None;
            }
            let started = run.start_time(accepted);
            run.tally.started += 1;
            let item = run.turn.items.front_mut().expect("just seen");
            let (kind, attempt) = (item.message.kind, run.turn.attempts + 1);
            let context = Context { key: &item.message.key, kind, attempt, whereabouts: here };
            in_handler.set(true);
            let outcome = self.0.handle(&context, &mut item.message.body);
            in_handler.set(false);
            run.time(accepted, started);
            if !matches!(outcome, Outcome::Done) {
                return Some(outcome);
            }
            here.note.forget();
            run.complete_first();
        }
        None
    }
}

/// A turn at a time.
pub(crate) struct Turned<H>(pub(crate) H);

impl<K: Clone, M, H: TurnHandler<K, M>> RunTurn<K, M> for Turned<H> {
    fn run(&self, run: &mut Run<'_, K, M>) -> Ending {
        while run.turn.next().is_some() && !run.gives_way() {
            let (here, mut taken) = (run.whereabouts(), Taken::default());
            let result = catch_unwind(AssertUnwindSafe(|| self.call(run, &mut taken, &here)));
            let outcome = match result {
                Ok(Outcome::Done) if !taken.was_asked => {
                    Outcome::Failed("the handler took no message".into())
                }
                // What is left, if anything, was not started.
                Ok(Outcome::Done) => return Ending::Handled,
                Ok(outcome) => outcome,
                Err(panic) => {
                    run.tally.panics += 1;
                    Outcome::Failed(panic_text(&*panic))
                }
            };
            // Without its attempts the first message would come again for ever.
            if !taken.was_asked {
                run.tally.started += 1;
            }
            // Asked, and without one in hand, it was the drop of a body that was done, or what comes after all messages: nobody is to blame.
            if taken.is_open || !taken.was_asked {
                run.time(taken.accepted, taken.started);
                if let Some(ending) = run.trouble(outcome, here.note.take()) {
                    return ending;
                }
            }
        }
        Ending::Handled
    }

    fn turns(&self) -> Turns {
        Turns::OfOneKey
    }
}

impl<H> Turned<H> {
    fn call<K: Clone, M>(&self, run: &mut Run<'_, K, M>, taken: &mut Taken, here: &Whereabouts<'_>) -> Outcome
    where
        H: TurnHandler<K, M>,
    {
        let first = &run.turn.items[0].message;
        // The turn borrows its messages, keys included, so the context gets a copy: one per call, not per message.
        let (key, kind) = (first.key.clone(), first.kind);
        let context = Context { key: &key, kind, attempt: run.turn.attempts + 1, whereabouts: here };
        let mut messages = Messages { run, taken, note: &here.note };
        let outcome = self.0.handle(&context, &mut messages);
        if outcome == Outcome::Done {
            messages.complete();
        }
        outcome
    }
}

/// All messages of the turn in one call.
pub(crate) struct Batched<H>(pub(crate) H);

impl<K: Clone, M, H: BatchHandler<K, M>> RunTurn<K, M> for Batched<H> {
    fn run(&self, run: &mut Run<'_, K, M>) -> Ending {
        while !run.turn.items.is_empty() && !run.around.give_way.load(Relaxed) {
            let here = run.whereabouts();
            let (completed, outcome) = self.call(run, &here);
            for _ in 0..completed {
                // A body's drop may panic; the message is done all the same.
                let dropped = catch_unwind(AssertUnwindSafe(|| run.complete_first()));
                run.tally.panics += u64::from(dropped.is_err());
            }
            if outcome != Outcome::Done
                && let Some(ending) = run.trouble(outcome, here.note.take())
            {
                return ending;
            }
        }
        Ending::Handled
    }

    fn turns(&self) -> Turns {
        Turns::Full
    }
}

impl<H> Batched<H> {
    /// Calls the handler once; gives back how many messages are done, and what became of the first that is not.
    fn call<K: Clone, M>(&self, run: &mut Run<'_, K, M>, here: &Whereabouts<'_>) -> (usize, Outcome)
    where
        H: BatchHandler<K, M>,
    {
        let accepted = run.turn.items[0].accepted_at;
        let started = run.start_time(accepted);
        run.tally.started += run.turn.items.len() as u64;
        let (attempt, kind) = (run.turn.attempts + 1, run.turn.items[0].message.kind);
        let mut batch = Batch { items: run.turn.items.make_contiguous(), completed: 0 };
        let result = catch_unwind(AssertUnwindSafe(|| {
            // The batch borrows its messages, keys included, so the context gets a copy: one per call, not per message.
            let key = batch.items[0].message.key.clone();
            let context = Context { key: &key, kind, attempt, whereabouts: here };
            self.0.handle(&context, &mut batch)
        }));
        let (len, completed) = (batch.items.len(), batch.completed);
        run.time(accepted, started);
        match result {
            Ok(Outcome::Done) => (len, Outcome::Done),
            // Everything was completed before the trouble, so there is nobody whose trouble it could be.
            Ok(_) if completed == len => (len, Outcome::Done),
            Ok(outcome) => (completed, outcome),
            Err(panic) => {
                run.tally.panics += 1;
                let outcome =
                    if completed == len { Outcome::Done } else { Outcome::Failed(panic_text(&*panic)) };
                (completed, outcome)
            }
        }
    }
}

/// A closure as a [`Handler`].
pub(crate) struct Closure<F>(pub(crate) F);

impl<K, M, F, R> Handler<K, M> for Closure<F>
where
    F: Fn(&Context<'_, K>, &mut M) -> R + Send + Sync + 'static,
    R: Into<Outcome>,
{
    fn handle(&self, context: &Context<'_, K>, body: &mut M) -> Outcome {
        (self.0)(context, body).into()
    }
}

impl<K, M, F, R> BatchHandler<K, M> for Closure<F>
where
    F: Fn(&Context<'_, K>, &mut Batch<'_, K, M>) -> R + Send + Sync + 'static,
    R: Into<Outcome>,
{
    fn handle(&self, context: &Context<'_, K>, batch: &mut Batch<'_, K, M>) -> Outcome {
        (self.0)(context, batch).into()
    }
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("(not a text)"))
}
