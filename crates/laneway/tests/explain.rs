//! Why does this message wait? Every reason that the engine can give, and the deepest lanes.

mod witness;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use laneway::{Engine, Explanation, Outcome, Reason, RetryPolicy, Topology, sim::Sim};
use witness::{DEADLINE, Gate, Log, OpensAtLast, eventually, send};

fn gated(topology: Topology<u64>) -> (Engine<u64, u64>, Arc<Gate>) {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine =
        Engine::builder().topology(topology).handle(move |_, _: &mut u64| gate_too.pass()).build().unwrap();
    (engine, gate)
}

fn decided(decide: impl Fn(u64) -> Outcome + Send + Sync + 'static) -> Engine<u64, u64> {
    Engine::builder()
        .topology(Topology::pool(1))
        .handle(move |context, number: &mut u64| {
            context.note(format!("about {number}"));
            decide(*number)
        })
        .build()
        .unwrap()
}

#[test]
fn idle() {
    let (engine, _) = gated(Topology::pool(1));
    let explanation = engine.explain(&7).unwrap();
    let expected = Explanation {
        dispatcher: "pool-0".to_owned(),
        waiting: 0,
        in_flight: 0,
        aside: 0,
        reason: Reason::Idle,
    };
    assert_eq!(explanation, expected);
    assert_eq!(explanation.to_string(), "nothing outstanding (dispatcher \"pool-0\")");
}

#[test]
fn running() {
    let (engine, gate) = gated(Topology::pool(2));
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..4).map(|number| (7, number)));
    gate.wait_arrived(1);
    let explanation = engine.explain(&7).unwrap();
    let Reason::Running { since, worker } = explanation.reason else { panic!("{explanation}") };
    assert!(since < DEADLINE && worker < 2);
    assert_eq!(
        (explanation.in_flight + explanation.waiting, explanation.aside),
        (4, 0),
        "behind its own lane"
    );
    assert!(explanation.in_flight >= 1);
    let text = engine.explain(&7).unwrap().to_string();
    assert!(text.starts_with(&format!("running on worker {worker} for ")), "{text}");
    let behind = format!("; {} more behind its head", explanation.waiting);
    assert!(text.contains(&behind), "the head is in flight, so all that wait are behind it: {text}");
}

/// Runs a thousand quick messages, rests for two seconds, and then one of key 1 that takes a second, with another behind it. Explains key 1 at that time, and parks it
/// before if asked to.
fn explained_at(when: Duration, parked_at: Option<Duration>) -> Reason<u64> {
    let builder = Engine::builder().topology(Topology::pool(2)).batch_max(1).handle(|_, _: &mut u64| ());
    let mut sim = Sim::new(7, builder).unwrap();
    sim.service(|key, _, _| Duration::from_secs(u64::from(*key == 1)));
    sim.at(Duration::ZERO, |handle| send(handle, (0..1_000).map(|number| (10 + number % 5, number))));
    sim.at(Duration::from_secs(2), |handle| send(handle, [(1, 0), (1, 1)]));
    if let Some(when) = parked_at {
        sim.at(when, |handle| assert!(handle.park(&1, "for a while")));
    }
    let explained = Arc::new(Mutex::new(None));
    let explained_too = explained.clone();
    sim.at(when, move |handle| *explained_too.lock().unwrap() = handle.explain(&1));
    sim.run().unwrap();
    explained.lock().unwrap().take().expect("it was explained").reason
}

#[test]
fn what_begins_after_a_rest_has_not_been_running_since_before_it() {
    let Reason::Running { since, .. } = explained_at(Duration::from_millis(2_400), None) else {
        panic!("it takes a second")
    };
    assert!(since <= Duration::from_millis(400), "it began at 2 s: {since:?}");
}

#[test]
fn what_was_told_to_park_while_it_was_running_is_parked_since_then() {
    let reason = explained_at(Duration::from_secs(5), Some(Duration::from_millis(2_400)));
    let Reason::Parked { since, .. } = reason else { panic!("there is another one: {reason:?}") };
    assert_eq!(since, Duration::from_millis(2_600));
}

#[test]
fn running_among_quick_messages_is_never_said_to_be_idle() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(move |context, _: &mut u64| {
            if *context.key() == 7 {
                gate_too.pass();
            }
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    // Handlers that were fast so far let a worker take many messages at once, without asking for their names.
    send(&engine, (0..5_000).map(|number| (100 + number % 50, number)));
    assert!(engine.wait_quiet(DEADLINE));
    send(&engine, [(7, 0), (7, 1)]);
    gate.wait_arrived(1);
    let explanation = engine.explain(&7).unwrap();
    assert_ne!(explanation.reason, Reason::Idle, "{explanation}");
    assert_eq!(engine.explain(&999).unwrap().reason, Reason::Idle, "there never was a message of that key");
    send(&engine, [(8, 0)]);
    let text = engine.explain(&8).unwrap().to_string();
    assert!(
        text.contains("busy with quick work (worker 0)"),
        "the handler hangs, and somebody waits for it: {text}"
    );
}

#[test]
fn no_worker_free_names_who_has_them() {
    let (engine, gate) = gated(Topology::pool(2));
    let _opens = OpensAtLast(gate.clone());
    send(&engine, [(1, 0), (2, 0)]);
    gate.wait_arrived(2);
    send(&engine, [(3, 0), (4, 0), (3, 1)]);
    let explanation = engine.explain(&3).unwrap();
    let text = explanation.to_string();
    let Reason::NoWorkerFree { holders, ready_lanes } = explanation.reason else { panic!("{text}") };
    let mut keys: Vec<_> = holders.iter().map(|holder| holder.key).collect();
    keys.sort_unstable();
    assert_eq!((keys, ready_lanes, explanation.waiting), (vec![Some(1), Some(2)], 2, 2));
    let mut workers: Vec<_> = holders.iter().map(|holder| holder.worker).collect();
    workers.sort_unstable();
    assert_eq!(workers, [0, 1]);
    assert!(text.starts_with("waiting for a free worker, 2 lanes ready; busy with "), "{text}");
    assert!(text.contains("1 (worker ") && text.contains("; 1 more behind its head"), "{text}");
}

#[test]
fn in_retry() {
    let hour = Duration::from_secs(3_600);
    let engine = decided(move |_| Outcome::RetryAfter(hour));
    send(&engine, [(7, 0), (7, 1)]);
    eventually("it is deferred", || engine.snapshot().dispatchers[0].deferred_lanes == 1);
    let explanation = engine.explain(&7).unwrap();
    let text = explanation.to_string();
    let Reason::Retry { after, attempts, note } = explanation.reason else { panic!("{text}") };
    assert!(after <= hour && after > hour / 2);
    assert_eq!((attempts, note.as_deref(), explanation.waiting), (1, Some("about 0"), 2));
    assert!(text.contains("after 1 failed attempts: about 0"), "{text}");
}

#[test]
fn held() {
    let engine = decided(|_| Outcome::Hold(Duration::from_secs(3_600)));
    send(&engine, [(7, 0)]);
    eventually("it is deferred", || engine.snapshot().dispatchers[0].deferred_lanes == 1);
    let Reason::Retry { attempts, .. } = engine.explain(&7).unwrap().reason else { panic!("in retry") };
    assert_eq!(attempts, 0, "patience costs no attempt");
}

#[test]
fn rate_limited() {
    let topology = Topology::builder().dispatcher_paced("slow", 0.01).worker("w", ["slow"]).build();
    let engine = Engine::<u64, u64>::builder().topology(topology).handle(|_, _| ()).build().unwrap();
    send(&engine, [(1, 0)]);
    eventually("the first one has gone", || engine.snapshot().account.done == 1);
    send(&engine, [(2, 0)]);
    let explanation = engine.explain(&2).unwrap();
    let text = explanation.to_string();
    let Reason::RateLimited { after } = explanation.reason else { panic!("{text}") };
    assert!(after > Duration::from_secs(50) && after <= Duration::from_secs(100), "one in 100 s: {after:?}");
    assert!(text.starts_with("rate limited for another "), "{text}");
}

#[test]
fn parked_by_the_handler_or_an_operator() {
    let engine = decided(|_| Outcome::ParkLane);
    send(&engine, [(7, 0), (7, 1), (7, 2)]);
    assert!(engine.wait_quiet(DEADLINE));
    let explanation = engine.explain(&7).unwrap();
    let text = explanation.to_string();
    let Reason::Parked { since, note } = explanation.reason else { panic!("{text}") };
    assert!(since < DEADLINE);
    assert_eq!((note.as_deref(), explanation.waiting), (Some("about 0"), 3));
    assert!(text.starts_with("parked for ") && text.contains(": about 0; 2 more behind its head"), "{text}");
    assert!(engine.park(&7, "the bank is closed"));
    let Reason::Parked { note, .. } = engine.explain(&7).unwrap().reason else { panic!("parked") };
    assert_eq!(note.as_deref(), Some("the bank is closed"));
}

#[test]
fn parked_because_its_attempts_are_exhausted() {
    let retry = RetryPolicy {
        max_attempts: 2,
        base: Duration::ZERO,
        exhausted: laneway::Exhausted::ParkLane,
        ..RetryPolicy::default()
    };
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .retry(retry)
        .handle(|_, _: &mut u64| Err::<(), _>("connection refused"))
        .build()
        .unwrap();
    send(&engine, [(7, 0)]);
    assert!(engine.wait_quiet(DEADLINE));
    let Reason::Parked { note, .. } = engine.explain(&7).unwrap().reason else { panic!("parked") };
    assert_eq!(note.as_deref(), Some("connection refused"));
}

#[test]
fn put_aside() {
    let engine = decided(|number| if number == 0 { Outcome::Park } else { Outcome::Done });
    send(&engine, [(7, 0), (7, 1)]);
    assert!(engine.wait_quiet(DEADLINE));
    let explanation = engine.explain(&7).unwrap();
    assert_eq!((explanation.waiting, explanation.in_flight, explanation.aside), (0, 0, 1));
    let text = explanation.to_string();
    let Reason::PutAside { note } = explanation.reason else { panic!("{text}") };
    assert_eq!(note.as_deref(), Some("about 0"));
    assert_eq!(text, "only messages that were put aside: about 0 (dispatcher \"pool-0\")");
}

#[test]
fn dispatcher_paused() {
    let (engine, _) = gated(Topology::pool(1));
    assert!(engine.pause("pool-0"));
    send(&engine, [(7, 0)]);
    let explanation = engine.explain(&7).unwrap();
    assert_eq!(explanation.reason, Reason::DispatcherPaused);
    assert_eq!(explanation.to_string(), "its dispatcher is paused (dispatcher \"pool-0\")");
    assert!(engine.skip_head(&7));
    assert_eq!(engine.explain(&7).unwrap().reason, Reason::Idle);
}

#[test]
fn moving() {
    let (engine, gate) = gated(Topology::partitioned(2, 1));
    let _opens = OpensAtLast(gate.clone());
    let key = (0..).find(|key| engine.explain(key).unwrap().dispatcher == "partition-1").unwrap();
    send(&engine, [(key, 0), (key, 1)]);
    gate.wait_arrived(1);
    engine.remove_dispatcher("partition-1").unwrap();
    let explanation = engine.explain(&key).unwrap();
    assert_eq!((explanation.dispatcher.as_str(), &explanation.reason), ("partition-0", &Reason::Moving));
    assert!(explanation.to_string().starts_with("moving here; its turn elsewhere has not ended"));
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.explain(&key).unwrap().reason, Reason::Idle);
}

#[test]
fn a_note_does_not_outlive_its_message() {
    let tries = Log::new();
    let tries_too = tries.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(move |context, number: &mut u64| {
            tries_too.push(*number);
            match (*number, context.attempt()) {
                (0, 1) => {
                    context.note("the first one's trouble");
                    Outcome::RetryAfter(Duration::from_micros(10))
                }
                (0, _) => Outcome::Done,
                _ => Outcome::Hold(Duration::from_secs(3_600)),
            }
        })
        .build()
        .unwrap();
    send(&engine, [(7, 0), (7, 1)]);
    assert_eq!(tries.wait_len(3), [0, 0, 1]);
    eventually("it is deferred", || engine.snapshot().dispatchers[0].deferred_lanes == 1);
    let Reason::Retry { note, .. } = engine.explain(&7).unwrap().reason else { panic!("in retry") };
    assert_eq!(note, None, "the second one has said nothing");
}

#[test]
fn a_note_of_an_operator_does_not_outlive_the_parking() {
    let engine = decided(|_| Outcome::Done);
    assert!(engine.pause("pool-0"));
    send(&engine, [(7, 0)]);
    assert!(engine.park(&7, "maintenance") && engine.resume(&7));
    assert!(!engine.explain(&7).unwrap().to_string().contains("maintenance"));
}

// ── the deepest lanes ──────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn lanes_by_depth_gives_the_deepest_first_and_no_more_than_asked_for() {
    let (engine, gate) = gated(Topology::partitioned(4, 1));
    let _opens = OpensAtLast(gate.clone());
    for key in 1..=40 {
        send(&engine, (0..key).map(|number| (key, number)));
    }
    assert_eq!(engine.lanes_by_depth(3), [(40, 40), (39, 39), (38, 38)]);
    assert_eq!(engine.lanes_by_depth(0), []);
    let all = engine.lanes_by_depth(1_000);
    assert_eq!(all.len(), 40);
    assert!(all.is_sorted_by(|a, b| a.1 >= b.1));
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.lanes_by_depth(10), []);
}

#[test]
fn lanes_by_depth_counts_what_is_in_flight_and_aside() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(move |_, number: &mut u64| match *number {
            0 => Outcome::Park,
            1 => {
                gate_too.pass();
                Outcome::Done
            }
            _ => Outcome::Done,
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..4).map(|number| (7, number)));
    gate.wait_arrived(1);
    assert_eq!(engine.lanes_by_depth(5), [(7, 4)], "one aside, one in flight, two waiting");
}

// ── taking messages back ───────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn withdraw_takes_a_lane_that_is_not_in_flight_whole_and_in_order() {
    let gate = Gate::closed();
    let gate_too = gate.clone();
    let engine = Engine::builder()
        .topology(Topology::pool(1))
        .handle(move |_, number: &mut u64| match *number {
            0 => Outcome::Park,
            1 => {
                gate_too.pass();
                Outcome::ParkLane
            }
            _ => Outcome::Done,
        })
        .build()
        .unwrap();
    let _opens = OpensAtLast(gate.clone());
    send(&engine, (0..5).map(|number| (7, number)));
    gate.wait_arrived(1);
    assert_eq!(engine.withdraw(&7), None, "one of them is in flight");
    gate.open();
    assert!(engine.wait_quiet(DEADLINE));
    let bodies: Vec<u64> = engine.withdraw(&7).unwrap().into_iter().map(|message| message.body).collect();
    assert_eq!(
        bodies,
        [0, 1, 2, 3, 4],
        "the one that was parked alone, the one that parked the lane, and what waited behind"
    );
    assert_eq!(engine.withdraw(&7), Some(Vec::new()));
    let snapshot = engine.snapshot();
    let account = snapshot.account;
    assert_eq!((account.accepted, account.dropped, account.outstanding), (5, 5, 0));
    assert_eq!(snapshot.drops.withdrawn(), 5);
    send(&engine, [(7, 9)]);
    assert!(engine.wait_quiet(DEADLINE));
    assert_eq!(engine.snapshot().account.done, 1, "the key goes on as if nothing had been");
}

#[test]
fn a_pace_can_be_set_and_lifted_while_messages_wait() {
    let (engine, _gate) = gated(Topology::pool(2));
    let _opens = OpensAtLast(_gate.clone());
    _gate.open();
    assert!(!engine.set_pace("pool-0", Some(0.0)) && !engine.set_pace("nowhere", None));
    assert!(engine.set_pace("pool-0", Some(0.001)));
    send(&engine, (0..20).map(|key| (key, 0)));
    assert!(engine.snapshot().account.outstanding >= 18, "one may have started");
    assert!(engine.set_pace("pool-0", None));
    assert!(engine.wait_quiet(DEADLINE));
}

#[test]
fn what_waits_can_be_looked_at_in_its_order_and_found_wherever_it_is() {
    let (engine, gate) = gated(Topology::partitioned(4, 1));
    let _opens = OpensAtLast(gate.clone());
    for partition in 0..4 {
        assert!(engine.pause(&format!("partition-{partition}")));
    }
    send(&engine, (0..10).flat_map(|key| (0..5).map(move |number| (key, key * 10 + number))));
    let look = |key: u64, most: usize| engine.look(&key, most, |message| message.body);
    assert_eq!(look(7, 3), [70, 71, 72]);
    assert_eq!(look(7, 100), [70, 71, 72, 73, 74]);
    assert_eq!(look(99, 100), [0; 0]);
    let find = |most: usize| {
        engine.find(most, |message| (message.body % 10 == 4).then_some((message.key, message.body)))
    };
    let mut all = find(100);
    all.sort_unstable();
    assert_eq!(all, (0..10).map(|key| (key, key * 10 + 4)).collect::<Vec<_>>());
    assert_eq!(find(3).len(), 3);
    assert!(engine.skip_head(&7));
    assert_eq!(look(7, 2), [71, 72]);
    gate.open();
}

#[test]
fn a_distribution_since_an_earlier_look_has_only_what_came_since() {
    let engine = Engine::builder().latency_sampling(1).handle(|_, _: &mut u64| ()).build().unwrap();
    send(&engine, (0..100).map(|number| (number, number)));
    assert!(engine.wait_quiet(DEADLINE));
    let before = engine.snapshot().service();
    send(&engine, (0..40).map(|number| (number, number)));
    assert!(engine.wait_quiet(DEADLINE));
    let after = engine.snapshot().service();
    assert_eq!((before.samples(), after.samples(), after.since(&before).samples()), (100, 140, 40));
    assert_eq!(after.since(&after).samples(), 0);
}
