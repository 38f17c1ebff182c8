//! Every delivery that the router takes is settled at its source exactly once, whatever happens in between.
//!
//! The intake gets a `Held` for each delivery from the `Ledger` of its source and puts it into the pool; whoever is done with the message
//! says what is to become of it. A `Held` that is dropped without a word (a panic, a pool that is torn down) gives the delivery back.
//!
//! # The life of an entry
//!
//! An entry is made when a delivery is taken and goes when its settlement is durable, not before (or when it is settled and the source has closed for good). So a delivery that the source hands out
//! again meanwhile (a lease that ran out, a settlement that is still on its way) is recognised: the copy is swallowed, and its newer receipt
//! takes the place of the older one. A settlement is sent with the newest receipt, and again if that has changed while it was on its way and
//! the answer does not speak for it: what the source found stale, and what it took back and has handed out again before we heard of it.
//! A message that was done although its receipt had become stale is remembered for a while: when it comes again it is settled, not delivered.
//!
//! A message is known by its number and a fingerprint of what it says ([`Identity`]). The number alone would do as long as a source never gives it twice, but a server that was killed
//! may have forgotten how far it had counted, and a stream or a topic that was deleted and made again counts from the start. What comes under the number of another message is a message of its
//! own: taken for a copy, it would be settled unseen.
//!
//! # A group that goes back
//!
//! Giving back takes time, and until the source knows, it may hand out the next message of the same group; so may a claim that was under way
//! when the source was told, and that answers afterwards. Such a message must not be taken, or it would overtake. So the ledger remembers
//! the groups of which something has gone back, and the intake gives those messages back, too, until either
//!
//! 1. a claim begins after the source has confirmed all of them: what that one brings is in order; or
//! 2. the first of those that went back comes again: whatever was handed out before is known to be behind it.
//!
//! Without the second line a claim that waits for long would hand a message out again and again, only to see it come back.
//!
//! # When a source fails
//!
//! Settlements are tried until the source takes them. A question that fails as a whole is cut into halves, so that one settlement
//! that cannot be written keeps nobody else waiting.

use std::collections::hash_map::Entry as Slot;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::mediator::NO_SEQUENCE;
use crate::source::{Delivery, DeliveryId, Disposal, Receipt, Settled, Source, SourceError};

/// As many settlements travel together. The embedded queue commits them as one; other sources have limits of their own and cut them up.
const TOGETHER: usize = 1_024;

/// While settlements come in such numbers they gather for a while, as long as the source says, because a commit costs it far more than a settlement. Nobody waits for
/// them: the next message of the group is on its way already.
const CURRENT: std::ops::Range<usize> = 8..TOGETHER / 2;

/// So many settlements are worth another batch while one is under way, or any, so long after it was sent: what is under way may be slow.
const WORTH_ANOTHER: (usize, Duration) = (128, Duration::from_millis(1));

/// Timers are as coarse as this.
const TIMER: Duration = Duration::from_millis(1);

/// How long after a source failed it is tried again, at first and at the longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// How many messages are remembered that were done with a stale receipt. One that is forgotten is delivered twice, no more.
const DONE_MAX: usize = 16_384;

/// What is held of one source.
pub(crate) struct Ledger {
    source: Arc<dyn Source>,
    /// Makes the fingerprints. Its seed is its own: nobody can write two messages that have the same one.
    hashing: foldhash::quality::RandomState,
    entries: Mutex<Entries>,
    /// The queue has no bound of its own: nothing is in it that does not have an entry, and entries are bounded by the pools.
    queue: mpsc::UnboundedSender<Settlement>,
    /// Told whenever the last settlement that was on its way has been answered.
    settled: Notify,
    /// The source takes nothing any more.
    closed: AtomicBool,
    /// Settlements that came too late.
    stale: AtomicU64,
    /// Copies that were swallowed.
    copies: AtomicU64,
    /// Deliveries that nobody settled and that went back by themselves.
    forgotten: AtomicU64,
    /// Deliveries that were ever found lost: most routers never look for one.
    lost: AtomicU64,
    /// So many losses of the source have been looked at.
    losses: AtomicU64,
    /// When the ledger was opened.
    opened: Instant,
    /// No lease that counts runs out before, in milliseconds since then: until that time nobody has to look for one. Written under the lock of the
    /// entries.
    good_until: AtomicU64,
}

/// Which message a delivery is of.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Identity {
    id: DeliveryId,
    /// Of its group and its text.
    fingerprint: u64,
}

#[derive(Default)]
struct Entries {
    held: HashMap<Identity, Entry, foldhash::fast::RandomState>,
    /// Groups of which something has gone back.
    returning: HashMap<Arc<str>, Returning>,
    /// Settlements that have not been answered.
    under_way: usize,
    done: Done,
    /// When the claim began whose deliveries are being taken, and how long they are leased.
    claim: Option<(Instant, Duration)>,
    /// How many losses the source had then.
    losses: u64,
}

impl Entries {
    /// How long a delivery is ours that has just come. A claim may wait for long before the source has anything to lease, so its beginning says little;
    /// an answer that was long on its way is allowed for as far as the next renewal, which is due in a third of the lease, is not late for it.
    fn taken_until(&self, now: Instant) -> Instant {
        let Some((began, lease)) = self.claim else { return now };
        after(now, lease - now.saturating_duration_since(began).min(lease / 3))
    }

    /// Notes that a delivery has come. One that is held already has another receipt from now on.
    fn note(&mut self, which: Identity, delivery: &Delivery, until: Instant) -> Noted {
        let (receipt, sequence) = (delivery.receipt.clone(), delivery.sequence);
        match self.held.entry(which) {
            Slot::Occupied(mut held) => {
                let entry = held.get_mut();
                (entry.receipt, entry.lost, entry.until, entry.sequence) = (receipt, false, until, sequence);
                Noted::Copy
            }
            Slot::Vacant(free) => {
                free.insert(Entry { receipt, settling: false, lost: false, until, sequence });
                if self.done.known.contains(&which) { Noted::Done } else { Noted::New }
            }
        }
    }

    /// Whether a message must go back because something before it in its group has, and for how long.
    fn must_return(&mut self, group: &Arc<str>, id: DeliveryId, now: Instant) -> Option<Duration> {
        let returning = self.returning.get(group)?;
        if returning.unconfirmed == 0 && id <= returning.first {
            self.returning.remove(group);
            return None;
        }
        Some(returning.until.saturating_duration_since(now))
    }
}

/// What a delivery is that has come.
enum Noted {
    New,
    /// It was here before.
    Copy,
    /// It was done before.
    Done,
}

/// A delivery that was taken.
pub(crate) struct Taken {
    pub(crate) held: Held,
    /// It must go back because something before it in its group has, and for how long.
    pub(crate) returns: Option<Duration>,
}

/// A lease without an end in sight ends in a year.
fn after(time: Instant, lease: Duration) -> Instant {
    time + lease.min(Duration::from_secs(365 * 24 * 3600))
}

/// One delivery that is held.
struct Entry {
    receipt: Receipt,
    /// Its fate is on its way to the source.
    settling: bool,
    /// The source has said that the receipt is not good any more, and no newer one has come.
    lost: bool,
    /// Without a renewal somebody else may have it from then on, even if the source cannot be asked.
    until: Instant,
    /// That of its newest delivery.
    sequence: u64,
}

/// A group of which something has gone back.
struct Returning {
    /// So many of them the source has not confirmed.
    unconfirmed: usize,
    /// The first of them.
    first: DeliveryId,
    /// When the last of them may come again.
    until: Instant,
}

/// Messages that were done with a stale receipt, the oldest first.
#[derive(Default)]
struct Done {
    known: HashSet<Identity, foldhash::fast::RandomState>,
    order: VecDeque<Identity>,
}

impl Done {
    fn remember(&mut self, which: Identity) {
        if self.known.insert(which) {
            self.order.push_back(which);
        }
        if self.order.len() > DONE_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

struct Settlement {
    which: Identity,
    group: Option<Arc<str>>,
    disposal: Disposal,
}

impl Ledger {
    /// A ledger, and what must be run for it.
    pub(crate) fn open(source: Arc<dyn Source>) -> (Arc<Ledger>, impl Future<Output = ()> + Send + 'static) {
        let (queue, settlements) = mpsc::unbounded_channel();
        let ledger = Arc::new(Ledger {
            source,
            hashing: foldhash::quality::RandomState::default(),
            entries: Mutex::default(),
            queue,
            settled: Notify::new(),
            closed: AtomicBool::new(false),
            stale: AtomicU64::new(0),
            copies: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            opened: Instant::now(),
            good_until: AtomicU64::new(u64::MAX),
        });
        (Arc::clone(&ledger), settle_all(Arc::downgrade(&ledger), Arc::clone(&ledger.source), settlements))
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A claim is about to begin: what it brings of groups whose returns are all confirmed is in order.
    pub(crate) fn begin_claim(&self, lease: Duration) {
        let mut entries = self.entries();
        entries.returning.retain(|_, returning| returning.unconfirmed > 0);
        let now = Instant::now();
        (entries.claim, entries.losses) = (Some((now, lease)), self.source.losses(now));
    }

    fn identify(&self, delivery: &Delivery) -> Identity {
        Identity { id: delivery.id, fingerprint: self.hashing.hash_one((&delivery.group, &delivery.text)) }
    }

    fn millis(&self, time: Instant) -> u64 {
        u64::try_from(time.saturating_duration_since(self.opened).as_millis()).unwrap_or(u64::MAX)
    }

    /// Takes the deliveries of a claim, each with its group, in their order; but none that is held already, or was done before: then its receipt is what counts from
    /// now on. One lock and one look at the clock for all of them.
    pub(crate) fn take_all<'a>(
        self: &Arc<Self>,
        deliveries: impl Iterator<Item = (&'a Delivery, Option<&'a Arc<str>>)>,
    ) -> Vec<Option<Taken>> {
        // Before the lock: texts may be long.
        let deliveries: Vec<_> = deliveries.map(|(one, group)| (self.identify(one), one, group)).collect();
        let now = Instant::now();
        let mut entries = self.entries();
        let until = entries.taken_until(now);
        self.good_until.fetch_min(self.millis(until), Relaxed);
        let mut done = Vec::new();
        let take = |(which, delivery, group): (Identity, &Delivery, Option<&Arc<str>>)| {
            let hold = || Held { ledger: Arc::clone(self), which, group: group.cloned(), settled: false };
            match entries.note(which, delivery, until) {
                Noted::New => {
                    let returns = group.and_then(|group| entries.must_return(group, delivery.id, now));
                    return Some(Taken { held: hold(), returns });
                }
                Noted::Copy => {}
                Noted::Done => done.push(hold()),
            }
            self.copies.fetch_add(1, Relaxed);
            None
        };
        let taken = deliveries.into_iter().map(take).collect();
        let losses = entries.losses;
        if self.source.losses(now) != losses {
            // Some of these may have been among them, and whoever has looked since could not see that: one more look.
            self.losses.store(losses, Release);
        }
        drop(entries);
        done.into_iter().for_each(|held| held.settle(Disposal::Done));
        taken
    }

    /// Takes a single one.
    pub(crate) fn take(self: &Arc<Self>, delivery: &Delivery) -> Option<Held> {
        self.take_all(std::iter::once((delivery, None))).pop().flatten().map(|taken| taken.held)
    }

    /// How many deliveries are held whose fate is open.
    pub(crate) fn unsettled(&self) -> usize {
        self.entries().held.values().filter(|entry| !entry.settling).count()
    }

    /// How many deliveries are held.
    pub(crate) fn len(&self) -> usize {
        self.entries().held.len()
    }

    pub(crate) fn counts(&self) -> LedgerCounts {
        LedgerCounts {
            held: self.len(),
            stale_settlements: self.stale.load(Relaxed),
            swallowed_copies: self.copies.load(Relaxed),
            forgotten: self.forgotten.load(Relaxed),
        }
    }

    /// Renews all leases. The answer is how many had run out, or the first error if some could not be renewed.
    pub(crate) async fn renew(&self, lease: Duration) -> Result<usize, SourceError> {
        let held: Vec<(Identity, Receipt)> =
            self.entries().held.iter().map(|(which, entry)| (*which, entry.receipt.clone())).collect();
        let (mut lost, mut failed) = (0, None);
        for some in held.chunks(TOGETHER) {
            let receipts = some.iter().map(|(_, receipt)| receipt.clone()).collect();
            let asked = Instant::now();
            let answers = match self.source.extend(receipts, lease).await {
                Ok(answers) => answers,
                // Those behind it may be renewed all the same.
                Err(error) => {
                    failed = failed.or(Some(error));
                    continue;
                }
            };
            let mut entries = self.entries();
            for ((which, receipt), answer) in some.iter().zip(answers) {
                // One that is being settled, or has come again meanwhile, is not lost.
                let entry = entries.held.get_mut(which);
                let Some(entry) = entry.filter(|entry| !entry.settling && entry.receipt == *receipt) else {
                    continue;
                };
                if answer == Settled::Stale {
                    lost += usize::from(!entry.lost);
                    entry.lost = true;
                    // Under the lock that guards the entry.
                    self.lost.fetch_add(1, Relaxed);
                } else {
                    entry.until = entry.until.max(after(asked, lease));
                }
            }
        }
        let entries = self.entries();
        let counting = entries.held.values().filter(|entry| !entry.settling && !entry.lost);
        let first = counting.map(|entry| entry.until).min();
        self.good_until.store(first.map_or(u64::MAX, |first| self.millis(first)), Relaxed);
        match failed {
            Some(error) => Err(error),
            None => Ok(lost),
        }
    }

    /// Finds what has become somebody else's since it was last looked at, before its lease is over. Nearly always that is nothing, and costs the look at one number.
    fn look_for_losses(&self, now: Instant) {
        let losses = self.source.losses(now);
        if losses == self.losses.load(Acquire) {
            return;
        }
        let mut entries = self.entries();
        let counting = entries.held.iter().filter(|(_, entry)| !entry.settling && !entry.lost);
        let (all, receipts): (Vec<Identity>, Vec<Receipt>) =
            counting.map(|(which, entry)| (*which, entry.receipt.clone())).unzip();
        let good = self.source.are_good(&receipts, now);
        for (which, _) in all.iter().zip(good).filter(|(_, is_good)| !is_good) {
            entries.held.get_mut(which).expect("just seen").lost = true;
            self.lost.fetch_add(1, Relaxed);
        }
        // Whoever reads this sees what was found. One that was slow may put it back, and costs another look.
        self.losses.store(losses, Release);
    }

    /// Waits until the source has taken every settlement. False if the time ran out first, or the source is closed.
    pub(crate) async fn wait_settled(&self, deadline: Instant) -> bool {
        loop {
            let settled = self.settled.notified();
            if self.entries().under_way == 0 {
                return true;
            }
            // What a closed source has not taken it never will.
            if self.closed.load(Relaxed) || tokio::time::timeout_at(deadline, settled).await.is_err() {
                return self.entries().under_way == 0;
            }
        }
    }

    /// The source takes nothing any more: of what was to be settled nobody will ever hear, so it is not held any longer. It counts as under way for good. To be called when
    /// the queue takes no more: what is settled from then on goes at once.
    fn close(&self) {
        self.closed.store(true, Relaxed);
        self.entries().held.retain(|_, entry| !entry.settling);
        self.settled.notify_waiters();
    }

    /// Takes the newest receipts of settlements that are about to be sent.
    fn receipts(&self, settlements: &[Settlement]) -> Vec<Receipt> {
        let entries = self.entries();
        let receipt = |settlement: &Settlement| {
            let entry = entries.held.get(&settlement.which).expect("an entry lives until it is settled");
            entry.receipt.clone()
        };
        settlements.iter().map(receipt).collect()
    }

    /// Notes answers. What has to be sent once more comes back.
    fn answered(&self, answers: impl Iterator<Item = (Settlement, Receipt, Settled)>) -> Vec<Settlement> {
        let mut entries = self.entries();
        let again =
            answers.filter_map(|(one, sent, answer)| self.note(&mut entries, one, &sent, answer)).collect();
        let is_last = entries.under_way == 0;
        drop(entries);
        if is_last {
            self.settled.notify_waiters();
        }
        again
    }

    fn note(
        &self,
        entries: &mut Entries,
        settlement: Settlement,
        sent: &Receipt,
        answer: Settled,
    ) -> Option<Settlement> {
        let has_come_again = entries.held.get(&settlement.which).is_some_and(|entry| entry.receipt != *sent);
        // What was given back may have been handed out again before its answer came. That copy was swallowed, so it has to go back, too.
        let goes_back = matches!(settlement.disposal, Disposal::GiveBack { .. });
        if has_come_again && (answer == Settled::Stale || goes_back) {
            return Some(settlement);
        }
        if answer == Settled::Stale {
            self.stale.fetch_add(1, Relaxed);
            if settlement.disposal == Disposal::Done {
                entries.done.remember(settlement.which);
            }
        }
        entries.held.remove(&settlement.which);
        if let (Disposal::GiveBack { .. }, Some(group)) = (&settlement.disposal, &settlement.group)
            && let Some(returning) = entries.returning.get_mut(group)
        {
            returning.unconfirmed -= 1;
        }
        entries.under_way -= 1;
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
    /// Deliveries that came again while they were held, or after they were done.
    pub swallowed_copies: u64,
    /// Deliveries that nobody settled and that went back by themselves.
    pub forgotten: u64,
}

/// A delivery that must be settled.
#[must_use]
pub(crate) struct Held {
    ledger: Arc<Ledger>,
    which: Identity,
    group: Option<Arc<str>>,
    settled: bool,
}

impl Held {
    /// Says what is to become of it. The source hears of it soon.
    pub(crate) fn settle(mut self, disposal: Disposal) {
        self.send(disposal);
    }

    /// Whether it was taken from the source of this ledger.
    pub(crate) fn is_of(&self, ledger: &Arc<Ledger>) -> bool {
        Arc::ptr_eq(&self.ledger, ledger)
    }

    /// Whether the source has given it to somebody else, as far as is known, or may have: its lease could not be renewed in time.
    pub(crate) fn is_lost(&self, now: Instant) -> bool {
        let ledger = &self.ledger;
        ledger.look_for_losses(now);
        if ledger.lost.load(Relaxed) == 0 && ledger.millis(now) < ledger.good_until.load(Relaxed) {
            return false;
        }
        ledger.entries().held.get(&self.which).is_some_and(|entry| entry.lost || now >= entry.until)
    }

    /// The sequence of its newest delivery, if that is not the one with which it was taken: it may have come again. That of a source without an order is none.
    pub(crate) fn sequence(&self, taken: u64) -> u64 {
        if !self.ledger.source.is_numbered() {
            return NO_SEQUENCE;
        }
        if self.ledger.copies.load(Relaxed) == 0 {
            return taken;
        }
        self.ledger.entries().held.get(&self.which).map_or(taken, |entry| entry.sequence)
    }

    fn send(&mut self, disposal: Disposal) {
        self.settled = true;
        let group = self.group.take();
        let mut entries = self.ledger.entries();
        entries.under_way += 1;
        if let Some(entry) = entries.held.get_mut(&self.which) {
            entry.settling = true;
        }
        if let (Disposal::GiveBack { delay }, Some(group)) = (&disposal, &group) {
            let until = Instant::now() + *delay;
            let fresh = Returning { unconfirmed: 0, first: self.which.id, until };
            let returning = entries.returning.entry(Arc::clone(group)).or_insert(fresh);
            returning.unconfirmed += 1;
            returning.first = returning.first.min(self.which.id);
            returning.until = returning.until.max(until);
        }
        // Under the lock, so that nobody sees the settlement under way who could not wait for it. Nobody listens only when the source has closed, or the
        // router is gone; then the lease will run out, and who waits for the source to be free of messages need not wait for this one.
        if self.ledger.queue.send(Settlement { which: self.which, group, disposal }).is_err() {
            entries.under_way -= 1;
            entries.held.remove(&self.which);
        }
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

/// Sends settlements to the source, many at a time, until nobody can make any more. A source that answers late but takes more meanwhile is sent the
/// next batch before it has answered to the last.
///
/// It listens only when it would send what comes at once, or soon: what comes is a better clock than a timer for the last millisecond. While settlements gather, or one batch is
/// under way and no other is due, they stay in the queue: to be woken for each of them costs more than a settlement does.
async fn settle_all(
    ledger: std::sync::Weak<Ledger>,
    source: Arc<dyn Source>,
    mut queue: mpsc::UnboundedReceiver<Settlement>,
) {
    let mut waiting = VecDeque::new();
    let mut arrived = Vec::new();
    let mut sending = FuturesUnordered::new();
    let (mut pause, mut together) = (RETRY.0, TOGETHER);
    let (mut not_before, mut is_over) = (Instant::now(), false);
    // When the last batch was sent.
    let mut sent_at = Instant::now();
    loop {
        if is_over && waiting.is_empty() && sending.is_empty() {
            return;
        }
        let is_worth = sending.is_empty() || waiting.len() + queue.len() >= WORTH_ANOTHER.0;
        let due = if is_worth { not_before } else { not_before.max(sent_at + WORTH_ANOTHER.1) };
        let now = Instant::now();
        // Asked each time: a source that is not open yet does not know.
        let has_room = sending.is_empty() || sending.len() < source.settles_at_once();
        let may_send = has_room && now >= due;
        let listens = has_room && !is_over && now + TIMER >= due && waiting.len() < TOGETHER;
        if may_send {
            while waiting.len() < TOGETHER
                && let Ok(more) = queue.try_recv()
            {
                waiting.push_back(more);
            }
        }
        if may_send && !waiting.is_empty() {
            let Some(ledger) = ledger.upgrade() else { return };
            let batch: Vec<_> = waiting.drain(..together.min(waiting.len())).collect();
            sent_at = now;
            let source = &*source;
            sending.push(async move {
                let sent = batch.len();
                (sent, send(&ledger, source, batch).await)
            });
            continue;
        }
        tokio::select! {
            Some((sent, answer)) = sending.next(), if !sending.is_empty() => match answer {
                Ok(again) => {
                    waiting.extend(again);
                    (pause, together) = (RETRY.0, (together * 2).min(TOGETHER));
                    if CURRENT.contains(&sent) && sending.is_empty() {
                        not_before = Instant::now() + source.gathers_for();
                    }
                }
                Err((_, SourceError::Closed)) => {
                    queue.close();
                    if let Some(ledger) = ledger.upgrade() {
                        ledger.close();
                    }
                    return;
                }
                Err((unsent, error)) => {
                    // Behind the others, those included that have come meanwhile: whoever can be settled is not kept waiting by those who cannot.
                    while let Ok(more) = queue.try_recv() {
                        waiting.push_back(more);
                    }
                    waiting.extend(unsent);
                    together = (sent / 2).max(1);
                    let now = Instant::now();
                    // Of batches that fail together the first decides.
                    if now >= not_before && (sent == 1 || !matches!(error, SourceError::Broken(_))) {
                        not_before = now + pause;
                        pause = (pause * 2).min(RETRY.1);
                    }
                }
            },
            count = queue.recv_many(&mut arrived, TOGETHER), if listens => {
                is_over = count == 0;
                waiting.extend(arrived.drain(..));
            }
            () = tokio::time::sleep_until(due), if has_room && now < due => {}
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
    let question = settlements.iter().zip(&receipts);
    let question = question.map(|(one, receipt)| (receipt.clone(), one.disposal.clone())).collect();
    match source.settle(question).await {
        Ok(answers) if answers.len() == settlements.len() => {
            let all = settlements.into_iter().zip(receipts).zip(answers);
            Ok(ledger.answered(all.map(|((one, sent), answer)| (one, sent, answer))))
        }
        Ok(answers) => {
            let counts = format!("{} answers to {} settlements", answers.len(), settlements.len());
            Err((settlements, SourceError::Broken(counts)))
        }
        Err(error) => Err((settlements, error)),
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use futures_util::future::BoxFuture;

    use super::*;
    use crate::source::{Depth, Wants};

    const LEASE: Duration = Duration::from_secs(30);

    /// Can be reached or not; and has lost the deliveries below a number, so often.
    struct Fake(AtomicBool, AtomicU64, AtomicU64);

    impl Fake {
        fn new() -> Self {
            Fake(AtomicBool::new(true), AtomicU64::new(0), AtomicU64::new(0))
        }
    }

    impl Source for Fake {
        fn name(&self) -> &str {
            "fake"
        }

        fn claim(&self, _: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
            std::future::ready(Ok(Vec::new())).boxed()
        }

        fn settle(&self, all: Vec<(Receipt, Disposal)>) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
            let receipts: Vec<_> = all.into_iter().map(|(receipt, _)| receipt).collect();
            let settled = |is_good| if is_good { Settled::Settled } else { Settled::Stale };
            let answers = self.are_good(&receipts, Instant::now()).into_iter().map(settled).collect();
            std::future::ready(Ok(answers)).boxed()
        }

        fn extend(&self, all: Vec<Receipt>, _: Duration) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
            let answer = match self.0.load(Relaxed) {
                true => Ok(vec![Settled::Settled; all.len()]),
                false => Err(SourceError::Unavailable("away".to_owned())),
            };
            std::future::ready(answer).boxed()
        }

        fn losses(&self, _: Instant) -> u64 {
            self.2.load(Relaxed)
        }

        fn are_good(&self, all: &[Receipt], _: Instant) -> Vec<bool> {
            let first = self.1.load(Relaxed);
            all.iter().map(|receipt| matches!(receipt, Receipt::Numbers([id, ..]) if *id >= first)).collect()
        }

        fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
            std::future::ready(Ok(Depth::default())).boxed()
        }
    }

    fn delivery(id: DeliveryId) -> Delivery {
        let (receipt, text) = (Receipt::Numbers([id, 0, 0, 0]), b"".as_slice().into());
        Delivery { id, receipt, group: None, text, attempt: 1, sequence: id }
    }

    /// A message under this number that says so.
    fn saying(id: DeliveryId, text: &str) -> Delivery {
        Delivery { text: text.as_bytes().into(), ..delivery(id) }
    }

    /// The server has lost its count: what it had of the first message is gone, and the next one gets its number.
    #[tokio::test(start_paused = true)]
    async fn a_message_with_the_number_of_another_that_was_done_is_taken() {
        let source = Arc::new(Fake::new());
        let (ledger, settler) = Ledger::open(Arc::clone(&source) as _);
        let settler = tokio::spawn(settler);
        ledger.begin_claim(LEASE);
        let settled = async || assert!(ledger.wait_settled(Instant::now() + LEASE).await);
        source.1.store(8, Relaxed);
        ledger.take(&saying(7, "a")).expect("it is new").settle(Disposal::Done);
        settled().await;
        assert_eq!(ledger.counts().stale_settlements, 1, "nobody knows whether it comes again");
        let other = ledger.take(&saying(7, "b")).expect("it was never seen");
        assert!(ledger.take(&saying(7, "a")).is_none(), "it was done, and comes again");
        settled().await;
        assert_eq!((ledger.len(), ledger.counts().swallowed_copies), (1, 1));
        other.settle(Disposal::Done);
        settled().await;
        assert!(ledger.take(&saying(7, "b")).is_none(), "it was done as well");
        settler.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_with_the_number_of_another_that_is_held_is_no_copy_of_it() {
        let (ledger, _settler) = Ledger::open(Arc::new(Fake::new()));
        ledger.begin_claim(LEASE);
        let _held = ledger.take(&saying(7, "a")).expect("it is new");
        let _other = ledger.take(&saying(7, "b")).expect("it was never seen");
        assert!(ledger.take(&saying(7, "a")).is_none() && ledger.take(&saying(7, "b")).is_none());
        let in_group = Delivery { group: Some("g".into()), ..saying(7, "a") };
        assert!(ledger.take(&in_group).is_some(), "it says the same in another group");
    }

    #[test]
    fn what_was_done_is_forgotten_when_there_is_too_much_of_it() {
        let mut done = Done::default();
        (0..DONE_MAX as u64 + 10).for_each(|id| done.remember(Identity { id, fingerprint: 0 }));
        assert_eq!((done.known.len(), done.order.len()), (DONE_MAX, DONE_MAX));
        assert!(!done.known.contains(&Identity { id: 9, fingerprint: 0 }));
    }

    /// Fails the first time that it is asked to renew leases.
    struct Once(Fake, std::sync::atomic::AtomicUsize);

    impl Source for Once {
        fn name(&self) -> &str {
            "once"
        }

        fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
            self.0.claim(wants)
        }

        fn settle(&self, all: Vec<(Receipt, Disposal)>) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
            self.0.settle(all)
        }

        fn extend(
            &self,
            all: Vec<Receipt>,
            lease: Duration,
        ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
            self.0.0.store(self.1.fetch_add(1, Relaxed) > 0, Relaxed);
            self.0.extend(all, lease)
        }

        fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
            self.0.depth()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn leases_are_renewed_although_others_could_not_be() {
        let source = Arc::new(Once(Fake::new(), Default::default()));
        let (ledger, _settler) = Ledger::open(Arc::clone(&source) as _);
        ledger.begin_claim(LEASE);
        let count = TOGETHER + 10;
        let held: Vec<_> = (0..count as u64).map(|id| ledger.take(&delivery(id)).unwrap()).collect();
        tokio::time::advance(LEASE / 2).await;
        assert!(ledger.renew(LEASE).await.is_err(), "it is said");
        tokio::time::advance(LEASE / 2).await;
        let lost = held.iter().filter(|held| held.is_lost(Instant::now())).count();
        assert_eq!((lost, source.1.load(Relaxed)), (TOGETHER, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_cannot_be_renewed_is_lost_when_its_time_is_up() {
        let source = Arc::new(Fake::new());
        let (ledger, _settler) = Ledger::open(Arc::clone(&source) as _);
        ledger.begin_claim(LEASE);
        // A claim that waits for longer than the lease brings deliveries that are good all the same.
        tokio::time::advance(LEASE * 2).await;
        let first = ledger.take(&delivery(1)).unwrap();
        assert!(!first.is_lost(Instant::now()));
        tokio::time::advance(LEASE / 3).await;
        assert_eq!(ledger.renew(LEASE).await, Ok(0));
        source.0.store(false, Relaxed);
        ledger.begin_claim(LEASE);
        let second = ledger.take(&delivery(2)).unwrap();
        tokio::time::advance(LEASE / 2).await;
        assert!(ledger.renew(LEASE).await.is_err());
        assert!(!first.is_lost(Instant::now()) && !second.is_lost(Instant::now()), "there is time left");
        tokio::time::advance(LEASE / 2).await;
        assert!(first.is_lost(Instant::now()) && second.is_lost(Instant::now()));
        source.0.store(true, Relaxed);
        assert_eq!(ledger.renew(LEASE).await, Ok(0));
        assert!(
            !first.is_lost(Instant::now()) && !second.is_lost(Instant::now()),
            "the source says that they are still ours"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_source_has_lost_is_lost_at_once_and_good_again_when_it_comes_again() {
        let source = Arc::new(Fake::new());
        let (ledger, _settler) = Ledger::open(Arc::clone(&source) as _);
        ledger.begin_claim(LEASE);
        let (first, second) = (ledger.take(&delivery(1)).unwrap(), ledger.take(&delivery(2)).unwrap());
        let are_lost = || (first.is_lost(Instant::now()), second.is_lost(Instant::now()));
        source.1.store(2, Relaxed);
        assert_eq!(are_lost(), (false, false), "the source has not said so");
        source.2.store(1, Relaxed);
        assert_eq!(are_lost(), (true, false));
        source.1.store(3, Relaxed);
        source.2.store(2, Relaxed);
        assert_eq!(are_lost(), (true, true));
        assert_eq!((first.sequence(1), second.sequence(2)), (1, 2));
        ledger.begin_claim(LEASE);
        let late = Delivery { receipt: Receipt::Numbers([4, 0, 0, 0]), ..delivery(4) };
        source.1.store(5, Relaxed);
        source.2.store(3, Relaxed);
        assert!(first.is_lost(Instant::now()), "somebody looks before they are here");
        let late = ledger.take(&late).unwrap();
        assert!(late.is_lost(Instant::now()), "what was lost between its claim and its taking");
        let receipt = Receipt::Numbers([7, 0, 0, 0]);
        assert!(ledger.take(&Delivery { receipt, sequence: 9, ..delivery(1) }).is_none(), "a copy");
        assert_eq!(are_lost(), (false, true));
        assert_eq!(
            (first.sequence(1), second.sequence(2)),
            (9, 2),
            "the fence goes with the newest delivery"
        );
    }

    /// Answers to a batch when it is let, several at once.
    struct Gated {
        at_once: usize,
        /// The size of each batch that has come, and which delivery was the first in it.
        came: mpsc::UnboundedSender<(usize, DeliveryId)>,
        answers: tokio::sync::Mutex<mpsc::UnboundedReceiver<Result<(), SourceError>>>,
    }

    impl Source for Gated {
        fn name(&self) -> &str {
            "gated"
        }

        fn claim(&self, _: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
            std::future::ready(Ok(Vec::new())).boxed()
        }

        fn settles_at_once(&self) -> usize {
            self.at_once
        }

        fn settle(&self, all: Vec<(Receipt, Disposal)>) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
            let Receipt::Numbers([first, ..]) = all[0].0 else { panic!("a receipt of these tests") };
            let _ = self.came.send((all.len(), first));
            async move {
                let answer = self.answers.lock().await.recv().await.unwrap_or(Err(SourceError::Closed));
                answer.map(|()| vec![Settled::Settled; all.len()])
            }
            .boxed()
        }

        fn extend(&self, all: Vec<Receipt>, _: Duration) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
            std::future::ready(Ok(vec![Settled::Settled; all.len()])).boxed()
        }

        fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
            std::future::ready(Ok(Depth::default())).boxed()
        }
    }

    type Batches = mpsc::UnboundedReceiver<(usize, DeliveryId)>;
    type Answers = mpsc::UnboundedSender<Result<(), SourceError>>;

    fn gated(at_once: usize) -> (Arc<Gated>, Batches, Answers) {
        let (came, batches) = mpsc::unbounded_channel();
        let (let_go, answers) = mpsc::unbounded_channel();
        (Arc::new(Gated { at_once, came, answers: answers.into() }), batches, let_go)
    }

    /// The size of the next batch.
    async fn size(batches: &mut Batches) -> Option<usize> {
        batches.recv().await.map(|(size, _)| size)
    }

    /// Settles so many deliveries, from this one on.
    fn settle(ledger: &Arc<Ledger>, from: DeliveryId, count: u64) {
        ledger.begin_claim(LEASE);
        for id in from..from + count {
            ledger.take(&delivery(id)).expect("not here yet").settle(Disposal::Done);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_that_takes_several_batches_is_sent_the_next_before_it_answers() {
        for at_once in [1, 4] {
            let (source, mut batches, answers) = gated(at_once);
            let (ledger, settler) = Ledger::open(source as _);
            let settler = tokio::spawn(settler);
            settle(&ledger, 0, 5 * TOGETHER as u64);
            for _ in 0..at_once {
                assert_eq!(size(&mut batches).await, Some(TOGETHER));
            }
            // Time passes only where nobody has anything left to do.
            let more = tokio::time::timeout(Duration::from_secs(60), batches.recv()).await;
            assert!(more.is_err(), "{at_once} at once, and {more:?} more");
            (0..5).for_each(|_| answers.send(Ok(())).unwrap());
            assert!(ledger.wait_settled(Instant::now() + LEASE).await);
            assert_eq!((ledger.len(), ledger.counts().stale_settlements), (0, 0));
            drop(ledger);
            tokio::time::timeout(LEASE, settler).await.expect("it ends with its ledger").unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn batches_that_fail_together_are_sent_again_until_all_are_settled() {
        let (source, mut batches, answers) = gated(4);
        let (ledger, settler) = Ledger::open(source as _);
        let settler = tokio::spawn(settler);
        settle(&ledger, 0, 4 * TOGETHER as u64);
        for _ in 0..4 {
            assert_eq!(size(&mut batches).await, Some(TOGETHER));
        }
        let began = Instant::now();
        (0..4).for_each(|_| answers.send(Err(SourceError::Unavailable("away".to_owned()))).unwrap());
        let again = size(&mut batches).await;
        assert_eq!((again, began.elapsed()), (Some(TOGETHER / 2), RETRY.0), "one pause for all of them");
        (0..100).for_each(|_| answers.send(Ok(())).unwrap());
        assert!(ledger.wait_settled(Instant::now() + LEASE).await);
        assert_eq!((ledger.len(), ledger.counts().stale_settlements), (0, 0));
        settler.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_settled_goes_behind_what_has_come_meanwhile() {
        let (source, mut batches, answers) = gated(1);
        let (ledger, settler) = Ledger::open(source as _);
        let settler = tokio::spawn(settler);
        settle(&ledger, 0, 1);
        assert_eq!(batches.recv().await, Some((1, 0)));
        settle(&ledger, 1, 1);
        answers.send(Err(SourceError::Broken("not this one".to_owned()))).unwrap();
        assert_eq!(batches.recv().await, Some((1, 1)));
        (0..2).for_each(|_| answers.send(Ok(())).unwrap());
        assert!(ledger.wait_settled(Instant::now() + LEASE).await);
        settler.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_that_closes_ends_the_wait_although_others_are_under_way() {
        let (source, mut batches, answers) = gated(4);
        let (ledger, settler) = Ledger::open(source as _);
        let settler = tokio::spawn(settler);
        settle(&ledger, 0, 2 * TOGETHER as u64);
        for _ in 0..2 {
            assert_eq!(size(&mut batches).await, Some(TOGETHER));
        }
        let began = Instant::now();
        answers.send(Err(SourceError::Closed)).unwrap();
        assert!(!ledger.wait_settled(began + LEASE).await);
        assert_eq!(began.elapsed(), Duration::ZERO, "nobody waits for what will not be answered");
        settler.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_held_of_a_source_that_has_closed_once_it_is_settled() {
        let (source, mut batches, answers) = gated(1);
        let (ledger, settler) = Ledger::open(source as _);
        let settler = tokio::spawn(settler);
        settle(&ledger, 0, 1);
        assert_eq!(size(&mut batches).await, Some(1));
        // One that has not been sent when the source closes, and one that is still with its target.
        settle(&ledger, 1, 1);
        let late = ledger.take(&delivery(2)).unwrap();
        answers.send(Err(SourceError::Closed)).unwrap();
        settler.await.unwrap();
        assert_eq!(ledger.len(), 1, "the one that is with its target");
        late.settle(Disposal::Done);
        assert_eq!(ledger.len(), 0);
        let began = Instant::now();
        assert!(!ledger.wait_settled(began + LEASE).await, "the source has not taken two of them");
        assert_eq!(began.elapsed(), Duration::ZERO, "it is not waited for");
    }
}
