//! `/api/groups`, `/api/in-flight`: what groups do, why they wait, and how to stop, start and unblock them.

use axum::extract::{Path, State};
use laneway::{Explanation, Reason};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::input::{Json, Query};
use super::most;
use super::problem::Problem;
use super::route::Route;
use crate::pool::GroupKey;
use crate::service::Service;
use crate::source::embedded::GroupState;

/// How many of the groups that hold the slots are named.
const HOLDERS_MAX: usize = 10;

/// A reason is a sentence, not a book.
const WHY_BYTES_MAX: usize = 1_024;

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::get("/api/groups", list, "The groups with the most messages in their pool, deepest first")
            .query("pool", "string", "Of this pool only")
            .query("most", "integer", "How many, at most; 20")
            .gives(200, "[GroupDepth]"),
        Route::get(
            "/api/groups/{pool}/{group}",
            explain,
            "Where the messages of a group are, and why its next one is not with its target",
        )
        .gives(200, "Group"),
        Route::post("/api/groups/{pool}/{group}/park", park, "Stops a group in front of its next message")
            .takes("Park")
            .gives(200, "Group"),
        Route::post(
            "/api/groups/{pool}/{group}/resume",
            resume,
            "Lets a parked group go on, and one that waits for another attempt try at once",
        )
        .gives(200, "Group"),
        Route::post(
            "/api/groups/{pool}/{group}/skip",
            skip,
            "Sends the next message of a group to the dead letters",
        )
        .gives(200, "Group"),
        Route::get("/api/in-flight", in_flight, "What is with its target now, the oldest first")
            .query("pool", "string", "Of this pool only")
            .query("most", "integer", "How many, at most; 100")
            .gives(200, "[InFlight]"),
    ]
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    pool: Option<String>,
    most: Option<usize>,
}

#[derive(Debug, Serialize)]
pub(super) struct GroupDepth {
    pool: String,
    group: String,
    depth: usize,
}

/// The codes of the pools that are meant.
fn codes(service: &Service, pool: Option<&str>) -> Result<Vec<String>, Problem> {
    match pool {
        Some(code) => Ok(vec![service.router().pool_view(code)?.code.to_string()]),
        None => Ok(service.router().codes()),
    }
}

/// The deepest groups of all these pools.
pub(super) fn deepest(
    service: &Service,
    pool: Option<&str>,
    most: usize,
) -> Result<Vec<GroupDepth>, Problem> {
    let mut all = Vec::new();
    for code in codes(service, pool)? {
        // A pool may go between the two calls.
        let Ok(groups) = service.router().groups(&code, most) else { continue };
        all.extend(groups.into_iter().filter_map(|(key, depth)| match key {
            GroupKey::Named(group) => {
                Some(GroupDepth { pool: code.clone(), group: group.to_string(), depth })
            }
            GroupKey::Alone(_) => None,
        }));
    }
    all.sort_by_key(|group| std::cmp::Reverse(group.depth));
    all.truncate(most);
    Ok(all)
}

async fn list(
    State(service): State<Service>,
    Query(asked): Query<Asked>,
) -> Result<axum::Json<Vec<GroupDepth>>, Problem> {
    deepest(&service, asked.pool.as_deref(), most(asked.most, 20)).map(axum::Json)
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Group {
    pool: String,
    group: String,
    /// Messages in the pool.
    depth: usize,
    waiting: usize,
    in_flight: usize,
    state: &'static str,
    explanation: String,
    reason: Value,
    /// What the queues have of it, those in the pool included.
    queues: Vec<InQueue>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct InQueue {
    queue: String,
    depth: usize,
    leased: usize,
    state: &'static str,
    delayed_for_millis: Option<u64>,
}

type Answer = Result<axum::Json<Group>, Problem>;

fn view(service: &Service, pool: String, group: String) -> Answer {
    let Some(explanation) = service.router().explain(&pool, &group)? else {
        return Err(Problem::not_found(format!("the pool {pool:?} has no place for the group {group:?}")));
    };
    let explanation = shortened(explanation);
    let (state, reason) = reason(&explanation.reason);
    let in_queue = |queue: String| {
        let view = service.queue(&queue)?.group(&group)?;
        let (state, delayed_for_millis) = match view.state {
            GroupState::Ready => ("ready", None),
            GroupState::Leased => ("leased", None),
            GroupState::Delayed { for_millis } => ("delayed", Some(for_millis)),
            GroupState::Recalling => ("recalling", None),
        };
        Some(InQueue { queue, depth: view.depth, leased: view.leased, state, delayed_for_millis })
    };
    Ok(axum::Json(Group {
        depth: explanation.waiting + explanation.in_flight + explanation.aside,
        waiting: explanation.waiting,
        in_flight: explanation.in_flight,
        state,
        explanation: explanation.to_string(),
        reason,
        queues: service.queue_names().into_iter().filter_map(in_queue).collect(),
        pool,
        group,
    }))
}

fn shortened(mut explanation: Explanation<GroupKey>) -> Explanation<GroupKey> {
    if let Reason::NoWorkerFree { holders, .. } = &mut explanation.reason {
        holders.truncate(HOLDERS_MAX);
    }
    explanation
}

/// A reason as a word and as an object.
fn reason(reason: &Reason<GroupKey>) -> (&'static str, Value) {
    let millis = |time: &std::time::Duration| time.as_millis() as u64;
    match reason {
        Reason::Idle => ("idle", json!({})),
        Reason::PerhapsRunning => ("perhapsRunning", json!({})),
        Reason::Running { since, worker } => {
            ("running", json!({ "sinceMillis": millis(since), "slot": worker }))
        }
        Reason::NoWorkerFree { holders, ready_lanes } => {
            let groups: Vec<_> =
                holders.iter().filter_map(|holder| holder.key.as_ref()).map(GroupKey::name).collect();
            ("noSlotFree", json!({ "readyGroups": ready_lanes, "busyWith": groups }))
        }
        Reason::Retry { after, attempts, note } => {
            ("retrying", json!({ "afterMillis": millis(after), "failedAttempts": attempts, "why": note }))
        }
        Reason::RateLimited { after } => ("rateLimited", json!({ "afterMillis": millis(after) })),
        Reason::Parked { since, note } => ("parked", json!({ "sinceMillis": millis(since), "why": note })),
        Reason::PutAside { note } => ("putAside", json!({ "why": note })),
        Reason::DispatcherPaused => ("poolPaused", json!({})),
        Reason::Moving => ("moving", json!({})),
        _ => ("other", json!({})),
    }
}

async fn explain(State(service): State<Service>, Path((pool, group)): Path<(String, String)>) -> Answer {
    view(&service, pool, group)
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Park {
    why: Option<String>,
}

async fn park(
    State(service): State<Service>,
    Path((pool, group)): Path<(String, String)>,
    Json(park): Json<Park>,
) -> Answer {
    let why = park.why.unwrap_or_else(|| "by an operator".to_owned());
    if why.len() > WHY_BYTES_MAX {
        return Err(Problem::unprocessable(format!(
            "`why` has {} bytes; at most {WHY_BYTES_MAX} would be right",
            why.len()
        )));
    }
    match service.router().park(&pool, &group, &why)? {
        true => view(&service, pool, group),
        false => Err(nothing(&pool, &group, "to park")),
    }
}

async fn resume(State(service): State<Service>, Path((pool, group)): Path<(String, String)>) -> Answer {
    match service.router().resume(&pool, &group)? {
        true => view(&service, pool, group),
        false => Err(nothing(&pool, &group, "to resume")),
    }
}

async fn skip(State(service): State<Service>, Path((pool, group)): Path<(String, String)>) -> Answer {
    match service.router().skip(&pool, &group)? {
        true => view(&service, pool, group),
        false => Err(nothing(&pool, &group, "to skip, or it is with its target")),
    }
}

fn nothing(pool: &str, group: &str, what: &str) -> Problem {
    Problem::conflict(format!("the group {group:?} of the pool {pool:?} has nothing {what}"))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct InFlight {
    pool: String,
    /// None for a message without a group.
    group: Option<String>,
    since_millis: u64,
    slot: usize,
}

async fn in_flight(
    State(service): State<Service>,
    Query(asked): Query<Asked>,
) -> Result<axum::Json<Vec<InFlight>>, Problem> {
    let most = most(asked.most, 100);
    let now = Instant::now();
    let mut all = Vec::new();
    for code in codes(&service, asked.pool.as_deref())? {
        let Ok(running) = service.router().in_flight(&code, most) else { continue };
        all.extend(running.into_iter().map(|one| InFlight {
            pool: code.clone(),
            group: match &one.key {
                GroupKey::Named(name) => Some(name.to_string()),
                GroupKey::Alone(_) => None,
            },
            since_millis: now.saturating_duration_since(one.since).as_millis() as u64,
            slot: one.slot,
        }));
    }
    all.sort_by_key(|one| std::cmp::Reverse(one.since_millis));
    all.truncate(most);
    Ok(axum::Json(all))
}
