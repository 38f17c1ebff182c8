//! `laneway send`: publishes messages to a running service, or to a broker: one, many alike, or whatever a file or a pipe holds.
//!
//! ```text
//!  --payload, --count ──┐                         ┌─► POST /api/messages ─┐
//!                       ├─► letters ─► batches ─┤                       ├─► answers
//!  --from FILE | - ─────┘   (one JSON object each) └─► a broker (--to) ────┘
//! ```

mod broker;
mod letters;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::builder::PossibleValuesParser;
use clap::value_parser;
use indicatif::{ProgressBar, ProgressStyle};
use laneway_router::message::DELAY_SECONDS_MAX;
use serde_json::Value;

use self::letters::{Letter, Letters};
use crate::client::{Client, Service, part};
use crate::exit::Failure;
use crate::table::{self, count, grouped, printable};

/// How many messages one request carries; the service takes a thousand.
const BATCH: usize = 500;

/// How many bytes one request carries, unless a single message is longer; the service takes 8 MiB unless it is told otherwise.
const BATCH_BYTES: usize = 2 << 20;

/// What `laneway send` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway send --group order-7 --target http://127.0.0.1:9000/orders --payload '{\"state\": \"paid\"}'
  laneway send --group order-7 --target http://127.0.0.1:9000/orders --payload @order.json
  laneway send --group order-7 --count 20            twenty messages, to no target: a simulated one of 10 to 20 ms
  laneway send --target 'SIMULATED 500ms'            the same, slower
  laneway send --group order-7 --delay 60            not before a minute has passed, and what comes later in the group waits with it
  laneway send --target http://127.0.0.1:9000/orders --auth-token-file token.txt --header tenant=acme
  laneway send --from messages.jsonl                 whole messages, one JSON object per line
  generate | laneway send --from -                   the same from a pipe, in batches
  laneway send --to nats://127.0.0.1:4222/orders --group order-7    straight to a broker, without a service

A whole message:
  {\"id\": \"m-1\", \"poolCode\": \"orders\", \"messageGroupId\": \"order-7\",
   \"mediationTarget\": \"http://127.0.0.1:9000/orders\", \"payload\": {\"state\": \"paid\"}}")]
pub(crate) struct Options {
    /// What orders the messages: those of one group are delivered one after the other
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// The pool that runs them; the default pool, if not given
    #[arg(long, value_name = "CODE", default_value = "")]
    pool: String,
    /// Where they are delivered: a URL, or SIMULATED, perhaps with a duration: 'SIMULATED 15ms'
    #[arg(long, value_name = "URL|SIMULATED", default_value = "SIMULATED")]
    target: String,
    /// What is posted to the target: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-")]
    payload: Option<String>,
    /// The id of the message, followed by its number if there are several; if not given, one of the idempotency key, or a random one
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// For how many seconds the queue keeps the message, and with it what is behind it in its group; a week at most
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u32).range(..=i64::from(DELAY_SECONDS_MAX)))]
    delay: Option<u32>,
    /// Which groups go first when slots are scarce
    #[arg(long, ignore_case = true, value_parser = PossibleValuesParser::new(["HIGH", "NORMAL", "LOW"]))]
    priority: Option<String>,
    /// What the failure of a message means for those behind it in its group
    #[arg(long, value_name = "MODE", ignore_case = true, value_parser = PossibleValuesParser::new(["NEXT_ON_ERROR", "BLOCK_ON_ERROR", "IMMEDIATE"]))]
    dispatch_mode: Option<String>,
    /// Where the target's bearer token is: a file, or - for standard input, so that no list of processes shows it
    #[arg(long, value_name = "FILE|-")]
    auth_token_file: Option<String>,
    /// A further header for the target; as often as there are some
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// A second message with the same one is not taken, within the window of the queue; followed by its number if there are several
    #[arg(long, value_name = "ID")]
    deduplication_id: Option<String>,
    /// How many messages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u64).range(1..=10_000_000))]
    count: u64,
    /// Read whole messages from a file, or - for standard input, one JSON object per line
    #[arg(long, value_name = "FILE|-", conflicts_with_all = ["group", "pool", "target", "payload", "id", "delay", "priority",
        "dispatch_mode", "auth_token_file", "headers", "deduplication_id", "count"])]
    from: Option<String>,
    /// The queue that they go into; need not be said where there is only one
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,
    /// Publish to this broker instead of a service: what the URLs of each kind look like is in docs/guide/brokers.md
    #[arg(long, value_name = "URL", conflicts_with_all = ["queue", "idempotency_key", "delay"])]
    to: Option<String>,
    /// With the same key the same messages are taken once, however often they are sent
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    #[command(flatten)]
    service: Service,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("there is no = in it; tenant=acme would be right")?;
    Ok((name.to_owned(), value.to_owned()))
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let letters = Letters::open(options)?;
    if let Some(url) = &options.to {
        return broker::run(url, letters, options.service.json);
    }
    let client = options.service.connect()?;
    let bar = bar(&letters);
    let mut post = Post { client: &client, options, batches: 0, tally: Tally::default() };
    let began = Instant::now();
    let sent = post.all(letters, &bar);
    bar.finish_and_clear();
    post.tell(began.elapsed(), sent.is_err());
    sent
}

/// What has been accepted so far.
#[derive(Default)]
struct Tally {
    accepted: u64,
    duplicates: u64,
    /// Id and sequence of the last one.
    last: Option<(String, u64)>,
}

struct Post<'a> {
    client: &'a Client,
    options: &'a Options,
    batches: u64,
    tally: Tally,
}

impl Post<'_> {
    fn all(&mut self, letters: Letters, bar: &ProgressBar) -> Result<(), Failure> {
        in_batches(letters, |batch| self.batch(&batch, bar))
    }

    fn batch(&mut self, batch: &[Letter], bar: &ProgressBar) -> Result<(), Failure> {
        let texts: Vec<&str> = batch.iter().map(|letter| letter.json.as_str()).collect();
        let body = format!("[{}]", texts.join(",\n"));
        let key = self.options.idempotency_key.as_ref().map(|key| format!("{key}-{}", self.batches));
        let header = key.as_deref().map(|key| ("idempotency-key", key));
        let queue = self.options.queue.as_ref().map(|queue| format!("?queue={}", part(queue)));
        let path = format!("/api/messages{}", queue.unwrap_or_default());
        let answer = self.client.post_text(&path, body, header.as_slice());
        let answer = answer.map_err(|failure| located(failure, batch))?;
        self.batches += 1;
        self.note(&answer)?;
        bar.inc(batch.iter().map(|letter| letter.progress).sum());
        bar.set_message(count(self.tally.accepted, "message"));
        Ok(())
    }

    fn note(&mut self, answer: &Value) -> Result<(), Failure> {
        let messages = answer["messages"].as_array().map_or(&[][..], Vec::as_slice);
        self.tally.accepted += answer["accepted"].as_u64().unwrap_or(messages.len() as u64);
        self.tally.duplicates +=
            messages.iter().filter(|message| message["duplicate"] == true).count() as u64;
        if let Some(last) = messages.last() {
            let id = last["id"].as_str().unwrap_or_default().to_owned();
            self.tally.last = Some((id, last["sequence"].as_u64().unwrap_or(0)));
        }
        if self.options.service.json {
            table::lines(messages)?;
        }
        Ok(())
    }

    /// Says what was accepted, also when not all was.
    fn tell(&self, took: Duration, failed: bool) {
        let Tally { accepted, duplicates, last } = &self.tally;
        if (self.options.service.json && !failed) || (failed && accepted + duplicates == 0) {
            return;
        }
        match (accepted, duplicates, last) {
            (1, 0, Some((id, sequence))) => eprintln!("accepted {} as sequence {sequence}", printable(id)),
            (0, 1, Some((id, sequence))) => {
                eprintln!(
                    "{} had been sent before, as sequence {sequence}; it was not taken again",
                    printable(id)
                )
            }
            _ => {
                let twice = match duplicates {
                    0 => String::new(),
                    some => format!("; {} had been sent before and not taken again", grouped(*some)),
                };
                eprintln!("accepted {} in {:.1} s{twice}", count(*accepted, "message"), took.as_secs_f64());
            }
        }
    }
}

/// Hands letters over in batches that fit into a request.
fn in_batches(
    letters: Letters,
    mut hand_over: impl FnMut(Vec<Letter>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut batch: Vec<Letter> = Vec::new();
    let mut bytes = 0;
    for letter in letters {
        let letter = letter?;
        if !batch.is_empty() && (batch.len() == BATCH || bytes + letter.json.len() > BATCH_BYTES) {
            hand_over(std::mem::take(&mut batch))?;
            bytes = 0;
        }
        bytes += letter.json.len();
        batch.push(letter);
    }
    if batch.is_empty() { Ok(()) } else { hand_over(batch) }
}

/// A refusal, with the lines that it is about.
fn located(failure: Failure, batch: &[Letter]) -> Failure {
    let lines = batch.first().and_then(|letter| letter.line).zip(batch.last().and_then(|letter| letter.line));
    match (failure, lines) {
        (Failure::Refused(words), Some((first, last))) => Failure::Refused(format!(
            "lines {first} to {last} were refused, and nothing behind them was sent: {words}"
        )),
        (failure, _) => failure,
    }
}

/// A bar where the end is known, a spinner where it is not, nothing where nobody looks or it would be over at once.
fn bar(letters: &Letters) -> ProgressBar {
    if !std::io::stderr().is_terminal() || letters.total.is_some_and(|total| total <= BATCH as u64) {
        return ProgressBar::hidden();
    }
    let style = |template: &str| ProgressStyle::with_template(template).expect("the template is right");
    match letters.total {
        Some(total) => {
            let bar = ProgressBar::new(total);
            bar.with_style(style("{bar:32} {percent:>3} %  {msg}, {eta} left"))
        }
        None => ProgressBar::new_spinner().with_style(style("{spinner} {msg} in {elapsed}")),
    }
}
