//! The protocol of `docs/design/ordering.md` under every interleaving of a few threads.
//!
//! Each model is the engine itself, with loom's locks, atomics and parking instead of std's (`src/sync.rs`), two or three threads, and a handful of
//! messages. Loom runs it again and again until it has taken every turning that a bounded number of preemptions allows. What is
//! checked: what was accepted is handled once and in order, or comes back; no key is in two pairs of hands; and nobody sleeps
//! beside work. The last shows as a deadlock, which loom reports: most models let two turns wait for each other, so that
//! both have to be taken, and all end with a shutdown, which waits for everyone.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p laneway --release --test loom_dispatcher
//! ```
//!
//! Two preemptions unless `LOOM_MAX_PREEMPTIONS` says otherwise; two find every race that we know of, three take some
//! twenty times as long.

#![cfg(loom)]

use std::{
    sync::{
        Arc, Mutex as StdMutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Wake, Waker},
    time::Duration,
};

use laneway::{
    Admission, Among, Bound, Builder, Cancel, Context, Engine, Flows, LooksAt, Message, Outcome, Overflow,
    Placement, Refusal, Topology,
    model::{Model, Submission},
};
use loom::{
    sync::{Condvar, Mutex, Notify, atomic::AtomicBool},
    thread,
};

/// The keys of all models.
const KEYS: usize = 2;
const A: u8 = 0;
const B: u8 = 1;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(2);
    builder.max_branches = 10_000;
    let (started, executions) = (std::time::Instant::now(), Arc::new(AtomicUsize::new(0)));
    let counted = executions.clone();
    builder.check(move || {
        counted.fetch_add(1, SeqCst);
        model();
    });
    eprintln!("{} executions in {:?}", executions.load(SeqCst), started.elapsed());
}

/// Sees every turn and every message. What it keeps in std's locks is of no concern to loom: nobody waits for them.
struct Witness {
    in_hands: [AtomicBool; KEYS],
    handled: StdMutex<Vec<(u8, u8)>>,
    dropped: StdMutex<Vec<(u8, u8)>>,
}

impl Witness {
    fn new() -> Arc<Self> {
        let in_hands = [AtomicBool::new(false), AtomicBool::new(false)];
        Arc::new(Witness { in_hands, handled: StdMutex::default(), dropped: StdMutex::default() })
    }

    /// Holds the keys of a turn in its hands: nobody else may.
    fn hold(&self, keys: &[u8], meanwhile: impl Fn(u8)) {
        let of_turn = |key: &u8| keys.contains(key);
        for key in [A, B].into_iter().filter(of_turn) {
            let held = self.in_hands[key as usize].swap(true, SeqCst);
            assert!(!held, "key {key} in two pairs of hands");
        }
        meanwhile(keys[0]);
        for key in [A, B].into_iter().filter(of_turn) {
            self.in_hands[key as usize].store(false, SeqCst);
        }
    }

    fn handled(&self) -> Vec<(u8, u8)> {
        self.handled.lock().unwrap().clone()
    }

    fn handled_of(&self, key: u8) -> Vec<u8> {
        self.handled().into_iter().filter(|(of, _)| *of == key).map(|(_, body)| body).collect()
    }

    fn dropped(&self) -> Vec<(u8, u8)> {
        self.dropped.lock().unwrap().clone()
    }
}

/// An engine that tells the witness of every message.
fn engine(witness: &Arc<Witness>, topology: Topology<u8>) -> Builder<u8, u8> {
    let (handles, drops) = (witness.clone(), witness.clone());
    Engine::builder()
        .topology(topology)
        .latency_sampling(0)
        .on_drop(move |message, _| drops.dropped.lock().unwrap().push((message.key, message.body)))
        .handle(move |context, body: &mut u8| handles.handled.lock().unwrap().push((*context.key(), *body)))
}

/// Starts the worker of a seat; `meanwhile` is called with the first key of every turn that it has in its hands.
fn hire(
    model: &Model,
    seat: usize,
    witness: &Arc<Witness>,
    meanwhile: impl Fn(u8) + 'static,
) -> thread::JoinHandle<()> {
    let (model, witness) = (model.clone(), witness.clone());
    thread::spawn(move || model.work(seat, |keys| witness.hold(keys, &meanwhile)))
}

/// Where the first turns of two keys wait for each other.
struct Meeting {
    present: Mutex<[bool; KEYS]>,
    complete: Condvar,
}

impl Meeting {
    fn new() -> Arc<Self> {
        Arc::new(Meeting { present: Mutex::new([false; KEYS]), complete: Condvar::new() })
    }

    fn attend(&self, key: u8) {
        let mut present = self.present.lock().unwrap();
        present[key as usize] = true;
        if present.iter().all(|present| *present) {
            self.complete.notify_all();
        }
        while !present.iter().all(|present| *present) {
            present = self.complete.wait(present).unwrap();
        }
    }
}

fn accept(model: &Model, message: impl Into<Message<u8, u8>>) {
    assert_eq!(model.handle.submit(message).unwrap(), Admission::Accepted);
}

/// Drains, and asserts that nothing is left and everything adds up.
fn drain(model: &Model, workers: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    let report = model.shut_down(true);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    model.audit();
    assert!(report.returned.is_empty() && report.still_running == 0, "{report:?}");
    assert!(report.account.balances() && report.account.outstanding == 0, "{}", report.account);
}

/// One producer, one worker that goes to sleep whenever there is nothing: pushing against lying down (pitfalls 003.1 to 003.3).
#[test]
fn a_worker_sleeps_through_no_message() {
    check(|| {
        let witness = Witness::new();
        let model = Model::new(engine(&witness, Topology::pool(1)));
        let worker = hire(&model, 0, &witness, |_| ());
        accept(&model, (A, 1));
        accept(&model, (B, 1));
        accept(&model, (A, 2));
        drain(&model, [worker]);
        assert_eq!(witness.handled_of(A), [1, 2]);
        assert_eq!(witness.handled_of(B), [1]);
    });
}

/// Two workers, two keys whose first turns wait for each other: whoever takes one lane has to see to the other (pitfall 001.5).
#[test]
fn two_workers_take_two_keys_at_once_and_each_in_order() {
    check(|| {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let model = Model::new(engine(&witness, Topology::pool(2)));
        let workers = [0, 1].map(|seat| {
            let meeting = meeting.clone();
            hire(&model, seat, &witness, move |key| meeting.attend(key))
        });
        accept(&model, (A, 1));
        accept(&model, (A, 2));
        accept(&model, (B, 1));
        drain(&model, workers);
        assert_eq!(witness.handled_of(A), [1, 2]);
        assert_eq!(witness.handled_of(B), [1]);
    });
}

/// The same where messages are known to be quick: who comes while a worker is rising wakes nobody, and that worker has to see to it.
#[test]
fn whoever_is_up_wakes_the_next_for_what_came_meanwhile() {
    check(|| {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let mut model = Model::new(engine(&witness, Topology::pool(2)));
        model.quick = true;
        let workers = [0, 1].map(|seat| {
            let meeting = meeting.clone();
            hire(&model, seat, &witness, move |key| meeting.attend(key))
        });
        accept(&model, (A, 1));
        // Who asks admits what is there: the first worker finds a lane and has no reason to look for more.
        model.handle.explain(&A);
        accept(&model, (B, 1));
        drain(&model, workers);
        assert_eq!(witness.handled().len(), 2);
    });
}

/// The same from one batch, which wakes one worker only: that has to wake the other.
#[test]
fn whoever_leaves_a_ready_lane_behind_wakes_somebody_for_it() {
    check(|| {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let model = Model::new(engine(&witness, Topology::pool(2)));
        let workers = [0, 1].map(|seat| {
            let meeting = meeting.clone();
            hire(&model, seat, &witness, move |key| meeting.attend(key))
        });
        let report = model.handle.submit_batch([(A, 1), (B, 1)]);
        assert_eq!(report.accepted, 2);
        drain(&model, workers);
        assert_eq!(witness.handled().len(), 2);
    });
}

/// Both workers serve both dispatchers. One that is woken for both finds work at one of them, and has to hand the other wake-up on.
#[test]
fn a_wake_up_at_another_dispatcher_is_handed_on() {
    check(|| {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let topology =
            Topology::assigned([["a", "b"], ["b", "a"]], |key: &u8| if *key == A { "a" } else { "b" });
        let model = Model::new(engine(&witness, topology));
        let workers = [0, 1].map(|seat| {
            let meeting = meeting.clone();
            hire(&model, seat, &witness, move |key| meeting.attend(key))
        });
        accept(&model, (A, 1));
        accept(&model, (B, 1));
        drain(&model, workers);
        assert_eq!(witness.handled().len(), 2);
    });
}

/// Whoever handles B submits A, which lives at the dispatcher that is looked at first: who waits until all is quiet must not believe that look.
#[test]
fn what_a_handler_submits_to_a_dispatcher_that_was_quiet_is_waited_for() {
    check(|| {
        let witness = Witness::new();
        let topology = Topology::assigned([["a"], ["b"]], |key: &u8| if *key == A { "a" } else { "b" });
        let model = Model::new(engine(&witness, topology));
        let emits = model.clone();
        let workers =
            [hire(&model, 0, &witness, |_| ()), hire(&model, 1, &witness, move |_| accept(&emits, (A, 1)))];
        accept(&model, (B, 1));
        assert!(model.handle.wait_quiet(std::time::Duration::MAX));
        assert_eq!(witness.handled().len(), 2, "both, once all is quiet");
        drain(&model, workers);
    });
}

/// A submitter that waits for room against the worker that makes it, at the bound of the dispatcher.
#[test]
fn a_blocked_submitter_does_not_sleep_beside_room() {
    check(|| {
        let witness = Witness::new();
        let model = Model::new(engine(&witness, Topology::pool(1)).worker_queue_capacity(1));
        let worker = hire(&model, 0, &witness, |_| ());
        (1..=3).for_each(|body| accept(&model, (A, body)));
        drain(&model, [worker]);
        assert_eq!(witness.handled_of(A), [1, 2, 3]);
    });
}

/// The same at the bound of the engine, which is counted without a lock.
#[test]
fn a_submitter_blocked_by_the_engine_does_not_sleep_beside_room() {
    check(|| {
        let witness = Witness::new();
        let model =
            Model::new(engine(&witness, Topology::pool(1)).worker_queue_capacity(2).ingress_capacity(1));
        let worker = hire(&model, 0, &witness, |_| ());
        (1..=3).for_each(|body| accept(&model, (A, body)));
        drain(&model, [worker]);
        assert_eq!(witness.handled_of(A), [1, 2, 3]);
    });
}

/// Room is announced when it is made, not only when the worker runs out of work: its second turn waits for the submitter here.
fn the_first_place_that_comes_free_is_announced(bounded: fn(Builder<u8, u8>) -> Builder<u8, u8>) {
    check(move || {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let model = Model::new(bounded(engine(&witness, Topology::pool(1))));
        let worker = {
            let meeting = meeting.clone();
            hire(&model, 0, &witness, move |key| {
                if key == B {
                    meeting.attend(B)
                }
            })
        };
        [(A, 1), (B, 1), (A, 2)].into_iter().for_each(|message| accept(&model, message));
        meeting.attend(A);
        drain(&model, [worker]);
        assert_eq!(witness.handled_of(A), [1, 2]);
    });
}

#[test]
fn the_first_place_at_a_dispatcher_is_announced() {
    the_first_place_that_comes_free_is_announced(|builder| builder.worker_queue_capacity(2));
}

#[test]
fn the_first_place_in_the_engine_is_announced() {
    the_first_place_that_comes_free_is_announced(|builder| {
        builder.worker_queue_capacity(4).ingress_capacity(2)
    });
}

/// Two submitters want the only place. Both get it, one after the other.
#[test]
fn two_blocked_submitters_both_get_in() {
    check(|| {
        let witness = Witness::new();
        let model = Model::new(engine(&witness, Topology::pool(1)).worker_queue_capacity(1));
        let worker = hire(&model, 0, &witness, |_| ());
        let other = {
            let model = model.clone();
            thread::spawn(move || accept(&model, (A, 1)))
        };
        accept(&model, (B, 1));
        other.join().unwrap();
        drain(&model, [worker]);
        assert_eq!(witness.handled().len(), 2);
    });
}

/// What a task is woken by.
struct Alarm(Notify);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

/// A submission that waits as a task does, and its task.
struct Waits {
    submission: Submission,
    alarm: Arc<Alarm>,
}

impl Waits {
    fn new(model: &Model, message: (u8, u8)) -> Self {
        Waits { submission: model.submission(message), alarm: Arc::new(Alarm(Notify::new())) }
    }

    /// One poll. Whether it is in.
    fn is_in(&mut self) -> bool {
        let answer = self.submission.poll(&Waker::from(self.alarm.clone()));
        answer.map(|answer| assert_eq!(answer, Ok(Admission::Accepted))).is_some()
    }

    /// Polls whenever it is woken, until it is in.
    fn get_in(&mut self) {
        while !self.is_in() {
            self.alarm.0.wait();
        }
    }
}

/// Only as many are woken as places were made. One that was, and gives up without having looked, has to pass it on.
#[test]
fn whoever_is_woken_and_gives_up_passes_it_on() {
    check(|| {
        let witness = Witness::new();
        let model = Model::new(engine(&witness, Topology::pool(1)).worker_queue_capacity(1));
        accept(&model, (A, 1));
        let gives_up = {
            let model = model.clone();
            thread::spawn(move || {
                let mut waits = Waits::new(&model, (A, 2));
                let is_in = waits.is_in();
                if !is_in {
                    waits.alarm.0.wait();
                }
                is_in
            })
        };
        let worker = hire(&model, 0, &witness, |_| ());
        Waits::new(&model, (B, 1)).get_in();
        let others = usize::from(gives_up.join().unwrap());
        drain(&model, [worker]);
        assert_eq!(witness.handled().len(), 2 + others);
    });
}

/// The same, given up at any time: while it waits, or just as it is woken.
#[test]
fn whoever_gives_up_while_it_is_woken_takes_no_wake_up_with_it() {
    check(|| {
        let witness = Witness::new();
        let model = Model::new(engine(&witness, Topology::pool(1)).worker_queue_capacity(1));
        accept(&model, (A, 1));
        let mut gives_up = Waits::new(&model, (A, 2));
        assert!(!gives_up.is_in());
        let mut stays = Waits::new(&model, (B, 1));
        assert!(!stays.is_in());
        let worker = hire(&model, 0, &witness, |_| ());
        let dropped = thread::spawn(move || drop(gives_up));
        stays.get_in();
        dropped.join().unwrap();
        drain(&model, [worker]);
        assert_eq!(witness.handled(), [(A, 1), (B, 1)]);
    });
}

/// A task and a thread, of which the thread may be cancelled at any time.
#[test]
fn whoever_is_cancelled_leaves_its_place_to_others() {
    check(|| {
        let witness = Witness::new();
        let model = Model::new(engine(&witness, Topology::pool(1)).worker_queue_capacity(1));
        accept(&model, (A, 1));
        let cancel = Cancel::new();
        let submitter = {
            let (model, cancel) = (model.clone(), cancel.clone());
            thread::spawn(move || match model.handle.submit_unless((A, 2), &cancel) {
                Ok(_) => 1,
                Err(refused) => {
                    assert_eq!(refused.reason, Refusal::Cancelled);
                    0
                }
            })
        };
        let worker = hire(&model, 0, &witness, |_| ());
        let mut waits = Waits::new(&model, (B, 1));
        let is_in = waits.is_in();
        cancel.cancel();
        if !is_in {
            waits.alarm.0.wait();
            waits.get_in();
        }
        let others = submitter.join().unwrap();
        drain(&model, [worker]);
        assert_eq!(witness.handled().len(), 2 + others);
    });
}

/// A place at the dispatcher comes to one whose lane has become full meanwhile: it is of use to the next, and nothing else will happen until that has it.
#[test]
fn whoever_is_woken_and_finds_another_bound_full_passes_it_on() {
    const C: u8 = 2;
    const D: u8 = 3;
    check(|| {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let bounded = engine(&witness, Topology::pool(1)).worker_queue_capacity(2).lane_capacity(1);
        let model = Model::new(bounded);
        accept(&model, (A, 1));
        accept(&model, (B, 1));
        let [mut first, mut second, mut third] =
            [(C, 1), (C, 2), (D, 1)].map(|message| Waits::new(&model, message));
        assert!(!first.is_in() && !second.is_in() && !third.is_in());
        let worker = {
            let meeting = meeting.clone();
            hire(&model, 0, &witness, move |key| {
                if key == C {
                    meeting.attend(A)
                }
            })
        };
        first.alarm.0.wait();
        first.get_in();
        second.alarm.0.wait();
        assert!(!second.is_in(), "the lane of its key has a message, which waits for us");
        third.alarm.0.wait();
        third.get_in();
        meeting.attend(B);
        second.alarm.0.wait();
        second.get_in();
        drain(&model, [worker]);
        assert_eq!(witness.handled_of(C), [1, 2]);
    });
}

/// A submitter that waits for room when the engine closes is refused, and has its message back.
#[test]
fn a_blocked_submitter_is_refused_at_the_end() {
    check(|| {
        let witness = Witness::new();
        let model = Model::new(engine(&witness, Topology::pool(1)).worker_queue_capacity(1));
        accept(&model, (A, 1));
        let blocked = {
            let model = model.clone();
            thread::spawn(move || {
                let refused = model.handle.submit((A, 2)).unwrap_err();
                assert_eq!((refused.reason, refused.message.body), (Refusal::Closed, 2));
            })
        };
        model.handle.close();
        blocked.join().unwrap();
    });
}

/// Submitting against a shutdown that does not wait: what was accepted is handled or given back, in order; the rest is refused.
#[test]
fn nothing_is_lost_between_submit_and_shutdown() {
    check(|| {
        let witness = Witness::new();
        let model = Model::new(engine(&witness, Topology::pool(1)));
        let worker = hire(&model, 0, &witness, |_| ());
        let submitter = {
            let model = model.clone();
            thread::spawn(move || {
                let accepted = (1..=3).take_while(|body| model.handle.submit((A, *body)).is_ok());
                accepted.collect::<Vec<u8>>()
            })
        };
        let report = model.shut_down(false);
        let accepted = submitter.join().unwrap();
        worker.join().unwrap();
        let returned = report.returned.iter().map(|message| message.body);
        let seen: Vec<u8> = witness.handled_of(A).into_iter().chain(returned).collect();
        assert_eq!(seen, accepted);
        assert_eq!(report.account.outstanding, report.returned.len() as u64);
        assert_eq!(report.still_running, 0);
    });
}

/// Starts the workers of the first two seats. The second turn that they take waits for whoever attends for `B`.
fn hire_two_that_wait(
    model: &Model,
    witness: &Arc<Witness>,
    meeting: &Arc<Meeting>,
) -> [thread::JoinHandle<()>; 2] {
    let turns = Arc::new(AtomicUsize::new(0));
    [0, 1].map(|seat| {
        let (meeting, turns) = (meeting.clone(), turns.clone());
        hire(model, seat, witness, move |_| {
            if turns.fetch_add(1, SeqCst) == 1 {
                meeting.attend(A);
            }
        })
    })
}

/// Placement by load: the mapping of a key stays until its last message is settled, or the next one would be placed elsewhere and
/// run beside that (pitfalls 000.1 and 000.2).
#[test]
fn a_key_is_never_on_two_dispatchers() {
    check(|| {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let model = Model::new(engine(&witness, Topology::per_worker(2)));
        (1..=2).for_each(|body| accept(&model, (A, body)));
        let workers = hire_two_that_wait(&model, &witness, &meeting);
        accept(&model, (A, 3));
        meeting.attend(B);
        drain(&model, workers);
        assert_eq!(witness.handled_of(A), [1, 2, 3]);
    });
}

/// A flow that finishes against its own late event.
#[test]
fn a_late_event_stays_behind_its_finish() {
    check(|| {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let model = Model::new(engine(&witness, Topology::per_worker(2)).flows(Flows::default()));
        accept(&model, Message::finish(A, 1));
        accept(&model, Message::new(A, 2));
        let workers = hire_two_that_wait(&model, &witness, &meeting);
        accept(&model, Message::new(A, 3));
        meeting.attend(B);
        drain(&model, workers);
        assert_eq!(witness.handled_of(A), [1, 2, 3]);
        let snapshot = model.handle.snapshot();
        assert_eq!((snapshot.active_mappings, snapshot.late), (0, 2), "late events leave nothing behind");
    });
}

/// Eviction of the oldest against the worker that takes it: each message is handled or dropped, and no control message is dropped (pitfall 000.7).
#[test]
fn the_oldest_is_evicted_or_taken_and_never_both() {
    check(|| {
        let witness = Witness::new();
        let builder = engine(&witness, Topology::pool(1)).worker_queue_capacity(1).control_reserve(1);
        let model = Model::new(builder.overflow_at(Bound::Dispatcher, Overflow::DropOldest));
        let worker = hire(&model, 0, &witness, |_| ());
        let mut refused = 0;
        for message in [Message::start(A, 1), Message::new(A, 2), Message::new(B, 3)] {
            match model.handle.submit(message) {
                Ok(admission) => assert_eq!(admission, Admission::Accepted),
                // The only one there is in flight, or a control message.
                Err(refusal) => {
                    assert_eq!(refusal.reason, Refusal::Full(Bound::Dispatcher));
                    refused += 1;
                }
            }
        }
        drain(&model, [worker]);
        let (handled, dropped) = (witness.handled(), witness.dropped());
        assert_eq!(handled.len() + dropped.len() + refused, 3);
        assert!(handled.contains(&(A, 1)), "a start is never dropped");
        assert!(!handled.iter().any(|message| dropped.contains(message)));
        assert!(witness.handled_of(A).is_sorted());
    });
}

/// One dispatcher for all while there is one, then one for each key.
struct ByNumber;

impl Placement<u8> for ByNumber {
    fn looks_at(&self) -> LooksAt {
        LooksAt::Key
    }
    fn place(&self, key: &u8, _: u64, among: &dyn Among) -> Option<usize> {
        Some(*key as usize % among.len())
    }
}

/// A lane moves to a new dispatcher while it may be in flight at the old one, and while more comes for it.
#[test]
fn a_lane_that_moves_waits_for_the_end_of_its_turn() {
    check(|| {
        let witness = Witness::new();
        let topology = Topology::builder().dispatcher("x").worker("w0", ["x"]).worker("w1", ["x"]).build();
        let model = Model::new(engine(&witness, topology.placed(ByNumber)));
        let workers = [0, 1].map(|seat| hire(&model, seat, &witness, |_| ()));
        accept(&model, (B, 1));
        accept(&model, (B, 2));
        model.handle.add_dispatcher("y", &["w1"]).unwrap();
        drain(&model, workers);
        assert_eq!(witness.handled_of(B), [1, 2]);
    });
}

/// A submitter that has chosen a dispatcher when the topology changes has to choose again, or its next message would overtake.
#[test]
fn nobody_submits_by_an_old_topology() {
    check(|| {
        let witness = Witness::new();
        let topology = Topology::builder().dispatcher("x").worker("w0", ["x"]).build();
        let model = Model::new(engine(&witness, topology.placed(ByNumber)));
        let worker = hire(&model, 0, &witness, |_| ());
        let submitter = {
            let model = model.clone();
            thread::spawn(move || (1..=2).for_each(|body| accept(&model, (B, body))))
        };
        model.handle.add_dispatcher("y", &["w0"]).unwrap();
        submitter.join().unwrap();
        drain(&model, [worker]);
        assert_eq!(witness.handled_of(B), [1, 2]);
    });
}

/// A batch that is about to be sorted, and a new dispatcher with which the bound of the engine begins to count. What comes in without a place in it would give one back when it
/// is settled, and the bound would be too wide for good.
#[test]
fn a_batch_takes_its_places_in_a_bound_that_has_begun_to_count() {
    check(|| {
        let witness = Witness::new();
        let topology = Topology::builder().dispatcher("x").worker("w0", ["x"]).build();
        let bounds =
            engine(&witness, topology).ingress_capacity(1).worker_queue_capacity(1).control_reserve(0);
        let model = Model::new(bounds);
        let submitter = {
            let model = model.clone();
            thread::spawn(move || assert_eq!(model.handle.submit_batch([(A, 1)]).accepted, 1))
        };
        model.handle.add_dispatcher("y", &["w0"]).unwrap();
        submitter.join().unwrap();
        for key in A..=7 {
            assert!(model.handle.try_submit((key, 2)).is_err(), "one is all that the engine may have");
        }
        let worker = hire(&model, 0, &witness, |_| ());
        drain(&model, [worker]);
        assert_eq!(witness.handled(), [(A, 1)]);
    });
}

/// A lane that moves, at once or when its turn has ended, and somebody who looks at both of its homes one after the other.
#[test]
fn a_snapshot_counts_nothing_twice_while_lanes_move() {
    check(|| {
        let witness = Witness::new();
        let topology = Topology::builder().dispatcher("x").dispatcher("y").worker("w0", ["x", "y"]).build();
        let model = Model::new(engine(&witness, topology.placed(ByNumber)));
        accept(&model, (A, 1));
        accept(&model, (B, 1));
        let changer = {
            let model = model.clone();
            thread::spawn(move || model.handle.remove_dispatcher("x").unwrap())
        };
        let account = model.handle.snapshot().account;
        assert_eq!((account.accepted, account.outstanding), (2, 2), "{account}");
        changer.join().unwrap();
        let worker = hire(&model, 0, &witness, |_| ());
        drain(&model, [worker]);
    });
}

/// The same for a lane that is in flight when it has to move, and has something left when its turn ends: then it is at neither of the two for a moment.
#[test]
fn a_snapshot_misses_nothing_while_a_lane_is_on_its_way() {
    check(|| {
        let witness = Witness::new();
        let topology = Topology::builder().dispatcher("x").worker("w0", ["x"]).build();
        let again = |context: &Context<'_, u8>, _: &mut u8| match context.attempt() {
            1 => Outcome::RetryAfter(Duration::ZERO),
            _ => Outcome::Done,
        };
        let model = Model::new(engine(&witness, topology.placed(ByNumber)).handle(again));
        accept(&model, (B, 1));
        let worker = hire(&model, 0, &witness, |_| ());
        let looker = {
            let model = model.clone();
            thread::spawn(move || assert_eq!(model.handle.snapshot().account.accepted, 1))
        };
        model.handle.add_dispatcher("y", &["w0"]).unwrap();
        looker.join().unwrap();
        drain(&model, [worker]);
    });
}

/// A submitter that finds its dispatcher full waits there. When that goes, its next attempt may find another one full: then it has to wait at that one, and not
/// where nothing will ever be announced again.
#[test]
fn a_blocked_submitter_waits_where_its_message_would_go_now() {
    check(|| {
        let witness = Witness::new();
        let topology = Topology::builder().dispatcher("x").dispatcher("y").worker("w0", ["x", "y"]).build();
        let model = Model::new(engine(&witness, topology.placed(ByNumber)).worker_queue_capacity(1));
        accept(&model, (A, 1));
        accept(&model, (B, 1));
        let submitter = {
            let model = model.clone();
            thread::spawn(move || accept(&model, (B, 2)))
        };
        model.handle.remove_dispatcher("y").unwrap();
        let worker = hire(&model, 0, &witness, |_| ());
        submitter.join().unwrap();
        drain(&model, [worker]);
        assert_eq!(witness.handled_of(B), [1, 2]);
    });
}

/// A worker that is alone and quick takes what comes straight from ingress, whatever its key (`src/lane/stream.rs`).
#[test]
fn a_stream_sleeps_through_no_message_and_keeps_order() {
    check(|| {
        let witness = Witness::new();
        let mut model = Model::new(engine(&witness, Topology::pool(1)));
        model.quick = true;
        let worker = hire(&model, 0, &witness, |_| ());
        [(A, 1), (B, 1), (A, 2), (B, 2)].into_iter().for_each(|message| accept(&model, message));
        drain(&model, [worker]);
        assert_eq!((witness.handled_of(A), witness.handled_of(B)), (vec![1, 2], vec![1, 2]));
    });
}

/// A stream that is interrupted puts back what it has not run, in front of what has come meanwhile.
#[test]
fn a_stream_that_gives_way_loses_nothing() {
    check(|| {
        let witness = Witness::new();
        let mut model = Model::new(engine(&witness, Topology::pool(1)));
        model.quick = true;
        [(A, 1), (B, 1), (A, 2)].into_iter().for_each(|message| accept(&model, message));
        let worker = hire(&model, 0, &witness, |_| ());
        let submitter = {
            let model = model.clone();
            thread::spawn(move || model.handle.submit((A, 3)).is_ok())
        };
        let report = model.shut_down(false);
        let accepted: &[u8] = if submitter.join().unwrap() { &[1, 2, 3] } else { &[1, 2] };
        worker.join().unwrap();
        let returned = report.returned.iter().filter(|message| message.key == A).map(|message| message.body);
        let seen: Vec<u8> = witness.handled_of(A).into_iter().chain(returned).collect();
        assert_eq!(seen, accepted);
        assert_eq!(report.account.outstanding, report.returned.len() as u64);
    });
}

/// A second worker comes to a dispatcher at which a stream may be out: it must not take what the stream has.
#[test]
fn nobody_claims_beside_a_stream() {
    check(|| {
        let (witness, meeting) = (Witness::new(), Meeting::new());
        let mut model = Model::new(engine(&witness, Topology::pool(1)));
        model.quick = true;
        let attend = || {
            let meeting = meeting.clone();
            move |key| meeting.attend(key)
        };
        let mut workers = vec![hire(&model, 0, &witness, attend())];
        accept(&model, (A, 1));
        // Refused while a stream is out, because a change does not wait in a model.
        if model.handle.add_worker("another", &["pool-0"]).is_ok() {
            workers.push(hire(&model, 1, &witness, attend()));
        }
        // The first message is in somebody's hands when the second comes.
        meeting.attend(B);
        accept(&model, (A, 2));
        drain(&model, workers);
        assert_eq!(witness.handled_of(A), [1, 2]);
    });
}
