//! What can be set, with the reason for each default, and what is wrong with a combination.
//!
//! `mod.rs` checks the settings before it binds anything; all that is wrong is said at once.

use std::{fmt, net::SocketAddr, time::Duration};

use laneway::RetryPolicy;

use crate::message::MESSAGE_BYTES_MAX;

/// No line may be cut shorter than this: the smallest useful one has an id, a family and their names.
pub const LINE_BYTES_MIN: usize = 64;

/// More partitions than this are a mistake in a file, not a machine.
pub const PARTITIONS_MAX: usize = 4_096;

/// More workers per partition than this are one as well. They are slots on tokio, so thousands are fine.
pub const WORKERS_MAX: usize = 65_536;

/// The settings of the network ingress.
///
/// ```
/// use laneway_router::ingress::Settings;
/// let settings = Settings { partitions: 6, ..Settings::default() };
/// let error = settings.check().unwrap_err().to_string();
/// assert!(error.contains("`partitions` is 6: it must be a power of two, such as 4 or 8"), "{error}");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Where it listens. Default `127.0.0.1:7003`: nobody beyond the machine, unless somebody says so.
    pub listen: SocketAddr,
    /// Document 003's `N`, a power of two. Default 4, as in the document.
    pub partitions: usize,
    /// Document 003's `k`: how many tasks of a partition run at once. Default 2, as in the document.
    pub workers: usize,
    /// How many tasks a partition holds, those that run included; beyond it a line is answered `REJ:BUSY`. Default 8,192, the largest that
    /// the document considers.
    pub partition_capacity: usize,
    /// The same for one family. Default 1,024. A good value is the latency that may be spent on waiting, divided by the time of a task: a
    /// family runs one at a time, so all that is ahead of a task is its wait.
    pub family_capacity: usize,
    /// How many bytes of lines are held in all partitions together; beyond it `REJ:BUSY`. Default 256 MiB: the capacities count tasks,
    /// and tasks may be long.
    pub bytes_max: usize,
    /// How many connections are open at once. One more is told so and closed. Default 1,024.
    pub connections_max: usize,
    /// How many answers a connection is owed at most: those that its client has not taken, and completions that are still to come. While it is
    /// owed so many, nothing is read from it. At least 2, for a line that wants both of its answers. Default 1,024.
    pub answers_max: usize,
    /// The longest line, without its newline. Default 64 KiB.
    pub line_bytes_max: usize,
    /// From the first byte of a line to its newline. Default 10 s; then the connection is closed.
    pub line_time: Duration,
    /// A connection that sends nothing and is owed nothing is closed after this. Default 5 min. An empty line keeps it open.
    pub idle_time: Duration,
    /// A client that takes nothing of an answer for this long is taken for gone. Default 30 s.
    pub write_time: Duration,
    /// How long a connection that we close waits for its client to close as well, so that the last answers arrive. Default 2 s.
    pub linger_time: Duration,
    /// How often a failing task is tried. Default: three attempts, 100 ms and 200 ms apart, then it has failed. Its family waits.
    pub retry: RetryPolicy,
    /// How long a shutdown waits for tasks that run, after the time to drain is over. Default 30 s.
    pub shutdown_grace: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            listen: SocketAddr::from(([127, 0, 0, 1], 7003)),
            partitions: 4,
            workers: 2,
            partition_capacity: 8_192,
            family_capacity: 1_024,
            bytes_max: 256 * 1024 * 1024,
            connections_max: 1_024,
            answers_max: 1_024,
            line_bytes_max: 64 * 1024,
            line_time: Duration::from_secs(10),
            idle_time: Duration::from_secs(300),
            write_time: Duration::from_secs(30),
            linger_time: Duration::from_secs(2),
            retry: RetryPolicy::default(),
            shutdown_grace: Duration::from_secs(30),
        }
    }
}

/// What is wrong with the settings: all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSettings {
    /// Each says which setting, what it is, and what would be right.
    pub problems: Vec<String>,
}

impl fmt::Display for InvalidSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the settings of the ingress are not valid")?;
        self.problems.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl std::error::Error for InvalidSettings {}

impl Settings {
    /// Whether they make sense, alone and together.
    pub fn check(&self) -> Result<(), InvalidSettings> {
        let mut problems = Vec::new();
        let mut within = |name: &str, value: usize, least: usize, most: usize| {
            if value < least || value > most {
                problems.push(format!("`{name}` is {value}: it must be from {least} to {most}"));
            }
        };
        within("partitions", self.partitions, 1, PARTITIONS_MAX);
        within("workers", self.workers, 1, WORKERS_MAX);
        within("partition_capacity", self.partition_capacity, 1, usize::MAX / PARTITIONS_MAX);
        // A bound that can never be reached is a misunderstanding.
        within("family_capacity", self.family_capacity, 1, self.partition_capacity);
        within("connections_max", self.connections_max, 1, u32::MAX as usize);
        within("answers_max", self.answers_max, 2, u32::MAX as usize);
        within("line_bytes_max", self.line_bytes_max, LINE_BYTES_MIN, MESSAGE_BYTES_MAX);
        within("bytes_max", self.bytes_max, self.line_bytes_max, usize::MAX / 2);
        within("max_attempts of `retry`", self.retry.max_attempts as usize, 1, u32::MAX as usize);
        if self.partitions > 0 && !self.partitions.is_power_of_two() {
            let upper = self.partitions.checked_next_power_of_two().unwrap_or(PARTITIONS_MAX);
            let (n, lower) = (self.partitions, upper / 2);
            let right = format!("it must be a power of two, such as {lower} or {upper}");
            problems.push(format!("`partitions` is {n}: {right}"));
        }
        if self.retry.multiplier.is_nan() || self.retry.multiplier < 1.0 {
            let multiplier = self.retry.multiplier;
            problems.push(format!("multiplier of `retry` is {multiplier}: it must be at least 1"));
        }
        let times =
            [("line_time", self.line_time), ("idle_time", self.idle_time), ("write_time", self.write_time)];
        for (name, _) in times.into_iter().filter(|(_, time)| time.is_zero()) {
            problems.push(format!("`{name}` is zero: no client could keep it"));
        }
        if problems.is_empty() { Ok(()) } else { Err(InvalidSettings { problems }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Settings::default().check().unwrap();
    }

    #[test]
    fn everything_that_is_wrong_is_said_at_once() {
        let retry = RetryPolicy { max_attempts: 0, multiplier: 0.5, ..RetryPolicy::default() };
        let settings = Settings {
            partitions: 3,
            workers: 0,
            partition_capacity: 10,
            family_capacity: 11,
            answers_max: 1,
            line_bytes_max: 1 << 30,
            connections_max: 0,
            idle_time: Duration::ZERO,
            retry,
            ..Settings::default()
        };
        let problems = settings.check().unwrap_err().problems;
        let said = |what: &str| problems.iter().any(|problem| problem.contains(what));
        for what in [
            "`partitions` is 3",
            "such as 2 or 4",
            "`workers` is 0",
            "`family_capacity` is 11: it must be from 1 to 10",
            "`answers_max` is 1",
            "`line_bytes_max`",
            "`bytes_max`",
            "`connections_max` is 0",
            "`idle_time` is zero",
            "max_attempts",
            "multiplier",
        ] {
            assert!(said(what), "{what} is not among {problems:#?}");
        }
    }

    #[test]
    fn pitfall_003_13_only_a_power_of_two_is_a_number_of_partitions() {
        for partitions in 0..=64_usize {
            let valid = Settings { partitions, ..Settings::default() }.check().is_ok();
            assert_eq!(valid, partitions.is_power_of_two(), "{partitions}");
        }
    }
}
