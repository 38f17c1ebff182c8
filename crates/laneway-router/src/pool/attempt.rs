//! One attempt: the pool's handler. It hands a message to the mediator, turns the verdict into an outcome of the lane, and settles the delivery when its fate is known.
//!
//! The engine calls it for the head of a lane that has a slot; what each verdict becomes is said in a table at the head of `mod.rs`.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::FutureExt;
use laneway::{Failure, Outcome};
use tokio::time::Instant;

use super::groups::{Parking, Stop};
use super::{Core, Exhausted, GroupKey, Job, PATIENCE, PoolSettings, Return};
use crate::mediator::{Call, Verdict};
use crate::message::DispatchMode;
use crate::parks::Parked;
use crate::record::FailedAttempt;
use crate::source::Disposal;
use crate::trace::Fate;

impl Core {
    /// Makes one attempt and says what becomes of the lane.
    pub(super) async fn attempt(&self, mut delivery: laneway::Delivery<GroupKey, Job>) -> Outcome {
        let settings = self.settings.load_full();
        let key = delivery.key().clone();
        let started = Instant::now();
        delivery.waits = false;
        if delivery.held.as_ref().is_some_and(|held| held.is_lost(started)) {
            delivery.note("its lease was lost");
            return self.send_back(key, Duration::ZERO);
        }
        if let Some(parked) = self.groups.stops(&key) {
            delivery.note(&*parked.why);
            return Outcome::ParkLane;
        }
        if let Some(wait) = self.groups.pace(&key, &settings) {
            self.counters.held_back.fetch_add(1, Relaxed);
            delivery.note("the rate of its group");
            return Outcome::Hold(wait);
        }
        let (message, attempt) = (Arc::clone(&delivery.message), delivery.attempt());
        let sequence =
            delivery.held.as_ref().map_or(delivery.sequence, |held| held.sequence(delivery.sequence));
        let traceparent = delivery.trace.as_mut().and_then(|trace| trace.begin(attempt));
        let call = Call { message: &message, key: key.name(), sequence, attempt, traceparent };
        self.groups.begin(&key, Arc::clone(&message), attempt, started, delivery.worker());
        let mediator = self.mediator.load_full();
        // A panic is a failed attempt like any other, so that the pool's own settings decide how many there are and what comes after the last.
        let verdict = AssertUnwindSafe(mediator.mediate(call)).catch_unwind().await;
        let verdict = verdict
            .unwrap_or_else(|_| Verdict::Again { delay: None, reason: "the mediator panicked".to_owned() });
        let took = started.elapsed();
        self.groups.learn(&key, took);
        self.attempts.record(&verdict, Some(took));
        let busy = self.record.hot().learn(&self.code, key.name(), started, took, verdict != Verdict::Done);
        self.busy.fetch_add(busy, Relaxed);
        if let Some(trace) = &mut delivery.trace {
            trace.end(&verdict);
        }
        if let Verdict::Again { reason, .. } | Verdict::Final { reason } = &verdict {
            self.note_failure(&key, attempt, &delivery, reason);
        }
        self.conclude(verdict, delivery, &settings)
    }

    /// Writes down that an attempt failed: for the group's page, for the list of the newest, and in the log.
    fn note_failure(&self, key: &GroupKey, attempt: u32, job: &Job, reason: &str) {
        let trace = job.trace.as_ref().map(|trace| trace.id());
        let failure = FailedAttempt::now(&self.code, key.name(), &job.message.id, attempt, reason);
        tracing::info!(
            pool = &*self.code,
            group = key.name(),
            message_id = job.message.id,
            attempt,
            reason,
            trace_id = trace.as_deref(),
            "an attempt failed"
        );
        self.groups.fail(key, failure.clone());
        self.record.failures().add(failure);
    }

    fn conclude(
        &self,
        verdict: Verdict,
        mut delivery: laneway::Delivery<GroupKey, Job>,
        settings: &PoolSettings,
    ) -> Outcome {
        match verdict {
            Verdict::Done => {
                self.counters.succeeded.fetch_add(1, Relaxed);
                if let Some(trace) = &mut delivery.trace {
                    trace.fate = Fate::Delivered;
                }
                if let Some(held) = delivery.held.take() {
                    held.settle(Disposal::Done);
                }
                Outcome::Done
            }
            Verdict::Wait { delay, called, reason } => {
                self.counters.held_back.fetch_add(1, Relaxed);
                delivery.note(reason);
                delivery.waits = true;
                if called {
                    return Outcome::Wait(delay);
                }
                if settings.group_rate_per_second.is_some() {
                    self.groups.unpace(delivery.key());
                }
                Outcome::Hold(delay)
            }
            Verdict::Again { delay, reason } if delivery.attempt() < settings.attempts => {
                self.counters.transient.fetch_add(1, Relaxed);
                let pause = delay.unwrap_or_else(|| settings.pause_after(delivery.attempt()));
                delivery.note(reason);
                Outcome::RetryAfter(pause)
            }
            Verdict::Again { reason, .. } | Verdict::Final { reason } => {
                self.exhaust(delivery, reason, settings.exhausted)
            }
        }
    }

    /// The message has failed for good.
    fn exhaust(
        &self,
        delivery: laneway::Delivery<GroupKey, Job>,
        reason: String,
        exhausted: Exhausted,
    ) -> Outcome {
        delivery.note(&*reason);
        if let GroupKey::Alone(_) = delivery.key() {
            return match exhausted {
                Exhausted::GiveBack(delay) => self.send_back(delivery.key().clone(), delay),
                // Nobody waits behind it, and nobody could name it to resume it.
                Exhausted::ParkGroup | Exhausted::DeadLetter => Outcome::Skip,
            };
        }
        match (delivery.message.dispatch_mode, exhausted) {
            (DispatchMode::BlockOnError, _) | (_, Exhausted::ParkGroup) => {
                self.stop(delivery.key().clone(), &reason, delivery.place.foreign.clone())
            }
            // What becomes of it is `fail`'s: the engine calls it with the note.
            (_, Exhausted::DeadLetter) => Outcome::Skip,
            (_, Exhausted::GiveBack(delay)) => self.send_back(delivery.key().clone(), delay),
        }
    }

    /// Parks a group whose head has failed for good.
    fn stop(&self, key: GroupKey, why: &str, foreign: Option<Arc<str>>) -> Outcome {
        let stop = Stop { by_attempt: true, foreign, ..Stop::new(Parked::now(why)) };
        match (self.groups.park(&key, stop.clone()), &key) {
            (Parking::TooMany, _) => return Outcome::ParkLane,
            (Parking::New, GroupKey::Named(group)) => self.note(group, &stop, Some(stop.parked.clone())),
            _ => {}
        }
        // What does not count any more makes room.
        self.room.notify_waiters();
        if self.groups.parked_messages() > self.settings.load().capacity {
            return self.send_back(key, PATIENCE.1);
        }
        Outcome::ParkLane
    }

    /// Begins to give a whole group back.
    fn send_back(&self, key: GroupKey, delay: Duration) -> Outcome {
        self.groups.bar(&key);
        // Nobody listens only when the pool is gone, and then everything in it goes back anyway.
        let _ = self.returns.send(Return { key, delay, if_idle: false, heir: None });
        Outcome::ParkLane
    }

    /// A message that the engine has given up: after its last attempt, after too many panics, or at an operator's word.
    pub(super) fn fail(&self, mut job: Job, failure: Failure) {
        self.counters.failed.fetch_add(1, Relaxed);
        let reason = failure.note.unwrap_or_else(|| format!("failed after {} attempts", failure.attempts));
        tracing::warn!(
            pool = &*self.code,
            message_id = job.message.id,
            reason,
            trace_id = job.trace.as_ref().map(|trace| trace.id()),
            "a message goes to the dead letters"
        );
        if let Some(trace) = &mut job.trace {
            trace.fate = Fate::DeadLetter;
        }
        if let Some(held) = job.held.take() {
            held.settle(Disposal::DeadLetter { reason });
        }
    }
}
