//! `cargo xtask crash`: kills a router at random moments, again and again, and checks that nothing is lost and the order holds.
//!
//! It is a test of the suite with more kills; what it checks is at the head of `crates/laneway-router/tests/crash.rs`. A failure prints its seed, which chooses the same
//! moments again; what the machine does meanwhile it cannot choose.

use anyhow::Result;

use crate::process::{cargo, run as run_child};

/// What `cargo xtask crash` can be told.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How often the router is killed
    #[arg(long, default_value_t = 100)]
    kills: u64,
    /// Another seed than the suite's own
    #[arg(long)]
    seed: Option<u64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut command = cargo("test --package laneway-router --all-features --test crash -- --nocapture");
    if let Some(seed) = options.seed {
        command.env("LANEWAY_SEED", seed.to_string());
    }
    run_child(command.env("LANEWAY_CRASH_KILLS", options.kills.to_string()))
}
