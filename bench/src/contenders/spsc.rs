//! Contender k: one ring from the producer to one worker, without a look at the key.
//!
//! The bound for a hand-off: whatever knows keys, or serves more than one worker, pays more than this. Both ends yield
//! while they wait, and the worker takes all that is there at once.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::Result;
use rtrb::{Consumer, PushError, RingBuffer};

use crate::contender::{Contender, Producer};
use crate::message::Message;
use crate::probe::Probe;
use crate::workload::Workload;

pub(super) struct Spsc {
    ring: Option<rtrb::Producer<Message>>,
    worker: JoinHandle<()>,
}

impl Contender for Spsc {
    const NAME: &'static str = "spsc";
    const ABOUT: &'static str = "one ring to one worker, no keys: the bound of a hand-off (k)";
    const BOUNDS_ITSELF: bool = true;

    type Producer = RingProducer;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let (ring, reader) = RingBuffer::new(workload.window);
        let worker = thread::spawn(move || work(reader, &probe));
        Ok(Self { ring: Some(ring), worker })
    }

    fn producer(&mut self) -> RingProducer {
        RingProducer { ring: self.ring.take().expect("one producer") }
    }

    fn finish(self) {
        drop(self.ring);
        self.worker.join().expect("the worker panicked");
    }

    fn unsupported(workload: &Workload) -> Option<&'static str> {
        if workload.waits() {
            return Some("one worker would wait for every handler in turn");
        }
        (workload.producers > 1).then_some("its ring has one producer")
    }
}

fn work(mut reader: Consumer<Message>, probe: &Probe) {
    loop {
        let count = reader.slots();
        if count > 0 {
            let chunk = reader.read_chunk(count).expect("the slots were counted");
            chunk.into_iter().for_each(|message| probe.handle(&message));
        } else if reader.is_abandoned() {
            return;
        } else {
            thread::yield_now();
        }
    }
}

pub(super) struct RingProducer {
    ring: rtrb::Producer<Message>,
}

impl Producer for RingProducer {
    #[inline]
    fn submit(&mut self, message: Message) {
        let mut message = message;
        while let Err(PushError::Full(refused)) = self.ring.push(message) {
            message = refused;
            thread::yield_now();
        }
    }

    fn submit_batch(&mut self, messages: &[Message]) {
        let chunk = loop {
            match self.ring.write_chunk_uninit(messages.len()) {
                Ok(chunk) => break chunk,
                Err(_) => thread::yield_now(),
            }
        };
        chunk.fill_from_iter(messages.iter().copied());
    }
}
