//! Texts that are longer than a message may be, while they are in hand: how many bytes of them there are, and with what prefetch they fit.
//!
//! What is too long goes to quarantine, whole, so it has to be held until then. But a prefetch counts messages: a thousand texts of tens of megabytes would be here before the first of them
//! is put aside, and again after the restart that follows. Nor can a reader just stop reading, since the answers to acknowledgements come over the same connection. So the
//! readers weigh what is too long as it comes. When more of it is in hand than may be, the subscription ends, everything goes back in order, and the next one has a prefetch in which such texts
//! fit. Once a whole prefetch of ordinary messages has come without one, it ends again, and the next one is as wide as it was. (It is not drained first: a group that is parked or waits
//! for long would keep it from being empty, and everybody else from being served.)
//!
//! Ordinary messages are not weighed: they are bounded by the prefetch, and pay one comparison.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use crate::message::MESSAGE_BYTES_MAX;

/// The long texts of a source. All is Relaxed: what is a message too late is weighed with the next one.
pub(crate) struct LongTexts {
    bytes_max: usize,
    /// Over how many subscriptions they come.
    parts: usize,
    /// As it was configured.
    prefetch: u32,
    /// In hand.
    bytes: Arc<AtomicUsize>,
    /// The longest since the prefetch was as configured.
    longest: AtomicUsize,
    /// The prefetch of the next subscription.
    now: AtomicU32,
    /// So many ordinary messages have come in a row over a narrower one.
    calm: AtomicU32,
}

/// Counts a text for as long as it is in hand.
pub(crate) struct Weight {
    bytes: usize,
    all: Arc<AtomicUsize>,
}

impl Drop for Weight {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Relaxed);
    }
}

/// What a text that has come means for its subscription.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// It goes on.
    Right,
    /// It has to end, to begin anew with another prefetch. Says why.
    Wrong(String),
}

impl LongTexts {
    /// For so many subscriptions with such a prefetch.
    pub(crate) fn new(bytes_max: usize, parts: usize, prefetch: u32) -> Self {
        LongTexts {
            bytes_max,
            parts,
            prefetch,
            bytes: Arc::default(),
            longest: AtomicUsize::new(0),
            now: AtomicU32::new(prefetch),
            calm: AtomicU32::new(0),
        }
    }

    /// With what a subscription begins.
    pub(crate) fn prefetch(&self) -> u32 {
        self.now.load(Relaxed)
    }

    /// A text has come. Its weight is to be kept for as long as it is.
    pub(crate) fn weigh(&self, bytes: usize) -> (Option<Arc<Weight>>, Width) {
        let prefetch = self.now.load(Relaxed);
        if bytes <= MESSAGE_BYTES_MAX {
            let is_calm = prefetch < self.prefetch && self.calm.fetch_add(1, Relaxed) + 1 == self.prefetch;
            if is_calm {
                self.longest.store(0, Relaxed);
                self.now.store(self.prefetch, Relaxed);
            }
            let wider = || {
                let prefetch = self.prefetch;
                Width::Wrong(format!(
                    "no text is too long any more: they come again with a prefetch of {prefetch}"
                ))
            };
            return (None, if is_calm { wider() } else { Width::Right });
        }
        self.calm.store(0, Relaxed);
        let longest = self.longest.fetch_max(bytes, Relaxed).max(bytes);
        let held = self.bytes.fetch_add(bytes, Relaxed) + bytes;
        let weight = Arc::new(Weight { bytes, all: Arc::clone(&self.bytes) });
        let width = match held > self.bytes_max && prefetch > 1 {
            true => {
                // The next ones come while the last ones are being put aside.
                let fits = u32::try_from(self.bytes_max / longest / self.parts / 2).unwrap_or(u32::MAX);
                let narrower = fits.min(prefetch / 2).max(1);
                self.now.store(narrower, Relaxed);
                Width::Wrong(format!(
                    "{held} bytes of texts that are too long for messages are in hand, of which {} may be: they come again with a prefetch of {narrower}",
                    self.bytes_max
                ))
            }
            false => Width::Right,
        };
        (Some(weight), width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: usize = MESSAGE_BYTES_MAX + 1;

    #[test]
    fn a_prefetch_is_as_narrow_as_long_texts_need_and_as_wide_as_it_was_without_them() {
        let texts = LongTexts::new(10 * LONG, 2, 100);
        let mut held: Vec<_> = (0..10).map(|_| texts.weigh(LONG)).collect();
        assert!(held.iter().all(|(_, width)| *width == Width::Right), "so much may be");
        held.push(texts.weigh(LONG));
        assert!(
            matches!(&held[10].1, Width::Wrong(said) if said.contains("a prefetch of 2")),
            "{:?}",
            held[10].1
        );
        drop(held);
        assert_eq!((texts.bytes.load(Relaxed), texts.prefetch()), (0, 2));
        let (_kept, width) = texts.weigh(20 * LONG);
        assert!(matches!(width, Width::Wrong(_)));
        assert_eq!(texts.prefetch(), 1);
        assert_eq!(texts.weigh(20 * LONG).1, Width::Right, "one at a time has to be held");
        for _ in 0..99 {
            assert_eq!(texts.weigh(10).1, Width::Right);
        }
        assert!(matches!(texts.weigh(10).1, Width::Wrong(_)));
        assert_eq!((texts.prefetch(), texts.weigh(10).1), (100, Width::Right));
    }
}
