//! What is submitted in a demonstration, in which order, and how long each message takes: a pure function of the seed.
//!
//! The messages of a lane come in order; which lane comes next is drawn, so that the lanes are mixed as in life.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::SLOW_LANE;

/// How long a lane that is not the slow one works on a message, in milliseconds.
const FAST_MS: RangeInclusive<u64> = 10..=40;

/// A message that is to be submitted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) lane: u32,
    /// Counted from 1.
    pub(super) sequence: u32,
    pub(super) work: Duration,
}

/// The steps, one by one.
pub(super) struct Plan {
    random: fastrand::Rng,
    slow: Duration,
    messages: u32,
    /// The lanes that are not exhausted, each with its next sequence.
    open: Vec<(u32, u32)>,
}

impl Plan {
    pub(super) fn new(keys: u32, messages: u32, slow: Duration, seed: u64) -> Self {
        let open = (1..=keys).map(|lane| (lane, 1)).collect();
        Self { random: fastrand::Rng::with_seed(seed), slow, messages, open }
    }
}

impl Iterator for Plan {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.open.is_empty() {
            return None;
        }
        let index = self.random.usize(..self.open.len());
        let (lane, sequence) = self.open[index];
        if sequence == self.messages {
            self.open.swap_remove(index);
        } else {
            self.open[index].1 += 1;
        }
        let fast = Duration::from_millis(self.random.u64(FAST_MS));
        let work = if lane == SLOW_LANE { self.slow } else { fast };
        Some(Step { lane, sequence, work })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(seed: u64) -> Vec<Step> {
        Plan::new(3, 4, Duration::from_millis(99), seed).collect()
    }

    #[test]
    fn every_lane_gets_its_messages_in_order() {
        let steps = plan(1);
        assert_eq!(steps.len(), 12);
        for lane in 1..=3 {
            let sequences: Vec<_> =
                steps.iter().filter(|step| step.lane == lane).map(|step| step.sequence).collect();
            assert_eq!(sequences, [1, 2, 3, 4], "lane {lane}");
        }
    }

    #[test]
    fn only_the_slow_lane_is_slow() {
        let slow = Duration::from_millis(99);
        assert!(plan(1).iter().all(|step| (step.work == slow) == (step.lane == SLOW_LANE)));
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(plan(7), plan(7));
        assert_ne!(plan(7), plan(8));
    }
}
