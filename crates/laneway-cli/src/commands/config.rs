//! `laneway config`: whether a configuration is right, and what it comes to.
//!
//! [`Layered`] is also how `laneway serve` is told its configuration, so that what is checked here is what would run there.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use laneway_router::config::{Config, ConfigError, Layering, REFERENCE};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::table::{self, Column, field};

/// The file that is read if it is there and nobody names another.
const DEFAULT_FILE: &str = "laneway.conf";

/// Variables that are options of this program, and no part of the service's configuration.
const OUR_VARIABLES: [&str; 2] = ["LANEWAY_URL", "LANEWAY_TOKEN"];

/// What `laneway config` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway config check laneway.conf              everything that is wrong with it, at once
  laneway config show                            every value, and where it came from
  laneway config show --set http.bind=127.0.0.1:9000
  LANEWAY_HTTP_BIND=127.0.0.1:9000 laneway config show
  laneway config reference > laneway.conf        all keys with their defaults and what they mean

Layers, the lowest first: the reference, the file (laneway.conf, if there is one), the environment, --set. What a file
or --set says and no setting has as its name is a mistake; a variable of the environment is left out, with a warning.")]
pub(crate) struct Options {
    #[command(subcommand)]
    what: What,
    /// Print data as JSON instead of for people
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum What {
    /// Say everything that is wrong with a configuration, or that nothing is
    Check {
        /// The file
        file: PathBuf,
        #[command(flatten)]
        sets: Sets,
    },
    /// Show every effective value and the layer that it came from; secrets are hidden
    Show(Layered),
    /// Print the reference: every key with its default and its meaning
    Reference,
}

/// Which layers lie over the reference.
#[derive(clap::Args)]
pub(crate) struct Layered {
    /// The configuration; laneway.conf, if there is one and nothing else is said
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    sets: Sets,
}

#[derive(clap::Args)]
struct Sets {
    /// Set one value over file and environment, such as http.bind=127.0.0.1:9000; can be repeated
    #[arg(long = "set", value_name = "PATH=VALUE", value_parser = set)]
    sets: Vec<(String, String)>,
}

impl Layered {
    pub(crate) fn layering(&self) -> Layering {
        let present = || Some(PathBuf::from(DEFAULT_FILE)).filter(|file| file.exists());
        layering(self.config.clone().or_else(present), &self.sets)
    }

    /// The same without a file, named or not.
    pub(crate) fn layering_without_file(&self) -> Layering {
        layering(None, &self.sets)
    }
}

fn layering(file: Option<PathBuf>, sets: &Sets) -> Layering {
    let variables = std::env::vars().filter(|(name, _)| !OUR_VARIABLES.contains(&name.as_str()));
    Layering { file, environment: variables.collect(), sets: sets.sets.clone() }
}

/// `path=value`; all keys are below `laneway`, which need not be said.
fn set(text: &str) -> Result<(String, String), String> {
    let (path, value) =
        text.split_once('=').ok_or("expected PATH=VALUE, such as http.bind=127.0.0.1:9000")?;
    let path = path.trim();
    if path.is_empty() {
        return Err("expected PATH=VALUE, such as http.bind=127.0.0.1:9000".to_owned());
    }
    let path = if path.starts_with("laneway.") { path.to_owned() } else { format!("laneway.{path}") };
    Ok((path, value.trim().to_owned()))
}

const COLUMNS: [Column; 3] = [
    ("key", |row| field(row, "path")),
    ("value", |row| field(row, "value")),
    ("from", |row| field(row, "origin")),
];

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match &options.what {
        What::Check { file, sets } => check(options.json, file, sets),
        What::Show(layered) => show(options.json, &layered.layering()),
        What::Reference if options.json => show(true, &Layering::default()),
        What::Reference => Ok(io::stdout().lock().write_all(REFERENCE.as_bytes())?),
    }
}

fn check(json: bool, file: &Path, sets: &Sets) -> Result<(), Failure> {
    let checked = Config::load(&layering(Some(file.to_owned()), sets));
    let problems = checked.as_ref().err().map_or_else(Vec::new, ConfigError::problems);
    let warnings = checked.as_ref().map_or(&[][..], Config::warnings);
    tell_warnings(warnings);
    if json {
        let told = json!({"file": file.display().to_string(), "valid": checked.is_ok(), "problems": problems, "warnings": warnings});
        table::lines(&[told])?;
    }
    match checked {
        Ok(_) if json => Ok(()),
        Ok(config) => {
            let pools = table::count(config.pools.len() as u64, "pool");
            eprintln!("{} is right: {pools}, listening on {}", file.display(), config.http.bind);
            Ok(())
        }
        Err(error) => Err(bad(&error)),
    }
}

fn show(json: bool, layering: &Layering) -> Result<(), Failure> {
    let values = Config::show(layering).map_err(|error| bad(&error))?;
    let row = |value: &laneway_config::Effective| json!({"path": value.path, "value": value.value, "origin": value.origin});
    table::print(json, &Value::Array(values.iter().map(row).collect()), &COLUMNS, "")?;
    // What is shown is shown also when it is wrong; but nobody should believe that it would run.
    load(layering).map(drop)
}

/// The configuration, with a warning on standard error for each variable that names no setting.
pub(crate) fn load(layering: &Layering) -> Result<Config, Failure> {
    let config = Config::load(layering).map_err(|error| bad(&error))?;
    tell_warnings(config.warnings());
    Ok(config)
}

fn tell_warnings(warnings: &[String]) {
    for warning in warnings {
        eprintln!("laneway: warning: {warning}");
    }
}

/// All that is wrong, one line each.
pub(crate) fn bad(error: &ConfigError) -> Failure {
    let problems = error.problems();
    let title = match problems.len() {
        1 => "the configuration is not valid".to_owned(),
        many => format!("the configuration is not valid, in {many} places"),
    };
    Failure::BadConfiguration(format!("{title}\n  {}", problems.join("\n  ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_set_below_laneway() {
        assert_eq!(set("http.bind=127.0.0.1:1"), Ok(("laneway.http.bind".into(), "127.0.0.1:1".into())));
        assert_eq!(set("laneway.lease = 5 s"), Ok(("laneway.lease".into(), "5 s".into())));
        assert!(set("http.bind").is_err() && set("=1").is_err());
    }
}
