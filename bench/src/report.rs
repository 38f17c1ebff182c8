//! What was measured, and the figures drawn from it: medians, spreads, ratios.
//!
//! [`crate::engine`] fills a [`Report`] run by run; the table, the plot, the targets and the JSON lines only read it.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::drive::Outcome;
use crate::workload::Workload;

/// One value: a line of the JSON file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// Which benchmark: `engine`, `events` or `router`.
    pub bench: &'static str,
    /// The workload's name.
    pub workload: String,
    /// The contender's name.
    pub contender: String,
    /// Which round, from 1.
    pub round: u32,
    /// What was measured, with its unit.
    pub metric: String,
    /// The value.
    pub value: f64,
}

/// Everything that one command measured.
#[derive(Clone, Debug)]
pub struct Report {
    /// Which benchmark it was.
    pub bench: &'static str,
    /// The workloads, in the order they were asked for.
    pub workloads: Vec<Workload>,
    /// The contenders' names, in the order they were asked for.
    pub contenders: Vec<String>,
    /// All values.
    pub records: Vec<Record>,
    /// What a reader should know: who was left out, and why.
    pub notes: Vec<String>,
    /// Runs that broke order, exclusion or counts, or did not end. They have no records.
    pub failures: Vec<String>,
}

impl Default for Report {
    /// An empty one, of the engine.
    fn default() -> Self {
        Self {
            bench: "engine",
            workloads: Vec::new(),
            contenders: Vec::new(),
            records: Vec::new(),
            notes: Vec::new(),
            failures: Vec::new(),
        }
    }
}

/// The middle of several rounds, and their range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Summary {
    /// Summarises values; nothing for none.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median =
            if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Some(Self { median, min, max })
    }
}

impl Report {
    /// Takes in what one run yielded.
    pub fn add(&mut self, workload: &str, contender: &str, round: u32, outcome: Outcome) {
        if !outcome.violations.is_empty() {
            let what = outcome.violations.join("; ");
            self.failures.push(format!("{workload} {contender} round {round}: {what}"));
            return;
        }
        // Only runs that were cut off say so: a line per ordinary run would tell nothing.
        let capped = outcome.capped.then(|| (CAPPED.to_string(), 1.0));
        for (metric, value) in outcome.metrics.into_iter().chain(capped) {
            self.add_value(workload, contender, round, metric, value);
        }
    }

    /// Takes in one value.
    pub fn add_value(&mut self, workload: &str, contender: &str, round: u32, metric: String, value: f64) {
        self.records.push(Record {
            bench: self.bench,
            workload: workload.into(),
            contender: contender.into(),
            round,
            metric,
            value,
        });
    }

    /// Median and range of a metric over all rounds.
    pub fn summary(&self, workload: &str, contender: &str, metric: &str) -> Option<Summary> {
        let matching = |record: &&Record| {
            record.workload == workload && record.contender == contender && record.metric == metric
        };
        Summary::of(self.records.iter().filter(matching).map(|record| record.value).collect())
    }

    /// The median of one contender as a multiple of another's.
    pub fn ratio(&self, workload: &str, metric: &str, contender: &str, other: &str) -> Option<f64> {
        let value = self.summary(workload, contender, metric)?.median;
        let base = self.summary(workload, other, metric)?.median;
        (base != 0.0).then(|| value / base)
    }

    /// Whether a round of this contender was cut off.
    pub fn capped(&self, workload: &str, contender: &str) -> bool {
        self.summary(workload, contender, CAPPED).is_some()
    }

    /// Writes all values, one JSON object per line.
    pub fn write_json(&self, path: &Path) -> Result<()> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut lines = BufWriter::new(file);
        for record in &self.records {
            serde_json::to_writer(&mut lines, record)?;
            lines.write_all(b"\n")?;
        }
        Ok(lines.flush()?)
    }
}

/// The metric that marks a run that was cut off.
const CAPPED: &str = "capped";
/// The metric that says how many cores other processes used during a run.
pub const OTHERS: &str = "others_cores";

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(value: f64) -> Outcome {
        Outcome { metrics: [("messages_per_second".to_string(), value)].into(), ..Outcome::default() }
    }

    #[test]
    fn a_record_is_a_json_line_of_the_agreed_form() {
        let mut report = Report::default();
        report.add("W1", "laneway", 1, outcome(21_000_000.0));
        assert_eq!(
            serde_json::to_string(&report.records[0]).unwrap(),
            r#"{"bench":"engine","workload":"W1","contender":"laneway","round":1,"metric":"messages_per_second","value":21000000.0}"#
        );
    }

    #[test]
    fn ratios_are_ratios_of_medians() {
        let mut report = Report::default();
        for (round, (ours, theirs)) in [(30.0, 10.0), (20.0, 40.0), (90.0, 5.0)].into_iter().enumerate() {
            report.add("W1", "laneway", round as u32 + 1, outcome(ours));
            report.add("W1", "spsc", round as u32 + 1, outcome(theirs));
        }
        assert_eq!(report.ratio("W1", "messages_per_second", "laneway", "spsc"), Some(3.0));
        assert_eq!(report.ratio("W1", "messages_per_second", "laneway", "kameo"), None);
        let summary = report.summary("W1", "laneway", "messages_per_second").unwrap();
        assert_eq!(summary, Summary { median: 30.0, min: 20.0, max: 90.0 });
    }

    #[test]
    fn an_even_number_of_rounds_has_its_median_between_two() {
        assert_eq!(Summary::of(vec![4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Summary::of(vec![]), None);
    }

    #[test]
    fn a_violation_takes_the_figures_away() {
        let mut report = Report::default();
        let broken = Outcome { violations: vec!["key 1: message 2 came before 1".into()], ..outcome(1.0) };
        report.add("W1", "laneway", 2, broken);
        assert!(report.records.is_empty());
        assert_eq!(report.failures, ["W1 laneway round 2: key 1: message 2 came before 1"]);
    }

    #[test]
    fn a_capped_run_is_marked() {
        let mut report = Report::default();
        report.add("W1", "group-scan", 1, Outcome { capped: true, ..outcome(1.0) });
        report.add("W1", "laneway", 1, outcome(1.0));
        assert!(report.capped("W1", "group-scan") && !report.capped("W1", "laneway"));
    }
}
