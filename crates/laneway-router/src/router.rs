//! The router: takes deliveries from its sources, gives each to the pool of its code, and is operated from outside.
//!
//! One intake task per source asks for as much as the roomiest pool could take, and never for more. What does not fit (its pool is full, or its
//! group has its share) goes back to the source for about as long as it takes until there is room, and with it everything behind it in its
//! group, so that nobody overtakes. One keeper per source renews the leases of all that is held.
//!
//! # A group never runs in two places
//!
//! A group is ordered within a pool, so its messages must not be spread over two. Two things could do that, and neither does:
//!
//! * A pool goes while it has messages. It drains first: nothing new is taken in (the source keeps it), and only when it is empty is the
//!   code unknown, and the default pool stands in.
//! * A pool comes while the default pool still has messages that asked for it. It waits for those before it takes any itself.
//!
//! In both cases what would be waited for in vain (groups that are parked, or have to wait for long) goes back to its source, and comes again to the pool
//! that has taken over. A parked group is parked there, too, before its first message can come.
//!
//! For both it matters that nobody is in the middle of taking a message in by what was so a moment ago. The intake holds `routing` to read from
//! looking for the pool until the message is in it; whoever changes what pools there are, or what they do, takes it to write.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use laneway::{Explanation, Snapshot};
use tokio::sync::{Notify, OnceCell, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::mediator::{Mediator, MetricsSnapshot};
use crate::message::Message;
use crate::parks::{Parked, Parks};
use crate::pool::{
    BadSetting, DEFAULT_GROUP, Entry, GroupKey, GroupNotes, InFlight, LOOK_FOR_STUCK, NoRoom, Placed, Pool,
    PoolCounts, PoolSettings, PoolState, Shared, Ungrouped, Waiting,
};
use crate::record::Record;
use crate::settle::{Ledger, LedgerCounts, Taken};
use crate::source::{Delivery, Depth, Disposal, Source, SourceError, Wants};
use crate::warnings::Warnings;

/// The pool that stands in for those that nobody has set up.
pub const DEFAULT_POOL: &str = "DEFAULT-POOL";

/// How many pools there may be: what the original allows.
pub const POOLS_MAX: usize = 10_000;

/// How many deliveries are claimed at once, at most.
const CLAIM: usize = 512;

/// How long a claim waits for something to come before it is asked again.
const CLAIM_WAIT: Duration = Duration::from_secs(10);

/// How often it is looked whether slots are idle while there is less room than a claim is worth: often enough to keep a few of them busy, and seldom enough that what it
/// costs a busy pool, of which some slot or other is always between two messages, cannot be measured.
const IDLE_LOOK: Duration = Duration::from_millis(10);

/// How long a source may take to say what it holds before it is shown without.
const DEPTH_WAIT: Duration = Duration::from_secs(3);

/// How long after a source failed it is asked again, at first and at the longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// Makes the mediator of a pool.
pub type MakeMediator = Arc<dyn Fn(&PoolSettings) -> Arc<dyn Mediator> + Send + Sync>;

/// How a source is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceSettings {
    /// How long a delivery is leased; renewed three times in this time.
    pub lease: Duration,
}

impl Default for SourceSettings {
    fn default() -> Self {
        SourceSettings { lease: Duration::from_secs(30) }
    }
}

/// Why the router could not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouterError {
    /// No pool has this code.
    #[error("there is no pool {0:?}")]
    NoSuchPool(String),
    /// A pool has this code already.
    #[error("there is a pool {0:?} already")]
    PoolExists(String),
    /// There are too many.
    #[error("there are {POOLS_MAX} pools; no more are allowed")]
    TooManyPools,
    /// The default pool cannot go.
    #[error("{DEFAULT_POOL} cannot be removed: it stands in for unknown pools")]
    DefaultPool,
    /// It is on its way out.
    #[error("the pool {0:?} is draining")]
    Draining(String),
    /// Settings that cannot be.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    BadSettings(Vec<BadSetting>),
    /// The drain did not end in time; the pool goes on draining.
    #[error("{left} messages were left when the time was up; the pool goes on draining")]
    NotDrained {
        /// How many.
        left: usize,
    },
    /// The router is shutting down.
    #[error("the router is shutting down")]
    Closing,
}

/// Pools by their codes.
type Pools = BTreeMap<Arc<str>, Arc<Pool>>;

/// What the router's parts share.
struct Inner {
    pools: ArcSwap<Pools>,
    /// Held to read while a message is taken in, to write while pools come and go.
    routing: Arc<RwLock<()>>,
    feeds: Mutex<Vec<Arc<Feed>>>,
    make_mediator: MakeMediator,
    warnings: Warnings,
    /// What pools write down for those who look.
    record: Arc<Record>,
    /// Which groups are parked, on its way to the store.
    parks: Arc<Parks>,
    /// Told whenever a message leaves a pool.
    room: Arc<Notify>,
    closing: watch::Sender<bool>,
    /// Gives a number to each message that is ordered with nothing.
    alone: AtomicU64,
}

/// A source at work.
struct Feed {
    source: Arc<dyn Source>,
    ledger: Arc<Ledger>,
    settings: SourceSettings,
    claimed: AtomicU64,
    unreadable: AtomicU64,
    health: Mutex<Health>,
    /// It has ended by itself, for good.
    ended: AtomicBool,
    /// Nothing more is taken from it.
    stopping: watch::Sender<bool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    /// Set when the source is closed. Of those who end it one does so, and the others wait.
    closed: OnceCell<()>,
}

/// A source that is on its way out: this one, and not one of the same name that comes after it.
pub(crate) struct Stopping(Arc<Feed>);

/// What is known of a source.
struct Health {
    healthy: bool,
    trouble: Option<String>,
    since: SystemTime,
}

/// The router. Cheap to clone; it ends with [`shutdown`](Router::shutdown).
#[derive(Clone)]
pub struct Router {
    inner: Arc<Inner>,
    /// Those who take in: they go when the router closes.
    intakes: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router").field("pools", &self.inner.pools.load().len()).finish_non_exhaustive()
    }
}

/// A pool, as others see it.
#[derive(Clone, Debug)]
pub struct PoolView {
    /// Its code.
    pub code: Arc<str>,
    /// Whether it takes messages.
    pub state: PoolState,
    /// How it runs.
    pub settings: Arc<PoolSettings>,
    /// Messages that are here.
    pub held: usize,
    /// Groups that have messages here.
    pub groups: usize,
    /// Groups that are parked.
    pub parked_groups: usize,
    /// Messages of those groups that are here: they do not count against the capacity.
    pub parked_messages: usize,
    /// What it has counted.
    pub counts: PoolCounts,
    /// What came of its attempts, and how long they took.
    pub attempts: MetricsSnapshot,
    /// What its engine has counted.
    pub engine: Snapshot,
}

/// A source, as others see it.
#[derive(Clone, Debug)]
pub struct SourceView {
    /// Its name.
    pub name: String,
    /// Its kind, as the configuration calls it.
    pub kind: &'static str,
    /// How it stands.
    pub state: SourceState,
    /// Since when it has answered, or has not.
    pub since: SystemTime,
    /// Whether it answered when it was last asked.
    pub healthy: bool,
    /// What it said, if not.
    pub trouble: Option<String>,
    /// Deliveries taken from it.
    pub claimed: u64,
    /// Deliveries that were not messages.
    pub unreadable: u64,
    /// What is held of it.
    pub ledger: LedgerCounts,
    /// What it holds itself, if it could tell.
    pub depth: Option<Depth>,
}

/// How a source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceState {
    /// It is being opened for the first time.
    Opening,
    /// It answers.
    Connected,
    /// It did not answer when it was last asked, and is asked again.
    Unavailable,
    /// Nothing more is taken from it; what was taken is being delivered, or goes back.
    Stopping,
    /// It has closed itself, and is not asked again.
    Ended,
}

impl SourceState {
    /// In one word.
    pub fn word(self) -> &'static str {
        match self {
            SourceState::Opening => "opening",
            SourceState::Connected => "connected",
            SourceState::Unavailable => "unavailable",
            SourceState::Stopping => "stopping",
            SourceState::Ended => "ended",
        }
    }
}

/// How a shutdown went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouterReport {
    /// Messages that went back to their source without an attempt.
    pub given_back: usize,
    /// Messages whose attempts had not come back. Their leases run out, and they come again.
    pub still_running: usize,
    /// Whether every settlement reached its source.
    pub settled: bool,
}

impl Router {
    /// Starts a router with a default pool. Must be called on a tokio runtime.
    pub fn start(default_pool: PoolSettings, make_mediator: MakeMediator) -> Result<Router, RouterError> {
        Router::start_with(default_pool, make_mediator, Arc::new(Record::new()), Arc::default())
    }

    /// The same, with a record that somebody else reads, too, with groups that were parked when the process ended, and somebody who writes down which are now.
    pub(crate) fn start_with(
        default_pool: PoolSettings,
        make_mediator: MakeMediator,
        record: Arc<Record>,
        parks: Arc<Parks>,
    ) -> Result<Router, RouterError> {
        check(&default_pool)?;
        let room = Arc::new(Notify::new());
        let mediator = make_mediator(&default_pool);
        let routing = Arc::new(RwLock::new(()));
        let shared = Shared {
            room: Arc::clone(&room),
            routing: Arc::clone(&routing),
            record: Arc::clone(&record),
            parks: Arc::clone(&parks),
        };
        let pool = Pool::start(DEFAULT_POOL.into(), default_pool, mediator, PoolState::Open, shared);
        let inner = Arc::new(Inner {
            pools: ArcSwap::from_pointee(BTreeMap::from([(Arc::clone(pool.code()), pool)])),
            routing,
            feeds: Mutex::default(),
            make_mediator,
            warnings: Warnings::default(),
            record,
            parks,
            room,
            closing: watch::Sender::new(false),
            alone: AtomicU64::new(0),
        });
        Ok(Router { inner, intakes: Arc::default() })
    }

    /// Begins to read a source.
    pub fn add_source(&self, source: Arc<dyn Source>, settings: SourceSettings) {
        let (ledger, settler) = Ledger::open(Arc::clone(&source));
        let feed = Arc::new(Feed {
            source,
            ledger,
            settings,
            claimed: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
            health: Mutex::new(Health { healthy: true, trouble: None, since: SystemTime::now() }),
            ended: AtomicBool::new(false),
            stopping: watch::Sender::new(false),
            tasks: Mutex::default(),
            closed: OnceCell::new(),
        });
        self.inner.feeds.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&feed));
        let tasks = [
            tokio::spawn(keep_settling(Arc::clone(&self.inner), Arc::clone(&feed), settler)),
            tokio::spawn(keep_leases(Arc::clone(&self.inner), Arc::clone(&feed))),
        ];
        feed.tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        let intake = tokio::spawn(take_in(Arc::clone(&self.inner), feed));
        self.intakes.lock().unwrap_or_else(PoisonError::into_inner).push(intake);
    }

    /// Stops reading a source: nothing more is taken, what was taken is delivered, or goes back if it is parked, paused, or has to wait for long, and then the source is closed. If that takes longer than `limit`,
    /// the source is closed all the same, and whatever is not settled comes again; so it is with what it does not take until its leases are over. One that somebody else is removing is waited for, too. False if there is no source of this
    /// name.
    pub async fn remove_source(&self, name: &str, limit: Duration) -> bool {
        let Some(stopping) = self.stop_source(name) else { return false };
        self.remove_stopping(stopping, limit).await;
        true
    }

    /// Takes nothing more from a source; [`remove_stopping`](Self::remove_stopping) is the rest of its end. Nothing if there is none of this name.
    pub(crate) fn stop_source(&self, name: &str) -> Option<Stopping> {
        let feed = self.feed(name)?;
        feed.stopping.send_replace(true);
        Some(Stopping(feed))
    }

    pub(crate) async fn remove_stopping(&self, Stopping(feed): Stopping, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut next_look = Instant::now();
        while feed.ledger.unsettled() > 0 && Instant::now() < deadline {
            let left = self.inner.room.notified();
            if Instant::now() >= next_look {
                self.inner.pools.load().values().for_each(|pool| pool.give_back_to(&feed.ledger));
                next_look = Instant::now() + LOOK_FOR_STUCK;
            }
            // Not every message that leaves is told of.
            let look = tokio::time::sleep(RETRY.0);
            tokio::select! {
                () = left => {}
                () = look => {}
            }
        }
        // What it does not take for as long as it has leased it (it cannot be reached, and that may be why it goes) comes again anyway.
        let now = Instant::now();
        feed.ledger.wait_settled((now + feed.settings.lease).min(deadline).max(now + RETRY.0)).await;
        // It stays in the list until it is closed: who finds no source of this name may open one.
        feed.end().await;
        self.feeds().retain(|other| !Arc::ptr_eq(other, &feed));
    }

    /// Whether there is a source of this name; one that is being removed counts until it is closed.
    pub(crate) fn has_source(&self, name: &str) -> bool {
        self.feed(name).is_some()
    }

    fn feeds(&self) -> MutexGuard<'_, Vec<Arc<Feed>>> {
        self.inner.feeds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn feed(&self, name: &str) -> Option<Arc<Feed>> {
        self.feeds().iter().find(|feed| feed.source.name() == name).cloned()
    }

    // ── pools ──────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Adds a pool. While another one still has messages that asked for it, it waits.
    pub fn add_pool(&self, code: &str, settings: PoolSettings) -> Result<(), RouterError> {
        check(&settings)?;
        if *self.inner.closing.borrow() {
            return Err(RouterError::Closing);
        }
        let mediator = (self.inner.make_mediator)(&settings);
        let _quiet = self.inner.routing.write().unwrap_or_else(PoisonError::into_inner);
        // Once more: whoever closes the router goes through the same lock, and then ends the pools that are there.
        if *self.inner.closing.borrow() {
            return Err(RouterError::Closing);
        }
        let pools = self.inner.pools.load_full();
        if pools.contains_key(code) {
            return Err(RouterError::PoolExists(code.to_owned()));
        }
        if pools.len() >= POOLS_MAX {
            return Err(RouterError::TooManyPools);
        }
        let shared = Shared {
            room: Arc::clone(&self.inner.room),
            routing: Arc::clone(&self.inner.routing),
            record: Arc::clone(&self.inner.record),
            parks: Arc::clone(&self.inner.parks),
        };
        let has_sources = !self.inner.feeds.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        let state = if has_sources { PoolState::Waiting } else { PoolState::Open };
        let pool = Pool::start(code.into(), settings, mediator, state, shared);
        if let Some(stand_in) = pools.get(DEFAULT_POOL) {
            stand_in.bequeath_foreign(&pool);
        }
        let mut more = BTreeMap::clone(&pools);
        more.insert(Arc::clone(pool.code()), Arc::clone(&pool));
        self.inner.pools.store(Arc::new(more));
        tokio::spawn(open_when_free(Arc::clone(&self.inner), pool));
        Ok(())
    }

    /// What was parked in pools that are not there any more stops in the default pool. To be called when all pools have been added that are there from the start.
    pub(crate) fn park_leftovers(&self) {
        let stand_in = self.pool(DEFAULT_POOL).expect("the default pool is never removed");
        for (code, group, parked) in self.inner.parks.of_no_pool() {
            stand_in.adopt(code, &group, parked);
        }
    }

    /// Changes how a pool runs, while it runs.
    pub fn change_pool(&self, code: &str, settings: PoolSettings) -> Result<(), RouterError> {
        check(&settings)?;
        let pool = self.pool(code)?;
        let mediator = (self.inner.make_mediator)(&settings);
        let changed = pool.change(settings, mediator);
        self.inner.room.notify_waiters();
        changed.map_err(|bad| RouterError::BadSettings(vec![bad]))
    }

    /// Lets the messages of a pool wait.
    pub fn pause_pool(&self, code: &str) -> Result<(), RouterError> {
        self.turn(code, PoolState::Paused)
    }

    /// Lets them go on.
    pub fn resume_pool(&self, code: &str) -> Result<(), RouterError> {
        self.turn(code, PoolState::Open)
    }

    fn turn(&self, code: &str, to: PoolState) -> Result<(), RouterError> {
        if self.pool(code)?.turn(to) { Ok(()) } else { Err(RouterError::Draining(code.to_owned())) }
    }

    /// Lets a pool take nothing more and run what it has. [`remove_pool`](Self::remove_pool) then ends it.
    pub fn drain_pool(&self, code: &str) -> Result<(), RouterError> {
        if code == DEFAULT_POOL {
            return Err(RouterError::DefaultPool);
        }
        self.pool(code)?.turn(PoolState::Draining);
        Ok(())
    }

    /// Removes a pool: it takes nothing more, runs what it has, and goes. If that takes longer than `limit` it goes on draining, and can be
    /// removed again.
    pub async fn remove_pool(&self, code: &str, limit: Duration) -> Result<(), RouterError> {
        if code == DEFAULT_POOL {
            return Err(RouterError::DefaultPool);
        }
        let pool = self.pool(code)?;
        pool.turn(PoolState::Draining);
        let deadline = Instant::now() + limit;
        if !pool.wait_empty(deadline).await {
            return Err(RouterError::NotDrained { left: pool.held() });
        }
        {
            let _quiet = self.inner.routing.write().unwrap_or_else(PoisonError::into_inner);
            let mut fewer = BTreeMap::clone(&self.inner.pools.load());
            // Somebody else may have removed it too, and added another one by now.
            if fewer.get(code).is_some_and(|there| Arc::ptr_eq(there, &pool)) {
                fewer.remove(code);
                let stand_in = fewer.get(DEFAULT_POOL).expect("the default pool is never removed");
                pool.bequeath_parked(stand_in);
                self.inner.pools.store(Arc::new(fewer));
            }
        }
        pool.end().await;
        Ok(())
    }

    fn pool(&self, code: &str) -> Result<Arc<Pool>, RouterError> {
        let pools = self.inner.pools.load();
        pools.get(code).cloned().ok_or_else(|| RouterError::NoSuchPool(code.to_owned()))
    }

    // ── views ──────────────────────────────────────────────────────────────────────────────────────────────────────

    /// All pools, by code.
    pub fn pools(&self) -> Vec<PoolView> {
        self.inner.pools.load().values().map(|pool| view(pool)).collect()
    }

    /// The codes of all pools, sorted.
    pub fn codes(&self) -> Vec<String> {
        self.inner.pools.load().keys().map(ToString::to_string).collect()
    }

    /// One pool.
    pub fn pool_view(&self, code: &str) -> Result<PoolView, RouterError> {
        self.pool(code).map(|pool| view(&pool))
    }

    /// All sources. All are asked at the same time, so that the answer takes as long as that of the slowest, or three seconds.
    pub async fn sources(&self) -> Vec<SourceView> {
        let feeds: Vec<_> = self.inner.feeds.lock().unwrap_or_else(PoisonError::into_inner).clone();
        join_all(feeds.iter().map(|feed| async {
            let asked = tokio::time::timeout(DEPTH_WAIT, feed.source.depth()).await;
            SourceView { depth: asked.ok().and_then(Result::ok), ..feed.view() }
        }))
        .await
    }

    /// A source by its name.
    pub fn source(&self, name: &str) -> Option<Arc<dyn Source>> {
        let feeds = self.inner.feeds.lock().unwrap_or_else(PoisonError::into_inner);
        feeds.iter().map(|feed| &feed.source).find(|source| source.name() == name).map(Arc::clone)
    }

    /// All sources, without asking them what they hold.
    pub fn source_states(&self) -> Vec<SourceView> {
        self.inner
            .feeds
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .map(|feed| feed.view())
            .collect()
    }

    /// The deepest groups of a pool, deepest first.
    pub fn groups(&self, code: &str, most: usize) -> Result<Vec<(GroupKey, usize)>, RouterError> {
        Ok(self.pool(code)?.handle().lanes_by_depth(most))
    }

    /// The attempts of a pool that are under way, oldest first.
    pub fn in_flight(&self, code: &str, most: usize) -> Result<Vec<InFlight>, RouterError> {
        Ok(self.pool(code)?.in_flight(most))
    }

    /// The whole name of a group, of which a short one is shown where it is too long to be. Any other name is itself.
    pub fn whole_name(&self, code: &str, group: &str) -> Result<String, RouterError> {
        Ok(self.pool(code)?.key(group).name().to_owned())
    }

    /// Whether a pool takes more messages now.
    pub fn has_room(&self, code: &str) -> Result<bool, RouterError> {
        Ok(self.pool(code)?.free() > 0)
    }

    /// Why the next message of a group is not with its target, or that it is.
    pub fn explain(&self, code: &str, group: &str) -> Result<Option<Explanation<GroupKey>>, RouterError> {
        let pool = self.pool(code)?;
        Ok(pool.explain(&pool.key(group)))
    }

    /// What a pool knows of a group beyond its lane.
    pub fn notes(&self, code: &str, group: &str) -> Result<GroupNotes, RouterError> {
        let pool = self.pool(code)?;
        Ok(pool.notes(&pool.key(group)))
    }

    /// What waits in a group, oldest first; its head is among it unless it is with its target.
    pub fn waiting(&self, code: &str, group: &str, most: usize) -> Result<Vec<Waiting>, RouterError> {
        let pool = self.pool(code)?;
        Ok(pool.waiting(&pool.key(group), most))
    }

    /// Waiting messages of a pool that have this id. Looks at all of them.
    pub fn find_message(
        &self,
        code: &str,
        id: &str,
        most: usize,
    ) -> Result<Vec<(GroupKey, Waiting)>, RouterError> {
        Ok(self.pool(code)?.find_message(id, most))
    }

    /// Groups of a pool whose names contain a text, and their depths. Looks at all of them.
    pub fn find_groups(
        &self,
        code: &str,
        part: &str,
        most: usize,
    ) -> Result<Vec<(GroupKey, usize)>, RouterError> {
        Ok(self.pool(code)?.find_groups(part, most))
    }

    /// What pools write down for those who look.
    pub fn record(&self) -> &Record {
        &self.inner.record
    }

    pub(crate) fn pool_list(&self) -> Vec<Arc<Pool>> {
        self.inner.pools.load().values().cloned().collect()
    }

    /// Parks a group in front of its next message, until somebody resumes it. False if it has none in this pool.
    pub fn park(&self, code: &str, group: &str, why: &str) -> Result<bool, RouterError> {
        let pool = self.pool(code)?;
        Ok(pool.park(&pool.key(group), why))
    }

    /// Lets a parked group go on, and one that waits for another attempt try at once. False if there was nothing to resume.
    pub fn resume(&self, code: &str, group: &str) -> Result<bool, RouterError> {
        let pool = self.pool(code)?;
        Ok(pool.resume(&pool.key(group)))
    }

    /// Lets the groups of all pools try at once whose next message waits for its target, if that is meant.
    pub(crate) fn let_try(&self, is_meant: impl Fn(&str) -> bool) {
        self.pool_list().iter().for_each(|pool| pool.let_try(&is_meant));
    }

    /// Since when a group is parked, and why.
    pub fn parked(&self, code: &str, group: &str) -> Result<Option<Parked>, RouterError> {
        let pool = self.pool(code)?;
        Ok(pool.parked(&pool.key(group)))
    }

    /// Groups of a pool that are parked, whether they have messages there or not, the last ones first.
    pub fn all_parked(&self, code: &str, most: usize) -> Result<Vec<(Arc<str>, Parked)>, RouterError> {
        Ok(self.pool(code)?.all_parked(most))
    }

    /// Waits until it is on disk which groups are parked. True at once where nobody writes it down.
    pub(crate) async fn parks_written(&self, limit: Duration) -> bool {
        self.inner.parks.wait_written(limit).await
    }

    /// Sends the next message of a group to the dead letters, unless it is with its target. False if there is none.
    pub fn skip(&self, code: &str, group: &str) -> Result<bool, RouterError> {
        let pool = self.pool(code)?;
        Ok(pool.handle().skip_head(&pool.key(group)))
    }

    /// What an operator should know.
    pub fn warnings(&self) -> &Warnings {
        &self.inner.warnings
    }

    // ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Stops taking messages; everything else goes on. The first step of the shutdown, for who wants to watch the rest.
    pub fn close(&self) {
        let quiet = self.inner.routing.write().unwrap_or_else(PoisonError::into_inner);
        self.inner.closing.send_replace(true);
        drop(quiet);
        self.inner.room.notify_waiters();
    }

    /// Messages that are held.
    pub fn held(&self) -> usize {
        self.inner.pools.load().values().map(|pool| pool.held()).sum()
    }

    /// Ends the router: takes nothing more, lets what is held be delivered until the time is up, gives the rest back, and waits until the
    /// sources know.
    pub async fn shutdown(&self, drain: Duration) -> RouterReport {
        self.close();
        let deadline = Instant::now() + drain;
        // First those who take in: what they have claimed is in a pool, or on its way back, when they have gone.
        let intakes: Vec<_> = self.intakes.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect();
        futures_util::future::join_all(intakes).await;
        let pools = self.inner.pools.load_full();
        futures_util::future::join_all(pools.values().map(|pool| pool.wait_quiet(deadline))).await;
        let ended = futures_util::future::join_all(pools.values().map(|pool| pool.end())).await;
        let mut report = RouterReport {
            given_back: ended.iter().map(|ended| ended.given_back).sum(),
            still_running: ended.iter().map(|ended| ended.still_running).sum(),
            settled: true,
        };
        let feeds: Vec<_> = self.inner.feeds.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let last = Instant::now() + RETRY.1;
        for feed in &feeds {
            report.settled &= feed.ledger.wait_settled(last).await;
        }
        futures_util::future::join_all(feeds.iter().map(|feed| feed.end())).await;
        report
    }
}

fn check(settings: &PoolSettings) -> Result<(), RouterError> {
    let problems = settings.problems();
    if problems.is_empty() { Ok(()) } else { Err(RouterError::BadSettings(problems)) }
}

fn view(pool: &Pool) -> PoolView {
    let (parked_groups, parked_messages) = pool.parked_counts();
    PoolView {
        parked_groups,
        parked_messages,
        code: Arc::clone(pool.code()),
        state: pool.state(),
        settings: pool.settings(),
        held: pool.held(),
        groups: pool.group_count(),
        counts: pool.counts(),
        attempts: pool.attempts(),
        engine: pool.snapshot(),
    }
}

/// Opens a new pool once the default pool has no message left that asked for it.
async fn open_when_free(inner: Arc<Inner>, pool: Arc<Pool>) {
    let mut closing = inner.closing.subscribe();
    let mut next_look = Instant::now();
    while pool.state() == PoolState::Waiting && !*closing.borrow() {
        let left = inner.room.notified();
        let stand_in = inner.pools.load().get(DEFAULT_POOL).cloned();
        // Nobody gives it another one: since the pool is known, the intake finds it.
        let Some(stand_in) = stand_in.filter(|stand_in| stand_in.stands_in_for(pool.code()) > 0) else {
            return pool.open();
        };
        if Instant::now() >= next_look {
            stand_in.give_back_for(&pool);
            next_look = Instant::now() + LOOK_FOR_STUCK;
        }
        tokio::select! {
            () = left => {}
            () = tokio::time::sleep_until(next_look) => {}
            _ = closing.changed() => {}
        }
    }
}

/// Settles what is held of one source, until that takes nothing more.
async fn keep_settling(inner: Arc<Inner>, feed: Arc<Feed>, settler: impl Future<Output = ()>) {
    settler.await;
    inner.source_ended(&feed);
}

/// Renews the leases of one source.
async fn keep_leases(inner: Arc<Inner>, feed: Arc<Feed>) {
    let usual = (feed.settings.lease / 3).max(RETRY.0);
    let mut pause = usual;
    loop {
        tokio::time::sleep(pause).await;
        pause = usual;
        match feed.ledger.renew(feed.settings.lease).await {
            Ok(0) => {}
            Ok(lost) => {
                let name = feed.source.name();
                inner
                    .warnings
                    .give("lease", format!("{lost} leases of {name} had run out before they were renewed"));
            }
            Err(SourceError::Closed) => return inner.source_ended(&feed),
            Err(error) => {
                // There is not much time: the leases have two thirds of theirs left.
                pause = usual.min(RETRY.0 * 5);
                inner.warnings.give("source", format!("{}: {error}", feed.source.name()));
            }
        }
    }
}

/// Takes deliveries from one source until the router closes.
async fn take_in(inner: Arc<Inner>, feed: Arc<Feed>) {
    let mut closing = inner.closing.subscribe();
    let mut stopping = feed.stopping.subscribe();
    let mut pause = RETRY.0;
    let mut next_look = Instant::now();
    while !*closing.borrow() && !*stopping.borrow() {
        // Those who bring more go first: what has come is taken in many at a time, not as each comes.
        tokio::task::yield_now().await;
        let made = inner.room.notified();
        // Nobody says when slots fall idle beside the little that is free.
        let now = Instant::now();
        let looks_closer = now >= next_look;
        if looks_closer {
            next_look = now + IDLE_LOOK;
        }
        let room = inner.roomiest(looks_closer);
        if room == 0 {
            let is_some_free = inner.make_room();
            // Where nothing is free at all, it is for what only waits that is looked: no message leaves that would wake anybody.
            let look = if is_some_free { next_look } else { now + LOOK_FOR_STUCK };
            tokio::select! {
                () = made => {}
                () = tokio::time::sleep_until(look) => {}
                _ = closing.changed() => {}
                _ = stopping.changed() => {}
            }
            continue;
        }
        let wants = Wants { most: room.min(CLAIM), wait: CLAIM_WAIT, lease: feed.settings.lease };
        feed.ledger.begin_claim(feed.settings.lease);
        let claimed = tokio::select! {
            claimed = feed.source.claim(wants) => claimed,
            _ = closing.changed() => break,
            _ = stopping.changed() => break,
        };
        match claimed {
            Ok(deliveries) => {
                feed.recovered();
                pause = RETRY.0;
                inner.route_all(&feed, deliveries);
            }
            Err(SourceError::Closed) => return inner.source_ended(&feed),
            Err(error) => {
                feed.failed(&error);
                inner.warnings.give("source", format!("{}: {error}", feed.source.name()));
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    _ = closing.changed() => {}
                    _ = stopping.changed() => {}
                }
                pause = (pause * 2).min(RETRY.1);
            }
        }
    }
}

impl Feed {
    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recovered(&self) {
        let mut health = self.health();
        if !self.ended.load(Relaxed) && !health.healthy {
            *health = Health { healthy: true, trouble: None, since: SystemTime::now() };
        }
    }

    fn failed(&self, error: &SourceError) {
        let mut health = self.health();
        if std::mem::replace(&mut health.healthy, false) {
            health.since = SystemTime::now();
        }
        health.trouble = Some(error.to_string());
    }

    fn view(&self) -> SourceView {
        let health = self.health();
        let state = match () {
            () if self.ended.load(Relaxed) => SourceState::Ended,
            () if *self.stopping.borrow() => SourceState::Stopping,
            () if !health.healthy => SourceState::Unavailable,
            () if !self.source.is_open() => SourceState::Opening,
            () => SourceState::Connected,
        };
        SourceView {
            name: self.source.name().to_owned(),
            kind: self.source.kind(),
            state,
            since: health.since,
            healthy: health.healthy,
            trouble: health.trouble.clone(),
            claimed: self.claimed.load(Relaxed),
            unreadable: self.unreadable.load(Relaxed),
            ledger: self.ledger.counts(),
            depth: None,
        }
    }

    /// Ends its tasks, and closes the source.
    async fn end(&self) {
        for task in self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
        let close = async || drop(tokio::time::timeout(RETRY.1, self.source.close()).await);
        self.closed.get_or_init(close).await;
    }
}

/// Where a message goes.
struct Route {
    pool: Arc<Pool>,
    key: GroupKey,
    foreign: Option<Arc<str>>,
    /// Of a message without a group that is in order all the same.
    line: Option<Arc<str>>,
}

impl Route {
    /// What the source orders the message by: its group, whatever pool it is for, or its [line](Message::line).
    fn group(&self) -> Option<&Arc<str>> {
        match &self.key {
            GroupKey::Named(name) => Some(self.line.as_ref().unwrap_or(name)),
            GroupKey::Alone(_) => None,
        }
    }
}

/// The deliveries of a claim on their way into pools.
#[derive(Default)]
struct Intake {
    /// Those that have a place, by pool, in order.
    placed: Vec<(Arc<Pool>, Vec<Placed>)>,
    /// Groups of which one was refused.
    refused: HashSet<Arc<str>>,
    /// How long those have to wait that are refused.
    patience: Duration,
    /// How many deliveries there are.
    deliveries: usize,
}

impl Intake {
    fn of(deliveries: usize) -> Self {
        Intake { deliveries, ..Intake::default() }
    }

    fn place(&mut self, route: Route, message: Arc<Message>, sequence: u64, taken: Taken) {
        let group = route.group().cloned();
        let Taken { held, returns } = taken;
        if let Some(group) = &group
            && (returns.is_some() || self.refused.contains(group))
        {
            self.refused.insert(Arc::clone(group));
            let delay = returns.unwrap_or_default().max(self.patience);
            return held.settle(Disposal::GiveBack { delay });
        }
        let Route { pool, key, foreign, .. } = route;
        match pool.place(Entry { message, sequence, held, key, foreign }) {
            Ok(placed) => match self.placed.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &pool)) {
                Some((_, others)) => others.push(placed),
                None => {
                    // Mostly all are for one pool, and to make room for them by and by would move each several times.
                    let room = if self.placed.is_empty() { self.deliveries } else { 1 };
                    let mut of_pool = Vec::with_capacity(room);
                    of_pool.push(placed);
                    self.placed.push((pool, of_pool));
                }
            },
            Err(no_room) => {
                self.refused.extend(group);
                self.give_back(no_room);
            }
        }
    }

    fn submit(mut self) {
        for (pool, placed) in std::mem::take(&mut self.placed) {
            pool.submit_all(placed).into_iter().for_each(|no_room| self.give_back(no_room));
        }
    }

    fn give_back(&mut self, no_room: NoRoom) {
        self.patience = self.patience.max(no_room.patience);
        no_room.held.settle(Disposal::GiveBack { delay: self.patience });
    }
}

impl Inner {
    /// A source says that it is closed. Unless we are closing too, nobody has asked it to, and it will bring nothing more.
    fn source_ended(&self, feed: &Feed) {
        if *self.closing.borrow() || feed.ended.swap(true, Relaxed) {
            return;
        }
        feed.failed(&SourceError::Closed);
        let text = format!("{}: {}; nothing more is read from it", feed.source.name(), SourceError::Closed);
        self.warnings.give("source", text);
    }

    /// How many messages the pool with the most room asks for, as far as that matters to a claim.
    fn roomiest(&self, looks_closer: bool) -> usize {
        let mut most = 0;
        for pool in self.pools.load().values() {
            most = most.max(pool.appetite(looks_closer));
            if most >= CLAIM {
                break;
            }
        }
        most
    }

    /// Nobody has room that is worth a claim: makes some where pools are full of what only waits. Whether any has a little.
    fn make_room(&self) -> bool {
        let pools = self.pools.load();
        pools.values().for_each(|pool| pool.make_room());
        pools.values().any(|pool| pool.free() > 0)
    }

    /// Gives deliveries to their pools, in order. Refusal keeps order: once one of a group is refused, so are those behind it.
    fn route_all(&self, feed: &Arc<Feed>, deliveries: Vec<Delivery>) {
        feed.claimed.fetch_add(deliveries.len() as u64, Relaxed);
        // Read before anything is locked: that takes longer than all the rest.
        let mut readable = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            match Message::of_delivery(&delivery.text) {
                Ok(message) => readable.push((delivery, Arc::new(message))),
                Err(error) => self.quarantine(feed, &delivery, &error.to_string()),
            }
        }
        if readable.is_empty() {
            return;
        }
        let _routing = self.routing.read().unwrap_or_else(PoisonError::into_inner);
        let pools = self.pools.load();
        let route = |(delivery, message): &(Delivery, Arc<Message>)| self.route_of(&pools, delivery, message);
        let routes: Vec<Route> = readable.iter().map(route).collect();
        let groups = readable.iter().zip(&routes).map(|((delivery, _), route)| (delivery, route.group()));
        let taken = feed.ledger.take_all(groups);
        let mut intake = Intake::of(readable.len());
        for (((delivery, message), route), taken) in readable.into_iter().zip(routes).zip(taken) {
            if let Some(taken) = taken {
                intake.place(route, message, delivery.sequence, taken);
            }
        }
        intake.submit();
    }

    /// The pool and the lane of a message.
    fn route_of(&self, pools: &Pools, delivery: &Delivery, message: &Message) -> Route {
        let code = message.pool_code.trim();
        let (pool, foreign) = match pools.get(code) {
            Some(pool) => (pool, None),
            None => {
                let stand_in = pools.get(DEFAULT_POOL).expect("the default pool is never removed");
                if !code.is_empty() {
                    let text = format!("there is no pool {code:?}; {DEFAULT_POOL} stands in for it");
                    self.warnings.give("pool", text);
                }
                (stand_in, Some(Arc::from(code)))
            }
        };
        let ordered = message.dispatch_mode != crate::message::DispatchMode::Immediate;
        let group = delivery.group.clone().filter(|group| ordered && !group.trim().is_empty());
        let group = group.or_else(|| message.group().map(Arc::from));
        let (key, line) = match group {
            Some(group) => (GroupKey::Named(group), None),
            None if ordered && pool.settings().ungrouped == Ungrouped::Serial => {
                (GroupKey::Named(DEFAULT_GROUP.into()), Some(message.line()))
            }
            None => (GroupKey::Alone(self.alone.fetch_add(1, Relaxed)), None),
        };
        Route { pool: Arc::clone(pool), key, foreign, line }
    }

    fn quarantine(&self, feed: &Arc<Feed>, delivery: &Delivery, why: &str) {
        feed.unreadable.fetch_add(1, Relaxed);
        let name = feed.source.name();
        self.warnings.give(
            "source",
            format!("{name}: a delivery that is not a message was put into quarantine: {why}"),
        );
        if let Some(held) = feed.ledger.take(delivery) {
            held.settle(Disposal::Quarantine { reason: why.to_owned() });
        }
    }
}
