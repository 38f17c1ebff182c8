//! `/api/sources`, `/api/dead-letters`, `/api/quarantine`: what the queues hold, and what came to rest in them.

use axum::Extension;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::guard::Detail;
use super::input::{Json, Query};
use super::problem::Problem;
use super::route::Route;
use super::{iso, iso_of, most, queue_of};
use crate::router::SourceView;
use crate::service::Service;
use crate::source::embedded::{BATCH_MAX, Kept};

pub(super) fn routes() -> Vec<Route> {
    let page = |route: Route| {
        route
            .query("queue", "string", "The queue; the only one, or default")
            .query("after", "integer", "Behind this sequence; 0 for the oldest")
            .query("most", "integer", "How many, at most; 100")
            .gives(200, "[Kept]")
    };
    vec![
        Route::get("/api/sources", sources, "The sources, and what they hold").gives(200, "[Source]"),
        page(Route::get("/api/dead-letters", dead_letters, "Messages that failed for good, oldest first")),
        Route::post(
            "/api/dead-letters/redrive",
            redrive,
            "Makes dead letters messages again, at the end of their groups",
        )
        .takes("Redrive")
        .gives(200, "Redriven"),
        Route::delete("/api/dead-letters", purge_dead_letters, "Forgets all dead letters of a queue")
            .query("queue", "string", "The queue; the only one, or default")
            .gives(200, "Purged"),
        page(Route::get("/api/quarantine", quarantine, "What could not be read as a message, oldest first")),
        Route::delete("/api/quarantine", purge_quarantine, "Forgets all that is in quarantine")
            .query("queue", "string", "The queue; the only one, or default")
            .gives(200, "Purged"),
    ]
}

#[derive(Debug, Serialize)]
pub(super) struct Source {
    name: String,
    kind: &'static str,
    state: &'static str,
    since: String,
    healthy: bool,
    trouble: Option<String>,
    claimed: u64,
    unreadable: u64,
    held: usize,
    waiting: Option<u64>,
    leased: Option<u64>,
    dead: Option<u64>,
    quarantined: Option<u64>,
    /// Where its dead letters are and how to look at them; nothing where `/api/dead-letters` lists them.
    #[serde(rename = "deadLettersAt")]
    dead_letters_at: Option<&'static str>,
}

/// Where a kind of broker keeps what was given up. Each keeps it itself, so that it is where its users look for it.
fn dead_letters_at(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "embedded" => return None,
        "nats" => "the stream <stream>-dead, the reason in Laneway-Reason; look with `nats stream view`",
        "rabbitmq" => {
            "the queue <queue>.dead, or that of dead-letters, the reason in x-laneway-reason; look with the management page"
        }
        "activemq" => {
            "the queue <queue>.dead, or that of dead-letters, the reason in x-laneway-reason; browse it on the broker's page"
        }
        "sqs" => {
            "the queue of dead-letters, or of the redrive policy, the reason in laneway-reason; bring back with `aws sqs start-message-move-task`"
        }
        "kafka" => {
            "the topic of dead-letters, the reason in laneway-reason; look with `kafka-console-consumer --property print.headers=true`"
        }
        "postgres" => "the table laneway_queue.kept, the reason beside them; look with SQL",
        _ => "where the source itself keeps them",
    })
}

impl From<SourceView> for Source {
    fn from(view: SourceView) -> Self {
        Source {
            name: view.name,
            kind: view.kind,
            state: view.state.word(),
            since: iso_of(view.since),
            healthy: view.healthy,
            trouble: view.trouble,
            claimed: view.claimed,
            unreadable: view.unreadable,
            held: view.ledger.held,
            waiting: view.depth.map(|depth| depth.waiting),
            leased: view.depth.map(|depth| depth.leased),
            dead: view.depth.map(|depth| depth.dead),
            quarantined: view.depth.map(|depth| depth.quarantined),
            dead_letters_at: dead_letters_at(view.kind),
        }
    }
}

async fn sources(State(service): State<Service>) -> axum::Json<Vec<Source>> {
    axum::Json(service.router().sources().await.into_iter().map(Source::from).collect())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    queue: Option<String>,
    #[serde(default)]
    after: u64,
    most: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    queue: Option<String>,
}

/// A message that came to rest. Its token and the values of its headers are hidden.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct KeptMessage {
    sequence: u64,
    id: Option<String>,
    group: Option<String>,
    reason: String,
    attempts: u32,
    at: String,
    published_at: String,
    text: String,
}

impl From<Kept> for KeptMessage {
    fn from(kept: Kept) -> Self {
        let parsed: Option<Value> = serde_json::from_slice(&kept.text).ok().filter(Value::is_object);
        let id = parsed.as_ref().and_then(|message| message["id"].as_str().map(str::to_owned));
        let text = match parsed {
            Some(message) => without_secrets(message).to_string(),
            None => String::from_utf8_lossy(&kept.text).into_owned(),
        };
        KeptMessage {
            sequence: kept.sequence,
            id,
            group: kept.group.map(|group| group.to_string()),
            reason: kept.reason,
            attempts: kept.attempts,
            at: iso(kept.kept_millis),
            published_at: iso(kept.published_millis),
            text,
        }
    }
}

fn without_secrets(mut message: Value) -> Value {
    const HIDDEN: &str = "(hidden)";
    if !message["authToken"].is_null() {
        message["authToken"] = HIDDEN.into();
    }
    if let Some(headers) = message.get_mut("headers").and_then(Value::as_object_mut) {
        headers.values_mut().for_each(|value| *value = HIDDEN.into());
    }
    message
}

type Answer = Result<axum::Json<Vec<KeptMessage>>, Problem>;

async fn dead_letters(State(service): State<Service>, Query(page): Query<Page>) -> Answer {
    let (_, queue) = queue_of(&service, page.queue.as_deref())?;
    let kept = queue.dead_letters(page.after, most(page.most, 100)).await?;
    Ok(axum::Json(kept.into_iter().map(KeptMessage::from).collect()))
}

async fn quarantine(State(service): State<Service>, Query(page): Query<Page>) -> Answer {
    let (_, queue) = queue_of(&service, page.queue.as_deref())?;
    let kept = queue.quarantined(page.after, most(page.most, 100)).await?;
    Ok(axum::Json(kept.into_iter().map(KeptMessage::from).collect()))
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Redrive {
    queue: Option<String>,
    sequences: Option<Vec<u64>>,
    most: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Redriven {
    redriven: usize,
}

async fn redrive(
    State(service): State<Service>,
    Json(asked): Json<Redrive>,
) -> Result<(Extension<Detail>, axum::Json<Redriven>), Problem> {
    let (name, queue) = queue_of(&service, asked.queue.as_deref())?;
    if asked.sequences.as_ref().is_some_and(|sequences| sequences.len() > BATCH_MAX) {
        return Err(Problem::unprocessable(format!("more than {BATCH_MAX} sequences at once")));
    }
    let which = match &asked.sequences {
        Some(sequences) => format!("sequences {}", shown(sequences)),
        None => "the oldest".to_owned(),
    };
    let redriven = queue.redrive(asked.sequences, asked.most.unwrap_or(BATCH_MAX)).await?;
    Ok((Extension(Detail(format!("{which}: {redriven} of queue {name}"))), axum::Json(Redriven { redriven })))
}

/// The first of many numbers.
fn shown(sequences: &[u64]) -> String {
    const SHOWN: usize = 20;
    let first: Vec<String> = sequences.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = if sequences.len() > SHOWN { " and more" } else { "" };
    format!("{}{more}", first.join(", "))
}

#[derive(Debug, Serialize)]
struct Purged {
    purged: usize,
}

async fn purge_dead_letters(
    State(service): State<Service>,
    Query(which): Query<Which>,
) -> Result<axum::Json<Purged>, Problem> {
    let purged = queue_of(&service, which.queue.as_deref())?.1.purge_dead_letters().await?;
    Ok(axum::Json(Purged { purged }))
}

async fn purge_quarantine(
    State(service): State<Service>,
    Query(which): Query<Which>,
) -> Result<axum::Json<Purged>, Problem> {
    let purged = queue_of(&service, which.queue.as_deref())?.1.purge_quarantine().await?;
    Ok(axum::Json(Purged { purged }))
}
