//! Many workers at once on the same runs: no deadlock, no lost update, nothing done twice, whatever the interleaving. Each test prints the seed
//! of what it does at random; `LANEWAY_SEED` repeats it.

mod sql;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sql::{Database, Task, database};
use sqlx::types::Uuid;

const WORKERS: usize = 8;
const WIDTH: usize = 10_000;

/// After this a test has hung.
const DEADLINE: Duration = Duration::from_secs(240);

fn seed() -> u64 {
    let seed = std::env::var("LANEWAY_SEED")
        .ok()
        .and_then(|it| it.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..));
    println!("LANEWAY_SEED={seed}");
    seed
}

/// What Postgres has counted: deadlocks that it broke.
async fn deadlocks(db: &Database) -> i64 {
    db.count("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").await
}

/// Waits until no run is under way any more.
async fn all_ended(db: &Database) -> bool {
    db.get("SELECT NOT EXISTS (SELECT FROM pgflow.runs WHERE status IN ('started', 'waiting'))").await
        == "true"
}

/// Eight workers, one run, a map of ten thousand. They take batches of any size, report in any order and sometimes twice, fail some tasks
/// once, hand some back, and one of them always comes too late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_workers_on_one_wide_map() {
    let seed = seed();
    let db = Arc::new(database().await);
    db.run(
        "SELECT pgflow.create_flow('wide', base_delay => 0, max_attempts => 1000); SELECT pgflow.add_step('wide', 'list');
         SELECT pgflow.add_step('wide', 'each', ARRAY['list'], step_type => 'map', queue => 'each'); SELECT pgflow.add_step('wide', 'sum', ARRAY['each'])",
    )
    .await;
    let run = db.start("wide", &json!({})).await;
    let completed = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let workers: Vec<_> = (0..WORKERS)
        .map(|n| {
            let (db, completed) = (db.clone(), completed.clone());
            tokio::spawn(async move {
                wide_worker(&db, fastrand::Rng::with_seed(seed + n as u64), &completed, start).await
            })
        })
        .collect();
    for worker in workers {
        worker.await.expect("no worker panics");
    }
    println!("{:?}", start.elapsed());
    assert_eq!(completed.load(Ordering::Relaxed), WIDTH as u64 + 2, "each task was completed once");
    assert_eq!(db.status(run).await, "completed");
    let squares: u64 = (0..WIDTH as u64).map(|n| n * n).sum();
    assert_eq!(db.output(run).await, json!({ "sum": squares }));
    assert_eq!(deadlocks(&db).await, 0);
    for queue in ["wide", "each"] {
        assert_eq!(db.count(&format!("SELECT count(*) FROM pgmq.q_{queue}")).await, 0);
    }
    db.check().await;
}

async fn wide_worker(db: &Database, mut rng: fastrand::Rng, completed: &AtomicU64, start: Instant) {
    let worker = db.worker(&["each", "wide"]).await;
    while start.elapsed() < DEADLINE {
        let tasks = db.read(worker, &["each", "wide"], rng.i32(1..300)).await;
        if tasks.is_empty() {
            if all_ended(db).await {
                return;
            }
            tokio::task::yield_now().await;
            continue;
        }
        let (mut done, mut failed, mut back) = (Vec::new(), Vec::new(), Vec::new());
        for task in tasks {
            match rng.u32(..100) {
                0..3 => failed.push(task),
                3..5 => back.push(task),
                _ => {
                    let output = wide_output(&task);
                    done.push((task, output));
                }
            }
        }
        rng.shuffle(&mut done);
        let again: Vec<_> = done.iter().take(rng.usize(..3)).cloned().collect();
        done.extend(again.clone());
        let outcomes = db.complete(&done).await;
        completed
            .fetch_add(outcomes.iter().filter(|it| *it == "completed").count() as u64, Ordering::Relaxed);
        assert_eq!(outcomes.iter().filter(|it| *it == "ignored").count(), again.len());
        if !failed.is_empty() {
            let failed: Vec<_> = failed.into_iter().map(|it| (it, "at random")).collect();
            assert!(db.fail(&failed).await.iter().all(|(outcome, _)| outcome == "retried"));
        }
        release(db, &back).await;
    }
    panic!("not done after {DEADLINE:?}");
}

fn wide_output(task: &Task) -> Value {
    match task.step_slug.as_str() {
        "list" => (0..WIDTH as u64).collect::<Vec<_>>().into(),
        "each" => {
            let n = task.input.as_u64().expect("a number");
            assert_eq!(n, task.task_index as u64);
            json!(n * n)
        }
        _ => task.input["each"]
            .as_array()
            .expect("an array")
            .iter()
            .filter_map(Value::as_u64)
            .sum::<u64>()
            .into(),
    }
}

async fn release(db: &Database, tasks: &[Task]) {
    sqlx::query("SELECT pgflow.release_tasks($1, $2, $3)")
        .bind(tasks.iter().map(|it| it.run_id).collect::<Vec<_>>())
        .bind(tasks.iter().map(|it| it.step_slug.clone()).collect::<Vec<_>>())
        .bind(tasks.iter().map(|it| it.task_index).collect::<Vec<_>>())
        .execute(&db.pool)
        .await
        .expect("handing back does not fail");
}

/// Everything at once: several flows on shared queues, keys, skips, exhausted attempts, cancelled and retried runs, stalls, dead workers, pruning,
/// and starters. Whatever happens, the rules hold at the end, every run ends, and Postgres had no deadlock to break.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_at_once() {
    let seed = seed();
    let db = Arc::new(database().await);
    for flow in ["one", "two"] {
        db.run(&format!(
            "SELECT pgflow.create_flow('{flow}', base_delay => 0, max_attempts => 2, queue => 'shared', key_path => '{{key}}');
             SELECT pgflow.add_step('{flow}', 'a'); SELECT pgflow.add_step('{flow}', 'm', ARRAY['a'], step_type => 'map', queue => 'maps', when_exhausted => 'skip');
             SELECT pgflow.add_step('{flow}', 'b', ARRAY['a'], when_exhausted => 'skip-cascade'); SELECT pgflow.add_step('{flow}', 'c', ARRAY['b', 'm']);
             SELECT pgflow.add_step('{flow}', 'd', ARRAY['c'], required_input_pattern => '{{\"c\": 1}}')"
        ))
        .await;
    }
    let start = Instant::now();
    let left = Arc::new(AtomicU64::new(4));
    let mut tasks = Vec::new();
    for n in 0..4 {
        let (db, left) = (db.clone(), left.clone());
        tasks.push(tokio::spawn(async move {
            starter(&db, fastrand::Rng::with_seed(seed ^ n)).await;
            left.fetch_sub(1, Ordering::Relaxed);
        }));
    }
    for n in 0..5 {
        let (db, left) = (db.clone(), left.clone());
        tasks.push(tokio::spawn(async move {
            chaos_worker(&db, fastrand::Rng::with_seed(seed ^ (100 + n)), &left, start).await
        }));
    }
    {
        let (db, left) = (db.clone(), left.clone());
        tasks.push(tokio::spawn(
            async move { operator(&db, fastrand::Rng::with_seed(seed ^ 1000), &left).await },
        ));
    }
    for task in tasks {
        task.await.expect("nobody panics");
    }
    println!("{:?}", start.elapsed());
    assert_eq!(deadlocks(&db).await, 0);
    assert!(all_ended(&db).await);
    db.check().await;
}

async fn starter(db: &Database, mut rng: fastrand::Rng) {
    for _ in 0..30 {
        let flow = if rng.bool() { "one" } else { "two" };
        let inputs: Vec<Value> =
            (0..rng.usize(1..6)).map(|_| json!({"key": rng.u32(..5), "x": rng.u32(..)})).collect();
        sqlx::query("SELECT pgflow.start_flows($1, $2)")
            .bind(flow)
            .bind(inputs)
            .execute(&db.pool)
            .await
            .expect("they start");
    }
}

async fn chaos_worker(db: &Database, mut rng: fastrand::Rng, left: &AtomicU64, start: Instant) {
    let worker = db.worker(&["shared", "maps"]).await;
    while start.elapsed() < DEADLINE {
        let queues = if rng.bool() { ["shared", "maps"] } else { ["maps", "shared"] };
        let tasks = db.read(worker, &queues, rng.i32(1..40)).await;
        if tasks.is_empty() {
            if left.load(Ordering::Relaxed) == 0 && all_ended(db).await {
                return;
            }
            tokio::task::yield_now().await;
            continue;
        }
        let (mut done, mut failed, mut back) = (Vec::new(), Vec::new(), Vec::new());
        for task in tasks {
            match rng.u32(..100) {
                0..15 => failed.push((task, "at random")),
                15..18 => back.push(task),
                _ => {
                    let output = match task.step_slug.as_str() {
                        "a" if rng.u32(..20) == 0 => json!("no array"),
                        "a" => json!(vec![0; rng.usize(..8)]),
                        _ => json!(rng.u32(..2)),
                    };
                    done.push((task, output));
                }
            }
        }
        rng.shuffle(&mut done);
        // Others cancel and requeue meanwhile: any outcome is right, and none twice.
        let outcomes = db.complete(&done).await;
        assert_eq!(outcomes.len(), done.len());
        db.fail(&failed).await;
        release(db, &back).await;
        db.run("SELECT pgflow.requeue_stalled_tasks()").await;
    }
    panic!("not done after {DEADLINE:?}");
}

/// Somebody at the console, and the clock.
async fn operator(db: &Database, mut rng: fastrand::Rng, left: &AtomicU64) {
    let mut last = false;
    loop {
        let runs: Vec<(Uuid, String)> = sqlx::query_as("SELECT run_id, status FROM pgflow.runs")
            .fetch_all(&db.pool)
            .await
            .expect("a look");
        let counts = runs.iter().fold(HashMap::new(), |mut counts: HashMap<&str, u32>, (_, status)| {
            *counts.entry(status.as_str()).or_default() += 1;
            counts
        });
        if left.load(Ordering::Relaxed) == 0 && !counts.contains_key("started") {
            return;
        }
        let Some((run, status)) = rng.choice(&runs) else { continue };
        let action = match (rng.u32(..10), status.as_str()) {
            (0..3, "started" | "waiting") => format!("SELECT pgflow.cancel_run('{run}')"),
            // Not for ever: else this would never end.
            (0..4, "failed" | "cancelled") if left.load(Ordering::Relaxed) > 0 => format!("SELECT pgflow.retry_run('{run}')"),
            (4, "completed" | "failed") => format!("SELECT pgflow.delete_run('{run}')"),
            (5, _) => "SELECT pgflow.prune_data_older_than('1 second', max_runs => 3)".into(),
            (6, _) => "UPDATE pgflow.workers SET last_heartbeat_at = last_heartbeat_at - interval '1 hour'; SELECT pgflow.requeue_tasks_of_dead_workers('1 s')".into(),
            (7, _) if left.load(Ordering::Relaxed) == 0 && !last => {
                last = true;
                "SELECT pgflow.cancel_flow('one')".into()
            }
            _ => {
                tokio::task::yield_now().await;
                continue;
            }
        };
        match sqlx::raw_sql(&action).execute(&db.pool).await {
            Ok(_) => {}
            // Somebody else, which is the pruning, was first.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("PF002") => {}
            Err(error) => panic!("{action}\n{error}"),
        }
    }
}

/// Two starters of one key at the same moment, again and again: never two runs of it at once, and never one that waits for nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_run_of_a_key_is_never_forgotten() {
    println!("LANEWAY_SEED=none: nothing is random but the schedule");
    let db = Arc::new(database().await);
    db.run("SELECT pgflow.create_flow('k', key_path => '{k}'); SELECT pgflow.add_step('k', 'a')").await;
    let start = Instant::now();
    let starters: Vec<_> = (0..3)
        .map(|_| {
            let db = db.clone();
            tokio::spawn(async move {
                for _ in 0..60 {
                    db.start("k", &json!({"k": "same"})).await;
                }
            })
        })
        .collect();
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let db = db.clone();
            tokio::spawn(async move {
                let worker = db.worker(&["k"]).await;
                let mut done = 0;
                while db.count("SELECT count(*) FROM pgflow.runs WHERE status = 'completed'").await < 180 {
                    assert!(start.elapsed() < DEADLINE, "somebody waits for ever");
                    let tasks: Vec<_> =
                        db.read(worker, &["k"], 10).await.into_iter().map(|it| (it, json!(1))).collect();
                    assert!(tasks.len() <= 1, "one run of a key at a time");
                    if !tasks.is_empty() {
                        done += db.complete(&tasks).await.len();
                    }
                }
                done
            })
        })
        .collect();
    for starter in starters {
        starter.await.expect("starts");
    }
    let mut done = 0;
    for worker in workers {
        done += worker.await.expect("works");
    }
    assert_eq!(done, 180);
    assert_eq!(
        db.get("SELECT bool_and(started_at >= before) FROM (SELECT started_at, lag(completed_at) OVER (ORDER BY seq) AS before FROM pgflow.runs) x").await,
        "true",
        "in the order in which they were started, one after another"
    );
    assert_eq!(deadlocks(&db).await, 0);
    db.check().await;
}

/// A read and a completion look at what is alive, and nothing else, however much has been finished.
#[tokio::test]
async fn the_ways_to_live_tasks_do_not_lead_over_finished_ones() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.start_flows('f', array_fill('1'::jsonb, ARRAY[5000]))",
    )
    .await;
    assert_eq!(db.drain(&["f"], |_| json!(1)).await, 5000);
    db.run("SELECT pgflow.start_flows('f', array_fill('1'::jsonb, ARRAY[100]))").await;
    db.run("VACUUM ANALYZE").await;
    for (query, index) in [
        (
            "SELECT FROM pgflow.step_tasks WHERE queue = 'f' AND status = 'queued'",
            "idx_step_tasks_queue_status",
        ),
        (
            "SELECT FROM pgflow.step_tasks WHERE status = 'started' AND queue IS NOT NULL AND started_at < now()",
            "idx_step_tasks",
        ),
        ("SELECT FROM pgflow.step_tasks WHERE queue = 'f' AND message_id = 5050", "unique_msg_per_queue"),
        (
            "SELECT FROM pgflow.runs WHERE flow_slug = 'f' AND key = 'x' AND status = 'waiting' ORDER BY seq LIMIT 1",
            "idx_runs_live_key",
        ),
    ] {
        let rows: Vec<String> =
            sqlx::query_scalar(&format!("EXPLAIN {query}")).fetch_all(&db.pool).await.expect("a plan");
        let plan = rows.join("\n");
        assert!(plan.contains(index) && !plan.contains("Seq Scan"), "{query}\n{plan}");
    }
    assert_eq!(
        db.count("SELECT reltuples FROM pg_class WHERE relname = 'idx_step_tasks_queue_status'").await,
        100
    );
}
