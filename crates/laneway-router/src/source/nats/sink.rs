//! Publishing to a stream: the group picks the partition, and the server's answer is waited for.
//!
//! Of one group there is one message under way at a time. A server may refuse one message and take the next, and a connection that breaks may lose one and carry
//! the next; with the answer of each before the next is sent, neither can change the order. Groups do not wait for each other.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_nats::HeaderMap;
use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::{self, ErrorCode};
use futures_util::future::{BoxFuture, join_all};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{Failure, GROUP, Refusals, Settings, number_of, partition_of};
use crate::source::sink::{Outgoing, Published, Sink, SinkError};

/// Streams to publish to, one for each partition.
pub(super) struct NatsSink {
    name: Arc<str>,
    context: jetstream::Context,
    refusals: Refusals,
    settings: Settings,
    partitions: usize,
}

impl NatsSink {
    pub(super) async fn open(name: Arc<str>, settings: Settings) -> Result<Self, SinkError> {
        let (context, refusals) = settings.connect(&name).await?;
        let found = settings.partitions(&context).await.map_err(|failure| refusals.explain(failure))?;
        Ok(NatsSink { name, context, refusals, settings, partitions: found.len() })
    }

    async fn publish_one(&self, message: &Outgoing) -> Result<Published, SinkError> {
        if let Some(name) = message.headers.keys().find(|name| is_servers(name)) {
            let reason = format!("header `{name}` means something to NATS, and is not for messages to set");
            return Ok(Published::Refused { reason });
        }
        let number = partition_of(message.group.as_deref(), self.partitions);
        let headers = headers(message);
        let text = bytes::Bytes::copy_from_slice(&message.text);
        let subject = self.settings.partition_subject(number);
        let sent = self.context.publish_with_headers(subject, headers, text).await;
        let answered = match sent {
            Ok(answer) => answer.await,
            Err(error) => Err(error),
        };
        match answered {
            Ok(answer) => {
                let sequence = number_of(answer.sequence, number, self.partitions);
                Ok(Published::Accepted { sequence: Some(sequence), duplicate: answer.duplicate })
            }
            Err(error) => refusal(&error).map_err(|failure| self.refusals.explain(failure).into()),
        }
    }

    /// The messages of one group, one after the other.
    async fn publish_group(
        &self,
        messages: Vec<(usize, Outgoing)>,
    ) -> Result<Vec<(usize, Published)>, SinkError> {
        let mut answers = Vec::with_capacity(messages.len());
        for (place, message) in messages {
            answers.push((place, self.publish_one(&message).await?));
        }
        Ok(answers)
    }
}

/// Whether a header is one that the server obeys: it would refuse the message for ever (`Nats-Expected-Last-Sequence`), or forget it after a time (`Nats-TTL`).
fn is_servers(name: &str) -> bool {
    name.get(..5).is_some_and(|beginning| beginning.eq_ignore_ascii_case("nats-"))
}

fn headers(message: &Outgoing) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in &message.headers {
        headers.insert(name.as_str(), value.as_str());
    }
    if let Some(group) = &message.group {
        headers.insert(GROUP, utf8_percent_encode(group, NON_ALPHANUMERIC).to_string());
    }
    if let Some(id) = &message.deduplication_id {
        headers.insert(NATS_MESSAGE_ID, utf8_percent_encode(id, NON_ALPHANUMERIC).to_string());
    }
    headers
}

/// What the server's refusal means: for this message for ever, or for now.
fn refusal(error: &PublishError) -> Result<Published, Failure> {
    let too_long = |error: &PublishError| {
        let mut cause = std::error::Error::source(error);
        while let Some(this) = cause {
            if let Some(told) = this.downcast_ref::<jetstream::Error>() {
                let code = told.error_code();
                return code == ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM
                    || code == ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM;
            }
            cause = this.source();
        }
        false
    };
    match error.kind() {
        PublishErrorKind::MaxPayloadExceeded => Ok(Published::Refused { reason: error.to_string() }),
        _ if too_long(error) => Ok(Published::Refused { reason: error.to_string() }),
        // Also while the stream has no leader, which passes.
        PublishErrorKind::StreamNotFound => Err(Failure::Absent(format!("no stream has answered: {error}"))),
        _ => Err(Failure::Absent(format!("not published: {error}"))),
    }
}

impl Sink for NatsSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>> {
        Box::pin(async move {
            let count = batch.len();
            let mut groups: BTreeMap<Option<Arc<str>>, Vec<(usize, Outgoing)>> = BTreeMap::new();
            for (place, message) in batch.into_iter().enumerate() {
                groups.entry(message.group.clone()).or_default().push((place, message));
            }
            let publishing = groups.into_values().map(|messages| self.publish_group(messages));
            let mut answers = BTreeMap::new();
            for published in join_all(publishing).await {
                answers.extend(published?);
            }
            debug_assert_eq!(answers.len(), count);
            Ok(answers.into_values().collect())
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let _ = self.context.client().drain().await;
        })
    }
}
