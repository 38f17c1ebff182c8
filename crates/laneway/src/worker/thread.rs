//! A worker on a thread of its own.

use std::{sync::Arc, time::Duration};

use super::{Look, Supply, WaitStrategy, Worker};
use crate::{handler::RunTurn, stats::WorkerCounters, sync::park_for};

/// How often a worker that is about to sleep offers its core to others first. On a busy machine that is when the submitter
/// goes on and fills ingress; otherwise it costs a few microseconds. From 4 to 16 made no difference, none at all cost a third of the throughput.
const OFFERS_BEFORE_SLEEP: u32 = 8;

/// How long a spinning worker looks before it sleeps, in nanoseconds: longer than a submitter is away that sleeps for the shortest time there is, which takes about 60 µs.
const SPIN: u64 = 100_000;

/// Looks between two looks at the clock.
const LOOKS: u32 = 64;

/// Pauses with which a worker waits for a dispatcher that is taken, before it counts a failed cycle and sleeps. The last
/// are as long as a lock is held.
const PAUSES: u32 = 6;

/// Pauses of the processor in a breath: about a microsecond.
const BREATH: u32 = 40;

/// Anything above zero: systems round it up to what they can do, about 60 µs.
const NAP: Duration = Duration::from_micros(1);

/// The whole life of a worker thread.
pub(crate) fn work<K: Clone, M>(mut worker: Worker<K, M>, handler: Arc<dyn RunTurn<K, M>>) {
    let strategy = worker.shared.settings.wait;
    loop {
        match worker.look() {
            Look::Turn => {
                run_turns(&mut worker, &*handler);
                take_breath(&worker, strategy);
            }
            Look::Nothing => rest(&mut worker, strategy),
            Look::Contended => back_off(&mut worker),
            Look::Leave => return,
        }
    }
}

fn run_turns<K: Clone, M>(worker: &mut Worker<K, M>, handler: &dyn RunTurn<K, M>) {
    loop {
        let ending = worker.run(handler);
        if !worker.settle(ending) {
            return;
        }
    }
}

/// Lets others have the core, or more messages come, if that is worth it. A worker that would sleep when idle sleeps here, too: the shortest sleep there is
/// takes about as long as a wake-up, and at the rate of a current hundreds of messages come meanwhile.
fn take_breath<K: Clone, M>(worker: &Worker<K, M>, strategy: WaitStrategy) {
    match worker.supply {
        Supply::Plenty => {}
        // It has a core of its own.
        Supply::Flood if strategy == WaitStrategy::BusySpin => {}
        Supply::Flood => std::thread::yield_now(),
        Supply::Current if strategy == WaitStrategy::Park => std::thread::sleep(NAP),
        Supply::Trickle | Supply::Current => (0..BREATH).for_each(|_| std::hint::spin_loop()),
    }
}

/// Waits for work as the strategy says.
fn rest<K: Clone, M>(worker: &mut Worker<K, M>, strategy: WaitStrategy) {
    let found = match strategy {
        WaitStrategy::Park => soon(worker, OFFERS_BEFORE_SLEEP, std::thread::yield_now),
        WaitStrategy::SpinThenPark => spin(worker),
        // Neither sleeps, so neither registers: the next look follows at once, timers included.
        WaitStrategy::Yield => return stay_up(worker, std::thread::yield_now),
        WaitStrategy::BusySpin => return stay_up(worker, std::hint::spin_loop),
    };
    if !found {
        sleep(worker);
    }
}

fn stay_up<K: Clone, M>(worker: &mut Worker<K, M>, between: impl Fn()) {
    worker.stay_up();
    between();
}

/// Whether something seems to have come within so many looks.
fn soon<K: Clone, M>(worker: &Worker<K, M>, looks: u32, between: impl Fn()) -> bool {
    (0..looks).any(|_| {
        between();
        worker.looks_busy()
    })
}

/// The same within some time.
fn spin<K: Clone, M>(worker: &Worker<K, M>) -> bool {
    let clock = &worker.shared.clock;
    let until = clock.now() + SPIN;
    loop {
        if soon(worker, LOOKS, std::hint::spin_loop) {
            return true;
        }
        if clock.now() >= until {
            return false;
        }
    }
}

fn sleep<K: Clone, M>(worker: &mut Worker<K, M>) {
    let Some(until) = worker.lie_down() else { return };
    let now = worker.shared.clock.now();
    park_for(until.map(|until| Duration::from_nanos(until.saturating_sub(now))));
    worker.get_up();
}

/// All dispatchers were taken: waits a little, then longer.
pub(super) fn back_off<K: Clone, M>(worker: &mut Worker<K, M>) {
    worker.failures += 1;
    if worker.failures <= PAUSES {
        (0..1_u32 << (worker.failures + 2)).for_each(|_| std::hint::spin_loop());
        return;
    }
    WorkerCounters::add(&worker.seat.counters.backoff_sleeps, 1);
    std::thread::sleep(worker.backoff_after(worker.failures - PAUSES));
}
