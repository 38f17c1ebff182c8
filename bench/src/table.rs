//! The table on the terminal: one per workload, medians first, and Laneway as a multiple of everyone else.
//!
//! Tables are valid Markdown, so that a run can be pasted where it is discussed.

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{Cell, CellAlignment, Table};

use crate::PRODUCT;
use crate::count;
use crate::report::{OTHERS, Report, Summary};
use crate::workload::{Kind, Workload};

/// Others that used more of the machine than this make a run worth repeating.
const OTHERS_TOLERATED_CORES: f64 = 0.2;

/// One column of figures.
pub(crate) struct Column {
    pub(crate) metric: &'static str,
    pub(crate) title: &'static str,
    /// What one displayed unit is, in the metric's unit.
    unit: f64,
    decimals: usize,
}

impl Column {
    const fn new(metric: &'static str, title: &'static str, unit: f64, decimals: usize) -> Self {
        Self { metric, title, unit, decimals }
    }

    pub(crate) fn show(&self, value: f64) -> String {
        // A slow contender must not read as zero.
        let shown = value / self.unit;
        let decimals = if shown != 0.0 && shown.abs() < 0.1 { self.decimals.max(3) } else { self.decimals };
        format!("{shown:.decimals$}")
    }

    fn show_range(&self, summary: Summary) -> String {
        format!("{}–{}", self.show(summary.min), self.show(summary.max))
    }
}

pub(crate) const RATE: Column = Column::new("messages_per_second", "Mmsg/s", 1e6, 2);
const CPU: Column = Column::new("cpu_nanoseconds_per_message", "CPU ns/msg", 1.0, 0);
const EFFICIENCY: Column = Column::new("efficiency", "efficiency", 1.0, 3);
const OTHERS_EFFICIENCY: Column = Column::new("others_efficiency", "of the others", 1.0, 3);
const PEAK: Column = Column::new("resident_bytes_peak", "peak MB", 1e6, 0);

/// The columns of a workload; the first is the one that is compared.
pub(crate) fn columns(workload: &Workload) -> Vec<Column> {
    match workload.kind {
        Kind::Throughput => vec![RATE, CPU, PEAK],
        Kind::Waiting if workload.has_hot_family() => vec![EFFICIENCY, OTHERS_EFFICIENCY, CPU, PEAK],
        Kind::Waiting => vec![EFFICIENCY, CPU, PEAK],
        Kind::Latency => vec![
            Column::new("latency_from_submission_p50_seconds", "p50 µs", 1e-6, 1),
            Column::new("latency_from_submission_p99_seconds", "p99 µs", 1e-6, 0),
            Column::new("latency_from_submission_p999_seconds", "p99.9 µs", 1e-6, 0),
            Column::new("latency_p50_seconds", "p50 intended", 1e-6, 1),
            Column::new("latency_p99_seconds", "p99 intended", 1e-6, 0),
            Column::new("latency_p999_seconds", "p99.9 intended", 1e-6, 0),
            CPU,
        ],
        Kind::Memory => vec![
            Column::new("resident_bytes_per_key", "B per key", 1.0, 0),
            Column::new("resident_bytes_per_message", "B per message", 1.0, 0),
            Column::new("resident_bytes_retained_per_key", "B retained per key", 1.0, 0),
            Column::new("resident_growth_bytes_per_million_keys", "kB growth per 1M keys", 1e3, 0),
            PEAK,
        ],
        Kind::Instructions => vec![Column::new(count::METRIC, "instructions/msg", 1.0, 0)],
    }
}

/// Prints one table per workload, then what a reader should know.
pub fn print(report: &Report) {
    for workload in &report.workloads {
        println!("\n{}\n", title(workload));
        println!("{}", table(report, workload));
        // What others do changes no number of instructions.
        if workload.kind != Kind::Instructions
            && let Some(warning) = neighbours(report, workload)
        {
            println!("{warning}");
        }
    }
    for note in &report.notes {
        println!("note: {note}");
    }
}

fn title(workload: &Workload) -> String {
    let what = match workload.kind {
        Kind::Throughput => "higher is better",
        Kind::Waiting if workload.has_hot_family() => {
            "efficiency: ideal time by actual time of the hot family, one message after the other, and of the others"
        }
        Kind::Waiting => "efficiency: ideal time by actual time, 1 is perfect",
        Kind::Latency => "from submission and from the intended time; lower is better",
        Kind::Memory => "lower is better",
        Kind::Instructions => "the harness included; lower is better",
    };
    let (workers, producers) = (count(workload.workers, "worker"), count(workload.producers, "producer"));
    format!("{}: {workers}, {producers}; {what}", workload.name)
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

fn table(report: &Report, workload: &Workload) -> Table {
    let columns = columns(workload);
    let (first, rest) = columns.split_first().expect("every kind has columns");
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let fixed = ["contender", first.title, "min–max", "laneway / this"];
    table.set_header(fixed.into_iter().chain(rest.iter().map(|column| column.title)));
    for contender in &report.contenders {
        let Some(summary) = report.summary(&workload.name, contender, first.metric) else { continue };
        let mark = if report.capped(&workload.name, contender) { " †" } else { "" };
        let ratio = report.ratio(&workload.name, first.metric, PRODUCT, contender);
        let mut row = vec![
            Cell::new(format!("{contender}{mark}")),
            figure(first.show(summary.median)),
            figure(first.show_range(summary)),
            figure(ratio.map_or("–".into(), show_ratio)),
        ];
        row.extend(rest.iter().map(|column| {
            let summary = report.summary(&workload.name, contender, column.metric);
            figure(summary.map_or("–".into(), |summary| column.show(summary.median)))
        }));
        table.add_row(row);
    }
    table
}

fn show_ratio(ratio: f64) -> String {
    if ratio < 0.1 { format!("{ratio:.4}") } else { format!("{ratio:.2}") }
}

fn figure(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// A word about other processes, where they took so much that figures should not be trusted.
fn neighbours(report: &Report, workload: &Workload) -> Option<String> {
    let used: Vec<f64> = report
        .records
        .iter()
        .filter(|record| record.workload == workload.name && record.metric == OTHERS)
        .map(|record| record.value)
        .collect();
    let mean = used.iter().sum::<f64>() / used.len().max(1) as f64;
    let worst = used.iter().copied().fold(0.0, f64::max);
    (mean > OTHERS_TOLERATED_CORES).then(|| {
        format!("warning: others used {mean:.1} cores ({worst:.1} at worst): trust ratios of 2 and more, nothing finer")
    })
}
