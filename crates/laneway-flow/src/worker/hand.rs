//! What a worker has in hand: taken and not settled. Its bound is the worker's bound.
//!
//! The poller asks for room and puts tasks in; whoever settles takes them out, which wakes the poller. The heartbeat looks at all of them,
//! tells a handler whose task is no longer ours, and lets go of what takes too long.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::tally::Tally;
use crate::handler::Task;

/// What a worker has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// Tasks taken from queues.
    pub taken: u64,
    /// Tasks whose completion counted.
    pub completed: u64,
    /// Tasks whose failure counted, and that are tried again.
    pub retried: u64,
    /// Tasks whose failure counted, and that are not.
    pub failed: u64,
    /// Tasks that were no longer ours when they ended.
    pub ignored: u64,
    /// Tasks that were let go, because their handlers had not ended long after their timeouts, or had not begun.
    pub overdue: u64,
    /// Calls that took tasks, or found none.
    pub reads: u64,
    /// Calls that settled tasks.
    pub settles: u64,
    /// Tasks in hand now.
    pub in_hand: usize,
}

/// A task in hand.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) task: Arc<Task>,
    /// The place of its queue.
    pub(crate) queue: usize,
    pub(crate) progress: Arc<Progress>,
}

/// How far a task in hand has come; known to its slot and to the heartbeat.
pub(crate) struct Progress {
    /// Told when the task is no longer ours.
    pub(crate) lost: Notify,
    stage: Mutex<(Stage, Instant)>,
}

/// Where a task in hand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// In its lane, before its handler.
    Waits,
    /// In its handler.
    Runs,
    /// Its handler has ended, and the database is being told.
    Ended,
    /// We do not keep it any more, whatever its handler does.
    LetGo,
}

impl Progress {
    fn new() -> Self {
        Self { lost: Notify::new(), stage: Mutex::new((Stage::Waits, Instant::now())) }
    }

    fn stage(&self) -> MutexGuard<'_, (Stage, Instant)> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handler is about to begin. False: the task was let go before.
    pub(crate) fn begin(&self) -> bool {
        let mut stage = self.stage();
        if stage.0 == Stage::Waits {
            *stage = (Stage::Runs, Instant::now());
        }
        stage.0 == Stage::Runs
    }

    /// The handler has ended.
    pub(crate) fn end(&self) {
        let mut stage = self.stage();
        if stage.0 == Stage::Runs {
            *stage = (Stage::Ended, Instant::now());
        }
    }

    /// Where the task was if it has been there for longer than this; from now on we do not keep it. Nothing if it may stay, or was let go before.
    pub(crate) fn let_go_after(&self, limit: Duration) -> Option<Stage> {
        let mut stage = self.stage();
        let (was, since) = *stage;
        if was == Stage::LetGo || since.elapsed() <= limit {
            return None;
        }
        stage.0 = Stage::LetGo;
        Some(was)
    }

    pub(crate) fn is_let_go(&self) -> bool {
        self.stage().0 == Stage::LetGo
    }
}

#[derive(Default)]
struct Inside {
    held: HashMap<u64, Held>,
    per_queue: Vec<usize>,
    next: u64,
}

/// The counters of [`WorkerStats`], each written by one part.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) taken: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) retried: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) ignored: AtomicU64,
    pub(crate) overdue: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) settles: AtomicU64,
}

pub(crate) struct Hand {
    inside: Mutex<Inside>,
    /// Somebody left.
    room: Notify,
    /// The last one left.
    emptied: Notify,
    slots: usize,
    /// How many more than slots there may be while handlers are quick.
    ahead_max: usize,
    /// The mean time of a handler in nanoseconds, smoothed; 0 until one has ended.
    service: AtomicU64,
    pub(crate) counters: Counters,
    /// What is told to the database, of each queue.
    pub(crate) tallies: Vec<Tally>,
}

/// How far the hand reaches ahead of the slots: as many tasks as they will do in this time. Long enough to hide a call of the database,
/// short enough that another worker would not have begun them much earlier.
const AHEAD: Duration = Duration::from_millis(100);

impl Hand {
    pub(crate) fn new(queues: usize, slots: usize, batch_max: usize) -> Self {
        let inside = Inside { per_queue: vec![0; queues], ..Inside::default() };
        Self {
            inside: Mutex::new(inside),
            room: Notify::new(),
            emptied: Notify::new(),
            slots,
            ahead_max: 2 * batch_max,
            service: AtomicU64::new(0),
            counters: Counters::default(),
            tallies: (0..queues).map(|_| Tally::default()).collect(),
        }
    }

    /// The most that can ever be in hand.
    pub(crate) fn most(&self) -> usize {
        self.slots + self.ahead_max
    }

    /// How many may be in hand now.
    pub(crate) fn limit(&self) -> usize {
        let service = self.service.load(Relaxed);
        if service == 0 {
            return self.slots;
        }
        let ahead = self.slots as u128 * AHEAD.as_nanos() / u128::from(service);
        self.slots + usize::try_from(ahead).unwrap_or(usize::MAX).min(self.ahead_max)
    }

    /// Whether handlers are so quick that waiting a moment for more room costs nothing.
    pub(crate) fn is_quick(&self) -> bool {
        let service = self.service.load(Relaxed);
        service > 0 && u128::from(service) < AHEAD.as_nanos() / 10
    }

    /// A handler took so long.
    pub(crate) fn learn(&self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        let before = self.service.load(Relaxed);
        // Slots race here, and any of their results will do.
        let after = if before == 0 { took } else { before - before / 8 + took / 8 };
        self.service.store(after.max(1), Relaxed);
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Free places, and what each queue has in hand.
    pub(crate) fn free(&self) -> (usize, Vec<usize>) {
        let inside = self.inside();
        (self.limit().saturating_sub(inside.held.len()), inside.per_queue.clone())
    }

    pub(crate) fn free_places(&self) -> usize {
        let held = self.inside().held.len();
        self.limit().saturating_sub(held)
    }

    /// Puts a task in; the answer is its ticket, and what its slot and the heartbeat tell each other.
    pub(crate) fn put(&self, task: Arc<Task>, queue: usize) -> (u64, Arc<Progress>) {
        let progress = Arc::new(Progress::new());
        let mut inside = self.inside();
        let ticket = inside.next;
        inside.next += 1;
        inside.per_queue[queue] += 1;
        inside.held.insert(ticket, Held { task, queue, progress: progress.clone() });
        (ticket, progress)
    }

    /// Takes tasks out, and wakes the poller.
    pub(crate) fn remove(&self, tickets: impl IntoIterator<Item = u64>) {
        let mut inside = self.inside();
        for ticket in tickets {
            if let Some(held) = inside.held.remove(&ticket) {
                inside.per_queue[held.queue] -= 1;
            }
        }
        let is_empty = inside.held.is_empty();
        drop(inside);
        self.room.notify_one();
        if is_empty {
            self.emptied.notify_waiters();
        }
    }

    /// All tasks in hand.
    pub(crate) fn all(&self) -> Vec<Held> {
        self.inside().held.values().cloned().collect()
    }

    /// Everything, at the end.
    pub(crate) fn take_all(&self) -> Vec<Arc<Task>> {
        let mut inside = self.inside();
        inside.per_queue.fill(0);
        inside.held.drain().map(|(_, held)| held.task).collect()
    }

    /// Waits until somebody has left since the last time.
    pub(crate) async fn wait_room(&self) {
        self.room.notified().await;
    }

    /// Waits until nothing is in hand.
    pub(crate) async fn wait_empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.inside().held.is_empty() {
                return;
            }
            emptied.await;
        }
    }

    pub(crate) fn stats(&self) -> WorkerStats {
        let counters = &self.counters;
        WorkerStats {
            taken: counters.taken.load(Relaxed),
            completed: counters.completed.load(Relaxed),
            retried: counters.retried.load(Relaxed),
            failed: counters.failed.load(Relaxed),
            ignored: counters.ignored.load(Relaxed),
            overdue: counters.overdue.load(Relaxed),
            reads: counters.reads.load(Relaxed),
            settles: counters.settles.load(Relaxed),
            in_hand: self.inside().held.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hand_reaches_ahead_only_while_handlers_are_quick() {
        let hand = Hand::new(1, 10, 100);
        assert_eq!(hand.limit(), 10, "nothing is known yet");
        hand.learn(Duration::from_micros(10));
        assert_eq!(hand.limit(), 210);
        (0..100).for_each(|_| hand.learn(Duration::from_secs(1)));
        assert!(hand.limit() <= 12, "slow tasks are left to others: {}", hand.limit());
    }

    #[test]
    fn a_task_is_let_go_once_and_does_not_begin_afterwards() {
        let (waits, runs) = (Progress::new(), Progress::new());
        assert!(runs.begin());
        assert_eq!(runs.let_go_after(Duration::from_secs(60)), None, "it may stay");
        assert_eq!(runs.let_go_after(Duration::ZERO), Some(Stage::Runs));
        assert_eq!(runs.let_go_after(Duration::ZERO), None, "it was let go already");
        assert_eq!(waits.let_go_after(Duration::ZERO), Some(Stage::Waits));
        assert!(!waits.begin() && waits.is_let_go());
    }
}
