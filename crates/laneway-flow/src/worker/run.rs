//! Running a task: a slot of the engine calls the handler and sends what came of it to be settled.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use serde_json::value::RawValue;
use sqlx::types::Json;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::Shared;
use super::hand::Progress;
use super::settle::Settlement;
use crate::definition::list;
use crate::handler::{Action, Answer, Failure, Task};
use crate::store::{self, Completed, TaskRows};

/// What a slot gets.
pub(crate) struct Job {
    pub(super) ticket: u64,
    pub(super) task: Arc<Task>,
    pub(super) progress: Arc<Progress>,
    /// The place of its queue.
    pub(super) queue: usize,
}

/// Runs the handler of a task, to its end, its timeout, or until the task is another's.
pub(super) async fn run(shared: &Arc<Shared>, settlements: &mpsc::Sender<Settlement>, job: &Job) {
    let ended = if job.progress.begin() { begun(shared, job).await } else { Ended::Lost };
    let (ticket, task) = (job.ticket, job.task.clone());
    let settlement = match ended {
        Ended::Output(output) => Settlement::Complete { ticket, task, output },
        Ended::Failed(failure) => Settlement::Fail { ticket, task, failure },
        Ended::Committed => Settlement::Committed { ticket, task },
        Ended::Lost => Settlement::Lost { ticket, task },
        Ended::Unknown => Settlement::Unknown { ticket, task },
    };
    // The settler ends after the slots, unless the worker was dropped; then nobody is left to tell.
    let _ = settlements.send(settlement).await;
}

async fn begun(shared: &Shared, job: &Job) -> Ended {
    let began = Instant::now();
    let ended = tokio::select! {
        biased;
        ended = attempt(shared, &job.task) => ended,
        () = job.progress.lost.notified() => Ended::Lost,
    };
    let took = began.elapsed();
    shared.hand.learn(took);
    shared.hand.tallies[job.queue].learn(took);
    job.progress.end();
    ended
}

/// How a handler ended.
enum Ended {
    Output(Box<RawValue>),
    Failed(Failure),
    /// Its transaction completed the task.
    Committed,
    /// The task was another's, and whatever the handler wrote in its transaction is undone.
    Lost,
    /// This worker has no handler for it.
    Unknown,
}

async fn attempt(shared: &Shared, task: &Arc<Task>) -> Ended {
    let limit = Duration::from_secs(u64::try_from(task.timeout_seconds).unwrap_or(1).max(1));
    let work = AssertUnwindSafe(perform(shared, task)).catch_unwind();
    match timeout(limit, work).await {
        Ok(Ok(ended)) => ended,
        Ok(Err(panic)) => {
            Ended::Failed(Failure::new(format!("the handler panicked: {}", panic_text(&*panic))))
        }
        Err(_) => {
            Ended::Failed(Failure::new(format!("the handler did not end within {} s", limit.as_secs())))
        }
    }
}

async fn perform(shared: &Shared, task: &Arc<Task>) -> Ended {
    match action(shared, task) {
        None => Ended::Unknown,
        Some(Action::Plain(run)) => match run(task.clone()).await {
            Ok(output) => Ended::Output(output),
            Err(failure) => Ended::Failed(failure),
        },
        Some(Action::Committed(run)) => {
            let committed = in_transaction(shared, task, |task, connection| run(task, connection)).await;
            committed.unwrap_or_else(Ended::Failed)
        }
        Some(Action::Manual) => Ended::Failed(Failure::new(
            "this step is completed by hand, and yet a message of it came on a queue",
        )),
    }
}

/// None for a step that this worker's program does not have: it was added by a younger one.
fn action(shared: &Shared, task: &Task) -> Option<Action> {
    shared.flows.get(&task.flow)?.actions.get(&task.step).cloned()
}

/// What is said of a task that this worker cannot do.
pub(super) fn unknown(shared: &Shared, task: &Task) -> String {
    let known = shared.flows.get(&task.flow).into_iter();
    format!(
        "this worker has no handler for step {:?} of flow {:?}, and leaves its tasks to others: it has {}",
        task.step,
        task.flow,
        list(known.flat_map(|program| program.actions.keys().map(String::as_str)))
    )
}

/// Runs a handler in a transaction, completes the task in it, and commits. Who was not the task's any more takes everything back.
async fn in_transaction<H>(shared: &Shared, task: &Arc<Task>, run: H) -> Result<Ended, Failure>
where
    H: for<'c> FnOnce(Arc<Task>, &'c mut sqlx::PgConnection) -> futures_util::future::BoxFuture<'c, Answer>,
{
    let mut transaction = shared.pool.begin().await?;
    let output = run(task.clone(), &mut transaction).await?;
    let rows: TaskRows = std::iter::once(&**task).collect();
    let outcomes = store::complete_tasks(&mut *transaction, &rows, vec![Json(&output)]).await?;
    match outcomes.first() {
        Some(Completed::Done) => {
            transaction.commit().await?;
            Ok(Ended::Committed)
        }
        Some(Completed::TooLarge) => Err(too_large(&output)),
        Some(Completed::RunTooLarge) => Err(run_too_large(&output)),
        _ => {
            transaction.rollback().await?;
            Ok(Ended::Lost)
        }
    }
}

/// What is said of an output that the database does not take.
pub(super) fn too_large(output: &RawValue) -> Failure {
    Failure::fatal(format!("the output of {} bytes is over the limit of the database", output.get().len()))
}

/// What is said of an output that the database would take of another run.
pub(super) fn run_too_large(output: &RawValue) -> Failure {
    Failure::fatal(format!(
        "with this output of {} bytes, all outputs of the run together are over the limit of the database (max_run_output_bytes)",
        output.get().len()
    ))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without words".to_owned())
}
