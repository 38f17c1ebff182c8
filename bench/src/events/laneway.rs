//! Laneway itself: processors of `laneway-events`, set up as a user would.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use laneway_events::{Events, EventsConfig, ProcessorRef};

use super::design::{Design, Event};
use super::drive::Probe;
use super::workload::Workload;
use crate::PRODUCT;

pub(super) struct Laneway {
    events: Events,
    processors: Vec<ProcessorRef<Event>>,
}

impl Design for Laneway {
    const NAME: &'static str = PRODUCT;
    const ABOUT: &'static str = "laneway-events: a lane per processor, try_lock dispatchers, parked threads";

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let name = |dispatcher: usize| format!("d{dispatcher}");
        let rows = workload.rows().into_iter().map(|row| row.into_iter().map(name).collect::<Vec<_>>());
        let config =
            EventsConfig { default_queue_size: workload.queue_size(), ..EventsConfig::assigned(rows) };
        let events = Events::start(config)?;
        let processors = (0..workload.processors).map(|number| {
            let probe = Arc::clone(&probe);
            let registration = events.anonymous().dispatcher(name(workload.dispatcher_of(number)));
            registration.handle(move |context, event: Event| probe.handle(context.thread(), number, event))
        });
        let processors = processors.collect::<Result<Vec<_>, _>>()?;
        Ok(Self { events, processors })
    }

    fn post(&self, processor: usize, event: Event) -> bool {
        self.processors[processor].post(event).is_ok()
    }

    fn counters(&self) -> BTreeMap<&'static str, f64> {
        let snapshot = self.events.snapshot();
        BTreeMap::from([
            ("lock_failure_ratio", snapshot.lock_failure_ratio()),
            ("backoff_ratio", snapshot.backoff_ratio()),
        ])
    }

    fn finish(self) -> BTreeMap<&'static str, f64> {
        drop(self.events.shutdown(Duration::from_secs(10)));
        BTreeMap::new()
    }
}
