//! What `/metrics` says of flows: how much is alive, from a count of the database that is a few seconds old at most, what workers have told it, and what was heard
//! of runs and steps since the service was started (`flows.rs`).
//!
//! Labels are flows and queues and words, never a run, a key or a worker. Of what is counted, the first hundred flows and queues by name are told; of what is heard, the first hundred flows
//! that were heard of, and the others together.

use laneway_flow::look::{Counts, FlowCount, HANDLER_BOUNDS, QueueCount};

use super::{Histogram, Text};
use crate::flows::{Answer, Flows, RUN_EVENTS, STEP_EVENTS};

pub(super) async fn about_flows(text: &mut Text, flows: &Flows) {
    let counts = flows.counts().await;
    let mut one = |name: &str, kind: &str, help: &str, value: u64| {
        text.family(name, kind, help);
        text.sample(name, &[], value);
    };
    let (listening, gaps) = flows.listening();
    one(
        "laneway_flow_up",
        "gauge",
        "1 if the database of flows answered when it was last asked.",
        u64::from(!matches!(counts, Answer::Nothing)),
    );
    one(
        "laneway_flow_counted",
        "gauge",
        "1 if it could say how much there is; otherwise the gauges and the counters of tasks are missing, and the log says why.",
        u64::from(matches!(counts, Answer::Counts(_))),
    );
    one(
        "laneway_flow_listening",
        "gauge",
        "1 while announcements of runs and steps are heard.",
        u64::from(listening),
    );
    one(
        "laneway_flow_listening_gaps_total",
        "counter",
        "How often that was interrupted; what was announced meanwhile is not in the counters of runs and steps.",
        gaps,
    );
    what_was_heard(text, flows);
    if let Answer::Counts(counts) = counts {
        about_runs(text, &counts.flows);
        about_queues(text, &counts);
    }
}

fn what_was_heard(text: &mut Text, flows: &Flows) {
    let heard = flows.heard();
    let (runs, steps) = ("laneway_flow_runs_total", "laneway_flow_steps_total");
    text.family(
        runs,
        "counter",
        "Runs by what they came to, since the service was started; one that is retried starts again.",
    );
    for (flow, heard) in &heard {
        for (state, count) in RUN_EVENTS.iter().zip(heard.runs) {
            text.sample(runs, &[("flow", flow), ("state", state)], count);
        }
    }
    text.family(steps, "counter", "Steps by what they came to, since the service was started.");
    for (flow, heard) in &heard {
        for (state, count) in STEP_EVENTS.iter().zip(heard.steps) {
            text.sample(steps, &[("flow", flow), ("state", state)], count);
        }
    }
}

fn about_runs(text: &mut Text, flows: &[FlowCount]) {
    let name = "laneway_flow_runs";
    text.family(
        name,
        "gauge",
        "Runs that are not over, up to 100000 of each: started, or waiting for another of their key.",
    );
    for it in flows {
        for (state, count) in [("started", it.started), ("waiting", it.waiting)] {
            text.sample(name, &[("flow", &it.flow), ("state", state)], count);
        }
    }
}

fn about_queues(text: &mut Text, counts: &Counts) {
    text.family("laneway_flow_workers", "gauge", "Workers that gave a sign of life within 30 seconds.");
    text.sample("laneway_flow_workers", &[], counts.workers);
    let queues = &counts.queues;
    let mut each = |name: &str, kind: &str, help: &str, of: fn(&QueueCount) -> u64| {
        text.family(name, kind, help);
        queues.iter().for_each(|it| text.sample(name, &[("queue", &it.queue)], of(it)));
    };
    each("laneway_flow_queue_workers", "gauge", "Those of them that read the queue.", |it| it.workers);
    each("laneway_flow_polls_total", "counter", "Reads of workers that asked the queue.", |it| it.polls);
    let name = "laneway_flow_tasks";
    text.family(
        name,
        "gauge",
        "Tasks that are not over, up to 100000 of each: queued, or started by a worker.",
    );
    for it in queues {
        for (state, count) in [("queued", it.queued), ("started", it.started)] {
            text.sample(name, &[("queue", &it.queue), ("state", state)], count);
        }
    }
    let name = "laneway_flow_tasks_total";
    text.family(
        name,
        "counter",
        "Tasks by what workers did with them: taken; completed, retried, failed; lost ones were another's, or over, when they ended.",
    );
    for it in queues {
        let outcomes = [
            ("taken", it.taken),
            ("completed", it.completed),
            ("retried", it.retried),
            ("failed", it.failed),
            ("lost", it.lost),
        ];
        for (outcome, count) in outcomes {
            text.sample(name, &[("queue", &it.queue), ("outcome", outcome)], count);
        }
    }
    let name = "laneway_flow_handler_seconds";
    text.family(name, "histogram", "How long handlers of steps took.");
    queues.iter().for_each(|it| text.histogram(name, &[("queue", &it.queue)], &histogram(it)));
}

/// Counts of their own become counts up to a bound.
fn histogram(it: &QueueCount) -> Histogram {
    let mut calls = 0;
    let mut up_to = |place: usize| {
        calls += it.handlers.get(place).copied().unwrap_or(0);
        calls
    };
    let buckets = HANDLER_BOUNDS.iter().enumerate().map(|(place, bound)| (*bound, up_to(place))).collect();
    let calls = up_to(HANDLER_BOUNDS.len());
    Histogram { buckets, calls, sum_seconds: it.handler_seconds }
}
