//! The gate: bounds, what happens at a full one, and how a submitter waits for room.
//!
//! A submission comes from `engine.rs`, is counted against the bounds here, and goes on into the [`Ingress`] of its
//! dispatcher. Bounds are on *outstanding* messages: accepted and not yet settled. That is what costs memory, and it is what
//! document 003's ring and document 000's queues did not see once a consumer had drained them.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, atomic::Ordering},
    task::{Wake, Waker},
    time::Duration,
};

use crate::{
    error::Refusal,
    message::{Arrivals, Item, Kind, Message},
    sync::{AtomicU64, AtomicUsize, Condvar, Mutex, Padded, lock, wait_for},
    worker::{Sleeper, Sleepers},
};

/// What happens when a message meets a full bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// The submitter waits until there is room, or is cancelled, or the engine is closed.
    #[default]
    Block,
    /// The same for at most this long; then the message is refused.
    BlockFor(Duration),
    /// The event that has waited longest makes room. It goes to `on_drop`.
    DropOldest,
    /// The new message is dropped, unless it is a control message. It goes to `on_drop`.
    DropNewest,
    /// The new message is refused and given back.
    Reject,
}

/// What can be full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bound {
    /// `ingress_capacity`: the whole engine.
    Engine,
    /// `worker_queue_capacity`: one dispatcher.
    Dispatcher,
    /// `lane_capacity`: one lane.
    Lane,
    /// `lanes_max`: the number of lanes of one dispatcher.
    Lanes,
}

impl Bound {
    /// All of them, in the order of their index in counters.
    pub const ALL: [Bound; 4] = [Bound::Engine, Bound::Dispatcher, Bound::Lane, Bound::Lanes];
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bound::Engine => "engine",
            Bound::Dispatcher => "dispatcher",
            Bound::Lane => "lane",
            Bound::Lanes => "number of lanes",
        })
    }
}

/// What became of a submission that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is in its lane, and will be handled or accounted for.
    Accepted,
    /// It was dropped by [`Overflow::DropNewest`], counted, and given to `on_drop`.
    Dropped,
}

/// What `on_drop` is told about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Which bound was full.
    pub bound: Bound,
    /// [`Overflow::DropOldest`] or [`Overflow::DropNewest`].
    pub policy: Overflow,
    /// Always [`Kind::Event`] today: control messages are never dropped.
    pub kind: Kind,
}

/// How many messages were dropped, by bound, policy and kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    by_policy: [[[u64; 3]; 2]; 4],
    withdrawn: u64,
}

impl Drops {
    /// The count of one combination. Policies other than the two that drop have none.
    pub fn count(&self, bound: Bound, policy: Overflow, kind: Kind) -> u64 {
        let policy = match policy {
            Overflow::DropOldest => 0,
            Overflow::DropNewest => 1,
            _ => return 0,
        };
        self.by_policy[bound as usize][policy][kind as usize]
    }

    /// Those that were taken back by [`withdraw`](crate::Handle::withdraw), which is nobody's policy.
    pub fn withdrawn(&self) -> u64 {
        self.withdrawn
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.by_policy.iter().flatten().flatten().sum::<u64>() + self.withdrawn
    }

    pub(crate) fn withdraw(&mut self, messages: u64) {
        self.withdrawn += messages;
    }

    pub(crate) fn record(&mut self, dropped: Dropped) {
        let policy = usize::from(dropped.policy == Overflow::DropNewest);
        self.by_policy[dropped.bound as usize][policy][dropped.kind as usize] += 1;
    }

    pub(crate) fn add(&mut self, other: &Drops) {
        self.withdrawn += other.withdrawn;
        let cells = self.by_policy.iter_mut().flatten().flatten();
        for (mine, theirs) in cells.zip(other.by_policy.iter().flatten().flatten()) {
            *mine += theirs;
        }
    }
}

/// How many submissions were refused, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    full: [u64; 4],
    timed_out: [u64; 4],
    from_handler: [u64; 4],
    others: u64,
}

impl Refusals {
    /// The count of one reason. `Cancelled`, `Closed`, `NoSuchDispatcher` and `AfterRefused` share one.
    pub fn count(&self, reason: Refusal) -> u64 {
        match reason {
            Refusal::Full(bound) => self.full[bound as usize],
            Refusal::TimedOut(bound) => self.timed_out[bound as usize],
            Refusal::FromHandler(bound) => self.from_handler[bound as usize],
            _ => self.others,
        }
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        let by_bound = self.full.iter().chain(&self.timed_out).chain(&self.from_handler);
        by_bound.sum::<u64>() + self.others
    }

    pub(crate) fn record(&mut self, reason: Refusal) {
        match reason {
            Refusal::Full(bound) => self.full[bound as usize] += 1,
            Refusal::TimedOut(bound) => self.timed_out[bound as usize] += 1,
            Refusal::FromHandler(bound) => self.from_handler[bound as usize] += 1,
            _ => self.others += 1,
        }
    }

    pub(crate) fn add(&mut self, other: &Refusals) {
        let mine = self.full.iter_mut().chain(&mut self.timed_out).chain(&mut self.from_handler);
        let theirs = other.full.iter().chain(&other.timed_out).chain(&other.from_handler);
        mine.zip(theirs).for_each(|(mine, theirs)| *mine += theirs);
        self.others += other.others;
    }
}

/// What came of a batch.
#[derive(Debug)]
pub struct BatchReport<K, M> {
    /// How many were accepted.
    pub accepted: usize,
    /// How many were dropped by [`Overflow::DropNewest`].
    pub dropped: usize,
    /// What was refused, per key in order. Once a message of a key is refused, all later ones of that key are too.
    pub refused: Vec<crate::Refused<K, M>>,
}

impl<K, M> Default for BatchReport<K, M> {
    fn default() -> Self {
        BatchReport { accepted: 0, dropped: 0, refused: Vec::new() }
    }
}

/// Accepted messages on their way to their lanes, and who sleeps until there are some. Guarded by the ingress lock.
#[derive(Debug)]
pub(crate) struct Ingress<K, M> {
    /// In the order of acceptance.
    pub(crate) buffer: Arrivals<K, M>,
    /// Idle workers.
    pub(crate) sleepers: Sleepers,
    /// How many were ever accepted here.
    pub(crate) accepted: u64,
    /// What `released` was when it was last looked at: it only grows, so an old value is on the safe side, and the cache line of
    /// the workers is left alone until the bound seems reached.
    pub(crate) released_seen: u64,
    /// Messages until the next one that is timed.
    pub(crate) until_timed: u64,
    /// How many had been accepted when a submitter last found the lock taken.
    pub(crate) met_at: u64,
    /// No more.
    pub(crate) closed: bool,
    /// Which topology this dispatcher belongs to. A submitter that placed its message by another one has to place it again.
    pub(crate) epoch: u64,
    pub(crate) drops: Drops,
    pub(crate) refusals: Refusals,
}

impl<K, M> Ingress<K, M> {
    /// The dispatcher is removed: no layout has this epoch.
    pub(crate) fn retire(&mut self) {
        self.epoch = u64::MAX;
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.epoch == u64::MAX
    }

    pub(crate) fn new(epoch: u64) -> Self {
        Ingress {
            buffer: Arrivals::new(),
            sleepers: Sleepers::new(),
            accepted: 0,
            released_seen: 0,
            until_timed: 0,
            met_at: 0,
            closed: false,
            epoch,
            drops: Drops::default(),
            refusals: Refusals::default(),
        }
    }
}

/// Where submitters wait for room.
///
/// The order of steps is what makes it safe. A submitter *enters* (raises `waiting`), then looks once more whether there is room, and
/// only then sleeps. Whoever makes room first publishes it and then reads `waiting`, with a read-modify-write, so that the two cannot
/// both miss each other: either the submitter's entry comes first in the order of that one atomic and is seen, or the reader's comes first and its room is seen.
#[derive(Debug)]
pub(crate) struct Room {
    waiting: Padded<AtomicUsize>,
    /// Announce when this many have been released. The least that any waiter asked for.
    mark: AtomicU64,
    turnstile: Mutex<Turnstile>,
    opened: Condvar,
}

#[derive(Debug, Default)]
struct Turnstile {
    announcements: u64,
    /// Of the tasks that wait, by their tickets, so that the longest waiting is woken first, and one that gives up leaves nothing behind.
    wakers: BTreeMap<u64, Waker>,
    /// How many tickets were ever given out.
    #[cfg(feature = "tokio")]
    tickets: u64,
}

/// A cancelled submitter wakes everyone in the room: the others look, and go back to sleep.
impl Wake for Room {
    fn wake(self: Arc<Self>) {
        self.announce();
    }
}

/// A submitter's place in a [`Room`]; leaving is automatic.
#[derive(Debug)]
pub(crate) struct Entered {
    room: Arc<Room>,
    seen: u64,
    /// Of its waker, if it has left one.
    ticket: Option<u64>,
}

impl Room {
    pub(crate) fn new() -> Self {
        Room {
            waiting: Padded(AtomicUsize::new(0)),
            mark: AtomicU64::new(u64::MAX),
            turnstile: Mutex::new(Turnstile::default()),
            opened: Condvar::new(),
        }
    }

    /// Announces what is coming; afterwards look once more, then wait.
    pub(crate) fn enter(self: &Arc<Self>, mark: u64) -> Entered {
        let seen = lock(&self.turnstile).announcements;
        self.mark.fetch_min(mark, Ordering::AcqRel);
        self.waiting.fetch_add(1, Ordering::AcqRel);
        Entered { room: self.clone(), seen, ticket: None }
    }

    /// Called after room was made: wakes the submitters if what they asked for has been released.
    pub(crate) fn made(&self, released: u64) {
        if self.waiting.fetch_add(0, Ordering::AcqRel) > 0 && released >= self.mark.load(Ordering::Acquire) {
            self.announce();
        }
    }

    /// Called when nobody is about to make more room: wakes the submitters for whatever there is.
    pub(crate) fn made_last(&self) {
        if self.waiting.fetch_add(0, Ordering::AcqRel) > 0 {
            self.announce();
        }
    }

    /// Wakes everyone who waits, with or without room.
    pub(crate) fn announce(&self) {
        let mut turnstile = lock(&self.turnstile);
        turnstile.announcements += 1;
        self.mark.store(u64::MAX, Ordering::Release);
        let wakers = std::mem::take(&mut turnstile.wakers);
        drop(turnstile);
        self.opened.notify_all();
        wakers.into_values().for_each(Waker::wake);
    }
}

impl Entered {
    /// Sleeps until the next announcement, or for `limit`.
    pub(crate) fn wait(&self, limit: Option<Duration>) {
        let turnstile = lock(&self.room.turnstile);
        if turnstile.announcements == self.seen {
            drop(wait_for(&self.room.opened, turnstile, limit));
        }
    }

    /// Leaves a waker for the next announcement, once. True if that has come already.
    #[cfg(feature = "tokio")]
    pub(crate) fn wait_async(&mut self, waker: &Waker) -> bool {
        debug_assert!(self.ticket.is_none(), "its waker is known already");
        let mut turnstile = lock(&self.room.turnstile);
        if turnstile.announcements != self.seen {
            return true;
        }
        turnstile.tickets += 1;
        let ticket = turnstile.tickets;
        turnstile.wakers.insert(ticket, waker.clone());
        self.ticket = Some(ticket);
        false
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.room.waiting.fetch_sub(1, Ordering::AcqRel);
        if let Some(ticket) = self.ticket {
            // Dropped when the lock is not held any more: it may be the last of its task, which may be in here itself.
            let waker = lock(&self.room.turnstile).wakers.remove(&ticket);
            drop(waker);
        }
    }
}

/// How much room a submitter asks for before it wants to be woken.
///
/// One place is what it needs. But where places come free every few nanoseconds, being woken for each of them costs more than
/// the work itself. So a submitter that was woken soon asks for twice as much the next time, and one that had to
/// wait long asks for a single place again.
#[derive(Debug)]
pub(crate) struct Appetite(AtomicU64);

/// A wait shorter than this is not worth its wake-up, which costs about as much.
const SHORT_WAIT: Duration = Duration::from_micros(100);

impl Appetite {
    pub(crate) fn new() -> Self {
        Appetite(AtomicU64::new(1))
    }

    pub(crate) fn places(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether the last wait was short.
    pub(crate) fn is_keen(&self) -> bool {
        self.places() > 1
    }

    pub(crate) fn learn(&self, waited: Duration, most: u64) {
        let places = self.places();
        let next = if waited < SHORT_WAIT { (places * 2).min(most.max(1)) } else { 1 };
        if next != places {
            self.0.store(next, Ordering::Relaxed);
        }
    }
}

/// Places of the engine that came free, of which nobody has been told: up to so many were ever given back, if they are counted.
#[must_use = "somebody may wait for them"]
#[derive(Debug)]
pub(crate) struct Freed(Option<u64>);

impl Freed {
    /// Wakes those who wait for places. Wakers are the user's code, and run here.
    pub(crate) fn tell(self, bound: &EngineBound) {
        if let Some(released) = self.0 {
            bound.room.made(released);
        }
    }
}

/// The bound on the whole engine. Counted only when it can be reached before those of the dispatchers are.
#[derive(Debug)]
pub(crate) struct EngineBound {
    /// Not zero once it is counted. Raised before the first message, or under all locks when a dispatcher is added; never lowered.
    counting: AtomicUsize,
    pub(crate) capacity: u64,
    /// On top of it, for control messages only.
    pub(crate) reserve: u64,
    accepted: Padded<AtomicU64>,
    released: Padded<AtomicU64>,
    pub(crate) room: Arc<Room>,
}

impl EngineBound {
    pub(crate) fn new(capacity: usize, reserve: usize) -> Self {
        EngineBound {
            counting: AtomicUsize::new(0),
            capacity: capacity as u64,
            // Some write "without a bound" as the greatest number there is.
            reserve: (reserve as u64).min(u64::MAX - capacity as u64),
            accepted: Padded(AtomicU64::new(0)),
            released: Padded(AtomicU64::new(0)),
            room: Arc::new(Room::new()),
        }
    }

    /// Whether places have to be taken and given back.
    #[inline]
    pub(crate) fn is_counting(&self) -> bool {
        self.counting.load(Ordering::Acquire) > 0
    }

    /// Counts from now on, with so many messages outstanding already.
    pub(crate) fn count_from(&self, outstanding: u64) {
        self.accepted.fetch_add(outstanding, Ordering::AcqRel);
        self.counting.store(1, Ordering::Release);
    }

    /// Takes a place. A place is taken only when there is one, so nobody is refused for the sake of someone who is refused as well.
    pub(crate) fn reserve(&self, kind: Kind) -> bool {
        let limit = self.capacity + if kind.is_control() { self.reserve } else { 0 };
        let mut accepted = self.accepted.load(Ordering::Acquire);
        loop {
            if accepted - self.released.load(Ordering::Acquire).min(accepted) >= limit {
                return false;
            }
            let taken = (accepted, accepted + 1, Ordering::AcqRel, Ordering::Acquire);
            match self.accepted.compare_exchange_weak(taken.0, taken.1, taken.2, taken.3) {
                Ok(_) => return true,
                Err(now) => accepted = now,
            }
        }
    }

    /// Gives places back, if they are counted. Called under the lanes lock under which the messages have left, so that none is
    /// missed or given back twice when the counting begins. Whoever waits for them is told by [`Freed::tell`], when the lock is not held any more.
    pub(crate) fn release(&self, places: u64) -> Freed {
        let counts = places > 0 && self.is_counting();
        Freed(counts.then(|| self.released.fetch_add(places, Ordering::AcqRel) + places))
    }

    pub(crate) fn released(&self) -> u64 {
        self.released.load(Ordering::Acquire)
    }

    /// Places that are taken.
    pub(crate) fn outstanding(&self) -> u64 {
        self.accepted.load(Ordering::Acquire) - self.released()
    }
}

/// Ends the waiting of a submitter from another thread.
///
/// ```
/// # use laneway::{Cancel, Engine, Message, Refusal};
/// let engine = Engine::<u8, u8>::builder().handle(|_, _| ()).build()?;
/// let cancel = Cancel::new();
/// cancel.cancel();
/// let refused = engine.submit_unless((1, 2), &cancel).unwrap_err();
/// assert_eq!(refused.reason, Refusal::Cancelled);
/// # Ok::<(), laneway::BuildError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<CancelState>);

#[derive(Debug, Default)]
struct CancelState {
    cancelled: std::sync::atomic::AtomicBool,
    /// Who to wake when it happens; at most one per room and per task.
    wakers: std::sync::Mutex<Vec<Waker>>,
}

impl Cancel {
    /// A token that has not been used.
    pub fn new() -> Self {
        Cancel::default()
    }

    /// Ends every wait with this token, now and in future.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::SeqCst);
        let wakers = std::mem::take(&mut *self.0.wakers.lock().unwrap_or_else(|e| e.into_inner()));
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether it was.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::SeqCst)
    }

    /// Has `waker` woken when it happens, or at once if it has.
    pub(crate) fn subscribe(&self, waker: &Waker) {
        let mut wakers = self.0.wakers.lock().unwrap_or_else(|e| e.into_inner());
        if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
        drop(wakers);
        if self.is_cancelled() {
            self.cancel();
        }
    }
}

/// What a dispatcher says to a message that is offered to it.
#[derive(Debug)]
pub(crate) enum Offer<K, M> {
    /// Taken in, and what had to go for it.
    Accepted { wake: Option<Sleeper>, evicted: Option<Evicted<K, M>> },
    /// No room.
    Full(Item<K, M>, Bound),
    /// Closed for good.
    Closed(Item<K, M>),
    /// The topology has changed since the message was placed.
    Moved(Item<K, M>),
}

/// A message that made room for another.
#[derive(Debug)]
pub(crate) struct Evicted<K, M> {
    pub(crate) fingerprint: u64,
    pub(crate) message: Message<K, M>,
    pub(crate) bound: Bound,
}
