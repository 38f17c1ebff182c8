//! Runs one workload through one design, in this process, and measures it.
//!
//! One poster goes round the processors, so that each has an event every so often. Where as many events as possible are wanted it posts until a mailbox
//! is full; at half load it posts at intervals, by the clock. Every handler call must be the next of its processor, alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;

use super::design::{Design, Event};
use super::workload::{Kind, Workload};
use crate::drive::Outcome;
use crate::machine;

/// A design that handles nothing for so long, although events are outstanding, has lost them.
const STALL: Duration = Duration::from_secs(10);
/// What a waiting handler waits.
const WAIT: Duration = Duration::from_millis(1);
/// Events that are posted one at a time when all threads are idle.
const WAKE_UPS: u64 = 300;

/// Twice the number of the next event, and one more while a handler runs. A line of its own, so that processors do not slow each other down. As in
/// the engine's checker, loads and stores are enough: of two handlers at once at most one finds its own number.
#[repr(align(64))]
#[derive(Default)]
struct Slot(AtomicU64);

/// What handlers call.
pub(crate) struct Probe {
    began: Instant,
    kind: Kind,
    slots: Vec<Slot>,
    /// Handled, by thread of the design; a handler says which it is on.
    handled: Vec<Slot>,
    violated: AtomicBool,
    latencies: Vec<std::sync::Mutex<Histogram<u64>>>,
    /// From here on latencies are taken.
    timing: AtomicBool,
}

impl Probe {
    fn new(workload: &Workload) -> Self {
        let histogram = || Histogram::new_with_bounds(100, 60_000_000_000, 3).expect("valid bounds").into();
        Probe {
            began: Instant::now(),
            kind: workload.kind,
            slots: (0..workload.processors).map(|_| Slot::default()).collect(),
            handled: (0..workload.threads).map(|_| Slot::default()).collect(),
            violated: AtomicBool::new(false),
            latencies: (0..workload.threads).map(|_| histogram()).collect(),
            timing: AtomicBool::new(false),
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Handles an event of a processor on a thread.
    #[inline]
    pub(crate) fn handle(&self, thread: usize, processor: usize, event: Event) {
        let slot = &self.slots[processor].0;
        if slot.load(Relaxed) != event.number << 1 {
            self.violated.store(true, Relaxed);
        }
        slot.store(event.number << 1 | 1, Relaxed);
        let started = if self.kind == Kind::Idle { self.now() } else { 0 };
        match self.kind {
            Kind::Tiny | Kind::Idle => {}
            Kind::Wait | Kind::HalfLoad => thread::sleep(WAIT),
        }
        if slot.load(Relaxed) != event.number << 1 | 1 {
            self.violated.store(true, Relaxed);
        }
        slot.store((event.number + 1) << 1, Relaxed);
        let handled = &self.handled[thread].0;
        handled.store(handled.load(Relaxed) + 1, Relaxed);
        if event.posted > 0 && self.timing.load(Relaxed) {
            let ended = if started > 0 { started } else { self.now() };
            let mut histogram = self.latencies[thread].lock().expect("no one panics with it");
            histogram.saturating_record(ended.saturating_sub(event.posted));
        }
    }

    fn handled(&self) -> u64 {
        self.handled.iter().map(|slot| slot.0.load(Relaxed)).sum()
    }

    fn latencies(&self) -> Histogram<u64> {
        let mut sum = self.latencies[0].lock().expect("no one panics with it").clone();
        for other in &self.latencies[1..] {
            sum.add(&*other.lock().expect("no one panics with it")).expect("same bounds");
        }
        sum
    }
}

/// Where the next event goes.
struct Round {
    next: usize,
    numbers: Vec<u64>,
}

impl Round {
    fn new(workload: &Workload) -> Self {
        Round { next: 0, numbers: vec![0; workload.processors] }
    }

    /// Posts the next event of the next processor. Goes on to the one after it in any case.
    fn post(&mut self, design: &impl Design, posted: u64) -> bool {
        let processor = self.next;
        self.next = (processor + 1) % self.numbers.len();
        let accepted = design.post(processor, Event { number: self.numbers[processor], posted });
        self.numbers[processor] += u64::from(accepted);
        accepted
    }

    fn posted(&self) -> u64 {
        self.numbers.iter().sum()
    }
}

/// Runs a workload through a design.
pub(crate) fn run<D: Design>(workload: &Workload) -> Result<Outcome> {
    let probe = Arc::new(Probe::new(workload));
    let design = D::start(workload, Arc::clone(&probe))?;
    let mut round = Round::new(workload);
    let mut outcome = Outcome::default();
    match workload.kind {
        Kind::Tiny | Kind::Wait => flood(workload, &design, &probe, &mut round, &mut outcome),
        Kind::HalfLoad => trickle(workload, &design, &probe, &mut round, &mut outcome),
        Kind::Idle => idle(workload, &design, &probe, &mut round, &mut outcome)?,
    }
    for (metric, value) in design.counters() {
        outcome.set(metric, value);
    }
    drain(&probe, &round, &mut outcome);
    for (metric, value) in design.finish() {
        outcome.set(metric, value);
    }
    if probe.violated.load(Relaxed) {
        outcome.violations.push("an event was not the next of its processor, or not alone".into());
    }
    let wrong = |(slot, made): &(&Slot, &u64)| slot.0.load(Relaxed) != **made << 1;
    let lost = probe.slots.iter().zip(&round.numbers).filter(wrong).count();
    if lost > 0 {
        outcome.violations.push(format!("{lost} processors have not handled what they accepted"));
    }
    Ok(outcome)
}

/// As many events as can be.
fn flood<D: Design>(
    workload: &Workload,
    design: &D,
    probe: &Probe,
    round: &mut Round,
    outcome: &mut Outcome,
) {
    let limit = Duration::from_secs_f64(workload.seconds);
    // A fifth of the time to get going.
    let warm = limit / 5;
    let (began, mut measured_from) = (Instant::now(), None);
    let mut refused_in_a_row = 0;
    let mut posts = 0_u64;
    loop {
        posts += 1;
        // The clock is read now and then: reading it for each event would be most of the work.
        if posts.is_multiple_of(64) || refused_in_a_row > 0 {
            let elapsed = began.elapsed();
            if measured_from.is_none() && elapsed >= warm {
                measured_from = Some((elapsed, probe.handled(), machine::cpu_seconds()));
            }
            if elapsed >= limit {
                break;
            }
        }
        if round.post(design, 0) {
            refused_in_a_row = 0;
        } else {
            refused_in_a_row += 1;
            // All are full: let them work.
            if refused_in_a_row >= workload.processors {
                refused_in_a_row = 0;
                match workload.kind {
                    Kind::Wait => thread::sleep(WAIT),
                    _ => thread::yield_now(),
                }
            }
        }
    }
    let (from, before, cpu) = measured_from.unwrap_or((Duration::ZERO, 0, None));
    let (seconds, events) = ((began.elapsed() - from).as_secs_f64(), probe.handled() - before);
    outcome.set("messages_per_second", events as f64 / seconds);
    if let (Some(before), Some(after)) = (cpu, machine::cpu_seconds()) {
        outcome.set("cpu_nanoseconds_per_message", (after - before) * 1e9 / events.max(1) as f64);
    }
}

/// Half as many events as the handlers could take, evenly spread.
fn trickle<D: Design>(
    workload: &Workload,
    design: &D,
    probe: &Probe,
    round: &mut Round,
    outcome: &mut Outcome,
) {
    let interval = WAIT.as_secs_f64() * 2.0 / workload.threads as f64;
    let (began, warm) = (Instant::now(), workload.seconds / 5.0);
    let mut refused = 0_u64;
    for tick in 0_u64.. {
        let due = tick as f64 * interval;
        if due >= workload.seconds {
            break;
        }
        if due >= warm {
            probe.timing.store(true, Relaxed);
        }
        while let Some(left) = Duration::from_secs_f64(due).checked_sub(began.elapsed())
            && !left.is_zero()
        {
            thread::sleep(left);
        }
        refused += u64::from(!round.post(design, probe.now().max(1)));
    }
    outcome.set("messages_per_second", probe.handled() as f64 / began.elapsed().as_secs_f64());
    drain(probe, round, outcome);
    let latencies = probe.latencies();
    for (metric, quantile) in [("latency_p50_seconds", 0.5), ("latency_p99_seconds", 0.99)] {
        outcome.set(metric, latencies.value_at_quantile(quantile) as f64 * 1e-9);
    }
    let (p50, p99) = (latencies.value_at_quantile(0.5), latencies.value_at_quantile(0.99));
    outcome.set("latency_p99_to_p50_ratio", p99 as f64 / p50.max(1) as f64);
    outcome.set("refused", refused as f64);
}

/// What idleness costs, and how long the first event takes after it.
fn idle<D: Design>(
    workload: &Workload,
    design: &D,
    probe: &Probe,
    round: &mut Round,
    outcome: &mut Outcome,
) -> Result<()> {
    // Registration is over; let the threads find their sleep.
    thread::sleep(Duration::from_millis(200));
    let (began, before) = (Instant::now(), machine::cpu_seconds());
    thread::sleep(Duration::from_secs_f64(workload.seconds));
    if let (Some(before), Some(after)) = (before, machine::cpu_seconds()) {
        outcome.set("idle_cores", (after - before) / began.elapsed().as_secs_f64());
    }
    probe.timing.store(true, Relaxed);
    for one in 1..=WAKE_UPS {
        ensure!(round.post(design, probe.now().max(1)), "an idle processor is full");
        let posted = Instant::now();
        while probe.handled() < one {
            ensure!(posted.elapsed() < STALL, "an event was not handled");
            thread::sleep(Duration::from_micros(500));
        }
        // Long enough for every thread to be asleep again.
        thread::sleep(Duration::from_millis(2));
    }
    let latencies = probe.latencies();
    outcome.set("latency_wake_up_p50_seconds", latencies.value_at_quantile(0.5) as f64 * 1e-9);
    outcome.set("latency_wake_up_p99_seconds", latencies.value_at_quantile(0.99) as f64 * 1e-9);
    outcome.set("messages_per_second", 0.0);
    Ok(())
}

/// Waits until everything that was accepted has been handled.
fn drain(probe: &Probe, round: &Round, outcome: &mut Outcome) {
    let (mut last, mut since) = (probe.handled(), Instant::now());
    while probe.handled() < round.posted() {
        if probe.handled() > last {
            (last, since) = (probe.handled(), Instant::now());
        } else if since.elapsed() > STALL {
            let left = round.posted() - last;
            outcome.violations.push(format!("{left} events were not handled within {STALL:?}"));
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}
