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
//!
//! # Letters hold nobody up
//!
//! What is to be kept elsewhere, among the dead letters or in quarantine, is copied before it is deleted. That takes its time, so everything else that is settled with it is settled at once, and
//! a letter stays in the table until its copy is made: its lease is renewed meanwhile, and whether that is still good is looked at afterwards.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_sdk_sqs::types::{MessageAttributeValue, QueueAttributeName};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::calls::{CALL_BYTES_MAX, Calls, Fetched, Letter, Sent, TOGETHER, fingerprint, lease_end};
use super::writer::in_calls;
use crate::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants};

/// The unit in which SQS waits. Whoever has no more time than that asks what is there now.
const SHORT: Duration = Duration::from_secs(1);

/// Between receives that do not wait.
const SHORT_PAUSE: Duration = Duration::from_millis(200);

/// How long a claim that asks what is there now waits beyond its time for the answer.
const GRACE: Duration = Duration::from_millis(500);

/// Calls that carry letters under way at a time, at most.
const LINES_MAX: usize = 8;

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
            for some in join_all(more).await {
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

/// A settlement, with its place in the question.
type Asked<'a> = (usize, &'a (Receipt, Disposal));

/// Settling.
impl Inner {
    async fn settle(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        if self.closed.load(SeqCst) {
            return Err(SourceError::Closed);
        }
        let is_letter = |(_, (_, disposal)): &Asked<'_>| self.place_of(disposal).is_some();
        let (letters, others): (Vec<_>, Vec<_>) = disposals.iter().enumerate().partition(is_letter);
        let (others, (letters, failure)) = tokio::join!(self.tell(others), self.tell_letters(letters));
        finish(disposals.len(), [others, letters], failure)
    }

    /// Where a message is kept, and why, if it is.
    fn place_of<'a>(&'a self, disposal: &'a Disposal) -> Option<(&'a Place, &'a str)> {
        match disposal {
            Disposal::DeadLetter { reason } => Some((&self.dead_letters, reason)),
            Disposal::Quarantine { reason } => Some((&self.quarantine, reason)),
            Disposal::Done | Disposal::GiveBack { .. } => None,
        }
    }

    /// Copies letters, and deletes those whose copies are there.
    async fn tell_letters(&self, mut asked: Vec<Asked<'_>>) -> (Taken<'_>, Option<SourceError>) {
        let failure = self.keep(&asked).await;
        {
            let table = self.held();
            let has_copy = |held: &Held| held.copied || held.answer.is_some();
            asked.retain(|(_, (receipt, _))| table.get(&receipt.text()).is_none_or(has_copy));
        }
        (self.tell(asked).await, failure)
    }

    /// Takes deliveries out of the table, and deletes or hides their messages.
    async fn tell(&self, asked: Vec<Asked<'_>>) -> Taken<'_> {
        let mut taken = Taken::of(self, &asked);
        let mut deletes = Vec::new();
        let mut changes = Vec::new();
        let open = taken.rows.iter().enumerate().filter(|(_, row)| row.answer.is_none());
        for (at, row) in open {
            let receipt = Arc::clone(&row.receipt);
            match &asked[at].1.1 {
                Disposal::GiveBack { delay } => changes.push((at, (receipt, *delay))),
                _ => deletes.push((at, receipt)),
            }
        }
        let (deleted_at, deletes): (Vec<_>, Vec<_>) = deletes.into_iter().unzip();
        let (changed_at, changes): (Vec<_>, Vec<_>) = changes.into_iter().unzip();
        let (deleted, changed) =
            tokio::join!(self.calls.delete(&self.url, &deletes), self.calls.hide(&self.url, &changes));
        for (at, answer) in deleted_at.into_iter().chain(changed_at).zip(deleted.into_iter().chain(changed)) {
            taken.rows[at].answer = Some(answer);
        }
        taken
    }

    /// Sends copies of letters to where they are kept, in several lines at a time. Those of a group are in one line, so that they are kept in their order.
    async fn keep(&self, asked: &[Asked<'_>]) -> Option<SourceError> {
        let letters = self.letters(asked);
        let lines_max = letters.len().div_ceil(TOGETHER).clamp(1, LINES_MAX) as u64;
        let mut lines: BTreeMap<(&str, u64), Vec<(usize, Letter)>> = BTreeMap::new();
        for (at, url, letter) in letters {
            let line = letter.group.as_deref().map_or(at as u64, fingerprint) % lines_max;
            lines.entry((url, line)).or_default().push((at, letter));
        }
        let kept = lines.into_iter().map(|((url, _), line)| self.keep_line(url, line, asked));
        let failures = join_all(kept).await.into_iter().flatten();
        failures.max_by_key(|failure| matches!(failure, SourceError::Unavailable(_)))
    }

    /// The letters that have to be sent yet, and where to.
    fn letters<'a>(&'a self, asked: &[Asked<'a>]) -> Vec<(usize, &'a str, Letter)> {
        let (table, now) = (self.held(), Instant::now());
        let letter = |(at, (_, (receipt, disposal))): (usize, &Asked<'a>)| {
            let (place, reason) = self.place_of(disposal)?;
            let held = table.get(&receipt.text()).filter(|held| held.until > now)?;
            let has_to = !held.copied && held.answer.is_none();
            has_to.then(|| (at, &*place.url, held.letter(place.fifo).because(reason)))
        };
        asked.iter().enumerate().filter_map(letter).collect()
    }

    /// Sends letters, one call after another, until SQS cannot be had.
    async fn keep_line(
        &self,
        url: &str,
        line: Vec<(usize, Letter)>,
        asked: &[Asked<'_>],
    ) -> Option<SourceError> {
        let mut failure = None;
        for (places, letters) in in_calls(line) {
            let sent = match self.calls.send(url, &letters).await {
                Ok(sent) => sent,
                Err(error) => {
                    failure = Some(error);
                    Vec::new()
                }
            };
            let mut held = self.held();
            for (at, sent) in places.into_iter().zip(sent) {
                match sent {
                    Sent::Taken { .. } => {
                        if let Some(held) = held.get_mut(&asked[at].1.0.text()) {
                            held.copied = true;
                        }
                    }
                    Sent::Refused(reason) => {
                        failure = failure.or(Some(SourceError::Broken(format!("{url}: {reason}"))));
                    }
                    Sent::Failed(reason) => {
                        failure = Some(SourceError::Unavailable(format!("{url}: {reason}")));
                    }
                }
            }
            if matches!(failure, Some(SourceError::Unavailable(_))) {
                break;
            }
        }
        failure
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

impl Held {
    /// A copy for another queue. Copies of a message have one deduplication id.
    fn letter(&self, fifo: bool) -> Letter {
        let group = self.group.as_deref().unwrap_or(&self.message_id);
        let letter = Letter {
            text: String::from_utf8_lossy(&self.text).into_owned(),
            group: fifo.then(|| group.to_owned()),
            deduplication_id: fifo.then(|| self.message_id.clone()),
            attributes: self.attributes.clone(),
        };
        if letter.bytes() > CALL_BYTES_MAX { Letter { attributes: HashMap::new(), ..letter } } else { letter }
    }
}

/// Deliveries that are being settled: out of the table, so that nobody settles them twice. Whatever is not answered goes back into it, also when the settlement
/// is dropped.
struct Taken<'a> {
    inner: &'a Inner,
    rows: Vec<Row>,
}

struct Row {
    /// In the question.
    place: usize,
    receipt: Arc<str>,
    /// Nothing if the receipt is stale.
    held: Option<Held>,
    answer: Option<Result<Settled, SourceError>>,
}

impl<'a> Taken<'a> {
    fn of(inner: &'a Inner, asked: &[Asked<'_>]) -> Self {
        let now = Instant::now();
        let mut table = inner.held();
        let take = |(place, (receipt, _)): &Asked<'_>| {
            let receipt = receipt.text();
            let held = table.remove(&receipt).filter(|held| held.until > now);
            let answer = held.as_ref().map_or(Some(Settled::Stale), |held| held.answer).map(Ok);
            Row { place: *place, receipt, held, answer }
        };
        Taken { inner, rows: asked.iter().map(take).collect() }
    }
}

/// The answers, if there are all of them. Otherwise those that there are, are remembered for when the question is asked again.
fn finish(
    count: usize,
    all: [Taken<'_>; 2],
    mut failure: Option<SourceError>,
) -> Result<Vec<Settled>, SourceError> {
    let mut answers = vec![Settled::Stale; count];
    for row in all.iter().flat_map(|taken| &taken.rows) {
        match &row.answer {
            Some(Ok(answer)) => answers[row.place] = *answer,
            Some(Err(error)) => failure = failure.or_else(|| Some(error.clone())),
            None => {
                failure = failure.or_else(|| Some(SourceError::Unavailable("SQS gave no answer".to_owned())));
            }
        }
    }
    match failure {
        Some(failure) => Err(failure),
        None => {
            all.into_iter().for_each(|mut taken| taken.rows.clear());
            Ok(answers)
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut table = self.inner.held();
        for Row { receipt, held, answer, .. } in self.rows.drain(..) {
            if let Some(held) = held {
                table.insert(receipt, Held { answer: answer.and_then(Result::ok), ..held });
            }
        }
    }
}
