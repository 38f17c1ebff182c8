//! `laneway bench`: measures the product on this machine.
//!
//! The benchmark lives in the crate `laneway-bench`, and its options with it. Here it runs without the peers, which would
//! slow every build of this binary; the crate's own binary `laneway-bench` runs the product beside them with the same
//! options.

use std::process::ExitCode;

use clap::Subcommand;
use laneway_bench::cli::EngineArgs;
use laneway_bench::events::{self, EventsArgs};
use laneway_bench::router::RouterArgs;
use laneway_bench::{child, contenders, engine, router};

use crate::exit::Failure;

/// What `laneway bench` can be told.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    floor: Floor,
}

/// The part of the product that is measured.
#[derive(Subcommand)]
enum Floor {
    /// The engine: order per key, in one process
    // Boxed because its options are many, and every other verb would pay for them.
    Engine(Box<EngineArgs>),
    /// Event processors on dispatchers
    Events(EventsArgs),
    /// The router: from its queue to a target on loopback
    Router(Box<RouterArgs>),
    /// Flows on a Postgres of their own, beside the loop of the original
    #[cfg(feature = "flow")]
    Flow(Box<laneway_bench::flow::FlowArgs>),
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match &options.floor {
        Floor::Engine(arguments) => engine::run(arguments, &contenders::product()).map(drop)?,
        Floor::Events(arguments) => events::run(arguments, &events::product()).map(drop)?,
        Floor::Router(arguments) => router::run(arguments)?,
        #[cfg(feature = "flow")]
        Floor::Flow(arguments) => laneway_bench::flow::run(arguments)?,
    }
    Ok(())
}

/// Every measurement is a fresh process of this same binary. Does its work where this process is one, and returns nothing
/// where it is not; the benchmark speaks to its children in a language of its own, so that this comes before the options.
pub(crate) fn serve_as_child() -> Option<ExitCode> {
    let code = child::serve(&contenders::product())
        .or_else(|| events::serve(&events::product()))
        .or_else(router::serve);
    #[cfg(feature = "flow")]
    let code = code.or_else(laneway_bench::flow::serve);
    code
}
