#![doc = include_str!("../README.md")]
//!
//! # The rooms, in the order in which a message walks through them
//!
//! `message` (or `batch`, many of them) → `admission` → `placement` and `flows` → `dispatcher` → `lane` → `worker` → `handler` → `outcome`; around them `engine` and `builder`
//! (wiring), `topology` and `change` (shape), `stats` and `explain` (looking), `shutdown` (the end), and [`sim`] (all of it in virtual time).

mod admission;
mod batch;
mod builder;
mod change;
mod clock;
mod dispatcher;
mod engine;
mod error;
mod explain;
mod flows;
mod handler;
mod lane;
mod message;
#[cfg(loom)]
#[doc(hidden)]
pub mod model;
mod outcome;
mod placement;
mod shutdown;
pub mod sim;
mod stats;
mod sync;
mod topology;
mod worker;

pub use admission::{Admission, BatchReport, Bound, Cancel, Dropped, Drops, Overflow, Refusals};
pub use builder::Builder;
pub use engine::{Engine, Handle};
pub use error::{BuildError, ChangeError, Problem, Refusal, Refused};
pub use explain::{Explanation, Holder, Reason};
pub use flows::Flows;
pub use handler::{Batch, BatchHandler, Context, Failure, Handler, Messages, TurnHandler};
pub use message::{Kind, Message, Priority};
pub use outcome::{Exhausted, Outcome, RetryPolicy};
pub use placement::{Among, ByHash, ByName, LeastLoaded, LooksAt, Placement};
pub use shutdown::ShutdownReport;
pub use stats::{Account, DispatcherStats, Latency, Snapshot, WorkerStats};
pub use topology::{Topology, TopologyBuilder};
#[cfg(feature = "tokio")]
pub use worker::slot::Delivery;
pub use worker::{Backoff, WaitStrategy};
