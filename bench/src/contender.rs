//! What a contender is: something that takes messages from producers and calls the probe, in order per key.
//!
//! Contenders are compared through this one narrow door. It is generic, not dynamic, so that the compiler may inline a
//! submission as it would in a user's program; [`Entry`] erases the type again, one level above the hot loop.

use std::sync::Arc;

use anyhow::Result;

use crate::drive::{self, Outcome};
use crate::message::Message;
use crate::probe::Probe;
use crate::workload::{KeysType, Workload};

/// Something that handles messages in order per key.
pub trait Contender: Sized {
    /// Its name on the command line.
    const NAME: &'static str;
    /// What it is, in one line.
    const ABOUT: &'static str;
    /// Whether it bounds the messages in flight itself. For the others the driver keeps the window.
    const BOUNDS_ITSELF: bool = false;
    /// Whether it keeps the order of keys at all; bounds that know no keys do not, and only their counts are checked.
    const ORDERED: bool = true;
    /// Whether it can run with keys that are strings.
    const STRING_KEYS: bool = false;

    /// One thread's way in.
    type Producer: Producer;

    /// Starts its threads or tasks.
    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self>;

    /// A way in for one producer thread. Called `workload.producers` times, before the clock starts.
    fn producer(&mut self) -> Self::Producer;

    /// Its own counters at the end of a run, by the names of metrics.
    fn counters(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Ends all threads. Called when every message was handled and all producers are gone; not measured.
    fn finish(self);

    /// Why it cannot run this workload, where it cannot.
    fn unsupported(_workload: &Workload) -> Option<&'static str> {
        None
    }
}

/// One producer thread's way into a contender.
pub trait Producer: Send {
    /// Hands over one message; waits while the contender is full.
    fn submit(&mut self, message: Message);

    /// Hands over several messages, one by one where the contender has no form for batches.
    fn submit_batch(&mut self, messages: &[Message]) {
        messages.iter().for_each(|message| self.submit(*message));
    }
}

/// A contender by name, with its type erased.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is, in one line.
    pub about: &'static str,
    run: fn(&Workload) -> Result<Outcome>,
    unsupported: fn(&Workload) -> Option<&'static str>,
}

impl Entry {
    /// The entry of a contender.
    pub const fn of<C: Contender>() -> Self {
        Self { name: C::NAME, about: C::ABOUT, run: drive::run::<C>, unsupported: unsupported::<C> }
    }

    /// Runs a workload in this process.
    pub fn run(&self, workload: &Workload) -> Result<Outcome> {
        (self.run)(workload)
    }

    /// Why it cannot run this workload, where it cannot.
    pub fn unsupported(&self, workload: &Workload) -> Option<&'static str> {
        (self.unsupported)(workload)
    }
}

fn unsupported<C: Contender>(workload: &Workload) -> Option<&'static str> {
    if workload.keys_type == KeysType::String && !C::STRING_KEYS {
        return Some("its keys are integers here");
    }
    C::unsupported(workload)
}
