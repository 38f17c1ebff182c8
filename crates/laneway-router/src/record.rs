//! What pools write down for those who look: which groups keep the slots busy, and which attempts failed. In fixed memory, whatever the number of groups.
//!
//! Every attempt of every pool ends in [`Hot::learn`]; the history (`history/`) empties it once a second. Failures are a short list that the API shows.
//!
//! # The busiest of millions
//!
//! Groups are counted by the algorithm "space-saving": there are [`PLACES`] places in each of [`SHARDS`] parts. A group that has no place takes that of the least
//! busy group and inherits its weight, so that a place is never lost by a busy group to a thousand idle ones. Weights fade by an eighth per
//! second: who was busy a minute ago is not busy now.
//!
//! Where there are more groups than places, most attempts are of groups that have none, and looking for the least busy place each time costs about a tenth of a microsecond
//! per attempt. So a place changes hands once per [`PASSED_BY`] of such attempts, at the one that fills it up: a group
//! comes to its place by how long it is busy, an attempt as long as that at once, and short ones are passed by for the price of an addition.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::trace::Spans;

/// Parts, so that slots rarely meet.
const SHARDS: usize = 8;

/// Groups per part that are told apart.
const PLACES: usize = 64;

/// For how long, in nanoseconds, groups without a place have been busy together when one of them gets one. Short enough that a group with a hundredth of the slots has its
/// place within a fraction of a second, long enough that attempts of microseconds pay for one in hundreds.
const PASSED_BY: u64 = 1_000_000;

/// Failed attempts that are remembered.
const FAILURES_MAX: usize = 256;

/// A reason is shown, not studied.
const REASON_CHARS_MAX: usize = 300;

/// Names longer than this are cut where they are kept: no queue of ours lets them in, but others might.
pub(crate) const NAME_BYTES_KEPT: usize = 1_024;

/// So much of the fingerprint of a name stands behind what is left of it: enough that no two names look alike.
const FINGERPRINT_BYTES: usize = 16;

/// What pools write down.
#[derive(Debug)]
pub struct Record {
    hot: Hot,
    failures: Failures,
    spans: Spans,
}

impl Default for Record {
    fn default() -> Self {
        Record::new()
    }
}

impl Record {
    /// An empty one that exports no spans.
    pub fn new() -> Self {
        Record::with_spans(Spans::default())
    }

    /// An empty one.
    pub fn with_spans(spans: Spans) -> Self {
        Record { hot: Hot::new(), failures: Failures::default(), spans }
    }

    pub(crate) fn hot(&self) -> &Hot {
        &self.hot
    }

    pub(crate) fn failures(&self) -> &Failures {
        &self.failures
    }

    /// The newest failed attempts of all pools, the newest first.
    pub fn newest_failures(&self, most: usize) -> Vec<FailedAttempt> {
        let list = self.failures.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().rev().take(most).cloned().collect()
    }

    /// Where spans go.
    pub fn spans(&self) -> &Spans {
        &self.spans
    }
}

/// An attempt that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedAttempt {
    /// When.
    pub at: SystemTime,
    /// In which pool.
    pub pool: Arc<str>,
    /// Of which group; empty for a message without one.
    pub group: Arc<str>,
    /// Of which message.
    pub message: Arc<str>,
    /// Which attempt, from 1.
    pub attempt: u32,
    /// In a few words.
    pub reason: Arc<str>,
}

impl FailedAttempt {
    pub(crate) fn now(pool: &Arc<str>, group: &str, message: &str, attempt: u32, reason: &str) -> Self {
        let reason: String = reason.chars().take(REASON_CHARS_MAX).collect();
        FailedAttempt {
            at: SystemTime::now(),
            pool: Arc::clone(pool),
            group: kept(group),
            message: kept(message),
            attempt,
            reason: reason.into(),
        }
    }
}

/// A name, or, of one that is longer than any that we would have let in, its beginning and its fingerprint. It is as good as the name itself wherever
/// a group is asked for (`pool/groups.rs`), so that a link need not be as long as what it leads to.
pub(crate) fn kept(name: &str) -> Arc<str> {
    if name.len() <= NAME_BYTES_KEPT {
        return name.into();
    }
    let digest = ring::digest::digest(&ring::digest::SHA256, name.as_bytes());
    let mut short = format!("{}…", crate::source::cut(name, NAME_BYTES_KEPT));
    short.extend(digest.as_ref()[..FINGERPRINT_BYTES].iter().map(|byte| format!("{byte:02x}")));
    short.into()
}

/// The newest failed attempts.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    list: Mutex<VecDeque<FailedAttempt>>,
}

impl Failures {
    pub(crate) fn add(&self, failure: FailedAttempt) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() == FAILURES_MAX {
            list.pop_front();
        }
        list.push_back(failure);
    }
}

/// What a group did within a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Second {
    /// Attempts that ended.
    pub(crate) attempts: u32,
    /// Those of them that did not deliver.
    pub(crate) failures: u32,
    /// For how long it had slots.
    pub(crate) busy_nanos: u64,
    /// How long its attempts took, together, and the longest of them.
    pub(crate) sum_nanos: u64,
    pub(crate) max_nanos: u64,
}

/// A group of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupId {
    pub(crate) pool: Arc<str>,
    pub(crate) group: Arc<str>,
}

#[derive(Debug)]
struct Place {
    id: GroupId,
    fingerprint: u64,
    weight: u64,
    second: Second,
}

/// The groups that keep slots busy.
#[derive(Debug)]
pub(crate) struct Hot {
    /// Whether anybody reads it; nobody pays for it before.
    is_read: AtomicBool,
    shards: Vec<Mutex<Places>>,
    hasher: foldhash::fast::RandomState,
    /// When the second began that is being counted, in nanoseconds since `base`.
    began: AtomicU64,
    base: Instant,
}

#[derive(Debug, Default)]
struct Places {
    by_fingerprint: HashMap<u64, usize, foldhash::fast::FixedState>,
    list: Vec<Place>,
    /// For how long groups without a place have been busy since the last of them got one.
    passed_by: u64,
}

impl Hot {
    pub(crate) fn new() -> Self {
        Hot {
            is_read: AtomicBool::new(false),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: foldhash::fast::RandomState::default(),
            began: AtomicU64::new(0),
            base: Instant::now(),
        }
    }

    /// Somebody reads it from now on.
    pub(crate) fn read(&self) {
        self.began.store(self.base.elapsed().as_nanos() as u64, Relaxed);
        self.is_read.store(true, Relaxed);
    }

    /// An attempt of a group began then and took so long. Says for how much of it the slot was busy within this second.
    pub(crate) fn learn(
        &self,
        pool: &Arc<str>,
        group: &str,
        started: Instant,
        took: Duration,
        failed: bool,
    ) -> u64 {
        if !self.is_read.load(Relaxed) {
            return 0;
        }
        let nanos = took.as_nanos() as u64;
        // What was under way when the second began was counted until then.
        let busy = nanos.min(self.within_second(started + took));
        if group.is_empty() {
            return busy;
        }
        let fingerprint = self.hasher.hash_one((&**pool, group));
        let mut places = self.lock(fingerprint);
        if let Some(place) = places.of(fingerprint, pool, group, busy) {
            let second = &mut place.second;
            second.attempts = second.attempts.saturating_add(1);
            second.failures = second.failures.saturating_add(u32::from(failed));
            second.sum_nanos += nanos;
            second.max_nanos = second.max_nanos.max(nanos);
        }
        busy
    }

    /// An attempt of a group has been under way for this long within this second.
    pub(crate) fn goes_on(&self, pool: &Arc<str>, group: &str, busy: u64) {
        let fingerprint = self.hasher.hash_one((&**pool, group));
        self.lock(fingerprint).of(fingerprint, pool, group, busy);
    }

    /// How long the second has lasted until now.
    pub(crate) fn since_began(&self) -> u64 {
        self.within_second(Instant::now())
    }

    /// How long the second had lasted then.
    fn within_second(&self, at: Instant) -> u64 {
        (at.saturating_duration_since(self.base).as_nanos() as u64).saturating_sub(self.began.load(Relaxed))
    }

    /// Ends the second: what the groups did, in no order. Weights fade.
    pub(crate) fn next_second(&self) -> Vec<(GroupId, Second)> {
        self.began.store(self.base.elapsed().as_nanos() as u64, Relaxed);
        let mut seconds = Vec::new();
        for shard in &self.shards {
            let mut places = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for place in &mut places.list {
                place.weight -= place.weight / 8;
                let second = std::mem::take(&mut place.second);
                if second != Second::default() {
                    seconds.push((place.id.clone(), second));
                }
            }
        }
        seconds
    }

    fn lock(&self, fingerprint: u64) -> std::sync::MutexGuard<'_, Places> {
        self.shards[fingerprint as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Places {
    /// Counts for how long a group was busy, and gives its place. It has none if all are taken and it is not its turn to get that of the least busy one.
    fn of(&mut self, fingerprint: u64, pool: &Arc<str>, group: &str, busy: u64) -> Option<&mut Place> {
        let place = match self.by_fingerprint.get(&fingerprint).copied() {
            Some(known) => known,
            None if self.passes_by(busy) => return None,
            None => self.make_place(fingerprint, pool, group),
        };
        let place = &mut self.list[place];
        place.weight += busy.max(1);
        place.second.busy_nanos += busy;
        Some(place)
    }

    /// Whether a group without a place goes without one this time, too.
    fn passes_by(&mut self, busy: u64) -> bool {
        if self.list.len() < PLACES {
            return false;
        }
        self.passed_by += busy.max(1);
        if self.passed_by < PASSED_BY {
            return true;
        }
        self.passed_by = 0;
        false
    }

    fn make_place(&mut self, fingerprint: u64, pool: &Arc<str>, group: &str) -> usize {
        let id = GroupId { pool: Arc::clone(pool), group: kept(group) };
        let place = if self.list.len() < PLACES {
            self.list.push(Place { id, fingerprint, weight: 0, second: Second::default() });
            self.list.len() - 1
        } else {
            let (least, _) =
                self.list.iter().enumerate().min_by_key(|(_, place)| place.weight).expect("there are places");
            let old = &mut self.list[least];
            self.by_fingerprint.remove(&old.fingerprint);
            *old = Place { id, fingerprint, weight: old.weight, second: Second::default() };
            least
        };
        self.by_fingerprint.insert(fingerprint, place);
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An attempt ends now.
    fn ended(hot: &Hot, pool: &Arc<str>, group: &str, took: Duration, failed: bool) -> u64 {
        hot.learn(pool, group, Instant::now() - took, took, failed)
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_of_quick_attempts_comes_to_its_place_among_many_that_are_idle() {
        let hot = Hot::new();
        hot.read();
        let pool: Arc<str> = "p".into();
        // A second of a quick target: two hundred thousand attempts of five microseconds, a fiftieth of them of one group, the others of ten thousand.
        for second in 0..3_u32 {
            // Nothing is busy for longer than the second has lasted.
            tokio::time::advance(Duration::from_secs(1)).await;
            for number in 0..200_000_u32 {
                let group =
                    if number % 50 == 0 { "often".to_owned() } else { format!("g-{}", number % 9_973) };
                ended(&hot, &pool, &group, Duration::from_micros(5), false);
            }
            let seconds = hot.next_second();
            assert!(seconds.len() <= SHARDS * PLACES);
            let often = seconds.iter().find(|(id, _)| &*id.group == "often").expect("it has a place");
            // At the first it may have to wait for its turn; from then on nothing is left out.
            let all = 4_000;
            assert!(often.1.attempts == all || second == 0 && often.1.attempts > all / 4, "{often:?}");
            let most = seconds.iter().max_by_key(|(_, second)| second.busy_nanos).expect("some");
            assert_eq!(&*most.0.group, "often");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_busy_groups_are_found_among_a_million_in_fixed_memory() {
        let hot = Hot::new();
        hot.read();
        tokio::time::advance(Duration::from_secs(10)).await;
        let pool: Arc<str> = "p".into();
        for number in 0..1_000_000_u32 {
            ended(&hot, &pool, &format!("g-{number}"), Duration::from_micros(10), false);
            if number % 1_000 == 0 {
                for busy in 0..20 {
                    ended(&hot, &pool, &format!("busy-{busy}"), Duration::from_millis(5), busy == 3);
                }
            }
        }
        let kept: usize = hot.shards.iter().map(|shard| shard.lock().unwrap().list.len()).sum();
        assert!(kept <= SHARDS * PLACES);
        let seconds: HashMap<_, _> =
            hot.next_second().into_iter().map(|(id, second)| (id.group.to_string(), second)).collect();
        for busy in 0..20 {
            let second = seconds[&format!("busy-{busy}")];
            // A group keeps its place from its first second on, so that nothing of it is lost.
            assert_eq!(second.attempts, 1_000);
            assert_eq!(second.failures, if busy == 3 { 1_000 } else { 0 });
            assert_eq!(second.max_nanos, 5_000_000);
            assert_eq!(second.sum_nanos, 5_000_000_000);
        }
        assert!(hot.next_second().is_empty(), "a second is given once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_attempt_is_busy_in_each_second_that_it_takes_and_not_more() {
        let hot = Hot::new();
        hot.read();
        let pool: Arc<str> = "p".into();
        let mut busy = 0;
        for _ in 0..3 {
            tokio::time::advance(Duration::from_secs(1)).await;
            let until_now = hot.since_began();
            hot.goes_on(&pool, "g", until_now);
            busy += until_now;
            assert_eq!(hot.next_second()[0].1.busy_nanos, 1_000_000_000);
        }
        tokio::time::advance(Duration::from_millis(500)).await;
        busy += ended(&hot, &pool, "g", Duration::from_millis(3_500), false);
        assert_eq!(busy, 3_500_000_000);
        let (_, second) = hot.next_second()[0].clone();
        assert_eq!((second.busy_nanos, second.max_nanos), (500_000_000, 3_500_000_000));
    }

    #[test]
    fn the_newest_failures_are_kept_and_their_texts_are_bounded() {
        let record = Record::new();
        let long = "ü".repeat(20_000);
        for number in 0..1_000 {
            let failure = FailedAttempt::now(&"p".into(), &long, &number.to_string(), 1, &long);
            record.failures().add(failure);
        }
        let newest = record.newest_failures(1_000);
        assert_eq!((newest.len(), &*newest[0].message, &*newest[255].message), (256, "999", "744"));
        let short_bytes_max = NAME_BYTES_KEPT + "…".len() + 2 * FINGERPRINT_BYTES;
        assert!(newest[0].group.len() <= short_bytes_max && newest[0].reason.chars().count() == 300);
        assert_ne!(kept(&long), kept(&format!("{long}ü")), "names that begin alike are told apart");
        assert_eq!(&*kept("as it is"), "as it is");
    }
}
