//! Postgres: a cluster of its own per server, made in about a second.
//!
//! Debian keeps the programs away from the path, by version; the newest is taken. Commits are synchronous, as users have them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::{Recipe, Server, as_user, free_port, run};

/// What Debian calls it.
pub const PACKAGE: &str = "postgresql";

/// The cluster's owner, and the name of its first database.
pub const USER: &str = "laneway";

/// As whom it runs: it refuses to be root.
const SYSTEM_USER: &str = "postgres";

/// Where Debian puts the programs, a folder per version.
const VERSIONS: &str = "/usr/lib/postgresql";

/// Starts a cluster. Everybody on this machine may connect to it without a password.
pub fn start() -> Result<Server> {
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
