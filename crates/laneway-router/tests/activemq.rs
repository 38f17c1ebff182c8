//! ActiveMQ, the real one: the promises of every source, and what happens when the broker or an instance goes.
//!
//! One broker serves all tests of this program, each with a queue of its own; a test that ends its broker has one of its own.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::source::activemq::{ActiveQueue, ActiveSink, NOT_BEFORE_HEADER, Settings};
use laneway_router::source::broker::{Broker as _, Examination, Level, Role};
use laneway_router::source::conformance::{Abilities, Sample, Subject};
use laneway_router::source::sink::{Outgoing, Published, Sink};
use laneway_router::source::{Delivery, Disposal, Source, SourceError, Wants};
use laneway_servers::{Server, activemq};

const PATIENCE: Duration = Duration::from_secs(20);

fn broker() -> &'static Server {
    static BROKER: OnceLock<Server> = OnceLock::new();
    BROKER.get_or_init(|| {
        let broker = activemq::start().expect("ActiveMQ starts");
        broker.clear_away_at_the_end().expect("its folder will go");
        broker
    })
}

/// A queue that nobody else has, with short times.
fn settings(broker: &Server) -> Settings {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let queue = format!("orders-{}", NEXT.fetch_add(1, Relaxed));
    let (linger, heartbeat) = (Duration::from_millis(200), Duration::from_secs(2));
    Settings { linger, heartbeat, ..Settings::new(activemq::url(broker), &queue) }
}

struct Active {
    settings: Settings,
    queue: ActiveQueue,
    sink: ActiveSink,
}

impl Active {
    async fn new(settings: Settings) -> Self {
        let queue = ActiveQueue::new(settings.clone());
        let sink = ActiveSink::open(settings.clone(), "test".into()).await.expect("a sink");
        Active { settings, queue, sink }
    }

    async fn publish(&self, samples: Vec<Sample>) {
        let batch = samples.into_iter().map(outgoing).collect();
        let published = self.sink.publish(batch).await.expect("published");
        assert!(published.iter().all(|one| matches!(one, Published::Accepted { .. })), "{published:?}");
    }

    /// What lies in a queue. It stays there unless it is settled.
    async fn look(&self, queue: &str) -> (Arc<dyn Source>, Vec<Delivery>) {
        let settings = Settings { queue: queue.to_owned(), ..self.settings.clone() };
        let reader: Arc<dyn Source> = Arc::new(ActiveQueue::new(settings).consumer("look"));
        let wants = Wants { most: 100, wait: Duration::from_millis(700), lease: PATIENCE };
        let mut found = Vec::new();
        loop {
            let more = reader.claim(wants).await.expect("a look");
            if more.is_empty() {
                return (reader, found);
            }
            found.extend(more);
        }
    }

    async fn texts(&self, queue: &str) -> Vec<String> {
        let (reader, found) = self.look(queue).await;
        reader.close().await;
        texts(&found)
    }
}

fn texts(found: &[Delivery]) -> Vec<String> {
    found.iter().map(|one| String::from_utf8_lossy(&one.text).into_owned()).collect()
}

fn outgoing(sample: Sample) -> Outgoing {
    let mut headers = BTreeMap::new();
    if !sample.delay.is_zero() {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970") + sample.delay;
        headers.insert(NOT_BEFORE_HEADER.to_owned(), at.as_millis().to_string());
    }
    Outgoing {
        id: format!("{:x}", fastrand::u128(..)),
        group: sample.group.map(Into::into),
        deduplication_id: None,
        text: sample.text.into_bytes().into(),
        headers,
    }
}

fn sample(group: &str, text: impl ToString) -> Sample {
    Sample { group: Some(group.to_owned()), text: text.to_string(), delay: Duration::ZERO }
}

impl Subject for Active {
    fn abilities(&self) -> Abilities {
        Abilities {
            delay: true,
            attempts: true,
            dead_letters: true,
            quarantine: true,
            knows_the_settled: true,
            lease: Duration::from_secs(2),
            patience: PATIENCE,
        }
    }

    fn consumer(&self) -> BoxFuture<'_, Arc<dyn Source>> {
        let consumer: Arc<dyn Source> = Arc::new(self.queue.consumer("test"));
        futures_util::future::ready(consumer).boxed()
    }

    fn publish(&self, samples: Vec<Sample>) -> BoxFuture<'_, ()> {
        self.publish(samples).boxed()
    }

    fn dead_letters(&self) -> BoxFuture<'_, Vec<String>> {
        self.texts(&self.settings.dead_letters).boxed()
    }

    fn redrive(&self) -> BoxFuture<'_, ()> {
        async {
            let (reader, letters) = self.look(&self.settings.dead_letters).await;
            for letter in letters {
                let text = String::from_utf8_lossy(&letter.text).into_owned();
                let group = letter.group.as_ref().map(ToString::to_string);
                self.publish(vec![Sample { group, text, delay: Duration::ZERO }]).await;
                reader.settle(vec![(letter.receipt, Disposal::Done)]).await.expect("taken");
            }
            reader.close().await;
        }
        .boxed()
    }

    fn quarantined(&self) -> BoxFuture<'_, Vec<String>> {
        self.texts(&self.settings.quarantine).boxed()
    }
}

mod promises {
    use super::*;

    async fn subject() -> Active {
        Active::new(settings(broker())).await
    }

    laneway_router::source_conformance! { #[tokio::test] subject }
}
