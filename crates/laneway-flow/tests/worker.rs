//! Workers on a real Postgres: routing, isolation, order, retries, shutdown. The story of document 002's tests, in its order.

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway_flow::worker::StrategyKind;
use laneway_flow::{
    Action, Context, Definition, Failure, Flow, FlowError, OwnQueue, Settings, Skip, SkipCascade, Start,
    Steps, Worker, client, look, queues,
};
use serde_json::{Value, json};
use support::{Database, PATIENCE};
use tokio::sync::Notify;
use uuid::Uuid;

queues! {
    DataProcessor = "data_processor";
    EmailWorker = "email_worker";
}

/// Which steps ran on which queue, as their handlers saw it.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(String, String)>>>);

impl Log {
    fn note<F>(&self, context: &Context<F>) {
        self.0.lock().unwrap().push((context.step().to_owned(), context.queue().to_owned()));
    }

    fn seen(&self) -> Vec<(String, String)> {
        let mut seen = self.0.lock().unwrap().clone();
        seen.sort();
        seen
    }
}

/// The document's flow: a default queue, a step that is routed elsewhere, and one that is completed by hand.
#[derive(Default)]
struct DataFlow {
    log: Log,
}

impl Flow for DataFlow {
    const SLUG: &'static str = "data_flow";
    type Input = String;
    type Queues = (DataProcessor, EmailWorker);

    fn steps(&self, flow: &mut Steps<Self>) {
        let (fetched, notified) = (self.log.clone(), self.log.clone());
        let fetch = flow.step("fetch").run(move |url: String, context: Context<Self>| {
            fetched.note(&context);
            async move { Ok(url.len()) }
        });
        let notify =
            flow.step("notify").after(&fetch).queue(EmailWorker).run(move |length: usize, context| {
                notified.note(&context);
                async move { Ok(format!("{length} characters")) }
            });
        flow.step("debug").after((&fetch, &notify)).manual::<bool>();
    }
}

fn quick() -> Settings {
    Settings { heartbeat_seconds: 1, dead_after_seconds: 3, shutdown_seconds: 10, ..Settings::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_go_to_the_queues_of_their_steps_and_only_their_workers_do_them() {
    let database = Database::start().await;
    let (data, email) = (DataFlow::default(), DataFlow::default());
    let emails =
        Worker::on(&database.pool).serve(email.define().unwrap().on(EmailWorker)).start().await.unwrap();
    let run = Start::of::<DataFlow>(&"http://example".to_owned()).unwrap().on(&database.pool).await.unwrap();
    assert_eq!(database.count("SELECT count(*) FROM pgmq.q_data_processor").await, 1);
    assert_eq!(database.count("SELECT count(*) FROM pgmq.q_email_worker").await, 0);
    assert_eq!(emails.stats().taken, 0, "what is not on its queue is not its own");

    let processing = data.define().unwrap().on(DataProcessor);
    let processors = Worker::on(&database.pool).serve(processing).settings(quick()).start().await.unwrap();
    let manual = "SELECT count(*) FROM pgflow.step_tasks WHERE step_slug = 'debug' AND status = 'started' AND message_id IS NULL";
    database.until(manual, 1).await;
    assert_eq!(data.log.seen(), [("fetch".to_owned(), "data_processor".to_owned())]);
    assert_eq!(email.log.seen(), [("notify".to_owned(), "email_worker".to_owned())]);

    assert!(client::complete(&database.pool, run, "debug", 0, &json!(true)).await.unwrap());
    let state = database.end_of(run).await;
    assert_eq!((state.status(), state.output()), ("completed", &json!({"debug": true})));
    assert!(!client::complete(&database.pool, run, "debug", 0, &json!(false)).await.unwrap(), "it was over");
    assert_eq!(processors.stop().await.stats.completed, 1);
    assert_eq!(emails.stop().await.stats.completed, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_flows_over_five_queues_end_whatever_the_strategy() {
    let database = Database::start().await;
    let definition = |flow: usize| {
        let text = format!(
            r#"{{"slug":"test_flow_{flow}","queue":"worker_{}","steps":[{{"slug":"only"}}]}}"#,
            flow % 5
        );
        Definition::from_json(&text).unwrap()
    };
    let seen: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
    let serve = |strategy: StrategyKind, flows: Vec<usize>| {
        let mut builder = Worker::on(&database.pool).settings(Settings { strategy, ..quick() });
        for flow in flows {
            let seen = seen.clone();
            let action = Action::plain(move |task| {
                seen.lock().unwrap().push((task.flow.clone(), task.queue.clone()));
                async move { Ok(task.flow_input.clone().unwrap()) }
            });
            builder = builder.serve_data(definition(flow), HashMap::from([("only".to_owned(), action)]));
        }
        builder.start()
    };
    // One worker per queue, as in the document; the last one serves two queues.
    let strategies =
        [StrategyKind::RoundRobin, StrategyKind::Priority, StrategyKind::Weighted, StrategyKind::RoundRobin];
    let mut workers = Vec::new();
    for (queue, strategy) in strategies.into_iter().enumerate() {
        let mine = |flow: &usize| flow % 5 == queue || (queue == 3 && flow % 5 == 4);
        workers.push(serve(strategy, (0..100).filter(mine).collect()).await.unwrap());
    }
    let mut runs = Vec::new();
    for flow in 0..100 {
        let start = Start::named(&format!("test_flow_{flow}"), json!(flow));
        runs.push((flow, start.on(&database.pool).await.unwrap()));
    }
    for (flow, run) in runs {
        assert_eq!(database.end_of(run).await.output(), &json!({"only": flow}));
    }
    let mut taken = 0;
    for worker in workers {
        let stopped = worker.stop().await;
        assert_eq!(stopped.stats.taken, stopped.stats.completed, "every task was done once");
        taken += stopped.stats.taken;
    }
    assert_eq!(taken, 100);
    let seen = seen.lock().unwrap();
    let right = |(flow, queue): &(String, String)| {
        let number: usize = flow.trim_start_matches("test_flow_").parse().unwrap();
        *queue == format!("worker_{}", number % 5)
    };
    assert!(seen.len() == 100 && seen.iter().all(right), "{seen:?}");
}

struct Sums;

impl Flow for Sums {
    const SLUG: &'static str = "sums";
    type Input = u64;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let numbers = flow.array("numbers").run(|upto: u64, _| async move { Ok((0..upto).collect()) });
        let squares = flow.map("squares", &numbers).run(|number: u64, _| async move { Ok(number * number) });
        flow.step("sum").after((&numbers, &squares)).run(
            |(numbers, squares): (Vec<u64>, Vec<u64>), context| async move {
                let wrong =
                    numbers.iter().zip(&squares).find(|(number, square)| *number * *number != **square);
                match wrong {
                    Some(pair) => Err(Failure::fatal(format!("out of order: {pair:?} in {context:?}"))),
                    None if numbers.len() != squares.len() => Err(Failure::fatal("some are missing")),
                    None => Ok(squares.iter().sum::<u64>()),
                }
            },
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_gives_its_results_in_order_and_an_empty_one_gives_none() {
    let database = Database::start().await;
    let worker = Worker::on(&database.pool).serve(Sums.define().unwrap()).start().await.unwrap();
    for upto in [0, 1, 137] {
        let run = Start::of::<Sums>(&upto).unwrap().on(&database.pool).await.unwrap();
        let state = database.end_of(run).await;
        let sum = (0..upto).map(|number| number * number).sum::<u64>();
        assert_eq!(state.output_of::<u64>("sum"), Some(sum), "{:#}", state.json());
    }
    worker.stop().await;
}

/// What a step does with its text: the names of the ways to fail.
struct Trials {
    attempts: Arc<AtomicUsize>,
}

impl Flow for Trials {
    const SLUG: &'static str = "trials";
    type Input = String;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let attempts = self.attempts.clone();
        let trial = flow
            .step("trial")
            .max_attempts(3)
            .base_delay(Duration::ZERO)
            .timeout(Duration::from_secs(1))
            .exhausted(Skip)
            .run(move |way: String, context: Context<Self>| {
                attempts.fetch_add(1, SeqCst);
                async move {
                    match (way.as_str(), context.attempt()) {
                        ("second", 1) | ("never", _) => Err(Failure::new("not yet")),
                        ("panics", 1) => panic!("as asked"),
                        ("slow", 1) => std::future::pending().await,
                        ("fatal", _) => Err(Failure::fatal("no use")),
                        _ => Ok(context.attempt()),
                    }
                }
            });
        flow.step("after").after(&trial).run(|attempt: Option<u32>, _| async move { Ok(attempt) });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_tried_again_as_often_as_the_step_says() {
    let database = Database::start().await;
    let attempts = Arc::new(AtomicUsize::new(0));
    let flow = Trials { attempts: attempts.clone() }.define().unwrap();
    let worker = Worker::on(&database.pool).serve(flow).start().await.unwrap();
    let cases = [
        ("fine", 1, json!(1)),
        ("second", 2, json!(2)),
        ("panics", 2, json!(2)),
        ("slow", 2, json!(2)),
        ("never", 3, Value::Null),
        ("fatal", 1, Value::Null),
    ];
    for (way, expected, output) in cases {
        attempts.store(0, SeqCst);
        let run = Start::of::<Trials>(&way.to_owned()).unwrap().on(&database.pool).await.unwrap();
        let state = database.end_of(run).await;
        assert_eq!(
            (attempts.load(SeqCst), state.output()),
            (expected, &json!({"after": output})),
            "{way}: {:#}",
            state.json()
        );
        let status = if output.is_null() { "skipped" } else { "completed" };
        assert_eq!(state.step_status("trial"), Some(status), "{way}");
    }
    let stats = worker.stop().await.stats;
    assert_eq!((stats.retried, stats.failed), (5, 2));
}

struct Saga;

impl Flow for Saga {
    const SLUG: &'static str = "saga";
    type Input = Value;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let book =
            flow.step("book").max_attempts(1).exhausted(SkipCascade).run(|order: Value, _| async move {
                if order["soldOut"] == true { Err(Failure::new("sold out")) } else { Ok(7_u32) }
            });
        let charge = flow.step("charge").after(&book).run(|seat: u32, _| async move { Ok(seat * 100) });
        flow.step("ticket").after(&charge).run(|cents: u32, _| async move { Ok(format!("paid {cents}")) });
        flow.step("apologise")
            .when(json!({"soldOut": true}), SkipCascade)
            .run(|_: Value, _| async move { Ok("sorry".to_owned()) });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_skip_takes_everything_behind_it_along() {
    let database = Database::start().await;
    let worker = Worker::on(&database.pool).serve(Saga.define().unwrap()).start().await.unwrap();
    let run = Start::of::<Saga>(&json!({"soldOut": true})).unwrap().on(&database.pool).await.unwrap();
    let state = database.end_of(run).await;
    let statuses =
        ["book", "charge", "ticket", "apologise"].map(|step| state.step_status(step).unwrap().to_owned());
    assert_eq!(statuses, ["skipped", "skipped", "skipped", "completed"]);
    assert_eq!(state.status(), "completed");
    let run = Start::of::<Saga>(&json!({})).unwrap().on(&database.pool).await.unwrap();
    let state = database.end_of(run).await;
    assert_eq!(state.output_of::<String>("ticket").as_deref(), Some("paid 700"), "{:#}", state.json());
    assert_eq!(state.step_status("apologise"), Some("skipped"));
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_is_part_of_the_callers_transaction_and_counts_once() {
    let database = Database::start().await;
    client::compile(&database.pool, Sums.define().unwrap().definition(), false).await.unwrap();
    let start = || Start::of::<Sums>(&3).unwrap().idempotency_key("order-7");
    let mut transaction = database.pool.begin().await.unwrap();
    start().on(&mut *transaction).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(database.count("SELECT count(*) FROM pgflow.runs").await, 0);
    assert_eq!(database.count("SELECT count(*) FROM pgmq.q_sums").await, 0, "its messages are gone as well");
    let run = start().on(&database.pool).await.unwrap();
    assert_eq!(start().on(&database.pool).await.unwrap(), run, "a repetition is the first one");
    let other = Start::of::<Sums>(&4).unwrap().idempotency_key("order-7").on(&database.pool).await;
    assert!(matches!(other, Err(FlowError::Conflict(_))), "{other:?}");
    assert_eq!(database.count("SELECT count(*) FROM pgflow.runs").await, 1);
}

/// Books twice in its transaction, and fails on its first attempt after having written.
struct Booking;

impl Flow for Booking {
    const SLUG: &'static str = "booking";
    type Input = i64;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        flow.step("book").base_delay(Duration::ZERO).commit(
            |cents: i64, connection, context: Context<Self>| {
                Box::pin(async move {
                    sqlx::query("INSERT INTO bookings VALUES ($1)").bind(cents).execute(connection).await?;
                    if context.attempt() == 1 { Err(Failure::new("after the write")) } else { Ok(cents) }
                })
            },
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_handler_writes_in_the_completing_transaction_is_written_once() {
    let database = Database::start().await;
    sqlx::query("CREATE TABLE bookings (cents bigint)").execute(&database.pool).await.unwrap();
    let worker = Worker::on(&database.pool).serve(Booking.define().unwrap()).start().await.unwrap();
    let runs = client::start_many(&database.pool, "booking", &(0..20).collect::<Vec<i64>>()).await.unwrap();
    for run in runs {
        assert_eq!(database.end_of(run).await.status(), "completed");
    }
    assert_eq!(database.count("SELECT count(*) FROM bookings").await, 20);
    assert_eq!(database.count("SELECT count(DISTINCT cents) FROM bookings").await, 20);
    worker.stop().await;
}

/// Notes when each run begins and ends.
#[derive(Clone, Default)]
struct Accounts {
    open: Arc<Mutex<HashMap<String, u64>>>,
    order: Arc<Mutex<HashMap<String, Vec<u64>>>>,
    overlaps: Arc<AtomicUsize>,
}

impl Flow for Accounts {
    const SLUG: &'static str = "accounts";
    const KEY: &'static [&'static str] = &["account"];
    type Input = Value;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let (first, last) = (self.clone(), self.clone());
        let begin = flow.step("begin").run(move |input: Value, context: Context<Self>| {
            let account = context.key().unwrap_or_default().to_owned();
            let number = input["number"].as_u64().unwrap();
            if first.open.lock().unwrap().insert(account.clone(), number).is_some() {
                first.overlaps.fetch_add(1, SeqCst);
            }
            async move { Ok((account, number)) }
        });
        flow.step("end").after(&begin).run(move |(account, number): (String, u64), _| {
            last.open.lock().unwrap().remove(&account);
            last.order.lock().unwrap().entry(account).or_default().push(number);
            async move { Ok(number) }
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_one_key_go_one_after_another() {
    let database = Database::start().await;
    let accounts = Accounts::default();
    let workers = [
        Worker::on(&database.pool).serve(accounts.define().unwrap()).start().await.unwrap(),
        Worker::on(&database.pool).serve(accounts.define().unwrap()).start().await.unwrap(),
    ];
    let inputs: Vec<Value> =
        (0..60).map(|number| json!({"account": format!("a{}", number % 3), "number": number})).collect();
    let runs = client::start_many(&database.pool, "accounts", &inputs).await.unwrap();
    for run in runs {
        assert_eq!(database.end_of(run).await.status(), "completed");
    }
    assert_eq!(accounts.overlaps.load(SeqCst), 0, "two runs of a key at once");
    for (account, order) in accounts.order.lock().unwrap().iter() {
        let first: u64 = account[1..].parse().unwrap();
        assert_eq!(*order, (0..20).map(|turn| first + 3 * turn).collect::<Vec<u64>>(), "account {account}");
    }
    for worker in workers {
        worker.stop().await;
    }
}

/// Waits for a signal in its handler.
#[derive(Clone)]
struct Gate {
    entered: Arc<AtomicUsize>,
    came: Arc<Notify>,
    open: Arc<tokio::sync::Semaphore>,
}

impl Gate {
    fn new() -> Self {
        Self { entered: Arc::default(), came: Arc::default(), open: Arc::new(tokio::sync::Semaphore::new(0)) }
    }

    async fn wait_for(&self, entered: usize) {
        let reached = async {
            while self.entered.load(SeqCst) < entered {
                self.came.notified().await;
            }
        };
        tokio::time::timeout(PATIENCE, reached).await.expect("the handlers begin");
    }
}

impl Flow for Gate {
    const SLUG: &'static str = "gate";
    type Input = u32;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let gate = self.clone();
        flow.step("wait").run(move |number: u32, _| {
            let gate = gate.clone();
            async move {
                gate.entered.fetch_add(1, SeqCst);
                gate.came.notify_one();
                gate.open.acquire().await?.forget();
                Ok(number)
            }
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_finishes_what_runs_and_hands_back_the_rest() {
    let database = Database::start().await;
    let gate = Gate::new();
    // Two slots, but four tasks in hand: two of them wait in their lanes.
    let settings = Settings { max_concurrent: 2, shutdown_seconds: 1, ..quick() };
    let worker =
        Worker::on(&database.pool).serve(gate.define().unwrap()).settings(settings).start().await.unwrap();
    let runs = client::start_many(&database.pool, "gate", &[1, 2, 3]).await.unwrap();
    gate.wait_for(2).await;
    gate.open.add_permits(1);
    // One finishes, the third begins; the second and the third never end.
    gate.wait_for(3).await;
    let stopped = worker.stop().await;
    assert_eq!((stopped.stats.completed, stopped.handed_back), (1, 2));
    assert_eq!(
        database
            .count("SELECT count(*) FROM pgflow.step_tasks WHERE status = 'queued' AND attempts_count = 0")
            .await,
        2
    );

    gate.open.add_permits(10);
    let other = Worker::on(&database.pool).serve(gate.define().unwrap()).start().await.unwrap();
    for run in runs {
        assert_eq!(database.end_of(run).await.status(), "completed");
    }
    let stats = other.stop().await.stats;
    assert_eq!((stats.taken, stats.completed), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tasks_of_a_dead_worker_go_to_another() {
    let database = Database::start().await;
    let gate = Gate::new();
    let dead =
        Worker::on(&database.pool).serve(gate.define().unwrap()).settings(quick()).start().await.unwrap();
    let run = Start::of::<Gate>(&1).unwrap().on(&database.pool).await.unwrap();
    gate.wait_for(1).await;
    drop(dead);
    let heir =
        Worker::on(&database.pool).serve(gate.define().unwrap()).settings(quick()).start().await.unwrap();
    gate.wait_for(2).await;
    gate.open.add_permits(10);
    assert_eq!(database.end_of(run).await.status(), "completed");
    assert_eq!(database.count("SELECT count(*) FROM pgflow.step_tasks WHERE status = 'completed'").await, 1);
    assert_eq!(heir.stop().await.stats.completed, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_task_stays_with_its_worker_as_long_as_that_lives() {
    let database = Database::start().await;
    let gate = Gate::new();
    let settings = || Settings { visibility_timeout: 1, ..quick() };
    let workers = [
        Worker::on(&database.pool).serve(gate.define().unwrap()).settings(settings()).start().await.unwrap(),
        Worker::on(&database.pool).serve(gate.define().unwrap()).settings(settings()).start().await.unwrap(),
    ];
    let run = Start::of::<Gate>(&1).unwrap().on(&database.pool).await.unwrap();
    gate.wait_for(1).await;
    // Three times its visibility: without signs of life another worker would have it by then.
    database
        .until("SELECT (now() > started_at + interval '3 seconds')::int::bigint FROM pgflow.step_tasks", 1)
        .await;
    gate.open.add_permits(10);
    assert_eq!(database.end_of(run).await.status(), "completed");
    assert_eq!(gate.entered.load(SeqCst), 1, "it began once");
    for worker in workers {
        worker.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_run_ends_its_handlers() {
    let database = Database::start().await;
    let gate = Gate::new();
    let worker =
        Worker::on(&database.pool).serve(gate.define().unwrap()).settings(quick()).start().await.unwrap();
    let run = Start::of::<Gate>(&1).unwrap().on(&database.pool).await.unwrap();
    gate.wait_for(1).await;
    assert!(client::cancel(&database.pool, run, Some("not wanted any more")).await.unwrap());
    assert_eq!(database.end_of(run).await.status(), "cancelled");
    tokio::time::timeout(PATIENCE, worker.idle()).await.expect("the handler is ended");
    assert_eq!(worker.stop().await.stats.completed, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_shape_and_an_unknown_queue_are_refused_in_words() {
    let database = Database::start().await;
    let flow = |text: &str| Definition::from_json(text).unwrap();
    let first = flow(r#"{"slug":"shape","steps":[{"slug":"a"},{"slug":"b","dependsOn":["a"]}]}"#);
    assert_eq!(client::compare(&database.pool, &first).await.unwrap(), client::Verdict::Missing);
    client::compile(&database.pool, &first, false).await.unwrap();
    assert_eq!(client::compare(&database.pool, &first).await.unwrap(), client::Verdict::Same);
    let patient =
        flow(r#"{"slug":"shape","timeout":99,"steps":[{"slug":"a"},{"slug":"b","dependsOn":["a"]}]}"#);
    let verdict = client::compare(&database.pool, &patient).await.unwrap();
    assert!(matches!(verdict, client::Verdict::Compatible(_)), "{verdict:?}");
    let other = flow(r#"{"slug":"shape","steps":[{"slug":"a"},{"slug":"c","dependsOn":["a"]}]}"#);
    let refused =
        Worker::on(&database.pool).serve_data(other, HashMap::new()).start().await.unwrap_err().to_string();
    assert!(refused.contains("\"shape\"") && refused.contains('c'), "{refused}");
    let lost = Settings { queue_name: Some("elsewhere".into()), ..Settings::default() };
    let refused = Worker::on(&database.pool).serve_data(first, HashMap::new()).settings(lost).start().await;
    let words = refused.unwrap_err().to_string();
    assert!(
        words.contains("Queue \"elsewhere\" is not used by flow \"shape\". Available queues: shape"),
        "{words}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_was_dropped_by_hand_is_made_again_and_nothing_is_lost() {
    let database = Database::start().await;
    client::compile(&database.pool, Sums.define().unwrap().definition(), false).await.unwrap();
    let run = Start::of::<Sums>(&5).unwrap().on(&database.pool).await.unwrap();
    sqlx::query("SELECT pgmq.drop_queue('sums')").execute(&database.pool).await.unwrap();
    let troubles: Arc<Mutex<Vec<String>>> = Arc::default();
    let told = troubles.clone();
    let worker = Worker::on(&database.pool).serve(Sums.define().unwrap());
    let worker =
        worker.on_trouble(move |what| told.lock().unwrap().push(what.to_owned())).start().await.unwrap();
    assert_eq!(
        database.end_of(run).await.output_of::<u64>("sum"),
        Some(30),
        "dropped before the worker came"
    );
    // Dropped under its hands, with a task in it: that of the second run.
    let mut transaction = database.pool.begin().await.unwrap();
    let run = Start::of::<Sums>(&5).unwrap().on(&mut *transaction).await.unwrap();
    sqlx::query("SELECT pgmq.drop_queue('sums')").execute(&mut *transaction).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(database.end_of(run).await.output_of::<u64>("sum"), Some(30), "dropped while it worked");
    assert!(troubles.lock().unwrap().iter().any(|what| what.contains("sums")), "{troubles:?}");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_over_the_limit_and_wrong_inputs_fail_their_task_only() {
    let database = Database::start().await;
    sqlx::query("UPDATE pgflow.limits SET max_payload_bytes = 2000").execute(&database.pool).await.unwrap();
    let definition =
        Definition::from_json(r#"{"slug":"sizes","steps":[{"slug":"grow","maxAttempts":2,"baseDelay":0}]}"#)
            .unwrap();
    let grow = Action::plain(|task| async move {
        let size: usize = task.flow_input.as_ref().unwrap().get().parse()?;
        Ok(serde_json::value::to_raw_value(&"x".repeat(size))?)
    });
    let actions = HashMap::from([("grow".to_owned(), grow)]);
    let worker = Worker::on(&database.pool).serve_data(definition, actions).start().await.unwrap();
    let big = Start::named("sizes", json!(100_000)).on(&database.pool).await.unwrap();
    let wrong = Start::named("sizes", json!("no number")).on(&database.pool).await.unwrap();
    let small = Start::named("sizes", json!(10)).on(&database.pool).await.unwrap();
    assert_eq!(database.end_of(small).await.status(), "completed");
    let state = database.end_of(big).await;
    assert!(
        state.status() == "failed" && state.json().to_string().contains("over the limit"),
        "{:#}",
        state.json()
    );
    assert_eq!(database.end_of(wrong).await.status(), "failed");
    let refused = Start::named("sizes", json!("y".repeat(3_000))).on(&database.pool).await;
    assert!(matches!(refused, Err(FlowError::TooLarge(_))), "{refused:?}");
    let unknown = Start::named("nowhere", json!(1)).on(&database.pool).await;
    assert!(matches!(unknown, Err(FlowError::Unknown(_))), "{unknown:?}");
    let nobody = client::run(&database.pool, Uuid::nil()).await;
    assert!(matches!(nobody, Err(FlowError::Unknown(_))), "{nobody:?}");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_needs_the_rights_of_a_worker_and_no_others() {
    let database = Database::start().await;
    client::compile(&database.pool, Sums.define().unwrap().definition(), false).await.unwrap();
    sqlx::query("CREATE ROLE mere_worker LOGIN").execute(&database.pool).await.unwrap();
    sqlx::query("SELECT pgflow.grant_role('mere_worker', 'worker')").execute(&database.pool).await.unwrap();
    let options = (*database.pool.connect_options()).clone().username("mere_worker");
    let mere = sqlx::postgres::PgPoolOptions::new().max_connections(2).connect_with(options).await.unwrap();
    let forbidden = sqlx::query("SELECT * FROM pgflow.step_tasks").fetch_all(&mere).await;
    assert!(forbidden.is_err(), "it may not look at tables");
    let troubles: Arc<Mutex<Vec<String>>> = Arc::default();
    let told = troubles.clone();
    let worker = Worker::on(&mere).serve(Sums.define().unwrap()).verify_only().settings(quick());
    let worker =
        worker.on_trouble(move |what| told.lock().unwrap().push(what.to_owned())).start().await.unwrap();
    let run = Start::of::<Sums>(&9).unwrap().on(&database.pool).await.unwrap();
    assert_eq!(database.end_of(run).await.output_of::<u64>("sum"), Some(204));
    worker.stop().await;
    assert_eq!(
        *troubles.lock().unwrap(),
        Vec::<String>::new(),
        "reads, settlements and signs of life are all allowed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_a_run_go_one_after_another_where_that_is_asked_for() {
    let database = Database::start().await;
    let open: Arc<Mutex<HashMap<Uuid, usize>>> = Arc::default();
    let most = Arc::new(AtomicUsize::new(0));
    let text = r#"{"slug":"in_order","steps":[{"slug":"each","stepType":"map"}]}"#;
    let (counted, highest) = (open.clone(), most.clone());
    let action = Action::plain(move |task| {
        let (open, most) = (counted.clone(), highest.clone());
        async move {
            let now = {
                let mut open = open.lock().unwrap();
                let count = open.entry(task.run_id).or_default();
                *count += 1;
                *count
            };
            most.fetch_max(now, SeqCst);
            tokio::task::yield_now().await;
            *open.lock().unwrap().get_mut(&task.run_id).unwrap() -= 1;
            Ok(task.input.clone())
        }
    });
    let worker = Worker::on(&database.pool)
        .serve_data(Definition::from_json(text).unwrap(), HashMap::from([("each".to_owned(), action)]))
        .settings(Settings { ordered_runs: true, batch_size: 50, ..quick() })
        .start()
        .await
        .unwrap();
    let inputs: Vec<Vec<usize>> = vec![(0..40).collect(); 4];
    for run in client::start_many(&database.pool, "in_order", &inputs).await.unwrap() {
        assert_eq!(database.end_of(run).await.output(), &json!({"each": (0..40).collect::<Vec<_>>()}));
    }
    assert_eq!(most.load(SeqCst), 1, "two tasks of one run at once");
    worker.stop().await;
}

/// What a worker was told to say.
#[derive(Clone, Default)]
struct Troubles(Arc<Mutex<Vec<String>>>, Arc<tokio::sync::Notify>);

impl Troubles {
    fn teller(&self) -> impl Fn(&str) + Send + Sync + 'static {
        let told = self.clone();
        move |what| {
            told.0.lock().unwrap().push(what.to_owned());
            told.1.notify_one();
        }
    }

    fn have(&self, words: &str) -> bool {
        self.0.lock().unwrap().iter().any(|what| what.contains(words))
    }

    async fn until(&self, words: &str) {
        let said = async {
            while !self.have(words) {
                self.1.notified().await;
            }
        };
        let said = tokio::time::timeout(PATIENCE, said).await;
        assert!(said.is_ok(), "nobody said {words:?}: {:?}", self.0.lock().unwrap());
    }
}

/// Blocks its thread, not only its task, on the first attempts, until it is released.
#[derive(Clone)]
struct Blocks {
    entered: Arc<AtomicUsize>,
    begun: Arc<tokio::sync::Notify>,
    blocked: usize,
    release: Arc<(Mutex<bool>, std::sync::Condvar)>,
}

impl Blocks {
    fn new(blocked: usize) -> Self {
        Self { entered: Arc::default(), begun: Arc::default(), blocked, release: Arc::default() }
    }

    fn release(&self) {
        *self.release.0.lock().unwrap() = true;
        self.release.1.notify_all();
    }

    fn actions(&self) -> HashMap<String, Action> {
        let this = self.clone();
        let action = Action::plain(move |task| {
            let this = this.clone();
            async move {
                this.begun.notify_one();
                if this.entered.fetch_add(1, SeqCst) < this.blocked {
                    let closed = this.release.0.lock().unwrap();
                    drop(this.release.1.wait_while(closed, |open| !*open).unwrap());
                }
                Ok(task.flow_input.clone().unwrap())
            }
        });
        HashMap::from([("only".to_owned(), action)])
    }
}

fn blocking_flow() -> Definition {
    Definition::from_json(
        r#"{"slug":"blocks","steps":[{"slug":"only","timeout":1,"maxAttempts":5,"baseDelay":0}]}"#,
    )
    .unwrap()
}

/// Makes it seem that so many seconds have passed for all tasks in hand.
async fn pass(database: &Database, seconds: u32) {
    sqlx::query(
        "UPDATE pgflow.step_tasks SET queued_at = queued_at - make_interval(secs => $1), started_at = started_at - make_interval(secs => $1), \
         extended_until = extended_until - make_interval(secs => $1) WHERE status = 'started'",
    )
    .bind(f64::from(seconds))
    .execute(&database.pool)
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_blocks_its_thread_loses_its_task_to_another_worker() {
    let database = Database::start().await;
    let (blocks, troubles) = (Blocks::new(1), Troubles::default());
    let settings = Settings { max_concurrent: 1, overdue_seconds: 1, shutdown_seconds: 1, ..quick() };
    let worker = Worker::on(&database.pool).serve_data(blocking_flow(), blocks.actions());
    let stuck = worker.settings(settings).on_trouble(troubles.teller()).start().await.unwrap();
    let run = Start::named("blocks", json!(7)).on(&database.pool).await.unwrap();
    troubles.until("does it block its thread").await;
    assert_eq!(stuck.stats().overdue, 1);
    let kept = "SELECT extract(epoch FROM extended_until)::bigint FROM pgflow.step_tasks";
    let last = database.count(kept).await;
    // Two more signs of life: the worker lives, and does not ask for more time.
    let beats =
        "SELECT (extract(epoch FROM last_heartbeat_at - started_at) > 5)::int::bigint FROM pgflow.workers";
    database.until(beats, 1).await;
    assert_eq!(database.count(kept).await, last, "it is not extended any more");
    assert_eq!(client::run(&database.pool, run).await.unwrap().status(), "started");

    let other = Worker::on(&database.pool).serve_data(blocking_flow(), blocks.actions()).settings(quick());
    let other = other.start().await.unwrap();
    pass(&database, 120).await;
    assert_eq!(database.end_of(run).await.output(), &json!({"only": 7}));
    assert_eq!(other.stop().await.stats.completed, 1);
    blocks.release();
    tokio::time::timeout(PATIENCE, stuck.idle()).await.expect("what it says in the end is taken");
    let stats = stuck.stop().await.stats;
    assert_eq!((stats.completed, stats.ignored), (0, 1), "and does not count: {stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_waits_behind_a_blocked_handler_is_handed_back() {
    let database = Database::start().await;
    let (blocks, troubles) = (Blocks::new(1), Troubles::default());
    // The tasks of a run one after another: the second waits in the lane of the first.
    let text = r#"{"slug":"blocks","steps":[{"slug":"only","timeout":1},{"slug":"also","timeout":1}]}"#;
    let mut actions = blocks.actions();
    actions.insert("also".to_owned(), actions["only"].clone());
    let settings = Settings { ordered_runs: true, overdue_seconds: 1, shutdown_seconds: 1, ..quick() };
    let worker = Worker::on(&database.pool).serve_data(Definition::from_json(text).unwrap(), actions);
    let worker = worker.settings(settings).on_trouble(troubles.teller()).start().await.unwrap();
    Start::named("blocks", json!(7)).on(&database.pool).await.unwrap();
    troubles.until("is handed back").await;
    troubles.until("does it block its thread").await;
    assert_eq!(
        database.count("SELECT sum(requeued_count)::bigint FROM pgflow.step_tasks").await,
        0,
        "it was not found stalled: it was handed back"
    );
    assert!(worker.stats().overdue >= 2, "{:?}", worker.stats());
    blocks.release();
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stop_ends_although_a_handler_blocks_and_the_database_does_not_answer() {
    let database = Database::start().await;
    let (blocks, troubles) = (Blocks::new(1), Troubles::default());
    let settings = Settings { shutdown_seconds: 1, max_poll_seconds: 600, ..quick() };
    let worker = || {
        Worker::on(&database.pool).serve_data(blocking_flow(), blocks.actions()).settings(settings.clone())
    };
    let stuck = worker().start().await.unwrap();
    let run = Start::named("blocks", json!(7)).on(&database.pool).await.unwrap();
    tokio::time::timeout(PATIENCE, blocks.begun.notified()).await.expect("the handler begins");
    let stopped = tokio::time::timeout(Duration::from_secs(20), stuck.stop()).await;
    assert_eq!(stopped.expect("a handler cannot keep a worker from ending").handed_back, 1);
    blocks.release();

    let idle = worker().on_trouble(troubles.teller()).start().await.unwrap();
    assert_eq!(database.end_of(run).await.status(), "completed");
    tokio::time::timeout(PATIENCE, idle.idle()).await.expect("its task is settled");
    // Every call that says something of a worker now hangs.
    let mut silence = database.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE pgflow.workers").execute(&mut *silence).await.unwrap();
    let stopped = tokio::time::timeout(Duration::from_secs(30), idle.stop()).await;
    silence.rollback().await.unwrap();
    assert!(stopped.is_ok(), "a database that does not answer cannot keep a worker from ending");
    assert!(troubles.have("goodbye"), "{:?}", troubles.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_a_worker_does_not_know_is_handed_back_and_told_and_the_worker_goes_on() {
    let database = Database::start().await;
    let action = || Action::plain(|task| async move { Ok(task.flow_input.clone().unwrap()) });
    let old = Definition::from_json(r#"{"slug":"grows","steps":[{"slug":"a"}]}"#).unwrap();
    let new = Definition::from_json(r#"{"slug":"grows","steps":[{"slug":"a"},{"slug":"b"}]}"#).unwrap();
    let troubles = Troubles::default();
    let elder = Worker::on(&database.pool).serve_data(old, HashMap::from([("a".to_owned(), action())]));
    let elder = elder.on_trouble(troubles.teller()).settings(quick()).start().await.unwrap();
    client::compile(&database.pool, &new, false).await.unwrap();
    let run = Start::named("grows", json!(1)).on(&database.pool).await.unwrap();
    troubles
        .until("no handler for step \"b\" of flow \"grows\", and leaves its tasks to others: it has a")
        .await;
    database
        .until("SELECT count(*) FROM pgflow.step_tasks WHERE step_slug = 'a' AND status = 'completed'", 1)
        .await;
    database
        .until(
            "SELECT count(*) FROM pgflow.step_tasks WHERE step_slug = 'b' AND status = 'queued' AND attempts_count = 0",
            1,
        )
        .await;
    // The elder goes on with what it can do, and takes no other task of that step: else it might be the first at it every time.
    let second = Start::named("grows", json!(2)).on(&database.pool).await.unwrap();
    database
        .until("SELECT count(*) FROM pgflow.step_tasks WHERE step_slug = 'a' AND status = 'completed'", 2)
        .await;
    // A read that had begun before the first was handed back may have brought it once more; none that begins now does.
    let strange = elder.stats().taken - 2;
    assert!((1..=2).contains(&strange), "a and a again, and {strange} times b");
    let third = Start::named("grows", json!(3)).on(&database.pool).await.unwrap();
    database
        .until("SELECT count(*) FROM pgflow.step_tasks WHERE step_slug = 'a' AND status = 'completed'", 3)
        .await;
    assert_eq!(elder.stats().taken, 3 + strange);
    let actions = HashMap::from([("a".to_owned(), action()), ("b".to_owned(), action())]);
    let younger =
        Worker::on(&database.pool).serve_data(new, actions).settings(quick()).start().await.unwrap();
    for run in [run, second, third] {
        assert_eq!(database.end_of(run).await.status(), "completed");
    }
    let (elder, younger) = (elder.stop().await.stats, younger.stop().await.stats);
    let taken = (elder.taken, elder.completed, younger.taken, younger.completed);
    assert_eq!(taken, (3 + strange, 3, 3, 3));
    assert!(elder.failed == 0 && elder.retried == 0, "{elder:?} {younger:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_shows_outputs_up_to_64_kib_and_a_mebibyte_in_all() {
    let database = Database::start().await;
    let text = r#"{"slug":"looks","steps":[{"slug":"each","stepType":"map"},{"slug":"all","dependsOn":["each"],"queue":false}]}"#;
    let each = Action::plain(|task| async move {
        let size: usize = task.input.get().parse()?;
        Ok(serde_json::value::to_raw_value(&"x".repeat(size))?)
    });
    let actions = HashMap::from([("each".to_owned(), each)]);
    let worker = Worker::on(&database.pool).serve_data(Definition::from_json(text).unwrap(), actions);
    let worker = worker.start().await.unwrap();
    // As text an output has two bytes more, for its quotes: the first just fits, the second does not; then many that fit one by one.
    let limit = look::OUTPUT_SHOWN_MAX as usize;
    let mut sizes = vec![limit - 2, limit - 1];
    sizes.extend([50_000; 30]);
    let run = Start::named("looks", json!(sizes)).on(&database.pool).await.unwrap();
    database
        .until("SELECT count(*) FROM pgflow.step_tasks WHERE step_slug = 'all' AND status = 'started'", 1)
        .await;
    let tasks = look::tasks(&database.pool, run, Some("each"), Some(1_000)).await.unwrap();
    assert_eq!(tasks.len(), sizes.len());
    let shown: Vec<usize> = tasks.iter().filter_map(|task| task["output"].as_str()).map(str::len).collect();
    assert!(tasks[0]["output"].is_string() && tasks[1]["output"].is_null(), "64 KiB and no more");
    assert_eq!(tasks[1]["outputBytes"], limit as u64 + 1);
    assert_eq!(shown.len(), 1 + (look::OUTPUTS_SHOWN_MAX as usize - limit) / 50_002, "and a mebibyte in all");
    let seen = look::run(&database.pool, run).await.unwrap();
    assert!(seen["steps"][0]["output"].is_null(), "what the map gathered is too large for a look");
    assert!(
        seen["steps"][0]["outputBytes"].as_u64() > Some(1_500_000),
        "{}",
        seen["steps"][0]["outputBytes"]
    );
    let whole = look::output(&database.pool, run, Some("each")).await.unwrap().unwrap();
    assert_eq!(whole.as_array().unwrap().len(), sizes.len());
    assert!(client::complete(&database.pool, run, "all", 0, &json!("short")).await.unwrap());
    let seen = look::run(&database.pool, run).await.unwrap();
    assert_eq!((&seen["output"], &seen["steps"][1]["output"]), (&json!({"all": "short"}), &json!("short")));
    assert_eq!(seen["outputBytes"], 16);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_whose_outputs_together_are_over_the_limit_fails_in_words() {
    let database = Database::start().await;
    sqlx::query("UPDATE pgflow.limits SET max_run_output_bytes = 100000")
        .execute(&database.pool)
        .await
        .unwrap();
    let text =
        r#"{"slug":"wide","steps":[{"slug":"each","stepType":"map"},{"slug":"sum","dependsOn":["each"]}]}"#;
    let each =
        Action::plain(
            |task| async move { Ok(serde_json::value::to_raw_value(&task.input.get().repeat(1_000))?) },
        );
    let sum = Action::plain(|_| async move { Ok(serde_json::value::to_raw_value(&"done")?) });
    let actions = HashMap::from([("each".to_owned(), each), ("sum".to_owned(), sum)]);
    let worker = Worker::on(&database.pool).serve_data(Definition::from_json(text).unwrap(), actions);
    let worker = worker.start().await.unwrap();
    let wide = Start::named("wide", json!(vec![7; 200])).on(&database.pool).await.unwrap();
    let narrow = Start::named("wide", json!(vec![7; 50])).on(&database.pool).await.unwrap();
    let state = database.end_of(wide).await;
    let words = state.json()["run"]["error_message"].as_str().unwrap_or_default();
    assert!(state.status() == "failed" && words.contains("max_run_output_bytes"), "{words}");
    assert_eq!(database.end_of(narrow).await.status(), "completed", "others are not harmed");
    worker.stop().await;
}

/// Two queues: `steady` succeeds, `flaky` fails at its first attempt, `hopeless` for good.
fn counted_worker(
    database: &Database,
) -> impl Future<Output = Result<Worker, laneway_flow::worker::StartError>> {
    let text = r#"{"slug":"counted","baseDelay":0,"maxAttempts":2,"steps":[{"slug":"steady"},{"slug":"flaky","queue":"other_queue"},
        {"slug":"hopeless","queue":"other_queue","dependsOn":["steady","flaky"]}]}"#;
    let steady = Action::plain(|task| async move { Ok(task.flow_input.clone().unwrap()) });
    let flaky = Action::plain(|task| async move {
        if task.attempt == 1 { Err(Failure::new("not yet")) } else { Ok(task.flow_input.clone().unwrap()) }
    });
    let hopeless = Action::plain(|_| async move { Err(Failure::fatal("never")) });
    let actions = [("steady", steady), ("flaky", flaky), ("hopeless", hopeless)];
    let actions = actions.into_iter().map(|(step, action)| (step.to_owned(), action)).collect();
    let builder = Worker::on(&database.pool).serve_data(Definition::from_json(text).unwrap(), actions);
    builder.settings(quick()).start()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_workers_did_is_counted_by_queue_and_outlives_them() {
    let database = Database::start().await;
    for round in 1..=2_u64 {
        let worker = counted_worker(&database).await.unwrap();
        let run = Start::named("counted", json!({"round": round})).on(&database.pool).await.unwrap();
        assert_eq!(database.end_of(run).await.status(), "failed");
        let live = look::counts(&database.pool, 100).await.unwrap();
        assert_eq!((live.workers, live.queues[0].workers, live.queues[1].workers), (1, 1, 1));
        let stats = worker.stop().await.stats;
        assert_eq!((stats.taken, stats.completed, stats.retried, stats.failed), (4, 2, 1, 1));

        let counts = look::counts(&database.pool, 100).await.unwrap();
        assert_eq!(counts.workers, 0, "it has said goodbye");
        let flow = look::FlowCount { flow: "counted".into(), started: 0, waiting: 0 };
        assert_eq!(counts.flows, [flow]);
        let [own, other] = &counts.queues[..] else { panic!("{counts:?}") };
        assert_eq!((own.queue.as_str(), other.queue.as_str()), ("counted", "other_queue"));
        assert_eq!((own.taken, own.completed, own.retried, own.failed), (round, round, 0, 0));
        assert_eq!(
            (other.taken, other.completed, other.retried, other.failed),
            (3 * round, round, round, round)
        );
        for queue in [own, other] {
            assert!(queue.polls >= round && queue.lost == 0 && queue.handler_seconds > 0.0, "{queue:?}");
            assert_eq!(queue.handlers.len(), look::HANDLER_BOUNDS.len() + 1);
            assert_eq!(queue.handlers.iter().sum::<u64>(), queue.taken, "each of them has run once");
            assert_eq!((queue.queued, queue.started, queue.workers), (0, 0, 0));
        }
    }
    // What is alive, without a worker; and no more flows or queues than asked for.
    for _ in 0..3 {
        Start::named("counted", json!({})).on(&database.pool).await.unwrap();
    }
    let counts = look::counts(&database.pool, 1).await.unwrap();
    assert_eq!((counts.flows[0].started, counts.queues.len(), counts.queues[0].queued), (3, 1, 3));
    client::delete_flow(&database.pool, "counted").await.unwrap();
    assert_eq!(look::counts(&database.pool, 100).await.unwrap(), look::Counts::default());
    assert_eq!(database.count("SELECT count(*) FROM pgflow.queue_counts").await, 0, "it goes with its queue");
}

#[tokio::test(flavor = "multi_thread")]
async fn counting_reads_what_is_alive_and_not_what_is_over() {
    let database = Database::start().await;
    let statement = "SELECT pgflow.create_flow('many'); SELECT pgflow.add_step('many', 'only');
        INSERT INTO pgflow.runs (flow_slug, status, input, completed_at) SELECT 'many', 'completed', '{}', now() FROM generate_series(1, 50000);
        INSERT INTO pgflow.runs (flow_slug, status, input) SELECT 'many', CASE WHEN n % 4 = 0 THEN 'waiting' ELSE 'started' END, '{}' FROM generate_series(1, 40) n;
        ANALYZE pgflow.runs";
    sqlx::raw_sql(statement).execute(&database.pool).await.unwrap();
    let counts = look::counts(&database.pool, 100).await.unwrap();
    assert_eq!((counts.flows[0].started, counts.flows[0].waiting), (30, 10));
    let plan: Vec<String> = sqlx::query_scalar(
        "EXPLAIN SELECT count(*) FROM (SELECT FROM pgflow.runs r WHERE r.flow_slug = 'many' AND r.status = 'started'
             AND r.status IN ('started', 'waiting') LIMIT 100000) a",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    assert!(plan.iter().any(|line| line.contains("idx_runs_live")), "{plan:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_listens_hears_what_becomes_of_runs_and_steps() {
    let database = Database::start().await;
    let mut events = client::Events::listen(&database.pool).await.unwrap();
    let worker = counted_worker(&database).await.unwrap();
    let run = Start::named("counted", json!({})).on(&database.pool).await.unwrap();
    database.end_of(run).await;
    let mut heard = Vec::new();
    while heard.last().is_none_or(|kind| kind != "run:failed") {
        let next = tokio::time::timeout(PATIENCE, events.next()).await.expect("in time").unwrap();
        let event = next.expect("the connection holds");
        assert_eq!(event.flow, "counted");
        heard.push(event.kind);
    }
    heard.sort();
    let expected = ["run:failed", "run:started", "step:completed", "step:completed", "step:failed"];
    let starts = ["step:started"; 3];
    assert_eq!(heard, [&expected[..], &starts[..]].concat());
    worker.stop().await;
}
