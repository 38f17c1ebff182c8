//! The end, in numbered steps. `docs/design/shutdown.md` says why these and in this order.

#[cfg(feature = "tokio")]
use std::task::Poll;
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

#[cfg(feature = "tokio")]
use crate::builder::Spawn;
use crate::{
    admission::Wish,
    dispatcher::Locked,
    engine::{Layout, Shared},
    message::Message,
    stats::Account,
    sync::yield_now,
    worker::Seat,
};

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
    /// Step 1: no more messages. Not while the layout is replaced: dispatchers that come with it have to be closed, too.
    pub(crate) fn close(&self) {
        let _changing = crate::sync::lock(&self.changing);
        self.close_admission();
    }

    /// Closes when the last slot has gone with its runtime: whoever waited for room would wait for ever. (Without the lock above, which this thread may have: a change that
    /// spawns a slot on a runtime that is no more drops it at once. What comes with that change has the flag to go by.)
    #[cfg(feature = "tokio")]
    pub(crate) fn close_if_abandoned(&self) {
        let is_ending = self.give_way.load(Ordering::Acquire);
        let has_slots = matches!(self.spawn, Spawn::Slots(..));
        if has_slots
            && !is_ending
            && self.layout.load().seats.iter().all(|seat| seat.gone.load(Ordering::Acquire))
        {
            self.close_admission();
        }
    }

    fn close_admission(&self) {
        // The flag first, and every way in looks at it: who was refused once is not accepted later by a dispatcher that is still open.
        self.detour.store(true, Ordering::Release);
        self.closed.store(true, Ordering::Release);
        for dispatcher in &self.layout.load().dispatchers {
            dispatcher.close();
        }
        self.engine_bound.room.announce();
        // A change of the topology that waits for streams will not be made any more.
        self.quiet.announce();
    }

    /// Waits until nothing will happen any more without somebody's doing. False if that has not come by the deadline.
    pub(crate) fn wait_quiet(&self, deadline: Instant) -> bool {
        self.wait_until(deadline, || self.is_quiet())
    }

    /// Dispatchers are looked at one after the other, and a handler of one that is still at work may submit to another that was found quiet. So all are looked at
    /// twice: if nothing was accepted between, all were quiet together at the moment between the two looks.
    pub(crate) fn is_quiet(&self) -> bool {
        let first = self.quiet_since();
        first.is_some() && first == self.quiet_since() && self.unmapping.load(Ordering::Acquire) == 0
    }

    /// What tells this look from another with something between them; none if any dispatcher is not quiet.
    fn quiet_since(&self) -> Option<(u64, Vec<u64>)> {
        let moves = self.moves.begun();
        let layout = self.layout.load();
        let dispatchers = layout.dispatchers.iter().chain(&layout.retired);
        let accepted: Option<Vec<u64>> = dispatchers.map(|dispatcher| dispatcher.quiet_since()).collect();
        accepted.map(|accepted| (moves, accepted))
    }

    /// Step 3: no more turns; those that run give way.
    pub(crate) fn stop(&self) {
        self.give_way.store(true, Ordering::Release);
        let layout = self.layout.load();
        for dispatcher in layout.dispatchers.iter().chain(&layout.retired) {
            dispatcher.stop();
        }
    }

    /// Step 4: what is left. Under all locks: a handler that comes back meanwhile settles before or after, and its message is in one of the three parts of the report.
    pub(crate) fn give_back(&self) -> ShutdownReport<K, M> {
        let layout = self.layout.load_full();
        let mut past = layout.past.clone();
        let mut left = Vec::new();
        for dispatcher in &mut self.lock_all(&layout) {
            dispatcher.give_back(&mut left);
            past.add(&dispatcher.stats());
        }
        let returned: Vec<_> = left.into_iter().map(|item| item.message).collect();
        let still_running = past.account.outstanding as usize - returned.len();
        ShutdownReport { account: past.account, returned, still_running }
    }

    /// All dispatchers that are or were, while no lane is on its way between two of them. The order is that of a change, of which there is none any more. A worker brings a lane over
    /// without running any code of the user's, so that is waited for; but for no longer than it could take.
    fn lock_all<'a>(&self, layout: &'a Layout<K, M>) -> Vec<Locked<'a, K, M>> {
        let until = Instant::now() + ON_THE_WAY;
        loop {
            let dispatchers = layout.dispatchers.iter().chain(&layout.retired);
            let locked: Vec<_> = dispatchers.map(|dispatcher| dispatcher.lock_for_change()).collect();
            if self.moves.begun() == self.moves.ended() || Instant::now() > until {
                return locked;
            }
            drop(locked);
            yield_now();
        }
    }

    pub(crate) fn wait_until(&self, deadline: Instant, mut reached: impl FnMut() -> bool) -> bool {
        loop {
            let entered = self.quiet.enter(Wish::ANYTHING, None);
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
        // From here on no change is made, and one that waits gives up. Operators may still resume what is parked.
        self.close();
        self.wait_quiet(Instant::now() + drain.min(FAR_FUTURE));
        self.stop();
        let grace = Instant::now() + self.settings.shutdown_grace.min(FAR_FUTURE);
        self.wait_until(grace, || self.is_deserted());
        self.give_back()
    }

    /// Whether all workers have gone.
    fn is_deserted(&self) -> bool {
        let layout = self.layout.load();
        let gone = |seat: &Arc<Seat<K, M>>| seat.gone.load(Ordering::Acquire);
        layout.seats.iter().chain(&layout.leaving).all(gone)
    }

    /// What the drop of an engine does: all steps without time to drain. Slots are not waited for, because the thread that drops the engine may be the one that they
    /// need to go; each goes when its handler has ended.
    pub(crate) fn let_go(&self) {
        match &self.spawn {
            #[cfg(feature = "tokio")]
            Spawn::Slots(..) => {
                self.close();
                self.stop();
                drop(self.give_back());
            }
            _ => drop(self.shut_down(Duration::ZERO)),
        }
    }
}

/// The same, waited for by a task.
#[cfg(feature = "tokio")]
impl<K, M> Shared<K, M> {
    /// All four steps.
    pub(crate) async fn shut_down_async(&self, drain: Duration) -> ShutdownReport<K, M> {
        self.close();
        self.until(drain, || self.is_quiet()).await;
        self.stop();
        self.until(self.settings.shutdown_grace, || self.is_deserted()).await;
        self.give_back()
    }

    async fn until(&self, limit: Duration, mut reached: impl FnMut() -> bool) {
        let mut place = None;
        let reached = std::future::poll_fn(|context| {
            let entered = self.quiet.enter(Wish::ANYTHING, Some(context.waker()));
            // Looked at behind the entry, as by a thread that waits.
            if reached() {
                return Poll::Ready(());
            }
            place = Some(entered);
            Poll::Pending
        });
        // The time that is up, and the last look, are the caller's matter.
        let _ = tokio::time::timeout(limit.min(FAR_FUTURE), reached).await;
        drop(place);
    }
}

/// A lane gets from one dispatcher to another within microseconds, unless its worker's thread has no core: this is long for that, too.
const ON_THE_WAY: Duration = Duration::from_secs(1);

/// Longer than anybody waits, and short enough to be added to a clock.
const FAR_FUTURE: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);
