//! What operations people have tools for: the files in `deploy/` name only metrics that exist, and a message's way can be read from the spans that a collector gets.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use laneway_router::config::{Config, Layering};
use laneway_router::service::Service;
use serde_json::Value;

async fn start(folder: &tempfile::TempDir, config: &str) -> Service {
    std::fs::write(folder.path().join("laneway.conf"), config).unwrap();
    let database = folder.path().join("queue.db");
    let layering = Layering::file(folder.path().join("laneway.conf"))
        .set("laneway.http.bind", "\"127.0.0.1:0\"")
        .set("laneway.queue.path", &serde_json::to_string(&database).unwrap())
        .set("laneway.queue.durability", "crash");
    Service::start(Config::load(&layering).unwrap()).await.unwrap()
}

// ── the files of deploy ───────────────────────────────────────────────────────────────────────────────────────────────

const GRAFANA: &str = include_str!("../../../deploy/grafana/laneway.json");
const ALERTS: &str = include_str!("../../../deploy/prometheus/alerts.yml");

/// The names of metrics in an expression of Prometheus.
fn named(expression: &str) -> BTreeSet<String> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    expression
        .split(|character| !is_part(character))
        .filter(|word| word.starts_with("laneway_"))
        .map(str::to_owned)
        .collect()
}

fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field {
                    Value::String(text) if ["expr", "definition", "query"].contains(&name.as_str()) => {
                        found.push(text.clone())
                    }
                    other => expressions(other, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, found)),
        _ => {}
    }
}

async fn whole_text(service: &Service) -> String {
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let uri = format!("http://{}/metrics", service.http_address()).parse().unwrap();
    let bytes = client.get(uri).await.unwrap().into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

async fn metrics(service: &Service) -> BTreeSet<String> {
    let text = whole_text(service).await;
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.split(['{', ' ']).next().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn the_files_for_grafana_and_prometheus_name_only_metrics_that_exist() {
    let folder = tempfile::tempdir().unwrap();
    let service = start(&folder, "laneway.ingress { enabled = true, bind = \"127.0.0.1:0\" }").await;
    let there = metrics(&service).await;
    let board: Value = serde_json::from_str(GRAFANA).expect("JSON");
    let mut all = Vec::new();
    expressions(&board["panels"], &mut all);
    expressions(&board["templating"], &mut all);
    assert!(all.len() > 20, "{all:?}");
    let ids: Vec<_> =
        board["panels"].as_array().unwrap().iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "each panel has a number of its own");
    let rules: Value = serde_yaml_ng::from_str(ALERTS).expect("YAML");
    let rules = rules["groups"][0]["rules"].as_array().unwrap().clone();
    assert!(rules.len() > 8);
    let mut names = BTreeSet::new();
    for rule in &rules {
        assert!(names.insert(rule["alert"].as_str().expect("a name").to_owned()), "{rule}");
        assert!(
            rule["labels"]["severity"].is_string() && rule["annotations"]["summary"].is_string(),
            "{rule}"
        );
        all.push(rule["expr"].as_str().expect("an expression").to_owned());
    }
    for expression in &all {
        let balanced =
            |open: char, close: char| expression.matches(open).count() == expression.matches(close).count();
        assert!(balanced('(', ')') && balanced('{', '}') && balanced('[', ']'), "{expression}");
        // Those of flows are there where a database is: `flow_api.rs` looks for them.
        for name in named(expression).into_iter().filter(|name| !name.starts_with("laneway_flow_")) {
            assert!(there.contains(&name), "{name} of {expression} is not among the metrics");
        }
    }
    // And the other way round: no pool is left out of sight.
    let used: BTreeSet<String> = all.iter().flat_map(|expression| named(expression)).collect();
    assert!(used.len() > 25, "{used:?}");
    service.shutdown(Duration::ZERO).await;
}

/// What the documents ask for is listed in the glossary, with what it is called here: all of it is there, with a help text and a type.
#[tokio::test]
async fn every_counter_that_the_documents_name_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let config = "laneway { ingress { enabled = true, bind = \"127.0.0.1:0\" }, pools.DEFAULT-POOL { concurrency = 1, group-capacity = 2000 } }";
    let service = start(&folder, config).await;
    let glossary = include_str!("../../../GLOSSARY.md").split("## Metrics").nth(1).unwrap();
    let (there, asked_for) = (metrics(&service).await, named(glossary));
    assert!(asked_for.len() > 20, "{asked_for:?}");
    for name in &asked_for {
        let is_there = there.contains(name) || there.contains(&format!("{name}_bucket"));
        assert!(is_there, "{name} is not among the metrics");
    }
    // How many messages groups have, without the name of any.
    let queue = service.queue("default").unwrap();
    let sizes = [1_usize, 1, 7, 10, 11, 150, 1_500];
    for (group, size) in sizes.into_iter().enumerate() {
        let message = |number: usize| {
            let text = serde_json::json!({ "id": format!("{group}-{number}"), "poolCode": "DEFAULT-POOL", "messageGroupId": format!("g-{group}"),
                "mediationType": "SIMULATED", "mediationTarget": "3600s" });
            laneway_router::source::embedded::Publication::new(text.to_string()).group(format!("g-{group}"))
        };
        queue.publish_many((0..size).map(message).collect(), None).await.unwrap();
    }
    let all = sizes.iter().sum::<usize>();
    let here = async {
        while service.held() < all {
            tokio::time::sleep(Duration::from_millis(5)).await; // paced: between two looks
        }
    };
    tokio::time::timeout(Duration::from_secs(30), here).await.expect("all are in the pool");
    let text = whole_text(&service).await;
    for (up_to, groups) in [("1", 2), ("10", 4), ("100", 5), ("1000", 6), ("+Inf", 7)] {
        let line =
            format!("laneway_pool_groups_by_depth{{pool=\"DEFAULT-POOL\",up_to=\"{up_to}\"}} {groups}\n");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    assert!(
        text.contains(&format!(
            "laneway_dispatcher_depth_messages{{pool=\"DEFAULT-POOL\",dispatcher=\"part-0\"}} {}\n",
            all - 1
        )),
        "{text}"
    );
    assert!(!text.contains("g-3"), "no label is a group");
    service.shutdown(Duration::ZERO).await;
}

// ── spans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

#[cfg(feature = "otlp")]
mod spans {
    use super::*;

    use axum::http::{HeaderMap, StatusCode};
    use serde_json::json;
    use std::sync::{Arc, Mutex};
    use tokio::sync::mpsc;

    const DEADLINE: Duration = Duration::from_secs(20);

    async fn listen(routes: axum::Router) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        url
    }

    /// A collector: every span as it came. The first request is refused, as one that restarts would.
    async fn collector() -> (String, mpsc::UnboundedReceiver<Value>) {
        let (sender, spans) = mpsc::unbounded_channel();
        let refused = Arc::new(Mutex::new(false));
        let take = move |headers: HeaderMap, body: axum::Json<Value>| {
            let (sender, refused) = (sender.clone(), Arc::clone(&refused));
            async move {
                assert_eq!(headers["content-type"], "application/json");
                if !std::mem::replace(&mut *refused.lock().unwrap(), true) {
                    return StatusCode::SERVICE_UNAVAILABLE;
                }
                let resource = &body.0["resourceSpans"][0];
                let name = &resource["resource"]["attributes"][0];
                assert_eq!(
                    (&name["key"], &name["value"]["stringValue"]),
                    (&json!("service.name"), &json!("orders-router"))
                );
                for span in resource["scopeSpans"][0]["spans"].as_array().unwrap() {
                    sender.send(span.clone()).unwrap();
                }
                StatusCode::OK
            }
        };
        (listen(axum::Router::new().route("/v1/traces", axum::routing::post(take))).await, spans)
    }

    /// A target that fails the first attempt at each message, and tells what came with every call.
    async fn target() -> (String, mpsc::UnboundedReceiver<(String, String)>) {
        let (sender, calls) = mpsc::unbounded_channel();
        let answer = move |headers: HeaderMap| {
            let text = |name: &str| headers[name].to_str().unwrap().to_owned();
            sender.send((text("webhook-id"), text("traceparent"))).unwrap();
            let first = headers["laneway-attempt"] == "1";
            async move { if first { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::OK } }
        };
        (listen(axum::Router::new().route("/", axum::routing::post(answer))).await, calls)
    }

    fn attribute<'a>(span: &'a Value, name: &str) -> &'a str {
        let all = span["attributes"].as_array().unwrap().iter();
        let found = all.clone().find(|it| it["key"] == name).unwrap_or_else(|| panic!("no {name} in {span}"));
        found["value"]["stringValue"].as_str().unwrap()
    }

    fn time(span: &Value, name: &str) -> u64 {
        span[name].as_str().unwrap().parse().unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_spans_of_an_ordered_retry_are_a_tree_in_the_order_of_what_happened() {
        let (collector, mut spans) = collector().await;
        let (target, mut calls) = target().await;
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "laneway {{ telemetry {{ otlp-endpoint = \"{collector}\", service-name = orders-router }}, pools.DEFAULT-POOL {{ backoff = 50 ms, backoff-max = 50 ms }} }}"
        );
        let service = start(&folder, &config).await;
        let (trace, publisher) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        let queue = service.queue("default").unwrap();
        for id in ["first", "second"] {
            let message = json!({
                "id": id, "poolCode": "DEFAULT-POOL", "messageGroupId": "order-7", "mediationTarget": target,
                "headers": { "traceparent": format!("00-{trace}-{publisher}-01") },
            });
            let publication =
                laneway_router::source::embedded::Publication::new(message.to_string()).group("order-7");
            queue.publish(publication).await.unwrap();
        }
        // Per message: itself, two attempts, and a wait before each.
        let mut all = Vec::new();
        while all.len() < 10 {
            all.push(tokio::time::timeout(DEADLINE, spans.recv()).await.expect("a span in time").unwrap());
        }
        assert!(all.iter().all(|span| span["traceId"] == trace), "one trace, the publisher's");
        let ids: BTreeSet<_> = all.iter().map(|span| span["spanId"].as_str().unwrap()).collect();
        assert_eq!(ids.len(), 10);
        let mut passed_on: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for _ in 0..4 {
            let (id, traceparent) =
                tokio::time::timeout(DEADLINE, calls.recv()).await.expect("a call").unwrap();
            passed_on.entry(id).or_default().push(traceparent);
        }
        let mut ends = Vec::new();
        for id in ["first", "second"] {
            let is_it =
                |span: &&Value| span["name"] == "message" && attribute(span, "messaging.message.id") == id;
            let message = all.iter().find(is_it).expect("a span for the message");
            assert_eq!(message["parentSpanId"], publisher);
            assert_eq!(message["kind"], 5, "a consumer");
            assert_eq!(
                (attribute(message, "laneway.group"), attribute(message, "laneway.fate")),
                ("order-7", "delivered")
            );
            assert_eq!(attribute(message, "laneway.attempts"), "2");
            let mut parts: Vec<&Value> =
                all.iter().filter(|span| span["parentSpanId"] == message["spanId"]).collect();
            parts.sort_by_key(|span| time(span, "startTimeUnixNano"));
            let names: Vec<_> = parts.iter().map(|span| span["name"].as_str().unwrap()).collect();
            assert_eq!(names, ["wait", "attempt", "wait", "attempt"]);
            // Without a gap and without an overlap, from the arrival to the last answer.
            assert_eq!(time(parts[0], "startTimeUnixNano"), time(message, "startTimeUnixNano"));
            for pair in parts.windows(2) {
                assert_eq!(time(pair[0], "endTimeUnixNano"), time(pair[1], "startTimeUnixNano"));
            }
            assert!(time(message, "endTimeUnixNano") >= time(parts[3], "endTimeUnixNano"));
            let pause = time(parts[2], "endTimeUnixNano") - time(parts[2], "startTimeUnixNano");
            assert!(pause >= 45_000_000, "the backoff is a wait of {pause} ns");
            let (failed, done) = (parts[1], parts[3]);
            assert_eq!(
                (attribute(failed, "laneway.verdict"), attribute(done, "laneway.verdict")),
                ("again", "done")
            );
            assert_eq!((&failed["status"]["code"], &done["status"]), (&json!(2), &json!({})));
            assert!(failed["status"]["message"].as_str().unwrap().contains("500"), "{failed}");
            assert_eq!((&failed["kind"], &done["kind"]), (&json!(3), &json!(3)), "calls");
            // The target is below the attempt that called it.
            let told =
                [failed, done].map(|span| format!("00-{trace}-{}-01", span["spanId"].as_str().unwrap()));
            assert_eq!(passed_on[id], told);
            ends.push((time(parts[1], "startTimeUnixNano"), time(parts[3], "endTimeUnixNano")));
        }
        assert!(ends[1].0 >= ends[0].1, "the second waits for the retry of the first");
        assert!(service.exported_spans().1 == 0, "a collector that was away for a moment has lost nothing");
        service.shutdown(Duration::ZERO).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_collector_that_is_not_there_holds_up_nobody() {
        let (target, mut calls) = target().await;
        let folder = tempfile::tempdir().unwrap();
        let config = "laneway { telemetry.otlp-endpoint = \"http://127.0.0.1:9\", pools.DEFAULT-POOL { backoff = 1 ms, backoff-max = 1 ms } }";
        let service = start(&folder, config).await;
        let message = json!({ "id": "m", "poolCode": "DEFAULT-POOL", "mediationTarget": target });
        let queue = service.queue("default").unwrap();
        queue.publish(laneway_router::source::embedded::Publication::new(message.to_string())).await.unwrap();
        let mut parents = BTreeSet::new();
        for _ in 0..2 {
            let (_, traceparent) =
                tokio::time::timeout(DEADLINE, calls.recv()).await.expect("a call").unwrap();
            assert_eq!(traceparent.len(), 55, "a trace of our own: {traceparent}");
            parents.insert(traceparent);
        }
        assert_eq!(parents.len(), 2, "each attempt is a span of its own");
        service.shutdown(Duration::ZERO).await;
    }
}

/// The lines of the log, as a program would read them.
#[derive(Clone, Default)]
struct Lines(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// The first line with this text, once it is there.
    async fn first(&self, message: &str) -> Value {
        let started = std::time::Instant::now();
        loop {
            let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
            let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            if let Some(line) = lines.into_iter().find(|line| line["message"] == message) {
                return line;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "{message} is not in\n{text}");
            tokio::time::sleep(Duration::from_millis(10)).await; // paced: between two looks
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_has_the_same_ids_and_none_of_the_secrets() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber =
        tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_writer(move || writer.clone());
    tracing::subscriber::set_global_default(subscriber.json().flatten_event(true).finish()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let service = start(&folder, "laneway.pools.DEFAULT-POOL.attempts = 1").await;
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let message = serde_json::json!({
        "id": "m-7", "poolCode": "DEFAULT-POOL", "messageGroupId": "order-7", "authToken": "tell-nobody",
        "mediationTarget": format!("http://{}/api/test/server-error?key=tell-nobody", service.http_address()),
        "headers": { "traceparent": format!("00-{trace}-b7ad6b7169203331-01") },
    });
    let queue = service.queue("default").unwrap();
    let publication =
        laneway_router::source::embedded::Publication::new(message.to_string()).group("order-7");
    queue.publish(publication).await.unwrap();
    let failed = lines.first("an attempt failed").await;
    assert_eq!((&failed["trace_id"], &failed["group"]), (&trace.into(), &"order-7".into()), "{failed}");
    assert_eq!(
        (&failed["pool"], &failed["attempt"], &failed["level"]),
        (&"DEFAULT-POOL".into(), &1.into(), &"INFO".into())
    );
    // `message` is the text of the line, and the message's own id has the name of a span's attribute.
    assert_eq!(failed["message_id"], "m-7", "{failed}");
    let dead = lines.first("a message goes to the dead letters").await;
    assert_eq!((&dead["trace_id"], &dead["level"]), (&trace.into(), &"WARN".into()), "{dead}");
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let pause = format!("http://{}/api/pools/DEFAULT-POOL/pause", service.http_address());
    client.request(hyper::Request::post(pause).body(Full::default()).unwrap()).await.unwrap();
    let audit = lines.first("audit").await;
    assert_eq!(
        (&audit["who"], &audit["path"]),
        (&"loopback".into(), &"/api/pools/DEFAULT-POOL/pause".into()),
        "{audit}"
    );
    service.shutdown(Duration::ZERO).await;
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert!(!text.contains("tell-nobody"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_collector_the_traceparent_goes_to_the_target_as_it_came() {
    let (sender, mut calls) = tokio::sync::mpsc::unbounded_channel();
    let answer = move |headers: axum::http::HeaderMap| {
        sender.send(headers["traceparent"].to_str().unwrap().to_owned()).unwrap();
        async {}
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = format!("http://{}/", listener.local_addr().unwrap());
    let routes = axum::Router::new().route("/", axum::routing::post(answer));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let folder = tempfile::tempdir().unwrap();
    let service = start(&folder, "").await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03";
    let message = serde_json::json!({
        "id": "m", "poolCode": "DEFAULT-POOL", "mediationTarget": target, "headers": { "traceparent": parent },
    });
    let queue = service.queue("default").unwrap();
    queue.publish(laneway_router::source::embedded::Publication::new(message.to_string())).await.unwrap();
    let seen = tokio::time::timeout(Duration::from_secs(20), calls.recv()).await.expect("a call").unwrap();
    assert_eq!(seen, parent);
    service.shutdown(Duration::ZERO).await;
}
