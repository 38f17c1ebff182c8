//! `laneway dead-letters`: the messages that were given up, and what becomes of them.

use std::collections::BTreeSet;

use clap::{Subcommand, value_parser};
use serde_json::{Value, json};

use crate::client::{Client, Service, part};
use crate::exit::Failure;
use crate::table::{self, Column, count, field, printable};

/// What `laneway dead-letters` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway dead-letters                      the oldest hundred
  laneway dead-letters list --after 4711    those behind that sequence
  laneway dead-letters redrive 41 43        let these two come again
  laneway dead-letters redrive --all        let all come again, oldest first
  laneway dead-letters --source orders      those of a broker: NATS or Postgres
  laneway dead-letters purge --yes          forget them for good

SQS, RabbitMQ, ActiveMQ and Kafka keep them where their own tools show them;
of those it says where that is.")]
pub(crate) struct Options {
    #[command(subcommand)]
    what: Option<What>,
    /// The queue, or the source, that they came from; need not be said where there is only one
    #[arg(long, global = true, visible_alias = "source", value_name = "NAME")]
    queue: Option<String>,
    #[command(flatten)]
    service: Service,
}

#[derive(Subcommand)]
enum What {
    /// Show them, oldest first (what `dead-letters` alone does)
    List {
        /// Only those behind this sequence
        #[arg(long, value_name = "SEQUENCE", default_value_t = 0)]
        after: u64,
        /// How many, at most
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = value_parser!(u32).range(1..=1_000))]
        most: u32,
    },
    /// Let them come again, behind what their groups have waiting
    Redrive {
        /// Which ones, by sequence
        #[arg(value_name = "SEQUENCE", required_unless_present = "all", conflicts_with = "all")]
        sequences: Vec<u64>,
        /// All of them, oldest first
        #[arg(long)]
        all: bool,
        /// How many, at most; without it, as many as there are when it begins
        #[arg(long, value_name = "N", requires = "all", value_parser = value_parser!(u64).range(1..))]
        most: Option<u64>,
    },
    /// Forget all of them, for good
    Purge {
        /// I am sure
        #[arg(long, required = true)]
        yes: bool,
    },
}

const COLUMNS: [Column; 6] = [
    (">sequence", |letter| letter["sequence"].to_string()),
    ("id", |letter| field(letter, "id")),
    ("group", |letter| field(letter, "group")),
    (">attempts", |letter| field(letter, "attempts")),
    ("at", |letter| field(letter, "at")),
    ("reason", |letter| field(letter, "reason")),
];

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let Options { what, queue, service } = options;
    let queue = queue.as_deref();
    match what {
        None => list(service, queue, 0, 100),
        Some(What::List { after, most }) => list(service, queue, *after, *most),
        Some(What::Redrive { all: true, most, .. }) => redrive_all(service, queue, *most),
        Some(What::Redrive { sequences, .. }) => redrive(service, queue, sequences),
        // Clap has seen to it that `yes` was typed.
        Some(What::Purge { yes: _ }) => purge(service, queue),
    }
}

/// A queue as a further part of a query.
fn and_queue(queue: Option<&str>) -> String {
    queue.map(|queue| format!("&queue={}", part(queue))).unwrap_or_default()
}

/// What is known of dead letters that are not listed: how many, and where they are.
const ELSEWHERE: [Column; 4] = [
    ("source", |source| field(source, "name")),
    ("kind", |source| field(source, "kind")),
    (">dead letters", |source| field(source, "dead")),
    ("where", |source| field(source, "deadLettersAt")),
];

/// The sources that keep their dead letters themselves. An older service does not say which.
fn elsewhere(sources: &Value) -> Vec<Value> {
    let all = sources.as_array().into_iter().flatten();
    all.filter(|source| source["deadLettersAt"].is_string()).cloned().collect()
}

fn list(service: &Service, queue: Option<&str>, after: u64, most: u32) -> Result<(), Failure> {
    let client = service.connect()?;
    let sources = client.get("/api/sources")?;
    let brokers = elsewhere(&sources);
    if queue.is_none() && !brokers.is_empty() && brokers.len() == sources.as_array().map_or(0, Vec::len) {
        return Ok(table::print(service.json, &Value::Array(brokers), &ELSEWHERE, "there are no sources")?);
    }
    for broker in brokers.iter().filter(|broker| broker["dead"].as_u64() > Some(0)) {
        let number = count(broker["dead"].as_u64().unwrap_or(0), "dead letter");
        let text = |name: &str| broker[name].as_str().unwrap_or_default();
        eprintln!("{}", printable(&format!("{} has {number}: {}", text("name"), text("deadLettersAt"))));
    }
    if let Some(last) = show(service.json, &client, queue, after, most as usize)? {
        eprintln!("\nthere may be more: --after {last}");
    }
    Ok(())
}

/// Shows so many dead letters, in as many pages as it takes. The sequence of the last one, if there is more behind it.
fn show(
    json: bool,
    client: &Client,
    queue: Option<&str>,
    mut after: u64,
    most: usize,
) -> Result<Option<u64>, Failure> {
    let (mut rows, mut shown) = (Vec::new(), 0);
    let more = loop {
        let part = most - shown;
        let path = format!("/api/dead-letters?after={after}&most={part}{}", and_queue(queue));
        let (mut letters, more) = client.get_page(&path)?;
        shown += letters.len();
        let last = letters.last().and_then(|letter| letter["sequence"].as_u64());
        if json {
            table::lines(&letters)?;
        } else {
            // A table has no place for texts, of which there may be more than fit into memory.
            letters
                .iter_mut()
                .filter_map(Value::as_object_mut)
                .for_each(|letter| drop(letter.remove("text")));
            rows.append(&mut letters);
        }
        match last {
            Some(last) if more => after = last,
            _ => break None,
        }
        if shown >= most {
            break last;
        }
    };
    if !json {
        table::print(false, &Value::Array(rows), &COLUMNS, "there are no dead letters")?;
    }
    Ok(more)
}

fn redrive(service: &Service, queue: Option<&str>, which: &[u64]) -> Result<(), Failure> {
    let body = json!({"queue": queue, "sequences": which});
    let answer = service.connect()?.post("/api/dead-letters/redrive", Some(&body))?;
    tell_redriven(service.json, &answer)?;
    let missing = answer["missing"].as_array().map_or(&[][..], Vec::as_slice);
    let sequences: Vec<String> = missing.iter().map(Value::to_string).collect();
    match sequences.as_slice() {
        [] => {}
        [one] => return Err(Failure::Refused(format!("there is no dead letter {one}"))),
        more => return Err(Failure::Refused(format!("there are no dead letters {}", more.join(", ")))),
    }
    let asked = which.iter().collect::<BTreeSet<_>>().len() as u64;
    let left = asked.saturating_sub(answer["redriven"].as_u64().unwrap_or(asked));
    match left {
        0 => Ok(()),
        left => Err(Failure::Refused(format!("the queue has no room for {}", count(left, "dead letter")))),
    }
}

/// No request redrives more than this; it is what the service allows.
const PART: u64 = 10_000;

/// As many as there were at the beginning, oldest first: those that come back here meanwhile are younger, and are left.
fn redrive_all(service: &Service, queue: Option<&str>, most: Option<u64>) -> Result<(), Failure> {
    let client = service.connect()?;
    let dead = dead_letters_of(&client.get("/api/sources")?, queue).unwrap_or(PART);
    let wanted = most.map_or(dead, |most| most.min(dead));
    let bar = table::bar(wanted, PART);
    let mut redriven = 0;
    let mut ended = Ok(());
    while redriven < wanted {
        let part = (wanted - redriven).min(PART);
        let body = json!({"queue": queue, "most": part});
        match client.post("/api/dead-letters/redrive", Some(&body)) {
            Ok(answer) => {
                let some = answer["redriven"].as_u64().unwrap_or(0);
                redriven += some;
                bar.inc(some);
                // The queue has no more room, or somebody else was quicker.
                if some < part {
                    break;
                }
            }
            Err(failure) => {
                ended = Err(failure);
                break;
            }
        }
    }
    bar.finish_and_clear();
    if ended.is_ok() || redriven > 0 {
        tell_redriven(service.json, &json!({"redriven": redriven}))?;
    }
    ended?;
    if redriven < dead {
        eprintln!(
            "{} left; again: laneway dead-letters redrive --all",
            count(dead - redriven, "dead letter")
        );
    }
    Ok(())
}

/// How many dead letters a source has: the one that is named, or the one that the service takes if none is.
fn dead_letters_of(sources: &Value, queue: Option<&str>) -> Option<u64> {
    let listed: Vec<&Value> =
        sources.as_array()?.iter().filter(|source| !source["deadLettersAt"].is_string()).collect();
    let of = |name: &str| listed.iter().find(|source| source["name"] == name);
    let source = match (queue, listed.as_slice()) {
        (Some(name), _) => of(name)?,
        (None, [only]) => only,
        (None, _) => of("default")?,
    };
    source["dead"].as_u64()
}

fn tell_redriven(json: bool, answer: &Value) -> Result<(), Failure> {
    tell(json, answer, "redriven", |number| format!("{} will come again", count(number, "message")))
}

fn purge(service: &Service, queue: Option<&str>) -> Result<(), Failure> {
    let answer = service.connect()?.delete(&format!("/api/dead-letters?{}", and_queue(queue)))?;
    tell(service.json, &answer, "purged", |number| format!("{} forgotten", count(number, "message")))
}

fn tell(json: bool, answer: &Value, number: &str, words: impl Fn(u64) -> String) -> Result<(), Failure> {
    if json {
        return Ok(table::lines(std::slice::from_ref(answer))?);
    }
    eprintln!("{}", words(answer[number].as_u64().unwrap_or(0)));
    Ok(())
}
