//! A lease in Postgres: one row that says who works, until when by the server's clock, and under which token.
//!
//! `standby.rs` asks for it. It has a connection of its own, so that it never waits behind the questions of a queue. Not one of a pool: a pool takes a connection back only once
//! it has answered, and one over which nothing comes any more, because a firewall has forgotten it or a cable was pulled, does not for a quarter of an hour. Here it is closed
//! without a word, and the next question goes over a new one.

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::{OpenError, Question, SCHEMA, SET_UP_LOCK, connect_options, explain, place, seconds};
use crate::message::Secret;
use crate::source::SourceError;
use crate::standby::{Holder, Lease, Sight};

/// How long a new connection may take: less than any lease lasts.
const CONNECT: Duration = Duration::from_secs(2);

/// This part of the time of a lease is how long the connection that there is may take to say that it is still there, so that enough is left for another one.
const PING: u32 = 8;

/// A lease in Postgres.
pub struct PostgresLease {
    name: String,
    holder: String,
    options: PgConnectOptions,
    place: String,
    /// Taken out while it is asked: whoever gives up waiting has closed it by that.
    link: Mutex<Option<PgConnection>>,
}

impl PostgresLease {
    /// The lease of this name at this address. `holder` is what others see who look at the row, and nobody else's.
    pub fn open(url: &Secret, name: &str, holder: &str) -> Result<Self, OpenError> {
        let options = connect_options(url, name)?;
        let (name, holder, place) = (name.to_owned(), holder.to_owned(), place(&options));
        Ok(PostgresLease { name, holder, options, place, link: Mutex::default() })
    }

    /// The connection that there is, if it answers soon, or a new one.
    async fn connection(
        &self,
        link: &mut Option<PgConnection>,
        patience: Duration,
    ) -> Result<PgConnection, sqlx::Error> {
        if let Some(mut connection) = link.take()
            && let Ok(Ok(())) = timeout(patience, connection.ping()).await
        {
            return Ok(connection);
        }
        let late = || sqlx::Error::Io(std::io::Error::other(format!("no connection within {CONNECT:?}")));
        timeout(CONNECT, self.options.connect()).await.unwrap_or_else(|_| Err(late()))
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
    async fn ask<T>(&self, time: Duration, question: Question<T>) -> Result<T, SourceError> {
        let asked = async {
            let mut link = self.link.lock().await;
            let mut connection = self.connection(&mut link, time / PING).await?;
            let answer = question(&mut connection).await;
            if matches!(answer, Ok(_) | Err(sqlx::Error::Database(_))) {
                *link = Some(connection);
            }
            answer
        };
        match timeout(time, asked).await {
            Ok(answer) => answer.map_err(|error| self.trouble(&error)),
            Err(_) => Err(SourceError::Unavailable(format!("{} did not answer within {time:?}", self.place))),
        }
    }
}

/// Makes the table, unless it is there.
async fn set_up(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let there = sqlx::query_scalar("SELECT to_regclass('laneway_queue.lease') IS NOT NULL");
    if there.fetch_one(&mut *connection).await? {
        return Ok(());
    }
    let mut transaction = connection.begin().await?;
    let lock = sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(SET_UP_LOCK);
    lock.execute(&mut *transaction).await?;
    sqlx::Executor::execute(&mut *transaction, SCHEMA).await?;
    transaction.commit().await
}

impl Lease for PostgresLease {
    fn name(&self) -> &str {
        &self.name
    }

    fn acquire(&self, time: Duration) -> BoxFuture<'_, Result<Option<u64>, SourceError>> {
        let (name, holder) = (self.name.clone(), self.holder.clone());
        let question: Question<Option<u64>> = Box::new(move |connection| {
            async move {
            set_up(connection).await?;
            let token: Option<i64> = sqlx::query_scalar(
                "INSERT INTO laneway_queue.lease AS held (name, holder, token, ends)
                 VALUES ($1, $2, 1, clock_timestamp() + make_interval(secs => $3))
                 ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, token = held.token + 1, ends = excluded.ends
                     WHERE held.ends <= clock_timestamp()
                 RETURNING token",
            )
            .bind(&name)
            .bind(&holder)
            .bind(seconds(time))
            .fetch_optional(connection)
            .await?;
            Ok(token.map(|token| token as u64))
            }
            .boxed()
        });
        self.ask(time, question).boxed()
    }

    fn renew(&self, token: u64, time: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        let (name, holder) = (self.name.clone(), self.holder.clone());
        let question: Question<bool> = Box::new(move |connection| {
            async move {
                let renewed = sqlx::query(
                    "UPDATE laneway_queue.lease SET ends = clock_timestamp() + make_interval(secs => $3)
                 WHERE name = $1 AND token = $2 AND holder = $4 AND ends > clock_timestamp()",
                )
                .bind(&name)
                .bind(token as i64)
                .bind(seconds(time))
                .bind(&holder)
                .execute(connection)
                .await?;
                Ok(renewed.rows_affected() == 1)
            }
            .boxed()
        });
        self.ask(time, question).boxed()
    }

    fn release(&self, token: u64) -> BoxFuture<'_, Result<(), SourceError>> {
        let (name, holder) = (self.name.clone(), self.holder.clone());
        let question: Question<()> = Box::new(move |connection| {
            async move {
                let statement = "UPDATE laneway_queue.lease SET ends = clock_timestamp()
                 WHERE name = $1 AND token = $2 AND holder = $3";
                let asked = sqlx::query(statement).bind(&name).bind(token as i64).bind(&holder);
                asked.execute(connection).await.map(drop)
            }
            .boxed()
        });
        self.ask(2 * CONNECT, question).boxed()
    }

    fn look(&self) -> BoxFuture<'_, Result<Sight, SourceError>> {
        let name = self.name.clone();
        let question: Question<Sight> = Box::new(move |connection| {
            async move {
                let (is_there, is_allowed): (bool, bool) = sqlx::query_as(
                    "SELECT to_regclass('laneway_queue.lease') IS NOT NULL,
                     CASE WHEN to_regclass('laneway_queue.lease') IS NULL
                         THEN has_database_privilege(current_database(), 'CREATE')
                         ELSE has_table_privilege('laneway_queue.lease', 'INSERT')
                             AND has_table_privilege('laneway_queue.lease', 'UPDATE') END",
                )
                .fetch_one(&mut *connection)
                .await?;
                if !is_there {
                    return Ok(Sight { is_allowed, last: None });
                }
                let last: Option<(String, i64, f64)> = sqlx::query_as(
                    "SELECT holder, token, extract(epoch FROM ends - clock_timestamp())::float8
                 FROM laneway_queue.lease WHERE name = $1",
                )
                .bind(&name)
                .fetch_optional(connection)
                .await?;
                let last = last.map(|(name, token, left)| Holder {
                    name,
                    token: token as u64,
                    left: Duration::try_from_secs_f64(left).unwrap_or_default(),
                });
                Ok(Sight { is_allowed, last })
            }
            .boxed()
        });
        self.ask(2 * CONNECT, question).boxed()
    }
}
