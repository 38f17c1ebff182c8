//! From a line to a task: reads one JSON object, checks it, and says precisely what is wrong with one that does not fit.
//!
//! `connection.rs` hands over lines that `frame.rs` has found; what comes back goes into the engine, or is answered with a [`BadLine`]. It is a
//! pure function, so that the fuzz test can call it.

use std::{borrow::Cow, collections::BTreeMap, fmt, sync::Arc};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use super::answer::Rejection;
use crate::message::{DispatchMode, MediationType, Message, NAME_BYTES_MAX, Priority, Secret};

/// What orders tasks: the text of a `correlationId`. A number is the same family as its decimal text, because clients that write it both ways
/// mean one thing, and sharing a lane is the mistake that costs no order.
pub type Family = Arc<str>;

/// No line nests deeper than this. It is what most readers of JSON take, and a target has to read the payload.
pub const DEPTH_MAX: usize = 64;

/// What a task waits if it does not say: document 003's 10 to 20 ms.
pub const SIMULATED_DEFAULT: &str = "10ms..20ms";

/// What the messages of the ingress carry as their pool.
pub const POOL_CODE: &str = "ingress";

/// A line that is a task.
#[derive(Clone, Debug)]
pub struct Line {
    /// What to do.
    pub message: Message,
    /// In order with what.
    pub family: Family,
    /// Whether the client wants a second answer, on completion.
    pub notify: bool,
    /// Whether a refusal holds the family back until this line comes again.
    pub strict: bool,
}

/// Why a line is not a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine {
    /// By kind.
    pub rejection: Rejection,
    /// The id, if it could be read all the same.
    pub id: Option<String>,
    /// In words, with the name of the field. Never holds a value, so never a secret.
    pub detail: String,
}

impl Line {
    /// Reads a line.
    ///
    /// ```
    /// use laneway_router::ingress::Line;
    /// let line = Line::parse(br#"{"id": "t-1", "correlationId": 7, "notify": true}"#).unwrap();
    /// assert_eq!((&*line.family, line.notify), ("7", true));
    /// let bad = Line::parse(br#"{"id": "t-2", "correlationId": 7, "colour": "red"}"#).unwrap_err();
    /// assert_eq!(bad.id.as_deref(), Some("t-2"));
    /// assert_eq!(bad.detail, "there is no field \"colour\" (column 42)");
    /// ```
    pub fn parse(bytes: &[u8]) -> Result<Line, BadLine> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let detail = format!("not UTF-8 from byte {} on", error.valid_up_to() + 1);
            BadLine { rejection: Rejection::NotUtf8, id: None, detail }
        })?;
        if deeper_than(text, DEPTH_MAX) {
            let detail = format!("nests deeper than {DEPTH_MAX}");
            return Err(BadLine { rejection: Rejection::TooDeep, id: id_of(text), detail });
        }
        let fields: Fields = serde_json::from_str(text).map_err(|error| BadLine {
            rejection: if error.is_data() { Rejection::BadField } else { Rejection::Malformed },
            id: id_of(text),
            detail: reworded(&error),
        })?;
        let id = fields.id.0.clone();
        fields.into_line().map_err(|detail| BadLine {
            rejection: Rejection::BadField,
            id: Some(id).filter(|id| problem_of_name(id).is_none()),
            detail,
        })
    }
}

/// The id of a line that is not a task, where that can be read.
fn id_of(text: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Id {
        id: Label,
    }
    let Id { id: Label(id) } = serde_json::from_str(text).ok()?;
    problem_of_name(&id).is_none().then_some(id)
}

/// What serde_json says, with the place at the end: a line has only columns.
fn reworded(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let said = text.rsplit_once(" at line ").map_or(text.as_str(), |(said, _)| said);
    format!("{said} (column {})", error.column())
}

/// Whether brackets outside strings nest deeper. Counts and does not check: that is the parser's part.
fn deeper_than(text: &str, limit: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > limit {
            return true;
        }
    }
    false
}

/// A text, or an integer, which becomes its decimal text.
#[derive(Clone, Debug)]
struct Label(String);

impl<'de> Deserialize<'de> for Label {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LabelVisitor;
        impl Visitor<'_> for LabelVisitor {
            type Value = Label;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or an integer")
            }
            fn visit_str<E>(self, text: &str) -> Result<Label, E> {
                Ok(Label(text.to_owned()))
            }
            fn visit_u64<E>(self, number: u64) -> Result<Label, E> {
                Ok(Label(number.to_string()))
            }
            fn visit_i64<E>(self, number: i64) -> Result<Label, E> {
                Ok(Label(number.to_string()))
            }
        }
        deserializer.deserialize_any(LabelVisitor)
    }
}

/// The object as it stands on the line.
struct Fields {
    id: Label,
    correlation_id: Label,
    mediation_type: Option<MediationType>,
    mediation_target: Option<String>,
    payload: Option<Box<RawValue>>,
    headers: BTreeMap<String, String>,
    auth_token: Option<Secret>,
    priority: Priority,
    notify: bool,
    strict: bool,
}

impl Fields {
    fn into_line(self) -> Result<Line, String> {
        for (name, Label(value)) in [("id", &self.id), ("correlationId", &self.correlation_id)] {
            if let Some(problem) = problem_of_name(value) {
                return Err(format!("`{name}` {problem}"));
            }
        }
        let family: Family = Arc::from(self.correlation_id.0.as_str());
        let (mediation_type, mediation_target) = target(self.mediation_type, self.mediation_target)?;
        let message = Message {
            id: self.id.0,
            pool_code: POOL_CODE.to_owned(),
            auth_token: self.auth_token,
            mediation_type,
            mediation_target,
            message_group_id: Some(self.correlation_id.0),
            payload: self.payload,
            headers: self.headers,
            priority: self.priority,
            dispatch_mode: DispatchMode::default(),
            deduplication_id: None,
            delay_seconds: None,
        };
        message.check().map_err(|problem| problem.to_string())?;
        Ok(Line { message, family, notify: self.notify, strict: self.strict })
    }
}

/// How and where: a line that says nothing of either is document 003's simulated task.
fn target(kind: Option<MediationType>, target: Option<String>) -> Result<(MediationType, String), String> {
    match (kind, target) {
        (None, Some(_)) => {
            Err("`mediationTarget` needs a `mediationType`, \"HTTP\", \"SIMULATED\" or \"SINK\"".to_owned())
        }
        (None | Some(MediationType::Simulated), None) => {
            Ok((MediationType::Simulated, SIMULATED_DEFAULT.to_owned()))
        }
        (Some(kind), target) => Ok((kind, target.unwrap_or_default())),
    }
}

/// Ids and families are repeated in answers, which end at a newline and have a tab in the middle.
fn problem_of_name(name: &str) -> Option<String> {
    match name {
        blank if blank.trim().is_empty() => Some("is empty".to_owned()),
        long if long.len() > NAME_BYTES_MAX => {
            Some(format!("has {} bytes; at most {NAME_BYTES_MAX} are allowed", long.len()))
        }
        odd if odd.chars().any(char::is_control) => Some("contains control characters".to_owned()),
        _ => None,
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object such as {\"id\": \"t-1\", \"correlationId\": 7}")
    }

    // By hand and not derived, because a derived one does not say which field has the wrong type.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let (mut id, mut correlation_id, mut kind, mut target) = (None, None, None, None);
        let (mut payload, mut headers, mut auth_token) = (None::<Option<Box<RawValue>>>, None, None);
        let (mut priority, mut notify, mut strict) = (None, None, None);
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            match &*name {
                "id" => read(&mut map, &mut id, "id", "a text or an integer")?,
                "correlationId" => {
                    read(&mut map, &mut correlation_id, "correlationId", "a text or an integer")?;
                }
                "mediationType" => {
                    read(&mut map, &mut kind, "mediationType", "\"HTTP\", \"SIMULATED\" or \"SINK\"")?;
                }
                "mediationTarget" => read(&mut map, &mut target, "mediationTarget", "a text")?,
                "payload" => read(&mut map, &mut payload, "payload", "JSON")?,
                "headers" => read(&mut map, &mut headers, "headers", "an object of texts")?,
                "authToken" => read(&mut map, &mut auth_token, "authToken", "a text")?,
                "priority" => read(&mut map, &mut priority, "priority", "\"HIGH\", \"NORMAL\" or \"LOW\"")?,
                "notify" => read(&mut map, &mut notify, "notify", "true or false")?,
                "strict" => read(&mut map, &mut strict, "strict", "true or false")?,
                other => return Err(A::Error::custom(format!("there is no field {:?}", shortened(other)))),
            }
        }
        let missing = |name| A::Error::custom(format!("`{name}` is missing"));
        Ok(Fields {
            id: id.ok_or_else(|| missing("id"))?,
            correlation_id: correlation_id.ok_or_else(|| missing("correlationId"))?,
            mediation_type: kind,
            mediation_target: target,
            // As in a message, `null` is none.
            payload: payload.flatten(),
            headers: headers.unwrap_or_default(),
            auth_token,
            priority: priority.unwrap_or_default(),
            notify: notify.unwrap_or_default(),
            strict: strict.unwrap_or_default(),
        })
    }
}

/// Reads the value of a field. That it is not JSON is the parser's word; that it is of the wrong type is ours.
fn read<'de, A, T>(map: &mut A, slot: &mut Option<T>, name: &str, right: &str) -> Result<(), A::Error>
where
    A: MapAccess<'de>,
    T: Deserialize<'de>,
{
    if slot.is_some() {
        map.next_value::<IgnoredAny>()?;
        return Err(A::Error::custom(format!("`{name}` is there twice")));
    }
    let raw: &'de RawValue = map.next_value()?;
    let value = serde_json::from_str(raw.get());
    *slot = Some(value.map_err(|_| A::Error::custom(format!("`{name}` must be {right}")))?);
    Ok(())
}

/// Enough of a name to recognise it by.
fn shortened(name: &str) -> String {
    name.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Line {
        Line::parse(line.as_bytes()).unwrap_or_else(|bad| panic!("{line}: {bad:?}"))
    }

    fn bad(line: &str) -> (Rejection, Option<String>, String) {
        let bad = Line::parse(line.as_bytes()).expect_err(line);
        (bad.rejection, bad.id, bad.detail)
    }

    #[test]
    fn the_smallest_line_is_document_003s_task() {
        let line = parse(r#"{"id": 1, "correlationId": -7}"#);
        assert_eq!((line.message.id.as_str(), &*line.family), ("1", "-7"));
        assert_eq!(line.message.mediation_type, MediationType::Simulated);
        assert_eq!(line.message.mediation_target, SIMULATED_DEFAULT);
        assert!(!line.notify && !line.strict);
    }

    #[test]
    fn a_number_and_its_text_are_one_family() {
        let (number, text) =
            (parse(r#"{"id":1,"correlationId":7}"#), parse(r#"{"id":1,"correlationId":"7"}"#));
        assert_eq!(number.family, text.family);
        assert_ne!(number.family, parse(r#"{"id":1,"correlationId":"07"}"#).family);
        let largest = parse(&format!(r#"{{"id":1,"correlationId":{}}}"#, u64::MAX));
        assert_eq!(&*largest.family, u64::MAX.to_string());
    }

    #[test]
    fn a_line_may_say_everything() {
        let line = parse(
            r#"{"correlationId":"order-7","id":"a:b c","mediationType":"HTTP","mediationTarget":"http://t/x","payload":{ "k": [1,2] },
                "priority":"HIGH","notify":true,"strict":true,"headers":{"x":"y"},"authToken":"s3cret"}"#,
        );
        assert_eq!(line.message.id, "a:b c");
        assert_eq!(line.message.payload.unwrap().get(), r#"{ "k": [1,2] }"#, "byte by byte");
        assert_eq!(line.message.priority, Priority::High);
        assert_eq!(line.message.auth_token.unwrap().expose(), "s3cret");
        assert!(line.notify && line.strict);
    }

    #[test]
    fn every_wrong_line_is_told_what_is_wrong() {
        let id = || Some("t".to_owned());
        for (line, rejection, with_id, says) in [
            ("", Rejection::Malformed, None, "EOF"),
            ("{", Rejection::Malformed, None, "EOF"),
            ("nonsense", Rejection::Malformed, None, "expected"),
            (r#"{"id":"t","correlationId":1} trailing"#, Rejection::Malformed, None, "trailing"),
            ("[]", Rejection::BadField, None, "an object such as"),
            ("7", Rejection::BadField, None, "an object such as"),
            (r#"{"correlationId":1}"#, Rejection::BadField, None, "`id` is missing"),
            (r#"{"id":"t"}"#, Rejection::BadField, id(), "`correlationId` is missing"),
            (
                r#"{"id":true,"correlationId":1}"#,
                Rejection::BadField,
                None,
                "`id` must be a text or an integer",
            ),
            (r#"{"id":1.5,"correlationId":1}"#, Rejection::BadField, None, "`id` must be"),
            (r#"{"id":"","correlationId":1}"#, Rejection::BadField, None, "`id` is empty"),
            (r#"{"id":"a\nb","correlationId":1}"#, Rejection::BadField, None, "control characters"),
            (r#"{"id":"t","id":"u","correlationId":1}"#, Rejection::BadField, None, "`id` is there twice"),
            (r#"{"id":"t","correlationId":null}"#, Rejection::BadField, id(), "`correlationId` must be"),
            (r#"{"id":"t","correlationId":" "}"#, Rejection::BadField, id(), "`correlationId` is empty"),
            (r#"{"id":"t","correlationId":1e3}"#, Rejection::BadField, id(), "`correlationId` must be"),
            (r#"{"id":"t","correlationId":99999999999999999999}"#, Rejection::BadField, id(), "must be"),
            (r#"{"id":"t","correlationId":1,"priority":3}"#, Rejection::BadField, id(), "`priority` must be"),
            (r#"{"id":"t","correlationId":1,"notify":"yes"}"#, Rejection::BadField, id(), "`notify` must be"),
            (
                r#"{"id":"t","correlationId":1,"mediationType":"FTP"}"#,
                Rejection::BadField,
                id(),
                "\"HTTP\", \"SIMULATED\" or \"SINK\"",
            ),
            (
                r#"{"id":"t","correlationId":1,"mediationType":"HTTP"}"#,
                Rejection::BadField,
                id(),
                "needs a URL",
            ),
            (r#"{"id":"t","correlationId":1,"mediationTarget":"5ms"}"#, Rejection::BadField, id(), "needs a"),
            (
                r#"{"id":"t","correlationId":1,"headers":{"a":1}}"#,
                Rejection::BadField,
                id(),
                "`headers` must be",
            ),
            (r#"{"id":"t","correlationId":1,"colour":1}"#, Rejection::BadField, id(), "no field \"colour\""),
        ] {
            let (kind, found, detail) = bad(line);
            assert_eq!((kind, &found), (rejection, &with_id), "{line}: {detail}");
            assert!(detail.contains(says), "{line}: {detail}");
        }
    }

    #[test]
    fn a_secret_of_the_wrong_type_is_not_repeated() {
        let (_, _, detail) = bad(r#"{"id":"t","correlationId":1,"authToken":["s3cret"]}"#);
        assert!(detail.contains("`authToken` must be a text") && !detail.contains("s3cret"), "{detail}");
    }

    #[test]
    fn depth_is_counted_outside_strings() {
        let nested = |depth: usize| {
            let payload = "[".repeat(depth) + &"]".repeat(depth);
            format!(r#"{{"id":"t","correlationId":1,"payload":{payload}}}"#)
        };
        parse(&nested(DEPTH_MAX - 1));
        let (rejection, id, _) = bad(&nested(DEPTH_MAX));
        assert_eq!((rejection, id.as_deref()), (Rejection::TooDeep, Some("t")));
        // Deep enough to break whoever recurses.
        assert_eq!(bad(&nested(30_000)).0, Rejection::TooDeep);
        let text = "[".repeat(500) + "\\\"" + &"{".repeat(500);
        parse(&format!(r#"{{"id":"t","correlationId":1,"payload":"{text}"}}"#));
    }

    #[test]
    fn not_utf8_is_said_with_its_place() {
        let bad = Line::parse(b"{\"id\":\"\xff\"}").unwrap_err();
        assert_eq!(bad.rejection, Rejection::NotUtf8);
        assert_eq!(bad.detail, "not UTF-8 from byte 8 on");
    }
}
