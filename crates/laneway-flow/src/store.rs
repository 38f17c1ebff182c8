//! The calls that a worker makes: one function of the schema each, with bound values only.
//!
//! Everything that a task's end brings with it (releasing what waited, sending messages, ending the run) happens inside these functions, in
//! one transaction; the worker never touches a table.

use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgExecutor, Row};
use uuid::Uuid;

use crate::error::FlowError;
use crate::handler::Task;

/// Where an announcement of a message is heard; its payload is the queue.
pub(crate) const QUEUE_CHANNEL: &str = "pgflow_queue";

/// Where an announcement of a run's or a step's change is heard; its payload is JSON.
pub(crate) const EVENT_CHANNEL: &str = "pgflow_event";

/// Tasks as columns, which is how arrays go to the database.
#[derive(Default)]
pub(crate) struct TaskRows {
    runs: Vec<Uuid>,
    steps: Vec<String>,
    indexes: Vec<i32>,
    starts: Vec<i64>,
}

impl<'a> FromIterator<&'a Task> for TaskRows {
    fn from_iter<I: IntoIterator<Item = &'a Task>>(tasks: I) -> Self {
        let mut rows = TaskRows::default();
        for task in tasks {
            rows.runs.push(task.run_id);
            rows.steps.push(task.step.clone());
            rows.indexes.push(task.index);
            rows.starts.push(task.start_number);
        }
        rows
    }
}

impl TaskRows {
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

/// A read of several queues.
pub(crate) struct Read<'a> {
    pub(crate) queues: Vec<&'a str>,
    pub(crate) limits: Vec<i32>,
    pub(crate) visibility: Vec<i32>,
    pub(crate) flows: &'a [String],
    /// As `flow.step`, left to others.
    pub(crate) strange_steps: Vec<String>,
    pub(crate) total: i32,
    pub(crate) worker: Uuid,
}

/// Takes tasks from the queues, in their order, until there are `total`: read and started in one call.
pub(crate) async fn read_and_start(
    executor: impl PgExecutor<'_>,
    read: Read<'_>,
) -> Result<Vec<Task>, FlowError> {
    let rows = sqlx::query(
        "SELECT queue, msg_id, flow_slug, run_id, step_slug, task_index, input, flow_input, attempts_count, max_attempts, timeout, key, start_number \
         FROM pgflow.read_and_start($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(read.queues)
    .bind(read.limits)
    .bind(read.worker)
    .bind(read.flows)
    .bind(read.visibility)
    .bind(read.total)
    .bind(read.strange_steps)
    .fetch_all(executor)
    .await?;
    rows.iter().map(task).collect()
}

fn task(row: &PgRow) -> Result<Task, FlowError> {
    let Json(input): Json<Box<RawValue>> = row.try_get(6)?;
    let flow_input: Option<Json<Box<RawValue>>> = row.try_get(7)?;
    Ok(Task {
        queue: row.try_get(0)?,
        message_id: row.try_get(1)?,
        flow: row.try_get(2)?,
        run_id: row.try_get(3)?,
        step: row.try_get(4)?,
        index: row.try_get(5)?,
        input,
        flow_input: flow_input.map(|Json(input)| input),
        attempt: row.try_get(8)?,
        max_attempts: row.try_get(9)?,
        timeout_seconds: row.try_get(10)?,
        key: row.try_get(11)?,
        start_number: row.try_get(12)?,
    })
}

/// Adds what a worker has counted to the rows of its queues.
pub(crate) async fn count_tasks(
    executor: impl PgExecutor<'_>,
    counts: &serde_json::Value,
) -> Result<(), FlowError> {
    sqlx::query("SELECT pgflow.count_tasks($1)").bind(Json(counts)).execute(executor).await?;
    Ok(())
}

/// What came of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completed {
    /// It counts.
    Done,
    /// The task is no longer this start's: it was given to another, ended before, or its run is over.
    Ignored,
    /// Nothing was done: the output is over the limit.
    TooLarge,
    /// Nothing was done: with this output, all those of the run together would be over the limit.
    RunTooLarge,
}

/// Completes tasks, all of them in one transaction. The answers are in the order of the tasks.
pub(crate) async fn complete_tasks(
    executor: impl PgExecutor<'_>,
    tasks: &TaskRows,
    outputs: Vec<Json<&RawValue>>,
) -> Result<Vec<Completed>, FlowError> {
    let rows = sqlx::query("SELECT outcome FROM pgflow.complete_tasks($1, $2, $3, $4, $5)")
        .bind(&tasks.runs)
        .bind(&tasks.steps)
        .bind(&tasks.indexes)
        .bind(outputs)
        .bind(&tasks.starts)
        .fetch_all(executor)
        .await?;
    let outcome = |row: &PgRow| -> Result<Completed, FlowError> {
        Ok(match row.try_get(0)? {
            "completed" => Completed::Done,
            "too_large" => Completed::TooLarge,
            "run_too_large" => Completed::RunTooLarge,
            _ => Completed::Ignored,
        })
    };
    rows.iter().map(outcome).collect()
}

/// What came of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// It will be tried again.
    Retried,
    /// It will not.
    Final,
    /// The task is no longer this start's.
    Ignored,
}

/// Fails tasks, all of them in one transaction.
pub(crate) async fn fail_tasks(
    executor: impl PgExecutor<'_>,
    tasks: &TaskRows,
    errors: &[String],
    permanent: &[bool],
) -> Result<Vec<Failed>, FlowError> {
    let rows = sqlx::query("SELECT outcome FROM pgflow.fail_tasks($1, $2, $3, $4, $5, $6)")
        .bind(&tasks.runs)
        .bind(&tasks.steps)
        .bind(&tasks.indexes)
        .bind(errors)
        .bind(permanent)
        .bind(&tasks.starts)
        .fetch_all(executor)
        .await?;
    let outcome = |row: &PgRow| -> Result<Failed, FlowError> {
        Ok(match row.try_get(0)? {
            "retried" => Failed::Retried,
            "ignored" => Failed::Ignored,
            _ => Failed::Final,
        })
    };
    rows.iter().map(outcome).collect()
}

/// Hands tasks back that were not begun, or not finished: visible to others after so many seconds, the attempt does not count.
pub(crate) async fn release_tasks(
    executor: impl PgExecutor<'_>,
    tasks: &TaskRows,
    delay_seconds: i32,
) -> Result<i32, FlowError> {
    if tasks.is_empty() {
        return Ok(0);
    }
    let row = sqlx::query("SELECT pgflow.release_tasks($1, $2, $3, $4, $5)")
        .bind(&tasks.runs)
        .bind(&tasks.steps)
        .bind(&tasks.indexes)
        .bind(&tasks.starts)
        .bind(delay_seconds)
        .fetch_one(executor)
        .await?;
    Ok(row.try_get(0)?)
}

/// Hands back what the worker has started and does not know of, which is all but these.
pub(crate) async fn release_unknown(
    executor: impl PgExecutor<'_>,
    worker: Uuid,
    known: &TaskRows,
) -> Result<i32, FlowError> {
    let call = sqlx::query("SELECT pgflow.release_unknown_tasks($1, $2)").bind(worker).bind(&known.starts);
    let row = call.fetch_one(executor).await?;
    Ok(row.try_get(0)?)
}

/// Keeps tasks for so many seconds more. The answer is those that are still ours, by the numbers of their starts.
pub(crate) async fn extend_tasks(
    executor: impl PgExecutor<'_>,
    tasks: &TaskRows,
    seconds: u32,
) -> Result<Vec<i64>, FlowError> {
    let seconds = i32::try_from(seconds).unwrap_or(i32::MAX);
    let rows = sqlx::query("SELECT start_number FROM pgflow.extend_tasks($1, $2, $3, $4, $5)")
        .bind(&tasks.runs)
        .bind(&tasks.steps)
        .bind(&tasks.indexes)
        .bind(seconds)
        .bind(&tasks.starts)
        .fetch_all(executor)
        .await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Makes a worker known.
pub(crate) async fn start_worker(
    executor: impl PgExecutor<'_>,
    worker: Uuid,
    name: &str,
    queues: &[&str],
) -> Result<(), FlowError> {
    let call = sqlx::query("SELECT pgflow.start_worker($1, $2, $3)").bind(worker).bind(name).bind(queues);
    call.execute(executor).await?;
    Ok(())
}

/// Says that the worker lives. False: it is asked to stop. None: the database does not know it any more.
pub(crate) async fn heartbeat(
    executor: impl PgExecutor<'_>,
    worker: Uuid,
) -> Result<Option<bool>, FlowError> {
    let row = sqlx::query("SELECT pgflow.heartbeat($1)").bind(worker).fetch_one(executor).await?;
    Ok(row.try_get(0)?)
}

/// Says that the worker has ended.
pub(crate) async fn mark_worker_stopped(
    executor: impl PgExecutor<'_>,
    worker: Uuid,
) -> Result<(), FlowError> {
    sqlx::query("SELECT pgflow.mark_worker_stopped($1)").bind(worker).execute(executor).await?;
    Ok(())
}

/// Gives the tasks of dead workers to others, and those that nobody has finished in time.
pub(crate) async fn rescue(pool: &sqlx::PgPool, dead_after_seconds: u32) -> Result<i64, FlowError> {
    let row = sqlx::query(
        "SELECT pgflow.requeue_tasks_of_dead_workers(make_interval(secs => $1))::bigint + pgflow.requeue_stalled_tasks()::bigint",
    )
    .bind(f64::from(dead_after_seconds))
    .fetch_one(pool)
    .await?;
    Ok(row.try_get(0)?)
}

/// Makes queues again that were dropped by hand, with their waiting tasks.
pub(crate) async fn repair_queues(executor: impl PgExecutor<'_>, queues: &[&str]) -> Result<i32, FlowError> {
    let row = sqlx::query("SELECT pgflow.repair_queues($1)").bind(queues).fetch_one(executor).await?;
    Ok(row.try_get(0)?)
}
