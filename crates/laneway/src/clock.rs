//! Time as the engine sees it: nanoseconds since it was built, from the machine's clock or from the simulator's.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

/// Where the time comes from.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    /// The machine's monotonic clock.
    Real(Instant),
    /// The clock of tokio, which its timers go by: the machine's, or that of a test with paused time.
    #[cfg(feature = "tokio")]
    Tokio(tokio::time::Instant),
    /// Whatever the simulator says.
    Virtual(Arc<AtomicU64>),
}

impl Clock {
    pub(crate) fn real() -> Self {
        Clock::Real(Instant::now())
    }

    /// Nanoseconds since the engine was built. 64 bits of them last for 584 years.
    pub(crate) fn now(&self) -> u64 {
        match self {
            Clock::Real(start) => start.elapsed().as_nanos() as u64,
            #[cfg(feature = "tokio")]
            Clock::Tokio(start) => start.elapsed().as_nanos() as u64,
            Clock::Virtual(nanos) => nanos.load(SeqCst),
        }
    }
}

/// A duration in nanoseconds, at most 584 years.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
