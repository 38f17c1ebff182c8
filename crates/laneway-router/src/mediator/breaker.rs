//! One breaker per target: stops calls to what does not answer, and to what has asked for patience.
//!
//! `http.rs` asks [`Breakers::admit`] before every call. It gets a [`Pass`], which it gives back with what came of the call, or is told
//! how long to wait; the message then waits in its lane, in order, and pays no attempt.
//!
//! ```text
//!              half of the window's calls failed             its time is over: the next call is the probe
//!    closed ─────────────────────────────────────► open ─────────────────────────────────────────────────► half open
//!      ▲                                            ▲                                                        │  │
//!      │                                            └──────────────── the probe failed ──────────────────────┘  │
//!      └────────────────────────────── as many probes as it takes have succeeded ───────────────────────────────┘
//! ```
//!
//! **Closed** keeps the last calls, at most so many and none older than so long, and opens when enough of them failed. **Open** lets
//! nothing through. **Half open** lets one call through at a time, whoever comes first, and tells everybody else to come back soon. A probe that
//! was abandoned (its future was dropped) or that was asked for patience proves nothing, and the next call is the probe.
//!
//! Every change of state begins a new *generation*, and a pass is good for its own: what was sent before the breaker opened and fails
//! afterwards does not keep it open, and what succeeds late does not close it.
//!
//! Beside the state stands the **cool-down**: until when the target asked to be left alone (`Retry-After`). It holds in every state, is only
//! ever prolonged, and says nothing about health.
//!
//! [`Breaker`] is the machine: time is passed in, there is no lock and no clock. [`Breakers`] is what the mediators of a process share: the
//! machines of the targets that were called lately, each under its own lock, in shards of a map. The number of targets is bounded: a new
//! one takes the place of an old one that nobody is calling, of those that have nothing to say first.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::verdict::Health;

/// When a breaker opens, and when it closes again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BreakerSettings {
    /// Opens at this share of failures, above 0 and at most 1.
    pub failure_share: f64,
    /// Not before so many calls. More than `window_calls` are never seen, so that the breaker never opens.
    pub calls_min: usize,
    /// How many calls are remembered.
    pub window_calls: usize,
    /// For how long.
    pub window_age: Duration,
    /// How long it stays open.
    pub open_for: Duration,
    /// How long those wait at least that come while a probe is on its way: as long again as it has taken, but no longer than `open_for`.
    pub probe_wait: Duration,
    /// How many probes in a row have to succeed.
    pub successes_to_close: u32,
    /// How many targets are remembered.
    pub targets_max: usize,
}

impl Default for BreakerSettings {
    /// Half of at least 10 of the last 100 calls within a minute; 5 s; three successes.
    fn default() -> Self {
        BreakerSettings {
            failure_share: 0.5,
            calls_min: 10,
            window_calls: 100,
            window_age: Duration::from_secs(60),
            open_for: Duration::from_secs(5),
            probe_wait: Duration::from_millis(250),
            successes_to_close: 3,
            targets_max: 10_000,
        }
    }
}

/// The machine of one target.
#[derive(Clone, Debug)]
pub struct Breaker {
    settings: BreakerSettings,
    state: State,
    /// Grows with every change of state.
    generation: u64,
    /// Nobody calls before this time.
    cool_until: Option<Instant>,
}

#[derive(Clone, Debug)]
enum State {
    Closed {
        window: Window,
    },
    Open {
        until: Instant,
    },
    /// `probing` is since when.
    HalfOpen {
        probing: Option<Instant>,
        successes: u32,
    },
}

/// The permission to make one call. Good for the generation in which it was given.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    generation: u64,
    probe: bool,
}

impl Ticket {
    /// Whether the call is to find out if the target is back.
    pub fn is_probe(&self) -> bool {
        self.probe
    }
}

/// Why a call may not be made now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// How long to wait before asking again.
    pub delay: Duration,
    /// For what.
    pub cause: Cause,
}

/// What a call has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The target has asked for it.
    CoolDown,
    /// Too many calls have failed.
    Open,
    /// Another call is finding out whether the target is back.
    Probe,
}

impl Breaker {
    /// A closed one.
    pub fn new(settings: BreakerSettings) -> Self {
        let state = State::Closed { window: Window::default() };
        Breaker { settings, state, generation: 0, cool_until: None }
    }

    /// Asks for permission to call.
    pub fn admit(&mut self, now: Instant) -> Result<Ticket, Patience> {
        if let Some(until) = self.cool_until {
            if now < until {
                return Err(Patience { delay: until - now, cause: Cause::CoolDown });
            }
            self.cool_until = None;
        }
        match &mut self.state {
            State::Closed { .. } => Ok(Ticket { generation: self.generation, probe: false }),
            State::Open { until } if now < *until => {
                Err(Patience { delay: *until - now, cause: Cause::Open })
            }
            State::Open { .. } => {
                self.change(State::HalfOpen { probing: Some(now), successes: 0 });
                Ok(Ticket { generation: self.generation, probe: true })
            }
            State::HalfOpen { probing: Some(since), .. } => {
                // As long again as it has taken already: a probe that hangs is not asked about by ten thousand groups four times a second.
                let taken = now.saturating_duration_since(*since);
                let delay = taken.min(self.settings.open_for).max(self.settings.probe_wait);
                Err(Patience { delay, cause: Cause::Probe })
            }
            State::HalfOpen { probing, .. } => {
                *probing = Some(now);
                Ok(Ticket { generation: self.generation, probe: true })
            }
        }
    }

    /// What came of a call. A ticket of an earlier generation changes nothing.
    pub fn record(&mut self, ticket: Ticket, health: Health, now: Instant) {
        if ticket.generation != self.generation {
            return;
        }
        match &mut self.state {
            State::Closed { window } => {
                if health == Health::Neutral {
                    return;
                }
                window.push(now, health == Health::Bad, &self.settings);
                if window.is_bad(&self.settings) {
                    self.open(now);
                }
            }
            State::Open { .. } => unreachable!("an open breaker gives no ticket"),
            State::HalfOpen { probing, successes } => {
                assert!(probing.take().is_some(), "the ticket of this generation is its probe");
                match health {
                    Health::Neutral => {}
                    Health::Bad => self.open(now),
                    Health::Good => {
                        *successes += 1;
                        if *successes >= self.settings.successes_to_close {
                            self.change(State::Closed { window: Window::default() });
                        }
                    }
                }
            }
        }
    }

    /// A call will never be reported: it was cancelled.
    pub fn abandon(&mut self, ticket: Ticket) {
        if let State::HalfOpen { probing, .. } = &mut self.state
            && ticket.generation == self.generation
        {
            *probing = None;
        }
    }

    /// The target asks to be left alone for this long.
    pub fn cool_down(&mut self, now: Instant, delay: Duration) {
        // A target that waits for ever would overflow the clock; it waits a long time instead.
        let until = now + delay.min(Duration::from_secs(u64::from(u32::MAX)));
        self.cool_until = Some(self.cool_until.map_or(until, |before| before.max(until)));
    }

    /// Closes it and ends the cool-down, by order of an operator.
    pub fn reset(&mut self) {
        self.cool_until = None;
        self.change(State::Closed { window: Window::default() });
    }

    /// What it is like now.
    pub fn status(&self, now: Instant) -> BreakerStatus {
        let left = |until: Instant| Some(until.saturating_duration_since(now)).filter(|left| !left.is_zero());
        let (state, calls, failures, open_for) = match &self.state {
            State::Closed { window } => {
                let (calls, failures) = window.counts(now, &self.settings);
                (BreakerState::Closed, calls, failures, None)
            }
            State::Open { until } => (BreakerState::Open, 0, 0, left(*until)),
            State::HalfOpen { successes, .. } => (BreakerState::HalfOpen, *successes as usize, 0, None),
        };
        BreakerStatus { state, calls, failures, open_for, cooling_for: self.cool_until.and_then(left) }
    }

    fn open(&mut self, now: Instant) {
        self.change(State::Open { until: now + self.settings.open_for });
    }

    fn change(&mut self, state: State) {
        self.state = state;
        self.generation += 1;
    }

    /// Whether forgetting it would forget something.
    fn has_something_to_say(&self, now: Instant) -> bool {
        let is_closed = matches!(self.state, State::Closed { .. });
        !is_closed || self.cool_until.is_some_and(|until| now < until)
    }
}

/// The last calls, oldest first.
#[derive(Clone, Debug, Default)]
struct Window {
    calls: VecDeque<(Instant, bool)>,
    failures: usize,
}

impl Window {
    fn push(&mut self, now: Instant, failed: bool, settings: &BreakerSettings) {
        self.calls.push_back((now, failed));
        self.failures += usize::from(failed);
        while self.calls.len() > settings.window_calls.max(1) || self.oldest_is_too_old(now, settings) {
            let oldest = self.calls.pop_front();
            self.failures -= usize::from(oldest.is_some_and(|(_, failed)| failed));
        }
    }

    fn oldest_is_too_old(&self, now: Instant, settings: &BreakerSettings) -> bool {
        self.calls.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > settings.window_age)
    }

    fn is_bad(&self, settings: &BreakerSettings) -> bool {
        let calls = self.calls.len();
        // Without a failure nothing opens, whatever the share; it also answers most calls.
        self.failures > 0
            && calls >= settings.calls_min
            && self.failures as f64 >= settings.failure_share * calls as f64
    }

    /// How many calls there are that are not too old, and how many of them failed.
    fn counts(&self, now: Instant, settings: &BreakerSettings) -> (usize, usize) {
        let young = self.calls.iter().filter(|(at, _)| {
            let age = now.saturating_duration_since(*at);
            age <= settings.window_age
        });
        young.fold((0, 0), |(calls, failures), (_, failed)| (calls + 1, failures + usize::from(*failed)))
    }
}

/// What a breaker is like at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BreakerStatus {
    /// Where it stands.
    pub state: BreakerState,
    /// Calls in the window; when half open, the probes that have succeeded.
    pub calls: usize,
    /// How many of them failed.
    pub failures: usize,
    /// How long it stays open.
    pub open_for: Option<Duration>,
    /// How long the target has asked to be left alone.
    pub cooling_for: Option<Duration>,
}

impl BreakerStatus {
    /// The share of failures among the calls, from 0 to 1.
    pub fn failure_share(&self) -> f64 {
        self.failures as f64 / self.calls.max(1) as f64
    }
}

/// The states of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BreakerState {
    /// Calls go through.
    Closed,
    /// None does.
    Open,
    /// One at a time does.
    HalfOpen,
}

/// The breakers of all targets. Shared by all pools of a process: what one has learnt about a target is true for the others.
pub struct Breakers {
    settings: BreakerSettings,
    /// How many targets a shard remembers.
    shard_max: usize,
    hasher: foldhash::fast::RandomState,
    shards: Vec<Mutex<Shard>>,
}

type Shard = HashMap<Box<str>, Arc<Entry>, foldhash::fast::RandomState>;

/// A power of two, so that finding the shard is a mask. More than there are cores, so that two rarely meet.
const SHARDS: usize = 16;

/// How many old targets are compared before one has to go. Among all would be better, and would cost a look at all for every new target.
const CANDIDATES: usize = 16;

struct Entry {
    inner: Mutex<Used>,
}

struct Used {
    breaker: Breaker,
    /// When it was last asked for permission.
    at: Instant,
}

impl Breakers {
    /// With these settings for every target.
    pub fn new(settings: BreakerSettings) -> Self {
        Breakers {
            settings,
            shard_max: settings.targets_max.div_ceil(SHARDS).max(1),
            hasher: foldhash::fast::RandomState::default(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    /// Asks for permission to call a target.
    pub fn admit(&self, target: &str, now: Instant) -> Result<Pass, Patience> {
        let entry = self.entry(target, now);
        let ticket = {
            let mut used = lock(&entry.inner);
            used.at = now;
            used.breaker.admit(now)?
        };
        Ok(Pass { entry, ticket: Some(ticket) })
    }

    /// All targets that are remembered, by name.
    pub fn list(&self, now: Instant) -> Vec<(String, BreakerStatus)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = lock(shard);
            let status = |entry: &Entry| lock(&entry.inner).breaker.status(now);
            all.extend(shard.iter().map(|(target, entry)| (target.to_string(), status(entry))));
        }
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// Closes a target's breaker and ends its cool-down. False if the target is not known.
    pub fn reset(&self, target: &str) -> bool {
        let entry = lock(self.shard(target)).get(target).cloned();
        entry.map(|entry| lock(&entry.inner).breaker.reset()).is_some()
    }

    fn shard(&self, target: &str) -> &Mutex<Shard> {
        &self.shards[self.hasher.hash_one(target) as usize & (SHARDS - 1)]
    }

    fn entry(&self, target: &str, now: Instant) -> Arc<Entry> {
        let mut shard = lock(self.shard(target));
        if let Some(entry) = shard.get(target) {
            return entry.clone();
        }
        if shard.len() >= self.shard_max {
            evict(&mut shard, now);
        }
        let used = Used { breaker: Breaker::new(self.settings), at: now };
        let entry = Arc::new(Entry { inner: Mutex::new(used) });
        shard.insert(target.into(), entry.clone());
        entry
    }
}

impl std::fmt::Debug for Breakers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Breakers").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Makes room for one more. A target with a call on its way stays, since its successor would not know of the call; so there may be as many
/// targets too many as there are calls in flight.
fn evict(shard: &mut Shard, now: Instant) {
    let unused = shard.iter().filter(|(_, entry)| Arc::strong_count(entry) == 1).take(CANDIDATES);
    let worth = |entry: &Entry| {
        let used = lock(&entry.inner);
        (used.breaker.has_something_to_say(now), used.at)
    };
    let oldest = unused.min_by_key(|(_, entry)| worth(entry)).map(|(target, _)| target.clone());
    if let Some(target) = oldest {
        shard.remove(&target);
    }
}

/// What is under these locks is consistent between any two statements, so that a panic elsewhere in their holder spoils nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The permission to call a target once. Dropped without a report it counts as a call that never was.
pub struct Pass {
    entry: Arc<Entry>,
    ticket: Option<Ticket>,
}

impl Pass {
    /// What came of the call.
    pub fn report(mut self, health: Health, cool_down: Option<Duration>, now: Instant) {
        let mut used = lock(&self.entry.inner);
        if let Some(delay) = cool_down {
            used.breaker.cool_down(now, delay);
        }
        if let Some(ticket) = self.ticket.take() {
            used.breaker.record(ticket, health, now);
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            lock(&self.entry.inner).breaker.abandon(ticket);
        }
    }
}

impl std::fmt::Debug for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pass").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn fails(breaker: &mut Breaker, times: usize, now: Instant) {
        for _ in 0..times {
            let ticket = breaker.admit(now).expect("closed");
            breaker.record(ticket, Health::Bad, now);
        }
    }

    fn open(now: Instant) -> Breaker {
        let mut breaker = Breaker::new(BreakerSettings::default());
        fails(&mut breaker, 10, now);
        assert_eq!(breaker.status(now).state, BreakerState::Open);
        breaker
    }

    #[test]
    fn opens_at_half_of_ten() {
        let now = Instant::now();
        let mut breaker = Breaker::new(BreakerSettings::default());
        fails(&mut breaker, 9, now);
        assert_eq!(breaker.status(now).state, BreakerState::Closed, "nine calls are not enough");
        let ticket = breaker.admit(now).unwrap();
        breaker.record(ticket, Health::Good, now);
        assert_eq!(breaker.status(now).state, BreakerState::Open);
        let patience = breaker.admit(now + SECOND).unwrap_err();
        assert_eq!(patience, Patience { delay: 4 * SECOND, cause: Cause::Open });
    }

    #[test]
    fn old_failures_are_forgotten() {
        let now = Instant::now();
        let mut breaker = Breaker::new(BreakerSettings::default());
        fails(&mut breaker, 9, now);
        fails(&mut breaker, 1, now + 61 * SECOND);
        let status = breaker.status(now + 61 * SECOND);
        assert_eq!((status.state, status.calls, status.failures), (BreakerState::Closed, 1, 1));
    }

    #[test]
    fn one_probe_at_a_time_until_three_have_succeeded() {
        let start = Instant::now();
        let mut breaker = open(start);
        let mut now = start + 5 * SECOND;
        for _ in 0..3 {
            let probe = breaker.admit(now).unwrap();
            assert!(probe.is_probe());
            for _ in 0..5 {
                assert_eq!(breaker.admit(now).unwrap_err().cause, Cause::Probe);
            }
            now += SECOND;
            breaker.record(probe, Health::Good, now);
        }
        assert_eq!(breaker.status(now).state, BreakerState::Closed);
        assert!(!breaker.admit(now).unwrap().is_probe());
    }

    #[test]
    fn a_probe_that_hangs_is_asked_about_ever_less() {
        let start = Instant::now();
        let mut breaker = open(start);
        let mut now = start + 5 * SECOND;
        let _probe = breaker.admit(now).unwrap();
        let mut questions = 0;
        while now < start + 65 * SECOND {
            let patience = breaker.admit(now).unwrap_err();
            assert_eq!(patience.cause, Cause::Probe);
            now += patience.delay;
            questions += 1;
        }
        assert!((10..20).contains(&questions), "{questions} questions in a minute");
    }

    #[test]
    fn a_failed_probe_opens_it_again_for_the_whole_time() {
        let start = Instant::now();
        let mut breaker = open(start);
        let probe = breaker.admit(start + 5 * SECOND).unwrap();
        breaker.record(probe, Health::Bad, start + 7 * SECOND);
        let patience = breaker.admit(start + 8 * SECOND).unwrap_err();
        assert_eq!(patience, Patience { delay: 4 * SECOND, cause: Cause::Open });
    }

    #[test]
    fn an_abandoned_probe_makes_way_for_the_next() {
        let start = Instant::now();
        let mut breaker = open(start);
        let now = start + 5 * SECOND;
        let probe = breaker.admit(now).unwrap();
        breaker.abandon(probe);
        assert!(breaker.admit(now).unwrap().is_probe());
    }

    #[test]
    fn what_was_sent_before_it_opened_decides_nothing() {
        let start = Instant::now();
        let mut breaker = Breaker::new(BreakerSettings::default());
        let late: Vec<_> = (0..4).map(|_| breaker.admit(start).unwrap()).collect();
        fails(&mut breaker, 10, start);
        let mut late = late.into_iter();
        breaker.record(late.next().unwrap(), Health::Bad, start + 3 * SECOND);
        assert_eq!(breaker.admit(start + 3 * SECOND).unwrap_err().delay, 2 * SECOND, "not prolonged");
        let probe = breaker.admit(start + 5 * SECOND).unwrap();
        for (ticket, health) in late.zip([Health::Good, Health::Bad, Health::Neutral]) {
            breaker.record(ticket, health, start + 5 * SECOND);
        }
        assert_eq!(breaker.admit(start + 5 * SECOND).unwrap_err().cause, Cause::Probe, "still the one probe");
        breaker.record(probe, Health::Good, start + 5 * SECOND);
        assert_eq!(breaker.status(start + 5 * SECOND).calls, 1, "only the probe has succeeded");
    }

    #[test]
    fn a_cool_down_stops_all_calls_and_is_never_shortened() {
        let now = Instant::now();
        let mut breaker = Breaker::new(BreakerSettings::default());
        breaker.cool_down(now, 10 * SECOND);
        breaker.cool_down(now, 2 * SECOND);
        let patience = breaker.admit(now + 4 * SECOND).unwrap_err();
        assert_eq!(patience, Patience { delay: 6 * SECOND, cause: Cause::CoolDown });
        assert!(breaker.admit(now + 10 * SECOND).is_ok());
        assert_eq!(breaker.status(now + 10 * SECOND).failures, 0, "and says nothing about health");
        breaker.cool_down(now, Duration::MAX);
        assert!(breaker.admit(now + 1_000_000 * SECOND).is_err());
    }

    #[test]
    fn an_operator_can_reset_it() {
        let now = Instant::now();
        let breakers = Breakers::new(BreakerSettings::default());
        let stale = breakers.admit("a", now).unwrap();
        for _ in 0..10 {
            breakers.admit("a", now).unwrap().report(Health::Bad, Some(SECOND), now + SECOND);
            breakers.reset("a");
        }
        assert!(breakers.admit("a", now).is_ok());
        breakers.admit("a", now).unwrap().report(Health::Neutral, Some(SECOND), now);
        assert_eq!(breakers.admit("a", now).unwrap_err().cause, Cause::CoolDown);
        assert!(breakers.admit("b", now).is_ok(), "another target is not concerned");
        assert!(breakers.reset("a") && !breakers.reset("c"));
        stale.report(Health::Bad, None, now);
        let list = breakers.list(now);
        assert_eq!(list.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(list[0].1.failures, 0, "what was sent before the reset decides nothing");
    }

    #[test]
    fn a_dropped_pass_frees_the_probe() {
        let start = Instant::now();
        let breakers = Breakers::new(BreakerSettings::default());
        for _ in 0..10 {
            breakers.admit("a", start).unwrap().report(Health::Bad, None, start);
        }
        let now = start + 5 * SECOND;
        let probe = breakers.admit("a", now).unwrap();
        assert_eq!(breakers.admit("a", now).unwrap_err().cause, Cause::Probe);
        drop(probe);
        assert!(breakers.admit("a", now).is_ok());
    }

    #[test]
    fn pitfall_004_other_breakers_are_evicted_and_bounded() {
        let start = Instant::now();
        let settings = BreakerSettings { targets_max: 160, ..BreakerSettings::default() };
        let breakers = Breakers::new(settings);
        for _ in 0..10 {
            breakers.admit("broken", start).unwrap().report(Health::Bad, None, start);
        }
        let in_flight = breakers.admit("in flight", start).unwrap();
        for number in 0..10_000 {
            let now = start + Duration::from_millis(number / 10);
            breakers.admit(&format!("target {number}"), now).unwrap().report(Health::Good, None, now);
        }
        let list = breakers.list(start + SECOND);
        assert!(list.len() <= 160, "{}", list.len());
        let has = |name: &str| list.iter().any(|(target, _)| target == name);
        assert!(has("broken"), "an open one is worth more than those that have nothing to say");
        assert!(has("in flight"), "a target with a call on its way stays");
        drop(in_flight);
    }

    #[test]
    fn pitfall_004_other_breakers_are_shared_by_all_who_call() {
        let now = Instant::now();
        let breakers = Arc::new(Breakers::new(BreakerSettings::default()));
        let callers: Vec<_> = (0..2)
            .map(|_| {
                let breakers = breakers.clone();
                std::thread::spawn(move || {
                    for _ in 0..5 {
                        breakers.admit("a", now).unwrap().report(Health::Bad, None, now);
                    }
                })
            })
            .collect();
        // The tenth failure of both together opens it, and not before.
        callers.into_iter().for_each(|caller| caller.join().unwrap());
        assert_eq!(breakers.admit("a", now).unwrap_err().cause, Cause::Open);
    }

    #[test]
    fn many_threads_are_one_probe_at_a_time() {
        use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
        let settings =
            BreakerSettings { calls_min: 1, open_for: Duration::ZERO, ..BreakerSettings::default() };
        let breakers = Breakers::new(settings);
        let start = Instant::now();
        breakers.admit("a", start).unwrap().report(Health::Bad, None, start);
        let (probing, probes) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let probe_often = || {
            while probes.load(SeqCst) < 300 {
                let Ok(pass) = breakers.admit("a", Instant::now()) else {
                    std::thread::yield_now();
                    continue;
                };
                assert_eq!(probing.fetch_add(1, SeqCst), 0, "two probes at a time");
                let number = probes.fetch_add(1, SeqCst);
                std::thread::yield_now();
                probing.fetch_sub(1, SeqCst);
                match number % 3 {
                    0 => drop(pass),
                    1 => pass.report(Health::Neutral, None, Instant::now()),
                    _ => pass.report(Health::Bad, None, Instant::now()),
                }
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(probe_often))));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Advance(u64),
        Call,
        End(usize, Health),
        Abandon(usize),
        CoolDown(u64),
        Reset,
    }

    fn step() -> impl Strategy<Value = Step> {
        let health = prop_oneof![
            3 => Just(Health::Bad),
            2 => Just(Health::Good),
            1 => Just(Health::Neutral),
        ];
        prop_oneof![
            3 => (0_u64..1_500).prop_map(Step::Advance),
            8 => Just(Step::Call),
            6 => (any::<usize>(), health).prop_map(|(which, health)| Step::End(which, health)),
            1 => any::<usize>().prop_map(Step::Abandon),
            1 => (0_u64..2_000).prop_map(Step::CoolDown),
            1 => Just(Step::Reset),
        ]
    }

    /// What the breaker should know, kept as plainly as possible: everything that was ever reported in this life of the closed state.
    #[derive(Default)]
    struct Model {
        reports: Vec<(Instant, bool)>,
    }

    impl Model {
        fn should_open(&self, now: Instant, settings: &BreakerSettings) -> bool {
            let newest = self.reports.iter().rev().take(settings.window_calls);
            let young: Vec<_> = newest.take_while(|(at, _)| now - *at <= settings.window_age).collect();
            let failures = young.iter().filter(|(_, failed)| *failed).count();
            young.len() >= settings.calls_min && failures * 2 >= young.len()
        }
    }

    proptest! {
        #[test]
        fn any_program_keeps_the_rules(steps in proptest::collection::vec(step(), 1..300)) {
            let settings = BreakerSettings {
                calls_min: 4,
                window_calls: 8,
                window_age: 6 * SECOND,
                open_for: 2 * SECOND,
                ..BreakerSettings::default()
            };
            let mut breaker = Breaker::new(settings);
            let mut model = Model::default();
            let mut now = Instant::now();
            let mut tickets: Vec<Ticket> = Vec::new();
            for step in steps {
                let before = breaker.status(now).state;
                let generation = breaker.generation;
                match step {
                    Step::Advance(millis) => now += Duration::from_millis(millis),
                    Step::Call => match breaker.admit(now) {
                        Ok(ticket) => {
                            prop_assert_eq!(ticket.probe, before != BreakerState::Closed);
                            tickets.push(ticket);
                        }
                        Err(patience) => {
                            let longest = match patience.cause {
                                Cause::CoolDown => 2 * SECOND,
                                Cause::Open => settings.open_for,
                                Cause::Probe => settings.open_for.max(settings.probe_wait),
                            };
                            prop_assert!(patience.delay <= longest && !patience.delay.is_zero());
                        }
                    },
                    Step::End(which, health) if !tickets.is_empty() => {
                        let ticket = tickets.swap_remove(which % tickets.len());
                        let counts = ticket.generation == generation && health != Health::Neutral;
                        if counts && before == BreakerState::Closed {
                            model.reports.push((now, health == Health::Bad));
                        }
                        let opens = counts && before == BreakerState::Closed && model.should_open(now, &settings);
                        let reopens = counts && before == BreakerState::HalfOpen && health == Health::Bad;
                        breaker.record(ticket, health, now);
                        let is_open = breaker.status(now).state == BreakerState::Open;
                        prop_assert_eq!(is_open, before == BreakerState::Open || opens || reopens);
                    }
                    Step::Abandon(which) if !tickets.is_empty() => {
                        breaker.abandon(tickets.swap_remove(which % tickets.len()));
                        prop_assert_eq!(breaker.status(now).state, before);
                    }
                    Step::CoolDown(millis) => breaker.cool_down(now, Duration::from_millis(millis)),
                    Step::Reset => breaker.reset(),
                    Step::End(..) | Step::Abandon(_) => {}
                }
                if breaker.generation != generation {
                    model = Model::default();
                }
                let probes = tickets.iter().filter(|ticket| ticket.probe && ticket.generation == breaker.generation);
                prop_assert!(probes.count() <= 1, "more than one probe");
            }
            // Whatever happened, a target that is well again is called again: what is out comes back, and then probes succeed.
            for ticket in tickets.drain(..) {
                breaker.abandon(ticket);
            }
            for _ in 0..100 {
                match breaker.admit(now) {
                    Ok(ticket) => breaker.record(ticket, Health::Good, now),
                    Err(patience) => now += patience.delay,
                }
            }
            prop_assert_eq!(breaker.status(now).state, BreakerState::Closed);
        }
    }
}
