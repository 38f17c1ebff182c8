//! The engine as loom sees it; only there under `--cfg loom`, and only for `tests/loom_dispatcher.rs`.
//!
//! A [`Model`] is an engine that has started no threads and whose clock stands still: loom needs an execution to be the same whenever
//! it is repeated. The model's threads are its workers: they take the steps of `worker/thread.rs` by [`Model::work`]. Where a worker would
//! look again and again until somebody else has gone on, it waits for that instead: to loom such a loop has no end.

use std::{
    sync::{Arc, atomic::AtomicU64, atomic::Ordering},
    task::Waker,
    time::{Duration, Instant},
};

use foldhash::{SharedSeed, quality::SeedableRandomState};

use crate::{
    Admission, Builder, Handle, Message, Refusal, ShutdownReport,
    builder::{HandlerKind, Spawn},
    clock::Clock,
    engine::{Patience, Shared, Step, Waiting},
    handler::RunTurn,
    message::Item,
    sync::{Condvar, Mutex, current, lock, park, wait_for},
    worker::{Look, Sleeper, Worker},
};

/// An engine whose workers are threads of a model.
#[derive(Clone)]
pub struct Model {
    /// Submits to it and operates it.
    pub handle: Handle<u8, u8>,
    handler: Arc<dyn RunTurn<u8, u8>>,
    /// Whether its workers know from the start that messages are quick: then one that is alone takes more than a turn at a time.
    pub quick: bool,
    /// Whether all dispatchers have stopped.
    stopped: Arc<(Mutex<bool>, Condvar)>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.handle.fmt(f)
    }
}

impl Model {
    /// The engine that this builder describes.
    pub fn new(mut builder: Builder<u8, u8>) -> Self {
        assert_eq!(builder.problems(), []);
        let Some(HandlerKind::Sync(handler)) = builder.handler.take() else {
            panic!("a model has a handler")
        };
        let clock = Clock::Virtual(Arc::new(AtomicU64::new(0)));
        let hasher = SeedableRandomState::with_seed(0, SharedSeed::global_fixed());
        let shared = builder.assemble(clock, Spawn::Simulated, hasher);
        Model {
            handle: Handle { shared },
            handler,
            quick: false,
            stopped: Arc::new((Mutex::new(false), Condvar::new())),
        }
    }

    /// The life of the worker of a seat. Between taking a turn and running it, it calls `with` with the keys of its messages: there a model may
    /// wait for somebody else. Handlers must not, because they know their engine by the thread, and loom has one thread for all.
    pub fn work(&self, seat: usize, with: impl Fn(&[u8])) {
        let shared = &self.handle.shared;
        let seat = shared.layout.load().seats[seat].clone();
        let sleeper = Sleeper::thread(seat.number, current());
        let mut worker = Worker::new(shared.clone(), seat, sleeper, crate::handler::Turns::OfAnyKeys);
        worker.tempo.expect(if self.quick { 128 } else { 1 });
        loop {
            match worker.look() {
                Look::Turn => self.run_turns(&mut worker, &with),
                Look::Nothing => match worker.lie_down() {
                    Some(_) => {
                        park();
                        worker.get_up();
                    }
                    None => self.wait_if_stopping(),
                },
                Look::Contended => shared.layout.load().dispatchers.iter().for_each(|taken| {
                    taken.taken_messages();
                }),
                Look::Leave => return,
            }
        }
    }

    fn run_turns(&self, worker: &mut Worker<u8, u8>, with: &impl Fn(&[u8])) {
        loop {
            let keys: Vec<u8> = worker.turn().each().map(|(key, _)| *key).collect();
            with(&keys);
            let ending = worker.run(&*self.handler);
            let idle = worker.turn().len() == keys.len();
            let more = worker.settle(ending);
            if idle {
                self.wait_if_stopping();
            }
            if !more {
                return;
            }
        }
    }

    /// Waits until the engine has stopped, if it is at that.
    fn wait_if_stopping(&self) {
        if self.handle.shared.give_way.load(Ordering::Acquire) {
            let mut stopped = lock(&self.stopped.0);
            while !*stopped {
                stopped = wait_for(&self.stopped.1, stopped, None);
            }
        }
    }

    /// The steps of a shutdown that drains as long as it takes or not at all, and waits until all workers have gone.
    pub fn shut_down(&self, drain: bool) -> ShutdownReport<u8, u8> {
        const LONG: Duration = Duration::from_secs(86_400);
        let shared = &self.handle.shared;
        shared.close();
        shared.wait_quiet(Instant::now() + if drain { LONG } else { Duration::ZERO });
        if drain {
            // What a model is about has happened; how its workers leave is that of those that do not drain.
            loom::stop_exploring();
        }
        shared.stop();
        *lock(&self.stopped.0) = true;
        self.stopped.1.notify_all();
        let layout = shared.layout.load_full();
        shared.wait_until(Instant::now() + LONG, || {
            layout.seats.iter().all(|seat| seat.gone.load(Ordering::Acquire))
        });
        shared.give_back()
    }

    /// A submission that waits as a task does.
    pub fn submission(&self, message: impl Into<Message<u8, u8>>) -> Submission {
        let shared = self.handle.shared.clone();
        let arrival = Some(shared.arrive(message.into()));
        Submission { shared, arrival, waiting: Waiting::new() }
    }

    /// Asserts what must be true of every dispatcher between two steps, as long as nothing was given back.
    pub fn audit(&self) {
        for dispatcher in &self.handle.shared.layout.load().dispatchers {
            if let Err(what) = dispatcher.audit(0, &Default::default()) {
                panic!("dispatcher {:?}: {what}", dispatcher.name);
            }
        }
    }
}

/// A submission as a task polls it, and gives it up by dropping it.
pub struct Submission {
    shared: Arc<Shared<u8, u8>>,
    arrival: Option<Item<u8, u8>>,
    waiting: Waiting<Instant>,
}

impl Submission {
    /// What became of it. If nothing yet, the waker is told when it should be polled again.
    pub fn poll(&mut self, waker: &Waker) -> Option<Result<Admission, Refusal>> {
        let arrival = self.arrival.take().expect("polled after it was ready");
        match self.shared.look_for_room(arrival, &mut self.waiting, &Patience::Task(waker), Instant::now) {
            Step::Ended(result) => Some(result.map_err(|refused| refused.reason)),
            Step::Blocked(blocked) => {
                self.arrival = Some(blocked.arrival);
                None
            }
        }
    }
}

impl std::fmt::Debug for Submission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Submission").field("is_over", &self.arrival.is_none()).finish_non_exhaustive()
    }
}
