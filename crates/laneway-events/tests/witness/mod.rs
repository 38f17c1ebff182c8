//! What the tests share: a deadline, systems of a shape, and a witness of order, exclusion and counts.

#![allow(dead_code, reason = "each test file uses some of it")]

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use laneway_events::{Events, EventsConfig, Report, ShutdownReport};

/// Longer than anything that goes well takes, on a machine with better things to do.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A system that shall have nothing to report. A panic in the callback that notes reports would be caught by the system, so they are
/// looked at in the end.
pub(crate) struct Silent {
    /// `None` once it is over.
    events: Option<Events>,
    reports: Arc<Mutex<Vec<String>>>,
}

impl std::ops::Deref for Silent {
    type Target = Events;
    fn deref(&self) -> &Events {
        self.events.as_ref().expect("it is not over")
    }
}

impl Silent {
    pub(crate) fn shutdown(mut self, drain: Duration) -> ShutdownReport {
        self.events.take().expect("it is not over").shutdown(drain)
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        drop(self.events.take());
        let reports = std::mem::take(&mut *self.reports.lock().unwrap());
        // If the test has failed already, what was reported is a consequence, or is seen above.
        assert!(std::thread::panicking() || reports.is_empty(), "reported: {reports:#?}");
    }
}

/// A system with these rows; what it reports is an error.
pub(crate) fn system(rows: &[&[&str]]) -> Silent {
    let config = EventsConfig::assigned(rows.iter().map(|row| row.iter().copied()));
    let reports = Arc::new(Mutex::new(Vec::new()));
    let notes = reports.clone();
    let note = move |report: Report| notes.lock().unwrap().push(report.to_string());
    let events = Events::builder(config).on_report(note).start().expect("a valid system");
    Silent { events: Some(events), reports }
}

/// The same; what it reports can be looked at.
pub(crate) fn reporting(rows: &[&[&str]]) -> (Events, Receiver<Report>) {
    let config = EventsConfig::assigned(rows.iter().map(|row| row.iter().copied()));
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let report = move |report| tell.lock().unwrap().send(report).unwrap_or_default();
    (Events::builder(config).on_report(report).start().expect("a valid system"), told)
}

/// A door that a handler waits at until it is opened.
pub(crate) struct Door {
    arrived: Sender<()>,
    open: Mutex<Receiver<()>>,
}

/// The other side of it.
pub(crate) struct Porter {
    pub(crate) arrivals: Receiver<()>,
    opener: Sender<()>,
}

pub(crate) fn door() -> (Arc<Door>, Porter) {
    let (arrived, arrivals) = channel();
    let (opener, open) = channel();
    (Arc::new(Door { arrived, open: Mutex::new(open) }), Porter { arrivals, opener })
}

impl Door {
    /// Says that it is here, and waits.
    pub(crate) fn pass(&self) {
        let _ = self.arrived.send(());
        self.open.lock().unwrap().recv_timeout(DEADLINE).expect("the door is opened");
    }
}

impl Porter {
    pub(crate) fn wait_for_arrival(&self) {
        self.arrivals.recv_timeout(DEADLINE).expect("somebody arrives at the door");
    }

    pub(crate) fn open(&self) {
        let _ = self.opener.send(());
    }
}

/// Sees every event of one processor: contiguous order, no overlap.
#[derive(Default)]
pub(crate) struct Witness {
    inside: AtomicBool,
    pub(crate) seen: AtomicU64,
}

impl Witness {
    /// The next event must have this number, from 0, and nobody else may be inside.
    pub(crate) fn see(&self, number: u64, meanwhile: impl FnOnce()) {
        assert!(!self.inside.swap(true, SeqCst), "two events of one processor at once");
        meanwhile();
        assert_eq!(self.seen.load(SeqCst), number, "the next event");
        self.seen.store(number + 1, SeqCst);
        assert!(self.inside.swap(false, SeqCst), "still inside");
    }

    pub(crate) fn seen(&self) -> u64 {
        self.seen.load(SeqCst)
    }
}
