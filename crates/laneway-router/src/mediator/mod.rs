//! Calls a target with a message and says what came of it.
//!
//! The router's handler hands a [`Call`] to a [`Mediator`]; what comes back is a [`Verdict`], which the pool turns into an outcome of the
//! lane and, at the end, into a settlement at the source. What counts as what is one table: see `verdict.rs`.
//!
//! [`Mediators`] is the one that a router uses: it looks at the message's `mediationType` and lets [`HttpMediator`], [`Simulated`] or [`Sinks`] do the work. A
//! call by HTTP goes through the files in this order: [`target`], [`breaker`], [`headers`], [`signature`], [`http`] (over `connections.rs`, which has them from `connect.rs` and learns from `preface.rs` what HTTP/2 allows), [`verdict`]; what came
//! of it is counted in [`metrics`].

pub mod breaker;
pub(crate) mod connect;
mod connections;
pub mod headers;
pub mod http;
pub mod metrics;
mod preface;
pub mod signature;
pub mod simulated;
pub mod sink;
pub mod target;
pub mod verdict;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::message::{MediationType, Message};
use crate::standby::Turn;
use crate::trace::Traceparent;

pub use breaker::{BreakerSettings, BreakerState, BreakerStatus, Breakers};
pub use connect::BadCertificate;
pub use http::{HttpMediator, HttpSettings};
pub use metrics::{Metrics, MetricsSnapshot};
pub use signature::{BadSecret, Signer};
pub use simulated::Simulated;
pub use sink::Sinks;
pub use target::{BadPattern, BadTarget, Pattern, Scope};
pub use verdict::Limits;

/// The sequence of a call whose message has no place among others.
pub const NO_SEQUENCE: u64 = u64::MAX;

/// One attempt at a message.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// What to deliver.
    pub message: &'a Message,
    /// The key of its lane, for the fencing headers; empty for what is not ordered.
    pub key: &'a str,
    /// Its place among all of its source: grows along a group, so that a target can refuse a call that comes too late. Or [`NO_SEQUENCE`].
    pub sequence: u64,
    /// Which attempt it is, from 1.
    pub attempt: u32,
    /// The attempt's place in a trace, for the target. Goes before the message's own header; without it that goes as it came.
    pub traceparent: Option<Traceparent>,
}

/// What came of an attempt.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Delivered.
    Done,
    /// The target asks for patience: not before this time has passed. Costs no attempt.
    Wait {
        /// How long.
        delay: Duration,
        /// Whether the target was called; if not, this costs nothing of a rate either.
        called: bool,
        /// In a few words, for whoever asks why the group waits.
        reason: String,
    },
    /// The target took it and wants it again after this time. Costs an attempt.
    Again {
        /// How long, if it said so.
        delay: Option<Duration>,
        /// In a few words.
        reason: String,
    },
    /// Will never be taken.
    Final {
        /// In a few words.
        reason: String,
    },
}

/// Whatever can deliver a message.
pub trait Mediator: Send + Sync + 'static {
    /// Makes one attempt. Always comes back within the mediator's own timeout.
    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict>;

    /// Whether the target of a message may be called, as far as that can be told without calling it; for who can still refuse the message.
    fn check(&self, _message: &Message) -> Result<(), BadTarget> {
        Ok(())
    }
}

/// The mediators of a process, chosen by `mediationType`. Clones share everything but the secrets.
#[derive(Clone, Debug)]
pub struct Mediators {
    http: HttpMediator,
    simulated: Simulated,
    simulated_metrics: Arc<Metrics>,
    sinks: Sinks,
    sink_metrics: Arc<Metrics>,
    /// Nothing is attempted once this is over.
    turn: Option<Turn>,
}

/// How long a message waits that came when the router's turn was over; the router ends meanwhile.
const NOT_OUR_TURN: Duration = Duration::from_secs(1);

impl Mediators {
    /// From one of each.
    pub fn new(http: HttpMediator, simulated: Simulated) -> Self {
        Mediators {
            http,
            simulated,
            simulated_metrics: Arc::default(),
            sinks: Sinks::default(),
            sink_metrics: Arc::default(),
            turn: None,
        }
    }

    /// The same, as long as this turn lasts.
    pub fn in_turn(self, turn: Option<Turn>) -> Self {
        Mediators { turn, ..self }
    }

    /// The same, with these sinks.
    pub fn with_sinks(self, sinks: Sinks) -> Self {
        Mediators { sinks, ..self }
    }

    /// The sinks, by name.
    pub fn sinks(&self) -> &Sinks {
        &self.sinks
    }

    /// The same, with the secrets of one pool.
    pub fn with_signer(&self, signer: Signer) -> Self {
        Mediators { http: self.http.with_signer(signer), ..self.clone() }
    }

    /// The targets that were called lately: to list, and to reset.
    pub fn breakers(&self) -> &Breakers {
        self.http.breakers()
    }

    /// Whether the target of a message may be called, as far as that can be told without calling it.
    pub fn check(&self, message: &Message) -> Result<(), BadTarget> {
        match message.mediation_type {
            MediationType::Http => self.http.check(&message.mediation_target),
            MediationType::Simulated => self.simulated.check(&message.mediation_target),
            MediationType::Sink if self.sinks.has(&message.mediation_target) => Ok(()),
            MediationType::Sink => Err(BadTarget::NoSink(target::beginning(&message.mediation_target))),
        }
    }

    /// Whether the breakers call a target by this name; no sink's and no simulated one's.
    pub fn is_called(&self, target: &str, name: &str) -> bool {
        self.http.is_called(target, name)
    }

    /// What was counted for one kind of mediation.
    pub fn metrics(&self, kind: MediationType) -> MetricsSnapshot {
        match kind {
            MediationType::Http => self.http.metrics().snapshot(),
            MediationType::Simulated => self.simulated_metrics.snapshot(),
            MediationType::Sink => self.sink_metrics.snapshot(),
        }
    }

    async fn simulate(&self, call: Call<'_>) -> Verdict {
        let started = tokio::time::Instant::now();
        let verdict = self.simulated.mediate(call).await;
        let was_understood = !matches!(verdict, Verdict::Final { .. });
        self.simulated_metrics.record(&verdict, was_understood.then(|| started.elapsed()));
        verdict
    }

    async fn publish(&self, call: Call<'_>) -> Verdict {
        let started = tokio::time::Instant::now();
        let verdict = self.sinks.mediate(call).await;
        self.sink_metrics.record(&verdict, Some(started.elapsed()));
        verdict
    }
}

impl Mediator for Mediators {
    fn check(&self, message: &Message) -> Result<(), BadTarget> {
        Mediators::check(self, message)
    }

    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict> {
        if self.turn.as_ref().is_some_and(|turn| !turn.is_on()) {
            let reason = "another router works: the lease of this one has ended".to_owned();
            return Box::pin(std::future::ready(Verdict::Wait {
                delay: NOT_OUR_TURN,
                called: false,
                reason,
            }));
        }
        match call.message.mediation_type {
            MediationType::Http => Box::pin(self.http.mediate(call)),
            MediationType::Simulated => Box::pin(self.simulate(call)),
            MediationType::Sink => Box::pin(self.publish(call)),
        }
    }
}

/// The examples of the guide are compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../../docs/guide/targets.md")]
struct Guide;
