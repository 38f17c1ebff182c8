//! Contender d: the source document 004, its first generation.
//!
//! A concurrent map holds a queue and a lock per message group. Every worker walks the map from the start, skips empty and
//! locked groups, takes one message of the first that it can lock, handles it, and starts over. Finding work is O(groups),
//! which is what the emulation shows. Groups are never removed. One favourable reading: queue and lock live in one map
//! entry, where the document has two maps.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::Result;
use dashmap::DashMap;
use foldhash::fast::RandomState;

use crate::contender::{Contender, Producer};
use crate::message::Message;
use crate::probe::Probe;
use crate::workload::Workload;

#[derive(Default)]
struct Group {
    locked: AtomicBool,
    queue: Mutex<VecDeque<Message>>,
}

impl Group {
    fn offer(&self, message: Message) {
        self.queue.lock().expect("no one panics with the queue").push_back(message);
    }

    fn is_empty(&self) -> bool {
        self.queue.lock().expect("no one panics with the queue").is_empty()
    }

    /// Takes the lock and one message, or neither.
    fn try_take(&self) -> Option<Message> {
        if self.is_empty() || self.locked.compare_exchange(false, true, Acquire, Relaxed).is_err() {
            return None;
        }
        let message = self.queue.lock().expect("no one panics with the queue").pop_front();
        if message.is_none() {
            self.release();
        }
        message
    }

    fn release(&self) {
        self.locked.store(false, Release);
    }
}

type Groups = DashMap<u64, Arc<Group>, RandomState>;

pub(super) struct GroupScan {
    groups: Arc<Groups>,
    running: Arc<AtomicBool>,
    workers: Vec<JoinHandle<()>>,
}

impl Contender for GroupScan {
    const NAME: &'static str = "group-scan";
    const ABOUT: &'static str = "document 004: workers scan a map of group queues for one they can lock (d)";

    type Producer = GroupProducer;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let groups = Arc::new(Groups::default());
        let running = Arc::new(AtomicBool::new(true));
        let workers = (0..workload.workers)
            .map(|_| {
                let (groups, running, probe) =
                    (Arc::clone(&groups), Arc::clone(&running), Arc::clone(&probe));
                thread::spawn(move || work(&groups, &running, &probe))
            })
            .collect();
        Ok(Self { groups, running, workers })
    }

    fn producer(&mut self) -> GroupProducer {
        GroupProducer { groups: Arc::clone(&self.groups) }
    }

    fn finish(self) {
        self.running.store(false, Relaxed);
        self.workers.into_iter().for_each(|worker| worker.join().expect("a worker panicked"));
    }
}

fn work(groups: &Groups, running: &AtomicBool, probe: &Probe) {
    while running.load(Relaxed) {
        match scan(groups) {
            Some((group, message)) => {
                probe.handle(&message);
                group.release();
            }
            None => thread::yield_now(),
        }
    }
}

/// One walk through the map, from its start, to the first group that has work and is free.
fn scan(groups: &Groups) -> Option<(Arc<Group>, Message)> {
    groups.iter().find_map(|group| group.try_take().map(|message| (Arc::clone(&group), message)))
}

pub(super) struct GroupProducer {
    groups: Arc<Groups>,
}

impl Producer for GroupProducer {
    fn submit(&mut self, message: Message) {
        self.groups.entry(message.key).or_default().offer(message);
    }
}
