//! `cargo xtask tidy`: the style rules that neither the compiler nor clippy knows, as a check that can fail.
//!
//! This file walks the tree and decides which rule looks at which file. The rules are pure functions from text to findings:
//! [`rules`] for what a line may hold, [`links`] for the documents. Each has tests that show it failing.

mod links;
mod rules;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::process::root;

/// The files that are read: everything that people write here. Others, such as pictures, are judged by name only.
const TEXT: [&str; 9] = ["rs", "md", "toml", "conf", "sql", "sh", "yml", "yaml", "json"];

/// What a rule has to say about a line.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    /// Counted from 1, as editors do.
    line: usize,
    message: String,
}

impl Finding {
    fn new(line: usize, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }
}

pub(crate) fn run() -> Result<()> {
    let root = root();
    let files = files_below(&root)?;
    let mut count = 0;
    for file in &files {
        let inside = file.strip_prefix(&root).unwrap_or(file);
        for Finding { line, message } in findings(&root, inside)? {
            eprintln!("{}:{line}: {message}", inside.display());
            count += 1;
        }
    }
    if count > 0 {
        bail!("{count} findings in {} files", files.len());
    }
    eprintln!("{} files, all tidy", files.len());
    Ok(())
}

/// All findings about the file at `path`, which is relative to the root.
fn findings(root: &Path, path: &Path) -> Result<Vec<Finding>> {
    let mut findings = rules::telling_name(path);
    if !is_text(path) {
        return Ok(findings);
    }
    let text =
        fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {}", path.display()))?;
    findings.extend(rules::no_machine_paths(&text));
    match extension(path) {
        "rs" => {
            findings.extend(rules::opens_with_prose(&text));
            findings.extend(rules::nothing_left_over(&text));
            findings.extend(rules::no_sleeping_tests(path, &text));
            findings.extend(rules::unsafe_is_argued(&text));
        }
        "md" => {
            let folder = path.parent().unwrap_or(Path::new(""));
            findings.extend(links::links_resolve(&text, |target| link_target(root, folder, target).exists()));
        }
        _ => {}
    }
    Ok(findings)
}

/// Where a link leads: from the document's folder, or from the root when it begins with a slash.
fn link_target(root: &Path, folder: &Path, target: &str) -> PathBuf {
    match target.strip_prefix('/') {
        Some(from_root) => root.join(from_root),
        None => root.join(folder).join(target),
    }
}

/// Scripts without an extension live in `.ci`.
fn is_text(path: &Path) -> bool {
    TEXT.contains(&extension(path)) || path.starts_with(".ci")
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}

/// All files below a folder, sorted, so that two runs say the same in the same order.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() && !is_generated(&entry.path()) {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Folders that a program filled: the history, what benchmarks wrote, and whatever is marked as a cache, as cargo marks
/// its target folders.
fn is_generated(folder: &Path) -> bool {
    folder.ends_with(".git") || folder.ends_with("bench-results") || folder.join("CACHEDIR.TAG").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walk_finds_sources_and_leaves_out_what_was_generated() {
        let root = root();
        let files = files_below(&root).expect("the repository can be read");
        assert!(files.contains(&root.join("xtask/src/tidy/mod.rs")));
        assert!(!files.iter().any(|file| file.starts_with(root.join(".git"))));
    }

    #[test]
    fn a_link_starts_at_its_document_or_at_the_root() {
        let target = |target| link_target(Path::new("root"), Path::new("docs/design"), target);
        assert_eq!(target("ordering.md"), Path::new("root/docs/design/ordering.md"));
        assert_eq!(target("/README.md"), Path::new("root/README.md"));
    }

    #[test]
    fn this_file_is_tidy() {
        assert_eq!(findings(&root(), Path::new("xtask/src/tidy/mod.rs")).expect("readable"), []);
    }
}
