//! What came to rest: the streams of dead letters and of what is in quarantine, for operators.
//!
//! `source.rs` lays messages there, under an id of their own; here they are listed, forgotten, and published once more. What was redriven goes by its number, so that the
//! others keep theirs; what is left are gaps.

use std::sync::Arc;

use async_nats::HeaderMap;
use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::stream::{RawMessageErrorKind, Stream};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, TryStreamExt};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::source::Shared;
use super::{GROUP, REASON, partition_of};
use crate::source::{Keeps, Kept, PAGE_BYTES, Redriven, Rest, SourceError};

/// So many messages are asked for at a time.
const AT_ONCE: usize = 16;

/// The two streams.
pub(super) struct Aside {
    pub(super) shared: Arc<Shared>,
    pub(super) dead: Stream,
    pub(super) quarantine: Stream,
}

fn failed(what: &str, error: &dyn std::fmt::Display) -> SourceError {
    SourceError::Unavailable(format!("cannot {what}: {error}"))
}

impl Aside {
    fn stream(&self, rest: Rest) -> &Stream {
        match rest {
            Rest::DeadLetters => &self.dead,
            Rest::Quarantine => &self.quarantine,
        }
    }

    async fn list(&self, rest: Rest, after: u64, most: usize) -> Result<Vec<Kept>, SourceError> {
        let stream = self.stream(rest);
        let info = stream.get_info().await.map_err(|error| failed("look at what rests", &error))?;
        let sequences = after.saturating_add(1).max(info.state.first_sequence)..=info.state.last_sequence;
        let places = futures_util::stream::iter(sequences).map(|sequence| at(stream, sequence));
        let mut places = places.buffered(most.clamp(1, AT_ONCE));
        let (mut found, mut bytes) = (Vec::new(), 0);
        while found.len() < most
            && let Some(place) = places.try_next().await?
        {
            let Some(kept) = place else { continue };
            bytes += kept.text.len();
            if bytes > PAGE_BYTES && !found.is_empty() {
                break;
            }
            found.push(kept);
        }
        Ok(found)
    }

    async fn bring_back(&self, which: Option<Vec<u64>>, most: usize) -> Result<Redriven, SourceError> {
        let Some(which) = which else { return self.bring_back_oldest(most).await };
        let mut redriven = Redriven::default();
        for sequence in which {
            match at(&self.dead, sequence).await? {
                Some(letter) => {
                    self.publish(letter).await?;
                    redriven.count += 1;
                }
                None => redriven.missing.push(sequence),
            }
        }
        Ok(redriven)
    }

    async fn bring_back_oldest(&self, most: usize) -> Result<Redriven, SourceError> {
        let (mut redriven, mut after) = (Redriven::default(), 0);
        while redriven.count < most {
            let letters = self.list(Rest::DeadLetters, after, most - redriven.count).await?;
            let Some(last) = letters.last() else { break };
            after = last.sequence;
            for letter in letters {
                self.publish(letter).await?;
                redriven.count += 1;
            }
        }
        Ok(redriven)
    }

    /// A dead letter becomes a message at the end of its group. Interrupted and begun again, it is published once.
    async fn publish(&self, letter: Kept) -> Result<(), SourceError> {
        let settings = &self.shared.settings;
        let number = partition_of(letter.group.as_deref(), self.shared.partitions);
        let mut headers = HeaderMap::new();
        if let Some(group) = &letter.group {
            headers.insert(GROUP, utf8_percent_encode(group, NON_ALPHANUMERIC).to_string());
        }
        let id = format!("{}.redrive.{}.{}", settings.stream, letter.sequence, letter.kept_millis);
        headers.insert(NATS_MESSAGE_ID, id);
        let text = bytes::Bytes::copy_from_slice(&letter.text);
        let sent =
            self.shared.context.publish_with_headers(settings.partition_subject(number), headers, text);
        let answer = sent.await.map_err(|error| failed("redrive", &error))?;
        answer.await.map_err(|error| failed("redrive", &error))?;
        let deleted = self.dead.delete_message(letter.sequence).await;
        deleted.map(drop).map_err(|error| failed("take a message from the dead letters", &error))
    }
}

/// The message at a place. Nothing in a gap.
async fn at(stream: &Stream, sequence: u64) -> Result<Option<Kept>, SourceError> {
    let message = match stream.get_raw_message(sequence).await {
        Ok(message) => message,
        Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => return Ok(None),
        Err(error) => return Err(failed("look at what rests", &error)),
    };
    let header = |name: &str| {
        let value = message.headers.get(name)?.as_str();
        Some(percent_decode_str(value).decode_utf8_lossy().into_owned())
    };
    Ok(Some(Kept {
        sequence,
        group: header(GROUP).map(Into::into),
        attempts: None,
        published_millis: None,
        kept_millis: u64::try_from(message.time.unix_timestamp_nanos() / 1_000_000).unwrap_or(0),
        reason: header(REASON).unwrap_or_default(),
        text: Arc::from(&message.payload[..]),
    }))
}

impl Keeps for Aside {
    fn kept(&self, rest: Rest, after: u64, most: usize) -> BoxFuture<'_, Result<Vec<Kept>, SourceError>> {
        self.list(rest, after, most).boxed()
    }

    fn redrive(&self, which: Option<Vec<u64>>, most: usize) -> BoxFuture<'_, Result<Redriven, SourceError>> {
        self.bring_back(which, most).boxed()
    }

    fn purge(&self, rest: Rest) -> BoxFuture<'_, Result<usize, SourceError>> {
        async move {
            let purged = self.stream(rest).purge().await;
            purged.map(|answer| answer.purged as usize).map_err(|error| failed("forget what rests", &error))
        }
        .boxed()
    }
}
