//! Processors: posting, handlers that change, asking, looking up; and the mistakes that the original of document 001 made there.

mod witness;

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc::channel,
    },
    thread,
    time::Duration,
};

use laneway_events::{
    AskError, Become, Context, Handled, Handler, LookupError, NotPostedReason, Refusal, RegisterError, Reply,
    Report,
};
use witness::{DEADLINE, Witness, door, reporting, system};

#[test]
fn events_are_handled_one_at_a_time_and_in_order() {
    let events = system(&[&[""], &[""], &[""]]);
    let witness = Arc::new(Witness::default());
    let sees = witness.clone();
    let processor = events
        .processor("p")
        .queue_size(10_000)
        .handle(move |_, number: u64| sees.see(number, || ()))
        .unwrap();
    (0..10_000).for_each(|number| processor.post(number).expect("room for all"));
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(witness.seen(), 10_000);
    assert_eq!(events.snapshot().account.done, 10_000);
}

#[test]
fn posting_never_blocks_and_gives_back_what_it_does_not_take() {
    let events = system(&[&[""]]);
    let (gate, porter) = door();
    let processor = events.processor("p").queue_size(3).handle(move |_, _: String| gate.pass()).unwrap();
    processor.post("in the handler".to_owned()).unwrap();
    porter.wait_for_arrival();
    // The queue size counts what is in the handler, too.
    processor.post("waits".to_owned()).unwrap();
    processor.post("waits, too".to_owned()).unwrap();
    let refused = processor.post("too much".to_owned()).expect_err("full");
    assert_eq!((refused.event.as_str(), refused.reason), ("too much", Refusal::QueueFull));
    assert_eq!((processor.depth(), processor.queue_size()), (3, 3));
    (0..3).for_each(|_| porter.open());
    assert!(events.wait_quiet(DEADLINE));
    processor.post("room again".to_owned()).unwrap();
    porter.open();
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(processor.depth(), 0);
}

#[test]
fn a_dispatcher_that_is_full_refuses_although_the_mailbox_has_room() {
    use laneway_events::{Events, EventsConfig};
    let config = EventsConfig { dispatcher_capacity: 2, ..EventsConfig::assigned([["a", "b"]]) };
    let events = Events::start(config).unwrap();
    let (gate, porter) = door();
    let slow = events.processor("slow").dispatcher("a").handle(move |_, (): ()| gate.pass()).unwrap();
    let other = events.processor("other").dispatcher("b").handle(|_, (): ()| ()).unwrap();
    slow.post(()).unwrap();
    porter.wait_for_arrival();
    slow.post(()).unwrap();
    assert_eq!(slow.post(()).unwrap_err().reason, Refusal::DispatcherFull);
    assert_eq!(slow.depth(), 2, "the place that was taken for it is free again");
    other.post(()).expect("another dispatcher has room");
    (0..2).for_each(|_| porter.open());
    assert!(events.wait_quiet(DEADLINE));
}

#[test]
fn an_unmatched_event_is_reported_and_counted() {
    let (events, reports) = reporting(&[&[""]]);
    let even = |_: &mut Context<'_, u32>, event: u32| match event % 2 {
        0 => Handled::Done,
        _ => Handled::Unmatched(event),
    };
    let processor = events.processor("even").handle(even).unwrap();
    (0..4).for_each(|event| processor.post(event).unwrap());
    assert!(events.wait_quiet(DEADLINE));
    let unmatched: Vec<u32> = reports
        .try_iter()
        .map(|report| match report {
            Report::Unmatched { processor, event, event_type } => {
                assert_eq!((&*processor, event_type), ("even", "u32"));
                *event.downcast().unwrap()
            }
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(unmatched, [1, 3]);
    assert_eq!(events.snapshot().unmatched, 2);
}

/// The original posts `(event, error)` to the processor itself: endless if it always throws.
#[test]
fn a_handler_that_always_fails_does_not_feed_itself() {
    let (events, reports) = reporting(&[&[""]]);
    let calls = Arc::new(AtomicU64::new(0));
    let counts = calls.clone();
    let processor = events
        .processor("p")
        .handle(move |_, event: u32| {
            counts.fetch_add(1, SeqCst);
            if event == 0 { panic!("thrown") } else { Err("said") }
        })
        .unwrap();
    processor.post(0).unwrap();
    processor.post(1).unwrap();
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(calls.load(SeqCst), 2, "each event is tried once");
    let errors: Vec<String> = reports.try_iter().map(|report| report.to_string()).collect();
    assert_eq!(errors, ["processor \"p\" failed: panicked: thrown", "processor \"p\" failed: said"]);
    let snapshot = events.snapshot();
    assert_eq!((snapshot.account.failed, snapshot.account.done), (2, 0));
    assert_eq!(snapshot.dispatchers[0].panics, 1);
    assert_eq!(processor.depth(), 0);
    processor.post(2).expect("the processor goes on");
    assert!(events.wait_quiet(DEADLINE));
}

// ── become and unbecome ────────────────────────────────────────────────────────────────────────────────────────────────

/// Tells which handler got which event.
fn said(
    name: &'static str,
    tell: &std::sync::mpsc::Sender<(&'static str, u32)>,
) -> impl FnMut(&mut Context<'_, u32>, u32) + Send + 'static {
    let tell = tell.clone();
    move |_, event| tell.send((name, event)).unwrap()
}

#[test]
fn handlers_are_stacked_and_taken_off_inside_a_handler() {
    let events = system(&[&[""]]);
    let (tell, told) = channel();
    let (base, upper) = (tell.clone(), tell);
    let processor = events
        .processor("p")
        .handle(move |context, event: u32| {
            base.send(("base", event)).unwrap();
            if event == 1 {
                assert!(!context.unbecome(), "the only handler stays");
                let upper = upper.clone();
                context.become_stacked(move |context, event| {
                    upper.send(("upper", event)).unwrap();
                    if event == 3 {
                        assert!(context.unbecome());
                    }
                });
                assert!(context.unbecome(), "what was just put on can be taken off");
                let upper = base.clone();
                context.become_stacked(move |context, event| {
                    upper.send(("second", event)).unwrap();
                    if event == 3 {
                        assert!(context.unbecome());
                    }
                });
            }
        })
        .unwrap();
    (0..5).for_each(|event| processor.post(event).unwrap());
    assert!(events.wait_quiet(DEADLINE));
    let told: Vec<_> = told.try_iter().collect();
    assert_eq!(told, [("base", 0), ("base", 1), ("second", 2), ("second", 3), ("base", 4)]);
}

/// The original stacks on the base handler even when told to replace it.
#[test]
fn a_handler_that_takes_the_place_of_the_first_one_replaces_it() {
    let events = system(&[&[""]]);
    let (tell, told) = channel();
    let processor = events.processor("p").handle(said("first", &tell)).unwrap();
    processor.post(1).unwrap();
    processor.request_become(said("instead", &tell), Become::Instead).unwrap();
    processor.post(2).unwrap();
    processor.request_unbecome().unwrap();
    processor.post(3).unwrap();
    assert!(events.wait_quiet(DEADLINE));
    let told: Vec<_> = told.try_iter().collect();
    assert_eq!(told, [("first", 1), ("instead", 2), ("instead", 3)], "there is nothing below it");
}

/// Requests from outside are in line with the events: what was accepted before them is handled by the old handler.
#[test]
fn requests_from_outside_keep_their_place_in_the_mailbox() {
    let events = system(&[&[""], &[""]]);
    let (tell, told) = channel();
    let (gate, porter) = door();
    let first = tell.clone();
    let processor = events
        .processor("p")
        .handle(move |_, event: u32| {
            if event == 0 {
                gate.pass();
            }
            first.send(("base", event)).unwrap();
        })
        .unwrap();
    processor.post(0).unwrap();
    porter.wait_for_arrival();
    processor.post(1).unwrap();
    processor.request_become(said("upper", &tell), Become::Stacked).unwrap();
    processor.post(2).unwrap();
    processor.request_unbecome().unwrap();
    processor.post(3).unwrap();
    porter.open();
    assert!(events.wait_quiet(DEADLINE));
    let told: Vec<_> = told.try_iter().collect();
    assert_eq!(told, [("base", 0), ("base", 1), ("upper", 2), ("base", 3)]);
}

#[test]
fn requests_from_outside_are_refused_as_events_are() {
    let events = system(&[&[""]]);
    let (gate, porter) = door();
    let processor = events.processor("p").queue_size(1).handle(move |_, (): ()| gate.pass()).unwrap();
    processor.post(()).unwrap();
    porter.wait_for_arrival();
    assert_eq!(processor.request_unbecome(), Err(Refusal::QueueFull));
    porter.open();
    assert!(events.wait_quiet(DEADLINE));
    let _ = processor.stop(DEADLINE);
    assert_eq!(processor.request_unbecome(), Err(Refusal::Stopped));
}

#[test]
fn changes_of_a_handler_that_fails_are_forgotten() {
    let (events, reports) = reporting(&[&[""]]);
    let (tell, told) = channel();
    let (base, upper) = (tell.clone(), tell);
    let processor = events
        .processor("p")
        .handle(move |context, event: u32| {
            base.send(("base", event)).unwrap();
            context.become_stacked(said("upper", &upper));
            match event {
                0 => panic!("thrown"),
                1 => Err("said"),
                _ => Ok(()),
            }
        })
        .unwrap();
    (0..4).for_each(|event| processor.post(event).unwrap());
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [("base", 0), ("base", 1), ("base", 2), ("upper", 3)]);
    assert_eq!(reports.try_iter().count(), 2);
}

// ── handlers of a type of their own ────────────────────────────────────────────────────────────────────────────────────

struct Counter {
    tell: std::sync::mpsc::Sender<String>,
    seen: u32,
}

impl Handler<u32> for Counter {
    fn started(&mut self, context: &mut Context<'_, u32>) {
        self.tell.send(format!("{} started", context.id())).unwrap();
    }

    fn handle(&mut self, _: &mut Context<'_, u32>, event: u32) -> Handled<u32> {
        self.seen += event;
        self.tell.send(format!("{}", self.seen)).unwrap();
        Handled::Done
    }

    fn stopped(&mut self) {
        self.tell.send(format!("stopped at {}", self.seen)).unwrap();
    }
}

/// In the original a processor that registered itself in its constructor got events before it had a handler.
#[test]
fn a_handler_is_started_before_its_first_event_and_stopped_after_its_last() {
    let events = system(&[&[""], &[""]]);
    let (tell, told) = channel();
    let counter = events.processor("counter").queue_size(1).handler(Counter { tell, seen: 0 }).unwrap();
    for event in [5, 6] {
        while counter.post(event).is_err() {
            thread::yield_now();
        }
    }
    let _ = counter.stop(DEADLINE);
    assert_eq!(told.iter().collect::<Vec<_>>(), ["counter started", "5", "11", "stopped at 11"]);
}

// ── looking up ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_processor_is_found_by_its_id_and_its_type() {
    let events = system(&[&[""]]);
    let (tell, told) = channel();
    let known = events.processor("known").handle(move |_, event: u32| tell.send(event).unwrap()).unwrap();
    assert_eq!(events.get::<u32>("known").unwrap(), known);
    events.post_to("known", 7_u32).unwrap();
    assert_eq!(told.recv_timeout(DEADLINE), Ok(7));
    let unknown = events.post_to("unknown", 8_u32).unwrap_err();
    assert_eq!(unknown.reason, NotPostedReason::Lookup(LookupError::Unknown("unknown".to_owned())));
    assert_eq!(unknown.event, 8);
    let wrong = events.post_to("known", "eight").unwrap_err();
    assert_eq!(wrong.to_string(), "processor \"known\" takes events of type u32, not &str");
    assert_eq!(events.ids().len(), 1);
}

/// In the original a processor could be put into a dispatcher's queue twice.
#[test]
fn an_id_belongs_to_one_processor_at_a_time() {
    let events = system(&[&[""]]);
    let first = events.processor("p").handle(|_, _: u32| ()).unwrap();
    let second = events.processor("p").handle(|_, _: u32| ()).unwrap_err();
    assert_eq!(second, RegisterError::DuplicateId("p".to_owned()));
    let _ = first.stop(DEADLINE);
    events.processor("p").handle(|_, _: u32| ()).expect("the id is free again");
    assert_eq!(
        events.processor("q").queue_size(0).handle(|_, _: u32| ()).unwrap_err(),
        RegisterError::QueueSize(0)
    );
    let (one, other) = (
        events.anonymous().handle(|_, _: u32| ()).unwrap(),
        events.anonymous().handle(|_, _: u32| ()).unwrap(),
    );
    assert_ne!(one.id(), other.id());
}

#[test]
fn a_child_knows_its_parent() {
    let events = system(&[&[""]]);
    let (tell, told) = channel();
    let parent = events.processor("parent").handle(move |_, event: &str| tell.send(event).unwrap()).unwrap();
    let child = events
        .processor("child")
        .parent(&parent)
        .handle(|context, (): ()| {
            let parent = context.parent().expect("it has one");
            assert_eq!(parent.id(), "parent");
            assert!(parent.typed::<u8>().is_none(), "its events are texts");
            context.parent_of::<&str>().unwrap().post("from the child").unwrap();
        })
        .unwrap();
    child.post(()).unwrap();
    assert_eq!(told.recv_timeout(DEADLINE), Ok("from the child"));
}

// ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

enum Question {
    Double(u32, Reply<u32>),
    Ignore(Reply<u32>),
    Keep(Reply<u32>),
}

#[test]
fn a_question_is_answered_or_it_is_known_that_it_will_not_be() {
    let events = system(&[&[""]]);
    let mut kept = Vec::new();
    let oracle = events
        .processor("oracle")
        .handle(move |_, question| match question {
            Question::Double(number, reply) => {
                reply.send(number * 2);
            }
            Question::Ignore(reply) => drop(reply),
            Question::Keep(reply) => kept.push(reply),
        })
        .unwrap();
    assert_eq!(oracle.ask(DEADLINE, |reply| Question::Double(21, reply)).unwrap(), 42);
    assert!(matches!(oracle.ask(DEADLINE, Question::Ignore), Err(AskError::Unanswered)));
    let short = Duration::from_millis(1);
    assert!(matches!(oracle.ask(short, Question::Keep), Err(AskError::TimedOut(limit)) if limit == short));
    let _ = oracle.stop(DEADLINE);
    let Err(AskError::Refused(refused)) = oracle.ask(DEADLINE, Question::Keep) else {
        panic!("it has stopped")
    };
    assert_eq!(refused.reason, Refusal::Stopped);
}

#[test]
fn a_processor_that_asks_itself_is_told_so_at_once() {
    let events = system(&[&[""]]);
    let (tell, told) = channel();
    let narcissus = events
        .processor("narcissus")
        .handle(move |context, event: Option<Reply<()>>| {
            if event.is_none() {
                tell.send(context.me().ask(DEADLINE, Some)).unwrap();
            }
        })
        .unwrap();
    narcissus.post(None).unwrap();
    assert!(matches!(told.recv_timeout(DEADLINE), Ok(Err(AskError::Itself))));
}

// ── handlers that use the system ───────────────────────────────────────────────────────────────────────────────────────

/// Pitfall 001.9: in the document's design the handler under lock A registers on B while B's handler registers on A.
#[test]
fn pitfall_001_9_handlers_register_post_and_stop_on_each_others_dispatchers() {
    let events = system(&[&["a"], &["b"]]);
    let (barrier, (tell, told)) = (Arc::new(Barrier::new(2)), channel());
    for (here, there) in [("a", "b"), ("b", "a")] {
        let (barrier, tell) = (barrier.clone(), tell.clone());
        let processor = events
            .processor(here)
            .dispatcher(here)
            .handle(move |context, round: u32| {
                barrier.wait();
                let tell = tell.clone();
                let id = format!("{here}-{round}");
                let child =
                    context.events().processor(id).dispatcher(there).handle(move |context, (): ()| {
                        tell.send(()).unwrap();
                        context.stop();
                    });
                child.unwrap().post(()).unwrap();
            })
            .unwrap();
        (0..100).for_each(|round| processor.post(round).unwrap());
    }
    (0..200).for_each(|_| told.recv_timeout(DEADLINE).expect("no deadlock"));
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(events.snapshot().processors, 2, "the children have gone");
}

/// The original's registration had to wait for the lock that a running handler held, for more than a second.
#[test]
fn registration_does_not_wait_for_a_running_handler() {
    let events = system(&[&[""]]);
    let (gate, porter) = door();
    let busy = events.processor("busy").handle(move |_, (): ()| gate.pass()).unwrap();
    busy.post(()).unwrap();
    porter.wait_for_arrival();
    let other =
        events.processor("other").handle(|_, (): ()| ()).expect("registered while the only thread is busy");
    other.post(()).expect("and posted to");
    porter.open();
    assert!(events.wait_quiet(DEADLINE));
}
