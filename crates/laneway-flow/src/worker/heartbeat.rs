//! Signs of life: of the worker, of the tasks that it has in hand, and of other workers that give none.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use super::Shared;
use super::hand::{Held, Stage};
use super::tally;
use crate::handler::Task;
use crate::store::{self, TaskRows};

/// Looks after dead workers once in so many signs of life; one living worker is enough for all dead ones.
const RESCUE_EVERY: u32 = 2;

/// Beats until the worker is gone. It goes on while the worker stops, so that nobody takes what it still finishes.
pub(super) async fn beat(shared: Arc<Shared>) {
    let period = period(&shared);
    let (mut beats, mut trouble, mut uncounted) = (0_u32, false, false);
    loop {
        let next = Instant::now() + period;
        match once(&shared, beats).await {
            Ok(()) => trouble = false,
            Err(error) if !trouble => {
                trouble = true;
                shared.trouble(&format!("no sign of life could be given, trying again: {error}"));
            }
            Err(_) => {}
        }
        // Beside it: a role that was not given the right to count does its work all the same, and so does one whose row somebody holds.
        let error = match timeout(period / 3, tally::tell(&shared)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("no answer in time".to_owned()),
        };
        if let Some(error) = error.as_ref().filter(|_| !uncounted && !trouble) {
            shared.trouble(&format!("what was counted could not be told, trying again: {error}"));
        }
        uncounted = error.is_some();
        beats = beats.wrapping_add(1);
        sleep_until(next).await;
    }
}

/// As often as the settings say, and often enough for the shortest visibility.
fn period(shared: &Shared) -> Duration {
    let shortest = shared.queues.iter().map(|queue| queue.visibility).min().unwrap_or(30);
    let asked = Duration::from_secs(shared.settings.heartbeat_seconds.into());
    asked.min(Duration::from_secs(shortest.into()) / 3)
}

async fn once(shared: &Shared, beats: u32) -> Result<(), crate::error::FlowError> {
    match store::heartbeat(&shared.control, shared.id).await? {
        Some(true) => {}
        Some(false) if *shared.stop.borrow() => {}
        Some(false) => {
            shared.trouble("the database asks this worker to stop");
            shared.stop.send_replace(true);
        }
        // It was away for so long that its row was pruned.
        None => shared.register(&shared.control).await?,
    }
    let (kept, back) = let_go(shared);
    extend(shared, kept).await?;
    hand_back(shared, &back).await?;
    if beats.is_multiple_of(RESCUE_EVERY) {
        let rescued = store::rescue(&shared.control, shared.settings.dead_after_seconds).await?;
        if rescued > 0 {
            shared.news.notify_one();
        }
    }
    Ok(())
}

/// Lets go of what has been in hand for longer than its timeout and the grace: a handler that blocks its thread has not heard its timeout, and would
/// keep its task, and those that wait behind it, for ever. What has not begun is handed back; what has is found stalled. The answer is the rest, and what is
/// to be handed back.
fn let_go(shared: &Shared) -> (Vec<Held>, Vec<Arc<Task>>) {
    let grace = shared.settings.overdue_seconds;
    let (mut kept, mut back) = (Vec::new(), Vec::new());
    for held in shared.hand.all() {
        let timeout = u32::try_from(held.task.timeout_seconds).unwrap_or(1);
        let limit = Duration::from_secs(u64::from(timeout) + u64::from(grace));
        match held.progress.let_go_after(limit) {
            None if !held.progress.is_let_go() => kept.push(held),
            None => {}
            Some(stage) => {
                shared.hand.counters.overdue.fetch_add(1, Relaxed);
                shared.trouble(&overdue(&held, stage, timeout, grace));
                if stage == Stage::Waits {
                    back.push(held.task);
                }
            }
        }
    }
    (kept, back)
}

/// For how many seconds nobody sees a task that waited here in vain: until another worker has had its turn.
const HAND_BACK_DELAY: i32 = 5;

/// Hands back, for a moment later: this worker, which has not got on with them, would be the first to read them again.
async fn hand_back(shared: &Shared, back: &[Arc<Task>]) -> Result<(), crate::error::FlowError> {
    let rows: TaskRows = back.iter().map(|task| &**task).collect();
    store::release_tasks(&shared.control, &rows, HAND_BACK_DELAY).await?;
    Ok(())
}

fn overdue(held: &Held, stage: Stage, timeout: u32, grace: u32) -> String {
    let task = &held.task;
    let what = match stage {
        Stage::Waits => "has waited in this worker for longer, and is handed back",
        Stage::Ended => {
            "has ended, but the database could not be told for longer: others will do the task again"
        }
        Stage::Runs | Stage::LetGo => {
            "has not ended after it: does it block its thread? Others will get the task"
        }
    };
    format!(
        "the handler of step {:?} of run {} has {timeout} s and a grace of {grace} s, and {what}",
        task.step, task.run_id
    )
}

/// Keeps these, and tells the handlers of what is no longer ours.
async fn extend(shared: &Shared, kept: Vec<Held>) -> Result<(), crate::error::FlowError> {
    let mut by_visibility: HashMap<u32, Vec<Held>> = HashMap::new();
    for held in kept {
        by_visibility.entry(shared.queues[held.queue].visibility).or_default().push(held);
    }
    for (seconds, held) in by_visibility {
        let rows: TaskRows = held.iter().map(|held| &*held.task).collect();
        let ours: HashSet<i64> =
            store::extend_tasks(&shared.control, &rows, seconds).await?.into_iter().collect();
        // One may also have been settled since we looked; then nobody hears this.
        let lost = held.iter().filter(|held| !ours.contains(&held.task.start_number));
        lost.for_each(|held| held.progress.lost.notify_one());
    }
    Ok(())
}
