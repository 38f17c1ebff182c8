//! Routers on one broker, two of them as a rule, killed with SIGKILL at random and started again, while the broker is restarted, too; in front of a target that fails at random.
//!
//! For every kind of broker: a test binary takes this file in (`#[path = "../instances/mod.rs"] mod instances;`) and calls [`run`] with a configuration that has the
//! source `orders`. This process is the publisher and the target; each router is a child, this binary again with the test [`the_instance`]. The checker proves:
//!
//! 1. Nothing that was acknowledged to the publisher is lost.
//! 2. Per group, first successes come in the order of publication, without a gap.
//! 3. Within one instance no two calls of a group overlap. How often they overlap across instances is counted, and printed: it is what a lease allows.
//! 4. What was delivered again is no more than what instances had in hand when they, or the broker, went.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use laneway_router::config::{Config, Layering};
use laneway_router::mediator::{
    BreakerSettings, Call, HttpMediator, HttpSettings, Mediator, Mediators, Signer, Simulated, Verdict,
};
use laneway_router::pool::{Exhausted, PoolSettings};
use laneway_router::router::{Router, SourceSettings};
use laneway_router::source::broker::Configured;
use laneway_router::source::sink::{ConfiguredSink, Outgoing, Published, Sink, SinkError};
use tokio::sync::Notify;

/// No step takes longer than this, on a machine that is busy with others.
const DEADLINE: Duration = Duration::from_secs(180);

/// How long a router waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(3);

/// What a router has in hand, at most.
const CAPACITY: usize = 100;

/// The header that says which instance calls.
const INSTANCE: &str = "x-instance";

/// What is done to the two routers and their broker.
pub(crate) struct Plan {
    /// Groups of messages, and how many messages there are in all.
    pub(crate) groups: usize,
    pub(crate) messages: usize,
    /// How often a router is killed, and how often the broker is restarted.
    pub(crate) kills: usize,
    pub(crate) restarts: usize,
    /// How many routers there are.
    pub(crate) instances: usize,
    pub(crate) seed: u64,
}

impl Plan {
    /// Two routers, so many kills and restarts; `LANEWAY_CRASH_KILLS`, `LANEWAY_CRASH_RESTARTS`, `LANEWAY_CRASH_MESSAGES` and `LANEWAY_SEED` make it another one.
    pub(crate) fn of(kills: u64, restarts: u64) -> Self {
        let number = |name: &str, otherwise: u64| {
            std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
        };
        Plan {
            groups: 24,
            messages: number("LANEWAY_CRASH_MESSAGES", 400) as usize,
            kills: number("LANEWAY_CRASH_KILLS", kills) as usize,
            restarts: number("LANEWAY_CRASH_RESTARTS", restarts) as usize,
            instances: 2,
            seed: number("LANEWAY_SEED", 5),
        }
    }
}

// ── a router, in a process of its own ─────────────────────────────────────────────────────────────────────────────────

/// The child. Alone, without the environment that the parent gives it, it has nothing to do.
#[test]
#[ignore = "the other tests run it as a process to kill"]
fn the_instance() {
    let Ok(text) = std::env::var("LANEWAY_INSTANCE_CONFIG") else { return };
    let config = load(&text);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _router = runtime.block_on(async { start(&config) });
    // Until the parent lets go.
    let _ = std::io::stdin().read(&mut [0]);
}

fn load(text: &str) -> Config {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("laneway.conf");
    std::fs::write(&file, text).unwrap();
    Config::load(&Layering::file(file)).unwrap_or_else(|error| panic!("{:#?}", error.problems()))
}

fn start(config: &Config) -> Router {
    let breaker = BreakerSettings { calls_min: 1_000_000, ..BreakerSettings::default() };
    let http = HttpSettings { timeout: TIMEOUT, breaker, ..HttpSettings::default() };
    let mediators = Mediators::new(HttpMediator::new(http, Signer::default()), Simulated::new(1));
    let pool = PoolSettings {
        concurrency: 16,
        capacity: CAPACITY,
        group_capacity: 20,
        attempts: 3,
        backoff: Duration::from_millis(5),
        exhausted: Exhausted::GiveBack(Duration::from_millis(30)),
        ..PoolSettings::default()
    };
    let instance = std::process::id().to_string();
    let make = move |_: &PoolSettings| -> Arc<dyn Mediator> {
        Arc::new(Tagged { mediators: mediators.clone(), instance: instance.clone() })
    };
    let router = Router::start(pool, Arc::new(make)).unwrap();
    let source = Configured::new("orders", config.sources["orders"].clone());
    router.add_source(Arc::new(source), SourceSettings { lease: Duration::from_secs(5) });
    router
}

/// Tells the target who calls.
struct Tagged {
    mediators: Mediators,
    instance: String,
}

impl Mediator for Tagged {
    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            let mut message = call.message.clone();
            message.headers.insert(INSTANCE.to_owned(), self.instance.clone());
            self.mediators.mediate(Call { message: &message, ..call }).await
        })
    }
}

/// An instance, seen from outside.
struct Life(Child);

impl Life {
    fn begin(config: &str) -> Life {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["the_instance", "--ignored", "--nocapture", "--test-threads=1"])
            .env("LANEWAY_INSTANCE_CONFIG", config)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        Life(child.expect("the child starts"))
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// ── the target ────────────────────────────────────────────────────────────────────────────────────────────────────────

#[derive(Default)]
struct Seen {
    /// The numbers that succeeded, by group, in order, copies included.
    successes: BTreeMap<String, Vec<u64>>,
    /// Calls that are under way, by instance and group.
    under_way: HashMap<(u64, String), u64>,
    violations: Vec<String>,
    overlaps: u64,
}

struct Target {
    seen: Mutex<Seen>,
    random: Mutex<fastrand::Rng>,
    served: Notify,
}

/// A call under way. Dropped when it is answered, and when its caller has gone.
struct Under<'a>(&'a Target, (u64, String));

impl Drop for Under<'_> {
    fn drop(&mut self) {
        self.0.seen.lock().unwrap().under_way.remove(&self.1);
    }
}

impl Target {
    fn enter(&self, instance: u64, group: &str, number: u64) -> Under<'_> {
        let mut seen = self.seen.lock().unwrap();
        let others =
            seen.under_way.iter().filter(|((other, theirs), _)| *other != instance && theirs == group);
        let overlaps = others.count() as u64;
        seen.overlaps += overlaps;
        let key = (instance, group.to_owned());
        if let Some(other) = seen.under_way.insert(key.clone(), number) {
            seen.violations.push(format!("{group}#{number} began while #{other} was under way"));
        }
        Under(self, key)
    }

    async fn handle(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let answer = |status| Ok(Response::builder().status(status).body(Full::default()).unwrap());
        let instance = request.headers().get(INSTANCE).and_then(|it| it.to_str().ok()?.parse().ok());
        let instance: u64 = instance.expect("every call is tagged");
        let Ok(body) = request.into_body().collect().await else { return answer(400) };
        let body: serde_json::Value = serde_json::from_slice(&body.to_bytes()).expect("our own payload");
        let (group, number) = (body["group"].as_str().unwrap(), body["number"].as_u64().unwrap());
        let under = self.enter(instance, group, number);
        let (fate, pause) = {
            let mut random = self.random.lock().unwrap();
            (random.u32(0..100), random.u64(0..8))
        };
        tokio::time::sleep(Duration::from_millis(pause)).await; // paced: a target takes its time
        if fate < 8 {
            return answer(500);
        }
        self.seen.lock().unwrap().successes.entry(group.to_owned()).or_default().push(number);
        drop(under);
        self.served.notify_one();
        answer(200)
    }

    async fn serve(self: Arc<Self>, listener: tokio::net::TcpListener) {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let target = Arc::clone(&self);
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let target = Arc::clone(&target);
                    async move { target.handle(request).await }
                });
                let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    }

    /// How many different messages have succeeded.
    fn distinct(&self) -> usize {
        let seen = self.seen.lock().unwrap();
        seen.successes.values().map(|all| all.iter().collect::<std::collections::BTreeSet<_>>().len()).sum()
    }

    async fn wait_for(&self, count: usize) {
        let begun = Instant::now();
        while self.distinct() < count {
            assert!(begun.elapsed() < DEADLINE, "only {} of {count} came", self.distinct());
            let _ = tokio::time::timeout(Duration::from_secs(1), self.served.notified()).await;
        }
    }
}

// ── the course of events ──────────────────────────────────────────────────────────────────────────────────────────────

/// Publishes a batch until the broker has taken it. A message that it may have taken already has the id that it had.
async fn publish(sink: &ConfiguredSink, batch: Vec<Outgoing>) {
    let begun = Instant::now();
    loop {
        match sink.publish(batch.clone()).await {
            Ok(answers) => {
                assert!(answers.iter().all(|it| matches!(it, Published::Accepted { .. })), "{answers:?}");
                return;
            }
            Err(SinkError::Unavailable(_)) if begun.elapsed() < DEADLINE => {
                tokio::time::sleep(Duration::from_millis(100)).await; // paced: as a publisher waits before it tries again
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Lets it happen. `restart` ends the broker without a warning and starts it again; the configuration has the source `orders`, and the sink `orders`.
pub(crate) async fn run(config: &str, plan: &Plan, mut restart: impl FnMut()) {
    let Plan { groups, messages, kills, restarts, instances, seed } = *plan;
    eprintln!("seed {seed}: {kills} kills, {restarts} restarts");
    let mut random = fastrand::Rng::with_seed(seed);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let target = Arc::new(Target {
        seen: Mutex::default(),
        random: Mutex::new(fastrand::Rng::with_seed(seed)),
        served: Notify::new(),
    });
    tokio::spawn(Arc::clone(&target).serve(listener));
    let sink = ConfiguredSink::new("orders", load(config).sinks["orders"].clone());
    let mut next = vec![0u64; groups];
    let mut lives: Vec<Life> = (0..instances).map(|_| Life::begin(config)).collect();
    let steps = kills + restarts + 1;
    let (mut published, mut restarted) = (0, 0);
    for step in 1..=steps {
        let until = messages * step / steps;
        while published < until {
            let batch: Vec<Outgoing> = (0..20.min(until - published))
                .map(|_| {
                    let group = random.usize(..groups);
                    next[group] += 1;
                    message(group, next[group] - 1, address)
                })
                .collect();
            published += batch.len();
            publish(&sink, batch).await;
        }
        if step == steps {
            break;
        }
        // Somewhere in the middle of the work.
        target.wait_for(published.saturating_sub(random.usize(..CAPACITY))).await;
        if restarted < restarts && step * restarts >= restarted * steps + steps / 2 {
            restarted += 1;
            tokio::task::block_in_place(&mut restart);
        } else {
            let one = random.usize(..lives.len());
            lives[one] = Life::begin(config);
        }
    }
    target.wait_for(messages).await;
    drop(lives);
    check(&target, &next, plan);
}

fn message(group: usize, number: u64, address: std::net::SocketAddr) -> Outgoing {
    let id = format!("g{group}-{number}");
    let text = serde_json::json!({
        "id": id, "poolCode": "", "messageGroupId": format!("g{group}"),
        "mediationTarget": format!("http://{address}/"),
        "payload": { "group": format!("g{group}"), "number": number },
    });
    Outgoing {
        deduplication_id: Some(id.clone()),
        id,
        group: Some(format!("g{group}").into()),
        text: text.to_string().into_bytes().into(),
        headers: Default::default(),
    }
}

fn check(target: &Target, next: &[u64], plan: &Plan) {
    let seen = target.seen.lock().unwrap();
    assert_eq!(seen.violations, Vec::<String>::new(), "seed {}", plan.seed);
    let mut copies = 0;
    for (group, count) in next.iter().enumerate() {
        let all = seen.successes.get(&format!("g{group}")).map_or(&[][..], Vec::as_slice);
        let mut first = Vec::new();
        for number in all {
            if first.contains(number) {
                copies += 1;
            } else {
                first.push(*number);
            }
        }
        assert_eq!(first, (0..*count).collect::<Vec<_>>(), "seed {}: group {group} saw {all:?}", plan.seed);
    }
    let most = (plan.kills + plan.instances * plan.restarts) * CAPACITY;
    eprintln!("{copies} delivered again, {} overlaps across instances", seen.overlaps);
    assert!(copies <= most, "seed {}: {copies} delivered again, at most {most} were in hand", plan.seed);
}
