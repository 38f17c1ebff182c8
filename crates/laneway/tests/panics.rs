//! Code of the user that panics: in a handler, in a callback, in a drop, in a hash, in a clone.
//!
//! A panic belongs to the message that caused it. Afterwards the worker is there, the lane goes on, other lanes never noticed, and the account
//! balances. Panics print their backtraces into the output of these tests: that is what was asked for.

mod witness;

use std::{
    hash::{Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use laneway::{
    Among, Batch, Engine, Exhausted, Failure, Handle, LooksAt, Message, Outcome, Overflow, Placement,
    RetryPolicy, Topology,
};
use witness::{DEADLINE, Log, Witness, send, within};

fn assert_balanced<K, M>(engine: &Handle<K, M>) {
    let snapshot = engine.snapshot();
    assert!(snapshot.account.balances(), "{}", snapshot.account);
    assert_eq!(snapshot.account.outstanding, 0, "{}", snapshot.account);
    assert!(snapshot.dispatchers.iter().all(|d| d.active_lanes == 0 && d.in_flight == 0));
}

fn panics<K, M>(engine: &Handle<K, M>) -> u64 {
    engine.snapshot().dispatchers.iter().map(|d| d.panics).sum()
}

#[test]
fn a_panicking_handler_fails_its_message_and_nothing_else() {
    let (witness, failures) = (Witness::new(), Log::new());
    let (witness_too, failures_too) = (witness.clone(), failures.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .retry(RetryPolicy::never())
        .on_fail(move |message: Message<u64, u64>, failure: Failure| {
            failures_too.push((message.body, failure))
        })
        .handle(move |context, number: &mut u64| {
            if (*context.key(), *number) == (3, 2) {
                witness_too.excuse(context.key(), *number);
                panic!("the {}nd of key 3", number);
            }
            witness_too.see(context.key(), *number);
        })
        .build()
        .unwrap();
    send(&engine, (0..5).flat_map(|number| (0..10).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..10).map(|key| (key, if key == 3 { 4 } else { 5 })));
    let failure = Failure { attempts: 1, note: Some("panicked: the 2nd of key 3".to_owned()) };
    assert_eq!(failures.entries(), [(2, failure)]);
    assert_eq!((panics(&engine), engine.snapshot().account.failed), (1, 1));
    assert_balanced(&engine);
}

/// What a message of the next test does at its first attempt.
fn trouble(number: u64) -> Option<Outcome> {
    match number % 401 {
        97 => Some(Outcome::RetryAfter(Duration::from_micros(10))),
        193 => Some(Outcome::Skip),
        // A panic that prints nothing: to print one takes so long that messages would be slow, and not come as streams.
        311 => std::panic::resume_unwind(Box::new(format!("the {number}th"))),
        _ => None,
    }
}

/// Messages of many keys in the hands of one worker, so quick that it takes them as streams, some of which fail. `M` decides whether a
/// stream is run in its place or one by one: what has to be dropped is.
fn fail_now_and_then<M: Send + 'static>(body: fn(u64) -> M, number: fn(&M) -> u64) {
    // Two of each key, never at the same time: in lanes each would be a turn.
    const MESSAGES: u64 = 60_000;
    const KEYS: u64 = MESSAGES / 2;
    let witness = Witness::new();
    let (in_handler, in_on_fail) = (witness.clone(), witness.clone());
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 1))
        .worker_queue_capacity(MESSAGES as usize)
        .retry(RetryPolicy { base: Duration::from_micros(10), max_attempts: 2, ..RetryPolicy::default() })
        .on_fail(move |message: Message<u64, M>, _| {
            in_on_fail.excuse(&message.key, number(&message.body) / KEYS)
        })
        .handle(move |context, body: &mut M| {
            let (key, number) = (*context.key(), number(body));
            let attempt = in_handler.enter(&key, number / KEYS);
            if context.attempt() == 1
                && let Some(outcome) = trouble(number)
            {
                return outcome;
            }
            attempt.done();
            Outcome::Done
        })
        .build()
        .unwrap();
    // Not all at once: what comes before the worker knows that messages are quick goes to lanes.
    for from in (0..MESSAGES).step_by(500) {
        send(&engine, (from..from + 500).map(|number| (number % KEYS, body(number))));
        assert!(engine.wait_quiet(DEADLINE));
    }
    let count = |rest| (0..MESSAGES).filter(|number| number % 401 == rest).count() as u64;
    let is_skipped = |number: u64| u64::from(number % 401 == 193);
    witness.verify((0..KEYS).map(|key| (key, 2 - is_skipped(key) - is_skipped(key + KEYS))));
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.account.done, snapshot.account.failed), (MESSAGES - count(193), count(193)));
    assert_eq!(panics(&engine), count(311));
    let handled: u64 = snapshot.workers.iter().map(|worker| worker.handled).sum();
    assert_eq!(handled, MESSAGES + count(97) + count(311), "two attempts for those that failed");
    let turns: u64 = snapshot.workers.iter().map(|worker| worker.turns).sum();
    assert!(turns < MESSAGES - MESSAGES / 10, "{turns} turns: hardly any streams");
    assert_balanced(&engine);
}

#[test]
fn a_stream_that_is_run_in_its_place_goes_on_behind_a_message_that_fails() {
    fail_now_and_then(|number| number, |body| *body);
}

#[test]
fn a_stream_that_is_run_one_by_one_goes_on_behind_a_message_that_fails() {
    fail_now_and_then(Box::new, |body| **body);
}

#[test]
fn a_panic_is_retried_as_any_failure_is() {
    let attempts = Log::new();
    let attempts_too = attempts.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(RetryPolicy {
            base: Duration::from_micros(10),
            exhausted: Exhausted::ParkLane,
            ..RetryPolicy::default()
        })
        .handle(move |context, _: &mut u64| -> Outcome {
            attempts_too.push(context.attempt());
            std::panic::panic_any(7_u8);
        })
        .build()
        .unwrap();
    engine.submit((1, 0)).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(attempts.entries(), [1, 2, 3]);
    let explanation = engine.explain(&1).unwrap().to_string();
    assert!(explanation.contains("panicked: (not a text)"), "{explanation}");
}

#[test]
fn a_panicking_batch_handler() {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(RetryPolicy::never())
        .handle_batch(|_, batch: &mut Batch<'_, u64, u64>| {
            assert!(batch.iter().next() != Some(&5), "at five");
            batch.complete(1);
            Outcome::Skip
        })
        .build()
        .unwrap();
    send(&engine, (0..20).map(|number| (number % 3, number)));
    assert!(engine.wait_quiet(DEADLINE));
    assert_balanced(&engine);
    assert_eq!(engine.snapshot().account.accepted, 20);
}

/// Panics when it is dropped, if it is a bad one.
struct Bomb {
    number: u64,
    bad: bool,
}

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.bad && !std::thread::panicking() {
            self.bad = false;
            panic!("the drop of {}", self.number);
        }
    }
}

fn bombs(witness: &Arc<Witness>) -> laneway::Builder<u64, Bomb> {
    let witness = witness.clone();
    Engine::builder().topology(Topology::pool(1)).handle(move |context, bomb: &mut Bomb| {
        witness.see(context.key(), bomb.number);
    })
}

fn every_third_is_bad(messages: u64) -> impl Iterator<Item = (u64, Bomb)> {
    (0..messages).map(|number| (1, Bomb { number, bad: number % 3 == 1 }))
}

#[test]
fn a_body_whose_drop_panics_is_done_all_the_same() {
    let witness = Witness::new();
    let engine = bombs(&witness).build().unwrap();
    send(&engine, every_third_is_bad(30));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify([(1, 30)]);
    assert_eq!((engine.snapshot().account.done, panics(&engine)), (30, 10));
    assert_balanced(&engine);
}

#[test]
fn a_body_whose_drop_panics_in_a_batch_or_when_it_is_skipped() {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle_batch(|_, _: &mut Batch<'_, u64, Bomb>| ())
        .build()
        .unwrap();
    send(&engine, every_third_is_bad(30));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!((engine.snapshot().account.done, panics(&engine)), (30, 10));
    assert_balanced(&engine);

    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(|_, _: &mut Bomb| Outcome::Skip)
        .build()
        .unwrap();
    send(&engine, every_third_is_bad(30));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.failed, 30);
    assert_balanced(&engine);
}

#[test]
fn an_evicted_body_whose_drop_panics_does_so_in_the_submitters_hands() {
    let witness = Witness::new();
    let engine = bombs(&witness).worker_queue_capacity(1).overflow(Overflow::DropOldest).build().unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, [(1, Bomb { number: 9, bad: true })]);
    let result =
        catch_unwind(AssertUnwindSafe(|| engine.submit((1, Bomb { number: 0, bad: false })).is_ok()));
    assert!(result.is_err());
    assert!(engine.unpause("pool-0"));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify([(1, 1)]);
    let account = engine.snapshot().account;
    assert_eq!((account.accepted, account.done, account.dropped), (2, 1, 1));
    assert_balanced(&engine);
}

#[test]
fn on_fail_may_panic() {
    let calls = Arc::new(AtomicU64::new(0));
    let calls_too = calls.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .on_fail(move |_: Message<u64, u64>, _| {
            calls_too.fetch_add(1, Relaxed);
            panic!("the callback");
        })
        .handle(|_, number: &mut u64| if number.is_multiple_of(2) { Outcome::Skip } else { Outcome::Done })
        .build()
        .unwrap();
    send(&engine, (0..20).map(|number| (1, number)));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(calls.load(Relaxed), 10);
    let account = engine.snapshot().account;
    assert_eq!((account.done, account.failed), (10, 10));
    assert_balanced(&engine);
    assert!(engine.pause("pool-0"));
    send(&engine, [(1, 1)]);
    assert!(engine.skip_head(&1), "the operator is not blamed for it");
    assert_balanced(&engine);
}

#[test]
fn on_drop_may_panic_in_the_submitters_hands() {
    for policy in [Overflow::DropNewest, Overflow::DropOldest] {
        let engine = Engine::builder()
            .topology(Topology::pool(1))
            .worker_queue_capacity(1)
            .overflow(policy)
            .on_drop(|_: Message<u64, u64>, _| panic!("the callback"))
            .handle(|_, _| ())
            .build()
            .unwrap();
        assert!(engine.pause("pool-0"));
        send(&engine, [(1, 0)]);
        assert!(catch_unwind(AssertUnwindSafe(|| engine.submit((1, 1)).is_ok())).is_err());
        assert!(engine.unpause("pool-0"));
        assert!(engine.wait_quiet(DEADLINE));
        let account = engine.snapshot().account;
        assert_eq!((account.accepted, account.done, account.dropped), (2, 1, 1), "{policy:?}");
        assert_balanced(&engine);
    }
}

/// A key that panics when it is hashed, or when it is cloned, if it is a bad one.
#[derive(PartialEq, Eq, Debug)]
enum Key {
    Good(u64),
    BadHash,
    BadClone,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Key::Good(number) => number.hash(state),
            Key::BadHash => panic!("the hash"),
            Key::BadClone => u64::MAX.hash(state),
        }
    }
}

impl Clone for Key {
    fn clone(&self) -> Self {
        match self {
            Key::Good(number) => Key::Good(*number),
            Key::BadHash => Key::BadHash,
            Key::BadClone => panic!("the clone"),
        }
    }
}

#[test]
fn a_hash_that_panics_does_so_in_the_callers_hands_and_nothing_was_touched() {
    for topology in [Topology::partitioned(2, 1), Topology::per_worker(2)] {
        let engine = Engine::builder().topology(topology).handle(|_, _: &mut u64| ()).build().unwrap();
        let attempt = |act: &dyn Fn()| catch_unwind(AssertUnwindSafe(act)).is_err();
        assert!(attempt(&|| drop(engine.submit((Key::BadHash, 0)))));
        assert!(attempt(&|| drop(engine.try_submit((Key::BadHash, 0)))));
        assert!(attempt(&|| drop(engine.submit_batch([(Key::Good(1), 0), (Key::BadHash, 0)]))));
        assert!(attempt(&|| drop(engine.explain(&Key::BadHash))));
        assert!(attempt(&|| assert!(!engine.park(&Key::BadHash, "no"))));
        send(&engine, (0..100).map(|number| (Key::Good(number % 7), number)));
        assert!(engine.wait_quiet(DEADLINE));
        assert_balanced(&engine);
    }
}

#[test]
fn a_key_whose_clone_panics_costs_no_worker_and_wedges_no_lane() {
    let meeting = Arc::new(Barrier::new(3));
    let meeting_too = meeting.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .shutdown_grace(Duration::from_secs(1))
        .handle(move |_, meets: &mut bool| {
            if *meets {
                meeting_too.wait();
            }
        })
        .build()
        .unwrap();
    (0..4).for_each(|_| assert!(engine.submit((Key::BadClone, false)).is_ok()));
    // Whoever asks for the key gets the panic of its clone; the engine does not.
    let _ = catch_unwind(AssertUnwindSafe(|| engine.lanes_by_depth(3).len()));
    assert!(engine.wait_quiet(Duration::from_secs(5)), "the lane is wedged: {}", engine.snapshot().account);
    assert_balanced(&engine);
    let handle = engine.handle();
    within(Duration::from_secs(5), "both workers are there", move || {
        send(&handle, (0..2).map(|key| (Key::Good(key), true)));
        meeting.wait();
    });
}

/// A key whose copies panic when they are dropped.
#[derive(Debug)]
struct Sticky {
    number: u64,
    is_copy: bool,
}

impl Sticky {
    fn new(number: u64) -> Self {
        Sticky { number, is_copy: false }
    }
}

impl Hash for Sticky {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}

impl Clone for Sticky {
    fn clone(&self) -> Self {
        Sticky { number: self.number, is_copy: true }
    }
}

impl Drop for Sticky {
    fn drop(&mut self) {
        if self.is_copy && !std::thread::panicking() {
            panic!("the drop of a copy");
        }
    }
}

#[test]
fn a_key_whose_copies_panic_when_they_are_dropped_costs_no_worker_and_wedges_no_lane() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    // Nothing is known of the tempo yet, so the first turns of each worker have a copy of their key.
    let engine = Engine::<Sticky, u64>::builder()
        .topology(Topology::pool(2))
        .shutdown_grace(Duration::from_secs(1))
        .handle(move |context, number: &mut u64| witness_too.see(&context.key().number, *number))
        .build()
        .unwrap();
    send(&engine, (0..20).flat_map(|number| (0..5).map(move |key| (Sticky::new(key), number))));
    assert!(engine.wait_quiet(DEADLINE), "a lane is wedged: {}", engine.snapshot().account);
    witness.verify((0..5).map(|key| (key, 20)));
    assert_balanced(&engine);
}

/// A placement that panics when it is told to.
#[derive(Debug)]
struct Moody(Arc<AtomicBool>);

impl Placement<u64> for Moody {
    fn looks_at(&self) -> LooksAt {
        LooksAt::Key
    }
    fn place(&self, key: &u64, _: u64, among: &dyn Among) -> Option<usize> {
        assert!(*key != 3 || !self.0.load(Relaxed), "the placement");
        Some(*key as usize % among.len())
    }
}

#[test]
fn a_placement_that_panics_while_the_topology_changes_loses_nothing() {
    let (moody, witness) = (Arc::new(AtomicBool::new(false)), Witness::new());
    let witness_too = witness.clone();
    let topology = Topology::builder().dispatcher("x").worker("w", ["x"]).build();
    let engine = Engine::builder()
        .topology(topology.placed(Moody(moody.clone())))
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    assert!(engine.pause("x"));
    send(&engine, (0..20).flat_map(|number| (0..8).map(move |key| (key, number))));
    moody.store(true, Relaxed);
    engine.add_dispatcher("y", &["w"]).unwrap();
    let depths: Vec<usize> = engine.snapshot().dispatchers.iter().map(|d| d.depth).collect();
    assert_eq!(depths, [5 * 20, 3 * 20], "that of key 3 has stayed");
    assert!(
        catch_unwind(AssertUnwindSafe(|| drop(engine.submit((3, 20))))).is_err(),
        "in the submitter's hands"
    );
    assert!(engine.unpause("x"));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..8).map(|key| (key, 20)));
    assert_balanced(&engine);
}

#[test]
fn workers_survive_thousands_of_panics() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    // Thousands of messages on standard error help nobody; only the panics of this test are silenced.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<&str>() != Some(&"one of thousands") {
            usual(info);
        }
    }));
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 2))
        .retry(RetryPolicy { max_attempts: 2, base: Duration::ZERO, ..RetryPolicy::default() })
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            assert!(context.attempt() == 2 || !number.is_multiple_of(3), "one of thousands");
            attempt.done();
        })
        .build()
        .unwrap();
    send(&engine, (0..300).flat_map(|number| (0..30).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..30).map(|key| (key, 300)));
    assert_eq!(panics(&engine), 3_000);
    assert_balanced(&engine);
}
