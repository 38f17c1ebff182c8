//! The engine under every interleaving that a seed can name.
//!
//! A scenario is drawn from a seed: a topology, bounds and policies, a retry policy, producers with their keys, faults, and operators who park, resume, skip,
//! pause, explain, submit batches, and add and remove dispatchers and workers while all of it runs; some end with a shutdown in the middle. The simulator
//! takes one step at a time and checks after each what must always be true (the account, the bounds, the structure of the lanes, one pair of hands per key,
//! nobody asleep beside work). The handler's ledger checks the order of each key, and who submits a batch what comes back of it. At the end everything that was accepted must be accounted for,
//! message by message: done, failed, dropped or given back, each exactly once, so that a gap in what was handled is always one that somebody was told of. And nothing may be left, since all that
//! was stopped is let go in the end.
//!
//! `LANEWAY_SIM_SEED` says which seed to begin with, and what it did if it is the only one; `LANEWAY_SIM_SCHEDULES` says how many to run.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use laneway::{
    Account, Bound, ChangeError, Engine, Exhausted, Flows, Handle, Kind, Message, Outcome, Overflow,
    Priority, Refusal, RetryPolicy, Topology,
    sim::{Faults, Rng, Sim},
};

/// What a body says: whose it is, and which of theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Body {
    key: u8,
    sequence: u32,
}

/// What has become of every message.
#[derive(Debug, Default)]
struct Ledger {
    /// What producers and operators were told was accepted, by key: from this everything else must follow.
    accepted: BTreeSet<Body>,
    done: BTreeSet<Body>,
    failed: BTreeSet<Body>,
    dropped: BTreeSet<Body>,
    /// Per key, what was handled to the end, in order.
    history: BTreeMap<u8, Vec<u32>>,
    /// Keys some of whose messages may be overtaken because the policy or an operator said so.
    loosened: BTreeSet<u8>,
    /// How many messages operators have submitted.
    operators: u32,
    /// The first thing that was wrong.
    wrong: Option<String>,
}

impl Ledger {
    fn done(&mut self, body: Body) {
        if !self.done.insert(body) {
            self.wrong.get_or_insert(format!("{body:?} was handled twice"));
        }
        let history = self.history.entry(body.key).or_default();
        if history.last().is_some_and(|last| *last > body.sequence) && !self.loosened.contains(&body.key) {
            self.wrong.get_or_insert(format!("{body:?} after {:?}", history.last()));
        }
        history.push(body.sequence);
    }
}

/// A scenario, drawn from a seed.
struct Scenario {
    sim: Sim<u8, Body>,
    ledger: Arc<Mutex<Ledger>>,
    submitted: u32,
}

fn topology(random: &mut Rng) -> Topology<u8> {
    match random.u8(0..6) {
        0 => Topology::per_worker(random.usize(1..4)),
        1 => Topology::partitioned(1 << random.u32(0..3), random.usize(1..3)),
        2 => Topology::pool(random.usize(1..5)),
        3 => Topology::assigned([vec!["a", "b"], vec!["a"], vec!["b"]], |key: &u8| {
            if key.is_multiple_of(2) { "a" } else { "b" }
        }),
        4 => Topology::builder()
            .dispatcher("x")
            .dispatcher_paced("y", 1_000.0)
            .worker("w0", ["x", "y"])
            .worker("w1", ["y", "x"])
            .build(),
        _ => Topology::builder()
            .dispatcher("x")
            .dispatcher("y")
            .dispatcher("z")
            .worker("w0", ["x", "y", "z"])
            .worker("w1", ["z"])
            .build(),
    }
}

fn overflow(random: &mut Rng) -> Overflow {
    match random.u8(0..5) {
        0 => Overflow::DropOldest,
        1 => Overflow::DropNewest,
        2 => Overflow::Reject,
        _ => Overflow::Block,
    }
}

fn retry(random: &mut Rng) -> RetryPolicy {
    let exhausted = [Exhausted::Skip, Exhausted::ParkMessage, Exhausted::ParkLane][random.usize(0..3)];
    RetryPolicy {
        max_attempts: random.u32(1..4),
        base: Duration::from_millis(random.u64(0..20)),
        multiplier: 1.5,
        max: Duration::from_millis(50),
        exhausted,
    }
}

/// Mostly done; now and then everything else that a handler can say.
fn outcome(dice: u64, body: Body, attempt: u32, ledger: &Mutex<Ledger>) -> Outcome {
    let mut ledger = ledger.lock().unwrap();
    match dice % 40 {
        0 => Outcome::Retry,
        1 => Outcome::RetryAfter(Duration::from_millis(dice % 7)),
        2 if attempt < 5 => Outcome::Hold(Duration::from_millis(3)),
        3 => Outcome::Skip,
        4 => {
            ledger.loosened.insert(body.key);
            Outcome::Park
        }
        5 => Outcome::ParkLane,
        6 => {
            drop(ledger);
            panic!("this handler was told to")
        }
        _ => {
            ledger.done(body);
            Outcome::Done
        }
    }
}

impl Scenario {
    fn new(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let ledger = Arc::new(Mutex::new(Ledger::default()));
        let retry = retry(&mut random);
        let parks_alone = retry.exhausted == Exhausted::ParkMessage;
        let mut builder = Engine::builder()
            .topology(topology(&mut random))
            .worker_queue_capacity(random.usize(1..20))
            .control_reserve(random.usize(0..4))
            .batch_max(random.usize(1..6))
            .latency_sampling(0)
            .retry(retry)
            .overflow(overflow(&mut random));
        if random.bool() {
            builder = builder
                .ingress_capacity(random.usize(1..24))
                .overflow_at(Bound::Engine, overflow(&mut random));
        }
        if random.u8(0..3) == 0 {
            builder =
                builder.lane_capacity(random.usize(1..5)).overflow_at(Bound::Lane, overflow(&mut random));
        }
        if random.u8(0..5) == 0 {
            builder = builder.lanes_max(random.usize(1..4)).overflow_at(Bound::Lanes, Overflow::Reject);
        }
        if random.bool() {
            builder =
                builder.flows(Flows { time_to_live: Duration::from_millis(random.u64(1..50)), max: 1_000 });
        }
        let (on_drop, on_fail, on_message) = (ledger.clone(), ledger.clone(), ledger.clone());
        let dice = Mutex::new(random.fork());
        let calm = random.bool();
        let builder = builder
            .on_drop(move |message, _| {
                assert_eq!(message.kind, Kind::Event, "a control message was dropped");
                on_drop.lock().unwrap().dropped.insert(message.body);
            })
            .on_fail(move |message, _| {
                on_fail.lock().unwrap().failed.insert(message.body);
            })
            .handle(move |context, body: &mut Body| {
                if parks_alone {
                    on_message.lock().unwrap().loosened.insert(body.key);
                }
                let dice = if calm { 39 } else { dice.lock().unwrap().u64(..) };
                outcome(dice, *body, context.attempt(), &on_message)
            });
        let mut sim = Sim::new(seed, builder).expect("a valid scenario");
        let submitted = Self::people(&mut sim, &mut random, &ledger);
        Scenario { sim, ledger, submitted }
    }

    /// Producers with keys of their own, and operators.
    fn people(sim: &mut Sim<u8, Body>, random: &mut Rng, ledger: &Arc<Mutex<Ledger>>) -> u32 {
        let mut submitted = 0;
        for producer in 0..random.u8(1..4) {
            let (mut sequences, mut dice, offered) = (BTreeMap::new(), random.fork(), ledger.clone());
            let count = random.u32(1..25);
            submitted += count;
            sim.produce((0..count).map(move |_| {
                let key = producer * 8 + dice.u8(0..3);
                let sequence = sequences.entry(key).or_insert(0_u32);
                *sequence += 1;
                let body = Body { key, sequence: *sequence };
                offered.lock().unwrap().accepted.insert(body);
                message(key, body, &mut dice)
            }));
        }
        for _ in 0..random.u8(0..12) {
            let (mut dice, ledger) = (random.fork(), ledger.clone());
            let when = Duration::from_millis(random.u64(0..40));
            sim.at(when, move |handle| operate(handle, &mut dice, &ledger));
        }
        // In the end everything that was stopped is let go.
        for round in 0..40 {
            sim.at(Duration::from_millis(1_000 + round * 500), release_all);
        }
        let mut slow = random.fork();
        sim.service(move |_, _, _| Duration::from_micros(slow.u64(0..3_000)));
        let fail = if random.bool() { 0.05 } else { 0.0 };
        sim.faults(Faults { fail, crash: fail, stall: 0.01 });
        submitted
    }
}

/// One thing that an operator does.
fn operate(handle: &Handle<u8, Body>, dice: &mut Rng, ledger: &Mutex<Ledger>) {
    let key = dice.u8(0..24);
    let names: Vec<String> =
        handle.snapshot().dispatchers.into_iter().map(|dispatcher| dispatcher.name).collect();
    let workers: Vec<String> = handle.snapshot().workers.into_iter().map(|worker| worker.name).collect();
    let name = &names[dice.usize(0..names.len())];
    let worker = &workers[dice.usize(0..workers.len())];
    match dice.u8(0..12) {
        0 => _ = handle.park(&key, "an operator said so"),
        1 => _ = handle.resume(&key),
        2 => _ = handle.skip_head(&key),
        3 => _ = handle.pause(name),
        4 => _ = handle.unpause(name),
        5 | 6 => note_change(handle.add_dispatcher(&format!("new-{}", dice.u8(0..4)), &[worker])),
        7 if names.len() > 1 => note_change(handle.remove_dispatcher(name)),
        8 => note_change(handle.add_worker(&format!("worker-{}", dice.u8(0..4)), &[name])),
        9 if workers.len() > 1 => note_change(handle.remove_worker(worker)),
        10 => {
            handle.explain(&key);
            handle.lanes_by_depth(3);
        }
        _ => submit_batch(handle, dice, ledger),
    }
}

/// Changes of the topology that were made, over all seeds: a simulation that only ever refuses them shows nothing about them.
static CHANGES: AtomicU64 = AtomicU64::new(0);

fn note_change(made: Result<(), ChangeError>) {
    assert_ne!(made, Err(ChangeError::FromHandler), "an operator is no handler");
    CHANGES.fetch_add(u64::from(made.is_ok()), SeqCst);
}

/// Submits a batch of a few keys of its own, in the middle of which somebody makes room elsewhere now and then, and asserts what line 6 of the contract says of the
/// answer. Control messages have a reserve, so without that line one could get in behind an event that was refused.
fn submit_batch(handle: &Handle<u8, Body>, dice: &mut Rng, ledger: &Mutex<Ledger>) {
    let keys = 200..204;
    let batch: Vec<Message<u8, Body>> = (0..dice.u8(1..16))
        .map(|_| {
            let mut ledger = ledger.lock().unwrap();
            ledger.operators += 1;
            let key = dice.u8(keys.clone());
            let body = Body { key, sequence: ledger.operators };
            ledger.accepted.insert(body);
            message(key, body, dice)
        })
        .collect();
    let bodies: Vec<Body> = batch.iter().map(|message| message.body).collect();
    let report = handle.submit_batch(batch.into_iter().inspect(|_| {
        if dice.u8(0..4) == 0 {
            handle.skip_head(&(dice.u8(0..3) * 8 + dice.u8(0..3)));
        }
    }));
    assert_eq!(report.accepted + report.dropped + report.refused.len(), bodies.len(), "each has an answer");
    for key in keys {
        let of_key: Vec<Body> = bodies.iter().filter(|body| body.key == key).copied().collect();
        let refused: Vec<_> = report.refused.iter().filter(|refused| refused.message.key == key).collect();
        let bodies: Vec<Body> = refused.iter().map(|refused| refused.message.body).collect();
        assert!(
            of_key.ends_with(&bodies),
            "refused {bodies:?} of {of_key:?}: not the last of them, in order"
        );
        let is_successor = |place: usize| refused[place].reason == Refusal::AfterRefused;
        assert!((0..refused.len()).all(|place| is_successor(place) == (place > 0)), "{refused:?}");
    }
    let mut ledger = ledger.lock().unwrap();
    report.refused.iter().for_each(|refused| _ = ledger.accepted.remove(&refused.message.body));
}

/// Mostly an event; of any priority.
fn message(key: u8, body: Body, dice: &mut Rng) -> Message<u8, Body> {
    let message = match dice.u8(0..8) {
        0 => Message::start(key, body),
        1 => Message::finish(key, body),
        _ => Message::new(key, body),
    };
    message.priority([Priority::Low, Priority::Normal, Priority::High, Priority::Urgent][dice.usize(0..4)])
}

fn release_all(handle: &Handle<u8, Body>) {
    for dispatcher in handle.snapshot().dispatchers {
        handle.unpause(&dispatcher.name);
    }
    for key in 0..=255 {
        handle.resume(&key);
    }
}

/// No scenario needs a tenth of this; one that does goes round in circles.
const STEPS_MAX: u64 = 50_000;

/// Runs one seed and says what was wrong, if anything.
fn run(seed: u64, talk: bool) -> Result<(), String> {
    let Scenario { mut sim, ledger, submitted } = Scenario::new(seed);
    let cut_short = seed.is_multiple_of(5).then_some(seed % 97 * 3);
    while sim.step().map_err(|violation| violation.to_string())? {
        if cut_short == Some(sim.steps()) {
            return end_early(sim, &ledger, seed);
        }
        if sim.steps() > STEPS_MAX {
            let snapshot = sim.handle().snapshot();
            return Err(format!("no end after {STEPS_MAX} steps at {:?}: {snapshot:#?}", sim.now()));
        }
    }
    let snapshot = sim.handle().snapshot();
    let account = snapshot.account;
    let refused = sim.refused().len() as u64;
    if talk {
        println!(
            "seed {seed}: {} steps, {:?}, {account}, {refused} refused of {submitted}",
            sim.steps(),
            sim.now()
        );
    }
    let refusals: Vec<Body> = sim.refused().iter().chain(sim.held()).map(|message| message.body).collect();
    // Everything that was stopped has been let go, again and again: what is still here could not be reached.
    let held = sim.held().count();
    if account.outstanding > 0 || held > 0 {
        return Err(format!("stranded, with {held} held: {account}"));
    }
    let mut ledger = ledger.lock().unwrap();
    ledger.accepted.retain(|body| !refusals.contains(body));
    ledger.check(&account, &[])
}

impl Ledger {
    /// Every message that was accepted has come to exactly one end, and the account knows of each.
    fn check(&self, account: &Account, returned: &[Body]) -> Result<(), String> {
        if let Some(wrong) = &self.wrong {
            return Err(wrong.clone());
        }
        let expect = |what: &str, counted: usize, noted: u64| match counted as u64 == noted {
            true => Ok(()),
            false => Err(format!("{counted} {what}, but the account says {noted}: {account}")),
        };
        expect("accepted", self.accepted.len(), account.accepted)?;
        expect("done", self.done.len(), account.done)?;
        expect("failed", self.failed.len(), account.failed)?;
        expect("dropped", self.dropped.len(), account.dropped)?;
        if !account.balances() {
            return Err(format!("the account does not balance: {account}"));
        }
        let ends = self.done.iter().chain(&self.failed).chain(&self.dropped).chain(returned);
        let (mut ended, mut count) = (BTreeSet::new(), 0);
        ends.for_each(|body| {
            ended.insert(*body);
            count += 1;
        });
        expect("ends, each of another message", ended.len(), count)?;
        let outstanding: Vec<_> = self.accepted.difference(&ended).collect();
        let strangers: Vec<_> = ended.difference(&self.accepted).collect();
        expect(
            &format!("without an end {outstanding:?}"),
            outstanding.len(),
            account.outstanding - returned.len() as u64,
        )?;
        if strangers.is_empty() { Ok(()) } else { Err(format!("ended, but never accepted: {strangers:?}")) }
    }
}

/// Shuts the engine down in the middle of everything: what it gives back is what has not ended, per key in order and after all that was done.
fn end_early(sim: Sim<u8, Body>, ledger: &Mutex<Ledger>, seed: u64) -> Result<(), String> {
    let handle = sim.handle().clone();
    let refused: Vec<Body> = sim.refused().iter().map(|message| message.body).collect();
    let held: Vec<Body> = sim.held().map(|message| message.body).collect();
    let report = sim.shutdown(Duration::from_millis(seed % 7)).map_err(|violation| violation.to_string())?;
    let returned: Vec<Body> = report.returned.iter().map(|message| message.body).collect();
    let mut ledger = ledger.lock().unwrap();
    // Producers ran on for a while and were refused; what they held or had not begun was never accepted.
    let offered = ledger.accepted.clone();
    let accepted: BTreeSet<Body> = {
        let ends = ledger.done.iter().chain(&ledger.failed).chain(&ledger.dropped).chain(&returned);
        ends.copied().collect()
    };
    let unknown: Vec<_> = offered
        .difference(&accepted)
        .filter(|body| !refused.contains(body) && !held.contains(body))
        .collect();
    if unknown.len() as u64 > handle.snapshot().refusals.total() {
        return Err(format!("lost in the shutdown: {unknown:?}"));
    }
    ledger.accepted = accepted;
    let mut last = BTreeMap::new();
    for body in &returned {
        let done = ledger.history.get(&body.key).and_then(|history| history.last().copied());
        let before = last.insert(body.key, body.sequence).or(done);
        if before.is_some_and(|before| before > body.sequence) && !ledger.loosened.contains(&body.key) {
            return Err(format!("{body:?} was given back after {before:?}"));
        }
    }
    if report.still_running > 0 {
        return Err(format!("{} still running", report.still_running));
    }
    ledger.check(&report.account, &returned)
}

fn seeds() -> (u64, u64, bool) {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    match number("LANEWAY_SIM_SEED") {
        Some(seed) => {
            let count = number("LANEWAY_SIM_SCHEDULES").unwrap_or(1);
            (seed, count, count == 1)
        }
        None => (0, number("LANEWAY_SIM_SCHEDULES").unwrap_or(2_000), false),
    }
}

#[test]
fn every_contract_line_holds_after_every_step() {
    let quiet = std::panic::take_hook();
    // Handlers panic on purpose here; thousands of traces would bury the one line that matters.
    std::panic::set_hook(Box::new(|_| {}));
    let (first, count, talk) = seeds();
    let failures = Rc::new(RefCell::new(Vec::new()));
    for seed in first..first + count {
        let result = std::panic::catch_unwind(|| run(seed, talk));
        match result {
            Ok(Ok(())) => {}
            Ok(Err(what)) => failures.borrow_mut().push((seed, what)),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
                failures.borrow_mut().push((seed, format!("panicked: {text:?}")));
            }
        }
        if failures.borrow().len() >= 5 {
            break;
        }
    }
    std::panic::set_hook(quiet);
    let failures = failures.borrow();
    assert!(failures.is_empty(), "LANEWAY_SIM_SEED=<seed> shows each again: {failures:#?}");
    assert!(
        count < 100 || CHANGES.load(SeqCst) >= count / 10,
        "{} changes of the topology",
        CHANGES.load(SeqCst)
    );
}

/// The simulator's own way to hand a message to an async handler, where a worker takes messages as streams.
#[cfg(feature = "tokio")]
#[test]
fn an_async_handler_that_has_a_dispatcher_to_itself_is_simulated_too() {
    use std::sync::{Arc, Mutex};
    for seed in 0..50 {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let seen_too = seen.clone();
        let builder = Engine::builder().topology(Topology::pool(1)).handle_async(
            move |delivery: laneway::Delivery<u64, u64>| {
                seen_too.lock().unwrap().push((*delivery.key(), *delivery));
                async {}
            },
        );
        let mut sim = Sim::new(seed, builder).unwrap();
        sim.produce((0..60).map(|number| (number % 3, number / 3)));
        sim.run().unwrap();
        let seen = seen.lock().unwrap();
        for key in 0..3 {
            let of_key: Vec<u64> =
                seen.iter().filter(|(of, _)| *of == key).map(|(_, number)| *number).collect();
            assert_eq!(of_key, (0..20).collect::<Vec<_>>(), "seed {seed}, key {key}");
        }
    }
}
