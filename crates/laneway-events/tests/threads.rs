//! Threads and dispatchers: document 001's functional tests with their mistakes mended, and what its design could not do.

mod witness;

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc::channel,
    },
    thread,
    time::{Duration, Instant},
};

use laneway_events::{Events, Snapshot};
use witness::{DEADLINE, Witness, door, system};

/// The document's first test, with the 16 threads that its title promises and its text forgets (pitfall 001.8), and with exact counts,
/// contiguity and an overlap detector instead of a total.
#[test]
fn pitfall_001_8_sixteen_threads_on_four_dispatchers_lose_nothing_and_do_nothing_twice() {
    const EVENTS: u64 = 100_000;
    const PROCESSORS: u64 = 16;
    let rows: Vec<&[&str]> = [vec![["A", "B"].as_slice(); 8], vec![["C", "D"].as_slice(); 8]].concat();
    assert_eq!(rows.len(), 16);
    let events = system(&rows);
    let processors: Vec<_> = (0..PROCESSORS)
        .map(|number| {
            let witness = Arc::new(Witness::default());
            let sees = witness.clone();
            let dispatcher = ["A", "B", "C", "D"][number as usize % 4];
            let registration = events.anonymous().dispatcher(dispatcher);
            let processor = registration.handle(move |_, event: u64| sees.see(event, || ())).unwrap();
            (processor, witness)
        })
        .collect();
    thread::scope(|scope| {
        // Each of four posters has four processors to itself, so that the order is known.
        for quarter in processors.chunks(4) {
            scope.spawn(move || {
                for event in 0..EVENTS / PROCESSORS {
                    for (processor, _) in quarter {
                        while processor.post(event).is_err() {
                            thread::yield_now();
                        }
                    }
                }
            });
        }
    });
    assert!(events.wait_quiet(DEADLINE));
    for (processor, witness) in &processors {
        assert_eq!(witness.seen(), EVENTS / PROCESSORS, "{processor:?}");
    }
    let report = events.shutdown(DEADLINE);
    assert_eq!((report.account.accepted, report.account.done, report.account.failed), (EVENTS, EVENTS, 0));
}

/// The document's second test. With one processor one thread does everything, whatever the lock, so there are as many as threads; and a
/// handler waits a little, as those do for whom threads are shared out.
#[test]
fn pitfall_001_8_under_sustained_load_each_thread_has_its_share() {
    const THREADS: usize = 8;
    let events = system(&[["hot"].as_slice(); THREADS]);
    let going = Arc::new(AtomicBool::new(true));
    for _ in 0..THREADS {
        let going = going.clone();
        let handler = move |context: &mut laneway_events::Context<'_, ()>, (): ()| {
            thread::sleep(Duration::from_micros(200)); // paced: a handler that waits, as for an answer
            if going.load(SeqCst) {
                context.me().post(()).unwrap();
            }
        };
        let processor = events.anonymous().dispatcher("hot").handle(handler).unwrap();
        (0..4).for_each(|_| processor.post(()).unwrap());
    }
    // From when all are up: on a busy machine one may begin much later than the others, which says nothing about how they share.
    let begun = when_handled(&events, |counts| counts.iter().all(|count| *count > 0));
    let since = |counts: &[u64]| counts.iter().zip(&begun).map(|(now, then)| now - then).collect::<Vec<_>>();
    let counts = since(&when_handled(&events, |counts| since(counts).iter().sum::<u64>() >= 40_000));
    going.store(false, SeqCst);
    let mean = counts.iter().sum::<u64>() as f64 / THREADS as f64;
    let worst = counts.iter().map(|count| (*count as f64 - mean).abs() / mean).fold(0.0, f64::max);
    assert!(worst < 0.3, "{counts:?}");
}

/// How many events each thread has handled, once that is as it should be.
fn when_handled(events: &Events, is_enough: impl Fn(&[u64]) -> bool) -> Vec<u64> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let counts = handled(&events.snapshot());
        if is_enough(&counts) {
            return counts;
        }
        assert!(Instant::now() < deadline, "{counts:?}");
        thread::sleep(Duration::from_millis(5)); // paced: the load runs for a while
    }
}

fn handled(snapshot: &Snapshot) -> Vec<u64> {
    snapshot.threads.iter().map(|thread| thread.handled).collect()
}

/// Pitfall 001.1: with the lock held across the handler, a dispatcher runs one processor at a time, whatever the threads.
#[test]
fn pitfall_001_1_eight_threads_on_one_dispatcher_run_eight_processors_at_once() {
    let events = system(&[["one"].as_slice(); 8]);
    let together = Arc::new(Barrier::new(8));
    let (tell, told) = channel();
    for _ in 0..8 {
        let (together, tell) = (together.clone(), tell.clone());
        let handler = move |context: &mut laneway_events::Context<'_, ()>, (): ()| {
            // Passes only when all eight are here.
            together.wait();
            tell.send(context.thread()).unwrap();
        };
        events.anonymous().dispatcher("one").handle(handler).unwrap().post(()).unwrap();
    }
    let mut threads: Vec<_> = (0..8).map(|_| told.recv_timeout(DEADLINE).expect("all at once")).collect();
    threads.sort_unstable();
    assert_eq!(threads, [0, 1, 2, 3, 4, 5, 6, 7]);
}

/// The original's thread on [A, B] loops inside A while A is empty.
#[test]
fn a_thread_of_two_dispatchers_serves_the_second_while_the_first_is_idle() {
    let events = system(&[&["A", "B"]]);
    let (tell, told) = channel();
    let idle = events.processor("a").dispatcher("A").handle(|_, (): ()| ()).unwrap();
    let busy =
        events.processor("b").dispatcher("B").handle(move |_, event: u32| tell.send(event).unwrap()).unwrap();
    for event in 0..1_000 {
        busy.post(event).unwrap();
        assert_eq!(told.recv_timeout(DEADLINE), Ok(event));
    }
    idle.post(()).unwrap();
    assert!(events.wait_quiet(DEADLINE));
}

/// Pitfall 001.5: T1 holds A, T2 sleeps; T1 moves on to B; A has work and nobody looks.
#[test]
fn pitfall_001_5_work_beside_a_busy_thread_wakes_an_idle_one() {
    let events = system(&[&["A", "B"], &["A"]]);
    for _ in 0..100 {
        let (gate, porter) = door();
        let long = events.anonymous().dispatcher("B").handle(move |_, (): ()| gate.pass()).unwrap();
        long.post(()).unwrap();
        porter.wait_for_arrival();
        // The first thread is in B's handler; the second has to run what comes to A.
        let (tell, told) = channel();
        let quick =
            events.anonymous().dispatcher("A").handle(move |_, (): ()| tell.send(()).unwrap()).unwrap();
        quick.post(()).unwrap();
        told.recv_timeout(DEADLINE).expect("somebody sees to A");
        porter.open();
        let _ = (long.stop(DEADLINE), quick.stop(DEADLINE));
    }
}

/// Pitfall 001.3, and the original's ready queue of *all* processors: idle processors cost nothing, and idle threads do not look.
#[test]
fn pitfall_001_3_idle_processors_and_idle_threads_cost_nothing() {
    let events = system(&[[""].as_slice(); 4]);
    for _ in 0..50_000 {
        events.anonymous().handle(|_, (): ()| ()).unwrap();
    }
    let (tell, told) = channel();
    let one = events.processor("one").handle(move |_, (): ()| tell.send(()).unwrap()).unwrap();
    let asleep =
        |snapshot: &Snapshot| snapshot.threads.iter().all(|thread| thread.parks == thread.wake_ups + 1);
    let deadline = Instant::now() + DEADLINE;
    while !asleep(&events.snapshot()) {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    let before = events.snapshot();
    assert_eq!(before.processors, 50_001);
    assert_eq!(before.dispatchers[0].active_lanes, 0, "an idle processor is in no list");
    thread::sleep(Duration::from_millis(100)); // paced: time in which idle threads might look
    let after = events.snapshot();
    let polls = |snapshot: &Snapshot| snapshot.threads.iter().map(|thread| thread.polls).sum::<u64>();
    assert_eq!(polls(&after), polls(&before), "nobody looks while there is nothing");
    for _ in 0..100 {
        one.post(()).unwrap();
        told.recv_timeout(DEADLINE).unwrap();
    }
    assert!(events.wait_quiet(DEADLINE));
    let looks = polls(&events.snapshot()) - polls(&after);
    assert!(looks < 2_000, "{looks} looks for 100 events among 50,001 processors");
}

/// Under contention threads fail to take their dispatchers and, after a full failed cycle, sleep; the events are handled all the same. That a lock that
/// was had resets the backoff is shown in the engine (`worker/mod.rs`), where locks can be held at will.
#[test]
fn backoff_activates_under_contention() {
    // Two dispatchers each: such a thread looks at both after every turn.
    let events = system(&[["a", "b"].as_slice(); 16]);
    let (going, handled) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)));
    for number in 0..64 {
        let (going, handled) = (going.clone(), handled.clone());
        let handler = move |context: &mut laneway_events::Context<'_, ()>, (): ()| {
            handled.fetch_add(1, SeqCst);
            if going.load(SeqCst) {
                context.me().post(()).unwrap();
            }
        };
        let dispatcher = ["a", "b"][number % 2];
        events.anonymous().dispatcher(dispatcher).handle(handler).unwrap().post(()).unwrap();
    }
    let deadline = Instant::now() + DEADLINE;
    let contended = |snapshot: &Snapshot| {
        let failed: u64 = snapshot.threads.iter().map(|thread| thread.lock_failures).sum();
        let slept: u64 = snapshot.threads.iter().map(|thread| thread.backoff_sleeps).sum();
        failed > 0 && slept > 0
    };
    let mut snapshot = events.snapshot();
    while !contended(&snapshot) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10)); // paced: contention comes by itself
        snapshot = events.snapshot();
    }
    going.store(false, SeqCst);
    assert!(contended(&snapshot), "{:#?}", snapshot.threads);
    assert!(snapshot.lock_failure_ratio() > 0.0 && snapshot.backoff_ratio() > 0.0);
    assert!(events.wait_quiet(DEADLINE), "who slept has woken");
    let report = events.shutdown(DEADLINE);
    assert_eq!(report.account.done, handled.load(SeqCst));
}

#[test]
fn what_is_counted_adds_up() {
    let events = system(&[&["a", "b"], &["b"]]);
    for name in ["a", "b"] {
        let processor = events.processor(name).dispatcher(name).handle(|_, _: u32| ()).unwrap();
        (0..6_400).for_each(|event| processor.post(event).unwrap());
    }
    assert!(events.wait_quiet(DEADLINE));
    let snapshot = events.snapshot();
    assert_eq!(snapshot.account.done, 12_800);
    assert_eq!(handled(&snapshot).iter().sum::<u64>(), 12_800);
    for dispatcher in &snapshot.dispatchers {
        assert_eq!((dispatcher.dispatched, dispatcher.depth, dispatcher.in_flight), (6_400, 0, 0));
        assert_eq!(dispatcher.waiting.samples(), 100, "one in 64 is timed");
        assert!(dispatcher.total.p50() >= dispatcher.service.p50());
    }
    for thread in &snapshot.threads {
        assert!(thread.lock_attempts >= thread.polls && thread.lock_failures <= thread.lock_attempts);
        assert!((0.0..=1.0).contains(&thread.lock_failure_ratio()));
    }
}
