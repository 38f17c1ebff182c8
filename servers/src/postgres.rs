//! Postgres: a cluster of its own per server, made in about a second.
//!
//! Debian keeps the programs away from the path, by version; the newest is taken. Commits are synchronous, as users have them. Older and newer
//! versions than Debian's come from npm.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cache;
use crate::process::{Recipe, Server, as_user, free_port, run};

/// What Debian calls it.
pub const PACKAGE: &str = "postgresql";

/// The cluster's owner, and the name of its first database.
pub const USER: &str = "laneway";

/// As whom it runs: it refuses to be root.
const SYSTEM_USER: &str = "postgres";

/// Where Debian puts the programs, a folder per version.
const VERSIONS: &str = "/usr/lib/postgresql";

/// Names one of [`OTHER_VERSIONS`] for all tests, to see what a version does to them.
const VERSION_VARIABLE: &str = "LANEWAY_TEST_POSTGRES";

/// Starts a cluster. Everybody on this machine may connect to it without a password.
pub fn start() -> Result<Server> {
    if let Ok(version) = std::env::var(VERSION_VARIABLE) {
        return start_version(version.parse().with_context(|| format!("{VERSION_VARIABLE} is no version"))?);
    }
    let programs = programs()?;
    let port = free_port()?;
    let initdb = programs.join("initdb");
    let recipe = Recipe {
        name: "postgres",
        port,
        command: Box::new({
            let postgres = programs.join("postgres");
            move |folder| server(&postgres, folder, port)
        }),
        ready: Box::new(move |_| answers(&programs.join("pg_isready"), port)),
        user: Some(SYSTEM_USER),
    };
    Server::start(recipe, |folder| init(&initdb, folder))
}

/// Versions beside Debian's: the oldest that we support, and the newest that there is. Nobody packs the oldest for other processors.
pub const OTHER_VERSIONS: &[u32] = if cfg!(target_arch = "x86_64") { &[14, 18] } else { &[18] };

/// Starts a cluster of one of [`OTHER_VERSIONS`].
pub fn start_version(version: u32) -> Result<Server> {
    let processor = if cfg!(target_arch = "x86_64") { "x64" } else { "arm64" };
    let package = cache::npm()?.join("node_modules").join(format!("postgres-{version}-linux-{processor}"));
    let package = cache::file(package)?;
    let (pg_isready, port) = (programs()?.join("pg_isready"), free_port()?);
    let recipe = Recipe {
        name: "postgres",
        port,
        command: Box::new(move |folder| server(&folder.join("native/bin/postgres"), folder, port)),
        ready: Box::new(move |_| answers(&pg_isready, port)),
        user: Some(SYSTEM_USER),
    };
    Server::start(recipe, |folder| {
        unpack(&package, folder)?;
        init(&folder.join("native/bin/initdb"), folder)
    })
}

/// The programs as a copy in the server's folder: the user that it runs as may not be allowed to look into ours. A package has no links; its
/// script would make them, which we do not run.
fn unpack(package: &Path, folder: &Path) -> Result<()> {
    run(Command::new("cp").arg("-r").arg(package.join("native")).arg(folder))?;
    let links: Value = serde_json::from_str(&fs::read_to_string(package.join("native/pg-symlinks.json"))?)?;
    for link in links.as_array().into_iter().flatten() {
        let path = |name: &str| {
            link[name].as_str().map(Path::new).with_context(|| format!("a link without its {name}"))
        };
        let (source, target) = (path("source")?, folder.join(path("target")?));
        if !target.exists() {
            symlink(source.file_name().context("a link to nothing")?, target)?;
        }
    }
    Ok(())
}

/// How to connect to it, for every client that understands URLs.
pub fn url(server: &Server) -> String {
    format!("postgres://{USER}@{}/postgres", server.address())
}

/// The folder with the programs of the newest version that is installed.
pub fn programs() -> Result<PathBuf> {
    let versions = fs::read_dir(VERSIONS).with_context(|| {
        format!("{VERSIONS} is not there: `cargo xtask setup` installs the package {PACKAGE}")
    })?;
    let numbered = versions.flatten().filter_map(|version| {
        let number: u32 = version.file_name().to_str()?.parse().ok()?;
        Some((number, version.path().join("bin")))
    });
    numbered.max().map(|(_, path)| path).with_context(|| format!("no version of Postgres in {VERSIONS}"))
}

fn init(initdb: &Path, folder: &Path) -> Result<()> {
    let mut command = Command::new(initdb);
    command
        .args(["-A", "trust", "-U", USER, "-N", "-E", "UTF8", "--locale=C", "-D"])
        .arg(folder.join("data"));
    command.current_dir(folder);
    run(&mut as_user(command, Some(SYSTEM_USER))).map(drop)
}

fn server(postgres: &Path, folder: &Path, port: u16) -> Command {
    let mut command = Command::new(postgres);
    command.arg("-D").arg(folder.join("data")).args(["-p", &port.to_string()]);
    command.args(["-c", "listen_addresses=127.0.0.1", "-c", "max_connections=500"]);
    command.arg("-c").arg(format!("unix_socket_directories={}", folder.display())).current_dir(folder);
    command
}

fn answers(pg_isready: &Path, port: u16) -> bool {
    let port = port.to_string();
    run(Command::new(pg_isready).args(["-q", "-h", "127.0.0.1", "-p", &port])).is_ok()
}
