//! `kill -9` at random moments. A child process publishes, claims, gives back and settles at full speed and tells what it is about to do and what it
//! has been told; the parent kills it, starts it again on the same file, and in the end looks at what is left.
//!
//! The checker: every publication that was acknowledged has been settled or is still there; nothing whose settlement was acknowledged comes again;
//! nothing appears that nobody published; each group comes in order, in every life of the child and at the end.
//!
//! `LANEWAY_CRASH_KILLS` and `LANEWAY_CRASH_SEED` change how often and when. A failure prints its seed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use laneway_router::source::embedded::{Commit, EmbeddedQueue, EmbeddedStore, Options, Publication};
use laneway_router::source::{Delivery, Disposal, Settled, Source, Wants};

const FILE: &str = "LANEWAY_CRASH_FILE";
const LIFE: &str = "LANEWAY_CRASH_LIFE";
const GROUPS: u64 = 7;
const PUBLISHERS: u64 = 3;
/// Numbers of one life begin here times its number, so that they grow from life to life.
const LIFE_LENGTH: u64 = 10_000_000;

/// A child that nobody has killed by then ends.
const LIFE_MAX: Duration = Duration::from_secs(20);

/// One line to the parent. A line is short and goes out in one write, so what was said before the kill has been said whole.
fn say(word: char, numbers: impl IntoIterator<Item = u64>) {
    let numbers = numbers.into_iter().map(|number| number.to_string()).collect::<Vec<_>>().join(" ");
    let line = format!("@{word} {numbers}\n");
    std::io::stdout().lock().write_all(line.as_bytes()).expect("the parent listens");
}

fn number_of(delivery: &Delivery) -> u64 {
    std::str::from_utf8(&delivery.text).expect("text").parse().expect("a number")
}

fn group_of(number: u64) -> u64 {
    number % GROUPS
}

/// What runs in the child. Without a file in the environment it is a test that has nothing to do.
#[test]
fn child() {
    let (Ok(path), Ok(life)) = (std::env::var(FILE), std::env::var(LIFE)) else { return };
    let life: u64 = life.parse().expect("a number");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    // The test runner has begun a line of its own.
    println!();
    // A child whose parent has gone must not live for ever.
    let lived = async { tokio::time::timeout(LIFE_MAX, live(Path::new(&path), life)).await };
    assert!(runtime.expect("a runtime").block_on(lived).is_err(), "a life has no end of its own");
}

async fn live(path: &Path, life: u64) {
    let store = EmbeddedStore::open(path, Options::default()).expect("the file is whole, and free");
    let queue = store.queue("orders").expect("a queue");
    say('R', [life]);
    let publishers = (0..PUBLISHERS).map(|publisher| tokio::spawn(publish(queue.clone(), life, publisher)));
    let publishers: Vec<_> = publishers.collect();
    consume(&queue, life).await;
    for publisher in publishers {
        publisher.await.expect("a publisher has no end");
    }
}

/// A publisher has its groups to itself, so that the order of its numbers is the order of publication.
async fn publish(queue: EmbeddedQueue, life: u64, publisher: u64) {
    let mut random = fastrand::Rng::with_seed(life * 31 + publisher);
    for from in (life * LIFE_LENGTH..).step_by(20) {
        let numbers = from..from + random.u64(1..20);
        let mine: Vec<u64> = numbers.filter(|number| group_of(*number) % PUBLISHERS == publisher).collect();
        let publications = mine
            .iter()
            .map(|number| Publication::new(number.to_string()).group(format!("g{}", group_of(*number))));
        say('p', mine.iter().copied());
        queue.publish_many(publications.collect(), None).await.expect("published");
        say('P', mine);
    }
}

async fn consume(queue: &EmbeddedQueue, life: u64) {
    let mut random = fastrand::Rng::with_seed(life);
    // Enough that some settlements are many, and are noted before their rows are removed.
    let wants = Wants { most: 120, wait: Duration::from_secs(10), lease: Duration::from_secs(60) };
    loop {
        let deliveries = queue.claim(wants).await.expect("claimed");
        say('c', deliveries.iter().map(number_of));
        // A group that is given back is given back whole.
        let back = random.u64(0..GROUPS * 3);
        let fate = |delivery: &Delivery| match group_of(number_of(delivery)) == back {
            true => Disposal::GiveBack { delay: Duration::from_millis(back) },
            false => Disposal::Done,
        };
        let done = || deliveries.iter().map(number_of).filter(|number| group_of(*number) != back);
        say('s', done());
        let disposals =
            deliveries.iter().map(|delivery| (delivery.receipt.clone(), fate(delivery))).collect();
        let settled = queue.settle(disposals).await.expect("settled");
        assert!(settled.iter().all(|settled| *settled == Settled::Settled));
        say('S', done());
    }
}

/// What the parent has heard.
#[derive(Default)]
struct Account {
    intended: BTreeSet<u64>,
    acknowledged: BTreeSet<u64>,
    settling: BTreeSet<u64>,
    settled: BTreeSet<u64>,
    claims: usize,
}

impl Account {
    /// Everything that a child said in its life.
    fn hear(&mut self, lines: impl Iterator<Item = String>, seed: u64) {
        let mut last = BTreeMap::<u64, u64>::new();
        let mut seen = BTreeSet::new();
        for line in lines {
            let Some((word, numbers)) = line.strip_prefix('@').and_then(|line| line.split_once(' ')) else {
                continue;
            };
            let numbers: Vec<u64> = numbers.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            match word {
                "p" => self.intended.extend(numbers),
                "P" => self.acknowledged.extend(numbers),
                "s" => self.settling.extend(numbers),
                "S" => self.settled.extend(numbers),
                "c" => {
                    for number in numbers {
                        self.claims += 1;
                        assert!(
                            !self.settled.contains(&number),
                            "{number} was settled and came again (seed {seed})"
                        );
                        if seen.insert(number) {
                            let before = last.insert(group_of(number), number);
                            assert!(
                                before.is_none_or(|before| before < number),
                                "{before:?} before {number} (seed {seed})"
                            );
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// What is left in the file, in the order in which it came.
    fn close(&self, left: &[u64], seed: u64) {
        let mut last = BTreeMap::<u64, u64>::new();
        for number in left {
            let before = last.insert(group_of(*number), *number);
            assert!(before.is_none_or(|before| before < *number), "{before:?} before {number} (seed {seed})");
            assert!(self.intended.contains(number), "{number} was never published (seed {seed})");
            assert!(!self.settled.contains(number), "{number} was settled and is there (seed {seed})");
        }
        let left: BTreeSet<u64> = left.iter().copied().collect();
        let lost =
            self.acknowledged.iter().find(|number| !left.contains(number) && !self.settling.contains(number));
        assert!(lost.is_none(), "{lost:?} was acknowledged and is gone (seed {seed})");
    }
}

fn child_on(path: &Path, life: u64) -> Command {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", "child", "--nocapture", "--test-threads", "1"]);
    child.env(FILE, path).env(LIFE, life.to_string());
    child
}

/// One life: lets a child work for a while and kills it.
fn life(path: &Path, life: u64, for_millis: u64) -> Vec<String> {
    let mut child = child_on(path, life).stdout(Stdio::piped()).spawn().expect("a child");
    let mut lines = BufReader::new(child.stdout.take().expect("its words")).lines().map_while(Result::ok);
    let ready = lines.by_ref().find(|line| line.starts_with("@R")).expect("the child opens the file");
    let listener = std::thread::spawn(move || lines.collect::<Vec<_>>());
    std::thread::sleep(Duration::from_millis(for_millis)); // paced: the moment of the kill is drawn at random
    child.kill().expect("killed");
    child.wait().expect("gone");
    let mut heard = vec![ready];
    heard.extend(listener.join().expect("heard to the end"));
    heard
}

fn drain(path: &Path) -> Vec<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let options = Options { commit: Commit::Inline, ..Options::default() };
        let store = EmbeddedStore::open(path, options).expect("the file survived");
        let queue = store.queue("orders").expect("a queue");
        let mut left = Vec::new();
        loop {
            let wants = Wants { most: 1_000, wait: Duration::from_secs(60), lease: Duration::from_secs(60) };
            let deliveries = queue.claim(wants).await.expect("claimed");
            if deliveries.is_empty() {
                return left;
            }
            left.extend(deliveries.iter().map(number_of));
            let done = deliveries.into_iter().map(|delivery| (delivery.receipt, Disposal::Done));
            queue.settle(done.collect()).await.expect("settled");
        }
    })
}

#[test]
fn a_second_process_is_told_that_the_file_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("queue.db");
    let options = Options { commit: Commit::Inline, ..Options::default() };
    let _store = EmbeddedStore::open(&path, options).expect("a store");
    let output = child_on(&path, 1).output().expect("a child");
    let words =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(!output.status.success() && words.contains("InUse") && !words.contains("@R"), "{words}");
}

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn nothing_is_lost_and_nothing_settled_comes_back_whenever_the_process_is_killed() {
    let (kills, seed) = (setting("LANEWAY_CRASH_KILLS", 10), setting("LANEWAY_CRASH_SEED", 1));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("queue.db");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut account = Account::default();
    for number in 1..=kills {
        let lines = life(&path, number, random.u64(1..150));
        account.hear(lines.into_iter(), seed);
    }
    let left = drain(&path);
    account.close(&left, seed);
    let heard = (account.acknowledged.len(), account.settled.len(), account.claims);
    assert!(heard.0 > 0 && heard.1 > 0, "the children did something: {heard:?}");
    eprintln!(
        "{kills} kills: {} acknowledged, {} settled, {} claims, {} left",
        heard.0,
        heard.1,
        heard.2,
        left.len()
    );
}
