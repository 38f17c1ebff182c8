//! Who is registered under which id. `events.rs` puts processors in and takes them out; it is closed once, by the shutdown.
//!
//! The protocol of registration against shutdown is that of one lock: whoever registers looks, under it, whether it is closed; whoever
//! shuts down closes it under the same lock and takes everybody out afterwards. So a registration either is refused, or is found
//! by the shutdown. No user code runs under the lock. `tests/loom_registry.rs` runs the two against each other.

use std::{collections::HashMap, sync::Arc};

use foldhash::fast::RandomState;

use crate::sync::{RwLock, read, write};

/// Why nobody was put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotInserted {
    /// Somebody has that id.
    Taken,
    /// It is closed.
    Closed,
}

/// Everybody, by id.
#[derive(Debug)]
pub struct Registry<T> {
    inner: RwLock<Inner<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    by_id: HashMap<Arc<str>, Arc<T>, RandomState>,
    closed: bool,
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Registry { inner: RwLock::new(Inner { by_id: HashMap::default(), closed: false }) }
    }
}

impl<T> Registry<T> {
    /// Puts somebody in, if `first` goes well: it is called under the lock, before anybody can find the new one.
    pub fn insert<X: From<NotInserted>>(
        &self,
        id: &Arc<str>,
        one: &Arc<T>,
        first: impl FnOnce() -> Result<(), X>,
    ) -> Result<(), X> {
        let mut inner = write(&self.inner);
        if inner.closed {
            return Err(NotInserted::Closed.into());
        }
        if inner.by_id.contains_key(id) {
            return Err(NotInserted::Taken.into());
        }
        first()?;
        inner.by_id.insert(id.clone(), one.clone());
        Ok(())
    }

    /// Who has this id.
    pub fn get(&self, id: &str) -> Option<Arc<T>> {
        read(&self.inner).by_id.get(id).cloned()
    }

    /// Takes somebody out, unless another has the id by now.
    pub fn remove(&self, id: &str, one: &Arc<T>) {
        let mut inner = write(&self.inner);
        let is_the_one = inner.by_id.get(id).is_some_and(|known| Arc::ptr_eq(known, one));
        let gone = if is_the_one { inner.by_id.remove(id) } else { None };
        drop(inner);
        // Its drop, if we were the last to know it, is not under the lock.
        drop(gone);
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        read(&self.inner).by_id.len()
    }

    /// Everybody's ids, in no particular order.
    pub fn ids(&self) -> Vec<Arc<str>> {
        read(&self.inner).by_id.keys().cloned().collect()
    }

    /// From now on nobody is put in.
    pub fn close(&self) {
        write(&self.inner).closed = true;
    }

    /// Takes everybody out.
    pub fn take_all(&self) -> Vec<Arc<T>> {
        std::mem::take(&mut write(&self.inner).by_id).into_values().collect()
    }
}
