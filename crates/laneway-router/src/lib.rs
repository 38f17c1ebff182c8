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
//! an operator should know. What pools write down while they work ([`record`], [`trace`]) becomes the history that the dashboard shows ([`history`]), spans for a
//! collector (`otlp`), which groups are parked goes to the store ([`parks`]), and, with what operators do ([`audit`]), lines of the log. Around all of it, [`config`] is what can be chosen, [`service`] puts the parts together, and `api` is its HTTP side.

mod api;
pub mod audit;
pub mod config;
#[cfg(feature = "flow")]
mod flows;
pub mod history;
pub mod ingress;
pub mod mediator;
pub mod message;
#[cfg(feature = "otlp")]
pub mod otlp;
pub mod parks;
pub mod pool;
pub mod record;
pub mod router;
pub mod service;
pub mod settle;
pub mod source;
pub mod standby;
pub mod targets;
pub mod trace;
pub mod warnings;
