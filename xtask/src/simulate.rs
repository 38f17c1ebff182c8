//! `cargo xtask simulate`: runs the engine under its simulator, one seed per schedule, with every line of the contract
//! asserted after each step.
//!
//! A failure prints its seed. `cargo xtask simulate --seed N --schedules 1` runs that schedule again, alone.

use anyhow::Result;

use crate::process::{cargo, run as run_child};

/// What `cargo xtask simulate` can be told.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The first seed; the default is the suite's own, the same on every machine
    #[arg(long)]
    seed: Option<u64>,
    /// How many schedules to run, each with the seed after the one before
    #[arg(long, default_value_t = Options::default().schedules)]
    schedules: u64,
}

impl Default for Options {
    /// As many schedules as fit into a minute of the whole test run.
    fn default() -> Self {
        Self { seed: None, schedules: 100_000 }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut command =
        cargo("test --release --package laneway --all-features --test simulation -- --nocapture");
    if let Some(seed) = options.seed {
        command.env("LANEWAY_SIM_SEED", seed.to_string());
    }
    run_child(command.env("LANEWAY_SIM_SCHEDULES", options.schedules.to_string()))
}
