//! Real servers for tests and benchmarks: Postgres, and the brokers that the router reads from.
//!
//! `cargo xtask setup` installs them by the names of their packages ([`install`]); a test starts the one that it needs, talks to
//! it, and drops it. Each start is a server of its own: on loopback, on a free port, with its data in a temporary folder, ended
//! by its own process id. A server that is not installed is an error, not a test that is left out.
//!
//! The files are one per server, in the order in which they were needed; what they share is in `process.rs`.

pub mod activemq;
pub mod install;
pub mod nats;
pub mod postgres;
pub mod process;
pub mod rabbitmq;

pub use install::install;
pub use process::Server;
