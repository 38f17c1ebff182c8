//! The tables on the terminal: one per kind of workload, in Markdown.

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{Cell, CellAlignment, Table};

use super::design::Entry;
use super::workload::{Kind, Workload};
use crate::PRODUCT;
use crate::report::{OTHERS, Report};

/// A metric, its title, what one displayed unit is, and decimals.
type Column = (&'static str, &'static str, f64, usize);

const RATE: Column = ("messages_per_second", "events/s", 1.0, 0);
const FAILED: Column = ("lock_failure_ratio", "lock failures %", 0.01, 1);
const SLEPT: Column = ("backoff_ratio", "backoff sleeps %", 0.01, 2);
const CPU: Column = ("cpu_nanoseconds_per_message", "CPU ns/event", 1.0, 0);

fn columns(kind: Kind) -> Vec<Column> {
    match kind {
        Kind::Tiny | Kind::Wait => vec![RATE, FAILED, SLEPT, CPU],
        Kind::HalfLoad => vec![
            ("latency_p99_to_p50_ratio", "p99 / p50", 1.0, 2),
            ("latency_p50_seconds", "p50 µs", 1e-6, 0),
            ("latency_p99_seconds", "p99 µs", 1e-6, 0),
            RATE,
        ],
        Kind::Idle => vec![
            ("idle_cores", "% of a core", 0.01, 2),
            ("latency_wake_up_p50_seconds", "wake-up p50 µs", 1e-6, 1),
            ("latency_wake_up_p99_seconds", "p99 µs", 1e-6, 0),
        ],
    }
}

/// Prints what was measured.
pub(super) fn print(report: &Report, workloads: &[Workload]) {
    for kind in [Kind::Tiny, Kind::Wait, Kind::HalfLoad, Kind::Idle] {
        let of_kind: Vec<_> = workloads.iter().filter(|workload| workload.kind == kind).collect();
        if !of_kind.is_empty() {
            println!("\n{}\n\n{}", title(kind), table(report, kind, &of_kind));
        }
    }
    let others = report.records.iter().filter(|record| record.metric == OTHERS).map(|record| record.value);
    let others: Vec<f64> = others.collect();
    let mean = others.iter().sum::<f64>() / others.len().max(1) as f64;
    if mean > 0.2 {
        println!("warning: others used {mean:.1} cores: trust ratios of 2 and more, nothing finer");
    }
}

fn title(kind: Kind) -> &'static str {
    match kind {
        Kind::Tiny => "tiny-TxD: handlers that do next to nothing, T threads on D dispatchers",
        Kind::Wait => "wait-TxD: handlers that wait 1 ms, T threads on D dispatchers",
        Kind::HalfLoad => {
            "half-load-T: handlers that wait 1 ms, half as many events as T threads can handle; from post to end"
        }
        Kind::Idle => {
            "idle: 16 threads, 100,000 idle processors; then one event at a time, from post to handler"
        }
    }
}

fn table(report: &Report, kind: Kind, workloads: &[&Workload]) -> Table {
    let columns = columns(kind);
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let titles = columns.iter().map(|column| column.1);
    table.set_header(["workload", "contender"].into_iter().chain(titles).chain(["laneway / this"]));
    for workload in workloads {
        for contender in &report.contenders {
            if report.summary(&workload.name, contender, columns[0].0).is_none() {
                continue;
            }
            let mut row = vec![Cell::new(&workload.name), Cell::new(contender)];
            row.extend(columns.iter().map(|(metric, _, unit, decimals)| {
                let summary = report.summary(&workload.name, contender, metric);
                figure(summary.map_or("–".into(), |summary| format!("{:.decimals$}", summary.median / unit)))
            }));
            let ratio = report.ratio(&workload.name, columns[0].0, PRODUCT, contender);
            row.push(figure(ratio.map_or("–".into(), |ratio| format!("{ratio:.2}"))));
            table.add_row(row);
        }
    }
    table
}

fn figure(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// Prints what there is.
pub(super) fn list(designs: &[Entry]) {
    println!("workloads:   tiny, wait, half-load, idle, or one of a grid: tiny-4x2, wait-8x1, half-load-8");
    for (index, entry) in designs.iter().enumerate() {
        let title = if index == 0 { "contenders:" } else { "" };
        println!("{title:<12} {:<12} {}", entry.name, entry.about);
    }
}
