//! Contender c: the source document 003, corrected.
//!
//! A partition has a dispatcher thread that reads a ring and must not block, a concurrent map of families, and a pool of
//! workers. A family lets one task through at a time and queues the others behind it. As written, with a busy flag beside
//! a queue, the document loses, strands and reorders tasks. Here the gate is a counter of outstanding tasks: who raises it
//! from zero dispatches, and a worker that lowers it to more than zero dispatches the next one.
//!
//! Families are kept for ever, as the document does: it allows unbounded keys and gives no rule for removal.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::Result;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use dashmap::DashMap;
use foldhash::fast::RandomState;

use crate::contender::{Contender, Producer};
use crate::message::{Message, partition};
use crate::probe::Probe;
use crate::workload::Workload;

/// The document's number of partitions, where there are workers enough for two each.
const PARTITIONS_MAX: usize = 4;
const WORKERS_PER_PARTITION: usize = 2;

#[derive(Default)]
struct Family {
    /// Tasks that were submitted and not completed. The gate: it is raised after the push, so that whoever may dispatch
    /// finds a task to pop.
    outstanding: AtomicUsize,
    pending: Mutex<VecDeque<Message>>,
}

impl Family {
    /// Queues a task; true when the family was idle, and the caller must dispatch.
    fn submit(&self, message: Message) -> bool {
        self.pending.lock().expect("no one panics with the queue").push_back(message);
        self.outstanding.fetch_add(1, AcqRel) == 0
    }

    fn pop(&self) -> Message {
        let mut pending = self.pending.lock().expect("no one panics with the queue");
        pending.pop_front().expect("the counter covers only tasks that were pushed")
    }

    /// Completes a task; true when more are outstanding, and the caller must dispatch.
    fn complete(&self) -> bool {
        self.outstanding.fetch_sub(1, AcqRel) > 1
    }
}

/// What a worker runs: one task, and the family to release afterwards.
struct Dispatched {
    family: Arc<Family>,
    message: Message,
}

/// What the pool is told. It holds its own sender, because completions dispatch too, and so never sees it close.
enum Order {
    Run(Dispatched),
    Stop,
}

pub(super) struct BusyFlag {
    partitions: Vec<Partition>,
}

impl Contender for BusyFlag {
    const NAME: &'static str = "busy-flag";
    const ABOUT: &'static str = "document 003, corrected: partition dispatcher, family map, worker pool (c)";

    type Producer = RingProducer;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let count = (workload.workers / WORKERS_PER_PARTITION).clamp(1, PARTITIONS_MAX);
        let workers = workload.workers.div_ceil(count);
        let capacity = workload.window / count;
        Ok(Self { partitions: (0..count).map(|_| Partition::start(capacity, workers, &probe)).collect() })
    }

    fn producer(&mut self) -> RingProducer {
        RingProducer { rings: self.partitions.iter().map(|partition| partition.ring.clone()).collect() }
    }

    fn finish(self) {
        self.partitions.into_iter().for_each(Partition::finish);
    }
}

struct Partition {
    ring: Sender<Message>,
    pool: Sender<Order>,
    dispatcher: JoinHandle<()>,
    workers: Vec<JoinHandle<()>>,
}

impl Partition {
    fn start(capacity: usize, workers: usize, probe: &Arc<Probe>) -> Self {
        let (ring, incoming) = bounded(capacity);
        let (pool, orders) = unbounded();
        let workers = (0..workers)
            .map(|_| {
                let (orders, pool, probe) = (orders.clone(), pool.clone(), Arc::clone(probe));
                thread::spawn(move || work(&orders, &pool, &probe))
            })
            .collect();
        let dispatcher = thread::spawn({
            let pool = pool.clone();
            move || dispatch(&incoming, &pool)
        });
        Self { ring, pool, dispatcher, workers }
    }

    fn finish(self) {
        drop(self.ring);
        self.dispatcher.join().expect("the dispatcher panicked");
        self.workers.iter().for_each(|_| self.pool.send(Order::Stop).expect("the pool is alive"));
        self.workers.into_iter().for_each(|worker| worker.join().expect("a worker panicked"));
    }
}

/// The consumer of the ring: gates, and never runs a task.
fn dispatch(incoming: &Receiver<Message>, pool: &Sender<Order>) {
    let families: DashMap<u64, Arc<Family>, RandomState> = DashMap::default();
    for message in incoming {
        let family = Arc::clone(&families.entry(message.key).or_default());
        if family.submit(message) {
            send_next(family, pool);
        }
    }
}

fn work(orders: &Receiver<Order>, pool: &Sender<Order>, probe: &Probe) {
    while let Ok(Order::Run(Dispatched { family, message })) = orders.recv() {
        probe.handle(&message);
        if family.complete() {
            send_next(family, pool);
        }
    }
}

fn send_next(family: Arc<Family>, pool: &Sender<Order>) {
    let message = family.pop();
    pool.send(Order::Run(Dispatched { family, message })).expect("the pool outlives its senders");
}

pub(super) struct RingProducer {
    rings: Vec<Sender<Message>>,
}

impl Producer for RingProducer {
    #[inline]
    fn submit(&mut self, message: Message) {
        let ring = &self.rings[partition(message.key, self.rings.len())];
        ring.send(message).expect("the dispatcher runs until all rings are gone");
    }
}
