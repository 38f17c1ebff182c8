//! Where messages go that are published to a broker: by `laneway send --to`, and by the mediator of `mediationType: SINK`, which bridges one broker to
//! another.
//!
//! A sink takes [`Outgoing`] messages in batches. What a broker needs of a message beside its text (its group, an id to recognise copies by) is beside the
//! text, so that a sink never has to read it.
//!
//! A broker that answers for every message may refuse one and take the next, and a connection that breaks may lose one and carry the next. So of one group there is one message under way at a time, where
//! the answers are the messages' own (`lines.rs`); groups do not wait for each other.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::SourceError;
use super::broker::{Broker, let_go};

/// A message on its way out.
#[derive(Clone)]
pub struct Outgoing {
    /// What the publisher calls it.
    pub id: String,
    /// What orders it: those of one group are published in order.
    pub group: Option<Arc<str>>,
    /// Two with the same one are one, where the broker can tell.
    pub deduplication_id: Option<String>,
    /// What is published, byte by byte.
    pub text: Arc<[u8]>,
    /// Further headers, where the broker has them.
    pub headers: BTreeMap<String, String>,
}

impl fmt::Debug for Outgoing {
    /// The text and the headers may hold tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing")
            .field("id", &self.id)
            .field("group", &self.group)
            .field("deduplication_id", &self.deduplication_id)
            .field("text_bytes", &self.text.len())
            .field("headers", &self.headers.keys())
            .finish()
    }
}

/// What became of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Published {
    /// The broker has it, as durably as it promises.
    Accepted {
        /// Its place in the queue, where the broker says so.
        sequence: Option<u64>,
        /// It had been published before, and was not taken again.
        duplicate: bool,
    },
    /// The broker will never take it: too long, or not what it wants.
    Refused {
        /// Why.
        reason: String,
    },
}

/// Why a batch was not published. Some of it may have been: it is to be published again, whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// Perhaps later: a lost connection, a full queue.
    #[error("{0}")]
    Unavailable(String),
    /// Not without somebody's doing: a queue that is not there, a permission that is missing.
    #[error("{0}")]
    Broken(String),
}

impl From<SourceError> for SinkError {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::Broken(what) => SinkError::Broken(what),
            SourceError::Unavailable(what) => SinkError::Unavailable(what),
            SourceError::Closed => SinkError::Unavailable(SourceError::Closed.to_string()),
        }
    }
}

/// A place to publish to.
pub trait Sink: Send + Sync + 'static {
    /// What it is called in the configuration, or its URL without the user's part.
    fn name(&self) -> &str;

    /// Publishes these. Those of one group arrive in this order; one batch is not ordered with another that is under way. The answers are in the order
    /// of the question. Once one could not be published for a reason that may pass, nothing behind it in its group is, and the answer is an error.
    /// Comes back within the broker's own time limit.
    fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>>;

    /// Ends it: what was answered is published, and the connection goes.
    fn close(&self) -> BoxFuture<'_, ()> {
        futures_util::future::ready(()).boxed()
    }
}

/// A sink as it is configured, opened when it is first needed, and again after its broker was not there, or it has broken.
pub struct ConfiguredSink {
    name: Arc<str>,
    broker: Arc<dyn Broker>,
    open: ArcSwapOption<Arc<dyn Sink>>,
    /// One opening at a time.
    opening: tokio::sync::Mutex<()>,
}

impl fmt::Debug for ConfiguredSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfiguredSink")
            .field("name", &self.name)
            .field("broker", &self.broker)
            .finish_non_exhaustive()
    }
}

impl ConfiguredSink {
    /// Not open yet.
    pub fn new(name: impl Into<Arc<str>>, broker: Arc<dyn Broker>) -> Self {
        ConfiguredSink {
            name: name.into(),
            broker,
            open: ArcSwapOption::empty(),
            opening: tokio::sync::Mutex::default(),
        }
    }

    /// The settings that it is opened from.
    pub fn broker(&self) -> &Arc<dyn Broker> {
        &self.broker
    }

    async fn opened(&self) -> Result<Arc<dyn Sink>, SinkError> {
        if let Some(open) = self.open.load_full() {
            return Ok(Arc::clone(&open));
        }
        let _alone = self.opening.lock().await;
        if let Some(open) = self.open.load_full() {
            return Ok(Arc::clone(&open));
        }
        let sink = self.broker.open_sink(Arc::clone(&self.name)).await?;
        self.open.store(Some(Arc::new(Arc::clone(&sink))));
        Ok(sink)
    }
}

impl Sink for ConfiguredSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>> {
        async move {
            let sink = self.opened().await?;
            let published = sink.publish(batch).await;
            if matches!(published, Err(SinkError::Broken(_))) {
                // The next one who publishes opens it again. Whoever is publishing over the old one keeps it until then.
                let_go(&self.open, &sink);
            }
            published
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            if let Some(open) = self.open.swap(None) {
                open.close().await;
            }
        }
        .boxed()
    }
}
