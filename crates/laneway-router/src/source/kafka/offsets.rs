//! Which records of a partition are finished, and how to say so in a commit. No Kafka here: numbers and text.
//!
//! Kafka remembers one offset per partition and consumer group: everything before it is finished. Records are finished in any order, since keys do not wait for each other,
//! so only the *prefix* can be committed, up to the first record that is not finished; and without more, a restart would repeat everything behind it. A commit carries a text
//! of up to 4096 bytes, though, which nobody else uses: in it we write what is finished behind the prefix.
//!
//! `reader.rs` says what was read and what is finished, and commits what [`Offsets::commit`] says. After a restart, or a rebalance, the next owner begins with
//! [`Offsets::resume`], and [`Offsets::read`] tells it which records to leave out.
//!
//! # The text
//!
//! `L1r` and the lengths of the runs, alternating between not finished and finished, from the prefix on; or `L1b` and a bit per offset, a set one for finished; whichever
//! is shorter. Both in base64. Offsets that hold no record (compacted away, or a transaction's marks) count as finished. A text that is none of ours, or is damaged,
//! says nothing: what was finished behind the prefix is then repeated.
//!
//! # The bound
//!
//! The reader stops at a window of at most [`SPAN_MAX`] offsets behind the prefix, for which the bits always fit. Only a gap in the offsets can lead beyond that; then as
//! many runs are written as fit, and what does not fit would be repeated.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;

/// The widest window: its bits take 2,500 bytes, and 3,334 in base64.
pub(super) const SPAN_MAX: i64 = 20_000;

/// What a broker takes by default (`offset.metadata.max.bytes`).
const TEXT_BYTES_MAX: usize = 4_096;

/// Bytes that fit, before base64 and without the mark.
const BYTES_MAX: usize = (TEXT_BYTES_MAX - 4) / 4 * 3;

const RUNS: &str = "L1r";
const BITS: &str = "L1b";

/// No gap is wider than this: whoever says so is mistaken.
const RUN_MAX: u64 = 1 << 48;

/// What is known of a partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Offsets {
    /// Everything before it is finished; none before the first record has been read.
    prefix: Option<i64>,
    /// The offset behind the last record that was read.
    next: i64,
    /// What is finished from the prefix on: runs by their starts, with their ends. No two touch, and none begins at the prefix.
    finished: BTreeMap<i64, i64>,
}

/// What to do with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// It is new.
    New,
    /// It was finished before.
    Finished,
    /// It has been read before: somebody has turned the partition back.
    Again,
}

/// Offsets between two records that were read one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Skipped {
    pub(super) from: i64,
    /// So many of them were not finished before.
    pub(super) unfinished: i64,
}

impl Skipped {
    /// How many there are of them before the first offset that the broker still has. Only those were there once, as far as anybody can know: the others hold no record.
    pub(super) fn before(&self, first: i64) -> i64 {
        self.unfinished.min((first - self.from).max(0))
    }
}

/// What a commit says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Commit {
    pub(super) offset: i64,
    pub(super) text: String,
}

impl Offsets {
    /// Nothing was committed before.
    pub(super) fn new() -> Self {
        Offsets::default()
    }

    /// Where a commit has left off.
    pub(super) fn resume(commit: &Commit) -> Self {
        let finished = decode(commit.offset, &commit.text).unwrap_or_default();
        Offsets { prefix: Some(commit.offset), next: commit.offset, finished }
    }

    /// What a record at this offset would skip, of what was not finished.
    pub(super) fn skips(&self, offset: i64) -> Option<Skipped> {
        let (from, to) = (self.next()?, offset);
        let overlap = |(start, end): (&i64, &i64)| ((*end).min(to) - (*start).max(from)).max(0);
        let unfinished = to - from - self.finished.range(..to).map(overlap).sum::<i64>();
        (unfinished > 0).then_some(Skipped { from, unfinished })
    }

    /// A record has been read. What was skipped on the way does not exist, and so is finished.
    pub(super) fn read(&mut self, offset: i64) -> Reading {
        let Some(prefix) = self.prefix else {
            (self.prefix, self.next) = (Some(offset), offset + 1);
            return Reading::New;
        };
        if offset < self.next {
            return Reading::Again;
        }
        let (from, was_finished) = (self.next.max(prefix), self.is_finished(offset));
        if from < offset {
            self.insert(from, offset);
        }
        self.next = offset + 1;
        if was_finished { Reading::Finished } else { Reading::New }
    }

    /// A record is finished.
    pub(super) fn finish(&mut self, offset: i64) {
        if self.prefix.is_some_and(|prefix| offset >= prefix) {
            self.insert(offset, offset + 1);
        }
    }

    /// What to commit, if anything was read.
    pub(super) fn commit(&self) -> Option<Commit> {
        let offset = self.prefix?;
        Some(Commit { offset, text: encode(offset, &self.finished) })
    }

    /// How many offsets there are from the prefix to the end of what was read.
    pub(super) fn span(&self) -> i64 {
        self.prefix.map_or(0, |prefix| (self.next - prefix).max(0))
    }

    /// Where reading goes on.
    pub(super) fn next(&self) -> Option<i64> {
        self.prefix.map(|prefix| self.next.max(prefix))
    }

    fn is_finished(&self, offset: i64) -> bool {
        let before = self.prefix.is_some_and(|prefix| offset < prefix);
        before || self.finished.range(..=offset).next_back().is_some_and(|(_, end)| offset < *end)
    }

    /// Adds a run, joins it with those that it touches, and moves the prefix if it can.
    fn insert(&mut self, mut start: i64, mut end: i64) {
        while let Some((&other_start, &other_end)) = self.finished.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            (start, end) = (start.min(other_start), end.max(other_end));
            self.finished.remove(&other_start);
        }
        if Some(start) <= self.prefix {
            self.prefix = self.prefix.max(Some(end));
        } else {
            self.finished.insert(start, end);
        }
    }
}

// ── the text ──────────────────────────────────────────────────────────────────────────────────────────────────────────

fn encode(prefix: i64, finished: &BTreeMap<i64, i64>) -> String {
    if finished.is_empty() {
        return String::new();
    }
    let (runs, is_whole) = encode_runs(prefix, finished);
    let span = finished.last_key_value().map_or(0, |(_, end)| end - prefix);
    let bits_len = (span as usize).div_ceil(8);
    if span <= SPAN_MAX && (!is_whole || bits_len < runs.len()) {
        return format!("{BITS}{}", BASE64.encode(encode_bits(prefix, finished, bits_len)));
    }
    format!("{RUNS}{}", BASE64.encode(runs))
}

/// The lengths of runs, as many as fit, and whether those are all.
fn encode_runs(prefix: i64, finished: &BTreeMap<i64, i64>) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    let mut at = prefix;
    for (&start, &end) in finished {
        let before = bytes.len();
        write_number(&mut bytes, (start - at) as u64);
        write_number(&mut bytes, (end - start) as u64);
        if bytes.len() > BYTES_MAX {
            bytes.truncate(before);
            return (bytes, false);
        }
        at = end;
    }
    (bytes, true)
}

fn encode_bits(prefix: i64, finished: &BTreeMap<i64, i64>, len: usize) -> Vec<u8> {
    let mut bits = vec![0_u8; len];
    for offset in finished.iter().flat_map(|(start, end)| *start..*end) {
        let place = (offset - prefix) as usize;
        bits[place / 8] |= 1 << (place % 8);
    }
    bits
}

/// What is finished behind the prefix, or nothing if the text is none of ours.
fn decode(prefix: i64, text: &str) -> Option<BTreeMap<i64, i64>> {
    if text.len() > TEXT_BYTES_MAX || prefix < 0 {
        return None;
    }
    if let Some(runs) = text.strip_prefix(RUNS) {
        return decode_runs(prefix, &BASE64.decode(runs).ok()?);
    }
    decode_bits(prefix, &BASE64.decode(text.strip_prefix(BITS)?).ok()?)
}

fn decode_runs(prefix: i64, mut bytes: &[u8]) -> Option<BTreeMap<i64, i64>> {
    let mut finished = BTreeMap::new();
    let mut at = prefix;
    while !bytes.is_empty() {
        let (skipped, length) = (read_number(&mut bytes)?, read_number(&mut bytes)?);
        if skipped == 0 || length == 0 {
            return None;
        }
        let start = at.checked_add(skipped as i64)?;
        let end = start.checked_add(length as i64)?;
        finished.insert(start, end);
        at = end;
    }
    Some(finished)
}

fn decode_bits(prefix: i64, bits: &[u8]) -> Option<BTreeMap<i64, i64>> {
    let mut finished = BTreeMap::new();
    let is_set = |place: usize| bits.get(place / 8).is_some_and(|byte| byte & (1 << (place % 8)) != 0);
    if is_set(0) || prefix.checked_add(bits.len() as i64 * 8).is_none() {
        return None;
    }
    let mut start = None;
    for place in 0..=bits.len() * 8 {
        match (start, is_set(place)) {
            (None, true) => start = Some(place),
            (Some(begun), false) => {
                finished.insert(prefix + begun as i64, prefix + place as i64);
                start = None;
            }
            _ => {}
        }
    }
    Some(finished)
}

/// Seven bits per byte, the lowest first; the eighth says that more follow.
fn write_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn read_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if number > RUN_MAX || shift > 42 {
            return None;
        }
        if byte & 0x80 == 0 {
            break;
        }
    }
    Some(number)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The naive one: every offset that was read and is not finished, one by one.
    #[derive(Default)]
    struct Model {
        read: BTreeSet<i64>,
        finished: BTreeSet<i64>,
    }

    impl Model {
        fn open(&self) -> BTreeSet<i64> {
            self.read.difference(&self.finished).copied().collect()
        }

        fn prefix(&self) -> Option<i64> {
            let next = self.read.last().map(|last| last + 1);
            self.open().first().copied().or(next)
        }
    }

    fn after_restart(offsets: &Offsets, log: &[i64]) -> Vec<i64> {
        let Some(commit) = offsets.commit() else { return log.to_vec() };
        assert!(commit.text.len() <= TEXT_BYTES_MAX);
        let mut again = Offsets::resume(&commit);
        let from_there = log.iter().copied().filter(|offset| *offset >= commit.offset);
        from_there.filter(|offset| again.read(*offset) == Reading::New).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Whatever is finished in whatever order, with gaps in the offsets: the prefix is that of the model, and a restart delivers exactly what was
        /// not finished, and what had not been read.
        #[test]
        fn a_restart_repeats_exactly_what_was_not_finished(
            gaps in prop::collection::vec(1_i64..4, 1..300),
            order in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..400),
            first in 0_i64..1_000_000_000_000,
        ) {
            let log: Vec<i64> = gaps.iter().scan(first, |at, gap| { *at += gap; Some(*at) }).collect();
            let (mut offsets, mut model) = (Offsets::new(), Model::default());
            let mut unread = log.iter().copied();
            for (choice, reads) in order {
                if reads {
                    if let Some(offset) = unread.next() {
                        prop_assert_eq!(offsets.read(offset), Reading::New);
                        prop_assert_eq!(offsets.read(offset), Reading::Again);
                        model.read.insert(offset);
                    }
                } else {
                    let open: Vec<i64> = model.open().into_iter().collect();
                    if !open.is_empty() {
                        let offset = open[choice.index(open.len())];
                        offsets.finish(offset);
                        offsets.finish(offset);
                        model.finished.insert(offset);
                    }
                }
                prop_assert_eq!(offsets.commit().map(|commit| commit.offset), model.prefix());
                prop_assert_eq!(offsets.span(), model.prefix().map_or(0, |p| model.read.last().unwrap() + 1 - p));
            }
            let due: Vec<i64> = log.iter().copied().filter(|offset| !model.finished.contains(offset)).collect();
            prop_assert_eq!(after_restart(&offsets, &log), due);
        }

        /// A second commit after a restart, before everything has been read again, forgets nothing.
        #[test]
        fn what_was_finished_before_two_restarts_stays_finished(
            finished in prop::collection::btree_set(0_i64..500, 0..400),
            read_again in 0_usize..500,
        ) {
            let log: Vec<i64> = (0..500).collect();
            let mut offsets = Offsets::new();
            log.iter().for_each(|offset| { offsets.read(*offset); });
            finished.iter().for_each(|offset| offsets.finish(*offset));
            let commit = offsets.commit().unwrap();
            let mut second = Offsets::resume(&commit);
            log.iter().filter(|it| **it >= commit.offset).take(read_again).for_each(|it| { second.read(*it); });
            let due: Vec<i64> = log.iter().copied().filter(|offset| !finished.contains(offset)).collect();
            prop_assert_eq!(after_restart(&second, &log), due);
        }

        /// Any text at all is read without a panic, and what is read from it is well formed.
        #[test]
        fn no_text_does_harm(prefix in any::<i64>(), mark in "L1[rb]|", bytes in prop::collection::vec(any::<u8>(), 0..600), text in ".{0,200}") {
            for text in [format!("{mark}{}", BASE64.encode(&bytes)), format!("{mark}{text}"), text.clone()] {
                if let Some(finished) = decode(prefix, &text) {
                    let mut at = prefix;
                    for (start, end) in finished {
                        prop_assert!(start > at && end > start);
                        at = end;
                    }
                }
            }
        }

    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]

        /// In a window without gaps everything fits, however it is scattered.
        #[test]
        fn a_window_always_fits(seed in any::<u64>()) {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut offsets = Offsets::new();
            (0..SPAN_MAX).for_each(|offset| { offsets.read(offset); });
            let finished: BTreeSet<i64> = (1..SPAN_MAX).filter(|_| random.bool()).collect();
            finished.iter().for_each(|offset| offsets.finish(*offset));
            let log: Vec<i64> = (0..SPAN_MAX).collect();
            let due: Vec<i64> = log.iter().copied().filter(|offset| !finished.contains(offset)).collect();
            prop_assert_eq!(after_restart(&offsets, &log), due);
        }
    }

    #[test]
    fn what_does_not_fit_is_repeated_and_nothing_else_is() {
        // A compacted topic: every record a thousand offsets from the next, every second one finished.
        let log: Vec<i64> = (0..6_000).map(|n| n * 1_000).collect();
        let mut offsets = Offsets::new();
        log.iter().for_each(|offset| {
            offsets.read(*offset);
        });
        log.iter().skip(1).step_by(2).for_each(|offset| offsets.finish(*offset));
        let again = after_restart(&offsets, &log);
        assert!(again.len() < log.len(), "the first ones are known");
        assert!(
            log.iter().step_by(2).all(|offset| again.contains(offset)),
            "what was not finished comes again"
        );
    }

    #[test]
    fn what_is_skipped_and_was_not_finished_is_counted() {
        let mut offsets = Offsets::new();
        assert_eq!(offsets.skips(7), None, "nothing is known of what was before the first");
        (0..10).for_each(|offset| {
            offsets.read(offset);
        });
        [0, 1, 4, 5, 8].into_iter().for_each(|offset| offsets.finish(offset));
        let again = Offsets::resume(&offsets.commit().unwrap());
        assert_eq!((again.skips(2), again.skips(1)), (None, None), "the prefix is next");
        let skipped = again.skips(9).unwrap();
        assert_eq!(skipped, Skipped { from: 2, unfinished: 4 }, "2, 3, 6 and 7");
        assert_eq!([0, 3, 9, 20].map(|first| skipped.before(first)), [0, 1, 4, 4]);
    }

    #[test]
    fn a_quiet_partition_says_nothing() {
        let mut offsets = Offsets::new();
        assert_eq!((offsets.commit(), offsets.span(), offsets.next()), (None, 0, None));
        assert_eq!(offsets.read(7), Reading::New);
        offsets.finish(7);
        assert_eq!(offsets.commit(), Some(Commit { offset: 8, text: String::new() }));
        assert_eq!((offsets.span(), offsets.next()), (0, Some(8)));
    }
}
