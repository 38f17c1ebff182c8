//! `cargo xtask fuzz`: turns random bytes into operations on the engine, and compares with a naive model, for a while.
//!
//! It is an ordinary test of the engine with a longer clock, so that it needs no special compiler; a failure prints the
//! bytes that caused it.

use anyhow::Result;

use crate::process::{cargo, run as run_child};

/// What `cargo xtask fuzz` can be told.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long to try
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut command = cargo("test --release --package laneway --all-features --test fuzz -- --nocapture");
    run_child(command.env("LANEWAY_FUZZ_SECONDS", options.seconds.to_string()))
}
