//! What the service knows of flows on Postgres: the connections through which the API looks and acts, and what `/metrics` says of them.
//!
//! Nothing of it asks the database more than it would notice. How much is alive is counted when somebody scrapes, by indexes of what is alive, at most once in [`KEPT`]. What
//! has become of runs and steps is heard: the database announces it anyway, and one connection listens from the start of the service on. Announcements that were
//! made while that connection was away are not known; how often that was is counted, too.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use laneway_flow::FlowError;
use laneway_flow::client::{Event, Events};
use laneway_flow::look::{self, Counts};
use sqlx::PgPool;
use tokio::time::Instant;

/// How long a count is good: who scrapes more often sees the same one again.
const KEPT: Duration = Duration::from_secs(10);

/// The longest that a scrape waits for a count.
const PATIENCE: Duration = Duration::from_secs(3);

/// After a listener has failed: the first wait, and the longest.
const BACKOFF_MIN: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// Flows and queues that have labels of their own.
pub(crate) const LISTED_MAX: usize = 100;

/// What the others are called.
pub(crate) const OTHERS: &str = "(others)";

/// What is counted of announcements, in the words of the database.
pub(crate) const RUN_EVENTS: [&str; 4] = ["started", "completed", "failed", "cancelled"];
pub(crate) const STEP_EVENTS: [&str; 4] = ["started", "completed", "failed", "skipped"];

/// What was heard of a flow, in the order of the words above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) runs: [u64; 4],
    pub(crate) steps: [u64; 4],
}

/// The database of flows.
#[derive(Debug)]
pub(crate) struct Flows {
    pool: PgPool,
    /// By flow.
    heard: Mutex<BTreeMap<String, Heard>>,
    /// Whether somebody listens now.
    listening: AtomicBool,
    /// How often the connection was lost.
    gaps: AtomicU64,
    /// The last count, and when it was made. Held while the next is made, so that many who scrape ask once.
    counted: tokio::sync::Mutex<Option<(Instant, Answer)>>,
}

/// What came of a count.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Counts(Arc<Counts>),
    /// The database answers, but not to this: it took too long, a right is missing, or a migration.
    Refused,
    /// It does not answer.
    Nothing,
}

impl Flows {
    pub(crate) fn new(pool: PgPool) -> Self {
        Flows {
            pool,
            heard: Mutex::default(),
            listening: AtomicBool::new(false),
            gaps: AtomicU64::new(0),
            counted: tokio::sync::Mutex::default(),
        }
    }

    /// The connections.
    pub(crate) fn pool(&self) -> &PgPool {
        &self.pool
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Heard>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was heard since the service was started.
    pub(crate) fn heard(&self) -> BTreeMap<String, Heard> {
        self.table().clone()
    }

    /// Whether announcements are heard now, and how often they were not.
    pub(crate) fn listening(&self) -> (bool, u64) {
        (self.listening.load(Relaxed), self.gaps.load(Relaxed))
    }

    /// How much there is of everything, a few seconds old at most.
    pub(crate) async fn counts(&self) -> Answer {
        let mut counted = self.counted.lock().await;
        if let Some((at, answer)) = &*counted
            && at.elapsed() < KEPT
        {
            return answer.clone();
        }
        let asked = tokio::time::timeout(PATIENCE, look::counts(&self.pool, LISTED_MAX as u32)).await;
        let answer = match asked {
            Ok(Ok(counts)) => Answer::Counts(Arc::new(counts)),
            Ok(Err(FlowError::Unavailable(_))) | Err(_) => Answer::Nothing,
            Ok(Err(error)) => {
                // Told once, not at every scrape.
                if !matches!(&*counted, Some((_, Answer::Refused))) {
                    tracing::warn!(%error, "flows could not be counted, although their database answers");
                }
                Answer::Refused
            }
        };
        *counted = Some((Instant::now(), answer.clone()));
        answer
    }

    fn hear(&self, event: &Event) {
        let Some((kind, word)) = event.kind.split_once(':') else { return };
        let words = match kind {
            "run" => RUN_EVENTS,
            "step" => STEP_EVENTS,
            _ => return,
        };
        // Known before anything is made for it: whoever can connect can announce.
        let Some(place) = words.iter().position(|known| *known == word) else { return };
        let mut table = self.table();
        // A flow that comes when there are enough is one of the others.
        let is_listed = table.contains_key(&event.flow) || table.len() < LISTED_MAX;
        let flow = if is_listed { event.flow.clone() } else { OTHERS.to_owned() };
        let heard = table.entry(flow).or_default();
        let counts = if kind == "run" { &mut heard.runs } else { &mut heard.steps };
        counts[place] += 1;
    }
}

/// Listens until the service ends it.
pub(crate) async fn listen(flows: Arc<Flows>) {
    let mut wait = BACKOFF_MIN;
    loop {
        if let Ok(mut events) = Events::listen(&flows.pool).await {
            flows.listening.store(true, Relaxed);
            wait = BACKOFF_MIN;
            while let Ok(Some(event)) = events.next().await {
                flows.hear(&event);
            }
            flows.listening.store(false, Relaxed);
            flows.gaps.fetch_add(1, Relaxed);
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(BACKOFF_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn flows_beyond_the_hundredth_are_counted_together() {
        let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy("postgres://nobody@127.0.0.1:1/none");
        let flows = Flows::new(pool.expect("a url"));
        for number in 0..1_000 {
            let flow = format!("flow_{:03}", number % 500);
            flows.hear(&Event { kind: "run:completed".into(), flow: flow.clone() });
            flows.hear(&Event { kind: "step:skipped".into(), flow });
        }
        flows.hear(&Event { kind: "step:unheard_of".into(), flow: "flow_000".into() });
        flows.hear(&Event { kind: "nothing".into(), flow: "flow_000".into() });
        let heard = flows.heard();
        assert_eq!(heard.len(), LISTED_MAX + 1);
        assert_eq!(heard["flow_000"], Heard { runs: [0, 2, 0, 0], steps: [0, 0, 0, 2] });
        assert_eq!(heard[OTHERS], Heard { runs: [0, 800, 0, 0], steps: [0, 0, 0, 800] });
        let away = flows.counts().await;
        assert!(matches!(away, Answer::Nothing), "a database that is away is no failure of the scrape");
    }
}
