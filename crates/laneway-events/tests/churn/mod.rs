//! A churn: threads that register, post, become, broadcast, schedule, ask and stop, all at random, from one printed seed, and check what must hold.
//!
//! `tests/soak.rs` runs it for ten seconds, `examples/churn.rs` for as long as asked. What is checked all the time: the events of a processor are
//! contiguous per poster and never two at once; a broadcast's answer adds up; every schedule ends in the way that its
//! cancel said. At the end of each lap, when the system is quiet: everything that was accepted was handled, or came back from a stop; no processor, channel,
//! schedule or event is left over; and the account balances. A lap that does not end in time is a deadlock, and is reported as one.
//!
//! The choices of a thread follow from the seed; how the threads interleave does not.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use fastrand::Rng;
use laneway_events::{
    Become, Context, Events, EventsConfig, Handle, Handled, ProcessorRef, Reply, ScheduleEnd, Stopping,
};

/// A lap takes well under a second; one that takes this long never ends.
const LAP_DEADLINE: Duration = Duration::from_secs(60);

/// Operations of each thread in a lap.
const OPERATIONS: u32 = 3_000;

/// Threads that operate.
const HANDS: u64 = 3;

const CHANNELS: [&str; 3] = ["red", "green", "blue"];

/// What is alive, for leaks: each event holds one of these.
type Life = Arc<()>;

/// What travels.
#[derive(Clone)]
enum Event {
    /// The next one of this poster to this processor.
    Numbered {
        poster: u64,
        number: u64,
        _life: Life,
    },
    /// From a broadcast, a schedule or another handler.
    Loose {
        _life: Life,
    },
    /// Changes the handler.
    Become {
        stacked: bool,
    },
    Unbecome,
    /// Is answered.
    Ask(Arc<Mutex<Option<Reply<u64>>>>),
    /// Makes the handler stop itself.
    Stop,
    /// Makes the handler register somebody, post to it, and stop it.
    Spawn {
        _life: Life,
    },
    /// Panics.
    Fail {
        _life: Life,
    },
}

/// What the handlers of one processor, whichever they are, know.
#[derive(Default)]
struct Book {
    inside: AtomicBool,
    /// The next number of each poster.
    next: Mutex<HashMap<u64, u64>>,
    handled: AtomicU64,
}

/// What came of a churn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) laps: u64,
    pub(crate) operations: u64,
    pub(crate) handled: u64,
    pub(crate) returned: u64,
    pub(crate) refused: u64,
    pub(crate) cancelled: u64,
}

/// Runs laps until the time is over. `after_lap` is told of each.
pub(crate) fn run(seed: u64, limit: Duration, mut after_lap: impl FnMut(&Tally)) -> Tally {
    let (began, mut tally) = (Instant::now(), Tally::default());
    while tally.laps == 0 || began.elapsed() < limit {
        // In a thread of its own, so that a deadlock is seen.
        let (tell, told) = channel();
        let lap_seed = seed.wrapping_add(tally.laps.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        thread::spawn(move || tell.send(lap(lap_seed)).is_ok());
        match told.recv_timeout(LAP_DEADLINE) {
            Ok(done) => {
                tally.laps += 1;
                tally.operations += done.operations;
                tally.handled += done.handled;
                tally.returned += done.returned;
                tally.refused += done.refused;
                tally.cancelled += done.cancelled;
            }
            Err(RecvTimeoutError::Disconnected) => {
                panic!("lap {} of seed {seed} failed: see above", tally.laps)
            }
            Err(RecvTimeoutError::Timeout) => {
                panic!("lap {} of seed {seed} has not ended within {LAP_DEADLINE:?}: a deadlock", tally.laps)
            }
        }
        after_lap(&tally);
    }
    tally
}

/// A system from its start to its shutdown.
fn lap(seed: u64) -> Tally {
    let mut rng = Rng::with_seed(seed);
    let names = ["", "api", "batch"];
    let threads = rng.usize(1..=4);
    let mut row = || (0..3).filter(|_| rng.bool()).map(|place| names[place]).collect::<Vec<_>>();
    let mut rows: Vec<Vec<&str>> = (0..threads).map(|_| row()).filter(|row| !row.is_empty()).collect();
    rows.push(names.to_vec());
    let failed = Arc::new(AtomicU64::new(0));
    let counts = failed.clone();
    let config =
        EventsConfig { dispatcher_capacity: 2_000, latency_sampling: 8, ..EventsConfig::assigned(rows) };
    let report = move |report: laneway_events::Report| {
        // Only what was meant to fail may.
        assert!(report.to_string().ends_with("panicked: meant to"), "{report}");
        counts.fetch_add(1, SeqCst);
    };
    let events = Events::builder(config).on_report(report).start().expect("a valid system");
    let life: Life = Arc::new(());
    let hands: Vec<_> = (0..HANDS)
        .map(|hand| {
            let mut hand = Hand::new(hand, seed ^ (hand + 1), events.handle(), life.clone());
            thread::spawn(move || {
                (0..OPERATIONS).for_each(|_| hand.operate());
                hand.leave()
            })
        })
        .collect();
    let mut tally = Tally::default();
    for hand in hands {
        let done = hand.join().expect("a hand that found nothing wrong");
        tally.operations += u64::from(OPERATIONS);
        tally.returned += done.returned;
        tally.refused += done.refused;
        tally.cancelled += done.cancelled;
    }
    assert!(events.wait_quiet(LAP_DEADLINE), "quiet");
    // A thread of the scheduler counts off what has ended by firing after it has told who waits for that.
    let quiet_since = Instant::now();
    while events.snapshot().schedules > 0 && quiet_since.elapsed() < LAP_DEADLINE {
        thread::yield_now();
    }
    let snapshot = events.snapshot();
    assert!(snapshot.account.balances(), "{}", snapshot.account);
    assert_eq!(snapshot.account.outstanding, 0, "nothing is left over");
    assert_eq!(snapshot.account.failed, failed.load(SeqCst), "each failure was reported");
    assert_eq!((snapshot.processors, snapshot.channels, snapshot.schedules), (0, 0, 0), "all have gone");
    tally.handled = snapshot.account.done;
    let report = events.shutdown(LAP_DEADLINE);
    assert!(report.returned.is_empty() && report.still_running == 0);
    assert_eq!(Arc::strong_count(&life), 1, "no event is left over");
    tally
}

/// A processor that a hand has registered.
struct Mine {
    processor: ProcessorRef<Event>,
    book: Arc<Book>,
    /// What this hand has posted to it.
    posted: u64,
}

/// One thread's part.
struct Hand {
    number: u64,
    rng: Rng,
    events: Handle,
    life: Life,
    mine: Vec<Mine>,
    schedules: Vec<laneway_events::Schedule>,
    returned: u64,
    refused: u64,
    cancelled: u64,
}

impl Hand {
    fn new(number: u64, seed: u64, events: Handle, life: Life) -> Self {
        let (mine, schedules) = (Vec::new(), Vec::new());
        let rng = Rng::with_seed(seed);
        Hand { number, rng, events, life, mine, schedules, returned: 0, refused: 0, cancelled: 0 }
    }

    fn operate(&mut self) {
        match self.rng.u32(..100) {
            0..3 => self.register(),
            3..5 => self.stop(),
            5..10 => self.broadcast(),
            10..15 => self.subscribe(),
            15..22 => self.schedule(),
            22..26 => self.cancel(),
            26..28 => self.ask(),
            28..32 => self.request(),
            32..36 => self.post_other(),
            _ => self.post(),
        }
    }

    fn register(&mut self) {
        if self.mine.len() >= 12 {
            return;
        }
        let book = Arc::new(Book::default());
        let dispatcher = ["", "api", "batch"][self.rng.usize(..3)];
        let registration = self.events.anonymous().dispatcher(dispatcher).queue_size(self.rng.usize(1..200));
        let registration = registration.subscribe(&CHANNELS[..self.rng.usize(..=3)]);
        let processor = registration.handle(handler(book.clone())).expect("nothing is in the way");
        self.mine.push(Mine { processor, book, posted: 0 });
    }

    fn some(&mut self) -> Option<&mut Mine> {
        let count = self.mine.len();
        if count == 0 { None } else { self.mine.get_mut(self.rng.usize(..count)) }
    }

    fn post(&mut self) {
        let (poster, life) = (self.number, self.life.clone());
        let Some(mine) = self.some() else { return };
        let event = Event::Numbered { poster, number: mine.posted, _life: life };
        match mine.processor.post(event) {
            Ok(()) => mine.posted += 1,
            Err(refused) => {
                assert!(refused.reason.is_full() || mine.processor.is_stopped(), "{refused}");
                self.refused += 1;
            }
        }
    }

    fn post_other(&mut self) {
        let life = self.life.clone();
        let event = match self.rng.u32(..6) {
            0 => Event::Become { stacked: true },
            1 => Event::Become { stacked: false },
            2 => Event::Unbecome,
            3 => Event::Spawn { _life: life },
            4 => Event::Fail { _life: life },
            _ if self.rng.u32(..8) == 0 => Event::Stop,
            _ => Event::Loose { _life: life },
        };
        // By id, as others do who do not know the reference.
        if let Some(id) = self.some().map(|mine| mine.processor.id().to_owned()) {
            let posted = self.events.post_to(&id, event).is_ok();
            self.refused += u64::from(!posted);
        }
    }

    fn request(&mut self) {
        let choice = self.rng.u32(..3);
        if let Some(mine) = self.some() {
            let handler = handler(mine.book.clone());
            let _ = match choice {
                0 => mine.processor.request_become(handler, Become::Stacked),
                1 => mine.processor.request_become(handler, Become::Instead),
                _ => mine.processor.request_unbecome(),
            };
        }
    }

    fn ask(&mut self) {
        let Some(mine) = self.some() else { return };
        let before = mine.book.handled.load(SeqCst);
        let asked = mine.processor.ask(LAP_DEADLINE, |reply| Event::Ask(Arc::new(Mutex::new(Some(reply)))));
        if let Ok(handled) = asked {
            assert!(handled >= before, "it has handled what it had handled");
        }
    }

    fn broadcast(&mut self) {
        let channel = CHANNELS[self.rng.usize(..3)];
        let broadcast = self.events.broadcast(&[channel], Event::Loose { _life: self.life.clone() });
        self.refused += broadcast.not_delivered.len() as u64;
    }

    fn subscribe(&mut self) {
        let (events, choice) = (self.events.clone(), self.rng.u32(..4));
        let channels = &CHANNELS[self.rng.usize(..3)..];
        let Some(mine) = self.some() else { return };
        let now = match choice {
            0 => events.subscribe(&mine.processor, channels),
            1 => events.set_subscriptions(&mine.processor, channels),
            2 => events.unsubscribe(&mine.processor, channels),
            _ => {
                events.unsubscribe_all(&mine.processor);
                events.subscriptions(&mine.processor)
            }
        };
        // Nobody else changes this one's; it may have stopped itself.
        let stopped = mine.processor.is_stopped();
        let fine = match choice {
            0 | 1 => stopped || channels.iter().all(|channel| now.contains(*channel)),
            _ => channels.iter().all(|channel| !now.contains(*channel)),
        };
        assert!(fine, "{now:?}");
    }

    fn schedule(&mut self) {
        let (events, life) = (self.events.clone(), self.life.clone());
        let (delay, each) = (Duration::from_micros(self.rng.u64(..2_000)), self.rng.u32(..4) == 0);
        let Some(mine) = self.some() else { return };
        let schedule = if each {
            let interval = delay.max(Duration::from_micros(50));
            events.schedule_each(&mine.processor, interval, move || Event::Loose { _life: life.clone() }).ok()
        } else {
            events.schedule(&mine.processor, delay, Event::Loose { _life: life }).ok()
        };
        self.schedules.extend(schedule);
    }

    fn cancel(&mut self) {
        if self.schedules.is_empty() {
            return;
        }
        let place = self.rng.usize(..self.schedules.len());
        let schedule = self.schedules.swap_remove(place);
        let (cancelled, posted) = (schedule.cancel(), schedule.posted());
        let end = schedule.end().expect("it has ended: by the cancel, or before");
        assert_eq!(cancelled, end == ScheduleEnd::Cancelled, "{end:?}");
        self.cancelled += u64::from(cancelled);
        if cancelled {
            thread::yield_now();
            assert_eq!(schedule.posted(), posted, "it has fired after its cancel");
        }
    }

    fn stop(&mut self) {
        if self.mine.is_empty() {
            return;
        }
        let mine = self.mine.swap_remove(self.rng.usize(..self.mine.len()));
        let drain = if self.rng.bool() { Duration::ZERO } else { LAP_DEADLINE };
        self.stop_one(mine, drain);
    }

    fn stop_one(&mut self, mine: Mine, drain: Duration) {
        let report = mine.processor.stop(drain);
        assert_eq!(report.stopping, Stopping::Stopped);
        let mut next = mine.book.next.lock().unwrap().get(&self.number).copied().unwrap_or(0);
        for event in &report.returned {
            if let Event::Numbered { number, poster, .. } = event {
                assert_eq!(
                    (*poster, *number),
                    (self.number, next),
                    "given back in order, after what was handled"
                );
                next += 1;
            }
        }
        // One that has stopped itself has handled what it had.
        assert_eq!(next, mine.posted, "handled or given back, each of them");
        assert!(mine.processor.post(Event::Unbecome).is_err() && mine.processor.depth() == 0);
        self.returned += report.returned.len() as u64;
    }

    /// Stops and cancels all that this hand has made.
    fn leave(mut self) -> Tally {
        while !self.schedules.is_empty() {
            self.cancel();
        }
        while let Some(mine) = self.mine.pop() {
            self.stop_one(mine, LAP_DEADLINE);
        }
        let Hand { returned, refused, cancelled, .. } = self;
        Tally { returned, refused, cancelled, ..Tally::default() }
    }
}

/// A handler that writes into the book of its processor.
fn handler(book: Arc<Book>) -> impl FnMut(&mut Context<'_, Event>, Event) -> Handled<Event> + Send + 'static {
    move |context, event| {
        assert!(!book.inside.swap(true, SeqCst), "two events of one processor at once");
        let fails = handle(&book, context, event);
        book.handled.fetch_add(1, SeqCst);
        assert!(book.inside.swap(false, SeqCst));
        if fails {
            // A panic that nobody has to read about.
            std::panic::resume_unwind(Box::new("meant to"));
        }
        Handled::Done
    }
}

fn handle(book: &Arc<Book>, context: &mut Context<'_, Event>, event: Event) -> bool {
    match event {
        Event::Numbered { poster, number, .. } => {
            let mut next = book.next.lock().unwrap();
            let next = next.entry(poster).or_default();
            assert_eq!(number, *next, "the next of poster {poster}");
            *next += 1;
        }
        Event::Loose { .. } => {}
        Event::Become { stacked: true } => context.become_stacked(handler(book.clone())),
        Event::Become { stacked: false } => context.become_instead(handler(book.clone())),
        Event::Unbecome => {
            context.unbecome();
        }
        Event::Ask(reply) => {
            let reply = reply.lock().unwrap().take().expect("asked once");
            reply.send(book.handled.load(SeqCst));
        }
        Event::Stop => context.stop(),
        Event::Spawn { _life: life } => {
            let dispatcher = context.dispatcher().to_owned();
            let child = context.events().anonymous().dispatcher(dispatcher).parent(&context.me());
            // Refused while the system is full, which is fine.
            if let Ok(child) = child.handle(|_, _: Life| ()) {
                let _ = child.post(life);
                assert_eq!(child.stop(LAP_DEADLINE).stopping, Stopping::Draining);
            }
        }
        Event::Fail { .. } => return true,
    }
    false
}
