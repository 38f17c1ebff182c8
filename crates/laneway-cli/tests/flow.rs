//! `laneway flow` as a user and a script meet it: on a Postgres of its own, and on one that it is given.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use laneway_servers::{Server, postgres};
use serde_json::Value;

struct Shell {
    url: String,
    folder: tempfile::TempDir,
    _server: Server,
}

impl Shell {
    fn new() -> Self {
        let server = postgres::start().expect("Postgres starts");
        Self { url: postgres::url(&server), folder: tempfile::tempdir().expect("a folder"), _server: server }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = laneway(self.folder.path(), arguments);
        command.env("DATABASE_URL", &self.url);
        command
    }

    /// Standard output, if it ends with this code.
    #[track_caller]
    fn ends(&self, arguments: &[&str], code: i32) -> String {
        let output = self.command(arguments).output().expect("the binary runs");
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}\n{out}\n{err}");
        if code == 0 { out } else { err }
    }

    /// The objects that it prints.
    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Vec<Value> {
        let text = self.ends(&[arguments, &["--json"]].concat(), 0);
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).expect("it can be written");
        path.display().to_string()
    }
}

fn laneway(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laneway"));
    command.args(arguments).current_dir(folder).env_remove("DATABASE_URL").stdin(Stdio::null());
    command
}

fn texts(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// A process that is ended with its value.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn one_command_shows_a_flow_to_a_newcomer() {
    let folder = tempfile::tempdir().expect("a folder");
    let output =
        laneway(folder.path(), &["flow", "dev", "--once", "--json"]).output().expect("the binary runs");
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{out}\n{err}");
    let last: Value = serde_json::from_str(out.lines().last().expect("a look")).expect("JSON");
    assert_eq!(
        (&last["status"], &last["output"]["approve"]),
        (&Value::from("completed"), &Value::from(true)),
        "{last}"
    );
    assert!(last["output"]["notify"].as_str().is_some_and(|mail| mail.contains("Ada")), "{last}");
    assert!(!folder.path().join(".laneway-flow").exists(), "nothing is left behind");
}

const FLOW: &str = r#"{
  "flow": {"slug": "shell_flow", "steps": [
    {"slug": "words", "maxAttempts": 1},
    {"slug": "size", "stepType": "map", "dependsOn": ["words"], "queue": "sizes"},
    {"slug": "sign", "dependsOn": ["size"], "queue": false}]},
  "handlers": {
    "words": {"command": ["sh", "-c", "read input; test \"$input\" = '\"fail\"' && exit 65; echo '[\"a\", \"bc\"]'"]},
    "size": {"command": ["sh", "-c", "wc -c"]}}
}"#;

#[test]
fn a_flow_of_commands_from_its_file_to_its_end() {
    let shell = Shell::new();
    let words = shell.ends(&["flow", "list"], 4);
    assert!(words.contains("laneway flow migrate"), "{words}");
    assert_eq!(shell.json(&["flow", "migrate"])[0]["from"], 0);
    assert_eq!(shell.json(&["flow", "migrate"])[0]["from"], shell.json(&["flow", "migrate"])[0]["to"]);
    let file = shell.write("flow.json", FLOW);
    assert_eq!(shell.json(&["flow", "define", &file])[0]["status"], "compiled");
    assert_eq!(shell.json(&["flow", "list"])[0]["slug"], "shell_flow");
    let drawn = shell.ends(&["flow", "show", "shell_flow"], 0);
    assert!(
        drawn.contains("┌ words") && drawn.contains("map, sizes") && drawn.contains("by hand"),
        "{drawn}"
    );

    let worker = shell.command(&["flow", "worker", &file]).stderr(Stdio::null()).spawn().expect("it starts");
    let _worker = Background(worker);
    let run = shell.json(&["flow", "start", "shell_flow", "\"go\"", "--idempotency-key", "one"])[0]["runId"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(
        shell.json(&["flow", "start", "shell_flow", "\"go\"", "--idempotency-key", "one"])[0]["runId"],
        run.as_str()
    );
    let deadline = Instant::now() + Duration::from_secs(60);
    while shell.json(&["flow", "watch", &run, "--once"])[0]["steps"][2]["status"] != "started" {
        assert!(Instant::now() < deadline, "{}", shell.ends(&["flow", "watch", &run, "--once"], 0));
    }
    let seen = shell.ends(&["flow", "watch", &run, "--once"], 0);
    assert!(seen.contains(&format!("flow complete {run} sign JSON")), "{seen}");
    shell.ends(&["flow", "complete", &run, "sign", "\"me\""], 0);
    shell.ends(&["flow", "complete", &run, "sign", "\"me\""], 4);
    let seen = shell.ends(&["flow", "watch", &run], 0);
    assert!(seen.contains("✔ 2 tasks") && seen.contains(r#"{"sign":"me"}"#), "{seen}");

    let failed = shell.ends(&["flow", "start", "shell_flow", "\"fail\"", "--watch"], 4);
    assert!(failed.contains("has failed") && failed.contains("65"), "{failed}");
    let runs = shell.json(&["flow", "runs", "--status", "failed"]);
    let failed = runs[0]["runId"].as_str().unwrap();
    shell.ends(&["flow", "retry", failed], 0);
    shell.ends(&["flow", "cancel", &run], 4);
    let again = shell.write("again.json", AGAIN);
    let other = shell.command(&["flow", "worker", &again]).stderr(Stdio::null()).spawn().expect("it starts");
    let _other = Background(other);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !shell.json(&["flow", "list"]).iter().any(|flow| flow["slug"] == "again") {
        assert!(Instant::now() < deadline, "the worker makes its flow");
    }
    let run = shell.ends(&["flow", "start", "again"], 0).trim().to_owned();
    while !shell.ends(&["flow", "watch", &run, "--once"], 0).contains("only is tried again after this: ") {
        assert!(Instant::now() < deadline, "{}", shell.ends(&["flow", "watch", &run, "--once"], 0));
    }
    shell.ends(&["flow", "cancel", &run], 0);
    assert!(shell.json(&["flow", "workers"]).iter().all(|worker| worker["alive"] == true));
    assert!(shell.json(&["flow", "queues"]).iter().any(|queue| queue["queue"] == "sizes"));
    assert_eq!(
        shell.json(&["flow", "prune", "--older-than", "0s", "--flow", "shell_flow", "--yes"])[0]["deleted"]
            .as_u64()
            .map(|n| n > 0),
        Some(true)
    );
}

/// Fails, and is tried again much later.
const AGAIN: &str = r#"{
  "flow": {"slug": "again", "steps": [{"slug": "only", "baseDelay": 600}]},
  "handlers": {"only": {"command": ["sh", "-c", "echo not today >&2; exit 1"]}}
}"#;

const SIMPLE: &str = r#"{"slug": "simple", "steps": [{"slug": "sign", "queue": false}, {"slug": "idle", "dependsOn": ["sign"]}]}"#;

#[test]
fn runs_and_flows_are_cancelled_retried_deleted_and_pruned() {
    let shell = Shell::new();
    shell.ends(&["flow", "migrate"], 0);
    let file = shell.write("simple.json", SIMPLE);
    shell.ends(&["flow", "define", &file], 0);
    let start = || shell.json(&["flow", "start", "simple"])[0]["runId"].as_str().unwrap().to_owned();
    let in_status =
        |status: &str| shell.json(&["flow", "runs", "--flow", "simple", "--status", status]).len();
    let runs = [start(), start(), start()];

    // A whole flow, and what destroys, wants a word.
    assert!(shell.ends(&["flow", "cancel", "--flow", "simple"], 2).contains("--yes"));
    assert!(shell.ends(&["flow", "delete", &runs[0]], 2).contains("--yes"));
    assert!(shell.ends(&["flow", "delete", "--flow", "simple"], 2).contains("--yes"));
    assert!(shell.ends(&["flow", "prune", "--older-than", "1d"], 2).contains("--yes"));
    shell.ends(&["flow", "retry"], 2);
    shell.ends(&["flow", "cancel", &runs[0], "--flow", "simple", "--yes"], 2);
    assert_eq!(in_status("started"), 3, "nothing has happened");

    shell.ends(&["flow", "complete", &runs[0], "sign", "--fail", "no pen"], 0);
    shell.ends(&["flow", "cancel", &runs[1], "--reason", "not wanted"], 0);
    assert!(shell.ends(&["flow", "cancel", &runs[1]], 4).contains("over"));
    assert_eq!((in_status("failed"), in_status("cancelled"), in_status("started")), (1, 1, 1));
    assert_eq!(shell.json(&["flow", "retry", "--flow", "simple"])[0]["retried"], 1, "the one that failed");
    assert_eq!(shell.json(&["flow", "retry", &runs[1]])[0]["changed"], true, "the one that was cancelled");
    assert_eq!(shell.json(&["flow", "cancel", "--flow", "simple", "--yes"])[0]["cancelled"], 3);
    assert_eq!(shell.json(&["flow", "cancel", "--flow", "simple", "--yes"])[0]["cancelled"], 0);

    assert_eq!(shell.json(&["flow", "delete", &runs[0], "--yes"])[0]["changed"], true);
    assert!(shell.ends(&["flow", "delete", &runs[0], "--yes"], 4).contains("there is no run"));
    assert_eq!(
        shell.json(&["flow", "prune", "--older-than", "1d", "--yes"])[0]["deleted"],
        0,
        "nothing is that old"
    );
    assert_eq!(shell.json(&["flow", "prune", "--older-than", "0s", "--yes"])[0]["deleted"], 2);
    start();
    assert_eq!(shell.json(&["flow", "delete", "--flow", "simple", "--yes"])[0]["changed"], true);
    for verb in ["retry", "cancel", "delete"] {
        let words: &[&str] = &["flow", verb, "--flow", "simple", "--yes"];
        let words = if verb == "retry" { &words[..4] } else { words };
        assert!(shell.ends(words, 4).contains("simple"), "{verb}");
    }
    assert_eq!(shell.json(&["flow", "list"]), Vec::<Value>::new());
}

#[test]
fn an_output_that_is_too_large_to_be_shown_is_printed_whole_when_asked_for() {
    let shell = Shell::new();
    shell.ends(&["flow", "migrate"], 0);
    shell.ends(
        &[
            "flow",
            "define",
            &shell.write(
                "simple.json",
                SIMPLE.replace(r#", {"slug": "idle", "dependsOn": ["sign"]}"#, "").as_str(),
            ),
        ],
        0,
    );
    let run = shell.json(&["flow", "start", "simple"])[0]["runId"].as_str().unwrap().to_owned();
    assert!(shell.ends(&["flow", "output", &run], 4).contains("not completed"));
    let large = serde_json::json!("x".repeat(100_000)).to_string();
    shell.ends(&["flow", "complete", &run, "sign", &large], 0);
    let look = &shell.json(&["flow", "watch", &run])[0];
    assert_eq!((&look["output"], &look["steps"][0]["output"]), (&Value::Null, &Value::Null), "{look}");
    assert!(look["outputBytes"].as_u64() > Some(100_000), "{look}");
    let shown = shell.command(&["flow", "watch", &run]).output().expect("the binary runs");
    assert!(texts(&shown).1.contains("flow output"), "{shown:?}");
    assert_eq!(shell.json(&["flow", "output", &run])[0]["sign"].as_str().map(str::len), Some(100_000));
    assert_eq!(shell.ends(&["flow", "output", &run, "sign"], 0).trim(), large);
    assert!(shell.ends(&["flow", "output", &run, "nothing"], 4).contains("no step"));
}

#[test]
fn two_files_that_both_say_how_the_worker_works_are_refused() {
    let shell = Shell::new();
    shell.ends(&["flow", "migrate"], 0);
    let file = |slug: &str, worker: &str| {
        let text = format!(
            r#"{{"flow": {{"slug": "{slug}", "steps": [{{"slug": "a"}}]}}, "handlers": {{"a": {{"command": ["cat"]}}}}{worker}}}"#
        );
        shell.write(&format!("{slug}.json"), &text)
    };
    let worker = r#", "worker": {"maxConcurrent": 2}"#;
    let (one, other, plain) = (file("one", worker), file("other", worker), file("plain", ""));
    let words = shell.ends(&["flow", "worker", &one, &other], 6);
    assert!(
        words.contains("one.json") && words.contains("other.json") && words.contains("one `worker` section"),
        "{words}"
    );
    // One section for two flows is fine: it is then the queues that are wrong.
    let words = shell.ends(&["flow", "worker", &one, &plain, "--queue", "elsewhere"], 6);
    assert!(
        words.contains("Available queues: one, plain") || words.contains("Available queues: plain, one"),
        "{words}"
    );
}

#[test]
fn mistakes_have_words_and_codes() {
    let shell = Shell::new();
    shell.ends(&["flow", "migrate"], 0);
    let bad = shell.write("bad.json", r#"{"slug":"f","steps":[{"slug":"a","dependsOn":["b"]}]}"#);
    assert!(shell.ends(&["flow", "define", &bad], 6).contains("\"b\", which does not exist: there are a"));
    let file = shell.write("flow.json", FLOW);
    assert!(
        shell
            .ends(&["flow", "worker", &file, "--queue", "elsewhere"], 6)
            .contains("Available queues: shell_flow, sizes")
    );
    shell.ends(&["flow", "define", &file], 0);
    let other = shell.write("other.json", r#"{"slug":"shell_flow","steps":[{"slug":"z"}]}"#);
    assert!(shell.ends(&["flow", "define", &other], 4).contains('z'));
    assert!(shell.ends(&["flow", "start", "shell_flow", "no json"], 2).contains("no JSON"));
    assert!(shell.ends(&["flow", "show", "nowhere"], 4).contains("there are shell_flow"));
    shell.ends(&["flow", "watch", "00000000-0000-0000-0000-000000000000"], 4);
    shell.ends(&["flow", "list", "--database", "postgres://nobody@127.0.0.1:1/none"], 5);
    shell.ends(&["flow", "list", "--database", "nonsense"], 2);
    let nothing = laneway(shell.folder.path(), &["flow", "list"]).output().expect("the binary runs");
    assert_eq!(nothing.status.code(), Some(2), "{:?}", texts(&nothing));
    let example =
        laneway(shell.folder.path(), &["flow", "worker", "--example"]).output().expect("the binary runs");
    assert!(texts(&example).0.contains("handlers"));
}
