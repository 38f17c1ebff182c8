//! What others ask of a dispatcher while it works, and what happens to it at the end.
//!
//! Operators come from `engine.rs`, the audit from the simulator, the steps of the end from `shutdown.rs`. All of them take the lanes lock and admit what has
//! been accepted before they look, so that what they see is the truth at one moment.

use std::sync::atomic::Ordering;

use super::{Dispatcher, Inner};
use crate::{
    admission::{Drops, Ingress, Refusals},
    clock::Clock,
    explain::{Explanation, Reason},
    lane::{Arrived, Lanes, State},
    stats::{Account, Counted, DispatcherStats},
    sync::lock,
};

/// What the ingress lock guards of the counts.
pub(super) struct Seen {
    accepted: u64,
    waiting: usize,
    drops: Drops,
    refusals: Refusals,
}

impl Seen {
    pub(super) fn of<K, M>(ingress: &Ingress<K, M>) -> Self {
        Seen {
            accepted: ingress.accepted,
            waiting: ingress.buffer.len(),
            drops: ingress.drops.clone(),
            refusals: ingress.refusals.clone(),
        }
    }
}

/// What an audit saw, for the next one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Audited {
    /// Whether there is something that a worker could do now.
    pub(crate) has_work: bool,
    outstanding: u64,
    /// Messages in the deepest lane.
    deepest: u64,
    lanes: u64,
    arrived: Arrived,
}

impl<K, M> Dispatcher<K, M> {
    /// Runs `act` on the lanes with everything admitted, and wakes somebody if that left work.
    pub(crate) fn operate<R>(&self, act: impl FnOnce(&mut Lanes<K, M>, &mut Counted, &mut u64) -> R) -> R {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        self.admit_all(inner);
        let before = inner.released;
        let result = act(&mut inner.lanes, &mut inner.counted, &mut inner.released);
        let released = inner.released;
        self.released.store(released, Ordering::Release);
        let work = inner.lanes.has_ready() || inner.lanes.next_due().is_some();
        let sleeper = if work { self.take_sleeper(inner) } else { None };
        drop(guard);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
        if released > before {
            // No worker has made this room, so none would announce it later.
            self.room.made_last(released);
        }
        result
    }

    pub(crate) fn set_paused(&self, paused: bool) {
        self.operate(|lanes, _, _| lanes.paused = paused);
    }

    /// Whether nothing will happen here any more without somebody's doing.
    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet_since().is_some()
    }

    /// If so, how many messages had been accepted until then.
    pub(crate) fn quiet_since(&self) -> Option<u64> {
        let inner = lock(&self.inner);
        let ingress = self.ingress();
        let quiet = inner.lanes.is_quiet() && inner.inbox.is_empty() && ingress.buffer.is_empty();
        quiet.then_some(ingress.accepted)
    }

    /// Whether a key has a lane here.
    pub(crate) fn has_lane(&self, fingerprint: u64) -> bool {
        self.operate(|lanes, _, _| lanes.standing(fingerprint).is_some())
    }

    pub(crate) fn explain(&self, fingerprint: u64, clock: &Clock) -> Explanation<K>
    where
        K: Clone,
    {
        let now = clock.now();
        let after = |at: u64| std::time::Duration::from_nanos(at.saturating_sub(now));
        let since = |at: u64| std::time::Duration::from_nanos(now.saturating_sub(at));
        self.operate(|lanes, _, _| {
            let Some(standing) = lanes.standing(fingerprint) else {
                let is_in_stream = lanes.is_in_stream(fingerprint);
                let reason = if is_in_stream { Reason::PerhapsRunning } else { Reason::Idle };
                return Explanation {
                    dispatcher: self.name.clone(),
                    waiting: 0,
                    in_flight: 0,
                    aside: 0,
                    reason,
                };
            };
            let note = standing.note;
            let reason = match standing.state {
                State::Running { since: start, worker } => {
                    Reason::Running { since: since(start), worker: worker as usize }
                }
                State::Deferred { until, .. } => {
                    Reason::Retry { after: after(until), attempts: standing.attempts, note }
                }
                State::Parked { since: start } => Reason::Parked { since: since(start), note },
                State::Aside => Reason::PutAside { note },
                State::Arriving => Reason::Moving,
                State::Ready if lanes.paused => Reason::DispatcherPaused,
                State::Ready => match standing.paced_until {
                    Some(at) if at > now => Reason::RateLimited { after: after(at) },
                    _ => Reason::NoWorkerFree { holders: lanes.holders(), ready_lanes: lanes.ready_lanes() },
                },
            };
            Explanation {
                dispatcher: self.name.clone(),
                waiting: standing.waiting,
                in_flight: standing.in_flight,
                aside: standing.aside,
                reason,
            }
        })
    }

    pub(crate) fn stats(&self) -> DispatcherStats {
        let inner = lock(&self.inner);
        // The rest takes long for a lock that is taken for every message. Nothing leaves without the other one.
        let seen = Seen::of(&self.ingress());
        self.stats_of(&inner, seen)
    }

    pub(super) fn stats_of(&self, inner: &Inner<K, M>, seen: Seen) -> DispatcherStats {
        let Seen { accepted, waiting, mut drops, refusals } = seen;
        let (lanes, counted) = (&inner.lanes, &inner.counted);
        drops.add(&counted.evicted);
        let ingress_depth = waiting + inner.inbox.len();
        let settled = counted.done + counted.failed + drops.total();
        let lock_failures = self.lock_failures.load(Ordering::Relaxed);
        DispatcherStats {
            name: self.name.clone(),
            account: Account {
                accepted,
                done: counted.done,
                failed: counted.failed,
                dropped: drops.total(),
                outstanding: accepted - settled,
            },
            depth: lanes.waiting_messages() - lanes.messages_aside() + ingress_depth,
            ingress_depth,
            in_flight: lanes.taken_messages(),
            parked_messages: lanes.messages_aside(),
            active_lanes: lanes.lane_count(),
            running_lanes: lanes.running_lanes(),
            deferred_lanes: lanes.deferred_lanes(),
            parked_lanes: lanes.parked_lanes(),
            paused: lanes.paused,
            dispatched: counted.dispatched,
            turns: counted.turns,
            retries: counted.retries,
            panics: counted.panics,
            lock_attempts: counted.looks + lock_failures,
            lock_failures,
            parks: counted.parks,
            wake_ups: counted.wake_ups,
            enqueued_due_to_busy: lanes.enqueued_due_to_busy,
            max_pending_depth: lanes.max_pending_depth,
            drops,
            refusals,
            waiting: counted.waiting.clone(),
            service: counted.service.clone(),
            total: counted.total.clone(),
        }
    }

    /// Checks all that must be true here between two steps; `before` is what it saw the last time.
    pub(crate) fn audit(&self, now: u64, before: &Audited) -> Result<Audited, String> {
        let inner = lock(&self.inner);
        let ingress = self.ingress();
        let deepest = inner.lanes.audit()?;
        let held = inner.lanes.waiting_messages() + inner.lanes.taken_messages();
        let outstanding = (held + inner.inbox.len() + ingress.buffer.len()) as u64;
        let released =
            inner.counted.done + inner.counted.failed + inner.counted.evicted.total() + ingress.drops.total();
        if inner.released != released {
            return Err(format!("{} released, but {released} are counted", inner.released));
        }
        if ingress.accepted != released + outstanding {
            let accepted = ingress.accepted;
            return Err(format!(
                "accepted {accepted} = {released} settled or dropped + {outstanding} outstanding"
            ));
        }
        let (lanes, arrived) = (inner.lanes.lane_count() as u64, inner.lanes.arrived);
        let messages_arrived = arrived.messages - before.arrived.messages;
        let lanes_arrived = arrived.lanes - before.arrived.lanes;
        let limit_of = |bound: Option<usize>| bound.map(|bound| bound as u64);
        self.keeps(
            "outstanding",
            outstanding,
            Some(self.limits.capacity),
            before.outstanding + messages_arrived,
        )?;
        self.keeps("in one lane", deepest, limit_of(self.limits.lane), before.deepest + messages_arrived)?;
        self.keeps("lanes", lanes, limit_of(self.limits.lanes), before.lanes + lanes_arrived)?;
        let open = !inner.stopped && !inner.lanes.paused && !inner.lanes.is_streaming();
        let pending = !inner.inbox.is_empty() || !ingress.buffer.is_empty();
        let due = inner.lanes.next_due().is_some_and(|due| due <= now);
        let ready = inner.lanes.has_ready() && inner.lanes.pace.is_none();
        let has_work = open && (pending || ready || due);
        Ok(Audited { has_work, outstanding, deepest, lanes, arrived })
    }

    /// Whether a bound holds, its reserve included. What a change of the topology brought may be beyond it, but then nothing else comes.
    fn keeps(&self, what: &str, count: u64, bound: Option<u64>, brought: u64) -> Result<(), String> {
        let limit = bound.map_or(u64::MAX, |bound| bound.saturating_add(self.limits.reserve));
        if count <= limit.max(brought) { Ok(()) } else { Err(format!("{count} {what}, beyond {limit}")) }
    }

    /// When something is due here, if that is later.
    pub(crate) fn next_due(&self) -> Option<u64> {
        lock(&self.inner).lanes.next_due()
    }

    /// Messages accepted and not settled.
    pub(crate) fn outstanding(&self) -> u64 {
        let inner = lock(&self.inner);
        self.ingress().accepted - inner.released
    }

    // ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Step 1 of the shutdown.
    pub(crate) fn close(&self) {
        self.ingress().closed = true;
        self.room.announce();
    }

    /// Step 3: no more turns.
    pub(crate) fn stop(&self) {
        lock(&self.inner).stopped = true;
        self.wake_all();
    }

    #[cfg(test)]
    pub(crate) fn sleepers(&self) -> usize {
        self.ingress().sleepers.len()
    }

    #[cfg(loom)]
    pub(crate) fn taken_messages(&self) -> usize {
        lock(&self.inner).lanes.taken_messages()
    }

    /// What a dispatcher that was removed has to remember: nothing, once its last turn has settled.
    pub(crate) fn is_spent(&self) -> bool {
        self.outstanding() == 0
    }
}
