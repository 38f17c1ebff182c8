//! A saga: a step that cannot be done takes everything behind it along (skip cascade), and what makes up for it runs instead.
//!
//! ```text
//! cargo run -p laneway-flow --example saga
//! ```

use std::time::Duration;

use laneway_flow::{Failure, Flow, OwnQueue, Skip, SkipCascade, Start, Steps, Worker, client, local};
use serde::{Deserialize, Serialize};

#[derive(Clone, Serialize, Deserialize)]
struct Trip {
    flights: u32,
    hotel: bool,
}

struct BookTrip;

impl Flow for BookTrip {
    const SLUG: &'static str = "book_trip";
    type Input = Trip;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let seat = flow.step("seat").max_attempts(1).exhausted(SkipCascade).run(|trip: Trip, _| async move {
            if trip.flights == 0 { Err(Failure::new("no flight goes there")) } else { Ok(17_u32) }
        });
        // Without a seat neither of these two runs: they never see that it is missing, and take a plain number.
        let charge = flow.step("charge").after(&seat).run(|seat: u32, _| async move { Ok(seat * 1_000) });
        flow.step("ticket")
            .after((&seat, &charge))
            .run(|(seat, cents): (u32, u32), _| async move { Ok(format!("seat {seat}, {cents} paid")) });
        // A hotel is nice to have. What comes after it runs with or without one, and its type says so.
        let hotel = flow.step("hotel").max_attempts(1).exhausted(Skip).run(|trip: Trip, _| async move {
            if trip.hotel { Ok("The Lane".to_owned()) } else { Err(Failure::new("fully booked")) }
        });
        flow.step("letter").after(&hotel).run(|hotel: Option<String>, _| async move {
            Ok(hotel.map_or_else(|| "no hotel, sorry".to_owned(), |hotel| format!("you stay at {hotel}")))
        });
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let database = local::trial_database().await?;
    let worker = Worker::on(&database.pool).serve(BookTrip.define()?).start().await?;
    for trip in [
        Trip { flights: 2, hotel: true },
        Trip { flights: 2, hotel: false },
        Trip { flights: 0, hotel: true },
    ] {
        let run = Start::of::<BookTrip>(&trip)?.on(&database.pool).await?;
        let state = client::wait(&database.pool, run, Duration::from_secs(30)).await?;
        let steps = ["seat", "charge", "ticket", "hotel", "letter"];
        let standing = steps.map(|step| format!("{step} {}", state.step_status(step).unwrap_or("?")));
        println!(
            "{} flights, hotel {}: {}\n  {}\n  {}",
            trip.flights,
            trip.hotel,
            state.status(),
            standing.join(", "),
            state.output()
        );
        let ticket = if trip.flights > 0 { "completed" } else { "skipped" };
        assert_eq!((state.status(), state.step_status("ticket")), ("completed", Some(ticket)));
    }
    worker.stop().await;
    Ok(())
}
