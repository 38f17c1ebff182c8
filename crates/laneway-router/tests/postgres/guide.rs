//! What users paste works: the configurations of the guide that are about Postgres, and the tables of the design that a program prints.

use std::path::{Path, PathBuf};
use std::time::Duration;

use laneway_router::config::{Config, Layering};
use laneway_router::source::broker::{Configured, Examination, Level, Role};
use laneway_router::source::sink::{ConfiguredSink, Outgoing, Published, Sink, SinkError};
use laneway_router::source::{Source, broker};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn load(text: &str) -> Config {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    std::fs::write(&file, text).expect("written");
    Config::load(&Layering::file(file)).unwrap_or_else(|error| panic!("{text}\n{:#?}", error.problems()))
}

/// The blocks of HOCON in the guide that are about Postgres.
fn blocks() -> Vec<String> {
    let guide = std::fs::read_to_string(root().join("docs/guide/brokers.md")).expect("the guide");
    let blocks = guide.split("```hocon\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.filter(|block| block.contains("postgres")).map(str::to_owned).collect()
}

fn outgoing(group: &str) -> Outgoing {
    Outgoing {
        id: "m-1".to_owned(),
        group: Some(group.into()),
        deduplication_id: Some("m-1".to_owned()),
        text: b"{}".as_slice().into(),
        headers: Default::default(),
    }
}

#[tokio::test]
async fn the_configurations_of_the_guide_work() {
    let server = super::start();
    let place = format!("laneway@{}/postgres", server.address());
    let all = blocks().join("\n").replace("app@127.0.0.1:5432/app", &place);
    let config = load(&all);
    let source = Configured::new("orders", config.sources["orders"].clone());
    assert!(source.claim(super::wants(1, Duration::from_millis(10))).await.expect("it opens").is_empty());
    assert!(source.is_open() && source.kind() == "postgres");
    let sink = ConfiguredSink::new("invoices", config.sinks["invoices"].clone());
    let answers = sink.publish(vec![outgoing("a")]).await.expect("published");
    assert!(matches!(answers[..], [Published::Accepted { duplicate: false, .. }]), "{answers:?}");
    let again = sink.publish(vec![outgoing("a")]).await.expect("published");
    assert!(matches!(again[..], [Published::Accepted { duplicate: true, .. }]), "{again:?}");
    assert!(config.standby.is_some(), "the guide has a lease");

    let examination = Examination {
        name: "orders".into(),
        role: Role::Source,
        lease: Duration::from_secs(30),
        attempt: Duration::from_secs(60),
    };
    let findings = config.sources["orders"].examine(&examination).await;
    assert!(findings.iter().all(|finding| finding.level == Level::Fine), "{findings:#?}");
    source.close().await;
}

#[tokio::test]
async fn a_url_is_enough_to_publish_to_what_is_there() {
    let server = super::start();
    let url = format!("postgres://laneway@{}/postgres?queue=orders", server.address());
    let opening = broker::from_url(&url).expect("a sink");
    let Err(SinkError::Broken(words)) = opening.open_sink("there".into()).await.map(drop) else {
        panic!("nothing is there")
    };
    assert!(words.contains("pgmq is not installed"), "{words}");
    super::open(&server, "others").set_up().await.expect("set up");
    let Err(SinkError::Broken(words)) = opening.open_sink("there".into()).await.map(drop) else {
        panic!("a name that was mistyped is no new queue")
    };
    assert!(words.contains("there is no queue orders") && words.contains("create = true"), "{words}");
    super::open(&server, "orders").set_up().await.expect("set up");
    let sink = opening.open_sink("there".into()).await.expect("it opens");
    let answers = sink.publish(vec![outgoing("a")]).await.expect("published");
    assert!(
        matches!(answers[..], [Published::Accepted { sequence: Some(_), duplicate: false }]),
        "{answers:?}"
    );
    assert_eq!(super::texts(&super::claim(&super::open(&server, "orders"), 1).await), ["{}"]);
    let long = Outgoing { text: vec![b' '; 300_000].into(), ..outgoing("b") };
    let answers = sink
        .publish(vec![long, Outgoing { deduplication_id: None, ..outgoing("b") }])
        .await
        .expect("one of them");
    assert!(matches!(&answers[..], [Published::Refused { .. }, Published::Accepted { .. }]), "{answers:?}");
}
