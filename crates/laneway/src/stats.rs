//! Counters, histograms, and the account that must balance.
//!
//! What happens under a dispatcher's lanes lock is counted there, without atomics, and read there by a snapshot; what a worker
//! does outside is counted in atomics that only it writes. So the hot path shares no cache line for the sake of statistics, and
//! a snapshot of a dispatcher, taken under both of its locks, is exact.

use std::{
    fmt,
    ops::AddAssign,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use hdrhistogram::Histogram;

use crate::admission::{Drops, Refusals};

/// Where every accepted message is: `accepted == done + failed + dropped + outstanding`, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Ever accepted.
    pub accepted: u64,
    /// Handled.
    pub done: u64,
    /// Given up: skipped, or failed at the last attempt.
    pub failed: u64,
    /// Dropped by an overflow policy.
    pub dropped: u64,
    /// All others: waiting, in flight, deferred, parked.
    pub outstanding: u64,
}

impl Account {
    /// Whether it adds up.
    pub fn balances(&self) -> bool {
        self.accepted == self.done + self.failed + self.dropped + self.outstanding
    }
}

impl AddAssign for Account {
    fn add_assign(&mut self, other: Account) {
        self.accepted += other.accepted;
        self.done += other.done;
        self.failed += other.failed;
        self.dropped += other.dropped;
        self.outstanding += other.outstanding;
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Account { accepted, done, failed, dropped, outstanding } = self;
        write!(
            f,
            "accepted {accepted} = done {done} + failed {failed} + dropped {dropped} + outstanding {outstanding}"
        )
    }
}

/// A distribution of times, from the messages that were timed (see `latency_sampling`).
#[derive(Clone)]
pub struct Latency(
    /// Made when the first message is timed: an engine whose messages are not timed does not pay for it.
    Option<Histogram<u64>>,
);

impl fmt::Debug for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (p50, p99) = (self.p50(), self.p99());
        write!(f, "Latency({} samples, p50 {p50:?}, p99 {p99:?}, max {:?})", self.samples(), self.max())
    }
}

impl Latency {
    pub(crate) fn new() -> Self {
        Latency(None)
    }

    fn histogram(&mut self) -> &mut Histogram<u64> {
        // From 100 ns to an hour at two digits: the precision of what is looked at, in some thirty kilobytes.
        let new = || Histogram::new_with_bounds(100, 3_600_000_000_000, 2).expect("valid bounds");
        self.0.get_or_insert_with(new)
    }

    pub(crate) fn record(&mut self, nanos: u64) {
        self.histogram().saturating_record(nanos);
    }

    pub(crate) fn add(&mut self, other: &Latency) {
        if let Some(other) = &other.0 {
            self.histogram().add(other).expect("same bounds");
        }
    }

    /// The time below which this share of the messages was. 0.99 is the 99th percentile.
    pub fn quantile(&self, share: f64) -> Duration {
        Duration::from_nanos(self.0.as_ref().map_or(0, |histogram| histogram.value_at_quantile(share)))
    }

    /// The median.
    pub fn p50(&self) -> Duration {
        self.quantile(0.50)
    }

    /// The 95th percentile.
    pub fn p95(&self) -> Duration {
        self.quantile(0.95)
    }

    /// The 99th percentile.
    pub fn p99(&self) -> Duration {
        self.quantile(0.99)
    }

    /// The longest.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.0.as_ref().map_or(0, Histogram::max))
    }

    /// What has come since an earlier look at the same distribution.
    #[must_use]
    pub fn since(&self, earlier: &Latency) -> Latency {
        let mut new = self.clone();
        if let (Some(now), Some(before)) = (&mut new.0, &earlier.0) {
            // It fails only for a distribution that is not an earlier look at this one; then everything counts as new.
            let _ = now.subtract(before);
        }
        new
    }

    /// How many messages were timed.
    pub fn samples(&self) -> u64 {
        self.0.as_ref().map_or(0, Histogram::len)
    }
}

/// What is counted under the lanes lock.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) evicted: Drops,
    pub(crate) dispatched: u64,
    pub(crate) turns: u64,
    pub(crate) retries: u64,
    pub(crate) panics: u64,
    pub(crate) looks: u64,
    pub(crate) parks: u64,
    pub(crate) wake_ups: u64,
    pub(crate) waiting: Latency,
    pub(crate) service: Latency,
    pub(crate) total: Latency,
}

impl Counted {
    pub(crate) fn new() -> Self {
        Counted {
            done: 0,
            failed: 0,
            evicted: Drops::default(),
            dispatched: 0,
            turns: 0,
            retries: 0,
            panics: 0,
            looks: 0,
            parks: 0,
            wake_ups: 0,
            waiting: Latency::new(),
            service: Latency::new(),
            total: Latency::new(),
        }
    }

    pub(crate) fn add(&mut self, tally: &Tally) {
        self.done += tally.done;
        self.failed += tally.failed;
        self.dispatched += tally.started;
        self.turns += tally.turns;
        self.retries += tally.retries;
        self.panics += tally.panics;
        for sample in &tally.samples {
            self.waiting.record(sample.started - sample.accepted);
            self.service.record(sample.ended - sample.started);
            self.total.record(sample.ended - sample.accepted);
        }
    }
}

/// What one turn came to, counted by its worker and added when it settles.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) turns: u64,
    pub(crate) started: u64,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) retries: u64,
    pub(crate) panics: u64,
    pub(crate) samples: Vec<Sample>,
}

impl Tally {
    pub(crate) fn clear(&mut self) {
        let mut samples = std::mem::take(&mut self.samples);
        samples.clear();
        *self = Tally { samples, ..Tally::default() };
    }

    /// How many messages have left the engine.
    pub(crate) fn released(&self) -> u64 {
        self.done + self.failed
    }
}

/// When a timed message was accepted, started and ended, in nanoseconds of the engine's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) accepted: u64,
    pub(crate) started: u64,
    pub(crate) ended: u64,
}

/// What one worker does, written by it alone.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct WorkerCounters {
    pub(crate) handled: AtomicU64,
    pub(crate) turns: AtomicU64,
    pub(crate) polls: AtomicU64,
    pub(crate) lock_attempts: AtomicU64,
    pub(crate) lock_failures: AtomicU64,
    pub(crate) backoff_sleeps: AtomicU64,
    pub(crate) parks: AtomicU64,
    pub(crate) wake_ups: AtomicU64,
}

impl WorkerCounters {
    /// A counter with one writer needs no read-modify-write.
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.store(counter.load(Relaxed) + n, Relaxed);
    }

    pub(crate) fn read(&self, name: &str) -> WorkerStats {
        WorkerStats {
            name: name.to_owned(),
            handled: self.handled.load(Relaxed),
            turns: self.turns.load(Relaxed),
            polls: self.polls.load(Relaxed),
            lock_attempts: self.lock_attempts.load(Relaxed),
            lock_failures: self.lock_failures.load(Relaxed),
            backoff_sleeps: self.backoff_sleeps.load(Relaxed),
            parks: self.parks.load(Relaxed),
            wake_ups: self.wake_ups.load(Relaxed),
        }
    }
}

/// A worker's counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerStats {
    /// Its name in the topology.
    pub name: String,
    /// Messages that it has handled, whatever the outcome.
    pub handled: u64,
    /// Turns that it has run.
    pub turns: u64,
    /// Times that it has looked for work, after a turn or between two sleeps.
    pub polls: u64,
    /// Times that it has tried to take a dispatcher, to find work or to settle it.
    pub lock_attempts: u64,
    /// Times that another had it.
    pub lock_failures: u64,
    /// Times that it slept because all of its dispatchers were taken. The first few times in a row it only pauses, uncounted.
    pub backoff_sleeps: u64,
    /// Times that it went to sleep for want of work.
    pub parks: u64,
    /// Times that it was woken, or woke for a timer.
    pub wake_ups: u64,
}

impl WorkerStats {
    /// Failed over tried.
    pub fn lock_failure_ratio(&self) -> f64 {
        ratio(self.lock_failures, self.lock_attempts)
    }

    /// Sleeps over polls.
    pub fn backoff_ratio(&self) -> f64 {
        ratio(self.backoff_sleeps, self.polls)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// A dispatcher's state and counters, all of one moment.
#[derive(Clone, Debug)]
pub struct DispatcherStats {
    /// Its name in the topology.
    pub name: String,
    /// Where its messages are.
    pub account: Account,
    /// Messages that wait: in ingress and in lanes (document 000's queue depth).
    pub depth: usize,
    /// Messages in ingress, not yet in their lanes.
    pub ingress_depth: usize,
    /// Messages in flight.
    pub in_flight: usize,
    /// Messages parked alone.
    pub parked_messages: usize,
    /// Lanes that exist now (document 003's `activeFamilies`). Exact once ingress is empty; messages in a stream have none.
    pub active_lanes: usize,
    /// Lanes in flight.
    pub running_lanes: usize,
    /// Lanes that wait for a retry.
    pub deferred_lanes: usize,
    /// Lanes that are parked.
    pub parked_lanes: usize,
    /// Whether it is paused.
    pub paused: bool,
    /// Messages that a handler was called for (`tasksDispatched`); a retry counts again.
    pub dispatched: u64,
    /// Turns that were run.
    pub turns: u64,
    /// Failed attempts that are tried again. A message that is held, or told to wait, has not failed.
    pub retries: u64,
    /// Handlers that panicked.
    pub panics: u64,
    /// Times that a worker has tried to take it.
    pub lock_attempts: u64,
    /// Times that another worker had it.
    pub lock_failures: u64,
    /// Times that a worker went to sleep here for want of work; one that serves several dispatchers sleeps at all of them.
    pub parks: u64,
    /// Times that such a worker was up again.
    pub wake_ups: u64,
    /// Messages that found their lane in flight when they reached it (`enqueuedDueToBusy`). Those that a stream takes reach none.
    pub enqueued_due_to_busy: u64,
    /// The deepest that any of its lanes has been (`maxPendingDepthObserved`). Messages in a stream are in none.
    pub max_pending_depth: u32,
    /// Drops by bound, policy and kind.
    pub drops: Drops,
    /// Refusals by reason.
    pub refusals: Refusals,
    /// From acceptance to the start of the handler.
    pub waiting: Latency,
    /// In the handler.
    pub service: Latency,
    /// From acceptance to the end of the handler.
    pub total: Latency,
}

impl DispatcherStats {
    /// Failed over tried.
    pub fn lock_failure_ratio(&self) -> f64 {
        ratio(self.lock_failures, self.lock_attempts)
    }
}

/// The whole engine at one moment.
///
/// Each dispatcher is seen under its locks, so each account balances, and so does their sum. Dispatchers are looked at one after the other: while
/// messages move, two of them may be a few microseconds apart. A lane that moves from one to another meanwhile is not counted twice. When the engine is quiet everything is exact.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// When it was taken, since the engine was built.
    pub at: Duration,
    /// The sum over the dispatchers, those that were removed included.
    pub account: Account,
    /// Drops over all dispatchers.
    pub drops: Drops,
    /// Refusals over all dispatchers.
    pub refusals: Refusals,
    /// Flows that are being tracked: mappings from a key to its dispatcher.
    pub active_mappings: usize,
    /// Messages that came for a flow that had finished.
    pub late: u64,
    /// Flows released by their time-to-live.
    pub expired_flows: u64,
    /// The dispatchers, in the topology's order.
    pub dispatchers: Vec<DispatcherStats>,
    /// The workers, in the topology's order.
    pub workers: Vec<WorkerStats>,
}

impl Snapshot {
    /// The handlers' latency over all dispatchers.
    pub fn service(&self) -> Latency {
        let mut sum = Latency::new();
        self.dispatchers.iter().for_each(|dispatcher| sum.add(&dispatcher.service));
        sum
    }

    /// Messages per second, per worker, since an earlier snapshot. A worker that is new since then counts from zero, also one with the name of another that has gone,
    /// as far as its count tells.
    pub fn rates_since(&self, earlier: &Snapshot) -> Vec<(String, f64)> {
        let seconds = (self.at.saturating_sub(earlier.at)).as_secs_f64().max(f64::EPSILON);
        let before =
            |name: &str| earlier.workers.iter().find(|worker| worker.name == name).map_or(0, |w| w.handled);
        let since = |worker: &WorkerStats| worker.handled.checked_sub(before(&worker.name));
        let rate = |worker: &WorkerStats| since(worker).unwrap_or(worker.handled) as f64 / seconds;
        self.workers.iter().map(|worker| (worker.name.clone(), rate(worker))).collect()
    }
}
