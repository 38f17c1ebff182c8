//! Who starts runs and looks at them: programs, the command line, the HTTP API.
//!
//! Starting takes any executor of sqlx, so that it can be part of the caller's transaction: the run is there if and only if that commits.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sqlx::postgres::PgListener;
use sqlx::types::Json;
use sqlx::{PgExecutor, PgPool, Row};
use tokio::time::Instant;
use uuid::Uuid;

use crate::definition::Definition;
use crate::error::FlowError;
use crate::flow::Flow;
use crate::store::EVENT_CHANNEL;

/// A run that is about to be started.
///
/// ```no_run
/// # use laneway_flow::{Flow, FlowError, OwnQueue, Start, Steps};
/// # struct Billing;
/// # impl Flow for Billing {
/// #     const SLUG: &'static str = "billing";
/// #     type Input = i64;
/// #     type Queues = (OwnQueue,);
/// #     fn steps(&self, _: &mut Steps<Self>) {}
/// # }
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut transaction = pool.begin().await?;
/// sqlx::query("INSERT INTO orders (cents) VALUES (1200)").execute(&mut *transaction).await?;
/// // The run exists if and only if the order does; and only once, however often this program is repeated.
/// let run_id = Start::of::<Billing>(&1200)?.idempotency_key("order-7").on(&mut *transaction).await?;
/// transaction.commit().await?;
/// # let _ = run_id;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a run is started by `on`"]
pub struct Start {
    flow: String,
    input: Value,
    run_id: Option<Uuid>,
    idempotency_key: Option<String>,
    key: Option<String>,
}

impl Start {
    /// A run of this flow. Its input has the flow's type.
    pub fn of<F: Flow>(input: &F::Input) -> Result<Self, FlowError> {
        let input = serde_json::to_value(input);
        let input = input.map_err(|error| FlowError::Invalid(format!("the input is no JSON: {error}")))?;
        Ok(Self::named(F::SLUG, input))
    }

    /// A run of a flow that is known by its name.
    pub fn named(flow: &str, input: Value) -> Self {
        Self { flow: flow.to_owned(), input, run_id: None, idempotency_key: None, key: None }
    }

    /// The id that the run gets, instead of one of the database's.
    pub fn run_id(mut self, id: Uuid) -> Self {
        self.run_id = Some(id);
        self
    }

    /// A text by which a repetition is known: the run that was started first is the answer to all that have it.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// What puts the run in a row with others, instead of what the flow's [`KEY`](Flow::KEY) finds in the input.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Starts it: on a pool, or inside a transaction. The answer is the run's id.
    pub async fn on(self, executor: impl PgExecutor<'_>) -> Result<Uuid, FlowError> {
        let row = sqlx::query("SELECT run_id FROM pgflow.start_flow($1, $2, $3, $4, $5)")
            .bind(self.flow)
            .bind(Json(self.input))
            .bind(self.run_id)
            .bind(self.idempotency_key)
            .bind(self.key)
            .fetch_one(executor)
            .await?;
        Ok(row.try_get(0)?)
    }
}

/// Starts many runs of one flow at once, in the order of the inputs.
pub async fn start_many<T: Serialize>(
    executor: impl PgExecutor<'_>,
    flow: &str,
    inputs: &[T],
) -> Result<Vec<Uuid>, FlowError> {
    let inputs: Vec<Json<&T>> = inputs.iter().map(Json).collect();
    let rows = sqlx::query("SELECT * FROM pgflow.start_flows($1, $2)").bind(flow).bind(inputs);
    rows.fetch_all(executor).await?.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// How a definition compares with what the database has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The database does not know the flow.
    Missing,
    /// The same.
    Same,
    /// Only what can be changed under running runs.
    Compatible(Vec<String>),
    /// Another graph: runs of one would not fit the other.
    Different(Vec<String>),
}

/// Compares a definition with the database, and changes nothing.
pub async fn compare(executor: impl PgExecutor<'_>, flow: &Definition) -> Result<Verdict, FlowError> {
    let row = sqlx::query("SELECT pgflow.compare_flow_shape($1, $2)")
        .bind(&flow.slug)
        .bind(Json(flow.shape()))
        .fetch_one(executor)
        .await?;
    let Json(answer): Json<Value> = row.try_get(0)?;
    let differences = texts(&answer["differences"]);
    Ok(match answer["verdict"].as_str() {
        Some("same") => Verdict::Same,
        Some("compatible") => Verdict::Compatible(differences),
        Some("different") => Verdict::Different(differences),
        _ => Verdict::Missing,
    })
}

/// Brings the database's flow to this definition: makes it, leaves it, or changes what can be changed. A change that would lose data is
/// refused with what differs, unless `allow_data_loss` is given.
pub async fn compile(
    executor: impl PgExecutor<'_>,
    flow: &Definition,
    allow_data_loss: bool,
) -> Result<String, FlowError> {
    flow.check().map_err(|error| FlowError::Shape(error.to_string()))?;
    let row = sqlx::query("SELECT pgflow.ensure_flow_compiled($1, $2, $3)")
        .bind(&flow.slug)
        .bind(Json(flow.shape()))
        .bind(allow_data_loss)
        .fetch_one(executor)
        .await?;
    let Json(answer): Json<Value> = row.try_get(0)?;
    let status = answer["status"].as_str().unwrap_or_default().to_owned();
    if status == "mismatch" {
        let differences = texts(&answer["differences"]).join("\n  ");
        return Err(FlowError::Shape(format!(
            "the flow {:?} of this program is not the one that the database has:\n  {differences}\n\
             give it another slug, or delete the flow and its runs",
            flow.slug
        )));
    }
    Ok(status)
}

fn texts(list: &Value) -> Vec<String> {
    let texts = list.as_array().into_iter().flatten();
    texts.map(|text| text.as_str().map_or_else(|| text.to_string(), str::to_owned)).collect()
}

/// A run and its steps, as the database has them.
#[derive(Clone, Debug, PartialEq)]
pub struct RunState {
    json: Value,
}

impl RunState {
    /// All of it.
    pub fn json(&self) -> &Value {
        &self.json
    }

    /// `waiting`, `started`, `completed`, `failed` or `cancelled`.
    pub fn status(&self) -> &str {
        self.json["run"]["status"].as_str().unwrap_or_default()
    }

    /// Whether nothing will happen any more.
    pub fn is_over(&self) -> bool {
        matches!(self.status(), "completed" | "failed" | "cancelled")
    }

    /// The status of a step, if the run has it.
    pub fn step_status(&self, slug: &str) -> Option<&str> {
        self.step(slug)?["status"].as_str()
    }

    /// The row of a step.
    pub fn step(&self, slug: &str) -> Option<&Value> {
        self.json["steps"].as_array()?.iter().find(|step| step["step_slug"] == slug)
    }

    /// The output of a completed run: those of the steps on which nothing depends, by their names.
    pub fn output(&self) -> &Value {
        &self.json["run"]["output"]
    }

    /// The output of one of the last steps, as a type.
    pub fn output_of<T: DeserializeOwned>(&self, step: &str) -> Option<T> {
        serde_json::from_value(self.output().get(step)?.clone()).ok()
    }
}

/// Looks at a run.
pub async fn run(executor: impl PgExecutor<'_>, run_id: Uuid) -> Result<RunState, FlowError> {
    let row = sqlx::query("SELECT pgflow.get_run_with_states($1)").bind(run_id).fetch_one(executor).await?;
    match row.try_get::<Option<Json<Value>>, _>(0)? {
        Some(Json(json)) if !json["run"].is_null() => Ok(RunState { json }),
        _ => Err(FlowError::Unknown(format!("there is no run {run_id}"))),
    }
}

/// Waits until a run is over, or until the limit; the answer is how it stands then. Costs a look at each of its events, not a poll.
pub async fn wait(pool: &PgPool, run_id: Uuid, limit: Duration) -> Result<RunState, FlowError> {
    let deadline = Instant::now() + limit;
    let mut watch = Watch::new(pool, run_id).await?;
    loop {
        let state = run(pool, run_id).await?;
        if state.is_over() || Instant::now() >= deadline {
            return Ok(state);
        }
        watch.changed(deadline).await?;
    }
}

/// Tells when something has changed in a run.
#[derive(Debug)]
pub struct Watch {
    listener: PgListener,
    run_id: String,
}

/// An announcement that was lost with its connection must not be waited for for ever.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl Watch {
    /// Listens from now on.
    pub async fn new(pool: &PgPool, run_id: Uuid) -> Result<Self, FlowError> {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen(EVENT_CHANNEL).await?;
        Ok(Self { listener, run_id: run_id.to_string() })
    }

    /// Waits for the next change, for a second at the most and not past the deadline.
    pub async fn changed(&mut self, deadline: Instant) -> Result<(), FlowError> {
        let until = deadline.min(Instant::now() + LOOK_AGAIN);
        while let Ok(event) = tokio::time::timeout_at(until, self.listener.recv()).await {
            if event?.payload().contains(&self.run_id) {
                break;
            }
        }
        Ok(())
    }
}

/// Something that happened to a run or a step.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Event {
    /// What: `run:` or `step:`, and the state that it has come to.
    #[serde(rename = "event_type")]
    pub kind: String,
    /// Of which flow.
    #[serde(rename = "flow_slug")]
    pub flow: String,
}

/// Hears of everything that happens to runs and steps, of all flows.
#[derive(Debug)]
pub struct Events(PgListener);

impl Events {
    /// Listens from now on. It takes one connection of the pool for as long as it is kept.
    pub async fn listen(pool: &PgPool) -> Result<Self, FlowError> {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen(EVENT_CHANNEL).await?;
        Ok(Self(listener))
    }

    /// Waits for the next one. Nothing if the connection was lost, and with it whatever was announced meanwhile.
    pub async fn next(&mut self) -> Result<Option<Event>, FlowError> {
        while let Some(heard) = self.0.try_recv().await? {
            // What others announce on the same channel is theirs.
            if let Ok(event) = serde_json::from_str(heard.payload()) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }
}

/// Completes a task by hand: of a manual step, or any that is started. False if it was over already.
pub async fn complete(
    executor: impl PgExecutor<'_>,
    run_id: Uuid,
    step: &str,
    index: i32,
    output: &Value,
) -> Result<bool, FlowError> {
    let call = sqlx::query("SELECT 1 FROM pgflow.complete_task($1, $2, $3, $4)");
    let rows = call.bind(run_id).bind(step).bind(index).bind(Json(output)).fetch_all(executor).await?;
    Ok(!rows.is_empty())
}

/// Fails a task by hand. False if it was over already.
pub async fn fail(
    executor: impl PgExecutor<'_>,
    run_id: Uuid,
    step: &str,
    index: i32,
    why: &str,
) -> Result<bool, FlowError> {
    let call = sqlx::query("SELECT 1 FROM pgflow.fail_task($1, $2, $3, $4)");
    let rows = call.bind(run_id).bind(step).bind(index).bind(why).fetch_all(executor).await?;
    Ok(!rows.is_empty())
}

/// Ends a run. False if it was over already.
pub async fn cancel(
    executor: impl PgExecutor<'_>,
    run_id: Uuid,
    why: Option<&str>,
) -> Result<bool, FlowError> {
    let row =
        sqlx::query("SELECT pgflow.cancel_run($1, $2)").bind(run_id).bind(why).fetch_one(executor).await?;
    Ok(row.try_get::<Option<bool>, _>(0)?.unwrap_or(false))
}

/// Lets a failed or cancelled run go on where it stopped. False if it is neither.
pub async fn retry(executor: impl PgExecutor<'_>, run_id: Uuid) -> Result<bool, FlowError> {
    let row = sqlx::query("SELECT pgflow.retry_run($1)").bind(run_id).fetch_one(executor).await?;
    Ok(row.try_get::<Option<bool>, _>(0)?.unwrap_or(false))
}

/// Ends all runs of a flow that are not over; the answer is how many.
pub async fn cancel_flow(executor: impl PgExecutor<'_>, flow: &str) -> Result<u64, FlowError> {
    let row = sqlx::query("SELECT pgflow.cancel_flow($1)::bigint").bind(flow).fetch_one(executor).await?;
    counted(&row)
}

/// Lets all failed runs of a flow go on where they stopped; the answer is how many.
pub async fn retry_flow(executor: impl PgExecutor<'_>, flow: &str) -> Result<u64, FlowError> {
    let row = sqlx::query("SELECT pgflow.retry_flow($1)::bigint").bind(flow).fetch_one(executor).await?;
    counted(&row)
}

/// Deletes a run with all that is known of it; one that is not over is cancelled first. False if there is none.
pub async fn delete(executor: impl PgExecutor<'_>, run_id: Uuid) -> Result<bool, FlowError> {
    let row = sqlx::query("SELECT pgflow.delete_run($1)").bind(run_id).fetch_one(executor).await?;
    Ok(row.try_get::<Option<bool>, _>(0)?.unwrap_or(false))
}

/// Deletes a flow with its runs, and the queues that nothing else uses.
pub async fn delete_flow(executor: impl PgExecutor<'_>, flow: &str) -> Result<(), FlowError> {
    sqlx::query("SELECT pgflow.delete_flow_and_data($1)").bind(flow).execute(executor).await?;
    Ok(())
}

fn counted(row: &sqlx::postgres::PgRow) -> Result<u64, FlowError> {
    Ok(u64::try_from(row.try_get::<i64, _>(0)?).unwrap_or(0))
}

/// Deletes runs that ended so long ago, at most ten thousand in a call; the answer is how many.
pub async fn prune(
    executor: impl PgExecutor<'_>,
    older_than: Duration,
    flow: Option<&str>,
) -> Result<i64, FlowError> {
    let row = sqlx::query("SELECT pgflow.prune_data_older_than(make_interval(secs => $1), $2)")
        .bind(older_than.as_secs_f64())
        .bind(flow)
        .fetch_one(executor)
        .await?;
    Ok(row.try_get(0)?)
}
