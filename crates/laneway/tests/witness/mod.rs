//! What the tests of this folder share: a witness to the order of messages, a gate that holds handlers, and a log that can be waited for.
//!
//! "Strictly increasing" is not enough to test an order: it passes with gaps, so a lost message goes unseen (pitfall 003.10). The
//! [`Witness`] knows for each key which number comes next and whether somebody is at it, and reports a gap, a message that comes late
//! or twice, and two messages of one key at once. It records instead of panicking, because the engine would catch the panic; [`Witness::verify`]
//! is where a test fails. `ordering.rs` shows that it can.
//!
//! Nothing here sleeps to let something happen. Every wait ends by an event, or fails at [`DEADLINE`].

#![allow(dead_code, reason = "no test file uses all of it")]

use std::{
    collections::HashMap,
    fmt::Debug,
    hash::Hash,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use laneway::{Admission, Handle, Message};

/// No test waits longer than this for anything that must happen. Generous, because the machine may be busy with others.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// Long enough to see that something does not happen, as far as that can be seen. Only ever the limit of a wait that must run out.
pub(crate) const A_MOMENT: Duration = Duration::from_millis(50);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enough that workers rarely meet.
const SHARDS: usize = 64;

/// A test that fails a million times need not say it a million times.
const REPORTS: usize = 20;

/// What is known about one key.
#[derive(Clone, Copy, Default)]
struct Record {
    next: u64,
    busy: bool,
    done: u64,
    attempts: u64,
}

/// Watches handlers: per key, messages are numbered from zero.
pub(crate) struct Witness<K = u64> {
    shards: Vec<Mutex<HashMap<K, Record>>>,
    hasher: std::hash::RandomState,
    violations: Mutex<Vec<String>>,
}

impl<K: Hash + Eq + Clone + Debug> Witness<K> {
    pub(crate) fn new() -> Arc<Self> {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Arc::new(Witness { shards, hasher: std::hash::RandomState::new(), violations: Mutex::default() })
    }

    fn shard(&self, key: &K) -> MutexGuard<'_, HashMap<K, Record>> {
        use std::hash::BuildHasher;
        lock(&self.shards[self.hasher.hash_one(key) as usize % SHARDS])
    }

    /// A handler begins with message `number` of `key`. The guard that comes back is to be told when it is done; dropped without
    /// that, the attempt has failed, and the same number has to come again.
    pub(crate) fn enter(&self, key: &K, number: u64) -> Attempt<'_, K> {
        let mut shard = self.shard(key);
        let record = shard.entry(key.clone()).or_default();
        let Record { next, busy, .. } = *record;
        record.busy = true;
        record.attempts += 1;
        drop(shard);
        if busy {
            self.report(format!("overlap: {number} of {key:?} began while another one of it was in flight"));
        }
        if number > next {
            self.report(format!("gap: {number} of {key:?} began when {next} was due"));
        } else if number < next {
            self.report(format!("late or twice: {number} of {key:?} began when {next} was due"));
        }
        Attempt { witness: self, key: key.clone(), number, done: false }
    }

    /// The whole life of a message whose handling takes no time.
    pub(crate) fn see(&self, key: &K, number: u64) {
        self.enter(key, number).done();
    }

    /// Message `number` will never be handled, and that is right: it was skipped or dropped. The next one may come.
    pub(crate) fn excuse(&self, key: &K, number: u64) {
        let mut shard = self.shard(key);
        let record = shard.entry(key.clone()).or_default();
        if record.next != number {
            let next = record.next;
            drop(shard);
            return self.report(format!("excused: {number} of {key:?} when {next} was due"));
        }
        record.next += 1;
    }

    fn report(&self, violation: String) {
        let mut violations = lock(&self.violations);
        if violations.len() < REPORTS {
            violations.push(violation);
        }
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        lock(&self.violations).clone()
    }

    /// How many messages of a key are done.
    pub(crate) fn done(&self, key: &K) -> u64 {
        self.shard(key).get(key).map_or(0, |record| record.done)
    }

    /// How often messages of a key were tried.
    pub(crate) fn attempts(&self, key: &K) -> u64 {
        self.shard(key).get(key).map_or(0, |record| record.attempts)
    }

    /// How many messages are done in all.
    pub(crate) fn total(&self) -> u64 {
        self.shards
            .iter()
            .flat_map(|shard| lock(shard).values().map(|record| record.done).collect::<Vec<_>>())
            .sum()
    }

    /// Fails unless every one of these keys has had exactly so many messages, no other key has had any, nobody is still at one, and nothing
    /// was ever out of order.
    #[track_caller]
    pub(crate) fn verify(&self, expected: impl IntoIterator<Item = (K, u64)>) {
        let violations = self.violations();
        assert!(violations.is_empty(), "{}", violations.join("\n"));
        let expected: HashMap<K, u64> = expected.into_iter().filter(|(_, count)| *count > 0).collect();
        for (key, count) in &expected {
            let done = self.done(key);
            assert_eq!(done, *count, "{key:?} has {done} messages done, not {count}");
        }
        for shard in &self.shards {
            for (key, record) in lock(shard).iter() {
                assert!(!record.busy, "somebody is still at a message of {key:?}");
                assert!(record.done == 0 || expected.contains_key(key), "nobody sent anything to {key:?}");
            }
        }
    }
}

/// One call of a handler.
pub(crate) struct Attempt<'a, K: Hash + Eq + Clone + Debug> {
    witness: &'a Witness<K>,
    key: K,
    number: u64,
    done: bool,
}

impl<K: Hash + Eq + Clone + Debug> Attempt<'_, K> {
    pub(crate) fn done(mut self) {
        self.done = true;
    }
}

impl<K: Hash + Eq + Clone + Debug> Drop for Attempt<'_, K> {
    fn drop(&mut self) {
        let mut shard = self.witness.shard(&self.key);
        let record = shard.entry(self.key.clone()).or_default();
        record.busy = false;
        if self.done {
            record.next = record.next.max(self.number + 1);
            record.done += 1;
        }
    }
}

/// A door that handlers wait at, and that a test opens.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// How many may still pass; all of them once it is open.
    tickets: u64,
    open: bool,
    arrived: u64,
}

impl Gate {
    pub(crate) fn closed() -> Arc<Self> {
        Arc::new(Gate::default())
    }

    /// Waits until it is open, or one more may pass. Panics at the deadline, which a test sees as a message that failed.
    pub(crate) fn pass(&self) {
        let mut state = lock(&self.state);
        state.arrived += 1;
        self.changed.notify_all();
        let shut = |state: &mut GateState| !state.open && state.tickets == 0;
        let (mut state, timeout) =
            self.changed.wait_timeout_while(state, DEADLINE, shut).unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            drop(state);
            panic!("nobody opened the gate");
        }
        state.tickets = state.tickets.saturating_sub(1);
    }

    /// Lets everybody pass, now and later.
    pub(crate) fn open(&self) {
        lock(&self.state).open = true;
        self.changed.notify_all();
    }

    /// Lets so many pass.
    pub(crate) fn admit(&self, handlers: u64) {
        lock(&self.state).tickets += handlers;
        self.changed.notify_all();
    }

    /// How many have come so far, whether they passed or not.
    pub(crate) fn arrived(&self) -> u64 {
        lock(&self.state).arrived
    }

    /// Waits until so many have come.
    #[track_caller]
    pub(crate) fn wait_arrived(&self, handlers: u64) {
        let state = lock(&self.state);
        let fewer = |state: &mut GateState| state.arrived < handlers;
        let (state, timeout) =
            self.changed.wait_timeout_while(state, DEADLINE, fewer).unwrap_or_else(PoisonError::into_inner);
        let arrived = state.arrived;
        drop(state);
        assert!(!timeout.timed_out(), "only {arrived} of {handlers} came to the gate");
    }
}

/// Opens its gate when a test ends, also by a panic, so that no worker is left at it.
pub(crate) struct OpensAtLast(pub(crate) Arc<Gate>);

impl Drop for OpensAtLast {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// What happened, in order, and a way to wait for it.
pub(crate) struct Log<T> {
    entries: Mutex<Vec<T>>,
    changed: Condvar,
}

impl<T: Clone + Debug> Log<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Log { entries: Mutex::default(), changed: Condvar::new() })
    }

    pub(crate) fn push(&self, entry: T) {
        lock(&self.entries).push(entry);
        self.changed.notify_all();
    }

    pub(crate) fn entries(&self) -> Vec<T> {
        lock(&self.entries).clone()
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.entries).len()
    }

    /// Waits until there are so many entries.
    #[track_caller]
    pub(crate) fn wait_len(&self, len: usize) -> Vec<T> {
        let entries = lock(&self.entries);
        let fewer = |entries: &mut Vec<T>| entries.len() < len;
        let (entries, timeout) =
            self.changed.wait_timeout_while(entries, DEADLINE, fewer).unwrap_or_else(PoisonError::into_inner);
        let seen = entries.clone();
        drop(entries);
        assert!(!timeout.timed_out(), "only {} of {len}: {seen:?}", seen.len());
        seen
    }
}

/// Submits these messages one by one; all of them must be accepted.
#[track_caller]
pub(crate) fn send<K: Hash, M, T: Into<Message<K, M>>>(
    to: &Handle<K, M>,
    messages: impl IntoIterator<Item = T>,
) {
    for message in messages {
        let admission = to.submit(message).unwrap_or_else(|refused| panic!("{refused}"));
        assert_eq!(admission, Admission::Accepted);
    }
}

/// Looks again and again until something has come that announces itself to nobody.
#[track_caller]
pub(crate) fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !reached() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        std::thread::yield_now();
    }
}

/// Runs something that must come back, on a thread of its own, and fails if it does not.
#[track_caller]
pub(crate) fn within<R: Send + 'static>(
    limit: Duration,
    what: &str,
    run: impl FnOnce() -> R + Send + 'static,
) -> R {
    let (done, result) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(run()));
    result.recv_timeout(limit).unwrap_or_else(|_| panic!("not within {limit:?}: {what}"))
}
