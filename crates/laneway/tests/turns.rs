//! Turn handlers: consecutive messages of one key, one after the other; order, counts and failures are those of any other handler.

mod witness;

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering::SeqCst},
};
use std::time::Duration;

use laneway::{Context, Engine, Failure, Message, Messages, Outcome, RetryPolicy, Topology, TurnHandler};
use witness::{DEADLINE, send};

/// Notes what it handles; some messages fail in one way or another.
#[derive(Clone, Default)]
struct Notes {
    handled: Arc<Mutex<Vec<(u8, u32)>>>,
    calls: Arc<AtomicU64>,
}

impl TurnHandler<u8, u32> for Notes {
    fn handle(&self, context: &Context<'_, u8>, turn: &mut Messages<'_, '_, u8, u32>) -> Outcome {
        self.calls.fetch_add(1, SeqCst);
        while let Some(body) = turn.next() {
            match *body % 10 {
                3 => std::panic::resume_unwind(Box::new("three")),
                5 => return Outcome::Skip,
                7 if context.attempt() == 1 => return Outcome::Retry,
                _ => self.handled.lock().unwrap().push((*context.key(), *body)),
            }
        }
        Outcome::Done
    }
}

#[test]
fn a_turn_handler_sees_every_message_once_and_in_order() {
    let notes = Notes::default();
    let retry = RetryPolicy { base: Duration::from_micros(10), ..RetryPolicy::default() };
    let retry = RetryPolicy { max_attempts: 2, ..retry };
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .retry(retry)
        .turn_handler(notes.clone())
        .build()
        .unwrap();
    let messages = (0..1_000_u32).flat_map(|body| [(1_u8, body), (2, body)]);
    send(&engine, messages);
    assert!(engine.wait_quiet(DEADLINE));
    let report = engine.shutdown(DEADLINE);
    // Threes fail at both attempts, fives are skipped, sevens succeed at the second attempt.
    let expected: Vec<u32> = (0..1_000).filter(|body| ![3, 5].contains(&(body % 10))).collect();
    let handled = notes.handled.lock().unwrap();
    for key in [1, 2] {
        let of_key: Vec<u32> = handled.iter().filter(|(of, _)| *of == key).map(|(_, body)| *body).collect();
        assert_eq!(of_key, expected, "key {key}");
    }
    assert_eq!((report.account.done, report.account.failed), (1_600, 400));
    assert!(report.account.balances() && report.account.outstanding == 0);
}

/// Finds the key of each message in its body, too.
struct SameKey {
    others: Arc<AtomicU64>,
}

impl TurnHandler<u64, u64> for SameKey {
    fn handle(&self, context: &Context<'_, u64>, turn: &mut Messages<'_, '_, u64, u64>) -> Outcome {
        while let Some(body) = turn.next() {
            self.others.fetch_add(u64::from(body != context.key()), SeqCst);
        }
        Outcome::Done
    }
}

/// A worker that has its dispatcher to itself once took messages of many keys as one turn, and the handler was told the key of the first for all of them.
#[test]
fn a_turn_is_of_one_key_also_where_a_worker_is_alone() {
    let others = Arc::new(AtomicU64::new(0));
    let handler = SameKey { others: others.clone() };
    let engine =
        Engine::builder().topology(Topology::partitioned(1, 1)).turn_handler(handler).build().unwrap();
    for _ in 0..50 {
        send(&engine, (0..200_u64).map(|key| (key, key)));
        assert!(engine.wait_quiet(DEADLINE));
    }
    assert_eq!(engine.snapshot().account.done, 10_000);
    assert_eq!(others.load(SeqCst), 0, "messages whose key was said to be another");
}

#[test]
fn a_turn_has_more_than_one_message_where_they_are_quick() {
    let notes = Notes::default();
    let engine = Engine::builder().topology(Topology::pool(1)).turn_handler(notes.clone()).build().unwrap();
    assert!(engine.pause("pool-0"));
    send(&engine, (0..5_000_u32).map(|number| (1_u8, number * 10)));
    assert!(engine.unpause("pool-0") && engine.wait_quiet(DEADLINE));
    assert_eq!(notes.handled.lock().unwrap().len(), 5_000);
    assert!(notes.calls.load(SeqCst) < 4_000, "{} calls", notes.calls.load(SeqCst));
}

/// Looks for the state of a key before it asks for a message, and does not find it.
struct Stateless {
    calls: Arc<AtomicU64>,
}

impl TurnHandler<u8, u32> for Stateless {
    fn handle(&self, context: &Context<'_, u8>, _: &mut Messages<'_, '_, u8, u32>) -> Outcome {
        self.calls.fetch_add(1, SeqCst);
        match context.key() {
            1 => std::panic::resume_unwind(Box::new("no state")),
            2 => Outcome::Retry,
            _ => Outcome::Done,
        }
    }
}

/// It was called again at once, for ever, without an attempt being counted.
#[test]
fn a_call_that_ends_before_it_has_asked_for_a_message_is_an_attempt_at_the_first() {
    let calls = Arc::new(AtomicU64::new(0));
    let retry = RetryPolicy { base: Duration::from_micros(10), max_attempts: 2, ..RetryPolicy::default() };
    let failed = Arc::new(Mutex::new(Vec::new()));
    let told = failed.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(retry)
        .on_fail(move |message: Message<u8, u32>, failure| {
            told.lock().unwrap().push((message.key, message.body, failure.attempts));
        })
        .turn_handler(Stateless { calls: calls.clone() })
        .build()
        .unwrap();
    for key in 1..=3 {
        send(&engine, (0..3_u32).map(|body| (key, body)));
        assert!(engine.wait_quiet(DEADLINE), "key {key}");
    }
    let report = engine.shutdown(DEADLINE);
    assert_eq!((report.account.done, report.account.failed), (0, 9));
    let expected: Vec<_> = (1..=3).flat_map(|key| (0..3).map(move |body| (key, body, 2))).collect();
    assert_eq!(*failed.lock().unwrap(), expected, "each after its attempts, in order");
    assert_eq!(calls.load(SeqCst), 18);
}

/// Messages that stand for a thousand pieces each, of which they have three at a time.
struct Pieces {
    left: [AtomicU64; 3],
    order: Arc<Mutex<Vec<(usize, u64)>>>,
}

impl TurnHandler<u8, usize> for Pieces {
    fn handle(&self, _: &Context<'_, u8>, turn: &mut Messages<'_, '_, u8, usize>) -> Outcome {
        while let Some(&mut body) = turn.next() {
            for piece in 1.. {
                let number = self.left[body].fetch_sub(1, SeqCst);
                turn.waited(Duration::from_micros(number));
                self.order.lock().unwrap().push((body, number));
                if number == 1 {
                    break;
                }
                if piece == 3 || !turn.next_piece() {
                    turn.again();
                    break;
                }
            }
        }
        Outcome::Done
    }
}

#[test]
fn a_message_that_comes_again_goes_behind_the_others_of_its_lane_and_its_lane_behind_other_lanes() {
    for topology in [Topology::pool(1), Topology::partitioned(1, 1)] {
        let order = Arc::new(Mutex::new(Vec::new()));
        let pieces = Pieces { left: [1_000.into(), 1_000.into(), 1_000.into()], order: order.clone() };
        let engine = Engine::builder().topology(topology).turn_handler(pieces).build().unwrap();
        let name = engine.snapshot().dispatchers[0].name.clone();
        assert!(engine.pause(&name));
        send(&engine, [(0_u8, 0_usize), (0, 1), (1, 2)]);
        assert!(engine.unpause(&name) && engine.wait_quiet(DEADLINE));
        let snapshot = engine.snapshot();
        let stats = &snapshot.dispatchers[0];
        let counted = (snapshot.account.done, stats.dispatched, snapshot.workers[0].handled);
        assert_eq!(counted, (3, 3_000, 3_000));
        assert_eq!(stats.waiting.samples(), 3_000, "each said how long it had waited");
        let order = order.lock().unwrap();
        for body in 0..3 {
            let of_body: Vec<u64> =
                order.iter().filter(|(of, _)| *of == body).map(|(_, number)| *number).collect();
            assert_eq!(of_body, (1..=1_000).rev().collect::<Vec<_>>(), "body {body}");
        }
        // Until the first of them has come to its end: a turn that gave way early leaves the last ones out of step, and then nobody waits.
        let all_there = order.iter().position(|(_, number)| *number == 1).expect("each comes to its end");
        let longest = order[..all_there].chunk_by(|one, other| one.0 == other.0).map(<[_]>::len).max();
        assert_eq!(longest, Some(3), "none goes on while others wait");
        assert_eq!(engine.shutdown(DEADLINE).account.outstanding, 0);
    }
}

/// Notes something about even messages, and fails at odd ones.
struct Chatty;

impl TurnHandler<u8, u32> for Chatty {
    fn handle(&self, context: &Context<'_, u8>, turn: &mut Messages<'_, '_, u8, u32>) -> Outcome {
        while let Some(body) = turn.next() {
            if !body.is_multiple_of(2) {
                return Outcome::Failed(format!("the {body}th"));
            }
            context.note("all is well");
        }
        Outcome::Done
    }
}

/// Once it was told as the reason of the next message of the turn that failed.
#[test]
fn a_note_is_forgotten_with_the_message_that_it_was_about() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let told_too = told.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(RetryPolicy::never())
        .on_fail(move |message: Message<u8, u32>, failure: Failure| {
            told_too.lock().unwrap().push((message.body, failure.note));
        })
        .turn_handler(Chatty)
        .build()
        .unwrap();
    send(&engine, (0..1_000_u32).map(|number| (1_u8, number)));
    assert!(engine.wait_quiet(DEADLINE));
    let told = told.lock().unwrap();
    assert_eq!(told.len(), 500);
    for (number, note) in &*told {
        assert_eq!(*note, Some(format!("the {number}th")));
    }
}
