//! Connections to RabbitMQ: how they are made, what they find, and publishing over them with confirmation.
//!
//! `source.rs` and `sink.rs` ask for connections; an examination looks at the same things without changing any.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::maybe_done;
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::runtime::default_runtime;
use lapin::tcp::OwnedTLSConfig;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, Error, ErrorKind, ExchangeKind,
};
use rustls::CertificateError;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::{AMQP_NAME_BYTES_MAX, Settings, long_name};
use crate::mediator::connect::certificates;
use crate::source::SourceError;
use crate::source::broker::{Examination, Finding, Role};
use crate::source::pushed::ANSWER;

/// Waits for an answer, and says what was asked if there is none.
pub(super) async fn answer<T>(
    settings: &Settings,
    what: &str,
    asked: impl Future<Output = Result<T, Error>>,
) -> Result<T, SourceError> {
    match timeout(ANSWER, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(explain(settings, what, &error)),
        Err(_) => {
            Err(SourceError::Unavailable(format!("{} did not {what} within {ANSWER:?}", settings.place())))
        }
    }
}

/// An error in words, with what to do about it where somebody has to.
fn explain(settings: &Settings, what: &str, error: &Error) -> SourceError {
    let place = settings.place();
    let ErrorKind::ProtocolError(said) = error.kind() else {
        let advice = match is_distrust(error) {
            true => ": name the file with the certificate of its issuer in `trusted-certificates`",
            false => "",
        };
        return SourceError::Unavailable(format!("cannot {what} at {place}: {error}{advice}"));
    };
    let text = said.get_message();
    match said.kind() {
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => SourceError::Broken(format!(
            "{place} refuses to {what}: {text}: mend the user or the password in `url`, or give the user the permission"
        )),
        AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => SourceError::Broken(format!(
            "{place} refuses to {what}: {text}: mend the virtual host, the last part of `url`"
        )),
        AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND | AMQPSoftError::PRECONDITIONFAILED) => {
            SourceError::Broken(format!("cannot {what} at {place}: {text}"))
        }
        _ => SourceError::Unavailable(format!("cannot {what} at {place}: {text}")),
    }
}

/// Whether the broker's certificate is of nobody that is trusted here.
fn is_distrust(error: &Error) -> bool {
    let ErrorKind::IOError(error) = error.kind() else { return false };
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    matches!(cause, Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)))
}

/// Whether what was asked for is not there.
fn is_missing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(said)
        if matches!(said.kind(), AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND)))
}

/// Whether the broker has sent a frame that is longer than was agreed on. It does so with headers, which cannot be cut.
pub(super) fn is_long_frame(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(said)
        if matches!(said.kind(), AMQPErrorKind::Hard(AMQPHardError::FRAMEERROR)))
}

/// Whether nothing was heard of the broker for two heartbeats.
pub(super) fn is_silence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::MissingHeartbeatError)
}

/// Sends several things over a channel, in this order, and waits until all have left. The client takes each in when it is first polled, and writes what it
/// has in one go; to wait for each would cost a system call and two wake-ups each.
pub(super) async fn all_sent<T>(
    sending: impl Iterator<Item = impl Future<Output = Result<T, Error>>>,
) -> Result<Vec<T>, Error> {
    let mut all: Vec<_> = sending.map(|one| Box::pin(maybe_done(one))).collect();
    poll_fn(|context| {
        for one in &mut all {
            let _ = one.as_mut().poll(context);
        }
        Poll::Ready(())
    })
    .await;
    let mut outputs = Vec::with_capacity(all.len());
    for mut one in all {
        one.as_mut().await;
        outputs.push(one.as_mut().take_output().expect("it was awaited")?);
    }
    Ok(outputs)
}

/// Connects. Frames are as large as the URL says, else as said here, else as the broker has them.
pub(super) async fn connect(
    settings: &Settings,
    role: &str,
    frame_bytes_max: Option<u32>,
) -> Result<Connection, SourceError> {
    if let Some((key, name)) = settings.long_name() {
        return Err(SourceError::Broken(format!("`{key}` {}", long_name(&name))));
    }
    let mut uri = settings.uri().map_err(SourceError::Broken)?;
    uri.query.frame_max = uri.query.frame_max.or(frame_bytes_max);
    let properties = ConnectionProperties::default()
        .with_connection_name(format!("laneway {role} {}", settings.queue).into());
    let tls = OwnedTLSConfig { identity: None, cert_chain: trusted(settings)? };
    let runtime = default_runtime().map_err(|error| explain(settings, "connect", &error))?;
    answer(settings, "connect", Connection::connect_uri_with_config(uri, properties, tls, runtime)).await
}

/// The certificates that are trusted beside those that browsers trust, as they are in their files now: a new one counts from the next connection on.
fn trusted(settings: &Settings) -> Result<Option<String>, SourceError> {
    let mut all = String::new();
    for file in &settings.trusted_certificates {
        let text = std::fs::read_to_string(file).map_err(|error| error.to_string());
        let usable = text.and_then(|text| match certificates(text.as_bytes()) {
            Ok(_) => Ok(text),
            Err(problem) => Err(problem.to_string()),
        });
        let text = usable.map_err(|problem| {
            SourceError::Broken(format!("the certificates in {file:?} cannot be trusted: {problem}"))
        })?;
        all.push_str(&text);
        all.push('\n');
    }
    Ok((!all.is_empty()).then_some(all))
}

/// As good as no limit of deliveries. There should be none, since every instance that goes counts as one for everything that it had in hand. But RabbitMQ
/// has one of 20 by default from 4.0 on, and before that takes -1, which now means none, for a limit that is reached at once.
const DELIVERIES_MAX: i64 = 1_000_000_000;

/// The argument that makes a queue a replicated one.
fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments
}

/// What kind of queue is made: replicated, served to one consumer at a time where order matters, without a limit that could be reached.
fn arguments(ordered: bool) -> FieldTable {
    let mut arguments = quorum();
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(DELIVERIES_MAX));
    if ordered {
        arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    }
    arguments
}

/// What a queue holds, and how many consumers it has. None if it is not there.
pub(super) async fn look_at(
    settings: &Settings,
    connection: &Connection,
    queue: &str,
) -> Result<Option<(u32, u32)>, SourceError> {
    // A queue that is not there costs the channel, so each look has one of its own.
    let channel = answer(settings, "open a channel", connection.create_channel()).await?;
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let asked = channel.queue_declare(queue.into(), options, FieldTable::default());
    let found = match timeout(ANSWER, asked).await {
        Ok(Err(error)) if is_missing(&error) => return Ok(None),
        Ok(Err(error)) => return Err(explain(settings, &format!("find the queue {queue}"), &error)),
        Ok(Ok(found)) => found,
        Err(_) => return Err(SourceError::Unavailable(format!("{} does not answer", settings.place()))),
    };
    let _ = timeout(ANSWER, channel.close(200, "looked".into())).await;
    Ok(Some((found.message_count(), found.consumer_count())))
}

/// Makes a queue.
async fn make(
    settings: &Settings,
    connection: &Connection,
    queue: &str,
    ordered: bool,
) -> Result<(), SourceError> {
    let channel = answer(settings, "open a channel", connection.create_channel()).await?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let asked = channel.queue_declare(queue.into(), options, arguments(ordered));
    answer(settings, &format!("make the queue {queue}"), asked).await?;
    let _ = timeout(ANSWER, channel.close(200, "made".into())).await;
    Ok(())
}

/// Sees that queues and exchange are there, and makes them if the settings say so.
pub(super) async fn prepare(
    settings: &Settings,
    connection: &Connection,
    role: Role,
) -> Result<(), SourceError> {
    let mut queues: Vec<(String, bool)> = settings.queues().into_iter().map(|queue| (queue, true)).collect();
    if role == Role::Source {
        if let Some(stranded) = stranded(settings, connection).await? {
            return Err(SourceError::Broken(stranded));
        }
        queues.extend([&settings.dead_letters, &settings.quarantine].map(|queue| (queue.clone(), false)));
    }
    for (queue, ordered) in queues {
        if look_at(settings, connection, &queue).await?.is_some() {
            continue;
        }
        if !settings.declare {
            return Err(SourceError::Broken(format!(
                "there is no queue {queue:?} at {}: make it, of the type quorum{}, or let `declare = true` do so",
                settings.place(),
                if ordered { " and with a single active consumer" } else { "" }
            )));
        }
        make(settings, connection, &queue, ordered).await?;
    }
    match settings.partitions > 1 && settings.declare {
        true => bind(settings, connection).await,
        false => Ok(()),
    }
}

/// What is wrong with the number of partitions, if there were more of them: publishers would still fill those that nobody reads. A single queue has no number, and one that is called like a
/// partition may be somebody else's; two of them are not.
async fn stranded(settings: &Settings, connection: &Connection) -> Result<Option<String>, SourceError> {
    let first = if settings.partitions == 1 { 0 } else { settings.partitions };
    let mut found = None;
    for queue in (first..=first.max(1)).map(|number| settings.partition(number)) {
        // What AMQP has no room for is not there.
        if queue.len() > AMQP_NAME_BYTES_MAX {
            return Ok(None);
        }
        match look_at(settings, connection, &queue).await {
            Ok(Some(_)) => found = Some(queue),
            // Who may not see it has not made it.
            Ok(None) | Err(SourceError::Broken(_)) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(found.map(|queue| too_many(settings, &queue)))
}

fn too_many(settings: &Settings, queue: &str) -> String {
    format!(
        "there is a queue {queue:?} at {}, but `partitions` is {}: nobody would read what is in it; set `partitions` to as many as there are, or empty those that are too many and delete them",
        settings.place(),
        settings.partitions
    )
}

/// Makes the exchange in front of the partitions. What is there already is left as it is.
async fn bind(settings: &Settings, connection: &Connection) -> Result<(), SourceError> {
    let channel = answer(settings, "open a channel", connection.create_channel()).await?;
    let kind = ExchangeKind::Custom("x-consistent-hash".to_owned());
    let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let exchange: ShortString = settings.exchange.as_str().into();
    let made = channel.exchange_declare(exchange.clone(), kind, options, FieldTable::default());
    answer(settings, "make the exchange (is the plug-in rabbitmq_consistent_hash_exchange enabled?)", made)
        .await?;
    for queue in settings.queues() {
        // The routing key of a binding is its weight.
        let bound = channel.queue_bind(
            queue.as_str().into(),
            exchange.clone(),
            "10".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        );
        answer(settings, "bind a queue", bound).await?;
    }
    let _ = timeout(ANSWER, channel.close(200, "bound".into())).await;
    Ok(())
}

/// Where a message is published.
pub(super) enum To<'a> {
    /// The queue, or the exchange in front of its partitions.
    Queue {
        /// What decides about the partition.
        group: &'a str,
    },
    /// A queue by its name.
    Named(&'a str),
}

/// A message on its way: where to, with what, and what it says.
pub(super) type Publishing<'a> = (To<'a>, BasicProperties, Arc<[u8]>);

/// A connection to publish over, made when it is needed and anew when it was lost. RabbitMQ slows down connections that publish, so it is
/// never one that is read from.
pub(super) struct Publisher {
    pub(super) settings: Arc<Settings>,
    link: Mutex<Option<Arc<Link>>>,
}

pub(super) struct Link {
    pub(super) connection: Connection,
    channel: Channel,
}

impl Publisher {
    pub(super) fn new(settings: Arc<Settings>) -> Self {
        Publisher { settings, link: Mutex::default() }
    }

    /// The connection.
    pub(super) async fn link(&self) -> Result<Arc<Link>, SourceError> {
        let mut link = self.link.lock().await;
        if let Some(link) = link.as_ref()
            && link.connection.status().connected()
            && link.channel.status().connected()
        {
            return Ok(Arc::clone(link));
        }
        *link = None;
        let connection = connect(&self.settings, "publisher", None).await?;
        let channel = answer(&self.settings, "open a channel", connection.create_channel()).await?;
        let confirm = channel.confirm_select(ConfirmSelectOptions::default());
        answer(&self.settings, "confirm", confirm).await?;
        Ok(Arc::clone(link.insert(Arc::new(Link { connection, channel }))))
    }

    /// Publishes all of these at once, and waits until the broker has every one on disk.
    pub(super) async fn publish(&self, messages: Vec<Publishing<'_>>) -> Result<(), SourceError> {
        self.publish_each(messages).await?.into_iter().collect()
    }

    /// Publishes all of these at once, and waits until the broker has each of them on disk, or has said what is wrong with it.
    pub(super) async fn publish_each(
        &self,
        messages: Vec<Publishing<'_>>,
    ) -> Result<Vec<Result<(), SourceError>>, SourceError> {
        let settings = &*self.settings;
        let link = self.link().await?;
        let count = messages.len();
        let publish = |(to, properties, text): Publishing<'_>| {
            let (exchange, key): (ShortString, ShortString) = match to {
                To::Named(queue) => ("".into(), queue.into()),
                To::Queue { .. } if settings.partitions == 1 => ("".into(), settings.queue.as_str().into()),
                To::Queue { group } => (settings.exchange.as_str().into(), group.into()),
            };
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let channel = &link.channel;
            async move { channel.basic_publish(exchange, key, options, &text, properties).await }
        };
        let published = answer(settings, "publish", all_sent(messages.into_iter().map(publish))).await?;
        let mut answers = Vec::with_capacity(count);
        for confirmation in published {
            match answer(settings, "confirm a message", confirmation).await {
                Ok(confirmation) => answers.push(confirmed(settings, confirmation)),
                // Nor will it say anything of those behind it.
                Err(error) => {
                    answers.resize(count, Err(error));
                    break;
                }
            }
        }
        Ok(answers)
    }

    pub(super) async fn close(&self) {
        if let Some(link) = self.link.lock().await.take() {
            let _ = timeout(ANSWER, link.connection.close(200, "closed".into())).await;
        }
    }
}

/// What a confirmation means.
fn confirmed(settings: &Settings, confirmation: Confirmation) -> Result<(), SourceError> {
    let place = settings.place();
    match confirmation {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned)) => {
            Err(SourceError::Broken(format!(
                "{place} has no queue for a message to exchange {:?}, routing key {:?}",
                returned.delivery.exchange.as_str(),
                returned.delivery.routing_key.as_str()
            )))
        }
        Confirmation::Nack(None) | Confirmation::NotRequested => {
            Err(SourceError::Unavailable(format!("{place} did not take a message: is its queue full?")))
        }
    }
}

// ── examination ───────────────────────────────────────────────────────────────────────────────────────────────────────

/// What an examination finds. Everything is asked passively: nothing is made.
pub(super) async fn examine(settings: &Settings, examination: &Examination) -> Vec<Finding> {
    let connection = match connect(settings, "doctor", None).await {
        Ok(connection) => connection,
        Err(error) => {
            return vec![Finding::error(
                error.to_string(),
                "see that RabbitMQ runs there, and mend `url` or what the message names",
            )];
        }
    };
    let mut findings = vec![Finding::fine(format!("{} answers", settings.place()))];
    for queue in settings.queues() {
        findings.extend(examine_queue(settings, &connection, &queue, examination.role).await);
    }
    if settings.partitions > 1 {
        findings.push(examine_exchange(settings, &connection).await);
    }
    if examination.role == Role::Source {
        if let Ok(Some(stranded)) = stranded(settings, &connection).await {
            findings.push(Finding::error(
                stranded,
                "`laneway doctor` with the old number of `partitions` shows what waits in each",
            ));
        }
        for queue in [&settings.dead_letters, &settings.quarantine] {
            findings.push(match look_at(settings, &connection, queue).await {
                Ok(Some((count, _))) => Finding::fine(format!("queue {queue}: {count} messages")),
                Ok(None) => missing(settings, queue),
                Err(error) => Finding::error(error.to_string(), "give the user the permission to see it"),
            });
        }
        if settings.heartbeat * 2 > examination.lease {
            findings.push(Finding::warning(
                format!(
                    "an instance that is cut off is noticed after two heartbeats, {:?}, and the lease is {:?}",
                    settings.heartbeat * 2,
                    examination.lease
                ),
                "a `heartbeat` of at most half the `lease`",
            ));
        }
    }
    let _ = timeout(ANSWER, connection.close(200, "examined".into())).await;
    findings
}

fn missing(settings: &Settings, queue: &str) -> Finding {
    match settings.declare {
        true => Finding::warning(
            format!("queue {queue} is not there yet"),
            "nothing: it is made when the source is opened (`declare = true`)",
        ),
        false => Finding::error(
            format!("queue {queue} is not there, and `declare = false`"),
            "make it, of the type quorum and with x-single-active-consumer, or `declare = true`",
        ),
    }
}

async fn examine_queue(
    settings: &Settings,
    connection: &Connection,
    queue: &str,
    role: Role,
) -> Vec<Finding> {
    let (count, consumers) = match look_at(settings, connection, queue).await {
        Ok(Some(found)) => found,
        Ok(None) => return vec![missing(settings, queue)],
        Err(error) => {
            return vec![Finding::error(error.to_string(), "give the user the permission to see it")];
        }
    };
    let mut findings =
        vec![Finding::fine(format!("queue {queue}: {count} messages wait, {consumers} consumers"))];
    if role == Role::Source {
        findings.push(differences(connection, queue).await);
    }
    findings
}

/// AMQP has no way to ask what a queue is like. But to declare one that is there with other arguments is refused with the first difference, and changes nothing. What policies say
/// cannot be found that way: a limit of deliveries, a length beyond which the oldest go, a time to live.
async fn differences(connection: &Connection, queue: &str) -> Finding {
    let again = "delete it when it is empty and let `declare = true` make it, or make it again by hand";
    let limit = "make it again with an x-delivery-limit of 1000000000; `attempts` of the pool is the limit that counts attempts";
    // Which difference is named first is the broker's choice, so the worst is asked for alone.
    if refusal(connection, queue, quorum()).await.is_some_and(|said| said.contains("x-queue-type")) {
        return Finding::error(
            format!("queue {queue} is not of the type quorum: what goes back loses its place"),
            again,
        );
    }
    let Some(said) = refusal(connection, queue, arguments(true)).await else {
        return Finding::fine(format!(
            "queue {queue}, by its arguments: quorum, single active consumer, no limit of deliveries to speak of (a policy may say otherwise, which AMQP does not tell: `rabbitmqctl list_queues name effective_policy_definition`)"
        ));
    };
    if said.contains("x-single-active-consumer") {
        let what =
            format!("queue {queue} has no single active consumer: two instances would share its groups");
        return Finding::error(what, again);
    }
    if said.contains("x-delivery-limit") && said.contains("current is none") {
        let what = format!(
            "queue {queue} has no limit of deliveries of its own, which means 20 from RabbitMQ 4.0 on: messages that were never tried are dropped after so many instances have gone"
        );
        return Finding::warning(what, limit);
    }
    if said.contains("x-delivery-limit") {
        let what = format!(
            "queue {queue} has a limit of deliveries: messages that were never tried are dropped after so many instances have gone ({said})"
        );
        return Finding::error(what, limit);
    }
    Finding::warning(format!("queue {queue} differs from what is made here: {said}"), again)
}

/// What the broker says against a queue with these arguments. None if it has them.
async fn refusal(connection: &Connection, queue: &str, arguments: FieldTable) -> Option<String> {
    let channel = timeout(ANSWER, connection.create_channel()).await.ok()?.ok()?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    match timeout(ANSWER, channel.queue_declare(queue.into(), options, arguments)).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some("no answer".to_owned()),
    }
}

async fn examine_exchange(settings: &Settings, connection: &Connection) -> Finding {
    let exchange = &settings.exchange;
    let options =
        ExchangeDeclareOptions { passive: true, durable: true, ..ExchangeDeclareOptions::default() };
    let asked = async {
        let channel = connection.create_channel().await?;
        let kind = ExchangeKind::Custom("x-consistent-hash".to_owned());
        channel.exchange_declare(exchange.as_str().into(), kind, options, FieldTable::default()).await
    };
    match timeout(ANSWER, asked).await {
        Ok(Ok(())) => Finding::fine(format!("exchange {exchange} is there")),
        Ok(Err(error)) if is_missing(&error) && settings.declare => Finding::warning(
            format!("exchange {exchange} is not there yet"),
            "nothing: it is made when the source is opened (`declare = true`)",
        ),
        Ok(Err(error)) => Finding::error(
            format!("exchange {exchange}: {error}"),
            "enable the plug-in rabbitmq_consistent_hash_exchange and make an exchange of the type x-consistent-hash",
        ),
        Err(_) => Finding::error(format!("exchange {exchange}: no answer"), "see that RabbitMQ is well"),
    }
}
