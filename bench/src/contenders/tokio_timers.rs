//! The bound of W5: tokio's timers without keys.
//!
//! As many tasks as there are slots take messages from one queue and wait. No order, no gate: nothing on tokio can come
//! closer to the ideal time, so that what is missing here is the timer's and not the engine's.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use anyhow::Result;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use super::on_tokio::runtime;
use crate::contender::{Contender, Producer};
use crate::message::Message;
use crate::probe::Probe;
use crate::workload::Workload;

struct Queue {
    messages: Mutex<VecDeque<Message>>,
    /// One permit per message in the queue; closed at the end.
    available: Semaphore,
}

impl Queue {
    fn push(&self, message: Message) {
        self.messages.lock().expect("no one panics with the queue").push_back(message);
        self.available.add_permits(1);
    }

    async fn pop(&self) -> Option<Message> {
        self.available.acquire().await.ok()?.forget();
        self.messages.lock().expect("no one panics with the queue").pop_front()
    }
}

pub(super) struct TokioTimers {
    runtime: Runtime,
    queue: Arc<Queue>,
}

impl Contender for TokioTimers {
    const NAME: &'static str = "tokio-timers";
    const ABOUT: &'static str = "tokio timers without keys: the bound of W5";
    const ORDERED: bool = false;

    type Producer = QueueProducer;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let runtime = runtime(workload)?;
        let queue = Arc::new(Queue { messages: Mutex::default(), available: Semaphore::new(0) });
        for _ in 0..workload.workers {
            let (queue, probe) = (Arc::clone(&queue), Arc::clone(&probe));
            runtime.spawn(async move {
                while let Some(message) = queue.pop().await {
                    probe.handle_unordered(message).await;
                }
            });
        }
        Ok(Self { runtime, queue })
    }

    fn producer(&mut self) -> QueueProducer {
        QueueProducer { queue: Arc::clone(&self.queue) }
    }

    fn finish(self) {
        self.queue.available.close();
        self.runtime.shutdown_background();
    }

    fn unsupported(workload: &Workload) -> Option<&'static str> {
        let bounds = workload.waits() && workload.needs_slots();
        (!bounds).then_some("it knows no keys, and bounds only handlers that wait in slots")
    }
}

pub(super) struct QueueProducer {
    queue: Arc<Queue>,
}

impl Producer for QueueProducer {
    fn submit(&mut self, message: Message) {
        self.queue.push(message);
    }
}
