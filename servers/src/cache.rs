//! Servers that Debian does not have: fetched from npm and PyPI at pinned versions, into a folder beside the build's own files.
//!
//! What is to be there is said by files in this crate's tree, `npm/package-lock.json` and `python/requirements.txt`. `cargo xtask setup` installs from them when
//! they have changed since the last time, which it sees by the copies that it leaves behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::run;

/// By this file, in which cargo remembers what the compiler is, one knows the folder that it builds into.
const MARK: &str = ".rustc_info.json";

/// Names of files and what is in them.
type Files = &'static [(&'static str, &'static str)];

const NPM: Files = &[
    ("package.json", include_str!("../npm/package.json")),
    ("fauxqs.mjs", include_str!("../npm/fauxqs.mjs")),
    ("package-lock.json", include_str!("../npm/package-lock.json")),
];

const PYTHON: Files = &[("requirements.txt", include_str!("../python/requirements.txt"))];

/// Installs what is missing or has changed.
pub fn install() -> Result<()> {
    let npm = npm()?;
    if !is_current(&npm, NPM) {
        eprintln!("installing servers from npm");
        renew(&npm, NPM)?;
        run(Command::new("npm")
            .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
            .current_dir(&npm))?;
        seal(&npm, NPM)?;
    }
    let python = python()?;
    if !is_current(&python, PYTHON) {
        eprintln!("installing servers from PyPI");
        renew(&python, PYTHON)?;
        run(Command::new("python3").args(["-m", "venv", "venv"]).current_dir(&python))?;
        run(Command::new("venv/bin/python")
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "-r", "requirements.txt"])
            .current_dir(&python))?;
        seal(&python, PYTHON)?;
    }
    Ok(())
}

/// The folder of what comes from npm.
pub fn npm() -> Result<PathBuf> {
    Ok(root()?.join("npm"))
}

/// The folder of what comes from PyPI.
pub fn python() -> Result<PathBuf> {
    Ok(root()?.join("python"))
}

/// A file of the cache, which must be there.
pub fn file(path: PathBuf) -> Result<PathBuf> {
    path.exists()
        .then(|| path.clone())
        .with_context(|| format!("{} is not there: `cargo xtask setup` installs it", path.display()))
}

/// `servers` in the folder that this program was built into.
fn root() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let target = program.ancestors().find(|folder| folder.join(MARK).exists());
    let target = target.with_context(|| format!("{} is not where cargo builds", program.display()))?;
    Ok(target.join("servers"))
}

/// The name under which the mark of a finished installation is kept.
const SEAL: &str = "installed";

fn is_current(folder: &Path, files: Files) -> bool {
    fs::read_to_string(folder.join(SEAL)).is_ok_and(|seal| seal == sealed(files))
}

fn sealed(files: Files) -> String {
    files.iter().map(|(name, text)| format!("{name}\n{text}\n")).collect()
}

fn seal(folder: &Path, files: Files) -> Result<()> {
    Ok(fs::write(folder.join(SEAL), sealed(files))?)
}

/// An empty folder with these files.
fn renew(folder: &Path, files: Files) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    fs::create_dir_all(folder)?;
    for (name, text) in files {
        fs::write(folder.join(name), text)?;
    }
    Ok(())
}
