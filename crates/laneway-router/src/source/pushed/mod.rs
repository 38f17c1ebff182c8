//! What sources have in common whose brokers push: messages come when the broker likes, stay the connection's until they are acknowledged, and go back
//! all together when it ends.
//!
//! Such a broker has no leases, and what it calls giving back loses the order. So messages lie on a `Shelf` (`shelf.rs`) in this process between their
//! arrival and their acknowledgement: there they are leased, delayed and given back, in order. The broker is told of two things only: that a message is
//! done, or that everything goes back, by closing the subscription.
//!
//! A source of this kind has a *driver*, a task that connects, subscribes and reads. [`Pushed`] is between it and the callers of the source.
//!
//! # Letting go
//!
//! Some brokers give a queue, or a group, to one subscription at a time. Who holds it without need keeps others from it, so a subscription is closed, and the
//! next in line gets everything in order,
//!
//! * when a lease has run out: whoever had the message is not there any more;
//! * when nobody has asked for messages, and none is leased or delayed, for a while (*linger*);
//! * when there are several, and others stand by that have none; then it is *recalled* first: nothing more of it is handed out, and what no pool has begun comes back. What is under way is
//!   waited for, but not for ever, since nobody is served meanwhile: one that a call, a parked group or a paused pool keeps is kept;
//! * when an acknowledgement could not be sent, although the subscription goes on.
//!
//! # When a connection ends
//!
//! What came over it is the broker's again, whoever has ended it, and nothing of it can be settled any more. The pools hear of that at once ([`Pushed::losses`]), because somebody else may have
//! it from then on: the broker gives it to the next in line as soon as it misses this instance. There is one exception. Where connecting is *refused*, nobody listens in the broker's place:
//! its process is away, and gives nothing to anybody. Until there is one again, or connecting fails in another way, what is held may go on as far as its lease goes; to give it all
//! back would only make it wait. A broker that cannot be reached, or that has fallen silent, is not away as far as anybody knows.

mod long;
mod shelf;

pub(crate) use long::{LongTexts, Weight, Width};
pub(crate) use shelf::{Arrival, Copied, Fingerprint, Memory, Taken};

use std::hash::BuildHasher;
use std::io::ErrorKind;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::{Delivery, Disposal, Receipt, Settled, SourceError, Wants};
use shelf::Shelf;

/// No question to a broker may take longer.
pub(crate) const ANSWER: Duration = Duration::from_secs(15);

/// A connection that has lasted for so long was good; the next failure is the first again.
const LASTING: Duration = Duration::from_secs(10);

/// Whoever refuses connections says so at once. A place that does not answer within this time is not known to refuse them.
const REFUSAL: Duration = Duration::from_millis(250);

/// Why a message was given up is said in so many bytes, at most.
const REASON_BYTES_MAX: usize = 1_024;

/// Longer waits than this are as good as endless, and fit every clock.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// What a driver and the callers of its source share.
pub(crate) struct Pushed<T> {
    shelf: Mutex<Shelf<T>>,
    memory: Arc<Mutex<Memory>>,
    /// Told when a claim should look again.
    stirred: Notify,
    /// Told when the driver should.
    driver: Notify,
    /// Told when it is closed, and nothing else: whoever waits for that is not woken by every arrival.
    closing: Notify,
    /// Callers that wait for the broker.
    wanting: AtomicUsize,
    /// Somebody has asked since the driver last looked.
    asked: AtomicBool,
    /// Something was taken off the shelf, and nobody knows whether the broker has heard of it.
    doubt: AtomicBool,
    /// There is a connection.
    connected: AtomicBool,
    /// How often something that was leased has gone with its subscription, as far as the pools are to know.
    losses: AtomicU64,
    /// Something has gone with the connection, and the pools have not heard of it yet: the broker is away, as far as is known.
    gone: AtomicBool,
    /// Host and port of the broker.
    door: (String, u16),
    /// Why there is none.
    trouble: Mutex<Option<SourceError>>,
    closed: AtomicBool,
    /// The driver has ended.
    ended: AtomicBool,
}

/// What should be let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LetGo {
    /// One subscription: a lease has run out, or it is drained.
    Part(usize),
    /// All of them: nobody is there.
    All,
}

/// How a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It was ended here, or nothing was heard of the broker: it is there, as far as anybody knows, and serves the next in line.
    LetGo,
    /// It was closed, or could not be made: perhaps the broker itself is away.
    Closed,
}

/// What became of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acknowledged {
    /// It was sent: the message is done.
    Done,
    /// It was sent: the message is elsewhere.
    PutAside,
    /// It was not sent, or nobody knows.
    NotSent,
}

impl Acknowledged {
    pub(crate) fn of(disposal: &Disposal, sent: bool) -> Self {
        match (sent, disposal) {
            (false, _) => Acknowledged::NotSent,
            (true, Disposal::Done) => Acknowledged::Done,
            (true, _) => Acknowledged::PutAside,
        }
    }
}

/// While it lives, somebody wants something of the broker.
pub(crate) struct Want<'a, T>(&'a Pushed<T>);

impl<T> Drop for Want<'_, T> {
    fn drop(&mut self) {
        self.0.wanting.fetch_sub(1, SeqCst);
        self.0.driver.notify_waiters();
    }
}

impl<T> Pushed<T> {
    /// With so many subscriptions, at a broker with this host and port.
    pub(crate) fn new(parts: usize, memory: Arc<Mutex<Memory>>, door: (String, u16)) -> Self {
        Pushed {
            shelf: Mutex::new(Shelf::new(parts)),
            memory,
            stirred: Notify::new(),
            driver: Notify::new(),
            closing: Notify::new(),
            wanting: AtomicUsize::new(0),
            asked: AtomicBool::new(false),
            doubt: AtomicBool::new(false),
            connected: AtomicBool::new(false),
            losses: AtomicU64::new(0),
            gone: AtomicBool::new(false),
            door,
            trouble: Mutex::default(),
            closed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf<T>> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ── for callers ────────────────────────────────────────────────────────────────────────────────────────────────

    /// Hands out what may go, or waits for it. What is handed out is returned at once, so that dropping the future loses nothing.
    pub(crate) async fn claim(&self, wants: Wants) -> Result<Vec<Delivery>, SourceError> {
        let _want = self.want();
        let deadline = Instant::now() + wants.wait.min(WAIT_MAX);
        loop {
            let mut stirred = pin!(self.stirred.notified());
            stirred.as_mut().enable();
            if self.is_closed() {
                return Err(SourceError::Closed);
            }
            let now = Instant::now();
            let (handed, look) = self.shelf().claim(wants.most, wants.lease.min(WAIT_MAX), now);
            if !handed.is_empty() || wants.most == 0 {
                return Ok(handed);
            }
            if let Some(trouble) = self.trouble() {
                return Err(trouble);
            }
            if now >= deadline {
                return Ok(Vec::new());
            }
            let _ = timeout_at(look.map_or(deadline, |look| look.min(deadline)), stirred).await;
        }
    }

    /// Renews leases.
    pub(crate) fn extend(&self, receipts: &[Receipt], lease: Duration) -> Result<Vec<Settled>, SourceError> {
        if self.is_closed() {
            return Err(SourceError::Closed);
        }
        let (mut shelf, now) = (self.shelf(), Instant::now());
        Ok(receipts.iter().map(|receipt| shelf.extend(receipt, lease.min(WAIT_MAX), now)).collect())
    }

    /// See [`Source::losses`](super::Source::losses).
    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(SeqCst)
    }

    /// Which receipts are still good.
    pub(crate) fn are_good(&self, receipts: &[Receipt]) -> Vec<bool> {
        let shelf = self.shelf();
        receipts.iter().map(|receipt| shelf.is_good(receipt)).collect()
    }

    /// Begins to settle deliveries: what goes back is put back, and has its answer; the rest is taken off the shelf, to be acknowledged, each with its place in the
    /// question. Without an answer a receipt is stale.
    pub(crate) fn begin(&self, disposals: &[(Receipt, Disposal)]) -> (Vec<Settled>, Vec<(usize, Taken<T>)>) {
        let (mut shelf, now) = (self.shelf(), Instant::now());
        let mut answers = vec![Settled::Stale; disposals.len()];
        let mut taken = Vec::with_capacity(disposals.len());
        for (place, (receipt, disposal)) in disposals.iter().enumerate() {
            match disposal {
                Disposal::GiveBack { delay } => {
                    answers[place] = shelf.give_back(receipt, (*delay).min(WAIT_MAX), now);
                }
                _ => taken.extend(shelf.take(receipt, now).map(|taken| (place, taken))),
            }
        }
        (answers, taken)
    }

    /// What became of acknowledgements. Where one could not be sent the broker has to hand out the message again, so everything is let go. What is done is
    /// remembered; what was put aside is not, since it may be published again as it was.
    pub(crate) fn acknowledged(&self, all: impl IntoIterator<Item = (Taken<T>, Acknowledged)>) {
        let (mut shelf, mut memory) = (self.shelf(), self.memory());
        for (taken, what) in all {
            shelf.told(taken.part);
            match what {
                Acknowledged::Done => memory.note_done(taken.fingerprint),
                Acknowledged::PutAside => {}
                Acknowledged::NotSent => {
                    memory.remember(taken.fingerprint, taken.id);
                    self.doubt.store(true, SeqCst);
                }
            }
        }
        drop((shelf, memory));
        self.settled();
    }

    /// Something was settled: what waits may go, and what nobody needs any more may be let go.
    pub(crate) fn settled(&self) {
        self.stirred.notify_waiters();
        self.driver.notify_waiters();
    }

    /// Waiting and leased.
    pub(crate) fn counts(&self) -> (usize, usize) {
        self.shelf().counts()
    }

    /// Says that somebody wants something of the broker.
    pub(crate) fn want(&self) -> Want<'_, T> {
        self.wanting.fetch_add(1, SeqCst);
        self.asked.store(true, SeqCst);
        self.driver.notify_waiters();
        Want(self)
    }

    /// Why there is no connection, if there is none.
    pub(crate) fn trouble(&self) -> Option<SourceError> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether there is a connection.
    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(SeqCst)
    }

    /// Waits until there is a connection to the broker at this place, or the first attempt has failed.
    pub(crate) async fn connect(&self, place: &str) -> Result<(), SourceError> {
        let _want = self.want();
        let is_known =
            |pushed: &Self| pushed.is_connected() || pushed.trouble().is_some() || pushed.has_ended();
        self.until(Instant::now() + 2 * ANSWER, is_known).await;
        match (self.is_connected(), self.trouble()) {
            (true, _) => Ok(()),
            (false, Some(trouble)) => Err(trouble),
            (false, None) => Err(SourceError::Unavailable(format!("{place} does not answer"))),
        }
    }

    /// Closes, and waits until the driver has ended.
    pub(crate) async fn close_and_wait(&self) {
        self.close();
        self.until(Instant::now() + ANSWER, Self::has_ended).await;
    }

    /// Nothing is handed out any more, and the driver ends.
    pub(crate) fn close(&self) {
        self.closed.store(true, SeqCst);
        self.stirred.notify_waiters();
        self.driver.notify_waiters();
        self.closing.notify_waiters();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// Waits until the driver has ended, or is ready, or has failed.
    pub(crate) async fn until(&self, deadline: Instant, what: impl Fn(&Self) -> bool) -> bool {
        loop {
            let mut stirred = pin!(self.stirred.notified());
            stirred.as_mut().enable();
            if what(self) {
                return true;
            }
            if timeout_at(deadline, stirred).await.is_err() {
                return what(self);
            }
        }
    }

    /// Whether the driver has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(SeqCst)
    }

    // ── for the driver ─────────────────────────────────────────────────────────────────────────────────────────────

    /// The life of a driver: whenever somebody wants something, it connects and holds the connection to its end, until the source is closed. No error
    /// means that everything was let go.
    pub(crate) async fn drive<F>(&self, hold: impl Fn() -> F)
    where
        F: Future<Output = Result<(), SourceError>>,
    {
        let mut failures = 0;
        while self.wanted().await {
            let begun = Instant::now();
            let held = caught(hold()).await;
            self.connected.store(false, SeqCst);
            let Err(error) = held else {
                // Whoever asked before that has been answered.
                self.asked.store(false, SeqCst);
                continue;
            };
            // It has been, unless it was a panic, or there was no connection.
            self.lost(Ending::Closed).await;
            failures = if begun.elapsed() > LASTING { 0 } else { failures + 1 };
            self.failed(error);
            tokio::select! {
                () = tokio::time::sleep(pause(failures)) => {}
                () = self.until_closed() => {}
            }
        }
        self.ended.store(true, SeqCst);
        self.stirred.notify_waiters();
    }

    /// Waits until somebody wants something. False when the source was closed.
    pub(crate) async fn wanted(&self) -> bool {
        loop {
            let mut told = pin!(self.driver.notified());
            told.as_mut().enable();
            if self.is_closed() {
                return false;
            }
            if self.asked.swap(false, SeqCst) || self.wanting.load(SeqCst) > 0 {
                return true;
            }
            told.await;
        }
    }

    /// Whether somebody waits for the broker now.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanting.load(SeqCst) > 0
    }

    /// Waits until the source is closed.
    pub(crate) async fn until_closed(&self) {
        let mut closing = pin!(self.closing.notified());
        closing.as_mut().enable();
        if !self.is_closed() {
            closing.await;
        }
    }

    /// Waits until something should be let go. Nothing of it is handed out from then on.
    pub(crate) async fn until_let_go(&self, linger: Duration) -> LetGo {
        let mut at_rest_since = None;
        loop {
            let mut told = pin!(self.driver.notified());
            told.as_mut().enable();
            match self.look(linger, &mut at_rest_since) {
                Ok(what) => return what,
                Err(until) => drop(timeout_at(until, told).await),
            }
        }
    }

    /// What should be let go, or when to look again. Under one lock, so that no claim takes a message in between: whoever claims has said so before.
    fn look(&self, linger: Duration, at_rest_since: &mut Option<Instant>) -> Result<LetGo, Instant> {
        let (mut shelf, now) = (self.shelf(), Instant::now());
        let first = shelf.first_lease();
        if let Some(part) = shelf.expired(now).or_else(|| shelf.drained()) {
            shelf.drain(part, now);
            return Ok(LetGo::Part(part));
        }
        let is_idle = shelf.is_at_rest() && !self.is_wanted();
        *at_rest_since = if is_idle { at_rest_since.or(Some(now)) } else { None };
        let rests = at_rest_since.map(|since| since + linger);
        if rests.is_some_and(|until| until <= now) || self.doubt.swap(false, SeqCst) {
            shelf.drain_all(now);
            return Ok(LetGo::All);
        }
        Err(rests.or(first).unwrap_or(now + WAIT_MAX))
    }

    /// A subscription begins.
    pub(crate) fn open(&self, part: usize) -> u64 {
        self.shelf().open(part)
    }

    /// Puts arrivals on the shelf. Those that come back are done already, and are to be acknowledged once more.
    pub(crate) fn arrive(&self, arrivals: impl IntoIterator<Item = Arrival<T>>) -> Vec<T> {
        let micros = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let now = Instant::now();
        let (mut shelf, mut memory) = (self.shelf(), self.memory());
        let again = arrivals
            .into_iter()
            .filter_map(|arrival| shelf.arrive(arrival, &mut memory, micros, now))
            .collect();
        drop((shelf, memory));
        self.stirred.notify_waiters();
        again
    }

    /// What came over a subscription is not ours any more.
    #[cfg(any(feature = "rabbitmq", test))]
    pub(crate) fn forget(&self, part: usize) {
        let (mut shelf, mut memory) = (self.shelf(), self.memory());
        if shelf.forget(part, &mut memory, Instant::now()) {
            // Under the lock that makes the receipts stale: who sees the number sees that, too.
            self.losses.fetch_add(1, SeqCst);
        }
    }

    /// Nothing more of a subscription is handed out, and what has not begun comes back; it is let go when all that was handed out is back.
    #[cfg(any(feature = "rabbitmq", test))]
    pub(crate) fn recall(&self, part: usize) {
        let mut shelf = self.shelf();
        if shelf.recall(part, Instant::now()) {
            self.losses.fetch_add(1, SeqCst);
        }
        drop(shelf);
        self.driver.notify_waiters();
    }

    /// A subscription that was recalled is not let go, if it has not been. True if it was still to be.
    #[cfg(any(feature = "rabbitmq", test))]
    pub(crate) fn keep(&self, part: usize) -> bool {
        let was_recalled = self.shelf().keep(part, Instant::now());
        self.stirred.notify_waiters();
        was_recalled
    }

    /// The subscriptions over which something has come, and that are not on their way out.
    #[cfg(feature = "rabbitmq")]
    pub(crate) fn served(&self) -> Vec<usize> {
        self.shelf().served()
    }

    /// There is a connection.
    pub(crate) fn recovered(&self) {
        self.doubt.store(false, SeqCst);
        self.tell_losses();
        self.connected.store(true, SeqCst);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.stirred.notify_waiters();
    }

    /// There is none any more: what the broker gives to others is not ours. The pools hear of it, unless the broker is away itself.
    pub(crate) async fn lost(&self, how: Ending) {
        self.connected.store(false, SeqCst);
        self.forget_all();
        let is_away = how == Ending::Closed && self.gone.load(SeqCst) && self.is_refused().await;
        if !is_away {
            self.tell_losses();
        }
    }

    fn forget_all(&self) {
        let (mut shelf, mut memory, now) = (self.shelf(), self.memory(), Instant::now());
        for part in 0..shelf.parts() {
            if shelf.forget(part, &mut memory, now) {
                self.gone.store(true, SeqCst);
            }
        }
    }

    /// Whether nobody listens in the broker's place.
    async fn is_refused(&self) -> bool {
        let (host, port) = &self.door;
        let knocked = timeout(REFUSAL, TcpStream::connect((host.as_str(), *port))).await;
        matches!(knocked, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused)
    }

    fn tell_losses(&self) {
        if self.gone.swap(false, SeqCst) {
            self.losses.fetch_add(1, SeqCst);
        }
    }

    /// Waits until no acknowledgement of a subscription that is not ours any more is under way: then all that could not be sent is remembered.
    #[cfg(feature = "rabbitmq")]
    pub(crate) async fn until_settled(&self, part: usize) {
        self.until(Instant::now() + ANSWER, |pushed| !pushed.shelf().is_settling(part)).await;
    }

    fn failed(&self, error: SourceError) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.stirred.notify_waiters();
    }
}

impl<T: Clone> Pushed<T> {
    /// What is to be copied elsewhere before it is settled, unless it has been.
    pub(crate) fn copy(&self, receipt: &Receipt) -> Option<Copied<T>> {
        self.shelf().copy(receipt)
    }

    /// Copies of these are where they should be: if the question fails as a whole and is asked again, no more are made.
    #[cfg(feature = "rabbitmq")]
    pub(crate) fn note_copied<'a>(&self, receipts: impl Iterator<Item = &'a Receipt>) {
        let mut shelf = self.shelf();
        receipts.for_each(|receipt| shelf.note_copied(receipt));
    }
}

/// The fingerprint of a message: of its id, which some publishers use twice, its group and its text.
pub(crate) fn fingerprint(id: Option<&str>, group: Option<&str>, text: &[u8]) -> Fingerprint {
    static SEED: OnceLock<foldhash::quality::RandomState> = OnceLock::new();
    let seed = SEED.get_or_init(foldhash::quality::RandomState::default);
    Fingerprint { hash: seed.hash_one((id, group, text)), unique: id.is_some() }
}

/// As much of a reason as a letter carries.
pub(crate) fn brief(reason: &str) -> &str {
    super::cut(reason, REASON_BYTES_MAX)
}

/// A panic is a failure like others: a driver that ended with it would leave a source that says nothing for ever.
pub(crate) async fn caught(held: impl Future<Output = Result<(), SourceError>>) -> Result<(), SourceError> {
    AssertUnwindSafe(held).catch_unwind().await.unwrap_or_else(|panic| {
        let told = panic.downcast_ref::<String>().map(String::as_str);
        let told = told.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no word of it");
        Err(SourceError::Unavailable(format!("the reader has panicked, and begins again: {told}")))
    })
}

/// How long a driver waits after its n-th failure in a row: from a tenth of a second to ten, not all instances at once.
fn pause(failures: u32) -> Duration {
    let longest = Duration::from_millis(100 << failures.min(7)).min(Duration::from_secs(10));
    longest.mul_f64(0.5 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(9);

    /// A place where nobody listens.
    async fn nowhere() -> (String, u16) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        ("127.0.0.1".to_owned(), listener.local_addr().expect("an address").port())
    }

    /// One message comes over a subscription, and is claimed.
    async fn claimed(pushed: &Pushed<u64>, part: usize, number: u64) -> Receipt {
        arrive(pushed, part, number);
        let wants = Wants { most: 1, wait: Duration::ZERO, lease: LEASE };
        pushed.claim(wants).await.expect("it is there")[0].receipt.clone()
    }

    fn arrive(pushed: &Pushed<u64>, part: usize, number: u64) {
        let epoch = pushed.open(part);
        let known = pushed.arrive([Arrival {
            part,
            epoch,
            fingerprint: Fingerprint { hash: number, unique: true },
            perhaps_again: false,
            earlier: 0,
            group: None,
            text: [].into(),
            not_before: None,
            tag: number,
        }]);
        assert!(known.is_empty());
    }

    #[tokio::test]
    async fn a_subscription_that_goes_with_something_leased_is_a_loss_and_no_other() {
        let pushed = Pushed::new(2, Arc::default(), nowhere().await);
        let receipts = [claimed(&pushed, 0, 1).await];
        arrive(&pushed, 1, 2);
        pushed.forget(1);
        assert_eq!((pushed.losses(), pushed.are_good(&receipts)), (0, vec![true]), "nothing of it was out");
        pushed.forget(0);
        assert_eq!((pushed.losses(), pushed.are_good(&receipts)), (1, vec![false]));
        pushed.lost(Ending::LetGo).await;
        assert_eq!(pushed.losses(), 1, "nothing was out");
        let receipts = [claimed(&pushed, 0, 3).await];
        pushed.lost(Ending::LetGo).await;
        assert_eq!((pushed.losses(), pushed.are_good(&receipts)), (2, vec![false]), "at once");
    }

    #[tokio::test]
    async fn what_goes_with_a_connection_is_a_loss_at_once_unless_nobody_listens_where_the_broker_was() {
        let door = nowhere().await;
        let pushed = Pushed::new(1, Arc::default(), door.clone());
        let receipts = [claimed(&pushed, 0, 1).await];
        pushed.lost(Ending::Closed).await;
        assert_eq!(
            (pushed.losses(), pushed.are_good(&receipts)),
            (0, vec![false]),
            "nobody has it meanwhile"
        );
        pushed.lost(Ending::Closed).await;
        assert_eq!(pushed.losses(), 0, "it is still away");
        pushed.recovered();
        assert_eq!(pushed.losses(), 1, "it is there, and may have given it to others");

        claimed(&pushed, 0, 2).await;
        pushed.lost(Ending::Closed).await;
        assert_eq!(pushed.losses(), 1);
        let listener = tokio::net::TcpListener::bind(door).await.expect("its port is free");
        pushed.lost(Ending::Closed).await;
        assert_eq!(pushed.losses(), 2, "somebody listens, but there is no connection");
        pushed.recovered();
        assert_eq!(pushed.losses(), 2, "it was told");
        claimed(&pushed, 0, 3).await;
        pushed.lost(Ending::Closed).await;
        assert_eq!(pushed.losses(), 3, "the broker has closed it, and is there");
        drop(listener);
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_panics_says_so_and_begins_again() {
        let pushed = Arc::new(Pushed::<()>::new(1, Arc::default(), nowhere().await));
        let driven = Arc::clone(&pushed);
        let driver = tokio::spawn(async move {
            let lives = AtomicUsize::new(0);
            let hold = || async {
                if lives.fetch_add(1, SeqCst) == 0 {
                    panic!("a name that is too long");
                }
                driven.recovered();
                driven.until_closed().await;
                Ok(())
            };
            driven.drive(hold).await;
        });
        let SourceError::Unavailable(said) = pushed.connect("there").await.expect_err("it has panicked")
        else {
            panic!("it begins again by itself")
        };
        assert!(said.contains("a name that is too long"), "{said}");
        let _want = pushed.want();
        assert!(pushed.until(Instant::now() + LASTING, Pushed::is_connected).await, "it begins again");
        pushed.close_and_wait().await;
        driver.await.expect("it ends as it should");
    }
}
