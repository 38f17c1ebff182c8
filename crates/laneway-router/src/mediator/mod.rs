//! Calls a target with a message and says what came of it.
//!
//! The router's handler hands a [`Call`] to a [`Mediator`]; what comes back is a [`Verdict`], which the pool turns into an outcome of the
//! lane and, at the end, into a settlement at the source. What counts as what is one table: see `verdict.rs`.

use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::message::Message;

/// One attempt at a message.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// What to deliver.
    pub message: &'a Message,
    /// The key of its lane, for the fencing headers.
    pub key: &'a str,
    /// Its place among all of its source: grows along a group, so that a target can refuse a call that comes too late.
    pub sequence: u64,
    /// Which attempt it is, from 1.
    pub attempt: u32,
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
}
