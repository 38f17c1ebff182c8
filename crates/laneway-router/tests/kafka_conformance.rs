//! Kafka and the promises of every source, on librdkafka's own mock cluster.
//!
//! A partition belongs to one member of a group, so two members never see the same key, and a test of two consumers that share a queue would say nothing. Here the
//! consumers of a subject are consumers of one member, which is where leases, receipts and the order of keys are kept; what several members do is in `kafka.rs`. Nothing can be
//! published with a delay.

mod cluster;

use std::sync::Arc;
use std::time::Duration;

use cluster::Topic;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::source::Source;
use laneway_router::source::conformance::{Abilities, Sample, Subject, every_promise};
use laneway_router::source::kafka::KafkaSource;
use rdkafka::mocking::MockCluster;
use tokio::sync::OnceCell;

struct Member {
    topic: Topic,
    first: OnceCell<KafkaSource>,
    redriven: tokio::sync::Mutex<usize>,
}

impl Member {
    fn texts(&self, topic: &str, from: usize) -> Vec<String> {
        self.topic.read(topic).into_iter().skip(from).map(|(_, text)| text).collect()
    }
}

impl Subject for Member {
    fn abilities(&self) -> Abilities {
        Abilities {
            delay: true,
            attempts: true,
            dead_letters: true,
            quarantine: true,
            knows_the_settled: true,
            lease: Duration::from_secs(2),
            patience: Duration::from_secs(30),
        }
    }

    fn publishes_with_delay(&self) -> bool {
        false
    }

    fn consumer(&self) -> BoxFuture<'_, Arc<dyn Source>> {
        async {
            let join = || async { self.topic.settings().join("orders").await.expect("a member") };
            let first = self.first.get_or_init(join).await;
            Arc::new(first.another()) as Arc<dyn Source>
        }
        .boxed()
    }

    fn publish(&self, samples: Vec<Sample>) -> BoxFuture<'_, ()> {
        async move {
            for Sample { group, text, .. } in samples {
                self.topic.publish(group.as_deref(), text.as_bytes()).await;
            }
        }
        .boxed()
    }

    fn dead_letters(&self) -> BoxFuture<'_, Vec<String>> {
        async {
            let redriven = *self.redriven.lock().await;
            tokio::task::block_in_place(|| self.texts(&self.topic.dead_letters(), redriven))
        }
        .boxed()
    }

    fn redrive(&self) -> BoxFuture<'_, ()> {
        async {
            let mut redriven = self.redriven.lock().await;
            let all = tokio::task::block_in_place(|| self.topic.read(&self.topic.dead_letters()));
            for (key, text) in all.iter().skip(*redriven) {
                self.topic.publish(key.as_deref(), text.as_bytes()).await;
            }
            *redriven = all.len();
        }
        .boxed()
    }

    fn quarantined(&self) -> BoxFuture<'_, Vec<String>> {
        async { tokio::task::block_in_place(|| self.texts(&self.topic.quarantine(), 0)) }.boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_on_the_mock_cluster() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let servers = cluster.bootstrap_servers();
    every_promise(async || Member {
        topic: Topic::new(&cluster, &servers, 4),
        first: OnceCell::new(),
        redriven: tokio::sync::Mutex::default(),
    })
    .await;
}
