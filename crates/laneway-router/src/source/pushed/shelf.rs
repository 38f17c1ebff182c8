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
//! Everything has a place that is used again: a message names its group by place, and a receipt its message, so that a name is looked up once, when the
//! message arrives, and nothing is allocated for a group that was here before in some other name.
//!
//! A connection that is lost, or let go, takes everything with it that came over it: the broker hands it out again. What was here is remembered by
//! its fingerprint ([`Memory`]), so that it keeps its identity when it comes again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;
use tokio::time::Instant;

use crate::source::{Delivery, DeliveryId, Receipt, Settled};

/// So many messages that were lost unsettled are remembered, and of those that were done so many or, from time to time, half of them. One that is forgotten gets another
/// identity, or is delivered twice, no more.
const REMEMBERED_MAX: usize = 65_536;

/// The place of a message in the order of arrival. Never given twice.
pub(crate) type Ticket = u64;

/// A message on the shelf: by its ticket, which is what orders, and its place.
type At = (Ticket, usize);

/// So many emptied groups are kept to be used again, if they have no room for more messages than this.
const SPARE_GROUPS: (usize, usize) = (1_024, 64);

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
    items: Slab<Item<T>>,
    groups: Slab<Group>,
    /// The places of groups that have a name.
    names: HashMap<Arc<str>, usize, foldhash::fast::RandomState>,
    /// Groups that are empty.
    spare: Vec<Group>,
    /// The next messages of the groups that could be handed out now, in the order of arrival, and the groups' places.
    ready: BTreeMap<Ticket, usize>,
    /// The places of groups that wait for a time.
    delayed: BTreeSet<(Instant, usize)>,
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
    /// What is out of it is wanted back, unless it has begun.
    recalled: bool,
}

struct Item<T> {
    ticket: Ticket,
    part: usize,
    id: DeliveryId,
    /// Greater than that of everything that came before, and any other instance has handed out: see [`Memory::number`].
    sequence: u64,
    fingerprint: Fingerprint,
    earlier: u32,
    handed: u32,
    /// Its place.
    group: usize,
    text: Arc<[u8]>,
    not_before: Option<Instant>,
    lease: Option<Instant>,
    /// A copy of it is among the dead letters, or in quarantine: it only has to be acknowledged.
    copied: bool,
    tag: T,
}

#[derive(Default)]
struct Group {
    /// A message without a group is one alone.
    name: Option<Arc<str>>,
    /// Both in the order of arrival.
    waiting: VecDeque<At>,
    leased: VecDeque<At>,
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
            items: Slab::new(),
            groups: Slab::new(),
            names: HashMap::default(),
            spare: Vec::new(),
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
        let sequence = memory.number(micros);
        let id = memory.identify(arrival.fingerprint, arrival.perhaps_again, sequence);
        let group = self.enter(arrival.group);
        let place = self.items.insert(Item {
            ticket,
            part: arrival.part,
            id,
            sequence,
            fingerprint: arrival.fingerprint,
            earlier: arrival.earlier,
            handed: 0,
            group,
            text: arrival.text,
            not_before: arrival.not_before,
            lease: None,
            copied: false,
            tag: arrival.tag,
        });
        let entered = &mut self.groups[group];
        entered.waiting.push_back((ticket, place));
        // Behind one that is listed it changes nothing.
        if entered.listed == Listed::Nowhere {
            self.list(group, now);
        }
        None
    }

    /// The place of a group, which is made if there is none.
    fn enter(&mut self, name: Option<Arc<str>>) -> usize {
        if let Some(known) = name.as_ref().and_then(|name| self.names.get(name)) {
            return *known;
        }
        let group = self.groups.insert(Group { name: name.clone(), ..self.spare.pop().unwrap_or_default() });
        if let Some(name) = name {
            self.names.insert(name, group);
        }
        group
    }

    /// An empty group goes.
    fn leave(&mut self, group: usize) {
        let Group { name, waiting, leased, .. } = self.groups.remove(group);
        if let Some(name) = name {
            self.names.remove(&name);
        }
        let (groups_max, room_max) = SPARE_GROUPS;
        if self.spare.len() < groups_max && waiting.capacity().max(leased.capacity()) <= room_max {
            self.spare.push(Group { waiting, leased, ..Group::default() });
        }
    }

    /// Hands out what may go now. Otherwise says when to look again.
    pub(crate) fn claim(
        &mut self,
        most: usize,
        lease: Duration,
        now: Instant,
    ) -> (Vec<Delivery>, Option<Instant>) {
        while let Some((until, group)) = self.delayed.first().copied()
            && until <= now
        {
            self.list(group, now);
        }
        let mut handed = Vec::new();
        while handed.len() < most
            && let Some((ticket, group)) = self.ready.pop_first()
        {
            debug_assert_eq!(self.groups[group].waiting.front().map(|at| at.0), Some(ticket));
            handed.push(self.hand_out(group, now + lease));
            self.list(group, now);
        }
        (handed, self.delayed.first().map(|(until, _)| *until))
    }

    /// Hands out the next message of a group that is ready.
    fn hand_out(&mut self, group: usize, until: Instant) -> Delivery {
        let group = &mut self.groups[group];
        group.listed = Listed::Nowhere;
        group.until = None;
        let at = group.waiting.pop_front().expect("a group that is listed has a message");
        // It lies behind all that are leased, or it would not be listed.
        group.leased.push_back(at);
        let (ticket, place) = at;
        let item = &mut self.items[place];
        item.handed += 1;
        item.lease = Some(until);
        *self.leases.entry(until).or_default() += 1;
        self.leased += 1;
        self.parts[item.part].leased += 1;
        Delivery {
            id: item.id,
            receipt: Receipt::Numbers([self.nonce, ticket, u64::from(item.handed), place as u64]),
            group: group.name.clone(),
            text: Arc::clone(&item.text),
            attempt: item.earlier.saturating_add(item.handed),
            sequence: item.sequence,
        }
    }

    /// Whether what a receipt is for may be begun. What is recalled may not, but can be settled.
    pub(crate) fn is_good(&self, receipt: &Receipt) -> bool {
        self.find(receipt).is_some_and(|place| !self.parts[self.items[place].part].recalled)
    }

    /// The place of the message of a receipt that is still good.
    fn find(&self, receipt: &Receipt) -> Option<usize> {
        let Receipt::Numbers([nonce, ticket, handed, place]) = *receipt else { return None };
        let place = usize::try_from(place).ok()?;
        let item = self.items.get(place)?;
        let is_it = nonce == self.nonce && item.ticket == ticket;
        (is_it && u64::from(item.handed) == handed && item.lease.is_some()).then_some(place)
    }

    /// Takes a message off the shelf, to be settled at the broker. Its subscription is needed until [that](Self::told) has been tried.
    pub(crate) fn take(&mut self, receipt: &Receipt, now: Instant) -> Option<Taken<T>> {
        let place = self.find(receipt)?;
        let item = self.remove(place, now);
        self.parts[item.part].settling += 1;
        Some(Taken { part: item.part, id: item.id, fingerprint: item.fingerprint, tag: item.tag })
    }

    /// The broker has been told of a message that came over a subscription, or could not be.
    pub(crate) fn told(&mut self, part: usize) {
        self.parts[part].settling -= 1;
    }

    /// Puts a message back into its place, and lets its group wait.
    pub(crate) fn give_back(&mut self, receipt: &Receipt, delay: Duration, now: Instant) -> Settled {
        let Some(place) = self.find(receipt) else { return Settled::Stale };
        let item = &mut self.items[place];
        let lease = item.lease.take().expect("a good receipt is leased");
        let (at, part, group) = ((item.ticket, place), item.part, item.group);
        self.end_lease(lease);
        self.parts[part].leased -= 1;
        let back = &mut self.groups[group];
        pull(&mut back.leased, at);
        let before = back.waiting.partition_point(|other| *other < at);
        back.waiting.insert(before, at);
        back.until = back.until.max(Some(now + delay));
        self.list(group, now);
        Settled::Settled
    }

    /// Renews a lease.
    pub(crate) fn extend(&mut self, receipt: &Receipt, lease: Duration, now: Instant) -> Settled {
        let Some(place) = self.find(receipt) else { return Settled::Stale };
        let old = self.items[place].lease.replace(now + lease).expect("a good receipt is leased");
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
        let mut items = self.items.iter().map(|(_, item)| item);
        items.find(|item| item.lease.is_some_and(|until| until <= now)).map(|item| item.part)
    }

    /// Hands out nothing more of what came over a subscription, so that it can be let go without anything being repeated.
    pub(crate) fn drain(&mut self, part: usize, now: Instant) {
        self.parts[part].draining = true;
        self.list_all(now);
    }

    fn list_all(&mut self, now: Instant) {
        let groups: Vec<usize> = self.groups.iter().map(|(place, _)| place).collect();
        groups.into_iter().for_each(|group| self.list(group, now));
    }

    /// Drains it, and wants back what is out of it and has not begun. True if something is out.
    #[cfg_attr(not(feature = "rabbitmq"), allow(dead_code, reason = "a single one has nothing to share"))]
    pub(crate) fn recall(&mut self, part: usize, now: Instant) -> bool {
        self.parts[part].recalled = true;
        self.drain(part, now);
        self.parts[part].leased > 0
    }

    /// Does not drain it any more. True if it was drained, and not empty yet.
    #[cfg_attr(not(feature = "rabbitmq"), allow(dead_code, reason = "a single one has nothing to share"))]
    pub(crate) fn keep(&mut self, part: usize, now: Instant) -> bool {
        let Part { recalled, draining, .. } = &mut self.parts[part];
        *draining &= !*recalled;
        let was_recalled = std::mem::take(recalled);
        if was_recalled {
            self.list_all(now);
        }
        was_recalled
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
    /// True if something of it was leased.
    pub(crate) fn forget(&mut self, part: usize, memory: &mut Memory, now: Instant) -> bool {
        let was_leased = self.parts[part].leased > 0;
        self.open(part);
        let of_part = self.items.iter().filter(|(_, item)| item.part == part);
        let mut lost: Vec<At> = of_part.map(|(place, item)| (item.ticket, place)).collect();
        lost.sort_unstable();
        for at in lost {
            // Only what was out with us, and what lies before that, comes again as what it was. Of what had yet to go, another instance may have handed
            // out the later ones before it comes here again, under greater identities.
            let group = &self.groups[self.items[at.1].group];
            let was_out = group.leased.back().is_some_and(|last| at <= *last);
            let item = self.remove(at.1, now);
            if was_out {
                memory.remember(item.fingerprint, item.id);
            }
        }
        was_leased
    }

    /// A copy of it is where it should be.
    #[cfg_attr(
        not(feature = "rabbitmq"),
        allow(dead_code, reason = "copied and acknowledged in one elsewhere")
    )]
    pub(crate) fn note_copied(&mut self, receipt: &Receipt) {
        if let Some(place) = self.find(receipt) {
            self.items[place].copied = true;
        }
    }

    fn remove(&mut self, place: usize, now: Instant) -> Item<T> {
        let item = self.items.remove(place);
        if let Some(lease) = item.lease {
            self.end_lease(lease);
            self.parts[item.part].leased -= 1;
        }
        let at = (item.ticket, place);
        let group = &mut self.groups[item.group];
        let was_leased = pull(&mut group.leased, at);
        // What is listed waits behind everything that is leased, and stays where it is.
        if !was_leased || group.listed == Listed::Nowhere {
            pull(&mut group.waiting, at);
            self.list(item.group, now);
        }
        item
    }

    /// Puts a group where it belongs now: among those that are ready, those that wait for a time, or nowhere; one that is empty goes.
    fn list(&mut self, place: usize, now: Instant) {
        let group = &mut self.groups[place];
        match std::mem::take(&mut group.listed) {
            Listed::Nowhere => {}
            Listed::Ready(ticket) => drop(self.ready.remove(&ticket)),
            Listed::Delayed(until) => drop(self.delayed.remove(&(until, place))),
        }
        let Some((ticket, next)) = group.waiting.front().copied() else {
            if group.leased.is_empty() {
                self.leave(place);
            }
            return;
        };
        let item = &self.items[next];
        if group.leased.back().is_some_and(|(leased, _)| *leased > ticket) || self.parts[item.part].draining {
            return;
        }
        let until = group.until.max(item.not_before).filter(|until| *until > now);
        group.listed = match until {
            Some(until) => {
                self.delayed.insert((until, place));
                Listed::Delayed(until)
            }
            None => {
                self.ready.insert(ticket, place);
                Listed::Ready(ticket)
            }
        };
    }
}

/// Takes a message out of a row that is in order. False if it is not there.
fn pull(row: &mut VecDeque<At>, at: At) -> bool {
    // Mostly the first one.
    if row.front() == Some(&at) {
        row.pop_front();
        return true;
    }
    let found = row.binary_search(&at);
    found.is_ok_and(|index| row.remove(index).is_some())
}

impl<T: Clone> Shelf<T> {
    /// What is to be copied elsewhere, unless it has been. It stays leased.
    pub(crate) fn copy(&self, receipt: &Receipt) -> Option<Copied<T>> {
        let item = self.find(receipt).map(|place| &self.items[place]).filter(|item| !item.copied)?;
        let group = self.groups[item.group].name.clone();
        let (text, tag) = (Arc::clone(&item.text), item.tag.clone());
        Some(Copied { group, text, attempt: item.earlier.saturating_add(item.handed), tag })
    }
}

/// What consumers of one queue remember of messages that are not on their shelves.
#[derive(Default)]
pub(crate) struct Memory {
    /// The last number that was given.
    last: u64,
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
    /// A new number for whatever arrives, also again. They grow with the time, so that those of an instance that takes over are greater than those of the one before, as far as their
    /// clocks agree; and those of one that takes a message back from another are greater than the other's.
    fn number(&mut self, micros: u64) -> u64 {
        self.last = micros.max(self.last + 1);
        self.last
    }

    /// The identity of a message: the one that it had, or its number.
    fn identify(&mut self, fingerprint: Fingerprint, perhaps_again: bool, number: u64) -> DeliveryId {
        if perhaps_again && let Some(ids) = self.lost.get_mut(&fingerprint.hash) {
            let (id, _) = ids.pop_front().expect("an empty list is removed");
            if ids.is_empty() {
                self.lost.remove(&fingerprint.hash);
            }
            return id;
        }
        number
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
        assert!(again[0].sequence > held[1].sequence, "another instance may have handed out more meanwhile");
        assert!(again[0].sequence < again[1].sequence);
        assert_eq!(again[1].id, again[1].sequence, "it had never been out, so it is identified anew");
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
    fn what_is_recalled_is_wanted_back_and_goes_on_if_its_subscription_is_kept() {
        let mut bench = Bench::new();
        for number in 0..3 {
            assert_eq!(bench.arrive("a", number, false), None);
        }
        assert!(!bench.shelf.keep(0, bench.now), "nothing was recalled");
        let held = bench.claim(2);
        let now = bench.now;
        assert!(bench.shelf.recall(0, now), "two are out");
        assert!(held.iter().all(|it| !bench.shelf.is_good(&it.receipt)), "neither may be begun");
        assert_eq!(bench.shelf.extend(&held[0].receipt, LEASE, now), Settled::Settled);
        assert_eq!(bench.shelf.give_back(&held[1].receipt, Duration::ZERO, now), Settled::Settled);
        assert!(bench.claim(9).is_empty() && bench.shelf.drained().is_none(), "one is under way");
        assert!(bench.shelf.keep(0, now));
        assert!(bench.shelf.is_good(&held[0].receipt) && bench.shelf.served() == [0]);
        assert_eq!(texts(&bench.claim(9)), ["1", "2"], "behind the one that is under way");
        assert!(bench.shelf.take(&held[0].receipt, now).is_some());
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

    /// The rule as it is written above, on a plain list: a group's first waiting message goes, unless it or the group is put off, its subscription drains, or a later one of the group is
    /// out.
    #[derive(Default)]
    struct Model {
        /// In the order of arrival.
        messages: Vec<Told>,
        /// Until when a group is put off.
        until: HashMap<u64, Instant>,
        draining: [bool; 2],
        /// Receipts that are good no more.
        stale: Vec<Receipt>,
    }

    /// What the model knows of a message.
    struct Told {
        group: u64,
        number: u64,
        not_before: Option<Instant>,
        /// If it is out.
        receipt: Option<Receipt>,
    }

    impl Told {
        fn part(&self) -> usize {
            part_of(self.group)
        }
    }

    /// A group comes over one subscription. Those from here on have no name, and one message each.
    const NAMELESS: u64 = 5;

    fn part_of(group: u64) -> usize {
        (group % 2) as usize
    }

    impl Model {
        fn next(&self, now: Instant) -> Option<usize> {
            let may_go = |index: &usize| {
                let it = &self.messages[*index];
                let same = |other: &&Told| other.group == it.group;
                let is_first =
                    !self.messages[..*index].iter().filter(same).any(|other| other.receipt.is_none());
                let is_last_out =
                    !self.messages[*index..].iter().filter(same).any(|other| other.receipt.is_some());
                let is_put_off =
                    [self.until.get(&it.group).copied(), it.not_before].iter().flatten().any(|t| *t > now);
                it.receipt.is_none() && is_first && is_last_out && !is_put_off && !self.draining[it.part()]
            };
            (0..self.messages.len()).find(may_go)
        }

        /// The index of one that is out.
        fn any_out(&self, random: &mut fastrand::Rng) -> Option<usize> {
            let out = (0..self.messages.len()).filter(|index| self.messages[*index].receipt.is_some());
            random.choice(out.collect::<Vec<_>>())
        }

        fn forget(&mut self, part: usize) {
            self.draining[part] = false;
            let (gone, kept) =
                std::mem::take(&mut self.messages).into_iter().partition(|it| it.part() == part);
            self.messages = kept;
            self.stale.extend(Vec::into_iter(gone).filter_map(|it: Told| it.receipt));
            self.until.retain(|group, _| part_of(*group) != part);
        }
    }

    /// One of the things that happen to a shelf, at random; and to the model.
    fn step(
        random: &mut fastrand::Rng,
        shelf: &mut Shelf<u64>,
        model: &mut Model,
        run: &mut Run,
        is_late: bool,
    ) {
        let now = run.now;
        match random.u32(..14) {
            0..4 if !is_late => {
                let number = run.next();
                let group = if random.u32(..6) == 0 { NAMELESS + number } else { random.u64(..NAMELESS) };
                let (name, part) = ((group < NAMELESS).then(|| format!("g{group}").into()), part_of(group));
                let not_before =
                    (random.u32(..8) == 0).then(|| now + Duration::from_millis(random.u64(..900)));
                let arrival = Arrival {
                    part,
                    epoch: run.epochs[part],
                    fingerprint: Fingerprint { hash: number, unique: true },
                    perhaps_again: false,
                    earlier: 0,
                    group: name,
                    text: [].into(),
                    not_before,
                    tag: number,
                };
                assert_eq!(shelf.arrive(arrival, &mut run.memory, number, now), None);
                model.messages.push(Told { group, number, not_before, receipt: None });
            }
            0..8 => {
                let most = random.usize(1..6);
                let handed = shelf.claim(most, LEASE, now).0;
                let is_all = handed.len() < most;
                for delivery in handed {
                    let index = model.next(now).expect("it hands out too many");
                    let told = &mut model.messages[index];
                    assert_eq!(delivery.sequence, told.number, "not the first that may go");
                    model.until.remove(&told.group);
                    told.receipt = Some(delivery.receipt);
                }
                assert!(!is_all || model.next(now).is_none(), "it hands out too few");
            }
            8 => run.now += Duration::from_millis(random.u64(..2_000)),
            9 => {
                let Some(index) = model.any_out(random) else { return };
                let told = &mut model.messages[index];
                let receipt = told.receipt.take().expect("it is out");
                let delay = Duration::from_millis(random.u64(..2) * random.u64(..3_000));
                assert_eq!(shelf.give_back(&receipt, delay, now), Settled::Settled);
                let until = model.until.entry(told.group).or_insert(now);
                *until = (*until).max(now + delay);
                model.stale.push(receipt);
            }
            10 => {
                let Some(index) = model.any_out(random) else { return };
                let receipt = model.messages[index].receipt.as_ref().expect("it is out");
                assert_eq!(shelf.extend(receipt, LEASE, now), Settled::Settled);
            }
            11 if random.u32(..12) == 0 => {
                let part = random.usize(..2);
                match random.u32(..3) {
                    0 => {
                        shelf.drain(part, now);
                        model.draining[part] = true;
                    }
                    1 => {
                        shelf.recall(part, now);
                        assert!(shelf.keep(part, now));
                        model.draining[part] = false;
                    }
                    _ => {
                        shelf.forget(part, &mut run.memory, now);
                        model.forget(part);
                        run.epochs[part] = shelf.open(part);
                    }
                }
            }
            _ => {
                let Some(index) = model.any_out(random) else { return };
                let told = model.messages.remove(index);
                let receipt = told.receipt.expect("it is out");
                let taken = shelf.take(&receipt, now).expect("it is out");
                assert_eq!((taken.tag, taken.part), (told.number, part_of(told.group)));
                shelf.told(taken.part);
                model.stale.push(receipt);
            }
        }
        if let Some(receipt) = random.choice(&model.stale) {
            assert!(!shelf.is_good(receipt) && shelf.take(receipt, now).is_none(), "a receipt is good once");
        }
        let out = model.messages.iter().filter(|told| told.receipt.is_some()).count();
        assert_eq!(shelf.counts(), (model.messages.len() - out, out));
    }

    /// What goes on around a shelf.
    struct Run {
        memory: Memory,
        epochs: [u64; 2],
        now: Instant,
        number: u64,
    }

    impl Run {
        fn next(&mut self) -> u64 {
            self.number += 1;
            self.number
        }
    }

    #[test]
    fn it_hands_out_what_the_rule_says_and_nothing_stays_behind() {
        for seed in 0..300 {
            let told = std::panic::catch_unwind(|| {
                let mut random = fastrand::Rng::with_seed(seed);
                let (mut shelf, mut model) = (Shelf::new(2), Model::default());
                let epochs = [shelf.open(0), shelf.open(1)];
                let mut run = Run { memory: Memory::default(), epochs, now: Instant::now(), number: 0 };
                (0..500).for_each(|n| step(&mut random, &mut shelf, &mut model, &mut run, n >= 400));
                for part in 0..2 {
                    shelf.forget(part, &mut run.memory, run.now);
                }
                assert!(shelf.is_at_rest() && shelf.groups.is_empty() && shelf.names.is_empty());
                assert!(shelf.ready.is_empty() && shelf.items.is_empty());
                assert!(shelf.spare.len() <= SPARE_GROUPS.0);
            });
            assert!(told.is_ok(), "seed {seed}");
        }
    }
}
