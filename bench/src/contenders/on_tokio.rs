//! What the contenders on tokio have in common: a runtime, and as many slots as the workload has workers.
//!
//! With tiny handlers the runtime's threads are the workers. With waiting handlers the workers are slots: a semaphore
//! admits that many handlers at a time, and the runtime gets a thread per core.
//!
//! [`PerKey`] is the contender behind the three that give every key something of its own on that runtime, an actor or a
//! task: they differ only in how it is spawned and fed.

use std::marker::PhantomData;
use std::sync::Arc;
use std::thread;

use anyhow::Result;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;

use super::mailboxes::{MailboxProducer, Mailboxes};
use crate::contender::Contender;
use crate::message::Message;
use crate::probe::Probe;
use crate::workload::{KeyLife, Workload};

/// A runtime fit for the workload.
pub(super) fn runtime(workload: &Workload) -> Result<Runtime> {
    let threads = if workload.waits() { thread::available_parallelism()?.get() } else { workload.workers };
    Ok(Builder::new_multi_thread().worker_threads(threads).enable_time().build()?)
}

/// The probe behind the slots.
#[derive(Clone)]
pub(super) struct Slots {
    probe: Arc<Probe>,
    free: Option<Arc<Semaphore>>,
    key_life: KeyLife,
}

impl Slots {
    pub(super) fn new(workload: &Workload, probe: Arc<Probe>) -> Self {
        let free = workload.waits().then(|| Arc::new(Semaphore::new(workload.workers)));
        Self { probe, free, key_life: workload.key_life() }
    }

    /// Handles a message in a slot.
    pub(super) async fn handle(&self, message: Message) {
        let _slot = match &self.free {
            Some(free) => Some(free.acquire().await.expect("the semaphore is never closed")),
            None => None,
        };
        self.probe.handle_async(message).await;
    }

    /// How many messages a key sees, for what must end itself.
    pub(super) fn key_life(&self) -> KeyLife {
        self.key_life
    }
}

/// Something that is spawned on tokio for every key.
pub(super) trait SpawnPerKey: Mailboxes + 'static {
    const NAME: &'static str;
    const ABOUT: &'static str;

    fn new(runtime: Handle, slots: Slots) -> Self;
}

/// The contender made of them.
pub(super) struct PerKey<S> {
    runtime: Runtime,
    slots: Slots,
    workload: Workload,
    spawns: PhantomData<S>,
}

impl<S: SpawnPerKey> Contender for PerKey<S> {
    const NAME: &'static str = S::NAME;
    const ABOUT: &'static str = S::ABOUT;

    type Producer = MailboxProducer<S>;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        let slots = Slots::new(workload, probe);
        Ok(Self { runtime: runtime(workload)?, slots, workload: workload.clone(), spawns: PhantomData })
    }

    fn producer(&mut self) -> MailboxProducer<S> {
        MailboxProducer::new(S::new(self.runtime.handle().clone(), self.slots.clone()), &self.workload)
    }

    fn finish(self) {
        self.runtime.shutdown_background();
    }
}
