//! The sink: publishes to a queue, in order per group.
//!
//! `laneway send --to` and the bridge hand it batches. SQS takes ten messages per call, and may take some of a call and not others; if the first of a group failed and
//! the second was taken, their order would be lost. So a call carries at most one message of a group, and the next one of that group goes when the
//! first has been taken. Groups do not wait for each other's answers, only for the round that they are in.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use aws_sdk_sqs::types::{MessageAttributeValue, QueueAttributeName};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};

use super::calls::{CALL_BYTES_MAX, Calls, Letter, Sent, TOGETHER, text_attribute, unique_id};
use super::{SqsSettings, is_fifo};
use crate::source::SourceError;
use crate::source::sink::{Outgoing, Published, Sink, SinkError};

/// Calls under way at a time.
const AT_ONCE: usize = 8;

/// SQS takes no more attributes than this, and nobody needs more.
const ATTRIBUTES_MAX: usize = 10;

/// Names of groups and deduplication ids are no longer than this.
const NAME_CHARS_MAX: usize = 128;

/// A queue to publish to.
pub struct SqsSink {
    name: Arc<str>,
    calls: Calls,
    url: String,
    fifo: bool,
    bytes_max: usize,
}

impl fmt::Debug for SqsSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsSink").field("name", &self.name).field("url", &self.url).finish_non_exhaustive()
    }
}

impl SqsSink {
    pub(super) async fn open(name: Arc<str>, settings: &SqsSettings) -> Result<Self, SinkError> {
        let calls = Calls::new(settings).await;
        let attributes = calls.attributes(&settings.url).await.map_err(sink_error)?;
        let bytes_max = attributes.get(&QueueAttributeName::MaximumMessageSize);
        let bytes_max = bytes_max.and_then(|bytes| bytes.parse().ok()).unwrap_or(CALL_BYTES_MAX);
        Ok(SqsSink { name, calls, url: settings.url.clone(), fifo: is_fifo(&attributes), bytes_max })
    }

    async fn publish_in_order(&self, batch: Vec<Outgoing>) -> Result<Vec<Published>, SinkError> {
        let mut answers: Vec<Option<Published>> = Vec::with_capacity(batch.len());
        let mut waiting: Vec<(usize, Letter)> = Vec::new();
        for (place, outgoing) in batch.into_iter().enumerate() {
            match self.letter(outgoing) {
                Ok(letter) => {
                    waiting.push((place, letter));
                    answers.push(None);
                }
                Err(reason) => answers.push(Some(Published::Refused { reason })),
            }
        }
        while !waiting.is_empty() {
            let (round, later) = first_of_each_group(waiting);
            waiting = later;
            for (place, published) in self.publish_round(round).await? {
                answers[place] = Some(published);
            }
        }
        Ok(answers.into_iter().map(|answer| answer.expect("every letter was sent")).collect())
    }

    /// Sends letters of different groups.
    async fn publish_round(&self, round: Vec<(usize, Letter)>) -> Result<Vec<(usize, Published)>, SinkError> {
        let calls = in_calls(round).into_iter().map(|(places, letters)| async move {
            let sent = self.calls.send(&self.url, &letters).await.map_err(sink_error)?;
            let answers = sent.into_iter().map(|sent| match sent {
                Sent::Taken { sequence } => Ok(Published::Accepted { sequence, duplicate: false }),
                Sent::Refused(reason) => Ok(Published::Refused { reason }),
                Sent::Failed(reason) => Err(SinkError::Unavailable(format!("{}: {reason}", self.url))),
            });
            let answers: Result<Vec<_>, _> = answers.collect();
            Ok::<_, SinkError>(places.into_iter().zip(answers?).collect::<Vec<_>>())
        });
        let calls: Vec<_> = calls.collect();
        let answers: Vec<_> = futures_util::stream::iter(calls).buffer_unordered(AT_ONCE).collect().await;
        Ok(answers.into_iter().collect::<Result<Vec<_>, _>>()?.concat())
    }

    fn letter(&self, outgoing: Outgoing) -> Result<Letter, String> {
        let text =
            std::str::from_utf8(&outgoing.text).map_err(|_| "SQS takes text only, in UTF-8".to_owned())?;
        if text.is_empty() {
            return Err("SQS takes no empty message".to_owned());
        }
        let ordered = |name: String| if self.fifo { Some(as_name(&name)) } else { None };
        let deduplication_id = outgoing.deduplication_id.unwrap_or_else(unique_id);
        // One without a group is ordered with nothing: it is a group of its own.
        let group = outgoing.group.map_or_else(|| deduplication_id.clone(), |group| group.to_string());
        let letter = Letter {
            text: text.to_owned(),
            group: ordered(group),
            deduplication_id: ordered(deduplication_id),
            attributes: attributes(&outgoing.headers),
        };
        let bytes = letter.bytes();
        if bytes > self.bytes_max {
            return Err(format!(
                "{bytes} bytes with its headers; the queue takes {} at most",
                self.bytes_max
            ));
        }
        Ok(letter)
    }
}

impl Sink for SqsSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>> {
        self.publish_in_order(batch).boxed()
    }
}

/// Letters with their places in the batch.
type Placed = Vec<(usize, Letter)>;

/// The first letter of each group, and the others, both in order. Letters without a group wait for nobody.
fn first_of_each_group(letters: Placed) -> (Placed, Placed) {
    let mut seen: HashSet<String> = HashSet::new();
    letters.into_iter().partition(|(_, letter)| letter.group.clone().is_none_or(|group| seen.insert(group)))
}

/// As many letters per call as it takes.
pub(super) fn in_calls(letters: Vec<(usize, Letter)>) -> Vec<(Vec<usize>, Vec<Letter>)> {
    let mut calls: Vec<(Vec<usize>, Vec<Letter>)> = Vec::new();
    let mut bytes = 0;
    for (place, letter) in letters {
        let fits = bytes + letter.bytes() <= CALL_BYTES_MAX;
        bytes = if fits { bytes + letter.bytes() } else { letter.bytes() };
        match calls.last_mut().filter(|(places, _)| fits && places.len() < TOGETHER) {
            Some((places, letters)) => {
                places.push(place);
                letters.push(letter);
            }
            None => {
                bytes = letter.bytes();
                calls.push((vec![place], vec![letter]));
            }
        }
    }
    calls
}

/// SQS takes names of up to 128 printable ASCII characters. Others stand for themselves by their hash, so that the same name is the same group.
fn as_name(name: &str) -> String {
    if (1..=NAME_CHARS_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return name.to_owned();
    }
    let digest = ring::digest::digest(&ring::digest::SHA256, name.as_bytes());
    digest.as_ref().iter().fold("sha256-".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

fn attributes(
    headers: &std::collections::BTreeMap<String, String>,
) -> HashMap<String, MessageAttributeValue> {
    let is_name = |name: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        !name.is_empty() && name.chars().all(fits) && !name.starts_with(['.', '-']) && !name.ends_with('.')
    };
    let named = headers.iter().filter(|(name, value)| is_name(name) && !value.is_empty());
    named.take(ATTRIBUTES_MAX).map(|(name, value)| (name.clone(), text_attribute(value))).collect()
}

fn sink_error(error: SourceError) -> SinkError {
    match error {
        SourceError::Unavailable(text) => SinkError::Unavailable(text),
        SourceError::Broken(text) => SinkError::Broken(text),
        SourceError::Closed => SinkError::Unavailable(SourceError::Closed.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(group: &str, bytes: usize) -> Letter {
        let group = (!group.is_empty()).then(|| group.to_owned());
        Letter { text: "x".repeat(bytes), group, deduplication_id: None, attributes: HashMap::new() }
    }

    fn places(letters: &[(usize, Letter)]) -> Vec<usize> {
        letters.iter().map(|(place, _)| *place).collect()
    }

    #[test]
    fn a_call_has_one_of_a_group_and_ten_in_all() {
        let groups = ["a", "b", "a", "", "", "b", "a"];
        let letters = groups.iter().enumerate().map(|(place, group)| (place, letter(group, 1))).collect();
        let (round, later) = first_of_each_group(letters);
        assert_eq!((places(&round), places(&later)), (vec![0, 1, 3, 4], vec![2, 5, 6]));
        let calls = in_calls((0..25).map(|place| (place, letter("", 1))).collect());
        assert_eq!(calls.iter().map(|(places, _)| places.len()).collect::<Vec<_>>(), [10, 10, 5]);
        let large = CALL_BYTES_MAX / 2 - 10;
        let calls = in_calls((0..3).map(|place| (place, letter("", large))).collect());
        assert_eq!(calls.iter().map(|(places, _)| places.len()).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn names_that_sqs_does_not_take_have_a_stand_in() {
        assert_eq!(as_name("order-7"), "order-7");
        for name in ["Zürich", "two words", "", &"x".repeat(129)] {
            let stand_in = as_name(name);
            assert!(stand_in.len() <= NAME_CHARS_MAX && stand_in.bytes().all(|byte| byte.is_ascii_graphic()));
            assert_eq!(stand_in, as_name(name));
        }
        assert_ne!(as_name("é"), as_name("è"));
    }
}
