//! `laneway flow watch`: a run as a graph, drawn anew whenever something changes, until it is over.
//!
//! On a terminal the graph stays in its place; elsewhere each look is a block of text, or one JSON object.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use crossterm::cursor::MoveUp;
use crossterm::execute;
use crossterm::terminal::{Clear, ClearType};
use laneway_flow::client::Watch;
use laneway_flow::look;
use serde_json::Value;
use sqlx::PgPool;
use tokio::time::Instant;
use uuid::Uuid;

use super::{failure, graph};
use crate::client::program;
use crate::exit::Failure;
use crate::table::{self, printable};

/// Shows the run until it is over, or once.
pub(super) async fn watch(pool: &PgPool, run: Uuid, json: bool, once: bool) -> Result<(), Failure> {
    let mut changes = Watch::new(pool, run).await.map_err(failure)?;
    let (mut last, mut lines) = (Value::Null, 0);
    loop {
        let look = look::run(pool, run).await.map_err(failure)?;
        let over = matches!(look["status"].as_str(), Some("completed" | "failed" | "cancelled"));
        if look != last {
            lines = show(&look, json, lines)?;
            last = look;
        }
        if once || over {
            return ended(&last, once, json);
        }
        changes.changed(Instant::now() + Duration::from_secs(1)).await.map_err(failure)?;
    }
}

/// Draws a look over the one before, which had so many lines; the answer is how many this one has.
fn show(look: &Value, json: bool, before: u16) -> Result<u16, Failure> {
    if json {
        table::lines(std::slice::from_ref(look))?;
        return Ok(0);
    }
    let mut text = format!("{}\n\n{}\n", heading(look), graph::draw(&look["steps"], graph::width()));
    text.extend(hints(look).into_iter().map(|hint| format!("{hint}\n")));
    let mut out = io::stdout().lock();
    let terminal = io::stdout().is_terminal();
    if terminal && before > 0 {
        execute!(out, MoveUp(before), Clear(ClearType::FromCursorDown))?;
    }
    writeln!(out, "{text}")?;
    out.flush()?;
    let lines = u16::try_from(text.lines().count() + 1).unwrap_or(0);
    Ok(if terminal { lines } else { 0 })
}

/// What holds a run up: somebody who has to complete a step, and what went wrong and is tried again.
fn hints(look: &Value) -> Vec<String> {
    let run = look["runId"].as_str().unwrap_or_default();
    let started = look["steps"].as_array().into_iter().flatten().filter(|step| step["status"] == "started");
    let hint = |step: &Value| {
        let slug = step["slug"].as_str().unwrap_or_default();
        if step["manual"] == true {
            return Some(format!("{slug} waits for you: {} flow complete {run} {slug} JSON", program()));
        }
        let error = printable(step["error"].as_str()?);
        Some(format!("{slug} is tried again after this: {error}"))
    };
    started.filter_map(hint).collect()
}

fn heading(look: &Value) -> String {
    let text = |name: &str| printable(look[name].as_str().unwrap_or_default());
    let key = look["key"].as_str().map(|key| format!(" of {}", printable(key))).unwrap_or_default();
    format!("{}{key}, run {}: {}", text("flow"), text("runId"), text("status"))
}

/// What the exit code and the last words are.
fn ended(look: &Value, once: bool, json: bool) -> Result<(), Failure> {
    match look["status"].as_str() {
        Some(status @ ("failed" | "cancelled")) if !once => {
            let error =
                look["error"].as_str().map(|error| format!(": {}", printable(error))).unwrap_or_default();
            Err(Failure::Refused(format!("the run {status}{error}").replace("run failed", "run has failed")))
        }
        Some("completed") if !json => {
            match look["outputBytes"].as_u64() {
                Some(bytes) if look["output"].is_null() => {
                    let run = look["runId"].as_str().unwrap_or_default();
                    eprintln!("its output has {bytes} bytes: `{} flow output {run}` prints it", program());
                }
                _ => println!("{}", look["output"]),
            }
            Ok(())
        }
        _ => Ok(()),
    }
}
