//! The soak: a system that is built, churned and taken apart, lap after lap, for as long as asked.
//!
//! ```text
//! cargo run --release -p laneway-events --example churn -- 3600          an hour
//! cargo run --release -p laneway-events --example churn -- 60 4711       a minute, with this seed
//! ```
//!
//! Prints its seed first and a line every ten seconds; on Linux with the memory that is resident, which must not grow.

#[path = "../tests/churn/mod.rs"]
mod churn;

use std::time::{Duration, Instant};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1);
    let seed = arguments.next().and_then(|text| text.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("churn of {seconds} s with seed {seed}");
    let (began, mut next) = (Instant::now(), Duration::from_secs(10));
    let tally = churn::run(seed, Duration::from_secs(seconds), |tally| {
        if began.elapsed() >= next {
            next += Duration::from_secs(10);
            let resident =
                resident_mebibytes().map_or(String::new(), |mebibytes| format!(", {mebibytes:.1} MiB"));
            println!(
                "{:>6.0} s  {} laps, {} events{resident}",
                began.elapsed().as_secs_f64(),
                tally.laps,
                tally.handled
            );
        }
    });
    println!("no deadlock, nothing lost, nothing left over: {tally:?}");
}

/// The memory of this process, where the operating system says so.
fn resident_mebibytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kibibytes: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes / 1_024.0)
}
