//! What publishers hand to a queue, and what they are told. `mod.rs` takes it from here.

use std::sync::Arc;
use std::time::Duration;

use super::BATCH_MAX;
use crate::message::{DispatchMode, MESSAGE_BYTES_MAX, Message, NAME_BYTES_MAX, NO_GROUP};
use crate::source::SourceError;

/// A message on its way into a queue.
#[derive(Clone, PartialEq)]
pub struct Publication {
    /// What is delivered, byte by byte.
    pub text: Arc<[u8]>,
    /// What orders it. Blanks are no group.
    pub group: Option<Arc<str>>,
    /// Not handed out before this time has passed; its group waits with it.
    pub delay: Duration,
    /// Within the queue's window, a second message with the same one is not stored.
    pub deduplication_id: Option<Arc<str>>,
    /// Of a message of the router without a group: what it stands in line with, where those are in order. See [`written`](Self::written).
    line: Option<Arc<str>>,
}

/// Without the text, which may hold secrets.
impl std::fmt::Debug for Publication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publication")
            .field("bytes", &self.text.len())
            .field("group", &self.group)
            .field("delay", &self.delay)
            .field("deduplication_id", &self.deduplication_id)
            .finish()
    }
}

impl Publication {
    /// A message without a group.
    pub fn new(text: impl AsRef<[u8]>) -> Self {
        let text = text.as_ref().into();
        Publication { text, group: None, delay: Duration::ZERO, deduplication_id: None, line: None }
    }

    /// A message of the router, with the group, the delay and the deduplication id that it names. Where messages without a group are in order, those of one pool
    /// do not wait for those of another, and one that is to be sent immediately waits for nobody.
    pub fn of(message: &Message) -> Self {
        let line = || match message.dispatch_mode {
            DispatchMode::Immediate => NO_GROUP.to_string().into(),
            _ => message.line(),
        };
        let group = message.group().map(Arc::from);
        Publication {
            text: message.to_json().into_bytes().into(),
            line: group.is_none().then(line),
            group,
            delay: Duration::from_secs(message.delay_seconds.unwrap_or(0).into()),
            deduplication_id: message.deduplication_id.as_deref().map(Arc::from),
        }
    }

    /// What is written into the file in the place of a group: its name; else, behind [`NO_GROUP`], the line that the message stands in, or nothing if it
    /// is in none; or nothing at all if that is not known, and then it stands in line with all others of which it is not.
    pub(super) fn written(&self) -> Option<&Arc<str>> {
        self.group.as_ref().or(self.line.as_ref())
    }

    /// With a group.
    #[must_use]
    pub fn group(self, group: impl Into<Arc<str>>) -> Self {
        Publication { group: Some(group.into()), ..self }
    }

    /// With a delay.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Publication { delay, ..self }
    }

    /// With a deduplication id.
    #[must_use]
    pub fn deduplication_id(self, id: impl Into<Arc<str>>) -> Self {
        Publication { deduplication_id: Some(id.into()), ..self }
    }
}

/// The name of a group, if it is one that is [written](Publication::written) in its place.
pub(super) fn name_of(written: &[u8]) -> Option<&[u8]> {
    Some(written).filter(|written| written.first() != Some(&(NO_GROUP as u8)))
}

/// What became of a message that was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Its place among all messages of the store; for a duplicate, that of the message it repeats.
    pub sequence: u64,
    /// It was here before and was not stored again.
    pub duplicate: bool,
}

/// Nothing was published, and here it is again.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{refusal}")]
pub struct PublishError {
    /// Why.
    pub refusal: Refusal,
    /// All messages of the call; none only if the writer died with them in its hands.
    pub publications: Vec<Publication>,
}

/// Why nothing was published.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full.
    #[error("the queue is full: it holds {capacity} messages at most")]
    Full {
        /// So many are allowed.
        capacity: usize,
    },
    /// Too many at once.
    #[error("{count} messages are more than the {BATCH_MAX} that may be published at once")]
    TooMany {
        /// So many there were.
        count: usize,
    },
    /// One of them is too long.
    #[error("message {place} has {bytes} bytes; at most {MESSAGE_BYTES_MAX} are allowed")]
    TooLong {
        /// Which, from 0.
        place: usize,
        /// How long it is.
        bytes: usize,
    },
    /// The group, the deduplication id or the idempotency key of one of them is too long.
    #[error("the {what} of message {place} has {bytes} bytes; at most {NAME_BYTES_MAX} are allowed")]
    LongName {
        /// Which, from 0.
        place: usize,
        /// Of the three.
        what: &'static str,
        /// How long it is.
        bytes: usize,
    },
    /// The group, the deduplication id or the idempotency key of one of them has control characters: they have a meaning of their own in the file.
    #[error("the {what} of message {place} has control characters")]
    ControlCharacters {
        /// Which, from 0.
        place: usize,
        /// Of the three.
        what: &'static str,
    },
    /// The store could not do it.
    #[error(transparent)]
    Failed(#[from] SourceError),
}
