//! `bench router --source KIND`: from a real broker through the router, beside a plain consumer of the same client that only acknowledges.
//!
//! Every run drains queues that were filled for it. Its server is its own where that starts at once; one that takes seconds to start serves all runs ([`Host`]), and is filled by
//! another process, so that what a run needs of memory is its own. The router's target is a function that checks the order of each group and is done: what is measured is reading,
//! routing and settling, from the first subscription until the broker has heard of every message and the connections are closed, which is what the plain consumer's time is
//! compared with. Both are connected before the clock starts. A kind of broker takes part with a [`Fixture`].

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::future::{BoxFuture, join_all, try_join_all};
use laneway_router::mediator::{Call, Mediator, Verdict};
use laneway_router::pool::PoolSettings;
use laneway_router::router::{MakeMediator, Router, SourceSettings};
use laneway_router::source::Source;
use laneway_router::source::broker::Broker;
use laneway_router::source::sink::Outgoing;
use tokio::sync::Notify;

use super::Spec;
use super::run::{Clock, Zipf};
use crate::drive::Outcome;

/// The workloads with a source: their names, and how many queues each has, with a pool for each.
pub(super) const WORKLOADS: [(&str, usize); 3] = [("1-queue", 1), ("8-queues", 8), ("100-queues", 100)];

/// Who takes part.
pub(super) const CONTENDERS: [&str; 2] = ["laneway", "plain"];

/// Who fills the queues of a server that serves all runs.
pub(super) const FILLER: &str = "filler";

/// The kinds that are in this program.
pub(super) const KINDS: &[&str] = &[
    #[cfg(feature = "nats")]
    "nats",
    #[cfg(feature = "rabbitmq")]
    "rabbitmq",
    #[cfg(feature = "postgres")]
    "postgres",
];

/// Messages, unless somebody says otherwise.
const MESSAGES: u64 = 100_000;

/// Groups of all queues together.
const GROUPS: usize = 10_000;

/// What a kind of broker brings.
pub(super) trait Fixture {
    /// The settings of one of so many queues.
    fn broker(&self, queue: usize, queues: usize) -> Arc<dyn Broker>;

    /// A message as it is published when the queues are filled.
    fn dress(&self, outgoing: Outgoing) -> Outgoing {
        outgoing
    }

    /// Connects the plain client. What it gives reads so many messages of a queue, as a user would who needs no order, and acknowledges each.
    fn connect(&self, queue: usize, queues: usize, count: u64) -> BoxFuture<'_, Result<Consuming<'_>>>;
}

/// A plain consumer at work.
pub(super) type Consuming<'a> = BoxFuture<'a, Result<()>>;

/// A server that serves all runs. It ends with it.
#[cfg_attr(not(feature = "rabbitmq"), allow(dead_code, reason = "all other servers are their runs' own"))]
pub(super) struct Host {
    /// Where it is.
    pub(super) address: String,
    _server: Box<dyn Any>,
}

impl Host {
    /// Starts a server of this kind, if it is one that serves all runs.
    pub(super) fn start(kind: &str) -> Result<Option<Host>> {
        match kind {
            #[cfg(feature = "rabbitmq")]
            "rabbitmq" => {
                let server = laneway_servers::rabbitmq::start()?;
                let address = laneway_servers::rabbitmq::url(&server);
                Ok(Some(Host { address, _server: Box::new(server) }))
            }
            _ => Ok(None),
        }
    }
}

#[cfg_attr(
    not(feature = "rabbitmq"),
    allow(unused_variables, reason = "all other servers are their runs' own")
)]
fn fixture(kind: &str, address: String) -> Result<Box<dyn Fixture>> {
    match kind {
        #[cfg(feature = "nats")]
        "nats" => Ok(Box::new(super::nats::Nats::start()?)),
        #[cfg(feature = "rabbitmq")]
        "rabbitmq" => Ok(Box::new(super::rabbitmq::Rabbit::new(address))),
        #[cfg(feature = "postgres")]
        "postgres" => Ok(Box::new(super::postgres::Postgres::start()?)),
        other => bail!("no source {other:?} in this program: there are {}", KINDS.join(", ")),
    }
}

pub(super) async fn run(spec: &Spec, kind: &str) -> Result<Outcome> {
    let known = WORKLOADS.iter().find(|(name, _)| *name == spec.workload);
    let queues = known.context("unknown workload")?.1;
    let fixture = fixture(kind, spec.address.clone().unwrap_or_default())?;
    let messages = spec.messages.unwrap_or(MESSAGES);
    if spec.address.is_none() || spec.contender == FILLER {
        fill(&*fixture, queues, messages).await?;
    }
    let mut counts = vec![0; queues];
    outgoings(queues, messages).for_each(|(queue, _)| counts[queue] += 1);
    match spec.contender.as_str() {
        FILLER => Ok(Outcome::default()),
        "laneway" => route(&*fixture, queues, spec.pool, &counts).await,
        "plain" => consume(&*fixture, queues, &counts).await,
        other => bail!("unknown contender {other:?}"),
    }
}

/// Publishes the messages, ordered by group.
async fn fill(fixture: &dyn Fixture, queues: usize, messages: u64) -> Result<()> {
    /// So many are published together, of all queues.
    const BATCH: usize = 8_192;
    let sinks = try_join_all((0..queues).map(async |queue| {
        let broker = fixture.broker(queue, queues);
        // Also opened as a source, so that everything that is made at the first opening is there.
        broker.open_source(format!("queue-{queue}").into()).await?.close().await;
        Ok::<_, anyhow::Error>(broker.open_sink(format!("queue-{queue}").into()).await?)
    }))
    .await?;
    let mut outgoings = outgoings(queues, messages).peekable();
    while outgoings.peek().is_some() {
        let mut batches: Vec<Vec<Outgoing>> = vec![Vec::new(); queues];
        outgoings
            .by_ref()
            .take(BATCH)
            .for_each(|(queue, outgoing)| batches[queue].push(fixture.dress(outgoing)));
        try_join_all(sinks.iter().zip(batches).map(|(sink, batch)| sink.publish(batch))).await?;
    }
    join_all(sinks.iter().map(|sink| sink.close())).await;
    Ok(())
}

/// All messages, each with its queue: the same every time.
fn outgoings(queues: usize, messages: u64) -> impl Iterator<Item = (usize, Outgoing)> {
    let mut zipf = Zipf::new(GROUPS);
    let mut positions = vec![0u64; GROUPS];
    (0..messages).map(move |number| {
        let group = zipf.next();
        positions[group] += 1;
        (group % queues, outgoing(number, group, group % queues, positions[group]))
    })
}

fn outgoing(number: u64, group: usize, queue: usize, position: u64) -> Outgoing {
    let text = format!(
        r#"{{"id":"m-{number}","poolCode":"pool-{queue}","mediationType":"SIMULATED","messageGroupId":"group-{group}","payload":{{"group":{group},"position":{position}}}}}"#
    );
    Outgoing {
        id: format!("m-{number}"),
        group: Some(format!("group-{group}").into()),
        deduplication_id: None,
        text: text.into_bytes().into(),
        headers: Default::default(),
    }
}

/// A target that is done at once, and has seen the order of every group.
struct Checker {
    last: Mutex<HashMap<String, u64>>,
    violations: Mutex<Vec<String>>,
    handled: AtomicU64,
    all: u64,
    finished: Notify,
}

#[derive(serde::Deserialize)]
struct Payload {
    position: u64,
}

impl Mediator for Checker {
    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict> {
        let payload =
            call.message.payload.as_ref().and_then(|payload| serde_json::from_str(payload.get()).ok());
        let position = payload.map_or(0, |payload: Payload| payload.position);
        {
            let mut last = self.last.lock().expect("nothing panics under it");
            let last = last.entry(call.key.to_owned()).or_default();
            if position != *last + 1 {
                let what = format!("{}: {position} after {last}", call.key);
                self.violations.lock().expect("nothing panics under it").push(what);
            }
            *last = position;
        }
        if self.handled.fetch_add(1, Relaxed) + 1 == self.all {
            self.finished.notify_one();
        }
        Box::pin(std::future::ready(Verdict::Done))
    }
}

async fn route(fixture: &dyn Fixture, queues: usize, pool: usize, counts: &[u64]) -> Result<Outcome> {
    let all = counts.iter().sum();
    let checker = Arc::new(Checker {
        last: Mutex::default(),
        violations: Mutex::default(),
        handled: AtomicU64::new(0),
        all,
        finished: Notify::new(),
    });
    let shared = Arc::clone(&checker);
    let make: MakeMediator = Arc::new(move |_| Arc::clone(&shared) as Arc<dyn Mediator>);
    let concurrency = if queues == 1 { pool } else { pool.min(64) };
    let settings =
        PoolSettings { concurrency, capacity: 4_096, group_capacity: 1_024, ..PoolSettings::default() };
    let router = Router::start(settings.clone(), make)?;
    let mut sources: Vec<Arc<dyn Source>> = Vec::new();
    for queue in 0..queues {
        router.add_pool(&format!("pool-{queue}"), settings.clone())?;
        sources.push(fixture.broker(queue, queues).open_source(format!("queue-{queue}").into()).await?);
    }
    let mut outcome = Outcome::default();
    let clock = Clock::start();
    for source in &sources {
        router.add_source(Arc::clone(source), SourceSettings::default());
    }
    checker.finished.notified().await;
    let report = router.shutdown(Duration::from_secs(10)).await;
    clock.stop(all, &mut outcome);
    ensure!(report.settled, "not everything was settled");
    outcome.violations.append(&mut checker.violations.lock().expect("nothing panics under it"));
    let handled = checker.handled.load(Relaxed);
    if handled != all {
        outcome.violations.push(format!("{handled} were handled of {all}"));
    }
    Ok(outcome)
}

async fn consume(fixture: &dyn Fixture, queues: usize, counts: &[u64]) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let connecting = counts.iter().enumerate().map(|(queue, count)| fixture.connect(queue, queues, *count));
    let consuming = try_join_all(connecting).await?;
    let clock = Clock::start();
    try_join_all(consuming).await?;
    clock.stop(counts.iter().sum(), &mut outcome);
    Ok(outcome)
}
