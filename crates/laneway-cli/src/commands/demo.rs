//! `laneway demo`: lanes at work, in this process, within seconds.
//!
//! A pool of workers serves a handful of keys, one of which is slow. A producer submits the messages of all keys in an
//! order that a seed decides ([`plan`]); the handler pretends to work by sleeping, and reports each message to the
//! [`audience`], which prints it and checks what the contract promises.
//!
//! ```text
//!  plan ──► producer ── submit ──► engine ──► handler ── Handled ──► audience ──► renderer
//!                                             ctrl-c ── Interrupted ────┘
//! ```

mod audience;
mod plan;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::value_parser;
use laneway::{Context, Engine, Handle, Topology};

use self::audience::Audience;
use self::plan::{Plan, Step};
use crate::exit::Failure;
use crate::interrupt::on_interrupt;
use crate::render::{Handled, Renderer};

/// The lane that is slow.
const SLOW_LANE: u32 = 1;

/// How long messages that were accepted may still take after ctrl-c.
const DRAIN: Duration = Duration::from_secs(5);

/// How long the messages in flight may still take after that; a slow lane can be slower than anyone's patience.
const GRACE: Duration = Duration::from_secs(1);

/// What to try after the first demonstration.
const NEXT: &str = "
Next:
  laneway demo --keys 200 --messages 20 --workers 64    many lanes
  laneway demo --workers 1                              one worker: a slow lane, and still no lane waits for ever
  laneway bench engine --help                           how fast is it here?
";

/// What `laneway demo` can be told.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How many keys there are: each has a lane, and lane 1 is the slow one
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u32).range(1..=1_000_000))]
    keys: u32,
    /// How many messages each key gets
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u32).range(1..=1_000_000))]
    messages: u32,
    /// How many workers serve the lanes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u16).range(1..=1_024))]
    workers: u16,
    /// How long the slow lane works on one message, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 150)]
    slow_ms: u64,
    /// Decides the order of submission and the work of the fast lanes
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let (events, inbox) = mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    listen_for_interrupt(&stop, &events)?;

    let mut audience = Audience::new(options.keys, Renderer::new(io::stdout().lock(), options.json));
    audience.take_seats()?;
    let engine = start_engine(options, events.clone())?;
    let producer = start_producer(options, &engine, &stop, events);

    let watched = audience.watch(&inbox);
    // The steps of the end are the same in all cases, except that nobody waits for what nobody can see.
    stop.store(true, Ordering::Relaxed);
    let deadline = if watched.is_ok() { DRAIN } else { Duration::ZERO };
    let account = engine.shutdown(deadline).account;
    producer.join().map_err(|_| anyhow::anyhow!("the producer panicked"))?;
    let ending = watched?;
    audience.hear_the_rest(&inbox)?;
    audience.judge(&account, ending)?;
    if !options.json {
        eprint!("{NEXT}");
    }
    Ok(())
}

/// What the audience hears.
enum Event {
    /// The handler is done with a message, and another one of its lane was or was not at work meanwhile.
    Handled { handled: Handled, overlapped: bool },
    /// The producer is done, and so many messages have been accepted.
    Submitted(u64),
    /// The user pressed ctrl-c.
    Interrupted,
}

/// A message of the demonstration.
struct Task {
    /// Its place in its lane, counted from 1.
    sequence: u32,
    work: Duration,
    submitted: Instant,
}

fn listen_for_interrupt(stop: &Arc<AtomicBool>, events: &Sender<Event>) -> anyhow::Result<()> {
    let (stop, events) = (Arc::clone(stop), events.clone());
    on_interrupt(move || {
        stop.store(true, Ordering::Relaxed);
        // The audience has gone when the demonstration is over, and then there is nothing to interrupt.
        let _ = events.send(Event::Interrupted);
    })
}

fn start_engine(options: &Options, events: Sender<Event>) -> anyhow::Result<Engine<u32, Task>> {
    Engine::builder()
        .topology(Topology::pool(options.workers.into()))
        .shutdown_grace(GRACE)
        .handle(handler(options.keys, events))
        .build()
        .context("cannot start the engine")
}

/// Pretends to work, and tells the audience. The gates are the demonstration's own witness: they notice two workers in one
/// lane without asking the engine.
fn handler(
    keys: u32,
    events: Sender<Event>,
) -> impl Fn(&Context<'_, u32>, &mut Task) + Send + Sync + 'static {
    let began = Instant::now();
    let gates: Vec<AtomicBool> = (0..keys).map(|_| AtomicBool::new(false)).collect();
    move |context, task| {
        let lane = *context.key();
        let gate = &gates[lane as usize - 1];
        let overlapped = gate.swap(true, Ordering::AcqRel);
        let started = Instant::now();
        thread::sleep(task.work);
        let handled = Handled {
            lane,
            sequence: task.sequence,
            worker: context.worker(),
            at_seconds: began.elapsed().as_secs_f64(),
            waited_seconds: (started - task.submitted).as_secs_f64(),
            worked_seconds: started.elapsed().as_secs_f64(),
        };
        // Told before the gate opens, so that the audience hears the messages of a lane in the order of the work.
        let _ = events.send(Event::Handled { handled, overlapped });
        gate.store(false, Ordering::Release);
    }
}

/// Submits from a thread of its own, because submitting waits when the engine is full.
fn start_producer(
    options: &Options,
    engine: &Handle<u32, Task>,
    stop: &Arc<AtomicBool>,
    events: Sender<Event>,
) -> JoinHandle<()> {
    let slow = Duration::from_millis(options.slow_ms);
    let plan = Plan::new(options.keys, options.messages, slow, options.seed);
    let (engine, stop) = (engine.clone(), Arc::clone(stop));
    thread::spawn(move || {
        let mut accepted = 0;
        for Step { lane, sequence, work } in plan {
            let task = Task { sequence, work, submitted: Instant::now() };
            // An engine that blocks refuses only once it has been closed, and that is the end of production too.
            if stop.load(Ordering::Relaxed) || engine.submit((lane, task)).is_err() {
                break;
            }
            accepted += 1;
        }
        let _ = events.send(Event::Submitted(accepted));
    })
}
