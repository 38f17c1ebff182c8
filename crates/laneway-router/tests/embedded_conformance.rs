//! The embedded queue and the promises of every source: under a virtual clock with its bodies in memory, and in real time with its writer's
//! thread and every body read from the file.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::source::Source;
use laneway_router::source::conformance::{Abilities, Sample, Subject};
use laneway_router::source::embedded::{
    Commit, EmbeddedQueue, EmbeddedStore, Kept, Options, Publication, QueueOptions,
};

struct Embedded {
    store: EmbeddedStore,
    operator: EmbeddedQueue,
    lease: Duration,
    /// Lives as long as its file is needed.
    _folder: tempfile::TempDir,
}

impl Embedded {
    fn new(options: Options, lease: Duration) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = EmbeddedStore::open(folder.path().join("queue.db"), options).expect("a store");
        let operator = store.queue("orders").expect("a queue");
        Embedded { store, operator, lease, _folder: folder }
    }
}

fn texts(kept: Vec<Kept>) -> Vec<String> {
    kept.iter().map(|kept| String::from_utf8_lossy(&kept.text).into_owned()).collect()
}

impl Subject for Embedded {
    fn abilities(&self) -> Abilities {
        Abilities {
            delay: true,
            attempts: true,
            dead_letters: true,
            quarantine: true,
            knows_the_settled: true,
            lease: self.lease,
            patience: Duration::from_secs(20),
        }
    }

    fn consumer(&self) -> BoxFuture<'_, Arc<dyn Source>> {
        let consumer: Arc<dyn Source> = Arc::new(self.store.queue("orders").expect("a queue"));
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
        async { drop(self.operator.publish_many(publications, None).await.expect("published")) }.boxed()
    }

    fn dead_letters(&self) -> BoxFuture<'_, Vec<String>> {
        async { texts(self.operator.dead_letters(0, 100).await.expect("dead letters")) }.boxed()
    }

    fn redrive(&self) -> BoxFuture<'_, ()> {
        async { assert!(self.operator.redrive(None, 100).await.expect("redriven").count > 0) }.boxed()
    }

    fn quarantined(&self) -> BoxFuture<'_, Vec<String>> {
        async { texts(self.operator.quarantined(0, 100).await.expect("quarantine")) }.boxed()
    }
}

mod in_virtual_time {
    use super::*;

    async fn subject() -> Embedded {
        let options = Options { commit: Commit::Inline, ..Options::default() };
        Embedded::new(options, Duration::from_secs(5))
    }

    laneway_router::source_conformance! { #[tokio::test(start_paused = true)] subject }
}

/// Every body is read from the file, so that claims wait for the writer, too. The lease is long enough for a machine that has other things to do.
mod with_a_thread {
    use super::*;

    async fn subject() -> Embedded {
        let queue = QueueOptions { cache_bytes: 0, ..QueueOptions::default() };
        Embedded::new(Options { queue, ..Options::default() }, Duration::from_secs(1))
    }

    laneway_router::source_conformance! { #[tokio::test] subject }
}
