//! How a worker works, as data: from a configuration, or from a program.
//!
//! Durations are whole numbers with their unit in the name where a configuration writes them. What is not said has the default that is written
//! here. The configuration of a worker with one queue (`queueName`) is still understood.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::strategy::StrategyKind;
use crate::definition::list;

/// How a worker works.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Settings {
    /// Which queues to poll; all of its flows if not said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<Vec<String>>,
    /// The one queue of the time before routing: the same as `queues` with one name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_name: Option<String>,
    /// The queue that is read before the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub primary_queue: Option<String>,
    /// How many handlers run at once. Default 10.
    pub max_concurrent: usize,
    /// How many tasks a queue gives in one read at the most. Default 10.
    pub batch_size: usize,
    /// Seconds for which a task is this worker's before it must have said that it still lives. Default 30.
    pub visibility_timeout: u32,
    /// Seconds after which the worker looks although nothing was announced: for messages whose delay ends. Default 2.
    pub max_poll_seconds: u32,
    /// Milliseconds between two looks where announcements cannot be had (`listen: false`). Default 100.
    pub poll_interval_ms: u32,
    /// Whether the worker waits for announcements (LISTEN). A pooler that shares connections between clients cannot pass them on. Default true.
    pub listen: bool,
    /// How places are shared out among the queues. Default round-robin.
    pub strategy: StrategyKind,
    /// Whether the tasks of one run go one after another in this worker. Default false: all that is ready runs.
    pub ordered_runs: bool,
    /// Seconds between two signs of life; a worker that misses several is taken for dead, and its tasks go to others. Default 5.
    pub heartbeat_seconds: u32,
    /// Seconds after which a worker without a sign of life is taken for dead. Default 30.
    pub dead_after_seconds: u32,
    /// Seconds after its timeout for which a task is kept whose handler has not ended, because it blocks its thread. Default 30.
    pub overdue_seconds: u32,
    /// Seconds that handlers get to finish when the worker stops. Default 30.
    pub shutdown_seconds: u32,
    /// What differs for single queues.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub queue_settings: BTreeMap<String, QueueSettings>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            queues: None,
            queue_name: None,
            primary_queue: None,
            max_concurrent: 10,
            batch_size: 10,
            visibility_timeout: 30,
            max_poll_seconds: 2,
            poll_interval_ms: 100,
            listen: true,
            strategy: StrategyKind::default(),
            ordered_runs: false,
            heartbeat_seconds: 5,
            dead_after_seconds: 30,
            overdue_seconds: 30,
            shutdown_seconds: 30,
            queue_settings: BTreeMap::new(),
        }
    }
}

/// What differs for one queue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct QueueSettings {
    /// Seconds; the worker's if not said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub visibility_timeout: Option<u32>,
    /// Tasks in one read; the worker's if not said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// How many of its tasks the worker has in hand at once; as many as the worker can if not said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<usize>,
    /// Higher comes first, with the strategy `priority`. Default 0.
    pub priority: i32,
    /// Its part of the places, with the strategy `weighted`. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// Why a worker cannot work like this. All that is wrong is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError {
    /// Each thing that is wrong, and what would be right.
    pub problems: Vec<String>,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the worker cannot start")?;
        self.problems.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl std::error::Error for SettingsError {}

/// A queue with all of its settings decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Polled {
    pub(crate) name: String,
    pub(crate) visibility: u32,
    pub(crate) batch: usize,
    pub(crate) concurrency: usize,
    pub(crate) priority: i32,
    pub(crate) weight: u32,
}

/// Handlers at once, tasks in a read: beyond this it is a mistake.
const COUNT_MAX: usize = 100_000;

impl Settings {
    /// The queues to poll, out of those that the flows use.
    pub(crate) fn polled(&self, flows: &str, available: &[String]) -> Result<Vec<Polled>, SettingsError> {
        let mut problems = self.problems();
        let wanted: Vec<String> = match (&self.queues, &self.queue_name) {
            (Some(_), Some(_)) => {
                problems.push(
                    "both queues and queueName are given: queueName is the old word for one queue".into(),
                );
                Vec::new()
            }
            (Some(queues), None) => unique(queues),
            (None, Some(queue)) => vec![queue.clone()],
            (None, None) => available.to_vec(),
        };
        if self.queues.as_ref().is_some_and(Vec::is_empty) {
            problems.push("queues is an empty list: leave it out to poll all queues of the flow".into());
        }
        let known = || list(available.iter().map(String::as_str));
        let named = wanted.iter().chain(&self.primary_queue).chain(self.queue_settings.keys());
        for queue in unique(named) {
            if !available.contains(&queue) {
                problems.push(format!(
                    "Queue \"{queue}\" is not used by flow \"{flows}\". Available queues: {}",
                    known()
                ));
            }
        }
        for queue in self.primary_queue.iter().chain(self.queue_settings.keys()) {
            if available.contains(queue) && !wanted.is_empty() && !wanted.contains(queue) {
                problems.push(format!(
                    "queue \"{queue}\" has settings, and the worker does not poll it: it polls {}",
                    list(wanted.iter().map(String::as_str))
                ));
            }
        }
        if !problems.is_empty() {
            return Err(SettingsError { problems });
        }
        Ok(wanted.into_iter().map(|name| self.decided(name)).collect())
    }

    fn decided(&self, name: String) -> Polled {
        let own = self.queue_settings.get(&name).cloned().unwrap_or_default();
        Polled {
            visibility: own.visibility_timeout.unwrap_or(self.visibility_timeout),
            batch: own.batch_size.unwrap_or(self.batch_size),
            concurrency: own.max_concurrent.unwrap_or(usize::MAX),
            priority: own.priority,
            weight: own.weight.unwrap_or(1),
            name,
        }
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut bounded = |what: &str, value: u64, least: u64, most: u64| {
            if !(least..=most).contains(&value) {
                problems.push(format!("{what} is {value}: it must be from {least} to {most}"));
            }
        };
        bounded("maxConcurrent", self.max_concurrent as u64, 1, COUNT_MAX as u64);
        bounded("batchSize", self.batch_size as u64, 1, COUNT_MAX as u64);
        bounded("visibilityTimeout", self.visibility_timeout.into(), 1, 86_400);
        bounded("maxPollSeconds", self.max_poll_seconds.into(), 1, 3_600);
        bounded("pollIntervalMs", self.poll_interval_ms.into(), 1, 3_600_000);
        bounded("heartbeatSeconds", self.heartbeat_seconds.into(), 1, 3_600);
        bounded(
            "deadAfterSeconds",
            self.dead_after_seconds.into(),
            2 * u64::from(self.heartbeat_seconds),
            86_400,
        );
        bounded("overdueSeconds", self.overdue_seconds.into(), 0, 86_400);
        bounded("shutdownSeconds", self.shutdown_seconds.into(), 0, 86_400);
        for (queue, settings) in &self.queue_settings {
            if let Some(seconds) = settings.visibility_timeout {
                bounded(&format!("visibilityTimeout of {queue}"), seconds.into(), 1, 86_400);
            }
            if let Some(tasks) = settings.batch_size {
                bounded(&format!("batchSize of {queue}"), tasks as u64, 1, COUNT_MAX as u64);
            }
            if let Some(tasks) = settings.max_concurrent {
                bounded(&format!("maxConcurrent of {queue}"), tasks as u64, 1, COUNT_MAX as u64);
            }
            if let Some(weight) = settings.weight {
                bounded(&format!("weight of {queue}"), weight.into(), 1, 1_000_000);
            }
        }
        problems
    }

    /// How long to wait for an announcement.
    pub(crate) fn patience(&self) -> Duration {
        if self.listen {
            Duration::from_secs(self.max_poll_seconds.into())
        } else {
            Duration::from_millis(self.poll_interval_ms.into())
        }
    }
}

fn unique<'a>(names: impl IntoIterator<Item = &'a String>) -> Vec<String> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(name) {
            seen.push(name.clone());
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn available() -> Vec<String> {
        ["data_processor", "email_worker"].map(String::from).to_vec()
    }

    #[test]
    fn all_queues_by_default_one_by_the_old_name() {
        let names = |settings: &Settings| -> Vec<String> {
            let polled = settings.polled("data_flow", &available()).expect("these exist");
            polled.into_iter().map(|queue| queue.name).collect()
        };
        assert_eq!(names(&Settings::default()), ["data_processor", "email_worker"]);
        let old: Settings =
            serde_json::from_str(r#"{"queueName":"email_worker","batchSize":5}"#).expect("it is understood");
        assert_eq!(names(&old), ["email_worker"]);
        let new: Settings = serde_json::from_str(
            r#"{"queues":["email_worker"],"queueSettings":{"email_worker":{"visibilityTimeout":30,"batchSize":5}}}"#,
        )
        .expect("it is understood");
        assert_eq!(new.polled("data_flow", &available()).expect("it exists")[0].batch, 5);
    }

    #[test]
    fn a_queue_that_is_not_there_is_refused_with_those_that_are() {
        let settings = Settings { queues: Some(vec!["invalid_queue".into()]), ..Settings::default() };
        let words = settings.polled("data_flow", &available()).unwrap_err().to_string();
        assert!(words.contains(
            "Queue \"invalid_queue\" is not used by flow \"data_flow\". Available queues: data_processor, email_worker"
        ));
        let settings = Settings {
            queues: Some(vec!["email_worker".into()]),
            primary_queue: Some("data_processor".into()),
            max_concurrent: 0,
            ..Settings::default()
        };
        let words = settings.polled("data_flow", &available()).unwrap_err().to_string();
        assert!(words.contains("does not poll it") && words.contains("maxConcurrent is 0"), "{words}");
    }
}
