//! Many messages at once: sorted by dispatcher without a lock, then handed over under one lock for all that go to the same.
//!
//! A batch is what a submitter has at hand, and may be of any length. Its messages are packed as they will travel ([`Packed`]) while they are sorted into
//! bins, one for each dispatcher; a bin that is full is handed over before the next message is asked for. So a batch of a million takes no more memory than
//! one of a few hundred, workers begin before it has ended, and the submitter's iterator never runs under a lock of ours.
//!
//! Bins are lent and given back: a submitter of batches allocates nothing in its steady state.
//!
//! # What a full dispatcher does to a batch
//!
//! The message for which there is no room goes the way of a single one, by the policy of the bound that it meets, and may wait there. Once it is in, the rest of
//! its bin is handed over as before. If it is refused, so are all later messages of its key (contract 6), and from then on every message of the
//! batch goes by itself, because somebody has to look at its key.

use std::{
    hash::Hash,
    sync::{Arc, atomic::Ordering},
};

use crate::{
    admission::{Admission, BatchReport},
    dispatcher::Dispatcher,
    engine::{Patience, Shared},
    error::Refusal,
    lane::ByFingerprint,
    message::{CHUNK, Item, Message, Packed, Priority},
    placement::ByHash,
    sync::{ShortLock, lock_short},
};

/// How many sets of bins are kept. More submitters than this at the same time, and some allocate.
const SETS_KEPT: usize = 4;

/// A set that has grown larger than this is not kept: bodies are large, and what it costs to allocate is nothing beside them.
const BYTES_KEPT: usize = 256 * 1_024;

/// Messages of a batch that go to one dispatcher, in order.
#[derive(Debug)]
pub(crate) struct Bin<K, M> {
    pub(crate) packed: Vec<Packed<K, M>>,
    /// Whether there is one whose priority is not the normal one.
    pub(crate) urgent: bool,
}

impl<K, M> Bin<K, M> {
    fn new() -> Self {
        Bin { packed: Vec::new(), urgent: false }
    }

    #[inline(always)]
    fn push(&mut self, fingerprint: u64, message: Message<K, M>) {
        self.urgent |= message.priority != Priority::Normal;
        self.packed.push(Packed::pack(Item { fingerprint, accepted_at: 0, message }));
    }
}

/// A bin for each dispatcher of a layout. They remember it themselves: to ask what it is costs more than a small batch does, and ingress knows whether it is still the current one.
#[derive(Debug)]
struct Bins<K, M> {
    epoch: u64,
    /// Whether ingress said that it is not.
    stale: bool,
    dispatchers: Vec<Arc<Dispatcher<K, M>>>,
    bins: Vec<Bin<K, M>>,
}

impl<K, M> Bins<K, M> {
    fn is_worth_keeping(&self) -> bool {
        let places: usize = self.bins.iter().map(|bin| bin.packed.capacity()).sum();
        !self.stale && places * size_of::<Packed<K, M>>() <= BYTES_KEPT
    }
}

/// Empty bins, for the next batch.
#[derive(Debug)]
pub(crate) struct SpareBins<K, M>(ShortLock<Vec<Bins<K, M>>>);

impl<K, M> Default for SpareBins<K, M> {
    fn default() -> Self {
        SpareBins(ShortLock::new(Vec::new()))
    }
}

impl<K, M> SpareBins<K, M> {
    fn lend(&self) -> Option<Bins<K, M>> {
        lock_short(&self.0).pop()
    }

    fn give_back(&self, bins: Bins<K, M>) {
        debug_assert!(bins.bins.iter().all(|bin| bin.packed.is_empty()), "what is in them would be lost");
        if !bins.is_worth_keeping() {
            return;
        }
        let mut sets = lock_short(&self.0);
        if sets.len() < SETS_KEPT {
            sets.push(bins);
        }
    }
}

/// What has become of a batch so far.
struct Progress<K, M> {
    report: BatchReport<K, M>,
    /// The keys of which one was refused.
    refused: ByFingerprint<()>,
}

impl<K: Hash, M> Shared<K, M> {
    pub(crate) fn submit_batch(&self, messages: impl Iterator<Item = Message<K, M>>) -> BatchReport<K, M> {
        let mut progress = Progress { report: BatchReport::default(), refused: ByFingerprint::default() };
        if !self.direct
            || !self.by_hash
            || self.engine_bound.is_counting()
            || self.closed.load(Ordering::Acquire)
        {
            messages.for_each(|message| self.submit_next(self.arrive(message), &mut progress));
            return progress.report;
        }
        let mut set = self.spare_bins.lend().unwrap_or_else(|| self.new_bins());
        for message in messages {
            let fingerprint = self.fingerprint(&message.key);
            let place = ByHash::index(fingerprint, set.bins.len());
            let bin = &mut set.bins[place];
            bin.push(fingerprint, message);
            if bin.packed.len() >= CHUNK {
                set.stale |= !self.hand_over(bin, &set.dispatchers[place], set.epoch, &mut progress);
            }
        }
        for (bin, dispatcher) in set.bins.iter_mut().zip(&set.dispatchers) {
            set.stale |= !self.hand_over(bin, dispatcher, set.epoch, &mut progress);
        }
        self.spare_bins.give_back(set);
        progress.report
    }

    fn new_bins(&self) -> Bins<K, M> {
        let layout = self.layout.load();
        let dispatchers = layout.dispatchers.clone();
        let bins = dispatchers.iter().map(|_| Bin::new()).collect();
        Bins { epoch: layout.epoch, stale: false, dispatchers, bins }
    }

    /// Empties a bin into its dispatcher, or, where it is not the right one any more, to wherever each message belongs. Says whether it was.
    fn hand_over(
        &self,
        bin: &mut Bin<K, M>,
        dispatcher: &Dispatcher<K, M>,
        epoch: u64,
        progress: &mut Progress<K, M>,
    ) -> bool {
        let mut current = true;
        while !bin.packed.is_empty() {
            let mut singly = bin.packed.len();
            if current && progress.refused.is_empty() {
                match dispatcher.offer_batch(bin, epoch, &self.clock) {
                    Some((taken, wake)) => {
                        progress.report.accepted += taken;
                        if let Some(sleeper) = wake {
                            sleeper.wake();
                        }
                        singly = bin.packed.len().min(1);
                    }
                    None => current = false,
                }
            }
            for packed in bin.packed.drain(..singly) {
                self.submit_next(packed.unpack(0), progress);
            }
        }
        bin.urgent = false;
        current
    }

    /// The next message by itself. Once one of a key is refused, its successors are too.
    fn submit_next(&self, arrival: Item<K, M>, progress: &mut Progress<K, M>) {
        let fingerprint = arrival.fingerprint;
        let result = if progress.refused.contains_key(&fingerprint) {
            self.refuse(arrival, Refusal::AfterRefused, None)
        } else {
            self.submit_arrival(arrival, Patience::Policy)
        };
        match result {
            Ok(Admission::Accepted) => progress.report.accepted += 1,
            Ok(Admission::Dropped) => progress.report.dropped += 1,
            Err(refusal) => {
                progress.refused.insert(fingerprint, ());
                progress.report.refused.push(refusal);
            }
        }
    }
}
