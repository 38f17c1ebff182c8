//! Weighs a contender: how much memory a key and a waiting message take, and what is left when they are gone.
//!
//! Handlers are held at a gate while keys fill up, so that the backlog stands still. Then the gate opens, everything is
//! handled, and generation after generation of fresh keys comes and goes; the second half of them must not cost anything.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::contender::{Contender, Producer};
use crate::drive::{Drained, Outcome, Run, drain, stalled};
use crate::machine;
use crate::message::Message;
use crate::plan::CellMap;
use crate::probe::Probe;
use crate::pump::CHUNK;
use crate::window::Window;
use crate::workload::{WINDOW, Workload};

/// Keys that are held at the same time while memory is weighed.
const HELD_KEYS: u64 = 131_072;
/// Each held key gets one message and then eight more, so that a key and a message can be told apart.
pub(crate) const MEMORY_MESSAGES_PER_KEY: u32 = 9;
/// What a contender may do on threads of its own after a submission, or when all is handled, before it is weighed.
const SETTLE: Duration = Duration::from_millis(200);

/// Memory: per active key, per waiting message, retained when idle, and growth while keys come and go.
pub(crate) fn weigh<C: Contender>(workload: &Workload) -> Result<Outcome> {
    let map = CellMap::new(HELD_KEYS as usize, Some(MEMORY_MESSAGES_PER_KEY));
    let mut run = Run::<C>::start(workload, map)?;
    let mut outcome = Outcome::default();
    let empty = weight();

    let one_each = hold(&mut run.producers[0], 0..1);
    outcome.set("resident_bytes_per_key", (one_each - empty) / HELD_KEYS as f64);
    let nine_each = hold(&mut run.producers[0], 1..MEMORY_MESSAGES_PER_KEY);
    let added = HELD_KEYS * u64::from(MEMORY_MESSAGES_PER_KEY - 1);
    outcome.set("resident_bytes_per_message", (nine_each - one_each) / added as f64);

    run.probe.open_gate();
    let cap = Instant::now() + Duration::from_secs_f64(workload.cap_seconds);
    let generations = generations(workload);
    let mut drained = drain(&run.probe, sent_after(0), cap);
    // What a burst has left is kept for a moment, in case there is another one.
    thread::sleep(SETTLE);
    let mut idle = weight();
    outcome.set("resident_bytes_retained_per_key", (idle - empty) / HELD_KEYS as f64);
    for generation in 1..=generations {
        if drained != Drained::All {
            return Ok(cut_off(outcome, run, drained, sent_after(generation - 1)));
        }
        drained = come_and_go(&run.probe, &mut run.producers[0], generation, cap);
        // What the first keys leave behind is a contender's start-up; growth is what comes after.
        if generation == generations / 2 {
            idle = weight();
        }
    }
    let later_keys = (generations - generations / 2) * HELD_KEYS;
    outcome.set("resident_growth_bytes_per_million_keys", (weight() - idle) * 1e6 / later_keys as f64);
    if drained != Drained::All {
        return Ok(cut_off(outcome, run, drained, sent_after(generations)));
    }
    let per_cell = sent_after(generations) / HELD_KEYS;
    outcome.violations = run.finish((0..HELD_KEYS as usize).map(|cell| (cell, per_cell)));
    Ok(outcome)
}

/// How many times all keys come and go.
pub(crate) fn generations(workload: &Workload) -> u64 {
    workload.keys.div_ceil(HELD_KEYS).max(2)
}

/// Memory of this process.
fn weight() -> f64 {
    machine::resident_bytes().unwrap_or(0) as f64
}

/// Messages sent when a generation of keys has ended; the held keys are generation 0.
fn sent_after(generation: u64) -> u64 {
    (generation + 1) * HELD_KEYS * u64::from(MEMORY_MESSAGES_PER_KEY)
}

/// Sends these messages of all held keys, and weighs the backlog.
fn hold(producer: &mut impl Producer, sequences: Range<u32>) -> f64 {
    for sequence in sequences {
        (0..HELD_KEYS).for_each(|key| producer.submit(Message::new(key, sequence)));
    }
    thread::sleep(SETTLE);
    weight()
}

/// A contender that could not even drain is weighed no further: what is retained is unknown.
fn cut_off<C: Contender>(mut outcome: Outcome, run: Run<C>, drained: Drained, sent: u64) -> Outcome {
    outcome.metrics.remove("resident_bytes_retained_per_key");
    outcome.metrics.remove("resident_growth_bytes_per_million_keys");
    let done = run.probe.done();
    outcome.capped = drained == Drained::Capped;
    outcome.violations = match drained {
        Drained::Stalled => stalled(run.abandon(), sent, done),
        _ => run.abandon(),
    };
    outcome
}

/// One generation of keys: each sees its messages and ends.
fn come_and_go(probe: &Probe, producer: &mut impl Producer, generation: u64, cap: Instant) -> Drained {
    let window = Window::new(WINDOW).counting_from(sent_after(generation - 1));
    let mut credit = window.credit(probe);
    for chunk in (0..HELD_KEYS).step_by(CHUNK as usize) {
        if !credit.take(CHUNK * u64::from(MEMORY_MESSAGES_PER_KEY), cap) {
            return Drained::Capped;
        }
        for key in chunk..chunk + CHUNK {
            for sequence in 0..MEMORY_MESSAGES_PER_KEY {
                producer.submit(Message::new(generation * HELD_KEYS + key, sequence));
            }
        }
    }
    drain(probe, sent_after(generation), cap)
}
