//! Bodies of waiting messages, as many as fit: so that a queue that keeps up reads nothing from its file.
//!
//! The writer offers the body of each message that it has committed; a claim takes it out. What does not fit is not here and is
//! read from the file when it is claimed. Older bodies are not pushed out by newer ones, since the older ones are claimed first.

use super::file::Body;
use super::index::{Sequence, Table};

#[derive(Debug)]
pub(super) struct Bodies {
    bodies: Table<Body>,
    bytes: usize,
    bytes_max: usize,
}

/// What a body costs beside its bytes: its place in the table, and what the allocator adds to two allocations.
const OVERHEAD_BYTES: usize = 112;

fn cost(body: &Body) -> usize {
    OVERHEAD_BYTES + body.text.len() + body.group.as_ref().map_or(0, |group| group.len())
}

impl Bodies {
    pub(super) fn new(bytes_max: usize) -> Self {
        Bodies { bodies: Table::default(), bytes: 0, bytes_max }
    }

    /// Keeps the body if there is room.
    pub(super) fn offer(&mut self, sequence: Sequence, body: Body) {
        let cost = cost(&body);
        if self.bytes + cost <= self.bytes_max {
            self.bytes += cost;
            self.bodies.insert(sequence, body);
        }
    }

    pub(super) fn take(&mut self, sequence: Sequence) -> Option<Body> {
        let body = self.bodies.remove(&sequence)?;
        self.bytes -= cost(&body);
        Some(body)
    }
}
