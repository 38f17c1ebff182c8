//! Counters, per thread and per dispatcher, and what the floor above the engine counts itself.

use laneway::{Account, DispatcherStats, WorkerStats};

/// The whole system at one moment. What is said of the engine's [`Snapshot`](laneway::Snapshot) holds here: accounts balance, and
/// everything is exact when the system is quiet.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Events of all processors: accepted = done + failed + dropped + outstanding. Requests to change a handler count as events.
    pub account: Account,
    /// Processors that are registered, those that are stopping included.
    pub processors: usize,
    /// Channels that somebody is subscribed to.
    pub channels: usize,
    /// Schedules that have not ended.
    pub schedules: usize,
    /// Events that no handler matched. They count as done.
    pub unmatched: u64,
    /// The dispatchers, in the order of their first mention: depth, events handled, lock attempts and failures, parks, wake-ups, latency.
    pub dispatchers: Vec<DispatcherStats>,
    /// The threads, in the order of their rows: polls, lock attempts and failures, backoff sleeps, parks, wake-ups, events handled.
    pub threads: Vec<WorkerStats>,
}

impl Snapshot {
    /// Failed over total lock attempts, over all threads.
    pub fn lock_failure_ratio(&self) -> f64 {
        self.ratio(|thread| thread.lock_failures, |thread| thread.lock_attempts)
    }

    /// Backoff sleeps over polls, over all threads.
    pub fn backoff_ratio(&self) -> f64 {
        self.ratio(|thread| thread.backoff_sleeps, |thread| thread.polls)
    }

    fn ratio(&self, part: impl Fn(&WorkerStats) -> u64, whole: impl Fn(&WorkerStats) -> u64) -> f64 {
        let part: u64 = self.threads.iter().map(part).sum();
        let whole: u64 = self.threads.iter().map(whole).sum();
        if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
    }
}
