//! Changing the topology of a running engine: dispatchers and workers come and go, and every key keeps its order.
//!
//! A change takes all locks in index order, admits everything, moves the lanes whose home is elsewhere now, and publishes the new layout. A lane in
//! flight follows when its turn has ended; until then a placeholder at its new home collects what comes for it (`lane/`, state
//! `Arriving`). A submitter that chose by the old layout is told by the epoch and chooses again. The next change waits until all lanes of
//! the one before have arrived. See `docs/design/ordering.md`, "Moving a lane".
//!
//! A change that has to wait for handlers holds nothing meanwhile that a handler may want: only `Shared::changes`, by which changes take turns, and a handler that asks
//! for a change of its own engine is refused.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use crate::{
    builder::{Hired, Spawn, count_servers},
    dispatcher::{Dispatcher, Locked},
    engine::{Handle, Layout, Shared},
    error::{BuildError, ChangeError},
    flows::LockedMappings,
    placement::{Among, ByHash, LooksAt},
    sync::lock,
    topology::{DispatcherSpec, WorkerSpec, names, shape_problems},
    worker::{Inside, Seat},
};

/// How long a change waits for lanes that an earlier one moved. They arrive when a handler returns.
const ARRIVAL: Duration = Duration::from_secs(30);

impl<K, M> Handle<K, M>
where
    K: Hash + Clone + Send + Sync + 'static,
    M: Send + 'static,
{
    /// Adds a dispatcher, served by these workers, which exist already. Lanes that belong there by the placement move to it, in order.
    ///
    /// Like all changes of the topology it is refused with [`ChangeError::FromHandler`] where a handler of this engine asks for it.
    pub fn add_dispatcher(&self, name: &str, served_by: &[&str]) -> Result<(), ChangeError> {
        self.shared.change(|plan| {
            for worker in served_by {
                let row = plan.row(worker)?;
                row.push(name.to_owned());
            }
            plan.dispatchers.push(name.to_owned());
            Ok(())
        })
    }

    /// Removes a dispatcher. Its lanes move to where the placement puts them now, in order, or to the first dispatcher if it knows no place for them: they are run there, or stay parked there
    /// until somebody resumes them, while new messages of their keys are refused. Workers that served only this one go.
    pub fn remove_dispatcher(&self, name: &str) -> Result<(), ChangeError> {
        self.shared.change(|plan| {
            let place = plan.dispatchers.iter().position(|known| known == name);
            let place = place.ok_or_else(|| plan.unknown("dispatcher", name))?;
            plan.dispatchers.remove(place);
            plan.rows.iter_mut().for_each(|(_, row)| row.retain(|served| served != name));
            plan.rows.retain(|(_, row)| !row.is_empty());
            Ok(())
        })
    }

    /// Adds a worker that serves these dispatchers.
    pub fn add_worker(&self, name: &str, serves: &[&str]) -> Result<(), ChangeError> {
        self.shared.change(|plan| {
            plan.rows.push((name.to_owned(), serves.iter().map(|served| served.to_string()).collect()));
            Ok(())
        })
    }

    /// Adds workers that serve these dispatchers and removes others, in one change: what thousands of them cost one by one grows with their square.
    pub fn change_workers(&self, add: &[(String, String)], remove: &[String]) -> Result<(), ChangeError> {
        self.shared.change(|plan| {
            let leaving: HashSet<&str> = remove.iter().map(String::as_str).collect();
            let known: HashSet<&str> = plan.rows.iter().map(|(name, _)| name.as_str()).collect();
            if let Some(name) = remove.iter().find(|name| !known.contains(name.as_str())) {
                return Err(plan.unknown("worker", name));
            }
            plan.rows.retain(|(name, _)| !leaving.contains(name.as_str()));
            plan.rows.extend(add.iter().map(|(name, serves)| (name.clone(), vec![serves.clone()])));
            Ok(())
        })
    }

    /// Removes a worker. It ends the turn that it has in its hands.
    pub fn remove_worker(&self, name: &str) -> Result<(), ChangeError> {
        self.shared.change(|plan| {
            plan.row(name)?;
            plan.rows.retain(|(known, _)| known != name);
            Ok(())
        })
    }

    /// Gives a worker another row of dispatchers to serve.
    pub fn reassign_worker(&self, name: &str, serves: &[&str]) -> Result<(), ChangeError> {
        self.shared.change(|plan| {
            *plan.row(name)? = serves.iter().map(|served| served.to_string()).collect();
            Ok(())
        })
    }
}

/// The names that the next layout shall have.
struct Plan {
    dispatchers: Vec<String>,
    rows: Vec<(String, Vec<String>)>,
}

impl Plan {
    fn row(&mut self, worker: &str) -> Result<&mut Vec<String>, ChangeError> {
        let unknown = self.unknown("worker", worker);
        let row = self.rows.iter_mut().find(|(name, _)| name == worker);
        row.map(|(_, row)| row).ok_or(unknown)
    }

    fn unknown(&self, what: &'static str, name: &str) -> ChangeError {
        let known = match what {
            "worker" => names(self.rows.iter().map(|(name, _)| name.as_str())),
            _ => names(self.dispatchers.iter().map(String::as_str)),
        };
        ChangeError::Unknown { what, name: name.to_owned(), known }
    }

    fn check(&self) -> Result<(), ChangeError> {
        let dispatchers: Vec<_> = self
            .dispatchers
            .iter()
            .map(|name| DispatcherSpec { name: name.clone(), pace: None, backoff: None })
            .collect();
        let rows = self.rows.iter().cloned();
        let workers: Vec<_> = rows.map(|(name, serves)| WorkerSpec { name, serves }).collect();
        let problems = shape_problems(&dispatchers, &workers);
        if problems.is_empty() { Ok(()) } else { Err(ChangeError::Invalid(BuildError { problems })) }
    }
}

impl<K, M> Shared<K, M>
where
    K: Hash + Clone + Send + Sync + 'static,
    M: Send + 'static,
{
    fn change(
        self: &Arc<Self>,
        edit: impl FnOnce(&mut Plan) -> Result<(), ChangeError>,
    ) -> Result<(), ChangeError> {
        if Inside::is_handler(self.address()) {
            return Err(ChangeError::FromHandler);
        }
        let _changes = lock(&self.changes);
        let old = self.layout.load_full();
        let mut plan = Plan {
            dispatchers: old.dispatchers.iter().map(|dispatcher| dispatcher.name.clone()).collect(),
            rows: old.seats.iter().map(|seat| (seat.name.clone(), row_names(seat))).collect(),
        };
        if self.closed.load(Ordering::Acquire) {
            return Err(ChangeError::Closed);
        }
        edit(&mut plan)?;
        plan.check()?;
        let moves = !old.dispatchers.iter().map(|dispatcher| &dispatcher.name).eq(&plan.dispatchers);
        if !moves {
            return self.replace(&old, &plan, moves);
        }
        old.dispatchers.iter().for_each(|dispatcher| dispatcher.bar_streams(true));
        let changed = self.wait_for_arrivals().and_then(|()| self.replace(&old, &plan, moves));
        old.dispatchers.iter().for_each(|dispatcher| dispatcher.bar_streams(false));
        changed
    }

    /// Replaces the layout, and moves the lanes if need be: none is on its way, and no stream is out.
    fn replace(
        self: &Arc<Self>,
        old: &Arc<Layout<K, M>>,
        plan: &Plan,
        moves: bool,
    ) -> Result<(), ChangeError> {
        let _changing = lock(&self.changing);
        if self.closed.load(Ordering::Acquire) {
            return Err(ChangeError::Closed);
        }
        let (new, fresh) = self.lay_out(old, plan, moves);
        let new = Arc::new(new);
        // First, since they may not be had: then nothing has changed.
        let hired = Hired::hire(self, &fresh);
        let hired = hired.map_err(|problem| ChangeError::Invalid(BuildError { problems: vec![problem] }))?;
        if moves {
            self.move_lanes(old, &new);
        } else {
            // Only workers come and go: every lane stays where it is.
            self.layout.store(new.clone());
        }
        self.reseat(old, &new, plan);
        hired.begin();
        Ok(())
    }

    /// Waits until no lane is on its way from an earlier change, and no stream is out.
    fn wait_for_arrivals(&self) -> Result<(), ChangeError> {
        // In a simulation nobody else would take the steps that we wait for.
        let limit = if matches!(self.spawn, Spawn::Simulated) { Duration::ZERO } else { ARRIVAL };
        let deadline = Instant::now() + limit;
        let at_rest =
            |dispatcher: &Arc<Dispatcher<K, M>>| dispatcher.arriving() == 0 && !dispatcher.is_streaming();
        let is_closed = || self.closed.load(Ordering::Acquire);
        let arrived = || self.layout.load().dispatchers.iter().all(at_rest);
        match self.wait_until(deadline, || is_closed() || arrived()) {
            true if is_closed() => Err(ChangeError::Closed),
            true => Ok(()),
            false => Err(ChangeError::StillMoving(limit)),
        }
    }

    /// The next layout, and the seats in it that are new.
    #[expect(clippy::type_complexity, reason = "a pair, used once")]
    fn lay_out(&self, old: &Layout<K, M>, plan: &Plan, moves: bool) -> (Layout<K, M>, Vec<Arc<Seat<K, M>>>) {
        let epoch = old.epoch + u64::from(moves);
        let batch_max = self.settings.batch_max;
        let make = |name: &String| {
            Arc::new(Dispatcher::new(name.clone(), self.limits.clone(), None, batch_max, epoch))
        };
        let keep = |name: &String| old.position(name).map(|place| old.dispatchers[place].clone());
        let dispatchers: Vec<_> =
            plan.dispatchers.iter().map(|name| keep(name).unwrap_or_else(|| make(name))).collect();
        let known: HashMap<&str, &Arc<Seat<K, M>>> =
            old.seats.iter().map(|seat| (seat.name.as_str(), seat)).collect();
        let mut next_seat = old.next_seat;
        let mut fresh = Vec::new();
        let mut seats = Vec::with_capacity(plan.rows.len());
        for (name, row) in &plan.rows {
            let kept = known.get(name.as_str()).map(|seat| Arc::clone(seat));
            seats.push(kept.unwrap_or_else(|| {
                let seat = Arc::new(Seat::new(next_seat, name.clone(), serve(&dispatchers, row)));
                next_seat += 1;
                fresh.push(seat.clone());
                seat
            }));
        }
        let gone = old.dispatchers.iter().filter(|dispatcher| !plan.dispatchers.contains(&dispatcher.name));
        let mut retired: Vec<_> = old.retired.iter().chain(gone).cloned().collect();
        let mut past = old.past.clone();
        // Those that were removed by an earlier change and have nothing left are counted for good.
        retired.retain(|dispatcher| {
            let spent =
                old.retired.iter().any(|known| Arc::ptr_eq(known, dispatcher)) && dispatcher.is_spent();
            if spent {
                past.add(&dispatcher.stats());
            }
            !spent
        });
        let kept: HashSet<&str> = plan.rows.iter().map(|(name, _)| name.as_str()).collect();
        let dismissed = old.seats.iter().filter(|seat| !kept.contains(seat.name.as_str()));
        let leaving = old.leaving.iter().chain(dismissed).filter(|seat| !seat.gone.load(Ordering::Acquire));
        let leaving = leaving.cloned().collect();
        (Layout { epoch, dispatchers, seats, leaving, next_seat, retired, past }, fresh)
    }

    /// Under all locks: every lane to its home, then the new layout for all to see.
    fn move_lanes(&self, old: &Layout<K, M>, new: &Arc<Layout<K, M>>) {
        let mut mappings = self.mappings.as_ref().map(|mappings| mappings.lock_for_change());
        if let Some(mappings) = &mut mappings {
            self.rehome_mappings(mappings, old, new);
        }
        // Index order: the old ones first, then those that are new. Nobody else ever holds two but the last step of the end, in the same order, and then there is no change any more.
        let mut locked: Vec<_> =
            old.dispatchers.iter().map(|dispatcher| dispatcher.lock_for_change()).collect();
        let added = new.dispatchers.iter().filter(|dispatcher| old.position(&dispatcher.name).is_none());
        let mut added: Vec<_> =
            added.map(|dispatcher| (dispatcher.name.clone(), dispatcher.lock_for_change())).collect();
        self.moves.begin();
        self.detour.store(true, Ordering::Release);
        let mut parcels = Vec::new();
        for (place, dispatcher) in old.dispatchers.iter().enumerate() {
            let here = new.position(&dispatcher.name);
            let mut home = |fingerprint: u64, key: Option<&K>| {
                let mapped = mappings.as_ref().and_then(|mappings| mappings.find(fingerprint));
                // Somewhere it has to be. Operators look for it where the placement does not know (`Handle::operate`).
                mapped.or_else(|| self.new_home(new, fingerprint, key)).or(here).unwrap_or(0)
            };
            parcels.extend(locked[place].move_out(new.epoch, here.unwrap_or(usize::MAX), &mut home));
            if here.is_none() {
                locked[place].retire();
            }
        }
        for parcel in parcels {
            let name = &new.dispatchers[parcel.to].name;
            match added.iter_mut().find(|(known, _)| known == name) {
                Some((_, dispatcher)) => dispatcher.receive(parcel),
                None => {
                    let place = old.position(name).expect("a dispatcher is old or added");
                    locked[place].receive(parcel);
                }
            }
        }
        self.count_engine_bound(
            old,
            new,
            locked.iter().chain(added.iter().map(|(_, dispatcher)| dispatcher)),
        );
        self.layout.store(new.clone());
        self.moves.end();
    }

    /// Begins to count against the engine's bound, if the dispatchers' own no longer keep it.
    fn count_engine_bound<'a>(
        &self,
        old: &Layout<K, M>,
        new: &Layout<K, M>,
        locked: impl Iterator<Item = &'a Locked<'a, K, M>>,
    ) where
        K: 'a,
        M: 'a,
    {
        let reachable = self.limits.capacity.saturating_mul(new.len() as u64);
        if !self.engine_bound.is_counting() && reachable > self.engine_bound.capacity {
            let retired: u64 = old.retired.iter().map(|dispatcher| dispatcher.outstanding()).sum();
            self.engine_bound.count_from(retired + locked.map(Locked::outstanding).sum::<u64>());
        }
    }

    /// Where the placement puts a lane in the new layout, as far as that can be told without its load.
    fn new_home(&self, new: &Layout<K, M>, fingerprint: u64, key: Option<&K>) -> Option<usize> {
        if self.by_hash {
            return Some(ByHash::index(fingerprint, new.len()));
        }
        match self.looks_at {
            LooksAt::Load => None,
            // Lanes in flight know their keys under such a placement (`Shared::needs_keys`).
            LooksAt::Fingerprint | LooksAt::Key => {
                // User code under all locks, with lanes that are on their way. One for which it panics stays where it is, if it can.
                let place = catch_unwind(AssertUnwindSafe(|| self.placement.place(key?, fingerprint, new)));
                place.ok().flatten().filter(|place| *place < new.len())
            }
        }
    }

    fn rehome_mappings(&self, mappings: &mut LockedMappings<'_>, old: &Layout<K, M>, new: &Layout<K, M>) {
        let stays: Vec<Option<usize>> =
            old.dispatchers.iter().map(|dispatcher| new.position(&dispatcher.name)).collect();
        // A key whose dispatcher goes is given one of the others, as evenly as its hash is.
        let by_hash = |fingerprint| ByHash::index(fingerprint, new.len());
        mappings.rehome(new.epoch, |fingerprint, place| match stays[place] {
            Some(place) if !self.by_hash => Some(place),
            _ => Some(by_hash(fingerprint)),
        });
        let counts = mappings.count_by_dispatcher(new.len());
        for (dispatcher, count) in new.dispatchers.iter().zip(counts) {
            dispatcher.mappings.store(count, Ordering::Relaxed);
        }
    }

    /// Tells the workers their rows, and those that are not needed that they may go. All look up.
    fn reseat(&self, old: &Layout<K, M>, new: &Layout<K, M>, plan: &Plan) {
        let rows: HashMap<&str, &Vec<String>> =
            plan.rows.iter().map(|(name, row)| (name.as_str(), row)).collect();
        for seat in &old.seats {
            match rows.get(seat.name.as_str()) {
                Some(row) => seat.assign(serve(&new.dispatchers, row)),
                None => seat.dismissed.store(true, Ordering::Release),
            }
        }
        count_servers(&new.dispatchers, &new.seats);
        for dispatcher in old.dispatchers.iter().chain(&new.dispatchers) {
            dispatcher.wake_all();
            // Who waits for room may have to wait elsewhere now.
            dispatcher.room.announce();
        }
    }
}

fn row_names<K, M>(seat: &Seat<K, M>) -> Vec<String> {
    seat.serves().iter().map(|dispatcher| dispatcher.name.clone()).collect()
}

fn serve<K, M>(dispatchers: &[Arc<Dispatcher<K, M>>], row: &[String]) -> Vec<Arc<Dispatcher<K, M>>> {
    let find = |name: &String| dispatchers.iter().find(|dispatcher| dispatcher.name == *name).cloned();
    row.iter().filter_map(find).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, OnceLock, mpsc},
        thread::{self, JoinHandle},
    };

    use super::*;
    use crate::{Bound, Engine, Message, Overflow, Refusal, Topology, engine::Attempt, message::Item};

    /// Shorter than a change waits for a handler that does not return.
    const DEADLINE: Duration = Duration::from_secs(20);

    const NAME: &str = "partition-0";

    fn wait_for(what: &str, reached: impl Fn() -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !reached() {
            assert!(Instant::now() < deadline, "{what} did not come");
            thread::yield_now();
        }
    }

    #[test]
    fn what_is_dropped_at_a_dispatcher_that_has_gone_is_counted_at_one_that_is_there() {
        let engine = Engine::builder()
            .topology(Topology::builder().dispatcher("a").dispatcher("b").worker("w", ["a", "b"]).build())
            .overflow(Overflow::DropNewest)
            .handle(|_, (): &mut ()| ())
            .build()
            .unwrap();
        // A submitter that has found it full, and is slow.
        let shared = &engine.handle().shared;
        let gone = shared.layout.load().dispatchers[1].clone();
        let item = || Item { fingerprint: 7, accepted_at: 0, message: Message::new(7_u64, ()) };
        engine.remove_dispatcher("b").unwrap();
        engine
            .add_dispatcher("c", &["w"])
            .expect("with it what the other one has counted is counted for good");
        assert!(matches!(shared.full(item(), Bound::Dispatcher, &gone), Attempt::Ended(Ok(_))));
        let _ = shared.refuse(item(), Refusal::Full(Bound::Dispatcher), Some(&gone));
        let snapshot = engine.snapshot();
        assert_eq!((snapshot.account.dropped, snapshot.refusals.total()), (1, 1));
        assert!(snapshot.account.balances());
    }

    /// A handler that is in the midst of a stream while another thread adds a dispatcher, and so has to wait for it.
    struct Met {
        engine: Engine<u64, bool>,
        change: JoinHandle<Result<(), ChangeError>>,
    }

    /// Calls `inside` in that handler.
    fn meet(inside: impl Fn(&Handle<u64, bool>) + Send + Sync + 'static) -> Met {
        let own = Arc::new(OnceLock::<Handle<u64, bool>>::new());
        let change = Arc::new(Mutex::new(None));
        let (own_too, change_too) = (own.clone(), change.clone());
        let (tell, told) = mpsc::channel();
        let engine = Engine::builder()
            .topology(Topology::partitioned(1, 1))
            .handle(move |_, special: &mut bool| {
                let handle = own_too.get().expect("set before the first message");
                if !*special {
                    return;
                }
                let layout = handle.shared.layout.load_full();
                let dispatcher = &layout.dispatchers[0];
                if !dispatcher.is_streaming() {
                    tell.send(false).unwrap();
                    return;
                }
                let changer = handle.clone();
                *lock(&change_too) =
                    Some(thread::spawn(move || changer.add_dispatcher("second", &["partition-0/0"])));
                wait_for("the change", || dispatcher.bars_streams());
                tell.send(true).unwrap();
                inside(handle);
            })
            .build()
            .unwrap();
        own.set(engine.handle()).unwrap();
        // A worker streams once it knows that messages are quick, and on a machine that does much else they may not be at first.
        loop {
            engine.submit_batch((0..1_000).map(|key| (key, false)));
            assert!(engine.wait_quiet(DEADLINE));
            engine.submit((0, true)).unwrap();
            if told.recv_timeout(DEADLINE).unwrap() {
                let change = lock(&change).take().unwrap();
                return Met { engine, change };
            }
        }
    }

    #[test]
    fn a_handler_that_a_change_waits_for_may_operate_its_engine() {
        let (tell, told) = mpsc::channel();
        let met = meet(move |handle| tell.send(handle.explain(&7).is_some()).unwrap());
        assert_eq!(told.recv_timeout(DEADLINE), Ok(true), "it was answered, and the change waited on");
        assert_eq!(met.change.join().unwrap(), Ok(()));
        assert_eq!(met.engine.handle.shared.layout.load().dispatchers[0].name, NAME);
        assert_eq!(met.engine.handle.shared.layout.load().dispatchers.len(), 2);
    }

    #[test]
    fn a_shutdown_does_not_wait_for_a_change_that_waits() {
        let met = meet(|handle| {
            wait_for("the end", || handle.shared.closed.load(Ordering::Acquire));
        });
        let report = met.engine.shutdown(Duration::ZERO);
        assert_eq!(met.change.join().unwrap(), Err(ChangeError::Closed));
        assert!(report.account.balances() && report.still_running == 0);
    }
}
