//! Two `laneway serve` that share a lease on a real Postgres: one works, the other stands by and takes over when the first is killed. And what the doctor says.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use laneway_servers::postgres;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
const GROUPS: u64 = 5;
const EACH: u64 = 40;

fn laneway(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laneway"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("LANEWAY_")) {
        command.env_remove(name);
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

/// A call that reached the target.
#[derive(Debug)]
struct Call {
    group: String,
    sequence: u64,
    epoch: u64,
}

/// A target that says of every call what it was, and then that it is done.
fn target() -> (String, Receiver<Call>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let (told, calls) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let told = told.clone();
            // Whoever is killed leaves a connection behind that breaks.
            thread::spawn(move || drop(answer(stream, &told)));
        }
    });
    (url, calls)
}

fn answer(stream: TcpStream, told: &Sender<Call>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    loop {
        let mut headers = HashMap::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            match line.trim_end().split_once(": ") {
                Some((name, value)) => drop(headers.insert(name.to_lowercase(), value.to_owned())),
                None if line.trim_end().is_empty() => break,
                None => {}
            }
        }
        let length = headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
        reader.read_exact(&mut vec![0; length])?;
        let text = |name: &str| headers.get(name).cloned().unwrap_or_default();
        let number = |name: &str| text(name).parse().unwrap_or(0);
        let call = Call {
            group: text("laneway-key"),
            sequence: number("laneway-sequence"),
            epoch: number("laneway-epoch"),
        };
        // Nobody listens once the test is over.
        let _ = told.send(call);
        writer
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")?;
    }
}

/// One of the two, and what it says.
struct Router {
    child: Child,
    lines: Receiver<String>,
}

impl Router {
    fn start(config: &str, folder: &Path) -> Router {
        let mut command = laneway(&["serve", "--config", config]);
        command.current_dir(folder).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary runs");
        let stderr = child.stderr.take().expect("piped");
        let (told, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = told.send(line);
            }
        });
        Router { child, lines }
    }

    #[track_caller]
    fn says(&self, wanted: &str) -> String {
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(wanted) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("no {wanted:?} in\n{}", seen.join("\n")),
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("it ends");
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn doctor(config: &str) -> (Option<i32>, Vec<Value>) {
    let output = laneway(&["doctor", "--config", config, "--json"]).output().expect("the binary runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let about_standby =
        |finding: &Value| finding["about"].as_str().is_some_and(|about| about.starts_with("standby"));
    let findings = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).filter(about_standby);
    (output.status.code(), findings.collect())
}

#[test]
fn the_one_that_stands_by_takes_over_from_one_that_is_killed_and_keeps_the_order() {
    let server = postgres::start().expect("Postgres starts");
    let url = postgres::url(&server);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    let config = format!(
        "laneway {{ http.bind = \"127.0.0.1:0\", lease = 3 s, queue.queues = [], standby {{ lease = {url:?}, name = orders, time = 2 s }}
           sources.orders {{ kind = postgres, url = {url:?}, queue = orders }} }}"
    );
    std::fs::write(&file, config).expect("written");
    let file = file.display().to_string();
    let (code, findings) = doctor(&file);
    assert_eq!(findings[0]["what"], "nobody has had the lease yet", "{code:?} {findings:?}");

    let (target, calls) = target();
    let mut first = Router::start(&file, folder.path());
    first.says("working: the lease \"orders\" is held under token 1");
    let second = Router::start(&file, folder.path());
    second.says("standing by: waiting for the lease");
    let (_, findings) = doctor(&file);
    assert!(
        findings[0]["what"].as_str().is_some_and(|what| what.contains("has the lease under token 1")),
        "{findings:?}"
    );
    let to = format!("{url}?queue=orders");
    // The one that works makes the queue when it opens its source, which it may be at.
    let made_by = Instant::now() + PATIENCE;
    for group in 0..GROUPS {
        let (group, count) = (format!("g-{group}"), EACH.to_string());
        let arguments =
            ["send", "--to", &to, "--group", &group, "--count", &count, "--id", &group, "--target", &target];
        loop {
            let output = laneway(&arguments).output().expect("the binary runs");
            let why = String::from_utf8_lossy(&output.stderr);
            if output.status.success() {
                break;
            }
            let is_not_yet =
                why.contains("there is no queue orders") || why.contains("pgmq is not installed");
            assert!(is_not_yet && Instant::now() < made_by, "{why}");
        }
    }
    let next = || calls.recv_timeout(PATIENCE).expect("a call");
    let mut seen: Vec<Call> = (0..60).map(|_| next()).collect();
    first.kill();
    second.says("working: the lease \"orders\" is held under token 2");
    let all = (GROUPS * EACH) as usize;
    let mut known: HashSet<(String, u64)> =
        seen.iter().map(|call| (call.group.clone(), call.sequence)).collect();
    while known.len() < all {
        let call = next();
        known.insert((call.group.clone(), call.sequence));
        seen.push(call);
    }
    for group in 0..GROUPS {
        let group = format!("g-{group}");
        let of_group: Vec<&Call> = seen.iter().filter(|call| call.group == group).collect();
        let mut first_time: Vec<u64> = Vec::new();
        for call in &of_group {
            if !first_time.contains(&call.sequence) {
                first_time.push(call.sequence);
            }
        }
        assert!(first_time.len() as u64 == EACH && first_time.is_sorted(), "{group}: {first_time:?}");
        // What is repeated is what the one that was killed had in its hands: one of a group.
        assert!(of_group.len() as u64 <= EACH + 1, "{group} was called {} times", of_group.len());
        assert!(
            of_group.iter().map(|call| call.epoch).is_sorted(),
            "a call of the first one after the second"
        );
        assert!(of_group.iter().all(|call| call.epoch == 1 || call.epoch == 2), "{of_group:?}");
    }
    assert!(seen.iter().any(|call| call.epoch == 2));

    // What the one that works gives up is kept by the database, and listed.
    let line = second.says("HTTP API");
    let address = line.split_whitespace().find(|word| word.starts_with("http://")).expect("a URL").to_owned();
    let broken = format!("{address}/api/test/client-error");
    let sent = laneway(&["send", "--to", &to, "--group", "g-0", "--target", &broken])
        .output()
        .expect("the binary runs");
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let asked =
            laneway(&["dead-letters", "--url", &address, "--json"]).output().expect("the binary runs");
        let text = String::from_utf8(asked.stdout).expect("UTF-8");
        let letter = text.lines().next().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        if let Some(letter) = letter {
            assert!(letter["group"] == "g-0" && letter["attempts"].is_number(), "{letter}");
            break;
        }
        assert!(Instant::now() < deadline, "{}", String::from_utf8_lossy(&asked.stderr));
    }

    drop((second, server));
    let (code, findings) = doctor(&file);
    assert!(code == Some(1) && findings[0]["level"] == "error", "{findings:?}");
}
