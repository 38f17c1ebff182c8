//! `/api/groups`, `/api/in-flight`: what groups do, why they wait, and how to stop, start and unblock them.

use axum::extract::{Path, State};
use laneway::{Explanation, Reason};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::input::{Json, Query};
use super::looking::{Failed, why_queued};
use super::most;
use super::problem::Problem;
use super::route::Route;
use crate::pool::GroupKey;
use crate::record::kept;
use crate::service::Service;
use crate::source::embedded::{GroupState, GroupView};

/// How many of the groups that hold the slots are named.
const HOLDERS_MAX: usize = 10;

/// How many of the messages behind the head are shown.
const BEHIND_MAX: usize = 50;

/// How long an operator waits for the disk.
const WRITTEN: std::time::Duration = std::time::Duration::from_secs(5);

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
        Route::get(
            "/api/parked",
            parked,
            "The groups that are parked, whether they have messages in their pool or not, the last ones first",
        )
        .query("pool", "string", "Of this pool only")
        .query("most", "integer", "How many, at most; 100")
        .gives(200, "[ParkedGroup]"),
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
    /// The same where it is short enough to be linked to; otherwise what stands for it in links and in the history.
    short: String,
    /// Messages in the pool.
    depth: usize,
    waiting: usize,
    in_flight: usize,
    state: &'static str,
    explanation: String,
    reason: Value,
    /// In how long its head is expected to start; nothing if nobody can tell, as for a parked group. Zero if it has.
    predicted_start_millis: Option<u64>,
    /// How long an attempt takes on the average.
    average_millis: Option<f64>,
    /// The message that is with its target, or the next.
    head: Option<Head>,
    /// What waits behind it, in its order; the first of it.
    behind: Vec<Behind>,
    /// The last attempts that failed, the newest first.
    failures: Vec<Failed>,
    /// What the queues have of it, those in the pool included.
    queues: Vec<InQueue>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    message_id: String,
    /// Its place in the source; nothing while it is with its target.
    sequence: Option<u64>,
    /// Attempts that were begun.
    attempts: u32,
    attempts_max: u32,
    target: String,
    priority: crate::message::Priority,
    dispatch_mode: crate::message::DispatchMode,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Behind {
    message_id: String,
    sequence: u64,
    /// As that of the head, if every message before it takes as long as the average and succeeds at once.
    predicted_start_millis: Option<u64>,
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
    let router = service.router();
    let group = router.whole_name(&pool, &group)?;
    let in_pool = router.pool_view(&pool)?;
    let settings = in_pool.settings;
    let notes = router.notes(&pool, &group)?;
    let mut waiting = router.waiting(&pool, &group, BEHIND_MAX + 1)?.into_iter().peekable();
    let attempts = match &explanation.reason {
        Reason::Retry { attempts, .. } => *attempts,
        _ => 0,
    };
    let average = notes.average.map(|average| average.as_secs_f64() * 1e3);
    // Of a group that has not run yet nothing is known but that it is one of this pool.
    let calls = in_pool.attempts.calls();
    let usual = average.or((calls > 0).then(|| in_pool.attempts.sum.as_secs_f64() * 1e3 / calls as f64));
    let predicted = predicted(&explanation, usual, settings.concurrency);
    let head_of = |message: &crate::message::Message, sequence, attempts| Head {
        message_id: message.id.clone(),
        sequence,
        attempts,
        attempts_max: settings.attempts,
        target: message.target_to_show(),
        priority: message.priority,
        dispatch_mode: message.dispatch_mode,
    };
    let head = match &notes.running {
        Some(running) => Some(head_of(&running.message, None, running.attempt)),
        None => waiting.next().map(|next| head_of(&next.message, Some(next.sequence), attempts)),
    };
    let since = notes.running.as_ref().map_or(0.0, |running| running.since.elapsed().as_secs_f64() * 1e3);
    let behind = waiting.take(BEHIND_MAX).zip(1..).map(|(next, place)| Behind {
        message_id: next.message.id.clone(),
        sequence: next.sequence,
        predicted_start_millis: predicted
            .zip(usual)
            .map(|(head, average)| head + (average * f64::from(place) - since).max(0.0) as u64),
    });
    let behind: Vec<Behind> = behind.collect();
    let explanation = shortened(explanation);
    let (mut state, mut reason) = reason(&explanation.reason);
    let mut told = explanation.to_string();
    let mut predicted = predicted;
    // Nothing is here, and what no pool has claimed yet waits all the same.
    if explanation.reason == Reason::Idle
        && let Some((queue, view)) = queued(service, &group)
    {
        state = "inQueue";
        told = format!("in the queue {queue:?}: {}", why_queued(service, Some(&pool), &view));
        if let GroupState::Delayed { for_millis } = view.state {
            predicted = Some(for_millis);
        }
    }
    // A parked group is parked whatever it has here, and for longer than this process runs.
    if let Some(parked) = router.parked(&pool, &group)?
        && matches!(explanation.reason, Reason::Idle | Reason::Parked { .. } | Reason::NoWorkerFree { .. })
    {
        let since = parked.since.elapsed().unwrap_or_default();
        if state != "parked" {
            told = format!("parked for {since:?}: {}", parked.why);
        }
        state = "parked";
        reason = json!({ "sinceMillis": since.as_millis() as u64, "why": &*parked.why });
        predicted = None;
    }
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
        explanation: told,
        reason,
        predicted_start_millis: predicted,
        average_millis: average,
        head,
        behind,
        failures: notes.failures.into_iter().rev().map(Failed::from).collect(),
        queues: service.queue_names().into_iter().filter_map(in_queue).collect(),
        short: kept(&group).to_string(),
        pool,
        group,
    }))
}

/// The queue that has most of a group.
fn queued(service: &Service, group: &str) -> Option<(String, GroupView)> {
    let views = service.queue_names().into_iter().filter_map(|name| {
        let view = service.queue(&name)?.group(group)?;
        Some((name, view))
    });
    views.max_by_key(|(_, view)| view.depth)
}

/// In how long the head is expected to start.
fn predicted(explanation: &Explanation<GroupKey>, average: Option<f64>, slots: usize) -> Option<u64> {
    match &explanation.reason {
        Reason::Running { .. } | Reason::PerhapsRunning => Some(0),
        Reason::Retry { after, .. } | Reason::RateLimited { after } => Some(after.as_millis() as u64),
        // All that are ready have their turn, each for about as long as this group's messages take: half of them before it.
        Reason::NoWorkerFree { ready_lanes, .. } => {
            let before = *ready_lanes as f64 / 2.0 / slots.max(1) as f64;
            average.map(|average| (average * (0.5 + before)) as u64)
        }
        _ => None,
    }
}

pub(super) fn shortened(mut explanation: Explanation<GroupKey>) -> Explanation<GroupKey> {
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
        true => {
            written(&service).await?;
            view(&service, pool, group)
        }
        false => Err(nothing(&pool, &group, "to park")),
    }
}

/// What is done is done at once, and has to outlive the process.
async fn written(service: &Service) -> Result<(), Problem> {
    if service.router().parks_written(WRITTEN).await {
        return Ok(());
    }
    let detail =
        "it is done, and could not be written to the queue's file: after a restart it would be as before";
    Err(Problem::new(axum::http::StatusCode::SERVICE_UNAVAILABLE, detail))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ParkedGroup {
    pool: String,
    group: String,
    since: String,
    why: String,
}

async fn parked(
    State(service): State<Service>,
    Query(asked): Query<Asked>,
) -> Result<axum::Json<Vec<ParkedGroup>>, Problem> {
    let most = most(asked.most, 100);
    let mut all = Vec::new();
    for code in codes(&service, asked.pool.as_deref())? {
        let Ok(parked) = service.router().all_parked(&code, most) else { continue };
        all.extend(parked.into_iter().map(|(group, parked)| (code.clone(), group, parked)));
    }
    all.sort_by_key(|(.., parked)| std::cmp::Reverse(parked.since));
    let shown = all.into_iter().take(most).map(|(pool, group, parked)| ParkedGroup {
        pool,
        group: kept(&group).to_string(),
        since: super::iso_of(parked.since),
        why: parked.why.to_string(),
    });
    Ok(axum::Json(shown.collect()))
}

async fn resume(State(service): State<Service>, Path((pool, group)): Path<(String, String)>) -> Answer {
    match service.router().resume(&pool, &group)? {
        true => {
            written(&service).await?;
            view(&service, pool, group)
        }
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
    message_id: String,
    attempt: u32,
    target: String,
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
            message_id: one.message.id.clone(),
            attempt: one.attempt,
            target: one.message.target_to_show(),
            since_millis: now.saturating_duration_since(one.since).as_millis() as u64,
            slot: one.slot,
        }));
    }
    all.sort_by_key(|one| std::cmp::Reverse(one.since_millis));
    all.truncate(most);
    Ok(axum::Json(all))
}
