//! `/api/sources`, `/api/dead-letters`, `/api/quarantine`: what the queues hold, and what came to rest in them.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::header::{self, HeaderName};
use axum::response::AppendHeaders;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::guard::Detail;
use super::input::{Json, Query};
use super::problem::Problem;
use super::route::Route;
use super::{iso, iso_of, most, queue_of};
use crate::mediator::headers::is_secret;
use crate::message;
use crate::router::SourceView;
use crate::service::Service;
use crate::source::embedded::BATCH_MAX;
use crate::source::{Keeps, Kept, Rest};

pub(super) fn routes() -> Vec<Route> {
    let page = |route: Route| {
        route
            .query("queue", "string", "The queue, or the source; the only one, or default")
            .query("after", "integer", "Behind this sequence; 0 for the oldest")
            .query(
                "most",
                "integer",
                "How many, at most; 100. A page ends before that where its texts would be more than 4 MiB",
            )
            .gives(200, "[Kept]")
            .paged()
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
            .query("queue", "string", "The queue, or the source; the only one, or default")
            .gives(200, "Purged"),
        page(Route::get("/api/quarantine", quarantine, "What could not be read as a message, oldest first")),
        Route::delete("/api/quarantine", purge_quarantine, "Forgets all that is in quarantine")
            .query("queue", "string", "The queue, or the source; the only one, or default")
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

/// Where a kind of broker keeps what was given up, if that is not listed here. Each keeps it itself, so that it is where its users look for it.
fn dead_letters_at(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "embedded" | "nats" | "postgres" => return None,
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

/// A message that came to rest. Its token, the values of its headers and the query of its target are hidden.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct KeptMessage {
    sequence: u64,
    id: Option<String>,
    group: Option<String>,
    reason: String,
    attempts: Option<u32>,
    at: String,
    published_at: Option<String>,
    text: String,
}

impl From<Kept> for KeptMessage {
    fn from(kept: Kept) -> Self {
        let (id, text) = shown(&kept.text);
        KeptMessage {
            sequence: kept.sequence,
            id,
            group: kept.group.map(|group| group.to_string()),
            reason: kept.reason,
            attempts: kept.attempts,
            at: iso(kept.kept_millis),
            published_at: kept.published_millis.map(iso),
            text,
        }
    }
}

/// Any JSON, which is not taken apart further than asked: a message may have in its payload what no value of JSON could hold.
type Fields = BTreeMap<String, Box<RawValue>>;

/// What stands for a secret.
const HIDDEN: &str = "(hidden)";

/// The id of a message, if it has one, and its text as it may be shown. Where nobody can tell what in it is a secret, that is its length.
fn shown(text: &[u8]) -> (Option<String>, String) {
    let Ok(mut fields) = serde_json::from_slice::<Fields>(text) else {
        return (None, format!("({} bytes that are no JSON object, and may be secret)", text.len()));
    };
    let id = fields.get("id").and_then(|id| serde_json::from_str(id.get()).ok());
    for (name, value) in &mut fields {
        match name.as_str() {
            // What is not there is no secret.
            _ if value.get() == "null" => {}
            "mediationTarget" => *value = shown_target(value),
            "headers" => *value = shown_headers(value),
            name if is_secret(name) => *value = raw(HIDDEN),
            _ => {}
        }
    }
    (id, raw(&fields).get().to_owned())
}

fn shown_target(value: &RawValue) -> Box<RawValue> {
    let target: Result<String, _> = serde_json::from_str(value.get());
    target.map_or_else(|_| raw(HIDDEN), |target| raw(&message::without_secrets(&target)))
}

fn shown_headers(value: &RawValue) -> Box<RawValue> {
    let names: Result<Fields, _> = serde_json::from_str(value.get());
    let hidden = |names: Fields| names.into_keys().map(|name| (name, HIDDEN)).collect::<BTreeMap<_, _>>();
    names.map_or_else(|_| raw(HIDDEN), |names| raw(&hidden(names)))
}

fn raw(value: &(impl Serialize + ?Sized)) -> Box<RawValue> {
    to_raw_value(value).expect("texts and what was JSON before")
}

/// Where a place is listed.
fn path(rest: Rest) -> &'static str {
    match rest {
        Rest::DeadLetters => "/api/dead-letters",
        Rest::Quarantine => "/api/quarantine",
    }
}

/// What came to rest in a source, by its name. Without one it is that of the only source there is, or that of a queue as everywhere.
fn keeps_of(service: &Service, name: Option<&str>) -> Result<(String, Arc<dyn Keeps>), Problem> {
    let sources = service.router().source_states();
    let only = match &sources[..] {
        [only] => Some(&*only.name),
        _ => None,
    };
    let brokers = || sources.iter().filter(|source| source.kind != "embedded");
    let Some(broker) = brokers().find(|source| name.or(only) == Some(&*source.name)) else {
        if name.is_none() && service.queue_names().is_empty() && brokers().count() > 1 {
            let names: Vec<&str> = brokers().map(|source| &*source.name).collect();
            let detail = format!("there are several sources; `queue` says which: {}", names.join(", "));
            return Err(Problem::unprocessable(detail));
        }
        let (name, queue) = queue_of(service, name)?;
        return Ok((name, Arc::new(queue)));
    };
    if let Some(place) = dead_letters_at(broker.kind) {
        let detail = format!("{} ({}) keeps its dead letters itself: {place}", broker.name, broker.kind);
        return Err(Problem::unprocessable(detail));
    }
    let gone = || Problem::not_found(format!("there is no source {:?} any more", broker.name));
    let source = service.router().source(&broker.name).ok_or_else(gone)?;
    let keeps = source.keeps()?.ok_or_else(gone)?;
    Ok((broker.name.clone(), keeps))
}

/// A page, and where there is more, the header that says so.
type Answer = Result<(AppendHeaders<Option<(HeaderName, String)>>, axum::Json<Vec<KeptMessage>>), Problem>;

/// A page, and in `Link` where the next one is. A page that is short need not be the last, since it ends also where it has become long.
async fn page(service: &Service, page: Page, rest: Rest) -> Answer {
    let (name, keeps) = keeps_of(service, page.queue.as_deref())?;
    let most = most(page.most, 100);
    let kept = keeps.kept(rest, page.after, most).await?;
    let last = kept.last().map(|kept| kept.sequence);
    let next = match last {
        Some(last) if !keeps.kept(rest, last, 1).await?.is_empty() => {
            let queue = utf8_percent_encode(&name, NON_ALPHANUMERIC);
            let path = path(rest);
            Some((header::LINK, format!("<{path}?after={last}&most={most}&queue={queue}>; rel=\"next\"")))
        }
        _ => None,
    };
    let kept: Vec<KeptMessage> = kept.into_iter().map(KeptMessage::from).collect();
    Ok((AppendHeaders(next), axum::Json(kept)))
}

async fn dead_letters(State(service): State<Service>, Query(asked): Query<Page>) -> Answer {
    page(&service, asked, Rest::DeadLetters).await
}

async fn quarantine(State(service): State<Service>, Query(asked): Query<Page>) -> Answer {
    page(&service, asked, Rest::Quarantine).await
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
    /// The sequences that were asked for and are no dead letters.
    missing: Vec<u64>,
}

async fn redrive(
    State(service): State<Service>,
    Json(mut asked): Json<Redrive>,
) -> Result<(Extension<Detail>, axum::Json<Redriven>), Problem> {
    let (name, keeps) = keeps_of(&service, asked.queue.as_deref())?;
    if asked.sequences.as_ref().is_some_and(|sequences| sequences.len() > BATCH_MAX) {
        return Err(Problem::unprocessable(format!("more than {BATCH_MAX} sequences at once")));
    }
    if let Some(sequences) = &mut asked.sequences {
        // One that is said twice is there once.
        let mut seen = HashSet::new();
        sequences.retain(|sequence| seen.insert(*sequence));
    }
    let which = match &asked.sequences {
        Some(sequences) => format!("sequences {}", first_of(sequences)),
        None => "the oldest".to_owned(),
    };
    let done = keeps.redrive(asked.sequences, asked.most.unwrap_or(BATCH_MAX)).await?;
    let detail = Detail(format!("{which}: {} of queue {name}", done.count));
    Ok((Extension(detail), axum::Json(Redriven { redriven: done.count, missing: done.missing })))
}

/// The first of many numbers.
fn first_of(sequences: &[u64]) -> String {
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
    let purged = keeps_of(&service, which.queue.as_deref())?.1.purge(Rest::DeadLetters).await?;
    Ok(axum::Json(Purged { purged }))
}

async fn purge_quarantine(
    State(service): State<Service>,
    Query(which): Query<Which>,
) -> Result<axum::Json<Purged>, Problem> {
    let purged = keeps_of(&service, which.queue.as_deref())?.1.purge(Rest::Quarantine).await?;
    Ok(axum::Json(Purged { purged }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_secret_is_hidden_in_whatever_came_to_rest() {
        let text = r#"{"id":"m","authToken":"hush","headers":{"x-key":"hush","n":1e999},"mediationTarget":"https://me:hush@host/a?hush#hush","payload":{"authToken":1e999}}"#;
        let wanted = r#"{"authToken":"(hidden)","headers":{"n":"(hidden)","x-key":"(hidden)"},"id":"m","mediationTarget":"https://host/a","payload":{"authToken":1e999}}"#;
        assert_eq!(shown(text.as_bytes()), (Some("m".to_owned()), wanted.to_owned()));
        for (text, wanted) in [
            (r#"{"id":7,"auth_token":"hush"}"#, r#"{"auth_token":"(hidden)","id":7}"#),
            (r#"{"headers":["hush"]}"#, r#"{"headers":"(hidden)"}"#),
            (r#"{"mediationTarget":["hush"]}"#, r#"{"mediationTarget":"(hidden)"}"#),
            (r#"{"authToken":null,"headers":null}"#, r#"{"authToken":null,"headers":null}"#),
            (r#"[{"authToken":"hush"}]"#, "(22 bytes that are no JSON object, and may be secret)"),
            (r#"{"authToken":"hush""#, "(19 bytes that are no JSON object, and may be secret)"),
        ] {
            assert_eq!(shown(text.as_bytes()), (None, wanted.to_owned()), "{text}");
        }
        assert_eq!(shown(b"\xff\xfe").1, "(2 bytes that are no JSON object, and may be secret)");
    }
}
