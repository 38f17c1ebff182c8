//! Postgres for `bench router --source postgres`.

use std::sync::Arc;

use anyhow::{Result, ensure};
use futures_util::future::BoxFuture;
use laneway_router::source::broker::Broker;
use laneway_router::source::postgres::Settings;
use laneway_servers::postgres;
use sqlx::Row;
use sqlx::postgres::PgPoolOptions;

use super::brokers::{CONTENDERS, Consuming, Fixture, Kind, Place, Running};

/// So many messages the plain consumer reads and deletes at once.
const BATCH: i32 = 512;

pub(super) const KIND: Kind = Kind {
    name: "postgres",
    contenders: CONTENDERS,
    start: || {
        let server = postgres::start()?;
        Ok(Box::new(Running { address: postgres::url(&server), _server: server }))
    },
    fixture: |place| Box::new(Postgres(place)),
};

struct Postgres(Place);

impl Fixture for Postgres {
    fn broker(&self, queue: usize, queues: usize) -> Arc<dyn Broker> {
        let connections = (16 / queues).clamp(1, 4) as u32;
        Arc::new(Settings { connections, ..Settings::new(self.0.address.clone(), &self.0.queue(queue)) })
    }

    /// By pgmq's own functions, without groups: a batch is read, and the batch is deleted.
    fn connect(&self, queue: usize, _queues: usize, count: u64) -> BoxFuture<'_, Result<Consuming>> {
        let name = self.0.queue(queue);
        Box::pin(async move {
            let pool = PgPoolOptions::new().max_connections(1).connect(&self.0.address).await?;
            let consuming = async move {
                let mut left = count;
                while left > 0 {
                    let read = sqlx::query("SELECT msg_id, message::text FROM pgmq.read($1, 30, $2)");
                    let rows = read.bind(&name).bind(BATCH).fetch_all(&pool).await?;
                    ensure!(!rows.is_empty(), "{left} messages are missing");
                    let numbers: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
                    left -= numbers.len() as u64;
                    sqlx::query("SELECT pgmq.delete($1, $2)")
                        .bind(&name)
                        .bind(numbers)
                        .execute(&pool)
                        .await?;
                }
                pool.close().await;
                Ok(())
            };
            Ok(Box::pin(consuming) as Consuming)
        })
    }
}
