//! The source: receives messages, remembers what it has handed out, and settles it.
//!
//! `calls.rs` does the asking; the router claims and settles. What is remembered of a delivery is what SQS does not take from a receipt: the text and the group,
//! which a dead letter is made of, and until when the lease is good by our own clock.
//!
//! # Receives outlive claims
//!
//! A receive that is under way cannot be taken back: SQS may have handed out the messages already, and they, and their groups, would be out of sight for a whole
//! lease. So a receive is a task of its own. A claim waits for it; if the claim ends before, or is dropped, the next one finds what the task has brought. So an idle queue is asked once in `poll`,
//! however long claims wait; only a claim that would not wait for a second asks what is there now. When the source is closed, what nobody has claimed goes back at once.
//!
//! # Receipts that are too old
//!
//! A receipt whose lease is over by our clock is stale, and SQS is not even asked: a standard queue would say yes and do nothing, and worse, a
//! server that is careless would delete the message under somebody else's hands. A receipt that we do not remember is stale as well.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_sdk_sqs::types::{MessageAttributeValue, QueueAttributeName};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::calls::{CALL_BYTES_MAX, Calls, Fetched, Letter, Sent, TOGETHER, lease_end};
use crate::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants};

/// The unit in which SQS waits. Whoever has no more time than that asks what is there now.
const SHORT: Duration = Duration::from_secs(1);

/// Between receives that do not wait.
const SHORT_PAUSE: Duration = Duration::from_millis(200);

/// How long a claim that asks what is there now waits beyond its time for the answer.
const GRACE: Duration = Duration::from_millis(500);

/// A source of SQS.
pub struct SqsSource {
    inner: Arc<Inner>,
    pending: tokio::sync::Mutex<Pending>,
}

/// What one queue needs, for claims and for receives that outlive them.
pub(super) struct Inner {
    pub(super) name: Arc<str>,
    pub(super) calls: Calls,
    pub(super) url: String,
    pub(super) fifo: bool,
    pub(super) dead_letters: Place,
    pub(super) quarantine: Place,
    /// The longest wait of one receive.
    pub(super) poll: Duration,
    /// Receives at a time while the queue has much.
    pub(super) receivers: usize,
    pub(super) held: Mutex<HashMap<Arc<str>, Held>>,
    pub(super) closed: AtomicBool,
}

/// A queue for what cannot be delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) url: String,
    pub(super) fifo: bool,
}

/// What has been received and is not handed out yet.
#[derive(Default)]
struct Pending {
    receiving: Option<JoinHandle<Result<Vec<Ready>, SourceError>>>,
    ready: VecDeque<Ready>,
}

struct Ready {
    delivery: Delivery,
    /// When it came, or was last renewed.
    since: Instant,
}

/// What is remembered of a delivery.
pub(super) struct Held {
    message_id: String,
    group: Option<Arc<str>>,
    text: Arc<[u8]>,
    attributes: HashMap<String, MessageAttributeValue>,
    /// The lease is taken for over then.
    until: Instant,
    /// A copy of it is among the dead letters, or in quarantine: only the message has to go.
    copied: bool,
    /// SQS has answered already, in a question that failed as a whole.
    answer: Option<Settled>,
}

impl fmt::Debug for SqsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsSource")
            .field("name", &self.inner.name)
            .field("url", &self.inner.url)
            .finish_non_exhaustive()
    }
}

impl SqsSource {
    pub(super) fn new(inner: Inner) -> Self {
        SqsSource { inner: Arc::new(inner), pending: tokio::sync::Mutex::default() }
    }

    async fn claim_when_there_is_something(&self, wants: Wants) -> Result<Vec<Delivery>, SourceError> {
        let deadline = Instant::now() + wants.wait;
        let until = if wants.wait < SHORT { deadline + GRACE } else { deadline };
        let Ok(mut pending) = timeout_at(deadline, self.pending.lock()).await else { return Ok(Vec::new()) };
        self.inner.forget_what_is_over();
        loop {
            if self.inner.closed.load(SeqCst) {
                return Err(SourceError::Closed);
            }
            self.inner.refresh(&mut pending.ready, wants.lease).await?;
            if !pending.ready.is_empty() {
                let count = pending.ready.len().min(wants.most);
                return Ok(pending.ready.drain(..count).map(|ready| ready.delivery).collect());
            }
            if pending.receiving.is_none() {
                if deadline <= Instant::now() || wants.most == 0 {
                    return Ok(Vec::new());
                }
                pending.receiving = Some(tokio::spawn(Arc::clone(&self.inner).receive(wants)));
            }
            let Some(receiving) = &mut pending.receiving else { continue };
            let Ok(received) = timeout_at(until, receiving).await else { return Ok(Vec::new()) };
            pending.receiving = None;
            let received = received.map_err(|error| SourceError::Unavailable(error.to_string()))??;
            pending.ready.extend(received);
        }
    }
}

impl Source for SqsSource {
    fn name(&self) -> &str {
        &self.inner.name
    }

    fn kind(&self) -> &'static str {
        "sqs"
    }

    /// A standard queue has an order of nothing.
    fn is_numbered(&self) -> bool {
        self.inner.fifo
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        self.claim_when_there_is_something(wants).boxed()
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
        async move { self.inner.extend(&receipts, lease).await }.boxed()
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        self.inner.depth().boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            self.inner.closed.store(true, SeqCst);
            let mut pending = self.pending.lock().await;
            let unclaimed: Vec<_> =
                pending.ready.drain(..).map(|ready| ready.delivery.receipt.text()).collect();
            self.inner.let_go(unclaimed).await;
        }
        .boxed()
    }
}

impl Drop for SqsSource {
    /// A receive that is under way looks at this when it comes back.
    fn drop(&mut self) {
        self.inner.closed.store(true, SeqCst);
    }
}

/// Receiving.
impl Inner {
    fn held(&self) -> MutexGuard<'_, HashMap<Arc<str>, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_what_is_over(&self) {
        let now = Instant::now();
        self.held().retain(|_, held| held.until > now);
    }

    /// One receive that waits, and as long as they come in full, more that do not. SQS locks a group from the first of its messages on, so two receives at a time
    /// never bring messages of one group.
    async fn receive(self: Arc<Self>, wants: Wants) -> Result<Vec<Ready>, SourceError> {
        let wait = if wants.wait < SHORT { Duration::ZERO } else { self.poll };
        let mut received = self.receive_once(wants.most.min(TOGETHER), wait, wants.lease).await?;
        if received.is_empty() && wait.is_zero() {
            sleep(SHORT_PAUSE.min(wants.wait)).await;
        }
        let mut is_full = received.len() == TOGETHER;
        while is_full && received.len() < wants.most && !self.closed.load(SeqCst) {
            let missing = (wants.most - received.len()).div_ceil(TOGETHER).min(self.receivers);
            let sizes = (0..missing).map(|n| (wants.most - received.len() - n * TOGETHER).min(TOGETHER));
            let more: Vec<_> =
                sizes.map(|most| self.receive_once(most, Duration::ZERO, wants.lease)).collect();
            for some in futures_util::future::join_all(more).await {
                // What has been received must not be lost for one that failed.
                let some = some.unwrap_or_default();
                is_full &= some.len() == TOGETHER;
                received.extend(some);
            }
        }
        if self.closed.load(SeqCst) {
            self.let_go(received.into_iter().map(|ready| ready.delivery.receipt.text()).collect()).await;
            return Err(SourceError::Closed);
        }
        Ok(received)
    }

    async fn receive_once(
        &self,
        most: usize,
        wait: Duration,
        lease: Duration,
    ) -> Result<Vec<Ready>, SourceError> {
        let fetched = self.calls.receive(&self.url, most, wait, lease, self.fifo).await?;
        let (since, until) = (Instant::now(), lease_end(lease));
        let mut held = self.held();
        Ok(fetched
            .into_iter()
            .map(|fetched| Ready { delivery: remember(&mut held, fetched, until), since })
            .collect())
    }

    /// Renews the leases of what has waited here for long, and forgets what could not be renewed, together with what is behind it in its group.
    async fn refresh(&self, ready: &mut VecDeque<Ready>, lease: Duration) -> Result<(), SourceError> {
        let is_old = |ready: &Ready| ready.since.elapsed() > lease / 4;
        if !ready.iter().any(is_old) {
            return Ok(());
        }
        let receipts: Vec<_> = ready.iter().map(|ready| ready.delivery.receipt.clone()).collect();
        let since = Instant::now();
        let answers = self.extend(&receipts, lease).await?;
        let mut lost: HashSet<Arc<str>> = HashSet::new();
        let renewed = ready.drain(..).zip(answers).filter_map(|(mut ready, answer)| {
            let behind = ready.delivery.group.as_ref().is_some_and(|group| lost.contains(group));
            if answer == Settled::Stale || behind {
                lost.extend(ready.delivery.group.clone());
                return None;
            }
            ready.since = since;
            Some(ready)
        });
        let renewed: VecDeque<_> = renewed.collect();
        *ready = renewed;
        Ok(())
    }

    /// Makes messages visible that nobody has claimed. When that fails, their leases run out.
    async fn let_go(&self, receipts: Vec<Arc<str>>) {
        let changes: Vec<_> = receipts.into_iter().map(|receipt| (receipt, Duration::ZERO)).collect();
        self.calls.hide(&self.url, &changes).await;
        let mut held = self.held();
        changes.iter().for_each(|(receipt, _)| drop(held.remove(receipt)));
    }
}

fn remember(held: &mut HashMap<Arc<str>, Held>, fetched: Fetched, until: Instant) -> Delivery {
    let Fetched { id, receipt, message_id, group, text, attempt, attributes } = fetched;
    let (ours, words) = (group.clone(), Arc::clone(&text));
    held.insert(
        Arc::clone(&receipt),
        Held { message_id, group: ours, text: words, attributes, until, copied: false, answer: None },
    );
    Delivery { id, receipt: Receipt::Text(receipt), group, text, attempt, sequence: id }
}

/// Settling.
impl Inner {
    async fn settle(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        if self.closed.load(SeqCst) {
            return Err(SourceError::Closed);
        }
        let mut taken = Taken { inner: self, receipts: Vec::new(), answers: vec![None; disposals.len()] };
        taken.take(&disposals);
        self.keep_letters(&disposals, &mut taken).await;
        let mut deletes = Vec::new();
        let mut changes = Vec::new();
        for (place, receipt) in taken.open() {
            match &disposals[place].1 {
                Disposal::GiveBack { delay } => changes.push((place, (receipt, *delay))),
                _ => deletes.push((place, receipt)),
            }
        }
        let (delete_places, deletes): (Vec<_>, Vec<_>) = deletes.into_iter().unzip();
        let (change_places, changes): (Vec<_>, Vec<_>) = changes.into_iter().unzip();
        let (deleted, changed) =
            tokio::join!(self.calls.delete(&self.url, &deletes), self.calls.hide(&self.url, &changes));
        for (place, answer) in delete_places.into_iter().zip(deleted) {
            taken.answers[place] = Some(answer);
        }
        for (place, answer) in change_places.into_iter().zip(changed) {
            taken.answers[place] = Some(answer);
        }
        taken.finish()
    }

    /// Sends copies of dead letters, and of what cannot be read, to where those are kept. A message is deleted only when its copy is there. In order, one call after
    /// another: they are few.
    async fn keep_letters(&self, disposals: &[(Receipt, Disposal)], taken: &mut Taken<'_>) {
        for (place, receipt) in taken.open() {
            let (target, reason) = match &disposals[place].1 {
                Disposal::DeadLetter { reason } => (&self.dead_letters, reason),
                Disposal::Quarantine { reason } => (&self.quarantine, reason),
                Disposal::Done | Disposal::GiveBack { .. } => continue,
            };
            let Some(letter) = taken.letter(&receipt, target.fifo) else { continue };
            let letter = letter.because(reason);
            let failure = match self.calls.send(&target.url, &[letter]).await {
                Ok(sent) => match sent.into_iter().next() {
                    Some(Sent::Taken { .. }) => {
                        taken.note_copy(place);
                        continue;
                    }
                    Some(Sent::Refused(reason)) => SourceError::Broken(format!("{}: {reason}", target.url)),
                    Some(Sent::Failed(reason)) => {
                        SourceError::Unavailable(format!("{}: {reason}", target.url))
                    }
                    None => SourceError::Unavailable(format!("{}: SQS gave no answer", target.url)),
                },
                Err(error) => error,
            };
            taken.answers[place] = Some(Err(failure));
        }
    }

    async fn extend(&self, receipts: &[Receipt], lease: Duration) -> Result<Vec<Settled>, SourceError> {
        if self.closed.load(SeqCst) {
            return Err(SourceError::Closed);
        }
        let lease = lease.max(Duration::from_secs(1));
        let now = Instant::now();
        let good: Vec<usize> = {
            let held = self.held();
            let is_good = |place: &usize| {
                held.get(&receipts[*place].text())
                    .is_some_and(|held| held.until > now && held.answer.is_none())
            };
            (0..receipts.len()).filter(is_good).collect()
        };
        let changes: Vec<_> = good.iter().map(|place| (receipts[*place].text(), lease)).collect();
        let answers = self.calls.hide(&self.url, &changes).await;
        let until = lease_end(lease);
        let mut extended = vec![Settled::Stale; receipts.len()];
        let mut failure = None;
        let mut held = self.held();
        for ((place, (receipt, _)), answer) in good.into_iter().zip(&changes).zip(answers) {
            match answer {
                Ok(answer) => extended[place] = answer,
                Err(error) => failure = Some(error),
            }
            if extended[place] == Settled::Settled
                && let Some(held) = held.get_mut(receipt)
            {
                held.until = until;
            }
        }
        failure.map_or(Ok(extended), Err)
    }

    async fn depth(&self) -> Result<Depth, SourceError> {
        let here = self.calls.attributes(&self.url).await?;
        let count = |attributes: &super::calls::Attributes, name| {
            attributes.get(&name).and_then(|count| count.parse().ok()).unwrap_or(0_u64)
        };
        let mut depth = Depth {
            waiting: count(&here, QueueAttributeName::ApproximateNumberOfMessages)
                + count(&here, QueueAttributeName::ApproximateNumberOfMessagesDelayed),
            leased: count(&here, QueueAttributeName::ApproximateNumberOfMessagesNotVisible),
            ..Depth::default()
        };
        let dead = self.calls.attributes(&self.dead_letters.url).await?;
        depth.dead = count(&dead, QueueAttributeName::ApproximateNumberOfMessages);
        if self.quarantine != self.dead_letters {
            let kept = self.calls.attributes(&self.quarantine.url).await?;
            depth.quarantined = count(&kept, QueueAttributeName::ApproximateNumberOfMessages);
        }
        Ok(depth)
    }
}

/// Deliveries that are being settled: out of the table, so that nobody settles them twice. Whatever is not answered goes back into it, also when the settlement
/// is dropped.
struct Taken<'a> {
    inner: &'a Inner,
    receipts: Vec<(Arc<str>, Option<Held>)>,
    answers: Vec<Option<Result<Settled, SourceError>>>,
}

impl Taken<'_> {
    fn take(&mut self, disposals: &[(Receipt, Disposal)]) {
        let now = Instant::now();
        let mut table = self.inner.held();
        for (place, (receipt, _)) in disposals.iter().enumerate() {
            let receipt = receipt.text();
            let held = table.remove(&receipt).filter(|held| held.until > now);
            self.answers[place] = match &held {
                None => Some(Ok(Settled::Stale)),
                Some(held) => held.answer.map(Ok),
            };
            self.receipts.push((receipt, held));
        }
    }

    /// Those without an answer.
    fn open(&self) -> Vec<(usize, Arc<str>)> {
        let all = self.receipts.iter().enumerate().zip(&self.answers);
        all.filter(|(_, answer)| answer.is_none())
            .map(|((place, (receipt, _)), _)| (place, Arc::clone(receipt)))
            .collect()
    }

    fn note_copy(&mut self, place: usize) {
        if let (_, Some(held)) = &mut self.receipts[place] {
            held.copied = true;
        }
    }

    /// A copy of a message for another queue, unless it has been made. Copies of a message have one deduplication id.
    fn letter(&self, receipt: &Arc<str>, fifo: bool) -> Option<Letter> {
        let (_, held) = self.receipts.iter().find(|(it, held)| it == receipt && held.is_some())?;
        let held = held.as_ref().filter(|held| !held.copied)?;
        let group = held.group.as_deref().unwrap_or(&held.message_id);
        let letter = Letter {
            text: String::from_utf8_lossy(&held.text).into_owned(),
            group: fifo.then(|| group.to_owned()),
            deduplication_id: fifo.then(|| held.message_id.clone()),
            attributes: held.attributes.clone(),
        };
        Some(if letter.bytes() > CALL_BYTES_MAX {
            Letter { attributes: HashMap::new(), ..letter }
        } else {
            letter
        })
    }

    /// The answers, if there are all of them. Otherwise those that there are, are remembered for when the question is asked again.
    fn finish(mut self) -> Result<Vec<Settled>, SourceError> {
        let answers = self.answers.iter().map(|answer| match answer {
            Some(answer) => answer.clone(),
            None => Err(SourceError::Unavailable("SQS gave no answer".to_owned())),
        });
        let answers: Result<Vec<_>, _> = answers.collect();
        if answers.is_ok() {
            self.receipts.clear();
        }
        answers
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut table = self.inner.held();
        for ((receipt, held), answer) in self.receipts.drain(..).zip(&self.answers) {
            if let Some(held) = held {
                let answer = answer.as_ref().and_then(|answer| answer.as_ref().ok()).copied();
                table.insert(receipt, Held { answer, ..held });
            }
        }
    }
}
