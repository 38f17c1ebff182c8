//! Routers on one broker, two of them as a rule, killed with SIGKILL at random and started again, while the broker is restarted, too; in front of a target that fails at random.
//!
//! For every kind of broker: a test binary takes this file in (`#[path = "../instances/mod.rs"] mod instances;`) and calls [`run`] with a configuration that has the
//! source `orders`. This process is the publisher and the target; each router is a child, this binary again with the test [`the_instance`]. The checker proves:
//!
//! 1. Nothing that was acknowledged to the publisher is lost.
//! 2. Per group, first successes come in the order of publication, without a gap; where the broker itself is known to slip when its consumers go, a slip comes soon after such an event.
//! 3. Within one instance no two calls of a group overlap, and across instances only around an event: one of the two was killed or stopped, or the broker was restarted. What is handed over by a
//!    router that lives, because another one has come or gone, is not in two places.
//! 4. What was delivered again had its first success around an event that concerned the router that had it, and for each event that is no more than was in hand.
//! 5. A router that was stopped from running, for so long that others did its work, begins nothing of that when it goes on, unless the broker forgot who had done it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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

/// A router tells its broker of a success within this time, also on a machine that is busy with others. What succeeded earlier before an event is not repeated.
const TOLD_WITHIN: Duration = Duration::from_secs(3);

/// An event has its consequences within this time: a lease, and what it takes to begin again.
const NOTICED_WITHIN: Duration = Duration::from_secs(8);

/// The header that says which instance calls.
const INSTANCE: &str = "x-instance";

/// The header that says when the call began in that instance, in microseconds since 1970: what was on its way when it was stopped arrives late, and began before.
const BEGAN: &str = "x-began";

fn micros() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as u64
}

/// What a broker does to the order when several of its consumers go at about the same time.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Order {
    /// It keeps it.
    Kept,
    /// It may hand out a message behind later ones of its group (docs/guide/brokers.md, "where it does not hold").
    SlipsAfterEvents,
    /// The same, but only after it was killed itself.
    SlipsAfterRestarts,
}

/// What is done to the two routers and their broker.
pub(crate) struct Plan {
    /// Groups of messages, and how many messages there are in all.
    pub(crate) groups: usize,
    pub(crate) messages: usize,
    /// How often a router is killed, and how often the broker is restarted.
    pub(crate) kills: usize,
    pub(crate) restarts: usize,
    /// How often a router is stopped from running until the others have done all there is, and let go on.
    pub(crate) freezes: usize,
    pub(crate) order: Order,
    /// Whether the end of one concerns all of them, since the broker then shares everything anew.
    pub(crate) shares_anew: bool,
    /// What a router may have done and not told when it goes, or its broker: what its pool holds, and more where a source goes on with what it has read while the broker is away.
    pub(crate) in_hand: usize,
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
            freezes: 0,
            order: Order::Kept,
            shares_anew: false,
            in_hand: CAPACITY,
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
            message.headers.insert(BEGAN.to_owned(), micros().to_string());
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

    fn id(&self) -> u64 {
        u64::from(self.0.id())
    }

    fn signal(&self, name: &str) {
        let id = self.0.id().to_string();
        assert!(Command::new("kill").args([format!("-{name}"), id]).status().expect("kill").success());
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// ── the target ────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A call that ended well.
struct Success {
    number: u64,
    instance: u64,
    at: Instant,
}

/// A call for what another instance had done, while the caller was stopped from running.
struct Late {
    what: String,
    /// Who had done it, and when.
    doer: u64,
    done: Instant,
    at: Instant,
}

/// A call that began while another instance had one of the same group.
struct Overlap {
    what: String,
    instances: [u64; 2],
    at: Instant,
}

#[derive(Default)]
struct Seen {
    /// What succeeded, by group, in order, copies included.
    successes: BTreeMap<String, Vec<Success>>,
    /// Calls that are under way, by instance and group.
    under_way: HashMap<(u64, String), u64>,
    violations: Vec<String>,
    overlaps: Vec<Overlap>,
    late: Vec<Late>,
    /// The instance that was stopped from running, and when it went on, in microseconds since 1970.
    thawed: HashMap<u64, u64>,
    events: Vec<Event>,
}

/// What was done, to whom, and when.
struct Event {
    what: What,
    from: Instant,
    until: Instant,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Killed(u64),
    Stopped(u64),
    Restarted,
}

impl Event {
    /// Whether it explains something that one of these instances did, or left behind, at this time.
    fn explains(&self, at: Instant, instances: &[u64], shares_anew: bool) -> bool {
        let concerns = match self.what {
            What::Killed(one) | What::Stopped(one) => shares_anew || instances.contains(&one),
            What::Restarted => true,
        };
        // Whoever shares anew does so once the broker misses a member, and again for each that comes.
        let noticed_within = if shares_anew { 3 * NOTICED_WITHIN } else { NOTICED_WITHIN };
        concerns && at + TOLD_WITHIN >= self.from && at <= self.until + noticed_within
    }

    /// How far it is from a time.
    fn distance(&self, at: Instant) -> Duration {
        self.from.saturating_duration_since(at).max(at.saturating_duration_since(self.until))
    }

    /// As much as was in hand when it happened.
    fn in_hand_max(&self, plan: &Plan) -> usize {
        let is_all = plan.shares_anew || matches!(self.what, What::Restarted);
        if is_all { plan.in_hand * plan.instances } else { plan.in_hand }
    }
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
    fn enter(&self, instance: u64, began: u64, group: &str, number: u64) -> Under<'_> {
        let (mut seen, at) = (self.seen.lock().unwrap(), Instant::now());
        let seen = &mut *seen;
        let others =
            seen.under_way.iter().filter(|((other, theirs), _)| *other != instance && theirs == group);
        seen.overlaps.extend(others.map(|((other, _), theirs)| Overlap {
            what: format!("{group}#{number} of {instance} beside #{theirs} of {other}"),
            instances: [instance, *other],
            at,
        }));
        if seen.thawed.get(&instance).is_some_and(|thawed| began > *thawed) {
            let is_it = |event: &&Event| matches!(event.what, What::Stopped(it) if it == instance);
            let until = seen.events.iter().find(is_it).expect("it was stopped").until;
            let is_others = |it: &&Success| it.number == number && it.instance != instance && it.at <= until;
            let all = seen.successes.get(group).map_or(&[][..], Vec::as_slice);
            seen.late.extend(all.iter().filter(is_others).map(|it| Late {
                what: format!("{group}#{number} was done by {} while {instance} was stopped", it.instance),
                doer: it.instance,
                done: it.at,
                at,
            }));
        }
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
        let began = request.headers().get(BEGAN).and_then(|it| it.to_str().ok()?.parse().ok());
        let began: u64 = began.expect("every call is tagged");
        let Ok(body) = request.into_body().collect().await else { return answer(400) };
        let body: serde_json::Value = serde_json::from_slice(&body.to_bytes()).expect("our own payload");
        let (group, number) = (body["group"].as_str().unwrap(), body["number"].as_u64().unwrap());
        let under = self.enter(instance, began, group, number);
        let (fate, pause) = {
            let mut random = self.random.lock().unwrap();
            (random.u32(0..100), random.u64(0..8))
        };
        tokio::time::sleep(Duration::from_millis(pause)).await; // paced: a target takes its time
        if fate < 8 {
            return answer(500);
        }
        let success = Success { number, instance, at: Instant::now() };
        self.seen.lock().unwrap().successes.entry(group.to_owned()).or_default().push(success);
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
        let count = |all: &Vec<Success>| all.iter().map(|it| it.number).collect::<BTreeSet<_>>().len();
        seen.successes.values().map(count).sum()
    }

    /// The instance that has succeeded last.
    fn latest(&self) -> u64 {
        let seen = self.seen.lock().unwrap();
        let last = seen.successes.values().flatten().max_by_key(|success| success.at);
        last.expect("somebody has").instance
    }

    fn note(&self, what: What, from: Instant) {
        self.seen.lock().unwrap().events.push(Event { what, from, until: Instant::now() });
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
    let Plan { groups, messages, kills, restarts, freezes, instances, seed, .. } = *plan;
    eprintln!("seed {seed}: {kills} kills, {restarts} restarts, {freezes} stops");
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
    let steps = kills + restarts + freezes + 1;
    let (mut published, mut restarted, mut stopped) = (0, 0, 0);
    let mut batch = |count: usize, random: &mut fastrand::Rng| -> Vec<Outgoing> {
        let number = |_| {
            let group = random.usize(..groups);
            next[group] += 1;
            message(group, next[group] - 1, address)
        };
        (0..count).map(number).collect()
    };
    for step in 1..=steps {
        let until = messages * step / steps;
        let restarts_now = restarted < restarts && step * restarts >= restarted * steps + steps / 2;
        let stops_now = !restarts_now && stopped < freezes && step < steps;
        // One that is stopped has work in hand, and more comes for it.
        let first = if stops_now { (published + until) / 2 } else { until };
        let done = if stops_now { (published + first) / 2 } else { 0 };
        while published < first {
            let some = batch(20.min(first - published), &mut random);
            published += some.len();
            publish(&sink, some).await;
        }
        if step == steps {
            break;
        }
        // Somewhere in the middle of the work.
        target.wait_for(done.max(published.saturating_sub(random.usize(..CAPACITY)))).await;
        let (one, from) = (random.usize(..lives.len()), Instant::now());
        if restarts_now {
            restarted += 1;
            tokio::task::block_in_place(&mut restart);
            target.note(What::Restarted, from);
        } else if stops_now {
            stopped += 1;
            let id = target.latest();
            let life = lives.iter().find(|life| life.id() == id).expect("the latest to succeed lives");
            life.signal("STOP");
            publish(&sink, batch(until - published, &mut random)).await;
            published = until;
            // The others have done everything, also what it has in hand.
            target.wait_for(published).await;
            target.seen.lock().unwrap().thawed.insert(id, micros());
            target.note(What::Stopped(id), from);
            life.signal("CONT");
        } else {
            let id = lives[one].id();
            lives[one] = Life::begin(config);
            target.note(What::Killed(id), from);
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
    let mut violations = seen.violations.clone();
    let begun = seen.events.first().map_or_else(Instant::now, |event| event.from);
    // How many copies each event explains.
    let mut copies = vec![0; seen.events.len()];
    // The nearest one: the cause comes soon after what it undoes, or soon before.
    let explanation = |at: Instant, instances: &[u64]| {
        let all = seen
            .events
            .iter()
            .enumerate()
            .filter(|(_, event)| event.explains(at, instances, plan.shares_anew));
        all.min_by_key(|(_, event)| event.distance(at)).map(|(place, _)| place)
    };
    let mut slips = 0;
    for (group, count) in next.iter().enumerate() {
        let all = seen.successes.get(&format!("g{group}")).map_or(&[][..], Vec::as_slice);
        let numbers: Vec<u64> = all.iter().map(|it| it.number).collect();
        let mut first: Vec<&Success> = Vec::new();
        for success in all {
            let Some(before) = first.iter().find(|it| it.number == success.number) else {
                first.push(success);
                continue;
            };
            match explanation(before.at, &[before.instance]) {
                Some(event) => copies[event] += 1,
                None => violations.push(format!(
                    "g{group}#{} was delivered again by {}, though nothing happened to {} when it was done first",
                    success.number, success.instance, before.instance
                )),
            }
        }
        for (one, two) in first.iter().zip(first.iter().skip(1)).filter(|(one, two)| one.number > two.number)
        {
            slips += 1;
            let may_slip = |event: &&Event| {
                let is_restart = matches!(event.what, What::Restarted);
                plan.order == Order::SlipsAfterEvents
                    || (plan.order == Order::SlipsAfterRestarts && is_restart)
            };
            let mut events = seen.events.iter().filter(may_slip);
            let is_known = events.any(|event| event.from <= two.at && two.at <= event.until + NOTICED_WITHIN);
            if !is_known {
                let told: Vec<String> = all
                    .iter()
                    .map(|it| format!("{} by {} at {:.1?}", it.number, it.instance, it.at - begun))
                    .collect();
                violations.push(format!("g{group}#{} came behind #{}: {told:?}", two.number, one.number));
            }
        }
        let distinct: BTreeSet<u64> = numbers.iter().copied().collect();
        if distinct.into_iter().ne(0..*count) {
            violations.push(format!("g{group} has {count} messages, and saw {numbers:?}"));
        }
    }
    for (event, count) in seen.events.iter().zip(&copies).filter(|(it, count)| **count > it.in_hand_max(plan))
    {
        violations.push(format!("{:?}: {count} delivered again, more than was in hand", event.what));
    }
    // Who did it may have been killed before the broker knew, or the broker before it had written that down: then it was delivered anew.
    let is_anew = |late: &&Late| {
        let mut before = seen.events.iter().filter(|it| it.from <= late.at);
        before.any(|it| {
            !matches!(it.what, What::Stopped(_)) && it.explains(late.done, &[late.doer], plan.shares_anew)
        })
    };
    violations.extend(seen.late.iter().filter(|late| !is_anew(late)).map(|late| late.what.clone()));
    let is_explained =
        |it: &&Overlap| seen.events.iter().any(|event| event.explains(it.at, &it.instances, false));
    let unexplained = seen.overlaps.iter().filter(|it| !is_explained(it));
    violations.extend(unexplained.map(|it| format!("calls of a group in two places: {}", it.what)));
    let told = seen.events.iter().zip(&copies).map(|(event, count)| {
        let (from, until) = (event.from - begun, event.until - begun);
        format!("{:?} at {from:.1?} to {until:.1?}: {count}", event.what)
    });
    eprintln!(
        "{} delivered again, {} overlaps across instances, {slips} slips; by event: {:#?}",
        copies.iter().sum::<usize>(),
        seen.overlaps.len(),
        told.collect::<Vec<_>>()
    );
    assert_eq!(violations, Vec::<String>::new(), "seed {}", plan.seed);
}
