//! Contender b: hash the key to one ring of the `disruptor` crate per worker thread.
//!
//! As contender a, with the fastest known ring instead of a channel. Consumers yield while they wait, because on few
//! cores spinning consumers take the producer's. The crate has two kinds of rings: [`MultiProducer`] may be filled by any
//! thread, as Laneway may, and is the fair comparison; [`SingleProducer`] by one only, and shows what that freedom costs.
//! Batches are published ring by ring with the crate's own form for them.

use std::sync::Arc;
use std::thread;

use anyhow::Result;
use disruptor::wait_strategies::WaitStrategy;
use disruptor::{Producer as Ring, Sequence, SingleConsumerBarrier};

use crate::contender::{Contender, Producer};
use crate::message::{Message, partition};
use crate::probe::Probe;
use crate::workload::Workload;

/// Gives the core away while there is nothing to read.
#[derive(Clone, Copy)]
struct Yield;

impl WaitStrategy for Yield {
    fn wait_for(&self, _sequence: Sequence) {
        thread::yield_now();
    }
}

type MultiRing = disruptor::MultiProducer<Message, SingleConsumerBarrier>;
type SingleRing = disruptor::SingleProducer<Message, SingleConsumerBarrier>;

/// Rings are powers of two; together they hold the window.
fn ring_size(workload: &Workload) -> usize {
    (workload.window / workload.workers).next_power_of_two().max(2)
}

fn consumer(probe: &Arc<Probe>) -> impl FnMut(&Message, Sequence, bool) + Send + 'static {
    let probe = Arc::clone(probe);
    move |message, _, _| probe.handle(message)
}

/// Consumers never sleep, so that a thread per slot of W5 would leave no core for the timers.
fn too_many_threads(workload: &Workload) -> Option<&'static str> {
    workload.needs_slots().then_some("its consumers never sleep, and a thread per slot would be needed")
}

pub(super) struct MultiProducer {
    rings: Vec<MultiRing>,
}

impl Contender for MultiProducer {
    const NAME: &'static str = "disruptor";
    const ABOUT: &'static str = "hash to a multi-producer disruptor ring per worker, yielding (b)";
    const BOUNDS_ITSELF: bool = true;

    type Producer = Rings<MultiRing>;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let ring = |_| {
            disruptor::build_multi_producer(ring_size(workload), Message::default, Yield)
                .handle_events_with(consumer(&probe))
                .build()
        };
        Ok(Self { rings: (0..workload.workers).map(ring).collect() })
    }

    fn producer(&mut self) -> Rings<MultiRing> {
        Rings::new(self.rings.clone())
    }

    fn finish(self) {
        // The last producer of a ring waits for its consumer.
        drop(self.rings);
    }

    fn unsupported(workload: &Workload) -> Option<&'static str> {
        too_many_threads(workload)
    }
}

pub(super) struct SingleProducer {
    rings: Vec<SingleRing>,
}

impl Contender for SingleProducer {
    const NAME: &'static str = "disruptor-single";
    const ABOUT: &'static str = "hash to a single-producer disruptor ring per worker, yielding (b)";
    const BOUNDS_ITSELF: bool = true;

    type Producer = Rings<SingleRing>;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let ring = |_| {
            disruptor::build_single_producer(ring_size(workload), Message::default, Yield)
                .handle_events_with(consumer(&probe))
                .build()
        };
        Ok(Self { rings: (0..workload.workers).map(ring).collect() })
    }

    fn producer(&mut self) -> Rings<SingleRing> {
        Rings::new(std::mem::take(&mut self.rings))
    }

    fn finish(self) {}

    fn unsupported(workload: &Workload) -> Option<&'static str> {
        if workload.producers > 1 {
            return Some("its rings have one producer");
        }
        too_many_threads(workload)
    }
}

/// One producer's rings, and room to sort a batch by ring.
pub(super) struct Rings<R> {
    rings: Vec<R>,
    sorted: Vec<Vec<Message>>,
}

impl<R> Rings<R> {
    fn new(rings: Vec<R>) -> Self {
        let sorted = rings.iter().map(|_| Vec::new()).collect();
        Self { rings, sorted }
    }
}

impl<R: Ring<Message> + Send> Producer for Rings<R> {
    #[inline]
    fn submit(&mut self, message: Message) {
        let at = partition(message.key, self.rings.len());
        while self.rings[at].try_publish(|slot| *slot = message).is_err() {
            thread::yield_now();
        }
    }

    fn submit_batch(&mut self, messages: &[Message]) {
        for message in messages {
            self.sorted[partition(message.key, self.rings.len())].push(*message);
        }
        for (ring, sorted) in self.rings.iter_mut().zip(&mut self.sorted) {
            publish_all(ring, sorted);
            sorted.clear();
        }
    }
}

fn publish_all(ring: &mut impl Ring<Message>, messages: &[Message]) {
    let count = messages.len();
    while count > 0
        && ring
            .try_batch_publish(count, |slots| {
                slots.zip(messages).for_each(|(slot, message)| *slot = *message)
            })
            .is_err()
    {
        thread::yield_now();
    }
}
