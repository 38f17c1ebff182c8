//! What travels: a body, the key that orders it, and what kind of message it is.
//!
//! A message is moved, never shared: from the submitter into ingress, into its lane, into the hands of one worker, and out.
//! [`Handle::submit`](crate::Handle::submit) takes it; [`admission`](crate::Overflow) decides what becomes of it.

use std::{
    collections::VecDeque,
    mem::{replace, take},
};

/// A message on its way: `body` is handled in order with all others of the same `key`.
///
/// Most submitters write `(key, body)`, which turns into an event of normal priority.
///
/// ```
/// use laneway::{Message, Priority};
/// let message = Message::new("order-7", "paid").priority(Priority::High);
/// assert_eq!(message.key, "order-7");
/// let same: Message<_, _> = ("order-7", "paid").into();
/// assert_eq!(same.body, message.body);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<K, M> {
    /// What orders it.
    pub key: K,
    /// What the handler gets.
    pub body: M,
    /// An event, or the control message that starts or finishes the flow of its key.
    pub kind: Kind,
    /// How urgent its lane becomes while it waits. It never overtakes inside its lane.
    pub priority: Priority,
}

impl<K, M> Message<K, M> {
    /// An event.
    pub fn new(key: K, body: M) -> Self {
        Message { key, body, kind: Kind::Event, priority: Priority::Normal }
    }

    /// The control message that starts the flow of `key`.
    pub fn start(key: K, body: M) -> Self {
        Message { kind: Kind::Start, ..Message::new(key, body) }
    }

    /// The control message that finishes the flow of `key`.
    pub fn finish(key: K, body: M) -> Self {
        Message { kind: Kind::Finish, ..Message::new(key, body) }
    }

    /// The same message with another priority.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}

impl<K, M> From<(K, M)> for Message<K, M> {
    fn from((key, body): (K, M)) -> Self {
        Message::new(key, body)
    }
}

/// What a message means to the flow of its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// An ordinary message.
    #[default]
    Event,
    /// The flow of this key begins. Never dropped by an overflow policy.
    Start,
    /// The flow of this key ends. Never dropped by an overflow policy.
    Finish,
}

impl Kind {
    /// Start and finish are control messages: no overflow policy drops them.
    pub fn is_control(self) -> bool {
        self != Kind::Event
    }
}

/// How urgent a lane is among the lanes of its dispatcher.
///
/// Priority chooses between lanes and never inside one: an urgent message makes its whole lane urgent until it has been
/// handled, so that what is ahead of it in its lane does not hold it up longer than need be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// After everything else, though never starved.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Before normal lanes.
    High,
    /// Before all others.
    Urgent,
}

impl Priority {
    /// How many tiers there are.
    pub(crate) const TIERS: usize = 4;

    /// The tier's place in the ready lists: 0 is served first.
    pub(crate) fn tier(self) -> u8 {
        Priority::Urgent as u8 - self as u8
    }
}

/// A message inside the engine, from ingress to its end.
#[derive(Debug)]
pub(crate) struct Item<K, M> {
    /// Which lane it belongs to.
    pub(crate) fingerprint: u64,
    /// When it was accepted, in nanoseconds of the engine's clock, if it is one of those that are timed; else 0.
    pub(crate) accepted_at: u64,
    pub(crate) message: Message<K, M>,
}

/// Where kind and priority stand in a [mark](Packed): bits of a fingerprint that neither the tables of lanes (the lowest and the highest)
/// nor the placement (from 32 up) nor the shards of the mappings (from 48 up) go by. Fingerprints are zero there.
const TAG: u32 = 44;
const TAG_MASK: u64 = 0b1111 << TAG;

/// The fingerprint that a hash gives.
pub(crate) fn fingerprint_of(hash: u64) -> u64 {
    hash & !TAG_MASK
}

/// A message on its way from a submitter to a worker: everything in as few bytes as possible, because these are the bytes
/// that travel from one processor to another. Measured: with 32 bytes rather than 48 a small message is handed over twice as fast.
#[derive(Debug)]
struct Packed<K, M> {
    /// The fingerprint, with kind and priority in the bits that it does not use.
    mark: u64,
    key: K,
    body: M,
}

impl<K, M> Packed<K, M> {
    #[inline(always)]
    fn pack(item: Item<K, M>) -> Self {
        let Message { key, body, kind, priority } = item.message;
        let tag = (kind as u64) << 2 | priority as u64;
        Packed { mark: item.fingerprint | tag << TAG, key, body }
    }

    #[inline]
    fn unpack(self, accepted_at: u64) -> Item<K, M> {
        let tag = self.mark >> TAG;
        let kind = match tag >> 2 & 3 {
            0 => Kind::Event,
            1 => Kind::Start,
            _ => Kind::Finish,
        };
        let priority = match tag & 3 {
            0 => Priority::Low,
            1 => Priority::Normal,
            2 => Priority::High,
            _ => Priority::Urgent,
        };
        let message = Message { key: self.key, body: self.body, kind, priority };
        Item { fingerprint: fingerprint_of(self.mark), accepted_at, message }
    }
}

/// Messages in the order of their acceptance, packed: as submitters put them in.
#[derive(Debug)]
pub(crate) struct Arrivals<K, M> {
    packed: Vec<Packed<K, M>>,
    /// By place, when those were accepted that are timed. Few are, so it is not for each message to carry that.
    timed: Vec<(usize, u64)>,
}

impl<K, M> Arrivals<K, M> {
    pub(crate) fn new() -> Self {
        Arrivals { packed: Vec::new(), timed: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.packed.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, item: Item<K, M>) {
        if item.accepted_at > 0 {
            self.timed.push((self.packed.len(), item.accepted_at));
        }
        self.packed.push(Packed::pack(item));
    }

    /// All of them. Only the first may be timed.
    pub(crate) fn append(&mut self, items: &mut VecDeque<Item<K, M>>) {
        if let Some(first) = items.pop_front() {
            self.push(first);
        }
        self.packed.extend(items.drain(..).map(Packed::pack));
    }

    /// Whether it has grown so much in a burst that it should give memory back.
    pub(crate) fn is_large(&self) -> bool {
        is_large(self.packed.capacity())
    }

    /// Gives memory back that it has grown to in a burst.
    pub(crate) fn shrink(&mut self) {
        if self.is_large() {
            self.packed.shrink_to(0);
        }
    }
}

/// The same, as workers take them out.
#[derive(Debug)]
pub(crate) struct Inbox<K, M> {
    packed: VecDeque<Packed<K, M>>,
    timed: VecDeque<(usize, u64)>,
    /// How many have been taken out: the place of the first one, when all came.
    taken: usize,
}

impl<K, M> Inbox<K, M> {
    pub(crate) fn new() -> Self {
        Inbox { packed: VecDeque::new(), timed: VecDeque::new(), taken: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.packed.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// Takes over all that has arrived. It has to be empty itself; its memory goes to the other side, and no message is moved.
    pub(crate) fn refill(&mut self, arrivals: &mut Arrivals<K, M>) {
        debug_assert!(self.is_empty() && self.timed.is_empty(), "older ones would be lost");
        let (packed, timed) = (take(&mut self.packed), take(&mut self.timed));
        self.packed = replace(&mut arrivals.packed, packed.into()).into();
        self.timed = replace(&mut arrivals.timed, timed.into()).into();
        self.taken = 0;
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Item<K, M>> {
        let packed = self.packed.pop_front()?;
        let place = self.taken;
        self.taken += 1;
        Some(packed.unpack(self.accepted_at(place)))
    }

    #[inline]
    fn accepted_at(&mut self, place: usize) -> u64 {
        match self.timed.front() {
            Some(&(first, at)) if first == place => {
                self.timed.pop_front();
                at
            }
            _ => 0,
        }
    }

    /// See [`Arrivals::is_large`].
    pub(crate) fn is_large(&self) -> bool {
        is_large(self.packed.capacity())
    }

    /// See [`Arrivals::shrink`].
    pub(crate) fn shrink(&mut self) {
        if self.is_large() {
            self.packed.shrink_to(0);
        }
    }
}

fn is_large(capacity: usize) -> bool {
    capacity > 1_024
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(key: u64, kind: Kind, priority: Priority, accepted_at: u64) -> Item<u64, [u64; 2]> {
        let message = Message { kind, priority, ..Message::new(key, [key, 1]) };
        Item { fingerprint: fingerprint_of(u64::MAX - key), accepted_at, message }
    }

    #[test]
    fn what_is_packed_comes_out_as_it_was() {
        let mut arrivals = Arrivals::new();
        let mut expected = Vec::new();
        for kind in [Kind::Event, Kind::Start, Kind::Finish] {
            for priority in [Priority::Low, Priority::Normal, Priority::High, Priority::Urgent] {
                let at = expected.len() as u64 % 3 * 10;
                arrivals.push(item(expected.len() as u64, kind, priority, at));
                expected.push((kind, priority, at));
            }
        }
        let mut inbox = Inbox::new();
        inbox.refill(&mut arrivals);
        assert!(arrivals.is_empty());
        for (key, (kind, priority, at)) in expected.into_iter().enumerate() {
            let out = inbox.pop().unwrap();
            let same = item(key as u64, kind, priority, at);
            assert_eq!((out.fingerprint, out.accepted_at), (same.fingerprint, same.accepted_at));
            assert_eq!(out.message, same.message);
        }
        assert!(inbox.pop().is_none());
    }

    #[test]
    fn a_small_message_takes_half_a_cache_line() {
        assert_eq!(size_of::<Packed<u64, [u64; 2]>>(), 32);
    }

    #[test]
    fn the_time_of_a_batch_is_that_of_its_first() {
        let mut arrivals = Arrivals::new();
        arrivals.push(item(0, Kind::Event, Priority::Normal, 0));
        let mut batch: VecDeque<_> = (1..4)
            .map(|key| item(key, Kind::Event, Priority::Normal, if key == 1 { 7 } else { 0 }))
            .collect();
        arrivals.append(&mut batch);
        let mut inbox = Inbox::new();
        inbox.refill(&mut arrivals);
        let times: Vec<u64> = std::iter::from_fn(|| inbox.pop()).map(|item| item.accepted_at).collect();
        assert_eq!(times, [0, 7, 0, 0]);
    }
}
