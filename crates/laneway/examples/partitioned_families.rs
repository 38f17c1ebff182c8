//! Document 003's workload, scaled to a few seconds: many families of tasks of 10 to 20 ms on partitions, one family much larger than the
//! others.
//!
//! Tasks of one family run one after the other; families run beside each other. The hot family can do no more than one task at a time,
//! so it takes as long as its tasks in a row; the others must not notice it.
//!
//! ```text
//! cargo run -p laneway --example partitioned_families
//! ```

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use laneway::{Engine, Topology};

const FAMILIES: u64 = 400;
const TASKS_EACH: u64 = 5;
const HOT: u64 = 0;
const HOT_TASKS: u64 = 150;

/// What the handlers have seen.
#[derive(Default)]
struct Seen {
    /// The next task of each family; a task that comes out of turn is a mistake.
    next: Mutex<std::collections::HashMap<u64, u64>>,
    mistakes: AtomicU64,
    /// When the last task of the hot family, and of any other one, was done.
    hot_done: Mutex<Duration>,
    others_done: Mutex<Duration>,
}

impl Seen {
    fn task(&self, family: u64, task: u64, began: Instant) {
        let due = std::mem::replace(self.next.lock().unwrap().entry(family).or_default(), task + 1);
        self.mistakes.fetch_add(u64::from(due != task), Relaxed);
        sleep(Duration::from_millis(10 + (family * 31 + task * 17) % 11));
        let done = if family == HOT { &self.hot_done } else { &self.others_done };
        *done.lock().unwrap() = began.elapsed();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (seen, began) = (Arc::new(Seen::default()), Instant::now());
    let in_handler = seen.clone();
    let engine = Engine::builder()
        // Four partitions; sixteen workers each, because the work is waiting, not computing.
        .topology(Topology::partitioned(4, 16))
        .handle(move |context, task: &mut u64| in_handler.task(*context.key(), *task, began))
        .build()?;

    for task in 0..HOT_TASKS {
        engine.submit((HOT, task))?;
    }
    for task in 0..TASKS_EACH {
        for family in 1..=FAMILIES {
            engine.submit((family, task))?;
        }
    }
    println!("{} tasks submitted after {:?}", engine.snapshot().account.accepted, began.elapsed());

    engine.wait_quiet(Duration::from_secs(20));
    let snapshot = engine.snapshot();
    println!("\npartition     tasks in   completed   found family busy   deepest family");
    for p in &snapshot.dispatchers {
        let (tasks, done, busy) = (p.account.accepted, p.account.done, p.enqueued_due_to_busy);
        println!("{:<12} {tasks:>9} {done:>11} {busy:>19} {:>16}", p.name, p.max_pending_depth);
    }
    println!(
        "\n{FAMILIES} families of {TASKS_EACH} were done after {:.2?}",
        *seen.others_done.lock().unwrap()
    );
    println!(
        "the hot family of {HOT_TASKS} was done after {:.2?}: one at a time, beside the others",
        *seen.hot_done.lock().unwrap()
    );
    println!("tasks out of order: {}", seen.mistakes.load(Relaxed));
    Ok(())
}
