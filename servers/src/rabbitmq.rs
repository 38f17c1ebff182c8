//! RabbitMQ: one node in about eight seconds, with the plug-in for consistent hashing.
//!
//! A node asks a second program, `epmd`, for its name; left alone it would start one for all of its machine that outlives it. So each
//! broker has an `epmd` of its own, on loopback, that is ended with it. The node itself is started by the package's own script, told
//! to become the node instead of watching over it, so that the process we know is the one that has to end.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::{Recipe, Server, free_port, is_open, run};

/// What Debian calls it.
pub const PACKAGE: &str = "rabbitmq-server";

/// Where Debian puts it, a folder per version.
pub const VERSIONS: &str = "/usr/lib/rabbitmq/lib";

/// A node and its `epmd`. Both end when this is dropped.
pub struct Broker {
    /// The node.
    pub node: Server,
    epmd: Server,
    /// What the node is called.
    name: String,
}

impl Broker {
    /// Runs `rabbitmqctl` with these words.
    pub fn control(&self, words: &[&str]) -> Result<()> {
        let mut command = Command::new(script()?.with_file_name("rabbitmqctl"));
        command
            .args(["--node", &self.name])
            .args(words)
            .env("HOME", self.node.folder())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("ERL_EPMD_PORT", self.names().port().to_string());
        run(&mut command).map(drop)
    }

    /// Where its `epmd` listens.
    pub fn names(&self) -> SocketAddr {
        self.epmd.address()
    }

    /// See [`Server::clear_away_at_the_end`].
    pub fn clear_away_at_the_end(&self) -> Result<()> {
        self.node.clear_away_at_the_end()?;
        self.epmd.clear_away_at_the_end()
    }
}

/// Starts a node. The user `guest` with the password `guest` may do everything.
pub fn start() -> Result<Broker> {
    start_with(None, |_| Ok(String::new()))
}

/// The same, and it speaks TLS, too: with this certificate and key (PEM), on a port that is given back.
pub fn start_with_tls(certificate: &str, key: &str) -> Result<(Broker, u16)> {
    let port = free_port()?;
    let broker = start_with(Some(port), |folder| {
        let file = |name: &str| folder.join(name).display().to_string();
        let (certificate_file, key_file) = (file("certificate.pem"), file("key.pem"));
        fs::write(&certificate_file, certificate)?;
        fs::write(&key_file, key)?;
        Ok(format!(
            "listeners.ssl.1 = 127.0.0.1:{port}\nssl_options.cacertfile = {certificate_file}\nssl_options.certfile = {certificate_file}\nssl_options.keyfile = {key_file}\nssl_options.verify = verify_none\n"
        ))
    })?;
    Ok((broker, port))
}

/// Starts a node with further settings, which may need files in its folder, and waits for its port for TLS, too, if it has one.
fn start_with(tls: Option<u16>, further: impl FnOnce(&Path) -> Result<String>) -> Result<Broker> {
    let script = script()?;
    let epmd = start_epmd()?;
    let (port, distribution, names) = (free_port()?, free_port()?, epmd.address().port());
    let recipe = Recipe {
        name: "rabbitmq",
        port,
        command: Box::new(move |folder| node(&script, folder, names, distribution)),
        ready: Box::new(move |folder| has_started(folder) && tls.is_none_or(is_open)),
        user: None,
    };
    let node = Server::start(recipe, |folder| prepare(folder, port, &further(folder)?))?;
    Ok(Broker { node, epmd, name: node_name(distribution) })
}

/// How to connect to it.
pub fn url(broker: &Broker) -> String {
    format!("amqp://guest:guest@{}/%2f", broker.node.address())
}

/// The script that starts a node, of the version that is installed. The one on the path insists on a user and on folders of the system.
fn script() -> Result<PathBuf> {
    let missing = || format!("{VERSIONS} is not there: `cargo xtask setup` installs the package {PACKAGE}");
    let versions = fs::read_dir(VERSIONS).with_context(missing)?;
    let scripts = versions.flatten().map(|version| version.path().join("sbin/rabbitmq-server"));
    scripts.filter(|script| script.exists()).max().with_context(missing)
}

fn start_epmd() -> Result<Server> {
    let port = free_port()?;
    let recipe = Recipe {
        name: "epmd",
        port,
        command: Box::new(move |_| {
            let mut command = Command::new("epmd");
            command.args(["-port", &port.to_string(), "-address", "127.0.0.1"]);
            command
        }),
        ready: Box::new(|_| true),
        user: None,
    };
    Server::start(recipe, |_| Ok(()))
}

fn prepare(folder: &Path, port: u16, further: &str) -> Result<()> {
    // Little else runs beside the tests that could need the disk.
    let settings = format!(
        "listeners.tcp.1 = 127.0.0.1:{port}\nlog.console = true\nlog.console.level = warning\nlog.file = false\ndisk_free_limit.absolute = 50MB\n{further}"
    );
    fs::write(folder.join("rabbitmq.conf"), settings)?;
    fs::write(folder.join("plugins"), "[rabbitmq_consistent_hash_exchange].\n")?;
    Ok(())
}

fn node_name(distribution: u16) -> String {
    format!("laneway{distribution}@localhost")
}

fn node(script: &Path, folder: &Path, names: u16, distribution: u16) -> Command {
    let _ = fs::remove_file(folder.join(PID));
    let mut command = Command::new(script);
    command
        // Otherwise the script stays as the node's parent, and the node outlives it.
        .env("RUNNING_UNDER_SYSTEMD", "true")
        .env("HOME", folder)
        .env("RABBITMQ_NODENAME", node_name(distribution))
        .env("RABBITMQ_CONFIG_FILE", folder.join("rabbitmq.conf"))
        .env("RABBITMQ_ENABLED_PLUGINS_FILE", folder.join("plugins"))
        .env("RABBITMQ_MNESIA_BASE", folder.join("data"))
        .env("RABBITMQ_LOG_BASE", folder.join("log"))
        .env("RABBITMQ_PID_FILE", folder.join(PID))
        .env("RABBITMQ_DIST_PORT", distribution.to_string())
        .env("ERL_EPMD_ADDRESS", "127.0.0.1")
        .env("ERL_EPMD_PORT", names.to_string())
        .env(
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
            "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none",
        )
        .current_dir(folder);
    command
}

/// Where the node writes its process id once it has begun.
const PID: &str = "node.pid";

/// The ports are opened last, after the queues have been recovered: first the plain one, then that for TLS.
fn has_started(folder: &Path) -> bool {
    folder.join(PID).exists()
}
