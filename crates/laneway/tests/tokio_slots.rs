//! Async handlers on tokio: a slot is a task that is used again, and a message in its hands can always come back.
//!
//! The same contract as on threads, and what only async code can do to it: futures that panic, that are dropped in the middle because their runtime goes,
//! that give their delivery away, and submitters that wait without blocking.

#![cfg(feature = "tokio")]

mod witness;

use std::{
    collections::{HashMap, VecDeque},
    future::pending,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    time::{Duration, Instant},
};

use laneway::{
    Admission, Bound, Builder, Delivery, Engine, Exhausted, Failure, Handle, Kind, Message, Outcome,
    Overflow, Refusal, Refused, RetryPolicy, Topology,
};
use tokio::{
    runtime::{Builder as RuntimeBuilder, Runtime},
    sync::{Barrier, Semaphore},
    time::timeout,
};
use witness::{A_MOMENT, DEADLINE, Log, Witness, eventually, send, within};

fn runtime() -> Runtime {
    RuntimeBuilder::new_multi_thread().worker_threads(2).enable_time().build().unwrap()
}

/// A builder for slots on this runtime.
fn slots(runtime: &Runtime, slots: usize) -> Builder<u64, u64> {
    Engine::builder().topology(Topology::pool(slots)).runtime(runtime.handle().clone())
}

/// Waits at a semaphore as a handler waits at a gate.
async fn pass(gate: &Semaphore) {
    let permit = timeout(DEADLINE, gate.acquire()).await.expect("nobody opened the gate").unwrap();
    permit.forget();
}

#[test]
fn five_thousand_messages_are_in_flight_at_once() {
    let runtime = runtime();
    let (witness, meeting) = (Witness::new(), Arc::new(Barrier::new(5_000)));
    let witness_too = witness.clone();
    let engine = slots(&runtime, 5_000)
        .worker_queue_capacity(20_000)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let (witness, meeting) = (witness_too.clone(), meeting.clone());
            async move {
                let attempt = witness.enter(delivery.key(), *delivery);
                // Nobody passes before all five thousand are here.
                timeout(DEADLINE, meeting.wait()).await.expect("all are in flight at once");
                attempt.done();
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..2).flat_map(|number| (0..5_000).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..5_000).map(|key| (key, 2)));
    assert_eq!(engine.snapshot().account.done, 10_000);
}

#[test]
fn order_holds_across_awaits() {
    for topology in [Topology::pool(64), Topology::partitioned(4, 8), Topology::per_worker(4)] {
        let runtime = runtime();
        let witness = Witness::new();
        let witness_too = witness.clone();
        let engine = Engine::builder()
            .topology(topology)
            .runtime(runtime.handle().clone())
            .handle_async(move |delivery: Delivery<u64, u64>| {
                let witness = witness_too.clone();
                async move {
                    let attempt = witness.enter(delivery.key(), *delivery);
                    for _ in 0..(delivery.key() + *delivery) % 4 {
                        tokio::task::yield_now().await;
                    }
                    attempt.done();
                }
            })
            .build()
            .unwrap();
        std::thread::scope(|scope| {
            for producer in 0..3_u64 {
                let handle = engine.handle();
                let messages =
                    (0..100).flat_map(move |number| (0..40).map(move |key| (producer * 40 + key, number)));
                scope.spawn(move || send(&handle, messages));
            }
        });
        assert!(engine.wait_quiet(DEADLINE));
        witness.verify((0..120).map(|key| (key, 100)));
    }
}

#[test]
fn a_runtime_with_one_thread_is_enough() {
    let runtime = RuntimeBuilder::new_current_thread().enable_time().build().unwrap();
    let witness = Witness::new();
    let witness_too = witness.clone();
    runtime.block_on(async {
        let engine = Engine::builder()
            .topology(Topology::pool(10))
            .handle_async(move |delivery: Delivery<u64, u64>| {
                let witness = witness_too.clone();
                async move {
                    tokio::task::yield_now().await;
                    witness.see(delivery.key(), *delivery);
                }
            })
            .build()
            .unwrap();
        for number in 0..50 {
            for key in 0..20 {
                engine.submit_async((key, number)).await.unwrap();
            }
        }
        let report = tokio::task::spawn_blocking(move || engine.shutdown(DEADLINE)).await.unwrap();
        assert_eq!((report.account.done, report.still_running, report.returned.len()), (1_000, 0, 0));
    });
    witness.verify((0..20).map(|key| (key, 50)));
}

fn one_thread() -> Runtime {
    RuntimeBuilder::new_multi_thread().worker_threads(1).enable_time().build().unwrap()
}

/// Slots that always find more would otherwise keep their thread for ever.
fn a_handler_that_never_waits_leaves_its_thread_to_others(topology: Topology<u64>) {
    let runtime = one_thread();
    let (enough, again) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::<Handle<u64, u64>>::new()));
    let (enough_too, again_too) = (enough.clone(), again.clone());
    let engine = Engine::builder()
        .topology(topology)
        .runtime(runtime.handle().clone())
        .handle_async(move |delivery: Delivery<u64, u64>| {
            if !enough_too.load(Relaxed) {
                let again = again_too.get().expect("set before the first message").try_submit((1, *delivery));
                assert_eq!(again.unwrap(), Admission::Accepted);
            }
            std::future::ready(())
        })
        .build()
        .unwrap();
    again.set(engine.handle()).unwrap();
    engine.submit((1, 1)).unwrap();
    eventually("the first messages have been handled", || engine.snapshot().account.done > 1_000);
    runtime.spawn(async move { enough.store(true, Relaxed) });
    assert!(engine.wait_quiet(DEADLINE), "nobody else came to the thread");
}

#[test]
fn slots_that_never_wait_leave_their_thread_to_others() {
    a_handler_that_never_waits_leaves_its_thread_to_others(Topology::pool(2));
}

/// It takes what comes by streams.
#[test]
fn a_slot_alone_that_never_waits_leaves_its_thread_to_others() {
    a_handler_that_never_waits_leaves_its_thread_to_others(Topology::pool(1));
}

/// It looks elsewhere after each turn.
#[test]
fn a_slot_of_two_dispatchers_that_never_waits_leaves_its_thread_to_others() {
    a_handler_that_never_waits_leaves_its_thread_to_others(Topology::assigned([["a", "b"]], |_: &u64| "a"));
}

/// Turns of many messages count as many.
#[test]
fn deep_lanes_leave_their_thread_to_others_as_often() {
    const MESSAGES: usize = 20_000;
    let runtime = one_thread();
    let (done, polls) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let done_too = done.clone();
    let engine = slots(&runtime, 4)
        .worker_queue_capacity(MESSAGES)
        .handle_async(move |_: Delivery<u64, u64>| {
            done_too.fetch_add(1, Relaxed);
            std::future::ready(())
        })
        .build()
        .unwrap();
    let (handle, polls_too) = (engine.handle(), polls.clone());
    let other = runtime.spawn(async move {
        // No slot runs before all are submitted.
        (0..MESSAGES as u64).for_each(|number| assert!(handle.try_submit((number % 8, number)).is_ok()));
        while done.load(Relaxed) < MESSAGES {
            polls_too.fetch_add(1, Relaxed);
            tokio::task::yield_now().await;
        }
    });
    runtime.block_on(async { timeout(DEADLINE, other).await.expect("in time").unwrap() });
    // A turn, or as many messages as fit into a poll, whichever is more, for each of four slots.
    let polls = polls.load(Relaxed);
    assert!(polls >= MESSAGES / (4 * 256), "{polls} polls beside {MESSAGES} messages");
}

/// An engine of two threads whose slots know that messages are quick, and a handler that holds its thread at key 0 until this many others were handled.
fn held_until(runtime: &Runtime, others: usize) -> (Engine<u64, u64>, Arc<AtomicBool>, mpsc::Receiver<bool>) {
    let (handled, holds) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(false)));
    let (open, gate) = mpsc::sync_channel(1);
    let (tell, told) = mpsc::channel();
    let (gate, holds_too) = (Mutex::new(gate), holds.clone());
    let engine = slots(runtime, 16)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            match (*delivery.key(), *delivery) {
                (0, 1) => {
                    holds_too.store(true, Relaxed);
                    tell.send(gate.lock().unwrap().recv_timeout(DEADLINE).is_ok()).unwrap();
                }
                (_, 1) if handled.fetch_add(1, Relaxed) + 1 == others => open.send(()).unwrap(),
                _ => {}
            }
            std::future::ready(())
        })
        .build()
        .unwrap();
    for _ in 0..50 {
        send(&engine, (0..100).map(|key| (key, 0)));
        assert!(engine.wait_quiet(DEADLINE));
    }
    (engine, holds, told)
}

/// A slot that was woken may be the next task of a thread that is held, where no other thread finds it.
#[test]
fn a_handler_that_holds_its_thread_holds_up_no_slot_of_another() {
    let runtime = runtime();
    let (engine, holds, told) = held_until(&runtime, 50);
    // The second has the first one's slot wake another before it is held.
    engine.submit_batch([(0, 1), (1, 0)]);
    eventually("a handler holds its thread", || holds.load(Relaxed));
    send(&engine, (1..=50).map(|key| (key, 1)));
    assert!(told.recv_timeout(2 * DEADLINE).unwrap(), "the others waited for it");
}

#[test]
fn a_submitter_that_holds_its_thread_holds_up_no_slot_of_another() {
    let runtime = runtime();
    let (engine, _, _told) = held_until(&runtime, usize::MAX);
    let before = engine.snapshot().account.done;
    let (handle, (open, gate)) = (engine.handle(), mpsc::sync_channel::<()>(1));
    let (submitted, holds) = mpsc::channel();
    let holder = runtime.spawn(async move {
        handle.try_submit((1, 0)).unwrap();
        submitted.send(()).unwrap();
        gate.recv_timeout(2 * DEADLINE).is_ok()
    });
    holds.recv_timeout(DEADLINE).unwrap();
    send(&engine, (2..=50).map(|key| (key, 0)));
    eventually("the others were handled", || engine.snapshot().account.done >= before + 49);
    open.send(()).unwrap();
    assert!(runtime.block_on(holder).unwrap());
}

/// To wake a slot costs more than to handle a message that takes no time.
#[test]
fn a_burst_of_quick_messages_wakes_few_slots() {
    const SLOTS: usize = 64;
    const BURSTS: u64 = 50;
    let runtime = one_thread();
    let engine =
        slots(&runtime, SLOTS).handle_async(|_: Delivery<u64, u64>| std::future::ready(())).build().unwrap();
    let burst = |number: u64| {
        let handle = engine.handle();
        // On the only thread: no slot runs before the last is submitted.
        runtime.block_on(runtime.spawn(async move {
            (0..1_000).for_each(|key| assert!(handle.try_submit((key, number)).is_ok()));
        }))
    };
    let wake_ups = || engine.snapshot().dispatchers[0].wake_ups;
    // Until all slots know that messages are quick.
    for number in 0..BURSTS {
        burst(number).unwrap();
        assert!(engine.wait_quiet(DEADLINE));
    }
    let before = wake_ups();
    for number in 0..BURSTS {
        burst(number).unwrap();
        assert!(engine.wait_quiet(DEADLINE));
    }
    let each = (wake_ups() - before) / BURSTS;
    assert!(each <= SLOTS as u64 / 2, "{each} of {SLOTS} slots were woken for each burst");
}

#[test]
fn a_slow_key_takes_nobody_hostage() {
    let runtime = runtime();
    let (witness, gate) = (Witness::new(), Arc::new(Semaphore::new(0)));
    let (witness_too, gate_too) = (witness.clone(), gate.clone());
    let engine = slots(&runtime, 2)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let (witness, gate) = (witness_too.clone(), gate_too.clone());
            async move {
                let attempt = witness.enter(delivery.key(), *delivery);
                if *delivery.key() == 0 {
                    pass(&gate).await;
                }
                attempt.done();
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..20).flat_map(|number| (0..100).map(move |key| (key, number))));
    eventually("all others are done", || witness.total() == 99 * 20);
    gate.add_permits(20);
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..100).map(|key| (key, 20)));
}

/// A slot that is alone knows that messages were quick so far, and nothing of the next one: it may wait.
#[test]
fn a_slot_that_waits_has_nothing_else_in_its_hands() {
    let runtime = runtime();
    let (witness, gate) = (Witness::new(), Arc::new(Semaphore::new(0)));
    let (witness_too, gate_too) = (witness.clone(), gate.clone());
    let engine = slots(&runtime, 1)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let (witness, gate) = (witness_too.clone(), gate_too.clone());
            async move {
                let attempt = witness.enter(delivery.key(), *delivery);
                if *delivery == 100 {
                    pass(&gate).await;
                }
                attempt.done();
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..100).flat_map(|number| (0..50).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    send(&engine, (0..50).map(|key| (key, 100)));
    eventually("one of them is with its handler", || engine.snapshot().dispatchers[0].in_flight > 0);
    assert_eq!(engine.snapshot().dispatchers[0].in_flight, 1);
    engine.add_worker("another", &["pool-0"]).unwrap();
    eventually("what waits was not in the hands of the first", || {
        engine.snapshot().dispatchers[0].in_flight == 2
    });
    gate.add_permits(50);
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..50).map(|key| (key, 101)));
}

// ── what a delivery says and does ──────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_delivery_says_what_is_known_and_its_body_survives_a_retry() {
    let runtime = runtime();
    let log = Log::new();
    let log_too = log.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .runtime(runtime.handle().clone())
        .retry(RetryPolicy { base: Duration::from_millis(1), ..RetryPolicy::default() })
        .handle_async(move |mut delivery: Delivery<u64, Vec<u32>>| {
            let log = log_too.clone();
            async move {
                let attempt = delivery.attempt();
                delivery.push(attempt);
                log.push((*delivery.key(), delivery.kind(), delivery.worker(), delivery.clone()));
                if attempt < 3 { Outcome::Retry } else { Outcome::Done }
            }
        })
        .build()
        .unwrap();
    engine.submit(Message::finish(7, Vec::new())).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(log.entries().last().unwrap(), &(7, Kind::Finish, 0, vec![1, 2, 3]));
    assert_eq!(engine.snapshot().dispatchers[0].retries, 2);
}

#[test]
fn retries_wait_for_their_time_and_hold_the_order() {
    let runtime = runtime();
    let tries = Log::new();
    let tries_too = tries.clone();
    let engine = slots(&runtime, 4)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let tries = tries_too.clone();
            async move {
                tries.push((*delivery, delivery.attempt(), Instant::now()));
                match (*delivery, delivery.attempt()) {
                    (1, 1) => Outcome::RetryAfter(Duration::from_millis(30)),
                    (1, 2) => Outcome::Failed("again".to_owned()),
                    _ => Outcome::Done,
                }
            }
        })
        .retry(RetryPolicy { base: Duration::from_millis(5), ..RetryPolicy::default() })
        .build()
        .unwrap();
    send(&engine, (0..3).map(|number| (7, number)));
    assert!(engine.wait_quiet(DEADLINE));
    let tries = tries.entries();
    let order: Vec<_> = tries.iter().map(|(number, attempt, _)| (*number, *attempt)).collect();
    assert_eq!(order, [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)]);
    assert!(tries[2].2 - tries[1].2 >= Duration::from_millis(30));
}

#[test]
fn errors_notes_and_parking_as_on_threads() {
    let runtime = runtime();
    let failures = Log::new();
    let failures_too = failures.clone();
    let engine = slots(&runtime, 2)
        .retry(RetryPolicy { max_attempts: 1, exhausted: Exhausted::Skip, ..RetryPolicy::default() })
        .on_fail(move |message: Message<u64, u64>, failure: Failure| {
            failures_too.push((message.body, failure))
        })
        .handle_async(|delivery: Delivery<u64, u64>| async move {
            match *delivery {
                0 => Outcome::from(Err::<(), _>("no such user")),
                1 => {
                    delivery.note("was noted");
                    Outcome::Skip
                }
                2 => Outcome::Park,
                3 => Outcome::ParkLane,
                _ => Outcome::Done,
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..5).map(|number| (7, number)));
    assert!(engine.wait_quiet(DEADLINE));
    let failure = |note: &str| Failure { attempts: 1, note: Some(note.to_owned()) };
    assert_eq!(failures.entries(), [(0, failure("no such user")), (1, failure("was noted"))]);
    let snapshot = engine.snapshot();
    let d = &snapshot.dispatchers[0];
    assert_eq!((d.parked_messages, d.parked_lanes, snapshot.account.outstanding), (1, 1, 3));
}

#[test]
fn a_panic_in_the_handler_or_its_future_fails_its_message() {
    let runtime = runtime();
    let (witness, failures) = (Witness::new(), Log::new());
    let (witness_too, failures_too) = (witness.clone(), failures.clone());
    let engine = slots(&runtime, 4)
        .retry(RetryPolicy::never())
        .on_fail(move |message: Message<u64, u64>, failure: Failure| {
            failures_too.push((message.body, failure.note))
        })
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let witness = witness_too.clone();
            if *delivery == 1 {
                witness.excuse(delivery.key(), 1);
                panic!("before the future");
            }
            async move {
                tokio::task::yield_now().await;
                if *delivery == 2 {
                    witness.excuse(delivery.key(), 2);
                    panic!("inside the future");
                }
                witness.see(delivery.key(), *delivery);
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..5).flat_map(|number| (0..10).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..10).map(|key| (key, 3)));
    let mut notes = HashMap::new();
    failures.entries().into_iter().for_each(|failed| *notes.entry(failed).or_insert(0) += 1);
    let note = |text: &str| Some(format!("panicked: {text}"));
    assert_eq!(
        notes,
        HashMap::from([((1, note("before the future")), 10), ((2, note("inside the future")), 10)])
    );
    assert_eq!((engine.snapshot().account.failed, engine.snapshot().dispatchers[0].panics), (20, 20));
}

#[test]
fn a_handler_may_keep_its_delivery() {
    let runtime = runtime();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let (kept_too, seen) = (kept.clone(), Log::new());
    let seen_too = seen.clone();
    let engine = slots(&runtime, 1)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let (kept, seen) = (kept_too.clone(), seen_too.clone());
            async move {
                let number = *delivery;
                seen.push(number);
                if number < 3 {
                    kept.lock().unwrap().push(delivery);
                }
                // Whoever keeps a message cannot have it tried again: it is the keeper's now.
                if number == 1 { Outcome::Retry } else { Outcome::Done }
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..4).map(|number| (7, number)));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(seen.entries(), [0, 1, 2, 3]);
    let account = engine.snapshot().account;
    assert_eq!((account.done, account.failed, account.outstanding), (3, 1, 0));
    // Letting go of them later puts nothing back.
    kept.lock().unwrap().clear();
    send(&engine, [(7, 4)]);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(seen.entries(), [0, 1, 2, 3, 4]);
}

// ── async submission ───────────────────────────────────────────────────────────────────────────────────────────────

/// An engine of one paused slot and room for one message.
fn full(runtime: &Runtime, overflow: Overflow) -> Engine<u64, u64> {
    let engine = slots(runtime, 1)
        .worker_queue_capacity(1)
        .overflow(overflow)
        .handle_async(|_| async {})
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, [(1, 0)]);
    engine
}

#[test]
fn submit_async_waits_for_room_without_blocking_the_thread() {
    let runtime = runtime();
    let engine = full(&runtime, Overflow::Block);
    runtime.block_on(async {
        let handle = engine.handle();
        let submission = tokio::spawn(async move { handle.submit_async((2, 0)).await.map_err(|r| r.reason) });
        assert!(
            timeout(A_MOMENT, async {
                while !submission.is_finished() {
                    tokio::task::yield_now().await
                }
            })
            .await
            .is_err()
        );
        engine.unpause("pool-0");
        let admission = timeout(DEADLINE, submission).await.expect("there is room").unwrap();
        assert_eq!(admission, Ok(Admission::Accepted));
    });
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 2);
}

#[test]
fn thousands_of_async_submitters_all_get_in() {
    let runtime = runtime();
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = slots(&runtime, 8)
        .worker_queue_capacity(16)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let witness = witness_too.clone();
            async move {
                let attempt = witness.enter(delivery.key(), *delivery);
                tokio::task::yield_now().await;
                attempt.done();
            }
        })
        .build()
        .unwrap();
    runtime.block_on(async {
        let submit = |key: u64, handle: Handle<u64, u64>| async move {
            for number in 0..5 {
                handle.submit_async((key, number)).await.unwrap();
            }
        };
        let tasks: Vec<_> = (0..2_000).map(|key| tokio::spawn(submit(key, engine.handle()))).collect();
        for task in tasks {
            timeout(DEADLINE, task).await.expect("each gets in").unwrap();
        }
    });
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..2_000).map(|key| (key, 5)));
}

#[test]
fn giving_up_a_submission_submits_nothing() {
    let runtime = runtime();
    let engine = full(&runtime, Overflow::Block);
    runtime.block_on(async {
        assert!(timeout(A_MOMENT, engine.submit_async((2, 0))).await.is_err(), "it waits, and is dropped");
    });
    engine.unpause("pool-0");
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.accepted, 1);
}

#[test]
fn submit_async_obeys_the_policies() {
    let runtime = runtime();
    let reason = |engine: &Engine<u64, u64>| {
        let submission =
            async { timeout(DEADLINE, engine.submit_async((2, 7))).await.expect("not for ever") };
        runtime.block_on(submission).map_err(|refused| (refused.reason, refused.message.body))
    };
    let limit = Duration::from_millis(20);
    let began = Instant::now();
    assert_eq!(
        reason(&full(&runtime, Overflow::BlockFor(limit))),
        Err((Refusal::TimedOut(Bound::Dispatcher), 7))
    );
    assert!(began.elapsed() >= limit);
    assert_eq!(reason(&full(&runtime, Overflow::Reject)), Err((Refusal::Full(Bound::Dispatcher), 7)));
    assert_eq!(reason(&full(&runtime, Overflow::DropNewest)), Ok(Admission::Dropped));
    assert_eq!(reason(&full(&runtime, Overflow::DropOldest)), Ok(Admission::Accepted));
    let closed = full(&runtime, Overflow::Block);
    closed.close();
    assert_eq!(reason(&closed), Err((Refusal::Closed, 7)));
}

/// Two dispatchers, "a" for even keys, with room for two messages each, in an engine with room for three, in which nothing runs. "a" is full.
fn two_bounds(at_engine: Overflow, at_dispatcher: Overflow) -> Engine<u64, u64> {
    let engine = Engine::builder()
        .topology(Topology::assigned(
            [["a"], ["b"]],
            |key: &u64| if key.is_multiple_of(2) { "a" } else { "b" },
        ))
        .ingress_capacity(3)
        .worker_queue_capacity(2)
        .overflow_at(Bound::Engine, at_engine)
        .overflow_at(Bound::Dispatcher, at_dispatcher)
        .handle_async(|_| async {})
        .build()
        .unwrap();
    ["a", "b"].into_iter().for_each(|name| assert!(engine.pause(name)));
    send(&engine, [(0, 0), (0, 1)]);
    engine
}

fn with_paused_time(test: impl Future<Output = ()>) {
    RuntimeBuilder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(test);
}

#[test]
fn submit_async_gives_up_at_a_bound_that_it_meets_second() {
    with_paused_time(async {
        let engine = two_bounds(Overflow::Block, Overflow::BlockFor(Duration::from_millis(50)));
        send(&engine, [(1, 0)]);
        let mut submission = pin!(engine.submit_async((0, 2)));
        assert!(timeout(A_MOMENT * 2, &mut submission).await.is_err(), "the engine lets it wait for ever");
        assert!(engine.skip_head(&1));
        let answer = timeout(DEADLINE, submission).await.expect("it has had its time");
        assert_eq!(answer.unwrap_err().reason, Refusal::TimedOut(Bound::Dispatcher));
    });
}

#[test]
fn submit_async_goes_on_waiting_at_a_bound_that_it_meets_second() {
    with_paused_time(async {
        let engine = two_bounds(Overflow::Block, Overflow::BlockFor(Duration::from_millis(50)));
        let mut submission = pin!(engine.submit_async((0, 2)));
        assert!(timeout(Duration::from_millis(10), &mut submission).await.is_err());
        send(&engine, [(1, 0)]);
        assert!(timeout(DEADLINE, &mut submission).await.is_err(), "the engine lets it wait for ever");
        assert!(engine.skip_head(&0));
        assert_eq!(submission.await.unwrap(), Admission::Accepted);
    });
}

#[test]
fn closing_ends_the_wait_of_an_async_submitter() {
    let runtime = runtime();
    let engine = full(&runtime, Overflow::Block);
    runtime.block_on(async {
        let handle = engine.handle();
        let submission = tokio::spawn(async move { handle.submit_async((2, 0)).await.map_err(|r| r.reason) });
        assert!(
            timeout(A_MOMENT, async {
                while !submission.is_finished() {
                    tokio::task::yield_now().await
                }
            })
            .await
            .is_err()
        );
        engine.close();
        assert_eq!(timeout(DEADLINE, submission).await.expect("it is told").unwrap(), Err(Refusal::Closed));
    });
}

#[test]
fn an_async_handler_that_would_wait_for_its_own_engine_is_refused() {
    let runtime = runtime();
    let (own, answers) = (Arc::new(std::sync::OnceLock::<Handle<u64, u64>>::new()), Log::new());
    let (own_too, answers_too) = (own.clone(), answers.clone());
    let engine = slots(&runtime, 1)
        .worker_queue_capacity(1)
        .handle_async(move |_: Delivery<u64, u64>| {
            let (own, answers) = (own_too.clone(), answers_too.clone());
            async move {
                tokio::task::yield_now().await;
                let own = own.get().unwrap();
                answers.push(own.submit_async((2, 0)).await.map_err(|refused| refused.reason));
                answers.push(own.submit((2, 0)).map_err(|refused| refused.reason));
            }
        })
        .build()
        .unwrap();
    assert!(own.set(engine.handle()).is_ok());
    send(&engine, [(1, 0)]);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(answers.entries(), [Err(Refusal::FromHandler(Bound::Dispatcher)); 2]);
}

// ── the end of the runtime and of the engine ───────────────────────────────────────────────────────────────────────

/// Something of the user's that submits when it is dropped, and notes how that was refused.
struct Parting {
    own: Arc<OnceLock<Handle<u64, Parting>>>,
    refusals: Arc<Log<Refusal>>,
    submits: bool,
}

impl Parting {
    fn new(of: &Parting, submits: bool) -> Self {
        Parting { own: of.own.clone(), refusals: of.refusals.clone(), submits }
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        if self.submits {
            let refused = self.own.get().unwrap().submit((9, Parting::new(self, false))).unwrap_err();
            self.refusals.push(refused.reason);
        }
    }
}

/// A future that lets go of its delivery when it is ready, and of the rest when it is dropped.
struct Holding {
    delivery: Option<Delivery<u64, Parting>>,
    outcome: Outcome,
    _rest: Parting,
}

impl Future for Holding {
    type Output = Outcome;
    fn poll(mut self: std::pin::Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<Outcome> {
        drop(self.delivery.take());
        std::task::Poll::Ready(self.outcome.clone())
    }
}

/// The message still has its place then, so a submission that waited would wait for itself.
#[test]
fn what_runs_when_an_async_handler_has_ended_is_refused_instead_of_waiting_for_its_own_place() {
    let (runtime, refusals) = (runtime(), Log::new());
    let first = Parting { own: Arc::default(), refusals: refusals.clone(), submits: false };
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .runtime(runtime.handle().clone())
        .worker_queue_capacity(1)
        .retry(RetryPolicy::never())
        .on_fail(|message: Message<u64, Parting>, _| drop(message))
        .handle_async(|delivery: Delivery<u64, Parting>| {
            let key = *delivery.key();
            let _rest = Parting::new(&delivery, key == 3);
            let outcome =
                if key == 1 { Outcome::Failed("as it was told to".to_owned()) } else { Outcome::Done };
            Holding { delivery: Some(delivery), outcome, _rest }
        })
        .build()
        .unwrap();
    assert!(first.own.set(engine.handle()).is_ok());
    for (key, what) in [(1, "on_fail"), (2, "the drop of a body"), (3, "the drop of a future")] {
        engine.submit((key, Parting::new(&first, key != 3))).unwrap_or_else(|_| panic!("{what}: no room"));
        let refusals = refusals.wait_len(key as usize);
        assert_eq!(refusals.last(), Some(&Refusal::FromHandler(Bound::Dispatcher)), "{what}");
    }
    assert!(engine.wait_quiet(DEADLINE));
}

#[test]
fn a_runtime_that_goes_gives_back_what_its_slots_had_in_hand() {
    let runtime = runtime();
    let started = Arc::new(AtomicUsize::new(0));
    let started_too = started.clone();
    let engine = slots(&runtime, 10)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let started = started_too.clone();
            async move {
                started.fetch_add(1, Relaxed);
                pending::<()>().await;
                drop(delivery);
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..3).flat_map(|number| (0..20).map(move |key| (key, number))));
    eventually("all slots are busy", || started.load(Relaxed) == 10);
    drop(runtime);
    let snapshot = engine.snapshot();
    assert_eq!(
        (snapshot.account.outstanding, snapshot.dispatchers[0].in_flight),
        (60, 0),
        "back in their lanes"
    );
    let began = Instant::now();
    let report = engine.shutdown(Duration::ZERO);
    assert!(began.elapsed() < DEADLINE / 2, "the slots are gone, nobody has to be waited for");
    assert_eq!((report.returned.len(), report.still_running, report.account.outstanding), (60, 0, 60));
    let mut returned = HashMap::<u64, Vec<u64>>::new();
    report
        .returned
        .into_iter()
        .for_each(|message| returned.entry(message.key).or_default().push(message.body));
    assert!(returned.values().all(|numbers| numbers == &[0, 1, 2]), "in order, heads first: {returned:?}");
}

/// There is nobody left who could make room.
#[test]
fn whoever_submits_when_the_runtime_has_gone_is_refused() {
    let runtime = runtime();
    let engine = slots(&runtime, 2)
        .worker_queue_capacity(1)
        .handle_async(|_: Delivery<u64, u64>| pending::<()>())
        .build()
        .unwrap();
    let handle = engine.handle();
    send(&engine, [(0, 0)]);
    let waiting = std::thread::spawn(move || handle.submit((1, 0)));
    eventually("it waits", || engine.snapshot().dispatchers[0].in_flight == 1);
    drop(runtime);
    let (handle, closed) = (engine.handle(), Some(Refusal::Closed));
    let late = within(DEADLINE, "a submission", move || handle.submit((2, 0)));
    assert_eq!(late.err().map(|refused| refused.reason), closed);
    let waited = within(DEADLINE, "the one that waits", move || waiting.join().unwrap());
    assert_eq!(waited.err().map(|refused| refused.reason), closed);
    assert_eq!(engine.shutdown(Duration::ZERO).returned.len(), 1);
}

#[test]
fn slots_whose_runtime_goes_before_their_first_breath_are_gone() {
    // A runtime that nobody drives: its tasks are never polled.
    let runtime = RuntimeBuilder::new_current_thread().enable_time().build().unwrap();
    let engine = slots(&runtime, 3)
        .shutdown_grace(Duration::from_secs(10))
        .handle_async(|_| async {})
        .build()
        .unwrap();
    send(&engine, [(1, 0), (1, 1)]);
    drop(runtime);
    let began = Instant::now();
    let report = engine.shutdown(Duration::ZERO);
    assert!(began.elapsed() < Duration::from_secs(5), "it waited for slots that never were");
    assert_eq!((report.returned.len(), report.still_running), (2, 0));
}

#[test]
fn a_shutdown_waits_for_the_futures_in_flight() {
    let runtime = runtime();
    let gate = Arc::new(Semaphore::new(0));
    let (gate_too, started) = (gate.clone(), Arc::new(AtomicUsize::new(0)));
    let started_too = started.clone();
    let engine = slots(&runtime, 3)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let (gate, started) = (gate_too.clone(), started_too.clone());
            async move {
                started.fetch_add(1, Relaxed);
                pass(&gate).await;
                drop(delivery);
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..2).flat_map(|number| (0..5).map(move |key| (key, number))));
    eventually("three are in flight", || started.load(Relaxed) == 3);
    let (answer, report) = std::sync::mpsc::channel();
    std::thread::spawn(move || answer.send(engine.shutdown(Duration::ZERO)));
    assert!(report.recv_timeout(A_MOMENT).is_err());
    gate.add_permits(100);
    let report = report.recv_timeout(DEADLINE).unwrap();
    assert_eq!((report.account.done, report.returned.len(), report.still_running), (3, 7, 0));
}

#[test]
fn slots_can_be_added_and_removed() {
    let runtime = runtime();
    let meeting = Arc::new(Barrier::new(3));
    let engine = slots(&runtime, 1)
        .handle_async(move |_: Delivery<u64, u64>| {
            let meeting = meeting.clone();
            async move {
                timeout(DEADLINE, meeting.wait()).await.expect("three slots at once");
            }
        })
        .build()
        .unwrap();
    engine.add_worker("second", &["pool-0"]).unwrap();
    engine.add_worker("third", &["pool-0"]).unwrap();
    send(&engine, (0..3).map(|key| (key, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 3);
    engine.remove_worker("second").unwrap();
    assert_eq!(engine.snapshot().workers.len(), 2);
}

/// Somebody who waits to be woken, and counts.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// A server that gives each request a second, in a task of its own, while nothing goes on: every task that has ended must be let go of.
#[test]
fn a_submission_that_gives_up_leaves_nothing_behind() {
    let engine = Engine::<u64, u64>::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(1)
        .handle(|_, _| ())
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, [(1, 0)]);
    let submit = |woken: &Arc<Woken>| {
        let handle = engine.handle();
        let mut submission = Box::pin(async move { handle.submit_async((1, 1)).await });
        for _ in 0..3 {
            let waker = Waker::from(woken.clone());
            assert!(submission.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        submission
    };
    let stays = Arc::new(Woken::default());
    let mut waiting = submit(&stays);
    for _ in 0..1_000 {
        let woken = Arc::new(Woken::default());
        let submission = submit(&woken);
        assert_eq!(Arc::strong_count(&woken), 2, "one waker, however often it was polled");
        drop(submission);
        assert_eq!((Arc::strong_count(&woken), woken.0.load(Relaxed)), (1, 0), "and none when it is gone");
    }
    assert_eq!(stays.0.load(Relaxed), 0, "nothing has happened that it should know of");
    assert!(engine.unpause("pool-0"));
    eventually("who still waits is woken", || stays.0.load(Relaxed) > 0);
    assert!(engine.wait_quiet(DEADLINE));
    let waker = Waker::from(stays.clone());
    let answer = waiting.as_mut().poll(&mut Context::from_waker(&waker));
    assert_eq!(answer, Poll::Ready(Ok(Admission::Accepted)));
    assert!(engine.wait_quiet(DEADLINE));
}

/// To block the only thread of a runtime would be to wait for ever: its slots would have to make room.
#[test]
fn a_batch_of_a_task_waits_without_blocking_the_thread() {
    let runtime = RuntimeBuilder::new_current_thread().enable_time().build().unwrap();
    let witness = Witness::new();
    let witness_too = witness.clone();
    runtime.block_on(async {
        let engine = Engine::builder()
            .topology(Topology::pool(2))
            .worker_queue_capacity(3)
            .handle_async(move |delivery: Delivery<u64, u64>| {
                let witness = witness_too.clone();
                async move {
                    tokio::task::yield_now().await;
                    witness.see(delivery.key(), *delivery);
                }
            })
            .build()
            .unwrap();
        let handle = engine.handle();
        let batch = (0..500).map(|number| (number % 5, number / 5));
        let report = tokio::spawn(async move { handle.submit_batch_async(batch).await }).await.unwrap();
        assert_eq!((report.accepted, report.dropped, report.refused.len()), (500, 0, 0));
        assert_eq!(engine.shutdown_async(DEADLINE).await.account.done, 500);
    });
    witness.verify((0..5).map(|key| (key, 100)));
}

#[test]
fn a_refusal_in_a_batch_of_a_task_holds_for_the_rest_of_its_key() {
    let runtime = runtime();
    let engine = full(&runtime, Overflow::BlockFor(Duration::from_millis(20)));
    let handle = engine.handle();
    let batch = [(2, 0), (2, 1), (3, 0), (2, 2), (3, 1)].into_iter().inspect(move |message| {
        if *message == (3, 0) {
            // By now the first was refused; from now on there is room.
            assert!(handle.skip_head(&1));
        }
    });
    let report =
        runtime.block_on(async { timeout(DEADLINE, engine.submit_batch_async(batch)).await.unwrap() });
    let reasons: Vec<_> = report
        .refused
        .iter()
        .map(|refused| (refused.message.key, refused.message.body, refused.reason))
        .collect();
    let timed_out = Refusal::TimedOut(Bound::Dispatcher);
    let after = Refusal::AfterRefused;
    assert_eq!(reasons, [(2, 0, timed_out), (2, 1, after), (2, 2, after), (3, 1, timed_out)]);
    assert_eq!(report.accepted, 1);
}

#[test]
fn giving_up_a_batch_leaves_what_came_before_the_one_that_waits() {
    let runtime = runtime();
    let engine = slots(&runtime, 1).worker_queue_capacity(3).handle_async(|_| async {}).build().unwrap();
    assert!(engine.pause("pool-0"));
    runtime.block_on(async {
        let batch = (0..10).map(|number| (1, number));
        assert!(
            timeout(A_MOMENT, engine.submit_batch_async(batch)).await.is_err(),
            "it waits, and is dropped"
        );
    });
    assert_eq!(engine.look(&1, 10, |message| message.body), [0, 1, 2]);
    assert_eq!(engine.snapshot().account.accepted, 3);
}

/// What it would cost to wake all that wait for each place grows with their square.
#[test]
fn a_place_wakes_few_of_those_who_wait() {
    const WAITING: u64 = 1_000;
    let engine = Engine::<u64, u64>::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(1)
        .handle(|_, _| ())
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, [(0, 0)]);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let poll = |submission: &mut Submitting| submission.as_mut().poll(&mut Context::from_waker(&waker));
    let mut waiting: VecDeque<Submitting> = (1..=WAITING)
        .map(|key| {
            let handle = engine.handle();
            let mut submission: Submitting = Box::pin(async move { handle.submit_async((key, 0)).await });
            assert!(poll(&mut submission).is_pending());
            submission
        })
        .collect();
    for key in 0..WAITING / 2 {
        let before = woken.0.load(Relaxed);
        assert!(engine.skip_head(&(2 * key)));
        eventually("somebody is told of the place", || woken.0.load(Relaxed) > before);
        // One for the place, and one whenever the worker goes to sleep beside it.
        let told = woken.0.load(Relaxed) - before;
        assert!(told < 10, "{told} of {} were woken for one place", waiting.len());
        // The one that has waited longest was told, and gives up. The next one is in its place.
        drop(waiting.pop_front());
        let mut next = waiting.pop_front().unwrap();
        assert_eq!(poll(&mut next), Poll::Ready(Ok(Admission::Accepted)), "it was told, or has looked");
    }
}

/// A submission that its task has let go of for the moment.
type Submitting = Pin<Box<dyn Future<Output = Result<Admission, Refused<u64, u64>>>>>;

/// A task that holds a submission, and waits for what another task has to submit before it looks at its own again.
#[test]
fn a_submission_that_nobody_polls_keeps_nobody_out_for_ever() {
    let runtime = runtime();
    let engine = full(&runtime, Overflow::Block);
    runtime.block_on(async {
        let mut held = pin!(engine.submit_async((2, 0)));
        assert!(timeout(A_MOMENT, &mut held).await.is_err());
        let handle = engine.handle();
        let mut other = tokio::spawn(async move { handle.submit_async((3, 0)).await.map_err(|r| r.reason) });
        assert!(timeout(A_MOMENT, &mut other).await.is_err());
        engine.unpause("pool-0");
        let answer = timeout(DEADLINE, other).await.expect("there is room, and the first does not want it");
        assert_eq!(answer.unwrap(), Ok(Admission::Accepted));
        assert_eq!(timeout(DEADLINE, held).await.expect("now it does").unwrap(), Admission::Accepted);
    });
}

/// Each message is polled for a few times, however many wait.
#[test]
fn thousands_who_wait_are_polled_a_few_times_each() {
    const TASKS: u64 = 2_000;
    const EACH: u64 = 5;
    let runtime = runtime();
    let engine = slots(&runtime, 8)
        .worker_queue_capacity(16)
        .handle_async(|_: Delivery<u64, u64>| tokio::task::yield_now())
        .build()
        .unwrap();
    let polls = Arc::new(AtomicUsize::new(0));
    runtime.block_on(async {
        let submit = |key: u64, handle: Handle<u64, u64>, polls: Arc<AtomicUsize>| async move {
            for number in 0..EACH {
                let mut submission = pin!(handle.submit_async((key, number)));
                let counted = std::future::poll_fn(|context| {
                    polls.fetch_add(1, Relaxed);
                    submission.as_mut().poll(context)
                });
                counted.await.unwrap();
            }
        };
        let tasks: Vec<_> =
            (0..TASKS).map(|key| tokio::spawn(submit(key, engine.handle(), polls.clone()))).collect();
        for task in tasks {
            timeout(DEADLINE, task).await.expect("each gets in").unwrap();
        }
    });
    assert!(engine.wait_quiet(DEADLINE));
    let polls = polls.load(Relaxed) as u64;
    assert!(polls <= 10 * TASKS * EACH, "{polls} polls for {} messages", TASKS * EACH);
}

// ── the end, on a runtime with one thread ──────────────────────────────────────────────────────────────────────────

/// What ran while the only thread of the runtime was asked to end the engine.
#[test]
fn an_engine_ends_on_the_only_thread_of_its_runtime() {
    let begun = Instant::now();
    let runtime = RuntimeBuilder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let waits = |delivery: Delivery<u64, u64>| async move {
            tokio::time::sleep(Duration::from_millis(*delivery)).await; // paced: at work when the end begins
        };
        let build = || Engine::builder().topology(Topology::pool(4)).handle_async(waits).build().unwrap();
        let engine = build();
        for key in 0..100 {
            engine.submit_async((key, 1)).await.unwrap();
        }
        let report = engine.shutdown_async(DEADLINE).await;
        assert_eq!((report.account.done, report.still_running, report.returned.len()), (100, 0, 0));
        let engine = build();
        (0..10).for_each(|key| assert!(engine.try_submit((key, 20)).is_ok()));
        tokio::task::yield_now().await;
        let report = engine.shutdown_async(Duration::ZERO).await;
        let account = report.account;
        assert_eq!(
            (account.done as usize + report.returned.len(), report.still_running),
            (10, 0),
            "{account}"
        );
        assert!(!report.returned.is_empty(), "no time to drain, but what runs is waited for");
        // Neither waits for slots that this very thread would have to run.
        let engine = build();
        (0..10).for_each(|key| assert!(engine.try_submit((key, 20)).is_ok()));
        tokio::task::yield_now().await;
        let given_up = tokio::time::timeout(Duration::from_millis(1), engine.shutdown_async(DEADLINE)).await;
        assert!(given_up.is_err());
        let engine = build();
        let handle = engine.handle();
        (0..10).for_each(|key| assert!(handle.try_submit((key, 20)).is_ok()));
        tokio::task::yield_now().await;
        drop(engine);
        assert!(handle.submit((1, 1)).is_err(), "it is closed");
    });
    assert!(begun.elapsed() < DEADLINE, "nobody has waited for a grace to be over");
}
