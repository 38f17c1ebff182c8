//! The verbs, one file each (those about one message group share one): their options, and a `run` that does it.

pub(crate) mod demo;
pub(crate) mod serve;

pub(crate) mod seed;
pub(crate) mod send;

pub(crate) mod groups;
pub(crate) mod lanes;
pub(crate) mod top;

pub(crate) mod dead_letters;
pub(crate) mod pools;

pub(crate) mod bench;
pub(crate) mod config;
pub(crate) mod doctor;
