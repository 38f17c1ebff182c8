//! What all designs have in common: processors with a bounded mailbox, posts that do not block, and handlers that call the [`Probe`].

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;

use super::drive::{self, Probe};
use super::workload::Workload;
use crate::drive::Outcome;

/// What travels: the number of the event in its processor, and when it was posted, in nanoseconds of the probe's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) number: u64,
    pub(crate) posted: u64,
}

/// A design of event processors on dispatchers.
pub(crate) trait Design: Sized + Sync {
    /// Its name on the command line.
    const NAME: &'static str;
    /// What it is, in one line.
    const ABOUT: &'static str;

    /// Starts its threads, with all processors registered.
    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self>;

    /// Posts. False if the mailbox is full.
    fn post(&self, processor: usize, event: Event) -> bool;

    /// What it has counted so far, by the names of metrics.
    fn counters(&self) -> BTreeMap<&'static str, f64>;

    /// Ends its threads. Gives back what can be counted only then.
    fn finish(self) -> BTreeMap<&'static str, f64>;
}

/// A design by name, with its type erased.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is, in one line.
    pub about: &'static str,
    run: fn(&Workload) -> Result<Outcome>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Entry {
    pub(crate) const fn of<D: Design>() -> Self {
        Self { name: D::NAME, about: D::ABOUT, run: drive::run::<D> }
    }

    /// Runs a workload in this process.
    pub(crate) fn run(&self, workload: &Workload) -> Result<Outcome> {
        (self.run)(workload)
    }
}
