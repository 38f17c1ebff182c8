//! The network ingress of document 003: tasks come in as lines over TCP and run in order per family, in parallel across families.
//!
//! ```text
//!  socket ─► frame ─► line ─► desk ─► engine ─► mediator ─► verdict ─► answer ─► socket
//!  bytes      finds    JSON,   bounds, partitions  another    done, wait,  ACK, REJ,
//!             newlines checked places  by hash,    room of    again,       DONE, FAIL
//!                                      families    this crate final
//! ```
//!
//! There is a task per connection (`connection.rs`), an acceptor that starts them, and an engine with `partitions × workers` slots. The document's dispatcher
//! thread and ring per partition are the engine's admission: a line is placed, bounded and queued by the task that has read it, and the bound counts what is
//! outstanding, so it is reached before memory is (pitfall 003.5). The protocol that clients see is in `docs/guide/ingress.md`.
//!
//! # Shutdown, in steps
//!
//! 1. The listener is closed, and the engine takes no more. Connections stay: what still comes is answered with `REJ:CLOSED`.
//! 2. The engine drains until the deadline, waits for what runs, and gives back the rest. Whoever waits for a completion gets `DONE` or `FAIL`.
//! 3. Connections stop reading, write what they owe, and close; those that are not done after twice the linger time are cut off.

mod answer;
mod connection;
mod frame;
mod line;
mod settings;
mod stats;

use std::{
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use laneway::{Account, BuildError, Delivery, Engine, Handle, Outcome, Overflow, Reason, Topology};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{JoinHandle, JoinSet},
};

pub use answer::{ANSWER_BYTES_MAX, Answer, DETAIL_BYTES_MAX, Rejection};
pub use frame::{Frame, Frames, Rest};
pub use line::{BadLine, DEPTH_MAX, Family, Line, POOL_CODE, SIMULATED_DEFAULT};
pub use settings::{InvalidSettings, LINE_BYTES_MIN, PARTITIONS_MAX, Settings, WORKERS_MAX};
pub use stats::{PartitionStats, Stats};

use answer::Owed;
use connection::{Desk, Weight};
use stats::Counters;

use crate::{
    mediator::{Call, Mediator, Verdict},
    message::Message,
};

/// How many unwanted connections are told so at the same time; beyond it they are closed without a word.
const TURNED_AWAY_MAX: usize = 64;

/// How long the acceptor waits when the machine cannot give it a connection: it is short of something, and trying at once would not help.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What travels through the engine: a message, and who waits to hear of it.
pub struct Task {
    message: Message,
    owed: Option<Owed>,
    /// Its number in the order of first attempts; 0 before.
    sequence: u64,
    /// It waits for its target, and for nothing of its own.
    waits: bool,
    _weight: Weight,
}

impl Task {
    /// What came on the line.
    pub fn message(&self) -> &Message {
        &self.message
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("id", &self.message.id).finish_non_exhaustive()
    }
}

/// How far the end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Open,
    Draining,
    Closing,
}

/// Waits until it has come so far, or the ingress was dropped.
async fn reached(phase: &mut watch::Receiver<Phase>, wanted: Phase) {
    // The answer holds a lock, so it must not leave this function.
    let _ = phase.wait_for(|now| *now >= wanted).await;
}

/// Why the ingress could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The settings are not valid.
    #[error("{0}")]
    Settings(#[from] InvalidSettings),
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        error: io::Error,
    },
    /// The engine cannot be built.
    #[error("{0}")]
    Engine(#[from] BuildError),
}

/// What a shutdown leaves.
#[derive(Debug)]
#[must_use = "it holds the messages that were not handled"]
pub struct Report {
    /// The final account of the engine. What was given back or still runs is outstanding.
    pub account: Account,
    /// What was accepted and not handled, per family in order.
    pub returned: Vec<Message>,
    /// Tasks that still ran when the grace was over.
    pub still_running: usize,
    /// Connections that had to be cut off.
    pub connections_cut: usize,
}

/// A running network ingress.
///
/// Dropping it closes everything without draining; call [`shutdown`](Ingress::shutdown) if you care about what was accepted.
pub struct Ingress {
    address: SocketAddr,
    desk: Arc<Desk>,
    /// There until the shutdown takes it.
    engine: Option<Engine<Family, Task>>,
    phase: watch::Sender<Phase>,
    acceptor: Option<JoinHandle<usize>>,
}

impl fmt::Debug for Ingress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ingress").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Ingress {
    /// Listens. To be called inside a tokio runtime with time and IO, on which everything then runs.
    pub async fn start(settings: Settings, mediator: Arc<dyn Mediator>) -> Result<Ingress, StartError> {
        settings.check()?;
        let cannot = |error| StartError::Listen { address: settings.listen, error };
        let listener = TcpListener::bind(settings.listen).await.map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let engine = build_engine(&settings, mediator.clone())?;
        let (counters, bytes) = (Arc::new(Counters::default()), Arc::new(AtomicUsize::new(0)));
        let desk = Arc::new(Desk { settings, handle: engine.handle(), mediator, counters, bytes });
        let (phase, watching) = watch::channel(Phase::Open);
        let acceptor = tokio::spawn(accept(listener, desk.clone(), watching));
        Ok(Ingress { address, desk, engine: Some(engine), phase, acceptor: Some(acceptor) })
    }

    /// Where it listens: with port 0 in the settings, the port that it was given.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it has counted, and where everything is.
    pub fn stats(&self) -> Stats {
        self.desk.stats()
    }

    /// What can be seen of it, also while it shuts down.
    pub fn view(&self) -> View {
        View(self.desk.clone())
    }

    /// The engine underneath, to explain, park and resume families.
    pub fn handle(&self) -> &Handle<Family, Task> {
        &self.desk.handle
    }

    /// Stops listening, drains for at most `drain`, and says what was not handled. The steps are at the head of this module.
    pub async fn shutdown(mut self, drain: Duration) -> Report {
        self.phase.send_replace(Phase::Draining);
        self.desk.handle.close();
        let engine = self.engine.take().expect("taken only here");
        // The engine waits as threads wait; its slots go on meanwhile.
        let ending = tokio::task::spawn_blocking(move || engine.shutdown(drain));
        let report = ending.await.expect("a shutdown does not panic");
        let returned = report.returned.into_iter().map(|message| give_back(message.body)).collect();
        self.phase.send_replace(Phase::Closing);
        let acceptor = self.acceptor.take().expect("taken only here");
        let connections_cut = acceptor.await.expect("the acceptor does not panic");
        Report { account: report.account, returned, still_running: report.still_running, connections_cut }
    }
}

/// What can be seen of an ingress. Keeps nothing of it at work.
#[derive(Clone)]
pub struct View(Arc<Desk>);

impl View {
    /// What it has counted, and where everything is.
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// Lets those families try at once whose next task waits for its target, if that is meant.
    pub(crate) fn let_try(&self, is_meant: impl Fn(&str) -> bool) {
        let handle = &self.0.handle;
        let waiting = handle.find(usize::MAX, |message| {
            let task = &message.body;
            task.waits.then(|| (message.key.clone(), task.message.mediation_target.clone()))
        });
        for (family, _) in waiting.into_iter().filter(|(_, target)| is_meant(target)) {
            let reason = handle.explain(&family).map(|explanation| explanation.reason);
            if let Some(Reason::Retry { .. }) = reason {
                handle.resume(&family);
            }
        }
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").finish_non_exhaustive()
    }
}

impl Drop for Ingress {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.take() {
            // Its end waits for workers, which may need this very thread to run on.
            let drop_it = std::thread::Builder::new().name("ingress-drop".to_owned());
            let _ = drop_it.spawn(move || drop(engine));
        }
    }
}

fn give_back(mut task: Task) -> Message {
    if let Some(owed) = task.owed.take() {
        owed.failed("given back: the ingress has shut down");
    }
    task.message
}

// ── the engine ────────────────────────────────────────────────────────────────────────────────────────────────────────

fn build_engine(
    settings: &Settings,
    mediator: Arc<dyn Mediator>,
) -> Result<Engine<Family, Task>, BuildError> {
    let sequences = Arc::new(AtomicU64::new(first_sequence()));
    Engine::builder()
        .topology(Topology::partitioned(settings.partitions, settings.workers))
        .ingress_capacity(settings.partitions * settings.partition_capacity)
        .worker_queue_capacity(settings.partition_capacity)
        .lane_capacity(settings.family_capacity)
        .overflow(Overflow::Reject)
        .retry(settings.retry.clone())
        .shutdown_grace(settings.shutdown_grace)
        .on_fail(|message: laneway::Message<Family, Task>, failure| {
            if let Some(owed) = message.body.owed {
                owed.failed(failure.note.as_deref().unwrap_or("failed"));
            }
        })
        .handle_async(move |delivery: Delivery<Family, Task>| {
            let (mediator, sequences) = (mediator.clone(), sequences.clone());
            async move { attempt(&*mediator, &sequences, delivery).await }
        })
        .build()
}

/// Sequences start from the time, in microseconds. So they go on growing over a restart, unless more than a million tasks a second were handled before it.
fn first_sequence() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_micros() as u64
}

/// One attempt at a task, and what the engine is to make of it.
async fn attempt(
    mediator: &dyn Mediator,
    sequences: &AtomicU64,
    mut delivery: Delivery<Family, Task>,
) -> Outcome {
    delivery.waits = false;
    // Numbered when it first runs and not when it is submitted: tasks of a family run one after the other, but two connections that submit to one family may
    // take their numbers in one order and their places in the other.
    if delivery.sequence == 0 {
        delivery.sequence = sequences.fetch_add(1, Ordering::Relaxed);
    }
    let (sequence, attempt) = (delivery.sequence, delivery.attempt());
    let call = Call { message: &delivery.message, key: delivery.key(), sequence, attempt, traceparent: None };
    let verdict = mediator.mediate(call).await;
    match verdict {
        Verdict::Done => {
            if let Some(owed) = delivery.owed.take() {
                owed.done();
            }
            Outcome::Done
        }
        Verdict::Wait { delay, called, reason } => {
            delivery.note(reason);
            delivery.waits = true;
            if called { Outcome::Wait(delay) } else { Outcome::Hold(delay) }
        }
        Verdict::Again { delay: Some(delay), reason } => {
            delivery.note(reason);
            Outcome::RetryAfter(delay)
        }
        Verdict::Again { delay: None, reason } => Outcome::Failed(reason),
        Verdict::Final { reason } => {
            delivery.note(reason);
            // `on_fail` has the last word.
            Outcome::Skip
        }
    }
}

// ── the acceptor ──────────────────────────────────────────────────────────────────────────────────────────────────────

/// The connections that there are.
struct Connections {
    desk: Arc<Desk>,
    phase: watch::Receiver<Phase>,
    serving: JoinSet<()>,
    turned_away: JoinSet<()>,
}

/// Takes connections until the end begins, and stays until the last of them has gone. Says how many were cut off.
async fn accept(listener: TcpListener, desk: Arc<Desk>, mut phase: watch::Receiver<Phase>) -> usize {
    let linger = desk.settings.linger_time;
    let (serving, turned_away) = (JoinSet::new(), JoinSet::new());
    let mut connections = Connections { desk, phase: phase.clone(), serving, turned_away };
    loop {
        tokio::select! {
            () = reached(&mut phase, Phase::Draining) => break,
            Some(_) = connections.serving.join_next() => {}
            Some(_) = connections.turned_away.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => connections.take(stream),
                Err(_) => connections.pause().await,
            },
        }
    }
    drop(listener);
    let patience = async {
        reached(&mut phase, Phase::Closing).await;
        tokio::time::sleep(2 * linger).await;
    };
    let serving = &mut connections.serving;
    tokio::select! {
        () = patience => {}
        () = async { while serving.join_next().await.is_some() {} } => {}
    }
    let cut = connections.serving.len();
    connections.serving.shutdown().await;
    cut
}

impl Connections {
    fn take(&mut self, stream: TcpStream) {
        let settings = &self.desk.settings;
        if self.serving.len() < settings.connections_max {
            Counters::add(&self.desk.counters.connections_opened);
            self.serving.spawn(connection::serve(self.desk.clone(), stream, self.phase.clone()));
            return;
        }
        self.desk.counters.reject(Rejection::Connections);
        if self.turned_away.len() < TURNED_AWAY_MAX {
            let farewell = connection::turn_away(stream, settings.connections_max, settings.linger_time);
            self.turned_away.spawn(farewell);
        }
    }

    async fn pause(&mut self) {
        Counters::add(&self.desk.counters.accept_errors);
        tokio::select! {
            () = reached(&mut self.phase, Phase::Draining) => {}
            () = tokio::time::sleep(ACCEPT_PAUSE) => {}
        }
    }
}
