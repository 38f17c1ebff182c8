//! What is counted: per partition by the engine, with document 003's names, and per connection, line and refusal by the ingress itself.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use laneway::{DispatcherStats, Snapshot};
use serde::Serialize;

use super::answer::Rejection;

/// Written by acceptor, connections and workers.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) connections_opened: AtomicU64,
    pub(super) connections_closed: AtomicU64,
    /// Clients that were cut off because they took no answers, or because their connection broke.
    pub(super) clients_lost: AtomicU64,
    pub(super) accept_errors: AtomicU64,
    pub(super) lines: AtomicU64,
    pub(super) blank_lines: AtomicU64,
    pub(super) accepted: AtomicU64,
    pub(super) completions_answered: AtomicU64,
    pub(super) completions_dropped: AtomicU64,
    rejections: [AtomicU64; Rejection::ALL.len()],
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    pub(super) fn reject(&self, rejection: Rejection) {
        Counters::add(&self.rejections[rejection as usize]);
    }

    pub(super) fn read(&self, snapshot: &Snapshot, bytes_held: usize) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let (closed, opened) = (read(&self.connections_closed), read(&self.connections_opened));
        let rejections = Rejection::ALL.into_iter().zip(&self.rejections);
        Stats {
            connections_open: opened.saturating_sub(closed),
            connections_opened: opened,
            clients_lost: read(&self.clients_lost),
            accept_errors: read(&self.accept_errors),
            lines: read(&self.lines),
            blank_lines: read(&self.blank_lines),
            accepted: read(&self.accepted),
            rejections: rejections.map(|(rejection, count)| (rejection.code(), read(count))).collect(),
            completions_answered: read(&self.completions_answered),
            completions_dropped: read(&self.completions_dropped),
            bytes_held,
            partitions: snapshot.dispatchers.iter().map(PartitionStats::from).collect(),
        }
    }
}

/// The network ingress at one moment. Serializes with the names of document 003.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// Connections that are open.
    pub connections_open: u64,
    /// Connections that were ever taken.
    pub connections_opened: u64,
    /// Connections that broke, or whose client took no answers for too long.
    pub clients_lost: u64,
    /// Failures to take a connection, such as a lack of file descriptors.
    pub accept_errors: u64,
    /// Lines that were read, the refused ones included and the blank ones not.
    pub lines: u64,
    /// Blank lines.
    pub blank_lines: u64,
    /// Lines that became tasks.
    pub accepted: u64,
    /// Refusals by code. Those that are about a connection and not about a line are `SLOW`, `IDLE`, `HELD`, `CONNECTIONS` and `HTTP`.
    pub rejections: BTreeMap<&'static str, u64>,
    /// Completions that were put into the answers of a client that was there.
    pub completions_answered: u64,
    /// Completions whose client had gone.
    pub completions_dropped: u64,
    /// Bytes of lines that are held in the partitions.
    pub bytes_held: usize,
    /// The partitions, in their order.
    pub partitions: Vec<PartitionStats>,
}

impl Stats {
    /// How many refusals there were of this kind.
    pub fn rejected(&self, rejection: Rejection) -> u64 {
        self.rejections[rejection.code()]
    }
}

/// One partition, as document 003 counts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionStats {
    /// Its name.
    pub name: String,
    /// Tasks that were accepted.
    pub tasks_in: u64,
    /// Attempts that were started.
    pub tasks_dispatched: u64,
    /// Tasks that are done.
    pub tasks_completed: u64,
    /// Tasks that were given up.
    pub tasks_failed: u64,
    /// Tasks that found their family busy.
    pub enqueued_due_to_busy: u64,
    /// The deepest that a family was, the task that runs included. Exact, and not sampled.
    pub max_pending_depth_observed: u32,
    /// Families that have a task now.
    pub active_families: usize,
    /// Tasks that are neither done nor given up.
    pub outstanding: u64,
}

impl From<&DispatcherStats> for PartitionStats {
    fn from(stats: &DispatcherStats) -> Self {
        PartitionStats {
            name: stats.name.clone(),
            tasks_in: stats.account.accepted,
            tasks_dispatched: stats.dispatched,
            tasks_completed: stats.account.done,
            tasks_failed: stats.account.failed,
            enqueued_due_to_busy: stats.enqueued_due_to_busy,
            max_pending_depth_observed: stats.max_pending_depth,
            active_families: stats.active_lanes,
            outstanding: stats.account.outstanding,
        }
    }
}
