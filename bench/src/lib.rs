//! Placeholder while the bench crate is written elsewhere.
