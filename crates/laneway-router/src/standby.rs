//! One router of several works, the others stand by: for sources that cannot be shared, and for whoever wants exactly one at work.
//!
//! A [`Lease`] is held by one at a time, for a while; Postgres has one (`source/postgres/lease.rs`), and NATS (`source/nats/lease.rs`). [`Standby::begin`] tries to take it, renews
//! it, and says by a [`Role`] whether this process may work. `laneway serve` starts its service when it may, with a [`Turn`], and ends it when the turn
//! is over; while it waits, [`answer_meanwhile`] tells whoever asks that it lives and is not ready.
//!
//! # Why two never work at the same time
//!
//! 1. Only the server's clock decides whether a lease has ended, and a lease is taken in one statement. NATS tells no time: there the clock of whoever waits does, and counts from
//!    when it first saw what the holder had written.
//! 2. A holder counts its time by its own clock from *before* it asked, so its time is up before the server's is, however long the answer took. It
//!    stops a quarter of the time earlier still ([`MARGIN`]), which is left for stopping.
//! 3. Whoever is about to begin something asks [`Standby::is_active`], which looks at the clock and not at a flag: a process that was frozen, or a
//!    machine that was paused, finds its time up at once when it goes on.
//! 4. What was begun in time can still end late: a call that is under way cannot be taken back. The token of the lease grows with every holder, and
//!    goes with each call (`Laneway-Epoch`), so that a target can refuse a call of a holder that it knows to be gone.
//! 5. A server that has lost its last writes (a replica that took over before it had them) gives a token again. So a lease names its holder as nobody else is named, and is renewed
//!    and let go by that holder only. The token itself is no better than what the server keeps.
//!
//! The third line leans on a clock that runs while the process does not. Linux stops it while the whole machine sleeps; then the fourth line
//! is what is left.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::message::Secret;
use crate::source::SourceError;

/// A holder stops when this part of its time is left.
const MARGIN: u32 = 4;

/// How often in its time a lease is renewed, and asked for by those who wait.
const OFTEN: u32 = 4;

/// What only one can have at a time.
pub trait Lease: Send + Sync + 'static {
    /// What it is called, for logs.
    fn name(&self) -> &str;

    /// Takes it for a while, if nobody has it. The answer is its token, larger than every one before.
    fn acquire(&self, time: Duration) -> BoxFuture<'_, Result<Option<u64>, SourceError>>;

    /// Has it for a while longer. False if the token is not the holder's any more: its time was up, or somebody else has it, be it under the same token.
    fn renew(&self, token: u64, time: Duration) -> BoxFuture<'_, Result<bool, SourceError>>;

    /// Lets it go, so that nobody has to wait for its end.
    fn release(&self, token: u64) -> BoxFuture<'_, Result<(), SourceError>>;

    /// Looks at it, and changes nothing.
    fn look(&self) -> BoxFuture<'_, Result<Sight, SourceError>>;
}

/// What can be seen of a lease without taking it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    /// Whether whoever looks is allowed to take it.
    pub is_allowed: bool,
    /// Who had it last; nothing if nobody ever did.
    pub last: Option<Holder>,
}

/// Who has a lease, or had it last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// As it calls itself.
    pub name: String,
    /// Its token.
    pub token: u64,
    /// How much longer, if nobody renews it. Zero if it is over.
    pub left: Duration,
}

/// Where a lease is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// By its scheme, which kind of lease it is.
    pub url: Secret,
    /// Those with the same name take turns.
    pub name: String,
    /// How long it lasts without being renewed.
    pub time: Duration,
}

impl Settings {
    /// Whether there is such a lease, as far as can be seen without asking.
    pub fn check(&self) -> Result<(), String> {
        match self.url.expose().split("://").next() {
            Some("postgres" | "postgresql") if cfg!(feature = "postgres") => Ok(()),
            Some("postgres" | "postgresql") => {
                Err("is not in this program: build it with `--features postgres`".to_owned())
            }
            Some("nats" | "tls") if cfg!(feature = "nats") => Ok(()),
            Some("nats" | "tls") => {
                Err("is not in this program: build it with `--features nats`".to_owned())
            }
            _ => Err(
                "must be the address of a Postgres, such as postgres://user@host/database, or of a NATS, such as nats://host:4222"
                    .to_owned(),
            ),
        }
    }

    /// Opens it. Nothing is connected yet.
    pub fn open(&self) -> Result<Arc<dyn Lease>, String> {
        self.check()?;
        #[cfg(any(feature = "postgres", feature = "nats"))]
        let holder = holder();
        #[cfg(feature = "postgres")]
        if self.url.expose().starts_with("postgres") {
            let lease = crate::source::postgres::PostgresLease::open(&self.url, &self.name, &holder);
            return lease.map(|lease| Arc::new(lease) as Arc<dyn Lease>).map_err(|error| error.to_string());
        }
        #[cfg(feature = "nats")]
        if !self.url.expose().starts_with("postgres") {
            let lease = crate::source::nats::NatsLease::open(&self.url, &self.name, &holder)?;
            return Ok(Arc::new(lease));
        }
        Err("this program has no lease".to_owned())
    }
}

/// A name that nobody else has, and that says where to look: in containers every process may be the first, and hosts may be called the same.
#[cfg(any(feature = "postgres", feature = "nats"))]
fn holder() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::env::var("HOSTNAME"));
    let host = host.unwrap_or_default();
    let host = if host.trim().is_empty() { "a host" } else { host.trim() };
    format!("{host}, process {}, {:08x}", std::process::id(), fastrand::u32(..))
}

/// A turn to work: good for as long as the lease is held under its token.
#[derive(Clone)]
pub struct Turn {
    /// Whose turn it is.
    pub standby: Arc<Standby>,
    /// The token that it began with.
    pub token: u64,
}

impl Turn {
    /// Whether something may begin now.
    pub fn is_on(&self) -> bool {
        self.standby.token() == Some(self.token)
    }

    /// Lasts until it is over.
    pub async fn over(&self) {
        self.standby.lost(self.token).await;
    }
}

impl std::fmt::Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn").field("token", &self.token).finish_non_exhaustive()
    }
}

/// What a router may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Somebody else works, as far as is known.
    Waiting,
    /// It works, under this token.
    Active {
        /// Of its lease.
        token: u64,
    },
}

/// One who works or waits. Dropped, it stops renewing.
pub struct Standby {
    role: watch::Receiver<Role>,
    shared: Arc<Shared>,
    keeper: JoinHandle<()>,
}

struct Shared {
    lease: Arc<dyn Lease>,
    time: Duration,
    /// The token and until when work may begin under it.
    held: Mutex<Option<(u64, Instant)>>,
    /// What the last question failed with, if it did.
    trouble: Mutex<Option<String>>,
}

impl Standby {
    /// Begins to ask for a lease. `time` is how long it lasts without being renewed.
    pub fn begin(lease: Arc<dyn Lease>, time: Duration) -> Standby {
        let shared = Arc::new(Shared { lease, time, held: Mutex::default(), trouble: Mutex::default() });
        let (tell, role) = watch::channel(Role::Waiting);
        let keeper = tokio::spawn(keep(Arc::clone(&shared), tell));
        Standby { role, shared, keeper }
    }

    /// What it may do now, and when that changes.
    pub fn role(&self) -> watch::Receiver<Role> {
        self.role.clone()
    }

    /// Whether something may begin now.
    pub fn is_active(&self) -> bool {
        self.shared.token().is_some()
    }

    /// The token under which something may begin now.
    pub fn token(&self) -> Option<u64> {
        self.shared.token()
    }

    /// What the last question to the lease failed with, if it did.
    pub fn trouble(&self) -> Option<String> {
        self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until it may work. The answer is the token.
    pub async fn active(&self) -> u64 {
        let mut role = self.role();
        loop {
            if let Role::Active { token } = *role.borrow_and_update() {
                return token;
            }
            if role.changed().await.is_err() {
                // Nobody renews it any more, so this never works again.
                futures_util::future::pending::<()>().await;
            }
        }
    }

    /// Lasts until the lease with this token is not held any more.
    pub async fn lost(&self, token: u64) {
        let mut role = self.role();
        while *role.borrow_and_update() == (Role::Active { token }) {
            if role.changed().await.is_err() {
                return;
            }
        }
    }

    /// Ends it: stops renewing, and lets the lease go if it is held. The work must have ended before.
    pub async fn end(&self) {
        self.keeper.abort();
        let held = self.shared.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((token, _)) = held {
            let _ = timeout(self.shared.time, self.shared.lease.release(token)).await;
        }
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Shared {
    fn token(&self) -> Option<u64> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.filter(|(_, until)| Instant::now() < *until).map(|(token, _)| token)
    }

    fn hold(&self, held: Option<(u64, Instant)>) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = held;
    }

    fn note(&self, error: Option<&SourceError>) {
        let trouble = error.map(ToString::to_string);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// Until when work may begin, for a lease that was asked for at this instant.
    fn until(&self, asked: Instant) -> Instant {
        asked + self.time - self.time / MARGIN
    }
}

/// Takes the lease, keeps it, loses it, and begins again.
async fn keep(shared: Arc<Shared>, tell: watch::Sender<Role>) {
    loop {
        let asked = Instant::now();
        let acquired = timeout(shared.time / 2, shared.lease.acquire(shared.time)).await;
        let acquired = acquired.unwrap_or_else(|_| Err(late(&*shared.lease)));
        shared.note(acquired.as_ref().err());
        match acquired {
            // An answer that took so long that its time is up already is no lease.
            Ok(Some(token)) if Instant::now() < shared.until(asked) => {
                shared.hold(Some((token, shared.until(asked))));
                tell.send_replace(Role::Active { token });
                renew(&shared, token, shared.until(asked)).await;
                shared.hold(None);
                tell.send_replace(Role::Waiting);
            }
            _ => sleep(shared.time / OFTEN).await,
        }
    }
}

/// Renews a lease until it is lost.
async fn renew(shared: &Shared, token: u64, mut until: Instant) {
    loop {
        sleep_until((Instant::now() + shared.time / OFTEN).min(until)).await;
        let asked = Instant::now();
        if asked >= until {
            return;
        }
        match timeout_at(until, shared.lease.renew(token, shared.time)).await {
            Ok(Ok(true)) => {
                until = shared.until(asked);
                shared.hold(Some((token, until)));
                shared.note(None);
            }
            Ok(Ok(false)) => return,
            Ok(Err(error)) => shared.note(Some(&error)),
            Err(_) => return shared.note(Some(&late(&*shared.lease))),
        }
    }
}

fn late(lease: &dyn Lease) -> SourceError {
    SourceError::Unavailable(format!("the lease {} was not answered in time", lease.name()))
}

/// Answers at the service's address while it stands by: it is alive, and not ready. Dropped, it lets the address go.
pub async fn answer_meanwhile(address: std::net::SocketAddr) -> std::io::Result<std::convert::Infallible> {
    use axum::Json;
    use axum::http::StatusCode;
    use axum::routing::get;
    let told = || async { Json(serde_json::json!({ "status": "standby" })) };
    let waits =
        || async { (StatusCode::SERVICE_UNAVAILABLE, Json(serde_json::json!({ "status": "standby" }))) };
    let app = axum::Router::new().route("/health/live", get(told)).fallback(waits);
    let listener = tokio::net::TcpListener::bind(address).await?;
    axum::serve(listener, app).await?;
    Err(std::io::Error::other("the server has ended"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mediator::{
        Call, HttpMediator, HttpSettings, Mediator, Mediators, Signer, Simulated, Verdict,
    };
    use crate::message::Message;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    /// A lease on a server whose clock is the test's.
    #[derive(Default)]
    struct OnPaper {
        state: Mutex<(u64, Option<Instant>)>,
        is_away: AtomicBool,
    }

    impl OnPaper {
        fn ask<T>(&self, answer: impl FnOnce(&mut (u64, Option<Instant>)) -> T) -> Result<T, SourceError> {
            match self.is_away.load(SeqCst) {
                true => Err(SourceError::Unavailable("away".to_owned())),
                false => Ok(answer(&mut self.state.lock().unwrap())),
            }
        }
    }

    impl Lease for OnPaper {
        fn name(&self) -> &str {
            "paper"
        }

        fn acquire(&self, time: Duration) -> BoxFuture<'_, Result<Option<u64>, SourceError>> {
            let answer = self.ask(|(token, ends)| {
                let is_free = ends.is_none_or(|ends| ends <= Instant::now());
                is_free.then(|| {
                    (*token, *ends) = (*token + 1, Some(Instant::now() + time));
                    *token
                })
            });
            Box::pin(futures_util::future::ready(answer))
        }

        fn renew(&self, token: u64, time: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
            let answer = self.ask(|(now, ends)| {
                let is_held = *now == token && ends.is_some_and(|ends| ends > Instant::now());
                if is_held {
                    *ends = Some(Instant::now() + time);
                }
                is_held
            });
            Box::pin(futures_util::future::ready(answer))
        }

        fn look(&self) -> BoxFuture<'_, Result<Sight, SourceError>> {
            let answer = self.ask(|(token, ends)| {
                let left = ends.map_or(Duration::ZERO, |ends| ends.saturating_duration_since(Instant::now()));
                let holder = Holder { name: "somebody".to_owned(), token: *token, left };
                Sight { is_allowed: true, last: (*token > 0).then_some(holder) }
            });
            Box::pin(futures_util::future::ready(answer))
        }

        fn release(&self, token: u64) -> BoxFuture<'_, Result<(), SourceError>> {
            let answer = self.ask(|(now, ends)| {
                if *now == token {
                    *ends = None;
                }
            });
            Box::pin(futures_util::future::ready(answer))
        }
    }

    const TIME: Duration = Duration::from_secs(12);

    #[tokio::test(start_paused = true)]
    async fn one_works_and_the_other_takes_over_with_a_larger_token() {
        let paper = Arc::new(OnPaper::default());
        let one = Standby::begin(Arc::clone(&paper) as Arc<dyn Lease>, TIME);
        assert_eq!(one.active().await, 1);
        let other = Standby::begin(Arc::clone(&paper) as Arc<dyn Lease>, TIME);
        // Renewed for as long as it likes.
        assert!(timeout(TIME * 20, other.active()).await.is_err());
        assert!(one.is_active() && !other.is_active());
        one.end().await;
        assert_eq!(
            timeout(TIME / 2, other.active()).await,
            Ok(2),
            "nobody waits for a lease that was let go"
        );
    }

    /// "Leadership regain panicked".
    #[tokio::test(start_paused = true)]
    async fn pitfall_004_other_a_holder_that_is_cut_off_stops_before_its_time_is_up_and_comes_back() {
        let paper = Arc::new(OnPaper::default());
        let cut_off = Standby::begin(Arc::clone(&paper) as Arc<dyn Lease>, TIME);
        let token = cut_off.active().await;
        paper.is_away.store(true, SeqCst);
        let began = Instant::now();
        cut_off.lost(token).await;
        let ends = paper.state.lock().unwrap().1.expect("it was held");
        assert!(!cut_off.is_active());
        assert!(
            ends >= Instant::now() + TIME / MARGIN - Duration::from_millis(10),
            "stopped with time to spare"
        );
        assert!(began.elapsed() > TIME / 4, "and not at the first failure");
        assert!(cut_off.trouble().is_some());
        paper.is_away.store(false, SeqCst);
        assert_eq!(timeout(TIME * 2, cut_off.active()).await, Ok(token + 1), "it comes back by itself");
    }

    /// "Polling continued after loss": whatever is still taken in, nothing of it is attempted.
    #[tokio::test(start_paused = true)]
    async fn pitfall_004_other_who_has_lost_its_turn_attempts_nothing() {
        let paper = Arc::new(OnPaper::default());
        let standby = Arc::new(Standby::begin(Arc::clone(&paper) as Arc<dyn Lease>, TIME));
        let turn = Turn { token: standby.active().await, standby: Arc::clone(&standby) };
        let http = HttpMediator::new(HttpSettings::default(), Signer::default());
        let mediators = Mediators::new(http, Simulated::new(1)).in_turn(Some(turn.clone()));
        let json = br#"{"id": "m", "poolCode": "p", "mediationType": "SIMULATED"}"#;
        let message = &Message::parse(json).unwrap();
        let call = Call { message, key: "g", sequence: 1, attempt: 1, traceparent: None };
        assert_eq!(mediators.mediate(call).await, Verdict::Done);
        paper.is_away.store(true, SeqCst);
        turn.over().await;
        assert!(matches!(mediators.mediate(call).await, Verdict::Wait { called: false, .. }));
        paper.is_away.store(false, SeqCst);
        assert!(standby.active().await > turn.token);
        assert!(
            matches!(mediators.mediate(call).await, Verdict::Wait { called: false, .. }),
            "its turn was that one"
        );
    }

    /// Nobody tells a frozen process that its time is up; it must see it itself, before any of its tasks has run.
    #[tokio::test(start_paused = true)]
    async fn a_frozen_holder_finds_its_time_up() {
        let paper = Arc::new(OnPaper::default());
        let frozen = Standby::begin(Arc::clone(&paper) as Arc<dyn Lease>, TIME);
        frozen.active().await;
        // The clock goes on, and none of the process's tasks does.
        let held = *frozen.shared.held.lock().unwrap();
        frozen.shared.hold(held.map(|(token, until)| (token, until - TIME)));
        assert!(!frozen.is_active());
        assert_eq!(frozen.token(), None);
    }
}
