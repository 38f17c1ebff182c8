//! What the worker's tests share: a database of their own, and waiting with a deadline.

use std::time::Duration;

use laneway_flow::client::{self, RunState};
use laneway_flow::migrate;
use laneway_servers::{Server, postgres};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use uuid::Uuid;

/// Longer than anything takes on a busy machine, and shorter than anybody's patience.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A migrated database on a server of its own, which goes with this value.
pub(crate) struct Database {
    pub(crate) server: Server,
    pub(crate) pool: PgPool,
}

impl Database {
    pub(crate) async fn start() -> Self {
        let server = tokio::task::spawn_blocking(postgres::start).await.expect("it does not panic");
        let server = server.expect("Postgres starts");
        let pool = connect(&postgres::url(&server)).await;
        migrate(&pool).await.expect("the schema is made");
        Self { server, pool }
    }

    #[allow(dead_code, reason = "not every file starts processes")]
    pub(crate) fn url(&self) -> String {
        postgres::url(&self.server)
    }

    /// The run when it is over.
    pub(crate) async fn end_of(&self, run_id: Uuid) -> RunState {
        let state = client::wait(&self.pool, run_id, PATIENCE).await.expect("the run is there");
        assert!(state.is_over(), "not over within {PATIENCE:?}: {:#}", state.json());
        state
    }

    /// A number out of the database.
    #[allow(dead_code, reason = "not every file counts")]
    pub(crate) async fn count(&self, statement: &str) -> i64 {
        sqlx::query_scalar(statement).fetch_one(&self.pool).await.expect(statement)
    }

    /// Waits until a statement gives this number.
    #[allow(dead_code, reason = "not every file counts")]
    pub(crate) async fn until(&self, statement: &str, wanted: i64) {
        let reached = async {
            while self.count(statement).await != wanted {
                tokio::time::sleep(Duration::from_millis(20)).await; // paced: another process changes it
            }
        };
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        assert!(reached.is_ok(), "{statement} gives {}, not {wanted}", self.count(statement).await);
    }
}

pub(crate) async fn connect(url: &str) -> PgPool {
    let options = PgPoolOptions::new().max_connections(24).acquire_timeout(Duration::from_secs(30));
    options.connect(url).await.expect("it answers")
}
