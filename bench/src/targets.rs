//! The targets: what Laneway should reach beside its peers, in the same run.
//!
//! Each goal compares two medians and has a floor and a stretch; a few figures have a ceiling instead. `--targets` prints those for which there are figures; no
//! test asserts them, because they hold on a quiet machine only. One target of the design has no row: that of W5 with timers of the engine's own, which it does not have.

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{Cell, Color, Table};

use crate::PRODUCT;
use crate::count;
use crate::message::Message;
use crate::report::Report;

/// The peers of the table of rates, in its order.
const PEERS: [&str; 7] = [
    "crossbeam-hash",
    "disruptor",
    "busy-flag",
    "lock-free-dispatcher",
    "tokio-lanes",
    "kameo",
    "group-scan",
];

/// Floor and stretch of the rate, as multiples of each peer's.
const RATES: [(&str, [(f64, f64); 7]); 4] = [
    ("W1", [(1.2, 2.0), (0.9, 1.5), (6.0, 10.0), (5.0, 9.0), (18.0, 30.0), (30.0, 60.0), (300.0, 1000.0)]),
    ("W2", [(1.0, 1.8), (0.9, 1.4), (6.0, 10.0), (5.0, 8.0), (20.0, 35.0), (15.0, 30.0), (300.0, 800.0)]),
    ("W3", [(1.2, 2.0), (0.8, 1.4), (6.0, 12.0), (8.0, 14.0), (25.0, 40.0), (25.0, 50.0), (300.0, 1000.0)]),
    ("W4", [(1.2, 2.0), (0.9, 1.4), (10.0, 16.0), (10.0, 18.0), (22.0, 35.0), (50.0, 90.0), (300.0, 1000.0)]),
];

const RATE: &str = "messages_per_second";

/// The product with workers that spin before they sleep.
const SPINNING: &str = "laneway-spin";

/// What a message of W1 may cost, the harness included; see [`crate::count`].
const INSTRUCTIONS_MAX: f64 = 250.0;

/// One median: of a metric, of a contender, in a workload.
#[derive(Clone, Copy, Debug)]
struct Figure {
    workload: &'static str,
    contender: &'static str,
    metric: &'static str,
}

impl Figure {
    fn of(self, report: &Report) -> Option<f64> {
        Some(report.summary(self.workload, self.contender, self.metric)?.median)
    }
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Better {
    Higher,
    Lower,
}

/// A ratio that should be reached.
#[derive(Clone, Copy, Debug)]
struct Goal {
    text: &'static str,
    ours: Figure,
    theirs: Figure,
    floor: f64,
    stretch: Option<f64>,
    better: Better,
}

/// How a ratio compares with its goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Stretch,
    Pass,
    Below,
}

impl Verdict {
    fn cell(self) -> Cell {
        let (word, color) = match self {
            Verdict::Stretch => ("PASS, stretch", Color::Green),
            Verdict::Pass => ("PASS", Color::Green),
            Verdict::Below => ("BELOW", Color::Red),
        };
        Cell::new(word).fg(color)
    }
}

impl Goal {
    fn measured(&self, report: &Report) -> Option<f64> {
        let base = self.theirs.of(report)?;
        (base > 0.0).then_some(self.ours.of(report)? / base)
    }

    fn verdict(&self, ratio: f64) -> Verdict {
        let reaches = |limit: f64| match self.better {
            Better::Higher => ratio >= limit,
            Better::Lower => ratio <= limit,
        };
        match self.stretch {
            Some(stretch) if reaches(stretch) => Verdict::Stretch,
            _ if reaches(self.floor) => Verdict::Pass,
            _ => Verdict::Below,
        }
    }
}

/// The table of rates, cell by cell.
fn rate_goals() -> impl Iterator<Item = Goal> {
    RATES.iter().flat_map(|(workload, cells)| {
        PEERS.iter().zip(cells).map(move |(peer, (floor, stretch))| Goal {
            text: "rate",
            ours: Figure { workload, contender: PRODUCT, metric: RATE },
            theirs: Figure { workload, contender: peer, metric: RATE },
            floor: *floor,
            stretch: Some(*stretch),
            better: Better::Higher,
        })
    })
}

/// The targets that stand beside the table.
fn other_goals() -> Vec<Goal> {
    let figure = |workload, contender, metric| Figure { workload, contender, metric };
    let goal =
        |text, ours, theirs, floor, stretch, better| Goal { text, ours, theirs, floor, stretch, better };
    let rate = |text, ours: (&'static str, &'static str), theirs: (&'static str, &'static str), floor| {
        goal(
            text,
            figure(ours.0, ours.1, RATE),
            figure(theirs.0, theirs.1, RATE),
            floor,
            None,
            Better::Higher,
        )
    };
    let lower = |text, workload, metric, peer, limit| {
        goal(
            text,
            figure(workload, PRODUCT, metric),
            figure(workload, peer, metric),
            limit,
            None,
            Better::Lower,
        )
    };
    let batch = ("W1-batch64", PRODUCT);
    vec![
        rate("batches of 64", batch, ("W1-batch64", "crossbeam-hash"), 2.5),
        rate("batches of 64, stretch", batch, ("W1-batch64", "disruptor-single"), 0.8),
        rate("four producers, against one", ("W1-producers4", PRODUCT), ("W1", PRODUCT), 0.8),
        rate("four producers", ("W1-producers4", PRODUCT), ("W1-producers4", "crossbeam-hash"), 1.0),
        rate("hot key, against uniform", ("W3", PRODUCT), ("W1", PRODUCT), 0.9),
        lower("CPU per message", "W1", "cpu_nanoseconds_per_message", "crossbeam-hash", 1.0),
        efficiency("W5-1000"),
        efficiency("W5-5000"),
        lower("p50 from submission", "W6", "latency_from_submission_p50_seconds", "kameo", 0.8),
        lower("p99 from submission", "W6", "latency_from_submission_p99_seconds", "kameo", 0.5),
    ]
}

fn efficiency(workload: &'static str) -> Goal {
    let figure = |contender| Figure { workload, contender, metric: "efficiency" };
    Goal {
        text: "efficiency, against timers without keys",
        ours: figure(PRODUCT),
        theirs: figure("tokio-timers"),
        floor: 0.98,
        stretch: None,
        better: Better::Higher,
    }
}

fn goals() -> impl Iterator<Item = Goal> {
    rate_goals().chain(other_goals())
}

/// Whether a contender appears in a goal.
pub fn mention(contender: &str) -> bool {
    [SPINNING, HARNESS].contains(&contender)
        || goals().any(|goal| contender == goal.ours.contender || contender == goal.theirs.contender)
}

/// Prints every goal for which there are figures.
pub fn print(report: &Report) {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header(["workload", "target", "against", "floor", "stretch", "measured", "verdict"]);
    for goal in goals() {
        if let Some(ratio) = goal.measured(report) {
            table.add_row(row(&goal, ratio));
        }
    }
    table.add_rows(ceiling_rows(report));
    println!("\nTargets: laneway as a multiple of a peer, medians of the same run\n\n{table}");
}

/// A figure that is no ratio, and should be at most so much.
struct Ceiling {
    text: &'static str,
    figure: Figure,
    /// What is taken off first: what it would be without the contender.
    over: Option<Figure>,
    /// In which unit, and how many of those a unit of the metric is.
    unit: (&'static str, f64),
    most: f64,
}

/// What has no threads and no queues, so that its memory is that of the harness.
const HARNESS: &str = "inline";

/// Bytes of a key with one message that is outstanding, beside the message.
const BYTES_PER_KEY_MAX: f64 = 100.0;

/// Bytes that are none: less than half of one, because memory is counted in pages.
const NO_BYTES: f64 = 0.5;

fn ceilings() -> [Ceiling; 6] {
    let ceiling = |text, workload, metric, unit, most| {
        let figure = Figure { workload, contender: PRODUCT, metric };
        Ceiling { text, figure, over: None, unit, most }
    };
    let of_spinning = ceiling(
        "p50 from submission, spinning",
        "W6",
        "latency_from_submission_p50_seconds",
        (" µs", 1e6),
        1.0,
    );
    let of_memory = |text, metric, scale, most| ceiling(text, "memory", metric, (" B", scale), most);
    let peak = |contender| Figure { workload: "W4", contender, metric: "resident_bytes_peak" };
    let per_key = BYTES_PER_KEY_MAX + size_of::<Message>() as f64;
    [
        Ceiling { figure: Figure { contender: SPINNING, ..of_spinning.figure }, ..of_spinning },
        ceiling("instructions per message", "W1", count::METRIC, ("", 1.0), INSTRUCTIONS_MAX),
        Ceiling {
            text: "memory over the harness, at the peak",
            figure: peak(PRODUCT),
            over: Some(peak(HARNESS)),
            unit: (" MB", 1e-6),
            most: 20.0,
        },
        of_memory("per active key, with its message", "resident_bytes_per_key", 1.0, per_key),
        of_memory("retained per idle key", "resident_bytes_retained_per_key", 1.0, NO_BYTES),
        of_memory("growth per key ever seen", "resident_growth_bytes_per_million_keys", 1e-6, NO_BYTES),
    ]
}

fn ceiling_rows(report: &Report) -> impl Iterator<Item = Vec<Cell>> {
    ceilings().into_iter().filter_map(|Ceiling { text, figure, over, unit: (unit, scale), most }| {
        let base = over.map_or(Some(0.0), |over| over.of(report))?;
        let measured = (figure.of(report)? - base) * scale;
        let verdict = if measured <= most { Verdict::Pass } else { Verdict::Below };
        let against = over.map_or("–", |over| over.contender);
        let fixed = [figure.workload, text, against, &format!("≤ {most}{unit}"), "–"].map(Cell::new);
        Some(fixed.into_iter().chain([Cell::new(short(measured)), verdict.cell()]).collect())
    })
}

/// Small figures with their fractions.
fn short(value: f64) -> String {
    if value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

fn row(goal: &Goal, ratio: f64) -> Vec<Cell> {
    let sign = if goal.better == Better::Higher { "≥" } else { "≤" };
    let against = if goal.theirs.contender == PRODUCT { goal.theirs.workload } else { goal.theirs.contender };
    vec![
        Cell::new(goal.ours.workload),
        Cell::new(goal.text),
        Cell::new(against),
        Cell::new(format!("{sign} {}", goal.floor)),
        Cell::new(goal.stretch.map_or("–".into(), |stretch| format!("{sign} {stretch}"))),
        Cell::new(format!("{ratio:.2}")),
        goal.verdict(ratio).cell(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(ours: f64, theirs: f64) -> Report {
        let mut report = Report::default();
        report.add_value("W1", PRODUCT, 1, RATE.into(), ours);
        report.add_value("W1", "crossbeam-hash", 1, RATE.into(), theirs);
        report
    }

    fn verdict(ours: f64, theirs: f64) -> Verdict {
        let goal = rate_goals().next().unwrap();
        goal.verdict(goal.measured(&report(ours, theirs)).unwrap())
    }

    #[test]
    fn floor_and_stretch_are_told_apart() {
        assert_eq!(verdict(11.0, 10.0), Verdict::Below);
        assert_eq!(verdict(12.0, 10.0), Verdict::Pass);
        assert_eq!(verdict(20.0, 10.0), Verdict::Stretch);
    }

    #[test]
    fn lower_is_better_where_it_is() {
        let goal = other_goals().into_iter().find(|goal| goal.text == "p50 from submission").unwrap();
        assert_eq!(goal.verdict(0.7), Verdict::Pass);
        assert_eq!(goal.verdict(0.9), Verdict::Below);
    }

    #[test]
    fn the_number_of_instructions_has_a_row_where_it_was_counted() {
        let mut report = Report::default();
        assert_eq!(ceiling_rows(&report).count(), 0);
        report.add_value("W1", PRODUCT, 1, count::METRIC.into(), 251.0);
        let rows: Vec<_> = ceiling_rows(&report).collect();
        assert_eq!(rows.len(), 1);
        let row = &rows[0];
        assert_eq!((row[5].content(), row[6].content()), ("251".to_owned(), "BELOW".to_owned()));
    }

    #[test]
    fn memory_has_rows_where_it_was_weighed() {
        let mut report = Report::default();
        let mut add = |workload, contender, metric: &str, value| {
            report.add_value(workload, contender, 1, metric.into(), value);
        };
        add("W4", PRODUCT, "resident_bytes_peak", 34.0e6);
        add("memory", PRODUCT, "resident_bytes_per_key", 124.5);
        add("memory", PRODUCT, "resident_bytes_retained_per_key", -3.0);
        add("memory", PRODUCT, "resident_growth_bytes_per_million_keys", 600_000.0);
        let shown = |report: &Report| -> Vec<_> {
            ceiling_rows(report).map(|row| [1, 3, 5, 6].map(|column| row[column].content())).collect()
        };
        let of_memory = [
            ["per active key, with its message", "≤ 124 B", "124", "BELOW"],
            ["retained per idle key", "≤ 0.5 B", "-3.00", "PASS"],
            ["growth per key ever seen", "≤ 0.5 B", "0.60", "BELOW"],
        ];
        assert_eq!(shown(&report), of_memory, "without the harness nobody knows what is over it");
        report.add_value("W4", HARNESS, 1, "resident_bytes_peak".into(), 15.0e6);
        let peak = &shown(&report)[0];
        assert_eq!(*peak, ["memory over the harness, at the peak", "≤ 20 MB", "19.00", "PASS"]);
    }

    #[test]
    fn goals_without_figures_are_silent() {
        let with_figures = rate_goals().filter(|goal| goal.measured(&report(1.0, 1.0)).is_some());
        assert_eq!(with_figures.count(), 1);
    }
}
