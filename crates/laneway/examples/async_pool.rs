//! Five thousand slow calls at once, on two threads, and still in order per customer.
//!
//! Each message stands for a call to some service that takes 50 to 150 ms. The pool has 5,000 slots: tasks of tokio that are used again
//! and again, not a task or a thread for each message. Run it with
//!
//! ```text
//! cargo run --release -p laneway --features tokio --example async_pool
//! ```

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use laneway::{Delivery, Engine, Topology};

const SLOTS: usize = 5_000;
const CUSTOMERS: u64 = 20_000;
const MESSAGES: u64 = 100_000;

/// How many calls are under way, and the most that there ever were.
#[derive(Default)]
struct Gauge {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// Stands for a call over the network.
async fn call(customer: u64, number: u64, gauge: &Gauge) {
    let under_way = gauge.now.fetch_add(1, Relaxed) + 1;
    gauge.most.fetch_max(under_way, Relaxed);
    tokio::time::sleep(Duration::from_millis(50 + (customer * 7 + number * 13) % 100)).await;
    gauge.now.fetch_sub(1, Relaxed);
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gauge = Arc::new(Gauge::default());
    let in_handler = gauge.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(SLOTS))
        .worker_queue_capacity(20_000)
        .handle_async(move |delivery: Delivery<u64, u64>| {
            let gauge = in_handler.clone();
            async move { call(*delivery.key(), *delivery, &gauge).await }
        })
        .build()?;

    println!("{MESSAGES} calls of about 100 ms for {CUSTOMERS} customers, {SLOTS} slots");
    let began = Instant::now();
    for number in 0..MESSAGES {
        // Where the engine is full this waits, without blocking the thread: that is all the backpressure there is.
        engine.submit_async((number % CUSTOMERS, number / CUSTOMERS)).await?;
        if (number + 1) % 20_000 == 0 {
            let under_way = gauge.now.load(Relaxed);
            println!(
                "{:>7} submitted after {:>5.2?}, {under_way} calls under way",
                number + 1,
                began.elapsed()
            );
        }
    }

    let report = engine.shutdown_async(Duration::from_secs(30)).await;
    let took = began.elapsed();
    println!("{}", report.account);
    println!(
        "{:.2} s, {:.0} calls per second, {} at once at the most",
        took.as_secs_f64(),
        MESSAGES as f64 / took.as_secs_f64(),
        gauge.most.load(Relaxed)
    );
    println!("one after the other they would have taken {:.0} minutes", MESSAGES as f64 * 0.1 / 60.0);
    Ok(())
}
