//! The options of `bench engine`, the same for the front door and for `laneway-bench`.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Args;

use crate::contender::Entry;
use crate::targets;
use crate::workload::{self, Cost, Distribution, KeysType, Kind, Layout, Tuning, WINDOW, Workload};

/// How long a run lasts if nobody says.
const SECONDS: f64 = 1.0;

/// Workloads whose number of messages follows from the time; that of the others is fixed.
const WITH_A_TIME: [&str; 8] = ["W1", "W2", "W3", "W4", "W6", "W1-batch64", "W1-producers4", "free"];

/// Workloads that run on any topology; the others need as many slots on one dispatcher as their name says.
const WITH_A_TOPOLOGY: [&str; 9] =
    ["W1", "W2", "W3", "W4", "W6", "W1-batch64", "W1-producers4", "memory", "free"];

/// Options of `bench engine`.
#[derive(Args, Clone, Debug)]
pub struct EngineArgs {
    /// Workloads: W1 to W6, W5-hot, W1-batch64, W1-producers4, memory, scaling, free [default: W1,W2,W3,W4]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub workload: Vec<String>,
    /// Contenders, by name [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub contenders: Vec<String>,
    /// Rounds; the contenders take turns in each, and start with another one each time
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub rounds: u32,
    /// Shortest duration of a run, where the workload has no fixed number of messages [default: 1]
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,
    /// Write every value to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a bar chart of the medians to this file
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Compare with the targets; chooses the contenders that have one unless --contenders is given
    #[arg(long)]
    pub targets: bool,
    /// Count instructions per message with valgrind instead of measuring time: for machines that others use, too
    #[arg(long)]
    pub instructions: bool,
    /// List workloads and contenders, and do nothing else
    #[arg(long)]
    pub list: bool,
    /// Laneway's topology, except in W5, W5-hot and `scaling` [default: what the workload is made for]
    #[arg(long, value_enum)]
    pub topology: Option<Layout>,
    /// Keys of `free`, unless they are unbounded; in `memory`, keys that come and go
    #[arg(long, value_name = "N")]
    pub keys: Option<u64>,
    /// Options of the workload `free`.
    #[command(flatten)]
    pub free: FreeArgs,
}

/// Options of the workload `free`. What is not given is as in W1.
#[derive(Args, Clone, Debug, Default, PartialEq)]
#[command(next_help_heading = "The workload `free`")]
pub struct FreeArgs {
    /// Worker threads, or slots where the handler waits and the contender is async
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// How messages are spread over keys
    #[arg(long, value_enum)]
    pub distribution: Option<Distribution>,
    /// What the handler does: spin-ns:N, sleep-us:N or sleep-us:MIN-MAX [default: nothing]
    #[arg(long, value_parser = Cost::parse)]
    pub cost: Option<Cost>,
    /// Open loop: messages per second
    #[arg(long, value_name = "N")]
    pub rate: Option<u64>,
    /// Exactly so many messages, however long they take [default: as many as fit in --seconds]
    #[arg(long, value_name = "N")]
    pub messages: Option<u64>,
    /// Producer threads, each with keys of its own
    #[arg(long, value_name = "N")]
    pub producers: Option<usize>,
    /// Messages per submission; not with --rate
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
    /// The type of the keys
    #[arg(long, value_enum)]
    pub keys_type: Option<KeysType>,
}

impl EngineArgs {
    /// The workloads that were asked for, checked.
    pub fn workloads(&self) -> Result<Vec<Workload>> {
        ensure!(self.rounds > 0, "--rounds must be at least 1");
        let seconds = self.seconds.unwrap_or(SECONDS);
        ensure!(seconds > 0.0 && seconds <= 600.0, "--seconds must be more than 0, at most 600");
        let names = self.workload_names();
        if self.free != FreeArgs::default() && !names.contains(&"free") {
            bail!(
                "--workers, --distribution, --cost, --rate, --messages, --producers, --batch and --keys-type describe --workload free"
            );
        }
        let tuning = self.tuning();
        let mut workloads = Vec::new();
        for name in &names {
            match *name {
                "free" => workloads.push(self.free.workload(&tuning)?),
                name => workloads.extend(workload::named(name, &tuning)?),
            }
        }
        self.refuse_idle_options(&names)?;
        if self.instructions {
            workloads.iter_mut().try_for_each(to_be_counted)?;
        }
        Ok(workloads)
    }

    /// An option that no workload would heed is a misunderstanding.
    fn refuse_idle_options(&self, names: &[&str]) -> Result<()> {
        let options = [
            ("--keys", self.keys.is_some(), "memory and free", &["memory", "free"][..]),
            ("--topology", self.topology.is_some(), "all but W5, W5-hot and scaling", &WITH_A_TOPOLOGY),
            ("--seconds", self.seconds.is_some(), "all but W5, W5-hot, scaling and memory", &WITH_A_TIME),
        ];
        for (option, given, whose, heeded_by) in options {
            let heeded = names.iter().any(|name| heeded_by.contains(name));
            ensure!(!given || heeded, "{option} is for the workloads {whose}, not for {}", names.join(", "));
        }
        for (option, given) in
            [("--seconds", self.seconds.is_some()), ("--messages", self.free.messages.is_some())]
        {
            let heeded = !(self.instructions && given);
            ensure!(heeded, "--instructions counts a fixed number of messages, whatever {option} says");
        }
        self.refuse_silenced_options(names)
    }

    /// Nor may one option of `free` silence another, unless a workload beside it heeds that.
    fn refuse_silenced_options(&self, names: &[&str]) -> Result<()> {
        let beside =
            |heeded_by: &[&str]| names.iter().any(|name| *name != "free" && heeded_by.contains(name));
        let unbounded = self.free.distribution == Some(Distribution::Unbounded);
        ensure!(
            !(unbounded && self.keys.is_some()) || beside(&["memory"]),
            "--keys has no effect with --distribution unbounded, whose keys come and go"
        );
        ensure!(
            !(self.free.messages.is_some() && self.seconds.is_some()) || beside(&WITH_A_TIME),
            "--seconds has no effect with --messages, which says how long the run is"
        );
        let batches = self.free.batch.is_some_and(|batch| batch > 1);
        ensure!(
            !(batches && self.free.rate.is_some()),
            "--batch has no effect with --rate, at which messages are sent one by one"
        );
        Ok(())
    }

    /// The contenders that were asked for, Laneway first where it is among them.
    pub fn choose(&self, contenders: &[Entry]) -> Result<Vec<Entry>> {
        for name in &self.contenders {
            if !contenders.iter().any(|entry| entry.name == name) {
                let known: Vec<_> = contenders.iter().map(|entry| entry.name).collect();
                bail!("unknown contender {name:?}: expected one of {}", known.join(", "));
            }
        }
        let wanted = |entry: &&Entry| {
            if !self.contenders.is_empty() {
                self.contenders.iter().any(|name| name == entry.name)
            } else {
                !self.targets || targets::mention(entry.name)
            }
        };
        Ok(contenders.iter().filter(wanted).copied().collect())
    }

    fn workload_names(&self) -> Vec<&str> {
        match self.workload.is_empty() {
            true => vec!["W1", "W2", "W3", "W4"],
            false => self.workload.iter().map(String::as_str).collect(),
        }
    }

    fn tuning(&self) -> Tuning {
        Tuning { seconds: self.seconds.unwrap_or(SECONDS), layout: self.topology, keys: self.keys }
    }
}

/// Turns a workload into one whose instructions are counted. Whoever waits or spins has no number of instructions of its own.
fn to_be_counted(workload: &mut Workload) -> Result<()> {
    let is_tiny = workload.kind == Kind::Throughput && workload.cost == Cost::Tiny;
    ensure!(
        is_tiny,
        "--instructions counts workloads with tiny handlers only, and {} is not one",
        workload.name
    );
    workload.kind = Kind::Instructions;
    Ok(())
}

impl FreeArgs {
    fn workload(&self, tuning: &Tuning) -> Result<Workload> {
        let base = Workload::tiny("free", tuning);
        let cost = self.cost.unwrap_or(base.cost);
        let waits = matches!(cost, Cost::SleepMicroseconds { .. });
        let workload = Workload {
            kind: if waits { Kind::Waiting } else { base.kind },
            distribution: self.distribution.unwrap_or(base.distribution),
            keys: tuning.keys.unwrap_or(base.keys),
            keys_type: self.keys_type.unwrap_or(base.keys_type),
            cost,
            workers: self.workers.unwrap_or(base.workers),
            producers: self.producers.unwrap_or(base.producers),
            batch: self.batch.unwrap_or(base.batch),
            ..base
        };
        ensure!(workload.keys > 0, "--keys must be at least 1");
        ensure!(workload.workers > 0, "--workers must be at least 1");
        ensure!(workload.producers > 0, "--producers must be at least 1");
        ensure!((1..=WINDOW).contains(&workload.batch), "--batch must be at least 1, at most {WINDOW}");
        ensure!(self.rate != Some(0), "--rate must be at least 1");
        let workload = match self.rate {
            Some(rate) => workload.open_loop(rate, tuning.seconds),
            None => workload,
        };
        Ok(match self.messages {
            Some(messages) => workload.exactly(messages),
            None => workload,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;
    use crate::plan::{Plan, Source};
    use crate::pump::Way;
    use crate::weigh;
    use crate::workload::Amount;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn parse(arguments: &[&str]) -> EngineArgs {
        Program::try_parse_from(["program"].iter().chain(arguments)).unwrap().engine
    }

    #[test]
    fn without_options_the_four_throughput_workloads_run() {
        let names: Vec<_> =
            parse(&[]).workloads().unwrap().into_iter().map(|workload| workload.name).collect();
        assert_eq!(names, ["W1", "W2", "W3", "W4"]);
    }

    #[test]
    fn instructions_are_counted_of_tiny_handlers_only() {
        let kinds = |arguments: &[&str]| {
            let workloads = parse(arguments).workloads()?;
            anyhow::Ok(workloads.into_iter().map(|workload| workload.kind).collect::<Vec<_>>())
        };
        assert_eq!(kinds(&["--instructions"]).unwrap(), [Kind::Instructions; 4]);
        for waits in ["W5", "W6", "memory", "scaling"] {
            let error = kinds(&["--instructions", "--workload", waits]).unwrap_err().to_string();
            assert!(error.contains(waits), "{error}");
        }
    }

    #[test]
    fn workloads_may_be_repeated_or_separated_by_commas() {
        let args = parse(&["--workload", "W1,W5", "--workload", "W6"]);
        let names: Vec<_> = args.workloads().unwrap().into_iter().map(|workload| workload.name).collect();
        assert_eq!(names, ["W1", "W5-1000", "W5-5000", "W6"]);
    }

    #[test]
    fn a_free_workload_is_as_described() {
        let args = parse(&[
            "--workload",
            "free",
            "--workers",
            "8",
            "--keys",
            "50",
            "--distribution",
            "hot",
            "--cost",
            "sleep-us:300",
            "--messages",
            "1000",
            "--producers",
            "2",
            "--batch",
            "16",
            "--topology",
            "pool",
        ]);
        let free = args.workloads().unwrap().remove(0);
        assert_eq!((free.workers, free.keys, free.producers, free.batch), (8, 50, 2, 16));
        assert_eq!(
            (free.kind, free.layout, free.amount),
            (Kind::Waiting, Layout::Pool, Amount::Messages(1000))
        );
    }

    #[test]
    fn an_option_that_no_workload_would_heed_is_refused() {
        let told = |arguments: &[&str]| parse(arguments).workloads().unwrap_err().to_string();
        for workload in
            ["W1", "W2", "W3", "W4", "W5", "W5-hot", "W6", "W1-batch64", "W1-producers4", "scaling"]
        {
            let error = told(&["--keys", "7", "--workload", workload]);
            assert!(error.contains("--keys") && error.contains(workload), "{error}");
        }
        for workload in ["W5", "W5-hot", "scaling"] {
            let error = told(&["--topology", "partitioned", "--workload", workload]);
            assert!(error.contains("--topology") && error.contains(workload), "{error}");
        }
        for workload in ["W5", "W5-hot", "scaling", "memory"] {
            let error = told(&["--seconds", "2", "--workload", workload]);
            assert!(error.contains("--seconds") && error.contains(workload), "{error}");
        }
        assert!(told(&["--seconds", "2", "--instructions"]).contains("--instructions"));
        let counted = ["--messages", "9", "--workload", "free", "--instructions"];
        assert!(told(&counted).contains("--messages"));
        assert!(told(&["--workload", "W9", "--keys", "7"]).contains("unknown workload"));
    }

    /// What a run of this workload would do, told by those who act on it. Two workloads may differ in what nobody reads.
    #[derive(Debug, PartialEq)]
    struct Deeds {
        what: (Kind, Amount),
        /// The keys of the first messages of each producer, and how it sends them; where keys are held, how often they come and go.
        sent: Vec<Vec<u64>>,
        way: Option<Way>,
        generations: Option<u64>,
        /// What the contender and its handler are told.
        handled: (Cost, KeysType, Layout, usize),
    }

    impl Deeds {
        fn of(workload: &Workload) -> Self {
            let held = workload.kind == Kind::Memory;
            let first = |mut source: Source| (0..200).map(|_| source.next_message().key).collect();
            let sources = if held { Vec::new() } else { Plan::new(workload).into_sources() };
            let Workload { kind, amount, cost, keys_type, layout, workers, .. } = *workload;
            Self {
                // Keys that are held come and go as often as they do, however long that takes.
                what: (kind, if held { Amount::Messages(0) } else { amount }),
                sent: sources.into_iter().map(first).collect(),
                way: (!held).then(|| Way::of(workload)),
                generations: held.then(|| weigh::generations(workload)),
                handled: (cost, keys_type, layout, workers),
            }
        }
    }

    /// What would be done, unless it is refused.
    fn deeds(arguments: &[&str]) -> Option<Vec<Deeds>> {
        let workloads = parse(arguments).workloads().ok()?;
        Some(workloads.iter().map(Deeds::of).collect())
    }

    /// Every option with every workload that is not refused makes another run of it.
    #[test]
    fn an_option_that_is_not_refused_is_heeded() {
        let options = [["--keys", "7"], ["--topology", "per-worker"], ["--seconds", "2.5"]];
        for workload in workload::NAMES {
            let plain = deeds(&["--workload", workload]);
            for option in options {
                if let Some(tuned) = deeds(&[&["--workload", workload], &option[..]].concat()) {
                    assert_ne!(plain.as_ref(), Some(&tuned), "{workload} {option:?}");
                }
            }
        }
    }

    /// Of any two options of `free` that are not refused, each makes another run of what the other one describes.
    #[test]
    fn no_option_of_free_silences_another() {
        let options = [
            ["--keys", "7"],
            ["--topology", "per-worker"],
            ["--seconds", "2.5"],
            ["--workers", "3"],
            ["--distribution", "hot"],
            ["--distribution", "unbounded"],
            ["--cost", "spin-ns:5"],
            ["--cost", "sleep-us:5"],
            ["--rate", "1000"],
            ["--messages", "3000"],
            ["--producers", "2"],
            ["--batch", "16"],
            ["--keys-type", "string"],
        ];
        let free = ["--workload", "free"];
        let alone = options.map(|option| deeds(&[&free[..], &option].concat()));
        let mut silent = Vec::new();
        for (place, first) in options.iter().enumerate() {
            for (other, second) in options.iter().enumerate().skip(place + 1) {
                if first[0] == second[0] {
                    continue;
                }
                let both = deeds(&[&free[..], first, second].concat());
                if both.is_some() && (both == alone[place] || both == alone[other]) {
                    silent.push([first.join(" "), second.join(" ")]);
                }
            }
        }
        assert!(silent.is_empty(), "one of two is not heeded: {silent:?}");
    }

    #[test]
    fn as_many_keys_as_one_likes_come_and_go_in_memory() {
        let memory = parse(&["--workload", "memory", "--keys", "10000000"]).workloads().unwrap().remove(0);
        assert_eq!(memory.keys, 10_000_000);
        // Beside others, as long as one of them heeds it.
        assert!(parse(&["--workload", "W1,memory", "--keys", "7", "--seconds", "2"]).workloads().is_ok());
        let free = ["--workload", "free,memory,W1", "--distribution", "unbounded", "--messages", "9"];
        assert!(parse(&[&free[..], &["--keys", "7", "--seconds", "2"]].concat()).workloads().is_ok());
    }

    /// The number is what was asked for, and nobody is cut off who takes four times as long as it must.
    #[test]
    fn exactly_so_many_messages_have_the_time_that_they_take() {
        for (options, messages, seconds) in [
            (&["--rate", "1000", "--messages", "8000"][..], 8_000, 8.0),
            (&["--rate", "49", "--messages", "1"], 1, 0.0),
            (&["--messages", "20000", "--cost", "sleep-us:100-300"], 20_000, 6.0),
            (&["--messages", "20000", "--cost", "sleep-us:300", "--rate", "2000"], 20_000, 10.0),
            (&["--messages", "1000", "--cost", "spin-ns:5000000"], 1_000, 5.0),
            (&["--messages", "18446744073709551615", "--rate", "1"], u64::MAX, 86_400.0),
        ] {
            let free = parse(&[&["--workload", "free"], options].concat()).workloads().unwrap().remove(0);
            assert_eq!(free.amount, Amount::Messages(messages), "{options:?}");
            let cap = free.cap_seconds;
            assert!(cap >= 4.0 * seconds, "{options:?} takes {seconds} s and is cut off after {cap} s");
            assert!(Duration::try_from_secs_f64(cap).is_ok_and(|cap| cap < Duration::MAX / 2), "{cap}");
        }
    }

    #[test]
    fn mistakes_are_told() {
        assert!(
            parse(&["--cost", "spin-ns:5"]).workloads().is_err(),
            "free options without the free workload"
        );
        assert!(parse(&["--workload", "W7"]).workloads().is_err());
        assert!(parse(&["--rounds", "0"]).workloads().is_err());
        assert!(parse(&["--workload", "free", "--workers", "0"]).workloads().is_err());
        assert!(parse(&["--workload", "free", "--batch", "65537"]).workloads().is_err(), "beyond the window");
        assert!(parse(&["--contenders", "nobody"]).choose(&[]).is_err());
    }
}
