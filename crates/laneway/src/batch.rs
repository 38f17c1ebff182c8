//! Many messages at once: sorted by dispatcher without a lock, then handed over in pieces, each under one lock.
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
//! batch goes by itself, because somebody has to look at its key. A task that must not block its thread submits all of its messages one by one, so that it can wait between any two of them.
//!
//! # What a change of the topology does to a batch
//!
//! The first bin that is handed over afterwards learns of it. Everything that was sorted for the old layout goes to where it belongs now, message by message, and before
//! anything that is sorted for the new one: of a key, what is older goes first.

use std::{
    hash::Hash,
    sync::{Arc, atomic::Ordering},
};

use crate::{
    admission::{Admission, BatchReport},
    dispatcher::Dispatcher,
    engine::{Patience, Shared},
    error::{Refusal, Refused},
    lane::ByFingerprint,
    message::{CHUNK, Item, Kind, Message, Packed, Priority},
    placement::ByHash,
    sync::{Padded, ShortLock, lock_short},
};

/// How many sets of bins are kept. More submitters than this at the same time, and some allocate.
const SETS_KEPT: usize = 4;

/// A set that has grown larger than this is not kept: bodies are large, and what it costs to allocate is nothing beside them.
const BYTES_KEPT: usize = 256 * 1_024;

/// Messages of a batch that go to one dispatcher, in order.
#[derive(Debug)]
pub(crate) struct Bin<K, M> {
    pub(crate) packed: Vec<Packed<K, M>>,
    /// Whether the first of them is the last in `packed`. A dispatcher that is full takes them one at a time, and each must not move all the others.
    pub(crate) reversed: bool,
    /// Whether there is one whose priority is not the normal one.
    pub(crate) urgent: bool,
}

impl<K, M> Bin<K, M> {
    fn new() -> Self {
        Bin { packed: Vec::new(), reversed: false, urgent: false }
    }

    #[inline(always)]
    fn push(&mut self, fingerprint: u64, message: Message<K, M>) {
        self.urgent |= message.priority != Priority::Normal;
        self.packed.push(Packed::pack(Item { fingerprint, accepted_at: 0, message }));
    }

    /// The next message by itself.
    fn pop(&mut self) -> Option<Packed<K, M>> {
        if !self.reversed {
            self.packed.reverse();
            self.reversed = true;
        }
        self.packed.pop()
    }

    /// Their kinds, in order.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = Kind> {
        let all = self.packed.len();
        (0..all).map(move |place| self.packed[if self.reversed { all - 1 - place } else { place }].kind())
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

/// Empty bins, for the next batch. Every submitter of batches comes by twice, and its neighbours in memory are read by all.
#[derive(Debug)]
pub(crate) struct SpareBins<K, M>(Padded<ShortLock<Vec<Bins<K, M>>>>);

impl<K, M> Default for SpareBins<K, M> {
    fn default() -> Self {
        SpareBins(Padded(ShortLock::new(Vec::new())))
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
    /// How long each message may wait.
    patience: Patience<'static>,
}

impl<K, M> Progress<K, M> {
    fn new(patience: Patience<'static>) -> Self {
        Progress { report: BatchReport::default(), refused: ByFingerprint::default(), patience }
    }

    /// Once a message of a key is refused, its successors are, too.
    fn note(&mut self, fingerprint: u64, result: Result<Admission, Refused<K, M>>) {
        match result {
            Ok(Admission::Accepted) => self.report.accepted += 1,
            Ok(Admission::Dropped) => self.report.dropped += 1,
            Err(refusal) => {
                self.refused.insert(fingerprint, ());
                self.report.refused.push(refusal);
            }
        }
    }
}

impl<K: Hash, M> Shared<K, M> {
    pub(crate) fn submit_batch(
        &self,
        mut messages: impl Iterator<Item = Message<K, M>>,
        patience: Patience<'static>,
    ) -> BatchReport<K, M> {
        let mut progress = Progress::new(patience);
        // Once more for every change of the layout in the middle of it.
        while let Some(mut set) = self.bins() {
            let ended = self.sort(&mut messages, &mut set, &mut progress);
            for (bin, dispatcher) in set.bins.iter_mut().zip(&set.dispatchers) {
                set.stale |= !self.hand_over(bin, dispatcher, set.epoch, &mut progress);
            }
            self.spare_bins.give_back(set);
            if ended {
                return progress.report;
            }
        }
        messages.for_each(|message| self.submit_next(self.arrive(message), &mut progress));
        progress.report
    }

    /// Sorts messages and hands over the bins that are full, until there are no more, or the layout is another one. Says whether there are no more.
    #[inline(always)]
    fn sort(
        &self,
        messages: &mut impl Iterator<Item = Message<K, M>>,
        set: &mut Bins<K, M>,
        progress: &mut Progress<K, M>,
    ) -> bool {
        for message in messages {
            let fingerprint = self.fingerprint(&message.key);
            let place = ByHash::index(fingerprint, set.bins.len());
            let bin = &mut set.bins[place];
            bin.push(fingerprint, message);
            if bin.packed.len() >= CHUNK && !self.hand_over(bin, &set.dispatchers[place], set.epoch, progress)
            {
                set.stale = true;
                return false;
            }
        }
        true
    }

    /// Where a batch can be sorted now, if every message need not be looked at by itself.
    #[inline(always)]
    fn bins(&self) -> Option<Bins<K, M>> {
        let by_place = self.direct && self.by_hash;
        if !by_place || self.engine_bound.is_counting() || self.closed.load(Ordering::Acquire) {
            return None;
        }
        Some(self.spare_bins.lend().unwrap_or_else(|| self.new_bins()))
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
                match dispatcher.offer_batch(bin, epoch, &self.engine_bound, &self.clock) {
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
            for _ in 0..singly {
                if let Some(packed) = bin.pop() {
                    self.submit_next(packed.unpack(0), progress);
                }
            }
        }
        (bin.reversed, bin.urgent) = (false, false);
        current
    }

    /// The next message by itself.
    fn submit_next(&self, arrival: Item<K, M>, progress: &mut Progress<K, M>) {
        let fingerprint = arrival.fingerprint;
        let result = if progress.refused.contains_key(&fingerprint) {
            self.refuse(arrival, Refusal::AfterRefused, None)
        } else {
            self.submit_arrival(arrival, progress.patience)
        };
        progress.note(fingerprint, result);
    }

    /// The same as a task does it.
    #[cfg(feature = "tokio")]
    pub(crate) async fn submit_batch_async(
        &self,
        messages: impl Iterator<Item = Message<K, M>>,
    ) -> BatchReport<K, M> {
        let mut progress = Progress::new(Patience::Policy);
        for message in messages {
            let arrival = self.arrive(message);
            let fingerprint = arrival.fingerprint;
            let result = if progress.refused.contains_key(&fingerprint) {
                self.refuse(arrival, Refusal::AfterRefused, None)
            } else {
                self.submit_async(arrival).await
            };
            progress.note(fingerprint, result);
        }
        progress.report
    }
}
