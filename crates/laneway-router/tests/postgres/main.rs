//! A queue in Postgres, on a real server: the promises of every source, two routers that are killed, what goes wrong, and the lease.

#[path = "../broker/mod.rs"]
mod broker;
mod conformance;
mod crash;
mod guide;
#[path = "../instances/mod.rs"]
mod instances;
mod lease;
mod publishing;
mod trouble;
#[path = "../turns/mod.rs"]
mod turns;

use std::time::Duration;

use laneway_router::source::embedded::Publication;
use laneway_router::source::postgres::{PostgresQueue, Settings};
use laneway_router::source::{Delivery, Disposal, Settled, Source, Wants};
use laneway_servers::{Server, postgres};
use sqlx::postgres::PgPool;

/// Nothing takes longer unless it is broken; the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

fn start() -> Server {
    postgres::start().expect("Postgres starts")
}

fn open(server: &Server, queue: &str) -> PostgresQueue {
    PostgresQueue::open(Settings::new(postgres::url(server), queue)).expect("a queue")
}

/// A client of its own, as others would have it.
async fn client(server: &Server) -> PgPool {
    PgPool::connect(&postgres::url(server)).await.expect("a connection")
}

fn wants(most: usize, wait: Duration) -> Wants {
    Wants { most, wait, lease: PATIENCE * 4 }
}

async fn claim(queue: &PostgresQueue, most: usize) -> Vec<Delivery> {
    queue.claim(wants(most, PATIENCE)).await.expect("a claim")
}

async fn finds_nothing(queue: &PostgresQueue, why: &str) {
    let found = queue.claim(wants(10, Duration::from_millis(200))).await.expect("a claim");
    assert!(found.is_empty(), "{why}: {:?}", texts(&found));
}

async fn done(queue: &PostgresQueue, deliveries: &[Delivery]) {
    let all = deliveries.iter().map(|delivery| (delivery.receipt.clone(), Disposal::Done)).collect();
    let settled = queue.settle(all).await.expect("settled");
    assert_eq!(settled, vec![Settled::Settled; deliveries.len()]);
}

fn texts(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| String::from_utf8_lossy(&delivery.text).into_owned()).collect()
}

async fn publish(queue: &PostgresQueue, group: &str, text: impl ToString) {
    let publication = Publication::new(text.to_string()).group(group);
    queue.publish_many(vec![publication]).await.expect("published");
}
