//! What the tests of the router share: a log of every call, a mediator that follows a script, and a source with faults.
//!
//! The source is the embedded queue, which keeps the promises of `source/mod.rs` and, committing inline, runs in virtual time; [`Faulty`] stands
//! between it and the router and fails, repeats itself or answers late as it is told. The [`Log`] knows of every call when it began and ended, and
//! notes at once when two calls of one group overlap. [`Rig::verify`] is where a test fails: contiguous order, exact counts, nothing twice.
//!
//! Nothing here sleeps to let something happen: waits end by an event, or fail at [`LONG`] of virtual time.

#![allow(dead_code, reason = "no test file uses all of it")]

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use laneway_router::mediator::{Call, Mediator, Verdict};
use laneway_router::message::{DispatchMode, MediationType, Message, Priority};
use laneway_router::pool::PoolSettings;
use laneway_router::router::{DEFAULT_POOL, Router, SourceSettings};
use laneway_router::source::embedded::{
    Commit, EmbeddedQueue, EmbeddedStore, Options, Publication, QueueOptions, Ungrouped,
};
use laneway_router::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout};

/// No test waits longer than this for anything, of the time that the test lives in.
pub(crate) const LONG: Duration = Duration::from_secs(7_200);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One call, as a script sees it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// The key of its lane; empty for what is not ordered.
    pub(crate) group: String,
    /// Which message of its group, from 0.
    pub(crate) number: u64,
    pub(crate) id: String,
    pub(crate) pool: String,
    pub(crate) sequence: u64,
    pub(crate) attempt: u32,
}

impl Seen {
    fn of(call: &Call<'_>) -> Self {
        let number = call.message.id.rsplit('#').next().and_then(|number| number.parse().ok());
        Seen {
            group: call.key.to_owned(),
            number: number.expect("the rig numbers its messages"),
            id: call.message.id.clone(),
            pool: call.message.pool_code.clone(),
            sequence: call.sequence,
            attempt: call.attempt,
        }
    }
}

/// What happened to a call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum What {
    Began,
    Ended(Verdict),
    /// It panicked, or was dropped in the middle.
    Broke,
}

#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) at: Instant,
    pub(crate) seen: Seen,
    pub(crate) what: What,
}

#[derive(Default)]
struct Pages {
    events: Vec<Event>,
    busy: HashMap<String, String>,
    running: usize,
    running_most: usize,
    violations: Vec<String>,
}

/// Every call of a test.
#[derive(Default)]
pub(crate) struct Log {
    pages: Mutex<Pages>,
    pub(crate) changed: Notify,
}

impl Log {
    fn begin(self: &Arc<Self>, seen: &Seen) -> Under {
        let mut pages = lock(&self.pages);
        if !seen.group.is_empty()
            && let Some(other) = pages.busy.insert(seen.group.clone(), seen.id.clone())
        {
            pages.violations.push(format!("{} began while {other} was under way", seen.id));
        }
        pages.running += 1;
        pages.running_most = pages.running_most.max(pages.running);
        pages.events.push(Event { at: Instant::now(), seen: seen.clone(), what: What::Began });
        drop(pages);
        self.changed.notify_waiters();
        Under { log: Arc::clone(self), seen: seen.clone(), what: What::Broke }
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        lock(&self.pages).events.clone()
    }

    /// What was done, in order: the numbers of a group.
    pub(crate) fn done(&self, group: &str) -> Vec<u64> {
        let is_done = |event: &&Event| event.seen.group == group && event.what == What::Ended(Verdict::Done);
        lock(&self.pages).events.iter().filter(is_done).map(|event| event.seen.number).collect()
    }

    /// What was begun, in order: number and attempt of each call of a group.
    pub(crate) fn begun(&self, group: &str) -> Vec<(u64, u32)> {
        let pages = lock(&self.pages);
        let of_group = |event: &&Event| event.seen.group == group && event.what == What::Began;
        pages.events.iter().filter(of_group).map(|event| (event.seen.number, event.seen.attempt)).collect()
    }

    /// When the calls began, in milliseconds since an instant.
    pub(crate) fn starts(&self, since: Instant) -> Vec<u64> {
        let pages = lock(&self.pages);
        let began = pages.events.iter().filter(|event| event.what == What::Began);
        began.map(|event| (event.at - since).as_millis() as u64).collect()
    }

    pub(crate) fn count(&self, what: impl Fn(&Event) -> bool) -> usize {
        lock(&self.pages).events.iter().filter(|event| what(event)).count()
    }

    pub(crate) fn all_done(&self) -> usize {
        self.count(|event| event.what == What::Ended(Verdict::Done))
    }

    pub(crate) fn running(&self) -> usize {
        lock(&self.pages).running
    }

    /// How many calls were under way at once, at most.
    pub(crate) fn running_most(&self) -> usize {
        lock(&self.pages).running_most
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        lock(&self.pages).violations.clone()
    }
}

/// A call under way.
struct Under {
    log: Arc<Log>,
    seen: Seen,
    what: What,
}

impl Under {
    fn end(mut self, verdict: Verdict) {
        self.what = What::Ended(verdict);
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        let mut pages = lock(&self.log.pages);
        pages.running -= 1;
        pages.busy.remove(&self.seen.group);
        let what = std::mem::replace(&mut self.what, What::Broke);
        pages.events.push(Event { at: Instant::now(), seen: self.seen.clone(), what });
        drop(pages);
        self.log.changed.notify_waiters();
    }
}

pub(crate) type Script = Arc<dyn Fn(Seen) -> BoxFuture<'static, Verdict> + Send + Sync>;

/// A script from a closure.
pub(crate) fn script<F, R>(script: F) -> Script
where
    F: Fn(Seen) -> R + Send + Sync + 'static,
    R: Future<Output = Verdict> + Send + 'static,
{
    Arc::new(move |seen| Box::pin(script(seen)))
}

/// Everything is done after this time.
pub(crate) fn takes(time: Duration) -> Script {
    script(move |_| async move {
        tokio::time::sleep(time).await; // paced: a call takes its time
        Verdict::Done
    })
}

/// The first so many attempts fail, the next succeeds.
pub(crate) fn fails(times: u32) -> Script {
    script(move |seen| async move { if seen.attempt <= times { again() } else { Verdict::Done } })
}

pub(crate) fn again() -> Verdict {
    Verdict::Again { delay: None, reason: "it said so".to_owned() }
}

pub(crate) fn wait(delay: Duration) -> Verdict {
    Verdict::Wait { delay, called: true, reason: "patience".to_owned() }
}

/// The same without a call: a breaker is open.
pub(crate) fn held(delay: Duration) -> Verdict {
    Verdict::Wait { delay, called: false, reason: "the breaker is open".to_owned() }
}

pub(crate) fn never() -> Verdict {
    Verdict::Final { reason: "never".to_owned() }
}

/// Calls wait here until the test lets so many of them pass.
#[derive(Clone)]
pub(crate) struct Gate(Arc<Semaphore>);

impl Gate {
    pub(crate) fn new() -> Self {
        Gate(Arc::new(Semaphore::new(0)))
    }

    pub(crate) fn open(&self, calls: usize) {
        self.0.add_permits(calls);
    }

    pub(crate) fn open_for_good(&self) {
        self.0.add_permits(1_000_000);
    }

    pub(crate) async fn pass(&self) {
        self.0.acquire().await.expect("never closed").forget();
    }

    pub(crate) fn script(&self) -> Script {
        let gate = self.clone();
        script(move |_| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Verdict::Done
            }
        })
    }
}

struct Scripted {
    log: Arc<Log>,
    script: Script,
}

impl Mediator for Scripted {
    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict> {
        let seen = Seen::of(&call);
        Box::pin(async move {
            let under = self.log.begin(&seen);
            let verdict = (self.script)(seen).await;
            under.end(verdict.clone());
            verdict
        })
    }
}

/// What a source does wrong.
#[derive(Default)]
pub(crate) struct Faults {
    /// So many of the next claims, settlements and renewals fail.
    pub(crate) failing_claims: usize,
    pub(crate) failing_settles: usize,
    pub(crate) failing_extends: usize,
    /// So many of the next settlements are done, and the answer is lost.
    pub(crate) lost_answers: usize,
    /// A settlement of any of these fails, with all that is in one question with it.
    pub(crate) poisoned: HashSet<Receipt>,
    /// The next claim hands out these before anything else: copies of what was handed out before.
    pub(crate) copies: VecDeque<Delivery>,
    /// Before anything else, the next claim hands out again so many of those that are out.
    pub(crate) repeats: usize,
    /// What is out: handed out and not settled.
    pub(crate) out: HashMap<Receipt, Delivery>,
    /// The answer to a claim stays here until the gate opens.
    pub(crate) late_claims: Option<Gate>,
    /// Settlements do not begin until the gate opens.
    pub(crate) late_settles: Option<Gate>,
    /// Settlements are done, and their answers stay here until the gate opens.
    pub(crate) late_answers: Option<Gate>,
    /// The source says that it is closed.
    pub(crate) closed: bool,
    /// All that was handed out, by its identity.
    pub(crate) handed_out: BTreeMap<u64, Delivery>,
    /// How many deliveries were asked for at most.
    pub(crate) wanted_most: usize,
    pub(crate) claims: usize,
}

/// A source with faults around a good one.
pub(crate) struct Faulty {
    inner: EmbeddedQueue,
    pub(crate) faults: Mutex<Faults>,
    pub(crate) changed: Notify,
}

fn unavailable() -> SourceError {
    SourceError::Unavailable("a fault".to_owned())
}

/// Counts down to zero; true for every step.
fn strikes(count: &mut usize) -> bool {
    let strikes = *count > 0;
    *count = count.saturating_sub(1);
    strikes
}

impl Faulty {
    pub(crate) fn new(inner: EmbeddedQueue) -> Arc<Self> {
        Arc::new(Faulty { inner, faults: Mutex::default(), changed: Notify::new() })
    }

    pub(crate) fn faults(&self) -> MutexGuard<'_, Faults> {
        lock(&self.faults)
    }

    fn gate(&self, which: impl Fn(&Faults) -> &Option<Gate>) -> Option<Gate> {
        which(&self.faults()).clone()
    }

    async fn claim_badly(&self, wants: Wants) -> Result<Vec<Delivery>, SourceError> {
        {
            let mut faults = self.faults();
            faults.claims += 1;
            faults.wanted_most = faults.wanted_most.max(wants.most);
        }
        self.changed.notify_waiters();
        if self.faults().closed {
            return Err(SourceError::Closed);
        }
        if strikes(&mut self.faults().failing_claims) {
            return Err(unavailable());
        }
        let mut copies: Vec<_> = self.faults().copies.drain(..).collect();
        {
            // The last ones of those that are out, in their order: a source keeps that also when it repeats itself.
            let faults = &mut *self.faults();
            let mut out: Vec<_> = faults.out.values().cloned().collect();
            out.sort_by_key(|delivery| delivery.id);
            copies.extend(out.into_iter().rev().take(std::mem::take(&mut faults.repeats)).rev());
        }
        if !copies.is_empty() {
            return Ok(copies);
        }
        let claimed = self.inner.claim(wants).await?;
        for delivery in &claimed {
            let faults = &mut *self.faults();
            faults.handed_out.insert(delivery.id, delivery.clone());
            faults.out.retain(|_, other| other.id != delivery.id);
            faults.out.insert(delivery.receipt.clone(), delivery.clone());
        }
        self.changed.notify_waiters();
        if let Some(gate) = self.gate(|faults| &faults.late_claims)
            && !claimed.is_empty()
        {
            gate.pass().await;
        }
        Ok(claimed)
    }

    async fn settle_badly(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        if let Some(gate) = self.gate(|faults| &faults.late_settles) {
            gate.pass().await;
        }
        if self.faults().closed {
            return Err(SourceError::Closed);
        }
        if strikes(&mut self.faults().failing_settles) {
            return Err(unavailable());
        }
        if disposals.iter().any(|(receipt, _)| self.faults().poisoned.contains(receipt)) {
            return Err(SourceError::Broken("poison".to_owned()));
        }
        // Before it is told: from then on it hands out nothing of these by the old receipt.
        disposals.iter().for_each(|(receipt, _)| drop(self.faults().out.remove(receipt)));
        let settled = self.inner.settle(disposals).await;
        self.changed.notify_waiters();
        if let Some(gate) = self.gate(|faults| &faults.late_answers) {
            gate.pass().await;
        }
        if strikes(&mut self.faults().lost_answers) { Err(unavailable()) } else { settled }
    }
}

impl Source for Faulty {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        Box::pin(self.claim_badly(wants))
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        Box::pin(self.settle_badly(disposals))
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        if strikes(&mut self.faults().failing_extends) {
            return Box::pin(futures_util::future::ready(Err(unavailable())));
        }
        self.inner.extend(receipts, lease)
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        self.inner.depth()
    }
}

/// A queue, a router on it, and what it did.
pub(crate) struct Rig {
    pub(crate) router: Router,
    pub(crate) store: EmbeddedStore,
    pub(crate) queue: EmbeddedQueue,
    pub(crate) source: Arc<Faulty>,
    pub(crate) log: Arc<Log>,
    pub(crate) settings: SourceSettings,
    numbers: Mutex<HashMap<String, u64>>,
}

/// A message of the rig.
pub(crate) fn message(group: &str, number: u64, pool: &str) -> Message {
    Message {
        id: format!("{group}#{number}"),
        pool_code: pool.to_owned(),
        auth_token: None,
        mediation_type: MediationType::Simulated,
        mediation_target: String::new(),
        message_group_id: (!group.is_empty()).then(|| group.to_owned()),
        payload: None,
        headers: BTreeMap::new(),
        priority: Priority::Normal,
        dispatch_mode: DispatchMode::NextOnError,
        deduplication_id: None,
        delay_seconds: None,
    }
}

impl Rig {
    /// A router with this default pool, and a queue as the service makes it. It reads nothing before [`read`](Rig::read).
    pub(crate) fn new(default: PoolSettings, script: Script) -> Self {
        Rig::on(Ungrouped::Serial, default, script)
    }

    /// The same on a queue that keeps messages without a group like this.
    pub(crate) fn on(ungrouped: Ungrouped, default: PoolSettings, script: Script) -> Self {
        let queue = QueueOptions { ungrouped, ..QueueOptions::default() };
        let options = Options { commit: Commit::Inline, queue, ..Options::default() };
        let store = EmbeddedStore::in_memory(options).expect("a store");
        let queue = store.queue("orders").expect("a queue");
        let source = Faulty::new(store.queue("orders").expect("a queue"));
        let log = Arc::new(Log::default());
        let scribe = Arc::clone(&log);
        let make = move |_: &PoolSettings| -> Arc<dyn Mediator> {
            Arc::new(Scripted { log: Arc::clone(&scribe), script: Arc::clone(&script) })
        };
        let router = Router::start(default, Arc::new(make)).expect("a router");
        let settings = SourceSettings { lease: Duration::from_secs(30) };
        Rig { router, store, queue, source, log, settings, numbers: Mutex::default() }
    }

    /// Lets the router read the queue.
    pub(crate) fn read(&self) {
        self.router.add_source(Arc::clone(&self.source) as Arc<dyn Source>, self.settings);
    }

    /// Publishes so many more messages of a group to the default pool.
    pub(crate) async fn publish(&self, group: &str, count: u64) -> Range<u64> {
        self.publish_to(DEFAULT_POOL, group, count, |_| {}).await
    }

    /// Publishes so many more messages of a group, changed as one likes.
    pub(crate) async fn publish_to(
        &self,
        pool: &str,
        group: &str,
        count: u64,
        change: impl Fn(&mut Message),
    ) -> Range<u64> {
        let range = {
            let mut numbers = lock(&self.numbers);
            let next = numbers.entry(group.to_owned()).or_default();
            let first = *next;
            *next += count;
            first..*next
        };
        let messages = range.clone().map(|number| {
            let mut message = message(group, number, pool);
            change(&mut message);
            Publication::of(&message)
        });
        let messages: Vec<_> = messages.collect();
        for some in messages.chunks(10_000) {
            self.queue.publish_many(some.to_vec(), None).await.expect("published");
        }
        range
    }

    /// How many messages of a group were published.
    pub(crate) fn published(&self, group: &str) -> u64 {
        lock(&self.numbers).get(group).copied().unwrap_or(0)
    }

    /// Waits until something is so: looks whenever a call begins or ends, and whenever the source has done something.
    pub(crate) async fn until(&self, what: &str, so: impl Fn(&Rig) -> bool) {
        let wait = async {
            loop {
                let (log, source) = (self.log.changed.notified(), self.source.changed.notified());
                if so(self) {
                    return;
                }
                tokio::select! {
                    () = log => {}
                    () = source => {}
                }
            }
        };
        if timeout(LONG, wait).await.is_err() {
            panic!("waited in vain until {what}: {}", self.state().await);
        }
    }

    async fn state(&self) -> String {
        let (sources, pools) = (self.router.sources().await, self.router.pools());
        let pools: Vec<_> =
            pools.iter().map(|pool| (&pool.code, pool.state, pool.held, pool.counts)).collect();
        let last: Vec<_> = self.log.events().into_iter().rev().take(6).collect();
        format!("sources {sources:?}, pools {pools:?}, last calls {last:?}")
    }

    /// Waits until so many calls have ended well.
    pub(crate) async fn done(&self, calls: usize) {
        self.until(&format!("{calls} are done"), |rig| rig.log.all_done() >= calls).await;
    }

    /// What the queue holds.
    pub(crate) fn depth(&self) -> Depth {
        futures_util::FutureExt::now_or_never(self.queue.depth()).expect("at once").expect("a depth")
    }

    /// Waits until the queue has nothing left but dead letters.
    pub(crate) async fn drained(&self) {
        self.until("the queue is empty", |rig| {
            let depth = rig.depth();
            depth.waiting + depth.leased == 0
        })
        .await;
    }

    /// Every message of these groups was delivered in order, exactly once, and no two calls of a group overlapped.
    pub(crate) fn verify(&self, groups: &[(&str, u64)]) {
        assert_eq!(self.log.violations(), Vec::<String>::new());
        for (group, count) in groups {
            assert_eq!(self.log.done(group), (0..*count).collect::<Vec<_>>(), "group {group:?}");
        }
        let known: HashSet<&str> = groups.iter().map(|(group, _)| *group).collect();
        let strangers = self.log.count(|event| !known.contains(event.seen.group.as_str()));
        assert_eq!(strangers, 0, "calls of other groups");
    }

    /// The first success of each message came in order, whatever came again, and no two calls of a group overlapped.
    pub(crate) fn verify_first(&self, group: &str, count: u64) {
        assert_eq!(self.log.violations(), Vec::<String>::new());
        let mut seen = HashSet::new();
        let first: Vec<u64> =
            self.log.done(group).into_iter().filter(|number| seen.insert(*number)).collect();
        assert_eq!(first, (0..count).collect::<Vec<_>>(), "group {group:?}");
    }

    /// The messages among the dead letters.
    pub(crate) async fn dead(&self) -> Vec<String> {
        let dead = self.queue.dead_letters(0, 10_000).await.expect("dead letters");
        dead.iter().map(|kept| Message::parse(&kept.text).expect("a message").id).collect()
    }

    /// Ends the router.
    pub(crate) async fn end(&self) -> laneway_router::router::RouterReport {
        self.router.shutdown(Duration::from_secs(60)).await
    }
}

/// Room for everything, many slots, short pauses.
pub(crate) fn roomy() -> PoolSettings {
    PoolSettings {
        concurrency: 10,
        capacity: 10_000,
        group_capacity: 10_000,
        backoff: Duration::from_millis(100),
        ..PoolSettings::default()
    }
}
