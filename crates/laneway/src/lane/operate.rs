//! What happens to a lane from outside: an operator parks, resumes, skips or withdraws, and a full bound evicts the oldest.
//!
//! `dispatcher/` calls these under the lanes lock with everything admitted. None of them touches a turn in flight: what is asked of a running lane
//! is done when its turn has settled.

use super::{Lanes, State};
use crate::message::Item;

impl<K, M> Lanes<K, M> {
    /// Parks a lane in front of its next message. False if there is no such lane.
    pub(crate) fn park(&mut self, fingerprint: u64, note: &str, now: u64) -> bool {
        let Some(id) = self.place_of(fingerprint) else { return false };
        let lane = &mut self.lanes[id as usize];
        lane.extra_mut().note = Some(note.to_owned());
        match lane.state {
            State::Running { .. } | State::Arriving => {
                lane.extra_mut().park_after.get_or_insert(now);
                return true;
            }
            State::Parked { .. } => return true,
            State::Deferred { .. } => self.deferred -= 1,
            State::Ready => self.ready.remove(&mut self.lanes, id),
            State::Aside => {}
        }
        self.park_now(id, now);
        true
    }

    /// Lets a parked or deferred lane go on from its head, messages that were put aside first. False if there was nothing to resume.
    pub(crate) fn resume(&mut self, fingerprint: u64) -> bool {
        let Some(id) = self.place_of(fingerprint) else { return false };
        let unparked =
            self.lanes[id as usize].extra.as_mut().is_some_and(|extra| extra.park_after.take().is_some());
        let returned = self.take_back_aside(id);
        match self.lanes[id as usize].state {
            State::Running { .. } | State::Arriving => return unparked || returned,
            State::Ready => {
                if returned {
                    // What has failed so often is not the head any more.
                    self.lanes[id as usize].set_attempts(0);
                }
                return returned;
            }
            State::Aside => {}
            State::Parked { .. } => self.parked -= 1,
            State::Deferred { .. } => self.deferred -= 1,
        }
        self.lanes[id as usize].set_attempts(0);
        self.rest(id);
        true
    }

    /// Puts the messages that were parked alone back to the front of their lane, in their order.
    pub(super) fn take_back_aside(&mut self, id: u32) -> bool {
        let mut items = self.take_aside(id);
        let any = !items.is_empty();
        while let Some(item) = items.pop() {
            self.put_back(id, item, false);
        }
        any
    }

    /// Takes the messages out that were parked alone, in their order.
    pub(super) fn take_aside(&mut self, id: u32) -> Vec<Item<K, M>> {
        let lane = &mut self.lanes[id as usize];
        let fingerprint = lane.fingerprint;
        let Some(extra) = &mut lane.extra else { return Vec::new() };
        let mut items = Vec::with_capacity(extra.aside.len() as usize);
        while let Some((message, accepted_at)) = self.waiting.pop_front(&mut extra.aside) {
            items.push(Item { fingerprint, accepted_at, message });
        }
        self.aside -= items.len();
        items
    }

    /// Takes the head of a lane out, unless it is in flight. A lane that stood in front of it stays as it was.
    pub(crate) fn skip_head(&mut self, fingerprint: u64) -> Option<Item<K, M>> {
        if self.is_in_stream(fingerprint) {
            return None;
        }
        let id = self.place_of(fingerprint)?;
        let lane = &mut self.lanes[id as usize];
        if matches!(lane.state, State::Running { .. } | State::Arriving) {
            return None;
        }
        if lane.waiting.is_empty() {
            let (message, accepted_at) = self.waiting.pop_front(&mut lane.extra.as_mut()?.aside)?;
            self.aside -= 1;
            self.leave_if_empty(id);
            return Some(Item { fingerprint, accepted_at, message });
        }
        let item = self.take_first(id)?;
        let lane = &mut self.lanes[id as usize];
        lane.set_attempts(0);
        if let State::Deferred { .. } = lane.state {
            // The one that had failed is gone; the next has no reason to wait.
            self.deferred -= 1;
            self.rest(id);
        } else {
            self.leave_if_empty(id);
        }
        Some(item)
    }

    /// Takes all messages of a lane out, oldest first, unless one is in flight.
    pub(crate) fn withdraw(&mut self, fingerprint: u64) -> Option<Vec<Item<K, M>>> {
        if self.is_in_stream(fingerprint) {
            return None;
        }
        let Some(id) = self.place_of(fingerprint) else { return Some(Vec::new()) };
        if matches!(self.lanes[id as usize].state, State::Running { .. } | State::Arriving) {
            return None;
        }
        let aside = self.lanes[id as usize].extra.as_ref().map_or(0, |extra| extra.aside.len());
        let all = (self.lanes[id as usize].waiting.len() + aside) as usize;
        if self.take_back_aside(id) && self.lanes[id as usize].state == State::Aside {
            self.make_ready(id);
        }
        let items: Vec<_> = (0..all).filter_map(|_| self.skip_head(fingerprint)).collect();
        debug_assert_eq!(items.len(), all, "nothing stays behind");
        Some(items)
    }

    /// A lane that has lost a message and may have none left: out of the ready list, and gone if nothing is aside.
    fn leave_if_empty(&mut self, id: u32) {
        let lane = &self.lanes[id as usize];
        if !lane.waiting.is_empty() {
            return;
        }
        let aside = lane.extra.as_ref().is_some_and(|extra| !extra.aside.is_empty());
        match lane.state {
            State::Running { .. } | State::Arriving => return,
            State::Parked { .. } if aside => return,
            State::Parked { .. } => self.parked -= 1,
            State::Ready => self.ready.remove(&mut self.lanes, id),
            State::Aside => {}
            State::Deferred { .. } => unreachable!("a deferred lane has the head that it waits for"),
        }
        self.rest(id);
    }

    /// Takes the event that has waited longest out of its lane, wherever it stands.
    pub(crate) fn evict_oldest(&mut self) -> Option<(u64, Item<K, M>)> {
        let (id, node) = self.waiting.oldest()?;
        let item = self.take_node(id, node);
        self.leave_if_empty(id);
        Some((item.fingerprint, item))
    }

    /// Takes the event of one lane that has waited longest.
    pub(crate) fn evict_oldest_of(&mut self, fingerprint: u64) -> Option<Item<K, M>> {
        let id = self.place_of(fingerprint)?;
        let node = self.waiting.oldest_in(&self.lanes[id as usize].waiting)?;
        let item = self.take_node(id, node);
        self.leave_if_empty(id);
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Ending, Turn};
    use super::*;
    use crate::message::Message;

    #[test]
    fn what_comes_back_from_aside_has_not_failed_as_often_as_the_head_before_which_it_comes() {
        let mut lanes = Lanes::new(false);
        for body in ["put aside", "tried again"] {
            lanes.admit(Item { fingerprint: 1, accepted_at: 0, message: Message::new(1, body) });
        }
        let mut turn = Turn::new();
        assert!(lanes.claim(0, 1, 0, &mut turn, None));
        turn.ending = Ending::ParkMessage { note: None };
        lanes.settle(&mut turn, 0);
        assert!(lanes.claim(0, 1, 0, &mut turn, None));
        turn.ending = Ending::Defer { until: 5, attempts: 2, was_begun: true, note: None };
        lanes.settle(&mut turn, 0);
        lanes.wake_due(5);
        assert!(lanes.resume(1));
        assert!(lanes.claim(5, 1, 0, &mut turn, None));
        assert_eq!((turn.items[0].message.body, turn.attempts), ("put aside", 0));
    }
}
