//! Chromium, driven by chromedriver: the browser in which the dashboard is tested.
//!
//! The driver listens on loopback and starts a browser for every session that a test opens; how a test talks to it is the test's own business (the WebDriver protocol is
//! JSON over HTTP). A browser must not outlive its driver, also when a test is killed: it is started through a little script that binds it to the driver.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{Recipe, Server, free_port};

/// What Debian calls them.
pub const PACKAGES: [&str; 2] = ["chromium", "chromium-driver"];

const DRIVER: &str = "/usr/bin/chromedriver";
const BROWSER: &str = "/usr/bin/chromium";

/// Starts a driver.
pub fn start() -> Result<Server> {
    for program in [DRIVER, BROWSER] {
        if !Path::new(program).exists() {
            bail!("{program} is not there: `cargo xtask setup` installs {}", PACKAGES.join(" and "));
        }
    }
    let port = free_port()?;
    let recipe = Recipe {
        name: "chromedriver",
        port,
        // Without a list of addresses that may connect: with one, it would listen on all of them.
        command: Box::new(move |folder| {
            let mut command = Command::new(DRIVER);
            command.arg(format!("--port={port}")).env("HOME", folder).current_dir(folder);
            command
        }),
        ready: Box::new(|_| true),
        user: None,
    };
    Server::start(recipe, write_script)
}

/// The program that a session is to start, instead of the browser itself.
pub fn browser(server: &Server) -> PathBuf {
    script(server.folder())
}

fn script(folder: &Path) -> PathBuf {
    folder.join("browser")
}

fn write_script(folder: &Path) -> Result<()> {
    let path = script(folder);
    let text = format!("#!/bin/sh\nexec setpriv --pdeathsig KILL {BROWSER} \"$@\"\n");
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
}
