//! What `laneway doctor` asks of a queue: is it there, does it order, and what would take messages out of their order.

use std::time::Duration;

use aws_sdk_sqs::types::QueueAttributeName;

use super::calls::{Attributes, Calls};
use super::{NO_DEAD_LETTERS, SqsSettings, is_fifo, redrive_policy};
use crate::source::SourceError;
use crate::source::broker::{Examination, Finding, Role};

/// Every give-back and every lease that runs out is a receive; below this many SQS would take away messages that only had to wait.
const RECEIVES_MIN: u64 = 100;

/// What waits longer than a queue keeps it is lost, and a target may be away for a weekend.
const RETENTION_MIN: Duration = Duration::from_secs(4 * 24 * 3600);

/// How long the whole may take: one that waits for an answer that does not come has something to say, too.
const PATIENCE: Duration = Duration::from_secs(25);

pub(super) async fn examine(settings: &SqsSettings, examination: &Examination) -> Vec<Finding> {
    let late = |_| {
        let error = SourceError::Unavailable(format!("{}: SQS does not answer", settings.url));
        vec![unreachable(&error)]
    };
    tokio::time::timeout(PATIENCE, look(settings, examination)).await.unwrap_or_else(late)
}

async fn look(settings: &SqsSettings, examination: &Examination) -> Vec<Finding> {
    let calls = Calls::new(settings).await;
    let attributes = match calls.attributes(&settings.url).await {
        Ok(attributes) => attributes,
        Err(error) => return vec![unreachable(&error)],
    };
    let mut findings = vec![Finding::fine(format!("{} answers", settings.url))];
    findings.push(match is_fifo(&attributes) {
        true => Finding::fine("a FIFO queue: SQS keeps the order of groups, across routers"),
        false => Finding::warning(
            "a standard queue: SQS hands messages out in any order, and sometimes twice",
            "for order, make a queue whose name ends in .fifo, and publish with a MessageGroupId",
        ),
    });
    findings.extend(retention(&attributes));
    findings.extend(deduplication(&attributes));
    if examination.role == Role::Source {
        findings.push(lease(examination));
        findings.extend(policy(&attributes));
        findings.extend(dead_letters(settings, &calls, &attributes).await);
    }
    findings
}

fn unreachable(error: &SourceError) -> Finding {
    let mend = match error {
        SourceError::Unavailable(_) => "see whether the host of the URL can be reached from here",
        _ => {
            "see that the URL is right, and that the credentials may do sqs:GetQueueAttributes, ReceiveMessage, DeleteMessage, ChangeMessageVisibility and \
             SendMessage"
        }
    };
    Finding::error(error.to_string(), mend)
}

fn number(attributes: &Attributes, name: QueueAttributeName) -> Option<u64> {
    attributes.get(&name)?.parse().ok()
}

fn retention(attributes: &Attributes) -> Option<Finding> {
    let seconds = number(attributes, QueueAttributeName::MessageRetentionPeriod)?;
    (seconds < RETENTION_MIN.as_secs()).then(|| {
        Finding::warning(
            format!("the queue forgets messages after {seconds} s, delivered or not"),
            "set MessageRetentionPeriod to several days",
        )
    })
}

fn deduplication(attributes: &Attributes) -> Option<Finding> {
    let by_content = attributes.get(&QueueAttributeName::ContentBasedDeduplication);
    by_content.is_some_and(|flag| flag == "true").then(|| {
        Finding::fine(
            "content-based deduplication: of two messages with the same text within five minutes, and without ids of their own, one is kept",
        )
    })
}

fn lease(examination: &Examination) -> Finding {
    let (lease, attempt) = (examination.lease, examination.attempt);
    if lease >= attempt {
        return Finding::fine(format!("a lease of {lease:?} is longer than an attempt of {attempt:?}"));
    }
    Finding::warning(
        format!(
            "a lease of {lease:?} is shorter than an attempt of {attempt:?}: when a router is cut off, another may call the target while the first still does"
        ),
        format!(
            "set laneway.lease to {attempt:?} or more, or let the target refuse late calls by their sequence"
        ),
    )
}

fn policy(attributes: &Attributes) -> Option<Finding> {
    let policy = redrive_policy(attributes)?;
    let what = format!("SQS itself takes a message away after {} receives", policy.receives);
    Some(match policy.receives >= RECEIVES_MIN {
        true => Finding::fine(what),
        false => Finding::warning(
            format!("{what}, and every give-back is one; its group goes on without it"),
            format!(
                "set maxReceiveCount to {RECEIVES_MIN} or more: after its attempts a message goes to the dead letters anyway"
            ),
        ),
    })
}

async fn dead_letters(settings: &SqsSettings, calls: &Calls, here: &Attributes) -> Vec<Finding> {
    let url = match settings.dead_letters_of(calls, here).await {
        Ok(Some(url)) => url,
        Ok(None) => return vec![Finding::error(NO_DEAD_LETTERS, "without it the source does not open")],
        Err(error) => return vec![unreachable(&error)],
    };
    let mut findings = Vec::new();
    for (what, url) in [("dead letters", Some(&url)), ("quarantine", settings.quarantine.as_ref())] {
        let Some(url) = url else { continue };
        findings.push(match calls.attributes(url).await {
            Err(error) => unreachable(&error),
            Ok(there) if is_fifo(here) && !is_fifo(&there) => Finding::warning(
                format!("{what} go to {url}, a standard queue, which forgets their groups"),
                "make it a FIFO queue",
            ),
            Ok(_) => Finding::fine(format!("{what} go to {url}")),
        });
    }
    findings
}
