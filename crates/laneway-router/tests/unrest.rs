//! The router while everything around it changes: pools come, go and are changed, sources fail, repeat themselves and answer late, and the end.
//!
//! In virtual time, with the log of `rig/`: order, exact counts and no overlap are checked in every test, whatever else it is about.

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, pending};
use laneway_router::mediator::Verdict;
use laneway_router::message::{DispatchMode, Message};
use laneway_router::pool::{Exhausted, PoolSettings, PoolState};
use laneway_router::router::{DEFAULT_POOL, RouterError, SourceSettings};
use laneway_router::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants};
use rig::{Gate, LONG, Rig, What, again, never, roomy, script, takes, wait};
use tokio::time::Instant;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const MINUTE: Duration = Duration::from_secs(60);

// ── changes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(start_paused = true)]
async fn a_paused_pool_takes_and_holds_and_goes_on() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    rig.router.pause_pool(DEFAULT_POOL).unwrap();
    rig.publish("a", 5).await;
    rig.read();
    rig.until("all are in the pool", |rig| rig.router.held() == 5).await;
    tokio::time::sleep(MINUTE * 10).await; // paced: nothing is to happen, and no lease is to run out
    assert_eq!(rig.log.all_done(), 0);
    assert_eq!(rig.router.sources().await[0].ledger.swallowed_copies, 0);
    rig.router.resume_pool(DEFAULT_POOL).unwrap();
    rig.drained().await;
    rig.verify(&[("a", 5)]);
}

#[tokio::test(start_paused = true)]
async fn a_pool_is_resized_up_and_down_while_it_works() {
    let rig = Rig::new(PoolSettings { concurrency: 2, ..roomy() }, takes(millis(100)));
    let names: Vec<String> = (0..50).map(|group| format!("g{group}")).collect();
    for name in &names {
        rig.publish(name, 8).await;
    }
    rig.read();
    rig.done(10).await;
    assert_eq!(rig.log.running_most(), 2);
    rig.router.change_pool(DEFAULT_POOL, PoolSettings { concurrency: 40, ..roomy() }).unwrap();
    rig.until("forty are at work", |rig| rig.log.running() == 40).await;
    rig.router.change_pool(DEFAULT_POOL, PoolSettings { concurrency: 1, ..roomy() }).unwrap();
    rig.until("one is at work", |rig| rig.log.running() <= 1).await;
    rig.router.change_pool(DEFAULT_POOL, PoolSettings { concurrency: 10, ..roomy() }).unwrap();
    rig.drained().await;
    rig.verify(&names.iter().map(|name| (name.as_str(), 8)).collect::<Vec<_>>());
}

/// In one step, not in thousands that each copy all the others.
#[tokio::test(start_paused = true)]
async fn thousands_of_slots_come_and_go_quickly() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    let begin = std::time::Instant::now();
    for concurrency in [5_000, 10, 5_000, 1] {
        rig.router.change_pool(DEFAULT_POOL, PoolSettings { concurrency, ..roomy() }).unwrap();
    }
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    rig.publish("a", 3).await;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 3)]);
}

#[tokio::test(start_paused = true)]
async fn a_change_that_cannot_be_leaves_the_pool_as_it_was() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    let affine = PoolSettings { affinity: 2, ..roomy() };
    let error = rig.router.change_pool(DEFAULT_POOL, affine).unwrap_err();
    assert!(error.to_string().contains("affinity"), "{error}");
    let error = rig.router.change_pool(DEFAULT_POOL, PoolSettings { attempts: 0, ..roomy() }).unwrap_err();
    assert!(error.to_string().contains("attempts"), "{error}");
    assert_eq!(*rig.router.pool_view(DEFAULT_POOL).unwrap().settings, roomy());
    let unknown = rig.router.change_pool("none", roomy()).unwrap_err();
    assert_eq!(unknown, RouterError::NoSuchPool("none".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_changed_rate_holds_from_now_on_and_an_unchanged_one_goes_on() {
    let slow = PoolSettings { rate_per_second: Some(1.0), ..roomy() };
    let rig = Rig::new(slow.clone(), takes(millis(1)));
    for name in ["a", "b", "c", "d", "e", "f"] {
        rig.publish(name, 1).await;
    }
    let begin = Instant::now();
    rig.read();
    rig.done(1).await;
    // Resized several times at the same rate: no token comes of it.
    for concurrency in [11, 12, 13] {
        rig.router.change_pool(DEFAULT_POOL, PoolSettings { concurrency, ..slow.clone() }).unwrap();
    }
    rig.done(3).await;
    rig.router.change_pool(DEFAULT_POOL, roomy()).unwrap();
    rig.drained().await;
    let starts = rig.log.starts(begin);
    assert!(starts[1] - starts[0] >= 995 && starts[2] - starts[1] >= 995, "{starts:?}");
    assert!(starts[5] - starts[2] < 50, "{starts:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_goes_drains_and_its_groups_never_run_in_two_places() {
    let rig = Rig::new(roomy(), takes(millis(50)));
    rig.router.add_pool("x", roomy()).unwrap();
    rig.publish_to("x", "a", 30, |_| {}).await;
    rig.publish_to("x", "b", 30, |_| {}).await;
    rig.read();
    rig.done(10).await;
    let publishing = async {
        for _ in 0..20 {
            rig.publish_to("x", "a", 1, |_| {}).await;
            tokio::time::sleep(millis(70)).await; // paced: messages come while the pool drains, and after
        }
    };
    let (removed, ()) = tokio::join!(rig.router.remove_pool("x", MINUTE), publishing);
    removed.unwrap();
    assert_eq!(rig.router.pool_view("x").unwrap_err(), RouterError::NoSuchPool("x".to_owned()));
    rig.drained().await;
    rig.verify(&[("a", 50), ("b", 30)]);
    assert!(rig.router.pool_view(DEFAULT_POOL).unwrap().counts.succeeded > 0, "the default pool stood in");
}

#[tokio::test(start_paused = true)]
async fn a_pool_whose_call_does_not_end_goes_on_draining() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.router.add_pool("x", roomy()).unwrap();
    tokio::task::yield_now().await;
    rig.publish_to("x", "a", 2, |_| {}).await;
    rig.publish_to("x", "b", 2, |_| {}).await;
    rig.read();
    rig.until("they are under way", |rig| rig.log.running() == 2).await;
    // One that stops while the pool drains goes back as well.
    assert!(rig.router.park("x", "b", "not today").unwrap());
    let error = rig.router.remove_pool("x", MINUTE).await.unwrap_err();
    assert_eq!(error, RouterError::NotDrained { left: 4 });
    assert_eq!(rig.router.pause_pool("x").unwrap_err(), RouterError::Draining("x".to_owned()));
    gate.open_for_good();
    rig.router.remove_pool("x", MINUTE).await.unwrap();
    rig.until("a is done", |rig| rig.log.done("a").len() == 2).await;
    assert_eq!(rig.log.done("b"), [0]);
    assert!(rig.router.resume(DEFAULT_POOL, "b").unwrap());
    rig.drained().await;
    rig.verify(&[("a", 2), ("b", 2)]);
}

/// To the source a group is one, whatever pools its messages name: where one of them has no room, all behind it wait, and nobody overtakes.
#[tokio::test(start_paused = true)]
async fn a_group_of_two_pools_is_one_to_its_source() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    let small = PoolSettings { capacity: 1, group_capacity: 1, ..roomy() };
    rig.router.add_pool("x", small).unwrap();
    rig.publish_to("x", "a", 2, |_| {}).await;
    rig.publish_to("", "a", 2, |_| {}).await;
    rig.publish_to("", "b", 1, |_| {}).await;
    rig.read();
    rig.until("the pool is full", |rig| rig.log.running() == 2).await;
    tokio::time::sleep(MINUTE).await; // paced: nothing is to happen
    assert_eq!((rig.log.begun("a"), rig.log.begun("b")), (vec![(0, 1)], vec![(0, 1)]));
    gate.open_for_good();
    rig.drained().await;
    let mut begun = rig.log.begun("a");
    assert_eq!(begun[..2], [(0, 1), (1, 1)]);
    begun.sort_unstable();
    assert_eq!(begun, [(0, 1), (1, 1), (2, 1), (3, 1)]);
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_comes_waits_for_what_the_default_pool_has_of_it() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.publish_to("x", "a", 3, |_| {}).await;
    rig.read();
    rig.until("the default pool stands in", |rig| rig.router.held() == 3).await;
    rig.router.add_pool("x", roomy()).unwrap();
    rig.publish_to("x", "a", 3, |_| {}).await;
    tokio::time::sleep(MINUTE).await; // paced: the new ones must not begin
    assert_eq!(rig.log.begun("a").len(), 1);
    let view = rig.router.pool_view("x").unwrap();
    assert_eq!((view.state, view.held), (PoolState::Waiting, 0));
    gate.open_for_good();
    rig.drained().await;
    rig.verify(&[("a", 6)]);
    assert_eq!(rig.router.pool_view("x").unwrap().counts.succeeded, 3);
    assert_eq!(rig.router.pool_view("x").unwrap().state, PoolState::Open);
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_waits_can_be_paused_and_removed() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.publish_to("x", "a", 1, |_| {}).await;
    rig.publish_to("y", "b", 1, |_| {}).await;
    rig.read();
    rig.until("the default pool stands in", |rig| rig.router.held() == 2).await;
    rig.router.add_pool("x", roomy()).unwrap();
    rig.router.add_pool("y", roomy()).unwrap();
    rig.router.pause_pool("x").unwrap();
    rig.router.remove_pool("y", MINUTE).await.unwrap();
    gate.open_for_good();
    rig.drained().await;
    assert_eq!(rig.router.pool_view("x").unwrap().state, PoolState::Paused);
    rig.publish_to("x", "a", 1, |_| {}).await;
    rig.publish_to("y", "b", 1, |_| {}).await;
    rig.until("the one whose pool is gone is done", |rig| rig.log.done("b").len() == 2).await;
    assert_eq!(rig.log.done("a").len(), 1);
    rig.router.resume_pool("x").unwrap();
    rig.drained().await;
    rig.verify(&[("a", 2), ("b", 2)]);
}

/// Two who remove the same pool must not remove the one that a third has added meanwhile.
#[tokio::test(start_paused = true)]
async fn a_pool_that_was_added_again_is_not_removed_by_who_meant_the_old_one() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.router.add_pool("x", roomy()).unwrap();
    tokio::task::yield_now().await;
    rig.publish_to("x", "a", 1, |_| {}).await;
    rig.read();
    rig.until("it is under way", |rig| rig.log.running() == 1).await;
    let again = async {
        rig.router.remove_pool("x", MINUTE).await.unwrap();
        rig.router.add_pool("x", roomy()).unwrap();
    };
    let other = rig.router.remove_pool("x", MINUTE);
    let open = async { gate.open_for_good() };
    let ((), other, ()) = tokio::join!(again, other, open);
    other.unwrap();
    assert!(rig.router.pool_view("x").is_ok(), "the new pool is there");
}

// ── faults of the source ────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(start_paused = true)]
async fn a_source_that_fails_and_comes_back_loses_nothing() {
    let rig = Rig::new(roomy(), takes(millis(20)));
    rig.publish("a", 30).await;
    rig.source.faults().failing_claims = 5;
    rig.read();
    rig.until("it has been asked", |rig| rig.source.faults().claims > 1).await;
    assert!(!rig.router.sources().await[0].healthy);
    rig.done(5).await;
    assert!(rig.router.sources().await[0].healthy);
    rig.source.faults().failing_settles = 6;
    rig.publish("a", 10).await;
    rig.drained().await;
    rig.verify(&[("a", 40)]);
    assert!(rig.router.warnings().newest(10).iter().any(|warning| warning.about == "source"));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_lost_repeats_no_delivery() {
    let rig = Rig::new(roomy(), takes(millis(20)));
    rig.publish("a", 10).await;
    rig.source.faults().lost_answers = 4;
    rig.read();
    rig.drained().await;
    rig.verify(&[("a", 10)]);
    rig.until("the ledger is empty", |rig| rig.router.held() == 0 && rig.depth().leased == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_cannot_be_written_keeps_nobody_else_waiting() {
    let rig = Rig::new(roomy(), takes(millis(20)));
    for group in 0..40 {
        rig.publish(&format!("g{group}"), 1).await;
    }
    // All of them end at once, so that they travel together.
    let late = Gate::new();
    rig.source.faults().late_settles = Some(late.clone());
    rig.read();
    rig.done(40).await;
    let poison = rig.source.faults().handed_out.values().nth(20).unwrap().receipt.clone();
    rig.source.faults().poisoned.insert(poison);
    rig.source.faults().late_settles = None;
    late.open_for_good();
    rig.until("all others are settled", |rig| rig.depth().leased == 1).await;
    rig.source.faults().poisoned.clear();
    rig.drained().await;
    assert_eq!(rig.log.all_done(), 40);
}

#[tokio::test(start_paused = true)]
async fn copies_of_what_is_held_are_swallowed() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.publish("a", 5).await;
    rig.read();
    rig.until("one is under way", |rig| rig.log.running() == 1).await;
    let copies: Vec<_> = rig.source.faults().handed_out.values().cloned().collect();
    assert_eq!(copies.len(), 5);
    rig.source.faults().copies.extend(copies.iter().chain(&copies).cloned());
    rig.publish("b", 1).await;
    rig.until("the copies were handed out", |rig| rig.source.faults().copies.is_empty()).await;
    gate.open_for_good();
    rig.drained().await;
    rig.verify(&[("a", 5), ("b", 1)]);
    assert_eq!(rig.router.sources().await[0].ledger.swallowed_copies, 10);
}

/// The leases run out because nobody could renew them, and the messages are handed out again: to the same router, which has them already.
#[tokio::test(start_paused = true)]
async fn leases_that_ran_out_bring_copies_and_no_second_delivery() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.publish("a", 5).await;
    rig.source.faults().failing_extends = 1_000_000;
    rig.read();
    rig.until("one is under way", |rig| rig.log.running() == 1).await;
    tokio::time::sleep(MINUTE * 3).await; // paced: the leases run out, several times
    assert!(rig.router.sources().await[0].ledger.swallowed_copies > 0);
    rig.source.faults().failing_extends = 0;
    gate.open_for_good();
    rig.drained().await;
    rig.verify(&[("a", 5)]);
}

/// Somebody else got the group while nobody could renew its leases: what has not begun here goes back, and order holds.
#[tokio::test(start_paused = true)]
async fn a_group_that_was_lost_to_somebody_else_is_let_go() {
    let gate = Gate::new();
    let rig = Rig::new(roomy(), gate.script());
    rig.publish("a", 5).await;
    rig.read();
    rig.until("one is under way", |rig| rig.log.running() == 1).await;
    rig.source.faults().failing_claims = 40;
    rig.source.faults().failing_extends = 150;
    let other = rig.store.queue("orders").unwrap();
    let wants = Wants { most: 2, wait: MINUTE * 5, lease: MINUTE * 60 };
    let stolen = other.claim(wants).await.unwrap();
    assert_eq!(stolen.len(), 2, "the leases had run out");
    // The leases are renewed in vain; then the one that is under way comes back.
    rig.until("the loss is known", |rig| {
        rig.router.warnings().newest(10).iter().any(|warning| warning.about == "lease")
    })
    .await;
    gate.open_for_good();
    rig.until("the pool has let go", |rig| rig.router.held() == 0).await;
    assert_eq!(rig.log.begun("a"), [(0, 1)], "nothing more of it was begun here");
    let done = stolen.into_iter().map(|delivery| (delivery.receipt, laneway_router::source::Disposal::Done));
    other.settle(done.collect()).await.unwrap();
    rig.drained().await;
    assert_eq!(rig.log.done("a"), [0, 2, 3, 4], "the first two were somebody else's");
    assert_eq!(rig.log.violations(), Vec::<String>::new());
}

/// A claim is under way and has a later message of a group in its hands while an earlier one is given back, confirmed and forgotten.
#[tokio::test(start_paused = true)]
async fn a_claim_that_answers_late_does_not_overtake_what_went_back_meanwhile() {
    let broken = Arc::new(AtomicBool::new(true));
    let target = Arc::clone(&broken);
    let pool = PoolSettings { attempts: 1, exhausted: Exhausted::GiveBack(MINUTE), ..roomy() };
    let gate = Gate::new();
    let pass = gate.clone();
    let rig = Rig::new(
        pool,
        script(move |_| {
            let (broken, gate) = (Arc::clone(&target), pass.clone());
            async move {
                gate.pass().await;
                if broken.load(Relaxed) { again() } else { Verdict::Done }
            }
        }),
    );
    rig.publish("a", 3).await;
    rig.read();
    rig.until("the first is under way", |rig| rig.log.running() == 1).await;
    let late = Gate::new();
    rig.source.faults().late_claims = Some(late.clone());
    rig.publish("a", 3).await;
    rig.until("the claim has them", |rig| rig.depth().leased == 6).await;
    gate.open(1);
    rig.until("the first three are back", |rig| rig.depth().waiting == 3).await;
    tokio::time::sleep(millis(500)).await; // paced: everybody knows that they are back
    broken.store(false, Relaxed);
    gate.open_for_good();
    rig.source.faults().late_claims = None;
    late.open_for_good();
    rig.drained().await;
    rig.verify(&[("a", 6)]);
    assert!(rig.log.begun("a").len() <= 8, "given back once, not again and again: {:?}", rig.log.begun("a"));
}

/// The message is done, the lease has run out, and the copy comes after the ledger has forgotten it.
#[tokio::test(start_paused = true)]
async fn what_comes_again_before_its_return_is_confirmed_is_not_forgotten() {
    let pool = PoolSettings { attempts: 1, exhausted: Exhausted::GiveBack(Duration::ZERO), ..roomy() };
    let first = AtomicBool::new(true);
    let mut rig = Rig::new(
        pool,
        script(move |_| {
            let fails = first.swap(false, Relaxed);
            async move { if fails { again() } else { Verdict::Done } }
        }),
    );
    // Longer than any test waits: what nobody holds stays where it is.
    rig.settings.lease = LONG * 10;
    let gate = Gate::new();
    rig.source.faults().late_answers = Some(gate.clone());
    rig.publish("a", 3).await;
    rig.read();
    let has_come_again =
        |rig: &Rig| rig.source.faults().handed_out.values().next().is_some_and(|head| head.attempt == 2);
    rig.until("the head has come again", has_come_again).await;
    let claims = rig.source.faults().claims;
    rig.until("it was taken", |rig| rig.source.faults().claims > claims).await;
    assert!(rig.router.sources().await[0].ledger.swallowed_copies > 0);
    gate.open_for_good();
    rig.drained().await;
    rig.verify(&[("a", 3)]);
    assert_eq!(rig.log.begun("a"), [(0, 1), (0, 1), (1, 1), (2, 1)]);
    assert_eq!(rig.router.sources().await[0].ledger.held, 0);
}

#[tokio::test(start_paused = true)]
async fn a_source_that_ends_by_itself_is_reported_and_one_that_we_close_is_not() {
    let claims = Rig::new(roomy(), takes(millis(20)));
    claims.source.faults().closed = true;
    claims.read();
    let settles = Rig::new(roomy(), takes(millis(20)));
    settles.read();
    settles.until("it is read", |rig| rig.source.faults().claims == 1).await;
    settles.source.faults().closed = true;
    settles.publish("a", 1).await;
    settles.done(1).await;
    for rig in [claims, settles] {
        rig.until("it has been asked", |rig| rig.source.faults().claims > 0).await;
        tokio::time::sleep(millis(100)).await; // paced: in virtual time, until all that can run has run
        let source = rig.router.sources().await.remove(0);
        assert_eq!((source.healthy, source.trouble.as_deref()), (false, Some("the source is closed")));
        let told = rig.router.warnings().newest(10);
        assert_eq!(told.iter().filter(|warning| warning.about == "source").count(), 1, "{told:?}");
    }
    let closing = Rig::new(roomy(), takes(millis(20)));
    closing.read();
    closing.router.close();
    closing.source.faults().closed = true;
    closing.end().await;
    assert!(closing.router.sources().await[0].healthy);
}

/// What would stay for long (parked, in a pool that is paused, waiting for its target) goes back at once; what can run runs.
#[tokio::test(start_paused = true)]
async fn a_source_that_goes_does_not_wait_for_what_is_stuck() {
    let fixed = Arc::new(AtomicBool::new(false));
    let target = Arc::clone(&fixed);
    let rig = Rig::new(
        PoolSettings { backoff: millis(500), ..roomy() },
        script(move |seen| {
            let is_fixed = target.load(Relaxed);
            async move {
                tokio::time::sleep(millis(1_000)).await; // paced: a call takes its time, which is virtual
                match seen.group.as_str() {
                    "parked" if !is_fixed => never(),
                    "patient" if !is_fixed => wait(MINUTE * 60),
                    "failed" if !is_fixed && seen.attempt == 1 => again(),
                    _ => Verdict::Done,
                }
            }
        }),
    );
    rig.router.add_pool("x", roomy()).unwrap();
    let block = |message: &mut Message| message.dispatch_mode = DispatchMode::BlockOnError;
    rig.publish_to(DEFAULT_POOL, "parked", 3, block).await;
    rig.publish("patient", 3).await;
    rig.publish_to("x", "paused", 3, |_| {}).await;
    rig.publish_to("x", "failed", 3, |_| {}).await;
    rig.publish("busy", 5).await;
    rig.read();
    rig.until("one has failed in the pool", |rig| {
        rig.log.count(|event| event.what == What::Ended(again())) == 1
    })
    .await;
    rig.router.pause_pool("x").unwrap();
    rig.until("one is parked", |rig| rig.router.pool_view(DEFAULT_POOL).unwrap().parked_groups == 1).await;
    let begin = Instant::now();
    assert!(rig.router.remove_source("orders", MINUTE * 60).await);
    let took = begin.elapsed();
    assert!((millis(2_000)..millis(10_000)).contains(&took), "{took:?}");
    assert_eq!((rig.router.held(), rig.depth().leased), (0, 0));
    assert_eq!(rig.log.done("busy"), [0, 1, 2, 3, 4]);

    // Whoever reads them then has them in order, and as parked as before.
    fixed.store(true, Relaxed);
    rig.read();
    rig.router.resume_pool("x").unwrap();
    rig.until("the others are done", |rig| {
        ["paused", "failed", "patient"].iter().all(|group| rig.log.done(group).len() == 3)
    })
    .await;
    assert_eq!(rig.log.begun("parked"), [(0, 1)]);
    assert!(rig.router.resume(DEFAULT_POOL, "parked").unwrap());
    rig.drained().await;
    rig.verify(&[("parked", 3), ("patient", 3), ("paused", 3), ("failed", 3), ("busy", 5)]);
}

/// One that takes no settlements any more, perhaps because it is gone, is not waited for longer than its leases last.
#[tokio::test(start_paused = true)]
async fn a_source_that_goes_and_does_not_answer_is_closed_when_its_leases_are_over() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    rig.source.faults().failing_settles = 1_000_000;
    rig.source.faults().failing_extends = 1_000_000;
    rig.publish("a", 3).await;
    rig.read();
    rig.done(3).await;
    let begin = Instant::now();
    assert!(rig.router.remove_source("orders", MINUTE * 60).await);
    assert!(begin.elapsed() < MINUTE, "{:?}", begin.elapsed());
    rig.source.faults().failing_settles = 0;
    rig.read();
    rig.drained().await;
    rig.verify_first("a", 3);
}

#[tokio::test(start_paused = true)]
async fn a_router_that_closes_takes_no_pool() {
    let rig = Rig::new(roomy(), takes(millis(20)));
    rig.router.close();
    assert_eq!(rig.router.add_pool("late", roomy()), Err(RouterError::Closing));
    assert_eq!(rig.router.codes(), ["DEFAULT-POOL"]);
}

#[tokio::test(start_paused = true)]
async fn what_was_done_with_a_stale_receipt_is_not_delivered_again() {
    let rig = Rig::new(roomy(), takes(millis(100)));
    rig.publish("a", 3).await;
    let (claims, settles) = (Gate::new(), Gate::new());
    rig.read();
    rig.until("it is under way", |rig| rig.log.running() == 1).await;
    // The source is slow to take settlements, nobody can renew, and the next claim answers late.
    rig.source.faults().late_settles = Some(settles.clone());
    rig.source.faults().late_claims = Some(claims.clone());
    rig.source.faults().failing_extends = 1_000_000;
    rig.done(3).await;
    let handed_out = |rig: &Rig| rig.source.faults().handed_out[&1].receipt.clone();
    let first = handed_out(&rig);
    rig.until("it was handed out again", |rig| handed_out(rig) != first).await;
    rig.source.faults().late_settles = None;
    settles.open_for_good();
    rig.until("the settlement came too late", |_| true).await;
    tokio::time::sleep(millis(500)).await; // paced: the answer is there before the claim's
    rig.source.faults().late_claims = None;
    rig.source.faults().failing_extends = 0;
    claims.open_for_good();
    rig.drained().await;
    rig.verify(&[("a", 3)]);
    assert!(rig.router.sources().await[0].ledger.stale_settlements > 0);
}

/// Two queues have messages of one group: they are one lane, and each queue's messages keep their order, also when the lane goes back.
#[tokio::test(start_paused = true)]
async fn a_group_in_two_sources_is_one_lane() {
    let rig = Rig::new(
        PoolSettings { attempts: 1, exhausted: Exhausted::GiveBack(millis(500)), ..roomy() },
        script({
            let calls = std::sync::atomic::AtomicU32::new(0);
            move |_| {
                let fails = calls.fetch_add(1, Relaxed) % 7 == 3;
                async move {
                    tokio::time::sleep(millis(10)).await; // paced: a call takes its time
                    if fails { again() } else { Verdict::Done }
                }
            }
        }),
    );
    let second = rig.store.queue("second").unwrap();
    let publisher = rig.store.queue("second").unwrap();
    for number in 1_000..1_030 {
        let message = rig::message("a", number, DEFAULT_POOL);
        let publication = laneway_router::source::embedded::Publication::of(&message);
        publisher.publish(publication).await.unwrap();
    }
    rig.publish("a", 30).await;
    rig.read();
    rig.router.add_source(Arc::new(second), rig.settings);
    rig.done(60).await;
    assert_eq!(rig.log.violations(), Vec::<String>::new(), "one at a time, whatever queue it is from");
    let (first, second): (Vec<u64>, Vec<u64>) =
        rig.log.done("a").into_iter().partition(|number| *number < 1_000);
    assert_eq!(first, (0..30).collect::<Vec<_>>());
    assert_eq!(second, (1_000..1_030).collect::<Vec<_>>());
}

// ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(start_paused = true)]
async fn a_shutdown_delivers_what_it_can_and_gives_back_the_rest() {
    let rig = Rig::new(PoolSettings { concurrency: 1, ..roomy() }, takes(millis(1_000)));
    rig.publish("a", 30).await;
    rig.publish("b", 30).await;
    rig.read();
    rig.done(3).await;
    let report = rig.router.shutdown(Duration::from_secs(10)).await;
    assert!(report.settled && report.still_running == 0, "{report:?}");
    let depth = rig.depth();
    let done = rig.log.all_done();
    assert!(done >= 12, "{done} were done");
    assert_eq!((depth.leased, depth.waiting as usize), (0, 60 - done), "nothing is lost, nothing is held");
    assert_eq!(rig.log.done("a"), (0..rig.log.done("a").len() as u64).collect::<Vec<_>>());
    assert_eq!(rig.log.violations(), Vec::<String>::new());
    assert_eq!(rig.router.add_pool("x", roomy()).unwrap_err(), RouterError::Closing);
}

/// What is parked or paused is not waited for: it cannot be delivered without somebody's doing.
#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_what_is_parked_or_paused() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    rig.router.add_pool("x", roomy()).unwrap();
    tokio::task::yield_now().await;
    rig.router.pause_pool("x").unwrap();
    rig.router.pause_pool(DEFAULT_POOL).unwrap();
    rig.publish("a", 3).await;
    rig.publish_to("x", "b", 3, |_| {}).await;
    rig.read();
    rig.until("they are in the pools", |rig| rig.router.held() == 6).await;
    rig.router.park(DEFAULT_POOL, "a", "not today").unwrap();
    rig.router.resume_pool(DEFAULT_POOL).unwrap();
    let begin = Instant::now();
    let report = rig.router.shutdown(MINUTE * 10).await;
    assert_eq!((report.given_back, report.settled), (6, true));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert_eq!(rig.depth().waiting, 6);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_although_an_attempt_does_not() {
    let rig = Rig::new(roomy(), script(|_| std::future::pending()));
    rig.publish("a", 2).await;
    rig.publish("b", 1).await;
    rig.read();
    rig.until("two are under way", |rig| rig.log.running() == 2).await;
    let report = rig.router.shutdown(Duration::from_secs(5)).await;
    assert_eq!((report.given_back, report.still_running, report.settled), (1, 2, true));
    let depth = rig.depth();
    assert_eq!((depth.waiting, depth.leased), (1, 2));
    // Nobody renews the leases any more, so another consumer gets them.
    let other = rig.store.queue("orders").unwrap();
    let wants = Wants { most: 10, wait: MINUTE, lease: MINUTE };
    assert_eq!(other.claim(wants).await.unwrap().len(), 3);
}

/// A source that answers to nothing.
struct Hung(String);

impl Source for Hung {
    fn name(&self) -> &str {
        &self.0
    }

    fn claim(&self, _: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        pending().boxed()
    }

    fn settle(&self, _: Vec<(Receipt, Disposal)>) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        pending().boxed()
    }

    fn extend(&self, _: Vec<Receipt>, _: Duration) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        pending().boxed()
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        pending().boxed()
    }
}

/// Who looks at the sources has a limit of his own, of ten seconds for Prometheus.
#[tokio::test(start_paused = true)]
async fn sources_that_hang_are_waited_for_at_the_same_time() {
    let rig = Rig::new(roomy(), takes(millis(10)));
    for number in 0..8 {
        let source = Arc::new(Hung(format!("hung{number}")));
        rig.router.add_source(source, SourceSettings { lease: MINUTE });
    }
    let begin = Instant::now();
    let views = rig.router.sources().await;
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    assert_eq!(views.iter().filter(|view| view.depth.is_none()).count(), 8);
}
