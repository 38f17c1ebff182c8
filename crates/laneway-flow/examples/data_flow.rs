//! Document 002's DataFlow: a default queue, a step that is routed to another, a step that is completed by hand, and two specialised workers.
//!
//! It runs on the database of `DATABASE_URL`, or on a Postgres of its own. Run it with
//!
//! ```text
//! cargo run -p laneway-flow --example data_flow
//! ```

use std::time::Duration;

use laneway_flow::{Context, Flow, QueueSettings, Start, Steps, Worker, client, local, queues};
use serde_json::json;

queues! {
    /// Fetching and computing.
    DataProcessor = "data_processor";
    /// Whatever writes to people.
    EmailWorker = "email_worker";
}

struct DataFlow;

impl Flow for DataFlow {
    const SLUG: &'static str = "data_flow";
    type Input = String;
    // The first is the default; a step may be routed to any of them, and a worker may poll any of them. Others do not compile.
    type Queues = (DataProcessor, EmailWorker);

    fn steps(&self, flow: &mut Steps<Self>) {
        let fetch = flow.step("fetch").run(|url: String, context: Context<Self>| async move {
            println!("  {}: fetch {url}", context.queue());
            Ok(url.len())
        });
        let notify = flow.step("notify").after(&fetch).queue(EmailWorker).run(
            |length: usize, context: Context<Self>| async move {
                println!("  {}: notify", context.queue());
                Ok(format!("it has {length} characters"))
            },
        );
        // No queue and no handler: somebody completes it, with a bool.
        flow.step("debug").after((&fetch, &notify)).manual::<bool>();
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let database = local::trial_database().await?;
    let pool = &database.pool;

    let processors =
        Worker::on(pool).serve(DataFlow.define()?.on(DataProcessor)).name("processors").start().await?;
    let batches =
        QueueSettings { batch_size: Some(5), visibility_timeout: Some(30), ..QueueSettings::default() };
    let served = DataFlow.define()?.on(EmailWorker).queue(EmailWorker, batches);
    let emails = Worker::on(pool).serve(served).name("emails").start().await?;

    let run = Start::of::<DataFlow>(&"http://example.org/".to_owned())?.on(pool).await?;
    println!("run {run}");
    let mut watch = client::Watch::new(pool, run).await?;
    while client::run(pool, run).await?.step_status("debug") != Some("started") {
        watch.changed(tokio::time::Instant::now() + Duration::from_secs(1)).await?;
    }
    println!("  debug waits for somebody, which is us");
    client::complete(pool, run, "debug", 0, &json!(true)).await?;
    let state = client::wait(pool, run, Duration::from_secs(30)).await?;
    println!("{}: {}", state.status(), state.output());
    assert_eq!(state.output(), &json!({"debug": true}));

    for (name, worker) in [("processors", processors), ("emails", emails)] {
        println!("{name} completed {}", worker.stop().await.stats.completed);
    }
    Ok(())
}
