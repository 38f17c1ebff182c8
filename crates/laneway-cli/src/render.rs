//! What `laneway demo` shows: aligned lines for people, or one JSON object per line for programs.
//!
//! The demonstration hands over what happened; this file alone knows what it looks like. Both looks carry the same facts.
//! Field names of the JSON lines end in their unit and are part of the interface.

use std::io::{self, Write};

use serde::Serialize;

/// A message that has been handled.
#[derive(Debug, Serialize)]
pub(crate) struct Handled {
    pub(crate) lane: u32,
    /// The place of the message in its lane, counted from 1.
    pub(crate) sequence: u32,
    pub(crate) worker: usize,
    /// Since the demonstration began.
    pub(crate) at_seconds: f64,
    /// From acceptance to the beginning of the work.
    pub(crate) waited_seconds: f64,
    pub(crate) worked_seconds: f64,
}

/// The end of a demonstration: the engine's account, and what the demonstration checked itself.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) accepted: u64,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) dropped: u64,
    pub(crate) outstanding: u64,
    pub(crate) lanes: u32,
    /// Messages that were handled out of their place.
    pub(crate) out_of_order: u64,
    /// Messages that were handled while another one of their lane was.
    pub(crate) overlapping: u64,
    /// When the slow lane, which is lane 1, handled its last message.
    pub(crate) slow_lane_seconds: f64,
    /// When the last of the other lanes did.
    pub(crate) other_lanes_seconds: f64,
    pub(crate) interrupted: bool,
}

/// A line of output, tagged by what it tells.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Line<'a> {
    Handled(&'a Handled),
    Summary(&'a Summary),
}

/// Writes a demonstration to `out` in one of the two looks.
pub(crate) struct Renderer<W> {
    out: W,
    json: bool,
}

impl<W: Write> Renderer<W> {
    pub(crate) fn new(out: W, json: bool) -> Self {
        Self { out, json }
    }

    /// The heading of the columns, which programs do not need.
    pub(crate) fn heading(&mut self) -> io::Result<()> {
        match self.json {
            true => Ok(()),
            false => self.row(["time", "lane", "message", "worker", "waited", "worked"]),
        }
    }

    pub(crate) fn handled(&mut self, handled: &Handled) -> io::Result<()> {
        match self.json {
            true => self.line(&Line::Handled(handled)),
            false => self.row([
                &milliseconds(handled.at_seconds),
                &lane_name(handled.lane),
                &handled.sequence.to_string(),
                &handled.worker.to_string(),
                &milliseconds(handled.waited_seconds),
                &milliseconds(handled.worked_seconds),
            ]),
        }
    }

    pub(crate) fn summary(&mut self, summary: &Summary) -> io::Result<()> {
        match self.json {
            true => self.line(&Line::Summary(summary)),
            false => write!(self.out, "\n{}", summary_text(summary)),
        }
    }

    fn row(&mut self, [time, lane, message, worker, waited, worked]: [&str; 6]) -> io::Result<()> {
        writeln!(self.out, "{time:>10}  {lane:<8}  {message:>7}  {worker:>6}  {waited:>10}  {worked:>10}")
    }

    fn line(&mut self, line: &Line<'_>) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, line)?;
        writeln!(self.out)
    }
}

fn summary_text(summary: &Summary) -> String {
    let mut text = format!("account  {}\norder    {}\n", account_text(summary), order_text(summary));
    if summary.lanes > 1 && !summary.interrupted {
        let (slow, others) =
            (milliseconds(summary.slow_lane_seconds), milliseconds(summary.other_lanes_seconds));
        text.push_str(&format!("speed    the slow lane was done after {slow}, all others after {others}\n"));
    }
    text
}

fn account_text(summary: &Summary) -> String {
    let Summary { accepted, done, failed, dropped, outstanding, .. } = summary;
    format!(
        "{accepted} accepted = {done} done + {failed} failed + {dropped} dropped + {outstanding} outstanding"
    )
}

fn order_text(summary: &Summary) -> String {
    match (summary.out_of_order, summary.overlapping) {
        (0, 0) => format!("{} lanes, each strictly in order, one message at a time", summary.lanes),
        (out_of_order, overlapping) => {
            format!("VIOLATED: {out_of_order} out of order, {overlapping} overlapping")
        }
    }
}

fn lane_name(lane: u32) -> String {
    match lane {
        1 => "1 (slow)".to_owned(),
        _ => lane.to_string(),
    }
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLED: Handled = Handled {
        lane: 1,
        sequence: 2,
        worker: 3,
        at_seconds: 0.5,
        waited_seconds: 0.25,
        worked_seconds: 0.125,
    };

    const SUMMARY: Summary = Summary {
        accepted: 9,
        done: 7,
        failed: 0,
        dropped: 2,
        outstanding: 0,
        lanes: 3,
        out_of_order: 0,
        overlapping: 0,
        slow_lane_seconds: 2.0,
        other_lanes_seconds: 0.5,
        interrupted: false,
    };

    fn rendered(json: bool) -> String {
        let mut renderer = Renderer::new(Vec::new(), json);
        renderer.heading().expect("memory can be written");
        renderer.handled(&HANDLED).expect("memory can be written");
        renderer.summary(&SUMMARY).expect("memory can be written");
        String::from_utf8(renderer.out).expect("UTF-8")
    }

    #[test]
    fn programs_get_one_tagged_object_per_line() {
        let text = rendered(true);
        let events: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(events.len(), 2);
        assert_eq!((&events[0]["event"], &events[0]["waited_seconds"]), (&"handled".into(), &0.25.into()));
        assert_eq!((&events[1]["event"], &events[1]["dropped"]), (&"summary".into(), &2.into()));
    }

    #[test]
    fn people_get_aligned_columns_and_sentences() {
        let text = rendered(false);
        let widths: Vec<_> = text.lines().take(2).map(str::len).collect();
        assert_eq!(widths[0], widths[1], "{text}");
        assert!(text.contains("9 accepted = 7 done + 0 failed + 2 dropped + 0 outstanding"), "{text}");
        assert!(text.contains("the slow lane was done after 2000.0 ms, all others after 500.0 ms"), "{text}");
    }

    #[test]
    fn a_violation_is_not_told_as_order() {
        assert!(order_text(&Summary { overlapping: 1, ..SUMMARY }).starts_with("VIOLATED"));
    }
}
