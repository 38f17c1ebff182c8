//! A worker: takes tasks from the queues that it is made for, runs their handlers on the lane engine, and says what came of them.
//!
//! # The life of a task here
//!
//! ```text
//!  read ──────────► hand ──────► lane engine ──────► settle ──────────► room
//!  one call for     what is      max_concurrent      one call for all   wakes the
//!  all queues       ours now     slots               that have ended    next read
//! ```
//!
//! - **read** (`poll.rs`): one call of the database takes tasks from all queues, in the order that the strategy planned, as many as there is
//!   room for. When there is nothing the worker waits for an announcement (LISTEN, one connection for all queues), not for a poll per queue.
//! - **hand** (`hand.rs`): what was taken and is not settled, with the room that is left. It is bounded: by the slots, and, while handlers are
//!   quick, by as much again as they will do in a tenth of a second.
//! - **run** (`run.rs`): a slot of the lane engine calls the handler, with the step's timeout. Every task is a lane of its own, or every run with
//!   `ordered_runs`.
//! - **settle** (`settle.rs`): completions and failures gather while the call before them is under way, and go together in the next one.
//! - **heartbeat** (`heartbeat.rs`): says that the worker lives, keeps what is slow, gives the tasks of dead workers to the living, and adds what was counted (`tally.rs`)
//!   to the rows of the queues.
//!
//! # Shutdown
//!
//! 1. No more reads.
//! 2. The engine ends: handlers that run may finish, until the grace is over; what was not begun comes back.
//! 3. What has ended is settled.
//! 4. What came back, or did not finish in time, is handed back to the database: visible to others at once, the attempt does not count.
//! 5. The worker is marked as stopped. Signs of life go on until here, so that nobody takes its tasks meanwhile.
//!
//! A worker that is killed does none of this. Its signs of life stop, and after `dead_after_seconds` another worker gives its tasks to the
//! living. A start is fenced by its number: whatever the dead one still says is ignored.
//!
//! A handler that blocks its thread cannot be ended from outside. Half a minute after its timeout its task is not kept any more, so that the
//! database gives it to another; what waits behind it in this worker for as long is handed back.

mod hand;
mod heartbeat;
mod poll;
mod run;
mod settings;
mod settle;
mod strategy;
mod tally;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use laneway::{Delivery, Engine, Overflow, RetryPolicy, Topology};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::client;
use crate::definition::{Definition, list};
use crate::error::FlowError;
use crate::flow::{Defined, Flow};
use crate::handler::{Action, Task};
use crate::queue::{Queue, Uses};
use crate::store::{self, TaskRows};

pub use hand::WorkerStats;
pub use settings::{QueueSettings, Settings, SettingsError};
pub use strategy::{Priority, QueueView, RoundRobin, Share, Strategy, StrategyKind, Weighted};

use hand::Hand;
use run::Job;
use settings::Polled;
use settle::Settlement;

/// A flow that a worker serves, and on which of its queues.
///
/// A [`Defined`] flow becomes one that is served on all of its queues. A queue that the flow does not use does not compile:
///
/// ```compile_fail,E0277
/// # use laneway_flow::{Flow, OwnQueue, Steps};
/// # laneway_flow::queues! { EmailWorker = "email_worker"; }
/// # struct Example;
/// # impl Flow for Example {
/// #     const SLUG: &'static str = "example";
/// #     type Input = String;
/// type Queues = (OwnQueue,);
/// #     fn steps(&self, flow: &mut Steps<Self>) {
/// #         flow.step("a").run(|name: String, _| async move { Ok(name) });
/// #     }
/// # }
/// let worker = Example.define().unwrap().on(EmailWorker);
/// ```
pub struct Served<F> {
    flow: Defined<F>,
    queues: Vec<String>,
    primary: Option<String>,
    settings: Vec<(String, QueueSettings)>,
    types: PhantomData<fn() -> F>,
}

impl<F> fmt::Debug for Served<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served")
            .field("flow", &self.flow)
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}

impl<F> From<Defined<F>> for Served<F> {
    fn from(flow: Defined<F>) -> Self {
        Self { flow, queues: Vec::new(), primary: None, settings: Vec::new(), types: PhantomData }
    }
}

impl<F: Flow> Defined<F> {
    /// The flow, served on this queue only; [`and`](Served::and) adds others.
    pub fn on<Q: Queue, At>(self, queue: Q) -> Served<F>
    where
        F::Queues: Uses<Q, At>,
    {
        Served::from(self).and(queue)
    }
}

impl<F: Flow> Served<F> {
    /// Also on this queue.
    pub fn and<Q: Queue, At>(mut self, _: Q) -> Self
    where
        F::Queues: Uses<Q, At>,
    {
        self.queues.push(Q::name::<F>().to_owned());
        self
    }

    /// Reads this queue before the others.
    pub fn primary<Q: Queue, At>(mut self, _: Q) -> Self
    where
        F::Queues: Uses<Q, At>,
    {
        self.primary = Some(Q::name::<F>().to_owned());
        self
    }

    /// What differs for this queue.
    pub fn queue<Q: Queue, At>(mut self, _: Q, settings: QueueSettings) -> Self
    where
        F::Queues: Uses<Q, At>,
    {
        self.settings.push((Q::name::<F>().to_owned(), settings));
        self
    }
}

/// A worker that is about to start.
///
/// ```no_run
/// # use laneway_flow::{Flow, OwnQueue, Steps, Worker};
/// # struct Hello;
/// # impl Flow for Hello {
/// #     const SLUG: &'static str = "hello";
/// #     type Input = String;
/// #     type Queues = (OwnQueue,);
/// #     fn steps(&self, flow: &mut Steps<Self>) {
/// #         flow.step("greet").run(|name: String, _| async move { Ok(name) });
/// #     }
/// # }
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let worker = Worker::on(&pool).serve(Hello.define()?).start().await?;
/// // ... until the program is asked to end:
/// worker.stop().await;
/// # Ok(())
/// # }
/// ```
#[must_use = "a worker begins with `start`"]
pub struct WorkerBuilder {
    pool: PgPool,
    name: String,
    flows: HashMap<String, Program>,
    typed_queues: Vec<String>,
    settings: Settings,
    strategy: Option<Box<dyn Strategy>>,
    trouble: Trouble,
    compile: bool,
}

impl fmt::Debug for WorkerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flows: Vec<&String> = self.flows.keys().collect();
        f.debug_struct("WorkerBuilder")
            .field("flows", &flows)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// What the worker tells of what went wrong and did not stop it.
type Trouble = Arc<dyn Fn(&str) + Send + Sync>;

/// A flow and its handlers.
struct Program {
    definition: Definition,
    actions: HashMap<String, Action>,
}

impl WorkerBuilder {
    /// Serves a flow: on all of its queues, or on those that were chosen with [`Defined::on`].
    pub fn serve<F>(mut self, flow: impl Into<Served<F>>) -> Self {
        let Served { flow, queues, primary, settings, .. } = flow.into();
        let definition = flow.definition;
        let chosen = if queues.is_empty() {
            definition.queues().into_iter().map(str::to_owned).collect()
        } else {
            queues
        };
        self.typed_queues.extend(chosen);
        if primary.is_some() {
            self.settings.primary_queue = primary;
        }
        self.settings.queue_settings.extend(settings);
        self.flows.insert(definition.slug.clone(), Program { definition, actions: flow.actions });
        self
    }

    /// Serves a flow that is data, with its handlers by the names of their steps.
    pub fn serve_data(mut self, definition: Definition, actions: HashMap<String, Action>) -> Self {
        self.typed_queues.extend(definition.queues().into_iter().map(str::to_owned));
        self.flows.insert(definition.slug.clone(), Program { definition, actions });
        self
    }

    /// How it works. What was chosen by types before (queues, their settings) is kept where this says nothing.
    pub fn settings(mut self, settings: Settings) -> Self {
        let before = std::mem::replace(&mut self.settings, settings);
        for (queue, settings) in before.queue_settings {
            self.settings.queue_settings.entry(queue).or_insert(settings);
        }
        self.settings.primary_queue = self.settings.primary_queue.take().or(before.primary_queue);
        self
    }

    /// A strategy of your own, instead of the one that the settings name.
    pub fn strategy(mut self, strategy: impl Strategy) -> Self {
        self.strategy = Some(Box::new(strategy));
        self
    }

    /// By which it is known in the table of workers. Default: the flows' names.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Who is told of what goes wrong and does not stop the worker: a database that is away, a queue that is gone. Default: standard error.
    pub fn on_trouble(mut self, tell: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.trouble = Arc::new(tell);
        self
    }

    /// Does not make or change flows in the database; they must be there as they are here.
    pub fn verify_only(mut self) -> Self {
        self.compile = false;
        self
    }

    /// Checks everything, makes the flows in the database if they are not there, and begins to work.
    pub async fn start(self) -> Result<Worker, StartError> {
        let polled = self.polled()?;
        let strategy = self.strategy.unwrap_or_else(|| self.settings.strategy.build());
        for program in self.flows.values() {
            prepare(&self.pool, &program.definition, self.compile).await?;
        }
        let id = Uuid::new_v4();
        let name = if self.name.is_empty() { list(self.flows.keys().map(String::as_str)) } else { self.name };
        // A worker of a hundred flows need not list them all.
        let name: String = name.chars().take(NAME_MAX).collect();
        let (stop, stopped) = watch::channel(false);
        let batch_max = polled.iter().map(|queue| queue.batch).max().unwrap_or(1);
        let hand = Hand::new(polled.len(), self.settings.max_concurrent, batch_max);
        let (settlements, inbox) = mpsc::channel(hand.most());
        let slugs = self.flows.keys().cloned().collect();
        let shared = Arc::new(Shared {
            control: control(&self.pool),
            pool: self.pool,
            id,
            name,
            flows: self.flows,
            slugs,
            strange_steps: Mutex::default(),
            queues: polled,
            settings: self.settings,
            hand,
            news: Notify::new(),
            stop,
            trouble: self.trouble,
        });
        shared.register(&shared.pool).await?;
        let engine = engine(&shared, &settlements)?;
        let tasks =
            vec![tokio::spawn(heartbeat::beat(shared.clone())), tokio::spawn(poll::listen(shared.clone()))];
        let poller = tokio::spawn(poll::poll(shared.clone(), engine.handle(), strategy, stopped));
        let settler = tokio::spawn(settle::settle(shared.clone(), inbox));
        Ok(Worker { shared, engine: Some(engine), settlements, poller, settler, tasks })
    }

    fn polled(&self) -> Result<Vec<Polled>, StartError> {
        let mut available: Vec<String> = Vec::new();
        for queue in &self.typed_queues {
            if !available.contains(queue) {
                available.push(queue.clone());
            }
        }
        if self.flows.is_empty() {
            let problems = vec!["it serves no flow: call serve".to_owned()];
            return Err(StartError::Settings(SettingsError { problems }));
        }
        let flows = list(self.flows.keys().map(String::as_str));
        self.settings.polled(&flows, &available).map_err(StartError::Settings)
    }
}

/// Connections of the worker's own: one listens, one reads, one settles, one gives signs of life.
const CONTROL: u32 = 4;

fn control(pool: &PgPool) -> PgPool {
    let options = PgPoolOptions::new().max_connections(CONTROL).acquire_timeout(Duration::from_secs(10));
    options.connect_lazy_with((*pool.connect_options()).clone())
}

/// How long a stop waits for the last calls of the database.
const FLUSH: Duration = Duration::from_secs(30);

/// How long it waits for a read that has begun, for the return of what is left, and for the goodbye: each is one call.
const LAST_CALL: Duration = Duration::from_secs(5);

/// What the table of workers takes of a name.
const NAME_MAX: usize = 200;

async fn prepare(pool: &PgPool, definition: &Definition, compile: bool) -> Result<(), StartError> {
    if compile {
        client::compile(pool, definition, false).await?;
        return Ok(());
    }
    match client::compare(pool, definition).await? {
        client::Verdict::Same | client::Verdict::Compatible(_) => Ok(()),
        client::Verdict::Missing => {
            Err(FlowError::Unknown(format!("the database does not know the flow {:?}", definition.slug))
                .into())
        }
        client::Verdict::Different(differences) => Err(FlowError::Shape(format!(
            "the flow {:?} of this program is not the one that the database has:\n  {}",
            definition.slug,
            differences.join("\n  ")
        ))
        .into()),
    }
}

fn engine(
    shared: &Arc<Shared>,
    settlements: &mpsc::Sender<Settlement>,
) -> Result<Engine<u128, Job>, StartError> {
    let (shared_in, settlements) = (shared.clone(), settlements.clone());
    let engine = Engine::builder()
        .topology(Topology::pool(shared.settings.max_concurrent))
        .ingress_capacity(2 * shared.hand.most())
        .worker_queue_capacity(2 * shared.hand.most())
        .overflow(Overflow::Reject)
        // The database counts attempts; what a slot gets is one of them.
        .retry(RetryPolicy::never())
        .shutdown_grace(Duration::from_secs(shared.settings.shutdown_seconds.into()))
        .handle_async(move |job: Delivery<u128, Job>| {
            let (shared, settlements) = (shared_in.clone(), settlements.clone());
            async move { run::run(&shared, &settlements, &job).await }
        })
        .build();
    engine.map_err(|error| {
        StartError::Settings(SettingsError {
            problems: error.problems.iter().map(ToString::to_string).collect(),
        })
    })
}

/// Why a worker did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// It cannot work like this; all that is wrong is listed.
    #[error("{0}")]
    Settings(SettingsError),
    /// The database said no, or something else.
    #[error(transparent)]
    Flow(#[from] FlowError),
}

/// What all parts of a worker know.
pub(crate) struct Shared {
    /// The user's connections, for handlers that run in the completing transaction.
    pool: PgPool,
    /// The worker's own, so that handlers that hold all of the user's cannot keep it from reading, settling and showing that it lives.
    control: PgPool,
    /// Under which the database knows it.
    id: Uuid,
    /// By which people know it.
    name: String,
    /// By slug.
    flows: HashMap<String, Program>,
    /// Their slugs: a shared queue holds tasks of other flows, which are left to others.
    slugs: Vec<String>,
    /// Steps of these flows that this worker has met and has no handler for, as `flow.step`: left to others, too.
    strange_steps: Mutex<BTreeSet<String>>,
    queues: Vec<Polled>,
    settings: Settings,
    hand: Hand,
    /// Somebody announced a message, or a read may find more.
    news: Notify,
    /// True once the worker is to end.
    stop: watch::Sender<bool>,
    trouble: Trouble,
}

impl Shared {
    /// Makes the worker known.
    async fn register(&self, pool: &PgPool) -> Result<(), FlowError> {
        let queues: Vec<&str> = self.queues.iter().map(|queue| queue.name.as_str()).collect();
        store::start_worker(pool, self.id, &self.name, &queues).await
    }

    /// What is counted of the queue of a task; nothing for a queue that this worker does not read.
    fn tally(&self, task: &Task) -> Option<&tally::Tally> {
        self.hand.tallies.get(self.queues.iter().position(|queue| queue.name == task.queue)?)
    }

    fn strange_steps(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.strange_steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trouble(&self, what: &str) {
        (self.trouble)(what);
    }
}

/// A running worker. Dropped without [`stop`](Worker::stop) it ends as if it had been killed.
pub struct Worker {
    shared: Arc<Shared>,
    engine: Option<Engine<u128, Job>>,
    settlements: mpsc::Sender<Settlement>,
    poller: JoinHandle<()>,
    settler: JoinHandle<()>,
    tasks: Vec<JoinHandle<()>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("id", &self.shared.id).finish_non_exhaustive()
    }
}

/// What a stop left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// What the worker did in its life.
    pub stats: WorkerStats,
    /// Tasks that were given back to the database.
    pub handed_back: usize,
}

impl Worker {
    /// Begins to describe a worker. It makes four connections of its own, with the options of this pool; the pool itself is used for handlers
    /// that run [in the completing transaction](crate::StepBuilder::commit), one connection for each.
    pub fn on(pool: &PgPool) -> WorkerBuilder {
        WorkerBuilder {
            pool: pool.clone(),
            name: String::new(),
            flows: HashMap::new(),
            typed_queues: Vec::new(),
            settings: Settings::default(),
            strategy: None,
            trouble: Arc::new(|what| eprintln!("laneway-flow: {what}")),
            compile: true,
        }
    }

    /// Under which the database knows it.
    pub fn id(&self) -> Uuid {
        self.shared.id
    }

    /// What it has done so far.
    pub fn stats(&self) -> WorkerStats {
        self.shared.hand.stats()
    }

    /// Waits until it has nothing in hand: every task that it took is settled, or was handed back.
    pub async fn idle(&self) {
        self.shared.hand.wait_empty().await;
    }

    /// Waits until somebody wants it to end: a call of [`ask_to_stop`](Stopper::ask_to_stop), or an operator who deprecated it in the database.
    pub async fn asked_to_stop(&self) {
        let mut stopped = self.shared.stop.subscribe();
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }

    /// What can ask it to stop, from another task or a signal handler.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.shared.clone())
    }

    /// Finishes what runs, hands back what does not, and says goodbye.
    pub async fn stop(mut self) -> Stopped {
        self.shared.stop.send_replace(true);
        // A read that hangs has given us nothing that we know of; others get it when we are taken for gone.
        if tokio::time::timeout(LAST_CALL, &mut self.poller).await.is_err() {
            self.poller.abort();
            self.shared.trouble("the last read did not end in time");
        }
        if let Some(engine) = self.engine.take() {
            // What it has not begun goes back with all that we hold.
            drop(engine.shutdown_async(Duration::ZERO).await);
        }
        let (flushed, flush) = tokio::sync::oneshot::channel();
        let settled = async {
            if self.settlements.send(Settlement::Flush(flushed)).await.is_ok() {
                let _ = flush.await;
            }
        };
        // A database that is away must not keep the program from ending; what is not settled is done again by another.
        if tokio::time::timeout(FLUSH, settled).await.is_err() {
            self.shared.trouble("what has ended could not be settled in time; others will do it again");
        }
        self.settler.abort();
        let left = self.shared.hand.take_all();
        let handed_back = self.hand_back(&left).await;
        // A sign of life after the goodbye would take it back.
        self.tasks.iter().for_each(JoinHandle::abort);
        if let Err(why) = last_call(tally::tell(&self.shared)).await {
            self.shared.trouble(&format!("what was counted last could not be told: {why}"));
        }
        let goodbye = store::mark_worker_stopped(&self.shared.control, self.shared.id);
        if let Err(why) = last_call(goodbye).await {
            self.shared.trouble(&format!("the worker could not say goodbye: {why}"));
        }
        Stopped { stats: self.stats(), handed_back }
    }

    async fn hand_back(&self, tasks: &[Arc<Task>]) -> usize {
        let rows: TaskRows = tasks.iter().map(|task| &**task).collect();
        match last_call(store::release_tasks(&self.shared.control, &rows, 0)).await {
            Ok(count) => usize::try_from(count).unwrap_or(0),
            Err(why) => {
                let count = tasks.len();
                self.shared.trouble(&format!(
                    "{count} tasks could not be handed back, others will get them later: {why}"
                ));
                0
            }
        }
    }
}

/// A call of a worker that ends: a database that does not answer must not keep it.
async fn last_call<T>(call: impl Future<Output = Result<T, FlowError>>) -> Result<T, String> {
    match tokio::time::timeout(LAST_CALL, call).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("the database did not answer within {} s", LAST_CALL.as_secs())),
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.stop.send_replace(true);
        self.poller.abort();
        self.settler.abort();
        self.tasks.iter().for_each(JoinHandle::abort);
        if let Some(engine) = self.engine.take() {
            // Its end waits for handlers, and must not block a thread of the runtime.
            std::thread::spawn(move || drop(engine));
        }
    }
}

/// Asks a worker to stop.
#[derive(Clone)]
pub struct Stopper(Arc<Shared>);

impl fmt::Debug for Stopper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stopper({})", self.0.id)
    }
}

impl Stopper {
    /// No more reads. Whoever holds the worker is woken from [`asked_to_stop`](Worker::asked_to_stop), and stops it.
    pub fn ask_to_stop(&self) {
        self.0.stop.send_replace(true);
    }
}
