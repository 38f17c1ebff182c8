//! Where messages wait: one slab of nodes per dispatcher, linked into a queue per lane and, where the oldest may have to
//! make room, into one list by age.
//!
//! A node is written when a message is admitted and freed when it is taken, so a dispatcher in its steady state allocates
//! nothing; freed nodes are used again last in, first out, while they are still in the cache. Links are indices: the
//! slab may move, and there is nothing unsafe about it.

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
struct Node<T> {
    /// `None` while the node is free.
    item: Option<T>,
    /// The lane whose queue it is in.
    lane: u32,
    /// Its neighbours in that queue; `next` also links the free nodes.
    previous: u32,
    next: u32,
    /// Its neighbours by age; both `NONE` and not `oldest` when the message may not be evicted.
    older: u32,
    newer: u32,
}

/// The slab.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    nodes: Vec<Node<T>>,
    free: u32,
    live: usize,
    /// Whether the list by age is kept at all: only where `DropOldest` may need it.
    by_age: bool,
    oldest: u32,
    newest: u32,
}

impl<T> Waiting<T> {
    pub(super) fn new(by_age: bool) -> Self {
        Waiting { nodes: Vec::new(), free: NONE, live: 0, by_age, oldest: NONE, newest: NONE }
    }

    pub(super) fn len(&self) -> usize {
        self.live
    }

    pub(super) fn by_age(&self) -> bool {
        self.by_age
    }

    /// Appends to a queue. `evictable` messages are also the newest by age.
    pub(super) fn push_back(&mut self, queue: &mut Queue, lane: u32, item: T, evictable: bool) {
        let id = self.occupy(item, lane);
        self.nodes[id as usize].previous = queue.tail;
        match queue.tail {
            NONE => queue.head = id,
            tail => self.nodes[tail as usize].next = id,
        }
        queue.tail = id;
        queue.len += 1;
        if evictable && self.by_age {
            self.append_by_age(id);
        }
    }

    /// Puts a message to the front. If it may be evicted it is the oldest by age: it was taken from somewhere, before all that is here.
    pub(super) fn push_front(&mut self, queue: &mut Queue, lane: u32, item: T, evictable: bool) {
        let id = self.occupy(item, lane);
        self.nodes[id as usize].next = queue.head;
        match queue.head {
            NONE => queue.tail = id,
            head => self.nodes[head as usize].previous = id,
        }
        queue.head = id;
        queue.len += 1;
        if evictable && self.by_age {
            self.prepend_by_age(id);
        }
    }

    /// Takes the oldest message of a queue.
    pub(super) fn pop_front(&mut self, queue: &mut Queue) -> Option<T> {
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
        (self.oldest != NONE).then(|| (self.nodes[self.oldest as usize].lane, self.oldest))
    }

    /// The evictable message of one queue that has waited longest. Only started and control messages can stand before it.
    pub(super) fn oldest_in(&self, queue: &Queue) -> Option<u32> {
        let mut id = queue.head;
        while id != NONE && !self.listed_by_age(id) {
            id = self.nodes[id as usize].next;
        }
        (id != NONE).then_some(id)
    }

    /// Takes any message out of the queue that it is in.
    pub(super) fn unlink(&mut self, queue: &mut Queue, id: u32) -> T {
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
        if self.by_age {
            self.remove_by_age(id);
        }
        self.vacate(id)
    }

    /// For how many there is memory.
    pub(super) fn capacity(&self) -> usize {
        self.nodes.capacity()
    }

    /// Gives memory back once nothing waits, unless there is little of it.
    pub(super) fn shrink(&mut self, keep: usize) {
        if self.live == 0 && self.nodes.capacity() > keep {
            self.nodes = Vec::new();
            self.free = NONE;
        }
    }

    fn occupy(&mut self, item: T, lane: u32) -> u32 {
        self.live += 1;
        let node = Node { item: Some(item), lane, previous: NONE, next: NONE, older: NONE, newer: NONE };
        match self.free {
            NONE => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
            id => {
                self.free = self.nodes[id as usize].next;
                self.nodes[id as usize] = node;
                id
            }
        }
    }

    fn vacate(&mut self, id: u32) -> T {
        self.live -= 1;
        let node = &mut self.nodes[id as usize];
        node.next = self.free;
        self.free = id;
        node.item.take().expect("a linked node holds a message")
    }

    fn listed_by_age(&self, id: u32) -> bool {
        let node = &self.nodes[id as usize];
        node.older != NONE || node.newer != NONE || self.oldest == id
    }

    fn append_by_age(&mut self, id: u32) {
        self.nodes[id as usize].older = self.newest;
        match self.newest {
            NONE => self.oldest = id,
            newest => self.nodes[newest as usize].newer = id,
        }
        self.newest = id;
    }

    fn prepend_by_age(&mut self, id: u32) {
        self.nodes[id as usize].newer = self.oldest;
        match self.oldest {
            NONE => self.newest = id,
            oldest => self.nodes[oldest as usize].older = id,
        }
        self.oldest = id;
    }

    fn remove_by_age(&mut self, id: u32) {
        if !self.listed_by_age(id) {
            return;
        }
        let (older, newer) = (self.nodes[id as usize].older, self.nodes[id as usize].newer);
        match older {
            NONE => self.oldest = newer,
            node => self.nodes[node as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            node => self.nodes[node as usize].older = older,
        }
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
            waiting.push_back(&mut a, 0, n, true);
            waiting.push_back(&mut b, 1, 10 + n, n != 0);
        }
        assert_eq!(waiting.pop_front(&mut a), Some(0));
        waiting.push_front(&mut a, 0, 0, false);
        let (lane, node) = waiting.oldest().unwrap();
        assert_eq!(lane, 0, "1 is the oldest that may go: 0 was started, 10 is control");
        assert_eq!(waiting.unlink(&mut a, node), 1);
        let drained: Vec<_> = std::iter::from_fn(|| waiting.pop_front(&mut a)).collect();
        assert_eq!(drained, [0, 2, 3]);
        let (lane, node) = waiting.oldest().unwrap();
        assert_eq!((lane, waiting.unlink(&mut b, node)), (1, 11), "from the middle of its queue");
        let drained: Vec<_> = std::iter::from_fn(|| waiting.pop_front(&mut b)).collect();
        assert_eq!(drained, [10, 12, 13]);
        assert_eq!((waiting.len(), waiting.oldest()), (0, None));
    }

    #[test]
    fn freed_nodes_are_used_again() {
        let mut waiting = Waiting::new(false);
        let mut queue = Queue::default();
        for n in 0..1_000 {
            waiting.push_back(&mut queue, 0, n, true);
            assert_eq!(waiting.pop_front(&mut queue), Some(n));
        }
        assert_eq!(waiting.nodes.len(), 1);
    }
}
