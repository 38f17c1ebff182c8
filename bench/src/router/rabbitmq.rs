//! RabbitMQ for `bench router --source rabbitmq`.

use std::sync::Arc;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use laneway_router::source::broker::Broker;
use laneway_router::source::rabbitmq::Settings;
use laneway_servers::rabbitmq;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};

use super::brokers::Fixture;

/// A broker, and what its queues are like.
pub(super) struct Rabbit {
    url: String,
    _broker: rabbitmq::Broker,
}

impl Rabbit {
    pub(super) fn start() -> Result<Self> {
        let broker = rabbitmq::start()?;
        Ok(Rabbit { url: rabbitmq::url(&broker), _broker: broker })
    }

    fn settings(&self, queue: usize) -> Settings {
        Settings::new(self.url.clone(), &format!("queue-{queue}"))
    }
}

impl Fixture for Rabbit {
    fn broker(&self, queue: usize, _queues: usize) -> Arc<dyn Broker> {
        Arc::new(self.settings(queue))
    }

    fn consume(&self, queue: usize, _queues: usize, count: u64) -> BoxFuture<'_, Result<()>> {
        let settings = self.settings(queue);
        Box::pin(async move {
            let connection = Connection::connect(&self.url, ConnectionProperties::default()).await?;
            let channel = connection.create_channel().await?;
            channel.basic_qos(settings.prefetch, BasicQosOptions::default()).await?;
            let (name, options) = (settings.queue.as_str().into(), BasicConsumeOptions::default());
            let mut consumer = channel.basic_consume(name, "".into(), options, FieldTable::default()).await?;
            for _ in 0..count {
                let delivery = consumer.next().await.context("the subscription has ended")??;
                delivery.ack(BasicAckOptions::default()).await?;
            }
            // Answered when everything before it was dealt with.
            Ok(connection.close(200, "done".into()).await?)
        })
    }
}
