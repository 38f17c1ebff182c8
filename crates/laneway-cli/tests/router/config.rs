//! `laneway config`: a configuration is right, or everything that is wrong with it is said; secrets are not.

use std::path::PathBuf;

use crate::running::{Answer, laneway, run};
use tempfile::TempDir;

fn file(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("laneway.conf");
    std::fs::write(&path, text).expect("written");
    (folder, path)
}

#[test]
fn what_is_right_is_said_to_be_right() {
    let (_folder, path) = file("laneway { http.bind = \"127.0.0.1:9000\", pools.orders.concurrency = 50 }");
    let answer = run(&["config", "check", &path.display().to_string()]);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    assert!(
        answer.stderr.contains("2 pools") && answer.stderr.contains("127.0.0.1:9000"),
        "{}",
        answer.stderr
    );
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let (_folder, path) = file("laneway { lease = soon, pools.orders.concurency = 50, http.bind = nowhere }");
    let path = path.display().to_string();
    let answer = run(&["config", "check", &path]);
    assert_eq!(answer.code, 6);
    for part in ["3 places", "laneway.lease", "concurency", "concurrency", "laneway.http.bind"] {
        assert!(answer.stderr.contains(part), "{part} is missing in\n{}", answer.stderr);
    }
    let answer = run(&["config", "check", &path, "--json"]);
    assert_eq!(answer.code, 6);
    let told = &answer.json()[0];
    assert_eq!(
        (&told["valid"], told["problems"].as_array().map(Vec::len)),
        (&false.into(), Some(3)),
        "{told}"
    );
    let (_folder, broken) = file("laneway { http {");
    assert_eq!(run(&["config", "check", &broken.display().to_string()]).code, 6);
    assert_eq!(run(&["config", "check", "no-such-file.conf"]).code, 6);
}

#[test]
fn values_are_shown_with_where_they_came_from_and_secrets_are_not() {
    let (folder, path) = file("laneway { http { bind = \"127.0.0.1:9000\", admin-token = s3cret } }");
    let mut command = laneway(&["config", "show", "--json", "--set", "lease=40 s"]);
    // The file is found where the program is started; the variables of the other verbs are none of the service's.
    command.current_dir(folder.path()).env("LANEWAY_SHUTDOWN_DRAIN", "7 s").env("LANEWAY_URL", "http://x");
    let answer = Answer::of(command.output().expect("the binary runs"));
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    assert!(!answer.stdout.contains("s3cret"), "{}", answer.stdout);
    let rows = answer.json();
    let row = |path: &str| rows.iter().find(|row| row["path"] == path).unwrap_or_else(|| panic!("{path}"));
    assert_eq!(row("laneway.http.bind")["value"], "\"127.0.0.1:9000\"");
    assert!(
        row("laneway.http.bind")["origin"].as_str().is_some_and(|origin| origin.ends_with("laneway.conf"))
    );
    assert!(
        row("laneway.shutdown.drain")["origin"]
            .as_str()
            .is_some_and(|origin| origin.contains("LANEWAY_SHUTDOWN"))
    );
    assert_eq!(row("laneway.lease")["value"], "\"40 s\"");
    assert_eq!(row("laneway.queue.path")["origin"], "reference.conf");
    let answer = run(&["config", "show", "--config", &path.display().to_string()]);
    assert!(answer.stdout.starts_with("key ") && answer.stdout.contains("(hidden)"), "{}", answer.stdout);
}

#[test]
fn variables_that_name_no_setting_are_warned_of_and_stop_nothing() {
    let (folder, path) = file("");
    let path = path.display().to_string();
    let with = |arguments: &[&str]| {
        let mut command = laneway(arguments);
        command.current_dir(folder.path()).env("LANEWAY_SEED", "7").env("LANEWAY_HTTP_ADMIN_TOKEN", "s3cret");
        command
    };
    let checked = Answer::of(with(&["config", "check", &path]).output().expect("the binary runs"));
    assert_eq!(checked.code, 0, "{}", checked.stderr);
    assert!(checked.stderr.contains("warning: laneway.seed ($LANEWAY_SEED)"), "{}", checked.stderr);
    assert!(checked.stderr.contains("did you mean LANEWAY_HTTP_ADMIN__TOKEN?"), "{}", checked.stderr);
    assert!(!checked.stderr.contains("s3cret"), "{}", checked.stderr);
    let told = Answer::of(with(&["config", "check", &path, "--json"]).output().expect("the binary runs"));
    assert_eq!(told.json()[0]["warnings"].as_array().map(Vec::len), Some(2), "{}", told.stdout);
    let shown = Answer::of(with(&["config", "show"]).output().expect("the binary runs"));
    assert!(shown.code == 0 && !shown.stdout.contains("laneway.seed"), "{}", shown.stdout);
    // What a file says is meant for the service.
    std::fs::write(&path, "laneway.seed = 7").expect("written");
    let checked = Answer::of(with(&["config", "check", &path]).output().expect("the binary runs"));
    assert_eq!(checked.code, 6, "{}", checked.stderr);
    assert!(checked.stderr.contains("laneway.seed = 7"), "{}", checked.stderr);
}

#[test]
fn the_reference_is_a_configuration() {
    let reference = run(&["config", "reference"]);
    assert_eq!(reference.code, 0);
    let (_folder, path) = file(&reference.stdout);
    let answer = run(&["config", "check", &path.display().to_string()]);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
}
