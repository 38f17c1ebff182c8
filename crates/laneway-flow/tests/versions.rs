//! The schema on the oldest Postgres that is supported and on the newest that there is: a short way through all of it. The other tests have the
//! version that Debian has; `LANEWAY_TEST_POSTGRES=14` gives them another.

mod sql;

use laneway_flow::migrate::{VERSION, migrate};
use laneway_servers::postgres;
use serde_json::json;
use sql::{Database, database_of_version};

#[tokio::test]
async fn flows_work_on_the_oldest_and_on_the_newest_postgres() {
    for version in postgres::OTHER_VERSIONS {
        let db = database_of_version(*version).await;
        assert!(
            db.get("SELECT current_setting('server_version_num')").await.starts_with(&version.to_string())
        );
        assert_eq!(migrate(&db.pool).await.expect("a second time").from, VERSION);
        routed_mapped_and_by_hand(&db).await;
        failed_and_retried(&db).await;
        ordered_by_key(&db).await;
        stalled_dropped_and_deleted(&db).await;
        db.check().await;
    }
}

/// Two queues, a map whose results come in order, and a step that somebody completes.
async fn routed_mapped_and_by_hand(db: &Database) {
    db.run(
        "SELECT pgflow.create_flow('data_flow', queue => 'data_processor'); SELECT pgflow.add_step('data_flow', 'fetch');
         SELECT pgflow.add_step('data_flow', 'each', ARRAY['fetch'], step_type => 'map', queue => 'email_worker');
         SELECT pgflow.add_step('data_flow', 'sign', ARRAY['each'], queue => 'false')",
    )
    .await;
    let run = db.start("data_flow", &json!({"n": 3})).await;
    assert_eq!(db.drain(&["data_processor"], |_| json!([1, 2, 3])).await, 1);
    assert_eq!(db.drain(&["data_processor"], |_| json!(null)).await, 0, "the rest is on the other queue");
    assert_eq!(db.drain(&["email_worker"], |task| json!(task.input.as_i64().map(|it| it * it))).await, 3);
    db.run(&format!("SELECT pgflow.complete_task('{run}', 'sign', 0, '\"me\"')")).await;
    assert_eq!((db.status(run).await, db.output(run).await), ("completed".into(), json!({"sign": "me"})));
    assert_eq!(db.get("SELECT output FROM pgflow.step_states WHERE step_slug = 'each'").await, "[1, 4, 9]");
}

/// A failure that is tried again, one that is for good, and a run that goes on; the start that lost its task is fenced off.
async fn failed_and_retried(db: &Database) {
    db.run("SELECT pgflow.create_flow('hard', max_attempts => 2, base_delay => 0); SELECT pgflow.add_step('hard', 'a')").await;
    let run = db.start("hard", &json!({})).await;
    let worker = db.worker(&["hard"]).await;
    let first = db.read(worker, &["hard"], 1).await.remove(0);
    assert_eq!(db.fail(&[(first.clone(), "once")]).await, [("retried".to_owned(), Some(0))]);
    let second = db.read(worker, &["hard"], 1).await.remove(0);
    assert_eq!(db.fail(&[(second, "twice")]).await, [("failed".to_owned(), None)]);
    assert_eq!(db.status(run).await, "failed");
    assert_eq!(db.get("SELECT pgflow.retry_flow('hard')").await, "1");
    let third = db.read(worker, &["hard"], 1).await.remove(0);
    let late = format!("SELECT count(*) FROM pgflow.fail_task('{run}', 'a', 0, 'late', {})", first.start);
    assert_eq!((third.attempts, db.count(&late).await), (1, 0));
    assert_eq!(db.complete(&[(third, json!("done"))]).await, ["completed"]);
    assert_eq!(db.status(run).await, "completed");
}

/// Runs of one key, one after another.
async fn ordered_by_key(db: &Database) {
    db.run(
        "SELECT pgflow.create_flow('keyed', key_path => '{account}'); SELECT pgflow.add_step('keyed', 'a')",
    )
    .await;
    let input = |account: &str, number: i32| json!({"account": account, "number": number});
    for number in 0..4 {
        db.start("keyed", &input(if number % 2 == 0 { "x" } else { "y" }, number)).await;
    }
    assert_eq!(
        db.get("SELECT string_agg(status, ' ' ORDER BY seq) FROM pgflow.runs WHERE flow_slug = 'keyed'")
            .await,
        "started started waiting waiting"
    );
    let mut order = Vec::new();
    db.drain(&["keyed"], |task| {
        order.push(
            task.flow_input.as_ref().expect("a single step has it")["number"].as_i64().expect("a number"),
        );
        json!(null)
    })
    .await;
    order.sort_by_key(|number| number % 2);
    assert_eq!(order, [0, 2, 1, 3]);
}

/// A task whose worker went away, a queue that was dropped, and the end of a flow and its runs.
async fn stalled_dropped_and_deleted(db: &Database) {
    db.run("SELECT pgflow.create_flow('frail'); SELECT pgflow.add_step('frail', 'a')").await;
    let (one, other) = (db.start("frail", &json!({})).await, db.start("frail", &json!({})).await);
    let worker = db.worker(&["frail"]).await;
    assert_eq!(db.read(worker, &["frail"], 1).await.len(), 1);
    db.run(&format!("UPDATE pgflow.workers SET last_heartbeat_at = now() - interval '1 hour', stopped_at = now() WHERE worker_id = '{worker}'")).await;
    assert_eq!(db.get("SELECT pgflow.requeue_tasks_of_dead_workers()").await, "1");
    db.run("SELECT pgmq.drop_queue('frail')").await;
    assert_eq!(db.get("SELECT pgflow.repair_queues(ARRAY['frail'])").await, "2");
    assert_eq!(db.drain(&["frail"], |_| json!(1)).await, 2);
    assert_eq!((db.status(one).await, db.status(other).await), ("completed".into(), "completed".into()));
    assert_eq!(db.get(&format!("SELECT pgflow.delete_run('{one}')")).await, "true");
    assert_eq!(db.get("SELECT pgflow.prune_data_older_than(interval '0', 'frail')").await, "1");
    db.run("SELECT pgflow.delete_flow_and_data('frail')").await;
    assert_eq!(db.get("SELECT pgflow._queue_exists('frail')").await, "false");
}
