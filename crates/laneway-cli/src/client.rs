//! How the verbs speak to a running service: one request, one answer, errors in words for a person.
//!
//! A verb hands over a method, a path and perhaps a body, and gets JSON back. The service's errors are problem details (RFC 9457), of which a
//! person sees the title, the detail and the list of what is wrong. The token goes into one header and nowhere else.

use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, Uri, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::{Client as Http, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::exit::Failure;
use crate::table::printable;

/// Where the service is when nobody says otherwise.
pub(crate) const DEFAULT_URL: &str = "http://127.0.0.1:8080";

/// Longer than anything that the service does while somebody waits, except draining, which has a limit of its own on top.
const PATIENCE: Duration = Duration::from_secs(30);

/// No answer of the service is larger: what could be comes in pages of a few megabytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// What stays as it is in a part of a path.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Which service, and how its answers are shown. The options of every verb that speaks to one.
#[derive(Args)]
pub(crate) struct Service {
    /// Where the service listens
    #[arg(long, global = true, value_name = "URL", env = "LANEWAY_URL", default_value = DEFAULT_URL)]
    url: String,
    /// The token of the service's admin routes
    #[arg(long, global = true, value_name = "TOKEN", env = "LANEWAY_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Print data as JSON, one object per line, instead of for people
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

impl Service {
    pub(crate) fn connect(&self) -> Result<Client, Failure> {
        Client::new(&self.url, self.token.clone())
    }
}

/// A connection to a service. Blocks the thread that asks.
pub(crate) struct Client {
    base: String,
    token: Option<String>,
    runtime: Runtime,
    http: Http<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl Client {
    pub(crate) fn new(url: &str, token: Option<String>) -> Result<Client, Failure> {
        let base = url.trim_end_matches('/').to_owned();
        let parsed: Uri = base.parse().map_err(|_| not_a_url(&base))?;
        if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
            return Err(not_a_url(&base));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start the runtime of the client")?;
        let http = Http::builder(TokioExecutor::new()).build(connector());
        Ok(Client { base, token, runtime, http })
    }

    pub(crate) fn get(&self, path: &str) -> Result<Value, Failure> {
        self.call(Method::GET, path, None, &[], PATIENCE)
    }

    /// A list, and whether there is more of it than this page.
    pub(crate) fn get_page(&self, path: &str) -> Result<(Vec<Value>, bool), Failure> {
        let request = self.request(Method::GET, path, None, &[])?;
        let answer = self.answer(request, PATIENCE)?;
        match understand(answer.status, &answer.body)? {
            Value::Array(list) => Ok((list, answer.has_next)),
            _ => Err(Failure::Unreachable(format!("{} answers {path} with what is no list", self.base))),
        }
    }

    pub(crate) fn delete(&self, path: &str) -> Result<Value, Failure> {
        self.call(Method::DELETE, path, None, &[], PATIENCE)
    }

    /// For what the service itself may take this long to do.
    pub(crate) fn delete_within(&self, path: &str, limit: Duration) -> Result<Value, Failure> {
        self.call(Method::DELETE, path, None, &[], PATIENCE + limit)
    }

    pub(crate) fn put(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(Method::PUT, path, Some(body.to_string()), &[], PATIENCE)
    }

    pub(crate) fn post(&self, path: &str, body: Option<&Value>) -> Result<Value, Failure> {
        self.call(Method::POST, path, body.map(Value::to_string), &[], PATIENCE)
    }

    /// Posts a body that is JSON already, with further headers.
    pub(crate) fn post_text(
        &self,
        path: &str,
        body: String,
        headers: &[(&str, &str)],
    ) -> Result<Value, Failure> {
        self.call(Method::POST, path, Some(body), headers, PATIENCE)
    }

    fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        headers: &[(&str, &str)],
        limit: Duration,
    ) -> Result<Value, Failure> {
        let answer = self.answer(self.request(method, path, body, headers)?, limit)?;
        understand(answer.status, &answer.body)
    }

    fn answer(&self, request: Request<Full<Bytes>>, limit: Duration) -> Result<Answer, Failure> {
        let answer = self.runtime.block_on(async {
            // Inside, because a timeout belongs to the runtime that it is made on.
            tokio::time::timeout(limit, self.exchange(request)).await
        });
        let base = &self.base;
        let late = || Failure::Unreachable(format!("{base} did not answer within {} s", limit.as_secs()));
        answer.map_err(|_| late())?
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        headers: &[(&str, &str)],
    ) -> Result<Request<Full<Bytes>>, Failure> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(token) = &self.token {
            let bearer = header::HeaderValue::from_str(&format!("Bearer {token}"));
            let unfit = |_| Failure::Usage("the token has characters that a header cannot carry".to_owned());
            let mut bearer = bearer.map_err(unfit)?;
            bearer.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, bearer);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from(body.unwrap_or_default()));
        Ok(request.context("this cannot be asked of a service")?)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Answer, Failure> {
        let response = self.http.request(request).await.map_err(|error| self.nobody(&error))?;
        let status = response.status().as_u16();
        // The service names nothing but the next page in it.
        let has_next = response.headers().contains_key(header::LINK);
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let broken = |error| Failure::Unreachable(format!("the answer of {} broke off: {error}", self.base));
        Ok(Answer { status, has_next, body: body.map_err(broken)?.to_bytes() })
    }

    fn nobody(&self, error: &hyper_util::client::legacy::Error) -> Failure {
        let base = &self.base;
        if !error.is_connect() {
            return Failure::Unreachable(format!(
                "{base} does not answer as a Laneway service does: {}",
                root(error)
            ));
        }
        Failure::Unreachable(format!(
            "no service answers at {base} ({})\n\n  start one:  {} serve --demo      or, with a configuration, serve --config FILE\n  elsewhere:  --url URL, or the variable LANEWAY_URL",
            root(error),
            program(),
        ))
    }
}

/// What a service answered.
struct Answer {
    status: u16,
    has_next: bool,
    body: Bytes,
}

/// The innermost cause, which is the one that says something.
fn root(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// What a user typed to start this program, so that hints can be typed as well.
pub(crate) fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "laneway".to_owned())
}

/// A text as one part of a path, or a value of a query.
pub(crate) fn part(text: &str) -> String {
    // Two dots would be folded away with the part before them by whoever normalises paths.
    if matches!(text, "." | "..") {
        text.replace('.', "%2E")
    } else {
        utf8_percent_encode(text, PLAIN).to_string()
    }
}

fn not_a_url(text: &str) -> Failure {
    Failure::Usage(format!("{text:?} is not the URL of a service; {DEFAULT_URL} would be one"))
}

pub(crate) fn connector() -> HttpsConnector<HttpConnector> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(Duration::from_secs(5)));
    let roots = rustls::RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let versions =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let tls =
        versions.expect("ring speaks both versions").with_root_certificates(roots).with_no_client_auth();
    HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().wrap_connector(tcp)
}

/// An answer as data, or as the reason why there is none.
fn understand(status: u16, body: &[u8]) -> Result<Value, Failure> {
    let json = if body.is_empty() { Ok(Value::Null) } else { serde_json::from_slice(body) };
    match (status, json) {
        (200..=299, Ok(value)) => Ok(value),
        (200..=299, Err(_)) => Err(Failure::Unreachable(
            "what answers there is no Laneway service: its answer is not JSON".to_owned(),
        )),
        (401 | 403, json) => Err(Failure::Refused(format!(
            "{}\n\n  give the admin token with --token, or in the variable LANEWAY_TOKEN",
            problem(status, json.ok())
        ))),
        (_, json) => Err(Failure::Refused(problem(status, json.ok()))),
    }
}

/// Problem details for a person.
fn problem(status: u16, details: Option<Value>) -> String {
    let Some(details) = details.filter(Value::is_object) else {
        return format!("the service refused it with status {status}");
    };
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(printable);
    // The detail is the sentence; the title only says what kind of sentence it is.
    let words = text(&details["detail"]).or_else(|| text(&details["title"]));
    let sentence = words.unwrap_or_else(|| format!("the service refused it with status {status}"));
    let mut words = sentence.clone();
    for error in details["errors"].as_array().into_iter().flatten() {
        let what =
            text(&error["detail"]).or_else(|| text(error)).unwrap_or_else(|| printable(&error.to_string()));
        // What the sentence has said already is not said again.
        if sentence.contains(&what) {
            continue;
        }
        words.push_str("\n  ");
        for name in ["setting", "index"] {
            if let Some(place) = error.get(name) {
                words.push_str(&format!("{}: ", text(place).unwrap_or_else(|| format!("{name} {place}"))));
            }
        }
        words.push_str(&what);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, body: &str) -> String {
        match understand(status, body.as_bytes()) {
            Err(Failure::Refused(words)) => words,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn problem_details_become_sentences() {
        let body = r#"{"type":"about:blank","title":"Unprocessable","status":422,"detail":"two things",
            "errors":[{"index":0,"detail":"a"},{"setting":"capacity","value":"0","detail":"b"},"c"]}"#;
        assert_eq!(refusal(422, body), "two things\n  index 0: a\n  capacity: b\n  c");
        let body =
            r#"{"title":"Unprocessable","detail":"just this","errors":[{"index":0,"detail":"just this"}]}"#;
        assert_eq!(refusal(422, body), "just this");
        assert_eq!(refusal(404, r#"{"title":"there is no pool \"x\""}"#), "there is no pool \"x\"");
        assert_eq!(refusal(500, "<html>"), "the service refused it with status 500");
        assert!(refusal(401, r#"{"title":"Unauthorized"}"#).contains("LANEWAY_TOKEN"));
    }

    #[test]
    fn an_answer_may_be_empty_and_must_else_be_json() {
        assert_eq!(understand(204, b"").expect("nothing to say"), Value::Null);
        assert!(matches!(understand(200, b"hello"), Err(Failure::Unreachable(_))));
    }

    #[test]
    fn parts_of_paths_are_one_part() {
        assert_eq!(part("order-7"), "order-7");
        assert_eq!(part("a/b c?d#é"), "a%2Fb%20c%3Fd%23%C3%A9");
        assert_eq!(part(".."), "%2E%2E");
    }

    #[test]
    fn what_is_no_url_is_a_mistake_of_usage() {
        for text in ["", "localhost:8080", "ftp://host", "http://", "nonsense"] {
            assert!(matches!(Client::new(text, None), Err(Failure::Usage(_))), "{text}");
        }
        assert!(Client::new("http://127.0.0.1:1/", None).is_ok());
    }
}
