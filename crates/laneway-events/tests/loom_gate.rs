//! Posting against stopping, under every interleaving: the gate of a mailbox (`src/gate.rs`).
//!
//! What is checked: whoever was let in is seen to the end before the processor is finished off, exactly one is told to finish it off, and after
//! that nobody is let in. A finish that nobody does would be a stop that waits for ever; one that is done twice, or too early, a handler
//! that runs after its stop.

#![cfg(loom)]

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use laneway_events::model::{Gate, Shut};
use loom::thread;

/// A processor: its gate, how many events are being handled, and how often it was finished off. The counters are std's, so that loom sees the
/// gate alone.
#[derive(Default)]
struct Processor {
    gate: Gate,
    handled: AtomicUsize,
    finished: AtomicUsize,
}

impl Processor {
    /// Posts, and handles it: the lane in between is the engine's affair.
    fn post(&self) -> Result<(), Shut> {
        self.gate.enter(2)?;
        assert_eq!(self.finished.load(SeqCst), 0, "let in after the end");
        self.handled.fetch_add(1, SeqCst);
        if self.gate.leave(1) {
            self.finish();
        }
        Ok(())
    }

    fn stop(&self) {
        if self.gate.close() {
            self.finish();
        }
    }

    fn finish(&self) {
        assert_eq!(self.gate.inside(), 0, "finished off with an event in the handler");
        assert_eq!(self.finished.fetch_add(1, SeqCst), 0, "finished off twice");
    }
}

#[test]
fn who_was_let_in_is_seen_to_before_the_end_and_the_end_comes_once() {
    loom::model(|| {
        let processor = Arc::new(Processor::default());
        let posters = [0, 1].map(|_| {
            let processor = processor.clone();
            thread::spawn(move || usize::from(processor.post().is_ok()))
        });
        processor.stop();
        let accepted: usize = posters.into_iter().map(|poster| poster.join().unwrap()).sum();
        assert_eq!(processor.finished.load(SeqCst), 1, "somebody finishes it off");
        assert_eq!(processor.handled.load(SeqCst), accepted);
        assert_eq!(processor.post(), Err(Shut::Closed));
    });
}

#[test]
fn two_stops_and_a_post_end_once() {
    loom::model(|| {
        let processor = Arc::new(Processor::default());
        let stopper = {
            let processor = processor.clone();
            thread::spawn(move || processor.stop())
        };
        let poster = {
            let processor = processor.clone();
            thread::spawn(move || processor.post().is_ok())
        };
        processor.stop();
        stopper.join().unwrap();
        poster.join().unwrap();
        assert_eq!(processor.finished.load(SeqCst), 1);
    });
}

/// The bound holds at every moment, and a place that is free is given to somebody.
#[test]
fn no_more_are_let_in_than_may_be() {
    loom::model(|| {
        let gate = Arc::new(Gate::default());
        let others = [0, 1].map(|_| {
            let gate = gate.clone();
            thread::spawn(move || {
                let entered = gate.enter(1).is_ok();
                if entered {
                    assert_eq!(gate.inside(), 1);
                    assert!(!gate.leave(1));
                }
                entered
            })
        });
        let entered = others.map(|other| other.join().unwrap());
        assert!(entered.contains(&true), "the first to come finds room");
        assert_eq!(gate.inside(), 0);
    });
}
