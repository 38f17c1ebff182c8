//! `bench router --source KIND`: from a real broker through the router, beside a plain consumer of the same client that only acknowledges.
//!
//! One server serves all runs ([`Host`]). Every run drains queues of its own, which another process has filled, so that what a run needs of memory is its own; a [`Place`] says where they
//! are. The router's target is a function that checks the order of each group and is done: what is measured is reading, routing and settling, from the first subscription until the broker has heard of
//! every message and the connections are closed, which is what the plain consumer's time is compared with. Both are connected before the clock starts. A [`Kind`] of broker takes part with a
//! server and a [`Fixture`].

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
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

/// Who takes part: the router, and a plain consumer that reads the queues as the router does; each also on a runtime of one thread, as it would have on one CPU.
pub(super) const CONTENDERS: &[&str] = &["laneway", "plain", "laneway-one-thread", "plain-one-thread"];

/// Who fills the queues of a server that serves all runs.
pub(super) const FILLER: &str = "filler";

/// A kind of broker.
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// Who takes part.
    pub(super) contenders: &'static [&'static str],
    /// Starts a server of it.
    pub(super) start: fn() -> Result<Box<dyn Host>>,
    /// What a run needs to know of it.
    pub(super) fixture: fn(Place) -> Box<dyn Fixture>,
}

/// Those that are in this program.
const KINDS: &[Kind] = &[
    #[cfg(feature = "nats")]
    super::nats::KIND,
    #[cfg(feature = "rabbitmq")]
    super::rabbitmq::KIND,
    #[cfg(feature = "postgres")]
    super::postgres::KIND,
    #[cfg(feature = "sqs")]
    super::sqs::KIND,
    #[cfg(feature = "activemq")]
    super::activemq::KIND,
];

impl Kind {
    /// The kind of this name.
    pub(super) fn find(name: &str) -> Result<&'static Kind> {
        let known = || KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ");
        let found = KINDS.iter().find(|kind| kind.name == name);
        found.with_context(|| format!("no source {name:?} in this program: there are {}", known()))
    }
}

/// Groups of all queues together.
const GROUPS: usize = 10_000;

/// What a kind of broker brings.
pub(super) trait Fixture {
    /// How many messages there are, unless somebody says otherwise: enough for a second or more.
    fn messages(&self) -> u64 {
        100_000
    }

    /// The settings of one of so many queues.
    fn broker(&self, queue: usize, queues: usize) -> Arc<dyn Broker>;

    /// A message as it is published when the queues are filled.
    fn dress(&self, outgoing: Outgoing) -> Outgoing {
        outgoing
    }

    /// Connects the plain client. What it gives reads so many messages of a queue, as a user would who needs no order, and acknowledges each.
    fn connect(&self, queue: usize, queues: usize, count: u64) -> BoxFuture<'_, Result<Consuming>>;
}

/// A plain consumer at work, as a task of its own.
pub(super) type Consuming = BoxFuture<'static, Result<()>>;

/// A server that serves all runs. It ends when it is dropped.
pub(super) trait Host {
    /// Where it is.
    fn address(&self) -> String;

    /// Makes the queues of a run, where neither source nor sink does.
    fn make_queues(&self, _place: &Place, _queues: usize) -> Result<()> {
        Ok(())
    }
}

/// One that needs no more than to run.
pub(super) struct Running<S> {
    pub(super) address: String,
    pub(super) _server: S,
}

impl<S> Host for Running<S> {
    fn address(&self) -> String {
        self.address.clone()
    }
}

/// Where a run finds its queues: at this server, under names that no other run has.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Place {
    pub(super) address: String,
    pub(super) run: u32,
    /// Who will read what is put there.
    pub(super) reader: String,
}

impl Place {
    /// A name of this run's own, of letters that every broker takes.
    pub(super) fn name(&self, what: &str) -> String {
        format!("run_{}_{what}", self.run)
    }

    /// That of a queue.
    pub(super) fn queue(&self, queue: usize) -> String {
        self.name(&format!("queue_{queue}"))
    }
}

/// How many queues a workload has.
pub(super) fn queues(workload: &str) -> Result<usize> {
    let known = WORKLOADS.iter().find(|(name, _)| *name == workload);
    Ok(known.context("unknown workload")?.1)
}

pub(super) async fn run(spec: &Spec, kind: &str) -> Result<Outcome> {
    let queues = queues(&spec.workload)?;
    let fixture = (Kind::find(kind)?.fixture)(spec.place.clone().context("no server")?);
    let messages = spec.messages.unwrap_or(fixture.messages());
    let mut counts = vec![0; queues];
    outgoings(queues, messages).for_each(|(queue, _)| counts[queue] += 1);
    match spec.contender.as_str() {
        FILLER => fill(&*fixture, queues, messages).await.map(|()| Outcome::default()),
        router if router.starts_with("laneway") => route(&*fixture, queues, spec.pool, &counts).await,
        _ => consume(&*fixture, queues, &counts).await,
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

/// A target that is done at once, and has seen the order of every group. It does as little as that takes: its time is the router's.
struct Checker {
    /// The last position of each group.
    last: Vec<AtomicU64>,
    violations: Mutex<Vec<String>>,
    handled: AtomicU64,
    all: u64,
    finished: Notify,
}

#[derive(serde::Deserialize)]
struct Payload {
    group: usize,
    position: u64,
}

impl Checker {
    fn new(all: u64) -> Self {
        Checker {
            last: (0..GROUPS).map(|_| AtomicU64::new(0)).collect(),
            violations: Mutex::default(),
            handled: AtomicU64::new(0),
            all,
            finished: Notify::new(),
        }
    }

    /// What is wrong with a message, if anything is.
    fn check(&self, call: &Call<'_>) -> Option<String> {
        let payload =
            call.message.payload.as_ref().and_then(|payload| serde_json::from_str(payload.get()).ok());
        let Some(Payload { group, position }) = payload.filter(|payload: &Payload| payload.group < GROUPS)
        else {
            return Some(format!("{}: not what was published", call.message.id));
        };
        let last = self.last[group].swap(position, Relaxed);
        (position != last + 1).then(|| format!("{}: {position} after {last}", call.key))
    }
}

impl Mediator for Checker {
    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict> {
        if let Some(violation) = self.check(&call) {
            self.violations.lock().expect("nothing panics under it").push(violation);
        }
        if self.handled.fetch_add(1, Relaxed) + 1 == self.all {
            self.finished.notify_one();
        }
        Box::pin(std::future::ready(Verdict::Done))
    }
}

async fn route(fixture: &dyn Fixture, queues: usize, pool: usize, counts: &[u64]) -> Result<Outcome> {
    let all = counts.iter().sum();
    let checker = Arc::new(Checker::new(all));
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
    let tasks: Vec<_> = consuming.into_iter().map(tokio::spawn).collect();
    for task in tasks {
        task.await??;
    }
    clock.stop(counts.iter().sum(), &mut outcome);
    Ok(outcome)
}
