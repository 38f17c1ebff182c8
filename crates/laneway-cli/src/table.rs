//! What the verbs print of a service: a table for people, or one JSON object per line for programs; and a bar while it takes long.
//!
//! A verb hands over the service's answer and says which fields make the columns. Programs get every field, as the service named it.

use std::io::{self, IsTerminal, Write};

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

/// A column: its heading, and its text for a row. Headings of numbers begin with `>` and stand to the right.
pub(crate) type Column = (&'static str, fn(&Value) -> String);

/// Prints data to standard output, in one of the two looks; `empty` is what a person reads if there is none.
pub(crate) fn print(json: bool, rows: &Value, columns: &[Column], empty: &str) -> io::Result<()> {
    let one = std::slice::from_ref(rows);
    let rows = rows.as_array().map_or(one, Vec::as_slice);
    if json {
        return lines(rows);
    }
    if rows.is_empty() {
        eprintln!("{empty}");
        return Ok(());
    }
    writeln!(io::stdout().lock(), "{}", text(rows, columns))
}

/// Prints each value on a line of its own.
pub(crate) fn lines(rows: &[Value]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    rows.iter().try_for_each(|row| writeln!(out, "{row}"))
}

/// A table without lines, its numbers to the right.
pub(crate) fn text(rows: &[Value], columns: &[Column]) -> String {
    let headings: Vec<&str> = columns.iter().map(|(heading, _)| heading.trim_start_matches('>')).collect();
    let cells = rows.iter().map(|row| columns.iter().map(|(_, cell)| cell(row)).collect()).collect();
    let right: Vec<bool> = columns.iter().map(|(heading, _)| heading.starts_with('>')).collect();
    aligned(&headings, cells, &right)
}

/// The same for cells that are texts already.
pub(crate) fn aligned(headings: &[&str], rows: Vec<Vec<String>>, right: &[bool]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.iter().map(|heading| heading.to_owned()));
    table.add_rows(rows.into_iter().map(|row| row.iter().map(|cell| printable(cell)).collect::<Vec<_>>()));
    for (place, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right[place] {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

/// A bar for so many messages; nothing where nobody looks, or where one request is enough.
pub(crate) fn bar(count: u64, request: u64) -> ProgressBar {
    if !io::stderr().is_terminal() || count <= request {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:32} {percent:>3} %  {human_pos} messages, {eta} left");
    ProgressBar::new(count).with_style(style.expect("the template is right"))
}

/// Names come from publishers: one that holds an escape sequence must not reach a terminal as such.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|char| if char.is_control() { char.escape_debug().collect() } else { vec![char] })
        .collect()
}

/// A field as a person writes it; nothing for what is not there.
pub(crate) fn field(row: &Value, name: &str) -> String {
    match row.pointer(&format!("/{}", name.replace('.', "/"))) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.as_u64().map_or_else(|| other.to_string(), grouped),
    }
}

/// A whole number with its thousands apart.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// One thing, or so many of them: `1 message`, `2 messages`.
pub(crate) fn count(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", grouped(number))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_aligned_and_numbers_stand_to_the_right() {
        let rows = [json!({"group": "a", "depth": 1234}), json!({"group": "longer", "depth": 5})];
        let columns: [Column; 2] =
            [("group", |row| field(row, "group")), (">depth", |row| field(row, "depth"))];
        assert_eq!(text(&rows, &columns), "group   depth\na       1,234\nlonger      5");
    }

    #[test]
    fn names_cannot_speak_to_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
    }

    #[test]
    fn thousands_are_apart_and_one_is_one() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            (count(1, "message"), count(1200, "message")),
            ("1 message".into(), "1,200 messages".into())
        );
    }

    #[test]
    fn fields_may_be_deep_or_missing() {
        let row = json!({"latency": {"p50Millis": 1.5}, "none": null});
        assert_eq!(
            (field(&row, "latency.p50Millis"), field(&row, "none"), field(&row, "no.such")),
            ("1.5".into(), String::new(), String::new())
        );
    }
}
