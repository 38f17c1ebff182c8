//! The scheduler: once, at a rate, cancelled; and how each schedule has ended.

use std::{sync::mpsc::channel, time::Duration};

use laneway_events::{Events, EventsConfig, ScheduleEnd};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let events = Events::start(EventsConfig::default())?;
    let (tell, told) = channel();
    let bell = events.processor("bell").handle(move |_, what: &str| {
        println!("{what}");
        tell.send(()).expect("somebody listens");
    })?;

    let once = events.schedule(&bell, Duration::from_millis(20), "once, after 20 ms")?;
    let never = events.schedule(&bell, Duration::from_secs(3_600), "never")?;
    let each = events.schedule_each(&bell, Duration::from_millis(10), || "every 10 ms")?;
    assert!(never.cancel(), "an hour has not passed, so it never fires");
    (0..5).for_each(|_| told.recv_timeout(Duration::from_secs(5)).expect("the bell rings"));
    assert!(each.cancel());
    println!(
        "once: {:?}, never: {:?}, each: {:?} after {} times",
        once.end(),
        never.end(),
        each.end(),
        each.posted()
    );

    let _ = bell.stop(Duration::from_secs(5));
    let late = events.schedule_to("bell", Duration::ZERO, "too late")?;
    assert_eq!(late.wait(Duration::from_secs(5)), Some(ScheduleEnd::Unregistered));
    let _ = events.shutdown(Duration::from_secs(5));
    Ok(())
}
