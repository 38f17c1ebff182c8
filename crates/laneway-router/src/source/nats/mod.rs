//! NATS JetStream: a queue in partitions, each of them a work queue that one instance reads at a time.
//!
//! ```text
//!  sink ── group's hash ──► orders.0 ── stream orders-0 ─┐
//!                           orders.1 ── stream orders-1 ─┼─ partitions 0, 2: instance A ─► shelf ─► router
//!                           orders.2 ── stream orders-2 ─┘  partition 1:     instance B ─► shelf ─► router
//! ```
//!
//! A group's hash picks its partition, which is a subject and a stream of its own. One durable pull consumer per partition hands out what is in it, in the order of
//! the stream, and acknowledging a message removes it. [`keeper`] sees to it that each partition is read by one instance, which holds it by a lease in a bucket of
//! keys and values; [`source`] is what the router reads; [`sink`] publishes.
//!
//! # Why a stream for each partition
//!
//! One stream with a subject for each partition, read by consumers that filter, would do in principle, and did here once. But a server finds the next message of a subject by an
//! index, and that of nats-server 2.9 is wrong after acknowledgements out of order: of messages 1 to 5, once 5, 2, 3 and 1 are acknowledged, it takes 5 for the first that is left, and a new
//! consumer never sees 4. `tests/nats/trouble.rs` does just that. A consumer without a filter needs no index; it is also quicker, since the server does not look through the messages of
//! other partitions.
//!
//! # Why order holds across instances
//!
//! 1. Within one instance, what is read is put on a [`Shelf`](super::shelf): what the router gives back, or holds for too long, stays there in its place. The broker
//!    never hears of it, because a message that JetStream takes back lets its successors pass.
//! 2. An instance that takes a partition over never continues with the consumer of the one before: it deletes it and makes its own, which begins with the
//!    oldest message that was not acknowledged. So nothing is missing in front of what it reads.
//! 3. Deleting the consumer is also the fence: whoever held the partition before can acknowledge nothing any more, since the subject that it would have to tell
//!    belongs to a consumer that is gone.
//! 4. A message that is lost on its way here (a connection that breaks, a server that restarts) would be handed out again only after its successors. So the
//!    consumer's own numbers are watched: one that is missing makes the instance begin again with a new consumer, as in 2.
//! 5. What such an instance still has in hand of the old consumer may come back while the new one is on its way to it. It is not handed out from where it lies: what
//!    was in front of it may have left the shelf meanwhile. It is taken off, and comes again with the new consumer, in its place.
//! 6. A server that was killed may have forgotten how far it had counted: an empty work queue then gives numbers to new messages that it has given before, and
//!    its consumers, which remember better, do not bring those. So whenever the server begins a new life (it has another id then) every partition is begun anew, as in
//!    2; no acknowledgement of an earlier life is begun in it, since the number may be another message's; and a message that has the number of one that the router still has comes
//!    when that one is settled. (In a cluster the life is that of the server to which we are connected. When that of the stream's leader ends the consumer's heartbeat stops, which is 4.)
//!
//! # What an acknowledgement means
//!
//! Every acknowledgement waits for the server's answer; those of a batch wait together ([`answers`]), and several batches are under way. But a server that answers has not written to its disk: with its defaults it does so every two minutes. See
//! `docs/guide/brokers.md`.

mod answers;
mod aside;
mod keeper;
mod lease;
mod sink;
mod source;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::jetstream::kv::Store;
use async_nats::jetstream::stream::{DiscardPolicy, RetentionPolicy, StorageType};
use async_nats::jetstream::{self, stream};
use async_nats::{ConnectErrorKind, ConnectOptions, Event, ServerError};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_config::Section;

use super::broker::{Broker, Examination, Finding, Role};
use super::sink::{Sink, SinkError};
use super::{Source, SourceError};
use crate::message::{MESSAGE_BYTES_MAX, Secret};
use crate::pool::Ungrouped;

pub use self::lease::NatsLease;
pub use self::source::NatsSource;

/// What it is called.
const KIND: &str = "nats";

/// How long a request to the server may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// As long as an attempt may take, if nothing is said: what is under way ends before its partition goes.
const DRAIN: Duration = Duration::from_secs(60);

/// More partitions than anybody has instances for.
const PARTITIONS_MAX: u64 = 256;

/// The group of a message, percent-encoded.
const GROUP: &str = "Laneway-Group";

/// When a message may be handed out, in milliseconds since 1970.
const NOT_BEFORE: &str = "Laneway-Not-Before";

/// Why a message rests among the dead letters, or in quarantine.
const REASON: &str = "Laneway-Reason";

/// Settings of a source or a sink.
#[derive(Clone, PartialEq)]
pub struct Settings {
    /// Where the servers are.
    pub url: String,
    /// Who we are.
    pub credentials: Credentials,
    /// Files with certificates that are trusted beside those of the system.
    pub trusted_certificates: Vec<String>,
    /// What the names of its streams begin with.
    pub stream: String,
    /// What its subjects begin with.
    pub subject: String,
    /// How many partitions there are, if they are made.
    pub partitions: usize,
    /// Whether what is missing is made.
    pub create: bool,
    /// How many servers keep a copy, of a stream that is made.
    pub replicas: usize,
    /// For how long a stream that is made recognises copies.
    pub deduplication_window: Duration,
    /// How many messages of a partition are held here, at most.
    pub window: usize,
    /// For how long a partition is an instance's that cannot be heard of.
    pub owner_lease: Duration,
    /// How long a partition is kept that nobody asks for.
    pub release_after: Duration,
    /// How long a partition that goes to another instance waits for what is claimed of it.
    pub drain: Duration,
    /// What messages without a group are to each other.
    pub ungrouped: Ungrouped,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            url: "nats://127.0.0.1:4222".to_owned(),
            credentials: Credentials::None,
            trusted_certificates: Vec::new(),
            stream: String::new(),
            subject: String::new(),
            partitions: 8,
            create: true,
            replicas: 1,
            deduplication_window: Duration::from_secs(300),
            window: 512,
            owner_lease: Duration::from_secs(10),
            release_after: Duration::from_secs(1),
            drain: DRAIN,
            ungrouped: Ungrouped::Serial,
        }
    }
}

impl fmt::Debug for Settings {
    /// The URL may have a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("nats::Settings")
            .field("url", &without_user(&self.url))
            .field("stream", &self.stream)
            .field("subject", &self.subject)
            .finish_non_exhaustive()
    }
}

/// How the server knows us.
#[derive(Clone, Debug, PartialEq)]
pub enum Credentials {
    /// It does not, or the URL says.
    None,
    /// By name and password.
    Password(String, Secret),
    /// By a token.
    Token(Secret),
}

/// A URL without the part in front of its host.
fn without_user(url: &str) -> String {
    let mut shown = String::with_capacity(url.len());
    let mut rest = url;
    // The next scheme is where the next server begins: a comma may also be part of a password.
    while let Some((before, after)) = rest.split_once("://") {
        shown.push_str(before.rsplit('@').next().unwrap_or_default());
        shown.push_str("://");
        let next = after.find("://").unwrap_or(after.len());
        rest = after[..next].rfind('@').map_or(after, |at| &after[at + 1..]);
    }
    shown.push_str(rest.rsplit('@').next().unwrap_or_default());
    shown
}

/// Reads a section of `laneway.sources` or `laneway.sinks`.
pub(super) fn read(s: &mut Section<'_>, role: Role) -> Arc<dyn Broker> {
    let mut settings = Settings { url: s.text("url"), stream: s.text("stream"), ..Settings::default() };
    settings.subject =
        s.optional("subject", |s| s.text("subject")).unwrap_or_else(|| settings.stream.clone());
    check_names(&settings).into_iter().for_each(|(key, what)| s.problem(key, what));
    let user = s.optional("user", |s| s.text("user"));
    let password = s.optional("password", |s| s.text("password"));
    let token = s.optional("token", |s| s.text("token"));
    settings.credentials = match (user, password, token) {
        (None, None, None) => Credentials::None,
        (Some(user), Some(password), None) => Credentials::Password(user, Secret::new(password)),
        (None, None, Some(token)) => Credentials::Token(Secret::new(token)),
        _ => {
            s.problem("user", "must be there together with password, and without token");
            Credentials::None
        }
    };
    if let Some(files) = s.optional("trusted-certificates", |s| s.texts("trusted-certificates")) {
        settings.trusted_certificates = files;
    }
    if let Some(create) = s.optional("create", |s| s.flag("create")) {
        settings.create = create;
    }
    if let Some(number) = s.optional("partitions", |s| s.integer("partitions", 1..=PARTITIONS_MAX)) {
        settings.partitions = number as usize;
    }
    if let Some(number) = s.optional("replicas", |s| s.integer("replicas", 1..=5)) {
        settings.replicas = number as usize;
    }
    let day = Duration::from_secs(24 * 3600);
    let window = s.optional("deduplication-window", |s| {
        s.duration("deduplication-window", Duration::from_millis(100)..=day)
    });
    settings.deduplication_window = window.unwrap_or(settings.deduplication_window);
    if role == Role::Source {
        read_source(s, &mut settings);
    }
    Arc::new(settings)
}

/// What only a source has.
fn read_source(s: &mut Section<'_>, settings: &mut Settings) {
    if let Some(window) = s.optional("window", |s| s.integer("window", 1..=100_000)) {
        settings.window = window as usize;
    }
    let hour = Duration::from_secs(3600);
    let lease = s.optional("owner-lease", |s| s.duration("owner-lease", Duration::from_millis(500)..=hour));
    settings.owner_lease = lease.unwrap_or(settings.owner_lease);
    let release =
        s.optional("release-after", |s| s.duration("release-after", Duration::from_millis(50)..=hour));
    settings.release_after = release.unwrap_or(settings.release_after);
    let drain = s.optional("drain", |s| s.duration("drain", Duration::ZERO..=hour));
    settings.drain = drain.unwrap_or(settings.drain);
    let choices = [("serial", Ungrouped::Serial), ("unordered", Ungrouped::Unordered)];
    if let Some(ungrouped) = s.optional("ungrouped", |s| s.one_of("ungrouped", &choices)) {
        settings.ungrouped = ungrouped;
    }
}

/// What is wrong with the names, by key.
fn check_names(settings: &Settings) -> Vec<(&'static str, &'static str)> {
    let plain = |name: &str, also: &str| {
        !name.is_empty()
            && name.len() <= 128
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c) || also.contains(c))
    };
    let mut problems = Vec::new();
    if !plain(&settings.stream, "") {
        problems.push(("stream", "must be a name of letters, digits, - and _"));
    } else if !plain(&settings.subject, ".") || settings.subject.split('.').any(str::is_empty) {
        problems.push(("subject", "must be words of letters, digits, - and _, with dots between"));
    }
    problems
}

/// `nats://[user:password@]host:port/STREAM`, with `?subject=` if it is not that of the stream. A URL is often typed, and says nothing of how many partitions there should be: nothing
/// is made for it.
pub(super) fn from_url(url: &str) -> Result<Arc<dyn Broker>, String> {
    const RIGHT: &str =
        "nats://host:4222/STREAM would be right, with ?subject=… where it is not the name of the stream";
    let (server, query) = url.split_once('?').unwrap_or((url, ""));
    let (scheme, rest) = server.split_once("://").ok_or(RIGHT)?;
    let (authority, stream) = rest.split_once('/').ok_or(RIGHT)?;
    let mut settings = Settings {
        url: format!("{scheme}://{authority}"),
        stream: stream.to_owned(),
        subject: stream.to_owned(),
        create: false,
        ..Settings::default()
    };
    for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        match key {
            "subject" => settings.subject = value.to_owned(),
            _ => return Err(format!("there is no {key:?}; {RIGHT}")),
        }
    }
    match check_names(&settings).first() {
        Some((key, what)) => Err(format!("the {key} {what}; {RIGHT}")),
        None => Ok(Arc::new(settings)),
    }
}

// ── what is at the server ─────────────────────────────────────────────────────────────────────────────────────────────

/// Why something could not be opened.
enum Failure {
    /// Perhaps later.
    Absent(String),
    /// Somebody has to do something.
    Wrong(String),
}

impl From<Failure> for SourceError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Absent(what) => SourceError::Unavailable(what),
            Failure::Wrong(what) => SourceError::Broken(what),
        }
    }
}

impl From<Failure> for SinkError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Absent(what) => SinkError::Unavailable(what),
            Failure::Wrong(what) => SinkError::Broken(what),
        }
    }
}

/// What the server has refused lately. It says so beside the question, which is never answered: without this, a permission that is missing looks like a server that is away.
#[derive(Clone, Default)]
struct Refusals(Arc<Mutex<Option<(Instant, String)>>>);

impl Refusals {
    fn note(&self, said: String) {
        // It speaks of other things beside the questions as well, which are over with their connection.
        if !said.to_ascii_lowercase().contains("permissions violation") {
            return;
        }
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), said));
    }

    /// What it has refused while a question could have waited for its answer.
    fn lately(&self) -> Option<String> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, said) = last.as_ref().filter(|(at, _)| at.elapsed() < 2 * TIMEOUT)?;
        Some(said.trim_matches('\'').to_owned())
    }

    /// Silence in other words, if it was none.
    fn explain(&self, failure: Failure) -> Failure {
        match (failure, self.lately()) {
            (Failure::Absent(what), Some(said)) => {
                Failure::Wrong(format!("{what}: the server says: {said}: give the user the permission"))
            }
            (failure, _) => failure,
        }
    }
}

impl Settings {
    /// The stream of dead letters.
    fn dead(&self) -> String {
        format!("{}-dead", self.stream)
    }

    /// The stream of what could not be read.
    fn quarantine(&self) -> String {
        format!("{}-quarantine", self.stream)
    }

    /// The bucket of leases.
    fn owners(&self) -> String {
        format!("{}-owners", self.stream)
    }

    fn partition_subject(&self, number: usize) -> String {
        format!("{}.{number}", self.subject)
    }

    /// The stream of a partition.
    fn partition_stream(&self, number: usize) -> String {
        format!("{}-{number}", self.stream)
    }

    /// What the stream of a partition says about itself, so that one that is missing is noticed.
    fn description(&self, number: usize, of: usize) -> String {
        format!("{}: partition {number} of {of}", self.stream)
    }

    fn partition_config(&self, number: usize) -> stream::Config {
        stream::Config {
            name: self.partition_stream(number),
            description: Some(self.description(number, self.partitions)),
            subjects: vec![self.partition_subject(number)],
            retention: RetentionPolicy::WorkQueue,
            // A full queue refuses; it does not forget.
            discard: DiscardPolicy::New,
            storage: StorageType::File,
            num_replicas: self.replicas,
            duplicate_window: self.deduplication_window,
            ..stream::Config::default()
        }
    }

    /// A stream for what came to rest.
    fn resting_config(&self, name: String, word: &str) -> stream::Config {
        stream::Config {
            name,
            subjects: vec![format!("{}.{word}", self.subject)],
            retention: RetentionPolicy::Limits,
            discard: DiscardPolicy::New,
            storage: StorageType::File,
            num_replicas: self.replicas,
            ..stream::Config::default()
        }
    }

    async fn connect(&self, name: &str) -> Result<(jetstream::Context, Refusals), Failure> {
        let refusals = Refusals::default();
        let noting = refusals.clone();
        let mut options = ConnectOptions::new()
            .event_callback(move |event| {
                if let Event::ServerError(ServerError::Other(said)) = event {
                    noting.note(said);
                }
                std::future::ready(())
            })
            .name(format!("laneway {name}"))
            .connection_timeout(TIMEOUT)
            .request_timeout(Some(TIMEOUT))
            .ping_interval(Duration::from_secs(5))
            // A client that gives up would have to be made again; one that tries too often is a burden.
            .reconnect_delay_callback(|attempts| {
                Duration::from_millis(100).saturating_mul(attempts.min(50) as u32)
            });
        options = match &self.credentials {
            Credentials::None => options,
            Credentials::Password(user, password) => {
                options.user_and_password(user.clone(), password.expose().to_owned())
            }
            Credentials::Token(token) => options.token(token.expose().to_owned()),
        };
        for file in &self.trusted_certificates {
            options = options.add_root_certificates(file.into());
        }
        let servers: Vec<&str> = self.url.split(',').map(str::trim).collect();
        let client = options.connect(servers).await.map_err(|error| {
            let place = without_user(&self.url);
            match error.kind() {
                ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
                    Failure::Wrong(format!("{place} does not let us in: check user and password, or token"))
                }
                ConnectErrorKind::ServerParse => {
                    Failure::Wrong(format!("{place} is no address of a NATS server"))
                }
                _ => Failure::Absent(format!("cannot connect to {place}: {error}")),
            }
        })?;
        let mut context = jetstream::new(client);
        context.set_timeout(TIMEOUT);
        Ok((context, refusals))
    }

    /// Finds the streams of the partitions, or makes them. There are as many as follow each other from 0 on, whatever the configuration says.
    async fn partitions(&self, context: &jetstream::Context) -> Result<Vec<stream::Stream>, Failure> {
        if find(context, &self.partition_stream(0)).await?.is_none() {
            // The first one last: where it is, all of them are. What may not make any looks for that one alone, to say that it is missing.
            let made = if self.create { self.partitions } else { 1 };
            for number in (0..made).rev() {
                let config = || self.partition_config(number);
                self.find_or_make(context, &self.partition_stream(number), config).await?;
            }
        }
        let found = self.find_partitions(context).await?;
        for (number, stream) in found.iter().enumerate() {
            let config = &stream.cached_info().config;
            self.check_partition(number, found.len(), config).map_err(Failure::Wrong)?;
        }
        Ok(found)
    }

    async fn find_partitions(&self, context: &jetstream::Context) -> Result<Vec<stream::Stream>, Failure> {
        let mut found = Vec::new();
        while (found.len() as u64) < PARTITIONS_MAX
            && let Some(stream) = find(context, &self.partition_stream(found.len())).await?
        {
            found.push(stream);
        }
        Ok(found)
    }

    /// What is wrong with the stream of a partition, one of so many.
    fn check_partition(&self, number: usize, of: usize, config: &stream::Config) -> Result<(), String> {
        let (name, subject) = (self.partition_stream(number), self.partition_subject(number));
        // One that somebody has made by hand may say anything, or nothing.
        let made = self.description(number, 0);
        let told = config.description.as_deref().unwrap_or_default().strip_prefix(made.trim_end_matches('0'));
        if let Some(told) = told.and_then(|told| told.parse::<usize>().ok()).filter(|told| *told != of) {
            return Err(format!(
                "the stream {name} is one of {told} partitions, but {of} follow each other from {} on: one of them is missing, or some were made with another number",
                self.partition_stream(0)
            ));
        }
        if config.retention != RetentionPolicy::WorkQueue {
            return Err(format!(
                "the stream {name} keeps messages by {:?}; it must be a work queue, so that what is acknowledged is gone: `nats stream edit` cannot change that, make another one",
                config.retention
            ));
        }
        match config.subjects[..] == [&*subject] {
            true => Ok(()),
            false => Err(format!(
                "the stream {name} has the subjects {}; it must have {subject} and no other",
                config.subjects.join(", ")
            )),
        }
    }

    async fn find_or_make(
        &self,
        context: &jetstream::Context,
        name: &str,
        config: impl FnOnce() -> stream::Config,
    ) -> Result<stream::Stream, Failure> {
        if let Some(stream) = find(context, name).await? {
            return Ok(stream);
        }
        if !self.create {
            let mend = "a source or a sink with create = true makes it";
            return Err(Failure::Wrong(format!("there is no stream {name}: {mend}")));
        }
        context.create_stream(config()).await.map_err(|error| {
            Failure::Wrong(format!("the stream {name} is not there and cannot be made: {error}"))
        })
    }

    /// Finds a bucket of keys and values, or makes it: as a stream, which is what a bucket is. The client's own way asks for the account first, in words that servers before 2.10 do not know.
    async fn bucket(
        &self,
        context: &jetstream::Context,
        bucket: &str,
        description: &str,
    ) -> Result<Store, Failure> {
        let config = || stream::Config {
            name: format!("KV_{bucket}"),
            description: Some(description.to_owned()),
            subjects: vec![format!("$KV.{bucket}.>")],
            max_messages_per_subject: 1,
            discard: DiscardPolicy::New,
            allow_rollup: true,
            deny_delete: true,
            num_replicas: self.replicas,
            ..stream::Config::default()
        };
        self.find_or_make(context, &format!("KV_{bucket}"), config).await?;
        let opened = context.get_key_value(bucket).await;
        opened.map_err(|error| Failure::Absent(format!("cannot open the bucket {bucket}: {error}")))
    }
}

async fn find(context: &jetstream::Context, name: &str) -> Result<Option<stream::Stream>, Failure> {
    use jetstream::context::GetStreamErrorKind;
    match context.get_stream(name).await {
        Ok(stream) => Ok(Some(stream)),
        Err(error) => match error.kind() {
            GetStreamErrorKind::JetStream(told)
                if told.error_code() == jetstream::ErrorCode::STREAM_NOT_FOUND =>
            {
                Ok(None)
            }
            GetStreamErrorKind::JetStream(told) => {
                Err(Failure::Wrong(format!("cannot look for the stream {name}: {told}")))
            }
            _ => Err(Failure::Absent(format!("cannot look for the stream {name}: {error}"))),
        },
    }
}

/// The number of a message among all partitions: it grows along a partition, and no other message has it.
fn number_of(sequence: u64, partition: usize, partitions: usize) -> u64 {
    sequence * partitions as u64 + partition as u64
}

/// The partition of a group. The same for every version and every machine, so it is written down here: FNV-1a, 64 bits.
fn partition_of(group: Option<&str>, partitions: usize) -> usize {
    let Some(group) = group else { return 0 };
    let hash = group.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash % partitions as u64) as usize
}

impl Broker for Settings {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn open_source(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>> {
        async move { Ok(Arc::new(NatsSource::open(name, self.clone()).await?) as Arc<dyn Source>) }.boxed()
    }

    fn open_sink(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>> {
        async move { Ok(Arc::new(sink::NatsSink::open(name, self.clone()).await?) as Arc<dyn Sink>) }.boxed()
    }

    fn examine<'a>(&'a self, examination: &'a Examination) -> BoxFuture<'a, Vec<Finding>> {
        self.examined(examination).boxed()
    }
}

impl Settings {
    async fn examined(&self, examination: &Examination) -> Vec<Finding> {
        let (context, refusals) = match self.connect("doctor").await {
            Ok(connected) => connected,
            Err(Failure::Absent(what)) => {
                return vec![Finding::error(what, "start the server, or correct url")];
            }
            Err(Failure::Wrong(what)) => {
                return vec![Finding::error(what, "correct url, user and password, or token")];
            }
        };
        let info = context.client().server_info();
        let mut found =
            vec![Finding::fine(format!("{} answers, version {}", without_user(&self.url), info.version))];
        if info.max_payload < MESSAGE_BYTES_MAX {
            found.push(Finding::warning(
                format!(
                    "the server takes messages of {} bytes; a message may have {MESSAGE_BYTES_MAX}",
                    info.max_payload
                ),
                format!(
                    "max_payload: {MESSAGE_BYTES_MAX} in the server's configuration, or send smaller ones"
                ),
            ));
        }
        let asked = context.client().request("$JS.API.INFO", Default::default()).await;
        let refused = |answer: &async_nats::Message| {
            let answer: serde_json::Value = serde_json::from_slice(&answer.payload).unwrap_or_default();
            answer["error"]["description"].as_str().map(str::to_owned)
        };
        let trouble = asked.map_or_else(|error| Some(error.to_string()), |answer| refused(&answer));
        if let (Some(_), Some(said)) = (&trouble, refusals.lately()) {
            found.push(Finding::error(format!("the server says: {said}"), "give the user the permission"));
            return found;
        }
        if let Some(trouble) = trouble {
            found.push(Finding::error(
                format!("JetStream does not answer: {trouble}"),
                "start the server with -js, or allow JetStream for this account",
            ));
            return found;
        }
        self.examine_streams(&context, examination, &mut found).await;
        if examination.role == Role::Source {
            self.examine_aside(&context, &mut found).await;
            found.push(Finding::fine(format!(
                "an instance that is cut off is followed after {:?} (`owner-lease`); a call that it has under way may end {:?} later (the attempt's timeout), which a target tells by the fence",
                self.owner_lease, examination.attempt
            )));
        }
        if let Some(said) = refusals.lately() {
            found.push(Finding::error(format!("the server says: {said}"), "give the user the permission"));
        }
        found
    }

    /// What a source needs beside its partitions: without any of it, it does not open.
    async fn examine_aside(&self, context: &jetstream::Context, found: &mut Vec<Finding>) {
        let bucket = format!("KV_{}", self.owners());
        for (name, what) in [
            (self.dead(), "the stream of dead letters"),
            (self.quarantine(), "the stream of what is in quarantine"),
            (bucket, "the bucket of leases, as a stream"),
        ] {
            found.push(match find(context, &name).await {
                Ok(Some(_)) => Finding::fine(format!("{name} is there, {what}")),
                Ok(None) if self.create => Finding::fine(format!("{name} will be made, {what}")),
                Ok(None) => Finding::error(
                    format!("there is no {name}, {what}, and `create = false`: the source cannot be opened"),
                    "make it, or set create = true",
                ),
                Err(Failure::Absent(what) | Failure::Wrong(what)) => {
                    Finding::error(what, "look at the server's log, and at what this user may do")
                }
            });
        }
    }

    async fn examine_streams(
        &self,
        context: &jetstream::Context,
        examination: &Examination,
        found: &mut Vec<Finding>,
    ) {
        let partitions = match self.find_partitions(context).await {
            Ok(partitions) => partitions,
            Err(Failure::Absent(what) | Failure::Wrong(what)) => {
                found.push(Finding::error(what, "look at the server's log, and at what this user may do"));
                return;
            }
        };
        if partitions.is_empty() {
            let (name, subject) = (self.partition_stream(0), self.partition_subject(0));
            if let Ok(other) = context.stream_by_subject(&subject).await {
                found.push(Finding::error(
                    format!("the subject {subject} belongs to the stream {other}"),
                    "take another subject, or delete that stream",
                ));
                return;
            }
            found.push(match self.create {
                true => Finding::fine(format!("there is no stream {name}; it will be made, and the others")),
                false => Finding::error(
                    format!("there is no stream {name}"),
                    "make it, and one for each other partition, or set create = true",
                ),
            });
            return;
        }
        let number = partitions.len();
        match number == self.partitions {
            true => found.push(Finding::fine(format!("{number} partitions, each read by one instance"))),
            false => found.push(Finding::warning(
                format!("there are {number} partitions, the configuration says {}", self.partitions),
                format!(
                    "partitions = {number}: those that are there are not changed, since groups would move"
                ),
            )),
        }
        for (number, stream) in partitions.iter().enumerate() {
            if let Err(what) = self.check_partition(number, partitions.len(), &stream.cached_info().config) {
                found.push(Finding::error(what, "bring back what is missing, or take another name"));
            }
        }
        let any = |is: &dyn Fn(&stream::Config) -> bool| {
            partitions.iter().any(|stream| is(&stream.cached_info().config))
        };
        if any(&|config| config.storage != StorageType::File) {
            found.push(Finding::warning(
                "a stream is in memory: it is lost when its server ends",
                "storage: file",
            ));
        }
        let forgets = |config: &stream::Config| {
            config.discard != DiscardPolicy::New && (config.max_messages > 0 || config.max_bytes > 0)
        };
        if any(&forgets) {
            found.push(Finding::error("a full stream forgets its oldest messages", "discard: new"));
        }
        // All messages of a partition have one subject.
        let forgets_by_subject =
            |config: &stream::Config| config.max_messages_per_subject > 0 && !config.discard_new_per_subject;
        if any(&forgets_by_subject) {
            found.push(Finding::error(
                "a stream keeps only so many messages of a subject, of which it has one, and forgets the oldest, whatever `discard` says",
                "max_msgs_per_subject: -1",
            ));
        }
        if any(&|config| !config.max_age.is_zero()) {
            found.push(Finding::warning("messages are forgotten after a time, read or not", "max_age: 0"));
        }
        if any(&|config| config.num_replicas == 1) {
            found.push(Finding::warning(
                "one server has the only copy; an acknowledgement is on its disk two minutes later, unless sync_interval says otherwise",
                "jetstream { sync_interval: always } in the server's configuration, or replicas = 3 in a cluster",
            ));
        }
        if examination.role == Role::Source && self.drain < examination.attempt {
            found.push(Finding::warning(
                format!(
                    "drain ({:?}) is shorter than an attempt may take ({:?}): when a partition goes to another instance, a group may run in two places for the difference",
                    self.drain, examination.attempt
                ),
                "a longer drain, or let the target refuse late calls by the fence",
            ));
        }
        if examination.role == Role::Source && self.owner_lease < Duration::from_secs(3) {
            found.push(Finding::warning(
                format!(
                    "a partition changes hands when its instance is not heard of for {:?}",
                    self.owner_lease
                ),
                "owner-lease = 10 s: a short pause of the network should not move partitions",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_server_stream_and_subject() {
        let parsed = from_url("nats://me:hush@host:1/orders?subject=a.b").unwrap();
        let shown = format!("{parsed:?}");
        assert!(
            shown.contains("\"nats://host:1\"") && shown.contains("\"a.b\"") && !shown.contains("hush"),
            "{shown}"
        );
        for bad in [
            "nats://host",
            "nats://host/",
            "nats://host/a b",
            "nats://host/a?x=1",
            "nats://host/a?subject=a..b",
        ] {
            assert!(from_url(bad).unwrap_err().contains("would be right"), "{bad}");
        }
    }

    #[test]
    fn a_group_keeps_its_partition_for_ever() {
        let of = |group: &str| partition_of(Some(group), 8);
        // Written down: a change would send the next message of a group past those that wait in its old partition.
        assert_eq!(["a", "b", "order-7", "é"].map(of), [4, 5, 3, 1]);
        assert_eq!(partition_of(None, 8), 0);
    }
}
