//! Stopping processors and shutting down: what was accepted is handled or given back, nothing runs afterwards, and nobody waits for himself.

mod witness;

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc::{Sender, channel},
    },
    thread,
    time::Duration,
};

use laneway_events::{
    Context, Events, EventsConfig, Handled, Handler, LookupError, ProcessorRef, Refusal, RegisterError,
    ScheduleEnd, ScheduleRefusal, Stopping,
};
use witness::{DEADLINE, Witness, door, system};

/// The original's stop lost what was queued.
#[test]
fn a_stop_handles_what_is_in_the_mailbox() {
    let events = system(&[&[""], &[""]]);
    let witness = Arc::new(Witness::default());
    let sees = witness.clone();
    let processor = events.processor("p").handle(move |_, number: u64| sees.see(number, || ())).unwrap();
    (0..5_000).for_each(|number| processor.post(number).unwrap());
    let report = processor.stop(DEADLINE);
    assert_eq!((report.stopping, report.returned.len()), (Stopping::Stopped, 0));
    assert_eq!(witness.seen(), 5_000);
}

/// The original's stop returned before the handler had, if the mailbox was empty.
#[test]
fn a_stop_waits_for_the_event_in_the_handler() {
    let events = system(&[&[""]]);
    let (gate, porter) = door();
    let done = Arc::new(AtomicBool::new(false));
    let ends = done.clone();
    let processor = events
        .processor("p")
        .handle(move |_, (): ()| {
            gate.pass();
            ends.store(true, SeqCst);
        })
        .unwrap();
    processor.post(()).unwrap();
    porter.wait_for_arrival();
    let (stops, (tell, told)) = (processor.clone(), channel());
    let stopper = thread::spawn(move || {
        let report = stops.stop(Duration::ZERO);
        tell.send(()).unwrap();
        report
    });
    while !processor.is_stopped() {
        thread::yield_now();
    }
    assert!(told.try_recv().is_err(), "the handler still runs");
    porter.open();
    assert_eq!(stopper.join().unwrap().stopping, Stopping::Stopped);
    assert!(done.load(SeqCst), "the handler ended before the stop did");
}

/// The original accepted what was posted after a stop.
#[test]
fn after_a_stop_events_are_refused_and_the_id_is_free() {
    let events = system(&[&[""]]);
    let processor = events.processor("p").handle(|_, _: u32| ()).unwrap();
    let _ = processor.stop(DEADLINE);
    let refused = processor.post(7).unwrap_err();
    assert_eq!((refused.event, refused.reason), (7, Refusal::Stopped));
    assert_eq!(events.get::<u32>("p").unwrap_err(), LookupError::Unknown("p".to_owned()));
    assert_eq!(events.stop("p", DEADLINE).unwrap_err(), LookupError::Unknown("p".to_owned()));
    assert_eq!(processor.stop(DEADLINE).stopping, Stopping::Stopped, "a second stop finds nothing to do");
}

#[test]
fn when_the_time_to_drain_is_over_the_rest_is_given_back_in_order() {
    let events = system(&[&[""]]);
    let (gate, porter) = door();
    let handled = Arc::new(AtomicU64::new(0));
    let counts = handled.clone();
    let processor = events
        .processor("p")
        .handle(move |_, event: u32| {
            gate.pass();
            assert_eq!(counts.fetch_add(1, SeqCst), u64::from(event));
        })
        .unwrap();
    (0..5).for_each(|event| processor.post(event).unwrap());
    porter.wait_for_arrival();
    let (stops, stopped) = (processor.clone(), channel());
    thread::spawn(move || stopped.0.send(stops.stop(Duration::ZERO)).unwrap());
    while !processor.is_stopped() {
        thread::yield_now();
    }
    thread::sleep(Duration::from_millis(50)); // paced: the stopper passes its deadline of zero
    porter.open();
    // Whether it has passed it or not, each event is handled or comes back, in order.
    (0..4).for_each(|_| porter.open());
    let report = stopped.1.recv_timeout(DEADLINE).unwrap();
    assert_eq!(report.stopping, Stopping::Stopped);
    let handled = u32::try_from(handled.load(SeqCst)).unwrap();
    assert!(handled >= 1, "the one in the handler is waited for");
    assert_eq!(report.returned, (handled..5).collect::<Vec<_>>(), "what was not handled, all of it");
}

#[test]
fn a_handler_that_does_not_come_back_is_reported() {
    let config = EventsConfig { stop_grace: Duration::from_millis(10), ..EventsConfig::default() };
    let events = Events::start(config).unwrap();
    let (gate, porter) = door();
    let processor = events.processor("p").handle(move |_, _: u32| gate.pass()).unwrap();
    processor.post(1).unwrap();
    porter.wait_for_arrival();
    assert_eq!(processor.stop(Duration::ZERO).stopping, Stopping::StillRunning);
    let report = events.shutdown(Duration::ZERO);
    assert_eq!(report.still_running, 1);
    porter.open();
}

/// An event that says when it goes.
struct TellsItsEnd(u32, Sender<u32>);

impl Drop for TellsItsEnd {
    fn drop(&mut self) {
        let _ = self.1.send(self.0);
    }
}

#[test]
fn a_handler_that_comes_back_after_the_shutdown_leaves_nothing_behind() {
    let config = EventsConfig { stop_grace: Duration::from_millis(10), ..EventsConfig::default() };
    let events = Events::start(config).unwrap();
    let (gate, porter) = door();
    let (tell, dropped) = channel();
    let processor = events.processor("p").handle(move |_, _: TellsItsEnd| gate.pass()).unwrap();
    (0..4).for_each(|number| processor.post(TellsItsEnd(number, tell.clone())).unwrap());
    porter.wait_for_arrival();
    let report = events.shutdown(Duration::ZERO);
    assert_eq!(report.still_running, 1);
    let number = |event: &(dyn std::any::Any + Send)| event.downcast_ref::<TellsItsEnd>().unwrap().0;
    let returned: Vec<u32> = report.returned.iter().map(|returned| number(&*returned.event)).collect();
    assert_eq!(returned, [1, 2, 3]);
    drop(report);
    porter.open();
    let mut ended: Vec<u32> = (0..4).map(|_| dropped.recv_timeout(DEADLINE).expect("none is kept")).collect();
    ended.sort_unstable();
    assert_eq!(ended, [0, 1, 2, 3]);
    drop(processor);
}

#[test]
fn what_a_stop_did_not_wait_for_is_given_back_by_a_later_one_and_counts_as_done() {
    let config = EventsConfig { stop_grace: Duration::ZERO, ..EventsConfig::default() };
    let events = Events::start(config).unwrap();
    let (gate, porter) = door();
    let processor = events.processor("p").handle(move |_, _: u32| gate.pass()).unwrap();
    (0..4).for_each(|event| processor.post(event).unwrap());
    porter.wait_for_arrival();
    let early = processor.stop(Duration::ZERO);
    assert_eq!((early.stopping, early.returned), (Stopping::StillRunning, Vec::new()));
    porter.open();
    let late = processor.stop(DEADLINE);
    assert_eq!((late.stopping, late.returned), (Stopping::Stopped, vec![1, 2, 3]));
    assert!(events.wait_quiet(DEADLINE));
    let account = events.snapshot().account;
    assert_eq!((account.done, account.outstanding), (4, 0));
}

/// Post against stop, from several threads: each accepted event is handled or given back, never both, never neither.
#[test]
fn every_event_that_was_accepted_is_handled_or_comes_back() {
    let events = system(&[&[""], &[""]]);
    for round in 0..200 {
        let handled = Arc::new(AtomicU64::new(0));
        let counts = handled.clone();
        let processor = events
            .processor("p")
            .handle(move |_, _: u32| {
                counts.fetch_add(1, SeqCst);
            })
            .unwrap();
        let posters: Vec<_> = (0..2)
            .map(|_| {
                let processor = processor.clone();
                thread::spawn(move || (0..).find(|event| processor.post(*event).is_err()).unwrap())
            })
            .collect();
        while handled.load(SeqCst) < round % 50 {
            thread::yield_now();
        }
        let drain = if round % 2 == 0 { Duration::ZERO } else { DEADLINE };
        let report = processor.stop(drain);
        let at_the_end = handled.load(SeqCst);
        let accepted: u32 = posters.into_iter().map(|poster| poster.join().unwrap()).sum();
        assert_eq!(report.stopping, Stopping::Stopped);
        assert_eq!(u64::from(accepted), at_the_end + report.returned.len() as u64, "round {round}");
        assert_eq!(handled.load(SeqCst), at_the_end, "nothing runs after the stop");
    }
}

/// Inside a handler a stop does not wait: two processors that stop each other at the same time would wait for each other.
#[test]
fn handlers_that_stop_each_other_do_not_wait_for_each_other() {
    let events = system(&[&[""], &[""]]);
    let barrier = Arc::new(std::sync::Barrier::new(2));
    let (tell, told) = channel();
    for (me, other) in [("a", "b"), ("b", "a")] {
        let (barrier, tell) = (barrier.clone(), tell.clone());
        let handler = move |context: &mut laneway_events::Context<'_, u32>, _: u32| {
            barrier.wait();
            tell.send(context.events().stop(other, DEADLINE).unwrap().stopping).unwrap();
            barrier.wait();
        };
        events.processor(me).handle(handler).unwrap();
    }
    events.post_to("a", 1_u32).unwrap();
    events.post_to("b", 1_u32).unwrap();
    for _ in 0..2 {
        assert_eq!(told.recv_timeout(DEADLINE), Ok(Stopping::Draining));
    }
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(events.snapshot().processors, 0);
}

#[test]
fn a_processor_that_stops_itself_handles_what_it_has_accepted_and_goes() {
    let events = system(&[&[""]]);
    let (gate, porter) = door();
    let (tell, told) = channel();
    let processor = events
        .processor("p")
        .handle(move |context, event: u32| {
            if event == 0 {
                gate.pass();
                context.stop();
                assert_eq!(context.me().post(9).unwrap_err().reason, Refusal::Stopped);
            }
            tell.send(event).unwrap();
        })
        .unwrap();
    (0..3).for_each(|event| processor.post(event).unwrap());
    porter.wait_for_arrival();
    porter.open();
    assert_eq!(
        told.iter().collect::<Vec<_>>(),
        [0, 1, 2],
        "the handler is gone after that, and its sender with it"
    );
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(events.snapshot().processors, 0);
}

/// Does something when it is told that it is over, and nothing with events.
struct AtTheEnd(Box<dyn FnMut() + Send>);

impl Handler<u32> for AtTheEnd {
    fn handle(&mut self, _: &mut Context<'_, u32>, _: u32) -> Handled<u32> {
        Handled::Done
    }

    fn stopped(&mut self) {
        (self.0)();
    }
}

/// Whom a handler stops at its end: known only when that one is registered.
type Later = Arc<OnceLock<ProcessorRef<u32>>>;

/// A handler that at its end stops somebody with all the time in the world, and tells what came of it.
fn stops_at_the_end(whom: &Later, tell: &Sender<Stopping>) -> AtTheEnd {
    let (whom, tell) = (whom.clone(), tell.clone());
    AtTheEnd(Box::new(move || {
        let stopping = whom.get().expect("registered by now").stop(Duration::MAX).stopping;
        let _ = tell.send(stopping);
    }))
}

/// The last words of a handler are spoken on the thread of whoever stops it, which waits there for nobody.
#[test]
fn a_handler_that_is_told_of_its_end_stops_itself_and_others_without_waiting() {
    let events = system(&[&[""]]);
    let (gate, porter) = door();
    let (tell, told) = channel();
    let (itself, child) = (Later::default(), Later::default());
    let alone = events.processor("alone").handler(stops_at_the_end(&itself, &tell)).unwrap();
    itself.set(alone.clone()).unwrap();
    let parent = events.processor("parent").handler(stops_at_the_end(&child, &tell)).unwrap();
    let busy = events.processor("child").handle(move |_, _: u32| gate.pass()).unwrap();
    child.set(busy.clone()).unwrap();
    assert!(events.wait_quiet(DEADLINE));
    busy.post(1).unwrap();
    porter.wait_for_arrival();
    let (ended, ends) = channel();
    thread::spawn(move || {
        let both = [alone.stop(DEADLINE).stopping, parent.stop(DEADLINE).stopping];
        ended.send(both).unwrap();
    });
    for _ in 0..2 {
        assert_eq!(told.recv_timeout(DEADLINE), Ok(Stopping::Draining));
    }
    assert_eq!(ends.recv_timeout(DEADLINE), Ok([Stopping::Stopped; 2]));
    assert!(busy.is_stopped());
    porter.open();
    assert!(events.wait_quiet(DEADLINE));
}

// ── shutdown ───────────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_shutdown_drains_or_gives_back() {
    for drain in [DEADLINE, Duration::ZERO] {
        let events = system(&[&["a"], &["b"]]);
        let handled = Arc::new(AtomicU64::new(0));
        for name in ["a", "b"] {
            let counts = handled.clone();
            let processor = events.processor(name).dispatcher(name).handle(move |_, _: u64| {
                counts.fetch_add(1, SeqCst);
            });
            let processor = processor.unwrap();
            (0..5_000).for_each(|number| processor.post(number).unwrap());
        }
        let report = events.shutdown(drain);
        assert!(report.account.balances());
        assert_eq!(report.account.done, handled.load(SeqCst));
        assert_eq!(handled.load(SeqCst) + report.returned.len() as u64, 10_000);
        if drain == DEADLINE {
            assert!(report.returned.is_empty());
        }
        for name in ["a", "b"] {
            let of = report.returned.iter().filter(|returned| &*returned.processor == name);
            let numbers: Vec<u64> = of.map(|returned| *returned.event.downcast_ref().unwrap()).collect();
            assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{name}: contiguous");
            assert!(numbers.last().is_none_or(|last| *last == 4_999));
        }
    }
}

/// A post into a mailbox that has something in it does not ask the engine, which is the one that knows of the end.
#[test]
fn what_is_accepted_while_a_shutdown_begins_is_handled_or_given_back() {
    for lap in 0..40 {
        let events = system(&[&[""], &[""]]);
        let handled = Arc::new(AtomicU64::new(0));
        let counts = handled.clone();
        let count = move |_: &mut laneway_events::Context<'_, u64>, _: u64| {
            counts.fetch_add(1, SeqCst);
        };
        let processor = events.processor("p").queue_size(1_000_000).handle(count).unwrap();
        let post_until_the_end = || {
            let processor = processor.clone();
            thread::spawn(move || {
                let refused =
                    (0..).find_map(|number| processor.post(number).err().map(|refused| (number, refused)));
                let (accepted, refused) = refused.expect("it ends");
                assert_ne!(refused.reason, Refusal::DispatcherFull);
                (accepted, refused.reason)
            })
        };
        let posters = [post_until_the_end(), post_until_the_end()];
        while handled.load(SeqCst) < lap * 10 {
            thread::yield_now();
        }
        let report = events.shutdown(if lap % 2 == 0 { Duration::ZERO } else { DEADLINE });
        let accepted: u64 = posters.into_iter().map(|poster| poster.join().unwrap().0).sum();
        assert_eq!(accepted, handled.load(SeqCst) + report.returned.len() as u64, "lap {lap}");
        assert_eq!(report.account.done, handled.load(SeqCst), "lap {lap}");
    }
}

/// What a shutdown gives back is never handled: whoever waited for those mailboxes to be empty would wait for ever.
#[test]
fn handlers_that_stop_each_other_at_the_end_do_not_hold_up_a_shutdown() {
    let events = system(&[&[""]]);
    let (gate, porter) = door();
    let (tell, told) = channel();
    let (left, right) = (Later::default(), Later::default());
    let first = events.processor("left").handler(stops_at_the_end(&right, &tell)).unwrap();
    let second = events.processor("right").handler(stops_at_the_end(&left, &tell)).unwrap();
    let keeper = events.processor("keeper").handle(move |_, (): ()| gate.pass()).unwrap();
    left.set(first.clone()).unwrap();
    right.set(second.clone()).unwrap();
    assert!(events.wait_quiet(DEADLINE));
    keeper.post(()).unwrap();
    porter.wait_for_arrival();
    first.post(1).unwrap();
    second.post(2).unwrap();
    let (ended, ends) = channel();
    thread::spawn(move || ended.send(events.shutdown(Duration::ZERO)).unwrap());
    while !matches!(keeper.post(()), Err(refused) if refused.reason == Refusal::ShutDown) {
        thread::yield_now();
    }
    porter.open();
    let report = ends.recv_timeout(DEADLINE).expect("the shutdown is not held up");
    assert!(report.account.balances());
    for _ in 0..2 {
        assert_eq!(told.recv_timeout(DEADLINE), Ok(Stopping::Draining));
    }
}

/// In the original a shutdown joined its threads while it held the lock that registration needs.
#[test]
fn a_handler_that_registers_during_a_shutdown_is_refused_and_nobody_waits() {
    let events = system(&[&[""], &[""]]);
    let (gate, porter) = door();
    let (tell, told) = channel();
    let sink = events.processor("sink").handle(|_, (): ()| ()).unwrap();
    let processor = events
        .processor("p")
        .handle(move |context, (): ()| {
            gate.pass();
            let events = context.events();
            let registered = events.processor("late").handle(|_, (): ()| ()).map(drop);
            let posted = context.me().post(()).map_err(|refused| refused.reason);
            let scheduled = events.schedule(&context.me(), Duration::ZERO, ()).map(drop);
            tell.send((registered, posted, scheduled.map_err(|refused| refused.reason))).unwrap();
        })
        .unwrap();
    processor.post(()).unwrap();
    porter.wait_for_arrival();
    let handle = events.handle();
    let shutdown = thread::spawn(move || events.shutdown(DEADLINE));
    // The engine is closed last.
    while !matches!(sink.post(()), Err(refused) if refused.reason == Refusal::ShutDown) {
        thread::yield_now();
    }
    porter.open();
    let results = told.recv_timeout(DEADLINE).expect("the handler is not held up");
    let wanted = (Err(RegisterError::ShutDown), Err(Refusal::ShutDown), Err(ScheduleRefusal::ShutDown));
    assert_eq!(results, wanted);
    let report = shutdown.join().unwrap();
    assert!(report.returned.is_empty() && report.account.outstanding == 0);
    assert_eq!(handle.processor("q").handle(|_, (): ()| ()).unwrap_err(), RegisterError::ShutDown);
}

/// The original never ended its scheduler.
#[test]
fn a_shutdown_cancels_what_is_scheduled() {
    let events = system(&[&[""]]);
    let processor = events.processor("p").handle(|_, (): ()| ()).unwrap();
    let later = events.schedule(&processor, Duration::from_secs(3_600), ()).unwrap();
    let each = events.schedule_each(&processor, Duration::from_secs(3_600), || ()).unwrap();
    assert_eq!(events.snapshot().schedules, 2);
    let _ = events.shutdown(DEADLINE);
    assert_eq!((later.end(), each.end()), (Some(ScheduleEnd::Cancelled), Some(ScheduleEnd::Cancelled)));
    assert!(!later.cancel(), "it has ended already");
}

/// Handlers that hold handles to the system, and processors that hold each other, are let go of.
#[test]
fn a_system_that_is_shut_down_leaves_nothing_behind() {
    let alive = Arc::new(());
    let events = system(&[&[""], &[""]]);
    let first = {
        let alive = alive.clone();
        let handle = events.handle();
        events.processor("a").handle(move |_, _: u32| drop((alive.clone(), handle.clone()))).unwrap()
    };
    let (second, other) = (alive.clone(), first.clone());
    let held =
        events.processor("b").handle(move |_, event: u32| drop((second.clone(), other.post(event)))).unwrap();
    let (third, scheduled) = (alive.clone(), events.processor("c").handle(|_, _: Arc<()>| ()).unwrap());
    let _later = events.schedule(&scheduled, Duration::from_secs(3_600), third).unwrap();
    (0..100).for_each(|event| held.post(event).unwrap());
    let _ = events.shutdown(DEADLINE);
    // The references live on; what they led to does not.
    let mut left = Arc::strong_count(&alive);
    for _ in 0..1_000 {
        if left == 1 {
            break;
        }
        thread::sleep(Duration::from_millis(1)); // paced: threads let go of the system when they have ended
        left = Arc::strong_count(&alive);
    }
    assert_eq!(left, 1);
    drop((first, held, scheduled));
}
