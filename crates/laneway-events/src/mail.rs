//! The mailbox of a processor: what was posted and is in nobody's hands, how many events are in, and whether it takes any more. One lock decides all of it, so that
//! a post costs that lock and no more, and posting, handling and stopping cannot miss each other.
//!
//! # The token
//!
//! The lane of a processor has one token that says "there is mail" ([`Token`](crate::processor::Token)), and the mailbox knows whether there is one:
//!
//! - Who puts something in and finds no token announced submits one.
//! - A thread with the token takes what is in the mailbox, many at once, and handles a turn of that; what is left of them waits with the handlers, in front of what is in the mailbox, or goes back there where events are slow. When it
//!   has nothing and finds nothing it takes the announcement back, and the token is done. When its turn is over before that, the token comes again: at the back of its lane, which goes behind the
//!   others that are ready.
//!
//! So there is a token wherever there is mail; and while a processor is busy, a post makes no trip through the engine. After the announcement was taken back a second token may
//! come while the first is still in the hands of its thread: the lane runs it afterwards.
//!
//! # The gate
//!
//! Who was let in is *inside* until the turn in which it was handled has ended. A closed mailbox lets nobody in. Whoever brings it to *closed and nobody inside* is told so, and that
//! happens once: after it nobody enters, so nobody leaves. That one finishes the processor off.
//!
//! # Places at the dispatcher
//!
//! A dispatcher has a bound, too (`load.rs`). A busy mailbox takes places there ahead, as many as it has events, so that not every post writes what all processors of the
//! dispatcher share; with its announcement it gives back what it did not use.
//!
//! `processor.rs` puts and takes; `events.rs` closes. `tests/loom_mail.rs` runs them against each other.

use std::collections::VecDeque;

use crate::{
    load::Load,
    sync::{Mutex, MutexGuard, lock},
};

/// A mailbox takes no more places ahead than this.
const AHEAD: usize = 32;

/// Empty buffers of so many bytes are worth to be kept for a while. What needs longer ones has so much in it that to ask for them does not count.
const SPARE_BYTES: usize = 16 * 1024;

/// Lets go of a buffer that is empty and too long to be kept.
pub(crate) fn drop_long<T>(letters: &mut VecDeque<T>) {
    if letters.is_empty() && letters.capacity() * size_of::<T>() > SPARE_BYTES {
        *letters = VecDeque::new();
    }
}

/// Why nobody is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shut {
    /// As many as may be are inside.
    Full,
    /// The dispatcher has as many as it may have.
    DispatcherFull,
    /// No more: the processor is stopping, or has stopped.
    Closed,
    /// No more: there will be no more turns.
    Over,
}

/// A mailbox. On a cache line of its own: whoever posts writes it, and what stands beside it belongs to the thread that handles.
#[derive(Debug)]
#[repr(align(64))]
pub struct Mailbox<T>(Mutex<Mail<T>>);

#[derive(Debug)]
struct Mail<T> {
    /// Oldest first.
    letters: VecDeque<T>,
    /// Those that were let in and have not left: the letters, what a thread has in its hands, and what a turn has left with the handlers.
    inside: u32,
    /// Places at the dispatcher that nobody inside has.
    places: u32,
    /// How many may be inside.
    limit: u32,
    /// How many come in until the next one that is timed.
    until_timed: u32,
    /// Whether there is a token for it in the lane, or in the hands of the thread that will look.
    announced: bool,
    closed: bool,
    /// The shutdown has taken what was in it.
    over: bool,
}

/// What is around a mailbox.
pub trait Around<'a>: Copy {
    /// That of its dispatcher.
    fn load(self) -> &'a Load;

    /// Sees to it that there is a token for it, which may have one already. False if there will be no more turns.
    fn announce(self, has_one: bool) -> bool;
}

/// What is known of a mailbox without the type of what is in it.
pub trait Gate {
    /// So many leave. True if those were the last, and it is closed.
    #[must_use = "the last one out finishes the processor off"]
    fn leave(&self, count: u32) -> bool;

    /// Closes it. True if nobody is inside, and it was open.
    #[must_use = "who closes an empty mailbox finishes the processor off"]
    fn close(&self) -> bool;

    /// Whether it is closed.
    fn is_closed(&self) -> bool;

    /// How many are inside.
    fn inside(&self) -> u32;
}

impl<T> Mailbox<T> {
    /// An empty one, for so many at once, of which the first to be timed is this one.
    pub fn new(limit: u32, until_timed: u32) -> Self {
        Mailbox(Mutex::new(Mail {
            letters: VecDeque::new(),
            inside: 0,
            places: 0,
            limit,
            until_timed,
            announced: false,
            closed: false,
            over: false,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Mail<T>> {
        lock(&self.0)
    }

    /// Lets one in, if there is room, and puts in what `seal` makes of it; that is told whether this one is timed, as one in `one_in` is (none, if that is 0).
    #[inline]
    pub fn put<'a, V>(
        &self,
        value: V,
        one_in: u32,
        seal: impl FnOnce(V, bool) -> T,
        around: impl Around<'a>,
    ) -> Result<(), (V, Shut)> {
        let mut mail = self.lock();
        let limit = mail.limit;
        if let Err(shut) = mail.admit(limit, around) {
            return Err((value, shut));
        }
        let timed = mail.is_timed(one_in);
        mail.letters.push_back(seal(value, timed));
        Ok(())
    }

    /// Lets one in although there may be no room: the start of a processor, which comes before all others and counts as they do.
    pub fn put_beside<'a>(&self, letter: T, around: impl Around<'a>) -> Result<(), Shut> {
        let mut mail = self.lock();
        mail.admit(u32::MAX, around)?;
        mail.letters.push_back(letter);
        Ok(())
    }

    /// Moves the oldest into the empty `hand`, up to `most` of them. If there is none, the next one that is put in announces itself again, and whoever asked must not look any more.
    pub fn take(&self, hand: &mut VecDeque<T>, most: usize, load: &Load) -> bool {
        let mut mail = self.lock();
        let count = mail.letters.len();
        if count == 0 {
            mail.announced = false;
            drop_long(&mut mail.letters);
            load.give_back(std::mem::take(&mut mail.places).into());
            return false;
        }
        load.note_depth(mail.inside as usize);
        match count <= most {
            true => std::mem::swap(hand, &mut mail.letters),
            false => hand.extend(mail.letters.drain(..most)),
        }
        true
    }

    /// Puts back what a turn did not come to, in front of all others.
    pub fn put_back(&self, hand: &mut VecDeque<T>) {
        let mut mail = self.lock();
        while let Some(letter) = hand.pop_back() {
            mail.letters.push_front(letter);
        }
    }

    /// Lets go of the memory for what is in it, if that is nothing.
    pub fn shrink(&self) {
        let mut mail = self.lock();
        if mail.letters.is_empty() {
            mail.letters = VecDeque::new();
        }
    }

    /// Takes all that is in it, for good: there will be no more turns.
    pub fn empty(&self, load: &Load) -> VecDeque<T> {
        let mut mail = self.lock();
        mail.over = true;
        load.give_back(std::mem::take(&mut mail.places).into());
        std::mem::take(&mut mail.letters)
    }
}

impl<T> Mail<T> {
    #[inline]
    fn admit<'a>(&mut self, limit: u32, around: impl Around<'a>) -> Result<(), Shut> {
        if self.closed {
            return Err(Shut::Closed);
        }
        if self.inside >= limit {
            return Err(Shut::Full);
        }
        if self.places == 0 {
            // Also where nobody takes anything out: a handler may be stuck.
            around.load().note_depth(self.inside as usize);
            self.places = around.load().take(self.letters.len().clamp(1, AHEAD) as u64) as u32;
            if self.places == 0 {
                return Err(Shut::DispatcherFull);
            }
        }
        if self.over || !around.announce(self.announced) {
            if !self.announced {
                around.load().give_back(std::mem::take(&mut self.places).into());
            }
            return Err(Shut::Over);
        }
        (self.announced, self.inside, self.places) = (true, self.inside + 1, self.places - 1);
        Ok(())
    }

    #[inline]
    fn is_timed(&mut self, one_in: u32) -> bool {
        let timed = one_in > 0 && self.until_timed == 0;
        self.until_timed = if timed { one_in - 1 } else { self.until_timed.saturating_sub(1) };
        timed
    }
}

impl<T> Gate for Mailbox<T> {
    fn leave(&self, count: u32) -> bool {
        let mut mail = self.lock();
        assert!(mail.inside >= count, "nobody leaves who has not entered");
        mail.inside -= count;
        mail.closed && mail.inside == 0 && count > 0
    }

    fn close(&self) -> bool {
        let mut mail = self.lock();
        !std::mem::replace(&mut mail.closed, true) && mail.inside == 0
    }

    fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn inside(&self) -> u32 {
        self.lock().inside
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Says whether it was asked for a token, and whether one can be had.
    #[derive(Clone, Copy)]
    struct Outside<'a>(&'a Load, &'a Cell<Option<bool>>, bool);

    impl<'a> Around<'a> for Outside<'a> {
        fn load(self) -> &'a Load {
            self.0
        }

        fn announce(self, has_one: bool) -> bool {
            self.1.set(Some(has_one));
            self.2
        }
    }

    /// Puts one in; a token can always be had.
    fn put(mailbox: &Mailbox<u32>, load: &Load, value: u32) -> Result<(), Shut> {
        let outside = Outside(load, &Cell::new(None), true);
        mailbox.put(value, 0, |value, _| value, outside).map_err(|(_, shut)| shut)
    }

    #[test]
    fn the_last_one_out_is_told_and_only_that_one() {
        let (mailbox, load) = (Mailbox::new(2, 0), Load::new(100));
        assert_eq!(put(&mailbox, &load, 1), Ok(()));
        assert_eq!(put(&mailbox, &load, 2), Ok(()));
        assert_eq!(put(&mailbox, &load, 3), Err(Shut::Full));
        assert!(!mailbox.leave(1));
        assert_eq!(mailbox.inside(), 1);
        assert!(!mailbox.close(), "somebody is inside");
        assert!(!mailbox.close(), "it was closed before");
        assert_eq!(put(&mailbox, &load, 3), Err(Shut::Closed));
        assert!(mailbox.leave(1));
        assert!(mailbox.is_closed());
    }

    #[test]
    fn who_closes_an_empty_one_is_told_once() {
        let mailbox = Mailbox::<u32>::new(1, 0);
        assert!(mailbox.close());
        assert!(!mailbox.close());
    }

    #[test]
    fn letters_come_out_in_order_and_what_was_put_back_is_first() {
        let (mailbox, load, mut hand) = (Mailbox::new(9, 0), Load::new(100), VecDeque::new());
        (0..5).for_each(|number| put(&mailbox, &load, number).unwrap());
        assert!(mailbox.take(&mut hand, 3, &load));
        assert_eq!(hand.pop_front(), Some(0));
        put(&mailbox, &load, 5).unwrap();
        mailbox.put_back(&mut hand);
        assert!(mailbox.take(&mut hand, 9, &load));
        assert_eq!(hand, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_token_is_asked_for_where_there_is_none() {
        let (mailbox, load, mut hand) = (Mailbox::new(9, 0), Load::new(100), VecDeque::new());
        let has_token = |mailbox: &Mailbox<u32>| {
            let told = Cell::new(None);
            mailbox.put(0, 0, |value, _| value, Outside(&load, &told, true)).unwrap();
            told.get().expect("asked")
        };
        assert_eq!([has_token(&mailbox), has_token(&mailbox)], [false, true]);
        assert!(mailbox.take(&mut hand, 9, &load));
        assert!(has_token(&mailbox), "the thread will look again");
        hand.clear();
        assert!(mailbox.take(&mut hand, 9, &load));
        hand.clear();
        assert!(!mailbox.take(&mut hand, 9, &load));
        assert!(!has_token(&mailbox));
    }

    /// Places that were taken ahead come back, whatever becomes of the mailbox; and near the bound none is taken ahead.
    #[test]
    fn no_place_at_the_dispatcher_is_lost() {
        let (mailbox, load, mut hand) = (Mailbox::new(1_000, 0), Load::new(10_000), VecDeque::new());
        (0..100).for_each(|number| put(&mailbox, &load, number).unwrap());
        let taken = load.account().outstanding;
        assert!((100..100 + AHEAD as u64).contains(&taken), "{taken}");
        assert!(mailbox.take(&mut hand, 1_000, &load));
        hand.clear();
        assert!(!mailbox.take(&mut hand, 1_000, &load));
        assert_eq!(load.account().outstanding, 100, "of those that have not left");

        let (mailbox, load) = (Mailbox::new(1_000, 0), Load::new(20));
        (0..20).for_each(|number| put(&mailbox, &load, number).unwrap());
        assert_eq!(put(&mailbox, &load, 20), Err(Shut::DispatcherFull));

        let (mailbox, load) = (Mailbox::new(1_000, 0), Load::new(20));
        let refused = mailbox.put(7, 0, |value, _| value, Outside(&load, &Cell::new(None), false));
        assert_eq!((refused, load.account().outstanding), (Err((7, Shut::Over)), 0));
    }

    #[test]
    fn one_in_so_many_is_timed() {
        let (mailbox, load) = (Mailbox::new(100, 2), Load::new(100));
        let timed = |one_in| {
            let mut timed = false;
            let seal = |value, this| {
                timed = this;
                value
            };
            mailbox.put(0, one_in, seal, Outside(&load, &Cell::new(None), true)).unwrap();
            timed
        };
        let times: Vec<bool> = (0..8).map(|_| timed(3)).collect();
        assert_eq!(times, [false, false, true, false, false, true, false, false]);
        assert!(!timed(0));
    }
}
