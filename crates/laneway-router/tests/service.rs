//! The service as its users meet it: a real one on a free port of loopback with a file of its own, and a client that speaks HTTP to it.
//!
//! Waiting is done by asking until the answer is right, with a deadline; nothing here assumes how long something takes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{HeaderMap, Method, Request, Response};
use hyper_util::client::legacy::{Client as Hyper, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use laneway_router::config::{Config, Layering};
use laneway_router::message::Message;
use laneway_router::service::{Service, StartError};
use laneway_router::source::broker::{Broker, Examination, Finding};
use laneway_router::source::embedded::{EmbeddedStore, Options as StoreOptions, Publication};
use laneway_router::source::sink::{Sink, SinkError};
use laneway_router::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};

const DEADLINE: Duration = Duration::from_secs(20);

// ── a service and a client ────────────────────────────────────────────────────────────────────────────────────────────

struct Bench {
    service: Service,
    client: Hyper<HttpConnector, Full<Bytes>>,
    folder: tempfile::TempDir,
    token: Option<String>,
    /// Every route that was called, as the description writes it.
    called: Mutex<BTreeSet<(String, String)>>,
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    text: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error} in {:?}", self.text))
    }

    /// The body, if the answer has this status.
    #[track_caller]
    fn with(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        self.json()
    }

    /// That it is a problem of this status; its detail.
    #[track_caller]
    fn problem(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text);
        assert_eq!(self.headers["content-type"], "application/problem+json", "{}", self.text);
        let problem = self.json();
        assert_eq!(problem["status"], status);
        assert!(problem["type"].is_string() && problem["title"].is_string(), "{problem}");
        problem["detail"].as_str().expect("a detail").to_owned()
    }
}

impl Bench {
    async fn new(file: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("laneway.conf"), file).unwrap();
        Bench::at(folder).await
    }

    fn layering(folder: &tempfile::TempDir) -> Layering {
        let database = folder.path().join("queue.db");
        Layering::file(folder.path().join("laneway.conf"))
            .set("laneway.http.bind", "\"127.0.0.1:0\"")
            .set("laneway.queue.path", &serde_json::to_string(&database).unwrap())
            .set("laneway.queue.durability", "crash")
    }

    async fn at(folder: tempfile::TempDir) -> Self {
        let config = Config::load(&Bench::layering(&folder)).unwrap();
        let token = config.http.admin_token.as_ref().map(|token| token.expose().to_owned());
        let service = Service::start(config).await.unwrap();
        let client = Hyper::builder(TokioExecutor::new()).build_http();
        Bench { service, client, folder, token, called: Mutex::default() }
    }

    fn write(&self, file: &str) {
        std::fs::write(self.folder.path().join("laneway.conf"), file).unwrap();
    }

    fn base(&self) -> String {
        format!("http://{}", self.service.http_address())
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        let sent =
            tokio::time::timeout(DEADLINE, self.client.request(request)).await.expect("an answer in time");
        let (head, body) = sent.expect("an answer").into_parts();
        let bytes = body.collect().await.expect("the whole answer").to_bytes();
        Answer {
            status: head.status.as_u16(),
            headers: head.headers,
            text: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    }

    async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        self.note(method, path);
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base()));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let body = match body {
            Some(body) => {
                request = request.header("content-type", "application/json");
                Bytes::from(body.to_string())
            }
            None => Bytes::new(),
        };
        self.send(request.body(Full::new(body)).unwrap()).await
    }

    async fn get(&self, path: &str) -> Value {
        self.call("GET", path, None).await.with(200)
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, Some(body)).await
    }

    fn note(&self, method: &str, path: &str) {
        self.called.lock().unwrap().insert((method.to_lowercase(), template(path)));
    }

    /// The stream, from its next second on.
    async fn stream(&self) -> Response<Incoming> {
        self.note("GET", "/api/stream");
        let request = Request::get(format!("{}/api/stream", self.base())).body(Full::default()).unwrap();
        let answer = self.client.request(request).await.expect("an answer");
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        answer
    }

    /// The next second of the stream.
    async fn next_second(&self) -> Value {
        next_event(&mut self.stream().await).await
    }

    /// Asks until the answer is right.
    async fn until(&self, path: &str, is_right: impl Fn(&Value) -> bool) -> Value {
        let started = std::time::Instant::now();
        loop {
            let answer = self.call("GET", path, None).await.json();
            if is_right(&answer) {
                return answer;
            }
            assert!(started.elapsed() < DEADLINE, "{path} is still {answer:#}");
            tokio::time::sleep(Duration::from_millis(5)).await; // paced: between two questions
        }
    }

    async fn shutdown(self) {
        let farewell = tokio::time::timeout(DEADLINE, self.service.shutdown(Duration::from_secs(5)))
            .await
            .expect("an end");
        assert!(farewell.router.settled, "{farewell:?}");
    }

    fn target(&self, name: &str) -> String {
        format!("{}/api/test/{name}", self.base())
    }
}

/// The next event of a stream.
async fn next_event(stream: &mut Response<Incoming>) -> Value {
    let mut text = String::new();
    loop {
        let frame = tokio::time::timeout(DEADLINE, stream.frame()).await.expect("an event in time");
        text.push_str(std::str::from_utf8(&frame.unwrap().unwrap().into_data().unwrap()).unwrap());
        let data = text.lines().find_map(|line| line.strip_prefix("data: "));
        if let Some(data) = data.filter(|_| text.ends_with("\n\n")) {
            return serde_json::from_str(data).unwrap();
        }
    }
}

/// The path of a request as the description writes it.
fn template(path: &str) -> String {
    let mut parts: Vec<&str> = path.split('?').next().unwrap_or(path).split('/').collect();
    match parts.as_mut_slice() {
        ["", "api", "pools", code, ..] => *code = "{code}",
        ["", "api", "groups", pool, group, ..] => (*pool, *group) = ("{pool}", "{group}"),
        _ => {}
    }
    parts.join("/")
}

/// A target that tells of every call and answers 200.
async fn recorder() -> (String, mpsc::UnboundedReceiver<(String, u64, Value)>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let record = move |headers: HeaderMap, body: axum::Json<Value>| {
        let sender = sender.clone();
        async move {
            let text = |name: &str| headers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
            sender.send((text("laneway-key"), text("laneway-sequence").parse().unwrap(), body.0)).unwrap();
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let routes = axum::Router::new().route("/", axum::routing::post(record));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    (url, receiver)
}

/// A target that answers 200 when it is let, and lets everybody else wait.
async fn gated(gate: Arc<Semaphore>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let wait = move || {
        let gate = Arc::clone(&gate);
        async move { gate.acquire().await.unwrap().forget() }
    };
    let routes = axum::Router::new().route("/", axum::routing::post(wait));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    url
}

fn message(id: &str, group: &str, target: &str) -> Value {
    json!({ "id": id, "poolCode": "DEFAULT-POOL", "messageGroupId": group, "mediationTarget": target })
}

// ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_published_is_delivered_in_order_per_group_and_exactly_once() {
    let bench = Bench::new("").await;
    let (url, mut calls) = recorder().await;
    let mut all: Vec<Value> = Vec::new();
    for number in 0..100 {
        for group in ["a", "b", "c/d ü"] {
            let mut message = message(&format!("{group}-{number}"), group, &url);
            message["payload"] = json!({ "number": number });
            all.push(message);
        }
    }
    let answer = bench.post("/api/messages", json!(all)).await.with(202);
    assert_eq!(answer["accepted"], 300);
    assert_eq!(answer["messages"][299]["id"], "c/d ü-99");
    let mut seen: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for _ in 0..300 {
        let (key, _, body) =
            tokio::time::timeout(DEADLINE, calls.recv()).await.expect("a call in time").unwrap();
        seen.entry(key).or_default().push(body["number"].as_u64().unwrap());
    }
    let right: Vec<u64> = (0..100).collect();
    assert_eq!(seen.len(), 3);
    seen.iter().for_each(|(key, numbers)| assert_eq!(*numbers, right, "{key}"));
    let stats = bench.until("/api/stats", |stats| stats["held"] == 0).await;
    assert_eq!(stats["pools"][0]["counts"]["succeeded"], 300);
    assert!(calls.try_recv().is_err(), "nothing comes twice");
    bench.shutdown().await;
}

#[tokio::test]
async fn the_same_request_twice_is_published_once() {
    let bench = Bench::new("laneway.pools.DEFAULT-POOL.concurrency = 1").await;
    let messages =
        json!([message("1", "a", "http://127.0.0.1:9/"), message("2", "a", "http://127.0.0.1:9/")]);
    let send = || {
        let request = Request::post(format!("{}/api/messages", bench.base()))
            .header("content-type", "application/json")
            .header("idempotency-key", "k-1")
            .body(Full::new(Bytes::from(messages.to_string())));
        bench.send(request.unwrap())
    };
    bench.call("POST", "/api/pools/DEFAULT-POOL/pause", None).await.with(200);
    let (first, second) = (send().await.with(202), send().await.with(202));
    assert_eq!((&first["accepted"], &second["accepted"]), (&json!(2), &json!(0)));
    assert_eq!(second["messages"][1]["duplicate"], true);
    assert_eq!(second["messages"][1]["sequence"], first["messages"][1]["sequence"]);
    bench.until("/api/pools/DEFAULT-POOL", |pool| pool["held"] == 2).await;
    bench.shutdown().await;
}

#[tokio::test]
async fn another_request_with_the_same_idempotency_key_is_refused() {
    let bench = Bench::new("laneway.pools.DEFAULT-POOL.concurrency = 1").await;
    bench.call("POST", "/api/pools/DEFAULT-POOL/pause", None).await.with(200);
    let send = async |body: &str| {
        let request = Request::post(format!("{}/api/messages", bench.base()))
            .header("content-type", "application/json")
            .header("idempotency-key", "k-1")
            .body(Full::new(Bytes::from(body.to_owned())));
        bench.send(request.unwrap()).await
    };
    let one = r#"{"id": "1", "poolCode": "", "mediationType": "SIMULATED", "payload": 1}"#;
    assert_eq!(send(one).await.with(202)["accepted"], 1);
    // It is the messages that are compared, not how they were written down.
    let same = r#"[{"mediationType": "SIMULATED", "poolCode": "", "id": "1", "payload":1}]"#;
    assert_eq!(send(same).await.with(202)["messages"][0]["duplicate"], true);
    for other in [one.replace("1}", "2}"), format!("[{one}, {one}]"), one.replace("\"1\"", "\"2\"")] {
        let answer = send(&other).await;
        assert!(answer.problem(422).contains("Idempotency-Key"), "{}", answer.text);
    }
    bench.until("/api/pools/DEFAULT-POOL", |pool| pool["held"] == 1).await;
    bench.shutdown().await;
}

/// A size limit stands for a disk: both are the same error of the file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_disk_is_full_publishing_is_refused_and_everything_else_goes_on() {
    let bench = Bench::new("laneway.queue.size-max = 1 MiB").await;
    bench.call("POST", "/api/pools/DEFAULT-POOL/pause", None).await.with(200);
    let (url, mut calls) = recorder().await;
    let post = async |number: u64| {
        let mut message = message(&number.to_string(), "a", &url);
        message["payload"] = json!({ "number": number, "ballast": "x".repeat(20_000) });
        bench.post("/api/messages", message).await
    };
    let mut accepted = 0;
    let refused = loop {
        let answer = post(accepted).await;
        if answer.status != 202 {
            break answer;
        }
        accepted += 1;
        assert!(accepted < 100, "a mebibyte has an end");
    };
    assert!(refused.problem(503).contains("full"), "{}", refused.text);
    assert_eq!(refused.headers["retry-after"], "1");
    let seeded = bench.call("POST", "/api/seed/messages?count=1000&endpoint=simulated", None).await;
    assert!(seeded.problem(503).contains("full"), "{}", seeded.text);
    // Everything else is as it was.
    for path in
        ["/health/live", "/health/ready", "/api/stats", "/api/groups", "/api/dead-letters", "/api/warnings"]
    {
        bench.get(path).await;
    }
    let source = bench.get("/api/sources").await[0].clone();
    let there = source["waiting"].as_u64().unwrap() + source["leased"].as_u64().unwrap();
    assert_eq!((there, &source["healthy"]), (accepted, &json!(true)), "{source}");

    bench.call("POST", "/api/pools/DEFAULT-POOL/resume", None).await.with(200);
    for number in 0..accepted {
        let call = tokio::time::timeout(DEADLINE, calls.recv()).await.expect("a call in time").unwrap();
        assert_eq!((call.0.as_str(), &call.2["number"]), ("a", &json!(number)), "accepted, so delivered");
    }
    bench.until("/api/sources", |sources| sources[0]["waiting"] == 0 && sources[0]["leased"] == 0).await;
    assert_eq!(post(accepted).await.with(202)["accepted"], 1, "there is room again");
    let call = tokio::time::timeout(DEADLINE, calls.recv()).await.expect("a call in time").unwrap();
    assert_eq!(call.2["number"], json!(accepted));
    bench.shutdown().await;
}

/// The calls of document 004, word for word: its queue has to be named in the configuration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_seed_calls_of_document_004_work_where_its_queue_is_configured() {
    let bench = Bench::new("laneway.queue.queues = [high, medium, low]").await;
    for (mode, groups) in [("unique", 50..=50), ("1of8", 4..=8), ("single", 1..=1)] {
        bench.call("DELETE", "/api/test/stats", None).await;
        let path = format!("/api/seed/messages?count=50&endpoint=fast&queue=high&messageGroupMode={mode}");
        let seeded = bench.call("POST", &format!("{path}&delayMillis=1"), None).await.with(202);
        assert_eq!((&seeded["seeded"], &seeded["queue"]), (&json!(50), &json!("high")));
        let is_all = |stats: &Value| {
            stats["endpoints"]
                .as_array()
                .unwrap()
                .iter()
                .any(|it| it["name"] == "fast" && it["succeeded"] == 50)
        };
        let stats = bench.until("/api/test/stats", is_all).await;
        let keys = stats["keys"].as_u64().unwrap();
        assert!(groups.contains(&keys) && stats["orderHeld"] == true, "{mode}: {stats}");
        bench.until("/api/stats", |stats| stats["held"] == 0).await;
    }
    let elsewhere = bench.call("POST", "/api/seed/messages?queue=default", None).await;
    assert!(
        elsewhere.problem(404).contains("high, low, medium (laneway.queue.queues)"),
        "{}",
        elsewhere.text
    );
    bench.shutdown().await;
}

#[tokio::test]
async fn one_bad_message_and_nothing_is_published() {
    let bench = Bench::new("laneway.mediator.allow = [\"127.0.0.1\"]").await;
    let good = message("1", "a", "http://127.0.0.1:9/");
    let bad = json!([
        good,
        { "id": 7, "poolCode": "p" },
        message("3", "a", "http://elsewhere.example/"),
        message("", "a", "http://127.0.0.1/"),
        { "id": "5", "poolCode": "p", "mediationTarget": "not a url" },
        { "id": "6", "poolCode": "p", "mediationTarget": "http://127.0.0.1/", "typo": 1 },
    ]);
    let answer = bench.post("/api/messages", bad).await;
    assert!(answer.problem(422).contains("5 of 6"), "{}", answer.text);
    let errors = answer.json()["errors"].as_array().unwrap().clone();
    let places: Vec<u64> = errors.iter().map(|error| error["index"].as_u64().unwrap()).collect();
    assert_eq!(places, [1, 2, 3, 4, 5]);
    assert!(errors[1]["detail"].as_str().unwrap().contains("not on the list"), "{errors:?}");
    assert!(errors[4]["detail"].as_str().unwrap().contains("typo"), "{errors:?}");
    let sources = bench.get("/api/sources").await;
    assert_eq!((&sources[0]["claimed"], &sources[0]["waiting"]), (&json!(0), &json!(0)));
    bench.shutdown().await;
}

/// What no target could be called with is refused at both doors; what came into the queue by another one has its reason among the dead letters.
#[tokio::test]
async fn what_can_never_be_delivered_is_refused_when_it_is_published() {
    let bench = Bench::new("laneway.ingress { enabled = true, bind = \"127.0.0.1:0\" }").await;
    let token =
        json!({ "id": "t", "poolCode": "p", "mediationTarget": "http://127.0.0.1:9/", "authToken": "a\nb" });
    let simulated =
        json!({ "id": "s", "poolCode": "p", "mediationType": "SIMULATED", "mediationTarget": "banana" });
    for (message, problem) in [(&token, "`authToken`"), (&simulated, "`banana` is neither a duration")] {
        let answer = bench.post("/api/messages", message.clone()).await;
        assert!(answer.problem(422).contains(problem), "{}", answer.text);
    }
    let stream = TcpStream::connect(bench.service.ingress_address().unwrap()).await.unwrap();
    let mut ingress = tokio::io::BufReader::new(stream);
    for (line, problem) in [
        (json!({ "mediationType": "HTTP", "mediationTarget": "not a url" }), "`mediationTarget`"),
        (json!({ "mediationType": "HTTP", "mediationTarget": "ftp://127.0.0.1/" }), "http"),
        (json!({ "mediationType": "SIMULATED", "mediationTarget": "banana" }), "`banana`"),
        (json!({ "mediationType": "SINK", "mediationTarget": "nowhere" }), "no sink"),
        (json!({ "mediationType": "SIMULATED", "authToken": "a\nb" }), "`authToken`"),
    ] {
        let mut line = line;
        (line["id"], line["correlationId"]) = (json!("x"), json!("f"));
        ingress.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(DEADLINE, ingress.read_line(&mut answer)).await.expect("an answer").unwrap();
        assert!(answer.starts_with("REJ:BAD_FIELD:x\t") && answer.contains(problem), "{line}: {answer}");
    }
    // Messages of a source have nobody to tell.
    let message = |it: &Value| serde_json::from_value::<Message>(it.clone()).unwrap();
    let publications = [&token, &simulated].map(|it| Publication::of(&message(it))).to_vec();
    bench.service.queue("default").unwrap().publish_many(publications, None).await.unwrap();
    let dead = bench.until("/api/dead-letters", |dead| dead.as_array().unwrap().len() == 2).await.to_string();
    assert!(dead.contains("`authToken` has characters") && dead.contains("`banana` is neither"), "{dead}");
    assert_eq!(bench.get("/api/quarantine").await, json!([]));
    bench.shutdown().await;
}

#[tokio::test]
async fn the_only_queue_need_not_be_named() {
    let bench = Bench::new("laneway.queue.queues = [only]").await;
    bench.call("POST", "/api/pools/DEFAULT-POOL/pause", None).await.with(200);
    let message = json!({ "id": "1", "poolCode": "", "mediationType": "SIMULATED" });
    assert_eq!(bench.post("/api/messages", message).await.with(202)["accepted"], 1);
    let seeded = bench.call("POST", "/api/seed/messages?count=2&endpoint=simulated", None).await.with(202);
    assert_eq!(seeded["queue"], "only");
    for path in ["/api/dead-letters", "/api/quarantine"] {
        assert_eq!(bench.get(path).await, json!([]));
        bench.call("DELETE", path, None).await.with(200);
    }
    bench.post("/api/dead-letters/redrive", json!({})).await.with(200);
    assert!(bench.call("GET", "/api/quarantine?queue=default", None).await.problem(404).contains("only"));
    bench.shutdown().await;
    let bench = Bench::new("laneway.queue.queues = [one, other]").await;
    assert!(bench.call("GET", "/api/quarantine", None).await.problem(404).contains("one, other"));
    bench.shutdown().await;
}

#[tokio::test]
async fn seeding_that_is_refused_on_the_way_says_how_many_there_are() {
    let bench = Bench::new("laneway.queue.capacity = 1500").await;
    bench.call("POST", "/api/pools/DEFAULT-POOL/pause", None).await.with(200);
    let answer = bench.call("POST", "/api/seed/messages?count=3000&endpoint=simulated", None).await;
    assert!(answer.problem(429).contains("1000 messages had been seeded"), "{}", answer.text);
    assert_eq!(answer.json()["seeded"], 1_000);
    let source = bench.get("/api/sources").await[0].clone();
    assert_eq!(source["waiting"].as_u64().unwrap() + source["leased"].as_u64().unwrap(), 1_000);
    bench.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeding_reaches_the_test_targets_in_order() {
    let bench = Bench::new("laneway.pools.eight { concurrency = 8 }").await;
    let path = "/api/seed/messages?count=400&endpoint=success&messageGroupMode=1of8&pool=eight&delayMillis=1";
    let seeded = bench.call("POST", path, None).await.with(202);
    assert_eq!((&seeded["seeded"], &seeded["pool"]), (&json!(400), &json!("eight")));
    bench.until("/api/pools/eight", |pool| pool["counts"]["succeeded"] == 400).await;
    let stats = bench.get("/api/test/stats").await;
    assert_eq!(
        (&stats["orderHeld"], &stats["keys"], &stats["repeated"]),
        (&json!(true), &json!(8), &json!(0)),
        "{stats}"
    );
    let single = "/api/seed/messages?count=3&endpoint=simulated&messageGroupMode=single&delayMillis=1";
    bench.call("POST", single, None).await.with(202);
    bench.until("/api/pools/DEFAULT-POOL", |pool| pool["counts"]["succeeded"] == 3).await;
    let unique = "/api/seed/messages?count=5&endpoint=random&messageGroupMode=unique&delayMillis=0";
    bench.call("POST", unique, None).await.with(202);
    assert!(
        bench
            .call("POST", "/api/seed/messages?endpoint=nonsense", None)
            .await
            .problem(422)
            .contains("fast, slow")
    );
    assert!(bench.call("POST", "/api/seed/messages?count=0", None).await.problem(422).contains("count = 0"));
    assert!(
        bench
            .call("POST", "/api/seed/messages?messageGroupMode=2of9", None)
            .await
            .problem(400)
            .contains("1of8")
    );
    bench.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_larger_than_its_share_of_the_pool_goes_through_without_long_pauses() {
    let bench = Bench::new("").await;
    let path = "/api/seed/messages?count=1500&endpoint=success&messageGroupMode=single";
    bench.call("POST", path, None).await.with(202);
    let pool = bench.until("/api/pools/DEFAULT-POOL", |pool| pool["counts"]["succeeded"] == 1_500).await;
    assert_eq!(pool["counts"]["failed"], 0);
    let stats = bench.get("/api/test/stats").await;
    assert_eq!((&stats["orderHeld"], &stats["repeated"]), (&json!(true), &json!(0)), "{stats}");
    bench.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_with_a_delay_comes_later_and_its_group_waits_with_it() {
    let bench = Bench::new("").await;
    let (url, mut calls) = recorder().await;
    let (mut before, mut late, mut behind) =
        (message("0", "a", &url), message("1", "a", &url), message("2", "a", &url));
    let mut other = message("3", "b", &url);
    for (number, message) in [&mut before, &mut late, &mut behind, &mut other].into_iter().enumerate() {
        message["payload"] = json!({ "number": number });
    }
    late["delaySeconds"] = json!(1);
    let began = std::time::Instant::now();
    bench.post("/api/messages", json!([before, late, behind, other])).await.with(202);
    let mut came = Vec::new();
    for _ in 0..4 {
        let (_, _, body) =
            tokio::time::timeout(DEADLINE, calls.recv()).await.expect("a call in time").unwrap();
        came.push((body["number"].as_u64().unwrap(), began.elapsed()));
    }
    let numbers: Vec<_> = came.iter().map(|(number, _)| *number).collect();
    assert!(numbers[..2].contains(&0) && numbers[..2].contains(&3) && numbers[2..] == [1, 2], "{came:?}");
    // The queue's clock has milliseconds.
    assert!(came[2].1 >= Duration::from_millis(999), "{came:?}");

    late["delaySeconds"] = json!(3_600);
    bench.post("/api/messages", late.clone()).await.with(202);
    let found = bench.get("/api/search?q=a").await;
    let why = found["groups"][0]["why"].as_str().unwrap_or_default();
    assert!(why.contains("is not due for"), "{found}");
    late["delaySeconds"] = json!(604_801);
    let detail = bench.post("/api/messages", late).await.problem(422);
    assert_eq!(detail, "`delaySeconds` is 604801; at most 604800 (a week) are allowed");
    bench.shutdown().await;
}

// ── every route, and its description ──────────────────────────────────────────────────────────────────────────────────

/// Whether a value is as a schema says. Knows what `schemas.json` uses of JSON Schema.
fn check(value: &Value, schema: &Value, all: &Value, at: &str) {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap();
        assert!(all[name].is_object(), "{at}: there is no schema {name}");
        return check(value, &all[name], all, at);
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_u64() || number.is_i64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let fits = |wanted: &Value| wanted == kind || (wanted == "number" && kind == "integer");
    match &schema["type"] {
        Value::Array(kinds) => assert!(kinds.iter().any(fits), "{at} is {kind}, not {kinds:?}"),
        Value::Null => {}
        one => assert!(fits(one), "{at} is {kind}, not {one}"),
    }
    if let Some(words) = schema["enum"].as_array() {
        assert!(words.contains(value), "{at} is {value}, none of {words:?}");
    }
    for item in value.as_array().into_iter().flatten() {
        check(item, &schema["items"], all, &format!("{at}[]"));
    }
    let Some(fields) = value.as_object().filter(|_| schema["properties"].is_object()) else { return };
    for name in schema["required"].as_array().into_iter().flatten() {
        assert!(fields.contains_key(name.as_str().unwrap()), "{at} has no {name}");
    }
    for (name, field) in fields {
        let known = &schema["properties"][name];
        assert!(known.is_object(), "{at} has {name}, which is not described");
        check(field, known, all, &format!("{at}.{name}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_answers_as_it_is_described() {
    let bench = Bench::new("laneway { ingress { enabled = true, bind = \"127.0.0.1:0\" } }").await;
    let document = bench.get("/openapi.json").await;
    let schemas = document["components"]["schemas"].clone();
    let described = |method: &str, template: &str, status: u16| {
        let content = &document["paths"][template][method]["responses"][status.to_string()]["content"];
        content["application/json"]["schema"].clone()
    };
    // Something to look at: a dead letter, a parked group, one that retries, a running one, a pool of its own, a warning.
    let put = json!({ "concurrency": 4, "attempts": 2, "backoffMillis": 60_000, "backoffMaxMillis": 60_000, "ratePerSecond": null });
    bench.call("PUT", "/api/pools/extra", Some(put)).await.with(201);
    bench.until("/api/pools/extra", |pool| pool["state"] == "open").await;
    let published = json!([
        message("dead", "d", &bench.target("client-error")),
        message("parked", "p", &bench.target("success")),
        { "id": "retry", "poolCode": "extra", "messageGroupId": "r", "mediationTarget": bench.target("fail"), "authToken": "tell-nobody", "headers": { "x-key": "tell-nobody" } },
        { "id": "run", "poolCode": "unknown", "messageGroupId": "run", "mediationTarget": bench.target("slow") },
    ]);
    let answer = bench.post("/api/messages", published).await.with(202);
    check(&answer, &described("post", "/api/messages", 202), &schemas, "publish");
    bench.until("/api/dead-letters", |letters| letters[0]["id"] == "dead").await;
    bench.until("/api/in-flight", |running| running[0]["group"] == "run").await;
    bench.until("/api/groups/extra/r", |group| group["state"] == "retrying").await;
    let requests = [
        ("POST", "/api/seed/messages?count=1&endpoint=simulated&delayMillis=0", None, 202),
        ("GET", "/api/pools", None, 200),
        ("GET", "/api/pools/extra", None, 200),
        ("PUT", "/api/pools/extra", Some(json!({ "ratePerSecond": 50.5 })), 200),
        ("POST", "/api/pools/extra/pause", None, 200),
        ("POST", "/api/pools/extra/resume", None, 200),
        ("GET", "/api/groups?most=5", None, 200),
        ("GET", "/api/groups/extra/r", None, 200),
        ("POST", "/api/groups/extra/r/park", Some(json!({ "why": "to look at it" })), 200),
        ("POST", "/api/groups/extra/r/skip", None, 200),
        ("GET", "/api/in-flight", None, 200),
        ("GET", "/api/parked", None, 200),
        ("GET", "/api/search?q=dead", None, 200),
        ("GET", "/api/search?q=ru", None, 200),
        ("GET", "/api/failures", None, 200),
        ("GET", "/api/audit", None, 200),
        ("GET", "/api/pools/DEFAULT-POOL/slots", None, 200),
        ("GET", "/api/history", None, 200),
        ("GET", "/api/sources", None, 200),
        ("GET", "/api/dead-letters?most=10", None, 200),
        ("GET", "/api/quarantine", None, 200),
        ("GET", "/api/breakers", None, 200),
        ("POST", "/api/breakers/reset", Some(json!({ "target": bench.target("fail") })), 200),
        ("GET", "/api/warnings", None, 200),
        ("GET", "/api/ingress", None, 200),
        ("GET", "/api/stats", None, 200),
        ("GET", "/api/config", None, 200),
        ("POST", "/api/config/reload", None, 200),
        ("GET", "/health/live", None, 200),
        ("GET", "/health/ready", None, 200),
        ("POST", "/api/dead-letters/redrive", Some(json!({ "sequences": null, "most": 1 })), 200),
        ("DELETE", "/api/dead-letters", None, 200),
        ("DELETE", "/api/quarantine", None, 200),
        ("DELETE", "/api/warnings", None, 200),
    ];
    for (method, path, body, status) in requests {
        let answer = bench.call(method, path, body).await.with(status);
        let template = template(path);
        let schema = described(&method.to_lowercase(), &template, status);
        assert!(schema.is_object(), "{method} {template} does not describe {status}");
        check(&answer, &schema, &schemas, path);
        assert!(!answer.to_string().contains("tell-nobody"), "{path}: {answer}");
    }
    // A parked group goes on when it is resumed: what was skipped is gone, what comes now runs.
    bench.call("POST", "/api/pools/DEFAULT-POOL/pause", None).await.with(200);
    bench.post("/api/messages", message("last", "z", &bench.target("success"))).await.with(202);
    bench.until("/api/groups/DEFAULT-POOL/z", |group| group["depth"] == 1).await;
    bench.post("/api/groups/DEFAULT-POOL/z/park", json!({})).await.with(200);
    let group = bench.call("POST", "/api/groups/DEFAULT-POOL/z/resume", None).await.with(200);
    check(&group, &described("post", "/api/groups/{pool}/{group}/resume", 200), &schemas, "resume");
    bench.call("POST", "/api/pools/DEFAULT-POOL/resume", None).await.with(200);
    let pool = bench.call("POST", "/api/pools/extra/drain", None).await.with(202);
    check(&pool, &described("post", "/api/pools/{code}/drain", 202), &schemas, "drain");
    let removed = bench.call("DELETE", "/api/pools/extra?limitMillis=5000", None).await.with(200);
    check(&removed, &described("delete", "/api/pools/{code}", 200), &schemas, "remove");
    assert_eq!(bench.call("GET", "/metrics", None).await.status, 200);
    let second = bench.next_second().await;
    assert!(second["number"].is_u64() && second["pools"][0]["slots"].is_u64(), "{second}");
    for (name, status) in [
        ("fast", 200),
        ("slow", 200),
        ("success", 200),
        ("pending", 200),
        ("client-error", 400),
        ("fail", 500),
        ("server-error", 500),
        ("limited", 429),
    ] {
        let answer = bench.call("POST", &format!("/api/test/{name}?delayMillis=0"), None).await;
        assert_eq!(answer.status, status, "{name}");
    }
    assert!([200, 400, 500].contains(&bench.call("POST", "/api/test/faulty", None).await.status));
    let seen = bench.get("/api/test/stats").await;
    check(&seen, &described("get", "/api/test/stats", 200), &schemas, "stats");
    assert_eq!(bench.call("DELETE", "/api/test/stats", None).await.status, 204);
    let called: BTreeSet<_> = bench.called.lock().unwrap().clone();
    assert_eq!(called, operations(&document), "what was called and what is described");
    bench.service.targets().unwrap().close();
    let _ = bench.service.shutdown(Duration::ZERO).await;
}

fn operations(document: &Value) -> BTreeSet<(String, String)> {
    let paths = document["paths"].as_object().unwrap().iter();
    let methods = |(path, item): (&String, &Value)| {
        let path = path.clone();
        item.as_object().unwrap().keys().map(move |method| (method.clone(), path.clone())).collect::<Vec<_>>()
    };
    paths.flat_map(methods).collect()
}

#[tokio::test]
async fn the_description_lists_exactly_the_routes_that_exist() {
    let bench = Bench::new("laneway.test-targets = off").await;
    let document = bench.get("/openapi.json").await;
    assert_eq!(document["openapi"], "3.1.0");
    let operations = operations(&document);
    assert!(operations.len() > 30, "{operations:?}");
    for (_, path) in &operations {
        let concrete = path.replace("{code}", "x").replace("{pool}", "x").replace("{group}", "x");
        for method in ["get", "put", "post", "delete", "patch"] {
            if operations.contains(&(method.to_owned(), path.clone()))
                || method == "get" && path == "/metrics"
            {
                continue;
            }
            let answer = bench.call(&method.to_uppercase(), &concrete, None).await;
            assert!(answer.problem(405).contains("method"), "{method} {path}");
            assert!(answer.headers.contains_key("allow"), "{method} {path}");
        }
    }
    for schema in document.to_string().split("#/components/schemas/").skip(1) {
        let name: String = schema.chars().take_while(char::is_ascii_alphanumeric).collect();
        assert!(document["components"]["schemas"][&name].is_object(), "{name}");
    }
    assert!(bench.call("POST", "/api/test/fast", None).await.problem(404).contains("/api/test/fast"));
    bench.shutdown().await;
}

// ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test]
async fn every_refusal_is_a_problem() {
    let bench = Bench::new("laneway.http.body-limit = 2 KiB").await;
    let raw = |method: Method, path: &str, kind: &'static str, body: &str| {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", bench.base()))
            .header("content-type", kind);
        bench.send(request.body(Full::new(Bytes::from(body.to_owned()))).unwrap())
    };
    let publish = |body: &'static str| raw(Method::POST, "/api/messages", "application/json", body);
    assert!(publish("{").await.problem(400).contains("EOF"));
    assert!(publish("").await.problem(400).contains("EOF"));
    assert!(publish("[]").await.problem(422).contains("0 messages"));
    assert!(publish("7").await.problem(422).contains("invalid type"));
    assert!(publish("[1, 2").await.problem(400).contains("EOF"));
    assert!(publish("{\"id\": \"\u{0}\"}").await.problem(400).contains("control character"));
    let long = format!("[\"{}\"]", "x".repeat(3_000));
    assert!(
        raw(Method::POST, "/api/messages", "application/json", &long).await.problem(413).contains("2048")
    );
    assert!(
        raw(Method::POST, "/api/messages", "text/plain", "{}")
            .await
            .problem(415)
            .contains("application/json")
    );
    let deep = "[".repeat(1_000);
    assert_eq!(raw(Method::POST, "/api/messages", "application/json", &deep).await.status, 400);
    for (method, path, status, part) in [
        ("GET", "/nothing", 404, "/nothing"),
        ("GET", "/api", 404, "/api"),
        ("GET", "/api/pools/none", 404, "none"),
        ("POST", "/api/pools/none/pause", 404, "none"),
        ("DELETE", "/api/pools/DEFAULT-POOL", 409, "cannot be removed"),
        ("POST", "/api/pools/DEFAULT-POOL/drain", 409, "cannot be removed"),
        ("GET", "/api/groups?pool=none", 404, "none"),
        ("GET", "/api/groups?most=many", 400, "most"),
        ("GET", "/api/groups?unknown=1", 400, "unknown"),
        ("GET", "/api/groups/none/g", 404, "none"),
        ("POST", "/api/groups/DEFAULT-POOL/g/resume", 409, "nothing to resume"),
        ("POST", "/api/groups/DEFAULT-POOL/g/skip", 409, "nothing to skip"),
        ("GET", "/api/dead-letters?queue=none", 404, "there are default"),
        ("GET", "/api/dead-letters?after=-1", 400, "after"),
        ("PUT", "/api/pools", 405, "method"),
        ("POST", "/api/messages?queue=none", 404, "none"),
    ] {
        let detail = bench.call(method, path, None).await.problem(status);
        assert!(detail.contains(part), "{method} {path}: {detail}");
    }
    let put = |body: Value| bench.call("PUT", "/api/pools/p", Some(body));
    let answer = put(json!({ "concurrency": 0, "affinity": 3, "attempts": 0 })).await;
    assert_eq!(
        (answer.problem(422).contains("concurrency"), answer.json()["errors"].as_array().unwrap().len()),
        (true, 3)
    );
    assert!(put(json!({ "concurency": 1 })).await.problem(422).contains("concurency"));
    assert!(put(json!({ "concurrency": "many" })).await.problem(422).contains("invalid type"));
    assert!(bench.call("PUT", "/api/pools/%20p", Some(json!({}))).await.problem(422).contains("blanks"));
    assert!(
        bench.call("PUT", "/api/pools/default-pool", Some(json!({}))).await.problem(422).contains("case")
    );
    let reset = bench.post("/api/breakers/reset", json!({ "target": "http://x/" })).await;
    assert!(reset.problem(404).contains("http://x/"));
    bench.shutdown().await;
}

#[tokio::test]
async fn pages_of_other_origins_and_names_that_were_bent_are_refused() {
    let bench = Bench::new("").await;
    let with = |name: &'static str, value: String| {
        let request =
            Request::post(format!("{}/api/pools/DEFAULT-POOL/pause", bench.base())).header(name, value);
        bench.send(request.body(Full::default()).unwrap())
    };
    assert!(with("origin", "http://evil.example".to_owned()).await.problem(403).contains("origins"));
    assert!(with("origin", "null".to_owned()).await.problem(403).contains("origins"));
    assert!(with("host", "evil.example".to_owned()).await.problem(403).contains("token"));
    let own = with("origin", bench.base()).await;
    assert_eq!(own.status, 200);
    assert!(!own.headers.keys().any(|name| name.as_str().starts_with("access-control")));
    bench.shutdown().await;
}

#[tokio::test]
async fn with_a_token_only_health_metrics_and_the_description_are_open() {
    let mut bench = Bench::new("laneway.http.admin-token = open-sesame").await;
    let token = bench.token.take();
    for path in ["/health/live", "/health/ready", "/metrics", "/openapi.json", "/api/test/stats"] {
        assert_eq!(bench.call("GET", path, None).await.status, 200, "{path}");
    }
    for (method, path) in
        [("GET", "/api/pools"), ("POST", "/api/messages"), ("GET", "/api/config"), ("GET", "/api/nothing")]
    {
        let answer = bench.call(method, path, None).await;
        assert!(answer.problem(401).contains("Bearer"), "{path}");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    for wrong in ["open", "open-sesame-", "", "OPEN-SESAME"] {
        bench.token = Some(wrong.to_owned());
        assert_eq!(bench.call("GET", "/api/pools", None).await.status, 401, "{wrong:?}");
    }
    bench.token = token;
    assert_eq!(bench.call("GET", "/api/pools", None).await.status, 200);
    let config = bench.get("/api/config").await.to_string();
    assert!(config.contains("laneway.http.admin-token") && !config.contains("open-sesame"), "{config}");
    bench.shutdown().await;
}

/// Without a token whoever may publish could have the router call its own admin routes: the guard knows its calls by their fence.
#[tokio::test]
async fn a_message_cannot_operate_the_router_that_delivers_it() {
    let bench = Bench::new("laneway.ingress { enabled = true, bind = \"127.0.0.1:0\" }").await;
    let pause = format!("{}/api/pools/DEFAULT-POOL/pause", bench.base());
    let message = json!({ "id": "published", "poolCode": "", "mediationTarget": pause });
    bench.post("/api/messages", message).await.with(202);
    let letters = bench.until("/api/dead-letters", |letters| letters[0]["id"] == "published").await;
    let reason = letters[0]["reason"].as_str().unwrap();
    assert!(reason.contains("403") && reason.contains("admin-token"), "{reason}");

    let line = json!({ "id": "line", "correlationId": 7, "notify": true, "mediationType": "HTTP", "mediationTarget": pause });
    let mut ingress = TcpStream::connect(bench.service.ingress_address().unwrap()).await.unwrap();
    ingress.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    let ended = |it: &Value| it["tasksFailed"] == 1;
    bench.until("/api/ingress", |ingress| ingress["partitions"].as_array().unwrap().iter().any(ended)).await;
    assert_eq!(bench.get("/api/pools").await[0]["state"], "open");

    // The test targets are for messages, and whoever calls without a fence is a person.
    bench
        .post(
            "/api/messages",
            json!({ "id": "1", "poolCode": "", "mediationTarget": bench.target("success") }),
        )
        .await
        .with(202);
    bench.until("/api/pools", |pools| pools[0]["counts"]["succeeded"] == 1).await;
    bench.call("POST", "/api/pools/DEFAULT-POOL/pause", None).await.with(200);
    bench.shutdown().await;
}

#[tokio::test]
async fn beyond_loopback_there_is_no_start_without_a_token() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("laneway.conf"), "").unwrap();
    let layering = Bench::layering(&folder).set("laneway.http.bind", "\"0.0.0.0:0\"");
    let error = Config::load(&layering).expect_err("refused").to_string();
    assert!(error.contains("laneway.http.admin-token"), "{error}");
    let mut config = Config::load(&Bench::layering(&folder)).unwrap();
    config.http.bind = "0.0.0.0:0".parse().unwrap();
    let error = Service::start(config).await.expect_err("refused");
    assert!(matches!(error, StartError::Unguarded(_)), "{error}");
    assert!(!folder.path().join("queue.db").exists(), "nothing was touched");
}

#[tokio::test]
async fn what_cannot_be_had_is_said_at_the_start() {
    let bench = Bench::new("").await;
    let port = bench.service.http_address().to_string();
    let other = tempfile::tempdir().unwrap();
    std::fs::write(other.path().join("laneway.conf"), "").unwrap();
    let taken = Bench::layering(&other).set("laneway.http.bind", &format!("\"{port}\""));
    let error = Service::start(Config::load(&taken).unwrap()).await.expect_err("the port is taken");
    assert!(matches!(error, StartError::Listen { .. }) && error.to_string().contains(&port), "{error}");
    let error = Service::start(Config::load(&Bench::layering(&bench.folder)).unwrap())
        .await
        .expect_err("the file is taken");
    assert!(matches!(error, StartError::Store { .. }) && error.to_string().contains("in use"), "{error}");
    bench.shutdown().await;
}

// ── slow and greedy clients ───────────────────────────────────────────────────────────────────────────────────────────

async fn talk(bench: &Bench, text: &str) -> String {
    let mut stream = TcpStream::connect(bench.service.http_address()).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(DEADLINE, stream.read_to_string(&mut answer))
        .await
        .expect("the service hangs up")
        .unwrap();
    answer
}

#[tokio::test]
async fn clients_that_dawdle_are_hung_up_on() {
    let bench =
        Bench::new("laneway.http { head-timeout = 200 ms, body-timeout = 200 ms, connections-max = 2 }")
            .await;
    assert_eq!(talk(&bench, "").await, "", "says nothing at all");
    let half = talk(&bench, "GET /health/live HTTP/1.1\r\nHost: local").await;
    assert!(half.is_empty() || half.starts_with("HTTP/1.1 408"), "half a head: {half}");
    let head = "POST /api/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{";
    let slow = talk(&bench, head).await;
    assert!(
        slow.starts_with("HTTP/1.1 408") && slow.contains("problem+json") && slow.contains("too long"),
        "{slow}"
    );
    let target = head.replace("/api/messages", "/api/test/success");
    let slow = talk(&bench, &target).await;
    assert!(slow.starts_with("HTTP/1.1 4") && slow.contains("problem+json"), "{slow}");
    // Two that sit there, and a third is served when one of them has been sent away.
    let idle = [
        TcpStream::connect(bench.service.http_address()).await.unwrap(),
        TcpStream::connect(bench.service.http_address()).await.unwrap(),
    ];
    bench.get("/health/live").await;
    drop(idle);
    bench.shutdown().await;
}

/// A client that asks and asks and takes no answer keeps its place for the write timeout only; a stream goes on for longer.
#[tokio::test]
async fn clients_that_take_no_answer_are_hung_up_on() {
    let bench = Bench::new("laneway.http { write-timeout = 200 ms, connections-max = 2 }").await;
    let mut deaf = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(bench.service.http_address()).await.unwrap();
        // More answers than the system keeps for a client, in as many requests as it keeps for the service.
        let ask = "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(1_000);
        stream.write_all(ask.as_bytes()).await.unwrap();
        tokio::time::timeout(DEADLINE, stream.readable()).await.expect("has a place").unwrap();
        deaf.push(stream);
    }
    bench.get("/health/live").await;
    drop(deaf);
    let mut stream = bench.stream().await;
    for _ in 0..2 {
        next_event(&mut stream).await; // a second apart, which is longer than the timeout
    }
    drop(stream);
    bench.shutdown().await;
}

#[tokio::test]
async fn a_head_without_end_and_a_body_that_lies_are_refused() {
    let bench = Bench::new("laneway.http.body-limit = 4 KiB").await;
    let endless = format!("GET /health/live HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n", "x".repeat(200_000));
    let mut stream = TcpStream::connect(bench.service.http_address()).await.unwrap();
    // The service may hang up while we are still at it.
    let _ = stream.write_all(endless.as_bytes()).await;
    let mut answer = Vec::new();
    let _ =
        tokio::time::timeout(DEADLINE, stream.read_to_end(&mut answer)).await.expect("the service hangs up");
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    let head = "POST /api/messages HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
    let huge = talk(&bench, &format!("{head}Content-Length: 99999999999\r\n\r\n{{")).await;
    assert!(huge.starts_with("HTTP/1.1 413") && huge.contains("4096"), "{huge}");
    let chunk = format!("{head}Transfer-Encoding: chunked\r\n\r\n1400\r\n{}\r\n", " ".repeat(0x1400));
    let chunked = talk(&bench, &chunk).await;
    assert!(chunked.starts_with("HTTP/1.1 413"), "{chunked}");
    bench.get("/health/ready").await;
    bench.shutdown().await;
}

// ── change ────────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test]
async fn a_reload_applies_what_it_can_and_names_the_rest() {
    let bench = Bench::new("laneway.pools { a { concurrency = 1 }, b {} }").await;
    bench.call("PUT", "/api/pools/mine", Some(json!({}))).await.with(201);
    bench.write("laneway { pools { a { concurrency = 7, rate-per-second = 3 }, c {} }, queue.queues = [default, more], lease = 31 s, http.admin-token = new }");
    let done = bench.post("/api/config/reload", json!({})).await.with(200);
    let changed =
        done["changed"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(
        changed,
        [
            "pool a: concurrency 1 -> 7, rate-per-second none -> 3",
            "pool c was added",
            "pool b drains and goes",
            "queue more is read"
        ]
    );
    assert_eq!(done["needsRestart"], json!(["laneway.http.admin-token", "laneway.lease"]));
    let pools = bench.until("/api/pools", |pools| pools.as_array().unwrap().len() == 4).await;
    let codes: Vec<_> = pools.as_array().unwrap().iter().map(|pool| pool["code"].as_str().unwrap()).collect();
    assert_eq!(codes, ["DEFAULT-POOL", "a", "c", "mine"], "what came by the API stays");
    assert_eq!((&pools[1]["concurrency"], &pools[1]["ratePerSecond"]), (&json!(7), &json!(3.0)));
    let answer = bench
        .post("/api/messages?queue=more", json!({ "id": "1", "poolCode": "a", "mediationType": "SIMULATED" }))
        .await;
    assert_eq!(answer.with(202)["accepted"], 1);
    bench.until("/api/pools/a", |pool| pool["counts"]["succeeded"] == 1).await;
    let again = bench.post("/api/config/reload", json!({})).await.with(200);
    assert_eq!(again["changed"], json!([]), "nothing is different any more");
    let config = bench.get("/api/config").await;
    let value = |path: &str| {
        let all = config.as_array().unwrap();
        all.iter().find(|it| it["path"] == path).map(|it| it["value"].as_str().unwrap().to_owned())
    };
    assert_eq!(value("laneway.pools.a.concurrency").as_deref(), Some("7"), "as it is now");
    assert_eq!(value("laneway.lease").as_deref(), Some("\"30 s\""), "as it was at the start");
    assert!(value("laneway.queue.queues").unwrap_or_default().contains("more"), "{config}");
    bench.shutdown().await;
}

/// A reload that changes every pool stops no source: what is published between the reloads is delivered, and its leases are kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pitfall_004_16_a_reload_does_not_stop_the_sources() {
    let bench = Bench::new("laneway.pools.a.concurrency = 1").await;
    for round in 1..=10_u64 {
        let message = |pool: &str| json!({ "id": format!("{pool}-{round}"), "poolCode": pool, "messageGroupId": pool, "mediationTarget": bench.target("success") });
        bench.post("/api/messages", json!([message("a"), message("DEFAULT-POOL")])).await.with(202);
        bench.write(&format!(
            "laneway.pools {{ a {{ concurrency = {0} }}, DEFAULT-POOL {{ concurrency = {0} }} }}",
            round + 1
        ));
        let done = bench.post("/api/config/reload", json!({})).await.with(200);
        assert_eq!(done["changed"].as_array().map(Vec::len), Some(2), "{done}");
        let is_done = |pool: &Value| pool["counts"]["succeeded"] == round;
        bench.until("/api/pools/a", is_done).await;
        bench.until("/api/pools/DEFAULT-POOL", is_done).await;
    }
    let sources = bench.get("/api/sources").await;
    assert_eq!(
        (&sources[0]["claimed"], &sources[0]["state"]),
        (&json!(20), &json!("connected")),
        "{sources}"
    );
    bench.shutdown().await;
}

/// A pool that a reload drops goes although a group is parked in it, and one that is named again while it drains comes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pitfall_004_06_a_pool_that_a_reload_drops_goes_and_can_come_again() {
    let bench = Bench::new("laneway.pools.b { exhausted = park-group, attempts = 1 }").await;
    let to = |id: &str, group: &str, target: &str| json!({ "id": id, "poolCode": "b", "messageGroupId": group, "mediationTarget": bench.target(target) });
    bench.post("/api/messages", json!([to("1", "g", "client-error"), to("2", "g", "fast")])).await.with(202);
    bench.until("/api/groups/b/g", |group| group["state"] == "parked").await;
    bench.write("");
    bench.post("/api/config/reload", json!({})).await.with(200);
    bench.until("/api/pools", |pools| pools.as_array().unwrap().len() == 1).await;
    bench.until("/api/parked", |parked| parked[0]["pool"] == "DEFAULT-POOL").await;

    // It comes again: what is parked goes there, with the rest of its group.
    bench.write("laneway.pools.b.attempts = 1");
    bench.post("/api/config/reload", json!({})).await.with(200);
    bench.until("/api/parked", |parked| parked[0]["pool"] == "b").await;
    bench.until("/api/pools/b", |pool| pool["state"] == "open").await;

    // While a call is under way it drains, and is named again meanwhile.
    bench.post("/api/messages", json!([to("3", "h", "slow?delayMillis=500")])).await.with(202);
    bench.until("/api/pools/b", |pool| pool["inFlight"] == 1).await;
    bench.write("");
    bench.post("/api/config/reload", json!({})).await.with(200);
    bench.write("laneway.pools.b { attempts = 1, affinity = 2 }");
    let done = bench.post("/api/config/reload", json!({})).await.with(200);
    assert_eq!(done["changed"], json!(["pool b is draining, and is added again when it is gone"]));
    bench.until("/api/pools/b", |pool| pool["affinity"] == 2 && pool["state"] == "open").await;
    bench.until("/api/parked", |parked| parked[0]["pool"] == "b").await;
    bench.until("/api/pools/b", |pool| pool["parkedMessages"] == 2).await;
    bench.call("POST", "/api/groups/b/g/skip", None).await.with(200);
    bench.call("POST", "/api/groups/b/g/resume", None).await.with(200);
    bench.until("/api/pools/b", |pool| pool["counts"]["succeeded"] == 1).await;
    bench.shutdown().await;
}

/// What the versions of a broker of these tests have in common.
#[derive(Debug, Default)]
struct Opened {
    /// The versions that were opened, in order.
    versions: Mutex<Vec<u32>>,
    /// Whether the one message has been handed out.
    has_given: AtomicBool,
}

/// A broker with one message for the target; versions are different settings.
#[derive(Clone, Debug)]
struct Versioned {
    version: u32,
    target: String,
    opened: Arc<Opened>,
}

impl PartialEq for Versioned {
    fn eq(&self, other: &Self) -> bool {
        self.version == other.version
    }
}

impl Broker for Versioned {
    fn kind(&self) -> &'static str {
        "versioned"
    }

    fn open_source(&self, _: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>> {
        self.opened.versions.lock().unwrap().push(self.version);
        std::future::ready(Ok(Arc::new(self.clone()) as Arc<dyn Source>)).boxed()
    }

    fn open_sink(&self, _: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>> {
        unreachable!("it is a source only")
    }

    fn examine<'a>(&'a self, _: &'a Examination) -> BoxFuture<'a, Vec<Finding>> {
        std::future::ready(Vec::new()).boxed()
    }
}

impl Source for Versioned {
    fn name(&self) -> &str {
        "orders"
    }

    fn claim(&self, _: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        if self.opened.has_given.swap(true, SeqCst) {
            return std::future::pending().boxed();
        }
        let text = message("1", "a", &self.target).to_string().into_bytes().into();
        let receipt = Receipt::Numbers([1, 0, 0, 0]);
        let only = Delivery { id: 1, receipt, group: None, text, attempt: 1, sequence: 1 };
        std::future::ready(Ok(vec![only])).boxed()
    }

    fn settle(&self, all: Vec<(Receipt, Disposal)>) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        // What is given back comes again from whoever is opened next.
        if all.iter().any(|(_, disposal)| matches!(disposal, Disposal::GiveBack { .. })) {
            self.opened.has_given.store(false, SeqCst);
        }
        std::future::ready(Ok(vec![Settled::Settled; all.len()])).boxed()
    }

    fn extend(&self, all: Vec<Receipt>, _: Duration) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        std::future::ready(Ok(vec![Settled::Settled; all.len()])).boxed()
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        std::future::ready(Ok(Depth::default())).boxed()
    }
}

/// While the first version drains, a second is named, none, and a third: only the last is opened, and not before the first has gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_drains_comes_again_only_as_the_last_reload_has_it() {
    let bench = Bench::new("").await;
    let gate = Arc::new(Semaphore::new(0));
    let target = gated(Arc::clone(&gate)).await;
    let opened = Arc::<Opened>::default();
    let reload = async |version: Option<u32>| {
        let mut config = Config::clone(&bench.service.config());
        config.sources.clear();
        if let Some(version) = version {
            let broker = Versioned { version, target: target.clone(), opened: Arc::clone(&opened) };
            config.sources.insert("orders".to_owned(), Arc::new(broker));
        }
        bench.service.reload(config).await.unwrap().changed
    };
    let states = || {
        let all = bench.service.router().source_states().into_iter();
        all.filter(|source| source.name == "orders").map(|source| source.state.word()).collect::<Vec<_>>()
    };
    reload(Some(1)).await;
    bench.until("/api/in-flight", |running| running[0]["group"] == "a").await;
    let drained = "source orders is drained and opened with its new settings";
    assert_eq!(reload(Some(2)).await, [drained]);
    assert_eq!(reload(None).await, ["source orders is drained and goes"]);
    assert_eq!(reload(Some(3)).await, ["source orders is draining, and is read again when it is gone"]);
    assert_eq!(states(), ["stopping"], "there is one at a time");
    bench.get("/health/ready").await;
    gate.add_permits(1);
    bench.until("/api/sources", |_| states() == ["connected"]).await;
    assert_eq!(*opened.versions.lock().unwrap(), [1, 3]);

    // And one that a reload removes while it drains does not come again at all.
    opened.has_given.store(false, SeqCst);
    reload(Some(4)).await;
    bench.until("/api/in-flight", |running| running[0]["group"] == "a").await;
    reload(Some(5)).await;
    reload(None).await;
    gate.add_permits(1);
    bench.until("/api/sources", |_| states().is_empty()).await;
    // Whoever was to open something has done it, or has not: this one comes after them.
    reload(Some(6)).await;
    bench.until("/api/sources", |_| states() == ["connected"]).await;
    assert_eq!(*opened.versions.lock().unwrap(), [1, 3, 4, 6]);
    bench.shutdown().await;
}

/// What is parked would keep it for ever: it goes back at once, and is parked as before when it comes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_drains_does_not_wait_for_what_is_parked() {
    let bench = Bench::new("laneway.pools.DEFAULT-POOL { attempts = 1, exhausted = park-group }").await;
    let opened = Arc::<Opened>::default();
    let reload = async |version: u32| {
        let mut config = Config::clone(&bench.service.config());
        let broker = Versioned { version, target: bench.target("client-error"), opened: Arc::clone(&opened) };
        config.sources.insert("orders".to_owned(), Arc::new(broker));
        bench.service.reload(config).await.unwrap();
    };
    reload(1).await;
    bench.until("/api/pools/DEFAULT-POOL", |pool| pool["parkedMessages"] == 1).await;
    reload(2).await;
    bench.until("/api/pools/DEFAULT-POOL", |pool| pool["counts"]["submitted"] == 2).await;
    assert_eq!(*opened.versions.lock().unwrap(), [1, 2]);
    bench.until("/api/pools/DEFAULT-POOL", |pool| pool["parkedMessages"] == 1).await;
    let attempts = bench.service.router().pool_view("DEFAULT-POOL").unwrap().attempts;
    assert_eq!(attempts.calls(), 1, "nobody was called for it again");
    bench.shutdown().await;
}

#[tokio::test]
async fn a_reload_with_too_many_pools_changes_nothing() {
    let bench = Bench::new("laneway.pools.a.concurrency = 4").await;
    bench.call("PUT", "/api/pools/mine", Some(json!({}))).await.with(201);
    let many =
        (0..laneway_router::router::POOLS_MAX - 2).map(|pool| format!("p{pool} {{}}")).collect::<Vec<_>>();
    bench.write(&format!("laneway.pools {{ a {{ concurrency = 5 }}\n{} }}", many.join("\n")));
    let answer = bench.post("/api/config/reload", json!({})).await;
    answer.problem(422);
    assert!(
        answer.json()["errors"].to_string().contains("there would be 10001 pools"),
        "{:?}",
        answer.json()
    );
    assert_eq!(bench.get("/api/pools").await.as_array().unwrap().len(), 3);
    assert_eq!(bench.get("/api/pools/a").await["concurrency"], 4);
    bench.shutdown().await;
}

#[tokio::test]
async fn a_rate_that_is_next_to_nothing_is_refused() {
    let bench = Bench::new("").await;
    for rate in ["ratePerSecond", "groupRatePerSecond"] {
        let answer = bench.call("PUT", "/api/pools/slow", Some(json!({ rate: 1e-12 }))).await;
        assert_eq!(answer.status, 422, "{}", answer.text);
        assert!(answer.text.contains("0.000001"), "{}", answer.text);
    }
    bench.call("PUT", "/api/pools/slow", Some(json!({ "groupRatePerSecond": 1e-6 }))).await.with(201);
    bench.shutdown().await;
}

/// What a queue does with messages without a group needs a restart, and what a pool does with them does not: so it is what runs that they have to agree with.
#[tokio::test]
async fn a_reload_that_makes_a_pool_serial_beside_a_queue_without_order_changes_nothing() {
    let bench =
        Bench::new("laneway { pools.a.ungrouped = unordered, pool-defaults.ungrouped = unordered, queue.ungrouped = unordered }").await;
    for pools in ["a.ungrouped = serial", "b {}"] {
        bench.write(&format!("laneway {{ pools {{ {pools} }}, queue.ungrouped = serial }}"));
        let answer = bench.post("/api/config/reload", json!({})).await;
        answer.problem(422);
        let errors = answer.json()["errors"].to_string();
        assert!(errors.contains("cannot be serial while the queue that runs is unordered"), "{errors}");
    }
    assert_eq!(bench.get("/api/pools/a").await["ungrouped"], "unordered");
    bench.shutdown().await;
}

#[tokio::test]
async fn a_reload_that_is_not_right_changes_nothing() {
    let bench = Bench::new("laneway.pools.a.concurrency = 4").await;
    for (file, parts) in [
        (
            "laneway { pools.a { concurrency = 0, capcity = 1 }, typo = 1 }",
            vec!["concurrency", "did you mean \"capacity\"", "typo"],
        ),
        ("laneway { pools.a { concurrency = 8", vec!["never closed"]),
        ("laneway.pools { a { concurrency = 8, affinity = 2 }, new {} }", vec!["affinity"]),
    ] {
        bench.write(file);
        let answer = bench.post("/api/config/reload", json!({})).await;
        answer.problem(422);
        let errors = answer.json()["errors"].to_string().replace('\\', "");
        parts.iter().for_each(|part| assert!(errors.contains(part), "{part}: {errors}"));
        assert_eq!(bench.get("/api/pools/a").await["concurrency"], 4);
        assert_eq!(bench.call("GET", "/api/pools/new", None).await.status, 404);
    }
    bench.shutdown().await;
}

/// A payload may be more than a JSON library would take apart: numbers without a place among the floats, or a depth without end.
#[tokio::test]
async fn secrets_of_a_dead_letter_are_hidden_whatever_its_payload() {
    let bench = Bench::new("").await;
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    for payload in [r#"{"x":1e999}"#, &deep] {
        let message = format!(
            r#"{{"id": "m", "poolCode": "", "mediationTarget": "{}?key=hush", "authToken": "hush", "headers": {{"x-key": "hush"}}, "payload": {payload}}}"#,
            bench.target("client-error")
        );
        let request = Request::post(format!("{}/api/messages", bench.base()))
            .header("content-type", "application/json")
            .body(Full::from(message))
            .unwrap();
        bench.send(request).await.with(202);
        let letters = bench.until("/api/dead-letters", |letters| letters[0]["sequence"].is_u64()).await;
        let text = letters[0]["text"].as_str().unwrap();
        assert!(!letters.to_string().contains("hush"), "{text}");
        assert_eq!(letters[0]["id"], "m");
        assert!(text.contains(payload) && text.contains("x-key"), "{text}");
        assert!(text.contains(&bench.target("client-error")), "{text}");
        bench.call("DELETE", "/api/dead-letters", None).await.with(200);
    }
    bench.shutdown().await;
}

/// A page ends where it would be too much to read, and says where the next one begins.
#[tokio::test]
async fn a_page_of_dead_letters_is_bounded_and_names_the_next() {
    let bench = Bench::new("").await;
    let target = bench.target("client-error");
    let long = "x".repeat(250 * 1024);
    for id in 0..20 {
        let message =
            json!({ "id": id.to_string(), "poolCode": "", "mediationTarget": target, "payload": long });
        bench.post("/api/messages", message).await.with(202);
    }
    bench.until("/api/sources", |sources| sources[0]["dead"] == 20).await;
    let (mut path, mut ids, mut pages) = ("/api/dead-letters?most=1000".to_owned(), Vec::new(), 0);
    loop {
        let answer = bench.call("GET", &path, None).await;
        let next = answer.headers.get("link").map(|link| link.to_str().unwrap().to_owned());
        let page = answer.with(200);
        ids.extend(page.as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap().to_owned()));
        pages += 1;
        let Some(next) = next else { break };
        path = next.trim_start_matches('<').trim_end_matches(">; rel=\"next\"").to_owned();
    }
    assert_eq!((pages, ids), (2, (0..20).map(|id| id.to_string()).collect::<Vec<_>>()));
    let first = bench.call("GET", "/api/dead-letters?queue=default&most=3", None).await;
    let next = first.headers["link"].to_str().unwrap();
    assert_eq!(next, "</api/dead-letters?after=3&most=3&queue=default>; rel=\"next\"");
    bench.shutdown().await;
}

/// Whoever waits for a target that had asked for an hour tries again when its breaker is reset: groups of every pool, and families of the ingress.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_breaker_that_is_reset_lets_those_try_who_wait_for_its_target() {
    let bench =
        Bench::new("laneway { ingress { enabled = true, bind = \"127.0.0.1:0\" }, pools.more {} }").await;
    let is_well = Arc::new(AtomicBool::new(false));
    let (well, listener) = (is_well.clone(), tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap());
    let target = format!("http://{}/", listener.local_addr().unwrap());
    let answer = move || {
        let is_well = well.load(SeqCst);
        async move {
            let status = if is_well { 200 } else { 429 };
            (hyper::StatusCode::from_u16(status).unwrap(), [("retry-after", "3600")])
        }
    };
    let route = || axum::routing::post(answer.clone());
    let routes = axum::Router::new().route("/", route()).route("/other", route());
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let mut of_more = message("3", "c", &target);
    of_more["poolCode"] = json!("more");
    let other = message("4", "d", &format!("{target}other"));
    let refused = message("5", "e", &bench.target("pending"));
    let all = json!([message("1", "a", &target), message("2", "b", &target), of_more, other, refused]);
    bench.post("/api/messages", all).await.with(202);
    let mut stream = TcpStream::connect(bench.service.ingress_address().unwrap()).await.unwrap();
    let line = json!({ "id": "6", "correlationId": "f", "mediationType": "HTTP", "mediationTarget": target, "notify": true });
    stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    for group in ["DEFAULT-POOL/a", "DEFAULT-POOL/b", "more/c", "DEFAULT-POOL/d"] {
        let path = format!("/api/groups/{group}");
        bench.until(&path, |group| group["state"] == "retrying" && group["head"]["attempts"] == 0).await;
    }
    bench.until("/api/stats", |stats| stats["mediators"]["http"]["waits"].as_u64() >= Some(5)).await;
    is_well.store(true, SeqCst);
    bench.post("/api/breakers/reset", json!({ "target": target })).await.with(200);
    bench.until("/api/pools/more", |pool| pool["counts"]["succeeded"] == 1).await;
    bench.until("/api/pools/DEFAULT-POOL", |pool| pool["counts"]["succeeded"] == 2).await;
    let mut told = tokio::io::BufReader::new(stream).lines();
    for expected in ["ACK:6", "DONE:6"] {
        let line = tokio::time::timeout(DEADLINE, told.next_line()).await.expect("an answer").unwrap();
        assert_eq!(line.as_deref(), Some(expected));
    }
    let other = bench.get("/api/groups/DEFAULT-POOL/d").await;
    assert_eq!(other["state"], "retrying", "another target is not concerned");
    assert!(other["reason"]["afterMillis"].as_u64() > Some(3_000_000), "{other}");
    bench.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_makes_all_of_its_attempts_before_its_policy_decides() {
    let file = "laneway { mediator.breaker.calls-min = 1000, pool-defaults { backoff = 1 ms, backoff-max = 1 ms, attempts = 7 }
        pools { letters {}, parks { exhausted = park-group } } }";
    let bench = Bench::new(file).await;
    let to = |pool: &str| json!({ "id": pool, "poolCode": pool, "messageGroupId": "g", "mediationTarget": bench.target("fail") });
    bench.post("/api/messages", json!([to("letters"), to("parks")])).await.with(202);
    bench.until("/api/groups/parks/g", |group| group["state"] == "parked").await;
    bench.until("/api/dead-letters", |letters| letters[0]["id"] == "letters").await;
    let pools = bench.get("/api/pools").await;
    assert_eq!(
        (&pools[1]["counts"]["transient"], &pools[2]["counts"]["transient"]),
        (&json!(6), &json!(6)),
        "{pools}"
    );
    let stats = bench.get("/api/test/stats").await;
    let fail = stats["endpoints"].as_array().unwrap().iter().find(|it| it["name"] == "fail").unwrap();
    assert_eq!(fail["calls"], 14);
    let redriven = bench.post("/api/dead-letters/redrive", json!({ "queue": "default" })).await.with(200);
    assert_eq!(redriven["redriven"], 1);
    bench
        .until("/api/dead-letters", |letters| letters[0]["attempts"] == 1 && letters[0]["id"] == "letters")
        .await;
    bench.shutdown().await;
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_what_is_parked_or_paused() {
    let bench = Bench::new("laneway.pools { paused {}, parks { exhausted = park-group } }").await;
    bench.call("POST", "/api/pools/paused/pause", None).await.with(200);
    let to =
        |pool: &str| json!({ "id": pool, "poolCode": pool, "mediationTarget": bench.target("client-error") });
    bench.post("/api/messages", json!([to("paused"), to("parks")])).await.with(202);
    bench.until("/api/pools/paused", |pool| pool["held"] == 1).await;
    bench.until("/api/pools/parks", |pool| pool["parkedGroups"] == 1).await;
    let ending = bench.service.shutdown(Duration::from_secs(3_600));
    let farewell = tokio::time::timeout(DEADLINE, ending).await.expect("at once");
    assert!(farewell.router.settled && farewell.router.given_back == 2, "{farewell:?}");
    let again = Bench::at(bench.folder).await;
    again.until("/api/sources", |sources| sources[0]["claimed"] == 2).await;
    // Their target was at the old port: they would be tried in vain until the time is up.
    let _ = again.service.shutdown(Duration::ZERO).await;
}

// ── metrics ───────────────────────────────────────────────────────────────────────────────────────────────────────────

/// The samples by name and labels. Checks the format on its way.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let (mut samples, mut family, mut seen) =
        (BTreeMap::new(), (String::new(), String::new()), BTreeSet::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a help text");
            assert!(help.ends_with('.') && name.starts_with("laneway_"), "{line}");
            assert!(seen.insert(name.to_owned()), "{name} comes twice");
            family.0 = name.to_owned();
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(name, family.0);
            assert!(["counter", "gauge", "histogram", "summary"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            family.1 = kind.to_owned();
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').expect("a value");
        let name = sample.split('{').next().unwrap();
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let base = base.filter(|_| family.1 == "histogram").unwrap_or(name);
        assert_eq!(base, family.0, "{line} is under the wrong head");
        assert_eq!(sample.contains("quantile="), family.1 == "summary", "{line}");
        assert!(
            samples.insert(sample.to_owned(), value.parse().expect(line)).is_none(),
            "{sample} comes twice"
        );
    }
    assert!(text.ends_with('\n'));
    samples
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_well_formed_and_say_what_the_api_says() {
    let bench =
        Bench::new("laneway { ingress { enabled = true, bind = \"127.0.0.1:0\" }, pools { \"a\\\"b\" {} } }")
            .await;
    bench
        .call("POST", "/api/seed/messages?count=50&endpoint=success&messageGroupMode=unique", None)
        .await
        .with(202);
    bench
        .post("/api/messages", message("dead", "secret-group", &bench.target("client-error")))
        .await
        .with(202);
    let mut stream = TcpStream::connect(bench.service.ingress_address().unwrap()).await.unwrap();
    stream.write_all(b"{\"id\": \"1\", \"correlationId\": \"f\"}\nnonsense\n").await.unwrap();
    bench
        .until("/api/ingress", |ingress| {
            ingress["partitions"].as_array().unwrap().iter().any(|it| it["tasksCompleted"] == 1)
        })
        .await;
    bench
        .until("/api/pools/DEFAULT-POOL", |pool| {
            pool["counts"]["succeeded"] == 50 && pool["counts"]["failed"] == 1
        })
        .await;
    bench.until("/api/sources", |sources| sources[0]["held"] == 0).await;
    let answer = bench.call("GET", "/metrics", None).await;
    assert_eq!(answer.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let samples = parse(&answer.text);
    let sample = |name: &str| *samples.get(name).unwrap_or_else(|| panic!("no {name} in\n{}", answer.text));
    let pool = bench.get("/api/pools/DEFAULT-POOL").await;
    for (outcome, name) in [
        ("submitted", "submitted"),
        ("succeeded", "succeeded"),
        ("failed", "failed"),
        ("given_back", "givenBack"),
    ] {
        let counted =
            sample(&format!("laneway_pool_messages_total{{pool=\"DEFAULT-POOL\",outcome=\"{outcome}\"}}"));
        assert_eq!(counted, pool["counts"][name].as_f64().unwrap(), "{outcome}");
    }
    assert_eq!(sample("laneway_pool_service_seconds_count{pool=\"DEFAULT-POOL\"}"), 51.0);
    assert_eq!(sample("laneway_pool_service_seconds_bucket{pool=\"DEFAULT-POOL\",le=\"+Inf\"}"), 51.0);
    assert_eq!(sample("laneway_mediator_attempts_total{kind=\"http\",verdict=\"done\"}"), 50.0);
    assert_eq!(sample("laneway_mediator_attempts_total{kind=\"simulated\",verdict=\"done\"}"), 1.0);
    assert_eq!(sample("laneway_source_dead_letters{source=\"default\"}"), 1.0);
    assert_eq!(sample("laneway_source_claimed_total{source=\"default\"}"), 51.0);
    assert_eq!(sample("laneway_ingress_lines_total"), 2.0);
    assert_eq!(sample("laneway_ingress_rejections_total{code=\"MALFORMED\"}"), 1.0);
    assert_eq!(sample("laneway_pool_in_flight{pool=\"a\\\"b\"}"), 0.0);
    assert_eq!(sample("laneway_pools{state=\"open\"}"), 2.0);
    assert!(
        !answer.text.contains("secret-group") && !answer.text.contains("http://"),
        "no groups and no targets"
    );
    for name in samples.keys().filter(|name| name.contains("_bucket{")) {
        let family = name.split(",le=").next().unwrap();
        let buckets = samples.iter().filter(|(other, _)| other.split(",le=").next() == Some(family));
        assert!(buckets.count() > 10, "{name}");
    }
    drop(stream);
    bench.shutdown().await;
}

#[tokio::test]
async fn a_queue_that_is_not_named_any_more_is_warned_about_with_what_is_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(folder.path().join("queue.db"), StoreOptions::default()).unwrap();
    let publications = || (0..3).map(|_| Publication::new("{}")).collect();
    for queue in ["bulk", "default"] {
        store.queue(queue).unwrap().publish_many(publications(), None).await.unwrap();
    }
    store.close().await;
    std::fs::write(folder.path().join("laneway.conf"), "").unwrap();
    let bench = Bench::at(folder).await;
    let warnings = bench.get("/api/warnings").await;
    let texts = warnings.as_array().unwrap().iter().map(|warning| warning["text"].as_str().unwrap());
    let stranded: Vec<_> = texts.filter(|text| text.starts_with("nobody reads")).collect();
    let words = "because laneway.queue.queues does not name it; messages that wait: 3, dead letters: 0, in quarantine: 0";
    assert_eq!(stranded, [format!("nobody reads the queue \"bulk\", {words}")]);
    let text = bench.call("GET", "/metrics", None).await.text;
    let samples = parse(&text);
    let of = samples.keys().filter(|name| name.starts_with("laneway_queue_stranded_messages"));
    assert_eq!(of.collect::<Vec<_>>(), ["laneway_queue_stranded_messages{queue=\"bulk\"}"]);
    assert_eq!(samples["laneway_queue_stranded_messages{queue=\"bulk\"}"], 3.0);
    // Named again, it is read, and is stranded no longer.
    bench.write("laneway.queue.queues = [default, bulk]");
    bench.call("POST", "/api/config/reload", None).await.with(200);
    assert_eq!(bench.service.stranded(), []);
    bench.shutdown().await;
}

#[tokio::test]
async fn many_pools_do_not_make_many_labels() {
    let pools: String = (0..150).map(|number| format!("p{number:03} {{ concurrency = 1 }}\n")).collect();
    let bench = Bench::new(&format!("laneway.pools {{ {pools} }}")).await;
    let text = bench.call("GET", "/metrics", None).await.text;
    let samples = parse(&text);
    let labelled = samples.keys().filter(|name| name.starts_with("laneway_pool_in_flight{")).count();
    assert_eq!(labelled, 101);
    assert_eq!(samples["laneway_pool_concurrency{pool=\"(others)\"}"], 51.0);
    bench.shutdown().await;
}

// ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A pool that was made by the API is not there any more after a restart. What was parked in it stops in the one that stands in, and in one of its name that is made later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_parked_stays_parked_when_its_pool_does_not_come_again() {
    let bench = Bench::new("").await;
    let of_group = |id: &str, group: &str| json!({ "id": id, "poolCode": "mine", "messageGroupId": group, "mediationType": "SIMULATED", "mediationTarget": "1ms" });
    let make = async |bench: &Bench| {
        bench.call("PUT", "/api/pools/mine", Some(json!({}))).await.with(201);
        bench.until("/api/pools/mine", |pool| pool["state"] == "open").await;
    };
    let restart = async |bench: Bench| {
        let farewell = bench.service.shutdown(Duration::from_secs(5)).await;
        assert!(farewell.router.settled, "{farewell:?}");
        Bench::at(bench.folder).await
    };
    make(&bench).await;
    bench.call("POST", "/api/pools/mine/pause", None).await.with(200);
    bench
        .post("/api/messages", json!([of_group("1", "a"), of_group("2", "a"), of_group("3", "b")]))
        .await
        .with(202);
    bench.until("/api/pools/mine", |pool| pool["held"] == 3).await;
    for group in ["a", "b"] {
        bench.post(&format!("/api/groups/mine/{group}/park"), json!({ "why": "not today" })).await.with(200);
    }
    // Twice, since nothing may be forgotten on the way either.
    let mut bench = bench;
    for _ in 0..2 {
        bench = restart(bench).await;
        bench.until("/api/pools/DEFAULT-POOL", |pool| pool["parkedMessages"] == 3).await;
        let group = bench.get("/api/groups/DEFAULT-POOL/a").await;
        assert_eq!((&group["state"], &group["reason"]["why"]), (&json!("parked"), &json!("not today")));
    }
    // One goes on at an operator's word, for good; the other waits for its pool.
    bench.call("POST", "/api/groups/DEFAULT-POOL/b/resume", None).await.with(200);
    bench.until("/api/pools/DEFAULT-POOL", |pool| pool["counts"]["succeeded"] == 1).await;
    make(&bench).await;
    bench.until("/api/pools/mine", |pool| pool["parkedMessages"] == 2).await;
    let bench = restart(bench).await;
    make(&bench).await;
    let parked = bench.get("/api/parked").await;
    let parked: Vec<_> = parked.as_array().unwrap().iter().map(|one| (&one["pool"], &one["group"])).collect();
    assert_eq!(parked, [(&json!("mine"), &json!("a"))]);
    bench.call("POST", "/api/groups/mine/a/resume", None).await.with(200);
    bench.until("/api/pools/mine", |pool| pool["counts"]["succeeded"] == 2).await;
    let bench = restart(bench).await;
    assert_eq!(bench.get("/api/parked").await, json!([]));
    bench.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_published_while_the_service_ends_is_there_when_it_starts_again() {
    let bench = Bench::new("laneway.pools.DEFAULT-POOL.concurrency = 1").await;
    bench.post("/api/messages", message("held", "a", &bench.target("slow"))).await.with(202);
    bench.until("/api/in-flight", |running| running[0]["group"] == "a").await;
    bench.service.close();
    assert!(bench.call("GET", "/health/ready", None).await.problem(503).contains("shutting down"));
    assert_eq!(bench.get("/health/live").await["status"], "live");
    assert_eq!(bench.service.held(), 1);
    let (url, mut calls) = recorder().await;
    bench.post("/api/messages", message("later", "b", &url)).await.with(202);
    assert!(bench.post("/api/config/reload", json!({})).await.problem(422).contains("nothing was changed"));
    let ending = bench.service.shutdown(Duration::from_millis(50));
    let farewell = tokio::time::timeout(DEADLINE, ending).await.expect("the slow target is hurried up");
    assert!(farewell.router.settled, "{farewell:?}");
    assert_eq!(bench.service.held(), 0);
    assert!(calls.try_recv().is_err(), "nothing was taken after the close");
    let Bench { folder, service, .. } = bench;
    assert_eq!(service.shutdown(Duration::ZERO).await.connections_cut, 0, "a second end finds nothing to do");
    let bench = Bench::at(folder).await;
    let (key, ..) =
        tokio::time::timeout(DEADLINE, calls.recv()).await.expect("delivered after the restart").unwrap();
    assert_eq!(key, "b");
    // Its target was at the old port, so it is tried in vain; what matters is that it is there.
    bench.until("/api/groups/DEFAULT-POOL/a", |group| group["depth"] == 1).await;
    let _ = bench.service.shutdown(Duration::ZERO).await;
}

/// What the ingress holds counts as held until the service has ended, and is there to be looked at.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ingress_is_counted_while_it_drains() {
    let bench = Bench::new("laneway.ingress { enabled = true, bind = \"127.0.0.1:0\" }").await;
    let gate = Arc::new(Semaphore::new(0));
    let target = gated(Arc::clone(&gate)).await;
    let mut stream = TcpStream::connect(bench.service.ingress_address().unwrap()).await.unwrap();
    let line = json!({ "id": "1", "correlationId": "f", "mediationType": "HTTP", "mediationTarget": target });
    stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    bench.until("/api/ingress", |ingress| ingress["accepted"] == 1).await;
    let service = bench.service.clone();
    let ending = tokio::spawn(async move { service.shutdown(DEADLINE).await });
    bench.until("/api/stats", |stats| stats["closing"] == true).await;
    let ingress = bench.get("/api/ingress").await;
    assert_eq!((&ingress["enabled"], &ingress["accepted"]), (&json!(true), &json!(1)), "{ingress}");
    assert_eq!(bench.service.held(), 1);
    gate.add_permits(1);
    let farewell = tokio::time::timeout(DEADLINE, ending).await.expect("an end").unwrap();
    assert_eq!((farewell.ingress_lost, bench.service.held()), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_delivers_what_is_held() {
    let bench = Bench::new("laneway.pools.DEFAULT-POOL.concurrency = 4").await;
    let (url, mut calls) = recorder().await;
    let all: Vec<Value> = (0..200).map(|n| message(&n.to_string(), &format!("g{}", n % 4), &url)).collect();
    bench.post("/api/messages", json!(all)).await.with(202);
    let first = tokio::time::timeout(DEADLINE, calls.recv()).await.expect("it has begun").unwrap();
    let farewell =
        tokio::time::timeout(DEADLINE, bench.service.shutdown(Duration::from_secs(10))).await.unwrap();
    assert!(farewell.router.settled && farewell.router.given_back == 0, "{farewell:?}");
    let mut seen = BTreeMap::from([(first.0, vec![first.1])]);
    while let Ok((key, sequence, _)) = calls.try_recv() {
        seen.entry(key).or_default().push(sequence);
    }
    for (key, sequences) in seen.iter() {
        assert!(sequences.windows(2).all(|pair| pair[1] == pair[0] + 4), "{key}: {sequences:?}");
    }
    let Bench { folder, .. } = bench;
    let again = Bench::at(folder).await;
    let delivered: usize = seen.values().map(Vec::len).sum();
    for _ in delivered..200 {
        tokio::time::timeout(DEADLINE, calls.recv())
            .await
            .expect("the rest comes after the restart")
            .unwrap();
    }
    again.until("/api/sources", |sources| sources[0]["waiting"] == 0 && sources[0]["leased"] == 0).await;
    assert!(calls.try_recv().is_err(), "each was delivered once");
    again.shutdown().await;
}

// ── the guide ─────────────────────────────────────────────────────────────────────────────────────────────────────────

const GUIDE: &str = include_str!("../../../docs/guide/router.md");

/// The blocks of the guide in this language.
fn blocks(language: &str) -> Vec<&'static str> {
    let begin = format!("```{language}\n");
    GUIDE.split(begin.as_str()).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// The words of a command, as a shell would cut it.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for char in line.chars() {
        match (char, quote) {
            ('\'' | '"', None) => quote = Some(char),
            (char, Some(open)) if char == open => quote = None,
            (' ', None) => words.extend(Some(std::mem::take(&mut word)).filter(|word| !word.is_empty())),
            (char, _) => word.push(char),
        }
    }
    words.extend(Some(word).filter(|word| !word.is_empty()));
    words
}

#[test]
fn the_configurations_of_the_guide_are_right() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("laneway.conf");
    assert_eq!(blocks("hocon").len(), 2);
    for block in blocks("hocon") {
        std::fs::write(&file, block).unwrap();
        Config::load(&Layering::file(&file)).unwrap_or_else(|error| panic!("{block}\n{error}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commands_of_the_guide_work_one_after_the_other() {
    let bench = Bench::new("").await;
    let lines = blocks("sh").into_iter().flat_map(str::lines).collect::<Vec<_>>();
    assert!(lines.len() > 15);
    for line in lines {
        let (mut method, mut body, mut path) = ("GET".to_owned(), None, String::new());
        let mut words = words(line).into_iter();
        assert_eq!(words.next().as_deref(), Some("curl"), "{line}");
        while let Some(word) = words.next() {
            match word.as_str() {
                "-s" => {}
                "-X" => method = words.next().unwrap(),
                "-H" => assert_eq!(words.next().as_deref(), Some("content-type: application/json")),
                "-d" => {
                    let text = words.next().unwrap().replace("http://localhost:8080", &bench.base());
                    body = Some(serde_json::from_str(&text).expect(line));
                }
                address => path = address.strip_prefix("localhost:8080").expect(line).to_owned(),
            }
        }
        let answer = bench.call(&method, &path, body).await;
        assert!((200..300).contains(&answer.status), "{line}: {}", answer.text);
        // A pool that has just been made opens in a moment; a person is not as quick as we are.
        if method == "PUT" {
            bench.until(&path, |pool| pool["state"] == "open").await;
        }
    }
    bench.service.targets().unwrap().close();
    let _ = bench.service.shutdown(Duration::ZERO).await;
}

/// Every metric that the service has is in the guide.
#[tokio::test]
async fn the_guide_names_every_metric() {
    let bench = Bench::new("").await;
    let text = bench.call("GET", "/metrics", None).await.text;
    for name in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        let is_named = GUIDE.contains(&format!("`{name}`")) || GUIDE.contains(&format!("`{name}{{"));
        assert!(is_named, "{name} is not in the guide");
    }
    bench.shutdown().await;
}
