//! Which message may be handed out next: what decides. No threads, no clock, no disk; time is passed in.
//!
//! An [`Index`] is the whole state of one queue in memory, bodies aside. The writer (`writer.rs`) appends to it what has become durable and
//! tells it what has been settled durably; consumers claim from it. It is rebuilt from the rows of the file when the store is opened.
//!
//! # The rule
//!
//! The messages of a group that are not settled are a list in the order of their sequences. Each of them is either *waiting* or *out*: leased
//! to a consumer, or on its way to being settled. A message may be handed out to consumer C when
//!
//! 1. it is the first of its group that waits, so all before it are out;
//! 2. those before it, if any, are out to C: one consumer may hold several messages of a group, because it got them in order and keeps that
//!    order, but two consumers never hold messages of one group;
//! 3. none behind it is out: otherwise C would get an earlier message after a later one;
//! 4. none of its group is being given back: C has let go of something, and what comes before must be known first;
//! 5. its own time has come. One that is delayed keeps its successors waiting, since the first line speaks of the first that waits, due or not.
//!
//! Lines 1 and 3 together say that what is out is the front of the list. What breaks that is a message that comes back (given back, or
//! its lease ran out) while later ones are still out. Nothing of the group is handed out then until the later ones have been settled,
//! given back, or have run out as well; after that the group goes on from the message that came back, strictly in order.
//!
//! # Leases that run out
//!
//! **A lease is never cut short.** When the lease of message 1 runs out and that of message 2 has not, message 2 stays where it is, and message 1
//! waits for it by line 3. The other way, to void what the consumer holds of the group, would hand message 2 to somebody else
//! while its holder has every right to be at work on it. A consumer that has died lets all of its leases run out, so the wait has an end.
//!
//! **A receipt is good until the group moves on.** A lease that has run out leaves a record: as long as nothing of the group has been handed
//! out since, its holder may still settle or renew it, which saves a second delivery when somebody was only late. The next
//! handing-out in the group wipes all such records of the group, and from then on the old receipts are stale.
//!
//! # Cost
//!
//! A waiting message is an entry of 32 bytes, a group of 80 and its place in a table of integers; bodies and the names of
//! groups are not here. Groups are found by a fingerprint, 64 bits of a keyed hash of the name: two groups with the same one would be one
//! lane, in order and only not in parallel. The next message is found in constant time: groups that could go are in a ready list, once each.
//! A message without a group, where those are unordered, needs no group at all.
//!
//! Memory follows what is here, and not what has been: when three quarters of the entries' places are free, or of the groups', what is left is moved together. So a
//! message that stays parked does not keep the memory of the millions that have passed it. Moving costs less than the removals did that made it due; whoever names a place is in
//! here and is told the new one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// Milliseconds since 1970, as the store's clock has them.
pub(in crate::source) type Millis = u64;
/// The place of a message among all of its store.
pub(in crate::source) type Sequence = u64;
/// Who claims. Handles of a queue that were cloned from each other are one consumer.
pub(in crate::source) type ConsumerId = u32;
/// 64 bits of a keyed hash of a group's name.
pub(in crate::source) type Fingerprint = u64;

/// No entry, no group.
const NONE: u32 = u32::MAX;

/// Fingerprints are hashes and sequences are dense: hashing them again would add nothing but one multiplication's worth of spread.
#[derive(Default)]
pub(in crate::source) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("only 64-bit integers are hashed");
    }
    fn write_u64(&mut self, value: u64) {
        let wide = u128::from(value) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (wide as u64) ^ ((wide >> 64) as u64);
    }
}

pub(in crate::source) type Table<V> = HashMap<u64, V, BuildHasherDefault<Spread>>;

/// A message that is not settled.
#[derive(Debug)]
struct Entry {
    sequence: Sequence,
    /// Not handed out before then.
    due: Millis,
    /// Neighbours in the list of its group, or in the list of loose messages that could go.
    previous: u32,
    next: u32,
    /// Its group; `NONE` for a loose message.
    group: u32,
    /// How often it was handed out; stays at the greatest number once it is there.
    attempts: u16,
    /// Out, and not waiting.
    out: bool,
}

/// Where a group is to be found by those who look for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nowhere: nothing of it may go.
    Nowhere,
    /// In the ready list for everybody.
    Anybody,
    /// In the ready list of the consumer that holds its front.
    Only(ConsumerId),
    /// Among the delayed.
    Delayed(Millis),
}

#[derive(Debug)]
struct Group {
    fingerprint: Fingerprint,
    head: u32,
    tail: u32,
    /// The first entry that waits.
    first_waiting: u32,
    length: u32,
    /// Entries that are out, before and behind the first that waits.
    out_before: u32,
    out_behind: u32,
    /// Of those that are out: being given back.
    returning: u32,
    /// Of those that wait: with the record of a lease that ran out.
    expired: u32,
    /// To whom its messages are out, if any are.
    holder: ConsumerId,
    place: Place,
    /// Neighbours in the ready list.
    ready_previous: u32,
    ready_next: u32,
    /// When it was put into the ready list, as a count of such events.
    ticket: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Leased until the deadline.
    Held,
    /// Ran out; the message waits again.
    Expired,
    /// Its end is being written: done, dead, or in quarantine.
    Ending,
    /// Its return is being written.
    Returning,
}

#[derive(Debug)]
struct Lease {
    entry: u32,
    consumer: ConsumerId,
    /// Different for each handing-out.
    generation: u64,
    deadline: Millis,
    stage: Stage,
}

/// A message that has just been handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::source) struct Claimed {
    pub(in crate::source) sequence: Sequence,
    pub(in crate::source) generation: u64,
    pub(in crate::source) attempt: u32,
}

/// What a consumer wants to do to a message that is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::source) enum Intent {
    /// Take it out of the queue.
    End,
    /// Put it back.
    Return,
}

/// What a group does, for those who ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::source) struct Standing {
    pub(in crate::source) head: Sequence,
    pub(in crate::source) depth: u32,
    pub(in crate::source) out: u32,
    pub(in crate::source) state: GroupState,
}

/// What a group of a queue does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupState {
    /// Its next message would be handed out to whoever asks.
    Ready,
    /// Messages of it are leased. The next one goes to their holder only, or nobody.
    Leased,
    /// Its next message is not due for this long.
    Delayed {
        /// For so many more milliseconds.
        for_millis: u64,
    },
    /// A message came back while later ones are leased: nothing is handed out until those have come back, too.
    Recalling,
}

/// A heap of things with numbers, which are theirs until it is packed.
#[derive(Debug)]
struct Slab<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    fn new() -> Self {
        Slab { places: Vec::new(), free: Vec::new() }
    }

    fn insert(&mut self, thing: T) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.places[slot as usize] = Some(thing);
            return slot;
        }
        let slot = u32::try_from(self.places.len()).expect("capacities are below 2^32");
        assert!(slot != NONE, "capacities are below 2^32");
        self.places.push(Some(thing));
        slot
    }

    fn remove(&mut self, slot: u32) -> T {
        let thing = self.places[slot as usize].take().expect("only what is there is removed");
        self.free.push(slot);
        thing
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places.iter_mut().flatten()
    }

    /// Whether so much of it is free that what is left is worth moving.
    fn is_sparse(&self) -> bool {
        self.places.len() > KEPT && self.free.len() >= self.places.len() / 4 * 3
    }

    /// Moves everything together, and says what was moved where.
    fn pack(&mut self) -> Moved {
        let left = self.places.len() - self.free.len();
        let old = std::mem::replace(self, Slab { places: Vec::with_capacity(left), free: Vec::new() });
        let places = old.places.into_iter();
        Moved(places.map(|thing| thing.map_or(NONE, |thing| self.insert(thing))).collect())
    }

    fn get(&self, slot: u32) -> &T {
        self.places[slot as usize].as_ref().expect("a slot in use")
    }

    fn get_mut(&mut self, slot: u32) -> &mut T {
        self.places[slot as usize].as_mut().expect("a slot in use")
    }
}

/// The new numbers by the old ones.
struct Moved(Vec<u32>);

impl Moved {
    /// Not every link leads somewhere.
    fn tell(&self, link: &mut u32) {
        if *link != NONE {
            *link = self.0[*link as usize];
        }
    }
}

/// So many places are kept, whatever is in them. Almost none in the tests of this file, which are to see many moves.
const KEPT: usize = if cfg!(test) { 4 } else { 4_096 };

/// Both ends of a list whose links are in the things themselves.
#[derive(Clone, Copy, Debug)]
struct Ends {
    head: u32,
    tail: u32,
}

const EMPTY: Ends = Ends { head: NONE, tail: NONE };

impl Ends {
    fn tell(&mut self, moved: &Moved) {
        moved.tell(&mut self.head);
        moved.tell(&mut self.tail);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sleeper {
    Group(u32),
    Loose(u32),
}

/// The state of one queue. See the head of this file.
#[derive(Debug)]
pub(in crate::source) struct Index {
    now: Millis,
    entries: Slab<Entry>,
    groups: Slab<Group>,
    by_fingerprint: Table<u32>,
    /// Messages that are out, and those that wait with the record of a lease that ran out.
    leases: Table<Lease>,
    /// Of the leases that are held.
    deadlines: BTreeSet<(Millis, Sequence)>,
    delayed: BTreeSet<(Millis, Sleeper)>,
    /// Groups that could go, whoever asks; and those that could go to one consumer only.
    ready: Ends,
    ready_only: BTreeMap<ConsumerId, Ends>,
    /// Messages without a group that could go.
    loose: Ends,
    /// Whether a loose message goes next, when there is a choice.
    loose_next: bool,
    tickets: u64,
    generations: u64,
    length: usize,
    out: usize,
    /// Counts of handing-outs that the file does not know yet.
    notes: BTreeMap<Sequence, u16>,
}

impl Index {
    pub(in crate::source) fn new() -> Self {
        Index {
            now: 0,
            entries: Slab::new(),
            groups: Slab::new(),
            by_fingerprint: Table::default(),
            leases: Table::default(),
            deadlines: BTreeSet::new(),
            delayed: BTreeSet::new(),
            ready: EMPTY,
            ready_only: BTreeMap::new(),
            loose: EMPTY,
            loose_next: false,
            tickets: 0,
            generations: 0,
            length: 0,
            out: 0,
            notes: BTreeMap::new(),
        }
    }

    /// How many messages it holds.
    pub(in crate::source) fn len(&self) -> usize {
        self.length
    }

    /// How many of them are out.
    pub(in crate::source) fn out(&self) -> usize {
        self.out
    }

    /// When something changes by itself.
    pub(in crate::source) fn next_event(&self) -> Option<Millis> {
        let delayed = self.delayed.first().map(|(due, _)| *due);
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        delayed.into_iter().chain(deadline).min()
    }

    /// Lets time pass: delays that are over, leases that have run out.
    pub(in crate::source) fn tick(&mut self, now: Millis) {
        self.now = self.now.max(now);
        while let Some(&(due, sleeper)) = self.delayed.first() {
            if due > self.now {
                break;
            }
            match sleeper {
                Sleeper::Group(group) => self.place(group),
                Sleeper::Loose(entry) => {
                    self.delayed.remove(&(due, sleeper));
                    self.join_loose(entry);
                }
            }
        }
        while let Some(&(deadline, sequence)) = self.deadlines.first() {
            if deadline > self.now {
                break;
            }
            self.expire(sequence, deadline);
        }
    }

    /// Adds a message behind all others of its group. Sequences only grow. Without a fingerprint it is loose.
    pub(in crate::source) fn append(
        &mut self,
        sequence: Sequence,
        fingerprint: Option<Fingerprint>,
        due: Millis,
        attempts: u16,
    ) {
        self.length += 1;
        let entry = Entry { sequence, due, previous: NONE, next: NONE, group: NONE, attempts, out: false };
        let entry = self.entries.insert(entry);
        match fingerprint {
            Some(fingerprint) => {
                let group = self.group_of(fingerprint);
                self.append_to_group(entry, group);
            }
            None => self.wait_loose(entry),
        }
    }

    /// Hands out up to so many messages.
    pub(in crate::source) fn claim(
        &mut self,
        consumer: ConsumerId,
        most: usize,
        lease: Millis,
        now: Millis,
    ) -> Vec<Claimed> {
        self.tick(now);
        let mut claimed = Vec::new();
        while claimed.len() < most {
            let Some(entry) = self.take(consumer) else { break };
            claimed.push(self.lease(entry, consumer, self.now.saturating_add(lease)));
        }
        claimed
    }

    /// Takes back what was handed out to a claim that nobody waits for any more: as if it had never been handed out.
    pub(in crate::source) fn unclaim(&mut self, claimed: &[Claimed]) {
        for claim in claimed.iter().rev() {
            let Some(lease) = self.leases.get(&claim.sequence) else { continue };
            if lease.generation != claim.generation {
                continue;
            }
            let (entry, deadline, stage) = (lease.entry, lease.deadline, lease.stage);
            match stage {
                Stage::Held => {
                    self.deadlines.remove(&(deadline, claim.sequence));
                    self.leases.remove(&claim.sequence);
                    self.come_back(entry);
                }
                Stage::Expired => self.forget_expired(claim.sequence),
                Stage::Ending | Stage::Returning => continue,
            }
            let entry = self.entries.get_mut(entry);
            entry.attempts = entry.attempts.saturating_sub(1);
        }
    }

    /// Takes back what a claim could not read, and what is behind it in its groups, as if it had never been handed out; what could not be read is not due before
    /// then, and so nothing of its group is. The answer is what was taken back.
    pub(in crate::source) fn put_back(
        &mut self,
        claimed: &[Claimed],
        unread: &[Sequence],
        until: Millis,
    ) -> BTreeSet<Sequence> {
        let (mut stopped, mut late, mut back) = (BTreeSet::new(), Vec::new(), Vec::new());
        for claim in claimed {
            let Some(lease) = self.leases.get(&claim.sequence) else { continue };
            if lease.generation != claim.generation {
                continue;
            }
            let (entry, group) = (lease.entry, self.entries.get(lease.entry).group);
            let is_unread = unread.contains(&claim.sequence);
            if is_unread {
                late.push(entry);
            }
            if is_unread && group != NONE {
                stopped.insert(group);
            }
            // A claim has the messages of a group in their order.
            if is_unread || stopped.contains(&group) {
                back.push(*claim);
            }
        }
        self.unclaim(&back);
        for entry in late {
            self.postpone(entry, until);
        }
        back.into_iter().map(|claim| claim.sequence).collect()
    }

    /// A message that waits is not due before then.
    fn postpone(&mut self, slot: u32, due: Millis) {
        let entry = self.entries.get(slot);
        if entry.out {
            return;
        }
        match entry.group {
            NONE => {
                self.stop_waiting_loose(slot);
                self.entries.get_mut(slot).due = due;
                self.wait_loose(slot);
            }
            group => {
                self.entries.get_mut(slot).due = due;
                self.place(group);
            }
        }
    }

    /// Says that the fate of a message is about to be written. False if the receipt is stale: then nothing has changed.
    pub(in crate::source) fn begin(
        &mut self,
        sequence: Sequence,
        generation: u64,
        intent: Intent,
        now: Millis,
    ) -> bool {
        self.tick(now);
        if !self.revive(sequence, generation) {
            return false;
        }
        let lease = self.leases.get_mut(&sequence).expect("just revived");
        self.deadlines.remove(&(lease.deadline, sequence));
        lease.stage = if intent == Intent::End { Stage::Ending } else { Stage::Returning };
        let entry = lease.entry;
        let group = self.entries.get(entry).group;
        if intent == Intent::Return && group != NONE {
            self.groups.get_mut(group).returning += 1;
            self.place(group);
        }
        true
    }

    /// It could not be written: the lease goes on as before.
    pub(in crate::source) fn abandon(&mut self, sequence: Sequence) {
        let Some(lease) = self.leases.get_mut(&sequence) else { return };
        let was = lease.stage;
        lease.stage = Stage::Held;
        let (entry, deadline) = (lease.entry, lease.deadline);
        self.deadlines.insert((deadline, sequence));
        if was == Stage::Returning {
            self.returned(entry);
        }
    }

    /// It is written: the message is gone.
    pub(in crate::source) fn end(&mut self, sequence: Sequence) {
        let lease = self.leases.remove(&sequence).expect("begun before it ends");
        debug_assert_eq!(lease.stage, Stage::Ending);
        self.notes.remove(&sequence);
        self.remove(lease.entry);
    }

    /// It is written: the message waits again, until it is due.
    pub(in crate::source) fn give_back(&mut self, sequence: Sequence, due: Millis) {
        let lease = self.leases.remove(&sequence).expect("begun before it comes back");
        debug_assert_eq!(lease.stage, Stage::Returning);
        self.notes.remove(&sequence);
        self.entries.get_mut(lease.entry).due = due;
        self.returned(lease.entry);
        self.come_back(lease.entry);
    }

    /// Renews a lease. False if the receipt is stale.
    pub(in crate::source) fn extend(
        &mut self,
        sequence: Sequence,
        generation: u64,
        lease: Millis,
        now: Millis,
    ) -> bool {
        self.tick(now);
        if !self.revive(sequence, generation) {
            return false;
        }
        let until = self.now.saturating_add(lease);
        let lease = self.leases.get_mut(&sequence).expect("just revived");
        self.deadlines.remove(&(lease.deadline, sequence));
        lease.deadline = until;
        self.deadlines.insert((until, sequence));
        true
    }

    /// How often a message was handed out.
    pub(in crate::source) fn attempts(&self, sequence: Sequence) -> u16 {
        self.leases.get(&sequence).map_or(0, |lease| self.entries.get(lease.entry).attempts)
    }

    /// Counts of handing-outs that are to be written with the next commit.
    pub(in crate::source) fn take_notes(&mut self) -> BTreeMap<Sequence, u16> {
        std::mem::take(&mut self.notes)
    }

    /// Counts of all that is out, for a store that is about to close.
    pub(in crate::source) fn note_all(&mut self) {
        let out = self.leases.iter().map(|(sequence, lease)| (*sequence, lease.entry));
        let notes =
            out.map(|(sequence, entry)| (sequence, self.entries.get(entry).attempts)).collect::<Vec<_>>();
        self.notes.extend(notes);
    }

    /// Forgets a message that the file does not have any more, although it was claimed.
    pub(in crate::source) fn vanish(&mut self, claim: Claimed) {
        if self.begin(claim.sequence, claim.generation, Intent::End, self.now) {
            self.end(claim.sequence);
        }
    }

    /// What a group does.
    pub(in crate::source) fn standing(&self, fingerprint: Fingerprint) -> Option<Standing> {
        self.by_fingerprint.get(&fingerprint).map(|slot| self.standing_at(*slot))
    }

    /// Whether a message is out.
    pub(super) fn is_out(&self, sequence: Sequence) -> bool {
        self.leases.get(&sequence).is_some_and(|lease| lease.stage != Stage::Expired)
    }

    /// The deepest of so many groups from a slot on, deepest first, and where to go on; nothing when that was all.
    pub(super) fn deepest(&self, from: u32, budget: usize, most: usize) -> (Vec<Standing>, Option<u32>) {
        let mut top: Vec<(u32, u32)> = Vec::with_capacity(most + 1);
        let places = self.groups.places.iter().enumerate().skip(from as usize);
        let slots = places.filter_map(|(slot, group)| Some((slot as u32, group.as_ref()?.length)));
        let mut last = None;
        for (place, (slot, depth)) in slots.take(budget).enumerate() {
            if top.len() < most || top.last().is_some_and(|last| depth > last.0) {
                let at = top.partition_point(|other| other.0 >= depth);
                top.insert(at, (depth, slot));
                top.truncate(most);
            }
            last = (place + 1 == budget).then_some(slot + 1);
        }
        (top.into_iter().map(|(_, slot)| self.standing_at(slot)).collect(), last)
    }

    /// How many groups have messages.
    pub(in crate::source) fn group_count(&self) -> usize {
        self.by_fingerprint.len()
    }

    fn standing_at(&self, slot: u32) -> Standing {
        let group = self.groups.get(slot);
        let out = group.out_before + group.out_behind;
        let state = match group.place {
            _ if group.out_behind > 0 || group.returning > 0 => GroupState::Recalling,
            Place::Delayed(due) => GroupState::Delayed { for_millis: due.saturating_sub(self.now) },
            Place::Only(_) | Place::Nowhere => GroupState::Leased,
            Place::Anybody => GroupState::Ready,
        };
        let head = self.entries.get(group.head).sequence;
        Standing { head, depth: group.length, out, state }
    }
}

/// Messages going out and coming back.
impl Index {
    /// Takes the next message that may go to this consumer.
    fn take(&mut self, consumer: ConsumerId) -> Option<u32> {
        let group = self.next_group(consumer);
        let loose = self.loose.head;
        if loose != NONE && (group.is_none() || self.loose_next) {
            self.loose_next = false;
            self.leave_loose(loose);
            self.entries.get_mut(loose).out = true;
            return Some(loose);
        }
        self.loose_next = true;
        group.map(|group| self.take_from_group(group, consumer))
    }

    /// The group that has been ready longest, of those for everybody and those for this consumer.
    fn next_group(&self, consumer: ConsumerId) -> Option<u32> {
        let only = self.ready_only.get(&consumer).map_or(NONE, |ends| ends.head);
        let heads = [self.ready.head, only].into_iter().filter(|group| *group != NONE);
        heads.min_by_key(|group| self.groups.get(*group).ticket)
    }

    fn take_from_group(&mut self, slot: u32, consumer: ConsumerId) -> u32 {
        self.leave(slot);
        let group = self.groups.get_mut(slot);
        let taken = group.first_waiting;
        group.holder = consumer;
        group.out_before += 1;
        let entry = self.entries.get_mut(taken);
        entry.out = true;
        self.groups.get_mut(slot).first_waiting = entry.next;
        self.forget_expired_of(slot, taken);
        self.place(slot);
        taken
    }

    fn lease(&mut self, slot: u32, consumer: ConsumerId, deadline: Millis) -> Claimed {
        self.out += 1;
        self.generations += 1;
        let generation = self.generations;
        let entry = self.entries.get_mut(slot);
        entry.attempts = entry.attempts.saturating_add(1);
        let (sequence, attempt) = (entry.sequence, u32::from(entry.attempts));
        let lease = Lease { entry: slot, consumer, generation, deadline, stage: Stage::Held };
        self.leases.insert(sequence, lease);
        self.deadlines.insert((deadline, sequence));
        Claimed { sequence, generation, attempt }
    }

    fn expire(&mut self, sequence: Sequence, deadline: Millis) {
        self.deadlines.remove(&(deadline, sequence));
        let lease = self.leases.get_mut(&sequence).expect("a deadline has its lease");
        lease.stage = Stage::Expired;
        let slot = lease.entry;
        let entry = self.entries.get(slot);
        self.notes.insert(sequence, entry.attempts);
        if entry.group != NONE {
            self.groups.get_mut(entry.group).expired += 1;
        }
        self.come_back(slot);
    }

    /// Whether the receipt is good; a lease that had run out is held again then.
    fn revive(&mut self, sequence: Sequence, generation: u64) -> bool {
        let Some(lease) = self.leases.get_mut(&sequence) else { return false };
        if lease.generation != generation {
            return false;
        }
        match lease.stage {
            Stage::Held => true,
            Stage::Ending | Stage::Returning => false,
            Stage::Expired => {
                lease.stage = Stage::Held;
                let (entry, consumer) = (lease.entry, lease.consumer);
                self.go_out_again(entry, consumer);
                true
            }
        }
    }

    /// A message that was out waits again.
    fn come_back(&mut self, slot: u32) {
        self.out -= 1;
        let entry = self.entries.get_mut(slot);
        debug_assert!(entry.out);
        entry.out = false;
        let (sequence, next, group_slot) = (entry.sequence, entry.next, entry.group);
        if group_slot == NONE {
            return self.wait_loose(slot);
        }
        let first = self.groups.get(group_slot).first_waiting;
        if first != NONE && self.entries.get(first).sequence < sequence {
            self.groups.get_mut(group_slot).out_behind -= 1;
        } else {
            // All from here to the first that waited until now are out, and are behind the first that waits from now on.
            let overtaken = self.distance(next, first);
            let group = self.groups.get_mut(group_slot);
            group.first_waiting = slot;
            group.out_before -= 1 + overtaken;
            group.out_behind += overtaken;
        }
        self.place(group_slot);
    }

    /// A message that waits, because its lease ran out, is its holder's again.
    fn go_out_again(&mut self, slot: u32, consumer: ConsumerId) {
        self.out += 1;
        let entry = self.entries.get(slot);
        let group_slot = entry.group;
        if group_slot == NONE {
            self.stop_waiting_loose(slot);
            self.entries.get_mut(slot).out = true;
            return;
        }
        self.entries.get_mut(slot).out = true;
        let group = self.groups.get_mut(group_slot);
        group.expired -= 1;
        group.holder = consumer;
        if group.first_waiting == slot {
            group.out_before += 1;
            self.advance(group_slot);
        } else {
            group.out_behind += 1;
        }
        self.place(group_slot);
    }

    /// The first that waited does so no longer: finds the next one, and counts what is passed on the way.
    fn advance(&mut self, group_slot: u32) {
        let mut slot = self.entries.get(self.groups.get(group_slot).first_waiting).next;
        let mut passed = 0;
        while slot != NONE && self.entries.get(slot).out {
            passed += 1;
            slot = self.entries.get(slot).next;
        }
        let group = self.groups.get_mut(group_slot);
        group.first_waiting = slot;
        group.out_before += passed;
        group.out_behind -= passed;
    }

    fn distance(&self, mut from: u32, to: u32) -> u32 {
        let mut steps = 0;
        while from != to {
            steps += 1;
            from = self.entries.get(from).next;
        }
        steps
    }

    fn returned(&mut self, slot: u32) {
        let group = self.entries.get(slot).group;
        if group != NONE {
            self.groups.get_mut(group).returning -= 1;
            self.place(group);
        }
    }

    /// Wipes the records of leases that ran out in this group: it moves on with `taken`.
    fn forget_expired_of(&mut self, group_slot: u32, taken: u32) {
        let mut slot = taken;
        while self.groups.get(group_slot).expired > 0 && slot != NONE {
            let entry = self.entries.get(slot);
            let (sequence, next) = (entry.sequence, entry.next);
            if self.leases.get(&sequence).is_some_and(|lease| lease.stage == Stage::Expired) {
                self.forget_expired(sequence);
            }
            slot = next;
        }
        debug_assert_eq!(self.groups.get(group_slot).expired, 0, "what has run out waits, and waits behind");
    }

    fn forget_expired(&mut self, sequence: Sequence) {
        let lease = self.leases.remove(&sequence).expect("a record to forget");
        let group = self.entries.get(lease.entry).group;
        if group != NONE {
            self.groups.get_mut(group).expired -= 1;
        }
    }

    /// Takes an entry that is out, out of everything.
    fn remove(&mut self, slot: u32) {
        self.length -= 1;
        self.out -= 1;
        let entry = self.entries.get(slot);
        debug_assert!(entry.out);
        if entry.group != NONE {
            self.remove_from_group(slot, entry.group);
        }
        self.entries.remove(slot);
        if self.entries.is_sparse() {
            self.pack_entries();
        }
        if self.groups.is_sparse() {
            self.pack_groups();
        }
    }

    fn pack_entries(&mut self) {
        let moved = self.entries.pack();
        for entry in self.entries.iter_mut() {
            moved.tell(&mut entry.previous);
            moved.tell(&mut entry.next);
        }
        for group in self.groups.iter_mut() {
            moved.tell(&mut group.head);
            moved.tell(&mut group.tail);
            moved.tell(&mut group.first_waiting);
        }
        self.leases.values_mut().for_each(|lease| moved.tell(&mut lease.entry));
        self.loose.tell(&moved);
        self.tell_sleepers(|sleeper| {
            if let Sleeper::Loose(entry) = sleeper {
                moved.tell(entry);
            }
        });
    }

    fn pack_groups(&mut self) {
        let moved = self.groups.pack();
        for group in self.groups.iter_mut() {
            // Only what is in a ready list has neighbours there.
            if matches!(group.place, Place::Anybody | Place::Only(_)) {
                moved.tell(&mut group.ready_previous);
                moved.tell(&mut group.ready_next);
            }
        }
        self.entries.iter_mut().for_each(|entry| moved.tell(&mut entry.group));
        self.by_fingerprint.values_mut().for_each(|group| moved.tell(group));
        self.by_fingerprint.shrink_to_fit();
        self.ready.tell(&moved);
        self.ready_only.values_mut().for_each(|ends| ends.tell(&moved));
        self.tell_sleepers(|sleeper| {
            if let Sleeper::Group(group) = sleeper {
                moved.tell(group);
            }
        });
    }

    fn tell_sleepers(&mut self, tell: impl Fn(&mut Sleeper)) {
        let delayed = std::mem::take(&mut self.delayed).into_iter();
        self.delayed = delayed
            .map(|(due, mut sleeper)| {
                tell(&mut sleeper);
                (due, sleeper)
            })
            .collect();
    }

    fn remove_from_group(&mut self, slot: u32, group_slot: u32) {
        let first = self.groups.get(group_slot).first_waiting;
        let entry = self.entries.get(slot);
        let (sequence, previous, next) = (entry.sequence, entry.previous, entry.next);
        let is_before = first == NONE || sequence < self.entries.get(first).sequence;
        let group = self.groups.get_mut(group_slot);
        match is_before {
            true => group.out_before -= 1,
            false => group.out_behind -= 1,
        }
        group.length -= 1;
        match previous {
            NONE => group.head = next,
            previous => self.entries.get_mut(previous).next = next,
        }
        match next {
            NONE => self.groups.get_mut(group_slot).tail = previous,
            next => self.entries.get_mut(next).previous = previous,
        }
        if self.groups.get(group_slot).length > 0 {
            return self.place(group_slot);
        }
        self.leave(group_slot);
        let group = self.groups.remove(group_slot);
        self.by_fingerprint.remove(&group.fingerprint);
    }
}

/// Groups and where they are found.
impl Index {
    fn group_of(&mut self, fingerprint: Fingerprint) -> u32 {
        if let Some(slot) = self.by_fingerprint.get(&fingerprint) {
            return *slot;
        }
        let slot = self.groups.insert(Group {
            fingerprint,
            head: NONE,
            tail: NONE,
            first_waiting: NONE,
            length: 0,
            out_before: 0,
            out_behind: 0,
            returning: 0,
            expired: 0,
            holder: 0,
            place: Place::Nowhere,
            ready_previous: NONE,
            ready_next: NONE,
            ticket: 0,
        });
        self.by_fingerprint.insert(fingerprint, slot);
        slot
    }

    fn append_to_group(&mut self, slot: u32, group_slot: u32) {
        let group = self.groups.get_mut(group_slot);
        let tail = group.tail;
        group.tail = slot;
        group.length += 1;
        let was_waiting = group.first_waiting != NONE;
        if !was_waiting {
            group.first_waiting = slot;
        }
        match tail {
            NONE => group.head = slot,
            tail => {
                let last = self.entries.get_mut(tail);
                debug_assert!(last.next == NONE);
                last.next = slot;
            }
        }
        let entry = self.entries.get_mut(slot);
        entry.previous = tail;
        entry.group = group_slot;
        if !was_waiting {
            self.place(group_slot);
        }
    }

    /// The rule, for a group: where it is to be found from now on.
    fn verdict(&self, group: &Group) -> Place {
        if group.first_waiting == NONE || group.out_behind > 0 || group.returning > 0 {
            return Place::Nowhere;
        }
        let due = self.entries.get(group.first_waiting).due;
        match group.out_before {
            _ if due > self.now => Place::Delayed(due),
            0 => Place::Anybody,
            _ => Place::Only(group.holder),
        }
    }

    /// Puts a group where the rule wants it.
    fn place(&mut self, slot: u32) {
        let group = self.groups.get(slot);
        let place = self.verdict(group);
        if place == group.place {
            return;
        }
        self.leave(slot);
        self.groups.get_mut(slot).place = place;
        match place {
            Place::Nowhere => {}
            Place::Delayed(due) => {
                self.delayed.insert((due, Sleeper::Group(slot)));
            }
            Place::Anybody | Place::Only(_) => self.join_ready(slot, place),
        }
    }

    fn leave(&mut self, slot: u32) {
        let place = std::mem::replace(&mut self.groups.get_mut(slot).place, Place::Nowhere);
        match place {
            Place::Nowhere => {}
            Place::Delayed(due) => {
                self.delayed.remove(&(due, Sleeper::Group(slot)));
            }
            Place::Anybody | Place::Only(_) => self.leave_ready(slot, place),
        }
    }

    fn ends_of(&mut self, place: Place) -> &mut Ends {
        match place {
            Place::Only(consumer) => self.ready_only.entry(consumer).or_insert(EMPTY),
            _ => &mut self.ready,
        }
    }

    fn join_ready(&mut self, slot: u32, place: Place) {
        self.tickets += 1;
        let ticket = self.tickets;
        let ends = self.ends_of(place);
        let tail = std::mem::replace(&mut ends.tail, slot);
        match tail {
            NONE => ends.head = slot,
            tail => self.groups.get_mut(tail).ready_next = slot,
        }
        let group = self.groups.get_mut(slot);
        (group.ready_previous, group.ready_next, group.ticket) = (tail, NONE, ticket);
    }

    fn leave_ready(&mut self, slot: u32, place: Place) {
        let group = self.groups.get(slot);
        let (previous, next) = (group.ready_previous, group.ready_next);
        match previous {
            NONE => self.ends_of(place).head = next,
            previous => self.groups.get_mut(previous).ready_next = next,
        }
        match next {
            NONE => self.ends_of(place).tail = previous,
            next => self.groups.get_mut(next).ready_previous = previous,
        }
        if let Place::Only(consumer) = place
            && self.ready_only.get(&consumer).is_some_and(|ends| ends.head == NONE)
        {
            self.ready_only.remove(&consumer);
        }
    }
}

/// Messages without a group.
impl Index {
    fn wait_loose(&mut self, slot: u32) {
        let due = self.entries.get(slot).due;
        if due > self.now {
            self.delayed.insert((due, Sleeper::Loose(slot)));
        } else {
            self.join_loose(slot);
        }
    }

    fn stop_waiting_loose(&mut self, slot: u32) {
        let due = self.entries.get(slot).due;
        if !self.delayed.remove(&(due, Sleeper::Loose(slot))) {
            self.leave_loose(slot);
        }
    }

    fn join_loose(&mut self, slot: u32) {
        let tail = std::mem::replace(&mut self.loose.tail, slot);
        match tail {
            NONE => self.loose.head = slot,
            tail => self.entries.get_mut(tail).next = slot,
        }
        let entry = self.entries.get_mut(slot);
        (entry.previous, entry.next) = (tail, NONE);
    }

    fn leave_loose(&mut self, slot: u32) {
        let entry = self.entries.get_mut(slot);
        let (previous, next) = (entry.previous, entry.next);
        (entry.previous, entry.next) = (NONE, NONE);
        match previous {
            NONE => self.loose.head = next,
            previous => self.entries.get_mut(previous).next = next,
        }
        match next {
            NONE => self.loose.tail = previous,
            next => self.entries.get_mut(next).previous = previous,
        }
    }
}

#[cfg(test)]
#[path = "index_model.rs"]
mod model;
