//! The contenders, one file each: Laneway itself, and what else people use to keep order per key.
//!
//! [`product`] is Laneway alone, for the front door; [`all`] adds the peers, the emulations of the source documents and
//! the bounds, for `laneway-bench`. To add one, write its file and list it here.

mod laneway;

#[cfg(feature = "peers")]
mod busy_flag;
#[cfg(feature = "peers")]
mod crossbeam_hash;
#[cfg(feature = "peers")]
mod disruptor;
#[cfg(feature = "peers")]
mod group_scan;
#[cfg(feature = "peers")]
mod inline;
#[cfg(feature = "peers")]
mod kameo;
#[cfg(feature = "peers")]
mod lock_free_dispatcher;
#[cfg(feature = "peers")]
mod locked_dispatcher;
#[cfg(feature = "peers")]
mod mailboxes;
#[cfg(feature = "peers")]
mod on_tokio;
#[cfg(feature = "peers")]
mod ractor;
#[cfg(feature = "peers")]
mod spsc;
#[cfg(feature = "peers")]
mod tokio_lanes;
#[cfg(feature = "peers")]
mod tokio_task_per_key;
#[cfg(feature = "peers")]
mod tokio_timers;

use crate::contender::Entry;

/// Laneway alone.
pub fn product() -> Vec<Entry> {
    vec![Entry::of::<laneway::Laneway>()]
}

/// Laneway, its peers, the emulations and the bounds, in the order of the tables.
#[cfg(feature = "peers")]
pub fn all() -> Vec<Entry> {
    let mut entries = product();
    entries.extend([
        Entry::of::<laneway::Spinning>(),
        Entry::of::<crossbeam_hash::CrossbeamHash>(),
        Entry::of::<disruptor::MultiProducer>(),
        Entry::of::<disruptor::SingleProducer>(),
        Entry::of::<busy_flag::BusyFlag>(),
        Entry::of::<group_scan::GroupScan>(),
        Entry::of::<locked_dispatcher::LockedDispatcher>(),
        Entry::of::<lock_free_dispatcher::LockFreeDispatcher>(),
        Entry::of::<kameo::Kameo>(),
        Entry::of::<ractor::Ractor>(),
        Entry::of::<tokio_task_per_key::TokioTaskPerKey>(),
        Entry::of::<tokio_lanes::TokioLanes>(),
        Entry::of::<inline::Inline>(),
        Entry::of::<spsc::Spsc>(),
        Entry::of::<tokio_timers::TokioTimers>(),
    ]);
    entries
}
