//! `/`: the dashboard, out of the program itself, and what it reads: `/api/history` and, live, `/api/stream`.
//!
//! The page is plain HTML, CSS and modules of JavaScript in `dashboard/`, with nothing from elsewhere: the browser is told (Content-Security-Policy) to load from and to
//! talk to this address only. The files need no token, since there is nothing in them; what they show does.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::problem::Problem;
use super::route::Route;
use crate::history::{History, Subscription};
use crate::service::Service;

/// A file of the page.
pub(super) struct Asset {
    path: &'static str,
    media_type: &'static str,
    text: &'static str,
}

macro_rules! asset {
    ($path:literal, $file:literal, $media_type:expr) => {
        Asset { path: $path, media_type: $media_type, text: include_str!(concat!("../dashboard/", $file)) }
    };
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// All files of the page.
const ASSETS: &[Asset] = &[
    asset!("/", "index.html", "text/html; charset=utf-8"),
    asset!("/dashboard/style.css", "style.css", "text/css; charset=utf-8"),
    asset!("/dashboard/icon.svg", "icon.svg", "image/svg+xml"),
    asset!("/dashboard/app.js", "app.js", SCRIPT),
    asset!("/dashboard/api.js", "api.js", SCRIPT),
    asset!("/dashboard/page.js", "page.js", SCRIPT),
    asset!("/dashboard/charts.js", "charts.js", SCRIPT),
    asset!("/dashboard/overview.js", "overview.js", SCRIPT),
    asset!("/dashboard/group.js", "group.js", SCRIPT),
    asset!("/dashboard/pools.js", "pools.js", SCRIPT),
    asset!("/dashboard/dead_letters.js", "dead_letters.js", SCRIPT),
    asset!("/dashboard/operating.js", "operating.js", SCRIPT),
    asset!("/dashboard/flows.js", "flows.js", SCRIPT),
];

/// Nothing from elsewhere, nothing inline, in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Whether a path is one of the page's files.
pub(super) fn is_asset(path: &str) -> bool {
    ASSETS.iter().any(|asset| asset.path == path)
}

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::get("/api/history", history, "The last minutes, a number per second; in fixed memory")
            .gives(200, "History"),
        Route::get("/api/stream", stream, "The same, second by second as it comes: server-sent events")
            .gives_text(200, "text/event-stream"),
    ]
}

/// The files of the page. They are for browsers, and no part of the described API.
pub(super) fn pages() -> axum::Router<Service> {
    ASSETS.iter().fold(axum::Router::new(), |router, asset| {
        router.route(asset.path, axum::routing::get(move || async move { file(asset) }))
    })
}

fn file(asset: &Asset) -> Response {
    let headers: [(HeaderName, HeaderValue); 5] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(asset.media_type)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // The next version may have other files by the same names.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, asset.text).into_response()
}

fn of(service: &Service) -> Result<&Arc<History>, Problem> {
    let off = || Problem::not_found("there is no dashboard: laneway.dashboard.enabled is false");
    service.history().ok_or_else(off)
}

async fn history(State(service): State<Service>) -> Result<Response, Problem> {
    let headers = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok((headers, of(&service)?.whole()).into_response())
}

async fn stream(State(service): State<Service>) -> Result<Response, Problem> {
    let full = || {
        let detail = match service.is_closing() {
            true => "the service is shutting down",
            false => "as many pages as laneway.dashboard.subscribers-max allows are open; close one of them",
        };
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    };
    let subscription = of(&service)?.subscribe().ok_or_else(full)?;
    let first = futures_util::stream::iter([Ok(Bytes::from_static(b"retry: 1000\n\n"))]);
    let rest = futures_util::stream::unfold(subscription, next);
    let body = Body::from_stream(futures_util::StreamExt::chain(first, rest));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    Ok((headers, body).into_response())
}

async fn next(
    mut subscription: Subscription,
) -> Option<(Result<Bytes, std::convert::Infallible>, Subscription)> {
    let event = subscription.next().await?;
    Some((Ok(event), subscription))
}
