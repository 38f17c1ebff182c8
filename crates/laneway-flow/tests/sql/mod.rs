//! A database of its own for each test, on a server that the tests of a binary share, and a few words to talk to it.
//!
//! The server lives as long as a test holds a [`Database`]; a database is copied from one that was migrated once.

// Each binary of tests uses its own part of this.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use laneway_servers::{Server, postgres};
use serde_json::Value;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::types::Uuid;
use sqlx::{Executor, PgConnection, Row};
use tokio::sync::Mutex;

/// More than any test needs at once, and few enough for the server.
const CONNECTIONS: u32 = 12;

struct Cluster {
    /// Ends with the last database. Nobody locks it: it is here to be dropped.
    _server: std::sync::Mutex<Server>,
    address: SocketAddr,
    next: AtomicU32,
}

static CLUSTER: Mutex<Weak<Cluster>> = Mutex::const_new(Weak::new());

/// A migrated database.
pub(crate) struct Database {
    pub(crate) pool: PgPool,
    pub(crate) url: String,
    cluster: Arc<Cluster>,
}

/// What a worker gets from `read_and_start`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Task {
    pub(crate) queue: String,
    pub(crate) msg_id: i64,
    pub(crate) flow_slug: String,
    pub(crate) run_id: Uuid,
    pub(crate) step_slug: String,
    pub(crate) task_index: i32,
    pub(crate) input: Value,
    pub(crate) flow_input: Option<Value>,
    pub(crate) attempts: i32,
    pub(crate) start: i64,
    pub(crate) timeout: i32,
}

/// A new copy of the migrated database.
pub(crate) async fn database() -> Database {
    let cluster = cluster().await;
    let name = format!("t{}", cluster.next.fetch_add(1, Ordering::Relaxed));
    let admin = connect(&url_of(cluster.address, "postgres")).await;
    sqlx::query(&format!("CREATE DATABASE {name} TEMPLATE migrated")).execute(&admin).await.expect("a copy");
    admin.close().await;
    let url = url_of(cluster.address, &name);
    Database { pool: connect(&url).await, url, cluster }
}

/// A database without anything in it.
pub(crate) async fn empty_database() -> Database {
    let cluster = cluster().await;
    let name = format!("e{}", cluster.next.fetch_add(1, Ordering::Relaxed));
    let admin = connect(&url_of(cluster.address, "postgres")).await;
    sqlx::query(&format!("CREATE DATABASE {name}")).execute(&admin).await.expect("a database");
    admin.close().await;
    let url = url_of(cluster.address, &name);
    Database { pool: connect(&url).await, url, cluster }
}

async fn cluster() -> Arc<Cluster> {
    let mut shared = CLUSTER.lock().await;
    if let Some(cluster) = shared.upgrade() {
        return cluster;
    }
    let cluster = migrated(postgres::start().expect("Postgres is installed: cargo xtask setup")).await;
    *shared = Arc::downgrade(&cluster);
    cluster
}

/// A migrated database on a server of its own, of another version than the other tests'.
pub(crate) async fn database_of_version(version: u32) -> Database {
    let server = postgres::start_version(version).expect("it is installed: cargo xtask setup");
    let cluster = migrated(server).await;
    let url = url_of(cluster.address, "migrated");
    Database { pool: connect(&url).await, url, cluster }
}

async fn migrated(server: Server) -> Arc<Cluster> {
    let address = server.address();
    let admin = connect(&url_of(address, "postgres")).await;
    sqlx::query("CREATE DATABASE migrated").execute(&admin).await.expect("a database");
    admin.close().await;
    let template = connect(&url_of(address, "migrated")).await;
    laneway_flow::migrate(&template).await.expect("the migrations apply");
    template.close().await;
    Arc::new(Cluster { address, _server: server.into(), next: AtomicU32::new(0) })
}

pub(crate) async fn connect(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(CONNECTIONS).connect(url).await.expect("the server answers")
}

fn url_of(address: SocketAddr, database: &str) -> String {
    format!("postgres://{}@{address}/{database}", postgres::USER)
}

impl Database {
    /// Runs statements.
    pub(crate) async fn run(&self, sql: &str) {
        if let Err(error) = self.pool.execute(sqlx::raw_sql(sql)).await {
            panic!("{sql}\n{error}");
        }
    }

    /// The one value of a query, as Postgres writes it; an empty text for NULL.
    pub(crate) async fn get(&self, query: &str) -> String {
        let mut connection = self.pool.acquire().await.expect("a connection");
        get(&mut connection, query).await
    }

    pub(crate) async fn count(&self, query: &str) -> i64 {
        self.get(query).await.parse().expect("a number")
    }

    /// The code and the message of the error that these statements end with.
    pub(crate) async fn refusal(&self, sql: &str) -> (String, String) {
        refusal(self.pool.execute(sqlx::raw_sql(sql)).await.map(drop), sql)
    }

    /// The same database, in the eyes of another role.
    pub(crate) async fn as_role(&self, role: &str) -> Self {
        let url = self.url.replacen(postgres::USER, role, 1);
        Self { pool: connect(&url).await, url, cluster: self.cluster.clone() }
    }

    /// A worker that is known to the database.
    pub(crate) async fn worker(&self, queues: &[&str]) -> Uuid {
        let id = Uuid::from_u128(fastrand::u128(..));
        sqlx::query("SELECT pgflow.start_worker($1, 'test', $2)")
            .bind(id)
            .bind(queues.iter().map(ToString::to_string).collect::<Vec<_>>())
            .execute(&self.pool)
            .await
            .expect("a worker");
        id
    }

    /// Starts a run.
    pub(crate) async fn start(&self, flow: &str, input: &Value) -> Uuid {
        sqlx::query_scalar("SELECT run_id FROM pgflow.start_flow($1, $2)")
            .bind(flow)
            .bind(input)
            .fetch_one(&self.pool)
            .await
            .expect("the flow starts")
    }

    /// Reads and starts up to `limit` tasks of each queue.
    pub(crate) async fn read(&self, worker: Uuid, queues: &[&str], limit: i32) -> Vec<Task> {
        self.try_read(worker, queues, limit, None).await.expect("the queues are there")
    }

    pub(crate) async fn try_read(
        &self,
        worker: Uuid,
        queues: &[&str],
        limit: i32,
        flows: Option<&[&str]>,
    ) -> Result<Vec<Task>, sqlx::Error> {
        let rows = sqlx::query("SELECT * FROM pgflow.read_and_start($1, $2, $3, $4)")
            .bind(queues.iter().map(ToString::to_string).collect::<Vec<_>>())
            .bind(vec![limit; queues.len()])
            .bind(worker)
            .bind(flows.map(|it| it.iter().map(ToString::to_string).collect::<Vec<_>>()))
            .fetch_all(&self.pool)
            .await?;
        Ok(rows.iter().map(Task::from_row).collect())
    }

    /// Completes tasks, each with an output, and says what came of each.
    pub(crate) async fn complete(&self, tasks: &[(Task, Value)]) -> Vec<String> {
        let mut connection = self.pool.acquire().await.expect("a connection");
        complete(&mut connection, tasks).await.expect("completing does not fail")
    }

    /// Fails tasks, each with an error, and says what came of each and after how many seconds it is tried again.
    pub(crate) async fn fail(&self, tasks: &[(Task, &str)]) -> Vec<(String, Option<i32>)> {
        sqlx::query_as("SELECT outcome, retry_in FROM pgflow.fail_tasks($1, $2, $3, $4)")
            .bind(tasks.iter().map(|(it, _)| it.run_id).collect::<Vec<_>>())
            .bind(tasks.iter().map(|(it, _)| it.step_slug.clone()).collect::<Vec<_>>())
            .bind(tasks.iter().map(|(it, _)| it.task_index).collect::<Vec<_>>())
            .bind(tasks.iter().map(|(_, error)| error.to_string()).collect::<Vec<_>>())
            .fetch_all(&self.pool)
            .await
            .expect("failing does not fail")
    }

    /// Does all that these queues have and will have from it, with `handler` for each task; returns how many there were.
    pub(crate) async fn drain(&self, queues: &[&str], mut handler: impl FnMut(&Task) -> Value) -> usize {
        let worker = self.worker(queues).await;
        let mut done = 0;
        loop {
            let tasks = self.read(worker, queues, 100).await;
            if tasks.is_empty() {
                return done;
            }
            done += tasks.len();
            let outputs: Vec<_> = tasks
                .into_iter()
                .map(|task| {
                    let output = handler(&task);
                    (task, output)
                })
                .collect();
            for outcome in self.complete(&outputs).await {
                assert_eq!(outcome, "completed");
            }
        }
    }

    /// The status of a run.
    pub(crate) async fn status(&self, run: Uuid) -> String {
        self.get(&format!("SELECT status FROM pgflow.runs WHERE run_id = '{run}'")).await
    }

    /// The status of a step, with the reason if it was skipped.
    pub(crate) async fn step(&self, run: Uuid, step: &str) -> String {
        self.get(&format!(
            "SELECT status || coalesce(':' || skip_reason, '') FROM pgflow.step_states WHERE run_id = '{run}' AND step_slug = '{step}'"
        ))
        .await
    }

    /// What a run put out.
    pub(crate) async fn output(&self, run: Uuid) -> Value {
        let text = self.get(&format!("SELECT output FROM pgflow.runs WHERE run_id = '{run}'")).await;
        serde_json::from_str(&text).unwrap_or(Value::Null)
    }

    /// What must be true of every database at rest, whatever happened in it.
    pub(crate) async fn check(&self) {
        for (rule, query) in RULES {
            let broken = self.count(&format!("SELECT count(*) FROM ({query}) broken")).await;
            assert_eq!(broken, 0, "{rule}");
        }
        for queue in
            self.get("SELECT string_agg(DISTINCT queue, ',') FROM pgflow.step_tasks").await.split(',')
        {
            if queue.is_empty()
                || self.get(&format!("SELECT pgflow._queue_exists('{queue}')")).await == "false"
            {
                continue;
            }
            let strays = self
                .count(&format!(
                    "SELECT count(*) FROM pgmq.q_{queue} q FULL JOIN \
                     (SELECT t.* FROM pgflow.step_tasks t JOIN pgflow.runs r USING (run_id) \
                      WHERE t.queue = '{queue}' AND t.status IN ('queued', 'started') AND r.status = 'started') t \
                     ON t.message_id = q.msg_id WHERE t.run_id IS NULL OR q.msg_id IS NULL"
                ))
                .await;
            assert_eq!(strays, 0, "every live task has a message in {queue}, and every message a live task");
        }
    }
}

/// Each query finds what must not be.
const RULES: &[(&str, &str)] = &[
    (
        "a step that has started has as many tasks left as it counts",
        "SELECT FROM pgflow.step_states s WHERE s.status = 'started' AND s.remaining_tasks <> (SELECT count(*) FROM pgflow.step_tasks t \
         WHERE t.run_id = s.run_id AND t.step_slug = s.step_slug AND t.status IN ('queued', 'started'))",
    ),
    (
        "a completed step has all of its tasks completed, with indexes without a gap",
        "SELECT FROM pgflow.step_states s WHERE s.status = 'completed' AND s.initial_tasks <> (SELECT count(*) FROM pgflow.step_tasks t \
         WHERE t.run_id = s.run_id AND t.step_slug = s.step_slug AND t.status = 'completed' AND t.task_index < s.initial_tasks)",
    ),
    (
        "a run has as many steps left as it counts",
        "SELECT FROM pgflow.runs r WHERE r.status IN ('started', 'waiting', 'completed') AND r.remaining_steps <> (SELECT count(*) \
         FROM pgflow.step_states s WHERE s.run_id = r.run_id AND s.status IN ('created', 'started', 'failed'))",
    ),
    (
        "a step waits for as many others as it counts",
        "SELECT FROM pgflow.step_states s WHERE s.status = 'created' AND s.remaining_deps <> (SELECT count(*) FROM pgflow.deps d \
         JOIN pgflow.step_states x ON x.run_id = s.run_id AND x.step_slug = d.dep_slug \
         WHERE d.flow_slug = s.flow_slug AND d.step_slug = s.step_slug AND x.status IN ('created', 'started'))",
    ),
    (
        "a run that has ended has nothing that is alive",
        "SELECT FROM pgflow.runs r JOIN pgflow.step_tasks t USING (run_id) \
         WHERE r.status IN ('completed', 'failed', 'cancelled') AND t.status IN ('queued', 'started')",
    ),
    (
        "a run that has ended has no step that has not",
        "SELECT FROM pgflow.runs r JOIN pgflow.step_states s USING (run_id) \
         WHERE r.status IN ('completed', 'failed', 'cancelled') AND s.status IN ('created', 'started')",
    ),
    (
        "a run that has started and not ended has something to wait for",
        "SELECT FROM pgflow.runs r WHERE r.status = 'started' AND NOT EXISTS (SELECT FROM pgflow.step_tasks t \
         WHERE t.run_id = r.run_id AND t.status IN ('queued', 'started'))",
    ),
    (
        "at most one run of a key has started and not ended",
        "SELECT FROM pgflow.runs r WHERE r.key IS NOT NULL AND r.status = 'started' GROUP BY r.flow_slug, r.key HAVING count(*) > 1",
    ),
    (
        "a run that waits for its turn has one of its key before it",
        "SELECT FROM pgflow.runs r WHERE r.status = 'waiting' AND NOT EXISTS (SELECT FROM pgflow.runs o \
         WHERE o.flow_slug = r.flow_slug AND o.key = r.key AND o.status = 'started')",
    ),
];

impl Task {
    fn from_row(row: &sqlx::postgres::PgRow) -> Self {
        Self {
            queue: row.get("queue"),
            msg_id: row.get("msg_id"),
            flow_slug: row.get("flow_slug"),
            run_id: row.get("run_id"),
            step_slug: row.get("step_slug"),
            task_index: row.get("task_index"),
            input: row.get("input"),
            flow_input: row.get("flow_input"),
            attempts: row.get("attempts_count"),
            start: row.get("start_number"),
            timeout: row.get("timeout"),
        }
    }
}

pub(crate) async fn get(connection: &mut PgConnection, query: &str) -> String {
    sqlx::query_scalar::<_, Option<String>>(&format!("SELECT ({query})::text"))
        .fetch_one(connection)
        .await
        .unwrap_or_else(|error| panic!("{query}\n{error}"))
        .unwrap_or_default()
}

pub(crate) async fn complete(
    connection: &mut PgConnection,
    tasks: &[(Task, Value)],
) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar("SELECT outcome FROM pgflow.complete_tasks($1, $2, $3, $4)")
        .bind(tasks.iter().map(|(it, _)| it.run_id).collect::<Vec<_>>())
        .bind(tasks.iter().map(|(it, _)| it.step_slug.clone()).collect::<Vec<_>>())
        .bind(tasks.iter().map(|(it, _)| it.task_index).collect::<Vec<_>>())
        .bind(tasks.iter().map(|(_, output)| output.clone()).collect::<Vec<_>>())
        .fetch_all(connection)
        .await
}

pub(crate) fn refusal(outcome: Result<(), sqlx::Error>, what: &str) -> (String, String) {
    match outcome {
        Err(sqlx::Error::Database(error)) => {
            (error.code().unwrap_or_default().into_owned(), error.message().to_owned())
        }
        other => panic!("{what}\nshould have been refused, and was {other:?}"),
    }
}
