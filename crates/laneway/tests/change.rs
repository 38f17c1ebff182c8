//! Changing a running engine: dispatchers and workers come and go under load, and every key keeps its order and every message its place in the account.
//!
//! The interesting moments are those in which a lane has to move while one of its messages is in flight, parked or deferred, or while a submitter
//! waits for room at the dispatcher that goes.

mod witness;

use std::{
    collections::HashSet,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Duration,
};

use laneway::{
    Bound, ChangeError, Engine, Flows, Handle, Message, Outcome, Overflow, Refusal, RetryPolicy, Snapshot,
    Topology,
};
use witness::{A_MOMENT, DEADLINE, Gate, Log, OpensAtLast, Witness, send, within};

fn testify(topology: Topology<u64>, witness: &Arc<Witness>) -> Engine<u64, u64> {
    let witness = witness.clone();
    Engine::builder()
        .topology(topology)
        .handle(move |context, number: &mut u64| witness.see(context.key(), *number))
        .build()
        .unwrap()
}

/// Producers that submit until told to stop; each gives back how many messages each of its keys has got.
struct Load {
    stop: Arc<AtomicBool>,
    producers: Vec<thread::JoinHandle<u64>>,
}

const KEYS_EACH: u64 = 40;

impl Load {
    /// Comes back when each of them has submitted something: what is to be changed under load must not be over before there is any.
    fn start(engine: &Engine<u64, u64>, producers: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (begun, begins) = mpsc::channel();
        let produce = |producer: u64| {
            let (handle, stop, begun) = (engine.handle(), stop.clone(), begun.clone());
            thread::spawn(move || {
                let mut rounds = 0;
                while !stop.load(Relaxed) {
                    send(&handle, (0..KEYS_EACH).map(|key| (producer * KEYS_EACH + key, rounds)));
                    rounds += 1;
                    if rounds == 1 {
                        begun.send(()).unwrap();
                    }
                }
                rounds
            })
        };
        let producers: Vec<_> = (0..producers).map(produce).collect();
        producers.iter().for_each(|_| begins.recv_timeout(DEADLINE).expect("every producer begins"));
        Load { stop, producers }
    }

    /// Stops, waits until all is handled, and checks every key.
    fn verify(self, engine: &Engine<u64, u64>, witness: &Witness) {
        self.stop.store(true, Relaxed);
        let rounds: Vec<u64> = self.producers.into_iter().map(|producer| producer.join().unwrap()).collect();
        assert!(engine.wait_quiet(DEADLINE), "{}", engine.snapshot().account);
        let keys = (0..).zip(&rounds).flat_map(|(producer, rounds)| {
            (0..KEYS_EACH).map(move |key| (producer * KEYS_EACH + key, *rounds))
        });
        witness.verify(keys);
        assert!(rounds.iter().all(|rounds| *rounds > 0));
    }
}

/// Dispatchers and workers come and go; in between, some load is let through.
fn come_and_go(engine: &Engine<u64, u64>, witness: &Witness, first: &str) {
    let some_load = || {
        let before = witness.total();
        witness::eventually("the load goes on", || witness.total() > before + 200);
    };
    for _ in 0..15 {
        engine.add_worker("extra", &[first]).unwrap();
        some_load();
        engine.add_dispatcher("more", &["extra"]).unwrap();
        some_load();
        engine.add_dispatcher("most", &["extra"]).unwrap();
        some_load();
        engine.reassign_worker("extra", &["most", "more"]).unwrap();
        some_load();
        engine.remove_dispatcher("more").unwrap();
        some_load();
        engine.remove_dispatcher("most").unwrap();
        some_load();
        assert_eq!(engine.snapshot().dispatchers.iter().filter(|d| d.name == "more").count(), 0);
        assert!(
            engine.snapshot().workers.iter().all(|w| w.name != "extra"),
            "it served nothing else, so it went"
        );
    }
}

#[test]
fn dispatchers_and_workers_come_and_go_under_load() {
    for (topology, first) in [
        (Topology::partitioned(2, 1), "partition-0"),
        (Topology::pool(2), "pool-0"),
        (Topology::per_worker(2), "worker-0"),
    ] {
        let witness = Witness::new();
        let engine = testify(topology, &witness);
        let load = Load::start(&engine, 3);
        come_and_go(&engine, &witness, first);
        load.verify(&engine, &witness);
    }
}

#[test]
fn changes_under_load_with_retries_and_flows() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .flows(Flows::default())
        .retry(RetryPolicy { base: Duration::from_micros(20), ..RetryPolicy::default() })
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            if (*number + context.key()).is_multiple_of(5) && context.attempt() < 3 {
                return Outcome::Retry;
            }
            attempt.done();
            Outcome::Done
        })
        .build()
        .unwrap();
    let load = Load::start(&engine, 2);
    come_and_go(&engine, &witness, "partition-0");
    load.verify(&engine, &witness);
}

#[test]
fn a_placement_by_name_finds_a_dispatcher_once_it_is_there() {
    let ran = Log::new();
    let ran_too = ran.clone();
    let topology = Topology::assigned([vec!["a"], vec!["a"]], |key: &String| key.split('/').next().unwrap());
    let engine = Engine::builder()
        .topology(topology)
        .handle(move |context, number: &mut u64| ran_too.push((context.dispatcher().to_owned(), *number)))
        .build()
        .unwrap();
    let refused = engine.submit(("b/1".to_owned(), 1)).unwrap_err();
    assert_eq!(
        (refused.reason, refused.to_string().as_str()),
        (Refusal::NoSuchDispatcher, "refused: no such dispatcher")
    );
    assert!(engine.explain(&"b/1".to_owned()).is_none());
    engine.add_dispatcher("b", &["thread-1"]).unwrap();
    engine.submit(refused.message).unwrap();
    engine.submit(("a/1".to_owned(), 2)).unwrap();
    let mut ran = ran.wait_len(2);
    ran.sort_unstable();
    assert_eq!(ran, [("a".to_owned(), 2), ("b".to_owned(), 1)]);
    assert!(engine.wait_quiet(DEADLINE));
    engine.remove_dispatcher("b").unwrap();
    assert_eq!(engine.submit(("b/1".to_owned(), 3)).unwrap_err().reason, Refusal::NoSuchDispatcher);
}

#[test]
fn a_new_dispatcher_takes_its_share_of_the_keys() {
    let seen = Log::new();
    let seen_too = seen.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 2))
        .handle(move |context, _: &mut u64| seen_too.push(context.dispatcher().to_owned()))
        .build()
        .unwrap();
    assert!(engine.pause("partition-0"));
    send(&engine, (0..400).map(|key| (key, 0)));
    engine.add_dispatcher("second", &["partition-0/1"]).unwrap();
    seen.wait_len(100);
    assert!(
        seen.entries().iter().all(|name| name == "second"),
        "the lanes that moved run there, and only there"
    );
    assert!(engine.unpause("partition-0"));
    let seen = seen.wait_len(400);
    let there = seen.iter().filter(|name| *name == "second").count();
    assert!((120..280).contains(&there), "{there} of 400");
}

// ── lanes that move in every state ─────────────────────────────────────────────────────────────────────────────────

type Tries = Arc<Log<(u64, u64)>>;

/// Sixteen lanes on one dispatcher with as many workers. A second dispatcher takes about half of them.
fn crowd(handle: impl Fn(u64, u64) -> Outcome + Send + Sync + 'static) -> (Engine<u64, u64>, Tries) {
    let log = Log::new();
    let log_too = log.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 16))
        .shutdown_grace(Duration::from_secs(2))
        .handle(move |context, number: &mut u64| {
            log_too.push((*context.key(), *number));
            handle(*context.key(), *number)
        })
        .build()
        .unwrap();
    (engine, log)
}

fn add_second(engine: &Engine<u64, u64>) {
    engine.add_dispatcher("second", &["partition-0/0", "partition-0/1"]).unwrap();
    let here = |name: &str| (0..16).filter(|key| engine.explain(key).unwrap().dispatcher == name).count();
    assert!(here("second") > 0 && here("partition-0") > 0, "some move and some stay");
}

fn sum(snapshot: &Snapshot, of: impl Fn(&laneway::DispatcherStats) -> usize) -> usize {
    snapshot.dispatchers.iter().map(of).sum()
}

fn tries_of(log: &Log<(u64, u64)>, key: u64) -> Vec<u64> {
    log.entries().into_iter().filter(|(of, _)| *of == key).map(|(_, number)| number).collect()
}

#[test]
fn a_lane_in_flight_follows_when_its_turn_has_ended() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let (engine, log) = crowd(move |_, number| {
        if number == 0 {
            gate_too.pass();
        }
        Outcome::Done
    });
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..3).flat_map(|number| (0..16).map(move |key| (key, number))));
    gate.wait_arrived(16);
    add_second(&engine);
    send(&engine, (3..5).flat_map(|number| (0..16).map(move |key| (key, number))));
    assert_eq!(
        log.len(),
        16,
        "no successor starts at the new home while its predecessor is in flight at the old one"
    );
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    (0..16).for_each(|key| assert_eq!(tries_of(&log, key), [0, 1, 2, 3, 4]));
    assert_eq!(engine.snapshot().account.done, 80);
}

#[test]
fn a_parked_lane_stays_parked_when_it_moves() {
    let (engine, log) = crowd(|_, number| if number == 1 { Outcome::ParkLane } else { Outcome::Done });
    send(&engine, (0..3).flat_map(|number| (0..16).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    add_second(&engine);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(sum(&engine.snapshot(), |d| d.parked_lanes), 16);
    (0..16).for_each(|key| assert_eq!(tries_of(&log, key), [0, 1]));
    (0..16).for_each(|key| assert!(engine.skip_head(&key) && engine.resume(&key)));
    assert!(engine.wait_quiet(DEADLINE));
    (0..16).for_each(|key| assert_eq!(tries_of(&log, key), [0, 1, 2]));
}

#[test]
fn a_parked_lane_whose_dispatcher_has_gone_can_be_operated_on() {
    let log = Log::new();
    let log_too = log.clone();
    let engine = Engine::builder()
        .topology(Topology::assigned([["a", "b"]], |key: &&str| key.split('/').next().unwrap_or("")))
        .handle(move |_, number: &mut u64| log_too.push(*number))
        .build()
        .unwrap();
    assert!(engine.pause("b"));
    send(&engine, (0..4).map(|number| ("b/1", number)));
    assert!(engine.park(&"b/1", "for a while"));
    engine.remove_dispatcher("b").unwrap();
    let refused = engine.submit(("b/1", 4)).unwrap_err();
    assert_eq!(refused.reason, Refusal::NoSuchDispatcher);
    let explanation = engine.explain(&"b/1").expect("it is somewhere");
    assert_eq!((explanation.dispatcher.as_str(), explanation.waiting), ("a", 4));
    assert_eq!(engine.look(&"b/1", 1, |message| message.body), [0]);
    assert!(engine.skip_head(&"b/1") && engine.resume(&"b/1"));
    assert_eq!(log.wait_len(3), [1, 2, 3]);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.explain(&"b/1"), None, "nothing of it is left, and nothing can come");
    assert_eq!(engine.snapshot().account.outstanding, 0);
}

#[test]
fn what_is_parked_where_its_dispatcher_has_gone_can_be_taken_back() {
    let topology = Topology::assigned([["a", "b"]], |key: &&str| key.split('/').next().unwrap_or(""));
    let engine = Engine::builder().topology(topology).handle(|_, _: &mut u64| ()).build().unwrap();
    assert!(engine.pause("b"));
    send(&engine, [("b/1", 7)]);
    assert!(engine.park(&"b/1", "for ever"));
    engine.remove_dispatcher("b").unwrap();
    let back = engine.withdraw(&"b/1").expect("it is not in flight");
    assert_eq!(back.into_iter().map(|message| message.body).collect::<Vec<_>>(), [7]);
    assert_eq!(engine.snapshot().account.outstanding, 0);
}

#[test]
fn messages_parked_alone_stay_aside_when_their_lane_moves_in_flight() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let (engine, log) = crowd(move |_, number| {
        if number == 1 {
            gate_too.pass();
        }
        if number == 0 { Outcome::Park } else { Outcome::Done }
    });
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..2).flat_map(|number| (0..16).map(move |key| (key, number))));
    gate.wait_arrived(16);
    add_second(&engine);
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    (0..16).for_each(|key| assert_eq!(tries_of(&log, key), [0, 1], "nobody has resumed it"));
    assert_eq!(sum(&engine.snapshot(), |d| d.parked_messages), 16);
}

#[test]
fn messages_parked_alone_stay_aside_when_their_lane_moves_at_rest() {
    let (engine, log) = crowd(|_, number| if number == 0 { Outcome::Park } else { Outcome::Done });
    send(&engine, (0..2).flat_map(|number| (0..16).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    add_second(&engine);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!((log.len(), sum(&engine.snapshot(), |d| d.parked_messages)), (32, 16));
    (0..16).for_each(|key| assert!(engine.resume(&key)));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(log.len(), 48);
}

#[test]
fn a_lane_in_retry_keeps_its_time_and_its_attempts_when_it_moves() {
    let attempts = Log::new();
    let attempts_too = attempts.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 16))
        .retry(RetryPolicy { base: Duration::from_millis(100), ..RetryPolicy::default() })
        .handle(move |context, _: &mut u64| {
            attempts_too.push((*context.key(), context.attempt()));
            if context.attempt() == 1 { Outcome::Retry } else { Outcome::Done }
        })
        .build()
        .unwrap();
    send(&engine, (0..16).map(|key| (key, 0)));
    attempts.wait_len(16);
    add_second(&engine);
    assert!(engine.wait_quiet(DEADLINE));
    let attempts = attempts.entries();
    (0..16).for_each(|key| {
        let own: Vec<u32> =
            attempts.iter().filter(|(of, _)| *of == key).map(|(_, attempt)| *attempt).collect();
        assert_eq!(own, [1, 2], "key {key}");
    });
}

#[test]
fn messages_that_have_moved_can_still_make_room() {
    let dropped = Log::new();
    let dropped_too = dropped.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .worker_queue_capacity(64)
        .overflow(Overflow::DropOldest)
        .on_drop(move |message: Message<u64, u64>, _| dropped_too.push((message.key, message.body)))
        .handle(|_, _| ())
        .build()
        .unwrap();
    (0..2).for_each(|n| assert!(engine.pause(&format!("partition-{n}"))));
    send(&engine, (0..64).map(|key| (key, 0)));
    engine.remove_dispatcher("partition-1").unwrap();
    assert_eq!(engine.snapshot().account.outstanding, 64, "all of them are on one dispatcher, which is full");
    assert!(dropped.entries().is_empty());
    for key in 100..164 {
        assert!(engine.submit((key, 0)).is_ok(), "the oldest makes room, wherever it was accepted");
    }
    let evicted: HashSet<u64> = dropped.entries().into_iter().map(|(key, _)| key).collect();
    assert_eq!(evicted, (0..64).collect::<HashSet<_>>(), "the old ones before the new ones");
}

// ── submitters and bounds ──────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_submitter_that_waits_at_a_dispatcher_that_goes_is_placed_again() {
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .worker_queue_capacity(1)
        .handle(|_, _: &mut u64| ())
        .build()
        .unwrap();
    assert!(engine.pause("partition-1"));
    let home = |key: &u64| engine.explain(key).unwrap().dispatcher;
    let key = (0..).find(|key| home(key) == "partition-1").unwrap();
    send(&engine, [(key, 0)]);
    let (handle, (answer, accepted)) = (engine.handle(), mpsc::channel());
    thread::spawn(move || answer.send(handle.submit((key, 1)).is_ok()));
    assert!(accepted.recv_timeout(A_MOMENT).is_err(), "it waits");
    engine.remove_dispatcher("partition-1").unwrap();
    assert_eq!(
        accepted.recv_timeout(Duration::from_secs(5)),
        Ok(true),
        "there is room where its key lives now"
    );
    assert!(engine.wait_quiet(DEADLINE));
}

#[test]
fn a_submitter_that_waits_is_told_when_lanes_move_away() {
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 2))
        .worker_queue_capacity(32)
        .handle(|_, _: &mut u64| ())
        .build()
        .unwrap();
    assert!(engine.pause("partition-0"));
    send(&engine, (0..32).map(|key| (key, 0)));
    let (handle, (answer, accepted)) = (engine.handle(), mpsc::channel());
    thread::spawn(move || answer.send(handle.submit((0, 1)).is_ok()));
    assert!(accepted.recv_timeout(A_MOMENT).is_err(), "it waits");
    engine.add_dispatcher("second", &["partition-0/1"]).unwrap();
    assert_eq!(
        accepted.recv_timeout(Duration::from_secs(5)),
        Ok(true),
        "half of the lanes are elsewhere now"
    );
}

#[test]
fn the_bound_of_the_engine_holds_when_dispatchers_are_added() {
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 2))
        .ingress_capacity(8)
        .worker_queue_capacity(8)
        .overflow(Overflow::Reject)
        .handle(|_, _: &mut u64| ())
        .build()
        .unwrap();
    engine.add_dispatcher("second", &["partition-0/1"]).unwrap();
    assert!(engine.pause("partition-0") && engine.pause("second"));
    let answers: Vec<_> =
        (0..100).map(|key| engine.submit((key, 0)).map_err(|refused| refused.reason)).collect();
    assert_eq!(engine.snapshot().account.accepted, 8, "one dispatcher could not reach the bound; two can");
    assert!(answers.contains(&Err(Refusal::Full(Bound::Engine))));
}

// ── the account and the end ────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn totals_survive_the_removal_of_a_dispatcher() {
    let witness = Witness::new();
    let engine = testify(Topology::partitioned(2, 1), &witness);
    send(&engine, (0..1_000).map(|key| (key, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    engine.remove_dispatcher("partition-1").unwrap();
    let account = engine.snapshot().account;
    assert_eq!((account.accepted, account.done), (1_000, 1_000), "what is done stays done, whoever did it");
    assert!(account.balances());
    let report = engine.shutdown(DEADLINE);
    assert_eq!((report.account.accepted, report.account.done), (1_000, 1_000));
}

#[test]
fn a_message_in_flight_at_a_dispatcher_that_goes_is_outstanding_until_it_is_done() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let (engine, _) = crowd(move |_, _| {
        gate_too.pass();
        Outcome::Done
    });
    let _opens = OpensAtLast(gate.clone());
    engine.add_worker("one", &["partition-0"]).unwrap();
    engine.add_dispatcher("second", &["one"]).unwrap();
    engine.reassign_worker("one", &["second"]).unwrap();
    let stay = (0..16).filter(|key| engine.explain(key).unwrap().dispatcher == "partition-0").count();
    send(&engine, (0..16).map(|key| (key, 0)));
    gate.wait_arrived(stay as u64 + 1);
    engine.remove_dispatcher("second").unwrap();
    let account = engine.snapshot().account;
    assert_eq!((account.accepted, account.outstanding), (16, 16), "{account}");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 16);
}

#[test]
fn a_shutdown_waits_for_a_worker_that_was_removed_in_the_middle_of_its_turn() {
    let gates = [Gate::closed(), Gate::closed()];
    let gates_too = gates.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .handle(move |context, _: &mut u64| gates_too[context.worker()].pass())
        .build()
        .unwrap();
    let _opens = gates.clone().map(OpensAtLast);
    send(&engine, [(1, 0), (2, 0)]);
    gates.iter().for_each(|gate| gate.wait_arrived(1));
    engine.remove_worker("pool-0/1").unwrap();
    let (answer, report) = mpsc::channel();
    thread::spawn(move || answer.send(engine.shutdown(Duration::ZERO)));
    assert!(report.recv_timeout(A_MOMENT).is_err(), "two messages are in flight");
    gates[0].open();
    assert!(report.recv_timeout(A_MOMENT).is_err(), "one is, in the hands of the worker that was removed");
    gates[1].open();
    let report = report.recv_timeout(DEADLINE).unwrap();
    assert_eq!((report.account.done, report.still_running), (2, 0));
}

#[test]
fn a_shutdown_loses_nothing_of_a_lane_that_is_on_its_way() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .handle(move |_, _: &mut u64| {
            gate_too.pass();
            Outcome::Retry
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    let key = (0..).find(|key| engine.explain(key).unwrap().dispatcher == "partition-1").unwrap();
    send(&engine, (0..5).map(|number| (key, number)));
    gate.wait_arrived(1);
    engine.remove_dispatcher("partition-1").unwrap();
    let (answer, report) = mpsc::channel();
    thread::spawn(move || answer.send(engine.shutdown(Duration::ZERO)));
    let early = report.recv_timeout(A_MOMENT);
    gate.open();
    assert!(early.is_err(), "a message is in flight");
    let report = report.recv_timeout(DEADLINE).unwrap();
    let returned: Vec<u64> = report.returned.iter().map(|message| message.body).collect();
    assert_eq!(
        (returned, report.still_running),
        (vec![0, 1, 2, 3, 4], 0),
        "the head that failed comes back first"
    );
    assert_eq!((report.account.accepted, report.account.outstanding), (5, 5));
}

// ── pause, reassign, errors ────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_paused_dispatcher_accepts_and_starts_nothing_and_the_others_go_on() {
    let witness = Witness::new();
    let engine = testify(Topology::partitioned(2, 1), &witness);
    let home = |key: &u64| engine.explain(key).unwrap().dispatcher;
    let there: Vec<u64> = (0..100).filter(|key| home(key) == "partition-1").collect();
    assert!(engine.pause("partition-1"));
    send(&engine, (0..3).flat_map(|number| (0..100).map(move |key| (key, number))));
    let others = 3 * (100 - there.len() as u64);
    witness::eventually("the others are done", || witness.total() == others);
    let snapshot = engine.snapshot();
    assert!(snapshot.dispatchers[1].paused && !snapshot.dispatchers[0].paused);
    assert_eq!(snapshot.account.outstanding, 3 * there.len() as u64);
    assert!(engine.unpause("partition-1"));
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..100).map(|key| (key, 3)));
    assert!(!engine.pause("partition-7") && !engine.unpause("partition-7"), "there is none of that name");
}

#[test]
fn what_a_paused_dispatcher_holds_does_not_keep_the_engine_from_being_quiet() {
    let engine = Engine::builder().topology(Topology::pool(1)).handle(|_, _: &mut u64| ()).build().unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, [(1, 0)]);
    assert!(engine.wait_quiet(Duration::from_secs(5)), "nothing happens any more without somebody's doing");
    assert!(engine.unpause("pool-0"));
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 1);
}

#[test]
fn pausing_ends_a_wait_for_quiet() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0), (2, 0)]);
    gate.wait_arrived(1);
    assert!(engine.pause("pool-0"));
    let (handle, (answer, quiet)) = (engine.handle(), mpsc::channel());
    thread::spawn(move || answer.send(handle.wait_quiet(Duration::from_secs(5))));
    assert!(quiet.recv_timeout(A_MOMENT).is_err(), "one is in flight");
    gate.open();
    assert_eq!(quiet.recv_timeout(DEADLINE), Ok(true), "the other is held by the pause");
}

#[test]
fn a_reassigned_worker_serves_its_new_row() {
    let ran = Log::new();
    let ran_too = ran.clone();
    let topology = Topology::assigned([vec!["a"], vec!["a", "b"]], |key: &String| key.as_str());
    let engine = Engine::builder()
        .topology(topology)
        .handle(move |context, _: &mut u64| ran_too.push((context.key().clone(), context.worker())))
        .build()
        .unwrap();
    engine.reassign_worker("thread-0", &["b"]).unwrap();
    engine.reassign_worker("thread-1", &["a"]).unwrap();
    for number in 0..50 {
        send(&engine, [("a".to_owned(), number), ("b".to_owned(), number)]);
    }
    let ran = ran.wait_len(100);
    assert!(ran.iter().all(|(key, worker)| (key == "a") == (*worker == 1)), "{ran:?}");
}

#[test]
fn a_worker_that_is_added_works_beside_the_others() {
    let meeting = Arc::new(std::sync::Barrier::new(4));
    let meeting_too = meeting.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .shutdown_grace(Duration::from_secs(1))
        .handle(move |_, _: &mut u64| {
            meeting_too.wait();
        })
        .build()
        .unwrap();
    engine.add_worker("second", &["pool-0"]).unwrap();
    engine.add_worker("third", &["pool-0"]).unwrap();
    let handle = engine.handle();
    within(DEADLINE, "all three meet", move || {
        send(&handle, (0..3).map(|key| (key, 0)));
        meeting.wait();
    });
    assert!(engine.wait_quiet(DEADLINE));
    engine.remove_worker("pool-0/0").unwrap();
    assert_eq!(engine.snapshot().workers.len(), 2);
}

/// One worker is stuck. Whoever adds another one wants the rest to go on.
fn help_beside_a_stuck_handler(warm_up: u64) {
    let gate = Gate::closed();
    let (gate_too, witness) = (gate.clone(), Witness::new());
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .shutdown_grace(Duration::from_secs(1))
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            if *context.key() == 1_000 {
                gate_too.pass();
            }
            attempt.done();
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..warm_up).flat_map(|number| (0..100).map(move |key| (key, number))));
    assert!(engine.wait_quiet(DEADLINE));
    // First alone: what a worker takes together with a message that gets stuck is in its hands.
    send(&engine, [(1_000, 0)]);
    gate.wait_arrived(1);
    send(&engine, (0..100).map(|key| (key, warm_up)));
    let handle = engine.handle();
    within(Duration::from_secs(5), "the worker is added", move || handle.add_worker("helper", &["pool-0"]))
        .unwrap();
    witness::eventually("all others are done", || witness.total() == 100 * (warm_up + 1));
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..100).map(|key| (key, warm_up + 1)).chain([(1_000, 1)]));
}

#[test]
fn a_worker_that_is_added_helps_beside_a_stuck_handler() {
    help_beside_a_stuck_handler(0);
}

#[test]
fn a_worker_that_is_added_helps_beside_a_stuck_handler_that_followed_fast_ones() {
    help_beside_a_stuck_handler(100);
}

#[test]
fn a_worker_that_takes_over_waits_for_what_the_other_still_has_in_its_hands() {
    let gate = Gate::closed();
    let (gate_too, witness) = (gate.clone(), Witness::new());
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .shutdown_grace(Duration::from_secs(1))
        .handle(move |context, number: &mut u64| {
            let attempt = witness_too.enter(context.key(), *number);
            if *context.key() == 1_000 {
                gate_too.pass();
            }
            attempt.done();
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    let quickly = |keys: std::ops::Range<u64>| {
        send(&engine, (0..100).flat_map(move |number| keys.clone().map(move |key| (key, number))));
    };
    quickly(0..10);
    assert!(engine.wait_quiet(DEADLINE));
    // One batch, so that a worker that has become quick takes all of it at once, and is stuck at the first.
    let report = engine.submit_batch([(1_000, 0)].into_iter().chain((0..10).map(|key| (key, 100))));
    assert_eq!(report.accepted, 11);
    gate.wait_arrived(1);
    engine.add_worker("successor", &["pool-0"]).unwrap();
    engine.remove_worker("pool-0/0").unwrap();
    // The successor gets quick as well. Now it is the only one, as far as the topology knows.
    quickly(20..30);
    witness::eventually("the successor works", || witness.total() >= 2_000);
    send(&engine, (0..10).map(|key| (key, 101)));
    send(&engine, [(2_000, 0)]);
    witness::eventually("and goes on", || witness.done(&2_000) == 1);
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    let others = (20..30).map(|key| (key, 100)).chain([(1_000, 1), (2_000, 1)]);
    witness.verify((0..10).map(|key| (key, 102)).chain(others));
}

#[test]
fn what_cannot_be_changed_is_said_in_words() {
    let engine = Engine::<u64, u64>::builder()
        .topology(Topology::partitioned(2, 1))
        .handle(|_, _| ())
        .build()
        .unwrap();
    let text = |result: Result<(), ChangeError>| result.unwrap_err().to_string();
    assert_eq!(
        text(engine.remove_dispatcher("nowhere")),
        "there is no dispatcher \"nowhere\": there are \"partition-0\", \"partition-1\""
    );
    assert_eq!(
        text(engine.remove_worker("nobody")),
        "there is no worker \"nobody\": there are \"partition-0/0\", \"partition-1/0\""
    );
    assert_eq!(
        text(engine.add_dispatcher("third", &["nobody"])),
        "there is no worker \"nobody\": there are \"partition-0/0\", \"partition-1/0\""
    );
    assert_eq!(
        text(engine.reassign_worker("nobody", &["partition-0"])),
        "there is no worker \"nobody\": there are \"partition-0/0\", \"partition-1/0\""
    );
    let serves_nowhere = text(engine.add_worker("new", &["nowhere"]));
    assert!(
        serves_nowhere.contains("serves dispatcher \"nowhere\", which does not exist"),
        "{serves_nowhere}"
    );
    let unserved = text(engine.remove_worker("partition-1/0"));
    assert!(
        unserved.contains("no worker serves dispatcher \"partition-1\": add it to a worker's row"),
        "{unserved}"
    );
    let unserved = text(engine.add_dispatcher("third", &[]));
    assert!(unserved.contains("no worker serves dispatcher \"third\""), "{unserved}");
    let twice = text(engine.add_dispatcher("partition-0", &["partition-0/0"]));
    assert!(twice.contains("there are two dispatchers called \"partition-0\""), "{twice}");
    let empty = text(engine.reassign_worker("partition-0/0", &[]));
    assert!(empty.contains("serves no dispatcher: name at least one in its row"), "{empty}");
    // Nothing of all this has changed anything.
    send(&engine, (0..100).map(|key| (key, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.dispatchers.len(), snapshot.workers.len(), snapshot.account.done), (2, 2, 100));
}

/// It might have to wait for the very handler that asks for it.
#[test]
fn a_change_that_a_handler_asks_for_is_refused_at_once() {
    let (own, answers) = (Arc::new(OnceLock::<Handle<u64, u64>>::new()), Log::new());
    let (own_too, answers_too) = (own.clone(), answers.clone());
    let engine = Engine::builder()
        .topology(Topology::partitioned(1, 1))
        .handle(move |_, _: &mut u64| {
            let handle = own_too.wait();
            answers_too.push(handle.add_dispatcher("second", &["partition-0/0"]));
            answers_too.push(handle.add_worker("helper", &["partition-0"]));
        })
        .build()
        .unwrap();
    own.set(engine.handle()).unwrap();
    send(&engine, [(1, 0)]);
    assert_eq!(answers.wait_len(2), [Err(ChangeError::FromHandler), Err(ChangeError::FromHandler)]);
    assert!(engine.wait_quiet(DEADLINE));
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.dispatchers.len(), snapshot.workers.len()), (1, 1), "nothing was changed");
    // Somebody else may.
    engine.add_worker("helper", &["partition-0"]).unwrap();
}

#[test]
fn a_second_worker_of_the_same_name_is_refused_as_a_worker() {
    let engine = Engine::<u64, u64>::builder().topology(Topology::pool(1)).handle(|_, _| ()).build().unwrap();
    let text = engine.add_worker("pool-0/0", &["pool-0"]).unwrap_err().to_string();
    assert!(
        text.contains("two workers called \"pool-0/0\""),
        "it is not a dispatcher that is there twice: {text}"
    );
}

#[test]
fn the_last_dispatcher_stays() {
    let engine = Engine::<u64, u64>::builder().topology(Topology::pool(1)).handle(|_, _| ()).build().unwrap();
    let text = engine.remove_dispatcher("pool-0").unwrap_err().to_string();
    assert!(text.contains("the topology has no dispatcher: give it at least one"), "{text}");
    send(&engine, [(1, 0)]);
    assert!(engine.wait_quiet(DEADLINE));
}

#[test]
fn changes_from_several_threads_take_turns() {
    let witness = Witness::new();
    let engine = testify(Topology::partitioned(2, 2), &witness);
    let load = Load::start(&engine, 2);
    let changes = Arc::new(AtomicU64::new(0));
    thread::scope(|scope| {
        for changer in 0..3 {
            let (handle, changes): (Handle<u64, u64>, _) = (engine.handle(), changes.clone());
            scope.spawn(move || {
                let (worker, dispatcher) = (format!("w{changer}"), format!("d{changer}"));
                for _ in 0..10 {
                    handle.add_worker(&worker, &["partition-0"]).unwrap();
                    handle.add_dispatcher(&dispatcher, &[&worker]).unwrap();
                    handle.remove_dispatcher(&dispatcher).unwrap();
                    handle.remove_worker(&worker).unwrap();
                    changes.fetch_add(4, Relaxed);
                }
            });
        }
    });
    assert_eq!(changes.load(Relaxed), 120);
    load.verify(&engine, &witness);
}

/// All of a change, or nothing of it.
#[test]
fn many_workers_come_and_go_in_one_change() {
    let witness = Witness::new();
    let engine = testify(Topology::pool(2), &witness);
    let names = |engine: &Engine<u64, u64>| -> Vec<String> {
        engine.snapshot().workers.iter().map(|worker| worker.name.clone()).collect()
    };
    let add: Vec<_> = (0..500).map(|number| (format!("more-{number}"), "pool-0".to_owned())).collect();
    engine.change_workers(&add, &["pool-0/0".to_owned(), "pool-0/1".to_owned()]).unwrap();
    assert_eq!(names(&engine), add.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>());
    send(&engine, (0..1_000).map(|number| (number % 50, number / 50)));
    let unknown = engine.change_workers(&[], &["more-3".to_owned(), "nobody".to_owned()]);
    assert!(matches!(unknown, Err(ChangeError::Unknown { what: "worker", .. })), "{unknown:?}");
    let unserved: Vec<_> = add.iter().map(|(name, _)| name.clone()).collect();
    assert!(matches!(engine.change_workers(&[], &unserved), Err(ChangeError::Invalid(_))));
    assert_eq!(names(&engine).len(), 500, "nothing of it was done");
    engine.change_workers(&[], &unserved[1..]).unwrap();
    assert!(engine.wait_quiet(DEADLINE) && engine.is_quiet());
    witness.verify((0..50).map(|key| (key, 20)));
}
