//! `laneway send --to URL`: publishes to a broker, without a service between.
//!
//! What is published is the whole message as JSON: a router that reads the broker takes it as it is. Since nobody else looks at it on the way, it is
//! checked here.

use std::time::Instant;

use anyhow::Context as _;
use laneway_router::message::Message;
use laneway_router::source::broker;
use laneway_router::source::sink::{Outgoing, Published, Sink, SinkError};
use serde_json::{Value, json};

use super::letters::{Letter, Letters};
use super::{bar, in_batches};
use crate::exit::Failure;
use crate::table::{self, count, grouped, printable};

pub(super) fn run(url: &str, letters: Letters, json: bool) -> Result<(), Failure> {
    let broker = broker::from_url(url).map_err(Failure::Usage)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    let sink = runtime.block_on(broker.open_sink(broker.kind().into())).map_err(failed)?;
    let bar = bar(&letters);
    let (began, mut tally) = (Instant::now(), (0, 0));
    let sent = in_batches(letters, |batch| {
        let answers = runtime.block_on(publish(&*sink, &batch, &mut tally))?;
        bar.inc(batch.iter().map(|letter| letter.progress).sum());
        bar.set_message(count(tally.0, "message"));
        if json { Ok(table::lines(&answers)?) } else { Ok(()) }
    });
    bar.finish_and_clear();
    runtime.block_on(sink.close());
    if !json || sent.is_err() {
        let twice = match tally.1 {
            0 => String::new(),
            some => format!("; {} had been sent before and not taken again", grouped(some)),
        };
        let took = began.elapsed().as_secs_f64();
        eprintln!("{} accepted {} in {took:.1} s{twice}", broker.kind(), count(tally.0, "message"));
    }
    sent
}

/// Publishes one batch. Counts what was accepted, and what had been before.
async fn publish(sink: &dyn Sink, batch: &[Letter], tally: &mut (u64, u64)) -> Result<Vec<Value>, Failure> {
    let outgoing = batch.iter().map(outgoing).collect::<Result<Vec<_>, _>>()?;
    let ids: Vec<String> = outgoing.iter().map(|message| message.id.clone()).collect();
    let answers = sink.publish(outgoing).await.map_err(failed)?;
    let mut shown = Vec::with_capacity(answers.len());
    for (id, answer) in ids.iter().zip(answers) {
        match answer {
            Published::Accepted { sequence, duplicate } => {
                *tally = (tally.0 + u64::from(!duplicate), tally.1 + u64::from(duplicate));
                shown.push(json!({"id": id, "sequence": sequence, "duplicate": duplicate}));
            }
            Published::Refused { reason } => {
                return Err(Failure::Refused(format!("{} was refused: {reason}", printable(id))));
            }
        }
    }
    Ok(shown)
}

fn outgoing(letter: &Letter) -> Result<Outgoing, Failure> {
    let place = letter.line.map(|line| format!("line {line}: ")).unwrap_or_default();
    let refused = |why: &str| Failure::Refused(format!("{place}{why}"));
    let message = Message::parse(letter.json.as_bytes()).map_err(|error| refused(&error.to_string()))?;
    if message.delay_seconds.is_some() {
        return Err(refused("`delaySeconds` is heeded by the queue of a service, and by no broker"));
    }
    let group = message.group().map(Into::into);
    let Message { id, deduplication_id, .. } = message;
    Ok(Outgoing {
        deduplication_id: Some(deduplication_id.unwrap_or_else(|| id.clone())),
        id,
        group,
        text: letter.json.as_bytes().into(),
        headers: Default::default(),
    })
}

fn failed(error: SinkError) -> Failure {
    match error {
        SinkError::Unavailable(words) => Failure::Unreachable(words),
        SinkError::Broken(words) => Failure::Refused(words),
    }
}
