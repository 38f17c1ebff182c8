//! How messages of one subscription are acknowledged: by one word for all of them where the broker can be told so, by one for each otherwise.
//!
//! `source.rs` says which messages are done, in any order; the channel hears of them. RabbitMQ takes an acknowledgement of *everything up to a message*, which
//! costs it, and its log, as much as that of a single one. It is only true of a message before which none is left; and it must name one that is still
//! unacknowledged, or the broker closes the channel.
//!
//! Groups finish their messages in another order than that of the queue, so what is done is rarely a prefix at once, and soon part of one: who has more waits for it. How
//! long that takes depends on how many other queues are served meanwhile, so it is not the time that decides but the window: what is done and untold takes up a part
//! of it, in which the broker sends nothing new, and half of it may wait so. Where the prefix stands still, because its next message is a long one, nobody waits.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lapin::Channel;
use lapin::options::BasicAckOptions;
use tokio::sync::{Mutex, MutexGuard, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::link::all_sent;
use crate::source::pushed::ANSWER;

/// A prefix that has not moved for so long is not waited for.
const STILL: Duration = Duration::from_millis(200);

/// Nor is one that moves waited for longer than this: the broker should know what is done.
const PATIENCE: Duration = Duration::from_millis(400);

/// One of so many messages in the window may be done and untold.
const UNTOLD: usize = 2;

/// The way back to the broker of what came over a subscription.
pub(super) struct Acks {
    channel: Channel,
    /// Held until all have left, so that none is overtaken by one for everything up to a later message.
    told: Mutex<Told>,
    /// So many may wait for the prefix.
    untold_max: usize,
}

impl Acks {
    /// For a subscription with such a window, in messages.
    pub(super) fn new(channel: Channel, window: u16) -> Self {
        let told = Mutex::new(Told::new(Instant::now()));
        Acks { channel, told, untold_max: usize::from(window) / UNTOLD }
    }

    /// Acknowledges messages by their numbers. There is no answer: the acknowledgements have left, or they have not.
    pub(super) async fn send(&self, numbers: &[u64]) -> bool {
        let Some(&last) = numbers.iter().max() else { return true };
        let mut told = self.told.lock().await;
        told.note_all(numbers, Instant::now());
        if let Some(word) = told.tell_prefix() {
            told = self.say(told, vec![word]).await;
        }
        let (at_last, mut reached) = (Instant::now() + PATIENCE, None);
        while told.can_be_said && last > told.prefix {
            let until = (told.moved + STILL).min(at_last);
            if until <= Instant::now() || told.untold.len() > self.untold_max {
                let words = told.tell_each(numbers);
                return self.say(told, words).await.can_be_said;
            }
            let reached = reached.get_or_insert_with(|| told.when_reached(last));
            drop(told);
            let _ = timeout_at(until, reached).await;
            told = self.told.lock().await;
        }
        told.can_be_said
    }

    /// Says words, and waits until they have left. After one that could not be said the channel is of no use.
    async fn say<'a>(
        &'a self,
        mut told: MutexGuard<'a, Told>,
        words: Vec<(u64, bool)>,
    ) -> MutexGuard<'a, Told> {
        let saying = words.into_iter().map(|(number, multiple)| {
            let channel = &self.channel;
            async move { channel.basic_ack(number, BasicAckOptions { multiple }).await }
        });
        told.can_be_said &= matches!(timeout(ANSWER, all_sent(saying)).await, Ok(Ok(_)));
        told.wake();
        told
    }
}

/// What is done, and what the broker was told of it. Messages are numbered from one on.
struct Told {
    /// Everything up to this one is done.
    prefix: u64,
    /// And these: from the first to the last of each row. Rows and not numbers: what passes by a message that stays for long must leave nothing behind.
    beyond: BTreeMap<u64, u64>,
    /// Done, and the broker was not told.
    untold: BTreeSet<u64>,
    /// When the prefix last moved.
    moved: Instant,
    /// Who waits for it to reach which message.
    waiting: BTreeMap<u64, Vec<oneshot::Sender<()>>>,
    /// Whatever was to be said could be.
    can_be_said: bool,
}

impl Told {
    fn new(now: Instant) -> Self {
        Told {
            prefix: 0,
            beyond: BTreeMap::new(),
            untold: BTreeSet::new(),
            moved: now,
            waiting: BTreeMap::new(),
            can_be_said: true,
        }
    }

    /// Ends when the prefix has reached a message, and the broker was told, or nothing can be said any more.
    fn when_reached(&mut self, number: u64) -> oneshot::Receiver<()> {
        let (reached, answer) = oneshot::channel();
        self.waiting.entry(number).or_default().push(reached);
        answer
    }

    /// Wakes those who have waited long enough.
    fn wake(&mut self) {
        let still = if self.can_be_said { self.prefix } else { u64::MAX };
        let beyond = self.waiting.split_off(&still.saturating_add(1));
        // Whoever waits hears that its other end is gone.
        drop(std::mem::replace(&mut self.waiting, beyond));
    }

    /// Messages are done.
    fn note_all(&mut self, numbers: &[u64], now: Instant) {
        numbers.iter().for_each(|number| self.note(*number));
        self.untold.extend(numbers);
        if let Some(last) = self.beyond.remove(&(self.prefix + 1)) {
            (self.prefix, self.moved) = (last, now);
        }
    }

    /// One word for all of the prefix that the broker was not told; whether it is true for everything before, or only for the one.
    fn tell_prefix(&mut self) -> Option<(u64, bool)> {
        let beyond = self.untold.split_off(&(self.prefix + 1));
        let within = std::mem::replace(&mut self.untold, beyond);
        within.last().map(|last| (*last, within.len() > 1))
    }

    /// A word for each of these that the broker was not told.
    fn tell_each(&mut self, numbers: &[u64]) -> Vec<(u64, bool)> {
        let untold = numbers.iter().filter(|number| self.untold.remove(number));
        untold.map(|number| (*number, false)).collect()
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

    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    fn told() -> Told {
        Told::new(Instant::now())
    }

    impl Told {
        /// What is said where nobody waits.
        fn tell(&mut self, numbers: &[u64]) -> Vec<(u64, bool)> {
            self.note_all(numbers, Instant::now());
            let all = self.tell_prefix();
            all.into_iter().chain(self.tell_each(numbers)).collect()
        }
    }

    #[test]
    fn a_prefix_is_told_by_its_last_and_the_rest_one_by_one() {
        let mut told = told();
        assert_eq!(told.tell(&[2, 1, 3]), [(3, true)]);
        assert_eq!(told.tell(&[6, 5]), [(6, false), (5, false)], "4 is left");
        assert_eq!(told.tell(&[4]), [(4, false)], "what is behind it was told already");
        assert_eq!(told.tell(&[9, 8, 7, 11]), [(9, true), (11, false)]);
        assert_eq!((told.prefix, told.beyond.len()), (9, 1));
        assert_eq!(told.tell(&[11, 8]), [(8, false), (11, false)], "once more, after they could not be sent");
        assert_eq!((told.prefix, told.beyond.len(), told.untold.len()), (9, 1, 0));
        assert!(told.tell(&[]).is_empty());
    }

    #[test]
    fn what_has_waited_for_the_prefix_is_told_with_it() {
        let mut told = told();
        let began = told.moved;
        told.note_all(&[3, 2, 5], began + STILL);
        assert_eq!((told.tell_prefix(), told.moved), (None, began), "1 is left");
        told.note_all(&[1], began + STILL);
        assert_eq!((told.tell_prefix(), told.moved), (Some((3, true)), began + STILL));
        assert_eq!(told.tell_each(&[3, 2, 5]), [(5, false)], "the others were told");
        assert!(told.untold.is_empty());
    }

    #[test]
    fn who_waits_is_woken_when_the_prefix_is_there_or_the_channel_is_not() {
        let mut told = told();
        let [mut near, mut far] = [3, 5].map(|number| told.when_reached(number));
        let is_over = |waiting: &mut oneshot::Receiver<()>| waiting.try_recv() == Err(TryRecvError::Closed);
        told.note_all(&[3, 2], Instant::now());
        told.wake();
        assert!(!is_over(&mut near), "1 is left");
        told.note_all(&[1], Instant::now());
        told.wake();
        assert_eq!([&mut near, &mut far].map(is_over), [true, false]);
        told.can_be_said = false;
        told.wake();
        assert!(is_over(&mut far) && told.waiting.is_empty());
    }

    #[test]
    fn what_passes_by_a_message_that_stays_leaves_nothing_behind() {
        let mut told = told();
        for number in 2..=100_000 {
            assert_eq!(told.tell(&[number]), [(number, false)]);
            assert_eq!((told.beyond.len(), told.untold.len()), (1, 0));
        }
        assert_eq!(told.tell(&[1]), [(1, false)]);
        assert_eq!((told.prefix, told.beyond.len()), (100_000, 0));
    }

    /// The broker's side: what is outstanding, and what it makes of each word. Some wait for the prefix, some do not.
    #[test]
    fn the_broker_never_hears_of_a_message_twice_nor_of_one_that_is_not_done() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut told, mut outstanding) = (told(), (1..=300).collect::<BTreeSet<u64>>());
            let (mut left, mut done) = ((1..=300).collect::<Vec<u64>>(), BTreeSet::new());
            while !left.is_empty() {
                let batch: Vec<u64> = (0..random.usize(1..20).min(left.len()))
                    .map(|_| left.remove(random.usize(..left.len().min(30))))
                    .collect();
                done.extend(&batch);
                told.note_all(&batch, Instant::now());
                let mut words: Vec<_> = told.tell_prefix().into_iter().collect();
                if random.bool() {
                    words.extend(told.tell_each(&batch));
                }
                for (number, multiple) in words {
                    assert!(outstanding.contains(&number), "seed {seed}: {number} is told twice");
                    outstanding.retain(|other| *other != number && !(multiple && *other < number));
                }
                let waiting: BTreeSet<u64> = outstanding.intersection(&done).copied().collect();
                assert_eq!(
                    waiting, told.untold,
                    "seed {seed}: something done was neither told nor is waiting"
                );
                assert_eq!(
                    outstanding.len() + done.len() - waiting.len(),
                    300,
                    "seed {seed}: something not done was told"
                );
            }
            assert!(outstanding.is_empty(), "seed {seed}: everything is a prefix at the end");
        }
    }
}
