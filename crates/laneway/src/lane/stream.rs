//! Streams: the short way from ingress to the handler, for a worker that has a dispatcher to itself.
//!
//! Where one worker serves a dispatcher, it may take the next messages straight from the inbox and run them one after the other, whatever their keys,
//! leaving out those whose keys have lanes. That is the order of acceptance, so it is in order per key; and it is one worker, so it is one at a time. No
//! lane is made for a message that would leave it a moment later: most of the work of a small message. Nor is it moved: messages come in chunks (`message.rs`), a stream is
//! one of them, or a part, and where all of a chunk may be in the stream the worker takes it as it is.
//!
//! What keeps it honest:
//!
//! - A key that has a lane (a message of it waits, is deferred or parked) gets its next messages there, behind the others.
//! - While a stream is out, nobody claims a lane that has an older message in it. (Somebody else can be here only after a live change.) And no lane moves to another
//!   dispatcher: a change that moves lanes bars streams and waits for the one that is out.
//! - A message that fails becomes the head of the lane of its key, as if it had been claimed from there. What the stream had not run goes to the front of the
//!   lanes of its keys.
//! - A hot key gives way after `batch_max` messages here as elsewhere, and after a chunk. A stream is twice as long at most, and no longer than a chunk, unless lanes wait, and [`Heat`] counts the messages of each key in
//!   it (of each 1,024th part of all keys); when one has had its share, the rest of it goes to its lane, and the stream goes on with the others. After a
//!   stream the lanes have a turn.

use super::{Ending, Lanes, Settled, State, Turn};
use crate::message::{CHUNK, Chunk, Item};

/// How many counters there are. Streams have two hundred messages at most, so keys rarely share one, and it costs nothing but a turn in a lane if they do.
const PLACES: usize = 1_024;

/// Counts the messages per key, roughly, in one stream.
#[derive(Debug)]
pub(crate) struct Heat {
    /// Nothing until it is first needed.
    counts: Option<Box<[u16; PLACES]>>,
    /// A key may have this many.
    share: u16,
    /// Whether there are so many that a key could have more.
    watching: bool,
}

impl Heat {
    pub(crate) fn new(batch_max: usize) -> Self {
        Heat { counts: None, share: batch_max.min(CHUNK) as u16, watching: false }
    }

    /// A stream begins, with so many messages to choose from. Says how long it may be: no longer than the turn of a lane where one is
    /// ready, since each message of its key that the stream passes goes there, and it would grow faster than its turns.
    pub(super) fn begin(&mut self, messages: usize, lanes_wait: bool) -> usize {
        // So few that nobody can have more than a share of them need no counting.
        self.watching = messages > usize::from(self.share) && !lanes_wait;
        if self.watching {
            self.counts.get_or_insert_with(|| Box::new([0; PLACES])).fill(0);
        }
        usize::from(self.share) * if lanes_wait { 1 } else { 2 }
    }

    /// Counts one more, and says whether that is more than its share.
    #[inline]
    pub(super) fn rises(&mut self, fingerprint: u64) -> bool {
        let Some(counts) = self.counts.as_mut().filter(|_| self.watching) else { return false };
        // Bits that neither the tables nor the placement use.
        let count = &mut counts[(fingerprint >> 20) as usize % PLACES];
        *count = count.saturating_add(1);
        *count > self.share
    }
}

impl<K, M> Lanes<K, M> {
    /// Whether a stream may begin. Not beside lanes of another tier: in a stream there are none.
    pub(crate) fn may_stream(&self) -> bool {
        self.streaming == 0 && !self.paused && self.pace.is_none() && !self.evicts() && self.is_ordinary()
    }

    /// Whether all lanes that are ready are of the normal tier.
    pub(crate) fn is_ordinary(&self) -> bool {
        self.ready.is_ordinary()
    }

    /// Whether messages of this key have to go to a lane, because there is one.
    pub(super) fn has_lane(&self, fingerprint: u64) -> bool {
        !self.table.is_empty() && self.place_of(fingerprint).is_some()
    }

    /// How many of the first messages of a chunk may be in a stream, of so many that are looked at, before one that has to go to a lane. Takes note of their keys.
    pub(super) fn may_take(&mut self, chunk: &Chunk<K, M>, looked_at: usize, heat: &mut Heat) -> usize {
        self.stream_keys.clear();
        self.stream_keys.extend(chunk.fingerprints().take(looked_at));
        let has_to = |fingerprint: &u64| self.has_lane(*fingerprint) || heat.rises(*fingerprint);
        if let Some(place) = self.stream_keys.iter().position(has_to) {
            self.stream_keys.truncate(place);
        }
        self.stream_keys.len()
    }

    /// Whether the head of this key may be in a stream, which has no lane for it.
    pub(crate) fn is_in_stream(&self, fingerprint: u64) -> bool {
        self.streaming > 0 && self.stream_keys.contains(&fingerprint)
    }

    pub(crate) fn is_streaming(&self) -> bool {
        self.streaming > 0
    }

    /// A worker has taken messages from the inbox, of whose keys note was taken.
    pub(super) fn begin_stream(&mut self, messages: &Chunk<K, M>, worker: u32, now: u64) {
        debug_assert!(
            messages.fingerprints().eq(self.stream_keys.iter().copied()),
            "their keys are not those that were noted"
        );
        self.streaming = messages.len();
        self.streamer = (worker, now);
        self.taken += messages.len();
    }

    /// Takes the lane that is next, leaving out those that have an older message in a stream.
    pub(super) fn pop_ready(&mut self) -> Option<u32> {
        if self.streaming == 0 {
            return self.ready.pop(&mut self.lanes);
        }
        let id = self.ready_beside_stream()?;
        self.ready.take(&mut self.lanes, id);
        Some(id)
    }

    /// The first ready lane that has nothing in the stream that is out. Somebody looks only after a live change has given the dispatcher
    /// a second worker, so a walk will do.
    pub(super) fn ready_beside_stream(&self) -> Option<u32> {
        let free = |id: &u32| !self.stream_keys.contains(&self.lanes[*id as usize].fingerprint);
        self.ready.iter(&self.lanes).find(free)
    }

    /// Ends a stream. What has not been run goes to the front of its lanes; the first of it may have failed.
    pub(super) fn settle_stream(&mut self, turn: &mut Turn<K, M>, now: u64) -> Settled<K, M> {
        self.taken -= std::mem::take(&mut self.streaming);
        let ending = std::mem::replace(&mut turn.ending, Ending::Handled);
        let failed = if matches!(ending, Ending::Handled) { None } else { turn.items.pop_front() };
        while let Some(item) = turn.stream.pop_back().or_else(|| turn.items.pop_back()) {
            self.readmit(item);
        }
        let settled = match failed {
            Some(item) => self.settle_first(item, ending, now),
            None => Settled { parcel: None, earlier_timer: false, holder: None },
        };
        turn.again.drain(..).for_each(|item| self.admit(item));
        settled
    }

    /// Puts a message that had been taken from the inbox to the front of its lane.
    fn readmit(&mut self, item: Item<K, M>) {
        let fingerprint = item.fingerprint;
        let known = self.place_of(fingerprint);
        let id = known.unwrap_or_else(|| self.create(fingerprint, State::Aside));
        self.put_back(id, item, false);
        if self.lanes[id as usize].state == State::Aside {
            self.make_ready(id);
        }
    }

    /// A message of a stream failed: settles it as a turn of its lane.
    fn settle_first(&mut self, item: Item<K, M>, ending: Ending, now: u64) -> Settled<K, M> {
        let fingerprint = item.fingerprint;
        let known = self.place_of(fingerprint);
        let id = known.unwrap_or_else(|| self.create(fingerprint, State::Aside));
        match self.lanes[id as usize].state {
            State::Ready => self.ready.remove(&mut self.lanes, id),
            State::Parked { since } => {
                // An operator was quicker; it stays parked, in front of this one.
                self.parked -= 1;
                self.lanes[id as usize].extra_mut().park_after = Some(since);
            }
            State::Aside => {}
            state => unreachable!("nobody claims while a stream is out, and it is not {state:?}"),
        }
        let lane = &mut self.lanes[id as usize];
        (lane.state, lane.taken) = (State::Running { since: now, worker: 0 }, 1);
        self.running += 1;
        self.taken += 1;
        let mut turn = Turn { lane: id, packing: self.packing, ending, fingerprint, ..Turn::new() };
        turn.items.push_back(item);
        self.settle(&mut turn, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_hot_after_its_share_of_a_full_inbox() {
        let mut heat = Heat::new(3);
        heat.begin(3, false);
        assert!((0..10).all(|_| !heat.rises(7)), "nobody can have more than a share of so few");
        heat.begin(100, false);
        assert_eq!([heat.rises(7), heat.rises(7), heat.rises(7), heat.rises(7)], [false, false, false, true]);
        assert!(!heat.rises(7 << 20 | 1 << 30), "another key");
        heat.begin(100, false);
        assert!(!heat.rises(7), "a new inbox");
    }
}
