//! The one table: what was observed of an attempt, and what it means.
//!
//! `http.rs` hands over what it saw ([`Observed`]) and gets a [`Judgement`]: the [`Verdict`] for the pool, and for the target's breaker
//! whether it looked healthy and how long it asked to be left alone. Nothing here has a clock, a socket or a state, so that every row
//! is a test.
//!
//! | observed | verdict | health |
//! |---|---|---|
//! | 2xx, whatever the body (201, 202, 204, empty, not JSON, too long) | done | good |
//! | 2xx with `{"ack": false, "delaySeconds": n}` | again after n seconds; without n by the pool's backoff | neutral |
//! | 429 with `Retry-After` | wait that long, the whole target | neutral |
//! | 429 without | wait the default, the whole target | neutral |
//! | 503 with `Retry-After` | wait that long, the whole target | neutral |
//! | 503 without | again, by the pool's backoff | bad |
//! | other 5xx (501 among them) | again | bad |
//! | other 4xx (408 among them), 3xx (never followed), 1xx and whatever else is no status | final | good |
//! | timeout, connection refused, lost or garbled, before the whole answer was read | again | bad |
//! | not sent: no URL, not on the allow-list, a header that cannot be sent | final | none of the target's doing |
//!
//! Why the two without `Retry-After` differ: a 429 says "you are too fast", which is no failure of the message, and attempts spent on it
//! would push healthy messages into the dead letters; so it waits. A 503 without a word says "I am broken"; it is a failure like any other
//! 5xx, with a backoff that grows, an end, and a breaker that looks.
//!
//! An answer of 2xx that breaks off before its end is not done: its body might have said `"ack": false`, and a message too many is better
//! than one too few. One that is longer than the limit is done: the next one would be as long.

use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Verdict;

/// What a target may ask for at most, and what it gets if it does not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// A wait is at least this long, so that `Retry-After: 0` is not a loop.
    pub wait_min: Duration,
    /// What a 429 without `Retry-After` means.
    pub wait_default: Duration,
    /// A `Retry-After` beyond this counts as this.
    pub wait_max: Duration,
    /// A `delaySeconds` beyond this counts as this.
    pub again_max: Duration,
}

impl Default for Limits {
    /// 100 ms, 5 s, a day, twelve hours. The last is the longest that SQS hides a message; a day is longer than a target that is meant to come back is away, and not for ever.
    fn default() -> Self {
        Limits {
            wait_min: Duration::from_millis(100),
            wait_default: Duration::from_secs(5),
            wait_max: Duration::from_secs(24 * 3_600),
            again_max: Duration::from_secs(43_200),
        }
    }
}

/// What was seen of an attempt.
#[derive(Clone, Copy, Debug)]
pub enum Observed<'a> {
    /// An answer came, and its body was read to its end or to the limit.
    Answer {
        /// The status.
        status: u16,
        /// The value of `Retry-After`.
        retry_after: Option<&'a [u8]>,
        /// The body, or as much of it as the limit allows.
        body: &'a [u8],
        /// Whether there was more of it.
        cut: bool,
    },
    /// No whole answer came.
    Trouble {
        /// What kind.
        kind: Trouble,
        /// What the network said.
        detail: &'a str,
    },
}

/// Why no whole answer came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// No connection: refused, unreachable, no such host, no TLS.
    Connect,
    /// No connection in time.
    ConnectTimeout,
    /// Lost, reset or not HTTP, after the connection was there.
    Broken,
    /// No whole answer in time.
    Timeout,
}

/// What an attempt says about its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It answers.
    Good,
    /// It does not, or says that it is broken.
    Bad,
    /// It asked for patience, which is neither.
    Neutral,
}

/// What an observation means.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// For the pool.
    pub verdict: Verdict,
    /// For the breaker.
    pub health: Health,
    /// How long nobody should call this target.
    pub cool_down: Option<Duration>,
}

/// Reads the table. `now` is for dates in `Retry-After`.
pub fn judge(observed: Observed<'_>, now: SystemTime, limits: &Limits) -> Judgement {
    let (status, retry_after, body, cut) = match observed {
        Observed::Answer { status, retry_after, body, cut } => (status, retry_after, body, cut),
        Observed::Trouble { kind, detail } => return trouble(kind, detail),
    };
    let asked = || parse_retry_after(retry_after?, now);
    match status {
        200..=299 => accepted(status, body, cut, limits),
        429 => patience(status, asked(), limits),
        503 => match asked() {
            Some(delay) => patience(status, Some(delay), limits),
            None => again(status, body),
        },
        500..=599 => again(status, body),
        _ => last(status, body),
    }
}

fn accepted(status: u16, body: &[u8], cut: bool, limits: &Limits) -> Judgement {
    // What is cut cannot be parsed, and is not worth a look.
    let Some(refusal) = Some(body).filter(|_| !cut).and_then(parse_refusal) else {
        return Judgement { verdict: Verdict::Done, health: Health::Good, cool_down: None };
    };
    let delay = refusal.map(|delay| delay.min(limits.again_max));
    let verdict = Verdict::Again { delay, reason: format!("{status} with \"ack\": false") };
    Judgement { verdict, health: Health::Neutral, cool_down: None }
}

fn patience(status: u16, asked: Option<Duration>, limits: &Limits) -> Judgement {
    let delay = asked.unwrap_or(limits.wait_default).min(limits.wait_max).max(limits.wait_min);
    let reason = match asked {
        Some(_) => format!("{status}: the target asks for patience"),
        None => format!("{status}: the target asks for patience and does not say how long"),
    };
    Judgement {
        verdict: Verdict::Wait { delay, called: true, reason },
        health: Health::Neutral,
        cool_down: Some(delay),
    }
}

fn again(status: u16, body: &[u8]) -> Judgement {
    let verdict = Verdict::Again { delay: None, reason: reason_of(status, body) };
    Judgement { verdict, health: Health::Bad, cool_down: None }
}

fn last(status: u16, body: &[u8]) -> Judgement {
    Judgement {
        verdict: Verdict::Final { reason: reason_of(status, body) },
        health: Health::Good,
        cool_down: None,
    }
}

fn trouble(kind: Trouble, detail: &str) -> Judgement {
    let what = match kind {
        Trouble::Connect => "no connection",
        Trouble::ConnectTimeout => "no connection in time",
        Trouble::Broken => "the connection broke",
        Trouble::Timeout => "no answer in time",
    };
    let reason = match detail {
        "" => what.to_owned(),
        detail => format!("{what}: {}", excerpt(detail)),
    };
    Judgement { verdict: Verdict::Again { delay: None, reason }, health: Health::Bad, cool_down: None }
}

/// How much of a foreign text is kept in a reason.
const EXCERPT_CHARS: usize = 200;

fn reason_of(status: u16, body: &[u8]) -> String {
    // A character has at most four bytes: what is behind these cannot be in the excerpt.
    let text = String::from_utf8_lossy(&body[..body.len().min(4 * EXCERPT_CHARS)]);
    match excerpt(&text) {
        text if text.is_empty() => format!("status {status}"),
        text => format!("status {status}: {text}"),
    }
}

/// The beginning of a foreign text, on one line and without anything that a terminal would obey.
fn excerpt(text: &str) -> String {
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    let mut excerpt: String = text.trim().chars().take(EXCERPT_CHARS).map(printable).collect();
    excerpt.truncate(excerpt.trim_end().len());
    excerpt
}

/// Seconds, or one of HTTP's three dates. A date that has passed is no wait at all; what is neither counts as absent.
fn parse_retry_after(value: &[u8], now: SystemTime) -> Option<Duration> {
    let value = std::str::from_utf8(value).ok()?.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than a number has are still a very long time.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::from(u32::MAX))));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(now).unwrap_or(Duration::ZERO))
}

/// What a target may say in the body of a 2xx. Other fields are its own business, and a field of another type counts as absent.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    ack: Option<&'a RawValue>,
    #[serde(borrow, rename = "delaySeconds")]
    delay_seconds: Option<&'a RawValue>,
}

/// `None`: not refused. `Some(None)`: refused without a time.
fn parse_refusal(body: &[u8]) -> Option<Option<Duration>> {
    let begins_an_object = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    if !begins_an_object {
        return None;
    }
    let answer: Answer<'_> = serde_json::from_slice(body).ok()?;
    if answer.ack?.get() != "false" {
        return None;
    }
    let seconds = answer.delay_seconds.and_then(|raw| raw.get().parse::<f64>().ok());
    Some(seconds.filter(|seconds| *seconds >= 0.0).map(|seconds| {
        // Only what is too long for a `Duration`, or infinite, is refused by the conversion.
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOON: &str = "Fri, 02 Jan 2026 12:00:00 GMT";

    fn noon() -> SystemTime {
        httpdate::parse_http_date(NOON).unwrap()
    }

    fn answer(status: u16, retry_after: Option<&str>, body: &str) -> Judgement {
        let retry_after = retry_after.map(str::as_bytes);
        let observed = Observed::Answer { status, retry_after, body: body.as_bytes(), cut: false };
        judge(observed, noon(), &Limits::default())
    }

    fn waits(judgement: &Judgement) -> Option<Duration> {
        match judgement.verdict {
            Verdict::Wait { delay, .. } => {
                assert_eq!(judgement.cool_down, Some(delay), "the whole target waits");
                assert_eq!(judgement.health, Health::Neutral);
                Some(delay)
            }
            _ => None,
        }
    }

    fn is_again(judgement: &Judgement, health: Health) -> bool {
        matches!(judgement.verdict, Verdict::Again { delay: None, .. })
            && judgement.health == health
            && judgement.cool_down.is_none()
    }

    fn is_final(judgement: &Judgement) -> bool {
        matches!(judgement.verdict, Verdict::Final { .. })
            && judgement.health == Health::Good
            && judgement.cool_down.is_none()
    }

    const DONE: Judgement = Judgement { verdict: Verdict::Done, health: Health::Good, cool_down: None };

    #[test]
    fn pitfall_004_29_every_2xx_is_done() {
        for status in 200..300 {
            assert_eq!(answer(status, None, ""), DONE, "{status}");
        }
    }

    #[test]
    fn a_2xx_is_done_whatever_its_body_unless_it_refuses() {
        let bodies = [
            "ok",
            "{",
            "[]",
            "null",
            "{}",
            "\u{0}",
            r#"{"ack": true}"#,
            r#"{"ack": null}"#,
            r#"{"ack": "false"}"#,
            r#"{"ack": 0}"#,
            r#"[{"ack": false}]"#,
            r#"{"result": {"ack": false}}"#,
            r#"{"delaySeconds": 5}"#,
            r#"{"ack": false"#,
            r#"{"ack": false} and more"#,
        ];
        for body in bodies {
            assert_eq!(answer(200, None, body), DONE, "{body}");
        }
    }

    #[test]
    fn a_2xx_that_is_too_long_to_read_is_done() {
        let observed =
            Observed::Answer { status: 200, retry_after: None, body: br#"{"ack": false}"#, cut: true };
        assert_eq!(judge(observed, noon(), &Limits::default()), DONE);
    }

    #[test]
    fn a_2xx_that_refuses_comes_again_when_it_said() {
        let cases = [
            (r#"{"ack": false, "delaySeconds": 7}"#, Some(Duration::from_secs(7))),
            (r#" {"delaySeconds": 0.25, "why": [], "ack": false} "#, Some(Duration::from_millis(250))),
            (r#"{"ack": false, "delaySeconds": 0}"#, Some(Duration::ZERO)),
            (r#"{"ack": false, "delaySeconds": 1e300}"#, Some(Limits::default().again_max)),
            (r#"{"ack": false, "delaySeconds": 43201}"#, Some(Limits::default().again_max)),
            (r#"{"ack": false}"#, None),
            (r#"{"ack": false, "delaySeconds": null}"#, None),
            (r#"{"ack": false, "delaySeconds": -1}"#, None),
            (r#"{"ack": false, "delaySeconds": "7"}"#, None),
        ];
        for (body, expected) in cases {
            let judgement = answer(202, None, body);
            let Verdict::Again { delay, .. } = judgement.verdict else { panic!("{body}: {judgement:?}") };
            assert_eq!(delay, expected, "{body}");
            assert_eq!(judgement.health, Health::Neutral);
            assert_eq!(judgement.cool_down, None, "only this group waits");
        }
    }

    #[test]
    fn patience_is_exactly_as_long_as_asked() {
        let half_past = "Fri, 02 Jan 2026 12:30:00 GMT";
        let other_dates = ["Friday, 02-Jan-26 12:30:00 GMT", "Fri Jan  2 12:30:00 2026"];
        for status in [429, 503] {
            assert_eq!(waits(&answer(status, Some("7"), "")), Some(Duration::from_secs(7)));
            assert_eq!(waits(&answer(status, Some("7200"), "")), Some(Duration::from_secs(7_200)));
            assert_eq!(waits(&answer(status, Some(half_past), "")), Some(Duration::from_secs(1_800)));
            for date in other_dates {
                assert_eq!(
                    waits(&answer(status, Some(date), "")),
                    Some(Duration::from_secs(1_800)),
                    "{date}"
                );
            }
        }
    }

    #[test]
    fn patience_has_a_floor_and_a_ceiling() {
        let limits = Limits::default();
        for past in ["0", NOON, "Fri, 02 Jan 2026 11:00:00 GMT"] {
            assert_eq!(waits(&answer(429, Some(past), "")), Some(limits.wait_min), "{past}");
        }
        for far in ["86401", "99999999999999999999999999", "Fri, 02 Jan 2099 12:00:00 GMT"] {
            assert_eq!(waits(&answer(429, Some(far), "")), Some(limits.wait_max), "{far}");
        }
    }

    #[test]
    fn a_429_without_a_time_waits_the_default() {
        for unreadable in [None, Some(""), Some("soon"), Some("-1"), Some("1.5"), Some("+5")] {
            let expected = Some(Limits::default().wait_default);
            assert_eq!(waits(&answer(429, unreadable, "")), expected, "{unreadable:?}");
        }
    }

    #[test]
    fn a_503_without_a_time_is_a_failure() {
        for unreadable in [None, Some(""), Some("soon")] {
            assert!(is_again(&answer(503, unreadable, ""), Health::Bad), "{unreadable:?}");
        }
    }

    #[test]
    fn other_5xx_come_again() {
        for status in (500..600).filter(|status| *status != 503) {
            assert!(is_again(&answer(status, Some("7"), ""), Health::Bad), "{status}");
        }
    }

    #[test]
    fn other_4xx_and_3xx_and_what_is_no_status_are_final() {
        let others = (300..500).chain([100, 101, 199, 600, 999]);
        for status in others.filter(|status| *status != 429) {
            assert!(is_final(&answer(status, Some("7"), r#"{"ack": false}"#)), "{status}");
        }
    }

    #[test]
    fn no_answer_comes_again() {
        let kinds = [
            (Trouble::Connect, "no connection"),
            (Trouble::ConnectTimeout, "no connection in time"),
            (Trouble::Broken, "the connection broke"),
            (Trouble::Timeout, "no answer in time"),
        ];
        for (kind, expected) in kinds {
            for detail in ["", "what the system said"] {
                let judgement = judge(Observed::Trouble { kind, detail }, noon(), &Limits::default());
                assert!(is_again(&judgement, Health::Bad), "{kind:?}");
                let Verdict::Again { reason, .. } = judgement.verdict else { unreachable!() };
                assert!(reason.starts_with(expected) && reason.ends_with(detail), "{reason}");
            }
        }
    }

    #[test]
    fn a_reason_is_short_and_on_one_line() {
        let Verdict::Final { reason } = answer(400, None, "no\r\nsuch\u{1b}[2Jorder\n").verdict else {
            panic!("400 is final")
        };
        assert_eq!(reason, "status 400: no  such [2Jorder");
        let Verdict::Final { reason } = answer(400, None, &"ü".repeat(100_000)).verdict else {
            panic!("400 is final")
        };
        assert_eq!(reason.chars().count(), "status 400: ".len() + EXCERPT_CHARS);
    }

    proptest! {
        /// Whatever a target says, there is a verdict, its delays are within the limits, and its reason is printable.
        #[test]
        fn any_answer_has_a_verdict_within_the_limits(
            status in 0_u16..1_000,
            retry_after in proptest::option::of(hostile_retry_after()),
            body in hostile_body(),
            cut: bool,
        ) {
            let limits = Limits::default();
            let observed = Observed::Answer { status, retry_after: retry_after.as_deref(), body: &body, cut };
            let judgement = judge(observed, noon(), &limits);
            let reason = match &judgement.verdict {
                Verdict::Done => "",
                Verdict::Wait { delay, reason, .. } => {
                    prop_assert!((limits.wait_min..=limits.wait_max).contains(delay));
                    prop_assert_eq!(judgement.cool_down, Some(*delay));
                    reason
                }
                Verdict::Again { delay, reason } => {
                    prop_assert!(delay.is_none_or(|delay| delay <= limits.again_max));
                    reason
                }
                Verdict::Final { reason } => reason,
            };
            prop_assert!(!reason.chars().any(char::is_control));
            prop_assert!(reason.chars().count() <= 300);
            prop_assert_eq!(matches!(judgement.verdict, Verdict::Wait { .. }), judgement.cool_down.is_some());
            prop_assert!((200..300).contains(&status) || judgement.verdict != Verdict::Done);
        }

        /// Seconds and dates mean the same wait.
        #[test]
        fn a_date_is_as_long_as_its_distance(seconds in 1_u64..3_600) {
            let date = httpdate::fmt_http_date(noon() + Duration::from_secs(seconds));
            let by_date = answer(429, Some(&date), "");
            prop_assert_eq!(waits(&by_date), waits(&answer(429, Some(&seconds.to_string()), "")));
        }

        /// A refusal is understood whatever stands around it.
        #[test]
        fn a_refusal_is_found_among_other_fields(before in "[a-z]{1,8}", seconds in 0_u32..40_000) {
            let body = format!(r#"{{"x{before}": ["{before}"], "delaySeconds": {seconds}, "ack": false}}"#);
            let verdict = answer(200, None, &body).verdict;
            let is_as_asked = matches!(
                verdict,
                Verdict::Again { delay: Some(delay), .. } if delay == Duration::from_secs(u64::from(seconds))
            );
            prop_assert!(is_as_asked, "{:?}", verdict);
        }
    }

    fn hostile_retry_after() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..40),
            "[0-9]{1,30}".prop_map(String::into_bytes),
            "(Mon|Tue|Xyz), [0-9]{1,3} (Jan|Feb|Foo) [0-9]{1,6} [0-9]{2}:[0-9]{2}:[0-9]{2} (GMT|UTC)"
                .prop_map(String::into_bytes),
        ]
    }

    fn hostile_body() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..200),
            r#"\{"ack": ?(false|true|0|null), ?"delaySeconds": ?-?[0-9]{0,12}(\.[0-9]{0,3})?(e[0-9]{1,3})?\}"#
                .prop_map(String::into_bytes),
        ]
    }
}
