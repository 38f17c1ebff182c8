//! The router from the queue to the target and back, in virtual time: order per group, parallel across groups, every setting of a pool.
//!
//! First the two integration tests and the table of document 004, then what a pool promises, one test per promise. Changes while it runs and faults
//! of the source are in `unrest.rs`, what broke elsewhere in `pitfalls.rs`.

mod rig;

use std::time::Duration;

use laneway_router::mediator::Verdict;
use laneway_router::message::{DispatchMode, Priority};
use laneway_router::pool::{Exhausted, PoolSettings, Ungrouped};
use laneway_router::source::embedded::{self, Publication};
use rig::{Gate, Rig, What, again, fails, held, never, roomy, script, takes, wait};
use tokio::time::Instant;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A queue that orders messages without a group, as it is if nobody says otherwise, and one that does not.
const QUEUES: [embedded::Ungrouped; 2] = [embedded::Ungrouped::Serial, embedded::Ungrouped::Unordered];

// ── document 004 ────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(start_paused = true)]
async fn fifo_order_is_kept_per_message_group() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    rig.read();
    for _ in 0..10 {
        rig.publish("group-1", 1).await;
        rig.publish("group-2", 1).await;
    }
    rig.drained().await;
    rig.verify(&[("group-1", 10), ("group-2", 10)]);
}

#[tokio::test(start_paused = true)]
async fn groups_are_processed_concurrently() {
    let rig = Rig::new(roomy(), takes(millis(100)));
    let groups: Vec<String> = (0..10).map(|group| format!("group-{group}")).collect();
    for group in &groups {
        rig.publish(group, 10).await;
    }
    let begin = Instant::now();
    rig.read();
    rig.drained().await;
    assert!(begin.elapsed() <= Duration::from_secs(2));
    assert_eq!(rig.log.running_most(), 10, "all ten at once");
    rig.verify(&groups.iter().map(|group| (group.as_str(), 10)).collect::<Vec<_>>());
}

/// The table: 100 messages, 10 workers, 100 ms each.
#[tokio::test(start_paused = true)]
async fn the_table_of_the_document() {
    for (groups, seconds) in [(1, 10.0), (5, 2.0), (10, 1.0), (100, 1.0)] {
        let rig = Rig::new(roomy(), takes(millis(100)));
        let names: Vec<String> = (0..groups).map(|group| format!("g{group}")).collect();
        for _ in 0..100 / groups {
            for name in &names {
                rig.publish(name, 1).await;
            }
        }
        let begin = Instant::now();
        rig.read();
        rig.done(100).await;
        let took = begin.elapsed().as_secs_f64();
        assert!((took / seconds - 1.0).abs() <= 0.1, "{groups} groups took {took} s, not {seconds}");
        rig.drained().await;
        rig.verify(&names.iter().map(|name| (name.as_str(), 100 / groups)).collect::<Vec<_>>());
    }
}

/// The largest setting of the document's guide: what waits is plain data.
#[tokio::test(start_paused = true)]
async fn five_thousand_slots_and_ten_thousand_groups() {
    let pool = PoolSettings { concurrency: 5_000, capacity: 20_000, group_capacity: 200, ..roomy() };
    let rig = Rig::new(pool, takes(millis(100)));
    let names: Vec<String> = (0..10_000).map(|group| format!("g{group}")).collect();
    let all: Vec<_> =
        (0..2).flat_map(|number| names.iter().map(move |name| rig::message(name, number, ""))).collect();
    let all: Vec<_> = all.iter().map(Publication::of).collect();
    for some in all.chunks(10_000) {
        rig.queue.publish_many(some.to_vec(), None).await.expect("published");
    }
    let begin = Instant::now();
    rig.read();
    rig.done(20_000).await;
    assert_eq!(rig.log.running_most(), 5_000);
    assert!(begin.elapsed() <= millis(450), "20,000 calls of 100 ms, 5,000 at once: {:?}", begin.elapsed());
    rig.drained().await;
    rig.verify(&names.iter().map(|name| (name.as_str(), 2)).collect::<Vec<_>>());
}

// ── slots, rates, capacities ────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(start_paused = true)]
async fn concurrency_is_respected_across_groups() {
    let rig = Rig::new(PoolSettings { concurrency: 3, ..roomy() }, takes(millis(10)));
    let names: Vec<String> = (0..20).map(|group| format!("g{group}")).collect();
    for name in &names {
        rig.publish(name, 5).await;
    }
    rig.read();
    rig.drained().await;
    assert_eq!(rig.log.running_most(), 3);
    rig.verify(&names.iter().map(|name| (name.as_str(), 5)).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn the_rate_of_a_pool_does_not_burst_even_after_a_rest() {
    let pool = PoolSettings { rate_per_second: Some(10.0), ..roomy() };
    let rig = Rig::new(pool, takes(millis(5)));
    rig.read();
    for name in ["a", "b", "c", "d", "e"] {
        rig.publish(name, 3).await;
    }
    rig.done(15).await;
    tokio::time::advance(Duration::from_secs(60)).await;
    let rested = Instant::now();
    for name in ["a", "b", "c", "d", "e"] {
        rig.publish(name, 2).await;
    }
    rig.drained().await;
    let starts: Vec<Instant> =
        rig.log.events().iter().filter(|event| event.what == What::Began).map(|event| event.at).collect();
    assert_eq!(starts.len(), 25);
    let closest = starts.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap();
    assert!(closest >= millis(95), "{closest:?} apart");
    assert!(rested.elapsed() <= millis(1_050), "the full rate is used: {:?}", rested.elapsed());
}

/// A token that was taken without a slot would be spent by the time the slot is free, and the next ones would come in a burst.
#[tokio::test(start_paused = true)]
async fn a_token_is_taken_only_with_a_slot() {
    let gate = Gate::new();
    let pool = PoolSettings { concurrency: 1, rate_per_second: Some(10.0), ..roomy() };
    let rig = Rig::new(pool, gate.script());
    for name in ["a", "b", "c", "d"] {
        rig.publish(name, 1).await;
    }
    rig.read();
    rig.until("one is under way", |rig| rig.log.running() == 1).await;
    tokio::time::sleep(Duration::from_secs(10)).await; // paced: ten seconds' worth of tokens go by
    let begin = Instant::now();
    gate.open_for_good();
    rig.drained().await;
    let starts = &rig.log.events();
    let starts: Vec<u64> = starts
        .iter()
        .filter(|event| event.what == What::Began && event.at >= begin)
        .map(|event| (event.at - begin).as_millis() as u64)
        .collect();
    assert_eq!(starts.len(), 3);
    assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 95), "{starts:?}");
}

#[tokio::test(start_paused = true)]
async fn the_rate_of_a_group_is_its_own() {
    let pool = PoolSettings { group_rate_per_second: Some(2.0), ..roomy() };
    let rig = Rig::new(pool, takes(millis(5)));
    rig.publish("a", 5).await;
    rig.publish("b", 5).await;
    let begin = Instant::now();
    rig.read();
    rig.drained().await;
    for group in ["a", "b"] {
        let starts: Vec<u64> = rig
            .log
            .events()
            .iter()
            .filter(|event| event.what == What::Began && event.seen.group == group)
            .map(|event| (event.at - begin).as_millis() as u64)
            .collect();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 495), "{group}: {starts:?}");
        assert!(starts[4] <= 2_100, "{group}: {starts:?}");
    }
    rig.verify(&[("a", 5), ("b", 5)]);
}

/// A group that has to wait for its own rate takes nothing of the pool's, also when it has failed before. Beside five groups of one call a second each there is
/// room for five of those that are in no group, and have no rate of their own.
#[tokio::test(start_paused = true)]
async fn a_pool_reaches_its_rate_although_its_groups_have_rates() {
    let pool = PoolSettings { rate_per_second: Some(10.0), group_rate_per_second: Some(1.0), ..roomy() };
    let rig = Rig::new(
        pool,
        script(|seen| async move {
            let fails = !seen.group.is_empty() && seen.attempt < 3;
            if fails { again() } else { Verdict::Done }
        }),
    );
    let names: Vec<String> = (0..5).map(|group| format!("g{group}")).collect();
    for name in &names {
        rig.publish(name, 4).await;
    }
    let begin = Instant::now();
    rig.read();
    for _ in 0..60 {
        rig.publish_to("", "label", 1, |message| message.dispatch_mode = DispatchMode::Immediate).await;
        tokio::time::sleep(millis(200)).await; // paced: as many as there is room for
    }
    rig.drained().await;
    let took = begin.elapsed().as_secs_f64();
    assert!((11.4..=12.6).contains(&took), "120 calls at 10 per second took {took} s");
    assert!(closest_starts(&rig) >= millis(95));
    names.iter().for_each(|name| assert_eq!(rig.log.done(name), [0, 1, 2, 3], "{name}"));
}

/// How long after each other the calls began that were closest.
fn closest_starts(rig: &Rig) -> Duration {
    let events = rig.log.events();
    let starts = events.iter().filter(|event| event.what == What::Began).map(|event| event.at);
    let starts: Vec<Instant> = starts.collect();
    starts.windows(2).map(|pair| pair[1] - pair[0]).min().expect("two calls")
}

/// A target that asks for patience was called, whatever its answer costs the message.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_answered_with_patience_has_used_up_its_start() {
    let rig = Rig::new(
        PoolSettings { rate_per_second: Some(10.0), concurrency: 50, ..roomy() },
        script({
            let told = std::sync::Mutex::new(std::collections::HashSet::new());
            move |seen| {
                let is_first = told.lock().unwrap().insert(seen.group);
                async move {
                    tokio::time::sleep(millis(10)).await; // paced: a call takes its time, which is virtual
                    if is_first { wait(Duration::from_secs(60)) } else { Verdict::Done }
                }
            }
        }),
    );
    let names: Vec<String> = (0..40).map(|group| format!("g{group}")).collect();
    for name in &names {
        rig.publish(name, 1).await;
    }
    rig.read();
    rig.drained().await;
    assert!(closest_starts(&rig) >= millis(95), "{:?} apart", closest_starts(&rig));
    rig.verify(&names.iter().map(|name| (name.as_str(), 1)).collect::<Vec<_>>());
}

/// A hundred groups behind an open breaker are looked at again and again, and nobody is called: others have the whole rate.
#[tokio::test(start_paused = true)]
async fn a_group_that_waits_without_a_call_uses_up_nothing_of_the_rate() {
    let rig = Rig::new(
        PoolSettings { rate_per_second: Some(10.0), ..roomy() },
        script(|seen| async move {
            match seen.group.as_str() {
                "good" => Verdict::Done,
                _ if seen.attempt == 1 => again(),
                _ => held(Duration::from_secs(5)),
            }
        }),
    );
    for group in 0..100 {
        rig.publish(&format!("g{group}"), 1).await;
    }
    rig.read();
    rig.until("each has failed once", |rig| rig.log.count(|event| event.what == What::Ended(again())) == 100)
        .await;
    let begin = Instant::now();
    rig.publish("good", 50).await;
    rig.until("the others are done", |rig| rig.log.done("good").len() == 50).await;
    assert!(begin.elapsed() < millis(5_600), "50 at 10 per second took {:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_group_has_its_share_of_the_pool_and_the_others_get_in() {
    let gate = Gate::new();
    let pool = PoolSettings { concurrency: 2, capacity: 10, group_capacity: 4, ..roomy() };
    let rig = Rig::new(pool, gate.script());
    rig.publish("hot", 50).await;
    rig.publish("cold", 2).await;
    rig.read();
    rig.until("both groups are at work", |rig| rig.log.running() == 2).await;
    let view = rig.router.pool_view("DEFAULT-POOL").unwrap();
    assert_eq!((view.held, view.groups), (6, 2), "four of the hot group, two of the cold one");
    assert!(view.counts.refused > 0);
    gate.open_for_good();
    rig.drained().await;
    rig.verify(&[("hot", 50), ("cold", 2)]);
}

/// What does not fit comes again when there is room, and not half a minute later because the pool is too young to know how fast it is.
#[tokio::test(start_paused = true)]
async fn a_group_that_was_refused_comes_again_soon() {
    let pool = PoolSettings { capacity: 50, group_capacity: 5, ..roomy() };
    let rig = Rig::new(pool, takes(millis(10)));
    for _ in 0..2 {
        rig.publish("a", 100).await;
        let begin = Instant::now();
        if rig.log.all_done() == 0 {
            rig.read();
        }
        rig.drained().await;
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        tokio::time::sleep(Duration::from_secs(600)).await; // paced: the pool rests
    }
    rig.verify(&[("a", 200)]);
}

#[tokio::test(start_paused = true)]
async fn a_pool_never_holds_more_than_its_capacity_and_asks_for_no_more() {
    let pool = PoolSettings { concurrency: 2, capacity: 7, group_capacity: 7, ..roomy() };
    let rig = Rig::new(pool, takes(millis(20)));
    for group in 0..30 {
        rig.publish(&format!("g{group}"), 2).await;
    }
    rig.read();
    rig.until("all are done", |rig| {
        assert!(rig.router.held() <= 7, "{} are held", rig.router.held());
        rig.log.all_done() == 60
    })
    .await;
    assert!(rig.source.faults().wanted_most <= 7);
    rig.drained().await;
}

/// Most of a pool waits for an hour, and what is left is less than is usually worth a claim: the slots are idle, so it is used.
#[tokio::test(start_paused = true)]
async fn the_little_that_is_free_is_used_while_slots_are_idle() {
    let rig = Rig::new(
        PoolSettings::default(),
        script(|seen| async move {
            tokio::time::sleep(millis(5)).await; // paced: a call takes its time, which is virtual
            if seen.group.starts_with("patient") { wait(Duration::from_secs(3_600)) } else { Verdict::Done }
        }),
    );
    for group in 0..4 {
        rig.publish(&format!("patient-{group}"), 440).await;
    }
    rig.read();
    rig.until("they are in the pool", |rig| rig.router.held() == 1_760).await;
    let begin = Instant::now();
    for group in 0..100 {
        rig.publish(&format!("g{group}"), 10).await;
    }
    rig.done(1_000).await;
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_capacity_of_a_group_follows_its_history() {
    let pool = PoolSettings {
        concurrency: 2,
        capacity: 1_000,
        group_capacity: 100,
        group_latency: Some(Duration::from_secs(10)),
        ..roomy()
    };
    let rig = Rig::new(
        pool,
        script(|seen| async move {
            let time = if seen.group == "slow" { millis(2_000) } else { millis(20) };
            tokio::time::sleep(time).await; // paced: a call takes its time, in virtual time
            Verdict::Done
        }),
    );
    rig.publish("slow", 200).await;
    rig.publish("quick", 2_000).await;
    rig.read();
    rig.until("the quick group has earned its full share", |rig| {
        let groups = rig.router.groups("DEFAULT-POOL", 10).unwrap();
        groups.iter().any(|(key, depth)| key.name() == "quick" && *depth > 50)
    })
    .await;
    rig.until("the slow group has worked off what it had at first", |rig| rig.log.done("slow").len() > 20)
        .await;
    let groups = rig.router.groups("DEFAULT-POOL", 10).unwrap();
    let slow = groups.iter().find(|(key, _)| key.name() == "slow").map_or(0, |(_, depth)| *depth);
    assert!(slow <= 5, "ten seconds at two seconds each are five: {slow}");
    rig.drained().await;
    rig.verify(&[("slow", 200), ("quick", 2_000)]);
}

#[tokio::test(start_paused = true)]
async fn sticky_slots_keep_the_order_and_use_all_parts() {
    let pool = PoolSettings { concurrency: 8, affinity: 4, ..roomy() };
    let rig = Rig::new(pool, takes(millis(10)));
    let names: Vec<String> = (0..40).map(|group| format!("g{group}")).collect();
    for name in &names {
        rig.publish(name, 5).await;
    }
    rig.read();
    rig.drained().await;
    assert!(rig.log.running_most() <= 8);
    let view = rig.router.pool_view("DEFAULT-POOL").unwrap();
    assert_eq!(view.engine.dispatchers.len(), 4);
    assert!(view.engine.dispatchers.iter().all(|part| part.account.done > 0), "every part had groups");
    rig.verify(&names.iter().map(|name| (name.as_str(), 5)).collect::<Vec<_>>());
}

// ── order ───────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(start_paused = true)]
async fn priorities_go_first_and_never_reorder_a_group() {
    let gate = Gate::new();
    let rig = Rig::new(PoolSettings { concurrency: 1, ..roomy() }, gate.script());
    rig.publish("first", 1).await;
    rig.read();
    rig.until("the slot is taken", |rig| rig.log.running() == 1).await;
    for (group, priority) in [("low", Priority::Low), ("normal", Priority::Normal), ("high", Priority::High)]
    {
        rig.publish_to("", group, 1, |message| message.priority = priority).await;
    }
    // One group with all of them, the most urgent last.
    for priority in [Priority::Low, Priority::Normal, Priority::High] {
        rig.publish_to("", "mixed", 1, |message| message.priority = priority).await;
    }
    rig.until("all are in the pool", |rig| rig.router.held() == 7).await;
    gate.open_for_good();
    rig.drained().await;
    rig.verify(&[("first", 1), ("low", 1), ("normal", 1), ("high", 1), ("mixed", 3)]);
    let order: Vec<String> = rig
        .log
        .events()
        .iter()
        .filter(|event| event.what == What::Began)
        .map(|event| event.seen.group.clone())
        .collect();
    let place = |group: &str| order.iter().position(|other| other == group).unwrap();
    assert!(place("high") < place("normal") && place("normal") < place("low"), "{order:?}");
}

#[tokio::test(start_paused = true)]
async fn a_retry_holds_the_order_of_its_group_and_no_other() {
    let rig = Rig::new(
        roomy(),
        script(|seen| async move {
            let fails = seen.group == "a" && seen.number % 3 == 1 && seen.attempt < 4;
            if fails { again() } else { Verdict::Done }
        }),
    );
    rig.publish("a", 9).await;
    rig.publish("b", 9).await;
    let begin = Instant::now();
    rig.read();
    rig.until("the other group is done", |rig| rig.log.done("b").len() == 9).await;
    assert!(begin.elapsed() < millis(50));
    rig.drained().await;
    rig.verify(&[("a", 9), ("b", 9)]);
    assert_eq!(&rig.log.begun("a")[..6], &[(0, 1), (1, 1), (1, 2), (1, 3), (1, 4), (2, 1)]);
}

/// As often as the pool says, with its own pauses, whatever the engine would do by itself.
#[tokio::test(start_paused = true)]
async fn a_message_is_tried_as_often_as_its_pool_says() {
    for attempts in [1, 2, 3, 4, 7] {
        let pool = PoolSettings { attempts, ..roomy() };
        let rig = Rig::new(pool, script(|_| async { again() }));
        rig.publish("a", 1).await;
        let begin = Instant::now();
        rig.read();
        rig.drained().await;
        assert_eq!(rig.log.begun("a").len() as u32, attempts);
        assert_eq!(rig.dead().await, ["a#0"]);
        let pauses: u64 = (1..attempts).map(|attempt| 100 << (attempt - 1)).sum();
        let took = begin.elapsed().as_millis() as u64;
        assert!((pauses..=pauses + 100).contains(&took), "{attempts} attempts in {took} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_costs_no_attempt() {
    let pool = PoolSettings { attempts: 2, ..roomy() };
    let rig = Rig::new(
        pool,
        script({
            let calls = std::sync::atomic::AtomicU32::new(0);
            move |_| {
                let call = calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                async move {
                    match call {
                        0..20 => wait(millis(100)),
                        20 => again(),
                        _ => Verdict::Done,
                    }
                }
            }
        }),
    );
    rig.publish("a", 2).await;
    let begin = Instant::now();
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 2)]);
    let attempts: Vec<u32> = rig.log.begun("a").iter().map(|(_, attempt)| *attempt).collect();
    assert_eq!(attempts, [[1; 21].as_slice(), &[2, 1]].concat());
    let took = begin.elapsed();
    assert!((millis(2_100)..millis(2_250)).contains(&took), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn what_failed_for_good_goes_to_the_dead_letters_and_its_group_goes_on() {
    let rig = Rig::new(
        PoolSettings { attempts: 2, ..roomy() },
        script(|seen| async move {
            match seen.number {
                1 => never(),
                3 => again(),
                _ => Verdict::Done,
            }
        }),
    );
    rig.publish("a", 5).await;
    rig.read();
    rig.drained().await;
    assert_eq!(rig.log.begun("a"), [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (4, 1)]);
    assert_eq!(rig.dead().await, ["a#1", "a#3"]);
    let reasons = rig.queue.dead_letters(0, 10).await.unwrap();
    assert_eq!(reasons.iter().map(|kept| kept.reason.as_str()).collect::<Vec<_>>(), ["never", "it said so"]);
    let counts = rig.router.pool_view("DEFAULT-POOL").unwrap().counts;
    assert_eq!((counts.succeeded, counts.failed, counts.transient), (3, 2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_group_is_parked_in_front_of_what_failed_until_somebody_resumes_it() {
    let fixed = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let target = fixed.clone();
    let pool = PoolSettings { attempts: 2, exhausted: Exhausted::ParkGroup, ..roomy() };
    let rig = Rig::new(
        pool,
        script(move |seen| {
            let broken = !target.load(std::sync::atomic::Ordering::Relaxed) && seen.number == 1;
            async move { if broken { again() } else { Verdict::Done } }
        }),
    );
    rig.publish("a", 4).await;
    rig.publish("b", 4).await;
    rig.read();
    rig.until("it has failed", |rig| rig.log.done("b").len() == 1 && rig.log.begun("a").len() == 3).await;
    // The leases of what is parked are renewed: an hour later it is still here, and nothing of it was called again.
    tokio::time::sleep(Duration::from_secs(3_600)).await; // paced: nothing is to happen
    assert_eq!(rig.log.begun("a").len(), 3);
    assert_eq!(rig.depth().leased, 6);
    let why = rig.router.explain("DEFAULT-POOL", "a").unwrap().unwrap();
    assert!(format!("{why:?}").contains("it said so"), "{why:?}");
    fixed.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(rig.router.resume("DEFAULT-POOL", "a").unwrap());
    assert!(rig.router.resume("DEFAULT-POOL", "b").unwrap());
    rig.drained().await;
    rig.verify(&[("a", 4), ("b", 4)]);
}

#[tokio::test(start_paused = true)]
async fn parked_groups_do_not_fill_their_pool_and_each_goes_on_in_order() {
    let fixed = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let target = fixed.clone();
    let pool = PoolSettings {
        capacity: 20,
        group_capacity: 5,
        attempts: 1,
        exhausted: Exhausted::ParkGroup,
        ..roomy()
    };
    let rig = Rig::new(
        pool,
        script(move |seen| {
            let broken = !target.load(std::sync::atomic::Ordering::Relaxed) && seen.group.starts_with("bad");
            async move { if broken { never() } else { Verdict::Done } }
        }),
    );
    // Seven times as many as the pool has room for are parked, and those of others pass by.
    let bad: Vec<String> = (0..30).map(|number| format!("bad-{number}")).collect();
    for group in &bad {
        rig.publish(group, 5).await;
    }
    rig.publish("good", 50).await;
    rig.read();
    let view = |rig: &Rig| rig.router.pool_view("DEFAULT-POOL").unwrap();
    rig.until("all are parked", |rig| view(rig).parked_groups == 30 && rig.log.done("good").len() == 50)
        .await;
    // They come again and go back, and nobody is called for them.
    for minute in 0..10 {
        let before = view(&rig).counts.refused;
        rig.until("what went back has come again", |rig| view(rig).counts.refused > before).await;
        let pool = view(&rig);
        assert!(pool.parked_messages <= 20 && pool.held <= 40, "after {minute} minutes: {pool:?}");
        rig.publish("good", 20).await;
        let all = 50 + 20 * (minute + 1);
        rig.until("the others pass", |rig| rig.log.done("good").len() == all).await;
    }
    assert!(bad.iter().all(|group| rig.log.begun(group) == [(0, 1)]), "each head was called once");
    fixed.store(true, std::sync::atomic::Ordering::Relaxed);
    for group in &bad {
        assert!(rig.router.resume("DEFAULT-POOL", group).unwrap(), "{group}");
        assert!(rig.router.parked("DEFAULT-POOL", group).unwrap().is_none());
    }
    rig.drained().await;
    let mut all: Vec<(&str, u64)> = bad.iter().map(|group| (group.as_str(), 5)).collect();
    all.push(("good", 250));
    rig.verify(&all);
    assert_eq!((view(&rig).parked_groups, view(&rig).parked_messages, view(&rig).held), (0, 0, 0));
}

/// A pool that four messages fill, and a target of the groups `a` that asks once for an hour of patience. Until then a message of each waits.
async fn full_of_patience(ungrouped: Ungrouped) -> Rig {
    let pool = PoolSettings { capacity: 4, group_capacity: 4, ungrouped, ..roomy() };
    let began = std::sync::OnceLock::new();
    let rig = Rig::new(
        pool,
        script(move |seen| {
            let patience =
                Duration::from_secs(3_600).saturating_sub(began.get_or_init(Instant::now).elapsed());
            let is_patient = !seen.group.starts_with('b') && !patience.is_zero();
            async move { if is_patient { wait(patience) } else { Verdict::Done } }
        }),
    );
    rig.read();
    rig
}

/// A target that asks for patience has its messages wait; those for others are delivered meanwhile, however little room the pool has.
#[tokio::test(start_paused = true)]
async fn a_target_that_asks_for_patience_does_not_fill_its_pool() {
    let rig = full_of_patience(Ungrouped::Serial).await;
    let patient = ["a0", "a1", "a2", "a3"];
    for group in patient {
        rig.publish(group, 3).await;
    }
    rig.until("the pool is full of them", |rig| rig.router.held() == 4 && rig.log.running() == 0).await;
    let begin = Instant::now();
    rig.publish("b", 10).await;
    rig.until("the others are done", |rig| rig.log.done("b").len() == 10).await;
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    assert!(patient.iter().all(|group| rig.log.done(group).is_empty()));
    rig.drained().await;
    let took = begin.elapsed().as_secs();
    assert!((3_590..3_660).contains(&took), "after the hour, and not long after: {took} s");
    rig.verify(&[("a0", 3), ("a1", 3), ("a2", 3), ("a3", 3), ("b", 10)]);
}

/// So it is where another pool has room: then the intake asks, and the full pool refuses.
#[tokio::test(start_paused = true)]
async fn a_target_that_asks_for_patience_does_not_fill_its_pool_beside_another() {
    let rig = full_of_patience(Ungrouped::Serial).await;
    rig.router.add_pool("roomy", roomy()).unwrap();
    let patient = ["a0", "a1", "a2", "a3"];
    for group in patient {
        rig.publish(group, 1).await;
    }
    rig.until("the pool is full of them", |rig| {
        rig.router.pool_view("DEFAULT-POOL").unwrap().counts.held_back == 4
    })
    .await;
    tokio::time::sleep(Duration::from_secs(600)).await; // paced: nothing has moved for so long that who is refused would stay away for long
    let begin = Instant::now();
    rig.publish("b", 10).await;
    rig.until("the others are done", |rig| rig.log.done("b").len() == 10).await;
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    assert!(patient.iter().all(|group| rig.log.done(group).is_empty()));
    rig.drained().await;
    rig.verify(&[("a0", 1), ("a1", 1), ("a2", 1), ("a3", 1), ("b", 10)]);
}

/// Nor do messages that are in no group.
#[tokio::test(start_paused = true)]
async fn messages_without_a_group_that_wait_for_their_target_do_not_fill_their_pool() {
    let rig = full_of_patience(Ungrouped::Unordered).await;
    rig.publish_to("", "", 20, |message| message.dispatch_mode = DispatchMode::Immediate).await;
    rig.until("the pool is full of them", |rig| rig.router.held() == 4).await;
    let begin = Instant::now();
    rig.publish("b", 10).await;
    rig.until("the others are done", |rig| rig.log.done("b").len() == 10).await;
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    rig.drained().await;
    assert_eq!(rig.log.all_done(), 30);
}

/// What has failed before would begin with its first attempt again if it went.
#[tokio::test(start_paused = true)]
async fn a_head_that_has_used_an_attempt_stays_where_it_waits_for_its_target() {
    let pool = PoolSettings { capacity: 4, group_capacity: 4, ..roomy() };
    let hour = Duration::from_secs(3_600);
    let called = std::sync::Mutex::new(std::collections::HashMap::<String, u32>::new());
    let rig = Rig::new(
        pool,
        script(move |seen| {
            let calls = *called
                .lock()
                .unwrap()
                .entry(seen.group.clone())
                .and_modify(|calls| *calls += 1)
                .or_insert(1);
            async move {
                match calls {
                    _ if seen.group == "b" => Verdict::Done,
                    1 => again(),
                    2 => wait(hour),
                    _ => Verdict::Done,
                }
            }
        }),
    );
    let failed = ["a0", "a1", "a2", "a3"];
    for group in failed {
        rig.publish(group, 1).await;
    }
    rig.read();
    rig.until("all wait", |rig| failed.iter().all(|group| rig.log.begun(group).len() == 2)).await;
    rig.publish("b", 1).await;
    let begin = Instant::now();
    rig.drained().await;
    assert!(begin.elapsed() >= hour);
    failed.iter().for_each(|group| assert_eq!(rig.log.begun(group), [(0, 1), (0, 2), (0, 2)], "{group}"));
    assert_eq!(rig.router.pool_view("DEFAULT-POOL").unwrap().counts.given_back, 0);
}

/// A park is of the group and not of what it has at the moment.
#[tokio::test(start_paused = true)]
async fn a_group_stays_parked_when_its_last_message_has_left() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.publish("a", 1).await;
    rig.read();
    rig.until("it is under way", |rig| rig.log.running() == 1).await;
    assert!(rig.router.park("DEFAULT-POOL", "a", "not today").unwrap());
    assert!(!rig.router.park("DEFAULT-POOL", "nobody", "not today").unwrap());
    gate.open_for_good();
    rig.drained().await;
    rig.publish("a", 2).await;
    rig.publish("b", 2).await;
    let parked = |rig: &Rig| rig.router.pool_view("DEFAULT-POOL").unwrap().parked_messages;
    rig.until("b is done and a is held", |rig| rig.log.done("b").len() == 2 && parked(rig) == 2).await;
    assert_eq!(rig.log.begun("a").len(), 1);
    assert_eq!(rig.router.all_parked("DEFAULT-POOL", 10).unwrap().len(), 1);
    assert!(rig.router.resume("DEFAULT-POOL", "a").unwrap());
    rig.drained().await;
    rig.verify(&[("a", 3), ("b", 2)]);
    assert!(!rig.router.resume("DEFAULT-POOL", "a").unwrap(), "there is nothing to resume any more");
}

/// Whoever resumes while the group is being stopped finds it going on, whoever is first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parking_and_resuming_against_attempts_leaves_no_group_behind() {
    let rig = Rig::new(
        PoolSettings { attempts: 1, exhausted: Exhausted::ParkGroup, ..roomy() },
        script(|seen| async move { if seen.number % 3 == 2 { never() } else { Verdict::Done } }),
    );
    rig.read();
    let router = rig.router.clone();
    let operator = tokio::spawn(async move {
        loop {
            for group in ["a", "b", "c"] {
                let _ = router.park("DEFAULT-POOL", group, "now");
                tokio::task::yield_now().await;
                let _ = router.resume("DEFAULT-POOL", group);
                // What its pool has parked is never delivered otherwise.
                let _ = router.skip("DEFAULT-POOL", group);
            }
            tokio::task::yield_now().await;
        }
    });
    for group in ["a", "b", "c"] {
        rig.publish(group, 300).await;
    }
    rig.drained().await;
    operator.abort();
    assert_eq!(rig.log.violations(), Vec::<String>::new());
    for group in ["a", "b", "c"] {
        assert!(rig.log.done(group).is_sorted(), "{group}");
        assert!(rig.log.begun(group).is_sorted(), "{group}");
    }
}

#[tokio::test(start_paused = true)]
async fn block_on_error_parks_whatever_the_pool_says_and_an_operator_can_skip() {
    for exhausted in [Exhausted::DeadLetter, Exhausted::GiveBack(millis(10))] {
        let rig = Rig::new(
            PoolSettings { exhausted, ..roomy() },
            script(|seen| async move { if seen.number == 1 { never() } else { Verdict::Done } }),
        );
        rig.publish_to("", "a", 3, |message| message.dispatch_mode = DispatchMode::BlockOnError).await;
        rig.read();
        rig.until("it has failed", |rig| rig.log.begun("a").len() == 2 && rig.log.running() == 0).await;
        tokio::time::sleep(Duration::from_secs(60)).await; // paced: nothing is to happen
        assert_eq!(rig.log.begun("a").len(), 2);
        assert!(rig.router.skip("DEFAULT-POOL", "a").unwrap());
        assert!(rig.router.resume("DEFAULT-POOL", "a").unwrap());
        rig.drained().await;
        assert_eq!(rig.log.done("a"), [0, 2]);
        assert_eq!(rig.dead().await, ["a#1"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_group_that_is_given_back_comes_again_in_order() {
    let pool = PoolSettings {
        attempts: 2,
        exhausted: Exhausted::GiveBack(Duration::from_secs(5)),
        capacity: 20,
        group_capacity: 20,
        ..roomy()
    };
    let rig = Rig::new(
        pool,
        script({
            let failures = std::sync::atomic::AtomicU32::new(0);
            move |seen| {
                let fails = seen.number % 10 == 3
                    && failures.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 5 != 4;
                async move { if fails { again() } else { Verdict::Done } }
            }
        }),
    );
    rig.publish("a", 50).await;
    rig.publish("b", 50).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 50), ("b", 50)]);
    assert!(rig.router.pool_view("DEFAULT-POOL").unwrap().counts.given_back > 0);
    assert!(rig.dead().await.is_empty());
}

// ── groups and pools ────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(start_paused = true)]
async fn messages_without_a_group_are_one_group() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    rig.publish("", 20).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("__DEFAULT__", 20)]);
}

#[tokio::test(start_paused = true)]
async fn messages_without_a_group_can_be_unordered() {
    for queue in QUEUES {
        let pool = PoolSettings { ungrouped: Ungrouped::Unordered, ..roomy() };
        let rig = Rig::on(queue, pool, takes(millis(100)));
        rig.publish("", 20).await;
        // A group is only a label to a message that is to be sent immediately.
        rig.publish_to("", "label", 20, |message| message.dispatch_mode = DispatchMode::Immediate).await;
        let begin = Instant::now();
        rig.read();
        rig.drained().await;
        assert!(begin.elapsed() <= millis(440), "{:?}", begin.elapsed());
        assert_eq!(rig.log.all_done(), 40);
        assert_eq!(rig.log.running_most(), 10);
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_without_a_group_is_never_parked() {
    let ungrouped = Ungrouped::Unordered;
    for (queue, exhausted) in
        QUEUES.into_iter().flat_map(|queue| [(queue, Exhausted::ParkGroup), (queue, Exhausted::DeadLetter)])
    {
        let rig = Rig::on(
            queue,
            PoolSettings { attempts: 1, exhausted, ungrouped, ..roomy() },
            script(|seen| async move { if seen.number % 2 == 0 { never() } else { Verdict::Done } }),
        );
        rig.publish_to("", "", 4, |message| message.dispatch_mode = DispatchMode::BlockOnError).await;
        rig.publish_to("", "label", 2, |message| message.dispatch_mode = DispatchMode::Immediate).await;
        rig.read();
        rig.drained().await;
        assert_eq!(rig.log.all_done(), 3);
        let mut dead = rig.dead().await;
        dead.sort();
        assert_eq!(dead, ["#0", "#2", "label#0"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_without_a_group_goes_back_alone() {
    let (exhausted, ungrouped) = (Exhausted::GiveBack(Duration::from_secs(5)), Ungrouped::Unordered);
    for queue in QUEUES {
        let first = std::sync::atomic::AtomicBool::new(true);
        let rig = Rig::on(
            queue,
            PoolSettings { attempts: 1, exhausted, ungrouped, ..roomy() },
            script(move |seen| {
                let fails = seen.number == 1 && first.swap(false, std::sync::atomic::Ordering::Relaxed);
                async move { if fails { again() } else { Verdict::Done } }
            }),
        );
        rig.publish_to("", "", 4, |message| message.dispatch_mode = DispatchMode::BlockOnError).await;
        rig.read();
        rig.drained().await;
        assert_eq!(rig.log.all_done(), 4);
        assert_eq!(rig.log.count(|event| event.what == What::Began), 5);
    }
}

#[tokio::test(start_paused = true)]
async fn an_unknown_pool_falls_back_to_the_default_one_with_a_warning() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    rig.publish_to("nobody-made-this", "a", 5, |_| {}).await;
    rig.publish_to("", "b", 5, |_| {}).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 5), ("b", 5)]);
    let warnings = rig.router.warnings().newest(10);
    let about: Vec<_> = warnings.iter().filter(|warning| warning.about == "pool").collect();
    assert_eq!(about.len(), 1, "{warnings:?}");
    assert!(about[0].text.contains("nobody-made-this") && about[0].count == 5, "{about:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_not_a_message_is_put_into_quarantine_and_its_group_goes_on() {
    let rig = Rig::new(roomy(), takes(millis(1)));
    rig.publish("a", 1).await;
    for bad in ["{not json", "{}", r#"{"id": 7, "poolCode": "x"}"#] {
        rig.queue.publish(Publication::new(bad).group("a")).await.expect("published");
    }
    rig.publish("a", 1).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 2)]);
    assert_eq!(rig.depth().quarantined, 3);
    assert_eq!(rig.router.sources().await[0].unreadable, 3);
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_mediator_is_a_failed_attempt_and_follows_the_policy() {
    let panics = |seen: rig::Seen| async move {
        assert!(seen.number != 1 || seen.attempt > 2, "on purpose");
        Verdict::Done
    };
    let rig = Rig::new(PoolSettings { attempts: 5, ..roomy() }, script(panics));
    rig.publish("a", 3).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 3)]);
    assert_eq!(rig.log.begun("a"), [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)]);

    let pool = PoolSettings { attempts: 2, exhausted: Exhausted::ParkGroup, ..roomy() };
    let rig = Rig::new(pool, script(panics));
    rig.publish("a", 3).await;
    rig.read();
    rig.until("it is parked", |rig| {
        let pool = rig.router.pool_view("DEFAULT-POOL").unwrap();
        pool.engine.dispatchers[0].parked_lanes == 1
    })
    .await;
    assert_eq!(rig.log.begun("a"), [(0, 1), (1, 1), (1, 2)], "nothing overtakes");
    assert!(rig.router.resume("DEFAULT-POOL", "a").unwrap());
    rig.until("it is parked again", |rig| rig.log.begun("a").len() == 5 && rig.log.running() == 0).await;
    let report = rig.end().await;
    assert_eq!((report.given_back, report.settled), (2, true));
    assert_eq!(rig.depth().waiting, 2);
}

#[tokio::test(start_paused = true)]
async fn every_attempt_is_counted_once() {
    let rig = Rig::new(roomy(), fails(2));
    rig.publish("a", 10).await;
    rig.read();
    rig.drained().await;
    let view = rig.router.pool_view("DEFAULT-POOL").unwrap();
    let counts = view.counts;
    assert_eq!((counts.submitted, counts.succeeded, counts.transient, counts.failed), (10, 10, 20, 0));
    assert!(view.engine.account.balances());
    assert_eq!((view.held, view.groups, view.engine.account.outstanding), (0, 0, 0));
    let source = &rig.router.sources().await[0];
    assert_eq!((source.claimed, source.ledger.held, source.ledger.forgotten), (10, 0, 0));
}
