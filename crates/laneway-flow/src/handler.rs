//! What a step does: the user's functions, without their types.
//!
//! The DSL wraps every handler so that it takes the task's JSON and gives JSON back; a worker calls [`Action::run`] and knows nothing of the
//! types inside. What goes wrong on the way (a JSON that does not fit, an error, a panic) is a [`Failure`] of the task.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::flow::Flow;

/// Why a task failed.
///
/// Every error becomes one with `?`. A plain failure is tried again as the step's settings say; a [final](Failure::fatal) one is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub(crate) message: String,
    pub(crate) fatal: bool,
}

impl Failure {
    /// A failure that may go away: the task is tried again after its delay.
    pub fn new(why: impl fmt::Display) -> Self {
        Self { message: why.to_string(), fatal: false }
    }

    /// A failure that will not go away: the task is not tried again.
    pub fn fatal(why: impl fmt::Display) -> Self {
        Self { message: why.to_string(), fatal: true }
    }

    /// What is said of it.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether trying again is pointless.
    pub fn is_fatal(&self) -> bool {
        self.fatal
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

// `Failure` is no `Error` itself, so that this does not overlap with the reflexive `From`.
impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(inner) = cause {
            message.push_str(": ");
            message.push_str(&inner.to_string());
            cause = inner.source();
        }
        Self::new(message)
    }
}

/// A task as it comes from the database.
#[derive(Clone, Debug)]
pub struct Task {
    /// Of which flow.
    pub flow: String,
    /// Of which run.
    pub run_id: Uuid,
    /// Of which step.
    pub step: String,
    /// Its place among the tasks of its step; 0 unless the step is a map.
    pub index: i32,
    /// On which queue its message travelled.
    pub queue: String,
    /// Its message on that queue.
    pub message_id: i64,
    /// Which attempt this is, from 1. It begins anew when the run is retried.
    pub attempt: i32,
    /// A number that no other start of any task has. Only who has the number of the task's last start can settle it.
    pub start_number: i64,
    /// How many attempts there are.
    pub max_attempts: i32,
    /// Seconds that this attempt may take.
    pub timeout_seconds: i32,
    /// The key of its run, if it has one.
    pub key: Option<String>,
    /// The element of a map; `{dependency: output}` of a step with dependencies; `{}` of a root.
    pub input: Box<RawValue>,
    /// What the run was started with; not given to the tasks of a map.
    pub flow_input: Option<Box<RawValue>>,
}

/// What a handler may know of its task beside the input.
pub struct Context<F> {
    task: Arc<Task>,
    flow: PhantomData<fn() -> F>,
}

impl<F> Context<F> {
    pub(crate) fn new(task: Arc<Task>) -> Self {
        Self { task, flow: PhantomData }
    }

    /// The run.
    pub fn run_id(&self) -> Uuid {
        self.task.run_id
    }

    /// The step.
    pub fn step(&self) -> &str {
        &self.task.step
    }

    /// Its place among the tasks of a map, from 0.
    pub fn index(&self) -> usize {
        usize::try_from(self.task.index).unwrap_or(0)
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        u32::try_from(self.task.attempt).unwrap_or(1)
    }

    /// Whether there will be no other attempt.
    pub fn is_last_attempt(&self) -> bool {
        self.task.attempt >= self.task.max_attempts
    }

    /// The key of the run, if the flow puts runs in a row.
    pub fn key(&self) -> Option<&str> {
        self.task.key.as_deref()
    }

    /// The queue on which the task came.
    pub fn queue(&self) -> &str {
        &self.task.queue
    }

    /// A text that is the same for every attempt at this task and for no other task: an idempotency key for calls to others.
    pub fn idempotency_key(&self) -> String {
        format!("{}/{}/{}", self.task.run_id, self.task.step, self.task.index)
    }
}

impl<F: Flow> Context<F> {
    /// What the run was started with. Tasks of a map are not told: there may be thousands of them.
    pub fn flow_input(&self) -> Result<F::Input, Failure> {
        decode_flow_input::<F>(&self.task)
    }
}

impl<F> Clone for Context<F> {
    fn clone(&self) -> Self {
        Self::new(self.task.clone())
    }
}

impl<F> fmt::Debug for Context<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Task { flow, run_id, step, index, attempt, .. } = &*self.task;
        write!(f, "{flow}/{step}[{index}] of run {run_id}, attempt {attempt}")
    }
}

/// The answer of a handler: what the step's output is, as JSON.
pub type Answer = Result<Box<RawValue>, Failure>;

type Plain = Arc<dyn Fn(Arc<Task>) -> BoxFuture<'static, Answer> + Send + Sync>;
type Committed = Arc<dyn for<'c> Fn(Arc<Task>, &'c mut PgConnection) -> BoxFuture<'c, Answer> + Send + Sync>;

/// A step's handler.
#[derive(Clone)]
pub enum Action {
    /// Nobody's: the step is completed by hand.
    Manual,
    /// Runs by itself; the worker completes the task afterwards, together with others.
    Plain(Plain),
    /// Runs inside the transaction that completes the task.
    Committed(Committed),
}

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Manual => "Manual",
            Action::Plain(_) => "Plain",
            Action::Committed(_) => "Committed",
        })
    }
}

impl Action {
    /// An action of a function from task to JSON, for programs whose flows are data.
    pub fn plain<R>(run: impl Fn(Arc<Task>) -> R + Send + Sync + 'static) -> Self
    where
        R: Future<Output = Answer> + Send + 'static,
    {
        Action::Plain(Arc::new(move |task| Box::pin(run(task))))
    }
}

/// The output of a handler as JSON.
pub(crate) fn encode<T: serde::Serialize>(output: &T) -> Answer {
    serde_json::value::to_raw_value(output)
        .map_err(|error| Failure::fatal(format!("the output is no JSON: {error}")))
}

/// A piece of JSON as the type that a handler wants; it will not fit better the second time.
pub(crate) fn decode<T: DeserializeOwned>(what: &str, json: &RawValue) -> Result<T, Failure> {
    serde_json::from_str(json.get())
        .map_err(|error| Failure::fatal(format!("{what} is not what the step takes: {error}")))
}

/// What the run was started with.
pub(crate) fn decode_flow_input<F: Flow>(task: &Task) -> Result<F::Input, Failure> {
    match &task.flow_input {
        Some(input) => decode("the run's input", input),
        None => Err(Failure::fatal("the database gave no input of the run for this step")),
    }
}
