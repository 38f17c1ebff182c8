//! One error type per operation. What is refused is given back.

use std::{any::Any, fmt, sync::Arc, time::Duration};

use crate::config::ConfigProblem;

/// Why an event was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The processor's mailbox holds as many events as it may.
    #[error("the processor's queue is full")]
    QueueFull,
    /// All mailboxes of its dispatcher together hold as many events as they may.
    #[error("the dispatcher is full")]
    DispatcherFull,
    /// The processor is stopping, or has stopped.
    #[error("the processor has stopped")]
    Stopped,
    /// The system is shutting down, or has been shut down.
    #[error("the system is shut down")]
    ShutDown,
}

impl Refusal {
    /// Whether it may be otherwise a little later.
    pub fn is_full(self) -> bool {
        matches!(self, Refusal::QueueFull | Refusal::DispatcherFull)
    }
}

/// An event that was not accepted, and why.
#[derive(Clone, PartialEq, Eq)]
pub struct Refused<E> {
    /// The event, as it was posted.
    pub event: E,
    /// Why.
    pub reason: Refusal,
}

/// An event that could not be posted by the id of a processor, and why.
#[derive(Clone, PartialEq, Eq)]
pub struct NotPosted<E> {
    /// The event, as it was posted.
    pub event: E,
    /// Why.
    pub reason: NotPostedReason,
}

/// Why an event could not be posted by the id of a processor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotPostedReason {
    /// The processor could not be had.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// It did not accept.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// Why a processor could not be had by its id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// None of that id is registered.
    #[error("there is no processor {0:?}")]
    Unknown(String),
    /// There is one, for other events.
    #[error("processor {id:?} takes events of type {takes}, not {given}")]
    WrongType {
        /// Its id.
        id: String,
        /// The type of its events.
        takes: &'static str,
        /// The type that was asked for.
        given: &'static str,
    },
}

/// Why a processor was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// No thread serves that dispatcher.
    #[error("no thread serves dispatcher {name:?}: there are {known}")]
    NoSuchDispatcher {
        /// The name that was asked for.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// Another processor has that id, perhaps one that is stopping.
    #[error("there is a processor {0:?} already")]
    DuplicateId(String),
    /// Nothing could ever be accepted.
    #[error("a queue size of {0}: must be from 1 to 1000000")]
    QueueSize(usize),
    /// There is no room on the dispatcher for what starts it.
    #[error("the dispatcher is full")]
    DispatcherFull,
    /// The system is shutting down, or has been shut down.
    #[error("the system is shut down")]
    ShutDown,
}

/// Why there is no answer.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskError<E> {
    /// The question was not accepted.
    #[error("{}", .0.reason)]
    Refused(Refused<E>),
    /// The question was dropped without an answer: unmatched, failed, or given back.
    #[error("nobody answered")]
    Unanswered,
    /// No answer within the time. One that comes later goes nowhere.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// A handler asked its own processor, which cannot answer before that handler is done.
    #[error("a processor that asks itself would wait for itself")]
    Itself,
}

/// Why something was not scheduled.
#[derive(Clone, PartialEq, Eq)]
pub struct NotScheduled<E> {
    /// The event.
    pub event: E,
    /// Why.
    pub reason: ScheduleRefusal,
}

/// Why something was not scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleRefusal {
    /// There are as many schedules as there may be.
    #[error("there are too many schedules")]
    TooMany,
    /// A rate needs some time between two ticks.
    #[error("an interval of zero")]
    NoInterval,
    /// The system is shutting down, or has been shut down.
    #[error("the system is shut down")]
    ShutDown,
}

/// Why an event system could not be started.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is not valid.
    #[error("{}", list("the configuration is not valid", .0))]
    Config(Vec<ConfigProblem>),
    /// Threads cannot be tied to these CPUs.
    #[error("thread-cpus: {0}")]
    Pinning(String),
    /// The engine below could not be built.
    #[error(transparent)]
    Engine(#[from] laneway::BuildError),
    /// The operating system did not give us a thread for the scheduler.
    #[error("a thread of the scheduler could not be started: {0}")]
    Thread(String),
}

fn list(title: &str, problems: &[impl fmt::Display]) -> String {
    problems.iter().fold(title.to_owned(), |text, problem| format!("{text}\n  {problem}"))
}

/// What would be lost in silence: an event that no handler wanted, a handler that failed. The system counts it and tells its `on_report`.
#[non_exhaustive]
pub enum Report {
    /// The handler of this moment did not match it.
    Unmatched {
        /// Whose.
        processor: Arc<str>,
        /// What.
        event: Box<dyn Any + Send>,
        /// Its type.
        event_type: &'static str,
    },
    /// A handler panicked or said that it failed. The event is gone with it; it is not tried again.
    Failed {
        /// Whose.
        processor: Arc<str>,
        /// What it said.
        error: String,
    },
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Report::Unmatched { processor, event_type, .. } => {
                write!(f, "processor {processor:?} did not match an event of type {event_type}")
            }
            Report::Failed { processor, error } => write!(f, "processor {processor:?} failed: {error}"),
        }
    }
}

macro_rules! without_the_event {
    ($($error:ident)*) => {$(
        impl<E> fmt::Debug for $error<E> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($error)).field("reason", &self.reason).finish_non_exhaustive()
            }
        }

        impl<E> fmt::Display for $error<E> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.reason.fmt(f)
            }
        }

        impl<E> std::error::Error for $error<E> {}
    )*};
}

// Events need not be printable for their errors to be.
without_the_event!(Refused NotPosted NotScheduled);

impl<E> fmt::Debug for AskError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AskError::Refused(refused) => refused.fmt(f),
            AskError::Unanswered => f.write_str("Unanswered"),
            AskError::TimedOut(limit) => write!(f, "TimedOut({limit:?})"),
            AskError::Itself => f.write_str("Itself"),
        }
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
