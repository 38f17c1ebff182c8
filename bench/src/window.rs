//! The window of messages in flight, for contenders that have no bound of their own.
//!
//! Producers take credit for a chunk of messages at a time. The number of messages done is read from the probe only when
//! the last reading no longer covers the next chunk, so that a submission costs no shared cache line.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::probe::Probe;

/// The window of a run, shared by its producers.
pub struct Window {
    limit: u64,
    granted: AtomicU64,
}

impl Window {
    /// At most `limit` messages in flight.
    pub fn new(limit: usize) -> Self {
        Self { limit: limit as u64, granted: AtomicU64::new(0) }
    }

    /// The same window, for a run that has already seen so many messages.
    pub fn counting_from(self, granted: u64) -> Self {
        Self { granted: AtomicU64::new(granted), ..self }
    }

    /// One producer's view of the window.
    pub fn credit<'a>(&'a self, probe: &'a Probe) -> Credit<'a> {
        Credit { window: self, probe, done_seen: 0 }
    }
}

/// One producer's view of the window.
pub struct Credit<'a> {
    window: &'a Window,
    probe: &'a Probe,
    done_seen: u64,
}

impl Credit<'_> {
    /// Waits until `count` more messages fit, and takes them. False when that did not happen before `deadline`.
    pub fn take(&mut self, count: u64, deadline: Instant) -> bool {
        let granted = self.window.granted.fetch_add(count, Relaxed) + count;
        let mut patience = Patience::new();
        while granted.saturating_sub(self.done_seen) > self.window.limit {
            self.done_seen = self.probe.done();
            if granted.saturating_sub(self.done_seen) <= self.window.limit {
                break;
            }
            if !patience.wait(deadline) {
                return false;
            }
        }
        true
    }
}

/// How a producer waits for room: it yields a few times, then sleeps, so that on few cores the workers get theirs.
pub struct Patience {
    yields: u32,
}

impl Patience {
    const YIELDS_MAX: u32 = 32;
    const NAP: Duration = Duration::from_micros(50);

    /// Fresh patience.
    pub fn new() -> Self {
        Self { yields: 0 }
    }

    /// Waits a little. False when the deadline has passed.
    pub fn wait(&mut self, deadline: Instant) -> bool {
        if self.yields < Self::YIELDS_MAX {
            self.yields += 1;
            std::thread::yield_now();
            return true;
        }
        std::thread::sleep(Self::NAP);
        Instant::now() < deadline
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}
