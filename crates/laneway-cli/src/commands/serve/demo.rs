//! `laneway serve --demo`: the router with a load to look at.
//!
//! A real service on a queue that goes away at the end, its own test targets on the same address, and a [`load`] that publishes over HTTP as
//! anybody would. A [`witness`] checks what the targets saw against what was published; the [`view`] shows it until ctrl-c.
//!
//! ```text
//!  load ── POST /api/messages ──► service ── POST /api/test/... ──► test targets
//!    └── published ──► witness ◄── what they saw ──────────────────────┘
//!                        └──► view
//! ```

mod load;
mod view;
mod witness;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use laneway_router::config::{Config, Layering};
use laneway_router::router::PoolView;
use laneway_router::service::Service;
use laneway_router::targets::TestTargets;
use tempfile::TempDir;

use self::load::{KINDS, Kind, Load, POOLS};
use self::view::{KindLook, Look, Summary, View};
use self::witness::{Shared, Witness};
use super::{Options, announce, bad, drain, interrupts, load, quoted};
use crate::client::{Client, DEFAULT_URL};
use crate::exit::Failure;

/// The group whose target is slow.
const SLOW: usize = 1;

/// How long it drains. One group is in retry all the time, so that there is always something left.
const DRAIN: Duration = Duration::from_secs(5);

/// The thread of the load.
type Publisher = JoinHandle<Result<(), Failure>>;

pub(super) async fn run(options: &Options) -> Result<(), Failure> {
    let folder = tempfile::Builder::new().prefix("laneway-demo-").tempdir();
    let folder = folder.context("cannot make a folder for the queue of the demonstration")?;
    let path = folder.path().to_owned();
    let interrupted = interrupts(move || drop(std::fs::remove_dir_all(&path)))?;
    let service = start(options, &folder).await?;
    announce::addresses(&service, options.json)?;
    eprintln!("  queue      {}, gone at the end", folder.path().display());

    let witness = Shared::default();
    let stop = Arc::new(AtomicBool::new(false));
    let targets = service.targets().cloned().context("the demonstration needs the test targets")?;
    let (load, beats) = start_load(options, &service, &witness, &stop)?;
    let mut stage = Stage {
        service: &service,
        targets: &targets,
        witness,
        view: View::new(options.json, announce::url_option(&service)),
        seen: Seen::new(),
    };
    let watched = tokio::select! {
        () = interrupted.notified() => Ok(()),
        watched = stage.watch(&load) => watched,
    };
    stop.store(true, Ordering::Relaxed);
    drop(beats);
    let loaded =
        tokio::task::spawn_blocking(move || load.join()).await.context("cannot wait for the load")?;
    loaded.map_err(|_| anyhow::anyhow!("the load panicked"))??;
    watched?;
    let Stage { witness, view, mut seen, .. } = stage;
    let router = service.router().clone();
    drain::drain(service, DRAIN, options.json).await?;
    judge(&mut witness.lock(), &targets, &router.pools(), &view, &mut seen)
}

/// A service as the demonstration wants it. Somebody else may have the usual port already; then any free one will do, unless one was asked for.
async fn start(options: &Options, folder: &TempDir) -> Result<Service, Failure> {
    let layering = layering(options, folder);
    let mut config = load(&layering)?;
    let usual = format!("http://{}", config.http.bind) == DEFAULT_URL;
    let probe = std::net::TcpListener::bind(config.http.bind);
    if usual && options.bind.is_none() && probe.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse) {
        eprintln!("somebody listens at {} already; taking a free port instead", config.http.bind);
        let free = layering.set("laneway.http.bind", &quoted("127.0.0.1:0"));
        config = Config::load(&free).map_err(|error| bad(&error))?;
    }
    super::start_log(config.log);
    super::start(config, None).await
}

/// What the demonstration sets itself lies below what the user sets.
fn layering(options: &Options, folder: &TempDir) -> Layering {
    let file = folder.path().join("laneway.db").display().to_string();
    // What is lost with the power is the demonstration.
    let mut ours = Layering::default().set("laneway.queue.durability", "crash");
    ours = ours.set("laneway.queue.path", &quoted(&file)).set("laneway.test-targets", "on");
    // Its dead letters are on purpose, and the screen is taken.
    ours = ours.set("laneway.log.level", "off");
    for (path, value) in POOLS {
        ours = ours.set(&format!("laneway.pools.{path}"), value);
    }
    let mut layering = options.layers.layering_without_file();
    layering.sets.splice(0..0, ours.sets);
    match options.bind {
        Some(bind) => layering.set("laneway.http.bind", &quoted(&bind.to_string())),
        None => layering,
    }
}

/// The load, on a thread of its own, and what has to be dropped to end it.
fn start_load(
    options: &Options,
    service: &Service,
    witness: &Shared,
    stop: &Arc<AtomicBool>,
) -> Result<(Publisher, mpsc::Sender<()>), Failure> {
    let base = announce::url(service);
    let token = service.config().http.admin_token.as_ref().map(|token| token.expose().to_owned());
    let load = Load {
        client: Client::new(&base, token)?,
        base,
        seed: options.seed,
        witness: witness.clone(),
        stop: Arc::clone(stop),
    };
    let (beats, heard) = mpsc::channel();
    let thread = std::thread::Builder::new().name("load".to_owned()).spawn(move || load.run(&heard));
    Ok((thread.context("cannot start the load")?, beats))
}

/// What a look needs from the one before it.
struct Seen {
    began: Instant,
    last: (Instant, u64),
    most_at_once: u64,
    /// Messages that the service said it had given up.
    dead_letters: u64,
}

impl Seen {
    fn new() -> Seen {
        let now = Instant::now();
        Seen { began: now, last: (now, 0), most_at_once: 0, dead_letters: 0 }
    }

    /// Messages that the service has given up since it began. A pool that was removed has taken its counters with it, and the witness is told.
    fn dead_letters(&mut self, pools: &[PoolView], witness: &mut Witness) -> u64 {
        let is_there = |kind: &Kind| pools.iter().any(|pool| &*pool.code == kind.pool);
        let failed = pools.iter().map(|pool| pool.counts.failed).sum::<u64>();
        if failed < self.dead_letters || !KINDS.iter().all(is_there) {
            witness.forget();
        }
        self.dead_letters = self.dead_letters.max(failed);
        self.dead_letters
    }

    /// Messages per second, over a second at least, so that the number is calm.
    fn rate(&mut self, delivered: u64, last_rate: f64) -> f64 {
        let (at, before) = self.last;
        let passed = at.elapsed().as_secs_f64();
        if passed < 1.0 && before > 0 {
            return last_rate;
        }
        self.last = (Instant::now(), delivered);
        delivered.saturating_sub(before) as f64 / passed.max(0.001)
    }
}

struct Stage<'a> {
    service: &'a Service,
    targets: &'a TestTargets,
    witness: Shared,
    view: View,
    seen: Seen,
}

impl Stage<'_> {
    /// Looks and shows until somebody interrupts. Ends by itself only when something goes wrong.
    async fn watch(&mut self, load: &Publisher) -> Result<(), Failure> {
        let mut rate = 0.0;
        loop {
            tokio::time::sleep(self.view.pace()).await;
            let look = self.look(rate);
            rate = look.delivered_per_second;
            self.view.show(&look)?;
            if let Some(violation) = look.violation {
                return Err(Failure::Violated(violation));
            }
            if load.is_finished() {
                return Ok(());
            }
        }
    }

    fn look(&mut self, last_rate: f64) -> Look {
        let mut witness = self.witness.lock();
        witness.look(self.targets);
        let standings = witness.standings();
        // Read after the targets: whoever has passed a dead letter has seen it counted.
        let pools = self.service.router().pools();
        let dead_letters = self.seen.dead_letters(&pools, &mut witness);
        let engines = || pools.iter().flat_map(|pool| &pool.engine.dispatchers);
        let at_once = engines().map(|engine| engine.in_flight as u64).sum();
        self.seen.most_at_once = self.seen.most_at_once.max(at_once);
        let (total, (groups, calls)) = (witness.total(), witness.seen());
        Look {
            at_seconds: self.seen.began.elapsed().as_secs_f64(),
            published: total.published,
            delivered: total.delivered,
            delivered_per_second: self.seen.rate(total.delivered, last_rate),
            at_once,
            waiting: total.waiting.saturating_sub(at_once),
            in_retry: engines().map(|engine| engine.deferred_lanes as u64).sum(),
            dead_letters,
            groups,
            calls,
            violation: witness.violation(dead_letters),
            kinds: (0..KINDS.len())
                .map(|kind| KindLook { standing: standings[kind], now: self.now(kind) })
                .collect(),
        }
    }

    /// What a kind does just now: for one group why its head waits, for many how many are at work.
    fn now(&self, kind: usize) -> String {
        let kind = &KINDS[kind];
        if kind.groups == 1 {
            return self.explained(kind.pool, kind.name);
        }
        let running = (1..=kind.groups).filter(|number| {
            let explained = self.service.router().explain(kind.pool, &kind.group(*number));
            explained.is_ok_and(|explained| explained.is_some_and(|explained| explained.in_flight > 0))
        });
        format!("{} at work", running.count())
    }

    fn explained(&self, pool: &str, group: &str) -> String {
        let explained = self.service.router().explain(pool, group).ok().flatten();
        let words = explained.map_or_else(|| "idle".to_owned(), |explained| reason(&explained.reason));
        crate::table::printable(&words)
    }
}

/// A reason in as many words as a column has room for.
fn reason<K>(reason: &laneway::Reason<K>) -> String {
    use laneway::Reason;
    match reason {
        Reason::Idle => "idle".to_owned(),
        Reason::Running { since, .. } => format!("at work for {:.1} s", since.as_secs_f64()),
        Reason::Retry { after, attempts, .. } => {
            format!("attempt {} in {:.1} s", attempts + 1, after.as_secs_f64())
        }
        Reason::Parked { .. } => "parked".to_owned(),
        Reason::NoWorkerFree { .. } => "waits for a free slot".to_owned(),
        Reason::RateLimited { .. } => "rate limited".to_owned(),
        Reason::DispatcherPaused => "its pool is paused".to_owned(),
        _ => "moving".to_owned(),
    }
}

/// The last look, after the service has ended: nothing moves any more, and the account must balance.
fn judge(
    witness: &mut Witness,
    targets: &TestTargets,
    pools: &[PoolView],
    view: &View,
    seen: &mut Seen,
) -> Result<(), Failure> {
    witness.look(targets);
    let dead_letters = seen.dead_letters(pools, witness);
    let total = witness.total();
    let settled = total.delivered + dead_letters;
    let violation = witness.violation(dead_letters);
    let summary = Summary {
        at_seconds: seen.began.elapsed().as_secs_f64(),
        published: total.published,
        delivered: total.delivered,
        dead_letters,
        left_in_queue: total.published.saturating_sub(settled),
        groups: witness.seen().0,
        most_at_once: seen.most_at_once,
        slow_delivered: witness.standings()[SLOW].delivered,
        violation: violation.clone(),
    };
    view.summary(&summary)?;
    violation.map_or(Ok(()), |violation| Err(Failure::Violated(violation)))
}
