//! What a handler decides, and what the policy makes of a failure.
//!
//! The worker hands the [`Outcome`] of a message to `RetryPolicy::after_failure`, and what comes out of that to the lane.

use std::{fmt, time::Duration};

/// What became of a message.
///
/// A handler may return it, or `()` for [`Done`](Outcome::Done), or a `Result` whose error becomes [`Failed`](Outcome::Failed).
/// To say why, use [`Context::note`](crate::Context::note): the text is what `explain` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Handled. The next message of the lane may start.
    Done,
    /// Failed; try again as the [`RetryPolicy`] says. The lane waits.
    Retry,
    /// Failed; try again after this time. Counts as an attempt. The lane waits.
    RetryAfter(Duration),
    /// Failed, with the reason; try again as the [`RetryPolicy`] says. The lane waits.
    Failed(String),
    /// Not now: try again after this time. Nothing was begun, so it costs neither an attempt nor a place in the pace of a paced dispatcher.
    /// The lane waits.
    Hold(Duration),
    /// Begun, and told to wait (a target that asked for patience): try again after this time. Costs no attempt, but its place in the pace of a
    /// paced dispatcher. The lane waits.
    Wait(Duration),
    /// Failed for good; go on with the next one.
    Skip,
    /// Put this message aside and go on with the next one.
    Park,
    /// Park the whole lane in front of this message until it is resumed.
    ParkLane,
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Outcome::Done
    }
}

impl<E: fmt::Display> From<Result<(), E>> for Outcome {
    fn from(result: Result<(), E>) -> Self {
        match result {
            Ok(()) => Outcome::Done,
            Err(error) => Outcome::Failed(error.to_string()),
        }
    }
}

/// What happens when the last attempt has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exhausted {
    /// The message counts as failed and goes to `on_fail`; the lane goes on.
    #[default]
    Skip,
    /// The message is put aside; the lane goes on.
    ParkMessage,
    /// The lane stops in front of the message until it is resumed.
    ParkLane,
}

/// How often and how long after each other a failing message is tried.
///
/// The delay before attempt *n + 1* is `base × multiplier^(n-1)`, at most `max`. Order holds throughout: a failing head keeps its place.
///
/// ```
/// use laneway::RetryPolicy;
/// use std::time::Duration;
/// let policy = RetryPolicy { max_attempts: 4, base: Duration::from_millis(10), ..RetryPolicy::default() };
/// assert_eq!(policy.delay_after(3), Duration::from_millis(40));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy {
    /// How many times a message is tried in all, at least once.
    pub max_attempts: u32,
    /// The delay after the first failure.
    pub base: Duration,
    /// What each further delay is multiplied by, at least 1.
    pub multiplier: f64,
    /// No delay is longer.
    pub max: Duration,
    /// What then.
    pub exhausted: Exhausted,
}

impl Default for RetryPolicy {
    /// Three attempts, 100 ms and 200 ms apart, then the message is skipped.
    fn default() -> Self {
        RetryPolicy {
            max_attempts: 3,
            base: Duration::from_millis(100),
            multiplier: 2.0,
            max: Duration::from_secs(30),
            exhausted: Exhausted::Skip,
        }
    }
}

impl RetryPolicy {
    /// No second attempt; a failed message is skipped.
    pub fn never() -> Self {
        RetryPolicy { max_attempts: 1, ..RetryPolicy::default() }
    }

    /// The delay after this many failures in a row.
    pub fn delay_after(&self, failures: u32) -> Duration {
        let exponent = failures.saturating_sub(1).min(1_000) as i32;
        let seconds = self.base.as_secs_f64() * self.multiplier.powi(exponent);
        if seconds.is_finite() && seconds < self.max.as_secs_f64() {
            Duration::from_secs_f64(seconds)
        } else {
            self.max
        }
    }

    /// What to do with the head of a lane whose attempt number `attempt` (from 1) had this outcome. `Done` never comes here.
    pub(crate) fn after_failure(&self, outcome: &Outcome, attempt: u32) -> Decision {
        match outcome {
            Outcome::Done => unreachable!("a message that is done has not failed"),
            Outcome::Hold(delay) => Decision::Defer { delay: *delay, cost: Cost::Nothing },
            Outcome::Wait(delay) => Decision::Defer { delay: *delay, cost: Cost::Place },
            Outcome::Skip => Decision::Skip,
            Outcome::Park => Decision::ParkMessage,
            Outcome::ParkLane => Decision::ParkLane,
            Outcome::RetryAfter(delay) if attempt < self.max_attempts => {
                Decision::Defer { delay: *delay, cost: Cost::Attempt }
            }
            Outcome::Retry | Outcome::Failed(_) if attempt < self.max_attempts => {
                Decision::Defer { delay: self.delay_after(attempt), cost: Cost::Attempt }
            }
            Outcome::Retry | Outcome::Failed(_) | Outcome::RetryAfter(_) => match self.exhausted {
                Exhausted::Skip => Decision::Skip,
                Exhausted::ParkMessage => Decision::ParkMessage,
                Exhausted::ParkLane => Decision::ParkLane,
            },
        }
    }
}

/// What the policy made of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Defer { delay: Duration, cost: Cost },
    Skip,
    ParkMessage,
    ParkLane,
}

/// What a message pays for a start after which it has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cost {
    /// Nothing: it was not begun.
    Nothing,
    /// Its place in the pace.
    Place,
    /// That, and an attempt.
    Attempt,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_the_maximum_and_stay_there() {
        let policy = RetryPolicy { max: Duration::from_secs(1), ..RetryPolicy::default() };
        let millis = |n| policy.delay_after(n).as_millis();
        assert_eq!([millis(1), millis(2), millis(3), millis(4)], [100, 200, 400, 800]);
        assert_eq!([millis(5), millis(5_000)], [1_000, 1_000]);
    }

    #[test]
    fn the_last_attempt_is_decided_by_the_policy() {
        let policy =
            RetryPolicy { max_attempts: 2, exhausted: Exhausted::ParkLane, ..RetryPolicy::default() };
        let first = policy.after_failure(&Outcome::Retry, 1);
        assert_eq!(first, Decision::Defer { delay: Duration::from_millis(100), cost: Cost::Attempt });
        assert_eq!(policy.after_failure(&Outcome::Retry, 2), Decision::ParkLane);
        let hold = Outcome::Hold(Duration::from_secs(9));
        let held = Decision::Defer { delay: Duration::from_secs(9), cost: Cost::Nothing };
        assert_eq!(policy.after_failure(&hold, 99), held, "patience costs no attempt");
        let wait = Outcome::Wait(Duration::from_secs(9));
        let waits = Decision::Defer { delay: Duration::from_secs(9), cost: Cost::Place };
        assert_eq!(policy.after_failure(&wait, 99), waits);
    }
}
