//! NATS with JetStream: one process, its streams in a folder of its own.
//!
//! Who connects may do anything, unless the test gives the server a name and a password. The store is not written to disk at every
//! message: `sync_interval: always` among the further lines does that, on servers that know it.

use std::fs;
use std::process::Command;

use anyhow::Result;

use crate::process::{Recipe, Server, free_port};

/// What Debian calls it.
pub const PACKAGE: &str = "nats-server";

/// Where Debian puts it.
pub const PROGRAM: &str = "/usr/sbin/nats-server";

/// Starts a server that lets everybody in.
pub fn start() -> Result<Server> {
    start_with("")
}

/// Starts a server with further lines of configuration, such as `authorization { user: a, password: b }`.
pub fn start_with(lines: &str) -> Result<Server> {
    let port = free_port()?;
    let lines = lines.to_owned();
    let recipe = Recipe {
        name: "nats",
        port,
        command: Box::new(|folder| {
            let mut command = Command::new(PROGRAM);
            command.arg("-c").arg(folder.join("server.conf"));
            command
        }),
        ready: Box::new(|_| true),
        user: None,
    };
    Server::start(recipe, |folder| {
        let store = folder.join("store");
        let config = format!(
            "listen: 127.0.0.1:{port}\njetstream {{ store_dir: {:?}, max_mem: 256M, max_file: 4G }}\n{lines}\n",
            store.display().to_string()
        );
        Ok(fs::write(folder.join("server.conf"), config)?)
    })
}

/// How to connect to it.
pub fn url(server: &Server) -> String {
    format!("nats://{}", server.address())
}
