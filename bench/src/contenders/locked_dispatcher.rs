//! Contender e: the source document 001.
//!
//! Processors circulate in the queues of their dispatchers. A thread goes round its dispatchers with `try_lock`, takes the
//! processor at the head, lets it handle one message, and puts it back at the tail, whether it had work or not. A full
//! round of failed locks backs off exponentially: 10 µs, times 1.5, at most 10 ms.
//!
//! Two favourable readings: the lock is released while a message is handled (the document holds it, which would let one
//! thread per dispatcher work), and a processor whose key has ended leaves the queue.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;

use super::mailboxes::{MailboxProducer, Mailboxes};
use crate::contender::Contender;
use crate::message::{Message, partition};
use crate::probe::Probe;
use crate::workload::{KeyLife, Workload};

#[derive(Default)]
pub(super) struct Processor {
    mailbox: Mutex<VecDeque<Message>>,
}

type Dispatcher = Mutex<VecDeque<Arc<Processor>>>;

struct Engine {
    dispatchers: Vec<Dispatcher>,
    running: AtomicBool,
    key_life: KeyLife,
    probe: Arc<Probe>,
}

pub(super) struct LockedDispatcher {
    engine: Arc<Engine>,
    workload: Workload,
    threads: Vec<JoinHandle<()>>,
}

impl Contender for LockedDispatcher {
    const NAME: &'static str = "locked-dispatcher";
    const ABOUT: &'static str = "document 001: try_lock dispatchers of circulating processors, backoff (e)";

    type Producer = MailboxProducer<Registrar>;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let engine = Arc::new(Engine {
            dispatchers: (0..workload.workers).map(|_| Dispatcher::default()).collect(),
            running: AtomicBool::new(true),
            key_life: workload.key_life(),
            probe,
        });
        let threads = (0..workload.workers)
            .map(|first| {
                let engine = Arc::clone(&engine);
                thread::spawn(move || engine.work(first))
            })
            .collect();
        Ok(Self { engine, workload: workload.clone(), threads })
    }

    fn producer(&mut self) -> Self::Producer {
        MailboxProducer::new(Registrar { engine: Arc::clone(&self.engine) }, &self.workload)
    }

    fn finish(self) {
        self.engine.running.store(false, Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("a thread panicked"));
    }

    fn unsupported(workload: &Workload) -> Option<&'static str> {
        workload
            .needs_slots()
            .then_some("its idle threads never sleep, and a thread per slot would be needed")
    }
}

impl Engine {
    /// The document's loop: every thread is assigned all dispatchers, and starts with its own.
    fn work(&self, first: usize) {
        let mut backoff = Backoff::new();
        let mut failures = 0;
        for index in (first..).take_while(|_| self.running.load(Relaxed)) {
            let dispatcher = &self.dispatchers[index % self.dispatchers.len()];
            let Ok(mut processors) = dispatcher.try_lock() else {
                failures += 1;
                if failures >= self.dispatchers.len() {
                    backoff.sleep();
                }
                continue;
            };
            let processor = processors.pop_front();
            drop(processors);
            if processor.is_some_and(|processor| self.turn(dispatcher, processor)) {
                failures = 0;
                backoff = Backoff::new();
            }
        }
    }

    /// One turn of one processor: a message, where there is one, and back to the tail.
    fn turn(&self, dispatcher: &Dispatcher, processor: Arc<Processor>) -> bool {
        let message = processor.mailbox.lock().expect("no one panics with the mailbox").pop_front();
        if let Some(message) = message {
            self.probe.handle(&message);
        }
        if !message.is_some_and(|message| self.key_life.ends_with(&message)) {
            dispatcher.lock().expect("no one panics with the queue").push_back(processor);
        }
        message.is_some()
    }
}

/// The document's exponential backoff, shared with the lock-free variant.
pub(super) struct Backoff {
    delay: Duration,
}

impl Backoff {
    const BASE: Duration = Duration::from_micros(10);
    const MAX: Duration = Duration::from_millis(10);
    const MULTIPLIER: f64 = 1.5;

    pub(super) fn new() -> Self {
        Self { delay: Self::BASE }
    }

    pub(super) fn sleep(&mut self) {
        thread::sleep(self.delay);
        self.delay = self.delay.mul_f64(Self::MULTIPLIER).min(Self::MAX);
    }
}

/// Registers a processor for every new key, with the dispatcher of its hash.
pub(super) struct Registrar {
    engine: Arc<Engine>,
}

impl Mailboxes for Registrar {
    type Mailbox = Arc<Processor>;

    fn open(&mut self, key: u64) -> Arc<Processor> {
        let processor = Arc::new(Processor::default());
        let dispatcher = &self.engine.dispatchers[partition(key, self.engine.dispatchers.len())];
        dispatcher.lock().expect("no one panics with the queue").push_back(Arc::clone(&processor));
        processor
    }

    fn send(&mut self, processor: &Arc<Processor>, message: Message) {
        processor.mailbox.lock().expect("no one panics with the mailbox").push_back(message);
    }

    fn close(&mut self, _processor: Arc<Processor>) {}
}
