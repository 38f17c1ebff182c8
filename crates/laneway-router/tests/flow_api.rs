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
    api.service.shutdown(Duration::from_secs(1)).await;
    drop(server);
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
    api.service.shutdown(Duration::from_secs(1)).await;
}
