//! The shortest program that shows what the engine is for: what happens to one order is handled in the order in which it happened, while
//! other orders go their own way.
//!
//! ```text
//! cargo run -p laneway --example hello
//! ```

use std::time::Duration;

use laneway::{Engine, Topology};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::builder()
        .topology(Topology::pool(4))
        .handle(|context, event: &mut &str| {
            println!("worker {}   {:<8}   {event}", context.worker(), context.key());
            std::thread::sleep(Duration::from_millis(30)); // The work that each event causes.
        })
        .build()?;

    for event in ["created", "paid", "packed", "shipped"] {
        for order in ["order-1", "order-2", "order-3"] {
            engine.submit((order, event))?; // A key and a body; anything that is `Hash`, and anything at all.
        }
    }

    // No more submissions; what was accepted is handled, and if that took longer than five seconds, the rest would be given back.
    let report = engine.shutdown(Duration::from_secs(5));
    println!("{}", report.account);
    Ok(())
}
