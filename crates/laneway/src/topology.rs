//! Which dispatchers exist, which workers serve which of them, and how a lane is placed. Each source document's architecture is one constructor.

use crate::{
    error::{BuildError, Problem},
    placement::{ByHash, ByName, LeastLoaded, Placement},
    worker::Backoff,
};

/// The shape of an engine.
///
/// ```
/// use laneway::Topology;
/// let threads: Topology<u64> = Topology::per_worker(4);      // least-loaded: a flow sticks to one of four workers
/// let families: Topology<u64> = Topology::partitioned(4, 2); // by hash: four partitions with two workers each
/// let pool: Topology<u64> = Topology::pool(64);              // one dispatcher, 64 workers
/// let mixed: Topology<u64> = Topology::builder()             // anything else
///     .dispatcher("fast")
///     .dispatcher_paced("slow", 100.0)
///     .worker("w0", ["fast", "slow"])
///     .worker("w1", ["fast"])
///     .build();
/// ```
pub struct Topology<K> {
    pub(crate) dispatchers: Vec<DispatcherSpec>,
    pub(crate) workers: Vec<WorkerSpec>,
    pub(crate) placement: Box<dyn Placement<K>>,
    /// Whether that is [`ByHash`], which a submission does without a dynamic call.
    pub(crate) by_hash: bool,
    /// Set by `partitioned`, whose number must be a power of two.
    partitions: Option<usize>,
}

/// A dispatcher to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DispatcherSpec {
    pub(crate) name: String,
    /// Nanoseconds between two starts, if it is paced.
    pub(crate) pace: Option<u64>,
    /// How its workers back off from it, if not as the engine's setting says.
    pub(crate) backoff: Option<Backoff>,
}

/// A worker to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorkerSpec {
    pub(crate) name: String,
    pub(crate) serves: Vec<String>,
}

impl<K> std::fmt::Debug for Topology<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Topology")
            .field("dispatchers", &self.dispatchers)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}

impl<K> Topology<K> {
    /// Document 000: `n` dispatchers with one worker each, least-loaded placement.
    pub fn per_worker(n: usize) -> Self {
        Topology::grid(n, 1, "worker").placed(LeastLoaded::default())
    }

    /// Document 003: `n` dispatchers (a power of two) with `k` workers each, placement by a smeared hash.
    pub fn partitioned(n: usize, k: usize) -> Self {
        Topology { partitions: Some(n), ..Topology::grid(n, k, "partition") }
    }

    /// Document 004: one dispatcher with `c` workers: threads, or slots when the handler is async.
    pub fn pool(c: usize) -> Self {
        Topology::grid(1, c, "pool")
    }

    fn grid(n: usize, k: usize, what: &str) -> Self {
        let mut builder = Topology::builder();
        for dispatcher in 0..n {
            let name = format!("{what}-{dispatcher}");
            builder = builder.dispatcher(&name);
            for worker in 0..k {
                builder = builder.worker(format!("{name}/{worker}"), [&name]);
            }
        }
        builder.build()
    }

    /// Any other mixture.
    pub fn builder() -> TopologyBuilder<K> {
        let placement = Box::new(ByHash);
        let (dispatchers, workers) = (Vec::new(), Vec::new());
        TopologyBuilder(Topology { dispatchers, workers, placement, by_hash: true, partitions: None })
    }

    /// The same shape with another placement.
    pub fn placed(mut self, placement: impl Placement<K> + 'static) -> Self {
        (self.placement, self.by_hash) = (Box::new(placement), false);
        self
    }

    /// The same shape, but a dispatcher with a backoff of its own instead of the builder's. A worker whose dispatchers are all taken sleeps for the
    /// shortest of their times. A name that no dispatcher has changes nothing.
    ///
    /// ```
    /// use laneway::{Backoff, Topology};
    /// use std::time::Duration;
    /// let patient = Backoff { max: Duration::from_millis(50), ..Backoff::default() };
    /// let topology: Topology<String> = Topology::assigned([["api"], ["batch"]], |key: &String| key).backoff_of("batch", patient);
    /// ```
    pub fn backoff_of(mut self, dispatcher: &str, backoff: Backoff) -> Self {
        let named = self.dispatchers.iter_mut().find(|known| known.name == dispatcher);
        if let Some(named) = named {
            named.backoff = Some(backoff);
        }
        self
    }

    pub(crate) fn problems(&self) -> Vec<Problem> {
        let mut problems = shape_problems(&self.dispatchers, &self.workers);
        if let Some(partitions) = self.partitions.filter(|n| *n > 0 && !n.is_power_of_two()) {
            let upper = partitions.next_power_of_two();
            problems.push(Problem::NotAPowerOfTwo { partitions, lower: upper / 2, upper });
        }
        problems
    }
}

impl<K: 'static> Topology<K> {
    /// Document 001: worker *i* serves the dispatchers of row *i*, round-robin; a key says the name of its dispatcher.
    ///
    /// ```
    /// use laneway::Topology;
    /// let topology: Topology<String> =
    ///     Topology::assigned([vec!["api", "rt"], vec!["api"], vec!["batch"]], |key: &String| key.split('/').next().unwrap());
    /// ```
    pub fn assigned<Row, Name>(
        rows: impl IntoIterator<Item = Row>,
        name: impl Fn(&K) -> &str + Send + Sync + 'static,
    ) -> Self
    where
        Row: IntoIterator<Item = Name>,
        Name: Into<String>,
    {
        let mut builder = Topology::builder();
        for (number, row) in rows.into_iter().enumerate() {
            let row: Vec<String> = row.into_iter().map(Into::into).collect();
            for name in &row {
                if !builder.0.dispatchers.iter().any(|known| known.name == *name) {
                    builder = builder.dispatcher(name);
                }
            }
            builder = builder.worker(format!("thread-{number}"), row);
        }
        builder.build().placed(ByName::new(name))
    }
}

/// What would not work about these dispatchers and workers.
pub(crate) fn shape_problems(dispatchers: &[DispatcherSpec], workers: &[WorkerSpec]) -> Vec<Problem> {
    let mut problems = Vec::new();
    if dispatchers.is_empty() {
        problems.push(Problem::NoDispatchers);
    }
    if workers.is_empty() {
        problems.push(Problem::NoWorkers);
    }
    for (place, dispatcher) in dispatchers.iter().enumerate() {
        let name = dispatcher.name.clone();
        if dispatchers[..place].iter().any(|other| other.name == name) {
            problems.push(Problem::DuplicateName { name: name.clone() });
        }
        if !workers.is_empty() && !workers.iter().any(|worker| worker.serves.contains(&name)) {
            problems.push(Problem::Unserved { name });
        }
        if dispatcher.pace == Some(0) {
            let value = "not a positive number".to_owned();
            problems.push(Problem::OutOfRange { what: "the pace per second", value, right: "above zero" });
        }
        problems.extend(dispatcher.backoff.iter().flat_map(backoff_problems));
    }
    let mut seen = std::collections::HashSet::new();
    for (worker, spec) in workers.iter().enumerate() {
        if !seen.insert(spec.name.as_str()) {
            problems.push(Problem::DuplicateWorker { name: spec.name.clone() });
        }
        problems.extend(row_problems(worker, spec, dispatchers));
    }
    problems
}

fn row_problems(worker: usize, spec: &WorkerSpec, dispatchers: &[DispatcherSpec]) -> Vec<Problem> {
    let mut problems = Vec::new();
    if spec.serves.is_empty() {
        problems.push(Problem::EmptyRow { worker });
    }
    for (place, name) in spec.serves.iter().enumerate() {
        if spec.serves[..place].contains(name) {
            problems.push(Problem::ServedTwice { worker, name: name.clone() });
        }
        if !dispatchers.iter().any(|dispatcher| dispatcher.name == *name) {
            let known = names(dispatchers.iter().map(|dispatcher| dispatcher.name.as_str()));
            problems.push(Problem::UnknownDispatcher { worker, name: name.clone(), known });
        }
    }
    problems
}

/// What would not work about a backoff.
pub(crate) fn backoff_problems(backoff: &Backoff) -> Vec<Problem> {
    let mut problems = Vec::new();
    if backoff.multiplier.is_nan() || backoff.multiplier <= 1.0 {
        let value = backoff.multiplier.to_string();
        problems.push(Problem::OutOfRange { what: "multiplier of the backoff", value, right: "above 1" });
    }
    if backoff.base >= backoff.max {
        let value = format!("{:?}", backoff.base);
        problems.push(Problem::OutOfRange { what: "base of the backoff", value, right: "below its max" });
    }
    problems
}

/// Names for a message to a person.
pub(crate) fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.map(|name| format!("{name:?}")).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Puts a [`Topology`] together. What is wrong with it is said when the engine is built.
pub struct TopologyBuilder<K>(Topology<K>);

impl<K> std::fmt::Debug for TopologyBuilder<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl<K> TopologyBuilder<K> {
    /// Adds a dispatcher.
    pub fn dispatcher(mut self, name: impl Into<String>) -> Self {
        self.0.dispatchers.push(DispatcherSpec { name: name.into(), pace: None, backoff: None });
        self
    }

    /// Adds a dispatcher that starts at most this many messages per second, evenly spaced, without bursts.
    pub fn dispatcher_paced(mut self, name: impl Into<String>, per_second: f64) -> Self {
        self.0.dispatchers.push(DispatcherSpec {
            name: name.into(),
            pace: Some(pace_interval(per_second)),
            backoff: None,
        });
        self
    }

    /// Adds a worker that serves these dispatchers, round-robin.
    pub fn worker<Name: Into<String>>(
        mut self,
        name: impl Into<String>,
        serves: impl IntoIterator<Item = Name>,
    ) -> Self {
        let serves = serves.into_iter().map(Into::into).collect();
        self.0.workers.push(WorkerSpec { name: name.into(), serves });
        self
    }

    /// Sets the placement; by hash if this is not called.
    pub fn placement(self, placement: impl Placement<K> + 'static) -> Self {
        TopologyBuilder(self.0.placed(placement))
    }

    /// The topology.
    pub fn build(self) -> Topology<K> {
        self.0
    }
}

/// Nanoseconds between two starts; 0 stands for a rate that makes no sense.
pub(crate) fn pace_interval(per_second: f64) -> u64 {
    let interval = 1e9 / per_second;
    if per_second > 0.0 && interval.is_finite() { (interval as u64).max(1) } else { 0 }
}

pub(crate) fn check(problems: Vec<Problem>) -> Result<(), BuildError> {
    if problems.is_empty() { Ok(()) } else { Err(BuildError { problems }) }
}
