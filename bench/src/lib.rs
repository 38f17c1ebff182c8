//! Benchmarks of Laneway: the product alone, or beside its peers.
//!
//! ```text
//! laneway bench engine                       the product alone, in the front door
//! laneway bench router                       the router, from its queue to a target
//! laneway bench flow --targets               flows on Postgres, beside the loop of the original (feature `flow`)
//! laneway-bench engine --workload W1,W3      beside the peers, with the same options
//! laneway-bench events --targets             the events floor beside other designs of it
//! ```
//!
//! Peers are behind the feature `peers`, so that they never slow a user's build. Both binaries call [`child::serve`]
//! and [`events::serve`] before anything else, because every run is a fresh process of the same program, and then [`engine::run`] or [`events::run`].
//!
//! The way of a run, and the order in which to read: [`cli`] chooses [`workload`]s; [`engine`] starts a [`child`] for each
//! contender and round, or has `count` start it where instructions are counted; there [`drive`] makes a [`plan`], starts a [`contender`] and lets `pump` carry [`message`]s into it
//! under a [`window`] (or `weigh`s it); its workers call the [`probe`], which asks the [`check`]er; [`machine`] is read before
//! and after; what comes out is a [`report`], shown as a [`table`], a [`plot`] and [`targets`].

pub mod cli;
pub mod workload;

pub mod engine;
pub mod events;
#[cfg(feature = "flow")]
pub mod flow;
pub mod router;

pub mod child;
mod count;
pub mod drive;
mod pump;
mod weigh;

pub mod message;
pub mod plan;

pub mod contender;
pub mod contenders;
pub mod window;

pub mod check;
pub mod probe;

pub mod machine;

pub mod plot;
pub mod report;
pub mod table;
pub mod targets;

/// The name of the contender that all others are compared with.
pub const PRODUCT: &str = "laneway";
