//! Runs one workload through one contender, in this process, and measures it.
//!
//! ```text
//!  plan ─► sources ─► pump (one per producer) ─► contender ─► probe ─► drain ─► audit ─► outcome
//!          numbers     closed loop or paced                    checks   waits     counts
//! ```
//!
//! The clock runs from the first submission to the moment when the last message was handled. What happens before (plans,
//! threads) and after (ending threads, the audit) is not measured.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::contender::Contender;
use crate::plan::{CellMap, Plan, Source};
use crate::probe::{Latencies, Probe};
use crate::pump::{self, Clock};
use crate::workload::{FAMILY_EVERY, Kind, Workload};
use crate::{machine, weigh};

/// A contender that handles nothing for so long, although messages are outstanding, has lost them.
const STALL: Duration = Duration::from_secs(3);
/// How often the driver looks whether the last message was handled.
const DRAIN_INTERVAL: Duration = Duration::from_micros(100);

/// What one run yields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Values by name, in the units that the names tell.
    pub metrics: BTreeMap<String, f64>,
    /// The contender was cut off: its rate is that of the time it had, and losses were not looked for.
    pub capped: bool,
    /// What went wrong with order, exclusion or counts. Empty, or the run is worthless.
    pub violations: Vec<String>,
}

impl Outcome {
    pub(crate) fn set(&mut self, metric: &str, value: f64) {
        self.metrics.insert(metric.into(), value);
    }
}

/// Runs a workload through a contender.
pub fn run<C: Contender>(workload: &Workload) -> Result<Outcome> {
    let mut outcome = match workload.kind {
        Kind::Memory => weigh::weigh::<C>(workload)?,
        _ => flow::<C>(workload)?,
    };
    if let Some(peak) = machine::resident_bytes_peak() {
        outcome.set("resident_bytes_peak", peak as f64);
    }
    Ok(outcome)
}

/// A contender at work, with what is needed to watch it.
pub(crate) struct Run<C: Contender> {
    /// Its handler, and the instruments.
    pub(crate) probe: Arc<Probe>,
    /// Its ways in; dropped only when all is measured, because some end what they have started.
    pub(crate) producers: Vec<C::Producer>,
    contender: C,
}

impl<C: Contender> Run<C> {
    pub(crate) fn start(workload: &Workload, map: CellMap) -> Result<Self> {
        let probe = Arc::new(Probe::new(workload, map));
        let mut contender = C::start(workload, Arc::clone(&probe))?;
        let producers = (0..workload.producers).map(|_| contender.producer()).collect();
        Ok(Self { probe, producers, contender })
    }

    /// Ends the contender and checks that what was made was handled, key by key.
    pub(crate) fn finish(self, made: impl Iterator<Item = (usize, u64)>) -> Vec<String> {
        drop(self.producers);
        self.contender.finish();
        self.probe.checker().audit(made);
        self.probe.checker().violations()
    }

    /// Leaves a contender with its backlog: the process ends soon, and must not wait for it.
    pub(crate) fn abandon(self) -> Vec<String> {
        let violations = self.probe.checker().violations();
        mem::forget(self);
        violations
    }
}

/// Closed and open loops: everything but memory.
fn flow<C: Contender>(workload: &Workload) -> Result<Outcome> {
    let plan = Plan::new(workload);
    let mut run = Run::<C>::start(workload, plan.map())?;
    let mut sources = plan.into_sources();

    let cpu_before = machine::cpu_seconds();
    let clock = Clock::start(workload);
    let began = run.probe.now_ns() as f64 / 1e9;
    pump::pump_all::<C>(workload, &mut run, &mut sources, &clock);
    let made: u64 = sources.iter().map(Source::made).sum();
    let drained = drain(&run.probe, made, clock.cap);
    let seconds = clock.started.elapsed().as_secs_f64();
    let cpu_after = machine::cpu_seconds();

    let done = run.probe.done();
    let mut outcome = Outcome { capped: drained == Drained::Capped, ..Outcome::default() };
    outcome.set("messages_per_second", done as f64 / seconds);
    if let (Some(before), Some(after)) = (cpu_before, cpu_after) {
        outcome.set("cpu_nanoseconds_per_message", (after - before) * 1e9 / done.max(1) as f64);
    }
    match run.probe.ends_seconds() {
        Some((family_end, others_end)) => {
            let of_family = made.div_ceil(FAMILY_EVERY);
            let ideal = workload.ideal_seconds_of_family(of_family);
            outcome.set("efficiency", ideal / (family_end - began));
            outcome.set("others_efficiency", workload.ideal_seconds(made - of_family) / (others_end - began));
        }
        None if workload.waits() => outcome.set("efficiency", workload.ideal_seconds(done) / seconds),
        None => {}
    }
    if let Some(latencies) = run.probe.latencies() {
        set_latencies(&mut outcome, &latencies);
    }
    for (metric, value) in run.contender.counters() {
        outcome.set(metric, value);
    }
    outcome.violations = match drained {
        Drained::All if C::ORDERED => run.finish(sources.iter().flat_map(Source::made_by_cell)),
        Drained::All => run.finish(std::iter::empty()),
        Drained::Capped => run.abandon(),
        Drained::Stalled => stalled(run.abandon(), made, done),
    };
    Ok(outcome)
}

pub(crate) fn stalled(mut violations: Vec<String>, made: u64, done: u64) -> Vec<String> {
    violations.push(format!("{} of {made} messages were never handled", made - done));
    violations
}

fn set_latencies(outcome: &mut Outcome, latencies: &Latencies) {
    const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)];
    for (name, quantile) in QUANTILES {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let intended = latencies.from_intended.value_at_quantile(quantile);
        let submission = latencies.from_submission.value_at_quantile(quantile);
        outcome.set(&format!("latency_{name}_seconds"), seconds(intended));
        outcome.set(&format!("latency_from_submission_{name}_seconds"), seconds(submission));
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drained {
    /// Everything that was sent was handled.
    All,
    /// There was no time for that.
    Capped,
    /// Nothing was handled for so long that the rest must be lost.
    Stalled,
}

/// Waits until everything that was sent was handled.
pub(crate) fn drain(probe: &Probe, sent: u64, cap: Instant) -> Drained {
    let mut progress = (probe.done(), Instant::now());
    loop {
        let done = probe.done();
        let now = Instant::now();
        if done >= sent {
            return Drained::All;
        }
        if now >= cap {
            return Drained::Capped;
        }
        if done != progress.0 {
            progress = (done, now);
        } else if now - progress.1 > STALL {
            return Drained::Stalled;
        }
        thread::sleep(DRAIN_INTERVAL);
    }
}
