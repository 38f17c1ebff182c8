//! The scheduler: events that are posted later. A few threads share one heap of what is due when.
//!
//! # How a schedule ends
//!
//! In exactly one of [`ScheduleEnd`]'s ways. Its [`Status`] is a lock around that answer. A thread that fires holds it while it posts, which
//! never blocks; a cancel takes it to say "cancelled" if nothing else has been said. So a cancel that returns true has come before
//! every post, or, for a rate, after the last one: the schedule never fires again. `tests/loom_schedule.rs` runs the two against each
//! other, and a schedule that is made against threads that go to sleep.
//!
//! Locks are taken in the order heap, status, mailbox, engine; user code (the event's maker, its drop, the
//! last words of a handler) runs under none.

use std::{
    cmp::Ordering,
    collections::BinaryHeap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    Handle, NotScheduled, ProcessorRef, Refused, Report, ScheduleRefusal,
    sync::{Condvar, Mutex, lock, wait_until},
};

/// How a schedule has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScheduleEnd {
    /// The event is in the mailbox.
    Posted,
    /// It was cancelled, by somebody or by the shutdown, before it could fire (again).
    Cancelled,
    /// The processor was not there any more.
    Unregistered,
    /// The mailbox was full. A schedule at a rate does not end by it: that tick is missed.
    QueueFull,
}

/// What is known of a schedule: whether and how it has ended, and how often it has fired.
#[derive(Debug, Default)]
pub struct Status {
    progress: Mutex<Progress>,
    ended: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    end: Option<ScheduleEnd>,
    posted: u64,
    missed: u64,
}

impl Status {
    /// Fires: `post` is called unless the schedule has ended; with `once`, or when there is nobody to post to, its answer is the end.
    pub fn fire(&self, once: bool, post: impl FnOnce() -> ScheduleEnd) -> Fired {
        let mut progress = lock(&self.progress);
        if progress.end.is_some() {
            return Fired::Over;
        }
        let end = post();
        match end {
            ScheduleEnd::Posted => progress.posted += 1,
            ScheduleEnd::QueueFull => progress.missed += 1,
            ScheduleEnd::Cancelled | ScheduleEnd::Unregistered => {}
        }
        let goes_on = !once && matches!(end, ScheduleEnd::Posted | ScheduleEnd::QueueFull);
        if goes_on {
            return Fired::GoesOn;
        }
        progress.end = Some(end);
        drop(progress);
        self.ended.notify_all();
        Fired::Ended
    }

    /// Cancels. True if that is how it has ended: then it never fires (again).
    pub fn cancel(&self) -> bool {
        let mut progress = lock(&self.progress);
        let first = progress.end.is_none();
        if first {
            progress.end = Some(ScheduleEnd::Cancelled);
            drop(progress);
            self.ended.notify_all();
        }
        first
    }

    /// How it has ended, if it has.
    pub fn end(&self) -> Option<ScheduleEnd> {
        lock(&self.progress).end
    }

    /// Waits for the end as long as it takes: in a model there is no time.
    #[cfg(loom)]
    pub fn wait_for_the_end(&self) -> ScheduleEnd {
        let mut progress = lock(&self.progress);
        loop {
            if let Some(end) = progress.end {
                return end;
            }
            progress = wait_until(&self.ended, progress, None);
        }
    }

    /// Waits for the end. `None` if it has not come by then.
    fn wait(&self, deadline: Instant) -> Option<ScheduleEnd> {
        let mut progress = lock(&self.progress);
        while progress.end.is_none() && Instant::now() < deadline {
            progress = wait_until(&self.ended, progress, Some(deadline));
        }
        progress.end
    }
}

/// What came of firing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fired {
    /// It had ended before.
    Over,
    /// This was its end.
    Ended,
    /// It fires again.
    GoesOn,
}

/// What the scheduler's threads do when it is time.
pub trait Task: Send + Sync {
    /// Its status.
    fn status(&self) -> &Status;
    /// The time between two ticks, if there is more than one.
    fn interval(&self) -> Duration {
        Duration::ZERO
    }
    /// Fires.
    fn fire(&self) -> Fired;
    /// Will not fire any more: lets go of its event.
    fn let_go(&self);
}

/// Something to be done at a time.
struct Entry {
    due: Instant,
    /// Whoever was scheduled first goes first.
    number: u64,
    task: Arc<dyn Task>,
}

impl Ord for Entry {
    /// Reversed, because the heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

/// The heap, and where its threads wait.
pub struct Timer {
    heap: Mutex<Heap>,
    changed: Condvar,
    most: usize,
}

#[derive(Default)]
struct Heap {
    entries: BinaryHeap<Entry>,
    next_number: u64,
    /// Schedules that have not ended, in the heap or being fired.
    live: usize,
    /// Cancelled since the last sweep: at least as many as there are dead entries in the heap that a sweep would find.
    cancelled: usize,
    closed: bool,
}

/// Dead entries are swept once there are so many of them, and more than living ones: a sweep costs each cancel little, and they
/// never hold more memory than the living.
const SWEEP_AT: usize = 64;

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer").field("live", &self.live()).finish_non_exhaustive()
    }
}

impl Timer {
    /// A heap for at most so many schedules.
    pub fn new(most: usize) -> Self {
        Timer { heap: Mutex::new(Heap::default()), changed: Condvar::new(), most }
    }

    /// How many schedules have not ended.
    pub fn live(&self) -> usize {
        lock(&self.heap).live
    }

    /// Takes in something new.
    pub fn add(&self, due: Instant, task: Arc<dyn Task>) -> Result<(), ScheduleRefusal> {
        let mut heap = lock(&self.heap);
        if heap.closed {
            return Err(ScheduleRefusal::ShutDown);
        }
        if heap.live >= self.most {
            return Err(ScheduleRefusal::TooMany);
        }
        heap.live += 1;
        self.push(heap, due, task);
        Ok(())
    }

    fn push(&self, mut heap: crate::sync::MutexGuard<'_, Heap>, due: Instant, task: Arc<dyn Task>) {
        let number = heap.next_number;
        heap.next_number += 1;
        let earliest = heap.entries.peek().is_none_or(|first| due < first.due);
        heap.entries.push(Entry { due, number, task });
        drop(heap);
        if earliest {
            self.changed.notify_one();
        }
    }

    /// The life of a thread of the scheduler.
    pub fn run(&self) {
        while let Some(entry) = self.next() {
            match entry.task.fire() {
                Fired::GoesOn => self.again(entry),
                Fired::Ended => self.ended(),
                // Whoever ended it has counted it.
                Fired::Over => {}
            }
        }
    }

    /// Waits for the next that is due. `None` when there will be none.
    fn next(&self) -> Option<Entry> {
        let mut heap = lock(&self.heap);
        loop {
            if heap.closed {
                return None;
            }
            let due = heap.entries.peek().map(|first| first.due);
            if due.is_some_and(|due| due <= Instant::now()) {
                let entry = heap.entries.pop().expect("just seen");
                let more = !heap.entries.is_empty();
                drop(heap);
                if more {
                    // Somebody else sees to the next while this one fires.
                    self.changed.notify_one();
                }
                return Some(entry);
            }
            heap = wait_until(&self.changed, heap, due);
        }
    }

    /// Puts a rate back for its next tick. Ticks that have been slept through are not made up for.
    fn again(&self, entry: Entry) {
        let heap = lock(&self.heap);
        if heap.closed {
            drop(heap);
            entry.task.status().cancel();
            return entry.task.let_go();
        }
        let interval = entry.task.interval();
        let (mut due, now) = (entry.due + interval, Instant::now());
        if due < now {
            let late = now.duration_since(due).as_nanos() / interval.as_nanos().max(1) + 1;
            due += interval.saturating_mul(u32::try_from(late).unwrap_or(u32::MAX));
        }
        self.push(heap, due, entry.task);
    }

    /// A schedule has ended by firing.
    fn ended(&self) {
        let mut heap = lock(&self.heap);
        if !heap.closed {
            heap.live -= 1;
        }
    }

    /// A schedule was cancelled; its entry may still be in the heap.
    fn cancelled(&self) {
        let mut heap = lock(&self.heap);
        if heap.closed {
            return;
        }
        heap.live -= 1;
        heap.cancelled += 1;
        let mut swept = Vec::new();
        if heap.cancelled >= SWEEP_AT && heap.cancelled > heap.entries.len() / 2 {
            let entries = std::mem::take(&mut heap.entries).into_vec();
            let (dead, living): (Vec<_>, Vec<_>) =
                entries.into_iter().partition(|entry| entry.task.status().end().is_some());
            heap.cancelled = 0;
            heap.entries = living.into();
            swept = dead;
        }
        drop(heap);
        // What they hold is dropped without the lock.
        drop(swept);
    }

    /// Nothing fires any more. What has not ended is cancelled.
    pub fn close(&self) {
        let mut heap = lock(&self.heap);
        heap.closed = true;
        let entries = std::mem::take(&mut heap.entries).into_vec();
        heap.live = 0;
        drop(heap);
        self.changed.notify_all();
        for entry in entries {
            if entry.task.status().cancel() {
                entry.task.let_go();
            }
        }
    }
}

/// Whom a schedule posts to.
enum Target<E> {
    Known(ProcessorRef<E>),
    /// Looked up when it fires.
    Named(Handle, Arc<str>),
}

impl<E: Send + 'static> Target<E> {
    /// The processor, if it is there. One of another type is not the one that was meant.
    fn processor(&self) -> Option<ProcessorRef<E>> {
        match self {
            Target::Known(processor) => Some(processor.clone()),
            Target::Named(events, id) => events.get(id).ok(),
        }
    }

    fn id(&self) -> Arc<str> {
        match self {
            Target::Known(processor) => processor.cell.id.clone(),
            Target::Named(_, id) => id.clone(),
        }
    }
}

/// An event at a time.
struct Once<E> {
    status: Status,
    target: Target<E>,
    event: Mutex<Option<E>>,
}

impl<E: Send + 'static> Task for Once<E> {
    fn status(&self) -> &Status {
        &self.status
    }

    fn fire(&self) -> Fired {
        let Some(event) = lock(&self.event).take() else { return Fired::Over };
        post(&self.status, true, &self.target, event)
    }

    fn let_go(&self) {
        let event = lock(&self.event).take();
        drop(event);
    }
}

/// Makes the event of a tick.
type Make<E> = Box<dyn FnMut() -> E + Send>;

/// An event at every interval.
struct Rate<E> {
    status: Status,
    target: Target<E>,
    interval: Duration,
    events: Handle,
    /// Out while it makes an event; gone when the schedule has ended.
    make: Mutex<Option<Make<E>>>,
}

impl<E: Send + 'static> Task for Rate<E> {
    fn status(&self) -> &Status {
        &self.status
    }

    fn interval(&self) -> Duration {
        self.interval
    }

    fn fire(&self) -> Fired {
        let Some(mut make) = lock(&self.make).take() else { return Fired::Over };
        let Ok(event) = catch_unwind(AssertUnwindSafe(&mut make)) else {
            let error = "the maker of a scheduled event panicked: the schedule is cancelled".to_owned();
            self.events.shared.report(Report::Failed { processor: self.target.id(), error });
            return if self.status.cancel() { Fired::Ended } else { Fired::Over };
        };
        let fired = post(&self.status, false, &self.target, event);
        if fired == Fired::GoesOn {
            *lock(&self.make) = Some(make);
            if self.status.end().is_some() {
                // Cancelled in between: who did found nothing to let go of.
                self.let_go();
            }
        }
        fired
    }

    fn let_go(&self) {
        let make = lock(&self.make).take();
        drop(make);
    }
}

/// Posts under the status. What was not accepted is dropped without it.
fn post<E: Send + 'static>(status: &Status, once: bool, target: &Target<E>, event: E) -> Fired {
    let mut left = Some(event);
    let processor = target.processor();
    let fired = status.fire(once, || {
        let Some(processor) = &processor else { return ScheduleEnd::Unregistered };
        let posted = processor.post(left.take().expect("posted once"));
        let Err(Refused { event, reason }) = posted else { return ScheduleEnd::Posted };
        left = Some(event);
        if reason.is_full() { ScheduleEnd::QueueFull } else { ScheduleEnd::Unregistered }
    });
    drop(left);
    fired
}

/// A schedule that was made. It goes on when this is dropped.
#[derive(Clone)]
pub struct Schedule {
    task: Arc<dyn Task>,
    timer: Arc<Timer>,
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schedule").field("end", &self.end()).finish_non_exhaustive()
    }
}

impl Schedule {
    /// Cancels it. True if that is how it has ended: it never fires (again), and nobody else was told so.
    pub fn cancel(&self) -> bool {
        let cancelled = self.task.status().cancel();
        if cancelled {
            self.timer.cancelled();
            self.task.let_go();
        }
        cancelled
    }

    /// How it has ended, if it has.
    pub fn end(&self) -> Option<ScheduleEnd> {
        self.task.status().end()
    }

    /// Waits for the end. `None` if it has not come within `limit`.
    pub fn wait(&self, limit: Duration) -> Option<ScheduleEnd> {
        self.task.status().wait(Instant::now() + limit.min(FAR))
    }

    /// How many events it has posted.
    pub fn posted(&self) -> u64 {
        lock(&self.task.status().progress).posted
    }

    /// How many ticks found the mailbox full.
    pub fn missed(&self) -> u64 {
        lock(&self.task.status().progress).missed
    }
}

/// Longer than anybody waits, and short enough to be added to a clock.
pub(crate) const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);

impl Handle {
    /// Posts an event to a processor after a while.
    pub fn schedule<E: Send + 'static>(
        &self,
        processor: &ProcessorRef<E>,
        delay: Duration,
        event: E,
    ) -> Result<Schedule, NotScheduled<E>> {
        self.schedule_once(Target::Known(processor.clone()), delay, event)
    }

    /// Posts an event, after a while, to the processor that has this id then.
    pub fn schedule_to<E: Send + 'static>(
        &self,
        id: &str,
        delay: Duration,
        event: E,
    ) -> Result<Schedule, NotScheduled<E>> {
        self.schedule_once(Target::Named(self.clone(), Arc::from(id)), delay, event)
    }

    /// Posts an event to a processor at a fixed rate, the first time after one interval. Ticks for which the scheduler is late, or the mailbox full, are missed and not
    /// made up for. It ends when it is cancelled, or the processor has stopped.
    ///
    /// ```
    /// use laneway_events::{Events, EventsConfig};
    /// use std::time::Duration;
    ///
    /// let events = Events::start(EventsConfig::default())?;
    /// let (tell, told) = std::sync::mpsc::channel();
    /// let clock = events.processor("clock").handle(move |_, tick: &'static str| drop(tell.send(tick)))?;
    /// let ticks = events.schedule_each(&clock, Duration::from_millis(1), || "tick")?;
    /// (0..3).for_each(|_| assert_eq!(told.recv_timeout(Duration::from_secs(5)), Ok("tick")));
    /// assert!(ticks.cancel());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn schedule_each<E: Send + 'static>(
        &self,
        processor: &ProcessorRef<E>,
        interval: Duration,
        make: impl FnMut() -> E + Send + 'static,
    ) -> Result<Schedule, ScheduleRefusal> {
        if interval.is_zero() {
            return Err(ScheduleRefusal::NoInterval);
        }
        let interval = interval.min(FAR);
        let rate = Arc::new(Rate {
            status: Status::default(),
            target: Target::Known(processor.clone()),
            interval,
            events: self.clone(),
            make: Mutex::new(Some(Box::new(make) as Make<E>)),
        });
        self.shared.timer.add(Instant::now() + interval, rate.clone())?;
        Ok(Schedule { task: rate, timer: self.shared.timer.clone() })
    }

    fn schedule_once<E: Send + 'static>(
        &self,
        target: Target<E>,
        delay: Duration,
        event: E,
    ) -> Result<Schedule, NotScheduled<E>> {
        let once = Arc::new(Once { status: Status::default(), target, event: Mutex::new(Some(event)) });
        match self.shared.timer.add(Instant::now() + delay.min(FAR), once.clone()) {
            Ok(()) => Ok(Schedule { task: once, timer: self.shared.timer.clone() }),
            Err(reason) => {
                let event = lock(&once.event).take().expect("nobody else has it");
                Err(NotScheduled { event, reason })
            }
        }
    }
}
