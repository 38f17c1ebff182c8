//! The one place that knows which locks we use: std's and a short one, or loom's when the models are checked.
//!
//! Everything above names its locks and atomics through this file, so `--cfg loom` turns the very code that users run into
//! the model. Nothing of ours panics under a lock and no user code runs under one, so poisoning carries no information
//! and [`lock`] steps over it.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize},
};
#[cfg(not(loom))]
pub(crate) use short::{ShortGuard, ShortLock, lock_short};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
    },
    thread::{Thread, current, park},
};
#[cfg(loom)]
pub(crate) use token::{Thread, current, park};
#[cfg(loom)]
pub(crate) use {Mutex as ShortLock, MutexGuard as ShortGuard, lock as lock_short};

use std::{sync::PoisonError, time::Duration};

/// Takes a lock, poisoned or not.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a lock if it is free at this moment.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(std::sync::TryLockError::WouldBlock) => None,
    }
}

/// Sleeps until a token arrives or the time is over. Loom knows no time, so there it waits for the token alone.
pub(crate) fn park_for(limit: Option<Duration>) {
    #[cfg(not(loom))]
    if let Some(limit) = limit {
        return std::thread::park_timeout(limit);
    }
    #[cfg(loom)]
    let _ = limit;
    park();
}

/// Waits on a condition for at most `limit`. Under loom the limit never passes.
pub(crate) fn wait_for<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    limit: Option<Duration>,
) -> MutexGuard<'a, T> {
    #[cfg(not(loom))]
    if let Some(limit) = limit {
        return condition.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner).0;
    }
    #[cfg(loom)]
    let _ = limit;
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Keeps what it holds on cache lines of its own, so that submitters and workers do not fight over a line that only one
/// of them uses. 128 bytes: two lines, because x86 prefetches them in pairs.
#[repr(align(128))]
#[derive(Debug, Default)]
pub(crate) struct Padded<T>(pub(crate) T);

impl<T> std::ops::Deref for Padded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// A lock that is held for some dozens of instructions, and taken for every message.
///
/// Std's lock gives way with a second read-modify-write, to learn whether somebody sleeps for it. That one costs as much as the first, and both together
/// more than what a submitter does between them. Nobody sleeps for this one: it is given way with a store, and who does not get it
/// looks again, at first at once, then after others have had its core, then after short sleeps, so that a holder whose core was taken away costs nobody more than a look now and then.
#[cfg(not(loom))]
mod short {
    use std::time::Duration;

    pub(crate) type ShortLock<T> = spin::mutex::SpinMutex<T>;
    pub(crate) type ShortGuard<'a, T> = spin::mutex::SpinMutexGuard<'a, T>;

    /// Looks with ever more pauses between them, up to two to the power of this: about as long as the lock is held by somebody who has much to do.
    const PAUSES: u32 = 7;

    /// Then so many looks between which others may have the core.
    const OFFERS: u32 = 16;

    /// Then looks with sleeps between them.
    const NAP: Duration = Duration::from_micros(50);

    /// Takes a lock.
    #[inline(always)]
    pub(crate) fn lock_short<T>(lock: &ShortLock<T>) -> ShortGuard<'_, T> {
        match lock.try_lock() {
            Some(guard) => guard,
            None => look_again(lock),
        }
    }

    #[cold]
    fn look_again<T>(lock: &ShortLock<T>) -> ShortGuard<'_, T> {
        let mut looks = 0;
        loop {
            match looks {
                0..PAUSES => (0..1 << looks).for_each(|_| std::hint::spin_loop()),
                _ if looks < PAUSES + OFFERS => std::thread::yield_now(),
                _ => std::thread::sleep(NAP),
            }
            looks = (looks + 1).min(PAUSES + OFFERS);
            // A look at a lock that is taken does not disturb its holder; an attempt does.
            if !lock.is_locked()
                && let Some(guard) = lock.try_lock()
            {
                return guard;
            }
        }
    }
}

/// Parking under loom. Its own `park` forgets a token that comes while the thread waits for a lock, which std's does not; so
/// the token is a loom `Notify` here, one per thread. It also wakes without a reason once, as std's may.
#[cfg(loom)]
mod token {
    use std::sync::Arc;

    use loom::sync::Notify;

    #[derive(Clone, Debug)]
    pub(crate) struct Thread(Arc<Notify>);

    loom::thread_local! {
        static TOKEN: Thread = Thread(Arc::new(Notify::new()));
    }

    impl Thread {
        pub(crate) fn unpark(&self) {
            self.0.notify();
        }
    }

    pub(crate) fn current() -> Thread {
        TOKEN.with(Thread::clone)
    }

    pub(crate) fn park() {
        current().0.wait();
    }
}
