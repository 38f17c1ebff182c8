//! `SIMULATED`: waits a while on tokio's timer and is done. For demonstrations and benchmarks, where a target would only be in the way.
//!
//! The target's text says how long, and how often it fails:
//!
//! | `mediationTarget` | meaning |
//! |---|---|
//! | nothing | between 10 ms and 20 ms, evenly |
//! | `15ms` | 15 ms; also `us` and `s`, and fractions such as `0.5s`; `0ms` is done at once |
//! | `10ms..20ms` | between the two, evenly |
//! | `10ms..20ms fail=0.1` | and one attempt in ten fails, as a target with an error of its own would |
//!
//! What chance decides follows from the seed, the sequence of the message (its id, if it has none) and the attempt alone, so that a run with the same seed is the same
//! run whatever the interleaving, and nothing is shared between calls.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::target::beginning;
use super::{BadTarget, Call, NO_SEQUENCE, Verdict};

/// Nothing is simulated for longer.
const LONGEST: Duration = Duration::from_secs(3_600);

/// What no text at all means.
const DEFAULT: Plan =
    Plan { shortest: Duration::from_millis(10), longest: Duration::from_millis(20), fail: 0.0 };

/// The mediator for `SIMULATED`.
#[derive(Clone, Copy, Debug)]
pub struct Simulated {
    seed: u64,
}

impl Simulated {
    /// With this seed.
    pub fn new(seed: u64) -> Self {
        Simulated { seed }
    }

    /// Makes one attempt.
    pub async fn mediate(&self, call: Call<'_>) -> Verdict {
        let plan = match Plan::parse(&call.message.mediation_target) {
            Ok(plan) => plan,
            Err(problem) => return Verdict::Final { reason: problem },
        };
        // A message without a place has its own luck all the same.
        let place = if call.sequence == NO_SEQUENCE { hash(&call.message.id) } else { call.sequence };
        let (delay, fails) = self.decide(plan, place, call.attempt);
        // Tokio's timer would make a millisecond of no time at all.
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        match fails {
            true => Verdict::Again { delay: None, reason: "simulated failure".to_owned() },
            false => Verdict::Done,
        }
    }

    /// Whether a target's text is understood.
    pub fn check(&self, target: &str) -> Result<(), BadTarget> {
        Plan::parse(target).map(drop).map_err(BadTarget::Simulated)
    }

    fn decide(&self, plan: Plan, sequence: u64, attempt: u32) -> (Duration, bool) {
        // Odd constants spread neighbours over the whole range; fastrand mixes what comes in.
        let place = sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ u64::from(attempt).wrapping_mul(0xd1b5_4a32_d192_ed03);
        let mut random = fastrand::Rng::with_seed(self.seed ^ place);
        let span = (plan.longest - plan.shortest).as_micros() as u64;
        let delay = plan.shortest + Duration::from_micros(random.u64(0..=span));
        (delay, random.f64() < plan.fail)
    }
}

fn hash(id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    hasher.finish()
}

/// What a target's text asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    shortest: Duration,
    longest: Duration,
    /// The share of attempts that fail.
    fail: f64,
}

impl Plan {
    fn parse(text: &str) -> Result<Plan, String> {
        let mut plan = DEFAULT;
        for word in text.split_ascii_whitespace() {
            let understood = match word.strip_prefix("fail=") {
                Some(share) => parse_share(share).map(|share| plan.fail = share),
                None => parse_range(word).map(|(from, to)| (plan.shortest, plan.longest) = (from, to)),
            };
            understood.ok_or_else(|| {
                let word = beginning(word);
                format!("`{word}` is neither a duration such as 15ms, nor a range such as 10ms..20ms, nor fail=0.1")
            })?;
        }
        Ok(plan)
    }
}

fn parse_share(text: &str) -> Option<f64> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share))
}

fn parse_range(text: &str) -> Option<(Duration, Duration)> {
    let (from, to) = text.split_once("..").unwrap_or((text, text));
    let (from, to) = (parse_duration(from)?, parse_duration(to)?);
    (from <= to).then_some((from, to))
}

fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| c.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(digits);
    let unit = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return None,
    };
    let seconds = number.parse::<f64>().ok()? * unit;
    Duration::try_from_secs_f64(seconds).ok().filter(|duration| *duration <= LONGEST)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::message::Message;

    fn message(target: &str) -> Message {
        let text = format!(
            r#"{{"id":"m","poolCode":"p","mediationType":"SIMULATED","mediationTarget":"{target}"}}"#
        );
        Message::parse(text.as_bytes()).unwrap()
    }

    fn call(message: &Message, sequence: u64) -> Call<'_> {
        Call { message, key: "k", sequence, attempt: 1, traceparent: None }
    }

    #[tokio::test(start_paused = true)]
    async fn waits_as_long_as_it_is_told() {
        let simulated = Simulated::new(7);
        let cases = [
            ("15ms", 15..=15),
            ("0.5s", 500..=500),
            ("2000us", 2..=2),
            ("0ms", 0..=0),
            ("30ms..40ms", 30..=41),
            ("", 10..=21),
        ];
        for (target, expected) in cases {
            let message = message(target);
            for sequence in 0..50 {
                let start = tokio::time::Instant::now();
                assert_eq!(simulated.mediate(call(&message, sequence)).await, Verdict::Done);
                let took = start.elapsed().as_millis();
                // Tokio's timer counts whole milliseconds, and never wakes early.
                assert!(
                    expected.contains(&took) || expected.contains(&took.saturating_sub(1)),
                    "{target:?} took {took} ms"
                );
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_it_does_not_understand_is_final() {
        for target in [
            "soon",
            "15",
            "15parsecs",
            "20ms..10ms",
            "-1s",
            "NaNs",
            "infs",
            "2h",
            "4000s",
            "fail=2",
            "10ms..",
        ] {
            let verdict = Simulated::new(7).mediate(call(&message(target), 1)).await;
            assert!(
                matches!(&verdict, Verdict::Final { reason } if reason.contains(target)),
                "{target}: {verdict:?}"
            );
        }
    }

    #[test]
    fn the_same_seed_is_the_same_run_and_another_is_not() {
        let plan = Plan::parse("1ms..100ms fail=0.25").unwrap();
        let run = |seed| (0..1_000).map(|n| Simulated::new(seed).decide(plan, n, 1)).collect::<Vec<_>>();
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        let failures = run(1).iter().filter(|(_, fails)| *fails).count();
        assert!((200..300).contains(&failures), "{failures} of 1000 at a quarter");
        let delays: HashSet<_> = run(1).into_iter().map(|(delay, _)| delay.as_millis()).collect();
        assert!(delays.len() > 80, "spread over the range: {}", delays.len());
        let attempts: HashSet<_> =
            (1..20).map(|attempt| Simulated::new(1).decide(plan, 5, attempt).0).collect();
        assert!(attempts.len() > 15, "an attempt is another throw");
    }
}
