//! The front door of Laneway: the binary `laneway`.
//!
//! It reads the command line, hands the options to the file of their verb in [`commands`], and turns what comes back into
//! an exit code ([`exit`]). Data goes to standard output, everything else to standard error, so that any verb can be piped.

mod client;
mod commands;
mod exit;
mod interrupt;
mod render;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, config, dead_letters, demo, doctor, groups, lanes, pools, seed, send, serve, top,
};
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

This binary runs the message router (`serve`), operates it while it runs (`send`,
`lanes`, `explain`, `pools`, `dead-letters`, `top`, ...), shows lanes at work inside
one process (`demo`) and measures them (`bench`). The engine underneath is the Rust
crate `laneway`.";

/// What `laneway --help` ends with.
const EXAMPLES: &str = "\
Examples:
  laneway serve --demo                      a router with a mixed load, to look at
  laneway top                               in another terminal: pools, rates, the deepest groups
  laneway explain invoice-stuck             why does this group wait?
  laneway serve --config laneway.conf       a router of your own
  laneway send --group order-7 --target http://127.0.0.1:9000/ --payload '{\"state\": \"paid\"}'
  laneway demo                              the engine alone: five lanes, one of them slow
  laneway bench engine --help               what can be measured, and how

Data goes to standard output, as JSON with --json; everything else to standard error.
The service is found at --url or LANEWAY_URL; its token is --token or LANEWAY_TOKEN.";

/// In order per key, in parallel across keys
#[derive(Parser)]
#[command(name = "laneway", version, long_about = ABOUT, after_long_help = closing_words())]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run the message router: queue, pools, HTTP targets; with --demo also a load to look at
    Serve(serve::Options),
    /// Publish messages to a running service
    Send(Box<send::Options>),
    /// Fill a queue with messages for the service's own test targets
    Seed(seed::Options),
    /// The deepest message groups
    Lanes(lanes::Options),
    /// Why does a message group wait?
    Explain(groups::ExplainOptions),
    /// Stop a message group in front of its next message
    Park(groups::ParkOptions),
    /// Let a message group go on
    Resume(groups::ResumeOptions),
    /// Send the next message of a group to the dead letters
    Skip(groups::SkipOptions),
    /// The pools: how they stand, and changing them while they run
    Pools(pools::Options),
    /// The messages that were given up: list, redrive, purge
    DeadLetters(dead_letters::Options),
    /// A live view: pools, rates, deepest groups, sources, warnings
    Top(top::Options),
    /// Check a configuration, or show the effective one
    Config(config::Options),
    /// Ask each configured broker whether it can be reached and keeps the order of groups, and how to mend it
    Doctor(doctor::Options),
    /// Watch the engine's lanes at work in this process: a slow key beside fast ones, within seconds
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
        Verb::Serve(options) => serve::run(&options),
        Verb::Send(options) => send::run(&options),
        Verb::Seed(options) => seed::run(&options),
        Verb::Lanes(options) => lanes::run(&options),
        Verb::Explain(options) => groups::explain(&options),
        Verb::Park(options) => groups::park(&options),
        Verb::Resume(options) => groups::resume(&options),
        Verb::Skip(options) => groups::skip(&options),
        Verb::Pools(options) => pools::run(&options),
        Verb::DeadLetters(options) => dead_letters::run(&options),
        Verb::Top(options) => top::run(&options),
        Verb::Config(options) => config::run(&options),
        Verb::Doctor(options) => doctor::run(&options),
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
