//! How messages of one subscription are acknowledged: by one word for all of them where the broker can be told so, by one for each otherwise.
//!
//! `source.rs` says which messages are done, in any order; the channel hears of them. RabbitMQ takes an acknowledgement of *everything up to a message*, which
//! costs it, and its log, as much as that of a single one. It is only true of a message before which none is left; and it must name one that is still
//! unacknowledged, or the broker closes the channel.

use std::collections::BTreeMap;

use lapin::Channel;
use lapin::options::BasicAckOptions;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::link::all_sent;
use crate::source::pushed::ANSWER;

/// The way back to the broker of what came over a subscription.
pub(super) struct Acks {
    channel: Channel,
    /// Held until all have left, so that none is overtaken by one for everything up to a later message.
    told: Mutex<Told>,
}

impl Acks {
    pub(super) fn new(channel: Channel) -> Self {
        Acks { channel, told: Mutex::default() }
    }

    /// Acknowledges messages by their numbers. There is no answer: the acknowledgements have left, or they have not.
    pub(super) async fn send(&self, numbers: &[u64]) -> bool {
        let mut told = self.told.lock().await;
        let words = told.tell(numbers);
        let sending = words.into_iter().map(|(number, multiple)| {
            let channel = &self.channel;
            async move { channel.basic_ack(number, BasicAckOptions { multiple }).await }
        });
        matches!(timeout(ANSWER, all_sent(sending)).await, Ok(Ok(_)))
    }
}

/// What the broker was told. Messages are numbered from one on.
#[derive(Default)]
struct Told {
    /// Everything up to this one.
    prefix: u64,
    /// And these: from the first to the last of each row. Rows and not numbers: what passes by a message that stays for long must leave nothing behind.
    beyond: BTreeMap<u64, u64>,
}

impl Told {
    /// The acknowledgements to be sent, in this order; those that are true for everything before are marked.
    fn tell(&mut self, numbers: &[u64]) -> Vec<(u64, bool)> {
        numbers.iter().for_each(|number| self.note(*number));
        if let Some(last) = self.beyond.remove(&(self.prefix + 1)) {
            self.prefix = last;
        }
        let (within, alone): (Vec<u64>, Vec<u64>) =
            numbers.iter().partition(|number| **number <= self.prefix);
        let all = within.iter().max().map(|last| (*last, within.len() > 1));
        all.into_iter().chain(alone.into_iter().map(|number| (number, false))).collect()
    }

    /// Lengthens the row before it, the row behind it, or makes one of both. What was told before is told again when it could not be sent, and is in a row already.
    fn note(&mut self, number: u64) {
        let is_in_row = self.beyond.range(..=number).next_back().is_some_and(|(_, end)| *end >= number);
        if number <= self.prefix || is_in_row {
            return;
        }
        let last = self.beyond.remove(&(number + 1)).unwrap_or(number);
        match self.beyond.range_mut(..number).next_back() {
            Some((_, end)) if *end + 1 == number => *end = last,
            _ => drop(self.beyond.insert(number, last)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_prefix_is_told_by_its_last_and_the_rest_one_by_one() {
        let mut told = Told::default();
        assert_eq!(told.tell(&[2, 1, 3]), [(3, true)]);
        assert_eq!(told.tell(&[6, 5]), [(6, false), (5, false)], "4 is left");
        assert_eq!(told.tell(&[4]), [(4, false)], "what is behind it was told already");
        assert_eq!(told.tell(&[9, 8, 7, 11]), [(9, true), (11, false)]);
        assert_eq!((told.prefix, told.beyond.len()), (9, 1));
        assert_eq!(told.tell(&[11, 8]), [(8, false), (11, false)], "once more, after they could not be sent");
        assert_eq!((told.prefix, told.beyond.len()), (9, 1));
        assert!(told.tell(&[]).is_empty());
    }

    #[test]
    fn what_passes_by_a_message_that_stays_leaves_nothing_behind() {
        let mut told = Told::default();
        for number in 2..=100_000 {
            assert_eq!(told.tell(&[number]), [(number, false)]);
            assert_eq!(told.beyond.len(), 1);
        }
        assert_eq!(told.tell(&[1]), [(1, false)]);
        assert_eq!((told.prefix, told.beyond.len()), (100_000, 0));
    }

    /// The broker's side: what is outstanding, and what it makes of each word.
    #[test]
    fn the_broker_never_hears_of_a_message_twice_nor_of_one_that_is_not_done() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut told, mut outstanding) = (Told::default(), (1..=300).collect::<BTreeSet<u64>>());
            let (mut left, mut done) = ((1..=300).collect::<Vec<u64>>(), BTreeSet::new());
            while !left.is_empty() {
                let batch: Vec<u64> = (0..random.usize(1..20).min(left.len()))
                    .map(|_| left.remove(random.usize(..left.len().min(30))))
                    .collect();
                done.extend(&batch);
                for (number, multiple) in told.tell(&batch) {
                    assert!(outstanding.contains(&number), "seed {seed}: {number} is told twice");
                    outstanding.retain(|other| *other != number && !(multiple && *other < number));
                }
                assert!(outstanding.is_disjoint(&done), "seed {seed}: something done was not told");
                assert_eq!(outstanding.len() + done.len(), 300, "seed {seed}: something not done was told");
            }
        }
    }
}
