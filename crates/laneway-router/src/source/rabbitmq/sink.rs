//! Publishing to RabbitMQ: every message is confirmed, and those of a group one after the other.
//!
//! Batches come from `laneway send --to` and from the mediator of sinks. A message of a group is published when the one before it is confirmed.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};

use super::link::{Publisher, To, prepare};
use super::{AMQP_NAME_BYTES_MAX, Settings};
use crate::message::MESSAGE_BYTES_MAX;
use crate::source::broker::Role;
use crate::source::cut;
use crate::source::lines::one_by_one;
use crate::source::sink::{Outgoing, Published, Sink, SinkError};

/// A queue, or the partitions of one, to publish to.
pub struct RabbitSink {
    name: Arc<str>,
    publisher: Publisher,
}

impl RabbitSink {
    /// Connects, and sees that the queue is there.
    pub async fn open(settings: Settings, name: Arc<str>) -> Result<Self, SinkError> {
        let publisher = Publisher::new(Arc::new(settings));
        let link = publisher.link().await?;
        prepare(&publisher.settings, &link.connection, Role::Sink).await?;
        Ok(RabbitSink { name, publisher })
    }

    async fn publish_one(&self, outgoing: Outgoing) -> Result<Published, SinkError> {
        if let Some(reason) = refused(&outgoing) {
            return Ok(Published::Refused { reason });
        }
        // Without a group nothing is ordered, and the beginning of the id is as good as all of it.
        let alone = || cut(&outgoing.id, AMQP_NAME_BYTES_MAX);
        let group = outgoing.group.as_deref().unwrap_or_else(alone);
        let message = (To::Queue { group }, self.properties(&outgoing), Arc::clone(&outgoing.text));
        self.publisher.publish(vec![message]).await?;
        Ok(Published::Accepted { sequence: None, duplicate: false })
    }

    fn properties(&self, outgoing: &Outgoing) -> BasicProperties {
        let mut headers = FieldTable::default();
        for (name, value) in &outgoing.headers {
            headers.insert(name.as_str().into(), AMQPValue::LongString(value.as_str().into()));
        }
        if let Some(group) = &outgoing.group {
            let header = self.publisher.settings.group_header.as_str();
            headers.insert(header.into(), AMQPValue::LongString((**group).into()));
        }
        let properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
        match outgoing.id.is_empty() || outgoing.id.len() > AMQP_NAME_BYTES_MAX {
            true => properties,
            false => properties.with_message_id(outgoing.id.as_str().into()),
        }
    }
}

/// The broker sends copies of a message to the queues that these name, and ends the channel where they name none.
const BROKERS_OWN: &[&str] = &["BCC", "CC"];

/// All headers together have no more bytes than this: they are one frame, and the broker has frames of 128 KiB, unless it is told otherwise.
const HEADERS_BYTES_MAX: usize = 120 * 1024;

/// What a header takes beside its name and its value.
const HEADER_BYTES: usize = 8;

/// Why a message with these headers is refused.
fn bad_headers(headers: &BTreeMap<String, String>) -> Option<String> {
    for name in headers.keys() {
        if BROKERS_OWN.contains(&name.as_str()) {
            return Some(format!(
                "header `{name}` means something to RabbitMQ, and is not for messages to set"
            ));
        }
        if name.len() > AMQP_NAME_BYTES_MAX {
            let bytes = name.len();
            return Some(format!(
                "a header with a name of {bytes} bytes; AMQP has room for {AMQP_NAME_BYTES_MAX} bytes"
            ));
        }
    }
    let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len() + HEADER_BYTES).sum();
    (bytes > HEADERS_BYTES_MAX)
        .then(|| format!("{bytes} bytes of headers, and RabbitMQ takes {HEADERS_BYTES_MAX}"))
}

/// Why a message is refused without asking.
fn refused(outgoing: &Outgoing) -> Option<String> {
    (outgoing.text.len() > MESSAGE_BYTES_MAX)
        .then(|| format!("{} bytes are more than {MESSAGE_BYTES_MAX}", outgoing.text.len()))
        // A routing key, which decides about the partition, is no longer than that.
        .or_else(|| {
            outgoing
                .group
                .as_ref()
                .filter(|group| group.len() > AMQP_NAME_BYTES_MAX)
                .map(|_| "a group of more than 255 bytes".to_owned())
        })
        .or_else(|| bad_headers(&outgoing.headers))
}

impl Sink for RabbitSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>> {
        one_by_one(batch, |outgoing| outgoing.group.clone(), |outgoing| self.publish_one(outgoing)).boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.publisher.close().boxed()
    }
}
