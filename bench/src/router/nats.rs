//! NATS JetStream for `bench router --source nats`.

use std::sync::Arc;

use anyhow::{Context, Result};
use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::consumer::pull::Config;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use laneway_router::source::broker::Broker;
use laneway_router::source::nats::Settings;
use laneway_servers::{Server, nats};

use super::brokers::Fixture;

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

    fn consume(&self, queue: usize, queues: usize, count: u64) -> BoxFuture<'_, Result<()>> {
        let settings = self.settings(queue, queues);
        Box::pin(async move {
            let context = async_nats::jetstream::new(async_nats::connect(&settings.url).await?);
            let stream = context.get_stream(&settings.stream).await?;
            let window = (settings.window * settings.partitions) as i64;
            let config = Config {
                durable_name: Some("plain".to_owned()),
                max_ack_pending: window,
                ..Config::default()
            };
            let consumer: PullConsumer = stream.create_consumer(config).await?;
            let mut messages = consumer.stream().max_messages_per_batch(512).messages().await?;
            for _ in 0..count {
                let message = messages.next().await.context("the stream has ended")??;
                message.ack().await.map_err(|error| anyhow::anyhow!("{error}"))?;
            }
            // The last acknowledgements have left the process when this comes back.
            Ok(context.client().flush().await?)
        })
    }
}
