//! ActiveMQ for `bench router --source activemq`.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow};
use futures_util::future::BoxFuture;
use laneway_router::source::activemq::Settings;
use laneway_router::source::activemq::stomp::{Failure, Frame};
use laneway_router::source::broker::Broker;
use laneway_servers::activemq;

use super::brokers::{CONTENDERS, Consuming, Fixture, Kind, Place, Running};

pub(super) const KIND: Kind = Kind {
    name: "activemq",
    contenders: CONTENDERS,
    start: || {
        let server = activemq::start()?;
        Ok(Box::new(Running { address: activemq::url(&server), _server: server }))
    },
    fixture: |place| Box::new(ActiveMq(place)),
};

/// So many messages the plain consumer acknowledges together, if as many have come.
const BATCH: usize = 256;

/// How long the answer to the end may take.
const ANSWER: Duration = Duration::from_secs(10);

struct ActiveMq(Place);

impl ActiveMq {
    fn settings(&self, queue: usize) -> Settings {
        Settings::new(self.0.address.clone(), &self.0.queue(queue))
    }
}

impl Fixture for ActiveMq {
    fn messages(&self) -> u64 {
        20_000
    }

    fn broker(&self, queue: usize, _queues: usize) -> Arc<dyn Broker> {
        Arc::new(self.settings(queue))
    }

    /// With the prefetch of the source. What has come is acknowledged at once, by its last message, and the broker answers to it, as it does to the router.
    fn connect(&self, queue: usize, _queues: usize, count: u64) -> BoxFuture<'_, Result<Consuming>> {
        let settings = self.settings(queue);
        Box::pin(async move {
            let (sender, mut receiver) = settings.connect().await?;
            let subscribe = Frame::new("SUBSCRIBE")
                .with("id", "0")
                .with("destination", format!("/queue/{}", settings.queue))
                .with("ack", "client")
                .with("activemq.prefetchSize", settings.prefetch.to_string());
            let failed = |failure: Failure| anyhow!("{failure:?}");
            let consuming = async move {
                sender.send(&[subscribe]).await.map_err(failed)?;
                let mut left = count;
                while left > 0 {
                    let mut last = receiver.message().await.map_err(failed)?;
                    left -= 1;
                    for _ in 1..BATCH {
                        let Some(more) = receiver.message_now() else { break };
                        (last, left) = (more, left - 1);
                    }
                    let ack = Frame::new("ACK").with("id", last.header("ack").unwrap_or_default());
                    sender.send(&[ack]).await.map_err(failed)?;
                }
                // Answered when everything before it was dealt with; the receiver has to listen meanwhile.
                let asking = sender.ask(vec![Frame::new("DISCONNECT")]);
                tokio::pin!(asking);
                let asked = tokio::select! {
                    asked = &mut asking => asked,
                    more = receiver.message() => match more {
                        Ok(_) => return Err(anyhow!("more than {count} messages came")),
                        // It hangs up once it has answered, and both may have come together.
                        Err(_) => tokio::time::timeout(ANSWER, asking).await?,
                    },
                };
                asked.map_err(failed)
            };
            Ok(Box::pin(consuming) as Consuming)
        })
    }
}
