//! RabbitMQ for `bench router --source rabbitmq`.

use std::sync::Arc;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use laneway_router::source::broker::Broker;
use laneway_router::source::rabbitmq::{GROUP_HEADER, Settings};
use laneway_router::source::sink::Outgoing;
use laneway_servers::rabbitmq;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};

use super::brokers::{CONTENDERS, Consuming, Fixture, Kind, Place, Running};

/// So many messages the plain consumer acknowledges together, if as many have come.
const BATCH: usize = 256;

pub(super) const KIND: Kind = Kind {
    name: "rabbitmq",
    contenders: CONTENDERS,
    start: || {
        let server = rabbitmq::start()?;
        Ok(Box::new(Running { address: rabbitmq::url(&server), _server: server }))
    },
    fixture: |place| Box::new(Rabbit(place)),
};

struct Rabbit(Place);

impl Rabbit {
    fn settings(&self, queue: usize) -> Settings {
        Settings::new(self.0.address.clone(), &self.0.queue(queue))
    }
}

impl Fixture for Rabbit {
    fn broker(&self, queue: usize, _queues: usize) -> Arc<dyn Broker> {
        Arc::new(self.settings(queue))
    }

    /// A sink waits for each message of a group before it sends the next one. Nothing is refused here, so the group is a header like others.
    fn dress(&self, mut outgoing: Outgoing) -> Outgoing {
        if let Some(group) = outgoing.group.take() {
            outgoing.headers.insert(GROUP_HEADER.to_owned(), group.to_string());
        }
        outgoing
    }

    /// With the prefetch of the source. What has come is acknowledged at once, by its last message: nothing is faster with this client.
    fn connect(&self, queue: usize, _queues: usize, count: u64) -> BoxFuture<'_, Result<Consuming>> {
        let settings = self.settings(queue);
        Box::pin(async move {
            // Frames as the router's, and so buffers as the router's.
            let mut uri: AMQPUri = self.0.address.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
            uri.query.frame_max = Some(16_384);
            let connection = Connection::connect_uri(uri, ConnectionProperties::default()).await?;
            let consuming = async move {
                let channel = connection.create_channel().await?;
                channel.basic_qos(settings.prefetch, BasicQosOptions::default()).await?;
                let (name, options) = (settings.queue.as_str().into(), BasicConsumeOptions::default());
                let consumer = channel.basic_consume(name, "".into(), options, FieldTable::default()).await?;
                let (mut deliveries, mut left) = (consumer.ready_chunks(BATCH), count);
                while left > 0 {
                    let mut some = deliveries.next().await.context("the subscription has ended")?;
                    left -= some.len() as u64;
                    let last = some.pop().context("a chunk is never empty")??;
                    channel.basic_ack(last.delivery_tag, BasicAckOptions { multiple: true }).await?;
                }
                // Answered when everything before it was dealt with.
                Ok(connection.close(200, "done".into()).await?)
            };
            Ok(Box::pin(consuming) as Consuming)
        })
    }
}
