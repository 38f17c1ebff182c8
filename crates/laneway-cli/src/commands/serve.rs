//! `laneway serve`: runs the message router until ctrl-c, then drains it with a shown countdown.
//!
//! ```text
//!  layers ─► configuration ─► service ─► announced ─┬─► waits for ctrl-c ─► drains ─► report
//!                                                   └─► with --demo: load, witness, view until then
//! ```
//!
//! With a lease in the configuration (`laneway.standby`), `standby.rs` waits for its turn first, and again when that is over.
//!
//! Messages that are held when the time to drain is over go back to their queue; nothing is lost by stopping.

mod announce;
mod demo;
mod drain;
mod standby;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use laneway_router::config::{Config, Layering, Log};
use laneway_router::service::{Service, StartError};
use laneway_router::standby::Turn;
use tokio::sync::Notify;

use super::config::{Layered, bad, load};
use crate::exit::Failure;
use crate::interrupt::on_interrupts;

/// What `laneway serve` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway serve --demo                              look at it: a mixed load against its own test targets
  laneway serve                                     a router with the defaults, its queue in ./laneway.db
  laneway serve --config laneway.conf               with a configuration; `laneway config reference` prints one
  laneway serve --bind 127.0.0.1:9000 --set pools.orders.concurrency=50

Ctrl-C drains: nothing more is taken, what is held is delivered for as long as `shutdown.drain` says, the rest goes
back to its queue, and the exit code is 0. A second ctrl-c stops at once, with 130; nothing is lost, but what was with
its target then will be delivered again. A demonstration that sees a group out of order exits with 3.")]
pub(crate) struct Options {
    #[command(flatten)]
    layers: Layered,
    /// Run a mixed load against the service's own test targets, on a queue that goes away at the end
    #[arg(long, conflicts_with_all = ["config", "database"])]
    demo: bool,
    /// Where to listen: over `http.bind`
    #[arg(long, value_name = "ADDRESS:PORT")]
    bind: Option<SocketAddr>,
    /// The file of the queue: over `queue.path`
    #[arg(long, value_name = "FILE")]
    database: Option<PathBuf>,
    /// Decides the groups and the times of the demonstration
    #[arg(long, value_name = "N", default_value_t = 1, requires = "demo")]
    seed: u64,
    /// Print one JSON object for what listens where, for each second of the drain, for what came of it, and for each line of the
    /// demonstration
    #[arg(long)]
    json: bool,
}

impl Options {
    fn layering(&self) -> Layering {
        let mut layering = self.layers.layering();
        if let Some(bind) = self.bind {
            layering = layering.set("laneway.http.bind", &quoted(&bind.to_string()));
        }
        if let Some(database) = &self.database {
            layering = layering.set("laneway.queue.path", &quoted(&database.display().to_string()));
        }
        layering
    }
}

/// As a text of HOCON.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    if options.demo {
        return runtime.block_on(demo::run(options));
    }
    let config = load(&options.layering())?;
    start_log(config.log);
    runtime.block_on(serve(options, config))
}

async fn serve(options: &Options, config: Config) -> Result<(), Failure> {
    let interrupted = interrupts(|| {})?;
    if let Some(settings) = config.standby.clone() {
        return standby::serve(options, &config, &settings, &interrupted).await;
    }
    let service = start(config, None).await?;
    announce::service(&service, options.json)?;
    interrupted.notified().await;
    // As it is now: a reload may have changed it.
    let limit = service.config().drain;
    drain::drain(service, limit, options.json).await
}

/// Lets what the service notes be written to standard error, as far as the configuration wants it.
fn start_log(log: Log) {
    let Some(level) = log.level else { return };
    let lines = tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr).with_target(false);
    // Somebody who has set one up before us has his reasons.
    let _ = match log.json {
        true => lines.json().flatten_event(true).try_init(),
        false => lines.try_init(),
    };
}

/// Told at the first ctrl-c; `leave` is called before the second ends the process.
fn interrupts(leave: impl Fn() + Send + 'static) -> Result<Arc<Notify>, Failure> {
    let asked = Arc::new(Notify::new());
    let teller = Arc::clone(&asked);
    on_interrupts(move || teller.notify_one(), leave)?;
    Ok(asked)
}

async fn start(config: Config, turn: Option<Turn>) -> Result<Service, Failure> {
    Service::start_in_turn(config, turn).await.map_err(|error| {
        let hint = match &error {
            StartError::Listen { error, .. } if error.kind() == io::ErrorKind::AddrInUse => {
                "\n\n  somebody listens there already, perhaps another service; --bind 127.0.0.1:0 takes any free port"
            }
            _ => "",
        };
        anyhow::anyhow!("cannot start: {error}{hint}").into()
    })
}
