//! Postgres as a kind of broker: its settings as the configuration and URLs have them, its sink, and its examination.
//!
//! `source/broker.rs` hands over sections and URLs, and opens what comes of them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_config::Section;
use sqlx::{PgConnection, Row};

use super::{OpenError, PostgresQueue, QUEUE_NAME_MAX, Question, Settings, is_queue_name, statements};
use crate::message::{MESSAGE_BYTES_MAX, NAME_BYTES_MAX};
use crate::pool::Ungrouped;
use crate::source::broker::{Broker, Examination, Finding, Role};
use crate::source::embedded::{Publication, PublishError};
use crate::source::sink::{Outgoing, Published, Sink, SinkError};
use crate::source::{Source, SourceError};

/// Reads a section of the configuration.
pub(in crate::source) fn read(s: &mut Section<'_>, role: Role) -> Arc<dyn Broker> {
    let (url, in_url) = split(&s.text("url"));
    let queue = s.optional("queue", |s| s.text("queue")).or(in_url).unwrap_or_default();
    let mut settings = Settings::new(url, &queue);
    if let Err(OpenError::BadUrl(why)) = super::connect_options(&settings.url, "") {
        s.problem("url", format!("must be an address such as postgres://user@host/database: {why}"));
    }
    if !is_queue_name(&queue) {
        let what = format!("must be a name of 1 to {QUEUE_NAME_MAX} of a-z, 0-9 and _, with no digit first");
        s.problem("queue", what);
    }
    if let Some(create) = s.optional("create", |s| s.flag("create")) {
        settings.create = create;
    }
    if let Some(connections) = s.optional("connections", |s| s.integer("connections", 1..=1_000)) {
        settings.connections = connections as u32;
    }
    let ungrouped = [("unordered", Ungrouped::Unordered), ("serial", Ungrouped::Serial)];
    if let Some(ungrouped) = s.optional("ungrouped", |s| s.one_of("ungrouped", &ungrouped)) {
        settings.ungrouped = ungrouped;
    }
    if role == Role::Sink {
        let window = Duration::ZERO..=Duration::from_secs(7 * 24 * 3600);
        let key = "deduplication-window";
        if let Some(window) = s.optional(key, |s| s.duration(key, window)) {
            settings.deduplication_window = window;
        }
    }
    Arc::new(settings)
}

/// Reads a URL: `postgres://user@host/database?queue=orders`, with any parameter that libpq knows. A URL is often typed, and says nothing of what a queue should be like: nothing is
/// made for it.
pub(in crate::source) fn from_url(url: &str) -> Result<Arc<dyn Broker>, String> {
    let (rest, queue) = split(url);
    let queue = queue.ok_or("the URL must name the queue: postgres://user@host/database?queue=orders")?;
    let settings = Settings { connections: 2, create: false, ..Settings::new(rest, &queue) };
    PostgresQueue::check(&settings).map_err(|error| error.to_string())?;
    Ok(Arc::new(settings))
}

/// A URL without its queue, and the queue.
fn split(url: &str) -> (String, Option<String>) {
    let Some((place, query)) = url.split_once('?') else { return (url.to_owned(), None) };
    let (ours, theirs): (Vec<&str>, Vec<&str>) =
        query.split('&').partition(|parameter| parameter.starts_with("queue="));
    let queue = ours.first().and_then(|ours| ours.split_once('=')).map(|(_, queue)| queue.to_owned());
    let rest = if theirs.is_empty() { place.to_owned() } else { format!("{place}?{}", theirs.join("&")) };
    (rest, queue)
}

impl Broker for Settings {
    fn kind(&self) -> &'static str {
        "postgres"
    }

    fn open_source(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>> {
        async move {
            // The first claim sets it up: that may take longer than an opening may.
            let queue = self.opened(&name, Role::Source).map_err(SourceError::Broken)?;
            Ok(Arc::new(queue) as Arc<dyn Source>)
        }
        .boxed()
    }

    fn open_sink(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>> {
        async move {
            let queue = self.opened(&name, Role::Sink).map_err(SinkError::Broken)?;
            queue.set_up().await?;
            Ok(Arc::new(PostgresSink { queue }) as Arc<dyn Sink>)
        }
        .boxed()
    }

    fn examine<'a>(&'a self, examination: &'a Examination) -> BoxFuture<'a, Vec<Finding>> {
        self.examined(examination).boxed()
    }
}

impl Settings {
    fn opened(&self, name: &str, role: Role) -> Result<PostgresQueue, String> {
        let settings = Settings { name: name.to_owned(), ..self.clone() };
        let opened = match role {
            Role::Source => PostgresQueue::open(settings),
            Role::Sink => PostgresQueue::open_sink(settings),
        };
        opened.map_err(|error| error.to_string())
    }

    async fn examined(&self, examination: &Examination) -> Vec<Finding> {
        let queue = match self.opened(&examination.name, examination.role) {
            Ok(queue) => queue,
            Err(error) => return vec![Finding::error(error, "correct the address and the queue")],
        };
        let inner = &queue.inner;
        let found = match inner.look().await {
            Ok(found) => found,
            Err(error) => {
                return vec![Finding::error(
                    error.to_string(),
                    "see that the server runs, that the address is right, and that the user may log in",
                )];
            }
        };
        let mut findings = vec![Finding::fine(format!("{} can be reached", queue.place()))];
        match found.missing(inner.turns) {
            None => findings.push(Finding::fine(format!("the queue {} is there, and set up", self.queue))),
            Some(missing) if self.create => findings.push(Finding::warning(
                format!("{missing}; it is installed when the service starts"),
                "start the service once with a user who may create schemas, or leave it to that",
            )),
            Some(missing) => findings.push(Finding::error(
                missing.to_owned(),
                "set create = true, and let a user open the queue once who may create schemas",
            )),
        }
        let table = statements::table(&self.queue);
        let question: Question<Vec<Finding>> =
            Box::new(move |connection| async move { durability(connection, &table).await }.boxed());
        match inner.ask_within(super::ANSWER, question).await {
            Ok(more) => findings.extend(more),
            Err(error) => findings.push(Finding::error(error.to_string(), "see to what it says")),
        }
        if examination.role == Role::Source && examination.lease < Duration::from_secs(3) {
            findings.push(Finding::warning(
                format!(
                    "deliveries are leased for {:?}: a short pause of the server hands them to others",
                    examination.lease
                ),
                "make laneway.lease 30 s",
            ));
        }
        findings
    }
}

/// What the server's settings mean for what it has acknowledged.
async fn durability(connection: &mut PgConnection, table: &str) -> Result<Vec<Finding>, sqlx::Error> {
    let row = sqlx::query(
        "SELECT current_setting('server_version_num')::integer, current_setting('fsync'), current_setting('synchronous_commit'),
             coalesce((SELECT relpersistence = 'u' FROM pg_class WHERE oid = to_regclass($1)), false),
             pg_is_in_recovery(),
             current_setting('max_connections')::integer - (SELECT count(*)::integer FROM pg_stat_activity)",
    )
    .bind(table)
    .fetch_one(connection)
    .await?;
    let (version, fsync, commit): (i32, String, String) = (row.get(0), row.get(1), row.get(2));
    let (unlogged, standby, left): (bool, bool, i32) = (row.get(3), row.get(4), row.get(5));
    let mut findings = Vec::new();
    if version < 140_000 {
        findings.push(Finding::error(format!("the server is version {version}"), "use Postgres 14 or newer"));
    }
    if fsync != "on" {
        let what = "fsync is off: what was acknowledged does not survive a loss of power, and the database may not, either";
        findings.push(Finding::error(what, "set fsync = on"));
    }
    if commit == "off" {
        let what =
            "synchronous_commit is off: the last moments before a crash are forgotten, acknowledged or not";
        findings.push(Finding::warning(what, "set synchronous_commit = on for this user"));
    }
    if unlogged {
        let what = "the queue is unlogged: a crash of the server empties it";
        findings.push(Finding::error(what, format!("ALTER TABLE {table} SET LOGGED")));
    }
    if standby {
        let what = "the server is a replica: nothing can be claimed or published";
        findings.push(Finding::error(
            what,
            "name the primary server, or add target_session_attrs to a list of hosts",
        ));
    }
    if left < 10 {
        let what = format!("the server has room for {left} more connections");
        findings.push(Finding::warning(what, "raise max_connections, or lower `connections`"));
    }
    if findings.is_empty() {
        findings.push(Finding::fine("commits reach the disk before they are acknowledged"));
    }
    Ok(findings)
}

/// A queue to publish to.
struct PostgresSink {
    queue: PostgresQueue,
}

impl Sink for PostgresSink {
    fn name(&self) -> &str {
        self.queue.name()
    }

    fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>> {
        async move {
            let refusals: Vec<Option<String>> = batch.iter().map(refusal).collect();
            let fine = batch.into_iter().zip(&refusals).filter(|(_, refusal)| refusal.is_none());
            let publications = fine.map(|(outgoing, _)| publication(outgoing)).collect();
            let published = self.queue.publish_many(publications).await.map_err(publish_error)?;
            let mut published = published.into_iter();
            let answer = |refusal: Option<String>| match refusal {
                Some(reason) => Published::Refused { reason },
                None => {
                    let it = published.next();
                    let duplicate = it.is_some_and(|it| it.duplicate);
                    Published::Accepted { sequence: it.map(|it| it.sequence), duplicate }
                }
            };
            Ok(refusals.into_iter().map(answer).collect())
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move { self.queue.close().await }.boxed()
    }
}

/// Why the queue will never take a message, if it will not.
fn refusal(outgoing: &Outgoing) -> Option<String> {
    let bytes = outgoing.text.len();
    if bytes > MESSAGE_BYTES_MAX {
        return Some(format!("{bytes} bytes are more than the {MESSAGE_BYTES_MAX} that a message may have"));
    }
    let names =
        [("group", outgoing.group.as_deref()), ("deduplication id", outgoing.deduplication_id.as_deref())];
    let bad = |name: &str| name.len() > NAME_BYTES_MAX || name.contains('\0');
    let (what, _) = names.into_iter().find(|(_, name)| name.is_some_and(bad))?;
    Some(format!("its {what} has more than {NAME_BYTES_MAX} bytes, or a zero in it"))
}

fn publication(outgoing: Outgoing) -> Publication {
    let publication = Publication::new(&outgoing.text);
    let publication = match outgoing.group {
        Some(group) => publication.group(group),
        None => publication,
    };
    match outgoing.deduplication_id {
        Some(id) => publication.deduplication_id(id),
        None => publication,
    }
}

fn publish_error(error: PublishError) -> SinkError {
    match error.refusal {
        crate::source::embedded::Refusal::Failed(error) => error.into(),
        other => SinkError::Broken(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_the_queue_and_nothing_else_of_ours() {
        assert_eq!(split("postgres://h/d"), ("postgres://h/d".to_owned(), None));
        assert_eq!(
            split("postgres://h/d?queue=orders"),
            ("postgres://h/d".to_owned(), Some("orders".to_owned()))
        );
        let (url, queue) = split("postgres://h/d?sslmode=require&queue=orders&connect_timeout=1");
        assert_eq!(url, "postgres://h/d?sslmode=require&connect_timeout=1");
        assert_eq!(queue.as_deref(), Some("orders"));
    }

    #[test]
    fn errors_about_a_url_do_not_repeat_it() {
        for url in [
            "postgres://me:hush@h/d",
            "postgres://me:hush@h:port/d?queue=orders",
            "postgres://me:hush@h/d?queue=O-1",
        ] {
            let error = from_url(url).expect_err("not right");
            assert!(!error.contains("hush"), "{error}");
        }
        assert!(!format!("{:?}", from_url("postgres://me:hush@h/d?queue=orders")).contains("hush"));
    }
}
