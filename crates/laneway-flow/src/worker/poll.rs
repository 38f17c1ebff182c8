//! Taking tasks: one read for all queues, and one connection's wait for all of their announcements.

use std::cmp::min;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use laneway::{Handle, Priority as LanePriority};
use sqlx::postgres::PgListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::Shared;
use super::run::Job;
use super::settings::Polled;
use super::strategy::{QueueView, Share, Strategy, primary_first};
use crate::error::FlowError;
use crate::handler::Task;
use crate::store::{self, Read, TaskRows};

/// How long to gather room while handlers are quick: a read for a whole batch costs little more than one for a single task.
const GATHER: Duration = Duration::from_millis(5);

/// After a failed call: the first wait, and the longest.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// How long to wait after so many failures in a row.
pub(super) fn backoff(failures: u32) -> Duration {
    min(BACKOFF_MIN * 2_u32.pow(failures.min(10)), BACKOFF_MAX)
}

/// Reads until the worker is to stop.
pub(super) async fn poll(
    shared: Arc<Shared>,
    engine: Handle<u128, Job>,
    mut strategy: Box<dyn Strategy>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut poller =
        Poller { gave: vec![0; shared.queues.len()], failures: 0, number: 0, doubts: VecDeque::new() };
    while !*stopped.borrow_and_update() {
        tokio::select! {
            _ = stopped.changed() => break,
            () = gather_room(&shared) => {}
        }
        // A read that has begun is awaited to its end: what it took must not be forgotten.
        let wait = poller.read(&shared, &engine, &mut *strategy).await;
        if wait.is_zero() {
            continue;
        }
        tokio::select! {
            _ = stopped.changed() => break,
            () = shared.news.notified() => {}
            () = sleep(wait) => {}
        }
    }
}

/// Waits until there is room; while handlers are quick, for a moment longer, until there is room for a good part of a batch.
async fn gather_room(shared: &Shared) {
    let hand = &shared.hand;
    while hand.free_places() == 0 {
        hand.wait_room().await;
    }
    if hand.is_quick() {
        let enough = hand.limit() / 2;
        let _ = timeout(GATHER, async {
            while hand.free_places() < enough {
                hand.wait_room().await;
            }
        })
        .await;
    }
}

struct Poller {
    /// What each queue gave in the last read.
    gave: Vec<usize>,
    /// Failed calls in a row.
    failures: u32,
    /// Counts tasks, to give each a lane of its own.
    number: u128,
    /// When to ask whether the database has given us what we do not know of: a read may have been done, and its answer lost.
    doubts: VecDeque<Instant>,
}

/// After a failed read the database is asked at once, and again when whatever was still under way there has ended.
const DOUBT: Duration = Duration::from_secs(10);

impl Poller {
    /// One read. The answer is how long to wait before the next one if nothing is announced.
    async fn read(
        &mut self,
        shared: &Shared,
        engine: &Handle<u128, Job>,
        strategy: &mut dyn Strategy,
    ) -> Duration {
        if let Err(error) = self.clear_doubts(shared).await {
            return self.failed(shared, error).await;
        }
        let (free, in_hand) = shared.hand.free();
        let plan = self.plan(shared, strategy, free, &in_hand);
        if plan.is_empty() {
            // Every queue has as much in hand as it may.
            let _ =
                timeout(shared.settings.patience(), unless_stopped(shared, shared.hand.wait_room())).await;
            return Duration::ZERO;
        }
        shared.hand.counters.reads.fetch_add(1, Relaxed);
        let is_asked = |queue: &usize| plan.iter().any(|share| share.queue == *queue);
        for queue in (0..shared.queues.len()).filter(is_asked) {
            shared.hand.tallies[queue].polls.fetch_add(1, Relaxed);
        }
        let read = request(shared, &plan, free);
        match store::read_and_start(&shared.control, read).await {
            Ok(tasks) => {
                self.failures = 0;
                let more = self.is_there_more(shared, &plan, &tasks, free);
                self.take(shared, engine, tasks);
                if more { Duration::ZERO } else { shared.settings.patience() }
            }
            Err(error) => self.failed(shared, error).await,
        }
    }

    fn plan(
        &self,
        shared: &Shared,
        strategy: &mut dyn Strategy,
        free: usize,
        in_hand: &[usize],
    ) -> Vec<Share> {
        let with_counts = shared.queues.iter().zip(in_hand).zip(&self.gave);
        let views: Vec<QueueView<'_>> =
            with_counts.map(|((queue, &in_hand), &gave)| view(queue, in_hand, gave)).collect();
        let mut plan = strategy.plan(&views, free);
        let primary = shared.settings.primary_queue.as_ref();
        if let Some(primary) =
            primary.and_then(|name| shared.queues.iter().position(|queue| queue.name == *name))
        {
            plan = primary_first(plan, primary, free);
        }
        bounded(plan, &views)
    }

    /// Whether another read at once may find more: a turn was used up, or all places were.
    fn is_there_more(&mut self, shared: &Shared, plan: &[Share], tasks: &[Task], free: usize) -> bool {
        self.gave.fill(0);
        for task in tasks {
            if let Some(place) = place_of(shared, task) {
                self.gave[place] += 1;
            }
        }
        let mut most = vec![0; self.gave.len()];
        plan.iter().for_each(|share| most[share.queue] += share.most);
        tasks.len() >= free || self.gave.iter().zip(&most).any(|(gave, most)| *gave > 0 && gave >= most)
    }

    fn take(&mut self, shared: &Shared, engine: &Handle<u128, Job>, tasks: Vec<Task>) {
        shared.hand.counters.taken.fetch_add(tasks.len() as u64, Relaxed);
        for task in tasks {
            // A queue that the read did not ask for cannot be in its answer.
            let Some(place) = place_of(shared, &task) else { continue };
            self.number += 1;
            shared.hand.tallies[place].taken.fetch_add(1, Relaxed);
            let lane = if shared.settings.ordered_runs { task.run_id.as_u128() } else { self.number };
            let task = Arc::new(task);
            let (ticket, progress) = shared.hand.put(task.clone(), place);
            let message = laneway::Message::new(lane, Job { ticket, task, progress, queue: place });
            let message = message.priority(tier(shared.queues[place].priority));
            if engine.try_submit(message).is_err() {
                // Only an engine that is closed refuses: its bound is above the hand's. What is in the hand is handed back at the end.
                break;
            }
        }
    }

    /// Hands back what a lost answer may have given us. Nobody else puts tasks in the hand, so that what is not in it is not known.
    async fn clear_doubts(&mut self, shared: &Shared) -> Result<(), FlowError> {
        while self.doubts.front().is_some_and(|due| *due <= Instant::now()) {
            let hand = shared.hand.all();
            let known: TaskRows = hand.iter().map(|held| &*held.task).collect();
            store::release_unknown(&shared.control, shared.id, &known).await?;
            self.doubts.pop_front();
        }
        Ok(())
    }

    async fn failed(&mut self, shared: &Shared, error: FlowError) -> Duration {
        self.failures += 1;
        if self.doubts.is_empty() {
            self.doubts.extend([Instant::now(), Instant::now() + DOUBT]);
        }
        let wait = backoff(self.failures);
        if self.failures == 1 || !error.is_transient() {
            shared.trouble(&format!("no tasks could be read, trying again: {error}"));
        }
        if matches!(error, FlowError::QueueMissing(_)) {
            let queues: Vec<&str> = shared.queues.iter().map(|queue| queue.name.as_str()).collect();
            match store::repair_queues(&shared.control, &queues).await {
                Ok(_) if self.failures == 1 => return Duration::from_millis(1),
                // Its flow was deleted: there is nothing to make again, and no hurry.
                Ok(_) => {}
                Err(error) => shared.trouble(&format!("the queue could not be made again: {error}")),
            }
        }
        // Not the patience of an idle worker, and not an announcement's: the database has a moment to come back.
        unless_stopped(shared, sleep(wait)).await;
        Duration::ZERO
    }
}

/// Waits for something that has no effect of its own, or until the worker is to stop.
async fn unless_stopped(shared: &Shared, wait: impl Future<Output = ()>) {
    let mut stopped = shared.stop.subscribe();
    tokio::select! {
        _ = stopped.wait_for(|stopped| *stopped) => {}
        () = wait => {}
    }
}

fn view(queue: &Polled, in_hand: usize, gave: usize) -> QueueView<'_> {
    let room = min(queue.batch, queue.concurrency.saturating_sub(in_hand));
    QueueView { name: &queue.name, priority: queue.priority, weight: queue.weight, room, in_hand, gave }
}

/// Cuts a plan to what its queues have room for, over all of a queue's turns.
fn bounded(plan: Vec<Share>, views: &[QueueView<'_>]) -> Vec<Share> {
    let mut room: Vec<usize> = views.iter().map(|view| view.room).collect();
    let mut cut = |share: Share| {
        let most = min(share.most, *room.get(share.queue)?);
        room[share.queue] -= most;
        (most > 0).then_some(Share { most, ..share })
    };
    plan.into_iter().filter_map(&mut cut).collect()
}

fn request<'a>(shared: &'a Shared, plan: &[Share], free: usize) -> Read<'a> {
    let queue = |share: &Share| &shared.queues[share.queue];
    let number = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    Read {
        queues: plan.iter().map(|share| queue(share).name.as_str()).collect(),
        limits: plan.iter().map(|share| number(share.most)).collect(),
        visibility: plan
            .iter()
            .map(|share| i32::try_from(queue(share).visibility).unwrap_or(i32::MAX))
            .collect(),
        flows: &shared.slugs,
        strange_steps: shared.strange_steps().iter().cloned().collect(),
        total: number(free),
        worker: shared.id,
    }
}

fn place_of(shared: &Shared, task: &Task) -> Option<usize> {
    shared.queues.iter().position(|queue| queue.name == task.queue)
}

/// A queue's priority as one of the engine's tiers: it decides among tasks in hand, as the strategy does among queues.
fn tier(priority: i32) -> LanePriority {
    match priority {
        ..0 => LanePriority::Low,
        0 => LanePriority::Normal,
        1..10 => LanePriority::High,
        10.. => LanePriority::Urgent,
    }
}

/// Waits for announcements of all queues on one connection, and wakes the poller.
pub(super) async fn listen(shared: Arc<Shared>) {
    if !shared.settings.listen {
        return;
    }
    let mut failures = 0;
    loop {
        if let Err(error) = hear(&shared, &mut failures).await {
            failures += 1;
            if failures == 1 {
                let seconds = shared.settings.max_poll_seconds;
                shared.trouble(&format!(
                    "announcements cannot be heard, looking every {seconds} s instead: {error}"
                ));
            }
        }
        sleep(backoff(failures)).await;
    }
}

async fn hear(shared: &Shared, failures: &mut u32) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(&shared.control).await?;
    listener.listen(store::QUEUE_CHANNEL).await?;
    *failures = 0;
    // What was announced before we listened.
    shared.news.notify_one();
    loop {
        match listener.try_recv().await? {
            Some(news) if shared.queues.iter().any(|queue| queue.name == news.payload()) => {
                shared.news.notify_one()
            }
            Some(_) => {}
            // The connection was lost and made again; what was announced meanwhile is not known.
            None => shared.news.notify_one(),
        }
    }
}
