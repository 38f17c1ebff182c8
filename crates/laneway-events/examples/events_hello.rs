//! Hello: a processor, an event, and the end.

use std::time::Duration;

use laneway_events::{Events, EventsConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let events = Events::start(EventsConfig::default())?;
    let mut greeted = 0;
    let greeter = events.processor("greeter").handle(move |context, name: &str| {
        greeted += 1;
        println!("{} on thread {}: hello, {name} (number {greeted})", context.id(), context.thread());
    })?;
    greeter.post("world")?;
    events.post_to("greeter", "everybody")?;
    let report = events.shutdown(Duration::from_secs(5));
    println!("{}", report.account);
    assert_eq!(report.account.done, 2);
    Ok(())
}
