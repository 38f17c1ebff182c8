//! Handlers that need no Rust: a command, or a call of HTTP, for each step of a flow in a file.
//!
//! Either gets the step's input as JSON (the run's input for a step without dependencies, `{dependency: output}` for one with, the element for a
//! map) and gives its output as JSON. A command reads standard input and writes standard output; it fails with any exit code but 0, and for good
//! with 65, which means bad data. A call is a POST; 2xx is the output, 400 to 499 fails for good except 408, 425 and 429, all else is tried again.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use anyhow::Context as _;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, header};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::{Client as Http, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use laneway_flow::{Action, Answer, Definition, Failure as TaskFailure, Route, Settings, Task};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::definition;
use crate::client::connector;
use crate::exit::Failure;

/// What a handler may give: more than the database takes.
const OUTPUT_BYTES_MAX: usize = 16 << 20;

/// Bad data, as the exit codes of BSD have it.
const EXIT_FATAL: i32 = 65;

/// A flow in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    flow: Box<RawValue>,
    #[serde(default)]
    handlers: BTreeMap<String, Handler>,
    worker: Option<Settings>,
}

/// How a step is done.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
enum Handler {
    /// A program and its arguments.
    Command(Vec<String>),
    /// A URL that is posted to.
    Url(String),
}

/// A flow, its handlers and its worker's settings.
pub(super) struct Program {
    pub(super) flow: Definition,
    /// None if the file does not say.
    pub(super) settings: Option<Settings>,
    handlers: BTreeMap<String, Handler>,
}

impl Program {
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text)
    }

    /// A file is a definition, or an object with a definition under `flow`, handlers by step, and settings for the worker.
    pub(super) fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = |error: serde_json::Error| Failure::BadConfiguration(format!("this is no flow: {error}"));
        let value: serde_json::Value = serde_json::from_str(text).map_err(wrong)?;
        if value.get("flow").is_none() {
            let flow = definition(text)?;
            return Ok(Self { flow, settings: None, handlers: BTreeMap::new() });
        }
        let file: File = serde_json::from_str(text).map_err(wrong)?;
        let program =
            Self { flow: definition(file.flow.get())?, settings: file.worker, handlers: file.handlers };
        program.check()?;
        Ok(program)
    }

    fn check(&self) -> Result<(), Failure> {
        let mut problems = Vec::new();
        let steps: Vec<&str> = self.flow.steps.iter().map(|step| step.slug.as_str()).collect();
        for (step, handler) in &self.handlers {
            match self.flow.step(step) {
                None => problems.push(format!(
                    "there is a handler for {step:?}, which is no step: there are {}",
                    steps.join(", ")
                )),
                Some(step) if step.queue == Route::Manual => {
                    problems
                        .push(format!("there is a handler for {:?}, which is completed by hand", step.slug));
                }
                Some(_) => {}
            }
            if matches!(handler, Handler::Command(words) if words.is_empty()) {
                problems.push(format!("the command of {step:?} is empty: name a program"));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(Failure::BadConfiguration(problems.join("\n"))) }
    }

    /// The steps that a worker of all queues could not do.
    pub(super) fn missing(&self, polled: &[String]) -> Vec<&str> {
        let ours = |queue: Option<&str>| {
            queue.is_some_and(|queue| polled.is_empty() || polled.iter().any(|it| it == queue))
        };
        let steps = self.flow.steps.iter().filter(|step| ours(self.flow.queue_of(step)));
        steps.map(|step| step.slug.as_str()).filter(|step| !self.handlers.contains_key(*step)).collect()
    }

    pub(super) fn actions(&self) -> HashMap<String, Action> {
        let http: Client = Http::builder(TokioExecutor::new()).build(connector());
        let action = |handler: &Handler, first: bool| match handler.clone() {
            Handler::Command(words) => {
                let words = Arc::new(words);
                Action::plain(move |task| command(words.clone(), task, first))
            }
            Handler::Url(url) => {
                let http = http.clone();
                Action::plain(move |task| call(http.clone(), url.clone(), task, first))
            }
        };
        let first = |step: &str| self.flow.step(step).is_some_and(|step| step.depends_on.is_empty());
        self.handlers.iter().map(|(step, handler)| (step.clone(), action(handler, first(step)))).collect()
    }
}

type Client = Http<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// What the step works on: for a step without dependencies, one of the first, what the run was started with. A step whose dependencies were all
/// skipped has an empty object. A map has its element, and no input of the run beside it.
fn input(task: &Task, first: bool) -> &str {
    match &task.flow_input {
        Some(input) if first => input.get(),
        _ => task.input.get(),
    }
}

/// The URL as it may be shown: who calls and with what is a secret.
fn shown(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let host = authority.rsplit('@').next().unwrap_or_default();
            format!("{scheme}://{host}{path}")
        }
        None => url.to_owned(),
    }
}

/// What is known of the task beside its input, by name.
fn facts(task: &Task) -> [(&'static str, String); 6] {
    [
        ("flow", task.flow.clone()),
        ("run", task.run_id.to_string()),
        ("step", task.step.clone()),
        ("index", task.index.to_string()),
        ("attempt", task.attempt.to_string()),
        ("idempotency-key", format!("{}/{}/{}", task.run_id, task.step, task.index)),
    ]
}

async fn command(words: Arc<Vec<String>>, task: Arc<Task>, first: bool) -> Answer {
    let mut command = tokio::process::Command::new(&words[0]);
    command
        .args(&words[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    for (name, value) in facts(&task) {
        command.env(format!("LANEWAY_{}", name.to_uppercase().replace('-', "_")), value);
    }
    let mut child = command
        .spawn()
        .map_err(|error| TaskFailure::new(format!("{:?} did not start: {error}", words[0])))?;
    let (mut stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let give = async {
        if let Some(stdin) = &mut stdin {
            // A command that does not care for its input closes it.
            let _ = stdin.write_all(input(&task, first).as_bytes()).await;
        }
        drop(stdin.take());
    };
    let ((), output, errors) = tokio::join!(give, all(stdout), all(stderr));
    let status = child.wait().await?;
    if !status.success() {
        let errors = String::from_utf8_lossy(&errors?).trim().to_owned();
        let why = format!("{:?} ended with {status}: {errors}", words[0]);
        return Err(if status.code() == Some(EXIT_FATAL) {
            TaskFailure::fatal(why)
        } else {
            TaskFailure::new(why)
        });
    }
    json(&output?)
}

async fn all(pipe: Option<impl tokio::io::AsyncRead + Unpin>) -> Result<Vec<u8>, TaskFailure> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(OUTPUT_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).await?;
    }
    if bytes.len() > OUTPUT_BYTES_MAX {
        return Err(TaskFailure::fatal(format!("the output is over {OUTPUT_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

async fn call(http: Client, url: String, task: Arc<Task>, first: bool) -> Answer {
    let mut request =
        Request::builder().method(Method::POST).uri(&url).header(header::CONTENT_TYPE, "application/json");
    for (name, value) in facts(&task) {
        request = request.header(format!("laneway-{name}"), value);
    }
    let request = request.body(Full::from(input(&task, first).to_owned())).map_err(TaskFailure::fatal)?;
    let url = shown(&url);
    let response = http.request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), OUTPUT_BYTES_MAX).collect().await;
    let body =
        body.map_err(|error| TaskFailure::new(format!("the answer of {url} broke off: {error}")))?.to_bytes();
    if status.is_success() {
        return json(&body);
    }
    let why = format!(
        "{url} answered {status}: {}",
        String::from_utf8_lossy(&body).chars().take(500).collect::<String>()
    );
    let again = !status.is_client_error() || matches!(status.as_u16(), 408 | 425 | 429);
    Err(if again { TaskFailure::new(why) } else { TaskFailure::fatal(why) })
}

/// Nothing is null.
fn json(bytes: &[u8]) -> Answer {
    let text = std::str::from_utf8(bytes).map_err(|_| TaskFailure::fatal("the output is no UTF-8"))?.trim();
    let text = if text.is_empty() { "null" } else { text };
    RawValue::from_string(text.to_owned())
        .map_err(|error| TaskFailure::fatal(format!("the output is no JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> String {
        match Program::parse(text) {
            Err(Failure::BadConfiguration(words)) => words,
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("this was accepted"),
        }
    }

    #[test]
    fn a_url_is_shown_without_its_secrets() {
        assert_eq!(shown("https://me:pass@host:8/a/b?token=x#y"), "https://host:8/a/b");
        assert_eq!(shown("https://host?token=a@b/c"), "https://host");
        assert_eq!(shown("http://host/a@b"), "http://host/a@b");
    }

    #[test]
    fn a_file_is_a_flow_with_or_without_handlers() {
        let plain = Program::parse(r#"{"slug":"f","steps":[{"slug":"a"}]}"#)
            .unwrap_or_else(|_| panic!("a definition"));
        assert_eq!(plain.missing(&[]), ["a"]);
        let text = r#"{"flow":{"slug":"f","steps":[{"slug":"a"},{"slug":"b","queue":"q"},{"slug":"c","queue":false}]},
            "handlers":{"a":{"command":["cat"]}},"worker":{"maxConcurrent":3}}"#;
        let program = Program::parse(text).unwrap_or_else(|_| panic!("a program"));
        let concurrent = program.settings.as_ref().map(|settings| settings.max_concurrent);
        assert_eq!((program.missing(&[]), concurrent), (vec!["b"], Some(3)));
        assert!(program.missing(&["f".to_owned()]).is_empty(), "what it does not poll it need not do");
        assert!(
            words(r#"{"flow":{"slug":"f","steps":[{"slug":"a"}]},"handlers":{"z":{"url":"http://x"}}}"#)
                .contains("there are a")
        );
        assert!(
            words(r#"{"flow":{"slug":"f","steps":[{"slug":"a"}]},"handlers":{"a":{"command":[]}}}"#)
                .contains("empty")
        );
        assert!(
            words(r#"{"flow":{"slug":"f","steps":[{"slug":"a","dependsOn":["b"]}]}}"#)
                .contains("which does not exist")
        );
        assert!(words("nonsense").contains("no flow"));
    }
}
