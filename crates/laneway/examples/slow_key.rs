//! One slow customer beside fast ones, and the answer to "why is this message waiting?".
//!
//! Customer "slow" takes half a second for each message, everybody else a millisecond. There are two workers: while one of them is with the slow
//! customer, the other one serves everybody else. Nobody waits for the slow one but its own messages.
//!
//! ```text
//! cargo run -p laneway --example slow_key
//! ```

use std::{thread::sleep, time::Duration};

use laneway::{Engine, Topology};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::builder()
        .topology(Topology::pool(2))
        .latency_sampling(1)
        .handle(|context, number: &mut u32| {
            let time = if context.key() == "slow" { 500 } else { 1 };
            sleep(Duration::from_millis(time));
            if context.key() == "slow" {
                println!("    slow has done its message {number}");
            }
        })
        .build()?;

    for number in 0..4 {
        engine.submit(("slow".to_owned(), number))?;
    }
    for number in 0..20 {
        for customer in 0..30 {
            engine.submit((format!("customer-{customer}"), number))?;
        }
    }

    println!("600 messages of 30 fast customers, 4 of a slow one:");
    let done = |handle: &laneway::Handle<String, u32>| handle.snapshot().account.done;
    while engine.snapshot().account.outstanding > 0 {
        // A program would not poll like this; an operator's terminal would.
        sleep(Duration::from_millis(250));
        let explanation = engine.explain(&"slow".to_owned()).expect("a pool has a place for every key");
        println!("{:>4} done; slow: {explanation}", done(&engine));
        for (customer, depth) in engine.lanes_by_depth(1) {
            println!("          deepest lane: {customer} with {depth}");
        }
    }
    let snapshot = engine.snapshot();
    let pool = &snapshot.dispatchers[0];
    println!(
        "\nfrom submission to start: median {:.1?}, 95 % {:.1?}",
        pool.waiting.p50(),
        pool.waiting.p95()
    );
    println!(
        "in the handler:           median {:.1?}, longest {:.1?}",
        pool.service.p50(),
        pool.service.max()
    );
    println!("{}", snapshot.account);
    Ok(())
}
