//! Looking: flows, runs, tasks, workers and queues as JSON, for the command line and the HTTP API, which show the same.
//!
//! Every look is one statement or one snapshot, so that what it shows is of one moment. Lists have a limit, and so has what is shown of inputs and outputs: what is
//! left out is null, and its size is beside it. [`output`] gives one whole.

use serde_json::Value;
use sqlx::types::Json;
use sqlx::{PgPool, Row};
use uuid::Uuid;

use crate::error::FlowError;

/// The most rows that a list gives.
pub const LIST_MAX: u32 = 1_000;

/// The largest input or output, in bytes, that a look shows.
pub const OUTPUT_SHOWN_MAX: u32 = 64 << 10;

/// The most bytes of outputs that one look shows, of all steps or tasks together.
pub const OUTPUTS_SHOWN_MAX: u32 = 1 << 20;

/// Which runs to list.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    /// Of this flow.
    pub flow: Option<String>,
    /// In this status.
    pub status: Option<String>,
    /// Of this key.
    pub key: Option<String>,
    /// So many, at most [`LIST_MAX`].
    pub limit: Option<u32>,
}

/// A flow without its steps.
const FLOW: &str = "jsonb_build_object('slug', f.flow_slug, 'queue', coalesce(f.queue, f.flow_slug), 'keyPath', to_jsonb(f.key_path),
    'maxAttempts', f.opt_max_attempts, 'baseDelay', f.opt_base_delay, 'timeout', f.opt_timeout, 'createdAt', f.created_at,
    'queues', (SELECT coalesce(jsonb_agg(q), '[]') FROM pgflow.flow_queues(f.flow_slug) AS q),
    'stepCount', (SELECT count(*) FROM pgflow.steps s WHERE s.flow_slug = f.flow_slug),
    'runs', jsonb_build_object('waiting', 0, 'started', 0, 'completed', 0, 'failed', 0, 'cancelled', 0) ||
        (SELECT coalesce(jsonb_object_agg(c.status, c.n), '{}') FROM
            (SELECT r.status, count(*) AS n FROM pgflow.runs r WHERE r.flow_slug = f.flow_slug GROUP BY r.status) c))";

/// The steps of a flow.
const STEPS: &str = "(SELECT coalesce(jsonb_agg(jsonb_build_object('slug', s.step_slug, 'stepType', s.step_type,
    'dependsOn', (SELECT coalesce(jsonb_agg(d.dep_slug ORDER BY d.dep_slug), '[]') FROM pgflow.deps d
                  WHERE d.flow_slug = s.flow_slug AND d.step_slug = s.step_slug),
    'queue', nullif(coalesce(s.queue, f.queue, f.flow_slug), 'false'), 'manual', coalesce(s.queue, f.queue, '') = 'false',
    'maxAttempts', s.opt_max_attempts, 'baseDelay', s.opt_base_delay, 'timeout', s.opt_timeout, 'startDelay', s.opt_start_delay,
    'if', s.required_input_pattern, 'ifNot', s.forbidden_input_pattern, 'whenUnmet', s.when_unmet, 'whenExhausted', s.when_exhausted)
    ORDER BY s.step_index), '[]') FROM pgflow.steps s WHERE s.flow_slug = f.flow_slug)";

/// A run without its steps.
const RUN: &str = "jsonb_build_object('runId', r.run_id, 'flow', r.flow_slug, 'status', r.status, 'key', r.key, 'startedAt', r.started_at,
    'endedAt', coalesce(r.completed_at, r.failed_at, r.cancelled_at), 'remainingSteps', r.remaining_steps, 'error', r.error_message)";

/// All flows.
pub async fn flows(pool: &PgPool) -> Result<Vec<Value>, FlowError> {
    let statement = format!("SELECT {FLOW} FROM pgflow.flows f ORDER BY f.flow_slug LIMIT {LIST_MAX}");
    values(sqlx::query(&statement).fetch_all(pool).await?)
}

/// A flow with its steps.
pub async fn flow(pool: &PgPool, slug: &str) -> Result<Value, FlowError> {
    let statement = format!(
        "SELECT {FLOW} || jsonb_build_object('steps', {STEPS}) FROM pgflow.flows f WHERE f.flow_slug = $1"
    );
    match values(sqlx::query(&statement).bind(slug).fetch_all(pool).await?)?.pop() {
        Some(flow) => Ok(flow),
        None => {
            Err(FlowError::Unknown(format!("there is no flow {slug:?}: there are {}", slugs(pool).await?)))
        }
    }
}

async fn slugs(pool: &PgPool) -> Result<String, FlowError> {
    let statement =
        "SELECT coalesce(string_agg(flow_slug, ', ' ORDER BY flow_slug), 'none') FROM pgflow.flows";
    Ok(sqlx::query(statement).fetch_one(pool).await?.try_get(0)?)
}

/// Runs, the newest first.
pub async fn runs(pool: &PgPool, filter: &RunFilter) -> Result<Vec<Value>, FlowError> {
    let statement = format!(
        "SELECT {RUN} FROM pgflow.runs r WHERE ($1::text IS NULL OR r.flow_slug = $1) AND ($2::text IS NULL OR r.status = $2)
            AND ($3::text IS NULL OR r.key = $3) ORDER BY r.seq DESC LIMIT $4"
    );
    let limit = i64::from(filter.limit.unwrap_or(100).min(LIST_MAX));
    let query = sqlx::query(&statement).bind(&filter.flow).bind(&filter.status).bind(&filter.key).bind(limit);
    values(query.fetch_all(pool).await?)
}

/// The size of a value: as the database keeps it if that is over the limit already, else as text. What is small when compressed may not be.
fn size(value: &str) -> String {
    format!(
        "CASE WHEN pg_column_size({value}) > {OUTPUT_SHOWN_MAX} THEN pg_column_size({value}) ELSE octet_length({value}::text) END"
    )
}

/// A run with its steps, in the flow's order. The error of a step that has started is that of a task that is tried again. An input or output over [`OUTPUT_SHOWN_MAX`] is left out, and so are those of steps after
/// [`OUTPUTS_SHOWN_MAX`] of them; `inputBytes` and `outputBytes` say how large they are: as text, or as the database keeps them.
pub async fn run(pool: &PgPool, run_id: Uuid) -> Result<Value, FlowError> {
    let (input, output) = (size("r.input"), size("r.output"));
    let statement = format!(
        "SELECT {RUN} || jsonb_build_object('idempotencyKey', r.idempotency_key,
            'input', CASE WHEN z.input <= {OUTPUT_SHOWN_MAX} THEN r.input END, 'inputBytes', z.input,
            'output', CASE WHEN z.output <= {OUTPUT_SHOWN_MAX} THEN r.output END, 'outputBytes', z.output, 'steps',
            (SELECT coalesce(jsonb_agg(s.shape || jsonb_build_object('status', t.status, 'initialTasks', t.initial_tasks,
                'remainingTasks', t.remaining_tasks, 'startedAt', t.started_at, 'endedAt', coalesce(t.completed_at, t.failed_at, t.skipped_at),
                'error', coalesce(t.error_message, CASE t.status WHEN 'started' THEN (SELECT k.error_message FROM pgflow.step_tasks k
                    WHERE k.run_id = t.run_id AND k.step_slug = t.step_slug AND k.status IN ('queued', 'started') AND k.error_message IS NOT NULL
                    ORDER BY k.task_index LIMIT 1) END), 'skipReason', t.skip_reason,
                'output', CASE WHEN t.output_bytes <= {OUTPUT_SHOWN_MAX} AND t.shown <= {OUTPUTS_SHOWN_MAX} THEN t.output END,
                'outputBytes', CASE WHEN t.output IS NOT NULL THEN t.output_bytes END, 'tasks',
                jsonb_build_object('queued', 0, 'started', 0, 'completed', 0, 'failed', 0) ||
                (SELECT coalesce(jsonb_object_agg(c.status, c.n), '{{}}') FROM (SELECT k.status, count(*) AS n FROM pgflow.step_tasks k
                    WHERE k.run_id = t.run_id AND k.step_slug = t.step_slug GROUP BY k.status) c)) ORDER BY s.place), '[]')
             FROM (SELECT x.*, sum(CASE WHEN x.output_bytes <= {OUTPUT_SHOWN_MAX} THEN x.output_bytes ELSE 0 END)
                       OVER (ORDER BY p.step_index) AS shown
                   FROM pgflow.step_states x JOIN pgflow.steps p USING (flow_slug, step_slug) WHERE x.run_id = r.run_id) t JOIN
                (SELECT one.value AS shape, one.ordinality AS place FROM jsonb_array_elements({STEPS}) WITH ORDINALITY AS one) s
                ON s.shape->>'slug' = t.step_slug))
         FROM pgflow.runs r JOIN pgflow.flows f USING (flow_slug)
         CROSS JOIN LATERAL (SELECT {input} AS input, {output} AS output) z WHERE r.run_id = $1"
    );
    let found = values(sqlx::query(&statement).bind(run_id).fetch_all(pool).await?)?.pop();
    found.ok_or_else(|| FlowError::Unknown(format!("there is no run {run_id}")))
}

/// The output of a run, or of one of its steps, whole. None if it is not completed.
pub async fn output(pool: &PgPool, run_id: Uuid, step: Option<&str>) -> Result<Option<Value>, FlowError> {
    let statement = "SELECT r.output, s.step_slug IS NOT NULL, s.output FROM pgflow.runs r
         LEFT JOIN pgflow.step_states s ON s.run_id = r.run_id AND s.step_slug = $2 WHERE r.run_id = $1";
    let found = sqlx::query(statement).bind(run_id).bind(step).fetch_optional(pool).await?;
    let row = found.ok_or_else(|| FlowError::Unknown(format!("there is no run {run_id}")))?;
    if let Some(step) = step.filter(|_| !row.get::<bool, _>(1)) {
        return Err(FlowError::Unknown(format!("the run {run_id} has no step {step:?}")));
    }
    let value: Option<Json<Value>> = row.try_get(if step.is_some() { 2 } else { 0 })?;
    Ok(value.map(|Json(value)| value))
}

/// The tasks of a run, or of one of its steps. An output over [`OUTPUT_SHOWN_MAX`] is left out, and so are those after [`OUTPUTS_SHOWN_MAX`] of
/// them; `outputBytes` says how large it is: as text, or as the database keeps it.
pub async fn tasks(
    pool: &PgPool,
    run_id: Uuid,
    step: Option<&str>,
    limit: Option<u32>,
) -> Result<Vec<Value>, FlowError> {
    let bytes = size("k.output");
    let statement = format!(
        "SELECT jsonb_build_object('step', k.step_slug, 'index', k.task_index, 'status', k.status, 'queue', k.queue,
            'attempts', k.attempts_count, 'error', k.error_message,
            'output', CASE WHEN k.bytes <= {OUTPUT_SHOWN_MAX} AND k.shown <= {OUTPUTS_SHOWN_MAX} THEN k.output END,
            'outputBytes', k.bytes, 'queuedAt', k.queued_at, 'startedAt', k.started_at,
            'endedAt', coalesce(k.completed_at, k.failed_at), 'worker', k.last_worker_id)
         FROM (SELECT o.*, sum(CASE WHEN o.bytes <= {OUTPUT_SHOWN_MAX} THEN o.bytes ELSE 0 END) OVER (ORDER BY o.step_slug, o.task_index) AS shown
               FROM (SELECT k.*, {bytes} AS bytes FROM pgflow.step_tasks k WHERE k.run_id = $1 AND ($2::text IS NULL OR k.step_slug = $2)
                     ORDER BY k.step_slug, k.task_index LIMIT $3) o) k
         ORDER BY k.step_slug, k.task_index"
    );
    let limit = i64::from(limit.unwrap_or(100).min(LIST_MAX));
    values(sqlx::query(&statement).bind(run_id).bind(step).bind(limit).fetch_all(pool).await?)
}

/// Workers, those that gave the last sign of life first.
pub async fn workers(pool: &PgPool) -> Result<Vec<Value>, FlowError> {
    let statement = format!(
        "SELECT jsonb_build_object('workerId', w.worker_id, 'name', w.function_name, 'queues', to_jsonb(coalesce(w.queues, ARRAY[w.queue_name])),
            'startedAt', w.started_at, 'lastHeartbeatAt', w.last_heartbeat_at, 'stoppedAt', w.stopped_at, 'deprecatedAt', w.deprecated_at,
            'alive', w.stopped_at IS NULL AND w.last_heartbeat_at > now() - interval '30 seconds',
            'inHand', (SELECT count(*) FROM pgflow.step_tasks k WHERE k.last_worker_id = w.worker_id AND k.status = 'started'))
         FROM pgflow.workers w ORDER BY w.last_heartbeat_at DESC LIMIT {LIST_MAX}"
    );
    values(sqlx::query(&statement).fetch_all(pool).await?)
}

/// The queues that flows use: who uses them, how many tasks wait in them, and how many of theirs are being done.
pub async fn queues(pool: &PgPool) -> Result<Vec<Value>, FlowError> {
    let statement = format!(
        "SELECT jsonb_build_object('queue', u.queue, 'flows', jsonb_agg(u.flow_slug ORDER BY u.flow_slug),
            'waiting', (SELECT count(*) FROM pgflow.step_tasks k WHERE k.queue = u.queue AND k.status = 'queued'),
            'started', (SELECT count(*) FROM pgflow.step_tasks k WHERE k.queue = u.queue AND k.status = 'started'))
         FROM (SELECT f.flow_slug, q AS queue FROM pgflow.flows f CROSS JOIN LATERAL pgflow.flow_queues(f.flow_slug) AS q) u
         GROUP BY u.queue ORDER BY u.queue LIMIT {LIST_MAX}"
    );
    values(sqlx::query(&statement).fetch_all(pool).await?)
}

/// The bounds, in seconds, of how long handlers take, as all workers count them. The last place of a count is for those beyond.
pub const HANDLER_BOUNDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Of what is alive so much is counted, of each flow and of each queue: a look at a backlog of millions costs no more.
pub const COUNTED_MAX: u32 = 100_000;

/// The longest that one of the looks of [`counts`] may take.
const COUNTING_MILLIS_MAX: u32 = 2_000;

/// How many there are of everything, at one moment: what metrics show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// In the order of their names; so many at most as were asked for.
    pub flows: Vec<FlowCount>,
    /// In the order of their names; so many at most as were asked for.
    pub queues: Vec<QueueCount>,
    /// Workers that gave a sign of life within half a minute.
    pub workers: u64,
}

/// The runs of a flow that are not over. Counted up to [`COUNTED_MAX`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowCount {
    /// Its name.
    pub flow: String,
    /// Runs that have started.
    pub started: u64,
    /// Runs that wait for another of their key.
    pub waiting: u64,
}

/// The tasks of a queue: what is alive, counted up to [`COUNTED_MAX`], and what workers have done since its flow was made, as they told it with their signs of life.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueCount {
    /// Its name.
    pub queue: String,
    /// Tasks that nobody has begun.
    pub queued: u64,
    /// Tasks that a worker has.
    pub started: u64,
    /// Workers alive that read it.
    pub workers: u64,
    /// Reads that asked it.
    pub polls: u64,
    /// Tasks that were taken from it.
    pub taken: u64,
    /// Tasks that were completed.
    pub completed: u64,
    /// Failures after which a task is tried again.
    pub retried: u64,
    /// Failures for good.
    pub failed: u64,
    /// Tasks that were another's, or over, when they ended.
    pub lost: u64,
    /// How long handlers took, all together.
    pub handler_seconds: f64,
    /// Handlers that ended within each of [`HANDLER_BOUNDS`] and not within the one before, and at last those beyond all; empty if there were none.
    pub handlers: Vec<u64>,
}

/// The runs of each flow that are alive. The words of the state are those of an index that holds only these.
const LIVE_RUNS: &str = "SELECT f.flow_slug, (SELECT count(*) FROM (SELECT FROM pgflow.runs r WHERE r.flow_slug = f.flow_slug AND r.status = 'started'
         AND r.status IN ('started', 'waiting') LIMIT $2) a), (SELECT count(*) FROM (SELECT FROM pgflow.runs r WHERE r.flow_slug = f.flow_slug
         AND r.status = 'waiting' AND r.status IN ('started', 'waiting') LIMIT $2) b)
     FROM pgflow.flows f ORDER BY f.flow_slug LIMIT $1";

/// The queues: what is alive by indexes that hold only that, and what was counted by one row.
const QUEUES: &str = "SELECT u.queue, (SELECT count(*) FROM (SELECT FROM pgflow.step_tasks k WHERE k.queue = u.queue AND k.status = 'queued' LIMIT $2) a),
         (SELECT count(*) FROM (SELECT FROM pgflow.step_tasks k WHERE k.queue = u.queue AND k.status = 'started' LIMIT $2) b),
         (SELECT count(*) FROM pgflow.workers w WHERE u.queue = ANY (coalesce(w.queues, ARRAY[w.queue_name]))
             AND w.stopped_at IS NULL AND w.last_heartbeat_at > now() - interval '30 seconds'),
         coalesce(c.polls, 0), coalesce(c.taken, 0), coalesce(c.completed, 0), coalesce(c.retried, 0), coalesce(c.failed, 0), coalesce(c.lost, 0),
         coalesce(c.handler_seconds, 0), coalesce(c.handlers, '{}')
     FROM (SELECT DISTINCT q AS queue FROM pgflow.flows f CROSS JOIN LATERAL pgflow.flow_queues(f.flow_slug) AS q ORDER BY q LIMIT $1) u
     LEFT JOIN pgflow.queue_counts c ON c.queue = u.queue ORDER BY u.queue";

const WORKERS: &str = "SELECT count(*) FROM pgflow.workers w WHERE w.stopped_at IS NULL AND w.last_heartbeat_at > now() - interval '30 seconds'";

/// Counts what is alive and says what was counted; of so many flows and so many queues at most. Three statements that read what is alive and no more, each within two seconds or not
/// at all.
pub async fn counts(pool: &PgPool, most: u32) -> Result<Counts, FlowError> {
    let mut transaction = pool.begin().await?;
    sqlx::query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        .execute(&mut *transaction)
        .await?;
    let limit = COUNTING_MILLIS_MAX.to_string();
    sqlx::query("SELECT set_config('statement_timeout', $1, true)")
        .bind(limit)
        .execute(&mut *transaction)
        .await?;
    let flows = limited(&mut transaction, LIVE_RUNS, most).await?;
    let queues = limited(&mut transaction, QUEUES, most).await?;
    let workers = sqlx::query(WORKERS).fetch_one(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(Counts {
        flows: flows.iter().map(flow_count).collect::<Result<_, _>>()?,
        queues: queues.iter().map(queue_count).collect::<Result<_, _>>()?,
        workers: number(&workers, 0)?,
    })
}

async fn limited(
    connection: &mut sqlx::PgConnection,
    statement: &str,
    most: u32,
) -> Result<Vec<sqlx::postgres::PgRow>, FlowError> {
    let query = sqlx::query(statement).bind(i64::from(most)).bind(i64::from(COUNTED_MAX));
    Ok(query.fetch_all(connection).await?)
}

fn number(row: &sqlx::postgres::PgRow, place: usize) -> Result<u64, FlowError> {
    Ok(u64::try_from(row.try_get::<i64, _>(place)?).unwrap_or(0))
}

fn flow_count(row: &sqlx::postgres::PgRow) -> Result<FlowCount, FlowError> {
    Ok(FlowCount { flow: row.try_get(0)?, started: number(row, 1)?, waiting: number(row, 2)? })
}

fn queue_count(row: &sqlx::postgres::PgRow) -> Result<QueueCount, FlowError> {
    let handlers: Vec<i64> = row.try_get(11)?;
    Ok(QueueCount {
        queue: row.try_get(0)?,
        queued: number(row, 1)?,
        started: number(row, 2)?,
        workers: number(row, 3)?,
        polls: number(row, 4)?,
        taken: number(row, 5)?,
        completed: number(row, 6)?,
        retried: number(row, 7)?,
        failed: number(row, 8)?,
        lost: number(row, 9)?,
        handler_seconds: row.try_get(10)?,
        handlers: handlers.into_iter().map(|count| u64::try_from(count).unwrap_or(0)).collect(),
    })
}

fn values(rows: Vec<sqlx::postgres::PgRow>) -> Result<Vec<Value>, FlowError> {
    let value = |row: &sqlx::postgres::PgRow| -> Result<Value, FlowError> {
        let Json(value) = row.try_get(0)?;
        Ok(value)
    };
    rows.iter().map(value).collect()
}
