//! The front door of Laneway: the binary `laneway`.
//!
//! It reads the command line, hands the options to the file of their verb in [`commands`], and turns what comes back into
//! an exit code ([`exit`]). Data goes to standard output, everything else to standard error, so that any verb can be piped.

mod commands;
mod exit;
mod interrupt;
mod render;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{bench, demo};
use crate::exit::{Exit, Failure};

/// What `laneway --help` begins with.
const ABOUT: &str = "\
In order per key, in parallel across keys.

Laneway gives every key (an order, an account, a device) a lane of its own. Inside
a lane, messages are handled strictly in the order in which they were accepted, one
at a time, through retries and failures. Across lanes, everything runs at full
speed, as far as there are workers: no lane waits for another key while a worker of
its dispatcher is free. Memory is bounded, nothing is lost,
and every message is accounted for.

This binary shows lanes at work and measures them. The engine itself is the Rust
crate `laneway`.";

/// What `laneway --help` ends with.
const EXAMPLES: &str = "\
Examples:
  laneway demo                              five lanes, one of them slow, four workers
  laneway demo --keys 1000 --workers 16     many lanes on a few workers
  laneway demo --json | jq .sequence        one JSON object per handled message
  laneway bench engine --help               what can be measured, and how";

/// In order per key, in parallel across keys
#[derive(Parser)]
#[command(name = "laneway", version, long_about = ABOUT, after_long_help = closing_words())]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Watch lanes at work: a slow key beside fast ones, within seconds
    Demo(demo::Options),
    /// Measure the product on this machine
    Bench(bench::Options),
}

fn main() -> ExitCode {
    if let Some(code) = bench::serve_as_child() {
        return code;
    }
    let exit = match Arguments::try_parse() {
        Ok(arguments) => report(run(arguments.verb)),
        Err(answer) => answer_of_the_parser(&answer),
    };
    exit.into()
}

fn run(verb: Verb) -> Result<(), Failure> {
    match verb {
        Verb::Demo(options) => demo::run(&options),
        Verb::Bench(options) => bench::run(&options),
    }
}

/// Says on standard error what went wrong, if anything did, and finds the exit code for it.
fn report(result: Result<(), Failure>) -> Exit {
    let Err(failure) = result else { return Exit::Done };
    if let Some(words) = failure.words() {
        eprintln!("laneway: {words}");
    }
    failure.exit()
}

/// Help and version are answers of the parser too; only the others are mistakes.
fn answer_of_the_parser(answer: &clap::Error) -> Exit {
    // There is nobody left to tell when neither output can be written.
    let _ = answer.print();
    if answer.use_stderr() { Exit::Usage } else { Exit::Done }
}

fn closing_words() -> String {
    format!("{EXAMPLES}\n\n{}", exit::help())
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
