//! The ready lists: which lanes could run now, by tier, each a FIFO threaded through the lanes themselves.
//!
//! Taking the next lane is a pop, whatever the number of lanes. A higher tier goes first, but after
//! [`PATIENCE`] lanes in a row have been preferred to a waiting lower tier, one of those has its turn: no lane starves.
//!
//! # Rounds
//!
//! Inside a tier lanes take turns in rounds. There are two lists: the lanes of this round, and those of the next, which it becomes when nobody is left in this one. A lane
//! that has had its turn in this round, or that was not there when it began, waits for the next. A lane whose last turn began in an earlier round, because its handler
//! was slow or because it was deferred, still has its turn in this one: behind a single list it would lose a round for each slow message, and at the end of a burst such lanes would be
//! left over, too few for all workers. (10,000 keys with ten messages of 10 to 20 ms in 5,000 slots: with one list 97 to 98 % of what the slots reach without keys, with rounds all of it; the
//! last of the tests below.) A lane is in a round once, and who comes fresh waits for the next, so every round ends, and nobody waits longer than for a turn of each other lane.
//!
//! What a round is differs by tier, and lanes change their tiers. So rounds are numbered by one clock, which ticks whenever any tier begins one: whether a lane has been served since
//! a round began can be told wherever that was.

use super::{
    Lane, State,
    repack::{Places, placed},
    waiting::NONE,
};
use crate::message::Priority;

/// How many lanes may be preferred in a row. Small enough that a low lane waits for milliseconds, large enough
/// that the highest tier keeps 97 % of the dispatcher.
const PATIENCE: u32 = 32;

#[derive(Clone, Copy, Debug)]
struct Ends {
    head: u32,
    tail: u32,
}

/// The lanes of one tier.
#[derive(Clone, Copy, Debug)]
struct Tier {
    lists: [Ends; 2],
    /// Which of them is this round's.
    current: u8,
    /// When this round began, by the clock of rounds.
    began: u32,
}

impl Tier {
    const EMPTY: Tier = Tier { lists: [Ends { head: NONE, tail: NONE }; 2], current: 0, began: 0 };

    fn is_occupied(&self) -> bool {
        self.lists.iter().any(|list| list.head != NONE)
    }

    fn current(&self) -> &Ends {
        &self.lists[self.current as usize]
    }

    /// The list for a lane whose last turn began at that time: this round's if it was before the round. (The clock goes round after four thousand million rounds. Who was away for
    /// half of that waits for the next.)
    fn list_for(&self, served: u32) -> u8 {
        let is_behind = self.began.wrapping_sub(served) as i32 > 0;
        if is_behind { self.current } else { 1 - self.current }
    }
}

#[derive(Debug)]
pub(super) struct Ready {
    tiers: [Tier; Priority::TIERS],
    len: usize,
    preferred: u32,
    /// The tier that was served last out of patience, so that several low tiers take turns.
    consoled: usize,
    /// How many rounds have begun, in all tiers together.
    clock: u32,
}

impl Ready {
    pub(super) fn new() -> Self {
        Ready { tiers: [Tier::EMPTY; Priority::TIERS], len: 0, preferred: 0, consoled: 0, clock: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether none but lanes of the normal tier are ready.
    pub(super) fn is_ordinary(&self) -> bool {
        let ordinary = usize::from(Priority::Normal.tier());
        self.tiers.iter().enumerate().all(|(number, tier)| number == ordinary || !tier.is_occupied())
    }

    /// The time by which rounds are told apart: when a lane that begins now was served last, as it were.
    pub(super) fn clock(&self) -> u32 {
        self.clock
    }

    /// Appends a lane to a list of its tier: that of this round if it is behind, else that of the next.
    pub(super) fn push<K>(&mut self, lanes: &mut [Lane<K>], id: u32) {
        let lane = &mut lanes[id as usize];
        let tier = &mut self.tiers[lane.tier as usize];
        lane.list = tier.list_for(lane.served);
        let ends = &mut tier.lists[lane.list as usize];
        lane.previous = ends.tail;
        lane.next = NONE;
        match ends.tail {
            NONE => ends.head = id,
            tail => lanes[tail as usize].next = id,
        }
        ends.tail = id;
        self.len += 1;
    }

    /// Takes a lane out of its list.
    pub(super) fn remove<K>(&mut self, lanes: &mut [Lane<K>], id: u32) {
        let lane = &lanes[id as usize];
        let (previous, next) = (lane.previous, lane.next);
        let ends = &mut self.tiers[lane.tier as usize].lists[lane.list as usize];
        match previous {
            NONE => ends.head = next,
            lane => lanes[lane as usize].next = next,
        }
        match next {
            NONE => ends.tail = previous,
            lane => lanes[lane as usize].previous = previous,
        }
        self.len -= 1;
    }

    /// Takes the lane that is next, for its turn.
    pub(super) fn pop<K>(&mut self, lanes: &mut [Lane<K>]) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let chosen = self.choose_tier();
        let tier = &mut self.tiers[chosen];
        if tier.current().head == NONE {
            tier.current = 1 - tier.current;
            self.clock = self.clock.wrapping_add(1);
            tier.began = self.clock;
        }
        let id = tier.current().head;
        self.take(lanes, id);
        Some(id)
    }

    /// Takes a lane for its turn.
    pub(super) fn take<K>(&mut self, lanes: &mut [Lane<K>], id: u32) {
        self.remove(lanes, id);
        lanes[id as usize].served = self.clock;
    }

    /// Counts the lanes by following the links, and checks that each is in a list of its tier and is ready.
    pub(super) fn walk<K>(&self, lanes: &[Lane<K>]) -> Result<usize, String> {
        let mut count = 0;
        for (tier, list, ends) in self.lists() {
            let (mut id, mut previous) = (ends.head, NONE);
            while id != NONE {
                let lane = &lanes[id as usize];
                let is_here = (usize::from(lane.tier), lane.list) == (tier, list);
                if lane.previous != previous || !is_here || lane.state != State::Ready {
                    return Err(format!(
                        "lane {id} is {:?} in tier {}, listed in {tier}",
                        lane.state, lane.tier
                    ));
                }
                (previous, id) = (id, lane.next);
                count += 1;
            }
            if ends.tail != previous {
                return Err(format!("the last lane of tier {tier} is {previous}, listed is {}", ends.tail));
            }
        }
        Ok(count)
    }

    /// The lanes have other places now; those in the lists have their links already.
    pub(super) fn move_to(&mut self, places: &Places) {
        for ends in self.tiers.iter_mut().flat_map(|tier| &mut tier.lists) {
            (ends.head, ends.tail) = (placed(places, ends.head), placed(places, ends.tail));
        }
    }

    /// Every list with its tier and its number there, in the order in which they are served.
    fn lists(&self) -> impl Iterator<Item = (usize, u8, Ends)> {
        self.tiers.iter().enumerate().flat_map(|(number, tier)| {
            [tier.current, 1 - tier.current].map(|list| (number, list, tier.lists[list as usize]))
        })
    }

    /// The ready lanes, most urgent first.
    pub(super) fn iter<'a, K>(&'a self, lanes: &'a [Lane<K>]) -> impl Iterator<Item = u32> + 'a {
        let next = |id: &u32| Some(lanes[*id as usize].next).filter(|next| *next != NONE);
        let heads = self.lists().map(|(_, _, ends)| Some(ends.head).filter(|head| *head != NONE));
        heads.flat_map(move |head| std::iter::successors(head, next))
    }

    fn choose_tier(&mut self) -> usize {
        let first = self.tiers.iter().position(Tier::is_occupied).expect("a lane is ready");
        let others_wait = self.tiers[first + 1..].iter().any(Tier::is_occupied);
        if !others_wait {
            self.preferred = 0;
            return first;
        }
        self.preferred += 1;
        if self.preferred <= PATIENCE {
            return first;
        }
        self.preferred = 0;
        let mut tier = self.consoled.max(first);
        loop {
            tier = if tier + 1 < Priority::TIERS { tier + 1 } else { first + 1 };
            if self.tiers[tier].is_occupied() {
                self.consoled = tier;
                return tier;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cmp::Reverse, collections::BinaryHeap};

    use fastrand::Rng;

    use super::super::{Lanes, Turn};
    use crate::message::{Item, Message, Priority};

    fn item(key: u64, priority: Priority) -> Item<u64, ()> {
        Item { fingerprint: key, accepted_at: 0, message: Message::new(key, ()).priority(priority) }
    }

    fn admit(lanes: &mut Lanes<u64, ()>, key: u64) {
        lanes.admit(item(key, Priority::Normal));
    }

    /// Begins the next turn, of one message.
    fn begin(lanes: &mut Lanes<u64, ()>) -> Option<Turn<u64, ()>> {
        let mut turn = Turn::new();
        lanes.claim(0, 1, 0, &mut turn, None).then_some(turn)
    }

    fn end(lanes: &mut Lanes<u64, ()>, mut turn: Turn<u64, ()>) {
        turn.items.clear();
        lanes.settle(&mut turn, 0);
        lanes.audit().unwrap();
    }

    /// Runs so many turns, one after the other, and says whose they were.
    fn run(lanes: &mut Lanes<u64, ()>, turns: usize) -> Vec<u64> {
        let mut one = || {
            let turn = begin(lanes)?;
            let key = turn.fingerprint;
            end(lanes, turn);
            Some(key)
        };
        std::iter::from_fn(&mut one).take(turns).collect()
    }

    #[test]
    fn a_lane_whose_turn_was_long_does_not_lose_a_round() {
        let mut lanes = Lanes::new(false);
        (0..5).for_each(|_| (1..=4).for_each(|key| admit(&mut lanes, key)));
        let slow = begin(&mut lanes).unwrap();
        assert_eq!(slow.fingerprint, 1);
        assert_eq!(run(&mut lanes, 4), [2, 3, 4, 2], "the last of them begins another round");
        end(&mut lanes, slow);
        assert_eq!(run(&mut lanes, 7), [3, 4, 1, 2, 3, 4, 1], "it is still in this one");
    }

    #[test]
    fn a_lane_is_in_a_round_once_and_what_comes_fresh_waits_for_the_next() {
        let mut lanes = Lanes::new(false);
        (0..5).for_each(|_| admit(&mut lanes, 1));
        (0..2).for_each(|_| admit(&mut lanes, 2));
        assert_eq!(run(&mut lanes, 1), [1]);
        for fresh in 10..13 {
            admit(&mut lanes, fresh);
        }
        assert_eq!(run(&mut lanes, 6), [2, 1, 10, 11, 12, 2], "in the order in which they became ready");
        // However many come: who waits for the next round has its turn in it.
        (20..40).for_each(|fresh| admit(&mut lanes, fresh));
        assert_eq!(run(&mut lanes, 2), [1, 20]);
    }

    /// By clocks of their own, one tier could take a lane for late again and again that comes from the other.
    #[test]
    fn a_lane_that_changes_its_tier_with_each_message_is_in_a_round_once_all_the_same() {
        let mut lanes = Lanes::new(false);
        // Rounds of the lower tier have gone by, none of the upper.
        (0..100).for_each(|_| admit(&mut lanes, 2));
        assert_eq!(run(&mut lanes, 100).len(), 100);
        (0..5).for_each(|_| admit(&mut lanes, 3));
        lanes.admit(item(1, Priority::Normal));
        let mut order = Vec::new();
        for step in 0..18 {
            let turn = begin(&mut lanes).unwrap();
            order.push(turn.fingerprint);
            if turn.fingerprint == 1 {
                lanes.admit(item(1, if step % 2 == 0 { Priority::Normal } else { Priority::High }));
            }
            end(&mut lanes, turn);
        }
        let longest = order.split(|key| *key == 3).map(<[u64]>::len).take(5).max();
        assert!(order.iter().filter(|key| **key == 3).count() == 5 && longest <= Some(4), "{order:?}");
    }

    const MESSAGES_PER_KEY: usize = 10;
    const KEYS: u64 = 10_000;
    const SLOTS: usize = 5_000;

    /// When slots are done that have timers without keys, for these milliseconds each.
    fn done_without_keys(costs: &[u64]) -> u64 {
        let mut busy: BinaryHeap<_> = costs[..SLOTS].iter().map(|cost| Reverse(*cost)).collect();
        let mut last = 0;
        for cost in &costs[SLOTS..] {
            let Reverse(now) = busy.pop().unwrap();
            busy.push(Reverse(now + cost));
        }
        while let Some(Reverse(now)) = busy.pop() {
            last = now;
        }
        last
    }

    /// The same with lanes.
    fn done_with_lanes(costs: &[u64], random: &mut Rng) -> u64 {
        let mut lanes = Lanes::new(false);
        for _ in 0..MESSAGES_PER_KEY {
            let mut keys: Vec<u64> = (0..KEYS).collect();
            random.shuffle(&mut keys);
            keys.into_iter().for_each(|key| admit(&mut lanes, key));
        }
        let (mut turns, mut free): (Vec<_>, Vec<_>) =
            ((0..SLOTS).map(|_| None).collect(), (0..SLOTS).collect());
        let (mut busy, mut costs, mut now) = (BinaryHeap::new(), costs.iter(), 0);
        loop {
            while let Some(slot) = free.last().copied()
                && let Some(turn) = begin(&mut lanes)
            {
                turns[slot] = Some(turn);
                free.pop();
                busy.push(Reverse((now + costs.next().expect("a cost for each message"), slot)));
            }
            let Some(Reverse((due, slot))) = busy.pop() else { return now };
            now = due;
            let mut turn = turns[slot].take().expect("it is busy");
            turn.items.clear();
            lanes.settle(&mut turn, 0);
            free.push(slot);
        }
    }

    #[test]
    fn lanes_that_take_turns_keep_as_many_slots_busy_as_there_would_be_without_keys() {
        for seed in 0..3 {
            let mut random = Rng::with_seed(seed);
            let costs: Vec<u64> =
                (0..KEYS as usize * MESSAGES_PER_KEY).map(|_| random.u64(10_000..20_000)).collect();
            let (bound, lanes) = (done_without_keys(&costs), done_with_lanes(&costs, &mut random));
            let share = bound as f64 / lanes as f64;
            assert!(share >= 0.99, "seed {seed}: {share:.3}");
        }
    }
}
