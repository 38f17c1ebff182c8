//! Who sleeps, how a sleeper is woken, and how many at once.
//!
//! A burst of messages that take no time does not need as many workers as it has messages: the first one to be up runs most of them before the second one is there. To wake one for
//! each message would cost more than the messages do. So while messages are quick, few workers are *rising* at a time: whoever would wake one more leaves it be, and each
//! one that is up wakes the next if it leaves work behind. Nothing is stranded by that, because who is rising is up at some time
//! ([`rise`](crate::dispatcher::Dispatcher::rise) is called by a worker that is up, and by one that goes), and because whoever is up and takes a lane looks at all that is left,
//! ingress included.
//!
//! How few depends on who else may keep them down. A thread that is woken runs as soon as a core is free: one at a time will do. A slot may be the next task of a thread of its
//! runtime that is busy for long, and no other thread takes it from there; but each thread has one such place. So at least as many slots may be rising as the runtime has threads: one of them is
//! polled by a thread that is free, if there is one.
//!
//! While messages are slow each of them is worth a worker, and none is held back.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::sync::Thread;

/// Slots that may be rising for each thread of their runtime. One would do for progress. Measured with eight pools on two threads: with one they handled a quarter fewer messages than when each message woke a
/// slot, with four no fewer.
#[cfg(feature = "tokio")]
const SLOTS_PER_THREAD: usize = 4;

/// Somebody who can be woken. A wake-up is a token: one that comes before the sleep is not lost.
#[derive(Clone)]
pub(crate) struct Sleeper {
    id: usize,
    alarm: Alarm,
}

#[derive(Clone)]
enum Alarm {
    Thread(Thread),
    #[cfg(feature = "tokio")]
    Slot {
        notify: Arc<tokio::sync::Notify>,
        /// Of its runtime.
        threads: usize,
    },
    Simulated(Arc<AtomicBool>),
}

impl Sleeper {
    pub(crate) fn thread(id: usize, thread: Thread) -> Self {
        Sleeper { id, alarm: Alarm::Thread(thread) }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn slot(id: usize, notify: Arc<tokio::sync::Notify>, threads: usize) -> Self {
        Sleeper { id, alarm: Alarm::Slot { notify, threads } }
    }

    pub(crate) fn simulated(id: usize, woken: Arc<AtomicBool>) -> Self {
        Sleeper { id, alarm: Alarm::Simulated(woken) }
    }

    /// Whether it costs nothing to wake up by itself after a while. A slot would need a timer for that.
    pub(crate) fn can_come_back(&self) -> bool {
        matches!(self.alarm, Alarm::Thread(_))
    }

    /// How many of its kind may be rising at a time.
    fn rising_max(&self) -> usize {
        match &self.alarm {
            #[cfg(feature = "tokio")]
            Alarm::Slot { threads, .. } => SLOTS_PER_THREAD * *threads,
            Alarm::Thread(_) | Alarm::Simulated(_) => 1,
        }
    }

    pub(crate) fn is(&self, other: &Sleeper) -> bool {
        self.id == other.id
    }

    pub(crate) fn wake(&self) {
        match &self.alarm {
            Alarm::Thread(thread) => thread.unpark(),
            #[cfg(feature = "tokio")]
            Alarm::Slot { notify, .. } => notify.notify_one(),
            Alarm::Simulated(woken) => woken.store(true, Ordering::SeqCst),
        }
    }
}

impl fmt::Debug for Sleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sleeper({})", self.id)
    }
}

/// Those who sleep at one dispatcher. Guarded by its ingress lock.
#[derive(Debug)]
pub(crate) struct Sleepers {
    /// The last one in is woken first: its memory is warm.
    asleep: Vec<Sleeper>,
    /// Those who were taken off the list last and are not up yet, as many as may be at a time.
    rising: Vec<usize>,
    /// Whether nobody is woken while as many are.
    few_at_a_time: bool,
}

impl Sleepers {
    pub(crate) fn new() -> Self {
        Sleepers { asleep: Vec::new(), rising: Vec::new(), few_at_a_time: true }
    }

    pub(crate) fn len(&self) -> usize {
        self.asleep.len()
    }

    /// Messages have turned out to be quick, or not to be.
    pub(crate) fn wake_few_at_a_time(&mut self, few: bool) {
        self.few_at_a_time = few;
    }

    /// Takes off the list whom to wake for work, if anybody: the caller has to.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Sleeper> {
        let may_rise = self.rising.len() < self.asleep.last()?.rising_max();
        if self.few_at_a_time && !may_rise {
            return None;
        }
        let sleeper = self.asleep.pop()?;
        if may_rise {
            self.rising.push(sleeper.id);
        }
        Some(sleeper)
    }

    /// Takes everyone off the list.
    pub(crate) fn take_all(&mut self) -> Vec<Sleeper> {
        std::mem::take(&mut self.asleep)
    }

    pub(crate) fn lie_down(&mut self, sleeper: Sleeper) {
        self.asleep.push(sleeper);
    }

    /// This one is up. False if somebody had taken it off the list.
    pub(crate) fn rise(&mut self, sleeper: &Sleeper) -> bool {
        if let Some(place) = self.rising.iter().position(|id| *id == sleeper.id) {
            self.rising.swap_remove(place);
            return false;
        }
        let place = self.asleep.iter().rposition(|other| other.is(sleeper));
        place.map(|place| self.asleep.remove(place)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleepers(number: usize) -> Sleepers {
        let mut sleepers = Sleepers::new();
        (0..number).for_each(|id| sleepers.lie_down(sleeper(id)));
        sleepers
    }

    fn sleeper(id: usize) -> Sleeper {
        Sleeper::simulated(id, Arc::default())
    }

    fn taken(sleepers: &mut Sleepers) -> Option<usize> {
        sleepers.take().map(|sleeper| sleeper.id)
    }

    #[test]
    fn while_messages_are_slow_each_wakes_somebody() {
        let mut sleepers = sleepers(2);
        sleepers.wake_few_at_a_time(false);
        assert_eq!(
            [taken(&mut sleepers), taken(&mut sleepers), taken(&mut sleepers)],
            [Some(1), Some(0), None]
        );
    }

    #[test]
    fn while_messages_are_quick_the_next_is_woken_when_one_is_up() {
        let mut sleepers = sleepers(3);
        assert_eq!([taken(&mut sleepers), taken(&mut sleepers)], [Some(2), None]);
        assert!(sleepers.rise(&sleeper(0)), "another one, who woke by itself");
        assert_eq!(taken(&mut sleepers), None, "the first is still rising");
        assert!(!sleepers.rise(&sleeper(2)));
        assert_eq!(taken(&mut sleepers), Some(1));
        sleepers.wake_few_at_a_time(false);
        sleepers.lie_down(sleeper(0));
        assert_eq!(taken(&mut sleepers), Some(0), "messages are slow again");
    }

    #[cfg(feature = "tokio")]
    #[test]
    fn no_more_slots_rise_at_a_time_than_suits_the_threads_of_their_runtime() {
        let mut sleepers = Sleepers::new();
        let slot = |id| Sleeper::slot(id, Arc::default(), 2);
        (0..10).for_each(|id| sleepers.lie_down(slot(id)));
        assert!((2..10).rev().all(|id| taken(&mut sleepers) == Some(id)));
        assert_eq!(taken(&mut sleepers), None);
        assert!(!sleepers.rise(&slot(5)));
        assert_eq!([taken(&mut sleepers), taken(&mut sleepers)], [Some(1), None]);
    }
}
