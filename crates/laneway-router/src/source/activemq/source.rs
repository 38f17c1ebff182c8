//! Reading from ActiveMQ: a driver subscribes and reads, callers claim and settle, `pushed` is between them.
//!
//! The driver has one connection with one subscription. To let go is to end the connection. What is settled is told over the same connection, and the broker
//! says when it has dealt with it. A dead letter is published and its original acknowledged in one transaction.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout};

use super::stomp::{Failure, Frame, Receiver, Sender};
use super::{BROKERS_GROUP_HEADER, NOT_BEFORE_HEADER, REASON_HEADER, Settings, destination, send_frame};
use crate::source::ARRIVALS_AT_ONCE;
use crate::source::pushed::{
    ANSWER, Acknowledged, Arrival, Copied, Ending, LongTexts, Memory, Pushed, Weight, Width, brief,
    fingerprint,
};
use crate::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants, instant};

/// The headers that the broker writes itself.
pub(super) const BROKERS_OWN: &[&str] = &[
    "ack",
    "content-length",
    "destination",
    "expires",
    "message-id",
    "persistent",
    "priority",
    "receipt",
    "redelivered",
    "subscription",
    "timestamp",
    "transaction",
    BROKERS_GROUP_HEADER,
];

/// A queue to read from.
pub struct ActiveQueue {
    settings: Arc<Settings>,
    memory: Arc<Mutex<Memory>>,
}

impl ActiveQueue {
    /// Connects to nothing yet.
    pub fn new(settings: Settings) -> Self {
        ActiveQueue { settings: Arc::new(settings), memory: Arc::default() }
    }

    /// A consumer: one of those that share the groups of the queue. Must be called on a tokio runtime.
    pub fn consumer(&self, name: impl Into<Arc<str>>) -> ActiveSource {
        let inner = Arc::new(Inner {
            name: name.into(),
            pushed: Pushed::new(1, Arc::clone(&self.memory), self.settings.door()),
            long: LongTexts::new(self.settings.bytes, 1, self.settings.prefetch),
            settings: Arc::clone(&self.settings),
            sender: Mutex::default(),
            transactions: AtomicU64::new(0),
        });
        let driven = Arc::clone(&inner);
        tokio::spawn(async move { driven.pushed.drive(|| hold(&driven)).await });
        ActiveSource { inner }
    }
}

/// A consumer of a queue. Its driver ends when it is closed, or dropped.
pub struct ActiveSource {
    inner: Arc<Inner>,
}

struct Inner {
    name: Arc<str>,
    settings: Arc<Settings>,
    pushed: Pushed<Tag>,
    /// Texts that are too long for messages.
    long: LongTexts,
    /// Of the connection that there is.
    sender: Mutex<Option<Sender>>,
    transactions: AtomicU64,
}

/// What settles a message at the broker, and what it came with.
#[derive(Clone)]
struct Tag {
    ack: Arc<str>,
    headers: Arc<[(String, String)]>,
    /// Of a text that is too long.
    _weight: Option<Arc<Weight>>,
}

impl Drop for ActiveSource {
    fn drop(&mut self) {
        self.inner.pushed.close();
    }
}

impl ActiveSource {
    /// Waits until there is a connection, or the first attempt has failed.
    pub async fn connect(&self) -> Result<(), SourceError> {
        self.inner.pushed.connect(&self.inner.settings.place()).await
    }
}

impl Source for ActiveSource {
    fn name(&self) -> &str {
        &self.inner.name
    }

    fn kind(&self) -> &'static str {
        "activemq"
    }

    fn is_open(&self) -> bool {
        self.inner.pushed.is_connected()
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        self.inner.pushed.claim(wants).boxed()
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        self.inner.settle(disposals).boxed()
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        async move { self.inner.pushed.extend(&receipts, lease) }.boxed()
    }

    fn losses(&self, _now: Instant) -> u64 {
        self.inner.pushed.losses()
    }

    fn are_good(&self, receipts: &[Receipt], _now: Instant) -> Vec<bool> {
        self.inner.pushed.are_good(receipts)
    }

    /// Only what is in hand: STOMP does not say how much is left.
    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        async move {
            let (waiting, leased) = self.inner.pushed.counts();
            Ok(Depth { waiting: waiting as u64, leased: leased as u64, ..Depth::default() })
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.pushed.close_and_wait().boxed()
    }
}

// ── settling ──────────────────────────────────────────────────────────────────────────────────────────────────────────

impl Inner {
    fn sender(&self) -> Option<Sender> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn settle(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        if self.pushed.is_closed() {
            return Err(SourceError::Closed);
        }
        let sender = self.sender();
        let copied: Vec<_> =
            disposals.iter().map(|(receipt, disposal)| self.letter(receipt, disposal)).collect();
        let (mut answers, taken) = self.pushed.begin(&disposals);
        let mut frames = Vec::with_capacity(taken.len());
        for (place, one) in &taken {
            match &copied[*place] {
                Some((queue, reason, copied)) => frames.extend(self.put_aside(queue, reason, copied)),
                None => frames.push(ack(&one.tag)),
            }
        }
        // The sender was asked for first: if there is a new connection since, what came over that is asked for in vain over the old one, and comes again.
        let sent = match sender {
            Some(sender) => sender.ask(frames).await.is_ok(),
            None => false,
        };
        for (place, _) in taken.iter().filter(|_| sent) {
            answers[*place] = Settled::Settled;
        }
        let what = |place: usize| Acknowledged::of(&disposals[place].1, sent);
        self.pushed.acknowledged(taken.into_iter().map(|(place, taken)| (taken, what(place))));
        Ok(answers)
    }

    /// What is to be copied before it is acknowledged: to which queue, and why.
    fn letter<'a>(
        &'a self,
        receipt: &Receipt,
        disposal: &'a Disposal,
    ) -> Option<(&'a str, &'a str, Copied<Tag>)> {
        let (queue, reason) = match disposal {
            Disposal::DeadLetter { reason } => (&self.settings.dead_letters, reason),
            Disposal::Quarantine { reason } => (&self.settings.quarantine, reason),
            Disposal::Done | Disposal::GiveBack { .. } => return None,
        };
        Some((queue, reason, self.pushed.copy(receipt)?))
    }

    /// A letter to another queue and the acknowledgement of its original, both or neither.
    fn put_aside(&self, queue: &str, reason: &str, copied: &Copied<Tag>) -> [Frame; 4] {
        let transaction = format!("t{}", self.transactions.fetch_add(1, Relaxed));
        let group = copied.group.as_deref().map(|group| (self.settings.group_header.as_str(), group));
        let mut letter = send_frame(queue, group, &copied.text);
        let is_ours = |name: &str| BROKERS_OWN.contains(&name) || name == self.settings.group_header;
        for (name, value) in copied.tag.headers.iter().filter(|(name, _)| !is_ours(name)) {
            letter = letter.with(name, value);
        }
        letter =
            letter.with(REASON_HEADER, brief(reason)).with("x-laneway-attempt", copied.attempt.to_string());
        let part = |frame: Frame| frame.with("transaction", &transaction);
        [part(Frame::new("BEGIN")), part(letter), part(ack(&copied.tag)), part(Frame::new("COMMIT"))]
    }
}

fn ack(tag: &Tag) -> Frame {
    Frame::new("ACK").with("id", &*tag.ack)
}

// ── the driver ────────────────────────────────────────────────────────────────────────────────────────────────────────

/// One connection, from its beginning to its end. No error means that it was let go.
async fn hold(inner: &Arc<Inner>) -> Result<(), SourceError> {
    let (sender, mut receiver) = tokio::select! {
        connected = inner.settings.connect() => connected?,
        () = inner.pushed.until_closed() => return Ok(()),
    };
    let subscribe = Frame::new("SUBSCRIBE")
        .with("id", "0")
        .with("destination", destination(&inner.settings.queue))
        .with("ack", "client-individual")
        .with("activemq.prefetchSize", inner.long.prefetch().to_string());
    sender.send(&[subscribe]).await.map_err(|failure| inner.settings.explain("subscribe", &failure))?;
    let epoch = inner.pushed.open(0);
    *inner.sender.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender.clone());
    inner.pushed.recovered();
    let ended = read(inner, epoch, &sender, &mut receiver).await;
    *inner.sender.lock().unwrap_or_else(PoisonError::into_inner) = None;
    // First here, then there.
    let how = match ended {
        Ok(()) | Err(Failure::Silent(_)) => Ending::LetGo,
        Err(Failure::Lost(_) | Failure::Refused(_)) => Ending::Closed,
    };
    inner.pushed.lost(how).await;
    let _ = timeout(ANSWER, sender.send(&[Frame::new("DISCONNECT")])).await;
    ended.map_err(|failure| inner.settings.explain("read", &failure))
}

/// Puts on the shelf what comes, until something should be let go.
async fn read(inner: &Inner, epoch: u64, sender: &Sender, receiver: &mut Receiver) -> Result<(), Failure> {
    let let_go = inner.pushed.until_let_go(inner.settings.linger);
    let mut let_go = std::pin::pin!(let_go);
    loop {
        let first = tokio::select! {
            first = receiver.message() => first?,
            _ = &mut let_go => return Ok(()),
            () = inner.pushed.until_closed() => return Ok(()),
        };
        let mut arrivals = Vec::new();
        let mut next = Some(first);
        while let Some(frame) = next {
            let (weight, width) = inner.long.weigh(frame.body.len());
            arrivals.push(arrival(&inner.settings, epoch, frame, weight));
            match width {
                Width::Right => {}
                Width::Wrong(why) => return Err(Failure::Lost(why)),
            }
            next = if arrivals.len() < ARRIVALS_AT_ONCE { receiver.message_now() } else { None };
        }
        let again: Vec<Frame> = inner.pushed.arrive(arrivals).iter().map(ack).collect();
        if !again.is_empty() {
            sender.send(&again).await?;
        }
    }
}

fn arrival(settings: &Settings, epoch: u64, frame: Frame, weight: Option<Arc<Weight>>) -> Arrival<Tag> {
    let group: Option<Arc<str>> =
        frame.header(&settings.group_header).filter(|group| !group.trim().is_empty()).map(Arc::from);
    let redelivered = frame.header("redelivered") == Some("true");
    let not_before = frame.header(NOT_BEFORE_HEADER).and_then(|millis| millis.parse().ok()).and_then(instant);
    Arrival {
        part: 0,
        epoch,
        fingerprint: fingerprint(frame.header("message-id"), group.as_deref(), &frame.body),
        // After a restart the broker does not know.
        perhaps_again: true,
        earlier: u32::from(redelivered),
        group,
        not_before,
        tag: Tag {
            ack: frame.header("ack").unwrap_or_default().into(),
            headers: frame.headers.into(),
            _weight: weight,
        },
        text: frame.body.into(),
    }
}
