//! Contender h: lanes on tokio, the simple way: one mutexed map of queues, a task per active key, a semaphore.
//!
//! The submission that finds no queue for its key makes one and spawns a task; the task handles what it finds, each message
//! under a permit, and removes the queue when it is empty. Idle keys cost nothing, as in Laneway; every message costs the
//! global lock twice.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use foldhash::fast::RandomState;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Semaphore;

use super::on_tokio::runtime;
use crate::contender::{Contender, Producer};
use crate::message::Message;
use crate::probe::Probe;
use crate::workload::Workload;

struct Lanes {
    /// What waits behind the message in flight, for every key that has one.
    waiting: Mutex<HashMap<u64, VecDeque<Message>, RandomState>>,
    slots: Semaphore,
    probe: Arc<Probe>,
}

impl Lanes {
    /// True when the key was idle, and the caller must run its lane.
    fn submit(&self, message: Message) -> bool {
        let mut waiting = self.waiting.lock().expect("no one panics with the map");
        match waiting.get_mut(&message.key) {
            Some(queue) => {
                queue.push_back(message);
                false
            }
            None => {
                waiting.insert(message.key, VecDeque::new());
                true
            }
        }
    }

    async fn run(&self, first: Message) {
        let mut next = Some(first);
        while let Some(message) = next {
            let slot = self.slots.acquire().await.expect("the semaphore is never closed");
            self.probe.handle_async(message).await;
            drop(slot);
            next = self.next(message.key);
        }
    }

    /// The next message of a key; removes the lane when there is none.
    fn next(&self, key: u64) -> Option<Message> {
        let mut waiting = self.waiting.lock().expect("no one panics with the map");
        let next = waiting.get_mut(&key).and_then(VecDeque::pop_front);
        if next.is_none() {
            waiting.remove(&key);
        }
        next
    }
}

pub(super) struct TokioLanes {
    runtime: Runtime,
    lanes: Arc<Lanes>,
}

impl Contender for TokioLanes {
    const NAME: &'static str = "tokio-lanes";
    const ABOUT: &'static str = "one mutexed map of lanes, a semaphore, tokio (h)";

    type Producer = LaneProducer;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let slots = Semaphore::new(workload.workers);
        let lanes = Arc::new(Lanes { waiting: Mutex::default(), slots, probe });
        Ok(Self { runtime: runtime(workload)?, lanes })
    }

    fn producer(&mut self) -> LaneProducer {
        LaneProducer { runtime: self.runtime.handle().clone(), lanes: Arc::clone(&self.lanes) }
    }

    fn finish(self) {
        self.runtime.shutdown_background();
    }
}

pub(super) struct LaneProducer {
    runtime: Handle,
    lanes: Arc<Lanes>,
}

impl Producer for LaneProducer {
    fn submit(&mut self, message: Message) {
        if self.lanes.submit(message) {
            let lanes = Arc::clone(&self.lanes);
            self.runtime.spawn(async move { lanes.run(message).await });
        }
    }
}
