//! `bench flow`: tasks per second from a started run to its end, on a real Postgres, beside the loop of the original on the same database.
//!
//! The database is one for the whole benchmark: a temporary Postgres of this machine with its default settings (every commit is synchronous),
//! or one that `--database` names. Every run is a fresh process and a fresh flow; contenders take turns. What a run does is in [`run`].

mod run;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use comfy_table::Table;
use indicatif::{ProgressBar, ProgressStyle};
use laneway_flow::local::LocalPostgres;
use serde::{Deserialize, Serialize};

use crate::child;
use crate::machine::Neighbours;
use crate::report::{OTHERS, Report};

/// The hidden first argument of a child.
const CHILD: &str = "__flow_child";

/// What can be measured: name, what it is, and the contenders it has.
const WORKLOADS: [(&str, &str, &[&str]); 7] = [
    ("one-step", "flows of one step", &["laneway", "one-at-a-time"]),
    ("chain", "flows of three steps, one after another", &["laneway", "one-at-a-time"]),
    ("map", "runs with a map of 1,000 elements", &["laneway", "one-at-a-time"]),
    ("wide", "one run with a map of 10,000 elements", &["laneway"]),
    ("queues", "flows of one step over 1, 5, 25 and 100 queues, polled by one worker", &["laneway"]),
    ("memory", "resident memory of a worker with 1 and with 100 queues", &["laneway"]),
    ("piled", "flows of one step, with 1,000,000 finished tasks in the tables", &["laneway"]),
];

/// What the original did on a machine like ours, in tasks per second: workload, workers, at batch 1, 10 and 100.
const ORIGINAL: [(&str, usize, [f64; 3]); 4] = [
    ("one-step", 1, [153.0, 423.0, 429.0]),
    ("one-step", 2, [323.0, 781.0, 827.0]),
    ("chain", 1, [162.0, 304.0, 305.0]),
    ("chain", 2, [225.0, 418.0, 496.0]),
];

/// Options of `bench flow`.
#[derive(Args, Clone, Debug)]
pub struct FlowArgs {
    /// Workloads: one-step, chain, map, wide, queues, memory, piled [default: all but piled]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub workload: Vec<String>,
    /// Contenders, by name [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub contenders: Vec<String>,
    /// How many tasks a read takes
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 100], value_name = "N")]
    pub batch: Vec<usize>,
    /// How many workers
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2], value_name = "N")]
    pub workers: Vec<usize>,
    /// Tasks of a run of the loop; the product does four times as many, to be measured as long
    #[arg(long, default_value_t = 1_200, value_name = "N")]
    pub tasks: usize,
    /// Finished tasks of `piled`
    #[arg(long, default_value_t = 1_000_000, value_name = "N")]
    pub piled: u64,
    /// Rounds
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub rounds: u32,
    /// A database to use, and to leave the benchmark's flows in, instead of a temporary one
    #[arg(long, value_name = "URL")]
    pub database: Option<String>,
    /// Write every value to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Compare with the targets
    #[arg(long)]
    pub targets: bool,
    /// List workloads and contenders, and do nothing else
    #[arg(long)]
    pub list: bool,
}

/// What a child is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) url: String,
    pub(crate) workload: String,
    pub(crate) contender: String,
    pub(crate) batch: usize,
    pub(crate) workers: usize,
    pub(crate) queues: usize,
    pub(crate) tasks: usize,
    pub(crate) piled: u64,
    /// Makes the names of its flows its own.
    pub(crate) number: u32,
}

impl Spec {
    /// Under which the values are reported.
    fn name(&self) -> String {
        match self.workload.as_str() {
            "queues" | "memory" => format!("{} {}", self.workload, self.queues),
            "wide" => format!("wide x{}", self.workers),
            name => format!("{name} batch {} x{}", self.batch, self.workers),
        }
    }
}

/// Does the work of a child, where this process is one. Otherwise returns at once, with nothing.
pub fn serve() -> Option<ExitCode> {
    child::serve_kind(CHILD, |spec| {
        let spec: Spec = serde_json::from_str(spec).context("not a spec")?;
        child::start_watchdog(run::LIMIT);
        Ok(serde_json::to_string(&run::run(&spec)?)?)
    })
}

/// Measures, prints, writes what was asked for, and fails when a task was lost, done twice or out of place.
pub fn run(args: &FlowArgs) -> Result<()> {
    if args.list {
        for (name, about, contenders) in WORKLOADS {
            println!("{name:<9} {about} ({})", contenders.join(", "));
        }
        return Ok(());
    }
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    ensure!(
        args.tasks > 0 && args.batch.iter().chain(&args.workers).all(|number| *number > 0),
        "nothing may be 0"
    );
    let server = match &args.database {
        Some(_) => None,
        None => Some(LocalPostgres::temporary()?),
    };
    let url = args.database.clone().or_else(|| server.as_ref().map(LocalPostgres::url)).unwrap_or_default();
    let report = measure(args, &args.runs(&url)?);
    print_table(&report);
    if args.targets {
        print_targets(&report);
    }
    if let Some(path) = &args.json {
        report.write_json(path)?;
    }
    match report.failures.is_empty() {
        true => Ok(()),
        false => bail!("{} run(s) failed:\n  {}", report.failures.len(), report.failures.join("\n  ")),
    }
}

impl FlowArgs {
    /// What is to be run in each round. Contenders of one row come after each other.
    fn runs(&self, url: &str) -> Result<Vec<Spec>> {
        for name in &self.workload {
            let known = WORKLOADS.map(|(name, ..)| name);
            ensure!(
                known.contains(&name.as_str()),
                "unknown workload {name:?}: expected one of {}",
                known.join(", ")
            );
        }
        let mut runs = Vec::new();
        for (workload, _, contenders) in WORKLOADS {
            let chosen = if self.workload.is_empty() {
                workload != "piled"
            } else {
                self.workload.iter().any(|it| it == workload)
            };
            if !chosen {
                continue;
            }
            for (batch, workers, queues) in self.rows(workload) {
                for contender in contenders.iter().filter(|it| self.takes_part(it)) {
                    let tasks = if *contender == "laneway" { 4 * self.tasks } else { self.tasks };
                    runs.push(Spec {
                        url: url.to_owned(),
                        workload: workload.to_owned(),
                        contender: (*contender).to_owned(),
                        batch,
                        workers,
                        queues,
                        tasks,
                        piled: self.piled,
                        number: 0,
                    });
                }
            }
        }
        ensure!(!runs.is_empty(), "no such contender: `--list` names them");
        Ok(runs)
    }

    fn takes_part(&self, contender: &str) -> bool {
        self.contenders.is_empty() || self.contenders.iter().any(|wanted| wanted == contender)
    }

    /// Batch, workers and queues of a workload's runs.
    fn rows(&self, workload: &str) -> Vec<(usize, usize, usize)> {
        match workload {
            "queues" => [1, 5, 25, 100].map(|queues| (100, 1, queues)).to_vec(),
            "memory" => [1, 100].map(|queues| (100, 1, queues)).to_vec(),
            "wide" | "piled" => self.workers.iter().map(|workers| (100, *workers, 1)).collect(),
            _ => {
                let pairs = self
                    .workers
                    .iter()
                    .flat_map(|workers| self.batch.iter().map(move |batch| (*batch, *workers, 1)));
                pairs.collect()
            }
        }
    }
}

fn measure(args: &FlowArgs, runs: &[Spec]) -> Report {
    let mut report = Report { bench: "flow", ..Report::default() };
    let style =
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}").expect("a valid template");
    let progress = ProgressBar::new(runs.len() as u64 * u64::from(args.rounds)).with_style(style);
    let mut number = 0;
    for round in 1..=args.rounds {
        for spec in runs {
            number += 1;
            let spec = Spec { number, ..spec.clone() };
            progress.set_message(format!("round {round}: {} {}", spec.name(), spec.contender));
            let neighbours = Neighbours::watch();
            match child::start(CHILD, &spec) {
                Ok(outcome) => report.add(&spec.name(), &spec.contender, round, outcome),
                Err(error) => {
                    report.failures.push(format!(
                        "{} {} round {round}: {error:#}",
                        spec.name(),
                        spec.contender
                    ));
                }
            }
            if let Some(cores) = neighbours.cores_used() {
                report.add_value(&spec.name(), &spec.contender, round, OTHERS.into(), cores);
            }
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    report
}

fn median(report: &Report, workload: &str, contender: &str, metric: &str) -> Option<f64> {
    report.summary(workload, contender, metric).map(|summary| summary.median)
}

fn print_table(report: &Report) {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["workload", "contender", "metric", "median", "against the loop"]);
    let mut seen = Vec::new();
    for record in &report.records {
        let row = (&record.workload, &record.contender, &record.metric);
        // What the database's own processes take is not the neighbours'.
        if seen.contains(&row) || record.metric == OTHERS {
            continue;
        }
        seen.push(row);
        let Some(value) = median(report, row.0, row.1, row.2) else { continue };
        let loops = median(report, row.0, "one-at-a-time", row.2)
            .filter(|_| row.1 == "laneway" && row.2 == run::RATE);
        let ratio = loops.map(|loops| format!("{:.1}x", value / loops)).unwrap_or_default();
        table.add_row([row.0.clone(), row.1.clone(), row.2.clone(), figure(value), ratio]);
    }
    println!("{table}");
}

fn figure(value: f64) -> String {
    match value.abs() {
        big if big >= 1_000.0 => format!("{value:.0}"),
        middle if middle >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.5}"),
    }
}

/// What the issue of flows asks for.
fn print_targets(report: &Report) {
    let rate = |workload: &str| median(report, workload, "laneway", run::RATE);
    let mut lines = Vec::new();
    for (workload, workers, figures) in ORIGINAL {
        if let Some(rate) = rate(&format!("{workload} batch 100 x{workers}")) {
            lines.push((
                format!("{workload} x{workers} at batch 100 against the original's {}", figures[2]),
                rate / figures[2],
                5.0,
            ));
        }
    }
    if let Some((one, five)) = rate("queues 1").zip(rate("queues 5")) {
        lines.push(("five queues against one".to_owned(), five / one, 0.9));
    }
    if let Some((five, hundred)) = rate("queues 5").zip(rate("queues 100")) {
        // Linear in the queues would be a twentieth.
        lines.push((
            "a hundred queues against a twentieth of five's rate".to_owned(),
            hundred / (five / 20.0),
            1.0,
        ));
    }
    let memory = |queues: usize| median(report, &format!("memory {queues}"), "laneway", run::MEMORY);
    if let Some((one, hundred)) = memory(1).zip(memory(100)) {
        lines.push(("a worker's memory with one queue against a hundred".to_owned(), one / hundred, 0.9));
    }
    for workers in [1, 2] {
        if let Some((fresh, piled)) =
            rate(&format!("one-step batch 100 x{workers}")).zip(rate(&format!("piled batch 100 x{workers}")))
        {
            lines.push((
                format!("with finished tasks piled up against fresh tables, x{workers}"),
                piled / fresh,
                0.9,
            ));
        }
    }
    for (what, value, floor) in lines {
        let verdict = if value >= floor { "PASS" } else { "BELOW" };
        println!("{verdict:<6} {what}: {} (at least {})", figure(value), figure(floor));
    }
}
