//! The engine as loom sees it; only there under `--cfg loom`, and only for `tests/loom_dispatcher.rs`.
//!
//! A [`Model`] is an engine that has started no threads and whose clock stands still: loom needs an execution to be the same whenever
//! it is repeated. The model's threads are its workers: they take the steps of `worker/thread.rs`, without the pauses between them, by
//! [`Model::work`].

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use foldhash::{SharedSeed, quality::SeedableRandomState};

use crate::{
    Builder, Handle, ShutdownReport,
    builder::{HandlerKind, Spawn},
    clock::Clock,
    handler::RunTurn,
    sync::{current, park},
    worker::{Look, Sleeper, Worker},
};

/// An engine whose workers are threads of a model.
#[derive(Clone)]
pub struct Model {
    /// Submits to it and operates it.
    pub handle: Handle<u8, u8>,
    handler: Arc<dyn RunTurn<u8, u8>>,
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
        let Some(HandlerKind::Sync(handler)) = builder.handler.take() else { panic!("a model has a handler") };
        let clock = Clock::Virtual(Arc::new(AtomicU64::new(0)));
        let hasher = SeedableRandomState::with_seed(0, SharedSeed::global_fixed());
        let shared = builder.assemble(clock, Spawn::Simulated, hasher);
        Model { handle: Handle { shared }, handler }
    }

    /// The life of the worker of a seat. Between taking a turn and running it, it calls `with` with the key: there a model may wait for somebody
    /// else. Handlers must not, because they know their engine by the thread, and loom has one thread for all.
    pub fn work(&self, seat: usize, with: impl Fn(u8)) {
        let shared = &self.handle.shared;
        let seat = shared.layout.load().seats[seat].clone();
        let sleeper = Sleeper::thread(seat.number, current());
        let mut worker = Worker::new(shared.clone(), seat, sleeper, false);
        loop {
            match worker.look() {
                Look::Turn => self.run_turns(&mut worker, &with),
                Look::Nothing => {
                    if worker.lie_down().is_some() {
                        park();
                        worker.get_up();
                    }
                }
                // Waiting for the locks is what backing off comes to; a loop of looks has no end in a model.
                Look::Contended => self.handle.shared.layout.load().dispatchers.iter().for_each(|taken| {
                    taken.taken_messages();
                }),
                Look::Leave => return,
            }
        }
    }

    fn run_turns(&self, worker: &mut Worker<u8, u8>, with: &impl Fn(u8)) {
        loop {
            with(worker.turn.items[0].message.key);
            let ending = worker.run(&*self.handler);
            if !worker.settle(ending) {
                return;
            }
        }
    }

    /// Closes, drains as long as it takes or not at all, and gives back what is left, when the workers have gone.
    pub fn shut_down(&self, drain: bool) -> ShutdownReport<u8, u8> {
        self.handle.shared.shut_down(if drain { Duration::MAX } else { Duration::ZERO })
    }

    /// Asserts what must be true of every dispatcher between two steps.
    pub fn audit(&self) {
        for dispatcher in &self.handle.shared.layout.load().dispatchers {
            if let Err(what) = dispatcher.audit(0) {
                panic!("dispatcher {:?}: {what}", dispatcher.name);
            }
        }
    }
}
