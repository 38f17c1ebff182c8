//! How a pool runs: everything about it that a user may choose, and what is wrong with a choice.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::message::{NAME_BYTES_MAX, Secret};
use crate::router::DEFAULT_POOL;

/// More slots than anybody has asked for; each is a task of a few hundred bytes.
pub const CONCURRENCY_MAX: usize = 65_536;

/// More messages in one pool are a queue, and queues belong to sources.
pub const CAPACITY_MAX: usize = 1_000_000;

/// Starts per second. A lower rate is more than eleven days between two starts: a mistake, and at some point no time that a clock can tell.
pub const RATES: RangeInclusive<f64> = 1e-6..=1e6;

/// What would be a right rate, in words.
pub(crate) const RIGHT_RATE: &str = "from 0.000001 (one in eleven days) to 1000000";

/// How a pool runs.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// How many messages are with their targets at once.
    pub concurrency: usize,
    /// How many messages the pool holds, waiting ones included.
    pub capacity: usize,
    /// How many of those may be of one group.
    pub group_capacity: usize,
    /// With this, a group gets as much of `group_capacity` as it works off in this time, judged by how long its messages took so far.
    pub group_latency: Option<Duration>,
    /// At most so many starts per second, evenly spaced.
    pub rate_per_second: Option<f64>,
    /// The same for each group.
    pub group_rate_per_second: Option<f64>,
    /// How often a message is tried before it has failed.
    pub attempts: u32,
    /// The pause after the first failed attempt; each further one is twice as long.
    pub backoff: Duration,
    /// No pause is longer.
    pub backoff_max: Duration,
    /// What becomes of a message that has failed.
    pub exhausted: Exhausted,
    /// What messages without a group are to each other.
    pub ungrouped: Ungrouped,
    /// In how many parts the slots are divided, so that a group always meets the same ones; a power of two.
    pub affinity: usize,
    /// What requests are signed with; the first makes the signature that targets should check, the others are on their way out.
    pub signing_secrets: Vec<Secret>,
}

/// What becomes of a message after its last attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exhausted {
    /// It goes to the dead letters, and its group goes on.
    DeadLetter,
    /// Its group stops in front of it until somebody resumes it.
    ParkGroup,
    /// The whole group goes back to the source, and comes again after this time.
    GiveBack(Duration),
}

/// What messages without a group are to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ungrouped {
    /// One group, as document 004 has it: one after the other.
    #[default]
    Serial,
    /// Nothing: they run as they come.
    Unordered,
}

/// What is wrong with the code of a pool, if anything is.
pub(crate) fn wrong_code(code: &str) -> Option<String> {
    let has_length = (1..=NAME_BYTES_MAX).contains(&code.len());
    if !has_length || code.trim() != code || code.chars().any(char::is_control) {
        return Some(format!(
            "is no code for a pool: 1 to {NAME_BYTES_MAX} bytes without control characters and blanks around"
        ));
    }
    let is_alike = code != DEFAULT_POOL && code.eq_ignore_ascii_case(DEFAULT_POOL);
    is_alike.then(|| format!("differs from {DEFAULT_POOL} in its case only"))
}

impl PoolSettings {
    /// Whether the order that the pool is to keep is kept by a queue as well that has messages without a group like this: what goes back and comes again would have lost it otherwise.
    pub(crate) fn is_in_order_on(&self, queue: Ungrouped) -> bool {
        queue == Ungrouped::Serial || self.ungrouped == Ungrouped::Unordered
    }
}

impl Default for PoolSettings {
    fn default() -> Self {
        PoolSettings {
            concurrency: 20,
            capacity: 2_000,
            group_capacity: 500,
            group_latency: None,
            rate_per_second: None,
            group_rate_per_second: None,
            attempts: 5,
            backoff: Duration::from_secs(1),
            backoff_max: Duration::from_secs(60),
            exhausted: Exhausted::DeadLetter,
            ungrouped: Ungrouped::Serial,
            affinity: 1,
            signing_secrets: Vec::new(),
        }
    }
}

/// What is wrong with one setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting} is {value}; {right}")]
pub struct BadSetting {
    /// Its name, as in the configuration.
    pub setting: &'static str,
    /// Its value.
    pub value: String,
    /// What would be right.
    pub right: String,
}

impl PoolSettings {
    /// The pause after this many failed attempts.
    pub fn pause_after(&self, attempts: u32) -> Duration {
        let doublings = attempts.saturating_sub(1).min(30);
        self.backoff.saturating_mul(1 << doublings).min(self.backoff_max)
    }

    /// All that is wrong.
    pub fn problems(&self) -> Vec<BadSetting> {
        let mut problems = Vec::new();
        let mut check = |fine: bool, setting, value: String, right: &str| {
            if !fine {
                problems.push(BadSetting { setting, value, right: right.to_owned() });
            }
        };
        let count = |value: usize, most: usize| (1..=most).contains(&value);
        let rate = |rate: Option<f64>| rate.is_none_or(|rate| RATES.contains(&rate));
        check(
            count(self.concurrency, CONCURRENCY_MAX),
            "concurrency",
            self.concurrency.to_string(),
            "1 to 65536 would be right",
        );
        check(
            count(self.capacity, CAPACITY_MAX),
            "capacity",
            self.capacity.to_string(),
            "1 to 1000000 would be right",
        );
        check(
            count(self.group_capacity, self.capacity.max(1)),
            "group-capacity",
            self.group_capacity.to_string(),
            "1 to the pool's capacity would be right",
        );
        check(
            rate(self.rate_per_second),
            "rate-per-second",
            format!("{:?}", self.rate_per_second),
            RIGHT_RATE,
        );
        check(
            rate(self.group_rate_per_second),
            "group-rate-per-second",
            format!("{:?}", self.group_rate_per_second),
            RIGHT_RATE,
        );
        check(self.attempts > 0, "attempts", "0".to_owned(), "at least 1");
        check(
            self.backoff <= self.backoff_max,
            "backoff",
            format!("{:?}", self.backoff),
            "at most backoff-max would be right",
        );
        let divides = self.affinity.is_power_of_two() && self.affinity <= self.concurrency;
        check(
            divides,
            "affinity",
            self.affinity.to_string(),
            "a power of two that is at most the concurrency",
        );
        if let Err(bad) = crate::mediator::Signer::new(&self.signing_secrets) {
            check(false, "signing-secrets", "(secret)".to_owned(), &bad.to_string());
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_its_limit() {
        let settings = PoolSettings { backoff_max: Duration::from_secs(5), ..PoolSettings::default() };
        let pauses: Vec<u64> = (1..6).map(|attempts| settings.pause_after(attempts).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 5, 5]);
        assert_eq!(settings.pause_after(u32::MAX).as_secs(), 5);
    }

    #[test]
    fn a_rate_has_a_least_and_a_most() {
        for (rate, is_right) in
            [(0.0, false), (1e-20, false), (9e-7, false), (1e-6, true), (1e6, true), (1.1e6, false)]
        {
            let of_pool = PoolSettings { rate_per_second: Some(rate), ..PoolSettings::default() };
            let of_group = PoolSettings { group_rate_per_second: Some(rate), ..PoolSettings::default() };
            for settings in [of_pool, of_group] {
                assert_eq!(settings.problems().is_empty(), is_right, "{rate}: {:?}", settings.problems());
            }
        }
    }

    #[test]
    fn all_that_is_wrong_is_said_at_once() {
        let settings = PoolSettings {
            concurrency: 0,
            capacity: 10,
            group_capacity: 11,
            rate_per_second: Some(0.0),
            group_rate_per_second: Some(f64::NAN),
            attempts: 0,
            backoff: Duration::from_secs(61),
            affinity: 3,
            ..PoolSettings::default()
        };
        let named: Vec<&str> = settings.problems().iter().map(|problem| problem.setting).collect();
        assert_eq!(
            named,
            [
                "concurrency",
                "group-capacity",
                "rate-per-second",
                "group-rate-per-second",
                "attempts",
                "backoff",
                "affinity"
            ]
        );
        assert!(PoolSettings::default().problems().is_empty());
    }
}
