//! Flow: durable multi-step work on Postgres, each step on its own queue.
//!
//! ```no_run
//! use laneway_flow::{Flow, OwnQueue, Start, Steps, Worker, client, local};
//!
//! struct Hello;
//!
//! impl Flow for Hello {
//!     const SLUG: &'static str = "hello";
//!     type Input = String;
//!     type Queues = (OwnQueue,);
//!
//!     fn steps(&self, flow: &mut Steps<Self>) {
//!         let greet = flow.step("greet").run(|name: String, _| async move { Ok(format!("Hello, {name}")) });
//!         flow.step("shout").after(&greet).run(|text: String, _| async move { Ok(text.to_uppercase()) });
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let database = local::trial_database().await?; // DATABASE_URL, or a Postgres of its own
//! let worker = Worker::on(&database.pool).serve(Hello.define()?).start().await?;
//! let run = Start::of::<Hello>(&"world".to_owned())?.on(&database.pool).await?;
//! let state = client::wait(&database.pool, run, std::time::Duration::from_secs(10)).await?;
//! assert_eq!(state.output_of::<String>("shout").as_deref(), Some("HELLO, WORLD"));
//! worker.stop().await;
//! # Ok(())
//! # }
//! ```
//!
//! A **flow** is a graph of **steps**. Starting one makes a **run**; a step of a run is one **task**, or for a map one task for each
//! element. All of that lives in tables of the schema `pgflow`, and a task that is ready has a message in the pgmq queue of its
//! step. Workers read the queues they are made for, run handlers, and report: completing a task, releasing what waited for it
//! and sending the next messages is one transaction in the database, so that a crash on either side loses nothing and does nothing twice.
//!
//! The database part is SQL functions that anybody may call, from psql or from another language; this crate carries them as numbered
//! migrations and applies them. `docs/design/flow.md` is their contract.
//!
//! # The rooms, in reading order
//!
//! [`name`] and [`queue`] (what things are called) → [`flow`] and [`step`] (the DSL) → [`definition`] (a flow as data) → [`handler`] (what a step
//! does) → [`client`] (starting runs, waiting for them), [`look`] (all of it as JSON) → [`worker`] (doing them). Below them [`migrate`] (the schema, carried and applied),
//! `store` (the calls of a worker), [`error`], and [`local`] (a Postgres to try it on).

pub mod client;
pub mod definition;
pub mod error;
pub mod flow;
pub mod handler;
pub mod local;
pub mod look;
pub mod migrate;
pub mod name;
pub mod queue;
pub mod step;
mod store;
pub mod worker;

pub use client::{RunState, Start, Verdict};
pub use definition::{DefineError, Definition, Options, Route, StepDefinition, StepType, When};
pub use error::FlowError;
pub use flow::{Defined, Flow, Steps};
pub use handler::{Action, Answer, Context, Failure, Task};
pub use migrate::{MigrateError, Migrated, migrate, schema_version};
pub use queue::{OwnQueue, Queue, Queues};
pub use step::{Fail, Skip, SkipCascade, Step, StepBuilder};
pub use worker::{QueueSettings, Served, Settings, Stopped, Worker, WorkerBuilder, WorkerStats};
