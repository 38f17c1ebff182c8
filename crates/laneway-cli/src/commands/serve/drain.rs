//! The end of `laneway serve`: drains with a countdown, and says what came of it.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use laneway_router::service::Service;
use tokio::time::{Instant, MissedTickBehavior};

use crate::exit::Failure;
use crate::table::count;

/// How often the countdown is shown.
const BEAT: Duration = Duration::from_millis(500);

/// Ends a service within `limit`, and a moment for what is settled last.
pub(super) async fn drain(service: Service, limit: Duration) -> Result<(), Failure> {
    service.close();
    let deadline = Instant::now() + limit;
    let mut countdown = Countdown::default();
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
    if !farewell.router.settled {
        let words =
            "stopped, but the queue does not know what became of some messages; they will be delivered again";
        return Err(Failure::Other(anyhow::anyhow!(words)));
    }
    if farewell.ingress_lost > 0 {
        // They were in this process alone; their clients were told that they would not be completed.
        let lost = count(farewell.ingress_lost as u64, "task");
        return Err(Failure::Other(anyhow::anyhow!("stopped; {lost} of the network ingress were not done")));
    }
    match farewell.router.given_back as u64 {
        0 => eprintln!("drained: nothing was left"),
        left => eprintln!("stopped: {} went back to the queue, in order", count(left, "message")),
    }
    Ok(())
}

/// One line that changes on a terminal, a line per second elsewhere.
#[derive(Default)]
struct Countdown {
    /// The seconds that were shown last.
    last: Option<u64>,
}

impl Countdown {
    fn show(&mut self, held: usize, left: Duration) {
        let (terminal, seconds) = (io::stderr().is_terminal(), left.as_secs_f64().ceil() as u64);
        if held == 0 || (!terminal && self.last == Some(seconds)) {
            return;
        }
        self.last = Some(seconds);
        let line = format!("draining: {} left, {seconds} s left", count(held as u64, "message"));
        let mut err = io::stderr().lock();
        // Whoever does not listen any more does not keep the service from draining.
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
