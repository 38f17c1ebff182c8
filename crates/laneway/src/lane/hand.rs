//! What a worker has in its hands: turns, and how they ended.
//!
//! A worker says what it [`Wants`]; `dispatcher/` fills its [`Hand`] from the ready lanes, or with a stream from the inbox, and settles it with how each
//! [`Turn`] came to its [`Ending`]. Both under the lanes lock; in between the hand is the worker's alone.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{Heat, Lanes, waiting::NONE};
use crate::message::{Chunk, Inbox, Item};

/// A lane's messages in the hands of a worker. The buffer is used again for another turn.
#[derive(Debug)]
pub(crate) struct Turn<K, M> {
    pub(super) lane: u32,
    /// By which packing the lane has that place (`repack.rs`).
    pub(super) packing: u32,
    /// How it ended, once it has.
    pub(crate) ending: Ending,
    /// How many of its messages have left the engine.
    pub(crate) released: u64,
    pub(crate) fingerprint: u64,
    /// What is still to be handled, oldest first; of a stream, the next one at most.
    pub(crate) items: VecDeque<Item<K, M>>,
    /// What comes after that in a stream.
    pub(crate) stream: Chunk<K, M>,
    /// What goes to the back of the lane, because the handler was not done with it.
    pub(crate) again: Vec<Item<K, M>>,
    /// Failed attempts at the first of them.
    pub(crate) attempts: u32,
}

impl<K, M> Turn<K, M> {
    pub(crate) fn new() -> Self {
        Turn {
            lane: NONE,
            packing: 0,
            ending: Ending::Handled,
            released: 0,
            fingerprint: 0,
            items: VecDeque::new(),
            stream: Chunk::new(),
            again: Vec::new(),
            attempts: 0,
        }
    }

    /// The next message that is to be handled.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<&mut Item<K, M>> {
        if self.items.is_empty()
            && let Some(item) = self.stream.pop()
        {
            self.items.push_back(item);
        }
        self.items.front_mut()
    }

    /// Keys and bodies of those that are still to be handled, for those who look on.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&K, &M)> {
        let items = self.items.iter().map(|item| (&item.message.key, &item.message.body));
        items.chain(self.stream.each())
    }

    /// The lanes that they belong to.
    pub(crate) fn fingerprints(&self) -> impl Iterator<Item = u64> {
        self.items.iter().map(|item| item.fingerprint).chain(self.stream.fingerprints())
    }

    /// How many are still to be handled.
    pub(crate) fn len(&self) -> usize {
        self.items.len() + self.stream.len()
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
    /// When it was filled last, as far as that was known.
    filled_at: u64,
    /// How many messages came at once with the last of this stream, if that is all there is to do now.
    drained: Option<usize>,
    /// Copies of keys that were made for turns that have ended, and want to be dropped.
    spent: Vec<K>,
}

impl<K, M> Hand<K, M> {
    pub(crate) fn new() -> Self {
        Hand { turns: vec![Turn::new()], len: 0, current: 0, filled_at: 0, drained: None, spent: Vec::new() }
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
        self.turns_and_spent().0
    }

    /// The same, with where to put the copies of their keys.
    pub(crate) fn turns_and_spent(&mut self) -> (&mut [Turn<K, M>], &mut Vec<K>) {
        let unrun = self.len - self.current.min(self.len);
        self.current = self.len;
        let turns = &mut self.turns[..self.len];
        turns.rotate_right(unrun);
        (turns, &mut self.spent)
    }

    /// See the field.
    pub(crate) fn filled_at(&self) -> u64 {
        self.filled_at
    }

    /// See the field.
    pub(crate) fn drained(&self) -> Option<usize> {
        self.drained
    }

    /// Drops what was kept. Whoever calls this has no lock.
    #[inline]
    pub(crate) fn drop_spent(&mut self) {
        while let Some(key) = self.spent.pop() {
            // It was a copy of ours: whatever its drop does is the fault of no message, and the next turns are in the hand already. One by one, because a second panic on the way out
            // of the first would end the process.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(key)));
        }
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
        wants: &Wants<K>,
        came: usize,
        now: u64,
    ) -> bool {
        let turn = &mut self.turns[0];
        let most = heat.begin(inbox.len(), lanes.has_ready()).min(wants.messages);
        while turn.stream.is_empty()
            && let Some(first) = inbox.first()
        {
            let looked_at = first.len().min(most);
            let may_take = lanes.may_take(first, looked_at, heat);
            if may_take == first.len() {
                inbox.take_first(&mut turn.stream);
            } else {
                sort(inbox, looked_at, may_take, &mut turn.stream, lanes, heat);
            }
        }
        let taken = turn.stream.len();
        if taken > 0 {
            (turn.lane, turn.attempts, turn.released) = (NONE, 0, 0);
            (self.len, self.current) = (1, 0);
            self.drained = (inbox.is_empty() && !lanes.has_ready()).then_some(came);
            lanes.begin_stream(&turn.stream, wants.worker, now);
            self.filled_at = now;
        }
        taken > 0
    }

    /// Claims lanes until the hand holds so many, or so many messages. The answer is whether there was any.
    pub(crate) fn fill(&mut self, lanes: &mut Lanes<K, M>, wants: &Wants<K>, now: u64) -> bool {
        // Where the oldest may be evicted, whatever has not started stays in its lane, so that it can be. (There are no streams there either.)
        let most = if lanes.evicts() { 1 } else { wants.lanes };
        let mut messages = 0;
        while self.len < most && messages < wants.messages {
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
        self.filled_at = now;
        self.len > 0
    }
}

/// Takes so many messages from the inbox one by one: those that have to wait in a lane go there, the others into the stream. Of the first it is known already that they may.
fn sort<K, M>(
    inbox: &mut Inbox<K, M>,
    looked_at: usize,
    may_take: usize,
    stream: &mut Chunk<K, M>,
    lanes: &mut Lanes<K, M>,
    heat: &mut Heat,
) {
    (0..may_take).for_each(|_| inbox.pass(stream));
    for _ in may_take..looked_at {
        let Some(fingerprint) = inbox.first().and_then(|first| first.fingerprints().next()) else { return };
        if !lanes.has_lane(fingerprint) && !heat.rises(fingerprint) {
            lanes.stream_keys.push(fingerprint);
            inbox.pass(stream);
        } else if let Some(item) = inbox.pop() {
            lanes.admit(item);
        }
    }
}

/// Who asks for turns, and how much it wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wants<K> {
    pub(crate) worker: u32,
    /// When it last looked at the clock.
    pub(crate) now: u64,
    /// Whether it has had nothing to do since, so that it may be any time now.
    pub(crate) rested: bool,
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
    /// The first that is left failed or has to wait. One that was not begun gives its place in the pace back.
    Defer { until: u64, attempts: u32, was_begun: bool, note: Option<String> },
    /// The first that is left is put aside; the lane goes on.
    ParkMessage { note: Option<String> },
    /// The lane stops in front of the first that is left.
    ParkLane { attempts: u32, note: Option<String> },
}
