//! Rules about names and lines, each a pure function from what it looks at to what it finds.
//!
//! They read line by line and know just enough Rust to leave strings and comments aside ([`code_of`]); a string that spans
//! lines is read as code. That is a reader's eye and not a parser: it catches what is forgotten, not what is hidden. What
//! is searched for in comments too is written here in two pieces, so that this file passes its own rules.

use std::path::Path;

use super::Finding;

/// Names that say where a thing was put and not what it is.
const EMPTY_NAMES: [&str; 8] = ["util", "utils", "common", "misc", "helper", "helpers", "shared", "stuff"];

/// Macros that are for the time of writing.
const LEFTOVER_MACROS: [&str; 3] = ["todo!(", "unimplemented!(", "dbg!("];

/// Words that promise work for later.
const LEFTOVER_WORDS: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

/// Folders that exist on one machine only.
const MACHINE_PATHS: [&str; 4] =
    [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];

/// What sleeps: a thread, and a task.
const SLEEPS: [&str; 2] = ["thread::sleep", "time::sleep("];

/// The comment that excuses a sleeping test, with the reason behind it.
const PACED: &str = "// paced:";

/// A file or folder is named after what it is.
pub(super) fn telling_name(path: &Path) -> Vec<Finding> {
    let names = path.iter().filter_map(|part| Path::new(part).file_stem()?.to_str());
    names
        .filter(|name| EMPTY_NAMES.contains(name))
        .map(|name| Finding::new(1, format!("`{name}` says where it was put, not what it is")))
        .collect()
}

/// A source file begins by saying what it is for, or by including the document that does.
pub(super) fn opens_with_prose(text: &str) -> Vec<Finding> {
    let first = text.lines().next().unwrap_or_default();
    let includes_prose = first.starts_with("#![doc = include_str!(");
    let is_prose = first.strip_prefix("//!").is_some_and(|prose| !prose.trim().is_empty());
    match is_prose || includes_prose {
        true => Vec::new(),
        false => vec![Finding::new(1, "does not open with `//!` and a sentence on its role")],
    }
}

/// Nothing is left for later, and nothing from the time of writing.
pub(super) fn nothing_left_over(text: &str) -> Vec<Finding> {
    find_lines(text, |line| {
        let code = code_of(line);
        let macros = LEFTOVER_MACROS.iter().find(|needle| code.contains(**needle));
        let found = macros.or_else(|| LEFTOVER_WORDS.iter().find(|word| has_word(line, word)))?;
        Some(format!("`{found}` is left over"))
    })
}

/// No path of the machine on which something was written.
pub(super) fn no_machine_paths(text: &str) -> Vec<Finding> {
    find_lines(text, |line| {
        let found = MACHINE_PATHS.iter().find(|folder| starts_a_path(line, folder))?;
        Some(format!("`{found}` exists on one machine only"))
    })
}

/// Tests wait for signals. One that has to sleep says why in a comment at the end of the line.
pub(super) fn no_sleeping_tests(path: &Path, text: &str) -> Vec<Finding> {
    let Some(first) = first_test_line(path, text) else { return Vec::new() };
    let sleeps = find_lines(text, |line| {
        let excused = line.split_once(PACED).is_some_and(|(_, reason)| !reason.trim().is_empty());
        let code = code_of(line);
        let sleeps = SLEEPS.iter().any(|sleep| code.contains(sleep)) && !excused;
        sleeps.then(|| format!("a test waits for a signal, or says why it cannot: `{PACED} <reason>`"))
    });
    sleeps.into_iter().filter(|finding| finding.line >= first).collect()
}

/// Every use of the keyword `unsafe` has, on its line or in the comment above it, a word on why it holds.
pub(super) fn unsafe_is_argued(text: &str) -> Vec<Finding> {
    let mut argued = false;
    find_lines(text, |line| {
        argued |= has_word(line, "SAFETY") || line.contains("# Safety");
        let code = code_of(line);
        let offends = has_word(&code, "unsafe") && !argued;
        // The argument holds for the next line of code; attributes may stand between.
        if !code.trim().is_empty() && !code.trim_start().starts_with('#') {
            argued = false;
        }
        offends.then(|| "`unsafe` without a SAFETY comment above it".to_owned())
    })
}

/// Where the tests of a file begin: at once for files of tests, else at the first test module.
fn first_test_line(path: &Path, text: &str) -> Option<usize> {
    let is_test_file = path.iter().any(|part| part == "tests" || part == "tests.rs");
    let is_test_module =
        |line: &str| ["#[cfg(test)]", "#[cfg(all(test"].iter().any(|start| line.trim().starts_with(start));
    match is_test_file {
        true => Some(1),
        false => text.lines().position(is_test_module).map(|index| index + 1),
    }
}

fn find_lines(text: &str, mut rule: impl FnMut(&str) -> Option<String>) -> Vec<Finding> {
    let numbered = text.lines().zip(1..);
    numbered.filter_map(|(line, number)| Some(Finding::new(number, rule(line)?))).collect()
}

/// The line without its strings and without the comment at its end.
fn code_of(line: &str) -> String {
    let mut code = String::with_capacity(line.len());
    let mut in_string = false;
    // A quote as a character would look like the beginning of a string.
    let line = line.replace("'\"'", "").replace("'\\\"'", "");
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\\' if in_string => drop(characters.next()),
            '"' => in_string = !in_string,
            _ if in_string => {}
            '/' if characters.peek() == Some(&'/') => break,
            _ => code.push(character),
        }
    }
    code
}

/// Whether the word stands alone, not as a part of a longer one.
fn has_word(line: &str, word: &str) -> bool {
    let is_part = |character: char| character.is_alphanumeric() || character == '_';
    line.match_indices(word).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + word.len()..].chars().next();
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

/// Whether the folder begins a path here, and is not the middle of a relative one or of an address.
fn starts_a_path(line: &str, folder: &str) -> bool {
    let continues_a_path = |character: char| character.is_alphanumeric() || "._-~)}".contains(character);
    line.match_indices(folder)
        .any(|(start, _)| !line[..start].chars().next_back().is_some_and(continues_a_path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(findings: Vec<Finding>) -> Vec<usize> {
        findings.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn names_that_say_nothing_are_found_in_files_and_folders() {
        assert_eq!(telling_name(Path::new("src/utils.rs")).len(), 1);
        assert_eq!(telling_name(Path::new("tests/common/mod.rs")).len(), 1);
        assert!(telling_name(Path::new("src/commonplace.rs")).is_empty());
    }

    #[test]
    fn a_file_without_opening_prose_is_found() {
        assert_eq!(lines(opens_with_prose("use std::fs;\n")), [1]);
        assert_eq!(lines(opens_with_prose("//!\n//! Late.\n")), [1]);
        assert_eq!(lines(opens_with_prose("")), [1]);
        assert!(opens_with_prose("//! What it is for.\n").is_empty());
        assert!(opens_with_prose("#![doc = include_str!(\"../README.md\")]\n").is_empty());
    }

    #[test]
    fn leftover_macros_are_found_in_code_and_not_in_strings() {
        for needle in LEFTOVER_MACROS {
            assert_eq!(lines(nothing_left_over(&format!("fn f() {{\n    {needle})\n}}"))), [2], "{needle}");
            assert!(nothing_left_over(&format!("let text = \"{needle})\";")).is_empty(), "{needle}");
        }
    }

    #[test]
    fn leftover_words_are_found_in_comments_and_not_inside_other_words() {
        for word in LEFTOVER_WORDS {
            assert_eq!(lines(nothing_left_over(&format!("// {word}: later"))), [1], "{word}");
            assert!(nothing_left_over(&format!("const {word}_MAX: u8 = 1;")).is_empty(), "{word}");
        }
    }

    #[test]
    fn paths_of_one_machine_are_found_and_relative_ones_are_not() {
        for folder in MACHINE_PATHS {
            assert_eq!(lines(no_machine_paths(&format!("see `{folder}x`"))), [1], "{folder}");
            assert_eq!(lines(no_machine_paths(&format!("{folder}x"))), [1], "{folder}");
            assert!(
                no_machine_paths(&format!("https://example.org{folder}x and docs{folder}x")).is_empty(),
                "{folder}"
            );
        }
    }

    #[test]
    fn a_sleeping_test_is_found_unless_it_says_why() {
        let test = Path::new("tests/ordering.rs");
        assert_eq!(lines(no_sleeping_tests(test, "\nthread::sleep(TICK);")), [2]);
        assert_eq!(lines(no_sleeping_tests(test, "thread::sleep(TICK); // paced:")), [1]);
        assert_eq!(lines(no_sleeping_tests(test, "tokio::time::sleep(TICK).await;")), [1]);
        assert_eq!(lines(no_sleeping_tests(test, "\ntime::sleep(TICK).await;")), [2]);
        assert!(
            no_sleeping_tests(test, "tokio::time::sleep(TICK).await; // paced: as slow as a target")
                .is_empty()
        );
        assert!(no_sleeping_tests(test, "thread::sleep(TICK); // paced: the work of the handler").is_empty());
        assert!(no_sleeping_tests(test, "// thread::sleep would be slow").is_empty());
    }

    #[test]
    fn sleep_is_for_tests_alone_to_avoid() {
        let source = Path::new("src/worker.rs");
        assert!(no_sleeping_tests(source, "thread::sleep(BACKOFF);").is_empty());
        assert_eq!(
            lines(no_sleeping_tests(source, "#[cfg(test)]\nmod tests { fn f() { thread::sleep(T) } }")),
            [2]
        );
    }

    #[test]
    fn unsafe_without_an_argument_is_found() {
        assert_eq!(lines(unsafe_is_argued("let x = unsafe { read(p) };")), [1]);
        assert_eq!(
            lines(unsafe_is_argued("// SAFETY: p is valid.\nlet y = 1;\nlet x = unsafe { read(p) };")),
            [3]
        );
    }

    #[test]
    fn unsafe_with_an_argument_passes() {
        assert!(
            unsafe_is_argued("// SAFETY: p is valid,\n// for it was checked.\n#[inline]\nunsafe { read(p) }")
                .is_empty()
        );
        assert!(unsafe_is_argued("#![forbid(unsafe_code)]\nlet text = \"unsafe\"; // unsafe").is_empty());
    }

    #[test]
    fn code_is_what_remains_without_strings_and_comments() {
        assert_eq!(code_of(r#"call("a \" // b", '"'); // why"#), "call(, ); ");
    }
}
