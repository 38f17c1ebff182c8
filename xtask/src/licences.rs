//! `cargo xtask licences`: every dependency of the workspace may be used by whoever may use the workspace.
//!
//! Cargo lists all packages that any feature on any platform could bring in, each with its licence expression. An
//! expression passes when it can be satisfied from [`ALLOWED`] alone. `deny.toml` states the same list for cargo-deny, and
//! a test keeps the two equal.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use spdx::{Expression, LicenseReq, ParseMode};

use crate::process::{cargo, output};

/// A licence that a dependency may have, and why that does no harm.
struct Allowed {
    id: &'static str,
    because: &'static str,
}

const ALLOWED: &[Allowed] = &[
    Allowed { id: "MIT", because: "our own; asks for the notice only" },
    Allowed { id: "Apache-2.0", because: "our own; asks for the notice, grants patents" },
    Allowed { id: "BSD-2-Clause", because: "asks for the notice only" },
    Allowed { id: "BSD-3-Clause", because: "asks for the notice, forbids endorsement" },
    Allowed { id: "ISC", because: "MIT in fewer words" },
    Allowed { id: "Zlib", because: "asks for nothing in binaries" },
    Allowed { id: "Unicode-3.0", because: "tables of the Unicode standard; asks for the notice" },
    Allowed { id: "Unlicense", because: "public domain" },
    Allowed { id: "CC0-1.0", because: "public domain" },
    Allowed { id: "CDLA-Permissive-2.0", because: "data, here the roots of TLS; asks for the notice only" },
    Allowed { id: "PostgreSQL", because: "MIT in the words of Postgres; the SQL of its queues has it" },
];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    /// Absent when the package points to a file of its own instead, which nobody has judged.
    license: Option<String>,
}

pub(crate) fn run() -> Result<()> {
    let metadata = output(&mut cargo("metadata --format-version 1 --locked --all-features"))?;
    let Metadata { packages } = serde_json::from_slice(&metadata).context("cannot read cargo's metadata")?;
    let offences: Vec<_> = packages.iter().filter_map(offence).collect();
    for offence in &offences {
        eprintln!("{offence}");
    }
    if !offences.is_empty() {
        eprintln!("allowed are:");
        ALLOWED.iter().for_each(|allowed| eprintln!("  {:<14} {}", allowed.id, allowed.because));
        bail!("{} of {} packages have a licence that is not allowed", offences.len(), packages.len());
    }
    eprintln!("{} packages, all with an allowed licence", packages.len());
    Ok(())
}

/// What is wrong with a package's licence, if anything is.
fn offence(package: &Package) -> Option<String> {
    let reason = judge(package.license.as_deref()).err()?;
    Some(format!("{} {}: {reason}", package.name, package.version))
}

fn judge(licence: Option<&str>) -> Result<(), String> {
    let text = licence.ok_or("states no licence expression")?;
    // Older packages write `MIT/Apache-2.0`, which the lax mode reads as a choice.
    let expression = Expression::parse_mode(text, ParseMode::LAX)
        .map_err(|error| format!("`{text}` is not a licence expression: {}", error.reason))?;
    match expression.evaluate(is_allowed) {
        true => Ok(()),
        false => Err(format!("`{text}` cannot be satisfied by the allowed licences")),
    }
}

/// An exception (`WITH ...`) only ever adds permissions, so that the licence before it decides.
fn is_allowed(required: &LicenseReq) -> bool {
    required.license.id().is_some_and(|id| ALLOWED.iter().any(|allowed| allowed.id == id.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_licences_pass_alone_and_combined() {
        for licence in ["MIT", "MIT OR Apache-2.0", "MIT/Apache-2.0", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
            assert_eq!(judge(Some(licence)), Ok(()), "{licence}");
        }
        assert_eq!(judge(Some("Apache-2.0 WITH LLVM-exception")), Ok(()));
    }

    #[test]
    fn a_choice_needs_one_allowed_side_and_a_sum_needs_both() {
        assert_eq!(judge(Some("MIT OR GPL-3.0-only")), Ok(()));
        assert!(judge(Some("MIT AND GPL-3.0-only")).is_err());
    }

    #[test]
    fn what_is_foreign_missing_or_unreadable_is_an_offence() {
        for licence in [Some("GPL-3.0-only"), Some("all mine"), Some(""), None] {
            assert!(judge(licence).is_err(), "{licence:?}");
        }
    }

    /// Reads the quoted words of the list `allow` in `deny.toml`.
    #[test]
    fn deny_toml_allows_the_same() {
        let deny = include_str!("../../deny.toml");
        let (_, list) = deny.split_once("allow = [").expect("a list of allowed licences");
        let (list, _) = list.split_once("\n]").expect("the end of the list");
        let theirs: Vec<_> = list.lines().filter_map(|line| line.split('"').nth(1)).collect();
        let ours: Vec<_> = ALLOWED.iter().map(|allowed| allowed.id).collect();
        assert_eq!(theirs, ours);
    }
}
