//! `HTTP`: posts a message to its target and lets the table judge what comes back.
//!
//! [`Mediators`](super::Mediators) hands over a [`Call`]. On its way it passes
//!
//! 1. `target.rs`: is it a URL, and on the allow-list? If not, it is final.
//! 2. `breaker.rs`: does the target answer, and want to be called? If not, it waits.
//! 3. the pool of connections, HTTP/1.1 or HTTP/2, as TLS has agreed or as `prior_knowledge` says, within the timeouts and body limit;
//! 4. `verdict.rs`: what does the answer mean? The breaker hears it too.
//!
//! What the target sees:
//!
//! ```text
//! POST /orders HTTP/1.1
//! authorization: Bearer <authToken>                             if the message has one
//! content-type: application/json                                unless the message's headers say otherwise
//! webhook-id: order-7-paid                                      the message's id, the same for every attempt
//! webhook-timestamp: 1767355200                                 of this attempt
//! webhook-signature: v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=    if there are secrets, one for each
//! laneway-key: order-7                                          what orders the message, if anything does
//! laneway-sequence: 4711                                        grows along the key
//! laneway-attempt: 1
//! <the message's own headers>
//!
//! <the payload, byte by byte as it was published>               or {"messageId":"order-7-paid"}
//! ```
//!
//! An attempt that runs into its timeout may have been received all the same, and its successor may be on its way while the target still works
//! on it. That is what the last three headers are for: a target that remembers the highest sequence of each key can refuse what comes too late.
//!
//! **Cost.** A request is built with one allocation for the body and one each for the few values that differ between calls. The client hands it to the task
//! of a pooled connection. Nothing is cloned for the sake of a retry: retries belong to the lane, and a client that repeats a POST on its own would
//! send messages twice. (It does repeat what it could not begin to write, because an idle connection had been closed.)

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{
    AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT,
};
use hyper::{Method, Request, Response, Uri};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::CertificateDer;
use tokio::time::{Instant, timeout_at};

use super::breaker::{BreakerSettings, Breakers, Cause, Patience};
use super::connect::{BadCertificate, Timed, certificates, tls};
use super::metrics::Metrics;
use super::signature::Signer;
use super::target::{self, BadTarget, Pattern, Scope};
use super::verdict::{Limits, Observed, Trouble, judge};
use super::{Call, Verdict, headers};

/// How targets are called.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// How long a connection may take to be there, TLS included.
    pub connect_timeout: Duration,
    /// How long an attempt may take, from the first look for a connection to the last byte of the answer.
    pub timeout: Duration,
    /// How much of an answer is read; an answer that is longer is not read to its end, and its connection is not used again.
    pub body_bytes_max: usize,
    /// How many idle connections to a host are kept.
    pub idle_connections_max: usize,
    /// For how long.
    pub idle_timeout: Duration,
    /// Which targets may be called. `None` allows all of them, an empty list none.
    pub allowed: Option<Vec<Pattern>>,
    /// Which of the targets without TLS are spoken to in HTTP/2 without asking. Those with TLS are asked.
    pub prior_knowledge: Vec<Pattern>,
    /// Certificates that are trusted beside those that browsers trust: a company's own. See [`trust_pem`](Self::trust_pem).
    pub trusted: Vec<CertificateDer<'static>>,
    /// What is one target to the breakers.
    pub scope: Scope,
    /// When they open and close.
    pub breaker: BreakerSettings,
    /// What a target may ask for.
    pub limits: Limits,
    /// The token of the lease that the router works under, for the targets to see.
    pub epoch: Option<u64>,
}

impl Default for HttpSettings {
    /// 10 s to connect, 60 s in all, 64 KiB of an answer, all targets.
    fn default() -> Self {
        HttpSettings {
            connect_timeout: Duration::from_secs(10),
            timeout: Duration::from_secs(60),
            body_bytes_max: 64 * 1024,
            idle_connections_max: 1_024,
            idle_timeout: Duration::from_secs(30),
            allowed: None,
            prior_knowledge: Vec::new(),
            trusted: Vec::new(),
            scope: Scope::default(),
            breaker: BreakerSettings::default(),
            limits: Limits::default(),
            epoch: None,
        }
    }
}

impl HttpSettings {
    /// Trusts the certificates of a PEM text as well.
    pub fn trust_pem(&mut self, pem: &[u8]) -> Result<(), BadCertificate> {
        self.trusted.extend(certificates(pem)?);
        Ok(())
    }
}

/// The mediator for `HTTP`. Clones share connections, breakers and counters.
#[derive(Clone)]
pub struct HttpMediator {
    inner: Arc<Inner>,
    /// By its pool, so not in what is shared.
    signer: Signer,
}

struct Inner {
    settings: HttpSettings,
    /// HTTP/1.1, or HTTP/2 if TLS has agreed on it.
    agreed: PooledClient,
    /// HTTP/2 from the first byte.
    prior: PooledClient,
    breakers: Breakers,
    metrics: Metrics,
}

type PooledClient = Client<Timed<HttpsConnector<HttpConnector>>, Full<Bytes>>;

/// A ping on every HTTP/2 connection so often, lest a dead one takes everything that is sent to its host.
const PING_EVERY: Duration = Duration::from_secs(15);

/// No answer needs longer headers than this.
const ANSWER_HEADER_BYTES_MAX: u32 = 64 * 1024;

impl HttpMediator {
    /// With these settings. Needs a tokio runtime when it mediates, not here.
    pub fn new(settings: HttpSettings, signer: Signer) -> Self {
        let inner = Inner {
            agreed: client(&settings, false),
            prior: client(&settings, true),
            breakers: Breakers::new(settings.breaker),
            metrics: Metrics::default(),
            settings,
        };
        HttpMediator { inner: Arc::new(inner), signer }
    }

    /// The same connections, breakers and counters, with the secrets of one pool.
    pub fn with_signer(&self, signer: Signer) -> Self {
        HttpMediator { inner: self.inner.clone(), signer }
    }

    /// What was counted.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// The targets that were called lately.
    pub fn breakers(&self) -> &Breakers {
        &self.inner.breakers
    }

    /// Whether a target is a URL that may be called.
    pub fn check(&self, target: &str) -> Result<(), BadTarget> {
        self.inner.locate(target).map(|_| ())
    }

    /// Makes one attempt.
    pub async fn mediate(&self, call: Call<'_>) -> Verdict {
        let started = Instant::now();
        match self.attempt(call, started).await {
            Ok(verdict) => {
                self.inner.metrics.record(&verdict, Some(started.elapsed()));
                verdict
            }
            Err(verdict) => {
                self.inner.metrics.record(&verdict, None);
                verdict
            }
        }
    }

    /// An error is a verdict without a call.
    async fn attempt(&self, call: Call<'_>, started: Instant) -> Result<Verdict, Verdict> {
        let inner = &*self.inner;
        let refuse = |problem: &dyn std::fmt::Display| Verdict::Final { reason: problem.to_string() };
        let uri = inner.locate(&call.message.mediation_target).map_err(|problem| refuse(&problem))?;
        let name = inner.settings.scope.name(&uri);
        let pass =
            inner.breakers.admit(&name, started.into_std()).map_err(|patience| wait(&name, patience))?;
        let client = inner.client_for(&uri);
        let request = self.request(uri, call).map_err(|problem| refuse(&problem))?;
        let mut seen =
            exchange(client, request, started + inner.settings.timeout, inner.settings.body_bytes_max).await;
        if let Some(token) = &call.message.auth_token {
            seen.hide(token.expose());
        }
        let judgement = judge(seen.observed(), SystemTime::now(), &inner.settings.limits);
        pass.report(judgement.health, judgement.cool_down, Instant::now().into_std());
        Ok(judgement.verdict)
    }

    fn request(&self, uri: Uri, call: Call<'_>) -> Result<Request<Full<Bytes>>, String> {
        let message = call.message;
        let body = match &message.payload {
            Some(payload) => Bytes::copy_from_slice(payload.get().as_bytes()),
            None => Bytes::from(serde_json::json!({ "messageId": message.id }).to_string()),
        };
        let mut all = HeaderMap::with_capacity(16 + message.headers.len());
        all.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        all.insert(USER_AGENT, HeaderValue::from_static(concat!("laneway/", env!("CARGO_PKG_VERSION"))));
        for (name, value) in &message.headers {
            if let Some(problem) = headers::refusal(name, value) {
                return Err(format!("header `{}` {problem}", name.escape_debug()));
            }
            let name: HeaderName = name.parse().expect("checked");
            all.insert(name, HeaderValue::from_str(value).expect("checked"));
        }
        if let Some(token) = &message.auth_token {
            all.insert(AUTHORIZATION, bearer(token.expose())?);
        }
        self.add_fence(&mut all, call);
        self.add_signature(&mut all, &message.id, &body);
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri;
        *request.headers_mut() = all;
        Ok(request)
    }

    fn add_fence(&self, all: &mut HeaderMap, call: Call<'_>) {
        if !call.key.is_empty() {
            all.insert(headers::KEY, encoded(call.key));
        }
        all.insert(headers::SEQUENCE, HeaderValue::from(call.sequence));
        all.insert(headers::ATTEMPT, HeaderValue::from(call.attempt));
        if let Some(traceparent) = call.traceparent {
            let value = HeaderValue::try_from(traceparent.to_string()).expect("digits and hyphens");
            all.insert(headers::TRACEPARENT, value);
        }
        if let Some(epoch) = self.inner.settings.epoch {
            all.insert(headers::EPOCH, HeaderValue::from(epoch));
        }
    }

    fn add_signature(&self, all: &mut HeaderMap, id: &str, body: &[u8]) {
        let id = encoded(id);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let timestamp = HeaderValue::from(now);
        if !self.signer.is_empty() {
            // Both are ASCII by construction.
            let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_owned();
            all.insert(headers::WEBHOOK_SIGNATURE, self.signer.sign(&text(&id), &text(&timestamp), body));
        }
        all.insert(headers::WEBHOOK_ID, id);
        all.insert(headers::WEBHOOK_TIMESTAMP, timestamp);
    }
}

impl std::fmt::Debug for HttpMediator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let HttpMediator { inner, signer } = self;
        f.debug_struct("HttpMediator").field("settings", &inner.settings).field("signer", signer).finish()
    }
}

impl Inner {
    fn locate(&self, text: &str) -> Result<Uri, BadTarget> {
        let uri = target::parse(text)?;
        let is_allowed = |allowed: &Vec<Pattern>| allowed.iter().any(|pattern| pattern.matches(&uri));
        match self.settings.allowed.as_ref().is_none_or(is_allowed) {
            true => Ok(uri),
            false => Err(BadTarget::NotAllowed(Scope::Path.name(&uri))),
        }
    }

    fn client_for(&self, uri: &Uri) -> &PooledClient {
        let is_plain = uri.scheme_str() == Some("http");
        let is_known = || self.settings.prior_knowledge.iter().any(|pattern| pattern.matches(uri));
        if is_plain && is_known() { &self.prior } else { &self.agreed }
    }
}

fn client(settings: &HttpSettings, http2_only: bool) -> PooledClient {
    let connector = Timed::new(tls(&settings.trusted), settings.connect_timeout);
    Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(settings.idle_timeout)
        .pool_max_idle_per_host(settings.idle_connections_max)
        .http1_max_buf_size(ANSWER_HEADER_BYTES_MAX as usize)
        .http2_max_header_list_size(ANSWER_HEADER_BYTES_MAX)
        .http2_keep_alive_interval(PING_EVERY)
        .http2_only(http2_only)
        .build(connector)
}

fn encoded(name: &str) -> HeaderValue {
    HeaderValue::from_str(&headers::encode(name)).expect("encoded for this")
}

fn bearer(token: &str) -> Result<HeaderValue, String> {
    let value = HeaderValue::try_from(["Bearer ", token].concat());
    let mut value = value.map_err(|_| "`authToken` has characters that no header can have".to_owned())?;
    // Keeps it out of debug texts, and out of the compression tables of HTTP/2.
    value.set_sensitive(true);
    Ok(value)
}

fn wait(name: &str, patience: Patience) -> Verdict {
    let reason = match patience.cause {
        Cause::CoolDown => format!("{name} has asked for patience"),
        Cause::Open => format!("the breaker of {name} is open: too many calls failed"),
        Cause::Probe => format!("the breaker of {name} is half open: another call is finding out"),
    };
    Verdict::Wait { delay: patience.delay, reason }
}

/// What was seen of an exchange, in a form that owns it.
enum Seen {
    Answer { status: u16, retry_after: Option<HeaderValue>, body: Bytes, cut: bool },
    Trouble { kind: Trouble, detail: String },
}

impl Seen {
    fn observed(&self) -> Observed<'_> {
        match self {
            Seen::Answer { status, retry_after, body, cut } => {
                let retry_after = retry_after.as_ref().map(HeaderValue::as_bytes);
                Observed::Answer { status: *status, retry_after, body, cut: *cut }
            }
            Seen::Trouble { kind, detail } => Observed::Trouble { kind: *kind, detail },
        }
    }

    /// Takes a secret out of an answer that may be shown: a target that complains may quote what it was sent.
    fn hide(&mut self, secret: &str) {
        // The reason has some hundred characters; what is behind these is not shown.
        const SHOWN_BYTES: usize = 2_048;
        if let Seen::Answer { status, body, .. } = self
            && !(200..300).contains(status)
            && !secret.is_empty()
        {
            let text = String::from_utf8_lossy(&body[..body.len().min(SHOWN_BYTES + secret.len())]);
            if text.contains(secret) {
                *body = text.replace(secret, "(secret)").into();
            }
        }
    }

    fn trouble(kind: Trouble, detail: impl Into<String>) -> Self {
        Seen::Trouble { kind, detail: detail.into() }
    }
}

async fn exchange(
    client: &PooledClient,
    request: Request<Full<Bytes>>,
    until: Instant,
    bytes_max: usize,
) -> Seen {
    match timeout_at(until, client.request(request)).await {
        Err(_) => Seen::trouble(Trouble::Timeout, "no status"),
        Ok(Err(error)) => Seen::trouble(kind_of(&error), innermost(&error)),
        Ok(Ok(response)) => read(response, until, bytes_max).await,
    }
}

async fn read(response: Response<Incoming>, until: Instant, bytes_max: usize) -> Seen {
    let status = response.status();
    let retry_after = response.headers().get(RETRY_AFTER).cloned();
    let answer = |body, cut| Seen::Answer { status: status.as_u16(), retry_after, body, cut };
    let broken = match timeout_at(until, read_body(response.into_body(), bytes_max)).await {
        Ok(Ok((body, cut))) => return answer(body, cut),
        Ok(Err(error)) => Seen::trouble(Trouble::Broken, innermost(&error)),
        Err(_) => Seen::trouble(Trouble::Timeout, "the body did not end"),
    };
    // Only of a success does the body matter; elsewhere the status has said it all.
    if status.is_success() { broken } else { answer(Bytes::new(), true) }
}

/// The body up to the limit, and whether there was more.
async fn read_body(mut body: Incoming, bytes_max: usize) -> Result<(Bytes, bool), hyper::Error> {
    // Most answers are one piece, which is then handed on as it came.
    let mut first = Bytes::new();
    let mut all: Vec<u8> = Vec::new();
    while !body.is_end_stream() {
        let Some(frame) = body.frame().await else { break };
        let Ok(piece) = frame?.into_data() else { continue };
        if first.is_empty() && all.is_empty() {
            first = piece;
        } else {
            if all.is_empty() {
                all.extend_from_slice(&std::mem::take(&mut first));
            }
            all.extend_from_slice(&piece);
        }
        if first.len().max(all.len()) > bytes_max {
            all.truncate(bytes_max);
            first.truncate(bytes_max);
            return Ok((if all.is_empty() { first } else { all.into() }, true));
        }
    }
    Ok((if all.is_empty() { first } else { all.into() }, false))
}

fn kind_of(error: &hyper_util::client::legacy::Error) -> Trouble {
    let is_timeout = |error: &(dyn Error + 'static)| {
        let error = error.downcast_ref::<std::io::Error>();
        error.is_some_and(|error| error.kind() == std::io::ErrorKind::TimedOut)
    };
    match error.is_connect() {
        true if causes(error).any(is_timeout) => Trouble::ConnectTimeout,
        true => Trouble::Connect,
        false => Trouble::Broken,
    }
}

/// The error that began it: those around it say only that there was one.
fn innermost(error: &(dyn Error + 'static)) -> String {
    causes(error).last().map_or_else(String::new, ToString::to_string)
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}
