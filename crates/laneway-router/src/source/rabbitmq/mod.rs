//! RabbitMQ: quorum queues, read by one instance at a time, with the next one waiting in line.
//!
//! The configuration hands over a section or a URL, which becomes [`Settings`]; from them the service opens sources ([`RabbitQueue::consumer`]) and sinks
//! ([`RabbitSink`]), and `laneway doctor` examines them.
//!
//! | file | part |
//! |---|---|
//! | `mod.rs` | settings, and what an examination finds |
//! | `link.rs` | connections, queues that are made or missed, publishing with confirmation |
//! | `source.rs` | subscriptions, and what is done with what comes over them |
//! | `acks.rs` | acknowledgements, one for many where that is true |
//!
//! # What keeps the order
//!
//! A queue is a quorum queue with a *single active consumer*: all instances subscribe, one is served. It has its messages in hand, unacknowledged, up to the
//! prefetch count; which of them may run is decided in this process (`pushed/`). When the instance goes, however it goes, its channel closes, and
//! a quorum queue puts everything that was not acknowledged back to its head, in order, before it serves the next in line.
//!
//! Two things that AMQP offers do not keep it, and are not used. A message that is rejected with `requeue` goes behind those that were rejected before it, and
//! in front of what is delivered already. And a subscription that is *cancelled* leaves what it has in hand unacknowledged, while the next in line is served
//! from the middle of the queue. So nothing is ever requeued alone, and no subscription is ever cancelled: its channel is closed.
//!
//! # Partitions
//!
//! One queue is served to one instance. To share the work, there are several queues behind an exchange of the type `x-consistent-hash`, which sends a routing
//! key, here the group, always to the same queue. Each queue serves the instance that came first. So that one that started early does not keep all of them,
//! an instance that has more than its share recalls a partition and goes to the end of its line, from time to time (`balance`). Nobody is served while it waits for what is under way, so that
//! ends (`drain`): one that is not free by then is kept, and another one is tried.

mod acks;
mod link;
mod packed;
mod sink;
mod source;

pub use sink::RabbitSink;
pub use source::{RabbitQueue, RabbitSource};

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_config::Section;
use lapin::uri::{AMQPScheme, AMQPUri};

use super::broker::{Broker, Examination, Finding, Role};
use super::sink::{Sink, SinkError};
use super::{Source, SourceError};
use crate::message::Secret;

/// As many partitions as a queue may have.
const PARTITIONS_MAX: usize = 256;

/// As large as a frame of a connection that reads may be, unless the URL says otherwise. The client has room for 32 of them in each direction, whatever it carries: with the
/// broker's 128 KiB that would be 8 MiB for each queue. A larger body comes in several frames. Headers go in one frame: whoever publishes has the
/// broker's limit, and so has a connection after one that met longer headers.
const FRAME_BYTES_MAX: u32 = 16_384;

/// What is long and in hand may be between one message of the usual limit and more than anybody has memory for.
const BYTES: std::ops::RangeInclusive<u64> = 1024 * 1024..=64 * 1024 * 1024 * 1024;

/// AMQP has a byte for the length of a name: of a queue, of an exchange, of a header, and of a routing key. The client panics over a longer one.
const AMQP_NAME_BYTES_MAX: usize = 255;

/// In which header the group is, unless the settings say otherwise.
pub const GROUP_HEADER: &str = "x-laneway-group";
/// Not to be handed out before this time, in milliseconds since 1970.
pub const NOT_BEFORE_HEADER: &str = "x-laneway-not-before";
/// Why a message is among the dead letters, or in quarantine.
pub const REASON_HEADER: &str = "x-laneway-reason";

/// How a queue is read, or published to.
#[derive(Clone, PartialEq)]
pub struct Settings {
    /// `amqp://user:password@host:port/vhost`, or `amqps` for TLS.
    pub url: Secret,
    /// Files with certificates that are trusted beside those that browsers trust.
    pub trusted_certificates: Vec<String>,
    /// The queue; with partitions, the first part of their names.
    pub queue: String,
    /// How many queues there are behind the exchange. One has no exchange.
    pub partitions: usize,
    /// The exchange in front of partitions.
    pub exchange: String,
    /// Whether what is missing is made.
    pub declare: bool,
    /// How many messages are in hand unacknowledged, per partition.
    pub prefetch: u16,
    /// How many bytes of texts that are too long for messages may be in hand.
    pub bytes: usize,
    /// The header that has the group. Without it, the group is in the message.
    pub group_header: String,
    /// The queue for dead letters.
    pub dead_letters: String,
    /// The queue for what cannot be read.
    pub quarantine: String,
    /// How long a queue is kept that nobody asks for.
    pub linger: Duration,
    /// How often an instance looks whether it has more than its share of the partitions.
    pub balance: Duration,
    /// How long a partition that is to go to another instance waits for what is under way.
    pub drain: Duration,
    /// How often both sides say that they are there; who is not heard of for twice this time is gone.
    pub heartbeat: Duration,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("at", &self.place())
            .field("queue", &self.queue)
            .field("partitions", &self.partitions)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// A queue, and everything else as it is by default.
    pub fn new(url: impl Into<String>, queue: &str) -> Self {
        Settings {
            url: Secret::new(url),
            trusted_certificates: Vec::new(),
            queue: queue.to_owned(),
            partitions: 1,
            exchange: queue.to_owned(),
            declare: true,
            prefetch: 1_000,
            bytes: 64 * 1024 * 1024,
            group_header: GROUP_HEADER.to_owned(),
            dead_letters: format!("{queue}.dead"),
            quarantine: format!("{queue}.quarantine"),
            linger: Duration::from_secs(1),
            balance: Duration::from_secs(10),
            drain: Duration::from_secs(10),
            heartbeat: Duration::from_secs(10),
        }
    }

    /// The names of the queues.
    fn queues(&self) -> Vec<String> {
        match self.partitions {
            1 => vec![self.queue.clone()],
            many => (0..many).map(|number| self.partition(number)).collect(),
        }
    }

    fn partition(&self, number: usize) -> String {
        format!("{}.{number}", self.queue)
    }

    /// The queue by which instances are counted.
    fn instances(&self) -> String {
        format!("{}.instances", self.queue)
    }

    /// The first name that AMQP has no room for, if there is one: by which setting it is said, and itself.
    fn long_name(&self) -> Option<(&'static str, String)> {
        let last = self.queues().pop().unwrap_or_default();
        let mut names = vec![("queue", last), ("group-header", self.group_header.clone())];
        names.push(("dead-letters", self.dead_letters.clone()));
        names.push(("quarantine", self.quarantine.clone()));
        if self.partitions > 1 {
            names.push(("queue", self.instances()));
            names.push(("exchange", self.exchange.clone()));
        }
        names.into_iter().find(|(_, name)| name.len() > AMQP_NAME_BYTES_MAX)
    }

    fn uri(&self) -> Result<AMQPUri, String> {
        let mut uri: AMQPUri = self.url.expose().parse()?;
        uri.query.heartbeat = Some(self.heartbeat.as_secs().clamp(1, 3_600) as u16);
        Ok(uri)
    }

    /// What is wrong with the certificates, if anything: whoever names some means TLS.
    fn bad_trust(&self) -> Option<&'static str> {
        let is_secret = self.uri().is_ok_and(|uri| uri.scheme == AMQPScheme::AMQPS);
        let is_bad = !self.trusted_certificates.is_empty() && !is_secret;
        is_bad.then_some("is for TLS: the URL must begin with amqps://")
    }

    /// The host and the port to which it connects.
    fn door(&self) -> (String, u16) {
        self.uri().map_or_else(|_| (String::new(), 0), |uri| (uri.authority.host, uri.authority.port))
    }

    /// Where it is, without the user's part.
    fn place(&self) -> String {
        self.uri().map_or_else(
            |_| "amqp://?".to_owned(),
            |uri| format!("{}://{}:{}", uri.scheme, uri.authority.host, uri.authority.port),
        )
    }
}

/// What is wrong with a URL, if anything.
fn bad_url(url: &str) -> Option<&'static str> {
    match url.parse::<AMQPUri>() {
        Err(_) => Some("must be a URL such as \"amqp://user:password@host:5672/%2f\", with amqps for TLS"),
        // It would be overruled, by a default as a rule.
        Ok(uri) if uri.query.heartbeat.is_some() => {
            Some("must not say `heartbeat`: that is a setting of its own (`heartbeat = 10 s`)")
        }
        Ok(_) => None,
    }
}

/// What is wrong with a name that is too long.
fn long_name(name: &str) -> String {
    format!(
        "makes the name {:?}, of {} bytes; AMQP has room for {AMQP_NAME_BYTES_MAX} bytes",
        shortened(name),
        name.len()
    )
}

/// A long name as it can be shown: its end says what it is for.
fn shortened(name: &str) -> String {
    let mut from = name.len().saturating_sub(20);
    while !name.is_char_boundary(from) {
        from += 1;
    }
    format!("{}...{}", super::cut(name, 20), &name[from..])
}

fn name(s: &mut Section<'_>, key: &str) -> String {
    let name = s.text(key);
    if name.trim().is_empty() || name.chars().any(char::is_control) {
        s.problem(key, "must be a name without control characters");
    }
    name
}

/// Reads a section of the configuration.
pub(super) fn read(s: &mut Section<'_>, role: Role) -> Arc<dyn Broker> {
    let url = s.text("url");
    if let Some(what) = bad_url(&url) {
        s.problem("url", what);
    }
    let queue = name(s, "queue");
    let mut settings = Settings::new(url, &queue);
    if s.has("trusted-certificates") {
        settings.trusted_certificates = s.texts("trusted-certificates");
        if let Some(problem) = settings.bad_trust() {
            s.problem("trusted-certificates", problem);
        }
    }
    if s.has("partitions") {
        settings.partitions = s.integer("partitions", 1..=PARTITIONS_MAX as u64) as usize;
    }
    if s.has("exchange") {
        settings.exchange = name(s, "exchange");
        if settings.partitions == 1 {
            s.problem("exchange", "is only there for partitions: more than one of them, or no exchange");
        }
    }
    if s.has("declare") {
        settings.declare = s.flag("declare");
    }
    if s.has("group-header") {
        settings.group_header = name(s, "group-header");
    }
    if s.has("heartbeat") {
        settings.heartbeat = s.duration("heartbeat", Duration::from_secs(1)..=Duration::from_secs(600));
    }
    if role == Role::Source {
        if s.has("prefetch") {
            settings.prefetch = s.integer("prefetch", 1..=u64::from(u16::MAX)) as u16;
        }
        if s.has("bytes") {
            settings.bytes = s.bytes("bytes", BYTES) as usize;
        }
        if s.has("dead-letters") {
            settings.dead_letters = name(s, "dead-letters");
        }
        if s.has("quarantine") {
            settings.quarantine = name(s, "quarantine");
        }
        if s.has("linger") {
            settings.linger = s.duration("linger", Duration::from_millis(10)..=Duration::from_secs(3600));
        }
        if s.has("balance") {
            settings.balance = s.duration("balance", Duration::from_millis(100)..=Duration::from_secs(3600));
        }
        if s.has("drain") {
            settings.drain = s.duration("drain", Duration::from_millis(100)..=Duration::from_secs(3600));
        }
    }
    if role == Role::Sink {
        // Nothing of it is read, so no name is made of its name.
        (settings.dead_letters, settings.quarantine) = (String::new(), String::new());
    }
    if let Some((key, name)) = settings.long_name() {
        // A name that was made of the queue's is said at the queue.
        let key = if s.has(key) { key } else { "queue" };
        s.problem(key, long_name(&name));
    }
    Arc::new(settings)
}

/// Reads a URL to publish to: `amqp://user:password@host:5672/%2f?queue=orders`, with `&partitions=8` if there are some.
pub(super) fn from_url(url: &str) -> Result<Arc<dyn Broker>, String> {
    if let Some(what) = bad_url(url) {
        return Err(format!("the URL {what}"));
    }
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let mut settings = Settings::new(base, "");
    for (key, value) in query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    {
        let value = percent_encoding::percent_decode_str(value).decode_utf8_lossy().into_owned();
        match key {
            "queue" => settings.queue = value,
            "exchange" => settings.exchange = value,
            "trusted-certificates" => settings.trusted_certificates.push(value),
            "partitions" => {
                let partitions = value.parse().ok().filter(|count| (1..=PARTITIONS_MAX).contains(count));
                settings.partitions =
                    partitions.ok_or_else(|| format!("partitions must be 1 to {PARTITIONS_MAX}"))?;
            }
            other => {
                return Err(format!(
                    "{other:?} is no part of the URL: there are queue, partitions, exchange, trusted-certificates"
                ));
            }
        }
    }
    if let Some(what) = settings.bad_trust() {
        return Err(format!("trusted-certificates {what}"));
    }
    if settings.queue.is_empty() {
        return Err("the URL must name the queue: amqp://host:5672/%2f?queue=orders".to_owned());
    }
    if settings.exchange.is_empty() {
        settings.exchange = settings.queue.clone();
    }
    if let Some((_, name)) = settings.long_name() {
        return Err(format!("the URL {}", long_name(&name)));
    }
    settings.declare = false;
    Ok(Arc::new(settings))
}

impl Broker for Settings {
    fn kind(&self) -> &'static str {
        "rabbitmq"
    }

    fn open_source(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>> {
        async move {
            let source = RabbitQueue::new(self.clone()).consumer(name);
            source.connect().await?;
            Ok(Arc::new(source) as Arc<dyn Source>)
        }
        .boxed()
    }

    fn open_sink(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>> {
        async move { Ok(Arc::new(RabbitSink::open(self.clone(), name).await?) as Arc<dyn Sink>) }.boxed()
    }

    fn examine<'a>(&'a self, examination: &'a Examination) -> BoxFuture<'a, Vec<Finding>> {
        link::examine(self, examination).boxed()
    }
}
