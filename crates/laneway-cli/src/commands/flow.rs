//! `laneway flow`: durable multi-step work on Postgres, from the command line.
//!
//! Every verb speaks to the database itself; there is no service in between. The database is `--database`, or `DATABASE_URL`, or the one that
//! `laneway flow dev` runs in this folder.

mod demo;
mod dev;
mod graph;
mod handlers;
mod watch;
mod worker;

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Subcommand, value_parser};
use laneway_flow::look::{self, RunFilter};
use laneway_flow::worker::StartError;
use laneway_flow::{Definition, FlowError, MigrateError, Start, client};
use serde_json::{Value, json};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use uuid::Uuid;

use crate::exit::Failure;
use crate::table::{self, Column, count, field};

/// What `laneway flow` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway flow dev --once                       see a flow run, on a Postgres of its own: nothing else is needed
  laneway flow dev                              the same, for trying the other verbs from another terminal
  laneway flow migrate --database URL           make the schema, or bring it up to date
  laneway flow define flow.json                 make a flow of a file
  laneway flow worker flow.json                 do its steps: by commands, or by calls of HTTP
  laneway flow start data_flow '{\"url\": \"http://example\"}' --watch
  laneway flow runs --status failed
  laneway flow retry 3f0e...                    go on where it failed
  laneway flow cancel --flow data_flow --yes    end all runs of a flow
  laneway flow prune --older-than 30d --yes     delete runs that ended long ago

The database is --database, or DATABASE_URL, or that of a `laneway flow dev` in this folder.")]
pub(crate) struct Options {
    #[command(subcommand)]
    what: What,
    /// The database, as postgres://user:password@host:port/name
    #[arg(long, global = true, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    database: Option<String>,
    /// Print data as JSON, one object per line, instead of for people
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum What {
    /// Make the schema `pgflow`, or bring it up to date; safe to repeat
    Migrate,
    /// The flows
    List,
    /// A flow: its steps, what they wait for, and where their tasks go
    Show {
        /// Its slug
        flow: String,
    },
    /// Make a flow of a file, or change what can be changed
    Define {
        /// JSON; `laneway flow worker --example` prints one
        file: PathBuf,
        /// Replace a flow of another shape, and delete its runs
        #[arg(long)]
        allow_data_loss: bool,
    },
    /// Start a run, and print its id
    Start {
        /// The flow's slug
        flow: String,
        /// JSON; `-` reads it from standard input
        #[arg(default_value = "{}")]
        input: String,
        /// A repetition with the same text is the first run
        #[arg(long, value_name = "TEXT")]
        idempotency_key: Option<String>,
        /// Runs of one key go one after another
        #[arg(long, value_name = "TEXT")]
        key: Option<String>,
        /// The run's id, instead of one of the database's
        #[arg(long, value_name = "UUID")]
        run_id: Option<Uuid>,
        /// Watch it until it is over
        #[arg(long)]
        watch: bool,
    },
    /// The newest runs
    Runs {
        /// Of this flow
        #[arg(long, value_name = "SLUG")]
        flow: Option<String>,
        /// In this status
        #[arg(long, value_parser = ["waiting", "started", "completed", "failed", "cancelled"])]
        status: Option<String>,
        /// Of this key
        #[arg(long, value_name = "TEXT")]
        key: Option<String>,
        /// How many, at most
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = value_parser!(u32).range(1..=1_000))]
        most: u32,
    },
    /// A run as a graph, live until it is over; exits with 4 if it failed
    Watch {
        /// Its id
        run: Uuid,
        /// One look only
        #[arg(long)]
        once: bool,
    },
    /// Complete a task by hand
    Complete {
        /// The run's id
        run: Uuid,
        /// The step
        step: String,
        /// JSON; `-` reads it from standard input
        #[arg(default_value = "null")]
        output: String,
        /// Which task of a map
        #[arg(long, value_name = "N", default_value_t = 0)]
        index: i32,
        /// Fail it instead, with this reason
        #[arg(long, value_name = "WHY", conflicts_with = "output")]
        fail: Option<String>,
    },
    /// The output of a run, or of one of its steps, whole
    Output {
        /// The run's id
        run: Uuid,
        /// The step
        step: Option<String>,
    },
    /// Let a failed or cancelled run go on where it stopped, or all failed runs of a flow
    #[command(override_usage = "laneway flow retry <RUN>\n       laneway flow retry --flow <SLUG>")]
    Retry {
        #[command(flatten)]
        which: Which,
    },
    /// End a run, or all runs of a flow that are not over
    #[command(
        override_usage = "laneway flow cancel <RUN> [--reason <TEXT>]\n       laneway flow cancel --flow <SLUG> --yes"
    )]
    Cancel {
        #[command(flatten)]
        which: Which,
        /// Why
        #[arg(long, value_name = "TEXT", conflicts_with = "flow")]
        reason: Option<String>,
        /// I am sure; needed for a whole flow
        #[arg(long, required_unless_present = "run")]
        yes: bool,
    },
    /// Delete a run and all that is known of it, or a flow with its steps, its runs and its queues
    #[command(
        override_usage = "laneway flow delete <RUN> --yes\n       laneway flow delete --flow <SLUG> --yes"
    )]
    Delete {
        #[command(flatten)]
        which: Which,
        /// I am sure
        #[arg(long, required = true)]
        yes: bool,
    },
    /// Delete runs that ended long ago
    Prune {
        /// How long ago: 30d, 12h, 90m, 45s
        #[arg(long, value_name = "TIME", value_parser = duration)]
        older_than: Duration,
        /// Of this flow only
        #[arg(long, value_name = "SLUG")]
        flow: Option<String>,
        /// I am sure
        #[arg(long, required = true)]
        yes: bool,
    },
    /// The workers, and who of them lives
    Workers,
    /// The queues that flows use, and what waits in them
    Queues,
    /// Do the steps of flows: by commands or calls of HTTP that a file names, or those of the demonstration
    Worker(worker::Options),
    /// A Postgres in a folder of its own, with the schema and a flow to try; nothing else is needed
    Dev(dev::Options),
}

/// A run, or a whole flow.
#[derive(clap::Args)]
struct Which {
    /// The run's id
    #[arg(required_unless_present = "flow", conflicts_with = "flow")]
    run: Option<Uuid>,
    /// The flow, instead of a run
    #[arg(long, value_name = "SLUG")]
    flow: Option<String>,
}

impl Which {
    /// Clap has seen to it that there is one of them.
    fn one(&self) -> Result<Uuid, &str> {
        self.run.ok_or_else(|| self.flow.as_deref().unwrap_or_default())
    }
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    match &options.what {
        What::Dev(dev) => dev::run(&runtime, dev, options.json),
        What::Worker(worker) if worker.example => worker::print_example(),
        what => runtime.block_on(async {
            let pool = connect(&options.url()?).await?;
            perform(what, &pool, options.json).await
        }),
    }
}

impl Options {
    fn url(&self) -> Result<String, Failure> {
        self.database.clone().or_else(dev::url_here).ok_or_else(|| {
            Failure::Usage(
                "which database? Give --database URL or DATABASE_URL, or run `laneway flow dev` in this folder".to_owned(),
            )
        })
    }
}

/// Connections for one verb.
async fn connect(url: &str) -> Result<PgPool, Failure> {
    let options = PgPoolOptions::new().max_connections(8).acquire_timeout(Duration::from_secs(10));
    match options.connect(url).await {
        Ok(pool) => Ok(pool),
        Err(sqlx::Error::Configuration(_)) => Err(Failure::Usage(
            "this is no URL of a database; postgres://user@127.0.0.1:5432/name would be one".to_owned(),
        )),
        Err(error) => Err(Failure::Unreachable(format!("no database answers there: {error}"))),
    }
}

async fn perform(what: &What, pool: &PgPool, json: bool) -> Result<(), Failure> {
    match what {
        What::Migrate => migrate(pool, json).await,
        What::List => print(
            json,
            look::flows(pool).await,
            &FLOWS,
            "there are no flows: `laneway flow define FILE` makes one",
        ),
        What::Show { flow } => show(pool, flow, json).await,
        What::Define { file, allow_data_loss } => define(pool, file, *allow_data_loss, json).await,
        What::Start { flow, input, idempotency_key, key, run_id, watch } => {
            let mut start = Start::named(flow, value(input)?);
            if let Some(text) = idempotency_key {
                start = start.idempotency_key(text);
            }
            if let Some(text) = key {
                start = start.key(text);
            }
            if let Some(id) = run_id {
                start = start.run_id(*id);
            }
            let run = start.on(pool).await.map_err(failure)?;
            if *watch {
                return watch::watch(pool, run, json, false).await;
            }
            if json {
                table::lines(&[json!({"runId": run.to_string()})])?
            } else {
                println!("{run}")
            }
            Ok(())
        }
        What::Runs { flow, status, key, most } => {
            let filter = RunFilter {
                flow: flow.clone(),
                status: status.clone(),
                key: key.clone(),
                limit: Some(*most),
            };
            print(json, look::runs(pool, &filter).await, &RUNS, "there are no such runs")
        }
        What::Watch { run, once } => watch::watch(pool, *run, json, *once).await,
        What::Complete { run, step, output, index, fail } => {
            let changed = match fail {
                Some(why) => client::fail(pool, *run, step, *index, why).await,
                None => client::complete(pool, *run, step, *index, &value(output)?).await,
            };
            let words = "nothing to complete: there is no such task, or it is over";
            changed_or(json, changed, "done", words)
        }
        What::Output { run, step } => output(pool, *run, step.as_deref()).await,
        What::Retry { which } => match which.one() {
            Ok(run) => {
                let words = "nothing to retry: the run neither failed nor was cancelled";
                changed_or(json, client::retry(pool, run).await, "it goes on", words)
            }
            Err(flow) => changed_runs(json, client::retry_flow(pool, flow).await, "retried", "go on"),
        },
        // Clap has seen to it that `yes` was typed where it is needed.
        What::Cancel { which, reason, yes: _ } => match which.one() {
            Ok(run) => {
                let words = "nothing to cancel: the run is over";
                changed_or(json, client::cancel(pool, run, reason.as_deref()).await, "cancelled", words)
            }
            Err(flow) => changed_runs(json, client::cancel_flow(pool, flow).await, "cancelled", "cancelled"),
        },
        What::Delete { which, yes: _ } => match which.one() {
            Ok(run) => {
                let words = format!("nothing to delete: there is no run {run}");
                changed_or(json, client::delete(pool, run).await, "deleted", &words)
            }
            Err(flow) => {
                let done = client::delete_flow(pool, flow).await.map(|()| true);
                changed_or(json, done, "the flow is deleted, with its runs", "")
            }
        },
        What::Prune { older_than, flow, yes: _ } => prune(pool, *older_than, flow.as_deref(), json).await,
        What::Workers => print(json, look::workers(pool).await, &WORKERS, "there are no workers"),
        What::Queues => print(json, look::queues(pool).await, &QUEUES, "no flow uses a queue"),
        What::Worker(options) => worker::run(options, pool).await,
        What::Dev(_) => Ok(()),
    }
}

const FLOWS: [Column; 7] = [
    ("flow", |flow| field(flow, "slug")),
    (">steps", |flow| field(flow, "stepCount")),
    ("queues", |flow| texts(&flow["queues"])),
    (">waiting", |flow| field(flow, "runs.waiting")),
    (">started", |flow| field(flow, "runs.started")),
    (">completed", |flow| field(flow, "runs.completed")),
    (">failed", |flow| field(flow, "runs.failed")),
];

const STEPS: [Column; 6] = [
    ("step", |step| field(step, "slug")),
    ("type", |step| field(step, "stepType")),
    ("after", |step| texts(&step["dependsOn"])),
    ("queue", |step| if step["manual"] == true { "by hand".to_owned() } else { field(step, "queue") }),
    ("when unmet", |step| field(step, "whenUnmet")),
    ("when exhausted", |step| field(step, "whenExhausted")),
];

const RUNS: [Column; 6] = [
    ("run", |run| field(run, "runId")),
    ("flow", |run| field(run, "flow")),
    ("status", |run| field(run, "status")),
    ("key", |run| field(run, "key")),
    ("started", |run| field(run, "startedAt")),
    ("error", |run| field(run, "error")),
];

const WORKERS: [Column; 6] = [
    ("worker", |worker| field(worker, "workerId")),
    ("name", |worker| field(worker, "name")),
    ("queues", |worker| texts(&worker["queues"])),
    (">in hand", |worker| field(worker, "inHand")),
    ("lives", |worker| if worker["alive"] == true { "yes" } else { "no" }.to_owned()),
    ("last sign of life", |worker| field(worker, "lastHeartbeatAt")),
];

const QUEUES: [Column; 4] = [
    ("queue", |queue| field(queue, "queue")),
    (">waiting", |queue| field(queue, "waiting")),
    (">started", |queue| field(queue, "started")),
    ("flows", |queue| texts(&queue["flows"])),
];

fn texts(list: &Value) -> String {
    let texts: Vec<&str> = list.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    texts.join(", ")
}

fn print(
    json: bool,
    rows: Result<Vec<Value>, FlowError>,
    columns: &[Column],
    empty: &str,
) -> Result<(), Failure> {
    Ok(table::print(json, &Value::Array(rows.map_err(failure)?), columns, empty)?)
}

fn changed_or(
    json: bool,
    changed: Result<bool, FlowError>,
    done: &str,
    otherwise: &str,
) -> Result<(), Failure> {
    if !changed.map_err(failure)? {
        return Err(Failure::Refused(otherwise.to_owned()));
    }
    if json {
        table::lines(&[json!({"changed": true})])?
    } else {
        eprintln!("{done}")
    }
    Ok(())
}

/// How many runs a verb for a whole flow has changed; none is no mistake.
fn changed_runs(json: bool, changed: Result<u64, FlowError>, field: &str, done: &str) -> Result<(), Failure> {
    let changed = changed.map_err(failure)?;
    if json {
        return Ok(table::lines(&[json!({field: changed})])?);
    }
    eprintln!("{} {done}", count(changed, "run"));
    Ok(())
}

/// JSON in any case: it is data.
async fn output(pool: &PgPool, run: Uuid, step: Option<&str>) -> Result<(), Failure> {
    match look::output(pool, run, step).await.map_err(failure)? {
        Some(output) => Ok(table::lines(&[output])?),
        None => Err(Failure::Refused("there is no output: it is not completed".to_owned())),
    }
}

async fn migrate(pool: &PgPool, json: bool) -> Result<(), Failure> {
    let done = laneway_flow::migrate(pool).await.map_err(|error| match error {
        MigrateError::Database { error, .. } => failure(error.into()),
        error => Failure::Refused(error.to_string()),
    })?;
    if json {
        return Ok(table::lines(&[json!({"from": done.from, "to": done.to})])?);
    }
    match (done.from, done.to) {
        (0, to) => eprintln!("the schema pgflow is made, version {to}"),
        (from, to) if from == to => eprintln!("the schema pgflow has version {to} already"),
        (from, to) => eprintln!("the schema pgflow went from version {from} to {to}"),
    }
    Ok(())
}

async fn show(pool: &PgPool, flow: &str, json: bool) -> Result<(), Failure> {
    let flow = look::flow(pool, flow).await.map_err(failure)?;
    if json {
        return Ok(table::lines(std::slice::from_ref(&flow))?);
    }
    println!("{}\n", graph::draw(&flow["steps"], graph::width()));
    let key = texts(&flow["keyPath"]);
    table::print(false, &flow["steps"], &STEPS, "it has no steps")?;
    eprintln!(
        "\n{} attempts, {} s before the second, {} s each{}",
        flow["maxAttempts"],
        // It doubles with each attempt, also with the first.
        flow["baseDelay"].as_u64().map_or(0, |seconds| seconds.saturating_mul(2)),
        flow["timeout"],
        if key.is_empty() { String::new() } else { format!("; runs of one {key} go one after another") }
    );
    Ok(())
}

async fn define(pool: &PgPool, file: &Path, allow_data_loss: bool, json: bool) -> Result<(), Failure> {
    let definition = handlers::Program::read(file)?.flow;
    let status = client::compile(pool, &definition, allow_data_loss).await.map_err(failure)?;
    if json {
        return Ok(table::lines(&[json!({"flow": definition.slug, "status": status})])?);
    }
    eprintln!("the flow {} is {status}; its queues are {}", definition.slug, definition.queues().join(", "));
    Ok(())
}

async fn prune(pool: &PgPool, older_than: Duration, flow: Option<&str>, json: bool) -> Result<(), Failure> {
    let mut deleted = 0;
    loop {
        // In pieces, so that nothing is locked for long.
        let now = client::prune(pool, older_than, flow).await.map_err(failure)?;
        deleted += u64::try_from(now).unwrap_or(0);
        if now == 0 {
            break;
        }
    }
    if json {
        return Ok(table::lines(&[json!({"deleted": deleted})])?);
    }
    eprintln!("{} deleted", count(deleted, "run"));
    Ok(())
}

/// JSON as somebody typed it, or from standard input.
fn value(text: &str) -> Result<Value, Failure> {
    /// What the database would refuse anyway, with room to spare.
    const INPUT_BYTES_MAX: u64 = 64 << 20;
    let mut typed = String::new();
    let text = match text {
        "-" => {
            io::stdin().lock().take(INPUT_BYTES_MAX).read_to_string(&mut typed)?;
            &typed
        }
        text => text,
    };
    serde_json::from_str(text).map_err(|error| Failure::Usage(format!("this is no JSON: {error}")))
}

/// A refusal of the database as the binary says it.
fn failure(error: FlowError) -> Failure {
    match error {
        FlowError::Unavailable(error) => {
            Failure::Unreachable(format!("the database does not answer: {error}"))
        }
        FlowError::Database(error) => {
            Failure::Other(anyhow::Error::new(error).context("the database refused"))
        }
        other => Failure::Refused(other.to_string()),
    }
}

fn worker_failure(error: StartError) -> Failure {
    match error {
        StartError::Flow(error) => failure(error),
        other => Failure::BadConfiguration(other.to_string()),
    }
}

/// The definition of a flow with something wrong in it.
fn not_a_flow(error: &laneway_flow::DefineError) -> Failure {
    Failure::BadConfiguration(error.to_string())
}

/// 30d, 12h, 90m, 45s.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time; 30d, 12h, 90m or 45s would be one");
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(wrong)?;
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit {
        "d" => 86_400,
        "h" => 3_600,
        "m" => 60,
        "s" => 1,
        _ => return Err(wrong()),
    };
    // Beyond what Postgres can subtract from a date nothing is old.
    const DAYS_MAX: u64 = 100_000 * 86_400;
    number
        .checked_mul(seconds)
        .filter(|seconds| *seconds <= DAYS_MAX)
        .map(Duration::from_secs)
        .ok_or_else(wrong)
}

/// A flow as data, out of a text.
fn definition(text: &str) -> Result<Definition, Failure> {
    Definition::from_json(text).map_err(|error| not_a_flow(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        assert_eq!(duration("30d"), Ok(Duration::from_secs(30 * 86_400)));
        assert_eq!(duration("45s"), Ok(Duration::from_secs(45)));
        for wrong in ["", "d", "5", "5w", "-1d", "99999999999999999999d", "999999999d", "é"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
