//! The binary as a user and a script meet it: help, version, exit codes, and which output carries what.

use std::process::{Command, Output};

fn laneway(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_laneway")).args(arguments).output().expect("the binary runs")
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

#[test]
fn help_tells_what_it_is_for_with_examples_and_exit_codes() {
    let output = laneway(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    for part in
        ["In order per key", "Examples:", "laneway serve --demo", "Exit codes:", "no service answers", "130"]
    {
        assert!(stdout(&output).contains(part), "{part} is missing in\n{}", stdout(&output));
    }
    assert!(output.stderr.is_empty());
}

#[test]
fn every_verb_has_help() {
    let verbs: &[&[&str]] = &[
        &["serve"],
        &["send"],
        &["seed"],
        &["lanes"],
        &["explain"],
        &["park"],
        &["resume"],
        &["skip"],
        &["pools"],
        &["pools", "set"],
        &["pools", "pause"],
        &["pools", "remove"],
        &["dead-letters"],
        &["dead-letters", "list"],
        &["dead-letters", "redrive"],
        &["dead-letters", "purge"],
        &["top"],
        &["config"],
        &["config", "check"],
        &["config", "show"],
        &["config", "reference"],
        &["demo"],
        &["doctor"],
        &["bench"],
        &["bench", "engine"],
        &["bench", "events"],
        &["bench", "router"],
    ];
    let flow: &[&[&str]] = match cfg!(feature = "flow") {
        true => &[&["flow"], &["flow", "dev"], &["flow", "worker"], &["flow", "watch"], &["bench", "flow"]],
        false => &[],
    };
    for verb in verbs.iter().chain(flow) {
        let verb = &[*verb, &["--help"]].concat()[..];
        let output = laneway(verb);
        assert_eq!(output.status.code(), Some(0), "{verb:?}");
        assert!(stdout(&output).contains("Usage: laneway"), "{verb:?}");
    }
}

#[test]
fn version_is_the_package_s() {
    let output = laneway(&["--version"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stdout(&output).trim(), concat!("laneway ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn what_is_not_understood_is_a_mistake_of_usage() {
    let mistakes: [&[&str]; 14] = [
        &[],
        &["no-such-verb"],
        &["--no-such-flag"],
        &["demo", "--keys", "many"],
        &["demo", "--keys", "0"],
        &["demo", "--workers", "0"],
        &["explain"],
        &["send", "--count", "0"],
        &["send", "--from", "-", "--group", "g"],
        &["pools", "set", "orders"],
        &["pools", "set", "orders", "concurrency"],
        &["dead-letters", "redrive"],
        &["serve", "--demo", "--config", "laneway.conf"],
        &["lanes", "--url", "nonsense"],
    ];
    for mistake in mistakes {
        let output = laneway(mistake);
        assert_eq!(output.status.code(), Some(2), "{mistake:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{mistake:?} wrote to standard output");
        assert!(stderr(&output).contains("--help"), "{mistake:?}: {}", stderr(&output));
    }
}
