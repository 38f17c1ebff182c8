//! Who sleeps, how a sleeper is woken, and how many at once.
//!
//! A burst of messages that take no time does not need as many workers as it has messages: the first one to arrive runs most of them before the second one is there. To wake one for
//! each message would cost more than the messages do. So while messages are quick, one worker at a time is *on its way*: whoever would wake another leaves it be, and the
//! one that arrives wakes the next if it leaves work behind. Nothing is stranded by that, because who is on its way
//! always arrives ([`rise`](crate::dispatcher::Dispatcher::rise) is called by a worker that is up, and by one that goes), and because whoever has arrived and takes a lane looks at all that is left,
//! ingress included.
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
    Slot(Arc<tokio::sync::Notify>),
    Simulated(Arc<AtomicBool>),
}

impl Sleeper {
    pub(crate) fn thread(id: usize, thread: Thread) -> Self {
        Sleeper { id, alarm: Alarm::Thread(thread) }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn slot(id: usize, notify: Arc<tokio::sync::Notify>) -> Self {
        Sleeper { id, alarm: Alarm::Slot(notify) }
    }

    pub(crate) fn simulated(id: usize, woken: Arc<AtomicBool>) -> Self {
        Sleeper { id, alarm: Alarm::Simulated(woken) }
    }

    /// For how long, in nanoseconds, a dispatcher keeps the memory that a burst needed after this one has lain down: the next burst may follow at once, and to grow again
    /// costs more than a message does. Only a thread can come back for that without a timer.
    pub(crate) fn linger(&self) -> u64 {
        match &self.alarm {
            Alarm::Thread(_) => 100_000_000,
            #[cfg(feature = "tokio")]
            Alarm::Slot(_) => 0,
            Alarm::Simulated(_) => 0,
        }
    }

    pub(crate) fn is(&self, other: &Sleeper) -> bool {
        self.id == other.id
    }

    pub(crate) fn wake(&self) {
        match &self.alarm {
            Alarm::Thread(thread) => thread.unpark(),
            #[cfg(feature = "tokio")]
            Alarm::Slot(notify) => notify.notify_one(),
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
    /// Who was taken off the list last and has not arrived.
    on_its_way: Option<usize>,
    /// Whether to wake the next one only when that one has arrived.
    one_by_one: bool,
}

impl Sleepers {
    pub(crate) fn new() -> Self {
        Sleepers { asleep: Vec::new(), on_its_way: None, one_by_one: true }
    }

    pub(crate) fn len(&self) -> usize {
        self.asleep.len()
    }

    /// Messages have turned out to be quick, or not to be.
    pub(crate) fn wake_one_by_one(&mut self, one_by_one: bool) {
        self.one_by_one = one_by_one;
    }

    /// Takes off the list whom to wake for work, if anybody: the caller has to.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Sleeper> {
        if self.one_by_one && self.on_its_way.is_some() {
            return None;
        }
        let sleeper = self.asleep.pop()?;
        self.on_its_way = Some(sleeper.id);
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
        if self.on_its_way == Some(sleeper.id) {
            self.on_its_way = None;
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
        sleepers.wake_one_by_one(false);
        assert_eq!(
            [taken(&mut sleepers), taken(&mut sleepers), taken(&mut sleepers)],
            [Some(1), Some(0), None]
        );
    }

    #[test]
    fn while_messages_are_quick_the_next_is_woken_when_one_has_arrived() {
        let mut sleepers = sleepers(3);
        assert_eq!([taken(&mut sleepers), taken(&mut sleepers)], [Some(2), None]);
        assert!(sleepers.rise(&sleeper(0)), "another one, who woke by itself");
        assert_eq!(taken(&mut sleepers), None, "the first is still on its way");
        assert!(!sleepers.rise(&sleeper(2)));
        assert_eq!(taken(&mut sleepers), Some(1));
        sleepers.wake_one_by_one(false);
        sleepers.lie_down(sleeper(0));
        assert_eq!(taken(&mut sleepers), Some(0), "messages are slow again");
    }
}
