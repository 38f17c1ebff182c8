//! Saying what came of tasks, many in one call.
//!
//! There is one settler. While its call is under way, what ends meanwhile gathers in the inbox, and goes together in the next call: the busier
//! the worker, the larger the batches, without any waiting for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde_json::value::RawValue;
use sqlx::types::Json;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use super::Shared;
use super::poll::backoff;
use super::run::{run_too_large, too_large, unknown};
use super::tally::Tally;
use crate::error::FlowError;
use crate::handler::{Failure, Task};
use crate::store::{self, Completed, Failed, TaskRows};

/// The most that go in one call: its locks are held until all of them are written.
const BATCH_MAX: usize = 512;

/// What came of a task.
pub(super) enum Settlement {
    /// Complete it.
    Complete { ticket: u64, task: Arc<Task>, output: Box<RawValue> },
    /// Fail it.
    Fail { ticket: u64, task: Arc<Task>, failure: Failure },
    /// Its own transaction has completed it.
    Committed { ticket: u64, task: Arc<Task> },
    /// It was no longer ours.
    Lost { ticket: u64, task: Arc<Task> },
    /// This worker cannot do it, and another may.
    Unknown { ticket: u64, task: Arc<Task> },
    /// Everything that was sent before this has been settled when it is answered.
    Flush(oneshot::Sender<()>),
}

struct Completion {
    ticket: u64,
    task: Arc<Task>,
    output: Box<RawValue>,
}

struct Failing {
    ticket: u64,
    task: Arc<Task>,
    failure: Failure,
}

/// Settles until nobody is left who could send.
pub(super) async fn settle(shared: Arc<Shared>, mut inbox: mpsc::Receiver<Settlement>) {
    let mut gathered = Vec::with_capacity(BATCH_MAX);
    while inbox.recv_many(&mut gathered, BATCH_MAX).await > 0 {
        let (mut completions, mut failures) = (Vec::new(), Vec::new());
        let (mut strangers, mut flushes) = (Vec::new(), Vec::new());
        for settlement in gathered.drain(..) {
            match settlement {
                Settlement::Complete { ticket, task, output } => {
                    completions.push(Completion { ticket, task, output })
                }
                Settlement::Fail { ticket, task, failure } => {
                    failures.push(Failing { ticket, task, failure })
                }
                Settlement::Committed { ticket, task } => {
                    shared.hand.counters.completed.fetch_add(1, Relaxed);
                    count(&shared, &task, |tally| &tally.completed);
                    shared.hand.remove([ticket]);
                }
                Settlement::Lost { ticket, task } => {
                    shared.hand.counters.ignored.fetch_add(1, Relaxed);
                    count(&shared, &task, |tally| &tally.lost);
                    shared.hand.remove([ticket]);
                }
                Settlement::Unknown { ticket, task } => strangers.push((ticket, task)),
                Settlement::Flush(answer) => flushes.push(answer),
            }
        }
        complete(&shared, completions, &mut failures).await;
        fail(&shared, failures).await;
        hand_back(&shared, strangers).await;
        for answer in flushes {
            let _ = answer.send(());
        }
    }
}

/// Counts one more of the queue of a task.
fn count(shared: &Shared, task: &Task, of: fn(&Tally) -> &AtomicU64) {
    if let Some(tally) = shared.tally(task) {
        of(tally).fetch_add(1, Relaxed);
    }
}

/// Completes all of them, or says which the database did not take.
async fn complete(shared: &Shared, completions: Vec<Completion>, failures: &mut Vec<Failing>) {
    if completions.is_empty() {
        return;
    }
    let rows: TaskRows = completions.iter().map(|it| &*it.task).collect();
    let mut patience = Patience::new(shared, "completed");
    let answer = loop {
        let outputs = completions.iter().map(|it| Json(&*it.output)).collect();
        match store::complete_tasks(&shared.control, &rows, outputs).await {
            Err(error) if error.is_transient() => patience.after(&error).await,
            answer => break answer,
        }
    };
    match answer {
        Ok(outcomes) => {
            let is_alone = completions.len() == 1;
            let (mut left, mut again) = (Vec::with_capacity(completions.len()), Vec::new());
            for (it, outcome) in completions.into_iter().zip(outcomes) {
                let counters = &shared.hand.counters;
                match outcome {
                    Completed::Done => {
                        counters.completed.fetch_add(1, Relaxed);
                        count(shared, &it.task, |tally| &tally.completed);
                    }
                    Completed::Ignored => {
                        counters.ignored.fetch_add(1, Relaxed);
                        count(shared, &it.task, |tally| &tally.lost);
                    }
                    Completed::TooLarge => {
                        let failure = too_large(&it.output);
                        failures.push(Failing { ticket: it.ticket, task: it.task, failure });
                        continue;
                    }
                    // Refused outputs before it may have counted against it: by itself it may fit.
                    Completed::RunTooLarge if !is_alone => {
                        again.push(it);
                        continue;
                    }
                    Completed::RunTooLarge => {
                        let failure = run_too_large(&it.output);
                        failures.push(Failing { ticket: it.ticket, task: it.task, failure });
                        continue;
                    }
                }
                left.push(it.ticket);
            }
            shared.hand.remove(left);
            for it in again {
                Box::pin(complete(shared, vec![it], failures)).await;
            }
        }
        // One of them is at fault, and the others must not suffer: each gets a call of its own.
        Err(_) if completions.len() > 1 => {
            for it in completions {
                Box::pin(complete(shared, vec![it], failures)).await;
            }
        }
        Err(error) if error.blames_data() => failures.extend(completions.into_iter().map(|it| Failing {
            ticket: it.ticket,
            task: it.task,
            failure: Failure::fatal(format!("the database did not take the output: {error}")),
        })),
        Err(error) => {
            // Not the task's fault. The database will give it to somebody when its time is over.
            shared.trouble(&format!("a task could not be completed: {error}"));
            shared.hand.remove(completions.iter().map(|it| it.ticket));
        }
    }
}

async fn fail(shared: &Shared, failures: Vec<Failing>) {
    if failures.is_empty() {
        return;
    }
    // A zero byte is the one character that Postgres cannot keep in a text.
    let errors: Vec<String> = failures.iter().map(|it| it.failure.message().replace('\0', "")).collect();
    let permanent: Vec<bool> = failures.iter().map(|it| it.failure.is_fatal()).collect();
    let rows: TaskRows = failures.iter().map(|it| &*it.task).collect();
    let mut patience = Patience::new(shared, "failed");
    let answer = loop {
        match store::fail_tasks(&shared.control, &rows, &errors, &permanent).await {
            Err(error) if error.is_transient() => patience.after(&error).await,
            answer => break answer,
        }
    };
    match answer {
        Ok(outcomes) => {
            for (it, outcome) in failures.iter().zip(outcomes) {
                let counters = &shared.hand.counters;
                let (counter, tally): (_, fn(&Tally) -> &AtomicU64) = match outcome {
                    Failed::Retried => (&counters.retried, |tally| &tally.retried),
                    Failed::Final => (&counters.failed, |tally| &tally.failed),
                    Failed::Ignored => (&counters.ignored, |tally| &tally.lost),
                };
                counter.fetch_add(1, Relaxed);
                count(shared, &it.task, tally);
            }
            shared.hand.remove(failures.iter().map(|it| it.ticket));
        }
        Err(_) if failures.len() > 1 => {
            for it in failures {
                Box::pin(fail(shared, vec![it])).await;
            }
        }
        Err(error) => {
            // The database will give it to somebody when its time is over.
            shared.trouble(&format!("a failed task could not be reported: {error}"));
            shared.hand.remove(failures.iter().map(|it| it.ticket));
        }
    }
}

/// Gives tasks to others that this worker has no handler for. From the first of a step on, its reads leave that step to others: it is told once,
/// and nobody has to wait.
async fn hand_back(shared: &Shared, strangers: Vec<(u64, Arc<Task>)>) {
    for (_, task) in &strangers {
        let is_new = shared.strange_steps().insert(format!("{}.{}", task.flow, task.step));
        if is_new {
            shared.trouble(&unknown(shared, task));
        }
    }
    let rows: TaskRows = strangers.iter().map(|(_, task)| &**task).collect();
    let mut patience = Patience::new(shared, "handed back");
    let answer = loop {
        match store::release_tasks(&shared.control, &rows, 0).await {
            Err(error) if error.is_transient() => patience.after(&error).await,
            answer => break answer,
        }
    };
    if let Err(error) = answer {
        // The database will give them to somebody when their time is over.
        shared.trouble(&format!("tasks could not be handed back: {error}"));
    }
    shared.hand.remove(strangers.iter().map(|(ticket, _)| *ticket));
}

/// Waits between calls until the database has answered. A call whose answer was lost may have been made: the next then finds the tasks settled.
struct Patience<'a> {
    shared: &'a Shared,
    what: &'static str,
    failures: u32,
}

impl<'a> Patience<'a> {
    fn new(shared: &'a Shared, what: &'static str) -> Self {
        shared.hand.counters.settles.fetch_add(1, Relaxed);
        Self { shared, what, failures: 0 }
    }

    async fn after(&mut self, error: &FlowError) {
        self.failures += 1;
        if self.failures == 1 {
            self.shared.trouble(&format!("tasks could not be {}, trying again: {error}", self.what));
        }
        sleep(backoff(self.failures)).await;
    }
}
