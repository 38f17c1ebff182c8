//! ActiveMQ (the classic one) over STOMP: message groups, shared by all instances.
//!
//! The configuration hands over a section or a URL, which becomes [`Settings`]; from them the service opens sources ([`ActiveQueue::consumer`]) and sinks
//! ([`ActiveSink`]), and `laneway doctor` examines them.
//!
//! | file | part |
//! |---|---|
//! | `mod.rs` | settings, and what an examination finds |
//! | `stomp.rs` | the protocol |
//! | `source.rs` | a subscription, and what is done with what comes over it |
//! | `sink.rs` | publishing, with a receipt for each message |
//!
//! # What keeps the order
//!
//! A message with a `JMSXGroupID` goes to the consumer that has the group, and everything behind it in the group as well, until that consumer is gone; then
//! what it had not acknowledged goes to the next one, in order. In between, which message of a group may run is decided in this process (`pushed/`).
//!
//! A `NACK` is never sent: the broker would put the message among its own dead letters, or behind those that follow it. And the broker does not say which
//! group a message has, so publishers write it into a header of their own as well.

mod sink;
mod source;
pub mod stomp;

pub use sink::ActiveSink;
pub use source::{ActiveQueue, ActiveSource};

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_config::Section;
use percent_encoding::percent_decode_str;

use super::broker::{Broker, Examination, Finding, Role};
use super::pushed::ANSWER;
use super::sink::{Sink, SinkError};
use super::{Source, SourceError};
use crate::message::{NAME_BYTES_MAX, Secret};
use stomp::{Failure, Frame, Login, Receiver, Sender};

/// In which header the group is, unless the settings say otherwise.
pub const GROUP_HEADER: &str = "x-laneway-group";
/// Not to be handed out before this time, in milliseconds since 1970.
pub const NOT_BEFORE_HEADER: &str = "x-laneway-not-before";
/// Why a message is among the dead letters, or in quarantine.
pub const REASON_HEADER: &str = "x-laneway-reason";
/// What is long and in hand may be between one message of the usual limit and more than anybody has memory for.
const BYTES: std::ops::RangeInclusive<u64> = 1024 * 1024..=64 * 1024 * 1024 * 1024;
/// The header by which the broker knows groups.
const BROKERS_GROUP_HEADER: &str = "JMSXGroupID";

/// How a queue is read, or published to.
#[derive(Clone, PartialEq)]
pub struct Settings {
    /// `stomp://user:password@host:port`.
    pub url: Secret,
    /// The queue.
    pub queue: String,
    /// How many messages are in hand unacknowledged.
    pub prefetch: u32,
    /// How many bytes of texts that are too long for messages may be in hand.
    pub bytes: usize,
    /// The header that has the group. Without it, the group is in the message.
    pub group_header: String,
    /// The queue for dead letters.
    pub dead_letters: String,
    /// The queue for what cannot be read.
    pub quarantine: String,
    /// How long groups are kept that nobody asks for.
    pub linger: Duration,
    /// How often both sides say that they are there; who is not heard of for twice this time is gone.
    pub heartbeat: Duration,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("at", &self.place())
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

/// The parts of a URL.
struct Parts {
    host: String,
    port: u16,
    user: Option<(String, String)>,
    query: String,
}

/// Cuts a URL into its parts.
fn parts(url: &str) -> Option<Parts> {
    let rest = url.strip_prefix("stomp://")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (user, address) = match rest.rsplit_once('@') {
        Some((user, address)) => (Some(user), address),
        None => (None, rest),
    };
    let address = address.strip_suffix('/').unwrap_or(address);
    let (host, port) = address.rsplit_once(':').unwrap_or((address, "61613"));
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let plain = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let user = user.map(|user| user.split_once(':').unwrap_or((user, "")));
    Some(Parts {
        host: (!host.is_empty() && !host.contains('/')).then(|| host.to_owned())?,
        port: port.parse().ok()?,
        user: user.map(|(user, password)| (plain(user), plain(password))),
        query: query.to_owned(),
    })
}

impl Settings {
    /// A queue, and everything else as it is by default.
    pub fn new(url: impl Into<String>, queue: &str) -> Self {
        Settings {
            url: Secret::new(url),
            queue: queue.to_owned(),
            prefetch: 500,
            bytes: 64 * 1024 * 1024,
            group_header: GROUP_HEADER.to_owned(),
            dead_letters: format!("{queue}.dead"),
            quarantine: format!("{queue}.quarantine"),
            linger: Duration::from_secs(1),
            heartbeat: Duration::from_secs(10),
        }
    }

    /// Where it is, without the user's part.
    fn place(&self) -> String {
        parts(self.url.expose())
            .map_or_else(|| "stomp://?".to_owned(), |parts| format!("stomp://{}:{}", parts.host, parts.port))
    }

    /// The host and the port to which it connects.
    fn door(&self) -> (String, u16) {
        parts(self.url.expose()).map_or_else(|| (String::new(), 0), |parts| (parts.host, parts.port))
    }

    /// A connection to the broker, with nothing subscribed to.
    pub async fn connect(&self) -> Result<(Sender, Receiver), SourceError> {
        let parts =
            parts(self.url.expose()).ok_or_else(|| SourceError::Broken("not a URL of STOMP".to_owned()))?;
        let login = Login {
            host: &parts.host,
            port: parts.port,
            user: parts.user.as_ref().map(|(user, password)| (user.as_str(), password.as_str())),
            heartbeat: self.heartbeat,
            patience: ANSWER,
        };
        stomp::connect(login).await.map_err(|failure| self.explain("connect", &failure))
    }

    /// A failure in words, with what to do about it where somebody has to.
    fn explain(&self, what: &str, failure: &Failure) -> SourceError {
        let place = self.place();
        match failure {
            Failure::Lost(said) | Failure::Silent(said) => {
                SourceError::Unavailable(format!("cannot {what} at {place}: {said}"))
            }
            Failure::Refused(said) => SourceError::Broken(format!(
                "{place} refuses to {what}: {said}: mend the user or the password in `url`, or give the user the permission"
            )),
        }
    }
}

/// Where a queue is, as the broker wants it.
fn destination(queue: &str) -> String {
    format!("/queue/{queue}")
}

/// A message to a queue, that survives the broker.
fn send_frame(queue: &str, group: Option<(&str, &str)>, text: &[u8]) -> Frame {
    let frame =
        Frame::new("SEND").with("destination", destination(queue)).with("persistent", "true").body(text);
    match group {
        Some((header, group)) => frame.with(BROKERS_GROUP_HEADER, group).with(header, group),
        None => frame,
    }
}

const RIGHT_URL: &str = "must be a URL such as \"stomp://user:password@host:61613\"";

fn name(s: &mut Section<'_>, key: &str) -> String {
    let name = s.text(key);
    let is_bad = |letter: char| letter.is_control() || letter == ',' || letter == '*' || letter == '>';
    if name.trim().is_empty() || name.len() > NAME_BYTES_MAX - 16 || name.chars().any(is_bad) {
        s.problem(key, "must be a name of 1 to 240 bytes without control characters, commas, stars or >");
    }
    name
}

/// Reads a section of the configuration.
pub(super) fn read(s: &mut Section<'_>, role: Role) -> Arc<dyn Broker> {
    let url = s.text("url");
    if parts(&url).is_none_or(|parts| !parts.query.is_empty()) {
        s.problem("url", RIGHT_URL);
    }
    let queue = name(s, "queue");
    let mut settings = Settings::new(url, &queue);
    if s.has("group-header") {
        settings.group_header = name(s, "group-header");
    }
    if s.has("heartbeat") {
        settings.heartbeat = s.duration("heartbeat", Duration::from_secs(1)..=Duration::from_secs(600));
    }
    if role == Role::Source {
        if s.has("prefetch") {
            settings.prefetch = s.integer("prefetch", 1..=65_535) as u32;
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
    }
    Arc::new(settings)
}

/// Reads a URL to publish to: `stomp://user:password@host:61613?queue=orders`.
pub(super) fn from_url(url: &str) -> Result<Arc<dyn Broker>, String> {
    let parts = parts(url).ok_or_else(|| format!("the URL {RIGHT_URL}"))?;
    let queue = parts.query.strip_prefix("queue=").filter(|queue| !queue.is_empty() && !queue.contains('&'));
    let queue =
        queue.ok_or_else(|| "the URL must name the queue: stomp://host:61613?queue=orders".to_owned())?;
    let queue = percent_decode_str(queue).decode_utf8_lossy();
    let base = url.split_once('?').map_or(url, |(base, _)| base);
    Ok(Arc::new(Settings::new(base, &queue)))
}

impl Broker for Settings {
    fn kind(&self) -> &'static str {
        "activemq"
    }

    fn open_source(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>> {
        async move {
            let source = ActiveQueue::new(self.clone()).consumer(name);
            source.connect().await?;
            Ok(Arc::new(source) as Arc<dyn Source>)
        }
        .boxed()
    }

    fn open_sink(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>> {
        async move { Ok(Arc::new(ActiveSink::open(self.clone(), name).await?) as Arc<dyn Sink>) }.boxed()
    }

    fn examine<'a>(&'a self, examination: &'a Examination) -> BoxFuture<'a, Vec<Finding>> {
        examine(self, examination).boxed()
    }
}

/// What an examination finds. STOMP has no questions about queues, and the broker makes them when they are first used; so most of it is about settings.
async fn examine(settings: &Settings, examination: &Examination) -> Vec<Finding> {
    let place = settings.place();
    match settings.connect().await {
        Ok((sender, _receiver)) => drop(sender.send(&[Frame::new("DISCONNECT")]).await),
        Err(error) => {
            return vec![Finding::error(
                error.to_string(),
                "see that ActiveMQ runs there, with a transport connector for STOMP, and mend `url`",
            )];
        }
    }
    let mut findings = vec![Finding::fine(format!("{place} answers, and takes the user"))];
    if examination.role == Role::Sink {
        return findings;
    }
    if settings.heartbeat * 2 > examination.lease {
        findings.push(Finding::warning(
            format!(
                "an instance that is cut off is noticed after two heartbeats, {:?}, and the lease is {:?}",
                settings.heartbeat * 2,
                examination.lease
            ),
            "a `heartbeat` of at most half the `lease`",
        ));
    }
    if settings.prefetch > 5_000 {
        findings.push(Finding::warning(
            format!(
                "up to {} messages are in the hands of one instance, and no other can have them",
                settings.prefetch
            ),
            "a `prefetch` of some hundreds",
        ));
    }
    findings.push(Finding::warning(
        "ActiveMQ forgets which consumer has a group once there are more than 1024 of them, unless it is told otherwise; STOMP cannot show it",
        "with more than one instance: `<policyEntry queue=\">\" messageGroupMapFactoryType=\"bucket\"/>` in activemq.xml",
    ));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_cut_into_their_parts() {
        let all = parts("stomp://me:p%40ss@broker:1234?queue=a").expect("a URL");
        assert_eq!((all.host.as_str(), all.port, all.query.as_str()), ("broker", 1234, "queue=a"));
        assert_eq!(all.user, Some(("me".to_owned(), "p@ss".to_owned())));
        let few = parts("stomp://[::1]/").map(|parts| (parts.host, parts.port, parts.user));
        assert_eq!(few, None, "an address in brackets needs its port");
        assert_eq!(parts("stomp://h").map(|parts| (parts.host, parts.port)), Some(("h".to_owned(), 61613)));
        for bad in ["amqp://h", "stomp://", "stomp://h:x", "stomp://h:1/queue"] {
            assert!(parts(bad).is_none(), "{bad}");
        }
        assert!(from_url("stomp://h:1?queue=").is_err() && from_url("stomp://h:1?queue=a").is_ok());
        let shown = format!("{:?}", Settings::new("stomp://me:hush@h:1", "q"));
        assert!(!shown.contains("hush"), "{shown}");
    }
}
