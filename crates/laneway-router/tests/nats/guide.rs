//! What users paste works: the configurations of the guide, and the files under `deploy/`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use laneway_router::config::{Config, Layering};
use laneway_router::source::Wants;
use laneway_router::source::broker::Configured;
use laneway_router::source::{Source, sink::ConfiguredSink, sink::Sink};
use laneway_servers::nats;
use serde::Deserialize;
use serde_yaml_ng::Value as Yaml;

use super::{is_accepted, outgoing};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn load(text: &str) -> Config {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    std::fs::write(&file, text).expect("written");
    let layering = Layering::file(file).set("laneway.http.admin-token", "a-token-of-some-length");
    Config::load(&layering).unwrap_or_else(|error| panic!("{text}\n{:#?}", error.problems()))
}

/// The blocks of HOCON in the guide that are about NATS.
fn blocks() -> Vec<String> {
    let guide = std::fs::read_to_string(root().join("docs/guide/brokers.md")).expect("the guide");
    let blocks = guide.split("```hocon\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.filter(|block| block.contains("kind = nats")).map(str::to_owned).collect()
}

#[tokio::test]
async fn the_configurations_of_the_guide_work() {
    let server = nats::start().expect("a server");
    let all = blocks()
        .join("\n")
        .replace("127.0.0.1:4222", &server.address().to_string())
        .replace("replicas = 3", "replicas = 1");
    let config = load(&all);
    let (source, sink) = (&config.sources["orders"], &config.sinks["invoices"]);
    let source = Configured::new("orders", source.clone());
    assert!(!source.is_open());
    let wants = Wants { most: 1, wait: Duration::from_millis(10), lease: Duration::from_secs(30) };
    assert!(source.claim(wants).await.expect("it opens").is_empty());
    assert!(source.is_open() && source.kind() == "nats");
    let sink = ConfiguredSink::new("invoices", sink.clone());
    let answers = sink.publish(vec![outgoing("a", "x")]).await.expect("published");
    assert!(answers.iter().all(is_accepted));
    source.close().await;
}

fn yaml(name: &str) -> Vec<Yaml> {
    let text = std::fs::read_to_string(root().join("deploy").join(name)).expect("a file");
    let documents = serde_yaml_ng::Deserializer::from_str(&text).map(Yaml::deserialize);
    documents.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn the_compose_file_has_two_routers_on_one_broker() {
    let documents = yaml("compose.yaml");
    let services = &documents[0]["services"];
    assert!(services["nats"]["image"].as_str().is_some_and(|image| image.starts_with("nats:")));
    for router in ["router-1", "router-2"] {
        let merged =
            |key: &str| [&services[router][key], &services[router]["<<"][key]].iter().any(|it| !it.is_null());
        assert!(merged("build") && merged("environment") && merged("ports"), "{router}");
    }
    let config = load(&std::fs::read_to_string(root().join("deploy/laneway.conf")).expect("a file"));
    assert!(config.queue.names.is_empty() && config.sources.contains_key("orders"));
}

#[test]
fn the_kubernetes_example_mounts_a_configuration_that_is_right() {
    let documents = yaml("kubernetes.yaml");
    let of = |kind: &str| documents.iter().find(|it| it["kind"].as_str() == Some(kind)).expect(kind);
    let config = load(of("ConfigMap")["data"]["laneway.conf"].as_str().expect("a configuration"));
    assert!(config.sources.contains_key("orders"));
    let pod = &of("Deployment")["spec"]["template"]["spec"];
    let grace = pod["terminationGracePeriodSeconds"].as_i64().expect("a number");
    assert!(grace as u64 > config.drain.as_secs(), "the drain must have time to end");
    let container = &pod["containers"][0];
    assert_eq!(container["readinessProbe"]["httpGet"]["path"].as_str(), Some("/health/ready"));
    assert_eq!(container["livenessProbe"]["httpGet"]["path"].as_str(), Some("/health/live"));
    let secret = &container["env"][0]["valueFrom"]["secretKeyRef"];
    assert_eq!(secret["name"].as_str(), of("Secret")["metadata"]["name"].as_str());
    assert_eq!(of("Service")["spec"]["selector"]["app"].as_str(), Some("laneway"));
}
