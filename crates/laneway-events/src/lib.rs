#![doc = include_str!("../README.md")]
//!
//! # The rooms, in the order in which an event walks through them
//!
//! `processor` (posting) → `mail` (the mailbox) → the engine, in which it has a lane → `handler` (what users write) ; around
//! them `events` (wiring, registration, stopping, the end) with `registry`, `channel`, `schedule`, `ask`; `config` and `pinning` (what
//! threads there are), `stats` (looking), `error`.

mod config;
mod pinning;

mod events;
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models see its parts"))]
mod registry;

mod handler;
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models see its parts"))]
mod load;
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models see its parts"))]
mod mail;
mod processor;
mod slots;

mod ask;
mod channel;
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models see its parts"))]
mod schedule;

mod error;
mod stats;
mod sync;

/// The protocols as loom sees them; only there under `--cfg loom`, and only for the models in `tests/`.
#[cfg(loom)]
#[doc(hidden)]
pub mod model {
    pub use crate::{
        load::Load,
        mail::{Around, Gate, Mailbox, Shut},
        registry::{NotInserted, Registry},
        schedule::{Fired, Status, Task, Timer},
    };
}

pub use ask::Reply;
pub use channel::{Broadcast, NotDelivered};
pub use config::{ConfigError, ConfigProblem, EventsConfig, REFERENCE, ROOT, THREADS_MAX};
pub use error::{
    AskError, LookupError, NotPosted, NotPostedReason, NotScheduled, Refusal, Refused, RegisterError, Report,
    ScheduleRefusal, StartError,
};
pub use events::{Builder, Events, Handle, Registration, Returned, ShutdownReport, StopReport, Stopping};
pub use handler::{Become, Context, Handled, Handler};
pub use laneway::{Account, Backoff, DispatcherStats, Latency, WorkerStats};
pub use processor::{AnyProcessor, ProcessorRef};
pub use schedule::{Schedule, ScheduleEnd};
pub use stats::Snapshot;
