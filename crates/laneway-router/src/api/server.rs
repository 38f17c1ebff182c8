//! Connections: accepts them, gives each its deadlines, and ends them.
//!
//! `service.rs` hands over the listener; requests go to the routes of `mod.rs`. The server is hyper's with deadlines of our own on everything that a client
//! could draw out: the head of a request and the pause before it (hyper's own timer), the body (`guard.rs`), and the answer (`guard.rs`).

use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::service::Service;

/// No head of a request is longer; hyper answers 431 to it.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// How long the acceptor waits when the machine cannot give it a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The API at work.
pub(crate) struct Server {
    closing: watch::Sender<bool>,
    acceptor: JoinHandle<JoinSet<()>>,
}

impl Server {
    /// Accepts nothing more and waits for what is being answered. Says how many connections had to be cut off.
    pub(crate) async fn shutdown(self, limit: Duration) -> usize {
        self.closing.send_replace(true);
        let Ok(mut connections) = self.acceptor.await else { return 0 };
        let ended = async { while connections.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(limit, ended).await;
        let cut = connections.len();
        connections.shutdown().await;
        cut
    }
}

/// Begins to serve.
pub(crate) fn serve(service: Service, listener: TcpListener) -> Server {
    let (closing, watching) = watch::channel(false);
    let acceptor = tokio::spawn(accept(service, listener, watching));
    Server { closing, acceptor }
}

async fn accept(service: Service, listener: TcpListener, mut closing: watch::Receiver<bool>) -> JoinSet<()> {
    let settings = service.config().http.clone();
    let places = Arc::new(Semaphore::new(settings.connections_max));
    let routes = super::routes(service);
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        // Whoever is one too many waits in the system's own queue.
        let place = tokio::select! {
            _ = closing.wait_for(|closing| *closing) => break,
            place = Arc::clone(&places).acquire_owned() => place.expect("never closed"),
        };
        let accepted = tokio::select! {
            _ = closing.wait_for(|closing| *closing) => break,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let (routes, closing, head) = (routes.clone(), closing.clone(), settings.head_timeout);
        connections.spawn(async move {
            converse(stream, routes, head, closing).await;
            drop(place);
        });
    }
    connections
}

/// Serves one connection to its end.
async fn converse(
    stream: TcpStream,
    routes: axum::Router,
    head: Duration,
    mut closing: watch::Receiver<bool>,
) {
    // Answers are small and complete; waiting for more to send would only delay them.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        // A connection that broke is its client's business.
        _ = connection.as_mut() => return,
        _ = closing.wait_for(|closing| *closing) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}
