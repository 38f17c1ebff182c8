//! What travels: a body, the key that orders it, and what kind of message it is.
//!
//! A message is moved, never shared: from the submitter into ingress, into its lane, into the hands of one worker, and out.
//! [`Handle::submit`](crate::Handle::submit) takes it; [`admission`](crate::Overflow) decides what becomes of it.

/// A message on its way: `body` is handled in order with all others of the same `key`.
///
/// Most submitters write `(key, body)`, which turns into an event of normal priority.
///
/// ```
/// use laneway::{Message, Priority};
/// let message = Message::new("order-7", "paid").priority(Priority::High);
/// assert_eq!(message.key, "order-7");
/// let same: Message<_, _> = ("order-7", "paid").into();
/// assert_eq!(same.body, message.body);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<K, M> {
    /// What orders it.
    pub key: K,
    /// What the handler gets.
    pub body: M,
    /// An event, or the control message that starts or finishes the flow of its key.
    pub kind: Kind,
    /// How urgent its lane becomes while it waits. It never overtakes inside its lane.
    pub priority: Priority,
}

impl<K, M> Message<K, M> {
    /// An event.
    pub fn new(key: K, body: M) -> Self {
        Message { key, body, kind: Kind::Event, priority: Priority::Normal }
    }

    /// The control message that starts the flow of `key`.
    pub fn start(key: K, body: M) -> Self {
        Message { kind: Kind::Start, ..Message::new(key, body) }
    }

    /// The control message that finishes the flow of `key`.
    pub fn finish(key: K, body: M) -> Self {
        Message { kind: Kind::Finish, ..Message::new(key, body) }
    }

    /// The same message with another priority.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}

impl<K, M> From<(K, M)> for Message<K, M> {
    fn from((key, body): (K, M)) -> Self {
        Message::new(key, body)
    }
}

/// What a message means to the flow of its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// An ordinary message.
    #[default]
    Event,
    /// The flow of this key begins. Never dropped by an overflow policy.
    Start,
    /// The flow of this key ends. Never dropped by an overflow policy.
    Finish,
}

impl Kind {
    /// Start and finish are control messages: no overflow policy drops them.
    pub fn is_control(self) -> bool {
        self != Kind::Event
    }
}

/// How urgent a lane is among the lanes of its dispatcher.
///
/// Priority chooses between lanes and never inside one: an urgent message makes its whole lane urgent until it has been
/// handled, so that what is ahead of it in its lane does not hold it up longer than need be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// After everything else, though never starved.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Before normal lanes.
    High,
    /// Before all others.
    Urgent,
}

impl Priority {
    /// How many tiers there are.
    pub(crate) const TIERS: usize = 4;

    /// The tier's place in the ready lists: 0 is served first.
    pub(crate) fn tier(self) -> u8 {
        Priority::Urgent as u8 - self as u8
    }
}

/// A message inside the engine, from ingress to its end.
#[derive(Debug)]
pub(crate) struct Item<K, M> {
    /// Which lane it belongs to.
    pub(crate) fingerprint: u64,
    /// When it was accepted, in nanoseconds of the engine's clock, if it is one of those that are timed; else 0.
    pub(crate) accepted_at: u64,
    pub(crate) message: Message<K, M>,
}
