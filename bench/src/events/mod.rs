//! `bench events`: event processors on dispatchers, beside other designs of the same, in interleaved rounds and fresh processes.
//!
//! [`workload`] says what is run: a number of threads on a number of dispatchers, and what handlers do. [`drive`] runs it in a child, through a
//! [`design`]: Laneway's own ([`laneway`]), the same processors on a shared lock-free queue (`lock_free`), and document 001's own
//! (`locked`), whose lock is held while a handler runs. Every handler call is checked. What comes out is the same [`Report`] as that
//! of the engine, shown as a table ([`show`]) and against the bars ([`targets`]).

mod design;
mod drive;
mod laneway;
#[cfg(feature = "peers")]
mod lock_free;
#[cfg(feature = "peers")]
mod locked;
mod show;
mod targets;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

pub use design::Entry;
use workload::Workload;

use crate::machine::Neighbours;
use crate::report::{OTHERS, Report};
use crate::{child, plot};

/// The hidden first argument of a child of `bench events`.
const CHILD: &str = "__child-events";
/// What a child may take beyond the time that it measures.
const GRACE: Duration = Duration::from_secs(40);

/// Options of `bench events`.
#[derive(Args, Clone, Debug)]
pub struct EventsArgs {
    /// Workloads: tiny, wait (for all --threads and --dispatchers), half-load, idle, or one by its name, as tiny-4x2 [default: tiny,wait]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub workload: Vec<String>,
    /// Contenders, by name [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub contenders: Vec<String>,
    /// Threads of the grid
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "2,4,8,16")]
    pub threads: Vec<usize>,
    /// Dispatchers of the grid
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "1,2,4,8")]
    pub dispatchers: Vec<usize>,
    /// Rounds; the contenders take turns in each, and start with another one each time
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub rounds: u32,
    /// Duration of a run; idle takes at least 10
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    pub seconds: f64,
    /// Write every value to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw the rates into this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Compare with the bars; runs what they need unless --workload is given
    #[arg(long)]
    pub targets: bool,
    /// List workloads and contenders, and do nothing else
    #[arg(long)]
    pub list: bool,
}

/// What a child is told.
#[derive(Serialize, Deserialize)]
struct Spec {
    contender: String,
    workload: Workload,
}

/// Laneway alone.
pub fn product() -> Vec<Entry> {
    vec![Entry::of::<laneway::Laneway>()]
}

/// Laneway and the other designs.
#[cfg(feature = "peers")]
pub fn all() -> Vec<Entry> {
    let mut entries = product();
    entries.extend([Entry::of::<lock_free::LockFree>(), Entry::of::<locked::Locked>()]);
    entries
}

/// Measures, prints, writes what was asked for, and fails when a contender broke its promise.
pub fn run(args: &EventsArgs, designs: &[Entry]) -> Result<Report> {
    if args.list {
        show::list(designs);
        return Ok(Report { bench: "events", ..Report::default() });
    }
    let (workloads, designs) = (args.workloads()?, args.choose(designs)?);
    let report = measure(args, &workloads, &designs);
    show::print(&report, &workloads);
    if args.targets {
        targets::print(&report);
    }
    if let Some(path) = &args.json {
        report.write_json(path)?;
    }
    if let Some(path) = &args.plot {
        plot::write_rates(&report, workloads.iter().map(|workload| workload.name.as_str()), path)?;
    }
    match report.failures.is_empty() {
        true => Ok(report),
        false => bail!("{} run(s) failed:\n  {}", report.failures.len(), report.failures.join("\n  ")),
    }
}

/// Does the work of a child, where this process is one. Otherwise returns at once, with nothing.
pub fn serve(designs: &[Entry]) -> Option<ExitCode> {
    child::serve_kind(CHILD, |spec| {
        let Spec { contender, workload } = serde_json::from_str(spec).context("not a spec")?;
        let entry = designs.iter().find(|entry| entry.name == contender).context("unknown contender")?;
        child::start_watchdog(Duration::from_secs_f64(workload.seconds) + GRACE);
        Ok(serde_json::to_string(&entry.run(&workload)?)?)
    })
}

impl EventsArgs {
    fn workloads(&self) -> Result<Vec<Workload>> {
        ensure!(self.rounds > 0, "--rounds must be at least 1");
        ensure!(self.seconds > 0.0 && self.seconds <= 600.0, "--seconds must be more than 0, at most 600");
        let fits = |numbers: &[usize]| numbers.iter().all(|number| (1..=100).contains(number));
        ensure!(
            fits(&self.threads) && fits(&self.dispatchers),
            "--threads and --dispatchers are from 1 to 100"
        );
        let names: Vec<&str> = match (self.workload.is_empty(), self.targets) {
            (true, true) => targets::WORKLOADS.to_vec(),
            (true, false) => vec!["tiny", "wait"],
            (false, _) => self.workload.iter().map(String::as_str).collect(),
        };
        let mut workloads: Vec<Workload> = Vec::new();
        for name in names {
            for workload in workload::named(name, &self.threads, &self.dispatchers, self.seconds)? {
                if workloads.iter().all(|known| known.name != workload.name) {
                    workloads.push(workload);
                }
            }
        }
        Ok(workloads)
    }

    fn choose(&self, designs: &[Entry]) -> Result<Vec<Entry>> {
        let known: Vec<_> = designs.iter().map(|entry| entry.name).collect();
        if let Some(name) = self.contenders.iter().find(|name| !known.contains(&name.as_str())) {
            bail!("unknown contender {name:?}: expected one of {}", known.join(", "));
        }
        let wanted = |entry: &&Entry| {
            self.contenders.is_empty() || self.contenders.iter().any(|name| name == entry.name)
        };
        Ok(designs.iter().filter(wanted).copied().collect())
    }
}

fn measure(args: &EventsArgs, workloads: &[Workload], designs: &[Entry]) -> Report {
    let contenders = designs.iter().map(|entry| entry.name.to_string()).collect();
    let mut report = Report { bench: "events", contenders, ..Report::default() };
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} (about {eta} left) {msg}")
        .expect("the template is valid");
    let runs = workloads.len() as u64 * designs.len() as u64 * u64::from(args.rounds);
    let progress = ProgressBar::new(runs).with_style(style);
    for round in 1..=args.rounds {
        for workload in workloads {
            for turn in 0..designs.len() {
                let entry = &designs[(turn + round as usize - 1) % designs.len()];
                progress.set_message(format!("round {round}: {} {}", workload.name, entry.name));
                run_once(&mut report, workload, entry, round);
                progress.inc(1);
            }
        }
    }
    progress.finish_and_clear();
    report
}

fn run_once(report: &mut Report, workload: &Workload, entry: &Entry, round: u32) {
    let neighbours = Neighbours::watch();
    let spec = Spec { contender: entry.name.into(), workload: workload.clone() };
    match child::start(CHILD, &spec) {
        Ok(outcome) => report.add(&workload.name, entry.name, round, outcome),
        Err(error) => {
            report.failures.push(format!("{} {} round {round}: {error:#}", workload.name, entry.name));
        }
    }
    if let Some(cores) = neighbours.cores_used() {
        report.add_value(&workload.name, entry.name, round, OTHERS.into(), cores);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        events: EventsArgs,
    }

    fn names(arguments: &[&str]) -> Vec<String> {
        let program = Program::try_parse_from(["program"].iter().chain(arguments)).unwrap();
        program.events.workloads().unwrap().into_iter().map(|workload| workload.name).collect()
    }

    #[test]
    fn without_options_the_whole_grid_runs() {
        let names = names(&[]);
        assert_eq!(names.len(), 32);
        assert_eq!((names[0].as_str(), names[31].as_str()), ("tiny-2x1", "wait-16x8"));
    }

    #[test]
    fn workloads_are_chosen_by_name() {
        assert_eq!(names(&["--workload", "wait-8x1,idle", "--seconds", "0.1"]), ["wait-8x1", "idle"]);
        let of_the_grid = ["--workload", "tiny", "--threads", "4", "--dispatchers", "1,2"];
        assert_eq!(names(&of_the_grid), ["tiny-4x1", "tiny-4x2"]);
        assert!(names(&["--targets"]).contains(&"half-load-8".to_string()));
    }

    #[test]
    fn mistakes_are_told() {
        let wrong = |arguments: &[&str]| {
            let program = Program::try_parse_from(["program"].iter().chain(arguments)).unwrap();
            program.events.workloads().is_err() || program.events.choose(&product()).is_err()
        };
        assert!(wrong(&["--workload", "huge"]) && wrong(&["--rounds", "0"]) && wrong(&["--threads", "0"]));
        assert!(wrong(&["--contenders", "nobody"]) && wrong(&["--workload", "tiny-0x1"]));
    }

    /// Every design handles everything once, in order, in this process, for a moment.
    #[cfg(feature = "peers")]
    #[test]
    fn every_design_keeps_its_promise() {
        for entry in all() {
            for name in ["tiny-2x1", "tiny-3x2", "wait-2x4", "half-load-2"] {
                let workload = workload::named(name, &[], &[], 0.05).unwrap().remove(0);
                let outcome = entry.run(&workload).unwrap();
                assert!(outcome.violations.is_empty(), "{} {name}: {:?}", entry.name, outcome.violations);
                assert!(outcome.metrics["messages_per_second"] > 0.0);
            }
        }
    }
}
