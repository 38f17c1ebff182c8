//! One run of `bench flow`: makes its flow, starts its runs, lets the contender work, and checks what came out.
//!
//! Runs are started before the clock, workers inside it: what is measured is taking, handling and completing tasks, with all that follows in
//! the database. Handlers do nothing.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use laneway_flow::{Action, Definition, Settings, Worker, client};
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Row};
use uuid::Uuid;

use super::Spec;
use crate::drive::Outcome;
use crate::machine::resident_bytes;

/// No run takes longer on a machine that works.
pub(super) const LIMIT: Duration = Duration::from_secs(900);

/// Tasks completed in a second.
pub(super) const RATE: &str = "tasks_per_second";

/// Of a worker that has worked.
pub(super) const MEMORY: &str = "resident_bytes";

/// How wide a map of `map` is.
const WIDTH: usize = 1_000;

pub(super) fn run(spec: &Spec) -> Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let pool = connect(&spec.url).await?;
        laneway_flow::migrate(&pool).await?;
        let plan = Plan::make(spec, &pool).await?;
        if spec.workload == "piled" {
            pile_up(&pool, spec.piled).await?;
        }
        let before = wal(&pool).await?;
        let seconds = match spec.contender.as_str() {
            "laneway" => product(spec, &plan).await?,
            _ => one_at_a_time(spec, &plan).await?,
        };
        let written = wal(&pool).await? - before;
        let violations = plan.violations(&pool).await?;
        let tasks = plan.tasks as f64;
        let mut metrics =
            vec![(RATE.to_owned(), tasks / seconds), ("wal_bytes_per_task".to_owned(), written / tasks)];
        if let Some(bytes) = resident_bytes().filter(|_| spec.workload == "memory") {
            metrics.push((MEMORY.to_owned(), bytes as f64));
        }
        Ok(Outcome { metrics: metrics.into_iter().collect(), violations, ..Outcome::default() })
    })
}

async fn connect(url: &str) -> Result<PgPool> {
    let options = PgPoolOptions::new().max_connections(6).acquire_timeout(Duration::from_secs(30));
    options.connect(url).await.context("no database answers")
}

/// Bytes of the log that the server has written so far.
async fn wal(pool: &PgPool) -> Result<f64> {
    let statement = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8";
    Ok(sqlx::query_scalar(statement).fetch_one(pool).await?)
}

/// What is to be done: flows with all of their runs started.
struct Plan {
    flows: Vec<Definition>,
    runs: Vec<Uuid>,
    tasks: usize,
}

impl Plan {
    async fn make(spec: &Spec, pool: &PgPool) -> Result<Self> {
        let steps = match spec.workload.as_str() {
            "chain" => {
                json!([{"slug": "a"}, {"slug": "b", "dependsOn": ["a"]}, {"slug": "c", "dependsOn": ["b"]}])
            }
            "map" | "wide" => json!([{"slug": "a", "stepType": "map"}]),
            _ => json!([{"slug": "a"}]),
        };
        let width = match spec.workload.as_str() {
            "map" => WIDTH,
            "wide" => 10_000,
            "chain" => 3,
            _ => 1,
        };
        let run_count = (spec.tasks / width).max(1);
        let input = if spec.workload == "map" || spec.workload == "wide" {
            json!((0..width).collect::<Vec<_>>())
        } else {
            json!({"n": 1})
        };
        let (mut flows, mut runs) = (Vec::new(), Vec::new());
        // A flow for each queue, so that each has a queue of its own.
        for queue in 0..spec.queues {
            let slug = format!("bench_{}_{queue}_{}", spec.number, std::process::id());
            let text = json!({"slug": slug, "steps": steps}).to_string();
            let flow = Definition::from_json(&text)?;
            client::compile(pool, &flow, false).await?;
            let share = run_count / spec.queues + usize::from(queue < run_count % spec.queues);
            for piece in vec![&input; share].chunks(500) {
                runs.extend(client::start_many(pool, &flow.slug, piece).await?);
            }
            flows.push(flow);
        }
        Ok(Self { flows, tasks: runs.len() * width, runs })
    }

    /// What is not as it should be: every run completed, every task once.
    async fn violations(&self, pool: &PgPool) -> Result<Vec<String>> {
        let row = sqlx::query(
            "SELECT (SELECT count(*) FROM pgflow.runs WHERE run_id = ANY ($1) AND status = 'completed'),
                    (SELECT count(*) FROM pgflow.step_tasks WHERE run_id = ANY ($1) AND status = 'completed' AND attempts_count = 1)",
        )
        .bind(&self.runs)
        .fetch_one(pool)
        .await?;
        let (runs, tasks): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let mut violations = Vec::new();
        if runs as usize != self.runs.len() {
            violations.push(format!("{runs} of {} runs are completed", self.runs.len()));
        }
        if tasks as usize != self.tasks {
            violations.push(format!("{tasks} of {} tasks were completed at the first attempt", self.tasks));
        }
        Ok(violations)
    }
}

/// Workers of the product, until all tasks are done.
async fn product(spec: &Spec, plan: &Plan) -> Result<f64> {
    let mut workers = Vec::new();
    let began = Instant::now();
    for _ in 0..spec.workers {
        let settings =
            Settings { batch_size: spec.batch, max_concurrent: spec.batch.max(10), ..Settings::default() };
        let pool = connect(&spec.url).await?;
        let mut worker = Worker::on(&pool).settings(settings).verify_only();
        for flow in &plan.flows {
            let nothing = Action::plain(|task| async move { Ok(task.input.clone()) });
            let actions: HashMap<String, Action> =
                flow.steps.iter().map(|step| (step.slug.clone(), nothing.clone())).collect();
            worker = worker.serve_data(flow.clone(), actions);
        }
        workers.push(worker.start().await?);
    }
    // The time of starting workers is theirs, and small; waiting costs the database nothing.
    let done = || workers.iter().map(|worker| worker.stats().completed as usize).sum::<usize>();
    while done() < plan.tasks {
        ensure!(began.elapsed() < LIMIT, "{} of {} tasks after {LIMIT:?}", done(), plan.tasks);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let seconds = began.elapsed().as_secs_f64();
    for worker in workers {
        worker.stop().await;
    }
    Ok(seconds)
}

/// The loop of the original: read a batch, start its tasks, complete them one call at a time.
async fn one_at_a_time(spec: &Spec, plan: &Plan) -> Result<f64> {
    let queue = plan.flows[0].own_queue().to_owned();
    let left = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(plan.tasks));
    let began = Instant::now();
    let mut loops = Vec::new();
    for _ in 0..spec.workers {
        let (pool, queue, left, batch) = (connect(&spec.url).await?, queue.clone(), left.clone(), spec.batch);
        loops.push(tokio::spawn(async move { original(&pool, &queue, batch, &left).await }));
    }
    for one in loops {
        one.await??;
    }
    Ok(began.elapsed().as_secs_f64())
}

async fn original(
    pool: &PgPool,
    queue: &str,
    batch: usize,
    left: &std::sync::atomic::AtomicUsize,
) -> Result<()> {
    use std::sync::atomic::Ordering::SeqCst;
    let mut connection = pool.acquire().await?;
    let worker = Uuid::new_v4();
    sqlx::query("SELECT pgflow.start_worker($1, 'bench', $2)")
        .bind(worker)
        .bind([queue].as_slice())
        .execute(&mut *connection)
        .await?;
    while left.load(SeqCst) > 0 {
        let read = sqlx::query("SELECT msg_id FROM pgflow.read_with_poll($1, 30, $2, 1, 10)")
            .bind(queue)
            .bind(batch as i32);
        let ids: Vec<i64> = read.fetch_all(&mut *connection).await?.iter().map(|row| row.get(0)).collect();
        if ids.is_empty() {
            continue;
        }
        let start =
            sqlx::query("SELECT run_id, step_slug, task_index, input FROM pgflow.start_tasks($1, $2, $3)");
        let tasks = start.bind(queue).bind(&ids).bind(worker).fetch_all(&mut *connection).await?;
        for task in tasks {
            let complete = sqlx::query("SELECT 1 FROM pgflow.complete_task($1, $2, $3, $4)");
            let complete = complete
                .bind(task.get::<Uuid, _>(0))
                .bind(task.get::<String, _>(1))
                .bind(task.get::<i32, _>(2));
            complete.bind(task.get::<Value, _>(3)).execute(&mut *connection).await?;
            left.fetch_sub(1, SeqCst);
        }
    }
    Ok(())
}

/// Finished runs of one step and one task each, as many as there should be in all.
async fn pile_up(pool: &PgPool, wanted: u64) -> Result<()> {
    let there: i64 =
        sqlx::query_scalar("SELECT count(*) FROM pgflow.step_tasks WHERE flow_slug = 'bench_pile'")
            .fetch_one(pool)
            .await?;
    let missing = wanted.saturating_sub(there as u64);
    if missing == 0 {
        return Ok(());
    }
    let flow = Definition::from_json(r#"{"slug":"bench_pile","steps":[{"slug":"a"}]}"#)?;
    client::compile(pool, &flow, false).await?;
    let mut transaction = pool.begin().await?;
    sqlx::query(
        "CREATE TEMPORARY TABLE pile ON COMMIT DROP AS SELECT gen_random_uuid() AS run_id, number FROM generate_series($1, $2) number",
    )
    .bind(there + 1)
    .bind(wanted as i64)
    .execute(&mut *transaction)
    .await?;
    let statements = [
        "INSERT INTO pgflow.runs (run_id, flow_slug, status, input, output, remaining_steps, completed_at)
         SELECT run_id, 'bench_pile', 'completed', '{\"n\": 1}', '{\"a\": {}}', 0, now() FROM pile",
        "INSERT INTO pgflow.step_states (flow_slug, run_id, step_slug, status, remaining_tasks, initial_tasks, started_at, completed_at, output)
         SELECT 'bench_pile', run_id, 'a', 'completed', 0, 1, now(), now(), '{}' FROM pile",
        "INSERT INTO pgflow.step_tasks (flow_slug, run_id, step_slug, message_id, status, attempts_count, started_at, completed_at, output, queue)
         SELECT 'bench_pile', run_id, 'a', number, 'completed', 1, now(), now(), '{}', 'bench_pile' FROM pile",
    ];
    for statement in statements {
        sqlx::query(statement).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    sqlx::query("ANALYZE pgflow.runs, pgflow.step_states, pgflow.step_tasks").execute(pool).await?;
    Ok(())
}
