//! Channels: three listeners, two channels, and a listener that is full.

use std::{sync::mpsc::channel, time::Duration};

use laneway_events::{Events, EventsConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let events = Events::start(EventsConfig::default())?;
    let (open, opened) = channel::<()>();
    let (arrive, arrived) = channel();
    let print = |_: &mut laneway_events::Context<'_, String>, news: String| println!("{news}");
    events.processor("sports desk").subscribe(&["sports"]).handle(print)?;
    let reader = events.processor("reader").subscribe(&["sports", "weather"]).handle(print)?;
    let slow = events.processor("slow").queue_size(1).subscribe(&["weather"]);
    let slow = slow.handle(move |_, _: String| {
        arrive.send(()).expect("somebody waits");
        opened.recv().expect("somebody opens");
    })?;
    slow.post("keeps it busy".to_owned())?;
    arrived.recv_timeout(Duration::from_secs(5))?;

    let both = events.broadcast(&["sports", "weather"], "the match is rained off".to_owned());
    println!("delivered to {}, not to {:?}", both.delivered, both.not_delivered);
    assert_eq!((both.delivered, both.not_delivered.len()), (2, 1));

    events.set_subscriptions(&reader, &["weather"]);
    let sports = events.broadcast(&["sports"], "the match is on again".to_owned());
    assert_eq!(sports.delivered, 1);
    let _ = reader.stop(Duration::from_secs(5));
    open.send(())?;
    let _ = slow.stop(Duration::from_secs(5));
    assert_eq!(events.broadcast(&["weather"], "sunny".to_owned()).delivered, 0, "nobody is left to hear it");
    let _ = events.shutdown(Duration::from_secs(5));
    Ok(())
}
