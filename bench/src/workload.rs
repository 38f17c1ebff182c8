//! What is asked of the contenders: the named workloads and the free ones.
//!
//! A [`Workload`] is plain data. It is chosen on the command line ([`crate::cli`]), travels to a child process as JSON
//! ([`crate::child`]), and is turned there into a plan of keys ([`crate::plan`]) that the driver pumps into a contender
//! ([`crate::drive`]).

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::message::{Message, smear};

/// Messages in flight, at most, in every contender: large enough that no producer waits for a single slow wake-up.
pub const WINDOW: usize = 65_536;
/// More workers than this are not threads any more, in contenders that have a choice.
const THREADS_MAX: usize = 64;
/// Messages that one key of an unbounded workload sees before it ends.
pub const MESSAGES_PER_KEY: u32 = 10;
/// One in so many messages is of the hot family, where there is one. Document 003 gives it thirty times as many, which, strictly
/// one after the other, would take seven minutes and not a quarter of one.
pub const FAMILY_EVERY: u64 = 100;
/// Where exactly so many messages are asked for, nobody is cut off who takes so many times as long as one worker would that handles
/// them one after the other,
const PATIENCE: f64 = 4.0;
/// and loses so much time with each: many times what any contender does, short sleeps included, which last longer than they should.
const LOST_SECONDS_PER_MESSAGE: f64 = 1e-4;
/// But nobody waits longer than a week.
const CAP_SECONDS_MAX: f64 = 7.0 * 86_400.0;
/// The key of the hot family.
pub const FAMILY: u64 = 0;

/// What is measured, and therefore which columns the table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// As many messages as possible, with tiny handlers.
    Throughput,
    /// Handlers that wait; how close the run comes to the ideal time.
    Waiting,
    /// A fixed rate; how long a message waits.
    Latency,
    /// Handlers that are held; how much memory the backlog takes.
    Memory,
    /// A throughput workload whose instructions are counted instead of its time.
    Instructions,
}

/// How messages are spread over keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// Every key with the same chance, each time.
    Uniform,
    /// Every key exactly as often as every other: all keys once in random order, then all again.
    Even,
    /// Zipf with exponent 1.1.
    Zipf,
    /// One key takes 30 % of the messages, the others share the rest.
    Hot,
    /// One key takes exactly every hundredth message, the others the same number each. For `W5-hot` only: what it yields is about the two parts.
    #[value(skip)]
    Family,
    /// Keys come, see ten messages and never return.
    Unbounded,
}

/// How Laneway itself is laid out. Peers have one layout each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// One dispatcher for all workers.
    Pool,
    /// One dispatcher per worker, keys placed by hash.
    Partitioned,
    /// One dispatcher per worker, keys placed on the least loaded one.
    PerWorker,
}

/// The type of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeysType {
    /// 64-bit integers.
    U64,
    /// Strings, made anew for every message, as a program that decodes messages would. Only Laneway runs them.
    String,
}

/// What a handler does besides checking the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cost {
    /// Nothing: the hand-over is all there is.
    Tiny,
    /// Computes for so many nanoseconds.
    SpinNanoseconds(u64),
    /// Waits between `min` and `max` microseconds, by a fixed pseudo-random choice per message.
    SleepMicroseconds {
        /// The shortest wait.
        min: u64,
        /// The longest wait.
        max: u64,
    },
    /// Waits until the driver opens the gate; used to measure the memory of a backlog.
    Gate,
}

impl Cost {
    /// Parses `spin-ns:N`, `sleep-us:N` or `sleep-us:MIN-MAX`.
    pub fn parse(text: &str) -> Result<Self> {
        let (form, amount) = text.split_once(':').context("expected spin-ns:N or sleep-us:N")?;
        let number =
            |digits: &str| digits.parse::<u64>().with_context(|| format!("{digits:?} is not a number"));
        match form {
            "spin-ns" => Ok(Self::SpinNanoseconds(number(amount)?)),
            "sleep-us" => {
                let (min, max) = amount.split_once('-').unwrap_or((amount, amount));
                let (min, max) = (number(min)?, number(max)?);
                if min > max {
                    bail!("the shortest wait {min} is longer than the longest {max}");
                }
                Ok(Self::SleepMicroseconds { min, max })
            }
            other => bail!("unknown cost {other:?}: expected spin-ns:N or sleep-us:N"),
        }
    }

    /// How long the handler of this message waits; the same in every contender and every round.
    pub fn wait_of(&self, message: &Message) -> Duration {
        match *self {
            Self::SleepMicroseconds { min, max } => {
                let draw = smear(message.key.wrapping_mul(31).wrapping_add(u64::from(message.body.sequence)));
                Duration::from_micros(min + draw % (max - min + 1))
            }
            _ => Duration::ZERO,
        }
    }

    /// The longest that a handler takes.
    fn longest(&self) -> Duration {
        match *self {
            Self::SpinNanoseconds(nanoseconds) => Duration::from_nanos(nanoseconds),
            Self::SleepMicroseconds { max, .. } => Duration::from_micros(max),
            Self::Tiny | Self::Gate => Duration::ZERO,
        }
    }

    /// The mean wait, from which the ideal time of a run follows.
    pub fn wait_mean(&self) -> Duration {
        match *self {
            Self::SleepMicroseconds { min, max } => Duration::from_micros(min + max) / 2,
            _ => Duration::ZERO,
        }
    }
}

/// How long a run lasts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Amount {
    /// Until both the time and the number of messages are reached.
    AtLeast {
        /// The shortest duration.
        seconds: f64,
        /// The fewest messages.
        messages: u64,
    },
    /// Exactly so many messages.
    Messages(u64),
}

/// One workload, complete: a child process needs nothing else to run it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Its name in tables and JSON lines.
    pub name: String,
    /// What is measured.
    pub kind: Kind,
    /// How messages are spread over keys.
    pub distribution: Distribution,
    /// How many keys; for [`Kind::Memory`] how many come and go.
    pub keys: u64,
    /// The type of the keys.
    pub keys_type: KeysType,
    /// What the handler does.
    pub cost: Cost,
    /// How long it lasts.
    pub amount: Amount,
    /// Open loop: messages per second.
    pub rate: Option<u64>,
    /// Laneway's layout.
    pub layout: Layout,
    /// Worker threads, or slots of an async contender.
    pub workers: usize,
    /// Producer threads, each with keys of its own.
    pub producers: usize,
    /// Messages per submission.
    pub batch: usize,
    /// Messages in flight, at most.
    pub window: usize,
    /// Slow contenders are cut off here; such runs are marked and have no check for losses.
    pub cap_seconds: f64,
}

/// Options that apply to the named workloads too.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// The shortest duration of a run.
    pub seconds: f64,
    /// Laneway's layout, where the workload does not need a certain one.
    pub layout: Option<Layout>,
    /// Keys that come and go in `memory`.
    pub keys: Option<u64>,
}

/// The names that [`named`] knows, in the order of `--help`.
pub const NAMES: &[&str] = &[
    "W1",
    "W2",
    "W3",
    "W4",
    "W5",
    "W5-hot",
    "W6",
    "W1-batch64",
    "W1-producers4",
    "memory",
    "scaling",
    "free",
];

/// The workloads behind a name: `W5` and `scaling` are several, one per concurrency.
pub fn named(name: &str, tuning: &Tuning) -> Result<Vec<Workload>> {
    let base = Workload::tiny(name, tuning);
    Ok(match name {
        "W1" => vec![base],
        "W2" => vec![Workload { distribution: Distribution::Zipf, ..base }],
        "W3" => vec![Workload { distribution: Distribution::Hot, ..base }],
        "W4" => vec![base.with_unbounded_keys()],
        "W5" => [1_000, 5_000].map(|concurrency| base.clone().waiting(concurrency)).into(),
        "W5-hot" => vec![base.waiting(1_000).with_hot_family(name)],
        "W6" => vec![Workload { workers: 1, ..base.open_loop(50_000, tuning.seconds) }],
        "W1-batch64" => vec![Workload { batch: 64, ..base }],
        "W1-producers4" => vec![Workload { producers: 4, ..base }],
        "memory" => vec![base.held(tuning.keys.unwrap_or(1_000_000))],
        "scaling" => [1, 2, 4, 8, 16].map(|workers| base.clone().scaled(workers)).into(),
        other => bail!("unknown workload {other:?}: expected one of {}", NAMES.join(", ")),
    })
}

impl Workload {
    /// W1, from which the others differ: 10,000 keys, uniform, tiny handlers, one producer, two workers.
    pub fn tiny(name: &str, tuning: &Tuning) -> Self {
        Self {
            name: name.into(),
            kind: Kind::Throughput,
            distribution: Distribution::Uniform,
            keys: 10_000,
            keys_type: KeysType::U64,
            cost: Cost::Tiny,
            amount: Amount::AtLeast { seconds: tuning.seconds, messages: 0 },
            rate: None,
            layout: tuning.layout.unwrap_or(Layout::Partitioned),
            workers: 2,
            producers: 1,
            batch: 1,
            window: WINDOW,
            cap_seconds: tuning.seconds + 3.0,
        }
    }

    /// W4: keys come and go, more than a million of them.
    fn with_unbounded_keys(self) -> Self {
        let seconds = self.cap_seconds - 3.0;
        let messages = 1_050_000 * u64::from(MESSAGES_PER_KEY);
        Self {
            distribution: Distribution::Unbounded,
            amount: Amount::AtLeast { seconds, messages },
            cap_seconds: seconds + 5.0,
            ..self
        }
    }

    /// W5: 100,000 messages whose handlers wait 10 to 20 ms, so many at a time. Every key gets exactly ten, because the
    /// longest lane would bound the run otherwise, and not the engine.
    fn waiting(self, concurrency: usize) -> Self {
        Self {
            name: format!("{}-{concurrency}", self.name),
            kind: Kind::Waiting,
            distribution: Distribution::Even,
            cost: Cost::SleepMicroseconds { min: 10_000, max: 20_000 },
            amount: Amount::Messages(100_000),
            layout: Layout::Pool,
            workers: concurrency,
            cap_seconds: 12.0,
            ..self
        }
    }

    /// W5-hot: document 003's second workload. One family has far more messages than any other; it is handled strictly one
    /// message after the other, and the others must not notice.
    fn with_hot_family(self, name: &str) -> Self {
        Self { name: name.into(), distribution: Distribution::Family, cap_seconds: 30.0, ..self }
    }

    /// W6: a fixed rate, whatever the contender does.
    pub fn open_loop(self, rate: u64, seconds: f64) -> Self {
        let messages = (rate as f64 * seconds) as u64;
        Self { kind: Kind::Latency, rate: Some(rate), amount: Amount::Messages(messages), ..self }
    }

    /// Exactly so many messages: a run that is cut off has sent fewer, so the cap follows from what they must take.
    pub fn exactly(self, messages: u64) -> Self {
        let interval = self.rate.map_or(0.0, |rate| 1.0 / rate as f64);
        let each = interval + self.cost.longest().as_secs_f64() + LOST_SECONDS_PER_MESSAGE;
        let cap_seconds = (3.0 + PATIENCE * messages as f64 * each).min(CAP_SECONDS_MAX);
        Self { amount: Amount::Messages(messages), cap_seconds, ..self }
    }

    /// Handlers that wait 1 ms on so many workers: half a second of ideal time, whatever their number.
    fn scaled(self, workers: usize) -> Self {
        Self {
            name: format!("{}-{workers}", self.name),
            kind: Kind::Waiting,
            distribution: Distribution::Even,
            cost: Cost::SleepMicroseconds { min: 1_000, max: 1_000 },
            amount: Amount::Messages(500 * workers as u64),
            layout: Layout::Pool,
            workers,
            cap_seconds: 8.0,
            ..self
        }
    }

    /// Memory: handlers are held, so that the backlog can be weighed; then so many keys come and go.
    fn held(self, keys: u64) -> Self {
        Self {
            kind: Kind::Memory,
            distribution: Distribution::Unbounded,
            keys,
            cost: Cost::Gate,
            window: 32 * WINDOW,
            cap_seconds: 30.0,
            ..self
        }
    }

    /// How many messages a key sees before it ends, where keys end.
    pub fn messages_per_key(&self) -> Option<u32> {
        match (self.kind, self.distribution) {
            (Kind::Memory, _) => Some(crate::weigh::MEMORY_MESSAGES_PER_KEY),
            (_, Distribution::Unbounded) => Some(MESSAGES_PER_KEY),
            _ => None,
        }
    }

    /// How contenders that keep something per key learn that they may let go of it.
    pub fn key_life(&self) -> KeyLife {
        KeyLife { messages: self.messages_per_key().unwrap_or(u32::MAX) }
    }

    /// Whether handlers wait rather than compute.
    pub fn waits(&self) -> bool {
        self.kind == Kind::Waiting
    }

    /// Whether there are more workers than threads can serve, so that they must be slots of an async runtime.
    pub fn needs_slots(&self) -> bool {
        self.workers > THREADS_MAX
    }

    /// Whether one family has far more messages than the others.
    pub fn has_hot_family(&self) -> bool {
        self.distribution == Distribution::Family
    }

    /// The ideal time of a waiting workload: every worker busy from the first to the last moment.
    pub fn ideal_seconds(&self, messages: u64) -> f64 {
        messages as f64 * self.cost.wait_mean().as_secs_f64() / self.workers as f64
    }

    /// The ideal time of the hot family: its messages, each beginning when the one before it ends.
    pub fn ideal_seconds_of_family(&self, messages: u64) -> f64 {
        let waits = (0..messages).map(|sequence| self.cost.wait_of(&Message::new(FAMILY, sequence as u32)));
        waits.sum::<Duration>().as_secs_f64()
    }
}

/// How many messages a key sees.
#[derive(Clone, Copy, Debug)]
pub struct KeyLife {
    messages: u32,
}

impl KeyLife {
    /// Whether this is the last message that its key will see.
    #[inline]
    pub fn ends_with(&self, message: &Message) -> bool {
        message.body.sequence + 1 == self.messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TUNING: Tuning = Tuning { seconds: 1.0, layout: None, keys: None };

    #[test]
    fn every_name_but_free_is_known() {
        for name in NAMES.iter().filter(|name| **name != "free") {
            assert!(!named(name, &TUNING).unwrap().is_empty(), "{name}");
        }
        assert!(named("W9", &TUNING).is_err());
    }

    #[test]
    fn a_workload_survives_the_way_to_a_child() {
        for workload in named("W5", &TUNING).unwrap() {
            let text = serde_json::to_string(&workload).unwrap();
            assert_eq!(serde_json::from_str::<Workload>(&text).unwrap(), workload);
        }
    }

    #[test]
    fn costs_are_parsed() {
        assert_eq!(Cost::parse("spin-ns:250").unwrap(), Cost::SpinNanoseconds(250));
        assert_eq!(Cost::parse("sleep-us:5").unwrap(), Cost::SleepMicroseconds { min: 5, max: 5 });
        assert_eq!(Cost::parse("sleep-us:5-9").unwrap(), Cost::SleepMicroseconds { min: 5, max: 9 });
        assert!(Cost::parse("sleep-us:9-5").is_err());
        assert!(Cost::parse("sleep").is_err());
    }

    #[test]
    fn waits_stay_inside_their_range_and_average_to_their_mean() {
        let cost = Cost::SleepMicroseconds { min: 10_000, max: 20_000 };
        let waits: Vec<_> = (0..10_000).map(|key| cost.wait_of(&Message::new(key, 3)).as_micros()).collect();
        assert!(waits.iter().all(|wait| (10_000..=20_000).contains(wait)));
        let mean = waits.iter().sum::<u128>() / waits.len() as u128;
        assert!((14_800..=15_200).contains(&mean), "{mean}");
    }

    #[test]
    fn w5_at_a_thousand_takes_a_second_and_a_half_at_best() {
        let w5 = &named("W5", &TUNING).unwrap()[0];
        assert!((w5.ideal_seconds(100_000) - 1.5).abs() < 1e-9);
    }
}
