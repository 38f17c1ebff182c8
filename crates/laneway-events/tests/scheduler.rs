//! The scheduler: each schedule ends once and in one way, and a cancel that says so keeps its word.

mod witness;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc::channel,
    },
    thread,
    time::{Duration, Instant},
};

use laneway_events::{Events, EventsConfig, ScheduleEnd, ScheduleRefusal};
use witness::{DEADLINE, door, reporting, system};

/// A thread of the scheduler counts off what has ended by firing after it has told who waits for that.
fn wait_until_none_is_left(events: &Events) {
    let began = Instant::now();
    while events.snapshot().schedules > 0 {
        assert!(began.elapsed() < DEADLINE, "one is never counted off");
        thread::yield_now();
    }
}

#[test]
fn an_event_is_posted_when_it_is_due_and_not_before() {
    let events = system(&[&[""]]);
    let (tell, told) = channel();
    let processor = events.processor("p").handle(move |_, event: u32| tell.send(event).unwrap()).unwrap();
    let (began, delay) = (Instant::now(), Duration::from_millis(30));
    let schedule = events.schedule(&processor, delay, 7).unwrap();
    assert_eq!(schedule.wait(DEADLINE), Some(ScheduleEnd::Posted));
    assert!(began.elapsed() >= delay);
    assert_eq!(told.recv_timeout(DEADLINE), Ok(7));
    assert!(!schedule.cancel());
    assert_eq!((schedule.posted(), schedule.missed()), (1, 0));
    wait_until_none_is_left(&events);
}

#[test]
fn what_is_due_earlier_is_posted_earlier_whenever_it_was_scheduled() {
    let config = EventsConfig { scheduler_pool_size: 1, ..EventsConfig::default() };
    let events = Events::start(config).unwrap();
    let (tell, told) = channel();
    let processor = events.processor("p").handle(move |_, event: u32| tell.send(event).unwrap()).unwrap();
    let later = Duration::from_millis(40);
    for (event, factor) in [(3_u32, 3), (1, 1), (2, 2)] {
        events.schedule_to(processor.id(), later * factor, event).unwrap();
    }
    let order: Vec<_> = (0..3).map(|_| told.recv_timeout(DEADLINE).unwrap()).collect();
    assert_eq!(order, [1, 2, 3]);
}

#[test]
fn a_cancel_that_says_so_means_that_it_never_fires() {
    let events = system(&[&[""]]);
    let handled = Arc::new(AtomicU64::new(0));
    let counts = handled.clone();
    let processor = events
        .processor("p")
        .handle(move |_, _: Arc<()>| {
            counts.fetch_add(1, SeqCst);
        })
        .unwrap();
    let alive = Arc::new(());
    let (mut cancelled, mut posted) = (0, 0);
    for round in 0..2_000_u64 {
        // Due about when it is cancelled.
        let schedule = events.schedule(&processor, Duration::from_nanos(round * 50), alive.clone()).unwrap();
        match (schedule.cancel(), schedule.wait(DEADLINE)) {
            (true, Some(ScheduleEnd::Cancelled)) => cancelled += 1,
            (false, Some(ScheduleEnd::Posted)) => posted += 1,
            other => panic!("{other:?}"),
        }
        assert!(!schedule.cancel(), "the second time it has ended");
    }
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(handled.load(SeqCst), posted);
    assert_eq!(cancelled + posted, 2_000);
    assert_eq!(events.snapshot().schedules, 0);
}

#[test]
fn a_schedule_that_is_cancelled_lets_go_of_its_event_at_once() {
    let events = system(&[&[""]]);
    let processor = events.processor("p").handle(|_, _: Arc<()>| ()).unwrap();
    let alive = Arc::new(());
    let far = Duration::from_secs(3_600);
    let schedules: Vec<_> =
        (0..1_000).map(|_| events.schedule(&processor, far, alive.clone()).unwrap()).collect();
    assert_eq!(Arc::strong_count(&alive), 1_001);
    assert!(schedules.iter().all(|schedule| schedule.cancel()));
    assert_eq!(Arc::strong_count(&alive), 1);
    assert_eq!(events.snapshot().schedules, 0);
}

#[test]
fn a_processor_that_is_gone_or_full_is_an_end_of_its_own() {
    let events = system(&[&[""]]);
    let soon = Duration::from_millis(1);
    let gone = events.processor("gone").handle(|_, _: u32| ()).unwrap();
    let _ = gone.stop(DEADLINE);
    let by_reference = events.schedule(&gone, soon, 1).unwrap();
    let by_id = events.schedule_to("gone", soon, 1_u32).unwrap();
    assert_eq!(by_reference.wait(DEADLINE), Some(ScheduleEnd::Unregistered));
    assert_eq!(by_id.wait(DEADLINE), Some(ScheduleEnd::Unregistered));

    let (gate, porter) = door();
    let full = events.processor("full").queue_size(1).handle(move |_, _: u32| gate.pass()).unwrap();
    full.post(1).unwrap();
    porter.wait_for_arrival();
    let schedule = events.schedule(&full, soon, 2).unwrap();
    assert_eq!(schedule.wait(DEADLINE), Some(ScheduleEnd::QueueFull));
    assert_eq!(schedule.missed(), 1);

    // A rate misses those ticks and goes on.
    let rate = events.schedule_each(&full, soon, || 3).unwrap();
    while rate.missed() < 3 {
        thread::yield_now();
    }
    assert_eq!(rate.end(), None);
    porter.open();
    porter.wait_for_arrival();
    assert!(rate.posted() >= 1);
    assert!(rate.cancel());
    // What the rate has posted is handled.
    (0..3).for_each(|_| porter.open());
    let _ = full.stop(DEADLINE);
}

#[test]
fn a_rate_ticks_until_it_is_cancelled_and_not_once_more() {
    let events = system(&[&[""]]);
    let ticks = Arc::new(AtomicU64::new(0));
    let counts = ticks.clone();
    let processor = events
        .processor("p")
        .handle(move |_, _: u64| {
            counts.fetch_add(1, SeqCst);
        })
        .unwrap();
    for _ in 0..50 {
        let mut number = 0;
        let make = move || {
            number += 1;
            number
        };
        let rate = events.schedule_each(&processor, Duration::from_micros(50), make).unwrap();
        while rate.posted() < 5 {
            thread::yield_now();
        }
        assert!(rate.cancel());
        let posted = rate.posted();
        assert!(events.wait_quiet(DEADLINE));
        let handled = ticks.swap(0, SeqCst);
        assert_eq!(handled, posted);
        assert_eq!((rate.posted(), rate.end()), (posted, Some(ScheduleEnd::Cancelled)));
    }
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(ticks.load(SeqCst), 0, "nothing has come after the cancel");
    assert_eq!(events.snapshot().schedules, 0);
}

#[test]
fn a_rate_ends_with_its_processor_and_a_maker_that_panics_ends_its_rate() {
    let (events, reports) = reporting(&[&[""]]);
    let processor = events.processor("p").handle(|_, _: u32| ()).unwrap();
    let broken =
        events.schedule_each(&processor, Duration::from_micros(50), || -> u32 { panic!("made nothing") });
    assert_eq!(broken.unwrap().wait(DEADLINE), Some(ScheduleEnd::Cancelled));
    assert!(reports.recv_timeout(DEADLINE).unwrap().to_string().contains("panicked"));
    let rate = events.schedule_each(&processor, Duration::from_micros(50), || 1).unwrap();
    let _ = processor.stop(DEADLINE);
    assert_eq!(rate.wait(DEADLINE), Some(ScheduleEnd::Unregistered));
    wait_until_none_is_left(&events);
}

#[test]
fn there_is_a_bound_on_schedules_and_what_is_refused_comes_back() {
    let config = EventsConfig { max_schedules: 2, ..EventsConfig::default() };
    let events = Events::start(config).unwrap();
    let processor = events.processor("p").handle(|_, _: String| ()).unwrap();
    let far = Duration::from_secs(3_600);
    let first = events.schedule(&processor, far, "first".to_owned()).unwrap();
    events.schedule(&processor, far, "second".to_owned()).unwrap();
    let refused = events.schedule(&processor, far, "third".to_owned()).unwrap_err();
    assert_eq!((refused.event.as_str(), refused.reason), ("third", ScheduleRefusal::TooMany));
    assert!(first.cancel());
    events.schedule(&processor, Duration::MAX, "third".to_owned()).expect("there is room again");
    let none = events.schedule_each(&processor, Duration::ZERO, String::new).unwrap_err();
    assert_eq!(none, ScheduleRefusal::NoInterval);
}
