//! The names of the headers that a target sees, and which of them a message may set itself.
//!
//! [`Message::check`](crate::message::Message::check) asks [`refusal`] when a message is published, so that its publisher is told; `http.rs` asks
//! again, for messages from sources that had nobody to tell.

use std::borrow::Cow;

use hyper::header::{HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

/// The key of the lane, percent-encoded ([`encode`]).
pub const KEY: HeaderName = HeaderName::from_static("laneway-key");
/// The place of the message among all of its source. Grows along a key. On every call: the API knows by it what a message has called (`api/guard.rs`).
pub const SEQUENCE: HeaderName = HeaderName::from_static("laneway-sequence");
/// Which attempt this is, from 1.
pub const ATTEMPT: HeaderName = HeaderName::from_static("laneway-attempt");
/// The token of the lease that the router works under, if it needs one. Grows with every router that takes over.
pub const EPOCH: HeaderName = HeaderName::from_static("laneway-epoch");
/// The id of the message, percent-encoded; the same for every attempt.
pub const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
/// When the call was signed, in seconds since 1970.
pub const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
/// See `signature.rs`.
pub const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// Where a trace is carried. A message may bring one; a router that exports spans puts its own in its place.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What belongs to one connection and not to a message, what the client writes itself, and what has a field of its own in the message.
const RESERVED: [&str; 11] = [
    "authorization",
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Beginnings of names that are ours, or a proxy's.
const RESERVED_BEGINNINGS: [&str; 3] = ["laneway-", "webhook-", "proxy-"];

/// Why a message may not set this header, if it may not.
pub fn refusal(name: &str, value: &str) -> Option<&'static str> {
    let is = |reserved: &str| name.eq_ignore_ascii_case(reserved);
    let begins = |beginning: &str| {
        let start = name.as_bytes().get(..beginning.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(beginning.as_bytes()))
    };
    if name.parse::<HeaderName>().is_err() {
        return Some("is not the name of a header");
    }
    if HeaderValue::from_str(value).is_err() {
        return Some("has a value that no header can have: only printable characters and tabs are allowed");
    }
    if is("authorization") {
        return Some("is set from `authToken`");
    }
    let is_reserved = RESERVED.iter().any(|reserved| is(reserved));
    let is_reserved = is_reserved || RESERVED_BEGINNINGS.iter().any(|beginning| begins(beginning));
    is_reserved.then_some("is not for messages to set")
}

/// What is wrong with a token that is no value of a header.
pub(super) const BAD_TOKEN: &str = "has characters that no header can have";

/// What `authorization` carries for an `authToken`, if it can.
pub(super) fn bearer(token: &str) -> Option<HeaderValue> {
    HeaderValue::try_from(["Bearer ", token].concat()).ok()
}

/// What is wrong with an `authToken`, if anything is.
pub(crate) fn refusal_of_token(token: &str) -> Option<&'static str> {
    bearer(token).is_none().then_some(BAD_TOKEN)
}

/// What is in the names of headers whose values are secret.
const SECRET: [&str; 12] = [
    "access-key",
    "api-key",
    "apikey",
    "auth",
    "cookie",
    "credential",
    "passwd",
    "password",
    "secret",
    "session",
    "signature",
    "token",
];

/// Whether the value of a header, or of a field, is probably a secret, by its name. To be mistaken costs a word that is not shown.
pub(crate) fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET.iter().any(|word| name.contains(word))
}

/// Everything but visible ASCII, the percent sign itself, and the full stop and the comma: the stop separates the parts of what is signed, and a
/// comma is where a proxy may split a header.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'.').add(b',').add(b'"').add(b'\\');

/// A name that may contain anything, as a header can carry it.
pub fn encode(name: &str) -> Cow<'_, str> {
    utf8_percent_encode(name, ENCODED).into()
}

/// The name again. What was not written by [`encode`] comes back as well as it can.
pub fn decode(value: &str) -> Cow<'_, str> {
    percent_decode_str(value).decode_utf8_lossy()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_ours_or_the_connections_is_refused() {
        let names =
            ["Connection", "TRANSFER-ENCODING", "Host", "content-length", "Proxy-Authorization", "te"];
        let ours = [
            "laneway-key",
            "laneway-sequence",
            "LANEWAY-SEQUENCE",
            "Laneway-Anything",
            "webhook-signature",
            "authorization",
            "expect",
        ];
        for name in names.into_iter().chain(ours) {
            assert!(refusal(name, "x").is_some(), "{name}");
        }
        for name in ["x-tenant", "content-type", "traceparent", "cookie", "lane", "webhooks", "user-agent"] {
            assert_eq!(refusal(name, "x"), None, "{name}");
        }
    }

    #[test]
    fn what_would_end_the_line_is_refused() {
        for (name, value) in
            [("x\r\ny", "z"), ("", "z"), ("x y", "z"), ("ü", "z"), ("x", "a\r\nb: c"), ("x", "\0")]
        {
            assert!(refusal(name, value).is_some(), "{name:?}: {value:?}");
        }
    }

    proptest! {
        #[test]
        fn any_name_survives_a_header(name in any::<String>()) {
            let encoded = encode(&name);
            prop_assert!(HeaderValue::from_str(&encoded).is_ok());
            prop_assert!(!encoded.contains(['.', ',', ' ']));
            prop_assert_eq!(decode(&encoded), name.as_str());
        }

        /// Whatever a message has in its headers: it is refused, or it is something that the client can send.
        #[test]
        fn what_is_not_refused_can_be_sent(name in any::<String>(), value in any::<String>()) {
            if refusal(&name, &value).is_none() {
                prop_assert!(name.parse::<HeaderName>().is_ok() && HeaderValue::from_str(&value).is_ok());
            }
        }
    }
}
