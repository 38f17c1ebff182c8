//! In which order a worker reads its queues, and how its free places are shared out among them.
//!
//! The worker asks its strategy before every read; one call to the database then reads the queues in the planned order until the free places
//! are taken. A plan costs no round trip, so that a strategy may be as clever as it likes.

use serde::{Deserialize, Serialize};

/// What a strategy sees of a queue.
#[derive(Clone, Debug)]
pub struct QueueView<'a> {
    /// Its name.
    pub name: &'a str,
    /// From its settings: higher comes first.
    pub priority: i32,
    /// From its settings: its part of the places, among the others' weights.
    pub weight: u32,
    /// How many tasks it may give now: its batch size, or what its own limit leaves.
    pub room: usize,
    /// How many of its tasks the worker has in hand.
    pub in_hand: usize,
    /// How many tasks it gave in the last read.
    pub gave: usize,
}

/// One queue's turn in a read. A queue may have several: what earlier ones left is then shared out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The queue, by its place.
    pub queue: usize,
    /// How many tasks it gives at the most.
    pub most: usize,
}

/// How free places are shared out.
///
/// ```
/// use laneway_flow::worker::{QueueView, Share, Strategy};
///
/// /// The fullest hands first.
/// struct Busiest;
/// impl Strategy for Busiest {
///     fn plan(&mut self, queues: &[QueueView<'_>], free: usize) -> Vec<Share> {
///         let mut order: Vec<usize> = (0..queues.len()).collect();
///         order.sort_by_key(|&queue| std::cmp::Reverse(queues[queue].in_hand));
///         order.into_iter().map(|queue| Share { queue, most: queues[queue].room.min(free) }).collect()
///     }
/// }
/// ```
pub trait Strategy: Send + 'static {
    /// The order of a read. There is at least one queue, and at least one place is free.
    fn plan(&mut self, queues: &[QueueView<'_>], free: usize) -> Vec<Share>;
}

/// The strategies that are here already, by the names that a configuration gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StrategyKind {
    /// [`RoundRobin`].
    #[default]
    RoundRobin,
    /// [`Priority`].
    Priority,
    /// [`Weighted`].
    Weighted,
}

impl StrategyKind {
    pub(crate) fn build(self) -> Box<dyn Strategy> {
        match self {
            StrategyKind::RoundRobin => Box::new(RoundRobin::default()),
            StrategyKind::Priority => Box::new(Priority::default()),
            StrategyKind::Weighted => Box::new(Weighted::default()),
        }
    }
}

/// Every read begins with the next queue.
#[derive(Debug, Default)]
pub struct RoundRobin {
    next: usize,
}

impl Strategy for RoundRobin {
    fn plan(&mut self, queues: &[QueueView<'_>], _: usize) -> Vec<Share> {
        let first = self.next % queues.len();
        self.next = first + 1;
        let order = (0..queues.len()).map(|step| (first + step) % queues.len());
        order.map(|queue| Share { queue, most: queues[queue].room }).collect()
    }
}

/// The highest priority first; every eighth read the other way round, so that nothing starves.
#[derive(Debug, Default)]
pub struct Priority {
    reads: usize,
}

/// How often a read is the other way round. One in eight costs the urgent queues little, and bounds how long the others wait.
const RELIEF: usize = 8;

impl Strategy for Priority {
    fn plan(&mut self, queues: &[QueueView<'_>], _: usize) -> Vec<Share> {
        let turn = self.reads;
        self.reads = self.reads.wrapping_add(1);
        // Among equals the one that is next, so that they take turns.
        let mut order: Vec<usize> = (0..queues.len()).map(|step| (turn + step) % queues.len()).collect();
        order.sort_by_key(|&queue| std::cmp::Reverse(queues[queue].priority));
        if turn % RELIEF == RELIEF - 1 {
            order.reverse();
        }
        order.into_iter().map(|queue| Share { queue, most: queues[queue].room }).collect()
    }
}

/// Places in proportion to the weights; what a queue leaves goes to the others. No queue starves: each has at least a turn in its round.
#[derive(Debug, Default)]
pub struct Weighted {
    /// What each queue is owed, in parts of a place: smooth, so that small weights get whole places after a while.
    credit: Vec<f64>,
}

impl Strategy for Weighted {
    fn plan(&mut self, queues: &[QueueView<'_>], free: usize) -> Vec<Share> {
        self.credit.resize(queues.len(), 0.0);
        let total: f64 = queues.iter().map(|queue| f64::from(queue.weight.max(1))).sum();
        for (credit, queue) in self.credit.iter_mut().zip(queues) {
            *credit += free as f64 * f64::from(queue.weight.max(1)) / total;
        }
        let whole: Vec<usize> = self.credit.iter().map(|credit| credit.max(0.0).floor() as usize).collect();
        self.credit.iter_mut().zip(&whole).for_each(|(credit, whole)| *credit -= *whole as f64);
        let mut order: Vec<usize> = (0..queues.len()).collect();
        order.sort_by(|&one, &other| self.credit[other].total_cmp(&self.credit[one]));
        let mut over = free.saturating_sub(whole.iter().sum());
        let mut plan = Vec::with_capacity(2 * queues.len());
        for &queue in &order {
            // Places that are left after the whole ones go to those that are owed the largest part of one.
            let extra = usize::from(over > 0);
            over -= extra;
            // What a queue is owed or owes is bounded: one that was empty for long must not take everything at once.
            self.credit[queue] = (self.credit[queue] - extra as f64).clamp(-1.0, 1.0);
            let most = (whole[queue] + extra).min(queues[queue].room);
            if most > 0 {
                plan.push(Share { queue, most });
            }
        }
        plan.extend(order.iter().map(|&queue| Share { queue, most: queues[queue].room }));
        plan
    }
}

/// Puts the primary queue in front of a plan, and leaves a quarter of the places to the others.
pub(crate) fn primary_first(mut plan: Vec<Share>, primary: usize, free: usize) -> Vec<Share> {
    if let Some(place) = plan.iter().position(|share| share.queue == primary) {
        let share = plan.remove(place);
        let most = share.most.min((free - free / 4).max(1));
        plan.insert(0, Share { queue: primary, most });
        plan.push(share);
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(name: &str, priority: i32, weight: u32) -> QueueView<'_> {
        QueueView { name, priority, weight, room: 100, in_hand: 0, gave: 0 }
    }

    fn first(plan: &[Share]) -> usize {
        plan[0].queue
    }

    #[test]
    fn round_robin_begins_with_each_queue_in_turn() {
        let queues = [view("a", 0, 1), view("b", 0, 1), view("c", 0, 1)];
        let mut strategy = RoundRobin::default();
        let order: Vec<usize> = (0..6).map(|_| first(&strategy.plan(&queues, 10))).collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2]);
        assert_eq!(strategy.plan(&queues, 10).len(), 3, "every queue has its turn in every read");
    }

    #[test]
    fn priority_goes_by_rank_and_starves_nobody() {
        let queues = [view("low", 1, 1), view("high", 9, 1), view("mid", 5, 1)];
        let mut strategy = Priority::default();
        let firsts: Vec<usize> = (0..16).map(|_| first(&strategy.plan(&queues, 10))).collect();
        assert_eq!(firsts.iter().filter(|&&queue| queue == 1).count(), 14);
        assert_eq!(
            firsts.iter().filter(|&&queue| queue == 0).count(),
            2,
            "one read in eight is the other way round"
        );
        let equals = [view("a", 3, 1), view("b", 3, 1)];
        let mut strategy = Priority::default();
        let firsts: Vec<usize> = (0..4).map(|_| first(&strategy.plan(&equals, 10))).collect();
        assert_eq!(firsts, [0, 1, 0, 1], "equals take turns");
    }

    #[test]
    fn weights_are_proportions_also_of_few_places() {
        let queues = [view("a", 0, 7), view("b", 0, 2), view("c", 0, 1)];
        let mut strategy = Weighted::default();
        let mut places = [0; 3];
        for _ in 0..1_000 {
            let plan = strategy.plan(&queues, 3);
            let mut left = 3;
            // All queues are full: each gives what its share says, until the places are taken.
            for share in plan {
                let given = share.most.min(left);
                places[share.queue] += given;
                left -= given;
            }
            assert_eq!(left, 0, "no place stays empty while queues are full");
        }
        assert!((1_900..=2_300).contains(&places[0]), "{places:?}");
        assert!((500..=700).contains(&places[1]), "{places:?}");
        assert!(places[2] >= 250, "{places:?}");
    }

    #[test]
    fn the_primary_queue_comes_first_and_leaves_a_quarter() {
        let plan = vec![Share { queue: 0, most: 50 }, Share { queue: 1, most: 50 }];
        let plan = primary_first(plan, 1, 8);
        assert_eq!(plan[0], Share { queue: 1, most: 6 });
        assert_eq!(plan[1].queue, 0);
        assert_eq!(plan[2], Share { queue: 1, most: 50 });
    }
}
