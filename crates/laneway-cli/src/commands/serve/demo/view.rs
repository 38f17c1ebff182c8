//! What the demonstration shows: a table that is drawn anew on a terminal, a line per look elsewhere, an object per look for programs.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use serde::Serialize;

use super::load::KINDS;
use super::witness::Standing;
use crate::client::program;
use crate::table::{self, count, grouped};

/// What was seen at one look.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Look {
    pub(super) at_seconds: f64,
    pub(super) published: u64,
    pub(super) delivered: u64,
    pub(super) delivered_per_second: f64,
    /// Messages that are with their targets, each of another group.
    pub(super) at_once: u64,
    pub(super) waiting: u64,
    /// Groups that wait for another attempt.
    pub(super) in_retry: u64,
    pub(super) dead_letters: u64,
    /// Groups and calls that the targets have seen.
    pub(super) groups: u64,
    pub(super) calls: u64,
    /// What does not hold, if anything.
    pub(super) violation: Option<String>,
    #[serde(skip)]
    pub(super) kinds: Vec<KindLook>,
}

/// How one kind of groups stands.
pub(super) struct KindLook {
    pub(super) standing: Standing,
    pub(super) now: String,
}

/// The end of a demonstration.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Summary {
    pub(super) at_seconds: f64,
    pub(super) published: u64,
    pub(super) delivered: u64,
    pub(super) dead_letters: u64,
    pub(super) left_in_queue: u64,
    pub(super) groups: u64,
    pub(super) most_at_once: u64,
    pub(super) slow_delivered: u64,
    pub(super) violation: Option<String>,
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Line<'a> {
    Look(&'a Look),
    Summary(&'a Summary),
}

/// Where looks go.
pub(super) struct View {
    style: Style,
    /// What has to be typed to reach the service, if it is not where it usually is.
    reach: String,
    /// Lines that are on the terminal and will be drawn over.
    drawn: usize,
    began: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Style {
    Json,
    Lines,
    Table,
}

impl View {
    pub(super) fn new(json: bool, reach: String) -> View {
        let style = match (json, io::stdout().is_terminal()) {
            (true, _) => Style::Json,
            (false, true) => Style::Table,
            (false, false) => Style::Lines,
        };
        View { style, reach, drawn: 0, began: false }
    }

    /// How often it is worth looking.
    pub(super) fn pace(&self) -> Duration {
        match self.style {
            Style::Table => Duration::from_millis(250),
            Style::Json | Style::Lines => Duration::from_secs(1),
        }
    }

    pub(super) fn show(&mut self, look: &Look) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self.style {
            Style::Json => json(&mut out, &Line::Look(look))?,
            Style::Lines => {
                if !self.began {
                    writeln!(out, "{HEADING}")?;
                }
                writeln!(out, "{}", line(look))?;
            }
            Style::Table => {
                let text = screen(look, &self.reach);
                let lines = fitted(&text);
                if self.drawn > 0 {
                    // Back to the first line, and away with what was there.
                    write!(out, "\x1b[{}A\x1b[J", self.drawn)?;
                }
                lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
                self.drawn = lines.len();
            }
        }
        self.began = true;
        out.flush()
    }

    pub(super) fn summary(&self, summary: &Summary) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self.style {
            Style::Json => json(&mut out, &Line::Summary(summary)),
            Style::Lines | Style::Table => write!(out, "\n{}", summary_text(summary)),
        }
    }
}

fn json(out: &mut impl Write, line: &Line<'_>) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    writeln!(out)
}

const HEADING: &str = "  time  delivered  per second  at once  waiting  in retry  dead letters  order";

fn line(look: &Look) -> String {
    format!(
        "{:>4.0} s  {:>9}  {:>10.0}  {:>7}  {:>7}  {:>8}  {:>12}  {}",
        look.at_seconds,
        grouped(look.delivered),
        look.delivered_per_second,
        look.at_once,
        look.waiting,
        look.in_retry,
        look.dead_letters,
        order(look)
    )
}

fn order(look: &Look) -> String {
    match &look.violation {
        None => format!("{} groups, each in order", look.groups),
        Some(violation) => format!("VIOLATED: {violation}"),
    }
}

fn screen(look: &Look, reach: &str) -> String {
    let rows = KINDS.iter().zip(&look.kinds).map(|(kind, KindLook { standing, now })| {
        vec![
            kind.title(),
            kind.pool.to_owned(),
            kind.story.to_owned(),
            grouped(standing.delivered),
            standing.waiting.to_string(),
            now.clone(),
        ]
    });
    let headings = ["message groups", "pool", "their target", "delivered", "waiting", "now"];
    let right = [false, false, false, true, true, false];
    let table = table::aligned(&headings, rows.collect(), &right);
    let program = program();
    format!(
        "
{table}

{:>4.0} s  {} delivered, {:.0} per second, {} at once; {}
order   {}

In another terminal:
  {program} top{reach}                      pools, rates, the deepest groups
  {program} explain invoice-stuck{reach}    why does this group wait?
  {program} skip invoice-stuck{reach}       give its next message up
  {program} --help                   everything else
Ctrl-C drains and ends it.",
        look.at_seconds,
        count(look.delivered, "message"),
        look.delivered_per_second,
        count(look.at_once, "group"),
        count(look.dead_letters, "dead letter"),
        match &look.violation {
            None => format!(
                "{} seen by the targets in {} calls: each in order, never two of a group at once",
                count(look.groups, "group"),
                grouped(look.calls)
            ),
            Some(violation) => format!("VIOLATED: {violation}"),
        },
    )
}

/// Lines that fit the terminal: one that wraps would be two to draw over.
fn fitted(text: &str) -> Vec<String> {
    let (width, height) = crossterm::terminal::size().unwrap_or((80, 24));
    let cut = |line: &str| line.chars().take(usize::from(width.max(20)) - 1).collect();
    text.lines().map(cut).take(usize::from(height.max(2)) - 1).collect()
}

fn summary_text(summary: &Summary) -> String {
    let Summary { published, delivered, dead_letters, left_in_queue, .. } = summary;
    let order = match &summary.violation {
        None => format!("{} groups, each strictly in order, never two of a group at once", summary.groups),
        Some(violation) => format!("VIOLATED: {violation}"),
    };
    let numbers = [published, delivered, dead_letters, left_in_queue].map(|number| grouped(*number));
    let [published, delivered, dead_letters, left] = numbers;
    format!(
        "account  {published} published = {delivered} delivered + {dead_letters} dead letters + {left} left in the queue
order    {order}
speed    up to {} groups at once; while the slow one got {} messages, the others got {}\n",
        summary.most_at_once,
        grouped(summary.slow_delivered),
        grouped(summary.delivered - summary.slow_delivered.min(summary.delivered)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(violation: Option<String>) -> Look {
        Look {
            at_seconds: 3.0,
            published: 1500,
            delivered: 1234,
            delivered_per_second: 411.3,
            at_once: 21,
            waiting: 250,
            in_retry: 2,
            dead_letters: 16,
            groups: 62,
            calls: 1300,
            violation,
            kinds: KINDS
                .iter()
                .map(|_| KindLook { standing: Standing::default(), now: "running".into() })
                .collect(),
        }
    }

    #[test]
    fn lines_stand_under_their_heading() {
        let line = line(&look(None));
        assert!(line.ends_with("62 groups, each in order"), "{line}");
        let end = |text: &str, word: &str| text.find(word).map(|place| place + word.len());
        assert_eq!(end(HEADING, "delivered"), end(&line, "1,234"));
        assert_eq!(end(HEADING, "dead letters"), end(&line, " 16"));
    }

    #[test]
    fn the_screen_names_every_kind_and_what_to_type() {
        let screen = screen(&look(None), "");
        for part in ["order-01 to 40", "customer-slow", "invoice-stuck", "explain", "each in order"] {
            assert!(screen.contains(part), "{part} is missing in\n{screen}");
        }
    }

    #[test]
    fn a_violation_is_not_told_as_order() {
        assert!(line(&look(Some("two at once".into()))).ends_with("VIOLATED: two at once"));
        assert!(screen(&look(Some("two at once".into())), "").contains("VIOLATED: two at once"));
    }
}
