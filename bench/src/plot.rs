//! The plot: medians as bars, one panel per workload, written as SVG text.
//!
//! The scale is logarithmic, because contenders differ by factors of thousands; a thin line over each bar spans all rounds.
//! Laneway's bars are dark, the others pale.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::PRODUCT;
use crate::report::{Report, Summary};
use crate::table::{Column, RATE, columns};

const WIDTH: f64 = 860.0;
const LABELS: f64 = 180.0;
const FIGURES: f64 = 90.0;
const BAR: f64 = 16.0;
const GAP: f64 = 6.0;
const HEAD: f64 = 44.0;

/// Writes the plot of the engine's workloads.
pub fn write(report: &Report, path: &Path) -> Result<()> {
    let panels = report.workloads.iter();
    let panels = panels.map(|workload| (workload.name.as_str(), columns(workload).swap_remove(0)));
    save(&svg(report, panels), path)
}

/// Writes the plot of workloads that are compared by their rate.
pub(crate) fn write_rates<'a>(
    report: &Report,
    workloads: impl Iterator<Item = &'a str>,
    path: &Path,
) -> Result<()> {
    save(&svg(report, workloads.map(|name| (name, RATE))), path)
}

fn save(svg: &str, path: &Path) -> Result<()> {
    fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

/// One bar: who, and how much.
struct Bar<'a> {
    contender: &'a str,
    summary: Summary,
    capped: bool,
}

/// One panel for each workload, with what is compared there.
fn svg<'a>(report: &Report, workloads: impl Iterator<Item = (&'a str, Column)>) -> String {
    let mut panels = String::new();
    let mut height = 0.0;
    for (workload, column) in workloads {
        let bars = bars(report, workload, column.metric);
        if !bars.is_empty() {
            panel(&mut panels, workload, &column, &bars, height);
            height += HEAD + bars.len() as f64 * (BAR + GAP);
        }
    }
    let height = height + GAP;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{panels}</svg>\n"
    )
}

fn bars<'a>(report: &'a Report, workload: &str, metric: &str) -> Vec<Bar<'a>> {
    let bar = |contender: &'a String| {
        let summary = report.summary(workload, contender, metric)?;
        let capped = report.capped(workload, contender);
        // A logarithm needs something to hold on to.
        (summary.min > 0.0).then_some(Bar { contender, summary, capped })
    };
    report.contenders.iter().filter_map(bar).collect()
}

fn panel(out: &mut String, name: &str, column: &Column, bars: &[Bar<'_>], top: f64) {
    let scale = Scale::over(bars);
    line(
        out,
        format_args!(
            "<text x=\"8\" y=\"{}\" font-weight=\"bold\">{name}: {}</text>",
            top + 26.0,
            column.title
        ),
    );
    for (index, bar) in bars.iter().enumerate() {
        let y = top + HEAD + index as f64 * (BAR + GAP) - GAP;
        draw(out, bar, &scale, column, y);
    }
}

fn draw(out: &mut String, bar: &Bar<'_>, scale: &Scale, column: &Column, y: f64) {
    let fill = if bar.contender == PRODUCT { "#1f4e79" } else { "#a9c4de" };
    let Summary { median, min, max } = bar.summary;
    let (text, middle) = (y + BAR * 0.75, y + BAR / 2.0);
    let end = LABELS + scale.length(max) + 6.0;
    let mark = if bar.capped { " †" } else { "" };
    line(
        out,
        format_args!(
            "<text x=\"{}\" y=\"{text}\" text-anchor=\"end\">{}{mark}</text>",
            LABELS - 8.0,
            bar.contender
        ),
    );
    line(
        out,
        format_args!(
            "<rect x=\"{LABELS}\" y=\"{y}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{fill}\"/>",
            scale.length(median)
        ),
    );
    line(
        out,
        format_args!(
            "<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#333\"/>",
            LABELS + scale.length(min),
            LABELS + scale.length(max)
        ),
    );
    line(out, format_args!("<text x=\"{end:.1}\" y=\"{text}\">{}</text>", column.show(median)));
}

fn line(out: &mut String, arguments: std::fmt::Arguments<'_>) {
    writeln!(out, "{arguments}").expect("writing to a string does not fail");
}

/// A logarithmic scale from the power of ten below the smallest value to the largest.
struct Scale {
    low: f64,
    high: f64,
}

impl Scale {
    fn over(bars: &[Bar<'_>]) -> Self {
        let low = bars.iter().map(|bar| bar.summary.min).fold(f64::INFINITY, f64::min);
        let high = bars.iter().map(|bar| bar.summary.max).fold(0.0, f64::max);
        let low = low.log10().floor();
        Self { low, high: high.log10().max(low + 0.1) }
    }

    fn length(&self, value: f64) -> f64 {
        let room = WIDTH - LABELS - FIGURES;
        // The smallest bar stays visible even when it lies exactly on a power of ten.
        ((value.log10() - self.low) / (self.high - self.low) * room).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Tuning, named};

    #[test]
    fn every_contender_has_a_bar_and_the_text_is_closed() {
        let workloads = named("W1", &Tuning { seconds: 1.0, layout: None, keys: None }).unwrap();
        let mut report =
            Report { workloads, contenders: vec![PRODUCT.into(), "kameo".into()], ..Report::default() };
        report.add_value("W1", PRODUCT, 1, "messages_per_second".into(), 2e7);
        report.add_value("W1", "kameo", 1, "messages_per_second".into(), 5e5);
        let svg = svg(&report, [("W1", RATE)].into_iter());
        assert_eq!(svg.matches("<rect x=").count(), 2);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains(">20.00</text>") && !svg.contains("NaN"));
    }
}
