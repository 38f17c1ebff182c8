//! `/api/pools`: to look at pools, and to change them while they run.

use std::time::Duration;

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::{Deserialize, Deserializer, Serialize};

use super::guard::Detail;
use super::input::{Json, Query};
use super::problem::Problem;
use super::route::Route;
use crate::pool::{Exhausted, PoolSettings, PoolState, Ungrouped, wrong_code};
use crate::router::{PoolView, RouterError};
use crate::service::Service;

/// How long a removal waits for the pool to drain if nobody says otherwise. Less than the time that a request has.
const REMOVAL: Duration = Duration::from_secs(20);

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::get("/api/pools", list, "All pools, by code").gives(200, "[Pool]"),
        Route::get("/api/pools/{code}", one, "One pool").gives(200, "Pool"),
        Route::put(
            "/api/pools/{code}",
            put,
            "Changes a pool while it runs, or makes it; what is not named stays as it is",
        )
        .takes("PoolChange")
        .gives(200, "Pool")
        .gives(201, "Pool"),
        Route::post("/api/pools/{code}/pause", pause, "Lets its messages wait").gives(200, "Pool"),
        Route::post("/api/pools/{code}/resume", resume, "Lets them go on").gives(200, "Pool"),
        Route::post(
            "/api/pools/{code}/drain",
            drain,
            "Takes nothing more and runs what is there; a DELETE then ends the pool",
        )
        .gives(202, "Pool"),
        Route::delete("/api/pools/{code}", remove, "Drains the pool, then removes it")
            .query(
                "limitMillis",
                "integer",
                "How long to wait for that; 20000. A pool that takes longer goes on draining",
            )
            .gives(200, "Removed"),
    ]
}

/// A pool, as the API shows it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Pool {
    pub(super) code: String,
    state: &'static str,
    concurrency: usize,
    capacity: usize,
    group_capacity: usize,
    group_latency_millis: Option<u64>,
    rate_per_second: Option<f64>,
    group_rate_per_second: Option<f64>,
    attempts: u32,
    backoff_millis: u64,
    backoff_max_millis: u64,
    exhausted: &'static str,
    give_back_millis: Option<u64>,
    ungrouped: &'static str,
    affinity: usize,
    pub(super) held: usize,
    groups: usize,
    in_flight: usize,
    waiting: usize,
    parked_groups: usize,
    parked_messages: usize,
    retrying_groups: usize,
    counts: Counts,
    latency: Latency,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Counts {
    submitted: u64,
    succeeded: u64,
    failed: u64,
    transient: u64,
    held_back: u64,
    refused: u64,
    refused_pool_full: u64,
    refused_group_full: u64,
    refused_not_open: u64,
    given_back: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Latency {
    p50_millis: f64,
    p95_millis: f64,
    p99_millis: f64,
}

pub(super) fn state_name(state: PoolState) -> &'static str {
    match state {
        PoolState::Open => "open",
        PoolState::Paused => "paused",
        PoolState::Waiting => "waiting",
        PoolState::Draining => "draining",
    }
}

impl From<PoolView> for Pool {
    fn from(view: PoolView) -> Self {
        let PoolView { code, state, settings, held, groups, counts, engine, .. } = view;
        let (parked_groups, parked_messages) = (view.parked_groups, view.parked_messages);
        let service = engine.service();
        let millis = |time: Duration| time.as_micros() as f64 / 1_000.0;
        let sum =
            |of: fn(&laneway::DispatcherStats) -> usize| engine.dispatchers.iter().map(of).sum::<usize>();
        let in_flight = sum(|part| part.in_flight);
        let (exhausted, give_back) = match settings.exhausted {
            Exhausted::DeadLetter => ("deadLetter", None),
            Exhausted::ParkGroup => ("parkGroup", None),
            Exhausted::GiveBack(after) => ("giveBack", Some(after.as_millis() as u64)),
        };
        Pool {
            code: code.to_string(),
            state: state_name(state),
            concurrency: settings.concurrency,
            capacity: settings.capacity,
            group_capacity: settings.group_capacity,
            group_latency_millis: settings.group_latency.map(|latency| latency.as_millis() as u64),
            rate_per_second: settings.rate_per_second,
            group_rate_per_second: settings.group_rate_per_second,
            attempts: settings.attempts,
            backoff_millis: settings.backoff.as_millis() as u64,
            backoff_max_millis: settings.backoff_max.as_millis() as u64,
            exhausted,
            give_back_millis: give_back,
            ungrouped: match settings.ungrouped {
                Ungrouped::Serial => "serial",
                Ungrouped::Unordered => "unordered",
            },
            affinity: settings.affinity,
            held,
            groups,
            in_flight,
            waiting: held.saturating_sub(in_flight),
            parked_groups,
            parked_messages,
            retrying_groups: sum(|part| part.deferred_lanes),
            counts: Counts {
                submitted: counts.submitted,
                succeeded: counts.succeeded,
                failed: counts.failed,
                transient: counts.transient,
                held_back: counts.held_back,
                refused: counts.refused,
                refused_pool_full: counts.refused_pool_full,
                refused_group_full: counts.refused_group_full,
                refused_not_open: counts.refused_not_open,
                given_back: counts.given_back,
            },
            latency: Latency {
                p50_millis: millis(service.p50()),
                p95_millis: millis(service.p95()),
                p99_millis: millis(service.p99()),
            },
        }
    }
}

type Answer = Result<axum::Json<Pool>, Problem>;

async fn list(State(service): State<Service>) -> axum::Json<Vec<Pool>> {
    axum::Json(service.router().pools().into_iter().map(Pool::from).collect())
}

fn view(service: &Service, code: &str) -> Answer {
    Ok(axum::Json(service.router().pool_view(code)?.into()))
}

async fn one(State(service): State<Service>, Path(code): Path<String>) -> Answer {
    view(&service, &code)
}

async fn pause(State(service): State<Service>, Path(code): Path<String>) -> Answer {
    service.router().pause_pool(&code)?;
    view(&service, &code)
}

async fn resume(State(service): State<Service>, Path(code): Path<String>) -> Answer {
    service.router().resume_pool(&code)?;
    view(&service, &code)
}

async fn drain(
    State(service): State<Service>,
    Path(code): Path<String>,
) -> Result<(StatusCode, axum::Json<Pool>), Problem> {
    service.drain_pool(&code)?;
    Ok((StatusCode::ACCEPTED, view(&service, &code)?))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Limit {
    limit_millis: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Removed {
    removed: String,
}

async fn remove(
    State(service): State<Service>,
    Path(code): Path<String>,
    Query(limit): Query<Limit>,
) -> Result<axum::Json<Removed>, Problem> {
    // A little less than the request has, so that the answer says what became of it.
    let longest = service.config().http.request_timeout.mul_f64(0.9);
    let limit = limit.limit_millis.map_or(REMOVAL, Duration::from_millis).min(longest);
    service.drain_pool(&code)?;
    service.router().remove_pool(&code, limit).await?;
    Ok(axum::Json(Removed { removed: code }))
}

/// What is to be different. A field that is not there stays as it is; null is none, where there may be none.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct PoolChange {
    concurrency: Option<usize>,
    capacity: Option<usize>,
    group_capacity: Option<usize>,
    #[serde(deserialize_with = "named")]
    group_latency_millis: Option<Option<u64>>,
    #[serde(deserialize_with = "named")]
    rate_per_second: Option<Option<f64>>,
    #[serde(deserialize_with = "named")]
    group_rate_per_second: Option<Option<f64>>,
    attempts: Option<u32>,
    backoff_millis: Option<u64>,
    backoff_max_millis: Option<u64>,
    exhausted: Option<AfterLast>,
    give_back_millis: Option<u64>,
    ungrouped: Option<Group>,
    affinity: Option<usize>,
}

/// Tells null from nothing.
fn named<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(deserializer).map(Some)
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
enum AfterLast {
    DeadLetter,
    ParkGroup,
    GiveBack,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Group {
    Serial,
    Unordered,
}

impl std::fmt::Display for PoolChange {
    /// What was named, for the audit.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut named = Vec::new();
        let mut add = |name: &str, value: Option<String>| {
            named.extend(value.map(|value| format!("{name}={value}")));
        };
        let or_none = |value: &Option<Option<f64>>| {
            value.map(|value| value.map_or("none".to_owned(), |value| value.to_string()))
        };
        add("concurrency", self.concurrency.map(|value| value.to_string()));
        add("capacity", self.capacity.map(|value| value.to_string()));
        add("groupCapacity", self.group_capacity.map(|value| value.to_string()));
        add("groupLatencyMillis", or_none(&self.group_latency_millis.map(|it| it.map(|it| it as f64))));
        add("ratePerSecond", or_none(&self.rate_per_second));
        add("groupRatePerSecond", or_none(&self.group_rate_per_second));
        add("attempts", self.attempts.map(|value| value.to_string()));
        add("backoffMillis", self.backoff_millis.map(|value| value.to_string()));
        add("backoffMaxMillis", self.backoff_max_millis.map(|value| value.to_string()));
        add("exhausted", self.exhausted.map(|value| format!("{value:?}")));
        add("giveBackMillis", self.give_back_millis.map(|value| value.to_string()));
        add("ungrouped", self.ungrouped.map(|value| format!("{value:?}")));
        add("affinity", self.affinity.map(|value| value.to_string()));
        f.write_str(&named.join(" "))
    }
}

impl PoolChange {
    fn apply(self, to: &PoolSettings) -> PoolSettings {
        let mut pool = to.clone();
        pool.concurrency = self.concurrency.unwrap_or(pool.concurrency);
        pool.capacity = self.capacity.unwrap_or(pool.capacity);
        pool.group_capacity = self.group_capacity.unwrap_or(pool.group_capacity.min(pool.capacity));
        if let Some(latency) = self.group_latency_millis {
            pool.group_latency = latency.map(Duration::from_millis);
        }
        pool.rate_per_second = self.rate_per_second.unwrap_or(pool.rate_per_second);
        pool.group_rate_per_second = self.group_rate_per_second.unwrap_or(pool.group_rate_per_second);
        pool.attempts = self.attempts.unwrap_or(pool.attempts);
        pool.backoff = self.backoff_millis.map_or(pool.backoff, Duration::from_millis);
        pool.backoff_max = self.backoff_max_millis.map_or(pool.backoff_max, Duration::from_millis);
        let before = match pool.exhausted {
            Exhausted::GiveBack(after) => after,
            Exhausted::DeadLetter | Exhausted::ParkGroup => Duration::from_secs(30),
        };
        let after = self.give_back_millis.map_or(before, Duration::from_millis);
        pool.exhausted = match (self.exhausted, pool.exhausted) {
            (Some(AfterLast::DeadLetter), _) => Exhausted::DeadLetter,
            (Some(AfterLast::ParkGroup), _) => Exhausted::ParkGroup,
            (Some(AfterLast::GiveBack), _) | (None, Exhausted::GiveBack(_)) => Exhausted::GiveBack(after),
            (None, same) => same,
        };
        pool.ungrouped = match self.ungrouped {
            Some(Group::Serial) => Ungrouped::Serial,
            Some(Group::Unordered) => Ungrouped::Unordered,
            None => pool.ungrouped,
        };
        pool.affinity = self.affinity.unwrap_or(pool.affinity);
        pool
    }
}

async fn put(
    State(service): State<Service>,
    Path(code): Path<String>,
    Json(change): Json<PoolChange>,
) -> Result<(StatusCode, Extension<Detail>, axum::Json<Pool>), Problem> {
    if let Some(wrong) = wrong_code(&code) {
        return Err(Problem::unprocessable(format!("{code:?} {wrong}")));
    }
    let detail = Detail(change.to_string());
    let config = service.config();
    let status = match service.router().pool_view(&code) {
        Ok(view) => {
            let settings = change.apply(&view.settings);
            check(&service, &settings)?;
            service.router().change_pool(&code, settings)?;
            StatusCode::OK
        }
        Err(RouterError::NoSuchPool(_)) => {
            let settings = change.apply(&config.pool_defaults);
            check(&service, &settings)?;
            service.router().add_pool(&code, settings)?;
            StatusCode::CREATED
        }
        Err(error) => return Err(error.into()),
    };
    Ok((status, Extension(detail), view(&service, &code)?))
}

/// What a configuration would have refused as well.
fn check(service: &Service, settings: &PoolSettings) -> Result<(), Problem> {
    if !settings.is_in_order_on(service.config().queue.ungrouped) {
        let detail = "ungrouped cannot be serial while laneway.queue.ungrouped is unordered";
        return Err(Problem::unprocessable(detail));
    }
    Ok(())
}
