//! What a consumer holds of a broker that gives messages out in order and does no more than that: leases, delays and order per group, in this process.
//!
//! Some brokers cannot hand a message back without letting its successors pass (NATS, ActiveMQ), cannot delay one, or have no lease at all (Kafka,
//! RabbitMQ). A source of such a broker reads ahead as far as its window goes and puts what it reads on a [`Shelf`]; the router claims from the shelf, and
//! what it gives back stays here, in its place. The broker only hears of what is done. When the process dies, the broker gives everything that it has
//! not heard of to the next one, in order.
//!
//! A plain state machine: no clock, no lock, no task. The source puts it under a lock and tells it the time; see `nats` for one that does.
//!
//! # What may be handed out
//!
//! The first waiting message of a group, unless it is delayed; then nothing of the group. What is behind it may follow while it is claimed: a shelf has one
//! claimer, who keeps the order of what it has. A message that comes back waits in its old place, in front of all that have not been handed out.
//!
//! # Receipts
//!
//! A receipt names the shelf, the message and the handing-out. One of an older handing-out, of another shelf, or of a message that is gone is stale.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Delivery, DeliveryId, Depth, Receipt, Settled};
use crate::pool::Ungrouped;

/// So many messages of one group are handed out before the next group has its turn.
const TURN: usize = 16;

/// What is read from a broker, on its way to a shelf.
pub struct Arrival<T> {
    /// Which message it is. Grows in the order of publication.
    pub id: DeliveryId,
    /// Its group.
    pub group: Option<Arc<str>>,
    /// What was published.
    pub text: Arc<[u8]>,
    /// How often the broker has handed it out before, as far as it can tell.
    pub earlier: u32,
    /// It must not be handed out before.
    pub not_before: Option<Instant>,
    /// What the source needs to settle it at the broker.
    pub handle: T,
}

/// What a message is, apart from its handing-out.
#[derive(Clone)]
pub struct Content {
    /// Its group.
    pub group: Option<Arc<str>>,
    /// What was published.
    pub text: Arc<[u8]>,
}

/// Messages that are held, in order per group.
pub struct Shelf<T> {
    /// Told apart from other shelves.
    tag: u64,
    ungrouped: Ungrouped,
    items: HashMap<DeliveryId, Item<T>, foldhash::fast::RandomState>,
    lanes: HashMap<Key, Lane, foldhash::fast::RandomState>,
    /// Lanes whose head may be handed out, each once.
    ready: VecDeque<Key>,
    /// Lanes whose head has to wait until then.
    delayed: BTreeSet<(Instant, Key)>,
    /// When leases run out, and how many at each time: those of a claim run out together.
    leases: BTreeMap<Instant, usize>,
    /// How many are leased.
    leased: usize,
    handed_out: u64,
    /// How many are being settled.
    settling: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Key {
    Group(Arc<str>),
    Alone(DeliveryId),
}

struct Item<T> {
    group: Option<Arc<str>>,
    text: Arc<[u8]>,
    attempts: u32,
    not_before: Option<Instant>,
    handle: T,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    Leased {
        turn: u64,
        until: Instant,
    },
    /// Its fate is on its way to the broker.
    Settling {
        turn: u64,
        until: Instant,
    },
}

/// The waiting messages of a group.
#[derive(Default)]
struct Lane {
    waiting: BTreeSet<DeliveryId>,
    listed: Listed,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Listed {
    #[default]
    Nowhere,
    Ready,
    Delayed(Instant),
}

impl<T: Clone> Shelf<T> {
    /// An empty one.
    pub fn new(ungrouped: Ungrouped) -> Self {
        Shelf {
            tag: fastrand::u64(..),
            ungrouped,
            items: HashMap::default(),
            lanes: HashMap::default(),
            ready: VecDeque::new(),
            delayed: BTreeSet::new(),
            leases: BTreeMap::new(),
            leased: 0,
            handed_out: 0,
            settling: 0,
        }
    }

    /// How many messages are on it, claimed ones included.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there is nothing on it.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether any message is claimed, or is being settled.
    pub fn has_claimed(&self) -> bool {
        self.leased + self.settling > 0
    }

    /// What is waiting here, and what is claimed.
    pub fn depth(&self) -> Depth {
        let leased = (self.leased + self.settling) as u64;
        Depth { waiting: self.items.len() as u64 - leased, leased, ..Depth::default() }
    }

    /// The handles of messages that are claimed, or are being settled.
    pub fn claimed(&self) -> impl Iterator<Item = &T> {
        self.items.values().filter(|item| item.state != State::Waiting).map(|item| &item.handle)
    }

    /// The handles of all messages.
    pub fn handles(&self) -> impl Iterator<Item = &T> {
        self.items.values().map(|item| &item.handle)
    }

    /// The handle of a message.
    pub fn handle(&self, id: DeliveryId) -> Option<&T> {
        self.items.get(&id).map(|item| &item.handle)
    }

    /// The handle of the message of a receipt, if that is good.
    pub fn handle_of(&self, receipt: &Receipt) -> Option<&T> {
        self.handle(self.leased(receipt)?)
    }

    /// Takes those off for which it is true, by their handles and whether they are claimed: their receipts are stale from now on.
    pub fn remove_if(&mut self, mut goes: impl FnMut(&T, bool) -> bool) {
        let mut going = |(id, item): (&DeliveryId, &Item<T>)| {
            goes(&item.handle, item.state != State::Waiting).then_some(*id)
        };
        let ids: Vec<DeliveryId> = self.items.iter().filter_map(&mut going).collect();
        ids.into_iter().for_each(|id| self.finish(id));
    }

    /// Puts a message on the shelf. One that is there already keeps its place and its state, and only its handle is exchanged: the broker has
    /// handed it out again. True if it is new.
    pub fn put(&mut self, arrival: Arrival<T>, now: Instant) -> bool {
        if let Some(item) = self.items.get_mut(&arrival.id) {
            item.handle = arrival.handle;
            return false;
        }
        let item = Item {
            group: arrival.group,
            text: arrival.text,
            attempts: arrival.earlier,
            not_before: arrival.not_before.filter(|time| *time > now),
            handle: arrival.handle,
            state: State::Waiting,
        };
        let key = self.key(arrival.id, &item);
        self.items.insert(arrival.id, item);
        self.wait(key, arrival.id);
        true
    }

    /// Claims messages that may be handed out now, fairly among the groups.
    pub fn claim(&mut self, most: usize, lease: Duration, now: Instant) -> Vec<Delivery> {
        self.expire(now);
        self.wake(now);
        let mut claimed = Vec::new();
        while claimed.len() < most
            && let Some(key) = self.ready.pop_front()
        {
            self.claim_of(&key, most, lease, now, &mut claimed);
        }
        claimed
    }

    /// When the next claim may have something that it has not now: the end of a delay, or of a lease.
    pub fn next_event(&self) -> Option<Instant> {
        let delay = self.delayed.first().map(|(time, _)| *time);
        let lease = self.leases.first_key_value().map(|(time, _)| *time);
        delay.into_iter().chain(lease).min()
    }

    /// Whether there is something to claim now.
    pub fn has_ready(&mut self, now: Instant) -> bool {
        self.expire(now);
        self.wake(now);
        !self.ready.is_empty()
    }

    /// Renews a lease.
    pub fn extend(&mut self, receipt: &Receipt, lease: Duration, now: Instant) -> Settled {
        self.expire(now);
        let Some(id) = self.leased(receipt) else { return Settled::Stale };
        self.lease_until(id, now + lease);
        Settled::Settled
    }

    /// Puts a claimed message back into its place, to be handed out after the delay.
    pub fn give_back(&mut self, receipt: &Receipt, delay: Duration, now: Instant) -> Settled {
        self.expire(now);
        let Some(id) = self.leased(receipt) else { return Settled::Stale };
        self.put_back(id, (!delay.is_zero()).then(|| now + delay));
        Settled::Settled
    }

    /// Begins to settle a claimed message at the broker: until [`finish`](Self::finish) or [`fail`](Self::fail) it is neither handed out nor lost. Nothing,
    /// if the receipt is stale.
    pub fn begin(&mut self, receipt: &Receipt, now: Instant) -> Option<(DeliveryId, T)> {
        self.expire(now);
        let id = self.leased(receipt)?;
        let item = self.items.get_mut(&id)?;
        if let State::Leased { turn, until } = item.state {
            item.state = State::Settling { turn, until };
            let handle = item.handle.clone();
            self.end_lease(until);
            self.settling += 1;
            return Some((id, handle));
        }
        Some((id, item.handle.clone()))
    }

    /// The text and the group of a message, for whoever keeps a copy of it elsewhere.
    pub fn look(&self, id: DeliveryId) -> Option<Content> {
        self.items.get(&id).map(|item| Content { group: item.group.clone(), text: Arc::clone(&item.text) })
    }

    /// The broker has taken the settlement: the message is gone.
    pub fn finish(&mut self, id: DeliveryId) {
        let Some(item) = self.items.remove(&id) else { return };
        match item.state {
            State::Waiting => {}
            State::Leased { until, .. } => self.end_lease(until),
            State::Settling { .. } => self.settling -= 1,
        }
        // A lane has only what waits, and is gone without it.
        if item.state == State::Waiting {
            let key = self.key(id, &item);
            self.unlist(&key);
            if let Some(lane) = self.lanes.get_mut(&key) {
                lane.waiting.remove(&id);
            }
            self.list(key);
        }
    }

    /// The broker could not be told: the receipt is good again, for as long as it was, and a little longer, so that it can be tried once more.
    pub fn fail(&mut self, id: DeliveryId, grace: Duration, now: Instant) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if let State::Settling { turn, until } = item.state {
            self.settling -= 1;
            let until = until.max(now + grace);
            item.state = State::Leased { turn, until };
            self.begin_lease(until);
        }
    }

    /// Takes everything off: all receipts are stale from now on.
    pub fn clear(&mut self) {
        *self = Shelf { handed_out: self.handed_out, ..Shelf::new(self.ungrouped) };
    }

    fn key(&self, id: DeliveryId, item: &Item<T>) -> Key {
        match (&item.group, self.ungrouped) {
            (Some(group), _) => Key::Group(Arc::clone(group)),
            (None, Ungrouped::Serial) => Key::Group("".into()),
            (None, Ungrouped::Unordered) => Key::Alone(id),
        }
    }

    /// Messages whose lease is over wait again.
    pub fn expire(&mut self, now: Instant) {
        if self.leases.first_key_value().is_none_or(|(until, _)| *until > now) {
            return;
        }
        // Rare enough to look through all of them.
        let is_over = |item: &Item<T>| matches!(item.state, State::Leased { until, .. } if until <= now);
        let over: Vec<DeliveryId> =
            self.items.iter().filter(|(_, item)| is_over(item)).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.put_back(id, None));
    }

    fn begin_lease(&mut self, until: Instant) {
        *self.leases.entry(until).or_default() += 1;
        self.leased += 1;
    }

    fn end_lease(&mut self, until: Instant) {
        self.leased -= 1;
        if let Some(count) = self.leases.get_mut(&until) {
            *count -= 1;
            if *count == 0 {
                self.leases.remove(&until);
            }
        }
    }

    /// Lanes whose delay is over are ready.
    fn wake(&mut self, now: Instant) {
        while let Some((time, key)) = self.delayed.first().filter(|(time, _)| *time <= now).cloned() {
            self.delayed.remove(&(time, key.clone()));
            if let Some(lane) = self.lanes.get_mut(&key) {
                lane.listed = Listed::Ready;
                self.ready.push_back(key);
            }
        }
    }

    /// Hands out what a ready lane has, for one turn.
    fn claim_of(
        &mut self,
        key: &Key,
        most: usize,
        lease: Duration,
        now: Instant,
        claimed: &mut Vec<Delivery>,
    ) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        lane.listed = Listed::Nowhere;
        let until = now + lease;
        let before = claimed.len();
        for _ in 0..TURN {
            let Some(&id) = lane.waiting.first() else { break };
            let item = self.items.get_mut(&id).expect("what waits is on the shelf");
            if claimed.len() == most || item.not_before.is_some_and(|time| time > now) {
                break;
            }
            lane.waiting.pop_first();
            self.handed_out += 1;
            let turn = self.handed_out;
            item.attempts = item.attempts.saturating_add(1);
            item.state = State::Leased { turn, until };
            item.not_before = None;
            claimed.push(Delivery {
                id,
                receipt: Receipt::Numbers([self.tag, id, turn, 0]),
                group: item.group.clone(),
                text: Arc::clone(&item.text),
                attempt: item.attempts,
                sequence: id,
            });
        }
        (before..claimed.len()).for_each(|_| self.begin_lease(until));
        self.list(key.clone());
    }

    /// The message of a receipt that is good.
    fn leased(&self, receipt: &Receipt) -> Option<DeliveryId> {
        let Receipt::Numbers([tag, id, turn, 0]) = *receipt else { return None };
        let state = self.items.get(&id).filter(|_| tag == self.tag)?.state;
        matches!(state, State::Leased { turn: this, .. } if this == turn).then_some(id)
    }

    fn lease_until(&mut self, id: DeliveryId, time: Instant) {
        if let Some(item) = self.items.get_mut(&id)
            && let State::Leased { turn, until } = item.state
        {
            item.state = State::Leased { turn, until: time };
            self.end_lease(until);
            self.begin_lease(time);
        }
    }

    fn put_back(&mut self, id: DeliveryId, not_before: Option<Instant>) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let before = std::mem::replace(&mut item.state, State::Waiting);
        item.not_before = not_before;
        if let State::Leased { until, .. } = before {
            self.end_lease(until);
        }
        let key = self.key(id, &self.items[&id]);
        self.wait(key, id);
    }

    /// A message waits in its lane, which may have another head now.
    fn wait(&mut self, key: Key, id: DeliveryId) {
        let lane = self.lanes.entry(key.clone()).or_default();
        lane.waiting.insert(id);
        match lane.listed {
            Listed::Nowhere => self.list(key),
            _ if lane.waiting.first() == Some(&id) => {
                self.unlist(&key);
                self.list(key);
            }
            // Behind the others.
            _ => {}
        }
    }

    /// Takes a lane from the list that it is on.
    fn unlist(&mut self, key: &Key) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        match std::mem::take(&mut lane.listed) {
            Listed::Nowhere => {}
            // Rare: the head of a ready lane has changed, or is gone.
            Listed::Ready => self.ready.retain(|other| other != key),
            Listed::Delayed(time) => {
                self.delayed.remove(&(time, key.clone()));
            }
        }
    }

    /// Puts a lane that is on no list on the one that its head belongs to.
    fn list(&mut self, key: Key) {
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        let Some(head) = lane.waiting.first() else { return self.forget_empty(&key) };
        match self.items[head].not_before {
            Some(time) => {
                lane.listed = Listed::Delayed(time);
                self.delayed.insert((time, key));
            }
            None => {
                lane.listed = Listed::Ready;
                self.ready.push_back(key);
            }
        }
    }

    fn forget_empty(&mut self, key: &Key) {
        if self.lanes.get(key).is_some_and(|lane| lane.waiting.is_empty()) {
            self.lanes.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    struct Rig {
        shelf: Shelf<u64>,
        now: Instant,
    }

    impl Rig {
        fn new() -> Self {
            Rig { shelf: Shelf::new(Ungrouped::Serial), now: Instant::now() }
        }

        fn put(&mut self, id: u64, group: &str) -> bool {
            let arrival = Arrival {
                id,
                group: Some(group.into()),
                text: id.to_string().into_bytes().into(),
                earlier: 0,
                not_before: None,
                handle: id,
            };
            self.shelf.put(arrival, self.now)
        }

        fn claim(&mut self, most: usize) -> Vec<Delivery> {
            self.shelf.claim(most, LEASE, self.now)
        }

        fn ids(&mut self, most: usize) -> Vec<u64> {
            self.claim(most).iter().map(|delivery| delivery.id).collect()
        }

        fn done(&mut self, delivery: &Delivery) {
            let (id, _) = self.shelf.begin(&delivery.receipt, self.now).expect("the receipt is good");
            self.shelf.finish(id);
        }
    }

    #[test]
    fn a_group_comes_in_order_and_groups_take_turns() {
        let mut rig = Rig::new();
        (1..=40).for_each(|id| assert!(rig.put(id, "a")));
        (41..=43).for_each(|id| assert!(rig.put(id, "b")));
        assert!(!rig.put(7, "a"), "it is there already");
        let ids = rig.ids(100);
        let of_a: Vec<u64> = ids.iter().copied().filter(|id| *id <= 40).collect();
        assert_eq!(of_a, (1..=40).collect::<Vec<_>>());
        assert!(ids.iter().position(|id| *id == 43) < Some(20), "b does not wait for all of a: {ids:?}");
    }

    #[test]
    fn what_comes_back_goes_first_and_its_delay_holds_the_group() {
        let mut rig = Rig::new();
        (1..=4).for_each(|id| assert!(rig.put(id, "a")));
        let held = rig.claim(3);
        for delivery in held.iter().rev() {
            assert_eq!(rig.shelf.give_back(&delivery.receipt, Duration::ZERO, rig.now), Settled::Settled);
            assert_eq!(rig.shelf.give_back(&delivery.receipt, Duration::ZERO, rig.now), Settled::Stale);
        }
        let held = rig.claim(2);
        assert_eq!(held.iter().map(|it| (it.id, it.attempt)).collect::<Vec<_>>(), [(1, 2), (2, 2)]);
        rig.shelf.give_back(&held[0].receipt, Duration::from_secs(5), rig.now);
        assert!(rig.ids(10).is_empty(), "the head is delayed");
        assert_eq!(rig.shelf.next_event(), Some(rig.now + Duration::from_secs(5)));
        rig.now += Duration::from_secs(5);
        assert_eq!(rig.ids(10), [1, 3, 4]);
    }

    #[test]
    fn a_lease_that_is_over_makes_its_receipt_stale() {
        let mut rig = Rig::new();
        rig.put(1, "a");
        rig.put(2, "a");
        let first = rig.claim(1);
        rig.now += LEASE;
        let again = rig.claim(1);
        assert_eq!((again[0].id, again[0].attempt), (1, 2));
        assert_eq!(rig.shelf.extend(&first[0].receipt, LEASE, rig.now), Settled::Stale);
        assert!(rig.shelf.begin(&first[0].receipt, rig.now).is_none());
        rig.done(&again[0]);
        assert_eq!(rig.ids(5), [2]);
    }

    #[test]
    fn what_is_being_settled_is_not_handed_out_and_a_failure_can_be_tried_again() {
        let mut rig = Rig::new();
        rig.put(1, "a");
        let held = rig.claim(1);
        let (id, handle) = rig.shelf.begin(&held[0].receipt, rig.now).unwrap();
        assert_eq!((id, handle), (1, 1));
        assert!(rig.shelf.begin(&held[0].receipt, rig.now).is_none(), "once");
        rig.now += LEASE * 2;
        assert!(rig.ids(1).is_empty() && rig.shelf.has_claimed());
        rig.shelf.fail(id, Duration::from_secs(1), rig.now);
        assert!(rig.shelf.begin(&held[0].receipt, rig.now).is_some(), "the receipt is good once more");
        rig.shelf.finish(id);
        assert!(rig.shelf.is_empty() && rig.shelf.lanes.is_empty() && !rig.shelf.has_claimed());
    }

    #[test]
    fn receipts_of_others_and_nonsense_are_stale() {
        let (mut rig, mut other) = (Rig::new(), Rig::new());
        rig.put(1, "a");
        other.put(1, "a");
        let held = other.claim(1);
        rig.claim(1);
        let nonsense =
            [Receipt::Text("1-1-1".into()), Receipt::Numbers([1, 1, 1, 0]), Receipt::Numbers([0; 4])];
        for receipt in nonsense.into_iter().chain([held[0].receipt.clone()]) {
            assert_eq!(rig.shelf.extend(&receipt, LEASE, rig.now), Settled::Stale, "{receipt:?}");
        }
        let mine = rig.claim(1);
        assert!(mine.is_empty());
        rig.shelf.clear();
        assert!(rig.shelf.is_empty() && rig.shelf.next_event().is_none());
    }

    /// Whatever is done, a group is never handed out with a gap in front, and nothing is lost.
    #[test]
    fn any_course_of_events_keeps_order() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut rig = Rig::new();
            let (mut next, mut held, mut done) = (1_u64, Vec::<Delivery>::new(), BTreeSet::new());
            for _ in 0..400 {
                match random.u8(..6) {
                    0 | 1 => {
                        rig.put(next, &format!("g{}", next % 5));
                        next += 1;
                    }
                    2 => {
                        let claimed = rig.claim(random.usize(1..8));
                        for delivery in &claimed {
                            let behind = |id: &u64| id % 5 == delivery.id % 5 && *id < delivery.id;
                            let waits = (1..next).filter(behind).find(|id| {
                                rig.shelf.items.get(id).is_some_and(|item| item.state == State::Waiting)
                            });
                            assert_eq!(
                                waits,
                                None,
                                "seed {seed}: {} was passed by {}",
                                waits.unwrap_or(0),
                                delivery.id
                            );
                        }
                        held.extend(claimed);
                    }
                    3 if !held.is_empty() => {
                        let delivery = held.swap_remove(random.usize(..held.len()));
                        if let Some((id, _)) = rig.shelf.begin(&delivery.receipt, rig.now) {
                            rig.shelf.finish(id);
                            assert!(done.insert(id), "seed {seed}: {id} twice");
                        }
                    }
                    4 if !held.is_empty() => {
                        let delivery = held.swap_remove(random.usize(..held.len()));
                        let delay = Duration::from_secs(random.u64(..3));
                        rig.shelf.give_back(&delivery.receipt, delay, rig.now);
                    }
                    _ => rig.now += Duration::from_secs(random.u64(..4)),
                }
            }
            for _ in 0..next * 2 {
                rig.now += LEASE;
                for delivery in rig.claim(100) {
                    rig.done(&delivery);
                    assert!(done.insert(delivery.id), "seed {seed}: {} twice", delivery.id);
                }
            }
            assert_eq!(done, (1..next).collect(), "seed {seed}");
            assert!(rig.shelf.is_empty() && rig.shelf.lanes.is_empty() && rig.shelf.leases.is_empty());
        }
    }
}
