//! `cargo xtask bench`: runs the benchmark with the peers beside the product.
//!
//! All arguments go to `laneway-bench` untouched, so that there is one description of them: its own `--help`.

use std::ffi::OsString;

use anyhow::Result;

use crate::process::{cargo, run as run_child};

/// What `cargo xtask bench` can be told: whatever `laneway-bench` understands.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Options {
    /// Arguments of laneway-bench
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    run_child(cargo("run --release --package laneway-bench --").args(&options.arguments))
}
