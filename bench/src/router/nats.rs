//! NATS JetStream for `bench router --source nats`.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::consumer::pull::Config;
use futures_util::future::BoxFuture;
use futures_util::{StreamExt, TryStreamExt};
use laneway_router::source::broker::Broker;
use laneway_router::source::nats::Settings;
use laneway_servers::{Server, nats};

use super::brokers::{Consuming, Fixture};

/// So many acknowledgements of the plain consumer wait for their answers at once: as many as the router's, which has four batches of settlements under way.
const UNDER_WAY: usize = 4 * 1_024;

/// A server, and what its queues are like.
pub(super) struct Nats {
    url: String,
    _server: Server,
}

impl Nats {
    pub(super) fn start() -> Result<Self> {
        let server = nats::start()?;
        Ok(Nats { url: nats::url(&server), _server: server })
    }

    fn settings(&self, queue: usize, queues: usize) -> Settings {
        let name = format!("queue-{queue}");
        // As many partitions in all as two or three machines would share.
        let partitions = (32 / queues).clamp(1, 8);
        Settings {
            url: self.url.clone(),
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

    fn connect(&self, queue: usize, queues: usize, count: u64) -> BoxFuture<'_, Result<Consuming<'_>>> {
        let settings = self.settings(queue, queues);
        Box::pin(async move {
            let context = async_nats::jetstream::new(async_nats::connect(&settings.url).await?);
            let stream = context.get_stream(&settings.stream).await?;
            // As much under way as the router's partitions have together.
            let window = settings.window * settings.partitions;
            let config = Config {
                durable_name: Some("plain".to_owned()),
                max_ack_pending: window as i64,
                ..Config::default()
            };
            let consumer: PullConsumer = stream.create_consumer(config).await?;
            let consuming = async move {
                let messages = consumer.stream().max_messages_per_batch(window).messages().await?;
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
