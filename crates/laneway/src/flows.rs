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
    collections::VecDeque,
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
    /// A flow that has had no message for this long is released, if nothing of it is outstanding.
    pub time_to_live: Duration,
    /// No more flows than this are remembered while idle; beyond it the one that has been idle longest is released early.
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

/// Finished flows that are remembered, per shard.
const TOMBSTONES: usize = 256;

#[derive(Debug)]
struct Mapping {
    dispatcher: usize,
    outstanding: u32,
    /// How many messages were ever placed by it and not refused.
    messages: u64,
    /// A finish has been accepted.
    finished: bool,
    /// It was made by a late event, so nobody will finish it.
    late: bool,
    touched: u64,
    /// Tells its entry among the expiries from those of earlier mappings of the same key.
    stamp: u64,
}

#[derive(Debug, Default)]
struct Shard {
    mappings: ByFingerprint<Mapping>,
    /// Which mapping to look at next for its time-to-live, and when: one entry per mapping, and at most as many again of
    /// mappings that are gone.
    expiries: VecDeque<Expiry>,
    stamp: u64,
    tombstones: VecDeque<u64>,
    /// What the queue above holds, to be found.
    buried: ByFingerprint<()>,
    /// Which topology the mappings speak of.
    epoch: u64,
}

#[derive(Clone, Copy, Debug)]
struct Expiry {
    due: u64,
    fingerprint: u64,
    stamp: u64,
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
        lock(&self.shards[(fingerprint >> 48) as usize % SHARDS])
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
                finished: late,
                late,
                touched: now,
                stamp,
            };
            shard.mappings.insert(fingerprint, mapping);
            self.count.fetch_add(1, Relaxed);
            if let Some(flows) = &self.flows {
                shard.expect(now.saturating_add(nanos(flows.time_to_live)), fingerprint, stamp);
            }
        }
        let mapping = shard.mappings.get_mut(&fingerprint).expect("found or made");
        mapping.outstanding += 1;
        mapping.messages += 1;
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
        Placing::At(mapping.dispatcher, Some(Placed { kind, before, late }))
    }

    /// The message was refused after all.
    pub(crate) fn undo(&self, fingerprint: u64, placed: Placed, gone: impl FnOnce(usize)) {
        let mut shard = self.shard(fingerprint);
        if let Some(mapping) = shard.mappings.get_mut(&fingerprint) {
            mapping.messages -= 1;
            if placed.kind.is_control() {
                (mapping.finished, mapping.late) = placed.before;
            }
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
        let mapping = shard.mappings.remove(&fingerprint).expect("just seen");
        self.count.fetch_sub(1, Relaxed);
        gone(mapping.dispatcher);
        if self.flows.is_some() && mapping.finished {
            shard.bury(fingerprint);
        }
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
        let looks = most.min(shard.expiries.len());
        for _ in 0..looks {
            let too_many = self.count.load(Relaxed) > flows.max;
            let Some(&Expiry { due, fingerprint, stamp }) = shard.expiries.front() else { return };
            if due > now && !too_many {
                return;
            }
            shard.expiries.pop_front();
            let mapping = shard.mappings.get(&fingerprint).filter(|mapping| mapping.stamp == stamp);
            let Some(mapping) = mapping else { continue };
            let due = mapping.touched.saturating_add(ttl);
            if mapping.outstanding > 0 || (due > now && !too_many) {
                shard.expect(due.max(now.saturating_add(1)), fingerprint, stamp);
                continue;
            }
            let mapping = shard.mappings.remove(&fingerprint).expect("just seen");
            self.count.fetch_sub(1, Relaxed);
            gone(mapping.dispatcher);
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
    /// Notes when to look at a mapping, and forgets the notes of those that are gone when they are more than the others.
    fn expect(&mut self, due: u64, fingerprint: u64, stamp: u64) {
        self.expiries.push_back(Expiry { due, fingerprint, stamp });
        if self.expiries.len() > 2 * self.mappings.len() + 64 {
            let current =
                |note: &Expiry| self.mappings.get(&note.fingerprint).is_some_and(|m| m.stamp == note.stamp);
            self.expiries.retain(current);
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
        let shard = &self.0[(fingerprint >> 48) as usize % SHARDS];
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
}
