//! Test targets: endpoints that behave in a known way, for the demonstration, for benchmarks, and for whoever tries a configuration.
//!
//! The service mounts [`TestTargets::router`] under `/api/test`. Nothing here knows of the router in front of it: a call is judged by what any
//! target sees, which is the status that it answers with and the fencing headers.
//!
//! | `POST` | answers |
//! |---|---|
//! | `fast` | 200 after 100 ms |
//! | `slow` | 200 after 60 s, or 503 as soon as the service shuts down |
//! | `faulty` | 200, 400 and 500, six, two and two of ten, as the seed says |
//! | `success`, `fail`, `client-error`, `server-error` | 200, 500, 400, 500 |
//! | `pending` | 200 with `{"ack": false, "delaySeconds": 1}` |
//! | `limited` | 429 with `Retry-After: 1` |
//!
//! `?delayMillis=` sets another delay, of at most five minutes, on all of them. `GET stats` tells how often each was called and, as far as the fencing headers tell,
//! whether each key was called in order and one at a time; `DELETE stats` begins anew.
//!
//! What `stats` counts for a key:
//!
//! - **out of order**: a call with a lower sequence than one that came before it. A repetition of the latest is in order.
//! - **repeated**: a call with the sequence that was the last to be answered with a success. A crash or a timeout explains it; nothing else does.
//! - **overlapping**: a call that came while one of another sequence of the same key was in the target's hands. A caller that gave up by timeout
//!   may look like one, if its connection has not been seen to close.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::mediator::headers;
use crate::message::MESSAGE_BYTES_MAX;

/// No delay is longer, whoever asks for it.
const DELAY_MAX: Duration = Duration::from_secs(300);

/// How many keys are watched. Calls of further ones are counted and not watched.
pub const WATCHED_KEYS_MAX: usize = 100_000;

/// A power of two.
const SHARDS: usize = 16;

/// What an endpoint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaviour {
    Fast,
    Slow,
    Faulty,
    Success,
    Fail,
    ClientError,
    ServerError,
    Pending,
    Limited,
}

const ENDPOINTS: [(&str, Behaviour); 9] = [
    ("fast", Behaviour::Fast),
    ("slow", Behaviour::Slow),
    ("faulty", Behaviour::Faulty),
    ("success", Behaviour::Success),
    ("fail", Behaviour::Fail),
    ("client-error", Behaviour::ClientError),
    ("server-error", Behaviour::ServerError),
    ("pending", Behaviour::Pending),
    ("limited", Behaviour::Limited),
];

/// The names of the endpoints.
pub fn names() -> impl Iterator<Item = &'static str> {
    ENDPOINTS.into_iter().map(|(name, _)| name)
}

impl Behaviour {
    fn delay(self) -> Duration {
        match self {
            Behaviour::Fast => Duration::from_millis(100),
            Behaviour::Slow => Duration::from_secs(60),
            _ => Duration::ZERO,
        }
    }

    /// The answer; `throw` is from 0 to 9.
    fn answer(self, throw: u8) -> Response {
        let status = match self {
            Behaviour::Fast | Behaviour::Slow | Behaviour::Success => StatusCode::OK,
            Behaviour::Faulty if throw < 6 => StatusCode::OK,
            Behaviour::Faulty if throw < 8 => StatusCode::BAD_REQUEST,
            Behaviour::Faulty | Behaviour::Fail | Behaviour::ServerError => StatusCode::INTERNAL_SERVER_ERROR,
            Behaviour::ClientError => StatusCode::BAD_REQUEST,
            Behaviour::Pending => {
                return (StatusCode::OK, json(r#"{"ack":false,"delaySeconds":1}"#)).into_response();
            }
            Behaviour::Limited => {
                let retry = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
                return (StatusCode::TOO_MANY_REQUESTS, retry, json(r#"{"status":"too many requests"}"#))
                    .into_response();
            }
        };
        let text = match status {
            StatusCode::OK => r#"{"status":"ok"}"#,
            StatusCode::BAD_REQUEST => r#"{"status":"bad request"}"#,
            _ => r#"{"status":"error"}"#,
        };
        (status, json(text)).into_response()
    }
}

fn json(text: &'static str) -> ([(HeaderName, HeaderValue); 1], &'static str) {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text)
}

/// The test targets of a process. Clones are the same targets.
#[derive(Clone, Debug)]
pub struct TestTargets {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    seed: u64,
    /// Calls of `faulty` so far; the number decides the answer.
    throws: AtomicU64,
    closed: watch::Sender<bool>,
    counts: [Counts; ENDPOINTS.len()],
    watched: [Mutex<HashMap<String, Watched>>; SHARDS],
    unwatched: AtomicU64,
    hasher: foldhash::fast::FixedState,
}

#[derive(Debug, Default)]
struct Counts {
    calls: AtomicU64,
    succeeded: AtomicU64,
    in_flight: AtomicU64,
}

/// What is known of a key.
#[derive(Debug, Default)]
struct Watched {
    calls: u64,
    /// The highest sequence that came.
    highest: u64,
    /// The highest sequence that was answered with a success.
    succeeded: Option<u64>,
    /// How many sequences were, each counted once.
    delivered: u64,
    /// Calls that have no answer yet, by sequence.
    in_flight: Vec<u64>,
    out_of_order: u64,
    repeated: u64,
    overlapping: u64,
}

impl TestTargets {
    /// The seed decides when `faulty` is so.
    pub fn new(seed: u64) -> Self {
        TestTargets {
            inner: Arc::new(Inner {
                seed,
                throws: AtomicU64::new(0),
                closed: watch::Sender::new(false),
                counts: std::array::from_fn(|_| Counts::default()),
                watched: std::array::from_fn(|_| Mutex::default()),
                unwatched: AtomicU64::new(0),
                hasher: foldhash::fast::FixedState::with_seed(seed),
            }),
        }
    }

    /// The endpoints, to be mounted wherever they are wanted.
    pub fn router(&self) -> Router {
        let mut router = Router::new().route("/stats", get(stats).delete(forget));
        for (place, (name, behaviour)) in ENDPOINTS.into_iter().enumerate() {
            let handler = move |State(targets): State<TestTargets>,
                                Query(asked): Query<Asked>,
                                headers: HeaderMap,
                                body: axum::body::Bytes| async move {
                drop(body); // read, so that the connection can be used again
                targets.call(place, behaviour, asked, &headers).await
            };
            router = router.route(&format!("/{name}"), post(handler));
        }
        router.layer(DefaultBodyLimit::max(MESSAGE_BYTES_MAX)).with_state(self.clone())
    }

    /// Ends all delays. Calls that were waiting are answered with 503, as are those that would wait from now on.
    pub fn close(&self) {
        self.inner.closed.send_replace(true);
    }

    /// What was seen so far.
    pub fn stats(&self) -> Stats {
        let endpoints = ENDPOINTS.iter().zip(&self.inner.counts);
        let endpoint = |(name, counts): (&(&'static str, Behaviour), &Counts)| EndpointStats {
            name: name.0,
            calls: counts.calls.load(Relaxed),
            succeeded: counts.succeeded.load(Relaxed),
            in_flight: counts.in_flight.load(Relaxed),
        };
        let mut stats = Stats {
            endpoints: endpoints.map(endpoint).collect(),
            order_held: true,
            keys: 0,
            out_of_order: 0,
            repeated: 0,
            overlapping: 0,
            unwatched: self.inner.unwatched.load(Relaxed),
            suspects: Vec::new(),
        };
        for shard in &self.inner.watched {
            lock(shard).iter().for_each(|(key, watched)| stats.add(key, watched));
        }
        stats.order_held = stats.out_of_order == 0 && stats.overlapping == 0;
        stats
    }

    /// What was seen of one key, if anything was.
    pub fn key(&self, key: &str) -> Option<KeyStats> {
        lock(self.shard(key)).get(key).map(|watched| watched.stats(key))
    }

    /// Begins to count anew. Calls that have no answer yet are forgotten by key, and end where they were counted.
    pub fn forget(&self) {
        for counts in &self.inner.counts {
            counts.calls.store(0, Relaxed);
            counts.succeeded.store(0, Relaxed);
        }
        self.inner.unwatched.store(0, Relaxed);
        self.inner.watched.iter().for_each(|shard| lock(shard).clear());
    }

    async fn call(&self, place: usize, behaviour: Behaviour, asked: Asked, headers: &HeaderMap) -> Response {
        let visit = Visit::begin(self, place, headers);
        let delay = asked.delay_millis.map_or(behaviour.delay(), Duration::from_millis).min(DELAY_MAX);
        if !delay.is_zero() && !self.wait(delay).await {
            let text = json(r#"{"status":"shutting down"}"#);
            return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
        }
        let throw = if behaviour == Behaviour::Faulty { self.throw() } else { 0 };
        let response = behaviour.answer(throw);
        visit.end(response.status().is_success() && behaviour != Behaviour::Pending);
        response
    }

    /// False if the targets were closed meanwhile.
    async fn wait(&self, delay: Duration) -> bool {
        let mut closed = self.inner.closed.subscribe();
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => false,
            () = tokio::time::sleep(delay) => true,
        }
    }

    fn throw(&self) -> u8 {
        let number = self.inner.throws.fetch_add(1, Relaxed);
        fastrand::Rng::with_seed(self.inner.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).u8(0..10)
    }

    fn shard(&self, key: &str) -> &Mutex<HashMap<String, Watched>> {
        use std::hash::BuildHasher;
        &self.inner.watched[self.inner.hasher.hash_one(key) as usize & (SHARDS - 1)]
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Asked {
    delay_millis: Option<u64>,
}

async fn stats(State(targets): State<TestTargets>) -> Json<Stats> {
    Json(targets.stats())
}

async fn forget(State(targets): State<TestTargets>) -> StatusCode {
    targets.forget();
    StatusCode::NO_CONTENT
}

/// A call from its first to its last moment. One whose caller has gone away is dropped, and then ends without a success.
struct Visit {
    targets: TestTargets,
    place: usize,
    /// Key and sequence, if the headers have them and the key is watched.
    fence: Option<(String, u64)>,
    succeeded: bool,
}

impl Visit {
    fn begin(targets: &TestTargets, place: usize, headers: &HeaderMap) -> Self {
        let counts = &targets.inner.counts[place];
        counts.calls.fetch_add(1, Relaxed);
        counts.in_flight.fetch_add(1, Relaxed);
        let fence = fence(headers).filter(|(key, sequence)| {
            let watched = targets.arrive(key, *sequence);
            if !watched {
                targets.inner.unwatched.fetch_add(1, Relaxed);
            }
            watched
        });
        Visit { targets: targets.clone(), place, fence, succeeded: false }
    }

    fn end(mut self, succeeded: bool) {
        self.succeeded = succeeded;
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let counts = &self.targets.inner.counts[self.place];
        counts.in_flight.fetch_sub(1, Relaxed);
        counts.succeeded.fetch_add(u64::from(self.succeeded), Relaxed);
        if let Some((key, sequence)) = &self.fence
            && let Some(watched) = lock(self.targets.shard(key)).get_mut(key)
        {
            watched.leave(*sequence, self.succeeded);
        }
    }
}

impl TestTargets {
    /// False if there are too many keys already.
    fn arrive(&self, key: &str, sequence: u64) -> bool {
        let mut shard = lock(self.shard(key));
        let has_room = shard.len() < WATCHED_KEYS_MAX / SHARDS;
        match shard.entry(key.to_owned()) {
            Entry::Occupied(mut watched) => watched.get_mut().arrive(sequence),
            Entry::Vacant(place) if has_room => place.insert(Watched::default()).arrive(sequence),
            Entry::Vacant(_) => return false,
        }
        true
    }
}

impl Watched {
    fn arrive(&mut self, sequence: u64) {
        self.calls += 1;
        self.out_of_order += u64::from(sequence < self.highest);
        self.repeated += u64::from(self.succeeded == Some(sequence));
        self.overlapping += u64::from(self.in_flight.iter().any(|other| *other != sequence));
        self.highest = self.highest.max(sequence);
        self.in_flight.push(sequence);
    }

    fn leave(&mut self, sequence: u64, succeeded: bool) {
        if let Some(place) = self.in_flight.iter().position(|other| *other == sequence) {
            self.in_flight.swap_remove(place);
        }
        if succeeded {
            self.delivered += u64::from(self.succeeded < Some(sequence));
            self.succeeded = self.succeeded.max(Some(sequence));
        }
    }

    fn stats(&self, key: &str) -> KeyStats {
        KeyStats {
            key: key.to_owned(),
            calls: self.calls,
            delivered: self.delivered,
            latest_delivered: self.succeeded,
            highest_sequence: self.highest,
            out_of_order: self.out_of_order,
            repeated: self.repeated,
            overlapping: self.overlapping,
        }
    }
}

fn fence(all: &HeaderMap) -> Option<(String, u64)> {
    let text = |name: HeaderName| all.get(name)?.to_str().ok();
    let key = headers::decode(text(headers::KEY)?).into_owned();
    Some((key, text(headers::SEQUENCE)?.parse().ok()?))
}

/// What is under these locks is consistent between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the test targets have seen.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// By endpoint.
    pub endpoints: Vec<EndpointStats>,
    /// Whether nothing came out of order and nothing overlapped.
    pub order_held: bool,
    /// How many keys were seen and are watched.
    pub keys: usize,
    /// Calls with a lower sequence than one before them.
    pub out_of_order: u64,
    /// Calls with the sequence that was the last to succeed.
    pub repeated: u64,
    /// Calls that came while another one of their key was being answered.
    pub overlapping: u64,
    /// Calls with a key that is one too many to be watched.
    pub unwatched: u64,
    /// Some of the keys that are not as they should be.
    pub suspects: Vec<KeyStats>,
}

/// How many suspects are named.
const SUSPECTS_MAX: usize = 20;

impl Stats {
    fn add(&mut self, key: &str, watched: &Watched) {
        self.keys += 1;
        self.out_of_order += watched.out_of_order;
        self.repeated += watched.repeated;
        self.overlapping += watched.overlapping;
        let is_suspect = watched.out_of_order + watched.overlapping > 0;
        if is_suspect && self.suspects.len() < SUSPECTS_MAX {
            self.suspects.push(watched.stats(key));
        }
    }
}

/// What one endpoint has seen.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointStats {
    /// The last part of its path.
    pub name: &'static str,
    /// How often it was called.
    pub calls: u64,
    /// How many of the calls were answered with a success that is meant as one.
    pub succeeded: u64,
    /// How many have no answer yet.
    pub in_flight: u64,
}

/// What was seen of one key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KeyStats {
    /// The key.
    pub key: String,
    /// How many calls it had.
    pub calls: u64,
    /// How many of its sequences were answered with a success, each counted once as long as they come in order.
    pub delivered: u64,
    /// The highest of those.
    pub latest_delivered: Option<u64>,
    /// The highest sequence among them.
    pub highest_sequence: u64,
    /// See [`Stats::out_of_order`].
    pub out_of_order: u64,
    /// See [`Stats::repeated`].
    pub repeated: u64,
    /// See [`Stats::overlapping`].
    pub overlapping: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(program: &[(u64, Option<bool>)]) -> [u64; 3] {
        let mut watched = Watched::default();
        for (sequence, end) in program {
            match end {
                None => watched.arrive(*sequence),
                Some(succeeded) => watched.leave(*sequence, *succeeded),
            }
        }
        [watched.out_of_order, watched.repeated, watched.overlapping]
    }

    #[test]
    fn order_repetition_and_overlap_are_told_apart() {
        let (ok, failed) = (Some(true), Some(false));
        assert_eq!(watched(&[(1, None), (1, ok), (3, None), (3, ok)]), [0, 0, 0]);
        assert_eq!(watched(&[(1, None), (1, failed), (1, None), (1, ok), (3, None)]), [0, 0, 0], "a retry");
        assert_eq!(watched(&[(1, None), (1, ok), (1, None), (1, ok)]), [0, 1, 0], "a repetition");
        assert_eq!(watched(&[(3, None), (3, ok), (1, None), (1, ok)]), [1, 0, 0], "too late");
        assert_eq!(watched(&[(1, None), (3, None), (1, ok), (3, ok)]), [0, 0, 1], "two at a time");
        assert_eq!(
            watched(&[(1, None), (1, None), (1, ok), (1, ok)]),
            [0, 0, 0],
            "a caller that lost patience"
        );
    }

    #[test]
    fn the_faults_of_faulty_are_as_many_as_promised_and_the_same_for_a_seed() {
        let run = |seed| {
            let targets = TestTargets::new(seed);
            (0..10_000)
                .map(|_| Behaviour::Faulty.answer(targets.throw()).status().as_u16())
                .collect::<Vec<_>>()
        };
        let statuses = run(1);
        let share = |status| statuses.iter().filter(|other| **other == status).count();
        assert!((5_800..6_200).contains(&share(200)), "{}", share(200));
        assert!((1_800..2_200).contains(&share(400)) && (1_800..2_200).contains(&share(500)));
        assert_eq!(statuses, run(1));
        assert_ne!(statuses, run(2));
    }

    #[test]
    fn the_number_of_watched_keys_is_bounded() {
        let targets = TestTargets::new(1);
        let watched = (0..2 * WATCHED_KEYS_MAX).filter(|n| targets.arrive(&n.to_string(), 1)).count();
        assert!(watched <= WATCHED_KEYS_MAX && watched > WATCHED_KEYS_MAX * 9 / 10, "{watched}");
        assert_eq!(targets.stats().keys, watched);
    }
}
