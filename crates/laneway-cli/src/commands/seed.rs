//! `laneway seed`: asks a running service to fill a queue with messages for its own test targets.
//!
//! The service makes them up; this verb only asks for them, in as many requests as it takes.

use clap::{ValueEnum, value_parser};
use indicatif::ProgressBar;
use serde_json::Value;

use crate::client::{Client, Service, part};
use crate::exit::Failure;
use crate::table::{self, count};

/// What `laneway seed` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway seed                                          100 messages in 8 groups, to the target `fast`
  laneway seed --count 5000 --groups unique             every message a group of its own
  laneway seed --endpoint faulty --groups single        one group, a target that fails now and then
  laneway seed --endpoint fast --delay-millis 500       a slow target
  laneway seed --endpoint simulated --count 1000000     no target at all: each takes 10 to 20 ms
  laneway seed --endpoint http://127.0.0.1:9000/orders  a target of yours")]
pub(crate) struct Options {
    /// How many messages
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// The test target: fast, slow, faulty, success, fail, client-error, server-error, pending, limited; random, for one of
    /// fast, success and faulty each time; simulated, for none; or a URL
    #[arg(long, value_name = "NAME|URL", default_value = "fast")]
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
    /// One of eight groups, drawn at random for each
    #[value(name = "1of8")]
    OneOf8,
    /// One for all: one after the other
    Single,
}

/// So many are asked for at once, so that a bar can move; the service takes ten times as many.
const PART: u32 = 10_000;

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let client = options.service.connect()?;
    let bar = table::bar(options.count.into(), PART.into());
    let seeded = in_parts(options, &client, &bar);
    bar.finish_and_clear();
    let answer = seeded?;
    if options.service.json {
        return Ok(table::lines(&[answer])?);
    }
    let seeded = answer["seeded"].as_u64().unwrap_or(0);
    eprintln!("{} for the target {}", count(seeded, "message"), options.endpoint);
    eprintln!("see them go: laneway top, laneway lanes");
    Ok(())
}

/// The answers to all requests as one: how many in all, the first id and the last.
fn in_parts(options: &Options, client: &Client, bar: &ProgressBar) -> Result<Value, Failure> {
    let mut all = Value::Null;
    let mut seeded = 0;
    while seeded < options.count {
        let part = (options.count - seeded).min(PART);
        let mut answer = client.post(&path(options, part), None).map_err(|failure| after(failure, seeded))?;
        seeded += part;
        bar.inc(part.into());
        answer["seeded"] = seeded.into();
        if !all.is_null() {
            answer["ids"][0] = all["ids"][0].take();
        }
        all = answer;
    }
    Ok(all)
}

/// A refusal, with what had gone well before.
fn after(failure: Failure, seeded: u32) -> Failure {
    match failure {
        Failure::Refused(words) if seeded > 0 => Failure::Refused(format!(
            "{words} (beside the {} of the requests before)",
            count(seeded.into(), "message")
        )),
        failure => failure,
    }
}

fn path(options: &Options, count: u32) -> String {
    let groups = options.groups.to_possible_value().expect("no value is hidden");
    let mut path = format!(
        "/api/seed/messages?count={}&endpoint={}&messageGroupMode={}",
        count,
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
