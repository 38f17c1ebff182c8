//! Every run is a fresh process, so that no contender inherits another's heap, threads or warm caches.
//!
//! The parent starts its own program again as `<program> __child <spec>`; the child runs one contender on one workload and
//! prints one line of JSON. Binaries call [`serve`] first thing in `main`, before they look at their arguments. A child
//! that does not end is ended by a watchdog of its own, so that the parent need not poll.

use std::env;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::contender::Entry;
use crate::count;
use crate::drive::Outcome;
use crate::workload::{Kind, Workload};

/// The hidden first argument of a child of `bench engine`.
const CHILD: &str = "__child";
/// What a child may take beyond its workload's cap: making the plan, starting threads, ending them.
const GRACE: Duration = Duration::from_secs(20);
/// A child that had to be ended says so by this code.
const TIMED_OUT: i32 = 3;

/// What a child is told.
#[derive(Serialize, Deserialize)]
struct Spec {
    contender: String,
    workload: Workload,
}

/// Runs a contender on a workload in a fresh process.
pub fn run(entry: &Entry, workload: &Workload) -> Result<Outcome> {
    let spec = |workload: &Workload| Spec { contender: entry.name.into(), workload: workload.clone() };
    if workload.kind == Kind::Instructions {
        let arguments = |part: &Workload| Ok([CHILD.to_owned(), serde_json::to_string(&spec(part))?]);
        return count::run(workload, arguments);
    }
    start(CHILD, &spec(workload))
}

/// Starts this program again, as a child of this kind, and reads what it prints.
pub(crate) fn start(kind: &str, spec: &impl Serialize) -> Result<Outcome> {
    let output = Command::new(env::current_exe().context("cannot find this program")?)
        .args([kind, &serde_json::to_string(spec)?])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start a child process")?;
    if !output.status.success() {
        bail!("the child process ended with {}", output.status);
    }
    serde_json::from_slice(&output.stdout).context("the child process did not print its outcome")
}

/// Does the work of a child, where this process is one. Otherwise returns at once, with nothing.
pub fn serve(contenders: &[Entry]) -> Option<ExitCode> {
    serve_kind(CHILD, |spec| run_here(spec, contenders))
}

/// The same for children of one kind.
pub(crate) fn serve_kind(kind: &str, run: impl FnOnce(&str) -> Result<String>) -> Option<ExitCode> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(kind) {
        return None;
    }
    let code = match arguments.next().context("no spec").and_then(|spec| run(&spec)) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    };
    Some(code)
}

fn run_here(spec: &str, contenders: &[Entry]) -> Result<String> {
    let Spec { contender, workload } = serde_json::from_str(spec).context("not a spec")?;
    let entry = contenders.iter().find(|entry| entry.name == contender).context("unknown contender")?;
    start_watchdog(Duration::from_secs_f64(workload.cap_seconds) + GRACE);
    Ok(serde_json::to_string(&entry.run(&workload)?)?)
}

pub(crate) fn start_watchdog(limit: Duration) {
    thread::spawn(move || {
        thread::sleep(limit);
        eprintln!("not finished after {limit:?}");
        std::process::exit(TIMED_OUT);
    });
}
