//! Publishing to ActiveMQ: every message has a receipt, and those of a group go one after the other over one connection.
//!
//! The broker deals with the frames of a connection in order, and ends the connection at the first that it refuses, so nothing behind it is published; a
//! batch needs only one receipt, that of its last message.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use super::source::BROKERS_OWN;
use super::stomp::{Frame, Sender, escape};
use super::{Settings, send_frame};
use crate::message::MESSAGE_BYTES_MAX;
use crate::source::cut;
use crate::source::sink::{Outgoing, Published, Sink, SinkError};

/// Headers that mean something to STOMP or to the broker, beside those that it writes itself (`source.rs`). Of two with one name the first counts, which would be the
/// message's: with a `receipt` of its own the answer never comes, or is another publication's; with `expires` the broker drops it; others break the connection.
const MEANINGFUL: &[&str] = &[
    "JMSXGroupSeq",
    "accept-version",
    "amq-msg-type",
    "browser",
    "client-id",
    "heart-beat",
    "host",
    "id",
    "login",
    "passcode",
    "receipt-id",
    "reply-to",
    "selector",
    "server",
    "session",
    "transformation",
    "transformation-error",
    "version",
];

/// The broker's own settings for one message: of when it is delivered, for example.
const MEANINGFUL_BEGINNINGS: &[&str] = &["AMQ_", "activemq."];

/// A line of a head, name and value, has no more bytes than this, or the broker ends the connection. It is its own limit, less what escaping may add to our own headers.
const HEADER_BYTES_MAX: usize = 10 * 1024 - 256;

/// Why a message with this header is not published, if it is not.
fn refusal(name: &str, value: &str) -> Option<String> {
    let shown = cut(name, 100).escape_debug();
    let is_brokers = BROKERS_OWN.contains(&name)
        || MEANINGFUL.contains(&name)
        || MEANINGFUL_BEGINNINGS.iter().any(|beginning| name.starts_with(beginning));
    if is_brokers {
        return Some(format!(
            "header `{shown}` means something to STOMP or to ActiveMQ, and is not for messages to set"
        ));
    }
    let bytes = escape(name).len() + escape(value).len();
    (bytes > HEADER_BYTES_MAX)
        .then(|| format!("header `{shown}` has {bytes} bytes, and ActiveMQ takes {HEADER_BYTES_MAX}"))
}

/// Why a message is not published, if it is not.
fn refused(outgoing: &Outgoing) -> Option<String> {
    if outgoing.text.len() > MESSAGE_BYTES_MAX {
        return Some(format!("{} bytes are more than {MESSAGE_BYTES_MAX}", outgoing.text.len()));
    }
    outgoing.headers.iter().find_map(|(name, value)| refusal(name, value))
}

/// A queue to publish to.
pub struct ActiveSink {
    name: Arc<str>,
    settings: Settings,
    link: Mutex<Option<Link>>,
}

struct Link {
    sender: Sender,
    /// Notes receipts until the connection ends.
    reader: JoinHandle<()>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl ActiveSink {
    /// Connects.
    pub async fn open(settings: Settings, name: Arc<str>) -> Result<Self, SinkError> {
        let sink = ActiveSink { name, settings, link: Mutex::default() };
        *sink.link.lock().await = Some(sink.connect().await?);
        Ok(sink)
    }

    async fn connect(&self) -> Result<Link, SinkError> {
        let (sender, mut receiver) = self.settings.connect().await?;
        // It subscribes to nothing, so there is no message; it ends with the connection.
        let reader = tokio::spawn(async move { while receiver.message().await.is_ok() {} });
        Ok(Link { sender, reader })
    }

    /// The connection, made anew if it has ended, and by what to recognise it.
    async fn linked(&self) -> Result<(Sender, tokio::task::Id), SinkError> {
        let mut link = self.link.lock().await;
        link.take_if(|link| link.reader.is_finished());
        if link.is_none() {
            *link = Some(self.connect().await?);
        }
        let link = link.as_ref().expect("it is there, or was made just now");
        Ok((link.sender.clone(), link.reader.id()))
    }

    fn frame(&self, outgoing: &Outgoing) -> Frame {
        let group = outgoing.group.as_deref().map(|group| (self.settings.group_header.as_str(), group));
        let mut frame = send_frame(&self.settings.queue, group, &outgoing.text);
        for (name, value) in &outgoing.headers {
            frame = frame.with(name, value);
        }
        frame.with("x-laneway-id", &outgoing.id)
    }
}

impl Sink for ActiveSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>> {
        async move {
            let mut answers = Vec::with_capacity(batch.len());
            let mut frames = Vec::with_capacity(batch.len());
            for outgoing in &batch {
                answers.push(match refused(outgoing) {
                    Some(reason) => Published::Refused { reason },
                    None => {
                        frames.push(self.frame(outgoing));
                        Published::Accepted { sequence: None, duplicate: false }
                    }
                });
            }
            let (sender, number) = self.linked().await?;
            // Without the lock: another batch need not wait for the answer to this one.
            if let Err(failure) = sender.ask(frames).await {
                self.link.lock().await.take_if(|link| link.reader.id() == number);
                return Err(self.settings.explain("publish", &failure).into());
            }
            Ok(answers)
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            if let Some(link) = self.link.lock().await.take() {
                let _ = link.sender.ask(vec![Frame::new("DISCONNECT")]).await;
            }
        }
        .boxed()
    }
}
