//! What the database answers when it will not, and what that means to a caller.
//!
//! The functions of the schema raise errors with codes of their own; this is the one place that knows them.

use std::fmt;

/// Why an operation on flows did not happen. The database is as it was before.
#[derive(Debug)]
#[non_exhaustive]
pub enum FlowError {
    /// A name or an argument that cannot be.
    Invalid(String),
    /// There is no such flow, step or run.
    Unknown(String),
    /// An input or an output over the limit.
    TooLarge(String),
    /// A queue was dropped by hand. [`Worker`](crate::Worker)s make it again.
    QueueMissing(String),
    /// The shape of the flow differs from the database's, or is no graph.
    Shape(String),
    /// An idempotency key was used again with another input, or the input has no key.
    Conflict(String),
    /// The database cannot be reached, or is about to end. The same call may work later.
    Unavailable(sqlx::Error),
    /// Anything else.
    Database(sqlx::Error),
}

impl FlowError {
    /// Whether the same call may work later.
    pub fn is_transient(&self) -> bool {
        match self {
            FlowError::Unavailable(_) => true,
            // Deadlocks and serialization failures: one of two was chosen to try again. A call that an operator cancelled, a server that only
            // reads because another has taken its place, and a right that is missing say nothing of what was to be written.
            FlowError::Database(error) => matches!(
                code(error).as_deref(),
                Some("40P01" | "40001" | "55P03" | "57014" | "25006" | "42501")
            ),
            _ => false,
        }
    }

    /// Whether what was to be written is to blame, so that it would be refused again: bad data, a broken constraint, a limit of the server.
    pub(crate) fn blames_data(&self) -> bool {
        match self {
            FlowError::TooLarge(_) | FlowError::Database(sqlx::Error::Encode(_)) => true,
            FlowError::Database(error) => {
                code(error).is_some_and(|code| ["22", "23", "54"].iter().any(|class| code.starts_with(class)))
            }
            _ => false,
        }
    }
}

impl fmt::Display for FlowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FlowError::Invalid(words)
            | FlowError::Unknown(words)
            | FlowError::TooLarge(words)
            | FlowError::QueueMissing(words)
            | FlowError::Shape(words)
            | FlowError::Conflict(words) => f.write_str(words),
            FlowError::Unavailable(error) => write!(f, "the database is not available: {error}"),
            FlowError::Database(error) => write!(f, "the database refused: {error}"),
        }
    }
}

impl std::error::Error for FlowError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            FlowError::Unavailable(error) | FlowError::Database(error) => Some(error),
            _ => None,
        }
    }
}

fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned())
}

impl From<sqlx::Error> for FlowError {
    fn from(error: sqlx::Error) -> Self {
        let words =
            || error.as_database_error().map_or_else(|| error.to_string(), |it| it.message().to_owned());
        match code(&error).as_deref() {
            Some("PF001") => FlowError::Invalid(words()),
            Some("PF002") => FlowError::Unknown(words()),
            Some("PF003") => FlowError::TooLarge(words()),
            Some("PF004") => FlowError::QueueMissing(words()),
            Some("PF005") => FlowError::Shape(words()),
            Some("PF006" | "PF007") => FlowError::Conflict(words()),
            // The schema is not there: what a newcomer meets first.
            Some("3F000" | "42883" | "42P01") => FlowError::Invalid(format!(
                "{}: this database has no schema pgflow of this version; `laneway flow migrate` makes it",
                words()
            )),
            // Connection trouble, and a server that ends, starts or is out of room.
            Some(code) if code.starts_with("08") || code.starts_with("57P") || code.starts_with("53") => {
                FlowError::Unavailable(error)
            }
            Some(_) => FlowError::Database(error),
            None => match error {
                sqlx::Error::Io(_)
                | sqlx::Error::Tls(_)
                | sqlx::Error::Protocol(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::PoolClosed
                | sqlx::Error::WorkerCrashed => FlowError::Unavailable(error),
                other => FlowError::Database(other),
            },
        }
    }
}
