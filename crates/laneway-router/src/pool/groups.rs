//! What a pool knows of its groups beyond their lanes: how many messages each has here, how fast it works them off, and when its next may start.
//!
//! An entry lives while the group has messages in the pool, and a little longer where its rate has to be remembered: then it is swept out
//! with the next ones. So the memory follows the messages that are here, not the groups that were ever seen.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::{GroupKey, PoolSettings};
use crate::message::Message;
use crate::parks::Parked;
use crate::record::{FailedAttempt, NAME_BYTES_KEPT, kept};

/// Few enough to sweep through, many enough that slots rarely meet.
const SHARDS: usize = 16;

/// A new group may have this many messages before anything is known about it.
const UNKNOWN: usize = 16;

/// How many failed attempts of a group are remembered, the newest.
const FAILURES_KEPT: usize = 5;

/// So many groups of a pool are remembered as parked. Those beyond stop as well, but count as others do, and a restart forgets them.
const PARKED_MAX: usize = 100_000;

/// No next start is further away: a clock cannot tell every time, and nobody waits for it.
const FAR: Duration = Duration::from_secs(365 * 24 * 3_600);

/// A group that is parked.
#[derive(Clone, Debug)]
pub(super) struct Stop {
    pub(super) parked: Parked,
    /// An attempt was told to park the lane; it may not have done so yet.
    pub(super) by_attempt: bool,
    /// The pool whose message it was parked for, where this one only stands in.
    pub(super) foreign: Option<Arc<str>>,
}

impl Stop {
    /// At somebody's word, or because it was so before.
    pub(super) fn new(parked: Parked) -> Self {
        Stop { parked, by_attempt: false, foreign: None }
    }
}

/// What became of parking a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parking {
    New,
    WasParked,
    TooMany,
}

/// An attempt that is under way.
#[derive(Clone, Debug)]
pub struct InFlight {
    /// What orders its message.
    pub key: GroupKey,
    /// Which message it is.
    pub message: Arc<Message>,
    /// Which attempt at it, from 1.
    pub attempt: u32,
    /// Since when.
    pub since: Instant,
    /// The number of the slot.
    pub slot: usize,
}

/// What a pool knows of a group, for those who ask.
#[derive(Clone, Debug, Default)]
pub struct GroupNotes {
    /// The attempt that is under way.
    pub running: Option<InFlight>,
    /// How long an attempt takes on the average; nothing before the first has ended.
    pub average: Option<Duration>,
    /// The last attempts that failed, the newest last. Forgotten when the group has no messages here.
    pub failures: Vec<FailedAttempt>,
}

/// One group in a pool.
#[derive(Debug, Default)]
struct Group {
    /// Messages in the pool.
    depth: usize,
    /// Average time of an attempt; none yet.
    average: Option<Duration>,
    /// When the next attempt may start.
    next_at: Option<Instant>,
    /// The last attempts that failed; most groups never have any.
    failures: VecDeque<FailedAttempt>,
    /// The group is on its way back to its sources, so many times over: nothing more of it is taken in.
    bars: usize,
}

#[derive(Clone, Debug)]
struct Running {
    message: Arc<Message>,
    attempt: u32,
    since: Instant,
    slot: usize,
}

impl Running {
    fn view(&self, key: &GroupKey) -> InFlight {
        let Running { message, attempt, since, slot } = self.clone();
        InFlight { key: key.clone(), message, attempt, since, slot }
    }
}

#[derive(Debug, Default)]
struct Shard {
    groups: HashMap<GroupKey, Group, foldhash::fast::FixedState>,
    /// The attempts that are under way: as many as slots are busy, however many groups there are.
    running: HashMap<GroupKey, Running, foldhash::fast::FixedState>,
    /// Groups whose names are too long to be shown or linked to, by their short names.
    long: HashMap<Arc<str>, GroupKey>,
    /// Groups that are parked, whether they have messages here or not.
    parked: HashMap<GroupKey, Stop>,
    /// How many groups have messages here.
    active: usize,
    /// How many entries there were after the last sweep.
    swept: usize,
}

/// The groups of a pool.
#[derive(Debug)]
pub(super) struct Groups {
    shards: Vec<Mutex<Shard>>,
    hasher: foldhash::fast::RandomState,
    /// Groups that are parked: most pools have none, and then nobody looks for one.
    parked: AtomicUsize,
    /// Messages of those groups that are here. Written under the lock of the group's part.
    parked_messages: AtomicUsize,
}

impl Groups {
    pub(super) fn new() -> Self {
        Groups {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: foldhash::fast::RandomState::default(),
            parked: AtomicUsize::new(0),
            parked_messages: AtomicUsize::new(0),
        }
    }

    fn shard(&self, key: &GroupKey) -> MutexGuard<'_, Shard> {
        let place = self.hasher.hash_one(key) as usize % SHARDS;
        self.shards[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more message, if the group may have it.
    pub(super) fn enter(&self, key: &GroupKey, settings: &PoolSettings) -> bool {
        let shard = &mut *self.shard(key);
        shard.sweep();
        let is_parked = shard.parked.contains_key(key);
        let has_room = !is_parked || self.parked_messages() < settings.capacity;
        let group = shard.entry(key);
        let fits = has_room && group.bars == 0 && group.depth < group.capacity(settings);
        let is_first = fits && group.depth == 0;
        group.depth += usize::from(fits);
        shard.active += usize::from(is_first);
        self.parked_messages.fetch_add(usize::from(fits && is_parked), SeqCst);
        fits
    }

    /// Remembers that a group is parked.
    pub(super) fn park(&self, key: &GroupKey, stop: Stop) -> Parking {
        let shard = &mut *self.shard(key);
        if let Some(before) = shard.parked.get_mut(key) {
            before.by_attempt |= stop.by_attempt;
            return Parking::WasParked;
        }
        if self.parked.load(SeqCst) >= PARKED_MAX {
            return Parking::TooMany;
        }
        shard.parked.insert(key.clone(), stop);
        let depth = shard.groups.get(key).map_or(0, |group| group.depth);
        self.parked.fetch_add(1, SeqCst);
        self.parked_messages.fetch_add(depth, SeqCst);
        Parking::New
    }

    /// Forgets that a group was parked.
    pub(super) fn unpark(&self, key: &GroupKey) -> Option<Stop> {
        let shard = &mut *self.shard(key);
        let stop = shard.parked.remove(key)?;
        let depth = shard.groups.get(key).map_or(0, |group| group.depth);
        self.parked.fetch_sub(1, SeqCst);
        self.parked_messages.fetch_sub(depth, SeqCst);
        Some(stop)
    }

    /// Whether a group is parked, and why.
    pub(super) fn parked(&self, key: &GroupKey) -> Option<Parked> {
        if self.parked_groups() == 0 {
            return None;
        }
        self.shard(key).parked.get(key).map(|stop| stop.parked.clone())
    }

    /// The same, for an attempt that will park the lane if so.
    pub(super) fn stops(&self, key: &GroupKey) -> Option<Parked> {
        if self.parked_groups() == 0 {
            return None;
        }
        let mut shard = self.shard(key);
        let stop = shard.parked.get_mut(key)?;
        stop.by_attempt = true;
        Some(stop.parked.clone())
    }

    /// Groups that are parked, in no order; so many at most.
    pub(super) fn all_parked(&self, most: usize) -> Vec<(GroupKey, Parked)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let left = most.saturating_sub(all.len());
            let some = shard.parked.iter().take(left);
            all.extend(some.map(|(key, stop)| (key.clone(), stop.parked.clone())));
        }
        all
    }

    /// Groups that are parked for messages of another pool.
    pub(super) fn parked_for(&self, code: &str) -> Vec<GroupKey> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let foreign = shard.parked.iter().filter(|(_, stop)| stop.foreign.as_deref() == Some(code));
            all.extend(foreign.map(|(key, _)| key.clone()));
        }
        all
    }

    /// How many groups are parked.
    pub(super) fn parked_groups(&self) -> usize {
        self.parked.load(SeqCst)
    }

    /// How many messages they have here.
    pub(super) fn parked_messages(&self) -> usize {
        self.parked_messages.load(SeqCst)
    }

    /// Whether an attempt of a group is under way.
    pub(super) fn is_running(&self, key: &GroupKey) -> bool {
        self.shard(key).running.contains_key(key)
    }

    /// The key of a group by its name, or by the short one that is shown where that is too long.
    pub(super) fn key(&self, name: &str) -> GroupKey {
        let key = GroupKey::Named(name.into());
        if name.len() <= NAME_BYTES_KEPT || self.shard(&key).groups.contains_key(&key) {
            return key;
        }
        let shards = self.shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner));
        let found = |shard: MutexGuard<'_, Shard>| {
            let long = |key: &&GroupKey| key.name().len() > NAME_BYTES_KEPT;
            let parked = || shard.parked.keys().filter(long).find(|key| *kept(key.name()) == *name);
            shard.long.get(name).or_else(parked).cloned()
        };
        shards.map(found).find_map(|found| found).unwrap_or(key)
    }

    /// Takes nothing more of a group in, until told otherwise.
    pub(super) fn bar(&self, key: &GroupKey) {
        self.shard(key).entry(key).bars += 1;
    }

    /// The same, unless it is on its way back already.
    pub(super) fn bar_first(&self, key: &GroupKey) -> bool {
        let mut shard = self.shard(key);
        let group = shard.entry(key);
        let is_first = group.bars == 0;
        group.bars += usize::from(is_first);
        is_first
    }

    /// Takes the group in again, unless it is on its way back once more.
    pub(super) fn unbar(&self, key: &GroupKey) {
        let mut shard = self.shard(key);
        if let Some(group) = shard.groups.get_mut(key) {
            group.bars -= 1;
            if !group.is_needed() {
                shard.remove(key);
            }
        }
    }

    /// One message has left.
    pub(super) fn leave(&self, key: &GroupKey) {
        let shard = &mut *self.shard(key);
        let Some(group) = shard.groups.get_mut(key) else { return };
        shard.active -= usize::from(group.depth == 1);
        let is_parked = shard.parked.contains_key(key) && group.depth > 0;
        self.parked_messages.fetch_sub(usize::from(is_parked), SeqCst);
        group.depth = group.depth.saturating_sub(1);
        if group.depth == 0 {
            // Left behind by an attempt that was dropped half way.
            shard.running.remove(key);
        }
        if !group.is_needed() {
            shard.remove(key);
        }
    }

    /// How long the next attempt of a group has to wait for its rate; if not at all, it takes its place.
    pub(super) fn pace(&self, key: &GroupKey, settings: &PoolSettings) -> Option<Duration> {
        let per_second = settings.group_rate_per_second?;
        // Whatever the settings let through: a panic here would be one before the attempt, which nobody catches.
        let interval =
            Duration::try_from_secs_f64(1.0 / per_second).map_or(FAR, |interval| interval.min(FAR));
        let now = Instant::now();
        let mut shard = self.shard(key);
        let group = shard.entry(key);
        match group.next_at {
            Some(at) if at > now => Some(at - now),
            _ => {
                group.next_at = Some(now + interval);
                None
            }
        }
    }

    /// The target was not called after all: the group's place in its rate is free again.
    pub(super) fn unpace(&self, key: &GroupKey) {
        if let Some(group) = self.shard(key).groups.get_mut(key) {
            group.next_at = None;
        }
    }

    /// An attempt begins.
    pub(super) fn begin(
        &self,
        key: &GroupKey,
        message: Arc<Message>,
        attempt: u32,
        since: Instant,
        slot: usize,
    ) {
        self.shard(key).running.insert(key.clone(), Running { message, attempt, since, slot });
    }

    /// How many attempts are under way.
    pub(super) fn running(&self) -> usize {
        let running =
            |shard: &Mutex<Shard>| shard.lock().unwrap_or_else(PoisonError::into_inner).running.len();
        self.shards.iter().map(running).sum()
    }

    /// The attempts that began first, oldest first.
    pub(super) fn in_flight(&self, most: usize) -> Vec<InFlight> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            all.extend(shard.running.iter().map(|(key, running)| running.view(key)));
        }
        all.sort_by_key(|one| one.since);
        all.truncate(most);
        all
    }

    /// Shows the attempts that are under way, and since when.
    pub(super) fn each_in_flight(&self, mut visit: impl FnMut(&GroupKey, Instant)) {
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.running.iter().for_each(|(key, running)| visit(key, running.since));
        }
    }

    /// An attempt has ended and took so long.
    pub(super) fn learn(&self, key: &GroupKey, took: Duration) {
        let shard = &mut *self.shard(key);
        shard.running.remove(key);
        if let Some(group) = shard.groups.get_mut(key) {
            group.average = Some(group.average.map_or(took, |average| (average * 7 + took) / 8));
        }
    }

    /// An attempt has failed.
    pub(super) fn fail(&self, key: &GroupKey, failure: FailedAttempt) {
        if let Some(group) = self.shard(key).groups.get_mut(key) {
            if group.failures.len() == FAILURES_KEPT {
                group.failures.pop_front();
            }
            group.failures.push_back(failure);
        }
    }

    /// What is known of a group.
    pub(super) fn notes(&self, key: &GroupKey) -> GroupNotes {
        let shard = self.shard(key);
        let Some(group) = shard.groups.get(key) else { return GroupNotes::default() };
        GroupNotes {
            running: shard.running.get(key).map(|running| running.view(key)),
            average: group.average,
            failures: group.failures.iter().cloned().collect(),
        }
    }

    /// How many messages a group has here.
    pub(super) fn depth(&self, key: &GroupKey) -> usize {
        self.shard(key).groups.get(key).map_or(0, |group| group.depth)
    }

    /// Groups whose names contain a text, and their depths; so many at most.
    pub(super) fn find(&self, part: &str, most: usize) -> Vec<(GroupKey, usize)> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let left = most.saturating_sub(found.len());
            let named =
                shard.groups.iter().filter(|(key, group)| group.depth > 0 && key.name().contains(part));
            found.extend(named.take(left).map(|(key, group)| (key.clone(), group.depth)));
        }
        found
    }

    /// Shows the groups of one part after the other, from one part on, until `budget` of them were seen: key and depth. Says
    /// where to go on, which is where it began if it has seen all. So a look costs the same for a thousand groups and for a million, and no part is held for long.
    pub(super) fn survey(
        &self,
        from: usize,
        budget: usize,
        mut visit: impl FnMut(&GroupKey, usize),
    ) -> usize {
        let mut seen = 0;
        for step in 0..SHARDS {
            let shard = self.shards[(from + step) % SHARDS].lock().unwrap_or_else(PoisonError::into_inner);
            if seen > 0 && seen + shard.groups.len() > budget {
                return (from + step) % SHARDS;
            }
            seen += shard.groups.len();
            shard.groups.iter().for_each(|(key, group)| visit(key, group.depth));
        }
        from
    }

    /// How many groups have messages here.
    pub(super) fn count(&self) -> usize {
        let active = |shard: &Mutex<Shard>| shard.lock().unwrap_or_else(PoisonError::into_inner).active;
        self.shards.iter().map(active).sum()
    }
}

impl Group {
    /// Whether anything about it has to be remembered.
    fn is_needed(&self) -> bool {
        self.depth > 0 || self.bars > 0 || self.next_at.is_some_and(|at| at > Instant::now())
    }

    /// How many messages it may have: all that is allowed, or what it works off in the time it is given.
    fn capacity(&self, settings: &PoolSettings) -> usize {
        let Some(latency) = settings.group_latency else { return settings.group_capacity };
        let earned = match self.average {
            None => UNKNOWN,
            Some(average) => (latency.as_nanos() / average.as_nanos().max(1)).min(1 << 32) as usize,
        };
        earned.clamp(1, settings.group_capacity)
    }
}

impl Shard {
    fn entry(&mut self, key: &GroupKey) -> &mut Group {
        if key.name().len() > NAME_BYTES_KEPT && !self.groups.contains_key(key) {
            self.long.insert(kept(key.name()), key.clone());
        }
        self.groups.entry(key.clone()).or_default()
    }

    fn remove(&mut self, key: &GroupKey) {
        self.groups.remove(key);
        if key.name().len() > NAME_BYTES_KEPT {
            self.long.remove(&kept(key.name()));
        }
    }

    /// Removes what is kept for its rate only and is not needed any more, whenever there are twice as many entries as after the last time.
    fn sweep(&mut self) {
        if self.groups.len() > 2 * self.swept + 64 {
            self.groups.retain(|_, group| group.is_needed());
            self.long.retain(|_, key| self.groups.contains_key(key));
            self.swept = self.groups.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> GroupKey {
        GroupKey::Named(name.into())
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_has_its_capacity_and_no_more() {
        let groups = Groups::new();
        let settings = PoolSettings { group_capacity: 2, ..PoolSettings::default() };
        assert_eq!([0; 3].map(|_| groups.enter(&key("a"), &settings)), [true, true, false]);
        assert!(groups.enter(&key("b"), &settings));
        groups.leave(&key("a"));
        assert!(groups.enter(&key("a"), &settings));
        assert_eq!(groups.count(), 2);
        [key("a"), key("a"), key("b")].iter().for_each(|key| groups.leave(key));
        assert_eq!(groups.count(), 0);
        assert!(
            groups.shards.iter().all(|shard| {
                let shard = shard.lock().unwrap();
                shard.groups.is_empty() && shard.running.is_empty() && shard.active == 0
            }),
            "no trace is left"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn messages_of_parked_groups_are_counted_whenever_a_group_stops_and_goes_on() {
        let groups = Groups::new();
        let settings = PoolSettings { capacity: 3, ..PoolSettings::default() };
        let enter = |name: &str| groups.enter(&key(name), &settings);
        assert!(enter("a") && enter("a") && enter("b"));
        assert_eq!(groups.park(&key("a"), Stop::new(Parked::now("no"))), Parking::New);
        assert_eq!(
            groups.park(&key("a"), Stop { by_attempt: true, ..Stop::new(Parked::now("again")) }),
            Parking::WasParked
        );
        assert_eq!((groups.parked_groups(), groups.parked_messages()), (1, 2));
        // As many as the pool holds, and no more.
        assert!(enter("a") && !enter("a") && enter("b"));
        groups.leave(&key("a"));
        groups.leave(&key("b"));
        assert_eq!(groups.parked_messages(), 2);
        assert_eq!(groups.parked(&key("a")).map(|parked| parked.why), Some("no".into()));
        assert!(groups.unpark(&key("a")).is_some_and(|stop| stop.by_attempt));
        assert!(groups.unpark(&key("a")).is_none());
        assert_eq!((groups.parked_groups(), groups.parked_messages()), (0, 0));
        // One that has no message stays parked, and what comes counts.
        assert_eq!(groups.park(&key("c"), Stop::new(Parked::now("no"))), Parking::New);
        assert!(enter("c"));
        assert_eq!(groups.parked_messages(), 1);
        groups.leave(&key("c"));
        assert_eq!((groups.parked_groups(), groups.parked_messages()), (1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_name_is_found_by_its_short_one_while_it_is_here() {
        let (groups, settings) = (Groups::new(), PoolSettings::default());
        let long = "ü".repeat(5_000);
        let short = kept(&long);
        assert!(groups.enter(&key(&long), &settings) && groups.enter(&key("a"), &settings));
        assert_eq!(groups.key(&short), key(&long));
        assert_eq!((groups.key(&long), groups.key("a"), groups.key("b")), (key(&long), key("a"), key("b")));
        // One that is named as the short name of another is itself.
        assert!(groups.enter(&key(&short), &settings));
        assert_eq!(groups.key(&short), key(&short));
        [key(&long), key(&short), key("a")].iter().for_each(|key| groups.leave(key));
        assert!(groups.shards.iter().all(|shard| shard.lock().unwrap().long.is_empty()), "no trace is left");
    }

    /// Settings are checked before; this is for who makes a pool by hand.
    #[tokio::test(start_paused = true)]
    async fn a_rate_that_is_next_to_nothing_waits_as_long_as_there_is() {
        let groups = Groups::new();
        for rate in [1e-6, 1e-20, f64::MIN_POSITIVE] {
            let settings = PoolSettings { group_rate_per_second: Some(rate), ..PoolSettings::default() };
            assert!(groups.enter(&key(&rate.to_string()), &settings));
            assert_eq!(groups.pace(&key(&rate.to_string()), &settings), None);
            let wait = groups.pace(&key(&rate.to_string()), &settings).expect("the second has to wait");
            assert!(wait > Duration::from_secs(999_999), "{rate}: {wait:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_group_gets_less_than_a_quick_one() {
        let groups = Groups::new();
        let settings = PoolSettings {
            group_capacity: 100,
            group_latency: Some(Duration::from_secs(10)),
            ..PoolSettings::default()
        };
        let fit = |name| (0..200).take_while(|_| groups.enter(&key(name), &settings)).count();
        assert_eq!(fit("unknown"), UNKNOWN);
        for (name, millis, expected) in [("quick", 10, 100), ("slow", 2_000, 5), ("endless", 60_000, 1)] {
            assert!(groups.enter(&key(name), &settings));
            groups.learn(&key(name), Duration::from_millis(millis));
            assert_eq!(1 + fit(name), expected, "{name}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_is_kept_without_bursts_and_forgotten_when_it_does_not_matter_any_more() {
        let groups = Groups::new();
        let settings = PoolSettings { group_rate_per_second: Some(10.0), ..PoolSettings::default() };
        let mut starts = Vec::new();
        let begin = Instant::now();
        for _ in 0..3 {
            assert!(groups.enter(&key("a"), &settings));
            while let Some(wait) = groups.pace(&key("a"), &settings) {
                tokio::time::advance(wait).await;
            }
            starts.push((Instant::now() - begin).as_millis());
            groups.leave(&key("a"));
        }
        assert_eq!(starts, [0, 100, 200]);
        tokio::time::advance(Duration::from_secs(1)).await;
        for other in 0..2_000 {
            assert!(groups.enter(&key(&other.to_string()), &settings));
        }
        let kept = groups.shards.iter().any(|shard| shard.lock().unwrap().groups.contains_key(&key("a")));
        assert!(!kept);
    }
}
