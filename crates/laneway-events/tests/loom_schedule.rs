//! Cancelling against firing, and scheduling against threads that go to sleep, under every interleaving (`src/schedule.rs`).
//!
//! What is checked: a schedule ends once; a cancel that returns true means that nothing is posted afterwards; and a thread of the scheduler
//! does not sleep through what is due, which loom would report as a deadlock. (That no worker sleeps through an event is
//! shown for the engine, in its `tests/loom_dispatcher.rs`.)

#![cfg(loom)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use laneway_events::{
    ScheduleEnd,
    model::{Fired, Status, Task, Timer},
};
use loom::thread;

/// Posts and remembers it. Std's atomics: loom shall see the status alone.
#[derive(Default)]
struct Probe {
    status: Status,
    rate: bool,
    posted: AtomicUsize,
    cancelled: AtomicBool,
}

impl Task for Probe {
    fn status(&self) -> &Status {
        &self.status
    }

    fn interval(&self) -> Duration {
        Duration::from_nanos(1)
    }

    fn fire(&self) -> Fired {
        self.status.fire(!self.rate, || {
            assert!(!self.cancelled.load(SeqCst), "posted after a cancel that returned true");
            self.posted.fetch_add(1, SeqCst);
            ScheduleEnd::Posted
        })
    }

    fn let_go(&self) {}
}

impl Probe {
    fn cancel(&self) -> bool {
        let cancelled = self.status.cancel();
        if cancelled {
            self.cancelled.store(true, SeqCst);
        }
        cancelled
    }
}

#[test]
fn a_schedule_is_posted_or_cancelled_and_never_both() {
    loom::model(|| {
        let probe = Arc::new(Probe::default());
        let fires = {
            let probe = probe.clone();
            thread::spawn(move || probe.fire())
        };
        let cancels = {
            let probe = probe.clone();
            thread::spawn(move || probe.cancel())
        };
        let also = probe.cancel();
        let (fired, cancelled) = (fires.join().unwrap(), cancels.join().unwrap());
        assert!(!(also && cancelled), "one of the two is told so");
        let wanted = if also || cancelled {
            (ScheduleEnd::Cancelled, Fired::Over, 0)
        } else {
            (ScheduleEnd::Posted, Fired::Ended, 1)
        };
        assert_eq!((probe.status.end().unwrap(), fired, probe.posted.load(SeqCst)), wanted);
    });
}

#[test]
fn a_rate_that_was_cancelled_fires_no_more() {
    loom::model(|| {
        let probe = Arc::new(Probe { rate: true, ..Probe::default() });
        let fires = {
            let probe = probe.clone();
            thread::spawn(move || [probe.fire(), probe.fire()])
        };
        assert!(probe.cancel(), "nothing else ends it");
        let posted = probe.posted.load(SeqCst);
        let fired = fires.join().unwrap();
        assert_eq!(probe.posted.load(SeqCst), posted);
        assert_eq!(fired.iter().filter(|fired| **fired == Fired::GoesOn).count(), posted);
    });
}

/// Two threads of the scheduler, two schedules that are due at once: both are seen to, or whoever waits for them waits for ever.
#[test]
fn a_thread_of_the_scheduler_sleeps_through_nothing() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(2);
    builder.check(|| {
        let timer = Arc::new(Timer::new(10));
        let due = Instant::now();
        let threads = [0, 1].map(|_| {
            let timer = timer.clone();
            thread::spawn(move || timer.run())
        });
        let probes = [0, 1].map(|_| Arc::new(Probe::default()));
        for probe in &probes {
            timer.add(due, probe.clone()).unwrap();
        }
        // Before the close, which would wake up whoever had slept through one.
        for probe in &probes {
            assert_eq!(probe.status.wait_for_the_end(), ScheduleEnd::Posted);
        }
        timer.close();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for probe in &probes {
            assert_eq!(probe.posted.load(SeqCst), 1);
        }
    });
}

/// The same with one of each.
#[test]
fn what_is_due_is_posted() {
    loom::model(|| {
        let timer = Arc::new(Timer::new(10));
        let runs = {
            let timer = timer.clone();
            thread::spawn(move || timer.run())
        };
        let probe = Arc::new(Probe::default());
        timer.add(Instant::now(), probe.clone()).unwrap();
        assert_eq!(probe.status.wait_for_the_end(), ScheduleEnd::Posted);
        timer.close();
        runs.join().unwrap();
        assert_eq!(probe.posted.load(SeqCst), 1);
    });
}
