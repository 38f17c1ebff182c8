//! A shutdown in numbered steps: close, drain until a deadline, wait for what is in flight, give back what was not started.
//!
//! Two producers submit until they are refused. The main program lets them run for a while, as a service would run until it is told to
//! stop, and then has half a second for the end. What cannot be handled in that time comes back in order, to be stored and
//! submitted again after the restart, which this program also plays.
//!
//! ```text
//! cargo run -p laneway --example graceful_shutdown
//! ```

use std::{
    thread::{self, sleep},
    time::{Duration, Instant},
};

use laneway::{Engine, Handle, Message, Topology};

type Failure = Box<dyn std::error::Error>;

fn engine() -> Result<Engine<String, u64>, Failure> {
    let engine = Engine::builder()
        .topology(Topology::pool(8))
        .worker_queue_capacity(2_000)
        // A handler that never returns must not hold the process for ever.
        .shutdown_grace(Duration::from_secs(2))
        .handle(|_, _number: &mut u64| sleep(Duration::from_millis(5)))
        .build()?;
    Ok(engine)
}

/// Submits until the engine is closed. The message that was refused is still the producer's.
fn produce(handle: &Handle<String, u64>, producer: u32) -> u64 {
    for number in 0.. {
        let key = format!("producer-{producer}/key-{}", number % 50);
        if let Err(refused) = handle.submit((key, number)) {
            println!("producer {producer}: number {} was {refused}", refused.message.body);
            return number;
        }
    }
    unreachable!("the engine is closed in the end")
}

fn main() -> Result<(), Failure> {
    let service = engine()?;
    let producers: Vec<_> = (1..=2)
        .map(|producer| {
            let handle = service.handle();
            thread::spawn(move || produce(&handle, producer))
        })
        .collect();

    sleep(Duration::from_millis(700));
    println!("told to stop: {}", service.snapshot().account);

    let began = Instant::now();
    let report = service.shutdown(Duration::from_millis(500));
    println!("stopped after {:.2?}: {}", began.elapsed(), report.account);
    let submitted: u64 =
        producers.into_iter().map(|producer| producer.join().expect("producers do not panic")).sum();
    println!("accepted by the account {}, by the producers {submitted}", report.account.accepted);
    println!("{} messages come back, {} are still running\n", report.returned.len(), report.still_running);

    // After the restart what came back goes in again, before anything new: so each key goes on where it stopped.
    let restarted = engine()?;
    let again = restarted.submit_batch::<Message<_, _>>(report.returned);
    println!("after the restart {} were accepted again", again.accepted);
    let report = restarted.shutdown(Duration::from_secs(5));
    println!("{}", report.account);
    Ok(())
}
