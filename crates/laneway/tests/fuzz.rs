//! Programs made of bytes, against invariants: whatever is done to an engine from several threads at once, no message is lost, doubled or out of order.
//!
//! Each round draws an engine (topology, bounds, policies, flows) and a program for each of three threads from a seed: submissions of all kinds,
//! operators at work, and changes of the topology. At the end every message that was ever submitted must have exactly one fate, and no message
//! may have begun, or come back, before one that it was behind ([`Line`] says what that means where messages are dropped, skipped and put
//! aside). `LANEWAY_FUZZ_SECONDS` says how long (2 if it is not set), `LANEWAY_FUZZ_SEED` runs one seed; a failure prints
//! its seed. Threads make no two runs alike, so a seed gives the program back, not the interleaving: that is what the simulator is for.

mod witness;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use laneway::{
    Bound, Cancel, Engine, Exhausted, Flows, Handle, Message, Outcome, Overflow, Priority, RetryPolicy,
    Topology,
};
use witness::{DEADLINE, within};

/// Bytes from a seed (SplitMix64): the same program for the same seed.
struct Bytes(u64);

impl Bytes {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize].clone()
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fate {
    Done,
    Failed,
    Dropped,
    Refused,
    Returned,
}

/// The fate of every message, by key and number; two fates are one too many.
#[derive(Default)]
struct Fates(Mutex<HashMap<(u64, u64), Vec<Fate>>>);

impl Fates {
    fn note(&self, key: u64, number: u64, fate: Fate) {
        self.0.lock().unwrap().entry((key, number)).or_default().push(fate);
    }

    fn take(&self) -> HashMap<(u64, u64), Vec<Fate>> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// What a handler leaves a message to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    /// It is done, or given up.
    Gone,
    /// It is to come again, and its lane waits, or is parked, in front of it.
    Standing,
    /// It was parked alone; the lane goes on.
    Aside,
}

/// A message that has begun and is not gone.
#[derive(Clone, Copy, Debug)]
struct Left {
    number: u64,
    /// How many resumes of its key had ended when its handler did.
    resumes: u64,
}

/// The messages of one key, as their handlers see them, which are numbered in the order of submission.
///
/// There are gaps: messages are refused, dropped, skipped and withdrawn. What holds is that a message begins only when all that are in front of it
/// are gone, so that whatever is overtaken must never be seen again. In front of a message are
///
/// - if it has not begun yet, all with a smaller number that have not begun either, and all that stand: what was not begun keeps its order, and
///   what comes again comes before it;
/// - if it stands, those that began to stand after it, since what comes again goes to the very front;
/// - if it was put aside, those that stand, unless an operator may have resumed the lane since they do; and those that were put aside before it, if
///   one resume brought both back.
///
/// What was put aside is in front of nothing else: how far a turn had come when a resume brought it back cannot be seen from here. But it comes back by
/// a resume only.
#[derive(Debug, Default)]
struct Line {
    /// Whatever has a smaller number has begun, or must never begin.
    next: u64,
    in_flight: Option<u64>,
    /// The last one is in front.
    standing: Vec<Left>,
    /// In the order in which they were put aside.
    aside: Vec<Left>,
    resumes_begun: u64,
    resumes_ended: u64,
    wrong: Vec<String>,
}

impl Line {
    /// A handler begins with this message.
    fn begin(&mut self, number: u64) {
        if let Some(other) = self.in_flight.replace(number) {
            self.wrong.push(format!("{number} began while {other} was in flight"));
        }
        match place(&self.aside, number) {
            Some(place) => self.pass_aside(place),
            None => self.pass(number),
        }
    }

    /// It ends. Before the engine knows, so that whatever begins afterwards finds it noted.
    fn end(&mut self, leaves: Leaves) {
        let Some(number) = self.in_flight.take() else { return };
        let left = Left { number, resumes: self.resumes_ended };
        match leaves {
            Leaves::Gone => {}
            Leaves::Standing => self.standing.push(left),
            Leaves::Aside => self.aside.push(left),
        }
    }

    /// The engine gives this message back unhandled. What is aside comes back with the others, and needs no resume for it.
    fn take_back(&mut self, number: u64) {
        if let Some(other) = self.in_flight {
            self.wrong.push(format!("{number} came back while {other} was in flight"));
        }
        match place(&self.aside, number) {
            Some(place) => drop(self.aside.remove(place)),
            None => self.pass(number),
        }
    }

    /// All of the key has been taken back: nothing of it may be seen again but what is submitted from now on.
    fn is_empty_before(&mut self, next: u64) {
        self.standing.clear();
        self.aside.clear();
        self.next = next;
    }

    /// A message that is not aside comes before all that is to come.
    fn pass(&mut self, number: u64) {
        if number >= self.next {
            self.next = number + 1;
            self.standing.clear();
        } else if let Some(place) = place(&self.standing, number) {
            self.standing.truncate(place);
        } else {
            let Line { next, standing, aside, .. } = self;
            self.wrong.push(format!(
                "{number} came twice, or too late: {next} was next, or of {standing:?} the last, or one of {aside:?}"
            ));
        }
    }

    /// A message that was aside comes.
    fn pass_aside(&mut self, place: usize) {
        let begun = self.resumes_begun;
        let Left { number, resumes } = self.aside.remove(place);
        if begun == resumes {
            self.wrong.push(format!("{number} was put aside, and came although nobody had resumed its lane"));
        }
        let mut at = 0;
        self.aside.retain(|left| {
            at += 1;
            at > place || begun > left.resumes + 1
        });
        self.standing.retain(|left| begun > left.resumes);
    }
}

fn place(of: &[Left], number: u64) -> Option<usize> {
    of.iter().position(|left| left.number == number)
}

/// All keys.
struct Lines(Vec<Mutex<Line>>);

impl Lines {
    fn new() -> Arc<Self> {
        Arc::new(Lines((0..THREADS * KEYS_EACH).map(|_| Mutex::default()).collect()))
    }

    fn of(&self, key: u64) -> MutexGuard<'_, Line> {
        self.0[key as usize].lock().unwrap()
    }

    /// What was wrong, by key.
    fn wrong(&self) -> Vec<(u64, Vec<String>)> {
        let wrong = (0..).zip(&self.0).map(|(key, line)| (key, line.lock().unwrap().wrong.clone()));
        wrong.filter(|(_, wrong)| !wrong.is_empty()).collect()
    }
}

const THREADS: u64 = 3;
const KEYS_EACH: u64 = 6;
const STEPS: u64 = 120;
const ATTEMPTS: u32 = 3;

fn topology(bytes: &mut Bytes) -> Topology<u64> {
    match bytes.below(4) {
        0 => Topology::pool(1 + bytes.below(6) as usize),
        1 => Topology::partitioned(1 << bytes.below(3), 1 + bytes.below(2) as usize),
        2 => Topology::per_worker(1 + bytes.below(3) as usize),
        _ => Topology::builder()
            .dispatcher("a")
            .dispatcher("b")
            .worker("x", ["a", "b"])
            .worker("y", ["b", "a"])
            .build(),
    }
}

fn policy(bytes: &mut Bytes) -> Overflow {
    let brief = Overflow::BlockFor(Duration::from_millis(2));
    bytes.pick(&[Overflow::Reject, Overflow::DropNewest, Overflow::DropOldest, brief])
}

/// A message counts how often it was tried, patience included, so that none is held for ever.
#[derive(Debug)]
struct Body {
    number: u64,
    calls: u64,
}

/// What is drawn for all of a round. A worker streams only while nothing is urgent, and for long only while little fails.
#[derive(Clone, Copy)]
struct Round {
    seed: u64,
    /// All messages have the same priority.
    is_level: bool,
    /// One message in so many meets with each kind of trouble.
    trouble: u64,
}

impl Round {
    fn draw(seed: u64, bytes: &mut Bytes) -> Self {
        Round { seed, is_level: bytes.below(2) == 0, trouble: bytes.pick(&[24, 24, 240]) }
    }
}

/// What the handler decides about a message, by its key, its number and how often it has come; nothing where it panics.
fn decide(round: Round, key: u64, body: &mut Body) -> Option<Outcome> {
    body.calls += 1;
    let mut dice = Bytes(round.seed ^ (key << 32) ^ body.number ^ (body.calls << 48));
    Some(match dice.below(round.trouble) {
        0 => Outcome::Skip,
        1 => Outcome::Park,
        2 => Outcome::ParkLane,
        3..=5 => Outcome::RetryAfter(Duration::from_micros(dice.below(200))),
        6 => Outcome::Hold(Duration::from_micros(dice.below(100))),
        7 => Outcome::Failed("so it was drawn".to_owned()),
        8 => return None,
        _ => Outcome::Done,
    })
}

/// What that leaves the message to, at this attempt.
fn leaves(outcome: Option<&Outcome>, attempt: u32, exhausted: Exhausted) -> Leaves {
    match outcome {
        Some(Outcome::Done | Outcome::Skip) => Leaves::Gone,
        Some(Outcome::Park) => Leaves::Aside,
        Some(Outcome::ParkLane | Outcome::Hold(_)) => Leaves::Standing,
        _ if attempt < ATTEMPTS => Leaves::Standing,
        _ => match exhausted {
            Exhausted::Skip => Leaves::Gone,
            Exhausted::ParkMessage => Leaves::Aside,
            Exhausted::ParkLane => Leaves::Standing,
        },
    }
}

fn build(round: Round, bytes: &mut Bytes, lines: &Arc<Lines>, fates: &Arc<Fates>) -> Engine<u64, Body> {
    let (lines, done) = (lines.clone(), fates.clone());
    let (failed, dropped) = (fates.clone(), fates.clone());
    let exhausted = bytes.pick(&[Exhausted::Skip, Exhausted::ParkMessage, Exhausted::ParkLane]);
    let retry = RetryPolicy {
        max_attempts: ATTEMPTS,
        base: Duration::from_micros(50),
        exhausted,
        ..RetryPolicy::default()
    };
    let mut builder = Engine::builder()
        .topology(topology(bytes))
        .worker_queue_capacity(1 + bytes.below(64) as usize)
        .ingress_capacity(1 + bytes.below(128) as usize)
        .control_reserve(bytes.below(4) as usize)
        .batch_max(1 + bytes.below(8) as usize)
        .overflow(policy(bytes))
        .retry(retry)
        .shutdown_grace(Duration::from_secs(10))
        .on_fail(move |message: Message<u64, Body>, _| {
            failed.note(message.key, message.body.number, Fate::Failed)
        })
        .on_drop(move |message: Message<u64, Body>, _| {
            dropped.note(message.key, message.body.number, Fate::Dropped)
        })
        .handle(move |context, body: &mut Body| {
            let key = *context.key();
            lines.of(key).begin(body.number);
            let outcome = decide(round, key, body);
            if outcome == Some(Outcome::Done) {
                done.note(key, body.number, Fate::Done);
            }
            lines.of(key).end(leaves(outcome.as_ref(), context.attempt(), exhausted));
            outcome.unwrap_or_else(|| panic!("so it was drawn"))
        });
    if bytes.below(3) == 0 {
        builder = builder.lane_capacity(1 + bytes.below(8) as usize);
    }
    if bytes.below(3) == 0 {
        let lanes = policy(bytes);
        let lanes = if lanes == Overflow::DropOldest { Overflow::Reject } else { lanes };
        builder = builder.lanes_max(1 + bytes.below(16) as usize).overflow_at(Bound::Lanes, lanes);
    }
    if bytes.below(2) == 0 {
        builder = builder.flows(Flows { time_to_live: Duration::from_millis(1), max: 64 });
    }
    builder.build().expect("every engine that is drawn is valid")
}

/// One thread's program.
fn run_program(
    handle: &Handle<u64, Body>,
    thread: u64,
    round: Round,
    bytes: &mut Bytes,
    lines: &Lines,
    fates: &Fates,
) -> u64 {
    let mut next = 0;
    let cancelled = Cancel::new();
    cancelled.cancel();
    for _ in 0..STEPS {
        let key = thread * KEYS_EACH + bytes.below(KEYS_EACH);
        let message = |number, bytes: &mut Bytes| {
            let body = Body { number, calls: 0 };
            let message = match bytes.below(8) {
                0 => Message::start(key, body),
                1 => Message::finish(key, body),
                _ => Message::new(key, body),
            };
            let tiers = [Priority::Normal, Priority::Normal, Priority::Low, Priority::High, Priority::Urgent];
            if round.is_level { message } else { message.priority(bytes.pick(&tiers)) }
        };
        match bytes.below(40) {
            0 => drop(handle.park(&key, "drawn")),
            1..=3 => resume(handle, key, lines),
            4 => drop(handle.skip_head(&key)),
            5 => drop(handle.explain(&key)),
            6 => drop(handle.lanes_by_depth(3)),
            7 => assert!(handle.snapshot().account.balances()),
            8 => drop(pause_one(handle, bytes)),
            9 => change(handle, thread, bytes),
            39 => withdraw(handle, key, next, lines, fates),
            10..=12 => {
                let count = 1 + bytes.below(20);
                let batch: Vec<_> = (next..next + count).map(|number| message(number, bytes)).collect();
                next += count;
                let report = handle.submit_batch(batch);
                report
                    .refused
                    .into_iter()
                    .for_each(|r| fates.note(r.message.key, r.message.body.number, Fate::Refused));
            }
            kind => {
                let message = message(next, bytes);
                next += 1;
                let answer = match kind {
                    13 => handle.submit_unless(message, &cancelled),
                    14..=16 => handle.try_submit(message),
                    _ => handle.submit(message),
                };
                if let Err(refused) = answer {
                    fates.note(refused.message.key, refused.message.body.number, Fate::Refused);
                }
            }
        }
    }
    next
}

fn resume(handle: &Handle<u64, Body>, key: u64, lines: &Lines) {
    lines.of(key).resumes_begun += 1;
    handle.resume(&key);
    lines.of(key).resumes_ended += 1;
}

/// Nobody else submits to this key, so nothing of it begins before what has come back is noted.
fn withdraw(handle: &Handle<u64, Body>, key: u64, next: u64, lines: &Lines, fates: &Fates) {
    let Some(messages) = handle.withdraw(&key) else { return };
    let mut line = lines.of(key);
    for Message { body, .. } in messages {
        line.take_back(body.number);
        // So it counts in the account.
        fates.note(key, body.number, Fate::Dropped);
    }
    line.is_empty_before(next);
}

fn pause_one(handle: &Handle<u64, Body>, bytes: &mut Bytes) -> Option<()> {
    let names: Vec<String> =
        handle.snapshot().dispatchers.into_iter().map(|dispatcher| dispatcher.name).collect();
    let name = names.get(bytes.below(names.len() as u64) as usize)?;
    handle.pause(name);
    thread::yield_now();
    handle.unpause(name);
    Some(())
}

/// Something of this thread's own comes or goes. Whether it can is left to the state that the threads have brought about.
fn change(handle: &Handle<u64, Body>, thread: u64, bytes: &mut Bytes) {
    let (worker, dispatcher) = (format!("w{thread}"), format!("d{thread}"));
    let first = handle.snapshot().dispatchers[0].name.clone();
    let _ = match bytes.below(5) {
        0 => handle.add_worker(&worker, &[&first]),
        1 => handle.add_dispatcher(&dispatcher, &[&worker]),
        2 => handle.remove_dispatcher(&dispatcher),
        3 => handle.reassign_worker(&worker, &[&first, &dispatcher]),
        _ => handle.remove_worker(&worker),
    };
}

/// One engine, three programs, and the reckoning.
fn round(seed: u64) {
    let mut bytes = Bytes(seed);
    let (lines, fates) = (Lines::new(), Arc::new(Fates::default()));
    let round = Round::draw(seed, &mut bytes);
    let engine = build(round, &mut bytes, &lines, &fates);
    let seeds: Vec<u64> = (0..THREADS).map(|_| bytes.next()).collect();
    let submitted: Vec<u64> = thread::scope(|scope| {
        let start = |(thread, seed): (u64, u64)| {
            let (handle, lines, fates) = (engine.handle(), lines.clone(), fates.clone());
            scope.spawn(move || run_program(&handle, thread, round, &mut Bytes(seed), &lines, &fates))
        };
        let threads: Vec<_> = (0..).zip(seeds).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no program fails")).collect()
    });
    assert!(engine.wait_quiet(DEADLINE), "stalled: {}", describe(&engine));
    let drain = Duration::from_millis(bytes.below(2) * 1_000);
    let report = engine.shutdown(drain);
    assert!(report.account.balances(), "{}", report.account);
    assert_eq!(report.still_running, 0);
    assert_eq!(report.account.outstanding as usize, report.returned.len());
    for Message { key, body, .. } in &report.returned {
        lines.of(*key).take_back(body.number);
        fates.note(*key, body.number, Fate::Returned);
    }
    assert!(lines.wrong().is_empty(), "{:#?}", lines.wrong());
    let fates = fates.take();
    assert_eq!(fates.len() as u64, submitted.iter().sum::<u64>(), "every message has a fate");
    let twice: Vec<_> = fates.iter().filter(|(_, fates)| fates.len() != 1).collect();
    assert!(twice.is_empty(), "and only one: {twice:?}");
    let count = |fate: Fate| fates.values().filter(|of| of[0] == fate).count() as u64;
    let account = report.account;
    assert_eq!(
        (account.done, account.failed, account.dropped),
        (count(Fate::Done), count(Fate::Failed), count(Fate::Dropped))
    );
    assert_eq!(account.accepted, fates.len() as u64 - count(Fate::Refused));
}

/// Where everything is, and why.
fn describe(engine: &Engine<u64, Body>) -> String {
    let snapshot = engine.snapshot();
    let mut text = snapshot.account.to_string();
    for d in &snapshot.dispatchers {
        let states = (d.active_lanes, d.running_lanes, d.deferred_lanes, d.parked_lanes);
        text += &format!("\n{:?}: lanes, running, deferred, parked {states:?}, paused {}", d.name, d.paused);
    }
    for (key, depth) in engine.lanes_by_depth(5) {
        let why = engine.explain(&key).map(|explanation| explanation.to_string());
        text += &format!("\n{key}, {depth} deep: {}", why.unwrap_or_default());
    }
    text
}

#[test]
fn every_message_has_one_fate_and_none_overtakes_another() {
    quiet_expected_panics();
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let mut seeds = Bytes(Instant::now().elapsed().as_nanos() as u64 ^ u64::from(std::process::id()) << 32);
    let one = number("LANEWAY_FUZZ_SEED");
    let until = Instant::now() + Duration::from_secs(number("LANEWAY_FUZZ_SECONDS").unwrap_or(2));
    let mut rounds = 0;
    while rounds == 0 || (one.is_none() && Instant::now() < until) {
        let seed = one.unwrap_or_else(|| seeds.next());
        let result = std::panic::catch_unwind(|| within(2 * DEADLINE, "the round ends", move || round(seed)));
        assert!(result.is_ok(), "LANEWAY_FUZZ_SEED={seed} runs the program again that failed");
        rounds += 1;
    }
    println!("{rounds} rounds");
}

/// Handles these one after the other; a number that comes behind a `None` comes after a resume.
fn line(steps: &[Option<(u64, Leaves)>]) -> Line {
    let mut line = Line::default();
    for step in steps {
        match *step {
            Some((number, leaves)) => {
                line.begin(number);
                line.end(leaves);
            }
            None => {
                line.resumes_begun += 1;
                line.resumes_ended += 1;
            }
        }
    }
    line
}

#[test]
fn what_may_follow_is_not_taken_for_a_mistake() {
    use Leaves::{Aside, Gone, Standing};
    for steps in [
        &[Some((0, Gone)), Some((3, Gone))][..],
        &[Some((0, Standing)), Some((0, Standing)), Some((0, Gone)), Some((1, Gone))],
        &[Some((0, Standing)), Some((1, Gone))],
        &[Some((0, Aside)), Some((1, Gone)), None, Some((0, Gone)), Some((2, Gone))],
        &[Some((0, Aside)), Some((1, Standing)), None, Some((0, Standing)), Some((0, Gone)), Some((1, Gone))],
        &[Some((0, Aside)), None, Some((1, Aside)), None, Some((1, Gone)), Some((0, Gone))],
    ] {
        assert_eq!(line(steps).wrong, [""; 0], "{steps:?}");
    }
}

#[test]
fn what_overtakes_or_comes_twice_is_seen() {
    use Leaves::{Aside, Gone, Standing};
    for steps in [
        &[Some((1, Gone)), Some((0, Gone))][..],
        &[Some((0, Gone)), Some((0, Gone))],
        &[Some((0, Standing)), Some((1, Gone)), Some((0, Gone))],
        &[Some((0, Aside)), Some((1, Gone)), Some((0, Gone))],
        &[Some((0, Aside)), None, Some((1, Standing)), Some((0, Gone)), Some((1, Gone))],
        &[Some((0, Aside)), Some((1, Aside)), None, Some((1, Gone)), Some((0, Gone))],
    ] {
        assert_eq!(line(steps).wrong.len(), 1, "{steps:?}");
    }
    let mut busy = Line::default();
    busy.begin(0);
    busy.begin(1);
    busy.take_back(2);
    assert_eq!(busy.wrong.len(), 2, "two at once, and one that comes back meanwhile");
}

/// Handlers panic because it was drawn; that need not be printed thousands of times.
fn quiet_expected_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<&str>() != Some(&"so it was drawn") {
            usual(info);
        }
    }));
}
