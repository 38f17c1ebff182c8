//! A dispatcher while the topology changes: both of its locks are held, everything is admitted, and lanes move out and in.
//!
//! `change.rs` of the engine decides which lanes go where. The epoch in ingress tells a submitter that chose by the old topology to choose again.

use super::{Dispatcher, Inner, admit_everything, operate::Seen};
use crate::{
    admission::Ingress,
    lane::Parcel,
    message::Item,
    stats::DispatcherStats,
    sync::{MutexGuard, ShortGuard, lock},
};

impl<K, M> Dispatcher<K, M> {
    /// Takes both locks for a change of the topology, with everything admitted.
    pub(crate) fn lock_for_change(&self) -> Locked<'_, K, M> {
        let mut inner = lock(&self.inner);
        let mut ingress = self.ingress();
        admit_everything(&mut inner, &mut ingress, self.hints());
        Locked { dispatcher: self, inner, ingress }
    }

    /// Takes in a lane whose turn has ended at the dispatcher that it comes from.
    pub(crate) fn receive(&self, parcel: Parcel<K, M>) {
        let mut locked = self.lock_for_change();
        locked.receive(parcel);
        let sleeper = locked.ingress.sleepers.take();
        drop(locked);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }

    pub(crate) fn arriving(&self) -> usize {
        lock(&self.inner).lanes.arriving()
    }
}

/// A dispatcher with both of its locks held.
pub(crate) struct Locked<'a, K, M> {
    dispatcher: &'a Dispatcher<K, M>,
    inner: MutexGuard<'a, Inner<K, M>>,
    ingress: ShortGuard<'a, Ingress<K, M>>,
}

impl<K, M> Locked<'_, K, M> {
    /// Puts the dispatcher under the new topology and takes out the lanes that live elsewhere now.
    pub(crate) fn move_out(
        &mut self,
        epoch: u64,
        here: usize,
        home: &mut dyn FnMut(u64, Option<&K>) -> usize,
    ) -> Vec<Parcel<K, M>> {
        self.ingress.epoch = epoch;
        let parcels = self.inner.lanes.move_out(here, home);
        self.ingress.accepted -= parcels.iter().map(Parcel::messages).sum::<u64>();
        self.note_accepted();
        parcels
    }

    pub(crate) fn receive(&mut self, parcel: Parcel<K, M>) {
        self.ingress.accepted += parcel.messages();
        self.note_accepted();
        self.inner.lanes.arrive(parcel);
    }

    /// Messages that are here.
    pub(crate) fn outstanding(&self) -> u64 {
        self.ingress.accepted - self.inner.released
    }

    /// Takes out whatever nobody has in hand, per key in its order. It stays outstanding in the account.
    pub(crate) fn give_back(&mut self, into: &mut Vec<Item<K, M>>) {
        self.inner.lanes.give_back(into);
    }

    pub(crate) fn stats(&self) -> DispatcherStats {
        self.dispatcher.stats_of(&self.inner, Seen::of(&self.ingress))
    }

    /// No submission will come here any more; those that still try have to place their message again.
    pub(crate) fn retire(&mut self) {
        self.ingress.retire();
    }

    fn note_accepted(&mut self) {
        self.ingress.released_seen = self.inner.released.min(self.ingress.accepted);
        self.dispatcher.note_accepted(&self.ingress);
    }
}
