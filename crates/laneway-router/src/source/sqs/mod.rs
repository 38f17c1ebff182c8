//! SQS: FIFO queues, whose message groups are groups of ours, and standard queues, which order nothing.
//!
//! ```text
//! orders { kind = sqs, url = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders.fifo" }
//! ```
//!
//! # The parts
//!
//! | file | part |
//! |---|---|
//! | `mod.rs` | settings, and what is opened from them |
//! | `calls.rs` | the questions that SQS is asked, and what its errors mean |
//! | `reader.rs` | the source: claims and settlements |
//! | `writer.rs` | the sink |
//! | `examine.rs` | what `laneway doctor` asks |
//!
//! # What SQS keeps, and what is kept here
//!
//! Order across routers is kept by SQS: from the first message of a group that it hands out until the last of those is deleted or visible again, nobody gets another
//! one of that group. A lease is a visibility timeout, and giving back sets it to the delay, or to nothing. So whatever a router that dies has in its hands comes
//! again, in order, when the lease runs out.
//!
//! The redrive policy of a queue would take a message out of its group after so many receives, and every give-back is one of them: it is a net below us, not
//! the way to the dead letters. Those are copied to their queue by us, with the reason, and then deleted.

mod calls;
mod examine;
mod reader;
mod writer;

pub use reader::SqsSource;
pub use writer::SqsSink;

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_sqs::types::QueueAttributeName;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_config::Section;

use super::broker::{Broker, Examination, Finding, Role};
use super::sink::{Sink, SinkError};
use super::{Source, SourceError};
use crate::message::Secret;
use calls::{Attributes, Calls};
use reader::{Inner, Place};

/// The longest wait of one receive, if nothing is said: the longest that SQS knows, which asks least often.
const POLL: Duration = Duration::from_secs(20);

/// Receives at a time while the queue has much, if nothing is said.
const RECEIVERS: usize = 4;

/// So many receives at a time at most.
const RECEIVERS_MAX: u64 = 64;

/// How a queue is found and read.
#[derive(Clone, Debug, PartialEq)]
pub struct SqsSettings {
    /// The queue's URL. Its host is who is asked.
    pub url: String,
    /// The region that requests are signed for; otherwise the one in the URL, or that of the environment.
    pub region: Option<String>,
    /// The profile in the AWS files.
    pub profile: Option<String>,
    /// Keys of our own, instead of those that are found where AWS users have them.
    pub keys: Option<Keys>,
    /// Where dead letters go; otherwise the queue of the redrive policy.
    pub dead_letters: Option<String>,
    /// Where goes what cannot be read; otherwise to the dead letters.
    pub quarantine: Option<String>,
    /// The longest wait of one receive.
    pub poll: Duration,
    /// Receives at a time while the queue has much.
    pub receivers: usize,
}

/// An access key.
#[derive(Clone, Debug, PartialEq)]
pub struct Keys {
    /// Its name.
    pub access_key_id: String,
    /// What it proves itself with.
    pub secret_access_key: Secret,
    /// For keys that are only good for a while.
    pub session_token: Option<Secret>,
}

impl SqsSettings {
    /// A queue with everything else as it is by default.
    pub fn new(url: impl Into<String>) -> Self {
        SqsSettings {
            url: url.into(),
            region: None,
            profile: None,
            keys: None,
            dead_letters: None,
            quarantine: None,
            poll: POLL,
            receivers: RECEIVERS,
        }
    }

    /// Scheme, host and port of the queue's URL.
    fn endpoint(&self) -> String {
        let after_scheme = self.url.find("://").map_or(0, |at| at + 3);
        let end = self.url[after_scheme..].find('/').map_or(self.url.len(), |at| after_scheme + at);
        self.url[..end].to_owned()
    }

    fn host(&self) -> String {
        let endpoint = self.endpoint();
        let authority = endpoint.split_once("://").map_or(&*endpoint, |(_, authority)| authority);
        authority.split(':').next().unwrap_or_default().to_ascii_lowercase()
    }

    /// The region, as far as it is known without asking the environment. A server of one's own has none, and any will do.
    fn region(&self) -> Option<String> {
        if self.region.is_some() {
            return self.region.clone();
        }
        let host = self.host();
        if !host.contains("amazonaws.com") {
            return Some("us-east-1".to_owned());
        }
        let parts: Vec<&str> = host.split('.').collect();
        let behind_sqs = parts.iter().position(|part| *part == "sqs").and_then(|at| parts.get(at + 1));
        let before_queue = parts.iter().position(|part| *part == "queue").filter(|at| *at > 0);
        let region = behind_sqs.or_else(|| before_queue.and_then(|at| parts.get(at - 1)));
        region.filter(|region| region.contains('-')).map(ToString::to_string)
    }

    async fn open(&self, name: Arc<str>) -> Result<SqsSource, SourceError> {
        let calls = Calls::new(self).await;
        let attributes = calls.attributes(&self.url).await?;
        let dead_letters = match self.dead_letters_of(&calls, &attributes).await? {
            Some(url) => place(&calls, url).await?,
            None => return Err(SourceError::Broken(format!("{}: {NO_DEAD_LETTERS}", self.url))),
        };
        let quarantine = match &self.quarantine {
            Some(url) => place(&calls, url.clone()).await?,
            None => dead_letters.clone(),
        };
        Ok(SqsSource::new(Inner {
            name,
            calls,
            url: self.url.clone(),
            fifo: is_fifo(&attributes),
            dead_letters,
            quarantine,
            poll: self.poll,
            receivers: self.receivers,
            held: Mutex::new(HashMap::new()),
            closed: AtomicBool::new(false),
        }))
    }

    /// The queue for dead letters: the configured one, or that of the redrive policy.
    async fn dead_letters_of(&self, calls: &Calls, here: &Attributes) -> Result<Option<String>, SourceError> {
        match (&self.dead_letters, redrive_policy(here)) {
            (Some(url), _) => Ok(Some(url.clone())),
            (None, Some(policy)) => calls.url_of(&policy.target).await.map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// What to do about a queue without a place for dead letters.
const NO_DEAD_LETTERS: &str = "there is no place for dead letters: set dead-letters to the URL of a queue, or give this one a redrive policy";

async fn place(calls: &Calls, url: String) -> Result<Place, SourceError> {
    let fifo = is_fifo(&calls.attributes(&url).await?);
    Ok(Place { url, fifo })
}

fn is_fifo(attributes: &Attributes) -> bool {
    attributes.get(&QueueAttributeName::FifoQueue).is_some_and(|flag| flag == "true")
}

/// What SQS does by itself to messages that were received too often.
struct RedrivePolicy {
    target: String,
    receives: u64,
}

fn redrive_policy(attributes: &Attributes) -> Option<RedrivePolicy> {
    let policy = attributes.get(&QueueAttributeName::RedrivePolicy)?;
    let policy: serde_json::Value = serde_json::from_str(policy).ok()?;
    let receives = &policy["maxReceiveCount"];
    // Some write the number as a text.
    let receives = receives.as_u64().or_else(|| receives.as_str()?.parse().ok()).unwrap_or(0);
    Some(RedrivePolicy { target: policy["deadLetterTargetArn"].as_str()?.to_owned(), receives })
}

impl Broker for SqsSettings {
    fn kind(&self) -> &'static str {
        "sqs"
    }

    fn open_source(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>> {
        async move { Ok(Arc::new(self.open(name).await?) as Arc<dyn Source>) }.boxed()
    }

    fn open_sink(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>> {
        async move { Ok(Arc::new(SqsSink::open(name, self).await?) as Arc<dyn Sink>) }.boxed()
    }

    fn examine<'a>(&'a self, examination: &'a Examination) -> BoxFuture<'a, Vec<Finding>> {
        examine::examine(self, examination).boxed()
    }
}

// ── the configuration ─────────────────────────────────────────────────────────────────────────────────────────────────

pub(super) fn read(s: &mut Section<'_>, role: Role) -> Arc<dyn Broker> {
    let mut settings = SqsSettings::new(read_url(s, "url"));
    settings.region = s.optional("region", |s| s.text("region"));
    settings.profile = s.optional("profile", |s| s.text("profile"));
    settings.keys = read_keys(s);
    if role == Role::Source {
        settings.dead_letters = s.optional("dead-letters", |s| read_url(s, "dead-letters"));
        settings.quarantine = s.optional("quarantine", |s| read_url(s, "quarantine"));
        let poll = s.optional("poll", |s| s.duration("poll", Duration::ZERO..=POLL));
        settings.poll = poll.unwrap_or(POLL);
        let receivers = s.optional("receivers", |s| s.integer("receivers", 1..=RECEIVERS_MAX) as usize);
        settings.receivers = receivers.unwrap_or(RECEIVERS);
    }
    Arc::new(settings)
}

fn read_url(s: &mut Section<'_>, key: &str) -> String {
    let before = s.problem_count();
    let url = s.text(key);
    if s.problem_count() == before && !is_queue_url(&url) {
        s.problem(key, "must be the URL of a queue: https://sqs.REGION.amazonaws.com/ACCOUNT/NAME");
    }
    url
}

fn is_queue_url(url: &str) -> bool {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let parts = rest.and_then(|rest| rest.split_once('/'));
    parts.is_some_and(|(host, path)| {
        let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && !"?#@".contains(c);
        !host.is_empty() && !path.is_empty() && !path.ends_with('/') && url.chars().all(is_plain)
    })
}

fn read_keys(s: &mut Section<'_>) -> Option<Keys> {
    let id = s.optional("access-key-id", |s| s.text("access-key-id"));
    let secret = s.optional("secret-access-key", |s| Secret::new(s.text("secret-access-key")));
    let session_token = s.optional("session-token", |s| Secret::new(s.text("session-token")));
    match (id, secret) {
        (Some(access_key_id), Some(secret_access_key)) => {
            Some(Keys { access_key_id, secret_access_key, session_token })
        }
        (None, None) if session_token.is_none() => None,
        (Some(_), _) => {
            s.problem("secret-access-key", "must be there when access-key-id is");
            None
        }
        (None, _) => {
            s.problem("access-key-id", "must be there when secret-access-key or session-token is");
            None
        }
    }
}

/// `sqs://HOST/ACCOUNT/NAME` for `https`, `sqs+http://...` for a server without TLS.
pub(super) fn from_url(url: &str) -> Result<Arc<dyn Broker>, String> {
    let url = match url.split_once("://") {
        Some(("sqs" | "sqs+https", rest)) => format!("https://{rest}"),
        Some(("sqs+http", rest)) => format!("http://{rest}"),
        _ => url.to_owned(),
    };
    if !is_queue_url(&url) {
        return Err(
            "an SQS queue is sqs://sqs.REGION.amazonaws.com/ACCOUNT/NAME, or sqs+http://HOST:PORT/..."
                .to_owned(),
        );
    }
    Ok(Arc::new(SqsSettings::new(url)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_region_is_in_the_url() {
        let region = |url: &str| SqsSettings::new(url).region();
        assert_eq!(region("https://sqs.eu-west-1.amazonaws.com/1/q").as_deref(), Some("eu-west-1"));
        assert_eq!(region("https://us-east-2.queue.amazonaws.com/1/q").as_deref(), Some("us-east-2"));
        assert_eq!(
            region("https://vpce-1.sqs.eu-west-1.vpce.amazonaws.com/1/q").as_deref(),
            Some("eu-west-1")
        );
        assert_eq!(region("https://sqs.cn-north-1.amazonaws.com.cn/1/q").as_deref(), Some("cn-north-1"));
        assert_eq!(region("https://queue.amazonaws.com/1/q"), None);
        assert_eq!(region("http://127.0.0.1:4566/0/q").as_deref(), Some("us-east-1"));
        assert_eq!(SqsSettings::new("http://127.0.0.1:4566/0/q").endpoint(), "http://127.0.0.1:4566");
    }

    #[test]
    fn only_queues_are_queues() {
        assert!(is_queue_url("https://sqs.eu-west-1.amazonaws.com/1/q.fifo"));
        for url in [
            "",
            "sqs",
            "https://",
            "https://host",
            "https://host/",
            "ftp://host/q",
            "http://u@h/q",
            "http://h/q?x",
        ] {
            assert!(!is_queue_url(url), "{url}");
            assert!(from_url(url).is_err(), "{url}");
        }
        let sink = from_url("sqs+http://127.0.0.1:1/0/q").expect("a queue");
        assert!(sink.same_as(&SqsSettings::new("http://127.0.0.1:1/0/q")));
        assert!(from_url("sqs://host/1/q").expect("a queue").same_as(&SqsSettings::new("https://host/1/q")));
    }

    #[test]
    fn a_redrive_policy_may_have_its_number_as_a_text() {
        let policy = |text: &str| {
            let attributes = Attributes::from([(QueueAttributeName::RedrivePolicy, text.to_owned())]);
            redrive_policy(&attributes).map(|policy| (policy.target, policy.receives))
        };
        let read = Some(("arn:aws:sqs:r:1:dead".to_owned(), 5));
        assert_eq!(policy(r#"{"deadLetterTargetArn":"arn:aws:sqs:r:1:dead","maxReceiveCount":5}"#), read);
        assert_eq!(policy(r#"{"deadLetterTargetArn":"arn:aws:sqs:r:1:dead","maxReceiveCount":"5"}"#), read);
        assert_eq!(policy("{"), None);
        assert_eq!(policy("{}"), None);
    }
}
