//! `laneway seed`: asks a running service to fill a queue with messages for its own test targets.

use clap::{ValueEnum, value_parser};

use crate::client::{Service, part};
use crate::exit::Failure;
use crate::table::{self, count};

/// What `laneway seed` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway seed                                          100 messages in 8 groups, to the target `fast`
  laneway seed --count 5000 --groups unique             every message a group of its own
  laneway seed --endpoint faulty --groups single        one group, a target that fails now and then
  laneway seed --endpoint fast --delay-millis 500       a slow target")]
pub(crate) struct Options {
    /// How many messages
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// The test target: fast, slow, faulty, success, fail, client-error, server-error, pending, limited
    #[arg(long, value_name = "NAME", default_value = "fast")]
    endpoint: String,
    /// Which groups the messages are in
    #[arg(long, value_enum, default_value_t = Groups::OneOf8)]
    groups: Groups,
    /// The pool that runs them
    #[arg(long, value_name = "CODE")]
    pool: Option<String>,
    /// The queue that they go into; need not be said where there is only one
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,
    /// How long the target takes, instead of what it would
    #[arg(long, value_name = "MS", value_parser = value_parser!(u32).range(0..=300_000))]
    delay_millis: Option<u32>,
    #[command(flatten)]
    service: Service,
}

/// Which groups the messages are in.
#[derive(Clone, Copy, ValueEnum)]
enum Groups {
    /// Every message has its own: all may run at once
    Unique,
    /// Eight groups, by chance
    #[value(name = "1of8")]
    OneOf8,
    /// One for all: one after the other
    Single,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let answer = options.service.connect()?.post(&path(options), None)?;
    if options.service.json {
        return Ok(table::lines(&[answer])?);
    }
    let seeded = answer["seeded"].as_u64().unwrap_or(0);
    eprintln!("{} for the target {}", count(seeded, "message"), options.endpoint);
    eprintln!("see them go: laneway top, laneway lanes");
    Ok(())
}

fn path(options: &Options) -> String {
    let groups = options.groups.to_possible_value().expect("no value is hidden");
    let mut path = format!(
        "/api/seed/messages?count={}&endpoint={}&messageGroupMode={}",
        options.count,
        part(&options.endpoint),
        groups.get_name()
    );
    if let Some(queue) = &options.queue {
        path.push_str(&format!("&queue={}", part(queue)));
    }
    if let Some(pool) = &options.pool {
        path.push_str(&format!("&pool={}", part(pool)));
    }
    if let Some(delay) = options.delay_millis {
        path.push_str(&format!("&delayMillis={delay}"));
    }
    path
}
