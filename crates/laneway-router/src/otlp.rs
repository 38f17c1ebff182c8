//! Exports spans to a collector: OTLP over HTTP, in its JSON form, over the same client that calls targets.
//!
//! Pools put finished spans into a bounded queue (`trace.rs`); one task takes them out, in batches, and posts them to `<endpoint>/v1/traces`. A collector that is away is
//! tried a few times; then the batch is dropped and counted. Nothing here can slow a message down.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::config::Telemetry;
use crate::mediator::connect::{Timed, tls};
use crate::trace::Span;

/// Spans per request.
const BATCH_MAX: usize = 512;

/// How long a batch gathers.
const GATHER: Duration = Duration::from_secs(1);

/// How long a request may take, and how often it is tried.
const LIMIT: Duration = Duration::from_secs(10);
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_millis(250);

/// What the exporter has counted.
#[derive(Debug, Default)]
pub struct Exported {
    /// Spans that the collector has taken.
    pub taken: AtomicU64,
    /// Spans that it has not.
    pub failed: AtomicU64,
}

/// The task that exports.
#[derive(Debug)]
pub(crate) struct Exporter {
    close: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Exporter {
    /// Begins to export what comes out of a queue.
    pub(crate) fn start(settings: Telemetry, spans: mpsc::Receiver<Span>, counted: Arc<Exported>) -> Self {
        let (close, closing) = oneshot::channel();
        let waiting =
            Waiting { spans, closing: Some(closing), batch: Vec::with_capacity(BATCH_MAX), counted };
        Exporter { close, task: tokio::spawn(export(settings, waiting)) }
    }

    /// Takes no more spans and exports what is there, for so long at most; what is left then has failed.
    pub(crate) async fn end(self, limit: Duration) {
        let Exporter { close, mut task } = self;
        drop(close);
        if tokio::time::timeout(limit, &mut task).await.is_err() {
            task.abort();
            // Until it is gone, and what it had is counted.
            let _ = task.await;
        }
    }
}

/// Spans that the collector does not have yet. Those that are there when it is dropped are counted as failed.
struct Waiting {
    spans: mpsc::Receiver<Span>,
    /// Ends when no more are to be taken; nothing once it has.
    closing: Option<oneshot::Receiver<()>>,
    batch: Vec<Span>,
    counted: Arc<Exported>,
}

impl Waiting {
    /// Adds what there is to the batch, or the first that comes; 0 if none will come.
    async fn take(&mut self) -> usize {
        let room = BATCH_MAX - self.batch.len();
        if let Some(closing) = &mut self.closing {
            tokio::select! {
                taken = self.spans.recv_many(&mut self.batch, room) => return taken,
                _ = closing => {}
            }
            self.closing = None;
            self.spans.close();
        }
        self.spans.recv_many(&mut self.batch, room).await
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.spans.close();
        let left = self.batch.len() + self.spans.len();
        self.counted.failed.fetch_add(left as u64, Relaxed);
    }
}

/// Exports until no more spans come, then what is left.
async fn export(settings: Telemetry, mut waiting: Waiting) {
    let Some(endpoint) = &settings.endpoint else { return };
    let connector = Timed::new(tls(&[]), LIMIT);
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .build(connector);
    while waiting.take().await > 0 {
        // More come soon, and a request costs the same for one and for five hundred.
        let deadline = tokio::time::Instant::now() + GATHER;
        while waiting.batch.len() < BATCH_MAX {
            match tokio::time::timeout_at(deadline, waiting.take()).await {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
        }
        let body = Bytes::from(document(&settings.service_name, &waiting.batch).to_string());
        let mut taken = false;
        for attempt in 1..=ATTEMPTS {
            let answer = tokio::time::timeout(LIMIT, client.request(request(endpoint, &body))).await;
            let again = match answer {
                Ok(Ok(answer)) if answer.status().is_success() => {
                    taken = true;
                    false
                }
                Ok(Ok(answer)) => {
                    tracing::warn!(status = answer.status().as_u16(), "the collector refused spans");
                    is_worth_another(answer.status())
                }
                Ok(Err(error)) => {
                    tracing::warn!(%error, "the collector cannot be reached");
                    true
                }
                Err(_) => true,
            };
            if !again || attempt == ATTEMPTS {
                break;
            }
            tokio::time::sleep(PAUSE * 2_u32.pow(attempt - 1)).await;
        }
        let counter = if taken { &waiting.counted.taken } else { &waiting.counted.failed };
        counter.fetch_add(waiting.batch.len() as u64, Relaxed);
        waiting.batch.clear();
    }
}

fn request(endpoint: &Uri, body: &Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body.clone()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = endpoint.clone();
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request
}

/// As the protocol says: these ask for another attempt, all others for none.
fn is_worth_another(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 502 | 503 | 504)
}

fn document(service: &str, spans: &[Span]) -> Value {
    let resource = json!([
        text("service.name", service),
        text("service.version", env!("CARGO_PKG_VERSION")),
        text("telemetry.sdk.name", "laneway"),
        text("telemetry.sdk.language", "rust"),
    ]);
    let scope = json!({ "name": "laneway", "version": env!("CARGO_PKG_VERSION") });
    let spans: Vec<Value> = spans.iter().map(of).collect();
    json!({ "resourceSpans": [{
        "resource": { "attributes": resource },
        "scopeSpans": [{ "scope": scope, "spans": spans }],
    }] })
}

fn text(name: &str, value: &str) -> Value {
    json!({ "key": name, "value": { "stringValue": value } })
}

/// Ids are hexadecimal and times are texts: JSON's numbers are too short for them.
fn of(span: &Span) -> Value {
    const INTERNAL: u8 = 1;
    const CLIENT: u8 = 3;
    const CONSUMER: u8 = 5;
    let kind = match span.name {
        "message" => CONSUMER,
        _ if span.is_call => CLIENT,
        _ => INTERNAL,
    };
    let status = match &span.error {
        Some(error) => json!({ "code": 2, "message": error }),
        None => json!({}),
    };
    let mut document = json!({
        "traceId": format!("{:032x}", span.trace),
        "spanId": format!("{:016x}", span.id),
        "name": span.name,
        "kind": kind,
        "startTimeUnixNano": span.began.to_string(),
        "endTimeUnixNano": span.ended.to_string(),
        "attributes": span.attributes.iter().map(|(name, value)| text(name, value)).collect::<Vec<_>>(),
        "status": status,
    });
    if span.parent != 0 {
        document["parentSpanId"] = format!("{:016x}", span.parent).into();
    }
    document
}
