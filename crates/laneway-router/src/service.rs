//! The service: everything of this crate in one process, from its configuration to its last breath.
//!
//! `config.rs` hands in what was read; the service opens the store, starts the router with its pools and sources, the network ingress and the HTTP API
//! (`api/`), which gets a [`Service`] in turn: what the API changes, it changes through this file.
//!
//! # A reload
//!
//! Pools are added, changed and removed to be as the new configuration says; one that goes drains in the background. Pools that were set up through
//! the API stay. New queues are read. Sources come and go; one that goes, or whose settings have changed, first delivers what was taken from it; what would take long goes back to it. Everything else is compared, and what would need a restart is named. A configuration that is not valid
//! changes nothing.
//!
//! # Shutdown, in steps
//!
//! 1. [`close`](Service::close): `/health/ready` says no, the router claims nothing more, and the ingress takes no more lines. Publishing goes on: what is published now
//!    waits in the queue for the next start, so a publisher need not care.
//! 2. The router and the ingress drain side by side until the time is up; what is not delivered then goes back to its queue.
//! 3. The HTTP API stops accepting, and its connections end with the request that they are at. Only now can nothing be published any more.
//! 4. The store is closed: what was accepted until then is on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;

use crate::api;
use crate::audit::Audit;
use crate::config::{Config, ConfigError};
use crate::history::{self, History};
use crate::ingress::{self, Ingress};
use crate::mediator::{HttpMediator, Mediator, Mediators, Signer, Simulated, Sinks};
use crate::parks::{self, Parks};
use crate::pool::{PoolSettings, PoolState};
use crate::record::Record;
use crate::router::{
    DEFAULT_POOL, MakeMediator, POOLS_MAX, Router, RouterError, RouterReport, SourceSettings,
};
use crate::source::broker::{self, Broker, Configured};
use crate::source::embedded::{EmbeddedQueue, EmbeddedStore, OpenError, QueueError, Stranded};
use crate::source::sink::{ConfiguredSink, Sink};
use crate::standby::Turn;
use crate::targets::TestTargets;

/// When a pool that a reload removes takes this long to drain, a warning says so, and another one whenever it has taken as long again.
const REMOVAL: Duration = Duration::from_secs(3_600);

/// So long after a breaker was reset it is looked once more for those who wait for its target: an attempt that had been told to wait just before is in no lane for a moment.
const SECOND_LOOK: Duration = Duration::from_millis(100);

/// How long a shutdown waits for the last answers of the API.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long it waits for a collector to take the last spans.
#[cfg(feature = "otlp")]
const SPANS: Duration = Duration::from_secs(3);

/// Why the service did not start. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Nobody could tell friend from foe.
    #[error(
        "{0} can be reached from other machines, and there is no token: set laneway.http.admin-token, or bind to 127.0.0.1"
    )]
    Unguarded(SocketAddr),
    /// The address of the API cannot be listened at.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        error: std::io::Error,
    },
    /// The queue's file cannot be opened.
    #[error("{path}: {error}")]
    Store {
        /// Which file.
        path: String,
        /// Why.
        error: OpenError,
    },
    /// A queue cannot be had.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A pool cannot be had.
    #[error(transparent)]
    Router(#[from] RouterError),
    /// The network ingress cannot be started.
    #[error(transparent)]
    Ingress(#[from] ingress::StartError),
    /// The database of flows has a URL that is none.
    #[cfg(feature = "flow")]
    #[error("laneway.flow.database: {0}")]
    FlowDatabase(sqlx::Error),
}

/// What a reload has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// What is different now, a sentence each.
    pub changed: Vec<String>,
    /// What is different in the configuration and needs a restart, by path.
    pub needs_restart: Vec<String>,
}

/// Why nothing was reloaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReloadError {
    /// The configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It is valid, and cannot be applied to what runs.
    #[error("{}", .0.join("; "))]
    Impossible(Vec<String>),
}

/// How the end went.
#[derive(Clone, Debug, Default)]
pub struct Farewell {
    /// Of the router.
    pub router: RouterReport,
    /// Tasks that the ingress had accepted and did not get to: they are nowhere else.
    pub ingress_lost: usize,
    /// Connections of the API that had to be cut off.
    pub connections_cut: usize,
}

/// The running service. Clones are the same one; it ends with [`shutdown`](Service::shutdown).
#[derive(Clone)]
pub struct Service {
    inner: Arc<Inner>,
}

struct Inner {
    config: Mutex<Arc<Config>>,
    /// One reload at a time.
    reloading: tokio::sync::Mutex<()>,
    started: Instant,
    /// There unless no queue is configured.
    store: Option<EmbeddedStore>,
    /// By name; publishers and the router use the same consumer, which is no matter: publishing has none.
    queues: Mutex<BTreeMap<String, EmbeddedQueue>>,
    router: Router,
    mediators: Mediators,
    /// There until the shutdown takes it.
    ingress: Mutex<Option<Ingress>>,
    /// What can be seen of it; there until it has ended, so that its drain can be watched.
    ingress_view: Mutex<Option<ingress::View>>,
    ingress_address: Option<SocketAddr>,
    targets: Option<TestTargets>,
    #[cfg(feature = "flow")]
    flows: Option<Arc<crate::flows::Flows>>,
    /// What hears of runs and steps; there until the shutdown ends it.
    #[cfg(feature = "flow")]
    hearing: Mutex<Option<tokio::task::JoinHandle<()>>>,
    audit: Audit,
    /// There where the dashboard is.
    history: Option<Arc<History>>,
    /// What looks once a second; there until the shutdown ends it.
    watcher: Mutex<Option<tokio::task::JoinHandle<()>>>,
    /// What writes down which groups are parked; there until the shutdown ends it.
    carrier: Mutex<Option<tokio::task::JoinHandle<()>>>,
    #[cfg(feature = "otlp")]
    exported: Arc<crate::otlp::Exported>,
    /// There where a collector is configured, until the shutdown.
    #[cfg(feature = "otlp")]
    exporter: Mutex<Option<crate::otlp::Exporter>>,
    http_address: SocketAddr,
    server: Mutex<Option<api::Server>>,
    closing: AtomicBool,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("http", &self.inner.http_address).finish_non_exhaustive()
    }
}

impl Service {
    /// Starts everything. To be called on a tokio runtime with time and IO, on which it then runs.
    pub async fn start(config: Config) -> Result<Service, StartError> {
        Self::start_in_turn(config, None).await
    }

    /// The same for a service that has to wait for its turn. When that is over it attempts nothing more, and is to be shut down at once.
    pub async fn start_in_turn(mut config: Config, turn: Option<Turn>) -> Result<Service, StartError> {
        config.mediator.http.epoch = turn.as_ref().map(|turn| turn.token);
        let bind = config.http.bind;
        if config.is_beyond_loopback() && config.http.admin_token.is_none() {
            return Err(StartError::Unguarded(bind));
        }
        let cannot = |error| StartError::Listen { address: bind, error };
        let listener = TcpListener::bind(bind).await.map_err(cannot)?;
        let http_address = listener.local_addr().map_err(cannot)?;
        let store = match config.queue.names.is_empty() {
            true => None,
            false => Some(open_store(&config).await?),
        };
        let mut queues = BTreeMap::new();
        for name in &config.queue.names {
            queues.extend(
                store.as_ref().map(|store| store.queue(name)).transpose()?.map(|queue| (name.clone(), queue)),
            );
        }
        let http = HttpMediator::new(config.mediator.http.clone(), Signer::default());
        let mediators =
            Mediators::new(http, Simulated::new(fastrand::u64(..))).with_sinks(sinks(&config)).in_turn(turn);
        let ingress = match &config.ingress {
            Some(settings) => {
                let mediator = mediators.with_signer(signer(&config, &[]));
                Some(Ingress::start(settings.clone(), Arc::new(mediator)).await?)
            }
            None => None,
        };
        // With all its pools before the first message is claimed: what has a pool must not go to the default pool.
        let record = Record::new();
        #[cfg(feature = "otlp")]
        let (exported, exporter, record) = start_export(&config, record);
        let parks = Arc::new(match &store {
            Some(store) => Parks::read(store).await.map_err(|error| StartError::Store {
                path: config.queue.path.display().to_string(),
                error: OpenError::Damaged(error.to_string()),
            })?,
            None => Parks::default(),
        });
        let router = start_router(&config, &mediators, Arc::new(record), Arc::clone(&parks))?;
        let stranded = store.iter().flat_map(|store| store.stranded(|name| queues.contains_key(name)));
        stranded.for_each(|stranded| router.warnings().give("configuration", stranded.to_string()));
        let carrier = store
            .as_ref()
            .map(|store| tokio::spawn(parks::carry(Arc::clone(&parks), store.clone(), router.clone())));
        let dashboard = config.dashboard;
        let history = dashboard.enabled.then(|| History::new(dashboard.history, dashboard.subscribers_max));
        let history = history.map(Arc::new);
        let lease = SourceSettings { lease: config.lease };
        for queue in queues.values() {
            router.add_source(Arc::new(queue.clone()), lease);
        }
        for (name, broker) in &config.sources {
            router.add_source(Arc::new(Configured::new(name.as_str(), Arc::clone(broker))), lease);
        }
        let targets = config.test_targets.then(|| TestTargets::new(fastrand::u64(..)));
        if targets.is_some() && config.is_beyond_loopback() {
            let text = "the test targets can be called from other machines, without a token; laneway.test-targets = off closes them";
            router.warnings().give("configuration", text);
        }
        #[cfg(feature = "flow")]
        let flows = flows(&config)?.map(|pool| Arc::new(crate::flows::Flows::new(pool)));
        #[cfg(feature = "flow")]
        let hearing = flows.clone().map(|flows| tokio::spawn(crate::flows::listen(flows)));
        let service = Service {
            inner: Arc::new(Inner {
                config: Mutex::new(Arc::new(config)),
                reloading: tokio::sync::Mutex::default(),
                started: Instant::now(),
                store,
                queues: Mutex::new(queues),
                router,
                mediators,
                ingress_address: ingress.as_ref().map(Ingress::address),
                ingress_view: Mutex::new(ingress.as_ref().map(Ingress::view)),
                ingress: Mutex::new(ingress),
                targets,
                #[cfg(feature = "flow")]
                flows,
                #[cfg(feature = "flow")]
                hearing: Mutex::new(hearing),
                audit: Audit::default(),
                history: history.clone(),
                watcher: Mutex::default(),
                carrier: Mutex::new(carrier),
                #[cfg(feature = "otlp")]
                exported,
                #[cfg(feature = "otlp")]
                exporter: Mutex::new(exporter),
                http_address,
                server: Mutex::default(),
                closing: AtomicBool::new(false),
            }),
        };
        if let Some(history) = history {
            *lock(&service.inner.watcher) = Some(tokio::spawn(history::run(service.clone(), history)));
        }
        let server = api::serve(service.clone(), listener);
        *lock(&service.inner.server) = Some(server);
        Ok(service)
    }

    /// Where the API listens: with port 0 in the configuration, the port that it was given.
    pub fn http_address(&self) -> SocketAddr {
        self.inner.http_address
    }

    /// Where the network ingress listens, if there is one.
    pub fn ingress_address(&self) -> Option<SocketAddr> {
        self.inner.ingress_address
    }

    /// The router inside.
    pub fn router(&self) -> &Router {
        &self.inner.router
    }

    /// The test targets, if there are any.
    pub fn targets(&self) -> Option<&TestTargets> {
        self.inner.targets.as_ref()
    }

    /// The database of flows, if there is one.
    #[cfg(feature = "flow")]
    pub fn flows(&self) -> Option<&sqlx::PgPool> {
        self.inner.flows.as_ref().map(|flows| flows.pool())
    }

    /// What is known of flows, for the metrics.
    #[cfg(feature = "flow")]
    pub(crate) fn flow_counts(&self) -> Option<&Arc<crate::flows::Flows>> {
        self.inner.flows.as_ref()
    }

    /// The configuration that is in force; what needs a restart is in it as it was at the start.
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&lock(&self.inner.config))
    }

    /// A queue, to publish to and to look at its dead letters.
    pub fn queue(&self, name: &str) -> Option<EmbeddedQueue> {
        lock(&self.inner.queues).get(name).cloned()
    }

    /// The names of the queues, sorted.
    pub fn queue_names(&self) -> Vec<String> {
        lock(&self.inner.queues).keys().cloned().collect()
    }

    /// What the queue's file holds for queues that the configuration does not name.
    pub fn stranded(&self) -> Vec<Stranded> {
        let store = self.inner.store.iter();
        store.flat_map(|store| store.stranded(|name| self.queue(name).is_some())).collect()
    }

    /// What calls the targets: its breakers and counters.
    pub fn mediators(&self) -> &Mediators {
        &self.inner.mediators
    }

    /// What the network ingress has counted, if there is one and it has not ended.
    pub fn ingress_stats(&self) -> Option<ingress::Stats> {
        self.ingress_view().map(|view| view.stats())
    }

    fn ingress_view(&self) -> Option<ingress::View> {
        lock(&self.inner.ingress_view).clone()
    }

    /// What operators did.
    pub fn audit(&self) -> &Audit {
        &self.inner.audit
    }

    /// The last minutes, where there is a dashboard.
    pub fn history(&self) -> Option<&Arc<History>> {
        self.inner.history.as_ref()
    }

    /// Spans that the collector has taken, and those that it has not.
    pub fn exported_spans(&self) -> (u64, u64) {
        #[cfg(feature = "otlp")]
        return (self.inner.exported.taken.load(Relaxed), self.inner.exported.failed.load(Relaxed));
        #[cfg(not(feature = "otlp"))]
        (0, 0)
    }

    /// How long ago it was started.
    pub fn uptime(&self) -> Duration {
        self.inner.started.elapsed()
    }

    /// Whether its end has begun.
    pub fn is_closing(&self) -> bool {
        self.inner.closing.load(Relaxed)
    }

    // ── change ─────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reads the layers of its configuration again and applies what can be applied. A mistake in it changes nothing.
    pub async fn reload_layers(&self) -> Result<Reloaded, ReloadError> {
        let config = self.config();
        let read = tokio::task::spawn_blocking(move || config.again()).await;
        let new = read.expect("reading does not panic")?;
        self.reload(new).await
    }

    /// Applies what can be applied of another configuration. What is wrong with it is found before anything changes.
    pub async fn reload(&self, new: Config) -> Result<Reloaded, ReloadError> {
        let _alone = self.inner.reloading.lock().await;
        let old = self.config();
        self.check_reload(&new)?;
        let mut done = Reloaded { changed: Vec::new(), needs_restart: needs_restart(&old, &new) };
        self.apply_pools(&old, &new, &mut done)?;
        self.apply_queues(&new, &mut done);
        self.apply_sources(&old, &new, &mut done);
        let mut now = Config::clone(&old);
        (now.pools, now.pool_defaults, now.drain) = (new.pools.clone(), new.pool_defaults.clone(), new.drain);
        now.sources = new.sources.clone();
        if old.drain != new.drain {
            done.changed.push(format!("shutdown.drain is {:?}", new.drain));
        }
        now.show_applied(&new);
        *lock(&self.inner.config) = Arc::new(now);
        Ok(done)
    }

    /// What cannot be applied, before anything is.
    fn check_reload(&self, new: &Config) -> Result<(), ReloadError> {
        let mut problems = Vec::new();
        if self.is_closing() {
            problems.push(RouterError::Closing.to_string());
        }
        let pools = self.router().pools();
        let there = |code: &str| pools.iter().any(|view| *view.code == *code);
        let wanted = pools.len() + new.pools.keys().filter(|code| !there(code)).count();
        if wanted > POOLS_MAX {
            problems.push(format!(
                "laneway.pools: there would be {wanted} pools, those that drain included; {POOLS_MAX} are allowed"
            ));
        }
        // That of the queue needs a restart.
        let queue = self.config().queue.ungrouped;
        for code in new.pools.iter().filter(|(_, pool)| !pool.is_in_order_on(queue)).map(|(code, _)| code) {
            problems.push(format!(
                "laneway.pools.{code}.ungrouped = serial: cannot be serial while the queue that runs is unordered: what comes back would have lost its order"
            ));
        }
        for view in pools {
            let Some(settings) = new.pools.get(&*view.code) else { continue };
            // It comes again as a new one.
            if view.state == PoolState::Draining {
                continue;
            }
            if settings.affinity != view.settings.affinity {
                problems.push(format!(
                    "laneway.pools.{}.affinity = {}: it stays {} while the pool lives; remove the pool and add it again",
                    view.code, settings.affinity, view.settings.affinity
                ));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(ReloadError::Impossible(problems)) }
    }

    fn apply_pools(&self, old: &Config, new: &Config, done: &mut Reloaded) -> Result<(), ReloadError> {
        let now: BTreeMap<_, _> =
            self.router().pools().into_iter().map(|view| (view.code.to_string(), view)).collect();
        let failed = |error: RouterError| ReloadError::Impossible(vec![error.to_string()]);
        for (code, settings) in &new.pools {
            match now.get(code) {
                None => {
                    self.router().add_pool(code, settings.clone()).map_err(failed)?;
                    done.changed.push(format!("pool {code} was added"));
                }
                Some(before) if before.state == PoolState::Draining => {
                    self.remove_in_background(code.clone());
                    done.changed.push(format!("pool {code} is draining, and is added again when it is gone"));
                }
                Some(before) if *before.settings != *settings => {
                    self.router().change_pool(code, settings.clone()).map_err(failed)?;
                    done.changed.push(format!("pool {code}: {}", differences(&before.settings, settings)));
                }
                Some(_) => {}
            }
        }
        for code in old.pools.keys().filter(|code| !new.pools.contains_key(*code) && now.contains_key(*code))
        {
            self.remove_in_background(code.clone());
            done.changed.push(format!("pool {code} drains and goes"));
        }
        Ok(())
    }

    /// Lets a pool drain, and writes into the log what it has to drain, the first time.
    pub fn drain_pool(&self, code: &str) -> Result<(), RouterError> {
        let before = self.router().pool_view(code)?;
        self.router().drain_pool(code)?;
        if before.state != PoolState::Draining {
            let active: usize = before.engine.dispatchers.iter().map(|part| part.in_flight).sum();
            let queued = before.held.saturating_sub(active);
            tracing::info!(pool = code, queued, active, groups = before.groups, "the pool drains");
        }
        Ok(())
    }

    /// Removes a pool, however long it takes to drain. If a later reload has named it again meanwhile, it is added again.
    fn remove_in_background(&self, code: String) {
        // At once, so that whoever looks after the reload sees it drain.
        let _ = self.drain_pool(&code);
        let service = self.clone();
        tokio::spawn(async move {
            let router = service.router();
            let drains = || router.pool_view(&code).is_ok_and(|view| view.state == PoolState::Draining);
            // Somebody else may have removed it and added another one: that one stays.
            while drains() && !service.is_closing() {
                if let Err(error) = router.remove_pool(&code, REMOVAL).await {
                    router.warnings().give("pool", format!("pool {code} was to go: {error}"));
                }
            }
            let _alone = service.inner.reloading.lock().await;
            if let Some(settings) = service.config().pools.get(&code)
                && router.pool_view(&code).is_err()
                && let Err(error) = router.add_pool(&code, settings.clone())
            {
                router.warnings().give("pool", format!("pool {code} was to come again: {error}"));
            }
        });
    }

    /// Closes a target's breaker and ends its cool-down; who waits for it, in a pool or in the ingress, tries at once. False if the target was not called lately.
    pub fn reset_breaker(&self, target: &str) -> bool {
        if !self.mediators().breakers().reset(target) {
            return false;
        }
        self.let_try(target);
        let (service, target) = (self.clone(), target.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(SECOND_LOOK).await;
            service.let_try(&target);
        });
        true
    }

    /// Whoever tries in vain waits again, and has lost nothing.
    fn let_try(&self, target: &str) {
        let is_meant = |other: &str| self.mediators().is_called(other, target);
        self.router().let_try(is_meant);
        if let Some(ingress) = self.ingress_view() {
            ingress.let_try(is_meant);
        }
    }

    fn apply_queues(&self, new: &Config, done: &mut Reloaded) {
        let lease = SourceSettings { lease: self.config().lease };
        let mut queues = lock(&self.inner.queues);
        for name in &new.queue.names {
            if queues.contains_key(name) {
                continue;
            }
            let Some(store) = &self.inner.store else {
                done.needs_restart
                    .push(format!("laneway.queue.queues: there is no queue until then, {name} neither"));
                continue;
            };
            match store.queue(name) {
                Ok(queue) => {
                    self.router().add_source(Arc::new(queue.clone()), lease);
                    queues.insert(name.clone(), queue);
                    done.changed.push(format!("queue {name} is read"));
                }
                Err(error) => self.router().warnings().give("configuration", error.to_string()),
            }
        }
        for name in queues.keys().filter(|name| !new.queue.names.contains(name)) {
            done.needs_restart.push(format!("laneway.queue.queues: {name} is read until then"));
        }
    }

    /// Sources that are new are read; those that go, or change, deliver first what was taken from them, but for what would take long.
    fn apply_sources(&self, old: &Config, new: &Config, done: &mut Reloaded) {
        for (name, broker) in &new.sources {
            match old.sources.get(name) {
                Some(before) if broker::are_same(&**before, &**broker) => {}
                Some(_) => {
                    self.replace_source(name);
                    done.changed.push(format!("source {name} is drained and opened with its new settings"));
                }
                None if self.router().has_source(name) => {
                    self.replace_source(name);
                    done.changed
                        .push(format!("source {name} is draining, and is read again when it is gone"));
                }
                None => {
                    self.add_source(name, Arc::clone(broker));
                    done.changed.push(format!("source {name} is read"));
                }
            }
        }
        for name in old.sources.keys().filter(|name| !new.sources.contains_key(*name)) {
            self.replace_source(name);
            done.changed.push(format!("source {name} is drained and goes"));
        }
    }

    fn add_source(&self, name: &str, broker: Arc<dyn Broker>) {
        let lease = SourceSettings { lease: self.config().lease };
        self.router().add_source(Arc::new(Configured::new(name, broker)), lease);
    }

    /// In the background: the old one first delivers what was taken from it, so that no group is in two places. What comes after it is what the configuration names then, since
    /// later reloads may have named something else, or nothing; of those who wait for the same one, the first opens it.
    fn replace_source(&self, name: &str) {
        // At once, so that whoever looks after the reload sees it drain, and a source that comes after it is not taken for it.
        let stopping = self.router().stop_source(name);
        let (service, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            if let Some(stopping) = stopping {
                service.router().remove_stopping(stopping, REMOVAL).await;
            }
            let _alone = service.inner.reloading.lock().await;
            if let Some(broker) = service.config().sources.get(&name)
                && !service.is_closing()
                && !service.router().has_source(&name)
            {
                service.add_source(&name, Arc::clone(broker));
            }
        });
    }

    // ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Begins the end: nothing more is taken from sources and from the ingress, everything else goes on. [`held`](Self::held) then counts down.
    pub fn close(&self) {
        self.inner.closing.store(true, Relaxed);
        self.inner.router.close();
        if let Some(ingress) = lock(&self.inner.ingress).as_ref() {
            ingress.handle().close();
        }
    }

    /// Messages that are in the service's hands, those of the ingress included.
    pub fn held(&self) -> usize {
        let ingress = self
            .ingress_stats()
            .map_or(0, |stats| stats.partitions.iter().map(|partition| partition.outstanding as usize).sum());
        self.inner.router.held() + ingress
    }

    /// Ends the service, in the steps at the head of this file. A second call finds nothing left to do.
    pub async fn shutdown(&self, drain: Duration) -> Farewell {
        self.close();
        let ingress = lock(&self.inner.ingress).take();
        let ending = async {
            match ingress {
                Some(ingress) => Some(ingress.shutdown(drain).await),
                None => None,
            }
        };
        // A target of our own that dawdles would be waited for after the time is up.
        let targets = self.inner.targets.clone();
        let hurry = tokio::spawn(async move {
            tokio::time::sleep(drain).await;
            targets.inspect(TestTargets::close);
        });
        let (router, ingress) = tokio::join!(self.inner.router.shutdown(drain), ending);
        hurry.abort();
        // Another call may still be at its end.
        if ingress.is_some() {
            lock(&self.inner.ingress_view).take();
        }
        if let Some(targets) = &self.inner.targets {
            targets.close();
        }
        // Those who read along would be waited for.
        if let Some(history) = &self.inner.history {
            history.end();
        }
        if let Some(watcher) = lock(&self.inner.watcher).take() {
            watcher.abort();
        }
        #[cfg(feature = "flow")]
        if let Some(hearing) = lock(&self.inner.hearing).take() {
            hearing.abort();
        }
        let server = lock(&self.inner.server).take();
        let connections_cut = match server {
            Some(server) => server.shutdown(FAREWELL).await,
            None => 0,
        };
        let _ = tokio::time::timeout(FAREWELL, self.inner.mediators.sinks().close()).await;
        // After the last message: its span is among those that wait.
        #[cfg(feature = "otlp")]
        self.end_export().await;
        self.inner.router.parks_written(FAREWELL).await;
        if let Some(carrier) = lock(&self.inner.carrier).take() {
            carrier.abort();
        }
        if let Some(store) = &self.inner.store {
            store.close().await;
        }
        let ingress_lost = ingress.map_or(0, |report| report.returned.len() + report.still_running);
        Farewell { router, ingress_lost, connections_cut }
    }

    #[cfg(feature = "otlp")]
    async fn end_export(&self) {
        let exporter = lock(&self.inner.exporter).take();
        if let Some(exporter) = exporter {
            exporter.end(SPANS).await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn open_store(config: &Config) -> Result<EmbeddedStore, StartError> {
    let (path, options) = (config.queue.path.clone(), config.queue.options());
    let shown = path.display().to_string();
    // Reads the index of all messages that are there: with millions of them this takes a while.
    let opened = tokio::task::spawn_blocking(move || EmbeddedStore::open(path, options)).await;
    opened.expect("opening does not panic").map_err(|error| StartError::Store { path: shown, error })
}

fn sinks(config: &Config) -> Sinks {
    let sink = |(name, broker): (&String, &Arc<dyn Broker>)| {
        let sink: Arc<dyn Sink> = Arc::new(ConfiguredSink::new(name.as_str(), Arc::clone(broker)));
        (name.clone(), sink)
    };
    Sinks::new(config.sinks.iter().map(sink).collect(), config.mediator.http.timeout)
}

/// Begins to export spans, if a collector is configured.
#[cfg(feature = "otlp")]
fn start_export(
    config: &Config,
    none: Record,
) -> (Arc<crate::otlp::Exported>, Option<crate::otlp::Exporter>, Record) {
    let exported = Arc::<crate::otlp::Exported>::default();
    if config.telemetry.endpoint.is_none() {
        return (exported, None, none);
    }
    let (spans, queue) = crate::trace::Spans::queue();
    let exporter = crate::otlp::Exporter::start(config.telemetry.clone(), queue, Arc::clone(&exported));
    (exported, Some(exporter), Record::with_spans(spans))
}

fn start_router(
    config: &Config,
    mediators: &Mediators,
    record: Arc<Record>,
    parks: Arc<Parks>,
) -> Result<Router, StartError> {
    let (shared, common) = (mediators.clone(), config.mediator.signing_secrets.clone());
    let make: MakeMediator = Arc::new(move |settings: &PoolSettings| {
        let own = if settings.signing_secrets.is_empty() { &common } else { &settings.signing_secrets };
        let signer = Signer::new(own).expect("secrets are checked with the settings");
        Arc::new(shared.with_signer(signer)) as Arc<dyn Mediator>
    });
    let default = config.pools.get(DEFAULT_POOL).cloned().unwrap_or_default();
    let router = Router::start_with(default, make, record, parks)?;
    for (code, settings) in config.pools.iter().filter(|(code, _)| *code != DEFAULT_POOL) {
        router.add_pool(code, settings.clone())?;
    }
    router.park_leftovers();
    Ok(router)
}

/// Connections to the database of flows: few, because every look is one short statement. One of them listens.
#[cfg(feature = "flow")]
fn flows(config: &Config) -> Result<Option<sqlx::PgPool>, StartError> {
    let Some(url) = &config.flow_database else { return Ok(None) };
    let options =
        sqlx::postgres::PgPoolOptions::new().max_connections(5).acquire_timeout(Duration::from_secs(5));
    options.connect_lazy(url.expose()).map(Some).map_err(StartError::FlowDatabase)
}

fn signer(config: &Config, own: &[crate::message::Secret]) -> Signer {
    let secrets = if own.is_empty() { &config.mediator.signing_secrets } else { own };
    Signer::new(secrets).expect("secrets are checked with the configuration")
}

/// What is different in a pool, without its secrets.
fn differences(before: &PoolSettings, after: &PoolSettings) -> String {
    let mut all = Vec::new();
    let mut compare = |name: &str, before: String, after: String| {
        if before != after {
            all.push(format!("{name} {before} -> {after}"));
        }
    };
    let rate = |rate: Option<f64>| rate.map_or("none".to_owned(), |rate| rate.to_string());
    compare("concurrency", before.concurrency.to_string(), after.concurrency.to_string());
    compare("capacity", before.capacity.to_string(), after.capacity.to_string());
    compare("group-capacity", before.group_capacity.to_string(), after.group_capacity.to_string());
    compare("group-latency", format!("{:?}", before.group_latency), format!("{:?}", after.group_latency));
    compare("rate-per-second", rate(before.rate_per_second), rate(after.rate_per_second));
    compare("group-rate-per-second", rate(before.group_rate_per_second), rate(after.group_rate_per_second));
    compare("attempts", before.attempts.to_string(), after.attempts.to_string());
    compare("backoff", format!("{:?}", before.backoff), format!("{:?}", after.backoff));
    compare("backoff-max", format!("{:?}", before.backoff_max), format!("{:?}", after.backoff_max));
    compare("exhausted", format!("{:?}", before.exhausted), format!("{:?}", after.exhausted));
    compare("ungrouped", format!("{:?}", before.ungrouped), format!("{:?}", after.ungrouped));
    if before.signing_secrets != after.signing_secrets {
        all.push("signing-secrets".to_owned());
    }
    all.join(", ")
}

/// The paths that differ and are not applied while the service runs.
fn needs_restart(old: &Config, new: &Config) -> Vec<String> {
    let live = [
        "laneway.pools",
        "laneway.pool-defaults",
        "laneway.shutdown",
        "laneway.queue.queues",
        "laneway.sources",
    ];
    let values = |config: &Config| -> BTreeMap<String, String> {
        config.effective().iter().map(|it| (it.path.clone(), it.value.clone())).collect()
    };
    let (before, after) = (values(old), values(new));
    let differ = |path: &&String| before.get(*path) != after.get(*path);
    let needs = |path: &&String| !live.iter().any(|live| path.starts_with(live));
    let mut paths: BTreeSet<String> =
        before.keys().chain(after.keys()).filter(needs).filter(differ).cloned().collect();
    // Secrets look alike.
    if old.http.admin_token != new.http.admin_token {
        paths.insert("laneway.http.admin-token".to_owned());
    }
    if old.mediator.signing_secrets != new.mediator.signing_secrets {
        paths.insert("laneway.mediator.signing-secrets".to_owned());
    }
    let differs = |(name, broker): (&String, &Arc<dyn Broker>)| {
        !old.sinks.get(name).is_some_and(|before| broker::are_same(&**before, &**broker))
    };
    for (name, _) in new.sinks.iter().filter(|sink| differs(*sink)) {
        paths.insert(format!("laneway.sinks.{name}"));
    }
    paths.into_iter().collect()
}
