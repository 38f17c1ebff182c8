//! Flow: durable multi-step work on Postgres, each step on its own queue.
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
//! [`migrate`]: the schema, carried and applied.

pub mod migrate;

pub use migrate::{MigrateError, Migrated, migrate, schema_version};
