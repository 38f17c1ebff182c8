//! What a user reads when the service has started: what listens where, and what to type next.

use std::io;

use laneway_router::service::Service;
use serde_json::json;

use crate::client::{DEFAULT_URL, program};
use crate::table::{lines, printable};

/// Says it for a service that somebody configured.
pub(super) fn service(service: &Service, json: bool) -> io::Result<()> {
    addresses(service, json)?;
    let config = service.config();
    if !config.queue.names.is_empty() {
        eprintln!("  queue      {}", config.queue.path.display());
    }
    let named = |(name, broker): (&String, &std::sync::Arc<dyn laneway_router::source::broker::Broker>)| {
        format!("{} ({})", printable(name), broker.kind())
    };
    for (heading, brokers) in [("sources", &config.sources), ("sinks", &config.sinks)] {
        if !brokers.is_empty() {
            eprintln!("  {heading:<10} {}", shortened(&brokers.iter().map(named).collect::<Vec<_>>()));
        }
    }
    let program = program();
    let url = url_option(service);
    eprintln!(
        "
Next, in another terminal:
  {program} send{url} --group order-7 --count 5    publish something
  {program} top{url}                               watch it go
Ctrl-C drains and ends it."
    );
    Ok(())
}

/// What listens where. Programs read it from standard output, people beside it.
pub(super) fn addresses(service: &Service, json: bool) -> io::Result<()> {
    let url = url(service);
    let ingress = service.ingress_address();
    if json {
        lines(&[
            json!({"event": "listening", "url": url, "ingress": ingress.map(|address| address.to_string())}),
        ])?;
    }
    let pools: Vec<_> = service
        .router()
        .pools()
        .iter()
        .map(|pool| format!("{} ({} slots)", printable(&pool.code), pool.settings.concurrency))
        .collect();
    eprintln!("laneway {} is listening", env!("CARGO_PKG_VERSION"));
    eprintln!("  HTTP API   {url}    (described at /openapi.json, metrics at /metrics)");
    if let Some(address) = ingress {
        eprintln!("  ingress    {address}    (newline-delimited JSON over TCP)");
    }
    eprintln!("  pools      {}", shortened(&pools));
    Ok(())
}

pub(super) fn url(service: &Service) -> String {
    format!("http://{}", service.http_address())
}

/// What has to be typed to reach a service that is not where it usually is.
pub(super) fn url_option(service: &Service) -> String {
    let url = url(service);
    if url == DEFAULT_URL { String::new() } else { format!(" --url {url}") }
}

/// The first of them, and how many there are beyond.
fn shortened(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}
