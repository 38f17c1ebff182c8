//! Where processors are found by the number that their tokens carry: one on its way then holds no reference that would have to be counted.
//!
//! A slot is given when a processor is registered and taken back when it is finished off. Nothing is in its mailbox then (`mail.rs`), so whoever
//! comes with the number of a slot finds the processor that was meant.

use std::sync::Arc;

use crate::sync::{RwLock, read, write};

/// Processors by slot.
pub(crate) struct Slots<T> {
    inner: RwLock<Inner<T>>,
}

struct Inner<T> {
    taken: Vec<Option<Arc<T>>>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Slots { inner: RwLock::new(Inner { taken: Vec::new(), free: Vec::new() }) }
    }
}

impl<T> Slots<T> {
    /// Gives a slot to what `make` makes of its number.
    pub(crate) fn insert(&self, make: impl FnOnce(u32) -> Arc<T>) -> Arc<T> {
        let mut inner = write(&self.inner);
        let slot = inner.free.pop().unwrap_or(inner.taken.len() as u32);
        let one = make(slot);
        match inner.taken.get_mut(slot as usize) {
            Some(place) => *place = Some(one.clone()),
            None => inner.taken.push(Some(one.clone())),
        }
        one
    }

    pub(crate) fn get(&self, slot: u32) -> Option<Arc<T>> {
        read(&self.inner).taken.get(slot as usize)?.clone()
    }

    /// Takes a slot back.
    pub(crate) fn remove(&self, slot: u32) {
        let mut inner = write(&self.inner);
        // Not there any more if the shutdown did not wait for who comes now.
        let gone = inner.taken.get_mut(slot as usize).and_then(Option::take);
        if gone.is_some() {
            inner.free.push(slot);
        }
        drop(inner);
        // Its drop, if we were the last to know it, is not under the lock.
        drop(gone);
    }

    /// Takes all slots back.
    pub(crate) fn clear(&self) {
        let mut inner = write(&self.inner);
        let gone = (std::mem::take(&mut inner.taken), std::mem::take(&mut inner.free));
        drop(inner);
        drop(gone);
    }
}
