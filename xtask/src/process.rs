//! Child processes: where they run, how they are shown, and what their failure looks like.
//!
//! All verbs start their children here. Output is passed through untouched; the command line itself goes to standard
//! error first, with the variables that were set for it.

use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The root of the repository, which is where every child runs.
///
/// Cargo says where this package lives at run time, and the root is one above; the path of compile time would be wrong
/// after the repository has been moved.
pub(crate) fn root() -> PathBuf {
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let mut root = PathBuf::from(package);
    root.pop();
    root
}

/// A call of the cargo that started this program, with its arguments separated by blanks.
pub(crate) fn cargo(arguments: &str) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments.split_whitespace()).current_dir(root());
    // They describe this program. Some build scripts look at them, and would have all that hangs on them built again after a plain `cargo test`.
    let describes_us = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    let ours = env::vars_os().filter(|(name, _)| name.to_str().is_some_and(describes_us));
    ours.for_each(|(name, _)| drop(command.env_remove(name)));
    command
}

/// Shows the command, runs it with its output passed through, and fails when it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", shown(command));
    let status = command.status().with_context(|| format!("cannot start {}", program(command)))?;
    if !status.success() {
        bail!("{}: {status}", shown(command));
    }
    Ok(())
}

/// Runs the command and returns what it wrote to standard output; the rest is passed through.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    eprintln!("$ {}", shown(command));
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", program(command)))?;
    if !output.status.success() {
        bail!("{}: {}", shown(command), output.status);
    }
    Ok(output.stdout)
}

/// Whether the command exists and answers; what it says is of no interest.
pub(crate) fn answers(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The command as one would type it, variables included.
fn shown(command: &Command) -> String {
    let variables =
        command.get_envs().filter_map(|(name, value)| Some(format!("{}={}", text(name), text(value?))));
    let arguments = command.get_args().map(text);
    variables
        .chain([program(command)])
        .chain(arguments)
        .map(|word| quoted(&word))
        .collect::<Vec<_>>()
        .join(" ")
}

/// The program's name without the folders of this machine.
fn program(command: &Command) -> String {
    let path = PathBuf::from(command.get_program());
    text(path.file_stem().unwrap_or(path.as_os_str()))
}

fn text(word: &OsStr) -> String {
    word.to_string_lossy().into_owned()
}

fn quoted(word: &str) -> String {
    match word.split_once('=') {
        Some((name, value)) if value.contains(' ') => format!("{name}=\"{value}\""),
        _ if word.contains(' ') => format!("\"{word}\""),
        _ => word.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_one_would_type_it() {
        let mut command = Command::new("cargo");
        command.args(["test", "--release"]).env("RUSTFLAGS", "--cfg loom");
        assert_eq!(shown(&command), "RUSTFLAGS=\"--cfg loom\" cargo test --release");
    }

    #[test]
    fn a_failing_child_is_an_error_that_names_it() {
        let error = run(&mut cargo("no-such-verb")).expect_err("cargo knows no such verb");
        assert!(error.to_string().starts_with("cargo no-such-verb: exit"), "{error}");
    }

    #[test]
    fn the_root_holds_the_workspace() {
        assert!(root().join("Cargo.toml").is_file());
        assert!(root().join("xtask").is_dir());
    }
}
