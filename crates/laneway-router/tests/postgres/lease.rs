//! The lease: two who want it, one of them let go, cut off, or frozen.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use laneway_router::message::Secret;
use laneway_router::source::postgres::PostgresLease;
use laneway_router::standby::{Lease, Standby};
use laneway_servers::postgres;

use super::PATIENCE;

const TIME: Duration = Duration::from_secs(4);

fn lease(url: &str, holder: &str) -> Arc<dyn Lease> {
    Arc::new(PostgresLease::open(&Secret::new(url), "router", holder).expect("a lease"))
}

/// The child. Alone, without the environment that the parent gives it, it has nothing to do.
#[tokio::test]
#[ignore = "the other test runs it as a process to freeze"]
async fn the_holder() {
    let Ok(url) = std::env::var("LANEWAY_LEASE_URL") else { return };
    let standby = Standby::begin(lease(&url, "child"), TIME);
    let mut last = None;
    loop {
        let token = standby.token();
        match token {
            Some(token) => println!("\nlease: works {token}"),
            None if last.is_some() => println!("\nlease: stops"),
            None => {}
        }
        last = token;
        tokio::time::sleep(Duration::from_millis(20)).await; // paced: its work
    }
}

struct Holder {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Holder {
    fn start(url: &str) -> Holder {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["lease::the_holder", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("LANEWAY_LEASE_URL", url)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the child starts");
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(said) = line.strip_prefix("lease: ") {
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        Holder { child, lines }
    }

    fn hear(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("the child says something")
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([format!("-{name}"), id]).status().expect("kill").success());
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_holder_does_nothing_when_it_goes_on_and_tokens_grow() {
    let server = super::start();
    let url = postgres::url(&server);
    let frozen = Holder::start(&url);
    assert_eq!(frozen.hear(), "works 1");
    frozen.signal("STOP");
    let begun = Instant::now();
    let other = Standby::begin(lease(&url, "parent"), TIME);
    let token = tokio::time::timeout(PATIENCE, other.active()).await.expect("it takes over");
    assert_eq!(token, 2);
    assert!(begun.elapsed() >= TIME / 2, "not before the frozen one's time was up");
    // What it had said before it was frozen.
    while frozen.lines.try_recv().is_ok() {}
    frozen.signal("CONT");
    // It may have been frozen between looking and saying, once.
    let mut said = frozen.hear();
    if said == "works 1" {
        said = frozen.hear();
    }
    assert_eq!(said, "stops");
    assert!(other.is_active());
    other.end().await;
    assert_eq!(frozen.hear(), "works 3");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_server_is_gone_stops_in_time_and_comes_back() {
    let mut server = super::start();
    let url = postgres::url(&server);
    let standby = Standby::begin(lease(&url, "one"), TIME);
    let token = tokio::time::timeout(PATIENCE, standby.active()).await.expect("it works");
    server.kill().expect("it was there");
    let begun = Instant::now();
    standby.lost(token).await;
    assert!(begun.elapsed() < TIME, "before the time of its lease is up");
    assert!(!standby.is_active() && standby.trouble().is_some());
    server.resume().expect("it comes back");
    let again = tokio::time::timeout(PATIENCE, standby.active()).await.expect("it works again");
    assert!(again > token);
}
