//! The one place that knows which locks we use: std's and a short one, or loom's when the models are checked.
//!
//! Everything above names its locks and atomics through this file, so `--cfg loom` turns the very code that users run into
//! the model. Nothing of ours panics under a lock, and what user code runs under one leaves nothing half changed (`docs/design/ordering.md` names it), so poisoning
//! carries no information and [`lock`] steps over it.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize},
};
#[cfg(loom)]
pub(crate) use loom::thread::yield_now;
#[cfg(not(loom))]
pub(crate) use short::{ShortGuard, ShortLock, lock_short, try_lock_short};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
    },
    thread::{Thread, current, park, yield_now},
};
#[cfg(loom)]
pub(crate) use token::{Thread, current, park};
#[cfg(loom)]
pub(crate) use {
    Mutex as ShortLock, MutexGuard as ShortGuard, lock as lock_short, try_lock as try_lock_short,
};

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

/// A lock that is taken for every message, and mostly held for some dozens of instructions.
///
/// Std's lock is given back with a second read-modify-write, to learn whether somebody sleeps for it. That one costs as much as the first, and both together
/// more than what a submitter does between them. For this one nobody waits to be woken: it is given back with a store, and who does not get it
/// looks again, at first at once, then after others have had its core, then after a nap, and so on from the beginning: a holder that has much to do, or whose core was taken
/// away, costs nobody more than a look now and then. Loom sees its own lock instead, which has the same contract.
#[cfg(not(loom))]
mod short {
    use std::time::Duration;

    pub(crate) type ShortLock<T> = spin::mutex::SpinMutex<T>;
    pub(crate) type ShortGuard<'a, T> = spin::mutex::SpinMutexGuard<'a, T>;

    /// Looks with ever more pauses between them, up to two to the power of this: together a few times as long as a push.
    const PAUSES: u32 = 7;

    /// Then so many looks between which others may have the core. (None of the three was tuned: they count only when a holder has lost its core.)
    const OFFERS: u32 = 16;

    /// Then a sleep, about the shortest that systems can do.
    const NAP: Duration = Duration::from_micros(50);

    /// Takes a lock.
    #[inline(always)]
    pub(crate) fn lock_short<T>(lock: &ShortLock<T>) -> ShortGuard<'_, T> {
        match lock.try_lock() {
            Some(guard) => guard,
            None => look_again(lock),
        }
    }

    /// Takes a lock if it is free at this moment.
    #[inline(always)]
    pub(crate) fn try_lock_short<T>(lock: &ShortLock<T>) -> Option<ShortGuard<'_, T>> {
        lock.try_lock()
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
            looks = (looks + 1) % (PAUSES + OFFERS + 1);
            // A look at a lock that is taken does not disturb its holder; an attempt does.
            if !lock.is_locked()
                && let Some(guard) = lock.try_lock()
            {
                return guard;
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Two holders that take their time, so that everybody else pauses, offers and naps.
        #[test]
        fn who_does_not_get_it_at_once_gets_it_later_and_alone() {
            let lock = ShortLock::new((0_u64, 0_u64));
            std::thread::scope(|scope| {
                for worker in 0..4 {
                    let lock = &lock;
                    scope.spawn(move || {
                        for round in 0..500 {
                            let mut both = lock_short(lock);
                            both.0 += 1;
                            if worker < 2 && round % 50 == 0 {
                                std::thread::sleep(NAP * 4); // paced: what is tested is a holder that sleeps
                            }
                            both.1 += 1;
                            assert_eq!(both.0, both.1, "two had it at once");
                        }
                    });
                }
            });
            assert_eq!(*lock_short(&lock), (2_000, 2_000));
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
