//! What the tests of brokers share: a target that remembers every call, and routers in front of it.
//!
//! The [`Witness`] notes at once when two calls of one group overlap, and [`Witness::verify`] is where a test fails: every group contiguous by first delivery, exact counts.

#![allow(dead_code, reason = "no test file uses all of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use laneway_router::config::{Config, Layering};
use laneway_router::mediator::{Call, Mediator, NO_SEQUENCE, Verdict};
use laneway_router::pool::PoolSettings;
use laneway_router::router::{Router, SourceSettings};
use laneway_router::source::Source;
use tokio::sync::Notify;

/// Nothing takes longer than this unless it is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// A message as publishers write it, the n-th of its group.
pub(crate) fn text(group: &str, number: usize) -> String {
    format!(
        r#"{{"id":"{group}#{number}","poolCode":"p","mediationType":"SIMULATED","messageGroupId":"{group}"}}"#
    )
}

#[derive(Default)]
struct Seen {
    running: BTreeSet<String>,
    overlaps: Vec<String>,
    /// First deliveries, by group, in order.
    firsts: BTreeMap<String, Vec<usize>>,
    repeats: usize,
    /// Calls with a sequence.
    numbered: usize,
}

/// A target.
#[derive(Default)]
pub(crate) struct Witness {
    seen: Mutex<Seen>,
    changed: Notify,
    /// How long a call takes.
    takes: Duration,
    /// Messages with this group fail for good.
    refuses: Option<&'static str>,
}

impl Witness {
    pub(crate) fn new(takes: Duration, refuses: Option<&'static str>) -> Self {
        Witness { takes, refuses, ..Witness::default() }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until so many messages have been delivered for the first time.
    pub(crate) async fn wait_for(&self, count: usize) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let changed = self.changed.notified();
            let have: usize = self.seen().firsts.values().map(Vec::len).sum();
            if have >= count {
                return;
            }
            let waited = tokio::time::timeout_at(deadline, changed).await;
            assert!(waited.is_ok(), "{have} of {count}: {:?}", self.seen().firsts);
        }
    }

    /// How many calls had a sequence.
    pub(crate) fn numbered(&self) -> usize {
        self.seen().numbered
    }

    /// Sees that these groups came whole and in order, that nothing overlapped, and gives the number of repeated deliveries.
    pub(crate) fn verify(&self, groups: &[(&str, usize)]) -> usize {
        let seen = self.seen();
        assert_eq!(seen.overlaps, Vec::<String>::new(), "two calls of a group at a time");
        let expected: BTreeMap<String, Vec<usize>> =
            groups.iter().map(|(group, count)| ((*group).to_owned(), (0..*count).collect())).collect();
        assert_eq!(seen.firsts, expected);
        seen.repeats
    }
}

impl Mediator for Witness {
    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            let (group, number) = call.message.id.split_once('#').expect("numbered");
            let number: usize = number.parse().expect("numbered");
            self.seen().numbered += usize::from(call.sequence != NO_SEQUENCE);
            if !self.seen().running.insert(group.to_owned()) {
                self.seen().overlaps.push(call.message.id.clone());
            }
            tokio::time::sleep(self.takes).await; // paced: what a call takes
            let mut seen = self.seen();
            seen.running.remove(group);
            let firsts = seen.firsts.entry(group.to_owned()).or_default();
            if firsts.contains(&number) {
                seen.repeats += 1;
            } else {
                firsts.push(number);
            }
            drop(seen);
            self.changed.notify_waiters();
            match self.refuses == Some(group) {
                true => Verdict::Final { reason: "refused".to_owned() },
                false => Verdict::Done,
            }
        })
    }
}

/// A router with one source, in front of a witness.
pub(crate) fn router(witness: &Arc<Witness>, source: Arc<dyn Source>, lease: Duration) -> Router {
    let mediator = Arc::clone(witness);
    let make = Arc::new(move |_: &PoolSettings| Arc::clone(&mediator) as Arc<dyn Mediator>);
    let settings =
        PoolSettings { concurrency: 16, backoff: Duration::from_millis(50), ..PoolSettings::default() };
    let router = Router::start(settings, make).expect("a router");
    router.add_source(source, SourceSettings { lease });
    router
}

/// The configurations of a kind in the guide, as one, with replacements and further settings.
pub(crate) fn of_the_guide(kind: &str, replaced: &[(&str, &str)], set: &[(&str, &str)]) -> Config {
    let guide = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/brokers.md");
    let guide = std::fs::read_to_string(guide).expect("the guide");
    let section = guide.split("\n## ").find(|section| section.starts_with(kind)).expect("a section");
    let blocks = section.split("```hocon\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut text = blocks.collect::<Vec<_>>().join("\n");
    for (from, to) in replaced {
        assert!(text.contains(from), "{from} is in the guide");
        text = text.replace(from, to);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    std::fs::write(&file, &text).expect("written");
    let mut layering = Layering::file(file);
    for (path, value) in set {
        layering = layering.set(path, value);
    }
    Config::load(&layering).unwrap_or_else(|error| panic!("{text}\n{:#?}", error.problems()))
}
