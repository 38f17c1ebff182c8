//! Where messages come from: one trait, one conformance suite, one file per kind of source.
//!
//! A source hands out [`Delivery`]s under a lease and takes them back by their [`Receipt`]. The router (`router.rs`) asks it only for
//! what fits, keeps the leases alive while deliveries wait or work, and settles each of them exactly once.
//!
//! # What every source promises
//!
//! 1. Deliveries of a group come in the order in which they were published. While one of them is claimed by somebody else, or is
//!    delayed, none behind it is handed out.
//! 2. A receipt is good for one delivery. When the lease has run out and the message has been handed out again, the old receipt
//!    settles nothing: the answer is [`Settled::Stale`].
//! 3. What was published and acknowledged to the publisher is handed out until it is settled, whatever crashes.
//! 4. What is settled is never handed out again.
//!
//! # What is held of a broker
//!
//! A broker that has no leases, no delays or no way back that keeps the order leaves them to its source, which holds in this process what it has read and not settled. There are three such
//! structures, because the brokers differ in what they say about a message, and each rule below would be a special case in the others:
//!
//! | | [`shelf`] (NATS) | `pushed::shelf` (RabbitMQ, ActiveMQ) | [`embedded`]'s index (Kafka) |
//! |---|---|---|---|
//! | which message it is | the broker's number, the same when it comes again | nobody numbers it: a ticket by arrival, and a memory of fingerprints | its offset |
//! | when the broker hands it out again | its place is kept, its handle exchanged | the subscription was lost, and everything on it with it | never, while the partition is ours |
//! | a lease that runs out | it waits again, here | the subscription is let go: nobody else could have it otherwise | it waits again, here |
//! | given back | into its place; the one claimer keeps the order of what it has | into its place; nothing of its group goes before the later ones are back | as there, and one group is never out to two claimers |
//! | how many | a window per partition, in thousands | a prefetch per subscription, a thousand | tens of thousands, with finished ones among them: plain numbers, the texts apart |

pub mod embedded;
#[cfg(feature = "postgres")]
pub mod postgres;

pub mod broker;
#[cfg(any(feature = "kafka", feature = "nats", feature = "rabbitmq", feature = "sqs"))]
mod lines;
pub mod shelf;
pub mod sink;

#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "sqs")]
pub mod sqs;

#[cfg(any(feature = "rabbitmq", feature = "activemq"))]
pub(crate) mod pushed;

#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;

#[cfg(feature = "activemq")]
pub mod activemq;

#[cfg(feature = "conformance")]
pub mod conformance;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;
#[cfg(any(feature = "rabbitmq", feature = "activemq", feature = "nats"))]
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::future::BoxFuture;
use tokio::time::Instant;

/// So many arrivals of a broker that pushes are put on the shelf at once, at most.
#[cfg(any(feature = "rabbitmq", feature = "activemq", feature = "nats"))]
const ARRIVALS_AT_ONCE: usize = 256;

/// One handing-out of a message.
#[derive(Clone)]
pub struct Delivery {
    /// Which message of the source it is; the same again when it is handed out again. Never used to settle.
    pub id: DeliveryId,
    /// What settles this handing-out, and no other.
    pub receipt: Receipt,
    /// The group as the source knows it; goes before the one in the text.
    pub group: Option<Arc<str>>,
    /// The message as it was published.
    pub text: Arc<[u8]>,
    /// How many times it was handed out, this one included.
    pub attempt: u32,
    /// What the target is told to know late calls by: grows along a group with every delivery that is newer than all before, whoever makes it. Mostly the `id`; a broker without numbers
    /// of its own may hand a message out again under its old identity after somebody else has handed out more.
    pub sequence: u64,
}

impl fmt::Debug for Delivery {
    /// The text may hold tokens; how long it is has to do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("id", &self.id)
            .field("receipt", &self.receipt)
            .field("group", &self.group)
            .field("text_bytes", &self.text.len())
            .field("attempt", &self.attempt)
            .field("sequence", &self.sequence)
            .finish()
    }
}

/// Identity of a message within its source: its sequence where the source has one. Grows in the order of publication.
pub type DeliveryId = u64;

/// What a source gives with a delivery to recognise it by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Receipt {
    /// As the broker wrote it.
    Text(Arc<str>),
    /// As this process numbers what it holds: what a text would say, without writing and reading it for every message.
    Numbers([u64; 4]),
}

impl Receipt {
    /// The text; that of numbers is empty, and nobody's.
    pub fn text(&self) -> Arc<str> {
        match self {
            Receipt::Text(text) => Arc::clone(text),
            Receipt::Numbers(_) => Arc::default(),
        }
    }
}

/// What is to become of a delivery.
#[derive(Clone, Debug, PartialEq)]
pub enum Disposal {
    /// Handled: never hand it out again.
    Done,
    /// Hand it out again after this time, not before; its successors wait with it.
    GiveBack {
        /// How long it, and so its group, has to wait.
        delay: Duration,
    },
    /// Failed for good: keep it among the dead letters, with the reason.
    DeadLetter {
        /// Why.
        reason: String,
    },
    /// Cannot be read as a message: keep the text as it is, with the reason, where it does no harm.
    Quarantine {
        /// Why.
        reason: String,
    },
}

/// What became of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// As asked, and durably so.
    Settled,
    /// The receipt is from an older handing-out, or the message is gone: nothing was done.
    Stale,
}

/// Why a source could not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Perhaps later: a lost connection, a full disk, a locked file. The source keeps trying to recover by itself.
    #[error("{0}")]
    Unavailable(String),
    /// Not without somebody's doing.
    #[error("{0}")]
    Broken(String),
    /// The source was closed.
    #[error("the source is closed")]
    Closed,
}

/// How many deliveries are wanted, and how long to wait for the first.
#[derive(Clone, Copy, Debug)]
pub struct Wants {
    /// At most so many.
    pub most: usize,
    /// Comes back empty after this time.
    pub wait: Duration,
    /// How long they are leased.
    pub lease: Duration,
}

/// A place in a source where messages come to rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Of messages that failed for good.
    DeadLetters,
    /// Of what could not be read as a message.
    Quarantine,
}

/// A message that came to rest.
#[derive(Clone, PartialEq, Eq)]
pub struct Kept {
    /// Its place where it rests: the older, the smaller. In the embedded queue it is the sequence that it had as a message.
    pub sequence: u64,
    /// Its group.
    pub group: Option<Arc<str>>,
    /// How often it had been handed out, where that is known.
    pub attempts: Option<u32>,
    /// When it was published, in milliseconds since 1970, where that is known.
    pub published_millis: Option<u64>,
    /// When it came to rest, in milliseconds since 1970.
    pub kept_millis: u64,
    /// Why.
    pub reason: String,
    /// What was published, byte by byte.
    pub text: Arc<[u8]>,
}

/// Without the text, which may hold secrets.
impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("sequence", &self.sequence)
            .field("group", &self.group)
            .field("attempts", &self.attempts)
            .field("reason", &self.reason)
            .field("bytes", &self.text.len())
            .finish_non_exhaustive()
    }
}

/// What became of dead letters that were to be messages again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redriven {
    /// How many are.
    pub count: usize,
    /// Those that were asked for and are not there.
    pub missing: Vec<u64>,
}

/// For operators: what came to rest in a source, where it can be listed and brought back from here. Other sources keep it where the tools of their brokers show it.
pub trait Keeps: Send + Sync {
    /// What rests there, oldest first, behind a sequence (0 for the oldest). Beyond the first no more than 4 MiB: there may be more behind the last, however many were wanted.
    fn kept(&self, rest: Rest, after: u64, most: usize) -> BoxFuture<'_, Result<Vec<Kept>, SourceError>>;

    /// Makes dead letters messages again, at the end of their groups: these, or the oldest.
    fn redrive(&self, which: Option<Vec<u64>>, most: usize) -> BoxFuture<'_, Result<Redriven, SourceError>>;

    /// Forgets everything there. Says how many.
    fn purge(&self, rest: Rest) -> BoxFuture<'_, Result<usize, SourceError>>;
}

/// A page of what is kept has no more bytes than this, unless the first alone has: an operator's question must not take the memory that messages need.
pub(crate) const PAGE_BYTES: usize = 4 * 1024 * 1024;

/// A source of deliveries.
pub trait Source: Send + Sync + 'static {
    /// What it is called in the configuration, in metrics and in logs.
    fn name(&self) -> &str;

    /// Claims deliveries that may run now: at least one unless the wait runs out. Dropping the future loses nothing: what it had
    /// claimed comes again.
    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>>;

    /// Settles deliveries, all in one go where the source can. The answers are in the order of the question, and each is durable
    /// when it is given.
    fn settle(&self, disposals: Vec<(Receipt, Disposal)>)
    -> BoxFuture<'_, Result<Vec<Settled>, SourceError>>;

    /// Renews leases. Says which were still good.
    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>>;

    /// Whether the sequence of a delivery is its place. Where it is not, targets are told none.
    fn is_numbered(&self) -> bool {
        true
    }

    /// A number that grows whenever claimed deliveries may have become somebody else's before their leases ran out: with a connection, or a partition. It is read before every
    /// attempt; when it has grown, [`are_good`](Self::are_good) is asked.
    fn losses(&self, _now: Instant) -> u64 {
        0
    }

    /// Which receipts are still good, as far as is known in this process.
    fn are_good(&self, receipts: &[Receipt], _now: Instant) -> Vec<bool> {
        vec![true; receipts.len()]
    }

    /// How many messages wait, are leased, and are dead, as far as the source can tell.
    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>>;

    /// What kind of source it is, as the configuration calls it; one that is not configured is a program's own.
    fn kind(&self) -> &'static str {
        "custom"
    }

    /// How many settlements of many deliveries it can have under way at once. One, where they are written as one; more, where an answer is long on its way.
    fn settles_at_once(&self) -> usize {
        1
    }

    /// For how long settlements that come in numbers may gather before the next batch of them. Less where a batch costs little and whatever is not settled keeps others from coming.
    fn gathers_for(&self) -> Duration {
        Duration::from_millis(4)
    }

    /// Whether it has what it needs to answer. One that has to be connected first is not open until then.
    fn is_open(&self) -> bool {
        true
    }

    /// What came to rest in it, where that can be listed and brought back from here.
    fn keeps(&self) -> Result<Option<Arc<dyn Keeps>>, SourceError> {
        Ok(None)
    }

    /// Ends it, after everything that could be settled is: what is still claimed may be handed to others at once.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// What a source holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Published and not claimed.
    pub waiting: u64,
    /// Claimed and not settled.
    pub leased: u64,
    /// Among the dead letters.
    pub dead: u64,
    /// In quarantine.
    pub quarantined: u64,
}

/// The instant of a time of the calendar, in milliseconds since 1970, by our clock. Nothing if it is past.
#[cfg(any(feature = "rabbitmq", feature = "activemq", feature = "nats"))]
pub(crate) fn instant(millis: u64) -> Option<Instant> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let left = Duration::from_millis(millis).checked_sub(since)?;
    // A delay of years is a mistake, and fits no clock.
    Some(Instant::now() + left.min(Duration::from_secs(365 * 24 * 3600)))
}

/// As much of a text as fits into so many bytes.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_no_text() {
        let (receipt, text) = (Receipt::Text("r".into()), b"hush".as_slice().into());
        let shown = format!("{:?}", Delivery { id: 7, receipt, group: None, text, attempt: 1, sequence: 7 });
        assert!(
            shown.contains("text_bytes: 4") && !shown.contains("hush") && !shown.contains("104"),
            "{shown}"
        );
    }
}
