//! Document 001's own design: a lock per dispatcher, held while a handler runs.
//!
//! All processors of a dispatcher circulate in its queue, whether they have events or not. A thread goes round its dispatchers with `try_lock`, takes the
//! processor at the head, lets it handle one event, puts it back at the tail, and lets go of the lock. A full round of failed locks
//! backs off: 10 µs, times 1.5, at most 10 ms; work resets it. A lock that was had without finding work is not slept on.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;

use super::design::{Design, Event};
use super::drive::Probe;
use super::workload::Workload;

struct Processor {
    number: usize,
    mailbox: Mutex<VecDeque<Box<dyn Any + Send>>>,
    outstanding: AtomicUsize,
}

struct Engine {
    dispatchers: Vec<Mutex<VecDeque<Arc<Processor>>>>,
    processors: Vec<Arc<Processor>>,
    queue_size: usize,
    stopped: AtomicBool,
    attempts: AtomicU64,
    failures: AtomicU64,
    sleeps: AtomicU64,
    probe: Arc<Probe>,
}

pub(super) struct Locked {
    engine: Arc<Engine>,
    threads: Vec<JoinHandle<()>>,
}

impl Design for Locked {
    const NAME: &'static str = "locked";
    const ABOUT: &'static str = "document 001's own: the dispatcher's lock is held while a handler runs";

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let processor = |number: usize| {
            let (mailbox, outstanding) = (Mutex::default(), AtomicUsize::new(0));
            Arc::new(Processor { number, mailbox, outstanding })
        };
        let processors: Vec<_> = (0..workload.processors).map(processor).collect();
        let of = |dispatcher: usize| {
            let of_it = |one: &&Arc<Processor>| workload.dispatcher_of(one.number) == dispatcher;
            Mutex::new(processors.iter().filter(of_it).cloned().collect())
        };
        let engine = Arc::new(Engine {
            dispatchers: (0..workload.dispatchers).map(of).collect(),
            processors: processors.clone(),
            queue_size: workload.queue_size(),
            stopped: AtomicBool::new(false),
            attempts: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            probe,
        });
        let start = |(number, row): (usize, Vec<usize>)| {
            let engine = Arc::clone(&engine);
            thread::spawn(move || engine.work(number, &row))
        };
        let threads = workload.rows().into_iter().enumerate().map(start).collect();
        Ok(Self { engine, threads })
    }

    fn post(&self, processor: usize, event: Event) -> bool {
        let processor = &self.engine.processors[processor];
        if processor.outstanding.load(Relaxed) >= self.engine.queue_size {
            return false;
        }
        processor.mailbox.lock().expect("no one panics with it").push_back(Box::new(event));
        processor.outstanding.fetch_add(1, AcqRel);
        true
    }

    fn counters(&self) -> BTreeMap<&'static str, f64> {
        let attempts = self.engine.attempts.load(Relaxed).max(1) as f64;
        BTreeMap::from([
            ("lock_failure_ratio", self.engine.failures.load(Relaxed) as f64 / attempts),
            ("backoff_ratio", self.engine.sleeps.load(Relaxed) as f64 / attempts),
        ])
    }

    fn finish(self) -> BTreeMap<&'static str, f64> {
        self.engine.stopped.store(true, Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("a thread panicked"));
        BTreeMap::new()
    }
}

impl Engine {
    /// The document's loop.
    fn work(&self, thread: usize, row: &[usize]) {
        let (mut backoff, mut failed) = (Backoff::new(), 0);
        for index in 0_usize.. {
            if self.stopped.load(Relaxed) {
                return;
            }
            self.attempts.fetch_add(1, Relaxed);
            let Ok(mut processors) = self.dispatchers[row[index % row.len()]].try_lock() else {
                self.failures.fetch_add(1, Relaxed);
                failed += 1;
                if failed >= row.len() {
                    self.sleeps.fetch_add(1, Relaxed);
                    backoff.sleep();
                }
                continue;
            };
            if self.process_task(thread, &mut processors) {
                failed = 0;
                backoff = Backoff::new();
            }
        }
    }

    /// One event of one processor, under the lock.
    fn process_task(&self, thread: usize, processors: &mut VecDeque<Arc<Processor>>) -> bool {
        let Some(processor) = processors.pop_front() else { return false };
        let event = processor.mailbox.lock().expect("no one panics with it").pop_front();
        let worked = event.is_some();
        if let Some(event) = event {
            let event = event.downcast::<Event>().expect("posted by its type");
            self.probe.handle(thread, processor.number, *event);
            processor.outstanding.fetch_sub(1, AcqRel);
        }
        processors.push_back(processor);
        worked
    }
}

/// The document's exponential backoff.
pub(super) struct Backoff {
    delay: Duration,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { delay: Duration::from_micros(10) }
    }

    pub(super) fn sleep(&mut self) {
        thread::sleep(self.delay);
        self.delay = self.delay.mul_f64(1.5).min(Duration::from_millis(10));
    }
}
