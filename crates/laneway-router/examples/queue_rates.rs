//! How fast the embedded queue is here, and what a queued message costs in memory.
//!
//! ```text
//! cargo run --release -p laneway-router --example queue_rates
//! cargo run --release -p laneway-router --example queue_rates -- --messages 1000000 --groups 10000
//! ```
//!
//! Three figures: publishing with one commit per message beside many publishers that share commits; publishing, claiming and settling in
//! batches, with the processor time per message; and the memory of a backlog. Without options it is over in a few seconds.

use std::path::Path;
use std::time::{Duration, Instant};

use laneway_router::source::embedded::{EmbeddedQueue, EmbeddedStore, Options, Publication};
use laneway_router::source::{Disposal, Source, Wants};

/// Set for the process that opens a backlog and does nothing else, so that its memory is that of the backlog.
const BACKLOG: &str = "LANEWAY_QUEUE_RATES_BACKLOG";

struct Settings {
    messages: usize,
    groups: usize,
}

fn settings() -> Result<Settings, String> {
    let mut settings = Settings { messages: 100_000, groups: 1_000 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().and_then(|value| value.parse().ok());
        let value = value.filter(|value| *value > 0).ok_or(format!("{word} needs a number above 0"))?;
        match word.as_str() {
            "--messages" => settings.messages = value,
            "--groups" => settings.groups = value,
            _ => return Err(format!("{word} is neither --messages nor --groups")),
        }
    }
    Ok(settings)
}

fn publication(number: usize, groups: usize) -> Publication {
    Publication::new([b'x'; 256]).group(format!("group-{}", number % groups))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(path) = std::env::var_os(BACKLOG) {
        return restart(Path::new(&path)).await;
    }
    let settings = settings()?;
    let folder = tempfile::tempdir()?;
    commits(folder.path(), &settings).await?;
    through(folder.path(), &settings).await?;
    backlog(folder.path(), &settings).await?;
    Ok(())
}

/// One publisher that waits for each commit, and many that share them.
async fn commits(folder: &Path, settings: &Settings) -> Result<(), Box<dyn std::error::Error>> {
    let store = EmbeddedStore::open(folder.join("commits.db"), Options::default())?;
    let queue = store.queue("rates")?;
    let (begin, mut alone) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_secs(1) {
        queue.publish(publication(alone, settings.groups)).await?;
        alone += 1;
    }
    let alone = alone as f64 / begin.elapsed().as_secs_f64();
    for publishers in [32, 256, 1_024] {
        let together = publish_from_many(&queue, publishers, settings).await;
        println!(
            "publish, durable     {together:>9.0} messages/s with {publishers:>4} publishers, {:.0} times the {alone:.0} of one",
            together / alone
        );
    }
    let batches = settings.messages.min(100_000) / 1_000 + 1;
    let begin = Instant::now();
    for _ in 0..batches {
        let batch = (0..1_000).map(|number| publication(number, settings.groups)).collect();
        queue.publish_many(batch, None).await?;
    }
    let rate = (batches * 1_000) as f64 / begin.elapsed().as_secs_f64();
    println!("publish, durable     {rate:>9.0} messages/s in calls of 1,000, {:.0} times", rate / alone);
    store.close().await;
    Ok(())
}

async fn publish_from_many(queue: &EmbeddedQueue, publishers: usize, settings: &Settings) -> f64 {
    let each = settings.messages.min(50_000) / publishers + 1;
    let begin = Instant::now();
    let tasks = (0..publishers).map(|publisher| {
        let (queue, groups) = (queue.clone(), settings.groups);
        tokio::spawn(async move {
            for number in 0..each {
                queue.publish(publication(publisher + number, groups)).await.expect("published");
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("a publisher ends well");
    }
    (publishers * each) as f64 / begin.elapsed().as_secs_f64()
}

/// Publish, claim, settle, in batches of 500, at the same time.
async fn through(folder: &Path, settings: &Settings) -> Result<(), Box<dyn std::error::Error>> {
    let store = EmbeddedStore::open(folder.join("through.db"), Options::default())?;
    let queue = store.queue("rates")?;
    let (begin, cpu) = (Instant::now(), cpu_seconds());
    let publisher = tokio::spawn({
        let (queue, messages, groups) = (queue.clone(), settings.messages, settings.groups);
        async move {
            for from in (0..messages).step_by(500) {
                let batch = (from..messages.min(from + 500)).map(|number| publication(number, groups));
                queue.publish_many(batch.collect(), None).await.expect("published");
            }
        }
    });
    let wants = Wants { most: 500, wait: Duration::from_secs(10), lease: Duration::from_secs(60) };
    let mut settled = 0;
    while settled < settings.messages {
        let deliveries = queue.claim(wants).await?;
        settled += deliveries.len();
        let done = deliveries.into_iter().map(|delivery| (delivery.receipt, Disposal::Done)).collect();
        queue.settle(done).await?;
    }
    publisher.await?;
    let (wall, cpu) = (begin.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let messages = settings.messages as f64;
    println!(
        "publish to settled   {:>9.0} messages/s, {:.2} us of processor time per message",
        messages / wall,
        cpu * 1e6 / messages
    );
    store.close().await;
    Ok(())
}

/// A backlog, and a fresh process that finds it.
async fn backlog(folder: &Path, settings: &Settings) -> Result<(), Box<dyn std::error::Error>> {
    let path = folder.join("backlog.db");
    let store = EmbeddedStore::open(&path, Options::default())?;
    let queue = store.queue("rates")?;
    for from in (0..settings.messages).step_by(5_000) {
        let batch = from..settings.messages.min(from + 5_000);
        queue.publish_many(batch.map(|number| publication(number, settings.groups)).collect(), None).await?;
    }
    store.close().await;
    let status = std::process::Command::new(std::env::current_exe()?).env(BACKLOG, &path).status()?;
    if status.success() { Ok(()) } else { Err(format!("the second process: {status}").into()) }
}

/// What it costs to open a file with a backlog, and how fast that is worked off.
async fn restart(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let before = resident_bytes();
    let begin = Instant::now();
    let store = EmbeddedStore::open(path, Options::default())?;
    let opened = begin.elapsed();
    let memory = resident_bytes().saturating_sub(before) as f64;
    let queue = store.queue("rates")?;
    let messages = queue.depth().await?.waiting as usize;
    println!(
        "backlog              {messages:>9} messages in {} groups: {:.0} bytes each in memory (SQLite's pages included), {:.0} on disk, opened in {opened:.2?}",
        queue.group_count(),
        memory / messages as f64,
        std::fs::metadata(path)?.len() as f64 / messages as f64,
    );
    let wants = Wants { most: 500, wait: Duration::from_secs(10), lease: Duration::from_secs(60) };
    let (begin, cpu, mut settled) = (Instant::now(), cpu_seconds(), 0);
    while settled < messages.min(100_000) {
        let deliveries = queue.claim(wants).await?;
        settled += deliveries.len();
        let done = deliveries.into_iter().map(|delivery| (delivery.receipt, Disposal::Done)).collect();
        queue.settle(done).await?;
    }
    let (wall, cpu) = (begin.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    println!(
        "claim to settled     {:>9.0} messages/s read from the file, {:.2} us of processor time per message",
        settled as f64 / wall,
        cpu * 1e6 / settled as f64
    );
    store.close().await;
    Ok(())
}

/// Processor time of this process, from Linux's own account, in ticks of 10 ms. Nothing elsewhere.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: f64 = fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / 100.0
}

/// Memory of this process, from Linux's own account. Nothing elsewhere.
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<usize>().ok()).unwrap_or(0) * 1024
}
