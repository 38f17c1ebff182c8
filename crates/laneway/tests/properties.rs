//! The engine against a naive model of it: random programs, and exactly the same results.
//!
//! While its one dispatcher is paused nothing runs, so what an engine does with a program of submissions, parkings, resumptions and skips is determined.
//! Then it runs until it is quiet, one message per turn, which with one worker is determined as well: lanes take turns in rounds, in the order in which they
//! became ready. The model does the same with a plain list per key, in a few dozen lines that anybody can check, and both must agree on
//! every answer, every dropped message, and the order of everything that was handled.

mod witness;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use laneway::{Admission, Bound, Dropped, Engine, Kind, Message, Outcome, Overflow, Refusal, Topology};
use proptest::prelude::*;
use witness::{DEADLINE, Log};

/// A message of the tests: its key, and its number among all that were ever submitted.
type Id = (u64, u64);

#[derive(Clone, Copy, Debug)]
struct Settings {
    capacity: usize,
    reserve: usize,
    lane: Option<usize>,
    lanes: Option<usize>,
    policy: Overflow,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Submit(u64, Kind),
    Batch(u64, u64),
    Park(u64),
    Resume(u64),
    Skip(u64),
}

/// What one operation answered.
#[derive(Clone, Debug, PartialEq)]
enum Answer {
    Submitted(Result<Admission, Refusal>),
    Batch(Vec<Result<Admission, Refusal>>),
    Operated(bool),
}

/// What the handler decides, by the message's number alone.
fn outcome(number: u64) -> Outcome {
    match number % 11 {
        3 => Outcome::Skip,
        6 => Outcome::Park,
        9 => Outcome::ParkLane,
        _ => Outcome::Done,
    }
}

// ── the model ──────────────────────────────────────────────────────────────────────────────────────────────────────

#[derive(Clone, Copy, Debug, PartialEq)]
struct Waiting {
    number: u64,
    /// Neither a control message nor started.
    evictable: bool,
}

#[derive(Debug, Default)]
struct Lane {
    waiting: VecDeque<Waiting>,
    aside: VecDeque<Waiting>,
    parked: bool,
    /// In which round it had its last turn, or was made.
    served: u32,
}

impl Lane {
    fn depth(&self) -> usize {
        self.waiting.len() + self.aside.len()
    }
}

/// A dispatcher with one worker that handles one message per turn.
#[derive(Debug)]
struct Model {
    settings: Settings,
    lanes: BTreeMap<u64, Lane>,
    /// Lanes that could run: in this round, and in the next.
    ready: VecDeque<u64>,
    next: VecDeque<u64>,
    round: u32,
    handled: Vec<Id>,
    failed: Vec<Id>,
    dropped: Vec<(Id, Dropped)>,
}

impl Model {
    fn new(settings: Settings) -> Self {
        let (lanes, ready, next) = (BTreeMap::new(), VecDeque::new(), VecDeque::new());
        let (handled, failed, dropped) = (Vec::new(), Vec::new(), Vec::new());
        Model { settings, lanes, ready, next, round: 0, handled, failed, dropped }
    }

    /// Who has not had its turn in this round, and was there when it began, has it still.
    fn make_ready(&mut self, key: u64) {
        if self.ready.contains(&key) || self.next.contains(&key) {
            return;
        }
        let is_behind = self.lanes[&key].served < self.round;
        if is_behind { &mut self.ready } else { &mut self.next }.push_back(key);
    }

    fn not_ready(&mut self, key: u64) {
        self.ready.retain(|ready| *ready != key);
        self.next.retain(|ready| *ready != key);
    }

    fn pop_ready(&mut self) -> Option<u64> {
        if self.ready.is_empty() && !self.next.is_empty() {
            std::mem::swap(&mut self.ready, &mut self.next);
            self.round += 1;
        }
        self.ready.pop_front()
    }

    fn outstanding(&self) -> usize {
        self.lanes.values().map(Lane::depth).sum()
    }

    fn full_bound(&self, key: u64, kind: Kind) -> Option<Bound> {
        let reserve = if kind.is_control() { self.settings.reserve } else { 0 };
        let depth = self.lanes.get(&key).map(Lane::depth);
        if self.settings.lane.is_some_and(|limit| depth.unwrap_or(0) >= limit + reserve) {
            return Some(Bound::Lane);
        }
        if depth.is_none() && self.settings.lanes.is_some_and(|limit| self.lanes.len() >= limit + reserve) {
            return Some(Bound::Lanes);
        }
        (self.outstanding() >= self.settings.capacity + reserve).then_some(Bound::Dispatcher)
    }

    fn submit(&mut self, key: u64, kind: Kind, number: u64) -> Result<Admission, Refusal> {
        if let Some(bound) = self.full_bound(key, kind) {
            let policy = self.settings.policy;
            match policy {
                Overflow::DropOldest if bound != Bound::Lanes => {
                    let victim = self.victim((bound == Bound::Lane).then_some(key));
                    let (of, oldest) = victim.ok_or(Refusal::Full(bound))?;
                    self.lanes.get_mut(&of).unwrap().waiting.retain(|waiting| waiting.number != oldest);
                    self.tidy(of);
                    self.dropped.push(((of, oldest), Dropped { bound, policy, kind: Kind::Event }));
                }
                Overflow::DropNewest if !kind.is_control() => {
                    self.dropped.push(((key, number), Dropped { bound, policy, kind }));
                    return Ok(Admission::Dropped);
                }
                _ => return Err(Refusal::Full(bound)),
            }
        }
        let fresh = Lane { served: self.round, ..Lane::default() };
        let lane = self.lanes.entry(key).or_insert(fresh);
        lane.waiting.push_back(Waiting { number, evictable: !kind.is_control() });
        if !lane.parked {
            self.make_ready(key);
        }
        Ok(Admission::Accepted)
    }

    /// The event that has waited longest, in one lane or in all. Numbers are given in the order of submission.
    fn victim(&self, within: Option<u64>) -> Option<Id> {
        let lanes = self.lanes.iter().filter(|(key, _)| within.is_none_or(|only| only == **key));
        let events = lanes.flat_map(|(key, lane)| {
            lane.waiting.iter().filter(|waiting| waiting.evictable).map(move |waiting| (waiting.number, *key))
        });
        events.min().map(|(number, key)| (key, number))
    }

    /// A lane that has lost a message: not ready without one that waits, and gone without any.
    fn tidy(&mut self, key: u64) {
        let lane = &self.lanes[&key];
        if lane.waiting.is_empty() {
            if lane.aside.is_empty() {
                self.lanes.remove(&key);
            }
            self.not_ready(key);
        }
    }

    fn park(&mut self, key: u64) -> bool {
        let Some(lane) = self.lanes.get_mut(&key) else { return false };
        lane.parked = true;
        self.not_ready(key);
        true
    }

    fn resume(&mut self, key: u64) -> bool {
        let Some(lane) = self.lanes.get_mut(&key) else { return false };
        let returned = !lane.aside.is_empty();
        while let Some(waiting) = lane.aside.pop_back() {
            lane.waiting.push_front(waiting);
        }
        let unparked = std::mem::take(&mut lane.parked);
        self.make_ready(key);
        returned || unparked
    }

    fn skip(&mut self, key: u64) -> bool {
        let Some(lane) = self.lanes.get_mut(&key) else { return false };
        let head = lane.waiting.pop_front().or_else(|| lane.aside.pop_front());
        self.failed.push((key, head.expect("a lane has a message").number));
        self.tidy(key);
        true
    }

    /// Runs until nothing can.
    fn run(&mut self) {
        while let Some(key) = self.pop_ready() {
            let lane = self.lanes.get_mut(&key).expect("a ready lane exists");
            lane.served = self.round;
            let message = lane.waiting.pop_front().expect("and has a message");
            let started = Waiting { evictable: false, ..message };
            self.handled.push((key, message.number));
            match outcome(message.number) {
                Outcome::Skip => self.failed.push((key, message.number)),
                Outcome::Park => lane.aside.push_back(started),
                Outcome::ParkLane => {
                    lane.waiting.push_front(started);
                    lane.parked = true;
                    continue;
                }
                _ => {}
            }
            if !lane.waiting.is_empty() {
                self.make_ready(key);
            }
            self.tidy(key);
        }
    }

    fn left(&self) -> BTreeMap<u64, Vec<u64>> {
        let numbers =
            |lane: &Lane| lane.aside.iter().chain(&lane.waiting).map(|waiting| waiting.number).collect();
        self.lanes.iter().map(|(key, lane)| (*key, numbers(lane))).collect()
    }
}

// ── the engine ─────────────────────────────────────────────────────────────────────────────────────────────────────

struct Real {
    engine: Engine<u64, u64>,
    handled: Arc<Log<Id>>,
    failed: Arc<Log<Id>>,
    dropped: Arc<Log<(Id, Dropped)>>,
}

impl Real {
    fn new(settings: Settings) -> Self {
        let (handled, failed, dropped) = (Log::new(), Log::new(), Log::new());
        let (handled_too, failed_too, dropped_too) = (handled.clone(), failed.clone(), dropped.clone());
        let mut builder = Engine::builder()
            .topology(Topology::pool(1))
            .batch_max(1)
            .worker_queue_capacity(settings.capacity)
            .control_reserve(settings.reserve)
            .overflow(settings.policy)
            .on_fail(move |message: Message<u64, u64>, _| failed_too.push((message.key, message.body)))
            .on_drop(move |message: Message<u64, u64>, why| {
                dropped_too.push(((message.key, message.body), why))
            })
            .handle(move |context, number: &mut u64| {
                handled_too.push((*context.key(), *number));
                outcome(*number)
            });
        if let Some(lane) = settings.lane {
            builder = builder.lane_capacity(lane);
        }
        if let Some(lanes) = settings.lanes {
            builder = builder.lanes_max(lanes);
        }
        let engine = builder.build().unwrap();
        assert!(engine.pause("pool-0"));
        Real { engine, handled, failed, dropped }
    }

    fn run(&self) {
        assert!(self.engine.unpause("pool-0"));
        assert!(self.engine.wait_quiet(DEADLINE), "{}", self.engine.snapshot().account);
        assert!(self.engine.pause("pool-0"));
    }
}

/// Does one operation with both; `next` numbers the messages.
fn both(real: &Real, model: &mut Model, op: Op, next: &mut u64) -> (Answer, Answer) {
    match op {
        Op::Submit(key, kind) => {
            let number = *next;
            *next += 1;
            let message = Message { kind, ..Message::new(key, number) };
            let answer = real.engine.submit(message).map_err(|refused| refused.reason);
            (Answer::Submitted(answer), Answer::Submitted(model.submit(key, kind, number)))
        }
        Op::Batch(first, second) => batch(real, model, [first, second, first, second, first], next),
        Op::Park(key) => {
            (Answer::Operated(real.engine.park(&key, "told to")), Answer::Operated(model.park(key)))
        }
        Op::Resume(key) => (Answer::Operated(real.engine.resume(&key)), Answer::Operated(model.resume(key))),
        Op::Skip(key) => (Answer::Operated(real.engine.skip_head(&key)), Answer::Operated(model.skip(key))),
    }
}

/// A batch is its messages one by one, except that after a refusal those of the same key are refused as well.
fn batch(real: &Real, model: &mut Model, keys: [u64; 5], next: &mut u64) -> (Answer, Answer) {
    let messages: Vec<Id> = keys.into_iter().zip(*next..).collect();
    *next += 5;
    let report = real.engine.submit_batch(messages.iter().copied());
    let mut refused: Vec<(u64, Refusal)> =
        report.refused.iter().map(|r| (r.message.body, r.reason)).collect();
    refused.sort_by_key(|(number, _)| *number);
    let mut expected = Vec::new();
    let (mut accepted, mut dropped, mut barred) = (0, 0, Vec::new());
    for (key, number) in messages {
        let answer = match barred.contains(&key) {
            true => Err(Refusal::AfterRefused),
            false => model.submit(key, Kind::Event, number),
        };
        match answer {
            Ok(Admission::Accepted) => accepted += 1,
            Ok(Admission::Dropped) => dropped += 1,
            Err(reason) => {
                barred.push(key);
                expected.push((number, reason));
            }
        }
    }
    let whole = |accepted, dropped, refused: Vec<(u64, Refusal)>| {
        let refused = refused.into_iter().map(|(_, reason)| Err(reason));
        Answer::Batch(
            [
                vec![Ok(Admission::Accepted); accepted],
                vec![Ok(Admission::Dropped); dropped],
                refused.collect(),
            ]
            .concat(),
        )
    };
    (whole(report.accepted, report.dropped, refused), whole(accepted, dropped, expected))
}

fn settings() -> impl Strategy<Value = Settings> {
    let policy = prop_oneof![Just(Overflow::Reject), Just(Overflow::DropOldest), Just(Overflow::DropNewest)];
    let (lane, lanes) = (proptest::option::of(1..4_usize), proptest::option::of(1..4_usize));
    (1..10_usize, 0..3_usize, lane, lanes, policy).prop_map(|(capacity, reserve, lane, lanes, policy)| {
        Settings { capacity, reserve, lane, lanes, policy }
    })
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let key = 0..5_u64;
    let kind = prop_oneof![6 => Just(Kind::Event), 1 => Just(Kind::Start), 1 => Just(Kind::Finish)];
    let op = prop_oneof![
        8 => (key.clone(), kind).prop_map(|(key, kind)| Op::Submit(key, kind)),
        1 => (key.clone(), key.clone()).prop_map(|(first, second)| Op::Batch(first, second)),
        1 => key.clone().prop_map(Op::Park),
        1 => key.clone().prop_map(Op::Resume),
        1 => key.prop_map(Op::Skip),
    ];
    proptest::collection::vec(op, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_engine_does_what_the_model_does(settings in settings(), rounds in proptest::collection::vec(ops(), 1..4)) {
        let (real, mut model, mut next) = (Real::new(settings), Model::new(settings), 0);
        for ops in rounds {
            for op in ops {
                let (answer, expected) = both(&real, &mut model, op, &mut next);
                prop_assert_eq!(answer, expected, "{:?}", op);
            }
            prop_assert_eq!(real.engine.snapshot().account.outstanding as usize, model.outstanding());
            // Looking at the lanes brings everything that was accepted into them.
            prop_assert_eq!(real.engine.lanes_by_depth(100).len(), model.lanes.len());
            prop_assert_eq!(real.engine.snapshot().dispatchers[0].active_lanes, model.lanes.len());
            real.run();
            model.run();
            prop_assert_eq!(real.handled.entries(), model.handled.clone(), "what was handled, in order");
            prop_assert_eq!(real.failed.entries(), model.failed.clone(), "what failed");
            prop_assert_eq!(real.dropped.entries(), model.dropped.clone(), "what was dropped, and why");
        }
        let report = real.engine.shutdown(std::time::Duration::ZERO);
        let mut returned = BTreeMap::<u64, Vec<u64>>::new();
        report.returned.into_iter().for_each(|message| returned.entry(message.key).or_default().push(message.body));
        prop_assert_eq!(returned, model.left(), "what is left, per key in order");
        prop_assert!(report.account.balances());
    }
}
