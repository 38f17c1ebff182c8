//! What a worker has counted of each of its queues since it last told the database.
//!
//! The poller, the slots and the settler add; the heartbeat takes everything out and adds it to the row of the queue, where what other workers counted is, too.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde_json::{Value, json};

use super::Shared;
use crate::error::FlowError;
use crate::look::HANDLER_BOUNDS;
use crate::store;

/// The numbers of one queue.
#[derive(Default)]
pub(crate) struct Tally {
    /// Reads that asked the queue.
    pub(crate) polls: AtomicU64,
    /// Tasks that were taken.
    pub(crate) taken: AtomicU64,
    /// Tasks whose completion counted.
    pub(crate) completed: AtomicU64,
    /// Tasks that are tried again.
    pub(crate) retried: AtomicU64,
    /// Tasks that failed for good.
    pub(crate) failed: AtomicU64,
    /// Tasks that were no longer ours when they ended.
    pub(crate) lost: AtomicU64,
    /// How long handlers took, all together, in microseconds.
    micros: AtomicU64,
    /// Handlers that ended within each bound, and beyond the last.
    handlers: [AtomicU64; HANDLER_BOUNDS.len() + 1],
}

impl Tally {
    /// A handler took so long.
    pub(crate) fn learn(&self, took: Duration) {
        let place = HANDLER_BOUNDS.partition_point(|bound| took.as_secs_f64() > *bound);
        self.handlers[place].fetch_add(1, Relaxed);
        self.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    fn all(&self) -> impl Iterator<Item = &AtomicU64> {
        let named = [
            &self.polls,
            &self.taken,
            &self.completed,
            &self.retried,
            &self.failed,
            &self.lost,
            &self.micros,
        ];
        named.into_iter().chain(&self.handlers)
    }

    /// Takes the numbers out; none if nothing has happened.
    fn take(&self) -> Option<Vec<u64>> {
        let numbers: Vec<u64> = self.all().map(|number| number.swap(0, Relaxed)).collect();
        numbers.iter().any(|number| *number > 0).then_some(numbers)
    }

    /// Puts them back, for the next time.
    fn put_back(&self, numbers: &[u64]) {
        for (number, more) in self.all().zip(numbers) {
            number.fetch_add(*more, Relaxed);
        }
    }
}

fn as_json(queue: &str, numbers: &[u64]) -> Value {
    json!({
        "queue": queue, "polls": numbers[0], "taken": numbers[1], "completed": numbers[2], "retried": numbers[3], "failed": numbers[4],
        "lost": numbers[5], "handler_seconds": numbers[6] as f64 / 1e6, "handlers": numbers[7..],
    })
}

/// Numbers that were taken out, by the places of their queues. They go back where nobody has said that they were told.
struct Taken<'a> {
    tallies: &'a [Tally],
    counted: Vec<(usize, Vec<u64>)>,
}

impl<'a> Taken<'a> {
    fn out_of(tallies: &'a [Tally]) -> Self {
        let some = tallies.iter().enumerate().filter_map(|(place, tally)| Some((place, tally.take()?)));
        Taken { counted: some.collect(), tallies }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.counted.iter().for_each(|(place, numbers)| self.tallies[*place].put_back(numbers));
    }
}

/// Tells the database what was counted. Where it did not take it, or is not waited for any longer, the numbers are kept for the next time.
pub(super) async fn tell(shared: &Shared) -> Result<(), FlowError> {
    let mut taken = Taken::out_of(&shared.hand.tallies);
    if taken.counted.is_empty() {
        return Ok(());
    }
    let row = |(place, numbers): &(usize, Vec<u64>)| as_json(&shared.queues[*place].name, numbers);
    let rows = taken.counted.iter().map(row).collect();
    store::count_tasks(&shared.control, &Value::Array(rows)).await?;
    taken.counted.clear();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_taken_once_and_can_be_put_back() {
        let tally = Tally::default();
        assert!(tally.take().is_none());
        tally.polls.fetch_add(2, Relaxed);
        tally.learn(Duration::from_millis(1));
        tally.learn(Duration::from_millis(7));
        tally.learn(Duration::from_secs(1_000));
        let numbers = tally.take().expect("something was counted");
        assert!(tally.take().is_none());
        tally.put_back(&numbers);
        let row = as_json("q", &tally.take().expect("it is there again"));
        assert_eq!((&row["queue"], &row["polls"], &row["taken"]), (&json!("q"), &json!(2), &json!(0)));
        assert_eq!(row["handler_seconds"], json!(1_000.008));
        let mut handlers = vec![0; HANDLER_BOUNDS.len() + 1];
        // A bound belongs to what it ends.
        (handlers[0], handlers[3], handlers[HANDLER_BOUNDS.len()]) = (1, 1, 1);
        assert_eq!(row["handlers"], json!(handlers));
    }
}
