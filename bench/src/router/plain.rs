//! `plain`, beside the router's deliveries: the same payloads to the same target by a client of HTTP that only posts.
//!
//! It keeps its connections, and has no queue, no retry, and nothing that could be asked about it: as many tasks as a pool has slots, each with groups of its own, which it posts one
//! after the other, so that the target sees the order that it checks.

use anyhow::{Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::CONTENT_TYPE;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use super::Spec;
use super::run::{Clock, DELIVERIES, Target, backlog_of, judge, payload};
use crate::drive::Outcome;

/// Posts the backlog of `deliver`.
pub(super) async fn post(spec: &Spec) -> Result<Outcome> {
    let target = Target::start()?;
    let uri: hyper::Uri = target.url().parse()?;
    let messages = spec.messages.unwrap_or(DELIVERIES);
    let mut work: Vec<Vec<Bytes>> = vec![Vec::new(); spec.pool];
    for (group, position) in backlog_of(messages) {
        work[group % spec.pool].push(payload(group, position, 0).into());
    }
    let mut builder = Client::builder(TokioExecutor::new());
    let client = builder.retry_canceled_requests(false).build_http();
    let clock = Clock::start();
    let tasks: Vec<_> =
        work.into_iter().map(|bodies| tokio::spawn(post_all(client.clone(), uri.clone(), bodies))).collect();
    for task in tasks {
        task.await??;
    }
    let mut outcome = Outcome::default();
    clock.stop(messages, &mut outcome);
    judge(&target, messages, &mut outcome)?;
    Ok(outcome)
}

async fn post_all(
    client: Client<HttpConnector, Full<Bytes>>,
    uri: hyper::Uri,
    bodies: Vec<Bytes>,
) -> Result<()> {
    for body in bodies {
        let request = hyper::Request::post(uri.clone()).header(CONTENT_TYPE, "application/json");
        let response = client.request(request.body(Full::new(body))?).await?;
        ensure!(response.status().is_success(), "the target answered {}", response.status());
        response.into_body().collect().await?;
    }
    Ok(())
}
