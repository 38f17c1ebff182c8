//! `laneway top`: a live view of a running service: pools, rates, the deepest groups, sources, warnings.
//!
//! On a terminal the screen is drawn anew at each look, and `q` or ctrl-c ends it. Elsewhere each look is a block of text, or one JSON object, until
//! ctrl-c or as many as were asked for. Rates are the difference of two looks; the first has none.

use std::io::{self, IsTerminal, Read, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use clap::value_parser;
use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::execute;
use crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode, size,
};
use serde_json::Value;

use super::lanes;
use super::pools::millis;
use crate::client::{Client, Service};
use crate::exit::Failure;
use crate::table::{self, aligned, count, field, grouped, printable};

/// How many warnings are shown.
const WARNINGS: usize = 3;

/// What `laneway top` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway top                                    until q or ctrl-c
  laneway top --interval-millis 250
  laneway top | cat                              one block of text per look
  laneway top --count 1 --json | jq .pools       one look, for a program")]
pub(crate) struct Options {
    /// How often to look
    #[arg(long, value_name = "MS", default_value_t = 1_000, value_parser = value_parser!(u64).range(100..=3_600_000))]
    interval_millis: u64,
    /// How many looks; without an end, if not given
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    count: Option<u64>,
    #[command(flatten)]
    service: Service,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let client = options.service.connect()?;
    // The first look before the screen changes: an error is then an ordinary one.
    let first = Look::take(&client, None)?;
    if !options.service.json && io::stdout().is_terminal() && io::stdin().is_terminal() {
        return on_a_terminal(options, &client, first);
    }
    let mut look = first;
    for number in 1.. {
        match options.service.json {
            true => table::lines(std::slice::from_ref(&look.stats))?,
            false => writeln!(io::stdout().lock(), "{}\n", look.text())?,
        }
        if options.count == Some(number) {
            break;
        }
        thread::sleep(Duration::from_millis(options.interval_millis));
        look = Look::take(&client, Some(&look))?;
    }
    Ok(())
}

fn on_a_terminal(options: &Options, client: &Client, first: Look) -> Result<(), Failure> {
    let screen = Screen::enter()?;
    let keys = keys();
    let mut look = first;
    for number in 1.. {
        screen.draw(&look.text())?;
        if options.count == Some(number) {
            return Ok(());
        }
        match keys.recv_timeout(Duration::from_millis(options.interval_millis)) {
            Err(RecvTimeoutError::Timeout) => {}
            // Nobody is at the keyboard any more, or somebody wants to leave.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        look = Look::take(client, Some(&look))?;
    }
    Ok(())
}

/// Told when a key is pressed that ends the view. In raw mode ctrl-c is a key.
fn keys() -> mpsc::Receiver<()> {
    const CTRL_C: u8 = 3;
    let (told, keys) = mpsc::sync_channel(1);
    thread::spawn(move || {
        for key in io::stdin().lock().bytes() {
            if matches!(key, Ok(b'q' | b'Q' | CTRL_C) | Err(_)) {
                break;
            }
        }
        let _ = told.send(());
    });
    keys
}

/// The terminal while it is ours; it is given back as it was.
struct Screen;

impl Screen {
    fn enter() -> Result<Screen, Failure> {
        enable_raw_mode()?;
        let screen = Screen;
        execute!(io::stdout(), EnterAlternateScreen, Hide)?;
        Ok(screen)
    }

    fn draw(&self, text: &str) -> io::Result<()> {
        let (width, height) = size().unwrap_or((80, 24));
        let mut out = io::stdout().lock();
        execute!(out, MoveTo(0, 0))?;
        for line in text.lines().take(usize::from(height).saturating_sub(1)) {
            let line: String = line.chars().take(usize::from(width)).collect();
            write!(out, "{line}")?;
            execute!(out, Clear(ClearType::UntilNewLine))?;
            write!(out, "\r\n")?;
        }
        execute!(out, Clear(ClearType::FromCursorDown))?;
        write!(out, "q quits")?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // There is nobody left to tell when the terminal is gone.
        let _ = execute!(io::stdout(), Show, LeaveAlternateScreen);
        let _ = disable_raw_mode();
    }
}

/// What the service says at one moment.
struct Look {
    at: Instant,
    stats: Value,
    /// The newest ones.
    warnings: Value,
    /// Delivered since the look before, per second, by pool; none at the first.
    rates: Option<Vec<(String, f64)>>,
}

impl Look {
    fn take(client: &Client, before: Option<&Look>) -> Result<Look, Failure> {
        let stats = client.get("/api/stats")?;
        let at = Instant::now();
        let warnings = match stats["warnings"].as_u64() {
            Some(1..) => client.get(&format!("/api/warnings?most={WARNINGS}"))?,
            _ => Value::Null,
        };
        let rates = before.map(|before| rates(&before.stats, &stats, (at - before.at).as_secs_f64()));
        Ok(Look { at, stats, warnings, rates })
    }

    fn rate(&self, pool: &str) -> String {
        let rate = self.rates.iter().flatten().find(|(code, _)| code == pool).map(|(_, rate)| *rate);
        rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"))
    }

    fn text(&self) -> String {
        let mut text = format!("laneway  {}\n\n{}\n", self.title(), self.pools());
        for (heading, part) in [("deepest groups", self.groups()), ("sources", self.sources())] {
            text.push_str(&format!("\n{heading}\n{part}\n"));
        }
        if let Some(number @ 1..) = self.stats["warnings"].as_u64() {
            text.push_str(&format!("\n{}, the newest first\n", count(number, "warning")));
            for warning in rows(&self.warnings) {
                text.push_str(&format!("{}  {}\n", field(warning, "at"), printable(&field(warning, "text"))));
            }
        }
        text
    }

    fn title(&self) -> String {
        let sum = |name: &str| rows(&self.stats["pools"]).iter().filter_map(|pool| pool[name].as_u64()).sum();
        let rate = match &self.rates {
            Some(rates) => format!("{:.0} per second", rates.iter().map(|(_, rate)| rate).sum::<f64>()),
            None => "measuring".to_owned(),
        };
        format!("{rate}, {} in flight, {} waiting", grouped(sum("inFlight")), grouped(sum("waiting")))
    }

    fn pools(&self) -> String {
        let headings = [
            "pool",
            "state",
            "slots",
            "in flight",
            "waiting",
            "groups",
            "per second",
            "delivered",
            "dead letters",
            "p50",
            "p99",
        ];
        let cells = rows(&self.stats["pools"]).iter().map(|pool| {
            let text = |name: &str| field(pool, name);
            vec![
                text("code"),
                text("state"),
                text("concurrency"),
                text("inFlight"),
                text("waiting"),
                text("groups"),
                self.rate(pool["code"].as_str().unwrap_or_default()),
                text("counts.succeeded"),
                text("counts.failed"),
                millis(pool, "latency.p50Millis"),
                millis(pool, "latency.p99Millis"),
            ]
        });
        let right = [false, false, true, true, true, true, true, true, true, true, true];
        aligned(&headings, cells.collect(), &right)
    }

    fn groups(&self) -> String {
        match rows(&self.stats["deepestGroups"]) {
            [] => "none has messages".to_owned(),
            groups => table::text(&groups[..groups.len().min(10)], &lanes::COLUMNS),
        }
    }

    fn sources(&self) -> String {
        let source = |source: &Value| {
            let state = match source["healthy"].as_bool() {
                Some(false) => format!(
                    "IN TROUBLE since {}: {}",
                    field(source, "since"),
                    printable(source["trouble"].as_str().unwrap_or("unknown"))
                ),
                _ => field(source, "state"),
            };
            vec![
                field(source, "name"),
                field(source, "kind"),
                field(source, "waiting"),
                field(source, "leased"),
                field(source, "held"),
                field(source, "dead"),
                field(source, "quarantined"),
                state,
            ]
        };
        let headings =
            ["source", "kind", "waiting", "leased", "held here", "dead letters", "quarantined", "state"];
        let right = [false, false, true, true, true, true, true, false];
        aligned(&headings, rows(&self.stats["sources"]).iter().map(source).collect(), &right)
    }
}

fn rows(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn rates(before: &Value, after: &Value, seconds: f64) -> Vec<(String, f64)> {
    let delivered = |stats: &Value, code: &str| {
        let pool = rows(&stats["pools"]).iter().find(|pool| pool["code"] == code)?;
        pool["counts"]["succeeded"].as_u64()
    };
    let rate = |pool: &Value| {
        let code = pool["code"].as_str()?;
        // A pool that was removed and added again begins at zero.
        let more = delivered(after, code)?.saturating_sub(delivered(before, code).unwrap_or(0));
        Some((code.to_owned(), more as f64 / seconds.max(0.001)))
    };
    rows(&after["pools"]).iter().filter_map(rate).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stats(succeeded: u64) -> Value {
        json!({
            "pools": [{"code": "orders", "state": "open", "concurrency": 20, "inFlight": 3, "waiting": 1200, "groups": 7,
                       "counts": {"succeeded": succeeded, "failed": 1}, "latency": {"p50Millis": 1.25, "p99Millis": 80.0}}],
            "deepestGroups": [{"pool": "orders", "group": "order-7", "depth": 900}],
            "sources": [{"name": "default", "kind": "embedded", "state": "unavailable", "since": "2025", "healthy": false,
                         "trouble": "disk full", "waiting": 5}],
            "warnings": 2,
        })
    }

    #[test]
    fn rates_are_differences_and_never_negative() {
        assert_eq!(rates(&stats(100), &stats(150), 2.0), [("orders".to_owned(), 25.0)]);
        assert_eq!(rates(&stats(150), &stats(100), 1.0), [("orders".to_owned(), 0.0)]);
    }

    #[test]
    fn a_look_shows_pools_groups_sources_and_warnings() {
        let look = Look {
            at: Instant::now(),
            stats: stats(150),
            warnings: json!([{"text": "no pool \"x\"", "at": "2026"}]),
            rates: Some(vec![("orders".to_owned(), 25.0)]),
        };
        let text = look.text();
        for part in [
            "25 per second, 3 in flight, 1,200 waiting",
            "1.2 ms",
            "order-7",
            "900",
            "IN TROUBLE since 2025: disk full",
            "2026  no pool \"x\"",
            "2 warnings",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }
}
