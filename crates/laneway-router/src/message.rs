//! What travels: the message as publishers write it and sources carry it.
//!
//! One JSON object, with the names that document 004 gives them. Parsing is strict about types and limits and lenient about nothing:
//! whatever does not fit is refused with the name of the field, because a message that is misread is worse than one that is refused.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::mediator::headers;
use crate::router::DEFAULT_POOL;

/// No message is longer than this, as JSON: what SQS takes, and enough for a pointer to anything larger.
pub const MESSAGE_BYTES_MAX: usize = 256 * 1024;

/// No identifier (id, group, pool, deduplication id) is longer than this.
pub const NAME_BYTES_MAX: usize = 256;

/// With this begins what stands in the place of a group where there is none: no group does, because names have no control characters.
pub(crate) const NO_GROUP: char = '\u{1}';

/// No message waits longer in its queue before it is handed out for the first time: a week.
pub const DELAY_SECONDS_MAX: u32 = 7 * 24 * 3_600;

/// How many headers a message may carry, and how long each may be, name and value together.
pub const HEADERS_MAX: usize = 64;
/// See [`HEADERS_MAX`].
pub const HEADER_BYTES_MAX: usize = 8 * 1024;

/// A message.
///
/// Its debug text has no token, no values of headers and nothing of the payload: all of them may be secret.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Message {
    /// What the publisher calls it.
    pub id: String,
    /// The pool that runs it; an unknown one falls back to the default pool.
    pub pool_code: String,
    /// Bearer token for the target. Never logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth_token: Option<Secret>,
    /// How the target is called.
    #[serde(default)]
    pub mediation_type: MediationType,
    /// Where: a URL for `HTTP`; the name of a sink for `SINK`; for `SIMULATED` a duration such as `15ms`, or a range such as `10ms..20ms`, or nothing.
    #[serde(default)]
    pub mediation_target: String,
    /// What orders it. Messages without one follow the pool's rule for those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_group_id: Option<String>,
    /// What is posted to the target; `{"messageId": id}` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload: Option<Box<RawValue>>,
    /// Further headers for the target.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Which of the groups that could run goes first. Never reorders a group.
    #[serde(default)]
    pub priority: Priority,
    /// What a failure of this message means for its successors.
    #[serde(default)]
    pub dispatch_mode: DispatchMode,
    /// Two messages with the same one within the queue's window are one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deduplication_id: Option<String>,
    /// Its queue does not hand it out before so many seconds have passed, and its group waits with it. Said to the embedded queue by who publishes, and not part of
    /// what travels: a source that has it could not heed it any more.
    #[serde(default, skip_serializing)]
    pub delay_seconds: Option<u32>,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("id", &self.id)
            .field("pool_code", &self.pool_code)
            .field("mediation_type", &self.mediation_type)
            .field("mediation_target", &without_secrets(&self.mediation_target))
            .field("message_group_id", &self.message_group_id)
            .field("payload_bytes", &self.payload.as_ref().map(|payload| payload.get().len()))
            .field("headers", &self.headers.keys())
            .field("priority", &self.priority)
            .field("dispatch_mode", &self.dispatch_mode)
            .field("deduplication_id", &self.deduplication_id)
            .finish_non_exhaustive()
    }
}

/// A target as logs may have it: names, passwords and queries are often secrets.
pub(crate) fn without_secrets(target: &str) -> String {
    let place = target.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = place.split_once("://") else {
        return place.rsplit('@').next().unwrap_or_default().to_owned();
    };
    let (authority, path) = rest.split_at(rest.find(['/', '\\']).unwrap_or(rest.len()));
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{scheme}://{host}{path}")
}

/// A text that is written nowhere but to where it belongs.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Secret(text.into())
    }

    /// The text itself, for the header it is made for.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// How a target is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MediationType {
    /// POST to a URL.
    #[default]
    Http,
    /// Waits a while and is done: for demonstrations and benchmarks.
    Simulated,
    /// Published to a broker.
    Sink,
}

/// The tier of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Priority {
    /// Before the others.
    High,
    /// As most.
    #[default]
    Normal,
    /// After the others.
    Low,
}

impl From<Priority> for laneway::Priority {
    fn from(priority: Priority) -> Self {
        match priority {
            Priority::High => laneway::Priority::High,
            Priority::Normal => laneway::Priority::Normal,
            Priority::Low => laneway::Priority::Low,
        }
    }
}

/// What a failure means for the messages behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum DispatchMode {
    /// Not ordered at all: the group, if it has one, is a label.
    Immediate,
    /// Ordered; after its last attempt a failed message goes to the dead letters and the next one runs.
    #[default]
    NextOnError,
    /// Ordered; after its last attempt the group stops in front of the failed message until it is resumed.
    BlockOnError,
}

/// Why a text is not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAMessage {
    /// Longer than any message may be.
    #[error("{bytes} bytes are more than the {MESSAGE_BYTES_MAX} that a message may have")]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// Not JSON, or not of the right shape.
    #[error("{0}")]
    Malformed(String),
    /// A field that breaks a limit.
    #[error("`{field}` {problem}")]
    BadField {
        /// Its name.
        field: &'static str,
        /// What is wrong, and what would be right.
        problem: String,
    },
}

impl Message {
    /// Reads a message.
    ///
    /// ```
    /// use laneway_router::message::Message;
    /// let json = br#"{"id": "m-1", "poolCode": "orders", "messageGroupId": "order-7", "mediationTarget": "http://localhost/"}"#;
    /// let message = Message::parse(json).unwrap();
    /// assert_eq!(message.message_group_id.as_deref(), Some("order-7"));
    /// let error = Message::parse(br#"{"id": 1, "poolCode": "orders"}"#).unwrap_err();
    /// assert!(error.to_string().contains("invalid type"));
    /// ```
    pub fn parse(json: &[u8]) -> Result<Self, NotAMessage> {
        let message = Message::read(json)?;
        message.check_token()?;
        Ok(message)
    }

    /// Reads a message of a source, which had nobody to tell its publisher: one whose token no target can be sent is a message all the same, and fails where it is used, in its
    /// order and with its reason.
    pub(crate) fn of_delivery(json: &[u8]) -> Result<Self, NotAMessage> {
        let message = Message::read(json)?;
        match message.delay_seconds {
            None => Ok(message),
            Some(_) => Err(bad(
                "delaySeconds",
                "is heeded where a message is published, and it is here already".to_owned(),
            )),
        }
    }

    fn read(json: &[u8]) -> Result<Self, NotAMessage> {
        if json.len() > MESSAGE_BYTES_MAX {
            return Err(NotAMessage::TooLong { bytes: json.len() });
        }
        // Once for all of it, which costs a fraction of what it costs for each string.
        let text = std::str::from_utf8(json)
            .map_err(|error| NotAMessage::Malformed(format!("not UTF-8: {error}")))?;
        let message: Message =
            serde_json::from_str(text).map_err(|error| NotAMessage::Malformed(error.to_string()))?;
        message.check_limits()?;
        Ok(message)
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a message has nothing that JSON cannot say")
    }

    /// Its target as it may be shown: without a name, a password and a query.
    pub fn target_to_show(&self) -> String {
        without_secrets(&self.mediation_target)
    }

    /// What orders it, if anything does. A group of blanks is none.
    pub fn group(&self) -> Option<&str> {
        let ordered = self.dispatch_mode != DispatchMode::Immediate;
        self.message_group_id.as_deref().map(str::trim).filter(|group| ordered && !group.is_empty())
    }

    /// The line that it stands in without a group, where those are in order: one for each pool, under a name that no group has.
    pub(crate) fn line(&self) -> Arc<str> {
        let pool = match self.pool_code.trim() {
            "" => DEFAULT_POOL,
            code => code,
        };
        format!("{NO_GROUP}{pool}").into()
    }

    /// Whether it is within the limits, and its token can be sent.
    pub fn check(&self) -> Result<(), NotAMessage> {
        self.check_limits()?;
        self.check_token()
    }

    fn check_token(&self) -> Result<(), NotAMessage> {
        let problem = self.auth_token.as_ref().and_then(|token| headers::refusal_of_token(token.expose()));
        problem.map_or(Ok(()), |problem| Err(bad("authToken", problem.to_owned())))
    }

    fn check_limits(&self) -> Result<(), NotAMessage> {
        name("id", &self.id, 1)?;
        name("poolCode", &self.pool_code, 0)?;
        name("messageGroupId", self.message_group_id.as_deref().unwrap_or(""), 0)?;
        name("deduplicationId", self.deduplication_id.as_deref().unwrap_or(""), 0)?;
        if self.mediation_type == MediationType::Http && self.mediation_target.is_empty() {
            return Err(bad("mediationTarget", "is missing; HTTP needs a URL".to_owned()));
        }
        if self.mediation_type == MediationType::Sink && self.mediation_target.is_empty() {
            return Err(bad("mediationTarget", "is missing; SINK needs the name of a sink".to_owned()));
        }
        if let Some(seconds) = self.delay_seconds.filter(|seconds| *seconds > DELAY_SECONDS_MAX) {
            let problem = format!("is {seconds}; at most {DELAY_SECONDS_MAX} (a week) are allowed");
            return Err(bad("delaySeconds", problem));
        }
        if self.headers.len() > HEADERS_MAX {
            let problem = format!("has {} entries; at most {HEADERS_MAX} are allowed", self.headers.len());
            return Err(bad("headers", problem));
        }
        self.headers.iter().try_for_each(|(name, value)| header(name, value))
    }
}

fn name(field: &'static str, value: &str, shortest: usize) -> Result<(), NotAMessage> {
    if value.len() < shortest {
        return Err(bad(field, "is empty".to_owned()));
    }
    if value.len() > NAME_BYTES_MAX {
        return Err(bad(field, format!("has {} bytes; at most {NAME_BYTES_MAX} are allowed", value.len())));
    }
    // Those beyond ASCII have to be put together first; few names have any.
    let is_control = if value.is_ascii() {
        value.bytes().any(|byte| byte.is_ascii_control())
    } else {
        value.chars().any(char::is_control)
    };
    if is_control {
        return Err(bad(field, "contains control characters".to_owned()));
    }
    Ok(())
}

fn header(name: &str, value: &str) -> Result<(), NotAMessage> {
    let problem = match name.len() + value.len() > HEADER_BYTES_MAX {
        true => format!("is longer than {HEADER_BYTES_MAX} bytes"),
        false => match headers::refusal(name, value) {
            Some(problem) => problem.to_owned(),
            None => return Ok(()),
        },
    };
    let name: String = name.chars().take(NAME_BYTES_MAX).collect();
    Err(bad("headers", format!("has `{}`, which {problem}", name.escape_debug())))
}

fn bad(field: &'static str, problem: String) -> NotAMessage {
    NotAMessage::BadField { field, problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_utf8_or_has_control_characters_is_refused() {
        let refused = |json: &[u8]| Message::parse(json).unwrap_err().to_string();
        assert!(refused(b"{\"id\": \"\xff\", \"poolCode\": \"p\"}").starts_with("not UTF-8"));
        assert!(
            refused("\u{feff}{\"id\": \"m\", \"poolCode\": \"p\"}".as_bytes()).contains("expected value")
        );
        for control in ["\\u0000", "\\n", "\u{7f}", "\u{85}", "\u{fc}\u{9f}"] {
            let json = format!(r#"{{"id": "a{control}b", "poolCode": "p", "mediationType": "SIMULATED"}}"#);
            assert_eq!(refused(json.as_bytes()), "`id` contains control characters", "{control:?}");
        }
        let json = r#"{"id": "Straße 7", "poolCode": "p", "mediationType": "SIMULATED"}"#;
        assert_eq!(Message::parse(json.as_bytes()).unwrap().id, "Straße 7");
    }

    #[test]
    fn a_delay_is_for_who_publishes_and_does_not_travel() {
        let of = |seconds: &str| {
            format!(
                r#"{{"id": "m", "poolCode": "p", "mediationType": "SIMULATED", "delaySeconds": {seconds}}}"#
            )
        };
        let message = Message::parse(of("604800").as_bytes()).unwrap();
        assert_eq!(message.delay_seconds, Some(DELAY_SECONDS_MAX));
        let travels = message.to_json();
        assert_eq!(Message::of_delivery(travels.as_bytes()).unwrap().delay_seconds, None, "{travels}");
        for (seconds, words) in [
            ("604801", "`delaySeconds` is 604801; at most 604800"),
            ("-1", "invalid value"),
            ("1.5", "invalid type"),
        ] {
            let error = Message::parse(of(seconds).as_bytes()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let late = Message::of_delivery(of("1").as_bytes()).unwrap_err().to_string();
        assert!(late.starts_with("`delaySeconds` is heeded where"), "{late}");
    }

    #[test]
    fn debug_shows_where_a_message_goes_and_none_of_its_secrets() {
        let shown = |target: &str| {
            let json = serde_json::json!({ "id": "m", "poolCode": "p", "mediationTarget": target, "authToken": "hush" });
            format!("{:?}", Message::parse(json.to_string().as_bytes()).unwrap())
        };
        for (target, place) in [
            ("https://me:hush@host:1/a/b?key=hush#hush", "https://host:1/a/b"),
            ("https://hush@host?key=hush", "https://host"),
            ("http://host/a@b", "http://host/a@b"),
            ("me:hush@host/a", "host/a"),
        ] {
            let shown = shown(target);
            assert!(shown.contains(&format!("{place:?}")) && !shown.contains("hush"), "{shown}");
        }
    }
}
