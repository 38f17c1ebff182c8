//! axe: the rules of accessibility, as a script that a test runs in its browser. It comes from npm at a pinned version and never reaches the product.

use std::fs;

use anyhow::{Context, Result};

use crate::cache;

/// The script itself.
pub fn script() -> Result<String> {
    let path = cache::file(cache::npm()?.join("node_modules/axe-core/axe.min.js"))?;
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}
