//! K routers on P partitions, simulated: how many instances a load needs, what a lost one costs, and what breaks first.
//!
//! Prints the tables of `docs/design/scale.md`. Everything is drawn from one seed, so the same call prints the same tables; `--rate N` asks about
//! another load than a million messages per second, `--seed N` about other luck.
//!
//! Messages are simulated one by one, on a clock of their own: each waits for a core of its instance, then for its lane and for a slot, is with its
//! target for a time, and leaves. What that costs the instance was measured on this repository's own router ([`MEASURED`]); how long targets take,
//! and how keys are spread, are assumptions, which the tables vary.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

/// What was measured, with the command that measures it again.
struct Measured {
    /// Processor time of the router for one message with an HTTP call, in seconds: `laneway bench router --workload deliver`, two cores.
    cpu: f64,
    /// Messages per second of one queue that a broker hands out to a router and takes back, where that is known: `laneway-bench router --source KIND`, as `docs/guide/brokers.md` has them.
    brokers: [(&'static str, Option<f64>); 6],
}

/// The brokers' figures are runs of small servers on two busy cores, shared with the router: an order of magnitude, no more. The real ones
/// are better, and are to be measured by whoever plans with them.
const MEASURED: Measured = Measured {
    cpu: 27.6e-6,
    brokers: [
        ("RabbitMQ, one queue", Some(145_300.0)),
        ("NATS JetStream, one server", Some(142_000.0)),
        ("ActiveMQ, one queue", Some(5_000.0)),
        ("Postgres, one queue", Some(4_100.0)),
        ("SQS FIFO, one queue (quota)", Some(70_000.0)),
        // The benchmark reads from none.
        ("Kafka", None),
    ],
};

/// An instance: so many cores, so many slots.
const CORES: usize = 8;
const SLOTS: usize = 2_000;
/// Of a core no more than this is planned with: queues grow without bound near the whole.
const HEADROOM: f64 = 0.7;
/// How long a target takes: half of the calls at most this, and the spread of a log-normal whose 99th percentile is ten times that.
const TARGET_MEDIAN: f64 = 4e-3;
const SPREAD: f64 = 0.99;
/// Simulated for so long, in seconds; the first part of it warms up.
const WINDOW: f64 = 0.25;
const KEYS: usize = 1_000_000;

fn main() {
    let (rate, seed) = (argument("--rate", 1e6), argument("--seed", 1.0) as u64);
    let mean = TARGET_MEDIAN * (SPREAD * SPREAD / 2.0).exp();
    println!(
        "{rate:.0} messages per second, {CORES} cores and {SLOTS} slots per instance, {KEYS} keys, targets {:.1} ms on average\n",
        mean * 1e3
    );
    instances(rate, seed);
    partitions(rate, seed);
    skew(rate, mean);
    loss(rate);
    first_to_break(rate, mean);
}

fn argument(name: &str, otherwise: f64) -> f64 {
    let mut arguments = std::env::args().skip_while(|argument| argument != name).skip(1);
    arguments.next().map_or(otherwise, |value| value.parse().expect("a number"))
}

// ── how many instances ──────────────────────────────────────────────────────────────────────────────────────────────

fn instances(rate: f64, seed: u64) {
    let least = (rate * MEASURED.cpu / CORES as f64 / HEADROOM).ceil() as usize;
    println!(
        "| instances | busiest has | its cores are busy | calls under way | waits, p50 | waits, p99 | keeps up |"
    );
    println!("|---|---|---|---|---|---|---|");
    for count in [least * 2 / 3, least * 5 / 6, least, least * 5 / 4, least * 3 / 2] {
        let shares = shares(count, 1_024, 0.0, seed);
        let share = shares.iter().copied().fold(0.0, f64::max);
        let run = simulate(rate * share, seed);
        println!(
            "| {count} | {:.1} % | {:.0} % | {:.0} | {} | {} | {} |",
            share * 100.0,
            (rate * share * MEASURED.cpu / CORES as f64 * 100.0),
            run.under_way,
            time(run.waits[0]),
            time(run.waits[1]),
            if run.keeps_up { "yes" } else { "no" }
        );
    }
    println!();
}

/// What part of the load each instance has: keys to partitions by a hash, partitions to instances in turn.
fn shares(instances: usize, partitions: usize, exponent: f64, seed: u64) -> Vec<f64> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (weights, total) = zipf(exponent);
    let mut shares = vec![0.0; instances];
    for weight in weights {
        shares[random.usize(0..partitions) % instances] += weight / total;
    }
    shares
}

/// How often keys come, the hottest first, and the sum of it.
fn zipf(exponent: f64) -> (Vec<f64>, f64) {
    let weights: Vec<f64> = (1..=KEYS).map(|rank| (rank as f64).powf(-exponent)).collect();
    let total = weights.iter().sum();
    (weights, total)
}

struct Run {
    /// From arrival to the beginning of the call: median and 99th percentile.
    waits: [f64; 2],
    under_way: f64,
    keeps_up: bool,
}

#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Event {
    CoreDone { message: usize },
    CallDone { message: usize },
}

/// An instant, and the order in which things of one instant were put down.
type Due = Reverse<(u64, usize)>;

/// One instance under this load.
struct Instance {
    random: fastrand::Rng,
    now: u64,
    due: BinaryHeap<Due>,
    events: Vec<Event>,
    waiting_for_core: VecDeque<usize>,
    cores: usize,
    ready: VecDeque<usize>,
    slots: usize,
    /// Keys with a message under way, and what waits behind it.
    lanes: HashMap<u32, VecDeque<usize>>,
    /// By message: its key, when it came, when its call began.
    keys: Vec<u32>,
    came: Vec<u64>,
    began: Vec<u64>,
}

const NANOS: f64 = 1e9;

fn simulate(rate: f64, seed: u64) -> Run {
    let count = (rate * WINDOW) as usize;
    let mut instance = Instance {
        random: fastrand::Rng::with_seed(seed),
        now: 0,
        due: BinaryHeap::new(),
        events: Vec::with_capacity(count * 2),
        waiting_for_core: VecDeque::new(),
        cores: CORES,
        ready: VecDeque::new(),
        slots: SLOTS,
        lanes: HashMap::new(),
        keys: Vec::with_capacity(count),
        came: Vec::with_capacity(count),
        began: vec![0; count],
    };
    let mut next_arrival = 0.0;
    while instance.came.len() < count {
        // Poisson: the time between two arrivals is exponential.
        next_arrival += -(1.0 - instance.random.f64()).ln() / rate * NANOS;
        instance.run_until(next_arrival as u64);
        instance.arrive();
    }
    let end = instance.now;
    let done_in_time = instance.began.iter().filter(|began| **began > 0 && **began <= end).count();
    let backlog = count - done_in_time;
    instance.run_until(u64::MAX);
    let warm = count / 4;
    let mut waits: Vec<f64> =
        (warm..count).map(|at| (instance.began[at] - instance.came[at]) as f64 / NANOS).collect();
    waits.sort_by(f64::total_cmp);
    let at = |part: f64| waits[((waits.len() - 1) as f64 * part) as usize];
    let mean = TARGET_MEDIAN * (SPREAD * SPREAD / 2.0).exp();
    // What waits at the end may be the noise of a moment; a load that is too large leaves a part of itself behind.
    Run {
        waits: [at(0.5), at(0.99)],
        under_way: rate * mean,
        keeps_up: (backlog as f64) < count as f64 * 0.02,
    }
}

impl Instance {
    fn after(&mut self, seconds: f64, event: Event) {
        self.due.push(Reverse((self.now + (seconds * NANOS) as u64, self.events.len())));
        self.events.push(event);
    }

    fn run_until(&mut self, until: u64) {
        while let Some(Reverse((at, event))) =
            self.due.peek().copied().filter(|Reverse((at, _))| *at <= until)
        {
            self.due.pop();
            self.now = at;
            match self.events[event] {
                Event::CoreDone { message } => self.core_done(message),
                Event::CallDone { message } => self.call_done(message),
            }
        }
        if until != u64::MAX {
            self.now = until;
        }
    }

    fn arrive(&mut self) {
        let message = self.came.len();
        self.came.push(self.now);
        self.keys.push(self.random.u32(0..KEYS as u32));
        self.waiting_for_core.push_back(message);
        self.use_cores();
    }

    fn use_cores(&mut self) {
        while self.cores > 0
            && let Some(message) = self.waiting_for_core.pop_front()
        {
            self.cores -= 1;
            self.after(MEASURED.cpu, Event::CoreDone { message });
        }
    }

    fn core_done(&mut self, message: usize) {
        self.cores += 1;
        match self.lanes.get_mut(&self.keys[message]) {
            Some(behind) => behind.push_back(message),
            None => {
                self.lanes.insert(self.keys[message], VecDeque::new());
                self.ready.push_back(message);
            }
        }
        self.use_slots();
        self.use_cores();
    }

    fn use_slots(&mut self) {
        while self.slots > 0
            && let Some(message) = self.ready.pop_front()
        {
            self.slots -= 1;
            self.began[message] = self.now;
            let time = TARGET_MEDIAN * (SPREAD * normal(&mut self.random)).exp();
            self.after(time, Event::CallDone { message });
        }
    }

    fn call_done(&mut self, message: usize) {
        self.slots += 1;
        let key = self.keys[message];
        let behind = self.lanes.get_mut(&key).expect("a lane lives while it has a message under way");
        match behind.pop_front() {
            Some(next) => self.ready.push_back(next),
            None => drop(self.lanes.remove(&key)),
        }
        self.use_slots();
    }
}

/// A draw from the normal distribution (Box and Muller).
fn normal(random: &mut fastrand::Rng) -> f64 {
    let (one, other) = (1.0 - random.f64(), random.f64());
    (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * other).cos()
}

// ── how many partitions ─────────────────────────────────────────────────────────────────────────────────────────────

fn partitions(rate: f64, seed: u64) {
    let count = planned(rate);
    println!(
        "| partitions, on {count} instances | per partition and second | busiest instance, even keys | Zipf 0.5 | Zipf 0.8 |"
    );
    println!("|---|---|---|---|---|");
    for partitions in [count, count + count / 2, count * 4, 256, 1_024] {
        let busiest = [0.0, 0.5, 0.8].map(|exponent| {
            shares(count, partitions, exponent, seed).into_iter().fold(0.0, f64::max) * count as f64
        });
        println!(
            "| {partitions} | {:.0} | {:.2} of the mean | {:.2} | {:.2} |",
            rate / partitions as f64,
            busiest[0],
            busiest[1],
            busiest[2]
        );
    }
    println!();
}

/// The number of instances that the load is planned with.
fn planned(rate: f64) -> usize {
    (rate * MEASURED.cpu / CORES as f64 / HEADROOM).ceil() as usize
}

// ── what a hot key does ─────────────────────────────────────────────────────────────────────────────────────────────

fn skew(rate: f64, mean: f64) {
    println!(
        "A lane serves {:.0} messages per second: one at a time, each {:.1} ms.\n",
        1.0 / mean,
        mean * 1e3
    );
    println!(
        "| spread of {KEYS} keys | the hottest has, per second | lanes that get more than they can serve | part of the load in those |"
    );
    println!("|---|---|---|---|");
    for (name, exponent) in [("even", 0.0), ("Zipf 0.5", 0.5), ("Zipf 0.8", 0.8), ("Zipf 1.0", 1.0)] {
        let (weights, total) = zipf(exponent);
        let rates = weights.iter().map(|weight| weight / total * rate);
        let overloaded: Vec<f64> = rates.clone().filter(|rate| *rate > 1.0 / mean).collect();
        println!(
            "| {name} | {:.0} | {} | {:.1} % |",
            rates.fold(0.0, f64::max),
            overloaded.len(),
            overloaded.iter().fold(0.0, |sum, rate| sum + rate) / rate * 100.0
        );
    }
    println!();
}

// ── what a lost instance costs ──────────────────────────────────────────────────────────────────────────────────────

/// As a fluid: what comes for the partitions of the lost instance waits until the broker gives them to others, and is then worked off beside the rest.
fn loss(rate: f64) {
    let capacity = CORES as f64 / MEASURED.cpu;
    println!(
        "| instances | lease | waits meanwhile | survivors' cores are busy | all caught up after | longest wait |"
    );
    println!("|---|---|---|---|---|---|");
    let planned = planned(rate);
    for count in [planned, planned * 5 / 4, planned * 2] {
        for lease in [5.0, 30.0] {
            let arriving = rate / count as f64;
            let survivors = (count - 1) as f64;
            let spare = survivors * capacity - rate;
            let backlog = arriving * lease;
            let caught_up = if spare > 0.0 { lease + backlog / spare } else { f64::INFINITY };
            // The last one that came before the lease ran out has the whole of the others' backlog before it, at the worst.
            let longest = if spare > 0.0 { lease.max(backlog / spare) } else { f64::INFINITY };
            println!(
                "| {count} | {} | {:.1} million | {:.0} % | {} | {} |",
                time(lease),
                backlog / 1e6,
                rate / survivors / capacity * 100.0,
                time(caught_up),
                time(longest)
            );
        }
    }
    println!();
}

// ── what breaks first ───────────────────────────────────────────────────────────────────────────────────────────────

fn first_to_break(rate: f64, mean: f64) {
    let count = planned(rate);
    println!("| what | bears | needed | so many are needed |");
    println!("|---|---|---|---|");
    let row = |what: &str, bears: f64, needed: f64| {
        println!("| {what} | {bears:.0} /s | {needed:.0} /s | {:.0} |", (needed / bears).ceil());
    };
    row("a lane (one key)", 1.0 / mean, rate / KEYS as f64);
    for (name, bears) in MEASURED.brokers {
        match bears {
            Some(bears) => row(name, bears, rate),
            None => println!("| {name} | not measured | {rate:.0} /s | |"),
        }
    }
    row("an instance's cores, planned", CORES as f64 / MEASURED.cpu * HEADROOM, rate);
    row("an instance's slots", SLOTS as f64 / mean, rate);
    let calls = rate * mean;
    println!(
        "\n{calls:.0} calls are under way at once, {:.0} on each of {count} instances.",
        calls / count as f64
    );
}

fn time(seconds: f64) -> String {
    match seconds {
        never if never.is_infinite() => "never".to_owned(),
        long if long >= 1.0 => format!("{long:.0} s"),
        short if short >= 1e-3 => format!("{:.1} ms", short * 1e3),
        tiny => format!("{:.0} µs", tiny * 1e6),
    }
}
