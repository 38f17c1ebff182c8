//! SQS as users meet it: several messages of a group at a time, a server that goes away, bad input, bad credentials, publishing in order, and what the doctor says.
//!
//! What every source must keep is in `sqs_conformance.rs`.

mod broker;
mod instances;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use broker::{PATIENCE, Witness, of_the_guide, router, text};
use laneway_router::message::Secret;
use laneway_router::source::broker::{Broker, Examination, Level, Role};
use laneway_router::source::sink::{Outgoing, Published};
use laneway_router::source::sqs::{Keys, SqsSettings};
use laneway_router::source::{Disposal, Settled, SourceError, Wants};
use laneway_servers::sqs;
use serde_json::json;
use tokio::sync::mpsc;

fn settings(url: &str) -> SqsSettings {
    let keys = Keys {
        access_key_id: "test".to_owned(),
        secret_access_key: Secret::new("test"),
        session_token: None,
    };
    SqsSettings { poll: Duration::from_secs(1), keys: Some(keys), ..SqsSettings::new(url) }
}

/// A FIFO queue with a redrive policy, and the queue that it names.
fn queues(server: &str, receives: u32) -> (String, String) {
    let fifo = ("FifoQueue", "true");
    let dead = sqs::create_queue(server, "dead.fifo", &[fifo]).expect("a queue");
    let asked = json!({ "QueueUrl": dead, "AttributeNames": ["QueueArn"] });
    let arn = sqs::call(server, "GetQueueAttributes", &asked).expect("attributes");
    let arn = arn["Attributes"]["QueueArn"].as_str().expect("an arn").to_owned();
    let policy = json!({ "deadLetterTargetArn": arn, "maxReceiveCount": receives.to_string() }).to_string();
    let url = sqs::create_queue(server, "orders.fifo", &[fifo, ("RedrivePolicy", &policy)]).expect("a queue");
    (url, dead)
}

fn outgoing(group: &str, number: usize, text: String) -> Outgoing {
    Outgoing {
        id: format!("{group}#{number}"),
        group: Some(group.into()),
        deduplication_id: Some(format!("{group}#{number}")),
        text: text.into_bytes().into(),
        headers: [("x-trace".to_owned(), "1".to_owned())].into(),
    }
}

async fn publish(url: &str, groups: &[&str], numbers: std::ops::Range<usize>) {
    let sink = settings(url).open_sink("out".into()).await.expect("a sink");
    let of = |number: usize| groups.iter().map(move |group| outgoing(group, number, text(group, number)));
    let batch: Vec<_> = numbers.flat_map(of).collect();
    let count = batch.len();
    let published = sink.publish(batch).await.expect("published");
    assert_eq!(published.len(), count);
    assert!(published.iter().all(|it| matches!(it, Published::Accepted { sequence: Some(_), .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_arrive_in_order_although_the_server_goes_away_and_poison_is_put_aside() {
    let mut server = sqs::start_fauxqs().expect("fauxqs starts");
    let at = sqs::endpoint(&server);
    let (url, dead) = queues(&at, 1_000);
    let source = settings(&url).open_source("orders".into()).await.expect("a source");
    let witness = Arc::new(Witness::new(Duration::from_millis(5), Some("bad")));
    publish(&url, &["a", "b", "bad"], 0..5).await;
    let sink = settings(&url).open_sink("out".into()).await.expect("a sink");
    sink.publish(vec![outgoing("a", 5, "{not json".to_owned())]).await.expect("published");
    let router = router(&witness, source, Duration::from_secs(5));
    witness.wait_for(8).await;
    server.kill().expect("it was there");
    let sick = async {
        while router.sources().await[0].healthy {
            tokio::time::sleep(Duration::from_millis(50)).await; // paced: until the router has noticed
        }
    };
    tokio::time::timeout(PATIENCE, sick).await.expect("the router says that the source is away");
    server.resume().expect("it comes back");
    publish(&url, &["a", "b"], 5..12).await;
    witness.wait_for(12 + 12 + 5).await;
    let report = router.shutdown(Duration::from_secs(20)).await;
    assert!(report.settled, "{report:?}");
    let repeats = witness.verify(&[("a", 12), ("b", 12), ("bad", 5)]);
    assert!(witness.numbered() >= 29, "all of them");
    assert!(repeats <= 20, "only what was in flight is repeated: {repeats}");
    // One whose answer was lost with the server is put there again: this server forgets deduplication ids when it ends.
    let mut distinct = std::collections::BTreeSet::new();
    loop {
        let asked = json!({ "QueueUrl": dead, "MaxNumberOfMessages": 10 });
        let kept = sqs::call(&at, "ReceiveMessage", &asked).expect("an answer");
        let kept = kept["Messages"].as_array().cloned().unwrap_or_default();
        if kept.is_empty() {
            break;
        }
        for message in kept {
            distinct.insert(message["Body"].to_string());
            let done = json!({ "QueueUrl": dead, "ReceiptHandle": message["ReceiptHandle"] });
            sqs::call(&at, "DeleteMessage", &done).expect("deleted");
        }
    }
    assert_eq!(distinct.len(), 6, "five refused ones and the poison: {distinct:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_messages_of_a_group_come_in_one_receive_in_order() {
    let server = sqs::start_moto().expect("moto starts");
    let at = sqs::endpoint(&server);
    let (url, _) = queues(&at, 1_000);
    publish(&url, &["a", "b"], 0..4).await;
    let source = settings(&url).open_source("orders".into()).await.expect("a source");
    let wants = Wants { most: 10, wait: Duration::from_secs(5), lease: Duration::from_secs(30) };
    let held = source.claim(wants).await.expect("a claim");
    for group in ["a", "b"] {
        let of: Vec<_> = held.iter().filter(|it| it.group.as_deref() == Some(group)).collect();
        let expected: Vec<_> = (0..of.len()).map(|number| text(group, number).into_bytes()).collect();
        assert_eq!(of.iter().map(|it| it.text.to_vec()).collect::<Vec<_>>(), expected);
    }
    assert_eq!(held.len(), 8, "all of both groups at once");
    // The whole group goes back, in one question, and comes again in order.
    let back = held.iter().map(|it| (it.receipt.clone(), Disposal::GiveBack { delay: Duration::ZERO }));
    assert_eq!(source.settle(back.collect()).await, Ok(vec![Settled::Settled; 8]));
    let again = source.claim(wants).await.expect("a claim");
    let texts = |held: &[laneway_router::source::Delivery], group: &str| -> Vec<Vec<u8>> {
        held.iter().filter(|it| it.group.as_deref() == Some(group)).map(|it| it.text.to_vec()).collect()
    };
    for group in ["a", "b"] {
        assert_eq!(texts(&again, group), texts(&held, group));
    }
    assert!(again.iter().all(|it| it.attempt == 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standard_queue_delivers_everything_and_what_is_too_long_is_refused() {
    let server = sqs::start_fauxqs().expect("fauxqs starts");
    let at = sqs::endpoint(&server);
    let url = sqs::create_queue(&at, "plain", &[]).expect("a queue");
    let dead = sqs::create_queue(&at, "dead", &[]).expect("a queue");
    let sink = settings(&url).open_sink("out".into()).await.expect("a sink");
    let batch: Vec<_> =
        (0..25).map(|number| outgoing(&format!("g{number}"), 0, text(&format!("g{number}"), 0))).collect();
    sink.publish(batch).await.expect("published");
    let long = outgoing("long", 0, "x".repeat(2 * 1024 * 1024));
    let short = outgoing("short", 0, text("short", 0));
    let published = sink.publish(vec![long, short]).await.expect("answered");
    assert!(
        matches!(&published[0], Published::Refused { reason } if reason.contains("bytes")),
        "{published:?}"
    );
    assert!(matches!(published[1], Published::Accepted { .. }), "{published:?}");
    let ours = SqsSettings { dead_letters: Some(dead), ..settings(&url) };
    let source = ours.open_source("plain".into()).await.expect("a source");
    let witness = Arc::new(Witness::default());
    let router = router(&witness, source, Duration::from_secs(10));
    witness.wait_for(26).await;
    assert!(router.shutdown(Duration::from_secs(10)).await.settled);
    let groups: Vec<String> =
        (0..25).map(|number| format!("g{number}")).chain(["short".to_owned()]).collect();
    witness.verify(&groups.iter().map(|group| (group.as_str(), 1)).collect::<Vec<_>>());
    assert_eq!(
        witness.numbered(),
        0,
        "a target that refuses what comes behind a greater one would refuse most"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_routers_share_a_queue_and_one_is_cut_off() {
    let server = sqs::start_fauxqs().expect("fauxqs starts");
    let at = sqs::endpoint(&server);
    let (url, _) = queues(&at, 1_000);
    let witness = Arc::new(Witness::new(Duration::from_millis(2), None));
    let groups = ["a", "b", "c", "d", "e"];
    publish(&url, &groups, 0..6).await;
    let lease = Duration::from_secs(3);
    let lost = settings(&url).open_source("lost".into()).await.expect("a source");
    // Claims and is never heard of again.
    let wants = Wants { most: 2, wait: Duration::from_secs(5), lease };
    let held = lost.claim(wants).await.expect("a claim");
    assert!(!held.is_empty());
    let one = router(&witness, settings(&url).open_source("one".into()).await.expect("a source"), lease);
    let two = router(&witness, settings(&url).open_source("two".into()).await.expect("a source"), lease);
    witness.wait_for(30).await;
    assert!(one.shutdown(Duration::from_secs(10)).await.settled);
    assert!(two.shutdown(Duration::from_secs(10)).await.settled);
    witness.verify(&groups.map(|group| (group, 6)));
    let late = held.iter().map(|it| (it.receipt.clone(), Disposal::Done)).collect();
    assert_eq!(lost.settle(late).await, Ok(vec![Settled::Stale; held.len()]));
}

#[tokio::test]
async fn the_doctor_sees_what_breaks_promises() {
    let server = sqs::start_fauxqs().expect("fauxqs starts");
    let at = sqs::endpoint(&server);
    let (url, _) = queues(&at, 3);
    let plain = sqs::create_queue(&at, "plain", &[]).expect("a queue");
    let examination = Examination {
        name: "orders".into(),
        role: Role::Source,
        lease: Duration::from_secs(10),
        attempt: Duration::from_secs(60),
    };
    let found = settings(&url).examine(&examination).await;
    let warned = |part: &str| found.iter().any(|it| it.level == Level::Warning && it.what.contains(part));
    assert!(warned("3 receives") && warned("lease"), "{found:?}");
    assert!(found.iter().all(|it| it.level != Level::Error), "{found:?}");
    let found = settings(&plain).examine(&examination).await;
    let says = |level: Level, part: &str| found.iter().any(|it| it.level == level && it.what.contains(part));
    assert!(says(Level::Warning, "standard queue") && says(Level::Error, "dead letters"), "{found:?}");
    let missing = settings(&url.replace("orders", "nothing")).examine(&examination).await;
    assert!(
        matches!(&missing[..], [it] if it.level == Level::Error && it.what.contains("no such queue")),
        "{missing:?}"
    );
    let error = settings(&plain).open_source("plain".into()).await.err().expect("no place for dead letters");
    assert!(matches!(error, SourceError::Broken(text) if text.contains("dead-letters")));
}

/// Answers every request with the same error. How many there were.
fn refuses_all(status: &'static str, code: &'static str) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/1/orders.fifo", listener.local_addr().expect("an address"));
    let count = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&count);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 8192];
            let _ = stream.read(&mut request);
            seen.fetch_add(1, Relaxed);
            let body = format!(r#"{{"__type":"com.amazonaws.sqs#{code}","message":"no"}}"#);
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Type: application/x-amz-json-1.0\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    (url, count)
}

/// An empty queue, which never answers to a receive. With how many seconds to wait it was asked.
fn asked_of_an_empty_queue() -> (String, Arc<Mutex<Vec<u64>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/1/orders.fifo", listener.local_addr().expect("an address"));
    let waits = Arc::<Mutex<Vec<u64>>>::default();
    let asked = Arc::clone(&waits);
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let request = read_request(&mut stream);
            match request["WaitTimeSeconds"].as_u64() {
                Some(seconds) => {
                    asked.lock().unwrap().push(seconds);
                    kept.push(stream);
                }
                None => answer(&mut stream, &json!({ "Attributes": { "FifoQueue": "true" } })),
            }
        }
    });
    (url, waits)
}

fn answer(stream: &mut std::net::TcpStream, body: &serde_json::Value) {
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.0\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all(format!("{head}{body}").as_bytes());
}

/// A standard queue with so many messages that answers to no send until `let_go` is dropped. What it was asked to send, delete and hide, how many in one call.
struct SlowToSend {
    url: String,
    asked: mpsc::UnboundedReceiver<(&'static str, usize)>,
    let_go: std::sync::mpsc::Sender<()>,
}

impl SlowToSend {
    fn with(count: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/1/orders", listener.local_addr().expect("an address"));
        let (tell, asked) = mpsc::unbounded_channel();
        let (let_go, gate) = std::sync::mpsc::channel::<()>();
        let (gate, given) = (Arc::new(Mutex::new(gate)), Arc::new(AtomicUsize::new(0)));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let (tell, gate, given) = (tell.clone(), Arc::clone(&gate), Arc::clone(&given));
                std::thread::spawn(move || {
                    let request = read_request(&mut stream);
                    let entries = request["Entries"].as_array().cloned().unwrap_or_default();
                    let what = match entries.first() {
                        Some(entry) if entry["MessageBody"].is_string() => "send",
                        Some(entry) if entry["VisibilityTimeout"].is_number() => "hide",
                        Some(_) => "delete",
                        None if request["MaxNumberOfMessages"].is_number() => {
                            return answer(&mut stream, &some_messages(&given, count));
                        }
                        None => return answer(&mut stream, &json!({ "Attributes": {} })),
                    };
                    let _ = tell.send((what, entries.len()));
                    if what == "send" {
                        let _ = gate.lock().unwrap().recv();
                    }
                    let done = |entry: &serde_json::Value| json!({ "Id": entry["Id"], "MessageId": "copy", "MD5OfMessageBody": "0" });
                    let done: Vec<_> = entries.iter().map(done).collect();
                    answer(&mut stream, &json!({ "Successful": done, "Failed": [] }));
                });
            }
        });
        SlowToSend { url, asked, let_go }
    }
}

/// The next ten, as long as there are any.
fn some_messages(given: &AtomicUsize, count: usize) -> serde_json::Value {
    let from = given.fetch_add(10, Relaxed);
    let message = |number: usize| json!({ "MessageId": format!("m-{number}"), "ReceiptHandle": format!("r-{number}"), "Body": "x" });
    json!({ "Messages": (from..count.min(from + 10)).map(message).collect::<Vec<_>>() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_done_does_not_wait_for_dead_letters() {
    let SlowToSend { url, mut asked, let_go } = SlowToSend::with(51);
    let ours = SqsSettings { dead_letters: Some(url.clone()), ..settings(&url) };
    let source = ours.open_source("orders".into()).await.expect("a source");
    let wants = Wants { most: 51, wait: Duration::from_secs(5), lease: Duration::from_secs(30) };
    let mut held = Vec::new();
    while held.len() < 51 {
        held.extend(source.claim(wants).await.expect("a claim"));
    }
    let dead =
        |at: usize| if at == 25 { Disposal::Done } else { Disposal::DeadLetter { reason: "no".to_owned() } };
    let disposals = held.iter().enumerate().map(|(at, it)| (it.receipt.clone(), dead(at))).collect();
    let letters: Vec<_> =
        held.iter().enumerate().filter(|(at, _)| *at != 25).map(|(_, it)| it.receipt.clone()).collect();
    let settling = tokio::spawn({
        let source = Arc::clone(&source);
        async move { source.settle(disposals).await }
    });
    let (mut sent, mut is_deleted) = (Vec::new(), false);
    let told = async {
        while !is_deleted || sent.iter().sum::<usize>() < 50 {
            match asked.recv().await {
                Some(("delete", 1)) => is_deleted = true,
                Some(("send", count)) => sent.push(count),
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, told).await.expect("nobody has to wait for a letter");
    assert_eq!(sent, [10; 5], "all at a time, and ten together");
    let renewed = source.extend(letters, Duration::from_secs(60)).await;
    assert_eq!(renewed, Ok(vec![Settled::Settled; 50]), "they are ours meanwhile");
    drop(let_go);
    let settled = tokio::time::timeout(PATIENCE, settling).await.expect("it is settled").expect("no panic");
    assert_eq!(settled, Ok(vec![Settled::Settled; 51]));
    let (mut hidden, mut deleted) = (0, 0);
    while let Ok((what, count)) = asked.try_recv() {
        match what {
            "hide" => hidden += count,
            "delete" => deleted += count,
            _ => panic!("each is sent once"),
        }
    }
    assert_eq!((hidden, deleted), (50, 50));
}

/// The body of a request, which is an object.
fn read_request(stream: &mut std::net::TcpStream) -> serde_json::Value {
    let (mut bytes, mut some) = (Vec::new(), [0; 8192]);
    loop {
        let count = stream.read(&mut some).unwrap_or(0);
        bytes.extend_from_slice(&some[..count]);
        let text = String::from_utf8_lossy(&bytes);
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        match serde_json::from_str(body) {
            Ok(body) => return body,
            Err(_) if count == 0 => return json!({}),
            Err(_) => {}
        }
    }
}

#[tokio::test]
async fn an_idle_queue_is_asked_once_in_poll_however_long_claims_wait() {
    for (poll, seconds) in [(Duration::from_secs(20), 20), (Duration::from_millis(1_500), 2)] {
        let (url, waits) = asked_of_an_empty_queue();
        let settings = SqsSettings { poll, dead_letters: Some(url.clone()), ..settings(&url) };
        let source = settings.open_source("orders".into()).await.expect("a source");
        let wants = Wants { most: 10, wait: Duration::from_millis(1_200), lease: Duration::from_secs(30) };
        for _ in 0..2 {
            assert_eq!(source.claim(wants).await.expect("a claim").len(), 0);
        }
        assert_eq!(*waits.lock().unwrap(), [seconds], "one receive goes on across both claims");
    }
}

#[tokio::test]
async fn wrong_credentials_missing_queues_and_throttling_are_told_apart() {
    let (url, asked) = refuses_all("403 Forbidden", "InvalidClientTokenId");
    let error = settings(&url).open_source("orders".into()).await.err().expect("an error");
    assert!(
        matches!(&error, SourceError::Broken(text) if text.contains("refuses the credentials")),
        "{error}"
    );
    assert_eq!(asked.load(Relaxed), 1, "asking again would not help");
    let (url, _) = refuses_all("400 Bad Request", "QueueDoesNotExist");
    let error = settings(&url).open_source("orders".into()).await.err().expect("an error");
    assert!(matches!(&error, SourceError::Broken(text) if text.contains("no such queue")), "{error}");
    let (url, asked) = refuses_all("400 Bad Request", "ThrottlingException");
    let error = settings(&url).open_source("orders".into()).await.err().expect("an error");
    assert!(matches!(&error, SourceError::Unavailable(text) if text.contains("patience")), "{error}");
    assert!((2..=3).contains(&asked.load(Relaxed)), "a few times, with pauses, and no more");
    let error = settings("http://127.0.0.1:1/1/orders.fifo")
        .open_source("orders".into())
        .await
        .err()
        .expect("an error");
    assert!(
        matches!(&error, SourceError::Unavailable(text) if text.contains("cannot be reached")),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_configurations_of_the_guide_work() {
    let server = sqs::start_fauxqs().expect("fauxqs starts");
    let at = sqs::endpoint(&server);
    let mut place = String::new();
    for name in ["orders.fifo", "orders-dead.fifo", "invoices.fifo"] {
        let url = sqs::create_queue(&at, name, &[("FifoQueue", "true")]).expect("a queue");
        place = url.trim_end_matches(&format!("/{name}")).to_owned();
    }
    let keys = ["sources.orders", "sinks.invoices"]
        .map(|it| (format!("laneway.{it}.access-key-id"), format!("laneway.{it}.secret-access-key")));
    let set: Vec<(&str, &str)> =
        keys.iter().flat_map(|(id, secret)| [(id.as_str(), "test"), (secret.as_str(), "test")]).collect();
    let replaced = [("https://sqs.eu-west-1.amazonaws.com/123456789012", place.as_str())];
    let config = of_the_guide("SQS", &replaced, &set);
    let source = config.sources["orders"].open_source("orders".into()).await.expect("a source");
    let wants = Wants { most: 1, wait: Duration::from_millis(10), lease: Duration::from_secs(30) };
    assert!(source.claim(wants).await.expect("a claim").is_empty());
    let sink = config.sinks["invoices"].open_sink("invoices".into()).await.expect("a sink");
    let published = sink.publish(vec![outgoing("a", 0, text("a", 0))]).await.expect("published");
    assert!(matches!(published[..], [Published::Accepted { .. }]));
    source.close().await;
}

/// The visibility timeout of what a killed router had in hand must run out before others get it, so this takes a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_routers_that_are_killed_and_a_server_that_is_restarted_lose_nothing_and_keep_the_order() {
    let mut server = sqs::start_fauxqs().expect("fauxqs starts");
    let (url, _) = queues(&sqs::endpoint(&server), 1_000);
    let settings = format!("kind = sqs, url = {url:?}, access-key-id = test, secret-access-key = test");
    let config = format!(
        "laneway {{ queue.queues = [], sources.orders {{ {settings}, poll = 1 s }}, sinks.orders {{ {settings} }} }}"
    );
    let plan = instances::Plan::of(3, 2);
    instances::run(&config, &plan, || {
        server.kill().expect("it was there");
        server.resume().expect("it comes back");
    })
    .await;
}
