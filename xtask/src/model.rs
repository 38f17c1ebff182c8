//! `cargo xtask model`: runs the loom models, which try every interleaving of the protocols that threads share.
//!
//! A model is a file `tests/loom_*.rs` of one of [`PACKAGES`]. The switch `--cfg loom` replaces their locks and atomics by
//! loom's, so that the whole tree is built differently; it therefore has a target folder of its own.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::process::{cargo, root, run as run_child};

/// The packages that have models.
const PACKAGES: [&str; 2] = ["laneway", "laneway-events"];

/// The variable in which loom looks for the bound on forced preemptions.
const PREEMPTIONS: &str = "LOOM_MAX_PREEMPTIONS";

/// What `cargo xtask model` can be told.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How often a thread may be interrupted against its will in one schedule
    ///
    /// Each more multiplies the time. The default is what LOOM_MAX_PREEMPTIONS says, or else 2.
    #[arg(long, default_value_t = Options::default().preemptions)]
    preemptions: u32,
}

impl Default for Options {
    /// Loom's own variable wins. Two preemptions reach the races of the lane's protocol: one thread is stopped between
    /// looking and acting, and another between acting and telling.
    fn default() -> Self {
        let chosen = std::env::var(PREEMPTIONS).ok().and_then(|value| value.parse().ok());
        Self { preemptions: chosen.unwrap_or(2) }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    PACKAGES.iter().try_for_each(|package| run_models(package, options))
}

fn run_models(package: &str, options: &Options) -> Result<()> {
    let models = models_in(&root().join("crates").join(package).join("tests"))?;
    if models.is_empty() {
        eprintln!("no models: crates/{package}/tests holds no loom_*.rs");
        return Ok(());
    }
    let mut command = cargo("test --release --target-dir target/loom");
    command.args(["--package", package]);
    for model in &models {
        command.args(["--test", model]);
    }
    run_child(command.env("RUSTFLAGS", loom_flags()).env(PREEMPTIONS, options.preemptions.to_string()))
}

/// The flags that are set already, and the switch.
fn loom_flags() -> String {
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    format!("{flags} --cfg loom").trim_start().to_owned()
}

/// The names of the test binaries that are models, sorted; a folder that is not there has none.
fn models_in(tests: &Path) -> Result<Vec<String>> {
    if !tests.is_dir() {
        return Ok(Vec::new());
    }
    let mut models = Vec::new();
    for entry in fs::read_dir(tests).with_context(|| format!("cannot list {}", tests.display()))? {
        models.extend(entry?.file_name().to_str().and_then(model_name));
    }
    models.sort();
    Ok(models)
}

fn model_name(file_name: &str) -> Option<String> {
    let name = file_name.strip_suffix(".rs")?;
    name.starts_with("loom_").then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_a_rust_file_with_the_prefix() {
        assert_eq!(model_name("loom_lane.rs").as_deref(), Some("loom_lane"));
        assert_eq!(model_name("ordering.rs"), None);
        assert_eq!(model_name("loom_lane.md"), None);
    }

    #[test]
    fn a_folder_that_is_not_there_has_no_models() {
        assert!(models_in(Path::new("no-such-folder")).expect("nothing to read").is_empty());
    }
}
