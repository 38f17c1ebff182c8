//! NATS JetStream for `bench router --source nats`.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::consumer::pull::Config;
use futures_util::future::BoxFuture;
use futures_util::stream::select_all;
use futures_util::{StreamExt, TryStreamExt};
use laneway_router::source::broker::Broker;
use laneway_router::source::nats::Settings;
use laneway_servers::nats;

use super::brokers::{Consuming, Fixture, Kind, Place, Running};

/// So many acknowledgements of the plain consumer wait for their answers at once: as many as the router's, which has four batches of settlements under way.
const UNDER_WAY: usize = 4 * 1_024;

pub(super) const KIND: Kind = Kind {
    name: "nats",
    contenders: &["laneway", "plain", UNPARTITIONED],
    start: || {
        let server = nats::start()?;
        Ok(Box::new(Running { address: nats::url(&server), _server: server }))
    },
    fixture: |place| Box::new(Nats(place)),
};

/// Reads all partitions with one consumer, as a user would who needs no order: less work for the server, which looks through the whole stream for each consumer.
const UNPARTITIONED: &str = "plain-unpartitioned";

struct Nats(Place);

/// A consumer of one partition, as the router's, or of all of them; with as much under way as the router has.
fn config(settings: &Settings, partition: Option<usize>) -> Config {
    let consumers = if partition.is_some() { 1 } else { settings.partitions };
    Config {
        durable_name: Some(format!("plain-{}", partition.unwrap_or_default())),
        max_ack_pending: (settings.window * consumers) as i64,
        filter_subject: partition.map_or_else(String::new, |number| format!("{}.{number}", settings.subject)),
        ..Config::default()
    }
}

impl Nats {
    fn settings(&self, queue: usize, queues: usize) -> Settings {
        let name = self.0.queue(queue);
        // As many partitions in all as two or three machines would share.
        let partitions = (32 / queues).clamp(1, 8);
        Settings {
            url: self.0.address.clone(),
            stream: name.clone(),
            subject: name,
            partitions,
            ..Settings::default()
        }
    }
}

impl Fixture for Nats {
    fn broker(&self, queue: usize, queues: usize) -> Arc<dyn Broker> {
        Arc::new(self.settings(queue, queues))
    }

    fn connect(
        &self,
        contender: &str,
        queue: usize,
        queues: usize,
        count: u64,
    ) -> BoxFuture<'_, Result<Consuming<'_>>> {
        let settings = self.settings(queue, queues);
        let partitions = if contender == UNPARTITIONED { None } else { Some(settings.partitions) };
        Box::pin(async move {
            let context = async_nats::jetstream::new(async_nats::connect(&settings.url).await?);
            let stream = context.get_stream(&settings.stream).await?;
            let mut consumers: Vec<PullConsumer> = Vec::new();
            for partition in 0..partitions.unwrap_or(1) {
                consumers
                    .push(stream.create_consumer(config(&settings, partitions.map(|_| partition))).await?);
            }
            let consuming = async move {
                let mut streams = Vec::new();
                for consumer in &consumers {
                    let window = consumer.cached_info().config.max_ack_pending as usize;
                    streams.push(consumer.stream().max_messages_per_batch(window).messages().await?);
                }
                let messages = select_all(streams);
                let client = context.client();
                // As the router does: an acknowledgement is one when the server has answered to it, and many are under way. A request, because the
                // client's own `double_ack` subscribes to an inbox for each, which is slower.
                let acknowledging = messages.take(count as usize).map(|message| {
                    let client = client.clone();
                    async move {
                        let reply = message?.reply.clone().context("a message of a stream has a reply")?;
                        client
                            .request(reply, "+ACK".into())
                            .await
                            .context("an acknowledgement was not answered")
                    }
                });
                let answered: Vec<_> = acknowledging.buffer_unordered(UNDER_WAY).try_collect().await?;
                ensure!(answered.len() as u64 == count, "{} of {count} came", answered.len());
                Ok(())
            };
            Ok(Box::pin(consuming) as Consuming<'_>)
        })
    }
}
