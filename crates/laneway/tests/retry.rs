//! Failure: retries in place, patience, skipping, and parking, with the order of the lane held throughout.
//!
//! A failing head keeps its place. So the log of a lane is always its messages in order, each as often as it was tried; and what a
//! test compares is that log, whole.

mod witness;

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use laneway::{Batch, Engine, Exhausted, Failure, Message, Outcome, RetryPolicy, Topology};
use witness::{DEADLINE, Log, Witness, eventually, send, within};

type Tries = Arc<Log<(u64, u64, u32)>>;
type Failures = Arc<Log<(u64, u64, Failure)>>;

/// One worker, quick retries. Every call is noted as (key, number, attempt) before `decide` says what comes of it.
struct Fixture {
    engine: Engine<u64, u64>,
    tries: Tries,
    failures: Failures,
}

fn quick(max_attempts: u32, exhausted: Exhausted) -> RetryPolicy {
    RetryPolicy { max_attempts, base: Duration::from_millis(1), exhausted, ..RetryPolicy::default() }
}

fn fixture(retry: RetryPolicy, decide: impl Fn(u64, u64, u32) -> Outcome + Send + Sync + 'static) -> Fixture {
    let (tries, failures) = (Log::new(), Log::new());
    let (tries_too, failures_too) = (tries.clone(), failures.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(retry)
        .on_fail(move |message: Message<u64, u64>, failure| {
            failures_too.push((message.key, message.body, failure))
        })
        .handle(move |context, number: &mut u64| {
            tries_too.push((*context.key(), *number, context.attempt()));
            decide(*context.key(), *number, context.attempt())
        })
        .build()
        .unwrap();
    Fixture { engine, tries, failures }
}

impl Fixture {
    fn tries_of(&self, key: u64) -> Vec<(u64, u32)> {
        let tries = self.tries.entries().into_iter().filter(|(of, ..)| *of == key);
        tries.map(|(_, number, attempt)| (number, attempt)).collect()
    }

    fn quiet(&self) {
        assert!(self.engine.wait_quiet(DEADLINE), "{}", self.engine.snapshot().account);
    }
}

#[test]
fn a_failing_head_is_tried_again_before_its_successors() {
    let outcomes =
        [Outcome::Retry, Outcome::RetryAfter(Duration::from_millis(2)), Outcome::Failed("no".to_owned())];
    for failing in outcomes {
        let f = fixture(quick(5, Exhausted::Skip), move |_, number, attempt| {
            if number == 1 && attempt < 4 { failing.clone() } else { Outcome::Done }
        });
        send(&f.engine, (0..4).map(|number| (7, number)));
        f.quiet();
        assert_eq!(f.tries_of(7), [(0, 1), (1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (3, 1)]);
        let snapshot = f.engine.snapshot();
        assert_eq!((snapshot.account.done, snapshot.account.failed, f.failures.len()), (4, 0, 0));
        assert_eq!((snapshot.dispatchers[0].retries, snapshot.dispatchers[0].dispatched), (3, 7));
    }
}

#[test]
fn other_lanes_go_on_while_one_is_in_retry() {
    let release = Arc::new(AtomicBool::new(false));
    let released = release.clone();
    let f = fixture(RetryPolicy::default(), move |key, _, _| {
        if key == 1 && !released.load(Relaxed) {
            Outcome::Hold(Duration::from_millis(1))
        } else {
            Outcome::Done
        }
    });
    send(&f.engine, [(1, 0), (1, 1)]);
    send(&f.engine, (0..500).map(|number| (2, number)));
    eventually("key 2 is done", || f.tries_of(2).len() == 500);
    assert!(f.tries_of(1).iter().all(|(number, _)| *number == 0), "the successor waits");
    release.store(true, Relaxed);
    f.quiet();
    assert_eq!(f.engine.snapshot().account.done, 502);
}

#[test]
fn the_policy_spaces_the_attempts() {
    let at = Log::new();
    let at_too = at.clone();
    let policy = RetryPolicy {
        max_attempts: 4,
        base: Duration::from_millis(4),
        multiplier: 3.0,
        ..RetryPolicy::default()
    };
    let f = fixture(policy, move |_, _, _| {
        at_too.push(Instant::now());
        Outcome::Retry
    });
    send(&f.engine, [(1, 0)]);
    f.quiet();
    let at = at.entries();
    let gaps: Vec<Duration> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    for (gap, least) in gaps.iter().zip([4, 12, 36]) {
        assert!(*gap >= Duration::from_millis(least), "{gaps:?}");
    }
}

#[test]
fn an_explicit_delay_overrides_the_policy() {
    let policy = RetryPolicy {
        base: Duration::from_secs(3_600),
        max: Duration::from_secs(3_600),
        ..RetryPolicy::default()
    };
    let f = fixture(policy, |_, _, attempt| {
        if attempt < 3 { Outcome::RetryAfter(Duration::from_millis(1)) } else { Outcome::Done }
    });
    send(&f.engine, [(1, 0)]);
    f.quiet();
    assert_eq!(f.tries_of(1), [(0, 1), (0, 2), (0, 3)]);
}

#[test]
fn hold_costs_no_attempt() {
    let left = AtomicU64::new(10);
    let f = fixture(quick(2, Exhausted::Skip), move |_, number, _| {
        let holds = number == 0 && left.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok();
        if holds { Outcome::Hold(Duration::from_micros(100)) } else { Outcome::Done }
    });
    send(&f.engine, [(1, 0), (1, 1)]);
    f.quiet();
    let mut expected = vec![(0, 1); 11];
    expected.push((1, 1));
    assert_eq!(f.tries_of(1), expected);
    let snapshot = f.engine.snapshot();
    assert_eq!((snapshot.account.done, snapshot.dispatchers[0].retries), (2, 0), "nothing has failed");
}

#[test]
fn exhausted_skip_goes_on_with_the_next_and_says_what_happened() {
    let f = fixture(quick(3, Exhausted::Skip), |_, number, _| {
        if number == 1 { Outcome::Failed("no such account".to_owned()) } else { Outcome::Done }
    });
    send(&f.engine, (0..3).map(|number| (7, number)));
    f.quiet();
    assert_eq!(f.tries_of(7), [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)], "attempts begin at one again");
    let failure = Failure { attempts: 3, note: Some("no such account".to_owned()) };
    assert_eq!(f.failures.entries(), [(7, 1, failure)]);
    let account = f.engine.snapshot().account;
    assert_eq!((account.done, account.failed, account.outstanding), (2, 1, 0));
}

#[test]
fn an_error_of_the_handler_is_a_failure_with_its_text() {
    let failures = Log::new();
    let failures_too = failures.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(RetryPolicy::never())
        .on_fail(move |_: Message<u64, String>, failure: Failure| failures_too.push(failure))
        .handle(|_, body: &mut String| body.parse::<u64>().map(drop))
        .build()
        .unwrap();
    send(&engine, [(1, "12".to_owned()), (1, "twelve".to_owned())]);
    assert!(engine.wait_quiet(DEADLINE));
    let failure = Failure { attempts: 1, note: Some("invalid digit found in string".to_owned()) };
    assert_eq!(failures.entries(), [failure]);
    assert_eq!(engine.snapshot().account.done, 1);
}

/// Once it was kept for whatever failed next, in the same turn or stream, and said the wrong reason of another message.
#[test]
fn a_note_is_forgotten_with_the_message_that_it_was_about() {
    for topology in [Topology::partitioned(1, 1), Topology::pool(2)] {
        let failures = Log::new();
        let failures_too = failures.clone();
        let engine = Engine::builder()
            .topology(topology)
            .retry(RetryPolicy::never())
            .on_fail(move |message: Message<u64, u64>, failure: Failure| {
                failures_too.push((message.body, failure.note))
            })
            .handle(|context, number: &mut u64| {
                if number.is_multiple_of(2) {
                    context.note("all is well");
                    return Outcome::Done;
                }
                Outcome::Failed(format!("the {number}th"))
            })
            .build()
            .unwrap();
        // Of one key, and of many.
        for from in (0..2_000).step_by(100) {
            send(
                &engine,
                (from..from + 100).map(|number| (if number % 200 < 100 { 0 } else { number }, number)),
            );
            assert!(engine.wait_quiet(DEADLINE));
        }
        let told = failures.entries();
        assert_eq!(told.len(), 1_000);
        for (number, note) in told {
            assert_eq!(note, Some(format!("the {number}th")));
        }
    }
}

#[test]
fn a_note_of_the_handler_is_what_on_fail_is_told() {
    let failures = Log::new();
    let failures_too = failures.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .on_fail(move |message: Message<u64, u64>, failure: Failure| {
            failures_too.push((message.body, failure.note))
        })
        .handle(|context, number: &mut u64| {
            if *number == 0 {
                context.note("the ledger is closed");
            }
            Outcome::Skip
        })
        .build()
        .unwrap();
    send(&engine, [(1, 0), (1, 1)]);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(
        failures.entries(),
        [(0, Some("the ledger is closed".to_owned())), (1, None)],
        "and the next one has none"
    );
}

#[test]
fn the_body_keeps_what_an_attempt_has_written_into_it() {
    let log = Log::new();
    let log_too = log.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(quick(10, Exhausted::Skip))
        .handle(move |_, steps: &mut Vec<u32>| {
            steps.push(steps.len() as u32);
            log_too.push(steps.clone());
            if steps.len() < 4 { Outcome::Retry } else { Outcome::Done }
        })
        .build()
        .unwrap();
    engine.submit((1, Vec::new())).unwrap();
    assert_eq!(log.wait_len(4)[3], [0, 1, 2, 3]);
}

#[test]
fn skip_gives_up_at_once() {
    let f = fixture(
        quick(5, Exhausted::Skip),
        |_, number, _| if number == 0 { Outcome::Skip } else { Outcome::Done },
    );
    send(&f.engine, [(1, 0), (1, 1)]);
    f.quiet();
    assert_eq!(f.tries_of(1), [(0, 1), (1, 1)]);
    assert_eq!(f.failures.entries(), [(1, 0, Failure { attempts: 1, note: None })]);
}

// ── parking ────────────────────────────────────────────────────────────────────────────────────────────────────────

/// Fails message 1 in some way until told to be good.
fn troubled(retry: RetryPolicy, trouble: Outcome) -> (Fixture, Arc<AtomicBool>) {
    let good = Arc::new(AtomicBool::new(false));
    let good_too = good.clone();
    let f =
        fixture(
            retry,
            move |_, number, _| {
                if number == 1 && !good_too.load(Relaxed) { trouble.clone() } else { Outcome::Done }
            },
        );
    (f, good)
}

#[test]
fn park_puts_one_message_aside_and_the_lane_goes_on() {
    let (f, good) = troubled(RetryPolicy::default(), Outcome::Park);
    send(&f.engine, (0..4).map(|number| (7, number)));
    f.quiet();
    assert_eq!(f.tries_of(7), [(0, 1), (1, 1), (2, 1), (3, 1)]);
    let snapshot = f.engine.snapshot();
    assert_eq!((snapshot.account.done, snapshot.account.outstanding), (3, 1), "parked is outstanding");
    assert_eq!((snapshot.dispatchers[0].parked_messages, snapshot.dispatchers[0].active_lanes), (1, 1));
    good.store(true, Relaxed);
    assert!(f.engine.resume(&7));
    f.quiet();
    assert_eq!(f.tries_of(7)[4..], [(1, 1)]);
    assert_eq!(f.engine.snapshot().account.done, 4);
    assert!(!f.engine.resume(&7), "nothing is left to resume");
}

#[test]
fn messages_parked_alone_come_back_in_their_order_before_what_waits() {
    let good = Arc::new(AtomicBool::new(false));
    let good_too = good.clone();
    let f = fixture(RetryPolicy::default(), move |_, number, _| {
        if number < 3 && !good_too.load(Relaxed) { Outcome::Park } else { Outcome::Done }
    });
    send(&f.engine, (0..4).map(|number| (7, number)));
    f.quiet();
    f.engine.pause("pool-0");
    send(&f.engine, [(7, 4)]);
    good.store(true, Relaxed);
    assert!(f.engine.resume(&7));
    f.engine.unpause("pool-0");
    f.quiet();
    assert_eq!(f.tries_of(7)[4..], [(0, 1), (1, 1), (2, 1), (4, 1)]);
}

#[test]
fn park_lane_stops_in_front_of_the_message_and_resumes_from_it() {
    let (f, good) = troubled(RetryPolicy::default(), Outcome::ParkLane);
    send(&f.engine, (0..3).map(|number| (7, number)));
    send(&f.engine, [(8, 0)]);
    f.quiet();
    assert_eq!(f.tries_of(7), [(0, 1), (1, 1)]);
    assert_eq!(f.tries_of(8), [(0, 1)], "other lanes are not concerned");
    send(&f.engine, [(7, 3)]);
    f.quiet();
    let snapshot = f.engine.snapshot();
    assert_eq!(
        (snapshot.dispatchers[0].parked_lanes, snapshot.account.outstanding),
        (1, 3),
        "it collects what comes"
    );
    good.store(true, Relaxed);
    assert!(f.engine.resume(&7));
    f.quiet();
    assert_eq!(f.tries_of(7)[2..], [(1, 1), (2, 1), (3, 1)], "from the parked message, in order");
}

#[test]
fn exhausted_may_park_the_message_or_the_lane() {
    let (f, good) = troubled(quick(2, Exhausted::ParkMessage), Outcome::Retry);
    send(&f.engine, (0..3).map(|number| (7, number)));
    f.quiet();
    assert_eq!(f.tries_of(7), [(0, 1), (1, 1), (1, 2), (2, 1)]);
    good.store(true, Relaxed);
    assert!(f.engine.resume(&7));
    f.quiet();
    assert_eq!((f.engine.snapshot().account.done, f.failures.len()), (3, 0));

    let (f, good) = troubled(quick(2, Exhausted::ParkLane), Outcome::Retry);
    send(&f.engine, (0..3).map(|number| (7, number)));
    f.quiet();
    assert_eq!(f.tries_of(7), [(0, 1), (1, 1), (1, 2)]);
    good.store(true, Relaxed);
    assert!(f.engine.resume(&7));
    f.quiet();
    assert_eq!(f.tries_of(7)[3..], [(1, 1), (2, 1)], "with all of its attempts before it");
}

#[test]
fn an_operator_parks_resumes_and_skips() {
    let f = fixture(RetryPolicy::default(), |_, _, _| Outcome::Done);
    assert!(!f.engine.park(&7, "nothing there"), "there is no lane to park");
    f.engine.pause("pool-0");
    send(&f.engine, (0..4).map(|number| (7, number)));
    assert!(f.engine.park(&7, "maintenance"));
    assert!(f.engine.park(&7, "still"), "twice is once");
    f.engine.unpause("pool-0");
    f.quiet();
    assert!(f.tries_of(7).is_empty());
    assert!(f.engine.skip_head(&7));
    let failure = Failure { attempts: 0, note: Some("skipped by an operator".to_owned()) };
    assert_eq!(f.failures.entries(), [(7, 0, failure)]);
    assert!(f.tries_of(7).is_empty(), "it stays parked");
    assert!(f.engine.resume(&7));
    f.quiet();
    assert_eq!(f.tries_of(7), [(1, 1), (2, 1), (3, 1)]);
    assert!(!f.engine.skip_head(&7));
    assert_eq!(f.engine.snapshot().account.failed, 1);
}

#[test]
fn a_lane_is_parked_after_the_message_in_flight() {
    let gate = witness::Gate::closed();
    let (gate_too, tries) = (gate.clone(), Log::new());
    let tries_too = tries.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(move |_, number: &mut u64| {
            tries_too.push(*number);
            gate_too.pass();
        })
        .build()
        .unwrap();
    let _opens = witness::OpensAtLast(gate.clone());
    send(&engine, (0..3).map(|number| (7, number)));
    gate.wait_arrived(1);
    assert!(engine.park(&7, "after this one"));
    assert!(!engine.skip_head(&7), "the head is in flight");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(tries.entries(), [0]);
    assert_eq!(engine.snapshot().dispatchers[0].parked_lanes, 1);
    assert!(engine.resume(&7));
    assert_eq!(tries.wait_len(3), [0, 1, 2]);
}

#[test]
fn skipping_every_message_of_a_parked_lane_removes_it() {
    let f = fixture(RetryPolicy::default(), |_, _, _| Outcome::ParkLane);
    send(&f.engine, [(7, 0), (7, 1)]);
    f.quiet();
    assert!(f.engine.skip_head(&7) && f.engine.skip_head(&7) && !f.engine.skip_head(&7));
    let snapshot = f.engine.snapshot();
    let d = &snapshot.dispatchers[0];
    assert_eq!(
        (d.active_lanes, d.parked_lanes, snapshot.account.failed, snapshot.account.outstanding),
        (0, 0, 2, 0)
    );
}

#[test]
fn a_skipped_head_is_reported_with_the_attempts_that_were_made() {
    let f = fixture(quick(3, Exhausted::ParkLane), |_, _, _| Outcome::Failed("broken".to_owned()));
    send(&f.engine, [(7, 0)]);
    f.quiet();
    assert_eq!(f.tries_of(7).len(), 3);
    assert!(f.engine.skip_head(&7));
    assert_eq!(f.failures.entries()[0].2.attempts, 3, "zero would mean that it was never tried");
}

#[test]
fn resuming_a_lane_in_retry_tries_it_at_once() {
    let hour = Duration::from_secs(3_600);
    let f = fixture(RetryPolicy { base: hour, max: hour, ..RetryPolicy::default() }, |_, _, attempt| {
        if attempt == 1 { Outcome::Retry } else { Outcome::Done }
    });
    let tries = f.tries.clone();
    // The first retry would be in an hour; each resume makes it now, with attempts counted anew.
    send(&f.engine, [(7, 0)]);
    tries.wait_len(1);
    eventually("it is deferred", || f.engine.snapshot().dispatchers[0].deferred_lanes == 1);
    assert!(f.engine.resume(&7));
    assert_eq!(tries.wait_len(2), [(7, 0, 1), (7, 0, 1)]);
    eventually("it is deferred", || f.engine.snapshot().dispatchers[0].deferred_lanes == 1);
    assert!(f.engine.skip_head(&7), "a head in retry can be skipped");
    f.quiet();
    assert_eq!(f.engine.snapshot().account.failed, 1);
}

// ── batches ────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A batch handler that notes what it was given, and is decided by a function of it.
fn batches(
    retry: RetryPolicy,
    batch_max: usize,
    decide: impl Fn(&mut Batch<'_, u64, u64>) -> Outcome + Send + Sync + 'static,
) -> (Engine<u64, u64>, Arc<Log<Vec<u64>>>) {
    let calls = Log::new();
    let calls_too = calls.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(retry)
        .batch_max(batch_max)
        .handle_batch(move |_, batch: &mut Batch<'_, u64, u64>| {
            calls_too.push(batch.iter().copied().collect());
            decide(batch)
        })
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    (engine, calls)
}

fn run(engine: &Engine<u64, u64>) {
    assert!(engine.unpause("pool-0"));
    assert!(engine.wait_quiet(DEADLINE));
}

#[test]
fn a_batch_is_up_to_batch_max_consecutive_messages_of_one_key() {
    let (engine, calls) = batches(RetryPolicy::default(), 4, |_| Outcome::Done);
    send(&engine, (0..10).map(|number| (1, number)));
    send(&engine, [(2, 100)]);
    run(&engine);
    assert_eq!(calls.entries(), [vec![0, 1, 2, 3], vec![100], vec![4, 5, 6, 7], vec![8, 9]]);
    assert_eq!(engine.snapshot().account.done, 11);
}

#[test]
fn a_batch_that_completes_a_part_is_retried_with_the_rest() {
    let (engine, calls) = batches(quick(9, Exhausted::Skip), 8, |batch| {
        batch.complete(2);
        if batch.len() > 2 { Outcome::Retry } else { Outcome::Done }
    });
    send(&engine, (0..5).map(|number| (1, number)));
    run(&engine);
    assert_eq!(calls.entries(), [vec![0, 1, 2, 3, 4], vec![2, 3, 4], vec![4]]);
    let account = engine.snapshot().account;
    assert_eq!((account.done, account.failed), (5, 0));
}

#[test]
fn completed_messages_of_a_batch_survive_a_panic() {
    let (engine, calls) = batches(quick(2, Exhausted::Skip), 8, |batch| {
        if batch.iter().any(|number| *number == 2) {
            let before: usize = batch.iter().take_while(|number| **number < 2).count();
            batch.complete(before);
            panic!("at 2");
        }
        Outcome::Done
    });
    send(&engine, (0..4).map(|number| (1, number)));
    run(&engine);
    assert_eq!(calls.entries(), [vec![0, 1, 2, 3], vec![2, 3], vec![3]], "2 was tried twice, then skipped");
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.account.done, snapshot.account.failed, snapshot.dispatchers[0].panics), (3, 1, 2));
}

#[test]
fn a_batch_may_skip_or_park_its_first_uncompleted_message() {
    let (engine, calls) = batches(RetryPolicy::default(), 8, |batch| {
        let first = batch.iter().next().copied();
        match first {
            Some(0) => {
                batch.complete(1);
                Outcome::Skip
            }
            Some(2) => Outcome::Park,
            _ => Outcome::Done,
        }
    });
    send(&engine, (0..5).map(|number| (1, number)));
    run(&engine);
    assert_eq!(calls.entries(), [vec![0, 1, 2, 3, 4], vec![2, 3, 4], vec![3, 4]]);
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.account.done, snapshot.account.failed, snapshot.account.outstanding), (3, 1, 1));
    assert_eq!(snapshot.dispatchers[0].parked_messages, 1);
}

// ── many at once ───────────────────────────────────────────────────────────────────────────────────────────────────

/// Whether all workers of the pool can still be at work at once: a worker that was taken off the list of sleepers and not woken cannot.
fn all_workers_answer(engine: &Engine<u64, u64>, meeting: &Arc<Barrier>, workers: u64) {
    let handle = engine.handle();
    let meeting = meeting.clone();
    within(DEADLINE, "all workers meet", move || {
        send(&handle, (0..workers).map(|key| (u64::MAX - key, u64::MAX)));
        meeting.wait();
    });
}

#[test]
fn retries_under_load_keep_order_and_lose_no_worker() {
    let workers = 6;
    let (witness, meeting) = (Witness::new(), Arc::new(Barrier::new(workers as usize + 1)));
    let (witness_too, meeting_too) = (witness.clone(), meeting.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(workers as usize))
        .shutdown_grace(Duration::from_secs(1))
        .retry(RetryPolicy {
            max_attempts: 100,
            base: Duration::from_micros(50),
            multiplier: 1.0,
            ..RetryPolicy::default()
        })
        .handle(move |context, number: &mut u64| {
            if *number == u64::MAX {
                meeting_too.wait();
                return Outcome::Done;
            }
            let attempt = witness_too.enter(context.key(), *number);
            // A different pattern for each message: how often it fails, and how long it wants to wait.
            let dice = (context.key() * 31 + *number * 17) % 8;
            if u64::from(context.attempt()) <= dice {
                return Outcome::RetryAfter(Duration::from_micros(10 * (8 - dice)));
            }
            attempt.done();
            Outcome::Done
        })
        .build()
        .unwrap();
    for round in 0..40 {
        thread::scope(|scope| {
            for producer in 0..2_u64 {
                let handle = engine.handle();
                let messages =
                    (0..20).flat_map(move |n| (0..10).map(move |key| (producer * 10 + key, round * 20 + n)));
                scope.spawn(move || send(&handle, messages));
            }
        });
        assert!(engine.wait_quiet(DEADLINE));
        all_workers_answer(&engine, &meeting, workers);
    }
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..20).map(|key| (key, 800)));
}

#[test]
fn many_lanes_in_retry_come_back_when_they_are_due() {
    let f = fixture(quick(2, Exhausted::Skip), |key, _, attempt| {
        if attempt == 1 { Outcome::RetryAfter(Duration::from_micros(key % 37 * 100)) } else { Outcome::Done }
    });
    send(&f.engine, (0..2_000).map(|key| (key, 0)));
    f.quiet();
    let snapshot = f.engine.snapshot();
    assert_eq!(
        (snapshot.account.done, snapshot.dispatchers[0].retries, snapshot.dispatchers[0].deferred_lanes),
        (2_000, 2_000, 0)
    );
}

#[test]
fn a_message_that_is_told_to_wait_gives_its_place_in_the_pace_to_another() {
    let topology =
        Topology::builder().dispatcher_paced("hourly", 1.0 / 3_600.0).worker("w", ["hourly"]).build();
    let (done, was_done) = std::sync::mpsc::channel();
    let engine = Engine::builder()
        .topology(topology)
        .handle(move |context, _: &mut ()| match *context.key() {
            "held" => Outcome::Hold(Duration::from_secs(7_200)),
            _ => {
                done.send(()).unwrap();
                Outcome::Done
            }
        })
        .build()
        .unwrap();
    engine.submit(("held", ())).unwrap();
    engine.submit(("other", ())).unwrap();
    was_done.recv_timeout(DEADLINE).expect("not an hour later");
    let report = engine.shutdown(Duration::ZERO);
    assert_eq!((report.account.done, report.returned.len()), (1, 1));
}
