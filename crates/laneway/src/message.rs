//! What travels: a body, the key that orders it, and what kind of message it is.
//!
//! A message is moved, never shared: from the submitter into ingress, into its lane, into the hands of one worker, and out.
//! [`Handle::submit`](crate::Handle::submit) takes it; [`admission`](crate::Overflow) decides what becomes of it.

use std::{
    collections::VecDeque,
    mem::{MaybeUninit, replace, swap, take},
};

use crate::batch::Bin;

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

/// Where kind and priority stand in a [mark](Packed): bits of a fingerprint that neither the tables of lanes (the lowest and the highest seven)
/// nor the placement (32 to 52) nor the shards of the mappings (47 to 52) go by. Fingerprints are zero there.
const TAG: u32 = 53;
const TAG_MASK: u64 = 0b1111 << TAG;

/// Where a mark says that the message is timed: as high as a table of lanes would have to be large to go by it.
const TIMED: u64 = 1 << 31;

/// The fingerprint that a hash gives.
pub(crate) fn fingerprint_of(hash: u64) -> u64 {
    hash & !(TAG_MASK | TIMED)
}

/// A message on its way from a submitter to a worker: everything in as few bytes as possible, because these are the bytes
/// that travel from one processor to another. Measured: with 32 bytes rather than 48 a small message is handed over twice as fast.
#[derive(Debug)]
pub(crate) struct Packed<K, M> {
    /// The fingerprint, with kind and priority, and whether it is timed, in the bits that it does not use.
    mark: u64,
    pub(crate) key: K,
    pub(crate) body: M,
}

impl<K, M> Packed<K, M> {
    #[inline(always)]
    pub(crate) fn pack(item: Item<K, M>) -> Self {
        let Message { key, body, kind, priority } = item.message;
        let tag = (kind as u64) << 2 | priority as u64;
        let timed = if item.accepted_at > 0 { TIMED } else { 0 };
        Packed { mark: item.fingerprint | tag << TAG | timed, key, body }
    }

    #[inline]
    pub(crate) fn kind(&self) -> Kind {
        match self.mark >> (TAG + 2) & 3 {
            0 => Kind::Event,
            1 => Kind::Start,
            _ => Kind::Finish,
        }
    }

    #[inline]
    pub(crate) fn unpack(self, accepted_at: u64) -> Item<K, M> {
        let kind = self.kind();
        let priority = match self.mark >> TAG & 3 {
            0 => Priority::Low,
            1 => Priority::Normal,
            2 => Priority::High,
            _ => Priority::Urgent,
        };
        let message = Message { key: self.key, body: self.body, kind, priority };
        Item { fingerprint: fingerprint_of(self.mark), accepted_at, message }
    }

    #[inline]
    pub(crate) fn is_timed(&self) -> bool {
        self.mark & TIMED != 0
    }
}

/// As many messages travel together at most: no more than a stream has by default (`lane/stream.rs`), so that a worker can take it as it came, and so few that a key
/// with half of the messages does not exceed its share of them by chance. Two for loom, which would not live to see more.
pub(crate) const CHUNK: usize = if cfg!(loom) { 2 } else { 192 };

/// So many places of a chunk are filled as they come before others are [prepared](Arrivals::prepare).
const FEW_PLACES: usize = 8;

/// Bytes that processors exchange at a time.
const CACHE_LINE: usize = 64;

/// Messages that travel together, packed, in the order of their acceptance. What is emptied is filled again: in its steady state a dispatcher allocates nothing.
#[derive(Debug)]
pub(crate) struct Chunk<K, M> {
    packed: VecDeque<Packed<K, M>>,
    /// When those were accepted that are timed. Few are, so it is not for each message to carry that.
    times: VecDeque<u64>,
}

impl<K, M> Chunk<K, M> {
    pub(crate) fn new() -> Self {
        Chunk { packed: VecDeque::new(), times: VecDeque::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.packed.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// Which lanes they belong to.
    #[inline]
    pub(crate) fn fingerprints(&self) -> impl Iterator<Item = u64> {
        self.packed.iter().map(|packed| fingerprint_of(packed.mark))
    }

    /// Keys and bodies, oldest first.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&K, &M)> {
        self.packed.iter().map(|packed| (&packed.key, &packed.body))
    }

    /// Takes the oldest.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Item<K, M>> {
        let packed = self.packed.pop_front()?;
        let accepted_at = if packed.is_timed() { self.times.pop_front().unwrap_or(0) } else { 0 };
        Some(packed.unpack(accepted_at))
    }

    /// All of them in their places, and when those were accepted that are timed.
    pub(crate) fn places(&mut self) -> (&mut [Packed<K, M>], &VecDeque<u64>) {
        (self.packed.make_contiguous(), &self.times)
    }

    /// Lets go of the oldest, among which so many are timed.
    pub(crate) fn remove(&mut self, messages: usize, timed: usize) {
        self.packed.drain(..messages);
        self.times.drain(..timed.min(self.times.len()));
    }

    /// Takes the newest.
    pub(crate) fn pop_back(&mut self) -> Option<Item<K, M>> {
        let packed = self.packed.pop_back()?;
        let accepted_at = if packed.is_timed() { self.times.pop_back().unwrap_or(0) } else { 0 };
        Some(packed.unpack(accepted_at))
    }

    /// Takes the oldest of another.
    #[inline]
    fn take_from(&mut self, other: &mut Self) {
        if let Some(packed) = other.packed.pop_front() {
            if packed.is_timed() {
                self.times.extend(other.times.pop_front());
            }
            self.packed.push_back(packed);
        }
    }
}

/// Messages in the order of their acceptance: as submitters put them in.
#[derive(Debug)]
pub(crate) struct Arrivals<K, M> {
    /// Chunks of [`CHUNK`] messages, oldest first.
    full: VecDeque<Chunk<K, M>>,
    /// The chunk that is being filled.
    packed: Vec<Packed<K, M>>,
    times: Vec<u64>,
    /// So many places of it can be filled before the next ones are [prepared](Arrivals::prepare).
    prepared: usize,
    /// Emptied ones. The one that was emptied first is filled first: 20 to 24 million messages per second with far cores, and 15 the other way round, before places were
    /// [prepared](Arrivals::prepare); not measured since.
    spare: VecDeque<Chunk<K, M>>,
}

impl<K, M> Arrivals<K, M> {
    pub(crate) fn new() -> Self {
        Arrivals {
            full: VecDeque::new(),
            packed: Vec::new(),
            times: Vec::new(),
            prepared: 0,
            spare: VecDeque::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.full.len() * CHUNK + self.packed.len()
    }

    /// A full chunk is put away only for the next message, so there is always one in the last.
    pub(crate) fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, item: Item<K, M>) {
        if self.packed.len() >= self.prepared {
            self.prepare();
        }
        if item.accepted_at > 0 {
            self.times.push(item.accepted_at);
        }
        self.packed.push(Packed::pack(item));
    }

    /// The first `count` of a bin, at least one. If any is timed it is the very first.
    pub(crate) fn append(&mut self, bin: &mut Bin<K, M>, count: usize, accepted_at: u64) {
        if self.packed.len() == CHUNK {
            self.prepare();
        }
        let mut timed = (accepted_at > 0).then_some(self.packed.len());
        let mut left = count;
        loop {
            let fits = left.min(CHUNK - self.packed.len());
            if bin.reversed {
                let last = bin.packed.len() - fits;
                self.packed.extend(bin.packed.drain(last..).rev());
            } else {
                self.packed.extend(bin.packed.drain(..fits));
            }
            left -= fits;
            if let Some(place) = timed.take() {
                self.packed[place].mark |= TIMED;
                self.times.push(accepted_at);
            }
            if left == 0 {
                return;
            }
            self.prepare();
        }
    }

    /// Sees to the places of the next messages: begins another chunk if this one is full, and has the memory fetched.
    ///
    /// An emptied chunk is in the cache of the worker's processor. Each message is pushed under a lock, and the atomic step that takes it waits until all that was stored before has been fetched: if
    /// every message fetched its own place, each would wait for a way between two cores. Written to in one go, the places are fetched at the same time. Measured with cores
    /// that are 200 ns from each other: 67 million messages per second instead of 29; with cores that are near, the same or a few hundredths less.
    ///
    /// Where a submitter fills one chunk after the other, all of it is prepared. Behind a worker that takes what comes, as much again as has come since. A batch begins its
    /// chunks the same way.
    #[cold]
    #[inline(never)]
    fn prepare(&mut self) {
        if self.packed.len() == CHUNK {
            self.put_away();
            self.prepared = CHUNK;
            return self.fetch(CHUNK);
        }
        let filled = self.packed.len();
        self.prepared = (filled + filled.max(FEW_PLACES)).min(CHUNK);
        if filled >= FEW_PLACES {
            self.fetch(self.prepared - filled);
        }
    }

    /// Writes to the next places, once to each cache line. (Messages that take more than one were not measured, and are left alone.)
    fn fetch(&mut self, places: usize) {
        let size = size_of::<Packed<K, M>>();
        if size <= CACHE_LINE {
            let next = self.packed.spare_capacity_mut().iter_mut().take(places);
            next.step_by(CACHE_LINE / size).for_each(|place| *place = MaybeUninit::zeroed());
        }
    }

    /// Begins the next chunk.
    fn put_away(&mut self) {
        let next = self
            .spare
            .pop_front()
            .unwrap_or_else(|| Chunk { packed: VecDeque::with_capacity(CHUNK), times: VecDeque::new() });
        let chunk = self.exchange(next);
        self.full.push_back(chunk);
    }

    /// Gives the chunk that is being filled away for an empty one. No message is moved.
    fn exchange(&mut self, empty: Chunk<K, M>) -> Chunk<K, M> {
        debug_assert!(empty.is_empty() && empty.times.is_empty(), "what is in it would be lost");
        let packed = replace(&mut self.packed, empty.packed.into());
        let times = replace(&mut self.times, empty.times.into());
        self.prepared = 0;
        Chunk { packed: packed.into(), times: times.into() }
    }

    /// For how many messages there is room in chunks that are empty.
    pub(crate) fn places_to_spare(&self) -> usize {
        self.spare.len() * CHUNK
    }

    /// Gives up what a burst has left: all that is empty, because what was kept would lie anywhere among what goes, and an allocator gives back what lies together. The caller drops it
    /// when it has no lock: it is many pieces.
    pub(crate) fn give_up(&mut self) -> VecDeque<Chunk<K, M>> {
        if self.is_empty() {
            let last = self.exchange(Chunk::new());
            self.spare.push_back(last);
        }
        self.full.shrink_to_fit();
        take(&mut self.spare)
    }
}

/// The same, as workers take them out.
#[derive(Debug)]
pub(crate) struct Inbox<K, M> {
    /// Oldest first; none of them empty.
    chunks: VecDeque<Chunk<K, M>>,
    /// How many are in them.
    len: usize,
    /// Emptied ones, on their way back.
    spare: VecDeque<Chunk<K, M>>,
}

impl<K, M> Inbox<K, M> {
    pub(crate) fn new() -> Self {
        Inbox { chunks: VecDeque::new(), len: 0, spare: VecDeque::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes over all that has arrived. It has to be empty itself; its memory goes to the other side, and no message is moved.
    pub(crate) fn refill(&mut self, arrivals: &mut Arrivals<K, M>) {
        debug_assert!(self.is_empty(), "older ones would be lost");
        self.len = arrivals.len();
        swap(&mut self.chunks, &mut arrivals.full);
        if !arrivals.is_empty() {
            let emptied_first = arrivals.spare.pop_front().or_else(|| self.spare.pop_front());
            let empty = emptied_first.unwrap_or_else(Chunk::new);
            self.chunks.push_back(arrivals.exchange(empty));
        }
        // Under the lock of ingress, so they are not moved one by one where that can be helped.
        if arrivals.spare.is_empty() {
            swap(&mut arrivals.spare, &mut self.spare);
        }
        arrivals.spare.append(&mut self.spare);
    }

    /// The oldest chunk, or what is left of it.
    pub(crate) fn first(&self) -> Option<&Chunk<K, M>> {
        self.chunks.front()
    }

    /// Takes the oldest chunk as it is, in exchange for an empty one.
    pub(crate) fn take_first(&mut self, chunk: &mut Chunk<K, M>) {
        debug_assert!(chunk.is_empty() && chunk.times.is_empty(), "what is in it would be lost");
        if let Some(mut first) = self.chunks.pop_front() {
            self.len -= first.len();
            swap(&mut first, chunk);
            self.spare.push_back(first);
        }
    }

    /// Moves the oldest message into a chunk.
    #[inline]
    pub(crate) fn pass(&mut self, chunk: &mut Chunk<K, M>) {
        if let Some(first) = self.chunks.front_mut() {
            chunk.take_from(first);
            self.one_left();
        }
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Item<K, M>> {
        let item = self.chunks.front_mut()?.pop();
        self.one_left();
        item
    }

    #[inline]
    fn one_left(&mut self) {
        self.len -= 1;
        if self.chunks.front().is_some_and(Chunk::is_empty) {
            self.spare.extend(self.chunks.pop_front());
        }
    }

    /// See [`Arrivals::places_to_spare`].
    pub(crate) fn places_to_spare(&self) -> usize {
        self.spare.len() * CHUNK
    }

    /// See [`Arrivals::give_up`].
    pub(crate) fn give_up(&mut self) -> VecDeque<Chunk<K, M>> {
        self.chunks.shrink_to_fit();
        take(&mut self.spare)
    }
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

    /// Sends and takes messages of one type: singly and in batches across chunks, with whatever number between two looks of the worker. Each has its number in its body.
    fn pass_through<M: Clone + PartialEq + std::fmt::Debug>(body: impl Fn(u64) -> M) {
        let (mut arrivals, mut inbox) = (Arrivals::new(), Inbox::new());
        let (mut sent, mut taken) = (0, 0);
        let next = |number: u64| {
            let accepted_at = if number % 10 == 3 { number } else { 0 };
            Item {
                fingerprint: fingerprint_of(number),
                accepted_at,
                message: Message::new(number, body(number)),
            }
        };
        for count in (0..40).chain([CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]).cycle().take(150) {
            for place in 0..count {
                if place % 7 == 6 {
                    let packed = (0..place as u64)
                        .map(|later| Packed::pack(Item { accepted_at: 0, ..next(sent + later) }))
                        .collect();
                    let mut bin = Bin { packed, reversed: place % 2 == 0, urgent: false };
                    if bin.reversed {
                        bin.packed.reverse();
                    }
                    arrivals.append(&mut bin, place, 0);
                    sent += place as u64;
                } else {
                    arrivals.push(next(sent));
                    sent += 1;
                }
            }
            inbox.refill(&mut arrivals);
            while let Some(out) = inbox.pop() {
                assert_eq!((out.message.key, out.message.body), (taken, body(taken)));
                taken += 1;
            }
        }
        assert_eq!(taken, sent);
    }

    /// Places are written to before their messages come, and never after, whatever their size.
    #[test]
    fn to_prepare_places_harms_none_that_is_filled() {
        pass_through(|_| ());
        pass_through(|number| number as u32);
        pass_through(|number| [number; 2]);
        pass_through(|number| [number; 5]);
        pass_through(|number| [number; 6]);
        pass_through(|number| [number; 7]);
        pass_through(|number| number.to_string());
    }

    #[test]
    fn the_time_of_a_batch_is_that_of_its_first() {
        let mut arrivals = Arrivals::new();
        arrivals.push(item(0, Kind::Event, Priority::Normal, 0));
        let packed = (1..5).map(|key| Packed::pack(item(key, Kind::Event, Priority::Normal, 0))).collect();
        let mut bin = Bin { packed, reversed: false, urgent: false };
        arrivals.append(&mut bin, 3, 7);
        assert_eq!(bin.packed.len(), 1, "as many as it was told");
        let mut inbox = Inbox::new();
        inbox.refill(&mut arrivals);
        let times: Vec<u64> = std::iter::from_fn(|| inbox.pop()).map(|item| item.accepted_at).collect();
        assert_eq!(times, [0, 7, 0, 0]);
    }

    /// More than a few chunks; every tenth is timed. The key of each is its place.
    fn many(count: usize) -> Arrivals<u64, [u64; 2]> {
        let mut arrivals = Arrivals::new();
        for key in 0..count as u64 {
            let at = if key % 10 == 3 { key + 1 } else { 0 };
            arrivals.push(item(key, Kind::Event, Priority::Normal, at));
        }
        arrivals
    }

    fn check(out: &Item<u64, [u64; 2]>, place: usize) {
        let at = if place % 10 == 3 { place as u64 + 1 } else { 0 };
        assert_eq!((out.message.key, out.accepted_at), (place as u64, at));
    }

    #[test]
    fn chunks_keep_the_order_and_the_times_whichever_way_they_are_taken() {
        let count = 5 * CHUNK + 7;
        let (mut inbox, mut arrivals) = (Inbox::new(), many(count));
        assert_eq!(arrivals.len(), count);
        inbox.refill(&mut arrivals);
        assert_eq!((inbox.len(), arrivals.len(), arrivals.is_empty()), (count, 0, true));
        let (mut place, mut stream) = (0, Chunk::new());
        let mut see = |out: Item<_, _>| {
            check(&out, place);
            place += 1;
        };
        while !inbox.is_empty() {
            // One alone, some that are moved, across the end of a chunk, and what is left of a chunk as it is.
            inbox.pop().into_iter().for_each(&mut see);
            (0..CHUNK).for_each(|_| inbox.pass(&mut stream));
            std::iter::from_fn(|| stream.pop()).for_each(&mut see);
            inbox.take_first(&mut stream);
            std::iter::from_fn(|| stream.pop()).for_each(&mut see);
        }
        assert_eq!((place, inbox.len()), (count, 0));
    }

    #[test]
    fn what_is_left_of_a_chunk_comes_out_backwards_too_with_its_times() {
        let (mut inbox, mut arrivals, mut stream) = (Inbox::new(), many(CHUNK), Chunk::new());
        inbox.refill(&mut arrivals);
        inbox.take_first(&mut stream);
        let timed = stream.packed.range(..CHUNK / 2).filter(|packed| packed.is_timed()).count();
        stream.remove(CHUNK / 2, timed);
        for place in (CHUNK / 2..CHUNK).rev() {
            check(&stream.pop_back().unwrap(), place);
        }
        assert!(stream.pop_back().is_none() && stream.times.is_empty());
    }

    #[test]
    fn emptied_chunks_are_filled_again_and_given_up_after_a_burst() {
        let (mut inbox, mut arrivals) = (Inbox::new(), many(8 * CHUNK));
        inbox.refill(&mut arrivals);
        while inbox.pop().is_some() {}
        assert_eq!((inbox.spare.len(), inbox.places_to_spare()), (8, 8 * CHUNK));
        inbox.refill(&mut arrivals);
        assert_eq!((inbox.spare.len(), arrivals.spare.len()), (0, 8), "they went back");
        let first = arrivals.spare[0].packed.as_slices().0.as_ptr();
        (0..=CHUNK as u64).for_each(|key| arrivals.push(item(key, Kind::Event, Priority::Normal, 0)));
        assert_eq!(arrivals.packed.as_ptr(), first, "the one that was emptied first is filled first");
        drop((arrivals.give_up(), inbox.give_up()));
        assert_eq!((arrivals.places_to_spare(), inbox.places_to_spare()), (0, 0));
        assert_eq!(arrivals.len(), CHUNK + 1, "nothing but memory is given up");
        inbox.refill(&mut arrivals);
        assert_eq!(arrivals.give_up().len(), 1, "the one that would be filled next goes, too");
        assert_eq!(arrivals.packed.capacity(), 0);
    }
}
