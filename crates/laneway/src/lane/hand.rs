//! What a worker has in its hands: turns, and how they ended.
//!
//! A worker says what it [`Wants`]; `dispatcher/` fills its [`Hand`] from the ready lanes, or with a stream from the inbox, and settles it with how each
//! [`Turn`] came to its [`Ending`]. Both under the lanes lock; in between the hand is the worker's alone.

use std::collections::VecDeque;

use super::{Heat, Lanes, waiting::NONE};
use crate::message::{Inbox, Item};

/// A lane's messages in the hands of a worker. The buffer is used again for another turn.
#[derive(Debug)]
pub(crate) struct Turn<K, M> {
    pub(super) lane: u32,
    /// How it ended, once it has.
    pub(crate) ending: Ending,
    /// How many of its messages have left the engine.
    pub(crate) released: u64,
    pub(crate) fingerprint: u64,
    /// What is still to be handled, oldest first.
    pub(crate) items: VecDeque<Item<K, M>>,
    /// What goes to the back of the lane, because the handler was not done with it.
    pub(crate) again: Vec<Item<K, M>>,
    /// Failed attempts at the first of them.
    pub(crate) attempts: u32,
}

impl<K, M> Turn<K, M> {
    pub(crate) fn new() -> Self {
        let (items, again) = (VecDeque::new(), Vec::new());
        Turn { lane: NONE, ending: Ending::Handled, released: 0, fingerprint: 0, items, again, attempts: 0 }
    }
}

/// The turns that a worker has claimed under one lock, and will settle under one lock.
///
/// More than one only where it is the only worker of the dispatcher and messages are quick: then nobody else could have
/// run what waits in the hand, and the lock is taken once for all of it.
#[derive(Debug)]
pub(crate) struct Hand<K, M> {
    turns: Vec<Turn<K, M>>,
    len: usize,
    /// Those before it have ended.
    current: usize,
    /// How many messages came at once with the last of this stream, if that is all there is to do now.
    drained: Option<usize>,
}

impl<K, M> Hand<K, M> {
    pub(crate) fn new() -> Self {
        Hand { turns: vec![Turn::new()], len: 0, current: 0, drained: None }
    }

    /// The turn that is run now.
    pub(crate) fn turn(&mut self) -> &mut Turn<K, M> {
        &mut self.turns[self.current]
    }

    /// Notes the end of the current turn. True if there is another one.
    pub(crate) fn end(&mut self, ending: Ending, released: u64) -> bool {
        let turn = self.turn();
        turn.released = released;
        // It says so already, and most turns end so.
        if !matches!(ending, Ending::Handled) {
            turn.ending = ending;
        }
        self.current += 1;
        self.current < self.len
    }

    /// All turns, with how they ended; those that were not run as if they had been given way, and first: their lanes must not go behind those that were.
    pub(crate) fn turns(&mut self) -> &mut [Turn<K, M>] {
        let unrun = self.len - self.current.min(self.len);
        self.current = self.len;
        let turns = &mut self.turns[..self.len];
        turns.rotate_right(unrun);
        turns
    }

    /// See the field.
    pub(crate) fn drained(&self) -> Option<usize> {
        self.drained
    }

    pub(crate) fn clear(&mut self) {
        (self.len, self.current, self.drained) = (0, 0, None);
    }

    /// Takes messages straight from the inbox, in their order, whatever their keys: a stream. Those that have to wait in a lane go there. See
    /// `lane/stream.rs`.
    pub(crate) fn fill_from(
        &mut self,
        inbox: &mut Inbox<K, M>,
        lanes: &mut Lanes<K, M>,
        heat: &mut Heat,
        most: usize,
        came: usize,
    ) -> bool {
        let turn = &mut self.turns[0];
        let most = heat.begin(inbox.len(), lanes.has_ready()).min(most);
        // The same memory, without what a queue has to do for its two ends.
        let mut items = Vec::from(std::mem::take(&mut turn.items));
        while items.len() < most
            && let Some(item) = inbox.pop()
        {
            if lanes.has_lane(item.fingerprint) || heat.rises(item.fingerprint) {
                lanes.admit(item);
            } else {
                items.push(item);
            }
        }
        turn.items = items.into();
        let taken = turn.items.len();
        if taken > 0 {
            (turn.lane, turn.attempts, turn.released) = (NONE, 0, 0);
            (self.len, self.current) = (1, 0);
            self.drained = (inbox.is_empty() && !lanes.has_ready()).then_some(came);
            lanes.begin_stream(&turn.items);
        }
        taken > 0
    }

    /// Claims lanes until the hand holds so many, or so many messages. The answer is whether there was any.
    pub(crate) fn fill(&mut self, lanes: &mut Lanes<K, M>, wants: &Wants<K>, now: u64) -> bool {
        let mut messages = 0;
        while self.len < wants.lanes && messages < wants.messages {
            if self.turns.len() == self.len {
                self.turns.push(Turn::new());
            }
            let turn = &mut self.turns[self.len];
            if !lanes.claim(now, wants.turn, wants.worker, turn, wants.holder) {
                break;
            }
            turn.released = 0;
            messages += turn.items.len();
            self.len += 1;
        }
        self.len > 0
    }
}

/// Who asks for turns, and how much it wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wants<K> {
    pub(crate) worker: u32,
    /// When it last looked at the clock.
    pub(crate) now: u64,
    /// At most this many messages in a turn,
    pub(crate) turn: usize,
    /// this many lanes at once,
    pub(crate) lanes: usize,
    /// and this many messages in all of them.
    pub(crate) messages: usize,
    /// Whether it would take a stream.
    pub(crate) stream: bool,
    /// Whether turns are expected to be slow.
    pub(crate) slow: bool,
    /// Makes the copy of the key that `explain` shows where turns are slow, and by which a lane in flight is placed again.
    pub(crate) holder: Option<fn(&K) -> K>,
}

/// How a turn ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// What was handled is gone; what is left, if anything, was not started.
    Handled,
    /// The first that is left failed or has to wait.
    Defer { until: u64, attempts: u32, note: Option<String> },
    /// The first that is left is put aside; the lane goes on.
    ParkMessage { note: Option<String> },
    /// The lane stops in front of the first that is left.
    ParkLane { attempts: u32, note: Option<String> },
}
