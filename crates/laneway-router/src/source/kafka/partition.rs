//! One partition that is ours: what was read of it, what may be handed out, and what is finished.
//!
//! It puts three plain things together: the index of the embedded queue, which knows leases, delays and the order of groups; the bookkeeping of `offsets.rs`; and the
//! records themselves. `reader.rs` has one per partition, under its lock, and tells it the time.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::Arc;

use super::offsets::{Commit, Offsets, Reading, Skipped};
use crate::source::embedded::index::{Claimed, ConsumerId, Index, Intent, Millis};
use crate::source::{Delivery, DeliveryId, Disposal, Receipt};

/// Bits of a [`DeliveryId`] that are the offset; those above are the partition.
const OFFSET_BITS: u32 = 48;

/// What every record costs beside its bytes, about: what the bound on memory counts.
const RECORD_BYTES: usize = 128;

/// A record as it was read.
#[derive(Clone)]
pub(super) struct Record {
    /// The key, byte by byte, for the dead letters.
    pub(super) key: Option<Vec<u8>>,
    /// The key as a group.
    pub(super) group: Option<Arc<str>>,
    pub(super) text: Arc<[u8]>,
}

impl Record {
    pub(super) fn bytes(&self) -> usize {
        let key = self.key.as_ref().map_or(0, Vec::len);
        self.text.len() + key * 2 + RECORD_BYTES
    }
}

/// What is settled in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Named {
    pub(super) partition: i32,
    pub(super) tag: u64,
    pub(super) offset: i64,
    pub(super) generation: u64,
}

impl Named {
    /// What a receipt names, if it is one of ours.
    pub(super) fn by(receipt: &Receipt) -> Option<Named> {
        let Receipt::Numbers([tag, partition, offset, generation]) = *receipt else { return None };
        let (partition, offset) = (i32::try_from(partition).ok()?, i64::try_from(offset).ok()?);
        Some(Named { partition, tag, offset, generation })
    }

    fn receipt(&self) -> Receipt {
        let Named { partition, tag, offset, generation } = *self;
        Receipt::Numbers([tag, partition as u64, offset as u64, generation])
    }
}

pub(super) struct Partition {
    number: i32,
    /// Different for each time that the partition becomes ours, so that receipts from before are stale.
    pub(super) tag: u64,
    index: Index,
    pub(super) offsets: Offsets,
    records: HashMap<i64, Record>,
    /// Finished, and not in any commit that the broker has confirmed: by offset, with the generation that settled each.
    unconfirmed: BTreeMap<i64, u64>,
    bytes: usize,
    /// The consumer has been told to read no more of it.
    pub(super) paused: bool,
    /// It is about to become somebody else's: nothing more is handed out, and nothing begins that was.
    pub(super) leaving: bool,
    /// What the broker has confirmed last.
    confirmed: Option<Commit>,
    /// The most that was skipped at once since somebody looked whether the broker still has it.
    pub(super) skipped: Option<Skipped>,
}

impl Partition {
    pub(super) fn new(number: i32, commit: Option<&Commit>) -> Self {
        Partition {
            number,
            tag: fastrand::u64(..),
            index: Index::new(),
            offsets: commit.map_or_else(Offsets::new, Offsets::resume),
            records: HashMap::new(),
            unconfirmed: BTreeMap::new(),
            bytes: 0,
            paused: false,
            leaving: false,
            confirmed: commit.cloned(),
            skipped: None,
        }
    }

    /// Bytes of records that are here.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Records that are here, those included that are out.
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether nothing was finished since the last commit that the broker has confirmed.
    pub(super) fn is_all_confirmed(&self) -> bool {
        self.unconfirmed.is_empty()
    }

    /// Records that are claimed.
    pub(super) fn out(&self) -> usize {
        self.index.out()
    }

    /// A record has been read. Whether there is something new to claim.
    pub(super) fn arrive(&mut self, offset: i64, record: Record, hashing: &impl BuildHasher) -> bool {
        let skipped = self.offsets.skips(offset);
        self.skipped = self.skipped.into_iter().chain(skipped).max_by_key(|skipped| skipped.unfinished);
        match self.offsets.read(offset) {
            Reading::Finished => return false,
            Reading::New => {}
            Reading::Again => {
                // Somebody has turned the partition back, or the broker has lost its end: whatever we knew is void.
                *self = Partition { paused: self.paused, ..Partition::new(self.number, None) };
                self.offsets.read(offset);
            }
        }
        self.bytes += record.bytes();
        let fingerprint = record.group.as_deref().map(|group| hashing.hash_one(group));
        self.index.append(offset as u64, fingerprint, 0, 0);
        self.records.insert(offset, record);
        true
    }

    pub(super) fn claim(
        &mut self,
        consumer: ConsumerId,
        most: usize,
        lease: Millis,
        now: Millis,
    ) -> Vec<Delivery> {
        if self.leaving {
            return Vec::new();
        }
        let claimed = self.index.claim(consumer, most, lease, now);
        claimed.into_iter().map(|claimed| self.delivery(claimed)).collect()
    }

    fn delivery(&self, claimed: Claimed) -> Delivery {
        let offset = claimed.sequence as i64;
        let record = &self.records[&offset];
        let named = Named { partition: self.number, tag: self.tag, offset, generation: claimed.generation };
        let id = identity(self.number, offset);
        Delivery {
            id,
            receipt: named.receipt(),
            group: record.group.clone(),
            text: Arc::clone(&record.text),
            attempt: claimed.attempt,
            sequence: id,
        }
    }

    pub(super) fn next_event(&self) -> Option<Millis> {
        self.index.next_event().filter(|_| !self.leaving)
    }

    pub(super) fn extend(&mut self, named: Named, lease: Millis, now: Millis) -> bool {
        self.index.extend(named.offset as u64, named.generation, lease, now)
    }

    /// Begins to settle a delivery. Nothing if the receipt is stale.
    pub(super) fn begin(&mut self, named: Named, disposal: &Disposal, now: Millis) -> Option<Begun> {
        if self.unconfirmed.get(&named.offset) == Some(&named.generation) {
            return Some(Begun::Finished);
        }
        let sequence = named.offset as u64;
        let intent = match disposal {
            Disposal::GiveBack { .. } => Intent::Return,
            _ => Intent::End,
        };
        if !self.index.begin(sequence, named.generation, intent, now) {
            return None;
        }
        match disposal {
            Disposal::GiveBack { delay } => {
                self.index.give_back(sequence, now.saturating_add(delay.as_millis() as u64));
                Some(Begun::GivenBack)
            }
            Disposal::Done => {
                self.finish(named);
                Some(Begun::Finished)
            }
            Disposal::DeadLetter { .. } | Disposal::Quarantine { .. } => {
                Some(Begun::Letter(self.records[&named.offset].clone()))
            }
        }
    }

    /// What was begun is finished: its copy is among the dead letters.
    pub(super) fn finish(&mut self, named: Named) {
        self.index.end(named.offset as u64);
        self.offsets.finish(named.offset);
        if let Some(record) = self.records.remove(&named.offset) {
            self.bytes -= record.bytes();
        }
        self.unconfirmed.insert(named.offset, named.generation);
    }

    /// What was begun could not be done: the lease goes on.
    pub(super) fn abandon(&mut self, named: Named) {
        self.index.abandon(named.offset as u64);
    }

    /// What there is to commit that the broker has not confirmed.
    pub(super) fn to_commit(&self) -> Option<Commit> {
        self.offsets.commit().filter(|commit| self.confirmed.as_ref() != Some(commit))
    }

    /// Offsets that were finished when a commit was made.
    pub(super) fn finished_so_far(&self) -> Vec<i64> {
        self.unconfirmed.keys().copied().collect()
    }

    /// The broker has a commit.
    pub(super) fn confirm(&mut self, commit: Option<Commit>, finished: &[i64]) {
        self.unconfirmed.retain(|offset, _| finished.binary_search(offset).is_err());
        self.confirmed = commit.or(self.confirmed.take());
    }

    /// Whether the broker knows that this one is finished.
    pub(super) fn is_confirmed(&self, named: Named) -> bool {
        self.unconfirmed.get(&named.offset) != Some(&named.generation)
    }
}

/// What was begun.
pub(super) enum Begun {
    /// Back in its place.
    GivenBack,
    /// Finished, once the broker knows.
    Finished,
    /// To be copied first.
    Letter(Record),
}

/// The identity of a record in its topic. Grows within a partition, which is where a key is.
pub(super) fn identity(partition: i32, offset: i64) -> DeliveryId {
    (partition as u64) << OFFSET_BITS | (offset as u64 & ((1 << OFFSET_BITS) - 1))
}
