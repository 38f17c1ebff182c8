//! Virtual time, and how async handlers sleep in it.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    task::{Poll, Wake, Waker},
    time::Duration,
};

use crate::clock::nanos;

/// The time of a simulation. Cheap to clone; handlers may keep one.
///
/// It passes only when nobody can move, and then to the moment when somebody can again.
#[derive(Clone, Debug, Default)]
pub struct Time {
    now: Arc<AtomicU64>,
    sleepers: Arc<Mutex<Sleepers>>,
}

#[derive(Debug, Default)]
struct Sleepers {
    /// By due time and order of registration.
    by_due: BTreeMap<(u64, u64), Waker>,
    registered: u64,
}

impl Time {
    /// Begins at zero.
    pub fn new() -> Self {
        Time::default()
    }

    /// What time it is, since the beginning.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.in_nanos())
    }

    /// Sleeps in this time.
    pub async fn sleep(&self, duration: Duration) {
        let due = self.in_nanos().saturating_add(nanos(duration));
        poll_fn(|context| {
            if self.in_nanos() >= due {
                return Poll::Ready(());
            }
            let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            sleepers.registered += 1;
            let place = (due, sleepers.registered);
            sleepers.by_due.insert(place, context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    pub(crate) fn nanos(&self) -> Arc<AtomicU64> {
        self.now.clone()
    }

    pub(crate) fn in_nanos(&self) -> u64 {
        self.now.load(SeqCst)
    }

    pub(crate) fn next_due(&self) -> Option<u64> {
        let sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        sleepers.by_due.keys().next().map(|(due, _)| *due)
    }

    /// Lets time pass, and wakes whoever slept until then.
    pub(crate) fn advance_to(&self, when: u64) {
        self.now.store(when.max(self.in_nanos()), SeqCst);
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        let later = sleepers.by_due.split_off(&(self.in_nanos() + 1, 0));
        let due = std::mem::replace(&mut sleepers.by_due, later);
        drop(sleepers);
        due.into_values().for_each(Waker::wake);
    }
}

/// A waker that only says that it was woken.
#[derive(Debug)]
pub(crate) struct Flag(AtomicBool);

#[cfg_attr(not(feature = "tokio"), expect(dead_code, reason = "only async handlers are polled"))]
impl Flag {
    pub(crate) fn raised() -> Self {
        Flag(AtomicBool::new(true))
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(SeqCst)
    }

    pub(crate) fn lower(&self) {
        self.0.store(false, SeqCst);
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}
