//! Publishing to a stream: the group picks the partition, and the server's answer is waited for.
//!
//! Those without a group are in order as those of a group are: whoever reads them may want that (`ungrouped = serial`).

use std::sync::Arc;

use async_nats::HeaderMap;
use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::{self, ErrorCode};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{Failure, GROUP, Refusals, Settings, number_of, partition_of};
use crate::source::lines::one_by_one;
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

    async fn publish_one(&self, message: Outgoing) -> Result<Published, SinkError> {
        if let Some(name) = message.headers.keys().find(|name| is_servers(name)) {
            let reason = format!("header `{name}` means something to NATS, and is not for messages to set");
            return Ok(Published::Refused { reason });
        }
        let number = partition_of(message.group.as_deref(), self.partitions);
        let headers = headers(&message);
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
        one_by_one(batch, |message| Some(message.group.clone()), |message| self.publish_one(message)).boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let _ = self.context.client().drain().await;
        })
    }
}
