//! `laneway doctor`: says of a configuration whether each broker can be reached, has what is needed, and keeps the order of groups, and how to mend what does not.
//!
//! It asks the brokers themselves, one after the other, and the server of the standby's lease, and changes nothing. The service need not run.

use std::time::Duration;

use anyhow::Context as _;
use laneway_router::config::Config;
use laneway_router::source::broker::{Broker, Examination, Finding, Level, Role};
use laneway_router::standby;
use serde_json::{Value, json};

use super::config::{Layered, load};
use crate::exit::Failure;
use crate::table::{self, count, printable};

/// A broker that has not answered all questions after this time is passed over.
const EXAMINATION: Duration = Duration::from_secs(30);

/// What to do about that.
const MEND: &str = "see whether the address is right, whether the broker runs, and what is between";

/// What `laneway doctor` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway doctor                            of laneway.conf, if it is here
  laneway doctor --config laneway.conf
  laneway doctor --json                     one object per finding

Errors end it with code 1; warnings do not.")]
pub(crate) struct Options {
    #[command(flatten)]
    layers: Layered,
    /// Print one JSON object per finding
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let config = load(&options.layers.layering())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    let found = runtime.block_on(examine_all(&config));
    if options.json {
        table::lines(&found.iter().map(|(of, finding)| as_json(of, finding)).collect::<Vec<_>>())?;
    } else {
        tell(&found);
    }
    match found.iter().filter(|(_, finding)| finding.level == Level::Error).count() {
        0 => Ok(()),
        errors => Err(anyhow::anyhow!("{}", count(errors as u64, "error")).into()),
    }
}

/// What the findings are about: `source orders (nats)`.
type About = String;

async fn examine_all(config: &Config) -> Vec<(About, Finding)> {
    let mut found = Vec::new();
    if !config.queue.names.is_empty() {
        let what = format!(
            "{} in {}: ordered by this process alone",
            count(config.queue.names.len() as u64, "queue"),
            config.queue.path.display()
        );
        found.push(("embedded queue".to_owned(), Finding::fine(what)));
    }
    if let Some(standby) = &config.standby {
        let about = format!("standby {:?}", standby.name);
        let findings = examine_standby(config, standby).await;
        found.extend(findings.into_iter().map(|finding| (about.clone(), finding)));
    }
    let sources = config.sources.iter().map(|(name, broker)| (Role::Source, name, broker));
    let sinks = config.sinks.iter().map(|(name, broker)| (Role::Sink, name, broker));
    for (role, name, broker) in sources.chain(sinks) {
        let word = if role == Role::Source { "source" } else { "sink" };
        let about = format!("{word} {name} ({})", broker.kind());
        let findings = examine(config, role, name, &**broker).await;
        found.extend(findings.into_iter().map(|finding| (about.clone(), finding)));
    }
    found
}

async fn examine(config: &Config, role: Role, name: &str, broker: &dyn Broker) -> Vec<Finding> {
    let examination =
        Examination { name: name.into(), role, lease: config.lease, attempt: config.mediator.http.timeout };
    match tokio::time::timeout(EXAMINATION, broker.examine(&examination)).await {
        Ok(findings) => findings,
        Err(_) => {
            vec![Finding::error(format!("it has not answered within {} s", EXAMINATION.as_secs()), MEND)]
        }
    }
}

/// Whether the lease can be asked for and taken, and who has it.
async fn examine_standby(config: &Config, standby: &standby::Settings) -> Vec<Finding> {
    let lease = match standby.open() {
        Ok(lease) => lease,
        Err(error) => return vec![Finding::error(error, "set laneway.standby.lease")],
    };
    let sight = match tokio::time::timeout(EXAMINATION, lease.look()).await {
        Ok(Ok(sight)) => sight,
        Ok(Err(error)) => {
            return vec![Finding::error(format!("the lease cannot be asked for: {error}"), MEND)];
        }
        Err(_) => return vec![Finding::error("the lease's server does not answer", MEND)],
    };
    let mut found = vec![match sight.last {
        Some(holder) if holder.left > Duration::ZERO => Finding::fine(format!(
            "{} has the lease under token {}; another one would stand by, and take over {:?} after it was last renewed",
            holder.name, holder.token, standby.time
        )),
        Some(holder) => {
            Finding::fine(format!("nobody has the lease; the next token is {}", holder.token + 1))
        }
        None => Finding::fine("nobody has had the lease yet"),
    }];
    if !sight.is_allowed {
        let mend = "GRANT CREATE on the database for the first start, or INSERT, SELECT and UPDATE on laneway_queue.lease afterwards";
        found.push(Finding::error("this user may not take the lease", mend));
    }
    if !config.queue.names.is_empty() {
        let what = "the embedded queue is a file of this machine: what is in it when another one takes over waits until this one works again";
        found.push(Finding::warning(
            what,
            "read from a broker that all of them reach, with laneway.queue.queues = []",
        ));
    }
    found
}

fn word(level: Level) -> &'static str {
    match level {
        Level::Fine => "ok",
        Level::Warning => "warning",
        Level::Error => "error",
    }
}

fn as_json(about: &str, finding: &Finding) -> Value {
    json!({"about": about, "level": word(finding.level), "what": finding.what, "mend": finding.mend})
}

fn tell(found: &[(About, Finding)]) {
    let mut before = "";
    for (about, finding) in found {
        if about != before {
            println!("{}", printable(about));
            before = about;
        }
        println!("  {:<8} {}", word(finding.level), printable(&finding.what));
        if let Some(mend) = &finding.mend {
            println!("  {:<8} → {}", "", printable(mend));
        }
    }
}
