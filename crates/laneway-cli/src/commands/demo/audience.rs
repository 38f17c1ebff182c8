//! Who watches a demonstration: prints each message as it is handled, and checks the contract by its own count.
//!
//! It believes nothing that the engine says about itself: order is checked as contiguity, so that a lost message is seen as
//! well as one out of place, and the engine's account is compared with the number of messages that were seen.

use std::io::Write;
use std::sync::mpsc::Receiver;

use laneway::Account;

use super::{Event, SLOW_LANE};
use crate::exit::Failure;
use crate::render::{Handled, Renderer, Summary};

/// How watching ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Complete,
    Interrupted,
}

pub(super) struct Audience<W> {
    renderer: Renderer<W>,
    /// For each lane the sequence that was handled last; 0 before the first.
    last: Vec<u32>,
    handled: u64,
    out_of_order: u64,
    overlapping: u64,
    slow_lane_seconds: f64,
    other_lanes_seconds: f64,
    /// How many messages were accepted, once the producer has said so.
    submitted: Option<u64>,
}

impl<W: Write> Audience<W> {
    pub(super) fn new(keys: u32, renderer: Renderer<W>) -> Self {
        Self {
            renderer,
            last: vec![0; keys as usize],
            handled: 0,
            out_of_order: 0,
            overlapping: 0,
            slow_lane_seconds: 0.0,
            other_lanes_seconds: 0.0,
            submitted: None,
        }
    }

    /// Prints what stands above the first line.
    pub(super) fn take_seats(&mut self) -> Result<(), Failure> {
        Ok(self.renderer.heading()?)
    }

    /// Watches until all that was submitted has been handled, or until the user interrupts.
    pub(super) fn watch(&mut self, inbox: &Receiver<Event>) -> Result<Ending, Failure> {
        for event in inbox {
            if self.hear(event)? == Some(Ending::Interrupted) {
                return Ok(Ending::Interrupted);
            }
            if self.submitted == Some(self.handled) {
                break;
            }
        }
        Ok(Ending::Complete)
    }

    /// Takes in what was handled between the end of watching and the end of the engine.
    pub(super) fn hear_the_rest(&mut self, inbox: &Receiver<Event>) -> Result<(), Failure> {
        inbox.try_iter().try_for_each(|event| self.hear(event).map(drop))
    }

    /// Prints the summary and says whether the contract held.
    pub(super) fn judge(&mut self, account: &Account, ending: Ending) -> Result<(), Failure> {
        let summary = self.summary(account, ending);
        self.renderer.summary(&summary)?;
        if let Some(violation) = violation(&summary, self.handled, self.submitted) {
            return Err(Failure::Violated(violation));
        }
        match ending {
            Ending::Complete => Ok(()),
            Ending::Interrupted => Err(Failure::Interrupted),
        }
    }

    fn hear(&mut self, event: Event) -> Result<Option<Ending>, Failure> {
        match event {
            Event::Handled { handled, overlapped } => self.note(&handled, overlapped)?,
            Event::Submitted(count) => self.submitted = Some(count),
            Event::Interrupted => return Ok(Some(Ending::Interrupted)),
        }
        Ok(None)
    }

    fn note(&mut self, handled: &Handled, overlapped: bool) -> Result<(), Failure> {
        let last = &mut self.last[handled.lane as usize - 1];
        self.out_of_order += u64::from(handled.sequence != *last + 1);
        *last = handled.sequence;
        self.handled += 1;
        self.overlapping += u64::from(overlapped);
        match handled.lane {
            SLOW_LANE => self.slow_lane_seconds = handled.at_seconds,
            _ => self.other_lanes_seconds = handled.at_seconds,
        }
        Ok(self.renderer.handled(handled)?)
    }

    fn summary(&self, account: &Account, ending: Ending) -> Summary {
        Summary {
            accepted: account.accepted,
            done: account.done,
            failed: account.failed,
            dropped: account.dropped,
            outstanding: account.outstanding,
            lanes: self.last.len() as u32,
            out_of_order: self.out_of_order,
            overlapping: self.overlapping,
            slow_lane_seconds: self.slow_lane_seconds,
            other_lanes_seconds: self.other_lanes_seconds,
            interrupted: ending == Ending::Interrupted,
        }
    }
}

/// The first line of the contract that does not hold, if there is one.
fn violation(summary: &Summary, handled: u64, submitted: Option<u64>) -> Option<String> {
    let Summary { accepted, done, failed, dropped, outstanding, .. } = *summary;
    // A message that is in flight when an interrupted engine ends may have been seen and not be counted yet.
    let complete = !summary.interrupted;
    if summary.out_of_order > 0 {
        Some(format!("{} messages out of order", summary.out_of_order))
    } else if summary.overlapping > 0 {
        Some(format!("{} messages beside another one of their lane", summary.overlapping))
    } else if accepted != done + failed + dropped + outstanding {
        Some("the account does not balance".to_owned())
    } else if submitted.is_some_and(|submitted| submitted != accepted) {
        Some(format!("{accepted} messages counted as accepted, {submitted:?} submitted"))
    } else if complete && (done != handled || done != accepted) {
        Some(format!("{accepted} messages accepted, {done} counted as done, {handled} seen"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handled(lane: u32, sequence: u32) -> Handled {
        Handled { lane, sequence, worker: 0, at_seconds: 0.0, waited_seconds: 0.0, worked_seconds: 0.0 }
    }

    fn audience_of(messages: &[(u32, u32)]) -> Audience<Vec<u8>> {
        let mut audience = Audience::new(2, Renderer::new(Vec::new(), true));
        for &(lane, sequence) in messages {
            audience.note(&handled(lane, sequence), false).expect("memory can be written");
        }
        audience
    }

    fn summary(accepted: u64, done: u64) -> Summary {
        Summary {
            accepted,
            done,
            failed: 0,
            dropped: 0,
            outstanding: accepted - done,
            lanes: 2,
            out_of_order: 0,
            overlapping: 0,
            slow_lane_seconds: 0.0,
            other_lanes_seconds: 0.0,
            interrupted: false,
        }
    }

    #[test]
    fn lanes_in_order_are_in_order_however_they_are_mixed() {
        assert_eq!(audience_of(&[(1, 1), (2, 1), (2, 2), (1, 2)]).out_of_order, 0);
    }

    #[test]
    fn a_swap_and_a_gap_are_both_out_of_order() {
        assert!(audience_of(&[(1, 2), (1, 1)]).out_of_order > 0);
        assert!(audience_of(&[(1, 1), (1, 3)]).out_of_order > 0);
    }

    #[test]
    fn every_line_of_the_contract_can_be_violated() {
        assert_eq!(violation(&summary(4, 4), 4, Some(4)), None);
        assert!(violation(&Summary { out_of_order: 1, ..summary(4, 4) }, 4, Some(4)).is_some());
        assert!(violation(&Summary { overlapping: 1, ..summary(4, 4) }, 4, Some(4)).is_some());
        assert!(violation(&Summary { dropped: 1, ..summary(4, 4) }, 4, Some(4)).is_some());
        assert!(violation(&summary(4, 4), 4, Some(5)).is_some());
        assert!(violation(&summary(4, 4), 3, Some(4)).is_some());
        assert!(violation(&summary(4, 3), 3, Some(4)).is_some());
    }

    #[test]
    fn an_interrupted_run_may_leave_work_but_must_balance() {
        let interrupted = |dropped| Summary { interrupted: true, dropped, ..summary(4, 3) };
        assert_eq!(violation(&interrupted(0), 3, Some(4)), None);
        assert!(violation(&interrupted(1), 3, Some(4)).is_some());
    }
}
