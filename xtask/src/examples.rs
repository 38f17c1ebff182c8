//! `cargo xtask examples`: runs every example of the engine and of the floors above it to its end.
//!
//! Cargo builds them and says where it put them; each then runs alone, with its output passed through, and must end with
//! success before its deadline. An example that hangs is stopped and reported like one that fails.

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::process::{cargo, output, root};

/// Examples are for reading and finish within seconds; a loaded machine gets ten times as long.
const DEADLINE: Duration = Duration::from_secs(60);

/// How often a running example is looked at; the standard library has no wait with a deadline.
const GLANCE: Duration = Duration::from_millis(20);

/// Of the whole workspace, in the tests' profile and with their features: anything less is another choice of features, for which cargo would
/// build half of the dependencies again, for minutes and gigabytes.
const BUILD: &str =
    "build --profile test --workspace --examples --all-features --message-format json-render-diagnostics";

struct Example {
    name: String,
    executable: PathBuf,
}

pub(crate) fn run() -> Result<()> {
    let examples = examples_among(&output(&mut cargo(BUILD))?)?;
    for example in &examples {
        eprintln!("\n-- example {}", example.name);
        let mut child = Command::new(&example.executable)
            .current_dir(root())
            .spawn()
            .with_context(|| format!("cannot start example {}", example.name))?;
        match wait(&mut child, DEADLINE)? {
            Some(status) if status.success() => {}
            Some(status) => bail!("example {}: {status}", example.name),
            None => bail!("example {} did not end within {DEADLINE:?}", example.name),
        }
    }
    eprintln!("\n{} examples ran to their end", examples.len());
    Ok(())
}

/// The part of cargo's messages that matters here: what was built, and where it lies.
#[derive(Deserialize)]
struct Artifact {
    target: Target,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// Picks the examples out of cargo's messages, one JSON object per line, sorted by name.
fn examples_among(messages: &[u8]) -> Result<Vec<Example>> {
    let text = std::str::from_utf8(messages).context("cargo's messages are not UTF-8")?;
    // Messages of other kinds have no target or no executable, and are passed over.
    let artifacts = text.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    let mut examples: Vec<_> = artifacts
        .filter(|artifact| artifact.target.kind.iter().any(|kind| kind == "example"))
        .filter_map(|artifact| Some(Example { name: artifact.target.name, executable: artifact.executable? }))
        .collect();
    examples.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(examples)
}

/// Waits for the child until the deadline; stops it and returns nothing when it is still running then.
fn wait(child: &mut Child, deadline: Duration) -> Result<Option<ExitStatus>> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(GLANCE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_picked_out_of_what_cargo_says() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"laneway","kind":["lib"]},"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"hello","kind":["example"]},"executable":"e/hello"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let examples = examples_among(messages.as_bytes()).expect("well-formed");
        let names: Vec<_> = examples.iter().map(|example| example.name.as_str()).collect();
        assert_eq!(names, ["hello"]);
        assert_eq!(examples[0].executable, PathBuf::from("e/hello"));
    }

    #[test]
    fn a_child_past_its_deadline_is_stopped() {
        // A compiler that reads its program from standard input waits for ever for one that never comes.
        let mut child = Command::new("rustc")
            .arg("-")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("the compiler that built this is there");
        assert!(wait(&mut child, Duration::from_millis(50)).expect("can be stopped").is_none());
    }
}
