//! Programs made of bytes, against invariants: whatever is done to an engine from several threads at once, no message is lost, doubled or out of order.
//!
//! Each round draws an engine (topology, bounds, policies, flows) and a program for each of three threads from a seed: submissions of all kinds,
//! operators at work, and changes of the topology. At the end every message that was ever submitted must have exactly one fate, and the witness
//! must have nothing to say. `LANEWAY_FUZZ_SECONDS` says how long (2 if it is not set), `LANEWAY_FUZZ_SEED` runs one seed; a failure prints
//! its seed. Threads make no two runs alike, so a seed gives the program back, not the interleaving: that is what the simulator is for.

mod witness;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use laneway::{
    Bound, Cancel, Engine, Exhausted, Flows, Handle, Message, Outcome, Overflow, Priority, RetryPolicy,
    Topology,
};
use witness::{DEADLINE, Witness, within};

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

const THREADS: u64 = 3;
const KEYS_EACH: u64 = 6;
const STEPS: u64 = 120;

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

/// What the handler decides about a message, by its key, its number and how often it has come.
fn decide(seed: u64, key: u64, body: &mut Body) -> Outcome {
    body.calls += 1;
    let mut dice = Bytes(seed ^ (key << 32) ^ body.number ^ (body.calls << 48));
    match dice.below(24) {
        0 => Outcome::Skip,
        1 => Outcome::Park,
        2 => Outcome::ParkLane,
        3..=5 => Outcome::RetryAfter(Duration::from_micros(dice.below(200))),
        6 => Outcome::Hold(Duration::from_micros(dice.below(100))),
        7 => Outcome::Failed("so it was drawn".to_owned()),
        8 => panic!("so it was drawn"),
        _ => Outcome::Done,
    }
}

fn build(seed: u64, bytes: &mut Bytes, witness: &Arc<Witness>, fates: &Arc<Fates>) -> Engine<u64, Body> {
    let (witness, done) = (witness.clone(), fates.clone());
    let (failed, dropped) = (fates.clone(), fates.clone());
    let exhausted = bytes.pick(&[Exhausted::Skip, Exhausted::ParkMessage, Exhausted::ParkLane]);
    let retry =
        RetryPolicy { max_attempts: 3, base: Duration::from_micros(50), exhausted, ..RetryPolicy::default() };
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
            // Gaps are to be expected here (drops, skips, messages put aside), overlaps are not.
            let _attempt = witness.enter(context.key(), 0);
            let outcome = decide(seed, *context.key(), body);
            if outcome == Outcome::Done {
                done.note(*context.key(), body.number, Fate::Done);
            }
            outcome
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
fn run_program(handle: &Handle<u64, Body>, thread: u64, bytes: &mut Bytes, fates: &Fates) -> u64 {
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
            message.priority(bytes.pick(&tiers))
        };
        match bytes.below(40) {
            0 => drop(handle.park(&key, "drawn")),
            1..=3 => drop(handle.resume(&key)),
            4 => drop(handle.skip_head(&key)),
            5 => drop(handle.explain(&key)),
            6 => drop(handle.lanes_by_depth(3)),
            7 => assert!(handle.snapshot().account.balances()),
            8 => drop(pause_one(handle, bytes)),
            9 => change(handle, thread, bytes),
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
    let (witness, fates) = (Witness::new(), Arc::new(Fates::default()));
    let engine = build(seed, &mut bytes, &witness, &fates);
    let seeds: Vec<u64> = (0..THREADS).map(|_| bytes.next()).collect();
    let submitted: Vec<u64> = thread::scope(|scope| {
        let start = |(thread, seed): (u64, u64)| {
            let (handle, fates) = (engine.handle(), fates.clone());
            scope.spawn(move || run_program(&handle, thread, &mut Bytes(seed), &fates))
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
    check_returned(&report.returned);
    report.returned.iter().for_each(|message| fates.note(message.key, message.body.number, Fate::Returned));
    let overlaps: Vec<_> = witness.violations().into_iter().filter(|v| v.starts_with("overlap")).collect();
    assert!(overlaps.is_empty(), "{overlaps:?}");
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

/// What was never started comes back in the order of submission, per key. (What was started may have been put aside, and resumed by an operator
/// while a later message was in flight: it has given up its place.)
fn check_returned(returned: &[Message<u64, Body>]) {
    let mut last = HashMap::<u64, u64>::new();
    for Message { key, body, .. } in returned.iter().filter(|message| message.body.calls == 0) {
        let before = last.insert(*key, body.number);
        assert!(
            before.is_none_or(|before| before < body.number),
            "{body:?} of {key} came back after {before:?}"
        );
    }
}

#[test]
fn every_message_has_one_fate() {
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

/// Handlers panic because it was drawn; that need not be printed thousands of times.
fn quiet_expected_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<&str>() != Some(&"so it was drawn") {
            usual(info);
        }
    }));
}
