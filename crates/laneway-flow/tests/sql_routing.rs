//! Queue routing: the tests of document 002, as they can be run (its own ones compare types that do not compare, and violate foreign
//! keys), and what its words leave open.

mod sql;

use std::time::{Duration, Instant};

use serde_json::json;
use sql::database;

/// The document's flow for its first test, by its own five-text form of `add_step`.
const MULTI_QUEUE: &str = "SELECT pgflow.create_flow('multi_queue_test');
    SELECT pgflow.add_step('multi_queue_test', 'email_step', 'single', '{}', 'email_worker');
    SELECT pgflow.add_step('multi_queue_test', 'cpu_step', 'single', '{}', 'cpu_worker');
    SELECT pgflow.add_step('multi_queue_test', 'default_step', 'single', '{}', NULL);";

#[tokio::test]
async fn tasks_go_to_the_queues_of_their_steps() {
    let db = database().await;
    db.run(MULTI_QUEUE).await;
    db.run("SELECT pgflow.start_flow('multi_queue_test', '{\"test\": true}')").await;
    for queue in ["email_worker", "cpu_worker", "multi_queue_test"] {
        assert_eq!(db.count(&format!("SELECT count(*) FROM pgmq.q_{queue}")).await, 1, "{queue}");
    }
    assert_eq!(
        db.get("SELECT string_agg(step_slug || '>' || queue, ' ' ORDER BY step_slug) FROM pgflow.step_tasks")
            .await,
        "cpu_step>cpu_worker default_step>multi_queue_test email_step>email_worker"
    );
    db.check().await;
}

#[tokio::test]
async fn a_message_id_is_unique_in_its_queue_and_not_across_queues() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('test_flow', queue => 'false');
         SELECT pgflow.add_step('test_flow', s) FROM unnest(ARRAY['step1', 'step2', 'step3']) s;
         SELECT pgflow.start_flow('test_flow', '{}');
         DELETE FROM pgflow.step_tasks;
         INSERT INTO pgflow.step_tasks (flow_slug, run_id, step_slug, queue, message_id, status)
         SELECT 'test_flow', run_id, v.step, v.queue, 12345, 'queued'
         FROM pgflow.runs, (VALUES ('step1', 'queue_a'), ('step2', 'queue_b')) v(step, queue);",
    )
    .await;
    assert_eq!(db.count("SELECT count(*) FROM pgflow.step_tasks WHERE message_id = 12345").await, 2);
    let (code, _) = db
        .refusal(
            "INSERT INTO pgflow.step_tasks (flow_slug, run_id, step_slug, queue, message_id, status)
             SELECT 'test_flow', run_id, 'step3', 'queue_a', 12345, 'queued' FROM pgflow.runs",
        )
        .await;
    assert_eq!(code, "23505");
    // Any number of tasks may be without a message.
    db.run(
        "UPDATE pgflow.step_tasks SET message_id = NULL;
         INSERT INTO pgflow.step_tasks (flow_slug, run_id, step_slug, queue, status) SELECT 'test_flow', run_id, 'step3', 'queue_a', 'queued' FROM pgflow.runs",
    )
    .await;
}

#[tokio::test]
async fn the_indexes_of_the_document_are_there() {
    let db = database().await;
    let indexes = db
        .get("SELECT string_agg(indexdef, E'\\n' ORDER BY indexname) FROM pg_indexes WHERE schemaname = 'pgflow' AND tablename = 'step_tasks'")
        .await;
    for part in [
        "CREATE UNIQUE INDEX unique_msg_per_queue ON pgflow.step_tasks USING btree (queue, message_id) WHERE (message_id IS NOT NULL)",
        "idx_step_tasks_queue_status ON pgflow.step_tasks USING btree (queue, status) WHERE ((queue IS NOT NULL) AND (status = 'queued'::text))",
        "idx_step_tasks_queue_worker ON pgflow.step_tasks USING btree (queue, last_worker_id) WHERE ((queue IS NOT NULL) AND (status = 'started'::text))",
    ] {
        assert!(indexes.contains(part), "{part}\nis not in\n{indexes}");
    }
}

#[tokio::test]
async fn workers_only_get_tasks_of_their_queues() {
    let db = database().await;
    db.run(MULTI_QUEUE).await;
    for _ in 0..10 {
        db.start("multi_queue_test", &json!({})).await;
    }
    let (email, cpu) = (db.worker(&["email_worker"]).await, db.worker(&["cpu_worker"]).await);
    let emails = db.read(email, &["email_worker"], 100).await;
    assert_eq!(emails.len(), 10);
    assert!(emails.iter().all(|it| it.queue == "email_worker" && it.step_slug == "email_step"));
    let cpus = db.read(cpu, &["cpu_worker"], 100).await;
    assert_eq!(cpus.len(), 10);
    assert!(cpus.iter().all(|it| it.queue == "cpu_worker" && it.step_slug == "cpu_step"));
    assert_eq!(db.count("SELECT count(*) FROM pgflow.step_tasks WHERE status = 'queued'").await, 10);
    db.check().await;
}

#[tokio::test]
async fn one_call_reads_many_queues_each_up_to_its_limit() {
    let db = database().await;
    db.run(MULTI_QUEUE).await;
    for _ in 0..10 {
        db.start("multi_queue_test", &json!({})).await;
    }
    let worker = db.worker(&["email_worker"]).await;
    let order = db
        .get(&format!(
            "SELECT string_agg(queue || ':' || n, ' ') FROM (SELECT queue, count(*) AS n, min(place) AS place FROM \
             pgflow.read_and_start(ARRAY['cpu_worker', 'multi_queue_test', 'email_worker'], ARRAY[7, 0, 2], '{worker}') \
             WITH ORDINALITY x(queue, msg_id, flow_slug, run_id, step_slug, task_index, input, flow_input, attempts_count, max_attempts, \
             timeout, step_type, key, start_number, place) GROUP BY queue ORDER BY 3) y"
        ))
        .await;
    assert_eq!(order, "cpu_worker:7 email_worker:2");
}

/// The document: 100 flows over 5 queues, a worker for each, in less than 10 seconds.
#[tokio::test]
async fn a_hundred_flows_over_five_queues() {
    let db = database().await;
    for flow in 0..100 {
        db.run(&format!(
            "SELECT pgflow.create_flow('test_flow_{flow}', queue => 'worker_{0}'); SELECT pgflow.add_step('test_flow_{flow}', 'a'); \
             SELECT pgflow.add_step('test_flow_{flow}', 'b', ARRAY['a']); SELECT pgflow.start_flow('test_flow_{flow}', '{{\"test\": {flow}}}')",
            flow % 5
        ))
        .await;
    }
    let start = Instant::now();
    let all = ["worker_0", "worker_1", "worker_2", "worker_3", "worker_4"];
    let work = all.map(|queue| {
        let db = &db;
        async move {
            db.drain(&[queue], |task| {
                assert_eq!(task.queue, queue);
                json!(null)
            })
            .await
        }
    });
    let [a, b, c, d, e] = work;
    let counts = tokio::join!(a, b, c, d, e);
    assert_eq!(counts, (40, 40, 40, 40, 40));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(db.count("SELECT count(*) FROM pgflow.runs WHERE status = 'completed'").await, 100);
    db.check().await;
}

/// The flow of the document's usage example: a default, an override, and a step by hand.
#[tokio::test]
async fn a_step_inherits_overrides_or_is_done_by_hand() {
    let db = database().await;
    db.run(
        "SELECT pgflow.create_flow('data_flow', queue => 'data_processor');
         SELECT pgflow.add_step('data_flow', 'fetch');
         SELECT pgflow.add_step('data_flow', 'notify', ARRAY['fetch'], queue => 'email_worker');
         SELECT pgflow.add_step('data_flow', 'debug', ARRAY['fetch'], queue => 'false');",
    )
    .await;
    assert_eq!(
        db.get("SELECT string_agg(q, ' ') FROM pgflow.flow_queues('data_flow') q").await,
        "data_processor email_worker"
    );
    assert_eq!(
        db.get("SELECT pgflow._queue_exists('data_flow')").await,
        "false",
        "no queue that nothing uses"
    );
    let run = db.start("data_flow", &json!({"url": "x"})).await;
    assert_eq!(db.drain(&["data_processor"], |_| json!("page")).await, 1);
    assert_eq!(db.step(run, "debug").await, "started");
    assert_eq!(
        db.get("SELECT status || coalesce(queue, '-') || coalesce(message_id, -1) FROM pgflow.step_tasks WHERE step_slug = 'debug'").await,
        "started--1",
        "born started, without a queue, without a message"
    );
    assert_eq!(
        db.drain(&["email_worker"], |task| {
            assert_eq!(task.input, json!({"fetch": "page"}));
            json!("sent")
        })
        .await,
        1
    );
    assert_eq!(db.status(run).await, "started");
    db.run(&format!("SELECT pgflow.complete_task('{run}', 'debug', 0, '\"seen\"')")).await;
    assert_eq!(db.status(run).await, "completed");
    assert_eq!(db.output(run).await, json!({"notify": "sent", "debug": "seen"}));
    db.check().await;
}

#[tokio::test]
async fn names_of_queues_are_checked_and_lower_case() {
    let db = database().await;
    for bad in ["", "has space", "semi;colon", "q'uote", "1st", "dash-ed", &"x".repeat(48)] {
        let (code, message) =
            db.refusal(&format!("SELECT pgflow.create_flow('f', queue => $q${bad}$q$)")).await;
        assert_eq!(code, "PF001", "{message}");
    }
    let (code, message) = db.refusal(&format!("SELECT pgflow.create_flow('{}')", "s".repeat(100))).await;
    assert_eq!((code.as_str(), message.contains("47")), ("PF001", true), "{message}");
    // A long slug is fine with a queue of its own.
    db.run(&format!("SELECT pgflow.create_flow('{}', queue => 'short')", "s".repeat(128))).await;
    for bad in ["", "run", "1a", "a-b", "a b", &"s".repeat(129)] {
        assert_eq!(db.refusal(&format!("SELECT pgflow.create_flow('{bad}', queue => 'q')")).await.0, "PF001");
    }
    // pgmq makes one table of both, so they are one queue.
    db.run(
        "SELECT pgflow.create_flow('Upper'); SELECT pgflow.add_step('Upper', 'a'); SELECT pgflow.create_flow('upper');
         SELECT pgflow.add_step('upper', 'a', queue => 'UPPER'); SELECT pgflow.start_flow('Upper', '1'); SELECT pgflow.start_flow('upper', '2');",
    )
    .await;
    let worker = db.worker(&["Upper"]).await;
    let tasks = db.read(worker, &["UPPER"], 10).await;
    assert_eq!(tasks.iter().map(|it| it.flow_slug.as_str()).collect::<Vec<_>>(), ["Upper", "upper"]);
    db.check().await;
}

#[tokio::test]
async fn a_shared_queue_gives_a_worker_only_the_flows_it_names() {
    let db = database().await;
    for flow in ["one", "two"] {
        db.run(&format!(
            "SELECT pgflow.create_flow('{flow}', queue => 'shared'); SELECT pgflow.add_step('{flow}', 'a')"
        ))
        .await;
        for _ in 0..5 {
            db.start(flow, &json!({})).await;
        }
    }
    let worker = db.worker(&["shared"]).await;
    let tasks = db.try_read(worker, &["shared"], 100, Some(&["two"])).await.expect("the queue is there");
    assert_eq!(tasks.len(), 5);
    assert!(tasks.iter().all(|it| it.flow_slug == "two"));
    assert_eq!(db.read(worker, &["shared"], 100).await.len(), 5, "the others were not touched");
    // Deleting one of them leaves the queue, with the messages of the other.
    db.run("SELECT pgflow.delete_flow_and_data('two')").await;
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_shared").await, 5);
    db.run("SELECT pgflow.delete_flow_and_data('one')").await;
    assert_eq!(db.get("SELECT pgflow._queue_exists('shared')").await, "false");
    assert_eq!(db.count("SELECT count(*) FROM pgflow.flows").await, 0);
}

#[tokio::test]
async fn messages_that_are_not_ours_are_left_and_those_without_a_task_are_put_away() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a'); SELECT pgmq.send('f', '{\"hello\": 1}'); SELECT pgmq.send('f', 'null')").await;
    db.run("SELECT pgmq.send('f', '{\"run_id\": \"00000000-0000-0000-0000-000000000000\", \"flow_slug\": \"f\"}')").await;
    let run = db.start("f", &json!({})).await;
    assert_eq!(db.drain(&["f"], |_| json!(1)).await, 1);
    assert_eq!(db.status(run).await, "completed");
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 2, "the two that are not ours");
    assert_eq!(db.count("SELECT count(*) FROM pgmq.a_f").await, 2, "the task's and the one without a task");
}

/// The original's two calls, by queue; a task that is started is not started again, and its message stays hidden as long as it may take.
#[tokio::test]
async fn the_two_phases_of_the_original_by_queue() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f', timeout => 50); SELECT pgflow.add_step('f', 'a'); SELECT pgflow.add_step('f', 'b', timeout => 7, queue => 'q')").await;
    db.start("f", &json!({"n": 1})).await;
    let worker = db.worker(&["f", "q"]).await;
    let two_phases = |queue: &str| {
        format!(
            "SELECT string_agg(step_slug || input || coalesce(flow_input, 'null'), ' ') FROM pgflow.start_tasks('{queue}', \
             ARRAY(SELECT msg_id FROM pgflow.read_with_poll('{queue}', 0, 10, 1, 50)), '{worker}')"
        )
    };
    assert_eq!(db.get(&two_phases("f")).await, "a{}{\"n\": 1}");
    assert_eq!(
        db.get(&format!("SELECT count(*) FROM pgflow.start_tasks('f', ARRAY[1::bigint], '{worker}')")).await,
        "0"
    );
    assert_eq!(
        db.get(&format!("SELECT count(*) FROM pgflow.start_tasks('f', ARRAY[1::bigint], '{worker}', 'q')"))
            .await,
        "1"
    );
    for (queue, seconds) in [("f", 52), ("q", 9)] {
        let hidden = db
            .count(&format!("SELECT round(extract(epoch FROM vt - clock_timestamp())) FROM pgmq.q_{queue}"))
            .await;
        assert!((seconds - 2..=seconds).contains(&hidden), "{queue}: {hidden}");
    }
    assert_eq!(db.get("SELECT string_agg(attempts_count::text, '') FROM pgflow.step_tasks").await, "11");
    db.check().await;
}

/// From one queue per flow to routing, while runs are under way: what waits goes along at once, what is in hand when it has to be tried again.
#[tokio::test]
async fn a_step_that_is_routed_elsewhere_takes_its_tasks_along() {
    let db = database().await;
    let shape = |queue: &str| {
        format!(
            "SELECT pgflow.ensure_flow_compiled('f', '{{\"options\": {{\"baseDelay\": 0}}, \"steps\": [{{\"slug\": \"m\", \"stepType\": \"map\", \"queue\": {queue}}}]}}') ->> 'status'"
        )
    };
    assert_eq!(db.get(&shape("null")).await, "compiled");
    let run = db.start("f", &json!([0, 1, 2, 3])).await;
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 2).await;
    assert_eq!(db.get(&shape("\"fast\"")).await, "updated");
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_fast").await, 2);
    db.check().await;
    // The old worker completes one, and fails the other, which then is a task of the new queue.
    assert_eq!(db.complete(&[(tasks[0].clone(), json!("old"))]).await, ["completed"]);
    assert_eq!(db.fail(&[(tasks[1].clone(), "again")]).await[0].0, "retried");
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 0);
    db.check().await;
    // A delay goes along.
    db.run("UPDATE pgmq.q_fast SET vt = vt + interval '100 s' WHERE msg_id = 1").await;
    assert_eq!(db.get(&shape("\"faster\"")).await, "updated");
    assert_eq!(
        db.count("SELECT count(*) FROM pgmq.q_faster WHERE vt > clock_timestamp() + interval '90 s'").await,
        1
    );
    assert_eq!(db.drain(&["faster"], |_| json!("new")).await, 2);
    // The last one becomes somebody's business.
    assert_eq!(db.get(&shape("\"false\"")).await, "updated");
    let index =
        db.get("SELECT task_index FROM pgflow.step_tasks WHERE status = 'started' AND queue IS NULL").await;
    db.check().await;
    db.run(&format!("SELECT pgflow.complete_task('{run}', 'm', {index}, '\"hand\"')")).await;
    assert_eq!(db.status(run).await, "completed");
    db.check().await;
}

/// What failed before its step was routed elsewhere is done where the step is now.
#[tokio::test]
async fn a_run_that_goes_on_goes_to_the_queue_of_now() {
    let db = database().await;
    let shape = |queue: &str| {
        format!(
            "SELECT pgflow.ensure_flow_compiled('f', '{{\"options\": {{\"maxAttempts\": 1}}, \"steps\": [{{\"slug\": \"a\", \"queue\": {queue}}}]}}') ->> 'status'"
        )
    };
    db.run(&shape("null")).await;
    let run = db.start("f", &json!({})).await;
    let worker = db.worker(&["f"]).await;
    let tasks = db.read(worker, &["f"], 1).await;
    assert_eq!(db.fail(&[(tasks[0].clone(), "no")]).await[0].0, "failed");
    assert_eq!(db.get(&shape("\"fast\"")).await, "updated");
    assert_eq!(db.get(&format!("SELECT pgflow.retry_run('{run}')")).await, "true");
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_fast").await, 1);
    assert_eq!(db.count("SELECT count(*) FROM pgmq.q_f").await, 0);
    db.check().await;
    assert_eq!(db.drain(&["fast"], |_| json!(1)).await, 1);
    assert_eq!(db.status(run).await, "completed");
}

#[tokio::test]
async fn a_step_that_is_added_is_no_business_of_runs_under_way() {
    let db = database().await;
    db.run("SELECT pgflow.create_flow('f'); SELECT pgflow.add_step('f', 'a')").await;
    let run = db.start("f", &json!({})).await;
    db.run("SELECT pgflow.add_step('f', 'm', ARRAY['a'], step_type => 'map')").await;
    assert_eq!(db.drain(&["f"], |_| json!(7)).await, 1, "no array, and nobody of this run wants one");
    assert_eq!(db.status(run).await, "completed");
    let output = format!("SELECT (output -> 'a')::text FROM pgflow.runs WHERE run_id = '{run}'");
    assert_eq!(db.get(&output).await, "7", "it is still a last step");
    let later = db.start("f", &json!({})).await;
    let steps = format!("SELECT remaining_steps::bigint FROM pgflow.runs WHERE run_id = '{later}'");
    assert_eq!(db.count(&steps).await, 2);
}

#[tokio::test]
async fn a_queue_of_no_flow_is_not_read() {
    let db = database().await;
    db.run("SELECT pgmq.create('theirs'); SELECT pgmq.send('theirs', '{}')").await;
    for call in ["read_and_start(ARRAY['theirs'], ARRAY[1], NULL)", "read_with_poll('theirs')"] {
        let (code, message) = db.refusal(&format!("SELECT pgflow.{call}")).await;
        assert_eq!((code.as_str(), message.as_str()), ("PF004", "no flow has a queue 'theirs'"));
    }
    assert_eq!(db.count("SELECT max(read_ct)::bigint FROM pgmq.q_theirs").await, 0);
}
