//! The index against a model that is too simple to be wrong: a list of messages, and the rule of `index.rs` read aloud over it.
//!
//! Random operations run on both. After each claim every message must have been allowed to go at that moment, and if fewer came than
//! were asked for, none may be left that could have gone. Answers to settlements and extensions, counts and standings must be the same.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

#[derive(Clone, Debug, PartialEq)]
enum Holding {
    Waiting,
    /// Waits, and its old holder could still come in time.
    Lapsed {
        consumer: ConsumerId,
        generation: u64,
        deadline: Millis,
    },
    Held {
        consumer: ConsumerId,
        generation: u64,
        deadline: Millis,
    },
    Ending {
        consumer: ConsumerId,
        generation: u64,
        deadline: Millis,
    },
    Returning {
        consumer: ConsumerId,
        generation: u64,
        deadline: Millis,
    },
}

#[derive(Clone, Debug)]
struct Thing {
    sequence: Sequence,
    group: Option<u64>,
    due: Millis,
    attempts: u32,
    holding: Holding,
}

impl Thing {
    fn out_to(&self) -> Option<ConsumerId> {
        match self.holding {
            Holding::Waiting | Holding::Lapsed { .. } => None,
            Holding::Held { consumer, .. }
            | Holding::Ending { consumer, .. }
            | Holding::Returning { consumer, .. } => Some(consumer),
        }
    }
}

#[derive(Default)]
struct Model {
    now: Millis,
    things: Vec<Thing>,
}

impl Model {
    fn tick(&mut self, now: Millis) {
        self.now = now;
        for thing in &mut self.things {
            if let Holding::Held { consumer, generation, deadline } = thing.holding
                && deadline <= now
            {
                thing.holding = Holding::Lapsed { consumer, generation, deadline };
            }
        }
    }

    /// The rule.
    fn may_go(&self, thing: &Thing, to: ConsumerId) -> bool {
        if thing.out_to().is_some() || thing.due > self.now {
            return false;
        }
        let Some(group) = thing.group else { return true };
        let mut others = self.things.iter().filter(|other| other.group == Some(group));
        others.all(|other| {
            if matches!(other.holding, Holding::Returning { .. }) {
                return false;
            }
            match other.sequence.cmp(&thing.sequence) {
                std::cmp::Ordering::Less => other.out_to() == Some(to),
                std::cmp::Ordering::Equal => true,
                std::cmp::Ordering::Greater => other.out_to().is_none(),
            }
        })
    }

    fn hand_out(&mut self, claim: Claimed, to: ConsumerId, deadline: Millis) {
        let at = self.find(claim.sequence).expect("the index hands out what is there");
        assert!(self.may_go(&self.things[at], to), "{:?} to {to} in {:?}", self.things[at], self.things);
        let group = self.things[at].group;
        for thing in &mut self.things {
            let lapsed = matches!(thing.holding, Holding::Lapsed { .. });
            if lapsed && group.is_some() && thing.group == group {
                thing.holding = Holding::Waiting;
            }
        }
        let thing = &mut self.things[at];
        thing.attempts += 1;
        assert_eq!(claim.attempt, thing.attempts);
        thing.holding = Holding::Held { consumer: to, generation: claim.generation, deadline };
    }

    fn find(&self, sequence: Sequence) -> Option<usize> {
        self.things.iter().position(|thing| thing.sequence == sequence)
    }

    /// The thing whose receipt this is, if it is still good.
    fn good(&mut self, sequence: Sequence, receipt: u64) -> Option<(usize, ConsumerId, Millis)> {
        let at = self.find(sequence)?;
        match self.things[at].holding {
            Holding::Held { consumer, generation, deadline }
            | Holding::Lapsed { consumer, generation, deadline }
                if generation == receipt =>
            {
                Some((at, consumer, deadline))
            }
            _ => None,
        }
    }

    fn out(&self) -> usize {
        self.things.iter().filter(|thing| thing.out_to().is_some()).count()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Append {
        group: Option<u8>,
        delay: Millis,
    },
    Claim {
        consumer: ConsumerId,
        most: usize,
        lease: Millis,
    },
    /// Claims and thinks better of it.
    Unclaim {
        consumer: ConsumerId,
        most: usize,
    },
    /// Claims, and cannot read every so-manieth.
    PutBack {
        consumer: ConsumerId,
        most: usize,
        every: usize,
        delay: Millis,
    },
    Begin {
        receipt: usize,
        intent: bool,
    },
    /// Ends what was begun: written, or not.
    Finish {
        begun: usize,
        written: bool,
        delay: Millis,
    },
    Extend {
        receipt: usize,
        lease: Millis,
    },
    Pass {
        millis: Millis,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (prop::option::weighted(0.85, 0..3u8), prop_oneof![4 => Just(0), 1 => 1..40u64])
            .prop_map(|(group, delay)| Step::Append { group, delay }),
        6 => (0..3u32, 1..6usize, 1..60u64)
            .prop_map(|(consumer, most, lease)| Step::Claim { consumer, most, lease }),
        1 => (0..3u32, 1..6usize).prop_map(|(consumer, most)| Step::Unclaim { consumer, most }),
        1 => (0..3u32, 1..6usize, 1..4usize, 0..40u64)
            .prop_map(|(consumer, most, every, delay)| Step::PutBack { consumer, most, every, delay }),
        7 => (0..32usize, any::<bool>()).prop_map(|(receipt, intent)| Step::Begin { receipt, intent }),
        7 => (0..8usize, prop::bool::weighted(0.8), prop_oneof![Just(0), 1..40u64])
            .prop_map(|(begun, written, delay)| Step::Finish { begun, written, delay }),
        2 => (0..32usize, 1..60u64).prop_map(|(receipt, lease)| Step::Extend { receipt, lease }),
        4 => (1..30u64).prop_map(|millis| Step::Pass { millis }),
    ]
}

/// Both of them, and what a client would remember.
struct Pair {
    index: Index,
    model: Model,
    next: Sequence,
    /// Every receipt ever given, newest last.
    receipts: Vec<(Sequence, u64)>,
    begun: Vec<(Sequence, Intent)>,
}

impl Pair {
    fn new() -> Self {
        let (index, model) = (Index::new(), Model::default());
        Pair { index, model, next: 1, receipts: Vec::new(), begun: Vec::new() }
    }

    fn now(&self) -> Millis {
        self.model.now
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Append { group, delay } => self.append(group, delay),
            Step::Claim { consumer, most, lease } => {
                let claimed = self.claim(consumer, most, lease);
                self.receipts.extend(claimed.iter().map(|claim| (claim.sequence, claim.generation)));
            }
            Step::Unclaim { consumer, most } => self.unclaim(consumer, most),
            Step::PutBack { consumer, most, every, delay } => self.put_back(consumer, most, every, delay),
            Step::Begin { receipt, intent } => self.begin(receipt, intent),
            Step::Finish { begun, written, delay } => self.finish(begun, written, delay),
            Step::Extend { receipt, lease } => self.extend(receipt, lease),
            Step::Pass { millis } => {
                let now = self.now() + millis;
                self.model.tick(now);
                self.index.tick(now);
            }
        }
        self.compare();
    }

    fn append(&mut self, group: Option<u8>, delay: Millis) {
        let group = group.map(u64::from);
        let due = if delay == 0 { 0 } else { self.now() + delay };
        self.index.append(self.next, group, due, 0);
        let thing = Thing { sequence: self.next, group, due, attempts: 0, holding: Holding::Waiting };
        self.model.things.push(thing);
        self.next += 1;
    }

    fn claim(&mut self, consumer: ConsumerId, most: usize, lease: Millis) -> Vec<Claimed> {
        let now = self.now();
        let claimed = self.index.claim(consumer, most, lease, now);
        for claim in &claimed {
            self.model.hand_out(*claim, consumer, now + lease);
        }
        if claimed.len() < most {
            let left = self.model.things.iter().find(|thing| self.model.may_go(thing, consumer));
            assert!(left.is_none(), "{left:?} could have gone to {consumer}");
        }
        claimed
    }

    fn unclaim(&mut self, consumer: ConsumerId, most: usize) {
        let claimed = self.claim(consumer, most, 1_000);
        self.index.unclaim(&claimed);
        for claim in claimed {
            let at = self.model.find(claim.sequence).expect("just claimed");
            self.model.things[at].holding = Holding::Waiting;
            self.model.things[at].attempts -= 1;
        }
    }

    fn put_back(&mut self, consumer: ConsumerId, most: usize, every: usize, delay: Millis) {
        let claimed = self.claim(consumer, most, 1_000);
        let until = self.now() + delay;
        let unread: Vec<_> =
            claimed.iter().skip(every - 1).step_by(every).map(|claim| claim.sequence).collect();
        let back = self.index.put_back(&claimed, &unread, until);
        for claim in claimed {
            let group = self.model.things[self.model.find(claim.sequence).expect("just claimed")].group;
            let is_before = |sequence: &Sequence| {
                let other = &self.model.things[self.model.find(*sequence).expect("just claimed")];
                *sequence == claim.sequence
                    || (group.is_some() && other.group == group && *sequence < claim.sequence)
            };
            let goes_back = unread.iter().any(is_before);
            assert_eq!(back.contains(&claim.sequence), goes_back);
            if !goes_back {
                self.receipts.push((claim.sequence, claim.generation));
                continue;
            }
            let at = self.model.find(claim.sequence).expect("just claimed");
            let thing = &mut self.model.things[at];
            thing.holding = Holding::Waiting;
            thing.attempts -= 1;
            if unread.contains(&claim.sequence) {
                thing.due = until;
            }
        }
    }

    fn receipt(&self, from_newest: usize) -> Option<(Sequence, u64)> {
        self.receipts.iter().rev().nth(from_newest).copied()
    }

    fn begin(&mut self, receipt: usize, ending: bool) {
        let Some((sequence, generation)) = self.receipt(receipt) else { return };
        let intent = if ending { Intent::End } else { Intent::Return };
        let now = self.now();
        let good = self.model.good(sequence, generation);
        assert_eq!(self.index.begin(sequence, generation, intent, now), good.is_some());
        let Some((at, consumer, deadline)) = good else { return };
        self.begun.push((sequence, intent));
        self.model.things[at].holding = match intent {
            Intent::End => Holding::Ending { consumer, generation, deadline },
            Intent::Return => Holding::Returning { consumer, generation, deadline },
        };
    }

    fn finish(&mut self, begun: usize, written: bool, delay: Millis) {
        if self.begun.is_empty() {
            return;
        }
        let (sequence, intent) = self.begun.remove(begun % self.begun.len());
        let at = self.model.find(sequence).expect("begun and not finished");
        match (written, intent) {
            (false, _) => {
                self.index.abandon(sequence);
                let (Holding::Ending { consumer, generation, deadline }
                | Holding::Returning { consumer, generation, deadline }) = self.model.things[at].holding
                else {
                    panic!("begun and not finished")
                };
                self.model.things[at].holding = Holding::Held { consumer, generation, deadline };
                let now = self.now();
                self.index.tick(now);
                self.model.tick(now);
            }
            (true, Intent::End) => {
                self.index.end(sequence);
                self.model.things.remove(at);
            }
            (true, Intent::Return) => {
                let due = self.now() + delay;
                self.index.give_back(sequence, due);
                self.model.things[at].due = due;
                self.model.things[at].holding = Holding::Waiting;
            }
        }
    }

    fn extend(&mut self, receipt: usize, lease: Millis) {
        let Some((sequence, generation)) = self.receipt(receipt) else { return };
        let now = self.now();
        let good = self.model.good(sequence, generation);
        assert_eq!(self.index.extend(sequence, generation, lease, now), good.is_some());
        if let Some((at, consumer, _)) = good {
            self.model.things[at].holding = Holding::Held { consumer, generation, deadline: now + lease };
        }
    }

    fn compare(&self) {
        assert_eq!(self.index.len(), self.model.things.len());
        assert_eq!(self.index.out(), self.model.out());
        let mut depths = BTreeMap::<u64, (u32, u32, Sequence)>::new();
        for thing in &self.model.things {
            if let Some(group) = thing.group {
                let depth = depths.entry(group).or_insert((0, 0, thing.sequence));
                depth.0 += 1;
                depth.1 += u32::from(thing.out_to().is_some());
            }
        }
        assert_eq!(self.index.group_count(), depths.len());
        for (group, (depth, out, head)) in depths {
            let standing = self.index.standing(group).expect("a group with messages");
            assert_eq!((standing.depth, standing.out, standing.head), (depth, out, head));
        }
        let holds = |thing: &Thing| matches!(thing.holding, Holding::Held { .. });
        let held = self.model.things.iter().filter(|thing| holds(thing)).count();
        assert_eq!(
            self.index.deadlines.len(),
            held,
            "each lease that is held has its deadline, and no other"
        );
    }

    /// Lets everything come back and be settled: what is left must come in order, all of it, once.
    fn drain(&mut self) {
        while !self.begun.is_empty() {
            self.finish(0, true, 0);
        }
        let now = self.now() + 10_000;
        self.index.tick(now);
        self.model.tick(now);
        let mut last = BTreeMap::new();
        while !self.model.things.is_empty() {
            let claimed = self.claim(9, 4, 10);
            assert!(!claimed.is_empty(), "stuck: {:?}", self.model.things);
            for claim in claimed {
                let at = self.model.find(claim.sequence).expect("handed out");
                let thing = self.model.things.remove(at);
                if let Some(group) = thing.group {
                    assert!(last.insert(group, claim.sequence).is_none_or(|before| before < claim.sequence));
                }
                assert!(self.index.begin(claim.sequence, claim.generation, Intent::End, now));
                self.index.end(claim.sequence);
            }
        }
        assert_eq!((self.index.len(), self.index.out(), self.index.group_count()), (0, 0, 0));
        assert!(
            self.index.leases.is_empty() && self.index.deadlines.is_empty() && self.index.delayed.is_empty()
        );
        assert!(
            self.index.ready_only.is_empty()
                && self.index.ready.head == NONE
                && self.index.loose.head == NONE
        );
    }
}

#[test]
fn the_index_does_what_the_model_does() {
    let mut runner = TestRunner::new(Config { cases: 3_000, ..Config::default() });
    let steps = prop::collection::vec(step(), 1..120);
    let result = runner.run(&steps, |steps| {
        let mut pair = Pair::new();
        steps.into_iter().for_each(|step| pair.run(step));
        pair.drain();
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

fn index_of(messages: &[(Sequence, u64)]) -> Index {
    let mut index = Index::new();
    for (sequence, group) in messages {
        index.append(*sequence, Some(*group), 0, 0);
    }
    index
}

fn sequences(claimed: &[Claimed]) -> Vec<Sequence> {
    claimed.iter().map(|claim| claim.sequence).collect()
}

#[test]
fn one_consumer_holds_consecutive_messages_and_no_other_does() {
    let mut index = index_of(&[(1, 7), (2, 7), (3, 7)]);
    assert_eq!(sequences(&index.claim(0, 1, 100, 0)), [1]);
    assert!(sequences(&index.claim(1, 9, 100, 0)).is_empty(), "the group is another's");
    assert_eq!(sequences(&index.claim(0, 9, 100, 0)), [2, 3]);
}

#[test]
fn a_message_that_comes_back_waits_for_the_later_ones() {
    let mut index = index_of(&[(1, 7), (2, 7), (3, 7), (4, 7)]);
    let claimed = index.claim(0, 3, 100, 0);
    assert!(index.begin(1, claimed[0].generation, Intent::Return, 0));
    assert!(sequences(&index.claim(0, 9, 100, 0)).is_empty(), "not 4, while 1 is on its way back");
    index.give_back(1, 5);
    assert!(sequences(&index.claim(0, 9, 100, 10)).is_empty(), "not 1, while 2 and 3 are out");
    for at in [2, 1] {
        assert!(index.begin(claimed[at].sequence, claimed[at].generation, Intent::Return, 10));
        index.give_back(claimed[at].sequence, 10);
    }
    assert_eq!(sequences(&index.claim(1, 9, 100, 10)), [1, 2, 3, 4]);
}

#[test]
fn a_lease_is_not_cut_short_by_that_of_an_earlier_message() {
    let mut index = index_of(&[(1, 7), (2, 7)]);
    let first = index.claim(0, 1, 10, 0)[0];
    let second = index.claim(0, 1, 100, 0)[0];
    assert!(sequences(&index.claim(1, 9, 100, 50)).is_empty(), "2 is still leased");
    assert!(index.begin(2, second.generation, Intent::End, 50));
    index.end(2);
    assert_eq!(sequences(&index.claim(1, 9, 100, 50)), [1]);
    assert!(!index.begin(1, first.generation, Intent::End, 50), "handed out again: the old receipt is stale");
}

/// Half of them in groups of their own, half without; one of each is parked with its consumer.
#[test]
fn a_message_that_stays_does_not_keep_the_memory_of_those_that_have_gone() {
    const ALL: u64 = 1_000_000;
    let mut index = Index::new();
    (1..=ALL).for_each(|sequence| index.append(sequence, (sequence % 2 == 0).then_some(sequence), 0, 0));
    let parked = index.claim(0, 2, Millis::MAX, 0);
    assert_eq!(parked.len(), 2);
    while index.len() > parked.len() {
        for claim in index.claim(0, 1_000, 100, 0) {
            assert!(index.begin(claim.sequence, claim.generation, Intent::End, 0));
            index.end(claim.sequence);
        }
    }
    let slabs = [
        index.entries.places.capacity() + index.entries.free.capacity(),
        index.groups.places.capacity() + index.groups.free.capacity(),
        index.by_fingerprint.capacity(),
    ];
    assert!(slabs.iter().all(|capacity| *capacity <= 4 * KEPT), "{slabs:?}");
    for claim in parked {
        assert!(index.begin(claim.sequence, claim.generation, Intent::End, 0), "they are still themselves");
        index.end(claim.sequence);
    }
    assert_eq!((index.len(), index.group_count()), (0, 0));
}

#[test]
fn the_size_of_an_entry_is_what_the_head_of_the_file_says() {
    assert_eq!(size_of::<Option<Entry>>(), 32);
    assert_eq!(size_of::<Option<Group>>(), 80);
}
