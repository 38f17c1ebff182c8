//! The promises of every source.
//!
//! One server for all promises, a queue for each of them, all at the same time: the server is what takes long to start.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::source::conformance::{Abilities, Sample, Subject, every_promise};
use laneway_router::source::embedded::Publication;
use laneway_router::source::postgres::{PostgresQueue, Settings};
use laneway_router::source::{Keeps, Kept, Rest, Source};

struct Postgres {
    operator: PostgresQueue,
    settings: Settings,
}

impl Postgres {
    /// A fresh queue on the server at this address.
    fn fresh(url: &str) -> Self {
        static QUEUES: AtomicU32 = AtomicU32::new(0);
        let queue = format!("orders_{}", QUEUES.fetch_add(1, Relaxed));
        let settings = Settings { connections: 3, ..Settings::new(url, &queue) };
        Postgres { operator: PostgresQueue::open(settings.clone()).expect("a queue"), settings }
    }
}

fn texts(kept: Vec<Kept>) -> Vec<String> {
    kept.iter().map(|kept| String::from_utf8_lossy(&kept.text).into_owned()).collect()
}

impl Subject for Postgres {
    fn abilities(&self) -> Abilities {
        Abilities {
            delay: true,
            attempts: true,
            dead_letters: true,
            quarantine: true,
            knows_the_settled: true,
            lease: Duration::from_secs(2),
            patience: Duration::from_secs(60),
        }
    }

    fn consumer(&self) -> BoxFuture<'_, Arc<dyn Source>> {
        let consumer: Arc<dyn Source> =
            Arc::new(PostgresQueue::open(self.settings.clone()).expect("a queue"));
        futures_util::future::ready(consumer).boxed()
    }

    fn publish(&self, samples: Vec<Sample>) -> BoxFuture<'_, ()> {
        let publication = |Sample { group, text, delay }| {
            let publication = Publication::new(text).delay(delay);
            match group {
                Some(group) => publication.group(group),
                None => publication,
            }
        };
        let publications = samples.into_iter().map(publication).collect();
        async { drop(self.operator.publish_many(publications).await.expect("published")) }.boxed()
    }

    fn dead_letters(&self) -> BoxFuture<'_, Vec<String>> {
        async { texts(self.operator.kept(Rest::DeadLetters, 0, 100).await.expect("dead letters")) }.boxed()
    }

    fn redrive(&self) -> BoxFuture<'_, ()> {
        async { assert!(self.operator.redrive(None, 100).await.expect("redriven").count > 0) }.boxed()
    }

    fn quarantined(&self) -> BoxFuture<'_, Vec<String>> {
        async { texts(self.operator.kept(Rest::Quarantine, 0, 100).await.expect("quarantine")) }.boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_holds() {
    let server = laneway_servers::postgres::start().expect("Postgres starts");
    let url = laneway_servers::postgres::url(&server);
    every_promise(async || Postgres::fresh(&url)).await;
}
