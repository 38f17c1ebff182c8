//! What stands before every route: who may come in, how long a request may take, and that every refusal is a problem.
//!
//! Requests come from `server.rs` and go on to the handlers; answers come back the same way.
//!
//! - **Token.** Compared in constant time, by digest. Without one the API is bound to loopback, and a page in a browser on the same machine is the stranger to
//!   keep out: a request that names another origin, or a host that is not this machine (a name that was bent to point here), is refused. No
//!   answer carries a CORS header, so a browser shows none of them to other pages. The other stranger is a message whose target is this API: the router would
//!   call it from this machine. Its calls are known by the fence that each of them carries and that no message can take away (`mediator/headers.rs`).
//! - **Time.** The body has a deadline from the end of the head on, and the answer has one from there, too, except those of the test targets.
//! - **Audit.** What is let in and changes something, except publishing, is written down with its answer (`audit.rs`), also if nobody waits for that any more.
//! - **Problems.** What axum refuses in plain text (no such route, wrong method, bad query) is put into problem details.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use http_body::{Body as HttpBody, Frame, SizeHint};
use ring::digest;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::problem::{MEDIA_TYPE, Problem};
use crate::audit::{Audit, HUNG_UP};
use crate::mediator::headers::ATTEMPT;
use crate::service::Service;

/// As much of a foreign refusal is repeated.
const REFUSAL_BYTES_MAX: usize = 4 * 1024;

/// The middleware.
pub(super) async fn guard(State(service): State<Service>, request: Request, next: Next) -> Response {
    let http = &service.config().http;
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let token = http.admin_token.as_ref().map(|token| token.expose());
    let is_deed = is_deed(&method, &path);
    let shown = percent_encoding::percent_decode_str(&path).decode_utf8_lossy();
    if let Err(problem) = admit(token, request.headers(), request.uri()) {
        let response = problem.into_response();
        if is_deed {
            Audit::refused(method.as_str(), &shown, response.status().as_u16());
        }
        return response;
    }
    let who = if token.is_some() { "token" } else { "loopback" };
    let mut entry = is_deed.then(|| Entry {
        audit: service.audit(),
        who,
        method: method.as_str(),
        path: &shown,
        detail: None,
        status: HUNG_UP,
    });
    let response = answer(&service, request, next, &path).await;
    if let Some(entry) = &mut entry {
        entry.detail = response.extensions().get::<Detail>().map(|detail| detail.0.clone());
        entry.status = response.status().as_u16();
    }
    response
}

/// An entry of the audit. Written when it is dropped, because a client that hangs up takes the request with it, and what it asked for may be done by then.
struct Entry<'a> {
    audit: &'a Audit,
    who: &'static str,
    method: &'a str,
    path: &'a str,
    detail: Option<String>,
    status: u16,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.audit.add(self.who, self.method, self.path, self.detail.take(), self.status);
    }
}

/// What a handler adds to the entry of the audit, where the path does not say it all.
#[derive(Clone)]
pub(super) struct Detail(pub(super) String);

/// Whether a request is an operator's doing.
fn is_deed(method: &axum::http::Method, path: &str) -> bool {
    let changes = !matches!(method.as_str(), "GET" | "HEAD" | "OPTIONS");
    changes && path != "/api/messages" && !is_target(path)
}

async fn answer(service: &Service, request: Request, next: Next, path: &str) -> Response {
    let http = &service.config().http;
    let (head, body) = request.into_parts();
    let request = Request::from_parts(head, Body::new(Timed::new(body, http.body_timeout)));
    let answering = AssertUnwindSafe(next.run(request)).catch_unwind();
    let is_target = is_target(path);
    let answer = if is_target { Ok(answering.await) } else { timeout(http.request_timeout, answering).await };
    match answer {
        Ok(Ok(response)) => as_problem(response, path).await,
        Ok(Err(_)) => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the request met a bug of the service")
            .into_response(),
        Err(_) => {
            let detail = format!("no answer within {:?}", http.request_timeout);
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).into_response()
        }
    }
}

fn is_target(path: &str) -> bool {
    path.starts_with("/api/test/")
}

/// Whether a route shows or changes nothing that is anybody's secret.
fn is_open(path: &str) -> bool {
    path.starts_with("/health/")
        || path == "/metrics"
        || path == "/openapi.json"
        || is_target(path)
        || super::dashboard::is_asset(path)
}

fn admit(token: Option<&str>, headers: &HeaderMap, uri: &Uri) -> Result<(), Problem> {
    let forbidden = |detail: &str| Err(Problem::new(StatusCode::FORBIDDEN, detail));
    let text = |name| headers.get(name).map(|value: &axum::http::HeaderValue| value.to_str().unwrap_or("?"));
    let host = text(header::HOST).or_else(|| uri.authority().map(|authority| authority.as_str()));
    if let Some(origin) = text(header::ORIGIN)
        && origin.split_once("://").map(|(_, authority)| authority) != host
    {
        return forbidden("requests from pages of other origins are not answered");
    }
    let Some(token) = token else {
        if headers.contains_key(ATTEMPT) && !is_target(uri.path()) {
            return forbidden(
                "this is the call of a router on behalf of a message (laneway-attempt); without a token (laneway.http.admin-token) messages reach nothing here but the test targets",
            );
        }
        return match host.is_none_or(is_this_machine) {
            true => Ok(()),
            false => forbidden(
                "without a token only requests to this machine by its own name are answered: localhost, or its address",
            ),
        };
    };
    if is_open(uri.path()) {
        return Ok(());
    }
    let given = text(header::AUTHORIZATION).and_then(|value| value.split_once(' '));
    let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    match given {
        Some((_, given)) if same(given.trim(), token) => Ok(()),
        Some(_) => Err(Problem::new(StatusCode::UNAUTHORIZED, "the token is not the right one")),
        None => {
            Err(Problem::new(StatusCode::UNAUTHORIZED, "this needs `Authorization: Bearer <admin token>`"))
        }
    }
}

/// `localhost`, or an address: neither can be made to mean another machine by whoever answers for names.
fn is_this_machine(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || bare.parse::<std::net::IpAddr>().is_ok()
}

/// Whether two texts are the same, in a time that tells nothing about where they differ.
fn same(one: &str, other: &str) -> bool {
    let digest = |text: &str| digest::digest(&digest::SHA256, text.as_bytes());
    let (one, other) = (digest(one), digest(other));
    one.as_ref().iter().zip(other.as_ref()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// Puts what is refused in plain text into problem details. Answers that are JSON were meant as they are.
async fn as_problem(response: Response, path: &str) -> Response {
    let status = response.status();
    let is_error = status.is_client_error() || status.is_server_error();
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let is_ours =
        kind.is_some_and(|kind| kind.starts_with("application/json") || kind.starts_with(MEDIA_TYPE));
    if !is_error || is_ours {
        return response;
    }
    let (mut head, body) = response.into_parts();
    let text = axum::body::to_bytes(body, REFUSAL_BYTES_MAX).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let detail = match status {
        StatusCode::NOT_FOUND => format!("there is nothing at {}", path.escape_debug()),
        StatusCode::METHOD_NOT_ALLOWED => format!("{} does not know this method", path.escape_debug()),
        _ if text.is_empty() => status.canonical_reason().unwrap_or("refused").to_owned(),
        _ => text.into_owned(),
    };
    let problem = Problem::new(status, detail).into_response();
    for name in [header::CONTENT_TYPE, header::CONTENT_LENGTH] {
        head.headers.remove(name);
    }
    let mut answer = problem;
    answer.headers_mut().extend(head.headers);
    answer
}

/// A body that must have come within a time.
pub(super) struct Timed {
    inner: Body,
    until: Pin<Box<Sleep>>,
}

/// The body did not come in time.
#[derive(Debug, thiserror::Error)]
#[error("the body took too long to come")]
pub(super) struct TooSlow;

impl Timed {
    fn new(inner: Body, limit: Duration) -> Self {
        Timed { inner, until: Box::pin(sleep_until(Instant::now() + limit)) }
    }
}

impl HttpBody for Timed {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(frame) => Poll::Ready(frame.map(|frame| frame.map_err(Into::into))),
            Poll::Pending => self.until.as_mut().poll(context).map(|()| Some(Err(TooSlow.into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known_by_its_own_names_only() {
        for host in ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:8080", "[::1]:8080", "[::1]"] {
            assert!(is_this_machine(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:8080", "127.0.0.1.nip.io", "", ":8080", "a:b"] {
            assert!(!is_this_machine(host), "{host}");
        }
    }

    #[test]
    fn tokens_are_the_same_or_not() {
        assert!(same("a", "a") && same("", ""));
        assert!(!same("a", "b") && !same("a", "ab") && !same("a", ""));
    }
}
