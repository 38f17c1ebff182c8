//! The gate of a mailbox: how many events are in it, and whether it still takes any. One word decides both, so that posting and stopping
//! cannot miss each other.
//!
//! ```text
//! bit 63       no more events: the processor is stopping, or has stopped
//! bits 0..62   events that were let in and have not left: waiting in the mail, or in the handler
//! ```
//!
//! `enter` raises the number unless the bit is set or the number has reached the limit; `leave` lowers it, by as many as a turn has handled; `close` sets the bit. Whoever
//! brings the word to *closed and empty* is told so, and that happens once: after it nobody enters, so nobody leaves. That
//! one finishes the processor off. All orderings are acquire-release on the one word: who finishes a processor off sees all that
//! its handlers did.
//!
//! `processor.rs` enters for each post and leaves after each turn; `events.rs` closes. `tests/loom_gate.rs` runs them against each other.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::sync::AtomicU64;

const CLOSED: u64 = 1 << 63;

/// Why nobody is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shut {
    /// As many as may be are in.
    Full,
    /// No more events.
    Closed,
}

/// The gate of a mailbox. On a cache line of its own: whoever posts writes it for every event, and what stands beside it in the processor is what its
/// thread reads for every event.
#[derive(Debug)]
#[repr(align(64))]
pub struct Gate(AtomicU64);

impl Default for Gate {
    fn default() -> Self {
        Gate(AtomicU64::new(0))
    }
}

impl Gate {
    /// Lets one in, unless `limit` are in already or it is closed.
    pub fn enter(&self, limit: u64) -> Result<(), Shut> {
        let mut word = self.0.load(Relaxed);
        loop {
            if word & CLOSED != 0 {
                return Err(Shut::Closed);
            }
            if word >= limit {
                return Err(Shut::Full);
            }
            match self.0.compare_exchange_weak(word, word + 1, AcqRel, Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// So many leave. True if those were the last, and the gate is closed.
    #[must_use = "the last one out finishes the processor off"]
    pub fn leave(&self, count: u64) -> bool {
        let before = self.0.fetch_sub(count, AcqRel);
        assert!(before & !CLOSED >= count, "nobody leaves who has not entered");
        before == CLOSED + count
    }

    /// Closes it. True if nobody is in, and it was open.
    #[must_use = "who closes an empty gate finishes the processor off"]
    pub fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, AcqRel) == 0
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.0.load(Acquire) & CLOSED != 0
    }

    /// How many are in.
    pub fn inside(&self) -> u64 {
        self.0.load(Acquire) & !CLOSED
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_one_out_is_told_and_only_that_one() {
        let gate = Gate::default();
        assert_eq!(gate.enter(2), Ok(()));
        assert_eq!(gate.enter(2), Ok(()));
        assert_eq!(gate.enter(2), Err(Shut::Full));
        assert!(!gate.leave(1));
        assert_eq!(gate.inside(), 1);
        assert!(!gate.close(), "somebody is in");
        assert!(!gate.close(), "it was closed before");
        assert_eq!(gate.enter(2), Err(Shut::Closed));
        assert!(gate.leave(1));
        assert!(gate.is_closed());
    }

    #[test]
    fn who_closes_an_empty_gate_is_told_once() {
        let gate = Gate::default();
        assert!(gate.close());
        assert!(!gate.close());
    }
}
