//! `cargo xtask setup`: installs what the tests need, and nothing that is there already.
//!
//! Needed are rustfmt and clippy, as components of the toolchain, and the servers that tests talk to. Wished for is cargo-nextest, which runs each test in a
//! process of its own and in parallel across crates; where it cannot be had, the plain test runner does the same work.

use std::process::Command;

use anyhow::Result;

use crate::process::{answers, cargo, root, run as run_child};

/// Verbs of cargo and the component of the toolchain that brings each.
const COMPONENTS: [(&str, &str); 2] = [("fmt", "rustfmt"), ("clippy", "clippy")];

pub(crate) fn run() -> Result<()> {
    for (verb, component) in COMPONENTS {
        ensure_component(verb, component)?;
    }
    laneway_servers::install()?;
    ensure_nextest();
    Ok(())
}

/// Whether the better of the two test runners is there.
pub(crate) fn has_nextest() -> bool {
    has_verb("nextest")
}

fn has_verb(verb: &str) -> bool {
    answers(cargo(verb).arg("--version"))
}

fn ensure_component(verb: &str, component: &str) -> Result<()> {
    if has_verb(verb) {
        eprintln!("{component}: there");
        return Ok(());
    }
    run_child(Command::new("rustup").args(["component", "add", component]).current_dir(root()))
}

/// Tries to have nextest; says so and goes on when it cannot, since everything can be tested without it.
fn ensure_nextest() {
    if has_nextest() {
        eprintln!("cargo-nextest: there");
    } else if let Err(error) = run_child(&mut cargo("install cargo-nextest --locked")) {
        eprintln!("cargo-nextest: cannot be installed, so `cargo test` stands in for it ({error:#})");
    }
}
