//! Carries messages from the sources into a contender: as fast as it takes them, or at a fixed rate.
//!
//! One pump per producer thread. Whatever is not a submission is done once per chunk: the look at the clock, and at the
//! window where the contender has no bound of its own.

use std::thread;
use std::time::{Duration, Instant};

use crate::contender::{Contender, Producer};
use crate::drive::Run;
use crate::message::Message;
use crate::plan::Source;
use crate::probe::Probe;
use crate::window::{Credit, Window};
use crate::workload::{Amount, Workload};

/// Messages between two looks at the clock and the window.
pub(crate) const CHUNK: u64 = 256;

/// When a run should stop, and when it must.
pub(crate) struct Clock {
    /// When the first producer began.
    pub(crate) started: Instant,
    amount: Amount,
    /// When it must stop.
    pub(crate) cap: Instant,
    producers: u64,
}

impl Clock {
    pub(crate) fn start(workload: &Workload) -> Self {
        let started = Instant::now();
        let cap = started + Duration::from_secs_f64(workload.cap_seconds);
        Self { started, amount: workload.amount, cap, producers: workload.producers as u64 }
    }

    /// How many messages a producer that has sent so many should send before it asks again; none to stop.
    fn next_chunk(&self, sent: u64) -> u64 {
        let (wanted, seconds) = match self.amount {
            Amount::Messages(count) => (count.div_ceil(self.producers), 0.0),
            Amount::AtLeast { seconds, messages } => (messages.div_ceil(self.producers), seconds),
        };
        let now = Instant::now();
        if now >= self.cap {
            0
        } else if (now - self.started).as_secs_f64() < seconds {
            CHUNK
        } else {
            CHUNK.min(wanted.saturating_sub(sent))
        }
    }
}

/// Runs all producers, each on a thread, until they have sent what they should.
pub(crate) fn pump_all<C: Contender>(
    workload: &Workload,
    run: &mut Run<C>,
    sources: &mut [Source],
    clock: &Clock,
) {
    let window = Window::new(workload.window);
    let probe = &*run.probe;
    thread::scope(|scope| {
        for (producer, source) in run.producers.iter_mut().zip(sources) {
            let credit = (!C::BOUNDS_ITSELF).then(|| window.credit(probe));
            let mut pump = Pump { producer, source, credit, clock, probe, buffer: Vec::new() };
            scope.spawn(move || match workload.rate {
                Some(rate) => pump.paced(rate as f64 / workload.producers as f64),
                None => pump.flood(workload.batch),
            });
        }
    });
}

/// Carries messages from a source to a contender.
struct Pump<'a, P> {
    producer: &'a mut P,
    source: &'a mut Source,
    credit: Option<Credit<'a>>,
    clock: &'a Clock,
    probe: &'a Probe,
    buffer: Vec<Message>,
}

impl<P: Producer> Pump<'_, P> {
    /// As fast as the contender takes them.
    fn flood(&mut self, batch: usize) {
        let mut sent = 0;
        loop {
            let chunk = self.clock.next_chunk(sent);
            if chunk == 0 || !self.admit(chunk) {
                return;
            }
            if batch > 1 {
                self.send_batches(chunk, batch)
            } else {
                self.send_singly(chunk)
            }
            sent += chunk;
        }
    }

    fn admit(&mut self, count: u64) -> bool {
        self.credit.as_mut().is_none_or(|credit| credit.take(count, self.clock.cap))
    }

    #[inline]
    fn send_singly(&mut self, count: u64) {
        for _ in 0..count {
            self.producer.submit(self.source.next_message());
        }
    }

    fn send_batches(&mut self, mut count: u64, batch: usize) {
        while count > 0 {
            let size = count.min(batch as u64);
            self.buffer.clear();
            self.buffer.extend((0..size).map(|_| self.source.next_message()));
            self.producer.submit_batch(&self.buffer);
            count -= size;
        }
    }

    /// At a fixed rate, whatever the contender does: messages that are due are sent, then the producer sleeps until the
    /// next one is. It never spins, because on few cores a spinning producer only measures its neighbours.
    fn paced(&mut self, per_second: f64) {
        let start_ns = self.probe.now_ns();
        let mut sent = 0;
        loop {
            let chunk = self.clock.next_chunk(sent);
            if chunk == 0 || !self.admit(chunk) {
                return;
            }
            for index in sent..sent + chunk {
                let due_ns = start_ns + (index as f64 * 1e9 / per_second) as u64;
                self.send_when_due(due_ns);
            }
            sent += chunk;
        }
    }

    fn send_when_due(&mut self, due_ns: u64) {
        let mut now_ns = self.probe.now_ns();
        while now_ns < due_ns {
            thread::sleep(Duration::from_nanos(due_ns - now_ns));
            now_ns = self.probe.now_ns();
        }
        self.producer.submit(self.source.next_message().stamped(due_ns, now_ns));
    }
}
