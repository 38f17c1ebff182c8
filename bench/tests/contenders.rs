//! Every contender runs a short piece of every kind of workload in this process, correctly.
//!
//! The point is not speed: each contender must deliver all messages, in order, one at a time per key, under the same checker
//! that judges the benchmark.

#![cfg(feature = "peers")]

use laneway_bench::contender::Entry;
use laneway_bench::contenders;
use laneway_bench::workload::{Amount, Cost, Distribution, KeysType, Tuning, Workload, named};

const MESSAGES: u64 = 10_000;

fn workload(name: &str) -> Workload {
    let tuning = Tuning { seconds: 1.0, layout: None, keys: None };
    Workload {
        // Nobody is cut off, so that losses are looked for in all.
        cap_seconds: 60.0,
        amount: Amount::Messages(MESSAGES),
        ..named(name, &tuning).unwrap().remove(0)
    }
}

fn taking_part(workload: &Workload) -> Vec<Entry> {
    contenders::all().into_iter().filter(|entry| entry.unsupported(workload).is_none()).collect()
}

fn run_all(workload: &Workload) -> usize {
    let entries = taking_part(workload);
    for entry in &entries {
        let outcome = entry.run(workload).unwrap();
        assert!(
            outcome.violations.is_empty(),
            "{} in {}: {:?}",
            entry.name,
            workload.name,
            outcome.violations
        );
        assert!(!outcome.capped, "{} in {} was cut off", entry.name, workload.name);
        assert!(outcome.metrics["messages_per_second"] > 0.0, "{}", entry.name);
    }
    entries.len()
}

#[test]
fn uniform_keys() {
    // Few keys, because the scan of document 004 costs as much as there are.
    assert_eq!(run_all(&Workload { keys: 200, ..workload("W1") }), 14);
}

#[test]
fn a_hot_key() {
    run_all(&Workload { keys: 200, ..workload("W3") });
}

#[test]
fn keys_that_come_and_go() {
    // More than one walk through the plan, so that cells are used again by later keys.
    let unbounded = Workload { amount: Amount::Messages(800_000), ..workload("W4") };
    for entry in taking_part(&unbounded).iter().filter(|entry| entry.name != "group-scan") {
        let outcome = entry.run(&unbounded).unwrap();
        assert!(outcome.violations.is_empty(), "{}: {:?}", entry.name, outcome.violations);
    }
}

#[test]
fn batches_and_several_producers() {
    run_all(&Workload { keys: 200, batch: 64, ..workload("W1-batch64") });
    run_all(&Workload { keys: 200, producers: 4, batch: 7, ..workload("W1-producers4") });
}

#[test]
fn an_open_loop_yields_latencies() {
    let paced = Workload { keys: 100, rate: Some(20_000), amount: Amount::Messages(2_000), ..workload("W6") };
    for entry in taking_part(&paced) {
        let outcome = entry.run(&paced).unwrap();
        assert!(outcome.violations.is_empty(), "{}: {:?}", entry.name, outcome.violations);
        let (intended, submission) =
            (outcome.metrics["latency_p50_seconds"], outcome.metrics["latency_from_submission_p50_seconds"]);
        assert!(submission > 0.0 && submission <= intended, "{}: {submission} {intended}", entry.name);
    }
}

#[test]
fn waiting_handlers_yield_an_efficiency() {
    let waiting = Workload {
        workers: 100,
        cost: Cost::SleepMicroseconds { min: 500, max: 1_000 },
        amount: Amount::Messages(1_000),
        ..workload("W5")
    };
    for entry in taking_part(&waiting) {
        let outcome = entry.run(&waiting).unwrap();
        assert!(outcome.violations.is_empty(), "{}: {:?}", entry.name, outcome.violations);
        let efficiency = outcome.metrics["efficiency"];
        assert!(efficiency > 0.0 && efficiency < 1.05, "{}: {efficiency}", entry.name);
    }
}

#[test]
fn only_the_product_runs_string_keys() {
    let strings =
        Workload { keys_type: KeysType::String, distribution: Distribution::Zipf, ..workload("W2") };
    assert_eq!(run_all(&strings), 1);
}
