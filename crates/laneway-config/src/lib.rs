#![doc = include_str!("../README.md")]
//!
//! # The rooms, in the order in which a value walks through them
//!
//! `guard` (what a text must be before it is parsed) → `layers` (what lies over what) → `config` (the effective values and their
//! origins) → `section` (typed reading) ; beside them `problem` (what is wrong, for a person) and `mask` (what is not shown).

mod guard;
mod layers;

mod config;
mod section;

mod mask;
mod problem;

pub use config::{Config, Effective, Settled};
pub use layers::Layers;
pub use problem::{LoadError, LoadProblem, ReadError, ReadProblem};
pub use section::Section;
