//! The contract of the schema `pgflow`, step by step: migrations, kinds of steps, conditions, retries, stalls, runs and their keys, what is one
//! transaction, bad input, and rights. Queue routing is in `sql_routing.rs`, many workers at once in `sql_concurrency.rs`.

mod sql;

use laneway_flow::migrate::{MigrateError, VERSION, migrate, schema_version};
use serde_json::{Value, json};
use sql::{Task, complete, database, empty_database, get, refusal};
use sqlx::Connection;
use sqlx::postgres::PgListener;
use sqlx::types::Uuid;

// Migrations.

#[tokio::test]
async fn migrating_twice_and_from_two_places_at_once_is_migrating_once() {
    let db = empty_database().await;
    assert_eq!(schema_version(&db.pool).await.expect("it answers"), 0);
    // One of them with a pool that has a single connection, as a small service has.
    let narrow =
        sqlx::postgres::PgPoolOptions::new().max_connections(1).connect(&db.url).await.expect("connects");
    let (one, other) = tokio::join!(migrate(&db.pool), migrate(&narrow));
    let mut from = [one.expect("migrates").from, other.expect("migrates").from];
    from.sort_unstable();
    assert_eq!(from, [0, VERSION], "one did it, the other found it done");
    let again = migrate(&db.pool).await.expect("a third time");
    assert_eq!((again.from, again.to), (VERSION, VERSION));
    assert_eq!(schema_version(&db.pool).await.expect("it answers"), VERSION);
    assert_eq!(db.count("SELECT count(*) FROM pgflow.migrations").await, i64::from(VERSION));
}

#[tokio::test]
async fn a_newer_a_changed_and_a_foreign_schema_are_refused() {
    let db = database().await;
    db.run("INSERT INTO pgflow.migrations (version, name, checksum) VALUES (999, 'of the future', '')").await;
    let error = migrate(&db.pool).await.expect_err("newer");
    assert!(matches!(error, MigrateError::Newer { found: 999, known: VERSION }), "{error}");
    db.run("DELETE FROM pgflow.migrations WHERE version = 999; UPDATE pgflow.migrations SET checksum = 'x' WHERE version = 2").await;
    let error = migrate(&db.pool).await.expect_err("changed");
    assert!(matches!(error, MigrateError::Changed { version: 2, .. }), "{error}");

    let db = empty_database().await;
    db.run("CREATE SCHEMA pgflow; CREATE TABLE pgflow.flows (flow_slug text)").await;
    assert!(matches!(migrate(&db.pool).await, Err(MigrateError::Foreign)));
}

#[tokio::test]
async fn a_schema_that_belongs_to_another_role_is_refused() {
    let db = empty_database().await;
    let name = db.get("SELECT current_database()").await;
    db.run(&format!(
        "CREATE ROLE schemer; CREATE ROLE migrator LOGIN; GRANT CREATE ON DATABASE {name} TO migrator, schemer;
         CREATE SCHEMA pgflow AUTHORIZATION schemer; GRANT ALL ON SCHEMA pgflow TO migrator"
    ))
    .await;
    let mere = db.as_role("migrator").await;
    let error = migrate(&mere.pool).await.expect_err("what it makes there could be replaced by the other");
    assert!(matches!(&error, MigrateError::Owner { owner } if owner == "schemer"), "{error}");
    assert!(error.to_string().contains("ALTER SCHEMA pgflow OWNER TO"), "{error}");
    assert_eq!(db.count("SELECT count(*) FROM pg_proc WHERE pronamespace = 'pgflow'::regnamespace").await, 0);
    db.run("ALTER SCHEMA pgflow OWNER TO migrator").await;
    assert_eq!(migrate(&mere.pool).await.expect("it is its own now").to, VERSION);
}

// Steps.

#[tokio::test]
async fn a_chain_passes_outputs_by_name_and_the_leaves_are_the_output() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.add_step('f', 'b', ARRAY['a']);
         SELECT pgflow.add_step('f', 'c', ARRAY['a']); SELECT pgflow.add_step('f', 'd', ARRAY['b', 'c']); SELECT pgflow.add_step('f', 'e', ARRAY['a'])",
    )
    .await;
    let run = db.start("f", &json!({"n": 1})).await;
    let mut seen = Vec::new();
    db.drain(&["f"], |task| {
        seen.push((task.step_slug.clone(), task.input.clone(), task.flow_input.clone()));
        json!(format!("{}!", task.step_slug))
    })
    .await;
    let flow_input = Some(json!({"n": 1}));
    assert_eq!(seen[0], ("a".into(), json!({}), flow_input.clone()));
    assert_eq!(seen.last(), Some(&("d".into(), json!({"b": "b!", "c": "c!"}), flow_input)));
    assert_eq!(seen.len(), 5);
    assert_eq!(db.output(run).await, json!({"d": "d!", "e": "e!"}));
    db.check().await;
    // Looked at as a whole.
    let whole: Value =
        serde_json::from_str(&db.get(&format!("SELECT pgflow.get_run_with_states('{run}')")).await)
            .expect("json");
    assert_eq!(whole["run"]["status"], "completed");
    assert_eq!(whole["steps"].as_array().map(Vec::len), Some(5));
    assert_eq!(whole["steps"][3]["step_slug"], "d");
}

#[tokio::test]
async fn a_map_has_a_task_per_element_and_its_results_in_order() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'root', step_type => 'map');
         SELECT pgflow.add_step('f', 'again', ARRAY['root'], step_type => 'map'); SELECT pgflow.add_step('f', 'sum', ARRAY['again'])",
    )
    .await;
    let run = db.start("f", &json!([3, null, {"x": 1}])).await;
    let worker = db.worker(&["f"]).await;
    let mut tasks = db.read(worker, &["f"], 10).await;
    assert_eq!(
        tasks.iter().map(|it| it.input.clone()).collect::<Vec<_>>(),
        [json!(3), Value::Null, json!({"x": 1})]
    );
    assert!(
        tasks.iter().all(|it| it.flow_input.is_none()),
        "the array is not sent with each of its elements"
    );
    tasks.reverse();
    // One after another, from the last to the first.
    for task in tasks {
        let output = json!([task.task_index, task.input]);
        assert_eq!(db.complete(&[(task, output)]).await, ["completed"]);
    }
    assert_eq!(
        db.get(&format!(
            "SELECT output FROM pgflow.step_states WHERE run_id = '{run}' AND step_slug = 'root'"
        ))
        .await,
        "[[0, 3], [1, null], [2, {\"x\": 1}]]"
    );
    db.drain(&["f"], |task| {
        if task.step_slug == "sum" { task.input["again"].clone() } else { json!(task.task_index * 10) }
    })
    .await;
    assert_eq!(db.output(run).await, json!({"sum": [0, 10, 20]}));
    db.check().await;
}

#[tokio::test]
async fn empty_maps_are_completed_one_after_another_without_a_worker() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'm0', step_type => 'map')").await;
    // More than the original's fifty rounds.
    for n in 1..=60 {
        db.run(&format!("SELECT pgflow.add_step('f', 'm{n}', ARRAY['m{}'], step_type => 'map')", n - 1))
            .await;
    }
    let run = db.start("f", &json!([])).await;
    assert_eq!(db.status(run).await, "completed");
    assert_eq!(db.output(run).await, json!({"m60": []}));
    db.check().await;
}

#[tokio::test]
async fn what_is_no_array_fails_the_run_of_a_map_without_another_attempt() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.add_step('f', 'm', ARRAY['a'], step_type => 'map')").await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    let task = db.read(worker, &["f"], 1).await.remove(0);
    assert_eq!(db.complete(&[(task, json!({"not": "an array"}))]).await, ["type_violation"]);
    assert_eq!(db.status(run).await, "failed");
    assert!(db.get("SELECT error_message FROM pgflow.runs").await.starts_with("TYPE_VIOLATION: "));
    assert_eq!(
        (db.step(run, "a").await, db.step(run, "m").await),
        ("failed".into(), "skipped:run_failed".into())
    );
    db.check().await;
    // The input of a map at the root is looked at before there is a run.
    db.run("SELECT pgflow.create_flow('r'); SELECT pgflow.add_step('r', 'm', step_type => 'map')").await;
    let (code, message) = db.refusal("SELECT pgflow.start_flow('r', '{\"a\": 1}')").await;
    assert_eq!((code.as_str(), message.contains("array")), ("PF001", true), "{message}");
}

#[tokio::test]
async fn a_map_by_hand_is_completed_in_any_order() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', queue => 'false'); SELECT pgflow.add_step('f', 'm', step_type => 'map')").await;
    assert_eq!(db.get("SELECT count(*) FROM pgflow.flow_queues('f')").await, "0");
    let run = db.start("f", &json!(["x", "y"])).await;
    // It waits for somebody as long as it takes, whatever the timeout.
    db.run("UPDATE pgflow.step_tasks SET queued_at = queued_at - interval '1 year', started_at = started_at - interval '1 year'").await;
    assert_eq!(db.count("SELECT pgflow.requeue_stalled_tasks()").await, 0);
    db.run(&format!("SELECT pgflow.complete_task('{run}', 'm', 1, '\"Y\"'); SELECT pgflow.complete_task('{run}', 'm', 0, '\"X\"')")).await;
    assert_eq!(db.output(run).await, json!({"m": ["X", "Y"]}));
    // Failing by hand is for good.
    let run = db.start("f", &json!(["x"])).await;
    db.run(&format!("SELECT pgflow.fail_task('{run}', 'm', 0, 'no')")).await;
    assert_eq!(db.status(run).await, "failed");
    db.check().await;
    let (code, _) = db.refusal("SELECT pgflow.create_flow('g'); SELECT pgflow.add_step('g', 'a', queue => 'false', timeout => 5)").await;
    assert_eq!(code, "PF001", "an option that would mean nothing");
}

/// A flow `name` in which `b` has the given rest of its definition, `c` depends on it, and `d` on `c`.
fn conditional(name: &str, rest: &str) -> String {
    format!(
        "SELECT pgflow.create_flow('{name}', max_attempts => 1); SELECT pgflow.add_step('{name}', 'a');
         SELECT pgflow.add_step('{name}', 'b', ARRAY['a'], {rest}); SELECT pgflow.add_step('{name}', 'c', ARRAY['b', 'a']);
         SELECT pgflow.add_step('{name}', 'm', ARRAY['b'], step_type => 'map'); SELECT pgflow.add_step('{name}', 'd', ARRAY['c'])"
    )
}

#[tokio::test]
async fn conditions_that_do_not_hold_skip_skip_all_or_fail() {
    let db = database().await;
    for (then, run_status, b, c) in [
        ("skip", "completed", "skipped:condition_unmet", "completed"),
        ("skip-cascade", "completed", "skipped:condition_unmet", "skipped:dependency_skipped"),
        ("fail", "failed", "failed", "skipped:run_failed"),
    ] {
        let name = then.replace('-', "_");
        db.run(&conditional(
            &name,
            &format!("required_input_pattern => '{{\"a\": {{\"go\": true}}}}', when_unmet => '{then}'"),
        ))
        .await;
        let run = db.start(&name, &json!({})).await;
        db.drain(&[&name], |task| {
            if task.step_slug == "c" {
                assert_eq!(task.input, json!({"a": {"go": false}}), "what was skipped is absent");
            }
            json!({"go": false})
        })
        .await;
        assert_eq!(db.status(run).await, run_status, "{then}");
        assert_eq!((db.step(run, "b").await.as_str(), db.step(run, "c").await.as_str()), (b, c), "{then}");
        if then == "skip" {
            assert_eq!(
                db.output(run).await,
                json!({"d": {"go": false}, "m": []}),
                "what was skipped is an empty array to a map"
            );
        }
        db.check().await;
    }
    // And where it holds, on the input of the run, and for what is forbidden.
    db.run(
        "SELECT pgflow.create_flow('root'); SELECT pgflow.add_step('root', 'yes', required_input_pattern => '{\"x\": 1}', forbidden_input_pattern => '{\"y\": 1}');
         SELECT pgflow.add_step('root', 'no', forbidden_input_pattern => '{\"x\": 1}')",
    )
    .await;
    let run = db.start("root", &json!({"x": 1, "z": 2})).await;
    assert_eq!(db.step(run, "no").await, "skipped:condition_unmet");
    db.drain(&["root"], |_| json!(1)).await;
    assert_eq!(db.output(run).await, json!({"yes": 1}));
    let run = db.start("root", &json!({"x": 1, "y": 1})).await;
    assert_eq!(
        (db.status(run).await, db.output(run).await),
        ("completed".into(), json!({})),
        "nothing was left to do"
    );
    db.check().await;
}

#[tokio::test]
async fn exhausted_attempts_fail_skip_or_skip_all() {
    let db = database().await;
    for (then, outcome, run_status, b, c) in [
        ("fail", "failed", "failed", "failed", "skipped:run_failed"),
        ("skip", "skipped", "completed", "skipped:handler_failed", "completed"),
        ("skip-cascade", "skipped", "completed", "skipped:handler_failed", "skipped:dependency_skipped"),
    ] {
        let name = then.replace('-', "_");
        db.run(&conditional(&name, &format!("when_exhausted => '{then}'"))).await;
        let run = db.start(&name, &json!({})).await;
        let worker = db.worker(&[&name]).await;
        let a = db.read(worker, &[&name], 10).await.remove(0);
        db.complete(&[(a, json!(1))]).await;
        let task = db.read(worker, &[&name], 10).await.remove(0);
        assert_eq!(db.fail(&[(task.clone(), "boom")]).await, [(outcome.to_owned(), None)]);
        // Too late, twice.
        assert_eq!(db.fail(&[(task.clone(), "boom")]).await, [("ignored".to_owned(), None)]);
        assert_eq!(db.complete(&[(task, json!(1))]).await, ["ignored"]);
        db.drain(&[&name], |_| json!([])).await;
        assert_eq!(db.status(run).await, run_status, "{then}");
        assert_eq!((db.step(run, "b").await.as_str(), db.step(run, "c").await.as_str()), (b, c), "{then}");
        assert_eq!(
            db.get(&format!(
                "SELECT error_message FROM pgflow.step_states WHERE run_id = '{run}' AND step_slug = 'b'"
            ))
            .await,
            "boom"
        );
        db.check().await;
    }
}

/// One task of a wide map that is exhausted takes its brothers along, whatever they were doing.
#[tokio::test]
async fn a_failed_run_leaves_nothing_queued_or_started_in_any_queue() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('f', max_attempts => 1); SELECT pgflow.add_step('f', 'm', step_type => 'map');
         SELECT pgflow.add_step('f', 'other', queue => 'elsewhere'); SELECT pgflow.add_step('f', 'hand', queue => 'false')",
    )
    .await;
    let run = db.start("f", &json!([1, 2, 3, 4, 5])).await;
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 3).await;
    db.complete(&[(tasks[0].clone(), json!(1))]).await;
    assert_eq!(db.fail(&[(tasks[1].clone(), "one"), (tasks[2].clone(), "two")]).await[0].0, "failed");
    assert_eq!(db.status(run).await, "failed");
    assert_eq!(db.get("SELECT error_message FROM pgflow.runs").await, "one");
    for queue in ["f", "elsewhere"] {
        assert_eq!(db.count(&format!("SELECT count(*) FROM pgmq.q_{queue}")).await, 0, "{queue}");
    }
    assert_eq!(db.count("SELECT count(*) FROM pgmq.a_f").await, 5);
    assert_eq!(
        db.get(&format!("SELECT count(*) FROM pgflow.complete_task('{run}', 'hand', 0, '1')")).await,
        "0",
        "too late"
    );
    db.check().await;
}

// Attempts, delays, stalls.

#[tokio::test]
async fn retries_wait_twice_as_long_each_time() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', max_attempts => 4, base_delay => 3); SELECT pgflow.add_step('f', 'a')").await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    for (attempt, delay) in [(1, 6), (2, 12), (3, 24)] {
        let task = db.read(worker, &["f"], 1).await.remove(0);
        assert_eq!(task.attempts, attempt);
        assert_eq!(db.fail(&[(task, "again")]).await, [("retried".to_owned(), Some(delay))]);
        let hidden = db.count("SELECT round(extract(epoch FROM vt - clock_timestamp())) FROM pgmq.q_f").await;
        assert!((i64::from(delay) - 2..=i64::from(delay)).contains(&hidden), "{hidden}");
        assert!(db.read(worker, &["f"], 1).await.is_empty(), "not before its time");
        assert_eq!(db.get("SELECT status || error_message FROM pgflow.step_tasks").await, "queuedagain");
        db.check().await;
        db.run("UPDATE pgmq.q_f SET vt = clock_timestamp()").await;
    }
    let task = db.read(worker, &["f"], 1).await.remove(0);
    assert_eq!(db.fail(&[(task, "the last")]).await, [("failed".to_owned(), None)]);
    assert_eq!(db.status(run).await, "failed");
    for (base, attempts, delay) in [("0", 5, 0), ("1", 1, 2), ("5", 0, 5), ("2.5", 1, 5), ("10", 60, 86400)] {
        assert_eq!(
            db.count(&format!("SELECT pgflow.calculate_retry_delay({base}, {attempts})")).await,
            delay
        );
    }
    db.check().await;
}

#[tokio::test]
async fn a_permanent_failure_and_a_step_s_own_options() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', max_attempts => 9); SELECT pgflow.add_step('f', 'a', max_attempts => 2, base_delay => 0); SELECT pgflow.add_step('f', 'b')").await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 10).await;
    let a = tasks.iter().find(|it| it.step_slug == "a").expect("a").clone();
    assert_eq!(db.fail(&[(a, "x")]).await, [("retried".to_owned(), Some(0))]);
    let again = db.read(worker, &["f"], 10).await;
    assert_eq!((again.len(), again[0].attempts), (1, 2));
    let b = tasks.iter().find(|it| it.step_slug == "b").expect("b");
    db.run(&format!("SELECT pgflow.fail_tasks(ARRAY['{run}']::uuid[], ARRAY['b'], ARRAY[{}], ARRAY['never'], ARRAY[true])", b.task_index)).await;
    assert_eq!(db.status(run).await, "failed");
    assert_eq!(db.complete(&[(again[0].clone(), json!(1))]).await, ["ignored"]);
    db.check().await;
}

#[tokio::test]
async fn a_start_delay_keeps_a_task_hidden() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a', start_delay => 100)").await;
    db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    assert!(db.read(worker, &["f"], 1).await.is_empty());
    let hidden = db.count("SELECT round(extract(epoch FROM vt - clock_timestamp())) FROM pgmq.q_f").await;
    assert!((98..=100).contains(&hidden), "{hidden}");
    db.run("UPDATE pgmq.q_f SET vt = clock_timestamp()").await;
    assert_eq!(db.read(worker, &["f"], 1).await.len(), 1);
}

/// Lets the clock of all tasks that are started run ahead.
async fn pass(db: &sql::Database, seconds: i32) {
    db.run(&format!(
        "UPDATE pgflow.step_tasks SET queued_at = queued_at - interval '{seconds} s', started_at = started_at - interval '{seconds} s', \
         extended_until = extended_until - interval '{seconds} s'; UPDATE pgmq.q_f SET vt = vt - interval '{seconds} s'"
    ))
    .await;
}

#[tokio::test]
async fn stalled_tasks_are_requeued_after_their_own_timeout_three_times() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', timeout => 1000); SELECT pgflow.add_step('f', 'a', timeout => 10, max_attempts => 9)").await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    for round in 1..=3 {
        let task = db.read(worker, &["f"], 1).await.remove(0);
        assert_eq!((task.attempts, task.timeout), (round, 10));
        pass(&db, 39).await;
        assert_eq!(db.count("SELECT pgflow.requeue_stalled_tasks()").await, 0, "half a minute of grace");
        assert!(db.read(worker, &["f"], 1).await.is_empty(), "visible, and still not started twice");
        pass(&db, 2).await;
        assert_eq!(db.count("SELECT pgflow.requeue_stalled_tasks()").await, 1);
        assert_eq!(
            db.count("SELECT requeued_count FROM pgflow.step_tasks WHERE last_requeued_at IS NOT NULL").await,
            i64::from(round)
        );
        // Who comes late finds that it is not theirs any more.
        assert_eq!(db.complete(&[(task, json!(1))]).await, ["ignored"]);
        db.check().await;
    }
    db.read(worker, &["f"], 1).await;
    pass(&db, 41).await;
    assert_eq!(db.count("SELECT pgflow.requeue_stalled_tasks()").await, 0);
    assert_eq!(db.status(run).await, "failed", "and not stuck for ever");
    assert_eq!(
        db.count("SELECT count(*) FROM pgflow.step_tasks WHERE permanently_stalled_at IS NOT NULL").await,
        1
    );
    db.check().await;
}

#[tokio::test]
async fn a_slow_task_that_is_extended_is_not_stalled() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', timeout => 10); SELECT pgflow.add_step('f', 'a')").await;
    db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    let task = db.read(worker, &["f"], 1).await.remove(0);
    pass(&db, 9).await;
    let extend = format!(
        "SELECT count(*) FROM pgflow.extend_tasks(ARRAY['{}']::uuid[], ARRAY['a'], ARRAY[0], 60)",
        task.run_id
    );
    assert_eq!(db.count(&extend).await, 1);
    pass(&db, 59).await;
    assert_eq!(db.count("SELECT pgflow.requeue_stalled_tasks()").await, 0);
    assert!(db.read(worker, &["f"], 1).await.is_empty());
    pass(&db, 32).await;
    assert_eq!(db.count("SELECT pgflow.requeue_stalled_tasks()").await, 1);
    assert_eq!(db.count(&extend).await, 0, "it is nobody's any more");
    db.check().await;
}

#[tokio::test]
async fn the_tasks_of_a_dead_worker_go_to_another_at_once() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', timeout => 3600); SELECT pgflow.add_step('f', 'm', step_type => 'map')").await;
    let run = db.start("f", &json!([1, 2, 3, 4])).await;
    let (dead, alive) = (db.worker(&["f"]).await, db.worker(&["f"]).await);
    let lost = db.read(dead, &["f"], 2).await;
    let kept = db.read(alive, &["f"], 1).await;
    db.run(&format!("UPDATE pgflow.workers SET last_heartbeat_at = last_heartbeat_at - interval '31 s' WHERE worker_id = '{dead}'")).await;
    assert_eq!(db.get(&format!("SELECT pgflow.heartbeat('{alive}')")).await, "true");
    // Silence counts from the server's start.
    assert_eq!(db.count("SELECT pgflow.requeue_tasks_of_dead_workers(clock_timestamp() - pg_postmaster_start_time() + '5 s')").await, 0);
    db.run("SELECT pg_sleep(greatest(0, extract(epoch FROM pg_postmaster_start_time() + interval '5.1 s' - clock_timestamp())))").await;
    assert_eq!(db.get(&format!("SELECT pgflow.heartbeat('{alive}')")).await, "true");
    assert_eq!(db.count("SELECT pgflow.requeue_tasks_of_dead_workers('5 s')").await, 2);
    assert_eq!(db.count("SELECT pgflow.requeue_tasks_of_dead_workers('5 s')").await, 0);
    let stopped =
        format!("SELECT count(*) FROM pgflow.workers WHERE worker_id = '{dead}' AND stopped_at IS NOT NULL");
    assert_eq!(db.count(&stopped).await, 1, "it was taken for dead");
    assert_eq!(db.get(&format!("SELECT pgflow.heartbeat('{dead}')")).await, "true", "it comes back");
    assert_eq!(db.count(&stopped).await, 0);
    db.run(&format!("UPDATE pgflow.workers SET deprecated_at = now() WHERE worker_id = '{dead}'")).await;
    assert_eq!(db.get(&format!("SELECT pgflow.heartbeat('{dead}')")).await, "false", "it is asked to stop");
    let mut taken = db.read(alive, &["f"], 10).await;
    assert_eq!(taken.len(), 3);
    assert!(
        lost.iter().all(|it| taken.iter().any(|new| new.task_index == it.task_index && new.attempts == 2))
    );
    taken.extend(kept);
    let outputs: Vec<(Task, Value)> = taken
        .into_iter()
        .map(|it| {
            let output = json!(it.task_index);
            (it, output)
        })
        .collect();
    db.complete(&outputs).await;
    assert_eq!(db.output(run).await, json!({"m": [0, 1, 2, 3]}));
    db.check().await;
}

#[tokio::test]
async fn tasks_that_are_handed_back_cost_no_attempt() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', max_attempts => 1); SELECT pgflow.add_step('f', 'a')").await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    for _ in 0..5 {
        assert_eq!(db.read(worker, &["f"], 1).await[0].attempts, 1);
        assert_eq!(
            db.count(&format!("SELECT pgflow.release_tasks(ARRAY['{run}']::uuid[], ARRAY['a'], ARRAY[0])"))
                .await,
            1
        );
        db.check().await;
    }
    assert_eq!(db.drain(&["f"], |_| json!(1)).await, 1);
    assert_eq!(db.status(run).await, "completed");
}

/// What somebody who has started a task once says about it, with every function that takes the number of its start. None of it counts.
async fn say_all_in_vain(db: &sql::Database, task: &Task) {
    let Task { run_id, step_slug, task_index, start, .. } = task;
    let key = format!("ARRAY['{run_id}']::uuid[], ARRAY['{step_slug}'], ARRAY[{task_index}]");
    let one = format!("'{run_id}', '{step_slug}', {task_index}");
    let before = db.get("SELECT string_agg(t::text, ' ') FROM pgflow.step_tasks t").await;
    for (call, answer) in [
        (
            format!(
                "SELECT outcome FROM pgflow.complete_tasks({key}, ARRAY['1'::jsonb], ARRAY[{start}::bigint])"
            ),
            "ignored",
        ),
        (
            format!(
                "SELECT outcome FROM pgflow.fail_tasks({key}, ARRAY['late'], NULL, ARRAY[{start}::bigint])"
            ),
            "ignored",
        ),
        (format!("SELECT count(*) FROM pgflow.extend_tasks({key}, 500, ARRAY[{start}::bigint])"), "0"),
        (format!("SELECT pgflow.release_tasks({key}, ARRAY[{start}::bigint])"), "0"),
        (format!("SELECT count(*) FROM pgflow.complete_task({one}, '1', {start})"), "0"),
        (format!("SELECT count(*) FROM pgflow.fail_task({one}, 'late', {start})"), "0"),
    ] {
        assert_eq!(db.get(&call).await, answer, "{call}");
    }
    assert_eq!(
        db.get("SELECT string_agg(t::text, ' ') FROM pgflow.step_tasks t").await,
        before,
        "nothing has changed"
    );
}

#[tokio::test]
async fn only_the_last_start_of_a_task_can_settle_it() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('f', base_delay => 0, timeout => 10); SELECT pgflow.add_step('f', 'a')",
    )
    .await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    let mut task = db.read(worker, &["f"], 1).await.remove(0);
    // Each takes the task from who has it. After a release and after a retry of the run the attempt has the same number as before.
    for lost_by in ["failure", "release", "stall", "retry of the run", "start of the worker"] {
        let key = format!("ARRAY['{run}']::uuid[], ARRAY['a'], ARRAY[0]");
        match lost_by {
            "failure" => drop(db.fail(&[(task.clone(), "x")]).await),
            "release" => {
                db.run(&format!("SELECT pgflow.release_tasks({key}, ARRAY[{}::bigint])", task.start)).await
            }
            "stall" => {
                pass(&db, 50).await;
                assert_eq!(db.count("SELECT pgflow.requeue_stalled_tasks()").await, 1);
            }
            "retry of the run" => {
                db.run(&format!("SELECT pgflow.cancel_run('{run}'); SELECT pgflow.retry_run('{run}')")).await
            }
            _ => assert_eq!(
                db.count(&format!("SELECT pgflow.release_unknown_tasks('{worker}', '{{}}')")).await,
                1
            ),
        }
        let next = db.read(worker, &["f"], 1).await.remove(0);
        assert!(next.start > task.start, "{lost_by}: {next:?}");
        say_all_in_vain(&db, &task).await;
        task = next;
    }
    assert_eq!(
        db.count(&format!("SELECT pgflow.release_unknown_tasks('{worker}', ARRAY[{}::bigint])", task.start))
            .await,
        0,
        "it is in the worker's hand"
    );
    let done = format!("SELECT status FROM pgflow.complete_task('{run}', 'a', 0, '1', {})", task.start);
    assert_eq!(db.get(&done).await, "completed");
    assert_eq!(db.status(run).await, "completed");
    db.check().await;
}

#[tokio::test]
async fn every_way_to_start_a_task_hands_out_the_number_of_the_start() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.add_step('f', 'hand', queue => 'false');
         SELECT pgflow.add_step('f', 'moved')",
    )
    .await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    let number = |step: &str| {
        format!("SELECT start_number FROM pgflow.step_tasks WHERE run_id = '{run}' AND step_slug = '{step}'")
    };
    let by_hand = db.count(&number("hand")).await;
    let given = db
        .count(&format!("SELECT start_number FROM pgflow.start_tasks('f', ARRAY[1::bigint], '{worker}')"))
        .await;
    assert_eq!(db.count(&number("a")).await, given);
    let polled = db.count("SELECT start_number FROM pgflow.poll_for_tasks('f', 1, 1, 1, 50)").await;
    assert_eq!(db.count(&number("moved")).await, polled);
    let mut all = [by_hand, given, polled];
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[0] < pair[1]), "no two starts have one number: {all:?}");
    db.run(&format!("SELECT pgflow.cancel_run('{run}'); SELECT pgflow.retry_run('{run}')")).await;
    assert!(
        db.count(&number("hand")).await > by_hand,
        "who had it in hand before the retry cannot settle it"
    );
    let late = format!("SELECT count(*) FROM pgflow.complete_task('{run}', 'hand', 0, '1', {by_hand})");
    assert_eq!(db.count(&late).await, 0);
}

// Runs.

#[tokio::test]
async fn a_run_is_cancelled_and_goes_on_where_it_was() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'm', step_type => 'map'); SELECT pgflow.add_step('f', 'z', ARRAY['m']);
         SELECT pgflow.add_step('f', 'hand', queue => 'false')",
    )
    .await;
    let run = db.start("f", &json!([0, 1, 2])).await;
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 2).await;
    db.complete(&[(tasks[0].clone(), json!("kept"))]).await;
    assert_eq!(db.get(&format!("SELECT pgflow.cancel_run('{run}', 'stop')")).await, "true");
    assert_eq!(db.get(&format!("SELECT pgflow.cancel_run('{run}')")).await, "false");
    assert_eq!(db.status(run).await, "cancelled");
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 0);
    assert_eq!(db.complete(&[(tasks[1].clone(), json!("late"))]).await, ["ignored"]);
    db.check().await;

    assert_eq!(db.get(&format!("SELECT pgflow.retry_run('{run}')")).await, "true");
    assert_eq!(db.get(&format!("SELECT pgflow.retry_run('{run}')")).await, "false");
    db.check().await;
    let mut seen = Vec::new();
    db.drain(&["f"], |task| {
        seen.push((task.step_slug.clone(), task.task_index, task.attempts));
        json!("done")
    })
    .await;
    seen.sort();
    assert_eq!(
        seen,
        [("m".to_owned(), 1, 1), ("m".to_owned(), 2, 1), ("z".to_owned(), 0, 1)],
        "what was completed stays"
    );
    db.run(&format!("SELECT pgflow.complete_task('{run}', 'hand', 0, '1')")).await;
    assert_eq!(db.status(run).await, "completed");
    assert_eq!(
        db.get("SELECT output FROM pgflow.step_states WHERE step_slug = 'm'").await,
        "[\"kept\", \"done\", \"done\"]"
    );
    db.check().await;
}

#[tokio::test]
async fn flows_are_cancelled_retried_deleted_and_pruned() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', max_attempts => 1); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.create_flow('g'); SELECT pgflow.add_step('g', 'a')").await;
    let mut runs = Vec::new();
    for n in 0..6 {
        runs.push(db.start("f", &json!({ "n": n })).await);
    }
    let other = db.start("g", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 4).await;
    db.fail(&[(tasks[0].clone(), "x"), (tasks[1].clone(), "y")]).await;
    db.complete(&[(tasks[2].clone(), json!(1))]).await;
    assert_eq!(db.count("SELECT pgflow.retry_flow('f')").await, 2);
    assert_eq!(db.count("SELECT pgflow.cancel_flow('f')").await, 5);
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 0);
    assert_eq!(db.status(other).await, "started", "another flow is another matter");
    db.check().await;

    assert_eq!(db.get(&format!("SELECT pgflow.delete_run('{}')", runs[0])).await, "true");
    assert_eq!(db.get(&format!("SELECT pgflow.delete_run('{}')", runs[0])).await, "false");
    assert_eq!(db.count("SELECT pgflow.prune_data_older_than('1 day')").await, 0);
    db.run("UPDATE pgflow.runs SET started_at = started_at - interval '2 days', completed_at = completed_at - interval '2 days', \
            cancelled_at = cancelled_at - interval '2 days'").await;
    assert_eq!(db.count("SELECT pgflow.prune_data_older_than('1 day', 'g')").await, 0, "it is not finished");
    assert_eq!(db.count("SELECT pgflow.prune_data_older_than('1 day', max_runs => 3)").await, 3);
    assert_eq!(db.count("SELECT pgflow.prune_data_older_than('1 day')").await, 2);
    assert_eq!(db.count("SELECT count(*) FROM pgflow.step_tasks").await, 1);
    assert_eq!(db.count("SELECT count(*) FROM pgmq.a_f").await, 0, "the archive goes with them");
    db.run("SELECT pgflow.delete_flow_and_data('g')").await;
    assert_eq!(db.count("SELECT count(*) FROM pgflow.runs").await, 0);
    assert_eq!(db.get("SELECT pgflow._queue_exists('g')").await, "false", "its queue is gone with it");
    db.check().await;
}

#[tokio::test]
async fn runs_of_one_key_go_one_after_another_and_their_steps_in_parallel() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', max_attempts => 1, key_path => '{customer,id}'); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.add_step('f', 'b')").await;
    let mut runs = Vec::new();
    for (customer, n) in [(1, 0), (1, 1), (2, 2), (1, 3), (1, 4)] {
        runs.push(db.start("f", &json!({"customer": {"id": customer}, "n": n})).await);
    }
    let statuses = "SELECT string_agg(status, ' ' ORDER BY seq) FROM pgflow.runs";
    assert_eq!(db.get(statuses).await, "started waiting started waiting waiting");
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 100).await;
    assert_eq!(tasks.len(), 4, "both steps of both runs");
    assert!(tasks.iter().all(|it| [runs[0], runs[2]].contains(&it.run_id)));
    // One that waits is cancelled; the next one comes after a failure as after a success.
    db.run(&format!("SELECT pgflow.cancel_run('{}')", runs[1])).await;
    db.check().await;
    let mine: Vec<_> = tasks.iter().filter(|it| it.run_id == runs[0]).cloned().collect();
    db.complete(&[(mine[0].clone(), json!(1))]).await;
    assert_eq!(db.status(runs[3]).await, "waiting");
    db.fail(&[(mine[1].clone(), "x")]).await;
    assert_eq!(db.get(statuses).await, "failed cancelled started started waiting");
    db.check().await;
    // The first goes on, in its turn: the key is taken, and it was before the last.
    assert_eq!(db.get(&format!("SELECT pgflow.retry_run('{}')", runs[0])).await, "true");
    assert_eq!(db.status(runs[0]).await, "waiting");
    let three: Vec<(Task, Value)> =
        db.read(worker, &["f"], 100).await.into_iter().map(|it| (it, json!(3))).collect();
    assert!(three.len() == 2 && three.iter().all(|(it, _)| it.run_id == runs[3]));
    db.complete(&three).await;
    assert_eq!(db.get(statuses).await, "started cancelled started completed waiting");
    db.check().await;
    assert_eq!(db.drain(&["f"], |_| json!(1)).await, 3, "one step of the first, two of the last");
    assert_eq!(db.status(runs[4]).await, "completed");
    let (code, _) = db.refusal("SELECT pgflow.start_flow('f', '{\"customer\": {}}')").await;
    assert_eq!(code, "PF007");
    // A key may also be given.
    db.run("SELECT pgflow.create_flow('g', queue => 'false'); SELECT pgflow.add_step('g', 'a'); \
            SELECT pgflow.start_flow('g', '1', key => 'k'); SELECT pgflow.start_flows('g', ARRAY['2', '3']::jsonb[], ARRAY['k', 'l'])").await;
    assert_eq!(
        db.get("SELECT string_agg(input || status, ' ' ORDER BY seq) FROM pgflow.runs WHERE flow_slug = 'g'")
            .await,
        "1started 2waiting 3started"
    );
    db.check().await;
}

// What is one transaction.

#[tokio::test]
async fn an_idempotency_key_starts_one_run() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a')").await;
    let starts = (0..8).map(|_| {
        db.get("SELECT run_id FROM pgflow.start_flow('f', '{\"n\": 1}', idempotency_key => 'order 7')")
    });
    let mut ids = Vec::new();
    // At once, on connections of their own.
    for id in futures(starts).await {
        ids.push(id);
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 1);
    let (code, message) =
        db.refusal("SELECT pgflow.start_flow('f', '{\"n\": 2}', idempotency_key => 'order 7')").await;
    assert_eq!(code, "PF006", "{message}");
    db.check().await;
}

async fn futures<F: Future>(all: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = all.map(Box::pin).collect();
    let mut done: Vec<Option<F::Output>> = all.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, slot) in all.iter_mut().zip(&mut done) {
            if slot.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *slot = Some(value);
            }
        }
        if done.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[tokio::test]
async fn a_flow_starts_with_the_callers_transaction_or_not_at_all() {
    let db = database().await;
    db.run("CREATE TABLE orders (id int); SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a')")
        .await;
    db.run("BEGIN; INSERT INTO orders VALUES (1); SELECT pgflow.start_flow('f', '{}'); ROLLBACK").await;
    assert_eq!(db.count("SELECT count(*) FROM pgflow.runs").await, 0);
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 0);
    db.run("BEGIN; INSERT INTO orders VALUES (1); SELECT pgflow.start_flow('f', '{}'); COMMIT").await;
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 1);
}

#[tokio::test]
async fn a_handlers_writes_are_in_the_transaction_that_completes_its_task() {
    let db = database().await;
    db.run("CREATE TABLE paid (run uuid); SELECT pgflow.create_flow('f', base_delay => 0); SELECT pgflow.add_step('f', 'pay'); SELECT pgflow.add_step('f', 'ship', ARRAY['pay'])").await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    let task = db.read(worker, &["f"], 1).await.remove(0);
    let mut connection = db.pool.acquire().await.expect("a connection");
    for commits in [false, true, true] {
        let mut transaction = connection.begin().await.expect("a transaction");
        sqlx::query("INSERT INTO paid VALUES ($1)")
            .bind(run)
            .execute(&mut *transaction)
            .await
            .expect("the write");
        let outcome = complete(&mut transaction, &[(task.clone(), json!("paid"))]).await.expect("completes");
        // Who comes too late takes back what it wrote.
        if commits && outcome == ["completed"] {
            transaction.commit().await.expect("commits");
        } else {
            transaction.rollback().await.expect("rolls back");
        }
    }
    assert_eq!(get(&mut connection, "SELECT count(*) FROM paid").await, "1", "paid once");
    assert_eq!(
        db.get("SELECT string_agg(step_slug, ' ') FROM pgflow.step_tasks WHERE status = 'queued'").await,
        "ship"
    );
    db.check().await;
}

#[tokio::test]
async fn who_listens_hears_of_messages_and_of_runs_and_steps() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', queue => 'q'); SELECT pgflow.add_step('f', 'a')").await;
    let mut listener = PgListener::connect(&db.url).await.expect("connects");
    listener.listen_all(["pgflow_queue", "pgflow_event"]).await.expect("listens");
    let run = db.start("f", &json!({})).await;
    db.drain(&["q"], |_| json!(1)).await;
    let mut heard = Vec::new();
    while heard.last().map(String::as_str) != Some("run:completed") {
        let notification = tokio::time::timeout(std::time::Duration::from_secs(30), listener.recv())
            .await
            .expect("in time")
            .expect("heard");
        heard.push(match notification.channel() {
            "pgflow_queue" => notification.payload().to_owned(),
            _ => {
                let event: Value = serde_json::from_str(notification.payload()).expect("json");
                assert_eq!(event["run_id"], run.to_string());
                event["event_type"].as_str().expect("a text").to_owned()
            }
        });
    }
    assert_eq!(heard, ["run:started", "q", "step:started", "step:completed", "run:completed"]);
}

#[tokio::test]
async fn a_schema_realtime_gets_the_events_too() {
    let db = database().await;
    db.run(
        "CREATE SCHEMA realtime; CREATE TABLE realtime.sent (payload jsonb, event text, topic text);
         CREATE FUNCTION realtime.send(payload jsonb, event text, topic text, private boolean) RETURNS void LANGUAGE sql
         AS 'INSERT INTO realtime.sent VALUES ($1, $2, $3)'; SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a')",
    )
    .await;
    let run = db.start("f", &json!({})).await;
    assert_eq!(db.count("SELECT pgflow.cancel_flow('f')").await, 1);
    assert_eq!(
        db.get("SELECT string_agg(event, ' ') FROM realtime.sent").await,
        "run:started step:started step:skipped run:cancelled"
    );
    assert_eq!(db.get("SELECT DISTINCT topic FROM realtime.sent").await, format!("pgflow:run:{run}"));
}

// The original's interface.

/// Names, types and defaults of parameters, and results, as the original has them; ours may have more parameters with defaults.
const ORIGINAL: &[(&str, &str, &str)] = &[
    ("_archive_task_message", "p_run_id uuid, p_step_slug text, p_task_index integer", "void"),
    ("_cascade_force_skip_steps", "run_id uuid, step_slug text, skip_reason text", "integer"),
    ("_compare_flow_shapes", "p_local jsonb, p_db jsonb", "text[]"),
    ("_create_flow_from_shape", "p_flow_slug text, p_shape jsonb", "void"),
    ("_get_flow_shape", "p_flow_slug text", "jsonb"),
    (
        "add_step",
        "flow_slug text, step_slug text, deps_slugs text[] DEFAULT '{}'::text[], max_attempts integer DEFAULT NULL::integer, \
         base_delay integer DEFAULT NULL::integer, timeout integer DEFAULT NULL::integer, start_delay integer DEFAULT NULL::integer, \
         step_type text DEFAULT 'single'::text, required_input_pattern jsonb DEFAULT NULL::jsonb, \
         forbidden_input_pattern jsonb DEFAULT NULL::jsonb, when_unmet text DEFAULT 'skip'::text, when_exhausted text DEFAULT 'fail'::text",
        "pgflow.steps",
    ),
    ("calculate_retry_delay", "base_delay numeric, attempts_count integer", "integer"),
    ("cascade_complete_taskless_steps", "run_id uuid", "integer"),
    ("cascade_resolve_conditions", "run_id uuid", "boolean"),
    (
        "complete_task",
        "run_id uuid, step_slug text, task_index integer, output jsonb",
        "SETOF pgflow.step_tasks",
    ),
    (
        "create_flow",
        "flow_slug text, max_attempts integer DEFAULT NULL::integer, base_delay integer DEFAULT NULL::integer, \
         timeout integer DEFAULT NULL::integer",
        "pgflow.flows",
    ),
    ("delete_flow_and_data", "p_flow_slug text", "void"),
    ("ensure_flow_compiled", "flow_slug text, shape jsonb, allow_data_loss boolean DEFAULT false", "jsonb"),
    (
        "fail_task",
        "run_id uuid, step_slug text, task_index integer, error_message text",
        "SETOF pgflow.step_tasks",
    ),
    ("get_run_with_states", "run_id uuid", "jsonb"),
    ("is_valid_slug", "slug text", "boolean"),
    ("mark_worker_stopped", "worker_id uuid", "void"),
    ("maybe_complete_run", "run_id uuid", "void"),
    (
        "poll_for_tasks",
        "queue_name text, vt integer, qty integer, max_poll_seconds integer DEFAULT 5, poll_interval_ms integer DEFAULT 100",
        "SETOF pgflow.step_task_record",
    ),
    ("requeue_stalled_tasks", "", "integer"),
    (
        "set_vt_batch",
        "queue_name text, msg_ids bigint[], vt_offsets integer[]",
        "TABLE(msg_id bigint, read_ct integer, enqueued_at timestamp with time zone, vt timestamp with time zone, message jsonb, headers jsonb)",
    ),
    ("setup_requeue_stalled_tasks_cron", "cron_interval text DEFAULT '15 seconds'::text", "text"),
    ("start_flow", "flow_slug text, input jsonb, run_id uuid DEFAULT NULL::uuid", "SETOF pgflow.runs"),
    ("start_flow_with_states", "flow_slug text, input jsonb, run_id uuid DEFAULT NULL::uuid", "jsonb"),
    ("start_ready_steps", "run_id uuid", "void"),
    // By queue, as document 002 has it.
    ("start_tasks", "queue_name text, msg_ids bigint[], worker_id uuid", "SETOF pgflow.step_task_record"),
    ("track_worker_function", "function_name text", "void"),
];

#[tokio::test]
async fn the_functions_of_the_original_are_there() {
    let db = database().await;
    for (name, arguments, result) in ORIGINAL {
        let named = format!("p.pronamespace = 'pgflow'::regnamespace AND p.proname = '{name}'");
        let found = db
            .get(&format!(
                "SELECT count(*) FROM pg_proc p WHERE {named} AND pg_get_function_result(p.oid) = $x${result}$x$ \
                 AND starts_with(pg_get_function_arguments(p.oid) || ', ', ltrim($x${arguments}$x$ || ', ', ', '))"
            ))
            .await;
        let signature = "pg_get_function_arguments(p.oid) || ' -> ' || pg_get_function_result(p.oid)";
        let ours =
            db.get(&format!("SELECT string_agg({signature}, ' | ') FROM pg_proc p WHERE {named}")).await;
        assert_eq!(found, "1", "{name}({arguments}) -> {result}, and not {ours}");
    }
    let record = "flow_slug text, run_id uuid, step_slug text, input jsonb, msg_id bigint, task_index integer, flow_input jsonb";
    let ours = db
        .get(
            "SELECT string_agg(attname || ' ' || format_type(atttypid, NULL), ', ' ORDER BY attnum) FROM pg_attribute \
             WHERE attrelid = 'pgflow.step_task_record'::regclass",
        )
        .await;
    assert_eq!(ours, format!("{record}, start_number bigint"), "the original's, then ours");
}

/// A script in the words of the original, with one queue per flow, from the definition to the end.
#[tokio::test]
async fn a_script_for_the_original_runs() {
    let db = database().await;
    db.run(
        "SELECT * FROM pgflow.create_flow('analyze_website', max_attempts => 5, timeout => 10);
         SELECT * FROM pgflow.add_step('analyze_website', 'website');
         SELECT * FROM pgflow.add_step('analyze_website', 'sentiment', ARRAY['website'], timeout => 20);
         SELECT * FROM pgflow.add_step('analyze_website', 'summary', '{website}');
         SELECT * FROM pgflow.add_step('analyze_website', 'save', ARRAY['sentiment', 'summary']);
         SELECT * FROM pgflow.start_flow_with_states('analyze_website', '{\"url\": \"x\"}', '11111111-1111-1111-1111-111111111111');
         SELECT pgflow.track_worker_function('analyze_website_worker'); SELECT pgflow.setup_requeue_stalled_tasks_cron();
         INSERT INTO pgflow.workers (worker_id, queue_name, function_name)
         VALUES ('22222222-2222-2222-2222-222222222222', 'analyze_website', 'analyze_website_worker');",
    )
    .await;
    let run = "11111111-1111-1111-1111-111111111111";
    for (steps, poll) in [
        ("website", "pgflow.poll_for_tasks('analyze_website', 5, 10)"),
        (
            "sentiment summary",
            "pgflow.start_tasks('analyze_website', ARRAY(SELECT msg_id FROM pgmq.read_with_poll('analyze_website', 5, 10, 1, 50)), \
             '22222222-2222-2222-2222-222222222222')",
        ),
        ("save", "pgflow.poll_for_tasks('analyze_website', vt => 5, qty => 10, max_poll_seconds => 1)"),
    ] {
        let got = db.get(&format!("SELECT string_agg(step_slug, ' ' ORDER BY step_slug) FROM {poll}")).await;
        assert_eq!(got, steps);
        db.run("SELECT pgflow.set_vt_batch('analyze_website', ARRAY(SELECT msg_id FROM pgmq.q_analyze_website), ARRAY(SELECT 60 FROM pgmq.q_analyze_website))")
            .await;
        for step in steps.split(' ') {
            let done = db
                .get(&format!("SELECT status FROM pgflow.complete_task('{run}', '{step}', 0, '\"{step}\"')"))
                .await;
            assert_eq!(done, "completed");
        }
        // What they call when in doubt changes nothing.
        db.run(&format!(
            "SELECT pgflow.cascade_resolve_conditions('{run}'); SELECT pgflow.cascade_complete_taskless_steps('{run}'); \
             SELECT pgflow.start_ready_steps('{run}'); SELECT pgflow.maybe_complete_run('{run}')"
        ))
        .await;
        db.check().await;
    }
    assert_eq!(db.get("SELECT status || output FROM pgflow.runs").await, "completed{\"save\": \"save\"}");
    db.run("SELECT pgflow.mark_worker_stopped('22222222-2222-2222-2222-222222222222')").await;
}

// Bad input.

#[tokio::test]
async fn mistakes_in_a_graph_have_clear_errors() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.add_step('f', 'b', ARRAY['a'])").await;
    for (sql, code, part) in [
        ("SELECT pgflow.add_step('nope', 'a')", "PF002", "there is no flow 'nope'"),
        ("SELECT pgflow.start_flow('nope', '{}')", "PF002", "there is no flow 'nope'"),
        (
            "SELECT pgflow.add_step('f', 'c', ARRAY['x', 'a'])",
            "PF005",
            "depends on 'x', which the flow does not have",
        ),
        ("SELECT pgflow.add_step('f', 'c', ARRAY['c'])", "PF005", "depends on itself"),
        ("SELECT pgflow.add_step('f', 'c', ARRAY['a', 'a'])", "PF005", "twice"),
        ("SELECT pgflow.add_step('f', 'b', ARRAY[]::text[])", "PF005", "exists with deps_slugs"),
        (
            "SELECT pgflow.add_step('f', 'm', ARRAY['a', 'b'], step_type => 'map')",
            "PF005",
            "a map has one array",
        ),
        ("SELECT pgflow.add_step('f', 'c', step_type => 'loop')", "PF001", "neither single nor map"),
        ("SELECT pgflow.add_step('f', 'c', when_unmet => 'explode')", "23514", "when_unmet_is_valid"),
        ("SELECT pgflow.create_flow('f', max_attempts => 7)", "PF005", "exists with max_attempts"),
        ("SELECT pgflow.create_flow('g', timeout => 0)", "23514", "opt_timeout_is_positive"),
        ("SELECT pgflow.cancel_run('00000000-0000-0000-0000-000000000000')", "PF002", "there is no run"),
        ("SELECT pgflow.start_flow('f', NULL)", "PF001", "NULL"),
    ] {
        let found = db.refusal(sql).await;
        assert!(found.0 == code && found.1.contains(part), "{sql}: {found:?}");
    }
    // The same again is fine.
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'b', ARRAY['a'])").await;
    assert_eq!(db.count("SELECT count(*) FROM pgflow.steps").await, 2);
}

#[tokio::test]
async fn payloads_over_the_limit_are_refused_and_lose_nothing() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a'); UPDATE pgflow.limits SET max_payload_bytes = 1000").await;
    let (code, message) = db.refusal("SELECT pgflow.start_flow('f', to_jsonb(repeat('x', 1001)))").await;
    assert_eq!(code, "PF003", "{message}");
    let runs = [db.start("f", &json!({})).await, db.start("f", &json!({})).await];
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 2).await;
    let outcomes =
        db.complete(&[(tasks[0].clone(), json!("x".repeat(1001))), (tasks[1].clone(), json!(1))]).await;
    assert_eq!(outcomes, ["too_large", "completed"], "one does not stop the other");
    assert_eq!((db.status(runs[0]).await, db.status(runs[1]).await), ("started".into(), "completed".into()));
    let (code, _) = db
        .refusal(&format!("SELECT pgflow.complete_task('{}', 'a', 0, to_jsonb(repeat('x', 1001)))", runs[0]))
        .await;
    assert_eq!(code, "PF003");
    assert_eq!(db.complete(&[(tasks[0].clone(), json!("short"))]).await, ["completed"]);
    db.run("UPDATE pgflow.limits SET max_map_tasks = 3; SELECT pgflow.create_flow('m'); SELECT pgflow.add_step('m', 'm', step_type => 'map')").await;
    assert_eq!(db.refusal("SELECT pgflow.start_flow('m', '[1, 2, 3, 4]')").await.0, "PF003");
    db.check().await;
}

#[tokio::test]
async fn all_outputs_of_a_run_together_have_a_limit() {
    let db = database().await;
    db.run(
        "UPDATE pgflow.limits SET max_run_output_bytes = 10000; SELECT pgflow.create_flow('f', max_attempts => 1);
         SELECT pgflow.add_step('f', 'm', step_type => 'map'); SELECT pgflow.add_step('f', 'z', ARRAY['m'])",
    )
    .await;
    let (big, small) = (db.start("f", &json!([0, 1, 2, 3, 4])).await, db.start("f", &json!([0, 1])).await);
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 7).await;
    // Compressed it would be small; what counts is what has to be put together.
    let output = json!("x".repeat(3_000));
    let all: Vec<_> = tasks.iter().map(|task| (task.clone(), output.clone())).collect();
    let outcomes = db.complete(&all[..2]).await;
    assert_eq!(outcomes, ["completed", "completed"]);
    let mut outcomes = db.complete(&all[2..]).await;
    outcomes.sort();
    assert_eq!(
        outcomes,
        ["completed", "completed", "completed", "run_too_large", "run_too_large"],
        "three of the large run and both of the small one fit"
    );
    assert_eq!(db.step(small, "m").await, "completed");
    assert_eq!(
        (db.status(big).await, db.step(big, "m").await),
        ("started".into(), "started".into()),
        "nothing is lost"
    );
    let left = db
        .count(&format!(
            "SELECT min(task_index) FROM pgflow.step_tasks WHERE run_id = '{big}' AND status = 'started'"
        ))
        .await;
    let by_hand = format!("SELECT pgflow.complete_task('{big}', 'm', {left}, to_jsonb(repeat('x', 3000)))");
    let (code, words) = db.refusal(&by_hand).await;
    assert!(code == "PF003" && words.contains("10000 bytes"), "{code} {words}");
    db.check().await;
    db.run("UPDATE pgflow.limits SET max_run_output_bytes = 100000").await;
    for task in tasks.iter().filter(|task| task.run_id == big) {
        db.complete(&[(task.clone(), output.clone())]).await;
    }
    assert_eq!(db.step(big, "m").await, "completed", "with a larger limit it goes on");
    db.check().await;
}

#[tokio::test]
async fn a_queue_that_was_dropped_is_a_clear_error_and_can_be_repaired() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', max_attempts => 9, base_delay => 0); SELECT pgflow.add_step('f', 'm', step_type => 'map'); SELECT pgflow.add_step('f', 'z', ARRAY['m'], queue => 'q')").await;
    let run = db.start("f", &json!([1, 2, 3])).await;
    let worker = db.worker(&["f", "q"]).await;
    let started = db.read(worker, &["f", "q"], 2).await;
    db.run("SELECT pgmq.drop_queue('f'); SELECT pgmq.drop_queue('q')").await;
    let error = db.try_read(worker, &["f", "q"], 1, None).await;
    let (code, message) = refusal(error.map(drop), "a read");
    assert_eq!((code.as_str(), message.as_str()), ("PF004", "the queue 'f' is not there"));
    // What was in hand can be completed, and failed: the queue comes back for its message.
    assert_eq!(db.complete(&[(started[0].clone(), json!(1))]).await, ["completed"]);
    assert_eq!(db.fail(&[(started[1].clone(), "x")]).await[0].0, "retried");
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 1);
    assert_eq!(
        db.count("SELECT pgflow.repair_queues(ARRAY['f', 'q', 'unknown'])").await,
        1,
        "the one that nobody had in hand"
    );
    assert_eq!(
        db.get("SELECT pgflow._queue_exists('unknown')").await,
        "false",
        "only queues that a flow uses"
    );
    assert_eq!(db.count("SELECT pgflow.repair_queues(ARRAY['f', 'q'])").await, 0);
    db.check().await;
    assert_eq!(db.drain(&["f", "q"], |task| json!(task.task_index)).await, 3);
    assert_eq!(db.status(run).await, "completed");
    db.check().await;
}

#[tokio::test]
async fn a_queue_that_was_dropped_and_made_again_by_hand_is_noticed() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.add_step('f', 'b', ARRAY['a'])").await;
    for _ in 0..3 {
        db.start("f", &json!({})).await;
    }
    let worker = db.worker(&["f"]).await;
    let started = db.read(worker, &["f"], 1).await.remove(0);
    db.run("SELECT pgmq.drop_queue('f'); SELECT pgmq.create('f')").await;
    // The new queue counts from 1, as the old one did: nothing is taken for something else.
    assert_eq!(db.complete(&[(started, json!(1))]).await, ["completed"]);
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 1, "the next step of that run");
    // Whoever looks for stalled tasks finds the lost messages too.
    db.run("SELECT pgflow.requeue_stalled_tasks()").await;
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 3);
    db.check().await;
    db.run("DROP TABLE pgmq.q_f").await;
    // So does whoever defines the flow again.
    db.run("SELECT pgflow.create_flow('f')").await;
    assert_eq!(db.drain(&["f"], |_| json!(1)).await, 5);
    assert_eq!(db.count("SELECT count(*) FROM pgflow.runs WHERE status = 'completed'").await, 3);
    db.check().await;
}

#[tokio::test]
async fn shapes_are_the_same_compatible_or_different() {
    let db = database().await;
    let shape = |b: &str| {
        format!("'{{\"steps\": [{{\"slug\": \"b\", \"dependencies\": [\"a\"]{b}}}, {{\"slug\": \"a\"}}]}}'")
    };
    let compile = |shape: &str| format!("SELECT pgflow.ensure_flow_compiled('f', {shape}) ->> 'status'");
    let compare = |shape: &str| format!("SELECT pgflow.compare_flow_shape('f', {shape}) ->> 'verdict'");
    assert_eq!(db.get(&compare(&shape(""))).await, "missing");
    assert_eq!(db.get(&compile(&shape(""))).await, "compiled");
    assert_eq!(db.get(&compare(&shape(""))).await, "same");
    assert_eq!(db.get(&compile(&shape(""))).await, "verified");
    assert_eq!(
        db.get("SELECT string_agg(step_slug, ' ' ORDER BY step_index) FROM pgflow.steps").await,
        "a b"
    );
    let routed = shape(", \"queue\": \"Fast\", \"options\": {\"timeout\": 5}");
    assert_eq!(db.get(&compare(&routed)).await, "compatible");
    assert_eq!(db.get(&compile(&routed)).await, "updated");
    assert_eq!(db.get("SELECT queue || opt_timeout FROM pgflow.steps WHERE step_slug = 'b'").await, "fast5");
    assert_eq!(db.get("SELECT pgflow._queue_exists('fast')").await, "true");
    // Taking away a dependency changes runs that are under way.
    db.start("f", &json!({})).await;
    let other = "'{\"steps\": [{\"slug\": \"b\"}, {\"slug\": \"c\"}]}'";
    assert_eq!(db.get(&compare(other)).await, "different");
    let refused = db.get(&format!("SELECT pgflow.ensure_flow_compiled('f', {other})")).await;
    assert!(
        refused.contains("mismatch") && refused.contains("the step 'a' is only in the database"),
        "{refused}"
    );
    assert_eq!(
        db.get(&format!("SELECT pgflow.ensure_flow_compiled('f', {other}, true) ->> 'status'")).await,
        "recompiled"
    );
    assert_eq!(db.count("SELECT count(*) FROM pgflow.runs").await, 0);
    assert_eq!(db.get("SELECT cardinality(pgflow._compare_flow_shapes(pgflow._get_flow_shape('f'), pgflow._get_flow_shape('f')))").await, "0");
    for (bad, part) in [
        (
            "{\"steps\": [{\"slug\": \"a\", \"dependencies\": [\"b\"]}, {\"slug\": \"b\", \"dependencies\": [\"a\"]}]}",
            "wait for each other",
        ),
        ("{\"steps\": [{\"slug\": \"a\"}, {\"slug\": \"a\"}]}", "twice"),
        ("{\"steps\": [{\"slug\": \"a\", \"dependencies\": [\"x\"]}]}", "does not have"),
        ("[]", "an object"),
    ] {
        let (code, message) = db.refusal(&format!("SELECT pgflow.ensure_flow_compiled('g', '{bad}')")).await;
        assert!(code == "PF005" && message.contains(part), "{bad}: {message}");
    }
}

// Rights.

#[tokio::test]
async fn every_function_has_a_fixed_search_path_and_is_not_for_everybody() {
    let db = database().await;
    let loose = "SELECT string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc p WHERE p.pronamespace = 'pgflow'::regnamespace AND ";
    assert_eq!(
        db.get(&format!(
            "{loose} NOT coalesce(p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)"
        ))
        .await,
        ""
    );
    assert_eq!(db.get(&format!("{loose} has_function_privilege('public', p.oid, 'execute')")).await, "");
}

#[tokio::test]
async fn a_worker_needs_only_the_functions_of_its_kind() {
    let db = database().await;
    let role = format!("worker_{:x}", fastrand::u64(..));
    db.run(&format!("CREATE ROLE {role} LOGIN; SELECT pgflow.grant_role('{role}', 'worker'); SELECT pgflow.create_flow('f', base_delay => 0);
         SELECT pgflow.add_step('f', 'm', step_type => 'map'); SELECT pgflow.add_step('f', 'z', ARRAY['m'], queue => 'q')")).await;
    let run = db.start("f", &json!([1, 2, 3])).await;
    // The same words, as that role.
    let worker = db.as_role(&role).await;
    for (sql, name) in [
        ("SELECT * FROM pgflow.runs", "a table"),
        ("SELECT * FROM pgmq.q_f", "a queue"),
        ("SELECT pgmq.send('f', '{}')", "pgmq"),
        ("SELECT pgflow._end_run(gen_random_uuid(), 'failed', NULL, '')", "an inner function"),
        ("SELECT pgflow.delete_flow_and_data('f')", "an operator's function"),
        ("SELECT pgflow.start_flow('f', '[]')", "a client's function"),
        ("CREATE TABLE pgflow.mine ()", "the schema"),
    ] {
        assert_eq!(worker.refusal(sql).await.0, "42501", "{name}");
    }
    let id = worker.worker(&["f", "q"]).await;
    assert_eq!(worker.get(&format!("SELECT pgflow.heartbeat('{id}')")).await, "true");
    let counted =
        r#"SELECT pgflow.count_tasks('[{"queue": "q", "polls": 2}, {"queue": "gone", "polls": 1}]')"#;
    assert_eq!(worker.count(counted).await, 1, "a queue that nobody uses is left out");
    assert_eq!(
        worker.get("SELECT pgflow.compare_flow_shape('f', '{\"steps\": []}') ->> 'verdict'").await,
        "different"
    );
    let tasks = worker.read(id, &["f", "q"], 2).await;
    assert_eq!(worker.fail(&[(tasks[0].clone(), "x")]).await[0].0, "retried");
    assert_eq!(
        worker
            .count(&format!(
                "SELECT pgflow.release_tasks(ARRAY['{run}']::uuid[], ARRAY['m'], ARRAY[{}])",
                tasks[1].task_index
            ))
            .await,
        1
    );
    // A function of somebody else's making is not called, whatever its name.
    let mut own = worker.pool.acquire().await.expect("a connection");
    for statement in [
        "CREATE TEMP TABLE runs (x int)",
        "CREATE DOMAIN pg_temp.uuid AS text",
        "SET search_path TO pg_temp, public",
    ] {
        sqlx::query(statement).execute(&mut *own).await.expect("it may make temporary things");
    }
    let read: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pgflow.read_and_start(ARRAY['f'], ARRAY[1], $1::pg_catalog.uuid)",
    )
    .bind(id.to_string())
    .fetch_one(&mut *own)
    .await
    .expect("the functions do not see them");
    assert_eq!(read, 1);
    drop(own);
    worker.run(&format!("SELECT pgflow.requeue_stalled_tasks(); SELECT pgflow.requeue_tasks_of_dead_workers(); SELECT pgflow.repair_queues(ARRAY['f']); \
         SELECT pgflow.release_tasks(ARRAY['{run}', '{run}', '{run}']::uuid[], ARRAY['m', 'm', 'm'], ARRAY[0, 1, 2])")).await;
    assert_eq!(worker.drain(&["f", "q"], |_| json!(1)).await, 4);
    worker.run(&format!("SELECT pgflow.mark_worker_stopped('{id}')")).await;
    assert_eq!(db.status(run).await, "completed");

    let client = format!("client_{:x}", fastrand::u64(..));
    db.run(&format!("CREATE ROLE {client} LOGIN; SELECT pgflow.grant_role('{client}', 'client')")).await;
    let client = db.as_role(&client).await;
    let run: Uuid = client.start("f", &json!([])).await;
    assert_eq!(client.status(run).await, "started");
    assert_eq!(
        client.refusal("SELECT pgflow.complete_task(gen_random_uuid(), 'z', 0, '1')").await.0,
        "42501"
    );
    assert_eq!(db.refusal("SELECT pgflow.grant_role('laneway', 'king')").await.0, "PF001");
}

#[tokio::test]
async fn what_is_given_never_becomes_sql() {
    let db = database().await;
    let evil = "x'; DROP TABLE pgflow.runs; --";
    for sql in [
        "SELECT pgflow.create_flow($1)",
        "SELECT pgflow.create_flow('f', queue => $1)",
        "SELECT pgflow.repair_queues(ARRAY[$1])",
        "SELECT pgflow.read_with_poll($1)",
        "SELECT pgflow.start_tasks($1, '{}'::bigint[], NULL::uuid)",
        "SELECT pgflow.read_and_start(ARRAY[$1], ARRAY[1], NULL)",
        "SELECT pgflow.start_flow($1, '{}')",
        "SELECT pgflow.grant_role($1, 'worker')",
    ] {
        let outcome = sqlx::query(sql).bind(evil).execute(&db.pool).await;
        let (code, message) = refusal(outcome.map(drop), sql);
        assert!(["PF001", "PF002", "42704"].contains(&code.as_str()), "{sql}: {code} {message}");
    }
    assert_eq!(db.count("SELECT count(*) FROM pgflow.runs").await, 0);
}

#[tokio::test]
async fn what_workers_count_is_added_up_and_what_is_no_count_is_refused() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a')").await;
    let handlers = |one: u32| format!("[{one}{}]", ", 0".repeat(16));
    for _ in 0..3 {
        let counts = format!(
            r#"[{{"queue": "f", "polls": 2, "taken": 1, "handler_seconds": 0.5, "handlers": {}}}]"#,
            handlers(1)
        );
        assert_eq!(db.count(&format!("SELECT pgflow.count_tasks('{counts}')")).await, 1);
    }
    let row = "SELECT polls || ' ' || taken || ' ' || completed || ' ' || handler_seconds || ' ' || handlers[1] || ' ' || handlers[17] FROM pgflow.queue_counts";
    assert_eq!(db.get(row).await, "6 3 0 1.5 3 0");
    let negative = format!(r#"[{{"queue": "f", "handlers": {}}}]"#, handlers(1).replace("[1", "[-1"));
    let many = format!("[{}]", vec![r#"{"queue": "f"}"#; 1_001].join(","));
    for bad in [
        "{}",
        "null",
        r#"[{"polls": 1}]"#,
        r#"[{"queue": "f", "polls": -1}]"#,
        r#"[{"queue": "f", "handlers": [1]}]"#,
        r#"[{"queue": "f", "handler_seconds": -1}]"#,
        &negative,
        &many,
    ] {
        assert_eq!(db.refusal(&format!("SELECT pgflow.count_tasks('{bad}')")).await.0, "PF001", "{bad}");
    }
    assert_eq!(db.get(row).await, "6 3 0 1.5 3 0", "nothing of it was counted");
    let bounds = laneway_flow::look::HANDLER_BOUNDS.map(|bound| bound.to_string()).join(",");
    let same = format!("SELECT (pgflow._handler_bounds() = '{{{bounds}}}'::double precision[])::text");
    assert_eq!(db.get(&same).await, "true", "the database and the workers have the same bounds");
}
