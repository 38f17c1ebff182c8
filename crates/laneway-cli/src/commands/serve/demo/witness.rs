//! Who checks the demonstration, by its own count.
//!
//! The load tells the sequence of every message that it published; the test targets tell, for each group, how many messages they have answered with a
//! success, and which messages they were called with. A call for a message says that all before it in its group are settled, so those must have been
//! delivered or given up: one that was overtaken would be missing. Whether calls came backwards, or two of a group at once, the targets see themselves.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use laneway_router::targets::{KeyStats, TestTargets};

use super::load::KINDS;

/// The witness, told by the load and asked by the view.
#[derive(Clone, Default)]
pub(super) struct Shared(Arc<Mutex<Witness>>);

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Witness> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
pub(super) struct Witness {
    groups: BTreeMap<String, Group>,
    /// What the targets saw out of order, or two at once.
    violations: u64,
    keys: u64,
    calls: u64,
    /// Somebody has told the targets to forget, or has taken away a pool with its counters. What is missing can then not be told from what was
    /// forgotten; what the targets see themselves still counts.
    forgotten: bool,
}

/// What is known of one group.
#[derive(Default)]
struct Group {
    kind: usize,
    published: u64,
    /// Sequences that are not known to be settled.
    pending: VecDeque<u64>,
    /// How many are.
    passed: u64,
    delivered: u64,
    /// What the targets had counted when they were last looked at; less than before once they were told to forget.
    counted: u64,
}

/// How a kind stands.
#[derive(Clone, Copy, Default)]
pub(super) struct Standing {
    pub(super) published: u64,
    pub(super) delivered: u64,
    /// Passed by a later one of their group: given up.
    pub(super) given_up: u64,
    pub(super) waiting: u64,
}

impl Witness {
    pub(super) fn published(&mut self, group: &str, sequence: u64) {
        let entry = self
            .groups
            .entry(group.to_owned())
            .or_insert_with(|| Group { kind: kind_of(group), ..Group::default() });
        entry.published += 1;
        entry.pending.push_back(sequence);
    }

    /// Looks at what the targets have seen.
    pub(super) fn look(&mut self, targets: &TestTargets) {
        for (name, group) in &mut self.groups {
            if let Some(seen) = targets.key(name) {
                group.see(&seen);
            }
        }
        let stats = targets.stats();
        self.violations = stats.out_of_order + stats.overlapping;
        self.keys = stats.keys as u64;
        let calls = stats.endpoints.iter().map(|endpoint| endpoint.calls).sum();
        self.forgotten |= calls < self.calls;
        self.calls = calls;
    }

    /// Counters that the witness relies on are gone.
    pub(super) fn forget(&mut self) {
        self.forgotten = true;
    }

    /// How each kind stands, in the order of [`KINDS`].
    pub(super) fn standings(&self) -> [Standing; KINDS.len()] {
        let mut standings = [Standing::default(); KINDS.len()];
        for group in self.groups.values() {
            let standing = &mut standings[group.kind];
            standing.published += group.published;
            standing.delivered += group.delivered;
            standing.given_up += group.given_up();
            standing.waiting += group.pending.len() as u64;
        }
        standings
    }

    pub(super) fn total(&self) -> Standing {
        self.standings().iter().fold(Standing::default(), |sum, one| Standing {
            published: sum.published + one.published,
            delivered: sum.delivered + one.delivered,
            given_up: sum.given_up + one.given_up,
            waiting: sum.waiting + one.waiting,
        })
    }

    pub(super) fn waiting(&self) -> [u64; KINDS.len()] {
        self.standings().map(|standing| standing.waiting)
    }

    /// Groups and calls that the targets have seen.
    pub(super) fn seen(&self) -> (u64, u64) {
        (self.keys, self.calls)
    }

    /// What does not hold, if anything; `dead_letters` is how many messages the service says it gave up.
    pub(super) fn violation(&self, dead_letters: u64) -> Option<String> {
        let missing = self.total().given_up.saturating_sub(dead_letters);
        if self.violations > 0 {
            Some(format!(
                "the targets saw {} calls out of order or beside another one of their group",
                self.violations
            ))
        } else if missing > 0 && !self.forgotten {
            Some(format!("{missing} messages were overtaken and are no dead letters"))
        } else {
            None
        }
    }
}

impl Group {
    fn see(&mut self, seen: &KeyStats) {
        let before = if seen.delivered < self.counted { 0 } else { self.counted };
        self.delivered += seen.delivered - before;
        self.counted = seen.delivered;
        let settled =
            |sequence: u64| sequence < seen.highest_sequence || Some(sequence) <= seen.latest_delivered;
        while self.pending.front().is_some_and(|sequence| settled(*sequence)) {
            self.pending.pop_front();
            self.passed += 1;
        }
    }

    /// What others sent to the same group is delivered too and makes this smaller, never larger.
    fn given_up(&self) -> u64 {
        self.passed.saturating_sub(self.delivered)
    }
}

fn kind_of(group: &str) -> usize {
    let exact = KINDS.iter().position(|kind| kind.groups == 1 && kind.name == group);
    let prefix =
        || KINDS.iter().position(|kind| group.rsplit_once('-').is_some_and(|(name, _)| name == kind.name));
    exact.or_else(prefix).expect("the load publishes to groups of its kinds")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(delivered: u64, latest: u64) -> KeyStats {
        KeyStats {
            key: "order-01".to_owned(),
            calls: delivered,
            delivered,
            latest_delivered: Some(latest),
            highest_sequence: latest,
            out_of_order: 0,
            repeated: 0,
            overlapping: 0,
        }
    }

    fn witness(seen: &KeyStats) -> Witness {
        let mut witness = Witness::default();
        for sequence in [3, 7, 9] {
            witness.published("order-01", sequence);
        }
        witness.groups.get_mut("order-01").expect("published").see(seen);
        witness
    }

    #[test]
    fn a_message_that_was_overtaken_is_missed() {
        assert_eq!(witness(&seen(2, 7)).violation(0), None);
        let overtaken = witness(&seen(1, 7));
        assert!(overtaken.violation(0).is_some());
        assert_eq!(overtaken.violation(1), None, "unless it is a dead letter");
        let total = overtaken.total();
        assert_eq!((total.published, total.delivered, total.given_up, total.waiting), (3, 1, 1, 1));
    }

    #[test]
    fn a_call_says_that_those_before_it_are_settled() {
        let failing = KeyStats { latest_delivered: None, ..seen(0, 9) };
        let total = witness(&failing).total();
        assert_eq!((total.given_up, total.waiting), (2, 1), "the head may still be tried again");
    }

    #[test]
    fn what_was_forgotten_is_not_missed() {
        let mut overtaken = witness(&seen(1, 7));
        overtaken.forget();
        assert_eq!(overtaken.violation(0), None);
        let group = overtaken.groups.get_mut("order-01").expect("published");
        group.see(&KeyStats { delivered: 0, latest_delivered: None, ..seen(0, 7) });
        group.see(&seen(1, 9));
        assert_eq!(group.delivered, 2, "counting begins anew, and goes on");
    }

    #[test]
    fn the_targets_are_believed_when_they_saw_it() {
        let mut witness = witness(&seen(3, 9));
        witness.violations = 1;
        assert!(witness.violation(0).is_some());
    }

    #[test]
    fn every_group_has_its_kind() {
        for (place, kind) in KINDS.iter().enumerate() {
            assert_eq!(kind_of(&kind.group(1)), place);
            assert_eq!(kind_of(&kind.group(kind.groups)), place);
        }
    }
}
