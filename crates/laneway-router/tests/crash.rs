//! A router that is killed at random moments, with SIGKILL, and started again, in front of a target that fails at random.
//!
//! This process is the publisher and the target; the router is a child, this test binary again with another test (`the_router`), reading an
//! embedded queue from a file. The publisher sends messages through the child's standard input and goes on when they are acknowledged; what was not when
//! the child died it publishes again, under the same deduplication ids. The target records what it sees. At the end a checker proves:
//!
//! 1. Nothing that was acknowledged is lost.
//! 2. Per group, first successes come in the order of publication, without a gap.
//! 3. Within one life of the router no two calls of a group overlap. Connections of a life are gone before the next one begins.
//! 4. What was delivered again in the same life had its first success so long ago that the router had given up waiting for the answer. What was delivered
//!    again in a later life had it among the last successes of its own: there was no time to write it down. ([`UNWRITTEN_MAX`]; an older one would have
//!    come back although it was settled.)
//!
//! The short run in the suite has ten kills. `cargo xtask crash --kills 100` has a hundred; `LANEWAY_SEED` chooses another seed than the one that is printed.
//!
//! The child is not the binary `laneway`, which belongs to another package and is not built before this test; it is what `laneway serve` makes of its
//! configuration, a store and a router, without the HTTP API. The binary itself is killed and started again by the tests of `laneway-cli` (parked groups, standby).

use std::collections::{BTreeMap, HashMap, HashSet};
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
use laneway_router::mediator::{
    BreakerSettings, HttpMediator, HttpSettings, Mediator, Mediators, Signer, Simulated,
};
use laneway_router::message::Message;
use laneway_router::pool::{Exhausted, PoolSettings};
use laneway_router::router::{Router, SourceSettings};
use laneway_router::source::Source;
use laneway_router::source::embedded::{Durability, EmbeddedStore, Options, Publication};

/// No step of the test takes longer than this, on a machine that is busy with others.
const DEADLINE: Duration = Duration::from_secs(120);

/// How long the router waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(2);

const GROUPS: usize = 24;

/// So many of the last successes of a life may come again: what the pool can hold, since a message leaves it when its settlement is on disk.
const UNWRITTEN_MAX: usize = CAPACITY;

/// Of the pool.
const CAPACITY: usize = 200;

/// The publisher is no further ahead of the target than this.
const BEHIND_MAX: usize = 300;

// ── the router, in a process of its own ─────────────────────────────────────────────────────────────────────────────

/// The child. Alone, without the environment that the parent gives it, it has nothing to do.
#[test]
#[ignore = "the other test runs it as a process to kill"]
fn the_router() {
    let Ok(file) = std::env::var("LANEWAY_CRASH_FILE") else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let options = Options { durability: Durability::Crash, ..Options::default() };
    let store = EmbeddedStore::open(Path::new(&file), options).expect("the queue opens after every crash");
    let queue = store.queue("orders").unwrap();
    let _router = runtime.block_on(async {
        let router = start(&store);
        println!("\ncrash: ready");
        router
    });
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        runtime.block_on(async {
            if line == "depth" {
                let depth = queue.depth().await.unwrap();
                println!("\ncrash: depth {} {}", depth.waiting + depth.leased, depth.dead);
            } else {
                let messages = line.split('\t').map(|json| Message::parse(json.as_bytes()).unwrap());
                let messages = messages.map(|message| Publication::of(&message)).collect();
                queue.publish_many(messages, None).await.expect("published");
                println!("\ncrash: ok");
            }
        });
    }
}

fn start(store: &EmbeddedStore) -> Router {
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
    let make = move |_: &PoolSettings| -> Arc<dyn Mediator> { Arc::new(mediators.clone()) };
    let router = Router::start(pool, Arc::new(make)).unwrap();
    let source = store.queue("orders").unwrap();
    router.add_source(Arc::new(source), SourceSettings { lease: Duration::from_secs(5) });
    router
}

/// A life of the router, seen from outside.
struct Life {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Life {
    fn begin(file: &Path) -> Life {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["the_router", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("LANEWAY_CRASH_FILE", file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the child starts");
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(said) = line.strip_prefix("crash: ") {
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        let life = Life { child, input, lines };
        assert_eq!(life.hear().as_deref(), Some("ready"));
        life
    }

    /// The next thing it says; nothing if it is dead.
    fn hear(&self) -> Option<String> {
        match self.lines.recv_timeout(DEADLINE) {
            Ok(line) => Some(line),
            Err(mpsc::RecvTimeoutError::Disconnected) => None,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("the child says nothing"),
        }
    }

    fn ask(&mut self, line: &str) -> Option<String> {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush()).ok()?;
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

/// A call that ended well.
#[derive(Clone, Copy)]
struct Success {
    number: u64,
    life: u64,
    began: Instant,
    /// Among all successes.
    place: usize,
}

#[derive(Default)]
struct Seen {
    successes: BTreeMap<String, Vec<Success>>,
    /// How many there were when each life had ended.
    ends: BTreeMap<u64, usize>,
    under_way: HashMap<(u64, String), u64>,
    violations: Vec<String>,
    calls: u64,
}

impl Seen {
    /// How many calls ended well.
    fn served(&self) -> usize {
        self.successes.values().map(Vec::len).sum()
    }

    /// How many calls ended well between this one and the end of its life.
    fn before_the_end(&self, success: &Success) -> usize {
        self.ends[&success.life] - success.place
    }
}

struct Target {
    seen: Mutex<Seen>,
    random: Mutex<fastrand::Rng>,
    life: AtomicU64,
    connections: AtomicUsize,
}

/// A call under way. Dropped when it is answered, and when its caller has gone.
struct Under<'a> {
    target: &'a Target,
    key: (u64, String),
}

impl Drop for Under<'_> {
    fn drop(&mut self) {
        self.target.seen.lock().unwrap().under_way.remove(&self.key);
    }
}

impl Target {
    fn enter(&self, life: u64, group: &str, number: u64) -> Under<'_> {
        let key = (life, group.to_owned());
        let mut seen = self.seen.lock().unwrap();
        seen.calls += 1;
        if let Some(other) = seen.under_way.insert(key.clone(), number) {
            seen.violations.push(format!("{group}#{number} began while #{other} was under way"));
        }
        Under { target: self, key }
    }

    async fn handle(
        &self,
        life: u64,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Infallible> {
        let answer = |status| Ok(Response::builder().status(status).body(Full::default()).unwrap());
        let Ok(body) = request.into_body().collect().await else { return answer(400) };
        let body: serde_json::Value = serde_json::from_slice(&body.to_bytes()).expect("our own payload");
        let (group, number) = (body["group"].as_str().unwrap(), body["number"].as_u64().unwrap());
        let began = Instant::now();
        let under = self.enter(life, group, number);
        let (fate, pause) = {
            let mut random = self.random.lock().unwrap();
            (random.u32(0..1_000), random.u64(0..8))
        };
        tokio::time::sleep(Duration::from_millis(pause)).await; // paced: a target takes its time
        match fate {
            0..2 => {
                // Answers when the caller has long given up.
                tokio::time::sleep(TIMEOUT * 2).await; // paced: as long as nobody waits
                return answer(504);
            }
            2..80 => return answer(500),
            80..100 => return answer(503),
            _ => {}
        }
        {
            let mut seen = self.seen.lock().unwrap();
            let place = seen.served();
            let success = Success { number, life, began, place };
            seen.successes.entry(group.to_owned()).or_default().push(success);
        }
        drop(under);
        answer(200)
    }

    async fn serve(self: Arc<Self>, listener: tokio::net::TcpListener) {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (target, life) = (Arc::clone(&self), self.life.load(SeqCst));
            target.connections.fetch_add(1, SeqCst);
            tokio::spawn(async move {
                let here = Arc::clone(&target);
                let service = service_fn(move |request| {
                    let target = Arc::clone(&here);
                    async move { target.handle(life, request).await }
                });
                let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
                target.connections.fetch_sub(1, SeqCst);
            });
        }
    }

    /// How many calls ended well.
    fn served(&self) -> usize {
        self.seen.lock().unwrap().served()
    }

    /// Waits until the connections of a life that has ended are gone, and begins the next one.
    fn next_life(&self) {
        let begin = Instant::now();
        while self.connections.load(SeqCst) > 0 {
            assert!(begin.elapsed() < DEADLINE, "connections of a dead process");
            std::thread::sleep(Duration::from_millis(1)); // paced: the kernel closes them, and tells nobody else
        }
        let mut seen = self.seen.lock().unwrap();
        let served = seen.served();
        seen.ends.insert(self.life.fetch_add(1, SeqCst), served);
    }
}

// ── the publisher ───────────────────────────────────────────────────────────────────────────────────────────────────

struct Publisher {
    random: fastrand::Rng,
    address: std::net::SocketAddr,
    next: Vec<u64>,
    /// What was sent and not acknowledged.
    unsure: Vec<(usize, u64)>,
}

impl Publisher {
    /// Publishes a few messages. What is not acknowledged is sent again the next time.
    fn publish(&mut self, life: &mut Life) -> bool {
        if self.unsure.is_empty() {
            for _ in 0..self.random.usize(1..20) {
                let group = self.random.usize(0..GROUPS);
                self.unsure.push((group, self.next[group]));
                self.next[group] += 1;
            }
        }
        let line: Vec<String> =
            self.unsure.iter().map(|(group, number)| self.json(*group, *number)).collect();
        let acknowledged = life.ask(&line.join("\t")).as_deref() == Some("ok");
        if acknowledged {
            self.unsure.clear();
        }
        acknowledged
    }

    fn sent(&self) -> usize {
        self.next.iter().sum::<u64>() as usize
    }

    fn json(&self, group: usize, number: u64) -> String {
        let id = format!("g{group}#{number}");
        serde_json::json!({
            "id": id, "poolCode": "", "messageGroupId": format!("g{group}"), "deduplicationId": id,
            "mediationTarget": format!("http://{}/", self.address),
            "payload": { "group": format!("g{group}"), "number": number },
        })
        .to_string()
    }
}

// ── the test ────────────────────────────────────────────────────────────────────────────────────────────────────────

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn a_router_that_is_killed_loses_nothing_and_keeps_the_order() {
    let (kills, seed) = (number("LANEWAY_CRASH_KILLS", 10), number("LANEWAY_SEED", 4));
    eprintln!("seed {seed}, {kills} kills");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let target = Arc::new(Target {
        seen: Mutex::default(),
        random: Mutex::new(fastrand::Rng::with_seed(seed)),
        life: AtomicU64::new(0),
        connections: AtomicUsize::new(0),
    });
    runtime.spawn(Arc::clone(&target).serve(listener));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("queue.db");
    let random = fastrand::Rng::with_seed(seed + 1);
    let mut publisher = Publisher { random, address, next: vec![0; GROUPS], unsure: Vec::new() };

    for _ in 0..kills {
        let mut life = Life::begin(&file);
        let (lives, begin) = (Duration::from_millis(publisher.random.u64(30..500)), Instant::now());
        while begin.elapsed() < lives {
            let behind = publisher.sent().saturating_sub(target.served());
            if behind > BEHIND_MAX {
                std::thread::sleep(Duration::from_millis(2)); // paced: the publisher lets the router catch up
            } else if !publisher.publish(&mut life) {
                break;
            }
        }
        drop(life);
        target.next_life();
    }
    finish(&mut publisher, &file, &target);
    check(&target, &publisher.next, kills);
}

/// The last life is left alone until the queue is empty.
fn finish(publisher: &mut Publisher, file: &Path, target: &Target) {
    let mut life = Life::begin(file);
    while !publisher.unsure.is_empty() {
        publisher.publish(&mut life);
    }
    let begin = Instant::now();
    loop {
        let depth = life.ask("depth");
        if depth.as_deref() == Some("depth 0 0") {
            break;
        }
        assert!(begin.elapsed() < DEADLINE, "the queue does not drain: {depth:?}");
        std::thread::sleep(Duration::from_millis(20)); // paced: the queue is asked until it is empty
    }
    drop(life);
    target.next_life();
}

fn check(target: &Target, published: &[u64], kills: u64) {
    let seen = target.seen.lock().unwrap();
    assert_eq!(seen.violations, Vec::<String>::new());
    let (mut repeated, mut oldest) = (0, 0);
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
                Some(before) if before.life == success.life => {
                    let explained = success.began - before.began >= TIMEOUT;
                    assert!(explained, "{name}#{} was delivered twice in one life", success.number);
                    repeated += 1;
                }
                Some(before) => {
                    let age = seen.before_the_end(before);
                    assert!(
                        age <= UNWRITTEN_MAX,
                        "{name}#{} came again, although {age} successes of its life were younger",
                        success.number
                    );
                    (repeated, oldest) = (repeated + 1, oldest.max(age));
                }
            }
        }
        assert_eq!(order, (0..*count).collect::<Vec<_>>(), "{name}: in order, and nothing is lost");
    }
    let all: u64 = published.iter().sum();
    let lives: HashSet<u64> = seen.successes.values().flatten().map(|success| success.life).collect();
    eprintln!(
        "{all} messages, {} calls, {repeated} repeated after a crash, the oldest of them {oldest} successes before it, {kills} kills",
        seen.calls
    );
    assert!(all > kills * 10 && lives.len() as u64 > kills / 2, "the lives were long enough to do something");
}
