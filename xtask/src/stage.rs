//! Stages: named pieces of work that run one after the other, timed, until one fails.
//!
//! The headings and the closing table go to standard error, beside the children's own progress, so that the output of a
//! long run can be searched for `==` to see where it stands.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// One piece of a longer run.
pub(crate) struct Stage {
    /// The word by which a failure is reported.
    pub(crate) name: &'static str,
    /// What the stage shows, for the reader of the log.
    pub(crate) about: &'static str,
    /// The work itself.
    pub(crate) run: fn() -> Result<()>,
}

/// Runs the stages in order and stops at the first that fails, because the later ones build on the earlier.
///
/// The time of each is reported in both cases. The last line of the log is the verdict: here when all pass, and from the
/// caller, who prints the error, when one fails.
pub(crate) fn run_all(stages: &[Stage]) -> Result<()> {
    let mut times = Vec::with_capacity(stages.len());
    let verdict = stages.iter().enumerate().try_for_each(|(index, stage)| {
        eprintln!("\n== {} of {}: {} - {}", index + 1, stages.len(), stage.name, stage.about);
        let started = Instant::now();
        let result = (stage.run)();
        times.push((stage.name, started.elapsed()));
        result.with_context(|| format!("stage {} of {} failed: {}", index + 1, stages.len(), stage.name))
    });
    eprintln!("\n{}", time_table(&times));
    verdict?;
    eprintln!("all {} stages passed in {:.1} s", stages.len(), total(&times).as_secs_f64());
    Ok(())
}

fn time_table(times: &[(&str, Duration)]) -> String {
    let row = |(name, time): &(&str, Duration)| format!("{name:<12} {:>8.1} s\n", time.as_secs_f64());
    times.iter().map(row).collect()
}

fn total(times: &[(&str, Duration)]) -> Duration {
    times.iter().map(|(_, time)| *time).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSES: Stage = Stage { name: "passes", about: "does nothing", run: || Ok(()) };
    const FAILS: Stage = Stage { name: "fails", about: "always", run: || anyhow::bail!("the reason") };
    const UNREACHED: Stage =
        Stage { name: "unreached", about: "never runs", run: || panic!("ran after a failure") };

    #[test]
    fn stages_that_pass_are_a_success() {
        run_all(&[PASSES, PASSES]).expect("both pass");
    }

    #[test]
    fn a_failure_names_its_stage_and_ends_the_run() {
        let error = run_all(&[PASSES, FAILS, UNREACHED]).expect_err("the second fails");
        assert_eq!(format!("{error:#}"), "stage 2 of 3 failed: fails: the reason");
    }
}
