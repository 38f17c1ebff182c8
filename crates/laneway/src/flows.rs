//! Mappings: which dispatcher a key has been given, for as long as that matters.
//!
//! Kept only when the placement looks at the load, or when flows are tracked. Between a submitter, which raises `outstanding` before it
//! offers its message, and the worker that settles it, which lowers it afterwards, the mapping cannot go; so all outstanding messages of a key are on one
//! dispatcher. That is all the protocol there is, and it holds whatever order starts, events and finishes come in.
//!
//! # The life of a flow
//!
//! Its first message makes the mapping. A finish marks it; what comes after that is *late*: counted, and still in the same lane behind the
//! rest. When the last outstanding message of a finished flow is settled the mapping goes and leaves a tombstone, one of a bounded number, so that an
//! event that comes later still counts as late and does not open a flow that nobody will finish. A start opens a new
//! flow of the same key at any time. A flow that is never finished goes by its time-to-live, once nothing of it is outstanding.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use crate::{
    clock::nanos,
    lane::ByFingerprint,
    message::Kind,
    sync::{Mutex, MutexGuard, Padded, lock},
};

/// How flows are tracked.
///
/// ```
/// use laneway::Flows;
/// use std::time::Duration;
/// let flows = Flows { time_to_live: Duration::from_secs(60), ..Flows::default() };
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flows {
    /// A flow that has had no message for this long is released, if nothing of it is outstanding. (If something is, it is looked at again after the same time.)
    pub time_to_live: Duration,
    /// No more flows than this are remembered while idle; beyond it those that have been idle longest are released early. (Keys are kept in 64 parts. Each
    /// message looks at the part of its own key, and releases the longest idle flow there.)
    pub max: usize,
}

impl Default for Flows {
    /// Ten minutes, a million flows.
    fn default() -> Self {
        Flows { time_to_live: Duration::from_secs(600), max: 1_000_000 }
    }
}

/// Enough that submitters rarely meet; each is a small map.
const SHARDS: usize = 64;

/// Bits 47 to 52: those from there up are not all of the hash (`message.rs`).
fn shard_of(fingerprint: u64) -> usize {
    (fingerprint >> 47) as usize % SHARDS
}

/// Finished flows that are remembered, per shard.
const TOMBSTONES: usize = 256;

/// Memory for so many mappings is kept, per shard: for as many keys in all as there are messages by default (65,536), so that an engine that idles between bursts does not grow again with each.
const PLACES_KEPT: usize = 2_048;

#[derive(Debug)]
struct Mapping {
    dispatcher: usize,
    outstanding: u32,
    /// How many messages were ever placed by it and not refused.
    messages: u64,
    /// The number of the last control message among them, from 1.
    controls: u64,
    /// A finish has been accepted.
    finished: bool,
    /// It was made by a late event, so nobody will finish it.
    late: bool,
    /// When it last had a message, or was last seen with one outstanding.
    touched: u64,
    /// Tells its note from those of earlier mappings of the same key.
    stamp: u64,
}

#[derive(Debug, Default)]
struct Shard {
    mappings: ByFingerprint<Mapping>,
    /// Since when mappings have been idle, as it was when that was noted: one note per mapping, and at most as many again of
    /// mappings that are gone. None has been idle for longer than its note says, so the first whose note is still true is the one that has been idle longest.
    notes: BinaryHeap<Reverse<Note>>,
    stamp: u64,
    tombstones: VecDeque<u64>,
    /// What the queue above holds, to be found.
    buried: ByFingerprint<()>,
    /// Which topology the mappings speak of.
    epoch: u64,
    /// Control messages that were refused when another one stood behind them already: the stamp of their mapping, their number, and what was before them.
    undone: VecDeque<(u64, u64, (bool, bool))>,
}

/// So many of those are remembered; it takes that many submitters that cross each other at one moment to forget one that matters.
const UNDONE_MAX: usize = 64;

/// Compared by time; of two at the same time the older mapping is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Note {
    since: u64,
    stamp: u64,
    fingerprint: u64,
}

/// The mappings of an engine.
#[derive(Debug)]
pub(crate) struct Mappings {
    shards: Vec<Padded<Mutex<Shard>>>,
    flows: Option<Flows>,
    /// How many there are, over all shards.
    count: AtomicUsize,
    late: AtomicU64,
    expired: AtomicU64,
}

/// Where a message goes.
#[derive(Debug)]
pub(crate) enum Placing {
    /// There, with what has to be undone if it is refused.
    At(usize, Option<Placed>),
    /// The topology has changed since the submitter looked.
    Stale,
    /// The placement knows no place for it.
    Nowhere,
}

/// What `place` did, so that it can be undone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    kind: Kind,
    /// Which control message of its mapping it is, if it is one.
    control: u64,
    /// Whether the flow was finished before, and by a late event.
    before: (bool, bool),
    late: bool,
}

impl Mappings {
    pub(crate) fn new(flows: Option<Flows>) -> Self {
        let shards = (0..SHARDS).map(|_| Padded(Mutex::new(Shard::default()))).collect();
        let (late, expired) = (AtomicU64::new(0), AtomicU64::new(0));
        Mappings { shards, flows, count: AtomicUsize::new(0), late, expired }
    }

    fn shard(&self, fingerprint: u64) -> MutexGuard<'_, Shard> {
        lock(&self.shards[shard_of(fingerprint)])
    }

    /// Finds or makes the mapping of a key and counts one more outstanding. `choose` is asked for a new one.
    pub(crate) fn place(
        &self,
        fingerprint: u64,
        kind: Kind,
        epoch: u64,
        now: u64,
        choose: impl FnOnce() -> Option<usize>,
        made: impl FnOnce(usize),
    ) -> Placing {
        let mut shard = self.shard(fingerprint);
        let shard = &mut *shard;
        if shard.epoch != epoch {
            return Placing::Stale;
        }
        let buried = shard.buried.contains_key(&fingerprint);
        let known = shard.mappings.contains_key(&fingerprint);
        if !known {
            let Some(dispatcher) = choose() else { return Placing::Nowhere };
            made(dispatcher);
            let late = buried && kind == Kind::Event;
            shard.stamp += 1;
            let stamp = shard.stamp;
            let mapping = Mapping {
                dispatcher,
                outstanding: 0,
                messages: 0,
                controls: 0,
                finished: late,
                late,
                touched: now,
                stamp,
            };
            shard.mappings.insert(fingerprint, mapping);
            self.count.fetch_add(1, Relaxed);
            if self.flows.is_some() {
                shard.note(now, fingerprint, stamp);
            }
        }
        let mapping = shard.mappings.get_mut(&fingerprint).expect("found or made");
        mapping.outstanding += 1;
        mapping.messages += 1;
        mapping.controls += u64::from(kind.is_control());
        mapping.touched = now;
        let before = (mapping.finished, mapping.late);
        let late = mapping.finished && kind == Kind::Event;
        match kind {
            Kind::Event => {}
            Kind::Start => (mapping.finished, mapping.late) = (false, false),
            Kind::Finish => mapping.finished = true,
        }
        if late {
            self.late.fetch_add(1, Relaxed);
        }
        Placing::At(mapping.dispatcher, Some(Placed { kind, control: mapping.controls, before, late }))
    }

    /// The message was refused after all.
    pub(crate) fn undo(&self, fingerprint: u64, placed: Placed, gone: impl FnOnce(usize)) {
        let mut shard = self.shard(fingerprint);
        if let Some(mapping) = shard.mappings.get_mut(&fingerprint) {
            mapping.messages -= 1;
        }
        if placed.kind.is_control() {
            shard.undo_control(fingerprint, placed.control, placed.before);
        }
        if placed.late {
            self.late.fetch_sub(1, Relaxed);
        }
        self.lower(&mut shard, fingerprint, 1, gone);
    }

    /// These many messages of a key have been settled or dropped.
    pub(crate) fn release(&self, fingerprint: u64, messages: u32, gone: impl FnOnce(usize)) {
        let mut shard = self.shard(fingerprint);
        self.lower(&mut shard, fingerprint, messages, gone);
    }

    fn lower(&self, shard: &mut Shard, fingerprint: u64, messages: u32, gone: impl FnOnce(usize)) {
        let Some(mapping) = shard.mappings.get_mut(&fingerprint) else { return };
        mapping.outstanding -= messages;
        // A flow of which nothing was ever accepted was never there.
        let open = self.flows.is_some() && !mapping.finished && mapping.messages > 0;
        if mapping.outstanding > 0 || open {
            return;
        }
        let mapping = self.forget(shard, fingerprint);
        gone(mapping.dispatcher);
        if self.flows.is_some() && mapping.finished {
            shard.bury(fingerprint);
        }
    }

    /// Takes a mapping away, and the memory that many have left.
    fn forget(&self, shard: &mut Shard, fingerprint: u64) -> Mapping {
        let mapping = shard.mappings.remove(&fingerprint).expect("just seen");
        self.count.fetch_sub(1, Relaxed);
        shard.shrink();
        mapping
    }

    /// Where a key with a mapping lives.
    pub(crate) fn find(&self, fingerprint: u64) -> Option<usize> {
        self.shard(fingerprint).mappings.get(&fingerprint).map(|mapping| mapping.dispatcher)
    }

    /// Releases flows whose time is over, two per call at the most in the shard of this key, so that the work is spread.
    pub(crate) fn expire_some(&self, fingerprint: u64, now: u64, gone: impl FnMut(usize)) {
        if let Some(flows) = &self.flows {
            let mut shard = self.shard(fingerprint);
            self.expire(&mut shard, flows, now, 2, gone);
        }
    }

    /// Releases all flows whose time is over, and says how many mappings are left.
    pub(crate) fn expire_all(&self, now: u64, mut gone: impl FnMut(usize)) -> usize {
        let mut left = 0;
        for shard in &self.shards {
            let mut shard = lock(shard);
            if let Some(flows) = &self.flows {
                self.expire(&mut shard, flows, now, usize::MAX, &mut gone);
            }
            left += shard.mappings.len();
        }
        left
    }

    fn expire(&self, shard: &mut Shard, flows: &Flows, now: u64, most: usize, mut gone: impl FnMut(usize)) {
        let ttl = nanos(flows.time_to_live);
        let looks = most.min(shard.notes.len());
        for _ in 0..looks {
            let too_many = self.count.load(Relaxed) > flows.max;
            let Some(&Reverse(Note { since, stamp, fingerprint })) = shard.notes.peek() else { return };
            if since.saturating_add(ttl) > now && !too_many {
                return;
            }
            shard.notes.pop();
            let mapping = shard.mappings.get_mut(&fingerprint).filter(|mapping| mapping.stamp == stamp);
            let Some(mapping) = mapping else { continue };
            if mapping.outstanding > 0 {
                mapping.touched = now;
            }
            let touched = mapping.touched;
            if mapping.outstanding > 0 || touched > since {
                // It is not idle, or has not been for as long as was noted.
                shard.note(touched, fingerprint, stamp);
                continue;
            }
            gone(self.forget(shard, fingerprint).dispatcher);
            // It was open: if an earlier flow of the key has finished, that is not what comes next is late for.
            shard.unbury(fingerprint);
            self.expired.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn late(&self) -> u64 {
        self.late.load(Relaxed)
    }

    pub(crate) fn expired(&self) -> u64 {
        self.expired.load(Relaxed)
    }

    /// Holds all mappings still while the topology changes.
    pub(crate) fn lock_for_change(&self) -> LockedMappings<'_> {
        LockedMappings(self.shards.iter().map(|shard| lock(shard)).collect())
    }
}

impl Shard {
    /// A control message was refused. If it was the last one, its word is taken back, and with it the words of those in front of it that were refused before.
    fn undo_control(&mut self, fingerprint: u64, control: u64, before: (bool, bool)) {
        let Some(mapping) = self.mappings.get_mut(&fingerprint) else { return };
        if mapping.controls != control {
            // Another submitter's came later, and has the last word unless it is refused, too.
            if self.undone.len() == UNDONE_MAX {
                self.undone.pop_front();
            }
            return self.undone.push_back((mapping.stamp, control, before));
        }
        let (mut first, mut was) = (control, before);
        let is_next =
            |&(stamp, earlier, _): &(u64, u64, _), first: u64| stamp == mapping.stamp && earlier + 1 == first;
        while let Some(at) = self.undone.iter().position(|undone| is_next(undone, first)) {
            (first, was) = (first - 1, self.undone.remove(at).expect("just found").2);
        }
        mapping.controls = first - 1;
        (mapping.finished, mapping.late) = was;
    }

    /// Notes since when a mapping has been idle, and forgets the notes of those that are gone when they are more than the others.
    fn note(&mut self, since: u64, fingerprint: u64, stamp: u64) {
        self.notes.push(Reverse(Note { since, stamp, fingerprint }));
        if self.notes.len() > 2 * self.mappings.len() + 64 {
            self.forget_notes();
        }
    }

    /// Keeps only the notes of mappings that are there.
    fn forget_notes(&mut self) {
        let current = |Reverse(note): &Reverse<Note>| {
            self.mappings.get(&note.fingerprint).is_some_and(|m| m.stamp == note.stamp)
        };
        self.notes.retain(current);
    }

    /// Gives memory back of which hardly any is needed, half of what is kept being spare: so it is as many again that come or go before the next time.
    fn shrink(&mut self) {
        let (needed, kept) = (self.mappings.len(), self.mappings.capacity());
        if kept > PLACES_KEPT && kept / 8 >= needed {
            self.forget_notes();
            self.mappings.shrink_to((2 * needed).max(PLACES_KEPT / 2));
            self.notes.shrink_to((2 * needed).max(PLACES_KEPT / 2));
        }
    }

    fn bury(&mut self, fingerprint: u64) {
        if self.buried.insert(fingerprint, ()).is_some() {
            return;
        }
        self.tombstones.push_back(fingerprint);
        if self.tombstones.len() > TOMBSTONES
            && let Some(oldest) = self.tombstones.pop_front()
        {
            self.buried.remove(&oldest);
        }
    }

    fn unbury(&mut self, fingerprint: u64) {
        if self.buried.remove(&fingerprint).is_some() {
            self.tombstones.retain(|buried| *buried != fingerprint);
        }
    }
}

/// All shards, locked.
pub(crate) struct LockedMappings<'a>(Vec<MutexGuard<'a, Shard>>);

impl LockedMappings<'_> {
    /// Gives each mapping its dispatcher in the new topology; one for which there is none goes.
    pub(crate) fn rehome(&mut self, epoch: u64, mut home: impl FnMut(u64, usize) -> Option<usize>) {
        for shard in &mut self.0 {
            shard.epoch = epoch;
            shard.mappings.retain(|&fingerprint, mapping| match home(fingerprint, mapping.dispatcher) {
                Some(dispatcher) => {
                    mapping.dispatcher = dispatcher;
                    true
                }
                None => false,
            });
        }
    }

    /// How many keys each dispatcher has now.
    pub(crate) fn count_by_dispatcher(&self, dispatchers: usize) -> Vec<usize> {
        let mut counts = vec![0; dispatchers];
        for mapping in self.0.iter().flat_map(|shard| shard.mappings.values()) {
            counts[mapping.dispatcher] += 1;
        }
        counts
    }

    pub(crate) fn find(&self, fingerprint: u64) -> Option<usize> {
        let shard = &self.0[shard_of(fingerprint)];
        shard.mappings.get(&fingerprint).map(|mapping| mapping.dispatcher)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EARLIER: u64 = 1;
    const LATER: u64 = 2;

    fn place(mappings: &Mappings, fingerprint: u64, kind: Kind, now: u64) {
        let placing = mappings.place(fingerprint, kind, 0, now, || Some(0), |_| ());
        assert!(matches!(placing, Placing::At(0, Some(_))));
        mappings.release(fingerprint, 1, |_| ());
    }

    #[test]
    fn pitfall_000_2_what_is_left_of_an_earlier_flow_does_not_concern_the_next_of_its_key() {
        let mappings = Mappings::new(Some(Flows { time_to_live: Duration::from_secs(1), max: 1 }));
        // Both keys are in one shard. The first has had a flow before, and its note is the oldest there.
        place(&mappings, LATER, Kind::Start, 0);
        place(&mappings, LATER, Kind::Finish, 1);
        place(&mappings, EARLIER, Kind::Start, 2);
        place(&mappings, LATER, Kind::Start, 3);
        assert_eq!(mappings.expire_all(4, |_| ()), 1, "one too many");
        assert_eq!(mappings.find(EARLIER), None, "the one that has been idle longest went");
        assert_eq!(mappings.find(LATER), Some(0), "and not the new flow of a key that had one before");
    }

    #[test]
    fn pitfall_000_2_a_flow_that_was_opened_again_and_forgotten_is_not_the_one_that_had_finished() {
        let mappings = Mappings::new(Some(Flows { time_to_live: Duration::from_nanos(10), max: 8 }));
        place(&mappings, 1, Kind::Finish, 0);
        place(&mappings, 1, Kind::Event, 1);
        assert_eq!(mappings.late(), 1, "its tombstone is there");
        place(&mappings, 1, Kind::Start, 2);
        assert_eq!(mappings.expire_all(20, |_| ()), 0, "nobody has finished the new one");
        place(&mappings, 1, Kind::Event, 21);
        assert_eq!((mappings.late(), mappings.find(1)), (1, Some(0)), "it opens another one");
        // A tombstone that was taken away and dug again is there once.
        for key in 0..TOMBSTONES as u64 {
            place(&mappings, 100 + key, Kind::Finish, 22);
            let shard = mappings.shard(1);
            assert_eq!(shard.tombstones.len(), shard.buried.len());
        }
    }

    #[test]
    fn pitfall_000_3_beyond_the_cap_the_flow_that_has_been_idle_longest_goes_and_none_that_is_busy() {
        for time_to_live in [Duration::from_secs(1), Duration::MAX] {
            let mappings = Mappings::new(Some(Flows { time_to_live, max: 2 }));
            // All keys are in one shard. The oldest has a message again, the next one has one outstanding.
            place(&mappings, 1, Kind::Start, 0);
            mappings.place(2, Kind::Start, 0, 1, || Some(0), |_| ());
            place(&mappings, 3, Kind::Start, 2);
            place(&mappings, 4, Kind::Start, 3);
            place(&mappings, 1, Kind::Event, 4);
            assert_eq!(mappings.expire_all(5, |_| ()), 2, "as many as it may remember");
            let left = [1, 2, 3, 4].map(|key| mappings.find(key).is_some());
            assert_eq!(left, [true, true, false, false], "one was used last, and one is busy");
            mappings.release(2, 1, |_| ());
            place(&mappings, 1, Kind::Event, 6);
            place(&mappings, 5, Kind::Start, 7);
            assert_eq!(mappings.expire_all(8, |_| ()), 2);
            let left = [1, 2, 5].map(|key| mappings.find(key).is_some());
            assert_eq!(left, [true, false, true], "now that nothing of it is outstanding it may go");
        }
    }

    #[test]
    fn memory_follows_the_flows_that_are_there() {
        let mappings = Mappings::new(Some(Flows::default()));
        // All keys are in one shard.
        (0..100_000).for_each(|key| place(&mappings, key, Kind::Start, 0));
        (0..99_990).for_each(|key| place(&mappings, key, Kind::Finish, 1));
        let shard = mappings.shard(0);
        assert_eq!(shard.mappings.len(), 10);
        let kept = [shard.mappings.capacity(), shard.notes.capacity(), shard.notes.len()];
        assert!(kept.iter().all(|places| *places <= PLACES_KEPT), "{kept:?}");
        drop(shard);
        assert!((99_990..100_000).all(|key| mappings.find(key).is_some()));
    }

    /// Two looks per message are all there are, and those that are busy must not take them all.
    #[test]
    fn flows_that_stay_busy_keep_none_that_is_idle_beyond_the_cap() {
        let mappings = Mappings::new(Some(Flows { time_to_live: Duration::from_secs(1), max: 8 }));
        for key in 0..4 {
            mappings.place(key, Kind::Start, 0, 0, || Some(0), |_| ());
        }
        for key in 4..1_000 {
            mappings.expire_some(key, key, |_| ());
            place(&mappings, key, Kind::Start, key);
            assert!(mappings.count.load(Relaxed) <= 12, "at {key}");
        }
        assert!((0..4).all(|key| mappings.find(key).is_some()));
    }

    #[test]
    fn pitfall_000_8_a_refused_start_does_not_undo_another_that_was_accepted_meanwhile() {
        let mappings = Mappings::new(Some(Flows { time_to_live: Duration::from_secs(1), max: 9 }));
        let placed = |kind| match mappings.place(1, kind, 0, 0, || Some(0), |_| ()) {
            Placing::At(0, Some(placed)) => placed,
            elsewhere => panic!("{elsewhere:?}"),
        };
        placed(Kind::Finish);
        let (refused, _accepted) = (placed(Kind::Start), placed(Kind::Start));
        mappings.undo(1, refused, |_| ());
        placed(Kind::Event);
        assert_eq!(mappings.late(), 0, "the flow that the other one opened goes on");
        // The other way round the first state comes back.
        placed(Kind::Finish);
        let (first, second) = (placed(Kind::Start), placed(Kind::Start));
        mappings.undo(1, second, |_| ());
        mappings.undo(1, first, |_| ());
        placed(Kind::Event);
        assert_eq!(mappings.late(), 1, "it is finished, as before");
        // And in the order in which they came.
        let (first, second) = (placed(Kind::Start), placed(Kind::Start));
        mappings.undo(1, first, |_| ());
        mappings.undo(1, second, |_| ());
        placed(Kind::Event);
        assert_eq!(mappings.late(), 2, "both were refused");
        // One that comes between two refusals is not undone by the second.
        let (first, second) = (placed(Kind::Start), placed(Kind::Start));
        mappings.undo(1, first, |_| ());
        placed(Kind::Finish);
        mappings.undo(1, second, |_| ());
        placed(Kind::Event);
        assert_eq!(mappings.late(), 3, "the finish was accepted");
    }
}
