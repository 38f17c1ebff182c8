//! The whole way of the command: children in fresh processes, tables, JSON lines and the plot, and the exit code.

#![cfg(feature = "peers")]

use std::process::{Command, Output};
use std::{env, fs, process};

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_laneway-bench")).arg("engine").args(arguments).output().unwrap()
}

#[test]
fn a_short_run_is_printed_written_and_plotted() {
    let path = |ending: &str| env::temp_dir().join(format!("laneway-bench-{}.{ending}", process::id()));
    let (json, plot) = (path("jsonl"), path("svg"));
    let free = ["--workload", "free", "--messages", "5000", "--keys", "50", "--rounds", "2"];
    let contenders = ["--contenders", "laneway,inline", "--targets"];
    let files = ["--json", json.to_str().unwrap(), "--plot", plot.to_str().unwrap()];
    let output = bench(&[&free[..], &contenders, &files].concat());
    assert!(output.status.success(), "{output:?}");

    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("| laneway ") && shown.contains("| inline "), "{shown}");
    let lines = fs::read_to_string(&json).unwrap();
    let rates = lines.lines().filter(|line| line.contains(r#""metric":"messages_per_second""#));
    assert_eq!(rates.count(), 4, "two contenders, two rounds:\n{lines}");
    assert!(lines.starts_with(r#"{"bench":"engine","workload":"free","contender":""#));
    assert!(fs::read_to_string(&plot).unwrap().contains(">laneway</text>"));
    fs::remove_file(json).unwrap();
    fs::remove_file(plot).unwrap();
}

#[test]
fn a_mistake_is_told_and_fails() {
    let output = bench(&["--contenders", "nobody"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("unknown contender \"nobody\"") && told.contains("crossbeam-hash"), "{told}");
}
