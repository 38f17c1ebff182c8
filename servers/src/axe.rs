//! axe: the rules of accessibility, as a script that a test runs in its browser. It comes from npm at a pinned version and never reaches the product.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::run;

const FILES: [(&str, &str); 2] = [
    ("package.json", include_str!("../axe/package.json")),
    ("package-lock.json", include_str!("../axe/package-lock.json")),
];

/// By this file cargo marks the folder that it builds into.
const MARK: &str = "CACHEDIR.TAG";

/// The script itself, installed if it is not there yet.
pub fn script() -> Result<String> {
    install()?;
    let path = folder()?.join("node_modules/axe-core/axe.min.js");
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Fetches it, unless it is there already.
pub fn install() -> Result<()> {
    let folder = folder()?;
    let (lock, text) = FILES[1];
    let seal = folder.join("installed");
    if fs::read_to_string(&seal).is_ok_and(|sealed| sealed == text) {
        return Ok(());
    }
    eprintln!("installing axe from npm, by {lock}");
    fs::create_dir_all(&folder)?;
    for (name, text) in FILES {
        fs::write(folder.join(name), text)?;
    }
    run(Command::new("npm")
        .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
        .current_dir(&folder))?;
    Ok(fs::write(seal, text)?)
}

/// In the folder that this program was built into.
fn folder() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let target = program.ancestors().find(|folder| folder.join(MARK).exists());
    let target = target.with_context(|| format!("{} is not where cargo builds", program.display()))?;
    Ok(target.join("servers/axe"))
}
