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
}

impl Clock {
    pub(crate) fn start(workload: &Workload) -> Self {
        let started = Instant::now();
        let cap = started + Duration::from_secs_f64(workload.cap_seconds);
        Self { started, amount: workload.amount, cap }
    }

    /// How many messages, of so many at most, a producer with this share should send before it asks again, having sent so many; none
    /// to stop.
    fn next_chunk(&self, most: u64, share: u64, sent: u64) -> u64 {
        let now = Instant::now();
        if now >= self.cap {
            return 0;
        }
        match self.amount {
            Amount::AtLeast { seconds, .. } if (now - self.started).as_secs_f64() < seconds => most,
            _ => most.min(share.saturating_sub(sent)),
        }
    }
}

/// How many messages each producer sends, or sends at least: together exactly as many as were asked for.
fn shares(workload: &Workload) -> impl Iterator<Item = u64> {
    let (Amount::Messages(messages) | Amount::AtLeast { messages, .. }) = workload.amount;
    let producers = workload.producers as u64;
    (0..producers).map(move |producer| messages / producers + u64::from(producer < messages % producers))
}

/// How a producer sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    /// One by one, so many per second.
    Paced { per_second: f64 },
    /// As fast as the contender takes them, so many at a time.
    Flood { batch: usize },
}

impl Way {
    pub(crate) fn of(workload: &Workload) -> Self {
        match workload.rate {
            Some(rate) => Self::Paced { per_second: rate as f64 / workload.producers as f64 },
            None => Self::Flood { batch: workload.batch },
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
        for ((producer, source), share) in run.producers.iter_mut().zip(sources).zip(shares(workload)) {
            let credit = (!C::BOUNDS_ITSELF).then(|| window.credit(probe));
            let mut pump = Pump { producer, source, share, credit, clock, probe, buffer: Vec::new() };
            scope.spawn(move || match Way::of(workload) {
                Way::Paced { per_second } => pump.paced(per_second),
                Way::Flood { batch } => pump.flood(batch),
            });
        }
    });
}

/// Carries messages from a source to a contender.
struct Pump<'a, P> {
    producer: &'a mut P,
    source: &'a mut Source,
    share: u64,
    credit: Option<Credit<'a>>,
    clock: &'a Clock,
    probe: &'a Probe,
    buffer: Vec<Message>,
}

impl<P: Producer> Pump<'_, P> {
    /// As fast as the contender takes them.
    fn flood(&mut self, batch: usize) {
        // Whole batches, so that only the last of all can be shorter.
        let most = CHUNK.next_multiple_of(batch as u64);
        let mut sent = 0;
        loop {
            let chunk = self.clock.next_chunk(most, self.share, sent);
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
            let chunk = self.clock.next_chunk(CHUNK, self.share, sent);
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use anyhow::Result;

    use super::*;
    use crate::drive;
    use crate::workload::{Tuning, Workload};

    /// How many submissions of each size there were.
    type Sizes = Arc<Mutex<BTreeMap<usize, u64>>>;

    /// Handles everything at once, and tells what was submitted as counters of its own.
    struct Recorder(Arc<Probe>, Sizes);

    struct Inlet(Arc<Probe>, Sizes);

    impl Producer for Inlet {
        fn submit(&mut self, message: Message) {
            self.submit_batch(&[message]);
        }

        fn submit_batch(&mut self, messages: &[Message]) {
            *self.1.lock().unwrap().entry(messages.len()).or_default() += 1;
            messages.iter().for_each(|message| self.0.handle(message));
        }
    }

    impl Contender for Recorder {
        const NAME: &'static str = "recorder";
        const ABOUT: &'static str = "handles everything at once";

        type Producer = Inlet;

        fn start(_: &Workload, probe: Arc<Probe>) -> Result<Self> {
            Ok(Self(probe, Sizes::default()))
        }

        fn producer(&mut self) -> Inlet {
            Inlet(Arc::clone(&self.0), Arc::clone(&self.1))
        }

        fn counters(&self) -> Vec<(&'static str, f64)> {
            let sizes = self.1.lock().unwrap();
            let messages: u64 = sizes.iter().map(|(size, count)| *size as u64 * count).sum();
            let ends = [sizes.first_key_value(), sizes.last_key_value()];
            let [shortest, longest] = ends.map(|end| end.map_or(0, |(size, _)| *size));
            vec![("messages", messages as f64), ("shortest", shortest as f64), ("longest", longest as f64)]
        }

        fn finish(self) {}
    }

    /// Runs the workload, and says how many messages there were, and how many in the shortest and in the longest submission.
    fn submitted(change: impl FnOnce(Workload) -> Workload) -> [f64; 3] {
        let tuning = Tuning { seconds: 0.01, layout: None, keys: None };
        let outcome = drive::run::<Recorder>(&change(Workload::tiny("free", &tuning))).unwrap();
        assert!(outcome.violations.is_empty() && !outcome.capped, "{outcome:?}");
        ["messages", "shortest", "longest"].map(|metric| outcome.metrics[metric])
    }

    #[test]
    fn exactly_so_many_messages_are_sent_however_many_send_them() {
        for producers in [1, 2, 3, 7] {
            let [messages, ..] = submitted(|free| Workload { producers, ..free }.exactly(1_000));
            assert_eq!(messages, 1_000.0, "from {producers} producers");
        }
        let rate = Some(5_000);
        let [messages, ..] = submitted(|free| Workload { producers: 3, rate, ..free }.exactly(100));
        assert_eq!(messages, 100.0, "at a rate");
    }

    #[test]
    fn submissions_are_as_long_as_was_asked_for() {
        for batch in [1, 7, 64, 100, 1_000] {
            let seen = submitted(|free| Workload { batch, ..free }.exactly(10 * batch as u64));
            assert_eq!(seen, [10.0 * batch as f64, batch as f64, batch as f64], "{batch} at a time");
        }
    }
}
