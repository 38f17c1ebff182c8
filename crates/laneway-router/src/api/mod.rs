//! The HTTP API: one file per resource, each with its handlers and its routes.
//!
//! `service.rs` starts it and is what it works on; nothing here keeps anything of its own. A request comes in through `server.rs` (connections and their
//! deadlines), passes `guard.rs` (token, time, problems), is read by `input.rs`, answered by a handler, and refused by `problem.rs`.
//!
//! | file | routes |
//! |---|---|
//! | `messages.rs` | publish, seed |
//! | `pools.rs` | pools |
//! | `groups.rs` | groups, in-flight |
//! | `queues.rs` | sources, dead letters, quarantine |
//! | `operating.rs` | breakers, warnings, ingress, stats, configuration, health |
//! | `metrics.rs` | metrics |
//! | `openapi.rs` | the description of all of them, made from the lists in the other files (`route.rs`) |

mod server;

mod guard;
mod input;
mod problem;

mod messages;
mod pools;

mod groups;
mod queues;

mod operating;

mod metrics;

mod openapi;
mod route;

use std::time::SystemTime;

use axum::Router;
use axum::middleware::from_fn_with_state;

pub(crate) use server::{Server, serve};

use crate::service::Service;
use crate::source::embedded::{BATCH_MAX, EmbeddedQueue};
use problem::Problem;
use route::Route;

/// All routes of our own; those of the test targets are beside them.
fn all(has_targets: bool) -> Vec<Route> {
    let mut all = Vec::new();
    all.extend(messages::routes());
    all.extend(pools::routes());
    all.extend(groups::routes());
    all.extend(queues::routes());
    all.extend(operating::routes());
    all.extend(metrics::routes());
    let document = openapi::document(&all, has_targets);
    all.extend(openapi::routes(document));
    all
}

/// The whole API behind its guard.
fn routes(service: Service) -> Router {
    let mut router = Router::new();
    for route in all(service.targets().is_some()) {
        router = router.route(route.path, route.handler);
    }
    let mut router = router.with_state(service.clone());
    if let Some(targets) = service.targets() {
        router = router.nest("/api/test", targets.router());
    }
    let unknown = |request: axum::extract::Request| async move {
        Problem::not_found(format!("there is nothing at {}", request.uri().path().escape_debug()))
    };
    router.fallback(unknown).layer(from_fn_with_state(service, guard::guard))
}

/// A queue by name. Without one it is the only queue, or, among several, `default`.
fn queue_of(service: &Service, name: Option<&str>) -> Result<(String, EmbeddedQueue), Problem> {
    let names = service.queue_names();
    let name = match (name, names.as_slice()) {
        (Some(name), _) => name,
        (None, [only]) => only,
        (None, _) => "default",
    };
    if names.is_empty() {
        let detail = "there is no embedded queue: laneway.queue.queues has no names; publish to the broker itself, for example with `laneway send --to`";
        return Err(Problem::not_found(detail.to_owned()));
    }
    let unknown = || {
        let names = names.join(", ");
        Problem::not_found(format!("there is no queue {name:?}; there are {names} (laneway.queue.queues)"))
    };
    let queue = service.queue(name).ok_or_else(unknown)?;
    Ok((name.to_owned(), queue))
}

/// How many are wanted: as said, or as usual, and never more than anybody could read.
fn most(asked: Option<usize>, usual: usize) -> usize {
    asked.unwrap_or(usual).min(BATCH_MAX)
}

/// A time in milliseconds since 1970, as ISO 8601 writes it.
fn iso(millis: u64) -> String {
    iso_of(SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(millis))
}

fn iso_of(time: SystemTime) -> String {
    let format = &time::format_description::well_known::Rfc3339;
    let millis = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    let time = time::OffsetDateTime::from_unix_timestamp_nanos(millis as i128 * 1_000_000);
    time.ok().and_then(|time| time.format(format).ok()).unwrap_or_default()
}
