//! The whole service on a broker: one that is not there at the start, one that another is bridged to, and a reload.

use std::time::{Duration, Instant};

use laneway_router::config::{Config, Layering};
use laneway_router::router::SourceState;
use laneway_router::service::Service;
use laneway_router::source::{Disposal, Settled, Source, Wants};
use laneway_servers::nats;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{PATIENCE, is_accepted, open, outgoing, settings, sink};

async fn get(service: &Service, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(service.http_address()).await.expect("connected");
    let request = format!("GET {path} HTTP/1.0\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    answer
}

/// A request with a token that nobody asks for, so that it may change something.
async fn ask(service: &Service, method: &str, path: &str, body: &Value) -> Value {
    let mut stream = tokio::net::TcpStream::connect(service.http_address()).await.expect("connected");
    let body = body.to_string();
    let request = format!(
        "{method} {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.contains("200 OK"), "{answer}");
    serde_json::from_str(body).expect("JSON")
}

/// What was given up can be listed, and comes again when it is told to: the oldest, or those that are named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_are_listed_brought_back_and_forgotten() {
    let server = nats::start().expect("a server");
    let settings = settings(&server);
    let publisher = sink(&settings).await;
    let source = open(&settings).await;
    publisher
        .publish((0..5).map(|number| outgoing("a", json!({ "id": number, "authToken": "hush" }))).collect())
        .await
        .expect("published");
    let wants = Wants { most: 5, wait: PATIENCE, lease: PATIENCE };
    let give_up = async |count: usize| {
        let mut given_up = 0;
        while given_up < count {
            for delivery in source.claim(wants).await.expect("claimed") {
                let disposal = Disposal::DeadLetter { reason: "no".to_owned() };
                assert_eq!(
                    source.settle(vec![(delivery.receipt, disposal)]).await,
                    Ok(vec![Settled::Settled])
                );
                given_up += 1;
            }
        }
    };
    give_up(5).await;
    let config = format!(
        "laneway {{ http.bind = \"127.0.0.1:0\", queue.queues = [], sources.orders {{ kind = nats, url = {:?}, stream = orders }} }}",
        nats::url(&server)
    );
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    std::fs::write(&file, config).expect("written");
    let service = Service::start(load(&file)).await.expect("it starts");
    until(&service, SourceState::Connected).await;
    let list =
        async |query: &str| ask(&service, "GET", &format!("/api/dead-letters{query}"), &json!(null)).await;
    let sequences = |list: &Value| -> Vec<u64> {
        list.as_array()
            .expect("a list")
            .iter()
            .map(|one| one["sequence"].as_u64().expect("a number"))
            .collect()
    };
    let all = list("").await;
    assert_eq!(sequences(&all), [1, 2, 3, 4, 5]);
    assert!(all[0]["group"] == "a" && all[0]["reason"] == "no" && !all.to_string().contains("hush"), "{all}");
    assert_eq!(sequences(&list("?queue=orders&after=2&most=2").await), [3, 4]);
    let redrive = async |body: Value| ask(&service, "POST", "/api/dead-letters/redrive", &body).await;
    assert_eq!(redrive(json!({ "sequences": [4, 99, 2] })).await, json!({ "redriven": 2, "missing": [99] }));
    assert_eq!(sequences(&list("").await), [1, 3, 5]);
    assert_eq!(redrive(json!({ "queue": "orders", "most": 2 })).await["redriven"], 2);
    assert_eq!(sequences(&list("").await), [5], "the oldest");
    assert_eq!(ask(&service, "DELETE", "/api/dead-letters?queue=orders", &json!(null)).await["purged"], 1);
    assert!(sequences(&list("").await).is_empty());
    service.shutdown(PATIENCE).await;
}

async fn until(service: &Service, state: SourceState) {
    let begun = Instant::now();
    while service.router().source_states().iter().all(|source| source.state != state) {
        assert!(begun.elapsed() < PATIENCE, "{:?}", service.router().source_states());
        tokio::time::sleep(Duration::from_millis(20)).await; // paced: nobody is told of a state, it is looked at
    }
}

fn load(file: &std::path::Path) -> Config {
    Config::load(&Layering::file(file)).unwrap_or_else(|error| panic!("{:#?}", error.problems()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_comes_late_is_read_and_bridged_to_another_in_order() {
    let mut server = nats::start().expect("a server");
    let settings = settings(&server);
    let (url, next) = (
        nats::url(&server),
        laneway_router::source::nats::Settings {
            stream: "next".to_owned(),
            subject: "next".to_owned(),
            ..settings.clone()
        },
    );
    server.kill().expect("it was there");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    let text = |sources: &str| {
        format!(
            "laneway {{ http.bind = \"127.0.0.1:0\", queue.queues = [], {sources}
              sinks.next {{ kind = nats, url = \"{url}\", stream = next, partitions = 4 }} }}"
        )
    };
    let orders =
        format!("sources.orders {{ kind = nats, url = \"{url}\", stream = orders, partitions = 4 }}");
    std::fs::write(&file, text(&orders)).expect("written");
    let service = Service::start(load(&file)).await.expect("it starts without its broker");
    until(&service, SourceState::Unavailable).await;
    let ready = get(&service, "/health/ready").await;
    assert!(ready.contains("503") && ready.contains("orders: cannot connect"), "{ready}");
    let shown = get(&service, "/api/sources").await;
    assert!(shown.contains("\"kind\":\"nats\"") && shown.contains("\"state\":\"unavailable\""), "{shown}");
    assert!(get(&service, "/metrics").await.contains("kind=\"nats\",state=\"unavailable\""));
    let closed = get(&service, "/api/dead-letters").await;
    assert!(closed.contains("503") && closed.contains("not open"), "{closed}");

    server.resume().expect("it comes");
    until(&service, SourceState::Connected).await;
    assert!(get(&service, "/health/ready").await.contains("200 OK"));
    let message = |group: usize, number: usize| {
        let text = serde_json::json!({
            "id": format!("m-{group}-{number}"), "poolCode": "", "messageGroupId": format!("g{group}"),
            "mediationType": "SINK", "mediationTarget": "next", "payload": { "number": number },
        });
        outgoing(&format!("g{group}"), text)
    };
    let messages = (0..10).flat_map(|number| (0..3).map(move |group| message(group, number))).collect();
    let answers = sink(&settings).await.publish(messages).await.expect("published");
    assert!(answers.iter().all(is_accepted));
    let reader = open(&next).await;
    let mut seen = std::collections::BTreeMap::<String, Vec<String>>::new();
    let begun = Instant::now();
    while seen.values().map(Vec::len).sum::<usize>() < 30 {
        assert!(begun.elapsed() < PATIENCE, "{seen:?}");
        let wants = Wants { most: 10, wait: Duration::from_secs(1), lease: PATIENCE };
        for delivery in reader.claim(wants).await.expect("claimed") {
            let group = delivery.group.clone().expect("a group").to_string();
            seen.entry(group).or_default().push(String::from_utf8_lossy(&delivery.text).into_owned());
            reader.settle(vec![(delivery.receipt, Disposal::Done)]).await.expect("settled");
        }
    }
    let expected: Vec<String> = (0..10).map(|number| format!("{{\"number\":{number}}}")).collect();
    assert!(seen.len() == 3 && seen.values().all(|texts| *texts == expected), "{seen:?}");

    // The source goes with a reload, and another comes.
    std::fs::write(&file, text(&orders.replace("sources.orders", "sources.others"))).expect("written");
    let done = service.reload(load(&file)).await.expect("reloaded");
    assert_eq!(done.changed, ["source others is read", "source orders is drained and goes"]);
    assert!(done.needs_restart.is_empty(), "{:?}", done.needs_restart);
    let begun = Instant::now();
    while service.router().source_states().len() > 1 {
        assert!(begun.elapsed() < PATIENCE, "the old one goes");
        tokio::time::sleep(Duration::from_millis(20)).await; // paced: nobody is told of it, it is looked at
    }
    until(&service, SourceState::Connected).await;
    service.shutdown(Duration::from_secs(5)).await;
}
