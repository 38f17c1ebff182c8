//! Messages that are done and whose rows have not been removed from the file yet.
//!
//! Messages are settled in another order than they were published in: the rows of a commit's settlements lie on as many pages as there are
//! settlements, and removing each at once writes a page per message. So when many come together the writer (`writer.rs`) only notes their sequences, in one row for all of
//! them, and removes the rows later, neighbours together. To everybody else they are gone with the commit that notes them: whoever opens the
//! file reads the notes first.
//!
//! ```text
//!  settled ──► a note, in the commit that was answered ──► when enough wait, the lowest are removed, and the notes are written anew
//! ```
//!
//! The lowest sequences go first, because nothing around them is likely to be settled later: a page is written once or twice in all.

use std::collections::HashSet;

use super::index::Sequence;

/// From so many settlements in one commit on they are noted; fewer are removed at once, which costs no more.
pub(super) const MANY: usize = 32;

/// So many rows wait to be removed before the first are. A hot group lags behind the others, by tens of thousands of messages in a long backlog, and
/// its rows are on every page: the more wait, the more of the lowest are whole pages. Their numbers are half a megabyte at most. Measured: a delivery from a backlog of Zipf groups
/// costs a tenth less than with a quarter of it, and no less with twice as many.
const DUE: std::ops::RangeInclusive<usize> = 256..=64 * 1024;

/// And no more of them than have so many bytes of text, about: they take room in the file.
const DUE_BYTES: usize = 64 * 1024 * 1024;

/// What a message is taken to have until some have been published.
const TEXT_BYTES: usize = 4 * 1024;

/// This part of them is removed in one transaction; it bounds how long others wait for it: a few milliseconds. What is left is noted anew each time, so it is not small, either.
const PART: usize = 16;

/// What is noted and not removed.
#[derive(Debug)]
pub(super) struct Sweep {
    noted: Vec<Sequence>,
    /// Bytes of a message's text, averaged over the last few hundred that were published.
    text_bytes: usize,
    /// Rows that could not be removed. They stay noted; the next opening tries again.
    stuck: Vec<Sequence>,
}

impl Sweep {
    /// What the notes of a file say.
    pub(super) fn new(noted: Vec<Sequence>) -> Self {
        Sweep { noted, text_bytes: TEXT_BYTES, stuck: Vec::new() }
    }

    /// A message with a text of so many bytes was published.
    pub(super) fn published(&mut self, bytes: usize) {
        self.text_bytes = (self.text_bytes * 127 + bytes) / 128;
    }

    fn due(&self) -> usize {
        (DUE_BYTES / self.text_bytes.max(1)).clamp(*DUE.start(), *DUE.end())
    }

    /// These were noted.
    pub(super) fn add(&mut self, noted: Vec<Sequence>) {
        self.noted.extend(noted);
    }

    /// The messages that are done although their rows are there.
    pub(super) fn done(&self) -> HashSet<Sequence, foldhash::fast::RandomState> {
        self.noted.iter().chain(&self.stuck).copied().collect()
    }

    /// Takes out the rows to be removed next, if enough have come together, or any if all are wanted.
    pub(super) fn next(&mut self, all: bool) -> Option<Vec<Sequence>> {
        if self.noted.is_empty() || (!all && self.noted.len() < self.due()) {
            return None;
        }
        let count = if all { self.noted.len() } else { self.due() / PART };
        if count < self.noted.len() {
            self.noted.select_nth_unstable(count);
        }
        let rest = self.noted.split_off(count);
        Some(std::mem::replace(&mut self.noted, rest))
    }

    /// What has to stay noted when that is done.
    pub(super) fn rest(&self) -> Vec<Sequence> {
        [self.noted.as_slice(), self.stuck.as_slice()].concat()
    }

    /// These could not be removed.
    pub(super) fn failed(&mut self, part: Vec<Sequence>) {
        self.stuck.extend(part);
    }
}

/// Sequences as a note has them: in ascending order, each as the distance from the one before, seven bits to a byte, the lowest first.
pub(super) fn encode(sequences: &mut [Sequence]) -> Vec<u8> {
    sequences.sort_unstable();
    let mut bytes = Vec::with_capacity(sequences.len() * 2);
    let mut before = 0;
    for sequence in sequences {
        let mut distance = *sequence - before;
        before = *sequence;
        while distance >= 0x80 {
            bytes.push(distance as u8 | 0x80);
            distance >>= 7;
        }
        bytes.push(distance as u8);
    }
    bytes
}

/// Adds what a note says; nothing if it is not one.
pub(super) fn decode(bytes: &[u8], sequences: &mut Vec<Sequence>) -> Option<()> {
    let (mut before, mut distance, mut shift) = (0u64, 0u64, 0u32);
    for byte in bytes {
        let bits = u64::from(byte & 0x7f);
        // The tenth byte has room for one bit.
        if shift > 63 || (shift == 63 && bits > 1) {
            return None;
        }
        distance |= bits << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            before = distance.checked_add(before)?;
            sequences.push(before);
            (distance, shift) = (0, 0);
        }
    }
    (shift == 0).then_some(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_take_a_byte_each() {
        let mut sequences: Vec<_> = (1_000_000..1_000_128).rev().collect();
        assert_eq!(encode(&mut sequences).len(), 127 + 3);
    }

    #[test]
    fn what_is_not_a_note_is_told() {
        for bytes in [
            &[0x80][..],
            &[0xff; 10],
            &[0x80; 11],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 1],
        ] {
            assert_eq!(decode(bytes, &mut Vec::new()), None, "{bytes:?}");
        }
    }

    #[test]
    fn the_lowest_go_first_and_what_cannot_be_removed_stays_noted() {
        let mut sweep = Sweep::new(Vec::new());
        (0..1_000).for_each(|_| sweep.published(300));
        let (due, part) = (65_536, 4_096);
        sweep.add((0..due - 1).rev().collect());
        assert_eq!(sweep.next(false), None);
        sweep.add(vec![1_000_000]);
        let mut removed = sweep.next(false).expect("enough have come together");
        removed.sort_unstable();
        assert_eq!(removed, (0..part).collect::<Vec<_>>());
        assert_eq!(sweep.next(false), None);
        sweep.failed(vec![7]);
        let mut rest = sweep.rest();
        rest.sort_unstable();
        let expected = std::iter::once(7).chain(part..due - 1).chain([1_000_000]);
        assert_eq!(rest, expected.collect::<Vec<_>>());
        assert_eq!(sweep.next(true).map(|all| all.len() as u64), Some(due - part));
        assert_eq!(sweep.next(true), None, "what is stuck is not tried again");
    }

    #[test]
    fn long_messages_go_before_they_fill_the_disk() {
        let mut sweep = Sweep::new(Vec::new());
        (0..2_000).for_each(|_| sweep.published(256 * 1024));
        sweep.add((0..255).collect());
        assert_eq!(sweep.next(false), None);
        sweep.add((255..260).collect());
        assert_eq!(sweep.next(false).map(|part| part.len()), Some(16), "64 MiB wait");
    }

    proptest! {
        #[test]
        fn a_note_says_what_was_noted(mut sequences in proptest::collection::vec(any::<u64>(), 0..100)) {
            let note = encode(&mut sequences);
            let mut read = Vec::new();
            prop_assert_eq!(decode(&note, &mut read), Some(()));
            prop_assert_eq!(read, sequences);
        }

        #[test]
        fn nonsense_does_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&bytes, &mut Vec::new());
        }
    }
}
