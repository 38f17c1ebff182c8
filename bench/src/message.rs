//! What travels through every contender: a key, and a body that says which message of that key it is.
//!
//! Plans make messages ([`crate::plan`]), producers hand them to a contender, and the probe receives them again in the
//! handler. A message is 24 bytes and `Copy`, so that what is measured is the hand-over and not the allocator.

/// One message of a benchmark.
#[derive(Clone, Copy, Debug, Default)]
pub struct Message {
    /// What orders messages: those of one key run one after the other.
    pub key: u64,
    /// What is carried, without the key: contenders that hold the key themselves carry only this.
    pub body: Body,
}

/// The part of a message that is not its key.
#[derive(Clone, Copy, Debug, Default)]
pub struct Body {
    /// Position among the messages of the key, from 0.
    pub sequence: u32,
    /// Open loop: how long after the intended time the message was really submitted. Saturates at 4.3 seconds.
    pub delay_ns: u32,
    /// Open loop: when the message should have been submitted, since the start of the run.
    pub intended_ns: u64,
}

impl Message {
    /// A message without times, as the closed-loop workloads send it.
    #[inline]
    pub fn new(key: u64, sequence: u32) -> Self {
        Self { key, body: Body { sequence, delay_ns: 0, intended_ns: 0 } }
    }

    /// Stamps the message with the time it should have been sent and the time it is sent.
    #[inline]
    pub fn stamped(mut self, intended_ns: u64, submitted_ns: u64) -> Self {
        self.body.intended_ns = intended_ns;
        self.body.delay_ns = u32::try_from(submitted_ns.saturating_sub(intended_ns)).unwrap_or(u32::MAX);
        self
    }
}

impl Body {
    /// When the message was really submitted, since the start of the run.
    #[inline]
    pub fn submitted_ns(&self) -> u64 {
        self.intended_ns + u64::from(self.delay_ns)
    }
}

/// Spreads the bits of a key, so that neighbouring keys land on different partitions.
///
/// One odd multiplication and a shift: the cheapest hash whose upper bits depend on all lower ones. Contenders that
/// route by hash all use this one, so that none pays for a slower function than another.
#[inline]
pub fn smear(key: u64) -> u64 {
    key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32
}

/// The partition of a key among `count`, without a division.
#[inline]
pub fn partition(key: u64, count: usize) -> usize {
    ((smear(key) * count as u64) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_even_and_in_range() {
        let mut counts = [0usize; 3];
        for key in 0..9_000 {
            counts[partition(key, 3)] += 1;
        }
        assert!(counts.iter().all(|&count| (2_800..=3_200).contains(&count)), "{counts:?}");
    }

    #[test]
    fn a_stamp_keeps_both_times() {
        let body = Message::new(1, 0).stamped(1_000, 1_250).body;
        assert_eq!((body.intended_ns, body.submitted_ns()), (1_000, 1_250));
    }
}
