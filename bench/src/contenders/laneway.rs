//! The product: an engine of the `laneway` crate, set up as a user would.
//!
//! Tiny handlers run on threads, by default in as many partitions as there are workers; waiting handlers beyond what
//! threads can serve run as async handlers in slots of one pool. The window is the engine's own bound, a full engine
//! blocks, and everything else is left at its default, the sampling of latencies included.

use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use laneway::{Builder, Context, Delivery, Engine, Handle, Overflow, Topology, WaitStrategy, WorkerStats};
use tokio::runtime::{Builder as RuntimeBuilder, Handle as SlotHandle, Runtime};

use crate::contender::{Contender, Producer};
use crate::message::{Body, Message};
use crate::probe::Probe;
use crate::workload::{KeysType, Layout, Workload};

/// How long the engine may take to end; nothing is outstanding then.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// The engine, by the type of its keys. Integer keys are not repeated in the body; string keys carry the number along,
/// so that the handler need not parse it.
enum Engines {
    U64(Engine<u64, Body>),
    String(Engine<String, Message>),
}

pub(super) struct Laneway {
    engines: Engines,
    /// Where async handlers run; dropped after the engine.
    runtime: Option<Runtime>,
}

impl Contender for Laneway {
    const NAME: &'static str = crate::PRODUCT;
    const ABOUT: &'static str = "this engine";
    const BOUNDS_ITSELF: bool = true;
    const STRING_KEYS: bool = true;

    type Producer = Handles;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        Laneway::start_with(workload, probe, WaitStrategy::default())
    }

    fn producer(&mut self) -> Handles {
        match &self.engines {
            Engines::U64(engine) => Handles::U64(engine.handle()),
            Engines::String(engine) => Handles::String(engine.handle()),
        }
    }

    /// What the workers met: how often a dispatcher was taken by another, and how often they slept.
    fn counters(&self) -> Vec<(&'static str, f64)> {
        let snapshot = match &self.engines {
            Engines::U64(engine) => engine.snapshot(),
            Engines::String(engine) => engine.snapshot(),
        };
        let sum = |count: fn(&WorkerStats) -> u64| snapshot.workers.iter().map(count).sum::<u64>() as f64;
        let messages = sum(|worker| worker.handled).max(1.0);
        vec![
            (
                "lock_failure_ratio",
                sum(|worker| worker.lock_failures) / sum(|worker| worker.lock_attempts).max(1.0),
            ),
            ("messages_per_turn", messages / sum(|worker| worker.turns).max(1.0)),
            ("parks_per_message", sum(|worker| worker.parks) / messages),
        ]
    }

    fn finish(self) {
        match self.engines {
            Engines::U64(engine) => drop(engine.shutdown(SHUTDOWN)),
            Engines::String(engine) => drop(engine.shutdown(SHUTDOWN)),
        }
        if let Some(runtime) = self.runtime {
            runtime.shutdown_background();
        }
    }
}

impl Laneway {
    fn start_with(workload: &Workload, probe: Arc<Probe>, wait: WaitStrategy) -> Result<Self> {
        let runtime =
            workload.needs_slots().then(|| RuntimeBuilder::new_multi_thread().enable_time().build());
        let runtime = runtime.transpose()?;
        let slots = runtime.as_ref().map(Runtime::handle);
        let engines = match workload.keys_type {
            KeysType::U64 => Engines::U64(start_u64(builder(workload, wait), probe, slots)?),
            KeysType::String => Engines::String(start_string(builder(workload, wait), probe, slots)?),
        };
        Ok(Self { engines, runtime })
    }
}

/// The same with workers that spin before they sleep.
#[cfg(feature = "peers")]
pub(super) struct Spinning(Laneway);

#[cfg(feature = "peers")]
impl Contender for Spinning {
    const NAME: &'static str = "laneway-spin";
    const ABOUT: &'static str = "this engine, whose idle workers spin before they sleep";
    const BOUNDS_ITSELF: bool = true;
    const STRING_KEYS: bool = true;

    type Producer = Handles;

    fn start(workload: &Workload, probe: Arc<Probe>) -> Result<Self> {
        Laneway::start_with(workload, probe, WaitStrategy::SpinThenPark).map(Spinning)
    }

    fn producer(&mut self) -> Handles {
        self.0.producer()
    }

    fn counters(&self) -> Vec<(&'static str, f64)> {
        self.0.counters()
    }

    fn finish(self) {
        self.0.finish();
    }

    fn unsupported(workload: &Workload) -> Option<&'static str> {
        workload.rate.is_none().then_some("it differs from laneway only where workers are idle now and then")
    }
}

fn topology<K: 'static>(workload: &Workload) -> Topology<K> {
    match workload.layout {
        Layout::Pool => Topology::pool(workload.workers),
        Layout::Partitioned => Topology::partitioned(workload.workers, 1),
        Layout::PerWorker => Topology::per_worker(workload.workers),
    }
}

/// Everything but the handler.
fn builder<K, M>(workload: &Workload, wait: WaitStrategy) -> Builder<K, M>
where
    K: Hash + Clone + Send + Sync + 'static,
    M: Send + 'static,
{
    let dispatchers = if workload.layout == Layout::Pool { 1 } else { workload.workers };
    Engine::builder()
        .topology(topology(workload))
        .ingress_capacity(workload.window)
        .worker_queue_capacity(workload.window / dispatchers)
        .overflow(Overflow::Block)
        .wait(wait)
}

/// With slots the handler is async, and runs there; without, on threads.
fn start_u64(
    builder: Builder<u64, Body>,
    probe: Arc<Probe>,
    slots: Option<&SlotHandle>,
) -> Result<Engine<u64, Body>> {
    let message = |key: &u64, body: &Body| Message { key: *key, body: *body };
    let builder = match slots {
        Some(slots) => builder.runtime(slots.clone()).handle_async(move |delivery: Delivery<u64, Body>| {
            let probe = Arc::clone(&probe);
            async move { probe.handle_async(message(delivery.key(), &delivery)).await }
        }),
        None => builder.handle(move |context: &Context<'_, u64>, body: &mut Body| {
            probe.handle(&message(context.key(), body));
        }),
    };
    Ok(builder.build()?)
}

fn start_string(
    builder: Builder<String, Message>,
    probe: Arc<Probe>,
    slots: Option<&SlotHandle>,
) -> Result<Engine<String, Message>> {
    let builder = match slots {
        Some(slots) => {
            builder.runtime(slots.clone()).handle_async(move |delivery: Delivery<String, Message>| {
                let probe = Arc::clone(&probe);
                async move { probe.handle_async(*delivery).await }
            })
        }
        None => builder.handle(move |_: &Context<'_, String>, message: &mut Message| probe.handle(message)),
    };
    Ok(builder.build()?)
}

/// One producer's handle.
pub(super) enum Handles {
    U64(Handle<u64, Body>),
    String(Handle<String, Message>),
}

impl Producer for Handles {
    #[inline(always)]
    fn submit(&mut self, message: Message) {
        let accepted = match self {
            Self::U64(handle) => handle.submit((message.key, message.body)).is_ok(),
            Self::String(handle) => handle.submit((message.key.to_string(), message)).is_ok(),
        };
        assert!(accepted, "an engine that blocks when full refuses nothing");
    }

    fn submit_batch(&mut self, messages: &[Message]) {
        let accepted = match self {
            Self::U64(handle) => {
                handle.submit_batch(messages.iter().map(|message| (message.key, message.body))).accepted
            }
            Self::String(handle) => {
                handle
                    .submit_batch(messages.iter().map(|message| (message.key.to_string(), *message)))
                    .accepted
            }
        };
        assert_eq!(accepted, messages.len(), "an engine that blocks when full refuses nothing");
    }
}
