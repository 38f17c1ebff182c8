//! `bench engine`: interleaved rounds of all contenders, then the table, the plot, the targets and the JSON lines.
//!
//! In each round every workload is run by every contender in turn, each in a fresh process, and each round starts with
//! another contender: what disturbs the machine for a minute disturbs all of them.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::EngineArgs;
use crate::contender::Entry;
use crate::machine::Neighbours;
use crate::report::{OTHERS, Report};
use crate::workload::{NAMES, Workload};
use crate::{child, plot, table, targets};

/// Measures, prints, writes what was asked for, and fails when a contender broke its promise.
pub fn run(args: &EngineArgs, contenders: &[Entry]) -> Result<Report> {
    if args.list {
        list(contenders);
        return Ok(Report::default());
    }
    let report = measure(args, contenders)?;
    publish(args, &report)?;
    match report.failures.is_empty() {
        true => Ok(report),
        false => bail!("{} run(s) failed:\n  {}", report.failures.len(), report.failures.join("\n  ")),
    }
}

fn measure(args: &EngineArgs, contenders: &[Entry]) -> Result<Report> {
    let workloads = args.workloads()?;
    let contenders = args.choose(contenders)?;
    let mut report = Report {
        workloads: workloads.clone(),
        contenders: contenders.iter().map(|entry| entry.name.to_string()).collect(),
        notes: left_out(&workloads, &contenders),
        ..Report::default()
    };
    let progress = progress_bar(&workloads, &contenders, args.rounds);
    for round in 1..=args.rounds {
        for workload in &workloads {
            for entry in rotated(&contenders, round).filter(|entry| entry.unsupported(workload).is_none()) {
                progress.set_message(format!("round {round}: {} {}", workload.name, entry.name));
                run_once(&mut report, workload, entry, round);
                progress.inc(1);
            }
        }
    }
    progress.finish_and_clear();
    Ok(report)
}

fn run_once(report: &mut Report, workload: &Workload, entry: &Entry, round: u32) {
    let neighbours = Neighbours::watch();
    match child::run(entry, workload) {
        Ok(outcome) => report.add(&workload.name, entry.name, round, outcome),
        Err(error) => {
            report.failures.push(format!("{} {} round {round}: {error:#}", workload.name, entry.name));
        }
    }
    if let Some(cores) = neighbours.cores_used() {
        report.add_value(&workload.name, entry.name, round, OTHERS.into(), cores);
    }
}

/// The contenders, beginning with another one in each round.
fn rotated(contenders: &[Entry], round: u32) -> impl Iterator<Item = &Entry> {
    let count = contenders.len();
    (0..count).map(move |index| &contenders[(index + round as usize - 1) % count])
}

/// Who cannot run what, and why; one note per contender and reason.
fn left_out(workloads: &[Workload], contenders: &[Entry]) -> Vec<String> {
    let mut notes = Vec::new();
    for entry in contenders {
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for workload in workloads {
            if let Some(reason) = entry.unsupported(workload) {
                reasons.entry(reason).or_default().push(&workload.name);
            }
        }
        let note = |(reason, names): (&str, Vec<&str>)| {
            format!("{} is left out of {}: {reason}", entry.name, names.join(", "))
        };
        notes.extend(reasons.into_iter().map(note));
    }
    notes
}

fn progress_bar(workloads: &[Workload], contenders: &[Entry], rounds: u32) -> ProgressBar {
    let takes_part =
        |workload: &Workload| contenders.iter().filter(|entry| entry.unsupported(workload).is_none()).count();
    let runs = workloads.iter().map(takes_part).sum::<usize>() as u64 * u64::from(rounds);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} (about {eta} left) {msg}")
        .expect("the template is valid");
    ProgressBar::new(runs).with_style(style)
}

fn publish(args: &EngineArgs, report: &Report) -> Result<()> {
    table::print(report);
    if args.targets {
        targets::print(report);
    }
    if let Some(path) = &args.json {
        report.write_json(path)?;
    }
    if let Some(path) = &args.plot {
        plot::write(report, path)?;
    }
    Ok(())
}

fn list(contenders: &[Entry]) {
    println!("workloads:   {}", NAMES.join(", "));
    for (index, entry) in contenders.iter().enumerate() {
        let title = if index == 0 { "contenders:" } else { "" };
        println!("{title:<12} {:<22} {}", entry.name, entry.about);
    }
}
