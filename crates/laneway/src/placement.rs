//! Which dispatcher a key belongs to.
//!
//! A placement answers for one key. Whether its answer has to be remembered depends on what it looked at: a choice by hash or by
//! name can be made again at any time, a choice by load cannot, so `flows.rs` keeps a mapping for as long as the key has work.

/// What a placement may choose from.
pub trait Among {
    /// How many dispatchers there are; at least one.
    fn len(&self) -> usize;
    /// Never, for an engine that was built.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Outstanding messages of a dispatcher: waiting and in service.
    fn outstanding(&self, dispatcher: usize) -> u64;
    /// Keys that are mapped to a dispatcher.
    fn mappings(&self, dispatcher: usize) -> usize;
    /// The dispatcher of this name.
    fn named(&self, name: &str) -> Option<usize>;
}

/// What a placement looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LooksAt {
    /// Only the fingerprint of the key: nothing has to be remembered.
    Fingerprint,
    /// The key itself, and always with the same answer: nothing has to be remembered.
    Key,
    /// The state of the dispatchers: the answer is remembered while the key has work.
    Load,
}

/// The rule that gives a new lane its dispatcher.
///
/// ```
/// use laneway::{Among, LooksAt, Placement};
///
/// /// Even numbers here, odd ones there.
/// struct Parity;
/// impl Placement<u64> for Parity {
///     fn looks_at(&self) -> LooksAt {
///         LooksAt::Key
///     }
///     fn place(&self, key: &u64, _fingerprint: u64, among: &dyn Among) -> Option<usize> {
///         Some(*key as usize % among.len().min(2))
///     }
/// }
/// ```
pub trait Placement<K>: Send + Sync {
    /// What the answer depends on.
    fn looks_at(&self) -> LooksAt;

    /// The index of the dispatcher for this key, or `None` if there is none for it, and then the message is refused.
    fn place(&self, key: &K, fingerprint: u64, among: &dyn Among) -> Option<usize>;
}

/// Document 003's rule: bits of a smeared hash, over a number of dispatchers that is a power of two.
///
/// With another number (after one was added or removed) it takes the high part of a product instead, which is as even.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByHash;

impl ByHash {
    /// So many bits are of the hash, from the lowest: two million dispatchers. Above them a message says what it is (`message.rs`).
    const BITS: u32 = 21;

    /// Bits 32 and up: the lane tables use the lowest and the highest ones, and lanes of one dispatcher must differ there.
    pub(crate) fn bits(fingerprint: u64) -> usize {
        (fingerprint >> 32) as usize
    }

    pub(crate) fn index(fingerprint: u64, len: usize) -> usize {
        let bits = ByHash::bits(fingerprint);
        if len.is_power_of_two() {
            return bits & (len - 1);
        }
        let bits = bits as u64 & ((1 << ByHash::BITS) - 1);
        ((bits * len as u64) >> ByHash::BITS) as usize
    }
}

impl<K> Placement<K> for ByHash {
    fn looks_at(&self) -> LooksAt {
        LooksAt::Fingerprint
    }

    fn place(&self, _: &K, fingerprint: u64, among: &dyn Among) -> Option<usize> {
        Some(ByHash::index(fingerprint, among.len()))
    }
}

/// Document 000's rule, mended: the dispatcher with the least outstanding work (waiting *and* in service), then the one with the fewest keys,
/// then the next one round. `queue.size()` alone sends the flows of an idle system all to the first worker.
#[derive(Debug, Default)]
pub struct LeastLoaded {
    turn: std::sync::atomic::AtomicUsize,
}

impl<K> Placement<K> for LeastLoaded {
    fn looks_at(&self) -> LooksAt {
        LooksAt::Load
    }

    fn place(&self, _: &K, _: u64, among: &dyn Among) -> Option<usize> {
        let start = self.turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let round = (0..among.len()).map(|step| (start + step) % among.len());
        // `min_by_key` keeps the first of equals: the next one round.
        round.min_by_key(|&dispatcher| (among.outstanding(dispatcher), among.mappings(dispatcher)))
    }
}

/// Document 001's rule: the key says the name of its dispatcher.
///
/// ```
/// use laneway::ByName;
/// // Keys such as "api/orders": the part before the slash is the dispatcher.
/// let placement = ByName::new(|key: &String| key.split('/').next().unwrap_or(""));
/// ```
pub struct ByName<F>(F);

impl<F> ByName<F> {
    /// Places by the name that `name` reads from a key.
    pub fn new<K>(name: F) -> Self
    where
        F: Fn(&K) -> &str,
    {
        ByName(name)
    }
}

impl<F> std::fmt::Debug for ByName<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ByName")
    }
}

impl<K, F> Placement<K> for ByName<F>
where
    F: Fn(&K) -> &str + Send + Sync,
{
    fn looks_at(&self) -> LooksAt {
        LooksAt::Key
    }

    fn place(&self, key: &K, _: u64, among: &dyn Among) -> Option<usize> {
        among.named((self.0)(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::fingerprint_of;

    struct Fixed(Vec<(u64, usize)>);
    impl Among for Fixed {
        fn len(&self) -> usize {
            self.0.len()
        }
        fn outstanding(&self, dispatcher: usize) -> u64 {
            self.0[dispatcher].0
        }
        fn mappings(&self, dispatcher: usize) -> usize {
            self.0[dispatcher].1
        }
        fn named(&self, _: &str) -> Option<usize> {
            None
        }
    }

    #[test]
    fn least_loaded_counts_work_then_keys_then_takes_turns() {
        let placement = LeastLoaded::default();
        let place = |among: &Fixed| Placement::<u8>::place(&placement, &0, 0, among).unwrap();
        assert_eq!(place(&Fixed(vec![(5, 0), (1, 9), (5, 0)])), 1);
        assert_eq!(place(&Fixed(vec![(1, 3), (1, 2), (1, 3)])), 1);
        let idle = Fixed(vec![(0, 0); 4]);
        let mut seen = [0; 4];
        (0..400).for_each(|_| seen[place(&idle)] += 1);
        assert_eq!(seen, [100; 4], "pitfall 000.4: an idle system spreads its flows");
    }

    #[test]
    fn hash_placement_is_even_for_any_number() {
        for len in [1, 2, 3, 4, 7, 8, 100] {
            let seen = keys_each(len, 1_000);
            assert!(seen.iter().all(|&n| (850..1_150).contains(&n)), "{len}: {seen:?}");
        }
    }

    #[test]
    fn thousands_of_partitions_have_as_many_keys_each() {
        for len in [4_096, 5_000, 8_192, 16_384] {
            let seen = keys_each(len, 100);
            let (least, most) = (seen.iter().min().unwrap(), seen.iter().max().unwrap());
            assert!(*least > 50 && *most < 150, "{len}: from {least} to {most}");
        }
    }

    /// How many of so many keys for each partition come to each.
    fn keys_each(partitions: usize, keys: u64) -> Vec<u32> {
        let hasher = foldhash::quality::FixedState::default();
        let mut seen = vec![0; partitions];
        for key in 0..partitions as u64 * keys {
            let fingerprint = fingerprint_of(std::hash::BuildHasher::hash_one(&hasher, key));
            seen[ByHash::index(fingerprint, partitions)] += 1;
        }
        seen
    }
}
