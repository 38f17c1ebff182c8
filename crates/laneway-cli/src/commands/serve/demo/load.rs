//! What the demonstration sends: five kinds of message groups, each with a story, published over HTTP as anybody would.
//!
//! A seed decides groups and times. A kind that has enough waiting gets no more until some of it is delivered, so that the demonstration can run
//! for a day.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::witness::Shared;
use crate::client::Client;
use crate::exit::Failure;

/// How often the load looks whether there is something to send.
const BEAT: Duration = Duration::from_millis(100);

/// Message groups of one kind.
pub(super) struct Kind {
    /// What their names begin with; a kind of one group has this name.
    pub(super) name: &'static str,
    pub(super) groups: u32,
    pub(super) pool: &'static str,
    /// The test target.
    pub(super) target: &'static str,
    /// How long it takes, between these, in milliseconds.
    pub(super) millis: (u64, u64),
    /// How many are there at the beginning.
    first: u32,
    /// And then come each second.
    per_second: f64,
    /// No more than so many wait.
    most: u64,
    /// What a newcomer reads.
    pub(super) story: &'static str,
}

/// The kinds, in the order in which they are shown.
pub(super) const KINDS: [Kind; 5] = [
    Kind {
        name: "order",
        groups: 40,
        pool: "orders",
        target: "fast",
        millis: (30, 90),
        first: 80,
        per_second: 120.0,
        most: 400,
        story: "quick, 30 to 90 ms",
    },
    Kind {
        name: "customer-slow",
        groups: 1,
        pool: "orders",
        target: "fast",
        millis: (900, 1100),
        first: 8,
        per_second: 0.9,
        most: 12,
        story: "slow, 1 s each",
    },
    Kind {
        name: "mail",
        groups: 12,
        pool: "mail",
        target: "faulty",
        millis: (20, 60),
        first: 24,
        per_second: 30.0,
        most: 200,
        story: "fails now and then",
    },
    Kind {
        name: "invoice",
        groups: 8,
        pool: "billing",
        target: "success",
        millis: (80, 160),
        first: 16,
        per_second: 20.0,
        most: 100,
        story: "steady, 80 to 160 ms",
    },
    Kind {
        name: "invoice-stuck",
        groups: 1,
        pool: "billing",
        target: "fail",
        millis: (5, 5),
        first: 3,
        per_second: 0.1,
        most: 6,
        story: "always fails",
    },
];

/// The pools of the demonstration: what is set below `laneway.pools`.
pub(super) const POOLS: [(&str, &str); 8] = [
    ("orders.concurrency", "16"),
    ("mail.concurrency", "8"),
    ("mail.backoff", "300 ms"),
    ("mail.attempts", "4"),
    ("billing.concurrency", "6"),
    ("billing.backoff", "1 s"),
    ("billing.backoff-max", "8 s"),
    ("billing.attempts", "8"),
];

impl Kind {
    /// The name of one of its groups, by number from 1.
    pub(super) fn group(&self, number: u32) -> String {
        match self.groups {
            1 => self.name.to_owned(),
            _ => format!("{}-{number:02}", self.name),
        }
    }

    /// All of them in a word.
    pub(super) fn title(&self) -> String {
        match self.groups {
            1 => self.name.to_owned(),
            many => format!("{} to {many:02}", self.group(1)),
        }
    }
}

/// Sends until it is told to stop or the service takes nothing more.
pub(super) struct Load {
    pub(super) client: Client,
    pub(super) base: String,
    pub(super) seed: u64,
    pub(super) witness: Shared,
    pub(super) stop: Arc<AtomicBool>,
}

impl Load {
    /// Runs on the calling thread. What goes wrong before it was told to stop is an error.
    pub(super) fn run(self, beats: &mpsc::Receiver<()>) -> Result<(), Failure> {
        let mut random = fastrand::Rng::with_seed(self.seed);
        let mut numbers = 0;
        let mut owed = KINDS.map(|kind| f64::from(kind.first));
        let mut last = Instant::now();
        loop {
            let batch = self.batch(&mut owed, &mut random, &mut numbers);
            if !batch.is_empty()
                && let Err(failure) = self.publish(batch)
            {
                return if self.stop.load(Ordering::Relaxed) { Ok(()) } else { Err(failure) };
            }
            // Nobody ever sends a beat: the sender is dropped when it is time to stop.
            if beats.recv_timeout(BEAT) == Err(mpsc::RecvTimeoutError::Disconnected) {
                return Ok(());
            }
            let passed = last.elapsed().as_secs_f64();
            last = Instant::now();
            for (owed, kind) in owed.iter_mut().zip(&KINDS) {
                *owed = (*owed + kind.per_second * passed).min(100.0);
            }
        }
    }

    /// What is due now, in a random order of groups.
    fn batch(
        &self,
        owed: &mut [f64; KINDS.len()],
        random: &mut fastrand::Rng,
        numbers: &mut u64,
    ) -> Vec<Value> {
        let waiting = self.witness.lock().waiting();
        let mut batch = Vec::new();
        for ((owed, kind), waiting) in owed.iter_mut().zip(&KINDS).zip(waiting) {
            let room = kind.most.saturating_sub(waiting);
            for _ in 0..(owed.floor() as u64).min(room) {
                *owed -= 1.0;
                *numbers += 1;
                batch.push(self.message(kind, *numbers, random));
            }
        }
        random.shuffle(&mut batch);
        batch
    }

    fn message(&self, kind: &Kind, number: u64, random: &mut fastrand::Rng) -> Value {
        let group = kind.group(random.u32(1..=kind.groups));
        let millis = random.u64(kind.millis.0..=kind.millis.1);
        json!({
            "id": format!("demo-{}-{number}", self.seed),
            "poolCode": kind.pool,
            "messageGroupId": group,
            "mediationTarget": format!("{}/api/test/{}?delayMillis={millis}", self.base, kind.target),
            "payload": {"group": group, "number": number},
        })
    }

    fn publish(&self, batch: Vec<Value>) -> Result<(), Failure> {
        let answer = self.client.post("/api/messages", Some(&Value::Array(batch.clone())))?;
        let answers = answer["messages"].as_array().map_or(&[][..], Vec::as_slice);
        let mut witness = self.witness.lock();
        for (message, answer) in batch.iter().zip(answers) {
            let group = message["messageGroupId"].as_str().unwrap_or_default();
            witness.published(group, answer["sequence"].as_u64().unwrap_or(0));
        }
        Ok(())
    }
}
