//! What an operator should know: a bounded list, the newest last, equal ones counted instead of repeated.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// How many are kept.
const MOST: usize = 1_000;

/// One thing that an operator should know.
#[derive(Clone, Debug)]
pub struct Warning {
    /// Grows from warning to warning.
    pub number: u64,
    /// What it is about: `pool`, `source`, `lease`, `configuration`.
    pub about: &'static str,
    /// In a sentence.
    pub text: String,
    /// When it was last given.
    pub at: SystemTime,
    /// How many times.
    pub count: u64,
}

/// The list.
#[derive(Debug, Default)]
pub struct Warnings {
    list: Mutex<(u64, VecDeque<Warning>)>,
}

impl Warnings {
    /// Gives a warning. One that is on the list already is counted, and becomes the newest.
    pub fn give(&self, about: &'static str, text: impl Into<String>) {
        let text = text.into();
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, warnings) = &mut *list;
        *number += 1;
        let known = warnings.iter().position(|warning| warning.about == about && warning.text == text);
        let count = known.and_then(|place| warnings.remove(place)).map_or(0, |warning| warning.count) + 1;
        if count == 1 {
            tracing::warn!(about, "{text}");
        }
        warnings.push_back(Warning { number: *number, about, text, at: SystemTime::now(), count });
        if warnings.len() > MOST {
            warnings.pop_front();
        }
    }

    /// The newest ones, newest first.
    pub fn newest(&self, most: usize) -> Vec<Warning> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.1.iter().rev().take(most).cloned().collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).1.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all. The answer is how many there were.
    pub fn clear(&self) -> usize {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut list.1).len()
    }
}
