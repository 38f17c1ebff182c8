//! A lease, wherever it is kept: two who want it, one of them let go, cut off, killed or frozen.
//!
//! A test binary takes this file in (`#[path = "../turns/mod.rs"] mod turns;`) and calls what it wants to see, with the address of the lease. One of the two is a process of its own: this binary
//! again with the test [`the_holder`].

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use laneway_router::message::Secret;
use laneway_router::standby::{Lease, Settings, Standby};
use laneway_servers::Server;

/// Nothing takes longer unless it is broken; the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const TIME: Duration = Duration::from_secs(4);

pub(crate) fn lease(url: &str) -> Arc<dyn Lease> {
    let settings = Settings { url: Secret::new(url), name: "the router's".to_owned(), time: TIME };
    settings.open().expect("a lease")
}

/// The child. Alone, without the environment that the parent gives it, it has nothing to do.
#[tokio::test]
#[ignore = "the other test runs it as a process to freeze"]
async fn the_holder() {
    let Ok(url) = std::env::var("LANEWAY_LEASE_URL") else { return };
    let standby = Standby::begin(lease(&url), TIME);
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
            .args(["turns::the_holder", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
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

/// A frozen holder does nothing when it goes on; a killed one is followed; and tokens grow.
pub(crate) async fn frozen_and_killed(url: &str) {
    let mut frozen = Holder::start(url);
    assert_eq!(frozen.hear(), "works 1");
    frozen.signal("STOP");
    let begun = Instant::now();
    let other = Standby::begin(lease(url), TIME);
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
    let again = Standby::begin(lease(url), TIME);
    frozen.child.kill().expect("killed");
    let token = tokio::time::timeout(PATIENCE, again.active()).await.expect("it takes over");
    assert_eq!(token, 4);
    again.end().await;
    let sight = lease(url).look().await.expect("a look");
    let last = sight.last.expect("somebody had it");
    assert!(sight.is_allowed && last.left.is_zero(), "{last:?}");
    let ours = format!("process {}", std::process::id());
    assert!(last.token == 4 && last.name.contains(&ours), "{last:?}");
}

/// A server that has lost a holder's last writes, which `forget` does to it, gives the same token to another: then it is the first one's no more.
pub(crate) async fn given_twice(url: &str, forget: impl AsyncFnOnce()) {
    let (first, second) = (lease(url), lease(url));
    let token = first.acquire(TIME).await.expect("an answer").expect("it is free");
    forget().await;
    assert_eq!(second.acquire(TIME).await, Ok(Some(token)), "as if nobody had had it");
    assert_eq!(first.renew(token, TIME).await, Ok(false), "somebody else works under this token");
    first.release(token).await.expect("an answer");
    assert_eq!(second.renew(token, TIME).await, Ok(true), "only its holder lets it go");
}

/// A holder whose server is gone stops in time, and comes back.
pub(crate) async fn without_its_server(server: &mut Server, url: &str) {
    let standby = Standby::begin(lease(url), TIME);
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
