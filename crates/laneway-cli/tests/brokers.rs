//! `laneway doctor` and `laneway send --to` with a real broker.

use std::process::{Command, Output};

use laneway_router::source::broker::Broker;
use laneway_router::source::nats::Settings;
use laneway_servers::nats;

fn laneway(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laneway"));
    command.args(arguments).env_remove("LANEWAY_URL").env_remove("LANEWAY_TOKEN");
    command.output().expect("the binary runs")
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// The queue `orders`, as a service makes it whose configuration has it.
fn make_queue(url: &str) {
    let (url, orders) = (url.to_owned(), "orders".to_owned());
    let settings = Settings { url, stream: orders.clone(), subject: orders, ..Settings::default() };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(settings.open_sink("orders".into())).expect("made");
}

#[test]
fn messages_are_sent_to_a_broker_and_the_doctor_finds_it_well_and_then_gone() {
    let server = nats::start().expect("a server");
    let url = nats::url(&server);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    let config = format!(
        "laneway {{ queue.queues = [], sources.orders {{ kind = nats, url = {url:?}, stream = orders }} }}"
    );
    std::fs::write(&file, config).expect("written");
    let file = file.display().to_string();

    let to = format!("{url}/orders");
    let sent = laneway(&["send", "--to", &to]);
    let (_, err) = texts(&sent);
    assert!(sent.status.code() == Some(4) && err.contains("there is no stream orders-0"), "{err}");
    make_queue(&url);
    let sent = laneway(&["send", "--to", &to, "--group", "order-7", "--count", "5", "--id", "m", "--json"]);
    let (out, err) = texts(&sent);
    assert!(sent.status.success(), "{out}{err}");
    let sequences: Vec<u64> = out
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).expect("JSON")["sequence"]
                .as_u64()
                .expect("a number")
        })
        .collect();
    // The numbers of the stream, times eight, and the partition of the group: the third.
    assert_eq!(sequences, [1, 2, 3, 4, 5].map(|number| number * 8 + 3));
    let lines = folder.path().join("messages.jsonl");
    let late = r#"{"id": "late", "poolCode": "", "mediationType": "SIMULATED", "delaySeconds": 1}"#;
    std::fs::write(&lines, late).expect("written");
    let late = laneway(&["send", "--to", &to, "--from", &lines.display().to_string()]);
    let (_, err) = texts(&late);
    assert!(late.status.code() == Some(4) && err.contains("line 1: `delaySeconds` is heeded by"), "{err}");
    let again = laneway(&["send", "--to", &to, "--group", "order-7", "--count", "5", "--id", "m"]);
    let (_, err) = texts(&again);
    assert!(again.status.success() && err.contains("5 had been sent before"), "{err}");

    let examined = laneway(&["doctor", "--config", &file]);
    let (out, err) = texts(&examined);
    assert!(examined.status.success(), "{out}{err}");
    assert!(
        out.contains("source orders (nats)") && out.contains("8 partitions") && out.contains("sync_interval"),
        "{out}"
    );

    drop(server);
    let examined = laneway(&["doctor", "--config", &file, "--json"]);
    let (out, err) = texts(&examined);
    assert_eq!(examined.status.code(), Some(1), "{out}{err}");
    let finding: serde_json::Value =
        serde_json::from_str(out.lines().next().expect("a finding")).expect("JSON");
    assert_eq!(
        (finding["level"].as_str(), finding["about"].as_str()),
        (Some("error"), Some("source orders (nats)"))
    );
    assert!(finding["mend"].as_str().is_some_and(|mend| mend.contains("start the server")), "{finding}");
    let sent = laneway(&["send", "--to", &to]);
    assert_eq!(sent.status.code(), Some(5), "nobody answers");
    let sent = laneway(&["send", "--to", "gopher://host/orders"]);
    let (_, err) = texts(&sent);
    assert!(sent.status.code() == Some(2) && err.contains("nats"), "{err}");
}
