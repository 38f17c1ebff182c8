//! The configuration of the service: read once, checked whole, and shown with where each value came from.
//!
//! Whoever starts the service names the layers ([`Layering`]); [`Config::load`] puts them over `reference.conf`, which lies inside the program and has
//! every key with its default, and gives a value that is right, or all that is wrong. `service.rs` receives it, and receives it again at a reload.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use laneway_config::{Effective, Layers, LoadError, ReadError, Section, Settled};

use crate::ingress;
use crate::mediator::{BreakerSettings, HttpSettings, Pattern, Scope, Signer};
use crate::message::{MESSAGE_BYTES_MAX, NAME_BYTES_MAX, Secret};
use crate::pool::{
    CAPACITY_MAX, CONCURRENCY_MAX, Exhausted, PoolSettings, RATES, RIGHT_RATE, Ungrouped, wrong_code,
};
use crate::router::{DEFAULT_POOL, POOLS_MAX};
use crate::source::broker::{self, Broker, Role};
use crate::source::embedded::{self, Durability, QUEUES_MAX, QueueOptions};
use crate::standby;

/// Every key with its default, as HOCON with comments.
pub const REFERENCE: &str = include_str!("reference.conf");

/// The path above all keys.
const ROOT: &str = "laneway";

/// A day: longer times are mistakes.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// So many sources there may be, and so many sinks.
const BROKERS_MAX: usize = 1_000;

/// What lies over the reference, the lowest first: a file, variables of the environment, and flags.
#[derive(Clone, Default)]
pub struct Layering {
    /// A file. It must be there.
    pub file: Option<PathBuf>,
    /// Variables; those that do not begin with `LANEWAY_` are passed over, those that do and name no setting are left out and told
    /// ([`Config::warnings`]).
    pub environment: Vec<(String, String)>,
    /// Values by path, such as `("laneway.http.bind", "127.0.0.1:9000")`.
    pub sets: Vec<(String, String)>,
}

impl fmt::Debug for Layering {
    /// The environment and the flags may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths: Vec<_> = self.sets.iter().map(|(path, _)| path).collect();
        f.debug_struct("Layering").field("file", &self.file).field("sets", &paths).finish_non_exhaustive()
    }
}

impl Layering {
    /// A file over the reference, and nothing else.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Layering { file: Some(path.into()), ..Layering::default() }
    }

    /// With one value more on top.
    #[must_use]
    pub fn set(mut self, path: &str, value: &str) -> Self {
        self.sets.push((path.to_owned(), value.to_owned()));
        self
    }

    fn layers(&self) -> Layers {
        let mut layers = Layers::new().text("reference.conf", REFERENCE);
        if let Some(file) = &self.file {
            layers = layers.file(file);
        }
        layers = layers.environment("LANEWAY", self.environment.iter().cloned());
        self.sets.iter().fold(layers, |layers, (path, value)| layers.set(path, value))
    }
}

/// Why there is no configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A layer cannot be read as HOCON.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Values are not what they should be.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl ConfigError {
    /// Each thing that is wrong, in a sentence.
    pub fn problems(&self) -> Vec<String> {
        match self {
            ConfigError::Load(error) => error.problems.iter().map(ToString::to_string).collect(),
            ConfigError::Read(error) => error.problems.iter().map(ToString::to_string).collect(),
        }
    }
}

/// The configuration of the service. All of it has been checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// The HTTP API.
    pub http: Http,
    /// The embedded queue.
    pub queue: Queue,
    /// The brokers that are read, by name.
    pub sources: BTreeMap<String, Arc<dyn Broker>>,
    /// The brokers that messages with `mediationType: SINK` are published to, by name.
    pub sinks: BTreeMap<String, Arc<dyn Broker>>,
    /// How long a delivery is leased.
    pub lease: Duration,
    /// What a pool is like that does not say otherwise.
    pub pool_defaults: PoolSettings,
    /// All pools, the default pool among them.
    pub pools: BTreeMap<String, PoolSettings>,
    /// How targets are called.
    pub mediator: Mediation,
    /// The network ingress, if there is one.
    pub ingress: Option<ingress::Settings>,
    /// The database of flows, if there is one.
    pub flow_database: Option<Secret>,
    /// The dashboard.
    pub dashboard: Dashboard,
    /// Spans for a collector.
    pub telemetry: Telemetry,
    /// The log.
    pub log: Log,
    /// How long a shutdown drains.
    pub drain: Duration,
    /// The lease by which one service of several works, if there is one.
    pub standby: Option<standby::Settings>,
    /// Whether there are test targets: unless somebody says so, only where nobody else can reach them.
    pub test_targets: bool,
    shown: Vec<Effective>,
    warnings: Vec<String>,
    layering: Layering,
}

/// The HTTP API.
#[derive(Clone, Debug, PartialEq)]
pub struct Http {
    /// Where it listens.
    pub bind: SocketAddr,
    /// What admin routes ask for, if anything.
    pub admin_token: Option<Secret>,
    /// The longest body of a request.
    pub body_bytes_max: usize,
    /// How many connections are served at once.
    pub connections_max: usize,
    /// How long the head of a request may take, and a connection may be idle.
    pub head_timeout: Duration,
    /// How long the body of a request may take.
    pub body_timeout: Duration,
    /// How long an answer may take.
    pub request_timeout: Duration,
    /// How long a client may take nothing of an answer.
    pub write_timeout: Duration,
}

/// The dashboard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dashboard {
    /// Whether there is one.
    pub enabled: bool,
    /// How far back it goes.
    pub history: Duration,
    /// How many pages may be open at once.
    pub subscribers_max: usize,
}

/// Spans for a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Telemetry {
    /// Where they are posted, if anywhere.
    pub endpoint: Option<hyper::Uri>,
    /// What the service is called there.
    pub service_name: String,
}

/// The log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    /// The least that is written; nothing if nothing is.
    pub level: Option<tracing::Level>,
    /// Whether it is an object of JSON per line.
    pub json: bool,
}

/// The embedded queue.
#[derive(Clone, Debug, PartialEq)]
pub struct Queue {
    /// Its file.
    pub path: PathBuf,
    /// What acknowledgements survive.
    pub durability: Durability,
    /// The names of the queues. Without any there is no embedded queue, and no file.
    pub names: Vec<String>,
    /// Messages per queue.
    pub capacity: usize,
    /// How large the file may grow.
    pub bytes_max: Option<u64>,
    /// How long deduplication ids are remembered.
    pub deduplication_window: Duration,
    /// What messages without a group are to each other.
    pub ungrouped: Ungrouped,
    /// Bodies kept in memory, per queue.
    pub cache_bytes: usize,
}

impl Queue {
    /// As the store wants it.
    pub fn options(&self) -> embedded::Options {
        let ungrouped = match self.ungrouped {
            Ungrouped::Serial => embedded::Ungrouped::Serial,
            Ungrouped::Unordered => embedded::Ungrouped::Unordered,
        };
        embedded::Options {
            durability: self.durability,
            bytes_max: self.bytes_max,
            queue: QueueOptions {
                capacity: self.capacity,
                ungrouped,
                deduplication_window: self.deduplication_window,
                cache_bytes: self.cache_bytes,
            },
            ..embedded::Options::default()
        }
    }
}

/// How targets are called.
#[derive(Clone, Debug)]
pub struct Mediation {
    /// Everything but the signatures.
    pub http: HttpSettings,
    /// What requests are signed with where the pool has no secrets of its own.
    pub signing_secrets: Vec<Secret>,
}

impl Config {
    /// Reads all layers. An error says everything that is wrong with them.
    pub fn load(layering: &Layering) -> Result<Config, ConfigError> {
        let Settled { config: tree, strays, read } = settle(layering)?;
        let mut config = read.map_err(|mut error| {
            // What was meant to mend it may be among them.
            error.problems.extend(strays.iter().cloned());
            error
        })?;
        config.shown = tree.effective("");
        config.warnings = strays.iter().map(ToString::to_string).collect();
        config.layering = layering.clone();
        Ok(config)
    }

    /// Reads the same layers again: the file may have changed.
    pub fn again(&self) -> Result<Config, ConfigError> {
        Config::load(&self.layering)
    }

    /// What its user should know although nothing is wrong: each variable of the environment that looks like ours and names no setting.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Every value with the layer that it came from. Secrets are hidden.
    pub fn effective(&self) -> &[Effective] {
        &self.shown
    }

    /// The effective values of some layers, right or wrong, as long as they are HOCON. Secrets are hidden.
    pub fn show(layering: &Layering) -> Result<Vec<Effective>, ConfigError> {
        Ok(settle(layering)?.config.effective(""))
    }

    /// Takes over what a reload has applied. Queues can be added while the service runs, and not be removed; where there was none, there is no file for them.
    pub(crate) fn show_applied(&mut self, new: &Config) {
        let mut live = vec!["laneway.pools", "laneway.pool-defaults", "laneway.shutdown", "laneway.sources"];
        let has_queues = !self.queue.names.is_empty();
        if has_queues && self.queue.names.iter().all(|name| new.queue.names.contains(name)) {
            live.push("laneway.queue.queues");
            self.queue.names.clone_from(&new.queue.names);
        }
        let live = |it: &Effective| live.iter().any(|path| it.path.starts_with(path));
        self.shown.retain(|it| !live(it));
        self.shown.extend(new.shown.iter().filter(|it| live(it)).cloned());
    }

    /// Whether the API can be reached from other machines.
    pub fn is_beyond_loopback(&self) -> bool {
        !self.http.bind.ip().is_loopback()
    }
}

fn settle(layering: &Layering) -> Result<Settled<Config>, LoadError> {
    Ok(layering.layers().load()?.settle("", |document| document.section(ROOT, read)))
}

fn read(s: &mut Section<'_>) -> Config {
    let http = s.section("http", read_http);
    let queue = s.section("queue", read_queue);
    let sources = read_brokers(s, "sources", Role::Source);
    let sinks = read_brokers(s, "sinks", Role::Sink);
    for name in queue.names.iter().filter(|name| sources.contains_key(*name)) {
        s.problem_in(
            "sources",
            &format!(".{name}"),
            name.clone(),
            "is the name of a queue as well (laneway.queue.queues)",
        );
    }
    let lease = s.duration("lease", Duration::from_secs(1)..=Duration::from_secs(12 * 3600));
    let pool_defaults = s.section("pool-defaults", |s| read_pool(s, None));
    let pools = s.sections("pools", |code, s| {
        let settings = read_pool(s, Some(&pool_defaults));
        (code.to_owned(), settings)
    });
    let pools: BTreeMap<_, _> = pools.into_iter().map(|(_, pool)| pool).collect();
    check_pools(s, &queue, &pools);
    let mediator = s.section("mediator", read_mediator);
    let ingress = s.section("ingress", read_ingress);
    if queue.names.is_empty() && sources.is_empty() && ingress.is_none() && s.problem_count() == 0 {
        s.problem(
            "sources",
            "must have one, where there is neither a queue (laneway.queue.queues) nor an ingress",
        );
    }
    let flow_database = s.section("flow", read_flow);
    let dashboard = s.section("dashboard", |s| Dashboard {
        enabled: s.flag("enabled"),
        history: s.duration("history", Duration::from_secs(10)..=Duration::from_secs(3_600)),
        subscribers_max: s.integer("subscribers-max", 1..=10_000) as usize,
    });
    let telemetry = s.section("telemetry", read_telemetry);
    let log = s.section("log", read_log);
    let drain = s.section("shutdown", |s| s.duration("drain", Duration::ZERO..=LONGEST));
    let standby = s.section("standby", read_standby);
    let is_loopback = http.bind.ip().is_loopback();
    let test_targets = s.one_of("test-targets", &[("loopback", is_loopback), ("on", true), ("off", false)]);
    Config {
        http,
        queue,
        sources,
        sinks,
        lease,
        pool_defaults,
        pools,
        mediator,
        ingress,
        flow_database,
        dashboard,
        telemetry,
        log,
        drain,
        standby,
        test_targets,
        shown: Vec::new(),
        warnings: Vec::new(),
        layering: Layering::default(),
    }
}

// ── sections ──────────────────────────────────────────────────────────────────────────────────────────────────────────

fn read_http(s: &mut Section<'_>) -> Http {
    let seconds = Duration::from_millis(100)..=LONGEST;
    let bind = address(s, "bind");
    let token = s.text("admin-token");
    if !token.is_empty() && (token.trim() != token || !token.bytes().all(|byte| byte.is_ascii_graphic())) {
        s.problem("admin-token", "must be visible ASCII without blanks, so that it fits into a header");
    }
    if token.is_empty() && !bind.ip().is_loopback() {
        let what = "must not be empty: `http.bind` can be reached from other machines, which could then publish and remove messages";
        s.problem("admin-token", what);
    }
    Http {
        bind,
        admin_token: (!token.is_empty()).then(|| Secret::new(token)),
        body_bytes_max: s.bytes("body-limit", 1_024..=1 << 30) as usize,
        connections_max: s.integer("connections-max", 1..=1_000_000) as usize,
        head_timeout: s.duration("head-timeout", seconds.clone()),
        body_timeout: s.duration("body-timeout", seconds.clone()),
        request_timeout: s.duration("request-timeout", seconds.clone()),
        write_timeout: s.duration("write-timeout", seconds),
    }
}

fn address(s: &mut Section<'_>, key: &str) -> SocketAddr {
    let text = s.text(key);
    text.parse().unwrap_or_else(|_| {
        s.problem(key, "must be an address with a port, such as \"127.0.0.1:8080\"");
        SocketAddr::from(([127, 0, 0, 1], 0))
    })
}

fn read_queue(s: &mut Section<'_>) -> Queue {
    let path = s.text("path");
    if path.trim().is_empty() {
        s.problem("path", "must be the path of a file");
    }
    let names = s.texts("queues");
    for (place, name) in names.iter().enumerate() {
        let part = format!("[{place}]");
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            let what = format!("must be a name of 1 to {NAME_BYTES_MAX} bytes without control characters");
            s.problem_in("queues", &part, name.escape_debug().to_string(), what);
        } else if names[..place].contains(name) {
            s.problem_in("queues", &part, name.clone(), "is there already");
        }
    }
    if names.len() > QUEUES_MAX {
        s.problem("queues", format!("must have at most {QUEUES_MAX} names"));
    }
    let durability =
        s.one_of("durability", &[("power-loss", Durability::PowerLoss), ("crash", Durability::Crash)]);
    Queue {
        path: path.into(),
        durability,
        names,
        capacity: s.integer("capacity", 1..=1_000_000_000) as usize,
        bytes_max: s.optional("size-max", |s| s.bytes("size-max", 1 << 20..=1 << 50)),
        deduplication_window: s.duration("deduplication-window", Duration::ZERO..=7 * LONGEST),
        ungrouped: ungrouped(s),
        cache_bytes: s.bytes("cache", 0..=1 << 40) as usize,
    }
}

fn read_standby(s: &mut Section<'_>) -> Option<standby::Settings> {
    let (url, name) = (s.text("lease"), s.text("name"));
    let time = s.duration("time", Duration::from_secs(2)..=Duration::from_secs(3600));
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        s.problem(
            "name",
            format!("must be a name of 1 to {NAME_BYTES_MAX} bytes without control characters"),
        );
    }
    let settings = standby::Settings { url: Secret::new(url), name, time };
    if settings.url.expose().is_empty() {
        return None;
    }
    if let Err(what) = settings.check() {
        s.problem("lease", what);
    }
    Some(settings)
}

fn read_brokers(s: &mut Section<'_>, key: &str, role: Role) -> BTreeMap<String, Arc<dyn Broker>> {
    let read = s.sections(key, |_, s| broker::read(s, role));
    for (name, _) in &read {
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            let what = format!("must have a name of 1 to {NAME_BYTES_MAX} bytes without control characters");
            s.problem_in(key, &format!(".{name}"), name.escape_debug().to_string(), what);
        }
    }
    if read.len() > BROKERS_MAX {
        s.problem(key, format!("must be at most {BROKERS_MAX}"));
    }
    read.into_iter().filter_map(|(name, broker)| Some((name, broker?))).collect()
}

fn ungrouped(s: &mut Section<'_>) -> Ungrouped {
    s.one_of("ungrouped", &[("serial", Ungrouped::Serial), ("unordered", Ungrouped::Unordered)])
}

/// Reads a pool. Without defaults every key has to be there, or null where that means something.
fn read_pool(s: &mut Section<'_>, defaults: Option<&PoolSettings>) -> PoolSettings {
    let mut pool = defaults.cloned().unwrap_or_default();
    let all = defaults.is_none();
    let asked = |s: &mut Section<'_>, key: &str| all || s.has(key);
    if asked(s, "concurrency") {
        pool.concurrency = s.integer("concurrency", 1..=CONCURRENCY_MAX as u64) as usize;
    }
    if asked(s, "capacity") {
        pool.capacity = s.integer("capacity", 1..=CAPACITY_MAX as u64) as usize;
    }
    let own_capacity = asked(s, "group-capacity");
    if own_capacity {
        pool.group_capacity = s.integer("group-capacity", 1..=CAPACITY_MAX as u64) as usize;
    }
    // A small pool need not say that its groups are small, too; a pool that says both must say them right.
    if !own_capacity {
        pool.group_capacity = pool.group_capacity.min(pool.capacity);
    } else if pool.group_capacity > pool.capacity {
        s.problem(
            "group-capacity",
            format!("must be at most the pool's capacity, which is {}", pool.capacity),
        );
    }
    let latency = |s: &mut Section<'_>| s.duration("group-latency", Duration::from_millis(1)..=LONGEST);
    pool.group_latency = s.nullable("group-latency", latency).unwrap_or(pool.group_latency);
    let rate = |s: &mut Section<'_>, key: &str| {
        s.nullable(key, |s| s.number(key, RIGHT_RATE, |rate| RATES.contains(&rate)))
    };
    pool.rate_per_second = rate(s, "rate-per-second").unwrap_or(pool.rate_per_second);
    pool.group_rate_per_second = rate(s, "group-rate-per-second").unwrap_or(pool.group_rate_per_second);
    if asked(s, "attempts") {
        pool.attempts = s.integer("attempts", 1..=1_000_000) as u32;
    }
    if asked(s, "backoff") {
        pool.backoff = s.duration("backoff", Duration::ZERO..=LONGEST);
    }
    if asked(s, "backoff-max") {
        pool.backoff_max = s.duration("backoff-max", Duration::ZERO..=LONGEST);
    }
    if pool.backoff > pool.backoff_max {
        s.problem("backoff", format!("must be at most backoff-max, which is {:?}", pool.backoff_max));
    }
    read_exhausted(s, &mut pool, all);
    if asked(s, "ungrouped") {
        pool.ungrouped = ungrouped(s);
    }
    if asked(s, "affinity") {
        pool.affinity = s.integer("affinity", 1..=CONCURRENCY_MAX as u64) as usize;
    }
    if !pool.affinity.is_power_of_two() || pool.affinity > pool.concurrency {
        s.problem("affinity", "must be a power of two that is at most the concurrency");
    }
    if asked(s, "signing-secrets") {
        pool.signing_secrets = secrets(s);
    }
    pool
}

fn read_exhausted(s: &mut Section<'_>, pool: &mut PoolSettings, all: bool) {
    let before = match pool.exhausted {
        Exhausted::GiveBack(after) => after,
        Exhausted::DeadLetter | Exhausted::ParkGroup => Duration::from_secs(30),
    };
    let after = match all || s.has("give-back") {
        true => s.duration("give-back", Duration::ZERO..=LONGEST),
        false => before,
    };
    if all || s.has("exhausted") {
        let choices = [
            ("dead-letter", Exhausted::DeadLetter),
            ("park-group", Exhausted::ParkGroup),
            ("give-back", Exhausted::GiveBack(after)),
        ];
        pool.exhausted = s.one_of("exhausted", &choices);
    } else if let Exhausted::GiveBack(_) = pool.exhausted {
        pool.exhausted = Exhausted::GiveBack(after);
    }
}

fn secrets(s: &mut Section<'_>) -> Vec<Secret> {
    let secrets: Vec<Secret> = s.texts("signing-secrets").into_iter().map(Secret::new).collect();
    if let Err(bad) = Signer::new(&secrets) {
        s.problem("signing-secrets", format!("{bad}; base64 of at least 16 bytes would be right"));
    }
    secrets
}

fn check_pools(s: &mut Section<'_>, queue: &Queue, pools: &BTreeMap<String, PoolSettings>) {
    for (code, pool) in pools {
        let part = format!(".{code}");
        let shown = code.escape_debug().to_string();
        if let Some(what) = wrong_code(code) {
            s.problem_in("pools", &part, shown, what);
        } else if !pool.is_in_order_on(queue.ungrouped) {
            let what = "cannot be serial while queue.ungrouped is unordered: what comes back would have lost its order";
            s.problem_in("pools", &format!("{part}.ungrouped"), "serial", what);
        }
    }
    if pools.len() > POOLS_MAX {
        s.problem("pools", format!("must be at most {POOLS_MAX}"));
    }
    if !pools.contains_key(DEFAULT_POOL) {
        s.problem("pools", format!("must have {DEFAULT_POOL}: it stands in for unknown pools"));
    }
}

fn read_mediator(s: &mut Section<'_>) -> Mediation {
    let times = Duration::from_millis(1)..=LONGEST;
    let allowed = patterns(s, "allow");
    let mut http = HttpSettings {
        connect_timeout: s.duration("connect-timeout", times.clone()),
        timeout: s.duration("timeout", times.clone()),
        body_bytes_max: s.bytes("body-limit", 0..=64 << 20) as usize,
        idle_connections_max: s.integer("idle-connections-max", 0..=1_000_000) as usize,
        idle_timeout: s.duration("idle-timeout", times),
        allowed: (!allowed.is_empty()).then_some(allowed),
        prior_knowledge: patterns(s, "http2-prior-knowledge"),
        scope: s.one_of("scope", &[("path", Scope::Path), ("origin", Scope::Origin)]),
        breaker: s.section("breaker", read_breaker),
        ..HttpSettings::default()
    };
    for (place, file) in s.texts("trusted-certificates").into_iter().enumerate() {
        let trusted = std::fs::read(&file).map_err(|error| error.to_string());
        let trusted = trusted.and_then(|pem| http.trust_pem(&pem).map_err(|error| error.to_string()));
        if let Err(problem) = trusted {
            s.problem_in("trusted-certificates", &format!("[{place}]"), file, problem);
        }
    }
    Mediation { http, signing_secrets: secrets(s) }
}

fn patterns(s: &mut Section<'_>, key: &str) -> Vec<Pattern> {
    let mut patterns = Vec::new();
    for (place, text) in s.texts(key).into_iter().enumerate() {
        match text.parse() {
            Ok(pattern) => patterns.push(pattern),
            Err(_) => {
                let what = "must be a host, *.host, host:port, or a URL with a path to begin with";
                s.problem_in(key, &format!("[{place}]"), text, what);
            }
        }
    }
    patterns
}

fn read_breaker(s: &mut Section<'_>) -> BreakerSettings {
    let times = Duration::from_millis(1)..=LONGEST;
    BreakerSettings {
        failure_share: s
            .number("failure-share", "above 0 and at most 1", |share| share > 0.0 && share <= 1.0),
        calls_min: s.integer("calls-min", 1..=1_000_000) as usize,
        window_calls: s.integer("window-calls", 1..=1_000_000) as usize,
        window_age: s.duration("window-age", times.clone()),
        open_for: s.duration("open-for", times),
        successes_to_close: s.integer("successes-to-close", 1..=1_000) as u32,
        targets_max: s.integer("targets-max", 1..=10_000_000) as usize,
        ..BreakerSettings::default()
    }
}

fn read_flow(s: &mut Section<'_>) -> Option<Secret> {
    let database = s.text("database");
    if database.is_empty() {
        return None;
    }
    if !cfg!(feature = "flow") {
        s.problem("database", "must be empty: this program was built without the feature `flow`");
    } else if !database.starts_with("postgres://") && !database.starts_with("postgresql://") {
        s.problem("database", "must be a URL such as postgres://user:password@127.0.0.1:5432/name");
    }
    Some(Secret::new(database))
}

fn read_telemetry(s: &mut Section<'_>) -> Telemetry {
    let service_name = s.text("service-name");
    let endpoint = s.optional("otlp-endpoint", |s| s.text("otlp-endpoint"));
    let uri = endpoint.as_ref().and_then(|text| {
        let uri: hyper::Uri = format!("{}/v1/traces", text.trim_end_matches('/')).parse().ok()?;
        (matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()).then_some(uri)
    });
    if endpoint.is_some() && uri.is_none() {
        s.problem("otlp-endpoint", "must be the URL of a collector, such as \"http://127.0.0.1:4318\"");
    } else if endpoint.is_some() && cfg!(not(feature = "otlp")) {
        s.problem(
            "otlp-endpoint",
            "needs a program that was built with the feature `otlp`; this one was not",
        );
    }
    Telemetry { endpoint: uri, service_name }
}

fn read_log(s: &mut Section<'_>) -> Log {
    use tracing::Level;
    let levels = [
        ("off", None),
        ("error", Some(Level::ERROR)),
        ("warn", Some(Level::WARN)),
        ("info", Some(Level::INFO)),
    ];
    Log { level: s.one_of("level", &levels), json: s.one_of("format", &[("text", false), ("json", true)]) }
}

fn read_ingress(s: &mut Section<'_>) -> Option<ingress::Settings> {
    let (enabled, listen, expose) = (s.flag("enabled"), address(s, "bind"), s.flag("expose"));
    if enabled && !listen.ip().is_loopback() && !expose {
        s.problem("expose", "must be true where `bind` is beyond loopback: whoever reaches the ingress can have any target called");
    }
    let least = ingress::LINE_BYTES_MIN as u64;
    let mut settings = ingress::Settings {
        listen,
        partitions: s.integer("partitions", 1..=ingress::PARTITIONS_MAX as u64) as usize,
        workers: s.integer("workers", 1..=ingress::WORKERS_MAX as u64) as usize,
        partition_capacity: s.integer("partition-capacity", 1..=CAPACITY_MAX as u64) as usize,
        family_capacity: s.integer("family-capacity", 1..=CAPACITY_MAX as u64) as usize,
        connections_max: s.integer("connections-max", 1..=1_000_000) as usize,
        line_bytes_max: s.bytes("line-limit", least..=MESSAGE_BYTES_MAX as u64) as usize,
        bytes_max: s.bytes("bytes-max", least..=1 << 40) as usize,
        answers_max: s.integer("answers-max", 2..=1_000_000) as usize,
        line_time: s.duration("line-timeout", Duration::from_millis(1)..=LONGEST),
        idle_time: s.duration("idle-timeout", Duration::from_millis(1)..=LONGEST),
        write_time: s.duration("write-timeout", Duration::from_millis(1)..=LONGEST),
        ..ingress::Settings::default()
    };
    settings.retry.max_attempts = s.integer("attempts", 1..=1_000_000) as u32;
    settings.retry.base = s.duration("backoff", Duration::ZERO..=LONGEST);
    if !settings.partitions.is_power_of_two() {
        s.problem("partitions", "must be a power of two");
    }
    if settings.family_capacity > settings.partition_capacity {
        s.problem("family-capacity", "must be at most partition-capacity");
    }
    if settings.bytes_max < settings.line_bytes_max {
        s.problem("bytes-max", "must be at least line-limit, or the longest line would never fit");
    }
    enabled.then_some(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Config, ConfigError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("laneway.conf");
        std::fs::write(&file, text).unwrap();
        Config::load(&Layering::file(file))
    }

    fn problems(text: &str) -> Vec<String> {
        load(text).expect_err("something is wrong").problems()
    }

    #[test]
    fn the_reference_is_what_the_types_have_as_their_defaults() {
        let config = Config::load(&Layering::default()).unwrap();
        assert_eq!(config.pool_defaults, PoolSettings::default());
        assert_eq!(config.pools, BTreeMap::from([(DEFAULT_POOL.to_owned(), PoolSettings::default())]));
        assert_eq!(config.mediator.http.breaker, BreakerSettings::default());
        assert_eq!(config.mediator.http.timeout, HttpSettings::default().timeout);
        assert_eq!(config.ingress, None);
        let config = Config::load(&Layering::default().set("laneway.ingress.enabled", "true")).unwrap();
        assert_eq!(config.ingress, Some(ingress::Settings::default()));
        let (store, reference) = (embedded::QueueOptions::default(), config.queue.options().queue);
        assert_eq!((store.capacity, store.cache_bytes), (reference.capacity, reference.cache_bytes));
        assert_eq!(store.deduplication_window, reference.deduplication_window);
    }

    #[test]
    fn test_targets_are_on_loopback_alone_unless_somebody_says_otherwise() {
        let beyond = "laneway.http { bind = \"0.0.0.0:1\", admin-token = long-enough }";
        let has = |text: &str| load(text).unwrap().test_targets;
        assert!(has("") && !has(beyond));
        assert!(has(&format!("{beyond}, laneway.test-targets = on")));
        assert!(!has("laneway.test-targets = off"));
        assert_eq!(problems("laneway.test-targets = maybe").len(), 1);
    }

    #[test]
    fn the_limits_of_the_ingress_can_be_set_and_are_checked() {
        let text = "laneway.ingress { enabled = true, bytes-max = 1 MiB, answers-max = 7, line-timeout = 3 s, write-timeout = 4 s }";
        let ingress = load(text).unwrap().ingress.unwrap();
        assert_eq!((ingress.bytes_max, ingress.answers_max), (1 << 20, 7));
        assert_eq!((ingress.line_time.as_secs(), ingress.write_time.as_secs()), (3, 4));
        let wrong = problems("laneway.ingress { bytes-max = 1 KiB, answers-max = 1 }");
        assert_eq!(wrong.len(), 2, "{wrong:?}");
    }

    #[test]
    fn a_pool_says_only_what_is_different() {
        let text = "laneway { pool-defaults { attempts = 9, rate-per-second = 5 }, pools { small { capacity = 10, concurrency = 2 }
            back { exhausted = give-back, give-back = 5 s }, free { rate-per-second = null } } }";
        let config = load(text).unwrap();
        let small = &config.pools["small"];
        assert_eq!((small.capacity, small.group_capacity, small.concurrency), (10, 10, 2));
        assert_eq!((small.attempts, small.rate_per_second), (9, Some(5.0)));
        assert_eq!(config.pools["back"].exhausted, Exhausted::GiveBack(Duration::from_secs(5)));
        assert_eq!(config.pools["free"].rate_per_second, None, "null takes the rate of the defaults away");
        assert_eq!(config.pools[DEFAULT_POOL].attempts, 9);
    }

    #[test]
    fn the_file_the_environment_and_flags_lie_over_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("laneway.conf");
        std::fs::write(
            &file,
            "laneway { http { bind = \"127.0.0.1:1\" }, lease = 5 s, shutdown { drain = 5 s } }",
        )
        .unwrap();
        let variable = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let layering = Layering {
            file: Some(file.clone()),
            environment: vec![
                variable("LANEWAY_LEASE", "6 s"),
                variable("LANEWAY_SHUTDOWN_DRAIN", "6 s"),
                variable("HOME", "/"),
            ],
            sets: Vec::new(),
        };
        let config = Config::load(&layering.set("laneway.shutdown.drain", "7 s")).unwrap();
        assert_eq!(config.http.bind.port(), 1);
        assert_eq!((config.lease.as_secs(), config.drain.as_secs()), (6, 7));
        let origin =
            |path: &str| config.effective().iter().find(|it| it.path == path).unwrap().origin.clone();
        assert_eq!(origin("laneway.http.bind"), file.display().to_string());
        assert_eq!(origin("laneway.lease"), "$LANEWAY_LEASE");
        assert_eq!(origin("laneway.test-targets"), "reference.conf");
    }

    #[test]
    fn variables_that_name_no_setting_are_warnings_until_something_is_wrong() {
        let variable = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let mut layering = Layering {
            environment: vec![
                variable("LANEWAY_SEED", "4711"),
                variable("LANEWAY_HTTP_ADMIN_TOKEN", "hunter2"),
                variable("LANEWAY_POOLS_ORDERS_CONCURENCY", "5"),
            ],
            ..Layering::default()
        };
        let config = Config::load(&layering).unwrap();
        let warnings = config.warnings();
        assert_eq!(warnings.len(), 3, "{warnings:#?}");
        for part in ["$LANEWAY_SEED", "LANEWAY_HTTP_ADMIN__TOKEN?", "LANEWAY_POOLS_ORDERS_CONCURRENCY?"] {
            assert!(warnings.iter().any(|warning| warning.contains(part)), "{part}: {warnings:#?}");
        }
        assert!(!format!("{warnings:?}").contains("hunter2"));
        assert_eq!(config.pools.len(), 1, "nothing of them is in force");
        let shown = Config::show(&layering).unwrap();
        assert_eq!(shown, config.effective());
        assert!(shown.iter().all(|it| !it.origin.starts_with('$')), "{shown:#?}");
        // The token would have been right, had it been one.
        layering = layering.set("laneway.http.bind", "\"0.0.0.0:1\"");
        let problems = Config::load(&layering).unwrap_err().problems();
        assert_eq!(problems.len(), 4, "{problems:#?}");
        assert!(problems[0].contains("must not be empty"), "{problems:#?}");
        assert!(
            problems.iter().any(|problem| problem.contains("LANEWAY_HTTP_ADMIN__TOKEN?")),
            "{problems:#?}"
        );
    }

    #[test]
    fn all_that_is_wrong_is_said_at_once_with_the_nearest_known_key() {
        let found = problems(
            r#"laneway {
                http { bind = "0.0.0.0:8080", adminToken = x }
                queue { durability = none, queues = [a, a], ungrouped = unordered }
                pools { orders { concurency = 5, capacity = 10, group-capacity = 11, affinity = 3 }, default-pool {}
                    slow { rate-per-second = 1e-12, group-rate-per-second = 1e-20 } }
                mediator { allow = ["https://a/x?y"], signing-secrets = [short], breaker { failure-share = 2 } }
                ingress { enabled = true, bind = "0.0.0.0:1", partitions = 3 }
                typo = 1
            }"#,
        );
        for part in [
            "laneway.http.admin-token = (hidden) (reference.conf): must not be empty",
            "did you mean \"admin-token\"?",
            "laneway.queue.durability = \"none\"",
            "laneway.queue.queues[1] = a",
            "did you mean \"concurrency\"?",
            "laneway.pools.orders.group-capacity = 11",
            "laneway.pools.orders.affinity = 3",
            "laneway.pools.orders.ungrouped = serial",
            "laneway.pools.default-pool = default-pool",
            "laneway.mediator.allow[0] = https://a/x?y",
            "laneway.mediator.signing-secrets = (hidden)",
            "laneway.mediator.breaker.failure-share = 2",
            "laneway.ingress.expose = false",
            "laneway.ingress.partitions = 3",
            "laneway.pools.slow.rate-per-second = 1e-12",
            "laneway.pools.slow.group-rate-per-second = 1e-20",
            "must be a number from 0.000001 (one in eleven days) to 1000000",
            "laneway.typo = 1",
        ] {
            assert!(found.iter().any(|problem| problem.contains(part)), "{part} is not among {found:#?}");
        }
    }

    #[test]
    fn secrets_are_nowhere_in_what_is_shown() {
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let text = format!(
            "laneway {{ http.admin-token = hunter2, mediator.signing-secrets = [{secret}], pools.a.signing-secrets = [{secret}] }}"
        );
        let config = load(&text).unwrap();
        let shown = format!("{config:?} {:?}", config.effective());
        assert!(!shown.contains("hunter2") && !shown.contains(secret), "{shown}");
        assert_eq!(config.pools["a"].signing_secrets[0].expose(), secret);
    }
}
