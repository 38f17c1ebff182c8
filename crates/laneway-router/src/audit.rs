//! Who did what to the service, and when: a bounded list, the newest last, and a line in the log for each.
//!
//! The guard of the API (`api/guard.rs`) writes it for every request that it lets in and that changes something, whatever the answer was; publishing messages is not
//! an operator's doing and is left out. What the guard turns away has a line in the log only: strangers could push everything else out of the list. `GET /api/audit`
//! reads it.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// How many entries are kept.
const MOST: usize = 1_000;

/// No text of an entry is longer.
const TEXT_CHARS_MAX: usize = 500;
/// So much of the end of a longer one is kept.
const TEXT_CHARS_END: usize = 60;

/// The status of a request whose client left before the answer: what it asked for may have been done.
pub const HUNG_UP: u16 = 499;

/// One thing that somebody did, or tried to do.
#[derive(Clone, Debug)]
pub struct Deed {
    /// Grows from entry to entry.
    pub number: u64,
    /// When.
    pub at: SystemTime,
    /// Who: `token` for a holder of the admin token, `loopback` for somebody on this machine where no token is needed.
    pub who: &'static str,
    /// What: the method of the request.
    pub method: String,
    /// To what: the path of the request.
    pub path: String,
    /// What exactly, where the path does not say it.
    pub detail: Option<String>,
    /// The status of the answer: below 400 it was done. [`HUNG_UP`] where nobody waited for it.
    pub status: u16,
}

/// The list.
#[derive(Debug, Default)]
pub struct Audit {
    list: Mutex<(u64, VecDeque<Deed>)>,
}

impl Audit {
    /// Writes one down.
    pub fn add(&self, who: &'static str, method: &str, path: &str, detail: Option<String>, status: u16) {
        let (path, detail) = (cut(path), detail.map(|detail| cut(&detail)));
        // As a warning, so that the log has it at the level that it has by default.
        tracing::warn!(who, method, path, detail = detail.as_deref(), status, "audit");
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, deeds) = &mut *list;
        *number += 1;
        if deeds.len() == MOST {
            deeds.pop_front();
        }
        let at = SystemTime::now();
        deeds.push_back(Deed { number: *number, at, who, method: method.to_owned(), path, detail, status });
    }

    /// Says in the log that somebody was turned away.
    pub(crate) fn refused(method: &str, path: &str, status: u16) {
        tracing::warn!(method, path = cut(path), status, "a request was turned away");
    }

    /// The newest ones, newest first.
    pub fn newest(&self, most: usize) -> Vec<Deed> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.1.iter().rev().take(most).cloned().collect()
    }

    /// How many there ever were.
    pub fn total(&self) -> u64 {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A text that is too long loses its middle: the end of a path says what was done.
fn cut(text: &str) -> String {
    let count = text.chars().count();
    if count <= TEXT_CHARS_MAX {
        return text.to_owned();
    }
    let first: String = text.chars().take(TEXT_CHARS_MAX - TEXT_CHARS_END - 1).collect();
    let last: String = text.chars().skip(count - TEXT_CHARS_END).collect();
    format!("{first}…{last}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept() {
        let audit = Audit::default();
        for number in 0..MOST + 10 {
            audit.add("token", "POST", &format!("/{number}"), Some("x".repeat(10_000)), 200);
        }
        let newest = audit.newest(usize::MAX);
        assert_eq!((newest.len(), newest[0].number, audit.total()), (MOST, 1_010, 1_010));
        assert_eq!(newest[0].path, format!("/{}", MOST + 9));
        assert_eq!(newest[0].detail.as_ref().unwrap().chars().count(), TEXT_CHARS_MAX);
    }
}
