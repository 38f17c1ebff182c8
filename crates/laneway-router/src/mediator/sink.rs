//! `SINK`: publishes a message to a configured sink, so that one broker can be bridged to another, in order.
//!
//! The target is the name of the sink (`laneway.sinks`). What is published is what would be posted to an HTTP target: the payload, or the id if there is
//! none. Its group stays its group, and its id, or its deduplication id if it has one, is what the next broker recognises a copy by: an attempt whose answer
//! was lost is made again. The lane waits for the broker's word, so the order of a group is kept.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::headers;
use super::target::beginning;
use super::{Call, NO_SEQUENCE, Verdict};
use crate::source::sink::{Outgoing, Published, Sink, SinkError};

/// How long a message waits whose broker is not there. This costs no attempt: it is not the message's failure.
const ABSENT: Duration = Duration::from_secs(1);

/// The same where somebody has to do something about it first: a queue that is not there, a permission that is missing.
const BROKEN: Duration = Duration::from_secs(10);

/// The sinks by name, and the time that one publication may take.
#[derive(Clone)]
pub struct Sinks {
    all: Arc<BTreeMap<String, Arc<dyn Sink>>>,
    timeout: Duration,
}

impl std::fmt::Debug for Sinks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.all.keys()).finish()
    }
}

impl Default for Sinks {
    fn default() -> Self {
        Sinks::new(BTreeMap::new(), Duration::from_secs(60))
    }
}

impl Sinks {
    /// These, by name.
    pub fn new(all: BTreeMap<String, Arc<dyn Sink>>, timeout: Duration) -> Self {
        Sinks { all: Arc::new(all), timeout }
    }

    /// Their names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.all.keys().map(String::as_str)
    }

    /// Whether there is one of this name.
    pub fn has(&self, name: &str) -> bool {
        self.all.contains_key(name)
    }

    /// Makes one attempt.
    pub async fn mediate(&self, call: Call<'_>) -> Verdict {
        let target = &call.message.mediation_target;
        let Some(sink) = self.all.get(target.as_str()) else {
            let shown = beginning(target);
            return Verdict::Final { reason: format!("there is no sink {shown:?} (laneway.sinks)") };
        };
        // As `http.rs` does: a message from a source had nobody to tell its publisher. What is no name or no value of a header harms more than one kind of broker.
        for (name, value) in &call.message.headers {
            if let Some(problem) = headers::refusal(name, value) {
                return Verdict::Final { reason: format!("header `{}` {problem}", name.escape_debug()) };
            }
        }
        let publishing = tokio::time::timeout(self.timeout, sink.publish(vec![outgoing(call)]));
        let absent = |reason| Verdict::Wait { delay: ABSENT, called: true, reason };
        match publishing.await {
            Err(_) => absent(format!("{target} did not answer within {:?}", self.timeout)),
            Ok(Err(SinkError::Unavailable(reason))) => absent(reason),
            Ok(Err(SinkError::Broken(reason))) => Verdict::Wait { delay: BROKEN, called: true, reason },
            Ok(Ok(answers)) => match answers.into_iter().next() {
                Some(Published::Accepted { .. }) => Verdict::Done,
                Some(Published::Refused { reason }) => Verdict::Final { reason },
                None => Verdict::Again { delay: None, reason: format!("{target} gave no answer") },
            },
        }
    }

    /// Ends all of them.
    pub async fn close(&self) {
        futures_util::future::join_all(self.all.values().map(|sink| sink.close())).await;
    }
}

fn outgoing(call: Call<'_>) -> Outgoing {
    let message = call.message;
    let text = match &message.payload {
        Some(payload) => payload.get().as_bytes().into(),
        None => serde_json::json!({ "messageId": message.id }).to_string().into_bytes().into(),
    };
    let mut headers = message.headers.clone();
    // The fence of the hop before: what reads the next broker can tell a copy that comes too late.
    if call.sequence != NO_SEQUENCE {
        headers.insert(headers::SEQUENCE.as_str().to_owned(), call.sequence.to_string());
    }
    Outgoing {
        id: message.id.clone(),
        group: (!call.key.is_empty()).then(|| call.key.into()),
        deduplication_id: Some(message.deduplication_id.clone().unwrap_or_else(|| message.id.clone())),
        text,
        headers,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_util::future::BoxFuture;

    use super::*;
    use crate::message::Message;

    struct Fake {
        seen: Mutex<Vec<Outgoing>>,
        answer: Result<Vec<Published>, SinkError>,
    }

    impl Sink for Fake {
        fn name(&self) -> &str {
            "fake"
        }
        fn publish(&self, batch: Vec<Outgoing>) -> BoxFuture<'_, Result<Vec<Published>, SinkError>> {
            self.seen.lock().unwrap().extend(batch);
            Box::pin(std::future::ready(self.answer.clone()))
        }
    }

    async fn verdict(answer: Result<Vec<Published>, SinkError>, target: &str) -> (Verdict, Vec<Outgoing>) {
        let fake = Arc::new(Fake { seen: Mutex::default(), answer });
        let all: BTreeMap<String, Arc<dyn Sink>> = BTreeMap::from([("next".to_owned(), fake.clone() as _)]);
        let text = format!(
            r#"{{"id":"m","poolCode":"p","mediationType":"SINK","mediationTarget":"{target}","payload":{{"a": 1}}}}"#
        );
        let message = Message::parse(text.as_bytes()).unwrap();
        let call = Call { message: &message, key: "order-7", sequence: 9, attempt: 1, traceparent: None };
        let verdict = Sinks::new(all, Duration::from_secs(1)).mediate(call).await;
        let seen = fake.seen.lock().unwrap().clone();
        (verdict, seen)
    }

    #[tokio::test]
    async fn a_header_that_no_target_may_see_goes_to_no_sink() {
        let text = r#"{"id":"m","poolCode":"p","mediationType":"SINK","mediationTarget":"next","headers":{"x\r\ny":"z"}}"#;
        let message: Message = serde_json::from_str(text).unwrap();
        let fake = Arc::new(Fake { seen: Mutex::default(), answer: Ok(Vec::new()) });
        let all: BTreeMap<String, Arc<dyn Sink>> = BTreeMap::from([("next".to_owned(), fake.clone() as _)]);
        let call = Call { message: &message, key: "a", sequence: 1, attempt: 1, traceparent: None };
        let verdict = Sinks::new(all, Duration::from_secs(1)).mediate(call).await;
        assert!(
            matches!(&verdict, Verdict::Final { reason } if reason.contains("not the name")),
            "{verdict:?}"
        );
        assert!(fake.seen.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn what_a_sink_says_is_what_becomes_of_the_message() {
        let accepted = Ok(vec![Published::Accepted { sequence: Some(1), duplicate: false }]);
        let (done, seen) = verdict(accepted.clone(), "next").await;
        assert_eq!(done, Verdict::Done);
        assert_eq!((&*seen[0].text, seen[0].group.as_deref()), (&br#"{"a": 1}"#[..], Some("order-7")));
        assert_eq!(seen[0].deduplication_id.as_deref(), Some("m"));
        assert!(matches!(verdict(accepted, "other").await.0, Verdict::Final { .. }));
        let refused = Ok(vec![Published::Refused { reason: "too long".to_owned() }]);
        assert!(
            matches!(verdict(refused, "next").await.0, Verdict::Final { reason } if reason == "too long")
        );
        let absent = Err(SinkError::Unavailable("no connection".to_owned()));
        assert!(matches!(verdict(absent, "next").await.0, Verdict::Wait { .. }), "costs no attempt");
        let broken = Err(SinkError::Broken("no such queue".to_owned()));
        let broken = verdict(broken, "next").await.0;
        assert!(matches!(broken, Verdict::Wait { delay: BROKEN, .. }), "nor does this, but it takes longer");
        assert!(matches!(verdict(Ok(Vec::new()), "next").await.0, Verdict::Again { .. }));
    }
}
