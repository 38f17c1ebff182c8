//! A browser for tests: chromedriver by the WebDriver protocol, which is JSON over HTTP, in the few words that the tests need.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base64::Engine as _;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use laneway_servers::{Server, chromedriver};
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(60);

/// What the value of an expression begins with that threw.
const THREW: &str = "threw: ";

/// Keys that are no characters, as the protocol writes them.
pub(crate) const TAB: &str = "\u{e004}";
#[allow(dead_code, reason = "not every file types")]
pub(crate) const ENTER: &str = "\u{e007}";
#[allow(dead_code, reason = "not every file types")]
pub(crate) const ESCAPE: &str = "\u{e00c}";

pub(crate) struct Browser {
    driver: Server,
    client: Client<HttpConnector, Full<Bytes>>,
    session: String,
}

impl Browser {
    /// A browser of its own, with an empty profile.
    pub(crate) async fn start() -> Self {
        let driver = tokio::task::spawn_blocking(chromedriver::start).await.unwrap().unwrap();
        let client = Client::builder(TokioExecutor::new()).build_http();
        let mut browser = Browser { driver, client, session: String::new() };
        let profile = browser.driver.folder().join("profile");
        let options = json!({
            "binary": chromedriver::browser(&browser.driver),
            "args": [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--force-prefers-reduced-motion", "--window-size=1440,1000", format!("--user-data-dir={}", profile.display()),
            ],
        });
        let wanted = json!({ "goog:chromeOptions": options, "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" } });
        let body = json!({ "capabilities": { "alwaysMatch": wanted } });
        let answer = browser.send("POST", "/session", body).await;
        browser.session = answer["sessionId"].as_str().expect("a session").to_owned();
        browser
    }

    async fn send(&self, method: &str, path: &str, body: Value) -> Value {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.driver.address()))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        let sent =
            tokio::time::timeout(DEADLINE, self.client.request(request)).await.expect("an answer in time");
        let (head, body) = sent.expect("an answer").into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        assert!(head.status.is_success(), "{path}: {answer:#}");
        answer["value"].clone()
    }

    async fn command(&self, path: &str, body: Value) -> Value {
        self.send("POST", &format!("/session/{}{path}", self.session), body).await
    }

    async fn devtools(&self, command: &str, params: Value) -> Value {
        self.command("/goog/cdp/execute", json!({ "cmd": command, "params": params })).await
    }

    pub(crate) async fn open(&self, url: &str) {
        self.command("/url", json!({ "url": url })).await;
    }

    /// The value of an expression in the page; a promise is waited for.
    pub(crate) async fn eval(&self, expression: &str) -> Value {
        let script = format!(
            "const done = arguments[arguments.length - 1]; Promise.resolve().then(() => ({expression})).then((it) => done(it ?? null), (error) => done('{THREW}' + error));"
        );
        self.command("/execute/async", json!({ "script": script, "args": [] })).await
    }

    /// Runs a script as it is.
    pub(crate) async fn run(&self, script: &str) {
        self.command("/execute/sync", json!({ "script": script, "args": [] })).await;
    }

    /// Asks until an expression is true. One that throws is not, yet: what it looks into may be drawn later.
    #[track_caller]
    pub(crate) fn until(&self, expression: &str) -> impl Future<Output = Value> {
        let at = std::panic::Location::caller();
        async move {
            let started = Instant::now();
            loop {
                let value = self.eval(expression).await;
                let is_true = match &value {
                    Value::Null => false,
                    Value::Bool(it) => *it,
                    Value::Number(number) => number.as_f64() != Some(0.0),
                    Value::String(text) => !text.is_empty() && !text.starts_with(THREW),
                    Value::Array(_) | Value::Object(_) => true,
                };
                if is_true {
                    return value;
                }
                if started.elapsed() > DEADLINE / 2 {
                    let text = self.eval("document.body.innerText").await;
                    let logs = self.console().await;
                    panic!(
                        "{at}: {expression} is still {value}\n{}\n{logs:?}",
                        text.as_str().unwrap_or_default()
                    );
                }
                tokio::time::sleep(Duration::from_millis(50)).await; // paced: between two questions
            }
        }
    }

    /// Presses what a selector finds, as a person would.
    #[track_caller]
    pub(crate) fn press(&self, selector: &str) -> impl Future<Output = ()> {
        let found =
            format!("document.querySelector({}) && !document.querySelector({0}).disabled", json!(selector));
        let press = format!("document.querySelector({}).click()", json!(selector));
        async move {
            self.until(&found).await;
            self.eval(&press).await;
        }
    }

    /// Presses the button with this text.
    #[track_caller]
    pub(crate) fn press_button(&self, text: &str) -> impl Future<Output = ()> {
        let find = format!(
            "[...document.querySelectorAll('button')].find((it) => it.textContent === {} && !it.disabled && it.checkVisibility())",
            json!(text)
        );
        async move {
            self.until(&format!("Boolean({find})")).await;
            self.eval(&format!("{find}.click()")).await;
        }
    }

    /// Presses keys, one after the other, as a keyboard does: wherever the focus is.
    #[allow(dead_code, reason = "not every file types")]
    pub(crate) async fn keys(&self, text: &str) {
        let presses = text.chars().flat_map(|key| {
            ["keyDown", "keyUp"].map(|kind| json!({ "type": kind, "value": key.to_string() }))
        });
        let keyboard = json!({ "type": "key", "id": "keyboard", "actions": presses.collect::<Vec<_>>() });
        self.command("/actions", json!({ "actions": [keyboard] })).await;
    }

    /// Goes on by the tabulator until what has the focus, `it`, is what is looked for. Not more often than a person would.
    #[track_caller]
    #[allow(dead_code, reason = "not every file types")]
    pub(crate) fn tab_to(&self, it: &str) -> impl Future<Output = ()> {
        let at = std::panic::Location::caller();
        let found = format!("((it) => Boolean({it}))(document.activeElement)");
        async move {
            let mut passed = Vec::new();
            for _ in 0..60 {
                self.keys(TAB).await;
                if self.eval(&found).await == json!(true) {
                    let seen = "(({ outlineStyle, boxShadow }) => outlineStyle !== 'none' || boxShadow !== 'none')(getComputedStyle(document.activeElement))";
                    assert_eq!(self.eval(seen).await, json!(true), "{at}: nobody sees where the focus is");
                    return;
                }
                passed.push(self.eval("document.activeElement.outerHTML.slice(0, 80)").await);
            }
            panic!("{at}: the focus does not come to {found}: {passed:#?}");
        }
    }

    /// How large the window is, and whether people who look at it prefer the dark.
    pub(crate) async fn look(&self, width: u32, height: u32, dark: bool) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.devtools("Emulation.setDeviceMetricsOverride", size).await;
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", media).await;
    }

    /// A picture of the whole page, in the folder that the test was built into.
    pub(crate) async fn screenshot(&self, name: &str) -> PathBuf {
        let params = json!({ "format": "png", "captureBeyondViewport": true });
        let answer = self.devtools("Page.captureScreenshot", params).await;
        let bytes =
            base64::engine::general_purpose::STANDARD.decode(answer["data"].as_str().unwrap()).unwrap();
        let folder = screenshots();
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join(format!("{name}.png"));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// What the page has written to its console since the last time, the worst only.
    pub(crate) async fn console(&self) -> Vec<String> {
        let logs = self.command("/se/log", json!({ "type": "browser" })).await;
        let logs = logs.as_array().cloned().unwrap_or_default();
        let bad = logs.iter().filter(|entry| entry["level"] == "SEVERE" || entry["level"] == "WARNING");
        bad.map(|entry| entry["message"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// What must hold whatever was looked at: nothing in the console, and nobody asked but the service at this address.
    pub(crate) async fn was_quiet(&self, base: &str) {
        assert_eq!(self.console().await, Vec::<String>::new());
        let elsewhere = |url: &String| !url.starts_with(base) && url.starts_with("http");
        let foreign: Vec<_> = self.requested().await.into_iter().filter(elsewhere).collect();
        assert!(foreign.is_empty(), "{foreign:?}");
    }

    /// Every address that was asked for since the browser was started, whoever asked.
    async fn requested(&self) -> Vec<String> {
        let logs = self.command("/se/log", json!({ "type": "performance" })).await;
        let entries = logs.as_array().cloned().unwrap_or_default();
        let url = |entry: &Value| {
            let event: Value = serde_json::from_str(entry["message"].as_str()?).ok()?;
            let event = &event["message"];
            (event["method"] == "Network.requestWillBeSent")
                .then(|| event["params"]["request"]["url"].as_str().map(str::to_owned))?
        };
        entries.iter().filter_map(url).collect()
    }

    /// Ends the browser, then the driver.
    pub(crate) async fn close(self) {
        self.send("DELETE", &format!("/session/{}", self.session), json!({})).await;
    }
}

/// Where pictures go: beside what cargo builds.
fn screenshots() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let target = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    target.unwrap_or(Path::new("target")).join("screenshots")
}
