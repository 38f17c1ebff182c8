//! Which message that a broker has pushed may go to whom: plain data, no broker, no clock, no locks; time is passed in.
//!
//! The reader of a connection puts arrivals on the shelf; claims take them; settlements take them off, or put them back into their place. All of it
//! is called by `mod.rs`, under one lock.
//!
//! # The rule
//!
//! Messages of a group lie in the order in which they arrived, which is the broker's. Some of them are leased, the others wait. The next one is handed
//! out when it is not delayed, and when every leased message of its group lies *before* it: after a message was given back, the later ones of
//! its group that are still leased have to come back before anything of the group is handed out again. So nothing overtakes, whatever the
//! order in which a group is given back.
//!
//! A connection that is lost, or let go, takes everything with it that came over it: the broker hands it out again. What was here is remembered by
//! its fingerprint ([`Memory`]), so that it keeps its identity when it comes again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::source::{Delivery, DeliveryId, Receipt, Settled};

/// So many messages that were lost unsettled are remembered, and of those that were done so many or, from time to time, half of them. One that is forgotten gets another
/// identity, or is delivered twice, no more.
const REMEMBERED_MAX: usize = 65_536;

/// The place of a message in the order of arrival. Never given twice.
pub(crate) type Ticket = u64;

/// By which a message is recognised when the broker hands it out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fingerprint {
    /// Of all there is: the publisher's or the broker's id, the group, the text.
    pub(crate) hash: u64,
    /// It has an id, so no two messages have it. Otherwise two that say the same have it, and which of them is which does not matter, as long as each is handled.
    pub(crate) unique: bool,
}

/// A message that the broker has pushed.
pub(crate) struct Arrival<T> {
    /// Over which of the source's subscriptions.
    pub(crate) part: usize,
    /// See [`Shelf::open`].
    pub(crate) epoch: u64,
    pub(crate) fingerprint: Fingerprint,
    /// The broker may have handed it out before, as far as it knows.
    pub(crate) perhaps_again: bool,
    /// How often it says that it has.
    pub(crate) earlier: u32,
    pub(crate) group: Option<Arc<str>>,
    pub(crate) text: Arc<[u8]>,
    /// Not to be handed out before.
    pub(crate) not_before: Option<Instant>,
    /// What settles it at the broker.
    pub(crate) tag: T,
}

/// What lies on the shelf.
pub(crate) struct Shelf<T> {
    /// Receipts of another shelf are not taken for our own.
    nonce: u64,
    next: Ticket,
    items: HashMap<Ticket, Item<T>, foldhash::fast::RandomState>,
    groups: HashMap<Key, Group, foldhash::fast::RandomState>,
    /// The next messages of the groups that could be handed out now, in the order of arrival.
    ready: BTreeMap<Ticket, Key>,
    /// The groups that wait for a time.
    delayed: BTreeSet<(Instant, Key)>,
    /// When leases run out, and how many at each time: those of a claim run out together.
    leases: BTreeMap<Instant, usize>,
    /// How many are leased.
    leased: usize,
    parts: Vec<Part>,
}

/// A subscription.
#[derive(Clone, Default)]
struct Part {
    /// How often it was opened.
    epoch: u64,
    /// So many messages came over it since.
    came: u64,
    leased: usize,
    /// So many are off the shelf, and the broker has not heard of them yet.
    settling: usize,
    /// Nothing more of it is handed out.
    draining: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Key {
    Named(Arc<str>),
    /// Ordered with nothing.
    Alone(Ticket),
}

struct Item<T> {
    part: usize,
    id: DeliveryId,
    fingerprint: Fingerprint,
    earlier: u32,
    handed: u32,
    group: Option<Arc<str>>,
    text: Arc<[u8]>,
    not_before: Option<Instant>,
    lease: Option<Instant>,
    tag: T,
}

#[derive(Default)]
struct Group {
    waiting: BTreeSet<Ticket>,
    leased: BTreeSet<Ticket>,
    /// Something was given back until then.
    until: Option<Instant>,
    listed: Listed,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Listed {
    #[default]
    Nowhere,
    Ready(Ticket),
    Delayed(Instant),
}

/// What is taken off the shelf to be settled at the broker.
pub(crate) struct Taken<T> {
    pub(super) part: usize,
    pub(crate) id: DeliveryId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) tag: T,
}

/// What is to be copied elsewhere before it is settled.
pub(crate) struct Copied<T> {
    #[cfg_attr(not(feature = "activemq"), allow(dead_code, reason = "headers are copied whole elsewhere"))]
    pub(crate) group: Option<Arc<str>>,
    pub(crate) text: Arc<[u8]>,
    pub(crate) attempt: u32,
    pub(crate) tag: T,
}

impl<T> Shelf<T> {
    pub(crate) fn new(parts: usize) -> Self {
        Shelf {
            nonce: fastrand::u64(..),
            next: 0,
            items: HashMap::default(),
            groups: HashMap::default(),
            ready: BTreeMap::new(),
            delayed: BTreeSet::new(),
            leases: BTreeMap::new(),
            leased: 0,
            parts: vec![Part::default(); parts],
        }
    }

    /// How many subscriptions there are, open or not.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// A subscription begins. What comes over it names the epoch; what is still on its way from an earlier one is passed over.
    pub(crate) fn open(&mut self, part: usize) -> u64 {
        let Part { epoch, leased, settling, .. } = self.parts[part];
        self.parts[part] = Part { epoch: epoch + 1, leased, settling, ..Part::default() };
        epoch + 1
    }

    /// Puts a message on the shelf. One that was done before comes back: the broker had not heard of it, and is to be told once more.
    pub(crate) fn arrive(
        &mut self,
        arrival: Arrival<T>,
        memory: &mut Memory,
        micros: u64,
        now: Instant,
    ) -> Option<T> {
        let part = &mut self.parts[arrival.part];
        if arrival.epoch != part.epoch {
            return None;
        }
        part.came += 1;
        if arrival.perhaps_again && memory.is_done(arrival.fingerprint) {
            return Some(arrival.tag);
        }
        let ticket = self.next;
        self.next += 1;
        let id = memory.identify(arrival.fingerprint, arrival.perhaps_again, micros);
        let key = key(arrival.group.as_ref(), ticket);
        let item = Item {
            part: arrival.part,
            id,
            fingerprint: arrival.fingerprint,
            earlier: arrival.earlier,
            handed: 0,
            group: arrival.group,
            text: arrival.text,
            not_before: arrival.not_before,
            lease: None,
            tag: arrival.tag,
        };
        self.items.insert(ticket, item);
        let group = self.groups.entry(key.clone()).or_default();
        group.waiting.insert(ticket);
        // Behind one that is listed it changes nothing.
        if group.listed == Listed::Nowhere {
            self.list(&key, now);
        }
        None
    }

    /// Hands out what may go now. Otherwise says when to look again.
    pub(crate) fn claim(
        &mut self,
        most: usize,
        lease: Duration,
        now: Instant,
    ) -> (Vec<Delivery>, Option<Instant>) {
        while let Some((until, key)) = self.delayed.first().cloned()
            && until <= now
        {
            self.list(&key, now);
        }
        let mut handed = Vec::new();
        while handed.len() < most
            && let Some((ticket, key)) = self.ready.pop_first()
        {
            handed.push(self.hand_out(ticket, &key, now + lease));
            self.list(&key, now);
        }
        (handed, self.delayed.first().map(|(until, _)| *until))
    }

    fn hand_out(&mut self, ticket: Ticket, key: &Key, until: Instant) -> Delivery {
        let group = self.groups.get_mut(key).expect("a group that is listed is there");
        group.listed = Listed::Nowhere;
        group.until = None;
        group.waiting.remove(&ticket);
        group.leased.insert(ticket);
        let item = self.items.get_mut(&ticket).expect("a ticket that is listed is there");
        item.handed += 1;
        item.lease = Some(until);
        *self.leases.entry(until).or_default() += 1;
        self.leased += 1;
        self.parts[item.part].leased += 1;
        Delivery {
            id: item.id,
            receipt: Receipt::Numbers([self.nonce, ticket, u64::from(item.handed), 0]),
            group: item.group.clone(),
            text: Arc::clone(&item.text),
            attempt: item.earlier.saturating_add(item.handed),
        }
    }

    /// The message of a receipt that is still good.
    fn find(&self, receipt: &Receipt) -> Option<Ticket> {
        let Receipt::Numbers([nonce, ticket, handed, 0]) = *receipt else { return None };
        let item = self.items.get(&ticket)?;
        let is_good = nonce == self.nonce && u64::from(item.handed) == handed && item.lease.is_some();
        is_good.then_some(ticket)
    }

    /// Takes a message off the shelf, to be settled at the broker. Its subscription is needed until [that](Self::told) has been tried.
    pub(crate) fn take(&mut self, receipt: &Receipt, now: Instant) -> Option<Taken<T>> {
        let ticket = self.find(receipt)?;
        let item = self.remove(ticket, now);
        self.parts[item.part].settling += 1;
        Some(Taken { part: item.part, id: item.id, fingerprint: item.fingerprint, tag: item.tag })
    }

    /// The broker has been told of a message that came over a subscription, or could not be.
    pub(crate) fn told(&mut self, part: usize) {
        self.parts[part].settling -= 1;
    }

    /// Puts a message back into its place, and lets its group wait.
    pub(crate) fn give_back(&mut self, receipt: &Receipt, delay: Duration, now: Instant) -> Settled {
        let Some(ticket) = self.find(receipt) else { return Settled::Stale };
        let item = self.items.get_mut(&ticket).expect("it was found");
        let lease = item.lease.take().expect("a good receipt is leased");
        let (part, key) = (item.part, key(item.group.as_ref(), ticket));
        self.end_lease(lease);
        self.parts[part].leased -= 1;
        let group = self.groups.get_mut(&key).expect("an item's group is there");
        group.leased.remove(&ticket);
        group.waiting.insert(ticket);
        group.until = group.until.max(Some(now + delay));
        self.list(&key, now);
        Settled::Settled
    }

    /// Renews a lease.
    pub(crate) fn extend(&mut self, receipt: &Receipt, lease: Duration, now: Instant) -> Settled {
        let Some(ticket) = self.find(receipt) else { return Settled::Stale };
        let item = self.items.get_mut(&ticket).expect("it was found");
        let old = item.lease.replace(now + lease).expect("a good receipt is leased");
        self.end_lease(old);
        *self.leases.entry(now + lease).or_default() += 1;
        self.leased += 1;
        Settled::Settled
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

    /// When the first lease runs out.
    pub(crate) fn first_lease(&self) -> Option<Instant> {
        self.leases.first_key_value().map(|(until, _)| *until)
    }

    /// A subscription over which a message came whose lease has run out.
    pub(crate) fn expired(&self, now: Instant) -> Option<usize> {
        self.first_lease().filter(|until| *until <= now)?;
        let is_over = |item: &&Item<T>| item.lease.is_some_and(|until| until <= now);
        self.items.values().find(is_over).map(|item| item.part)
    }

    /// Hands out nothing more of what came over a subscription, so that it can be let go without anything being repeated.
    pub(crate) fn drain(&mut self, part: usize, now: Instant) {
        self.parts[part].draining = true;
        let keys: Vec<Key> = self.groups.keys().cloned().collect();
        keys.iter().for_each(|key| self.list(key, now));
    }

    /// The same for all of them.
    pub(crate) fn drain_all(&mut self, now: Instant) {
        self.parts.iter_mut().for_each(|part| part.draining = true);
        self.drain(0, now);
    }

    /// A subscription that is drained.
    pub(crate) fn drained(&self) -> Option<usize> {
        self.parts.iter().position(|part| part.draining && part.leased + part.settling == 0)
    }

    /// The subscriptions over which something has come, and that are not on their way out.
    #[cfg_attr(not(feature = "rabbitmq"), allow(dead_code, reason = "a single one has nothing to share"))]
    pub(crate) fn served(&self) -> Vec<usize> {
        let parts = self.parts.iter().enumerate();
        parts.filter(|(_, part)| part.came > 0 && !part.draining).map(|(number, _)| number).collect()
    }

    /// Whether nothing is leased, settled or delayed: nobody would miss it.
    pub(crate) fn is_at_rest(&self) -> bool {
        let is_settling = (0..self.parts()).any(|part| self.is_settling(part));
        self.leases.is_empty() && self.delayed.is_empty() && !is_settling
    }

    /// Whether an acknowledgement is under way.
    pub(crate) fn is_settling(&self, part: usize) -> bool {
        self.parts[part].settling > 0
    }

    /// Waiting and leased.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.items.len() - self.leased, self.leased)
    }

    /// Forgets what came over a subscription: it is lost, or about to be closed.
    pub(crate) fn forget(&mut self, part: usize, memory: &mut Memory, now: Instant) {
        self.open(part);
        let mut lost: Vec<Ticket> =
            self.items.iter().filter(|(_, item)| item.part == part).map(|(ticket, _)| *ticket).collect();
        lost.sort_unstable();
        for ticket in lost {
            // Only what was out with us, and what lies before that, comes again as what it was. Of what had yet to go, another instance may have handed
            // out the later ones before it comes here again, under greater identities.
            let key = key(self.items[&ticket].group.as_ref(), ticket);
            let was_out = self.groups[&key].leased.last().is_some_and(|last| ticket <= *last);
            let item = self.remove(ticket, now);
            if was_out {
                memory.remember(item.fingerprint, item.id);
            }
        }
    }

    fn remove(&mut self, ticket: Ticket, now: Instant) -> Item<T> {
        let item = self.items.remove(&ticket).expect("it was found");
        if let Some(lease) = item.lease {
            self.end_lease(lease);
            self.parts[item.part].leased -= 1;
        }
        let key = key(item.group.as_ref(), ticket);
        let group = self.groups.get_mut(&key).expect("an item's group is there");
        let was_leased = group.leased.remove(&ticket);
        // What is listed waits behind everything that is leased, and stays where it is.
        if !was_leased || group.listed == Listed::Nowhere {
            group.waiting.remove(&ticket);
            self.list(&key, now);
        }
        item
    }

    /// Puts a group where it belongs now: among those that are ready, those that wait for a time, or nowhere; one that is empty goes.
    fn list(&mut self, key: &Key, now: Instant) {
        let Some(group) = self.groups.get_mut(key) else { return };
        match std::mem::take(&mut group.listed) {
            Listed::Nowhere => {}
            Listed::Ready(ticket) => drop(self.ready.remove(&ticket)),
            Listed::Delayed(until) => drop(self.delayed.remove(&(until, key.clone()))),
        }
        let Some(next) = group.waiting.first().copied() else {
            if group.leased.is_empty() {
                self.groups.remove(key);
            }
            return;
        };
        let item = &self.items[&next];
        if group.leased.last().is_some_and(|leased| *leased > next) || self.parts[item.part].draining {
            return;
        }
        let until = group.until.max(item.not_before).filter(|until| *until > now);
        group.listed = match until {
            Some(until) => {
                self.delayed.insert((until, key.clone()));
                Listed::Delayed(until)
            }
            None => {
                self.ready.insert(next, key.clone());
                Listed::Ready(next)
            }
        };
    }
}

impl<T: Clone> Shelf<T> {
    /// What is to be copied elsewhere. It stays leased.
    pub(crate) fn copy(&self, receipt: &Receipt) -> Option<Copied<T>> {
        let item = &self.items[&self.find(receipt)?];
        let (group, text, tag) = (item.group.clone(), Arc::clone(&item.text), item.tag.clone());
        Some(Copied { group, text, attempt: item.earlier.saturating_add(item.handed), tag })
    }
}

fn key(group: Option<&Arc<str>>, ticket: Ticket) -> Key {
    group.map_or(Key::Alone(ticket), |group| Key::Named(Arc::clone(group)))
}

/// What consumers of one queue remember of messages that are not on their shelves.
#[derive(Default)]
pub(crate) struct Memory {
    /// The last identity that was given.
    last: DeliveryId,
    /// Messages that were lost unsettled, by fingerprint, in the order in which they will come again.
    lost: HashMap<u64, VecDeque<Lost>, foldhash::fast::RandomState>,
    /// Their fingerprints and numbers, the oldest first; also of some that have come again.
    lost_order: VecDeque<(u64, u64)>,
    /// How many were lost so far.
    losses: u64,
    /// Messages that are done, in two generations: when the younger has grown up, the older is forgotten as a whole. To forget them one by one
    /// would cost each message a look into memory that no cache holds any more.
    done: [HashSet<u64, foldhash::fast::RandomState>; 2],
}

/// A message that was lost unsettled: its identity, and its number among all losses.
type Lost = (DeliveryId, u64);

impl Memory {
    /// The identity of a message: the one that it had, or a new one. New ones grow with the time, so that those of an instance that takes over are
    /// greater than those of the one before, as far as their clocks agree.
    fn identify(&mut self, fingerprint: Fingerprint, perhaps_again: bool, micros: u64) -> DeliveryId {
        if perhaps_again && let Some(ids) = self.lost.get_mut(&fingerprint.hash) {
            let (id, _) = ids.pop_front().expect("an empty list is removed");
            if ids.is_empty() {
                self.lost.remove(&fingerprint.hash);
            }
            return id;
        }
        self.last = micros.max(self.last + 1);
        self.last
    }

    /// A message was lost unsettled, or its settlement may have been.
    pub(crate) fn remember(&mut self, fingerprint: Fingerprint, id: DeliveryId) {
        self.losses += 1;
        self.lost.entry(fingerprint.hash).or_default().push_back((id, self.losses));
        self.lost_order.push_back((fingerprint.hash, self.losses));
        if self.lost_order.len() > REMEMBERED_MAX
            && let Some((hash, number)) = self.lost_order.pop_front()
            && let Some(ids) = self.lost.get_mut(&hash)
        {
            ids.retain(|(_, other)| *other != number);
            if ids.is_empty() {
                self.lost.remove(&hash);
            }
        }
    }

    /// A message was done, and the broker told; it may not have heard.
    pub(crate) fn note_done(&mut self, fingerprint: Fingerprint) {
        let [younger, older] = &mut self.done;
        if fingerprint.unique {
            younger.insert(fingerprint.hash);
        }
        if younger.len() >= REMEMBERED_MAX / 2 {
            older.clear();
            std::mem::swap(younger, older);
        }
    }

    fn is_done(&self, fingerprint: Fingerprint) -> bool {
        fingerprint.unique && self.done.iter().any(|generation| generation.contains(&fingerprint.hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    struct Bench {
        shelf: Shelf<u64>,
        memory: Memory,
        epoch: u64,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            let mut shelf = Shelf::new(1);
            let epoch = shelf.open(0);
            Bench { shelf, memory: Memory::default(), epoch, now: Instant::now() }
        }

        fn arrive(&mut self, group: &str, number: u64, redelivered: bool) -> Option<u64> {
            let arrival = Arrival {
                part: 0,
                epoch: self.epoch,
                fingerprint: Fingerprint { hash: number, unique: true },
                perhaps_again: redelivered,
                earlier: u32::from(redelivered),
                group: Some(group.into()),
                text: number.to_string().into_bytes().into(),
                not_before: None,
                tag: number,
            };
            self.shelf.arrive(arrival, &mut self.memory, 1_000 + number, self.now)
        }

        fn claim(&mut self, most: usize) -> Vec<Delivery> {
            self.shelf.claim(most, LEASE, self.now).0
        }
    }

    fn texts(deliveries: &[Delivery]) -> Vec<&str> {
        deliveries.iter().map(|delivery| std::str::from_utf8(&delivery.text).unwrap()).collect()
    }

    #[test]
    fn of_what_is_done_the_newest_are_remembered_and_no_more_than_that() {
        let mut memory = Memory::default();
        let done = |hash| Fingerprint { hash, unique: true };
        let all = 3 * REMEMBERED_MAX as u64;
        (0..all).for_each(|hash| memory.note_done(done(hash)));
        let remembered = (0..all).filter(|hash| memory.is_done(done(*hash))).count();
        assert!((REMEMBERED_MAX / 2..=REMEMBERED_MAX).contains(&remembered), "{remembered}");
        let newest = all - remembered as u64..all;
        assert!(newest.clone().all(|hash| memory.is_done(done(hash))), "not the newest");
    }

    #[test]
    fn a_group_that_is_partly_back_waits_for_the_rest() {
        let mut bench = Bench::new();
        for number in 0..4 {
            assert_eq!(bench.arrive("a", number, false), None);
        }
        bench.arrive("b", 9, false);
        let held = bench.claim(3);
        assert_eq!(texts(&held), ["0", "1", "2"]);
        let now = bench.now;
        assert_eq!(bench.shelf.give_back(&held[0].receipt, Duration::ZERO, now), Settled::Settled);
        assert_eq!(texts(&bench.claim(9)), ["9"], "1 and 2 are out, so nothing of the group goes");
        assert_eq!(bench.shelf.give_back(&held[2].receipt, Duration::ZERO, now), Settled::Settled);
        assert!(bench.claim(9).is_empty());
        assert_eq!(bench.shelf.give_back(&held[1].receipt, Duration::ZERO, now), Settled::Settled);
        let again = bench.claim(9);
        assert_eq!(texts(&again), ["0", "1", "2", "3"]);
        assert_eq!(again.iter().map(|delivery| delivery.attempt).collect::<Vec<_>>(), [2, 2, 2, 1]);
        assert_eq!(bench.shelf.give_back(&held[0].receipt, Duration::ZERO, now), Settled::Stale);
    }

    #[test]
    fn what_is_lost_keeps_its_identity_and_its_receipts_are_stale() {
        let mut bench = Bench::new();
        for number in 0..3 {
            assert_eq!(bench.arrive("a", number, false), None);
        }
        let held = bench.claim(2);
        let now = bench.now;
        let Bench { shelf, memory, .. } = &mut bench;
        let taken = shelf.take(&held[0].receipt, now).expect("it is leased");
        memory.note_done(taken.fingerprint);
        assert!(!shelf.is_at_rest());
        shelf.forget(0, memory, now);
        shelf.told(taken.part);
        assert_eq!(shelf.counts(), (0, 0));
        assert!(shelf.is_at_rest() && shelf.groups.is_empty() && shelf.ready.is_empty());
        assert_eq!(shelf.extend(&held[1].receipt, LEASE, now), Settled::Stale);
        assert_eq!(bench.arrive("a", 7, false), None, "of the old epoch: passed over");
        assert!(bench.claim(9).is_empty());
        bench.epoch = bench.shelf.open(0);
        assert_eq!(bench.arrive("a", 0, true), Some(0), "it was done, and the broker is told again");
        bench.arrive("a", 1, true);
        bench.arrive("a", 2, true);
        let again = bench.claim(9);
        assert_eq!(texts(&again), ["1", "2"]);
        assert_eq!(again[0].id, held[1].id);
        assert!(again[0].id < again[1].id && again[0].attempt == 2);
        assert_eq!(again[1].id, 1_003, "it had never been out, so it is identified anew");
    }

    #[test]
    fn a_subscription_that_drains_hands_out_nothing_more() {
        let mut bench = Bench::new();
        for number in 0..3 {
            assert_eq!(bench.arrive("a", number, false), None);
        }
        let held = bench.claim(1);
        let now = bench.now;
        assert_eq!(bench.shelf.served(), [0]);
        bench.shelf.drain(0, now);
        bench.arrive("b", 7, false);
        assert!(bench.claim(9).is_empty());
        assert_eq!((bench.shelf.drained(), bench.shelf.served()), (None, vec![]), "one is still out");
        bench.shelf.take(&held[0].receipt, now).expect("it is leased");
        assert_eq!(bench.shelf.drained(), None, "the broker has not heard of it");
        bench.shelf.told(0);
        assert_eq!(bench.shelf.drained(), Some(0));
        let Bench { shelf, memory, .. } = &mut bench;
        shelf.forget(0, memory, now);
        assert_eq!((shelf.drained(), shelf.counts()), (None, (0, 0)));
    }

    #[test]
    fn a_delayed_head_keeps_its_group_and_no_other() {
        let mut bench = Bench::new();
        bench.arrive("a", 0, false);
        bench.arrive("a", 1, false);
        let held = bench.claim(1);
        let now = bench.now;
        bench.shelf.give_back(&held[0].receipt, LEASE, now);
        bench.arrive("b", 5, false);
        let (handed, look) = bench.shelf.claim(9, LEASE, now);
        assert_eq!((texts(&handed), look), (vec!["5"], Some(now + LEASE)));
        assert!(!bench.shelf.is_at_rest());
        bench.now += LEASE;
        assert_eq!(texts(&bench.claim(9)), ["0", "1"]);
        assert_eq!(bench.shelf.first_lease(), Some(now + LEASE), "the lease of 5 runs out first");
    }
}
