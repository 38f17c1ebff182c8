//! A flow, or a run of it, as boxes and arrows on a terminal.
//!
//! Steps stand in columns, each as far to the right as the longest way to it; a step's box says how it stands, where its tasks go, and, where
//! that is not plain from the columns, what it waits for. A graph that is wider than the terminal becomes a list.

use std::collections::HashMap;

use serde_json::Value;

use crate::table::{count, printable};

/// What a box shows: at most so many characters of a name.
const NAME_MAX: usize = 28;

/// The terminal's width, or what a file may have.
pub(super) fn width() -> usize {
    crossterm::terminal::size().map_or(120, |(columns, _)| usize::from(columns))
}

/// Draws the steps of a flow, or of a run, where they have a status.
pub(super) fn draw(steps: &Value, width: usize) -> String {
    let steps = steps.as_array().map_or(&[][..], Vec::as_slice);
    let columns = columns(steps);
    let boxes: Vec<Vec<Vec<String>>> = columns
        .iter()
        .enumerate()
        .map(|(place, column)| column.iter().map(|step| boxed(step, place, &columns)).collect())
        .collect();
    let widths: Vec<usize> = boxes.iter().map(|column| longest(column) + 4).collect();
    let whole: usize = widths.iter().sum::<usize>() + 4 * widths.len().saturating_sub(1);
    if whole > width { listed(steps) } else { side_by_side(&boxes, &widths) }
}

fn longest(column: &[Vec<String>]) -> usize {
    column.iter().flatten().map(|line| line.chars().count()).max().unwrap_or(0)
}

/// Steps by the length of the longest way to them.
fn columns(steps: &[Value]) -> Vec<Vec<&Value>> {
    let mut depth: HashMap<&str, usize> = HashMap::new();
    let mut columns: Vec<Vec<&Value>> = Vec::new();
    // Dependencies come first, so that one pass is enough.
    for step in steps {
        let before = names(&step["dependsOn"]).map(|name| depth.get(name).map_or(0, |depth| depth + 1)).max();
        let place = before.unwrap_or(0);
        depth.insert(step["slug"].as_str().unwrap_or_default(), place);
        if columns.len() <= place {
            columns.resize_with(place + 1, Vec::new);
        }
        columns[place].push(step);
    }
    columns
}

fn names(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// The lines inside a step's box. The first is its name.
fn boxed(step: &Value, place: usize, columns: &[Vec<&Value>]) -> Vec<String> {
    let mut lines = vec![short(step["slug"].as_str().unwrap_or_default())];
    if step.get("status").is_some() {
        lines.push(standing(step));
    }
    lines.push(where_to(step));
    let before: Vec<&str> = names(&step["dependsOn"]).collect();
    let all_before = place > 0 && {
        let column = &columns[place - 1];
        before.len() == column.len()
            && column.iter().all(|step| before.contains(&step["slug"].as_str().unwrap_or_default()))
    };
    if !before.is_empty() && !all_before {
        lines.push(short(&format!("after {}", before.join(", "))));
    }
    lines
}

fn where_to(step: &Value) -> String {
    let queue = if step["manual"] == true {
        "by hand".to_owned()
    } else {
        short(step["queue"].as_str().unwrap_or_default())
    };
    if step["stepType"] == "map" { format!("map, {queue}") } else { queue }
}

/// How a step stands, in a sign and a word.
fn standing(step: &Value) -> String {
    let status = step["status"].as_str().unwrap_or_default();
    let tasks = &step["tasks"];
    let (done, all) = (tasks["completed"].as_u64().unwrap_or(0), step["initialTasks"].as_u64().unwrap_or(0));
    match status {
        "completed" if all == 1 || step["stepType"] != "map" => "✔ completed".to_owned(),
        "completed" => format!("✔ {}", count(all, "task")),
        "failed" => "✘ failed".to_owned(),
        "skipped" => "⤼ skipped".to_owned(),
        "created" => "· waits".to_owned(),
        _ if step["manual"] == true => "☞ waits for you".to_owned(),
        _ if all > 1 => format!("▶ {done} of {all}"),
        _ if tasks["started"].as_u64().unwrap_or(0) > 0 => "▶ runs".to_owned(),
        _ => "… queued".to_owned(),
    }
}

fn short(text: &str) -> String {
    let text = printable(text);
    if text.chars().count() <= NAME_MAX {
        return text;
    }
    text.chars().take(NAME_MAX - 1).chain(['…']).collect()
}

fn side_by_side(boxes: &[Vec<Vec<String>>], widths: &[usize]) -> String {
    let drawn: Vec<Vec<String>> = boxes
        .iter()
        .zip(widths)
        .map(|(column, width)| column.iter().flat_map(|lines| frame(lines, *width)).collect())
        .collect();
    let height = drawn.iter().map(Vec::len).max().unwrap_or(0);
    let mut text = String::new();
    for line in 0..height {
        let mut row = String::new();
        for (place, column) in drawn.iter().enumerate() {
            if place > 0 {
                row.push_str(if line == 1 { " ─► " } else { "    " });
            }
            let cell = column.get(line).map_or("", String::as_str);
            row.push_str(cell);
            row.extend(std::iter::repeat_n(' ', widths[place].saturating_sub(cell.chars().count())));
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text.trim_end().to_owned()
}

fn frame(lines: &[String], width: usize) -> Vec<String> {
    let name = &lines[0];
    let rule = |used: usize| "─".repeat(width.saturating_sub(used));
    let mut framed = vec![format!("┌ {name} {}┐", rule(name.chars().count() + 4))];
    for line in &lines[1..] {
        let fill = " ".repeat(width.saturating_sub(line.chars().count() + 4));
        framed.push(format!("│ {line}{fill} │"));
    }
    framed.push(format!("└{}┘", rule(2)));
    framed
}

/// One line for each step.
fn listed(steps: &[Value]) -> String {
    let line = |step: &Value| {
        let name = printable(step["slug"].as_str().unwrap_or_default());
        let status = step.get("status").map(|_| format!("  {}", standing(step))).unwrap_or_default();
        let before: Vec<&str> = names(&step["dependsOn"]).collect();
        let after = if before.is_empty() {
            String::new()
        } else {
            format!("  after {}", printable(&before.join(", ")))
        };
        format!("{name}{status}  {}{after}", where_to(step))
    };
    steps.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn steps_stand_in_columns_with_an_arrow_between_them() {
        let steps = json!([
            {"slug": "fetch", "dependsOn": [], "queue": "data", "status": "completed"},
            {"slug": "notify", "dependsOn": ["fetch"], "queue": "mail", "status": "started", "initialTasks": 1, "tasks": {"started": 1}},
            {"slug": "debug", "dependsOn": ["fetch"], "manual": true, "queue": null, "status": "started", "initialTasks": 1, "tasks": {}},
        ]);
        let drawn = draw(&steps, 100);
        let expected = "\
┌ fetch ──────┐    ┌ notify ─────────┐
│ ✔ completed │ ─► │ ▶ runs          │
│ data        │    │ mail            │
└─────────────┘    └─────────────────┘
                   ┌ debug ──────────┐
                   │ ☞ waits for you │
                   │ by hand         │
                   └─────────────────┘";
        assert_eq!(drawn, expected, "\n{drawn}");
        let narrow = draw(&steps, 20);
        assert!(narrow.contains("notify  ▶ runs  mail  after fetch"), "{narrow}");
    }
}
