//! In which tier a lane stands: that of the most urgent message that waits in it.
//!
//! Messages of a lane keep their order whatever their priorities, so a message that is urgent makes its whole lane so until it has been taken. Mostly all messages of a
//! lane have the same priority, and its tier says which; where they differ, they are counted by tier.
//!
//! Whatever puts a message into the queue of a lane, or takes one out of it, comes through here.

use super::{Lanes, State, waiting::NONE};
use crate::message::{Item, Priority};

/// How many messages of each tier wait in a lane.
pub(super) type ByTier = [u32; Priority::TIERS];

impl<K, M> Lanes<K, M> {
    /// Puts a message behind all that wait.
    pub(super) fn append(&mut self, id: u32, item: Item<K, M>, evictable: bool) {
        self.count_in(id, item.message.priority.tier());
        let queue = &mut self.lanes[id as usize].waiting;
        self.waiting.push_back(queue, id, (item.message, item.accepted_at), evictable);
    }

    /// Puts a message in front of all that wait.
    pub(super) fn put_back(&mut self, id: u32, item: Item<K, M>, evictable: bool) {
        self.count_in(id, item.message.priority.tier());
        let queue = &mut self.lanes[id as usize].waiting;
        self.waiting.push_front(queue, id, (item.message, item.accepted_at), evictable);
    }

    /// Takes the first that waits.
    #[inline]
    pub(super) fn take_first(&mut self, id: u32) -> Option<Item<K, M>> {
        let lane = &mut self.lanes[id as usize];
        let (message, accepted_at) = self.waiting.pop_front(&mut lane.waiting)?;
        let item = Item { fingerprint: lane.fingerprint, accepted_at, message };
        if lane.is_mixed() {
            self.count_out(id, item.message.priority.tier());
        }
        Some(item)
    }

    /// Takes one from the middle.
    pub(super) fn take_node(&mut self, id: u32, node: u32) -> Item<K, M> {
        debug_assert!(node != NONE);
        let lane = &mut self.lanes[id as usize];
        let (message, accepted_at) = self.waiting.unlink(&mut lane.waiting, node);
        let item = Item { fingerprint: lane.fingerprint, accepted_at, message };
        if lane.is_mixed() {
            self.count_out(id, item.message.priority.tier());
        }
        item
    }

    /// Takes all that wait, oldest first.
    pub(super) fn take_all(&mut self, id: u32) -> impl Iterator<Item = Item<K, M>> {
        let lane = &mut self.lanes[id as usize];
        if let Some(extra) = &mut lane.extra {
            extra.mixed = None;
        }
        let fingerprint = lane.fingerprint;
        let next = || self.waiting.pop_front(&mut lane.waiting);
        std::iter::from_fn(next).map(move |(message, accepted_at)| Item { fingerprint, accepted_at, message })
    }

    /// A message is about to come into the queue of a lane.
    #[inline]
    fn count_in(&mut self, id: u32, tier: u8) {
        let lane = &mut self.lanes[id as usize];
        if lane.waiting.is_empty() {
            lane.tier = tier;
        } else if tier != lane.tier || lane.is_mixed() {
            self.count_among_others(id, tier);
        }
    }

    #[cold]
    fn count_among_others(&mut self, id: u32, tier: u8) {
        let lane = &mut self.lanes[id as usize];
        let (before, alike) = (lane.tier, lane.waiting.len());
        let by_tier = lane.extra_mut().mixed.get_or_insert_with(|| {
            let mut by_tier = ByTier::default();
            by_tier[before as usize] = alike;
            by_tier
        });
        by_tier[tier as usize] += 1;
        self.stand_in(id, tier.min(before));
    }

    /// A message has left the queue of a lane whose messages are counted.
    #[cold]
    fn count_out(&mut self, id: u32, tier: u8) {
        let lane = &mut self.lanes[id as usize];
        let left = lane.waiting.len();
        let Some(by_tier) = lane.extra.as_mut().and_then(|extra| extra.mixed.as_mut()) else { return };
        by_tier[tier as usize] -= 1;
        let first = by_tier.iter().position(|count| *count > 0);
        let alike = first.map_or(0, |first| by_tier[first]);
        if alike == left {
            lane.extra_mut().mixed = None;
        }
        if let Some(first) = first {
            self.stand_in(id, first as u8);
        }
    }

    /// Moves a lane to a tier, and to the end of its list if it is in one.
    fn stand_in(&mut self, id: u32, tier: u8) {
        let lane = &self.lanes[id as usize];
        if lane.tier == tier {
            return;
        }
        // What is ready is in a list, with what waits in it. (A lane that is being claimed is not ready any more.)
        let listed = lane.state == State::Ready;
        if listed {
            self.ready.remove(&mut self.lanes, id);
        }
        self.lanes[id as usize].tier = tier;
        if listed {
            self.ready.push(&mut self.lanes, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Turn;
    use super::*;
    use crate::message::Message;
    use Priority::{High, Low, Normal, Urgent};

    fn item(key: u64, priority: Priority) -> Item<u64, ()> {
        Item { fingerprint: key, accepted_at: 0, message: Message::new(key, ()).priority(priority) }
    }

    /// Whose message is next, with its priority, one at a time.
    fn order(lanes: &mut Lanes<u64, ()>) -> Vec<(u64, Priority)> {
        let mut turn = Turn::new();
        let next = || {
            lanes.audit().unwrap();
            lanes.claim(0, 1, 0, &mut turn, None).then(|| {
                let message = turn.items.pop_front().unwrap().message;
                lanes.settle(&mut turn, 0);
                (message.key, message.priority)
            })
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn a_lane_stands_in_the_tier_of_its_most_urgent_message_whatever_was_more_urgent_before() {
        for first in [Some(Urgent), None] {
            let mut lanes = Lanes::new(false);
            for priority in first.into_iter().chain([Low, High]) {
                lanes.admit(item(1, priority));
            }
            (0..3).for_each(|_| lanes.admit(item(2, Normal)));
            let expected = [(1, Low), (1, High), (2, Normal), (2, Normal), (2, Normal)];
            let expected: Vec<_> = first.map(|first| (1, first)).into_iter().chain(expected).collect();
            assert_eq!(order(&mut lanes), expected);
        }
    }

    #[test]
    fn a_lane_falls_back_when_its_urgent_message_is_gone_without_having_run() {
        let mut lanes = Lanes::new(true);
        for priority in [Urgent, Low] {
            lanes.admit(item(1, priority));
        }
        lanes.admit(item(2, Normal));
        assert_eq!(lanes.evict_oldest().unwrap().1.message.priority, Urgent);
        lanes.audit().unwrap();
        assert_eq!(order(&mut lanes), [(2, Normal), (1, Low)]);
    }
}
