//! SQS and the promises of every source, on two servers, because each errs elsewhere (`servers/src/sqs.rs` says where).
//!
//! On **fauxqs** everything is looked at, except several messages of a group in one receive, which it never gives. On **moto** a receive does bring several, which is what
//! its run is for; its sequence numbers are random, so the growth of identities is not looked at, and since it does not wake a waiting receive when a
//! group is unlocked, receives wait for a second only. Its stale receipts would delete: that they do not is our own doing, and is looked at.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::message::Secret;
use laneway_router::source::Source;
use laneway_router::source::broker::Broker;
use laneway_router::source::conformance::{Abilities, Sample, Subject, every_promise};
use laneway_router::source::sqs::{Keys, SqsSettings};
use laneway_servers::sqs;
use serde_json::{Value, json};

/// Which server a queue is on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Fauxqs,
    Moto,
}

/// A FIFO queue with its two companions.
struct Queue {
    kind: Kind,
    server: String,
    url: String,
    dead_letters: String,
    quarantine: String,
    published: AtomicU64,
}

async fn ask(server: &str, operation: &'static str, body: Value) -> Value {
    let server = server.to_owned();
    let asked = tokio::task::spawn_blocking(move || sqs::call(&server, operation, &body));
    asked.await.expect("no panic").expect("an answer")
}

impl Queue {
    async fn new(kind: Kind, server: &str) -> Self {
        let (server, ours) = (server.to_owned(), server.to_owned());
        let made = tokio::task::spawn_blocking(move || {
            let number = fastrand::u64(..);
            let make = |name: &str| {
                let name = format!("{name}-{number:x}.fifo");
                let attributes = [("FifoQueue", "true"), ("ContentBasedDeduplication", "false")];
                sqs::create_queue(&ours, &name, &attributes).expect("a queue")
            };
            (make("orders"), make("dead"), make("quarantine"))
        });
        let (url, dead_letters, quarantine) = made.await.expect("no panic");
        Queue { kind, server, url, dead_letters, quarantine, published: AtomicU64::new(0) }
    }

    fn settings(&self) -> SqsSettings {
        SqsSettings {
            dead_letters: Some(self.dead_letters.clone()),
            quarantine: Some(self.quarantine.clone()),
            poll: Duration::from_secs(1),
            keys: Some(Keys {
                access_key_id: "test".to_owned(),
                secret_access_key: Secret::new("test"),
                session_token: None,
            }),
            ..SqsSettings::new(&self.url)
        }
    }

    async fn send(&self, url: &str, group: &str, text: &str) {
        let number = self.published.fetch_add(1, Relaxed);
        let body = json!({
            "QueueUrl": url, "MessageBody": text, "MessageGroupId": group,
            "MessageDeduplicationId": number.to_string(),
        });
        ask(&self.server, "SendMessage", body).await;
    }

    /// Takes all messages out of a queue, with their groups.
    async fn empty(&self, url: &str, remove: bool) -> Vec<(String, String)> {
        let mut all = Vec::new();
        loop {
            let visibility = if remove { 30 } else { 0 };
            let body = json!({
                "QueueUrl": url, "MaxNumberOfMessages": 10, "VisibilityTimeout": visibility,
                "MessageSystemAttributeNames": ["All"],
            });
            let answer = ask(&self.server, "ReceiveMessage", body).await;
            let messages = answer["Messages"].as_array().cloned().unwrap_or_default();
            for message in &messages {
                let text = message["Body"].as_str().expect("a body").to_owned();
                let group = message["Attributes"]["MessageGroupId"].as_str().expect("a group").to_owned();
                all.push((group, text));
                if remove {
                    let body = json!({ "QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"] });
                    ask(&self.server, "DeleteMessage", body).await;
                }
            }
            if messages.is_empty() || !remove {
                return all;
            }
        }
    }
}

fn texts(all: Vec<(String, String)>) -> Vec<String> {
    all.into_iter().map(|(_, text)| text).collect()
}

impl Subject for Queue {
    fn abilities(&self) -> Abilities {
        Abilities {
            delay: true,
            attempts: true,
            dead_letters: true,
            quarantine: true,
            knows_the_settled: true,
            lease: Duration::from_secs(3),
            patience: Duration::from_secs(20),
        }
    }

    fn publishes_with_delay(&self) -> bool {
        false
    }

    fn has_ordered_ids(&self) -> bool {
        self.kind == Kind::Fauxqs
    }

    fn consumer(&self) -> BoxFuture<'_, Arc<dyn Source>> {
        async { self.settings().open_source("orders".into()).await.expect("a source") }.boxed()
    }

    fn publish(&self, samples: Vec<Sample>) -> BoxFuture<'_, ()> {
        async move {
            for sample in samples {
                self.send(&self.url, &sample.group.expect("a group"), &sample.text).await;
            }
        }
        .boxed()
    }

    fn dead_letters(&self) -> BoxFuture<'_, Vec<String>> {
        async { texts(self.empty(&self.dead_letters, false).await) }.boxed()
    }

    fn redrive(&self) -> BoxFuture<'_, ()> {
        async {
            for (group, text) in self.empty(&self.dead_letters, true).await {
                self.send(&self.url, &group, &text).await;
            }
        }
        .boxed()
    }

    fn quarantined(&self) -> BoxFuture<'_, Vec<String>> {
        async { texts(self.empty(&self.quarantine, false).await) }.boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_on_fauxqs() {
    let server = sqs::start_fauxqs().expect("fauxqs starts");
    let endpoint = sqs::endpoint(&server);
    every_promise(async || Queue::new(Kind::Fauxqs, &endpoint).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_on_moto() {
    let server = sqs::start_moto().expect("moto starts");
    let endpoint = sqs::endpoint(&server);
    every_promise(async || Queue::new(Kind::Moto, &endpoint).await).await;
}
