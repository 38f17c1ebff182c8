//! Every delivery that the router takes is settled at its source exactly once, whatever happens in between.
//!
//! The intake gets a `Held` for each delivery from the `Ledger` of its source and puts it into the pool; whoever is done with the message
//! says what is to become of it. A `Held` that is dropped without a word (a panic, a pool that is torn down) gives the delivery back.
//!
//! # The life of an entry
//!
//! An entry is made when a delivery is taken and goes when its settlement is durable, not before. So a delivery that the source hands out
//! again meanwhile (a lease that ran out, a settlement that is still on its way) is recognised: the copy is swallowed, and its newer receipt
//! takes the place of the older one. A settlement is sent with the newest receipt, and again if that has changed while it was on its way.
//!
//! # A group that goes back
//!
//! Giving back takes time, and until the source knows, it may hand out the next message of the same group. Such a message must not be taken, or
//! it would overtake. So the ledger remembers the groups that have something on its way back, and the intake gives those back, too.
//!
//! A claim that is under way may have picked such a message before the source knew, and come back after it did. So a claim begins only when nothing is
//! on its way back (`Ledger::begin_claim`), and what has gone back since then is remembered until the next one begins.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::source::{Delivery, DeliveryId, Disposal, Receipt, Settled, Source, SourceError};

/// As many settlements travel together. The embedded queue commits them as one; other sources have limits of their own and cut them up.
const TOGETHER: usize = 1_024;

/// How long after a source failed it is tried again, at first and at the longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// What is held of one source.
pub(crate) struct Ledger {
    source: Arc<dyn Source>,
    entries: Mutex<Entries>,
    /// The queue has no bound of its own: nothing is in it that does not have an entry, and entries are bounded by the pools.
    queue: mpsc::UnboundedSender<Settlement>,
    /// Told whenever the last entry goes.
    empty: Notify,
    /// Told whenever nothing is on its way back any more.
    returned: Notify,
    /// Settlements that came too late.
    stale: AtomicU64,
    /// Copies that were swallowed.
    copies: AtomicU64,
    /// Deliveries that nobody settled and that went back by themselves.
    forgotten: AtomicU64,
}

#[derive(Default)]
struct Entries {
    receipts: HashMap<DeliveryId, Receipt, foldhash::fast::RandomState>,
    /// How many of a group are on their way back.
    returning: HashMap<Arc<str>, usize>,
    /// Groups of which something has gone back since the claim began that is under way.
    gone_back: HashSet<Arc<str>>,
}

impl Entries {
    fn goes_back(&mut self, group: &Arc<str>) {
        *self.returning.entry(Arc::clone(group)).or_default() += 1;
        self.gone_back.insert(Arc::clone(group));
    }
}

struct Settlement {
    id: DeliveryId,
    group: Option<Arc<str>>,
    disposal: Disposal,
}

impl Ledger {
    /// A ledger, and what must be run for it.
    pub(crate) fn open(source: Arc<dyn Source>) -> (Arc<Ledger>, impl Future<Output = ()> + Send + 'static) {
        let (queue, settlements) = mpsc::unbounded_channel();
        let ledger = Arc::new(Ledger {
            source,
            entries: Mutex::default(),
            queue,
            empty: Notify::new(),
            returned: Notify::new(),
            stale: AtomicU64::new(0),
            copies: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
        });
        (Arc::clone(&ledger), settle_all(Arc::downgrade(&ledger), Arc::clone(&ledger.source), settlements))
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a delivery, unless it is held already: then its receipt is what counts from now on.
    pub(crate) fn take(self: &Arc<Self>, delivery: &Delivery, group: Option<Arc<str>>) -> Option<Held> {
        let newest = delivery.receipt.clone();
        if self.entries().receipts.insert(delivery.id, newest).is_some() {
            self.copies.fetch_add(1, Relaxed);
            return None;
        }
        Some(Held { ledger: Arc::clone(self), id: delivery.id, group, settled: false })
    }

    /// Waits until nothing is on its way back, and from then on remembers what goes.
    pub(crate) async fn begin_claim(&self) {
        loop {
            let returned = self.returned.notified();
            {
                let mut entries = self.entries();
                if entries.returning.is_empty() {
                    entries.gone_back.clear();
                    return;
                }
            }
            returned.await;
        }
    }

    /// Whether something of this group is on its way back, or has gone back since the last claim began.
    pub(crate) fn is_returning(&self, group: &str) -> bool {
        let entries = self.entries();
        entries.returning.contains_key(group) || entries.gone_back.contains(group)
    }

    /// Keeps further messages of a group from being taken until the answer is dropped.
    pub(crate) fn bar(self: &Arc<Self>, group: &Arc<str>) -> Barred {
        self.entries().goes_back(group);
        Barred { ledger: Arc::clone(self), group: Arc::clone(group) }
    }

    fn unbar(&self, group: &Arc<str>) {
        let mut entries = self.entries();
        if let Some(count) = entries.returning.get_mut(group) {
            *count -= 1;
            if *count == 0 {
                entries.returning.remove(group);
            }
        }
        if entries.returning.is_empty() {
            self.returned.notify_waiters();
        }
    }

    /// How many deliveries are held.
    pub(crate) fn len(&self) -> usize {
        self.entries().receipts.len()
    }

    pub(crate) fn counts(&self) -> LedgerCounts {
        LedgerCounts {
            held: self.len(),
            stale_settlements: self.stale.load(Relaxed),
            swallowed_copies: self.copies.load(Relaxed),
            forgotten: self.forgotten.load(Relaxed),
        }
    }

    /// Renews all leases. The answer is how many had run out.
    pub(crate) async fn renew(&self, lease: Duration) -> Result<usize, SourceError> {
        let receipts: Vec<Receipt> = self.entries().receipts.values().cloned().collect();
        let mut lost = 0;
        for some in receipts.chunks(TOGETHER) {
            let answers = self.source.extend(some.to_vec(), lease).await?;
            lost += answers.iter().filter(|answer| **answer == Settled::Stale).count();
        }
        Ok(lost)
    }

    /// Waits until everything is settled. False if the time ran out first.
    pub(crate) async fn wait_empty(&self, deadline: Instant) -> bool {
        loop {
            let emptied = self.empty.notified();
            if self.len() == 0 {
                return true;
            }
            if tokio::time::timeout_at(deadline, emptied).await.is_err() {
                return self.len() == 0;
            }
        }
    }

    /// Takes the newest receipts of settlements that are about to be sent.
    fn receipts(&self, settlements: &[Settlement]) -> Vec<Option<Receipt>> {
        let entries = self.entries();
        settlements.iter().map(|settlement| entries.receipts.get(&settlement.id).cloned()).collect()
    }

    /// Notes an answer. The settlement comes back if it has to be sent once more.
    fn answered(&self, settlement: Settlement, sent: &Receipt, answer: Settled) -> Option<Settlement> {
        let mut entries = self.entries();
        if answer == Settled::Stale {
            let newer = entries.receipts.get(&settlement.id).is_some_and(|receipt| receipt != sent);
            if newer {
                return Some(settlement);
            }
            self.stale.fetch_add(1, Relaxed);
        }
        entries.receipts.remove(&settlement.id);
        let emptied = entries.receipts.is_empty();
        drop(entries);
        if let (Disposal::GiveBack { .. }, Some(group)) = (&settlement.disposal, &settlement.group) {
            self.unbar(group);
        }
        if emptied {
            self.empty.notify_waiters();
        }
        None
    }
}

/// What a ledger counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Deliveries that are held now.
    pub held: usize,
    /// Settlements that came too late: the message had been handed out again.
    pub stale_settlements: u64,
    /// Deliveries that came again while they were held.
    pub swallowed_copies: u64,
    /// Deliveries that nobody settled and that went back by themselves.
    pub forgotten: u64,
}

/// A group of which nothing is taken while this lives.
pub(crate) struct Barred {
    ledger: Arc<Ledger>,
    group: Arc<str>,
}

impl Drop for Barred {
    fn drop(&mut self) {
        self.ledger.unbar(&self.group);
    }
}

/// A delivery that must be settled.
#[must_use]
pub(crate) struct Held {
    ledger: Arc<Ledger>,
    id: DeliveryId,
    group: Option<Arc<str>>,
    settled: bool,
}

impl Held {
    /// Says what is to become of it. The source hears of it soon.
    pub(crate) fn settle(mut self, disposal: Disposal) {
        self.send(disposal);
    }

    /// The ledger that it is in.
    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    fn send(&mut self, disposal: Disposal) {
        self.settled = true;
        let group = self.group.take();
        if let (Disposal::GiveBack { .. }, Some(group)) = (&disposal, &group) {
            self.ledger.entries().goes_back(group);
        }
        // Nobody listens only when the router is gone; then the lease will run out.
        let _ = self.ledger.queue.send(Settlement { id: self.id, group, disposal });
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.settled {
            self.ledger.forgotten.fetch_add(1, Relaxed);
            self.send(Disposal::GiveBack { delay: Duration::ZERO });
        }
    }
}

/// Sends settlements to the source, many at a time, until nobody can make any more.
async fn settle_all(
    ledger: std::sync::Weak<Ledger>,
    source: Arc<dyn Source>,
    mut queue: mpsc::UnboundedReceiver<Settlement>,
) {
    let mut batch = Vec::new();
    let mut pause = RETRY.0;
    loop {
        let room = TOGETHER - batch.len();
        if batch.is_empty() {
            if queue.recv_many(&mut batch, room).await == 0 {
                return;
            }
        } else {
            while batch.len() < TOGETHER
                && let Ok(more) = queue.try_recv()
            {
                batch.push(more);
            }
        }
        let Some(ledger) = ledger.upgrade() else { return };
        match send(&ledger, &*source, std::mem::take(&mut batch)).await {
            Ok(again) => {
                batch = again;
                pause = RETRY.0;
            }
            Err((_, SourceError::Closed)) => return,
            Err((unsent, _)) => {
                batch = unsent;
                drop(ledger);
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY.1);
            }
        }
    }
}

/// Sends one batch. What has to be sent again comes back.
async fn send(
    ledger: &Ledger,
    source: &dyn Source,
    settlements: Vec<Settlement>,
) -> Result<Vec<Settlement>, (Vec<Settlement>, SourceError)> {
    let receipts = ledger.receipts(&settlements);
    let (settlements, receipts): (Vec<_>, Vec<_>) =
        settlements.into_iter().zip(receipts).filter_map(|(one, receipt)| Some((one, receipt?))).unzip();
    let question = settlements.iter().zip(&receipts);
    let question = question.map(|(one, receipt)| (receipt.clone(), one.disposal.clone())).collect();
    match source.settle(question).await {
        Ok(answers) => {
            let all = settlements.into_iter().zip(&receipts).zip(answers);
            Ok(all.filter_map(|((one, sent), answer)| ledger.answered(one, sent, answer)).collect())
        }
        Err(error) => Err((settlements, error)),
    }
}
