//! `/api/flows`, `/api/runs`, `/api/flow-workers`, `/api/flow-queues`: flows on Postgres, for those who would rather not speak SQL.
//!
//! Every answer is a look at the database at this moment (`laneway_flow::look`), or a call of one of its functions. Where no database is configured
//! these routes are not there.

use std::time::Duration;

use axum::Json as Answer;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use laneway_flow::look::{self, LIST_MAX, RunFilter};
use laneway_flow::{Definition, FlowError, Start, client};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::PgPool;
use uuid::Uuid;

use super::input::{Json, Query};
use super::problem::Problem;
use super::route::Route;
use crate::service::Service;

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::get("/api/flows", flows, "All flows, with how many runs they have")
            .gives(200, "[FlowSummary]"),
        Route::get("/api/flows/{slug}", flow, "A flow with its steps").gives(200, "Flow"),
        Route::put("/api/flows/{slug}", define, "Makes a flow, or changes what can be changed")
            .takes("FlowDefinition")
            .gives(200, "FlowDefined"),
        Route::delete(
            "/api/flows/{slug}",
            delete_flow,
            "Deletes a flow with its steps, its runs and its queues",
        )
        .gives(200, "Changed"),
        Route::post("/api/flows/{slug}/cancel", cancel_flow, "Ends all runs of a flow that are not over")
            .gives(200, "RunsChanged"),
        Route::post(
            "/api/flows/{slug}/retry",
            retry_flow,
            "Lets all failed runs of a flow go on where they stopped",
        )
        .gives(200, "RunsChanged"),
        Route::post("/api/flows/{slug}/runs", start, "Starts a run")
            .takes("RunStart")
            .gives(201, "RunStarted"),
        Route::get("/api/runs", runs, "Runs, the newest first")
            .query("flow", "string", "Of this flow")
            .query("status", "string", "In this status")
            .query("key", "string", "Of this key")
            .query("limit", "integer", "How many; 100, and at most 1000")
            .gives(200, "[RunSummary]"),
        Route::post("/api/runs/prune", prune, "Deletes runs that ended long ago")
            .takes("Prune")
            .gives(200, "RunsChanged"),
        Route::get("/api/runs/{id}", run, "A run with its steps").gives(200, "Run"),
        Route::delete("/api/runs/{id}", delete, "Deletes a run and all that is known of it")
            .gives(200, "Changed"),
        Route::get("/api/runs/{id}/output", output, "The output of a run, or of one of its steps, whole")
            .query("step", "string", "Of this step")
            .gives(200, "RunOutput"),
        Route::get("/api/runs/{id}/tasks", tasks, "The tasks of a run")
            .query("step", "string", "Of this step")
            .query("limit", "integer", "How many; 100, and at most 1000")
            .gives(200, "[Task]"),
        Route::post("/api/runs/{id}/cancel", cancel, "Ends a run").takes("RunCancel").gives(200, "Changed"),
        Route::post("/api/runs/{id}/retry", retry, "Lets a failed or cancelled run go on where it stopped")
            .gives(200, "Changed"),
        Route::post("/api/runs/{id}/steps/{step}/complete", complete, "Completes a task by hand")
            .takes("TaskCompletion")
            .gives(200, "Changed"),
        Route::post("/api/runs/{id}/steps/{step}/fail", fail, "Fails a task by hand")
            .takes("TaskFailure")
            .gives(200, "Changed"),
        Route::get("/api/flow-workers", workers, "The workers of flows").gives(200, "[FlowWorker]"),
        Route::get("/api/flow-queues", queues, "The queues that flows use").gives(200, "[FlowQueue]"),
    ]
}

fn run_id(text: &str) -> Result<Uuid, Problem> {
    text.parse().map_err(|_| Problem::bad_request(format!("{text:?} is no id of a run")))
}

type Looked = Result<Answer<Value>, Problem>;

fn database(service: &Service) -> Result<&PgPool, Problem> {
    service.flows().ok_or_else(|| Problem::not_found("no database for flows is configured"))
}

impl From<FlowError> for Problem {
    fn from(error: FlowError) -> Self {
        let words = error.to_string();
        match error {
            FlowError::Unknown(_) => Problem::not_found(words),
            FlowError::TooLarge(_) => Problem::new(StatusCode::PAYLOAD_TOO_LARGE, words),
            FlowError::Conflict(_) | FlowError::Shape(_) | FlowError::QueueMissing(_) => {
                Problem::conflict(words)
            }
            FlowError::Invalid(_) => Problem::unprocessable(words),
            FlowError::Unavailable(_) => Problem::new(StatusCode::SERVICE_UNAVAILABLE, words),
            _ => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, words),
        }
    }
}

fn list(rows: Result<Vec<Value>, FlowError>) -> Looked {
    Ok(Answer(Value::Array(rows?)))
}

fn changed(changed: Result<bool, FlowError>) -> Looked {
    Ok(Answer(json!({ "changed": changed? })))
}

async fn flows(State(service): State<Service>) -> Looked {
    list(look::flows(database(&service)?).await)
}

/// A definition as the command line reads it from a file; the path says what it is called.
async fn define(State(service): State<Service>, Path(slug): Path<String>, Json(body): Json<Value>) -> Looked {
    let Value::Object(mut fields) = body else {
        return Err(Problem::unprocessable("a definition of a flow is an object"));
    };
    let named = fields.entry("slug").or_insert_with(|| json!(slug));
    if *named != json!(slug) {
        return Err(Problem::unprocessable(format!(
            "the definition is of {named}, and the path of {slug:?}"
        )));
    }
    let definition = Definition::from_json(&Value::Object(fields).to_string());
    let definition = definition.map_err(|error| Problem::unprocessable(error.to_string()))?;
    let status = client::compile(database(&service)?, &definition, false).await?;
    Ok(Answer(json!({ "status": status, "queues": definition.queues() })))
}

async fn delete_flow(State(service): State<Service>, Path(slug): Path<String>) -> Looked {
    changed(client::delete_flow(database(&service)?, &slug).await.map(|()| true))
}

async fn cancel_flow(State(service): State<Service>, Path(slug): Path<String>) -> Looked {
    runs_changed(client::cancel_flow(database(&service)?, &slug).await)
}

async fn retry_flow(State(service): State<Service>, Path(slug): Path<String>) -> Looked {
    runs_changed(client::retry_flow(database(&service)?, &slug).await)
}

fn runs_changed(runs: Result<u64, FlowError>) -> Looked {
    Ok(Answer(json!({ "runs": runs? })))
}

async fn flow(State(service): State<Service>, Path(slug): Path<String>) -> Looked {
    Ok(Answer(look::flow(database(&service)?, &slug).await?))
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RunStart {
    #[serde(default)]
    input: Option<Value>,
    idempotency_key: Option<String>,
    key: Option<String>,
    run_id: Option<String>,
}

async fn start(
    State(service): State<Service>,
    Path(slug): Path<String>,
    Json(body): Json<RunStart>,
) -> Result<(StatusCode, Answer<Value>), Problem> {
    let mut start = Start::named(&slug, body.input.unwrap_or_else(|| json!({})));
    if let Some(text) = body.idempotency_key {
        start = start.idempotency_key(text);
    }
    if let Some(text) = body.key {
        start = start.key(text);
    }
    if let Some(id) = body.run_id {
        start = start.run_id(run_id(&id)?);
    }
    let run = start.on(database(&service)?).await?;
    Ok((StatusCode::CREATED, Answer(json!({ "runId": run.to_string() }))))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    flow: Option<String>,
    status: Option<String>,
    key: Option<String>,
    limit: Option<u32>,
}

async fn runs(State(service): State<Service>, Query(which): Query<Which>) -> Looked {
    let Which { flow, status, key, limit } = which;
    list(look::runs(database(&service)?, &RunFilter { flow, status, key, limit }).await)
}

async fn run(State(service): State<Service>, Path(id): Path<String>) -> Looked {
    Ok(Answer(look::run(database(&service)?, run_id(&id)?).await?))
}

async fn delete(State(service): State<Service>, Path(id): Path<String>) -> Looked {
    changed(client::delete(database(&service)?, run_id(&id)?).await)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneStep {
    step: Option<String>,
}

async fn output(State(service): State<Service>, Path(id): Path<String>, Query(of): Query<OneStep>) -> Looked {
    let output = look::output(database(&service)?, run_id(&id)?, of.step.as_deref()).await?;
    Ok(Answer(json!({ "completed": output.is_some(), "output": output })))
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Prune {
    older_than_seconds: Option<u32>,
    flow: Option<String>,
}

/// One piece in a call, so that nothing is locked for long: 0 means that there is nothing left.
async fn prune(State(service): State<Service>, Json(body): Json<Prune>) -> Looked {
    // No body is no wish to delete everything.
    let seconds = body.older_than_seconds;
    let seconds =
        seconds.ok_or_else(|| Problem::unprocessable("olderThanSeconds is missing: how long ago?"))?;
    let older = Duration::from_secs(seconds.into());
    let deleted = client::prune(database(&service)?, older, body.flow.as_deref()).await;
    runs_changed(deleted.map(|deleted| u64::try_from(deleted).unwrap_or(0)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfStep {
    step: Option<String>,
    limit: Option<u32>,
}

async fn tasks(State(service): State<Service>, Path(id): Path<String>, Query(of): Query<OfStep>) -> Looked {
    let limit = of.limit.map(|limit| limit.min(LIST_MAX));
    list(look::tasks(database(&service)?, run_id(&id)?, of.step.as_deref(), limit).await)
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunCancel {
    reason: Option<String>,
}

async fn cancel(
    State(service): State<Service>,
    Path(id): Path<String>,
    Json(body): Json<RunCancel>,
) -> Looked {
    changed(client::cancel(database(&service)?, run_id(&id)?, body.reason.as_deref()).await)
}

async fn retry(State(service): State<Service>, Path(id): Path<String>) -> Looked {
    changed(client::retry(database(&service)?, run_id(&id)?).await)
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskCompletion {
    #[serde(default)]
    output: Value,
    #[serde(default)]
    index: i32,
}

async fn complete(
    State(service): State<Service>,
    Path((id, step)): Path<(String, String)>,
    Json(body): Json<TaskCompletion>,
) -> Looked {
    changed(client::complete(database(&service)?, run_id(&id)?, &step, body.index, &body.output).await)
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskFailure {
    error: String,
    #[serde(default)]
    index: i32,
}

async fn fail(
    State(service): State<Service>,
    Path((id, step)): Path<(String, String)>,
    Json(body): Json<TaskFailure>,
) -> Looked {
    changed(client::fail(database(&service)?, run_id(&id)?, &step, body.index, &body.error).await)
}

async fn workers(State(service): State<Service>) -> Looked {
    list(look::workers(database(&service)?).await)
}

async fn queues(State(service): State<Service>) -> Looked {
    list(look::queues(database(&service)?).await)
}
