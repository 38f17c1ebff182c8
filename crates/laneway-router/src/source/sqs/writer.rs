//! The sink: publishes to a queue, in order per group.
//!
//! `laneway send --to` and the bridge hand it batches. SQS takes ten messages per call, and may take some of a call and not others; if the first of a group failed and
//! the second was taken, their order would be lost. So a call carries at most one message of a group, and the next one of that group goes when the
//! first has been taken.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use aws_sdk_sqs::types::{MessageAttributeValue, QueueAttributeName};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::calls::{CALL_BYTES_MAX, Calls, Letter, Sent, TOGETHER, text_attribute, unique_id};
use super::{SqsSettings, is_fifo};
use crate::source::lines::in_order;
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
        let attributes = calls.attributes(&settings.url).await?;
        let bytes_max = attributes.get(&QueueAttributeName::MaximumMessageSize);
        let bytes_max = bytes_max.and_then(|bytes| bytes.parse().ok()).unwrap_or(CALL_BYTES_MAX);
        Ok(SqsSink { name, calls, url: settings.url.clone(), fifo: is_fifo(&attributes), bytes_max })
    }

    async fn publish_in_order(&self, batch: Vec<Outgoing>) -> Result<Vec<Published>, SinkError> {
        let (mut letters, mut refused) = (Vec::with_capacity(batch.len()), Vec::new());
        for outgoing in batch {
            match self.letter(outgoing) {
                Ok(letter) => {
                    letters.push((letter.group.clone(), letter));
                    refused.push(None);
                }
                Err(reason) => refused.push(Some(Published::Refused { reason })),
            }
        }
        let mut sent = in_order(letters, AT_ONCE, fits, |call| self.send(call)).await?.into_iter();
        let answers = refused.into_iter().map(|refused| refused.or_else(|| sent.next()));
        Ok(answers.map(|answer| answer.expect("every letter was sent")).collect())
    }

    /// Sends letters of different groups, as many as a call takes.
    async fn send(&self, letters: Vec<Letter>) -> Result<Vec<Published>, SinkError> {
        let sent = self.calls.send(&self.url, &letters).await?;
        let answers = sent.into_iter().map(|sent| match sent {
            Sent::Taken { sequence } => Ok(Published::Accepted { sequence, duplicate: false }),
            Sent::Refused(reason) => Ok(Published::Refused { reason }),
            Sent::Failed(reason) => Err(SinkError::Unavailable(format!("{}: {reason}", self.url))),
        });
        answers.collect()
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

/// Whether a call takes one letter more.
fn fits(letters: &[Letter], next: &Letter) -> bool {
    let bytes: usize = letters.iter().map(Letter::bytes).sum();
    letters.len() < TOGETHER && bytes + next.bytes() <= CALL_BYTES_MAX
}

/// As many letters per call as it takes, with their places.
pub(super) fn in_calls(letters: Vec<(usize, Letter)>) -> Vec<(Vec<usize>, Vec<Letter>)> {
    let mut calls: Vec<(Vec<usize>, Vec<Letter>)> = Vec::new();
    for (place, letter) in letters {
        match calls.last_mut().filter(|(_, letters)| fits(letters, &letter)) {
            Some((places, letters)) => {
                places.push(place);
                letters.push(letter);
            }
            None => calls.push((vec![place], vec![letter])),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_takes_ten_letters_and_no_more_bytes_than_it_may() {
        let letters = |count: usize, bytes: usize| {
            let text = "x".repeat(bytes);
            vec![Letter { text, group: None, deduplication_id: None, attributes: HashMap::new() }; count]
        };
        let (small, half) = (letters(10, 1), letters(2, CALL_BYTES_MAX / 2));
        assert!(fits(&small[1..], &small[0]) && !fits(&small, &small[0]));
        assert!(fits(&half[1..], &half[0]) && !fits(&half, &small[0]));
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
