//! Kafka for `bench router --source kafka`, on librdkafka's own mock cluster, which lives in the process that starts the runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures_util::future::BoxFuture;
use laneway_router::source::broker::Broker;
use laneway_router::source::kafka::KafkaSettings;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

use super::brokers::{CONTENDERS, Consuming, Fixture, Host, Kind, Place};

pub(super) const KIND: Kind = Kind {
    name: "kafka",
    contenders: CONTENDERS,
    start: || Ok(Box::new(Mock(MockCluster::new(1)?))),
    fixture: |place| Box::new(Kafka(place)),
};

/// The plain consumer commits when so many more have come.
const COMMITTED_TOGETHER: u64 = 1_024;

/// Silence that is longer than this is an error: a group of one member is settled in half the time.
const SILENCE: Duration = Duration::from_secs(30);

struct Mock(MockCluster<'static, DefaultProducerContext>);

impl Host for Mock {
    fn address(&self) -> String {
        self.0.bootstrap_servers()
    }

    fn make_queues(&self, place: &Place, queues: usize) -> Result<()> {
        for queue in 0..queues {
            self.0.create_topic(&place.queue(queue), partitions(queues), 1)?;
        }
        Ok(self.0.create_topic(&place.name("dead"), 1, 1)?)
    }
}

/// As many in all as two or three machines would share.
fn partitions(queues: usize) -> i32 {
    (32 / queues as i32).clamp(1, 8)
}

struct Kafka(Place);

impl Kafka {
    fn settings(&self, queue: usize) -> KafkaSettings {
        let mut settings = KafkaSettings::new(&self.0.address, self.0.queue(queue), self.0.queue(queue));
        settings.dead_letters = Some(self.0.name("dead"));
        settings
    }
}

impl Fixture for Kafka {
    fn broker(&self, queue: usize, _queues: usize) -> Arc<dyn Broker> {
        Arc::new(self.settings(queue))
    }

    /// Reads in order of the partitions and commits now and then, as most programs do.
    fn connect(
        &self,
        _contender: &str,
        queue: usize,
        _queues: usize,
        count: u64,
    ) -> BoxFuture<'_, Result<Consuming<'_>>> {
        let settings = self.settings(queue);
        Box::pin(async move {
            let consumer: BaseConsumer = ClientConfig::new()
                .set("bootstrap.servers", &settings.servers)
                .set("group.id", &settings.group)
                .set("enable.auto.commit", "false")
                .set("auto.offset.reset", "earliest")
                .create()?;
            let consuming = async move {
                tokio::task::spawn_blocking(move || read(&consumer, &settings.topic, count)).await?
            };
            Ok(Box::pin(consuming) as Consuming<'_>)
        })
    }
}

fn read(consumer: &BaseConsumer, topic: &str, count: u64) -> Result<()> {
    consumer.subscribe(&[topic])?;
    let (mut came, mut heard) = (0, Instant::now());
    while came < count {
        ensure!(heard.elapsed() < SILENCE, "{} of {count} messages have not come", count - came);
        let Some(message) = consumer.poll(Duration::from_millis(100)) else { continue };
        message?;
        (came, heard) = (came + 1, Instant::now());
        if came % COMMITTED_TOGETHER == 0 {
            consumer.commit_consumer_state(CommitMode::Async)?;
        }
    }
    Ok(consumer.commit_consumer_state(CommitMode::Sync)?)
}
