//! The handler that every contender runs: checks the order, spends the cost of the workload, counts.
//!
//! A contender receives an `Arc<Probe>` when it starts and calls [`Probe::handle`] on a thread, or [`Probe::handle_async`]
//! in a task, once per message. The driver reads the probe from outside: how many are done, how long they waited, whether
//! the order held. Counting writes no shared cache line: each thread has a stripe of its own, found through a thread-local,
//! and only that thread writes it, so that a plain load and store suffice.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::sync::Semaphore;

use crate::check::Checker;
use crate::message::{Body, Message};
use crate::plan::CellMap;
use crate::workload::{Cost, FAMILY, Kind, Workload};

/// More threads than any contender starts: 5,000 workers of W5 and some dispatchers.
const STRIPES: usize = 8_192;

thread_local! {
    /// The probe that this thread last worked for, and its stripe there.
    static STRIPE: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

/// Gives every probe of a process its own identity, so that a thread never uses the stripe of another probe.
static PROBES: AtomicU64 = AtomicU64::new(1);

/// What one thread counted. Two cache lines, because processors fetch lines in pairs.
#[repr(align(128))]
#[derive(Default)]
struct Stripe {
    /// Messages handled; written by one thread only.
    done: AtomicU64,
    /// Latencies; locked by one thread only until the end.
    latencies: Mutex<Option<Box<Latencies>>>,
}

/// When handlers last ended, in nanoseconds.
#[derive(Default)]
struct Ends {
    family: AtomicU64,
    others: AtomicU64,
}

/// Waiting times of an open-loop run, in nanoseconds.
#[derive(Clone)]
pub struct Latencies {
    /// From the time a message should have been submitted to the start of its handler.
    pub from_intended: Histogram<u64>,
    /// From the time it was really submitted.
    pub from_submission: Histogram<u64>,
}

impl Latencies {
    fn new() -> Self {
        // Up to a minute, as which whatever is longer counts; three significant digits, finer than any difference between two rounds.
        let histogram = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are in order");
        Self { from_intended: histogram.clone(), from_submission: histogram }
    }

    fn record(&mut self, body: &Body, now_ns: u64) {
        self.from_intended.saturating_record(now_ns.saturating_sub(body.intended_ns));
        self.from_submission.saturating_record(now_ns.saturating_sub(body.submitted_ns()));
    }

    fn add(&mut self, other: &Self) {
        self.from_intended.add(&other.from_intended).expect("all histograms have the same bounds");
        self.from_submission.add(&other.from_submission).expect("all histograms have the same bounds");
    }
}

/// The handler of a run, and its instruments.
pub struct Probe {
    identity: u64,
    checker: Checker,
    cost: Cost,
    timed: bool,
    /// Of the hot family and of all others, where there is one.
    ends: Option<Ends>,
    epoch: Instant,
    gate: Gate,
    stripes: Box<[Stripe]>,
    stripes_used: AtomicUsize,
}

impl Probe {
    /// The probe of a workload whose keys are spread over cells like this.
    pub fn new(workload: &Workload, map: CellMap) -> Self {
        Self {
            identity: PROBES.fetch_add(1, Relaxed),
            checker: Checker::new(map),
            cost: workload.cost,
            timed: workload.kind == Kind::Latency,
            ends: workload.has_hot_family().then(Ends::default),
            epoch: Instant::now(),
            gate: Gate::default(),
            stripes: (0..STRIPES).map(|_| Stripe::default()).collect(),
            stripes_used: AtomicUsize::new(0),
        }
    }

    /// Handles a message on the calling thread.
    #[inline(always)]
    pub fn handle(&self, message: &Message) {
        let entered = self.checker.enter(message);
        self.note_start(message);
        match self.cost {
            Cost::Tiny => {}
            Cost::SpinNanoseconds(ns) => spin(ns),
            Cost::SleepMicroseconds { .. } => std::thread::sleep(self.cost.wait_of(message)),
            Cost::Gate => self.gate.pass(),
        }
        self.checker.leave(entered);
        self.note_end(message);
        self.note_done();
    }

    /// Handles a message in a tokio task: waits without holding a thread.
    pub async fn handle_async(&self, message: Message) {
        let entered = self.checker.enter(&message);
        self.note_start(&message);
        self.spend_async(&message).await;
        self.checker.leave(entered);
        self.note_end(&message);
        self.note_done();
    }

    /// Spends the cost of a message and counts it, but leaves the order unchecked: for bounds that know no keys.
    pub async fn handle_unordered(&self, message: Message) {
        self.spend_async(&message).await;
        self.note_done();
    }

    async fn spend_async(&self, message: &Message) {
        match self.cost {
            Cost::Tiny => {}
            Cost::SpinNanoseconds(ns) => spin(ns),
            Cost::SleepMicroseconds { .. } => tokio::time::sleep(self.cost.wait_of(message)).await,
            Cost::Gate => self.gate.pass_async().await,
        }
    }

    /// Lets all handlers pass that are held by [`Cost::Gate`], now and later.
    pub fn open_gate(&self) {
        self.gate.open();
    }

    /// Time since the start of the run, as open-loop messages carry it.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// How many messages were handled. Exact when the contender is quiet.
    pub fn done(&self) -> u64 {
        self.stripes_in_use().iter().map(|stripe| stripe.done.load(Relaxed)).sum()
    }

    /// All latencies so far, of all threads.
    pub fn latencies(&self) -> Option<Latencies> {
        let mut total: Option<Latencies> = None;
        for stripe in self.stripes_in_use() {
            if let Some(some) = &*stripe.latencies.lock().expect("recording does not panic") {
                total.get_or_insert_with(Latencies::new).add(some);
            }
        }
        total
    }

    /// When the last message of the hot family ended, and the last of all others, in seconds; where there is such a family.
    pub fn ends_seconds(&self) -> Option<(f64, f64)> {
        let seconds = |end: &AtomicU64| end.load(Relaxed) as f64 / 1e9;
        self.ends.as_ref().map(|ends| (seconds(&ends.family), seconds(&ends.others)))
    }

    /// The checker, for the audit at the end.
    pub fn checker(&self) -> &Checker {
        &self.checker
    }

    #[inline(always)]
    fn note_start(&self, message: &Message) {
        if self.timed {
            self.record_latency(message);
        }
    }

    /// Its handlers wait for milliseconds, so that a shared cache line is nothing beside them.
    #[inline(always)]
    fn note_end(&self, message: &Message) {
        if let Some(ends) = &self.ends {
            let end = if message.key == FAMILY { &ends.family } else { &ends.others };
            end.fetch_max(self.now_ns(), Relaxed);
        }
    }

    #[inline(never)]
    fn record_latency(&self, message: &Message) {
        let now_ns = self.now_ns();
        let mut latencies = self.stripe().latencies.lock().expect("recording does not panic");
        latencies.get_or_insert_with(|| Box::new(Latencies::new())).record(&message.body, now_ns);
    }

    #[inline]
    fn note_done(&self) {
        let done = &self.stripe().done;
        done.store(done.load(Relaxed) + 1, Relaxed);
    }

    #[inline]
    fn stripe(&self) -> &Stripe {
        let (identity, index) = STRIPE.get();
        if identity == self.identity { &self.stripes[index] } else { self.claim_stripe() }
    }

    #[cold]
    fn claim_stripe(&self) -> &Stripe {
        let index = self.stripes_used.fetch_add(1, Relaxed);
        STRIPE.set((self.identity, index));
        &self.stripes[index]
    }

    fn stripes_in_use(&self) -> &[Stripe] {
        &self.stripes[..self.stripes_used.load(Relaxed)]
    }
}

fn spin(ns: u64) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_nanos(ns) {
        std::hint::spin_loop();
    }
}

/// Holds handlers back until it is opened, once.
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
    /// Has no permits: waiting for one ends when the semaphore is closed, which is how the gate opens for tasks.
    tasks: Semaphore,
}

impl Default for Gate {
    fn default() -> Self {
        Self { open: Mutex::new(false), opened: Condvar::new(), tasks: Semaphore::new(0) }
    }
}

impl Gate {
    fn pass(&self) {
        let open = self.open.lock().expect("the gate does not panic");
        drop(self.opened.wait_while(open, |open| !*open).expect("the gate does not panic"));
    }

    async fn pass_async(&self) {
        let closed = self.tasks.acquire().await;
        debug_assert!(closed.is_err(), "the gate has no permits to give");
    }

    fn open(&self) {
        *self.open.lock().expect("the gate does not panic") = true;
        self.opened.notify_all();
        self.tasks.close();
    }
}
