//! The router: deliveries from a source, in order per message group, in parallel across groups, to their targets.
//!
//! ```text
//!  source ─► message ─► pool ─► group (a lane) ─► mediator ─► verdict ─► settle at the source
//!  claims     parsed     an engine of its own       HTTP, or     done, retry,   acknowledge, give back,
//!                        with so many slots         simulated    wait, final    dead letter
//! ```
//!
//! The files follow that way: [`message`], [`source`], [`mediator`]. [`targets`] is what stands at its end in tests and demonstrations.
//! The files follow that way: [`message`], [`source`], [`mediator`]. Beside it stands [`ingress`], which takes tasks straight from the network.

pub mod ingress;
pub mod mediator;
pub mod message;
pub mod source;
pub mod targets;
