//! `cargo xtask test`: all that the build server runs, in one command.
//!
//! The order is by what a failure costs: style is checked in seconds and comes first, the searches through schedules take
//! longest and come late.

use anyhow::Result;

use crate::process::{cargo, run as run_child};
use crate::stage::{Stage, run_all};
use crate::{examples, licences, model, setup, simulate, tidy};

/// The stages in the order in which they run.
pub(crate) const STAGES: &[Stage] = &[
    Stage { name: "setup", about: "what the tests need is installed", run: setup::run },
    Stage { name: "format", about: "rustfmt would change nothing", run: format },
    Stage { name: "tidy", about: "the style rules that a compiler does not know", run: tidy::run },
    Stage { name: "licences", about: "every dependency may be used by everyone", run: licences::run },
    Stage { name: "clippy", about: "no warning, with all features and with the default ones", run: clippy },
    Stage { name: "tests", about: "unit, integration and property tests", run: tests },
    Stage { name: "doctests", about: "the examples inside the documentation", run: doctests },
    Stage { name: "examples", about: "every example runs to its end", run: examples::run },
    Stage { name: "simulate", about: "the contract holds in seeded schedules", run: simulate },
    Stage { name: "model", about: "the protocols hold in all interleavings", run: model },
];

pub(crate) fn run() -> Result<()> {
    run_all(STAGES)
}

fn format() -> Result<()> {
    run_child(&mut cargo("fmt --all -- --check"))
}

fn clippy() -> Result<()> {
    run_child(&mut cargo("clippy --workspace --all-targets --all-features -- -D warnings"))?;
    // What a newcomer builds first: a feature of a dependency that only a broker asks for is not there.
    run_child(&mut cargo("clippy -p laneway-cli -- -D warnings"))
}

/// Benchmarks are left out: they are checked by clippy and run on purpose only.
fn tests() -> Result<()> {
    let runner = if setup::has_nextest() { "nextest run" } else { "test --lib --bins --tests" };
    run_child(cargo(runner).args(["--workspace", "--all-features"]))
}

/// Nextest does not know doctests, so that they are a stage of their own.
fn doctests() -> Result<()> {
    run_child(&mut cargo("test --workspace --all-features --doc"))
}

fn simulate() -> Result<()> {
    simulate::run(&simulate::Options::default())
}

fn model() -> Result<()> {
    model::run(&model::Options::default())
}
