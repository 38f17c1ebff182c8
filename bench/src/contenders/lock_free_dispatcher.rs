//! Contender e2: the source document 001 with a lock-free queue of runnable processors.
//!
//! What the document set out from, made as good as it can be: only processors that have messages are queued, a counter per
//! mailbox tells when one becomes runnable, and no lock is taken anywhere. A thread pops a processor, handles one message,
//! and pushes the processor back while it has more. Threads without work back off exponentially.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::AcqRel, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use anyhow::Result;
use crossbeam_queue::SegQueue;

use super::locked_dispatcher::Backoff;
use super::mailboxes::{MailboxProducer, Mailboxes};
use crate::contender::Contender;
use crate::message::Message;
use crate::probe::Probe;
use crate::workload::Workload;

/// Turns without work before a thread backs off: about what a burst needs to arrive.
const IDLE_TURNS: u32 = 64;

#[derive(Default)]
pub(super) struct Processor {
    mailbox: SegQueue<Message>,
    /// Messages outstanding; raised after the push, so that a runnable processor is never empty.
    outstanding: AtomicUsize,
}

#[derive(Default)]
struct Engine {
    runnable: SegQueue<Arc<Processor>>,
    stopped: AtomicBool,
}

pub(super) struct LockFreeDispatcher {
    engine: Arc<Engine>,
    workload: Workload,
    threads: Vec<JoinHandle<()>>,
}

impl Contender for LockFreeDispatcher {
    const NAME: &'static str = "lock-free-dispatcher";
    const ABOUT: &'static str = "document 001 with a lock-free queue of runnable processors (e2)";

    type Producer = MailboxProducer<Poster>;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let engine = Arc::new(Engine::default());
        let threads = (0..workload.workers)
            .map(|_| {
                let (engine, probe) = (Arc::clone(&engine), Arc::clone(&probe));
                thread::spawn(move || engine.work(&probe))
            })
            .collect();
        Ok(Self { engine, workload: workload.clone(), threads })
    }

    fn producer(&mut self) -> Self::Producer {
        MailboxProducer::new(Poster { engine: Arc::clone(&self.engine) }, &self.workload)
    }

    fn finish(self) {
        self.engine.stopped.store(true, Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("a thread panicked"));
    }

    fn unsupported(workload: &Workload) -> Option<&'static str> {
        workload.needs_slots().then_some("it polls, and a thread per slot would be needed")
    }
}

impl Engine {
    fn work(&self, probe: &Probe) {
        let mut backoff = Backoff::new();
        let mut idle_turns = 0;
        while !self.stopped.load(Relaxed) {
            match self.runnable.pop() {
                Some(processor) => {
                    self.turn(processor, probe);
                    idle_turns = 0;
                    backoff = Backoff::new();
                }
                None if idle_turns < IDLE_TURNS => {
                    idle_turns += 1;
                    thread::yield_now();
                }
                None => backoff.sleep(),
            }
        }
    }

    fn turn(&self, processor: Arc<Processor>, probe: &Probe) {
        let message = processor.mailbox.pop().expect("a runnable processor has a message");
        probe.handle(&message);
        if processor.outstanding.fetch_sub(1, AcqRel) > 1 {
            self.runnable.push(processor);
        }
    }
}

/// Posts to processors, and queues those that become runnable.
pub(super) struct Poster {
    engine: Arc<Engine>,
}

impl Mailboxes for Poster {
    type Mailbox = Arc<Processor>;

    fn open(&mut self, _key: u64) -> Arc<Processor> {
        Arc::new(Processor::default())
    }

    fn send(&mut self, processor: &Arc<Processor>, message: Message) {
        processor.mailbox.push(message);
        if processor.outstanding.fetch_add(1, AcqRel) == 0 {
            self.engine.runnable.push(Arc::clone(processor));
        }
    }

    fn close(&mut self, _processor: Arc<Processor>) {}
}
