//! Instructions per message, counted by callgrind, where a clock would say more about the machine than about the contender.
//!
//! [`crate::child`] starts a contender here instead of by itself when the workload is of the kind [`Kind::Instructions`]: twice, with fewer and with more messages, so that what a run costs before its first message
//! falls out of the difference. Callgrind runs one thread at a time, so nothing is counted for contention, and a thread that spins counts for as long as it is let; of what processors wait for,
//! memory above all, it knows nothing. What it says differs from run to run all the same, seen by a fifth and more: which thread has its turn when decides how much of the way is the short one. So it takes several rounds.

use std::env;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::drive::Outcome;
use crate::workload::{Amount, Kind, Workload};

/// What is measured.
pub(crate) const METRIC: &str = "instructions_per_message";

/// The two lengths of a run. The first is long enough that workers know that messages are quick.
const MESSAGES: [u64; 2] = [200_000, 600_000];

/// Callgrind takes some fifty times as long as the processor.
const CAP_SECONDS: f64 = 240.0;

/// Counts. `child` makes the arguments of a child that runs a workload.
pub(crate) fn run(workload: &Workload, child: impl Fn(&Workload) -> Result<[String; 2]>) -> Result<Outcome> {
    let mut counts = [0.0; 2];
    for (count, messages) in counts.iter_mut().zip(MESSAGES) {
        let part = Workload {
            kind: Kind::Throughput,
            amount: Amount::Messages(messages),
            cap_seconds: CAP_SECONDS,
            ..workload.clone()
        };
        let (outcome, instructions) = under_callgrind(&child(&part)?)?;
        if !outcome.violations.is_empty() {
            return Ok(outcome);
        }
        if outcome.capped {
            bail!("not finished after {CAP_SECONDS} s under callgrind");
        }
        *count = instructions;
    }
    let mut outcome = Outcome::default();
    outcome.set(METRIC, (counts[1] - counts[0]) / (MESSAGES[1] - MESSAGES[0]) as f64);
    Ok(outcome)
}

fn under_callgrind(arguments: &[String]) -> Result<(Outcome, f64)> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe().context("cannot find this program")?)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context(
            "cannot start valgrind, which counts instructions; most systems have a package of this name",
        )?;
    let told = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("the child process ended with {} under callgrind:\n{told}", output.status);
    }
    let outcome =
        serde_json::from_slice(&output.stdout).context("the child process did not print its outcome")?;
    Ok((outcome, collected(&told).context("callgrind did not say how many instructions it has counted")?))
}

/// Reads `==123== Collected : 456`.
fn collected(told: &str) -> Option<f64> {
    let line = told.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_in_what_callgrind_tells() {
        let told =
            "==7== Events    : Ir\n==7== Collected : 873325145\n==7== \n==7== I   refs:      873,325,145\n";
        assert_eq!(collected(told), Some(873_325_145.0));
        assert_eq!(collected("==7== Events    : Ir\n"), None);
    }
}
