//! What `cargo xtask setup` calls: the servers' packages, installed by name, and nothing that is there already.
//!
//! Debian's packages want to start their services; a test wants its own. While packages are being installed, a policy file says no
//! to that, and goes away afterwards.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{is_root, run};
use crate::{activemq, cache, chromedriver, nats, postgres, rabbitmq};

/// Asked by every package before it starts its service.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Packages of Debian, and a file by which one sees that each is there.
const PACKAGES: &[(&str, &str)] = &[
    (postgres::PACKAGE, "/usr/lib/postgresql"),
    (nats::PACKAGE, nats::PROGRAM),
    (rabbitmq::PACKAGE, rabbitmq::VERSIONS),
    (activemq::PACKAGE, activemq::JAR),
    (chromedriver::PACKAGES[0], "/usr/bin/chromium"),
    (chromedriver::PACKAGES[1], "/usr/bin/chromedriver"),
    // librdkafka is compiled with the router, by these, and takes TLS from the last two.
    ("make", "/usr/bin/make"),
    ("g++", "/usr/bin/g++"),
    ("libssl-dev", "/usr/include/openssl/ssl.h"),
    ("pkg-config", "/usr/bin/pkg-config"),
];

/// Programs that may have come from elsewhere, how one sees that each works, and the packages that bring it.
const PROGRAMS: &[(&[&str], &[&str])] = &[
    (&["npm", "--version"], &["nodejs", "npm"]),
    (&["python3", "-c", "import ensurepip, venv"], &["python3-venv"]),
    (&["curl", "--version"], &["curl"]),
];

/// Installs what is missing.
pub fn install() -> Result<()> {
    install_packages()?;
    cache::install()
}

fn install_packages() -> Result<()> {
    let works = |probe: &[&str]| run(Command::new(probe[0]).args(&probe[1..])).is_ok();
    let packages = PACKAGES.iter().filter(|(_, file)| !Path::new(file).exists()).map(|(package, _)| *package);
    let programs = PROGRAMS.iter().filter(|(probe, _)| !works(probe)).flat_map(|(_, packages)| *packages);
    let missing: Vec<&str> = packages.chain(programs.copied()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("installing {}", missing.join(", "));
    if !is_root() {
        bail!("{} must be installed, which needs root: apt-get install {0}", missing.join(" "));
    }
    let _quiet = Quiet::begin()?;
    apt(&["update", "-qq"])?;
    apt(&[&["install", "-y", "-qq", "--no-install-recommends"], missing.as_slice()].concat())
}

fn apt(arguments: &[&str]) -> Result<()> {
    run(Command::new("apt-get").args(arguments).env("DEBIAN_FRONTEND", "noninteractive")).map(drop)
}

/// While it lives, no package starts a service. A policy that was there already stays, whatever it says.
struct Quiet {
    ours: bool,
}

impl Quiet {
    fn begin() -> Result<Self> {
        let ours = !Path::new(POLICY).exists();
        if ours {
            fs::write(POLICY, "#!/bin/sh\nexit 101\n").with_context(|| format!("cannot write {POLICY}"))?;
            run(Command::new("chmod").args(["+x", POLICY]))?;
        }
        Ok(Self { ours })
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if self.ours {
            let _ = fs::remove_file(POLICY);
        }
    }
}
