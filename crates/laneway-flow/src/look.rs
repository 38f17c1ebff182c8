//! Looking: flows, runs, tasks, workers and queues as JSON, for the command line and the HTTP API, which show the same.
//!
//! Every look is one statement, so that what it shows is of one moment. Lists have a limit.

use serde_json::Value;
use sqlx::types::Json;
use sqlx::{PgPool, Row};
use uuid::Uuid;

use crate::error::FlowError;

/// The most rows that a list gives.
pub const LIST_MAX: u32 = 1_000;

/// The largest output, in bytes, that a list of tasks shows.
pub const OUTPUT_SHOWN_MAX: u32 = 64 << 10;

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

/// A run with its steps, in the flow's order.
pub async fn run(pool: &PgPool, run_id: Uuid) -> Result<Value, FlowError> {
    let statement = format!(
        "SELECT {RUN} || jsonb_build_object('idempotencyKey', r.idempotency_key, 'input', r.input, 'output', r.output, 'steps',
            (SELECT coalesce(jsonb_agg(s.shape || jsonb_build_object('status', t.status, 'initialTasks', t.initial_tasks,
                'remainingTasks', t.remaining_tasks, 'startedAt', t.started_at, 'endedAt', coalesce(t.completed_at, t.failed_at, t.skipped_at),
                'error', t.error_message, 'skipReason', t.skip_reason, 'output', t.output, 'tasks',
                jsonb_build_object('queued', 0, 'started', 0, 'completed', 0, 'failed', 0) ||
                (SELECT coalesce(jsonb_object_agg(c.status, c.n), '{{}}') FROM (SELECT k.status, count(*) AS n FROM pgflow.step_tasks k
                    WHERE k.run_id = t.run_id AND k.step_slug = t.step_slug GROUP BY k.status) c)) ORDER BY s.place), '[]')
             FROM pgflow.step_states t JOIN
                (SELECT one.value AS shape, one.ordinality AS place FROM jsonb_array_elements({STEPS}) WITH ORDINALITY AS one) s
                ON s.shape->>'slug' = t.step_slug WHERE t.run_id = r.run_id))
         FROM pgflow.runs r JOIN pgflow.flows f USING (flow_slug) WHERE r.run_id = $1"
    );
    let found = values(sqlx::query(&statement).bind(run_id).fetch_all(pool).await?)?.pop();
    found.ok_or_else(|| FlowError::Unknown(format!("there is no run {run_id}")))
}

/// The tasks of a run, or of one of its steps. An output over [`OUTPUT_SHOWN_MAX`] is left out; `outputBytes` says how large it is: as
/// text, or as the database keeps it.
pub async fn tasks(
    pool: &PgPool,
    run_id: Uuid,
    step: Option<&str>,
    limit: Option<u32>,
) -> Result<Vec<Value>, FlowError> {
    let statement = format!(
        "SELECT jsonb_build_object('step', k.step_slug, 'index', k.task_index, 'status', k.status, 'queue', k.queue,
            'attempts', k.attempts_count, 'error', k.error_message,
            'output', CASE WHEN o.bytes <= {OUTPUT_SHOWN_MAX} THEN k.output END, 'outputBytes', o.bytes, 'queuedAt', k.queued_at, 'startedAt', k.started_at,
            'endedAt', coalesce(k.completed_at, k.failed_at), 'worker', k.last_worker_id)
         FROM (SELECT * FROM pgflow.step_tasks t WHERE t.run_id = $1 AND ($2::text IS NULL OR t.step_slug = $2)
               ORDER BY t.step_slug, t.task_index LIMIT $3) k
         CROSS JOIN LATERAL (SELECT CASE WHEN pg_column_size(k.output) > {OUTPUT_SHOWN_MAX} THEN pg_column_size(k.output)
                                    ELSE octet_length(k.output::text) END AS bytes) o
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

fn values(rows: Vec<sqlx::postgres::PgRow>) -> Result<Vec<Value>, FlowError> {
    let value = |row: &sqlx::postgres::PgRow| -> Result<Value, FlowError> {
        let Json(value) = row.try_get(0)?;
        Ok(value)
    };
    rows.iter().map(value).collect()
}
