//! Crashes: worker processes killed at random, the database killed under load, many workers on one run. Whatever happens, no task is lost,
//! none is completed twice, and every run ends with the right result.
//!
//! The worker processes are this very test binary, asked for its one ignored test. Choices come from a seed that is printed first;
//! `LANEWAY_FLOW_SEED` repeats it.

mod support;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use laneway_flow::{Context, Flow, OwnQueue, Settings, Start, Steps, Worker, client};
use sqlx::PgPool;
use support::{Database, PATIENCE, connect};

/// Set for a child: where its database is.
const CHILD: &str = "LANEWAY_FLOW_CHILD";

/// A root, a map over what it gives, and a sum; the map's tasks leave a trace in their completing transaction.
struct Traced;

impl Flow for Traced {
    const SLUG: &'static str = "traced";
    type Input = u64;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let numbers =
            flow.array("numbers").max_attempts(50).run(|upto: u64, _| async move { Ok((0..upto).collect()) });
        let traced = flow.map("traced", &numbers).max_attempts(50).commit(
            |number: u64, connection, context: Context<Self>| {
                Box::pin(async move {
                    // Long enough to be killed in the middle of.
                    tokio::time::sleep(Duration::from_millis(20 + number % 7 * 10)).await; // paced: stands for work
                    let trace = sqlx::query("INSERT INTO traces VALUES ($1, $2)")
                        .bind(context.run_id())
                        .bind(number as i64);
                    trace.execute(connection).await?;
                    Ok(number)
                })
            },
        );
        flow.step("sum")
            .after(&traced)
            .max_attempts(50)
            .run(|numbers: Vec<u64>, _| async move { Ok(numbers.into_iter().sum::<u64>()) });
    }
}

const WIDTH: u64 = 12;

fn seed() -> u64 {
    let given = std::env::var("LANEWAY_FLOW_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("LANEWAY_FLOW_SEED={seed}");
    seed
}

fn settings() -> Settings {
    Settings {
        heartbeat_seconds: 1,
        dead_after_seconds: 2,
        visibility_timeout: 3,
        max_concurrent: 4,
        max_poll_seconds: 1,
        ..Settings::default()
    }
}

async fn prepare(database: &Database) {
    let table = "CREATE TABLE traces (run_id uuid NOT NULL, number bigint NOT NULL)";
    sqlx::query(table).execute(&database.pool).await.unwrap();
    client::compile(&database.pool, Traced.define().unwrap().definition(), false).await.unwrap();
}

async fn check(database: &Database, runs: &[uuid::Uuid]) {
    for &run in runs {
        let state = database.end_of(run).await;
        assert_eq!(state.output_of::<u64>("sum"), Some((0..WIDTH).sum()), "{:#}", state.json());
    }
    let (runs, tasks) = (runs.len() as i64, runs.len() as i64 * WIDTH as i64);
    assert_eq!(database.count("SELECT count(*) FROM traces").await, tasks, "every trace once");
    assert_eq!(
        database.count("SELECT count(*) FROM (SELECT DISTINCT run_id, number FROM traces) t").await,
        tasks
    );
    assert_eq!(
        database.count("SELECT count(*) FROM pgflow.step_tasks WHERE status = 'completed'").await,
        tasks + 2 * runs
    );
    assert_eq!(database.count("SELECT count(*) FROM pgflow.step_tasks WHERE status <> 'completed'").await, 0);
    assert_eq!(database.count("SELECT count(*) FROM pgmq.q_traced").await, 0, "no message is left");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a worker process of the test below"]
async fn child() {
    let Ok(url) = std::env::var(CHILD) else { return };
    let pool = connect(&url).await;
    let worker =
        Worker::on(&pool).serve(Traced.define().unwrap()).settings(settings()).start().await.unwrap();
    worker.asked_to_stop().await;
    worker.stop().await;
}

fn spawn(url: &str) -> Child {
    let program = std::env::current_exe().expect("this binary is somewhere");
    let mut command = Command::new(program);
    command.args(["child", "--exact", "--ignored", "--nocapture"]).env(CHILD, url);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("it starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_lose_nothing_and_do_nothing_twice() {
    let mut random = fastrand::Rng::with_seed(seed());
    let database = Database::start().await;
    prepare(&database).await;
    let runs = client::start_many(&database.pool, "traced", &[WIDTH; 30]).await.unwrap();
    let mut children: Vec<Child> = (0..3).map(|_| spawn(&database.url())).collect();
    let done = "SELECT count(*) FROM pgflow.step_tasks WHERE status = 'completed'";
    for kill in 1..=4 {
        // A kill for each fifth of the work: while there is some.
        let wanted = (runs.len() as i64 * (WIDTH as i64 + 2)) * kill / 6;
        let reached = async {
            while database.count(done).await < wanted {
                tokio::time::sleep(Duration::from_millis(10)).await; // paced: another process works
            }
        };
        tokio::time::timeout(PATIENCE, reached).await.expect("the work goes on");
        let victim = random.usize(..children.len());
        children[victim].kill().expect("it runs");
        children[victim].wait().expect("it is gone");
        children[victim] = spawn(&database.url());
    }
    check(&database, &runs).await;
    for mut child in children {
        child.kill().expect("it runs");
        child.wait().expect("it is gone");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_killed_under_load_loses_nothing() {
    let mut random = fastrand::Rng::with_seed(seed());
    let mut database = Database::start().await;
    prepare(&database).await;
    let worker =
        Worker::on(&database.pool).serve(Traced.define().unwrap()).settings(settings()).on_trouble(|_| ());
    let worker = worker.start().await.unwrap();
    let runs = client::start_many(&database.pool, "traced", &[WIDTH; 20]).await.unwrap();
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(random.u64(100..600))).await; // paced: a random moment
        let mut server = database.server;
        database.server = tokio::task::spawn_blocking(move || {
            server.kill().expect("it was there");
            resume(&mut server);
            server
        })
        .await
        .unwrap();
    }
    check(&database, &runs).await;
    worker.stop().await;
}

/// Starts a killed server again. Its last connections may hold on to its memory for a moment, and it refuses to start beside them.
fn resume(server: &mut laneway_servers::Server) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while let Err(error) = server.resume() {
        assert!(std::time::Instant::now() < deadline, "it does not recover: {error:#}");
        std::thread::sleep(Duration::from_millis(100)); // paced: others end meanwhile
    }
}

/// A map over many, and nothing to do.
struct Wide;

impl Flow for Wide {
    const SLUG: &'static str = "wide";
    type Input = Vec<u64>;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let each = flow.map_input("each").run(|number: u64, _| async move { Ok(number + 1) });
        flow.step("all")
            .after(&each)
            .run(|numbers: Vec<u64>, _| async move { Ok((numbers.len(), numbers.iter().sum::<u64>())) });
    }
}

async fn wide_worker(pool: &PgPool, random: &mut fastrand::Rng) -> Worker {
    let settings = Settings {
        max_concurrent: random.usize(1..20),
        batch_size: random.usize(1..120),
        ..Settings::default()
    };
    eprintln!("  a worker with {} slots and batches of {}", settings.max_concurrent, settings.batch_size);
    Worker::on(pool).serve(Wide.define().unwrap()).settings(settings).start().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_workers_on_one_wide_run_neither_lock_up_nor_miscount() {
    let mut random = fastrand::Rng::with_seed(seed());
    let rounds = std::env::var("LANEWAY_FLOW_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let database = Arc::new(Database::start().await);
    for _ in 0..rounds {
        let (mut workers, mut pools) = (Vec::new(), Vec::new());
        for _ in 0..8 {
            let pool = connect(&database.url()).await;
            workers.push(wide_worker(&pool, &mut random).await);
            pools.push(pool);
        }
        let input: Vec<u64> = (0..10_000).collect();
        let run = Start::of::<Wide>(&input).unwrap().on(&database.pool).await.unwrap();
        let state = database.end_of(run).await;
        assert_eq!(
            state.output_of::<(usize, u64)>("all"),
            Some((10_000, (1..=10_000).sum())),
            "{:#}",
            state.json()["run"]
        );
        let mut completed = 0;
        for worker in workers {
            let stats = worker.stop().await.stats;
            assert_eq!(stats.failed + stats.retried, 0, "a deadlock would be a failure");
            completed += stats.completed;
        }
        assert_eq!(completed, 10_001, "each task was completed by one worker, once");
        for pool in pools {
            pool.close().await;
        }
    }
}
