//! `/metrics`: everything that is counted, as Prometheus reads it (text format 0.0.4).
//!
//! Labels are pools, sources, partitions, flows, queues and words of our own: never a group, a target or an id, of which there may be millions. Of pools only the first hundred
//! are listed by name; the others are summed up under `(others)`. What is said of flows is in `flow`.

#[cfg(feature = "flow")]
mod flow;

use std::fmt::Write;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;

use laneway::{Bound, Kind, Overflow};

use super::pools::state_name;
use super::route::Route;
use crate::ingress;
use crate::mediator::{BreakerState, MetricsSnapshot};
use crate::message::MediationType;
use crate::pool::{PoolCounts, PoolState};
use crate::router::{PoolView, SourceView};
use crate::service::Service;

/// How many pools have labels of their own. Each costs some forty lines.
const POOLS_LISTED_MAX: usize = 100;

/// How many workers have labels of their own, in all pools together: for a look at who does the work, not for thousands.
const WORKERS_LISTED_MAX: usize = 256;

/// The same of dispatchers.
const DISPATCHERS_LISTED_MAX: usize = 256;

/// How many messages groups have: the bounds.
const DEPTHS: [usize; 4] = [1, 10, 100, 1_000];

/// Groups that a scrape looks at, in all pools together.
const GROUPS_LOOKED_AT_MAX: usize = 65_536;

const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) fn routes() -> Vec<Route> {
    vec![Route::get("/metrics", metrics, "Metrics for Prometheus").gives_text(200, "text/plain").open()]
}

async fn metrics(State(service): State<Service>) -> impl IntoResponse {
    let mut text = Text::default();
    about_process(&mut text, &service);
    about_pools(&mut text, service.router().pools());
    about_depths(&mut text, &service.router().pool_list());
    about_sources(&mut text, &service.router().sources().await);
    about_queues(&mut text, &service);
    about_mediators(&mut text, &service);
    if let Some(stats) = service.ingress_stats() {
        about_ingress(&mut text, &stats);
    }
    #[cfg(feature = "flow")]
    if let Some(flows) = service.flow_counts() {
        flow::about_flows(&mut text, flows).await;
    }
    ([(header::CONTENT_TYPE, MEDIA_TYPE)], text.0)
}

/// The text as it grows.
#[derive(Default)]
struct Text(String);

impl Text {
    /// The head of a family; its samples must follow.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a string takes everything");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (place, (label, text)) in labels.iter().enumerate() {
            let before = if place == 0 { '{' } else { ',' };
            write!(self.0, "{before}{label}=\"{}\"", escaped(text)).expect("a string takes everything");
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        writeln!(self.0, " {value}").expect("a string takes everything");
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], counted: &Histogram) {
        let with = |extra: &str| -> Vec<(String, String)> {
            let own = labels.iter().map(|(label, text)| ((*label).to_owned(), (*text).to_owned()));
            own.chain([("le".to_owned(), extra.to_owned())]).collect()
        };
        let mut bucket = |bound: &str, count: u64| {
            let labels = with(bound);
            let labels: Vec<_> = labels.iter().map(|(label, text)| (label.as_str(), text.as_str())).collect();
            self.sample(&format!("{name}_bucket"), &labels, count);
        };
        for (bound, count) in &counted.buckets {
            bucket(&bound.to_string(), *count);
        }
        bucket("+Inf", counted.calls);
        self.sample(&format!("{name}_sum"), labels, counted.sum_seconds);
        self.sample(&format!("{name}_count"), labels, counted.calls);
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A histogram as Prometheus wants it.
#[derive(Default)]
struct Histogram {
    /// Upper end in seconds, and how many were not beyond it.
    buckets: Vec<(f64, u64)>,
    calls: u64,
    sum_seconds: f64,
}

impl Histogram {
    fn add(&mut self, counted: &MetricsSnapshot) {
        for (place, (bound, count)) in counted.cumulative().enumerate() {
            match self.buckets.get_mut(place) {
                Some(bucket) => bucket.1 += count,
                None => self.buckets.push((bound.as_secs_f64(), count)),
            }
        }
        self.calls += counted.calls();
        self.sum_seconds += counted.sum.as_secs_f64();
    }
}

// ── the process ───────────────────────────────────────────────────────────────────────────────────────────────────────

fn about_process(text: &mut Text, service: &Service) {
    text.family("laneway_build_info", "gauge", "Always 1; the version is in the label.");
    text.sample("laneway_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    text.family("laneway_uptime_seconds", "gauge", "Since the service was started.");
    text.sample("laneway_uptime_seconds", &[], service.uptime().as_secs_f64());
    text.family("laneway_ready", "gauge", "1 until the shutdown begins.");
    text.sample("laneway_ready", &[], u8::from(!service.is_closing()));
    text.family("laneway_held_messages", "gauge", "Messages in the hands of the service.");
    text.sample("laneway_held_messages", &[], service.held());
    text.family("laneway_warnings", "gauge", "Warnings on the list.");
    text.sample("laneway_warnings", &[], service.router().warnings().len());
    text.family("laneway_dashboard_subscribers", "gauge", "Pages of the dashboard that are open.");
    let subscribers = service.history().map_or(0, |history| history.subscribers());
    text.sample("laneway_dashboard_subscribers", &[], subscribers);
    text.family("laneway_audit_entries_total", "counter", "Requests that changed something, or tried to.");
    text.sample("laneway_audit_entries_total", &[], service.audit().total());
    text.family("laneway_spans_total", "counter", "Spans by what became of them.");
    let (exported, failed) = service.exported_spans();
    let dropped = service.router().record().spans().dropped();
    for (fate, count) in [("exported", exported), ("failed", failed), ("dropped", dropped)] {
        text.sample("laneway_spans_total", &[("fate", fate)], count);
    }
}

// ── pools ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// What is said of a pool, or of all that have no name of their own.
struct PoolRow {
    name: String,
    counts: PoolCounts,
    waiting: usize,
    in_flight: usize,
    groups: usize,
    parked: usize,
    parked_messages: usize,
    capacity: usize,
    concurrency: usize,
    service: Histogram,
    states: Vec<PoolState>,
    engine: EngineRow,
}

/// What the engines of a row have counted: the names of documents 000, 001 and 003.
#[derive(Default)]
struct EngineRow {
    /// Name, kind, help and value of each.
    numbers: Vec<(&'static str, &'static str, &'static str, u64)>,
    /// Phase, quantile, and seconds: the worst of the row's pools.
    latencies: Vec<(&'static str, &'static str, f64)>,
    /// Messages that were dropped, by the policy that did it; the last are those that somebody took back.
    drops: [(&'static str, u64); 3],
}

impl EngineRow {
    fn add(&mut self, engine: &laneway::Snapshot) {
        let sum = |of: fn(&laneway::DispatcherStats) -> u64| engine.dispatchers.iter().map(of).sum::<u64>();
        let workers = |of: fn(&laneway::WorkerStats) -> u64| engine.workers.iter().map(of).sum::<u64>();
        let deepest =
            engine.dispatchers.iter().map(|part| u64::from(part.max_pending_depth)).max().unwrap_or(0);
        let numbers = [
            (
                "queue_depth_messages",
                "gauge",
                "Messages that wait in ingress and in lanes.",
                sum(|it| it.depth as u64),
            ),
            (
                "ingress_depth_messages",
                "gauge",
                "Messages that no lane has yet.",
                sum(|it| it.ingress_depth as u64),
            ),
            ("active_lanes", "gauge", "Lanes that exist.", sum(|it| it.active_lanes as u64)),
            ("running_lanes", "gauge", "Lanes whose head is in flight.", sum(|it| it.running_lanes as u64)),
            (
                "deferred_lanes",
                "gauge",
                "Lanes that wait for another attempt.",
                sum(|it| it.deferred_lanes as u64),
            ),
            (
                "active_flow_mappings",
                "gauge",
                "Keys that are mapped to a dispatcher.",
                engine.active_mappings as u64,
            ),
            ("max_pending_depth_messages", "gauge", "The deepest that a lane ever was.", deepest),
            ("accepted_total", "counter", "Messages that were accepted.", engine.account.accepted),
            ("done_total", "counter", "Messages that were handled.", engine.account.done),
            ("dispatched_total", "counter", "Attempts that were started.", sum(|it| it.dispatched)),
            ("turns_total", "counter", "Turns that were run.", sum(|it| it.turns)),
            ("panics_total", "counter", "Handlers that panicked.", sum(|it| it.panics)),
            (
                "enqueued_due_to_busy_total",
                "counter",
                "Messages that found their lane in flight.",
                sum(|it| it.enqueued_due_to_busy),
            ),
            ("refusals_total", "counter", "Messages that were refused.", engine.refusals.total()),
            ("late_total", "counter", "Messages that came after their flow had finished.", engine.late),
            (
                "lock_attempts_total",
                "counter",
                "Times that a worker tried to take a dispatcher.",
                sum(|it| it.lock_attempts),
            ),
            (
                "lock_failures_total",
                "counter",
                "Times that another worker had it.",
                sum(|it| it.lock_failures),
            ),
            ("polls_total", "counter", "Times that a worker looked for work.", workers(|it| it.polls)),
            (
                "backoff_sleeps_total",
                "counter",
                "Times that a worker slept because all dispatchers were taken.",
                workers(|it| it.backoff_sleeps),
            ),
            ("parks_total", "counter", "Times that a worker slept for want of work.", sum(|it| it.parks)),
            ("wake_ups_total", "counter", "Times that such a worker was up again.", sum(|it| it.wake_ups)),
        ];
        for (place, number) in numbers.into_iter().enumerate() {
            match self.numbers.get_mut(place) {
                Some(there) if number.0.starts_with("max_") => there.3 = there.3.max(number.3),
                Some(there) => there.3 += number.3,
                None => self.numbers.push(number),
            }
        }
        self.add_drops(&engine.drops);
        let mut place = 0;
        for (phase, of) in [
            ("waiting", (|part| &part.waiting) as fn(&laneway::DispatcherStats) -> &laneway::Latency),
            ("service", |part| &part.service),
            ("total", |part| &part.total),
        ] {
            for (quantile, share) in [("0.5", 0.5), ("0.95", 0.95), ("0.99", 0.99)] {
                let parts = engine.dispatchers.iter().map(|part| of(part).quantile(share).as_secs_f64());
                let worst = parts.fold(0.0, f64::max);
                match self.latencies.get_mut(place) {
                    Some(there) => there.2 = there.2.max(worst),
                    None => self.latencies.push((phase, quantile, worst)),
                }
                place += 1;
            }
        }
    }
}

impl EngineRow {
    fn add_drops(&mut self, drops: &laneway::Drops) {
        let by = |policy: Overflow| -> u64 {
            let kinds = [Kind::Event, Kind::Start, Kind::Finish];
            let of = |bound| kinds.map(|kind| drops.count(bound, policy, kind)).into_iter().sum::<u64>();
            Bound::ALL.into_iter().map(of).sum()
        };
        let new = [
            ("drop_oldest", by(Overflow::DropOldest)),
            ("drop_newest", by(Overflow::DropNewest)),
            ("withdrawn", drops.withdrawn()),
        ];
        for (sum, (policy, count)) in self.drops.iter_mut().zip(new) {
            *sum = (policy, sum.1 + count);
        }
    }
}

impl PoolRow {
    fn new(name: String) -> Self {
        PoolRow {
            name,
            counts: PoolCounts::default(),
            waiting: 0,
            in_flight: 0,
            groups: 0,
            parked: 0,
            parked_messages: 0,
            capacity: 0,
            concurrency: 0,
            service: Histogram::default(),
            states: Vec::new(),
            engine: EngineRow::default(),
        }
    }

    fn add(&mut self, view: &PoolView) {
        let in_flight: usize = view.engine.dispatchers.iter().map(|part| part.in_flight).sum();
        let (sum, counts) = (&mut self.counts, view.counts);
        sum.submitted += counts.submitted;
        sum.succeeded += counts.succeeded;
        sum.failed += counts.failed;
        sum.transient += counts.transient;
        sum.held_back += counts.held_back;
        sum.refused += counts.refused;
        sum.refused_pool_full += counts.refused_pool_full;
        sum.refused_group_full += counts.refused_group_full;
        sum.refused_not_open += counts.refused_not_open;
        sum.given_back += counts.given_back;
        self.waiting += view.held.saturating_sub(in_flight);
        self.in_flight += in_flight;
        self.groups += view.groups;
        self.parked += view.parked_groups;
        self.parked_messages += view.parked_messages;
        self.capacity += view.settings.capacity;
        self.concurrency += view.settings.concurrency;
        self.service.add(&view.attempts);
        self.states.push(view.state);
        self.engine.add(&view.engine);
    }
}

fn about_pools(text: &mut Text, views: Vec<PoolView>) {
    text.family("laneway_pools", "gauge", "Pools by state.");
    for state in [PoolState::Open, PoolState::Paused, PoolState::Waiting, PoolState::Draining] {
        let count = views.iter().filter(|view| view.state == state).count();
        text.sample("laneway_pools", &[("state", state_name(state))], count);
    }
    let mut rows: Vec<PoolRow> = Vec::new();
    for (place, view) in views.iter().enumerate() {
        if place < POOLS_LISTED_MAX {
            rows.push(PoolRow::new(view.code.to_string()));
        } else if place == POOLS_LISTED_MAX {
            rows.push(PoolRow::new("(others)".to_owned()));
        }
        if let Some(row) = rows.last_mut() {
            row.add(view);
        }
    }
    pool_counters(text, &rows);
    let mut gauge = |name: &str, help: &str, of: fn(&PoolRow) -> usize| {
        text.family(name, "gauge", help);
        rows.iter().for_each(|row| text.sample(name, &[("pool", &row.name)], of(row)));
    };
    gauge("laneway_pool_waiting_messages", "Messages in the pool that are not with their target.", |row| {
        row.waiting
    });
    gauge("laneway_pool_in_flight", "Messages that are with their target.", |row| row.in_flight);
    gauge("laneway_pool_groups", "Groups that have messages in the pool.", |row| row.groups);
    gauge("laneway_pool_parked_groups", "Groups that wait for an operator.", |row| row.parked);
    gauge(
        "laneway_pool_parked_messages",
        "Messages of those groups in the pool, which do not count against its capacity.",
        |row| row.parked_messages,
    );
    gauge("laneway_pool_capacity_messages", "How many messages the pool holds at most.", |row| row.capacity);
    gauge("laneway_pool_concurrency", "How many messages are with their targets at most.", |row| {
        row.concurrency
    });
    text.family("laneway_pool_service_seconds", "histogram", "How long attempts took.");
    rows.iter()
        .for_each(|row| text.histogram("laneway_pool_service_seconds", &[("pool", &row.name)], &row.service));
    about_engines(text, &rows);
    about_workers(text, &views);
    about_dispatchers(text, &views);
}

fn about_engines(text: &mut Text, rows: &[PoolRow]) {
    let Some(first) = rows.first() else { return };
    let name = "laneway_engine_drops_total";
    text.family(name, "counter", "Messages that were dropped by an overflow policy, or taken back.");
    for row in rows {
        for (policy, count) in row.engine.drops {
            text.sample(name, &[("pool", &row.name), ("policy", policy)], count);
        }
    }
    for (place, (name, kind, help, _)) in first.engine.numbers.iter().enumerate() {
        let name = format!("laneway_engine_{name}");
        text.family(&name, kind, help);
        rows.iter().for_each(|row| text.sample(&name, &[("pool", &row.name)], row.engine.numbers[place].3));
    }
    let name = "laneway_engine_latency_seconds";
    text.family(name, "summary", "Quantiles since the start: waiting for a slot, in it, and both.");
    for row in rows {
        for (phase, quantile, seconds) in &row.engine.latencies {
            text.sample(name, &[("pool", &row.name), ("phase", phase), ("quantile", quantile)], seconds);
        }
    }
}

/// Who does the work: the workers of the first pools by name, the others in a sum.
fn about_workers(text: &mut Text, views: &[PoolView]) {
    let name = "laneway_worker_messages_total";
    text.family(name, "counter", "Attempts by the worker that made them.");
    let (mut listed, mut others) = (0, 0);
    for (pool, worker) in
        views.iter().flat_map(|view| view.engine.workers.iter().map(|worker| (&view.code, worker)))
    {
        listed += 1;
        match listed <= WORKERS_LISTED_MAX {
            true => text.sample(name, &[("pool", pool), ("worker", &worker.name)], worker.handled),
            false => others += worker.handled,
        }
    }
    if listed > WORKERS_LISTED_MAX {
        text.sample(name, &[("pool", "(others)"), ("worker", "(others)")], others);
    }
}

/// Where work waits inside of pools: the dispatchers of the first pools by name, the others in a sum.
fn about_dispatchers(text: &mut Text, views: &[PoolView]) {
    let all =
        || views.iter().flat_map(|view| view.engine.dispatchers.iter().map(move |part| (&view.code, part)));
    let mut each = |name: &str, kind: &str, help: &str, of: fn(&laneway::DispatcherStats) -> u64| {
        text.family(name, kind, help);
        for (pool, part) in all().take(DISPATCHERS_LISTED_MAX) {
            text.sample(name, &[("pool", pool), ("dispatcher", &part.name)], of(part));
        }
        if all().count() > DISPATCHERS_LISTED_MAX {
            let others: u64 = all().skip(DISPATCHERS_LISTED_MAX).map(|(_, part)| of(part)).sum();
            text.sample(name, &[("pool", "(others)"), ("dispatcher", "(others)")], others);
        }
    };
    each(
        "laneway_dispatcher_depth_messages",
        "gauge",
        "Messages that wait for a dispatcher of the pool.",
        |it| it.depth as u64,
    );
    each("laneway_dispatcher_messages_total", "counter", "Attempts that a dispatcher has started.", |it| {
        it.dispatched
    });
}

/// Messages per group, as counts of groups that have up to so many: a name for each would be one too many.
fn about_depths(text: &mut Text, pools: &[std::sync::Arc<crate::pool::Pool>]) {
    let name = "laneway_pool_groups_by_depth";
    text.family(
        name,
        "gauge",
        "Groups that have up to so many messages in the pool. Pools are left out from where all together have more than 65536 groups.",
    );
    let mut budget = GROUPS_LOOKED_AT_MAX;
    for pool in pools.iter().take(POOLS_LISTED_MAX) {
        // Part of a pool would look like all of it.
        if pool.group_count() > budget {
            break;
        }
        let (mut counts, mut all, mut seen) = ([0_usize; DEPTHS.len()], 0, 0);
        pool.survey(0, usize::MAX, |_, depth| {
            seen += 1;
            if depth > 0 {
                all += 1;
                // Beyond the last bound there is only the sum.
                if let Some(count) = counts.get_mut(DEPTHS.partition_point(|bound| *bound < depth)) {
                    *count += 1;
                }
            }
        });
        budget = budget.saturating_sub(seen);
        let mut up_to = 0;
        for (bound, count) in DEPTHS.iter().zip(counts) {
            up_to += count;
            text.sample(name, &[("pool", pool.code()), ("up_to", &bound.to_string())], up_to);
        }
        text.sample(name, &[("pool", pool.code()), ("up_to", "+Inf")], all);
    }
}

fn pool_counters(text: &mut Text, rows: &[PoolRow]) {
    text.family(
        "laneway_pool_messages_total",
        "counter",
        "Messages by what became of them; submitted ones were taken in.",
    );
    for row in rows {
        let outcomes = [
            ("submitted", row.counts.submitted),
            ("succeeded", row.counts.succeeded),
            ("failed", row.counts.failed),
            ("refused", row.counts.refused),
            ("given_back", row.counts.given_back),
        ];
        for (outcome, count) in outcomes {
            text.sample("laneway_pool_messages_total", &[("pool", &row.name), ("outcome", outcome)], count);
        }
    }
    text.family("laneway_pool_refusals_total", "counter", "Messages that were not taken in, by the reason.");
    for row in rows {
        let reasons = [
            ("pool_full", row.counts.refused_pool_full),
            ("group_full", row.counts.refused_group_full),
            ("not_open", row.counts.refused_not_open),
        ];
        for (reason, count) in reasons {
            text.sample("laneway_pool_refusals_total", &[("pool", &row.name), ("reason", reason)], count);
        }
    }
    let mut counter = |name: &str, help: &str, of: fn(&PoolRow) -> u64| {
        text.family(name, "counter", help);
        rows.iter().for_each(|row| text.sample(name, &[("pool", &row.name)], of(row)));
    };
    counter("laneway_pool_retries_total", "Attempts that failed and are repeated.", |row| {
        row.counts.transient
    });
    counter("laneway_pool_holds_total", "Attempts that were put off, by a target or a rate.", |row| {
        row.counts.held_back
    });
}

// ── sources ───────────────────────────────────────────────────────────────────────────────────────────────────────────

fn about_sources(text: &mut Text, sources: &[SourceView]) {
    text.family("laneway_source_info", "gauge", "1 for each source; its kind and its state are labels.");
    for source in sources {
        let labels =
            [("source", source.name.as_str()), ("kind", source.kind), ("state", source.state.word())];
        text.sample("laneway_source_info", &labels, 1);
    }
    let mut family = |name: &str, kind: &str, help: &str, of: fn(&SourceView) -> Option<u64>| {
        text.family(name, kind, help);
        for source in sources {
            if let Some(value) = of(source) {
                text.sample(name, &[("source", &source.name)], value);
            }
        }
    };
    family("laneway_source_up", "gauge", "1 if the source answered when it was last asked.", |it| {
        Some(u64::from(it.healthy))
    });
    family("laneway_source_claimed_total", "counter", "Deliveries taken from the source.", |it| {
        Some(it.claimed)
    });
    family("laneway_source_unreadable_total", "counter", "Deliveries that were not messages.", |it| {
        Some(it.unreadable)
    });
    family("laneway_source_held_deliveries", "gauge", "Deliveries that are held and not settled.", |it| {
        Some(it.ledger.held as u64)
    });
    family("laneway_source_stale_settlements_total", "counter", "Settlements that came too late.", |it| {
        Some(it.ledger.stale_settlements)
    });
    family(
        "laneway_source_copies_total",
        "counter",
        "Deliveries that came again while they were held.",
        |it| Some(it.ledger.swallowed_copies),
    );
    family("laneway_source_waiting_messages", "gauge", "Published and not claimed.", |it| {
        it.depth.map(|depth| depth.waiting)
    });
    family("laneway_source_leased_messages", "gauge", "Claimed and not settled.", |it| {
        it.depth.map(|depth| depth.leased)
    });
    family("laneway_source_dead_letters", "gauge", "Among the dead letters.", |it| {
        it.depth.map(|depth| depth.dead)
    });
    family("laneway_source_quarantined", "gauge", "In quarantine.", |it| {
        it.depth.map(|depth| depth.quarantined)
    });
}

fn about_queues(text: &mut Text, service: &Service) {
    let name = "laneway_queue_vanished_total";
    text.family(
        name,
        "counter",
        "Messages that were not in the queue's file any more when it was their turn.",
    );
    for queue in service.queue_names() {
        let vanished = service.queue(&queue).map_or(0, |queue| queue.vanished());
        text.sample(name, &[("queue", &queue)], vanished);
    }
    let name = "laneway_queue_stranded_messages";
    text.family(
        name,
        "gauge",
        "Messages that wait in queues of the file that the configuration does not name.",
    );
    for stranded in service.stranded() {
        text.sample(name, &[("queue", &stranded.queue)], stranded.depth.waiting);
    }
}

// ── mediators ─────────────────────────────────────────────────────────────────────────────────────────────────────────

fn about_mediators(text: &mut Text, service: &Service) {
    let kinds = [
        ("http", MediationType::Http),
        ("simulated", MediationType::Simulated),
        ("sink", MediationType::Sink),
    ];
    let counted = kinds.map(|(name, kind)| (name, service.mediators().metrics(kind)));
    text.family("laneway_mediator_attempts_total", "counter", "Attempts by verdict.");
    for (kind, counted) in &counted {
        let verdicts = [
            ("done", counted.done),
            ("wait", counted.waits),
            ("again", counted.again),
            ("final", counted.finals),
        ];
        for (verdict, count) in verdicts {
            text.sample("laneway_mediator_attempts_total", &[("kind", kind), ("verdict", verdict)], count);
        }
    }
    text.family("laneway_mediator_not_sent_total", "counter", "Attempts that never reached their target.");
    for (kind, counted) in &counted {
        text.sample("laneway_mediator_not_sent_total", &[("kind", kind)], counted.not_sent);
    }
    text.family("laneway_mediator_seconds", "histogram", "How long calls took.");
    for (kind, counted) in &counted {
        let mut histogram = Histogram::default();
        histogram.add(counted);
        text.histogram("laneway_mediator_seconds", &[("kind", kind)], &histogram);
    }
    let breakers = service.mediators().breakers().list(std::time::Instant::now());
    let open = breakers.iter().filter(|(_, status)| status.state != BreakerState::Closed).count();
    text.family("laneway_breaker_open", "gauge", "Targets whose breaker is open or half open.");
    text.sample("laneway_breaker_open", &[], open);
    text.family("laneway_breaker_targets", "gauge", "Targets that are remembered.");
    text.sample("laneway_breaker_targets", &[], breakers.len());
}

// ── the network ingress ───────────────────────────────────────────────────────────────────────────────────────────────

fn about_ingress(text: &mut Text, stats: &ingress::Stats) {
    let mut one = |name: &str, kind: &str, help: &str, value: u64| {
        text.family(name, kind, help);
        text.sample(name, &[], value);
    };
    one("laneway_ingress_connections", "gauge", "Connections that are open.", stats.connections_open);
    one(
        "laneway_ingress_connections_total",
        "counter",
        "Connections that were taken.",
        stats.connections_opened,
    );
    one("laneway_ingress_lines_total", "counter", "Lines that were read.", stats.lines);
    one("laneway_ingress_accepted_total", "counter", "Lines that became tasks.", stats.accepted);
    one("laneway_ingress_held_bytes", "gauge", "Bytes of lines that are held.", stats.bytes_held as u64);
    text.family("laneway_ingress_rejections_total", "counter", "Refusals by code.");
    for (code, count) in &stats.rejections {
        text.sample("laneway_ingress_rejections_total", &[("code", code)], count);
    }
    let mut each = |name: &str, kind: &str, help: &str, of: fn(&ingress::PartitionStats) -> u64| {
        text.family(name, kind, help);
        for partition in &stats.partitions {
            text.sample(name, &[("partition", &partition.name)], of(partition));
        }
    };
    each("laneway_ingress_tasks_in_total", "counter", "Tasks that were accepted.", |it| it.tasks_in);
    each("laneway_ingress_tasks_dispatched_total", "counter", "Attempts that were started.", |it| {
        it.tasks_dispatched
    });
    each("laneway_ingress_tasks_completed_total", "counter", "Tasks that are done.", |it| it.tasks_completed);
    each("laneway_ingress_tasks_failed_total", "counter", "Tasks that were given up.", |it| it.tasks_failed);
    each(
        "laneway_ingress_enqueued_due_to_busy_total",
        "counter",
        "Tasks that found their family busy.",
        |it| it.enqueued_due_to_busy,
    );
    each("laneway_ingress_max_pending_depth", "gauge", "The deepest that a family was.", |it| {
        u64::from(it.max_pending_depth_observed)
    });
    each("laneway_ingress_active_families", "gauge", "Families that have a task now.", |it| {
        it.active_families as u64
    });
    each("laneway_ingress_outstanding_tasks", "gauge", "Tasks that are neither done nor given up.", |it| {
        it.outstanding
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cannot_break_out() {
        let mut text = Text::default();
        text.sample("a_total", &[("pool", "x\"} 1\n\\")], 7);
        assert_eq!(text.0, "a_total{pool=\"x\\\"} 1\\n\\\\\"} 7\n");
    }
}
