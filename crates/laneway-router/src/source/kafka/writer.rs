//! Publishing: the sink, and the way to the dead letters.
//!
//! The group is the key, so a group is in one partition of the topic. Librdkafka keeps the order of what it is given and repeats nothing (`enable.idempotence`), but what it
//! gives up on after its time it lets the next ones pass. So a message goes when the one before it of its group has been taken.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer};
use rdkafka::util::Timeout;

use super::partition::{Named, Record};
use super::{KafkaSettings, refusals, trouble};
use crate::source::lines::one_by_one;
use crate::source::sink::{Outgoing, Published, Sink, SinkError};
use crate::source::{Disposal, SourceError, cut};

/// How long a record may wait for a place in front of the producer, which holds 100,000.
const PLACE: Duration = Duration::from_secs(10);

/// Why a message is among the dead letters.
const REASON: &str = "laneway-reason";

/// Where a dead letter was: topic, partition and offset.
const ORIGIN: &str = "laneway-origin";

/// A dead letter was too long for its topic, so it has no text: the whole record is where this says, as long as that topic keeps it.
const OMITTED: &str = "laneway-text-omitted";

/// A reason is not longer than this.
const REASON_BYTES_MAX: usize = 1_024;

/// What the publisher calls a message.
const ID: &str = "laneway-message-id";

/// The producer of dead letters.
pub(super) struct Letters {
    config: ClientConfig,
    producer: Mutex<FutureProducer>,
    topic: String,
    dead_letters: String,
    quarantine: String,
}

impl Letters {
    pub(super) fn new(settings: &KafkaSettings) -> Result<Self, SourceError> {
        let mut config = settings.producer_config();
        // The topic's own bound is what counts: whatever could be read is sent.
        config.set("message.max.bytes", "1000000000");
        let producer = config.create().map_err(|error| trouble(&settings.dead_letters(), &error))?;
        let (topic, dead_letters) = (settings.topic.clone(), settings.dead_letters());
        let producer = Mutex::new(producer);
        Ok(Letters { config, producer, topic, dead_letters, quarantine: settings.quarantine() })
    }

    /// The producer, made anew after an error behind which it takes nothing any more.
    fn producer(&self) -> Result<FutureProducer, KafkaError> {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if producer.client().fatal_error().is_some() {
            *producer = self.config.create()?;
        }
        Ok(producer.clone())
    }

    pub(super) fn dead_letters(&self) -> &str {
        &self.dead_letters
    }

    pub(super) fn quarantine(&self) -> &str {
        &self.quarantine
    }

    /// Puts a copy of a record where it belongs, with the reason.
    pub(super) async fn keep(
        &self,
        record: &Record,
        disposal: &Disposal,
        named: Named,
    ) -> Result<(), SourceError> {
        let (topic, reason) = match disposal {
            Disposal::DeadLetter { reason } => (&self.dead_letters, reason),
            Disposal::Quarantine { reason } => (&self.quarantine, reason),
            Disposal::Done | Disposal::GiveBack { .. } => return Ok(()),
        };
        let origin = format!("{}/{}/{}", self.topic, named.partition, named.offset);
        let headers = OwnedHeaders::new()
            .insert(Header { key: REASON, value: Some(short(reason)) })
            .insert(Header { key: ORIGIN, value: Some(&origin) });
        let sent = self.send(topic, record.key.as_deref(), &record.text, headers.clone()).await;
        let sent = match sent {
            Err(error) if error.rdkafka_error_code() == Some(RDKafkaErrorCode::MessageSizeTooLarge) => {
                let headers = headers.insert(Header { key: OMITTED, value: Some(&origin) });
                self.send(topic, record.key.as_deref(), &[], headers).await
            }
            sent => sent,
        };
        sent.map_err(|error| trouble(topic, &error))
    }

    async fn send(
        &self,
        topic: &str,
        key: Option<&[u8]>,
        text: &[u8],
        headers: OwnedHeaders,
    ) -> Result<(), KafkaError> {
        let mut letter = FutureRecord::<[u8], [u8]>::to(topic).payload(text).headers(headers);
        if let Some(key) = key {
            letter = letter.key(key);
        }
        let sent = self.producer()?.send(letter, Timeout::After(PLACE)).await;
        sent.map(drop).map_err(|(error, _)| error)
    }
}

/// A reason, as much of it as there is room for.
fn short(reason: &str) -> &str {
    cut(reason, REASON_BYTES_MAX)
}

/// A topic to publish to.
pub struct KafkaSink {
    name: Arc<str>,
    topic: String,
    producer: FutureProducer,
}

impl fmt::Debug for KafkaSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSink")
            .field("name", &self.name)
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

impl KafkaSink {
    pub(super) async fn open(name: Arc<str>, settings: &KafkaSettings) -> Result<Self, SinkError> {
        let ours = settings.clone();
        let opened = tokio::task::spawn_blocking(move || {
            refusals::look(&refusals::asking(&ours)?, &ours.topic)?;
            ours.producer_config().create().map_err(|error| trouble(&ours.topic, &error))
        });
        let opened = opened.await.map_err(|error| SinkError::Unavailable(error.to_string()))?;
        Ok(KafkaSink { name, topic: settings.topic.clone(), producer: opened? })
    }

    async fn publish_one(&self, outgoing: Outgoing) -> Result<Published, SinkError> {
        let mut headers = OwnedHeaders::new().insert(Header { key: ID, value: Some(&outgoing.id) });
        for (name, value) in &outgoing.headers {
            headers = headers.insert(Header { key: name, value: Some(value) });
        }
        let key = outgoing.group.as_deref().map(key_of);
        let mut record =
            FutureRecord::<[u8], [u8]>::to(&self.topic).payload(&outgoing.text[..]).headers(headers);
        if let Some(key) = &key {
            record = record.key(key);
        }
        match self.producer.send(record, Timeout::After(PLACE)).await {
            Ok(delivery) => {
                let sequence = super::partition::identity(delivery.partition, delivery.offset);
                Ok(Published::Accepted { sequence: Some(sequence), duplicate: false })
            }
            Err((error, _)) if is_content(&error) => Ok(Published::Refused { reason: error.to_string() }),
            Err((error, _)) => Err(trouble(&self.topic, &error).into()),
        }
    }
}

impl Sink for KafkaSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>> {
        one_by_one(batch, |outgoing| outgoing.group.clone(), |outgoing| self.publish_one(outgoing)).boxed()
    }
}

fn is_content(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        error.rdkafka_error_code(),
        Some(
            Code::MessageSizeTooLarge | Code::InvalidMessage | Code::InvalidMessageSize | Code::InvalidRecord
        )
    )
}

/// The key of a group: what the reader made of a key that was no text becomes that key again.
fn key_of(group: &str) -> Vec<u8> {
    use base64::Engine;
    let encoded = group.strip_prefix("base64:");
    let decoded = encoded.and_then(|text| base64::engine::general_purpose::STANDARD_NO_PAD.decode(text).ok());
    decoded.filter(|key| std::str::from_utf8(key).is_err()).unwrap_or_else(|| group.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_survives_the_way_through_a_group() {
        assert_eq!(key_of("order-7"), b"order-7");
        assert_eq!(key_of("base64://4"), [0xff, 0xfe]);
        assert_eq!(key_of("base64:aGk"), b"base64:aGk", "that is the key of somebody who likes such names");
    }
}
