//! Which key gets which message: plans made before the clock starts, and the sources that read them.
//!
//! A plan is a list of *slots*. A [`Source`] walks it again and again and turns each slot into a key and the next sequence
//! number of that key. With a bounded set of keys a slot is the key. With unbounded keys every walk through the plan uses
//! fresh keys, and the plan is made so that each slot occurs exactly ten times: after a walk all its keys have ended.
//!
//! The same arithmetic serves the checker: the *cell* of a key is `key & (cells - 1)`, its *generation* `key >> log2(cells)`,
//! and the position that a cell expects next is `generation * messages_per_key + sequence`. One formula covers keys that
//! stay and keys that come and go, and the loss of a key's last message is found when the next generation arrives.

use crate::workload::{Distribution, FAMILY, FAMILY_EVERY, Workload};
use crate::{message::Message, workload::Amount};

/// Length of a plan with a bounded set of keys; long enough that its repetition is invisible to caches.
const PLAN_MESSAGES: usize = 2_000_000;
/// Keys of one walk through an unbounded plan: far more than can be in flight, so that a cell is never used by two.
const UNBOUNDED_SLOTS: usize = 65_536;
/// Keys that are alive at the same time in an unbounded plan.
const UNBOUNDED_ALIVE: usize = 4_096;
/// The share of the hot key.
const HOT_SHARE: f64 = 0.3;
/// The exponent of the Zipf distribution.
const ZIPF_EXPONENT: f64 = 1.1;

/// How keys map to cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellMap {
    bits: u32,
    per_key: u64,
}

impl CellMap {
    /// A map for at least `keys` keys at a time; `per_key` is how many messages a key sees, where keys end.
    pub fn new(keys: usize, per_key: Option<u32>) -> Self {
        Self { bits: keys.next_power_of_two().trailing_zeros(), per_key: per_key.unwrap_or(0).into() }
    }

    /// How many cells there are; a power of two.
    pub fn cells(&self) -> usize {
        1 << self.bits
    }

    /// The cell of a key.
    #[inline]
    pub fn cell(&self, key: u64) -> usize {
        (key & ((1 << self.bits) - 1)) as usize
    }

    /// The position that a message has among all messages of its cell.
    #[inline]
    pub fn position(&self, message: &Message) -> u64 {
        (message.key >> self.bits) * self.per_key + u64::from(message.body.sequence)
    }
}

/// All that the producers of one run need, made in advance.
pub struct Plan {
    slots: Vec<Vec<u32>>,
    share: usize,
    map: CellMap,
}

impl Plan {
    /// Makes the plan of a workload: one list of slots per producer, over disjoint keys.
    pub fn new(workload: &Workload) -> Self {
        let share = match workload.distribution {
            Distribution::Unbounded => UNBOUNDED_SLOTS,
            _ => (workload.keys as usize).div_ceil(workload.producers).max(1),
        };
        let length = plan_length(workload);
        let slots = (0..workload.producers)
            .map(|producer| {
                slots(workload.distribution, share, length, &mut Random::new(producer as u64 + 1))
            })
            .collect();
        Self { slots, share, map: CellMap::new(share * workload.producers, workload.messages_per_key()) }
    }

    /// How keys map to cells.
    pub fn map(&self) -> CellMap {
        self.map
    }

    /// One source per producer.
    pub fn into_sources(self) -> Vec<Source> {
        let map = self.map;
        let share = self.share;
        self.slots
            .into_iter()
            .enumerate()
            .map(|(producer, slots)| Source::new(slots, (producer * share) as u64, share, map))
            .collect()
    }
}

/// No longer than needed: a short run must not pay for a long plan.
fn plan_length(workload: &Workload) -> usize {
    match workload.amount {
        Amount::Messages(count) => PLAN_MESSAGES.min(count as usize),
        Amount::AtLeast { .. } => PLAN_MESSAGES,
    }
    .div_ceil(workload.producers)
    .max(1)
}

fn slots(distribution: Distribution, share: usize, length: usize, random: &mut Random) -> Vec<u32> {
    match distribution {
        Distribution::Uniform => (0..length).map(|_| random.below(share) as u32).collect(),
        Distribution::Even => even_slots(share, length, random),
        Distribution::Zipf => {
            let zipf = Zipf::new(share, ZIPF_EXPONENT);
            (0..length).map(|_| zipf.sample(random) as u32).collect()
        }
        Distribution::Hot => (0..length).map(|_| hot_slot(share, random)).collect(),
        Distribution::Family => family_slots(share, length, random),
        Distribution::Unbounded => unbounded_slots(share, random),
    }
}

/// All slots in random order, then all in another.
fn even_slots(share: usize, length: usize, random: &mut Random) -> Vec<u32> {
    let mut order: Vec<u32> = (0..share as u32).collect();
    let mut slots = Vec::with_capacity(length + share);
    while slots.len() < length {
        for place in (1..share).rev() {
            order.swap(place, random.below(place + 1));
        }
        slots.extend_from_slice(&order);
    }
    slots.truncate(length);
    slots
}

/// The hot family at every hundredth place, all others evenly at the rest.
fn family_slots(share: usize, length: usize, random: &mut Random) -> Vec<u32> {
    let mut others = even_slots(share - 1, length, random).into_iter().map(|other| other + 1);
    let mut slot_at = |place: usize| match (place as u64).is_multiple_of(FAMILY_EVERY) {
        true => FAMILY as u32,
        false => others.next().expect("there are as many as places"),
    };
    (0..length).map(&mut slot_at).collect()
}

fn hot_slot(share: usize, random: &mut Random) -> u32 {
    if share == 1 || random.unit() < HOT_SHARE { 0 } else { 1 + random.below(share - 1) as u32 }
}

/// Each slot exactly ten times, a few thousand alive at any moment, a new one for each that ends.
fn unbounded_slots(share: usize, random: &mut Random) -> Vec<u32> {
    let per_key = crate::workload::MESSAGES_PER_KEY;
    let mut fresh = (0..share as u32).map(|slot| (slot, 0));
    let mut alive: Vec<(u32, u32)> = fresh.by_ref().take(UNBOUNDED_ALIVE).collect();
    let mut slots = Vec::with_capacity(share * per_key as usize);
    while !alive.is_empty() {
        let chosen = random.below(alive.len());
        let (slot, sent) = &mut alive[chosen];
        slots.push(*slot);
        *sent += 1;
        if *sent == per_key {
            match fresh.next() {
                Some(next) => alive[chosen] = next,
                None => drop(alive.swap_remove(chosen)),
            }
        }
    }
    slots
}

/// Reads a plan for one producer, again and again, and numbers the messages of each key.
pub struct Source {
    slots: Vec<u32>,
    /// Where the next slot is read.
    index: usize,
    /// The key of slot 0 in this walk.
    key_base: u64,
    /// What each walk adds to the keys: zero where keys stay.
    key_step: u64,
    /// Messages that each slot had seen when this walk began; subtracted so that fresh keys start at zero.
    sequence_base: u32,
    sequence_step: u32,
    /// Messages made so far, per slot.
    made: Vec<u32>,
    first_key: u64,
}

impl Source {
    fn new(slots: Vec<u32>, first_key: u64, share: usize, map: CellMap) -> Self {
        let key_step = if map.per_key > 0 { map.cells() as u64 } else { 0 };
        Self {
            slots,
            index: 0,
            key_base: first_key,
            key_step,
            sequence_base: 0,
            sequence_step: map.per_key as u32,
            made: vec![0; share],
            first_key,
        }
    }

    /// The next message.
    #[inline]
    pub fn next_message(&mut self) -> Message {
        if self.index == self.slots.len() {
            self.begin_walk();
        }
        let slot = self.slots[self.index];
        self.index += 1;
        let made = &mut self.made[slot as usize];
        let sequence = *made - self.sequence_base;
        *made += 1;
        Message::new(self.key_base + u64::from(slot), sequence)
    }

    #[cold]
    fn begin_walk(&mut self) {
        self.index = 0;
        self.key_base += self.key_step;
        self.sequence_base += self.sequence_step;
    }

    /// For each cell of this source, how many messages were made: what the checker must find at the end.
    pub fn made_by_cell(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let first = self.first_key as usize;
        self.made.iter().enumerate().map(move |(slot, &made)| (first + slot, u64::from(made)))
    }

    /// How many messages were made in total.
    pub fn made(&self) -> u64 {
        self.made.iter().map(|&made| u64::from(made)).sum()
    }
}

/// SplitMix64: ten lines, no state beyond a counter, and the same plan on every machine.
pub struct Random(u64);

impl Random {
    /// A generator whose numbers depend on the seed alone.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number from 0 to `bound - 1`.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// A number from 0 to 1, without 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Zipf's law by inversion of its cumulative distribution.
pub struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    /// Ranks 0 to `count - 1`, rank r with weight `1 / (r + 1)^exponent`.
    pub fn new(count: usize, exponent: f64) -> Self {
        let mut total = 0.0;
        let mut cumulative: Vec<f64> = (1..=count)
            .map(|rank| {
                total += (rank as f64).powf(-exponent);
                total
            })
            .collect();
        cumulative.iter_mut().for_each(|sum| *sum /= total);
        Self { cumulative }
    }

    /// Draws a rank.
    pub fn sample(&self, random: &mut Random) -> usize {
        let draw = random.unit();
        self.cumulative.partition_point(|&sum| sum < draw).min(self.cumulative.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::workload::{MESSAGES_PER_KEY, Tuning, named};

    fn workload(name: &str) -> Workload {
        named(name, &Tuning { seconds: 1.0, layout: None, keys: None }).unwrap().remove(0)
    }

    #[test]
    fn zipf_follows_its_law() {
        let zipf = Zipf::new(10_000, 1.1);
        let mut random = Random::new(7);
        let mut counts = vec![0u32; 10_000];
        (0..200_000).for_each(|_| counts[zipf.sample(&mut random)] += 1);
        let ratio = f64::from(counts[0]) / f64::from(counts[9]);
        assert!((10.0..16.0).contains(&ratio), "rank 1 to rank 10 should be near 10^1.1 = 12.6, was {ratio}");
        let share = f64::from(counts[0]) / 200_000.0;
        assert!((0.13..0.17).contains(&share), "rank 1 should take about 15 %, took {share}");
    }

    #[test]
    fn the_hot_key_takes_its_share() {
        let mut source = Plan::new(&workload("W3")).into_sources().remove(0);
        let hot = (0..100_000).filter(|_| source.next_message().key == 0).count();
        assert!((29_000..31_000).contains(&hot), "{hot}");
    }

    #[test]
    fn an_even_plan_gives_every_key_the_same() {
        let mut source = Plan::new(&workload("W5")).into_sources().remove(0);
        for _ in 0..100_000 {
            source.next_message();
        }
        assert!(source.made_by_cell().all(|(_, made)| made == 10));
    }

    #[test]
    fn a_hot_family_has_every_hundredth_message() {
        let mut source = Plan::new(&workload("W5-hot")).into_sources().remove(0);
        for _ in 0..100_000 {
            source.next_message();
        }
        let made: Vec<u64> = source.made_by_cell().map(|(_, made)| made).collect();
        assert_eq!(made[FAMILY as usize], 1_000);
        assert!(made[1..].iter().all(|made| (9..=10).contains(made)), "the others have the same");
    }

    #[test]
    fn unbounded_keys_see_ten_messages_each_and_end() {
        let plan = Plan::new(&workload("W4"));
        let map = plan.map();
        let mut source = plan.into_sources().remove(0);
        let mut seen: HashMap<u64, u32> = HashMap::new();
        let mut positions = vec![0u64; map.cells()];
        for _ in 0..2 * UNBOUNDED_SLOTS * MESSAGES_PER_KEY as usize {
            let message = source.next_message();
            let count = seen.entry(message.key).or_default();
            assert_eq!(message.body.sequence, *count);
            *count += 1;
            let position = &mut positions[map.cell(message.key)];
            assert_eq!(
                map.position(&message),
                *position,
                "a cell's positions are contiguous across generations"
            );
            *position += 1;
        }
        assert_eq!(seen.len(), 2 * UNBOUNDED_SLOTS);
        assert!(seen.values().all(|&count| count == MESSAGES_PER_KEY));
    }

    #[test]
    fn producers_have_disjoint_keys() {
        let mut owners: HashMap<u64, usize> = HashMap::new();
        for (producer, mut source) in
            Plan::new(&workload("W1-producers4")).into_sources().into_iter().enumerate()
        {
            for _ in 0..10_000 {
                assert_eq!(*owners.entry(source.next_message().key).or_insert(producer), producer);
            }
        }
        assert!(owners.len() > 9_500);
    }
}
