//! What broke in the later life of the system of document 004, line by line: `pitfall_004_NN` is line NN of the list that this project keeps.
//!
//! Most lines are seeded random [simulations](simulate), many of them behind a case that aims at the line: plans of messages, verdicts, delays, copies, lost leases and answers, and changes of
//! pools, in virtual time, with the contract checked at every call and at the end. A failure prints its seed; `LANEWAY_SEED=n` runs that one
//! alone, `LANEWAY_SEEDS=n` runs so many of each. The plan is the same for the same seed; how tasks interleave within one instant is tokio's
//! choice. `on_threads` runs in real time on several threads, where intake, attempts and changes really meet.
//!
//! Lines about a broker (NATS, a shared Postgres) are tested here at the source trait, with the embedded queue and the faults of `rig/`: what the router must do right is the same. What the brokers
//! themselves do is in the tests beside this file, and the promises of a source have their lines in `source/conformance.rs`.

mod rig;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway_router::mediator::Verdict;
use laneway_router::message::DispatchMode;
use laneway_router::pool::{Exhausted, PoolSettings, PoolState};
use laneway_router::router::DEFAULT_POOL;
use laneway_router::source::embedded::Publication;
use laneway_router::source::{Disposal, Source, Wants};
use rig::{Gate, Rig, What, again, never, roomy, script, takes, wait};
use tokio::time::Instant;

const MINUTE: Duration = Duration::from_secs(60);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

// ── the simulation ──────────────────────────────────────────────────────────────────────────────────────────────────

/// What may happen in a simulation, as chances in percent.
#[derive(Clone, Copy, Default)]
struct Weather {
    /// Of an attempt: to be told to wait, to fail, to fail for good, to panic.
    waits: u32,
    /// And then for this many times as long as usual.
    patience: u32,
    fails: u32,
    finals: u32,
    panics: u32,
    /// Of each moment: that claims, settlements or renewals fail for a while, that answers are lost, that copies come.
    claims: u32,
    settles: u32,
    extends: u32,
    answers: u32,
    copies: u32,
    /// Of each moment: that a pool is changed.
    changes: u32,
    /// Few places, so that messages are refused.
    tight: bool,
    exhausted: Option<Exhausted>,
}

/// The seeds of a simulation: a few, or the one that was asked for.
fn seeds(line: u64) -> Vec<u64> {
    let number = |name| std::env::var(name).ok().and_then(|number| number.parse().ok());
    match number("LANEWAY_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("LANEWAY_SEEDS").unwrap_or(6)).map(|run| line * 100_000 + run).collect(),
    }
}

/// Runs a router through the weather and checks the contract: per group, first successes in order and without a gap but for dead letters,
/// no overlap, nothing lost, nothing delivered again unless a lease, a copy or an answer was lost.
async fn simulate(line: u64, weather: Weather) {
    for seed in seeds(line) {
        eprintln!("seed {seed}");
        simulate_once(seed, weather).await;
    }
}

const GROUPS: u64 = 8;
const POOLS: [&str; 3] = [DEFAULT_POOL, "x", "y"];

async fn simulate_once(seed: u64, weather: Weather) {
    let random = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)));
    let dice = Arc::clone(&random);
    let roll = move |chance: u32| dice.lock().unwrap().u32(0..100) < chance;
    let settings = |rng: &mut fastrand::Rng| {
        let (capacity, group_capacity) = if weather.tight { (rng.usize(4..20), 3) } else { (500, 500) };
        PoolSettings {
            concurrency: rng.usize(1..12),
            capacity,
            group_capacity,
            attempts: 3,
            backoff: millis(20),
            exhausted: weather.exhausted.unwrap_or(Exhausted::DeadLetter),
            ..PoolSettings::default()
        }
    };
    let first = settings(&mut random.lock().unwrap());
    let (chance, delays) = (roll.clone(), Arc::clone(&random));
    let rig = Rig::new(
        first,
        script(move |_| {
            let delay = delays.lock().unwrap().u64(0..30);
            let verdict = match () {
                () if chance(weather.waits) => wait(millis(delay * 3) * weather.patience.max(1)),
                () if chance(weather.fails) => again(),
                () if chance(weather.finals) => never(),
                () => Verdict::Done,
            };
            let panics = chance(weather.panics);
            async move {
                tokio::time::sleep(millis(delay)).await; // paced: a call takes its time, in virtual time
                assert!(!panics, "on purpose");
                verdict
            }
        }),
    );
    rig.read();
    for _ in 0..60 {
        let (group, count, pause) = {
            let mut rng = random.lock().unwrap();
            (rng.u64(0..GROUPS), rng.u64(1..5), rng.u64(0..60))
        };
        let pool = POOLS[group as usize % POOLS.len()];
        rig.publish_to(pool, &format!("g{group}"), count, |_| {}).await;
        strike(&rig, &weather, &roll);
        if roll(weather.changes) {
            let (pool, what) = {
                let mut rng = random.lock().unwrap();
                (POOLS[rng.usize(0..POOLS.len())], rng.u32(0..6))
            };
            let new = settings(&mut random.lock().unwrap());
            // Whatever the router answers is fine; what it does to the messages is looked at below.
            let _ = match what {
                0 => rig.router.add_pool(pool, new),
                1 => rig.router.pause_pool(pool),
                2 => rig.router.resume_pool(pool),
                3 => rig.router.remove_pool(pool, millis(40)).await,
                _ => rig.router.change_pool(pool, new),
            };
        }
        tokio::time::sleep(millis(pause)).await; // paced: the simulation's own time
    }
    calm(&rig);
    rig.router.resume_pool(DEFAULT_POOL).unwrap();
    for pool in &POOLS[1..] {
        // One that goes on draining takes nothing until it is gone.
        let _ = rig.router.remove_pool(pool, MINUTE * 10).await;
    }
    rig.drained().await;
    let again = weather.extends + weather.answers + weather.copies > 0;
    check(&rig, seed, again).await;
    let report = rig.end().await;
    assert_eq!((report.given_back, report.still_running, report.settled), (0, 0, true), "seed {seed}");
}

/// Something goes wrong at the source, perhaps.
fn strike(rig: &Rig, weather: &Weather, roll: &dyn Fn(u32) -> bool) {
    let mut faults = rig.source.faults();
    faults.failing_claims += if roll(weather.claims) { 3 } else { 0 };
    faults.failing_settles += if roll(weather.settles) { 3 } else { 0 };
    faults.failing_extends += if roll(weather.extends) { 60 } else { 0 };
    faults.lost_answers += if roll(weather.answers) { 2 } else { 0 };
    faults.repeats += if roll(weather.copies) { 6 } else { 0 };
}

fn calm(rig: &Rig) {
    let mut faults = rig.source.faults();
    (faults.failing_claims, faults.failing_settles) = (0, 0);
    (faults.failing_extends, faults.lost_answers, faults.repeats) = (0, 0, 0);
}

/// The contract at the end.
async fn check(rig: &Rig, seed: u64, may_repeat: bool) {
    assert_eq!(rig.log.violations(), Vec::<String>::new(), "seed {seed}");
    let dead: HashSet<String> = rig.dead().await.into_iter().collect();
    let mut counts = BTreeMap::new();
    for group in 0..GROUPS {
        let name = format!("g{group}");
        let published = rig.published(&name);
        let mut seen = HashSet::new();
        let done = rig.log.done(&name);
        let first: Vec<u64> = done.iter().copied().filter(|number| seen.insert(*number)).collect();
        let expected: Vec<u64> =
            (0..published).filter(|number| !dead.contains(&format!("{name}#{number}"))).collect();
        assert_eq!(first, expected, "seed {seed}, group {name}: in order, and nothing is lost");
        assert!(may_repeat || first.len() == done.len(), "seed {seed}, group {name} was delivered twice");
        counts.insert(name, published);
    }
    assert!(counts.values().sum::<u64>() > 60, "seed {seed} published something");
}

// ── order ───────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A target that says 429 or asks for a later time holds the group, not the head alone.
#[tokio::test(start_paused = true)]
async fn pitfall_004_01_a_head_that_has_to_wait_is_not_overtaken() {
    simulate(1, Weather { waits: 40, fails: 10, ..Weather::default() }).await;
}

/// The barrier is the group, whatever claim its messages came with.
#[tokio::test(start_paused = true)]
async fn pitfall_004_02_messages_of_other_claims_do_not_overtake() {
    let rig = Rig::new(
        PoolSettings { capacity: 2, group_capacity: 2, ..roomy() },
        script(|seen| async move {
            let fails = seen.number % 5 == 0 && seen.attempt < 3;
            if fails { again() } else { Verdict::Done }
        }),
    );
    rig.publish("a", 40).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 40)]);
    assert!(rig.source.faults().claims > 10);
    simulate(2, Weather { fails: 30, tight: true, ..Weather::default() }).await;
}

/// All of a group goes back for the same time, so that siblings do not come first.
#[tokio::test(start_paused = true)]
async fn pitfall_004_03_siblings_do_not_come_back_before_the_head() {
    let back = Exhausted::GiveBack(millis(200));
    simulate(3, Weather { fails: 45, exhausted: Some(back), ..Weather::default() }).await;
}

/// After a failure `BLOCK_ON_ERROR` stops the group and `NEXT_ON_ERROR` goes on: they are not the same.
#[tokio::test(start_paused = true)]
async fn pitfall_004_04_block_on_error_blocks_and_next_on_error_does_not() {
    let rig = Rig::new(
        roomy(),
        script(|seen| async move { if seen.number == 1 { never() } else { Verdict::Done } }),
    );
    rig.publish_to("", "block", 4, |message| message.dispatch_mode = DispatchMode::BlockOnError).await;
    rig.publish_to("", "next", 4, |message| message.dispatch_mode = DispatchMode::NextOnError).await;
    rig.read();
    rig.until("the next one went on", |rig| rig.log.done("next").len() == 3).await;
    tokio::time::sleep(MINUTE).await; // paced: nothing is to happen
    assert_eq!(rig.log.begun("block"), [(0, 1), (1, 1)]);
    assert_eq!(rig.log.done("next"), [0, 2, 3]);
}

/// A delayed head blocks its successors in the claim itself: the embedded queue's own tests have it, this is the router on top.
#[tokio::test(start_paused = true)]
async fn pitfall_004_05_a_delayed_head_holds_its_group_in_the_queue() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    let delayed = laneway_router::source::embedded::Publication::of(&rig::message("a", 0, ""));
    rig.queue.publish(delayed.delay(MINUTE)).await.unwrap();
    let next = laneway_router::source::embedded::Publication::of(&rig::message("a", 1, ""));
    rig.queue.publish(next).await.unwrap();
    rig.publish("b", 1).await;
    let begin = Instant::now();
    rig.read();
    rig.done(1).await;
    assert!(begin.elapsed() < millis(100));
    rig.drained().await;
    assert!(begin.elapsed() >= MINUTE);
    rig.verify(&[("a", 2), ("b", 1)]);
}

/// Pools are added, removed, paused and changed at random while messages flow; a group never runs in two of them.
#[tokio::test(start_paused = true)]
async fn pitfall_004_06_a_changed_pool_never_runs_a_group_twice_at_once() {
    simulate(6, Weather { fails: 10, changes: 70, ..Weather::default() }).await;
}

/// A pool that comes does not wait for what is parked, or waits for long, in the one that stood in: it gets that, in order and as parked as it was.
#[tokio::test(start_paused = true)]
async fn pitfall_004_06_a_pool_that_comes_takes_over_what_is_parked() {
    let fixed = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let target = Arc::clone(&fixed);
    let rig = Rig::new(
        roomy(),
        script(move |seen| {
            let is_fixed = target.load(Relaxed);
            async move {
                match seen.group.as_str() {
                    "order-7" | "both" | "mixed" if seen.number == 1 && !is_fixed => never(),
                    "order-8" if seen.number == 1 && !is_fixed => wait(MINUTE * 60),
                    _ => Verdict::Done,
                }
            }
        }),
    );
    let block = |message: &mut laneway_router::message::Message| {
        message.dispatch_mode = DispatchMode::BlockOnError;
    };
    rig.publish_to("orders", "order-7", 3, block).await;
    rig.publish_to("orders", "order-8", 3, block).await;
    rig.publish_to(DEFAULT_POOL, "both", 3, block).await;
    rig.publish_to("orders", "both", 3, block).await;
    rig.publish_to("orders", "mixed", 3, block).await;
    rig.publish_to(DEFAULT_POOL, "mixed", 1, block).await;
    rig.publish_to("orders", "order-9", 3, block).await;
    rig.publish_to(DEFAULT_POOL, "own", 1, |_| {}).await;
    rig.read();
    let parked = |rig: &Rig, pool| {
        let all = rig.router.all_parked(pool, 10).unwrap().into_iter();
        let mut all: Vec<String> = all.map(|(group, _)| group.to_string()).collect();
        all.sort();
        all
    };
    rig.until("three are parked, and one waits", |rig| {
        let are_done = rig.log.done("order-9").len() == 3 && rig.log.done("own").len() == 1;
        let are_parked = parked(rig, DEFAULT_POOL) == ["both", "mixed", "order-7"];
        are_done && are_parked && rig.log.begun("order-8").len() == 2
    })
    .await;
    assert_eq!(rig.router.held(), 2 + 2 + 5 + 3);
    let begin = Instant::now();
    rig.router.add_pool("orders", roomy()).unwrap();
    rig.publish_to("orders", "order-9", 3, block).await;
    rig.until("the others go on", |rig| rig.log.done("order-9").len() == 6).await;
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    assert_eq!(rig.router.pool_view("orders").unwrap().state, PoolState::Open);
    assert_eq!(parked(&rig, "orders"), ["both", "mixed", "order-7"]);
    assert_eq!(parked(&rig, DEFAULT_POOL), ["both"], "it was its own message that failed");
    tokio::time::sleep(MINUTE * 30).await; // paced: nothing is to happen
    assert_eq!(rig.log.begun("order-7"), [(0, 1), (1, 1)]);
    assert_eq!(rig.log.begun("order-8"), [(0, 1), (1, 1)], "not before its time");
    assert_eq!(rig.log.done("mixed"), [0, 3], "only those of the pool that has come are parked");
    fixed.store(true, Relaxed);
    rig.until("that has come", |rig| rig.log.done("order-8").len() == 3).await;
    let took = begin.elapsed();
    assert!((MINUTE * 59..MINUTE * 62).contains(&took), "{took:?}");
    assert!(rig.router.resume("orders", "order-7").unwrap());
    assert!(rig.router.resume("orders", "mixed").unwrap());
    assert!(rig.router.resume(DEFAULT_POOL, "both").unwrap());
    rig.until("they are done", |rig| rig.log.done("both").len() == 3).await;
    assert!(rig.router.resume("orders", "both").unwrap());
    rig.drained().await;
    assert_eq!(rig.log.violations(), Vec::<String>::new());
    for (group, count) in [("order-7", 3), ("order-8", 3), ("order-9", 6), ("both", 6), ("own", 1)] {
        assert_eq!(rig.log.done(group), (0..count).collect::<Vec<_>>(), "{group}");
    }
    assert_eq!(rig.log.done("mixed"), [0, 3, 1, 2]);
    assert!(rig.dead().await.is_empty());
}

/// A pool that goes does not wait for what is parked, or waits for long: the one that stands in gets that, in order and as parked as it was.
#[tokio::test(start_paused = true)]
async fn pitfall_004_06_a_pool_that_goes_leaves_what_is_parked() {
    let told = std::sync::atomic::AtomicBool::new(false);
    let rig = Rig::new(
        roomy(),
        script(move |seen| {
            let is_patient = seen.group == "patient" && seen.number == 1 && !told.swap(true, Relaxed);
            async move {
                match seen.group.as_str() {
                    "stuck" if seen.number == 1 => never(),
                    _ if is_patient => wait(MINUTE * 60),
                    _ => Verdict::Done,
                }
            }
        }),
    );
    rig.router.add_pool("x", roomy()).unwrap();
    rig.publish_to("x", "stuck", 4, |message| message.dispatch_mode = DispatchMode::BlockOnError).await;
    rig.publish_to("x", "patient", 2, |_| {}).await;
    rig.publish_to("x", "later", 1, |_| {}).await;
    rig.read();
    rig.until("it is parked", |rig| {
        rig.router.pool_view("x").unwrap().parked_groups == 1 && rig.log.all_done() == 3
    })
    .await;
    let begin = Instant::now();
    rig.router.remove_pool("x", MINUTE).await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    rig.publish_to("x", "later", 1, |_| {}).await;
    rig.until("others of it go on", |rig| rig.log.done("later").len() == 2).await;
    tokio::time::sleep(MINUTE).await; // paced: nothing is to happen
    assert_eq!(rig.log.begun("stuck"), [(0, 1), (1, 1)]);
    let parked = rig.router.parked(DEFAULT_POOL, "stuck").unwrap();
    assert!(parked.is_some_and(|parked| &*parked.why == "never"));
    assert!(rig.router.skip(DEFAULT_POOL, "stuck").unwrap());
    assert!(rig.router.resume(DEFAULT_POOL, "stuck").unwrap());
    rig.drained().await;
    assert_eq!((rig.log.done("stuck"), rig.log.done("patient")), (vec![0, 2, 3], vec![0, 1]));
    assert_eq!(rig.log.violations(), Vec::<String>::new());
}

/// Neither a rate nor a panic lets the next one go first.
#[tokio::test(start_paused = true)]
async fn pitfall_004_07_a_rate_or_a_panic_does_not_let_successors_pass() {
    simulate(7, Weather { waits: 20, panics: 25, ..Weather::default() }).await;
}

/// The first fails before the second is even published: the group is held by its lane, which is there as long as the first is.
#[tokio::test(start_paused = true)]
async fn pitfall_004_08_a_failure_before_the_next_message_comes_still_holds_it() {
    let rig = Rig::new(
        PoolSettings { backoff: MINUTE, ..roomy() },
        script(|seen| async move { if seen.attempt == 1 { again() } else { Verdict::Done } }),
    );
    rig.read();
    rig.publish("a", 1).await;
    rig.until("it has failed", |rig| rig.log.count(|event| event.what == What::Ended(again())) == 1).await;
    rig.publish("a", 1).await;
    rig.drained().await;
    assert_eq!(rig.log.begun("a"), [(0, 1), (0, 2), (1, 1), (1, 2)]);
    simulate(8, Weather { fails: 60, ..Weather::default() }).await;
}

/// A refusal for lack of room goes for the rest of the group.
#[tokio::test(start_paused = true)]
async fn pitfall_004_09_a_refused_message_takes_its_successors_with_it() {
    simulate(9, Weather { fails: 20, tight: true, changes: 20, ..Weather::default() }).await;
}

/// Groups fall idle and come back all the time, and never have two runners. In real time, so that intake and attempts of several threads meet.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn pitfall_004_10_a_group_that_falls_idle_and_comes_back_has_one_runner() {
    let rig = Rig::new(roomy(), yields());
    rig.read();
    for round in 0..300 {
        rig.publish("a", 1 + round % 2).await;
        rig.publish("b", 1).await;
        // Until one of them is done, or both: then the next ones come while a group falls idle.
        rig.done(2 * round as usize + 1).await;
    }
    rig.drained().await;
    rig.verify(&[("a", 450), ("b", 300)]);
    rig.until("no trace is left", |rig| rig.router.pool_view(DEFAULT_POOL).unwrap().groups == 0).await;
}

/// Everything is done at once, or after a few other tasks have had their turn.
fn yields() -> rig::Script {
    script(|seen| async move {
        for _ in 0..seen.number % 4 {
            tokio::task::yield_now().await;
        }
        Verdict::Done
    })
}

// ── stuck ───────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A panic settles its message like any other failure; no entry stays behind that would swallow it for ever.
#[tokio::test(start_paused = true)]
async fn pitfall_004_11_a_panic_leaves_no_entry_that_swallows_redeliveries() {
    simulate(11, Weather { panics: 40, copies: 20, ..Weather::default() }).await;
}

/// A group whose attempt panics, or is told to wait, is not dead.
#[tokio::test(start_paused = true)]
async fn pitfall_004_12_a_group_is_alive_after_every_way_an_attempt_can_end() {
    simulate(12, Weather { waits: 20, fails: 20, finals: 20, panics: 20, ..Weather::default() }).await;
}

/// What a pool gives back when it ends is forgotten here, so that it is taken when it comes again.
#[tokio::test(start_paused = true)]
async fn pitfall_004_13_what_a_stopped_pool_gave_back_is_taken_again() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.publish("a", 3).await;
    rig.read();
    rig.until("it is under way", |rig| rig.log.running() == 1).await;
    rig.router.park(DEFAULT_POOL, "a", "not today").unwrap();
    gate.open_for_good();
    let report = rig.router.shutdown(MINUTE).await;
    assert_eq!((report.given_back, report.settled), (2, true));
    let other = rig.store.queue("orders").unwrap();
    let claimed = other.claim(Wants { most: 10, wait: MINUTE, lease: MINUTE }).await.unwrap();
    assert_eq!(claimed.len(), 2);
    simulate(13, Weather { changes: 80, copies: 20, ..Weather::default() }).await;
}

/// A source that has failed for long is asked again, less often, and healthy as soon as it answers.
#[tokio::test(start_paused = true)]
async fn pitfall_004_14_a_failing_source_is_asked_ever_less_often_and_recovers() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    rig.source.faults().failing_claims = 1_000;
    rig.read();
    tokio::time::sleep(MINUTE * 5).await; // paced: the source fails all the time
    let claims = rig.source.faults().claims;
    assert!(claims < 50, "asked {claims} times in five minutes");
    assert!(!rig.router.sources().await[0].healthy);
    rig.source.faults().failing_claims = 0;
    rig.publish("a", 1).await;
    rig.drained().await;
    rig.verify(&[("a", 1)]);
    simulate(14, Weather { claims: 40, ..Weather::default() }).await;
}

/// Waiting for room is no stall: hours later the router is healthy, has lost no lease and has repeated nothing.
#[tokio::test(start_paused = true)]
async fn pitfall_004_15_waiting_for_room_is_no_stall() {
    let gate = Gate::new();
    let rig = Rig::new(PoolSettings { capacity: 2, group_capacity: 2, ..roomy() }, gate.script());
    rig.publish("a", 5).await;
    rig.read();
    rig.until("the pool is full", |rig| rig.router.held() == 2).await;
    tokio::time::sleep(MINUTE * 60).await; // paced: nothing is to happen
    let source = &rig.router.sources().await[0];
    assert!(source.healthy);
    assert_eq!((source.ledger.swallowed_copies, source.ledger.stale_settlements), (0, 0));
    gate.open_for_good();
    rig.drained().await;
    rig.verify(&[("a", 5)]);
}

/// A change of every pool stops no source. That a reload of the service does not either is in `service.rs`.
#[tokio::test(start_paused = true)]
async fn pitfall_004_16_a_change_of_all_pools_does_not_stop_the_sources() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    rig.router.add_pool("x", roomy()).unwrap();
    rig.read();
    for round in 0..20 {
        rig.publish_to("x", "a", 2, |_| {}).await;
        rig.publish("b", 2).await;
        for pool in ["x", DEFAULT_POOL] {
            let settings = PoolSettings { concurrency: 1 + round % 5, ..roomy() };
            rig.router.change_pool(pool, settings).unwrap();
        }
        tokio::time::sleep(millis(15)).await; // paced: reloads and messages in turn
    }
    rig.drained().await;
    rig.verify(&[("a", 40), ("b", 40)]);
    simulate(16, Weather { claims: 10, changes: 90, ..Weather::default() }).await;
}

/// One slow pool does not hold up the queue that it shares with others.
#[tokio::test(start_paused = true)]
async fn pitfall_004_17_a_slow_pool_does_not_block_its_queue() {
    let rig = Rig::new(
        roomy(),
        script(|seen| async move {
            let time = if seen.pool == "slow" { Duration::from_secs(5) } else { millis(5) };
            tokio::time::sleep(time).await; // paced: a call takes its time, in virtual time
            Verdict::Done
        }),
    );
    let slow = PoolSettings { concurrency: 1, capacity: 5, group_capacity: 5, ..roomy() };
    rig.router.add_pool("slow", slow).unwrap();
    for group in 0..100 {
        rig.publish_to("slow", &format!("s{group}"), 1, |_| {}).await;
    }
    rig.publish("quick", 100).await;
    let begin = Instant::now();
    rig.read();
    rig.until("the quick ones are done", |rig| rig.log.done("quick").len() == 100).await;
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    rig.drained().await;
    assert_eq!(rig.log.all_done(), 200);
}

/// Nor do messages without a group, in a queue that orders them: each pool has a line of its own, and what is to be sent immediately stands in none.
#[tokio::test(start_paused = true)]
async fn pitfall_004_17_messages_without_a_group_wait_for_nobody_elses() {
    let rig = Rig::new(
        roomy(),
        script(|seen| async move { if seen.pool == "sick" { never() } else { Verdict::Done } }),
    );
    let sick = PoolSettings { attempts: 1, exhausted: Exhausted::GiveBack(MINUTE), ..roomy() };
    rig.router.add_pool("sick", sick).unwrap();
    rig.publish_to("sick", "", 2, |_| {}).await;
    rig.publish_to("sick", "label", 2, |message| message.dispatch_mode = DispatchMode::Immediate).await;
    rig.read();
    rig.until("they are back", |rig| {
        let given_back = rig.router.pool_view("sick").unwrap().counts.given_back;
        given_back == 4 && rig.depth().leased == 0
    })
    .await;
    let begin = Instant::now();
    rig.publish_to("", "", 20, |_| {}).await;
    rig.publish_to("", "label", 20, |message| message.dispatch_mode = DispatchMode::Immediate).await;
    rig.done(40).await;
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_eq!(rig.log.done("__DEFAULT__"), (2..22).collect::<Vec<_>>());
    // Those of the sick pool come again in their time.
    rig.until("they have come again", |rig| rig.router.pool_view("sick").unwrap().counts.given_back == 8)
        .await;
    assert!(begin.elapsed() <= MINUTE);
}

/// Nor where their pool has no room, or does not take any.
#[tokio::test(start_paused = true)]
async fn pitfall_004_17_a_pool_that_refuses_messages_without_a_group_refuses_its_own() {
    let gate = Gate::new();
    let pass = gate.clone();
    let rig = Rig::new(
        roomy(),
        script(move |seen| {
            let gate = pass.clone();
            async move {
                if seen.pool == "full" {
                    gate.pass().await;
                }
                Verdict::Done
            }
        }),
    );
    let full = PoolSettings { capacity: 2, group_capacity: 2, ..roomy() };
    rig.router.add_pool("full", full).unwrap();
    // All in one claim.
    rig.publish_to("full", "", 5, |_| {}).await;
    rig.publish("", 20).await;
    let begin = Instant::now();
    rig.read();
    rig.until("the others are done", |rig| rig.log.all_done() == 20).await;
    assert!(begin.elapsed() < millis(50), "{:?}", begin.elapsed());
    gate.open_for_good();
    rig.drained().await;
    let (full, others): (Vec<u64>, Vec<u64>) = rig
        .log
        .events()
        .iter()
        .filter(|event| event.what == What::Ended(Verdict::Done))
        .map(|event| event.seen.number)
        .partition(|number| *number < 5);
    assert!(full.is_sorted() && full.len() == 5, "{full:?}");
    assert!(others.is_sorted() && others.len() == 20, "{others:?}");
}

/// Nor does one that asks for patience block its pool: groups that wait for it go back and come again, and keep their order.
#[tokio::test(start_paused = true)]
async fn pitfall_004_17_what_waits_for_its_target_makes_room_for_others() {
    let weather =
        Weather { waits: 30, patience: 100, fails: 10, changes: 10, tight: true, ..Weather::default() };
    simulate(17, weather).await;
}

/// Messages without order wait each for itself: thousands that were told to come a second later all come a second later.
#[tokio::test(start_paused = true)]
async fn pitfall_004_18_unordered_messages_are_not_put_off_one_after_the_other() {
    let rig = Rig::new(
        PoolSettings { concurrency: 100, ..roomy() },
        script({
            let told = Mutex::new(HashSet::new());
            move |seen| {
                let first = told.lock().unwrap().insert(seen.number);
                async move { if first { wait(Duration::from_secs(1)) } else { Verdict::Done } }
            }
        }),
    );
    rig.publish_to("", "label", 5_000, |message| message.dispatch_mode = DispatchMode::Immediate).await;
    let begin = Instant::now();
    rig.read();
    rig.drained().await;
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    assert_eq!(rig.log.all_done(), 5_000);
}

/// An urgent message is seen as soon as a slot is free, whatever waits in the tiers below.
#[tokio::test(start_paused = true)]
async fn pitfall_004_19_an_urgent_message_does_not_wait_behind_the_others() {
    let rig = Rig::new(PoolSettings { concurrency: 1, ..roomy() }, takes(millis(100)));
    for group in 0..50 {
        rig.publish(&format!("g{group}"), 1).await;
    }
    rig.read();
    rig.done(3).await;
    let begin = Instant::now();
    let high = laneway_router::message::Priority::High;
    rig.publish_to("", "urgent", 1, |message| message.priority = high).await;
    rig.until("it is done", |rig| rig.log.done("urgent").len() == 1).await;
    assert!(begin.elapsed() <= millis(210), "{:?}", begin.elapsed());
}

/// Messages that come at the very moment when their group falls idle are not lost: the next one is published as soon as the call of the one before has
/// ended, while its lane is still being settled and removed by another thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn pitfall_004_20_a_message_that_meets_an_idle_removal_is_not_lost() {
    let rig = Rig::new(roomy(), yields());
    rig.read();
    for round in 1..=500 {
        rig.publish("a", 1).await;
        rig.until("it is done", |rig| rig.log.done("a").len() == round).await;
    }
    rig.drained().await;
    rig.verify(&[("a", 500)]);
}

// ── lost or twice ───────────────────────────────────────────────────────────────────────────────────────────────────

/// An entry goes when its settlement is durable, not before: copies that come in between are swallowed.
#[tokio::test(start_paused = true)]
async fn pitfall_004_21_a_copy_that_comes_before_the_settlement_is_durable_is_swallowed() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    let gate = Gate::new();
    rig.publish("a", 3).await;
    rig.source.faults().late_settles = Some(gate.clone());
    rig.read();
    rig.done(3).await;
    let copies: Vec<_> = rig.source.faults().handed_out.values().cloned().collect();
    rig.source.faults().copies.extend(copies);
    rig.publish("b", 1).await;
    rig.until("the copies were handed out", |rig| rig.log.done("b").len() == 1).await;
    rig.source.faults().late_settles = None;
    gate.open_for_good();
    rig.drained().await;
    rig.verify(&[("a", 3), ("b", 1)]);
    assert_eq!(rig.router.sources().await[0].ledger.swallowed_copies, 3);
    simulate(21, Weather { settles: 30, copies: 30, ..Weather::default() }).await;
}

/// Slow work keeps its lease, however long it takes, and nobody else gets it.
#[tokio::test(start_paused = true)]
async fn pitfall_004_22_slow_work_is_not_delivered_twice() {
    let rig = Rig::new(roomy(), takes(MINUTE * 30));
    rig.publish("a", 2).await;
    rig.read();
    rig.until("it is under way", |rig| rig.log.running() == 1).await;
    let other = rig.store.queue("orders").unwrap();
    let wants = Wants { most: 10, wait: MINUTE * 55, lease: MINUTE };
    assert!(other.claim(wants).await.unwrap().is_empty(), "its lease is renewed");
    rig.drained().await;
    rig.verify(&[("a", 2)]);
}

/// Identities are those of one source: the same number in two queues is two messages, each settled where it came from.
#[tokio::test(start_paused = true)]
async fn pitfall_004_23_identities_of_two_sources_are_not_mixed_up() {
    let rig = Rig::new(roomy(), takes(millis(5)));
    let options = laneway_router::source::embedded::Options {
        commit: laneway_router::source::embedded::Commit::Inline,
        ..Default::default()
    };
    let store = laneway_router::source::embedded::EmbeddedStore::in_memory(options).unwrap();
    let (second, publisher) = (store.queue("orders").unwrap(), store.queue("orders").unwrap());
    for number in 0..10 {
        let message = rig::message("b", number, "");
        publisher.publish(laneway_router::source::embedded::Publication::of(&message)).await.unwrap();
    }
    rig.publish("a", 10).await;
    rig.read();
    rig.router.add_source(Arc::new(second), rig.settings);
    rig.done(20).await;
    rig.drained().await;
    rig.verify(&[("a", 10), ("b", 10)]);
    let report = rig.end().await;
    assert!(report.settled);
    let depth = publisher.depth().await.unwrap();
    assert_eq!((depth.waiting, depth.leased), (0, 0));
}

/// Being told to wait, or refused for lack of room, costs nothing: however often it happens, the message is not given up.
#[tokio::test(start_paused = true)]
async fn pitfall_004_24_deferrals_never_lose_a_message() {
    let rig = Rig::new(
        PoolSettings { attempts: 1, capacity: 1, group_capacity: 1, ..roomy() },
        script({
            let calls = AtomicU32::new(0);
            move |_| {
                let call = calls.fetch_add(1, Relaxed);
                async move { if call % 50 != 49 { wait(millis(10)) } else { Verdict::Done } }
            }
        }),
    );
    rig.publish("a", 4).await;
    rig.publish("b", 4).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 4), ("b", 4)]);
    assert!(rig.dead().await.is_empty());
    simulate(24, Weather { waits: 60, tight: true, ..Weather::default() }).await;
}

/// One claim at a time per source.
#[tokio::test(start_paused = true)]
async fn pitfall_004_25_a_source_has_one_reader() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    rig.read();
    rig.publish("a", 1).await;
    rig.drained().await;
    tokio::time::sleep(MINUTE).await; // paced: claims wait ten seconds each
    let claims = rig.source.faults().claims;
    assert!(claims <= 9, "{claims} claims in a minute");
}

/// Copies of messages that wait in a pool, and of those that are with their targets, at random.
#[tokio::test(start_paused = true)]
async fn pitfall_004_26_copies_of_what_waits_are_swallowed() {
    simulate(26, Weather { fails: 20, copies: 60, ..Weather::default() }).await;
}

#[tokio::test(start_paused = true)]
async fn pitfall_004_27_two_copies_in_one_claim_are_one_message() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    rig.publish("a", 2).await;
    let other = rig.store.queue("orders").unwrap();
    let claimed = other.claim(Wants { most: 2, wait: MINUTE, lease: MINUTE * 10 }).await.unwrap();
    let twice: Vec<_> = claimed.iter().chain(&claimed).chain(&claimed).cloned().collect();
    rig.source.faults().copies.extend(twice);
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 2)]);
    simulate(27, Weather { copies: 90, ..Weather::default() }).await;
}

/// What is done is remembered until the source knows, however long that takes: renewed, and settled with the receipt that is good then.
#[tokio::test(start_paused = true)]
async fn pitfall_004_28_what_is_done_is_remembered_until_the_source_knows() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    rig.publish("a", 3).await;
    rig.source.faults().failing_settles = 100;
    rig.source.faults().failing_extends = 300;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 3)]);
    simulate(28, Weather { settles: 40, extends: 30, ..Weather::default() }).await;
}

/// Any success is a success. The table of the HTTP mediator has its own tests; here: it is settled, and never tried again.
#[tokio::test(start_paused = true)]
async fn pitfall_004_29_a_success_is_never_tried_again() {
    simulate(29, Weather { settles: 40, ..Weather::default() }).await;
}

/// Everything at once, leases and answers included.
#[tokio::test(start_paused = true)]
async fn pitfall_004_other_everything_at_once() {
    let storm = Weather {
        waits: 10,
        patience: 1,
        fails: 15,
        finals: 5,
        panics: 5,
        claims: 10,
        settles: 15,
        extends: 15,
        answers: 15,
        copies: 15,
        changes: 30,
        tight: false,
        exhausted: None,
    };
    simulate(40, storm).await;
    simulate(41, Weather { tight: true, ..storm }).await;
    let back = Some(Exhausted::GiveBack(millis(150)));
    simulate(42, Weather { exhausted: back, tight: true, ..storm }).await;
}

/// In real time on several threads: pools come and go, groups go back, and messages are refused, while others are just being taken in.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn pitfall_004_other_everything_at_once_on_threads() {
    let back = Some(Exhausted::GiveBack(millis(20)));
    let storm =
        Weather { fails: 30, settles: 10, changes: 60, tight: true, exhausted: back, ..Weather::default() };
    for seed in seeds(43).into_iter().take(2) {
        eprintln!("seed {seed}");
        simulate_once(seed, storm).await;
    }
}

/// "Rate-wait churn": a group that waits for its rate is looked at when its time comes, and not before.
#[tokio::test(start_paused = true)]
async fn pitfall_004_other_waiting_for_a_rate_costs_little() {
    let pool = PoolSettings { group_rate_per_second: Some(1.0), ..roomy() };
    let rig = Rig::new(pool, takes(millis(1)));
    rig.publish("a", 20).await;
    rig.read();
    rig.drained().await;
    let held_back = rig.router.pool_view(DEFAULT_POOL).unwrap().counts.held_back;
    assert!(held_back <= 20, "{held_back} looks for 20 messages");
    rig.verify(&[("a", 20)]);
}

/// "A stats read spends a token": whoever looks, and however often, takes nothing of a rate.
#[tokio::test(start_paused = true)]
async fn pitfall_004_other_who_looks_takes_no_token() {
    let rates = (Some(10.0), Some(5.0));
    let pool = PoolSettings { rate_per_second: rates.0, group_rate_per_second: rates.1, ..roomy() };
    let rig = Rig::new(pool, takes(millis(1)));
    for group in 0..20 {
        rig.publish(&format!("g{group}"), 1).await;
    }
    let begin = Instant::now();
    rig.read();
    while rig.log.all_done() < 20 {
        let router = &rig.router;
        let groups = router.groups(DEFAULT_POOL, 100).unwrap();
        for group in 0..20 {
            router.explain(DEFAULT_POOL, &format!("g{group}")).unwrap();
            router.notes(DEFAULT_POOL, &format!("g{group}")).unwrap();
        }
        assert!(groups.len() <= router.pools()[0].held);
        tokio::time::sleep(millis(5)).await; // paced: twenty looks for each token, in virtual time
    }
    let took = begin.elapsed();
    assert!((millis(1_850)..=millis(1_950)).contains(&took), "20 calls at 10 per second took {took:?}");
}

/// "256,000 parked goroutines", "detached tasks leaked": a group that waits is plain data, and of a router that has ended no task is left.
#[tokio::test(start_paused = true)]
async fn pitfall_004_other_groups_that_wait_have_no_tasks_and_an_end_leaves_none() {
    const GROUPS: usize = 5_000;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let rig = Rig::new(roomy(), script(|_| std::future::ready(wait(MINUTE * 60))));
    let one_of_each: Vec<_> =
        (0..GROUPS).map(|group| Publication::of(&rig::message(&format!("g{group}"), 0, ""))).collect();
    rig.queue.publish_many(one_of_each, None).await.unwrap();
    rig.read();
    let told = |rig: &Rig| rig.log.count(|event| matches!(event.what, What::Ended(_)));
    rig.until("all have been told to wait", |rig| told(rig) == GROUPS).await;
    assert_eq!(rig.router.held(), GROUPS);
    let (waiting, slots) = (tasks() - before, roomy().concurrency);
    assert!(waiting < slots + 20, "{waiting} tasks for {slots} slots and {GROUPS} groups");
    let report = rig.router.shutdown(millis(1)).await;
    assert_eq!((report.given_back, report.settled), (GROUPS, true));
    drop(rig);
    let deadline = Instant::now() + MINUTE;
    while tasks() > before {
        assert!(Instant::now() < deadline, "{} tasks are left", tasks() - before);
        tokio::time::sleep(millis(1)).await; // paced: those that were told to end do so, in virtual time
    }
}

/// "A poison row aborted a batch": among a hundred good ones, one that cannot be read.
#[tokio::test(start_paused = true)]
async fn pitfall_004_other_one_bad_message_does_not_hold_up_its_batch() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    rig.publish("a", 50).await;
    let bad = Publication::new(b"\xff\xfe").group("a");
    rig.queue.publish(bad).await.unwrap();
    rig.publish("a", 50).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 100)]);
    assert_eq!(rig.depth().quarantined, 1);
}

/// "Shutdown aborted in-flight calls": they come back, and their successors go back.
#[tokio::test(start_paused = true)]
async fn pitfall_004_other_a_shutdown_lets_calls_come_back() {
    let rig = Rig::new(roomy(), takes(Duration::from_secs(8)));
    rig.publish("a", 3).await;
    rig.read();
    rig.until("it is under way", |rig| rig.log.running() == 1).await;
    let report = rig.router.shutdown(Duration::from_secs(10)).await;
    assert_eq!(rig.log.done("a")[0], 0);
    assert_eq!(rig.log.count(|event| event.what == What::Broke), 0);
    assert!(report.settled && report.given_back >= 1, "{report:?}");
}

/// "Force-nack looks up the wrong key": an operator's skip reaches the head of that group in that pool, and settles it as a dead letter.
#[tokio::test(start_paused = true)]
async fn pitfall_004_other_an_operators_skip_reaches_the_right_message() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    rig.router.pause_pool(DEFAULT_POOL).unwrap();
    rig.publish("a", 2).await;
    rig.publish("b", 2).await;
    rig.read();
    rig.until("all are in the pool", |rig| rig.router.held() == 4).await;
    assert!(rig.router.skip(DEFAULT_POOL, "a").unwrap());
    assert!(!rig.router.skip(DEFAULT_POOL, "c").unwrap());
    rig.router.resume_pool(DEFAULT_POOL).unwrap();
    rig.drained().await;
    assert_eq!(rig.dead().await, ["a#0"]);
    assert_eq!((rig.log.done("a"), rig.log.done("b")), (vec![1], vec![0, 1]));
}

/// A settlement with an old receipt settles nothing of a newer handing-out: promised by every source, and relied on above.
#[tokio::test(start_paused = true)]
async fn pitfall_004_other_an_old_receipt_settles_nothing() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    rig.publish("a", 1).await;
    let (one, other) = (rig.store.queue("orders").unwrap(), rig.store.queue("orders").unwrap());
    let old = one.claim(Wants { most: 1, wait: MINUTE, lease: millis(10) }).await.unwrap();
    let new = other.claim(Wants { most: 1, wait: MINUTE, lease: MINUTE }).await.unwrap();
    let answer = one.settle(vec![(old[0].receipt.clone(), Disposal::Done)]).await.unwrap();
    assert_eq!(answer, [laneway_router::source::Settled::Stale]);
    assert_eq!((new.len(), rig.depth().leased), (1, 1));
}
