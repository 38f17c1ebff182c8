//! Kafka: order by key, and as many keys at a time as the pools take, whatever the number of partitions.
//!
//! ```text
//! orders { kind = kafka, servers = "127.0.0.1:9092", topic = orders, group = laneway }
//! ```
//!
//! A key is in one partition, and a partition is one member's at a time, so Kafka keeps the order of a key across routers. Within a partition keys do not wait
//! for each other: records are finished in any order, and the commit says which (`offsets.rs`), so that a restart or another router repeats as little as possible. Retries and
//! delays are held in this process.
//!
//! # The parts
//!
//! | file | part |
//! |---|---|
//! | `mod.rs` | settings, and what is opened from them; what errors mean |
//! | `offsets.rs` | which records are finished, and how a commit says so |
//! | `partition.rs` | one partition that is ours |
//! | `reader.rs` | the source: its threads, claims, settlements and rebalances |
//! | `writer.rs` | the sink, and the way to the dead letters |
//! | `refusals.rs` | what the brokers refuse beside the questions |
//! | `examine.rs` | what `laneway doctor` asks |

mod examine;
mod offsets;
mod partition;
mod reader;
mod refusals;
mod writer;

pub use reader::KafkaSource;
pub use writer::KafkaSink;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_config::Section;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use self::refusals::Refused;
use super::broker::{Broker, Examination, Finding, Role};
use super::sink::{Sink, SinkError};
use super::{Source, SourceError};

/// How far a partition is read beyond its prefix, if nothing is said.
const WINDOW: i64 = 10_000;

/// The widest window that can be chosen. A little below what a commit can always say, since a poll may bring a few more.
const WINDOW_MAX: u64 = 16_000;

/// Records and bytes that are held at a time, if nothing is said.
const RECORDS: usize = 50_000;
const BYTES: usize = 128 * 1024 * 1024;

/// How long a partition that goes waits for what is claimed of it, if nothing is said.
const DRAIN: Duration = Duration::from_secs(20);

/// The longest such time: the others wait meanwhile.
const DRAIN_MAX: Duration = Duration::from_secs(240);

/// What the settings have under names of their own, or what must be as it is.
const OWN_PROPERTIES: [&str; 8] = [
    "auto.offset.reset",
    "bootstrap.servers",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.idempotence",
    "enable.partition.eof",
    "group.id",
    "metadata.broker.list",
];

/// Where to begin in a partition for which nothing was ever committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// At its first record.
    Earliest,
    /// Behind its last one.
    Latest,
}

/// How a topic is found and read.
#[derive(Clone, PartialEq)]
pub struct KafkaSettings {
    /// Some of the brokers: `host:port, host:port`.
    pub servers: String,
    /// The topic.
    pub topic: String,
    /// The consumer group: routers with the same one share the partitions.
    pub group: String,
    /// The topic of dead letters; otherwise the topic's name with `.dead-letters` behind it.
    pub dead_letters: Option<String>,
    /// The topic of what cannot be read; otherwise that of the dead letters.
    pub quarantine: Option<String>,
    /// Where to begin.
    pub begin: Begin,
    /// How long a partition that goes waits for what is claimed of it.
    pub drain: Duration,
    /// How far a partition is read beyond its prefix.
    pub window: i64,
    /// Records that are held at a time, at most.
    pub records_max: usize,
    /// Bytes of them.
    pub bytes_max: usize,
    /// Further properties of librdkafka, such as those for TLS and SASL.
    pub properties: BTreeMap<String, String>,
}

impl fmt::Debug for KafkaSettings {
    /// The properties may hold passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSettings")
            .field("servers", &self.servers)
            .field("topic", &self.topic)
            .field("group", &self.group)
            .field("properties", &self.properties.keys())
            .finish_non_exhaustive()
    }
}

impl KafkaSettings {
    /// A topic with everything else as it is by default.
    pub fn new(servers: impl Into<String>, topic: impl Into<String>, group: impl Into<String>) -> Self {
        KafkaSettings {
            servers: servers.into(),
            topic: topic.into(),
            group: group.into(),
            dead_letters: None,
            quarantine: None,
            begin: Begin::Earliest,
            drain: DRAIN,
            window: WINDOW,
            records_max: RECORDS,
            bytes_max: BYTES,
            properties: BTreeMap::new(),
        }
    }

    /// Joins the group. The same as [`Broker::open_source`], for whoever wants to know the partitions.
    pub async fn join(&self, name: impl Into<Arc<str>>) -> Result<KafkaSource, SourceError> {
        let (settings, name) = (self.clone(), name.into());
        let joined = tokio::task::spawn_blocking(move || KafkaSource::join(name, &settings)).await;
        joined.map_err(|error| SourceError::Unavailable(error.to_string()))?
    }

    fn dead_letters(&self) -> String {
        self.dead_letters.clone().unwrap_or_else(|| format!("{}.dead-letters", self.topic))
    }

    fn quarantine(&self) -> String {
        self.quarantine.clone().unwrap_or_else(|| self.dead_letters())
    }

    fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.servers).set("client.id", "laneway");
        config
    }

    /// For questions only: neither a member of the group nor a producer of messages.
    fn config_with_properties(&self) -> ClientConfig {
        let mut config = self.config();
        let others = self.properties.iter().filter(|(name, _)| !name.contains("group."));
        others.for_each(|(name, value)| {
            config.set(name, value);
        });
        config
    }

    fn consumer_config(&self) -> ClientConfig {
        let mut config = self.config();
        config
            .set("group.id", &self.group)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            // Only partitions that go stop, not all of them.
            .set("partition.assignment.strategy", "cooperative-sticky")
            // It counts as well where the broker no longer has what was committed: whoever went to the end then would lose what is left. Where nothing was
            // committed, `begin = latest` commits the end itself.
            .set("auto.offset.reset", "earliest")
            // Librdkafka reads ahead by itself; what it has beyond our own bounds is small.
            .set("queued.max.messages.kbytes", "16384");
        self.properties.iter().for_each(|(name, value)| {
            config.set(name, value);
        });
        config
    }

    fn producer_config(&self) -> ClientConfig {
        let mut config = self.config();
        config
            .set("enable.idempotence", "true")
            .set("linger.ms", "1")
            .set("message.timeout.ms", "15000")
            // That of Java's clients. Librdkafka's own choice is another one, and a key that both publish would be in two partitions.
            .set("partitioner", "murmur2_random")
            .set("message.max.bytes", "1000000");
        let of_consumers = |name: &str| name.starts_with("fetch.") || CONSUMER_PROPERTIES.contains(&name);
        let others = self.properties.iter().filter(|(name, _)| !of_consumers(name));
        others.for_each(|(name, value)| {
            config.set(name, value);
        });
        config
    }
}

/// What a producer does not know.
const CONSUMER_PROPERTIES: [&str; 8] = [
    "check.crcs",
    "group.instance.id",
    "heartbeat.interval.ms",
    "isolation.level",
    "max.poll.interval.ms",
    "partition.assignment.strategy",
    "queued.max.messages.kbytes",
    "session.timeout.ms",
];

impl Broker for KafkaSettings {
    fn kind(&self) -> &'static str {
        "kafka"
    }

    fn open_source(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>> {
        async move { Ok(Arc::new(self.join(name).await?) as Arc<dyn Source>) }.boxed()
    }

    fn open_sink(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>> {
        async move { Ok(Arc::new(KafkaSink::open(name, self).await?) as Arc<dyn Sink>) }.boxed()
    }

    fn examine<'a>(&'a self, examination: &'a Examination) -> BoxFuture<'a, Vec<Finding>> {
        examine::examine(self, examination).boxed()
    }
}

/// Sees that a topic is there. How many partitions it has.
fn require_topic<C: ConsumerContext>(client: &BaseConsumer<C>, topic: &str) -> Result<usize, SourceError> {
    let answer =
        client.fetch_metadata(Some(topic), reader::ANSWER).map_err(|error| trouble(topic, &error))?;
    let Some(found) = answer.topics().iter().find(|found| found.name() == topic) else {
        return Err(no_such(topic));
    };
    if let Some(error) = found.error() {
        return Err(trouble(topic, &KafkaError::MetadataFetch(error.into())));
    }
    match found.partitions().len() {
        0 => Err(no_such(topic)),
        count => Ok(count),
    }
}

/// How many records a topic holds, about.
fn count_records<C: ConsumerContext>(client: &BaseConsumer<C>, topic: &str) -> Result<u64, SourceError> {
    let mut count = 0;
    for partition in 0..require_topic(client, topic)? as i32 {
        let marks = client.fetch_watermarks(topic, partition, reader::ANSWER);
        let (low, high) = marks.map_err(|error| trouble(topic, &error))?;
        count += (high - low).max(0) as u64;
    }
    Ok(count)
}

fn no_such(topic: &str) -> SourceError {
    SourceError::Broken(format!("there is no topic {topic:?}: create it, or name another one"))
}

/// What a failure means. The values of properties, which may be secret, are not in it.
fn trouble(place: &str, error: &KafkaError) -> SourceError {
    use RDKafkaErrorCode as Code;
    match (error, error.rdkafka_error_code()) {
        (KafkaError::ClientConfig(_, why, name, _), _) => {
            SourceError::Broken(format!("{place}: the property {name} is not right: {why}"))
        }
        (_, Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition)) => {
            no_such(place)
        }
        (_, Some(code)) if Refused::by(code).is_some() => {
            SourceError::Broken(format!("{place}: Kafka refuses the credentials or the permission: {error}"))
        }
        (_, Some(Code::InvalidTopic | Code::OffsetMetadataTooLarge | Code::Fatal))
        | (KafkaError::ClientCreation(_), _) => SourceError::Broken(format!("{place}: {error}")),
        _ => SourceError::Unavailable(format!("{place}: {error}")),
    }
}

// ── the configuration ─────────────────────────────────────────────────────────────────────────────────────────────────

pub(super) fn read(s: &mut Section<'_>, role: Role) -> Arc<dyn Broker> {
    let mut settings = KafkaSettings::new(read_servers(s), read_topic(s, "topic"), "");
    settings.properties = s.section("properties", read_properties);
    if role == Role::Source {
        settings.group = s.text("group");
        settings.dead_letters = s.optional("dead-letters", |s| read_topic(s, "dead-letters"));
        settings.quarantine = s.optional("quarantine", |s| read_topic(s, "quarantine"));
        let begins = [("earliest", Begin::Earliest), ("latest", Begin::Latest)];
        settings.begin = s.optional("begin", |s| s.one_of("begin", &begins)).unwrap_or(Begin::Earliest);
        let drain = s.optional("drain", |s| s.duration("drain", Duration::ZERO..=DRAIN_MAX));
        settings.drain = drain.unwrap_or(DRAIN);
        let window = s.optional("window", |s| s.integer("window", 1..=WINDOW_MAX) as i64);
        settings.window = window.unwrap_or(WINDOW);
        let records = s.optional("records", |s| s.integer("records", 1..=10_000_000) as usize);
        settings.records_max = records.unwrap_or(RECORDS);
        let bytes = s.optional("bytes", |s| s.bytes("bytes", 1 << 20..=1 << 36) as usize);
        settings.bytes_max = bytes.unwrap_or(BYTES);
    }
    Arc::new(settings)
}

fn read_servers(s: &mut Section<'_>) -> String {
    let before = s.problem_count();
    let servers = s.text("servers");
    if s.problem_count() == before && !are_servers(&servers) {
        s.problem("servers", "must be one or more HOST:PORT with commas between them");
    }
    servers
}

fn are_servers(servers: &str) -> bool {
    servers.split(',').all(|server| {
        let parts = server.trim().rsplit_once(':');
        parts.is_some_and(|(host, port)| {
            !host.is_empty() && !host.contains(['/', '@', ' ']) && port.parse::<u16>().is_ok()
        })
    })
}

fn read_topic(s: &mut Section<'_>, key: &str) -> String {
    let before = s.problem_count();
    let topic = s.text(key);
    if s.problem_count() == before && !is_topic(&topic) {
        s.problem(key, "must be the name of a topic: 1 to 249 letters, digits, dots, dashes and underscores");
    }
    topic
}

fn is_topic(topic: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (1..=249).contains(&topic.len()) && topic.chars().all(fits) && topic != "." && topic != ".."
}

fn read_properties(s: &mut Section<'_>) -> BTreeMap<String, String> {
    let mut properties = BTreeMap::new();
    for key in s.keys() {
        let value = s.text(&key);
        if OWN_PROPERTIES.contains(&key.as_str()) {
            s.problem(&key, "is set by other means, or must be as it is");
        }
        properties.insert(key, value);
    }
    properties
}

/// `kafka://HOST:PORT,HOST:PORT/TOPIC`.
pub(super) fn from_url(url: &str) -> Result<Arc<dyn Broker>, String> {
    let parts = url.split_once("://").and_then(|(_, rest)| rest.split_once('/'));
    match parts {
        Some((servers, topic)) if are_servers(servers) && is_topic(topic) => {
            Ok(Arc::new(KafkaSettings::new(servers, topic, "")))
        }
        _ => Err("a Kafka topic is kafka://HOST:PORT/TOPIC, with more brokers after commas".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_topics_are_topics() {
        let sink = from_url("kafka://a:1,b:2/orders").expect("a topic");
        assert!(sink.same_as(&KafkaSettings::new("a:1,b:2", "orders", "")));
        for url in
            ["", "kafka://a:1", "kafka://a/orders", "kafka://u@a:1/o", "kafka://a:1/", "kafka://a:1/no space"]
        {
            assert!(from_url(url).is_err(), "{url}");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        let mut settings = KafkaSettings::new("a:1", "orders", "g");
        settings.properties.insert("sasl.password".to_owned(), "hush".to_owned());
        let shown = format!("{settings:?}");
        assert!(shown.contains("sasl.password") && !shown.contains("hush"), "{shown}");
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let broken = |code| matches!(trouble("t", &KafkaError::MetadataFetch(code)), SourceError::Broken(_));
        assert!(
            broken(RDKafkaErrorCode::TopicAuthorizationFailed)
                && broken(RDKafkaErrorCode::UnknownTopicOrPartition)
        );
        assert!(
            !broken(RDKafkaErrorCode::BrokerTransportFailure) && !broken(RDKafkaErrorCode::AllBrokersDown)
        );
    }
}
