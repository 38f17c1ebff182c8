//! How handlers get what was sent: bodies and queries, each refusal a [`Problem`].

use std::error::Error;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;

use super::guard::TooSlow;
use super::problem::Problem;
use crate::service::Service;

/// A body of JSON, whole and unread.
pub(super) struct Raw(pub(super) Bytes);

/// A body of JSON that is a `T`; without a body, `T`'s default.
pub(super) struct Json<T>(pub(super) T);

/// The query as a `T`.
pub(super) struct Query<T>(pub(super) T);

impl FromRequest<Service> for Raw {
    type Rejection = Problem;

    async fn from_request(request: Request, service: &Service) -> Result<Self, Problem> {
        let (head, body) = request.into_parts();
        let bytes = collect(body, service.config().http.body_bytes_max).await?;
        if !bytes.is_empty() {
            must_be_json(&head.headers)?;
        }
        Ok(Raw(bytes))
    }
}

impl<T: DeserializeOwned + Default> FromRequest<Service> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, service: &Service) -> Result<Self, Problem> {
        let Raw(bytes) = Raw::from_request(request, service).await?;
        if bytes.is_empty() {
            return Ok(Json(T::default()));
        }
        serde_json::from_slice(&bytes).map(Json).map_err(|error| not_json(&error))
    }
}

impl<T: DeserializeOwned> FromRequestParts<Service> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Service) -> Result<Self, Problem> {
        let query = axum::extract::Query::try_from_uri(&parts.uri);
        query.map(|query| Query(query.0)).map_err(|bad| {
            let text = bad.body_text();
            Problem::bad_request(text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text))
        })
    }
}

/// What is wrong with a text that should have been JSON of a certain shape.
pub(super) fn not_json(error: &serde_json::Error) -> Problem {
    let status = if error.is_data() { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::BAD_REQUEST };
    Problem::new(status, format!("the body: {error}"))
}

/// A page of another origin cannot send this type without asking first, and is not answered when it asks.
fn must_be_json(headers: &HeaderMap) -> Result<(), Problem> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    let kind = kind.split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json")) {
        return Ok(());
    }
    let detail = format!("the content type must be application/json, not {:?}", kind);
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail))
}

async fn collect(body: Body, most: usize) -> Result<Bytes, Problem> {
    axum::body::to_bytes(body, most).await.map_err(|error| {
        let too_long =
            || Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is longer than {most} bytes"));
        match cause(&error) {
            Cause::TooSlow => Problem::new(StatusCode::REQUEST_TIMEOUT, TooSlow.to_string()),
            Cause::TooLong => too_long(),
            Cause::Other => Problem::bad_request(format!("the body could not be read: {error}")),
        }
    })
}

enum Cause {
    TooSlow,
    TooLong,
    Other,
}

fn cause(error: &(dyn Error + 'static)) -> Cause {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<TooSlow>() {
            return Cause::TooSlow;
        }
        if error.is::<http_body_util::LengthLimitError>() {
            return Cause::TooLong;
        }
        next = error.source();
    }
    Cause::Other
}
