//! Whatever comes from outside: bytes that are almost a line, almost a message, or nothing of the kind, against what must hold for all of them.
//!
//! Inputs are drawn from a seed: pieces of good ones, cut, doubled, joined and with bytes changed. `LANEWAY_FUZZ_SECONDS` says how long (one second for each
//! test if it is not set), `LANEWAY_FUZZ_SEED` runs one seed; a failure prints its seed. Nothing here depends on time or threads, so a seed shows its failure again.

use std::time::{Duration, Instant};

use laneway_router::{
    ingress::{Answer, Frame, Frames, Line, Rest},
    message::{MESSAGE_BYTES_MAX, Message, NAME_BYTES_MAX},
};

/// What good input looks like, and what is known to be awkward.
const CORPUS: [&str; 14] = [
    r#"{"id":"t-1","correlationId":7}"#,
    r#"{"id":1,"correlationId":"order-7","notify":true,"strict":false,"priority":"HIGH"}"#,
    r#"{"id":"t","correlationId":"f","mediationType":"HTTP","mediationTarget":"http://127.0.0.1/x","payload":{"a":[1,2,{"b":null}]}}"#,
    r#"{"id":"t","correlationId":-9223372036854775808,"mediationType":"SIMULATED","mediationTarget":"10ms..20ms"}"#,
    r#"{"id":"t","correlationId":18446744073709551615,"headers":{"x-a":"b","ü":"€"},"authToken":"token"}"#,
    r#"{"id":"m-1","poolCode":"orders","mediationTarget":"http://localhost/","messageGroupId":"order-7"}"#,
    r#"{"id":"m","poolCode":"","mediationType":"SIMULATED","dispatchMode":"BLOCK_ON_ERROR","deduplicationId":"d","priority":"LOW"}"#,
    r#"{"id":"m","poolCode":"p","mediationTarget":"u","payload":"\ud83d\ude00 \u0000","headers":{},"authToken":"x","dispatchMode":"IMMEDIATE"}"#,
    r#"{"id":"a","id":"b","correlationId":1e400}"#,
    r#"{"i\u0064":"escaped name","correlationId":"\\\"[[[{{{"}"#,
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    "{\"payload\":\"\\ud800\"}",
    "\u{feff}{}",
    "\r\n\n\t \"\\",
];

/// Numbers from a seed (SplitMix64).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn input(&mut self) -> Vec<u8> {
        let mut input = CORPUS[self.below(CORPUS.len())].as_bytes().to_vec();
        for _ in 0..self.below(6) {
            self.change(&mut input);
        }
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        match self.below(8) {
            0 => input.truncate(at),
            1 => drop(input.drain(..at)),
            2 if at < input.len() => input[at] = self.next() as u8,
            3 if at < input.len() => input[at] ^= 1 << self.below(8),
            4 => input.insert(at, b"\"\\{}[]:,\n\r\t0-\x00\xff"[self.below(15)]),
            5 => {
                let to = (at + self.below(40)).min(input.len());
                let piece = input[at..to].to_vec();
                for _ in 0..self.below(70) {
                    input.splice(at..at, piece.iter().copied());
                }
            }
            _ => {
                let other = CORPUS[self.below(CORPUS.len())].as_bytes();
                let (from, length) = (self.below(other.len()), self.below(other.len()));
                let piece = &other[from..(from + length).min(other.len())];
                input.splice(at..at, piece.iter().copied());
            }
        }
    }
}

/// Runs `check` on drawn seeds for a while, or on the one that is asked for.
fn fuzz(check: impl Fn(&mut Draw) + std::panic::RefUnwindSafe) {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let (one, mut seeds) = (number("LANEWAY_FUZZ_SEED"), Draw(now.as_nanos() as u64));
    let until = Instant::now() + Duration::from_secs(number("LANEWAY_FUZZ_SECONDS").unwrap_or(1));
    let mut rounds = 0_u64;
    while rounds == 0 || (one.is_none() && Instant::now() < until) {
        let seed = one.unwrap_or_else(|| seeds.next());
        let result = std::panic::catch_unwind(|| check(&mut Draw(seed)));
        assert!(result.is_ok(), "LANEWAY_FUZZ_SEED={seed} shows it again");
        rounds += 1;
    }
    println!("{rounds} inputs");
}

/// A name that can be repeated in an answer without ending it.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.chars().any(char::is_control)
}

fn check_line(input: &[u8]) {
    match Line::parse(input) {
        Ok(line) => {
            assert!(is_name(&line.message.id) && is_name(&line.family));
            assert_eq!(line.message.group(), Some(line.family.trim()));
            let json = line.message.to_json();
            let again = Message::parse(json.as_bytes()).expect("what the ingress accepts is a message");
            assert_eq!(again.to_json(), json);
        }
        Err(bad) => {
            assert!(!bad.detail.is_empty());
            let id = bad.id.as_deref().unwrap_or_default();
            assert!(bad.id.is_none() || is_name(id), "{id:?}");
            let mut answer = String::new();
            Answer::Rejected { rejection: bad.rejection, id, detail: &bad.detail }.write(&mut answer);
            let controls = answer.chars().filter(|character| character.is_control()).collect::<String>();
            assert_eq!(controls, "\t\n", "one line with one tab: {answer:?}");
        }
    }
}

#[test]
fn any_line_is_read_or_refused() {
    fuzz(|draw| check_line(&draw.input()));
}

#[test]
fn any_text_is_a_message_or_not() {
    fuzz(|draw| {
        let input = draw.input();
        match Message::parse(&input) {
            Ok(message) => {
                message.check().expect("what was read is within the limits");
                let json = message.to_json();
                let again = Message::parse(json.as_bytes()).expect("what was written can be read");
                assert_eq!(again.to_json(), json);
                assert!(input.len() <= MESSAGE_BYTES_MAX);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}

/// The whole way from bytes to lines, against the naive one that has all bytes at once.
#[test]
fn lines_do_not_depend_on_how_the_bytes_were_cut() {
    fuzz(|draw| {
        let mut input = Vec::new();
        for _ in 0..draw.below(5) {
            input.extend(draw.input());
            input.push(b'\n');
        }
        input.extend(draw.input());
        let limit = 1 + draw.below(200);
        let (mut frames, mut seen) = (Frames::new(limit), Vec::new());
        let mut rest = input.as_slice();
        while !rest.is_empty() {
            let (piece, later) = rest.split_at(1 + draw.below(rest.len().min(64)));
            rest = later;
            frames.push(piece);
            while let Some(frame) = frames.next() {
                seen.push(match frame {
                    Frame::Line(line) => {
                        check_line(line);
                        Some(line.to_vec())
                    }
                    Frame::TooLong(beginning) => {
                        assert_eq!(beginning.len(), limit);
                        None
                    }
                });
            }
            assert!(frames.held() <= limit, "{} bytes are held", frames.held());
        }
        let mut expected: Vec<_> = input.split(|byte| *byte == b'\n').collect();
        let last = expected.pop().expect("there is always a last one");
        let line = |line: &&[u8]| match line.len() <= limit {
            true => Some(line.strip_suffix(b"\r").unwrap_or(line).to_vec()),
            false => None,
        };
        let mut expected: Vec<_> = expected.iter().map(line).collect();
        let rest = match last.len() {
            0 => Rest::Nothing,
            length if length <= limit => Rest::Unanswered,
            _ => {
                expected.push(None);
                Rest::Answered
            }
        };
        assert_eq!((seen, frames.rest()), (expected, rest));
    });
}
