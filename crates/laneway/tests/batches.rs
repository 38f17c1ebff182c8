//! Batches of any length: handed over in pieces, in order, by the layout that is current at the time.
//!
//! Each of these batches is longer than what is handed over at once, and its own iterator does what a test has to do in the middle of it.

mod witness;

use laneway::{Bound, Engine, Overflow, Refusal, Topology};
use witness::{DEADLINE, Gate, OpensAtLast, Witness};

#[test]
fn workers_begin_before_a_long_batch_has_ended() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    let report = engine.submit_batch((0..2_000).map(|number| {
        if number == 1_500 {
            witness::eventually("the first are handled", || witness.total() > 0);
        }
        (number % 10, number / 10)
    }));
    assert_eq!((report.accepted, report.dropped, report.refused.len()), (2_000, 0, 0));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..10).map(|key| (key, 200)));
}

#[test]
fn a_refusal_in_one_piece_holds_for_those_that_follow() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(100)
        .overflow(Overflow::Reject)
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    let report = engine.submit_batch((0..1_000).map(|number| {
        if number == 700 {
            // By now some were refused; from now on there is room.
            assert!(engine.unpause("pool-0"));
            witness::eventually("those that got in are handled", || witness.total() == 100);
        }
        if number < 990 { (0, number) } else { (1, number - 990) }
    }));
    assert_eq!(report.accepted, 110, "of the other key all got in, when there was room");
    let (first, rest) = report.refused.split_first().unwrap();
    assert_eq!((first.message.body, first.reason), (100, Refusal::Full(Bound::Dispatcher)));
    assert!(rest.iter().all(|refused| refused.reason == Refusal::AfterRefused));
    assert!(report.refused.iter().map(|refused| refused.message.body).eq(100..990), "each once, in order");
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify([(0, 100), (1, 10)]);
}

#[test]
fn a_batch_that_has_to_wait_for_room_goes_in_whole_and_in_order() {
    let (gate, witness) = (Gate::closed(), Witness::new());
    let (gate_too, witness_too) = (gate.clone(), witness.clone());
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .worker_queue_capacity(16)
        .handle(move |context, number: &mut u64| {
            gate_too.pass();
            witness_too.see(context.key(), *number);
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            gate.wait_arrived(1);
            witness::eventually("the batch waits", || engine.snapshot().account.outstanding >= 16);
            gate.open();
        });
        let report = engine.submit_batch((0..5_000).map(|number| (number % 50, number / 50)));
        assert_eq!((report.accepted, report.refused.len()), (5_000, 0));
    });
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..50).map(|key| (key, 100)));
}

#[test]
fn a_batch_that_was_sorted_for_another_layout_is_sorted_again() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    let keys = 100;
    let batch = |round: u64| (0..keys).flat_map(move |key| (0..5).map(move |n| (key, round * 5 + n)));
    assert_eq!(engine.submit_batch(batch(0)).accepted, 500);
    engine.add_dispatcher("third", &["partition-0/0"]).unwrap();
    // The first one after the change goes by what the batch before it has left behind; the next one does not.
    for round in 1..=2 {
        assert_eq!(engine.submit_batch(batch(round)).accepted, 500);
    }
    // And in the middle of one.
    let mut messages = batch(3);
    let report = engine.submit_batch((0..500).map(|place| {
        if place == 450 {
            engine.add_dispatcher("fourth", &["partition-0/0"]).unwrap();
        }
        messages.next().unwrap()
    }));
    assert_eq!(report.accepted, 500);
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..keys).map(|key| (key, 20)));
    let names = |name: &str| {
        engine.snapshot().dispatchers.iter().find(|d| d.name == name).is_some_and(|d| d.account.done > 0)
    };
    assert!(names("third") && names("fourth"), "the new dispatchers have their part");
}

/// From there on a batch has to look at every message by itself.
#[test]
fn a_change_in_the_middle_of_a_batch_that_makes_the_bound_of_the_engine_count_is_heeded_by_the_rest_of_it() {
    // What moves to the new dispatcher begins at once, and must not leave while places are counted.
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .ingress_capacity(2_000)
        .worker_queue_capacity(1_000)
        .overflow(Overflow::Reject)
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    for name in ["partition-0", "partition-1"] {
        assert!(engine.pause(name));
    }
    let report = engine.submit_batch((0..10_000).map(|key| {
        if key == 500 {
            engine.add_dispatcher("third", &["partition-0/0"]).unwrap();
        }
        (key, 0)
    }));
    let snapshot = engine.snapshot();
    assert_eq!((report.accepted, snapshot.account.accepted), (2_000, 2_000), "the bound of the engine");
    assert_eq!(report.refused.len(), 8_000);
    assert!(snapshot.dispatchers.iter().all(|dispatcher| dispatcher.account.accepted > 100));
    // All places come back, and no more.
    gate.open();
    for name in ["partition-0", "partition-1"] {
        assert!(engine.unpause(name));
    }
    assert!(engine.wait_quiet(DEADLINE));
    for name in ["partition-0", "partition-1", "third"] {
        assert!(engine.pause(name));
    }
    assert_eq!(engine.submit_batch((0..10_000).map(|key| (key, 1))).accepted, 2_000);
}

#[test]
fn a_batch_that_may_not_wait_is_refused_where_there_is_no_room() {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(100)
        .handle(|_, _: &mut u64| ())
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    let report = engine.try_submit_batch((0..300).map(|number| (number / 150, number)));
    assert_eq!((report.accepted, report.dropped), (100, 0));
    let reasons: Vec<_> =
        report.refused.iter().map(|refused| (refused.message.body, refused.reason)).collect();
    let first = |number| number == 100 || number == 150;
    let full = Refusal::Full(Bound::Dispatcher);
    let expected =
        (100..300).map(|number| (number, if first(number) { full } else { Refusal::AfterRefused }));
    assert_eq!(reasons, expected.collect::<Vec<_>>());
    assert!(engine.unpause("pool-0"));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 100);
}
