//! What happens when more comes than fits: the same burst against each policy of a full dispatcher.
//!
//! Ten readings of a sensor arrive at once, and there is room for four. The policy decides whether the submitter waits, gets its message back, or
//! loses a reading, and which one.
//!
//! ```text
//! cargo run -p laneway --example drop_policies
//! ```

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use laneway::{Admission, Engine, Message, Overflow, Topology};

fn burst(policy: Overflow, explanation: &str) -> Result<(), Box<dyn std::error::Error>> {
    let (handled, dropped) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let (in_handler, in_callback) = (handled.clone(), dropped.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .worker_queue_capacity(4)
        .overflow(policy)
        .on_drop(move |message: Message<&str, u32>, _why| in_callback.lock().unwrap().push(message.body))
        .handle(move |_, reading: &mut u32| {
            std::thread::sleep(Duration::from_millis(10));
            in_handler.lock().unwrap().push(*reading);
        })
        .build()?;

    // Held back for the burst, so that each run of this program is the same; except where the submitter waits for room.
    let waits = matches!(policy, Overflow::Block);
    if !waits {
        engine.pause("pool-0");
    }
    let (began, mut refused) = (Instant::now(), Vec::new());
    for reading in 0..10 {
        match engine.submit(("sensor-1", reading)) {
            Ok(Admission::Accepted | Admission::Dropped) => {}
            // A refused message comes back to whoever submitted it, with the reason.
            Err(refusal) => refused.push((refusal.message.body, refusal.reason)),
        }
    }
    let took = began.elapsed();
    // A start or a finish is never dropped: there is a reserve for control messages on top of every bound.
    engine.submit(Message::finish("sensor-1", 99))?;
    engine.unpause("pool-0");
    engine.wait_quiet(Duration::from_secs(5));

    println!("{policy:?}: {explanation}");
    println!("  handled  {:?}", handled.lock().unwrap());
    if !dropped.lock().unwrap().is_empty() {
        println!("  dropped  {:?}", dropped.lock().unwrap());
    }
    if let Some((_, reason)) = refused.first() {
        let bodies: Vec<u32> = refused.iter().map(|(body, _)| *body).collect();
        println!("  refused  {bodies:?}: {reason}");
    }
    println!("  {}, the burst took {took:.1?}\n", engine.snapshot().account);
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    burst(Overflow::Block, "the submitter waits until there is room")?;
    burst(Overflow::BlockFor(Duration::from_millis(20)), "the submitter waits, but not for ever")?;
    burst(Overflow::DropOldest, "the newest readings are worth most")?;
    burst(Overflow::DropNewest, "what is there is kept")?;
    burst(Overflow::Reject, "the submitter gets its message back at once, and decides")?;
    Ok(())
}
