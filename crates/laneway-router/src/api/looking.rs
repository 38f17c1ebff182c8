//! What the dashboard asks beside its pictures: a search, the newest failures, who did what, and what each slot of a pool does.

use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::input::Query;
use super::problem::Problem;
use super::route::Route;
use super::{iso, iso_of, most};
use crate::mediator::BreakerState;
use crate::message::MediationType;
use crate::pool::GroupKey;
use crate::record::FailedAttempt;
use crate::router::SourceView;
use crate::service::Service;

/// Longer texts are not searched for: no name is longer where we have a say, and the address has to carry it.
const SEARCH_BYTES_MAX: usize = 16 * 1024;

/// Found groups and messages that are shown.
const FOUND_MAX: usize = 50;

/// Dead letters that are looked through, the oldest, per queue.
const DEAD_LETTERS_SEARCHED: usize = 1_000;

/// Slots of a pool that are listed.
const SLOTS_MAX: usize = 1_000;

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::get("/api/search", search, "Groups by a part of their name, and messages by their id")
            .query("q", "string", "What to look for")
            .gives(200, "Found"),
        Route::get("/api/failures", failures, "The newest attempts that failed, the newest first")
            .query("most", "integer", "How many, at most; 100")
            .gives(200, "[FailedAttempt]"),
        Route::get("/api/audit", audit, "What operators did, the newest first")
            .query("most", "integer", "How many, at most; 100")
            .gives(200, "[Deed]"),
        Route::get(
            "/api/pools/{code}/slots",
            slots,
            "The dispatchers and workers of a pool, and what each does",
        )
        .gives(200, "Slots"),
    ]
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    q: String,
}

#[derive(Debug, Serialize)]
struct FoundGroup {
    /// None while all of it is in a queue.
    pool: Option<String>,
    group: String,
    depth: usize,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FoundMessage {
    message_id: String,
    /// `waiting`, `inFlight` or `deadLetter`.
    state: &'static str,
    pool: Option<String>,
    group: Option<String>,
    queue: Option<String>,
    sequence: Option<u64>,
}

#[derive(Debug, Default, Serialize)]
struct Found {
    groups: Vec<FoundGroup>,
    messages: Vec<FoundMessage>,
}

async fn search(
    State(service): State<Service>,
    Query(asked): Query<Asked>,
) -> Result<axum::Json<Found>, Problem> {
    let text = asked.q.trim();
    if text.is_empty() || text.len() > SEARCH_BYTES_MAX {
        return Err(Problem::unprocessable(format!("`q` must have 1 to {SEARCH_BYTES_MAX} bytes")));
    }
    let mut found = Found::default();
    for code in service.router().codes() {
        found.look_into_pool(&service, &code, text);
    }
    for name in service.queue_names() {
        found.look_into_queue(&service, name, text).await?;
    }
    found.groups.sort_by_key(|group| (group.group != text, std::cmp::Reverse(group.depth)));
    found.groups.truncate(FOUND_MAX);
    found.messages.truncate(FOUND_MAX);
    Ok(axum::Json(found))
}

fn named(key: &GroupKey) -> Option<String> {
    match key {
        GroupKey::Named(name) => Some(name.to_string()),
        GroupKey::Alone(_) => None,
    }
}

impl Found {
    /// A pool that goes meanwhile has nothing.
    fn look_into_pool(&mut self, service: &Service, code: &str, text: &str) {
        let router = service.router();
        for (key, depth) in router.find_groups(code, text, FOUND_MAX).unwrap_or_default() {
            if let Some(group) = named(&key) {
                self.groups.push(FoundGroup { pool: Some(code.to_owned()), group, depth });
            }
        }
        let message = |state, id: &str, key: &GroupKey, sequence| FoundMessage {
            message_id: id.to_owned(),
            state,
            pool: Some(code.to_owned()),
            group: named(key),
            queue: None,
            sequence,
        };
        let waiting = router.find_message(code, text, FOUND_MAX).unwrap_or_default();
        self.messages.extend(
            waiting.iter().map(|(key, it)| message("waiting", &it.message.id, key, Some(it.sequence))),
        );
        let running = router.in_flight(code, usize::MAX).unwrap_or_default();
        let running = running.iter().filter(|one| one.message.id == text);
        self.messages.extend(running.map(|one| message("inFlight", &one.message.id, &one.key, None)));
    }

    /// What still lies in a queue has its name in the index, but not its ids.
    async fn look_into_queue(&mut self, service: &Service, name: String, text: &str) -> Result<(), Problem> {
        let Some(queue) = service.queue(&name) else { return Ok(()) };
        if let Some(view) = queue.group(text)
            && !self.groups.iter().any(|group| group.group == text)
        {
            self.groups.push(FoundGroup { pool: None, group: text.to_owned(), depth: view.depth });
        }
        for kept in queue.dead_letters(0, DEAD_LETTERS_SEARCHED).await? {
            let message: Value = serde_json::from_slice(&kept.text).unwrap_or_default();
            let group = kept.group.as_deref();
            if message["id"].as_str() == Some(text) || group == Some(text) {
                self.messages.push(FoundMessage {
                    message_id: message["id"].as_str().unwrap_or_default().to_owned(),
                    state: "deadLetter",
                    pool: message["poolCode"].as_str().map(str::to_owned),
                    group: group.map(str::to_owned),
                    queue: Some(name.clone()),
                    sequence: Some(kept.sequence),
                });
            }
        }
        Ok(())
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Most {
    most: Option<usize>,
}

/// A failed attempt, as the API shows it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Failed {
    at: String,
    pool: String,
    group: Option<String>,
    message_id: String,
    attempt: u32,
    reason: String,
}

impl From<FailedAttempt> for Failed {
    fn from(failed: FailedAttempt) -> Self {
        Failed {
            at: iso_of(failed.at),
            pool: failed.pool.to_string(),
            group: Some(failed.group.to_string()).filter(|group| !group.is_empty()),
            message_id: failed.message.to_string(),
            attempt: failed.attempt,
            reason: failed.reason.to_string(),
        }
    }
}

async fn failures(State(service): State<Service>, Query(asked): Query<Most>) -> axum::Json<Vec<Failed>> {
    let newest = service.router().record().newest_failures(most(asked.most, 100));
    axum::Json(newest.into_iter().map(Failed::from).collect())
}

#[derive(Debug, Serialize)]
struct Deed {
    number: u64,
    at: String,
    who: &'static str,
    method: String,
    path: String,
    detail: Option<String>,
    status: u16,
}

async fn audit(State(service): State<Service>, Query(asked): Query<Most>) -> axum::Json<Vec<Deed>> {
    let deed = |deed: crate::audit::Deed| Deed {
        number: deed.number,
        at: iso_of(deed.at),
        who: deed.who,
        method: deed.method,
        path: deed.path,
        detail: deed.detail,
        status: deed.status,
    };
    axum::Json(service.audit().newest(most(asked.most, 100)).into_iter().map(deed).collect())
}

#[derive(Debug, Serialize)]
struct Slots {
    dispatchers: Vec<Dispatcher>,
    /// Those that are left out are the last ones.
    slots: Vec<Slot>,
    total: usize,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Dispatcher {
    name: String,
    waiting: usize,
    in_flight: usize,
    groups: usize,
    running_groups: usize,
    retrying_groups: usize,
    parked_groups: usize,
    paused: bool,
    attempts: u64,
    deepest: u32,
    lock_failure_ratio: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Slot {
    name: String,
    handled: u64,
    group: Option<String>,
    message_id: Option<String>,
    attempt: Option<u32>,
    since_millis: Option<u64>,
}

async fn slots(
    State(service): State<Service>,
    Path(code): Path<String>,
) -> Result<axum::Json<Slots>, Problem> {
    let view = service.router().pool_view(&code)?;
    let running = service.router().in_flight(&code, SLOTS_MAX)?;
    let now = Instant::now();
    let dispatchers = view.engine.dispatchers.iter().map(|part| Dispatcher {
        name: part.name.clone(),
        waiting: part.depth,
        in_flight: part.in_flight,
        groups: part.active_lanes,
        running_groups: part.running_lanes,
        retrying_groups: part.deferred_lanes,
        parked_groups: part.parked_lanes,
        paused: part.paused,
        attempts: part.dispatched,
        deepest: part.max_pending_depth,
        lock_failure_ratio: part.lock_failure_ratio(),
    });
    let slots = view.engine.workers.iter().enumerate().take(SLOTS_MAX).map(|(number, worker)| {
        let doing = running.iter().find(|one| one.slot == number);
        Slot {
            name: worker.name.clone(),
            handled: worker.handled,
            group: doing.and_then(|one| named(&one.key)),
            message_id: doing.map(|one| one.message.id.clone()),
            attempt: doing.map(|one| one.attempt),
            since_millis: doing.map(|one| now.saturating_duration_since(one.since).as_millis() as u64),
        }
    });
    Ok(axum::Json(Slots {
        dispatchers: dispatchers.collect(),
        slots: slots.collect(),
        total: view.engine.workers.len(),
    }))
}

/// What has no past and is shown beside what has: sources, breakers, verdicts, rejections by reason. Counters are totals since the start.
pub(crate) fn glance(service: &Service, sources: &[SourceView]) -> Value {
    let router = service.router();
    let shown: Vec<Value> = sources
        .iter()
        .map(|source| {
            let depth = source.depth;
            json!({
                "name": source.name, "healthy": source.healthy, "trouble": source.trouble, "claimed": source.claimed,
                "held": source.ledger.held, "unreadable": source.unreadable,
                "waiting": depth.map(|depth| depth.waiting), "leased": depth.map(|depth| depth.leased),
                "dead": depth.map(|depth| depth.dead), "quarantined": depth.map(|depth| depth.quarantined),
            })
        })
        .collect();
    let breakers = service.mediators().breakers().list(std::time::Instant::now());
    let state = |state| breakers.iter().filter(|(_, status)| status.state == state).count();
    let kinds = [MediationType::Http, MediationType::Simulated, MediationType::Sink]
        .map(|kind| service.mediators().metrics(kind));
    let sum = |of: fn(&crate::mediator::MetricsSnapshot) -> u64| kinds.iter().map(of).sum::<u64>();
    let states: Vec<Value> = router
        .pool_list()
        .iter()
        .take(crate::history::POOLS_MAX)
        .map(|pool| json!({ "code": &**pool.code(), "state": super::pools::state_name(pool.state()) }))
        .collect();
    json!({
        "uptimeMillis": service.uptime().as_millis() as u64,
        "startedAt": iso(started_millis(service)),
        "closing": service.is_closing(),
        "states": states,
        "sources": shown,
        "breakers": {
            "closed": state(BreakerState::Closed), "open": state(BreakerState::Open), "halfOpen": state(BreakerState::HalfOpen),
        },
        "verdicts": {
            "done": sum(|it| it.done), "wait": sum(|it| it.waits), "again": sum(|it| it.again), "final": sum(|it| it.finals),
        },
        "rejections": rejections(service, sources, sum(|it| it.not_sent)),
        "warnings": router.warnings().len(),
        "subscribers": service.history().map_or(0, |history| history.subscribers()),
    })
}

fn started_millis(service: &Service) -> u64 {
    let since = std::time::SystemTime::now() - service.uptime();
    since.duration_since(std::time::SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// How often something was not taken, by the reason.
fn rejections(service: &Service, sources: &[SourceView], not_sent: u64) -> Value {
    let counts: Vec<_> = service.router().pool_list().iter().map(|pool| pool.counts()).collect();
    let sum = |of: fn(&crate::pool::PoolCounts) -> u64| counts.iter().map(of).sum::<u64>();
    let mut reasons = Map::new();
    let mut add = |reason: &str, count: u64| drop(reasons.insert(reason.to_owned(), count.into()));
    add("pool full", sum(|counts| counts.refused_pool_full));
    add("group full", sum(|counts| counts.refused_group_full));
    add("pool not open", sum(|counts| counts.refused_not_open));
    add("given back after failing", sum(|counts| counts.given_back));
    add("not a message", sources.iter().map(|source| source.unreadable).sum());
    add("target not called", not_sent);
    for (code, count) in service.ingress_stats().iter().flat_map(|stats| &stats.rejections) {
        add(&format!("ingress {code}"), *count);
    }
    Value::Object(reasons)
}
