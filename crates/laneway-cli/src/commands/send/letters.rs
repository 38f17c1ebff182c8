//! The messages that `laneway send` sends, as JSON, one after the other: made from the options, or read from a file or a pipe.
//!
//! Only what cannot be sent at all is refused here, with the line that it is on; whether it is a message is for the service to say.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use anyhow::Context as _;
use laneway_router::message::MESSAGE_BYTES_MAX;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::Options;
use crate::exit::Failure;

/// A message on its way out.
pub(super) struct Letter {
    pub(super) json: String,
    /// Where it was read, from 1.
    pub(super) line: Option<u64>,
    /// By how much it moves the bar.
    pub(super) progress: u64,
}

/// All of them.
pub(super) struct Letters {
    from: From,
    /// How much there is, in bytes or in messages, if that is known.
    pub(super) total: Option<u64>,
}

enum From {
    Options {
        message: Map<String, Value>,
        payload: Option<Box<RawValue>>,
        /// What each message has for itself, its number behind it if there are several.
        own: Vec<(&'static str, String)>,
        next: u64,
        count: u64,
    },
    Lines {
        reader: Box<dyn BufRead>,
        line: u64,
    },
}

impl Letters {
    pub(super) fn open(options: &Options) -> Result<Letters, Failure> {
        match options.from.as_deref() {
            None => Letters::alike(options),
            Some("-") => Ok(Letters::read(Box::new(BufReader::new(io::stdin())), None)),
            Some(path) => {
                let file = File::open(path).with_context(|| format!("cannot open {path}"))?;
                // A pipe has no length.
                let length = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|data| data.len());
                Ok(Letters::read(Box::new(BufReader::new(file)), length))
            }
        }
    }

    fn read(reader: Box<dyn BufRead>, total: Option<u64>) -> Letters {
        Letters { from: From::Lines { reader, line: 0 }, total }
    }

    fn alike(options: &Options) -> Result<Letters, Failure> {
        let payload = options.payload.as_deref().map(payload).transpose()?;
        let random = || format!("cli-{:016x}", fastrand::u64(..));
        // With the same key the same messages, ids included: others would be refused.
        let id =
            options.id.clone().or_else(|| options.idempotency_key.as_ref().map(|key| format!("cli-{key}")));
        let mut own = vec![("id", id.unwrap_or_else(random))];
        own.extend(options.deduplication_id.clone().map(|id| ("deduplicationId", id)));
        let (message, count) = (message(options)?, options.count);
        let from = From::Options { message, payload, own, next: 1, count };
        Ok(Letters { from, total: Some(count) })
    }
}

impl Iterator for Letters {
    type Item = Result<Letter, Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.from {
            From::Options { next, count, .. } if *next > *count => None,
            From::Options { message, payload, own, next, count } => {
                let mut message = message.clone();
                for (field, text) in own {
                    let text = if *count == 1 { text.clone() } else { format!("{text}-{next}") };
                    message.insert((*field).to_owned(), json!(text));
                }
                *next += 1;
                Some(Ok(Letter { json: written(message, payload.as_deref()), line: None, progress: 1 }))
            }
            From::Lines { reader, line } => next_line(reader.as_mut(), line).transpose(),
        }
    }
}

/// A message but for what is its own, and its payload.
fn message(options: &Options) -> Result<Map<String, Value>, Failure> {
    let mut message = Map::new();
    message.insert("poolCode".to_owned(), json!(options.pool));
    let simulated =
        options.target.strip_prefix("SIMULATED").filter(|rest| !rest.starts_with(char::is_alphanumeric));
    let (kind, target) = match simulated {
        Some(rest) => ("SIMULATED", rest.trim_start_matches(':').trim()),
        None => ("HTTP", options.target.as_str()),
    };
    message.insert("mediationType".to_owned(), json!(kind));
    message.insert("mediationTarget".to_owned(), json!(target));
    let token = options.auth_token_file.as_deref().map(token).transpose()?;
    let upper = |word: &Option<String>| word.as_ref().map(|word| json!(word.to_uppercase()));
    let more = [
        ("messageGroupId", options.group.as_ref().map(|group| json!(group))),
        ("delaySeconds", options.delay.map(|seconds| json!(seconds))),
        ("priority", upper(&options.priority)),
        ("dispatchMode", upper(&options.dispatch_mode)),
        ("authToken", token.map(|token| json!(token))),
        ("headers", headers(&options.headers)?),
    ];
    message.extend(more.into_iter().filter_map(|(field, value)| Some((field.to_owned(), value?))));
    Ok(message)
}

fn headers(headers: &[(String, String)]) -> Result<Option<Value>, Failure> {
    let mut all = Map::new();
    for (name, value) in headers {
        if all.insert(name.clone(), json!(value)).is_some() {
            return Err(Failure::Usage(format!(
                "there are two headers {name}, and a message has one of a name"
            )));
        }
    }
    Ok(Some(Value::Object(all)).filter(|_| !headers.is_empty()))
}

/// A token without the end of its line.
fn token(place: &str) -> Result<String, Failure> {
    let text = text_of(place)?;
    match text.trim() {
        "" => Err(Failure::Usage(format!("there is no token in {place}"))),
        token => Ok(token.to_owned()),
    }
}

/// The payload goes in byte by byte as it was given.
fn written(message: Map<String, Value>, payload: Option<&RawValue>) -> String {
    let mut text = Value::Object(message).to_string();
    if let Some(payload) = payload {
        text.pop();
        text.push_str(",\"payload\":");
        text.push_str(payload.get());
        text.push('}');
    }
    text
}

/// JSON, from where the option says.
fn payload(option: &str) -> Result<Box<RawValue>, Failure> {
    let text = match option.strip_prefix('@') {
        Some(path) => text_of(path)?,
        None if option == "-" => text_of(option)?,
        None => option.to_owned(),
    };
    let shown = if option.len() > 60 { "the payload" } else { option };
    let not_json = |error| Failure::Usage(format!("{shown} is not JSON: {error}"));
    serde_json::from_str(text.trim()).map_err(not_json)
}

/// What is in a file, or comes from standard input.
fn text_of(place: &str) -> Result<String, Failure> {
    if place == "-" {
        return Ok(whole(io::stdin()).context("cannot read standard input")?);
    }
    let file = File::open(place).with_context(|| format!("cannot open {place}"))?;
    Ok(whole(file).with_context(|| format!("cannot read {place}"))?)
}

/// All of it, if it is not longer than any message may be.
fn whole(reader: impl Read) -> io::Result<String> {
    let mut text = String::new();
    reader.take(MESSAGE_BYTES_MAX as u64 + 1).read_to_string(&mut text)?;
    if text.len() > MESSAGE_BYTES_MAX {
        return Err(io::Error::other(format!(
            "it is longer than the {MESSAGE_BYTES_MAX} bytes of a message"
        )));
    }
    Ok(text)
}

/// The next line that is not blank.
fn next_line(reader: &mut dyn BufRead, line: &mut u64) -> Result<Option<Letter>, Failure> {
    let mut progress = 0;
    loop {
        let mut bytes = Vec::new();
        // Room for the longest message, and what ends the line.
        let read = reader.take(MESSAGE_BYTES_MAX as u64 + 3).read_until(b'\n', &mut bytes);
        let read = read.context("cannot read the messages")?;
        if read == 0 {
            return Ok(None);
        }
        *line += 1;
        progress += read as u64;
        let text = String::from_utf8(bytes).map_err(|_| refused(*line, "is not UTF-8"))?;
        let text = text.trim();
        if text.is_empty() {
            continue;
        }
        if text.len() > MESSAGE_BYTES_MAX {
            return Err(refused(
                *line,
                &format!("is longer than the {MESSAGE_BYTES_MAX} bytes of a message"),
            ));
        }
        // A batch is an array of these: what is not one object would change what the others mean.
        let object = serde_json::from_str::<Map<String, Value>>(text);
        object.map_err(|error| refused(*line, &format!("is not a JSON object: {error}")))?;
        return Ok(Some(Letter { json: text.to_owned(), line: Some(*line), progress }));
    }
}

fn refused(line: u64, why: &str) -> Failure {
    Failure::Other(anyhow::anyhow!("line {line} {why}; nothing from its batch on was sent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &'static str) -> Letters {
        Letters::read(Box::new(text.as_bytes()), None)
    }

    #[test]
    fn lines_are_numbered_and_blank_ones_are_none() {
        let letters: Vec<_> =
            lines("{\"a\": 1}\n\n  {}  \r\n{\"b\": 2}").map(|letter| letter.expect("fine")).collect();
        let seen: Vec<_> = letters.iter().map(|letter| (letter.json.as_str(), letter.line)).collect();
        assert_eq!(seen, [("{\"a\": 1}", Some(1)), ("{}", Some(3)), ("{\"b\": 2}", Some(4))]);
        assert_eq!(letters.iter().map(|letter| letter.progress).sum::<u64>(), 26);
    }

    #[test]
    fn what_is_no_object_is_refused_with_its_line() {
        for bad in ["{}\n[1]", "{}\n{}, {}", "{}\n{", "{}\nnull"] {
            let result: Result<Vec<_>, _> = lines(bad).collect();
            let words = result.err().expect("refused").to_string();
            assert!(words.starts_with("line 2 "), "{bad}: {words}");
        }
    }

    #[test]
    fn a_line_that_never_ends_is_refused_and_not_read() {
        let endless = BufReader::new(io::repeat(b' '));
        let mut letters = Letters::read(Box::new(BufReader::new(io::repeat(b'x').chain(endless))), None);
        assert!(letters.next().expect("an answer").is_err());
    }

    #[test]
    fn a_payload_is_sent_byte_by_byte() {
        let payload: Box<RawValue> = serde_json::from_str("{\"b\":  1.0, \"a\": 1e2}").expect("JSON");
        let message = Map::from_iter([("id".to_owned(), json!("m-1"))]);
        let text = written(message, Some(&payload));
        assert_eq!(text, r#"{"id":"m-1","payload":{"b":  1.0, "a": 1e2}}"#);
    }
}
