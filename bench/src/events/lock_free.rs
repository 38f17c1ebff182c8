//! The same processors with a shared lock-free queue instead of `try_lock`: the design that document 001 set out to replace, made as good as it can be.
//!
//! A processor has what one of `laneway-events` has: a bounded mailbox of events as they are, here a lock-free one that a counter guards, and a handler behind
//! a pointer. Those that have events are in the lock-free queue of their dispatcher, once; a thread pops one, handles as many events as Laneway's
//! turns have at most, and pushes it back while it has more. Threads without work look again a few times, then back off as the document says.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::Result;
use crossbeam_queue::SegQueue;

use super::design::{Design, Event};
use super::drive::Probe;
use super::locked::Backoff;
use super::workload::Workload;

/// Turns without work before a thread backs off.
const IDLE_TURNS: u32 = 64;
/// As many as Laneway's turns have at most.
const TURN: usize = 128;
/// A turn is over after about so long, as Laneway's.
const SLICE: u64 = 1_000_000;

type Handler = Box<dyn FnMut(usize, Event) + Send>;

struct Processor {
    dispatcher: usize,
    mailbox: SegQueue<Event>,
    /// Events that were accepted and not handled.
    outstanding: AtomicUsize,
    handler: Mutex<Option<Handler>>,
}

struct Engine {
    ready: Vec<SegQueue<Arc<Processor>>>,
    processors: Vec<Arc<Processor>>,
    queue_size: usize,
    stopped: AtomicBool,
    polls: AtomicU64,
    sleeps: AtomicU64,
    probe: Arc<Probe>,
}

pub(super) struct LockFree {
    engine: Arc<Engine>,
    threads: Vec<JoinHandle<()>>,
}

impl Design for LockFree {
    const NAME: &'static str = "lock-free";
    const ABOUT: &'static str = "the same processors, a shared lock-free queue per dispatcher (CAS)";

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let processor = |number: usize| {
            let probe = Arc::clone(&probe);
            let handler: Handler = Box::new(move |thread, event| probe.handle(thread, number, event));
            Arc::new(Processor {
                dispatcher: workload.dispatcher_of(number),
                mailbox: SegQueue::new(),
                outstanding: AtomicUsize::new(0),
                handler: Mutex::new(Some(handler)),
            })
        };
        let engine = Arc::new(Engine {
            ready: (0..workload.dispatchers).map(|_| SegQueue::new()).collect(),
            processors: (0..workload.processors).map(processor).collect(),
            queue_size: workload.queue_size(),
            stopped: AtomicBool::new(false),
            polls: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            probe: Arc::clone(&probe),
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
        processor.mailbox.push(event);
        if processor.outstanding.fetch_add(1, AcqRel) == 0 {
            self.engine.ready[processor.dispatcher].push(Arc::clone(processor));
        }
        true
    }

    fn counters(&self) -> BTreeMap<&'static str, f64> {
        BTreeMap::new()
    }

    /// A thread adds what it has counted when it ends, so that counting costs nothing before.
    fn finish(self) -> BTreeMap<&'static str, f64> {
        self.engine.stopped.store(true, Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("a thread panicked"));
        let polls = self.engine.polls.load(Relaxed).max(1) as f64;
        BTreeMap::from([("backoff_ratio", self.engine.sleeps.load(Relaxed) as f64 / polls)])
    }
}

impl Engine {
    fn work(&self, thread: usize, row: &[usize]) {
        let (mut backoff, mut idle_turns, mut polls, mut sleeps) = (Backoff::new(), 0, 0, 0);
        for turn in 0_usize.. {
            if self.stopped.load(Relaxed) {
                break;
            }
            polls += 1;
            let found = (0..row.len()).find_map(|step| self.ready[row[(turn + step) % row.len()]].pop());
            match found {
                Some(processor) => {
                    self.turn(thread, processor);
                    idle_turns = 0;
                    backoff = Backoff::new();
                }
                None if idle_turns < IDLE_TURNS => {
                    idle_turns += 1;
                    thread::yield_now();
                }
                None => {
                    sleeps += 1;
                    backoff.sleep();
                }
            }
        }
        self.polls.fetch_add(polls, Relaxed);
        self.sleeps.fetch_add(sleeps, Relaxed);
    }

    fn turn(&self, thread: usize, processor: Arc<Processor>) {
        let mut handler =
            processor.handler.lock().expect("no one panics with it").take().expect("one thread at a time");
        let (began, mut handled) = (self.probe.now(), 0);
        let waiting = processor.outstanding.load(Relaxed).min(TURN);
        while handled < waiting.max(1) {
            let event = processor.mailbox.pop().expect("a ready processor has an event");
            handler(thread, event);
            handled += 1;
            if handled.is_multiple_of(16) || handled == 1 {
                let slow = self.probe.now() - began >= SLICE / 16 && handled == 1;
                if slow || self.probe.now() - began >= SLICE {
                    break;
                }
            }
        }
        *processor.handler.lock().expect("no one panics with it") = Some(handler);
        if processor.outstanding.fetch_sub(handled, AcqRel) > handled {
            self.ready[processor.dispatcher].push(processor);
        }
    }
}
