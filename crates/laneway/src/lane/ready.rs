//! The ready lists: which lanes could run now, by tier, each a FIFO threaded through the lanes themselves.
//!
//! Taking the next lane is a pop, whatever the number of lanes. A higher tier goes first, but after
//! [`PATIENCE`] lanes in a row have been preferred to a waiting lower tier, one of those has its turn: no lane starves.

use super::{Lane, State, waiting::NONE};
use crate::message::Priority;

/// How many lanes may be preferred in a row. Small enough that a low lane waits for milliseconds, large enough
/// that the highest tier keeps 97 % of the dispatcher.
const PATIENCE: u32 = 32;

#[derive(Clone, Copy, Debug)]
struct Ends {
    head: u32,
    tail: u32,
}

#[derive(Debug)]
pub(super) struct Ready {
    tiers: [Ends; Priority::TIERS],
    len: usize,
    preferred: u32,
    /// The tier that was served last out of patience, so that several low tiers take turns.
    consoled: usize,
}

impl Ready {
    pub(super) fn new() -> Self {
        Ready { tiers: [Ends { head: NONE, tail: NONE }; Priority::TIERS], len: 0, preferred: 0, consoled: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Appends a lane to the list of its tier.
    pub(super) fn push<K>(&mut self, lanes: &mut [Lane<K>], id: u32) {
        let ends = &mut self.tiers[lanes[id as usize].tier as usize];
        lanes[id as usize].previous = ends.tail;
        lanes[id as usize].next = NONE;
        match ends.tail {
            NONE => ends.head = id,
            tail => lanes[tail as usize].next = id,
        }
        ends.tail = id;
        self.len += 1;
    }

    /// Takes a lane out of the list of its tier.
    pub(super) fn remove<K>(&mut self, lanes: &mut [Lane<K>], id: u32) {
        let lane = &lanes[id as usize];
        let (previous, next) = (lane.previous, lane.next);
        let ends = &mut self.tiers[lane.tier as usize];
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

    /// Takes the lane that is next.
    pub(super) fn pop<K>(&mut self, lanes: &mut [Lane<K>]) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let id = self.tiers[self.choose_tier()].head;
        self.remove(lanes, id);
        Some(id)
    }

    /// Counts the lanes by following the links, and checks that each is in the list of its tier and is ready.
    pub(super) fn walk<K>(&self, lanes: &[Lane<K>]) -> Result<usize, String> {
        let mut count = 0;
        for (tier, ends) in self.tiers.iter().enumerate() {
            let (mut id, mut previous) = (ends.head, NONE);
            while id != NONE {
                let lane = &lanes[id as usize];
                if lane.previous != previous || usize::from(lane.tier) != tier || lane.state != State::Ready {
                    return Err(format!(
                        "lane {id} is {:?} in tier {}, listed in {tier}",
                        lane.state, lane.tier
                    ));
                }
                (previous, id) = (id, lane.next);
                count += 1;
            }
        }
        Ok(count)
    }

    /// The ready lanes, most urgent first.
    pub(super) fn iter<'a, K>(&'a self, lanes: &'a [Lane<K>]) -> impl Iterator<Item = u32> + 'a {
        let next = |id: &u32| Some(lanes[*id as usize].next).filter(|next| *next != NONE);
        let heads = self.tiers.iter().map(|ends| Some(ends.head).filter(|head| *head != NONE));
        heads.flat_map(move |head| std::iter::successors(head, next))
    }

    fn choose_tier(&mut self) -> usize {
        let occupied = |ends: &Ends| ends.head != NONE;
        let first = self.tiers.iter().position(occupied).expect("a lane is ready");
        let others_wait = self.tiers[first + 1..].iter().any(occupied);
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
            if occupied(&self.tiers[tier]) {
                self.consoled = tier;
                return tier;
            }
        }
    }
}
