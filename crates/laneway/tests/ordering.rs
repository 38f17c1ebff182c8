//! Order, exclusion and progress: the first three lines of the contract, on every topology.
//!
//! Each key's messages are numbered, and a witness in the handler checks that they come without a gap, once, and one at a time. The
//! tests of progress hold a handler at a gate and see that everybody else gets on; those of fairness let one worker loose on lanes that were
//! filled while it was paused, so that the order of starts is the same in every run.

mod witness;

use std::{
    sync::{Arc, Mutex, OnceLock},
    thread,
    time::Duration,
};

use laneway::{
    Batch, Engine, Handle, Message, Outcome, Priority, Topology, WaitStrategy,
    sim::{Sim, Time},
};
use witness::{DEADLINE, Gate, Log, OpensAtLast, Witness, send};

/// Keys whose dispatcher is the first part of their number's parity, for the topology that places by name.
fn by_parity(key: &u64) -> &str {
    if key.is_multiple_of(2) { "even" } else { "odd" }
}

/// All topologies of the documents, and a mixture that none of them has.
fn topologies() -> Vec<(&'static str, Topology<u64>)> {
    let mixed = Topology::builder()
        .dispatcher("a")
        .dispatcher("b")
        .dispatcher("c")
        .worker("all", ["a", "b", "c"])
        .worker("a and b", ["a", "b"])
        .worker("c alone", ["c"])
        .build();
    vec![
        ("per_worker", Topology::per_worker(3)),
        ("assigned", Topology::assigned([vec!["even", "odd"], vec!["odd"], vec!["even"]], by_parity)),
        ("partitioned", Topology::partitioned(4, 2)),
        ("pool", Topology::pool(4)),
        ("mixed", mixed),
    ]
}

/// An engine whose handler does nothing but testify.
fn testify(topology: Topology<u64>, witness: &Arc<Witness>) -> Engine<u64, u64> {
    let witness = witness.clone();
    Engine::builder()
        .topology(topology)
        .handle(move |context, number: &mut u64| witness.see(context.key(), *number))
        .build()
        .expect("a valid engine")
}

/// Producer `producer` of `producers` sends `each` messages to each of its own keys, round-robin, so that all lanes are open at once.
fn produce(handle: &Handle<u64, u64>, producer: u64, producers: u64, keys: u64, each: u64) {
    for number in 0..each {
        for key in (0..keys).filter(|key| key % producers == producer) {
            handle.submit((key, number)).expect("blocks until there is room");
        }
    }
}

#[test]
fn pitfall_003_10_the_witness_sees_gaps_overlaps_and_what_never_came() {
    let complaints = |numbers: &[u64]| {
        let witness = Witness::new();
        numbers.iter().for_each(|&number| witness.see(&7, number));
        witness.violations()
    };
    assert!(complaints(&[0, 1, 2]).is_empty());
    assert!(complaints(&[0, 2])[0].starts_with("gap"), "a lost message");
    assert!(complaints(&[0, 1, 1])[0].starts_with("late or twice"), "a duplicate");
    let swapped = complaints(&[1, 0]);
    assert!(swapped[0].starts_with("gap") && swapped[1].starts_with("late"), "a reordering: {swapped:?}");

    let overlapping = Witness::new();
    let first = overlapping.enter(&7, 0);
    overlapping.see(&7, 0);
    drop(first);
    assert!(overlapping.violations()[0].starts_with("overlap"));

    let verify = |expected: Vec<(u64, u64)>| {
        let witness = Witness::new();
        witness.see(&7, 0);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| witness.verify(expected))).is_ok()
    };
    assert!(verify(vec![(7, 1)]));
    assert!(!verify(vec![(7, 2)]), "the last message is missing");
    assert!(!verify(vec![(7, 1), (8, 1)]), "a whole key is missing");
    assert!(!verify(vec![]), "a message that nobody sent");
}

#[test]
fn every_topology_keeps_ten_thousand_families_in_order() {
    for (name, topology) in topologies() {
        let witness = Witness::new();
        let engine = testify(topology, &witness);
        let (producers, keys, each) = (4, 10_000, 10);
        thread::scope(|scope| {
            for producer in 0..producers {
                let handle = engine.handle();
                scope.spawn(move || produce(&handle, producer, producers, keys, each));
            }
        });
        assert!(engine.wait_quiet(DEADLINE), "{name}: {:?}", engine.snapshot().account);
        witness.verify((0..keys).map(|key| (key, each)));
        let snapshot = engine.snapshot();
        assert_eq!(snapshot.account.done, keys * each, "{name}");
        assert!(snapshot.account.balances() && snapshot.account.outstanding == 0, "{name}");
        assert!(snapshot.dispatchers.iter().all(|dispatcher| dispatcher.active_lanes == 0), "{name}");
    }
}

#[test]
fn one_hot_family_is_serial_among_the_others() {
    for (_, topology) in topologies() {
        let witness = Witness::new();
        let engine = testify(topology, &witness);
        let (hot, cold_keys) = (1_000_000, 5_000);
        thread::scope(|scope| {
            let handle = engine.handle();
            scope.spawn(move || send(&handle, (0..30_000).map(|number| (hot, number))));
            for producer in 0..2 {
                let handle = engine.handle();
                scope.spawn(move || produce(&handle, producer, 2, cold_keys, 2));
            }
        });
        assert!(engine.wait_quiet(DEADLINE));
        witness.verify((0..cold_keys).map(|key| (key, 2)).chain([(hot, 30_000)]));
    }
}

#[test]
fn batches_keep_order_with_single_submissions_between_them() {
    for (_, topology) in topologies() {
        let witness = Witness::new();
        let engine = testify(topology, &witness);
        let keys = 300;
        for round in 0..40 {
            let report =
                engine.submit_batch((0..keys).flat_map(|key| [(key, round * 3), (key, round * 3 + 1)]));
            assert_eq!((report.accepted, report.refused.len()), (2 * keys as usize, 0));
            send(&engine, (0..keys).map(|key| (key, round * 3 + 2)));
        }
        assert!(engine.wait_quiet(DEADLINE));
        witness.verify((0..keys).map(|key| (key, 120)));
    }
}

#[test]
fn every_wait_strategy_keeps_order_and_finds_all_work() {
    let strategies =
        [WaitStrategy::Park, WaitStrategy::SpinThenPark, WaitStrategy::Yield, WaitStrategy::BusySpin];
    for strategy in strategies {
        let (witness, seen) = (Witness::new(), Log::new());
        let (witness_too, seen_too) = (witness.clone(), seen.clone());
        let engine = Engine::builder()
            .topology(Topology::partitioned(2, 1))
            .wait(strategy)
            .handle(move |context, number: &mut u64| {
                witness_too.see(context.key(), *number);
                seen_too.push(*number);
            })
            .build()
            .unwrap();
        // One at a time, so that the workers are idle before each of them.
        for number in 0..200 {
            engine.submit((number % 4, number / 4)).unwrap();
            seen.wait_len(number as usize + 1);
        }
        assert!(engine.wait_quiet(DEADLINE), "{strategy:?}");
        witness.verify((0..4).map(|key| (key, 50)));
    }
}

#[test]
fn a_handler_may_submit_to_its_own_engine() {
    let (witness, own) = (Witness::new(), Arc::new(OnceLock::<Handle<u64, u64>>::new()));
    let (witness_too, own_too) = (witness.clone(), own.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .handle(move |context, number: &mut u64| {
            witness_too.see(context.key(), *number);
            if *context.key() < 100 {
                own_too.get().unwrap().submit((context.key() + 100, *number)).unwrap();
            }
        })
        .build()
        .unwrap();
    assert!(own.set(engine.handle()).is_ok());
    send(&engine, (0..100).flat_map(|number| (0..50).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..50).chain(100..150).map(|key| (key, 100)));
}

// ── priorities ─────────────────────────────────────────────────────────────────────────────────────────────────────

type Starts = Arc<Log<(u64, u64)>>;

/// One worker that is paused, handles one message per turn, and notes what it starts.
fn paused(batch_max: usize) -> (Engine<u64, u64>, Starts) {
    let log = Log::new();
    let log_too = log.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .batch_max(batch_max)
        .handle(move |context, number: &mut u64| log_too.push((*context.key(), *number)))
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    (engine, log)
}

fn release(engine: &Engine<u64, u64>, log: &Log<(u64, u64)>, expected: usize) -> Vec<(u64, u64)> {
    assert!(engine.unpause("pool-0"));
    log.wait_len(expected)
}

#[test]
fn priorities_go_first_across_lanes() {
    let (engine, log) = paused(1);
    let urgency = [Priority::Low, Priority::Normal, Priority::High, Priority::Urgent];
    for (key, priority) in (0..).zip(urgency) {
        engine.submit(Message::new(key, 0).priority(priority)).unwrap();
    }
    assert_eq!(release(&engine, &log, 4), [(3, 0), (2, 0), (1, 0), (0, 0)]);
}

#[test]
fn an_urgent_message_lifts_its_whole_lane_and_overtakes_nobody_in_it() {
    let (engine, log) = paused(1);
    for number in 0..3 {
        engine.submit((1, number)).unwrap();
        engine.submit((2, number)).unwrap();
    }
    engine.submit(Message::new(2, 3).priority(Priority::Urgent)).unwrap();
    engine.submit((2, 4)).unwrap();
    let order = release(&engine, &log, 8);
    assert_eq!(
        order[..4],
        [(2, 0), (2, 1), (2, 2), (2, 3)],
        "the lane is urgent until its urgent message is handled"
    );
    let rest: Vec<u64> = order[4..].iter().map(|(key, _)| *key).collect();
    assert!(rest[..2].contains(&1), "and then it is not: {order:?}");
}

#[test]
fn a_second_urgent_message_keeps_its_lane_urgent() {
    let (engine, log) = paused(1);
    engine.submit(Message::new(1, 0).priority(Priority::High)).unwrap();
    engine.submit((1, 1)).unwrap();
    engine.submit(Message::new(1, 2).priority(Priority::High)).unwrap();
    engine.submit((2, 0)).unwrap();
    assert_eq!(release(&engine, &log, 4), [(1, 0), (1, 1), (1, 2), (2, 0)]);
}

#[test]
fn parking_a_lane_does_not_cost_it_its_urgency() {
    let (engine, log) = paused(1);
    engine.submit((1, 0)).unwrap();
    engine.submit(Message::new(1, 1).priority(Priority::Urgent)).unwrap();
    assert!(engine.park(&1, "for a while"));
    send(&engine, (2..5).map(|key| (key, 0)));
    assert!(engine.resume(&1));
    assert_eq!(release(&engine, &log, 5)[..2], [(1, 0), (1, 1)]);
}

#[test]
fn a_turn_that_is_cut_short_does_not_cost_its_lane_the_urgency() {
    let log = Log::new();
    let log_too = log.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .batch_max(4)
        .handle_batch(move |context, batch: &mut Batch<'_, u64, u64>| {
            log_too.push((*context.key(), batch.len()));
            let first = *context.key() == 0 && context.attempt() == 1 && log_too.len() == 1;
            if first { Outcome::RetryAfter(Duration::from_secs(3_600)) } else { Outcome::Done }
        })
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, [(0, 0), (0, 1)]);
    engine.submit(Message::new(0, 2).priority(Priority::Urgent)).unwrap();
    assert!(engine.unpause("pool-0"));
    log.wait_len(1);
    witness::eventually("it is put back", || engine.snapshot().dispatchers[0].deferred_lanes == 1);
    assert!(engine.pause("pool-0"));
    engine.submit(Message::new(1, 0).priority(Priority::High)).unwrap();
    assert!(engine.resume(&0));
    assert!(engine.unpause("pool-0"));
    assert_eq!(log.wait_len(3), [(0, 3), (0, 3), (1, 1)], "the urgent one is still in the first lane");
}

#[test]
fn the_lowest_tier_is_not_starved() {
    let (engine, log) = paused(1);
    engine.submit(Message::new(0, 0).priority(Priority::Low)).unwrap();
    for key in 1..=500 {
        engine.submit(Message::new(key, 0).priority(Priority::Urgent)).unwrap();
    }
    let order = release(&engine, &log, 501);
    let place = order.iter().position(|(key, _)| *key == 0).unwrap();
    assert!((1..100).contains(&place), "the low lane was number {place}");
}

#[test]
fn priorities_never_reorder_within_a_lane() {
    let witness = Witness::new();
    let engine = testify(Topology::pool(3), &witness);
    let tiers = [Priority::Low, Priority::Urgent, Priority::Normal, Priority::High, Priority::Normal];
    for number in 0..200 {
        for key in 0..100 {
            let priority = tiers[((number * 7 + key * 3) % 5) as usize];
            engine.submit(Message::new(key, number).priority(priority)).unwrap();
        }
    }
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..100).map(|key| (key, 200)));
}

// ── progress ───────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_hot_lane_gives_way_after_batch_max() {
    let (engine, log) = paused(4);
    send(&engine, (0..100).map(|number| (0, number)));
    send(&engine, (1..=10).map(|key| (key, 0)));
    let order = release(&engine, &log, 110);
    let hot_before_others = order.iter().take_while(|(key, _)| *key == 0).count();
    assert!((1..=4).contains(&hot_before_others), "{hot_before_others} hot messages went first");
    let others = &order[hot_before_others..hot_before_others + 10];
    assert_eq!(others, (1..=10).map(|key| (key, 0)).collect::<Vec<_>>(), "then everybody else, in turn");
}

#[test]
fn a_hot_lane_that_runs_lets_those_in_that_came_meanwhile() {
    let (gate, log) = (Gate::closed(), Log::new());
    let (gate_too, log_too) = (gate.clone(), log.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .batch_max(4)
        .handle(move |context, number: &mut u64| {
            log_too.push((*context.key(), *number));
            if (*context.key(), *number) == (0, 0) {
                gate_too.pass();
            }
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    engine.submit((0, 0)).unwrap();
    gate.wait_arrived(1);
    send(&engine, (1..100).map(|number| (0, number)));
    send(&engine, (1..=10).map(|key| (key, 0)));
    gate.open();
    let order = log.wait_len(110);
    let last_other = order.iter().rposition(|(key, _)| *key != 0).unwrap();
    let hot_before = order[..last_other].iter().filter(|(key, _)| *key == 0).count();
    assert!(hot_before <= 4, "{hot_before} hot messages went before the last of the others: {order:?}");
}

#[test]
fn a_hot_lane_with_more_waiting_lets_those_in_that_came_meanwhile() {
    let (gate, log) = (Gate::closed(), Log::new());
    let (gate_too, log_too) = (gate.clone(), log.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .batch_max(4)
        .handle(move |context, number: &mut u64| {
            log_too.push((*context.key(), *number));
            if (*context.key(), *number) == (0, 0) {
                gate_too.pass();
            }
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    // Everything that is there when a paused dispatcher goes on is in its lane; what comes later is in ingress.
    assert!(engine.pause("pool-0"));
    send(&engine, (0..100).map(|number| (0, number)));
    assert!(engine.unpause("pool-0"));
    gate.wait_arrived(1);
    send(&engine, (1..=10).map(|key| (key, 0)));
    gate.open();
    let order = log.wait_len(110);
    let last_other = order.iter().rposition(|(key, _)| *key != 0).unwrap();
    let hot_before = order[..last_other].iter().filter(|(key, _)| *key == 0).count();
    assert!(hot_before <= 4, "{hot_before} hot messages went before the last of the others: {order:?}");
}

#[test]
fn a_key_behind_a_long_queue_of_another_finds_a_worker_that_sleeps() {
    let gate = Gate::closed();
    let (gate_too, witness) = (gate.clone(), Witness::new());
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .handle(move |context, number: &mut u64| {
            if (*context.key(), *number) == (0, 0) {
                gate_too.pass();
            }
            witness_too.see(context.key(), *number);
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    let asleep = || engine.snapshot().workers.iter().all(|worker| worker.parks == worker.wake_ups + 1);
    witness::eventually("both sleep", asleep);
    // More than a worker admits at once, so that the other key is not yet in its lane when the first is taken; and one batch, which wakes one worker.
    let report = engine.submit_batch((0..1_000).map(|number| (0, number)).chain([(1, 0)]));
    assert_eq!(report.accepted, 1_001);
    gate.wait_arrived(1);
    witness::eventually("the other key runs beside the one that is stuck", || witness.done(&1) == 1);
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify([(0, 1_000), (1, 1)]);
}

/// Blocks one handler; then everybody else's messages must be handled while it is blocked.
fn no_hostage(topology: Topology<u64>, warm_up: u64) {
    let (gate, witness) = (Gate::closed(), Witness::new());
    let (gate_too, witness_too) = (gate.clone(), witness.clone());
    let slow = u64::MAX;
    let engine = Engine::builder()
        .topology(topology)
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            if *context.key() == slow {
                gate_too.pass();
            }
            attempt.done();
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    let keys = 500;
    // Handlers that were fast so far make turns long: that must not make them greedy across keys.
    send(&engine, (0..warm_up).flat_map(|number| (0..keys).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    let messages = |numbers: std::ops::Range<u64>| {
        numbers.flat_map(move |number| (0..keys).map(move |key| (key, warm_up + number)))
    };
    // In the middle of many others, all of which are there before anybody starts: whoever takes several lanes at once takes the slow one with them.
    let dispatchers: Vec<String> = engine.snapshot().dispatchers.into_iter().map(|d| d.name).collect();
    dispatchers.iter().for_each(|name| assert!(engine.pause(name)));
    engine.submit_batch(messages(0..5));
    send(&engine, [(slow, 0), (slow, 1)]);
    engine.submit_batch(messages(5..10));
    dispatchers.iter().for_each(|name| assert!(engine.unpause(name)));
    gate.wait_arrived(1);
    witness::eventually("all others are done", || witness.total() == keys * (warm_up + 10));
    assert_eq!(gate.arrived(), 1, "the successor of the slow message waits for it, and only that");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..keys).map(|key| (key, warm_up + 10)).chain([(slow, 2)]));
}

#[test]
fn a_slow_key_takes_nobody_hostage_in_a_pool() {
    no_hostage(Topology::pool(2), 0);
    no_hostage(Topology::pool(2), 200);
}

#[test]
fn a_slow_key_takes_nobody_hostage_in_its_partition() {
    no_hostage(Topology::partitioned(1, 2), 0);
    no_hostage(Topology::partitioned(4, 2), 200);
}

#[test]
fn pitfall_003_13_a_slow_key_takes_nobody_hostage_where_workers_serve_several_dispatchers() {
    let shared = || Topology::assigned([vec!["even", "odd"], vec!["odd", "even"]], by_parity);
    no_hostage(shared(), 0);
    no_hostage(shared(), 200);
}

#[test]
fn a_paced_dispatcher_keeps_order_and_starts_no_faster_than_its_pace() {
    let (witness, log) = (Witness::new(), Log::new());
    let (witness_too, log_too) = (witness.clone(), log.clone());
    let topology =
        Topology::builder().dispatcher_paced("slow", 200.0).worker("a", ["slow"]).worker("b", ["slow"]);
    let engine = Engine::builder()
        .topology(topology.build())
        .handle(move |context, number: &mut u64| {
            log_too.push(std::time::Instant::now());
            witness_too.see(context.key(), *number);
        })
        .build()
        .unwrap();
    send(&engine, (0..10).flat_map(|number| (0..4).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..4).map(|key| (key, 10)));
    let starts = log.entries();
    // 40 messages have 39 intervals of 5 ms; the clock is read just before the handler is called, hence the slack.
    let took = *starts.iter().max().unwrap() - *starts.iter().min().unwrap();
    assert!(took >= Duration::from_millis(39 * 5 - 10), "too fast: {took:?}");
}

/// What was not waiting for its place in the pace has missed none of it.
#[test]
fn a_paced_dispatcher_does_not_start_a_burst_after_it_was_idle() {
    let starts = Arc::new(Mutex::new(Vec::new()));
    let (time, starts_too) = (Time::new(), starts.clone());
    let time_too = time.clone();
    let topology =
        Topology::builder().dispatcher_paced("p", 10_000.0).worker("a", ["p"]).worker("b", ["p"]).build();
    let builder = Engine::builder()
        .topology(topology)
        .handle(move |_, _: &mut u64| starts_too.lock().unwrap().push(time_too.now()));
    let mut sim = Sim::with_time(3, time, builder).unwrap();
    sim.at(Duration::ZERO, |handle| send(handle, [(0, 0)]));
    sim.at(Duration::from_secs(1), |handle| send(handle, (0..100).map(|key| (key, 1))));
    sim.run().unwrap();
    let starts = starts.lock().unwrap();
    let least = starts.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap();
    assert_eq!((starts.len(), least), (101, Duration::from_micros(100)));
}
