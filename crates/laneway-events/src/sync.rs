//! The one place that knows which locks we use: std's, or loom's when the models are checked. Nothing of ours panics under a lock and no
//! user code runs under one, so poisoning carries no information and is stepped over.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic::AtomicU64,
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic::AtomicU64,
};

use std::{sync::PoisonError, time::Instant};

/// Takes a lock, poisoned or not.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a lock to read, poisoned or not.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a lock to write, poisoned or not.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on a condition until it is announced, or until then. Loom knows no time: there the time never comes.
pub(crate) fn wait_until<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    until: Option<Instant>,
) -> MutexGuard<'a, T> {
    #[cfg(not(loom))]
    if let Some(until) = until {
        let left = until.saturating_duration_since(Instant::now());
        return condition.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    #[cfg(loom)]
    let _ = until;
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
