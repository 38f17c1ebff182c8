//! Ten seconds of churn; `LANEWAY_SOAK_SECONDS` and `LANEWAY_SOAK_SEED` change that. A failure prints its seed.

mod churn;

use std::time::Duration;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn a_churn_leaves_nothing_undone_and_nothing_behind() {
    let seed = number("LANEWAY_SOAK_SEED").unwrap_or_else(|| fastrand::u64(..));
    let seconds = number("LANEWAY_SOAK_SECONDS").unwrap_or(10);
    eprintln!("churn of {seconds} s with LANEWAY_SOAK_SEED={seed}");
    let tally = churn::run(seed, Duration::from_secs(seconds), |_| ());
    eprintln!("{tally:?}");
    assert!(tally.handled > 0 && tally.returned > 0 && tally.refused > 0 && tally.cancelled > 0, "{tally:?}");
}
