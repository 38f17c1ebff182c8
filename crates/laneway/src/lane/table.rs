//! The lanes of a dispatcher by fingerprint.
//!
//! Only the place of a lane is in the table, which has its fingerprint: so an entry takes four bytes and a control byte, where a map from one to the other takes sixteen. Who looks for a
//! lane that is there wants to see it anyway; one that is not there is mostly known from the control byte.

use hashbrown::HashTable;

use super::Lane;

#[derive(Debug)]
pub(super) struct Table(HashTable<u32>);

impl Table {
    pub(super) fn new() -> Self {
        Table(HashTable::new())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// For how many there is memory.
    pub(super) fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// The place of the lane with this fingerprint. Fingerprints are hashes already.
    #[inline]
    pub(super) fn find<K>(&self, fingerprint: u64, lanes: &[Lane<K>]) -> Option<u32> {
        self.0.find(fingerprint, |id| lanes[*id as usize].fingerprint == fingerprint).copied()
    }

    /// Enters a lane that is in its place and not in the table.
    pub(super) fn insert<K>(&mut self, id: u32, lanes: &[Lane<K>]) {
        let fingerprint = |id: &u32| lanes[*id as usize].fingerprint;
        self.0.insert_unique(fingerprint(&id), id, fingerprint);
    }

    pub(super) fn remove(&mut self, fingerprint: u64, id: u32) {
        let entry = self.0.find_entry(fingerprint, |other| *other == id);
        entry.expect("a lane that goes is in the table").remove();
    }

    /// The places of all lanes, in no order.
    pub(super) fn ids(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }
}
