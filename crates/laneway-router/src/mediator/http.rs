//! `HTTP`: posts a message to its target and lets the table judge what comes back.
//!
//! [`Mediators`](super::Mediators) hands over a [`Call`]. On its way it passes
//!
//! 1. `target.rs`: is it a URL, and on the allow-list? If not, it is final.
//! 2. `breaker.rs`: does the target answer, and want to be called? If not, it waits.
//! 3. `connections.rs`: HTTP/1.1 or HTTP/2, as TLS has agreed or as `prior_knowledge` says, within the timeouts and body limit;
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
//! laneway-sequence: 4711                                        grows along the key, within one source, if that has an order
//! laneway-attempt: 1
//! <the message's own headers>
//!
//! <the payload, byte by byte as it was published>               or {"messageId":"order-7-paid"}
//! ```
//!
//! An attempt that runs into its timeout may have been received all the same, and its successor may be on its way while the target still works
//! on it. That is what the last three headers are for: a target that remembers the highest sequence of each key can refuse what comes too late.
//!
//! **Cost.** The URL of a target is read once, not for each message, as long as there are not too many of them. The body of a request and the values that differ between calls share
//! an allocation. Nothing is cloned for the sake of
//! a retry: retries belong to the lane, and a client that repeats a POST on its own would send messages twice. (What could not begin to be written, because an idle connection
//! had been closed, does go over another one.)

use std::borrow::Cow;
use std::collections::HashMap;
use std::error::Error;
use std::fmt::{Display, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use http_body_util::Full;
use hyper::header::{
    AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT,
};
use hyper::{Method, Request, StatusCode};
use rustls::pki_types::CertificateDer;
use tokio::time::{Instant, error::Elapsed, timeout_at};

use super::breaker::{BreakerSettings, Breakers, Cause, Patience};
use super::connect::{BadCertificate, certificates};
use super::connections::{Address, Connections, Failure, Keeping};
use super::metrics::Metrics;
use super::signature::Signer;
use super::target::{self, BadTarget, Pattern, Scope};
use super::verdict::{Limits, Observed, Trouble, judge};
use super::{Call, NO_SEQUENCE, Verdict, headers};
use crate::message::{Message, Secret};

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

    fn keeping(&self) -> Keeping {
        Keeping {
            trusted: self.trusted.clone(),
            connect_timeout: self.connect_timeout,
            idle_max: self.idle_connections_max,
            idle_timeout: self.idle_timeout,
        }
    }
}

/// As many targets are remembered, so that their URLs need not be read again for each message; then all are forgotten.
const TARGETS_MAX: usize = 1_024;

/// No longer ones are remembered.
const TARGET_BYTES_MAX: usize = 2_048;

/// A target that may be called.
struct Target {
    /// What the breakers call it.
    name: String,
    address: Address,
}

/// Few, so that nobody gains much by choosing names that meet.
type Targets = HashMap<String, Arc<Target>, foldhash::fast::RandomState>;

/// The mediator for `HTTP`. Clones share connections, breakers and counters.
#[derive(Clone)]
pub struct HttpMediator {
    inner: Arc<Inner>,
    /// By its pool, so not in what is shared.
    signer: Signer,
}

struct Inner {
    settings: HttpSettings,
    connections: Arc<Connections>,
    /// By its text, each target that was called lately and may be.
    targets: Mutex<Targets>,
    breakers: Breakers,
    metrics: Metrics,
}

impl HttpMediator {
    /// With these settings. Needs a tokio runtime when it mediates, not here.
    pub fn new(settings: HttpSettings, signer: Signer) -> Self {
        let inner = Inner {
            connections: Connections::new(settings.keeping()),
            targets: Mutex::default(),
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
        self.inner.target(target).map(|_| ())
    }

    /// Whether the breakers call a target by this name.
    pub fn is_called(&self, target: &str, name: &str) -> bool {
        self.inner.target(target).is_ok_and(|target| target.name == name)
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
        let target = inner.target(&call.message.mediation_target).map_err(|problem| refuse(&problem))?;
        let pass = inner.breakers.admit(&target.name, started.into_std());
        let pass = pass.map_err(|patience| wait(&target.name, patience))?;
        let request = self.request(call).map_err(|problem| refuse(&problem))?;
        let mut seen = inner.exchange(request, &target.address, started + inner.settings.timeout).await;
        seen.hide(call.message, &self.signer);
        let judgement = judge(seen.observed(), SystemTime::now(), &inner.settings.limits);
        pass.report(judgement.health, judgement.cool_down, Instant::now().into_std());
        Ok(judgement.verdict)
    }

    fn request(&self, call: Call<'_>) -> Result<Request<Full<Bytes>>, String> {
        let message = call.message;
        let mut slate = Slate::for_call(call);
        let body = match &message.payload {
            Some(payload) if payload.get().len() > SLATE_BYTES_MAX => {
                Bytes::copy_from_slice(payload.get().as_bytes())
            }
            Some(payload) => slate.write(payload.get()),
            None => slate.write(serde_json::json!({ "messageId": message.id })),
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
        self.add_fence(&mut all, call, &mut slate);
        self.add_signature(&mut all, &message.id, &body, &mut slate);
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.headers_mut() = all;
        Ok(request)
    }

    fn add_fence(&self, all: &mut HeaderMap, call: Call<'_>, slate: &mut Slate) {
        if !call.key.is_empty() {
            all.insert(headers::KEY, slate.value(headers::encode(call.key)));
        }
        if call.sequence != NO_SEQUENCE {
            all.insert(headers::SEQUENCE, slate.value(call.sequence));
        }
        all.insert(headers::ATTEMPT, slate.value(call.attempt));
        if let Some(traceparent) = call.traceparent {
            all.insert(headers::TRACEPARENT, slate.value(traceparent));
        }
        if let Some(epoch) = self.inner.settings.epoch {
            all.insert(headers::EPOCH, slate.value(epoch));
        }
    }

    fn add_signature(&self, all: &mut HeaderMap, id: &str, body: &[u8], slate: &mut Slate) {
        let id = slate.value(headers::encode(id));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let timestamp = slate.value(now);
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
    fn target(&self, text: &str) -> Result<Arc<Target>, BadTarget> {
        if let Some(target) = self.targets().get(text) {
            return Ok(target.clone());
        }
        let target = Arc::new(self.locate(text)?);
        if text.len() > TARGET_BYTES_MAX {
            return Ok(target);
        }
        let mut targets = self.targets();
        if targets.len() >= TARGETS_MAX {
            targets.clear();
        }
        targets.insert(text.to_owned(), target.clone());
        Ok(target)
    }

    fn targets(&self) -> MutexGuard<'_, Targets> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn locate(&self, text: &str) -> Result<Target, BadTarget> {
        let uri = target::parse(text)?;
        let is_allowed = |allowed: &Vec<Pattern>| allowed.iter().any(|pattern| pattern.matches(&uri));
        if !self.settings.allowed.as_ref().is_none_or(is_allowed) {
            return Err(BadTarget::NotAllowed(Scope::Path.name(&uri)));
        }
        let name = self.settings.scope.name(&uri);
        let is_plain = uri.scheme_str() == Some("http");
        let prior = is_plain && self.settings.prior_knowledge.iter().any(|pattern| pattern.matches(&uri));
        let address = Address::new(uri, prior).ok_or_else(|| BadTarget::Scheme(name.clone()))?;
        Ok(Target { name, address })
    }

    async fn exchange(&self, request: Request<Full<Bytes>>, address: &Address, until: Instant) -> Seen {
        // What is known already when the time is up.
        let mut head = None;
        let all = async {
            let exchange = self.connections.send(request, address).await?;
            let response = exchange.response();
            head = Some((response.status(), response.headers().get(RETRY_AFTER).cloned()));
            Ok(exchange.body(self.settings.body_bytes_max).await?)
        };
        let body = timeout_at(until, all).await;
        match head {
            Some((status, retry_after)) => Seen::answer(status, retry_after, body),
            None => Seen::nothing(body.map(|body| body.map(drop))),
        }
    }
}

/// What differs between calls, the body and some headers, written into one piece of memory and cut up.
struct Slate(BytesMut);

/// A longer body has memory of its own: HTTP/2 remembers headers for a while, and all of the piece that they are cut from.
const SLATE_BYTES_MAX: usize = 2_048;

impl Slate {
    fn for_call(call: Call<'_>) -> Self {
        let payload = call.message.payload.as_ref().map_or(0, |payload| payload.get().len());
        let payload = if payload > SLATE_BYTES_MAX { 0 } else { payload };
        // The numbers, a trace and an encoded character or two.
        Slate(BytesMut::with_capacity(payload + call.key.len() + call.message.id.len() + 192))
    }

    fn write(&mut self, text: impl Display) -> Bytes {
        write!(self.0, "{text}").expect("memory grows");
        self.0.split().freeze()
    }

    /// Of numbers, hyphens, and what was encoded.
    fn value(&mut self, text: impl Display) -> HeaderValue {
        HeaderValue::from_maybe_shared(self.write(text)).expect("what is written here may stand in a header")
    }
}

fn bearer(token: &str) -> Result<HeaderValue, String> {
    let mut value = headers::bearer(token).ok_or_else(|| format!("`authToken` {}", headers::BAD_TOKEN))?;
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
    Verdict::Wait { delay: patience.delay, called: false, reason }
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

    /// Takes secrets out of an answer that may be shown: a target that complains may quote what it was sent.
    fn hide(&mut self, message: &Message, signer: &Signer) {
        if let Seen::Answer { status, body, .. } = self
            && !(200..300).contains(status)
            && !body.is_empty()
        {
            let mut text = String::from_utf8_lossy(body);
            for secret in secrets(message, signer) {
                if text.contains(secret) {
                    text = text.replace(secret, "(secret)").into();
                }
            }
            if let Cow::Owned(text) = text {
                *body = text.into();
            }
        }
    }

    /// There was a head, and this became of the body.
    fn answer(
        status: StatusCode,
        retry_after: Option<HeaderValue>,
        body: Result<Result<(Bytes, bool), Failure>, Elapsed>,
    ) -> Self {
        let answer = |body, cut| Seen::Answer { status: status.as_u16(), retry_after, body, cut };
        match body {
            Ok(Ok((body, cut))) => answer(body, cut),
            // Only of a success does the body matter; elsewhere the status has said it all.
            _ if !status.is_success() => answer(Bytes::new(), true),
            Ok(Err(failure)) => Seen::failed(&failure),
            Err(_) => Seen::trouble(Trouble::Timeout, "the body did not end"),
        }
    }

    /// There was not even a head.
    fn nothing(end: Result<Result<(), Failure>, Elapsed>) -> Self {
        match end {
            Ok(Err(failure)) => Seen::failed(&failure),
            _ => Seen::trouble(Trouble::Timeout, "no status"),
        }
    }

    fn failed(failure: &Failure) -> Self {
        match failure {
            Failure::Connect(error) => Seen::trouble(why_not_connected(&**error), innermost(&**error)),
            Failure::Broken(error) => Seen::trouble(Trouble::Broken, innermost(error)),
        }
    }

    fn trouble(kind: Trouble, detail: impl Into<String>) -> Self {
        Seen::Trouble { kind, detail: detail.into() }
    }
}

/// What must not be read in an answer, the longest first, so that no part of one is left.
fn secrets<'a>(message: &'a Message, signer: &'a Signer) -> Vec<&'a str> {
    let token = message.auth_token.iter().map(Secret::expose).filter(|token| !token.is_empty());
    let values = message.headers.iter().filter(|(name, _)| headers::is_secret(name));
    let values = values.flat_map(|(_, value)| {
        // A cookie has several parts, and a scheme may stand in front. What is very short would be found everywhere.
        let parts = value.split([' ', ';', ',', '=']).filter(|part| part.len() >= SECRET_PART_BYTES_MIN);
        parts.chain([value.trim()].into_iter().filter(|value| value.len() >= SECRET_BYTES_MIN))
    });
    let mut secrets: Vec<&str> = token.chain(values).chain(signer.secrets()).collect();
    secrets.sort_unstable_by_key(|secret| std::cmp::Reverse(secret.len()));
    secrets
}

/// A shorter value of a header is no secret.
const SECRET_BYTES_MIN: usize = 4;

/// Nor is a shorter part of one.
const SECRET_PART_BYTES_MIN: usize = 8;

fn why_not_connected(error: &(dyn Error + 'static)) -> Trouble {
    let is_timeout = |error: &(dyn Error + 'static)| {
        let error = error.downcast_ref::<std::io::Error>();
        error.is_some_and(|error| error.kind() == std::io::ErrorKind::TimedOut)
    };
    if causes(error).any(is_timeout) { Trouble::ConnectTimeout } else { Trouble::Connect }
}

/// The error that began it: those around it say only that there was one.
fn innermost(error: &(dyn Error + 'static)) -> String {
    causes(error).last().map_or_else(String::new, ToString::to_string)
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many of them are under way as pools have slots.
    #[test]
    fn a_call_under_way_takes_little_memory() {
        let mediator = HttpMediator::new(HttpSettings::default(), Signer::default());
        let message =
            Message::parse(br#"{"id": "m", "poolCode": "p", "mediationTarget": "http://localhost/"}"#);
        let message = message.unwrap();
        let call = Call { message: &message, key: "", sequence: 1, attempt: 1, traceparent: None };
        let bytes = size_of_val(&mediator.mediate(call));
        assert!(bytes <= 2_560, "{bytes} bytes");
    }
}
