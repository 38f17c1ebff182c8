//! What is asked of SQS, one function per question: receives, and batches of deletes, visibility changes and sends.
//!
//! `reader.rs` and `sink.rs` ask; the answers are in our words: a [`Fetched`] for a message, [`Settled`] for a receipt, [`SourceError`] for what failed. SQS takes
//! ten entries per call, so questions of any length are cut up here, and the pieces travel at the same time.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::retry::RetryConfig;
use aws_sdk_sqs::config::timeout::TimeoutConfig;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_sqs::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use aws_sdk_sqs::types::{
    BatchResultErrorEntry, ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry,
    Message as SqsMessage, MessageAttributeValue, MessageSystemAttributeName, QueueAttributeName,
    SendMessageBatchRequestEntry,
};
use aws_smithy_http_client::Builder as HttpBuilder;
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use futures_util::StreamExt;
use tokio::time::Instant;

use super::SqsSettings;
use crate::source::{DeliveryId, Settled, SourceError};

/// Entries per call: what SQS allows.
pub(super) const TOGETHER: usize = 10;

/// Bytes per call, all entries and their attributes together: what SQS allows everywhere.
pub(super) const CALL_BYTES_MAX: usize = 256 * 1024;

/// Calls that one question has under way at a time. More would only wait for each other's connections.
const AT_ONCE: usize = 16;

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);

/// How long one try at a call may take, waiting for messages excepted.
const ANSWER: Duration = Duration::from_secs(10);

/// How often a call is tried, with pauses that grow, before it counts as failed.
const TRIES: u32 = 3;

/// The longest visibility timeout that SQS knows.
const VISIBILITY_MAX: Duration = Duration::from_secs(12 * 3600);

/// No answer is on its way for longer than this, as far as leases are concerned.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

/// The name of the attribute that says why a message is where it is.
pub(super) const REASON: &str = "laneway-reason";

/// Reasons are cut to this length.
const REASON_CHARS_MAX: usize = 500;

/// A message as it was received.
pub(super) struct Fetched {
    pub(super) id: DeliveryId,
    pub(super) receipt: Arc<str>,
    pub(super) message_id: String,
    pub(super) group: Option<Arc<str>>,
    pub(super) text: Arc<[u8]>,
    pub(super) attempt: u32,
    pub(super) attributes: HashMap<String, MessageAttributeValue>,
}

/// A message on its way to a queue.
#[derive(Clone)]
pub(super) struct Letter {
    pub(super) text: String,
    /// For FIFO queues.
    pub(super) group: Option<String>,
    pub(super) deduplication_id: Option<String>,
    pub(super) attributes: HashMap<String, MessageAttributeValue>,
}

impl Letter {
    /// What SQS counts.
    pub(super) fn bytes(&self) -> usize {
        let attribute = |(name, value): (&String, &MessageAttributeValue)| {
            let text = value.string_value().map_or(0, str::len);
            let binary = value.binary_value().map_or(0, |binary| binary.as_ref().len());
            name.len() + value.data_type().len() + text + binary
        };
        self.text.len() + self.attributes.iter().map(attribute).sum::<usize>()
    }

    /// With the reason why it is kept, if there is room for one.
    pub(super) fn because(mut self, reason: &str) -> Self {
        let reason: String = reason.chars().filter(|c| !c.is_control()).take(REASON_CHARS_MAX).collect();
        if self.bytes() + reason.len() + 64 <= CALL_BYTES_MAX && self.attributes.len() < 10 {
            self.attributes.insert(REASON.to_owned(), text_attribute(&reason));
        }
        self
    }
}

/// An attribute with a text; SQS knows no empty ones.
pub(super) fn text_attribute(text: &str) -> MessageAttributeValue {
    let text = if text.is_empty() { "-" } else { text };
    let built = MessageAttributeValue::builder().data_type("String").string_value(text).build();
    built.expect("the type is set")
}

/// What became of a letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// SQS has it.
    Taken {
        /// Its place, in FIFO queues.
        sequence: Option<DeliveryId>,
    },
    /// SQS will never take it.
    Refused(String),
    /// Perhaps later.
    Failed(String),
}

/// What a queue says about itself.
pub(super) type Attributes = HashMap<QueueAttributeName, String>;

/// A connection to the place where a queue is.
#[derive(Clone)]
pub(super) struct Calls {
    client: Client,
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calls")
    }
}

impl SqsSettings {
    /// The client that asks. Finds credentials where AWS users have them, unless there are keys here; connects when there is something to ask.
    pub async fn client(&self) -> Client {
        let http = HttpBuilder::new().tls_provider(Provider::Rustls(CryptoMode::Ring)).build_https();
        let timeouts = TimeoutConfig::builder().connect_timeout(CONNECT).operation_attempt_timeout(ANSWER);
        let mut loader = aws_config::defaults(BehaviorVersion::latest())
            .http_client(http)
            .retry_config(RetryConfig::standard().with_max_attempts(TRIES))
            .timeout_config(timeouts.build());
        if let Some(region) = self.region() {
            loader = loader.region(Region::new(region));
        }
        if let Some(profile) = &self.profile {
            loader = loader.profile_name(profile);
        }
        if let Some(keys) = &self.keys {
            let token = keys.session_token.as_ref().map(|token| token.expose().to_owned());
            let (id, secret) = (keys.access_key_id.clone(), keys.secret_access_key.expose());
            loader =
                loader.credentials_provider(Credentials::new(id, secret, token, None, "the configuration"));
        }
        let config = aws_sdk_sqs::config::Builder::from(&loader.load().await);
        Client::from_conf(config.endpoint_url(self.endpoint()).build())
    }
}

impl Calls {
    pub(super) async fn new(settings: &SqsSettings) -> Self {
        Calls { client: settings.client().await }
    }

    /// Everything that a queue says about itself.
    pub(super) async fn attributes(&self, url: &str) -> Result<Attributes, SourceError> {
        let asked = self.client.get_queue_attributes().queue_url(url);
        let answer = asked.attribute_names(QueueAttributeName::All).send().await;
        let answer = answer.map_err(|error| trouble(url, error))?;
        Ok(answer.attributes.unwrap_or_default())
    }

    /// Where the queue of a name (`arn:aws:sqs:region:account:name`) is.
    pub(super) async fn url_of(&self, arn: &str) -> Result<String, SourceError> {
        let mut parts = arn.rsplitn(3, ':');
        let (name, account) = (parts.next().unwrap_or(arn), parts.next().unwrap_or_default());
        let asked = self.client.get_queue_url().queue_name(name);
        let asked = if account.is_empty() { asked } else { asked.queue_owner_aws_account_id(account) };
        let answer = asked.send().await.map_err(|error| trouble(arn, error))?;
        answer.queue_url.ok_or_else(|| SourceError::Broken(format!("{arn}: SQS did not say where it is")))
    }

    /// Receives up to ten messages, waiting for the first so many whole seconds, rounded up.
    pub(super) async fn receive(
        &self,
        url: &str,
        most: usize,
        wait: Duration,
        lease: Duration,
        fifo: bool,
    ) -> Result<Vec<Fetched>, SourceError> {
        let wait = seconds(wait).clamp(0, 20);
        let asked = self.client.receive_message().queue_url(url).message_attribute_names("All");
        let asked = asked.max_number_of_messages(most.clamp(1, TOGETHER) as i32);
        let asked = asked.wait_time_seconds(wait).visibility_timeout(seconds(lease).max(1));
        let asked = asked.message_system_attribute_names(MessageSystemAttributeName::All);
        // A receive whose answer got lost and that is tried again gets the same messages, not the next ones.
        let attempt = fifo.then(unique_id);
        let patience = TimeoutConfig::builder()
            .connect_timeout(CONNECT)
            .operation_attempt_timeout(ANSWER + Duration::from_secs(wait as u64));
        let override_ = aws_sdk_sqs::config::Builder::new().timeout_config(patience.build());
        let asked = asked.set_receive_request_attempt_id(attempt).customize().config_override(override_);
        let answer = asked.send().await.map_err(|error| trouble(url, error))?;
        Ok(answer.messages.unwrap_or_default().into_iter().filter_map(|it| fetched(it, fifo)).collect())
    }

    /// Deletes messages. The answers are in the order of the question; one that could not be given for a reason that may pass is an error.
    pub(super) async fn delete(&self, url: &str, receipts: &[Arc<str>]) -> Vec<Result<Settled, SourceError>> {
        in_pieces(receipts, |piece| async move {
            let entry = |(at, receipt): (usize, &Arc<str>)| {
                let entry = DeleteMessageBatchRequestEntry::builder().id(at.to_string());
                entry.receipt_handle(&**receipt).build().expect("all that is needed is set")
            };
            let entries = piece.iter().enumerate().map(entry).collect();
            let asked = self.client.delete_message_batch().queue_url(url).set_entries(Some(entries));
            match asked.send().await {
                Ok(answer) => answers(piece.len(), &answer.failed),
                Err(error) => vec![Err(trouble(url, error)); piece.len()],
            }
        })
        .await
    }

    /// Sets for how long messages stay invisible from now on.
    pub(super) async fn hide(
        &self,
        url: &str,
        changes: &[(Arc<str>, Duration)],
    ) -> Vec<Result<Settled, SourceError>> {
        in_pieces(changes, |piece| async move {
            let entry = |(at, (receipt, time)): (usize, &(Arc<str>, Duration))| {
                let entry = ChangeMessageVisibilityBatchRequestEntry::builder().id(at.to_string());
                let entry = entry.receipt_handle(&**receipt).visibility_timeout(seconds(*time));
                entry.build().expect("all that is needed is set")
            };
            let entries = piece.iter().enumerate().map(entry).collect();
            let asked =
                self.client.change_message_visibility_batch().queue_url(url).set_entries(Some(entries));
            match asked.send().await {
                Ok(answer) => answers(piece.len(), &answer.failed),
                Err(error) => vec![Err(trouble(url, error)); piece.len()],
            }
        })
        .await
    }

    /// Sends up to ten letters, whose bytes fit into one call.
    pub(super) async fn send(&self, url: &str, letters: &[Letter]) -> Result<Vec<Sent>, SourceError> {
        let entry = |(at, letter): (usize, &Letter)| {
            let entry = SendMessageBatchRequestEntry::builder().id(at.to_string());
            let entry = entry.message_body(&letter.text).set_message_group_id(letter.group.clone());
            let entry = entry.set_message_deduplication_id(letter.deduplication_id.clone());
            let attributes = (!letter.attributes.is_empty()).then(|| letter.attributes.clone());
            entry.set_message_attributes(attributes).build().expect("all that is needed is set")
        };
        let entries = letters.iter().enumerate().map(entry).collect();
        let asked = self.client.send_message_batch().queue_url(url).set_entries(Some(entries));
        let answer = match asked.send().await {
            Ok(answer) => answer,
            // A call of one letter that cannot be is that letter's fault.
            Err(SdkError::ServiceError(error)) if letters.len() == 1 && is_content(error.err().code()) => {
                let reason = error.err().message().unwrap_or("SQS does not take it").to_owned();
                return Ok(vec![Sent::Refused(reason)]);
            }
            Err(error) => return Err(trouble(url, error)),
        };
        let mut sent = vec![Sent::Failed("SQS gave no answer".to_owned()); letters.len()];
        for entry in &answer.successful {
            if let Some(place) = place(entry.id(), sent.len()) {
                sent[place] = Sent::Taken { sequence: entry.sequence_number().map(sequence) };
            }
        }
        for entry in &answer.failed {
            if let Some(place) = place(entry.id(), sent.len()) {
                let reason = format!("{}: {}", entry.code(), entry.message().unwrap_or("no reason given"));
                let refused = entry.sender_fault() && !is_passing(entry.code());
                sent[place] = if refused { Sent::Refused(reason) } else { Sent::Failed(reason) };
            }
        }
        Ok(sent)
    }
}

/// Asks about each piece of up to ten, several pieces at a time; the answers are in the order of the question.
async fn in_pieces<'a, T, F>(all: &'a [T], ask: impl Fn(&'a [T]) -> F) -> Vec<Result<Settled, SourceError>>
where
    F: Future<Output = Vec<Result<Settled, SourceError>>>,
{
    let asked: Vec<F> = all.chunks(TOGETHER).map(ask).collect();
    futures_util::stream::iter(asked).buffered(AT_ONCE).collect::<Vec<_>>().await.concat()
}

/// What a batch says about each entry. A receipt that is refused is from an older handing-out, or its message is gone.
fn answers(count: usize, failed: &[BatchResultErrorEntry]) -> Vec<Result<Settled, SourceError>> {
    let mut answers = vec![Ok(Settled::Settled); count];
    for entry in failed {
        if let Some(place) = place(entry.id(), count) {
            let reason = format!("{}: {}", entry.code(), entry.message().unwrap_or("no reason given"));
            answers[place] = match entry.sender_fault() {
                _ if is_refusal(entry.code()) => Err(SourceError::Broken(reason)),
                true if !is_passing(entry.code()) => Ok(Settled::Stale),
                _ => Err(SourceError::Unavailable(reason)),
            };
        }
    }
    answers
}

fn place(id: &str, count: usize) -> Option<usize> {
    id.parse().ok().filter(|place| *place < count)
}

/// Whole seconds, rounded up: nothing becomes visible early, and nobody asks before it is time.
pub(super) fn seconds(time: Duration) -> i32 {
    let time = time.min(VISIBILITY_MAX);
    time.as_secs() as i32 + i32::from(time.subsec_nanos() > 0)
}

/// Until when a lease is good that SQS has just told us of. A tenth is left out, because the answer was on its way for some time.
pub(super) fn lease_end(lease: Duration) -> Instant {
    let whole = Duration::from_secs(seconds(lease).max(1) as u64);
    Instant::now() + whole - (whole / 10).min(ON_ITS_WAY)
}

fn fetched(message: SqsMessage, fifo: bool) -> Option<Fetched> {
    let receipt: Arc<str> = message.receipt_handle()?.into();
    let system = message.attributes.unwrap_or_default();
    let get = |name: MessageSystemAttributeName| system.get(&name).map(String::as_str);
    let message_id = message.message_id.unwrap_or_default();
    let id = match get(MessageSystemAttributeName::SequenceNumber).filter(|_| fifo) {
        Some(number) => sequence(number),
        None => fingerprint(&message_id),
    };
    let count = get(MessageSystemAttributeName::ApproximateReceiveCount);
    Some(Fetched {
        id,
        receipt,
        message_id,
        // In a standard queue a group shares the queue fairly and orders nothing.
        group: get(MessageSystemAttributeName::MessageGroupId).filter(|_| fifo).map(Arc::from),
        text: message.body.unwrap_or_default().into_bytes().into(),
        attempt: count.and_then(|count| count.parse().ok()).unwrap_or(1).max(1),
        attributes: message.message_attributes.unwrap_or_default(),
    })
}

/// The place of a message in a FIFO queue. SQS numbers have up to 128 bits, of which the upper ones are the same for as long as anybody will run this: what
/// is left grows in the order of publication, and no two messages of a queue share it.
pub(super) fn sequence(number: &str) -> DeliveryId {
    number.parse::<u128>().map_or_else(|_| fingerprint(number), |number| number as u64)
}

/// In a standard queue there is no place, only an identity.
pub(super) fn fingerprint(id: &str) -> DeliveryId {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    hasher.finish()
}

/// An id that nobody else has.
pub(super) fn unique_id() -> String {
    format!("{:032x}", fastrand::u128(..))
}

// ── what can go wrong ─────────────────────────────────────────────────────────────────────────────────────────────────

fn is_content(code: Option<&str>) -> bool {
    matches!(
        code,
        Some("InvalidMessageContents" | "InvalidParameterValue" | "BatchRequestTooLong")
            | Some("AWS.SimpleQueueService.BatchRequestTooLong")
    )
}

fn is_passing(code: &str) -> bool {
    ["Throttl", "Unavailable", "InternalError", "InternalFailure", "OverLimit"]
        .iter()
        .any(|part| code.contains(part))
}

fn is_refusal(code: &str) -> bool {
    const PARTS: [&str; 9] = [
        "AccessDenied",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "UnrecognizedClient",
        "InvalidAccessKeyId",
        "ExpiredToken",
        "MissingAuthentication",
        "AuthFailure",
        "InvalidSecurity",
    ];
    PARTS.iter().any(|part| code.contains(part))
}

/// What a failed call means.
fn trouble<E, R>(place: &str, error: SdkError<E, R>) -> SourceError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
    R: fmt::Debug,
{
    match &error {
        SdkError::ServiceError(service) => {
            let code = service.err().code().unwrap_or("an error without a code");
            said(place, code, service.err().message().unwrap_or_default())
        }
        SdkError::TimeoutError(_) => SourceError::Unavailable(format!("{place}: SQS did not answer in time")),
        _ => {
            let text = DisplayErrorContext(&error).to_string();
            let short = text.split(" (DispatchFailure").next().unwrap_or(&text).to_owned();
            if text.to_ascii_lowercase().contains("credential") {
                let help = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or keys in the configuration";
                return SourceError::Broken(format!("{place}: there are no credentials: {help} ({short})"));
            }
            SourceError::Unavailable(format!("{place}: SQS cannot be reached: {short}"))
        }
    }
}

fn said(place: &str, code: &str, message: &str) -> SourceError {
    if code.contains("NonExistentQueue") || code.contains("QueueDoesNotExist") {
        return SourceError::Broken(format!("{place}: there is no such queue, or no permission to see it"));
    }
    if is_refusal(code) {
        return SourceError::Broken(format!("{place}: SQS refuses the credentials: {code}: {message}"));
    }
    if is_passing(code) {
        return SourceError::Unavailable(format!("{place}: SQS asks for patience: {code}: {message}"));
    }
    SourceError::Broken(format!("{place}: {code}: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_of_sqs_keep_their_order_in_fewer_bits() {
        let numbers = ["18849496460467696128", "18849496460467696384", "18887000000000000000"];
        assert!(numbers.map(sequence).is_sorted_by(|a, b| a < b));
        assert_eq!(sequence("00000000000000000007"), 7);
        assert_ne!(sequence("not a number"), sequence("nor this"));
    }

    #[test]
    fn nothing_becomes_visible_early() {
        assert_eq!(seconds(Duration::ZERO), 0);
        assert_eq!(seconds(Duration::from_millis(1)), 1);
        assert_eq!(seconds(Duration::from_secs(2)), 2);
        assert_eq!(seconds(Duration::MAX), 12 * 3600);
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let broken = |code| matches!(said("q", code, ""), SourceError::Broken(_));
        assert!(broken("AWS.SimpleQueueService.NonExistentQueue") && broken("QueueDoesNotExist"));
        assert!(broken("AccessDeniedException") && broken("SignatureDoesNotMatch"));
        assert!(
            !broken("ThrottlingException") && !broken("RequestThrottled") && !broken("ServiceUnavailable")
        );
    }

    #[test]
    fn a_refused_receipt_is_stale_and_a_passing_failure_is_an_error() {
        let failed = |id: &str, code: &str, fault| {
            let entry = BatchResultErrorEntry::builder().id(id).code(code).sender_fault(fault);
            entry.build().expect("complete")
        };
        let entries = [
            failed("0", "ReceiptHandleIsInvalid", true),
            failed("2", "InternalError", false),
            failed("3", "AccessDenied", true),
            failed("9", "x", true),
        ];
        let answers = answers(4, &entries);
        assert_eq!((&answers[0], &answers[1]), (&Ok(Settled::Stale), &Ok(Settled::Settled)));
        assert!(matches!(answers[2], Err(SourceError::Unavailable(_))));
        assert!(matches!(answers[3], Err(SourceError::Broken(_))));
    }

    #[test]
    fn a_reason_is_left_out_where_there_is_no_room() {
        let letter = |bytes| Letter {
            text: "x".repeat(bytes),
            group: None,
            deduplication_id: None,
            attributes: HashMap::new(),
        };
        assert!(letter(10).because("it\nfailed").attributes.contains_key(REASON));
        assert!(letter(CALL_BYTES_MAX).because("it failed").attributes.is_empty());
    }
}
