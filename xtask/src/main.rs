//! The front door of the repository: `cargo xtask <verb>`.
//!
//! One verb per thing that a contributor or the build server does, one file per verb. `test` is the sum: it runs the others
//! in the order of [`test::STAGES`], and it is all that the build server knows. Every verb starts child processes through
//! [`process`], which shows the command before it runs, so that what happens here can be repeated by hand.

mod process;
mod stage;

mod setup;
mod test;

mod examples;
mod licences;
mod model;
mod simulate;
mod tidy;

mod bench;
mod crash;
mod fuzz;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The front door of the repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Install what the tests need; does nothing when it is there already
    Setup,
    /// Run all that the build server runs
    Test,
    /// Explore the concurrent protocols exhaustively, with loom
    Model(model::Options),
    /// Run the engine under the seeded simulator
    Simulate(simulate::Options),
    /// Drive the engine, and the readers of outside input, with random bytes for a while
    Fuzz(fuzz::Options),
    /// Kill the router at random moments, and check that nothing is lost
    Crash(crash::Options),
    /// Run the benchmark beside the peers: `cargo xtask bench engine --workload W1`
    Bench(bench::Options),
    /// Run every example
    Examples,
    /// Check the licences of all dependencies
    Licences,
    /// Check the style rules that a compiler does not know
    Tidy,
}

fn main() -> ExitCode {
    match run(Arguments::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Setup => setup::run(),
        Verb::Test => test::run(),
        Verb::Model(options) => model::run(&options),
        Verb::Simulate(options) => simulate::run(&options),
        Verb::Fuzz(options) => fuzz::run(&options),
        Verb::Crash(options) => crash::run(&options),
        Verb::Bench(options) => bench::run(&options),
        Verb::Examples => examples::run(),
        Verb::Licences => licences::run(),
        Verb::Tidy => tidy::run(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    /// Clap checks its definitions when they are used; this uses all of them.
    #[test]
    fn the_command_line_is_well_formed() {
        super::Arguments::command().debug_assert();
    }
}
