//! Publishing: `POST /api/messages`, and `POST /api/seed/messages`, which makes up messages for trying things out.
//!
//! All messages of a request are checked before the first is published, and the answer comes when they are durable: all of them, or none.
//! Seeding is not so: it publishes a thousand at a time, and a queue that refuses some keeps those before them. The problem says how many.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use super::input::{Query, Raw, not_json};
use super::problem::Problem;
use super::queue_of;
use super::route::Route;
use crate::message::{MediationType, Message, NAME_BYTES_MAX};
use crate::router::DEFAULT_POOL;
use crate::service::Service;
use crate::source::embedded::Publication;

/// How many messages a request may have.
const MESSAGES_MAX: usize = 1_000;

/// How many messages may be seeded at once.
const SEED_MAX: u64 = 100_000;

/// How many wrong messages are told apart; the rest is a number.
const ERRORS_MAX: usize = 100;

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::post(
            "/api/messages",
            publish,
            "Publishes one message, or an array of at most 1000, all or none",
        )
        .query("queue", "string", "The queue; the only one, or default")
        .header(
            "Idempotency-Key",
            "Makes the request safe to repeat within five minutes, or what is configured; 422 if it was used for other messages",
        )
        .takes("Messages")
        .gives(202, "Published"),
        Route::post("/api/seed/messages", seed, "Publishes made-up messages, a thousand at a time")
            .query("count", "integer", "How many; 10")
            .query(
                "endpoint",
                "string",
                "A test target by name, `random` for one of them, `simulated`, or a URL; fast",
            )
            .query("queue", "string", "The queue; the only one, or default")
            .query("messageGroupMode", "string", "unique: each its own; 1of8: one of eight, at random; single: one for all. 1of8")
            .query("pool", "string", "The code of the pool; DEFAULT-POOL")
            .query("delayMillis", "integer", "How long the target takes, instead of its own time")
            .gives(202, "Seeded"),
    ]
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Where {
    queue: Option<String>,
}

#[derive(Debug, Serialize)]
struct Published {
    accepted: usize,
    messages: Vec<PublishedMessage>,
}

#[derive(Debug, Serialize)]
struct PublishedMessage {
    id: String,
    sequence: u64,
    duplicate: bool,
}

async fn publish(
    State(service): State<Service>,
    Query(asked): Query<Where>,
    headers: HeaderMap,
    Raw(body): Raw,
) -> Result<(StatusCode, axum::Json<Published>), Problem> {
    let (_, queue) = queue_of(&service, asked.queue.as_deref())?;
    let key = idempotency_key(&headers)?;
    let messages = parse(&service, &body)?;
    let publications = messages.iter().map(Publication::of).collect();
    let published = match key {
        None => queue.publish_many(publications, None).await.map(Some),
        Some(key) => queue.publish_once(publications, key).await,
    };
    let published = published.map_err(|error| Problem::from(error.refusal))?.ok_or_else(|| {
        Problem::unprocessable(
            "the Idempotency-Key was used before, for other messages; nothing was published: repeat that request as it was, or use another key",
        )
    })?;
    let messages = messages.into_iter().zip(published).map(|(message, published)| PublishedMessage {
        id: message.id,
        sequence: published.sequence,
        duplicate: published.duplicate,
    });
    let messages: Vec<_> = messages.collect();
    let accepted = messages.iter().filter(|message| !message.duplicate).count();
    Ok((StatusCode::ACCEPTED, axum::Json(Published { accepted, messages })))
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    let key = key.to_str().ok().filter(|key| !key.trim().is_empty() && key.len() <= NAME_BYTES_MAX);
    let detail = format!("Idempotency-Key must be 1 to {NAME_BYTES_MAX} visible characters");
    key.map(Some).ok_or_else(|| Problem::bad_request(detail))
}

/// The messages of a body, or all that is wrong with them.
fn parse(service: &Service, body: &[u8]) -> Result<Vec<Message>, Problem> {
    let is_array = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let texts: Vec<&RawValue> = match is_array {
        true => serde_json::from_slice(body).map_err(|error| not_json(&error))?,
        false => vec![serde_json::from_slice(body).map_err(|error| not_json(&error))?],
    };
    if texts.is_empty() || texts.len() > MESSAGES_MAX {
        return Err(Problem::unprocessable(format!(
            "{} messages; 1 to {MESSAGES_MAX} would be right",
            texts.len()
        )));
    }
    let (mut messages, mut errors, mut wrong) = (Vec::with_capacity(texts.len()), Vec::new(), 0);
    for (index, text) in texts.iter().enumerate() {
        let message = Message::parse(text.get().as_bytes()).map_err(|error| error.to_string());
        let checked = message.and_then(|message| match service.mediators().check(&message) {
            Ok(()) => Ok(message),
            Err(error) => Err(format!("`mediationTarget` {error}")),
        });
        match checked {
            Ok(message) => messages.push(message),
            Err(detail) => {
                wrong += 1;
                if errors.len() < ERRORS_MAX {
                    errors.push(json!({ "index": index, "detail": detail }));
                }
            }
        }
    }
    if wrong == 0 {
        return Ok(messages);
    }
    let detail = match texts.len() {
        1 => errors[0]["detail"].as_str().unwrap_or_default().to_owned(),
        all => format!("{wrong} of {all} messages are not right; none was published"),
    };
    Err(Problem::unprocessable(detail).with_errors(errors))
}

// ── seeding ───────────────────────────────────────────────────────────────────────────────────────────────────────────

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Seed {
    count: Option<u64>,
    endpoint: Option<String>,
    queue: Option<String>,
    message_group_mode: Option<GroupMode>,
    pool: Option<String>,
    delay_millis: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
enum GroupMode {
    #[serde(rename = "unique")]
    Unique,
    #[default]
    #[serde(rename = "1of8")]
    OneOfEight,
    #[serde(rename = "single")]
    Single,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Seeded {
    seeded: u64,
    queue: String,
    pool: String,
    endpoint: String,
    message_group_mode: GroupMode,
    /// The first and the last id.
    ids: [String; 2],
}

/// What `random` chooses from: those that end soon, whatever they answer.
const RANDOM: [&str; 3] = ["fast", "success", "faulty"];

async fn seed(
    State(service): State<Service>,
    Query(seed): Query<Seed>,
) -> Result<(StatusCode, axum::Json<Seeded>), Problem> {
    let count = seed.count.unwrap_or(10);
    if !(1..=SEED_MAX).contains(&count) {
        return Err(Problem::unprocessable(format!("count = {count}: 1 to {SEED_MAX} would be right")));
    }
    let (queue_name, queue) = queue_of(&service, seed.queue.as_deref())?;
    let endpoint = seed.endpoint.clone().unwrap_or_else(|| "fast".to_owned());
    let pool = seed.pool.clone().unwrap_or_else(|| DEFAULT_POOL.to_owned());
    let mode = seed.message_group_mode.unwrap_or_default();
    let run = format!("seed-{:08x}", fastrand::u32(..));
    let make = |number: u64| -> Result<Message, Problem> {
        let (kind, target) = target(&service, &endpoint, seed.delay_millis)?;
        let group = match mode {
            GroupMode::Unique => format!("{run}-{number}"),
            GroupMode::OneOfEight => format!("group-{}", fastrand::u8(..8)),
            GroupMode::Single => "group-0".to_owned(),
        };
        let message = Message {
            id: format!("{run}-{number}"),
            pool_code: pool.clone(),
            auth_token: None,
            mediation_type: kind,
            mediation_target: target,
            message_group_id: Some(group),
            payload: None,
            headers: Default::default(),
            priority: Default::default(),
            dispatch_mode: Default::default(),
            deduplication_id: None,
            delay_seconds: None,
        };
        message.check().map_err(|error| Problem::unprocessable(error.to_string()))?;
        service.mediators().check(&message).map_err(|error| Problem::unprocessable(error.to_string()))?;
        Ok(message)
    };
    let mut next = 0;
    while next < count {
        let end = count.min(next + MESSAGES_MAX as u64);
        let some: Vec<Publication> = (next..end)
            .map(|number| make(number).map(|message| Publication::of(&message)))
            .collect::<Result<_, _>>()?;
        let published = queue.publish_many(some, None).await;
        published.map_err(|error| Problem::from(error.refusal).after_seeding(next))?;
        next = end;
    }
    let ids = [format!("{run}-0"), format!("{run}-{}", count - 1)];
    let seeded = Seeded { seeded: count, queue: queue_name, pool, endpoint, message_group_mode: mode, ids };
    Ok((StatusCode::ACCEPTED, axum::Json(seeded)))
}

/// How an endpoint is called.
fn target(
    service: &Service,
    endpoint: &str,
    delay_millis: Option<u64>,
) -> Result<(MediationType, String), Problem> {
    if endpoint.eq_ignore_ascii_case("simulated") {
        let target = delay_millis.map_or(String::new(), |millis| format!("{millis}ms"));
        return Ok((MediationType::Simulated, target));
    }
    if endpoint.contains("://") {
        return Ok((MediationType::Http, endpoint.to_owned()));
    }
    if service.targets().is_none() {
        return Err(Problem::conflict(
            "the test targets are off: set laneway.test-targets = on, or give a URL",
        ));
    }
    let name = if endpoint == "random" { RANDOM[fastrand::usize(..RANDOM.len())] } else { endpoint };
    if !crate::targets::names().any(|known| known == name) {
        let known: Vec<_> = crate::targets::names().collect();
        let detail =
            format!("endpoint = {name:?}: {}, random, simulated or a URL would be right", known.join(", "));
        return Err(Problem::unprocessable(detail));
    }
    let mut address = service.http_address();
    if address.ip().is_unspecified() {
        let own = if address.is_ipv4() {
            std::net::Ipv4Addr::LOCALHOST.into()
        } else {
            std::net::Ipv6Addr::LOCALHOST.into()
        };
        address.set_ip(own);
    }
    let delay = delay_millis.map_or(String::new(), |millis| format!("?delayMillis={millis}"));
    Ok((MediationType::Http, format!("http://{address}/api/test/{name}{delay}")))
}
