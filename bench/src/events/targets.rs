//! The bars: what the events floor should reach, as ratios of one run. `--targets` prints them; no test asserts them, because they hold on a quiet machine only.

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{Cell, Color, Table};

use crate::PRODUCT;
use crate::report::Report;

/// What has to be run for all of them.
pub(super) const WORKLOADS: [&str; 12] = [
    "wait-1x1",
    "wait-8x1",
    "wait-16x1",
    "tiny-2x1",
    "wait-4x1",
    "tiny-4x1",
    "tiny-8x1",
    "tiny-4x2",
    "tiny-8x2",
    "tiny-16x4",
    "half-load-8",
    "idle",
];

/// One bar.
struct Bar {
    text: &'static str,
    bar: f64,
    /// Whether more is better.
    at_least: bool,
    value: fn(&Report) -> Option<f64>,
}

const RATE: &str = "messages_per_second";

fn ours(report: &Report, workload: &str, metric: &str) -> Option<f64> {
    Some(report.summary(workload, PRODUCT, metric)?.median)
}

/// How much of so many threads is used, by the throughput of one.
fn efficiency(report: &Report, workload: &str, threads: f64) -> Option<f64> {
    Some(ours(report, workload, RATE)? / ours(report, "wait-1x1", RATE)? / threads)
}

const BARS: [Bar; 13] = [
    Bar {
        text: "1 ms handlers: efficiency of 8 threads",
        bar: 0.95,
        at_least: true,
        value: |report| efficiency(report, "wait-8x1", 8.0),
    },
    Bar {
        text: "1 ms handlers: efficiency of 16 threads",
        bar: 0.90,
        at_least: true,
        value: |report| efficiency(report, "wait-16x1", 16.0),
    },
    Bar {
        text: "1 ms handlers: 16 threads on one dispatcher, against the document's own design",
        bar: 10.0,
        at_least: true,
        value: |report| report.ratio("wait-16x1", RATE, PRODUCT, "locked"),
    },
    Bar {
        text: "tiny handlers: 2 threads, against the lock-free variant",
        bar: 0.95,
        at_least: true,
        value: |report| report.ratio("tiny-2x1", RATE, PRODUCT, "lock-free"),
    },
    Bar {
        text: "1 ms handlers: lock failures at 4 threads on one dispatcher",
        bar: 0.10,
        at_least: false,
        value: |report| ours(report, "wait-4x1", "lock_failure_ratio"),
    },
    Bar {
        text: "tiny handlers: lock failures at 4 threads on one dispatcher",
        bar: 0.10,
        at_least: false,
        value: |report| ours(report, "tiny-4x1", "lock_failure_ratio"),
    },
    Bar {
        text: "1 ms handlers: lock failures at 8 threads on one dispatcher",
        bar: 0.30,
        at_least: false,
        value: |report| ours(report, "wait-8x1", "lock_failure_ratio"),
    },
    Bar {
        text: "tiny handlers: lock failures at 8 threads on one dispatcher",
        bar: 0.30,
        at_least: false,
        value: |report| ours(report, "tiny-8x1", "lock_failure_ratio"),
    },
    Bar {
        text: "tiny handlers: backoff sleeps by polls, 2 threads per dispatcher",
        bar: 0.01,
        at_least: false,
        value: |report| ours(report, "tiny-4x2", "backoff_ratio"),
    },
    Bar {
        text: "tiny handlers: backoff sleeps by polls, 4 threads per dispatcher",
        bar: 0.01,
        at_least: false,
        value: |report| ours(report, "tiny-16x4", "backoff_ratio"),
    },
    Bar {
        text: "1 ms handlers at half load: p99 by median",
        bar: 2.0,
        at_least: false,
        value: |report| ours(report, "half-load-8", "latency_p99_to_p50_ratio"),
    },
    Bar {
        text: "16 threads, 100,000 idle processors: cores",
        bar: 0.01,
        at_least: false,
        value: |report| ours(report, "idle", "idle_cores"),
    },
    Bar {
        text: "an event for an idle processor: median µs to its handler",
        bar: 100.0,
        at_least: false,
        value: |report| Some(ours(report, "idle", "latency_wake_up_p50_seconds")? * 1e6),
    },
];

/// Prints every bar for which there are figures.
pub(super) fn print(report: &Report) {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header(["target", "bar", "measured", "verdict"]);
    for bar in &BARS {
        let Some(value) = (bar.value)(report) else { continue };
        let (sign, reached) =
            if bar.at_least { ("≥", value >= bar.bar) } else { ("≤", value <= bar.bar) };
        let (verdict, color) = if reached { ("PASS", Color::Green) } else { ("BELOW", Color::Red) };
        table.add_row([
            Cell::new(bar.text),
            Cell::new(format!("{sign} {}", bar.bar)),
            Cell::new(format!("{value:.4}")),
            Cell::new(verdict).fg(color),
        ]);
    }
    println!("\nTargets, medians of the same run\n\n{table}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn efficiency_is_that_of_the_document() {
        let mut report = Report::default();
        report.add_value("wait-1x1", PRODUCT, 1, RATE.into(), 1_000.0);
        report.add_value("wait-8x1", PRODUCT, 1, RATE.into(), 7_600.0);
        assert_eq!((BARS[0].value)(&report), Some(0.95));
        assert_eq!((BARS[1].value)(&report), None, "no figures, no verdict");
    }
}
