//! Flows over HTTP: a real service on a real Postgres. Every route is called, and answers as it is described.

use std::collections::HashMap;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::client::legacy::{Client as Hyper, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use laneway_flow::{Action, Definition, Worker, client};
use laneway_router::config::{Config, Layering};
use laneway_router::service::Service;
use laneway_servers::postgres;
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;

struct Api {
    service: Service,
    client: Hyper<HttpConnector, Full<Bytes>>,
    document: Value,
}

impl Api {
    /// The answer, which must have this status and the shape that the description gives it.
    async fn call(&self, method: &str, path: &str, body: Option<Value>, status: u16) -> Value {
        let uri = format!("http://{}{path}", self.service.http_address());
        let mut request = Request::builder().method(method).uri(uri);
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let response = self.client.request(request.body(Full::from(body)).unwrap()).await.unwrap();
        let answered = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let answer: Value = serde_json::from_slice(&bytes).expect("JSON");
        assert_eq!(answered, status, "{method} {path}: {answer}");
        if status < 300 && path != "/openapi.json" {
            let template = self.template(path);
            let described =
                &self.document["paths"][&template][method.to_lowercase()]["responses"][status.to_string()];
            let schema = &described["content"]["application/json"]["schema"];
            assert!(schema.is_object(), "{method} {template} does not describe {status}");
            self.check(&answer, schema, path);
        }
        answer
    }

    /// The path as the description writes it.
    fn template(&self, path: &str) -> String {
        let path: Vec<&str> = path.split('?').next().unwrap().split('/').collect();
        let fits = |template: &str| {
            let parts: Vec<&str> = template.split('/').collect();
            parts.len() == path.len()
                && parts.iter().zip(&path).all(|(part, word)| part.starts_with('{') || part == word)
        };
        let paths = self.document["paths"].as_object().unwrap();
        paths
            .keys()
            .find(|template| fits(template))
            .unwrap_or_else(|| panic!("{path:?} is not described"))
            .clone()
    }

    /// That no object has a field that is not described, and none is without one that is required.
    fn check(&self, value: &Value, schema: &Value, at: &str) {
        if let Some(name) = schema["$ref"].as_str() {
            let name = name.rsplit('/').next().unwrap();
            return self.check(value, &self.document["components"]["schemas"][name], at);
        }
        for item in value.as_array().into_iter().flatten().filter(|_| schema["items"].is_object()) {
            self.check(item, &schema["items"], at);
        }
        let Some(properties) = schema["properties"].as_object() else { return };
        let fields = value.as_object().unwrap_or_else(|| panic!("{at} is no object: {value}"));
        for name in schema["required"].as_array().into_iter().flatten() {
            assert!(fields.contains_key(name.as_str().unwrap()), "{at} has no {name}");
        }
        for (name, field) in fields {
            let known =
                properties.get(name).unwrap_or_else(|| panic!("{at} has {name}, which is not described"));
            self.check(field, known, &format!("{at}.{name}"));
        }
    }
}

async fn start(database: &str) -> (Api, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let layering = Layering::default()
        .set("laneway.http.bind", "\"127.0.0.1:0\"")
        .set("laneway.queue.path", &json!(folder.path().join("queue.db")).to_string())
        .set("laneway.flow.database", &json!(database).to_string());
    let service = Service::start(Config::load(&layering).unwrap()).await.unwrap();
    let client = Hyper::builder(TokioExecutor::new()).build(HttpConnector::new());
    let mut api = Api { service, client, document: Value::Null };
    api.document = api.call("GET", "/openapi.json", None, 200).await;
    (api, folder)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_of_flows_answers_as_it_is_described() {
    let server = tokio::task::spawn_blocking(postgres::start).await.unwrap().expect("Postgres starts");
    let pool = PgPoolOptions::new().max_connections(8).connect(&postgres::url(&server)).await.unwrap();
    laneway_flow::migrate(&pool).await.unwrap();
    let text = r#"{"slug":"api_flow","steps":[{"slug":"work","maxAttempts":1},{"slug":"sign","dependsOn":["work"],"queue":false}]}"#;
    let work = Action::plain(|task| async move { Ok(task.flow_input.clone().unwrap()) });
    let worker = Worker::on(&pool)
        .serve_data(Definition::from_json(text).unwrap(), HashMap::from([("work".to_owned(), work)]));
    let worker = worker.start().await.unwrap();
    let (api, _folder) = start(&postgres::url(&server)).await;
    // Not by its metrics: what they say of the database is kept for a while.
    let listens = "SELECT count(*) FROM pg_stat_activity WHERE query ILIKE 'LISTEN%pgflow_event%'";
    let hears = async {
        while sqlx::query_scalar::<_, i64>(listens).fetch_one(&pool).await.unwrap() == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await; // paced: the connection that listens is opened beside the service's start
        }
    };
    tokio::time::timeout(Duration::from_secs(60), hears).await.expect("the service listens");

    let flows = api.call("GET", "/api/flows", None, 200).await;
    assert_eq!((&flows[0]["slug"], &flows[0]["queues"]), (&json!("api_flow"), &json!(["api_flow"])));
    let flow = api.call("GET", "/api/flows/api_flow", None, 200).await;
    assert_eq!(flow["steps"][1]["manual"], true);
    let missing = api.call("GET", "/api/flows/nowhere", None, 404).await;
    assert!(missing["detail"].as_str().unwrap().contains("there are api_flow"), "{missing}");

    let body = json!({"input": {"n": 1}, "idempotencyKey": "once"});
    let run = api.call("POST", "/api/flows/api_flow/runs", Some(body.clone()), 201).await["runId"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(api.call("POST", "/api/flows/api_flow/runs", Some(body), 201).await["runId"], json!(run));
    let other = json!({"input": {"n": 2}, "idempotencyKey": "once"});
    api.call("POST", "/api/flows/api_flow/runs", Some(other), 409).await;
    let id = run.parse().unwrap();
    let signed = async {
        let mut watch = client::Watch::new(&pool, id).await.unwrap();
        while client::run(&pool, id).await.unwrap().step_status("sign") != Some("started") {
            watch.changed(tokio::time::Instant::now() + Duration::from_secs(1)).await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(60), signed).await.expect("the manual step is reached");
    let tasks = api.call("GET", &format!("/api/runs/{run}/tasks?step=work"), None, 200).await;
    assert_eq!((&tasks[0]["status"], &tasks[0]["output"]), (&json!("completed"), &json!({"n": 1})));
    let path = format!("/api/runs/{run}/steps/sign/complete");
    assert_eq!(api.call("POST", &path, Some(json!({"output": "me"})), 200).await["changed"], true);
    assert_eq!(api.call("POST", &path, Some(json!({"output": "me"})), 200).await["changed"], false);
    let look = api.call("GET", &format!("/api/runs/{run}"), None, 200).await;
    assert_eq!((&look["status"], &look["output"]), (&json!("completed"), &json!({"sign": "me"})));
    assert_eq!(look["steps"][1]["tasks"]["completed"], 1);

    let second =
        api.call("POST", "/api/flows/api_flow/runs", None, 201).await["runId"].as_str().unwrap().to_owned();
    assert_eq!(
        api.call("POST", &format!("/api/runs/{second}/cancel"), Some(json!({"reason": "no"})), 200).await["changed"],
        true
    );
    assert_eq!(api.call("POST", &format!("/api/runs/{second}/retry"), None, 200).await["changed"], true);
    let id = second.parse().unwrap();
    let waits = async {
        let mut watch = client::Watch::new(&pool, id).await.unwrap();
        while client::run(&pool, id).await.unwrap().step_status("sign") != Some("started") {
            watch.changed(tokio::time::Instant::now() + Duration::from_secs(1)).await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waits).await.expect("the retried run goes on");
    let failed = api
        .call("POST", &format!("/api/runs/{second}/steps/sign/fail"), Some(json!({"error": "never"})), 200)
        .await;
    assert_eq!(failed["changed"], true);
    let runs = api.call("GET", "/api/runs?flow=api_flow&status=failed&limit=5", None, 200).await;
    assert_eq!((runs.as_array().unwrap().len(), &runs[0]["runId"]), (1, &json!(second)));
    let workers = api.call("GET", "/api/flow-workers", None, 200).await;
    assert_eq!((&workers[0]["alive"], &workers[0]["queues"]), (&json!(true), &json!(["api_flow"])));
    let queues = api.call("GET", "/api/flow-queues", None, 200).await;
    assert_eq!((&queues[0]["queue"], &queues[0]["waiting"]), (&json!("api_flow"), &json!(0)));
    api.call("GET", "/api/runs/00000000-0000-0000-0000-000000000000", None, 404).await;
    whole_flows(&api).await;

    worker.stop().await;
    metrics_of_flows(&api).await;
    api.service.shutdown(Duration::from_secs(1)).await;
    drop(server);
}

/// Every sample of `/metrics`, by its name with its labels.
async fn samples(api: &Api) -> HashMap<String, f64> {
    let uri = format!("http://{}/metrics", api.service.http_address()).parse().unwrap();
    let bytes = api.client.get(uri).await.unwrap().into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let samples = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
    });
    samples.collect()
}

/// After the two runs of `api_flow`, one of which was cancelled, retried, and failed by hand, and the three of `whole`, which is gone. Its worker has stopped, and told
/// what it counted.
async fn metrics_of_flows(api: &Api) {
    let heard_last = r#"laneway_flow_runs_total{flow="whole",state="cancelled"}"#;
    let all_heard = async {
        while samples(api).await.get(heard_last) != Some(&2.0) {
            tokio::time::sleep(Duration::from_millis(20)).await; // paced: announcements come on another connection
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all_heard).await.expect("all is heard");
    let there = samples(api).await;
    let value = |name: &str| *there.get(name).unwrap_or_else(|| panic!("no {name} among {there:#?}"));
    for (state, count) in [("started", 3.0), ("completed", 1.0), ("failed", 1.0), ("cancelled", 1.0)] {
        assert_eq!(
            value(&format!(r#"laneway_flow_runs_total{{flow="api_flow",state="{state}"}}"#)),
            count,
            "{state}"
        );
    }
    assert_eq!(value(r#"laneway_flow_steps_total{flow="api_flow",state="failed"}"#), 1.0);
    assert_eq!(value(r#"laneway_flow_runs{flow="api_flow",state="started"}"#), 0.0);
    let tasks = |outcome: &str| {
        value(&format!(r#"laneway_flow_tasks_total{{queue="api_flow",outcome="{outcome}"}}"#))
    };
    // The task of the cancelled run was done or lost, as the cancellation met it.
    assert!(tasks("completed") >= 2.0 && tasks("taken") == tasks("completed") + tasks("lost"), "{there:#?}");
    assert_eq!(tasks("failed") + tasks("retried"), 0.0);
    assert!(value(r#"laneway_flow_polls_total{queue="api_flow"}"#) >= 1.0);
    assert_eq!(value(r#"laneway_flow_handler_seconds_count{queue="api_flow"}"#), tasks("taken"));
    assert_eq!(value(r#"laneway_flow_handler_seconds_bucket{queue="api_flow",le="+Inf"}"#), tasks("taken"));
    assert_eq!((value("laneway_flow_up"), value("laneway_flow_listening")), (1.0, 1.0));
    assert_eq!(
        (value("laneway_flow_workers"), value(r#"laneway_flow_queue_workers{queue="api_flow"}"#)),
        (0.0, 0.0)
    );
    // What the board and the alerts name is there.
    let names: std::collections::HashSet<&str> =
        there.keys().map(|name| name.split('{').next().unwrap()).collect();
    let (board, alerts) = (
        include_str!("../../../deploy/grafana/laneway.json"),
        include_str!("../../../deploy/prometheus/alerts.yml"),
    );
    let mut used = 0;
    for file in [board, alerts] {
        let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
        for name in
            file.split(|character| !is_part(character)).filter(|word| word.starts_with("laneway_flow_"))
        {
            assert!(names.contains(name), "{name}");
            used += 1;
        }
    }
    assert!(used > 10);
}

/// Defined, cancelled, retried, pruned, deleted.
async fn whole_flows(api: &Api) {
    let definition = json!({"steps": [{"slug": "sign", "queue": false}]});
    let defined = api.call("PUT", "/api/flows/whole", Some(definition.clone()), 200).await;
    assert_eq!((&defined["status"], &defined["queues"]), (&json!("compiled"), &json!(["whole"])));
    assert_eq!(api.call("PUT", "/api/flows/whole", Some(definition), 200).await["status"], "verified");
    let circle = json!({"steps": [{"slug": "a", "dependsOn": ["b"]}, {"slug": "b", "dependsOn": ["a"]}]});
    api.call("PUT", "/api/flows/whole", Some(circle), 422).await;
    api.call("PUT", "/api/flows/whole", Some(json!({"slug": "other", "steps": [{"slug": "a"}]})), 422).await;
    api.call("PUT", "/api/flows/whole", Some(json!({"steps": [{"slug": "a"}]})), 409).await;
    let mut runs = Vec::new();
    for _ in 0..3 {
        let run =
            api.call("POST", "/api/flows/whole/runs", None, 201).await["runId"].as_str().unwrap().to_owned();
        runs.push(run);
    }
    api.call("POST", &format!("/api/runs/{}/steps/sign/fail", runs[0]), Some(json!({"error": "no"})), 200)
        .await;
    assert_eq!(api.call("POST", "/api/flows/whole/retry", None, 200).await["runs"], 1);
    let done = api.call("GET", &format!("/api/runs/{}/output", runs[1]), None, 200).await;
    assert_eq!(done, json!({"completed": false, "output": null}));
    let large = json!("x".repeat(100_000));
    api.call(
        "POST",
        &format!("/api/runs/{}/steps/sign/complete", runs[1]),
        Some(json!({"output": large})),
        200,
    )
    .await;
    let look = api.call("GET", &format!("/api/runs/{}", runs[1]), None, 200).await;
    assert_eq!(
        (&look["output"], &look["steps"][0]["output"]),
        (&json!(null), &json!(null)),
        "too large for a look"
    );
    let whole = api.call("GET", &format!("/api/runs/{}/output?step=sign", runs[1]), None, 200).await;
    assert_eq!(whole, json!({"completed": true, "output": large}));
    assert_eq!(api.call("POST", "/api/flows/whole/cancel", None, 200).await["runs"], 2);
    let one = format!("/api/runs/{}", runs[0]);
    assert_eq!(api.call("DELETE", &one, None, 200).await["changed"], true);
    assert_eq!(api.call("DELETE", &one, None, 200).await["changed"], false);
    api.call("POST", "/api/runs/prune", None, 422).await;
    let old = json!({"olderThanSeconds": 0, "flow": "whole"});
    assert_eq!(api.call("POST", "/api/runs/prune", Some(old.clone()), 200).await["runs"], 2);
    assert_eq!(api.call("POST", "/api/runs/prune", Some(old), 200).await["runs"], 0);
    assert_eq!(api.call("DELETE", "/api/flows/whole", None, 200).await["changed"], true);
    api.call("DELETE", "/api/flows/whole", None, 404).await;
    api.call("POST", "/api/flows/whole/cancel", None, 404).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_away_is_said_to_be_and_the_service_goes_on() {
    let (api, _folder) = start("postgres://nobody@127.0.0.1:1/none").await;
    let answer = api.call("GET", "/api/flows", None, 503).await;
    assert!(answer["detail"].as_str().unwrap().contains("not available"), "{answer}");
    api.call("GET", "/health/live", None, 200).await;
    let there = samples(&api).await;
    assert_eq!((there["laneway_flow_up"], there["laneway_flow_listening"]), (0.0, 0.0));
    assert!(!there.keys().any(|name| name.starts_with("laneway_flow_tasks")), "nothing is made up");
    api.service.shutdown(Duration::from_secs(1)).await;
}
