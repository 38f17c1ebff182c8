//! Why a message waits.

use std::{fmt, time::Duration};

use crate::lane::State;

/// How a lane stands, as the lanes see it.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    pub(crate) state: State,
    pub(crate) waiting: usize,
    pub(crate) in_flight: usize,
    pub(crate) aside: usize,
    pub(crate) attempts: u32,
    pub(crate) note: Option<String>,
    pub(crate) paced_until: Option<u64>,
}

/// A lane that has a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder<K> {
    /// The worker's number.
    pub worker: usize,
    /// Since when, in nanoseconds of the engine's clock. For turns that take microseconds this is the time of a recent look at the clock.
    pub since: u64,
    /// Whose messages it handles. Known for turns that were expected to take long; a quick one is gone before anybody could read its name.
    pub key: Option<K>,
}

/// Why the head of a key's lane is not running, or that it is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reason<K> {
    /// Nothing of this key is outstanding.
    Idle,
    /// The only worker of the dispatcher has taken a number of quick messages straight from ingress, one of this key among them: it waits there, is run, or is done.
    PerhapsRunning,
    /// A message of it is in flight, for this long.
    Running {
        /// How long.
        since: Duration,
        /// In whose hands.
        worker: usize,
    },
    /// It could run, but no worker of its dispatcher is free.
    NoWorkerFree {
        /// Who has them.
        holders: Vec<Holder<K>>,
        /// How many lanes are ready, this one included.
        ready_lanes: usize,
    },
    /// Its head failed, or was told to wait, and will be tried again.
    Retry {
        /// In how long.
        after: Duration,
        /// How many attempts have failed.
        attempts: u32,
        /// What the handler said.
        note: Option<String>,
    },
    /// The dispatcher's pace lets it start later.
    RateLimited {
        /// In how long.
        after: Duration,
    },
    /// The lane is parked.
    Parked {
        /// For how long.
        since: Duration,
        /// Why.
        note: Option<String>,
    },
    /// Only messages that were parked alone are left.
    PutAside {
        /// Why.
        note: Option<String>,
    },
    /// Its dispatcher is paused.
    DispatcherPaused,
    /// It was moved here, and its turn at the dispatcher that it comes from has not ended.
    Moving,
}

/// What [`Handle::explain`](crate::Handle::explain) says about a key.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation<K> {
    /// The dispatcher that the key belongs to.
    pub dispatcher: String,
    /// Messages that wait in the lane, behind each other.
    pub waiting: usize,
    /// Messages in flight.
    pub in_flight: usize,
    /// Messages that were parked alone.
    pub aside: usize,
    /// Why the head is where it is.
    pub reason: Reason<K>,
}

impl<K: fmt::Debug> fmt::Display for Explanation<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let because = |note: &Option<String>| note.as_ref().map_or(String::new(), |note| format!(": {note}"));
        match &self.reason {
            Reason::Idle => write!(f, "nothing outstanding")?,
            Reason::PerhapsRunning => write!(
                f,
                "nothing waiting; perhaps running, among the quick messages that a worker has in hand"
            )?,
            Reason::Running { since, worker } => write!(f, "running on worker {worker} for {since:?}")?,
            Reason::NoWorkerFree { holders, ready_lanes } => {
                write!(f, "waiting for a free worker, {ready_lanes} lanes ready")?;
                let busy = if holders.is_empty() { "; nobody else is at work here" } else { "; busy with" };
                f.write_str(busy)?;
                for holder in holders {
                    match &holder.key {
                        Some(key) => write!(f, " {key:?} (worker {})", holder.worker)?,
                        None => write!(f, " quick work (worker {})", holder.worker)?,
                    }
                }
            }
            Reason::Retry { after, attempts, note } => {
                write!(
                    f,
                    "in retry for another {after:?} after {attempts} failed attempts{}",
                    because(note)
                )?;
            }
            Reason::RateLimited { after } => write!(f, "rate limited for another {after:?}")?,
            Reason::Parked { since, note } => write!(f, "parked for {since:?}{}", because(note))?,
            Reason::PutAside { note } => write!(f, "only messages that were put aside{}", because(note))?,
            Reason::DispatcherPaused => write!(f, "its dispatcher is paused")?,
            Reason::Moving => write!(f, "moving here; its turn elsewhere has not ended")?,
        }
        // The head is the message in flight, or else the first that waits.
        let behind = self.waiting.saturating_sub(usize::from(self.in_flight == 0));
        if behind > 0 {
            write!(f, "; {behind} more behind its head")?;
        }
        write!(f, " (dispatcher {:?})", self.dispatcher)
    }
}
