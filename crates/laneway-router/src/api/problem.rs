//! Errors as the API gives them: problem details (RFC 9457), always.
//!
//! Handlers return a [`Problem`]; what axum and hyper refuse by themselves is turned into one by `guard.rs`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;

use crate::router::RouterError;
use crate::source::SourceError;
use crate::source::embedded::Refusal;

/// The media type of a problem.
pub(super) const MEDIA_TYPE: &str = "application/problem+json";

/// What went wrong, for a person and for a program.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Problem {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: String,
    /// One for each thing that is wrong, where there may be several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<Value>,
    /// How many messages were seeded before it went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    seeded: Option<u64>,
    #[serde(skip)]
    retry_after: Option<u32>,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Problem {
            r#type: "about:blank",
            title: status.canonical_reason().unwrap_or("Error"),
            status: status.as_u16(),
            detail: detail.into(),
            errors: Vec::new(),
            seeded: None,
            retry_after: None,
        }
    }

    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(super) fn not_found(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::NOT_FOUND, detail)
    }

    pub(super) fn conflict(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::CONFLICT, detail)
    }

    /// Well-formed, and not to be had.
    pub(super) fn unprocessable(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
    }

    pub(super) fn with_errors(mut self, errors: Vec<Value>) -> Self {
        self.errors = errors;
        self
    }

    /// So many messages had been seeded by then, and stay.
    pub(super) fn after_seeding(mut self, seeded: u64) -> Self {
        self.detail = format!("{}; {seeded} messages had been seeded by then", self.detail);
        self.seeded = Some(seeded);
        self
    }

    fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let retry_after = self.retry_after;
        let mut response = (status, Json(self)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<RouterError> for Problem {
    fn from(error: RouterError) -> Self {
        let detail = error.to_string();
        match error {
            RouterError::NoSuchPool(_) => Problem::not_found(detail),
            RouterError::BadSettings(bad) => {
                let errors = bad.iter().map(|bad| {
                    serde_json::json!({ "setting": bad.setting, "value": bad.value, "detail": bad.right })
                });
                Problem::unprocessable(detail).with_errors(errors.collect())
            }
            RouterError::NotDrained { .. } => Problem::new(StatusCode::GATEWAY_TIMEOUT, detail),
            RouterError::Closing => Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail),
            RouterError::PoolExists(_)
            | RouterError::TooManyPools
            | RouterError::DefaultPool
            | RouterError::Draining(_) => Problem::conflict(detail),
        }
    }
}

impl From<SourceError> for Problem {
    fn from(error: SourceError) -> Self {
        let detail = error.to_string();
        match error {
            SourceError::Unavailable(_) | SourceError::Closed => {
                Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).retry_after(1)
            }
            SourceError::Broken(_) => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, detail),
        }
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let detail = refusal.to_string();
        match refusal {
            Refusal::Full { .. } => Problem::new(StatusCode::TOO_MANY_REQUESTS, detail).retry_after(1),
            Refusal::TooMany { .. } | Refusal::TooLong { .. } => {
                Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
            }
            Refusal::LongName { .. } | Refusal::ControlCharacters { .. } => Problem::unprocessable(detail),
            Refusal::Failed(error) => error.into(),
        }
    }
}
