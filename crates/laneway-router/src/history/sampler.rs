//! Looks at everything once a second and hands it to the history.
//!
//! What is looked at is bounded: so many groups of each pool and each queue per second, going on with the next ones in the second after; percentiles of the pools that
//! have rows of their own only; sources, of which some have to ask a broker, every few seconds and beside all that.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use laneway::Latency;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Deep, GroupPoint, History, Moment, OTHERS, POOLS_MAX, PoolPoint, TICK};
use crate::api::glance;
use crate::pool::{GroupKey, Pool, PoolCounts};
use crate::record::{GroupId, Second, kept};
use crate::router::SourceView;
use crate::service::Service;

/// Groups that are looked at per second, in a pool and in a queue. Seen all at once by nearly everybody; a million takes some fifteen seconds.
const BUDGET: usize = 65_536;

/// The deepest that are kept from look to look.
const DEEPEST: usize = 32;

/// The busiest that get rows.
const BUSIEST: usize = 24;

/// Queues whose groups are looked at.
const QUEUES_MAX: usize = 8;

/// How often sources are asked what they hold, and how long they may take.
const SOURCES_EVERY: u64 = 2;
const SOURCES_LIMIT: Duration = Duration::from_secs(5);

/// Samples until the service ends it.
pub(crate) async fn run(service: Service, history: Arc<History>) {
    service.router().record().hot().read();
    let mut sampler = Sampler::default();
    let mut ticks = tokio::time::interval(TICK);
    // A look that comes late is not made up for: the second was longer.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut sources: Option<tokio::task::JoinHandle<Vec<SourceView>>> = None;
    let mut number = 0_u64;
    loop {
        ticks.tick().await;
        number += 1;
        if sources.as_ref().is_some_and(tokio::task::JoinHandle::is_finished)
            && let Some(asked) = sources.take()
        {
            sampler.sources = asked.await.unwrap_or_default();
        }
        if sources.is_none() && number % SOURCES_EVERY == 1 {
            let router = service.router().clone();
            let known = sampler.sources.clone();
            sources = Some(tokio::spawn(async move {
                tokio::time::timeout(SOURCES_LIMIT, router.sources()).await.unwrap_or(known)
            }));
        }
        let moment = sampler.look(&service, &history).await;
        history.add(moment);
    }
}

/// What is remembered from look to look.
#[derive(Default)]
struct Sampler {
    pools: HashMap<Arc<str>, PoolMemory>,
    /// Where to go on in each queue.
    queues: HashMap<String, u32>,
    /// The deepest groups of the queues.
    queued: Vec<(String, Arc<str>)>,
    sources: Vec<SourceView>,
    last: Option<Instant>,
}

#[derive(Default)]
struct PoolMemory {
    counts: PoolCounts,
    busy: u64,
    latency: Option<Latency>,
    /// Where to go on.
    shard: usize,
    deepest: Vec<Arc<str>>,
}

impl Sampler {
    async fn look(&mut self, service: &Service, history: &History) -> Moment {
        let pools = service.router().pool_list();
        self.pools.retain(|code, _| pools.iter().any(|pool| pool.code() == code));
        let hot = service.router().record().hot();
        let within = hot.since_began();
        let mut deep: Vec<(usize, Arc<Pool>, Arc<str>)> = Vec::new();
        let mut points: Vec<(Arc<str>, PoolPoint)> = Vec::new();
        let seconds = self.last.map_or(1.0, |last| last.elapsed().as_secs_f64()).max(0.001);
        self.last = Some(Instant::now());
        for (place, pool) in pools.iter().enumerate() {
            let memory = self.pools.entry(Arc::clone(pool.code())).or_default();
            let going_on = memory.survey(pool, within, &mut deep);
            let point = memory.point(pool, going_on, seconds, place < POOLS_MAX);
            match points.get_mut(POOLS_MAX) {
                Some((_, others)) => add(others, &point),
                None if place < POOLS_MAX => points.push((kept(pool.code()), point)),
                None => points.push((OTHERS.into(), point)),
            }
        }
        let busiest = hot.next_second();
        let groups = self.groups(&pools, history, &deep, busiest, seconds);
        let deepest = self.deepest(service, deep).await;
        let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Moment { at: at.as_millis() as u64, pools: points, groups, deepest, now: now(service, &self.sources) }
    }

    /// The groups that are to have rows, and those that have: how each did.
    fn groups(
        &self,
        pools: &[Arc<Pool>],
        history: &History,
        deep: &[(usize, Arc<Pool>, Arc<str>)],
        mut busiest: Vec<(GroupId, Second)>,
        seconds: f64,
    ) -> Vec<(GroupId, GroupPoint)> {
        busiest.sort_by_key(|(_, second)| std::cmp::Reverse(second.busy_nanos));
        let mut wanted: Vec<GroupId> = history.tracked();
        let deepest =
            deep.iter().map(|(_, pool, group)| GroupId { pool: kept(pool.code()), group: kept(group) });
        let busy = busiest.iter().take(BUSIEST).map(|(id, _)| id.clone());
        for id in deepest.chain(busy) {
            if !wanted.contains(&id) {
                wanted.push(id);
            }
        }
        let did: HashMap<&GroupId, &Second> = busiest.iter().map(|(id, second)| (id, second)).collect();
        let find = |code: &str| pools.iter().find(|pool| **pool.code() == *code);
        let point = |id: GroupId| {
            let second = did.get(&id).copied().copied().unwrap_or_default();
            let depth = find(&id.pool).map_or(0, |pool| pool.depth(&id.group));
            let micros = |nanos: u64| clamp(nanos / 1_000);
            let mean = second.sum_nanos.checked_div(u64::from(second.attempts)).unwrap_or(0);
            let point = GroupPoint {
                depth: clamp(depth as u64),
                attempts: second.attempts,
                failures: second.failures,
                busy: thousandths(second.busy_nanos, seconds),
                mean_micros: micros(mean),
                max_micros: micros(second.max_nanos),
            };
            (id, point)
        };
        wanted.into_iter().map(point).collect()
    }

    /// The deepest groups wherever they are: in pools, in queues, or in both.
    async fn deepest(&mut self, service: &Service, mut deep: Vec<(usize, Arc<Pool>, Arc<str>)>) -> Vec<Deep> {
        let queues: Vec<_> = service
            .queue_names()
            .into_iter()
            .take(QUEUES_MAX)
            .filter_map(|name| service.queue(&name).map(|queue| (name, queue)))
            .collect();
        let unclaimed = |group: &str| -> usize {
            let views = queues.iter().filter_map(|(_, queue)| queue.group(group));
            views.map(|view| view.depth.saturating_sub(view.leased)).sum()
        };
        // A group may be in several pools. What no pool has yet is counted once, where most of the group is.
        deep.sort_by_key(|(in_pool, ..)| std::cmp::Reverse(*in_pool));
        let mut counted = HashSet::new();
        let mut all: Vec<Deep> = deep
            .into_iter()
            .map(|(in_pool, pool, group)| Deep {
                pool: Some(kept(pool.code())),
                in_queue: if counted.insert(Arc::clone(&group)) { unclaimed(&group) } else { 0 },
                group: kept(&group),
                in_pool,
            })
            .collect();
        let mut queued = std::mem::take(&mut self.queued);
        for (name, queue) in &queues {
            let from = self.queues.get(name).copied().unwrap_or(0);
            let Ok((views, next)) = queue.deepest(from, BUDGET, DEEPEST).await else { continue };
            self.queues.insert(name.clone(), next.unwrap_or(0));
            queued.extend(views.into_iter().filter_map(|view| Some((name.clone(), view.name?))));
        }
        queued.sort();
        queued.dedup();
        let mut depths: Vec<(usize, String, Arc<str>)> = queued
            .into_iter()
            .map(|(name, group)| (unclaimed(&group), name, group))
            .filter(|(depth, ..)| *depth > 0)
            .collect();
        depths.sort_by_key(|(depth, ..)| std::cmp::Reverse(*depth));
        depths.truncate(DEEPEST);
        for (in_queue, _, group) in &depths {
            let group = kept(group);
            if !all.iter().any(|deep| deep.group == group) {
                all.push(Deep { pool: None, group, in_pool: 0, in_queue: *in_queue });
            }
        }
        self.queued = depths.into_iter().map(|(_, name, group)| (name, group)).collect();
        all.sort_by_key(|deep| std::cmp::Reverse(deep.all()));
        all.truncate(DEEPEST);
        all
    }
}

impl PoolMemory {
    /// Looks at the groups of a pool: adds the deepest to `deep`, and says for how long slots have been busy with what is still under way.
    fn survey(&mut self, pool: &Arc<Pool>, within: u64, deep: &mut Vec<(usize, Arc<Pool>, Arc<str>)>) -> u64 {
        let mut top: Vec<(usize, Arc<str>)> = Vec::with_capacity(DEEPEST * 2);
        for group in &self.deepest {
            top.push((pool.depth(group), Arc::clone(group)));
        }
        let (mut going_on, mut least) = (0, 0);
        let (hot, now) = (pool.record().hot(), Instant::now());
        pool.each_in_flight(|key, since| {
            let busy = (now.saturating_duration_since(since).as_nanos() as u64).min(within);
            going_on += busy;
            if let GroupKey::Named(group) = key {
                hot.goes_on(pool.code(), group, busy);
            }
        });
        self.shard = pool.survey(self.shard, BUDGET, |key, depth| {
            let GroupKey::Named(group) = key else { return };
            if depth > least && depth > 0 && !self.deepest.contains(group) {
                top.push((depth, Arc::clone(group)));
                if top.len() == DEEPEST * 2 {
                    keep_deepest(&mut top);
                    least = top.last().map_or(0, |last| last.0);
                }
            }
        });
        keep_deepest(&mut top);
        self.deepest = top.iter().map(|(_, group)| Arc::clone(group)).collect();
        deep.extend(top.into_iter().map(|(depth, group)| (depth, Arc::clone(pool), group)));
        going_on
    }

    fn point(&mut self, pool: &Pool, going_on: u64, seconds: f64, in_detail: bool) -> PoolPoint {
        let (counts, before) = (pool.counts(), self.counts);
        self.counts = counts;
        let busy = pool.busy(going_on);
        let busy_nanos = busy - std::mem::replace(&mut self.busy, busy);
        let added = |of: fn(&PoolCounts) -> u64| clamp(of(&counts).saturating_sub(of(&before)));
        let held = pool.held();
        let mut point = PoolPoint {
            submitted: added(|counts| counts.submitted),
            succeeded: added(|counts| counts.succeeded),
            failed: added(|counts| counts.failed),
            retried: added(|counts| counts.transient),
            held_back: added(|counts| counts.held_back),
            refused: added(|counts| counts.refused),
            given_back: added(|counts| counts.given_back),
            waiting: clamp(held as u64),
            slots: clamp(pool.settings().concurrency as u64),
            busy: thousandths(busy_nanos, seconds),
            ..PoolPoint::default()
        };
        if in_detail {
            let engine = pool.snapshot();
            let in_flight: usize = engine.dispatchers.iter().map(|part| part.in_flight).sum();
            point.in_flight = clamp(in_flight as u64);
            point.waiting = clamp(held.saturating_sub(in_flight) as u64);
            let service = engine.service();
            let new = self.latency.as_ref().map(|before| service.since(before));
            if let Some(new) = new.filter(|new| new.samples() > 0) {
                let micros = |share| clamp(new.quantile(share).as_micros() as u64);
                (point.p50_micros, point.p95_micros, point.p99_micros) =
                    (micros(0.5), micros(0.95), micros(0.99));
            }
            self.latency = Some(service);
        }
        point
    }
}

fn keep_deepest(top: &mut Vec<(usize, Arc<str>)>) {
    top.retain(|(depth, _)| *depth > 0);
    top.sort_by_key(|(depth, _)| std::cmp::Reverse(*depth));
    top.truncate(DEEPEST);
}

/// What has no past: sources, breakers, rejections by reason, and the like.
fn now(service: &Service, sources: &[SourceView]) -> Value {
    let mut now = json!(glance(service, sources));
    now["held"] = service.held().into();
    now
}

fn add(sum: &mut PoolPoint, point: &PoolPoint) {
    sum.submitted += point.submitted;
    sum.succeeded += point.succeeded;
    sum.failed += point.failed;
    sum.retried += point.retried;
    sum.held_back += point.held_back;
    sum.refused += point.refused;
    sum.given_back += point.given_back;
    sum.waiting += point.waiting;
    sum.in_flight += point.in_flight;
    sum.slots += point.slots;
    sum.busy += point.busy;
}

fn clamp(number: u64) -> u32 {
    number.min(u64::from(u32::MAX)) as u32
}

/// Nanoseconds of slots as thousandths of a slot over so many seconds.
fn thousandths(nanos: u64, seconds: f64) -> u32 {
    clamp((nanos as f64 / 1e6 / seconds).round() as u64)
}
