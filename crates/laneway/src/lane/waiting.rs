//! Where messages wait: one slab of nodes per dispatcher, linked into a queue per lane and, where the oldest may have to
//! make room, into one list by age.
//!
//! A node is written when a message is admitted and freed when it is taken, so a dispatcher in its steady state allocates
//! nothing; freed nodes are used again last in, first out, while they are still in the cache. Links are indices: the
//! slab may move, and there is nothing unsafe about it. A node has what every message needs, and 40 bytes for a small one: when a message was accepted is noted
//! beside the slab for the few that are timed, and its neighbours by age where there is such a list.

use std::collections::HashMap;

use foldhash::{HashMapExt, fast::FixedState};

use super::repack::{Places, placed};

/// The end of a list.
pub(super) const NONE: u32 = u32::MAX;

/// The waiting messages of one lane, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Queue {
    head: u32,
    tail: u32,
    len: u32,
}

impl Default for Queue {
    fn default() -> Self {
        Queue { head: NONE, tail: NONE, len: 0 }
    }
}

impl Queue {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[derive(Debug)]
pub(super) struct Node<T> {
    /// `None` while the node is free.
    item: Option<T>,
    /// Its neighbours in the queue; `next` also links the free nodes.
    previous: u32,
    next: u32,
}

impl<T> Node<T> {
    fn vacant() -> Self {
        Node { item: None, previous: NONE, next: NONE }
    }
}

/// A node's place among all that may be evicted.
#[derive(Clone, Copy, Debug)]
struct Age {
    /// The lane in whose queue it is.
    lane: u32,
    /// Its neighbours; both `NONE` and not `oldest` when the message may not be evicted.
    older: u32,
    newer: u32,
}

/// The list by age.
#[derive(Debug)]
struct Ages {
    /// Beside the nodes.
    places: Vec<Age>,
    oldest: u32,
    newest: u32,
}

/// The slab.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    nodes: Vec<Node<T>>,
    free: u32,
    live: usize,
    /// When those were accepted that are timed.
    times: HashMap<u32, u64, FixedState>,
    /// Only where `DropOldest` may need it.
    ages: Option<Ages>,
}

impl<T> Waiting<T> {
    pub(super) fn new(by_age: bool) -> Self {
        let ages = Ages { places: Vec::new(), oldest: NONE, newest: NONE };
        let times = HashMap::default();
        Waiting { nodes: Vec::new(), free: NONE, live: 0, times, ages: by_age.then_some(ages) }
    }

    pub(super) fn len(&self) -> usize {
        self.live
    }

    pub(super) fn by_age(&self) -> bool {
        self.ages.is_some()
    }

    /// Appends to the queue of a lane. `evictable` messages are also the newest by age. `at` is when it was accepted, if it is timed, else 0.
    pub(super) fn push_back(&mut self, queue: &mut Queue, lane: u32, (item, at): (T, u64), evictable: bool) {
        let id = self.occupy(item, at, lane);
        self.nodes[id as usize].previous = queue.tail;
        match queue.tail {
            NONE => queue.head = id,
            tail => self.nodes[tail as usize].next = id,
        }
        queue.tail = id;
        queue.len += 1;
        if let Some(ages) = self.ages.as_mut().filter(|_| evictable) {
            ages.append(id);
        }
    }

    /// Puts a message to the front. If it may be evicted it is the oldest by age: it was taken from somewhere, before all that is here.
    pub(super) fn push_front(&mut self, queue: &mut Queue, lane: u32, (item, at): (T, u64), evictable: bool) {
        let id = self.occupy(item, at, lane);
        self.nodes[id as usize].next = queue.head;
        match queue.head {
            NONE => queue.tail = id,
            head => self.nodes[head as usize].previous = id,
        }
        queue.head = id;
        queue.len += 1;
        if let Some(ages) = self.ages.as_mut().filter(|_| evictable) {
            ages.prepend(id);
        }
    }

    /// Takes the oldest message of a queue, and when it was accepted, if it is timed.
    pub(super) fn pop_front(&mut self, queue: &mut Queue) -> Option<(T, u64)> {
        if queue.head == NONE {
            return None;
        }
        Some(self.unlink(queue, queue.head))
    }

    /// The oldest message of a queue.
    pub(super) fn front(&self, queue: &Queue) -> Option<&T> {
        self.nodes.get(queue.head as usize).and_then(|node| node.item.as_ref())
    }

    /// The messages of a queue, oldest first.
    pub(super) fn each_in(&self, queue: &Queue) -> impl Iterator<Item = &T> {
        let node = |id: u32| self.nodes.get(id as usize);
        std::iter::successors(node(queue.head), move |last| node(last.next))
            .filter_map(|node| node.item.as_ref())
    }

    /// All messages, in no order.
    pub(super) fn each(&self) -> impl Iterator<Item = &T> {
        self.nodes.iter().filter_map(|node| node.item.as_ref())
    }

    /// The evictable message that has waited longest, as (lane, node).
    pub(super) fn oldest(&self) -> Option<(u32, u32)> {
        let ages = self.ages.as_ref()?;
        (ages.oldest != NONE).then(|| (ages.places[ages.oldest as usize].lane, ages.oldest))
    }

    /// The evictable message of one queue that has waited longest. Only started and control messages can stand before it.
    pub(super) fn oldest_in(&self, queue: &Queue) -> Option<u32> {
        let ages = self.ages.as_ref()?;
        let mut id = queue.head;
        while id != NONE && !ages.lists(id) {
            id = self.nodes[id as usize].next;
        }
        (id != NONE).then_some(id)
    }

    /// Takes any message out of the queue that it is in.
    pub(super) fn unlink(&mut self, queue: &mut Queue, id: u32) -> (T, u64) {
        let (previous, next) = (self.nodes[id as usize].previous, self.nodes[id as usize].next);
        match previous {
            NONE => queue.head = next,
            node => self.nodes[node as usize].next = next,
        }
        match next {
            NONE => queue.tail = previous,
            node => self.nodes[node as usize].previous = previous,
        }
        queue.len -= 1;
        if let Some(ages) = &mut self.ages {
            ages.remove(id);
        }
        self.vacate(id)
    }

    /// For how many there is memory.
    pub(super) fn capacity(&self) -> usize {
        self.nodes.capacity()
    }

    /// Moves what is in these queues, which are all that there are, into a slab of its size: those of a lane with the lane's place. Gives back the old slab.
    pub(super) fn repack<'a>(&mut self, queues: impl Iterator<Item = (u32, &'a mut Queue)>) -> Vec<Node<T>> {
        let mut old = std::mem::take(&mut self.nodes);
        let mut places = Places::with_capacity(self.live);
        let mut lanes = Vec::new();
        for (lane, queue) in queues {
            let (mut id, mut previous) = (queue.head, NONE);
            (queue.head, queue.tail) = (NONE, NONE);
            while id != NONE {
                let place = self.nodes.len() as u32;
                places.insert(id, place);
                lanes.push(lane);
                let node = std::mem::replace(&mut old[id as usize], Node::vacant());
                id = node.next;
                self.nodes.push(Node { previous, next: NONE, ..node });
                match previous {
                    NONE => queue.head = place,
                    previous => self.nodes[previous as usize].next = place,
                }
                (previous, queue.tail) = (place, place);
            }
        }
        let times = std::mem::take(&mut self.times);
        self.times = times.into_iter().map(|(id, at)| (places[&id], at)).collect();
        if let Some(ages) = &mut self.ages {
            ages.move_to(&places, lanes);
        }
        self.free = NONE;
        old
    }

    fn occupy(&mut self, item: T, at: u64, lane: u32) -> u32 {
        self.live += 1;
        let node = Node { item: Some(item), ..Node::vacant() };
        let id = match self.free {
            NONE => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
            id => {
                self.free = self.nodes[id as usize].next;
                self.nodes[id as usize] = node;
                id
            }
        };
        if at > 0 {
            self.times.insert(id, at);
        }
        if let Some(ages) = &mut self.ages {
            ages.occupy(id, lane);
        }
        id
    }

    fn vacate(&mut self, id: u32) -> (T, u64) {
        self.live -= 1;
        let node = &mut self.nodes[id as usize];
        node.next = self.free;
        self.free = id;
        let item = node.item.take().expect("a linked node holds a message");
        // Most are not timed, and mostly nobody is.
        let at = if self.times.is_empty() { None } else { self.times.remove(&id) };
        (item, at.unwrap_or(0))
    }
}

impl Ages {
    fn occupy(&mut self, id: u32, lane: u32) {
        let age = Age { lane, older: NONE, newer: NONE };
        match self.places.get_mut(id as usize) {
            Some(place) => *place = age,
            None => self.places.push(age),
        }
    }

    fn lists(&self, id: u32) -> bool {
        let age = &self.places[id as usize];
        age.older != NONE || age.newer != NONE || self.oldest == id
    }

    fn append(&mut self, id: u32) {
        self.places[id as usize].older = self.newest;
        match self.newest {
            NONE => self.oldest = id,
            newest => self.places[newest as usize].newer = id,
        }
        self.newest = id;
    }

    fn prepend(&mut self, id: u32) {
        self.places[id as usize].newer = self.oldest;
        match self.oldest {
            NONE => self.newest = id,
            oldest => self.places[oldest as usize].older = id,
        }
        self.oldest = id;
    }

    fn remove(&mut self, id: u32) {
        if !self.lists(id) {
            return;
        }
        let Age { older, newer, .. } = self.places[id as usize];
        match older {
            NONE => self.oldest = newer,
            node => self.places[node as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            node => self.places[node as usize].older = older,
        }
    }

    /// The nodes have other places now, and their lanes, too.
    fn move_to(&mut self, places: &Places, lanes: Vec<u32>) {
        let old = std::mem::take(&mut self.places);
        let fresh = lanes.into_iter().map(|lane| Age { lane, older: NONE, newer: NONE });
        self.places = fresh.collect();
        for (&from, &to) in places {
            let Age { older, newer, .. } = old[from as usize];
            let age = &mut self.places[to as usize];
            (age.older, age.newer) = (placed(places, older), placed(places, newer));
        }
        (self.oldest, self.newest) = (placed(places, self.oldest), placed(places, self.newest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_share_the_slab_and_keep_their_order() {
        let mut waiting = Waiting::new(true);
        let (mut a, mut b) = (Queue::default(), Queue::default());
        for n in 0..4 {
            waiting.push_back(&mut a, 0, (n, 0), true);
            waiting.push_back(&mut b, 1, (10 + n, 0), n != 0);
        }
        assert_eq!(waiting.pop_front(&mut a), Some((0, 0)));
        waiting.push_front(&mut a, 0, (0, 0), false);
        let (lane, node) = waiting.oldest().unwrap();
        assert_eq!(lane, 0, "1 is the oldest that may go: 0 was started, 10 is control");
        assert_eq!(waiting.unlink(&mut a, node).0, 1);
        let drained: Vec<_> = std::iter::from_fn(|| waiting.pop_front(&mut a)).collect();
        assert_eq!(drained, [(0, 0), (2, 0), (3, 0)]);
        let (lane, node) = waiting.oldest().unwrap();
        assert_eq!((lane, waiting.unlink(&mut b, node).0), (1, 11), "from the middle of its queue");
        let drained: Vec<_> = std::iter::from_fn(|| waiting.pop_front(&mut b)).collect();
        assert_eq!(drained, [(10, 0), (12, 0), (13, 0)]);
        assert_eq!((waiting.len(), waiting.oldest()), (0, None));
    }

    #[test]
    fn freed_nodes_are_used_again_and_times_stay_with_their_messages() {
        let mut waiting = Waiting::new(false);
        let mut queue = Queue::default();
        for n in 0..1_000 {
            let at = n % 3;
            waiting.push_back(&mut queue, 0, (n, at), true);
            assert_eq!(waiting.pop_front(&mut queue), Some((n, at)));
        }
        assert_eq!((waiting.nodes.len(), waiting.times.len()), (1, 0));
    }

    #[test]
    fn a_small_message_takes_forty_bytes() {
        assert_eq!(size_of::<Node<crate::Message<u64, [u64; 2]>>>(), 40);
    }
}
