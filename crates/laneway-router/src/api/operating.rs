//! What an operator looks at and turns: breakers, warnings, the network ingress, the configuration, health, and one object with everything for `laneway top`.

use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::groups::{GroupDepth, deepest};
use super::input::{Json, Query};
use super::pools::Pool;
use super::problem::Problem;
use super::queues::Source;
use super::route::Route;
use super::{iso_of, most};
use crate::mediator::{BreakerState, MetricsSnapshot};
use crate::message::MediationType;
use crate::router::SourceState;
use crate::service::{ReloadError, Service};

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::get("/api/breakers", breakers, "The targets that were called lately, by name")
            .query("most", "integer", "How many, at most; 1000")
            .gives(200, "[Breaker]"),
        Route::post(
            "/api/breakers/reset",
            reset,
            "Closes a target's breaker and ends its cool-down; who waits for it tries at once",
        )
        .takes("BreakerReset")
        .gives(200, "BreakerReset"),
        Route::get("/api/warnings", warnings, "What an operator should know, the newest first")
            .query("most", "integer", "How many, at most; 100")
            .gives(200, "[Warning]"),
        Route::delete("/api/warnings", forget_warnings, "Forgets all warnings").gives(200, "Purged"),
        Route::get("/api/ingress", ingress, "The network ingress and its partitions").gives(200, "Ingress"),
        Route::get("/api/stats", stats, "Everything at a glance; counters are totals since the start")
            .gives(200, "Stats"),
        Route::get(
            "/api/config",
            config,
            "The effective configuration with the origin of each value; secrets are hidden",
        )
        .gives(200, "[ConfigValue]"),
        Route::post(
            "/api/config/reload",
            reload,
            "Reads the configuration again and applies what can be applied",
        )
        .gives(200, "Reloaded")
        .gives(422, "Problem"),
        Route::get("/health/live", live, "Whether the process answers").gives(200, "Health").open(),
        Route::get("/health/ready", ready, "Whether messages are taken and every source answers")
            .gives(200, "Health")
            .gives(503, "Problem")
            .open(),
    ]
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Most {
    most: Option<usize>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Breaker {
    target: String,
    state: &'static str,
    calls: usize,
    failures: usize,
    open_for_millis: Option<u64>,
    cooling_for_millis: Option<u64>,
}

async fn breakers(State(service): State<Service>, Query(asked): Query<Most>) -> axum::Json<Vec<Breaker>> {
    let all = service.mediators().breakers().list(std::time::Instant::now());
    let millis = |time: Option<std::time::Duration>| time.map(|time| time.as_millis() as u64);
    let breakers = all.into_iter().take(most(asked.most, 1_000)).map(|(target, status)| Breaker {
        target,
        state: match status.state {
            BreakerState::Closed => "closed",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "halfOpen",
        },
        calls: status.calls,
        failures: status.failures,
        open_for_millis: millis(status.open_for),
        cooling_for_millis: millis(status.cooling_for),
    });
    axum::Json(breakers.collect())
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Reset {
    target: String,
}

async fn reset(
    State(service): State<Service>,
    Json(asked): Json<Reset>,
) -> Result<axum::Json<Reset>, Problem> {
    match service.reset_breaker(&asked.target) {
        true => Ok(axum::Json(asked)),
        false => Err(Problem::not_found(format!(
            "no target {:?} was called lately; GET /api/breakers names them",
            asked.target
        ))),
    }
}

#[derive(Debug, Serialize)]
struct Warning {
    number: u64,
    about: &'static str,
    text: String,
    at: String,
    count: u64,
}

async fn warnings(State(service): State<Service>, Query(asked): Query<Most>) -> axum::Json<Vec<Warning>> {
    let newest = service.router().warnings().newest(most(asked.most, 100));
    let warning = |warning: crate::warnings::Warning| Warning {
        number: warning.number,
        about: warning.about,
        text: warning.text,
        at: iso_of(warning.at),
        count: warning.count,
    };
    axum::Json(newest.into_iter().map(warning).collect())
}

async fn forget_warnings(State(service): State<Service>) -> axum::Json<Value> {
    axum::Json(json!({ "purged": service.router().warnings().clear() }))
}

#[derive(Debug, Serialize)]
struct Ingress {
    enabled: bool,
    address: Option<String>,
    #[serde(flatten)]
    stats: Option<crate::ingress::Stats>,
}

fn ingress_of(service: &Service) -> Ingress {
    let stats = service.ingress_stats();
    Ingress {
        enabled: stats.is_some(),
        address: service.ingress_address().map(|address| address.to_string()),
        stats,
    }
}

async fn ingress(State(service): State<Service>) -> axum::Json<Ingress> {
    axum::Json(ingress_of(&service))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Stats {
    at: String,
    uptime_millis: u64,
    closing: bool,
    held: usize,
    pools: Vec<Pool>,
    deepest_groups: Vec<GroupDepth>,
    sources: Vec<Source>,
    mediators: Mediators,
    ingress: Ingress,
    warnings: usize,
}

#[derive(Debug, Serialize)]
struct Mediators {
    http: Attempts,
    simulated: Attempts,
    sink: Attempts,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Attempts {
    done: u64,
    waits: u64,
    again: u64,
    finals: u64,
    not_sent: u64,
}

impl From<MetricsSnapshot> for Attempts {
    fn from(counted: MetricsSnapshot) -> Self {
        let MetricsSnapshot { done, waits, again, finals, not_sent, .. } = counted;
        Attempts { done, waits, again, finals, not_sent }
    }
}

async fn stats(State(service): State<Service>) -> Result<axum::Json<Stats>, Problem> {
    let router = service.router();
    Ok(axum::Json(Stats {
        at: iso_of(std::time::SystemTime::now()),
        uptime_millis: service.uptime().as_millis() as u64,
        closing: service.is_closing(),
        held: service.held(),
        pools: router.pools().into_iter().map(Pool::from).collect(),
        deepest_groups: deepest(&service, None, 20)?,
        sources: router.sources().await.into_iter().map(Source::from).collect(),
        mediators: Mediators {
            http: service.mediators().metrics(MediationType::Http).into(),
            simulated: service.mediators().metrics(MediationType::Simulated).into(),
            sink: service.mediators().metrics(MediationType::Sink).into(),
        },
        ingress: ingress_of(&service),
        warnings: router.warnings().len(),
    }))
}

#[derive(Debug, Serialize)]
struct ConfigValue {
    path: String,
    value: String,
    origin: String,
}

async fn config(State(service): State<Service>) -> axum::Json<Vec<ConfigValue>> {
    let config = service.config();
    let value = |it: &laneway_config::Effective| ConfigValue {
        path: it.path.clone(),
        value: it.value.clone(),
        origin: it.origin.clone(),
    };
    axum::Json(config.effective().iter().map(value).collect())
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Reloaded {
    changed: Vec<String>,
    needs_restart: Vec<String>,
}

async fn reload(State(service): State<Service>) -> Result<axum::Json<Reloaded>, Problem> {
    match service.reload_layers().await {
        Ok(done) => Ok(axum::Json(Reloaded { changed: done.changed, needs_restart: done.needs_restart })),
        Err(error) => {
            let errors = match &error {
                ReloadError::Config(error) => error.problems(),
                ReloadError::Impossible(problems) => problems.clone(),
            };
            let errors: Vec<Value> = errors.into_iter().map(|detail| json!({ "detail": detail })).collect();
            let detail = format!("nothing was changed: {} problems", errors.len());
            Err(Problem::unprocessable(detail).with_errors(errors))
        }
    }
}

async fn live() -> axum::Json<Value> {
    axum::Json(json!({ "status": "live" }))
}

async fn ready(State(service): State<Service>) -> Result<axum::Json<Value>, Problem> {
    let unready = |detail: String| Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail));
    if service.is_closing() {
        return unready("the service is shutting down".to_owned());
    }
    for source in service.router().source_states() {
        // One that stops is about to go at somebody's word: nothing is wrong with it.
        if !matches!(source.state, SourceState::Connected | SourceState::Stopping) {
            let trouble = source.trouble.unwrap_or_else(|| "is being opened".to_owned());
            return unready(format!("{}: {trouble}", source.name));
        }
    }
    Ok(axum::Json(json!({ "status": "ready" })))
}
