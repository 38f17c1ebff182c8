//! Families: document 003's partitioned dispatch, with the pitfalls of that document by number.
//!
//! Its busy flag beside a queue loses, strands and reorders messages within three tasks. Here the same situations are hammered: one family whose
//! worker is always about to fall idle when the next message comes, at several pacings. A lost or stranded message shows as a count that is
//! never reached, a reordered one in the witness.
//!
//! The document's two workloads run at their full size, 10 to 20 ms a task, in virtual time: minutes of work in a second, and to the nanosecond.

mod witness;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use laneway::{
    Bound, Engine, Outcome, Overflow, Refusal, RetryPolicy, Topology,
    sim::{Rng, Sim, Time},
};
use witness::{DEADLINE, Gate, Log, OpensAtLast, Witness, eventually, send};

fn families(n: usize, k: usize, witness: &Arc<Witness>) -> Engine<u64, u64> {
    let witness = witness.clone();
    Engine::builder()
        .topology(Topology::partitioned(n, k))
        .handle(move |context, number: &mut u64| witness.see(context.key(), *number))
        .build()
        .unwrap()
}

/// How a producer fills the time between two messages.
#[derive(Clone, Copy, Debug)]
enum Pacing {
    /// Not at all: the queue is never empty.
    Flood,
    /// Some hundred nanoseconds: a worker is about to settle when the next one comes.
    Spin(u32),
    /// Gives its core away, so that the worker runs dry.
    Yield,
    /// A burst, then until everything is handled: the lane and its worker come to rest each time.
    Bursts(u64),
}

/// One family, one producer: the situation in which the document's gate breaks.
fn hammer(pacing: Pacing, messages: u64) {
    let handled = Arc::new(AtomicU64::new(0));
    let (witness, counter) = (Witness::new(), handled.clone());
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 2))
        .handle(move |context, number: &mut u64| {
            witness_too.see(context.key(), *number);
            counter.fetch_add(1, Relaxed);
        })
        .build()
        .unwrap();
    for number in 0..messages {
        engine.submit((7, number)).unwrap();
        match pacing {
            Pacing::Flood => {}
            Pacing::Spin(turns) => (0..turns).for_each(|_| std::hint::spin_loop()),
            Pacing::Yield => thread::yield_now(),
            Pacing::Bursts(size) if (number + 1) % size == 0 => {
                eventually("003.3: the burst is handled without another submission", || {
                    handled.load(Relaxed) == number + 1
                });
            }
            Pacing::Bursts(_) => {}
        }
    }
    assert!(engine.wait_quiet(DEADLINE), "{pacing:?}: stranded: {}", engine.snapshot().account);
    witness.verify([(7, messages)]);
}

#[test]
fn pitfalls_003_1_to_4_nothing_is_lost_reordered_or_stranded_in_a_million_messages() {
    hammer(Pacing::Flood, 400_000);
    hammer(Pacing::Spin(20), 200_000);
    hammer(Pacing::Spin(200), 200_000);
    hammer(Pacing::Yield, 100_000);
    hammer(Pacing::Bursts(3), 100_000);
    hammer(Pacing::Bursts(1), 30_000);
}

#[test]
fn pitfalls_003_1_to_4_many_families_from_many_producers() {
    let witness = Witness::new();
    let engine = families(4, 2, &witness);
    thread::scope(|scope| {
        for producer in 0..4_u64 {
            let handle = engine.handle();
            let messages =
                (0..20_000).flat_map(move |number| (0..3).map(move |key| (producer * 3 + key, number)));
            scope.spawn(move || send(&handle, messages));
        }
    });
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..12).map(|key| (key, 20_000)));
}

#[test]
fn pitfall_003_5_backpressure_fires_by_what_is_outstanding() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 4))
        .worker_queue_capacity(100)
        .lane_capacity(10)
        .overflow(Overflow::Reject)
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..10).map(|number| (1, number)));
    gate.wait_arrived(1);
    let full_lane = engine.submit((1, 10)).unwrap_err().reason;
    assert_eq!(full_lane, Refusal::Full(Bound::Lane), "bounded per family, whatever was drained");
    send(&engine, (2..11).flat_map(|key| (0..10).map(move |number| (key, number))));
    let full_partition = engine.submit((99, 0)).unwrap_err().reason;
    assert_eq!(full_partition, Refusal::Full(Bound::Dispatcher), "and per partition");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 100);
}

#[test]
fn pitfall_003_6_a_refused_message_leaves_its_family_as_it_was() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 2))
        .worker_queue_capacity(4)
        .overflow(Overflow::Reject)
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    let mut next = [0_u64; 16];
    let mut refusals = 0;
    for step in 0..20_000 {
        let key = step % 16;
        match engine.submit((key as u64, next[key])) {
            Ok(_) => next[key] += 1,
            Err(_) => refusals += 1,
        }
    }
    assert!(engine.wait_quiet(DEADLINE), "a family that stayed busy after a refusal would be wedged");
    witness.verify((0..).zip(next));
    assert_eq!(engine.snapshot().refusals.total(), refusals);
}

#[test]
fn pitfall_003_6_a_message_that_its_partition_refuses_keeps_no_place_in_the_engine() {
    fn by_parity(key: &u64) -> &str {
        if key.is_multiple_of(2) { "even" } else { "odd" }
    }
    let engine = Engine::builder()
        .topology(Topology::assigned([["even"], ["odd"]], by_parity))
        .worker_queue_capacity(4)
        .ingress_capacity(6)
        .overflow(Overflow::Reject)
        .handle(|_, _: &mut u64| ())
        .build()
        .unwrap();
    assert!(engine.pause("even") && engine.pause("odd"));
    send(&engine, (0..4).map(|number| (0, number)));
    for number in 4..20 {
        assert_eq!(engine.submit((0, number)).unwrap_err().reason, Refusal::Full(Bound::Dispatcher));
    }
    send(&engine, [(1, 0), (1, 1)]);
    assert_eq!(engine.submit((1, 2)).unwrap_err().reason, Refusal::Full(Bound::Engine));
    assert!(engine.unpause("even") && engine.unpause("odd"));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 6);
}

#[test]
fn pitfall_003_7_a_message_is_moved_and_never_shared() {
    // A body that cannot be cloned, and whose drops are counted: each goes through the engine once and dies once.
    struct Body(u64, Arc<AtomicU64>);
    impl Drop for Body {
        fn drop(&mut self) {
            self.1.fetch_add(1, Relaxed);
        }
    }
    let (dropped, seen) = (Arc::new(AtomicU64::new(0)), Log::new());
    let seen_too = seen.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .handle(move |_, body: &mut Body| seen_too.push(body.0))
        .build()
        .unwrap();
    (0..1_000)
        .for_each(|number| assert!(engine.submit((number % 10, Body(number, dropped.clone()))).is_ok()));
    assert!(engine.wait_quiet(DEADLINE));
    let mut seen = seen.entries();
    seen.sort_unstable();
    assert_eq!(seen, (0..1_000).collect::<Vec<_>>());
    assert_eq!(dropped.load(Relaxed), 1_000);
}

#[test]
fn pitfall_003_8_families_leave_no_trace_and_come_back_in_order() {
    let witness = Witness::new();
    let engine = families(2, 2, &witness);
    // Few keys and pauses between rounds: lanes are removed and made again all the time, under the producers' feet.
    thread::scope(|scope| {
        for producer in 0..3_u64 {
            let handle = engine.handle();
            scope.spawn(move || {
                for number in 0..20_000 {
                    handle.submit((producer, number)).unwrap();
                    if number % 5 == 0 {
                        thread::yield_now();
                    }
                }
            });
        }
    });
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..3).map(|key| (key, 20_000)));
    let snapshot = engine.snapshot();
    assert!(
        snapshot.dispatchers.iter().all(|d| d.active_lanes == 0 && d.running_lanes == 0),
        "the table is empty"
    );
}

#[test]
fn pitfall_003_9_a_panic_releases_its_family() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 2))
        .retry(RetryPolicy::never())
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            if *number % 10 == 3 {
                drop(attempt);
                witness_too.excuse(context.key(), *number);
                panic!("every tenth task does");
            }
            attempt.done();
        })
        .build()
        .unwrap();
    send(&engine, (0..100).flat_map(|number| (0..50).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE), "no family is wedged");
    witness.verify((0..50).map(|key| (key, 90)));
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.account.done, snapshot.account.failed), (4_500, 500));
    assert_eq!(snapshot.dispatchers.iter().map(|d| d.panics).sum::<u64>(), 500);
}

#[test]
fn pitfall_003_11_order_is_the_order_of_acceptance() {
    let log = Log::new();
    let log_too = log.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 1))
        .lane_capacity(1)
        .overflow(Overflow::Reject)
        .handle(move |_, number: &mut u64| log_too.push(*number))
        .build()
        .unwrap();
    engine.pause("partition-0");
    send(&engine, [(1, 0)]);
    let refused = engine.submit((1, 1)).unwrap_err();
    engine.unpause("partition-0");
    assert!(engine.wait_quiet(DEADLINE));
    send(&engine, [(1, 2)]);
    assert!(engine.wait_quiet(DEADLINE));
    engine.submit(refused.message).unwrap();
    assert_eq!(log.wait_len(3), [0, 2, 1], "the client that retries 1 after 2 was accepted has it after 2");
}

/// A task of the document: which of its family, and how long it takes.
#[derive(Clone, Copy, Debug)]
struct Task {
    number: u64,
    work: Duration,
}

/// When something is submitted, and to which family.
type Arrival = (Duration, u64);

/// What is known of a task that was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Service {
    partition: usize,
    arrived: Duration,
    began: Duration,
    ended: Duration,
}

/// The document's engine, four partitions with two workers each, in virtual time. A family's tasks are numbered as they arrive, and take 10 to 20 ms, drawn
/// from the family and the number: a task takes as long in every run that has it.
fn virtually(arrivals: impl IntoIterator<Item = Arrival>) -> BTreeMap<(u64, u64), Service> {
    let time = Time::new();
    let (services, clock) = (Arc::new(Mutex::new(BTreeMap::new())), time.clone());
    let services_too = services.clone();
    let builder = Engine::builder()
        .topology(Topology::partitioned(4, 2))
        .ingress_capacity(200_000)
        .worker_queue_capacity(200_000)
        // What the tempo makes of messages that are this slow.
        .batch_max(1)
        .latency_sampling(0)
        .handle(move |context, task: &mut (Duration, Task)| {
            let (arrived, Task { number, work }) = *task;
            let partition = context.dispatcher().trim_start_matches("partition-").parse().unwrap();
            let service = Service { partition, arrived, began: clock.now(), ended: clock.now() + work };
            let known = services_too.lock().unwrap().insert((*context.key(), number), service);
            assert_eq!(known, None, "{number} of {} came twice", context.key());
        });
    let mut sim = Sim::with_time(3, time, builder).unwrap();
    sim.audit_every(10_000);
    sim.service(|_, (_, task), _| task.work);
    let mut numbers = BTreeMap::new();
    let mut submitted = 0;
    for (arrived, family) in arrivals {
        let number = numbers.entry(family).or_insert(0);
        let work = Duration::from_nanos(Rng::with_seed(family << 32 | *number).u64(10_000_000..20_000_000));
        let task = Task { number: *number, work };
        *number += 1;
        submitted += 1;
        sim.at(arrived, move |handle| send(handle, [(family, (arrived, task))]));
    }
    sim.run().unwrap();
    let account = sim.handle().snapshot().account;
    assert_eq!((account.accepted, account.done, account.outstanding), (submitted, submitted, 0));
    let services = std::mem::take(&mut *services.lock().unwrap());
    assert_in_order(&services, &numbers);
    services
}

/// Every task of every family was handled, once, in order, and none began before its predecessor had ended.
fn assert_in_order(services: &BTreeMap<(u64, u64), Service>, numbers: &BTreeMap<u64, u64>) {
    assert_eq!(services.len() as u64, numbers.values().sum::<u64>());
    for (&family, &tasks) in numbers {
        let mut free = Duration::ZERO;
        for number in 0..tasks {
            let service = services.get(&(family, number));
            let service = service.unwrap_or_else(|| panic!("{number} of {family} was lost"));
            assert!(service.began >= free, "{number} of {family} began {:?} early", free - service.began);
            free = service.ended;
        }
    }
}

/// When the last of them ended.
fn makespan<'a>(services: impl IntoIterator<Item = &'a Service>) -> Duration {
    services.into_iter().map(|service| service.ended).max().unwrap_or_default()
}

fn work<'a>(services: impl IntoIterator<Item = &'a Service>) -> Duration {
    services.into_iter().map(|service| service.ended - service.began).sum()
}

/// As much time, and a few per cent more.
fn hardly_more(time: Duration, percent: u32) -> Duration {
    time + time * percent / 100
}

#[test]
fn the_first_workload_of_document_003_keeps_every_worker_busy() {
    // 100,000 tasks of 10,000 families, all there from the beginning.
    let tasks = (0..10).flat_map(|_| (0..10_000).map(|family| (Duration::ZERO, family)));
    let services = virtually(tasks);
    assert_eq!(services.len(), 100_000);
    for partition in 0..4 {
        let here: Vec<_> = services.values().filter(|service| service.partition == partition).collect();
        let ideal = work(here.iter().copied()) / 2;
        let took = makespan(here.iter().copied());
        assert!(
            took >= ideal && took <= hardly_more(ideal, 1),
            "partition {partition}: two workers took {took:?} for what {ideal:?} would do"
        );
    }
    let took = makespan(services.values());
    assert!(
        (180..200).contains(&took.as_secs()),
        "eight workers, 533 tasks a second: {took:?} (pitfall 003.12)"
    );
}

/// The hot family of the second workload.
const HOT: u64 = 1_000_000;

/// 30,000 tasks of the hot family, there from the beginning.
fn hot() -> impl Iterator<Item = Arrival> {
    (0..30_000).map(|_| (Duration::ZERO, HOT))
}

/// 30,000 tasks of 1,000 other families, at even distances over `spread`.
fn others(spread: Duration) -> impl Iterator<Item = Arrival> {
    let each = spread / 30_000;
    (0..30_000_u32).map(move |n| (each * n, u64::from(n) * 7_919 % 1_000))
}

/// Runs the others alone, then with the hot family among them.
fn without_and_with_hot(spread: Duration) -> [BTreeMap<(u64, u64), Service>; 2] {
    // In order of time, and the hot family's first: they are there when the first of the others comes.
    [virtually(others(spread)), virtually(hot().chain(others(spread)))]
}

fn family(services: &BTreeMap<(u64, u64), Service>, family: u64) -> impl Iterator<Item = &Service> {
    services.range((family, 0)..=(family, u64::MAX)).map(|(_, service)| service)
}

#[test]
fn the_second_workload_of_document_003_one_hot_family_is_serial_and_the_others_do_not_notice() {
    let [without, with] = without_and_with_hot(Duration::from_secs(400));
    let hot_partition = with[&(HOT, 0)].partition;
    let serial = work(family(&with, HOT));
    let took = makespan(family(&with, HOT));
    assert!(took >= serial && took <= hardly_more(serial, 3), "serial is {serial:?}, it took {took:?}");
    let (mut beside, mut delays) = (0, Duration::ZERO);
    for (task, alone) in &without {
        let among = &with[task];
        if alone.partition != hot_partition {
            assert_eq!(among, alone, "{task:?} has nothing to do with the hot family");
            continue;
        }
        let delay = among.began.saturating_sub(alone.began);
        assert!(delay < Duration::from_millis(100), "{task:?} waited {delay:?} for the hot family");
        (beside, delays) = (beside + 1, delays + delay);
    }
    let delay = delays / beside;
    assert!(delay < Duration::from_millis(5), "{delay:?} on average beside the hot family's worker");
}

#[test]
fn the_second_workload_of_document_003_in_one_burst() {
    // Everything at once: the hot family gives way after each task, so that the others have the partition almost to themselves; then it runs on alone.
    let [without, with] = without_and_with_hot(Duration::ZERO);
    let hot_partition = with[&(HOT, 0)].partition;
    let mut backlog = Duration::ZERO;
    for partition in 0..4 {
        let of = |services: &BTreeMap<(u64, u64), Service>| {
            let others = services.range(..(HOT, 0)).map(|(_, service)| service);
            makespan(others.filter(|service| service.partition == partition))
        };
        let (alone, among) = (of(&without), of(&with));
        assert!(
            among <= hardly_more(alone, 2),
            "partition {partition}: {among:?} with the hot family, {alone:?} without"
        );
        if partition == hot_partition {
            backlog = among;
        }
    }
    let (serial, took) = (work(family(&with, HOT)), makespan(family(&with, HOT)));
    assert!(
        took >= serial && took <= serial + backlog,
        "serial is {serial:?}, the backlog {backlog:?}, it took {took:?}"
    );
}

#[test]
fn pitfall_003_12_the_second_workload_at_scaled_down_work() {
    // One family with 1,000 tasks of some 20 µs among 200 others: serial itself, and everybody else long done before it.
    let finished = Log::new();
    let (witness, finished_too) = (Witness::new(), finished.clone());
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 2))
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            let until = std::time::Instant::now() + Duration::from_micros(20);
            while std::time::Instant::now() < until {
                std::hint::spin_loop();
            }
            attempt.done();
            finished_too.push((context.dispatcher().to_owned(), *context.key()));
        })
        .build()
        .unwrap();
    let hot = 1_000;
    // All of it is there when the first begins, however slowly this thread gets on.
    assert!(engine.pause("partition-0") && engine.pause("partition-1"));
    send(&engine, (0..1_000).map(|number| (hot, number)));
    send(&engine, (0..5).flat_map(|number| (0..200).map(move |key| (key, number))));
    assert!(engine.unpause("partition-0") && engine.unpause("partition-1"));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..200).map(|key| (key, 5)).chain([(hot, 1_000)]));
    // In its own partition, where the turns decide and not the machine's scheduler.
    let order = finished.entries();
    let (partition, _) = order.iter().find(|(_, key)| *key == hot).unwrap();
    let order: Vec<u64> = order.iter().filter(|(of, _)| of == partition).map(|(_, key)| *key).collect();
    let last_other = order.iter().rposition(|key| *key != hot).unwrap();
    let hot_by_then = order[..last_other].iter().filter(|key| **key == hot).count();
    assert!(
        hot_by_then < 900,
        "the others progressed beside the hot family, which had done {hot_by_then} by then"
    );
}

#[test]
fn pitfall_003_13_the_number_of_partitions_must_be_a_power_of_two() {
    for n in [3, 5, 6, 7, 12, 100] {
        let built =
            Engine::<u64, u64>::builder().topology(Topology::partitioned(n, 1)).handle(|_, _| ()).build();
        let text = built.unwrap_err().to_string();
        let (lower, upper) = (n.next_power_of_two() / 2, n.next_power_of_two());
        let expected =
            format!("{n} partitions: the number must be a power of two, such as {lower} or {upper}");
        assert!(text.contains(&expected), "{text}");
    }
    for n in [1, 2, 4, 8] {
        assert!(
            Engine::<u64, u64>::builder()
                .topology(Topology::partitioned(n, 1))
                .handle(|_, _| ())
                .build()
                .is_ok()
        );
    }
}

#[test]
fn pitfall_003_13_a_shutdown_drains_ingress_then_lanes_then_workers() {
    let witness = Witness::new();
    let engine = families(4, 2, &witness);
    send(&engine, (0..20).flat_map(|number| (0..500).map(move |key| (key, number))));
    let report = engine.shutdown(DEADLINE);
    witness.verify((0..500).map(|key| (key, 20)));
    assert!(report.returned.is_empty() && report.still_running == 0 && report.account.done == 10_000);
}

#[test]
fn the_hash_spreads_families_over_the_partitions() {
    let counts = Log::new();
    let counts_too = counts.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(8, 1))
        .handle(move |context, _: &mut u64| counts_too.push(context.dispatcher().to_owned()))
        .build()
        .unwrap();
    // Sequential keys, the worst case for an unsmeared hash.
    send(&engine, (0..8_000).map(|key| (key * 1_024, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    let seen = counts.entries();
    for partition in 0..8 {
        let name = format!("partition-{partition}");
        let here = seen.iter().filter(|dispatcher| **dispatcher == name).count();
        assert!((800..1_200).contains(&here), "{name} has {here} of 8,000");
    }
}

#[test]
fn a_family_that_is_skipped_over_keeps_its_numbers() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .handle(move |context, number: &mut u64| {
            if *number % 2 == 1 {
                witness_too.excuse(context.key(), *number);
                return Outcome::Skip;
            }
            witness_too.see(context.key(), *number);
            Outcome::Done
        })
        .build()
        .unwrap();
    send(&engine, (0..100).flat_map(|number| (0..20).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..20).map(|key| (key, 50)));
}
