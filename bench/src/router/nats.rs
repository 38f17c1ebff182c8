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
    contenders: &["laneway", "plain", "laneway-one-thread", "plain-one-thread", UNPARTITIONED, UNCONFIRMED],
    start: || {
        let server = nats::start()?;
        Ok(Box::new(Running { address: nats::url(&server), _server: server }))
    },
    fixture: |place| Box::new(Nats(place)),
};

/// Has one stream and one consumer, as a user would who needs no order.
const UNPARTITIONED: &str = "plain-unpartitioned";

/// Acknowledges as most programs do, and waits for no answer: what it has acknowledged may come again.
const UNCONFIRMED: &str = "plain-unconfirmed";

struct Nats(Place);

impl Nats {
    /// As many in all as two or three machines would share.
    fn partitions(queues: usize) -> usize {
        (32 / queues).clamp(1, 8)
    }

    fn settings(&self, queue: usize, queues: usize) -> Settings {
        let name = self.0.queue(queue);
        let partitions = if self.0.reader == UNPARTITIONED { 1 } else { Self::partitions(queues) };
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

    fn connect(&self, queue: usize, queues: usize, count: u64) -> BoxFuture<'_, Result<Consuming>> {
        let settings = self.settings(queue, queues);
        // Together as much under way as the router has.
        let window = settings.window * Self::partitions(queues) / settings.partitions;
        let confirmed = self.0.reader != UNCONFIRMED;
        Box::pin(async move {
            let context = async_nats::jetstream::new(async_nats::connect(&settings.url).await?);
            let mut consumers: Vec<PullConsumer> = Vec::new();
            for partition in 0..settings.partitions {
                let stream = context.get_stream(format!("{}-{partition}", settings.stream)).await?;
                let config = Config {
                    durable_name: Some("plain".to_owned()),
                    max_ack_pending: window as i64,
                    ..Config::default()
                };
                consumers.push(stream.create_consumer(config).await?);
            }
            let consuming = async move {
                let mut streams = Vec::new();
                for consumer in &consumers {
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
                        if confirmed {
                            let answer = client.request(reply, "+ACK".into()).await;
                            answer.context("an acknowledgement was not answered")?;
                        } else {
                            client.publish(reply, "+ACK".into()).await?;
                        }
                        Ok::<_, anyhow::Error>(1)
                    }
                });
                let counting = acknowledging.buffer_unordered(UNDER_WAY);
                let came = counting.try_fold(0, async |all: u64, one: u64| Ok(all + one)).await?;
                ensure!(came == count, "{came} of {count} came");
                Ok(client.flush().await?)
            };
            Ok(Box::pin(consuming) as Consuming)
        })
    }
}
