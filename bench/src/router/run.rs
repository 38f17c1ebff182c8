//! One run of `bench router`, in a process of its own.
//!
//! The queue is a file in a temporary folder, durable against power loss as by default. The target is an HTTP server on loopback in a
//! process of its own; every message says which of its group it is, and the target checks that they come in
//! order, nothing left out.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use axum::extract::State;
use axum::http::StatusCode;
use hdrhistogram::Histogram;
use laneway_router::config::{Config, Layering};
use laneway_router::mediator::{HttpMediator, HttpSettings, Mediator, Mediators, Signer, Simulated};
use laneway_router::pool::PoolSettings;
use laneway_router::router::{DEFAULT_POOL, MakeMediator, Router, SourceSettings};
use laneway_router::service::Service;
use laneway_router::source::Source;
use laneway_router::source::embedded::{EmbeddedQueue, EmbeddedStore, Options, Publication};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Spec;
use crate::drive::Outcome;
use crate::machine;

/// Longest that any run may take.
pub(super) const LIMIT: Duration = Duration::from_secs(300);

/// How many groups `deliver` and `latency` have.
const GROUPS: usize = 10_000;

/// How many messages `deliver` has, unless somebody says otherwise.
pub(super) const DELIVERIES: u64 = 100_000;

pub(super) fn run(spec: &Spec) -> Result<Outcome> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if spec.contender.ends_with("one-thread") {
        builder.worker_threads(1);
    }
    let runtime = builder.enable_all().build()?;
    runtime.block_on(async {
        let run = async {
            #[cfg(feature = "brokers")]
            if let Some(kind) = &spec.source {
                return super::brokers::run(spec, kind).await;
            }
            match spec.workload.as_str() {
                "publish" => publish(spec).await,
                #[cfg(feature = "peers")]
                "deliver" if spec.contender.starts_with("plain") => super::plain::post(spec).await,
                "deliver" => deliver(spec).await,
                "latency" => latency(spec).await,
                "backlog" => backlog(spec).await,
                "extreme" => extreme(spec).await,
                "dashboard" => dashboard(spec).await,
                "table" => table().await,
                other => bail!("unknown workload {other:?}"),
            }
        };
        tokio::time::timeout(LIMIT, run).await.context("not finished in time")?
    })
}

/// A folder that goes away at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("laneway-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A queue in a folder of its own.
struct Bench {
    store: EmbeddedStore,
    queue: EmbeddedQueue,
    folder: Folder,
}

impl Bench {
    fn open() -> Result<Self> {
        let folder = Folder::new()?;
        let store = EmbeddedStore::open(folder.0.join("queue.db"), Options::default())?;
        let queue = store.queue("bench")?;
        Ok(Bench { store, queue, folder })
    }

    fn route(&self, settings: PoolSettings, mediators: Mediators) -> Result<Router> {
        let make: MakeMediator = Arc::new(move |_| Arc::new(mediators.clone()) as Arc<dyn Mediator>);
        let router = Router::start(settings, make)?;
        router.add_source(Arc::new(self.queue.clone()), SourceSettings::default());
        Ok(router)
    }
}

fn mediators() -> Mediators {
    Mediators::new(HttpMediator::new(HttpSettings::default(), Signer::default()), Simulated::new(1))
}

/// How one process stood when the clock began.
pub(super) struct Clock {
    began: Instant,
    cpu: f64,
}

impl Clock {
    pub(super) fn start() -> Self {
        Clock { began: Instant::now(), cpu: machine::cpu_seconds().unwrap_or(0.0) }
    }

    /// Rate, processor time per message, and what a core would do.
    pub(super) fn stop(&self, messages: u64, outcome: &mut Outcome) {
        let seconds = self.began.elapsed().as_secs_f64();
        let cpu = machine::cpu_seconds().unwrap_or(0.0) - self.cpu;
        let mut set = |metric: &str, value| outcome.set(metric, value);
        set("messages_per_second", messages as f64 / seconds);
        set("cpu_microseconds_per_message", cpu * 1e6 / messages as f64);
        set("messages_per_core_second", messages as f64 / cpu);
        if let Some(peak) = machine::resident_bytes_peak() {
            set("resident_bytes_peak", peak as f64);
        }
    }
}

/// Zipf with exponent 1.1 over the groups, the same every time.
pub(super) struct Zipf {
    cumulative: Vec<f64>,
    state: u64,
}

impl Zipf {
    pub(super) fn new(groups: usize) -> Self {
        let mut sum = 0.0;
        let cumulative = (1..=groups)
            .map(|rank| {
                sum += 1.0 / (rank as f64).powf(1.1);
                sum
            })
            .collect();
        Zipf { cumulative, state: 0x9E37_79B9_7F4A_7C15 }
    }

    pub(super) fn next(&mut self) -> usize {
        // Xorshift: no more is needed to spread messages over groups.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let total = *self.cumulative.last().expect("there are groups");
        let point = (self.state >> 11) as f64 / (1u64 << 53) as f64 * total;
        self.cumulative.partition_point(|sum| *sum < point).min(self.cumulative.len() - 1)
    }
}

fn http_message(number: u64, group: usize, position: u64, target: &str, sent_ns: u64) -> Publication {
    let payload = payload(group, position, sent_ns);
    let text = format!(
        r#"{{"id":"m-{number}","poolCode":"DEFAULT-POOL","mediationType":"HTTP","mediationTarget":"{target}","messageGroupId":"group-{group}","payload":{payload}}}"#
    );
    Publication::new(text).group(format!("group-{group}"))
}

pub(super) fn payload(group: usize, position: u64, sent_ns: u64) -> String {
    format!(r#"{{"group":{group},"position":{position},"sentNs":{sent_ns}}}"#)
}

/// The target, in a process of its own, so that its work is not taken for the router's.
pub(super) struct Target {
    process: std::process::Child,
    address: String,
}

impl Target {
    pub(super) fn start() -> Result<Self> {
        use std::io::BufRead;
        let mut process = std::process::Command::new(std::env::current_exe()?)
            .args([super::TARGET, ""])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()?;
        let mut address = String::new();
        std::io::BufReader::new(process.stdout.take().context("it has an output")?)
            .read_line(&mut address)?;
        Ok(Target { process, address: address.trim().to_owned() })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// What it has seen.
    fn report(&self) -> Result<Seen> {
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(b"GET /seen HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").context("no body")?;
        Ok(serde_json::from_str(body)?)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a target has seen.
#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct Seen {
    arrived: u64,
    violations: Vec<String>,
    /// From the intended time of sending: the median, the 99th and the 99.9th percentile.
    latency_seconds: [f64; 3],
}

/// The target's memory: checks order and exclusion per group, counts, and measures the time since sending.
struct Watch {
    /// The position that is next, by group.
    groups: Vec<Mutex<u64>>,
    violations: Mutex<Vec<String>>,
    arrived: AtomicU64,
    latencies: Mutex<Histogram<u64>>,
}

/// Serves as a target until standard input ends.
pub(super) fn serve_as_target() -> Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let watch = Arc::new(Watch {
            groups: (0..GROUPS).map(|_| Mutex::default()).collect(),
            violations: Mutex::default(),
            arrived: AtomicU64::new(0),
            latencies: Mutex::new(Histogram::new_with_bounds(1, 300_000_000_000, 3)?),
        });
        let app = axum::Router::new()
            .route("/seen", axum::routing::get(seen))
            .fallback(receive)
            .with_state(Arc::clone(&watch));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        let gone = tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
        tokio::select! {
            served = async { axum::serve(listener, app).await } => served?,
            gone = gone => drop(gone?),
        }
        Ok(String::new())
    })
}

impl Watch {
    fn note(&self, payload: &Payload) {
        if payload.sent_ns > 0 {
            let waited = now_ns().saturating_sub(payload.sent_ns).max(1);
            self.latencies.lock().expect("no panic").saturating_record(waited);
        }
        let Some(next) = self.groups.get(payload.group) else { return };
        let mut next = next.lock().expect("no panic");
        if *next != payload.position {
            let text = format!("group {}: {} came, {next} was next", payload.group, payload.position);
            self.violations.lock().expect("no panic").push(text);
        }
        *next = payload.position + 1;
        self.arrived.fetch_add(1, Relaxed);
    }
}

/// The machine's time, which two processes share.
fn now_ns() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}

async fn seen(State(watch): State<Arc<Watch>>) -> axum::Json<Seen> {
    let latencies = watch.latencies.lock().expect("no panic");
    let violations = watch.violations.lock().expect("no panic");
    axum::Json(Seen {
        arrived: watch.arrived.load(Relaxed),
        violations: violations.iter().take(5).cloned().collect(),
        latency_seconds: [0.5, 0.99, 0.999]
            .map(|quantile| latencies.value_at_quantile(quantile) as f64 / 1e9),
    })
}

/// What a message of the benchmark carries.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Payload {
    group: usize,
    position: u64,
    sent_ns: u64,
}

async fn receive(State(watch): State<Arc<Watch>>, axum::Json(payload): axum::Json<Payload>) -> StatusCode {
    watch.note(&payload);
    StatusCode::NO_CONTENT
}

/// Compares what the target has seen with what was sent.
pub(super) fn judge(target: &Target, messages: u64, outcome: &mut Outcome) -> Result<Seen> {
    let seen = target.report()?;
    outcome.violations.extend(seen.violations.iter().cloned());
    if seen.arrived != messages {
        outcome.violations.push(format!("{} of {messages} arrived", seen.arrived));
    }
    Ok(seen)
}

/// Many publishers, each waiting until its message is durable; or one, for whom that is a commit each.
async fn publish(spec: &Spec) -> Result<Outcome> {
    let bench = Bench::open()?;
    let publishers = if spec.contender == "one-commit-each" { 1 } else { 1_024 };
    let end = Instant::now() + Duration::from_secs_f64(spec.seconds);
    let most = spec.messages.unwrap_or(u64::MAX) / publishers;
    let clock = Clock::start();
    let tasks: Vec<_> = (0..publishers)
        .map(|publisher| {
            let queue = bench.queue.clone();
            tokio::spawn(async move {
                let mut sent = 0;
                while sent < most && Instant::now() < end {
                    let publication = Publication::new([b'x'; 256]).group(format!("group-{publisher}"));
                    queue.publish(publication).await.map_err(|error| anyhow::anyhow!("{error}"))?;
                    sent += 1;
                }
                anyhow::Ok(sent)
            })
        })
        .collect();
    let mut sent = 0;
    for task in tasks {
        sent += task.await??;
    }
    let mut outcome = Outcome::default();
    clock.stop(sent, &mut outcome);
    bench.store.close().await;
    Ok(outcome)
}

/// The messages of `deliver`: the group of each, and its position in that.
pub(super) fn backlog_of(messages: u64) -> impl Iterator<Item = (usize, u64)> {
    let (mut zipf, mut positions) = (Zipf::new(GROUPS), vec![0u64; GROUPS]);
    (0..messages).map(move |_| {
        let group = zipf.next();
        positions[group] += 1;
        (group, positions[group] - 1)
    })
}

/// A backlog of ordered groups to an HTTP target.
async fn deliver(spec: &Spec) -> Result<Outcome> {
    let bench = Bench::open()?;
    let target = Target::start()?;
    let url = target.url();
    let messages = spec.messages.unwrap_or(DELIVERIES);
    let mut backlog = (0u64..).zip(backlog_of(messages)).peekable();
    while backlog.peek().is_some() {
        let message = |(number, (group, position))| http_message(number, group, position, &url, 0);
        let batch = backlog.by_ref().take(1_000).map(message).collect();
        bench.queue.publish_many(batch, None).await.map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    let clock = Clock::start();
    let router = bench.route(pool(spec.pool), mediators())?;
    wait_succeeded(&router, messages).await?;
    let seconds = clock.began.elapsed().as_secs_f64();
    let mut outcome = Outcome::default();
    // What has been delivered leaves the file later, at the end at the latest: the processor's time for that is part of what a delivery costs.
    finish(&bench, router, &mut outcome).await;
    clock.stop(messages, &mut outcome);
    outcome.set("messages_per_second", messages as f64 / seconds);
    judge(&target, messages, &mut outcome)?;
    Ok(outcome)
}

/// How long the dashboard is open, or closed, before it is the other's turn: as long as from one look of the history to the next, so that every turn has one of them.
const TURN: Duration = Duration::from_secs(1);

/// A whole service works off a backlog of messages whose target takes no time, in groups of the same size, so that nothing but its own work holds it up until the
/// end; with a dashboard, somebody looks at it in turns. What a page costs is the ratio of a turn with it to the two beside it without: neighbours in time, in one process, so that a machine that is now quick and now slow does not decide.
/// Whoever reads the page does so in this process, and counts against it. What a dashboard costs at all is the ratio of messages per second of processor time, over the whole of a run
/// with a page that is open throughout, and of one without a dashboard.
async fn dashboard(spec: &Spec) -> Result<Outcome> {
    let folder = Folder::new()?;
    let path = serde_json::to_string(&folder.0.join("queue.db"))?;
    let (with, always) = (spec.contender == "with", spec.contender == "open");
    let layering = Layering::default()
        .set("laneway.http.bind", "\"127.0.0.1:0\"")
        .set("laneway.queue.path", &path)
        .set("laneway.queue.durability", "crash")
        .set("laneway.dashboard.enabled", if with || always { "true" } else { "false" })
        .set("laneway.pools.DEFAULT-POOL.concurrency", &spec.pool.to_string())
        .set("laneway.pools.DEFAULT-POOL.capacity", "20000")
        .set("laneway.pools.DEFAULT-POOL.group-capacity", "2000");
    let service = Service::start(Config::load(&layering)?).await?;
    service.router().pause_pool(DEFAULT_POOL)?;
    let queue = service.queue("default").context("the default queue")?;
    let messages = spec.messages.unwrap_or(5_000_000);
    for from in (0..messages).step_by(1_000) {
        let batch = (from..messages.min(from + 1_000)).map(instant_message);
        queue.publish_many(batch.collect(), None).await.map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    let done = || service.router().pool_view(DEFAULT_POOL).map_or(0, |view| view.counts.succeeded);
    let kept = if always { Some(Page::open(&service).await?) } else { None };
    let clock = Clock::start();
    service.router().resume_pool(DEFAULT_POOL)?;
    let (mut turns, mut seen) = (Vec::<Turn>::new(), 0);
    while done() < messages {
        let page = if with && turns.len() % 2 == 1 { Some(Page::open(&service).await?) } else { None };
        let (turn_clock, before) = (Clock::start(), done());
        tokio::time::sleep(TURN).await;
        turns.push(Turn::of(&turn_clock, done() - before));
        if let Some(page) = page {
            seen += page.close().await;
        }
    }
    let mut outcome = Outcome::default();
    clock.stop(messages, &mut outcome);
    if let Some(page) = kept {
        seen += page.close().await;
    }
    ensure!(!(with || always) || seen > 0, "the page saw nothing");
    // The first turns warm up, and in the last one there was nothing left to do.
    let turns = turns.get(WARM_UP..turns.len().saturating_sub(1)).unwrap_or_default();
    ensure!(turns.len() > 2, "too few turns: raise --messages");
    let every_second = |from: usize| turns.iter().skip(from).step_by(2);
    match always {
        true => tell("open", turns.iter(), &mut outcome),
        false => tell("closed", every_second(0), &mut outcome),
    }
    if with {
        tell("open", every_second(1), &mut outcome);
        let ratio = |of: fn(&Turn) -> f64| {
            let beside = |three: &[Turn]| 2.0 * of(&three[1]) / (of(&three[0]) + of(&three[2]));
            middle(turns.windows(3).step_by(2).map(beside).collect())
        };
        outcome.set("open_over_closed", ratio(|turn| turn.rate));
        set_if_known("open_over_closed_per_core", ratio(|turn| turn.core_rate), &mut outcome);
    }
    service.shutdown(Duration::from_secs(5)).await;
    Ok(outcome)
}

/// Turns that do not count. Even, so that the first that counts is without a page.
const WARM_UP: usize = 2;

/// One that its target is done with at once.
fn instant_message(number: u64) -> Publication {
    let group = number % GROUPS as u64;
    let text = format!(
        r#"{{"id":"m-{number}","poolCode":"DEFAULT-POOL","mediationType":"SIMULATED","mediationTarget":"0ms","messageGroupId":"group-{group}"}}"#
    );
    Publication::new(text).group(format!("group-{group}"))
}

/// A turn, with a page or without.
struct Turn {
    /// Messages per second.
    rate: f64,
    /// Messages per second of processor time: what depends less on who else is at work. No number where the system does not say.
    core_rate: f64,
}

impl Turn {
    fn of(clock: &Clock, messages: u64) -> Self {
        let seconds = clock.began.elapsed().as_secs_f64();
        let cpu = machine::cpu_seconds().map_or(f64::NAN, |now| now - clock.cpu);
        Turn { rate: messages as f64 / seconds, core_rate: messages as f64 / cpu }
    }
}

fn tell<'a>(kind: &str, turns: impl Iterator<Item = &'a Turn> + Clone, outcome: &mut Outcome) {
    let rate = middle(turns.clone().map(|turn| turn.rate).collect());
    let core_rate = middle(turns.map(|turn| turn.core_rate).collect());
    outcome.set(&format!("messages_per_second_{kind}"), rate);
    set_if_known(&format!("messages_per_core_second_{kind}"), core_rate, outcome);
}

fn set_if_known(metric: &str, value: f64, outcome: &mut Outcome) {
    if value.is_finite() {
        outcome.set(metric, value);
    }
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0
}

/// Somebody who looks at the dashboard: the history once, then every second as it comes.
struct Page {
    reading: tokio::task::JoinHandle<()>,
    bytes: Arc<AtomicU64>,
}

impl Page {
    async fn open(service: &Service) -> Result<Self> {
        let bytes = Arc::new(AtomicU64::new(0));
        for path in ["/api/history", "/api/stream"] {
            let mut stream = tokio::net::TcpStream::connect(service.http_address()).await?;
            let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let counted = Arc::clone(&bytes);
            let reading = tokio::spawn(async move {
                let mut part = vec![0; 65_536];
                while let Ok(read) = stream.read(&mut part).await
                    && read > 0
                {
                    counted.fetch_add(read as u64, Relaxed);
                }
            });
            if path == "/api/stream" {
                return Ok(Page { reading, bytes });
            }
            reading.await?;
        }
        bail!("there is a stream")
    }

    /// Says how many bytes were read.
    async fn close(self) -> u64 {
        self.reading.abort();
        let _ = self.reading.await;
        self.bytes.load(Relaxed)
    }
}

fn pool(concurrency: usize) -> PoolSettings {
    PoolSettings { concurrency, capacity: 20_000, group_capacity: 2_000, ..PoolSettings::default() }
}

/// Publishes at a fixed rate and measures the time from when a message should have been sent.
async fn latency(spec: &Spec) -> Result<Outcome> {
    let bench = Bench::open()?;
    let target = Target::start()?;
    let url = target.url();
    let router = bench.route(pool(spec.pool), mediators())?;
    let (mut zipf, mut positions) = (Zipf::new(GROUPS), vec![0u64; GROUPS]);
    let messages = (spec.rate as f64 * spec.seconds) as u64;
    let clock = Clock::start();
    let began_ns = now_ns();
    let (sender, mut queue) = tokio::sync::mpsc::channel::<Publication>(65_536);
    let publisher = bench.queue.clone();
    let publishing = tokio::spawn(async move {
        let mut batch = Vec::new();
        // Whatever has come while the last commit was under way is the next one.
        while queue.recv_many(&mut batch, 1_000).await > 0 {
            publisher
                .publish_many(std::mem::take(&mut batch), None)
                .await
                .map_err(|error| anyhow::anyhow!("{error}"))?;
        }
        anyhow::Ok(())
    });
    for number in 0..messages {
        let due = Duration::from_secs_f64(number as f64 / spec.rate as f64);
        tokio::time::sleep_until((clock.began + due).into()).await;
        let group = zipf.next();
        positions[group] += 1;
        let intended_ns = began_ns + due.as_nanos() as u64;
        let message = http_message(number, group, positions[group] - 1, &url, intended_ns.max(1));
        sender.send(message).await?;
    }
    drop(sender);
    publishing.await??;
    wait_succeeded(&router, messages).await?;
    let mut outcome = Outcome::default();
    clock.stop(messages, &mut outcome);
    let seen = judge(&target, messages, &mut outcome)?;
    for (name, seconds) in ["p50", "p99", "p999"].into_iter().zip(seen.latency_seconds) {
        outcome.set(&format!("latency_{name}_seconds"), seconds);
    }
    finish(&bench, router, &mut outcome).await;
    Ok(outcome)
}

/// What queued messages cost: while they are published, and when the whole service starts on them in a process of its own.
async fn backlog(spec: &Spec) -> Result<Outcome> {
    let bench = Bench::open()?;
    let messages = spec.messages.unwrap_or(1_000_000);
    let before = machine::resident_bytes().context("no such figure here")?;
    let clock = Clock::start();
    let mut made = 0;
    while made < messages {
        let count = (messages - made).min(1_000);
        let batch = (made..made + count).map(queued_message).collect();
        bench.queue.publish_many(batch, None).await.map_err(|error| anyhow::anyhow!("{error}"))?;
        made += count;
    }
    let mut outcome = Outcome::default();
    clock.stop(messages, &mut outcome);
    let after = machine::resident_bytes().context("no such figure here")?;
    let per_message = after.saturating_sub(before) as f64 / messages as f64;
    outcome.set("resident_bytes_per_message", per_message);
    outcome.set("resident_bytes", after as f64);
    bench.store.close().await;
    let folder = bench.folder.0.to_str().context("a folder with a plain name")?.to_owned();
    let started =
        std::process::Command::new(std::env::current_exe()?).args([super::SERVICE, &folder]).output()?;
    ensure!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    let figures: Started = serde_json::from_slice(&started.stdout)?;
    ensure!(figures.queued == messages, "{} of {messages} are in the queue", figures.queued);
    outcome.set("service_resident_bytes", figures.resident_bytes as f64);
    outcome.set("service_resident_bytes_peak", figures.resident_bytes_peak as f64);
    outcome.set("service_start_seconds", figures.seconds);
    Ok(outcome)
}

/// About 256 bytes, of one of the groups, that would take an hour each.
fn queued_message(number: u64) -> Publication {
    let group = number % GROUPS as u64;
    let text = format!(
        r#"{{"id":"m-{number}","poolCode":"DEFAULT-POOL","mediationType":"SIMULATED","mediationTarget":"3600s","messageGroupId":"group-{group}","payload":"{:x<90}"}}"#,
        ""
    );
    Publication::new(text).group(format!("group-{group}"))
}

/// What a service told that has started on a backlog.
#[derive(serde::Serialize, serde::Deserialize)]
struct Started {
    queued: u64,
    seconds: f64,
    resident_bytes: u64,
    resident_bytes_peak: u64,
}

/// Starts the whole service on the queue in a folder, as `laneway serve` does, lets its pool fill, and says what it costs.
pub(super) fn serve_on_backlog(folder: &str) -> Result<String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let folder = std::path::Path::new(folder);
        std::fs::write(folder.join("laneway.conf"), "")?;
        let layering = Layering::file(folder.join("laneway.conf"))
            .set("laneway.http.bind", "\"127.0.0.1:0\"")
            .set("laneway.queue.path", &serde_json::to_string(&folder.join("queue.db"))?)
            .set("laneway.queue.queues", "[bench]");
        let began = Instant::now();
        let service = Service::start(Config::load(&layering)?).await?;
        let seconds = began.elapsed().as_secs_f64();
        let deadline = began + LIMIT;
        let (mut held, mut steady) = (0, 0);
        // Full when no more has come for a while.
        while steady < 10 {
            ensure!(Instant::now() < deadline, "the pool does not fill");
            tokio::time::sleep(Duration::from_millis(50)).await;
            steady = if held > 0 && service.held() == held { steady + 1 } else { 0 };
            held = service.held();
        }
        let queue = service.queue("bench").context("the queue is known")?;
        let depth = queue.depth().await?;
        let started = Started {
            queued: depth.waiting + depth.leased,
            seconds,
            resident_bytes: machine::resident_bytes().context("no such figure here")?,
            resident_bytes_peak: machine::resident_bytes_peak().context("no such figure here")?,
        };
        service.shutdown(Duration::ZERO).await;
        Ok(serde_json::to_string(&started)?)
    })
}

fn simulated_message(number: u64, group: u64) -> Publication {
    let text = format!(
        r#"{{"id":"m-{number}","poolCode":"DEFAULT-POOL","mediationType":"SIMULATED","mediationTarget":"100ms","messageGroupId":"group-{group}"}}"#
    );
    Publication::new(text).group(format!("group-{group}"))
}

/// Document 004's extreme case.
async fn extreme(spec: &Spec) -> Result<Outcome> {
    const SLOTS: u64 = 5_000;
    let bench = Bench::open()?;
    let messages = (SLOTS as f64 * 10.0 * spec.seconds) as u64;
    let mut made = 0;
    while made < messages {
        let count = (messages - made).min(1_000);
        let batch =
            (0..count).map(|number| simulated_message(made + number, (made + number) % GROUPS as u64));
        let batch = batch.collect();
        bench.queue.publish_many(batch, None).await.map_err(|error| anyhow::anyhow!("{error}"))?;
        made += count;
    }
    let clock = Clock::start();
    let settings = PoolSettings {
        concurrency: SLOTS as usize,
        capacity: 50_000,
        group_capacity: 200,
        ..PoolSettings::default()
    };
    let router = bench.route(settings, mediators())?;
    wait_succeeded(&router, messages).await?;
    let mut outcome = Outcome::default();
    clock.stop(messages, &mut outcome);
    let seconds = clock.began.elapsed().as_secs_f64();
    outcome.set("efficiency", messages as f64 * 0.1 / SLOTS as f64 / seconds);
    finish(&bench, router, &mut outcome).await;
    Ok(outcome)
}

async fn wait_succeeded(router: &Router, messages: u64) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let done: u64 = router.pools().iter().map(|pool| pool.counts.succeeded).sum();
        if done >= messages {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{done} of {messages} were delivered");
        // Not more often: to look costs as much as a few deliveries, and that is the router's time.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Document 004's table: how long 100 messages of 100 ms take with 10 workers, by the number of groups.
async fn table() -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for (groups, ideal) in [(1u64, 10.0), (5, 2.0), (10, 1.0), (100, 1.0)] {
        let bench = Bench::open()?;
        let batch = (0..100).map(|number| simulated_message(number, number % groups)).collect();
        bench.queue.publish_many(batch, None).await.map_err(|error| anyhow::anyhow!("{error}"))?;
        let began = Instant::now();
        let router = bench.route(PoolSettings { concurrency: 10, ..PoolSettings::default() }, mediators())?;
        wait_succeeded(&router, 100).await?;
        let seconds = began.elapsed().as_secs_f64();
        outcome.set(&format!("seconds_{groups}_groups"), seconds);
        outcome.set(&format!("seconds_of_ideal_{groups}_groups"), seconds / ideal);
        finish(&bench, router, &mut outcome).await;
    }
    Ok(outcome)
}

/// Ends the router and looks whether everything was settled.
async fn finish(bench: &Bench, router: Router, outcome: &mut Outcome) {
    let report = router.shutdown(Duration::from_secs(10)).await;
    if report.given_back > 0 || !report.settled {
        outcome.violations.push(format!("at the end: {report:?}"));
    }
    bench.store.close().await;
}
