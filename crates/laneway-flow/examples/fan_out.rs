//! Fan-out: a step gives an array, a map works on each element by itself, and a last step gets all results in the elements' order.
//!
//! ```text
//! cargo run -p laneway-flow --example fan_out
//! ```

use std::time::{Duration, Instant};

use laneway_flow::{Context, Failure, Flow, OwnQueue, Settings, Start, Steps, Worker, client, local};

const PAGES: u32 = 500;

/// Reads many pages at once. Now and then one fails and is tried again; the others do not wait for it.
struct Crawl;

impl Flow for Crawl {
    const SLUG: &'static str = "crawl";
    type Input = u32;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let pages = flow.array("pages").run(|many: u32, _| async move { Ok((0..many).collect()) });
        let sizes = flow.map("size", &pages).base_delay(Duration::ZERO).run(
            |page: u32, context: Context<Self>| async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                if page % 50 == 7 && context.attempt() == 1 {
                    return Err(Failure::new("the page did not answer"));
                }
                Ok(page * 3)
            },
        );
        flow.step("total").after(&sizes).run(|sizes: Vec<u32>, _| async move {
            // In the order of the pages, whatever the order in which they were done.
            assert!(sizes.iter().enumerate().all(|(page, size)| *size == page as u32 * 3));
            Ok(sizes.iter().sum::<u32>())
        });
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let database = local::trial_database().await?;
    let settings = Settings { max_concurrent: 50, batch_size: 100, ..Settings::default() };
    let worker = Worker::on(&database.pool).serve(Crawl.define()?).settings(settings).start().await?;
    let began = Instant::now();
    let run = Start::of::<Crawl>(&PAGES)?.on(&database.pool).await?;
    let state = client::wait(&database.pool, run, Duration::from_secs(45)).await?;
    println!("{} after {:.2?}: {}", state.status(), began.elapsed(), state.output());
    assert_eq!(state.output_of::<u32>("total"), Some((0..PAGES).map(|page| page * 3).sum()));
    let stats = worker.stop().await.stats;
    println!(
        "{} tasks in {} reads and {} settlements, {} tried again",
        stats.completed, stats.reads, stats.settles, stats.retried
    );
    Ok(())
}
