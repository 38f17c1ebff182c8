//! `laneway serve` as a user meets it: the demonstration shows groups in order, ctrl-c drains, a second one stops at once, and a mistake
//! has its exit code.

use crate::running::{Running, laneway, run};
use serde_json::{Value, json};

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

fn parsed(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))
}

#[test]
fn the_demonstration_delivers_in_order_and_in_parallel_and_drains() {
    let mut demo = Running::spawn(&["serve", "--demo", "--bind", "127.0.0.1:0", "--json"]);
    let busy = |line: &str| {
        let look = parsed(line);
        look["event"] == "look" && number(&look, "delivered") >= 50 && number(&look, "inRetry") >= 1
    };
    let look = parsed(&demo.stdout.find("busy look", busy));
    assert_eq!(look["violation"], Value::Null, "{look}");
    assert!(number(&look, "groups") > 20, "{look}");
    let stuck = demo.until(&["explain", "invoice-stuck"], |views| views[0]["state"] == "retrying");
    assert_eq!(stuck[0]["pool"], "billing");
    demo.interrupt();
    let rest = demo.stdout.rest();
    let summary = parsed(rest.last().expect("a summary"));
    assert_eq!(summary["event"], "summary", "{summary}");
    assert_eq!(summary["violation"], Value::Null, "{summary}");
    let parts = ["delivered", "deadLetters", "leftInQueue"].map(|part| number(&summary, part));
    assert_eq!(number(&summary, "published"), parts.iter().sum::<u64>(), "{summary}");
    assert!(number(&summary, "mostAtOnce") > 1, "{summary}");
    assert_eq!(demo.code(), Some(0));
    let told = demo.stderr.rest().join("\n");
    assert!(told.contains("draining: ") && told.contains(" s left"), "the countdown is shown: {told}");
    assert!(told.contains("went back to the queue"), "{told}");
}

#[test]
fn people_see_a_line_per_second_and_a_summary() {
    let mut child = laneway(&["serve", "--demo", "--bind", "127.0.0.1:0"]);
    let mut child = child
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let stdout = crate::running::Lines::of(child.stdout.take().expect("piped"));
    let stderr = crate::running::Lines::of(child.stderr.take().expect("piped"));
    stderr.find("address", |line| line.contains("HTTP API   http://127.0.0.1:"));
    let folder = stderr.find("queue", |line| line.contains("gone at the end"));
    stdout.find("heading", |line| line.contains("delivered") && line.contains("dead letters"));
    stdout.find("line", |line| line.ends_with("each in order"));
    let status = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(status.expect("kill is there").success());
    stdout.find("account", |line| line.starts_with("account  ") && line.contains(" delivered + "));
    stdout.find("order", |line| line.contains("each strictly in order, never two of a group at once"));
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    let folder = folder.split_whitespace().nth(1).expect("a path").trim_end_matches(',');
    assert!(!std::path::Path::new(folder).exists(), "{folder} is left over");
}

#[test]
fn ctrl_c_drains_what_is_held_and_ends_with_zero() {
    let mut service = Running::start(&[]);
    service.tell(&["send", "--group", "g", "--count", "20", "--target", "SIMULATED 20ms"]);
    service.until(&["explain", "g"], |views| views[0]["depth"].as_u64() > Some(0));
    service.interrupt();
    assert_eq!(service.code(), Some(0));
    let told = service.stderr.rest().join("\n");
    assert!(told.contains("drained: nothing was left"), "{told}");
}

#[test]
fn what_is_left_when_the_time_is_up_comes_again_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("queue.db").display().to_string();
    let mut service = Running::start(&["--database", &file, "--set", "shutdown.drain=100ms"]);
    service.tell(&["pools", "pause", "DEFAULT-POOL"]);
    service.tell(&["send", "--group", "g", "--count", "3", "--target", "SIMULATED 1ms"]);
    service.until(&["explain", "g"], |views| views[0]["depth"] == 3);
    service.interrupt();
    assert_eq!(service.code(), Some(0));
    let told = service.stderr.rest().join("\n");
    assert!(told.contains("3 messages went back to the queue"), "{told}");
    let again = Running::start(&["--database", &file]);
    again.delivered("DEFAULT-POOL", 3);
}

#[test]
fn a_call_that_has_not_come_back_is_not_nothing() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let target = format!("http://{}/", silent.local_addr().expect("an address"));
    let mut service = Running::start(&["--set", "shutdown.drain=100ms"]);
    service.tell(&["send", "--group", "g", "--count", "3", "--target", &target]);
    service.until(&["explain", "g"], |views| views[0]["state"] == "running" && views[0]["depth"] == 3);
    service.interrupt();
    assert_eq!(service.code(), Some(0));
    let told = service.stderr.rest().join("\n");
    let words = "stopped: 2 messages went back to the queue, in order; 1 message was with its target";
    assert!(told.contains(words), "{told}");
    let lines: Vec<_> = service.stdout.rest().iter().map(|line| parsed(line)).collect();
    let account = json!({
        "event": "stopped", "settled": true, "givenBack": 2, "stillRunning": 1, "ingressLost": 0, "connectionsCut": 0,
    });
    assert_eq!(lines.last(), Some(&account), "{lines:?}");
}

#[test]
fn a_second_ctrl_c_stops_at_once() {
    let mut service = Running::start(&["--set", "shutdown.drain=1h"]);
    let slow = format!("{}/api/test/slow", service.url);
    service.tell(&["send", "--group", "g", "--target", &slow]);
    service.until(&["explain", "g"], |views| views[0]["state"] == "running");
    service.interrupt();
    service.stderr.find("countdown", |line| line.starts_with("draining: 1 message left"));
    let told = parsed(&service.stdout.find("countdown", |line| line.contains("\"draining\"")));
    assert!(told["held"] == 1 && number(&told, "secondsLeft") > 3_000, "{told}");
    service.interrupt();
    assert_eq!(service.code(), Some(130));
}

#[test]
fn a_configuration_that_is_wrong_starts_nothing() {
    let answer = run(&["serve", "--bind", "127.0.0.1:0", "--set", "lease=soon", "--set", "http.bnid=1"]);
    assert_eq!(answer.code, 6, "{}", answer.stderr);
    assert!(answer.stderr.contains("laneway.lease") && answer.stderr.contains("bnid"), "{}", answer.stderr);
    let answer = run(&["serve", "--config", "no-such-file.conf"]);
    assert_eq!(answer.code, 6, "{}", answer.stderr);
    assert!(answer.stderr.contains("no-such-file.conf"), "{}", answer.stderr);
    let answer = run(&["serve", "--bind", "0.0.0.0:0"]);
    assert_eq!(answer.code, 6, "nobody is let in from outside without a token: {}", answer.stderr);
}

#[test]
fn an_address_that_is_taken_is_named_with_the_way_out() {
    let service = Running::start(&[]);
    let address = service.url.trim_start_matches("http://");
    let folder = tempfile::tempdir().expect("a folder");
    let mut second = laneway(&["serve", "--bind", address]);
    let answer =
        crate::running::Answer::of(second.current_dir(folder.path()).output().expect("the binary runs"));
    assert_eq!(answer.code, 1);
    assert!(answer.stderr.contains(address) && answer.stderr.contains("--bind"), "{}", answer.stderr);
}
