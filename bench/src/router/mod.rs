//! `bench router`: from the embedded queue to a target on loopback, with order per group checked at the target; with `--source`, from a real broker
//! ([`brokers`]).
//!
//! Every run is a fresh process, as in `bench engine`: this program again, with a hidden first argument. What a run does is in [`run`]; here
//! are the options, the rounds, the table, the targets and the JSON lines.

#[cfg(feature = "peers")]
mod plain;
mod run;

#[cfg(feature = "brokers")]
mod brokers;

#[cfg(feature = "activemq")]
mod activemq;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
#[cfg(feature = "sqs")]
mod sqs;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use comfy_table::Table;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::child;
use crate::drive::Outcome;
use crate::machine::Neighbours;
use crate::report::{OTHERS, Report};

/// The hidden first argument of a child.
const CHILD: &str = "__router_child";

/// That of a target.
const TARGET: &str = "__router_target";

/// That of a service that starts on a backlog.
const SERVICE: &str = "__router_service";

/// What can be measured: name, what it is, and the contenders it has.
const WORKLOADS: [(&str, &str, &[&str]); 7] = [
    (
        "publish",
        "many publishers, each waiting until its message is durable",
        &["laneway", "one-commit-each"],
    ),
    ("deliver", "a backlog of ordered groups (Zipf) to an HTTP target on loopback, pool of 256", DELIVERERS),
    ("latency", "open loop: from the intended time of sending to the target, pool of 256", &["laneway"]),
    (
        "backlog",
        "memory of the whole service with queued messages, and how long it takes to start on them",
        &["laneway"],
    ),
    ("extreme", "10,000 groups, concurrency 5,000, 100 ms each, simulated", &["laneway"]),
    (
        "dashboard",
        "deliver by a whole service, without a dashboard, with one that is opened and closed in turns, and with one that is open throughout",
        &["without", "with", "open"],
    ),
    ("table", "document 004's table: 100 messages, 10 workers, 100 ms, by number of groups", &["laneway"]),
];

/// Who takes part in `deliver`: each also on a runtime of one thread, as it would have on one CPU.
#[cfg(not(feature = "peers"))]
const DELIVERERS: &[&str] = &["laneway", "laneway-one-thread"];
/// Beside a client that only posts.
#[cfg(feature = "peers")]
const DELIVERERS: &[&str] = &["laneway", "laneway-one-thread", "plain", "plain-one-thread"];

/// Options of `bench router`.
#[derive(Args, Clone, Debug)]
pub struct RouterArgs {
    /// Workloads: publish, deliver, latency, backlog, extreme, dashboard, table [default: all but backlog]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub workload: Vec<String>,
    /// Contenders, by name [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub contenders: Vec<String>,
    /// Rounds
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub rounds: u32,
    /// Messages of `deliver` and `backlog`, and of `publish` at most
    #[arg(long, value_name = "N")]
    pub messages: Option<u64>,
    /// Messages per second of `latency`, each a run of its own
    #[arg(long, value_delimiter = ',', default_value = "500,2000,10000", value_name = "N")]
    pub rate: Vec<u64>,
    /// Duration of `publish`, `latency` and `extreme`
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    pub seconds: f64,
    /// Slots of the pool in `deliver` and `latency`
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub pool: usize,
    /// From a broker that is started for it (nats, rabbitmq, postgres, sqs, activemq; as far as this program has them), beside a plain consumer of the same client; the workloads are then 1-queue, 8-queues, 100-queues
    #[arg(long, value_name = "KIND")]
    pub source: Option<String>,
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
    pub(crate) workload: String,
    pub(crate) contender: String,
    pub(crate) messages: Option<u64>,
    pub(crate) rate: u64,
    pub(crate) seconds: f64,
    pub(crate) pool: usize,
    pub(crate) source: Option<String>,
    /// Where its queues are, with a source.
    #[cfg(feature = "brokers")]
    place: Option<brokers::Place>,
}

impl Spec {
    /// As tables and JSON lines call it: rates make workloads of their own.
    fn name(&self) -> String {
        match self.workload.as_str() {
            "latency" => format!("latency-{}", self.rate),
            other => other.to_owned(),
        }
    }
}

/// Does the work of a child or of a target, where this process is one. Otherwise returns at once, with nothing.
pub fn serve() -> Option<ExitCode> {
    child::serve_kind(CHILD, |spec| {
        let spec: Spec = serde_json::from_str(spec).context("not a spec")?;
        child::start_watchdog(run::LIMIT);
        Ok(serde_json::to_string(&run::run(&spec)?)?)
    })
    .or_else(|| child::serve_kind(TARGET, |_| run::serve_as_target()))
    .or_else(|| child::serve_kind(SERVICE, run::serve_on_backlog))
}

/// Measures, prints, writes what was asked for, and fails when order, exclusion or counts were broken.
pub fn run(args: &RouterArgs) -> Result<()> {
    if args.list {
        for (name, about, contenders) in WORKLOADS {
            println!("{name:<9} {about} ({})", contenders.join(", "));
        }
        return Ok(());
    }
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    ensure!(args.seconds > 0.0 && args.seconds <= 600.0, "--seconds must be more than 0, at most 600");
    ensure!((1..=65_536).contains(&args.pool), "--pool must be 1 to 65536");
    ensure!(!args.rate.is_empty() && !args.rate.contains(&0), "--rate must be at least 1");
    let runs = args.runs()?;
    let report = measure(args, &runs);
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

impl RouterArgs {
    /// What is to be run in each round.
    fn runs(&self) -> Result<Vec<Spec>> {
        let all = self.all()?;
        for name in &self.workload {
            let known = || all.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            ensure!(
                all.iter().any(|(known, _)| known == name),
                "unknown workload {name:?}: expected one of {}",
                known()
            );
        }
        let chosen = |name: &str| match self.workload.is_empty() {
            true => name != "backlog",
            false => self.workload.iter().any(|wanted| wanted == name),
        };
        let takes_part = |name: &&&str| {
            self.contenders.is_empty() || self.contenders.iter().any(|wanted| wanted == **name)
        };
        let mut runs = Vec::new();
        for (workload, contenders) in all.into_iter().filter(|(name, _)| chosen(name)) {
            // The rates matter to one workload only.
            let rates = if workload == "latency" { self.rate.as_slice() } else { &self.rate[..1] };
            for rate in rates {
                runs.extend(
                    contenders.iter().filter(takes_part).map(|name| self.spec(workload, name, *rate)),
                );
            }
        }
        ensure!(!runs.is_empty(), "no such contender: `--list` names them");
        Ok(runs)
    }

    /// The workloads with their contenders.
    fn all(&self) -> Result<Vec<(&'static str, &'static [&'static str])>> {
        let Some(kind) = &self.source else {
            return Ok(WORKLOADS.map(|(name, _, contenders)| (name, contenders)).to_vec());
        };
        #[cfg(feature = "brokers")]
        {
            let contenders = brokers::Kind::find(kind)?.contenders;
            Ok(brokers::WORKLOADS.map(|(name, _)| (name, contenders)).to_vec())
        }
        #[cfg(not(feature = "brokers"))]
        bail!("no source {kind:?} in this program: build it with `--features {kind}`")
    }

    fn spec(&self, workload: &str, contender: &str, rate: u64) -> Spec {
        Spec {
            workload: workload.into(),
            contender: contender.into(),
            messages: self.messages,
            rate,
            seconds: self.seconds,
            pool: self.pool,
            source: self.source.clone(),
            #[cfg(feature = "brokers")]
            place: None,
        }
    }
}

fn measure(args: &RouterArgs, runs: &[Spec]) -> Report {
    let mut report = Report { bench: "router", ..Report::default() };
    let style =
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}").expect("a valid template");
    let progress = ProgressBar::new(runs.len() as u64 * u64::from(args.rounds)).with_style(style);
    let mut server = Server::default();
    for round in 1..=args.rounds {
        for spec in runs {
            let (workload, contender) = (&*spec.name(), &*spec.contender);
            progress.set_message(format!("round {round}: {workload} {contender}"));
            let neighbours = Neighbours::watch();
            match server.run(spec) {
                Ok(outcome) => report.add(workload, contender, round, outcome),
                Err(error) => {
                    report.failures.push(format!("{workload} {contender} round {round}: {error:#}"))
                }
            }
            if let Some(cores) = neighbours.cores_used() {
                report.add_value(workload, contender, round, OTHERS.into(), cores);
            }
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    report
}

/// The server that the runs share, if they have a source.
#[derive(Default)]
struct Server {
    #[cfg(feature = "brokers")]
    host: Option<Box<dyn brokers::Host>>,
    /// So many runs it has had.
    #[cfg(feature = "brokers")]
    runs: u32,
}

impl Server {
    #[cfg(not(feature = "brokers"))]
    fn run(&mut self, spec: &Spec) -> Result<Outcome> {
        child::start(CHILD, spec)
    }

    /// Fills queues for a child and lets it drain them. After one that has failed a new server is started: there may be something left that keeps it busy.
    #[cfg(feature = "brokers")]
    fn run(&mut self, spec: &Spec) -> Result<Outcome> {
        let Some(kind) = &spec.source else { return child::start(CHILD, spec) };
        let host = match self.host.take() {
            Some(host) => host,
            None => (brokers::Kind::find(kind)?.start)()?,
        };
        self.runs += 1;
        let reader = spec.contender.clone();
        let place = brokers::Place { address: host.address(), run: self.runs, reader };
        host.make_queues(&place, brokers::queues(&spec.workload)?)?;
        let spec = Spec { place: Some(place), ..spec.clone() };
        child::start(CHILD, &Spec { contender: brokers::FILLER.into(), ..spec.clone() })?;
        let outcome = child::start(CHILD, &spec)?;
        self.host = Some(host);
        Ok(outcome)
    }
}

fn print_table(report: &Report) {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["workload", "contender", "metric", "median", "min–max"]);
    let mut seen = Vec::new();
    for record in &report.records {
        let row = (&record.workload, &record.contender, &record.metric);
        if seen.contains(&row) {
            continue;
        }
        seen.push(row);
        if let Some(summary) = report.summary(row.0, row.1, row.2) {
            let range = format!("{}–{}", figure(summary.min), figure(summary.max));
            table.add_row([row.0.clone(), row.1.clone(), row.2.clone(), figure(summary.median), range]);
        }
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

/// What the issue of the router asks for, as ratios where the machine matters.
fn print_targets(report: &Report) {
    fn median_in(report: &Report, workload: &str, contender: &str, metric: &str) -> Option<f64> {
        report.summary(workload, contender, metric).map(|summary| summary.median)
    }
    let median =
        |workload: &str, contender: &str, metric: &str| median_in(report, workload, contender, metric);
    let mut lines = Vec::new();
    let rates = median("publish", "laneway", "messages_per_second").zip(median(
        "publish",
        "one-commit-each",
        "messages_per_second",
    ));
    if let Some((shared, each)) = rates {
        lines.push(("shared commits against one each", shared / each, 20.0));
    }
    for (contender, what) in [
        ("laneway", "delivered per second and core, the target's work aside"),
        ("laneway-one-thread", "the same on a runtime of one thread"),
    ] {
        if let Some(per_core) = median("deliver", contender, "messages_per_core_second") {
            lines.push((what, per_core, 35_000.0));
        }
    }
    if let Some(efficiency) = median("extreme", "laneway", "efficiency") {
        lines.push(("5,000 slots against the ideal", efficiency, 0.9));
    }
    for workload in ["1-queue", "8-queues", "100-queues"] {
        for (threads, what) in [
            ("", "routed against a plain consumer that acknowledges"),
            ("-one-thread", "the same, both on a runtime of one thread"),
        ] {
            let rate = |who: &str| median(workload, &format!("{who}{threads}"), "messages_per_second");
            if let Some((routed, plain)) = rate("laneway").zip(rate("plain")) {
                lines.push((what, routed / plain, 0.8));
            }
        }
    }
    if let Some(ratio) = median("dashboard", "with", "open_over_closed") {
        lines.push(("throughput with the dashboard open against closed, in turns", ratio, 0.98));
    }
    let per_core = median("dashboard", "open", "messages_per_core_second").zip(median(
        "dashboard",
        "without",
        "messages_per_core_second",
    ));
    if let Some((open, without)) = per_core {
        lines.push((
            "messages per core with the dashboard open against a service without one",
            open / without,
            0.98,
        ));
    }
    for groups in [1, 5, 10, 100] {
        if let Some(ratio) = median("table", "laneway", &format!("seconds_of_ideal_{groups}_groups")) {
            lines.push(("document 004's table: ideal over measured", 1.0 / ratio, 0.9));
        }
    }
    for threads in ["", "-one-thread"] {
        let per_core = |who: &str| median("deliver", &format!("{who}{threads}"), "messages_per_core_second");
        if let Some((laneway, plain)) = per_core("laneway").zip(per_core("plain")) {
            println!("       laneway{threads} against plain{threads}, per core: {}", figure(laneway / plain));
        }
    }
    for (what, value, floor) in lines {
        let verdict = if value >= floor { "PASS" } else { "BELOW" };
        println!("{verdict:<6} {what}: {} (at least {})", figure(value), figure(floor));
    }
}
