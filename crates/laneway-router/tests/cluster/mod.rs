//! A topic on librdkafka's mock cluster, with its two companions, for the tests of Kafka.

#![allow(dead_code, reason = "no test file uses all of it")]

use std::time::Duration;

use laneway_router::source::kafka::KafkaSettings;
use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::util::Timeout;

pub(crate) const ANSWER: Duration = Duration::from_secs(20);

pub(crate) struct Topic {
    pub(crate) servers: String,
    pub(crate) name: String,
    producer: FutureProducer,
}

impl Topic {
    /// A fresh topic with so many partitions.
    pub(crate) fn new<C: ClientContext>(
        cluster: &MockCluster<'_, C>,
        servers: &str,
        partitions: i32,
    ) -> Self {
        let name = format!("orders-{:x}", fastrand::u64(..));
        let topic = Topic {
            servers: servers.to_owned(),
            producer: ClientConfig::new()
                .set("bootstrap.servers", servers)
                .set("linger.ms", "0")
                .create()
                .expect("a producer"),
            name,
        };
        cluster.create_topic(&topic.name, partitions, 1).expect("a topic");
        cluster.create_topic(&topic.dead_letters(), 1, 1).expect("a topic");
        cluster.create_topic(&topic.quarantine(), 1, 1).expect("a topic");
        topic
    }

    pub(crate) fn dead_letters(&self) -> String {
        format!("{}.dead-letters", self.name)
    }

    pub(crate) fn quarantine(&self) -> String {
        format!("{}.quarantine", self.name)
    }

    /// A group of its own, times for tests.
    pub(crate) fn settings(&self) -> KafkaSettings {
        let mut settings = KafkaSettings::new(&self.servers, &self.name, format!("{}-readers", self.name));
        settings.quarantine = Some(self.quarantine());
        for (name, value) in [("session.timeout.ms", "4000"), ("heartbeat.interval.ms", "200")] {
            settings.properties.insert(name.to_owned(), value.to_owned());
        }
        settings
    }

    pub(crate) async fn publish(&self, key: Option<&str>, text: &[u8]) {
        let mut record = FutureRecord::<str, [u8]>::to(&self.name).payload(text);
        if let Some(key) = key {
            record = record.key(key);
        }
        self.producer.send(record, Timeout::After(ANSWER)).await.expect("published");
    }

    /// All records of a topic of one partition, from its beginning. Blocks.
    pub(crate) fn read(&self, topic: &str) -> Vec<(Option<String>, String)> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.servers)
            .set("group.id", "looks")
            .set("enable.auto.commit", "false")
            .create()
            .expect("a consumer");
        let (_, high) = consumer.fetch_watermarks(topic, 0, ANSWER).expect("watermarks");
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, 0, Offset::Beginning).expect("an offset");
        consumer.assign(&list).expect("assigned");
        let mut all = Vec::new();
        while (all.len() as i64) < high {
            let message = consumer.poll(ANSWER).expect("a record").expect("no error");
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            all.push((message.key().map(text), text(message.payload().unwrap_or_default())));
        }
        all
    }
}
