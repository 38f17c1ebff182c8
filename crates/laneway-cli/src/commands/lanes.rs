//! `laneway lanes`: the deepest message groups of a running service.

use clap::value_parser;

use crate::client::{Service, part};
use crate::exit::Failure;
use crate::table::{self, Column, field};

/// What `laneway lanes` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway lanes                      the twenty deepest groups of all pools
  laneway lanes --pool orders        of one pool
  laneway lanes --json | jq .depth   one JSON object per group")]
pub(crate) struct Options {
    /// Only the groups of this pool
    #[arg(long, value_name = "CODE")]
    pool: Option<String>,
    /// How many, at most
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = value_parser!(u32).range(1..=1_000))]
    most: u32,
    #[command(flatten)]
    service: Service,
}

pub(crate) const COLUMNS: [Column; 3] = [
    ("group", |row| field(row, "group")),
    ("pool", |row| field(row, "pool")),
    (">messages", |row| field(row, "depth")),
];

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let pool = options.pool.as_ref().map_or_else(String::new, |pool| format!("&pool={}", part(pool)));
    let groups = options.service.connect()?.get(&format!("/api/groups?most={}{pool}", options.most))?;
    Ok(table::print(options.service.json, &groups, &COLUMNS, "no group has messages")?)
}
