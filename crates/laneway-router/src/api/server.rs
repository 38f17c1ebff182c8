//! Connections: accepts them, gives each its deadlines, and ends them.
//!
//! `service.rs` hands over the listener; requests go to the routes of `mod.rs`. The server is hyper's with deadlines of our own on everything that a client
//! could draw out: the head of a request and the pause before it (hyper's own timer), the body (`guard.rs`), the making of the answer (`guard.rs`), and its
//! being taken ([`Impatient`]).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Sleep, sleep};

use crate::config::Http;
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
    let settings = Arc::new(service.config().http.clone());
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
        let (routes, closing, settings) = (routes.clone(), closing.clone(), Arc::clone(&settings));
        connections.spawn(async move {
            converse(stream, routes, &settings, closing).await;
            drop(place);
        });
    }
    connections
}

/// Serves one connection to its end.
async fn converse(
    stream: TcpStream,
    routes: axum::Router,
    settings: &Http,
    mut closing: watch::Receiver<bool>,
) {
    // Answers are small and complete; waiting for more to send would only delay them.
    let _ = stream.set_nodelay(true);
    let stream = Impatient { stream, patience: settings.write_timeout, until: None };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(settings.head_timeout)
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

/// A connection that breaks when its client takes nothing of what it asked for. Without that, whoever asks and does not read would keep its place for as long
/// as it likes: hyper waits for room in the system's buffer, and an answer that exists has kept its deadline.
///
/// Patience begins anew with every byte that is taken: slow is not gone, and a stream that goes on for hours is no answer that takes long.
struct Impatient {
    stream: TcpStream,
    patience: Duration,
    /// When it ends. Only while something waits to be taken.
    until: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    /// What became of a write, unless it has waited for too long.
    fn judged(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.until = None;
            return written;
        }
        let patience = self.patience;
        let until = self.until.get_or_insert_with(|| Box::pin(sleep(patience)));
        until.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Impatient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Impatient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judged(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.judged(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    // A socket keeps nothing back that could be waited for.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
