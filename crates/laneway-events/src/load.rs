//! What a dispatcher has to do: how many events are in the mailboxes of its processors, at most `dispatcher-capacity`, and what has become of those before.
//!
//! The engine below counts tokens, one for a mailbox with something in it; these are the events. `processor.rs` takes a place for each, a thread
//! gives the places of a turn back at its end, after it has counted what came of it. So a system that is quiet has exact counts.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use laneway::{Account, DispatcherStats};

use crate::processor::Ran;

/// The load of one dispatcher.
#[derive(Debug)]
pub(crate) struct Load {
    capacity: u64,
    inside: Inside,
    done: AtomicU64,
    failed: AtomicU64,
    panics: AtomicU64,
    /// The greatest number of events that were in one mailbox.
    deepest: AtomicU32,
}

/// Those that are in. On cache lines of its own: every post writes it.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Inside(AtomicU64);

impl Load {
    pub(crate) fn new(capacity: usize) -> Self {
        Load {
            capacity: capacity as u64,
            inside: Inside::default(),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            panics: AtomicU64::new(0),
            deepest: AtomicU32::new(0),
        }
    }

    /// Takes a place, if there is one: nobody is refused for the sake of somebody who is refused as well.
    pub(crate) fn enter(&self) -> bool {
        let mut inside = self.inside.0.load(Relaxed);
        while inside < self.capacity {
            match self.inside.0.compare_exchange_weak(inside, inside + 1, AcqRel, Relaxed) {
                Ok(_) => return true,
                Err(now) => inside = now,
            }
        }
        false
    }

    /// Gives back the place of something that did not get in after all.
    pub(crate) fn give_up(&self) {
        self.inside.0.fetch_sub(1, AcqRel);
    }

    /// Counts a turn, and gives back its places.
    pub(crate) fn leave(&self, ran: &Ran) {
        self.done.fetch_add(ran.taken - ran.failed, Relaxed);
        if ran.failed > 0 {
            self.failed.fetch_add(ran.failed, Relaxed);
            self.panics.fetch_add(ran.panics, Relaxed);
        }
        self.inside.0.fetch_sub(ran.taken, AcqRel);
    }

    /// Takes note of how many are in one mailbox.
    pub(crate) fn note_depth(&self, depth: usize) {
        let depth = u32::try_from(depth).unwrap_or(u32::MAX);
        if depth > self.deepest.load(Relaxed) {
            self.deepest.fetch_max(depth, Relaxed);
        }
    }

    /// The account of its events. It balances by the way it is made, and is exact when nothing runs.
    pub(crate) fn account(&self) -> Account {
        let outstanding = self.inside.0.load(Acquire);
        let (done, failed) = (self.done.load(Relaxed), self.failed.load(Relaxed));
        Account { accepted: done + failed + outstanding, done, failed, dropped: 0, outstanding }
    }

    /// What the engine counts, with events for tokens.
    pub(crate) fn stats(&self, engine: DispatcherStats) -> DispatcherStats {
        let account = self.account();
        DispatcherStats {
            account,
            depth: account.outstanding.saturating_sub(engine.in_flight as u64) as usize,
            panics: self.panics.load(Relaxed),
            max_pending_depth: self.deepest.load(Relaxed),
            ..engine
        }
    }
}
