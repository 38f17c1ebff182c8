//! `cargo xtask fuzz`: turns random bytes into operations on the engine and into input of the router, and compares with a naive model, for a while.
//!
//! They are ordinary tests with a longer clock, so that no special compiler is needed; a failure prints the seed that
//! caused it.

use anyhow::Result;

use crate::process::{cargo, run as run_child};

/// What `cargo xtask fuzz` can be told.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long to try each
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// The tests that take a clock.
const TARGETS: [&str; 2] = ["--package laneway --test fuzz", "--package laneway-router --test fuzz_input"];

pub(crate) fn run(options: &Options) -> Result<()> {
    for target in TARGETS {
        let mut command = cargo(&format!("test --release --all-features {target} -- --nocapture"));
        run_child(command.env("LANEWAY_FUZZ_SECONDS", options.seconds.to_string()))?;
    }
    Ok(())
}
