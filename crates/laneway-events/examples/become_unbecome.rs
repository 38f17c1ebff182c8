//! A turnstile that changes its handler: locked until somebody pays, open until somebody passes, and out of order when told so from outside.

use std::time::Duration;

use laneway_events::{Become, Context, Events, EventsConfig, Handled, Report};

#[derive(Debug)]
enum Turnstile {
    Coin,
    Push,
}

fn locked(context: &mut Context<'_, Turnstile>, event: Turnstile) -> Handled<Turnstile> {
    match event {
        Turnstile::Coin => {
            println!("paid: the turnstile is open");
            context.become_stacked(open);
            Handled::Done
        }
        // Nothing that this handler knows: it goes to the report.
        push => Handled::Unmatched(push),
    }
}

fn open(context: &mut Context<'_, Turnstile>, event: Turnstile) -> Handled<Turnstile> {
    match event {
        Turnstile::Push => {
            println!("passed: the turnstile is locked");
            context.unbecome();
        }
        Turnstile::Coin => println!("thank you, it is open already"),
    }
    Handled::Done
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let events = Events::builder(EventsConfig::default())
        .on_report(|report| match report {
            Report::Unmatched { event, .. } => {
                println!("not matched: {:?}", event.downcast_ref::<Turnstile>())
            }
            other => println!("{other}"),
        })
        .start()?;
    let turnstile = events.processor("turnstile").handle(locked)?;
    for event in [Turnstile::Push, Turnstile::Coin, Turnstile::Coin, Turnstile::Push] {
        turnstile.post(event)?;
    }
    // From outside a change takes its place in the mailbox, behind what was posted before it.
    turnstile.request_become(|_, event: Turnstile| println!("out of order: {event:?}"), Become::Stacked)?;
    turnstile.post(Turnstile::Coin)?;
    turnstile.request_unbecome()?;
    turnstile.post(Turnstile::Coin)?;
    assert!(events.wait_quiet(Duration::from_secs(5)));
    assert_eq!(events.snapshot().unmatched, 1);
    let _ = events.shutdown(Duration::from_secs(5));
    Ok(())
}
