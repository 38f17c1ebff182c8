//! Contender j: no threads at all. The producer looks its key up in a hash map and calls the handler.
//!
//! A hand-off between threads costs more than a tiny handler, so that this beats every contender with workers until
//! handlers do real work. It is the bound for what order per key can cost.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Result;
use foldhash::fast::RandomState;

use crate::contender::{Contender, Producer};
use crate::message::Message;
use crate::probe::Probe;
use crate::workload::{KeyLife, Kind, Workload};

pub(super) struct Inline {
    probe: Arc<Probe>,
    key_life: KeyLife,
}

impl Contender for Inline {
    const NAME: &'static str = "inline";
    const ABOUT: &'static str = "no threads: the handler is called after a hash-map lookup (j)";
    const BOUNDS_ITSELF: bool = true;

    type Producer = InlineProducer;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        Ok(Self { probe, key_life: workload.key_life() })
    }

    fn producer(&mut self) -> InlineProducer {
        InlineProducer { probe: Arc::clone(&self.probe), key_life: self.key_life, state: HashMap::default() }
    }

    fn finish(self) {}

    fn unsupported(workload: &Workload) -> Option<&'static str> {
        match workload.kind {
            Kind::Waiting => Some("one handler at a time, on the producer's thread"),
            Kind::Memory => Some("it has no backlog"),
            Kind::Throughput | Kind::Latency | Kind::Instructions => None,
        }
    }
}

pub(super) struct InlineProducer {
    probe: Arc<Probe>,
    key_life: KeyLife,
    /// What a program would keep per key: here, how many messages it has seen.
    state: HashMap<u64, u64, RandomState>,
}

impl Producer for InlineProducer {
    #[inline]
    fn submit(&mut self, message: Message) {
        *self.state.entry(message.key).or_default() += 1;
        self.probe.handle(&message);
        if self.key_life.ends_with(&message) {
            self.state.remove(&message.key);
        }
    }
}
