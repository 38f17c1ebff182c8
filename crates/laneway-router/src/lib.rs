//! The router: deliveries from a source, in order per message group, in parallel across groups, to their targets.
//!
//! ```text
//!  source ─► message ─► pool ─► group (a lane) ─► mediator ─► verdict ─► settle at the source
//!  claims     parsed     an engine of its own       HTTP, or     done, retry,   acknowledge, give back,
//!                        with so many slots         simulated    wait, final    dead letter
//! ```
//!
//! The files follow that way: [`message`], [`source`], [`router`] (the intake), [`pool`], [`mediator`], [`settle`]. Beside it, [`ingress`] is
//! the way in over the network that needs no queue, [`targets`] is what stands at the end in tests and demonstrations, and [`warnings`] is what
//! an operator should know. Around all of it, [`config`] is what can be chosen, [`service`] puts the parts together, and `api` is its HTTP side.

mod api;
pub mod config;
pub mod ingress;
pub mod mediator;
pub mod message;
pub mod pool;
pub mod router;
pub mod service;
pub mod settle;
pub mod source;
pub mod standby;
pub mod targets;
pub mod warnings;
