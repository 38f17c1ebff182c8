//! The promises of every source.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::source::conformance::{Abilities, Sample, Subject};
use laneway_router::source::nats::{NatsSource, Settings};
use laneway_router::source::sink::{Outgoing, Sink};
use laneway_router::source::{Kept, Rest, Source};
use laneway_servers::{Server, nats};

use super::{LEASE, PATIENCE, is_accepted, keeps, open, outgoing, settings, sink};

struct Nats {
    settings: Settings,
    sink: Arc<dyn Sink>,
    operator: Arc<NatsSource>,
    _server: Server,
}

async fn subject() -> Nats {
    let server = nats::start().expect("a server");
    let settings = settings(&server);
    Nats { sink: sink(&settings).await, operator: open(&settings).await, settings, _server: server }
}

fn texts(resting: &[Kept]) -> Vec<String> {
    resting.iter().map(|it| String::from_utf8_lossy(&it.text).into_owned()).collect()
}

impl Subject for Nats {
    fn abilities(&self) -> Abilities {
        Abilities {
            delay: true,
            // Another instance begins to count anew.
            attempts: false,
            dead_letters: true,
            quarantine: true,
            knows_the_settled: true,
            lease: LEASE,
            patience: PATIENCE,
        }
    }

    fn consumer(&self) -> BoxFuture<'_, Arc<dyn Source>> {
        async { open(&self.settings).await as Arc<dyn Source> }.boxed()
    }

    fn publish(&self, samples: Vec<Sample>) -> BoxFuture<'_, ()> {
        let message = |Sample { group, text, delay }: Sample| {
            let mut message = Outgoing { group: group.map(Into::into), ..outgoing("", text) };
            if delay > Duration::ZERO {
                let time =
                    (SystemTime::now() + delay).duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
                message.headers.insert("Laneway-Not-Before".to_owned(), time.as_millis().to_string());
            }
            message
        };
        let messages = samples.into_iter().map(message).collect();
        async {
            let answers = self.sink.publish(messages).await.expect("published");
            assert!(answers.iter().all(is_accepted), "{answers:?}");
        }
        .boxed()
    }

    fn dead_letters(&self) -> BoxFuture<'_, Vec<String>> {
        async { texts(&keeps(&self.operator).kept(Rest::DeadLetters, 0, 100).await.expect("dead letters")) }
            .boxed()
    }

    fn redrive(&self) -> BoxFuture<'_, ()> {
        async { assert!(keeps(&self.operator).redrive(None, 100).await.expect("redriven").count > 0) }.boxed()
    }

    fn quarantined(&self) -> BoxFuture<'_, Vec<String>> {
        async { texts(&keeps(&self.operator).kept(Rest::Quarantine, 0, 100).await.expect("quarantine")) }
            .boxed()
    }
}

laneway_router::source_conformance! { #[tokio::test(flavor = "multi_thread", worker_threads = 2)] subject }
