//! What happens at a full bound: five policies, four bounds, and what is said about it afterwards.
//!
//! A dispatcher that is paused, or a handler that waits at a gate, fills up to exactly its bound, so each test can say which message is refused,
//! dropped or let in, and not only how many.

mod witness;

use std::{
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use laneway::{
    Admission, Bound, Builder, Cancel, Dropped, Engine, Handle, Kind, Message, Overflow, Refusal, Topology,
};
use witness::{A_MOMENT, DEADLINE, Gate, Log, OpensAtLast, Witness, send};

type Drops = Arc<Log<(u64, u64, Dropped)>>;

/// One paused worker; what it handles and what is dropped are written down.
struct Fixture {
    engine: Engine<u64, u64>,
    handled: Arc<Log<(u64, u64)>>,
    dropped: Drops,
}

const NAME: &str = "pool-0";

fn fixture(set: impl FnOnce(Builder<u64, u64>) -> Builder<u64, u64>) -> Fixture {
    let (handled, dropped) = (Log::new(), Log::new());
    let (handled_too, dropped_too) = (handled.clone(), dropped.clone());
    let builder = Engine::builder()
        .topology(Topology::pool(1))
        .handle(move |context, number: &mut u64| handled_too.push((*context.key(), *number)))
        .on_drop(move |message: Message<u64, u64>, why| dropped_too.push((message.key, message.body, why)));
    let engine = set(builder).build().unwrap();
    assert!(engine.pause(NAME));
    Fixture { engine, handled, dropped }
}

impl Fixture {
    /// Lets everything run that is there, and says what ran, in order.
    fn drain(&self) -> Vec<(u64, u64)> {
        self.engine.unpause(NAME);
        assert!(self.engine.wait_quiet(DEADLINE));
        self.handled.entries()
    }

    fn refused(&self, message: impl Into<Message<u64, u64>>) -> (Refusal, Message<u64, u64>) {
        let refused = self.engine.submit(message).expect_err("there is no room");
        (refused.reason, refused.message)
    }
}

// ── Reject ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn reject_gives_the_message_back_and_names_the_dispatcher() {
    let f = fixture(|b| b.worker_queue_capacity(2).overflow(Overflow::Reject));
    send(&f.engine, [(1, 0), (2, 0)]);
    let (reason, message) = f.refused(Message::new(3, 30));
    assert_eq!((reason, message), (Refusal::Full(Bound::Dispatcher), Message::new(3, 30)));
    assert_eq!(reason.to_string(), "the dispatcher is full");
    assert_eq!(f.drain(), [(1, 0), (2, 0)]);
    let snapshot = f.engine.snapshot();
    assert_eq!(snapshot.refusals.count(Refusal::Full(Bound::Dispatcher)), 1);
    assert_eq!((snapshot.refusals.total(), snapshot.account.accepted, snapshot.account.dropped), (1, 2, 0));
}

#[test]
fn reject_at_the_engine() {
    let f = fixture(|b| b.ingress_capacity(3).worker_queue_capacity(8).overflow(Overflow::Reject));
    send(&f.engine, (0..3).map(|key| (key, 0)));
    assert_eq!(f.refused((9, 0)).0, Refusal::Full(Bound::Engine));
    assert_eq!(f.drain().len(), 3);
    send(&f.engine, [(9, 0)]);
    assert_eq!(f.engine.snapshot().refusals.count(Refusal::Full(Bound::Engine)), 1);
}

#[test]
fn reject_at_the_lane_leaves_other_lanes_open() {
    let f = fixture(|b| b.lane_capacity(2).overflow(Overflow::Reject));
    send(&f.engine, [(1, 0), (1, 1), (2, 0)]);
    assert_eq!(f.refused((1, 2)).0, Refusal::Full(Bound::Lane));
    send(&f.engine, [(2, 1), (3, 0)]);
    assert_eq!(f.drain().len(), 5);
    send(&f.engine, [(1, 2)]);
}

#[test]
fn reject_at_the_number_of_lanes_lets_known_keys_in() {
    let f = fixture(|b| b.lanes_max(2).overflow(Overflow::Reject));
    send(&f.engine, [(1, 0), (2, 0), (1, 1)]);
    let (reason, _) = f.refused((3, 0));
    assert_eq!(
        (reason, reason.to_string().as_str()),
        (Refusal::Full(Bound::Lanes), "the number of lanes is full")
    );
    send(&f.engine, [(2, 1)]);
    assert_eq!(f.drain().len(), 4);
    send(&f.engine, [(3, 0)]);
}

#[test]
fn a_message_in_flight_still_takes_its_place() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(2)
        .overflow(Overflow::Reject)
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1_u64, 0)]);
    gate.wait_arrived(1);
    send(&engine, [(2, 0)]);
    assert!(engine.submit((3, 0)).is_err(), "pitfall 003.5: what a worker has drained is still outstanding");
}

// ── Block ──────────────────────────────────────────────────────────────────────────────────────────────────────────

/// Submits on another thread; the answer comes through the channel.
fn submit_beside<R: Send + 'static>(
    engine: &Engine<u64, u64>,
    submit: impl FnOnce(Handle<u64, u64>) -> R + Send + 'static,
) -> mpsc::Receiver<R> {
    let (handle, (send, receive)) = (engine.handle(), mpsc::channel());
    thread::spawn(move || send.send(submit(handle)));
    receive
}

#[test]
fn block_waits_until_there_is_room_at_each_bound() {
    type Set = fn(Builder<u64, u64>) -> Builder<u64, u64>;
    let bounds: [(Bound, Set); 4] = [
        (Bound::Engine, |b| b.ingress_capacity(2).worker_queue_capacity(8)),
        (Bound::Dispatcher, |b| b.worker_queue_capacity(2)),
        (Bound::Lane, |b| b.lane_capacity(2)),
        (Bound::Lanes, |b| b.lanes_max(1)),
    ];
    for (bound, set) in bounds {
        let f = fixture(set);
        send(&f.engine, [(1, 0), (1, 1)]);
        let key = if bound == Bound::Lanes { 2 } else { 1 };
        assert_eq!(
            f.engine.try_submit((key, 2)).unwrap_err().reason,
            Refusal::Full(bound),
            "try never waits"
        );
        let answer = submit_beside(&f.engine, move |handle| handle.submit((key, 2)));
        assert!(answer.recv_timeout(A_MOMENT).is_err(), "{bound}: it waits");
        f.engine.unpause(NAME);
        let admission = answer.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("{bound}: there is room"));
        assert_eq!(admission.unwrap(), Admission::Accepted);
        assert_eq!(f.drain(), [(1, 0), (1, 1), (key, 2)], "{bound}");
    }
}

#[test]
fn block_for_gives_up_at_its_deadline() {
    let limit = Duration::from_millis(30);
    let f = fixture(|b| b.worker_queue_capacity(1).overflow(Overflow::BlockFor(limit)));
    send(&f.engine, [(1, 0)]);
    let began = Instant::now();
    let (reason, message) = f.refused((2, 5));
    assert_eq!((reason, message.body), (Refusal::TimedOut(Bound::Dispatcher), 5));
    assert_eq!(reason.to_string(), "the dispatcher stayed full until the deadline");
    assert!(began.elapsed() >= limit);
    assert_eq!(f.engine.snapshot().refusals.count(Refusal::TimedOut(Bound::Dispatcher)), 1);
    assert_eq!(f.engine.try_submit((2, 5)).unwrap_err().reason, Refusal::Full(Bound::Dispatcher));
}

#[test]
fn block_for_takes_the_room_that_comes_in_time() {
    let f = fixture(|b| b.worker_queue_capacity(1).overflow(Overflow::BlockFor(DEADLINE)));
    send(&f.engine, [(1, 0)]);
    let answer = submit_beside(&f.engine, |handle| handle.submit((2, 0)));
    assert!(answer.recv_timeout(A_MOMENT).is_err());
    assert_eq!(f.drain()[0], (1, 0));
    assert!(answer.recv_timeout(DEADLINE).expect("there is room").is_ok());
}

#[test]
fn a_waiting_submitter_can_be_cancelled() {
    let f = fixture(|b| b.worker_queue_capacity(1));
    send(&f.engine, [(1, 0)]);
    let (cancel, bystander) = (Cancel::new(), Cancel::new());
    let (cancel_too, bystander_too) = (cancel.clone(), bystander.clone());
    let answer = submit_beside(&f.engine, move |handle| handle.submit_unless((2, 7), &cancel_too));
    let other = submit_beside(&f.engine, move |handle| handle.submit_unless((3, 0), &bystander_too));
    assert!(answer.recv_timeout(A_MOMENT).is_err());
    cancel.cancel();
    let refused = answer.recv_timeout(DEADLINE).expect("it was cancelled").unwrap_err();
    assert_eq!((refused.reason, refused.message), (Refusal::Cancelled, Message::new(2, 7)));
    assert!(other.recv_timeout(A_MOMENT).is_err(), "the other one still waits");
    f.drain();
    assert!(other.recv_timeout(DEADLINE).expect("there is room").is_ok());
}

#[test]
fn a_waiting_submitter_is_refused_when_the_engine_closes() {
    let f = fixture(|b| b.worker_queue_capacity(1));
    send(&f.engine, [(1, 0)]);
    let answer = submit_beside(&f.engine, |handle| handle.submit((2, 0)));
    assert!(answer.recv_timeout(A_MOMENT).is_err());
    f.engine.close();
    assert_eq!(answer.recv_timeout(DEADLINE).expect("closed").unwrap_err().reason, Refusal::Closed);
    assert_eq!(f.drain(), [(1, 0)], "what was accepted is still handled");
}

#[test]
fn many_blocked_producers_all_get_in_and_keep_order() {
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .worker_queue_capacity(16)
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    thread::scope(|scope| {
        for producer in 0..4_u64 {
            let handle = engine.handle();
            let messages =
                (0..2_000).flat_map(move |number| (0..5).map(move |key| (producer * 5 + key, number)));
            scope.spawn(move || send(&handle, messages));
        }
    });
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..20).map(|key| (key, 2_000)));
}

/// In fast times a submitter asks for many places at once before it wants to be woken. It must not insist on that when times are slow.
fn after_fast_times(gate: &Arc<Gate>) -> Engine<u64, u64> {
    let gate = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(4_096)
        .handle(move |_, slow: &mut u64| {
            if *slow > 0 {
                gate.pass();
                thread::sleep(Duration::from_millis(1)); // paced: the work itself, slow by the engine's measure
            }
        })
        .build()
        .unwrap();
    send(&engine, (0..50_000).map(|n| (n % 16, 0)));
    assert!(engine.wait_quiet(DEADLINE));
    engine
}

fn fill(engine: &Engine<u64, u64>) {
    while engine.try_submit((1, 1)).is_ok() {}
}

#[test]
fn a_blocked_submitter_gets_in_soon_when_times_have_become_slow() {
    for _ in 0..5 {
        let gate = Gate::closed();
        let engine = after_fast_times(&gate);
        let _opens = OpensAtLast(gate.clone());
        fill(&engine);
        let answer = submit_beside(&engine, |handle| handle.submit((2, 0)));
        assert!(answer.recv_timeout(A_MOMENT).is_err());
        // A worker times only some of its quick messages, so it may take dozens until it knows; an eighth of the bound would be 512.
        for passed in 1..=100 {
            gate.admit(1);
            gate.wait_arrived(passed + 1);
        }
        let admission = answer.recv_timeout(Duration::from_secs(5));
        assert!(
            admission.is_ok(),
            "a hundred places are free, the next may take hours, and nobody told the submitter"
        );
    }
}

#[test]
fn a_blocked_submitter_gets_the_place_of_a_message_that_an_operator_skips() {
    for _ in 0..5 {
        let gate = Gate::closed();
        let engine = after_fast_times(&gate);
        let _opens = OpensAtLast(gate.clone());
        engine.pause(NAME);
        fill(&engine);
        let answer = submit_beside(&engine, |handle| handle.submit((2, 0)));
        assert!(answer.recv_timeout(A_MOMENT).is_err());
        assert!(engine.skip_head(&1));
        let admission = answer.recv_timeout(Duration::from_secs(5));
        assert!(admission.is_ok(), "a place is free, and nobody told the submitter");
    }
}

// ── DropOldest ─────────────────────────────────────────────────────────────────────────────────────────────────────

const OLDEST: Overflow = Overflow::DropOldest;

fn oldest(bound: Bound) -> Dropped {
    Dropped { bound, policy: OLDEST, kind: Kind::Event }
}

#[test]
fn drop_oldest_evicts_the_oldest_of_the_dispatcher_whatever_its_key() {
    let f = fixture(|b| b.worker_queue_capacity(3).overflow(OLDEST));
    send(&f.engine, [(1, 0), (2, 0), (1, 1), (3, 0), (1, 2), (3, 1)]);
    let evicted = [(1, 0), (2, 0), (1, 1)].map(|(key, number)| (key, number, oldest(Bound::Dispatcher)));
    assert_eq!(f.dropped.entries(), evicted, "in the order of acceptance, one for each that came in");
    let account = f.engine.snapshot().account;
    assert_eq!((account.accepted, account.dropped, account.outstanding), (6, 3, 3));
    let mut handled = f.drain();
    handled.sort_unstable();
    assert_eq!(handled, [(1, 2), (3, 0), (3, 1)]);
    let drops = f.engine.snapshot().drops;
    assert_eq!((drops.count(Bound::Dispatcher, OLDEST, Kind::Event), drops.total()), (3, 3));
}

#[test]
fn drop_oldest_at_the_engine_takes_from_the_dispatcher_that_the_message_goes_to() {
    let f = fixture(|b| b.ingress_capacity(2).worker_queue_capacity(8).overflow(OLDEST));
    send(&f.engine, [(1, 0), (2, 0), (3, 0)]);
    assert_eq!(f.dropped.entries(), [(1, 0, oldest(Bound::Engine))]);
    assert_eq!(f.drain(), [(2, 0), (3, 0)]);
    send(&f.engine, [(4, 0), (4, 1)]);
    assert!(f.engine.wait_quiet(DEADLINE));
    assert_eq!(f.dropped.len(), 1, "the evicted message's place was the new one's, no more and no less");
}

#[test]
fn drop_oldest_at_a_lane_takes_from_that_lane() {
    let f = fixture(|b| b.lane_capacity(2).overflow(OLDEST));
    send(&f.engine, [(9, 0), (1, 0), (1, 1), (1, 2), (1, 3)]);
    let evicted = [(1, 0, oldest(Bound::Lane)), (1, 1, oldest(Bound::Lane))];
    assert_eq!(f.dropped.entries(), evicted, "the oldest of all is key 9's, and it stays");
    assert_eq!(f.drain(), [(9, 0), (1, 2), (1, 3)]);
    assert_eq!(f.engine.snapshot().drops.count(Bound::Lane, OLDEST, Kind::Event), 2);
}

#[test]
fn drop_oldest_never_evicts_a_control_message() {
    let f = fixture(|b| b.worker_queue_capacity(3).control_reserve(1).overflow(OLDEST));
    f.engine.submit(Message::start(1, 0)).unwrap();
    send(&f.engine, [(1, 1)]);
    f.engine.submit(Message::finish(1, 2)).unwrap();
    send(&f.engine, [(2, 0)]);
    assert_eq!(
        f.dropped.entries(),
        [(1, 1, oldest(Bound::Dispatcher))],
        "pitfall 000.7: neither start nor finish"
    );
    assert_eq!(f.drain(), [(1, 0), (2, 0), (1, 2)], "in the turns of their lanes");
}

#[test]
fn drop_oldest_refuses_when_there_is_nothing_that_may_go() {
    let f = fixture(|b| b.worker_queue_capacity(1).control_reserve(1).overflow(OLDEST));
    f.engine.submit(Message::start(1, 0)).unwrap();
    f.engine.submit(Message::finish(1, 1)).unwrap();
    assert_eq!(f.refused((2, 0)).0, Refusal::Full(Bound::Dispatcher));
    let (reason, message) = f.refused(Message::finish(2, 9));
    assert_eq!(
        (reason, message.kind),
        (Refusal::Full(Bound::Dispatcher), Kind::Finish),
        "given back, not dropped"
    );
    assert_eq!(f.dropped.len(), 0);
}

#[test]
fn drop_oldest_never_takes_what_has_been_started() {
    let gate = Gate::closed();
    let (gate_too, dropped) = (gate.clone(), Log::new());
    let dropped_too = dropped.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(3)
        .overflow(OLDEST)
        .on_drop(move |message: Message<u64, u64>, _| dropped_too.push(message.body))
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0)]);
    gate.wait_arrived(1);
    send(&engine, [(1, 1), (1, 2), (1, 3), (1, 4)]);
    assert_eq!(
        dropped.entries(),
        [1, 2],
        "0 is in flight; its successors have not started, whatever turn they are in"
    );
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    let account = engine.snapshot().account;
    assert_eq!((account.done, account.dropped), (3, 2));
}

#[test]
fn drop_oldest_can_take_whatever_has_not_started_also_from_a_batch() {
    let gate = Gate::closed();
    let (gate_too, dropped) = (gate.clone(), Log::new());
    let dropped_too = dropped.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(3)
        .batch_max(3)
        .overflow(OLDEST)
        .on_drop(move |message: Message<u64, u64>, _| dropped_too.push(message.body))
        .handle_batch(move |_, _: &mut laneway::Batch<'_, u64, u64>| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    assert!(engine.pause(NAME));
    send(&engine, [(1, 0), (1, 1), (1, 2)]);
    assert!(engine.unpause(NAME));
    gate.wait_arrived(1);
    send(&engine, [(1, 3)]);
    assert_eq!(dropped.entries(), [1], "0 is in flight, and nothing was taken with it");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 3);
}

#[test]
fn drop_oldest_can_take_whatever_has_not_started_also_where_messages_are_quick() {
    // A worker that has a dispatcher to itself and knows messages to be quick would take many lanes at once: none of them could make room any more.
    let gate = Gate::closed();
    let (gate_too, dropped) = (gate.clone(), Log::new());
    let dropped_too = dropped.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(64)
        .overflow(OLDEST)
        .on_drop(move |message: Message<u64, u64>, _| dropped_too.push(message.key))
        .handle(move |_, slow: &mut u64| {
            if *slow > 0 {
                gate_too.pass()
            }
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    for _ in 0..50 {
        send(&engine, (0..64).map(|key| (key, 0)));
        assert!(engine.wait_quiet(DEADLINE));
    }
    assert!(engine.pause(NAME));
    send(&engine, (0..64).map(|key| (key, 1)));
    assert!(engine.unpause(NAME));
    gate.wait_arrived(1);
    send(&engine, [(64, 1), (65, 1)]);
    assert_eq!(dropped.entries(), [1, 2], "0 is in flight, and nothing was taken with it");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    let account = engine.snapshot().account;
    assert_eq!((account.done, account.dropped), (50 * 64 + 64, 2));
}

type Set = fn(Builder<u64, u64>) -> Builder<u64, u64>;

/// The bounds at which whatever is oldest makes room, each the only one that can be reached.
const BOUNDS_BY_AGE: [(Bound, Set); 2] = [
    (Bound::Engine, |b| b.ingress_capacity(64).worker_queue_capacity(1_000)),
    (Bound::Dispatcher, |b| b.worker_queue_capacity(64)),
];

/// Workers that run, and what was handled and dropped.
fn running(set: impl FnOnce(Builder<u64, u64>) -> Builder<u64, u64>) -> Fixture {
    let f = fixture(|b| set(b).topology(Topology::pool(2)).overflow(OLDEST));
    assert!(f.engine.unpause(NAME));
    f
}

#[test]
fn drop_oldest_drops_nothing_while_there_is_room() {
    // While workers make room, a submitter that never has more outstanding than the bound loses nothing, however old its idea of what has left.
    // That of one who came too late for a place and finds room after all is `dispatcher::tests::pitfall_000_7_*`.
    for (bound, set) in BOUNDS_BY_AGE {
        let f = running(set);
        let mut sent = 0;
        while sent < 5_000 {
            // Exact: nobody else submits, so there can only be more room a moment later.
            let outstanding = f.engine.snapshot().account.outstanding;
            for _ in outstanding..64 {
                send(&f.engine, [(sent % 10, sent / 10)]);
                sent += 1;
            }
            assert_eq!(f.dropped.entries(), [], "{bound}: {sent} sent, and never more than 64 outstanding");
        }
        assert!(f.engine.wait_quiet(DEADLINE));
        assert_eq!(f.handled.len() as u64, sent, "{bound}");
    }
}

#[test]
fn what_drop_oldest_leaves_under_load_is_in_order_and_the_rest_was_dropped_once() {
    for (bound, set) in BOUNDS_BY_AGE {
        let f = running(set);
        thread::scope(|scope| {
            for producer in 0..3_u64 {
                let handle = f.engine.handle();
                scope.spawn(move || {
                    send(&handle, (0..10_000).map(|number| (producer * 10 + number % 10, number / 10)))
                });
            }
        });
        assert!(f.engine.wait_quiet(DEADLINE));
        let (handled, dropped) = (f.handled.entries(), f.dropped.entries());
        let account = f.engine.snapshot().account;
        assert_eq!(
            (account.accepted, account.done, account.dropped),
            (30_000, handled.len() as u64, dropped.len() as u64),
            "{bound}"
        );
        assert!(dropped.iter().all(|(_, _, why)| *why == oldest(bound)));
        for key in 0..30 {
            let numbers: Vec<u64> =
                handled.iter().filter(|(k, _)| *k == key).map(|(_, number)| *number).collect();
            assert!(numbers.is_sorted_by(|a, b| a < b), "{bound}: the survivors of {key} are in order");
            let mut all: Vec<u64> =
                dropped.iter().filter(|(k, ..)| *k == key).map(|(_, number, _)| *number).collect();
            all.extend(&numbers);
            all.sort_unstable();
            assert_eq!(all, (0..1_000).collect::<Vec<_>>(), "{bound}: of {key} each has one end");
        }
    }
}

#[test]
fn an_eviction_tells_those_who_wait_for_room_in_its_lane_or_for_a_lane() {
    // Both the engine and the dispatcher may evict, while the bound that looks at lanes lets its submitters wait.
    let bounds: [(Bound, Set, (u64, u64)); 3] = [
        (Bound::Lane, |b| b.worker_queue_capacity(3).lane_capacity(1), (1, 1)),
        (Bound::Lanes, |b| b.worker_queue_capacity(3).lanes_max(3), (3, 0)),
        (Bound::Lane, |b| b.worker_queue_capacity(8).ingress_capacity(3).lane_capacity(1), (1, 1)),
    ];
    for (bound, set, message) in bounds {
        let gate = Gate::closed();
        let gate_too = gate.clone();
        let builder = Engine::builder().topology(Topology::pool(1)).overflow(OLDEST);
        let builder = set(builder).overflow_at(Bound::Lane, Overflow::Block);
        let engine = builder
            .overflow_at(Bound::Lanes, Overflow::Block)
            .handle(move |_, _: &mut u64| gate_too.pass())
            .build()
            .unwrap();
        let _opens = OpensAtLast(gate.clone());
        // The only worker, which announces room when it finds nothing to do, does not come to that.
        send(&engine, [(0, 0)]);
        gate.wait_arrived(1);
        send(&engine, [(1, 0), (2, 0)]);
        assert_eq!(engine.try_submit(message).unwrap_err().reason, Refusal::Full(bound));
        let answer = submit_beside(&engine, move |handle| handle.submit(message));
        assert!(answer.recv_timeout(A_MOMENT).is_err(), "{bound}: it waits");
        send(&engine, [if bound == Bound::Lanes { (2, 1) } else { (3, 0) }]);
        let admission = answer.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("{bound}: nobody told it"));
        assert_eq!(admission.unwrap(), Admission::Accepted);
        assert_eq!(engine.snapshot().account.dropped, 2, "{bound}: one for each");
    }
}

// ── DropNewest ─────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn drop_newest_drops_what_comes_and_keeps_what_is_there() {
    type Set = fn(Builder<u64, u64>) -> Builder<u64, u64>;
    let bounds: [(Bound, Set); 4] = [
        (Bound::Engine, |b| b.ingress_capacity(2).worker_queue_capacity(8)),
        (Bound::Dispatcher, |b| b.worker_queue_capacity(2)),
        (Bound::Lane, |b| b.lane_capacity(2)),
        (Bound::Lanes, |b| b.lanes_max(1)),
    ];
    for (bound, set) in bounds {
        let f = fixture(|b| set(b).overflow(Overflow::DropNewest));
        send(&f.engine, [(1, 0), (1, 1)]);
        let key = if bound == Bound::Lanes { 2 } else { 1 };
        assert_eq!(f.engine.submit((key, 2)).unwrap(), Admission::Dropped);
        let why = Dropped { bound, policy: Overflow::DropNewest, kind: Kind::Event };
        assert_eq!(f.dropped.entries(), [(key, 2, why)], "{bound}: on_drop has the message");
        let account = f.engine.snapshot().account;
        assert_eq!(
            (account.accepted, account.dropped, account.outstanding),
            (3, 1, 2),
            "{bound}: it is accounted for"
        );
        assert_eq!(f.drain(), [(1, 0), (1, 1)], "{bound}");
        let drops = f.engine.snapshot().drops;
        assert_eq!((drops.count(bound, Overflow::DropNewest, Kind::Event), drops.total()), (1, 1), "{bound}");
        assert_eq!(drops.count(bound, OLDEST, Kind::Event), 0);
    }
}

#[test]
fn drop_newest_leaves_the_load_as_it_was() {
    // Two dispatchers: one is full and drops, the other has a single message. Placement by load must not take the full one for idle.
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::per_worker(2))
        .worker_queue_capacity(4)
        .overflow(Overflow::DropNewest)
        .handle(move |_, _: &mut u64| gate_too.pass())
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..4).map(|number| (1, number)));
    send(&engine, [(2, 0)]);
    (0..50).for_each(|number| assert_eq!(engine.submit((1, number)).unwrap(), Admission::Dropped));
    let home = |key: u64| engine.explain(&key).unwrap().dispatcher;
    assert_ne!(home(1), home(2));
    for key in 10..12 {
        assert_eq!(engine.submit((key, 0)).unwrap(), Admission::Accepted, "the other dispatcher has room");
        assert_eq!(home(key), home(2));
    }
}

// ── control messages, handlers, batches ────────────────────────────────────────────────────────────────────────────

#[test]
fn control_messages_have_a_reserve_on_top_of_every_bound() {
    for policy in [Overflow::Reject, Overflow::DropNewest, OLDEST] {
        let f = fixture(|b| b.worker_queue_capacity(2).control_reserve(2).overflow(policy));
        send(&f.engine, [(1, 0), (1, 1)]);
        f.engine.submit(Message::start(2, 0)).unwrap();
        f.engine.submit(Message::finish(2, 1)).unwrap();
        assert_eq!(f.dropped.len(), 0, "{policy:?}");
        if policy != OLDEST {
            let (reason, message) = f.refused(Message::finish(3, 0));
            assert_eq!(
                (reason, message.kind),
                (Refusal::Full(Bound::Dispatcher), Kind::Finish),
                "{policy:?}"
            );
        }
        assert_eq!(f.drain().len(), 4, "{policy:?}");
    }
}

#[test]
fn the_reserve_holds_at_the_engine_and_at_the_lane() {
    let f = fixture(|b| {
        b.ingress_capacity(1).worker_queue_capacity(8).control_reserve(1).overflow(Overflow::Reject)
    });
    send(&f.engine, [(1, 0)]);
    f.engine.submit(Message::finish(1, 1)).unwrap();
    assert_eq!(f.refused(Message::finish(1, 2)).0, Refusal::Full(Bound::Engine));

    let f = fixture(|b| b.lane_capacity(1).lanes_max(1).control_reserve(1).overflow(Overflow::Reject));
    send(&f.engine, [(1, 0)]);
    f.engine.submit(Message::finish(1, 1)).unwrap();
    f.engine.submit(Message::start(2, 0)).unwrap();
    assert_eq!(f.refused(Message::finish(1, 2)).0, Refusal::Full(Bound::Lane));
    assert_eq!(f.refused(Message::start(3, 0)).0, Refusal::Full(Bound::Lanes));
}

#[test]
fn a_handler_that_would_block_on_its_own_engine_is_refused() {
    type Set = fn(Builder<u64, u64>) -> Builder<u64, u64>;
    let bounds: [(Bound, Set); 3] = [
        (Bound::Engine, |b| b.ingress_capacity(1).worker_queue_capacity(8)),
        (Bound::Dispatcher, |b| b.worker_queue_capacity(1)),
        (Bound::Lanes, |b| b.lanes_max(1)),
    ];
    for (bound, set) in bounds {
        let (own, answers) = (Arc::new(OnceLock::<Handle<u64, u64>>::new()), Log::new());
        let (own_too, answers_too) = (own.clone(), answers.clone());
        let builder = Engine::builder().topology(Topology::pool(1)).handle(move |context, _: &mut u64| {
            let own = own_too.get().unwrap();
            if *context.key() == 1 {
                answers_too
                    .push(own.submit((2, 7)).map_err(|refused| (refused.reason, refused.message.body)));
                let batch = own.submit_batch([(3, 0), (3, 1)]);
                let reasons = batch.refused.into_iter().map(|refused| refused.reason);
                reasons.for_each(|reason| answers_too.push(Err((reason, 0))));
            }
        });
        let engine = set(builder).build().unwrap();
        assert!(own.set(engine.handle()).is_ok());
        send(&engine, [(1, 0)]);
        assert!(engine.wait_quiet(DEADLINE), "pitfalls 000.6 and 003.6: no deadlock from inside");
        let from_handler = Refusal::FromHandler(bound);
        let expected = [Err((from_handler, 7)), Err((from_handler, 0)), Err((Refusal::AfterRefused, 0))];
        assert_eq!(answers.entries(), expected, "{bound}");
        assert_eq!(engine.snapshot().refusals.count(from_handler), 2);
        // The same submission from outside waits and succeeds.
        send(&engine, [(2, 7)]);
    }
    let text = Refusal::FromHandler(Bound::Dispatcher).to_string();
    assert_eq!(text, "the dispatcher is full, and a handler must not block on its own engine");
}

#[test]
fn a_refusal_in_a_batch_refuses_the_successors_of_its_key_too() {
    let f = fixture(|b| b.lane_capacity(2).overflow(Overflow::Reject));
    let report = f.engine.submit_batch([(1, 0), (1, 1), (1, 2), (2, 0), (1, 3), (2, 1), (1, 4)]);
    assert_eq!((report.accepted, report.dropped), (4, 0));
    let refused: Vec<_> = report.refused.iter().map(|r| (r.message.key, r.message.body, r.reason)).collect();
    let after = Refusal::AfterRefused;
    assert_eq!(refused, [(1, 2, Refusal::Full(Bound::Lane)), (1, 3, after), (1, 4, after)]);
    assert_eq!(after.to_string(), "an earlier message of this key was refused");
}

#[test]
fn room_that_comes_free_in_the_middle_of_a_batch_does_not_reorder_it() {
    // While the batch goes in, workers make room all the time, so without the rule some later messages of a key would get in.
    let witness = Witness::new();
    let witness_too = witness.clone();
    let engine = Engine::builder()
        .topology(Topology::partitioned(2, 1))
        .worker_queue_capacity(8)
        .overflow(Overflow::Reject)
        .handle(move |context, number: &mut u64| witness_too.see(context.key(), *number))
        .build()
        .unwrap();
    let mut next = [0_u64; 8];
    for _ in 0..300 {
        let batch: Vec<(u64, u64)> = (0..8).flat_map(|key| (0..6).map(move |n| (key, n))).collect();
        let report = engine.submit_batch(batch.iter().map(|(key, n)| (*key, next[*key as usize] + n)));
        assert_eq!(report.accepted + report.refused.len(), batch.len());
        let mut refused = [0; 8];
        report.refused.iter().for_each(|r| refused[r.message.key as usize] += 1);
        (0..8).for_each(|key| next[key] += 6 - refused[key]);
    }
    assert!(engine.wait_quiet(DEADLINE));
    witness.verify((0..).zip(next));
}

#[test]
fn a_batch_counts_what_it_drops() {
    let f = fixture(|b| b.worker_queue_capacity(2).overflow(Overflow::DropNewest));
    let report = f.engine.submit_batch((0..5).map(|number| (1, number)));
    assert_eq!((report.accepted, report.dropped, report.refused.len()), (2, 3, 0));
    assert_eq!(f.drain(), [(1, 0), (1, 1)]);
}

#[test]
fn each_bound_has_its_own_policy() {
    let f = fixture(|b| {
        b.worker_queue_capacity(3)
            .lane_capacity(2)
            .overflow_at(Bound::Lane, Overflow::DropNewest)
            .overflow_at(Bound::Dispatcher, Overflow::Reject)
    });
    send(&f.engine, [(1, 0), (1, 1)]);
    assert_eq!(f.engine.submit((1, 2)).unwrap(), Admission::Dropped);
    send(&f.engine, [(2, 0)]);
    assert_eq!(f.refused((3, 0)).0, Refusal::Full(Bound::Dispatcher));
}
