//! Memory follows the work outstanding, not the keys ever seen; and a message costs no allocation beyond its own.
//!
//! Millions of keys come and go while the resident memory of the process is looked at, and an allocator that counts is asked what a
//! steady stream of messages has cost. The tests of this file take turns: both measures are of the whole process.

mod witness;

use std::{
    alloc::System,
    sync::{Mutex, MutexGuard, PoisonError},
};

use laneway::{Bound, Builder, Engine, Flows, Message, Outcome, Overflow, Topology, WaitStrategy};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use witness::{DEADLINE, send};

#[global_allocator]
static COUNTING: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// One measurement at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the process has in memory, in bytes. `None` where there is no such file to read it from.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kilobytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kilobytes * 1_024)
}

const MEGABYTE: u64 = 1_024 * 1_024;

/// Sends a message to each of 200,000 keys, then to 1,800,000 others; the latter must leave no trace.
fn keys_come_and_go(name: &str, engine: &Engine<u64, u64>, message: impl Fn(u64) -> Message<u64, u64>) {
    let bring = |keys: std::ops::Range<u64>| {
        send(engine, keys.map(&message));
        assert!(engine.wait_quiet(DEADLINE));
    };
    bring(0..200_000);
    let before = resident();
    bring(200_000..2_000_000);
    let snapshot = engine.snapshot();
    assert_eq!(snapshot.account.done, 2_000_000, "{name}");
    assert!(snapshot.dispatchers.iter().all(|dispatcher| dispatcher.active_lanes == 0), "{name}");
    if let (Some(before), Some(after)) = (before, resident()) {
        let grown = after.saturating_sub(before);
        // The least trace of a key, 16 bytes, would be 28 of them. What is bounded, full queues and tombstones and what an allocator keeps of them, may come after the first look.
        println!("{name}: {grown} bytes more");
        assert!(
            grown < 10 * MEGABYTE,
            "{name}: from {before} to {after} bytes, {} MB more",
            grown / MEGABYTE
        );
    }
}

fn idle_handler(topology: Topology<u64>) -> Builder<u64, u64> {
    Engine::builder().topology(topology).handle(|_, _: &mut u64| ())
}

#[test]
fn two_million_families_leave_no_trace() {
    let _alone = alone();
    let engine = idle_handler(Topology::partitioned(2, 1)).build().unwrap();
    keys_come_and_go("partitioned", &engine, |key| Message::new(key, 0));
}

#[test]
fn two_million_keys_placed_by_load_leave_no_trace() {
    let _alone = alone();
    let engine = idle_handler(Topology::per_worker(2)).build().unwrap();
    keys_come_and_go("per_worker", &engine, |key| Message::new(key, 0));
    assert_eq!(engine.snapshot().active_mappings, 0);
}

#[test]
fn two_million_finished_flows_leave_a_bounded_number_of_tombstones() {
    let _alone = alone();
    let engine = idle_handler(Topology::per_worker(2)).flows(Flows::default()).build().unwrap();
    keys_come_and_go("flows", &engine, |key| Message::finish(key, 0));
    assert_eq!(engine.snapshot().active_mappings, 0);
}

#[test]
fn flows_that_nobody_finishes_stay_within_their_cap() {
    let _alone = alone();
    let flows = Flows { max: 10_000, ..Flows::default() };
    let engine = idle_handler(Topology::per_worker(2)).flows(flows).build().unwrap();
    keys_come_and_go("unfinished flows", &engine, |key| Message::new(key, 0));
    let left = engine.snapshot().active_mappings;
    assert!(left <= 12_000, "{left} mappings");
}

/// What this process has allocated and not given back. (What an allocator keeps of that for later, and the system therefore does not get back, is the allocator's affair.)
fn allocated() -> usize {
    let stats = COUNTING.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

/// What goes on when a burst is over.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    /// Nothing.
    Nothing,
    /// One message at a time keeps coming, so that the worker is never idle for long.
    ATrickle,
    /// A few lanes stay, in the middle of what the burst has filled.
    AFewLanes,
}

/// Whether the worker sleeps when it is idle or never does, and whatever goes on: memory follows what is outstanding.
#[test]
fn a_burst_gives_its_memory_back() {
    let _alone = alone();
    for wait in [WaitStrategy::Park, WaitStrategy::BusySpin] {
        for then in [Then::Nothing, Then::ATrickle, Then::AFewLanes] {
            burst(wait, then);
        }
    }
}

const BURST: u64 = 500_000;

fn burst(wait: WaitStrategy, then: Then) {
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(|_, body: &mut u64| if *body == 1 { Outcome::ParkLane } else { Outcome::Done })
        .wait(wait)
        .worker_queue_capacity(1_000_000)
        .ingress_capacity(1_000_000)
        .build()
        .unwrap();
    let before = allocated();
    assert!(engine.pause("pool-0"));
    let stays = |key: u64| then == Then::AFewLanes && key % (BURST / 10) == 1_000;
    send(&engine, (0..BURST).map(|key| (key, u64::from(stays(key)))));
    assert!(engine.explain(&0).is_some()); // Looking at a lane brings everything that was accepted into its lane.
    assert_eq!(engine.snapshot().dispatchers[0].active_lanes, BURST as usize);
    witness::eventually("a lane with one message takes no more than it should", || {
        // A cache line, a place with a message of 16 bytes, an entry of the table, and what slabs grow ahead. What the messages came in is given back.
        let per_lane = (allocated() - before) / BURST as usize;
        per_lane <= 125
    });
    assert!(engine.unpause("pool-0"));
    assert!(engine.wait_quiet(DEADLINE));
    // A worker gives back what there is a moment after it has become little.
    witness::eventually(&format!("it is given back, whatever goes on: {wait:?}, {then:?}"), || {
        if then == Then::ATrickle {
            send(&engine, [(0, 0)]);
        }
        allocated().saturating_sub(before) < 300_000
    });
    let left = engine.snapshot().dispatchers[0].active_lanes;
    assert!(left <= if then == Then::AFewLanes { 10 } else { 1 }, "{left} lanes");
    let report = engine.shutdown(DEADLINE);
    assert_eq!(report.returned.len(), if then == Then::AFewLanes { 10 } else { 0 });
}

// ── allocations ────────────────────────────────────────────────────────────────────────────────────────────────────

/// Lets a stream of messages through until all buffers have their size, then counts.
fn allocations_per_message(engine: &Engine<u64, u64>, keys: u64) -> f64 {
    let messages = 300_000;
    let stream = || {
        send(engine, (0..messages).map(|number| (number % keys, number)));
        assert!(engine.wait_quiet(DEADLINE));
    };
    stream();
    let region = Region::new(COUNTING);
    stream();
    let counted = region.change();
    (counted.allocations + counted.reallocations) as f64 / messages as f64
}

#[test]
fn a_message_in_the_steady_state_allocates_nothing() {
    let _alone = alone();
    type Case = (&'static str, fn() -> Builder<u64, u64>);
    let cases: [Case; 5] = [
        ("partitioned", || idle_handler(Topology::partitioned(2, 1))),
        ("pool", || idle_handler(Topology::pool(2))),
        ("per worker", || idle_handler(Topology::per_worker(2))),
        ("with a bound per lane", || idle_handler(Topology::partitioned(2, 1)).lane_capacity(4_096)),
        ("drop newest", || idle_handler(Topology::pool(2)).overflow_at(Bound::Engine, Overflow::DropNewest)),
    ];
    for (name, builder) in cases {
        for keys in [16, 20_000] {
            let engine = builder().build().unwrap();
            let per_message = allocations_per_message(&engine, keys);
            println!("{name}, {keys} keys: {per_message:.5} allocations per message");
            assert!(per_message < 0.01, "{name}, {keys} keys: {per_message} allocations per message");
        }
    }
}

#[test]
fn a_batch_in_the_steady_state_allocates_nothing() {
    let _alone = alone();
    let engine = idle_handler(Topology::partitioned(2, 1)).build().unwrap();
    let (batches, size) = (3_000, 64);
    let stream = || {
        for batch in 0..batches {
            let report = engine.submit_batch((0..size).map(|number| (batch * size + number, number)));
            assert_eq!(report.accepted as u64, size);
        }
        assert!(engine.wait_quiet(DEADLINE));
    };
    stream();
    let region = Region::new(COUNTING);
    stream();
    let counted = region.change();
    let per_batch = (counted.allocations + counted.reallocations) as f64 / batches as f64;
    println!("{per_batch:.4} allocations per batch");
    assert!(per_batch < 0.3, "{per_batch} allocations per batch");
}

#[cfg(feature = "tokio")]
#[test]
fn a_message_on_a_slot_allocates_nothing_of_ours() {
    let _alone = alone();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let engine = Engine::builder()
        .topology(Topology::pool(4))
        .runtime(runtime.handle().clone())
        .handle_async(|_: laneway::Delivery<u64, u64>| async {})
        .build()
        .unwrap();
    let per_message = allocations_per_message(&engine, 1_000);
    println!("on slots: {per_message:.5} allocations per message");
    // Slots that rest give back what a burst needed, at once. Where the submitter has to wait for a core they rest after each burst, and that is two or three allocations for each chunk of messages.
    assert!(per_message < 0.03, "{per_message} allocations per message");
}
