//! `laneway demo` as a user and a script meet it: the counts are exact, every lane is in order, and ctrl-c is clean.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;

fn demo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laneway"));
    command.arg("demo").args(arguments);
    command
}

/// Runs a demonstration and reads its lines as JSON.
fn lines_of(arguments: &[&str]) -> Vec<Value> {
    let output = demo(arguments).arg("--json").output().expect("the binary runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")))
        .collect()
}

#[test]
fn json_lines_show_every_lane_contiguous_and_the_counts_exact() {
    let lines =
        lines_of(&["--keys", "7", "--messages", "20", "--workers", "3", "--slow-ms", "5", "--seed", "42"]);
    let (summary, handled) = lines.split_last().expect("lines");
    assert_eq!(handled.len(), 7 * 20);
    for lane in 1..=7 {
        let of_lane = handled.iter().filter(|line| line["lane"] == lane);
        let sequences: Vec<_> = of_lane.map(|line| line["sequence"].as_u64().expect("a number")).collect();
        assert_eq!(sequences, (1..=20).collect::<Vec<_>>(), "lane {lane}");
    }
    assert_eq!(summary["event"], "summary");
    for (field, value) in
        [("accepted", 140), ("done", 140), ("failed", 0), ("dropped", 0), ("outstanding", 0)]
    {
        assert_eq!(summary[field], value, "{field}");
    }
    assert_eq!((&summary["out_of_order"], &summary["overlapping"]), (&0.into(), &0.into()));
}

#[test]
fn a_slow_lane_holds_up_nobody_else() {
    let lines = lines_of(&["--keys", "3", "--messages", "4", "--workers", "3", "--slow-ms", "400"]);
    let summary = lines.last().expect("a summary");
    let seconds = |field: &str| summary[field].as_f64().expect("a number");
    assert!(seconds("slow_lane_seconds") >= 1.6);
    assert!(seconds("other_lanes_seconds") < seconds("slow_lane_seconds"), "{summary}");
}

#[test]
fn people_get_a_table_and_are_told_what_to_type_next() {
    let output = demo(&["--slow-ms", "5"]).output().expect("the binary runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("40 accepted = 40 done + 0 failed + 0 dropped + 0 outstanding"), "{stdout}");
    assert!(stdout.contains("each strictly in order"), "{stdout}");
    assert!(stderr.contains("laneway bench engine"), "{stderr}");
}

#[test]
fn a_reader_who_leaves_early_is_no_failure() {
    let mut child =
        demo(&["--slow-ms", "5"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[cfg(unix)]
#[test]
fn ctrl_c_drains_and_still_gives_the_account() {
    // More work than anyone waits for, so that the interrupt comes in the midst of it.
    let arguments = ["--keys", "3", "--messages", "20", "--slow-ms", "50", "--json"];
    let mut child = demo(&arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("runs");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    // The first line is the signal that the demonstration listens.
    let first = lines.next().expect("a line").expect("readable");
    assert!(first.contains("handled"), "{first}");
    interrupt(child.id());
    let last = lines.last().expect("a line").expect("readable");
    let summary: Value = serde_json::from_str(&last).expect("JSON");
    let number = |field: &str| summary[field].as_u64().unwrap_or_else(|| panic!("{field} in {last}"));
    assert_eq!(summary["interrupted"], true, "{last}");
    assert_eq!(
        number("accepted"),
        number("done") + number("failed") + number("dropped") + number("outstanding")
    );
    assert_eq!((number("out_of_order"), number("overlapping")), (0, 0));
    assert_eq!(child.wait().expect("ends").code(), Some(130));
}

#[cfg(unix)]
#[test]
fn a_second_ctrl_c_stops_at_once() {
    // The slow lane's first message would take an hour, which no drain waits for; the fast lane gives the first line.
    let arguments = ["--keys", "2", "--messages", "1", "--slow-ms", "3600000", "--json"];
    let mut child = demo(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut answers = BufReader::new(child.stderr.take().expect("piped")).lines();
    lines.next().expect("a line").expect("readable");
    interrupt(child.id());
    let answer = answers.find(|line| line.as_ref().is_ok_and(|line| line.contains("ctrl-c again")));
    assert!(answer.is_some(), "the first is answered");
    interrupt(child.id());
    assert_eq!(child.wait().expect("ends").code(), Some(130));
    assert!(lines.next().is_none(), "no summary is given");
}

/// Sends what a terminal sends for ctrl-c.
#[cfg(unix)]
fn interrupt(process: u32) {
    let status = Command::new("kill").args(["-INT", &process.to_string()]).status().expect("kill is there");
    assert!(status.success());
}
