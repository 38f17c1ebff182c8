//! How quick messages come to a worker, and so when its next look is worth the locks.
//!
//! A worker that is quicker than the submitters would take each message as it comes. That is the least latency and the least
//! throughput: both sides spend their time on taking the locks, and the memory behind them, from each other. Where messages keep coming, a worker that waits for a
//! moment finds many at once, and the submitters have the locks to themselves meanwhile.

/// What a worker should do before it looks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Supply {
    /// Look again at once.
    Plenty,
    /// Few at a time: look again when one more may have come.
    Trickle,
    /// Again and again some, without a rest between: there will be many by and by.
    Current,
    /// So many at once that it could go on for as long as the system lets it, while another worker waits for the same core, and submitters for that one: look again when others
    /// have had the core. Measured with three threads on two cores and a hot key: a fifth more messages.
    Flood,
}

/// A stream of fewer messages is hardly worth the locks that it cost.
const FEW: usize = 16;

/// As many at once are worth them, and when they are done others may have the core.
const MANY: usize = 1_024;

/// Turns of so many messages, on average, are worth what they cost.
const ENOUGH: u64 = 32;

/// How many turns make an average, at first. Fewer where to wait has been worth it, more where it has not.
const TURNS: u64 = 64;
const TURNS_MIN: u64 = 16;
const TURNS_MAX: u64 = 65_536;

/// What a worker knows about how messages have come to it.
#[derive(Debug)]
pub(crate) struct Gauge {
    /// How many messages came at once with the last stream.
    came: usize,
    /// Turns that it has run since it last waited, judged or rested, and their messages.
    turns: u64,
    messages: u64,
    /// After so many turns it judges.
    span: u64,
    /// Messages in so many turns before it waited, if it has not seen yet what came of it.
    before: Option<u64>,
}

impl Gauge {
    pub(crate) fn new() -> Self {
        Gauge { came: 0, turns: 0, messages: 0, span: TURNS, before: None }
    }

    /// A stream has been handled, of which so many came at once, and there is nothing behind it.
    pub(crate) fn streamed(&mut self, came: usize) -> Supply {
        let before = std::mem::replace(&mut self.came, came);
        match came {
            _ if came < FEW => Supply::Trickle,
            _ if came >= MANY => Supply::Flood,
            _ if before >= FEW => Supply::Current,
            _ => Supply::Plenty,
        }
    }

    /// Turns have been run, not of a stream: what waits for a moment may have more messages in each.
    pub(crate) fn ran(&mut self, turns: u64, messages: u64) -> Supply {
        (self.turns, self.messages) = (self.turns + turns, self.messages + messages);
        if let Some(before) = self.before
            && self.turns >= TURNS_MIN
        {
            // Half as many again, at least, or it was not worth it.
            let is_better = self.messages * 2 * TURNS_MIN >= before * 3 * self.turns;
            self.span = if is_better { self.span / 2 } else { self.span * 2 }.clamp(TURNS_MIN, TURNS_MAX);
            self.before = None;
        }
        if self.turns < self.span {
            return Supply::Plenty;
        }
        let is_poor = self.messages < ENOUGH * self.turns;
        self.before = is_poor.then_some(self.messages * TURNS_MIN / self.turns);
        (self.turns, self.messages) = (0, 0);
        if is_poor { Supply::Current } else { Supply::Plenty }
    }

    /// The worker lay down: messages do not keep coming. What it waited for last, if it has not judged that yet, has not come.
    pub(crate) fn rested(&mut self) {
        if self.before.take().is_some() {
            self.span = (self.span * 2).min(TURNS_MAX);
        }
        (self.turns, self.messages) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many turns it takes until the worker waits.
    fn turns(gauge: &mut Gauge) -> u32 {
        (1..).find(|_| gauge.ran(1, 1) == Supply::Current).expect("it waits at some time")
    }

    #[test]
    fn waiting_that_brings_nothing_becomes_rare() {
        let mut gauge = Gauge::new();
        let waits: Vec<u32> = (0..12).map(|_| turns(&mut gauge)).collect();
        assert_eq!(waits[..6], [64, 128, 256, 512, 1_024, 2_048]);
        assert_eq!(waits[10..], [65_536, 65_536]);
    }

    #[test]
    fn waiting_that_brings_more_becomes_frequent() {
        let mut gauge = Gauge::new();
        for expected in [64, 32, 16, 16] {
            assert_eq!(turns(&mut gauge), expected);
            assert_eq!(gauge.ran(TURNS_MIN, 40 * TURNS_MIN), Supply::Plenty);
            gauge.rested();
        }
    }

    #[test]
    fn bursts_that_end_soon_after_it_waited_make_it_wait_less() {
        let mut gauge = Gauge::new();
        for expected in [64, 128, 256] {
            assert_eq!(turns(&mut gauge), expected);
            assert_eq!(gauge.ran(1, 1), Supply::Plenty);
            gauge.rested();
        }
    }

    #[test]
    fn long_turns_and_rests_between_turns_never_make_it_wait() {
        let mut gauge = Gauge::new();
        for _ in 0..10_000 {
            assert_eq!(gauge.ran(1, 1), Supply::Plenty);
            assert_eq!(gauge.ran(1, 128), Supply::Plenty);
        }
        for _ in 0..10_000 {
            assert_eq!(gauge.ran(1, 1), Supply::Plenty);
            gauge.rested();
        }
    }

    #[test]
    fn streams_of_middling_length_that_follow_each_other_make_it_wait() {
        let mut gauge = Gauge::new();
        let supplies = [3, 100, 100, 2_000].map(|came| gauge.streamed(came));
        assert_eq!(supplies, [Supply::Trickle, Supply::Plenty, Supply::Current, Supply::Flood]);
    }

    #[test]
    fn when_very_many_came_at_once_others_have_the_core_whatever_came_before() {
        let mut gauge = Gauge::new();
        let supplies = [2_000, 2_000, 3, 2_000].map(|came| gauge.streamed(came));
        assert_eq!(supplies, [Supply::Flood, Supply::Flood, Supply::Trickle, Supply::Flood]);
    }
}
