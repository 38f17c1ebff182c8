//! Contender a: hash the key to one bounded crossbeam channel per worker thread.
//!
//! What most programs do by hand. Order is kept per partition, so that nothing needs a gate; the price is that a slow or
//! hot key holds up all keys of its partition. The channels together hold the window.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::Result;
use crossbeam_channel::{Sender, bounded};

use crate::contender::{Contender, Producer};
use crate::message::{Message, partition};
use crate::probe::Probe;
use crate::workload::Workload;

pub(super) struct CrossbeamHash {
    senders: Vec<Sender<Message>>,
    workers: Vec<JoinHandle<()>>,
}

impl Contender for CrossbeamHash {
    const NAME: &'static str = "crossbeam-hash";
    const ABOUT: &'static str = "hash to a bounded crossbeam channel per worker (a)";
    const BOUNDS_ITSELF: bool = true;

    type Producer = HashingProducer;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let capacity = (workload.window / workload.workers).max(1);
        let (senders, workers) = (0..workload.workers)
            .map(|_| {
                let (sender, receiver) = bounded::<Message>(capacity);
                let probe = Arc::clone(&probe);
                (sender, thread::spawn(move || receiver.iter().for_each(|message| probe.handle(&message))))
            })
            .unzip();
        Ok(Self { senders, workers })
    }

    fn producer(&mut self) -> HashingProducer {
        HashingProducer { senders: self.senders.clone() }
    }

    fn finish(self) {
        drop(self.senders);
        self.workers.into_iter().for_each(|worker| worker.join().expect("a worker panicked"));
    }
}

pub(super) struct HashingProducer {
    senders: Vec<Sender<Message>>,
}

impl Producer for HashingProducer {
    #[inline]
    fn submit(&mut self, message: Message) {
        let sender = &self.senders[partition(message.key, self.senders.len())];
        sender.send(message).expect("workers run until all senders are gone");
    }
}
