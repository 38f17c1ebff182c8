//! Connections to targets: which one a request takes, who drives it, and where it goes afterwards.
//!
//! A connection of **HTTP/1.1** has one request at a time, and the task that makes the request drives it: it writes, reads and parses in the same
//! poll in which the answer is taken up. Where every connection has a task of its own, as in most clients, each request goes there and back between
//! two tasks, often on two threads, and wakes each of them. An idle connection is driven by nobody. Whether its target has closed it is
//! seen when it is next taken, before anything is written to it. A request that finds no idle one makes one, and does not look again for what has come free meanwhile.
//!
//! A connection of **HTTP/2** has many requests at a time, so it has a task, and the requests to its host share it. (Those that come before the first answer of a
//! host with TLS do not know that yet, and connect each.) Its target says how many it takes at once; where all of its places are taken, the next request makes another connection,
//! since it would wait inside this one while its own time runs. Places are taken on the oldest connection that has one, so that those that are not needed any more fall idle.
//!
//! With TLS the target chooses between the two; without, it is HTTP/1.1, unless the settings know better.
//!
//! The interesting failure is a target that closes idle connections just when one is taken. hyper says of each request that fails whether it had begun
//! to write it. What was not begun goes over another connection, as if nothing had been; what was begun may have been received, and to repeat it
//! is for its lane.

use std::collections::HashMap;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::client::conn::{TrySendError, http1, http2};
use hyper::header::{HOST, HeaderValue};
use hyper::http::uri::{Authority, Parts, PathAndQuery, Scheme};
use hyper::{Request, Response, Uri};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::{Connection as _, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::CertificateDer;
use tokio::net::TcpStream;
use tower_service::Service;

use super::connect::{Timed, tls};
use super::preface::Overheard;

/// A ping on every HTTP/2 connection so often, lest a dead one takes everything that is sent to its host.
const PING_EVERY: Duration = Duration::from_secs(15);

/// No answer needs longer headers than this.
const ANSWER_HEADER_BYTES_MAX: u32 = 64 * 1024;

type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;
type Payload = Full<Bytes>;

/// Longer ones are handed to the system beside their head. To copy a shorter one behind it costs less; but the copy's memory stays with the connection.
const COPIED_BYTES_MAX: u64 = 16 * 1024;

/// Why there was no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// No connection.
    Connect(Box<dyn Error + Send + Sync>),
    /// Something went wrong on it.
    Broken(hyper::Error),
}

impl From<hyper::Error> for Failure {
    fn from(error: hyper::Error) -> Self {
        Failure::Broken(error)
    }
}

/// How connections are made, and how many are kept for how long.
pub(super) struct Keeping {
    pub(super) trusted: Vec<CertificateDer<'static>>,
    pub(super) connect_timeout: Duration,
    /// Idle ones of a host.
    pub(super) idle_max: usize,
    pub(super) idle_timeout: Duration,
}

/// All connections of a mediator.
pub(super) struct Connections {
    connector: Timed<HttpsConnector<HttpConnector>>,
    idle_max: usize,
    idle_timeout: Duration,
    hosts: Mutex<Hosts>,
    /// For the task that closes what has been idle for too long.
    this: Weak<Connections>,
    /// Whether that task is at work.
    swept: AtomicBool,
}

/// All hosts that somebody has an address of, or a connection to, and since the last look perhaps others.
struct Hosts {
    by_origin: HashMap<Origin, Arc<Host>>,
    /// So many are worth a look before the sweeper comes: a publisher may name another host with each message.
    many: usize,
}

/// The first look is at so many.
const HOSTS_MANY: usize = 2_048;

impl Hosts {
    fn new() -> Self {
        Hosts { by_origin: HashMap::new(), many: HOSTS_MANY }
    }

    fn find(&mut self, origin: &Origin) -> Arc<Host> {
        if self.by_origin.len() >= self.many {
            self.forget(|host| !host.kept().is_empty());
            // If all are in use, the next look is worth as much.
            self.many = (2 * self.by_origin.len()).max(HOSTS_MANY);
        }
        self.by_origin.entry(origin.clone()).or_default().clone()
    }

    /// Forgets those that nobody has an address of, unless they are kept for something else.
    fn forget(&mut self, mut is_kept: impl FnMut(&Host) -> bool) {
        self.by_origin.retain(|_, host| is_kept(host) || Arc::strong_count(host) > 1);
    }
}

/// What a connection leads to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Origin {
    scheme: Scheme,
    authority: Authority,
    /// HTTP/2 from the first byte.
    prior: bool,
}

/// Where requests go, made ready once for all of them.
pub(super) struct Address {
    origin: Origin,
    /// Found at the first request, not at each: to hash a name costs more than to take a connection.
    host: OnceLock<Arc<Host>>,
    /// HTTP/2 names the host with the path.
    absolute: Uri,
    /// HTTP/1.1 names the host in a header, and only the path in the first line.
    relative: Uri,
    header: HeaderValue,
}

impl Address {
    /// Of an absolute URI. `prior` is for targets that are known to speak HTTP/2 without TLS.
    pub(super) fn new(absolute: Uri, prior: bool) -> Option<Self> {
        let (scheme, authority) = (absolute.scheme()?.clone(), absolute.authority()?.clone());
        let usual = if scheme == Scheme::HTTPS { 443 } else { 80 };
        let header = match authority.port_u16().filter(|port| *port != usual) {
            Some(port) => HeaderValue::try_from(format!("{}:{port}", authority.host())),
            None => HeaderValue::from_str(authority.host()),
        };
        let mut parts = Parts::default();
        // One that is empty says that it is `/`, and is written as nothing.
        let path = absolute.path_and_query().filter(|path| path.as_str() != "/");
        parts.path_and_query = Some(path.cloned().unwrap_or(PathAndQuery::from_static("/")));
        let (relative, header) = (Uri::from_parts(parts).ok()?, header.ok()?);
        let origin = Origin { scheme, authority, prior };
        Some(Address { origin, host: OnceLock::new(), absolute, relative, header })
    }

    fn write_on(&self, request: &mut Request<Payload>, way: &Way) {
        match way {
            Way::Own(_) => {
                *request.uri_mut() = self.relative.clone();
                request.headers_mut().insert(HOST, self.header.clone());
            }
            Way::Shared(..) => {
                *request.uri_mut() = self.absolute.clone();
                request.headers_mut().remove(HOST);
            }
        }
    }
}

/// What is there of a host.
#[derive(Default)]
struct Host {
    kept: Mutex<Kept>,
    /// Passed one by one by those who want a place on a connection that is not there yet.
    gate: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Kept {
    /// The one that was used last is the last, and is used first.
    idle: Vec<Idle>,
    /// The oldest first.
    shared: Vec<Shared>,
}

struct Idle {
    link: Box<Link>,
    since: Instant,
}

struct Shared {
    sender: http2::SendRequest<Payload>,
    places: Arc<Places>,
    used: Instant,
}

/// How many requests a connection of HTTP/2 may have at once, and how many it has.
struct Places {
    most: usize,
    taken: AtomicUsize,
}

/// A request's place on a connection of HTTP/2, until it is dropped.
struct Place(Arc<Places>);

impl Place {
    /// Although there may be none: it then waits inside the connection.
    fn take(places: &Arc<Places>) -> Self {
        // A number and nothing else: whoever takes a place that is free holds the lock of the host.
        places.taken.fetch_add(1, Ordering::Relaxed);
        Place(places.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    fn taken(&self) -> usize {
        self.places.taken.load(Ordering::Relaxed)
    }

    fn has_place(&self) -> bool {
        !self.sender.is_closed() && self.taken() < self.places.most
    }

    fn take(&mut self, now: Instant) -> Way {
        self.used = now;
        Way::Shared(self.sender.clone(), Place::take(&self.places))
    }
}

impl Host {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn take(&mut self, now: Instant, idle_timeout: Duration) -> Option<Way> {
        if let Some(way) = self.take_place(now) {
            return Some(way);
        }
        // If the last is too old, so are those before it, and they will be swept.
        let fresh = self.idle.pop_if(|idle| now.duration_since(idle.since) <= idle_timeout)?;
        Some(Way::Own(fresh.link))
    }

    /// A free place on a connection of HTTP/2.
    fn take_place(&mut self, now: Instant) -> Option<Way> {
        self.shared.iter_mut().find(|shared| shared.has_place()).map(|shared| shared.take(now))
    }

    /// A place where there is none, on the connection that has the fewest requests too many.
    fn squeeze_in(&mut self, now: Instant) -> Option<Way> {
        let open = self.shared.iter_mut().filter(|shared| !shared.sender.is_closed());
        open.min_by_key(|shared| shared.taken()).map(|shared| shared.take(now))
    }

    /// Takes out what nobody has used for too long.
    fn sweep(&mut self, now: Instant, idle_timeout: Duration, old: &mut Vec<Idle>) {
        old.extend(self.idle.extract_if(.., |idle| now.duration_since(idle.since) > idle_timeout));
        let is_used = |shared: &Shared| shared.taken() > 0 || now.duration_since(shared.used) <= idle_timeout;
        self.shared.retain(|shared| !shared.sender.is_closed() && is_used(shared));
    }

    fn is_empty(&self) -> bool {
        self.idle.is_empty() && self.shared.is_empty()
    }
}

/// What a request goes over.
enum Way {
    Own(Box<Link>),
    Shared(http2::SendRequest<Payload>, Place),
}

/// A connection of HTTP/1.1. Whoever has it drives it.
struct Link {
    sender: http1::SendRequest<Payload>,
    /// Dropped as soon as it has ended: that is when hyper gives back the request that it has not begun to write.
    connection: Option<http1::Connection<Stream, Payload>>,
    /// Whether bodies are copied behind their heads.
    copies: bool,
}

impl Link {
    fn poll(&mut self, context: &mut Context<'_>) {
        if let Some(connection) = &mut self.connection
            && Pin::new(connection).poll(context).is_ready()
        {
            // What went wrong is told to the request that it happened to.
            self.connection = None;
        }
    }

    /// Waits for something that comes over this connection.
    async fn drive<T>(&mut self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        poll_fn(|context| {
            self.poll(context);
            future.as_mut().poll(context)
        })
        .await
    }

    /// Lets it come to rest, and forget whom to wake. Says whether it can take another request.
    fn is_free(&mut self) -> bool {
        self.poll(&mut Context::from_waker(Waker::noop()));
        self.connection.is_some() && self.sender.is_ready()
    }
}

impl Connections {
    pub(super) fn new(keeping: Keeping) -> Arc<Self> {
        Arc::new_cyclic(|this| Connections {
            connector: Timed::new(tls(&keeping.trusted), keeping.connect_timeout),
            idle_max: keeping.idle_max,
            idle_timeout: keeping.idle_timeout,
            hosts: Mutex::new(Hosts::new()),
            this: this.clone(),
            swept: AtomicBool::new(false),
        })
    }

    /// Sends a request, and waits for the head of the answer.
    pub(super) async fn send<'a>(
        &'a self,
        mut request: Request<Payload>,
        address: &'a Address,
    ) -> Result<Exchange<'a>, Failure> {
        let is_long = request.body().size_hint().lower() > COPIED_BYTES_MAX;
        let host = address.host.get_or_init(|| self.host(&address.origin));
        loop {
            let (way, is_new) = match self.take(host) {
                Some(way) => (way, false),
                // On the heap: it is rare, and every request that is under way would have the room for a handshake.
                None => Box::pin(self.connect(address, host, !is_long)).await?,
            };
            address.write_on(&mut request, &way);
            let sent = match way {
                Way::Own(mut link) => {
                    let answer = link.sender.try_send_request(request);
                    link.drive(answer).await.map(|response| (response, Some(link), None))
                }
                Way::Shared(mut sender, place) => {
                    sender.try_send_request(request).await.map(|response| (response, None, Some(place)))
                }
            };
            match sent {
                Ok((response, link, place)) => {
                    return Ok(Exchange { response, link, _place: place, is_long, host, home: self });
                }
                Err(error) => request = unsent(error, is_new)?,
            }
        }
    }

    fn hosts(&self) -> MutexGuard<'_, Hosts> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What there is of a host, or will be.
    fn host(&self, origin: &Origin) -> Arc<Host> {
        self.have_swept();
        self.hosts().find(origin)
    }

    /// Sees to it that there is a sweeper.
    fn have_swept(&self) {
        // Read first: mostly there is one, and what nobody writes is in every processor's cache.
        if !self.swept.load(Ordering::Relaxed) && !self.swept.swap(true, Ordering::Relaxed) {
            tokio::spawn(Sweeper(self.this.clone()).run(self.idle_timeout));
        }
    }

    /// Closes what nobody has used for too long, and forgets hosts that nobody has an address of.
    fn sweep(&self, now: Instant) {
        let mut old = Vec::new();
        self.hosts().forget(|host| {
            let mut kept = host.kept();
            kept.sweep(now, self.idle_timeout, &mut old);
            !kept.is_empty()
        });
        // Closed when nobody waits for a lock: that is a call of the system for each.
        drop(old);
    }

    fn take(&self, host: &Host) -> Option<Way> {
        host.kept().take(Instant::now(), self.idle_timeout)
    }

    /// Something to send over, and whether it is new: somebody else may have made one meanwhile.
    async fn connect(&self, address: &Address, host: &Host, copies: bool) -> Result<(Way, bool), Failure> {
        if !address.origin.prior && host.kept().shared.is_empty() {
            return self.connect_now(address, host, copies).await;
        }
        let _gate = host.gate.lock().await;
        if let Some(way) = self.take(host) {
            return Ok((way, false));
        }
        let connected = self.connect_now(address, host, copies).await;
        // A target that takes no more connections may answer in time all the same.
        connected.or_else(|failure| {
            let way = host.kept().squeeze_in(Instant::now());
            way.map(|way| (way, false)).ok_or(failure)
        })
    }

    async fn connect_now(
        &self,
        address: &Address,
        host: &Host,
        copies: bool,
    ) -> Result<(Way, bool), Failure> {
        let mut connector = self.connector.clone();
        poll_fn(|context| connector.poll_ready(context)).await.map_err(Failure::Connect)?;
        let stream = connector.call(address.absolute.clone()).await.map_err(Failure::Connect)?;
        if address.origin.prior || stream.connected().is_negotiated_h2() {
            let shared = speak_http2(stream).await?;
            self.have_swept();
            return Ok(share(&mut host.kept(), shared));
        }
        let mut builder = http1::Builder::new();
        builder.max_buf_size(ANSWER_HEADER_BYTES_MAX as usize).writev(!copies);
        let (sender, connection) = builder.handshake(stream).await?;
        Ok((Way::Own(Box::new(Link { sender, connection: Some(connection), copies })), true))
    }

    fn keep(&self, host: &Host, link: Box<Link>) {
        self.have_swept();
        let since = Instant::now();
        let mut kept = host.kept();
        let surplus = if kept.idle.len() >= self.idle_max {
            Some(link)
        } else {
            kept.idle.push(Idle { link, since });
            None
        };
        drop(kept);
        // Outside the lock: to close a connection is a call of the system.
        drop(surplus);
    }
}

/// Closes what has been idle for too long, as long as there is anybody who could connect.
struct Sweeper(Weak<Connections>);

impl Sweeper {
    async fn run(self, idle_timeout: Duration) {
        loop {
            tokio::time::sleep((idle_timeout / 2).max(Duration::from_millis(10))).await;
            let Some(connections) = self.0.upgrade() else { return };
            connections.sweep(Instant::now());
        }
    }
}

/// One that ends with its runtime lets another begin.
impl Drop for Sweeper {
    fn drop(&mut self) {
        if let Some(connections) = self.0.upgrade() {
            connections.swept.store(false, Ordering::Relaxed);
        }
    }
}

/// A place on a connection that has just been made, and true; or on another one that has come to have one meanwhile, so that no more are kept than it takes.
fn share(kept: &mut Kept, mut made: Shared) -> (Way, bool) {
    kept.shared.retain(|shared| !shared.sender.is_closed());
    let now = Instant::now();
    if let Some(way) = kept.take_place(now) {
        return (way, false);
    }
    let way = made.take(now);
    kept.shared.push(made);
    (way, true)
}

/// Comes back when the target has said how many requests it takes, or will not say so.
async fn speak_http2(stream: Stream) -> Result<Shared, Failure> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new());
    builder.max_header_list_size(ANSWER_HEADER_BYTES_MAX).keep_alive_interval(PING_EVERY);
    let (stream, limit) = Overheard::new(stream);
    let (sender, connection) = builder.handshake(stream).await?;
    // What goes wrong is told to the requests that it happens to.
    tokio::spawn(async move { drop(connection.await) });
    // One that takes none for the moment is asked all the same: its requests wait, as it wants them to.
    let most = limit.await.map_or(1, |limit| limit.max(1));
    let places = Arc::new(Places { most, taken: AtomicUsize::new(0) });
    Ok(Shared { sender, places, used: Instant::now() })
}

/// The request, if nothing of it was written, and there may be a better connection.
fn unsent(mut error: TrySendError<Request<Payload>>, is_new: bool) -> Result<Request<Payload>, Failure> {
    match error.take_message() {
        Some(request) if !is_new => Ok(request),
        _ => Err(Failure::Broken(error.into_error())),
    }
}

/// A request whose answer has begun.
pub(super) struct Exchange<'a> {
    response: Response<Incoming>,
    /// Of HTTP/1.1.
    link: Option<Box<Link>>,
    /// Of HTTP/2: free for others when the answer has been read, or is not wanted any more.
    _place: Option<Place>,
    is_long: bool,
    host: &'a Host,
    home: &'a Connections,
}

impl Exchange<'_> {
    /// The answer, as far as it has come.
    pub(super) fn response(&self) -> &Response<Incoming> {
        &self.response
    }

    /// The body up to the limit, and whether there was more. The connection is kept for others if the answer was read to its end.
    pub(super) async fn body(mut self, bytes_max: usize) -> Result<(Bytes, bool), hyper::Error> {
        let (body, cut) = self.read(bytes_max).await?;
        if let Some(mut link) = self.link.take() {
            // One that has copied a long body would keep its memory.
            let is_bloated = self.is_long && link.copies;
            if !cut && !is_bloated && link.is_free() {
                self.home.keep(self.host, link);
            }
        }
        Ok((body, cut))
    }

    async fn read(&mut self, bytes_max: usize) -> Result<(Bytes, bool), hyper::Error> {
        // Most answers are one piece, which is then handed on as it came.
        let mut first = Bytes::new();
        let mut all: Vec<u8> = Vec::new();
        while let Some(piece) = self.piece().await? {
            if first.is_empty() && all.is_empty() {
                first = piece;
            } else {
                if all.is_empty() {
                    all.extend_from_slice(&std::mem::take(&mut first));
                }
                all.extend_from_slice(&piece);
            }
            if first.len().max(all.len()) > bytes_max {
                all.truncate(bytes_max);
                first.truncate(bytes_max);
                return Ok((if all.is_empty() { first } else { all.into() }, true));
            }
        }
        Ok((if all.is_empty() { first } else { all.into() }, false))
    }

    /// The next piece of the body; trailers are passed over.
    async fn piece(&mut self) -> Result<Option<Bytes>, hyper::Error> {
        let body = self.response.body_mut();
        while !body.is_end_stream() {
            let frame = match &mut self.link {
                Some(link) => link.drive(body.frame()).await,
                None => body.frame().await,
            };
            let Some(frame) = frame.transpose()? else { break };
            if let Ok(piece) = frame.into_data() {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(number: usize) -> Origin {
        let authority = Authority::try_from(format!("host-{number}")).unwrap();
        Origin { scheme: Scheme::HTTP, authority, prior: false }
    }

    #[test]
    fn hosts_that_nobody_has_an_address_of_are_forgotten_before_there_are_too_many() {
        let mut hosts = Hosts::new();
        let known: Vec<_> = (0..HOSTS_MANY / 2).map(|number| hosts.find(&origin(number))).collect();
        for number in 0..10 * HOSTS_MANY {
            hosts.find(&origin(HOSTS_MANY + number));
            assert!(hosts.by_origin.len() <= HOSTS_MANY);
        }
        let same = |(number, host)| Arc::ptr_eq(host, &hosts.find(&origin(number)));
        assert!(known.iter().enumerate().all(same), "one that was in use was made again");
        let more: Vec<_> = (0..3 * HOSTS_MANY).map(|number| hosts.find(&origin(number))).collect();
        assert!(hosts.by_origin.len() >= more.len(), "all of them are in use");
    }
}
