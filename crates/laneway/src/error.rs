//! One error type per operation. A refused submission gives its message back.

use std::{fmt, time::Duration};

use crate::{admission::Bound, message::Message};

/// Why a message was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A bound is reached, and its policy is to reject (or the submission may not wait).
    #[error("the {0} is full")]
    Full(Bound),
    /// A bound is reached, its policy is to block, and the time it may take has passed.
    #[error("the {0} stayed full until the deadline")]
    TimedOut(Bound),
    /// A bound is reached, its policy is to block, and the submission came from a handler of this very engine: blocking a
    /// worker on what only workers can drain is a deadlock.
    #[error("the {0} is full, and a handler must not block on its own engine")]
    FromHandler(Bound),
    /// The waiting submitter was cancelled.
    #[error("cancelled while waiting for room")]
    Cancelled,
    /// The engine no longer accepts messages.
    #[error("the engine is closed")]
    Closed,
    /// The placement named a dispatcher that does not exist.
    #[error("no such dispatcher")]
    NoSuchDispatcher,
    /// An earlier message of the same key in the same batch was refused; accepting this one would reorder the key.
    #[error("an earlier message of this key was refused")]
    AfterRefused,
}

/// A message that was not accepted, and why.
#[derive(Clone, PartialEq, Eq)]
pub struct Refused<K, M> {
    /// The message, as it was submitted.
    pub message: Message<K, M>,
    /// Why.
    pub reason: Refusal,
}

impl<K, M> fmt::Debug for Refused<K, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<K, M> fmt::Display for Refused<K, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "refused: {}", self.reason)
    }
}

impl<K, M> std::error::Error for Refused<K, M> {}

/// Why an engine could not be built. All that is wrong is listed, not only the first.
#[derive(Clone, Debug, PartialEq)]
pub struct BuildError {
    /// Each thing that is wrong, and what would be right.
    pub problems: Vec<Problem>,
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the engine cannot be built{}", listed(&self.problems))
    }
}

/// A line for each.
fn listed(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}

impl std::error::Error for BuildError {}

/// One thing that is wrong with an engine's settings or topology.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// Nobody would do the work.
    #[error("the topology has no worker: give it at least one")]
    NoWorkers,
    /// Nowhere to place a lane.
    #[error("the topology has no dispatcher: give it at least one")]
    NoDispatchers,
    /// This worker would never have anything to do.
    #[error("worker {worker} serves no dispatcher: name at least one in its row")]
    EmptyRow {
        /// Its place in the topology.
        worker: usize,
    },
    /// A row names one dispatcher twice.
    #[error("worker {worker} serves dispatcher {name:?} twice: name it once")]
    ServedTwice {
        /// Its place in the topology.
        worker: usize,
        /// The name.
        name: String,
    },
    /// Two dispatchers have one name.
    #[error("there are two dispatchers called {name:?}: names are unique")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// Two workers have one name.
    #[error("there are two workers called {name:?}: names are unique")]
    DuplicateWorker {
        /// The name.
        name: String,
    },
    /// A row names a dispatcher that the topology does not have.
    #[error("worker {worker} serves dispatcher {name:?}, which does not exist: there are {known}")]
    UnknownDispatcher {
        /// Its place in the topology.
        worker: usize,
        /// The name.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// Messages placed here would wait for ever.
    #[error("no worker serves dispatcher {name:?}: add it to a worker's row")]
    Unserved {
        /// The name.
        name: String,
    },
    /// Hash placement takes bits of the hash.
    #[error("{partitions} partitions: the number must be a power of two, such as {lower} or {upper}")]
    NotAPowerOfTwo {
        /// What was asked for.
        partitions: usize,
        /// The next lower power of two.
        lower: usize,
        /// The next higher one.
        upper: usize,
    },
    /// Nothing could ever be accepted.
    #[error("{what} is zero: nothing could ever be accepted")]
    ZeroCapacity {
        /// Which setting.
        what: &'static str,
    },
    /// Some other setting is out of its range.
    #[error("{what} is {value}: it must be {right}")]
    OutOfRange {
        /// Which setting.
        what: &'static str,
        /// What it is.
        value: String,
        /// What would be right.
        right: &'static str,
    },
    /// There is nothing to run.
    #[error(
        "there is no handler: call handle, handle_batch, handle_async, handler, batch_handler or turn_handler"
    )]
    NoHandler,
    /// The operating system did not give us a thread.
    #[error("a worker thread could not be started: {error}")]
    Thread {
        /// What it said.
        error: String,
    },
    /// Async handlers need a runtime to run on.
    #[error(
        "an async handler needs a tokio runtime: build the engine inside one, or pass its handle to `runtime`"
    )]
    NoRuntime,
    /// Slots wait for retries, and for places in a pace.
    #[error("the runtime has no timers: build it with `enable_time` or `enable_all`")]
    RuntimeWithoutTimers,
}

/// Why a change to a running engine was not made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// The new topology would not be valid, or a worker that it needs cannot be had.
    #[error("the topology cannot be changed like this{}", listed(&.0.problems))]
    Invalid(BuildError),
    /// There is no dispatcher or worker of that name.
    #[error("there is no {what} {name:?}: there are {known}")]
    Unknown {
        /// "dispatcher" or "worker".
        what: &'static str,
        /// The name.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// Lanes that an earlier change moved have not arrived within the time, or a worker is still in the midst of what it took straight from ingress.
    #[error("lanes of an earlier change are still in flight after {0:?}")]
    StillMoving(Duration),
    /// It was asked for by a handler of this very engine, and might have to wait for that handler to return.
    #[error("a handler must not change the topology of its own engine: a change may have to wait for it")]
    FromHandler,
    /// The engine is shut down.
    #[error("the engine is closed")]
    Closed,
}
