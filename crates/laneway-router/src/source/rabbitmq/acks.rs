//! How messages of one subscription are acknowledged: by one word for all of them where the broker can be told so, by one for each otherwise.
//!
//! `source.rs` says which messages are done, in any order; the channel hears of them. RabbitMQ takes an acknowledgement of *everything up to a message*, which
//! costs it, and its log, as much as that of a single one. It is only true of a message before which none is left; and it must name one that is still
//! unacknowledged, or the broker closes the channel.
//!
//! Groups finish their messages in another order than that of the queue, so what is done is rarely a prefix at once, and soon part of one: who has more waits for it. How
//! long that takes depends on how many other queues are served meanwhile (with eight on two cores a message is in the house for 80 ms), so it is less the time that decides than the window:
//! what is done and untold takes up a part of it, in which the broker sends nothing new, and half of it may wait so. Where the prefix stands still, because its next message
//! is a long one, nobody waits.
//!
//! Whoever waits when the subscription ends is told so at once ([`Acks::end`]): what the broker has not heard of comes again, and must be remembered by then.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lapin::Channel;
use lapin::options::BasicAckOptions;
use tokio::sync::{Mutex, MutexGuard, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::link::all_sent;
use crate::source::pushed::ANSWER;

/// A prefix that has moved within this time is waited for, whatever the window: a few times what a window of quick messages takes where nothing else is done.
const SOON: Duration = Duration::from_millis(5);

/// One that has not moved for so long is not: more than a window of quick messages took with eight queues on two cores, and still short for an operator who looks at the broker.
const STILL: Duration = Duration::from_millis(200);

/// Nor does anybody wait for longer than this for one that moves: the broker should know what is done.
const PATIENCE: Duration = Duration::from_millis(400);

/// One of so many messages in the window may be done and untold. With one in four, eight queues had nearly four times as many words to say.
const UNTOLD: usize = 2;

/// In a smaller window each place counts, and nobody waits for longer than [`SOON`].
const WINDOW_MIN: usize = 64;

/// The way back to the broker of what came over a subscription.
pub(super) struct Acks {
    channel: Channel,
    /// Held until all have left, so that none is overtaken by one for everything up to a later message.
    told: Mutex<Told>,
}

impl Acks {
    /// For a subscription with such a window, in messages.
    pub(super) fn new(channel: Channel, window: u16) -> Self {
        Acks { channel, told: Mutex::new(Told::new(usize::from(window), Instant::now())) }
    }

    /// Acknowledges messages by their numbers, when the prefix has come so far if they can wait for it. There is no answer: the acknowledgements have left, or they have not.
    pub(super) async fn send(&self, numbers: &[u64], can_wait: bool) -> bool {
        let Some(&last) = numbers.iter().max() else { return true };
        let began = Instant::now();
        let mut told = self.told.lock().await;
        told.note_all(numbers, began);
        if let Some(word) = told.tell_prefix() {
            told = self.say(told, vec![word]).await;
        }
        let mut reached = None;
        while told.can_be_said && told.is_untold(numbers) {
            let until = told.waits_until(began, Instant::now()).filter(|_| can_wait);
            let Some(until) = until else {
                let words = told.tell_each(numbers);
                return self.say(told, words).await.can_be_said;
            };
            let reached = reached.get_or_insert_with(|| told.when_reached(last));
            drop(told);
            let _ = timeout_at(until, reached).await;
            told = self.told.lock().await;
        }
        told.can_be_said
    }

    /// The subscription is at its end: tells all that is done, as far as that can be said, and nobody waits any more.
    pub(super) async fn end(&self) {
        let mut told = self.told.lock().await;
        let words = told.end();
        drop(self.say(told, words).await);
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
    /// The last of those within the prefix that the broker was not told, and how many they are. Most of what is done comes in rows at the end of the
    /// prefix, and is never anywhere else.
    within: Option<(u64, usize)>,
    /// Done beyond it, and the broker was not told.
    untold: BTreeSet<u64>,
    /// When the prefix last moved.
    moved: Instant,
    /// Who waits for it to reach which message.
    waiting: BTreeMap<u64, Vec<oneshot::Sender<()>>>,
    /// So many may be done and untold for long.
    untold_max: usize,
    /// Nobody waits any more.
    has_ended: bool,
    /// Whatever was to be said could be.
    can_be_said: bool,
}

impl Told {
    fn new(window: usize, now: Instant) -> Self {
        Told {
            untold_max: if window < WINDOW_MIN { 0 } else { window / UNTOLD },
            has_ended: false,
            prefix: 0,
            within: None,
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
        let over = self.has_ended || !self.can_be_said;
        let beyond = if over { BTreeMap::new() } else { self.waiting.split_off(&(self.prefix + 1)) };
        // Whoever waits hears that its other end is gone.
        drop(std::mem::replace(&mut self.waiting, beyond));
    }

    /// Until when something beyond the prefix that was done at `began` waits for it; none if it should be told by itself.
    fn waits_until(&self, began: Instant, now: Instant) -> Option<Instant> {
        let pause = if self.untold.len() > self.untold_max { SOON } else { STILL };
        let until = (self.moved + pause).min(began + PATIENCE);
        (until > now && !self.has_ended).then_some(until)
    }

    fn is_untold(&self, numbers: &[u64]) -> bool {
        numbers.iter().any(|number| self.untold.contains(number))
    }

    /// Nobody waits any more: words for all that is untold.
    fn end(&mut self) -> Vec<(u64, bool)> {
        self.has_ended = true;
        let prefix = self.tell_prefix();
        let each = std::mem::take(&mut self.untold).into_iter().map(|number| (number, false));
        prefix.into_iter().chain(each).collect()
    }

    /// Messages are done.
    fn note_all(&mut self, numbers: &[u64], now: Instant) {
        let mut numbers = numbers.to_vec();
        numbers.sort_unstable();
        for row in numbers.chunk_by(|one, next| one + 1 == *next) {
            let (first, last) = (row[0], row[row.len() - 1]);
            if first == self.prefix + 1 && self.beyond.first_key_value().is_none_or(|(next, _)| *next > last)
            {
                (self.prefix, self.moved) = (last, now);
                self.add_within(last, row.len());
            } else {
                row.iter().for_each(|number| self.note(*number));
                self.untold.extend(row);
            }
        }
        if let Some(last) = self.beyond.remove(&(self.prefix + 1)) {
            (self.prefix, self.moved) = (last, now);
        }
        self.take_within();
    }

    fn add_within(&mut self, last: u64, count: usize) {
        let (last_before, count_before) = self.within.unwrap_or_default();
        self.within = Some((last_before.max(last), count_before + count));
    }

    /// What is within the prefix by now.
    fn take_within(&mut self) {
        if self.untold.first().is_none_or(|first| *first > self.prefix) {
            return;
        }
        let beyond = self.untold.split_off(&(self.prefix + 1));
        let within = std::mem::replace(&mut self.untold, beyond);
        if let Some(last) = within.last() {
            self.add_within(*last, within.len());
        }
    }

    /// One word for all of the prefix that the broker was not told; whether it is true for everything before, or only for the one.
    fn tell_prefix(&mut self) -> Option<(u64, bool)> {
        self.within.take().map(|(last, count)| (last, count > 1))
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
        Told::new(1_000, Instant::now())
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
    fn at_the_end_all_is_told_and_nobody_waits() {
        let mut told = told();
        let mut waiting = told.when_reached(6);
        told.note_all(&[1, 2, 4, 6], Instant::now());
        assert_eq!(told.end(), [(2, true), (4, false), (6, false)]);
        told.wake();
        assert_eq!(waiting.try_recv(), Err(TryRecvError::Closed));
        assert!(told.can_be_said && !told.is_untold(&[4, 6]), "so whoever waited knows that they were told");
        told.note_all(&[8], Instant::now());
        assert_eq!(told.waits_until(Instant::now(), Instant::now()), None);
    }

    #[test]
    fn how_long_they_wait_is_decided_by_the_window_and_by_whether_the_prefix_moves() {
        let mut told = told();
        let began = told.moved;
        let at = |told: &Told, millis| told.waits_until(began, began + Duration::from_millis(millis));
        told.note_all(&(2..=501).collect::<Vec<_>>(), began);
        assert_eq!(at(&told, 199), Some(began + STILL), "half of the window");
        assert_eq!(at(&told, 200), None, "1 is a long one");
        told.note_all(&[502], began);
        assert_eq!((at(&told, 4), at(&told, 5)), (Some(began + SOON), None), "more than half of it");
        told.tell_each(&[502]);
        told.moved = began + Duration::from_millis(399);
        assert_eq!((at(&told, 399), at(&told, 400)), (Some(began + PATIENCE), None), "though it moves");

        let mut small = Told::new(WINDOW_MIN - 1, began);
        small.note_all(&[2], began);
        assert_eq!(at(&small, 4), Some(began + SOON), "a place in a small window is worth more than a word");
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
