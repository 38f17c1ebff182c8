//! The checker: every handler call proves that its message is the next of its key, and that the key is not busy.
//!
//! One cell per key holds `2 * position`, the position expected next, and one bit that is set while a handler runs. A
//! handler enters by finding exactly its own position, and leaves by raising it. The cell is read and written without
//! read-modify-write: if two handlers of one key did run at the same time, they carry different positions, and at most one
//! of them can find its own. So an overlap is seen either as the busy bit or as a wrong position, never not at all.
//!
//! All accesses are relaxed on purpose. A contender that hands a key from one thread to another must make the first
//! handler's writes visible to the second, as it must for a user's data; one that does not is caught here.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::message::Message;
use crate::plan::CellMap;

/// A cell has a cache line of its own, so that two workers with neighbouring keys do not slow each other down.
#[repr(align(64))]
#[derive(Default)]
struct Cell(AtomicU64);

/// Watches the order of all keys of one run.
pub struct Checker {
    map: CellMap,
    cells: Box<[Cell]>,
    violations: Violations,
}

/// Proof that a handler entered; needed to leave.
#[must_use]
#[derive(Clone, Copy)]
pub struct Entered {
    cell: usize,
    position: u64,
}

impl Checker {
    /// A checker that expects the first message of every key.
    pub fn new(map: CellMap) -> Self {
        let cells = (0..map.cells()).map(|_| Cell::default()).collect();
        Self { map, cells, violations: Violations::default() }
    }

    /// A handler begins.
    #[inline]
    pub fn enter(&self, message: &Message) -> Entered {
        let entered = Entered { cell: self.map.cell(message.key), position: self.map.position(message) };
        let cell = &self.cells[entered.cell].0;
        let found = cell.load(Relaxed);
        if found != entered.position << 1 {
            self.violations.note(Violation::on_entry(message, found, entered.position));
        }
        cell.store(entered.position << 1 | 1, Relaxed);
        entered
    }

    /// A handler ends.
    #[inline]
    pub fn leave(&self, entered: Entered) {
        let cell = &self.cells[entered.cell].0;
        let found = cell.load(Relaxed);
        if found != entered.position << 1 | 1 {
            self.violations
                .note(Violation { kind: ViolationKind::Overlap, ..Violation::of_cell(entered.cell) });
        }
        cell.store((entered.position + 1) << 1, Relaxed);
    }

    /// When all handlers have ended: compares what was handled with what was made, key by key.
    pub fn audit(&self, made: impl Iterator<Item = (usize, u64)>) {
        for (cell, made) in made {
            let handled = self.cells[cell].0.load(Relaxed) >> 1;
            if handled != made {
                let kind = ViolationKind::Count { made, handled };
                self.violations.note(Violation { kind, ..Violation::of_cell(cell) });
            }
        }
    }

    /// What was violated so far, in words; empty for a correct run.
    pub fn violations(&self) -> Vec<String> {
        self.violations.in_words()
    }
}

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ViolationKind {
    /// A later message was handled before this one, or this one twice.
    Reorder { found: u64, expected: u64 },
    /// A message before this one was not handled yet: overtaken or lost.
    Gap { found: u64, expected: u64 },
    /// Two handlers of one key at the same time.
    Overlap,
    /// At the end the counts differ.
    Count { made: u64, handled: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Violation {
    cell: usize,
    kind: ViolationKind,
}

impl Violation {
    fn of_cell(cell: usize) -> Self {
        Self { cell, kind: ViolationKind::Overlap }
    }

    fn on_entry(message: &Message, found: u64, position: u64) -> Self {
        let next = found >> 1;
        let kind = if found & 1 == 1 {
            ViolationKind::Overlap
        } else if next > position {
            ViolationKind::Reorder { found: position, expected: next }
        } else {
            ViolationKind::Gap { found: position, expected: next }
        };
        Self { cell: message.key as usize, kind }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key {}: ", self.cell)?;
        match self.kind {
            ViolationKind::Reorder { found, expected } => {
                write!(f, "message {found} came late or twice, {expected} was next")
            }
            ViolationKind::Gap { found, expected } => write!(f, "message {found} came before {expected}"),
            ViolationKind::Overlap => write!(f, "two handlers at the same time"),
            ViolationKind::Count { made, handled } => write!(f, "{made} messages sent, {handled} handled"),
        }
    }
}

/// Counts all violations and keeps the first few, in words.
#[derive(Default)]
struct Violations {
    count: AtomicU64,
    examples: Mutex<Vec<String>>,
}

impl Violations {
    const EXAMPLES_MAX: usize = 5;

    #[cold]
    fn note(&self, violation: Violation) {
        self.count.fetch_add(1, Relaxed);
        let mut examples = self.examples.lock().expect("no one panics while noting");
        if examples.len() < Self::EXAMPLES_MAX {
            examples.push(violation.to_string());
        }
    }

    fn in_words(&self) -> Vec<String> {
        let mut words = self.examples.lock().expect("no one panics while noting").clone();
        let more = self.count.load(Relaxed) as usize - words.len();
        if more > 0 {
            words.push(format!("and {more} more"));
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checker() -> Checker {
        Checker::new(CellMap::new(4, None))
    }

    fn handle(checker: &Checker, key: u64, sequence: u32) {
        let entered = checker.enter(&Message::new(key, sequence));
        checker.leave(entered);
    }

    #[test]
    fn order_is_silent() {
        let checker = checker();
        for sequence in 0..3 {
            (0..4).for_each(|key| handle(&checker, key, sequence));
        }
        checker.audit((0..4).map(|cell| (cell, 3)));
        assert!(checker.violations().is_empty());
    }

    #[test]
    fn a_reorder_is_caught() {
        let checker = checker();
        [0, 1, 2, 1].iter().for_each(|&sequence| handle(&checker, 1, sequence));
        assert_eq!(checker.violations(), ["key 1: message 1 came late or twice, 3 was next"]);
    }

    #[test]
    fn a_gap_is_caught() {
        let checker = checker();
        [0, 2].iter().for_each(|&sequence| handle(&checker, 1, sequence));
        assert_eq!(checker.violations(), ["key 1: message 2 came before 1"]);
    }

    #[test]
    fn an_overlap_is_caught() {
        let checker = checker();
        let first = checker.enter(&Message::new(2, 0));
        let second = checker.enter(&Message::new(2, 1));
        assert_eq!(checker.violations(), ["key 2: two handlers at the same time"]);
        checker.leave(first);
        checker.leave(second);
        assert!(checker.violations().len() > 1);
    }

    #[test]
    fn a_loss_at_the_end_is_caught() {
        let checker = checker();
        handle(&checker, 3, 0);
        checker.audit([(3, 2)].into_iter());
        assert_eq!(checker.violations(), ["key 3: 2 messages sent, 1 handled"]);
    }

    #[test]
    fn the_loss_of_an_ended_key_is_caught_by_its_successor() {
        let checker = Checker::new(CellMap::new(4, Some(2)));
        handle(&checker, 1, 0);
        handle(&checker, 1 + 4, 0);
        assert_eq!(checker.violations(), ["key 5: message 2 came before 1"]);
    }

    #[test]
    fn many_violations_are_counted_and_few_are_told() {
        let checker = checker();
        (0..20).for_each(|_| handle(&checker, 0, 7));
        let words = checker.violations();
        assert_eq!(words.len(), Violations::EXAMPLES_MAX + 1);
        assert_eq!(words.last().unwrap(), "and 15 more");
    }
}
