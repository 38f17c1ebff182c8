//! What the brokers refuse beside the questions, and what else goes wrong there.
//!
//! A question that is refused says so in its answer. But librdkafka connects, joins the group and reads by itself: what is refused then it tells as an event, mostly once, and tries
//! on in silence. Questions about the topic are answered meanwhile, or time out as if nobody were there. So a refusal stands until something shows that it is over: an answer, for
//! which credentials are needed, or partitions and records, for which it takes the permissions. Whoever finds nothing is told what stands. Where nothing shows it because nothing comes, the member
//! gives up after a while, so that the next one hears anew.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use super::KafkaSettings;
use crate::source::SourceError;

/// A permission that was refused once, and of which nothing has been heard for so long, may have been given: librdkafka would not say.
const SILENCE: Duration = Duration::from_secs(10);

/// The same trouble is not written to the log again before.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// As many events as a client may have for whoever asks it first.
const EVENTS_MAX: usize = 256;

/// What is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// To connect.
    Credentials,
    /// To do this or that.
    Permission,
}

impl Refused {
    pub(super) fn by(code: RDKafkaErrorCode) -> Option<Refused> {
        use RDKafkaErrorCode as Code;
        match code {
            Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed => Some(Refused::Permission),
            Code::SaslAuthenticationFailed
            | Code::Authentication
            | Code::UnsupportedSASLMechanism
            | Code::SSL => Some(Refused::Credentials),
            _ => None,
        }
    }
}

/// What stands. It is the context of clients that only ask; that of the member tells it what it hears.
pub(super) struct Refusals {
    topic: String,
    group: String,
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    refusal: Option<Refusal>,
    /// What was written to the log last, and when.
    logged: Option<(RDKafkaErrorCode, Instant)>,
}

struct Refusal {
    what: Refused,
    error: SourceError,
    /// When it was told last.
    at: Instant,
}

impl fmt::Debug for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refusals").field("topic", &self.topic).finish_non_exhaustive()
    }
}

impl Refusals {
    pub(super) fn new(settings: &KafkaSettings) -> Self {
        let (topic, group) = (settings.topic.clone(), settings.group.clone());
        Refusals { topic, group, told: Mutex::default() }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Librdkafka says that something went wrong.
    pub(super) fn note(&self, error: &KafkaError, reason: &str) {
        let Some(code) = error.rdkafka_error_code() else { return };
        let (mut told, at) = (self.told(), Instant::now());
        if let Some(what) = Refused::by(code) {
            let error = SourceError::Broken(self.explained(code, reason));
            told.refusal = Some(Refusal { what, error, at });
        } else if told.logged.is_none_or(|(last, when)| last != code || at - when >= LOG_PAUSE) {
            told.logged = Some((code, at));
            tracing::warn!(topic = self.topic, "Kafka: {error}: {reason}");
        }
    }

    fn explained(&self, code: RDKafkaErrorCode, reason: &str) -> String {
        let Refusals { topic, group, .. } = self;
        match code {
            RDKafkaErrorCode::GroupAuthorizationFailed => format!(
                "{topic}: Kafka refuses the consumer group {group:?}: {reason}: give the user the permission to describe and read the group"
            ),
            RDKafkaErrorCode::TopicAuthorizationFailed => format!(
                "{topic}: Kafka refuses the topic: {reason}: give the user the permission to describe and read it"
            ),
            _ => format!("{topic}: Kafka refuses the credentials or the permission: {reason}"),
        }
    }

    /// What the answer to a question means, with what was refused beside it.
    pub(super) fn judge<T>(&self, answer: Result<T, SourceError>) -> Result<T, SourceError> {
        let mut told = self.told();
        if answer.is_ok() {
            told.refusal.take_if(|refusal| refusal.what == Refused::Credentials);
        }
        match (&told.refusal, answer) {
            (Some(refusal), Ok(_) | Err(SourceError::Unavailable(_))) => Err(refusal.error.clone()),
            (_, answer) => answer,
        }
    }

    /// Partitions have come, or records.
    pub(super) fn over(&self) {
        self.told().refusal = None;
    }

    /// Whether a permission is said to be missing, and it has become silent about it: only a new member would hear whether it still is.
    pub(super) fn is_silent(&self) -> bool {
        let told = self.told();
        let is_old = |it: &Refusal| it.what == Refused::Permission && it.at.elapsed() >= SILENCE;
        told.refusal.as_ref().is_some_and(is_old)
    }

    /// The first question of a client, which nobody polls yet: sees that a topic is there. How many partitions it has.
    pub(super) fn look<C: ConsumerContext>(
        &self,
        client: &BaseConsumer<C>,
        topic: &str,
    ) -> Result<usize, SourceError> {
        let found = super::require_topic(client, topic);
        if found.is_err() {
            // What was said meanwhile. There is no message, since it has not subscribed.
            (0..EVENTS_MAX).for_each(|_| drop(client.poll(Duration::ZERO)));
        }
        self.judge(found)
    }
}

impl ClientContext for Refusals {
    fn error(&self, error: KafkaError, reason: &str) {
        self.note(&error, reason);
    }
}

impl ConsumerContext for Refusals {}

/// A client for questions only: neither a member of the group nor a producer of messages.
pub(super) fn asking(settings: &KafkaSettings) -> Result<BaseConsumer<Refusals>, SourceError> {
    let config = settings.config_with_properties();
    let client = config.create_with_context(Refusals::new(settings));
    client.map_err(|error| super::trouble(&settings.topic, &error))
}

/// Sees that a topic is there, as a client for questions.
pub(super) fn look(client: &BaseConsumer<Refusals>, topic: &str) -> Result<usize, SourceError> {
    client.context().look(client, topic)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away<T>() -> Result<T, SourceError> {
        Err(SourceError::Unavailable("timed out".to_owned()))
    }

    fn noted(code: RDKafkaErrorCode, reason: &str) -> Refusals {
        let refusals = Refusals::new(&KafkaSettings::new("a:1", "orders", "readers"));
        refusals.note(&KafkaError::Global(code), reason);
        refusals
    }

    #[test]
    fn credentials_that_are_refused_explain_silence_until_there_is_an_answer() {
        let refusals = noted(RDKafkaErrorCode::Authentication, "wrong password");
        for _ in 0..2 {
            let judged = refusals.judge(away::<()>());
            assert!(matches!(&judged, Err(SourceError::Broken(why)) if why.contains("wrong password")));
        }
        assert_eq!(refusals.judge(Ok(7)), Ok(7));
        assert_eq!(refusals.judge(away::<()>()), away(), "it is simply away now");
    }

    #[test]
    fn a_permission_that_is_refused_stands_against_answers_until_it_is_seen_to_be_there() {
        let refusals = noted(RDKafkaErrorCode::GroupAuthorizationFailed, "no");
        refusals.note(&KafkaError::Global(RDKafkaErrorCode::BrokerTransportFailure), "something else");
        let judged = refusals.judge(Ok(()));
        assert!(matches!(&judged, Err(SourceError::Broken(why)) if why.contains("readers")), "{judged:?}");
        let other = Err(SourceError::Broken("there is no topic".to_owned()));
        assert_eq!(refusals.judge::<()>(other.clone()), other, "the answer says enough itself");
        refusals.over();
        assert_eq!(refusals.judge(Ok(())), Ok(()));
    }
}
