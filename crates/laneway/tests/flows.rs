//! Flows: document 000's signals, with the pitfalls of that document by number.
//!
//! A flow begins with its first message and ends with a finish. Its mapping (key to dispatcher) stays for as long as anything of it is
//! outstanding, and goes when it is finished and settled; whatever comes later is late, counted, and in order. The gauge of active mappings is what a
//! leak would show in.

mod witness;

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use laneway::{
    Admission, Bound, Builder, Cancel, Engine, Flows, Handle, Kind, Message, Overflow, Refusal, RetryPolicy,
    Topology,
};
use witness::{A_MOMENT, DEADLINE, Gate, Log, OpensAtLast, Witness, eventually, send};

type Seen = Arc<Log<(u64, Kind, u64, String)>>;

fn flows(set: impl FnOnce(Builder<u64, u64>) -> Builder<u64, u64>) -> (Engine<u64, u64>, Seen) {
    let seen = Log::new();
    let seen_too = seen.clone();
    let builder = Engine::builder().topology(Topology::per_worker(2)).flows(Flows::default()).handle(
        move |context, number: &mut u64| {
            seen_too.push((*context.key(), context.kind(), *number, context.dispatcher().to_owned()));
        },
    );
    (set(builder).build().unwrap(), seen)
}

/// A flow whose messages wait at a gate.
fn gated(
    workers: usize,
    set: impl FnOnce(Builder<u64, u64>) -> Builder<u64, u64>,
) -> (Engine<u64, u64>, Arc<Gate>) {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let builder = Engine::builder()
        .topology(Topology::per_worker(workers))
        .flows(Flows::default())
        .handle(move |_, _: &mut u64| gate_too.pass());
    (set(builder).build().unwrap(), gate)
}

fn pause_all(engine: &Engine<u64, u64>) {
    (0..2).for_each(|n| assert!(engine.pause(&format!("worker-{n}"))));
}

fn unpause_all(engine: &Engine<u64, u64>) {
    (0..2).for_each(|n| assert!(engine.unpause(&format!("worker-{n}"))));
}

fn mappings(engine: &Handle<u64, u64>) -> usize {
    engine.snapshot().active_mappings
}

#[test]
fn a_flow_lives_from_its_start_to_the_settlement_of_its_finish() {
    let (engine, seen) = flows(|b| b);
    assert_eq!(mappings(&engine), 0);
    engine.submit(Message::start(1, 0)).unwrap();
    send(&engine, [(1, 1), (1, 2)]);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(mappings(&engine), 1, "idle, but not finished");
    engine.submit(Message::finish(1, 3)).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    eventually("the mapping goes", || mappings(&engine) == 0);
    let seen = seen.entries();
    let kinds: Vec<_> = seen.iter().map(|(_, kind, number, _)| (*kind, *number)).collect();
    assert_eq!(kinds, [(Kind::Start, 0), (Kind::Event, 1), (Kind::Event, 2), (Kind::Finish, 3)]);
    assert!(seen.iter().all(|(.., dispatcher)| *dispatcher == seen[0].3), "always the same worker");
    assert_eq!(engine.snapshot().late, 0);
}

#[test]
fn the_gauge_is_exact_when_the_engine_is_quiet() {
    let (engine, _) = flows(|b| b);
    for key in 0..3_000 {
        engine.submit(Message::finish(key, 0)).unwrap();
        assert!(engine.wait_quiet(DEADLINE));
        assert_eq!(
            mappings(&engine),
            0,
            "flow {key} is finished and settled, and its mapping is still there"
        );
    }
}

#[test]
fn without_flows_a_mapping_lasts_as_long_as_its_key_has_work() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::per_worker(2))
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0), (1, 1), (2, 0)]);
    assert_eq!(mappings(&engine), 2);
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    eventually("both go", || mappings(&engine) == 0);
}

#[test]
fn pitfall_000_1_a_late_event_stays_behind_the_finish_on_the_same_worker() {
    let (engine, seen) = flows(|b| b);
    pause_all(&engine);
    engine.submit(Message::start(1, 0)).unwrap();
    send(&engine, (1..100).map(|number| (1, number)));
    engine.submit(Message::finish(1, 100)).unwrap();
    // The other worker has nothing to do: a late event that were placed anew would go there and overtake.
    send(&engine, [(1, 101), (1, 102)]);
    assert_eq!(engine.snapshot().late, 2);
    unpause_all(&engine);
    assert!(engine.wait_quiet(DEADLINE));
    let seen = seen.entries();
    assert_eq!(
        seen.iter().map(|(_, _, number, _)| *number).collect::<Vec<_>>(),
        (0..=102).collect::<Vec<_>>()
    );
    assert!(seen.iter().all(|(.., dispatcher)| *dispatcher == seen[0].3));
    eventually("no mapping leaks", || mappings(&engine) == 0);
}

#[test]
fn pitfall_000_1_an_event_after_the_mapping_has_gone_is_late_and_leaks_nothing() {
    let (engine, _) = flows(|b| b);
    engine.submit(Message::finish(1, 0)).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    eventually("it goes", || mappings(&engine) == 0);
    send(&engine, [(1, 1), (1, 2)]);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().late, 2, "the tombstone knows");
    eventually("nobody will finish it, so it goes by itself", || mappings(&engine) == 0);
    assert_eq!(engine.snapshot().account.done, 3, "late, not lost");
}

#[test]
fn pitfall_000_2_a_finish_against_late_events_from_another_thread_never_splits_a_flow() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::per_worker(4))
        .flows(Flows::default())
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    // Each flow is finished again and again while events go on: every gap between two settlements is a chance to be placed anew.
    thread::scope(|scope| {
        for producer in 0..4_u64 {
            let handle = engine.handle();
            scope.spawn(move || {
                for number in 0..3_000 {
                    for key in [producer * 2, producer * 2 + 1] {
                        let message = match number % 7 {
                            3 => Message::finish(key, number),
                            5 => Message::start(key, number),
                            _ => Message::new(key, number),
                        };
                        handle.submit(message).unwrap();
                    }
                }
            });
        }
    });
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..8).map(|key| (key, 3_000)));
    (0..8).for_each(|key| assert!(engine.submit(Message::finish(key, 3_000)).is_ok()));
    assert!(engine.wait_quiet(DEADLINE));
    eventually("all are finished", || mappings(&engine) == 0);
}

#[test]
fn pitfall_000_2_a_start_opens_the_key_again_while_the_old_flow_is_outstanding() {
    let (engine, gate) = gated(2, |b| b);
    let _opens = OpensAtLast(gate.clone());
    engine.submit(Message::start(1, 0)).unwrap();
    engine.submit(Message::finish(1, 1)).unwrap();
    engine.submit(Message::start(1, 2)).unwrap();
    send(&engine, [(1, 3)]);
    assert_eq!(engine.snapshot().late, 0, "the start made it a new flow");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(mappings(&engine), 1, "the old finish does not remove the new flow's mapping");
    engine.submit(Message::finish(1, 4)).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    eventually("now it does", || mappings(&engine) == 0);
}

#[test]
fn pitfall_000_2_a_start_opens_the_key_again_after_the_old_flow_has_gone() {
    let (engine, _) = flows(|b| b);
    engine.submit(Message::finish(1, 0)).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    engine.submit(Message::start(1, 1)).unwrap();
    send(&engine, [(1, 2)]);
    assert!(engine.wait_quiet(DEADLINE));
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.late, snapshot.active_mappings), (0, 1), "not late: it was started anew");
}

#[test]
fn pitfall_000_3_a_flow_that_never_finishes_goes_by_its_time_to_live() {
    let time_to_live = Duration::from_millis(20);
    let (engine, _) = flows(|b| b.flows(Flows { time_to_live, ..Flows::default() }));
    send(&engine, (0..100).map(|key| (key, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    eventually("all are released", || mappings(&engine) == 0);
    assert_eq!(engine.snapshot().expired_flows, 100);
}

#[test]
fn pitfall_000_3_the_time_to_live_spares_flows_with_something_outstanding() {
    let time_to_live = Duration::from_millis(1);
    let (engine, gate) = gated(2, |b| b.flows(Flows { time_to_live, ..Flows::default() }));
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0), (1, 1)]);
    gate.wait_arrived(1);
    let began = Instant::now();
    while began.elapsed() < time_to_live * 20 {
        let snapshot = engine.snapshot();
        assert_eq!((snapshot.active_mappings, snapshot.expired_flows), (1, 0));
    }
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    eventually("now it may go", || mappings(&engine) == 0);
    assert_eq!(engine.snapshot().expired_flows, 1);
}

#[test]
fn pitfall_000_3_idle_flows_are_capped_and_no_fewer_are_remembered_than_was_said() {
    let (engine, _) = flows(|b| b.flows(Flows { max: 100, ..Flows::default() }));
    send(&engine, (0..60).map(|key| (key, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(mappings(&engine), 60, "60 flows are fewer than 100");
    send(&engine, (60..5_000).map(|key| (key, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    let left = mappings(&engine);
    assert!(
        left <= 200,
        "{left} idle flows are remembered; 100 were allowed, in shards that are not quite even"
    );
}

#[test]
fn pitfall_000_4_least_loaded_spreads_the_flows_of_an_idle_system() {
    let seen = Log::new();
    let seen_too = seen.clone();
    let engine = Engine::builder()
        .topology(Topology::per_worker(8))
        .flows(Flows::default())
        .handle(move |context, _: &mut u64| seen_too.push(context.worker()))
        .build()
        .unwrap();
    // One flow at a time: at each choice all queues are empty.
    for key in 0..800 {
        send(&engine, [(key, 0)]);
        assert!(engine.wait_quiet(DEADLINE));
    }
    let mut flows = HashMap::<usize, u32>::new();
    seen.entries().into_iter().for_each(|worker| *flows.entry(worker).or_default() += 1);
    assert_eq!(flows.len(), 8);
    assert!(
        flows.values().all(|n| (90..=110).contains(n)),
        "by size() alone they would all go to worker 0: {flows:?}"
    );
}

#[test]
fn pitfall_000_4_work_in_service_counts_as_load() {
    let (engine, gate) = gated(2, |b| b);
    let _opens = OpensAtLast(gate.clone());
    let home = |key: u64| engine.explain(&key).unwrap().dispatcher;
    send(&engine, [(1, 0)]);
    gate.wait_arrived(1);
    // The queue of key 1's worker is empty now: its message is in service.
    send(&engine, [(2, 0)]);
    assert_ne!(home(1), home(2));
    gate.wait_arrived(2);
    send(&engine, [(1, 1), (1, 2)]);
    send(&engine, [(3, 0), (4, 0)]);
    assert_eq!((home(3), home(4)), (home(2), home(2)), "three against one, then against two");
}

#[test]
fn pitfall_000_5_a_full_worker_does_not_starve_the_others() {
    let gate = Gate::closed();
    let (gate_too, witness) = (gate.clone(), Witness::new());
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::per_worker(2))
        .flows(Flows::default())
        .worker_queue_capacity(4)
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            if *context.key() == 1 {
                gate_too.pass();
            }
            attempt.done();
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..4).map(|number| (1, number)));
    gate.wait_arrived(1);
    let (handle, (answer, blocked)) = (engine.handle(), mpsc::channel());
    thread::spawn(move || answer.send(handle.submit((1, 4)).is_ok()));
    assert!(blocked.recv_timeout(A_MOMENT).is_err(), "its producer waits at the full worker");
    send(&engine, (0..1_000).map(|number| (2, number)));
    eventually("everybody else's messages are handled meanwhile", || witness.done(&2) == 1_000);
    gate.open();
    assert!(blocked.recv_timeout(DEADLINE).unwrap());
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify([(1, 5), (2, 1_000)]);
}

/// Two routers that take the events of a flow in turns may put them down the other way round. Here whoever submits is the router, and has put its event into the lane
/// before it can tell the next one.
#[test]
fn pitfall_000_5_threads_that_submit_the_events_of_a_flow_in_turns_do_not_reorder_it() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::per_worker(2))
        .flows(Flows::default())
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    let (rounds, flows) = (2_000, 4);
    thread::scope(|scope| {
        let (first, from_second) = mpsc::channel();
        let (second, from_first) = mpsc::channel();
        for (turns, next) in [(from_second, second), (from_first, first.clone())] {
            let handle = engine.handle();
            scope.spawn(move || {
                while let Ok(number) = turns.recv() {
                    send(&handle, (0..flows).map(|flow| (flow, number)));
                    // The other one has gone when all rounds are over.
                    if number + 1 == rounds || next.send(number + 1).is_err() {
                        return;
                    }
                }
            });
        }
        first.send(0).unwrap();
    });
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..flows).map(|flow| (flow, rounds)));
}

#[test]
fn pitfall_000_6_a_handler_that_emits_into_a_full_engine_does_not_deadlock() {
    let (own, refused) = (Arc::new(OnceLock::<Handle<u64, u64>>::new()), Log::new());
    let (own_too, refused_too) = (own.clone(), refused.clone());
    let engine = Engine::builder()
        .topology(Topology::per_worker(2))
        .flows(Flows::default())
        .worker_queue_capacity(1)
        .handle(move |context, number: &mut u64| {
            for step in 0..3 {
                let emitted = own_too.get().unwrap().submit((*context.key(), *number + step + 1_000));
                if let Err(refusal) = emitted {
                    refused_too.push(refusal.reason);
                }
            }
        })
        .build()
        .unwrap();
    assert!(own.set(engine.handle()).is_ok());
    engine.submit((1, 0)).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    assert!(refused.entries().iter().all(|reason| *reason == Refusal::FromHandler(Bound::Dispatcher)));
    assert_eq!(refused.len(), 3);
}

#[test]
fn pitfall_000_7_drop_oldest_keeps_start_and_finish_so_no_mapping_leaks() {
    let dropped = Log::new();
    let dropped_too = dropped.clone();
    let (engine, seen) = flows(|b| {
        b.topology(Topology::per_worker(1))
            .worker_queue_capacity(4)
            .overflow(Overflow::DropOldest)
            .on_drop(move |message: Message<u64, u64>, _| dropped_too.push((message.key, message.kind)))
    });
    assert!(engine.pause("worker-0"));
    engine.submit(Message::start(1, 0)).unwrap();
    send(&engine, [(1, 1)]);
    engine.submit(Message::finish(1, 2)).unwrap();
    send(&engine, (0..20).map(|number| (2, number)));
    assert!(dropped.entries().iter().all(|(_, kind)| *kind == Kind::Event));
    assert!(engine.unpause("worker-0"));
    assert!(engine.wait_quiet(DEADLINE));
    let of_flow: Vec<_> =
        seen.entries().into_iter().filter(|(key, ..)| *key == 1).map(|(_, kind, ..)| kind).collect();
    assert_eq!(of_flow, [Kind::Start, Kind::Finish], "never a finish without its start");
    eventually("flow 1 is gone, flow 2 was not finished", || mappings(&engine) == 1);
}

#[test]
fn pitfall_000_7_an_evicted_last_message_of_a_finished_flow_takes_its_mapping_along() {
    let (engine, _) = flows(|b| {
        b.topology(Topology::per_worker(1))
            .worker_queue_capacity(1)
            .control_reserve(8)
            .overflow(Overflow::DropOldest)
    });
    engine.submit(Message::finish(1, 0)).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    assert!(engine.pause("worker-0"));
    send(&engine, [(1, 1)]); // Late, and the only one of its key.
    send(&engine, [(2, 0)]); // Evicts it.
    assert_eq!((engine.snapshot().account.dropped, mappings(&engine)), (1, 1), "only flow 2 is mapped");
}

#[test]
fn pitfall_000_8_a_refused_first_event_leaves_no_mapping() {
    for policy in [Overflow::Reject, Overflow::DropNewest] {
        let (engine, gate) = gated(1, |b| b.worker_queue_capacity(1).overflow(policy));
        let _opens = OpensAtLast(gate.clone());
        send(&engine, [(1, 0)]);
        gate.wait_arrived(1);
        let answer = engine.submit((2, 0));
        assert_ne!(answer.ok(), Some(Admission::Accepted));
        assert_eq!(mappings(&engine), 1, "{policy:?}: nothing of flow 2 was ever accepted");
    }
}

#[test]
fn pitfall_000_8_a_refused_finish_does_not_finish_its_flow() {
    let (engine, gate) =
        gated(1, |b| b.worker_queue_capacity(1).control_reserve(0).overflow(Overflow::Reject));
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0)]);
    gate.wait_arrived(1);
    let refused = engine.submit(Message::finish(1, 1)).unwrap_err();
    assert_eq!((refused.reason, refused.message.kind), (Refusal::Full(Bound::Dispatcher), Kind::Finish));
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    send(&engine, [(1, 1)]);
    assert_eq!(engine.snapshot().late, 0, "the flow is still open");
    engine.submit(Message::finish(1, 2)).ok();
}

#[test]
fn pitfall_000_8_a_refused_start_does_not_open_its_flow_again() {
    let (engine, gate) =
        gated(1, |b| b.worker_queue_capacity(1).control_reserve(1).overflow(Overflow::Reject));
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0)]);
    engine.submit(Message::finish(1, 1)).unwrap();
    assert!(engine.submit(Message::start(1, 2)).is_err());
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    eventually("the flow was finished, and the start that was refused has not changed that", || {
        mappings(&engine) == 0
    });
}

#[test]
fn pitfall_000_8_a_refused_late_event_is_not_counted_as_late() {
    let (engine, gate) = gated(1, |b| b.worker_queue_capacity(2).overflow(Overflow::Reject));
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0)]);
    engine.submit(Message::finish(1, 1)).unwrap();
    assert!(engine.submit((1, 2)).is_err());
    assert_eq!(engine.snapshot().late, 0);
}

#[test]
fn pitfall_000_9_drops_are_counted_by_stage_policy_kind_and_worker() {
    let (engine, _) = flows(|b| b.worker_queue_capacity(2).overflow(Overflow::DropNewest));
    pause_all(&engine);
    (0..5).for_each(|number| assert!(engine.submit((1, number)).is_ok()));
    let snapshot = engine.snapshot();
    let by_worker: Vec<u64> = snapshot
        .dispatchers
        .iter()
        .map(|d| d.drops.count(Bound::Dispatcher, Overflow::DropNewest, Kind::Event))
        .collect();
    assert!(by_worker.contains(&3) && by_worker.contains(&0), "{by_worker:?}");
    assert_eq!(snapshot.drops.total(), 3);
}

#[test]
fn pitfall_000_10_a_cancelled_submitter_gets_its_message_back_and_leaves_no_mapping() {
    let (engine, gate) = gated(1, |b| b.worker_queue_capacity(1));
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0)]);
    gate.wait_arrived(1);
    let (cancel, handle, (answer, refused)) = (Cancel::new(), engine.handle(), mpsc::channel());
    let cancel_too = cancel.clone();
    thread::spawn(move || answer.send(handle.submit_unless((2, 7), &cancel_too)));
    assert!(refused.recv_timeout(A_MOMENT).is_err(), "it waits for room");
    cancel.cancel();
    let refused = refused.recv_timeout(DEADLINE).unwrap().unwrap_err();
    assert_eq!((refused.reason, refused.message.body), (Refusal::Cancelled, 7));
    assert_eq!(mappings(&engine), 1, "that of the flow that is running");
}

/// One worker per dispatcher: if it died, its flows would wait for ever.
#[test]
fn pitfall_000_10_a_panic_strands_no_flow_of_its_worker() {
    let done = Log::new();
    let done_too = done.clone();
    let (engine, _) = flows(|b| {
        b.retry(RetryPolicy { max_attempts: 1, ..RetryPolicy::default() }).handle(
            move |context, number: &mut u64| {
                assert!(number.is_multiple_of(2), "an odd one");
                done_too.push((*context.key(), *number));
            },
        )
    });
    send(&engine, (0..4).flat_map(|number| (0..100).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE), "{}", engine.snapshot().account);
    let account = engine.snapshot().account;
    assert_eq!((account.done, account.failed, done.len()), (200, 200, 200));
}

#[test]
fn pitfall_000_11_events_from_other_threads_after_the_finish_are_normal_input() {
    let (engine, seen) = flows(|b| b);
    let children = 4;
    engine.submit(Message::start(1, 0)).unwrap();
    engine.submit(Message::finish(1, 1)).unwrap();
    thread::scope(|scope| {
        for child in 0..children {
            let handle = engine.handle();
            scope.spawn(move || send(&handle, (0..100).map(|number| (1, 1_000 * (child + 1) + number))));
        }
    });
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().late, children * 100);
    let seen = seen.entries();
    for child in 1..=children {
        let own: Vec<u64> = seen.iter().map(|(_, _, n, _)| *n).filter(|n| n / 1_000 == child).collect();
        assert_eq!(
            own,
            (0..100).map(|number| 1_000 * child + number).collect::<Vec<_>>(),
            "each child's own order"
        );
    }
    eventually("and nothing is left of it", || mappings(&engine) == 0);
}

#[test]
fn flows_on_hashed_partitions_are_tracked_too() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(4, 1))
        .flows(Flows::default())
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    for key in 0..500 {
        engine.submit(Message::start(key, 0)).unwrap();
        send(&engine, (1..5).map(|number| (key, number)));
        engine.submit(Message::finish(key, 5)).unwrap();
    }
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..500).map(|key| (key, 6)));
    eventually("all are finished", || mappings(&engine) == 0);
}
