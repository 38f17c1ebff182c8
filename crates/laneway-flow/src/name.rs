//! Slugs and queue names: what may be one, said the same way by the compiler, by the builder and by the database.
//!
//! The DSL hands every name through here before it becomes part of a [`Definition`](crate::Definition); the checks are `const`, so that
//! [`queues!`](crate::queues) can refuse a bad name while the user's program compiles.

use std::fmt;

/// Flows and steps: longer slugs are refused by the database as well.
pub const SLUG_MAX: usize = 128;

/// Queues: pgmq makes table names of them, and refuses longer ones.
pub const QUEUE_MAX: usize = 47;

/// What stands for "completed by hand" where a queue's name would stand in SQL; no queue can have this name.
pub const MANUAL: &str = "false";

/// What is wrong with a name, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadName {
    /// A flow, a step or a queue.
    pub what: &'static str,
    /// The name.
    pub name: String,
    /// What would be right.
    pub right: &'static str,
}

impl fmt::Display for BadName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadName { what, name, right } = self;
        write!(f, "the {what} {name:?} has a name that cannot be used: {right}")
    }
}

impl std::error::Error for BadName {}

/// Whether a flow or a step can be called this: letters, digits and underscores, not a digit first, at most 128, and not `run`,
/// which is the name of the run's own input.
pub const fn is_slug(text: &str) -> bool {
    let bytes = text.as_bytes();
    if !is_identifier(bytes, SLUG_MAX, true) {
        return false;
    }
    !same(bytes, b"run")
}

/// Whether a queue can be called this: as a slug, in lower case (pgmq folds the case, so that two names could be one queue), at most 47,
/// and not `false`.
pub const fn is_queue(text: &str) -> bool {
    let bytes = text.as_bytes();
    is_identifier(bytes, QUEUE_MAX, false) && !same(bytes, MANUAL.as_bytes())
}

/// Refuses what [`is_slug`] does, in words.
pub fn slug(what: &'static str, text: &str) -> Result<(), BadName> {
    let right = "letters, digits and underscores, no digit first, 1 to 128 characters, and not \"run\"";
    if is_slug(text) { Ok(()) } else { Err(BadName { what, name: text.to_owned(), right }) }
}

/// Refuses what [`is_queue`] does, in words.
pub fn queue(text: &str) -> Result<(), BadName> {
    let right =
        "lower-case letters, digits and underscores, no digit first, 1 to 47 characters, and not \"false\"";
    if is_queue(text) { Ok(()) } else { Err(BadName { what: "queue", name: text.to_owned(), right }) }
}

const fn is_identifier(bytes: &[u8], max: usize, upper: bool) -> bool {
    if bytes.is_empty() || bytes.len() > max || bytes[0].is_ascii_digit() {
        return false;
    }
    let mut place = 0;
    while place < bytes.len() {
        let byte = bytes[place];
        let letter = byte.is_ascii_lowercase() || (upper && byte.is_ascii_uppercase());
        if !letter && !byte.is_ascii_digit() && byte != b'_' {
            return false;
        }
        place += 1;
    }
    true
}

const fn same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut place = 0;
    while place < one.len() {
        if one[place] != other[place] {
            return false;
        }
        place += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs_are_identifiers_of_bounded_length() {
        for good in ["a", "_a", "Fetch2", "data_flow", &"x".repeat(128)] {
            assert!(is_slug(good), "{good}");
        }
        for bad in ["", "1a", "a-b", "a b", "run", "é", "a'; drop table", &"x".repeat(129)] {
            assert!(!is_slug(bad), "{bad}");
            assert!(slug("step", bad).unwrap_err().to_string().contains("letters, digits"));
        }
    }

    #[test]
    fn queues_are_lower_case_and_shorter() {
        for good in ["a", "email_worker", "_q1", &"x".repeat(47)] {
            assert!(is_queue(good), "{good}");
        }
        for bad in ["", "Email", "false", "1q", "a-b", &"x".repeat(48)] {
            assert!(!is_queue(bad), "{bad}");
        }
        assert!(queue("Email").unwrap_err().to_string().contains("lower-case"));
    }
}
