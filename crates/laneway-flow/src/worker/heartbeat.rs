//! Signs of life: of the worker, of the tasks that it has in hand, and of other workers that give none.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::Shared;
use crate::handler::Task;
use crate::store::{self, TaskKey, TaskRows};

/// Looks after dead workers once in so many signs of life; one living worker is enough for all dead ones.
const RESCUE_EVERY: u32 = 2;

/// Beats until the worker is gone. It goes on while the worker stops, so that nobody takes what it still finishes.
pub(super) async fn beat(shared: Arc<Shared>) {
    let period = period(&shared);
    let (mut beats, mut trouble) = (0_u32, false);
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
    extend(shared).await?;
    if beats.is_multiple_of(RESCUE_EVERY) {
        let rescued = store::rescue(&shared.control, shared.settings.dead_after_seconds).await?;
        if rescued > 0 {
            shared.news.notify_one();
        }
    }
    Ok(())
}

/// Keeps what is in hand, and tells the handlers of what is no longer ours.
async fn extend(shared: &Shared) -> Result<(), crate::error::FlowError> {
    let mut by_visibility: HashMap<u32, Vec<_>> = HashMap::new();
    for held in shared.hand.all() {
        by_visibility.entry(shared.queues[held.1].visibility).or_default().push(held);
    }
    for (seconds, held) in by_visibility {
        let rows: TaskRows = held.iter().map(|(task, ..)| &**task).collect();
        let ours: HashSet<TaskKey> =
            store::extend_tasks(&shared.control, &rows, seconds).await?.into_iter().collect();
        // One may also have been settled since we looked; then nobody hears this.
        let lost = held.iter().filter(|(task, ..)| !ours.contains(&key(task)));
        lost.for_each(|(.., lost)| lost.notify_one());
    }
    Ok(())
}

fn key(task: &Task) -> TaskKey {
    (task.run_id, task.step.clone(), task.index)
}
