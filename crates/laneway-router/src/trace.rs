//! A message's place in a trace: from its headers (`traceparent`, as the W3C writes it), through waiting and every attempt, to the target.
//!
//! The pool hands messages in when they arrive ([`Spans::arrived`]) and says when an attempt begins and ends; what is known when the message goes is a span of its own:
//!
//! ```text
//!  the publisher's span
//!    └─ message                  from arrival in the pool until it is settled
//!         ├─ wait                until the first attempt begins
//!         ├─ attempt 1           its id goes to the target
//!         ├─ wait                until the next
//!         └─ attempt 2
//! ```
//!
//! Finished spans go into a bounded queue, from which `otlp.rs` (feature `otlp`) exports them; a full queue drops them and counts. Where nobody exports, a message
//! that has a `traceparent` keeps its id for the log, and its header goes to the target as it came.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use tokio::sync::mpsc;

use crate::mediator::Verdict;
use crate::message::Message;

/// Where the header carries a trace.
pub(crate) const HEADER: &str = "traceparent";

/// Spans that wait to be exported, at most.
const WAITING_MAX: usize = 8_192;

/// A place in a trace, as it is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traceparent {
    /// The trace.
    pub trace: u128,
    /// The span that is the parent of what comes next.
    pub span: u64,
    /// Whether anybody wants it.
    pub sampled: bool,
}

impl Traceparent {
    /// Reads the header. What is not one is none: a trace must never stop a message.
    ///
    /// ```
    /// use laneway_router::trace::Traceparent;
    /// let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    /// assert_eq!(Traceparent::parse(text).unwrap().to_string(), text);
    /// assert_eq!(Traceparent::parse("00-00000000000000000000000000000000-b7ad6b7169203331-01"), None);
    /// ```
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str, digits: usize| {
            text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        // Later versions may have more parts, the first has not.
        let is_right = is_hex(version, 2)
            && version != "ff"
            && is_hex(trace, 32)
            && is_hex(span, 16)
            && is_hex(flags, 2)
            && (version != "00" || parts.next().is_none());
        if !is_right {
            return None;
        }
        let (trace, span) = (u128::from_str_radix(trace, 16).ok()?, u64::from_str_radix(span, 16).ok()?);
        let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        (trace != 0 && span != 0).then_some(Traceparent { trace, span, sampled })
    }

    fn of(message: &Message) -> Option<Self> {
        let header = message.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case(HEADER));
        header.and_then(|(_, value)| Traceparent::parse(value))
    }
}

impl fmt::Display for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

/// A span that has ended.
#[derive(Clone, Debug)]
pub struct Span {
    /// Its trace.
    pub trace: u128,
    /// Itself.
    pub id: u64,
    /// The span that it is a part of; 0 for none.
    pub parent: u64,
    /// What it is: `message`, `wait`, `attempt`.
    pub name: &'static str,
    /// When it began and ended, in nanoseconds since 1970.
    pub began: u64,
    /// See `began`.
    pub ended: u64,
    /// Whether it calls somebody else.
    pub is_call: bool,
    /// What went wrong, if anything did.
    pub error: Option<String>,
    /// Names and values.
    pub attributes: Vec<(&'static str, String)>,
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Delivered,
    DeadLetter,
    GivenBack,
}

/// Where spans go.
#[derive(Clone, Debug, Default)]
pub struct Spans {
    /// Nothing where nobody exports them.
    queue: Option<mpsc::Sender<Span>>,
    dropped: Arc<AtomicU64>,
}

impl Spans {
    /// A queue of spans, and its other end.
    pub fn queue() -> (Self, mpsc::Receiver<Span>) {
        let (queue, spans) = mpsc::channel(WAITING_MAX);
        (Spans { queue: Some(queue), dropped: Arc::default() }, spans)
    }

    /// How many were dropped because the queue was full.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    fn give(&self, span: Span) {
        if let Some(queue) = &self.queue
            && queue.try_send(span).is_err()
        {
            self.dropped.fetch_add(1, Relaxed);
        }
    }

    /// A message has arrived. Nothing where it has no trace and nobody wants one.
    pub(crate) fn arrived(&self, message: &Message, pool: &Arc<str>, group: &str) -> Option<Box<Traced>> {
        // Most messages have no headers, and most routers export nothing: this is all that they pay.
        if self.queue.is_none() && message.headers.is_empty() {
            return None;
        }
        let parent = Traceparent::of(message);
        if self.queue.is_none() && parent.is_none() {
            return None;
        }
        let trace = parent.map_or_else(
            || u128::from(fastrand::u64(1..)) << 64 | u128::from(fastrand::u64(1..)),
            |it| it.trace,
        );
        let now = nanos(SystemTime::now());
        Some(Box::new(Traced {
            spans: self.clone(),
            // Somebody who does not want his trace sampled has his reasons.
            sampled: parent.is_none_or(|parent| parent.sampled),
            trace,
            parent: parent.map_or(0, |parent| parent.span),
            message: fastrand::u64(1..),
            attempt: 0,
            arrived: now,
            since: now,
            attempts: 0,
            id: message.id.clone(),
            pool: Arc::clone(pool),
            group: group.to_owned(),
            target: message.target_to_show(),
            fate: Fate::GivenBack,
        }))
    }
}

/// A message that is traced, from its arrival until it is dropped.
pub(crate) struct Traced {
    spans: Spans,
    sampled: bool,
    trace: u128,
    parent: u64,
    /// The id of its own span.
    message: u64,
    /// The id of the attempt that is under way.
    attempt: u64,
    arrived: u64,
    /// When the last thing that happened to it happened.
    since: u64,
    attempts: u32,
    id: String,
    pool: Arc<str>,
    group: String,
    target: String,
    pub(crate) fate: Fate,
}

impl Traced {
    /// The id of its trace, for the log.
    pub(crate) fn id(&self) -> String {
        format!("{:032x}", self.trace)
    }

    /// An attempt begins. What is to be passed on to the target instead of the header that came; nothing where nobody exports.
    pub(crate) fn begin(&mut self, attempt: u32) -> Option<Traceparent> {
        self.spans.queue.as_ref()?;
        let now = nanos(SystemTime::now());
        self.emit("wait", fastrand::u64(1..), (self.since, now), false, None, Vec::new());
        (self.attempt, self.since, self.attempts) = (fastrand::u64(1..), now, attempt);
        Some(Traceparent { trace: self.trace, span: self.attempt, sampled: self.sampled })
    }

    /// It has ended.
    pub(crate) fn end(&mut self, verdict: &Verdict) {
        if self.spans.queue.is_none() {
            return;
        }
        let now = nanos(SystemTime::now());
        let (word, error) = match verdict {
            Verdict::Done => ("done", None),
            Verdict::Wait { reason, .. } => ("wait", Some(reason)),
            Verdict::Again { reason, .. } => ("again", Some(reason)),
            Verdict::Final { reason } => ("final", Some(reason)),
        };
        let attributes = vec![
            ("laneway.attempt", self.attempts.to_string()),
            ("laneway.verdict", word.to_owned()),
            ("url.full", self.target.clone()),
        ];
        self.emit("attempt", self.attempt, (self.since, now), true, error.cloned(), attributes);
        self.since = now;
    }

    fn emit(
        &self,
        name: &'static str,
        id: u64,
        (began, ended): (u64, u64),
        is_call: bool,
        error: Option<String>,
        attributes: Vec<(&'static str, String)>,
    ) {
        let parent = if name == "message" { self.parent } else { self.message };
        if self.sampled {
            let trace = self.trace;
            self.spans.give(Span { trace, id, parent, name, began, ended, is_call, error, attributes });
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let (fate, error) = match self.fate {
            Fate::Delivered => ("delivered", None),
            Fate::DeadLetter => ("dead_letter", Some("given up".to_owned())),
            Fate::GivenBack => ("given_back", None),
        };
        let attributes = vec![
            ("messaging.message.id", std::mem::take(&mut self.id)),
            ("laneway.pool", self.pool.to_string()),
            ("laneway.group", std::mem::take(&mut self.group)),
            ("laneway.attempts", self.attempts.to_string()),
            ("laneway.fate", fate.to_owned()),
        ];
        let now = nanos(SystemTime::now());
        self.emit("message", self.message, (self.arrived, now), false, error, attributes);
    }
}

fn nanos(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_passed_on_can_be_read_and_nothing_panics(trace in 1u128.., span in 1u64.., sampled: bool, junk in any::<String>()) {
            let place = Traceparent { trace, span, sampled };
            prop_assert_eq!(Traceparent::parse(&place.to_string()), Some(place));
            let _ = Traceparent::parse(&junk);
            let _ = Traceparent::parse(&format!("00-{junk}-01"));
        }
    }

    #[test]
    fn what_is_not_right_is_none() {
        for text in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        ] {
            assert_eq!(Traceparent::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (spans, _kept) = Spans::queue();
        let json = r#"{"id":"m","poolCode":"p","mediationType":"SIMULATED"}"#;
        let message = Message::parse(json.as_bytes()).unwrap();
        for _ in 0..WAITING_MAX + 7 {
            drop(spans.arrived(&message, &"p".into(), "g"));
        }
        assert_eq!(spans.dropped(), 7);
    }
}
