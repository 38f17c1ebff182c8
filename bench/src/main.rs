//! `laneway-bench`: Laneway beside its peers.
//!
//! Exits with 0 when every run was correct, with 1 when one broke order, exclusion or counts or did not end, or when the
//! options contradict each other, and with 2 for options that do not exist.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use laneway_bench::cli::EngineArgs;
use laneway_bench::events::{self, EventsArgs};
use laneway_bench::router::RouterArgs;
use laneway_bench::{child, contenders, engine, router};

/// Benchmarks of Laneway beside its peers.
#[derive(Parser)]
#[command(name = "laneway-bench", version)]
struct Program {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// The engine: order per key, in one process
    Engine(Box<EngineArgs>),
    /// Event processors on dispatchers, beside other designs of the same
    Events(EventsArgs),
    /// The router: from its queue to a target on loopback
    Router(Box<RouterArgs>),
    /// Flows on a Postgres of their own, beside the loop of the original
    #[cfg(feature = "flow")]
    Flow(Box<laneway_bench::flow::FlowArgs>),
}

fn main() -> ExitCode {
    let contenders = contenders::all();
    let designs = events::all();
    if let Some(code) = child::serve(&contenders).or_else(|| events::serve(&designs)) {
        return code;
    }
    if let Some(code) = router::serve() {
        return code;
    }
    #[cfg(feature = "flow")]
    if let Some(code) = laneway_bench::flow::serve() {
        return code;
    }
    let result = match Program::parse().bench {
        Bench::Engine(args) => engine::run(&args, &contenders).map(drop),
        Bench::Events(args) => events::run(&args, &designs).map(drop),
        Bench::Router(args) => router::run(&args),
        #[cfg(feature = "flow")]
        Bench::Flow(args) => laneway_bench::flow::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
