//! What is run: so many threads on so many dispatchers, and handlers that do nothing, or wait for a millisecond.

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

/// Idleness is watched at least so long: what little it costs is below what the clock of a process can show in less.
const IDLE_SECONDS: f64 = 10.0;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// As many events as can be, handlers that do next to nothing.
    Tiny,
    /// As many events as can be, handlers that wait for a millisecond.
    Wait,
    /// The same handlers, and half as many events as they could handle.
    HalfLoad,
    /// No events; then one at a time.
    Idle,
}

/// A workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Workload {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) threads: usize,
    pub(crate) dispatchers: usize,
    pub(crate) processors: usize,
    pub(crate) seconds: f64,
}

impl Workload {
    fn new(kind: Kind, threads: usize, dispatchers: usize, seconds: f64) -> Self {
        let (name, processors) = match kind {
            Kind::Tiny => (format!("tiny-{threads}x{dispatchers}"), 16 * threads.max(dispatchers)),
            Kind::Wait => (format!("wait-{threads}x{dispatchers}"), 8 * threads.max(dispatchers)),
            Kind::HalfLoad => (format!("half-load-{threads}"), 32 * threads),
            Kind::Idle => ("idle".to_string(), 100_000),
        };
        let seconds = if kind == Kind::Idle { seconds.max(IDLE_SECONDS) } else { seconds };
        Workload { name, kind, threads, dispatchers, processors, seconds }
    }

    /// Events that a mailbox holds. What does not fit is posted again. Few where handlers wait: what is left at the end has to be handled.
    pub(crate) fn queue_size(&self) -> usize {
        match self.kind {
            Kind::Tiny => 256,
            Kind::Wait | Kind::HalfLoad | Kind::Idle => 4,
        }
    }

    /// The dispatcher of a processor.
    pub(crate) fn dispatcher_of(&self, processor: usize) -> usize {
        processor % self.dispatchers
    }

    /// What each thread serves: one dispatcher where there are at least as many threads, else its share of them.
    pub(crate) fn rows(&self) -> Vec<Vec<usize>> {
        let (threads, dispatchers) = (self.threads, self.dispatchers);
        let row = |thread: usize| match threads >= dispatchers {
            true => vec![thread % dispatchers],
            false => (0..dispatchers).filter(|dispatcher| dispatcher % threads == thread).collect(),
        };
        (0..threads).map(row).collect()
    }
}

/// The workloads of a name; those of the grid for all its threads and dispatchers.
pub(crate) fn named(
    name: &str,
    threads: &[usize],
    dispatchers: &[usize],
    seconds: f64,
) -> Result<Vec<Workload>> {
    let grid = |kind| {
        let pairs = threads.iter().flat_map(|t| dispatchers.iter().map(move |d| (*t, *d)));
        pairs.map(|(threads, dispatchers)| Workload::new(kind, threads, dispatchers, seconds)).collect()
    };
    Ok(match name {
        "tiny" => grid(Kind::Tiny),
        "wait" => grid(Kind::Wait),
        "half-load" => vec![Workload::new(Kind::HalfLoad, 8, 1, seconds)],
        "idle" => vec![Workload::new(Kind::Idle, 16, 1, seconds)],
        other => vec![single(other, seconds)?],
    })
}

/// One by its whole name: `tiny-4x2`, `wait-8x1`, `half-load-8`.
fn single(name: &str, seconds: f64) -> Result<Workload> {
    let number = |text: &str| -> Result<usize> {
        let number = text.parse().with_context(|| format!("{text:?} is not a number"))?;
        ensure!((1..=100).contains(&number), "{number}: expected from 1 to 100");
        Ok(number)
    };
    if let Some(threads) = name.strip_prefix("half-load-") {
        return Ok(Workload::new(Kind::HalfLoad, number(threads)?, 1, seconds));
    }
    for (prefix, kind) in [("tiny-", Kind::Tiny), ("wait-", Kind::Wait)] {
        if let Some((threads, dispatchers)) = name.strip_prefix(prefix).and_then(|rest| rest.split_once('x'))
        {
            return Ok(Workload::new(kind, number(threads)?, number(dispatchers)?, seconds));
        }
    }
    bail!(
        "unknown workload {name:?}: expected tiny, wait, half-load, idle, or one such as tiny-4x2, wait-8x1, half-load-8"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idleness_is_watched_for_long_enough() {
        let seconds = |name, seconds| named(name, &[], &[], seconds).unwrap()[0].seconds;
        assert_eq!(
            [seconds("idle", 0.5), seconds("idle", 20.0), seconds("half-load", 0.5)],
            [10.0, 20.0, 0.5]
        );
    }

    #[test]
    fn every_dispatcher_is_served_and_every_thread_serves() {
        for (threads, dispatchers) in [(1, 1), (2, 8), (3, 8), (8, 3), (16, 4)] {
            let rows = Workload::new(Kind::Tiny, threads, dispatchers, 1.0).rows();
            assert_eq!(rows.len(), threads);
            assert!(rows.iter().all(|row| !row.is_empty()), "{rows:?}");
            assert!((0..dispatchers).all(|dispatcher| rows.iter().any(|row| row.contains(&dispatcher))));
        }
    }
}
