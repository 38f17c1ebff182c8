//! The brokers that can be configured: what each kind is called, how its settings are read, and what is opened from them.
//!
//! `config.rs` hands over the sections of `laneway.sources` and `laneway.sinks`; each is read by the module of its kind and becomes a [`Broker`]. From it the
//! service opens sources and sinks, the command line opens sinks from a URL ([`from_url`]), and `laneway doctor` asks what is wrong with it.
//!
//! A kind is one file beside this one and one line in [`KINDS`].
//!
//! # A source that is not there
//!
//! The service does not wait for its brokers. It reads a [`Configured`] source, which opens the real one when it is first asked for deliveries, and anew
//! when the real one says that it is closed. Until then every answer is [`SourceError::Unavailable`], which the router takes as what it is: it asks again
//! after a while that grows, gives a warning, and says so to whoever asks whether the service is ready.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_config::Section;
use tokio::time::Instant;

use super::sink::{Sink, SinkError};
use super::{Delivery, Depth, Disposal, Keeps, Receipt, Settled, Source, SourceError, Wants};

/// How long an opening may take before it counts as failed and is tried again.
const OPENING: Duration = Duration::from_secs(30);

/// What a configured broker is for: some settings are for one of them only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Messages are read from it.
    Source,
    /// Messages are published to it.
    Sink,
}

/// Settings of one kind of broker, checked as far as that can be done without asking it.
pub trait Broker: Comparable + fmt::Debug + Send + Sync {
    /// What the kind is called in the configuration.
    fn kind(&self) -> &'static str;

    /// Opens a source of this name: connects, and finds what it reads from, or makes it if the settings say so. Comes back with an error that says
    /// how to mend it; dropping the future leaves nothing behind.
    fn open_source(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>>;

    /// Opens a sink of this name.
    fn open_sink(&self, name: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>>;

    /// Looks whether it can be reached, whether what is needed is there, and whether the order of groups is kept with these settings. Changes nothing,
    /// and comes back within half a minute.
    fn examine<'a>(&'a self, examination: &'a Examination) -> BoxFuture<'a, Vec<Finding>>;
}

/// What compares two brokers whose kinds are not known: settings that are equal need not be opened anew.
pub trait Comparable: Any {
    /// Whether the other one is of the same type, and equal.
    fn same_as(&self, other: &dyn Any) -> bool;
}

impl<T: Any + PartialEq> Comparable for T {
    fn same_as(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<T>().is_some_and(|other| self == other)
    }
}

/// Whether two brokers have the same settings.
pub fn are_same(one: &dyn Broker, other: &dyn Broker) -> bool {
    one.same_as(other)
}

/// What an examination is about.
#[derive(Clone, Debug)]
pub struct Examination {
    /// The name in the configuration.
    pub name: Arc<str>,
    /// What it is for.
    pub role: Role,
    /// How long a delivery is leased.
    pub lease: Duration,
    /// How long one attempt at a target may take.
    pub attempt: Duration,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Fine,
    /// Works, and a promise is weaker than it could be.
    Warning,
    /// Does not work, or breaks a promise.
    Error,
}

/// One thing that an examination found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What is so.
    pub what: String,
    /// What to do about it.
    pub mend: Option<String>,
}

impl Finding {
    /// Something is as it should be.
    pub fn fine(what: impl Into<String>) -> Self {
        Finding { level: Level::Fine, what: what.into(), mend: None }
    }

    /// A promise is weaker than it could be.
    pub fn warning(what: impl Into<String>, mend: impl Into<String>) -> Self {
        Finding { level: Level::Warning, what: what.into(), mend: Some(mend.into()) }
    }

    /// Something does not work, or a promise is broken.
    pub fn error(what: impl Into<String>, mend: impl Into<String>) -> Self {
        Finding { level: Level::Error, what: what.into(), mend: Some(mend.into()) }
    }
}

// ── the kinds ─────────────────────────────────────────────────────────────────────────────────────────────────────────

/// Reads the settings of one kind, `kind` itself excepted. What is wrong is noted in the section, as everywhere in the configuration.
pub type Read = fn(&mut Section<'_>, Role) -> Arc<dyn Broker>;

/// Reads a URL as a sink. The error says what would be right, without the user's part of the URL.
pub type FromUrl = fn(&str) -> Result<Arc<dyn Broker>, String>;

/// A kind of broker.
#[derive(Clone, Copy)]
pub struct Kind {
    /// What it is called in the configuration, and the cargo feature that it needs.
    pub name: &'static str,
    /// URLs that begin with one of these are its own.
    pub schemes: &'static [&'static str],
    /// Its functions, if the feature is on.
    pub compiled: Option<(Read, FromUrl)>,
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kind({}, compiled: {})", self.name, self.compiled.is_some())
    }
}

/// `kind!("name", [schemes], module)`: the module has `read` and `from_url`, and is there when the feature `name` is on.
macro_rules! kind {
    ($name:literal, [$($scheme:literal),*], $module:ident) => {
        Kind {
            name: $name,
            schemes: &[$($scheme),*],
            #[cfg(feature = $name)]
            compiled: Some((super::$module::read, super::$module::from_url)),
            #[cfg(not(feature = $name))]
            compiled: None,
        }
    };
}

/// All kinds. A feature that is not on is known as well, so that the error can name it.
pub const KINDS: &[Kind] = &[
    kind!("nats", ["nats", "tls"], nats),
    kind!("rabbitmq", ["amqp", "amqps"], rabbitmq),
    kind!("activemq", ["stomp"], activemq),
    kind!("sqs", ["sqs", "sqs+http", "sqs+https"], sqs),
    kind!("kafka", ["kafka"], kafka),
    kind!("postgres", ["postgres", "postgresql"], postgres),
];

/// Reads one section of `laneway.sources` or `laneway.sinks`.
pub fn read(s: &mut Section<'_>, role: Role) -> Option<Arc<dyn Broker>> {
    let choices: Vec<(&str, Option<Kind>)> = KINDS.iter().map(|kind| (kind.name, Some(*kind))).collect();
    let before = s.problem_count();
    let kind = match choices.is_empty() {
        true => {
            s.problem("kind", "this program was built without any broker");
            None
        }
        false => s.one_of("kind", &choices),
    };
    let compiled = kind.filter(|_| s.problem_count() == before).and_then(|kind| {
        if kind.compiled.is_none() {
            let what = format!("is not in this program: build it with `--features {}`", kind.name);
            s.problem("kind", what);
        }
        kind.compiled
    });
    match compiled {
        Some((read, _)) => Some(read(s, role)),
        None => {
            // Without the kind nobody knows which keys are right.
            for key in s.keys() {
                s.has(&key);
            }
            None
        }
    }
}

/// The broker that a URL names, to publish to.
pub fn from_url(url: &str) -> Result<Arc<dyn Broker>, String> {
    let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase()).unwrap_or_default();
    let Some(kind) = KINDS.iter().find(|kind| kind.schemes.contains(&scheme.as_str())) else {
        let known: Vec<&str> = KINDS.iter().flat_map(|kind| kind.schemes).copied().collect();
        return Err(match known.is_empty() {
            true => "this program was built without any broker".to_owned(),
            false => format!("{scheme:?} is no scheme of a broker; there are {}", known.join(", ")),
        });
    };
    match kind.compiled {
        Some((_, from_url)) => from_url(url),
        None => Err(format!("{scheme} is not in this program: build it with `--features {}`", kind.name)),
    }
}

// ── a source that is opened when it is needed ─────────────────────────────────────────────────────────────────────────

/// A source as it is configured, open or not.
pub struct Configured {
    name: Arc<str>,
    broker: Arc<dyn Broker>,
    /// The real one, while it is open.
    open: ArcSwapOption<Arc<dyn Source>>,
    /// How often it has closed without our doing.
    closings: AtomicU64,
    /// One opening at a time.
    opening: tokio::sync::Mutex<()>,
}

impl fmt::Debug for Configured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Configured")
            .field("name", &self.name)
            .field("broker", &self.broker)
            .finish_non_exhaustive()
    }
}

impl Configured {
    /// Not open yet.
    pub fn new(name: impl Into<Arc<str>>, broker: Arc<dyn Broker>) -> Self {
        Configured {
            name: name.into(),
            broker,
            open: ArcSwapOption::empty(),
            closings: AtomicU64::new(0),
            opening: tokio::sync::Mutex::default(),
        }
    }

    async fn opened(&self) -> Result<Arc<dyn Source>, SourceError> {
        if let Some(open) = self.open.load_full() {
            return Ok(Arc::clone(&open));
        }
        let _alone = self.opening.lock().await;
        if let Some(open) = self.open.load_full() {
            return Ok(Arc::clone(&open));
        }
        let opening = tokio::time::timeout(OPENING, self.broker.open_source(Arc::clone(&self.name)));
        let late =
            |_| SourceError::Unavailable(format!("{} does not answer after {OPENING:?}", self.broker.kind()));
        let source = opening.await.map_err(late)??;
        self.open.store(Some(Arc::new(Arc::clone(&source))));
        Ok(source)
    }

    fn there(&self) -> Result<Arc<dyn Source>, SourceError> {
        let closed = || SourceError::Unavailable("the source is not open".to_owned());
        self.open.load_full().map(|open| Arc::clone(&*open)).ok_or_else(closed)
    }

    /// A source that is closed without our doing is opened anew at the next claim. One that says so late may have been replaced already.
    fn unless_closed<T>(
        &self,
        source: &Arc<dyn Source>,
        answer: Result<T, SourceError>,
    ) -> Result<T, SourceError> {
        if matches!(answer, Err(SourceError::Closed)) {
            if let_go(&self.open, source) {
                self.closings.fetch_add(1, Release);
            }
            return Err(SourceError::Unavailable("the source was closed; it is opened anew".to_owned()));
        }
        answer
    }
}

/// Forgets what is open, if it is still this one.
pub(super) fn let_go<T: ?Sized>(open: &ArcSwapOption<Arc<T>>, gone: &Arc<T>) -> bool {
    let now = open.load();
    let is_it = |open: &Option<Arc<Arc<T>>>| open.as_ref().is_some_and(|open| Arc::ptr_eq(&**open, gone));
    is_it(&now) && is_it(&open.compare_and_swap(&*now, None))
}

impl Source for Configured {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        self.broker.kind()
    }

    fn settles_at_once(&self) -> usize {
        self.open.load().as_ref().map_or(1, |open| open.settles_at_once())
    }

    fn gathers_for(&self) -> Duration {
        self.open.load().as_ref().map_or(Duration::ZERO, |open| open.gathers_for())
    }

    fn is_numbered(&self) -> bool {
        self.open.load().as_ref().is_none_or(|open| open.is_numbered())
    }

    fn is_open(&self) -> bool {
        self.open.load().as_ref().is_some_and(|open| open.is_open())
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        async move {
            let source = self.opened().await?;
            self.unless_closed(&source, source.claim(wants).await)
        }
        .boxed()
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        async move {
            let source = self.there()?;
            self.unless_closed(&source, source.settle(disposals).await)
        }
        .boxed()
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        async move {
            let source = self.there()?;
            self.unless_closed(&source, source.extend(receipts, lease).await)
        }
        .boxed()
    }

    fn losses(&self, now: Instant) -> u64 {
        // One that is opened anew begins to count anew, and must not be taken for the one before.
        let closings = self.closings.load(Acquire) << 32;
        self.open.load().as_ref().map_or(closings, |open| closings + open.losses(now))
    }

    /// What was claimed of one that has closed is nobody's any more.
    fn are_good(&self, receipts: &[Receipt], now: Instant) -> Vec<bool> {
        let open = self.open.load();
        open.as_ref().map_or_else(|| vec![false; receipts.len()], |open| open.are_good(receipts, now))
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        async move { self.there()?.depth().await }.boxed()
    }

    fn keeps(&self) -> Result<Option<Arc<dyn Keeps>>, SourceError> {
        self.there()?.keeps()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            if let Some(open) = self.open.swap(None) {
                open.close().await;
            }
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::sync::Notify;

    use super::*;

    const WANTS: Wants = Wants { most: 1, wait: Duration::ZERO, lease: Duration::from_secs(1) };

    /// The first source of it is closed when it is asked for the first time, and says so to whoever settles only when it is told to.
    #[derive(Debug, Default)]
    struct Closing {
        opened: AtomicUsize,
        late: Arc<Notify>,
    }

    impl PartialEq for Closing {
        fn eq(&self, _: &Self) -> bool {
            true
        }
    }

    struct Opened {
        is_closed: bool,
        late: Arc<Notify>,
    }

    impl Broker for Closing {
        fn kind(&self) -> &'static str {
            "closing"
        }

        fn open_source(&self, _: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Source>, SourceError>> {
            let is_closed = self.opened.fetch_add(1, Release) == 0;
            let opened = Opened { is_closed, late: Arc::clone(&self.late) };
            async { Ok(Arc::new(opened) as Arc<dyn Source>) }.boxed()
        }

        fn open_sink(&self, _: Arc<str>) -> BoxFuture<'_, Result<Arc<dyn Sink>, SinkError>> {
            unreachable!("nothing is published")
        }

        fn examine<'a>(&'a self, _: &'a Examination) -> BoxFuture<'a, Vec<Finding>> {
            unreachable!("nobody examines it")
        }
    }

    impl Opened {
        fn answer<T>(&self, answer: T) -> Result<T, SourceError> {
            if self.is_closed { Err(SourceError::Closed) } else { Ok(answer) }
        }
    }

    impl Source for Opened {
        fn name(&self) -> &str {
            "orders"
        }

        fn claim(&self, _: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
            async { self.answer(Vec::new()) }.boxed()
        }

        fn settle(
            &self,
            disposals: Vec<(Receipt, Disposal)>,
        ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
            async move {
                self.late.notified().await;
                self.answer(vec![Settled::Settled; disposals.len()])
            }
            .boxed()
        }

        fn extend(
            &self,
            receipts: Vec<Receipt>,
            _: Duration,
        ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
            async move { self.answer(vec![Settled::Settled; receipts.len()]) }.boxed()
        }

        fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
            async { self.answer(Depth::default()) }.boxed()
        }
    }

    #[tokio::test]
    async fn one_that_says_late_that_it_is_closed_leaves_the_next_one_open() {
        let broker = Arc::new(Closing::default());
        let source = Configured::new("orders", Arc::clone(&broker) as Arc<dyn Broker>);
        source.opened().await.expect("open");
        let mut late = source.settle(Vec::new());
        assert!(late.as_mut().now_or_never().is_none(), "it is not told yet");
        assert!(matches!(source.claim(WANTS).await, Err(SourceError::Unavailable(_))), "it is closed");
        assert!(source.claim(WANTS).await.expect("it is opened anew").is_empty());
        let losses = source.losses(Instant::now());
        broker.late.notify_one();
        assert!(matches!(late.await, Err(SourceError::Unavailable(_))));
        assert!(source.is_open() && source.claim(WANTS).await.is_ok());
        assert_eq!((broker.opened.load(Acquire), source.losses(Instant::now())), (2, losses));
    }
}
