//! Posting against handling against stopping, under every interleaving: the mailbox and its token (`src/mail.rs`).
//!
//! What is checked: what was accepted is handled, once and in order; there is a token wherever there is mail, so that nothing waits for ever; exactly one is told to finish the
//! processor off, when nobody is inside any more, and after that nobody is let in; and every place at the dispatcher comes back.

#![cfg(loom)]

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use laneway_events::model::{Around, Gate, Load, Mailbox, Shut};
use loom::thread;

/// A processor. What is not its mailbox is std's, so that loom sees the mailbox alone.
struct Processor {
    mailbox: Mailbox<u32>,
    load: Load,
    /// What is in its lane.
    tokens: AtomicUsize,
    handled: Mutex<Vec<u32>>,
    finished: AtomicUsize,
}

impl<'a> Around<'a> for &'a Processor {
    fn load(self) -> &'a Load {
        &self.load
    }

    fn announce(self, has_one: bool) -> bool {
        if !has_one {
            self.tokens.fetch_add(1, SeqCst);
        }
        true
    }
}

impl Processor {
    fn new() -> Arc<Self> {
        Arc::new(Processor {
            mailbox: Mailbox::new(4, 0),
            // So large that places are taken ahead.
            load: Load::new(1_000),
            tokens: AtomicUsize::new(0),
            handled: Mutex::default(),
            finished: AtomicUsize::new(0),
        })
    }

    fn post(&self, number: u32) -> Result<(), Shut> {
        let put = self.mailbox.put(number, 0, |number, _| number, self);
        if put.is_ok() {
            assert_eq!(self.finished.load(SeqCst), 0, "let in after the end");
        }
        put.map_err(|(_, shut)| shut)
    }

    /// Runs the tokens that are there, one letter a turn, of two that it takes at once, as the thread does that has the lane. At most so many turns: with the lane to itself it needs no more.
    fn run(&self) {
        let mut hand = VecDeque::new();
        while self.tokens.load(SeqCst) > 0 {
            let mut taken = 0;
            let has_more = loop {
                if hand.is_empty() && !self.mailbox.take(&mut hand, 2, &self.load) {
                    break false;
                }
                if taken == 1 {
                    break true;
                }
                taken += 1;
                self.handled.lock().unwrap().push(hand.pop_front().expect("taken"));
            };
            self.load.give_back(taken.into());
            if taken > 0 && self.mailbox.leave(taken) {
                self.finish();
            }
            if !has_more {
                self.tokens.fetch_sub(1, SeqCst);
            }
        }
    }

    fn stop(&self) {
        if self.mailbox.close() {
            self.finish();
        }
    }

    fn finish(&self) {
        assert_eq!(self.mailbox.inside(), 0, "finished off with an event inside");
        assert_eq!(self.finished.fetch_add(1, SeqCst), 0, "finished off twice");
    }
}

/// Two posters, and the thread, which looks once meanwhile and once after all have ended.
#[test]
fn what_is_accepted_is_handled_once_and_in_the_order_of_its_poster() {
    loom::model(|| {
        let processor = Processor::new();
        let poster = {
            let processor = processor.clone();
            thread::spawn(move || [1, 2, 3, 4].map(|number| processor.post(number).is_ok()))
        };
        processor.run();
        let accepted = poster.join().unwrap();
        processor.run();
        let expected: Vec<u32> =
            [1, 2, 3, 4].into_iter().zip(accepted).filter_map(|(it, ok)| ok.then_some(it)).collect();
        assert_eq!(*processor.handled.lock().unwrap(), expected, "nothing waits without a token");
        assert_eq!((processor.mailbox.inside(), processor.load.account().outstanding), (0, 0));
    });
}

#[test]
fn who_was_let_in_is_seen_to_before_the_end_and_the_end_comes_once() {
    loom::model(|| {
        let processor = Processor::new();
        let poster = {
            let processor = processor.clone();
            thread::spawn(move || processor.post(1).is_ok())
        };
        let stopper = {
            let processor = processor.clone();
            thread::spawn(move || processor.stop())
        };
        processor.run();
        let accepted = poster.join().unwrap();
        stopper.join().unwrap();
        processor.run();
        assert_eq!(processor.finished.load(SeqCst), 1, "somebody finishes it off");
        assert_eq!(processor.handled.lock().unwrap().len(), usize::from(accepted));
        assert_eq!(processor.post(2), Err(Shut::Closed));
        assert_eq!(processor.load.account().outstanding, 0);
    });
}

#[test]
fn two_stops_end_once() {
    loom::model(|| {
        let processor = Processor::new();
        processor.post(1).unwrap();
        let stopper = {
            let processor = processor.clone();
            thread::spawn(move || processor.stop())
        };
        let runner = {
            let processor = processor.clone();
            thread::spawn(move || processor.run())
        };
        processor.stop();
        stopper.join().unwrap();
        runner.join().unwrap();
        assert_eq!(processor.finished.load(SeqCst), 1);
    });
}

/// The bound of the dispatcher holds at every moment, and a place that is free is given to somebody.
#[test]
fn no_more_are_let_in_than_may_be() {
    loom::model(|| {
        let load = Arc::new(Load::new(1));
        let posters = [0, 1].map(|_| {
            let load = load.clone();
            thread::spawn(move || {
                let entered = load.take(1) == 1;
                assert!(load.account().outstanding <= 1);
                load.give_back(entered.into());
                entered
            })
        });
        let entered = posters.map(|poster| poster.join().unwrap());
        assert!(entered.contains(&true), "the first to come finds room");
        assert_eq!(load.account().outstanding, 0);
    });
}
