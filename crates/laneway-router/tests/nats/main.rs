//! NATS JetStream on a real server: the promises of every source, several instances, and what goes wrong.

#[path = "../broker/mod.rs"]
mod broker;
mod conformance;
mod crash;
mod guide;
#[path = "../instances/mod.rs"]
mod instances;
mod lease;
mod service;
mod trouble;
#[path = "../turns/mod.rs"]
mod turns;

use std::sync::Arc;
use std::time::Duration;

use laneway_router::source::broker::Broker;
use laneway_router::source::nats::{NatsSource, Settings};
use laneway_router::source::sink::{Outgoing, Published, Sink};
use laneway_router::source::{Keeps, Source};
use laneway_servers::{Server, nats};

/// Nothing takes longer unless it is broken; the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(40);

/// The shortest time that instances are patient with each other.
const LEASE: Duration = Duration::from_secs(2);

fn settings(server: &Server) -> Settings {
    Settings {
        url: nats::url(server),
        stream: "orders".to_owned(),
        subject: "orders".to_owned(),
        partitions: 4,
        owner_lease: LEASE,
        release_after: Duration::from_millis(100),
        ..Settings::default()
    }
}

async fn open(settings: &Settings) -> Arc<NatsSource> {
    Arc::new(NatsSource::open("orders".into(), settings.clone()).await.expect("a source"))
}

/// For operators.
fn keeps(source: &NatsSource) -> Arc<dyn Keeps> {
    source.keeps().expect("it is open").expect("it lists what it keeps")
}

async fn sink(settings: &Settings) -> Arc<dyn Sink> {
    settings.open_sink("orders".into()).await.expect("a sink")
}

fn outgoing(group: &str, text: impl ToString) -> Outgoing {
    Outgoing {
        id: String::new(),
        group: Some(group.into()),
        deduplication_id: None,
        text: text.to_string().into_bytes().into(),
        headers: Default::default(),
    }
}

fn is_accepted(answer: &Published) -> bool {
    matches!(answer, Published::Accepted { duplicate: false, .. })
}
