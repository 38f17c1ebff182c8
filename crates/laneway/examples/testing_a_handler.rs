//! Testing a handler in the simulator: your code under the real engine, in virtual time, with faults, one seed per interleaving.
//!
//! The handler below books payments. It has a bug that no ordinary test shows: it notes a payment before the bank has confirmed it, so when the
//! attempt fails and is tried again, the payment is noted twice. A hundred seeds of the simulator find it in a moment; the mended handler survives all of them.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use laneway::{
    Engine, Outcome, RetryPolicy, Topology,
    sim::{Faults, Sim},
};

/// What an account has been charged, in order.
type Ledger = Arc<Mutex<Vec<u32>>>;

/// A bank that fails now and then: every seventh call.
fn bank_confirms(call: u32) -> bool {
    !call.is_multiple_of(7)
}

/// Books one payment. `early` is the bug.
fn book(ledger: &Ledger, payment: u32, call: u32, early: bool) -> Outcome {
    if early {
        ledger.lock().unwrap().push(payment);
    }
    if !bank_confirms(call) {
        return Outcome::Retry;
    }
    if !early {
        ledger.lock().unwrap().push(payment);
    }
    Outcome::Done
}

/// Runs 20 payments of each of three accounts with one seed; says whether every account was charged 1, 2, 3, … once each.
fn survives(seed: u64, early: bool) -> Result<bool, Box<dyn std::error::Error>> {
    let ledgers: [Ledger; 3] = Default::default();
    let (books, calls) = (ledgers.clone(), Mutex::new(0));
    let builder = Engine::builder()
        .topology(Topology::pool(2))
        .retry(RetryPolicy { max_attempts: 100, ..RetryPolicy::default() })
        .handle(move |context, payment: &mut u32| {
            let mut calls = calls.lock().unwrap();
            *calls += 1;
            book(&books[*context.key()], *payment, *calls, early)
        });
    let mut sim = Sim::new(seed, builder)?;
    sim.faults(Faults { fail: 0.1, crash: 0.05, stall: 0.05 });
    sim.service(|_, _, random| Duration::from_millis(random.u64(10..20)));
    for account in 0..3 {
        sim.produce((1..=20).map(move |payment| (account, payment)));
    }
    sim.run()?;
    let expected: Vec<u32> = (1..=20).collect();
    Ok(ledgers.iter().all(|ledger| *ledger.lock().unwrap() == expected))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (what, early) in [("notes before the bank confirms", true), ("notes after it", false)] {
        let mut failures = Vec::new();
        for seed in 0..100 {
            if !survives(seed, early)? {
                failures.push(seed);
            }
        }
        match failures.first() {
            Some(seed) => {
                println!("a handler that {what}: {} of 100 seeds fail, seed {seed} first", failures.len())
            }
            None => println!("a handler that {what}: all 100 seeds pass"),
        }
        assert_eq!(failures.is_empty(), !early);
    }
    Ok(())
}
