//! The end, by the numbered steps of `docs/design/shutdown.md`: close admission, drain until the deadline, wait for what is in flight, give back what
//! was not started. After each of them the account balances.

mod witness;

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use laneway::{
    ChangeError, Engine, Handle, Message, Outcome, Refusal, RetryPolicy, ShutdownReport, Topology,
};
use witness::{A_MOMENT, DEADLINE, Gate, Log, OpensAtLast, Witness, eventually, send, within};

/// What holds at every end.
fn check<K, M>(report: &ShutdownReport<K, M>) {
    assert!(report.account.balances(), "{}", report.account);
    let left = (report.returned.len() + report.still_running) as u64;
    assert_eq!(
        report.account.outstanding,
        left,
        "returned {}, still running {}",
        report.returned.len(),
        report.still_running
    );
}

fn gated(workers: usize, capacity: usize, grace: Duration) -> (Engine<u64, u64>, Arc<Gate>, Arc<Witness>) {
    let (gate, witness) = (Gate::closed(), Witness::new());
    let (gate_too, witness_too) = (gate.clone(), witness.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(workers))
        .worker_queue_capacity(capacity)
        .shutdown_grace(grace)
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            gate_too.pass();
            attempt.done();
        })
        .build()
        .unwrap();
    (engine, gate, witness)
}

/// Starts a shutdown on another thread; its report comes through the channel.
fn shut_down(engine: Engine<u64, u64>, drain: Duration) -> mpsc::Receiver<ShutdownReport<u64, u64>> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || send.send(engine.shutdown(drain)));
    receive
}

/// Waits until a shutdown has closed admission. The engine is full, so that until then the question changes nothing.
fn wait_closed(handle: &Handle<u64, u64>) {
    let ask = || handle.try_submit((u64::MAX, 0)).expect_err("there is no room").reason;
    eventually("admission is closed", || ask() == Refusal::Closed);
}

#[test]
fn step_1_closes_admission_for_submitters_and_handlers() {
    let (own, from_handler) = (Arc::new(OnceLock::<Handle<u64, u64>>::new()), Log::new());
    let (own_too, from_handler_too) = (own.clone(), from_handler.clone());
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(1)
        .handle(move |_, _: &mut u64| {
            gate_too.pass();
            from_handler_too.push(own_too.get().unwrap().submit((2, 0)).unwrap_err().reason);
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    assert!(own.set(engine.handle()).is_ok());
    let handle = engine.handle();
    send(&engine, [(1, 0)]);
    gate.wait_arrived(1);
    let report = shut_down(engine, DEADLINE);
    wait_closed(&handle);
    let refused = handle.submit(Message::new(3, 33)).unwrap_err();
    assert_eq!((refused.reason, refused.message.body), (Refusal::Closed, 33));
    assert_eq!(refused.to_string(), "refused: the engine is closed");
    let batch = handle.submit_batch([(3, 0), (3, 1), (4, 0)]);
    let reasons: Vec<_> = batch.refused.iter().map(|r| r.reason).collect();
    assert_eq!(reasons, [Refusal::Closed, Refusal::AfterRefused, Refusal::Closed]);
    gate.open();
    let report = report.recv_timeout(DEADLINE).unwrap();
    check(&report);
    assert_eq!(from_handler.entries(), [Refusal::Closed]);
    assert_eq!((report.account.accepted, report.account.done), (1, 1));
}

#[test]
fn close_alone_refuses_and_lets_the_rest_be_handled() {
    let (engine, gate, witness) = gated(1, 3, DEADLINE);
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..3).map(|number| (1, number)));
    engine.close();
    assert_eq!(engine.submit((1, 3)).unwrap_err().reason, Refusal::Closed);
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify([(1, 3)]);
}

#[test]
fn step_2_drains_everything_that_can_run() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 2))
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    send(&engine, (0..50).flat_map(|number| (0..200).map(move |key| (key, number))));
    let report = engine.shutdown(DEADLINE);
    check(&report);
    assert_eq!((report.account.done, report.returned.len()), (10_000, 0));
    witness.verify((0..200).map(|key| (key, 50)));
}

#[test]
fn step_2_waits_for_retries() {
    let attempts = Log::new();
    let attempts_too = attempts.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(RetryPolicy { base: Duration::from_millis(20), ..RetryPolicy::default() })
        .handle(move |context, _: &mut u64| {
            attempts_too.push(context.attempt());
            if context.attempt() < 3 { Outcome::Retry } else { Outcome::Done }
        })
        .build()
        .unwrap();
    send(&engine, [(1, 0)]);
    let report = engine.shutdown(DEADLINE);
    check(&report);
    assert_eq!((attempts.entries(), report.account.done), (vec![1, 2, 3], 1));
}

#[test]
fn step_2_does_not_wait_for_what_is_parked() {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(|context, number: &mut u64| match (*context.key(), *number) {
            (1, 0) => Outcome::ParkLane,
            (2, 0) => Outcome::Park,
            _ => Outcome::Done,
        })
        .build()
        .unwrap();
    send(&engine, (0..3).flat_map(|number| (1..4).map(move |key| (key, number))));
    let began = Instant::now();
    let report = engine.shutdown(DEADLINE);
    check(&report);
    assert!(began.elapsed() < DEADLINE / 2, "it would never end by itself");
    assert_eq!(per_key(report.returned), HashMap::from([(1, vec![0, 1, 2]), (2, vec![0])]));
    assert_eq!(report.account.done, 5);
}

#[test]
fn step_2_does_not_wait_for_what_a_paused_dispatcher_would_try_again() {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(|_, _: &mut u64| Outcome::RetryAfter(Duration::from_millis(1)))
        .build()
        .unwrap();
    send(&engine, [(1, 0)]);
    engine.pause("pool-0");
    assert!(engine.wait_quiet(DEADLINE), "its retry is not due as long as the pause lasts");
    assert_eq!(engine.snapshot().account.outstanding, 1);
    let report = within(DEADLINE, "the shutdown", move || engine.shutdown(Duration::MAX));
    check(&report);
    assert_eq!(report.returned.len(), 1);
}

#[test]
fn step_2_ends_at_the_deadline() {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(|_, _: &mut u64| Outcome::Hold(Duration::from_secs(3_600)))
        .build()
        .unwrap();
    send(&engine, (0..5).map(|number| (1, number)));
    let (began, drain) = (Instant::now(), Duration::from_millis(50));
    let report = engine.shutdown(drain);
    check(&report);
    assert!(began.elapsed() >= drain && began.elapsed() < DEADLINE);
    assert_eq!(per_key(report.returned), HashMap::from([(1, vec![0, 1, 2, 3, 4])]), "deferred and behind it");
}

#[test]
fn step_3_waits_for_what_is_in_flight_and_starts_nothing_new() {
    let (engine, gate, witness) = gated(2, 30, DEADLINE);
    let _opens = OpensAtLast(gate.clone());
    let handle = engine.handle();
    send(&engine, (0..10).flat_map(|number| (0..3).map(move |key| (key, number))));
    gate.wait_arrived(2);
    let report = shut_down(engine, Duration::ZERO);
    wait_closed(&handle);
    assert!(report.recv_timeout(A_MOMENT).is_err(), "two are in flight");
    gate.open();
    let report = report.recv_timeout(DEADLINE).expect("they have ended");
    check(&report);
    assert_eq!(
        (gate.arrived(), report.account.done, report.still_running),
        (2, 2, 0),
        "a turn gives way at once"
    );
    assert_eq!(report.returned.len(), 28);
    assert_eq!(witness.total(), 2);
}

#[test]
fn step_3_leaves_a_handler_behind_that_never_returns() {
    let (engine, gate, _) = gated(2, 5, Duration::from_millis(50));
    let _opens = OpensAtLast(gate.clone());
    let handle = engine.handle();
    send(&engine, [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0)]);
    gate.wait_arrived(2);
    let began = Instant::now();
    let report = engine.shutdown(Duration::ZERO);
    assert!(began.elapsed() < DEADLINE / 2);
    check(&report);
    assert_eq!((report.still_running, report.account.done), (2, 0));
    assert_eq!(per_key(report.returned), HashMap::from([(1, vec![1]), (2, vec![1]), (3, vec![0])]));
    gate.open();
    eventually("a later snapshot counts it as what it became", || handle.snapshot().account.done == 2);
    assert!(handle.snapshot().account.balances());
}

#[test]
fn step_4_counts_what_a_stuck_worker_had_taken_as_still_running() {
    let gates = [Gate::closed(), Gate::closed()];
    let gates_too = gates.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .shutdown_grace(Duration::from_millis(50))
        .handle(move |context, _: &mut u64| match *context.key() {
            1_000 => gates_too[0].pass(),
            2_000 => gates_too[1].pass(),
            _ => {}
        })
        .build()
        .unwrap();
    let _opens = gates.clone().map(OpensAtLast);
    // Handlers that were fast so far let a worker take many messages at once.
    send(&engine, (0..5_000).map(|number| (number % 100, number)));
    assert!(engine.wait_quiet(DEADLINE));
    send(&engine, [(1_000, 0)]);
    gates[0].wait_arrived(1);
    send(&engine, [(2_000, 0)]);
    send(&engine, (0..100).map(|key| (key, 0)));
    gates[0].open();
    gates[1].wait_arrived(1);
    let report = engine.shutdown(Duration::ZERO);
    check(&report);
    // One handler is stuck; what its worker had taken together with that message is in its hands, and cannot be taken from there.
    assert!(report.still_running >= 1);
    assert_eq!(report.still_running + report.returned.len(), 101);
}

#[test]
fn step_4_gives_back_what_was_not_started_in_order() {
    let engine =
        Engine::builder().topology(Topology::partitioned(4, 1)).handle(|_, _: &mut u64| ()).build().unwrap();
    (0..4).for_each(|n| assert!(engine.pause(&format!("partition-{n}"))));
    send(&engine, (0..20).flat_map(|number| (0..100).map(move |key| (key, number))));
    engine.submit(Message::finish(7, 20)).unwrap();
    let report = engine.shutdown(Duration::ZERO);
    check(&report);
    assert!(report.returned.iter().any(|message| *message == Message::finish(7, 20)), "as it was submitted");
    let returned = per_key(report.returned);
    for key in 0..100 {
        assert_eq!(returned[&key], (0..if key == 7 { 21 } else { 20 }).collect::<Vec<_>>(), "key {key}");
    }
}

#[test]
fn step_4_puts_a_retry_that_ends_after_the_stop_first() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(4)
        .handle(move |_, _: &mut u64| {
            gate_too.pass();
            Outcome::Retry
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    let handle = engine.handle();
    send(&engine, (0..4).map(|number| (1, number)));
    gate.wait_arrived(1);
    let report = shut_down(engine, Duration::ZERO);
    wait_closed(&handle);
    gate.open();
    let report = report.recv_timeout(DEADLINE).unwrap();
    check(&report);
    assert_eq!(per_key(report.returned), HashMap::from([(1, vec![0, 1, 2, 3])]));
}

#[test]
fn messages_put_aside_come_back_before_those_behind_them() {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(|_, number: &mut u64| if *number < 2 { Outcome::Park } else { Outcome::ParkLane })
        .build()
        .unwrap();
    send(&engine, (0..5).map(|number| (1, number)));
    let report = engine.shutdown(DEADLINE);
    check(&report);
    assert_eq!(per_key(report.returned), HashMap::from([(1, vec![0, 1, 2, 3, 4])]));
}

/// A handler that comes back at the end of the grace settles its turn while what is left is taken out.
#[test]
fn step_4_loses_nothing_of_a_turn_that_ends_meanwhile() {
    const MESSAGES: u64 = 2_000;
    for round in 0..1_000 {
        let handled = Log::new();
        let handled_too = handled.clone();
        let engine = Engine::builder()
            .topology(Topology::partitioned(8, 1))
            .shutdown_grace(Duration::ZERO)
            .handle(move |_, number: &mut u64| handled_too.push(*number))
            .build()
            .unwrap();
        engine.submit_batch((0..MESSAGES).map(|number| (number % 40, number)));
        (0..round % 50).for_each(|_| thread::yield_now());
        let report = engine.shutdown(Duration::ZERO);
        check(&report);
        let account = report.account;
        assert_eq!(account.accepted, MESSAGES, "round {round}: {account}");
        assert_eq!(account.done + (report.returned.len() + report.still_running) as u64, MESSAGES);
        // What is neither was in somebody's hands: handled soon afterwards, or not at all.
        let returned: HashSet<u64> = report.returned.into_iter().map(|message| message.body).collect();
        assert!(handled.entries().iter().all(|number| !returned.contains(number)), "round {round}");
    }
}

fn per_key(returned: Vec<Message<u64, u64>>) -> HashMap<u64, Vec<u64>> {
    let mut keys = HashMap::<u64, Vec<u64>>::new();
    returned.into_iter().for_each(|message| keys.entry(message.key).or_default().push(message.body));
    keys
}

#[test]
fn submit_against_shutdown_every_message_has_an_answer() {
    for round in 0..30 {
        let witness = Witness::new();
        let witness_too = witness.clone();
        let engine = Engine::builder()
            .topology(if round % 2 == 0 { Topology::partitioned(2, 1) } else { Topology::per_worker(2) })
            .worker_queue_capacity(64)
            .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
            .build()
            .unwrap();
        let started = Arc::new(AtomicU64::new(0));
        let producers: Vec<_> = (0..4_u64)
            .map(|producer| {
                let (handle, started) = (engine.handle(), started.clone());
                thread::spawn(move || produce_until_refused(&handle, producer, &started))
            })
            .collect();
        eventually("they are at it", || started.load(Relaxed) > 50 * (round + 1));
        let report = engine.shutdown(if round % 3 == 0 { Duration::ZERO } else { DEADLINE });
        check(&report);
        let accepted: Vec<u64> = producers.into_iter().map(|producer| producer.join().unwrap()).collect();
        assert_eq!(report.account.accepted, accepted.iter().sum::<u64>(), "accepted means accounted for");
        assert_eq!(report.account.done, witness.total());
        let mut returned = per_key(report.returned);
        for (key, accepted) in (0..).zip(accepted) {
            let done = witness.done(&key);
            let back = returned.remove(&key).unwrap_or_default();
            assert_eq!(
                back,
                (done..accepted).collect::<Vec<_>>(),
                "key {key}: handled to {done}, the rest given back"
            );
        }
        assert!(witness.violations().is_empty(), "{:?}", witness.violations());
    }
}

/// Submits until the engine is closed; gives back how many were accepted.
fn produce_until_refused(handle: &Handle<u64, u64>, key: u64, started: &AtomicU64) -> u64 {
    for number in 0.. {
        started.fetch_add(1, Relaxed);
        if let Err(refused) = handle.submit((key, number)) {
            assert_eq!((refused.reason, refused.message), (Refusal::Closed, Message::new(key, number)));
            assert_eq!(
                handle.submit((key, number)).unwrap_err().reason,
                Refusal::Closed,
                "closed stays closed"
            );
            return number;
        }
    }
    unreachable!("it is closed in the end")
}

#[test]
fn a_dropped_engine_stops_its_workers_and_drops_what_is_left() {
    /// Counts the drops of what was never handled.
    struct Body(Arc<AtomicU64>);
    impl Drop for Body {
        fn drop(&mut self) {
            self.0.fetch_add(1, Relaxed);
        }
    }
    let (dropped, workers) = (Arc::new(AtomicU64::new(0)), Arc::new(()));
    let kept_by_handler = workers.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .handle(move |_, _: &mut Body| drop(kept_by_handler.clone()))
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    (0..10).for_each(|key: u64| assert!(engine.submit((key, Body(dropped.clone()))).is_ok()));
    drop(engine);
    assert_eq!(dropped.load(Relaxed), 10);
    eventually("the workers and the handler are gone", || Arc::strong_count(&workers) == 1);
}

#[test]
fn handles_outlive_the_engine_and_say_so() {
    let engine = Engine::<u64, u64>::builder().topology(Topology::pool(1)).handle(|_, _| ()).build().unwrap();
    let handle = engine.handle();
    send(&engine, [(1, 0)]);
    assert!(engine.wait_quiet(DEADLINE));
    drop(engine);
    assert_eq!(handle.submit((1, 1)).unwrap_err().reason, Refusal::Closed);
    assert!(!handle.park(&1, "nothing") && !handle.resume(&1) && !handle.skip_head(&1));
    assert_eq!(handle.add_worker("late", &["pool-0"]), Err(ChangeError::Closed));
    assert_eq!(handle.snapshot().account.done, 1);
    assert!(handle.wait_quiet(DEADLINE));
    handle.close();
}

#[test]
fn a_handler_may_look_at_its_engine_while_it_drains() {
    let own = Arc::new(OnceLock::<Handle<u64, u64>>::new());
    let (own_too, closing) = (own.clone(), Arc::new(AtomicBool::new(false)));
    let closing_too = closing.clone();
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(1)
        .shutdown_grace(Duration::from_secs(1))
        .handle(move |context, _: &mut u64| {
            gate_too.pass();
            let own = own_too.get().unwrap();
            closing_too.store(true, Relaxed);
            // What an operator's tool would ask from inside: none of it may wait for the end that waits for us.
            assert!(own.explain(context.key()).is_some());
            assert!(!own.resume(&99) && !own.skip_head(&99));
            assert!(own.snapshot().account.balances());
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    assert!(own.set(engine.handle()).is_ok());
    let handle = engine.handle();
    send(&engine, [(1, 0)]);
    gate.wait_arrived(1);
    let report = shut_down(engine, Duration::from_secs(3));
    wait_closed(&handle);
    gate.open();
    let report = report.recv_timeout(DEADLINE).unwrap();
    check(&report);
    assert!(closing.load(Relaxed));
    assert_eq!(
        (report.account.done, report.still_running),
        (1, 0),
        "the handler waited for the shutdown, and it for the handler"
    );
}

#[test]
fn an_operator_may_resume_a_lane_while_the_engine_drains() {
    let good = Arc::new(AtomicBool::new(false));
    let good_too = good.clone();
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .worker_queue_capacity(2)
        .handle(move |context, _: &mut u64| {
            if *context.key() == 2 {
                gate_too.pass();
            }
            if *context.key() == 1 && !good_too.load(Relaxed) { Outcome::ParkLane } else { Outcome::Done }
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    let handle = engine.handle();
    send(&engine, [(1, 0), (2, 0)]);
    gate.wait_arrived(1);
    eventually("it is parked", || handle.snapshot().dispatchers[0].parked_lanes == 1);
    let report = shut_down(engine, Duration::from_secs(3));
    wait_closed(&handle);
    good.store(true, Relaxed);
    let resumed = {
        let handle = handle.clone();
        let (answer, resumed) = mpsc::channel();
        thread::spawn(move || answer.send(handle.resume(&1)));
        resumed.recv_timeout(Duration::from_secs(1))
    };
    gate.open();
    let report = report.recv_timeout(DEADLINE).unwrap();
    check(&report);
    assert_eq!((resumed, report.account.done), (Ok(true), 2));
}
