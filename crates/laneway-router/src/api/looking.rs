//! What the dashboard asks beside its pictures: a search, the newest failures, who did what, and what each slot of a pool does.

use std::time::Duration;

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
use crate::pool::{GroupKey, PoolState};
use crate::record::{FailedAttempt, kept};
use crate::router::{DEFAULT_POOL, SourceView};
use crate::service::Service;
use crate::source::embedded::{EmbeddedQueue, GroupState, GroupView, Place, SearchLimits, Sighting};

/// Longer texts are not searched for: no name is longer where we have a say, and the address has to carry it.
const SEARCH_BYTES_MAX: usize = 16 * 1024;

/// Found groups and messages that are shown.
const FOUND_MAX: usize = 50;

/// How far a search goes into a queue: about a second for each million messages.
const SEARCH_LIMITS: SearchLimits =
    SearchLimits { messages: 2_000_000, time: Duration::from_secs(4), found: FOUND_MAX };

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
    /// None while all of it is in a queue and its next message asks for none that is known.
    pool: Option<String>,
    /// Its name, or the short one of it by which links lead to it.
    group: String,
    /// Whether that is all that was looked for, and not a part of it.
    exact: bool,
    depth: usize,
    /// The queue that has all of it.
    queue: Option<String>,
    /// Why its next message is not with its target.
    why: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FoundMessage {
    message_id: String,
    /// `waiting` or `inFlight` in a pool; `inQueue`, `delayed`, `claimed` or `deadLetter` in a queue.
    state: &'static str,
    pool: Option<String>,
    group: Option<String>,
    queue: Option<String>,
    sequence: Option<u64>,
    /// Why it is there.
    why: Option<String>,
}

/// What was not looked through, or not to its end.
#[derive(Debug, Serialize)]
struct NotSearched {
    source: String,
    why: String,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Found {
    groups: Vec<FoundGroup>,
    messages: Vec<FoundMessage>,
    not_searched: Vec<NotSearched>,
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
    for source in service.router().source_states().iter().filter(|source| source.kind != "embedded") {
        found.not_searched.push(NotSearched { source: source.name.clone(), why: no_search(source.kind) });
    }
    found.groups.sort_by_key(|group| (!group.exact, std::cmp::Reverse(group.depth)));
    found.groups.truncate(FOUND_MAX);
    found.messages.truncate(FOUND_MAX);
    Ok(axum::Json(found))
}

fn named(key: &GroupKey) -> Option<String> {
    match key {
        GroupKey::Named(name) => Some(kept(name).to_string()),
        GroupKey::Alone(_) => None,
    }
}

/// What somebody can do who looks for a message that a source of this kind has.
fn no_search(kind: &str) -> String {
    let tools = match kind {
        "postgres" => {
            "look with SQL: SELECT msg_id, vt, headers, message FROM pgmq.q_<queue> WHERE message ->> 'id' = '<id>'"
        }
        "kafka" => {
            "look with a consumer of another group, for example kafka-console-consumer --property print.key=true"
        }
        "nats" => "look with `nats stream view`, or `nats stream get`",
        "rabbitmq" => "look with the management page of the queue, `Get messages`",
        "activemq" => "browse the queue on the page of the broker",
        "sqs" => "SQS shows messages only to who receives them",
        _ => "it has no way to look without taking",
    };
    format!("what it has not handed out cannot be searched from here; {tools}")
}

/// A time as people say it.
fn spoken(millis: u64) -> String {
    let seconds = millis / 1_000;
    match seconds {
        0 => format!("{millis} ms"),
        1..60 => format!("{:.1} s", millis as f64 / 1e3),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3_600, seconds / 60 % 60),
    }
}

/// What keeps a pool from taking more, to be added to a sentence.
fn why_not_taken(service: &Service, pool: Option<&str>) -> String {
    let Some(code) = pool else { return String::new() };
    match service.router().pool_view(code) {
        Ok(pool) if pool.state == PoolState::Paused => format!("; its pool {code} is paused"),
        Ok(_) if service.router().has_room(code) == Ok(false) => format!("; its pool {code} has no room"),
        _ => String::new(),
    }
}

/// Why a group waits that is in a queue.
pub(super) fn why_queued(service: &Service, pool: Option<&str>, view: &GroupView) -> String {
    let more = why_not_taken(service, pool);
    match view.state {
        GroupState::Ready => format!("its next message waits to be claimed{more}"),
        GroupState::Leased => {
            format!("messages of it are handed out, and the next ones follow as there is room{more}")
        }
        GroupState::Delayed { for_millis } => {
            let (head, time) = (view.head, spoken(for_millis));
            format!(
                "its next message (sequence {head}) is not due for {time}, and all of it waits with that{more}"
            )
        }
        GroupState::Recalling => {
            let words = "a message of it came back while later ones are handed out";
            format!("{words}; it goes on when those have come back, too")
        }
    }
}

/// Where a message of a queue is, in a word, and why.
fn whereabouts(
    service: &Service,
    queue: &EmbeddedQueue,
    pool: Option<&str>,
    seen: &Sighting,
) -> (&'static str, Option<String>) {
    let group = || seen.group.as_deref().and_then(|name| queue.group(name));
    match seen.place {
        Place::DeadLetter => ("deadLetter", None),
        Place::Leased => {
            ("claimed", Some("it is handed out, and on its way into its pool, or back from it".to_owned()))
        }
        Place::Delayed { for_millis } => {
            let (time, more) = (spoken(for_millis), why_not_taken(service, pool));
            ("delayed", Some(format!("it is not due for {time}{more}")))
        }
        Place::Waiting => match group() {
            Some(view) if view.head != seen.sequence => {
                let why = why_queued(service, pool, &view);
                ("inQueue", Some(format!("behind others of its group: {why}")))
            }
            Some(view) => ("inQueue", Some(why_queued(service, pool, &view))),
            None => ("inQueue", Some("it waits to be claimed".to_owned())),
        },
    }
}

impl Found {
    /// A pool that goes meanwhile has nothing.
    fn look_into_pool(&mut self, service: &Service, code: &str, text: &str) {
        let router = service.router();
        for (key, depth) in router.find_groups(code, text, FOUND_MAX).unwrap_or_default() {
            let Some(group) = named(&key) else { continue };
            let why = router.explain(code, key.name()).ok().flatten();
            let why = why.map_or(String::new(), |why| super::groups::shortened(why).to_string());
            let (pool, exact) = (Some(code.to_owned()), key.name() == text);
            self.groups.push(FoundGroup { pool, group, exact, depth, queue: None, why });
        }
        let message = |state, id: &str, key: &GroupKey, sequence| FoundMessage {
            message_id: id.to_owned(),
            state,
            pool: Some(code.to_owned()),
            group: named(key),
            queue: None,
            sequence,
            why: None,
        };
        let waiting = router.find_message(code, text, FOUND_MAX).unwrap_or_default();
        self.messages.extend(
            waiting.iter().map(|(key, it)| message("waiting", &it.message.id, key, Some(it.sequence))),
        );
        let running = router.in_flight(code, usize::MAX).unwrap_or_default();
        let running = running.iter().filter(|one| one.message.id == text);
        self.messages.extend(running.map(|one| message("inFlight", &one.message.id, &one.key, None)));
    }

    /// What no pool has: what waits in a queue, and the dead letters.
    async fn look_into_queue(&mut self, service: &Service, name: String, text: &str) -> Result<(), Problem> {
        let Some(queue) = service.queue(&name) else { return Ok(()) };
        let sought = queue.search(text, SEARCH_LIMITS).await?;
        if sought.is_cut_short {
            let count = sought.looked;
            let why = format!(
                "the oldest {count} of its messages and dead letters were looked through; those behind them were not"
            );
            self.not_searched.push(NotSearched { source: name.clone(), why });
        }
        for (view, pool) in sought.groups {
            let Some(group) = view.name.clone() else { continue };
            if self.groups.iter().any(|found| *found.group == *group) {
                continue;
            }
            let pool = pool.map(|code| pool_of(service, &code));
            self.groups.push(FoundGroup {
                why: why_queued(service, pool.as_deref(), &view),
                pool,
                exact: *group == *text,
                group: group.to_string(),
                depth: view.depth,
                queue: Some(name.clone()),
            });
        }
        for seen in sought.messages {
            let is_known =
                self.messages.iter().any(|found| found.message_id == seen.id && found.queue.is_none());
            if seen.place == Place::Leased && is_known {
                continue;
            }
            let pool = Some(pool_of(service, &seen.pool));
            let (state, why) = whereabouts(service, &queue, pool.as_deref(), &seen);
            self.messages.push(FoundMessage {
                message_id: seen.id,
                state,
                pool,
                group: seen.group.map(|group| group.to_string()),
                queue: Some(name.clone()),
                sequence: Some(seen.sequence),
                why,
            });
        }
        Ok(())
    }
}

/// The pool that runs what asks for this one.
fn pool_of(service: &Service, code: &str) -> String {
    match service.router().pool_view(code.trim()) {
        Ok(pool) => pool.code.to_string(),
        Err(_) => DEFAULT_POOL.to_owned(),
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
