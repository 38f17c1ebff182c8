//! The schema `pgflow`, carried by the binary and applied to a database.
//!
//! Migrations are the numbered files of `migrations/`, compiled in. A database remembers which of them it has in `pgflow.migrations`, with
//! a checksum of each. [`migrate`] applies the missing ones in one transaction under an advisory lock: of two callers at once one does the
//! work and the other finds it done, a crash leaves nothing half done, and a second call changes nothing. Queues are pgmq's. Where it
//! is not installed, its extension is; where the server does not have the extension, pgmq's plain SQL, which the crate `pgmq` carries.

use sqlx::postgres::{PgConnection, PgPoolOptions};
use sqlx::{Connection, PgPool};

/// What a call of [`migrate`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migrated {
    /// The version before; 0 in a database without the schema.
    pub from: u32,
    /// The version now.
    pub to: u32,
}

/// Why a database was not migrated. Its schema `pgflow` is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// The database's schema is younger than this binary.
    #[error(
        "the schema pgflow of this database has version {found}, and this binary knows versions up to {known}: use a newer binary"
    )]
    Newer {
        /// Of the database.
        found: u32,
        /// The last one that this binary carries.
        known: u32,
    },
    /// A migration was applied from another text than this binary's.
    #[error(
        "migration {version} ({name}) was applied to this database from another text: this is not its binary"
    )]
    Changed {
        /// Of the migration.
        version: u32,
        /// Of its file.
        name: &'static str,
    },
    /// There is a schema of this name that did not come from here.
    #[error(
        "this database has a schema pgflow that was not made by these migrations: rename it, or use another database"
    )]
    Foreign,
    /// The schema belongs to another role, which could put its own functions beside ours, or in their place.
    #[error(
        "the schema pgflow of this database belongs to {owner:?}: migrate as that role, or give it to this one (ALTER SCHEMA pgflow OWNER TO ...)"
    )]
    Owner {
        /// Of the schema.
        owner: String,
    },
    /// The server is too old.
    #[error("Postgres 14 or later is needed, this server is {found}")]
    OldServer {
        /// As the server writes its version.
        found: String,
    },
    /// pgmq could not be installed.
    #[error("pgmq, which holds the queues, could not be installed: {0}")]
    Queues(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A migration failed, or the connection did.
    #[error("the database refused {doing}: {error}")]
    Database {
        /// What was being done.
        doing: String,
        /// What the driver says.
        #[source]
        error: sqlx::Error,
    },
}

/// A migration: its number is its place, counted from 1.
struct Migration {
    name: &'static str,
    sql: &'static str,
}

macro_rules! migrations {
    ($($name:literal),* $(,)?) => {
        &[$(Migration { name: $name, sql: include_str!(concat!("../migrations/", $name, ".sql")) }),*]
    };
}

const MIGRATIONS: &[Migration] = migrations![
    "0001_tables",
    "0002_names",
    "0003_definition",
    "0004_advance",
    "0005_runs",
    "0006_tasks",
    "0007_roles",
    "0008_counts",
];

/// The version of the schema that this binary carries.
pub const VERSION: u32 = MIGRATIONS.len() as u32;

/// Whoever migrates this database holds it. An arbitrary number, the same in every release.
const LOCK: i64 = 0x6c61_6e65_666c_6f77;

/// How long to wait for another one that migrates.
const LOCK_TIMEOUT: &str = "60s";

/// The first version of Postgres that is supported, as `server_version_num` counts.
const OLDEST_SERVER: i32 = 140_000;

/// Brings the schema of the database to this binary's version. Needs a role that may create schemas, and one connection of the pool; to
/// install pgmq as plain SQL it makes one of its own for a moment.
pub async fn migrate(pool: &PgPool) -> Result<Migrated, MigrateError> {
    let mut connection = pool.acquire().await.map_err(refused("a connection"))?;
    let mut transaction = connection.begin().await.map_err(refused("a transaction"))?;
    require_server(&mut transaction).await?;
    lock(&mut transaction).await?;
    require_own_schema(&mut transaction).await?;
    let from = version_of(&mut transaction).await?;
    if from > VERSION {
        return Err(MigrateError::Newer { found: from, known: VERSION });
    }
    require_same_texts(&mut transaction, from).await?;
    install_queues(&mut transaction, pool).await?;
    for (number, migration) in (1..).zip(MIGRATIONS).skip(from as usize) {
        apply(&mut transaction, number, migration).await?;
    }
    transaction.commit().await.map_err(refused("the commit"))?;
    Ok(Migrated { from, to: VERSION })
}

/// The version that the database has; 0 without the schema. A worker that finds another than [`VERSION`] should not start.
pub async fn schema_version(pool: &PgPool) -> Result<u32, MigrateError> {
    let mut connection = pool.acquire().await.map_err(refused("a connection"))?;
    version_of(&mut connection).await
}

async fn require_server(connection: &mut PgConnection) -> Result<(), MigrateError> {
    let (number, found): (i32, String) = sqlx::query_as(
        "SELECT current_setting('server_version_num')::integer, current_setting('server_version')",
    )
    .fetch_one(connection)
    .await
    .map_err(refused("its version"))?;
    if number < OLDEST_SERVER { Err(MigrateError::OldServer { found }) } else { Ok(()) }
}

async fn lock(connection: &mut PgConnection) -> Result<(), MigrateError> {
    sqlx::query("SELECT set_config('lock_timeout', $1, true)")
        .bind(LOCK_TIMEOUT)
        .execute(&mut *connection)
        .await
        .map_err(refused("a limit for waiting"))?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)")
        .bind(LOCK)
        .execute(connection)
        .await
        .map_err(refused("the lock of migrations"))?;
    Ok(())
}

/// A schema that is there already must be ours: what we make in it runs with our rights. A superuser may do as it likes.
async fn require_own_schema(connection: &mut PgConnection) -> Result<(), MigrateError> {
    let owner: Option<String> = sqlx::query_scalar(
        "SELECT pg_get_userbyid(n.nspowner)::text FROM pg_namespace n WHERE n.nspname = 'pgflow' \
            AND pg_get_userbyid(n.nspowner) <> current_user \
            AND NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = current_user AND r.rolsuper)",
    )
    .fetch_optional(connection)
    .await
    .map_err(refused("a look at the schema's owner"))?;
    owner.map_or(Ok(()), |owner| Err(MigrateError::Owner { owner }))
}

async fn version_of(connection: &mut PgConnection) -> Result<u32, MigrateError> {
    let (ours, theirs): (bool, bool) = sqlx::query_as(
        "SELECT to_regclass('pgflow.migrations') IS NOT NULL, to_regclass('pgflow.flows') IS NOT NULL",
    )
    .fetch_one(&mut *connection)
    .await
    .map_err(refused("a look at the schema"))?;
    match (ours, theirs) {
        (false, false) => Ok(0),
        (false, true) => Err(MigrateError::Foreign),
        (true, _) => {
            let version: i32 = sqlx::query_scalar("SELECT coalesce(max(version), 0) FROM pgflow.migrations")
                .fetch_one(connection)
                .await
                .map_err(refused("the list of migrations"))?;
            Ok(u32::try_from(version).unwrap_or(0))
        }
    }
}

/// A database that was migrated by a text that is not ours may have other functions than we believe.
async fn require_same_texts(connection: &mut PgConnection, from: u32) -> Result<(), MigrateError> {
    for (number, migration) in (1..=from).zip(MIGRATIONS) {
        let same: Option<bool> =
            sqlx::query_scalar("SELECT checksum = md5($2) FROM pgflow.migrations WHERE version = $1")
                .bind(as_column(number))
                .bind(migration.sql)
                .fetch_optional(&mut *connection)
                .await
                .map_err(refused("the checksums"))?;
        if same != Some(true) {
            return Err(MigrateError::Changed { version: number, name: migration.name });
        }
    }
    Ok(())
}

async fn install_queues(connection: &mut PgConnection, pool: &PgPool) -> Result<(), MigrateError> {
    let (installed, available): (bool, bool) = sqlx::query_as(
        "SELECT to_regprocedure('pgmq.archive(text,bigint[])') IS NOT NULL, \
                EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pgmq')",
    )
    .fetch_one(&mut *connection)
    .await
    .map_err(refused("a look at pgmq"))?;
    if installed {
        return Ok(());
    }
    if available {
        sqlx::query("CREATE EXTENSION pgmq")
            .execute(connection)
            .await
            .map_err(refused("the extension pgmq"))?;
        return Ok(());
    }
    // The installer wants a pool. The caller's may have one connection only, which is the one that holds our lock.
    let own = PgPoolOptions::new()
        .max_connections(1)
        .connect_with(pool.connect_options().as_ref().clone())
        .await
        .map_err(refused("a connection to install pgmq"))?;
    let outcome = pgmq::install::install_sql_from_embedded(&own).await;
    own.close().await;
    outcome.map_err(|error| MigrateError::Queues(Box::new(error)))
}

async fn apply(
    connection: &mut PgConnection,
    number: u32,
    migration: &Migration,
) -> Result<(), MigrateError> {
    if number == 1 {
        sqlx::raw_sql(
            "CREATE SCHEMA IF NOT EXISTS pgflow; \
             CREATE TABLE pgflow.migrations (version integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL, \
                 applied_at timestamptz NOT NULL DEFAULT now());",
        )
        .execute(&mut *connection)
        .await
        .map_err(refused("the schema"))?;
    }
    sqlx::raw_sql(migration.sql).execute(&mut *connection).await.map_err(refused(migration.name))?;
    sqlx::query("INSERT INTO pgflow.migrations (version, name, checksum) VALUES ($1, $2, md5($3))")
        .bind(as_column(number))
        .bind(migration.name)
        .bind(migration.sql)
        .execute(connection)
        .await
        .map_err(refused("the note of a migration"))?;
    Ok(())
}

fn as_column(number: u32) -> i32 {
    i32::try_from(number).expect("there are not that many migrations")
}

fn refused(doing: &str) -> impl FnOnce(sqlx::Error) -> MigrateError {
    let doing = doing.to_owned();
    move |error| MigrateError::Database { doing, error }
}
