//! The last minutes of the service in fixed memory, so that a page that is opened now shows what was before.
//!
//! Once a second `sampler.rs` looks at the pools, the queues and the record (`record.rs`), and hands a [`Moment`] in; here it is appended to rings of numbers.
//! Whoever opens the dashboard gets all of it ([`History::whole`]) and then every moment as it comes ([`History::subscribe`]): made into text once, for
//! everybody, and only while somebody reads.
//!
//! # How much
//!
//! [`POOLS_MAX`] pools and one row for the others, [`GROUPS_MAX`] groups, each a number of integers per second. Which groups: those that are deepest or busiest. A new
//! one takes the place of the one that mattered least, by a score that fades; names are cut at a kilobyte. So the number of keys does not matter.

mod sampler;
mod text;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use serde_json::Value;
use tokio::sync::watch;

use crate::record::GroupId;

pub(crate) use sampler::run;
use text::{Latest, Whole};

/// How often it looks.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// Pools that have rows of their own: the first by code.
pub(crate) const POOLS_MAX: usize = 32;

/// Groups that have rows.
pub(crate) const GROUPS_MAX: usize = 64;

/// What the row of all other pools is called.
pub(crate) const OTHERS: &str = "(others)";

/// A reader that has taken nothing for so long gives its place to another.
const STALE: Duration = Duration::from_secs(30);

/// How a pool did within a second. Counters are what was added.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolPoint {
    pub(crate) submitted: u32,
    pub(crate) succeeded: u32,
    pub(crate) failed: u32,
    pub(crate) retried: u32,
    pub(crate) held_back: u32,
    pub(crate) refused: u32,
    pub(crate) given_back: u32,
    pub(crate) waiting: u32,
    pub(crate) in_flight: u32,
    pub(crate) slots: u32,
    /// Thousandths of a slot, on the average of the second.
    pub(crate) busy: u32,
    pub(crate) p50_micros: u32,
    pub(crate) p95_micros: u32,
    pub(crate) p99_micros: u32,
}

impl PoolPoint {
    /// The names of the numbers, and the numbers: one list for both ways of writing them.
    fn named(&self) -> [(&'static str, u32); 14] {
        [
            ("submitted", self.submitted),
            ("succeeded", self.succeeded),
            ("failed", self.failed),
            ("retried", self.retried),
            ("heldBack", self.held_back),
            ("refused", self.refused),
            ("givenBack", self.given_back),
            ("waiting", self.waiting),
            ("inFlight", self.in_flight),
            ("slots", self.slots),
            ("busy", self.busy),
            ("p50Micros", self.p50_micros),
            ("p95Micros", self.p95_micros),
            ("p99Micros", self.p99_micros),
        ]
    }
}

/// How a group did within a second.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupPoint {
    pub(crate) depth: u32,
    pub(crate) attempts: u32,
    pub(crate) failures: u32,
    /// Thousandths of a slot, on the average of the second.
    pub(crate) busy: u32,
    pub(crate) mean_micros: u32,
    pub(crate) max_micros: u32,
}

impl GroupPoint {
    fn named(&self) -> [(&'static str, u32); 6] {
        [
            ("depth", self.depth),
            ("attempts", self.attempts),
            ("failures", self.failures),
            ("busy", self.busy),
            ("meanMicros", self.mean_micros),
            ("maxMicros", self.max_micros),
        ]
    }

    /// How much it matters.
    fn score(&self) -> f64 {
        f64::from(self.depth) + f64::from(self.busy) / 10.0
    }
}

/// A group that has many messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Deep {
    /// Where it is; nothing while all of it is still in a queue.
    pub(crate) pool: Option<Arc<str>>,
    pub(crate) group: Arc<str>,
    pub(crate) in_pool: usize,
    /// Messages that no pool has yet.
    pub(crate) in_queue: usize,
}

impl Deep {
    fn all(&self) -> usize {
        self.in_pool + self.in_queue
    }
}

/// A second.
#[derive(Debug, Default)]
pub(crate) struct Moment {
    /// When, in milliseconds since 1970.
    pub(crate) at: u64,
    pub(crate) pools: Vec<(Arc<str>, PoolPoint)>,
    /// Those that are to be told apart.
    pub(crate) groups: Vec<(GroupId, GroupPoint)>,
    /// The deepest, deepest first.
    pub(crate) deepest: Vec<Deep>,
    /// What has no past: written as it is.
    pub(crate) now: Value,
}

#[derive(Debug)]
struct PoolRow {
    code: Arc<str>,
    points: VecDeque<PoolPoint>,
}

#[derive(Debug)]
struct GroupRow {
    id: GroupId,
    /// Told from the one that had this place before.
    number: u64,
    score: f64,
    points: VecDeque<GroupPoint>,
}

#[derive(Debug, Default)]
struct Rows {
    /// The number of the last second.
    number: u64,
    times: VecDeque<u64>,
    pools: Vec<PoolRow>,
    groups: Vec<GroupRow>,
    next_group: u64,
    deepest: Vec<Deep>,
    now: Value,
}

/// The history.
#[derive(Debug)]
pub struct History {
    seconds: usize,
    subscribers_max: usize,
    rows: Mutex<Rows>,
    told: watch::Sender<Option<Bytes>>,
    readers: Mutex<Vec<Arc<Reader>>>,
    over: Arc<AtomicBool>,
}

/// Somebody who reads along.
#[derive(Debug)]
struct Reader {
    seen: Mutex<Instant>,
    /// Its place was given to another.
    sent_away: AtomicBool,
}

impl History {
    pub(crate) fn new(length: Duration, subscribers_max: usize) -> Self {
        History {
            seconds: (length.as_secs() as usize).max(1),
            subscribers_max,
            rows: Mutex::default(),
            told: watch::Sender::new(None),
            readers: Mutex::default(),
            over: Arc::default(),
        }
    }

    fn rows(&self) -> std::sync::MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The groups that have rows.
    pub(crate) fn tracked(&self) -> Vec<GroupId> {
        self.rows().groups.iter().map(|row| row.id.clone()).collect()
    }

    /// Appends a second and tells it to those who read along.
    pub(crate) fn add(&self, moment: Moment) {
        let mut rows = self.rows();
        rows.add(moment, self.seconds);
        if self.told.receiver_count() > 0 {
            let event = format!("id: {}\nevent: tick\ndata: {}\n\n", rows.number, written(&Latest(&rows)));
            self.told.send_replace(Some(event.into()));
        }
    }

    /// Everything, for a page that was just opened: JSON.
    pub(crate) fn whole(&self) -> String {
        written(&Whole(&self.rows(), self.seconds))
    }

    /// How many read along.
    pub fn subscribers(&self) -> usize {
        self.told.receiver_count()
    }

    /// Lets those who read along go: there is nothing more to come.
    pub(crate) fn end(&self) {
        self.over.store(true, Relaxed);
        self.told.send_replace(None);
    }

    /// A place among those who read along; nothing if there is none left, or nothing more to come.
    pub(crate) fn subscribe(&self) -> Option<Subscription> {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        // Those who have left are held by nobody else.
        readers.retain(|reader| Arc::strong_count(reader) > 1);
        if readers.len() >= self.subscribers_max {
            let is_stale = |reader: &Arc<Reader>| {
                reader.seen.lock().unwrap_or_else(PoisonError::into_inner).elapsed() > STALE
            };
            let stale = readers.iter().position(is_stale)?;
            readers.swap_remove(stale).sent_away.store(true, Relaxed);
        }
        let reader = Arc::new(Reader { seen: Mutex::new(Instant::now()), sent_away: AtomicBool::new(false) });
        readers.push(Arc::clone(&reader));
        let mut moments = self.told.subscribe();
        moments.mark_unchanged();
        // Looked at last: an end that comes later changes what `moments` waits for.
        if self.over.load(Relaxed) {
            return None;
        }
        Some(Subscription { moments, reader, over: Arc::clone(&self.over) })
    }
}

/// A place among those who read along. Who is slow misses seconds and gets the newest.
pub(crate) struct Subscription {
    moments: watch::Receiver<Option<Bytes>>,
    reader: Arc<Reader>,
    over: Arc<AtomicBool>,
}

impl Subscription {
    /// The next second, as an event; nothing when there will be none, or the place was given away.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        loop {
            *self.reader.seen.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            self.moments.changed().await.ok()?;
            if self.reader.sent_away.load(Relaxed) || self.over.load(Relaxed) {
                return None;
            }
            let event = self.moments.borrow_and_update().clone();
            if event.is_some() {
                return event;
            }
        }
    }
}

fn written(what: &impl serde::Serialize) -> String {
    serde_json::to_string(what).expect("numbers and text under keys that are text")
}

fn push<T>(points: &mut VecDeque<T>, point: T, most: usize) {
    if points.len() == most {
        points.pop_front();
    }
    points.push_back(point);
}

impl Rows {
    fn add(&mut self, moment: Moment, seconds: usize) {
        let Moment { at, pools, groups, deepest, now } = moment;
        self.number += 1;
        push(&mut self.times, at, seconds);
        (self.deepest, self.now) = (deepest, now);
        self.add_pools(pools, seconds);
        self.add_groups(groups, seconds);
    }

    fn add_pools(&mut self, pools: Vec<(Arc<str>, PoolPoint)>, seconds: usize) {
        // A pool that is gone keeps its past until that is too long ago to be shown, or another needs the place.
        let is_there = |code: &str| pools.iter().any(|(there, _)| **there == *code);
        self.pools.retain_mut(|row| {
            let is_there = is_there(&row.code);
            if !is_there {
                push(&mut row.points, PoolPoint::default(), seconds);
            }
            is_there || row.points.iter().any(|point| point.slots > 0)
        });
        for (code, point) in pools {
            if let Some(row) = self.pools.iter_mut().find(|row| row.code == code) {
                push(&mut row.points, point, seconds);
                continue;
            }
            if self.pools.len() > POOLS_MAX {
                let is_idle = |row: &PoolRow| row.points.iter().rev().take(10).all(|point| point.slots == 0);
                match self.pools.iter().position(is_idle) {
                    Some(place) => drop(self.pools.swap_remove(place)),
                    None => continue,
                }
            }
            self.pools.push(PoolRow { code, points: VecDeque::from([point]) });
        }
    }

    fn add_groups(&mut self, groups: Vec<(GroupId, GroupPoint)>, seconds: usize) {
        let mut left = groups;
        for row in &mut self.groups {
            let place = left.iter().position(|(id, _)| *id == row.id);
            let point = place.map(|place| left.swap_remove(place).1).unwrap_or_default();
            row.score = row.score * 0.98 + point.score();
            push(&mut row.points, point, seconds);
        }
        left.sort_by(|one, other| other.1.score().total_cmp(&one.1.score()));
        for (id, point) in left {
            let score = point.score();
            self.next_group += 1;
            let new = GroupRow { id, number: self.next_group, score, points: VecDeque::from([point]) };
            if self.groups.len() < GROUPS_MAX {
                self.groups.push(new);
                continue;
            }
            let least = self.groups.iter_mut().min_by(|one, other| one.score.total_cmp(&other.score));
            match least {
                Some(least) if least.score < score => *least = new,
                _ => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> GroupId {
        GroupId { pool: "p".into(), group: format!("g-{number}").into() }
    }

    fn moment(groups: Vec<(GroupId, GroupPoint)>) -> Moment {
        Moment { groups, pools: vec![("p".into(), PoolPoint::default())], ..Moment::default() }
    }

    #[test]
    fn memory_is_fixed_whatever_the_number_of_groups_and_pools() {
        let history = History::new(Duration::from_secs(10), 1);
        for second in 0..1_000_u64 {
            let groups = (0..48).map(|place| {
                let point = GroupPoint { depth: 1 + (place as u32), ..GroupPoint::default() };
                (id(second * 48 + place), point)
            });
            let pools = (0..100).map(|number| (format!("{second}-{number}").into(), PoolPoint::default()));
            history.add(Moment { pools: pools.collect(), ..moment(groups.collect()) });
        }
        let rows = history.rows();
        assert_eq!((rows.groups.len(), rows.times.len()), (GROUPS_MAX, 10));
        assert!(rows.pools.len() <= POOLS_MAX + 1, "{}", rows.pools.len());
        assert!(rows.groups.iter().all(|row| row.points.len() <= 10));
        assert!(rows.pools.iter().all(|row| row.points.len() <= 10));
    }

    #[test]
    fn a_group_that_matters_keeps_its_row_among_those_that_come_and_go() {
        let history = History::new(Duration::from_secs(300), 1);
        for second in 0..200_u64 {
            let mut groups: Vec<_> = (0..47)
                .map(|place| (id(second * 47 + place), GroupPoint { depth: 2, ..GroupPoint::default() }))
                .collect();
            groups.push((id(u64::MAX), GroupPoint { depth: 50, ..GroupPoint::default() }));
            history.add(moment(groups));
        }
        let rows = history.rows();
        let row = rows.groups.iter().find(|row| row.id == id(u64::MAX)).expect("it has a row");
        assert_eq!((row.number, row.points.len()), (1, 200));
    }

    #[test]
    fn a_second_and_the_whole_have_the_same_numbers_under_the_same_names() {
        let history = History::new(Duration::from_secs(2), 1);
        for second in 1..=3_u32 {
            let pool = PoolPoint { submitted: second, p99_micros: 10 * second, ..PoolPoint::default() };
            let group = GroupPoint { depth: second, max_micros: 7, ..GroupPoint::default() };
            let deep = Deep { pool: None, group: "\"<é".into(), in_pool: 1, in_queue: 2 };
            let (pools, groups) = (vec![("p".into(), pool)], vec![(id(1), group)]);
            history.add(Moment {
                at: u64::from(second),
                pools,
                groups,
                deepest: vec![deep],
                now: Value::Null,
            });
        }
        let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let (whole, latest) = (read(&history.whole()), read(&written(&Latest(&history.rows()))));
        assert_eq!((&whole["times"], &whole["seconds"]), (&serde_json::json!([2, 3]), &2.into()));
        assert_eq!(whole["pools"][0]["p99Micros"], serde_json::json!([20, 30]));
        assert_eq!(
            whole["deepest"],
            serde_json::json!([{ "pool": null, "group": "\"<é", "inPool": 1, "inQueue": 2 }])
        );
        for (list, key) in [("pools", "code"), ("groups", "number")] {
            let (all, last) = (&whole[list][0], latest[list][0].as_object().unwrap());
            assert_eq!(all.as_object().unwrap().len(), last.len());
            for (name, number) in last {
                let newest = all[name].as_array().map_or(&all[name], |column| column.last().unwrap());
                assert_eq!(newest, number, "{name}");
            }
            assert_eq!(all[key], last[key]);
        }
        assert_eq!((&latest["number"], &latest["at"]), (&3.into(), &3.into()));
        assert_eq!(latest["groups"][0]["depth"], 3);
    }

    #[test]
    fn a_pool_that_is_gone_goes_with_its_past() {
        let history = History::new(Duration::from_secs(3), 1);
        let there = PoolPoint { slots: 4, ..PoolPoint::default() };
        history.add(Moment { pools: vec![("old".into(), there)], ..Moment::default() });
        for rows in [1, 1, 0] {
            history.add(Moment::default());
            assert_eq!(history.rows().pools.len(), rows);
        }
    }

    #[test]
    fn nobody_reads_along_after_the_end() {
        let history = History::new(Duration::from_secs(3), 1);
        history.end();
        assert!(history.subscribe().is_none());
    }

    #[tokio::test]
    async fn everybody_gets_the_same_second_and_the_slow_one_the_newest() {
        let history = History::new(Duration::from_secs(10), 2);
        let (mut one, mut slow) = (history.subscribe().unwrap(), history.subscribe().unwrap());
        assert!(history.subscribe().is_none(), "no more places");
        history.add(moment(Vec::new()));
        let first = one.next().await.unwrap();
        assert!(first.starts_with(b"id: 1\nevent: tick\ndata: {") && first.ends_with(b"}\n\n"));
        history.add(moment(Vec::new()));
        let second = one.next().await.unwrap();
        assert_eq!(slow.next().await.unwrap(), second);
        drop(one);
        let mut other = history.subscribe().expect("the place is free");
        *slow.reader.seen.lock().unwrap() = Instant::now().checked_sub(STALE * 2).unwrap();
        let _third = history.subscribe().expect("who takes nothing gives way");
        history.add(moment(Vec::new()));
        assert!(slow.next().await.is_none() && other.next().await.is_some());
        drop(history);
        assert!(other.next().await.is_none(), "the end");
    }
}
