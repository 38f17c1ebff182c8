//! What cannot work is said at once, with what would be right: all problems of a builder together, each in words.

mod witness;

use std::time::Duration;

use laneway::{
    Backoff, Bound, BuildError, Builder, Engine, Message, Overflow, Problem, Refusal, RetryPolicy, Topology,
};
use witness::{DEADLINE, send};

fn builder() -> Builder<u64, u64> {
    Engine::builder().topology(Topology::pool(1)).handle(|_, _| ())
}

#[track_caller]
fn problems(builder: Builder<u64, u64>) -> Vec<Problem> {
    builder.build().expect_err("it cannot work").problems
}

#[track_caller]
fn says(builder: Builder<u64, u64>, text: &str) {
    let error = builder.build().expect_err("it cannot work").to_string();
    assert_eq!(error, format!("the engine cannot be built\n  {text}"));
}

#[test]
fn no_workers() {
    says(builder().topology(Topology::pool(0)), "the topology has no worker: give it at least one");
    says(builder().topology(Topology::partitioned(2, 0)), "the topology has no worker: give it at least one");
}

#[test]
fn no_dispatchers() {
    let nothing = [Problem::NoDispatchers, Problem::NoWorkers];
    assert_eq!(problems(builder().topology(Topology::per_worker(0))), nothing);
    assert_eq!(problems(builder().topology(Topology::partitioned(0, 4))), nothing);
    assert_eq!(problems(builder().topology(Topology::builder().build())), nothing);
    let no_rows: [Vec<&str>; 0] = [];
    assert_eq!(problems(builder().topology(Topology::assigned(no_rows, |_| "a"))), nothing);
    assert_eq!(Problem::NoDispatchers.to_string(), "the topology has no dispatcher: give it at least one");
}

#[test]
fn a_capacity_of_zero() {
    type Set = fn(Builder<u64, u64>) -> Builder<u64, u64>;
    let settings: [(&str, Set); 5] = [
        ("ingress_capacity", |b| b.ingress_capacity(0)),
        ("worker_queue_capacity", |b| b.worker_queue_capacity(0)),
        ("lane_capacity", |b| b.lane_capacity(0)),
        ("lanes_max", |b| b.lanes_max(0)),
        ("batch_max", |b| b.batch_max(0)),
    ];
    for (what, set) in settings {
        says(set(builder()), &format!("{what} is zero: nothing could ever be accepted"));
    }
}

#[test]
fn partitions_that_are_not_a_power_of_two() {
    says(
        builder().topology(Topology::partitioned(6, 1)),
        "6 partitions: the number must be a power of two, such as 4 or 8",
    );
}

#[test]
fn rows_that_make_no_sense() {
    let rows = |rows: Vec<Vec<&'static str>>| builder().topology(Topology::assigned(rows, |_| "a"));
    says(rows(vec![vec!["a"], vec![]]), "worker 1 serves no dispatcher: name at least one in its row");
    says(rows(vec![vec!["a", "b", "a"]]), "worker 0 serves dispatcher \"a\" twice: name it once");
}

#[test]
fn names_that_are_there_twice() {
    let twice = Topology::builder().dispatcher("a").dispatcher("a").worker("w", ["a"]).build();
    says(builder().topology(twice), "there are two dispatchers called \"a\": names are unique");
}

#[test]
fn workers_of_one_name() {
    let twice = Topology::builder().dispatcher("a").worker("w", ["a"]).worker("w", ["a"]).build();
    says(builder().topology(twice), "there are two workers called \"w\": names are unique");
}

#[test]
fn names_that_nobody_has() {
    let unknown = Topology::builder().dispatcher("a").dispatcher("b").worker("w", ["a", "b", "c"]).build();
    says(
        builder().topology(unknown),
        "worker 0 serves dispatcher \"c\", which does not exist: there are \"a\", \"b\"",
    );
    let unserved = Topology::builder().dispatcher("a").dispatcher("b").worker("w", ["a"]).build();
    says(builder().topology(unserved), "no worker serves dispatcher \"b\": add it to a worker's row");
}

#[test]
fn a_pace_that_is_none() {
    for pace in [0.0, -1.0, f64::NAN] {
        let paced = Topology::builder().dispatcher_paced("a", pace).worker("w", ["a"]).build();
        says(
            builder().topology(paced),
            "the pace per second is not a positive number: it must be above zero",
        );
    }
}

#[test]
fn policies_out_of_range() {
    let retry = |policy| builder().retry(policy);
    says(
        retry(RetryPolicy { max_attempts: 0, ..RetryPolicy::default() }),
        "max_attempts of the retry policy is 0: it must be at least 1",
    );
    says(
        retry(RetryPolicy { multiplier: 0.5, ..RetryPolicy::default() }),
        "multiplier of the retry policy is 0.5: it must be at least 1",
    );
    assert_eq!(problems(retry(RetryPolicy { multiplier: f64::NAN, ..RetryPolicy::default() })).len(), 1);
    let backoff = |backoff| builder().backoff(backoff);
    says(
        backoff(Backoff { multiplier: 1.0, ..Backoff::default() }),
        "multiplier of the backoff is 1: it must be above 1",
    );
    says(
        backoff(Backoff { base: Duration::from_secs(1), ..Backoff::default() }),
        "base of the backoff is 1s: it must be below its max",
    );
    says(
        builder().overflow_at(Bound::Lanes, Overflow::DropOldest),
        "overflow at the number of lanes is DropOldest: it must be another policy: dropping a message does not free a lane",
    );
}

#[test]
fn no_handler() {
    let built = Engine::<u64, u64>::builder().build();
    let error = built.unwrap_err();
    assert_eq!(error, BuildError { problems: vec![Problem::NoHandler] });
    assert!(
        error.to_string().contains("there is no handler: call handle, handle_batch, handle_async, handler, ")
    );
}

#[test]
fn everything_at_once() {
    let built = Engine::<u64, u64>::builder()
        .topology(Topology::partitioned(3, 0))
        .ingress_capacity(0)
        .lanes_max(0)
        .retry(RetryPolicy { max_attempts: 0, ..RetryPolicy::default() })
        .build();
    let error = built.unwrap_err();
    assert_eq!(error.problems.len(), 6, "{error}");
    let kinds = |kind: fn(&Problem) -> bool| error.problems.iter().filter(|problem| kind(problem)).count();
    assert_eq!(kinds(|p| matches!(p, Problem::NoWorkers)), 1);
    assert_eq!(kinds(|p| matches!(p, Problem::NotAPowerOfTwo { partitions: 3, .. })), 1);
    assert_eq!(kinds(|p| matches!(p, Problem::ZeroCapacity { .. })), 2);
    assert_eq!(kinds(|p| matches!(p, Problem::NoHandler)), 1);
}

#[cfg(feature = "tokio")]
#[test]
fn an_async_handler_without_a_runtime() {
    let built = Engine::<u64, u64>::builder().topology(Topology::pool(1)).handle_async(|_| async {}).build();
    let error = built.unwrap_err().to_string();
    let expected = "an async handler needs a tokio runtime: build the engine inside one, or pass its handle to `runtime`";
    assert_eq!(error, format!("the engine cannot be built\n  {expected}"));
}

/// Its slots would all have ended at their first retry, and submitters waited for ever.
#[cfg(feature = "tokio")]
#[test]
fn a_runtime_without_timers() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let built = Engine::<u64, u64>::builder().runtime(runtime.handle().clone()).handle_async(|_| async {});
    let expected = "the runtime has no timers: build it with `enable_time` or `enable_all`";
    assert_eq!(built.build().unwrap_err().to_string(), format!("the engine cannot be built\n  {expected}"));
}

#[test]
fn the_greatest_number_there_is_bounds_nothing() {
    type Set = fn(Builder<u64, u64>) -> Builder<u64, u64>;
    let settings: [Set; 5] = [
        |b| b.ingress_capacity(usize::MAX),
        |b| b.worker_queue_capacity(usize::MAX),
        |b| b.lane_capacity(usize::MAX),
        |b| b.lanes_max(usize::MAX),
        |b| b.control_reserve(usize::MAX).worker_queue_capacity(10).ingress_capacity(10).lane_capacity(10),
    ];
    for set in settings {
        let engine = set(builder()).build().unwrap();
        assert!(engine.pause("pool-0"));
        send(&engine, (0..10).map(|number| (1, number)));
        for key in 0..2_000 {
            // Also where events fill the bound: these have the reserve.
            engine.try_submit(Message::start(key, 0)).unwrap();
        }
        assert!(engine.unpause("pool-0") && engine.wait_quiet(DEADLINE));
        assert_eq!(engine.snapshot().account.done, 2_010);
    }
}

/// Systems end the name of a thread at a zero.
#[test]
fn a_worker_with_a_zero_in_its_name() {
    let topology = Topology::builder().dispatcher("d").worker("w\0", ["d"]).build();
    let engine = builder().topology(topology).build().unwrap();
    send(&engine, [(1, 1)]);
    assert!(engine.wait_quiet(DEADLINE));
}

/// Here there is room for a few hundred threads; see the test after it.
#[test]
#[ignore = "the other test runs it as a process with little memory"]
fn the_process_with_little_memory() {
    let engine = builder().topology(Topology::pool(1)).build().unwrap();
    let built = builder().topology(Topology::pool(5_000)).build();
    let told = built.unwrap_err().to_string();
    assert!(
        told.starts_with("the engine cannot be built\n  a worker thread could not be started:"),
        "{told}"
    );
    let more: Vec<_> = (0..5_000).map(|one| (format!("w{one}"), "pool-0".to_owned())).collect();
    let told = engine.change_workers(&more, &["pool-0/0".to_owned()]).unwrap_err().to_string();
    assert!(told.contains("a worker thread could not be started:"), "{told}");
    assert_eq!(engine.snapshot().workers.len(), 1, "nothing has changed");
    // Once those have gone that were let go again.
    let begun = std::time::Instant::now();
    while let Err(error) = engine.add_worker("w0", &["pool-0"]) {
        assert!(begun.elapsed() < DEADLINE, "the name is free, and there is room again: {error}");
        std::thread::yield_now();
    }
    send(&engine, (0..100).map(|key| (key, 1)));
    assert!(engine.wait_quiet(DEADLINE));
    println!("as it should be");
}

/// It took the whole grace of a shutdown to say that a thread cannot be had, and a change was made that was reported as not made.
#[cfg(target_os = "linux")]
#[test]
fn threads_that_cannot_be_had_change_nothing() {
    let begun = std::time::Instant::now();
    let this = std::env::current_exe().unwrap();
    let run = "ulimit -v 1500000; exec \"$0\" --exact the_process_with_little_memory --ignored --nocapture";
    let told = std::process::Command::new("sh").arg("-c").arg(run).arg(this).output().unwrap();
    let said = String::from_utf8_lossy(&told.stdout);
    assert!(
        told.status.success() && said.contains("as it should be"),
        "{said}{}",
        String::from_utf8_lossy(&told.stderr)
    );
    assert!(begun.elapsed() < DEADLINE, "nobody has waited for workers that never were");
}

#[test]
fn submit_after_close() {
    let engine = builder().build().unwrap();
    engine.close();
    let refused = engine.submit((1, 9)).unwrap_err();
    assert_eq!((refused.reason, refused.message.key, refused.message.body), (Refusal::Closed, 1, 9));
    assert_eq!(refused.to_string(), "refused: the engine is closed");
    assert_eq!(format!("{refused:?}"), "Refused { reason: Closed, .. }", "bodies need not be Debug");
    assert_eq!(engine.try_submit((1, 9)).unwrap_err().reason, Refusal::Closed);
}

#[test]
fn a_placement_that_answers_nonsense_refuses() {
    struct Beyond;
    impl laneway::Placement<u64> for Beyond {
        fn looks_at(&self) -> laneway::LooksAt {
            laneway::LooksAt::Key
        }
        fn place(&self, key: &u64, _: u64, among: &dyn laneway::Among) -> Option<usize> {
            assert!(!among.is_empty());
            match key {
                0 => Some(0),
                1 => Some(among.len()),
                _ => None,
            }
        }
    }
    let engine = builder().topology(Topology::pool(2).placed(Beyond)).build().unwrap();
    send(&engine, [(0, 0)]);
    (1..3).for_each(|key| assert_eq!(engine.submit((key, 0)).unwrap_err().reason, Refusal::NoSuchDispatcher));
    assert!((1..3).all(|key| engine.explain(&key).is_none() && !engine.park(&key, "no")));
    assert!(engine.wait_quiet(DEADLINE));
}

#[test]
fn the_smallest_engine_there_can_be() {
    let engine = builder()
        .ingress_capacity(1)
        .worker_queue_capacity(1)
        .lane_capacity(1)
        .lanes_max(1)
        .batch_max(1)
        .build()
        .unwrap();
    send(&engine, (0..500).map(|number| (number, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 500);
}

#[test]
fn every_worker_calls_back_first_and_a_panic_there_stops_there() {
    let (told, numbers) = std::sync::mpsc::channel();
    let engine = Engine::builder()
        .topology(Topology::pool(3))
        .on_worker_start(move |number| {
            told.send(number).expect("somebody listens");
            panic!("worker {number} panics before its first look");
        })
        .handle(|_, _: &mut u8| ())
        .build()
        .expect("a valid engine");
    let mut seen: Vec<_> = (0..3)
        .map(|_| numbers.recv_timeout(Duration::from_secs(10)).expect("each worker calls back"))
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2]);
    engine.submit((1_u8, 1)).expect("workers are up");
    assert_eq!(engine.shutdown(Duration::from_secs(10)).account.done, 1);
}
