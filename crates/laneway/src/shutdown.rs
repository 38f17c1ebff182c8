//! The end, in numbered steps. `docs/design/shutdown.md` says why these and in this order.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use crate::{engine::Shared, message::Message, stats::Account};

/// What a shutdown leaves.
#[derive(Debug)]
#[must_use = "it holds the messages that were not handled"]
pub struct ShutdownReport<K, M> {
    /// The final account. What was given back or still runs is outstanding: `outstanding == returned.len() + still_running`.
    pub account: Account,
    /// What was not handled, per key in its order.
    pub returned: Vec<Message<K, M>>,
    /// Messages whose handlers had not come back when the grace was over. Their workers are left behind.
    pub still_running: usize,
}

impl<K, M> Shared<K, M> {
    /// Step 1: no more messages.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        for dispatcher in &self.layout.load().dispatchers {
            dispatcher.close();
        }
        if let Some(bound) = &self.engine_bound {
            bound.room.announce();
        }
    }

    /// Waits until nothing will happen any more without somebody's doing. False if that has not come by the deadline.
    pub(crate) fn wait_quiet(&self, deadline: Instant) -> bool {
        self.wait_until(deadline, || self.layout.load().dispatchers.iter().all(|dispatcher| dispatcher.is_quiet()))
    }

    /// Step 3: no more turns; waits for those that run.
    fn stop(&self, deadline: Instant) -> bool {
        self.give_way.store(true, Ordering::Release);
        let layout = self.layout.load();
        for dispatcher in &layout.dispatchers {
            dispatcher.stop();
        }
        self.wait_until(deadline, || layout.seats.iter().all(|seat| seat.gone.load(Ordering::Acquire)))
    }

    pub(crate) fn wait_until(&self, deadline: Instant, mut reached: impl FnMut() -> bool) -> bool {
        loop {
            let entered = self.quiet.enter(0);
            if reached() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            entered.wait(Some(left));
        }
    }

    /// All four steps.
    pub(crate) fn shut_down(&self, drain: Duration) -> ShutdownReport<K, M> {
        let _changes = crate::sync::lock(&self.changing);
        self.close();
        let now = Instant::now();
        self.wait_quiet(now + drain.min(FAR_FUTURE));
        let grace = self.settings.shutdown_grace.min(FAR_FUTURE);
        self.stop(Instant::now() + grace);
        let layout = self.layout.load();
        let mut returned = Vec::new();
        for dispatcher in &layout.dispatchers {
            returned.extend(dispatcher.give_back().into_iter().map(|item| item.message));
        }
        let still_running = layout.dispatchers.iter().map(|dispatcher| dispatcher.taken_messages()).sum();
        let mut account = Account::default();
        layout.dispatchers.iter().for_each(|dispatcher| account += dispatcher.stats().account);
        ShutdownReport { account, returned, still_running }
    }
}

/// Longer than anybody waits, and short enough to be added to a clock.
const FAR_FUTURE: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);
