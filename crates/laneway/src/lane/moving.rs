//! Lanes that move to another dispatcher, because the topology has changed.
//!
//! `change.rs` takes the lanes whose home is elsewhere out of one dispatcher and brings them into another, with all that they have and the state that they are
//! in. A lane in flight comes in two parts: what waits, at once, and what its turn leaves over, once that has settled.

use super::{Ending, Lanes, State};
use crate::message::Item;

/// A whole lane on its way to another dispatcher.
#[derive(Debug)]
pub(crate) struct Parcel<K, M> {
    pub(crate) fingerprint: u64,
    pub(crate) to: usize,
    waiting: Vec<Item<K, M>>,
    aside: Vec<Item<K, M>>,
    state: State,
    attempts: u32,
    note: Option<String>,
}

/// How many lanes and messages have come to a dispatcher by changes of the topology.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Arrived {
    pub(crate) lanes: u64,
    pub(crate) messages: u64,
}

impl<K, M> Parcel<K, M> {
    /// How many messages it carries.
    pub(crate) fn messages(&self) -> u64 {
        (self.waiting.len() + self.aside.len()) as u64
    }
}

impl<K, M> Lanes<K, M> {
    /// Takes every lane out whose home is elsewhere. Of a lane in flight only what waits is taken, and the rest follows
    /// when its turn has settled; its parcel says `Arriving`.
    pub(crate) fn move_out(
        &mut self,
        here: usize,
        home: &mut dyn FnMut(u64, Option<&K>) -> usize,
    ) -> Vec<Parcel<K, M>> {
        let ids: Vec<u32> = self.table.ids().collect();
        let mut parcels = Vec::new();
        for id in ids {
            let to = home(self.lanes[id as usize].fingerprint, self.key(id));
            if to == here {
                continue;
            }
            parcels.push(match self.lanes[id as usize].state {
                State::Running { .. } => self.split_off(id, to),
                _ => self.take_out(id, to),
            });
        }
        parcels
    }

    /// The waiting part of a lane in flight. The turn's leftover will follow as a parcel of its own.
    fn split_off(&mut self, id: u32, to: usize) -> Parcel<K, M> {
        let lane = &mut self.lanes[id as usize];
        lane.extra_mut().handover = Some(to);
        let (fingerprint, state) = (lane.fingerprint, State::Arriving);
        let (aside, waiting) = (self.take_aside(id), self.take_all(id).collect());
        Parcel { fingerprint, to, waiting, aside, state, attempts: 0, note: None }
    }

    /// A whole lane that is not in flight.
    fn take_out(&mut self, id: u32, to: usize) -> Parcel<K, M> {
        let state = self.lanes[id as usize].state;
        match state {
            State::Ready => self.ready.remove(&mut self.lanes, id),
            State::Deferred { .. } => self.deferred -= 1,
            State::Parked { .. } => self.parked -= 1,
            State::Arriving => self.arriving -= 1,
            State::Aside => {}
            State::Running { .. } => unreachable!("a lane in flight is split"),
        }
        self.pack(id, to, state)
    }

    /// A lane whose turn has just settled, and which was told to move.
    pub(super) fn hand_over(&mut self, id: u32, to: usize, ending: Ending, now: u64) -> Parcel<K, M> {
        let lane = &mut self.lanes[id as usize];
        let (state, attempts, note) = match ending {
            Ending::Handled => (State::Ready, lane.attempts(), None),
            Ending::Defer { until, attempts, note, .. } => {
                (State::Deferred { until, stamp: 0 }, attempts, note)
            }
            Ending::ParkMessage { note } => (State::Ready, 0, note),
            Ending::ParkLane { attempts, note } => (State::Parked { since: now }, attempts, note),
        };
        lane.set_attempts(attempts);
        if note.is_some() {
            lane.extra_mut().note = note;
        }
        let asked_to_park = lane.extra.as_ref().and_then(|extra| extra.park_after);
        self.pack(id, to, asked_to_park.map_or(state, |since| State::Parked { since }))
    }

    /// Takes a lane that is in no list out of the table with all that it has.
    fn pack(&mut self, id: u32, to: usize, state: State) -> Parcel<K, M> {
        let (aside, waiting) = (self.take_aside(id), self.take_all(id).collect());
        let lane = &mut self.lanes[id as usize];
        let (fingerprint, attempts) = (lane.fingerprint, lane.attempts());
        let note = lane.extra.as_mut().and_then(|extra| extra.note.take());
        self.remove(id);
        Parcel { fingerprint, to, waiting, aside, state, attempts, note }
    }

    /// Whether lanes that were moved here still wait for the end of their turn elsewhere.
    pub(crate) fn arriving(&self) -> usize {
        self.arriving
    }

    /// Takes in a lane, or the part of it that was still missing, in front of what has come for it here in the meantime.
    pub(crate) fn arrive(&mut self, parcel: Parcel<K, M>) {
        self.arrived.lanes += 1;
        self.arrived.messages += parcel.messages();
        let Parcel { fingerprint, waiting, aside, state, attempts, note, .. } = parcel;
        let known = self.place_of(fingerprint);
        let awaited = known.is_some_and(|id| self.lanes[id as usize].state == State::Arriving);
        let id = known.unwrap_or_else(|| self.create(fingerprint, State::Arriving));
        if !awaited {
            self.arriving += 1;
            self.lanes[id as usize].state = State::Arriving;
        }
        for item in aside {
            let aside = &mut self.lanes[id as usize].extra_mut().aside;
            self.waiting.push_back(aside, id, (item.message, item.accepted_at), false);
            self.aside += 1;
        }
        // Only a head that has been tried was started; the others can still make room.
        let tried = usize::from(attempts > 0 || matches!(state, State::Deferred { .. }));
        for (place, item) in waiting.into_iter().enumerate().rev() {
            let evictable = place >= tried && !item.message.kind.is_control();
            self.put_back(id, item, evictable);
        }
        if state == State::Arriving {
            return;
        }
        self.arriving -= 1;
        let lane = &mut self.lanes[id as usize];
        lane.set_attempts(attempts);
        let asked_to_park = lane.extra.as_mut().and_then(|extra| extra.park_after.take());
        if note.is_some() {
            lane.extra_mut().note = note;
        }
        match state {
            State::Parked { since } => self.rest_or_park(id, Some(since)),
            State::Deferred { until, .. } if asked_to_park.is_none() => {
                self.defer(id, until);
            }
            _ => self.rest_or_park(id, asked_to_park),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Turn;
    use super::*;
    use crate::message::{Message, Priority};

    fn item(key: u64, priority: Priority) -> Item<u64, ()> {
        Item { fingerprint: key, accepted_at: 0, message: Message::new(key, ()).priority(priority) }
    }

    /// The keys of the lanes that would run, in their order, one message at a time.
    fn order(lanes: &mut Lanes<u64, ()>) -> Vec<u64> {
        let mut turn = Turn::new();
        let next = || {
            let claimed = lanes.claim(0, 1, 0, &mut turn, None);
            claimed.then(|| {
                turn.items.clear();
                lanes.settle(&mut turn, 0);
                turn.fingerprint
            })
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn a_lane_that_moves_keeps_the_tier_of_its_most_urgent_message() {
        let (mut from, mut to) = (Lanes::new(false), Lanes::new(false));
        from.admit(item(1, Priority::Normal));
        from.admit(item(1, Priority::Urgent));
        from.admit(item(1, Priority::Normal));
        to.admit(item(2, Priority::Normal));
        to.admit(item(2, Priority::Normal));
        for parcel in from.move_out(0, &mut |_, _| 1) {
            to.arrive(parcel);
        }
        assert_eq!(
            order(&mut to),
            [1, 1, 2, 1, 2],
            "before the others until the urgent one has been handled"
        );
    }

    #[test]
    fn what_came_for_a_lane_on_its_way_counts_among_what_it_brings() {
        let (mut from, mut to) = (Lanes::new(false), Lanes::new(false));
        let mut turn = Turn::new();
        from.admit(item(1, Priority::Normal));
        from.admit(item(1, Priority::Normal));
        assert!(from.claim(0, 2, 0, &mut turn, None));
        for parcel in from.move_out(0, &mut |_, _| 1) {
            to.arrive(parcel);
        }
        to.admit(item(1, Priority::Urgent));
        to.admit(item(2, Priority::Normal));
        // Neither was begun.
        to.arrive(from.settle(&mut turn, 0).parcel.expect("it moves"));
        assert_eq!(order(&mut to), [1, 1, 1, 2]);
    }

    #[test]
    fn timers_that_nothing_waits_for_are_forgotten() {
        let mut lanes = Lanes::new(false);
        let mut turn = Turn::new();
        lanes.admit(item(1, Priority::Normal));
        for _ in 0..10_000 {
            assert!(lanes.claim(0, 1, 0, &mut turn, None));
            turn.ending = Ending::Defer { until: 3_600, attempts: 1, was_begun: true, note: None };
            lanes.settle(&mut turn, 0);
            assert!(lanes.resume(1), "an operator lets it go on");
        }
        assert!(lanes.timers.len() < 100, "{} timers", lanes.timers.len());
    }
}
