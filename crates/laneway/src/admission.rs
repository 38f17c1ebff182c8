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
    sync::{AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Padded, lock, wait_for},
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

/// Where submitters wait for room. (And others for something else to happen: `Shared::quiet`.)
///
/// # Nobody sleeps beside room
///
/// The order of steps is what makes it safe. A submitter *enters* (leaves its ticket, and raises `waiting`), then looks once more whether there is room, and
/// only then sleeps. Whoever makes room first publishes it and then reads `waiting`, with a read-modify-write, so that the two cannot
/// both miss each other: either the submitter's entry comes first in the order of that one atomic and is seen, or the reader's comes first and its room is seen.
///
/// # As many are woken as places were made
///
/// With thousands that wait, to wake all of them for each place would cost thousands of looks for each message. So places are counted, by what was
/// ever *released*: `told` is up to where those who wait have been told, and to tell them of `n` more is to take the `n` oldest tickets and to wake those. What must hold
/// whenever somebody sleeps is
///
/// ```text
/// free places  <=  tickets that were taken, whose owners have not looked since  +  released - told
/// ```
///
/// for then each free place is somebody's who is awake, or will be told of. It does, because
///
/// - a look behind the entry has found nothing free, so it is true of whoever falls asleep; if nobody waited before it, `told` begins at what was released before that look;
/// - to release raises both sides, to tell leaves the right side as it is, and any message that comes in lowers the left;
/// - who was woken and gets in here lowers both sides by one. Who was woken and finds nothing free has had its look: there is nothing on the left;
/// - who was woken and does neither, because it is cancelled, dropped, out of time, or another bound is full now, or its message has gone elsewhere, *passes its wake-up on* to the next ticket
///   ([`Entered`]'s drop). So each wake-up ends with a place that is used, a look that found none, or nobody who waits.
///
/// Events and control messages have a queue each, since there may be a place for one kind and none for the other: both are told of all places. Where no place is like
/// another (lanes) all who wait are told. What may free more than was released, a change of the topology for example, is [announced](Room::announce) to everyone.
///
/// A ticket is kept until its message is in, so nobody who was woken in vain goes to the back. Those who come and find room at once do not look whether somebody waits: it would cost every
/// message. They can only be faster than one that has been woken; whoever finds no room stands behind all who wait.
///
/// A task may have been woken and never look: it holds its submission, and waits for something else. Its place is lost to those behind it until it does, or until all workers here have gone to
/// sleep with nothing left to do: then others are [roused](Room::rouse) for all places there could be.
#[derive(Debug)]
pub(crate) struct Room {
    /// Tickets in the turnstile; written under its lock.
    waiting: Padded<AtomicUsize>,
    /// Tell them when this many have been released: not more than the least that anyone who waits asked for. Written under the same lock.
    mark: AtomicU64,
    turnstile: Mutex<Turnstile>,
}

/// What somebody waits for: the queue that it stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum For {
    /// A place for an event.
    Place,
    /// A place for a control message, whose reserve may have one when there is none for an event.
    Reserve,
    /// Whatever happens here.
    Anything,
}

/// What somebody wants to be told of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) what: For,
    /// What had been released before it looks.
    pub(crate) released: u64,
    /// It is worth a wake-up when so many more have been.
    pub(crate) places: u64,
}

impl Wish {
    /// Whatever happens.
    pub(crate) const ANYTHING: Wish = Wish { what: For::Anything, released: 0, places: 0 };
}

#[derive(Debug, Default)]
struct Turnstile {
    /// Up to where those who wait were told what was released.
    told: u64,
    /// How many tickets were ever given out.
    tickets: u64,
    /// To be used again, so that to wait allocates nothing in the steady state.
    spare_bells: Vec<Arc<Bell>>,
    /// Whom to wake, by what they wait for and then by their tickets: those who have waited longest are first, and one that gives up leaves nothing behind.
    queues: [BTreeMap<u64, Waker>; 3],
}

impl Turnstile {
    fn is_empty(&self) -> bool {
        self.queues.iter().all(BTreeMap::is_empty)
    }

    /// Takes so many of the oldest tickets of a queue.
    fn take(&mut self, what: For, most: u64) -> impl Iterator<Item = Waker> {
        let queue = &mut self.queues[what as usize];
        (0..most).map_while(|_| queue.pop_first()).map(|(_, waker)| waker)
    }
}

/// A cancelled submitter wakes everyone in the room: the others look, and go back to sleep.
impl Wake for Room {
    fn wake(self: Arc<Self>) {
        self.announce();
    }
}

/// What wakes a thread that waits in a room. It may ring once more for somebody who has left: who is woken looks whether its ticket was taken.
#[derive(Debug)]
struct Bell(Condvar);

/// As many are kept for those who will wait: more than most programs have threads that submit.
const BELLS_KEPT: usize = 64;

impl Bell {
    fn new() -> Arc<Self> {
        Arc::new(Bell(Condvar::new()))
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        // Its ticket was taken under the lock under which it looks for it before it sleeps.
        self.0.notify_one();
    }
}

/// A submitter's place in a [`Room`]. Leaving is automatic, and passes on a wake-up that was not used.
#[derive(Debug)]
pub(crate) struct Entered {
    room: Arc<Room>,
    what: For,
    ticket: u64,
    /// Of a thread, which has no waker of its own.
    bell: Option<Arc<Bell>>,
    /// Its message has taken a place here.
    used: bool,
}

impl Room {
    pub(crate) fn new() -> Self {
        Room {
            waiting: Padded(AtomicUsize::new(0)),
            mark: AtomicU64::new(u64::MAX),
            turnstile: Mutex::new(Turnstile::default()),
        }
    }

    /// Says what is wanted; afterwards look once more, then wait. A task leaves its waker.
    pub(crate) fn enter(self: &Arc<Self>, wish: Wish, task: Option<&Waker>) -> Entered {
        let mut turnstile = lock(&self.turnstile);
        let bell = task.is_none().then(|| turnstile.spare_bells.pop().unwrap_or_else(Bell::new));
        turnstile.tickets += 1;
        let entered =
            Entered { room: self.clone(), what: wish.what, ticket: turnstile.tickets, bell, used: false };
        entered.queue_up(turnstile, wish, task);
        entered
    }

    /// Called after room was made: tells the submitters if what they asked for has been released.
    pub(crate) fn made(&self, released: u64) {
        if self.has_waiters() && released >= self.mark.load(Ordering::Acquire) {
            self.tell(released);
        }
    }

    /// Called when nobody is about to make more room: tells the submitters of whatever was made.
    pub(crate) fn made_last(&self, released: u64) {
        if self.has_waiters() {
            self.tell(released);
        }
    }

    /// Called after something else has happened: wakes those who wait for anything.
    pub(crate) fn stir(&self) {
        if self.has_waiters() {
            self.wake_first([0, 0, u64::MAX], lock(&self.turnstile));
        }
    }

    /// Called when nobody does anything here any more, with all places that there could be: those who were told of them may have better things to do.
    pub(crate) fn rouse(&self, places: u64) {
        if self.has_waiters() {
            self.wake_first([places, places, u64::MAX], lock(&self.turnstile));
        }
    }

    /// Wakes everyone who waits, with or without room.
    pub(crate) fn announce(&self) {
        self.wake_first([u64::MAX; 3], lock(&self.turnstile));
    }

    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting.fetch_add(0, Ordering::AcqRel) > 0
    }

    #[cold]
    fn tell(&self, released: u64) {
        let mut turnstile = lock(&self.turnstile);
        let places = released.saturating_sub(turnstile.told);
        if places > 0 {
            turnstile.told = released;
            self.wake_first([places, places, u64::MAX], turnstile);
        }
    }

    /// Wakes so many of each queue. Wakers are the user's code, and run without the lock.
    fn wake_first(&self, most: [u64; 3], mut turnstile: MutexGuard<'_, Turnstile>) {
        let mut each = [For::Place, For::Reserve, For::Anything].into_iter().zip(most);
        let mut woken: Vec<Waker> = Vec::new();
        // Mostly there is one, for whom nothing need be allocated.
        let Some(first) = each.by_ref().find_map(|(what, most)| {
            let first = turnstile.take(what, most.min(1)).next()?;
            woken.extend(turnstile.take(what, most - 1));
            Some(first)
        }) else {
            return;
        };
        for (what, most) in each {
            woken.extend(turnstile.take(what, most));
        }
        self.waiting.fetch_sub(1 + woken.len(), Ordering::AcqRel);
        // Whoever is left asked for more than there was, or came too late for it: the next place is worth a wake-up.
        self.mark.store(if turnstile.is_empty() { u64::MAX } else { 0 }, Ordering::Release);
        drop(turnstile);
        first.wake();
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Entered {
    /// Whether this is where a submitter waits for that.
    pub(crate) fn is_for(&self, room: &Arc<Room>, what: For) -> bool {
        self.what == what && Arc::ptr_eq(&self.room, room)
    }

    /// Whether this is a place in that room.
    pub(crate) fn is_in(&self, room: &Arc<Room>) -> bool {
        Arc::ptr_eq(&self.room, room)
    }

    /// Its message has taken a place here: whatever it was woken for is used.
    pub(crate) fn used(mut self) {
        self.used = true;
    }

    /// Was woken, and found nothing: says once more what is wanted. It stands where it stood.
    pub(crate) fn again(&self, wish: Wish, task: Option<&Waker>) {
        self.queue_up(lock(&self.room.turnstile), wish, task);
    }

    fn queue_up(&self, mut turnstile: MutexGuard<'_, Turnstile>, wish: Wish, task: Option<&Waker>) {
        debug_assert_eq!(self.what, wish.what, "a ticket is of one queue");
        let waker = match &self.bell {
            Some(bell) => Waker::from(bell.clone()),
            None => task.expect("who has no bell has a waker").clone(),
        };
        if turnstile.is_empty() {
            turnstile.told = turnstile.told.max(wish.released);
        }
        let earlier = turnstile.queues[self.what as usize].insert(self.ticket, waker);
        self.room.mark.fetch_min(wish.released.saturating_add(wish.places), Ordering::AcqRel);
        if earlier.is_none() {
            self.room.waiting.fetch_add(1, Ordering::AcqRel);
        }
        drop(turnstile);
        // Not under the lock: it may be the last of its task, which may be in here itself.
        drop(earlier);
    }

    /// Puts a thread to sleep until it is woken, or for `limit`.
    pub(crate) fn wait(&self, limit: Option<Duration>) {
        let bell = self.bell.as_ref().expect("a task does not wait like this");
        let turnstile = lock(&self.room.turnstile);
        if turnstile.queues[self.what as usize].contains_key(&self.ticket) {
            drop(wait_for(&bell.0, turnstile, limit));
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut turnstile = lock(&self.room.turnstile);
        let own = turnstile.queues[self.what as usize].remove(&self.ticket);
        let was_woken = own.is_none();
        let passes_on = was_woken && !self.used && self.what != For::Anything;
        let next = turnstile.take(self.what, u64::from(passes_on)).next();
        let left = usize::from(own.is_some()) + usize::from(next.is_some());
        self.room.waiting.fetch_sub(left, Ordering::AcqRel);
        let is_kept = turnstile.spare_bells.len() < BELLS_KEPT;
        turnstile.spare_bells.extend(self.bell.take().filter(|_| is_kept));
        drop(turnstile);
        if let Some(next) = next {
            next.wake();
        }
        // As above.
        drop(own);
    }
}

/// How much room a submitter asks for before it wants to be woken.
///
/// One place is what it needs. But where places come free every few nanoseconds, being woken for each of them costs more than
/// the work itself. So a thread that was woken soon asks for twice as much the next time, and one that had to
/// wait long asks for a single place again. Tasks ask for one: there may be many of them, and each has one message.
#[derive(Debug)]
pub(crate) struct Appetite(AtomicU64);

/// A wait shorter than this is not worth its wake-up, which costs about as much.
const SHORT_WAIT: Duration = Duration::from_micros(100);

/// Who has asked for more than a place looks by itself after this time: times may have become slow with fewer than that released, and a worker that has met a handler
/// that does not return announces nothing. Many times the wait by which it would ask for less, and not noticed by a person.
const GREEDY_WAIT: Duration = Duration::from_millis(1);

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

    /// How long a submitter sleeps that has asked for so many places, and has so much time.
    pub(crate) fn patience(asked: u64, left: Option<Duration>) -> Option<Duration> {
        if asked > 1 { Some(left.map_or(GREEDY_WAIT, |left| left.min(GREEDY_WAIT))) } else { left }
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
