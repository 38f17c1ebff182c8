//! The account, and everything else that is counted.
//!
//! `accepted = done + failed + dropped + outstanding`, per dispatcher and in total, at every moment: a thread that does nothing but take
//! snapshots while others submit, fail, retry, drop and park must never see it off by one. And every number that documents 000 and 003 ask
//! for is there and says what happened.

mod witness;

use std::{
    sync::{
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use laneway::{
    Account, Bound, Builder, Engine, Flows, Handle, Kind, Message, Outcome, Overflow, Refusal, RetryPolicy,
    Snapshot, Topology,
};
use witness::{DEADLINE, Gate, OpensAtLast, send};

/// What must hold in any snapshot, and between two that follow each other.
fn check(before: &Snapshot, now: &Snapshot) {
    let mut sum = Account::default();
    for dispatcher in &now.dispatchers {
        let account = dispatcher.account;
        assert!(account.balances(), "{}: {account}", dispatcher.name);
        let located = dispatcher.depth + dispatcher.in_flight + dispatcher.parked_messages;
        assert_eq!(
            located as u64, account.outstanding,
            "{}: each outstanding message is in one place",
            dispatcher.name
        );
        assert!(dispatcher.ingress_depth <= dispatcher.depth);
        assert!(
            dispatcher.running_lanes + dispatcher.deferred_lanes + dispatcher.parked_lanes
                <= dispatcher.active_lanes
        );
        assert_eq!(account.dropped, dispatcher.drops.total());
        sum += account;
    }
    assert_eq!(sum, now.account);
    for (earlier, later) in before.dispatchers.iter().zip(&now.dispatchers) {
        let grows = |of: fn(&Account) -> u64| of(&earlier.account) <= of(&later.account);
        assert!(grows(|a| a.accepted) && grows(|a| a.done) && grows(|a| a.failed) && grows(|a| a.dropped));
        assert!(earlier.dispatched <= later.dispatched && earlier.turns <= later.turns);
    }
    assert!(before.at <= now.at);
}

/// Takes snapshots as fast as it can until told to stop, and one after that.
fn watch(handle: &Handle<u64, u64>, stop: &AtomicBool) {
    let (mut before, mut last) = (handle.snapshot(), false);
    while !last {
        last = stop.load(Relaxed);
        let now = handle.snapshot();
        check(&before, &now);
        before = now;
    }
}

/// Submits from three threads, under the eyes of a watcher.
fn under_watch(engine: &Engine<u64, u64>, submit: impl Fn(&Handle<u64, u64>, u64, u64) + Sync) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&engine.handle(), &stop));
        let producers: Vec<_> = (0..3_u64)
            .map(|producer| {
                let submit = &submit;
                scope.spawn(move || {
                    let handle = engine.handle();
                    (0..8_000).for_each(|number| submit(&handle, producer * 50 + number % 50, number));
                })
            })
            .collect();
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        let quiet = engine.wait_quiet(DEADLINE);
        stop.store(true, Relaxed);
        watcher.join().unwrap();
        assert!(quiet);
    });
    check(&engine.snapshot(), &engine.snapshot());
}

fn mixed_outcomes(topology: Topology<u64>) -> Builder<u64, u64> {
    Engine::builder()
        .topology(topology)
        .retry(RetryPolicy { max_attempts: 2, base: Duration::from_micros(5), ..RetryPolicy::default() })
        .handle(|context, number: &mut u64| match *number % 101 {
            7 => Outcome::Skip,
            13 => Outcome::Retry,
            17 if context.attempt() == 1 => Outcome::Retry,
            _ => Outcome::Done,
        })
}

#[test]
fn the_account_balances_at_every_moment_under_load() {
    for topology in [Topology::partitioned(4, 1), Topology::pool(3), Topology::per_worker(2)] {
        let engine = mixed_outcomes(topology).build().unwrap();
        under_watch(&engine, |handle, key, number| assert!(handle.submit((key, number)).is_ok()));
        let account = engine.snapshot().account;
        let failed = 3 * (0..8_000).filter(|number| matches!(number % 101, 7 | 13)).count() as u64;
        assert_eq!((account.accepted, account.failed, account.outstanding), (24_000, failed, 0));
    }
}

#[test]
fn the_account_balances_while_messages_are_dropped_and_refused() {
    for policy in [Overflow::DropOldest, Overflow::DropNewest, Overflow::Reject] {
        let engine = mixed_outcomes(Topology::partitioned(2, 1))
            .worker_queue_capacity(32)
            .overflow(policy)
            .build()
            .unwrap();
        under_watch(&engine, |handle, key, number| drop(handle.submit((key, number))));
        let snapshot = engine.snapshot();
        assert_eq!(
            snapshot.account.accepted + snapshot.refusals.total(),
            24_000,
            "{policy:?}: each has its answer"
        );
        assert_eq!(snapshot.account.outstanding, 0);
    }
}

/// A lane whose turn ends after its dispatcher has changed is for a moment at neither of the two.
#[test]
fn a_snapshot_misses_no_message_while_lanes_move() {
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .retry(RetryPolicy { max_attempts: 2, base: Duration::from_micros(100), ..RetryPolicy::default() })
        .handle(|context, _: &mut u64| if context.attempt() == 1 { Outcome::Retry } else { Outcome::Done })
        .build()
        .unwrap();
    let (told, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let changer = scope.spawn(|| {
            while !stop.load(Relaxed) {
                engine.add_dispatcher("third", &["partition-0/0"]).unwrap();
                engine.remove_dispatcher("third").unwrap();
            }
        });
        let watcher = scope.spawn(|| {
            let (mut looks, mut before) = (0_u64, 0);
            while !stop.load(Relaxed) {
                let least = told.load(SeqCst).max(before);
                let snapshot = engine.snapshot();
                before = snapshot.account.accepted;
                assert!(before >= least, "{least} were accepted before, {}", snapshot.account);
                for dispatcher in &snapshot.dispatchers {
                    let located = dispatcher.depth + dispatcher.in_flight + dispatcher.parked_messages;
                    assert_eq!(located as u64, dispatcher.account.outstanding, "{}", dispatcher.name);
                }
                looks += 1;
            }
            looks
        });
        for number in 0..30_000 {
            engine.submit((number % 200, number)).unwrap();
            told.store(number + 1, SeqCst);
            if watcher.is_finished() {
                break;
            }
        }
        let quiet = engine.wait_quiet(DEADLINE);
        stop.store(true, Relaxed);
        changer.join().unwrap();
        assert!(watcher.join().unwrap() > 0);
        assert!(quiet);
    });
    let account = engine.snapshot().account;
    assert_eq!((account.accepted, account.done, account.outstanding), (30_000, 30_000, 0));
}

#[test]
fn the_account_balances_while_an_operator_interferes() {
    let engine = mixed_outcomes(Topology::partitioned(2, 1)).build().unwrap();
    under_watch(&engine, |handle, key, number| {
        assert!(handle.submit((key, number)).is_ok());
        // Whether there is anything to park, skip or resume is left to chance.
        let _ = match number % 97 {
            11 => handle.park(&key, "for a moment"),
            23 => handle.skip_head(&key),
            _ => handle.resume(&key),
        };
    });
    for key in 0..150 {
        engine.resume(&key);
    }
    assert!(engine.wait_quiet(DEADLINE));
    let account = engine.snapshot().account;
    assert_eq!((account.accepted, account.outstanding), (24_000, 0));
}

#[test]
fn an_account_says_itself() {
    let account = Account { accepted: 10, done: 5, failed: 1, dropped: 2, outstanding: 2 };
    assert_eq!(account.to_string(), "accepted 10 = done 5 + failed 1 + dropped 2 + outstanding 2");
    assert!(account.balances() && !Account { done: 6, ..account }.balances());
}

// ── the documents' metrics ─────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn document_003s_metrics() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 2))
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0), (2, 0)]);
    gate.wait_arrived(2);
    send(&engine, [(1, 1), (1, 2), (2, 1), (3, 0)]);
    engine.explain(&1).unwrap(); // Looking at a lane brings everything that was accepted into its lane.
    let snapshot = engine.snapshot();
    let partition = &snapshot.dispatchers[0];
    assert_eq!(partition.account.accepted, 6, "tasksIn");
    assert_eq!(partition.enqueued_due_to_busy, 3, "enqueuedDueToBusy: key 3 was not busy");
    assert_eq!(
        partition.max_pending_depth, 3,
        "maxPendingDepthObserved: key 1 has one in flight and two behind it"
    );
    assert_eq!((partition.active_lanes, partition.running_lanes), (3, 2), "activeFamilies");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    let snapshot = engine.snapshot();
    let partition = &snapshot.dispatchers[0];
    assert_eq!((partition.dispatched, partition.account.done), (6, 6), "tasksDispatched, tasksCompleted");
    assert_eq!((partition.active_lanes, partition.max_pending_depth), (0, 3));
}

#[test]
fn document_000s_metrics() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::per_worker(2))
        .flows(Flows::default())
        .worker_queue_capacity(3)
        .latency_sampling(1)
        .overflow(Overflow::DropNewest)
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    let start = engine.snapshot();
    send(&engine, [(1, 0), (1, 1), (1, 2), (2, 0)]);
    gate.wait_arrived(2);
    assert!(engine.submit((1, 3)).is_ok());
    let snapshot = engine.snapshot();
    let mut depths: Vec<usize> = snapshot.dispatchers.iter().map(|worker| worker.depth).collect();
    depths.sort_unstable();
    assert_eq!(depths, [0, 2], "the depth of each worker");
    assert_eq!(
        snapshot.drops.count(Bound::Dispatcher, Overflow::DropNewest, Kind::Event),
        1,
        "drops by policy"
    );
    assert_eq!((snapshot.active_mappings, snapshot.late, snapshot.expired_flows), (2, 0, 0));
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    let end = engine.snapshot();
    let handled: u64 = end.workers.iter().map(|worker| worker.handled).sum();
    assert_eq!(handled, 4);
    let rates = end.rates_since(&start);
    assert_eq!(rates.len(), 2);
    let seconds = (end.at - start.at).as_secs_f64();
    let total: f64 = rates.iter().map(|(_, rate)| rate * seconds).sum();
    assert!((total - 4.0).abs() < 1e-6, "the rates of the workers: {rates:?}");
    let service = end.service();
    assert_eq!(service.samples(), 4, "handler latency");
    assert!(service.p50() <= service.p95() && service.p95() <= service.p99());
}

#[test]
fn every_refusal_has_a_counter() {
    let engine = Engine::<u64, u64>::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(2)
        .lane_capacity(1)
        .overflow(Overflow::Reject)
        .handle(|_, _| ())
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, [(1, 0), (2, 0)]);
    (0..3).for_each(|_| assert!(engine.submit((1, 1)).is_err()));
    (0..2).for_each(|_| assert!(engine.submit((3, 0)).is_err()));
    engine.close();
    assert!(engine.submit((4, 0)).is_err());
    let refusals = engine.snapshot().refusals;
    assert_eq!(refusals.count(Refusal::Full(Bound::Lane)), 3);
    assert_eq!(refusals.count(Refusal::Full(Bound::Dispatcher)), 2);
    assert_eq!((refusals.count(Refusal::Closed), refusals.total()), (1, 6));
    assert_eq!(refusals.count(Refusal::TimedOut(Bound::Lane)), 0);
}

// ── time ───────────────────────────────────────────────────────────────────────────────────────────────────────────

fn spin(time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

#[test]
fn latencies_are_what_they_were() {
    let work = Duration::from_millis(2);
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .latency_sampling(1)
        .handle(move |_, _: &mut u64| spin(work))
        .build()
        .unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, (0..20).map(|key| (key, 0)));
    assert!(engine.unpause("pool-0"));
    assert!(engine.wait_quiet(DEADLINE));
    let snapshot = engine.snapshot();
    let d = &snapshot.dispatchers[0];
    assert_eq!([d.waiting.samples(), d.service.samples(), d.total.samples()], [20; 3]);
    // Two significant digits, hence the slack of a percent.
    assert!(
        d.service.p50() >= work.mul_f64(0.99) && d.service.quantile(0.0) >= work.mul_f64(0.99),
        "{:?}",
        d.service.p50()
    );
    assert!(
        d.waiting.max() >= work.mul_f64(18.8),
        "the last one waited for nineteen others: {:?}",
        d.waiting.max()
    );
    assert!(d.total.max() >= work.mul_f64(19.8));
    assert!(d.total.p50() >= d.service.p50());
    assert!(d.service.max() < DEADLINE && d.total.max() < DEADLINE);
}

#[test]
fn one_message_in_n_is_timed() {
    for (one_in, least, most) in [(0, 0, 0), (1, 1_000, 1_000), (10, 100, 101)] {
        let engine = Engine::builder()
            .topology(Topology::pool(1))
            .latency_sampling(one_in)
            .handle(|_, _: &mut u64| ())
            .build()
            .unwrap();
        send(&engine, (0..1_000).map(|key| (key, 0)));
        assert!(engine.wait_quiet(DEADLINE));
        let samples = engine.snapshot().dispatchers[0].total.samples();
        assert!((least..=most).contains(&samples), "one in {one_in}: {samples}");
        assert_eq!(samples, engine.snapshot().service().samples());
    }
}

#[test]
fn a_retried_message_is_timed_from_its_acceptance() {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .latency_sampling(1)
        .handle(|context, _: &mut u64| {
            if context.attempt() == 1 {
                Outcome::RetryAfter(Duration::from_millis(20))
            } else {
                Outcome::Done
            }
        })
        .build()
        .unwrap();
    send(&engine, [(1, 0)]);
    assert!(engine.wait_quiet(DEADLINE));
    let total = engine.snapshot().dispatchers[0].total.max();
    assert!(total >= Duration::from_micros(19_800), "{total:?}");
}

// ── workers ────────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn workers_count_what_they_do() {
    let engine =
        Engine::builder().topology(Topology::partitioned(2, 2)).handle(|_, _: &mut u64| ()).build().unwrap();
    for _ in 0..20 {
        send(&engine, (0..500).map(|key| (key, 0)));
        assert!(engine.wait_quiet(DEADLINE));
    }
    let snapshot = engine.snapshot();
    let names: Vec<_> = snapshot.workers.iter().map(|worker| worker.name.as_str()).collect();
    assert_eq!(names, ["partition-0/0", "partition-0/1", "partition-1/0", "partition-1/1"]);
    witness::eventually("the last worker has counted its last turn", || {
        engine.snapshot().workers.iter().map(|worker| worker.handled).sum::<u64>() == 10_000
    });
    for worker in engine.snapshot().workers {
        assert!((0.0..=1.0).contains(&worker.lock_failure_ratio()), "{worker:?}");
        assert!((0.0..=1.0).contains(&worker.backoff_ratio()), "{worker:?}");
        assert!(
            worker.lock_attempts >= worker.lock_failures && worker.parks >= worker.wake_ups,
            "{worker:?}"
        );
    }
}

#[test]
fn an_idle_engine_sleeps() {
    let engine = Engine::<u64, u64>::builder().topology(Topology::pool(4)).handle(|_, _| ()).build().unwrap();
    send(&engine, (0..100).map(|key| (key, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    let polls = |engine: &Engine<u64, u64>| engine.snapshot().workers.iter().map(|w| w.polls).sum::<u64>();
    let parked = |engine: &Engine<u64, u64>| {
        engine.snapshot().workers.iter().all(|worker| worker.parks == worker.wake_ups + 1)
    };
    witness::eventually("all four are asleep", || parked(&engine));
    let (_nobody, never) = mpsc::channel::<()>();
    // One that was woken for the last of the work, and is about to run, still counts as asleep; so the first moment may not be quiet.
    witness::eventually("pitfall 001.3: nobody spins", || {
        let before = polls(&engine);
        assert!(never.recv_timeout(witness::A_MOMENT).is_err());
        polls(&engine) == before
    });
}

#[test]
fn a_snapshot_of_a_quiet_engine_is_exact() {
    let engine = mixed_outcomes(Topology::per_worker(3)).build().unwrap();
    send(&engine, (0..2_000).map(|number| (number % 40, number)));
    engine.submit(Message::new(1, 7)).unwrap();
    assert!(engine.wait_quiet(DEADLINE));
    let (first, second) = (engine.snapshot(), engine.snapshot());
    assert_eq!(first.account, second.account);
    assert_eq!(first.account.accepted, 2_001);
    assert!(first.dispatchers.iter().all(|d| d.depth + d.in_flight + d.active_lanes + d.ingress_depth == 0));
}

#[test]
fn a_dispatcher_counts_who_looks_and_who_sleeps() {
    let engine = Engine::builder().topology(Topology::pool(2)).handle(|_, _: &mut u8| ()).build().unwrap();
    for round in 0..100 {
        send(&engine, [(round, 0)]);
        assert!(engine.wait_quiet(DEADLINE));
    }
    let snapshot = engine.snapshot();
    let (dispatcher, workers) = (&snapshot.dispatchers[0], &snapshot.workers);
    let sum = |of: fn(&laneway::WorkerStats) -> u64| workers.iter().map(of).sum::<u64>();
    // Between two lines the workers may have gone on.
    assert!(dispatcher.lock_attempts > 0 && dispatcher.lock_attempts <= sum(|w| w.lock_attempts));
    assert!(dispatcher.lock_failures <= sum(|w| w.lock_failures) + 2);
    assert!(dispatcher.parks >= dispatcher.wake_ups && dispatcher.parks <= dispatcher.wake_ups + 2);
    assert!((0.0..=1.0).contains(&dispatcher.lock_failure_ratio()));
    drop(engine);
}
