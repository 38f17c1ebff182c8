//! A lease in Postgres: one row that says who works, until when by the server's clock, and under which token.
//!
//! `standby.rs` asks for it. It has a connection of its own, so that it never waits behind the questions of a queue.

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgPool, PgPoolOptions};
use tokio::time::timeout;

use super::{OpenError, SCHEMA, SET_UP_LOCK, connect_options, explain, place, seconds};
use crate::message::Secret;
use crate::source::SourceError;
use crate::standby::{Holder, Lease, Sight};

/// How long a connection may take: less than any lease lasts.
const CONNECT: Duration = Duration::from_secs(2);

/// A lease in Postgres.
pub struct PostgresLease {
    name: String,
    holder: String,
    pool: PgPool,
    place: String,
    /// Whether its table is known to be there.
    is_set_up: tokio::sync::Mutex<bool>,
}

impl PostgresLease {
    /// The lease of this name at this address. `holder` is what others see who look at the row.
    pub fn open(url: &Secret, name: &str, holder: &str) -> Result<Self, OpenError> {
        let options = connect_options(url, name)?;
        let place = place(&options);
        let pool =
            PgPoolOptions::new().max_connections(1).acquire_timeout(CONNECT).connect_lazy_with(options);
        let is_set_up = tokio::sync::Mutex::new(false);
        Ok(PostgresLease { name: name.to_owned(), holder: holder.to_owned(), pool, place, is_set_up })
    }

    /// Makes the table, unless it is there.
    async fn set_up(&self) -> Result<(), sqlx::Error> {
        let mut is_set_up = self.is_set_up.lock().await;
        if !*is_set_up {
            let there = sqlx::query_scalar("SELECT to_regclass('laneway_queue.lease') IS NOT NULL");
            if !there.fetch_one(&self.pool).await? {
                let mut transaction = self.pool.begin().await?;
                let lock = sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(SET_UP_LOCK);
                lock.execute(&mut *transaction).await?;
                sqlx::Executor::execute(&mut *transaction, SCHEMA).await?;
                transaction.commit().await?;
            }
            *is_set_up = true;
        }
        Ok(())
    }

    fn trouble(&self, error: &sqlx::Error) -> SourceError {
        match error {
            sqlx::Error::Database(database) => {
                let code = database.code().unwrap_or_default();
                explain(&self.place, &self.name, &code, database.message())
            }
            other => SourceError::Unavailable(format!("{}: {other}", self.place)),
        }
    }

    /// Asks, and gives up when the lease could not be had any more anyway.
    async fn ask<T>(
        &self,
        time: Duration,
        question: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, SourceError> {
        match timeout(time, question).await {
            Ok(answer) => answer.map_err(|error| self.trouble(&error)),
            Err(_) => Err(SourceError::Unavailable(format!("{} did not answer within {time:?}", self.place))),
        }
    }
}

impl Lease for PostgresLease {
    fn name(&self) -> &str {
        &self.name
    }

    fn acquire(&self, time: Duration) -> BoxFuture<'_, Result<Option<u64>, SourceError>> {
        let question = async move {
            self.set_up().await?;
            let token: Option<i64> = sqlx::query_scalar(
                "INSERT INTO laneway_queue.lease AS held (name, holder, token, ends)
                 VALUES ($1, $2, 1, clock_timestamp() + make_interval(secs => $3))
                 ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, token = held.token + 1, ends = excluded.ends
                     WHERE held.ends <= clock_timestamp()
                 RETURNING token",
            )
            .bind(&self.name)
            .bind(&self.holder)
            .bind(seconds(time))
            .fetch_optional(&self.pool)
            .await?;
            Ok(token.map(|token| token as u64))
        };
        self.ask(time, question).boxed()
    }

    fn renew(&self, token: u64, time: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        let question = async move {
            let renewed = sqlx::query(
                "UPDATE laneway_queue.lease SET ends = clock_timestamp() + make_interval(secs => $3)
                 WHERE name = $1 AND token = $2 AND ends > clock_timestamp()",
            )
            .bind(&self.name)
            .bind(token as i64)
            .bind(seconds(time))
            .execute(&self.pool)
            .await?;
            Ok(renewed.rows_affected() == 1)
        };
        self.ask(time, question).boxed()
    }

    fn release(&self, token: u64) -> BoxFuture<'_, Result<(), SourceError>> {
        let question = async move {
            let statement =
                "UPDATE laneway_queue.lease SET ends = clock_timestamp() WHERE name = $1 AND token = $2";
            sqlx::query(statement).bind(&self.name).bind(token as i64).execute(&self.pool).await.map(drop)
        };
        self.ask(CONNECT, question).boxed()
    }

    fn look(&self) -> BoxFuture<'_, Result<Sight, SourceError>> {
        let question = async move {
            let (is_there, is_allowed): (bool, bool) = sqlx::query_as(
                "SELECT to_regclass('laneway_queue.lease') IS NOT NULL,
                     CASE WHEN to_regclass('laneway_queue.lease') IS NULL
                         THEN has_database_privilege(current_database(), 'CREATE')
                         ELSE has_table_privilege('laneway_queue.lease', 'INSERT')
                             AND has_table_privilege('laneway_queue.lease', 'UPDATE') END",
            )
            .fetch_one(&self.pool)
            .await?;
            if !is_there {
                return Ok(Sight { is_allowed, last: None });
            }
            let last: Option<(String, i64, f64)> = sqlx::query_as(
                "SELECT holder, token, extract(epoch FROM ends - clock_timestamp())::float8
                 FROM laneway_queue.lease WHERE name = $1",
            )
            .bind(&self.name)
            .fetch_optional(&self.pool)
            .await?;
            let last = last.map(|(name, token, left)| Holder {
                name,
                token: token as u64,
                left: Duration::try_from_secs_f64(left).unwrap_or_default(),
            });
            Ok(Sight { is_allowed, last })
        };
        self.ask(2 * CONNECT, question).boxed()
    }
}
