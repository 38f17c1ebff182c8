//! What a dispatcher has to do: how many events are in the mailboxes of its processors, at most `dispatcher-capacity`, and what has become of those before.
//!
//! The engine below counts tokens, one for a mailbox with something in it; these are the events. `mail.rs` takes places for them, some of them ahead, a thread
//! gives the places of a turn back at its end, after it has counted what came of it. So a system that is quiet has exact counts; in those of a busy one, what its mailboxes have
//! taken ahead counts as accepted and outstanding until it is used or given back, at most 32 for each.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use laneway::{Account, DispatcherStats};

use crate::{processor::Ran, sync::AtomicU64};

/// The load of one dispatcher.
#[derive(Debug)]
pub struct Load {
    capacity: u64,
    inside: Inside,
    done: AtomicU64,
    failed: AtomicU64,
    panics: AtomicU64,
    /// The greatest number of events that were in one mailbox.
    deepest: AtomicU32,
}

/// Those that are in. On cache lines of its own: every mailbox that takes or gives back places writes it.
#[derive(Debug)]
#[repr(align(128))]
struct Inside(AtomicU64);

/// Nobody takes more than one in so many of the places that are left: near the bound each gets what it needs and none ahead.
const SHARE: u64 = 64;

impl Load {
    /// No events yet, and at most so many.
    pub fn new(capacity: usize) -> Self {
        Load {
            capacity: capacity as u64,
            inside: Inside(AtomicU64::new(0)),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            panics: AtomicU64::new(0),
            deepest: AtomicU32::new(0),
        }
    }

    /// Takes up to `wanted` places; none, if there is none.
    pub fn take(&self, wanted: u64) -> u64 {
        let mut inside = self.inside.0.load(Relaxed);
        loop {
            let left = self.capacity.saturating_sub(inside);
            let taken = wanted.min((left / SHARE).max(1)).min(left);
            if taken == 0 {
                return 0;
            }
            match self.inside.0.compare_exchange_weak(inside, inside + taken, AcqRel, Relaxed) {
                Ok(_) => return taken,
                Err(now) => inside = now,
            }
        }
    }

    /// Gives back places that were not used.
    pub fn give_back(&self, places: u64) {
        if places > 0 {
            self.inside.0.fetch_sub(places, AcqRel);
        }
    }

    /// Counts a turn, and gives back its places.
    pub(crate) fn leave(&self, ran: &Ran) {
        self.done.fetch_add((ran.taken - ran.failed).into(), Relaxed);
        if ran.failed > 0 {
            self.failed.fetch_add(ran.failed.into(), Relaxed);
            self.panics.fetch_add(ran.panics.into(), Relaxed);
        }
        self.inside.0.fetch_sub(ran.taken.into(), AcqRel);
    }

    /// Takes note of how many are in one mailbox.
    pub fn note_depth(&self, depth: usize) {
        let depth = u32::try_from(depth).unwrap_or(u32::MAX);
        if depth > self.deepest.load(Relaxed) {
            self.deepest.fetch_max(depth, Relaxed);
        }
    }

    /// The account of its events. It balances by the way it is made, and is exact when nothing runs.
    pub fn account(&self) -> Account {
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
