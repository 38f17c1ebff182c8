//! SQS for `bench router --source sqs`: FIFO queues on fauxqs, which locks groups as SQS does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{DeleteMessageBatchRequestEntry, Message};
use futures_util::future::{BoxFuture, try_join_all};
use laneway_router::message::Secret;
use laneway_router::source::broker::Broker;
use laneway_router::source::sqs::{Keys, SqsSettings};
use laneway_servers::{Server, sqs};

use super::brokers::{CONTENDERS, Consuming, Fixture, Host, Kind, Place};

pub(super) const KIND: Kind = Kind {
    name: "sqs",
    contenders: CONTENDERS,
    start: || Ok(Box::new(Fauxqs(sqs::start_fauxqs()?))),
    fixture: |place| Box::new(Sqs(place)),
};

/// The longest wait of one receive: queues are never empty for long, and the end is seen by the count.
const POLL: Duration = Duration::from_secs(1);

/// Any will do.
const KEY: &str = "test";

struct Fauxqs(Server);

impl Host for Fauxqs {
    fn address(&self) -> String {
        sqs::endpoint(&self.0)
    }

    fn make_queues(&self, place: &Place, queues: usize) -> Result<()> {
        for queue in 0..queues {
            let attributes = [("FifoQueue", "true"), ("ContentBasedDeduplication", "false")];
            sqs::create_queue(&place.address, &format!("{}.fifo", place.queue(queue)), &attributes)?;
        }
        let dead_letters = [("FifoQueue", "true"), ("ContentBasedDeduplication", "false")];
        sqs::create_queue(&place.address, &dead(place), &dead_letters).map(drop)
    }
}

/// All queues of a run share one for dead letters: there are none.
fn dead(place: &Place) -> String {
    format!("{}.fifo", place.name("dead"))
}

struct Sqs(Place);

impl Sqs {
    /// Fauxqs has every queue under the account that AWS's own documentation uses.
    fn url(&self, name: &str) -> String {
        format!("{}/000000000000/{name}", self.0.address)
    }

    fn settings(&self, queue: usize) -> SqsSettings {
        SqsSettings {
            dead_letters: Some(self.url(&dead(&self.0))),
            poll: POLL,
            keys: Some(Keys {
                access_key_id: KEY.to_owned(),
                secret_access_key: Secret::new(KEY),
                session_token: None,
            }),
            ..SqsSettings::new(self.url(&format!("{}.fifo", self.0.queue(queue))))
        }
    }
}

impl Fixture for Sqs {
    fn messages(&self) -> u64 {
        5_000
    }

    fn broker(&self, queue: usize, _queues: usize) -> Arc<dyn Broker> {
        Arc::new(self.settings(queue))
    }

    /// With as many receives at a time as the source has, each of ten messages, which are deleted together.
    fn connect(&self, queue: usize, _queues: usize, count: u64) -> BoxFuture<'_, Result<Consuming>> {
        let settings = self.settings(queue);
        Box::pin(async move {
            let client = settings.client().await;
            let consuming = async move {
                let left = AtomicU64::new(count);
                let receivers = (0..settings.receivers).map(|_| async {
                    while left.load(Relaxed) > 0 {
                        let received = receive(&client, &settings.url).await?;
                        delete(&client, &settings.url, &received).await?;
                        left.fetch_sub(received.len() as u64, Relaxed);
                    }
                    anyhow::Ok(())
                });
                try_join_all(receivers).await?;
                Ok(())
            };
            Ok(Box::pin(consuming) as Consuming)
        })
    }
}

async fn receive(client: &Client, url: &str) -> Result<Vec<Message>> {
    let asked = client
        .receive_message()
        .queue_url(url)
        .max_number_of_messages(10)
        .wait_time_seconds(POLL.as_secs() as i32);
    Ok(asked.send().await?.messages.unwrap_or_default())
}

async fn delete(client: &Client, url: &str, received: &[Message]) -> Result<()> {
    if received.is_empty() {
        return Ok(());
    }
    let mut asked = client.delete_message_batch().queue_url(url);
    for (number, message) in received.iter().enumerate() {
        let receipt = message.receipt_handle().context("a message has a receipt")?;
        let entry = DeleteMessageBatchRequestEntry::builder().id(number.to_string()).receipt_handle(receipt);
        asked = asked.entries(entry.build()?);
    }
    let answer = asked.send().await?;
    ensure!(answer.failed.is_empty(), "{} messages were not deleted", answer.failed.len());
    Ok(())
}
