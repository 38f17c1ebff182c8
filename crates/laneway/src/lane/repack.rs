//! Memory follows what is here: slabs that a burst has grown are given up for small ones, whatever is in them.
//!
//! Lanes and messages are known by their places in slabs, and places come free all over them; so a slab can only be made smaller by moving what is left.
//! That is a walk over what is left, not over the slabs, and it is done when there is little of it (`dispatcher/` decides for how long). Everything that names a place is in here and is
//! told the new one, except for the turns in workers' hands. A turn remembers by which *packing* its lane had its place; if that is not the current one, the lane is found by its
//! fingerprint: a lane in flight is always in the table.

use std::{
    cmp::Reverse,
    collections::HashMap,
    mem::{replace, take},
};

use foldhash::{HashMapExt, fast::FixedState};

use super::{
    Lane, Lanes, State, Turn,
    table::Table,
    waiting::{NONE, Node},
};
use crate::message::Message;

/// How much memory is kept without a use for it, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keeps {
    /// So many places are kept whatever is in them.
    pub(crate) places: usize,
    /// There is little in slabs that have at least so many places for everything that is here.
    pub(crate) sparse: usize,
    /// What has little in it is given up when it had for so long, in nanoseconds.
    pub(crate) linger: u64,
}

impl Keeps {
    /// 1,024 small messages are a few dozen kilobytes, and a dispatcher that idles between bursts should not pay for growing again. The next burst may
    /// follow at once, and to grow again costs more than a message does.
    pub(crate) const USUAL: Keeps = Keeps { places: 1_024, sparse: 8, linger: 100_000_000 };

    /// As often as can be, so that the simulator sees it between any two steps.
    pub(crate) const NOTHING: Keeps = Keeps { places: 1, sparse: 2, linger: 0 };

    /// Whether so many places are far too many for what is here.
    pub(crate) fn is_sparse(&self, places: usize, taken: usize) -> bool {
        places > self.places && places / self.sparse >= taken
    }
}

/// What was given up, to be dropped without a lock: it may be much.
#[derive(Debug)]
pub(crate) struct Outgrown<K, M> {
    _lanes: Vec<Lane<K>>,
    _waiting: Vec<Node<Message<K, M>>>,
    _table: Table,
}

/// New places by old ones.
pub(super) type Places = HashMap<u32, u32, FixedState>;

/// The new place of what had an old one. Not every link leads somewhere.
pub(super) fn placed(places: &Places, old: u32) -> u32 {
    if old == NONE { NONE } else { places[&old] }
}

impl<K, M> Lanes<K, M> {
    /// Whether there are so many more places than lanes, messages and timers that these are worth moving. All slabs together, because all are walked: a dense one beside a sparse one would be
    /// walked for nothing.
    pub(crate) fn is_sparse(&self, keeps: &Keeps) -> bool {
        let lanes = self.lanes.capacity().max(self.table.capacity());
        let places = lanes + self.waiting.capacity() + self.timers.capacity();
        keeps.is_sparse(places, self.table.len() + self.waiting.len() + self.deferred)
    }

    /// Moves everything into slabs of its own size.
    pub(crate) fn repack(&mut self) -> Outgrown<K, M> {
        self.forget_timers();
        self.packing = self.packing.wrapping_add(1);
        let mut old = take(&mut self.lanes);
        let mut places = Places::with_capacity(self.table.len());
        let mut table = Table::new();
        for id in self.table.ids() {
            let place = self.lanes.len() as u32;
            places.insert(id, place);
            let vacant = Lane::new(0, State::Aside, 0);
            self.lanes.push(replace(&mut old[id as usize], vacant));
            table.insert(place, &self.lanes);
        }
        self.free = NONE;
        for lane in &mut self.lanes {
            let is_listed = lane.state == State::Ready;
            let link = |old| if is_listed { placed(&places, old) } else { NONE };
            (lane.previous, lane.next) = (link(lane.previous), link(lane.next));
        }
        self.ready.move_to(&places);
        let timers = take(&mut self.timers).into_iter();
        self.timers = timers.map(|Reverse((at, id, stamp))| Reverse((at, places[&id], stamp))).collect();
        // To collect what has been a heap is to use its memory again, all of it.
        self.timers.shrink_to_fit();
        let queues = (0..).zip(&mut self.lanes).flat_map(|(id, lane)| {
            let aside = lane.extra.as_mut().map(|extra| &mut extra.aside);
            [Some(&mut lane.waiting), aside].into_iter().flatten().map(move |queue| (id, queue))
        });
        let waiting = self.waiting.repack(queues);
        Outgrown { _lanes: old, _waiting: waiting, _table: replace(&mut self.table, table) }
    }

    /// How often everything has been moved.
    #[cfg(test)]
    pub(crate) fn packing(&self) -> u32 {
        self.packing
    }

    /// The place of the lane that this turn is of.
    pub(super) fn lane_of(&self, turn: &Turn<K, M>) -> u32 {
        match turn.lane {
            NONE => NONE,
            id if turn.packing == self.packing => id,
            _ => self.place_of(turn.fingerprint).expect("a lane in flight is in the table"),
        }
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;
    use crate::{
        lane::Ending,
        message::{Item, Priority},
    };

    /// Lanes that are repacked now and then beside some that never are.
    struct Twins {
        lanes: [Lanes<u64, u64>; 2],
        turns: Vec<[Turn<u64, u64>; 2]>,
        now: u64,
        random: Rng,
    }

    /// What a step came to, to compare.
    type Seen = Vec<(u64, u64, u32)>;

    fn item(key: u64, body: u64, random: &mut Rng) -> Item<u64, u64> {
        let priorities = [Priority::Low, Priority::Normal, Priority::Normal, Priority::Urgent];
        let message = Message::new(key, body).priority(priorities[random.usize(0..4)]);
        Item { fingerprint: key, accepted_at: body % 3, message }
    }

    fn seen(item: &Item<u64, u64>) -> (u64, u64, u32) {
        (item.message.key, item.message.body, item.accepted_at as u32)
    }

    impl Twins {
        fn new(seed: u64) -> Self {
            let mut random = Rng::with_seed(seed);
            let by_age = random.bool();
            let lanes = [Lanes::new(by_age), Lanes::new(by_age)];
            Twins { lanes, turns: Vec::new(), now: 0, random }
        }

        /// Does the same to both, and sees the same of both.
        fn both(&mut self, mut act: impl FnMut(&mut Lanes<u64, u64>, u64, &mut Rng) -> Seen) -> bool {
            let fork = self.random.fork();
            let [a, b] = &mut self.lanes;
            let (a, b) = (act(a, self.now, &mut fork.clone()), act(b, self.now, &mut fork.clone()));
            assert_eq!(a, b);
            !a.is_empty()
        }

        fn claim(&mut self) {
            let mut turns = [Turn::new(), Turn::new()];
            let mut each = turns.iter_mut();
            let claimed = self.both(|lanes, now, random| {
                let turn = each.next().expect("two");
                lanes.wake_due(now);
                lanes.claim(now, random.usize(1..4), 0, turn, None);
                turn.items.iter().map(|item| (item.fingerprint, item.message.body, turn.attempts)).collect()
            });
            if claimed {
                self.turns.push(turns);
            }
        }

        fn settle(&mut self) {
            if self.turns.is_empty() {
                return;
            }
            let turns = self.turns.swap_remove(self.random.usize(0..self.turns.len()));
            let mut each = turns.into_iter();
            self.both(|lanes, now, random| {
                let mut turn = each.next().expect("two");
                turn.items.drain(..random.usize(0..=turn.items.len()));
                if !turn.items.is_empty() {
                    turn.ending = match random.u8(0..4) {
                        0 => Ending::Defer { until: now + 3, attempts: 1, was_begun: true, note: None },
                        1 => Ending::ParkMessage { note: None },
                        2 => Ending::ParkLane { attempts: 2, note: None },
                        _ => Ending::Handled,
                    };
                }
                let gives_way = lanes.gives_way(&turn);
                lanes.settle(&mut turn, now);
                vec![(u64::from(gives_way), 0, 0)]
            });
        }

        fn operate(&mut self) {
            let key = self.random.u64(0..6);
            self.both(|lanes, now, random| match random.u8(0..6) {
                0 => vec![(u64::from(lanes.park(key, "", now)), 0, 0)],
                1 | 2 => vec![(u64::from(lanes.resume(key)), 0, 0)],
                3 => lanes.skip_head(key).iter().map(seen).collect(),
                4 => lanes.withdraw(key).iter().flatten().map(seen).collect(),
                _ => lanes.evict_oldest().iter().map(|(_, item)| seen(item)).collect(),
            });
        }

        fn step(&mut self, number: u64) {
            self.now += 1;
            match self.random.u8(0..8) {
                0..3 => {
                    let key = self.random.u64(0..6);
                    self.both(|lanes, _, random| {
                        lanes.admit(item(key, number, random));
                        Seen::new()
                    });
                }
                3..5 => self.claim(),
                5..7 => self.settle(),
                _ => self.operate(),
            }
            if self.random.u8(0..4) == 0 {
                drop(self.lanes[0].repack());
            }
            assert_eq!(self.lanes[0].audit(), self.lanes[1].audit());
        }
    }

    #[test]
    fn what_is_moved_into_smaller_slabs_goes_on_as_if_it_had_not_been() {
        for seed in 0..if cfg!(miri) { 2 } else { 500 } {
            let mut twins = Twins::new(seed);
            (0..200).for_each(|number| twins.step(number));
        }
    }

    #[test]
    fn a_burst_leaves_as_many_places_as_what_is_left_needs() {
        let mut lanes = Lanes::<u64, u64>::new(false);
        let mut turn = Turn::new();
        let mut random = Rng::with_seed(1);
        (0..100_000).for_each(|key| lanes.admit(item(key, 0, &mut random)));
        assert!(!lanes.is_sparse(&Keeps::USUAL));
        for _ in 0..99_990 {
            lanes.claim(0, 1, 0, &mut turn, None);
            turn.items.clear();
            lanes.settle(&mut turn, 0);
        }
        assert!(lanes.is_sparse(&Keeps::USUAL));
        drop(lanes.repack());
        lanes.audit().unwrap();
        assert!(lanes.lanes.capacity() + lanes.waiting.capacity() + lanes.table.capacity() < 100);
        assert!(!lanes.is_sparse(&Keeps::USUAL));
    }

    #[test]
    fn the_timers_of_a_burst_that_was_deferred_leave_no_memory_either() {
        let (mut lanes, mut turn, mut random) =
            (Lanes::<u64, u64>::new(false), Turn::new(), Rng::with_seed(1));
        (0..10_000).for_each(|key| lanes.admit(item(key, 0, &mut random)));
        while lanes.claim(0, 1, 0, &mut turn, None) {
            turn.ending = Ending::Defer { until: turn.fingerprint, attempts: 1, was_begun: true, note: None };
            lanes.settle(&mut turn, 0);
        }
        lanes.wake_due(9_989);
        while lanes.claim(0, 1, 0, &mut turn, None) {
            turn.items.clear();
            lanes.settle(&mut turn, 0);
        }
        assert!(lanes.deferred == 10 && lanes.is_sparse(&Keeps::USUAL));
        drop(lanes.repack());
        lanes.audit().unwrap();
        assert!(lanes.timers.capacity() < 100, "{} places for timers", lanes.timers.capacity());
    }

    /// To move a dense slab for the sake of a sparse one that is smaller costs more than it gives back.
    #[test]
    fn what_is_dense_is_not_moved_for_the_sake_of_what_is_not() {
        let (mut lanes, mut random) = (Lanes::<u64, u64>::new(false), Rng::with_seed(1));
        (0..2_000).for_each(|key| lanes.admit(item(key, 0, &mut random)));
        (0..100_000).for_each(|body| lanes.admit(item(0, body, &mut random)));
        for key in 1..2_000 {
            lanes.withdraw(key);
        }
        assert!(!lanes.is_sparse(&Keeps::USUAL), "one lane in 2,000 places, with 100,000 messages");
        lanes.withdraw(0);
        assert!(lanes.is_sparse(&Keeps::USUAL));
    }

    #[test]
    fn a_lane_is_a_cache_line() {
        assert_eq!(size_of::<Lane<u64>>(), 64);
    }
}
