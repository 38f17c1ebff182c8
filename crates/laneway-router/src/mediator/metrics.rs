//! What the mediators count: attempts by verdict, and how long they took.
//!
//! Plain atomic additions, without a lock: an attempt is one addition for its verdict and three for its time. Read by whoever renders metrics,
//! through [`Metrics::snapshot`].

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::Verdict;

/// The upper ends of the buckets, in microseconds: one, two, five and so on, from a call within a machine to the longest timeouts.
const BOUNDS_MICROS: [u64; 20] = [
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    1_000_000_000,
];

/// The counters of one kind of mediation.
#[derive(Debug, Default)]
pub struct Metrics {
    done: AtomicU64,
    waits: AtomicU64,
    again: AtomicU64,
    finals: AtomicU64,
    /// Those that were answered without calling the target.
    not_sent: AtomicU64,
    sum_micros: AtomicU64,
    /// One more than there are bounds: the last is for what is beyond them all.
    buckets: [AtomicU64; BOUNDS_MICROS.len() + 1],
}

impl Metrics {
    /// Counts an attempt; `took` is nothing if the target was not called.
    pub(crate) fn record(&self, verdict: &Verdict, took: Option<Duration>) {
        // Nothing is read through these counters but their own value.
        let counter = match verdict {
            Verdict::Done => &self.done,
            Verdict::Wait { .. } => &self.waits,
            Verdict::Again { .. } => &self.again,
            Verdict::Final { .. } => &self.finals,
        };
        counter.fetch_add(1, Relaxed);
        let Some(took) = took else {
            self.not_sent.fetch_add(1, Relaxed);
            return;
        };
        let micros = took.as_micros() as u64;
        self.sum_micros.fetch_add(micros, Relaxed);
        self.buckets[BOUNDS_MICROS.partition_point(|bound| *bound < micros)].fetch_add(1, Relaxed);
    }

    /// What was counted until now.
    pub fn snapshot(&self) -> MetricsSnapshot {
        MetricsSnapshot {
            done: self.done.load(Relaxed),
            waits: self.waits.load(Relaxed),
            again: self.again.load(Relaxed),
            finals: self.finals.load(Relaxed),
            not_sent: self.not_sent.load(Relaxed),
            sum: Duration::from_micros(self.sum_micros.load(Relaxed)),
            buckets: self.buckets.each_ref().map(|bucket| bucket.load(Relaxed)).to_vec(),
        }
    }
}

/// What was counted until a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsSnapshot {
    /// Attempts that delivered.
    pub done: u64,
    /// Attempts that have to wait, at no cost.
    pub waits: u64,
    /// Attempts that failed and may be repeated.
    pub again: u64,
    /// Attempts that failed for good.
    pub finals: u64,
    /// How many of all these never reached the target: breaker, cool-down, allow-list, not a URL.
    pub not_sent: u64,
    /// The time of all calls together.
    pub sum: Duration,
    buckets: Vec<u64>,
}

impl MetricsSnapshot {
    /// All attempts, sent or not.
    pub fn attempts(&self) -> u64 {
        self.done + self.waits + self.again + self.finals
    }

    /// How many calls took at most how long, from the shortest bound to the longest; what took longer than all of them is in
    /// [`calls`](Self::calls) alone. As Prometheus wants its histograms.
    pub fn cumulative(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let mut so_far = 0;
        BOUNDS_MICROS.iter().zip(&self.buckets).map(move |(bound, count)| {
            so_far += count;
            (Duration::from_micros(*bound), so_far)
        })
    }

    /// How many calls were made.
    pub fn calls(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attempt_is_counted_once_and_every_call_is_in_one_bucket() {
        let metrics = Metrics::default();
        let reason = String::new;
        metrics.record(&Verdict::Done, Some(Duration::from_micros(100)));
        metrics.record(&Verdict::Done, Some(Duration::from_micros(101)));
        metrics.record(&Verdict::Again { delay: None, reason: reason() }, Some(Duration::from_secs(5_000)));
        metrics.record(&Verdict::Wait { delay: Duration::ZERO, called: false, reason: reason() }, None);
        metrics.record(&Verdict::Final { reason: reason() }, None);
        let snapshot = metrics.snapshot();
        assert_eq!([snapshot.done, snapshot.waits, snapshot.again, snapshot.finals], [2, 1, 1, 1]);
        assert_eq!([snapshot.attempts(), snapshot.not_sent, snapshot.calls()], [5, 2, 3]);
        let cumulative: Vec<_> = snapshot.cumulative().collect();
        assert_eq!(cumulative[..2], [(Duration::from_micros(100), 1), (Duration::from_micros(200), 2)]);
        assert_eq!(cumulative.last().unwrap().1, 2, "what is beyond all bounds is among the calls only");
    }
}
