//! Two routers on one broker, killed at random moments and started again, while the broker itself is killed and started again, in front of a target
//! that fails at random.
//!
//! This process is the publisher and the target, and owns the broker. The routers are children: this test binary again with another test
//! (`the_router`), each a whole service with the broker among its sources. What is not acknowledged is published again, under the same
//! deduplication ids. At the end a checker proves, for every broker by the same rules:
//!
//! 1. Nothing that was acknowledged is lost.
//! 2. Per group, first successes come in the order of publication, without a gap.
//! 3. No two calls of a group overlap. Those of two routers may when a lease ran out under a router that was alive, which the router then has said.
//! 4. Whatever was delivered again is explained: the router that had delivered it was killed, the broker was restarted, a lease had run out, or
//!    the answer took so long that the router had given up waiting for it.
//!
//! The short runs in the suite have a few kills. `LANEWAY_CRASH_KILLS=100 cargo test -p laneway-router --all-features --test brokers_crash -- --nocapture`
//! has a hundred for each broker; `LANEWAY_SEED` chooses another seed than the one that is printed.
//!
//! A broker is added by a [`Ground`]: how it is started, and what the sections of its source and of its sink look like.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use laneway_router::config::{Config, Layering};
use laneway_router::service::Service;
use laneway_router::source::sink::{ConfiguredSink, Outgoing, Published, Sink};
use laneway_servers::Server;

/// No step takes longer than this, on a machine that is busy with others.
const DEADLINE: Duration = Duration::from_secs(240);

/// How long a router waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// How long a delivery is leased: what a kill costs.
const LEASE: Duration = Duration::from_secs(5);

const ROUTERS: usize = 2;
const GROUPS: usize = 24;

/// The publisher is no further ahead of the target than this.
const BEHIND_MAX: usize = 300;

// ── the broker ──────────────────────────────────────────────────────────────────────────────────────────────────────

/// A broker under test.
struct Ground {
    server: Server,
    /// The section of the source, and that of the sink.
    sections: (String, String),
}

#[cfg(feature = "postgres")]
#[test]
fn two_routers_on_postgres() {
    run(|| {
        let server = laneway_servers::postgres::start().expect("Postgres starts");
        let section = format!(
            "kind = postgres, url = \"{}\", queue = orders, connections = 4",
            laneway_servers::postgres::url(&server)
        );
        Ground { server, sections: (section.clone(), section) }
    });
}

// ── a router, in a process of its own ───────────────────────────────────────────────────────────────────────────────

/// The child. Alone, without the environment that the parent gives it, it has nothing to do.
#[test]
#[ignore = "the other tests run it as a process to kill"]
fn the_router() {
    let Ok(file) = std::env::var("LANEWAY_CRASH_CONFIG") else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = Config::load(&Layering::file(file)).expect("a configuration");
    let service = runtime.block_on(Service::start(config)).expect("the service starts while its broker is away");
    println!("\ncrash: ready");
    let teller = service.clone();
    runtime.spawn(async move {
        let mut told = 0;
        loop {
            let leases = teller.router().warnings().newest(1_000).into_iter().filter(|it| it.about == "lease");
            let lost: u64 = leases.map(|warning| warning.count).sum();
            if lost > told {
                told = lost;
                println!("\ncrash: lease");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    for line in std::io::stdin().lock().lines() {
        line.expect("a line");
        let sources = runtime.block_on(service.router().sources());
        let depth = sources.iter().find(|source| source.name == "orders").and_then(|source| source.depth);
        match depth {
            Some(depth) => println!("\ncrash: depth {} {}", depth.waiting + depth.leased, depth.dead),
            None => println!("\ncrash: depth unknown"),
        }
    }
}

/// A life of a router, seen from outside.
struct Life {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Life {
    fn begin(file: &Path, lost_leases: Arc<Mutex<Vec<Instant>>>) -> Life {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["the_router", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("LANEWAY_CRASH_CONFIG", file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the child starts");
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                match line.strip_prefix("crash: ") {
                    Some("lease") => lost_leases.lock().unwrap().push(Instant::now()),
                    Some(said) => drop(sender.send(said.to_owned())),
                    None => {}
                }
            }
        });
        let life = Life { child, input, lines };
        assert_eq!(life.hear(), "ready");
        life
    }

    fn hear(&self) -> String {
        self.lines.recv_timeout(DEADLINE).expect("the child says something")
    }

    fn depth(&mut self) -> String {
        writeln!(self.input, "depth").and_then(|()| self.input.flush()).expect("the child lives");
        self.hear()
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// ── the target ──────────────────────────────────────────────────────────────────────────────────────────────────────

/// Which router, and which of its lives.
type Who = (usize, u64);

/// A call that ended well.
#[derive(Clone, Copy)]
struct Success {
    number: u64,
    who: Who,
    began: Instant,
    ended: Instant,
}

#[derive(Default)]
struct Seen {
    successes: BTreeMap<String, Vec<Success>>,
    under_way: HashMap<String, Vec<(Who, u64)>>,
    violations: Vec<String>,
    /// Overlaps of two routers, and when.
    overlaps: Vec<(String, Instant)>,
    calls: u64,
}

struct Target {
    seen: Mutex<Seen>,
    random: Mutex<fastrand::Rng>,
    lives: [AtomicU64; ROUTERS],
    first_successes: AtomicUsize,
}

/// A call under way. Dropped when it is answered, and when its caller has gone.
struct Under<'a> {
    target: &'a Target,
    group: String,
    call: (Who, u64),
}

impl Drop for Under<'_> {
    fn drop(&mut self) {
        let mut seen = self.target.seen.lock().unwrap();
        let calls = seen.under_way.get_mut(&self.group).expect("it was entered");
        let place = calls.iter().position(|call| *call == self.call).expect("it was entered");
        calls.swap_remove(place);
    }
}

impl Target {
    fn enter(&self, who: Who, group: &str, number: u64) -> Under<'_> {
        let mut seen = self.seen.lock().unwrap();
        seen.calls += 1;
        let calls = seen.under_way.entry(group.to_owned()).or_default();
        let others = calls.clone();
        calls.push((who, number));
        for ((router, life), other) in others {
            let text = format!(
                "{group}#{number} began at router {who:?} while #{other} was under way at {:?}",
                (router, life)
            );
            match router == who.0 {
                true => seen.violations.push(text),
                false => seen.overlaps.push((text, Instant::now())),
            }
        }
        Under { target: self, group: group.to_owned(), call: (who, number) }
    }

    async fn handle(
        &self,
        lives: [u64; ROUTERS],
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Infallible> {
        let answer = |status| Ok(Response::builder().status(status).body(Full::default()).unwrap());
        // The routers sign their calls with different secrets; one of them has none.
        let router = usize::from(request.headers().contains_key("webhook-signature"));
        let who = (router, lives[router]);
        let Ok(body) = request.into_body().collect().await else { return answer(400) };
        let body: serde_json::Value = serde_json::from_slice(&body.to_bytes()).expect("our own payload");
        let (group, number) = (body["group"].as_str().unwrap(), body["number"].as_u64().unwrap());
        let began = Instant::now();
        let under = self.enter(who, group, number);
        let (fate, pause) = {
            let mut random = self.random.lock().unwrap();
            (random.u32(0..1_000), random.u64(0..8))
        };
        tokio::time::sleep(Duration::from_millis(pause)).await;
        match fate {
            0..1 => {
                // Answers when the caller has long given up.
                tokio::time::sleep(TIMEOUT * 2).await;
                return answer(504);
            }
            1..60 => return answer(500),
            60..80 => return answer(503),
            _ => {}
        }
        let success = Success { number, who, began, ended: Instant::now() };
        {
            let mut seen = self.seen.lock().unwrap();
            let successes = seen.successes.entry(group.to_owned()).or_default();
            if successes.iter().all(|other| other.number != number) {
                self.first_successes.fetch_add(1, SeqCst);
            }
            successes.push(success);
        }
        drop(under);
        answer(200)
    }

    async fn serve(self: Arc<Self>, listener: tokio::net::TcpListener) {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let target = Arc::clone(&self);
            let lives = [0, 1].map(|router| self.lives[router].load(SeqCst));
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let target = Arc::clone(&target);
                    async move { target.handle(lives, request).await }
                });
                let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    }

    /// How many messages were delivered.
    fn served(&self) -> usize {
        self.first_successes.load(SeqCst)
    }
}

// ── the publisher ───────────────────────────────────────────────────────────────────────────────────────────────────

struct Publisher {
    random: fastrand::Rng,
    address: std::net::SocketAddr,
    sink: ConfiguredSink,
    next: Vec<u64>,
    /// What was sent and not acknowledged.
    unsure: Vec<(usize, u64)>,
}

impl Publisher {
    /// Publishes a few messages. What is not acknowledged is sent again the next time.
    async fn publish(&mut self) -> bool {
        if self.unsure.is_empty() {
            for _ in 0..self.random.usize(1..20) {
                let group = self.random.usize(0..GROUPS);
                self.unsure.push((group, self.next[group]));
                self.next[group] += 1;
            }
        }
        let batch = self.unsure.iter().map(|(group, number)| self.outgoing(*group, *number)).collect();
        match self.sink.publish(batch).await {
            Ok(published) => {
                assert_eq!(published.len(), self.unsure.len());
                assert!(published.iter().all(|it| matches!(it, Published::Accepted { .. })), "{published:?}");
                self.unsure.clear();
                true
            }
            Err(_) => false,
        }
    }

    fn sent(&self) -> usize {
        self.next.iter().sum::<u64>() as usize
    }

    fn outgoing(&self, group: usize, number: u64) -> Outgoing {
        let id = format!("g{group}#{number}");
        let text = serde_json::json!({
            "id": id, "poolCode": "", "messageGroupId": format!("g{group}"), "deduplicationId": id,
            "mediationTarget": format!("http://{}/", self.address),
            "payload": { "group": format!("g{group}"), "number": number },
        });
        Outgoing {
            id: id.clone(),
            group: Some(format!("g{group}").into()),
            deduplication_id: Some(id),
            text: text.to_string().into_bytes().into(),
            headers: BTreeMap::new(),
        }
    }
}

// ── the test ────────────────────────────────────────────────────────────────────────────────────────────────────────

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

/// The configuration of one of the routers.
fn config(ground: &Ground, router: usize) -> String {
    let (source, sink) = &ground.sections;
    let secrets = if router == 0 { "[]" } else { "[\"whsec_bGFuZXdheWxhbmV3YXlsYW5ld2F5bGFuZXdheQ==\"]" };
    format!(
        "laneway {{
           http.bind = \"127.0.0.1:0\", queue.queues = [], lease = {} ms
           sources.orders {{ {source} }}
           sinks.orders {{ {sink} }}
           mediator {{ timeout = {} ms, breaker.calls-min = 100, signing-secrets = {secrets} }}
           pool-defaults {{ concurrency = 16, capacity = 200, group-capacity = 20, attempts = 3, backoff = 5 ms
             exhausted = give-back, give-back = 30 ms }}
         }}",
        LEASE.as_millis(),
        TIMEOUT.as_millis()
    )
}

/// What happened, for the checker.
#[derive(Default)]
struct History {
    kills: Vec<(Who, Instant)>,
    /// When the broker went, and when it was back.
    outages: Vec<(Instant, Instant)>,
    lost_leases: Arc<Mutex<Vec<Instant>>>,
}

fn run(start: impl FnOnce() -> Ground) {
    let (kills, seed) = (number("LANEWAY_CRASH_KILLS", 6), number("LANEWAY_SEED", 7));
    eprintln!("seed {seed}, {kills} kills");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let target = Arc::new(Target {
        seen: Mutex::default(),
        random: Mutex::new(fastrand::Rng::with_seed(seed)),
        lives: [AtomicU64::new(0), AtomicU64::new(0)],
        first_successes: AtomicUsize::new(0),
    });
    runtime.spawn(Arc::clone(&target).serve(listener));
    let mut ground = start();
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<_> = (0..ROUTERS)
        .map(|router| {
            let file = folder.path().join(format!("router-{router}.conf"));
            std::fs::write(&file, config(&ground, router)).unwrap();
            file
        })
        .collect();
    let ours = Config::load(&Layering::file(&files[0])).expect("a configuration");
    let sink = ConfiguredSink::new("orders", Arc::clone(&ours.sinks["orders"]));
    let random = fastrand::Rng::with_seed(seed + 1);
    let mut publisher = Publisher { random, address, sink, next: vec![0; GROUPS], unsure: Vec::new() };
    let mut history = History::default();
    let mut routers: Vec<Life> =
        files.iter().map(|file| Life::begin(file, Arc::clone(&history.lost_leases))).collect();

    for round in 0..kills {
        publish_for(&runtime, &mut publisher, &target);
        if round % 3 == 1 {
            let gone = Instant::now();
            ground.server.kill().expect("the broker was there");
            ground.server.resume().expect("the broker comes back");
            history.outages.push((gone, Instant::now()));
        }
        let router = publisher.random.usize(0..ROUTERS);
        routers[router].child.kill().expect("the router was there");
        let life = target.lives[router].fetch_add(1, SeqCst);
        history.kills.push(((router, life), Instant::now()));
        routers[router] = Life::begin(&files[router], Arc::clone(&history.lost_leases));
    }
    finish(&runtime, &mut publisher, &mut routers, &target);
    check(&target, &publisher.next, &history);
}

/// Publishes for a while, not too far ahead of the target, and until something of it was delivered.
fn publish_for(runtime: &tokio::runtime::Runtime, publisher: &mut Publisher, target: &Target) {
    let (lasts, begin, served) =
        (Duration::from_millis(publisher.random.u64(200..900)), Instant::now(), target.served());
    while begin.elapsed() < lasts || target.served() < served + 20 {
        assert!(begin.elapsed() < DEADLINE, "nothing is delivered: {} of {}", target.served(), publisher.sent());
        let behind = publisher.sent().saturating_sub(target.served());
        if behind > BEHIND_MAX || !runtime.block_on(publisher.publish()) {
            std::thread::sleep(Duration::from_millis(5)); // paced: the publisher lets the routers catch up, or the broker come back
        }
    }
}

/// The last lives are left alone until all is delivered and the queue is empty.
fn finish(
    runtime: &tokio::runtime::Runtime,
    publisher: &mut Publisher,
    routers: &mut [Life],
    target: &Target,
) {
    let begin = Instant::now();
    while !publisher.unsure.is_empty() {
        assert!(begin.elapsed() < DEADLINE, "the last messages are not acknowledged");
        if !runtime.block_on(publisher.publish()) {
            std::thread::sleep(Duration::from_millis(20)); // paced: the broker comes back
        }
    }
    loop {
        let depth = routers[0].depth();
        let done = target.served() == publisher.sent();
        // A broker that cannot tell is taken at the target's word.
        if done && matches!(depth.as_str(), "depth 0 0" | "depth unknown") {
            break;
        }
        assert!(
            begin.elapsed() < DEADLINE,
            "the queue does not drain: {depth}, {} of {} delivered",
            target.served(),
            publisher.sent()
        );
        std::thread::sleep(Duration::from_millis(50)); // paced: the queue is asked until it is empty
    }
}

fn check(target: &Target, published: &[u64], history: &History) {
    let seen = target.seen.lock().unwrap();
    let lost_leases = history.lost_leases.lock().unwrap();
    assert_eq!(seen.violations, Vec::<String>::new());
    for (overlap, at) in &seen.overlaps {
        let is_near = |lost: &Instant| lost.max(at).duration_since(*lost.min(at)) < LEASE * 2;
        assert!(lost_leases.iter().any(is_near), "{overlap}, and no lease had run out");
    }
    let mut repeated = 0;
    for (group, count) in published.iter().enumerate() {
        let name = format!("g{group}");
        let successes = seen.successes.get(&name).map_or(&[][..], Vec::as_slice);
        let mut first: BTreeMap<u64, Success> = BTreeMap::new();
        let mut order = Vec::new();
        for success in successes {
            match first.get(&success.number) {
                None => {
                    first.insert(success.number, *success);
                    order.push(success.number);
                }
                Some(before) => {
                    assert!(
                        history.explains(before, success, &lost_leases),
                        "{name}#{} was delivered twice for no reason",
                        success.number
                    );
                    repeated += 1;
                }
            }
        }
        assert_eq!(order, (0..*count).collect::<Vec<_>>(), "{name}: in order, and nothing is lost");
    }
    let all: u64 = published.iter().sum();
    eprintln!(
        "{all} messages, {} calls, {repeated} repeated, {} overlaps after a lost lease, {} kills, {} outages",
        seen.calls,
        seen.overlaps.len(),
        history.kills.len(),
        history.outages.len()
    );
}

impl History {
    /// Whether it is known why a message was delivered again.
    fn explains(&self, before: &Success, again: &Success, lost_leases: &[Instant]) -> bool {
        let between = |at: Instant| before.began <= at && at <= again.ended + LEASE;
        let was_killed = self.kills.iter().any(|(who, at)| *who == before.who && between(*at));
        let was_away = self.outages.iter().any(|(gone, back)| *gone <= again.ended && *back + LEASE >= before.began);
        let was_lost = lost_leases.iter().any(|at| between(*at));
        let was_late = before.ended - before.began >= TIMEOUT * 3 / 4;
        was_killed || was_away || was_lost || was_late
    }
}
