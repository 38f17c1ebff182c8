//! What `laneway doctor` asks of a topic: is it there, how many routers can share it, and what would take messages away before they are delivered.

use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;

use super::{KafkaSettings, refusals, trouble};
use crate::source::SourceError;
use crate::source::broker::{Examination, Finding, Role};

/// What waits longer than a topic keeps it is lost, and a target may be away for a weekend.
const RETENTION_MIN: Duration = Duration::from_secs(4 * 24 * 3600);

/// What librdkafka takes for `max.poll.interval.ms` if nothing is said.
const POLL_INTERVAL: u128 = 300_000;

pub(super) async fn examine(settings: &KafkaSettings, examination: &Examination) -> Vec<Finding> {
    let (ours, role) = (settings.clone(), examination.role);
    let looked = tokio::task::spawn_blocking(move || look(&ours, role)).await;
    let mut findings = looked.unwrap_or_else(|error| vec![Finding::error(error.to_string(), "try again")]);
    if findings.iter().any(|finding| finding.level == crate::source::broker::Level::Error) {
        return findings;
    }
    findings.extend(topic_settings(settings).await);
    if examination.role == Role::Source {
        findings.extend(drain(settings, examination));
    }
    findings
}

fn unreachable(error: &SourceError) -> Finding {
    let mend = match error {
        SourceError::Unavailable(_) => {
            "see whether the brokers can be reached from here under the names that they give themselves, and whether they want TLS or SASL (properties)"
        }
        _ => "create the topic, or give the user of the properties the rights to describe, read and write it",
    };
    Finding::error(error.to_string(), mend)
}

fn look(settings: &KafkaSettings, role: Role) -> Vec<Finding> {
    let client = match refusals::asking(settings) {
        Ok(client) => client,
        Err(error) => return vec![unreachable(&error)],
    };
    let mut findings = Vec::new();
    match refusals::look(&client, &settings.topic) {
        Err(error) => return vec![unreachable(&error)],
        Ok(1) if role == Role::Source => findings.push(Finding::warning(
            format!("{} has one partition: only one router at a time reads it", settings.topic),
            "more partitions, before there are messages in it: keys move when their number changes",
        )),
        Ok(count) => findings.push(Finding::fine(format!(
            "{} has {count} partitions: so many routers can share it, each with as many keys at a time as its pools take",
            settings.topic
        ))),
    }
    if role == Role::Source {
        for topic in [settings.dead_letters(), settings.quarantine()] {
            findings.push(match refusals::look(&client, &topic) {
                Ok(_) => Finding::fine(format!("{topic} is there for what cannot be delivered")),
                Err(error) => unreachable(&error),
            });
        }
        findings.dedup();
    }
    findings
}

/// What the topic itself says, if the broker and the permissions allow the question.
async fn topic_settings(settings: &KafkaSettings) -> Vec<Finding> {
    let client: AdminClient<DefaultClientContext> = match settings.config_with_properties().create() {
        Ok(client) => client,
        Err(error) => return vec![unreachable(&trouble(&settings.topic, &error))],
    };
    let options = AdminOptions::new().request_timeout(Some(super::reader::ANSWER));
    let asked = [ResourceSpecifier::Topic(&settings.topic)];
    let answer = client.describe_configs(&asked, &options).await;
    match answer.ok().and_then(|answer| answer.into_iter().next()) {
        Some(Ok(resource)) => judge(&settings.topic, &resource),
        _ => vec![Finding::warning(
            format!(
                "the settings of {} could not be asked for: whether it keeps messages long enough is not known",
                settings.topic
            ),
            "give the right to describe its configuration, or see to retention.ms and cleanup.policy yourself",
        )],
    }
}

fn judge(topic: &str, resource: &ConfigResource) -> Vec<Finding> {
    let value = |name: &str| resource.get(name).and_then(|entry| entry.value.as_deref());
    let mut findings = Vec::new();
    let retention = value("retention.ms").and_then(|time| time.parse::<i64>().ok());
    if retention.is_some_and(|time| time >= 0 && (time as u128) < RETENTION_MIN.as_millis()) {
        findings.push(Finding::warning(
            format!(
                "{topic} forgets messages after {:?}, delivered or not",
                Duration::from_millis(retention.unwrap_or(0) as u64)
            ),
            "set retention.ms to several days",
        ));
    }
    if value("cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        findings.push(Finding::warning(
            format!(
                "{topic} is compacted: a message that waits may vanish when a later one of its key comes"
            ),
            "set cleanup.policy to delete for topics whose every message counts",
        ));
    }
    findings
}

fn drain(settings: &KafkaSettings, examination: &Examination) -> Vec<Finding> {
    let mut findings = Vec::new();
    let interval = settings.properties.get("max.poll.interval.ms").and_then(|time| time.parse().ok());
    if settings.drain.as_millis() >= interval.unwrap_or(POLL_INTERVAL) {
        findings.push(Finding::error(
            "drain is not below max.poll.interval.ms: in a rebalance the broker would take the partitions away before they are drained",
            "a shorter drain, or a longer max.poll.interval.ms among the properties",
        ));
    }
    if settings.drain < examination.attempt {
        findings.push(Finding::warning(
            format!(
                "drain ({:?}) is shorter than an attempt may take ({:?}): in a rebalance a key may run in two places for the difference",
                settings.drain, examination.attempt
            ),
            "a longer drain, or let the target refuse late calls by their sequence",
        ));
    }
    findings
}
