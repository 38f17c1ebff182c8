//! A dispatcher alone, step by step, without threads that work: what may be evicted, when submitters are a crowd, and what a worker that streams takes and leaves.
//!
//! The protocol under all interleavings is in `tests/loom_dispatcher.rs`, and everything together in the simulator.

use super::*;
use crate::message::fingerprint_of;

fn dispatcher(capacity: u64, overflow: Overflow, batch_max: usize) -> Dispatcher<u64, u64> {
    let limits = Limits {
        capacity,
        reserve: 0,
        lane: None,
        lanes: None,
        overflow: [overflow; 4],
        load_counts: false,
        backoff: None,
        sampling: 0,
        keeps: Keeps::USUAL,
    };
    Dispatcher::new("d".to_owned(), limits, None, batch_max, 0)
}

/// As different as those of a hash.
fn fingerprint(key: u64) -> u64 {
    fingerprint_of(key.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

fn item(key: u64, body: u64) -> Item<u64, u64> {
    Item { fingerprint: fingerprint(key), accepted_at: 0, message: (key, body).into() }
}

#[test]
fn pitfall_000_7_room_that_has_come_free_meanwhile_evicts_nobody() {
    let dispatcher = dispatcher(2, Overflow::DropOldest, 1);
    let clock = Clock::real();
    // A submitter that found the dispatcher full comes here. It must not believe what it saw without the lanes lock.
    let offer = |body| dispatcher.offer_looking(item(1, body), 0, None, &clock);
    for body in [1, 2] {
        assert!(matches!(offer(body), Offer::Accepted { evicted: None, .. }), "there was room");
    }
    let Offer::Accepted { evicted: Some(evicted), .. } = offer(3) else {
        panic!("full, and the oldest goes")
    };
    assert_eq!(evicted.message.body, 1);
}

#[test]
fn pitfall_000_7_room_that_has_come_free_in_the_engine_meanwhile_evicts_nobody() {
    let dispatcher = dispatcher(8, Overflow::DropOldest, 1);
    let (clock, bound) = (Clock::real(), EngineBound::new(2, 0));
    bound.count_from(0);
    let submit = |body| match bound.reserve(Kind::Event) {
        true => dispatcher.offer(item(1, body), 0, &clock),
        false => dispatcher.offer_looking(item(1, body), 0, Some(&bound), &clock),
    };
    for body in [1, 2] {
        assert!(matches!(submit(body), Offer::Accepted { evicted: None, .. }), "there was room");
    }
    assert!(!bound.reserve(Kind::Event), "a submitter finds the engine full, ...");
    // ... then messages of another dispatcher leave, and only then it comes to its own.
    bound.release(1).tell(&bound);
    let offer = dispatcher.offer_looking(item(1, 3), 0, Some(&bound), &clock);
    assert!(matches!(offer, Offer::Accepted { evicted: None, .. }), "{offer:?}");
    let Offer::Accepted { evicted: Some(evicted), .. } = submit(4) else {
        panic!("the place that had come free is taken, and the oldest goes")
    };
    assert_eq!((evicted.message.body, evicted.bound), (1, Bound::Engine));
}

#[test]
fn submitters_are_a_crowd_where_they_meet_often_and_not_where_they_meet_the_worker() {
    assert!(is_crowd(1_000, 1_000 - CROWD + 1, true));
    assert!(!is_crowd(1_000, 1_000 - CROWD, true), "rarely");
    assert!(!is_crowd(1_000, 999, false), "the worker had just emptied it");
    assert!(is_crowd(900, 1_000, true), "a lane has left with its messages");
}

/// Has a submitter find the ingress lock taken, by the short way in; says whether submitters are a crowd afterwards.
fn meet(dispatcher: &Dispatcher<u64, u64>) -> bool {
    for _ in 0..1_000 {
        let held = dispatcher.ingress();
        let about_to = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                about_to.wait();
                assert!(dispatcher.push_direct(item(1, 0), 0, &Clock::real()).is_ok());
            });
            about_to.wait();
            // It has all the time that it needs to find it taken. Should it not have come to that, nobody has met, and they try again.
            (0..100).for_each(|_| std::thread::yield_now());
            drop(held);
        });
        let ingress = dispatcher.ingress();
        if ingress.met_at + 1 == ingress.accepted {
            return dispatcher.hints().crowded.load(Ordering::Relaxed) > 0;
        }
    }
    panic!("a lock that is held is found taken")
}

#[test]
fn submitters_in_a_crowd_give_way_every_other_time_that_they_meet() {
    let dispatcher = dispatcher(1_000_000, Overflow::Reject, 128);
    let push = |messages: u64| {
        (0..messages).for_each(|_| assert!(dispatcher.push_direct(item(1, 0), 0, &Clock::real()).is_ok()));
    };
    push(2 * CROWD);
    assert!(!meet(&dispatcher), "for the first time");
    push(2 * CROWD);
    assert!(!meet(&dispatcher), "rarely");
    assert!(meet(&dispatcher), "soon again");
    assert!(!meet(&dispatcher), "who has given way cannot tell how often one is in the way");
    assert!(meet(&dispatcher), "the next one can");
    assert!(!meet(&dispatcher), "and it goes on like that, ...");
    push(2 * CROWD);
    assert!(!meet(&dispatcher), "... until they meet rarely");
}

/// Who would stream, and what it has run.
struct Streamer {
    dispatcher: Dispatcher<u64, u64>,
    wants: Wants<u64>,
    hand: Hand<u64, u64>,
    bound: EngineBound,
    clock: Clock,
    /// Whose turns it has run.
    ran: Vec<u64>,
}

impl Streamer {
    fn new(batch_max: usize) -> Self {
        let (lanes, messages) = (batch_max, 4 * batch_max);
        let wants = Wants {
            worker: 0,
            now: 0,
            rested: false,
            turn: batch_max,
            lanes,
            messages,
            stream: true,
            slow: false,
            holder: None,
        };
        Streamer {
            dispatcher: dispatcher(1_000_000, Overflow::Reject, batch_max),
            wants,
            hand: Hand::new(),
            bound: EngineBound::new(1_000_000, 0),
            clock: Clock::real(),
            ran: Vec::new(),
        }
    }

    fn offer(&self, key: u64) {
        self.offer_with(key, Priority::Normal);
    }

    fn offer_with(&self, key: u64, priority: Priority) {
        let mut item = item(key, 0);
        item.message.priority = priority;
        assert!(matches!(self.dispatcher.offer(item, 0, &self.clock), Offer::Accepted { .. }));
    }

    /// Runs what it has in its hand, and takes more. Says how many messages that were.
    fn run(&mut self) -> u64 {
        let mut tally = Tally::default();
        loop {
            let turn = self.hand.turn();
            let messages = turn.len() as u64;
            self.ran.push(turn.fingerprint);
            while turn.next().is_some() {
                turn.items.clear();
            }
            tally.done += messages;
            if !self.hand.end(Ending::Handled, messages) {
                break;
            }
        }
        let (_, found, _) = self.dispatcher.settle(
            &mut self.hand,
            &tally,
            Some(&self.wants),
            &self.bound,
            &Moves::new(),
            &self.clock,
        );
        assert_eq!(found, Found::Turn);
        tally.done
    }

    fn depth(&self, key: u64) -> usize {
        lock(&self.dispatcher.inner).lanes.depth(fingerprint(key)).unwrap_or(0)
    }
}

/// Messages keep coming, so that there is always another stream; what is due must have its turn all the same.
#[test]
fn a_retry_that_is_due_has_its_turn_while_messages_keep_coming() {
    let time = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let mut streamer = Streamer { clock: Clock::Virtual(time.clone()), ..Streamer::new(4) };
    streamer.offer(1);
    let Streamer { dispatcher, hand, clock, bound, wants, .. } = &mut streamer;
    assert_eq!(dispatcher.claim(wants, hand, clock), Found::Turn);
    hand.turn().next();
    hand.end(Ending::Defer { until: 10, attempts: 1, was_begun: true, note: None }, 0);
    dispatcher.settle(hand, &Tally::default(), None, bound, &Moves::new(), clock);
    (0..100).for_each(|key| streamer.offer(100 + key));
    let Streamer { dispatcher, hand, clock, wants, .. } = &mut streamer;
    assert_eq!(dispatcher.claim(wants, hand, clock), Found::Turn);
    time.store(10, Ordering::SeqCst);
    let mut turns = 0;
    while streamer.hand.turn().fingerprint != fingerprint(1) {
        let ran = streamer.run();
        (0..ran).for_each(|key| streamer.offer(1_000 * (turns + 1) + key));
        turns += 1;
        assert!(turns < 5, "one stream, then the lane that is due, and not yet after {turns}");
    }
    assert_eq!(streamer.hand.turn().attempts, 1);
    streamer.run();
}

/// Where a worker cannot stream nobody else brings what has been accepted to its lanes, however much is ready in them.
#[test]
fn what_comes_beside_a_deep_lane_has_its_turn_also_where_nothing_may_be_streamed() {
    let cases = [
        (Overflow::Reject, Priority::Urgent),
        (Overflow::Reject, Priority::Low),
        (Overflow::DropOldest, Priority::Normal),
    ];
    for (overflow, priority) in cases {
        let mut streamer = Streamer { dispatcher: dispatcher(1_000_000, overflow, 4), ..Streamer::new(4) };
        (0..1_000).for_each(|_| streamer.offer(1));
        // Whoever looks brings all of it into the lane.
        streamer.dispatcher.operate(|_, _, _| ());
        assert_eq!(
            streamer.dispatcher.claim(&streamer.wants, &mut streamer.hand, &streamer.clock),
            Found::Turn
        );
        (0..3).for_each(|_| assert!(streamer.run() > 0));
        streamer.offer_with(2, priority);
        streamer.ran.clear();
        while !streamer.ran.contains(&fingerprint(2)) {
            streamer.run();
            // A low one after those that are preferred to it.
            let before = streamer.ran.len();
            assert!(before <= 40, "{overflow:?}, {priority:?}: not yet after {before} turns of another key");
        }
    }
}

/// What comes is more urgent than what is ready, and has no lane yet: it must not wait in ingress until that is done, nor take turns with it as equals.
#[test]
fn what_comes_goes_before_lanes_of_a_lower_tier_whoever_takes_it() {
    for stream in [true, false] {
        let mut streamer = Streamer::new(4);
        streamer.wants = Wants { stream, lanes: if stream { 4 } else { 1 }, ..streamer.wants };
        let low = 100_000;
        (low..low + 1_000).for_each(|key| streamer.offer_with(key, Priority::Low));
        streamer.dispatcher.operate(|_, _, _| ());
        (0..10).for_each(|key| streamer.offer(key));
        let Streamer { dispatcher, hand, clock, wants, .. } = &mut streamer;
        assert_eq!(dispatcher.claim(wants, hand, clock), Found::Turn);
        for key in (10..).take(500) {
            streamer.offer(key);
            streamer.run();
        }
        let lows: Vec<u64> = (low..low + 1_000).map(fingerprint).collect();
        let is_low = |ran: &&u64| lows.contains(ran);
        let others = streamer.ran.iter().filter(|ran| !is_low(ran)).count();
        assert!(others > 450, "{others} of about 500 normal ones have had their turn");
        if !stream {
            // One message comes for each turn, so there is always a normal one.
            let low = streamer.ran.iter().filter(is_low).count();
            assert!(low <= 500 / 33 + 1, "{low} low ones beside them");
        }
    }
}

/// A burst that has left chunks behind says nothing of the lanes.
#[test]
fn emptied_chunks_are_given_up_and_dense_lanes_stay_where_they_are() {
    let mut streamer = Streamer::new(4);
    streamer.wants.stream = false;
    (0..4_000).for_each(|number| streamer.offer(number % 2_000));
    // Whoever looks brings all into its lane, and leaves the chunks that it came in.
    streamer.dispatcher.operate(|_, _, _| ());
    let before = lock(&streamer.dispatcher.inner).lanes.packing();
    let Streamer { dispatcher, hand, clock, wants, .. } = &mut streamer;
    assert_eq!(dispatcher.claim(wants, hand, clock), Found::Turn);
    assert!(lock(&dispatcher.inner).has_sparse_chunks(&Keeps::USUAL));
    for linger in [0, Keeps::USUAL.linger] {
        streamer.wants.now += linger;
        streamer.run();
    }
    let inner = lock(&streamer.dispatcher.inner);
    assert!(!inner.has_sparse_chunks(&Keeps::USUAL) && inner.inbox.places_to_spare() == 0);
    assert_eq!(inner.lanes.packing(), before);
}

/// What a stream passes by of a key that has a lane goes there. If that were more than a turn takes from it, a hot lane, though of less than half of all messages, would
/// grow until it had all places of the dispatcher.
#[test]
fn a_hot_lane_beside_streams_shrinks() {
    let mut streamer = Streamer::new(128);
    (0..2_000).for_each(|_| streamer.offer(0));
    assert_eq!(streamer.dispatcher.claim(&streamer.wants, &mut streamer.hand, &streamer.clock), Found::Turn);
    let mut key = 0;
    for _ in 0..1_000 {
        for _ in 0..streamer.run() {
            key += 1;
            // 46 of 100 are of the hot key.
            streamer.offer(if key * 46 % 100 < 46 { 0 } else { key });
        }
    }
    let depth = streamer.depth(0);
    assert!(depth <= 256, "{depth} of about 2,000 wait in one lane");
}

/// The one that was about to be handled is out of its chunk already when the turn gives way.
#[test]
fn what_a_stream_leaves_goes_back_in_its_order() {
    let mut streamer = Streamer::new(128);
    for body in 0..4 {
        streamer.dispatcher.offer(item(1, body), 0, &streamer.clock);
    }
    let Streamer { dispatcher, hand, clock, bound, wants, .. } = &mut streamer;
    assert_eq!(dispatcher.claim(wants, hand, clock), Found::Turn);
    assert_eq!((hand.turn().stream.len(), hand.turn().items.len()), (4, 0), "as it came");
    assert_eq!(hand.turn().next().unwrap().message.body, 0);
    hand.end(Ending::Handled, 0);
    dispatcher.settle(hand, &Tally::default(), None, bound, &Moves::new(), clock);
    assert_eq!(dispatcher.claim(&Wants { stream: false, ..*wants }, hand, clock), Found::Turn);
    let bodies: Vec<u64> = hand.turn().each().map(|(_, body)| *body).collect();
    assert_eq!(bodies, [0, 1, 2, 3]);
    hand.turn().items.clear();
    hand.end(Ending::Handled, 4);
    dispatcher.settle(hand, &Tally { done: 4, ..Tally::default() }, None, bound, &Moves::new(), clock);
}

#[test]
fn what_waits_behind_a_message_in_a_stream_is_not_taken_for_the_head() {
    let mut streamer = Streamer::new(4);
    streamer.offer(1);
    streamer.dispatcher.claim(&streamer.wants, &mut streamer.hand, &streamer.clock);
    assert!(streamer.dispatcher.is_streaming());
    streamer.offer(1);
    let head = fingerprint(1);
    let taken = streamer
        .dispatcher
        .operate(|lanes, _, _| (lanes.skip_head(head).is_some(), lanes.withdraw(head).is_some()));
    assert_eq!(taken, (false, false), "its head is in flight");
}

/// A worker lets messages gather only where it would have nothing to do meanwhile.
#[test]
fn a_stream_beside_a_lane_that_is_ready_is_not_all_there_is() {
    let mut streamer = Streamer::new(4);
    (0..10).for_each(|_| streamer.offer(0));
    streamer.dispatcher.claim(&streamer.wants, &mut streamer.hand, &streamer.clock);
    assert_eq!(streamer.hand.drained(), None, "six wait in a lane");
    streamer.run();
    streamer.run();
    streamer.offer(1);
    streamer.run();
    assert_eq!(streamer.hand.drained(), Some(1), "nothing else is there");
}
