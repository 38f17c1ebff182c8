//! `laneway pools`: the pools of a running service, and changing them while they run.

use std::time::Duration;

use clap::{Subcommand, value_parser};
use serde_json::{Map, Value};

use crate::client::{Service, part};
use crate::exit::Failure;
use crate::table::{self, Column, field, printable};

/// What `laneway pools` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway pools                                          how they stand
  laneway pools set orders concurrency=50                change a pool while it runs, or add one
  laneway pools set orders ratePerSecond=100 capacity=5000
  laneway pools set orders ratePerSecond=null            no limit
  laneway pools pause orders                             its messages wait; `resume` lets them go on
  laneway pools drain orders                             it takes nothing more and runs what it has
  laneway pools remove orders                            drains, then removes it")]
pub(crate) struct Options {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    service: Service,
}

#[derive(Subcommand)]
enum What {
    /// How the pools stand (what `pools` alone does)
    List,
    /// Change settings of a pool, or add it
    Set {
        /// The pool
        code: String,
        /// Settings: concurrency, capacity, groupCapacity, groupLatencyMillis, ratePerSecond, groupRatePerSecond, attempts,
        /// backoffMillis, backoffMaxMillis, exhausted (deadLetter, parkGroup, giveBack), giveBackMillis, ungrouped, affinity
        #[arg(value_name = "SETTING=VALUE", required = true, value_parser = setting)]
        settings: Vec<(String, Value)>,
    },
    /// Let its messages wait
    Pause(One),
    /// Let them go on
    Resume(One),
    /// Take nothing more and run what is there
    Drain(One),
    /// Drain it, then remove it
    Remove {
        #[command(flatten)]
        one: One,
        /// How long to wait, at most as long as `http.request-timeout`; a pool that needs longer goes on draining
        #[arg(long, value_name = "S", default_value_t = 20, value_parser = value_parser!(u64).range(1..=86_400))]
        limit_seconds: u64,
    },
}

#[derive(clap::Args)]
struct One {
    /// The pool
    code: String,
}

const COLUMNS: [Column; 10] = [
    ("pool", |pool| field(pool, "code")),
    ("state", |pool| field(pool, "state")),
    (">slots", |pool| field(pool, "concurrency")),
    (">in flight", |pool| field(pool, "inFlight")),
    (">waiting", |pool| field(pool, "waiting")),
    (">groups", |pool| field(pool, "groups")),
    (">delivered", |pool| field(pool, "counts.succeeded")),
    (">dead letters", |pool| field(pool, "counts.failed")),
    (">p50", |pool| millis(pool, "latency.p50Millis")),
    (">p99", |pool| millis(pool, "latency.p99Millis")),
];

pub(crate) fn millis(row: &Value, name: &str) -> String {
    let value = row.pointer(&format!("/{}", name.replace('.', "/"))).and_then(Value::as_f64);
    value.map_or_else(String::new, |value| match value {
        value if value < 10.0 => format!("{value:.1} ms"),
        value => format!("{value:.0} ms"),
    })
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let service = &options.service;
    match &options.what {
        None | Some(What::List) => list(service),
        Some(What::Set { code, settings }) => set(service, code, settings),
        Some(What::Pause(one)) => turn(service, &one.code, "pause", "is paused; its messages wait"),
        Some(What::Resume(one)) => turn(service, &one.code, "resume", "goes on"),
        Some(What::Drain(one)) => {
            turn(service, &one.code, "drain", "takes nothing more and runs what it has")
        }
        Some(What::Remove { one, limit_seconds }) => {
            remove(service, &one.code, Duration::from_secs(*limit_seconds))
        }
    }
}

fn list(service: &Service) -> Result<(), Failure> {
    let pools = service.connect()?.get("/api/pools")?;
    Ok(table::print(service.json, &pools, &COLUMNS, "there are no pools")?)
}

fn set(service: &Service, code: &str, settings: &[(String, Value)]) -> Result<(), Failure> {
    let body: Map<String, Value> = settings.iter().cloned().collect();
    let pool = service.connect()?.put(&format!("/api/pools/{}", part(code)), &Value::Object(body))?;
    Ok(table::print(service.json, &pool, &COLUMNS, "")?)
}

fn turn(service: &Service, code: &str, verb: &str, told: &str) -> Result<(), Failure> {
    let answer = service.connect()?.post(&format!("/api/pools/{}/{verb}", part(code)), None)?;
    tell(service.json, code, &answer, told)
}

fn remove(service: &Service, code: &str, limit: Duration) -> Result<(), Failure> {
    let path = format!("/api/pools/{}?limitMillis={}", part(code), limit.as_millis());
    let answer = service.connect()?.delete_within(&path, limit)?;
    tell(service.json, code, &answer, "has run what it had and is gone")
}

fn tell(json: bool, code: &str, answer: &Value, told: &str) -> Result<(), Failure> {
    if json {
        let done = serde_json::json!({"code": code, "done": true});
        return Ok(table::lines(&[if answer.is_null() { done } else { answer.clone() }])?);
    }
    eprintln!("{} {told}", printable(code));
    Ok(())
}

/// `name=value`, where the value is JSON, or else a text.
fn setting(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("expected SETTING=VALUE, such as concurrency=50")?;
    if name.is_empty() || value.is_empty() {
        return Err("expected SETTING=VALUE, such as concurrency=50".to_owned());
    }
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
    Ok((name.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_are_json_or_text() {
        assert_eq!(setting("concurrency=50"), Ok(("concurrency".to_owned(), json!(50))));
        assert_eq!(setting("ratePerSecond=null"), Ok(("ratePerSecond".to_owned(), Value::Null)));
        assert_eq!(setting("exhausted=park"), Ok(("exhausted".to_owned(), json!("park"))));
        assert!(setting("concurrency").is_err() && setting("=5").is_err() && setting("a=").is_err());
    }
}
