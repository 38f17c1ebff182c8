//! The end of `laneway serve`: drains with a countdown, and says what came of it. Programs read it from standard output, people beside it.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use laneway_router::service::Service;
use serde_json::json;
use tokio::time::{Instant, MissedTickBehavior};

use crate::exit::Failure;
use crate::table::{count, lines};

/// How often the countdown is shown.
const BEAT: Duration = Duration::from_millis(500);

/// Ends a service within `limit`, and a moment for what is settled last.
pub(super) async fn drain(service: Service, limit: Duration, json: bool) -> Result<(), Failure> {
    service.close();
    let deadline = Instant::now() + limit;
    let mut countdown = Countdown { json, last: None };
    let ending = service.shutdown(limit);
    tokio::pin!(ending);
    let mut beat = tokio::time::interval(BEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let farewell = loop {
        tokio::select! {
            farewell = &mut ending => break farewell,
            _ = beat.tick() => countdown.show(service.held(), deadline.saturating_duration_since(Instant::now())),
        }
    };
    countdown.end();
    if json {
        let router = &farewell.router;
        let _ = lines(&[json!({
            "event": "stopped", "settled": router.settled, "givenBack": router.given_back, "stillRunning": router.still_running,
            "ingressLost": farewell.ingress_lost, "connectionsCut": farewell.connections_cut,
        })]);
    }
    if !farewell.router.settled {
        let words =
            "stopped, but the queue does not know what became of some messages; they will be delivered again";
        return Err(Failure::Other(anyhow::anyhow!(words)));
    }
    let (given_back, still_running) =
        (farewell.router.given_back as u64, farewell.router.still_running as u64);
    if farewell.ingress_lost == 0 || given_back + still_running > 0 {
        eprintln!("{}", last_words(given_back, still_running));
    }
    if farewell.ingress_lost > 0 {
        // They were in this process alone; their clients were told that they would not be completed.
        let lost = count(farewell.ingress_lost as u64, "task");
        return Err(Failure::Other(anyhow::anyhow!("stopped; {lost} of the network ingress were not done")));
    }
    Ok(())
}

/// What became of the messages that were not delivered: those that had not been sent, and those whose targets had not answered.
fn last_words(given_back: u64, still_running: u64) -> String {
    let mut left = Vec::new();
    if given_back > 0 {
        left.push(format!("{} went back to the queue, in order", count(given_back, "message")));
    }
    if still_running > 0 {
        let were = match still_running {
            1 => "was with its target, and comes again",
            _ => "were with their targets, and come again",
        };
        left.push(format!("{} {were}", count(still_running, "message")));
    }
    match left.is_empty() {
        true => "drained: nothing was left".to_owned(),
        false => format!("stopped: {}", left.join("; ")),
    }
}

/// One line that changes on a terminal, a line per second elsewhere.
struct Countdown {
    /// Whether there is an object per second for programs, too.
    json: bool,
    /// The seconds that were shown last.
    last: Option<u64>,
}

impl Countdown {
    fn show(&mut self, held: usize, left: Duration) {
        let (terminal, seconds) = (io::stderr().is_terminal(), left.as_secs_f64().ceil() as u64);
        let is_next = self.last != Some(seconds);
        if held == 0 || !(terminal || is_next) {
            return;
        }
        self.last = Some(seconds);
        // Whoever does not listen any more does not keep the service from draining.
        if self.json && is_next {
            let _ = lines(&[json!({"event": "draining", "held": held, "secondsLeft": seconds})]);
        }
        let line = format!("draining: {} left, {seconds} s left", count(held as u64, "message"));
        let mut err = io::stderr().lock();
        let _ = match terminal {
            true => write!(err, "\r\x1b[K{line}").and_then(|()| err.flush()),
            false => writeln!(err, "{line}"),
        };
    }

    fn end(&self) {
        if self.last.is_some() && io::stderr().is_terminal() {
            eprintln!();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::last_words;

    #[test]
    fn nothing_that_was_left_is_left_out() {
        assert_eq!(last_words(0, 0), "drained: nothing was left");
        assert_eq!(last_words(2, 0), "stopped: 2 messages went back to the queue, in order");
        assert_eq!(
            last_words(1, 3),
            "stopped: 1 message went back to the queue, in order; 3 messages were with their targets, and come again"
        );
        assert_eq!(last_words(0, 1), "stopped: 1 message was with its target, and comes again");
    }
}
