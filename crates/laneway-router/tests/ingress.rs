//! The network ingress over real sockets: every line has its answer, families keep their order, and no client can do harm to the others.
//!
//! The mediator is a script: it records what it is called for with the engine's own witness, waits at a gate where a test wants to see something held, and
//! gives the verdicts that a test asks for. Payloads carry the number of a task in its family, so that gaps, doubles and overlaps are seen, and not
//! only a wrong direction (pitfall 003.10).

#[path = "../../laneway/tests/witness/mod.rs"]
mod witness;

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use laneway::{Account, RetryPolicy};
use laneway_router::{
    ingress::{Ingress, Rejection, Settings, StartError},
    mediator::{Call, Mediator, Verdict},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::Semaphore,
    time::timeout,
};
use witness::{A_MOMENT, DEADLINE, Witness};

/// What the mediator is told to do about a call; it may wait.
type Script = Box<dyn Fn(Called) -> BoxFuture<'static, Verdict> + Send + Sync>;

/// A call, by value.
#[derive(Clone, Debug)]
struct Called {
    id: String,
    family: String,
    /// The payload, if it is a number.
    number: u64,
    sequence: u64,
    attempt: u32,
}

/// A mediator that follows a script.
struct Scripted {
    witness: Arc<Witness<String>>,
    script: Script,
    calls: Mutex<Vec<Called>>,
}

impl Mediator for Scripted {
    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict> {
        let payload = call.message.payload.as_ref().map_or("0", |payload| payload.get());
        let called = Called {
            id: call.message.id.clone(),
            family: call.key.to_owned(),
            number: payload.parse().unwrap_or(0),
            sequence: call.sequence,
            attempt: call.attempt,
        };
        Box::pin(async move {
            let attempt = self.witness.enter(&called.family, called.number);
            self.calls.lock().unwrap().push(called.clone());
            let verdict = (self.script)(called).await;
            if matches!(verdict, Verdict::Done | Verdict::Final { .. }) {
                attempt.done();
            }
            verdict
        })
    }
}

fn scripted<F, R>(script: F) -> Arc<Scripted>
where
    F: Fn(Called) -> R + Send + Sync + 'static,
    R: Future<Output = Verdict> + Send + 'static,
{
    let script: Script = Box::new(move |called| Box::pin(script(called)));
    Arc::new(Scripted { witness: Witness::new(), script, calls: Mutex::default() })
}

/// Done, after other tasks have had a chance to get in between.
fn quick() -> Arc<Scripted> {
    scripted(|called: Called| async move {
        for _ in 0..(called.number + called.family.len() as u64) % 4 {
            tokio::task::yield_now().await;
        }
        Verdict::Done
    })
}

/// Waits at the gate if the condition holds.
fn gated(gate: &Arc<Semaphore>, holds: impl Fn(&Called) -> bool + Send + Sync + 'static) -> Arc<Scripted> {
    let (gate, holds) = (gate.clone(), Arc::new(holds));
    scripted(move |called| {
        let (gate, holds) = (gate.clone(), holds.clone());
        async move {
            if holds(&called) {
                let pass = timeout(DEADLINE, gate.acquire()).await;
                pass.expect("nobody opened the gate").unwrap().forget();
            }
            Verdict::Done
        }
    })
}

/// Lets everybody pass, now and later.
fn open(gate: &Semaphore) {
    gate.add_permits(1_000_000);
}

fn settings() -> Settings {
    let retry = RetryPolicy { base: Duration::from_millis(1), ..RetryPolicy::default() };
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    // Most of these clients do not close before we do.
    let linger_time = 2 * A_MOMENT;
    Settings { listen, retry, linger_time, shutdown_grace: DEADLINE, ..Settings::default() }
}

async fn start(settings: Settings, mediator: &Arc<Scripted>) -> Ingress {
    Ingress::start(settings, mediator.clone()).await.expect("it starts")
}

/// Ends it, and everything must have been handled.
async fn end(ingress: Ingress) -> Account {
    let report = timeout(2 * DEADLINE, ingress.shutdown(DEADLINE)).await.expect("it ends");
    assert!(report.account.balances(), "{}", report.account);
    assert_eq!((report.account.outstanding, report.returned.len(), report.still_running), (0, 0, 0));
    assert_eq!(report.connections_cut, 0);
    report.account
}

/// Looks again and again until something has come that announces itself to nobody.
async fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !reached() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await; // paced: between two looks at what announces itself to nobody
    }
}

struct Client {
    input: BufReader<OwnedReadHalf>,
    output: OwnedWriteHalf,
}

impl Client {
    async fn connect(to: &Ingress) -> Client {
        let stream = TcpStream::connect(to.address()).await.expect("it listens");
        let (input, output) = stream.into_split();
        Client { input: BufReader::new(input), output }
    }

    async fn send(&mut self, text: impl AsRef<[u8]>) {
        let sent = timeout(DEADLINE, self.output.write_all(text.as_ref())).await;
        sent.expect("it is read").expect("the connection holds");
    }

    /// The next answer; `None` at the end of the connection.
    async fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = timeout(DEADLINE, self.input.read_line(&mut line)).await.expect("an answer");
        let ended = read.expect("the connection ends properly") == 0;
        assert!(ended || line.ends_with('\n'), "half an answer: {line:?}");
        (!ended).then(|| line.trim_end_matches('\n').to_owned())
    }

    /// So many answers.
    async fn answers(&mut self, count: usize) -> Vec<String> {
        let mut answers = Vec::new();
        for _ in 0..count {
            let Some(answer) = self.next().await else { panic!("the connection ended after {answers:?}") };
            answers.push(answer);
        }
        answers
    }

    /// All answers up to the end of the connection.
    async fn rest(&mut self) -> Vec<String> {
        let mut answers = Vec::new();
        while let Some(answer) = self.next().await {
            answers.push(answer);
        }
        answers
    }

    /// Nothing more will be sent.
    async fn finish(&mut self) {
        self.output.shutdown().await.unwrap();
    }
}

/// A line of a family, with its number as the payload.
fn line(family: &str, number: u64, more: &str) -> String {
    format!("{{\"id\":\"{family}-{number}\",\"correlationId\":\"{family}\",\"payload\":{number}{more}}}\n")
}

fn lines(family: &str, numbers: std::ops::Range<u64>, more: &str) -> String {
    numbers.map(|number| line(family, number, more)).collect()
}

const NOTIFY: &str = ",\"notify\":true";
const STRICT: &str = ",\"strict\":true";

/// The part of an answer before the detail.
fn head(answer: &str) -> &str {
    answer.split('\t').next().unwrap()
}

fn heads(answers: &[String]) -> Vec<&str> {
    answers.iter().map(|answer| head(answer)).collect()
}

// ── order ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_families_over_several_connections_keep_their_order() {
    const CONNECTIONS: u64 = 4;
    const FAMILIES: u64 = 50;
    const TASKS: u64 = 40;
    let mediator = quick();
    let ingress = start(Settings { partition_capacity: 16_384, ..settings() }, &mediator).await;
    let mut clients = Vec::new();
    for connection in 0..CONNECTIONS {
        let client = Client::connect(&ingress).await;
        clients.push(tokio::spawn(async move {
            let family = |family: u64| format!("f{connection}.{family}");
            let text: String = (0..TASKS)
                .flat_map(|n| (0..FAMILIES).map(move |f| (n, f)))
                .map(|(number, f)| line(&family(f), number, NOTIFY))
                .collect();
            let mut output = client.output;
            // Sent in one go while the answers are read: more than the places, so that the reader has to stop and go on.
            let sending = tokio::spawn(async move {
                output.write_all(text.as_bytes()).await.unwrap();
                output
            });
            let mut accepted = HashSet::new();
            let mut done: HashMap<String, u64> = HashMap::new();
            let mut input = client.input;
            for _ in 0..2 * FAMILIES * TASKS {
                let mut answer = String::new();
                timeout(DEADLINE, input.read_line(&mut answer)).await.expect("an answer").unwrap();
                match answer.trim_end().split_once(':').unwrap() {
                    ("ACK", id) => assert!(accepted.insert(id.to_owned()), "{id} was accepted twice"),
                    ("DONE", id) => {
                        assert!(accepted.contains(id), "{id} was done before it was accepted");
                        let (family, number) = id.rsplit_once('-').unwrap();
                        let due = done.entry(family.to_owned()).or_default();
                        assert_eq!(number.parse::<u64>().unwrap(), *due, "completions of {family} in order");
                        *due += 1;
                    }
                    _ => panic!("{answer}"),
                }
            }
            assert_eq!(accepted.len() as u64, FAMILIES * TASKS);
            drop(sending.await.unwrap());
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    let expected = (0..CONNECTIONS).flat_map(|c| (0..FAMILIES).map(move |f| (format!("f{c}.{f}"), TASKS)));
    mediator.witness.verify(expected);
    let total = CONNECTIONS * FAMILIES * TASKS;
    eventually("the engine is quiet", || ingress.stats().partitions.iter().all(|p| p.outstanding == 0)).await;
    let stats = ingress.stats();
    let sum = |of: fn(&laneway_router::ingress::PartitionStats) -> u64| -> u64 {
        stats.partitions.iter().map(of).sum()
    };
    assert_eq!(stats.partitions.len(), 4);
    assert!(stats.partitions.iter().all(|partition| partition.tasks_in > 0), "every partition has families");
    assert_eq!((stats.lines, stats.accepted, sum(|p| p.tasks_in)), (total, total, total));
    assert_eq!((sum(|p| p.tasks_dispatched), sum(|p| p.tasks_completed)), (total, total));
    assert_eq!((sum(|p| p.tasks_failed), sum(|p| p.active_families as u64)), (0, 0));
    assert_eq!((stats.completions_answered, stats.completions_dropped), (total, 0));
    assert_eq!(stats.bytes_held, 0);
    assert_eq!(stats.rejections.values().sum::<u64>(), 0);
    eventually("the connections are gone", || ingress.stats().connections_open == 0).await;
    assert_eq!(ingress.stats().connections_opened, CONNECTIONS);
    assert_eq!(end(ingress).await.done, total);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_family_that_several_connections_feed_runs_one_at_a_time() {
    let mediator = scripted(|_| async {
        tokio::task::yield_now().await;
        Verdict::Done
    });
    let ingress = start(Settings { workers: 8, ..settings() }, &mediator).await;
    let mut clients = Vec::new();
    for connection in 0..4 {
        let mut client = Client::connect(&ingress).await;
        clients.push(tokio::spawn(async move {
            let text: String =
                (0..100).map(|n| format!("{{\"id\":\"{connection}.{n}\",\"correlationId\":7}}\n")).collect();
            client.send(text).await;
            client.finish().await;
            let answers = client.rest().await;
            let expected: Vec<_> = (0..100).map(|n| format!("ACK:{connection}.{n}")).collect();
            assert_eq!(answers, expected, "each line has its answer");
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    end(ingress).await;
    let overlaps = mediator.witness.violations().into_iter().filter(|v| v.starts_with("overlap")).count();
    assert_eq!(overlaps, 0);
    let calls = mediator.calls.lock().unwrap();
    assert_eq!(calls.len(), 400);
    for connection in 0..4 {
        let own = calls.iter().filter_map(|call| call.id.strip_prefix(&format!("{connection}.")));
        let own: Vec<u64> = own.map(|number| number.parse().unwrap()).collect();
        assert_eq!(own, (0..100).collect::<Vec<_>>(), "in the order of its connection");
    }
    let grows = calls.windows(2).all(|pair| pair[0].sequence < pair[1].sequence);
    assert!(grows, "sequences grow along a family, whoever submitted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_family_is_serial_and_holds_up_nobody() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |called| called.family == "hot");
    let ingress = start(Settings { workers: 2, ..settings() }, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(lines("hot", 0..300, "")).await;
    assert!(client.answers(300).await.iter().all(|answer| answer.starts_with("ACK:hot-")));
    // While its head stands at the gate, all others are done, in its own partition too.
    let others: String = (0..100).map(|family| lines(&format!("cold{family}"), 0..3, NOTIFY)).collect();
    client.send(others).await;
    let answers = client.answers(600).await;
    assert_eq!(answers.iter().filter(|answer| answer.starts_with("DONE:cold")).count(), 300);
    assert_eq!(mediator.witness.attempts(&"hot".to_owned()), 1, "one at a time");
    let stats = ingress.stats();
    let deepest = stats.partitions.iter().map(|partition| partition.max_pending_depth_observed).max();
    assert_eq!(deepest, Some(300));
    assert_eq!(stats.partitions.iter().map(|partition| partition.active_families).sum::<usize>(), 1);
    assert!(stats.partitions.iter().any(|partition| partition.enqueued_due_to_busy > 0));
    open(&gate);
    end(ingress).await;
    let cold = (0..100).map(|family| (format!("cold{family}"), 3));
    mediator.witness.verify(cold.chain([("hot".to_owned(), 300)]));
}

// ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test]
async fn a_full_family_is_busy_and_another_is_not() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let ingress = start(Settings { family_capacity: 3, ..settings() }, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(lines("a", 0..5, NOTIFY) + &line("b", 0, "")).await;
    let answers = client.answers(6).await;
    let expected = ["ACK:a-0", "ACK:a-1", "ACK:a-2", "REJ:BUSY:a-3", "REJ:BUSY:a-4", "ACK:b-0"];
    assert_eq!(heads(&answers), expected);
    assert!(answers[3].ends_with("line 4: its family is full"), "{}", answers[3]);
    open(&gate);
    assert_eq!(client.answers(3).await, ["DONE:a-0", "DONE:a-1", "DONE:a-2"]);
    assert_eq!(ingress.stats().rejected(Rejection::Busy), 2);
    assert_eq!(end(ingress).await.accepted, 4);
    mediator.witness.verify([("a".to_owned(), 3), ("b".to_owned(), 1)]);
}

#[tokio::test]
async fn a_refused_line_leaves_no_place_taken() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let ingress = start(Settings { family_capacity: 1, answers_max: 3, ..settings() }, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    // One after the other: within a gulp, only the first refused line gets as far as the engine.
    for number in 0..20 {
        client.send(line("a", number, NOTIFY)).await;
        let answers = client.answers(1).await;
        let expected = if number == 0 { "ACK:a-0".to_owned() } else { format!("REJ:BUSY:a-{number}") };
        assert_eq!(heads(&answers), [expected]);
    }
    open(&gate);
    assert_eq!(client.answers(1).await, ["DONE:a-0"]);
    end(ingress).await;
}

#[tokio::test]
async fn pitfall_003_5_a_full_partition_is_busy() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let bounds = Settings { partitions: 1, partition_capacity: 10, family_capacity: 10, ..settings() };
    let ingress = start(bounds, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    let text: String = (0..25).map(|family| line(&format!("f{family}"), 0, "")).collect();
    client.send(text).await;
    let answers = client.answers(25).await;
    assert!(answers[..10].iter().all(|answer| answer.starts_with("ACK:")), "{answers:?}");
    assert!(answers[10..].iter().all(|answer| answer.ends_with("its partition is full")), "{answers:?}");
    // What has room again is accepted again.
    open(&gate);
    eventually("there is room", || ingress.stats().partitions[0].outstanding == 0).await;
    client.send(line("f20", 0, "")).await;
    assert_eq!(client.answers(1).await, ["ACK:f20-0"]);
    end(ingress).await;
}

#[tokio::test]
async fn long_lines_are_bounded_by_their_bytes() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let bounds = Settings { line_bytes_max: 1_000, bytes_max: 2_500, ..settings() };
    let ingress = start(bounds, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    let long = |id: u64| {
        let payload = "x".repeat(850);
        format!("{{\"id\":{id},\"correlationId\":{id},\"payload\":\"{payload}\"}}\n")
    };
    client.send(long(1) + &long(2) + &long(3)).await;
    let answers = client.answers(3).await;
    assert_eq!(heads(&answers), ["ACK:1", "ACK:2", "REJ:BUSY:3"]);
    assert!(answers[2].contains("bytes"), "{answers:?}");
    open(&gate);
    end(ingress).await;
}

/// The client sends everything at once, and what was refused again, in order, until nothing is refused. With strict lines no timing can make
/// the accepted ones come out of order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pitfall_003_11_strict_lines_are_never_turned_around() {
    const TASKS: u64 = 600;
    // The first one waits until the others have been refused once; from then on they race.
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |called| called.number == 0);
    let ingress = start(Settings { family_capacity: 3, ..settings() }, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    let (mut due, mut rounds): (Vec<u64>, _) = ((0..TASKS).collect(), 0);
    while !due.is_empty() {
        rounds += 1;
        assert!(rounds < 10_000, "no progress: {due:?}");
        let text: String = due.iter().map(|number| line("a", *number, STRICT)).collect();
        client.send(text).await;
        let answers = client.answers(due.len()).await;
        let refused = due.iter().zip(&answers).filter(|(number, answer)| match head(answer) {
            accepted if accepted == format!("ACK:a-{number}") => false,
            refused if refused == format!("REJ:BUSY:a-{number}") => true,
            _ => panic!("{number}: {answer}"),
        });
        due = refused.map(|(number, _)| *number).collect();
        let first = due.first().copied().unwrap_or(TASKS);
        assert_eq!(due, (first..TASKS).collect::<Vec<_>>(), "after a refusal, all later ones are refused");
        open(&gate);
    }
    assert!(rounds > 1, "something was refused");
    end(ingress).await;
    mediator.witness.verify([("a".to_owned(), TASKS)]);
}

#[tokio::test]
async fn pitfall_003_11_a_held_family_waits_for_the_refused_line_on_its_connection_only() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let ingress = start(Settings { family_capacity: 1, ..settings() }, &mediator).await;
    let (mut client, mut other) = (Client::connect(&ingress).await, Client::connect(&ingress).await);
    client.send(line("a", 0, "") + &line("a", 1, STRICT)).await;
    assert_eq!(heads(&client.answers(2).await), ["ACK:a-0", "REJ:BUSY:a-1"]);
    open(&gate);
    eventually("there is room", || ingress.stats().partitions.iter().all(|p| p.outstanding == 0)).await;
    client.send(line("a", 2, "")).await;
    let answers = client.answers(1).await;
    assert!(answers[0].starts_with("REJ:BUSY:a-2\t") && answers[0].contains("earlier line"), "{answers:?}");
    other.send("{\"id\":\"o\",\"correlationId\":\"b\"}\n").await;
    assert_eq!(other.answers(1).await, ["ACK:o"]);
    client.send(line("a", 1, STRICT)).await;
    assert_eq!(client.answers(1).await, ["ACK:a-1"]);
    eventually("there is room", || ingress.stats().partitions.iter().all(|p| p.outstanding == 0)).await;
    client.send(line("a", 2, "")).await;
    assert_eq!(client.answers(1).await, ["ACK:a-2"]);
    end(ingress).await;
}

#[tokio::test]
async fn too_many_held_families_end_the_connection() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let bounds =
        Settings { partitions: 1, partition_capacity: 1, family_capacity: 1, answers_max: 4, ..settings() };
    let ingress = start(bounds, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    let text: String = (0..20).map(|family| line(&format!("f{family}"), 0, STRICT)).collect();
    client.send(text).await;
    let answers = client.rest().await;
    let mut expected = vec!["ACK:f0-0".to_owned()];
    expected.extend((1..6).map(|family| format!("REJ:BUSY:f{family}-0")));
    expected.push("REJ:HELD:".to_owned());
    assert_eq!(heads(&answers), expected);
    open(&gate);
    end(ingress).await;
}

#[tokio::test]
async fn one_connection_too_many_is_told_so() {
    let mediator = quick();
    let ingress = start(Settings { connections_max: 1, ..settings() }, &mediator).await;
    let mut first = Client::connect(&ingress).await;
    first.send(line("a", 0, "")).await;
    assert_eq!(first.answers(1).await, ["ACK:a-0"]);
    let mut second = Client::connect(&ingress).await;
    // It talks before it listens, as clients do; the answer must arrive all the same.
    second.send(lines("b", 0..100, "")).await;
    let answers = second.rest().await;
    let told = "REJ:CONNECTIONS:\tthere are 1 connections, and no more are allowed";
    assert_eq!(answers, [told]);
    first.finish().await;
    assert_eq!(first.rest().await, Vec::<String>::new());
    eventually("its place is free", || ingress.stats().connections_open == 0).await;
    drop(second);
    let mut third = Client::connect(&ingress).await;
    third.send(line("c", 0, "")).await;
    assert_eq!(third.answers(1).await, ["ACK:c-0"]);
    drop(third);
    end(ingress).await;
}

// ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test]
async fn every_bad_line_is_refused_and_the_connection_goes_on() {
    let mediator = quick();
    let ingress = start(Settings { line_bytes_max: 400, ..settings() }, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    let deep =
        format!("{{\"id\":\"t\",\"correlationId\":1,\"payload\":{}{}}}", "[".repeat(100), "]".repeat(100));
    let long_id = format!("{{\"id\":\"{}\",\"correlationId\":1}}", "x".repeat(300));
    let huge = "y".repeat(1_000_000);
    let bad: Vec<(&[u8], &str)> = vec![
        (b"nonsense", "REJ:MALFORMED:"),
        (b"{", "REJ:MALFORMED:"),
        (b"\x00\x01\x02", "REJ:MALFORMED:"),
        (b"GET / HTTP/1.1\r", "REJ:MALFORMED:"),
        (b"{\"id\":\"\xff\"}", "REJ:NOT_UTF8:"),
        (b"[1,2,3]", "REJ:BAD_FIELD:"),
        (b"{}", "REJ:BAD_FIELD:"),
        (br#"{"id":"t"}"#, "REJ:BAD_FIELD:t"),
        (br#"{"id":["t"],"correlationId":1}"#, "REJ:BAD_FIELD:"),
        (br#"{"id":"t","correlationId":{}}"#, "REJ:BAD_FIELD:t"),
        (br#"{"id":"t","correlationId":1,"unknown":0}"#, "REJ:BAD_FIELD:t"),
        (br#"{"id":"a\nACK:b","correlationId":1}"#, "REJ:BAD_FIELD:"),
        (br#"{"id":"t","correlationId":1,"mediationType":"HTTP"}"#, "REJ:BAD_FIELD:t"),
        (deep.as_bytes(), "REJ:TOO_DEEP:t"),
        (long_id.as_bytes(), "REJ:BAD_FIELD:"),
        (huge.as_bytes(), "REJ:TOO_LONG:"),
    ];
    let total = bad.len() as u64;
    for (line, expected) in bad {
        // With an empty line before it, which is not answered, and a good one behind it, which is.
        client.send([b"\n", line, b"\n{\"id\":\"good\",\"correlationId\":1}\n"].concat()).await;
        let answers = client.answers(2).await;
        let shown = String::from_utf8_lossy(&line[..line.len().min(60)]);
        assert_eq!(heads(&answers), [expected, "ACK:good"], "{shown}: {answers:?}");
        assert!(answers[0].contains("\tline "), "it says which line: {answers:?}");
    }
    let stats = ingress.stats();
    assert_eq!((stats.lines, stats.blank_lines, stats.accepted), (2 * total, total, total));
    assert_eq!(stats.rejections.values().sum::<u64>(), total);
    assert_eq!((stats.rejected(Rejection::Malformed), stats.rejected(Rejection::TooLong)), (4, 1));
    end(ingress).await;
}

/// What a page in a browser can make it send to any port: a request whose body it chooses.
#[tokio::test]
async fn a_connection_that_begins_as_http_is_hung_up_on_before_its_body() {
    let mediator = quick();
    let ingress = start(Settings { line_bytes_max: 400, ..settings() }, &mediator).await;
    let (task, long) = (line("a", 0, ""), format!("POST /{} HTTP/1.1", "x".repeat(1_000)));
    let begins = ["POST / HTTP/1.1", "GET / HTTP/1.0", "PRI * HTTP/2.0", &long];
    for begin in begins {
        let mut client = Client::connect(&ingress).await;
        let head = format!("{begin}\r\nHost: 127.0.0.1:7003\r\nContent-Length: {}\r\n\r\n", task.len());
        client.send(head + &task).await;
        let answers = client.rest().await;
        assert_eq!(answers, ["REJ:HTTP:\tthis is not HTTP: a line is a task, as JSON"], "{begin:.20}");
    }
    let stats = ingress.stats();
    assert_eq!((stats.accepted, stats.rejected(Rejection::Http)), (0, begins.len() as u64));
    assert_eq!(stats.rejections.values().sum::<u64>(), begins.len() as u64);
    assert_eq!(end(ingress).await.accepted, 0);
}

#[tokio::test]
async fn a_last_line_without_newline_is_unfinished() {
    let mediator = quick();
    let ingress = start(settings(), &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(line("a", 0, "") + line("a", 1, "").trim_end()).await;
    client.finish().await;
    let answers = client.rest().await;
    assert_eq!(answers, ["ACK:a-0", "REJ:UNFINISHED:\tline 2: ends without a newline"]);
    assert_eq!(end(ingress).await.accepted, 1);
}

#[tokio::test]
async fn a_line_that_drips_is_cut_off() {
    let mediator = quick();
    let ingress = start(Settings { line_time: A_MOMENT, line_bytes_max: 100, ..settings() }, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(line("a", 0, "") + "{\"id\":").await;
    let answers = client.rest().await;
    assert_eq!(heads(&answers), ["ACK:a-0", "REJ:SLOW:"]);
    assert!(answers[1].contains("line 2: not complete after"), "{answers:?}");
    // A line that is too long has its answer already, and gets no second one.
    let mut client = Client::connect(&ingress).await;
    client.send("x".repeat(150)).await;
    assert_eq!(heads(&client.rest().await), ["REJ:TOO_LONG:"]);
    assert_eq!(ingress.stats().rejected(Rejection::Slow), 2);
    end(ingress).await;
}

#[tokio::test]
async fn an_idle_connection_is_closed_unless_something_is_owed() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let ingress = start(Settings { idle_time: A_MOMENT, ..settings() }, &mediator).await;
    let mut idle = Client::connect(&ingress).await;
    let mut waiting = Client::connect(&ingress).await;
    waiting.send(line("a", 0, NOTIFY)).await;
    assert_eq!(waiting.answers(1).await, ["ACK:a-0"]);
    assert_eq!(heads(&idle.rest().await), ["REJ:IDLE:"]);
    let mut byte = [0];
    let early = timeout(4 * A_MOMENT, waiting.input.read(&mut byte)).await;
    assert!(early.is_err(), "who waits for an answer is not idle: {early:?}");
    open(&gate);
    assert_eq!(heads(&waiting.rest().await), ["DONE:a-0", "REJ:IDLE:"]);
    end(ingress).await;
}

// ── bad clients ───────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_is_not_read_from_and_then_cut_off() {
    const LINES: usize = 1_000_000;
    let mediator = quick();
    let bounds = Settings { answers_max: 16, write_time: Duration::from_millis(200), ..settings() };
    let ingress = start(bounds, &mediator).await;
    let client = Client::connect(&ingress).await;
    // Two bytes that are answered with fifty: the answers fill every buffer on their way long before the lines do.
    let mut output = client.output;
    let sending = tokio::spawn(async move {
        let _ = output.write_all("x\n".repeat(LINES).as_bytes()).await;
        output
    });
    eventually("it is cut off", || ingress.stats().clients_lost == 1).await;
    let stats = ingress.stats();
    assert!(stats.lines < LINES as u64, "reading has stopped after {} lines", stats.lines);
    // Nobody else has noticed.
    let mut other = Client::connect(&ingress).await;
    other.send(line("a", 0, NOTIFY)).await;
    assert_eq!(other.answers(2).await, ["ACK:a-0", "DONE:a-0"]);
    drop((client.input, other));
    drop(timeout(DEADLINE, sending).await.expect("the sender is told").unwrap());
    eventually("both are gone", || ingress.stats().connections_open == 0).await;
    end(ingress).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_places_are_enough_for_everything() {
    let mediator = quick();
    let ingress = start(Settings { answers_max: 2, ..settings() }, &mediator).await;
    let client = Client::connect(&ingress).await;
    let (mut input, mut output) = (client.input, client.output);
    let sending = tokio::spawn(async move {
        for number in 0..500 {
            let more = if number % 3 == 0 { NOTIFY } else { "" };
            output.write_all((line("a", number, more) + "bad\n").as_bytes()).await.unwrap();
        }
        output.shutdown().await.unwrap();
    });
    let mut seen = HashMap::<String, u64>::new();
    let mut answer = String::new();
    while timeout(DEADLINE, input.read_line(&mut answer)).await.expect("an answer").unwrap() > 0 {
        *seen.entry(answer.split(':').next().unwrap().to_owned()).or_default() += 1;
        answer.clear();
    }
    sending.await.unwrap();
    let expected = [("ACK", 500), ("DONE", 167), ("REJ", 500)];
    assert_eq!(seen, expected.map(|(kind, count)| (kind.to_owned(), count)).into());
    end(ingress).await;
    mediator.witness.verify([("a".to_owned(), 500)]);
}

#[tokio::test]
async fn what_a_client_that_has_gone_was_owed_is_dropped_and_its_tasks_are_not() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let ingress = start(settings(), &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(lines("a", 0..10, NOTIFY) + "{\"id\":\"half").await;
    assert_eq!(client.answers(10).await.len(), 10);
    // A connection that breaks, instead of ending.
    let stream = client.input.into_inner().reunite(client.output).unwrap();
    stream.set_zero_linger().unwrap();
    drop(stream);
    eventually("it is noticed", || ingress.stats().clients_lost == 1).await;
    eventually("it is closed", || ingress.stats().connections_open == 0).await;
    open(&gate);
    eventually("all are dropped", || ingress.stats().completions_dropped == 10).await;
    let stats = ingress.stats();
    assert_eq!((stats.completions_answered, stats.lines), (0, 10), "half a line is none");
    assert_eq!(end(ingress).await.done, 10);
    mediator.witness.verify([("a".to_owned(), 10)]);
}

#[tokio::test]
async fn a_client_that_only_stops_sending_gets_all_its_completions() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let ingress = start(settings(), &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(lines("a", 0..3, NOTIFY)).await;
    client.finish().await;
    assert_eq!(client.answers(3).await.len(), 3);
    open(&gate);
    assert_eq!(client.rest().await, ["DONE:a-0", "DONE:a-1", "DONE:a-2"]);
    end(ingress).await;
}

// ── verdicts ──────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test]
async fn verdicts_become_outcomes_and_keep_the_order() {
    let mediator = scripted(|called: Called| async move {
        let reason = format!("attempt {} of {}", called.attempt, called.id);
        let delay = Duration::from_millis(1);
        match (called.family.as_str(), called.number, called.attempt) {
            ("final", 1, _) => Verdict::Final { reason },
            ("again", 1, 1) => Verdict::Again { delay: None, reason },
            ("again", 1, 2) => Verdict::Again { delay: Some(delay), reason },
            ("never", 0, _) => Verdict::Again { delay: Some(delay), reason },
            ("panics", 0, _) => panic!("so it was written"),
            _ => Verdict::Done,
        }
    });
    let ingress = start(settings(), &mediator).await;
    let mut client = Client::connect(&ingress).await;
    let families = ["final", "again", "never", "panics"];
    let text: String = families.iter().map(|family| lines(family, 0..3, NOTIFY)).collect();
    client.send(text).await;
    let answers = client.answers(24).await;
    let of = |family: &str| -> Vec<&str> {
        let about = |answer: &&String| !answer.starts_with("ACK") && answer.contains(&format!(":{family}-"));
        answers.iter().filter(about).map(String::as_str).collect()
    };
    assert_eq!(of("final"), ["DONE:final-0", "FAIL:final-1\tattempt 1 of final-1", "DONE:final-2"]);
    assert_eq!(of("again"), ["DONE:again-0", "DONE:again-1", "DONE:again-2"]);
    assert_eq!(of("never"), ["FAIL:never-0\tattempt 3 of never-0", "DONE:never-1", "DONE:never-2"]);
    let panicked = "FAIL:panics-0\tpanicked: so it was written";
    assert_eq!(of("panics"), [panicked, "DONE:panics-1", "DONE:panics-2"]);
    let account = end(ingress).await;
    assert_eq!((account.done, account.failed), (9, 3));
    let calls = mediator.calls.lock().unwrap();
    let tries: Vec<_> = calls.iter().filter(|call| call.family == "again").collect();
    assert_eq!(
        tries.iter().map(|call| (call.number, call.attempt)).collect::<Vec<_>>(),
        [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)]
    );
    assert_eq!(tries[1].sequence, tries[3].sequence, "a task keeps its sequence when it is tried again");
    assert!(tries[3].sequence < tries[4].sequence);
}

#[tokio::test]
async fn patience_costs_no_attempt() {
    let asked = Arc::new(AtomicU64::new(0));
    let counter = asked.clone();
    let mediator = scripted(move |_| {
        let asked = counter.fetch_add(1, SeqCst);
        async move {
            match asked {
                0..20 => Verdict::Wait {
                    delay: Duration::from_micros(100),
                    called: true,
                    reason: "not now".to_owned(),
                },
                _ => Verdict::Done,
            }
        }
    });
    let ingress = start(settings(), &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(line("a", 0, NOTIFY)).await;
    assert_eq!(client.answers(2).await, ["ACK:a-0", "DONE:a-0"]);
    assert!(mediator.calls.lock().unwrap().iter().all(|call| call.attempt == 1));
    end(ingress).await;
}

// ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_drains_and_answers_everything() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |called| called.number == 0);
    let ingress = start(settings(), &mediator).await;
    let address = ingress.address();
    let (mut client, mut idle) = (Client::connect(&ingress).await, Client::connect(&ingress).await);
    client.send(lines("a", 0..50, NOTIFY)).await;
    assert_eq!(client.answers(50).await.len(), 50);
    idle.send(line("b", 1, "")).await;
    idle.answers(1).await;
    let ending = tokio::spawn(end(ingress));
    // What comes after the beginning of the end is refused, and told so.
    let mut late = 0;
    loop {
        client.send(line("late", late, "")).await;
        let answer = client.answers(1).await.remove(0);
        late += 1;
        if head(&answer) == format!("REJ:CLOSED:late-{}", late - 1) {
            break;
        }
        assert_eq!(answer, format!("ACK:late-{}", late - 1));
    }
    let refused = async {
        while TcpStream::connect(address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, refused).await.expect("nobody listens any more");
    client.send("{\"id\":\"half").await;
    open(&gate);
    let mut answers = client.rest().await;
    let unfinished = "REJ:CLOSED:\tline ";
    // The half line may or may not have been read when the end came.
    if answers.last().is_some_and(|last| last.starts_with(unfinished)) {
        answers.pop();
    }
    assert_eq!(answers, (0..50).map(|number| format!("DONE:a-{number}")).collect::<Vec<_>>());
    assert_eq!(idle.rest().await, Vec::<String>::new());
    drop((client, idle));
    // The one of the idle client, and those that came before the end began.
    assert_eq!(ending.await.unwrap().done, 50 + 1 + (late - 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_not_started_is_given_back() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let ingress = start(settings(), &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(lines("a", 0..10, NOTIFY)).await;
    assert_eq!(client.answers(10).await.len(), 10);
    eventually("the first one runs", || !mediator.calls.lock().unwrap().is_empty()).await;
    let ending = tokio::spawn(ingress.shutdown(Duration::ZERO));
    client.send("\n{\"id\":\"late\",\"correlationId\":1}\n").await;
    let late = client.answers(1).await;
    assert!(late[0] == "ACK:late" || late[0].starts_with("REJ:CLOSED:late"), "{late:?}");
    open(&gate);
    let answers = client.rest().await;
    drop(client);
    let report = timeout(2 * DEADLINE, ending).await.expect("it ends").unwrap();
    assert!(report.account.balances() && report.still_running == 0, "{}", report.account);
    let returned: Vec<_> = report.returned.iter().filter(|message| message.id != "late").collect();
    let done = answers.iter().filter(|answer| answer.starts_with("DONE:a-")).count();
    assert_eq!(done + returned.len(), 10);
    assert!(done >= 1, "what ran was waited for");
    let mut expected: Vec<_> = (0..done).map(|number| format!("DONE:a-{number}")).collect();
    let failed = |number| format!("FAIL:a-{number}\tgiven back: the ingress has shut down");
    expected.extend((done..10).map(failed));
    assert_eq!(answers, expected, "whoever waits for a completion gets one");
    let ids: Vec<_> = returned.iter().map(|message| message.id.clone()).collect();
    assert_eq!(ids, (done..10).map(|number| format!("a-{number}")).collect::<Vec<_>>(), "in order");
}

#[tokio::test]
async fn a_client_that_does_not_let_go_is_cut_off_at_the_end() {
    let mediator = quick();
    let ingress = start(Settings { linger_time: A_MOMENT, ..settings() }, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(line("a", 0, "")).await;
    client.answers(1).await;
    end(ingress).await;
    assert_eq!(client.next().await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_cannot_hold_up_the_end() {
    let mediator = quick();
    let ingress = start(Settings { write_time: 10 * DEADLINE, ..settings() }, &mediator).await;
    let client = Client::connect(&ingress).await;
    let mut output = client.output;
    let sending = tokio::spawn(async move {
        let _ = output.write_all("x\n".repeat(1_000_000).as_bytes()).await;
        output
    });
    eventually("it sends", || ingress.stats().lines > 10_000).await;
    let report = timeout(DEADLINE, ingress.shutdown(DEADLINE)).await.expect("it ends");
    assert!(report.connections_cut <= 1 && report.account.accepted == 0);
    drop(client.input);
    drop(timeout(DEADLINE, sending).await.expect("the sender is told").unwrap());
}

#[tokio::test]
async fn a_dropped_ingress_lets_its_clients_go() {
    let gate = Arc::new(Semaphore::new(0));
    let mediator = gated(&gate, |_| true);
    let ingress = start(Settings { linger_time: A_MOMENT, ..settings() }, &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(lines("a", 0..2, NOTIFY)).await;
    assert_eq!(client.answers(2).await, ["ACK:a-0", "ACK:a-1"]);
    eventually("the first one runs", || !mediator.calls.lock().unwrap().is_empty()).await;
    drop(ingress);
    let mut rest = Vec::new();
    let gone = timeout(DEADLINE, client.input.read_to_end(&mut rest)).await;
    drop(gone.expect("the connection ends"));
    open(&gate);
}

#[tokio::test]
async fn it_does_not_start_where_it_cannot() {
    let mediator = quick();
    let ingress = start(settings(), &mediator).await;
    let taken = Settings { listen: ingress.address(), ..settings() };
    let error = Ingress::start(taken, mediator.clone()).await.unwrap_err();
    assert!(matches!(&error, StartError::Listen { .. }), "{error}");
    let error = Ingress::start(Settings { partitions: 5, ..settings() }, mediator.clone()).await.unwrap_err();
    assert!(error.to_string().contains("a power of two, such as 4 or 8"), "{error}");
    end(ingress).await;
}

#[tokio::test]
async fn statistics_have_the_names_of_the_document() {
    let mediator = quick();
    let ingress = start(settings(), &mediator).await;
    let json = serde_json::to_value(ingress.stats()).unwrap();
    for name in [
        "tasksIn",
        "tasksDispatched",
        "tasksCompleted",
        "enqueuedDueToBusy",
        "maxPendingDepthObserved",
        "activeFamilies",
    ] {
        assert!(json["partitions"][0][name].is_u64(), "{name}: {json}");
    }
    assert_eq!(json["rejections"]["BUSY"], 0);
    end(ingress).await;
}

/// The session of the guide, as it stands there.
#[tokio::test]
async fn the_guide_tells_the_truth() {
    let guide = include_str!("../../../docs/guide/ingress.md");
    let between = |from: &str, to: &str| {
        let start = guide.find(from).expect(from) + from.len();
        &guide[start..start + guide[start..].find(to).expect(to)]
    };
    let (sent, told) = (between("<<'LINES'\n", "LINES\n"), between("before `t-1`.\n\n```text\n", "```"));
    let mediator = quick();
    let ingress = start(settings(), &mediator).await;
    let mut client = Client::connect(&ingress).await;
    client.send(sent).await;
    client.finish().await;
    let answers = client.rest().await;
    let done = |answer: &&str| answer.starts_with("DONE");
    let of = |answers: Vec<&str>| -> (Vec<String>, Vec<String>) {
        let (done, first): (Vec<_>, Vec<_>) = answers.into_iter().partition(done);
        (first.into_iter().map(str::to_owned).collect(), done.into_iter().map(str::to_owned).collect())
    };
    assert_eq!(of(answers.iter().map(String::as_str).collect()), of(told.lines().collect()));
    end(ingress).await;
}
